//! The node: what happens when.

mod faults;
mod handoff;
mod judge;
mod processes;
mod renewals;
mod steps;

pub use steps::STEPS;

use crate::agent::{Agent, Asked, Held, Role, Wanted, Worker};
use crate::broker::{Broker, Volume};
use crate::kernel::{ConnectionId, Init, Kernel, Outcome, WorkerId};
use crate::kubelet::Kubelet;
use crate::queue::Queue;
use crate::world::steps::Process;
use anyhow::{Context, Result, ensure};
use csi_plugin::broker::compare::Finding;
use csi_plugin::broker::mounts_table::{Mount, State};
use inflight::Blame;
use link::broker::MountId;
use node_agent::supervisor::heals::HealCause;
use node_agent::supervisor::machine::{Action, Event, Limits, Machine, Outcome as Over, State as Life, TICK};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const LIMITS: Limits =
    Limits { heal_timeout: Duration::from_secs(60), hang_limit: Duration::from_secs(10) };
const PUBLISH_LIMIT: Duration = Duration::from_secs(15);
const ADOPT_LIMIT: Duration = Duration::from_secs(20);
/// No worker starts for so long: with what went before and comes after, `healTimeout` may pass.
const LONG_OUTAGE: Duration = Duration::from_secs(40);
/// Deaths after which a request is failed as poisonous.
const DEATHS_MAX: u32 = 5;
/// At the end of a history nothing is hurt for so long: what heals has healed.
const QUIET: Duration = Duration::from_secs(300);
const KILLED: i32 = 9;
const ABORTED: i32 = 6;

/// What a history has.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub volumes: usize,
    pub faults: usize,
}

