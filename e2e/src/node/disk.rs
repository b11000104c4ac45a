//! Cache disks that a test controls: a small tmpfs, and a directory behind a file system that fails on request.

use super::places::Places;
use super::server::spawn;
use super::{AgentOptions, Node};
use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, mount};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::chown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use testkit::fault_fs::{DiskFaults, Status};
use testkit::process::Process;

/// A tmpfs of `megabytes`; it disappears with the node's directory.
pub fn small_disk(places: &Places, megabytes: u64, uid: u32) -> Result<PathBuf> {
    let disk = places.cache().join("small-disk");
    std::fs::create_dir(&disk)?;
    let data = std::ffi::CString::new(format!("size={megabytes}m,mode=0755,uid={uid},gid={uid}"))?;
    mount("tmpfs", &disk, "tmpfs", MountFlags::empty(), Some(data.as_c_str()))?;
    Ok(disk)
}

/// A tmpfs of `megabytes` where the agent, which is down, has what was written. It disappears with the node's directory.
fn own_staging_disk(places: &Places, megabytes: u64, uid: u32) -> Result<()> {
    let staging = places.state("agent").join("staging");
    std::fs::create_dir_all(&staging)?;
    let data = std::ffi::CString::new(format!("size={megabytes}m,mode=0700,uid={uid},gid={uid}"))?;
    mount("tmpfs", &staging, "tmpfs", MountFlags::empty(), Some(data.as_c_str()))?;
    Ok(())
}

impl Node {
    /// One whose staging disk has so many megabytes, whatever this machine's has free.
    pub fn on_staging_disk_of(megabytes: u64) -> Result<Self> {
        let mut node = Self::start(AgentOptions::default())?;
        node.stop_agent()?;
        own_staging_disk(&node.places, megabytes, node.options.uid)?;
        node.start_agent()?;
        Ok(node)
    }

    /// One whose staging disk fails as its test says. The disk is to outlive what [`Self::finish`] does.
    pub fn on_faulty_staging_disk(options: AgentOptions) -> Result<(Self, FaultyDisk)> {
        let mut node = Self::start(options)?;
        node.stop_agent()?;
        let disk = FaultyDisk::of_staging(&node.places, node.options.uid)?;
        node.start_agent()?;
        Ok((node, disk))
    }
}

/// `fault-fs` over a directory.
#[derive(Debug)]
pub struct FaultyDisk {
    process: Process,
    control: PathBuf,
    dir: PathBuf,
    mountpoint: PathBuf,
}

impl FaultyDisk {
    /// For the cache.
    pub fn start(places: &Places, uid: u32) -> Result<Self> {
        Self::at(places, places.cache().join("faulty"), uid)
    }

    /// Where the agent, which is down, has what was written.
    fn of_staging(places: &Places, uid: u32) -> Result<Self> {
        Self::at(places, places.state("agent").join("staging"), uid)
    }

    fn at(places: &Places, mountpoint: PathBuf, uid: u32) -> Result<Self> {
        let dir = mountpoint.with_extension("below");
        std::fs::create_dir(&dir)?;
        std::fs::create_dir_all(&mountpoint)?;
        chown(&dir, Some(uid), Some(uid))?;
        let (control, ready) =
            (places.root().join("run/faulty.sock"), places.root().join("run/faulty.ready"));
        let mut command = Command::new(places.bin("fault-fs"));
        command.arg("--dir").arg(&dir).arg("--mountpoint").arg(&mountpoint);
        command.arg("--control").arg(&control).arg("--ready-file").arg(&ready);
        let mut process = spawn(&mut command, places, "fault-fs")?;
        process.wait_for_ready_file(&ready, Duration::from_secs(30))?;
        Ok(Self { process, control, dir, mountpoint })
    }

    pub fn path(&self) -> &Path {
        &self.mountpoint
    }

    /// No process uses it any more. What is on it is gone.
    pub fn end(mut self) -> Result<()> {
        let status = self.process.terminate(Duration::from_secs(30))?;
        ensure!(status.success(), "fault-fs ended with {status}");
        std::fs::remove_dir(&self.mountpoint).context("its mount is left")?;
        Ok(std::fs::remove_dir_all(&self.dir)?)
    }

    /// Replaces all faults; the default mends the disk.
    pub fn set(&self, faults: &DiskFaults) -> Result<Status> {
        let mut socket = UnixStream::connect(&self.control)?;
        writeln!(socket, "{}", serde_json::to_string(faults)?)?;
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line)?;
        ensure!(!line.starts_with("error"), "fault-fs: {line}");
        serde_json::from_str(&line).context(line)
    }
}
