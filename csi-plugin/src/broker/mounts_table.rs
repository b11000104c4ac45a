//! The node's mount table in memory: what is mounted, for whom, and what must be given back.
//!
//! ```text
//!             Publish, INIT, Start                its agent is gone
//!  Preparing ───────────────────────► Serving ─────────────────────────► Orphaned ◄──┐
//!      │        Hold, by an agent      ▲ ▲ │  ◄─────────────────────────    │        │ refused, no answer,
//!      │                               │ │ │     its agent is back, or      │        │ the agent is gone
//!      │                               │ │ │     is found to hold it        │        │
//!      │                               │ └─┼───────────── Done ─────────────┼── Adopting
//!      │                               │   │ another agent comes            ▼        ▲
//!      │                               │   └────────────────────────────────┴────────┘
//!      │
//!      │   from each of them: abort asked, healTimeout over, connection ended by another process
//!      ├───────────────────────────────────────────────────────────────────► Dead
//!      │   from each of them, and from Dead: unpublished, vanished, replaced   │
//!      └───────────────────────────────────────────────────────────────────► Unpublished ──► (removed)
//! ```
//!
//! Every transition is checked against [`State::allows`] under the mount's own lock, so the second of two threads
//! learns that it is second: whatever comes in between, nothing leads from Unpublished to anywhere, and Dead only
//! there.

use link::MountSpec;
use link::broker::{MountId, Resume};
use mounts::{Connection, Control, MountSource, Target};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use volume::{Credentials, RequestTimeout, VolumeId};

use super::Order;
use super::condition::Condition;
use super::socket::AgentIdentity;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Preparing,
    Serving,
    /// No agent serves it since then.
    Orphaned(Instant),
    /// An agent is adopting it; no agent serves it since then.
    Adopting(Instant),
    /// Its connection was aborted.
    Dead,
    /// It is being taken away for good; if the unmount fails it stays here, and is taken away by the next unpublish.
    Unpublished,
}

impl State {
    /// Is there an arrow from here to there?
    pub fn allows(self, to: Self) -> bool {
        match (self, to) {
            (Self::Preparing, Self::Serving)
            | (Self::Serving, Self::Orphaned(_) | Self::Adopting(_))
            | (Self::Orphaned(_), Self::Serving | Self::Adopting(_))
            | (Self::Adopting(_), Self::Serving | Self::Orphaned(_))
            | (Self::Dead, Self::Unpublished) => true,
            (Self::Dead | Self::Unpublished, _) => false,
            (_, Self::Dead | Self::Unpublished) => true,
            _ => false,
        }
    }

    /// No agent is to serve it any more.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Dead | Self::Unpublished)
    }
}

/// Everything the broker holds of one mount, for the agent's successor.
#[derive(Debug)]
pub struct Mount {
    pub id: MountId,
    pub target: Arc<Target>,
    pub connection: Connection,
    pub source: MountSource,
    pub spec: MountSpec,
    /// Taken by the abort: once every holder has let go, the kernel forgets the connection.
    pub device: Mutex<Option<Arc<OwnedFd>>>,
    pub(super) condition: Condition,
    limit: Option<RequestTimeout>,
    changing: Mutex<Changing>,
}

#[derive(Debug)]
struct Changing {
    state: State,
    agent: AgentIdentity,
    /// In memory only.
    credentials: Credentials,
    /// Shared memory of the connection and what a successor of the agent must know; None until it is prepared.
    prepared: Option<(Arc<OwnedFd>, Resume)>,
    /// Passthrough ids that the kernel holds for us.
    backing: BTreeSet<u32>,
    /// Of its connection; None where there is no fusectl.
    control: Option<Arc<Control>>,
    /// The agent that was given it last has said that it does not take it.
    refused: bool,
    /// Another process has ended its connection.
    ended_by_others: bool,
    /// Dead mounts in whose place it shall be, wherever they are found.
    replaces: Vec<Connection>,
}

/// What a new mount starts with.
#[derive(Debug)]
pub struct Parts {
    pub id: MountId,
    pub target: Arc<Target>,
    pub connection: Connection,
    pub source: MountSource,
    pub spec: MountSpec,
    pub credentials: Credentials,
    pub agent: AgentIdentity,
    pub device: OwnedFd,
    pub control: Option<Control>,
    /// The kernel's own, of this connection.
    pub limit: Option<RequestTimeout>,
}

