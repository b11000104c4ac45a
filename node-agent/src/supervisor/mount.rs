//! One mounted volume: what is known of it and what others may ask of it. Its thread is in `worker_loop`.
//!
//! | part | owns |
//! |---|---|
//! | [`Connection`] | the device, the shared memory beside it, the cache roots |
//! | `state`, one lock | the worker that is here, the phase, whether it goes or stops |
//! | [`Backings`], [`Condemned`], [`Forgets`] | passthrough ids; what killed agents; files that are gone |

mod backings;
mod condemned;
mod forgets;

use super::connection::{Connection, Descriptors};
use super::machine::Phase;
use super::spawn::{Spawner, Worker};
use crate::admission::Turn;
use crate::lock::lock;
use crate::metrics::Metrics;
use crate::privileged::Privileged;
use crate::serve::questions::Questions;
use crate::staging::{Area, Caller, Executed};
use crate::supervisor::heals::{HealCause, Heals};
use crate::volumes::scope::{Member, Scope};
use backings::Backings;
use condemned::Condemned;
use forgets::Forgets;
use inflight::{Behalf, InflightError, Poisoned, Room};
use link::broker::{MountId, Resume};
use link::worker::{Assign, Counts, FromWorker, Mode};
use link::{Access, MountSpec, Packet};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant, SystemTime};
use volume::VolumeSpec;

/// What a worker's messages are answered with; implemented by `serve`.
pub trait Answer: Send + Sync {
    fn handle(&self, mount: &Arc<Mount>, worker: &Arc<Packet>, message: FromWorker);
}

pub struct Mount {
    pub id: MountId,
    pub spec: VolumeSpec,
    /// As it came: passed on with what only a later version understands.
    pub described: MountSpec,
    pub scope: Arc<Scope>,
    /// Until it ends.
    member: Mutex<Option<Member>>,
    pub published: SystemTime,
    /// What every worker of this mount gets; `takeover` is set for successors.
    pub assign: Assign,
    /// As published or rotated; in memory only.
    secrets: Mutex<BTreeMap<String, String>>,
    pub(super) connection: Connection,
    /// Of a volume that can be written to.
    pub(crate) area: Option<Arc<Area>>,
    pub(crate) executed: Executed,
    condemned: Condemned,
    state: Mutex<State>,
    changed: Condvar,
    counts: Mutex<Counts>,
    backings: Backings,
    forgets: Forgets,
    /// Of the worker that is here.
    questions: Mutex<Arc<Questions>>,
    /// Until it serves for the first time.
    turn: Mutex<Option<Turn>>,
}

/// Between two looks whether a program still waits for an answer.
const LET_GO: Duration = Duration::from_secs(3);

struct State {
    phase: Phase,
    since: SystemTime,
    worker: Option<Current>,
    go: bool,
    /// Published by an agent that is gone; no worker has served it since then.
    adopted: Option<(Instant, HealCause)>,
    stop: bool,
    mode: Option<Mode>,
    init_reply: Vec<u8>,
    why: String,
    heals: u64,
}

struct Current {
    pid: u32,
    socket: Arc<Packet>,
    /// Its memory group, once it has one.
    group: Option<String>,
}

/// For status.
#[derive(Clone, Debug)]
pub struct MountState {
    pub phase: Phase,
    pub since: SystemTime,
    pub mode: Option<Mode>,
    pub heals: u64,
    pub worker: Option<WorkerInfo>,
    pub counts: Counts,
}

#[derive(Clone, Copy, Debug)]
pub struct WorkerInfo {
    pub pid: u32,
}

/// What the first worker said.
#[derive(Clone, Debug)]
pub(crate) struct Started {
    pub init_reply: Vec<u8>,
    pub mode: Mode,
}

/// Everything outside a mount that its thread needs.
pub struct MountContext {
    pub spawner: Arc<Spawner>,
    pub privileged: Arc<dyn Privileged>,
    pub answer: Arc<dyn Answer>,
    pub heals: Arc<Heals>,
    pub metrics: Arc<Metrics>,
    /// A worker that stands still for this long while requests wait is replaced.
    pub hang_limit: Duration,
    /// Most memory of one worker, bytes.
    pub memory_limit: Option<u64>,
    /// Said once: workers have no limit.
    pub unlimited: std::sync::Once,
    pub runtime: tokio::runtime::Handle,
    /// Gets the mounts whose connection the kernel has ended: unmounted or aborted.
    pub ended: tokio::sync::mpsc::UnboundedSender<MountId>,
    pub workers: crate::config::Workers,
    /// Debug: while this file exists no worker is started.
    pub suspend: Option<PathBuf>,
}

