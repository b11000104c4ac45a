//! What each program of Millpond does first, before it has read its arguments.
//!
//! A log that is closed, full or slow holds up no thread ([`log`]); a panic anywhere ends the process, so that the
//! agent or the broker heals it ([`mod@panic`]); what a busy minute took of memory goes back ([`memory`]); no dying process
//! leaves its memory, which holds secrets, on a disk; and each hears when it is asked to stop.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod bounded_file;
mod failpoints;
pub mod log;
pub mod memory;
mod panic;

use nix::sys::signal::{SigSet, Signal};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;

/// Call this first in `main`. It starts no thread: a helper process may still have to be alone.
pub fn begin(program: &'static str) {
    forbid_core_dumps();
    hear_when_asked_to_stop();
    panic::end_the_process(program);
    failpoints::listen();
}

/// Leaves the threads of a runtime to the end of the process, which is to be next. Shut down in the background they would be
/// detached while they end, and glibc's `pthread_detach` (2.36) reads a thread's memory once more after the thread may have given it
/// back: an agent that had done all its work has died of SIGSEGV so.
pub fn leave_to_the_end<T>(runtime: T) {
    std::mem::forget(runtime);
}

/// 1 and not 0: a core file is never smaller than a page, and a handler that `core_pattern` names as a pipe is given
/// the core whatever the limit is, unless it is 1 (core(5), fs/coredump.c). Where the hard limit is 0 already it stays.
fn forbid_core_dumps() {
    let limit = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    let _ = setrlimit(Resource::Core, limit(1)).or_else(|_| setrlimit(Resource::Core, limit(0)));
}

/// The mask of blocked signals is inherited, and a parent that waits for them itself has them blocked: who was started so
/// would not stop when asked, and be killed with its work undone.
fn hear_when_asked_to_stop() {
    let asked: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
    let _ = asked.thread_unblock(); // fails for no set that exists
}

/// As many descriptors as this process may have, for what serves a node: each mount takes some, each cache file one. The
/// soft limit of 1,024 is for programs that use select(2).
///
/// # Errors
/// The kernel's; the limit is what it was.
pub fn raise_descriptor_limit() -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// Of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    pub used: u64,
    pub most: u64,
}

/// # Errors
/// The process's own directory in `/proc` cannot be read.
pub fn descriptors() -> io::Result<Descriptors> {
    let directory = "/proc/self/fd";
    // The size of the directory is their number since Linux 6.2; before, it is 0.
    let used = match std::fs::metadata(directory)?.len() {
        0 => std::fs::read_dir(directory)?.count() as u64,
        used => used,
    };
    Ok(Descriptors { used, most: getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_that_the_parent_has_blocked_are_heard() {
        let asked: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
        let mut blocked = asked;
        blocked.add(Signal::SIGUSR2);
        blocked.thread_block().unwrap();
        hear_when_asked_to_stop();
        let now = SigSet::thread_get_mask().unwrap();
        assert!(asked.iter().all(|signal| !now.contains(signal)), "{now:?}");
        assert!(now.contains(Signal::SIGUSR2), "no other is touched");
    }

    #[test]
    fn the_soft_limit_of_descriptors_becomes_the_hard_one() {
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(512), maximum }).unwrap();
        raise_descriptor_limit().unwrap();
        assert_eq!(getrlimit(Resource::Nofile), Rlimit { current: maximum, maximum });
        let mut some: Vec<_> = (0..100).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        some.remove(0); // a number that is free tells nothing of those above it
        let Descriptors { used, most } = descriptors().unwrap();
        assert!((100..=some.len() as u64 + 100).contains(&used) && Some(most) == maximum, "{used}");
    }
}
