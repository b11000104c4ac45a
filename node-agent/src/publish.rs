//! Publish and unpublish: from a mount request to a worker that serves it, and back.

use crate::config::Config;
use crate::profile;
use crate::scope::{Scope, now_ms, store_cause};
use crate::supervisor::{Mount, Parts, Surroundings};
use cache::data::Engine;
use cache::meta;
use link::broker::{AgentAnswer, AgentRequest, MountId, Publish, Usage};
use link::worker::{Assign, Mode, Show};
use link::{Cause, Refusal, RefusalKind};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use volume::{Credentials, Freshness, Profile, ScopeId, VolumeSpec};

/// From the fds to a worker's INIT answer, and from Go to Serving.
const WORKER_LIMIT: Duration = Duration::from_secs(15);

/// The volumes of this node. One writer: the broker's requests.
pub struct Volumes {
    config: Config,
    engine: Arc<Engine>,
    numbers: Arc<crate::state::State>,
    generation: u64,
    limits: Arc<store::Limits>,
    observer: Arc<dyn store::Observer>,
    pub around: Arc<Surroundings>,
    mounts: Mutex<HashMap<MountId, Entry>>,
    scopes: Mutex<HashMap<ScopeId, ScopeSlot>>,
}

/// Held while a scope is being opened, so that a second publish of it waits for the first.
type ScopeSlot = Arc<tokio::sync::Mutex<Option<Arc<Scope>>>>;

