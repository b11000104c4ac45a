//! Where a node of a test lives: one directory with everything in it, and the programs that run from there.

use crate::{clock, mountinfo, processes};
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

const PREFIX: &str = "millpond-e2e-";
/// The programs that a node consists of.
const PROGRAMS: &[&str] = &[
    "csi-plugin",
    "node-agent",
    "fuse-worker",
    "hdfs-helper",
    "millpond",
    "s3-server",
    "shape-proxy",
    "fault-fs",
    "oracle",
    "hostile-agent",
    "hostile-worker",
];

/// Which build of the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    #[default]
    This,
    /// One further in everything that two builds share.
    Next,
    /// Two further.
    Far,
}

impl Version {
    fn word(self) -> Option<&'static str> {
        match self {
            Self::This => None,
            Self::Next => Some("next"),
            Self::Far => Some("far"),
        }
    }
}

/// Only one node at a time per machine: kill tests and timings would disturb each other.
#[derive(Debug)]
pub struct OneAtATime(#[allow(dead_code, reason = "the lock ends when the file is closed")] File);

impl OneAtATime {
    pub fn wait() -> Result<Self> {
        let path = std::env::temp_dir().join("millpond-e2e.lock");
        let file = File::options().create(true).truncate(false).write(true).open(&path)?;
        file.lock().with_context(|| path.display().to_string())?;
        Ok(Self(file))
    }
}

#[derive(Debug)]
pub struct Places {
    root: PathBuf,
}

impl Places {
    /// Creates the tree; directories of the agent belong to `uid`.
    pub fn create(uid: u32) -> Result<Self> {
        sweep(PREFIX)?;
        let root =
            tempfile::Builder::new().prefix(&format!("{PREFIX}{}-", std::process::id())).tempdir()?.keep();
        let places = Self { root };
        fs::set_permissions(&places.root, fs::Permissions::from_mode(0o755))?;
        for dir in ["bin", "buckets", "kubelet", "pods", "logs", "run", "state/plugin"] {
            fs::create_dir_all(places.root.join(dir))?;
        }
        for dir in ["run/agent", "state/agent", "cache/ssd", "cache/meta"] {
            let path = places.root.join(dir);
            fs::create_dir_all(&path)?;
            chown(&path, Some(uid), Some(uid))?;
        }
        places.install()?;
        Ok(places)
    }

    /// The agent runs as a user who may not be able to reach the build directory (a checkout in /root, say).
    fn install(&self) -> Result<()> {
        let from = programs()?;
        for name in PROGRAMS {
            let (source, copy) = (from.join(name), self.bin(name));
            if source.is_file() {
                copy_program(&source, &copy)?;
            }
        }
        Ok(())
    }

    /// As [`Self::bin`], of a version that `scripts/versions` has built.
    pub fn bin_of(&self, version: Version, name: &str) -> Result<PathBuf> {
        let Some(word) = version.word() else { return Ok(self.bin(name)) };
        let source = programs()?.join("versions").join(word).join(name);
        if !source.is_file() {
            bail!("no {}: run `scripts/versions` (or `scripts/versions --release`)", source.display());
        }
        let copy = self.bin(word).join(name);
        if !copy.is_file() {
            fs::create_dir_all(self.bin(word))?;
            copy_program(&source, &copy)?;
        }
        Ok(copy)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }
    pub fn bin(&self, name: &str) -> PathBuf {
        self.root.join("bin").join(name)
    }
    /// One directory per bucket, as the S3 server shows them.
    pub fn buckets(&self) -> PathBuf {
        self.root.join("buckets")
    }
    pub fn kubelet(&self) -> PathBuf {
        self.root.join("kubelet")
    }
    pub fn pods(&self) -> PathBuf {
        self.root.join("pods")
    }
    pub fn cache(&self) -> PathBuf {
        self.root.join("cache")
    }
    pub fn state(&self, of: &str) -> PathBuf {
        self.root.join("state").join(of)
    }
    pub fn csi_socket(&self) -> PathBuf {
        self.root.join("run/csi.sock")
    }
    pub fn broker_socket(&self) -> PathBuf {
        self.root.join("run/broker.sock")
    }
    pub fn agent_socket(&self) -> PathBuf {
        self.root.join("run/agent/api.sock")
    }
    /// One for each version: a process that executes itself anew reads it again.
    pub fn agent_config(&self, version: Version) -> PathBuf {
        self.root.join(format!("run/agent-{}.toml", version.word().unwrap_or("this")))
    }
    /// While this file exists the agent starts no worker.
    pub fn suspend_file(&self) -> PathBuf {
        self.root.join("run/suspend-respawn")
    }
    pub fn log(&self, of: &str) -> PathBuf {
        self.root.join("logs").join(format!("{of}.log"))
    }

    /// The end of every log, for a person who looks at a failed test.
    pub fn logs(&self) -> String {
        let mut all = String::new();
        let Ok(entries) = fs::read_dir(self.root.join("logs")) else { return all };
        let mut paths: Vec<_> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        paths.sort();
        for path in paths {
            let text = fs::read(&path).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            let from = lines.len().saturating_sub(400);
            all +=
                &format!("---- {} ({} lines)\n{}\n", path.display(), lines.len(), lines[from..].join("\n"));
        }
        all
    }

    /// Unmounts, ends and removes everything; says what it had to do that an orderly end would have done before.
    pub fn clean(&self) -> Vec<String> {
        clean(&self.root)
    }
}

fn copy_program(source: &Path, copy: &Path) -> Result<()> {
    if fs::hard_link(source, copy).is_err() {
        fs::copy(source, copy).with_context(|| source.display().to_string())?;
    }
    Ok(())
}

/// The directory with the built programs.
pub fn programs() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("MILLPOND_BIN") {
        return Ok(dir.into());
    }
    let exe = std::env::current_exe()?;
    let found = exe.ancestors().skip(1).take(2).find(|dir| dir.join("node-agent").is_file());
    match found {
        Some(dir) => Ok(dir.to_owned()),
        None => bail!("no node-agent beside {}: run `make build`, or set MILLPOND_BIN", exe.display()),
    }
}

