//! Volumes that die and are mounted anew, and containers that have them.

use crate::common::init_reply;
use crate::isolated::{Killed, Spreads, Step, in_new_namespace, sleeper};
use crate::server::Server;
use mounts::{
    Connection, Helper, Kernel, Linux, LinuxPaths, MountEntry, MountOptions, MountSource, Replaced,
    Replacement, Target, parse_mountinfo,
};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use std::ffi::{CString, OsString};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const INIT_LIMIT: Duration = Duration::from_secs(10);

pub struct Bench {
    pub dir: PathBuf,
    pub kernel: Linux,
}

pub struct Volume {
    pub target: Target,
    pub source: MountSource,
    pub connection: Connection,
    server: Option<Server>,
}

impl Bench {
    pub fn new(dir: &Path) -> Self {
        let helper = Helper::new(
            std::env::current_exe().unwrap(),
            ["--exact", "helper_child", "--nocapture", "--test-threads=1"].map(OsString::from),
        );
        Self { dir: dir.to_owned(), kernel: Linux::new(LinuxPaths::default(), Vec::new(), helper) }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Serves files that hold `label`.
    pub fn mount(&self, name: &str, label: &str) -> Volume {
        self.mount_with(name, label, MountOptions::default())
    }

    pub fn mount_with(&self, name: &str, label: &str, options: MountOptions) -> Volume {
        fs::create_dir_all(self.path(name)).unwrap();
        let target = Target::resolve(std::slice::from_ref(&self.dir), &self.path(name)).unwrap();
        let source = MountSource::new(name, "00ff", options);
        let device = self.kernel.open_device().expect("these tests need /dev/fuse");
        let connection = self.kernel.mount(&target, device.as_fd(), &source, options).unwrap();
        let server = self.serve(device, label);
        Volume { target, source, connection, server: Some(server) }
    }

    fn serve(&self, device: std::os::fd::OwnedFd, label: &str) -> Server {
        let init = self.kernel.read_init(device.as_fd(), INIT_LIMIT).unwrap();
        self.kernel.write_init_reply(device.as_fd(), &init_reply(&init)).unwrap();
        Server::start(device, label)
    }

    /// In the place of the dead mount at its target, and nowhere else. Returns what is dead.
    pub fn renew(&self, volume: &mut Volume, label: &str) -> Connection {
        let device = self.kernel.open_device().unwrap();
        let options = volume.source.options();
        let mount = self.kernel.mount_detached(device.as_fd(), &volume.source, options).unwrap();
        volume.server = Some(self.serve(device, label));
        let dead = std::mem::replace(&mut volume.connection, mount.connection);
        self.kernel.put(&mount, &volume.target, dead).unwrap();
        dead
    }

    pub fn replace(&self, volume: &Volume, dead: &[Connection]) -> Replaced {
        let replacement = Replacement {
            target: volume.target.path().to_owned(),
            new: volume.connection,
            dead: dead.to_vec(),
            volume: volume.source.volume.clone(),
        };
        self.kernel.replace(&replacement).unwrap()
    }

    /// Every namespace that has it gets the new one.
    pub fn renew_everywhere(&self, volume: &mut Volume, label: &str) -> Replaced {
        let dead = self.renew(volume, label);
        self.replace(volume, &[dead])
    }

    pub fn table(&self) -> Vec<MountEntry> {
        self.kernel.table().unwrap()
    }
}

impl Volume {
    pub fn path(&self) -> &Path {
        self.target.path()
    }

    /// As when broker, agent and workers are killed.
    pub fn die(&mut self) {
        self.server.take().unwrap().kill();
    }
}

/// Processes in a mount namespace of their own.
pub struct Container(Killed);

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// `mount --bind from to`, with these flags set on it.
pub fn bind(from: &Path, to: &Path, flags: MountFlags) -> Step {
    let (from, to) = (c(from), c(to));
    Box::new(move || -> io::Result<()> {
        rustix::mount::mount_bind(&*from, &*to)?;
        Ok(rustix::mount::mount_remount(&*to, flags | MountFlags::BIND, c"")?)
    })
}

pub fn propagation(at: &Path, how: MountPropagationFlags) -> Step {
    let at = c(at);
    Box::new(move || Ok(rustix::mount::mount_change(&*at, how)?))
}

impl Container {
    /// Sees of the bench's mounts only what `steps` give it.
    pub fn start(bench: &Bench, mut steps: Vec<Step>) -> Self {
        for entry in bench.table().into_iter().rev().filter(|e| e.mount_point.starts_with(&bench.dir)) {
            let at = c(&entry.mount_point);
            steps.push(Box::new(move || Ok(rustix::mount::unmount(&*at, UnmountFlags::DETACH)?)));
        }
        let mut command = sleeper();
        in_new_namespace(&mut command, Spreads::Nowhere, steps);
        Self(Killed(command.spawn().unwrap()))
    }

    /// Sees everything, what is mounted on shared mounts later, too: like the host to a plugin in a container.
    pub fn host() -> Self {
        let mut command = sleeper();
        in_new_namespace(&mut command, Spreads::Here, vec![]);
        Self(Killed(command.spawn().unwrap()))
    }

    /// One that has `volume` at `at`.
    pub fn with(bench: &Bench, volume: &Volume, at: &Path) -> Self {
        fs::create_dir_all(at).unwrap();
        Self::start(bench, vec![bind(volume.path(), at, MountFlags::RDONLY | MountFlags::NOSUID)])
    }

    fn pid(&self) -> u32 {
        self.0.0.id()
    }

    /// A path as it is inside.
    pub fn inside(&self, path: &Path) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{}", self.pid(), path.display()))
    }

    pub fn read(&self, path: &Path) -> io::Result<String> {
        fs::read_to_string(self.inside(path))
    }

    pub fn table(&self) -> Vec<MountEntry> {
        parse_mountinfo(&fs::read(format!("/proc/{}/mountinfo", self.pid())).unwrap())
    }

    pub fn line(&self, at: &Path) -> String {
        let text = fs::read_to_string(format!("/proc/{}/mountinfo", self.pid())).unwrap();
        let here = format!(" {} ", at.display());
        text.lines().rfind(|line| line.contains(&here)).expect("mounted").to_owned()
    }
}
