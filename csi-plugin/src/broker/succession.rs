//! An agent takes over from one that is still running, so that an upgrade is a pause and not an outage.
//!
//! ```text
//!            Hello          every mount: Done      old: Done, gone or killed    Done        every mount adopted
//!  (nobody) ──────► prepare ────────────────► step back ──────────────► succeed ─────► adopt ─────────► old departs
//!                      │ one refused,             │ old refuses             │ gone, late    │ gone, refused one
//!                      ▼ or it is gone            ▼                         └───────┬───────┘
//!                  dismissed: the old agent was not touched                         ▼
//!                                                          the old agent steps forward: it starts anew and adopts all
//! ```
//!
//! Until the old agent has stepped back nothing has happened to it. From then on there is a pause, and either of the two
//! may die at any moment: the other one serves. Should both be gone, the mounts wait for whoever comes.

use super::Broker;
use super::handover::{Adoption, Given, adoption, for_each};
use super::mounts_table::{Mount, State};
use super::socket::{AgentLink, AskError};
use link::broker::{AgentAnswer, AgentEnd, AgentRequest};
use link::{RefusalKind, failpoint};
use mounts::{Connection, MountEntry, Ours};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// For one mount: workers are started and tried.
const PREPARE_LIMIT: Duration = Duration::from_secs(30);
/// Publishes that are under way end within this, or fail and are repeated.
const PUBLISH_LIMIT: Duration = Duration::from_secs(5);
/// An agent that does not step back within this is killed, for its successor is ready.
const STEP_BACK_LIMIT: Duration = Duration::from_secs(5);
/// A successor opens cache and state.
const SUCCEED_LIMIT: Duration = Duration::from_secs(20);
const WORD_LIMIT: Duration = Duration::from_secs(2);
/// An agent shows its mounts to a broker that is new.
const SHOWN_LIMIT: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// While one of these lives no volume is published: neither agent could take it.
struct NoPublishes<'b>(&'b AtomicBool);

impl<'b> NoPublishes<'b> {
    fn begin(flag: &'b AtomicBool) -> Self {
        flag.store(true, Ordering::SeqCst);
        Self(flag)
    }
}

impl Drop for NoPublishes<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Broker {
    /// All of it; blocks until it is decided. `successor` has just connected.
    pub(super) fn succession(&self, successor: &Arc<AgentLink>) {
        let _alone = self.succeeding.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        let before = self.agents.current();
        if !before.as_ref().is_none_or(|old| self.await_shown(old)) {
            return self
                .postpone(successor, "the running agent has not shown every mount to this broker yet");
        }
        if let Err(why) = self.prepare(successor) {
            return self.dismiss(successor, &why);
        }
        failpoint::hit("succession.prepared");
        let quiet = NoPublishes::begin(&self.switching);
        self.await_publishes();
        // The running agent may be new itself, and still be given the mounts of the one before.
        drop(self.giving.lock().unwrap_or_else(PoisonError::into_inner));
        let pause = Instant::now();
        let stepped_back = before.as_ref().map(|old| (old, self.step_back(old)));
        // None: gone or killed, there is nothing to go back to.
        let old = match stepped_back {
            Some((old, Ok(()))) => Some(old),
            Some((_, Err(AskError::Refused(refusal)))) if refusal.kind == RefusalKind::Unavailable => {
                return self.postpone(successor, &refusal.message);
            }
            Some((_, Err(AskError::Refused(refusal)))) => {
                return self.dismiss(successor, &format!("the running agent goes on: {refusal}"));
            }
            Some((old, Err(AskError::Gone))) => {
                old.identity().see_off();
                None
            }
            Some((old, Err(error))) => {
                tracing::warn!(pid = old.identity().pid, %error, "the old agent does not step back: it is killed");
                old.identity().kill();
                old.identity().see_off();
                None
            }
            None => None,
        };
        failpoint::hit("succession.stepped-back");
        let taken = match self.agents.promote(successor, before.as_ref()) {
            true => self.take_over(successor, old),
            false => Err("it is gone, or another agent has come".into()),
        };
        drop(quiet);
        match (taken, old) {
            (Ok(mounts), old) => {
                tracing::info!(
                    pid = successor.identity().pid,
                    mounts = mounts.len(),
                    pause_ms = pause.elapsed().as_millis() as u64,
                    all_ms = begun.elapsed().as_millis() as u64,
                    "an agent has taken over from the one before"
                );
                if let Some(old) = old {
                    // It may be gone already, or go without an answer.
                    let _ = old.ask(AgentRequest::Depart, &[], WORD_LIMIT);
                    old.identity().see_off();
                }
                self.look_through_all(&mounts);
            }
            (Err(why), Some(old)) => {
                tracing::error!(why, "the old agent serves again");
                self.dismiss(successor, &why);
                // Two agents must not work on one cache, and applications wait.
                successor.identity().kill();
                successor.identity().see_off();
                if let Err(error) = old.ask(AgentRequest::StepForward, &[], WORD_LIMIT) {
                    // It starts anew, and its connection ends with that: the answer may be lost.
                    tracing::info!(%error, "the old agent was told to serve again");
                }
            }
            (Err(why), None) => {
                tracing::error!(why, "mounts wait for an agent");
                self.postpone(successor, &why); // where nobody else works it comes back as the node's agent
            }
        }
    }

