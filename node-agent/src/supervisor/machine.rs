//! The supervision of one mount as a state machine: events and the time go in, actions come out. It does no I/O, has no
//! clock and starts nothing; `worker_loop.rs` performs the actions and says what came of them.
//!
//! ```text
//!                        publish                                       adopt
//!                           │                                            │
//!        ┌──────────────────┤ pause over                                 ▼
//!        │  Suspended ◄─► Introducing ◄───── Pausing ◄──┐      AwaitingPredecessor
//!        │                  │   │  │ failed      ▲      │                 │ all gone
//!        │      first       │   │  └─────────────┘      │ nothing ended   ▼
//!        │   Answered ◄─────┘   │ successor             ├─────────── Collecting ──► Over: ended
//!        │      │ Go            │                       │                 ▲
//!        │      └────────────► Starting ──► Serving     │                 │ reaped
//!        │                          └───────┴───────────┼──► Reaping ─────┘
//!        │   (a worker that ends, hangs or is stopped)  │        │ stopped
//!        │                                              ▼        ▼
//!        └── stopped: Over          no worker served for healTimeout: GivingUp ──► Over: given up
//! ```
//!
//! [`TRANSITIONS`] is the same as a table, which a test compares with what the machine does.

mod transitions;

pub use transitions::TRANSITIONS;

use super::heals::HealCause;
use super::policy::{self, Deaths, End, Verdict};
use inflight::Blame;
use link::Watchdog;
use link::budget;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// How often a worker's heartbeat is looked at.
pub const TICK: Duration = budget::AGENT_LOOKS.time;
/// From Go to Serving.
const STEP_LIMIT: Duration = budget::WORKER_SERVES.time;
/// From Answered to the broker's word that the kernel has its INIT reply.
const GO_LIMIT: Duration = budget::PUBLISH_DROPPED.time;

/// What the settings say of one mount.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long readers wait for a worker that serves.
    pub heal_timeout: Duration,
    /// A worker that stands still for so long while requests wait is replaced.
    pub hang_limit: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The workers of an agent that is gone are being killed by the kernel.
    AwaitingPredecessor,
    /// A worker is taken from the spawner and given the connection.
    Introducing,
    /// Debug: while a file exists no worker is started.
    Suspended,
    /// Before the next worker.
    Pausing {
        until: Instant,
    },
    /// The first worker has answered INIT; the kernel has not got the answer yet.
    Answered {
        until: Instant,
    },
    /// Go was sent.
    Starting {
        until: Instant,
    },
    Serving,
    /// It is killed and waited for.
    Reaping {
        end: End,
        died: Instant,
        served: bool,
    },
    /// What it took and did not answer is collected for its successor.
    Collecting {
        ended: Ended,
    },
    /// The broker is asked to abort the connection.
    GivingUp,
    Over(Outcome),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Stopped,
    /// Unmounted or aborted, by another process.
    Ended,
    /// No worker served within `healTimeout`.
    GivenUp,
}

/// The process that was there before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    Worker { end: End, status: Option<ExitStatus>, cause: HealCause },
    Agent(HealCause),
}

impl Ended {
    fn cause(&self) -> HealCause {
        match self {
            Self::Worker { cause, .. } | Self::Agent(cause) => *cause,
        }
    }
}

/// What has happened, or come of an action.
#[derive(Clone, Debug)]
pub enum Event {
    /// No process of the agent before holds the connection any more, or it was waited for in vain.
    PredecessorGone,
    /// The worker has the connection, and has answered INIT if it is the first.
    Introduced,
    NotIntroduced {
        why: String,
    },
    /// Instead of an introduction: the debug file is there.
    Suspended,
    /// It is gone.
    Resumed,
    /// The kernel has its INIT reply.
    Go,
    /// The worker says that it reads requests.
    Serves,
    /// The worker says why it cannot go on, or nonsense.
    Failed {
        why: String,
    },
    /// The worker's socket is closed.
    Closed,
    /// The worker's counter, looked at every [`TICK`].
    Heartbeat(u64),
    /// Do requests wait for an answer?
    Waiting(bool),
    /// None: the kernel keeps the process. `oom`: the kernel has killed for want of memory in this worker's time.
    Reaped {
        status: Option<ExitStatus>,
        oom: bool,
    },
    /// `ended`: there is no connection any more.
    Collected {
        orphans: u64,
        ended: bool,
    },
    /// The broker was asked. `is_known`: it will ask for this mount to be dropped, when it is unpublished.
    Aborted {
        is_known: bool,
    },
    /// The mount is unpublished, or the agent ends.
    Stop,
    /// Nothing has happened, at or after [`Machine::deadline`].
    Tick,
}

