//! What people do with staged files: they bring what waits into the store, also where no mount has the volume.

use super::{Volumes, understand};
use crate::lock::lock;
use crate::staging::Area;
use link::{Refusal, RefusalKind};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use volume::{ScopeId, VolumeId};

/// Scopes that uploads use, and how many of each.
#[derive(Default)]
pub(super) struct Uploads(Mutex<HashMap<ScopeId, usize>>);

impl Uploads {
    pub(super) fn uses(&self, id: &ScopeId) -> bool {
        lock(&self.0).contains_key(id)
    }

    fn begin(&self, id: &ScopeId) {
        *lock(&self.0).entry(id.clone()).or_default() += 1;
    }

    fn end(&self, id: &ScopeId) {
        let mut used = lock(&self.0);
        if let Some(times) = used.get_mut(id) {
            *times -= 1;
            if *times == 0 {
                used.remove(id);
            }
        }
    }
}

/// An area that can be sent from. It stays open for as long as this lives.
pub(crate) struct Sendable {
    area: Option<Arc<Area>>,
    /// Of one that no mount has open: its scope is closed with it.
    using: Option<Using>,
}

impl Sendable {
    pub(crate) fn area(&self) -> &Arc<Area> {
        self.area.as_ref().expect("it is taken by drop alone")
    }
}

impl Drop for Sendable {
    fn drop(&mut self) {
        // Before its scope, which is written out by whoever closes it last.
        self.area = None;
        self.using = None;
    }
}

struct Using {
    volumes: Arc<Volumes>,
    scope: ScopeId,
}

impl Drop for Using {
    fn drop(&mut self) {
        self.volumes.uploads.end(&self.scope);
        self.volumes.release_scope(&self.scope);
    }
}

impl Volumes {
    /// Of the disk of the staging areas.
    pub(crate) fn staging_limit(&self) -> Duration {
        self.config().disk_timeout()
    }

    /// The area of this volume, opened with these secrets if no mount has it: as its last publish described it.
    pub(crate) async fn sendable(
        self: &Arc<Self>,
        id: &VolumeId,
        secrets: &BTreeMap<String, String>,
    ) -> Result<Sendable, Refusal> {
        if self.leaving.load(Ordering::Acquire) {
            let why = "the node agent is being stopped: ask its successor";
            return Err(Refusal::new(RefusalKind::Unavailable, why));
        }
        if let Some(area) = self.staging.open_area(id) {
            return Ok(Sendable { area: Some(area), using: None });
        }
        let described = self.staging.described(id, self.staging_limit()).await?;
        let spec = understand(&described.mount)?;
        if spec.id != *id {
            let why = format!("its description is of volume {}: publish {id} on this node again", spec.id);
            return Err(Refusal::new(RefusalKind::Internal, why));
        }
        self.may_serve(&spec)?;
        let credentials = self.opener.credentials(&spec, secrets, described.mount.environment)?;
        let scope = match self.staging.scope_of(&spec).await {
            Some(scope) => scope,
            None => spec.scope(&credentials, self.opener.numbers.scope_key()),
        };
        // A mount that still comes needs the area as it was.
        if let Some(left) = self.staging.may_come().filter(|_| described.scope != scope.to_string()) {
            let why = format!(
                "these credentials are others than those of the last pod, and a mount of it may still come to this agent, which \
                 has just started: try again in {} s",
                left.as_secs() + 1
            );
            return Err(Refusal::new(RefusalKind::Unavailable, why));
        }
        // From here on its scope stays open.
        self.uploads.begin(&scope);
        let using = Using { volumes: self.clone(), scope: scope.clone() };
        let scope = self.open_scope(scope, &spec, &credentials, true).await?;
        self.may_join(&scope, described.mount.namespace())?;
        let spec = self.config().workers.in_time(&spec);
        let area = self.staging.open(&spec, &scope, &self.opener.numbers).await?;
        area.describe(&described.mount).await;
        tracing::info!(volume = %id, "staged files are sent without a mount: a person has asked for it");
        Ok(Sendable { area: Some(area), using: Some(using) })
    }
}