    /// Could the successor serve what is served now?
    fn prepare(&self, successor: &AgentLink) -> Result<(), String> {
        let live =
            |m: &Arc<Mount>| matches!(m.state(), State::Serving | State::Orphaned(_) | State::Adopting(_));
        let mut mounts = self.table.all();
        mounts.retain(live);
        let failed: Vec<String> = for_each(&mounts, |mount| {
            let result = match adoption(mount, Instant::now(), AgentEnd::Asked) {
                Some(Adoption { mut adopt, device, inflight }) => {
                    adopt.publish.secrets.clear(); // nothing is asked of the store yet
                    let prepare = AgentRequest::Prepare(Box::new(adopt));
                    successor.ask(prepare, &[device.as_fd(), inflight.as_fd()], PREPARE_LIMIT).map(drop)
                }
                None => Ok(()), // it ended meanwhile
            };
            // Whoever ends it meanwhile is no reason against the new agent.
            result.err().filter(|_| !self.note_if_ended(mount) && live(mount)).map(|error| {
                format!("volume {} ({}) cannot be served by the new agent: {error}", mount.spec.id, mount.id)
            })
        })
        .into_iter()
        .flatten()
        .collect();
        match failed.is_empty() {
            true => Ok(()),
            false => Err(failed.join("; ")),
        }
    }

    /// A broker that has just started knows only the mounts that it was shown, and could hand over no other. False: it
    /// still does not know them all.
    fn await_shown(&self, old: &AgentLink) -> bool {
        let end = Instant::now() + SHOWN_LIMIT;
        loop {
            let unknown = match old.ask(AgentRequest::Holding, &[], WORD_LIMIT) {
                Ok((AgentAnswer::Holding { mounts }, _)) => {
                    mounts.iter().any(|id| self.table.get(*id).is_none())
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

    /// Is there a mount of ours that nobody has shown? A dead one that waits for being made anew counts, too.
    fn misses_mounts(&self) -> bool {
        let Ok(mounted) = self.kernel.table() else { return true };
        let known: Vec<Connection> = self.table.all().iter().map(|mount| mount.connection).collect();
        let ours = mounted.iter().filter(|entry| matches!(entry.ours(), Some(Ours::Fuse(_))));
        let here = ours
            .filter(|entry| self.config.kubelet_dirs.iter().any(|dir| entry.mount_point.starts_with(dir)));
        here.map(MountEntry::connection).any(|connection| !known.contains(&connection))
    }

    fn await_publishes(&self) {
        let end = Instant::now() + PUBLISH_LIMIT;
        let under_way = || self.table.all().iter().any(|m| m.state() == State::Preparing);
        while under_way() && Instant::now() < end {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn step_back(&self, old: &AgentLink) -> Result<(), AskError> {
        old.ask(AgentRequest::StepBack, &[], STEP_BACK_LIMIT)?;
        self.orphan_all_of(old.identity(), "its agent has stepped back");
        Ok(())
    }

    /// What the successor serves now; an error if the old agent has to serve again.
    fn take_over(
        &self,
        successor: &Arc<AgentLink>,
        old: Option<&Arc<AgentLink>>,
    ) -> Result<Vec<(Arc<Mount>, Instant)>, String> {
        successor
            .ask(AgentRequest::Succeed, &[], SUCCEED_LIMIT)
            .map_err(|e| format!("the new agent does not take over: {e}"))?;
        failpoint::hit("succession.succeeded");
        let Given { mounts, refused } = self.hand_all_over(successor, old.map(|o| o.identity()));
        match (refused, old) {
            (None, _) => Ok(mounts),
            (Some(why), None) if successor.is_connected() => {
                tracing::error!(why, "not every mount is served by the new agent, and the old one is gone");
                Ok(mounts)
            }
            (Some(why), _) => Err(why),
        }
    }

    /// It connects anew, and is tried again.
    fn postpone(&self, successor: &Arc<AgentLink>, why: &str) {
        tracing::warn!(pid = successor.identity().pid, why, "an agent does not take over yet");
        successor.close();
        self.agents.clear(successor);
    }

    fn dismiss(&self, successor: &Arc<AgentLink>, why: &str) {
        tracing::error!(pid = successor.identity().pid, why, "an agent does not take over");
        // It may be what is gone.
        let _ = successor.ask(AgentRequest::Dismiss { why: why.to_owned() }, &[], WORD_LIMIT);
        successor.close();
        self.agents.clear(successor);
    }
}
