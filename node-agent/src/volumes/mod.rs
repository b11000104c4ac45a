//! Publish and unpublish: from a mount request to a worker that serves it, and back.

mod arrivals;
mod cache_events;
pub(crate) mod collect;
mod open;
mod requests;
mod rotate;
pub(crate) mod scope;
mod scopes;
mod staged;

use crate::admission::{Admission, has_room};
use crate::config::Config;
use crate::handoff::order::Order;
use crate::staging::{self, Area, Staging};
use crate::supervisor::{self, Descriptors, Mount, MountContext, Parts};
use crate::volumes::scope::{Member, Scope, Wants};
use arrivals::{Arrival, Mounts, Present, Unsettled};
pub(crate) use cache_events::follow as follow_cache;
use inflight::Room;
use link::broker::{AgentAnswer, MountId, Publish, Report, Resume, Unsent, Usage};
use link::budget;
use link::worker::{Assign, Mode, Show};
use link::{Cause, MountSpec, Refusal, RefusalKind};
pub(crate) use open::ScopeOpener;
use scopes::Scopes;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use volume::{AttributesFrom, Credentials, Freshness, ScopeId, VolumeSpec};

/// How long an agent that is succeeded waits for its staging disk.
const RELEASE_LIMIT: Duration = Duration::from_secs(1);

/// How long what was written to a volume is sent after its last unpublish.
const UPLOADS_LIMIT: Duration = Duration::from_secs(300);
/// From the fds to a worker's INIT answer, and from Go to Serving.
const WORKER_LIMIT: Duration = budget::MOUNT_STARTS.time;

/// The time between two connections to a broker.
#[derive(Debug)]
struct Absence {
    since: Instant,
    unfinished: Vec<MountId>,
}

/// The volumes of this node. One writer: the broker's requests.
pub struct Volumes {
    pub(crate) opener: ScopeOpener,
    pub(crate) scopes: Scopes,
    /// What is written on this node.
    pub(crate) staging: Arc<Staging>,
    pub context: Arc<MountContext>,
    mounts: Mounts<Mounted>,
    admission: Admission,
    /// This agent was asked to stop: the next one takes new mounts.
    leaving: AtomicBool,
    /// No mount has a worker any more.
    drained: AtomicBool,
    /// While there is no broker.
    absence: Mutex<Option<Absence>>,
    /// How many connections to a broker there were: each is shown the mounts.
    pub(crate) shows: AtomicU64,
    /// Unused metadata stores are tidied up and removed.
    pub(crate) collecting: Arc<collect::Leave>,
    /// Scopes that uploads use for which no mount is there.
    uploads: staged::Uploads,
    /// What concerns the agent as a whole.
    orders: mpsc::UnboundedSender<Order>,
}

pub(crate) struct Mounted {
    mount: Arc<Mount>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// A mount on its way here.
pub(crate) type Arriving<'v> = Arrival<'v, Mounted>;

impl Volumes {
    pub(crate) fn new(
        opener: ScopeOpener,
        context: Arc<MountContext>,
        orders: mpsc::UnboundedSender<Order>,
    ) -> Arc<Self> {
        let config = &opener.config;
        let staging =
            Arc::new(Staging::new(config.agent.state_dir.join(staging::DIRECTORY), config.disk_timeout()));
        Arc::new(Self {
            staging,
            opener,
            scopes: Scopes::default(),
            context,
            mounts: Mounts::default(),
            admission: Admission::of_this_machine(),
            leaving: AtomicBool::new(false),
            drained: AtomicBool::new(false),
            absence: Mutex::default(),
            shows: AtomicU64::new(0),
            collecting: Arc::default(),
            uploads: staged::Uploads::default(),
            orders,
        })
    }

    fn order(&self, order: Order) {
        let _ = self.orders.send(order); // no receiver: the agent is exiting, or a laptop's
    }

