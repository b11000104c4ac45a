//! What a helper does to itself before it is told anything: its socket, its limits, an empty environment.

use hdfs::SOCKET_FD;
use lockdown::lower;
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Resource, Signal};
use std::io::Write;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;

/// Connections to servers, a few per question, and a few dozen besides.
const FILES_MAX: u64 = 4096;

/// `arguments`: the agent's process id, and how many bytes of private memory this process may have. Neither is a secret:
/// what is, comes over the socket.
///
/// # Errors
/// A sentence: it was not started by an agent, or that agent is gone.
pub(crate) fn begin(arguments: impl Iterator<Item = String>) -> Result<UnixStream, String> {
    report_panics_without_their_words();
    let by_hand = || {
        format!(
            "started by hand? It expects the agent's socket as descriptor {SOCKET_FD}, and two arguments."
        )
    };
    let arguments: Vec<u64> = arguments.map_while(|word| word.parse().ok()).collect();
    let [agent, data_bytes] = arguments[..] else { return Err(by_hand()) };
    // SAFETY: nothing is done to it but to look, and it stays open.
    let socket = unsafe { BorrowedFd::borrow_raw(SOCKET_FD) };
    let is_ours = rustix::net::sockopt::socket_type(socket) == Ok(SocketType::STREAM)
        && rustix::net::sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX);
    if !is_ours {
        return Err(by_hand());
    }
    let failed = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(failed("PR_SET_PDEATHSIG"))?;
    // It may have died before the line above took effect.
    if rustix::process::getppid().is_none_or(|parent| parent.as_raw_nonzero().get() as u64 != agent) {
        return Err("the agent that started this helper is gone".into());
    }
    rustix::thread::set_no_new_privs(true).map_err(failed("no_new_privs"))?;
    // Agent, workers and other helpers have the same user: none of them, taken over, reads or changes this process.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .map_err(failed("PR_SET_DUMPABLE"))?;
    // A helper is disposable. Raising it needs no rights; where it is forbidden nevertheless, the agent's own score holds.
    let score = c"/proc/self/oom_score_adj";
    if let Ok(file) = rustix::fs::open(score, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
        let _ = rustix::io::write(&file, b"1000");
    }
    for (resource, limit) in
        [(Resource::Data, data_bytes), (Resource::Nofile, FILES_MAX), (Resource::Fsize, 16 << 20)]
    {
        lower(resource, limit).map_err(failed("setrlimit"))?;
    }
    // 1 and not 0: a handler that `core_pattern` names as a pipe is given the core whatever the limit is, unless it is 1.
    let _ = lower(Resource::Core, 1);
    rustix::process::umask(Mode::from_raw_mode(0o077));
    // Neither library is to find anything there that was not put there for it.
    for (name, _) in std::env::vars_os() {
        // SAFETY: before any other thread.
        unsafe { std::env::remove_var(name) };
    }
    let socket = socket.try_clone_to_owned().map_err(|e| format!("dup: {e}"))?;
    let null = rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let null = null.map_err(failed("/dev/null"))?;
    // SAFETY: the descriptor of standard input, which from here on is nobody's socket; given back at once.
    let mut input = unsafe { std::os::fd::OwnedFd::from_raw_fd(SOCKET_FD) };
    let put = rustix::io::dup2(&null, &mut input);
    let _ = input.into_raw_fd(); // stays open: standard input
    put.map_err(failed("dup2"))?;
    Ok(UnixStream::from(socket))
}

/// A panic is an answer here, and no end. Where it happened may be said; its words may be a file's name or a key.
fn report_panics_without_their_words() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(std::io::stderr(), "hdfs-helper: a panic at {place}"); // there is nowhere else to say it
    }));
}
