//! A limit of memory for each worker, so that a worker that takes too much dies alone: groups that the agent may not
//! make.

use super::socket::AgentIdentity;
use cgroups::{CgroupError, Cgroups, Released};
use link::broker::BrokerAnswer;
use link::{Refusal, RefusalKind};
use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The groups of the agents' workers. Locked while one is made and while those that exist are looked at: two agents may
/// have theirs in the same place, and a group without a process yet looks like one that was left.
#[derive(Debug, Default)]
pub(super) struct Groups {
    groups: Mutex<Inner>,
    /// Looked for in the mount table, which is long where there are many volumes: once.
    controller: OnceLock<Cgroups>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Where each agent's are.
    bases: HashMap<AgentIdentity, PathBuf>,
    /// Could not be removed yet: the disk that a killed worker waits for keeps its process.
    left: BTreeSet<PathBuf>,
    /// No process lived in them at the last sweep: just made, about to be released, or forgotten by their agent.
    empty: BTreeSet<PathBuf>,
}

impl Groups {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn controller(&self) -> Result<&Cgroups, CgroupError> {
        match self.controller.get() {
            Some(found) => Ok(found),
            None => Cgroups::find().map(|found| self.controller.get_or_init(|| found)),
        }
    }

    pub(super) fn confine(
        &self,
        agent: &AgentIdentity,
        fds: Vec<OwnedFd>,
        bytes: u64,
    ) -> Result<BrokerAnswer, Refusal> {
        let [worker] = <[OwnedFd; 1]>::try_from(fds)
            .map_err(|_| Refusal::new(RefusalKind::Invalid, "Confine takes one process descriptor"))?;
        let pid = agent.pid.unsigned_abs();
        let _whole = self.lock();
        let group = self.controller().and_then(|groups| groups.confine(pid, worker.as_fd(), bytes));
        Ok(BrokerAnswer::Confined { group: group.map_err(refusal)? })
    }

    pub(super) fn release(&self, agent: &AgentIdentity, group: &str) -> Result<BrokerAnswer, Refusal> {
        let released = self.controller().and_then(|groups| groups.release(agent.pid.unsigned_abs(), group));
        let Released { oom_kills, left } = released.map_err(refusal)?;
        self.lock().left.extend(left);
        Ok(BrokerAnswer::Released { oom_kills })
    }

    /// An agent has come. What workers of earlier ones have left is removed, now or once its processes have ended.
    pub(super) fn note_all_of(&self, agent: &AgentIdentity) {
        let Ok(base) = self.controller().and_then(|groups| groups.base(agent.pid.unsigned_abs())) else {
            return;
        };
        let mut groups = self.lock();
        groups.left.extend(Cgroups::workers_below(&base));
        groups.sweep();
        groups.bases.insert(agent.clone(), base);
    }

    /// An agent is gone. Its workers end with it, a moment later.
    pub(super) fn leave_all_of(&self, agent: &AgentIdentity) {
        let mut groups = self.lock();
        if let Some(base) = groups.bases.remove(agent) {
            groups.left.extend(Cgroups::workers_below(&base));
        }
    }

    /// Removes groups that no process lives in any more: called periodically.
    pub(super) fn sweep(&self) {
        self.lock().sweep();
    }
}

impl Inner {
    /// An agent that waits no longer for its answer never learns that its worker has a group, and one whose broker starts
    /// anew gives none back. So a group that is empty at two looks is removed; by then a living agent has asked for the
    /// deaths that are counted in it.
    fn sweep(&mut self) {
        let all = self.bases.values().flat_map(|base| Cgroups::workers_below(base));
        let empty: BTreeSet<_> = all.filter(|group| cgroups::is_empty(group)).collect();
        self.left.extend(empty.intersection(&self.empty).cloned());
        self.empty = empty;
        self.left.retain(|group| cgroups::remove(group).is_err());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_somebody_lives_in_is_removed_once_nobody_does() -> std::io::Result<()> {
        // An ordinary directory, which is not removed either while there is something in it.
        let base = tempfile::tempdir()?;
        let [dead, stuck] = ["dead", "stuck"].map(|name| base.path().join(name));
        std::fs::create_dir(&dead)?;
        std::fs::create_dir_all(stuck.join("process"))?;
        let mut groups = Inner {
            left: [dead.clone(), stuck.clone(), base.path().join("gone")].into(),
            ..Inner::default()
        };
        groups.sweep();
        assert_eq!(groups.left, [stuck.clone()].into());
        assert!(!dead.exists());
        std::fs::remove_dir(stuck.join("process"))?;
        groups.sweep();
        assert!(groups.left.is_empty() && !stuck.exists());
        Ok(())
    }

    #[test]
    fn a_group_that_its_agent_never_learnt_of_is_removed_once_it_is_empty_twice() -> std::io::Result<()> {
        let base = tempfile::tempdir()?;
        let group = base.path().join("millpond-worker-7");
        std::fs::create_dir(&group)?;
        std::fs::write(group.join("cgroup.procs"), "7\n")?;
        let agent = AgentIdentity { pid: 1, started: None, life: 0 };
        let mut groups = Inner { bases: [(agent, base.path().to_owned())].into(), ..Inner::default() };
        groups.sweep();
        groups.sweep();
        assert!(groups.empty.is_empty() && groups.left.is_empty(), "its worker lives");
        std::fs::remove_file(group.join("cgroup.procs"))?;
        groups.sweep();
        assert!(group.exists(), "its agent may be about to ask what is counted in it");
        groups.sweep();
        assert!(!group.exists() && groups.left.is_empty());
        groups.sweep();
        assert!(groups.empty.is_empty());
        Ok(())
    }
}
