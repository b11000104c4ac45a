//! What a worker does to itself before anything else. The agent starts it without a fork of its own, which would copy the
//! page tables of an agent that has a thousand metadata stores mapped: so nothing happens between fork and exec.

use link::worker::LINK_FD;
use lockdown::lower;
use rustix::fs::{Mode, OFlags};
use rustix::io::FdFlags;
use rustix::net::SocketType;
use rustix::process::{Resource, Signal};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

/// Dies with the agent's thread that started it, is the kernel's first choice when memory is short, and has the memory
/// that the agent allows it. Returns the agent's socket.
///
/// `arguments`: [`link::worker::arguments`].
///
/// # Errors
/// A sentence: it was not started by an agent, or that agent is gone.
pub fn begin(arguments: impl Iterator<Item = String>) -> Result<OwnedFd, String> {
    let by_hand = || {
        format!("started by hand? It expects the agent's socket as descriptor {LINK_FD}, and two arguments.")
    };
    let arguments: Vec<u64> = arguments.map_while(|word| word.parse().ok()).collect();
    let [agent, data_bytes] = arguments[..] else { return Err(by_hand()) };
    // SAFETY: nothing is done to it but to look, and it stays open.
    let link = unsafe { BorrowedFd::borrow_raw(LINK_FD) };
    if rustix::net::sockopt::socket_type(link) != Ok(SocketType::SEQPACKET) {
        return Err(by_hand());
    }
    let failed = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
    rustix::io::fcntl_setfd(link, FdFlags::CLOEXEC).map_err(failed("close-on-exec"))?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(failed("PR_SET_PDEATHSIG"))?;
    // It may have died before the line above took effect.
    if rustix::process::getppid().is_none_or(|parent| parent.as_raw_nonzero().get() as u64 != agent) {
        return Err("the agent that started this worker is gone".into());
    }
    // A worker is disposable. Raising it needs no rights; where it is forbidden nevertheless, the agent's own score holds.
    let score = c"/proc/self/oom_score_adj";
    if let Ok(file) = rustix::fs::open(score, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
        let _ = rustix::io::write(&file, b"1000");
    }
    lower(Resource::Data, data_bytes).map_err(failed("RLIMIT_DATA"))?;
    // SAFETY: open, inherited for this purpose, and owned by no other value: the standard library's `stdin` is not used.
    Ok(unsafe { OwnedFd::from_raw_fd(LINK_FD) })
}