/// What a publish brings with it.
pub(crate) struct Parts {
    pub id: MountId,
    pub spec: VolumeSpec,
    pub described: MountSpec,
    pub secrets: BTreeMap<String, String>,
    pub scope: Arc<Scope>,
    pub(crate) member: Member,
    pub assign: Assign,
    pub(crate) area: Option<Arc<Area>>,
}

/// What an agent that is gone has left of a mount.
pub(crate) struct Left {
    /// The connection's shared memory.
    pub shared: OwnedFd,
    pub mode: Mode,
    /// Passthrough ids that the kernel holds.
    pub backing: Vec<u32>,
    pub since: Instant,
    /// What became of that agent.
    pub cause: HealCause,
}

impl Mount {
    pub(crate) fn new(
        parts: Parts,
        descriptors: Descriptors,
        init: &[u8],
        room: Room,
    ) -> Result<Arc<Self>, InflightError> {
        Ok(Arc::new(Self::assemble(parts, Connection::create(descriptors, init, room)?)))
    }

    /// Takes up what an agent that is gone was serving.
    pub(crate) fn adopt(parts: Parts, descriptors: Descriptors, left: Left) -> Result<Arc<Self>, String> {
        let (connection, init_reply) = Connection::take_over(descriptors, left.shared)?;
        let mut mount = Self::assemble(parts, connection);
        mount.backings = Backings::of(left.backing);
        let state = mount.state.get_mut().unwrap_or_else(|p| p.into_inner());
        state.phase = Phase::Dead;
        state.go = true;
        state.adopted = Some((left.since, left.cause));
        state.mode = Some(left.mode);
        state.init_reply = init_reply;
        Ok(Arc::new(mount))
    }

    fn assemble(parts: Parts, connection: Connection) -> Self {
        let now = SystemTime::now();
        Self {
            id: parts.id,
            spec: parts.spec,
            described: parts.described,
            secrets: Mutex::new(parts.secrets),
            scope: parts.scope,
            member: Mutex::new(Some(parts.member)),
            published: now,
            assign: parts.assign,
            connection,
            area: parts.area,
            executed: Executed::default(),
            condemned: Condemned::default(),
            state: Mutex::new(State {
                phase: Phase::Starting,
                since: now,
                worker: None,
                go: false,
                adopted: None,
                stop: false,
                mode: None,
                init_reply: Vec::new(),
                why: String::new(),
                heals: 0,
            }),
            changed: Condvar::new(),
            counts: Mutex::default(),
            backings: Backings::default(),
            forgets: Forgets::default(),
            questions: Mutex::default(),
            turn: Mutex::default(),
        }
    }

    /// Of its pod.
    pub fn namespace(&self) -> Option<&str> {
        self.described.namespace()
    }

    /// The connection's shared memory, for the broker to keep.
    pub fn shared(&self) -> std::io::Result<OwnedFd> {
        self.connection.shared()
    }

    /// The FUSE device, for a broker that has lost it.
    pub fn device(&self) -> std::io::Result<OwnedFd> {
        self.connection.device()
    }

    /// Passthrough ids that the kernel holds for this connection.
    pub fn backing(&self) -> Vec<u32> {
        self.backings.all()
    }

    /// In clear, for a broker that has lost them.
    pub fn secrets(&self) -> BTreeMap<String, String> {
        lock(&self.secrets).clone()
    }

    pub fn rotated(&self, secrets: &BTreeMap<String, String>) {
        *lock(&self.secrets) = secrets.clone();
    }

    /// What this volume wanted of its scope does not bind the scope any more, though a worker may still hold the mount.
    pub(crate) fn leave_scope(&self) {
        drop(lock(&self.member).take());
    }

    /// Others come up when it is there.
    pub(crate) fn keep_turn(&self, turn: Turn) {
        *lock(&self.turn) = Some(turn);
    }
    pub(crate) fn end_turn(&self) {
        drop(lock(&self.turn).take());
    }

    /// What a successor must not decide anew.
    pub fn resume(&self) -> Resume {
        let mode = self.lock().mode.unwrap_or(self.assign.mode);
        Resume { mode, scope: self.scope.id.as_str().to_owned(), later: link::Later::here() }
    }

    /// The kernel has its INIT reply, and requests come or may come: before that a publish is still under way.
    pub fn is_started(&self) -> bool {
        self.lock().go
    }

    /// There is something that a successor could be given.
    pub fn is_live(&self) -> bool {
        let state = self.lock();
        state.go && state.phase != Phase::Failed
    }

    /// Since when names that are known last are shown because the source gives no answer.
    pub(crate) fn stale_since(&self) -> Option<SystemTime> {
        crate::source::outage::Tolerance::of(&self.spec.parameters).and(self.scope.outage.since())
    }

    pub fn state(&self) -> MountState {
        let s = self.lock();
        MountState {
            phase: s.phase,
            since: s.since,
            mode: s.mode,
            heals: s.heals,
            worker: s.worker.as_ref().map(|w| WorkerInfo { pid: w.pid }),
            counts: *lock(&self.counts),
        }
    }

