//! `millpond mount` in the background: healed as on a node, with a log of its own, and cleared away when it was killed.

use crate::operators::{json, millpond};
use crate::{node_with, promises};
use anyhow::{Context, Result, ensure};
use e2e::clock::{wait_until, within};
use e2e::mountinfo;
use e2e::node::{BUCKET, Node, secrets};
use e2e::processes;
use e2e::scenario::ended::abort;
use e2e::tree::Tree;
use rustix::process::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

struct Laptop<'a> {
    node: &'a Node,
    tree: &'a Tree,
    dir: PathBuf,
    cache: PathBuf,
}

impl<'a> Laptop<'a> {
    fn new(node: &'a Node, tree: &'a Tree) -> Result<Self> {
        let (dir, cache) = (node.places().root().join("laptop"), node.places().cache().join("laptop"));
        fs::create_dir(&dir)?;
        Ok(Self { node, tree, dir, cache })
    }

    fn command(&self, source: &str) -> Command {
        let mut command = Command::new(self.node.places().bin("millpond"));
        command.args(["mount", "--quota", "1Gi", "-o", "allowHttp=true", "-o"]);
        command.arg(format!("endpoint={}", self.node.server.endpoint())).arg("--cache").arg(&self.cache);
        command.arg(source).arg(&self.dir);
        let [(_, id), (_, secret)] = secrets();
        command.env("AWS_ACCESS_KEY_ID", id).env("AWS_SECRET_ACCESS_KEY", secret);
        command.env_remove("AWS_SESSION_TOKEN").stdin(Stdio::null());
        command
    }

    /// Returns what it said, with every pipe to it closed.
    fn mount(&self, source: &str) -> Result<Output> {
        let mut command = self.command(source);
        let output = within(PATIENCE, move || command.output())?.context("start millpond")?;
        println!(
            "mount: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(output)
    }

    /// The pid that it says.
    fn mounted(&self) -> Result<u32> {
        let output = self.mount(&format!("s3://{BUCKET}/set"))?;
        ensure!(output.status.success(), "it could not be mounted");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let pid = said.split("(pid ").nth(1).and_then(|rest| rest.split([',', ')']).next());
        Ok(pid.with_context(|| format!("no pid in {said:?}"))?.parse()?)
    }

    fn umount(&self) -> Result<Output> {
        let cache = self.cache.display().to_string();
        millpond(self.node, &["umount", &self.dir.display().to_string(), "--cache", &cache])
    }

    fn read_all(&self) -> Result<()> {
        for file in &self.tree.files {
            let path = self.dir.join(&file.path);
            let bytes = within(PATIENCE, move || fs::read(path))?.with_context(|| file.path.clone())?;
            assert_eq!(self.tree.reference(file)?.first_difference(0, &bytes), None, "{}", file.path);
        }
        Ok(())
    }

    fn sockets(&self) -> Result<Vec<PathBuf>> {
        let names = fs::read_dir(&self.cache)?.map(|e| Ok(e?.path())).collect::<Result<Vec<_>>>()?;
        Ok(names.into_iter().filter(|path| path.extension().is_some_and(|e| e == "sock")).collect())
    }

    fn worker(&self) -> Result<u32> {
        let [socket] = &self.sockets()?[..] else { anyhow::bail!("not one socket: {:?}", self.sockets()?) };
        let socket = socket.display().to_string();
        let status = json(&millpond(self.node, &["status", "--output", "json", "--api", &socket])?)?;
        Ok(status["volumes"][0]["worker"]["pid"].as_u64().context("a worker")?.try_into()?)
    }

    fn is_alive(pid: u32) -> bool {
        Path::new(&format!("/proc/{pid}/exe")).exists()
    }

    fn ensure_nothing_left(&self) -> Result<()> {
        let gone = || {
            let mounts = mountinfo::below(&self.dir).unwrap_or_default();
            let running = processes::running_from(&self.node.places().root().join("bin"));
            let workers = running.iter().filter(|(pid, path)| {
                path.ends_with("fuse-worker") && processes::parent(*pid) != Some(self.node.agent().pid())
            });
            mounts.is_empty() && workers.count() == 0 && self.sockets().is_ok_and(|all| all.is_empty())
        };
        ensure!(
            wait_until(PATIENCE, gone),
            "left: {:?}, {:?}",
            mountinfo::below(&self.dir)?,
            self.sockets()?
        );
        assert_eq!(promises::names(&self.dir)?.len(), 0);
        Ok(())
    }
}

#[test]
fn a_laptops_mount_in_the_background_is_healed_and_logs_to_a_file_that_it_names() -> Result<()> {
    let (node, tree) = node_with("set")?;
    let laptop = Laptop::new(&node, &tree)?;
    let pid = laptop.mounted()?;
    laptop.read_all()?;
    for _ in 0..3 {
        let worker = laptop.worker()?;
        processes::kill_child(worker, pid)?;
        laptop.read_all()?;
        let healed = || laptop.worker().is_ok_and(|now| now != worker);
        ensure!(wait_until(PATIENCE, healed), "no worker took the place of worker {worker}");
    }
    let log = laptop.cache.join("mount.log");
    let text = fs::read_to_string(&log).with_context(|| log.display().to_string())?;
    ensure!(text.contains("healed"), "the log does not tell of the heals: {text}");
    ensure!(laptop.umount()?.status.success());
    ensure!(wait_until(PATIENCE, || !Laptop::is_alive(pid)), "it goes on after its mount has gone");
    laptop.ensure_nothing_left()?;
    node.finish()
}

#[test]
fn what_a_killed_mount_of_a_laptop_left_is_cleared_by_umount_and_by_the_next_mount() -> Result<()> {
    let (node, tree) = node_with("set")?;
    let laptop = Laptop::new(&node, &tree)?;
    let kill = |pid: u32| -> Result<()> {
        processes::signal(pid, Signal::KILL)?;
        let dir = laptop.dir.clone();
        // Attributes are still cached.
        let dead = || rustix::fs::statfs(&dir).is_err_and(|e| e == rustix::io::Errno::NOTCONN);
        ensure!(wait_until(PATIENCE, dead), "a mount that no worker serves answers");
        Ok(())
    };
    kill(laptop.mounted()?)?;
    ensure!(laptop.umount()?.status.success());
    laptop.ensure_nothing_left()?;

    kill(laptop.mounted()?)?;
    // Over what is left: taken away first.
    let pid = laptop.mounted()?;
    laptop.read_all()?;
    let twice = laptop.mount(&format!("s3://{BUCKET}/set"))?;
    let why = String::from_utf8_lossy(&twice.stderr).into_owned();
    ensure!(!twice.status.success() && why.contains("mounted already"), "a second mount: {why}");
    ensure!(Laptop::is_alive(pid), "the second mount has ended the first");
    laptop.read_all()?;

    // Only the guard is left when another process has unmounted what lay on it.
    processes::signal(pid, Signal::KILL)?;
    ensure!(wait_until(PATIENCE, || !Laptop::is_alive(pid)), "it outlives a SIGKILL");
    rustix::mount::unmount(&laptop.dir, rustix::mount::UnmountFlags::DETACH)?;
    ensure!(!mountinfo::below(&laptop.dir)?.is_empty(), "the guard is gone");
    ensure!(laptop.umount()?.status.success());
    laptop.ensure_nothing_left()?;
    node.finish()
}

#[test]
fn a_mount_that_fails_in_the_background_says_so_on_the_terminal() -> Result<()> {
    let (node, tree) = node_with("set")?;
    let laptop = Laptop::new(&node, &tree)?;
    let output = laptop.mount("s3://no-such-bucket/set")?;
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        !output.status.success() && why.starts_with("millpond: ") && why.contains("no-such-bucket"),
        "{why}"
    );
    laptop.ensure_nothing_left()?;
    node.finish()
}

