//! One mounted volume: its descriptors, and the thread that keeps a worker on them until it is unpublished.

use super::policy::{Deaths, Verdict};
use super::rehearsal::{OTHER_INIT, introduce};
use super::spawn::{Spawner, Worker};
use crate::heals::{Heal, HealCause, Heals};
use crate::privileged::{self, Privileged};
use crate::scope::Scope;
use link::broker::{BrokerAnswer, BrokerRequest, Claim, MountId, Pod, Report, Resume};
use link::flight::{Collected, Flight, FlightError};
use link::worker::{Assign, Counts, FromWorker, Mode, ToWorker, recv};
use link::{MAX_MESSAGE, Packet, PacketError, failpoint};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant, SystemTime};
use volume::VolumeSpec;

/// How often the thread looks at heartbeat and stop flag while its worker is silent.
const TICK: Duration = Duration::from_millis(500);
/// A worker whose heartbeat stands still this long while requests wait is hung. Independent of the store: no
/// thread that beats ever waits for it.
const HUNG_AFTER: Duration = Duration::from_secs(5);
/// From Go to Serving.
const STEP_LIMIT: Duration = Duration::from_secs(10);
/// From Answered to the broker's word that the kernel has its INIT reply.
const GO_LIMIT: Duration = Duration::from_secs(60);
/// How long a killed worker may take to disappear before its successor goes ahead without it.
const REAP_LIMIT: Duration = Duration::from_secs(2);

/// What a worker's messages are answered with; implemented by `serve`.
pub trait Answer: Send + Sync {
    fn handle(&self, mount: &Arc<Mount>, worker: &Arc<Packet>, message: FromWorker);
}

pub struct Mount {
    pub id: MountId,
    pub spec: VolumeSpec,
    /// May the agent use credentials of its own where the volume has none?
    pub environment: bool,
    pub target: String,
    pub pod: Option<Pod>,
    pub claim: Option<Claim>,
    pub scope: Arc<Scope>,
    pub published: SystemTime,
    /// What every worker of this mount is told; `takeover` is set for successors.
    pub assign: Assign,
    /// As published or rotated; in memory only.
    secrets: Mutex<BTreeMap<String, String>>,
    device: OwnedFd,
    shared: OwnedFd,
    flight: Flight,
    roots: Vec<OwnedFd>,
    state: Mutex<State>,
    changed: Condvar,
    counts: Mutex<Counts>,
    /// Passthrough ids that the broker opened for us and that were not closed yet.
    backing: Mutex<HashSet<u32>>,
}

struct State {
    phase: Phase,
    since: SystemTime,
    worker: Option<Current>,
    go: bool,
    /// Published by an agent that is gone, nobody has served it since then.
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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Starting,
    /// The first worker has answered INIT and waits for the kernel to get it.
    Answered,
    Serving,
    Dead,
    Suspended,
    Failed,
    Stopped,
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
pub struct Started {
    pub init_reply: Vec<u8>,
    pub mode: Mode,
}

/// Everything outside a mount that its thread needs.
pub struct Surroundings {
    pub spawner: Arc<Spawner>,
    pub privileged: Arc<dyn Privileged>,
    pub answer: Arc<dyn Answer>,
    pub heals: Arc<Heals>,
    pub runtime: tokio::runtime::Handle,
    /// Told of mounts whose connection the kernel has ended: unmounted or aborted.
    pub ended: tokio::sync::mpsc::UnboundedSender<MountId>,
    /// Told of sources that stop or begin to answer.
    pub(crate) outages: tokio::sync::mpsc::UnboundedSender<crate::health::Change>,
    /// Debug: while this file exists nobody is started.
    pub suspend: Option<PathBuf>,
}

/// What a publish brings with it.
pub struct Parts {
    pub id: MountId,
    pub spec: VolumeSpec,
    pub secrets: BTreeMap<String, String>,
    pub environment: bool,
    pub target: String,
    pub pod: Option<Pod>,
    pub claim: Option<Claim>,
    pub scope: Arc<Scope>,
    pub assign: Assign,
    pub device: OwnedFd,
    pub roots: Vec<OwnedFd>,
}

/// What an agent that is gone has left of a mount.
pub struct Left {
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
    pub fn new(parts: Parts, init: &[u8]) -> Result<Arc<Self>, FlightError> {
        let shared = Flight::create()?;
        let flight = Flight::map(shared.as_fd())?;
        flight.set_init(init)?;
        Ok(Arc::new(Self::assemble(parts, shared, flight)))
    }

