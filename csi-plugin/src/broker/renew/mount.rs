//! Makes one mount anew: served first, then put in the dead one's place, then given to every container that has the
//! dead one.

use super::candidates::is_guard;
use super::wanted::Leaving;
use crate::broker::Order;
use crate::broker::agents::GOODBYE_LIMIT;
use crate::broker::lifecycle::Lifecycle;
use crate::broker::mounts_table::{Mount, State};
use crate::broker::publish::Publisher;
use crate::broker::targets::{Recipe, Targets};
use crate::events::{Reason, text};
use crate::status::Failure;
use link::broker::AgentRequest;
use mounts::{Connection, Ours, Replacement, Target};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Where a new mount goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Of the dead mount.
    Dead,
    /// On the guard, from which another process has taken the mount.
    Guard,
}

/// Makes a dead mount anew.
#[derive(Debug)]
pub(in crate::broker) struct Remounter {
    pub(in crate::broker) lifecycle: Arc<Lifecycle>,
    pub(in crate::broker) publisher: Arc<Publisher>,
    pub(in crate::broker) targets: Arc<Targets>,
}

impl Remounter {
    /// A target of this volume shall go. What is being made anew there ends now, although its source is waited for; the
    /// thread that makes it holds the target's turn, and gives it back.
    pub(in crate::broker) fn leave(&self, path: &Path, volume: &str) -> Leaving<'_> {
        let (leaving, making) = self.lifecycle.renewals.wanted.leave(path);
        let making = making.filter(|mount| mount.volume().as_str() == volume);
        if let Some(mount) = making
            && mount.enter(State::Unpublished, "it is unpublished while it is made anew")
        {
            self.lifecycle.agents.slots.all().iter().for_each(|agent| agent.withdraw(mount.id));
            self.lifecycle.abort(&mount);
        }
        leaving
    }

    /// At `target` is a dead mount of the same volume, or its guard, from which another process has taken the mount. After an
    /// error that is still there; the caller holds the volume's turn.
    pub(in crate::broker) fn renew(&self, order: Order, target: Target) -> Result<(), Failure> {
        let begun = Instant::now();
        // A dead mount is still better than a missing one.
        let agent = self.lifecycle.agents.publishing()?;
        let (dead, place) = self.dead_at(&target, order.spec.volume.id.as_str())?;
        let target = Arc::new(target);
        let (path, volume) = (target.path(), order.spec.volume.id.clone());
        self.targets.add(path, Recipe::of(&order));
        let replaces = self.targets.add_dead(path, &volume, dead);
        failpoint::hit("broker.renewal-noted");
        let predecessor = self.lifecycle.table.at(path);
        let by_others =
            place == Place::Guard || predecessor.as_ref().is_some_and(|it| it.is_ended_by_others());
        if let Some(it) = predecessor.as_ref().filter(|it| place == Place::Dead && it.connection == dead) {
            self.lifecycle.abort(it);
        }

        let device = self.lifecycle.kernel.open_device()?;
        let id = self.publisher.next_id()?;
        let new =
            self.lifecycle.kernel.mount_detached(device.as_fd(), &order.source(), order.mount_options())?;
        // The one before is on record as dead.
        self.targets.set_mounted(path, &volume, new.connection);
        let mount = self.publisher.enlist(id, &agent, order, &target, device, new.connection);
        let making = self.lifecycle.renewals.wanted.make(&mount);
        let begun_to =
            making.as_ref().ok_or_else(|| Failure::Unavailable("its target is being unpublished".into()));
        let served = begun_to.and_then(|_| self.publisher.serve(&agent, &mount));
        let works = served.and_then(|mode| {
            failpoint::hit("broker.renewal-served");
            match place {
                Place::Dead => self.lifecycle.kernel.put(&new, &target, dead)?,
                Place::Guard => {
                    // It may live on in a container, which gets the new one.
                    if let Some(it) = &predecessor {
                        it.enter(
                            State::Dead,
                            "another process has unmounted it at its target: it is made anew",
                        );
                        self.lifecycle.abort(it);
                    }
                    self.lifecycle.kernel.put_on_guard(&new, &target, volume.as_str())?;
                }
            }
            failpoint::hit("broker.renewal-put");
            self.publisher.look_into(&mount, mode)
        });
        drop(making);
        if let Err(failure) = works {
            self.lifecycle.retire(&mount, "it was not made anew");
            self.lifecycle.table.remove(mount.id);
            return Err(failure);
        }
        if let Some(predecessor) = predecessor {
            predecessor.enter(State::Unpublished, "another one was put in its place");
            self.lifecycle.table.remove(predecessor.id);
            // An agent that gave it up has kept it, to tell why.
            agent.relieve(predecessor.id, "another mount was put in its place");
        }
        self.lifecycle.renewals.all_told(path);
        mount.set_replaces(replaces);
        let complete = self.replace_elsewhere(&mount);
        failpoint::hit("broker.renewed");
        tracing::info!(
            mount = %mount.id, %volume, target_path = %path.display(), level = 4, complete,
            duration_ms = begun.elapsed().as_millis() as u64,
            "healed: mounted anew in the place of a dead mount"
        );
        let message = if by_others { text::renewed_after_others(&volume) } else { text::renewed(&volume) };
        // Containers have events of their own: their copies may still be dead.
        self.lifecycle.notices.events.note(&mount.spec.subjects, Reason::Recovered, &message);
        let took_us = begun.elapsed().as_micros() as u64;
        if let Err(error) = agent.ask(AgentRequest::Renewed { mount: mount.id, took_us }, &[], GOODBYE_LIMIT)
        {
            tracing::debug!(mount = %mount.id, %error, "the agent does not count this heal");
        }
        self.lifecycle.renewals.wake_for(path);
        Ok(())
    }

    /// The connection of the dead mount, and where the new one goes.
    fn dead_at(&self, target: &Target, volume: &str) -> Result<(Connection, Place), Failure> {
        let stack = self.lifecycle.kernel.stack(target)?;
        match stack.last() {
            Some(top) if matches!(top.ours(), Some(Ours::Fuse(_))) => Ok((top.connection(), Place::Dead)),
            _ => match self.known_or_recorded(target, volume) {
                Some(connection) if is_guard(stack.last(), volume) => Ok((connection, Place::Guard)),
                _ => Err(Failure::Unavailable(format!("the mount at {} is gone", target.path().display()))),
            },
        }
    }

    /// Another process may have unmounted it while there was no broker.
    fn known_or_recorded(&self, target: &Target, volume: &str) -> Option<Connection> {
        let known = self.lifecycle.table.at(target.path()).map(|mount| mount.connection);
        known.or_else(|| self.targets.mounted(target.path(), volume))
    }

    /// False: a container has a dead mount that could not be replaced.
    pub(in crate::broker) fn replace_elsewhere(&self, mount: &Mount) -> bool {
        let (path, volume) = (mount.target.path(), mount.volume());
        let replacement = Replacement {
            target: path.to_owned(),
            new: mount.connection,
            dead: mount.replaces(),
            volume: volume.as_str().to_owned(),
        };
        let left = match self.lifecycle.kernel.replace(&replacement) {
            Ok(replaced) => {
                if replaced.mounts > 0 {
                    tracing::info!(mount = %mount.id, %volume, mounts = replaced.mounts, "dead mounts in containers were replaced");
                }
                replaced.left
            }
            Err(error) => vec![error.to_string()],
        };
        if left.is_empty() {
            if mount.condition.note_left_behind(None) {
                self.lifecycle.notices.events.note(
                    &mount.spec.subjects,
                    Reason::Recovered,
                    &text::caught_up(volume),
                );
            }
            return true;
        }
        let why = left.join("; ");
        let message = text::left_behind(volume, &why);
        if mount.condition.note_left_behind(Some(&message)) {
            tracing::warn!(mount = %mount.id, %volume, why, "a dead mount was not replaced in every container");
            self.lifecycle.notices.events.note(&mount.spec.subjects, Reason::Degraded, &message);
        }
        false
    }
}
