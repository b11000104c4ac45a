//! One look at the mount table: which of our mounts are dead, and can they be made anew now?
//!
//! | At its target | Somebody has it | |
//! |---|---|---|
//! | the dead mount | – | made anew in its place |
//! | its guard alone: somebody has unmounted it | a container, a subPath | made anew on the guard |
//! | its guard alone | nobody | forgotten: whoever starts a container publishes first |
//! | nothing of ours | – | forgotten when nobody has it: somebody takes the pod away |

use super::is_last;
use crate::broker::mounts_table::{Mount, State};
use crate::broker::{ALIVE_LIMIT, Broker, Order};
use crate::busy::target_key;
use crate::events::{Reason, Subjects, text};
use link::broker::{AgentAnswer, AgentRequest};
use mounts::{Connection, MountEntry, MountSource, Ours, Target, probe, stack_at};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Calls of kubelet that work on the same target; then the next try finds it.
const TURN_LIMIT: Duration = Duration::from_secs(1);
const HOLDING_LIMIT: Duration = Duration::from_secs(1);
/// Tries for which an agent that has mounts to show us is waited for.
const SHOWING_TRIES: usize = 2;

/// A FUSE mount of ours that nobody is known to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::broker) struct Candidate {
    path: PathBuf,
    pub(in crate::broker) connection: Connection,
    source: MountSource,
}

/// What there is to do at one target.
#[derive(Clone, Debug)]
enum Task {
    Renew(Candidate),
    /// A dead mount that somebody has taken from its target.
    Settle(Arc<Mount>),
    /// Containers that started while a mount was made anew may have the dead one.
    Replace(Arc<Mount>),
}

