//! From a volume's specification to the scope that it uses.

use super::scopes::Place;
use super::{credentials, source_refusal};
use crate::config::Config;
use crate::source::credentials::CredentialedSource;
use crate::source::health::{Change, Health};
use crate::source::profile;
use crate::staging;
use crate::supervisor::Descriptors;
use crate::volumes::scope::Scope;
use cache::data::Engine;
use cache::meta;
use link::worker::Mode;
use link::{Refusal, RefusalKind};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{Access, Source, StoreError};
use tokio::sync::{OwnedMutexGuard, mpsc};
use volume::{Credentials, Freshness, Profile, ScopeId, SourceUrl, VolumeSpec};

/// How long a publish waits for the store that the volumes before have left.
const CLOSING_LIMIT: Duration = Duration::from_secs(5);
const CLOSING_LOOK: Duration = Duration::from_millis(20);

/// All that it takes to open a scope.
pub(crate) struct ScopeOpener {
    pub(crate) config: Config,
    pub(crate) engine: Arc<Engine>,
    pub(crate) numbers: Arc<crate::state::StateDir>,
    /// Of this agent.
    pub(crate) generation: u64,
    pub(crate) limits: Arc<store::Limits>,
    /// What volumes on HDFS take.
    pub(crate) hdfs: Arc<store::HdfsNode>,
    pub(crate) observer: Arc<dyn store::Observer>,
    /// Gets the sources that stop or begin to answer.
    pub(crate) outages: mpsc::UnboundedSender<Change>,
    /// Of the disk, for all metadata stores.
    pub(crate) room: Arc<meta::Room>,
}

impl ScopeOpener {
    pub(super) fn cached_bytes(&self, id: &ScopeId) -> u64 {
        self.engine.usage().scopes.iter().find(|scope| scope.scope == *id).map_or(0, |scope| scope.bytes)
    }

