//! Agents that come after one another: what the broker keeps is given to the agent's successor. What the agent keeps
//! for the broker's successor is in `hold`.

use super::mounts_table::{Mount, State};
use super::socket::{AgentIdentity, AgentLink, AskError};
use super::{Broker, PROBE_LIMIT, primes};
use link::broker::{Adopt, AgentAnswer, AgentEnd, AgentRequest, BrokerAnswer, Publish};
use link::{Refusal, RefusalKind, failpoint};
use mounts::probe;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Mounts that are given to a new agent at the same time: most of the time each waits for the start of its worker.
const ADOPTERS: usize = 8;
/// An agent that is to end gets so long to exit before it is killed: two agents must not serve one mount.
const EXIT_LIMIT: Duration = Duration::from_secs(2);
/// One that has stepped back may be the last to hold mounts that this broker, a new one, has not been shown yet.
const SHOW_AND_EXIT_LIMIT: Duration = Duration::from_secs(20);
const HOLDING_LIMIT: Duration = Duration::from_secs(2);

/// Everything but the INIT request, which lies in the connection's shared memory.
pub(super) fn publish(mount: &Mount) -> Publish {
    Publish {
        mount: mount.id,
        spec: mount.spec.clone(),
        secrets: mount.credentials().to_secrets(),
        environment: mount.environment,
        init: Vec::new(),
        target: mount.target.path().display().to_string(),
        pod: mount.subjects.pod.clone(),
        claim: mount.subjects.claim.clone(),
    }
}

/// What an agent is given to serve a mount that another one has served.
pub(super) struct Adoption {
    pub(super) adopt: Adopt,
    pub(super) device: Arc<OwnedFd>,
    pub(super) inflight: Arc<OwnedFd>,
}

/// None: the mount has ended, or was never prepared.
pub(super) fn adoption(mount: &Mount, since: Instant, ended: AgentEnd) -> Option<Adoption> {
    let (device, (inflight, resume)) = (mount.device()?, mount.prepared()?);
    let orphaned_ms = since.elapsed().as_millis() as u64;
    let adopt = Adopt { publish: publish(mount), resume, backing: mount.backing(), orphaned_ms, ended };
    Some(Adoption { adopt, device, inflight })
}

/// What has become of the mounts that were to be given to an agent.
#[derive(Default)]
pub(super) struct Given {
    /// It serves them now, and since when nobody had.
    pub(super) mounts: Vec<(Arc<Mount>, Instant)>,
    /// Why it did not take the first of the others.
    pub(super) refused: Option<String>,
}

/// Does it for some of them at a time; the results are in the order of the items.
pub(super) fn for_each<T: Sync, R: Send>(items: &[T], each: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return done };
            done.push((index, each(item)));
        }
    };
    let mut all: Vec<(usize, R)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..ADOPTERS.min(items.len())).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|w| w.join().unwrap_or_default()).collect()
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, result)| result).collect()
}

impl Broker {
    /// The same agent as before, after a broken connection.
    pub(super) fn welcome_back(&self, agent: &AgentLink) {
        for mount in self.table.all() {
            self.enter_if(&mount, State::Serving, "its agent is back", |state, of| {
                matches!(state, State::Orphaned(_)) && of == agent.identity()
            });
        }
    }

    /// This agent serves nothing any more.
    pub(super) fn orphan_all_of(&self, agent: &AgentIdentity, why: &str) {
        for mount in self.table.all() {
            self.orphan(&mount, agent, why);
        }
        self.wake_watcher();
    }

    /// Nobody serves it from now on, if this agent did.
    pub(super) fn orphan(&self, mount: &Mount, agent: &AgentIdentity, why: &str) -> bool {
        self.enter_if(mount, State::Orphaned(Instant::now()), why, |state, of| {
            state == State::Serving && of == agent
        })
    }

    /// As [`Self::hand_all_over`], with nobody to go back to.
    pub(super) fn give_all(&self, agent: &AgentLink) {
        let given = self.hand_all_over(agent, None);
        if let Some(why) = given.refused {
            tracing::error!(given = given.mounts.len(), why, "not every mount has an agent again");
        }
        self.look_through_all(&given.mounts);
    }

