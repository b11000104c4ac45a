//! The node's mount table in memory: what is mounted, for whom, and what must be given back.
//!
//! ```text
//!             Publish, INIT, Start                    its agent is gone
//!  Preparing ──────────────────────► Serving ────────────────────────────► Orphaned
//!      │                             ▲  │  ◄── an agent is back, or adopts it ──  │ healTimeout
//!      │ failed      Hold, by an agent │ abort asked, probe without answer      ▼
//!      └────────► (removed)             └──────────────────────────────────►   Dead ──► (removed by unpublish,
//!                                                                                 or replaced: see `renew`)
//! ```

use link::broker::{MountId, Resume};
use mounts::{Connection, MountSource, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use volume::{Credentials, VolumeSpec};

use super::Order;
use super::socket::AgentIdentity;
use crate::events::Subjects;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Preparing,
    Serving,
    /// Nobody serves it since then.
    Orphaned(Instant),
    /// Its connection was aborted.
    Dead,
}

/// Everything the broker holds of one mount, for the agent's successor.
#[derive(Debug)]
pub struct Mount {
    pub id: MountId,
    pub target: Arc<Target>,
    pub connection: Connection,
    pub source: MountSource,
    pub spec: VolumeSpec,
    /// Whom its Events are for.
    pub subjects: Subjects,
    /// May the agent use credentials of its own?
    pub environment: bool,
    /// Taken by the abort: once every holder has let go, the kernel forgets the connection.
    pub device: Mutex<Option<Arc<OwnedFd>>>,
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
    pub spec: VolumeSpec,
    pub credentials: Credentials,
    pub subjects: Subjects,
    pub environment: bool,
    pub agent: AgentIdentity,
    pub device: OwnedFd,
}

impl Mount {
    pub fn new(parts: Parts) -> Self {
        let Parts { id, target, connection, source, spec, credentials, subjects, environment, agent, device } =
            parts;
        let changing = Changing {
            state: State::Preparing,
            agent,
            credentials,
            prepared: None,
            backing: BTreeSet::new(),
            replaces: Vec::new(),
        };
        Self {
            id,
            target,
            connection,
            source,
            spec,
            subjects,
            environment,
            device: Mutex::new(Some(Arc::new(device))),
            changing: Mutex::new(changing),
        }
    }

    fn changing(&self) -> MutexGuard<'_, Changing> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn state(&self) -> State {
        self.changing().state
    }

    pub fn replaces(&self) -> Vec<Connection> {
        self.changing().replaces.clone()
    }

    pub fn set_replaces(&self, dead: Vec<Connection>) {
        self.changing().replaces = dead;
    }

    /// What would make it anew.
    pub fn order(&self) -> Order {
        Order {
            spec: self.spec.clone(),
            credentials: self.credentials(),
            environment: self.environment,
            options: self.source.options(),
            subjects: self.subjects.clone(),
        }
    }

    pub fn heal_timeout(&self) -> Duration {
        self.spec.parameters.heal_timeout
    }

    pub fn credentials(&self) -> Credentials {
        self.changing().credentials.clone()
    }

    pub fn rotated(&self, credentials: Credentials) {
        self.changing().credentials = credentials;
    }

    /// Logs each transition once, and returns whether there was one. A dead mount stays dead.
    pub fn enter(&self, to: State, why: &str) -> bool {
        let mut changing = self.changing();
        let from = changing.state;
        if from == to || from == State::Dead {
            return false;
        }
        changing.state = to;
        drop(changing);
        let (mount, volume, target_path) = (self.id, &self.spec.id, self.target.path().display());
        match to {
            State::Dead => {
                tracing::error!(%mount, %volume, %target_path, ?from, ?to, why, "mount ended: readers get ENOTCONN");
            }
            State::Preparing | State::Serving | State::Orphaned(_) => {
                tracing::info!(%mount, %volume, %target_path, ?from, ?to, why, "mount");
            }
        }
        true
    }

    pub fn agent(&self) -> AgentIdentity {
        self.changing().agent.clone()
    }

    pub fn is_of(&self, agent: &AgentIdentity) -> bool {
        self.changing().agent == *agent
    }

    /// From now on this agent may speak of it.
    pub fn give_to(&self, agent: &AgentIdentity) {
        self.changing().agent = agent.clone();
    }

    pub fn keep_prepared(&self, flight: OwnedFd, resume: Resume) {
        self.changing().prepared = Some((Arc::new(flight), resume));
    }

    pub fn prepared(&self) -> Option<(Arc<OwnedFd>, Resume)> {
        self.changing().prepared.clone()
    }

    pub fn device(&self) -> Option<Arc<OwnedFd>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets go of device and shared memory; the ids that were open come back.
    pub fn release(&self) -> (Option<Arc<OwnedFd>>, BTreeSet<u32>) {
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut changing = self.changing();
        changing.prepared = None;
        (device, std::mem::take(&mut changing.backing))
    }

    pub fn backing(&self) -> Vec<u32> {
        self.changing().backing.iter().copied().collect()
    }

    pub fn record_backing(&self, id: u32) {
        self.changing().backing.insert(id);
    }

    /// True if the id was ours to close.
    pub fn forget_backing(&self, id: u32) -> bool {
        self.changing().backing.remove(&id)
    }
}

/// All mounts of this broker's life. Lock order: the table's lock before a mount's, and neither across a system call.
#[derive(Debug, Default)]
pub struct Table {
    mounts: Mutex<BTreeMap<MountId, Arc<Mount>>>,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<MountId, Arc<Mount>>> {
        self.mounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn insert(&self, mount: Mount) -> Arc<Mount> {
        let mount = Arc::new(mount);
        self.lock().insert(mount.id, mount.clone());
        mount
    }

    pub fn get(&self, id: MountId) -> Option<Arc<Mount>> {
        self.lock().get(&id).cloned()
    }

    pub fn remove(&self, id: MountId) -> Option<Arc<Mount>> {
        self.lock().remove(&id)
    }

    /// The newest: a dead one stays until the one in its place serves.
    pub fn at(&self, path: &Path) -> Option<Arc<Mount>> {
        self.lock().values().rev().find(|m| m.target.path() == path).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Mount>> {
        self.lock().values().cloned().collect()
    }
}