    pub(crate) fn stop_taking(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    pub fn mounts(&self) -> Vec<Arc<Mount>> {
        self.mounts.map(|entry| entry.mount.clone())
    }

    /// The mount whose target `path` lies at or below, and the rest of the path.
    pub fn find(&self, path: &std::path::Path) -> Option<(Arc<Mount>, std::path::PathBuf)> {
        let mounts = self.mounts();
        let best = mounts
            .into_iter()
            .filter(|m| path.starts_with(&m.described.target))
            .max_by_key(|m| m.described.target.len())?;
        let rest = path.strip_prefix(&best.described.target).ok()?.to_owned();
        Some((best, rest))
    }

    pub(crate) fn config(&self) -> &Config {
        &self.opener.config
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
        if self.leaving.load(Ordering::Acquire) {
            let why = "the node agent is being stopped; its successor will publish this volume";
            return Err(Refusal::new(RefusalKind::Unavailable, why));
        }
        let spec = understand(&request.spec)?;
        self.may_serve(&spec)?;
        for limited in self.config().cache.limited(&spec.parameters) {
            tracing::warn!(volume = %spec.id, "{limited}");
        }
        let credentials = self.opener.credentials(&spec, &request.secrets, request.spec.environment)?;
        let id = request.mount;
        let scope = match spec.parameters.access {
            volume::Access::ReadWrite => self.staging.scope_of(&spec).await,
            volume::Access::ReadOnly => None,
        };
        let scope = scope.unwrap_or_else(|| spec.scope(&credentials, self.opener.numbers.scope_key()));
        let arrival = match self.arrive(id, &scope, request.spec.namespace())? {
            Some(arrival) => arrival,
            None => {
                return Err(Refusal::new(RefusalKind::Conflict, format!("mount {id} is published already")));
            }
        };
        let brought = self.bring(arrival, request, spec, scope.clone(), &credentials, device).await;
        if brought.is_err() {
            self.release_scope(&scope);
        }
        brought
    }

    async fn bring(
        &self,
        arrival: Arriving<'_>,
        request: Publish,
        spec: VolumeSpec,
        scope: ScopeId,
        credentials: &Credentials,
        device: OwnedFd,
    ) -> Result<(AgentAnswer, Vec<OwnedFd>), Refusal> {
        let (id, volume, init) = (request.mount, spec.id.clone(), request.init.clone());
        has_room(self.mounts.coming())?;
        let end = tokio::time::Instant::now() + self.config().agent.source_wait.0;
        let scope = self.open_scope(scope, &spec, credentials, true).await?;
        self.may_join(&scope, request.spec.namespace())?;
        let member = scope.join(Wants::of(&self.config().workers.in_time(&spec).parameters));
        let mode = self.opener.mode(&spec, credentials, &scope).await?;
        let area = self.area(mode, &spec, &scope).await?;
        // It may wait for a second: not with a turn that another publish could have.
        let joined = area.clone();
        let coming = match &joined {
            Some(area) => Some(area.welcome().await),
            None => None,
        };
        let turn = self.admission.enter(end).await?;
        let descriptors = self.opener.descriptors(device, &scope).await?;
        let room = if area.is_some() { Room::ReadWrite } else { Room::ReadOnly };
        let parts = self.parts(request, spec, scope, member, mode, &descriptors, area);
        let mount = Mount::new(parts, descriptors, &init, room).map_err(|e| {
            Refusal::new(RefusalKind::Internal, format!("no shared memory for the mount: {e}"))
        })?;
        let shared = mount
            .shared()
            .map_err(|e| Refusal::new(RefusalKind::Internal, format!("descriptor limit reached: {e}")))?;
        mount.keep_turn(turn);
        if let Some(area) = &mount.area {
            area.join(id, &mount.executed);
            drop(coming);
            area.describe(&mount.described).await;
        }
        self.run(arrival, &mount)?;
        let waiter = mount.clone();
        let started = tokio::task::spawn_blocking(move || waiter.wait_started(WORKER_LIMIT)).await;
        match started.unwrap_or_else(|e| Err(e.to_string())) {
            Ok(started) => {
                tracing::info!(mount = %id, %volume, mode = ?started.mode, "volume prepared");
                // What INIT offered may have changed the mode: the probe primes what really is.
                let read_ahead_kb = if started.mode == Mode::NoOpen { 1024 } else { 4096 };
                let answer = AgentAnswer::Prepared {
                    init_reply: started.init_reply,
                    read_ahead_kb,
                    resume: mount.resume(),
                };
                failpoint::hit("agent.volume-prepared");
                Ok((answer, vec![shared]))
            }
            Err(why) => {
                self.unpublish(id).await;
                Err(Refusal::new(RefusalKind::Unavailable, why))
            }
        }
    }

    /// From here on this mount is on its way, and an unpublish stops it; None: it is here.
    pub(crate) fn arrive(
        &self,
        id: MountId,
        scope: &ScopeId,
        namespace: Option<&str>,
    ) -> Result<Option<Arriving<'_>>, Refusal> {
        match self.mounts.arrive(id, scope.clone(), namespace.map(str::to_owned)) {
            Ok(arrival) => Ok(Some(arrival)),
            Err(Present::Here) => Ok(None),
            Err(Present::UnderWay) => {
                let why = format!("a publish or an adoption of mount {id} is under way");
                Err(Refusal::new(RefusalKind::Unavailable, why))
            }
        }
    }

