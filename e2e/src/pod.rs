//! A pod: processes in a mount namespace of their own, with private propagation, that see one volume.
//!
//! A first process holds the namespace, as a pod's pause container does; commands join it. None of the node's other
//! volumes is visible inside, so that a pod pins its own volume only.

use crate::node::Mounted;
use crate::{mountinfo, oracle};
use anyhow::{Context, Result, ensure};
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::tree::Tree;

/// Applications are not root.
const POD_UID: u32 = 10_001;

#[derive(Debug)]
pub struct Pod {
    holder: Child,
    namespace: File,
    /// The volume, as seen inside.
    data: PathBuf,
    programs: PathBuf,
    scratch: PathBuf,
    commands: AtomicU64,
}

impl Pod {
    /// `scratch` is an empty directory of this pod's own; `node_dir` contains every mount that must not be visible.
    pub fn start(mounted: &Mounted, scratch: PathBuf, programs: PathBuf, node_dir: &Path) -> Result<Self> {
        let data = scratch.join("data");
        std::fs::create_dir_all(&data)?;
        let c = |path: &Path| CString::new(path.as_os_str().as_bytes());
        let (from, to) = (c(&mounted.target)?, c(&data)?);
        // Everything that allocates happens before the fork.
        let mut others = Vec::new();
        for mount in mountinfo::below(node_dir)?.into_iter().rev() {
            others.push(c(&mount.point)?);
        }
        let mut command = Command::new("sleep");
        command.arg("infinity").stdin(Stdio::null()).stdout(Stdio::null());
        let enter = move || -> io::Result<()> {
            // SAFETY: no other thread shares this process's file system state: it was just forked.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS)? };
            rustix::mount::mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
            rustix::mount::mount_bind(&*from, &*to)?;
            for other in &others {
                let _ = rustix::mount::unmount(&**other, UnmountFlags::DETACH); // below another one: gone already
            }
            die_with_parent()
        };
        // SAFETY: the closure makes system calls only and allocates nothing.
        let holder = unsafe { command.pre_exec(enter) }.spawn().context("start the pod's first process")?;
        let namespace = File::open(format!("/proc/{}/ns/mnt", holder.id()))?;
        Ok(Self { holder, namespace, data, programs, scratch, commands: AtomicU64::new(0) })
    }

    pub fn data(&self) -> &Path {
        &self.data
    }

    /// The volume as it is inside, by a path of this process.
    pub fn reach(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{}", self.holder.id(), self.data.display()))
    }

    /// This node's mounts as they are inside; others of this machine come and go.
    pub fn mounts(&self, node_dir: &Path) -> io::Result<Vec<mountinfo::Mount>> {
        let all = mountinfo::read(&self.holder.id().to_string())?;
        Ok(all.into_iter().filter(|m| m.point.starts_with(node_dir)).collect())
    }

