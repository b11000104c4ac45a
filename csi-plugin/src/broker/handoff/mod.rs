//! An agent takes over from one that is still running, so that an upgrade is a pause and not an outage.
//!
//! `machine` decides what is done next, without I/O; here it is done.
//!
//! Until the old agent is drained nothing has happened to it. From then on there is a pause, and either of the two
//! may die at any moment: the other one serves. Should both be gone, the mounts wait for the next agent.

pub mod machine;

use super::adoption::{Adopter, Given, for_each};
use super::agents::{Agents, NoPublishes};
use super::lifecycle::Lifecycle;
use super::messages::{Adoption, adoption};
use super::mounts_table::{self, Mount};
use super::socket::{Admission, AgentIdentity, AgentLink, AskError};
use crate::config::NodeConfig;
use link::broker::{AgentAnswer, AgentEnd, AgentRequest};
use link::budget;
use link::{Refusal, RefusalKind};
use machine::{Action, Answer, Event, Machine};
use mounts::{Connection, MountEntry, Ours};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// For one mount: workers are started and tried.
const PREPARE_LIMIT: Duration = budget::PREPARE.time;
/// Publishes that are under way end within this, or fail and are repeated.
const PUBLISH_LIMIT: Duration = Duration::from_secs(5);
/// An agent that does not drain within this is killed, for its successor is ready.
const DRAIN_LIMIT: Duration = budget::DRAIN.time;
/// A successor opens cache and state.
const SUCCEED_LIMIT: Duration = budget::SUCCEED.time;
const WORD_LIMIT: Duration = Duration::from_secs(2);
/// An agent shows its mounts to a broker that is new.
const SHOWN_LIMIT: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Hands the mounts of one agent to the next.
#[derive(Debug)]
pub(super) struct Handoff {
    pub(super) lifecycle: Arc<Lifecycle>,
    pub(super) agents: Arc<Agents>,
    pub(super) adopter: Arc<Adopter>,
    pub(super) config: Arc<NodeConfig>,
    /// One at a time, from the first question to the last word.
    pub(super) alone: Mutex<()>,
}

/// One hand-off that is under way.
struct Running<'h> {
    handoff: &'h Handoff,
    successor: &'h Arc<AgentLink>,
    old: Option<Arc<AgentLink>>,
    quiet: Option<NoPublishes>,
    /// The old agent, once it is drained: it lives, and could serve again.
    drained: Option<AgentIdentity>,
    begun: Instant,
    /// From here on applications wait.
    pause: Instant,
    /// Mounts that the successor serves.
    taken: usize,
}

/// An agent that answers with something else has not understood what it is asked, or is not ours any more.
fn consent(answered: Result<(AgentAnswer, Vec<OwnedFd>), AskError>) -> Result<(), AskError> {
    match answered?.0 {
        AgentAnswer::Done => Ok(()),
        _ => Err(AskError::Refused(Refusal::new(RefusalKind::Internal, "it answered with something else"))),
    }
}

impl Handoff {
    /// All of it; blocks until it is decided. `successor` has just connected.
    pub(super) fn run(&self, successor: &Arc<AgentLink>) {
        let _alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.agents.slots.current();
        let mut machine = Machine::default();
        let mut actions = VecDeque::from(machine.on(Event::Connected { running: old.is_some() }));
        let now = Instant::now();
        let mut running = Running {
            handoff: self,
            successor,
            old,
            quiet: None,
            drained: None,
            begun: now,
            pause: now,
            taken: 0,
        };
        while let Some(action) = actions.pop_front() {
            if let Some(event) = running.perform(action) {
                actions.extend(machine.on(event));
            }
        }
    }

    /// Why the successor cannot serve what is served now.
    pub(super) fn prepare(&self, successor: &AgentLink) -> Vec<String> {
        let live = |m: &Arc<Mount>| {
            use mounts_table::State::{Adopting, Orphaned, Serving};
            matches!(m.state(), Serving | Orphaned(_) | Adopting(_))
        };
        let mut mounts = self.lifecycle.table.all();
        mounts.retain(live);
        for_each(&mounts, |mount| {
            let result = match adoption(mount, Instant::now(), AgentEnd::Asked) {
                Some(Adoption { mut adopt, device, inflight }) => {
                    adopt.publish.secrets.clear(); // nothing is asked of the store yet
                    let prepare = AgentRequest::Prepare(Box::new(adopt));
                    let fds = [device.as_fd(), inflight.as_fd()];
                    consent(successor.ask(prepare, &fds, PREPARE_LIMIT))
                }
                None => Ok(()), // it ended meanwhile
            };
            // A mount that ended meanwhile is no reason against the new agent.
            result.err().filter(|_| !self.lifecycle.note_if_ended(mount) && live(mount)).map(|error| {
                format!("volume {} ({}) cannot be served by the new agent: {error}", mount.volume(), mount.id)
            })
        })
        .into_iter()
        .flatten()
        .collect()
    }