    /// An agent is there: the mounts of its predecessor become its own, and those of its own that it does not serve are
    /// given to it again. Blocks until it has them all. `spare` has stepped
    /// back for it: it lives, and serves nothing.
    pub(super) fn hand_all_over(&self, agent: &AgentLink, spare: Option<&AgentIdentity>) -> Given {
        let _giving = self.giving.lock().unwrap_or_else(PoisonError::into_inner);
        let mut orphans = self.table.all();
        // Nobody can serve what somebody has ended, however well an agent takes it over.
        orphans.retain(|mount| !self.note_if_ended(mount));
        orphans.retain(|mount| match mount.state() {
            State::Orphaned(_) => true,
            // The predecessor's connection has ended, and nobody has noted it yet.
            State::Serving => !mount.is_of(agent.identity()),
            State::Preparing | State::Adopting(_) | State::Dead | State::Unpublished => false,
        });
        let mut earlier: Vec<AgentIdentity> = orphans.iter().map(|m| m.agent()).collect();
        earlier.dedup();
        // A process that executed itself anew has ended its earlier life with that.
        earlier.retain(|e| spare != Some(e) && !e.is_process_of(agent.identity()));
        for agent in earlier {
            match self.agents.is_stepped_back(&agent) {
                true => agent.see_off_within(SHOW_AND_EXIT_LIMIT),
                false => agent.see_off(),
            }
        }
        let taken = for_each(&orphans, |mount| self.hand_over(agent, mount, spare.is_some()));
        let mut given = Given::default();
        for (mount, taken) in orphans.into_iter().zip(taken) {
            match taken {
                Ok(Some(since)) => given.mounts.push((mount, since)),
                Ok(None) => {}
                Err(why) => {
                    given.refused.get_or_insert(why);
                }
            }
        }
        given
    }

    /// After all of them were given: a mount whose store hangs takes long to look through, and the others wait for their
    /// workers.
    pub(super) fn look_through_all(&self, given: &[(Arc<Mount>, Instant)]) {
        for_each(given, |(mount, since)| self.look_through(mount, *since));
    }

    /// Since when nobody had served it; None: there was nothing to hand over any more.
    fn hand_over(
        &self,
        agent: &AgentLink,
        mount: &Mount,
        handed_over: bool,
    ) -> Result<Option<Instant>, String> {
        // It may ask about the mount before it answers.
        let Some((since, before)) = mount.begin_adoption(agent.identity(), Instant::now()) else {
            return Ok(None);
        };
        let still = |state: State, _: &AgentIdentity| state == State::Adopting(since);
        let ended = if handed_over { AgentEnd::Asked } else { self.ends.of(&before) };
        let Some(Adoption { adopt, device, inflight }) = adoption(mount, since, ended) else {
            // It ends just now: the agent was asked nothing.
            self.enter_if(mount, State::Orphaned(since), "there was nothing to give", still);
            return Ok(None);
        };
        let adopt = AgentRequest::Adopt(Box::new(adopt));
        let adopted = agent.ask(adopt, &[device.as_fd(), inflight.as_fd()], self.config.pace.adopt_limit);
        // Nobody serves it in the cases below: it ends with its healTimeout, unless another agent comes.
        let why = match adopted {
            Ok((AgentAnswer::Done, _)) => {
                self.enter_if(mount, State::Serving, "a new agent serves it", still);
                failpoint::hit("broker.adopted-one");
                "the new agent is gone, too".to_owned()
            }
            Ok(_) => "the new agent answered with something else".to_owned(),
            Err(AskError::Gone) => "the new agent is gone, too".to_owned(),
            Err(error) => {
                tracing::error!(mount = %mount.id, volume = %mount.spec.id, %error, "the new agent does not take this mount: it ends after healTimeout");
                format!("the new agent refused it: {error}")
            }
        };
        match mount.state() {
            // Unpublished, or ended, while the agent was asked: it may have got it after it was told to let go.
            over if over.is_over() => {
                tracing::info!(mount = %mount.id, volume = %mount.spec.id, "a mount ended while it was handed over: the agent is told to let go of it");
                self.relieve(agent, mount.id, "it ended while it was handed over");
                return Ok(None);
            }
            // Whoever noted that the agent was gone may have done so before it served.
            State::Serving if agent.is_connected() => return Ok(Some(since)),
            _ => {}
        }
        self.enter_if(mount, State::Orphaned(since), &why, |state, of| {
            of == agent.identity() && matches!(state, State::Adopting(_) | State::Serving)
        });
        self.wake_watcher();
        Err(format!("volume {} ({}): {why}", mount.spec.id, mount.id))
    }

