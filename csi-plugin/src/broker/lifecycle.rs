//! The life of a mount: every change of its state, with what must follow from it. The broker informs its owner, its
//! connection is ended, its descriptors are let go of.
//!
//! The state changes first, then the world: a thread that works on the same mount meanwhile finds that it is over, and
//! undoes what it has done.

use super::agents::Agents;
use super::mounts_table::{Mount, Released, State, Table};
use super::notices::Notices;
use super::renew::Renewals;
use super::socket::{AgentIdentity, AgentLink};
use crate::events::{Reason, text};
use crate::status::Failure;
use link::broker::{MountId, Report};
use link::{Refusal, RefusalKind};
use mounts::{Kernel, KernelError, MountEntry, MountSource, Ours};
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::Thread;
use std::time::Instant;

#[derive(Debug)]
pub(crate) struct Lifecycle {
    pub(super) kernel: Arc<dyn Kernel>,
    pub(super) table: Arc<Table>,
    pub(super) agents: Arc<Agents>,
    pub(super) renewals: Arc<Renewals>,
    pub(super) notices: Notices,
    pub(super) stopping: AtomicBool,
    /// The thread that ends what is overdue.
    pub(super) expiry: OnceLock<Thread>,
}

/// Has another process ended its connection, if that is noted now?
fn is_live(state: State) -> bool {
    // A publish that is under way fails by itself.
    matches!(state, State::Serving | State::Orphaned(_) | State::Adopting(_))
}