/// What the broker held of a mount.
#[derive(Debug)]
pub struct Released {
    pub device: Option<Arc<OwnedFd>>,
    pub control: Option<Arc<Control>>,
    /// Passthrough ids that were open.
    pub backing: BTreeSet<u32>,
}

impl Mount {
    pub fn new(parts: Parts) -> Self {
        let Parts { id, target, connection, source, spec, .. } = parts;
        let changing = Changing {
            state: State::Preparing,
            agent: parts.agent,
            credentials: parts.credentials,
            prepared: None,
            backing: BTreeSet::new(),
            control: parts.control.map(Arc::new),
            refused: false,
            ended_by_others: false,
            replaces: Vec::new(),
        };
        Self {
            id,
            target,
            connection,
            source,
            spec,
            device: Mutex::new(Some(Arc::new(parts.device))),
            condition: Condition::default(),
            limit: parts.limit,
            changing: Mutex::new(changing),
        }
    }

    fn changing(&self) -> MutexGuard<'_, Changing> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn state(&self) -> State {
        self.changing().state
    }

    pub(crate) fn replaces(&self) -> Vec<Connection> {
        self.changing().replaces.clone()
    }

    pub(crate) fn set_replaces(&self, dead: Vec<Connection>) {
        self.changing().replaces = dead;
    }

    pub fn volume(&self) -> &VolumeId {
        &self.spec.volume.id
    }

    /// What would make it anew.
    pub fn order(&self) -> Order {
        Order { spec: self.spec.clone(), credentials: self.credentials(), options: self.source.options() }
    }

    /// Shorter than its parameter where the kernel itself would not wait so long.
    pub fn heal_timeout(&self) -> Duration {
        let asked = self.spec.volume.heal_timeout();
        self.limit.map_or(asked, |limit| limit.cap(asked))
    }

    pub fn credentials(&self) -> Credentials {
        self.changing().credentials.clone()
    }

    pub fn rotated(&self, credentials: Credentials) {
        self.changing().credentials = credentials;
    }

    /// Logs each transition once, and returns whether there was one.
    pub fn enter(&self, to: State, why: &str) -> bool {
        self.enter_if(to, why, |_, _| true)
    }

    /// As [`Self::enter`], if this still holds of its state and its agent.
    pub fn enter_if(&self, to: State, why: &str, holds: impl FnOnce(State, &AgentIdentity) -> bool) -> bool {
        let mut changing = self.changing();
        let from = changing.state;
        if !from.allows(to) || !holds(from, &changing.agent) {
            return false;
        }
        changing.state = to;
        drop(changing);
        self.log(from, to, why);
        true
    }

    /// As [`Self::enter_if`], to Dead, because another process has ended its connection.
    pub fn end_of_others(&self, why: &str, holds: impl FnOnce(State) -> bool) -> bool {
        let mut changing = self.changing();
        let from = changing.state;
        if !from.allows(State::Dead) || !holds(from) {
            return false;
        }
        (changing.state, changing.ended_by_others) = (State::Dead, true);
        drop(changing);
        self.log(from, State::Dead, why);
        true
    }

    pub(crate) fn is_ended_by_others(&self) -> bool {
        self.changing().ended_by_others
    }

    pub fn control(&self) -> Option<Arc<Control>> {
        self.changing().control.clone()
    }

    /// This agent is about to be given what no agent serves, or only one whose end no agent has noted, and may speak of it
    /// from now on. Since when has no agent served it, and which did before? None: it is not to be had.
    pub fn begin_adoption(&self, agent: &AgentIdentity, now: Instant) -> Option<(Instant, AgentIdentity)> {
        let mut changing = self.changing();
        let from = changing.state;
        let since = match from {
            State::Orphaned(since) => since,
            State::Serving if changing.agent != *agent => now,
            _ => return None,
        };
        let before = std::mem::replace(&mut changing.agent, agent.clone());
        (changing.state, changing.refused) = (State::Adopting(since), false);
        drop(changing);
        self.log(from, State::Adopting(since), "an agent is given it");
        Some((since, before))
    }

    /// The agent that was given it last has said that it does not take it.
    pub fn is_refused(&self) -> bool {
        self.changing().refused
    }

    pub(super) fn note_refused(&self) {
        self.changing().refused = true;
    }

    fn log(&self, from: State, to: State, why: &str) {
        let (mount, volume, target_path) = (self.id, self.volume(), self.target.path().display());
        match to {
            State::Dead => {
                tracing::error!(%mount, %volume, %target_path, ?from, ?to, why, "mount ended: readers get ENOTCONN");
            }
            _ => tracing::info!(%mount, %volume, %target_path, ?from, ?to, why, "mount"),
        }
    }

    pub fn agent(&self) -> AgentIdentity {
        self.changing().agent.clone()
    }

    pub fn is_of(&self, agent: &AgentIdentity) -> bool {
        self.changing().agent == *agent
    }

    pub fn keep_prepared(&self, inflight: OwnedFd, resume: Resume) {
        self.changing().prepared = Some((Arc::new(inflight), resume));
    }

    pub fn prepared(&self) -> Option<(Arc<OwnedFd>, Resume)> {
        self.changing().prepared.clone()
    }

    pub fn device(&self) -> Option<Arc<OwnedFd>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets go of device, control and shared memory.
    pub fn release(&self) -> Released {
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut changing = self.changing();
        changing.prepared = None;
        Released { device, control: changing.control.take(), backing: std::mem::take(&mut changing.backing) }
    }

    pub fn backing(&self) -> Vec<u32> {
        self.changing().backing.iter().copied().collect()
    }

    pub(crate) fn record_backing(&self, id: u32) {
        self.changing().backing.insert(id);
    }

    /// True if the id was ours to close.
    pub(crate) fn forget_backing(&self, id: u32) -> bool {
        self.changing().backing.remove(&id)
    }
}