impl Broker {
    /// Begins what there is to do, and waits for none of it. False: nothing could be seen.
    pub(super) fn look_for_dead(self: &Arc<Self>) -> bool {
        // The next one wakes us.
        if self.agents.current().is_none() || self.stopped() {
            return true;
        }
        if self.switching.load(Ordering::SeqCst) {
            return false; // neither of two agents could be given a mount
        }
        let table = match self.kernel.table() {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!(%error, "dead mounts are not looked for");
                return false;
            }
        };
        let tasks = self.tasks(&table);
        let mut targets: Vec<PathBuf> = tasks.keys().cloned().collect();
        self.renewals.order(&mut targets);
        for (path, tries) in self.renewals.begin(&targets) {
            let (broker, task) = (self.clone(), tasks.get(&path).cloned());
            let at = path.clone();
            let work = move || {
                let done = task.is_none_or(|task| broker.perform(&task, tries));
                broker.renewals.finish(&at, done);
            };
            if let Err(error) = std::thread::Builder::new().name("renewal".into()).spawn(work) {
                tracing::warn!(%error, target_path = %path.display(), "no thread to make a mount anew: tried again");
                self.renewals.finish(&path, false);
            }
        }
        true
    }

    fn tasks(&self, table: &[MountEntry]) -> BTreeMap<PathBuf, Task> {
        let mut tasks = BTreeMap::new();
        let mut add = |path: &Path, task| {
            tasks.entry(path.to_owned()).or_insert(task);
        };
        for candidate in candidates(table, &self.config.kubelet_dirs) {
            if self.known(&candidate).is_none_or(|mount| mount.state() == State::Dead) {
                add(&candidate.path.clone(), Task::Renew(candidate));
            }
        }
        for mount in self.table.all() {
            let path = mount.target.path().to_owned();
            match mount.state() {
                State::Dead if !is_fuse(table, &path) => add(&path, Task::Settle(mount)),
                state if !state.is_over() && !mount.replaces().is_empty() => add(&path, Task::Replace(mount)),
                _ => {}
            }
        }
        tasks
    }

    /// False: it must be tried again.
    fn perform(&self, task: &Task, tries: usize) -> bool {
        match task {
            Task::Renew(candidate) => self.settle(candidate, tries),
            Task::Settle(mount) => self.settle_unmounted(mount),
            Task::Replace(mount) => self.find_stragglers(mount, tries),
        }
    }

    fn known(&self, candidate: &Candidate) -> Option<Arc<Mount>> {
        self.table.at(&candidate.path).filter(|mount| mount.connection == candidate.connection)
    }

    /// Does the agent serve mounts that it has not shown us yet?
    fn is_showing(&self) -> bool {
        let Some(agent) = self.agents.current() else { return false };
        match agent.ask(AgentRequest::Holding, &[], HOLDING_LIMIT) {
            Ok((AgentAnswer::Holding { mounts }, _)) => mounts.iter().any(|id| self.table.get(*id).is_none()),
            _ => false,
        }
    }

    /// False: it must be looked at again.
    fn settle(&self, candidate: &Candidate, tries: usize) -> bool {
        let Ok(target) = Target::resolve(&self.config.kubelet_dirs, &candidate.path) else { return true };
        let Ok(_turn) = self.busy.enter(&[target_key(&candidate.path)], TURN_LIMIT) else { return false };
        // It may have been unpublished or made anew before our turn came.
        match self.kernel.table() {
            Ok(table) if candidates(&table, &self.config.kubelet_dirs).contains(candidate) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
        let order = match self.known(candidate) {
            Some(mount) if mount.state() == State::Dead => mount.order(),
            Some(_) => return true,
            None if tries < SHOWING_TRIES && self.is_showing() => return false,
            None => match self.kernel.probe(&target, probe::What::Alive, ALIVE_LIMIT) {
                Ok(probe::Outcome::Dead) => {
                    match self.remembered(candidate).or_else(|| self.recorded(candidate)) {
                        Some(order) => order,
                        // The next republish makes it.
                        None => return true,
                    }
                }
                // Its agent has not shown it yet, or its last holder has not gone yet.
                _ => return false,
            },
        };
        let subjects = order.subjects.clone();
        match self.renew(order, target) {
            Ok(()) => true,
            Err(failure) => {
                self.cannot(candidate, &subjects, &failure.to_string());
                false
            }
        }
    }

    /// A pod that is being deleted may be unmounted by anybody, and must not get it again. Its containers are gone before
    /// its volumes, so what a container still has is wanted. False: it must be looked at again.
    fn settle_unmounted(&self, mount: &Mount) -> bool {
        let (path, volume) = (mount.target.path(), &mount.spec.id);
        let Ok(_turn) = self.busy.enter(&[target_key(path)], TURN_LIMIT) else { return false };
        // It may have been unpublished or made anew before our turn came.
        let newest = self.table.at(path).is_some_and(|newest| newest.id == mount.id);
        let (Ok(table), Ok(in_use)) = (self.kernel.table(), self.in_use(&[mount])) else { return false };
        if !newest || mount.state() != State::Dead || is_fuse(&table, path) {
            return true;
        }
        if !in_use.contains(&true) {
            tracing::warn!(mount = %mount.id, %volume, target_path = %path.display(), "somebody has unmounted it, and nobody has it any more: forgotten");
            self.retire(mount, "somebody has unmounted it");
            self.table.remove(mount.id);
            self.forget_target(&mount.target);
            return true;
        }
        let why = match is_guard(&table, path, volume.as_str()) {
            false => "somebody has taken everything from its target, as for a pod that is deleted".to_owned(),
            true => match Target::resolve(&self.config.kubelet_dirs, path) {
                Ok(target) => match self.renew(mount.order(), target) {
                    Ok(()) => return true,
                    Err(failure) => failure.to_string(),
                },
                Err(error) => error.to_string(),
            },
        };
        let source = mount.source.clone();
        let candidate = Candidate { path: path.to_owned(), connection: mount.connection, source };
        self.cannot(&candidate, &mount.subjects, &why);
        false
    }

    /// It was itself made in the place of one that is still known, and has ended before it served.
    fn remembered(&self, candidate: &Candidate) -> Option<Order> {
        let before = self.table.at(&candidate.path).filter(|mount| mount.state() == State::Dead)?;
        (before.spec.id.as_str() == candidate.source.volume).then(|| before.order())
    }

    /// What it was made from, if that needs no secret.
    fn recorded(&self, candidate: &Candidate) -> Option<Order> {
        let recipe = self.targets.recipe(&candidate.path);
        let Some(recipe) = recipe.filter(|r| r.spec.id.as_str() == candidate.source.volume) else {
            self.cannot(candidate, &Subjects::default(), "what it was made from is not on record");
            return None;
        };
        let subjects = recipe.subjects();
        let order = recipe.order(candidate.source.options());
        if order.is_none() {
            self.cannot(candidate, &subjects, "its secret is known to nobody on this node any more");
        }
        order
    }

    fn cannot(&self, candidate: &Candidate, subjects: &Subjects, why: &str) {
        // Whoever unpublishes has ended it, and nobody misses it.
        if self.renewals.wanted.is_leaving(&candidate.path) || !self.renewals.tell(&candidate.path, why) {
            return;
        }
        let volume = &candidate.source.volume;
        tracing::warn!(
            volume, target_path = %candidate.path.display(), why,
            "a dead mount is not made anew yet: the next republish, or another attempt, does it"
        );
        let message = text::not_renewed(volume, why);
        match self.known(candidate) {
            Some(mount) => self.tell(&mount, Reason::Degraded, &message),
            None => self.events.note(subjects, Reason::Degraded, &message),
        }
    }

    /// Containers that started while the mount was made anew may have the dead one. As long as one has it that cannot be
    /// replaced, it is tried again. False: it must be looked at again.
    fn find_stragglers(&self, mount: &Mount, tries: usize) -> bool {
        let path = mount.target.path();
        let Ok(_turn) = self.busy.enter(&[target_key(path)], TURN_LIMIT) else { return false };
        // Unpublished meanwhile: nothing is to be seen of it any more.
        if mount.state().is_over() {
            return true;
        }
        if !self.replace_elsewhere(mount) || !is_last(tries) {
            return false;
        }
        mount.set_replaces(Vec::new());
        self.targets.forget_dead(path, &mount.spec.id);
        true
    }
}

