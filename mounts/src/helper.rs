//! Disposable processes for what may hang or leaves a process elsewhere: the caller's own binary, run again with a role
//! in its environment, under a deadline.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How to start one: a binary whose `main` calls [`run_if_asked`](crate::run_if_asked) first.
#[derive(Clone, Debug)]
pub struct Helper {
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Helper {
    pub fn new(program: impl Into<PathBuf>, arguments: impl IntoIterator<Item = OsString>) -> Self {
        Self { program: program.into(), arguments: arguments.into_iter().collect() }
    }

    /// This very binary.
    pub fn own() -> Self {
        Self::new("/proc/self/exe", [])
    }

    /// The environment carries `role` and its arguments.
    pub(crate) fn start(
        &self,
        role: impl IntoIterator<Item = (&'static str, OsString)>,
        stdin: Stdio,
    ) -> io::Result<Started> {
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .envs(role)
            .current_dir("/")
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| io::Error::new(e.kind(), format!("cannot start {}: {e}", self.program.display())))?;
        Ok(Started { child: Some(child), text: Vec::new() })
    }
}

/// Killed when dropped.
#[derive(Debug)]
pub(crate) struct Started {
    child: Option<Child>,
    text: Vec<u8>,
}

/// What a wait for more of a helper's words came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Something,
    /// It has said everything.
    End,
    /// The deadline has passed.
    Nothing,
}

impl Started {
    /// What it said so far.
    pub(crate) fn said(&self) -> String {
        String::from_utf8_lossy(&self.text).into_owned()
    }

    pub(crate) fn listen(&mut self, deadline: Instant) -> io::Result<Heard> {
        let output = self.child.as_ref().and_then(|c| c.stdout.as_ref());
        let output = output.map(AsFd::as_fd).ok_or_else(|| io::Error::other("no pipe"))?;
        let left = deadline.saturating_duration_since(Instant::now());
        read_some(output, &mut self.text, left)
    }
}

fn read_some(from: BorrowedFd<'_>, text: &mut Vec<u8>, limit: Duration) -> io::Result<Heard> {
    let wait = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    match poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&wait)) {
        Ok(0) => return Ok(Heard::Nothing),
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(Heard::Something), // look at the clock again
        Err(e) => return Err(e.into()),
    }
    let mut buffer = [0; 512];
    let length = rustix::io::read(from, &mut buffer)?;
    text.extend_from_slice(&buffer[..length]);
    Ok(if length == 0 { Heard::End } else { Heard::Something })
}

impl Drop for Started {
    /// Kills, and waits elsewhere: a process that is stuck in a mount goes when the connection does.
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let _ = child.kill(); // fails only if it has been reaped
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        let spawned = std::thread::Builder::new().name("helper-reaper".into()).spawn(move || child.wait());
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread to reap a helper process");
        }
    }
}