/// Ids that are remembered after their mounts: an agent that still has one of them shall let go of it.
const REMOVED_KEPT: usize = 4096;

/// All mounts of this broker's life. Lock order: the table's lock before a mount's, and neither across a system call.
#[derive(Debug, Default)]
pub struct Table {
    rows: Mutex<Rows>,
}

#[derive(Debug, Default)]
struct Rows {
    mounts: BTreeMap<MountId, Arc<Mount>>,
    /// The latest of those that were taken away for good.
    removed: VecDeque<MountId>,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn insert(&self, mount: Mount) -> Arc<Mount> {
        let mount = Arc::new(mount);
        self.lock().mounts.insert(mount.id, mount.clone());
        mount
    }

    pub fn get(&self, id: MountId) -> Option<Arc<Mount>> {
        self.lock().mounts.get(&id).cloned()
    }

    /// Of a mount that was unpublished: it never comes back.
    pub fn remove(&self, id: MountId) -> Option<Arc<Mount>> {
        let mut rows = self.lock();
        let removed = rows.mounts.remove(&id)?;
        rows.removed.push_back(id);
        let surplus = rows.removed.len().saturating_sub(REMOVED_KEPT);
        rows.removed.drain(..surplus);
        Some(removed)
    }

    /// Was there a mount of this name that is no more?
    pub fn was_removed(&self, id: MountId) -> bool {
        self.lock().removed.contains(&id)
    }

