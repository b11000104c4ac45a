//! The node's mount table in memory: what is mounted, for whom, and what must be given back.
//!
//! ```text
//!             Publish, INIT, Start                    its agent is gone
//!  Preparing ──────────────────────► Serving ────────────────────────────► Orphaned
//!      │                                │  ◄───── the same agent is back ─────   │ healTimeout
//!      │ failed                         │ abort asked, probe without answer      ▼
//!      └────────► (removed)             └──────────────────────────────────►   Dead ──► (removed by unpublish
//!                                                                                        or replaced by publish)
//! ```

use link::broker::MountId;
use mounts::{Connection, MountSource, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use volume::{Credentials, VolumeSpec};

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

/// Everything the broker holds of one mount. Later heal levels hand device, flight, spec and credentials to a
/// successor; this one only keeps them.
#[derive(Debug)]
pub struct Mount {
    pub id: MountId,
    pub target: Arc<Target>,
    pub connection: Connection,
    pub source: MountSource,
    pub spec: VolumeSpec,
    /// Whom its Events are for.
    pub subjects: Subjects,
    pub agent: AgentIdentity,
    /// Taken by the abort: once every holder has let go, the kernel forgets the connection.
    pub device: Mutex<Option<Arc<OwnedFd>>>,
    changing: Mutex<Changing>,
}

#[derive(Debug)]
struct Changing {
    state: State,
    /// In memory only.
    credentials: Credentials,
    /// Shared memory of the connection, for a successor of the agent.
    flight: Option<OwnedFd>,
    small: bool,
    /// Passthrough ids that the kernel holds for us.
    backing: BTreeSet<u32>,
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
    pub agent: AgentIdentity,
    pub device: OwnedFd,
}

impl Mount {
    pub fn new(parts: Parts) -> Self {
        let Parts { id, target, connection, source, spec, credentials, subjects, agent, device } = parts;
        let changing = Changing {
            state: State::Preparing,
            credentials,
            flight: None,
            small: false,
            backing: BTreeSet::new(),
        };
        Self {
            id,
            target,
            connection,
            source,
            spec,
            subjects,
            agent,
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

    pub fn keep_prepared(&self, flight: OwnedFd, small: bool) {
        let mut changing = self.changing();
        changing.flight = Some(flight);
        changing.small = small;
    }

    pub fn small(&self) -> bool {
        self.changing().small
    }

    pub fn device(&self) -> Option<Arc<OwnedFd>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets go of device and shared memory; the ids that were open come back.
    pub fn release(&self) -> (Option<Arc<OwnedFd>>, BTreeSet<u32>) {
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut changing = self.changing();
        changing.flight = None;
        (device, std::mem::take(&mut changing.backing))
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

    pub fn at(&self, path: &Path) -> Option<Arc<Mount>> {
        self.lock().values().find(|m| m.target.path() == path).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Mount>> {
        self.lock().values().cloned().collect()
    }
}
