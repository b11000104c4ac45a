//! One look at the mount table: which of our mounts are dead, and can they be made anew now?
//!
//! | At its target | Which process has it | |
//! |---|---|---|
//! | the dead mount | – | made anew in its place |
//! | its guard alone: another process has unmounted it | a container, a subPath | made anew on the guard |
//! | its guard alone | no process | forgotten: kubelet publishes before it starts a container |
//! | nothing of ours | – | forgotten when no process has it: the pod is being taken away |

use super::candidates::{Candidate, candidates, is_fuse, is_guard};
use super::mount::Remounter;
use super::schedule::{Renewals, is_last};
use crate::broker::Order;
use crate::broker::lifecycle::Lifecycle;
use crate::broker::mounts_table::{Mount, State};
use crate::broker::sight::ALIVE_LIMIT;
use crate::broker::targets::Targets;
use crate::busy::{Busy, target_key};
use crate::config::NodeConfig;
use crate::events::{Reason, text};
use link::Subjects;
use link::broker::{AgentAnswer, AgentRequest};
use mounts::{MountEntry, Target, probe, stack_at};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Calls of kubelet that work on the same target; then the next try finds it.
const TURN_LIMIT: Duration = Duration::from_secs(1);
const HOLDING_LIMIT: Duration = Duration::from_secs(1);
/// Tries for which an agent that has mounts to show us is waited for.
const SHOWING_TRIES: usize = 2;

/// What there is to do at one target.
#[derive(Clone, Debug)]
enum Task {
    Renew(Candidate),
    /// A dead mount that another process has taken from its target.
    Settle(Arc<Mount>),
    /// Containers that started while a mount was made anew may have the dead one.
    Replace(Arc<Mount>),
}

/// Looks for dead mounts, and has them made anew.
#[derive(Debug)]
pub(in crate::broker) struct Renewer {
    pub(in crate::broker) lifecycle: Arc<Lifecycle>,
    pub(in crate::broker) remounter: Arc<Remounter>,
    pub(in crate::broker) renewals: Arc<Renewals>,
    pub(in crate::broker) targets: Arc<Targets>,
    pub(in crate::broker) busy: Arc<Busy>,
    pub(in crate::broker) config: Arc<NodeConfig>,
}