/// What is to be done. Each of them that says so is answered by an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// → `PredecessorGone`
    AwaitPredecessor,
    /// `takeover`: INIT was answered, and requests may be under way. → `Introduced`, `NotIntroduced`, `Suspended`
    Introduce { takeover: bool },
    /// Requests may be read. → `Closed`, if that cannot be sent
    SendGo,
    /// → `Waiting`
    AskWaiting,
    /// → `Reaped`
    KillAndReap,
    /// `vacate`: nothing that was being executed counts as interrupted. → `Collected`
    Collect { blame: Blame, vacate: bool },
    /// A worker serves after `took`: prove it through the mount, and record it.
    Prove { cause: HealCause, replayed: u64, took: Duration },
    /// The worker serves: limit its memory.
    Confine,
    /// Tell the owner that calls wait.
    ReportDegraded { why: String },
    /// And that they go on.
    ReportRecovered,
    /// Its publish was not completed: the mount is not wanted.
    Drop,
    /// Another process has ended the connection: the mount is not wanted.
    NoteEnded,
    /// → `Aborted`
    Abort { why: String },
}

/// What status and metrics show.
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

#[derive(Clone, Debug)]
struct Pending {
    cause: HealCause,
    replayed: u64,
}

#[derive(Debug)]
pub struct Machine {
    limits: Limits,
    state: State,
    /// The kernel has its INIT reply: each worker from now on is a successor.
    go: bool,
    /// The present worker is a successor.
    takeover: bool,
    stopping: bool,
    deaths: Deaths,
    /// The owner knows that calls wait.
    degraded: bool,
    /// What a worker that comes to serve has healed.
    pending: Pending,
    watchdog: Option<Watchdog>,
    /// Of the latest trouble, for people.
    why: String,
}

impl Machine {
    /// Of a mount that is published now.
    pub fn publish(limits: Limits, now: Instant) -> (Self, Vec<Action>) {
        let pending = Pending { cause: HealCause::Start, replayed: 0 };
        let mut machine = Self::new(limits, State::Pausing { until: now }, pending);
        let actions = machine.next(now);
        (machine, actions)
    }

    /// Of one whose agent is gone, for `cause`; no worker has served it since then.
    pub fn adopt(limits: Limits, since: Instant, cause: HealCause) -> (Self, Vec<Action>) {
        let mut machine = Self::new(limits, State::AwaitingPredecessor, Pending { cause, replayed: 0 });
        machine.go = true;
        machine.deaths.died(since, true);
        (machine, vec![Action::AwaitPredecessor])
    }

