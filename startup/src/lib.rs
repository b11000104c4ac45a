//! What each program of Millpond does first, before it has read its arguments.
//!
//! A log that is closed, full or slow holds up no thread ([`log`]); a panic anywhere ends the process, so that the
//! agent or the broker heals it ([`mod@panic`]); and no dying process leaves its memory, which holds secrets, on a
//! disk.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod bounded_file;
mod failpoints;
pub mod log;
mod panic;

use rustix::process::{Resource, Rlimit, setrlimit};

/// Call this first in `main`. It starts no thread: a helper process may still have to be alone.
pub fn begin(program: &'static str) {
    forbid_core_dumps();
    panic::end_the_process(program);
    failpoints::listen();
}

/// 1 and not 0: a core file is never smaller than a page, and a handler that `core_pattern` names as a pipe is given
/// the core whatever the limit is, unless it is 1 (core(5), fs/coredump.c). Where the hard limit is 0 already it stays.
fn forbid_core_dumps() {
    let limit = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    let _ = setrlimit(Resource::Core, limit(1)).or_else(|_| setrlimit(Resource::Core, limit(0)));
}