    /// The newest: a dead one stays until the one in its place serves.
    pub fn at(&self, path: &Path) -> Option<Arc<Mount>> {
        self.lock().mounts.values().rev().find(|m| m.target.path() == path).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Mount>> {
        self.lock().mounts.values().cloned().collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use volume::{Parameters, SourceUrl, VolumeId, VolumeSpec};

    fn agent(pid: i32) -> AgentIdentity {
        AgentIdentity { pid, started: None, life: 1 }
    }

    pub(crate) fn mount() -> Mount {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let target = Target::resolve(std::slice::from_ref(&root), &root.join("t")).unwrap();
        let volume = VolumeSpec {
            id: VolumeId::parse("v").unwrap(),
            source: SourceUrl::parse("s3://bucket").unwrap(),
            parameters: Parameters::default(),
        };
        Mount::new(Parts {
            id: MountId(1),
            target: Arc::new(target),
            connection: Connection { major: 0, minor: 1 },
            source: MountSource { volume: "v".into(), digest: "d".into() },
            spec: MountSpec::new(volume, "/t"),
            credentials: Credentials::anonymous(),
            agent: agent(1),
            device: tempfile::tempfile().unwrap().into(),
            control: None,
            limit: None,
        })
    }

    #[test]
    fn every_pair_of_states_has_its_answer() {
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        use State::{Adopting, Dead, Orphaned, Preparing, Serving, Unpublished};
        let all = [Preparing, Serving, Orphaned(now), Adopting(now), Dead, Unpublished];
        let arrows = [
            (Preparing, vec![Serving, Dead, Unpublished]),
            (Serving, vec![Orphaned(now), Adopting(now), Dead, Unpublished]),
            (Orphaned(now), vec![Serving, Adopting(now), Dead, Unpublished]),
            (Adopting(now), vec![Serving, Orphaned(now), Dead, Unpublished]),
            (Dead, vec![Unpublished]),
            (Unpublished, vec![]),
        ];
        for (from, targets) in arrows {
            for to in all {
                assert_eq!(from.allows(to), targets.contains(&to), "{from:?} to {to:?}");
            }
        }
        assert!(!Orphaned(now).allows(Orphaned(later)) && !Adopting(now).allows(Adopting(later)));
    }

    #[test]
    fn what_was_seen_before_decides_nothing() {
        let (mount, now) = (mount(), Instant::now());
        assert!(mount.enter(State::Serving, ""));
        assert!(mount.begin_adoption(&agent(1), now).is_none(), "it serves it");
        assert!(
            mount.enter_if(State::Orphaned(now), "", |state, of| state == State::Serving && *of == agent(1))
        );
        let seen = mount.state();
        assert_eq!(mount.begin_adoption(&agent(2), now), Some((now, agent(1))));
        assert!(mount.is_of(&agent(2)));
        assert!(mount.begin_adoption(&agent(3), now).is_none(), "one at a time");
        assert!(
            !mount.enter_if(State::Dead, "", |state, _| state == seen),
            "its time was over, but it was adopted"
        );
        let orphaned_by_the_first =
            |state: State, of: &AgentIdentity| state == State::Serving && *of == agent(1);
        assert!(!mount.enter_if(State::Orphaned(now), "", orphaned_by_the_first));
        assert!(mount.enter(State::Unpublished, ""));
        assert!(!mount.enter(State::Serving, "") && mount.state() == State::Unpublished);
    }

    /// In every order: what is over stays over, and one agent at a time is given a mount.
    #[test]
    fn no_order_of_events_brings_a_mount_back() {
        let now = Instant::now();
        for seed in 1..2000_u64 {
            let (mount, mut random) = (mount(), seed);
            let mut next = |n: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % n
            };
            let mut adopting: Option<(AgentIdentity, Instant)> = None;
            for _ in 0..20 {
                let before = mount.state();
                let who = agent(1 + next(3) as i32);
                match next(7) {
                    0 => drop(mount.enter(State::Serving, "")),
                    1 => drop(mount.enter_if(State::Orphaned(now), "", |state, of| {
                        state == State::Serving && *of == who
                    })),
                    2 => {
                        if let Some((since, _)) = mount.begin_adoption(&who, now) {
                            assert!(
                                !matches!(before, State::Adopting(_)) && !before.is_over(),
                                "seed {seed}: {before:?}"
                            );
                            adopting = Some((who, since));
                        }
                    }
                    3 | 4 => {
                        if let Some((who, since)) = adopting.take() {
                            let still = |state: State, _: &AgentIdentity| state == State::Adopting(since);
                            if mount.enter_if(State::Serving, "", still) {
                                assert!(mount.is_of(&who), "seed {seed}");
                            }
                        }
                    }
                    5 => drop(mount.enter_if(State::Dead, "", |state, _| state == State::Orphaned(now))),
                    _ if next(4) == 0 => drop(mount.enter(State::Unpublished, "")),
                    _ => {}
                }
                let after = mount.state();
                assert!(before == after || before.allows(after), "seed {seed}: {before:?} to {after:?}");
            }
        }
    }

    #[test]
    fn removed_ids_are_remembered_and_not_without_limit() {
        let table = Table::default();
        let insert = |id: u64| {
            let mut mount = mount();
            mount.id = MountId(id);
            table.insert(mount);
            table.remove(MountId(id))
        };
        assert!(insert(1).is_some() && table.was_removed(MountId(1)) && table.get(MountId(1)).is_none());
        assert!(table.remove(MountId(1)).is_none() && !table.was_removed(MountId(2)));
        let mut rows = table.lock();
        rows.removed.extend((10..10 + REMOVED_KEPT as u64).map(MountId));
        drop(rows);
        assert!(insert(5).is_some() && !table.was_removed(MountId(1)));
        assert_eq!(table.lock().removed.len(), REMOVED_KEPT);
    }
}
