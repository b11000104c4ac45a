//! The worker's own way to the kernel. fuser reads its device with libc's `read` and answers with `writev`; the binary
//! defines both symbols and sends those of one descriptor through here, so that every request lies in shared memory
//! before anything looks at it, and every answer is given once.
//!
//! fuser's descriptor is an open `/dev/null`: a read that went past us would end the session at once.

mod device;
mod interrupts;
mod splice;
#[cfg(test)]
mod tests;
mod writes;

pub(crate) use device::set_current;
pub use device::{Current, Session, Transport, current};
pub use interrupts::{Interrupts, run as run_interrupts};
pub use writes::{Write, WriteHandler};

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

/// The descriptor that fuser believes to be the device; −1: none yet.
static SESSION: AtomicI32 = AtomicI32::new(-1);
/// A C symbol has no receiver, hence this one global: set once per process, before the session starts.
static TRANSPORT: OnceLock<std::sync::Arc<Transport>> = OnceLock::new();

/// The transport, if `fd` is the session's. Called for every read and writev of the process.
#[inline]
pub fn of(fd: i32) -> Option<&'static Transport> {
    if fd < 0 || fd != SESSION.load(Ordering::Relaxed) {
        return None;
    }
    TRANSPORT.get().map(|transport| &**transport)
}
