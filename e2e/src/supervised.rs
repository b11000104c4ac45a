//! A long run as a child process: a signal, or whatever kills the child, takes along what it has mounted and started. (The
//! next run cleans up after a parent that was killed outright.)

use crate::node::clean_up_after;
use crate::scenario::memory::remove_empty_groups;
use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus};

/// Set in the child.
const VARIABLE: &str = "MILLPOND_SUPERVISED";

/// Runs `work` in a child process with the same arguments, which dies with this one. TERM, INT and HUP end it.
pub fn supervised(work: impl FnOnce() -> Result<()>) -> Result<ExitCode> {
    if std::env::var_os(VARIABLE).is_some() {
        return work().map(|()| ExitCode::SUCCESS);
    }
    let signals: SigSet =
        [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD].into_iter().collect();
    signals.thread_block()?; // before there is a child, so that its end is not missed
    let mut child = start(signals)?;
    loop {
        match signals.wait()? {
            Signal::SIGCHLD => {
                if let Some(status) = child.try_wait()? {
                    return ended(&child, status);
                }
            }
            signal => {
                child.kill()?;
                let status = child.wait()?;
                eprintln!("ended by {signal}: cleaning up");
                ended(&child, status)?;
                return Ok(code(signal as i32));
            }
        }
    }
}

/// With `blocked` unblocked again: what the child starts inherits its mask, and is asked to stop by signals.
fn start(blocked: SigSet) -> Result<Child> {
    let program = std::env::current_exe()?;
    let mut command = Command::new(&program);
    command.args(std::env::args_os().skip(1)).env(VARIABLE, "1");
    // SAFETY: runs between fork and exec; two system calls, which are async-signal-safe and touch no memory of ours.
    unsafe {
        command.pre_exec(move || {
            blocked.thread_unblock()?;
            Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?)
        });
    }
    command.spawn().with_context(|| program.display().to_string())
}

/// One that was killed has put nothing in order.
fn ended(child: &Child, status: ExitStatus) -> Result<ExitCode> {
    if let Some(code) = status.code() {
        return Ok(ExitCode::from(code as u8));
    }
    clean_up_after(child.id())?;
    remove_empty_groups();
    Ok(code(status.signal().unwrap_or_default()))
}

/// As a shell tells it.
fn code(signal: i32) -> ExitCode {
    ExitCode::from(128 + signal as u8)
}
