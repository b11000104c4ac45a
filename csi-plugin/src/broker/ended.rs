//! Connections that somebody else has ended: `umount -f`, `echo 1 > …/abort`, the kernel's `fs.fuse.max_request_timeout`,
//! the last unmount of a mount that we hold. Noticed within a second, told, and made anew (see `renew`).
//!
//! ```text
//!  every 250 ms: all devices ──► ended, and not by us ──► Dead, its descriptors let go of ──► told ──► look for dead mounts
//!  and whenever a mount is about to be called served
//! ```
//!
//! Nothing has to be found twice here, and no turn is waited for: a connection that has ended stays so, and whatever
//! we end ourselves has its terminal state before its connection ends. Who unpublishes meanwhile comes first or second,
//! as the mount's own lock says.

use super::Broker;
use super::mounts_table::{Mount, State};
use crate::events::{Reason, text};
use mounts::{KernelError, MountEntry, MountSource, Ours};
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A look costs half a microsecond for each mount. Waiting instead would cost a context switch for each request that the
/// kernel makes (see `mounts::Kernel::have_ended`).
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Runs until the broker is dropped or stopped.
pub(super) fn watch(broker: &Weak<Broker>) {
    loop {
        std::thread::sleep(LOOK_EVERY);
        let Some(broker) = broker.upgrade().filter(|broker| !broker.stopped()) else { return };
        broker.note_all_that_ended();
    }
}

fn is_live(state: State) -> bool {
    // A publish that is under way fails by itself.
    matches!(state, State::Serving | State::Orphaned(_) | State::Adopting(_))
}

impl Broker {
    fn note_all_that_ended(&self) {
        let live = self.table.all().into_iter().filter(|mount| is_live(mount.state()));
        let held: Vec<(Arc<Mount>, Arc<OwnedFd>)> =
            live.filter_map(|mount| mount.device().map(|device| (mount, device))).collect();
        let devices: Vec<_> = held.iter().map(|(_, device)| device.as_fd()).collect();
        let ended = held.iter().zip(self.kernel.have_ended(&devices)).filter(|(_, ended)| *ended);
        // All of them first: nobody who asks is told that one of them is served.
        let ended = ended.map(|((mount, _), _)| mount).filter(|mount| self.end_noted(mount));
        let ended: Vec<Arc<Mount>> = ended.cloned().collect();
        self.tell_of_ends(&ended);
    }

    /// Has somebody else ended its connection? Then that is noted first.
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
        let why = "somebody else has ended its connection";
        if !mount.end_of_others(why, is_live) {
            return false;
        }
        self.abort(mount);
        true
    }

    /// Their owners hear of it, and they are made anew.
    pub(super) fn tell_of_ends(&self, ended: &[impl Deref<Target = Mount>]) {
        // Who stops hangs up first. Its successor finds the same.
        if ended.is_empty() || self.stopped() {
            return;
        }
        let in_use = self.in_use(ended).unwrap_or_else(|_| vec![true; ended.len()]);
        for (mount, in_use) in ended.iter().zip(in_use) {
            let (volume, node) = (&mount.spec.id, &self.config.node_id);
            let message = match in_use {
                false => text::vanished(volume, node),
                true => text::ended_by_others(volume, node),
            };
            self.tell(mount, Reason::Failed, &message);
        }
        ended.iter().for_each(|mount| self.renewals.wake_for(mount.target.path()));
    }

    /// Of each: is a mount of it left, at its target, for a subPath, or in a container? Looking at all mount namespaces
    /// takes its time, and many may end at once: it is done once, for those that are not in our own.
    pub(super) fn in_use(&self, mounts: &[impl Deref<Target = Mount>]) -> Result<Vec<bool>, KernelError> {
        let table = self.kernel.table()?;
        let is_here = |mount: &Mount| {
            let is_of = |source: &MountSource| source.volume == mount.spec.id.as_str();
            let is_it =
                |entry: &MountEntry| matches!(entry.ours(), Some(Ours::Fuse(source)) if is_of(&source));
            table.iter().any(|entry| entry.connection() == mount.connection && is_it(entry))
        };
        let mut in_use: Vec<bool> = mounts.iter().map(|mount| is_here(mount)).collect();
        let others: Vec<usize> = (0..mounts.len()).filter(|index| !in_use[*index]).collect();
        if !others.is_empty() {
            let wanted =
                others.iter().map(|index| (mounts[*index].connection, mounts[*index].spec.id.as_str()));
            let found = self.kernel.mounted_anywhere(&wanted.collect::<Vec<_>>())?;
            others.into_iter().zip(found).for_each(|(index, found)| in_use[index] = found);
        }
        Ok(in_use)
    }
}
