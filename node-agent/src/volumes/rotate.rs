//! A secret that changed while its volume is mounted: tried, and used from then on if it opens the source.

use super::{Volumes, credentials};
use crate::volumes::scope::Scope;
use link::broker::MountId;
use link::{Refusal, RefusalKind};
use std::collections::BTreeMap;
use volume::ScopeId;

impl Volumes {
    /// Returns when the new secret is in force. Nothing changes while it is tried, nor if it is refused.
    pub async fn rotate(&self, id: MountId, secrets: &BTreeMap<String, String>) -> Result<(), Refusal> {
        let mount = self.get(id)?;
        let fresh = credentials(secrets, false, |_| None)?;
        let scope = &mount.scope;
        if scope.source.access.has(&fresh) {
            return Ok(());
        }
        // Where to ask is no credential: what another place says must not be shown as this one's.
        if !scope.source.access.asks_where(&fresh) {
            return Err(Refusal::new(
                RefusalKind::Denied,
                "the secret says another place of HDFS or Kerberos (core-site.xml, hdfs-site.xml, krb5.conf): restart the pod to use it",
            ));
        }
        let same_identity = mount.spec.is_in(&scope.id, &fresh, self.opener.numbers.scope_key());
        if !same_identity {
            self.one_namespace(mount.namespace(), &scope.id)?;
        }
        self.opener.check(&mount.spec, &fresh).await?;
        match same_identity {
            true => scope.source.replace(fresh),
            false => {
                // A publish meanwhile is either seen here, or sees that the scope is rotated.
                let _place = self.scopes.enter(&scope.id).await;
                self.one_namespace(mount.namespace(), &scope.id)?;
                scope.source.rotate(fresh);
            }
        }
        mount.rotated(secrets);
        tracing::info!(mount = %id, volume = %mount.spec.id, "a changed secret is in use");
        Ok(())
    }

    /// For a mount that is on its way here: the keys that name this scope may not be those that it is asked with.
    pub(super) fn may_join(&self, scope: &Scope, namespace: Option<&str>) -> Result<(), Refusal> {
        match scope.source.is_rotated() {
            false => Ok(()),
            true => self.one_namespace(namespace, &scope.id),
        }
    }

    /// What rotated keys bring in is seen by every volume of the scope.
    fn one_namespace(&self, namespace: Option<&str>, scope: &ScopeId) -> Result<(), Refusal> {
        match self.mounts.are_of(namespace, scope, |entry| (&entry.mount.scope.id, entry.mount.namespace())) {
            true => Ok(()),
            false => Err(Refusal::new(
                RefusalKind::Denied,
                "pods of another namespace read the same source with the same old keys: restart the pod with the new secret",
            )),
        }
    }
}