    /// Takes up what an agent that is gone was serving.
    pub fn adopt(parts: Parts, left: Left) -> Result<Arc<Self>, String> {
        let flight = Flight::map(left.shared.as_fd()).map_err(|e| e.to_string())?;
        let init_reply = flight.init_reply().ok_or("its shared memory holds no INIT reply")?;
        let mut mount = Self::assemble(parts, left.shared, flight);
        mount.backing = Mutex::new(left.backing.into_iter().collect());
        let state = mount.state.get_mut().unwrap_or_else(|p| p.into_inner());
        state.phase = Phase::Dead;
        state.go = true;
        state.adopted = Some((left.since, left.cause));
        state.mode = Some(left.mode);
        state.init_reply = init_reply;
        Ok(Arc::new(mount))
    }

    fn assemble(parts: Parts, shared: OwnedFd, flight: Flight) -> Self {
        let now = SystemTime::now();
        Self {
            id: parts.id,
            spec: parts.spec,
            environment: parts.environment,
            secrets: Mutex::new(parts.secrets),
            target: parts.target,
            pod: parts.pod,
            claim: parts.claim,
            scope: parts.scope,
            published: now,
            assign: parts.assign,
            device: parts.device,
            shared,
            flight,
            roots: parts.roots,
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
            backing: Mutex::default(),
        }
    }

    /// The connection's shared memory, for the broker to keep.
    pub fn shared(&self) -> std::io::Result<OwnedFd> {
        self.shared.try_clone()
    }

    /// The FUSE device, for a broker that has lost it.
    pub fn device(&self) -> std::io::Result<OwnedFd> {
        self.device.try_clone()
    }

    /// Passthrough ids that the kernel holds for this connection.
    pub fn backing(&self) -> Vec<u32> {
        self.backing_ids().iter().copied().collect()
    }

    /// In clear, for a broker that has lost them.
    pub fn secrets(&self) -> BTreeMap<String, String> {
        self.secrets.lock().unwrap_or_else(|p| p.into_inner()).clone()
    }

    pub fn rotated(&self, secrets: &BTreeMap<String, String>) {
        *self.secrets.lock().unwrap_or_else(|p| p.into_inner()) = secrets.clone();
    }

    /// What a successor must not decide anew.
    pub fn resume(&self) -> Resume {
        let mode = self.lock().mode.unwrap_or(self.assign.mode);
        Resume {
            mode,
            scope: self.scope.id.as_str().to_owned(),
            #[cfg(feature = "next-version")]
            published_by: Some(link::version::LINK),
        }
    }

    /// The kernel has its INIT reply, and requests come or may come: before that a publish is still under way.
    pub fn is_started(&self) -> bool {
        self.lock().go
    }

    pub fn state(&self) -> MountState {
        let s = self.lock();
        MountState {
            phase: s.phase,
            since: s.since,
            mode: s.mode,
            heals: s.heals,
            worker: s.worker.as_ref().map(|w| WorkerInfo { pid: w.pid }),
            counts: *self.counts.lock().unwrap_or_else(|p| p.into_inner()),
        }
    }

    /// Adds what a worker counted; the totals are part of [`Self::state`].
    pub fn count(&self, more: &Counts) {
        let mut c = self.counts.lock().unwrap_or_else(|p| p.into_inner());
        c.lookups += more.lookups;
        c.opens_passthrough += more.opens_passthrough;
        c.opens_kept += more.opens_kept;
        c.opens_estale += more.opens_estale;
        c.reads_hit += more.reads_hit;
        c.bytes_hit += more.bytes_hit;
        c.reads_miss += more.reads_miss;
        c.bytes_miss += more.bytes_miss;
        c.reads_detached += more.reads_detached;
        c.readdirs += more.readdirs;
        c.metadata_hits += more.metadata_hits;
        c.metadata_misses += more.metadata_misses;
        c.interrupts += more.interrupts;
        c.interrupted += more.interrupted;
        c.replayed += more.replayed;
        c.table_full += more.table_full;
    }

    pub fn backing_opened(&self, id: u32) {
        self.backing_ids().insert(id);
    }

    pub fn backing_closed(&self, id: u32) {
        self.backing_ids().remove(&id);
    }

    fn backing_ids(&self) -> std::sync::MutexGuard<'_, HashSet<u32>> {
        self.backing.lock().unwrap_or_else(|p| p.into_inner())
    }