    /// A broker that has just started knows only the mounts that it was shown, and could hand over no other. False: it
    /// still does not know them all.
    pub(super) fn await_shown(&self, old: &AgentLink) -> bool {
        let end = Instant::now() + SHOWN_LIMIT;
        loop {
            let unknown = match old.ask(AgentRequest::Holding, &[], WORD_LIMIT) {
                Ok((AgentAnswer::Holding { mounts }, _)) => {
                    mounts.iter().any(|id| self.lifecycle.table.get(*id).is_none())
                }
                Err(AskError::Gone) => false, // what it has not shown cannot be had from it
                _ => self.misses_mounts(),
            };
            if !unknown || Instant::now() >= end {
                return !unknown;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Is there a mount of ours that no agent has shown? A dead one that waits for being made anew counts, too.
    pub(super) fn misses_mounts(&self) -> bool {
        let Ok(mounted) = self.lifecycle.kernel.table() else { return true };
        let known: Vec<Connection> =
            self.lifecycle.table.all().iter().map(|mount| mount.connection).collect();
        let ours = mounted.iter().filter(|entry| matches!(entry.ours(), Some(Ours::Fuse(_))));
        let here = ours
            .filter(|entry| self.config.kubelet_dirs.iter().any(|dir| entry.mount_point.starts_with(dir)));
        here.map(MountEntry::connection).any(|connection| !known.contains(&connection))
    }

    pub(super) fn await_publishes(&self) {
        let end = Instant::now() + PUBLISH_LIMIT;
        let under_way =
            || self.lifecycle.table.all().iter().any(|m| m.state() == mounts_table::State::Preparing);
        while under_way() && Instant::now() < end {
            std::thread::sleep(LOOK_EVERY);
        }
        // The running agent may be new itself, and still be given the mounts of the one before.
        self.adopter.await_given();
    }

    /// The successor's place is free at once.
    fn hang_up(&self, successor: &Arc<AgentLink>) {
        successor.close();
        self.agents.slots.clear(successor);
    }
}

impl Running<'_> {
    /// What has come of it, if the machine waits for that.
    fn perform(&mut self, action: Action) -> Option<Event> {
        let (handoff, successor) = (self.handoff, self.successor);
        let pid = successor.identity().pid;
        match action {
            Action::AwaitShown => {
                let shown = self.old.as_ref().is_none_or(|old| handoff.await_shown(old));
                return Some(Event::Shown(shown));
            }
            Action::Prepare => return Some(Event::Prepared { refused: handoff.prepare(successor) }),
            Action::StopPublishes => {
                failpoint::hit("handoff.prepared");
                self.quiet = Some(handoff.agents.stop_publishes());
            }
            Action::AwaitPublishes => {
                handoff.await_publishes();
                self.pause = Instant::now();
                return Some(Event::Quiet);
            }
            Action::Drain => return Some(Event::Drain(self.drain())),
            Action::OrphanOld => {
                self.drained = self.old.as_ref().map(|old| old.identity().clone());
                self.with_old(|old| handoff.lifecycle.orphan_all_of(old.identity(), "its agent is drained"));
            }
            Action::KillOld => self.with_old(|old| old.identity().kill()),
            Action::SeeOffOld => self.with_old(|old| old.identity().see_off()),
            Action::Promote => {
                failpoint::hit("handoff.drained");
                return Some(Event::Promoted(handoff.agents.slots.promote(successor, self.old.as_ref())));
            }
            Action::Succeed => {
                let succeeded = consent(successor.ask(AgentRequest::Succeed, &[], SUCCEED_LIMIT));
                let failed = |e| format!("the new agent does not take over: {e}");
                return Some(Event::Succeeded(succeeded.map_err(failed)));
            }
            Action::Adopt => return Some(self.adopt()),
            Action::AllowPublishes => self.quiet = None,
            // It may be gone already, or go without an answer.
            Action::Depart => self.with_old(|old| _ = old.ask(AgentRequest::Depart, &[], WORD_LIMIT)),
            Action::Announce => tracing::info!(
                pid,
                mounts = self.taken,
                pause_ms = self.pause.elapsed().as_millis() as u64,
                all_ms = self.begun.elapsed().as_millis() as u64,
                "an agent has taken over from the one before"
            ),
            Action::Postpone { why } => {
                tracing::warn!(pid, why, "an agent does not take over yet");
                handoff.hang_up(successor);
            }
            Action::Dismiss { why } => {
                tracing::error!(pid, why, "an agent does not take over");
                // It may be what is gone.
                let _ = successor.ask(AgentRequest::Dismiss { why }, &[], WORD_LIMIT);
                handoff.hang_up(successor);
            }
            Action::KillSuccessor => {
                successor.identity().kill();
                successor.identity().see_off();
            }
            Action::Resume => self.with_old(|old| {
                if let Err(error) = old.ask(AgentRequest::Resume, &[], WORD_LIMIT) {
                    // It starts anew, and its connection ends with that: the answer may be lost.
                    tracing::info!(%error, "the old agent was asked to serve again");
                }
            }),
            Action::Complain { why } => tracing::error!(pid, why, "a hand-off does not go as it should"),
        }
        None
    }

    fn with_old(&self, act: impl FnOnce(&AgentLink)) {
        if let Some(old) = &self.old {
            act(old);
        }
    }

    fn drain(&self) -> Answer {
        let Some(old) = &self.old else { return Answer::Gone };
        match consent(old.ask(AgentRequest::Drain, &[], DRAIN_LIMIT)) {
            Ok(()) => Answer::Drained,
            Err(AskError::Refused(refusal)) if refusal.kind == RefusalKind::Unavailable => {
                Answer::Refused { now: true, why: refusal.message }
            }
            Err(AskError::Refused(refusal)) => Answer::Refused { now: false, why: refusal.to_string() },
            Err(AskError::Gone) => Answer::Gone,
            Err(error) => Answer::Late { why: error.to_string() },
        }
    }

    fn adopt(&mut self) -> Event {
        failpoint::hit("handoff.succeeded");
        let spare = self.drained.as_ref();
        let Given { taken, refused } = self.handoff.adopter.hand_all_over(self.successor, spare);
        self.taken = taken;
        Event::Adopted { refused, connected: self.successor.is_connected() }
    }
}
