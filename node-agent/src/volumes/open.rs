//! From a volume's specification to the scope that it uses, and back.

use super::{Volumes, source_refusal};
use crate::source::credentials::CredentialedSource;
use crate::source::health::Health;
use crate::volumes::scope::Scope;
use cache::meta;
use link::{Refusal, RefusalKind};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{Access, Source, StoreError};
use volume::{Credentials, ScopeId, VolumeSpec};

/// How long a publish waits for the store that the volumes before have left.
const CLOSING_LIMIT: Duration = Duration::from_secs(5);
const CLOSING_LOOK: Duration = Duration::from_millis(20);

impl Volumes {
    /// The scope; opened if no volume uses it yet, and then checked against its source if `check`.
    pub(crate) async fn open_scope(
        &self,
        id: ScopeId,
        spec: &VolumeSpec,
        credentials: &Credentials,
        check: bool,
    ) -> Result<Arc<Scope>, Refusal> {
        let spec = &self.config.workers.in_time(spec);
        let patience = spec.parameters.store_timeout;
        let mut place = self.scopes.enter(&id).await;
        if let Some(scope) = place.again() {
            drop(place); // it stays: a volume that comes here has said that it will use it
            if scope.source.access.has(credentials) {
                return Ok(scope);
            }
            // Another token, or keys older than those that it asks with by now: a volume that brings them must show
            // that they open it.
            if check {
                self.check(spec, credentials).await?;
            }
            if !(check && scope.source.is_rotated()) {
                scope.source.replace(credentials.clone());
            }
            return Ok(scope);
        }
        let shown = spec.source.to_string();
        let health = Arc::new(Health::new(id.clone(), self.context.outages.clone()));
        let asked = CredentialedSource::new(
            |access| self.source(spec, access),
            credentials.clone(),
            patience,
            shown.clone(),
            health.clone(),
        )
        .map_err(|e| source_refusal(&e))?;
        if check {
            // Before anything of it is on the disk.
            self.check(spec, credentials).await?;
        }
        let metadata = self.config.cache.metadata_dir.join(id.as_str());
        let opened = self.open_store(&metadata, check).await?;
        if let meta::Opened::SetAside { why } | meta::Opened::StartedAnew { why } = opened.opened() {
            tracing::warn!(scope = %id, why, "metadata store started empty: names are asked for again");
        }
        let scope = Scope::new(
            id,
            shown,
            Arc::new(opened),
            metadata,
            self.engine.clone(),
            asked,
            health,
            self.generation,
        );
        place.open(scope.clone());
        Ok(scope)
    }

    /// `start_anew`: not for mounts that are taken over, which have inode numbers of it in the kernel.
    async fn open_store(&self, dir: &Path, start_anew: bool) -> Result<meta::Store, Refusal> {
        let until = Instant::now() + CLOSING_LIMIT;
        loop {
            let options = meta::Options { start_anew, ..self.config.cache.metadata() };
            let (dir, numbers, room) = (dir.to_owned(), self.numbers.clone(), self.room.clone());
            let open = move || meta::Store::open_in(&dir, &options, numbers, room);
            match tokio::task::spawn_blocking(open).await {
                Ok(Ok(store)) => return Ok(store),
                // The last question of the volumes before is just ending, and writes it out.
                Ok(Err(meta::MetaError::InUse(_))) if Instant::now() < until => {
                    tokio::time::sleep(CLOSING_LOOK).await;
                }
                Ok(Err(e)) => {
                    return Err(Refusal::new(RefusalKind::Unavailable, format!("metadata store: {e}")));
                }
                Err(e) => return Err(Refusal::new(RefusalKind::Internal, e.to_string())),
            }
        }
    }

    /// What this volume shows.
    pub(super) fn source(
        &self,
        spec: &VolumeSpec,
        access: Arc<Access>,
    ) -> Result<Arc<dyn Source>, StoreError> {
        store::open(spec, access, self.limits.clone(), self.observer.clone())
    }

    /// Is it there, and do these credentials open it?
    pub(super) async fn check(&self, spec: &VolumeSpec, credentials: &Credentials) -> Result<(), Refusal> {
        let access = Access::fixed(spec, credentials.clone());
        let source = self.source(spec, access).map_err(|e| source_refusal(&e))?;
        let wait = self.config.agent.source_wait.0;
        match tokio::time::timeout(wait, source.check(wait)).await {
            Ok(checked) => checked.map_err(|e| source_refusal(&e)),
            Err(_) => Err(Refusal::new(
                RefusalKind::Unavailable,
                format!(
                    "{} did not answer within {wait:?}: is its endpoint reachable from this node?",
                    spec.source
                ),
            )),
        }
    }

    /// Closes the scope when its last mount is gone: an environment that is not open can be evicted as a whole.
    pub(crate) fn release_scope(&self, id: &ScopeId) {
        self.scopes.close(id, || self.uses(id));
    }

    /// Scopes that could not be closed when their last mount went are closed now.
    pub(crate) fn sweep_scopes(&self) {
        self.scopes.sweep(|id| self.uses(id));
    }

    fn uses(&self, id: &ScopeId) -> bool {
        self.mounts.uses(id, |entry| &entry.mount.scope.id)
    }
}