#[test]
fn a_command_whose_reader_has_seen_enough_ends_quietly() -> Result<()> {
    let (node, _) = node_with("set")?;
    let api = node.places().agent_socket();
    for arguments in [&["status"][..], &["status", "--output", "json"], &["doctor"], &["evict", "--all"]] {
        let (reader, writer) = rustix::pipe::pipe()?;
        drop(reader);
        let mut command = Command::new(node.places().bin("millpond"));
        command.arg("--api").arg(&api).args(arguments).stdin(Stdio::null());
        let output = command.stdout(writer).stderr(Stdio::piped()).spawn()?.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success() && said.is_empty(), "{arguments:?}: {}, {said}", output.status);
    }
    node.finish()
}

#[test]
fn a_mount_of_a_laptop_that_somebody_aborts_ends_says_so_and_can_be_made_again() -> Result<()> {
    let (node, tree) = node_with("set")?;
    let laptop = Laptop::new(&node, &tree)?;
    let pid = laptop.mounted()?;
    laptop.read_all()?;
    abort(&node, &laptop.dir)?;
    ensure!(wait_until(PATIENCE, || !Laptop::is_alive(pid)), "it idles under a dead mount");
    laptop.ensure_nothing_left()?;
    let log = fs::read_to_string(laptop.cache.join("mount.log"))?;
    ensure!(log.contains("another process has ended the mount"), "{log}");
    laptop.mounted()?;
    laptop.read_all()?;
    ensure!(laptop.umount()?.status.success());
    laptop.ensure_nothing_left()?;
    node.finish()
}

/// Ctrl-C while its source does not answer.
#[test]
fn a_mount_of_a_laptop_that_is_called_off_leaves_nothing() -> Result<()> {
    let (node, tree) = node_with("set")?;
    let laptop = Laptop::new(&node, &tree)?;
    let frozen = node.server.frozen()?;
    for signal in [Signal::INT, Signal::TERM] {
        // A store that stands still does not notice that no reader waits any more.
        let before = node.server.stats()?.in_flight;
        let mut mounting = laptop.command(&format!("s3://{BUCKET}/set")).spawn()?;
        let asked = || node.server.stats().is_ok_and(|stats| stats.in_flight > before);
        ensure!(wait_until(PATIENCE, asked), "the store is not asked");
        processes::signal(mounting.id(), signal)?;
        let mut status = None;
        ensure!(
            wait_until(PATIENCE, || {
                status = mounting.try_wait().ok().flatten();
                status.is_some()
            }),
            "it waits on after {signal:?}"
        );
        ensure!(!status.is_some_and(|status| status.success()));
        laptop.ensure_nothing_left()?;
    }
    drop(frozen);
    laptop.mounted()?;
    laptop.read_all()?;
    ensure!(laptop.umount()?.status.success());
    node.finish()
}