impl Renewer {
    /// Begins what there is to do, and waits for none of it. False: nothing could be seen.
    pub(in crate::broker) fn look_for_dead(self: &Arc<Self>) -> bool {
        // The next one wakes us.
        if self.lifecycle.agents.slots.current().is_none() || self.lifecycle.stopped() {
            return true;
        }
        if self.lifecycle.agents.is_switching() {
            return false; // neither of two agents could be given a mount
        }
        let table = match self.lifecycle.kernel.table() {
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
            let (renewer, task) = (self.clone(), tasks.get(&path).cloned());
            let at = path.clone();
            let work = move || {
                let done = task.is_none_or(|task| renewer.perform(&task, tries));
                renewer.renewals.finish(&at, done);
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
        for mount in self.lifecycle.table.all() {
            let path = mount.target.path().to_owned();
            match mount.state() {
                State::Dead if !is_fuse(stack_at(table, &path).last().copied()) => {
                    add(&path, Task::Settle(mount))
                }
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
        self.lifecycle.table.at(&candidate.path).filter(|mount| mount.connection == candidate.connection)
    }

    /// Does the agent serve mounts that it has not shown us yet?
    fn is_showing(&self) -> bool {
        let Some(agent) = self.lifecycle.agents.slots.current() else { return false };
        match agent.ask(AgentRequest::Holding, &[], HOLDING_LIMIT) {
            Ok((AgentAnswer::Holding { mounts }, _)) => {
                mounts.iter().any(|id| self.lifecycle.table.get(*id).is_none())
            }
            _ => false,
        }
    }

    /// False: it must be looked at again.
    fn settle(&self, candidate: &Candidate, tries: usize) -> bool {
        let Ok(target) = Target::resolve(&self.config.kubelet_dirs, &candidate.path) else { return true };
        let Ok(_turn) = self.busy.enter(&[target_key(&candidate.path)], TURN_LIMIT) else { return false };
        // It may have been unpublished or made anew before our turn came.
        match self.lifecycle.kernel.table() {
            Ok(table) if candidates(&table, &self.config.kubelet_dirs).contains(candidate) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
        let order = match self.known(candidate) {
            Some(mount) if mount.state() == State::Dead => mount.order(),
            Some(_) => return true,
            None if tries < SHOWING_TRIES && self.is_showing() => return false,
            None => match self.lifecycle.kernel.probe(&target, probe::What::Alive, ALIVE_LIMIT) {
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
        let subjects = order.spec.subjects.clone();
        match self.remounter.renew(order, target) {
            Ok(()) => true,
            Err(failure) => {
                self.cannot(candidate, &subjects, &failure.to_string());
                false
            }
        }
    }

    /// A pod that is being deleted may be unmounted by any process, and must not get it again. Its containers are gone
    /// before its volumes, so what a container still has is wanted. False: it must be looked at again.
    fn settle_unmounted(&self, mount: &Mount) -> bool {
        let (path, volume) = (mount.target.path(), mount.volume());
        let Ok(_turn) = self.busy.enter(&[target_key(path)], TURN_LIMIT) else { return false };
        // It may have been unpublished or made anew before our turn came.
        let newest = self.lifecycle.table.at(path).is_some_and(|newest| newest.id == mount.id);
        let (kernel, in_use) = (&self.lifecycle.kernel, self.lifecycle.in_use(&[mount]));
        let (Ok(stack), Ok(in_use)) = (kernel.stack(&mount.target), in_use) else { return false };
        if !newest || mount.state() != State::Dead || is_fuse(stack.last()) {
            return true;
        }
        if !in_use.contains(&true) {
            tracing::warn!(mount = %mount.id, %volume, target_path = %path.display(), "another process has unmounted it, and no container has it any more: forgotten");
            self.lifecycle.retire(mount, "another process has unmounted it");
            self.lifecycle.table.remove(mount.id);
            self.targets.remove(path);
            self.renewals.all_told(path);
            return true;
        }
        let why = match is_guard(stack.last(), volume.as_str()) {
            false => "another process has taken everything from its target, as for a pod that is deleted"
                .to_owned(),
            true => match Target::resolve(&self.config.kubelet_dirs, path) {
                Ok(target) => match self.remounter.renew(mount.order(), target) {
                    Ok(()) => return true,
                    Err(failure) => failure.to_string(),
                },
                Err(error) => error.to_string(),
            },
        };
        let source = mount.source.clone();
        let candidate = Candidate { path: path.to_owned(), connection: mount.connection, source };
        self.cannot(&candidate, &mount.spec.subjects, &why);
        false
    }

    /// It was itself made in the place of one that is still known, and has ended before it served.
    fn remembered(&self, candidate: &Candidate) -> Option<Order> {
        let before = self.lifecycle.table.at(&candidate.path).filter(|mount| mount.state() == State::Dead)?;
        (before.volume().as_str() == candidate.source.volume).then(|| before.order())
    }

    /// What it was made from, if that needs no secret.
    fn recorded(&self, candidate: &Candidate) -> Option<Order> {
        let recipe = self.targets.recipe(&candidate.path);
        let Some(recipe) = recipe.filter(|r| r.spec.volume.id.as_str() == candidate.source.volume) else {
            self.cannot(candidate, &Subjects::default(), "what it was made from is not on record");
            return None;
        };
        let subjects = recipe.spec.subjects.clone();
        let order = recipe.order(candidate.source.options());
        if order.is_none() {
            self.cannot(candidate, &subjects, "no process of this node knows its secret any more");
        }
        order
    }

    fn cannot(&self, candidate: &Candidate, subjects: &Subjects, why: &str) {
        // An unpublish has ended it: no pod misses it.
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
            Some(mount) => self.lifecycle.notices.tell(&mount, Reason::Degraded, &message),
            None => self.lifecycle.notices.events.note(subjects, Reason::Degraded, &message),
        }
    }

    /// Containers that started while the mount was made anew may have the dead one. As long as one has it that cannot
    /// be replaced, it is tried again. False: it must be looked at again.
    pub(in crate::broker) fn find_stragglers(&self, mount: &Mount, tries: usize) -> bool {
        let path = mount.target.path();
        let Ok(_turn) = self.busy.enter(&[target_key(path)], TURN_LIMIT) else { return false };
        // Unpublished meanwhile: nothing is to be seen of it any more.
        if mount.state().is_over() {
            return true;
        }
        if !self.remounter.replace_elsewhere(mount) || !is_last(tries) {
            return false;
        }
        mount.set_replaces(Vec::new());
        self.targets.forget_dead(path, mount.volume());
        true
    }
}