    /// Success is what can be seen through the mount.
    fn look_through(&self, mount: &Mount, since: Instant) {
        let mode = mount.prepared().map(|(_, resume)| resume.mode);
        let Some(mode) = mode else { return };
        match self.kernel.probe(&mount.target, primes(mode), PROBE_LIMIT) {
            Ok(probe::Outcome::Primed | probe::Outcome::Serving) => {
                tracing::info!(
                    mount = %mount.id, volume = %mount.spec.id,
                    duration_ms = since.elapsed().as_millis() as u64,
                    "healed: a new agent serves the mount"
                );
            }
            Ok(probe::Outcome::Dead) => {
                tracing::error!(mount = %mount.id, "the mount ended while it was handed over")
            }
            Err(error) => {
                tracing::warn!(mount = %mount.id, %error, "the mount was handed over; whether it reads is not known")
            }
        }
    }

    /// What an agent that wants to exit is told: the mounts that a successor could be given. Some may be another
    /// agent's by now, whatever this one still holds of them.
    pub(super) fn leaving(&self, agent: &AgentIdentity) -> Result<BrokerAnswer, Refusal> {
        self.ends.note(agent, AgentEnd::Asked);
        if self.going.load(Ordering::SeqCst) {
            let why = "this broker is about to exit itself: ask its successor";
            return Err(Refusal::new(RefusalKind::Unavailable, why));
        }
        let held = |m: &&Arc<Mount>| m.device().is_some() && m.prepared().is_some();
        let mounts = self.table.all().iter().filter(held).map(|m| m.id).collect();
        Ok(BrokerAnswer::Holding { mounts })
    }

    /// Does a living agent hold everything of every live mount? Once true this broker must go: it refuses to keep
    /// anything for an agent from then on. An agent that leaves says that it holds nothing, before it asks whether we
    /// do; so of the two that are asked to stop at once only one goes. Blocks.
    pub fn may_go(&self) -> bool {
        self.going.store(true, Ordering::SeqCst);
        let held = self.is_held();
        if !held {
            self.going.store(false, Ordering::SeqCst);
        }
        held
    }

    fn is_held(&self) -> bool {
        let live: Vec<_> = self.table.all().into_iter().filter(|m| !m.state().is_over()).collect();
        if live.is_empty() {
            return true;
        }
        let Some(agent) = self.agents.current() else { return false };
        if !live.iter().all(|m| m.state() == State::Serving && m.is_of(agent.identity())) {
            return false;
        }
        match agent.ask(AgentRequest::Holding, &[], HOLDING_LIMIT) {
            Ok((AgentAnswer::Holding { mounts }, _)) => live.iter().all(|m| mounts.contains(&m.id)),
            _ => false,
        }
    }
}

impl AgentIdentity {
    /// Makes sure that this process is gone: its mounts go to another.
    pub(super) fn see_off(&self) {
        self.see_off_within(EXIT_LIMIT);
    }

    fn see_off_within(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while self.is_alive() {
            if Instant::now() >= end {
                tracing::warn!(pid = self.pid, "an agent that should have ended is killed");
                self.kill();
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn is_alive(&self) -> bool {
        // An agent in the broker's own process, as tests have it, has no end to wait for, and none to bring about.
        let is_ours = self.pid.unsigned_abs() == std::process::id();
        !is_ours && self.started.is_some() && Self::of(self.pid, self.life) == *self && !is_zombie(self.pid)
    }

    pub(super) fn kill(&self) {
        use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
        let Some(pid) = Pid::from_raw(self.pid) else { return };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        // Looked at after the descriptor was opened: it cannot become another process any more.
        if self.is_alive() {
            let _ = pidfd_send_signal(&process, Signal::KILL); // gone by itself
        }
    }
}

fn is_zombie(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broker_ends_no_agent_of_its_own_process_and_any_other() {
        let ours = AgentIdentity::of(std::process::id() as i32, 1);
        assert!(ours.started.is_some());
        ours.see_off_within(Duration::ZERO); // would be the end of this test

        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let other = AgentIdentity::of(child.id() as i32, 1);
        assert!(other.is_alive());
        other.see_off_within(Duration::ZERO);
        assert!(!child.wait().unwrap().success());
        assert!(!other.is_alive());
    }
}
