//! Connections that another process has ended: `umount -f`, `echo 1 > …/abort`, the kernel's
//! `fs.fuse.max_request_timeout`, the last unmount of a mount that we hold. The broker notices it within a second,
//! posts an event and renews the mount (see `renew`).
//!
//! ```text
//!  every 250 ms: all devices ──► ended, and not by us ──► Dead, its descriptors let go of ──► posted ──► look for dead mounts
//!  and whenever a mount is about to be called served
//! ```
//!
//! Nothing has to be found twice here, and no turn is waited for: a connection that has ended stays so, and whatever
//! we end ourselves has its terminal state before its connection ends. An unpublish meanwhile comes first or second,
//! as the mount's own lock says.

use super::lifecycle::Lifecycle;
use std::sync::Weak;
use std::time::Duration;

/// A look costs half a microsecond for each mount. Waiting instead would cost a context switch for each request that
/// the kernel makes (see `mounts::Kernel::have_ended`).
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Runs until the broker is dropped or stopped.
pub(super) fn watch(lifecycle: &Weak<Lifecycle>) {
    loop {
        std::thread::sleep(LOOK_EVERY);
        let Some(lifecycle) = Lifecycle::running(lifecycle) else { return };
        lifecycle.note_all_that_ended();
    }
}