    fn new(limits: Limits, state: State, pending: Pending) -> Self {
        Self {
            limits,
            state,
            go: false,
            takeover: false,
            stopping: false,
            deaths: Deaths::default(),
            degraded: false,
            pending,
            watchdog: None,
            why: String::new(),
        }
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over(_))
    }

    /// Has the present worker taken over from another one?
    pub fn is_successor(&self) -> bool {
        self.takeover
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Of the latest trouble, for people.
    pub fn why(&self) -> &str {
        &self.why
    }

    pub fn phase(&self) -> Phase {
        let between = if self.go { Phase::Dead } else { Phase::Starting };
        match &self.state {
            State::Introducing | State::Pausing { .. } => between,
            State::AwaitingPredecessor | State::Collecting { .. } | State::GivingUp => Phase::Dead,
            State::Suspended => Phase::Suspended,
            // What it was, until it is known how the worker ended.
            State::Serving | State::Reaping { served: true, .. } => Phase::Serving,
            // A successor serves when it says so.
            State::Starting { .. } | State::Reaping { .. } if self.takeover => Phase::Dead,
            State::Answered { .. } | State::Starting { .. } | State::Reaping { .. } => Phase::Answered,
            State::Over(Outcome::Stopped) => Phase::Stopped,
            State::Over(Outcome::Ended | Outcome::GivenUp) => Phase::Failed,
        }
    }

    /// When it wants a [`Event::Tick`] if nothing else happens.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Pausing { until } | State::Answered { until } | State::Starting { until } => Some(*until),
            _ => None,
        }
    }

    /// An event that the state does not expect changes nothing.
    pub fn on(&mut self, event: Event, now: Instant) -> Vec<Action> {
        if let Event::Stop = event {
            return self.stop(now);
        }
        match (&self.state, event) {
            (State::AwaitingPredecessor, Event::PredecessorGone) => {
                let cause = self.pending.cause;
                let vacate = cause == HealCause::Upgrade;
                let blame = if vacate { Blame::Nobody } else { Blame::Agent };
                self.state = State::Collecting { ended: Ended::Agent(cause) };
                vec![Action::Collect { blame, vacate }]
            }
            (State::Introducing, Event::Introduced) => self.introduced(now),
            (State::Introducing, Event::NotIntroduced { why }) => self.not_introduced(why, now),
            (State::Introducing, Event::Suspended) if self.stopping => self.over(Outcome::Stopped),
            (State::Introducing, Event::Suspended) => {
                self.state = State::Suspended;
                self.why = "respawn is suspended by the debug file".into();
                Vec::new()
            }
            (State::Suspended, Event::Resumed) => self.next(now),
            (State::Pausing { until }, Event::Tick) if now >= *until => self.introduce(),
            (State::Answered { .. }, Event::Go) => self.send_go(now),
            (State::Answered { until }, Event::Tick) if now >= *until => {
                // The broker went away in the middle of a publish: no call will ever ask for this mount.
                self.stopping = true;
                let mut actions = vec![Action::Drop];
                actions.extend(self.reap(End::Stopped, now));
                actions
            }
            (State::Starting { .. }, Event::Serves) => self.serves(now),
            (State::Starting { until }, Event::Tick) if now >= *until => self.reap(End::Hung, now),
            (State::Starting { .. } | State::Serving, Event::Heartbeat(beats)) => {
                let watchdog = self.watchdog.get_or_insert_with(|| Watchdog::new(beats, TICK, now));
                // A thread of the worker that is stuck has stopped the heartbeat after the other half.
                match watchdog.look(beats, now) >= self.limits.hang_limit / 2 {
                    true => vec![Action::AskWaiting],
                    false => Vec::new(),
                }
            }
            (State::Starting { .. } | State::Serving, Event::Waiting(true)) => self.reap(End::Hung, now),
            (State::Starting { .. } | State::Serving, Event::Failed { why }) => {
                self.reap(End::Failed(why), now)
            }
            // One that dies before it may read is noticed when it gets the word to: its INIT reply is with the broker
            // already.
            (State::Starting { .. } | State::Serving, Event::Closed) => self.reap(End::Closed, now),
            (State::Reaping { .. }, Event::Reaped { status, oom }) => self.reaped(status, oom),
            (State::Collecting { .. }, Event::Collected { orphans, ended }) => {
                self.collected(orphans, ended, now)
            }
            (State::GivingUp, Event::Aborted { .. }) if self.stopping => self.over(Outcome::Stopped),
            // It stays to tell why, until it is unpublished.
            (State::GivingUp, Event::Aborted { is_known: true }) => self.over(Outcome::GivenUp),
            (State::GivingUp, Event::Aborted { is_known: false }) => {
                self.state = State::Over(Outcome::Ended);
                vec![Action::NoteEnded]
            }
            _ => Vec::new(),
        }
    }

    fn over(&mut self, outcome: Outcome) -> Vec<Action> {
        self.state = State::Over(outcome);
        Vec::new()
    }

    fn stop(&mut self, now: Instant) -> Vec<Action> {
        self.stopping = true;
        match &self.state {
            State::Answered { .. } | State::Starting { .. } | State::Serving => self.reap(End::Stopped, now),
            State::Pausing { .. } | State::Suspended => self.over(Outcome::Stopped),
            // What is under way is ended first, and looked at then.
            State::AwaitingPredecessor
            | State::Introducing
            | State::Reaping { .. }
            | State::Collecting { .. }
            | State::GivingUp
            | State::Over(_) => Vec::new(),
        }
    }

    /// Towards the next worker, if there is to be one.
    fn next(&mut self, now: Instant) -> Vec<Action> {
        if self.stopping {
            return self.over(Outcome::Stopped);
        }
        match self.deaths.decide(now, self.limits.heal_timeout) {
            Verdict::GiveUp => {
                let why = format!(
                    "no worker could serve this mount for {:?} (healTimeout): {}",
                    self.limits.heal_timeout, self.why
                );
                self.why.clone_from(&why);
                self.state = State::GivingUp;
                vec![Action::Abort { why }]
            }
            Verdict::StartAfter(Duration::ZERO) => self.introduce(),
            Verdict::StartAfter(pause) => {
                self.state = State::Pausing { until: now + pause };
                Vec::new()
            }
        }
    }

    fn introduce(&mut self) -> Vec<Action> {
        self.state = State::Introducing;
        self.takeover = self.go;
        vec![Action::Introduce { takeover: self.takeover }]
    }

    fn introduced(&mut self, now: Instant) -> Vec<Action> {
        self.watchdog = None;
        match (self.stopping, self.go) {
            (true, _) => self.reap(End::Stopped, now),
            (false, true) => self.send_go(now),
            (false, false) => {
                self.state = State::Answered { until: now + GO_LIMIT };
                Vec::new()
            }
        }
    }

    fn send_go(&mut self, now: Instant) -> Vec<Action> {
        self.go = true;
        self.state = State::Starting { until: now + STEP_LIMIT };
        vec![Action::SendGo]
    }

    fn not_introduced(&mut self, why: String, now: Instant) -> Vec<Action> {
        self.deaths.died(now, false);
        self.why = why;
        let mut actions = Vec::new();
        // The publish reports a first start that fails.
        if self.go && !self.stopping && self.deaths.is_stuck() && !self.degraded {
            self.degraded = true;
            actions.push(Action::ReportDegraded { why: format!("no worker comes up: {}", self.why) });
        }
        actions.extend(self.next(now));
        actions
    }

    fn serves(&mut self, now: Instant) -> Vec<Action> {
        self.state = State::Serving;
        let mut actions = vec![Action::Confine];
        if let Some(since) = self.deaths.unserved_since() {
            let Pending { cause, replayed } = self.pending;
            actions.push(Action::Prove { cause, replayed, took: now.saturating_duration_since(since) });
        }
        if std::mem::take(&mut self.degraded) {
            actions.push(Action::ReportRecovered);
        }
        self.deaths.serving();
        actions
    }

    fn reap(&mut self, end: End, now: Instant) -> Vec<Action> {
        let served = self.state == State::Serving;
        self.state = State::Reaping { end, died: now, served };
        vec![Action::KillAndReap]
    }

    fn reaped(&mut self, status: Option<ExitStatus>, oom: bool) -> Vec<Action> {
        let State::Reaping { end, died, served } = self.state.clone() else { return Vec::new() };
        if self.stopping {
            return self.over(Outcome::Stopped);
        }
        self.deaths.died(died, served);
        let blame = policy::blame(&end, status, oom);
        if served && blame == Blame::Executing {
            self.deaths.crashed(died);
        }
        self.why = format!("{end:?}");
        let cause = HealCause::of(&end, status, oom);
        self.state = State::Collecting { ended: Ended::Worker { end, status, cause } };
        vec![Action::Collect { blame, vacate: false }]
    }

    fn collected(&mut self, orphans: u64, ended: bool, now: Instant) -> Vec<Action> {
        let State::Collecting { ended: before } = &self.state else { return Vec::new() };
        self.pending = Pending { cause: before.cause(), replayed: orphans };
        if ended {
            self.why = "the kernel has ended the connection".into();
            self.state = State::Over(Outcome::Ended);
            return vec![Action::NoteEnded];
        }
        self.next(now)
    }
}

#[cfg(test)]
mod tests;