    /// A command that will run inside, as a user without rights.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let mut command = Command::new(program);
        let namespace = self.namespace.try_clone()?;
        let enter = move || -> io::Result<()> {
            let kind = rustix::thread::LinkNameSpaceType::Mount;
            rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(kind))?;
            // SAFETY: plain system calls in a process that was just forked and has one thread.
            let failed = unsafe {
                libc::chdir(c"/".as_ptr()) != 0
                    || libc::setgroups(0, std::ptr::null()) != 0
                    || libc::setgid(POD_UID) != 0
                    || libc::setuid(POD_UID) != 0
            };
            if failed { Err(io::Error::last_os_error()) } else { die_with_parent() }
        };
        // SAFETY: the closure makes system calls only and allocates nothing.
        unsafe { command.pre_exec(enter) };
        Ok(command)
    }

    fn oracle_command(&self, verb: &str, below: &str, tree: &Tree) -> Result<Command> {
        let number = self.commands.fetch_add(1, Ordering::Relaxed);
        let file = self.scratch.join(format!("tree{number}.json"));
        tree.save(&file)?;
        let mut command = self.command(self.programs.join("oracle"))?;
        command.arg(verb).arg("--root").arg(self.data.join(below)).arg("--tree").arg(file);
        Ok(command)
    }

    /// Reads everything inside the pod and compares it with the tree.
    pub fn verify(&self, tree: &Tree, threads: usize) -> Result<oracle::Verified> {
        self.start_verify(tree, threads, 0)?.finish(Duration::from_secs(600))
    }

    /// The same, going on in the background.
    pub fn start_verify(&self, tree: &Tree, threads: usize, seed: u64) -> Result<Running<oracle::Verified>> {
        let mut command = self.oracle_command("verify", "", tree)?;
        command.args(["--threads", &threads.to_string(), "--seed", &seed.to_string()]);
        Running::start(command)
    }

    /// The files of a part of the volume, in order, by one thread; other files may lie beside them.
    pub fn start_verify_below(&self, below: &str, tree: &Tree) -> Result<Running<oracle::Verified>> {
        let mut command = self.oracle_command("verify", below, tree)?;
        command.arg("--no-names");
        Running::start(command)
    }

    /// Some files of the volume, shuffled, by one thread; other files may lie beside them.
    pub fn start_verify_some(&self, tree: &Tree, seed: u64) -> Result<Running<oracle::Verified>> {
        let mut command = self.oracle_command("verify", "", tree)?;
        command.args(["--no-names", "--threads", "1", "--seed", &seed.to_string()]);
        Running::start(command)
    }

    /// Starts an application; returns when all its threads are at work.
    pub fn oracle(&self, tree: &Tree, arguments: &[&str]) -> Result<Running<oracle::Report>> {
        self.oracle_below("", tree, arguments)
    }

    /// The same in a directory of the volume; other files may lie beside it.
    pub fn oracle_below(
        &self,
        below: &str,
        tree: &Tree,
        arguments: &[&str],
    ) -> Result<Running<oracle::Report>> {
        let mut command = self.oracle_command("run", below, tree)?;
        command.args(arguments);
        Running::start(command)?.after("started")
    }

    /// Starts a tenant that means harm.
    pub fn abuse(&self, threads: usize, seed: u64) -> Result<Running<oracle::Abuse>> {
        let mut command = self.command(self.programs.join("oracle"))?;
        command.arg("abuse").arg("--root").arg(&self.data);
        command.args(["--threads", &threads.to_string(), "--seed", &seed.to_string()]);
        Running::start(command)?.after("started")
    }

    /// Starts a crowd; returns when it has opened its file. It reads after [`Running::go`].
    pub fn crowd(&self, tree: &Tree, threads: usize) -> Result<Running<oracle::Crowd>> {
        let mut command = self.oracle_command("crowd", "", tree)?;
        command.arg("--threads").arg(threads.to_string());
        Running::start(command)?.after("opened")
    }

    /// Ends every process that still is inside, and with them the namespace.
    pub fn end(mut self) -> Result<()> {
        self.holder.kill()?;
        self.holder.wait()?;
        Ok(())
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.holder.kill(); // ended already: fine
        let _ = self.holder.wait();
    }
}

fn die_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?)
}

/// An oracle at work; its answer is one line of JSON.
#[derive(Debug)]
pub struct Running<T> {
    child: Child,
    lines: mpsc::Receiver<String>,
    kind: std::marker::PhantomData<fn() -> T>,
}

impl<T: serde::de::DeserializeOwned> Running<T> {
    pub fn start(mut command: Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let out = BufReader::new(child.stdout.take().context("stdout is piped")?);
        let (sender, lines) = mpsc::channel();
        // Ends with the child's stdout.
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, lines, kind: std::marker::PhantomData })
    }

    /// Returns when it has said this.
    pub fn after(self, word: &str) -> Result<Self> {
        let first = self.line(Duration::from_secs(120)).context("the oracle did not start")?;
        ensure!(first == word, "the oracle said {first:?}");
        Ok(self)
    }

    /// Closes its stdin, which is what it waits for.
    pub fn go(&mut self) {
        drop(self.child.stdin.take());
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn is_finished(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    fn line(&self, limit: Duration) -> Result<String> {
        self.lines.recv_timeout(limit).context("no line from the oracle")
    }

    /// Waits for the answer. An application that runs until it is stopped is stopped by this.
    pub fn finish(mut self, limit: Duration) -> Result<T> {
        self.go();
        let line = self.line(limit).context("the oracle gave no report: is it stuck in the kernel?")?;
        let answer = serde_json::from_str(&line).with_context(|| line.clone())?;
        self.child.wait()?;
        Ok(answer)
    }

    /// SIGKILL; returns how long it took until the process was gone.
    pub fn kill(&mut self, limit: Duration) -> Result<(Duration, ExitStatus)> {
        let begun = Instant::now();
        self.child.kill()?;
        while begun.elapsed() < limit {
            if let Some(status) = self.child.try_wait()? {
                return Ok((begun.elapsed(), status));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        anyhow::bail!("process {} is still there {limit:?} after SIGKILL", self.child.id())
    }
}

impl<T> Drop for Running<T> {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            // Not waited for without limit: a process that is stuck in a FUSE request would hang the test here. It is
            // reaped by init when the test ends, and the leftover check reports it.
            for _ in 0..200 {
                if !matches!(self.child.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = writeln!(io::stderr(), "e2e: oracle {} could not be killed", self.child.id());
        }
    }
}