fn is_fuse(table: &[MountEntry], path: &Path) -> bool {
    stack_at(table, path).last().is_some_and(|top| matches!(top.ours(), Some(Ours::Fuse(_))))
}

pub(super) fn is_guard(table: &[MountEntry], path: &Path, volume: &str) -> bool {
    let guard = Some(Ours::Guard { volume: volume.to_owned() });
    stack_at(table, path).last().is_some_and(|top| top.ours() == guard)
}

/// The topmost mounts of ours at targets. A target has a guard; a bind of a part of it, for a subPath, has none.
pub(in crate::broker) fn candidates(table: &[MountEntry], kubelet_dirs: &[PathBuf]) -> Vec<Candidate> {
    let below = |path: &Path| kubelet_dirs.iter().any(|dir| path.starts_with(dir));
    let guards =
        table.iter().filter(|e| matches!(e.ours(), Some(Ours::Guard { .. })) && below(&e.mount_point));
    let paths: BTreeSet<&PathBuf> = guards.map(|e| &e.mount_point).collect();
    let top = |path: &PathBuf| {
        let stack = stack_at(table, path);
        let top = stack.last()?;
        match top.ours()? {
            Ours::Fuse(source) => {
                Some(Candidate { path: path.clone(), connection: top.connection(), source })
            }
            Ours::Guard { .. } => None,
        }
    };
    paths.into_iter().filter_map(top).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mounts::parse_mountinfo;

    #[test]
    fn only_living_places_of_ours_are_looked_at() {
        let table = parse_mountinfo(
            b"10 1 0:1 / /kubelet/a rw - tmpfs millpond-guard:v ro\n\
              11 10 0:2 / /kubelet/a ro - fuse.millpond millpond:v:d ro\n\
              12 1 0:2 /sub /kubelet/a-subpath ro - fuse.millpond millpond:v:d ro\n\
              13 1 0:3 / /kubelet/vanished rw - tmpfs millpond-guard:w ro\n\
              14 1 0:4 / /elsewhere/a rw - tmpfs millpond-guard:v ro\n\
              15 14 0:5 / /elsewhere/a ro - fuse.millpond millpond:v:d ro\n\
              16 1 0:6 / /kubelet/b rw - tmpfs millpond-guard:x ro\n\
              17 16 0:7 / /kubelet/b ro - fuse.millpond millpond:x:d ro\n\
              18 17 0:8 / /kubelet/b ro - fuse.s3fs s3fs ro\n",
        );
        let found = candidates(&table, &["/kubelet".into()]);
        let source = MountSource { volume: "v".into(), digest: "d".into() };
        let a =
            Candidate { path: "/kubelet/a".into(), connection: Connection { major: 0, minor: 2 }, source };
        assert_eq!(found, [a]);
    }
}