/// What a history came to.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    pub faults: BTreeMap<&'static str, usize>,
    pub answered: usize,
    pub poisoned: usize,
    pub ended: usize,
    pub heals: usize,
    /// Dead mounts that were made anew.
    pub renewals: usize,
    pub workers: usize,
    /// The longest call that was answered.
    pub stall: Duration,
    /// Transitions of machines that supervise a mount.
    pub transitions: BTreeSet<(&'static str, &'static str, &'static str)>,
    /// Of those that hand mounts over.
    pub handoffs: BTreeSet<(&'static str, &'static str, &'static str)>,
    /// At which steps processes died, and how often.
    pub steps: BTreeMap<&'static str, usize>,
    /// By how they ended.
    pub outcomes: BTreeMap<&'static str, usize>,
}

/// Why a connection has ended: what an application may see of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    Unpublished,
    ByOthers,
    /// Its publish failed.
    NotPublished,
    /// No process held it any more.
    LetGo,
    HealTimeout,
    GivenUp,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Question {
    Publish,
    Start,
    Adopt { since: Instant },
    Unpublish,
}

#[derive(Debug)]
pub(crate) enum Ev {
    Kubelet(usize),
    Call(usize),
    Answer(WorkerId, ConnectionId, u64),
    Dies(WorkerId, i32),
    Machine(i32, MountId, WorkerId, Event),
    Tick(i32, MountId),
    Beat(i32, MountId, WorkerId),
    AwaitPredecessor(i32, MountId, u32),
    Asked(i32, u64, u64, MountId, ConnectionId, usize, Question),
    Answered(u64, u64, bool),
    Limit(u64, u64),
    /// A mount that the agent cannot bring up in its time is dropped by itself.
    NotPrepared(i32, MountId),
    AgentStarts,
    AgentExits(i32),
    BrokerStarts,
    /// What a hand-off waits for is looked at.
    Handoff(u64, u64),
    Connects(i32, u64),
    /// The broker has noticed that this agent is gone.
    Lost(u64, i32),
    Look(u64),
    Fault,
    FaultOfHandoff,
    StoreBack,
    WorkersBack,
    /// Is the debug file still there?
    LookSuspended(i32, MountId),
}

/// Any worker, for events of none.
const NOBODY: WorkerId = WorkerId(0);

#[derive(Debug)]
struct Pending {
    /// The process that was asked.
    pid: Option<i32>,
    question: Question,
    mount: MountId,
    volume: usize,
}

pub struct World {
    pub(crate) queue: Queue<Ev>,
    pub(crate) rng: SmallRng,
    pub(crate) kernel: Kernel,
    pub(crate) volumes: Vec<Volume>,
    pub(crate) kubelets: Vec<Kubelet>,
    pub(crate) broker: Option<Broker>,
    broker_life: u64,
    /// By their process ids: one serves, and another one may be about to.
    pub(crate) agents: BTreeMap<i32, Agent>,
    last_pid: i32,
    /// The node's agent dies as the next successor connects.
    kills_agent_at_handoff: bool,
    /// The agent that has the lock on cache and state.
    owner: Option<i32>,
    workers: BTreeMap<WorkerId, Worker>,
    pending: BTreeMap<u64, Pending>,
    next: u64,
    faults_left: usize,
    /// The next process that gets there dies.
    armed: Option<&'static str>,
    store_is_away: bool,
    /// No worker serves, since then: none can be started, or see `self_test_fails`.
    no_workers: Option<Duration>,
    /// The debug file is there.
    is_suspended: bool,
    /// What starts is no good.
    self_test_fails: bool,
    /// From when to when no worker served.
    outage: Option<(Duration, Duration)>,
    pub(crate) reasons: BTreeMap<ConnectionId, Reason>,
    summary: Summary,
    /// Every event is printed: MILLPOND_TRACE is set.
    is_traced: bool,
    _directory: tempfile::TempDir,
}

impl World {
    /// Runs one history to its end.
    pub fn history(seed: u64, plan: Plan) -> Result<Summary> {
        let mut world = Self::new(seed, plan)?;
        world.run().with_context(|| format!("history of seed {seed}"))?;
        Ok(world.summary)
    }

    fn new(seed: u64, plan: Plan) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let root = directory.path().canonicalize()?;
        let volumes = (0..plan.volumes).map(|n| Volume::new(n, &root)).collect::<Result<Vec<_>>>()?;
        let mut world = Self {
            queue: Queue::new(),
            rng: SmallRng::seed_from_u64(seed),
            kernel: Kernel::default(),
            kubelets: vec![Kubelet::default(); volumes.len()],
            volumes,
            broker: None,
            broker_life: 0,
            agents: BTreeMap::new(),
            last_pid: 100,
            kills_agent_at_handoff: false,
            owner: None,
            workers: BTreeMap::new(),
            pending: BTreeMap::new(),
            next: 0,
            faults_left: plan.faults,
            armed: None,
            store_is_away: false,
            no_workers: None,
            is_suspended: false,
            self_test_fails: false,
            outage: None,
            reasons: BTreeMap::new(),
            summary: Summary::default(),
            is_traced: std::env::var_os("MILLPOND_TRACE").is_some(),
            _directory: directory,
        };
        world.after_ms(0..50, Ev::BrokerStarts);
        world.after_ms(0..50, Ev::AgentStarts);
        for volume in 0..world.volumes.len() {
            world.after_ms(0..3000, Ev::Kubelet(volume));
            world.after_ms(0..3000, Ev::Call(volume));
        }
        world.after_ms(5000..6000, Ev::Fault);
        Ok(world)
    }

    pub(crate) fn after_ms(&mut self, range: std::ops::Range<u64>, event: Ev) {
        let delay = Duration::from_micros(self.rng.random_range(range.start * 1000..range.end * 1000));
        self.queue.after(delay, event);
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.rng.random_range(0..100) < percent
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn run(&mut self) -> Result<()> {
        let mut end = None;
        while let Some(event) = self.queue.pop() {
            if self.faults_left == 0 {
                let end = *end.get_or_insert(self.queue.elapsed() + QUIET);
                if self.queue.elapsed() > end {
                    return judge::judge(self);
                }
            }
            self.handle(event)?;
        }
        anyhow::bail!("nothing will ever happen again")
    }

    fn handle(&mut self, event: Ev) -> Result<()> {
        if self.is_traced {
            eprintln!("{:>12.3?} {event:?}", self.queue.elapsed());
        }
        match event {
            Ev::Kubelet(volume) => self.kubelet(volume)?,
            Ev::Call(volume) => self.call(volume)?,
            Ev::Answer(worker, connection, number) => self.finish(worker, connection, number),
            Ev::Dies(worker, signal) => self.dies(worker, signal),
            Ev::Machine(pid, mount, worker, event) => self.machine(pid, mount, worker, event)?,
            Ev::Tick(pid, mount) => self.machine(pid, mount, NOBODY, Event::Tick)?,
            Ev::Beat(pid, mount, worker) => self.beat(pid, mount, worker)?,
            Ev::AwaitPredecessor(pid, mount, tries) => self.await_predecessor(pid, mount, tries)?,
            Ev::Asked(pid, life, ask, mount, connection, volume, question) => {
                self.asked(
                    pid,
                    Asked { broker: life, ask, wanted: Wanted::Serving },
                    mount,
                    connection,
                    volume,
                    question,
                )?;
            }
            Ev::Answered(life, ask, done) if life == self.broker_life => self.answered(ask, Some(done))?,
            Ev::Limit(life, ask) if life == self.broker_life => self.answered(ask, None)?,
            Ev::Answered(..) | Ev::Limit(..) => {}
            Ev::NotPrepared(pid, mount) => {
                let asked = |held: &Held| held.asked.filter(|asked| asked.wanted == Wanted::Answered);
                if let Some(asked) = self.held(pid, mount).and_then(|held| asked(held)) {
                    self.stop_mount(pid, mount)?;
                    self.after_ms(0..2, Ev::Answered(asked.broker, asked.ask, false));
                }
            }
            Ev::AgentStarts => self.agent_starts()?,
            Ev::AgentExits(pid) => self.agent_dies(pid),
            Ev::BrokerStarts => self.broker_starts(),
            Ev::Connects(pid, life) => self.connects(pid, life)?,
            Ev::Lost(life, pid) => self.lost(life, pid)?,
            Ev::Handoff(life, number) => self.handoff(life, number)?,
            Ev::Look(life) => self.look(life)?,
            Ev::Fault => faults::hurt_and_go_on(self)?,
            Ev::FaultOfHandoff => faults::hurt(self)?,
            Ev::StoreBack => self.store_is_away = false,
            Ev::WorkersBack => self.workers_back(),
            Ev::LookSuspended(pid, mount) => match self.is_suspended {
                true => self.after_ms(20..21, Ev::LookSuspended(pid, mount)),
                false => self.machine(pid, mount, NOBODY, Event::Resumed)?,
            },
        }
        Ok(())
    }

    // Applications and workers.

    fn call(&mut self, volume: usize) -> Result<()> {
        self.after_ms(20..400, Ev::Call(volume));
        let Some(connection) = self.kubelets[volume].connection else { return Ok(()) };
        let is_poison = self.faults_left > 0 && self.rng.random_range(0..3000) == 0;
        self.kernel.call(connection, self.queue.elapsed(), is_poison);
        self.pump(connection);
        Ok(())
    }

    /// Workers read what waits.
    fn pump(&mut self, connection: ConnectionId) {
        let readers = self.kernel.get(connection).map(|c| c.readers.clone()).unwrap_or_default();
        for reader in readers {
            if !self.workers.get(&reader).is_some_and(|w| w.is_alive && !w.is_stuck) {
                continue;
            }
            while let Some((number, is_poison)) = self.kernel.take(connection, reader) {
                let steps: &[_] = match self.kernel.is_orphan(connection, number) {
                    true => &["worker.orphan"],
                    false => &["worker.read", "worker.recorded"],
                };
                if steps.iter().any(|step| self.dies_at(step, Process::Worker(reader))) {
                    break;
                }
                match is_poison {
                    true => self.after_ms(0..3, Ev::Dies(reader, ABORTED)),
                    false => self.after_ms(1..30, Ev::Answer(reader, connection, number)),
                }
            }
        }
    }

    fn finish(&mut self, worker: WorkerId, connection: ConnectionId, number: u64) {
        let Some(it) = self.workers.get(&worker).filter(|it| it.is_alive) else { return };
        if self.store_is_away || it.is_stuck {
            return self.after_ms(200..500, Ev::Answer(worker, connection, number));
        }
        if ["worker.spliced", "worker.answering"]
            .iter()
            .any(|step| self.dies_at(step, Process::Worker(worker)))
        {
            return;
        }
        self.kernel.answer(connection, number, Outcome::Answered, self.queue.elapsed());
        self.dies_at("worker.answered", Process::Worker(worker));
    }

    pub(crate) fn dies(&mut self, worker: WorkerId, signal: i32) {
        let Some(it) = self.workers.get_mut(&worker).filter(|it| it.is_alive) else { return };
        (it.is_alive, it.signal) = (false, signal);
        let (agent, mount) = (it.agent, it.mount);
        self.kernel.lose(worker);
        self.after_ms(0..2, Ev::Machine(agent, mount, worker, Event::Closed));
    }

    // The agent's mounts.

    fn held(&mut self, pid: i32, mount: MountId) -> Option<&mut Held> {
        self.agents.get_mut(&pid)?.mounts.get_mut(&mount)
    }

    /// `worker`: of which the event tells; it is dropped if another one is there by now.
    fn machine(&mut self, pid: i32, mount: MountId, worker: WorkerId, event: Event) -> Result<()> {
        let now = self.queue.now();
        let Some(held) = self.held(pid, mount) else { return Ok(()) };
        if worker != NOBODY && held.worker != Some(worker) {
            return Ok(());
        }
        let (before, name) = (held.machine.state().name(), event.name());
        let serves = matches!(event, Event::Serves) && held.machine.is_successor();
        if serves && self.dies_at("agent.worker-serving", Process::Agent(pid)) {
            return Ok(());
        }
        let Some(held) = self.held(pid, mount) else { return Ok(()) };
        let actions = held.on(event, now);
        let (after, connection) = (held.machine.state().name(), held.connection);
        let (deadline, answer, over) = (held.machine.deadline(), held.answer(), held.machine.is_over());
        if before != after || !actions.is_empty() {
            self.summary.transitions.insert((before, name, after));
        }
        if let Some((asked, done)) = answer {
            let step = match self.pending.get(&asked.ask).map(|pending| pending.question) {
                Some(Question::Publish) if done => "agent.volume-prepared",
                Some(Question::Adopt { .. }) => "agent.adopted",
                _ => "",
            };
            if !step.is_empty() && self.dies_at(step, Process::Agent(pid)) {
                return Ok(());
            }
            self.after_ms(0..2, Ev::Answered(asked.broker, asked.ask, done));
        }
        if let Some(deadline) = deadline.filter(|_| before != after) {
            self.queue.at(deadline, Ev::Tick(pid, mount));
        }
        self.perform(pid, mount, connection, actions)?;
        if over {
            self.over(pid, mount);
        }
        Ok(())
    }

    /// The thread of a mount has returned. What was stopped or dropped is let go; what has failed is kept, to tell why.
    fn over(&mut self, pid: i32, mount: MountId) {
        let Some(held) = self.held(pid, mount) else { return };
        let (connection, state) = (held.connection, held.machine.state().clone());
        if matches!(state, Life::Over(Over::Stopped | Over::Ended)) {
            if let Some(agent) = self.agents.get_mut(&pid) {
                agent.mounts.remove(&mount);
            }
            self.let_go(connection);
            self.close_if_drained(pid);
        }
    }

    /// A connection that no process holds any more ends.
    pub(crate) fn let_go(&mut self, connection: ConnectionId) {
        let is_held = self.agents.values().any(|agent| agent.has_device(connection));
        let is_known = self.broker.iter().any(|broker| {
            let mut ids = broker.connections.iter().filter(|(_, c)| **c == connection);
            ids.any(|(id, _)| broker.table.get(*id).is_some_and(|mount| mount.device().is_some()))
        });
        if !is_held && !is_known {
            self.end(connection, Reason::LetGo);
        }
    }

    pub(crate) fn end(&mut self, connection: ConnectionId, reason: Reason) {
        if !self.kernel.has_ended(connection) {
            self.reasons.insert(connection, reason);
            self.kernel.end(connection, self.queue.elapsed());
        }
    }

    fn perform(
        &mut self,
        pid: i32,
        mount: MountId,
        connection: ConnectionId,
        actions: Vec<Action>,
    ) -> Result<()> {
        for action in actions {
            if !self.agents.contains_key(&pid) {
                return Ok(()); // it has died at a step
            }
            match action {
                Action::AwaitPredecessor => self.after_ms(0..1, Ev::AwaitPredecessor(pid, mount, 0)),
                Action::Introduce { takeover } => self.introduce(pid, mount, connection, takeover)?,
                Action::SendGo => self.send_go(pid, mount, connection)?,
                Action::AskWaiting => {
                    let waits = self.kernel.get(connection).is_some_and(|c| !c.requests.is_empty());
                    self.after_ms(0..2, Ev::Machine(pid, mount, NOBODY, Event::Waiting(waits)));
                }
                Action::KillAndReap => {
                    let worker = self.held(pid, mount).and_then(|held| held.worker.take());
                    let (mut signal, mut found) = (KILLED, false);
                    if let Some(it) = worker.and_then(|worker| self.workers.get_mut(&worker)) {
                        signal = if it.is_alive { KILLED } else { it.signal };
                        (it.is_alive, found) = (false, true);
                    }
                    if let Some(worker) = worker {
                        self.kernel.lose(worker);
                    }
                    // Now and then a disk keeps the process.
                    let is_kept = self.chance(3);
                    let status = Some(ExitStatus::from_raw(signal)).filter(|_| found && !is_kept);
                    let event = Event::Reaped { status, oom: false };
                    self.after_ms(
                        if is_kept { 200..201 } else { 0..3 },
                        Ev::Machine(pid, mount, NOBODY, event),
                    );
                }
                Action::Collect { blame, .. } => self.collect(pid, mount, connection, blame),
                Action::Prove { .. } => self.summary.heals += 1,
                Action::Abort { why } => {
                    ensure!(self.may_give_up(), "{mount} was given up: {why}");
                    let known = self.broker.as_ref().and_then(|broker| broker.table.get(mount));
                    // A broker that is away does not answer: what has failed is dropped when there is one again.
                    let is_known = known.is_some() || self.broker.is_none();
                    if let Some(known) = known {
                        self.end_mount(&known, Reason::GivenUp);
                    }
                    self.after_ms(0..3, Ev::Machine(pid, mount, NOBODY, Event::Aborted { is_known }));
                }
                Action::Confine | Action::ReportDegraded { .. } | Action::ReportRecovered => {}
                Action::Drop | Action::NoteEnded => {}
            }
        }
        Ok(())
    }

    fn introduce(
        &mut self,
        pid: i32,
        mount: MountId,
        connection: ConnectionId,
        takeover: bool,
    ) -> Result<()> {
        let init = self.kernel.get(connection).context("the device of no connection")?.init;
        ensure!(!takeover || init == Init::Answered, "{mount}: a successor, and INIT is not answered");
        ensure!(takeover || init == Init::Asked, "{mount}: INIT would be answered twice");
        if self.is_suspended {
            self.after_ms(0..10, Ev::Machine(pid, mount, NOBODY, Event::Suspended));
            self.after_ms(20..21, Ev::LookSuspended(pid, mount));
            return Ok(());
        }
        if (self.no_workers.is_some() && !self.self_test_fails) || self.chance(2) {
            let why = "no worker".to_owned();
            self.after_ms(1..20, Ev::Machine(pid, mount, NOBODY, Event::NotIntroduced { why }));
            return Ok(());
        }
        let id = WorkerId(self.id());
        let worker =
            Worker { agent: pid, mount, connection, is_alive: true, is_stuck: false, signal: 0, beats: 0 };
        self.workers.insert(id, worker);
        self.summary.workers += 1;
        if let Some(held) = self.held(pid, mount) {
            held.worker = Some(id);
        }
        if ["worker.assigned", "worker.prepared"].iter().any(|step| self.dies_at(step, Process::Worker(id))) {
            if let Some(held) = self.held(pid, mount) {
                held.worker = None;
            }
            let why = "it died".to_owned();
            self.after_ms(0..20, Ev::Machine(pid, mount, NOBODY, Event::NotIntroduced { why }));
            return Ok(());
        }
        self.after_ms(1..20, Ev::Machine(pid, mount, id, Event::Introduced));
        if takeover {
            self.dies_at("agent.worker-assigned", Process::Agent(pid));
        }
        Ok(())
    }

    fn send_go(&mut self, pid: i32, mount: MountId, connection: ConnectionId) -> Result<()> {
        let Some(worker) = self.held(pid, mount).and_then(|held| held.worker) else { return Ok(()) };
        let is_alive = self.workers.get(&worker).is_some_and(|it| it.is_alive);
        let Some(it) = self.kernel.get_mut(connection) else { return Ok(()) };
        ensure!(it.init == Init::Answered, "{mount}: a worker reads before the kernel has its INIT reply");
        ensure!(it.readers.is_empty(), "{mount}: {worker:?} reads a device that {:?} read", it.readers);
        if it.ended || !is_alive || self.dies_at("worker.go", Process::Worker(worker)) {
            self.dies(worker, KILLED);
            self.after_ms(0..1, Ev::Machine(pid, mount, worker, Event::Closed));
            return Ok(());
        }
        if let Some(it) = self.kernel.get_mut(connection) {
            it.readers.push(worker);
        }
        if self.dies_at("worker.serving", Process::Worker(worker)) {
            return Ok(());
        }
        let said = match self.rng.random_range(0..100) {
            0 => None,
            1 => Some(Event::Failed { why: "its self-test".into() }),
            _ if self.self_test_fails => Some(Event::Failed { why: "its self-test".into() }),
            _ => Some(Event::Serves),
        };
        match said {
            Some(event) => self.after_ms(0..3, Ev::Machine(pid, mount, worker, event)),
            None => self.hang(worker),
        }
        self.queue.after(TICK, Ev::Beat(pid, mount, worker));
        self.pump(connection);
        Ok(())
    }

    fn hang(&mut self, worker: WorkerId) {
        if let Some(it) = self.workers.get_mut(&worker) {
            it.is_stuck = true;
        }
    }

    /// No worker starts from now on. Two outages are one where no mount may have been served in between.
    fn lose_workers(&mut self) {
        let now = self.queue.elapsed();
        let before = self.outage.filter(|(_, end)| now - *end <= LIMITS.heal_timeout - LONG_OUTAGE);
        self.no_workers = Some(before.map_or(now, |(since, _)| since));
    }

    fn workers_back(&mut self) {
        let now = self.queue.elapsed();
        if let Some(since) = self.no_workers.take() {
            self.outage = Some((since, now));
        }
        self.is_suspended = false;
        self.self_test_fails = false;
    }

    /// No worker may have served a mount for `healTimeout` because workers could not start, most of that time.
    fn may_give_up(&self) -> bool {
        let now = self.queue.elapsed();
        self.no_workers.is_some_and(|since| now - since >= LONG_OUTAGE)
            || self.outage.is_some_and(|(since, end)| {
                end - since >= LONG_OUTAGE && now - end <= LIMITS.heal_timeout - LONG_OUTAGE
            })
    }

    fn beat(&mut self, pid: i32, mount: MountId, worker: WorkerId) -> Result<()> {
        let Some(it) = self.workers.get_mut(&worker).filter(|it| it.is_alive) else { return Ok(()) };
        if !it.is_stuck {
            it.beats += 1;
        }
        let (beats, connection) = (it.beats, it.connection);
        if self.kernel.has_ended(connection) {
            // It reads ENODEV.
            self.dies(worker, 0);
            return Ok(());
        }
        self.pump(connection);
        self.queue.after(TICK, Ev::Beat(pid, mount, worker));
        self.machine(pid, mount, worker, Event::Heartbeat(beats))
    }

    fn await_predecessor(&mut self, pid: i32, mount: MountId, tries: u32) -> Result<()> {
        let Some(connection) = self.held(pid, mount).map(|held| held.connection) else { return Ok(()) };
        let is_held = self.workers.values().any(|it| it.is_alive && it.connection == connection);
        match is_held && tries < 2000 {
            true => self.after_ms(1..2, Ev::AwaitPredecessor(pid, mount, tries + 1)),
            false if self.dies_at("agent.workers-gone", Process::Agent(pid)) => {}
            false => self.machine(pid, mount, NOBODY, Event::PredecessorGone)?,
        }
        Ok(())
    }

    /// What a dead worker took and did not answer.
    fn collect(&mut self, pid: i32, mount: MountId, connection: ConnectionId, blame: Blame) {
        let now = self.queue.elapsed();
        let (mut orphans, mut poisoned) = (0, Vec::new());
        for (number, request) in self.kernel.get_mut(connection).into_iter().flat_map(|c| &mut c.requests) {
            if request.taken.take().is_none() {
                continue;
            }
            // Only what was being executed is to blame; the others wait for the store.
            request.deaths += u32::from(blame == Blame::Executing && request.is_poison);
            request.is_orphan = true;
            match request.deaths >= DEATHS_MAX {
                true => poisoned.push(*number),
                false => orphans += 1,
            }
        }
        for number in poisoned {
            self.kernel.answer(connection, number, Outcome::Poisoned, now);
        }
        let ended = self.kernel.has_ended(connection);
        if blame == Blame::Agent && !ended && self.dies_at("agent.collected", Process::Agent(pid)) {
            return;
        }
        self.after_ms(0..2, Ev::Machine(pid, mount, NOBODY, Event::Collected { orphans, ended }));
    }

    // What the broker asks of the agent.

    pub(crate) fn ask(&mut self, mount: MountId, volume: usize, question: Question, limit: Duration) {
        let Some(broker) = &self.broker else { return };
        let Some(connection) = broker.connections.get(&mount).copied() else { return };
        let pid = broker.current.as_ref().map(|agent| agent.pid);
        let (life, ask) = (self.broker_life, self.id());
        self.pending.insert(ask, Pending { pid, question, mount, volume });
        // Without a peer the question fails at once.
        let Some(pid) = pid else { return self.queue.after(Duration::ZERO, Ev::Limit(life, ask)) };
        // Now and then the agent has too much to do.
        let takes = if self.chance(1) { 0..20_000 } else { 0..2 };
        self.after_ms(takes, Ev::Asked(pid, life, ask, mount, connection, volume, question));
        self.queue.after(limit, Ev::Limit(life, ask));
    }

    fn asked(
        &mut self,
        pid: i32,
        asked: Asked,
        mount: MountId,
        connection: ConnectionId,
        volume: usize,
        question: Question,
    ) -> Result<()> {
        let now = self.queue.now();
        let answer =
            |world: &mut Self, done| world.after_ms(0..2, Ev::Answered(asked.broker, asked.ask, done));
        // What a broker has asked is lost with its connection.
        if asked.broker != self.broker_life {
            return Ok(());
        }
        let Some(agent) = self.agents.get(&pid) else { return Ok(()) };
        if agent.role == Role::Serving && !agent.mounts.contains_key(&mount) {
            let adopt = ["agent.adopt", "agent.scope-opened", "agent.memory-mapped", "agent.mount-listed"];
            let steps: &[_] = match question {
                Question::Adopt { .. } => &adopt,
                Question::Publish => &adopt[3..],
                Question::Start | Question::Unpublish => &[],
            };
            if steps.iter().any(|step| self.dies_at(step, Process::Agent(pid))) {
                return Ok(());
            }
        }
        let Some(agent) = self.agents.get_mut(&pid) else { return Ok(()) };
        match question {
            // It waits for the broker's word, and serves nothing.
            _ if agent.role != Role::Serving => answer(self, false),
            Question::Unpublish => {
                self.stop_mount(pid, mount)?;
                answer(self, true);
            }
            Question::Start => match agent.mounts.get_mut(&mount) {
                Some(held) => {
                    (held.is_started, held.asked) = (true, Some(asked));
                    self.machine(pid, mount, NOBODY, Event::Go)?;
                }
                None => answer(self, false),
            },
            Question::Publish | Question::Adopt { .. } if agent.mounts.contains_key(&mount) => {
                let live = agent.holding().any(|id| id == mount);
                answer(self, live && matches!(question, Question::Adopt { .. }));
            }
            Question::Publish | Question::Adopt { .. } => {
                let (machine, actions, wanted, is_started) = match question {
                    Question::Adopt { since } => {
                        let (machine, actions) = Machine::adopt(LIMITS, since, HealCause::Agent);
                        (machine, actions, Wanted::Serving, true)
                    }
                    _ => {
                        let (machine, actions) = Machine::publish(LIMITS, now);
                        (machine, actions, Wanted::Answered, false)
                    }
                };
                let asked = Some(Asked { wanted, ..asked });
                let held = Held { volume, connection, machine, worker: None, is_started, asked };
                agent.mounts.insert(mount, held);
                if let Question::Publish = question {
                    self.queue.after(PUBLISH_LIMIT, Ev::NotPrepared(pid, mount));
                }
                self.perform(pid, mount, connection, actions)?;
            }
        }
        Ok(())
    }

    /// The agent lets go of a mount. Its thread ends when its worker is gone.
    fn stop_mount(&mut self, pid: i32, mount: MountId) -> Result<()> {
        self.machine(pid, mount, NOBODY, Event::Stop)?;
        // What has failed is kept until it is unpublished.
        if self.held(pid, mount).is_some_and(|held| held.machine.is_over())
            && let Some(held) = self.agents.get_mut(&pid).and_then(|agent| agent.mounts.remove(&mount))
        {
            self.let_go(held.connection);
            self.close_if_drained(pid);
        }
        Ok(())
    }

    fn answered(&mut self, ask: u64, done: Option<bool>) -> Result<()> {
        let Some(Pending { question, mount, volume, .. }) = self.pending.remove(&ask) else { return Ok(()) };
        let Some(known) = self.broker.as_ref().and_then(|broker| broker.table.get(mount)) else {
            return Ok(());
        };
        let is_done = done == Some(true);
        let started = matches!(question, Question::Start) && is_done;
        if started && self.dies_at("broker.started", Process::Broker) {
            return Ok(());
        }
        match question {
            Question::Publish if is_done && !known.state().is_over() => {
                Broker::prepared(&known)?;
                if self.dies_at("broker.volume-prepared", Process::Broker) {
                    return Ok(());
                }
                if let Some(connection) = self.connection_of(mount) {
                    connection.init = Init::Answered;
                }
                if self.dies_at("broker.init-answered", Process::Broker) {
                    return Ok(());
                }
                self.ask(mount, volume, Question::Start, PUBLISH_LIMIT);
            }
            Question::Start if is_done && known.enter(State::Serving, "the agent serves it") => {
                if !self.put(mount)? {
                    self.published(volume, mount);
                }
            }
            Question::Publish | Question::Start
                if self.broker.as_ref().is_some_and(|broker| broker.renewing.contains_key(&mount)) =>
            {
                self.not_renewed(mount);
                self.take_down(&known, Reason::NotPublished)?;
            }
            Question::Publish | Question::Start => {
                if self.take_down(&known, Reason::NotPublished)? {
                    self.kubelets[volume].is_busy = false;
                }
            }
            Question::Adopt { since } => self.adopted(&known, since, is_done)?,
            Question::Unpublish => {}
        }
        Ok(())
    }

    /// As the broker's `hand_over`: what its answer makes of a mount.
    fn adopted(&mut self, known: &Mount, since: Instant, is_done: bool) -> Result<()> {
        if is_done {
            known.enter_if(State::Serving, "a new agent serves it", |state, _| {
                state == State::Adopting(since)
            });
            if self.dies_at("broker.adopted-one", Process::Broker) {
                return Ok(());
            }
        }
        if known.state().is_over() {
            self.ask(known.id, 0, Question::Unpublish, Duration::from_secs(1));
            return Ok(());
        }
        let current = self.broker.as_ref().and_then(|broker| broker.current.clone());
        if known.state() == State::Serving && current.as_ref().is_some_and(|current| known.is_of(current)) {
            return Ok(());
        }
        known.enter_if(State::Orphaned(since), "it was not adopted", |state, _| {
            matches!(state, State::Adopting(_) | State::Serving)
        });
        Ok(())
    }

    fn connection_of(&mut self, mount: MountId) -> Option<&mut crate::kernel::Connection> {
        let connection = *self.broker.as_ref()?.connections.get(&mount)?;
        self.kernel.get_mut(connection)
    }

    // How mounts begin and end.

    pub(crate) fn bring_up(&mut self, volume: usize) -> Result<()> {
        let id = MountId(self.id());
        let connection = self.kernel.mount();
        let broker = self.broker.as_mut().filter(|broker| !broker.is_switching());
        let current = broker.as_ref().and_then(|broker| broker.current.clone());
        let (Some(broker), Some(agent)) = (broker, current) else {
            self.kernel.connections.remove(&connection);
            return Ok(());
        };
        broker.enlist(id, &self.volumes[volume], connection, &agent)?;
        self.kubelets[volume].is_busy = true;
        self.kubelets[volume].at = Some(connection);
        if !self.dies_at("broker.mounted", Process::Broker) {
            self.ask(id, volume, Question::Publish, PUBLISH_LIMIT);
        }
        Ok(())
    }

    fn published(&mut self, volume: usize, mount: MountId) {
        self.kubelets[volume].is_busy = false;
        self.kubelets[volume].connection =
            self.broker.as_ref().and_then(|broker| broker.connections.get(&mount).copied());
    }

    /// Taken away for good. True: it was there.
    pub(crate) fn take_down(&mut self, mount: &Arc<Mount>, reason: Reason) -> Result<bool> {
        mount.enter(State::Unpublished, "it is taken down");
        self.ask(mount.id, 0, Question::Unpublish, Duration::from_secs(1));
        mount.release();
        let Some(broker) = &mut self.broker else { return Ok(false) };
        let connection = broker.connections.get(&mount.id).copied();
        broker.remove(mount.id);
        if let Some(connection) = connection {
            self.end(connection, reason);
            if let Some(it) = self.kernel.get_mut(connection) {
                it.mounted = false;
            }
        }
        Ok(connection.is_some())
    }

    /// Dead, and left for readers to get ENOTCONN from.
    fn end_mount(&mut self, mount: &Mount, reason: Reason) -> bool {
        let ended = mount.enter(State::Dead, "it has ended");
        if ended {
            mount.release();
            let connection =
                self.broker.as_ref().and_then(|broker| broker.connections.get(&mount.id).copied());
            if let Some(connection) = connection {
                self.end(connection, reason);
            }
        }
        ended
    }

    /// The broker's watchers: ended connections, expired mounts, the comparison.
    fn look(&mut self, life: u64) -> Result<()> {
        let Some(broker) = self.broker.as_ref().filter(|_| life == self.broker_life) else { return Ok(()) };
        let (now, elapsed) = (self.queue.now(), self.queue.elapsed());
        let mut ended = Vec::new();
        for mount in broker.table.all() {
            let has_ended = broker.connections.get(&mount.id).is_some_and(|id| self.kernel.has_ended(*id));
            let is_live = |state| matches!(state, State::Serving | State::Orphaned(_) | State::Adopting(_));
            if has_ended && mount.end_of_others("another process has ended its connection", is_live) {
                mount.release();
                ended.push(mount.target.clone());
            }
        }
        for mount in broker.overdue(now) {
            ensure!(self.may_give_up(), "{} was given up, {:?}", mount.id, mount.state());
            self.end_mount(&mount, Reason::HealTimeout);
        }
        if let Some(broker) = &mut self.broker {
            ended.iter().for_each(|target| broker.renewals.wake_for(target.path(), now));
        }
        self.look_for_dead()?;
        if elapsed.as_millis() / 5000 != (elapsed - Duration::from_millis(250)).as_millis() / 5000 {
            self.compare()?;
        }
        self.after_ms(250..251, Ev::Look(life));
        Ok(())
    }

    fn compare(&mut self) -> Result<()> {
        let is_giving = self.is_giving();
        let Some(broker) = &mut self.broker else { return Ok(()) };
        if broker.is_switching() || is_giving {
            broker.forget_look();
            return Ok(());
        }
        let current = broker.current.as_ref().and_then(|current| self.agents.get(&current.pid));
        let held = current.map(|agent| agent.holding().collect::<BTreeSet<MountId>>());
        let connected: Vec<_> = self.agents.values().map(|agent| agent.identity.clone()).collect();
        let kernel = &self.kernel;
        let findings = broker.look(&connected, held, |id| kernel.get(id).is_some_and(|c| c.mounted));
        let mut is_to_give = false;
        for finding in findings {
            match finding {
                Finding::HeldThoughOver(id) => {
                    let pid =
                        self.broker.as_ref().and_then(|broker| broker.current.as_ref()).map(|it| it.pid);
                    let (ask, life, pid) = (self.id(), self.broker_life, pid.unwrap_or_default());
                    let unpublish = Ev::Asked(pid, life, ask, id, ConnectionId(0), 0, Question::Unpublish);
                    self.after_ms(0..2, unpublish);
                }
                Finding::ServedByNobody(id) => {
                    let known = self.broker.as_ref().and_then(|broker| broker.table.get(id));
                    if let Some(known) = known {
                        let now = self.queue.now();
                        known.enter_if(State::Orphaned(now), "its agent does not hold it", |state, _| {
                            state == State::Serving
                        });
                    }
                    is_to_give = true;
                }
                Finding::Refused(_) => is_to_give = true,
                Finding::HeldThoughOrphaned(id) => {
                    if let Some(known) = self.broker.as_ref().and_then(|broker| broker.table.get(id)) {
                        known.enter_if(State::Serving, "its agent holds it", |state, _| {
                            matches!(state, State::Orphaned(_))
                        });
                    }
                }
                Finding::HeldUnknown(_) | Finding::Displaced(_) | Finding::Stray(..) => {}
            }
        }
        if is_to_give {
            self.give_all()?;
        }
        Ok(())
    }

    /// Mounts are being given to an agent.
    fn is_giving(&self) -> bool {
        self.pending.values().any(|pending| matches!(pending.question, Question::Adopt { .. }))
    }

    pub(crate) fn has_faults(&self) -> bool {
        self.faults_left > 0
    }
}
