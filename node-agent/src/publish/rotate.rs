//! A secret that changed while its volume is mounted: tried, and used from then on if it opens the source.

use super::{Volumes, credentials, source_refusal};
use crate::supervisor::Mount;
use link::broker::MountId;
use link::{Refusal, RefusalKind};
use std::collections::BTreeMap;
use std::sync::Arc;

impl Volumes {
    /// Returns when the new secret is in force. Nothing changes while it is tried, nor if it is refused.
    pub async fn rotate(&self, id: MountId, secrets: &BTreeMap<String, String>) -> Result<(), Refusal> {
        let mount = self.get(id)?;
        let fresh = credentials(secrets, false, |_| None)?;
        let scope = &mount.scope;
        if scope.asked.has(&fresh) {
            return Ok(());
        }
        let same_identity = mount.spec.is_in(&scope.id, &fresh, self.numbers.scope_key());
        if !same_identity {
            // What the new keys bring in is seen by every volume of the scope.
            one_namespace(&mount, &self.mounts())?;
        }
        let source = store::open(&mount.spec, &fresh, self.limits.clone(), self.observer.clone())
            .map_err(|e| source_refusal(&e))?;
        self.check(&mount.spec, &source).await?;
        match same_identity {
            true => scope.asked.replace(fresh),
            false => scope.asked.rotate(fresh),
        }
        .map_err(|e| source_refusal(&e))?;
        mount.rotated(secrets);
        tracing::info!(mount = %id, volume = %mount.spec.id, "a changed secret is in use");
        Ok(())
    }
}

fn one_namespace(mount: &Mount, all: &[Arc<Mount>]) -> Result<(), Refusal> {
    let namespace = |m: &Mount| m.pod.as_ref().map(|pod| pod.namespace.clone());
    let shared = all.iter().any(|m| m.scope.id == mount.scope.id && namespace(m) != namespace(mount));
    match shared {
        false => Ok(()),
        true => Err(Refusal::new(
            RefusalKind::Denied,
            "pods of another namespace read the same source with the same old keys: restart the pod to use the new secret",
        )),
    }
}
