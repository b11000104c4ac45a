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
use mounts::{KernelError, MountEntry, Ours};
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
        for ((mount, _), ended) in held.iter().zip(self.kernel.have_ended(&devices)) {
            if ended {
                self.note_ended(mount);
            }
        }
    }

    /// Has somebody else ended its connection? Then that is noted first.
    pub(crate) fn note_if_ended(&self, mount: &Mount) -> bool {
        let ended = mount.device().is_some_and(|device| self.kernel.has_ended(device.as_fd()));
        ended && is_live(mount.state()) && self.note_ended(mount)
    }

    /// False: it has come to its end otherwise before.
    fn note_ended(&self, mount: &Mount) -> bool {
        let why = "somebody else has ended its connection";
        if !mount.end_of_others(why, is_live) {
            return false;
        }
        self.abort(mount);
        // Who stops hangs up first. Its successor finds the same.
        if !self.stopped() {
            self.tell_of_end(mount);
            self.renewals.wake();
        }
        true
    }

    pub(super) fn tell_of_end(&self, mount: &Mount) {
        let (volume, node) = (&mount.spec.id, &self.config.node_id);
        let message = match self.is_in_use(mount) {
            Ok(false) => text::vanished(volume, node),
            _ => text::ended_by_others(volume, node),
        };
        self.tell(mount, Reason::Failed, &message);
    }

    /// Is a mount of it left, at its target, for a subPath, or in a container?
    pub(super) fn is_in_use(&self, mount: &Mount) -> Result<bool, KernelError> {
        let volume = mount.spec.id.as_str();
        // Looking at all mount namespaces takes its time, and many may end at once.
        let is_it = |entry: &MountEntry| {
            entry.connection() == mount.connection
                && matches!(entry.ours(), Some(Ours::Fuse(source)) if source.volume == volume)
        };
        if self.kernel.table()?.iter().any(is_it) {
            return Ok(true);
        }
        self.kernel.is_mounted_anywhere(mount.connection, volume)
    }
}