    /// Gives a mount its thread: it is here.
    pub(crate) fn run(&self, arrival: Arriving<'_>, mount: &Arc<Mount>) -> Result<(), Refusal> {
        let (supervised, context) = (mount.clone(), self.context.clone());
        let settled = arrival.settle(|| {
            // Looked at under the lock: the end of all mounts ends this one, too, or it does not begin.
            if self.leaving.load(Ordering::Acquire) {
                let why = "the node agent is being stopped; its successor will serve this volume";
                return Err(Refusal::new(RefusalKind::Unavailable, why));
            }
            let thread = std::thread::Builder::new()
                .name(format!("mount-{}", mount.id))
                .spawn(move || supervisor::supervise(supervised, &context))
                .map_err(|e| {
                    Refusal::new(RefusalKind::Unavailable, format!("no thread for the mount: {e}"))
                })?;
            failpoint::hit("agent.mount-listed");
            Ok(Mounted { mount: mount.clone(), thread: Some(thread) })
        });
        settled.map_err(|unsettled| match unsettled {
            Unsettled::Refused(refusal) => refusal,
            Unsettled::Ended => ended_meanwhile(mount.id),
        })
    }

    /// Is it here, and not given up?
    pub(crate) fn has_live(&self, id: MountId) -> bool {
        self.mounts.get(id, |entry| entry.mount.is_live()) == Some(true)
    }

    pub(crate) fn has(&self, id: MountId) -> bool {
        self.mounts.get(id, |_| ()).is_some()
    }

    pub(crate) fn may_serve(&self, spec: &VolumeSpec) -> Result<(), Refusal> {
        allowed(self.config(), spec)
    }

    pub async fn start(&self, id: MountId) -> Result<(), Refusal> {
        let mount = self.get(id)?;
        let starting = mount.clone();
        let started = tokio::task::spawn_blocking(move || starting.start(WORKER_LIMIT)).await;
        mount.end_turn();
        started
            .unwrap_or_else(|e| Err(e.to_string()))
            .map_err(|why| Refusal::new(RefusalKind::Unavailable, why))
    }

