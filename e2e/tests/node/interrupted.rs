//! A long run that is ended by a signal, or that is killed, leaves nothing behind; one that is not ends by itself.

use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{OneAtATime, programs};
use e2e::scenario::memory;
use e2e::{mountinfo, processes};
use rustix::process::Signal;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;
use testkit::process::Process;

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_long_run_that_is_ended_leaves_nothing() -> Result<()> {
    let _one = OneAtATime::wait()?;
    let (temp, groups) = (tempfile::tempdir()?, memory::groups());
    std::fs::set_permissions(temp.path(), Permissions::from_mode(0o755))?; // the agent is another user
    for (signal, of_the_child, code) in [(Signal::TERM, false, 143), (Signal::KILL, true, 137)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_node-suite"));
        command.args(["burst", "--time", "10m"]).env("TMPDIR", temp.path()).env("MILLPOND_BIN", programs()?);
        let mut suite = Process::spawn(&mut command)?;
        let serves =
            || mountinfo::below(temp.path()).is_ok_and(|all| all.iter().any(|m| m.kind.starts_with("fuse")));
        ensure!(wait_until(PATIENCE, serves), "no volume is mounted");
        let pid = match of_the_child {
            true => *processes::children(suite.pid()).first().context("it has no child")?,
            false => suite.pid(),
        };
        processes::signal(pid, signal)?;
        let mut status = None;
        ensure!(
            wait_until(PATIENCE, || {
                status = suite.child().try_wait().ok().flatten();
                status.is_some()
            }),
            "it goes on"
        );
        ensure!(status.and_then(|s| s.code()) == Some(code), "{signal:?}: {status:?}");
        let mounts = mountinfo::below(temp.path())?;
        ensure!(mounts.is_empty(), "{signal:?}: mounts are left: {mounts:?}");
        let left = processes::running_from(temp.path());
        ensure!(left.is_empty(), "{signal:?}: processes are left: {left:?}");
        ensure!(
            memory::groups() <= groups,
            "{signal:?}: {} groups of memory, {groups} before",
            memory::groups()
        );
        let files: Vec<_> =
            std::fs::read_dir(temp.path())?.filter_map(|e| Some(e.ok()?.file_name())).collect();
        ensure!(files == ["millpond-e2e.lock"], "{signal:?}: {files:?}");
    }
    Ok(())
}

/// What it has started hears when it is asked to stop, though the run itself waits for the same signals.
#[test]
fn a_long_run_that_is_left_alone_ends_by_itself() -> Result<()> {
    let _one = OneAtATime::wait()?;
    let temp = tempfile::tempdir()?;
    std::fs::set_permissions(temp.path(), Permissions::from_mode(0o755))?; // the agent is another user
    let mut command = Command::new(env!("CARGO_BIN_EXE_node-suite"));
    command.args(["kills", "--kills", "3", "--volumes", "1"]);
    let run = command.env("TMPDIR", temp.path()).env("MILLPOND_BIN", programs()?).output()?;
    ensure!(run.status.success(), "{}: {}", run.status, String::from_utf8_lossy(&run.stderr));
    Ok(())
}