    /// A worker that died between getting an id and recording it, or between dropping its record and closing it,
    /// leaves an id that nobody will ever use and that pins a cache file's blocks.
    fn close_leaked_backings(&self, around: &Surroundings) {
        let recorded: HashSet<u32> = self.flight.backings().into_iter().map(|(_, b)| b.id).collect();
        let leaked: Vec<u32> =
            self.backing_ids().iter().copied().filter(|id| !recorded.contains(id)).collect();
        for id in leaked {
            let ask = around.privileged.ask(BrokerRequest::BackingClose { mount: self.id, id }, Vec::new());
            match around.runtime.block_on(ask) {
                Ok(_) => self.backing_closed(id),
                Err(error) => {
                    tracing::warn!(mount = %self.id, id, %error, "a leaked backing id stays until unmount")
                }
            }
        }
    }

    /// Tells the worker that a cache file is gone.
    pub fn forget(&self, file: u64) {
        let socket = self.lock().worker.as_ref().map(|w| w.socket.clone());
        if let Some(socket) = socket {
            // A full queue or a dead worker: it will find out by itself, the file id is never reused.
            let body = ToWorker::Forget { file };
            let _ = link::worker::try_send(&socket, &body, &[]);
        }
    }

    /// Waits until the first worker has answered INIT.
    pub fn wait_started(&self, limit: Duration) -> Result<Started, String> {
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
        let mut state = self.lock();
        state.go = true;
        self.changed.notify_all();
        let waiting = |s: &mut State| matches!(s.phase, Phase::Answered | Phase::Starting | Phase::Dead);
        let (state, _) =
            self.changed.wait_timeout_while(state, limit, waiting).unwrap_or_else(|p| p.into_inner());
        match state.phase {
            Phase::Serving => Ok(()),
            phase => Err(format!("the worker is {phase:?} after {limit:?}: {}", state.why)),
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
        self.state.lock().unwrap_or_else(|p| p.into_inner())
    }

    fn enter(&self, phase: Phase, why: &str) {
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

    fn stopping(&self) -> bool {
        self.lock().stop
    }

    /// The thread of this mount: returns when it is stopped or given up.
    pub fn supervise(self: Arc<Self>, around: &Surroundings) {
        let mut deaths = Deaths::default();
        let mut takeover = false;
        let mut degraded = false;
        let mut cause = HealCause::Start;
        let mut replayed = 0;
        let adopted = self.lock().adopted.take();
        if let Some((since, end)) = adopted {
            takeover = true;
            cause = end;
            deaths.died(since, true);
            self.wait_for_the_last_worker();
            failpoint::hit("agent.workers-gone");
            let Some(left) = self.take_up(around, "its agent is gone", None) else { return };
            replayed = left;
            failpoint::hit("agent.collected");
        }
        while !self.stopping() {
            if around.suspend.as_ref().is_some_and(|file| file.exists()) {
                self.enter(Phase::Suspended, "respawn is suspended by the debug file");
                self.pause(Duration::from_millis(20));
                continue;
            }
            match deaths.decide(Instant::now(), self.spec.parameters.heal_timeout) {
                Verdict::GiveUp => return self.give_up(around),
                Verdict::StartAfter(pause) if !pause.is_zero() => {
                    if self.pause(pause) {
                        break;
                    }
                }
                Verdict::StartAfter(_) => {}
            }
            let mut worker = match around
                .spawner
                .take()
                .map_err(|e| e.to_string())
                .and_then(|w| self.assign(&w, takeover).map(|()| w))
            {
                Ok(worker) => worker,
                Err(why) => {
                    tracing::error!(mount = %self.id, volume = %self.spec.id, why, "worker did not come up");
                    self.enter(if takeover { Phase::Dead } else { Phase::Starting }, &why);
                    deaths.died(Instant::now(), false);
                    // A first start that fails is told to whoever publishes.
                    if takeover && deaths.is_stuck() && !std::mem::replace(&mut degraded, true) {
                        self.tell(around, Report::Degraded { why: format!("no worker comes up: {why}") });
                    }
                    around.spawner.refill();
                    continue;
                }
            };
            if takeover {
                failpoint::hit("agent.worker-assigned");
            }
            self.set_worker(Some(Current { pid: worker.pid(), socket: worker.socket.clone() }));
            around.spawner.refill();
            let mut served = false;
            let end = self.live(&worker, around, &mut |me| {
                served = true;
                if takeover {
                    failpoint::hit("agent.worker-serving");
                }
                if let Some(since) = deaths.unserved_since() {
                    me.healed(around, cause, since.elapsed(), replayed);
                }
                if std::mem::take(&mut degraded) {
                    me.tell(around, Report::Recovered);
                }
                deaths.serving();
            });
            self.set_worker(None);
            let died = Instant::now();
            worker.kill();
            let status = worker.reap(REAP_LIMIT);
            if self.stopping() {
                break;
            }
            self.enter(Phase::Dead, &format!("{end:?}"));
            deaths.died(died, served);
            let Some(left) = self.take_up(around, &format!("{end:?}"), status) else { return };
            replayed = left;
            cause = match end {
                End::Hung => HealCause::Hang,
                _ => HealCause::of(status),
            };
            // Before Go nothing was read from the device, and INIT has not been answered: start over.
            takeover = self.lock().go;
            if !takeover {
                self.enter(Phase::Starting, "");
            }
        }
        self.enter(Phase::Stopped, "");
    }

    /// Nobody reads the device now: what the dead worker took and did not answer becomes its successor's work. Returns
    /// how many requests that are; None if there is nothing left to serve.
    fn take_up(&self, around: &Surroundings, end: &str, status: Option<ExitStatus>) -> Option<u64> {
        let collected = self.flight.collect(self.device.as_fd()).unwrap_or_else(|error| {
            // The device says nothing sensible: the successor will find out, or fail its self-tests.
            tracing::error!(mount = %self.id, %error, "what the dead worker left could not be collected");
            Collected::default()
        });
        self.report(end, status, &collected);
        if collected.ended || self.connection_ended() {
            // Unmounted or aborted by somebody.
            self.enter(Phase::Failed, "the kernel has ended the connection");
            let _ = around.ended.send(self.id); // fails only when the agent is shutting down
            return None;
        }
        self.close_leaked_backings(around);
        Some(collected.orphans as u64)
    }

    /// The workers of an agent that is gone are being killed by the kernel; none of them is our child.
    fn wait_for_the_last_worker(&self) {
        let end = Instant::now() + REAP_LIMIT;
        while Flight::is_held(self.shared.as_fd()) {
            if Instant::now() >= end {
                tracing::warn!(mount = %self.id, "the last worker is stuck in the kernel: its successor goes ahead without it");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The kernel says so through poll; a read would say it with ENODEV, but might take a request.
    fn connection_ended(&self) -> bool {
        self.device_says(PollFlags::ERR)
    }

    fn device_says(&self, event: PollFlags) -> bool {
        let mut device = [PollFd::new(&self.device, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut device, Some(&now)).is_ok() && device[0].revents().contains(event)
    }

    /// Sleeps unless stopped; true when stopped.
    fn pause(&self, time: Duration) -> bool {
        let state = self.lock();
        let (state, _) =
            self.changed.wait_timeout_while(state, time, |s| !s.stop).unwrap_or_else(|p| p.into_inner());
        state.stop
    }

    fn set_worker(&self, worker: Option<Current>) {
        self.lock().worker = worker;
    }

    /// Hands the connection over and waits for the INIT answer.
    fn assign(&self, worker: &Worker, takeover: bool) -> Result<(), String> {
        let assign = Assign { takeover, ..self.assign.clone() };
        let (init_reply, mode) =
            introduce(worker, assign, self.device.as_fd(), self.shared.as_fd(), &self.roots)?;
        let mut state = self.lock();
        if takeover {
            if state.init_reply != init_reply {
                // Flags are frozen for the life of the connection: a worker that wants others cannot serve it.
                return Err(OTHER_INIT.into());
            }
        } else {
            state.init_reply = init_reply;
            state.mode = Some(mode);
            drop(state);
            self.enter(Phase::Answered, "");
        }
        Ok(())
    }

    /// From Go to the end of this worker.
    fn live(self: &Arc<Self>, worker: &Worker, around: &Surroundings, serving: &mut dyn FnMut(&Self)) -> End {
        {
            let state = self.lock();
            let (state, _) = self
                .changed
                .wait_timeout_while(state, GO_LIMIT, |s| !s.go && !s.stop)
                .unwrap_or_else(|p| p.into_inner());
            if state.stop {
                return End::Stopped;
            }
            if !state.go {
                drop(state);
                // The broker went away in the middle of a publish: nobody will ever ask for this mount.
                tracing::warn!(mount = %self.id, volume = %self.spec.id, "a publish was not completed: dropped");
                let _ = around.ended.send(self.id); // fails only when the agent is shutting down
                self.stop();
                return End::Stopped;
            }
        }
        if worker.send(&ToWorker::Go, &[]).is_err() {
            return End::Closed;
        }
        if worker.socket.set_recv_timeout(Some(TICK)).is_err() {
            return End::Closed;
        }
        let mut buffer = vec![0; MAX_MESSAGE];
        let mut beat = Heartbeat::new(self.flight.heartbeat());
        let mut last_look = Instant::now();
        let began = Instant::now();
        let mut is_serving = false;
        loop {
            match recv::<FromWorker>(&worker.socket, &mut buffer) {
                Ok((FromWorker::Serving, _)) => {
                    is_serving = true;
                    self.enter(Phase::Serving, "");
                    serving(self);
                }
                Ok((FromWorker::Failed { why }, _)) => return End::Failed(why),
                Ok((message, _)) => around.answer.handle(self, &worker.socket, message),
                Err(PacketError::TimedOut) => {}
                Err(PacketError::Closed) if self.stopping() => return End::Stopped,
                Err(PacketError::Closed) => return End::Closed,
                Err(error) => return End::Failed(error.to_string()),
            }
            if !is_serving && began.elapsed() > STEP_LIMIT {
                return End::Hung;
            }
            if last_look.elapsed() >= TICK {
                last_look = Instant::now();
                if beat.stands_still(self.flight.heartbeat()) && self.requests_wait(around) {
                    return End::Hung;
                }
            }
        }
    }

    fn requests_wait(&self, around: &Surroundings) -> bool {
        let ask = around.privileged.ask(BrokerRequest::Waiting { mount: self.id }, Vec::new());
        match around.runtime.block_on(ask) {
            Ok(BrokerAnswer::Waiting { count }) => count > 0,
            // Unknown (the broker is away, or sees no fusectl): those that were read stand in the shared table, and
            // the device is readable while there are others.
            _ => self.flight.in_flight() > 0 || self.device_says(PollFlags::IN),
        }
    }

    fn tell(&self, around: &Surroundings, report: Report) {
        privileged::report(&around.privileged, &around.runtime, self.id, report);
    }

    fn healed(&self, around: &Surroundings, cause: HealCause, took: Duration, replayed: u64) {
        self.lock().heals += 1;
        around.heals.record(Heal {
            at: SystemTime::now(),
            volume: self.spec.id.clone(),
            mount: self.id,
            cause,
            took,
            level: cause.level(),
            replayed,
        });
        tracing::info!(
            mount = %self.id, volume = %self.spec.id, cause = cause.name(), replayed,
            duration_us = took.as_micros() as u64, "healed: a successor serves the mount"
        );
    }

    fn report(&self, end: &str, status: Option<ExitStatus>, collected: &Collected) {
        tracing::warn!(
            mount = %self.id, volume = %self.spec.id, end,
            status = %status.map(|s| s.to_string()).unwrap_or_else(|| "not known".into()),
            left = collected.orphans, "worker ended"
        );
        for request in &collected.poisoned {
            tracing::error!(
                mount = %self.id, volume = %self.spec.id, request = ?request,
                "a request killed worker after worker: answered EIO. Please report this with the log above"
            );
        }
    }

    fn give_up(&self, around: &Surroundings) {
        let why = format!(
            "nobody could serve this mount for {:?} (healTimeout): {}",
            self.spec.parameters.heal_timeout,
            self.lock().why
        );
        tracing::error!(mount = %self.id, volume = %self.spec.id, why, "giving up: readers get ENOTCONN");
        let ask =
            around.privileged.ask(BrokerRequest::Abort { mount: self.id, why: why.clone() }, Vec::new());
        if let Err(error) = around.runtime.block_on(ask) {
            tracing::error!(mount = %self.id, %error, "the broker could not abort the connection");
        }
        self.enter(Phase::Failed, &why);
    }
}

/// How a worker's time ended.
#[derive(Debug)]
enum End {
    Closed,
    Failed(#[allow(dead_code, reason = "shown through Debug")] String),
    Hung,
    Stopped,
}

struct Heartbeat {
    value: u64,
    changed: Instant,
}

impl Heartbeat {
    fn new(value: u64) -> Self {
        Self { value, changed: Instant::now() }
    }
    fn stands_still(&mut self, now: u64) -> bool {
        if self.value != now {
            *self = Self::new(now);
        }
        self.changed.elapsed() >= HUNG_AFTER
    }
}