    /// Adds what a worker counted; the totals are part of [`Self::state`].
    pub fn count(&self, more: &Counts) {
        add(&mut lock(&self.counts), more);
    }

    pub(crate) fn questions(&self) -> Arc<Questions> {
        self.lock_questions().clone()
    }

    fn lock_questions(&self) -> std::sync::MutexGuard<'_, Arc<Questions>> {
        lock(&self.questions)
    }

    /// For whom the agent runs that answers a question of this request's.
    pub(crate) fn behalf(&self, unique: u64) -> Option<Behalf> {
        self.connection.behalf(unique)
    }

    /// For whom the agent executes this request.
    pub(crate) fn caller<'m>(&'m self, unique: u64, waits: &'m (dyn Fn(u64) -> bool + Sync)) -> Caller<'m> {
        let read_only = self.described.access != Access::ReadWrite;
        Caller { mount: self.id, unique, waits, inflight: self.connection.inflight(), read_only }
    }

    /// Does the kernel wait for an answer to this request, as far as is recorded?
    pub(crate) fn is_in_flight(&self, unique: u64) -> bool {
        self.connection.is_in_flight(unique)
    }

    /// Returns when the caller of this request waits for no answer any more: killed, its worker has let it go. Never
    /// for a question of the worker's own.
    pub(crate) async fn let_go(&self, unique: u64) {
        let mut seen = false;
        // What a dying worker leaves is found again by the next one: two looks in a row must miss it.
        let mut missed = 0;
        while missed < 2 {
            match self.connection.is_in_flight(unique) {
                true => (seen, missed) = (true, 0),
                false if seen => missed += 1,
                false => return std::future::pending().await,
            }
            tokio::time::sleep(LET_GO).await;
        }
    }

    pub(super) fn condemn(&self, request: &Poisoned) {
        if let Some(subject) = request.subject() {
            self.condemned.add(subject, Instant::now());
        }
    }

    /// Has one like it killed agent after agent, a short time ago?
    pub(crate) fn is_condemned(&self, unique: u64) -> bool {
        self.condemned.has(|| self.connection.subject(unique), Instant::now())
    }

    pub(crate) fn backing_opened(&self, id: u32) {
        self.backings.opened(id);
    }

    pub fn backing_closed(&self, id: u32) {
        self.backings.closed(id);
    }

    /// A worker that died between getting an id and recording it, or between dropping its record and closing it,
    /// leaves an id that no worker will ever use and that pins a cache file's blocks.
    pub(super) fn leaked_backings(&self) -> Vec<u32> {
        self.backings.leaked(&self.connection.recorded_ids())
    }

    /// Tells the worker that a cache file is gone. A dead one has let it go, and its successor looks by itself.
    pub fn forget(&self, file: u64) {
        let Some(socket) = self.lock().worker.as_ref().map(|w| w.socket.clone()) else { return };
        self.forgets.send(file, &socket);
    }

    /// The worker has read what it was sent.
    pub(super) fn flush_forgets(&self, worker: &Packet) {
        self.forgets.flush(worker);
    }

    /// Waits until the first worker has answered INIT.
    pub(crate) fn wait_started(&self, limit: Duration) -> Result<Started, String> {
        let state = self.lock();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, limit, |s| s.phase == Phase::Starting)
            .unwrap_or_else(|p| p.into_inner());
        match (state.phase, state.mode) {
            (Phase::Answered, Some(mode)) => Ok(Started { init_reply: state.init_reply.clone(), mode }),
            (Phase::Starting, _) => Err(format!("no worker came up within {limit:?}: {}", state.why)),
            _ => Err(format!("the worker could not start: {}", state.why)),
        }
    }

    /// The kernel has its INIT reply: let the worker read. Waits until it does.
    pub fn start(&self, limit: Duration) -> Result<(), String> {
        let begun = Instant::now();
        let mut state = self.lock();
        state.go = true;
        self.changed.notify_all();
        let waiting = |s: &mut State| matches!(s.phase, Phase::Answered | Phase::Starting | Phase::Dead);
        let (state, _) =
            self.changed.wait_timeout_while(state, limit, waiting).unwrap_or_else(|p| p.into_inner());
        match state.phase {
            Phase::Serving => Ok(()),
            // It may have ended long before the limit.
            phase => Err(format!("the worker is {phase:?} after {:?}: {}", begun.elapsed(), state.why)),
        }
    }

    /// Ends the thread and its worker; the descriptors go with the last reference.
    pub fn stop(&self) {
        let mut state = self.lock();
        state.stop = true;
        if let Some(worker) = &state.worker {
            worker.socket.shutdown();
        }
        self.changed.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn enter(&self, phase: Phase, why: &str) {
        let mut state = self.lock();
        if state.phase != phase {
            tracing::debug!(mount = %self.id, volume = %self.spec.id, from = ?state.phase, to = ?phase, why, "worker");
            state.phase = phase;
            state.since = SystemTime::now();
        }
        if !why.is_empty() {
            state.why = why.to_owned();
        }
        self.changed.notify_all();
    }

    /// False: not yet at `until`, or it is stopped.
    pub(super) fn wait_for_go(&self, until: Instant) -> bool {
        let limit = until.saturating_duration_since(Instant::now());
        let state = self.lock();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, limit, |s| !s.go && !s.stop)
            .unwrap_or_else(|p| p.into_inner());
        state.go && !state.stop
    }

    pub(super) fn stopping(&self) -> bool {
        self.lock().stop
    }

    /// Sleeps unless stopped; true when stopped.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let state = self.lock();
        let (state, _) =
            self.changed.wait_timeout_while(state, time, |s| !s.stop).unwrap_or_else(|p| p.into_inner());
        state.stop
    }

    /// From the agent that is gone: since when no worker has served it, and what became of that agent.
    pub(super) fn take_adopted(&self) -> Option<(Instant, HealCause)> {
        self.lock().adopted.take()
    }

    /// The answer that the connection has from now on.
    pub(super) fn set_init_reply(&self, init_reply: Vec<u8>, mode: Mode) {
        let mut state = self.lock();
        state.init_reply = init_reply;
        state.mode = Some(mode);
    }

    pub(super) fn set_worker(&self, worker: &Worker) {
        self.change_worker(Some(Current { pid: worker.pid(), socket: worker.socket.clone(), group: None }));
    }

    /// Returns its memory group.
    pub(super) fn end_worker(&self) -> Option<String> {
        self.change_worker(None).and_then(|worker| worker.group)
    }

    fn change_worker(&self, worker: Option<Current>) -> Option<Current> {
        std::mem::take(&mut *self.lock_questions()).end();
        self.forgets.clear();
        std::mem::replace(&mut self.lock().worker, worker)
    }

    /// The worker that is here, unless it has a memory group.
    pub(crate) fn worker_without_group(&self) -> Option<u32> {
        self.lock().worker.as_ref().filter(|w| w.group.is_none()).map(|w| w.pid)
    }

    /// Gives the name back if that worker is dead already.
    pub(super) fn note_group(&self, pid: u32, group: String) -> Option<String> {
        match self.lock().worker.as_mut().filter(|w| w.pid == pid) {
            Some(worker) => {
                worker.group = Some(group);
                None
            }
            None => Some(group),
        }
    }

    pub(super) fn is_worker(&self, pid: u32) -> bool {
        self.lock().worker.as_ref().is_some_and(|w| w.pid == pid)
    }

    /// The worker that serves it.
    pub(super) fn served_by(&self) -> Option<u32> {
        let state = self.lock();
        state.worker.as_ref().filter(|_| state.phase == Phase::Serving).map(|worker| worker.pid)
    }

    pub(super) fn count_heal(&self) {
        self.lock().heals += 1;
    }
}

