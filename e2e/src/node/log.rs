//! Where the standard error of a node's programs goes.

use super::places::Places;
use anyhow::Result;
use rustix::pipe::{fcntl_setpipe_size, pipe};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use testkit::process::Process;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogTo {
    /// A file that a test can read.
    #[default]
    File,
    /// A pipe whose reader has gone; here and below everything is logged, however trifling.
    Closed,
    /// A pipe that is full and is never read.
    Unread,
    /// A device on which every write fails.
    Failing,
}

impl LogTo {
    pub const BROKEN: [Self; 3] = [Self::Closed, Self::Unread, Self::Failing];
}

/// A program, and what must stay open as long as it lives.
#[derive(Debug)]
pub(super) struct Logged {
    pub(super) process: Process,
    _unread: Option<OwnedFd>,
}

/// So many at most, of the program that is started.
pub(super) fn limit_descriptors(command: &mut Command, most: Option<u64>) {
    let Some(most) = most else { return };
    let limit = Rlimit { current: Some(most), maximum: Some(most) };
    // SAFETY: one system call, between fork and exec.
    unsafe { command.pre_exec(move || Ok(setrlimit(Resource::Nofile, limit)?)) };
}

/// Starts a program. The calling thread must outlive it (see `testkit::process`).
pub(super) fn spawn(command: &mut Command, places: &Places, log: &str, to: LogTo) -> Result<Logged> {
    let file = File::options().create(true).append(true).open(places.log(log))?;
    command.stdout(file.try_clone()?);
    if to != LogTo::File {
        command.env("MILLPOND_LOG", "trace");
    }
    let mut unread = None;
    match to {
        LogTo::File => command.stderr(file),
        LogTo::Closed => command.stderr(pipe()?.1),
        LogTo::Failing => command.stderr(File::options().write(true).open("/dev/full")?),
        LogTo::Unread => {
            let (reader, writer) = pipe()?;
            let size = fcntl_setpipe_size(&writer, 4096)?;
            rustix::io::write(&writer, &vec![b'-'; size])?;
            unread = Some(reader);
            command.stderr(writer)
        }
    };
    let process = Process::spawn(command)?;
    // The writer's end must be the program's alone.
    command.stderr(std::process::Stdio::null());
    Ok(Logged { process, _unread: unread })
}