struct Entry {
    mount: Arc<Mount>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Volumes {
    #[allow(clippy::too_many_arguments)] // composition: each is one part of the agent
    pub fn new(
        config: Config,
        engine: Arc<Engine>,
        numbers: Arc<crate::state::State>,
        generation: u64,
        limits: Arc<store::Limits>,
        observer: Arc<dyn store::Observer>,
        around: Arc<Surroundings>,
    ) -> Arc<Self> {
        Arc::new(Self {
            config,
            engine,
            numbers,
            generation,
            limits,
            observer,
            around,
            mounts: Mutex::default(),
            scopes: Mutex::default(),
        })
    }

    pub fn mounts(&self) -> Vec<Arc<Mount>> {
        lock(&self.mounts).values().map(|e| e.mount.clone()).collect()
    }

    /// The mount whose target `path` lies at or below, and the rest of the path.
    pub fn find(&self, path: &std::path::Path) -> Option<(Arc<Mount>, std::path::PathBuf)> {
        let mounts = self.mounts();
        let best =
            mounts.into_iter().filter(|m| path.starts_with(&m.target)).max_by_key(|m| m.target.len())?;
        let rest = path.strip_prefix(&best.target).ok()?.to_owned();
        Some((best, rest))
    }

    /// Live scopes only.
    pub fn scope(&self, id: &ScopeId) -> Option<Arc<Scope>> {
        let slot = lock(&self.scopes).get(id)?.clone();
        slot.try_lock().ok()?.clone()
    }

    pub fn scopes(&self) -> Vec<Arc<Scope>> {
        let slots: Vec<_> = lock(&self.scopes).values().cloned().collect();
        slots.iter().filter_map(|slot| slot.try_lock().ok()?.clone()).collect()
    }

    pub async fn publish(
        &self,
        request: Publish,
        mut fds: Vec<OwnedFd>,
    ) -> Result<(AgentAnswer, Vec<OwnedFd>), Refusal> {
        let device = match (fds.pop(), fds.is_empty()) {
            (Some(device), true) => device,
            _ => return Err(Refusal::new(RefusalKind::Internal, "publish must carry one descriptor")),
        };
        let Publish { mount: id, spec, secrets, init, target, pod } = request;
        if lock(&self.mounts).contains_key(&id) {
            return Err(Refusal::new(RefusalKind::Conflict, format!("mount {id} is published already")));
        }
        let refuse = |e: &dyn std::fmt::Display| Refusal::new(RefusalKind::Denied, e.to_string());
        self.config.allow.check(&spec.source, &spec.parameters).map_err(|e| refuse(&e))?;
        let credentials = self.credentials(&secrets)?;
        let scope = self.open_scope(&spec, &credentials).await?;
        let mode = self.mode(&spec, &scope).await?;
        let small = mode == Mode::NoOpen;
        let roots = self.root_directories(&scope)?;
        let assign = self.assign(&spec, &scope, mode, roots.len() as u32);
        let volume = spec.id.clone();
        let parts = Parts { id, spec, target, pod, scope, assign, device, init, roots };
        let mount = Mount::new(parts).map_err(|e| {
            Refusal::new(RefusalKind::Internal, format!("no shared memory for the mount: {e}"))
        })?;
        let shared = mount
            .shared()
            .map_err(|e| Refusal::new(RefusalKind::Internal, format!("descriptor limit reached: {e}")))?;
        let thread = {
            let (mount, around) = (mount.clone(), self.around.clone());
            std::thread::Builder::new()
                .name(format!("mount-{id}"))
                .spawn(move || mount.supervise(&around))
                .map_err(|e| {
                    Refusal::new(RefusalKind::Unavailable, format!("no thread for the mount: {e}"))
                })?
        };
        lock(&self.mounts).insert(id, Entry { mount: mount.clone(), thread: Some(thread) });
        let waiter = mount.clone();
        let started = tokio::task::spawn_blocking(move || waiter.wait_started(WORKER_LIMIT)).await;
        match started.unwrap_or_else(|e| Err(e.to_string())) {
            Ok(started) => {
                tracing::info!(mount = %id, %volume, mode = ?started.mode, "volume prepared");
                // What INIT offered may have changed the mode: the probe primes what really is.
                let small = small && started.mode == Mode::NoOpen;
                let read_ahead_kb = if small { 1024 } else { 4096 };
                let answer = AgentAnswer::Prepared { init_reply: started.init_reply, read_ahead_kb, small };
                Ok((answer, vec![shared]))
            }
            Err(why) => {
                self.unpublish(id).await;
                Err(Refusal::new(RefusalKind::Unavailable, why))
            }
        }
    }

    pub async fn start(&self, id: MountId) -> Result<(), Refusal> {
        let mount = self.get(id)?;
        let started = tokio::task::spawn_blocking(move || mount.start(WORKER_LIMIT)).await;
        started
            .unwrap_or_else(|e| Err(e.to_string()))
            .map_err(|why| Refusal::new(RefusalKind::Unavailable, why))
    }

    pub async fn unpublish(&self, id: MountId) {
        let Some(mut entry) = lock(&self.mounts).remove(&id) else { return };
        entry.mount.stop();
        if let Some(thread) = entry.thread.take() {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
        tracing::info!(mount = %id, volume = %entry.mount.spec.id, "volume released");
        let scope = entry.mount.scope.id.clone();
        drop(entry);
        self.release_scope(&scope);
    }

    /// Ends every mount; for shutdown.
    pub async fn stop_all(&self) {
        let ids: Vec<MountId> = lock(&self.mounts).keys().copied().collect();
        for id in ids {
            self.unpublish(id).await;
        }
    }

    pub fn usage(&self, id: MountId) -> Result<Usage, Refusal> {
        let mount = self.get(id)?;
        let known = mount.scope.known();
        let scope =
            self.engine.usage().scopes.iter().find(|s| s.scope == mount.scope.id).map_or(0, |s| s.bytes);
        Ok(Usage { total_bytes: known.bytes.max(scope), total_inodes: known.names, cached_bytes: scope })
    }

    fn get(&self, id: MountId) -> Result<Arc<Mount>, Refusal> {
        let absent = || Refusal::new(RefusalKind::NotFound, format!("mount {id} is not known to this agent"));
        lock(&self.mounts).get(&id).map(|e| e.mount.clone()).ok_or_else(absent)
    }

    /// One descriptor per cache root, in order. In place of a root that cannot be opened (its disk fails: that is a
    /// miss, not an error) an empty directory, in which nothing is ever found.
    fn root_directories(&self, scope: &Scope) -> Result<Vec<OwnedFd>, Refusal> {
        let open = |root: usize| {
            self.engine.scope_dir(root as u8, &scope.id).or_else(|error| {
                tracing::warn!(root, %error, "cache root cannot be opened: the volume does without it");
                let nothing = self.config.agent.state_dir.join("nothing");
                std::fs::create_dir_all(&nothing)?;
                Ok(OwnedFd::from(std::fs::File::open(&nothing)?))
            })
        };
        (0..self.engine.roots()).map(open).collect::<std::io::Result<_>>().map_err(|e| {
            Refusal::new(RefusalKind::Unavailable, format!("the agent's state directory cannot be used: {e}"))
        })
    }

    fn credentials(
        &self,
        secrets: &std::collections::BTreeMap<String, String>,
    ) -> Result<Credentials, Refusal> {
        let parsed = if secrets.is_empty() && self.config.agent.environment_credentials {
            Credentials::from_environment(|name| std::env::var(name).ok())
        } else {
            Credentials::from_secrets(secrets.iter())
        };
        parsed.map_err(|e| Refusal::new(RefusalKind::Invalid, e.to_string()))
    }

    /// The scope, opened and checked against its source if no volume uses it yet.
    async fn open_scope(&self, spec: &VolumeSpec, credentials: &Credentials) -> Result<Arc<Scope>, Refusal> {
        let id = spec.scope(credentials);
        let slot = lock(&self.scopes).entry(id.clone()).or_default().clone();
        let mut slot = slot.lock().await;
        let source = store::open(spec, credentials, self.limits.clone(), self.observer.clone())
            .map_err(|e| source_refusal(&e))?;
        if let Some(scope) = slot.as_ref() {
            scope.replace_source(source);
            return Ok(scope.clone());
        }
        let wait = self.config.agent.source_wait.0;
        let checked = match tokio::time::timeout(wait, source.check(wait)).await {
            Ok(checked) => checked.map_err(|e| source_refusal(&e)),
            Err(_) => Err(Refusal::new(
                RefusalKind::Unavailable,
                format!(
                    "{} did not answer within {wait:?}: is its endpoint reachable from this node?",
                    spec.source
                ),
            )),
        };
        checked?;
        let metadata = self.config.cache.metadata_dir.join(id.as_str());
        let numbers = self.numbers.clone();
        let dir = metadata.clone();
        let options = self.config.cache.metadata();
        let open = move || meta::Store::open_with(&dir, &options, numbers, Arc::new(now_ms));
        let opened = tokio::task::spawn_blocking(open).await;
        let opened = opened
            .map_err(|e| Refusal::new(RefusalKind::Internal, e.to_string()))?
            .map_err(|e| Refusal::new(RefusalKind::Unavailable, format!("metadata store: {e}")))?;
        if let meta::Opened::SetAside { why } | meta::Opened::StartedAnew { why } = opened.opened() {
            tracing::warn!(scope = %id, why, "metadata store started empty: names are asked for again");
        }
        let scope = Scope::new(
            id,
            spec.source.to_string(),
            Arc::new(opened),
            metadata,
            self.engine.clone(),
            source,
            self.generation,
        );
        *slot = Some(scope.clone());
        Ok(scope)
    }

    /// Closes the scope when its last mount is gone: an environment that nobody has open can be evicted as a whole.
    fn release_scope(&self, id: &ScopeId) {
        let used = lock(&self.mounts).values().any(|e| e.mount.scope.id == *id);
        if used {
            return;
        }
        let mut scopes = lock(&self.scopes);
        // A publish that is under way holds the slot.
        if let Some(slot) = scopes.get(id)
            && slot.try_lock().is_ok()
            && Arc::strong_count(slot) == 1
        {
            scopes.remove(id);
        }
    }

    async fn mode(&self, spec: &VolumeSpec, scope: &Scope) -> Result<Mode, Refusal> {
        let small = match (spec.parameters.profile, spec.parameters.freshness) {
            (_, Freshness::Strict) | (Profile::Large, _) => false,
            (Profile::Small, _) => true,
            (Profile::Auto, _) => {
                profile::is_small(scope.source().as_ref()).await.map_err(|e| source_refusal(&e))?
            }
        };
        let withhold = self.config.withhold();
        Ok(match small {
            true if withhold.no_open => Mode::Kept,
            true => Mode::NoOpen,
            false if withhold.passthrough => Mode::Kept,
            false => Mode::Passthrough,
        })
    }

    fn assign(&self, spec: &VolumeSpec, scope: &Scope, mode: Mode, roots: u32) -> Assign {
        let p = &spec.parameters;
        let (ttl, revalidate_on_open) = match p.freshness {
            Freshness::Static => (None, false),
            Freshness::Ttl(ttl) => (Some(ttl), false),
            Freshness::Strict => (Some(Duration::ZERO), true),
        };
        Assign {
            volume: spec.id.to_string(),
            source: spec.source.to_string(),
            metadata: scope.metadata_dir.clone(),
            generation: self.generation,
            roots,
            threads: self.config.workers.threads,
            mode,
            show: Show {
                uid: p.uid,
                gid: p.gid,
                file_mode: p.file_mode,
                dir_mode: p.dir_mode,
                ttl,
                revalidate_on_open,
            },
            withhold: self.config.withhold(),
            block_bytes: self.config.cache.block.0,
            takeover: false,
        }
    }
}

fn source_refusal(error: &store::StoreError) -> Refusal {
    let kind = match store_cause(error) {
        Cause::NotFound | Cause::NotADirectory => RefusalKind::NotFound,
        Cause::Denied => RefusalKind::Denied,
        Cause::Unavailable => RefusalKind::Unavailable,
        Cause::Stale | Cause::Internal => RefusalKind::Invalid,
    };
    Refusal::new(kind, error.to_string())
}

/// What the broker asks, handed to the volumes.
#[async_trait::async_trait]
impl crate::broker_client::Serve for Volumes {
    async fn serve(
        &self,
        request: AgentRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<(AgentAnswer, Vec<OwnedFd>), Refusal> {
        match request {
            AgentRequest::Publish(publish) => self.publish(*publish, fds).await,
            AgentRequest::Start { mount } => {
                self.start(mount).await.map(|()| (AgentAnswer::Done, Vec::new()))
            }
            AgentRequest::Unpublish { mount } => {
                self.unpublish(mount).await;
                Ok((AgentAnswer::Done, Vec::new()))
            }
            AgentRequest::Usage { mount } => self.usage(mount).map(|u| (AgentAnswer::Usage(u), Vec::new())),
            AgentRequest::UsageAt { target } => {
                let here = self.mounts().into_iter().find(|m| m.target == target);
                let absent =
                    || Refusal::new(RefusalKind::Unavailable, "this agent does not serve that target");
                let usage = self.usage(here.ok_or_else(absent)?.id)?;
                Ok((AgentAnswer::Usage(usage), Vec::new()))
            }
        }
    }

    fn lost(&self) {
        // Mounts go on: workers need the broker for backing ids and dying callers only.
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
