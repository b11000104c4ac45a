//! The process that the agent takes for a worker: this test program under the worker's name. It gives its socket to the
//! test, which plays the worker, and waits to be killed.

use link::Packet;
use link::worker::LINK_FD;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The program's name as the agent is configured with it.
pub(super) const NAME: &str = "fuse-worker";
/// The socket beside it.
pub(super) const SOCKET: &str = "workers";

// Needed because a program of tests has no `main` of its own: the C library runs this before it.
#[used]
// SAFETY: the C library calls what stands there with the program's arguments, before any thread begins.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn(c_int, *const *const c_char) = before_main;

extern "C" fn before_main(count: c_int, arguments: *const *const c_char) {
    if count < 1 {
        return;
    }
    // SAFETY: there is a first argument, a string of the process's own that lives as long as it.
    let name = unsafe { CStr::from_ptr(*arguments) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    if path.file_name() == Some(OsStr::new(NAME)) {
        let done = relay(&path.with_file_name(SOCKET));
        std::process::exit(i32::from(done.is_err()));
    }
}

fn relay(test: &Path) -> Result<(), link::PacketError> {
    let test = Packet::connect(test)?;
    // SAFETY: the agent starts its workers with this descriptor, and no other value owns it.
    let agent = unsafe { OwnedFd::from_raw_fd(LINK_FD) };
    test.send(b"worker", &[agent.as_fd()])?;
    drop(agent);
    // The test ends it with a message, or the agent with a signal.
    test.recv(&mut [0; 8]).map(drop)
}