    /// The scope of this place: see `Volumes::open_scope`.
    pub(super) async fn open(
        &self,
        mut place: OwnedMutexGuard<Place>,
        id: ScopeId,
        spec: &VolumeSpec,
        credentials: &Credentials,
        check: bool,
    ) -> Result<Arc<Scope>, Refusal> {
        let spec = &self.config.workers.in_time(spec);
        let store_timeout = spec.parameters.store_timeout;
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
        let health = Arc::new(Health::new(id.clone(), self.outages.clone()));
        let asked = CredentialedSource::new(
            |access| self.source(spec, access),
            credentials.clone(),
            store_timeout,
            shown.clone(),
            health.clone(),
        )
        .map_err(|e| source_refusal(&e))?;
        if check {
            // Before anything of it is on the disk.
            self.ask_for(spec, &*asked).await?;
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
            self.limits.config().data_slots(),
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
    fn source(&self, spec: &VolumeSpec, access: Arc<Access>) -> Result<Arc<dyn Source>, StoreError> {
        store::open_on(spec, access, self.limits.clone(), self.observer.clone(), self.hdfs.clone())
    }

    /// Is the source there, and do these credentials open it?
    pub(super) async fn check(&self, spec: &VolumeSpec, credentials: &Credentials) -> Result<(), Refusal> {
        let access = Access::fixed(spec, credentials.clone());
        let source = self.source(spec, access).map_err(|e| source_refusal(&e))?;
        self.ask_for(spec, &*source).await
    }

    fn silent(&self, spec: &VolumeSpec) -> Refusal {
        let wait = self.config.agent.source_wait.0;
        Refusal::new(
            RefusalKind::Unavailable,
            format!(
                "{} did not answer within {wait:?}: is its endpoint reachable from this node?",
                spec.source
            ),
        )
    }

    async fn ask_for(&self, spec: &VolumeSpec, source: &dyn Source) -> Result<(), Refusal> {
        let wait = self.config.agent.source_wait.0;
        let checked = async {
            let checked = source.check(wait).await;
            let is_missing = matches!(checked, Err(StoreError::NotFound { .. }));
            if is_missing
                && spec.parameters.access == volume::Access::ReadWrite
                && let Some(sink) = source.sink()
            {
                // The first publish of a volume that will be written to makes its directory in a bucket.
                staging::make_root(&*sink).await?;
                return source.check(wait).await;
            }
            checked
        };
        match tokio::time::timeout(wait, checked).await {
            Ok(checked) => checked.map_err(|e| source_refusal(&e)),
            Err(_) => Err(self.silent(spec)),
        }
    }

    /// With one descriptor per cache root, in order. In place of a root that cannot be opened (its disk fails or hangs: that
    /// is a miss, not an error) an empty directory, in which nothing is ever found.
    pub(crate) async fn descriptors(&self, device: OwnedFd, scope: &Scope) -> Result<Descriptors, Refusal> {
        let all = (0..self.engine.roots()).map(|root| self.engine.scope_dir(root as u8, &scope.id));
        let opened = futures::future::join_all(all).await;
        let or_nothing = |(root, opened): (usize, std::io::Result<OwnedFd>)| {
            opened.or_else(|error| {
                tracing::warn!(root, %error, "cache root cannot be opened: the volume does without it");
                let nothing = self.config.agent.state_dir.join("nothing");
                std::fs::create_dir_all(&nothing)?;
                Ok(OwnedFd::from(std::fs::File::open(&nothing)?))
            })
        };
        let roots = opened.into_iter().enumerate().map(or_nothing).collect::<std::io::Result<_>>();
        let roots = roots.map_err(|e| {
            Refusal::new(RefusalKind::Unavailable, format!("the agent's state directory cannot be used: {e}"))
        })?;
        Ok(Descriptors { device, roots })
    }

    /// The volume's own, or the agent's where both the volume and the configuration allow it, or none.
    pub(crate) fn credentials(
        &self,
        spec: &VolumeSpec,
        secrets: &BTreeMap<String, String>,
        environment: bool,
    ) -> Result<Credentials, Refusal> {
        // They are keys of S3's kind.
        let takes_keys = matches!(spec.source, SourceUrl::S3 { .. } | SourceUrl::Oss { .. });
        let environment = environment && takes_keys && self.config.agent.environment_credentials;
        credentials(secrets, environment, |name| std::env::var(name).ok())
    }

    /// How a volume is served.
    pub(super) async fn mode(
        &self,
        spec: &VolumeSpec,
        credentials: &Credentials,
        scope: &Scope,
    ) -> Result<Mode, Refusal> {
        if spec.parameters.access == volume::Access::ReadWrite {
            return Ok(Mode::Writable);
        }
        let small = match (spec.parameters.profile, spec.parameters.freshness) {
            (_, Freshness::Strict) | (Profile::Large, _) => false,
            (Profile::Small, _) => true,
            (Profile::Auto, _) => {
                // Not as the scope asks: another volume may wait for days.
                let mut brief = spec.clone();
                brief.parameters.store_timeout =
                    spec.parameters.store_timeout.min(self.config.agent.source_wait.0);
                let limit = brief.parameters.store_timeout;
                let source = match &spec.source {
                    // Another one would be another helper process.
                    SourceUrl::Hdfs { .. } => scope.source.handle(),
                    _ => {
                        let access = Access::fixed(&brief, credentials.clone());
                        self.source(spec, access).map_err(|e| source_refusal(&e))?
                    }
                };
                let looked = tokio::time::timeout(limit, profile::is_small(source.as_ref())).await;
                looked.map_err(|_| self.silent(spec))?.map_err(|e| source_refusal(&e))?
            }
        };
        let disabled_features = self.config.disabled_features();
        Ok(match small {
            true if disabled_features.no_open => Mode::Kept,
            true => Mode::NoOpen,
            false if disabled_features.passthrough => Mode::Kept,
            false => Mode::Passthrough,
        })
    }
}