/// Removes what runs that were killed have left, those whose name begins with `prefix`. The caller holds the lock, or has
/// seen the process end whose they are, so nothing that is found is in use.
fn sweep(prefix: &str) -> Result<()> {
    for entry in fs::read_dir(std::env::temp_dir())? {
        let entry = entry?;
        let ours = |name: &str| {
            name.starts_with(prefix) && name.strip_prefix(PREFIX).is_some_and(|rest| rest.contains('-'))
        };
        if entry.file_name().to_str().is_some_and(ours) {
            eprintln!("e2e: cleaning up after a run that was killed: {}", entry.path().display());
            clean(&entry.path());
        }
    }
    Ok(())
}

/// Of a process that was killed: unmounts, ends and removes what its nodes have left.
pub fn clean_up_after(pid: u32) -> Result<()> {
    sweep(&format!("{PREFIX}{pid}-"))
}

fn clean(root: &Path) -> Vec<String> {
    let mut done = Vec::new();
    // Later mounts first. A dead FUSE mount is detached like any other: umount2 does not ask it anything.
    for mount in mountinfo::below(root).unwrap_or_default().into_iter().rev() {
        done.push(format!("mount {} ({})", mount.point.display(), mount.kind));
        if let Err(e) = rustix::mount::unmount(&mount.point, rustix::mount::UnmountFlags::DETACH) {
            done.push(format!("which failed: {e}"));
        }
    }
    for (pid, program) in processes::running_from(&root.join("bin")) {
        done.push(format!("process {pid} ({})", program.display()));
        if let Some(pid) = rustix::process::Pid::from_raw(pid as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL); // gone meanwhile: fine
        }
    }
    clock::wait_until(Duration::from_secs(10), || processes::running_from(&root.join("bin")).is_empty());
    if mountinfo::below(root).is_ok_and(|left| left.is_empty())
        && let Err(e) = fs::remove_dir_all(root)
    {
        done.push(format!("directory {}: {e}", root.display()));
    }
    done
}
