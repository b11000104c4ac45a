//! One look at the mount table: which of our mounts are dead, and can they be made anew now?
//!
//! | At its target | Somebody has it | |
//! |---|---|---|
//! | the dead mount | – | made anew in its place |
//! | its guard alone: somebody has unmounted it | a container, a subPath | made anew on the guard |
//! | its guard alone | nobody | forgotten: whoever starts a container publishes first |
//! | nothing of ours | – | forgotten when nobody has it: somebody takes the pod away |

use super::is_last;
use crate::broker::handover::for_each;
use crate::broker::mounts_table::{Mount, State};
use crate::broker::socket::AgentLink;
use crate::broker::{Broker, Order};
use crate::events::{Reason, Subjects, text};
use link::broker::{AgentAnswer, AgentRequest};
use mounts::{Connection, MountEntry, MountSource, Ours, Target, probe, stack_at};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use volume::VolumeId;

/// A dead mount says so at once; one that does not answer is not dead.
const ALIVE_LIMIT: Duration = Duration::from_secs(1);
/// Calls of kubelet that work on the same volume; then the next look finds it.
const TURN_LIMIT: Duration = Duration::from_secs(1);
const HOLDING_LIMIT: Duration = Duration::from_secs(1);
/// Looks for which an agent that has mounts to show us is waited for.
const SHOWING_LOOKS: usize = 2;
/// Mounts that are made at the same time.
const RENEWERS: usize = 4;

/// A FUSE mount of ours that nobody is known to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::broker) struct Candidate {
    path: PathBuf,
    pub(in crate::broker) connection: Connection,
    source: MountSource,
}

impl Broker {
    /// True if there is something left to do.
    pub(super) fn look_for_dead(&self, look: usize) -> bool {
        // The next one wakes us.
        let Some(agent) = self.agents.current() else { return false };
        if self.switching.load(Ordering::SeqCst) {
            return true; // neither of two agents could be given a mount
        }
        let table = match self.kernel.table() {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!(%error, "dead mounts are not looked for");
                return true;
            }
        };
        let mut candidates = candidates(&table, &self.config.kubelet_dirs);
        candidates.retain(|c| self.known(c).is_none_or(|mount| mount.state() == State::Dead));
        let unmounted = self.unmounted(&table);
        let showing = !candidates.is_empty() && look < SHOWING_LOOKS && self.is_showing(&agent);
        let (next, unfinished) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..RENEWERS.min(candidates.len()) {
                scope.spawn(|| {
                    while let Some(candidate) = candidates.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if !self.settle(candidate, showing) {
                            unfinished.store(true, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        let settled = for_each(&unmounted, |mount| self.settle_unmounted(mount));
        self.find_stragglers(look) | unfinished.into_inner() | settled.contains(&false)
    }

    fn known(&self, candidate: &Candidate) -> Option<Arc<Mount>> {
        self.table.at(&candidate.path).filter(|mount| mount.connection == candidate.connection)
    }

    /// Does this agent serve mounts that it has not shown us yet?
    fn is_showing(&self, agent: &AgentLink) -> bool {
        match agent.ask(AgentRequest::Holding, &[], HOLDING_LIMIT) {
            Ok((AgentAnswer::Holding { mounts }, _)) => mounts.iter().any(|id| self.table.get(*id).is_none()),
            _ => false,
        }
    }

    /// False: it must be looked at again.
    fn settle(&self, candidate: &Candidate, showing: bool) -> bool {
        let Ok(target) = Target::resolve(&self.config.kubelet_dirs, &candidate.path) else { return true };
        let volume = &candidate.source.volume;
        let Ok(_turn) = self.busy.enter(&[format!("volume {volume}")], TURN_LIMIT) else { return false };
        // It may have been unpublished or made anew before our turn came.
        match self.kernel.table() {
            Ok(table) if candidates(&table, &self.config.kubelet_dirs).contains(candidate) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
        let order = match self.known(candidate) {
            Some(mount) if mount.state() == State::Dead => mount.order(),
            Some(_) => return true,
            None if showing => return false,
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

    /// Dead mounts that somebody has taken from their targets.
    fn unmounted(&self, table: &[MountEntry]) -> Vec<Arc<Mount>> {
        let mut mounts = self.table.all();
        mounts.retain(|mount| mount.state() == State::Dead && !is_fuse(table, mount.target.path()));
        mounts
    }

    /// A pod that is being deleted may be unmounted by anybody, and must not get it again. Its containers are gone before
    /// its volumes, so what a container still has is wanted. False: it must be looked at again.
    fn settle_unmounted(&self, mount: &Mount) -> bool {
        let (path, volume) = (mount.target.path(), &mount.spec.id);
        let Ok(_turn) = self.busy.enter(&[format!("volume {volume}")], TURN_LIMIT) else { return false };
        // It may have been unpublished or made anew before our turn came.
        let newest = self.table.at(path).is_some_and(|newest| newest.id == mount.id);
        let (Ok(table), Ok(in_use)) = (self.kernel.table(), self.is_in_use(mount)) else { return false };
        if !newest || mount.state() != State::Dead || is_fuse(&table, path) {
            return true;
        }
        if !in_use {
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
        if !self.renewals.tell(&candidate.path, why) {
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

    /// Containers that started while mounts were replaced may have a dead one. True: look again.
    fn find_stragglers(&self, look: usize) -> bool {
        let mut again = false;
        for mount in self.table.all() {
            if mount.replaces().is_empty() {
                continue;
            }
            let volume: &VolumeId = &mount.spec.id;
            let Ok(_turn) = self.busy.enter(&[format!("volume {volume}")], TURN_LIMIT) else {
                again = true;
                continue;
            };
            // Unpublished meanwhile: nothing is to be seen of it any more.
            if mount.state().is_over() {
                continue;
            }
            let complete = self.replace_elsewhere(&mount);
            if !is_last(look) {
                again = true;
                continue;
            }
            mount.set_replaces(Vec::new());
            // What could not be replaced stays on record: the next broker tries again.
            if complete {
                self.targets.forget_dead(mount.target.path(), volume);
            }
        }
        again
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
