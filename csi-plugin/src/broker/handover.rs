//! Agents and brokers that come after one another: what the broker keeps is given to the agent's successor, and what
//! the agent keeps is taken back by the broker's.

use super::mounts_table::{Mount, Parts, State};
use super::socket::{AgentIdentity, AgentLink, AskError};
use super::targets::Recipe;
use super::{Broker, GOODBYE_LIMIT, PROBE_LIMIT, primes};
use crate::events::Subjects;
use link::broker::{Adopt, AgentAnswer, AgentEnd, AgentRequest, BrokerAnswer, Hold, MountId, Publish};
use link::{Refusal, RefusalKind, failpoint};
use mounts::{Connection, MountSource, Ours, Target, probe, stack_at};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use volume::{Credentials, VolumeSpec};

/// The agent takes a mount over without asking its source: this is for starting a worker on a busy machine.
const ADOPT_LIMIT: Duration = Duration::from_secs(20);
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
    pub(super) flight: Arc<OwnedFd>,
}

/// None: the mount has ended, or was never prepared.
pub(super) fn adoption(mount: &Mount, since: Instant, ended: AgentEnd) -> Option<Adoption> {
    let (device, (flight, resume)) = (mount.device()?, mount.prepared()?);
    let orphaned_ms = since.elapsed().as_millis() as u64;
    let adopt = Adopt { publish: publish(mount), resume, backing: mount.backing(), orphaned_ms, ended };
    Some(Adoption { adopt, device, flight })
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
            if mount.is_of(agent.identity()) && matches!(mount.state(), State::Orphaned(_)) {
                self.enter(&mount, State::Serving, "its agent is back");
            }
        }
    }

    /// As [`Self::hand_all_over`], with nobody to go back to.
    pub(super) fn give_all(&self, agent: &AgentLink) {
        let given = self.hand_all_over(agent, None);
        if let Some(why) = given.refused {
            tracing::error!(given = given.mounts.len(), why, "not every mount has an agent again");
        }
        self.look_through_all(&given.mounts);
    }

    /// An agent is there: the mounts of its predecessor become its own. Blocks until it has them all. `spare` has stepped
    /// back for it: it lives, and serves nothing.
    pub(super) fn hand_all_over(&self, agent: &AgentLink, spare: Option<&AgentIdentity>) -> Given {
        let _giving = self.giving.lock().unwrap_or_else(PoisonError::into_inner);
        let mut orphans = self.table.all();
        // Serving: the predecessor's connection has ended, and nobody has noted it yet.
        let live = |state| matches!(state, State::Orphaned(_) | State::Serving);
        orphans.retain(|mount| live(mount.state()) && !mount.is_of(agent.identity()));
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
        let since = match mount.state() {
            State::Orphaned(since) => since,
            State::Serving => Instant::now(),
            State::Preparing | State::Dead => return Ok(None),
        };
        let ended = if handed_over { AgentEnd::Asked } else { self.ends.of(&mount.agent()) };
        let Some(Adoption { adopt, device, flight }) = adoption(mount, since, ended) else {
            return Ok(None);
        };
        // It may ask about the mount before it answers.
        mount.give_to(agent.identity());
        let adopt = AgentRequest::Adopt(Box::new(adopt));
        let adopted = agent.ask(adopt, &[device.as_fd(), flight.as_fd()], ADOPT_LIMIT);
        // Nobody serves it in the cases below: it ends with its healTimeout, unless another agent comes.
        let why = match adopted {
            Ok((AgentAnswer::Done, _)) => {
                self.enter(mount, State::Serving, "a new agent serves it");
                failpoint::hit("broker.adopted-one");
                return Ok(Some(since));
            }
            Ok(_) => "the new agent answered with something else".to_owned(),
            Err(AskError::Gone) => "the new agent is gone, too".to_owned(),
            Err(error) => {
                tracing::error!(mount = %mount.id, volume = %mount.spec.id, %error, "the new agent does not take this mount: it ends after healTimeout");
                format!("the new agent refused it: {error}")
            }
        };
        if mount.device().is_none() {
            return Ok(None); // unpublished meanwhile
        }
        self.enter(mount, State::Orphaned(since), &why);
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

    /// A mount of an earlier broker, told by the agent that serves it.
    pub(super) fn hold(
        &self,
        agent: &AgentIdentity,
        hold: Hold,
        fds: Vec<OwnedFd>,
    ) -> Result<BrokerAnswer, Refusal> {
        let Hold { publish, resume, backing } = hold;
        let id = publish.mount;
        if let Some(known) = self.table.get(id) {
            return match known.is_of(agent) {
                true => Ok(BrokerAnswer::Done),
                false => Err(Refusal::new(RefusalKind::Conflict, format!("mount {id} is another agent's"))),
            };
        }
        let invalid = |e: &dyn std::fmt::Display| Refusal::new(RefusalKind::Invalid, e.to_string());
        let [device, flight] = <[OwnedFd; 2]>::try_from(fds)
            .map_err(|_| invalid(&"Hold takes the device and the shared memory"))?;
        let credentials = Credentials::from_secrets(&publish.secrets).map_err(|e| invalid(&e))?;
        failpoint::hit("broker.hold");
        let path = Path::new(&publish.target);
        let target = Target::resolve(&self.config.kubelet_dirs, path).map_err(|e| invalid(&e))?;
        if self.kernel.has_ended(device.as_fd()) {
            self.release_ended(agent, id);
            return Err(Refusal::new(
                RefusalKind::NotFound,
                format!("the connection of mount {id} has ended"),
            ));
        }
        let (connection, source) = self.mounted(&target, &publish.spec)?;
        let mount = self.table.insert(Mount::new(Parts {
            id,
            target: Arc::new(target),
            connection,
            source,
            spec: publish.spec,
            credentials,
            subjects: Subjects { pod: publish.pod, claim: publish.claim },
            environment: publish.environment,
            agent: agent.clone(),
            device,
        }));
        failpoint::hit("broker.noted");
        mount.keep_prepared(flight, resume);
        failpoint::hit("broker.prepared");
        backing.into_iter().for_each(|id| mount.record_backing(id));
        mount.enter(State::Serving, "mounted by an earlier broker, held by its agent");
        // Unpublished between our look and our note: whoever did it did not find it in the table.
        self.mounted(&mount.target, &mount.spec).inspect_err(|_| {
            self.table.remove(id);
        })?;
        self.targets.add(mount.target.path(), Recipe::of(&mount.order()));
        mount.set_replaces(self.targets.dead(mount.target.path()));
        if !mount.replaces().is_empty() {
            self.renewals.wake();
        }
        failpoint::hit("broker.held");
        Ok(BrokerAnswer::Done)
    }

    /// A mount that came to nothing (its broker died while it made it), or was taken away by somebody else: what is at
    /// its target now is another one.
    fn release_ended(&self, agent: &AgentIdentity, id: MountId) {
        let Some(link) = self.agents.current().filter(|link| link.identity() == agent) else { return };
        match link.ask(AgentRequest::Unpublish { mount: id }, &[], GOODBYE_LIMIT) {
            Ok(_) => {
                tracing::info!(mount = %id, "the agent has let go of a mount whose connection has ended")
            }
            Err(error) => {
                tracing::warn!(mount = %id, %error, "the agent keeps a mount whose connection has ended")
            }
        }
    }

    /// The mount table knows the mount's options; the agent does not.
    fn mounted(&self, target: &Target, spec: &VolumeSpec) -> Result<(Connection, MountSource), Refusal> {
        let table = self.kernel.table().map_err(|e| Refusal::new(RefusalKind::Internal, e.to_string()))?;
        let absent = || {
            let text = format!("volume {} is not mounted at {}", spec.id, target.path().display());
            Refusal::new(RefusalKind::NotFound, text)
        };
        let stack = stack_at(&table, target.path());
        let top = stack.last().ok_or_else(absent)?;
        match top.ours() {
            Some(Ours::Fuse(source)) if source.is_of(spec.id.as_str(), &spec.digest()) => {
                Ok((top.connection(), source))
            }
            _ => Err(absent()),
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
        let live: Vec<_> = self.table.all().into_iter().filter(|m| m.state() != State::Dead).collect();
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
        self.started.is_some() && Self::of(self.pid, self.life) == *self && !is_zombie(self.pid)
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