/// A worker says what it likes: no number of its ends the agent.
fn add(total: &mut Counts, more: &Counts) {
    let add = |total: &mut u64, more: u64| *total = total.saturating_add(more);
    add(&mut total.lookups, more.lookups);
    add(&mut total.opens_passthrough, more.opens_passthrough);
    add(&mut total.opens_kept, more.opens_kept);
    add(&mut total.opens_estale, more.opens_estale);
    add(&mut total.reads_hit, more.reads_hit);
    add(&mut total.bytes_hit, more.bytes_hit);
    add(&mut total.reads_spliced, more.reads_spliced);
    add(&mut total.reads_miss, more.reads_miss);
    add(&mut total.bytes_miss, more.bytes_miss);
    add(&mut total.reads_uncached, more.reads_uncached);
    add(&mut total.readdirs, more.readdirs);
    add(&mut total.metadata_hits, more.metadata_hits);
    add(&mut total.metadata_misses, more.metadata_misses);
    add(&mut total.interrupts, more.interrupts);
    add(&mut total.interrupted, more.interrupted);
    add(&mut total.replayed, more.replayed);
    add(&mut total.table_full, more.table_full);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_of_a_workers_ends_the_agent() {
        let lie = Counts { lookups: u64::MAX, bytes_hit: u64::MAX - 1, ..Counts::default() };
        let mut total = Counts { lookups: 1, bytes_hit: 1, reads_hit: 7, ..Counts::default() };
        add(&mut total, &lie);
        add(&mut total, &lie);
        assert_eq!((total.lookups, total.bytes_hit, total.reads_hit), (u64::MAX, u64::MAX, 7));
    }
}