    /// Also of a mount that is still on its way here: its publish or adoption finds that it has ended.
    pub async fn unpublish(&self, id: MountId) {
        let Some(mut entry) = self.mounts.end(id) else { return };
        entry.mount.stop();
        entry.mount.end_turn();
        entry.mount.leave_scope();
        if let Some(thread) = entry.thread.take() {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
        // An agent that is asked to stop leaves its mounts to the next one, with what is open in them.
        let area = entry.mount.area.clone().filter(|_| !self.leaving.load(Ordering::Acquire));
        if let Some(area) = &area {
            area.leave(id).await;
        }
        tracing::info!(mount = %id, volume = %entry.mount.spec.id, "volume released");
        let scope = entry.mount.scope.id.clone();
        drop(entry);
        self.release_scope(&scope);
        if let Some(area) = area.filter(|area| self.is_last_of(area)) {
            tokio::spawn(upload_the_rest(area));
        }
    }

    fn is_last_of(&self, area: &Arc<Area>) -> bool {
        !self.mounts().iter().any(|mount| mount.area.as_ref().is_some_and(|other| Arc::ptr_eq(other, area)))
    }

    /// Ends every mount; for shutdown.
    pub(crate) async fn stop_all(&self) {
        for id in self.mounts.ids() {
            self.unpublish(id).await;
        }
    }

    /// Ends every worker and leaves every metadata store to the successor; keeps the mounts' descriptors, in case there
    /// is none.
    pub(crate) async fn drain(&self) {
        self.stop_taking();
        self.drained.store(true, Ordering::Release);
        for id in self.unfinished() {
            self.unpublish(id).await; // its publish fails, and is repeated
        }
        let threads: Vec<_> = self.mounts.map(|entry| {
            entry.mount.stop();
            entry.thread.take()
        });
        let collecting = self.collecting.clone();
        let joined = tokio::task::spawn_blocking(move || {
            threads.into_iter().flatten().for_each(|t| drop(t.join()));
            collecting.end();
        });
        let _ = joined.await; // a panic of a thread has been reported by it
    }

    /// Mounts in the middle of their publish.
    fn unfinished(&self) -> Vec<MountId> {
        self.mounts().iter().filter(|m| !m.is_started()).map(|m| m.id).collect()
    }

    /// After the last worker: nothing of ours writes names any more. False: not as long as this process lives.
    pub(crate) fn release_stores(&self) -> bool {
        // Also those that no mount has any more, of which something is still being sent.
        let areas = self.staging.open_areas();
        let of_mounts = self.mounts().into_iter().map(|mount| mount.scope.clone());
        let of_areas = areas.iter().map(|area| area.scope());
        of_mounts.chain(of_areas).chain(self.scopes.all()).for_each(|scope| scope.release());
        let end = Instant::now() + RELEASE_LIMIT; // all lie on one disk
        areas.iter().filter(|area| !area.release(end)).count() == 0
    }

    pub fn usage(&self, id: MountId) -> Result<Usage, Refusal> {
        let mount = self.get(id)?;
        let known = mount.scope.known();
        let scope = self.opener.cached_bytes(&mount.scope.id);
        Ok(Usage {
            total_bytes: known.bytes.max(scope),
            total_inodes: known.names,
            cached_bytes: scope,
            away: mount.scope.away(&mount.spec.parameters),
            unsent: mount
                .area
                .as_ref()
                .and_then(|area| area.upload_trouble(self.config().store.uploads_late.0)),
        })
    }

    /// What was written through a mount that is about to end gets to the store, within `limit`. Where another mount has the
    /// volume nothing is waited for. Returns what will be left.
    async fn upload_before_end(&self, id: MountId, limit: Duration) -> Result<Unsent, Refusal> {
        let mount = self.get(id)?;
        let Some(area) = mount.area.clone() else { return Ok(Unsent::default()) };
        let is_its = |other: &Mount| other.area.as_ref().is_some_and(|other| Arc::ptr_eq(other, &area));
        if self.mounts().iter().any(|other| other.id != id && is_its(other)) {
            return Ok(Unsent::default());
        }
        area.send_all_for(limit.min(budget::UPLOADS.time)).await;
        Ok(area.unsent())
    }

    /// Tells the owners of volumes what has changed of what waits for their stores.
    pub(crate) fn tell_of_uploads(&self, tell: impl Fn(MountId, Report)) {
        for area in self.staging.open_areas() {
            let Some(report) = area.upload_news(self.config().store.uploads_late.0) else { continue };
            for mount in self.mounts() {
                if mount.area.as_ref().is_some_and(|other| Arc::ptr_eq(other, &area)) {
                    tell(mount.id, report.clone());
                }
            }
        }
    }

    pub(crate) fn get(&self, id: MountId) -> Result<Arc<Mount>, Refusal> {
        let absent = || Refusal::new(RefusalKind::NotFound, format!("mount {id} is not known to this agent"));
        self.mounts.get(id, |entry| entry.mount.clone()).ok_or_else(absent)
    }

    /// The scope; opened if no volume uses it yet, and then checked against its source if `check`.
    pub(crate) async fn open_scope(
        &self,
        id: ScopeId,
        spec: &VolumeSpec,
        credentials: &Credentials,
        check: bool,
    ) -> Result<Arc<Scope>, Refusal> {
        let place = self.scopes.enter(&id).await;
        self.opener.open(place, id, spec, credentials, check).await
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
        self.mounts.uses(id, |entry| &entry.mount.scope.id) || self.uploads.uses(id)
    }

    /// Of a volume that can be written to, whatever this mount may do: all mounts of it see the same.
    pub(crate) async fn area(
        &self,
        mode: Mode,
        spec: &VolumeSpec,
        scope: &Arc<Scope>,
    ) -> Result<Option<Arc<Area>>, Refusal> {
        match mode {
            Mode::Writable => {
                let spec = self.config().workers.in_time(spec);
                self.staging.open(&spec, scope, &self.opener.numbers).await.map(Some)
            }
            Mode::Passthrough | Mode::NoOpen | Mode::Kept => Ok(None),
        }
    }

    /// What a mount is served from, whether it is new or was left by another agent.
    pub(crate) fn parts(
        &self,
        publish: Publish,
        spec: VolumeSpec,
        scope: Arc<Scope>,
        member: Member,
        mode: Mode,
        descriptors: &Descriptors,
        area: Option<Arc<Area>>,
    ) -> Parts {
        let Publish { mount: id, spec: described, secrets, init: _ } = publish;
        let roots = descriptors.roots.len() as u32;
        let metadata = scope.metadata_dir.clone();
        let assign = assign(self.config(), &spec, metadata, self.opener.generation, mode, roots);
        Parts { id, spec, described, secrets, scope, member, assign, area }
    }
}

/// What was written to a volume that is not mounted here any more: this agent has its secret still.
async fn upload_the_rest(area: Arc<Area>) {
    if !area.send_all_for(UPLOADS_LIMIT).await {
        let waiting = area.waiting();
        tracing::error!(
            volume = %area.volume, files = waiting.files, bytes = waiting.bytes,
            "not all that was written is in the store: it is kept, and sent when this volume is published on this node again"
        );
    }
}

/// What a worker gets of its volume.
pub(crate) fn assign(
    config: &Config,
    spec: &VolumeSpec,
    metadata: PathBuf,
    generation: u64,
    mode: Mode,
    roots: u32,
) -> Assign {
    let p = &spec.parameters;
    let (ttl, revalidate_on_open) = match p.freshness {
        Freshness::Static => (None, false),
        Freshness::Ttl(ttl) => (Some(ttl), false),
        Freshness::Strict => (Some(Duration::ZERO), true),
    };
    Assign {
        volume: spec.id.to_string(),
        source: spec.source.to_string(),
        metadata,
        generation,
        roots,
        threads: config.workers.threads,
        mode,
        show: Show {
            attributes_of_source: p.attributes == AttributesFrom::Source,
            uid: p.uid,
            gid: p.gid,
            file_mode: p.file_mode,
            dir_mode: p.dir_mode,
            ttl,
            revalidate_on_open,
        },
        disabled_features: config.disabled_features(),
        injected_faults: config.workers.inject_faults.clone(),
        hang_limit: config.workers.hang_limit.0,
        block_bytes: config.cache.block.0,
        takeover: false,
    }
}

pub(crate) fn allowed(config: &Config, spec: &VolumeSpec) -> Result<(), Refusal> {
    let refuse = |e: &dyn std::fmt::Display| Refusal::new(RefusalKind::Denied, e.to_string());
    config.allow.check(&spec.source, &spec.parameters).map_err(|e| refuse(&e))?;
    let endpoint = spec.endpoint();
    endpoint.iter().try_for_each(|endpoint| config.egress().allows(endpoint)).map_err(|e| refuse(&e))
}

/// An agent serves what it understands; see `volume::WireSpec`.
pub(crate) fn understand(described: &MountSpec) -> Result<VolumeSpec, Refusal> {
    described.understand().map_err(|e| Refusal::new(RefusalKind::Invalid, e.to_string()))
}

/// The scope that a mount was published with.
pub(crate) fn scope_of(resume: &Resume) -> Result<ScopeId, Refusal> {
    ScopeId::parse(&resume.scope)
        .ok_or_else(|| Refusal::new(RefusalKind::Internal, "the broker's copy names no scope"))
}

/// The volume's own, or the environment's where that is allowed, or none.
fn credentials(
    secrets: &BTreeMap<String, String>,
    environment: bool,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Credentials, Refusal> {
    let parsed = match secrets.is_empty() && environment {
        true => Credentials::from_environment(variable),
        false => Credentials::from_secrets(secrets.iter()),
    };
    parsed.map_err(|e| Refusal::new(RefusalKind::Invalid, e.to_string()))
}

fn source_refusal(error: &store::StoreError) -> Refusal {
    let kind = match error.cause() {
        Cause::NotFound | Cause::NotADirectory => RefusalKind::NotFound,
        Cause::Denied => RefusalKind::Denied,
        Cause::Unavailable => RefusalKind::Unavailable,
        Cause::Stale | Cause::Internal => RefusalKind::Invalid,
    };
    Refusal::new(kind, error.to_string())
}

/// The broker has taken it away before it was here, or before it was served.
pub(crate) fn ended_meanwhile(id: MountId) -> Refusal {
    Refusal::new(RefusalKind::NotFound, format!("mount {id} was unpublished meanwhile"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_own_keys_are_used_only_where_that_is_allowed() {
        let own = |name: &str| name.starts_with("AWS_").then(|| "agent's".to_owned());
        let none = BTreeMap::new();
        assert!(credentials(&none, false, own).unwrap().is_empty());
        assert!(!credentials(&none, true, own).unwrap().is_empty());
        let secret =
            BTreeMap::from(["accessKeyId", "secretAccessKey"].map(|k| (k.to_owned(), "x".to_owned())));
        for environment in [true, false] {
            let found = credentials(&secret, environment, own).unwrap();
            assert_eq!(found.to_secrets()["secretAccessKey"], "x");
        }
    }
}