impl Lifecycle {
    pub(super) fn stopped(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// None: the broker is dropped, or stops.
    pub(super) fn running(this: &Weak<Self>) -> Option<Arc<Self>> {
        this.upgrade().filter(|lifecycle| !lifecycle.stopped())
    }

    pub(super) fn wake_expiry(&self) {
        if let Some(thread) = self.expiry.get() {
            thread.unpark();
        }
    }

    /// The agent may speak only of mounts that were given to it.
    pub(super) fn owned(&self, agent: &AgentIdentity, id: MountId) -> Result<Arc<Mount>, Refusal> {
        let unknown =
            || Refusal::new(RefusalKind::NotFound, format!("mount {id} is not known to this broker"));
        self.table.get(id).filter(|mount| mount.is_of(agent)).ok_or_else(unknown)
    }

    /// As [`Mount::enter_if`], and informs the owner.
    pub(super) fn enter_if(
        &self,
        mount: &Mount,
        to: State,
        why: &str,
        holds: impl FnOnce(State, &AgentIdentity) -> bool,
    ) -> bool {
        // No success is reported of a mount that a third party has ended meanwhile.
        if to == State::Serving && self.note_if_ended(mount) {
            return false;
        }
        let entered = mount.enter_if(to, why, holds);
        // A broker that stops hangs up first: nothing has happened to the mount.
        if entered && !self.stopped() {
            self.notices.tell_of(mount, to, why);
        }
        entered
    }

    /// What its agent says of it goes to its owner.
    pub(super) fn report(&self, mount: &Mount, report: Report) {
        // What its agent says of a mount that has ended was meant for the time before.
        if !self.note_if_ended(mount) && !mount.state().is_over() {
            self.notices.report(mount, report);
        }
    }

    /// The same agent as before, after a broken connection.
    pub(super) fn welcome_back(&self, agent: &AgentLink) {
        for mount in self.table.all() {
            self.enter_if(&mount, State::Serving, "its agent is back", |state, of| {
                matches!(state, State::Orphaned(_)) && of == agent.identity()
            });
        }
    }

    /// This agent serves nothing any more.
    pub(super) fn orphan_all_of(&self, agent: &AgentIdentity, why: &str) {
        for mount in self.table.all() {
            self.orphan(&mount, agent, why);
        }
        self.wake_expiry();
    }

    /// It has no agent from now on, if this one served it.
    pub(super) fn orphan(&self, mount: &Mount, agent: &AgentIdentity, why: &str) -> bool {
        self.enter_if(mount, State::Orphaned(Instant::now()), why, |state, of| {
            state == State::Serving && of == agent
        })
    }

    /// Takes one known mount away: informs the agent, ends the connection, unmounts, gives ids and descriptors back. If
    /// the unmount fails, the next call goes on.
    pub(super) fn take_down(&self, mount: &Mount) -> Result<(), Failure> {
        self.retire(mount, "it is taken down");
        self.kernel.unmount(&mount.target)?;
        self.table.remove(mount.id);
        Ok(())
    }

    /// The broker gives it up: it informs the agent and ends the connection. Its readers wait no longer.
    pub(super) fn retire(&self, mount: &Mount, why: &str) {
        mount.enter(State::Unpublished, why);
        if let Some(agent) = self.agents.slots.current()
            && mount.is_of(agent.identity())
        {
            agent.relieve(mount.id, why);
        }
        // No worker serves from here on: waiting calls are let go before the unmount.
        self.abort(mount);
    }

    /// Ends a mount that stays mounted: its readers get ENOTCONN until it is unpublished or published anew.
    pub(super) fn end(&self, mount: &Mount, why: &str) {
        self.end_if(mount, why, |_, _| true);
    }

    /// As [`Self::end`], if this still holds of its state and its agent.
    pub(super) fn end_if(
        &self,
        mount: &Mount,
        why: &str,
        holds: impl FnOnce(State, &AgentIdentity) -> bool,
    ) -> bool {
        let ended = self.enter_if(mount, State::Dead, why, holds);
        if ended {
            self.abort(mount);
        }
        ended
    }

    pub(super) fn abort(&self, mount: &Mount) {
        let Released { device, control, backing } = mount.release();
        // The thread that took it has ended the connection; its number may be another connection's by now.
        let Some(device) = device else { return };
        let aborted = match control {
            _ if self.kernel.has_ended(device.as_fd()) => Ok(()),
            Some(control) => self.kernel.abort(&control),
            // As long as its device lives the number is its own.
            None => self.kernel.abort_at(&mount.target, mount.connection),
        };
        if let Err(error) = aborted {
            tracing::error!(mount = %mount.id, %error, "connection not aborted; it ends with its last descriptor");
        }
        for id in backing {
            // An aborted connection gives its ids back itself when the last reference goes; a lingering process may
            // hold it, and the blocks of evicted files with it.
            if let Err(error) = self.kernel.backing_close(device.as_fd(), id) {
                tracing::debug!(mount = %mount.id, id, %error, "passthrough id not closed");
            }
        }
    }

    pub(super) fn note_all_that_ended(&self) {
        let live = self.table.all().into_iter().filter(|mount| is_live(mount.state()));
        let held: Vec<(Arc<Mount>, Arc<OwnedFd>)> =
            live.filter_map(|mount| mount.device().map(|device| (mount, device))).collect();
        let devices: Vec<_> = held.iter().map(|(_, device)| device.as_fd()).collect();
        let ended = held.iter().zip(self.kernel.have_ended(&devices)).filter(|(_, ended)| *ended);
        // All of them first: an answer never says that one of them is served.
        let ended = ended.map(|((mount, _), _)| mount).filter(|mount| self.end_noted(mount));
        let ended: Vec<Arc<Mount>> = ended.cloned().collect();
        self.tell_of_ends(&ended);
    }

    /// Has another process ended its connection? Then that is noted first.
    pub(crate) fn note_if_ended(&self, mount: &Mount) -> bool {
        let ended = mount.device().is_some_and(|device| self.kernel.has_ended(device.as_fd()));
        let noted = ended && is_live(mount.state()) && self.end_noted(mount);
        if noted {
            self.tell_of_ends(&[mount]);
        }
        noted
    }

    /// False: it has come to its end otherwise before.
    fn end_noted(&self, mount: &Mount) -> bool {
        let why = "another process has ended its connection";
        if !mount.end_of_others(why, is_live) {
            return false;
        }
        self.abort(mount);
        true
    }

    /// Their owners hear of it, and they are made anew.
    pub(super) fn tell_of_ends(&self, ended: &[impl Deref<Target = Mount>]) {
        // A broker that stops hangs up first. Its successor finds the same.
        if ended.is_empty() || self.stopped() {
            return;
        }
        let in_use = self.in_use(ended).unwrap_or_else(|_| vec![true; ended.len()]);
        for (mount, in_use) in ended.iter().zip(in_use) {
            let (volume, node) = (mount.volume(), &self.notices.node_id);
            let message = match in_use {
                false => text::vanished(volume, node),
                true => text::ended_by_others(volume, node),
            };
            self.notices.tell(mount, Reason::Failed, &message);
        }
        ended.iter().for_each(|mount| self.renewals.wake_for(mount.target.path()));
    }

    /// Of each: is a mount of it left, at its target, for a subPath, or in a container? Looking at all mount namespaces
    /// takes its time, and many may end at once: it is done once, for those that are not in our own.
    pub(super) fn in_use(&self, mounts: &[impl Deref<Target = Mount>]) -> Result<Vec<bool>, KernelError> {
        let table = self.kernel.table()?;
        let is_here = |mount: &Mount| {
            let is_of = |source: &MountSource| source.volume == mount.volume().as_str();
            let is_it =
                |entry: &MountEntry| matches!(entry.ours(), Some(Ours::Fuse(source)) if is_of(&source));
            table.iter().any(|entry| entry.connection() == mount.connection && is_it(entry))
        };
        let mut in_use: Vec<bool> = mounts.iter().map(|mount| is_here(mount)).collect();
        let others: Vec<usize> = (0..mounts.len()).filter(|index| !in_use[*index]).collect();
        if !others.is_empty() {
            let wanted =
                others.iter().map(|index| (mounts[*index].connection, mounts[*index].volume().as_str()));
            let found = self.kernel.mounted_anywhere(&wanted.collect::<Vec<_>>())?;
            others.into_iter().zip(found).for_each(|(index, found)| in_use[index] = found);
        }
        Ok(in_use)
    }
}
