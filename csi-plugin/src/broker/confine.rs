//! A limit of memory for each worker, so that a worker that takes too much dies alone: groups that the agent may not make.

use super::Broker;
use super::socket::AgentIdentity;
use link::broker::BrokerAnswer;
use link::{Refusal, RefusalKind};
use mounts::{CgroupError, Cgroups};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Workers end with their agent, a moment later.
const SWEEP_LIMIT: Duration = Duration::from_secs(10);
const SWEEP_PAUSE: Duration = Duration::from_millis(50);

impl Broker {
    pub(super) fn confine(
        &self,
        agent: &AgentIdentity,
        fds: Vec<OwnedFd>,
        bytes: u64,
    ) -> Result<BrokerAnswer, Refusal> {
        let [worker] = <[OwnedFd; 1]>::try_from(fds)
            .map_err(|_| Refusal::new(RefusalKind::Invalid, "Confine takes one process descriptor"))?;
        let pid = agent.pid.unsigned_abs();
        let _whole = self.groups.lock();
        let group = Cgroups::find().and_then(|groups| groups.confine(pid, worker.as_fd(), bytes));
        Ok(BrokerAnswer::Confined { group: group.map_err(refusal)? })
    }

    pub(super) fn release(&self, agent: &AgentIdentity, group: &str) -> Result<BrokerAnswer, Refusal> {
        let released = Cgroups::find().and_then(|groups| groups.release(agent.pid.unsigned_abs(), group));
        Ok(BrokerAnswer::Released { oom_kills: released.map_err(refusal)? })
    }

    /// An agent has come. What workers of earlier ones have left is removed.
    pub(super) fn note_groups_of(&self, agent: &AgentIdentity) {
        let Ok(base) = Cgroups::find().and_then(|groups| groups.base(agent.pid.unsigned_abs())) else {
            return;
        };
        let mut groups = self.groups.lock();
        for group in Cgroups::workers_below(&base) {
            let _ = std::fs::remove_dir(group); // somebody lives in it
        }
        groups.insert(agent.clone(), base);
    }

    /// Its workers end with it, a moment later. Does not wait for them.
    pub(super) fn sweep_groups_of(&self, agent: &AgentIdentity) {
        let left = {
            let mut groups = self.groups.lock();
            let Some(base) = groups.remove(agent) else { return };
            Cgroups::workers_below(&base)
        };
        let sweeper = std::thread::Builder::new().name("sweep".into()).spawn(move || sweep(left));
        if let Err(error) = sweeper {
            tracing::warn!(%error, "no thread to remove the groups of the agent's workers: the next agent's coming does");
        }
    }
}

/// Where the groups of each agent's workers are. Locked while one is made and while those that exist are listed: two
/// agents may have theirs in the same place, and a group that nobody lives in yet looks like one that was left.
#[derive(Debug, Default)]
pub(super) struct Groups(Mutex<HashMap<AgentIdentity, PathBuf>>);

impl Groups {
    fn lock(&self) -> MutexGuard<'_, HashMap<AgentIdentity, PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Those that there were: a successor's workers may have theirs in the same place.
fn sweep(mut left: Vec<PathBuf>) {
    let end = Instant::now() + SWEEP_LIMIT;
    while !left.is_empty() && Instant::now() < end {
        left.retain(|group| std::fs::remove_dir(group).is_err_and(|e| e.kind() != ErrorKind::NotFound));
        std::thread::sleep(SWEEP_PAUSE);
    }
    if !left.is_empty() {
        tracing::debug!(?left, "groups that somebody lives in stay");
    }
}

fn refusal(error: CgroupError) -> Refusal {
    let kind = match error {
        CgroupError::NotAChild(_) | CgroupError::NotAGroup(_) => RefusalKind::Denied,
        // Not worth another try as long as the machine is as it is.
        CgroupError::NoController | CgroupError::OutOfSight { .. } | CgroupError::Shared(_) => {
            RefusalKind::NotFound
        }
        CgroupError::Io { .. } => RefusalKind::Internal,
    };
    Refusal::new(kind, error.to_string())
}
