//! One that is measured: where its files are, and which processes serve them.

use super::peers::{self, Access};
use super::who::Who;
use super::workload::Mode;
use crate::clock::wait_until;
use crate::node::{Mounted, Node};
use crate::processes::{self, Memory};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use testkit::process::Process;

/// How long the store may take to get what was written.
const STORED_LIMIT: Duration = Duration::from_secs(300);

pub(super) struct Subject {
    pub(super) who: Who,
    pub(super) root: PathBuf,
    mounted: Option<Mounted>,
    peer: Option<Process>,
}

impl Subject {
    /// Something that nobody mounts.
    pub(super) fn bare(who: Who, root: impl Into<PathBuf>) -> Self {
        Self { who, root: root.into(), mounted: None, peer: None }
    }

    /// A prefix of the bucket; one that was not mounted before starts cold.
    pub(super) fn mount(
        node: &mut Node,
        who: Who,
        prefix: &str,
        endpoint: &str,
        profile: &str,
    ) -> Result<Self> {
        match who {
            Who::Native => Ok(Self::bare(who, node.server.dir().join(prefix))),
            Who::Millpond => {
                let name = format!("{prefix}-{profile}").replace('/', "-");
                // The endpoint may be another than the server's own: a link to it.
                let address = node.options().store.address(endpoint, prefix);
                let mut more = vec![("profile", profile), ("freshness", "static")];
                more.extend(address.iter().map(|(name, value)| (*name, value.as_str())));
                let mounted = node.volume(&name, prefix, &more)?;
                Ok(Self { who, root: mounted.target.clone(), mounted: Some(mounted), peer: None })
            }
            _ => Self::mount_peer(node, who, prefix, endpoint, Access::Read),
        }
    }

    /// The same, to be written to. A peer has one way to write, whatever `mode` says.
    pub(super) fn mount_writable(
        node: &mut Node,
        who: Who,
        prefix: &str,
        endpoint: &str,
        mode: Mode,
    ) -> Result<Self> {
        if who != Who::Millpond {
            return Self::mount_peer(node, who, prefix, endpoint, Access::Write);
        }
        let address = node.options().store.address(endpoint, prefix);
        let mut more = vec![("writeMode", mode.name())];
        more.extend(address.iter().map(|(name, value)| (*name, value.as_str())));
        let mounted = node.workspace(&format!("{prefix}-{}", mode.name()), prefix, &more)?;
        Ok(Self { who, root: mounted.target.clone(), mounted: Some(mounted), peer: None })
    }

    /// Returns when the store has everything that was written here, of those of whom that can be asked.
    pub(super) fn wait_stored(&self, node: &Node) -> Result<()> {
        let Some(mounted) = &self.mounted else { return Ok(()) };
        let end = Instant::now() + STORED_LIMIT;
        while node.agent().staged(&mounted.id)? > 0 {
            ensure!(Instant::now() < end, "the store does not have all within {STORED_LIMIT:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn mount_peer(node: &Node, who: Who, prefix: &str, endpoint: &str, access: Access) -> Result<Self> {
        let scratch =
            node.places().root().join("peers").join(format!("{}-{prefix}", who.name()).replace('/', "-"));
        let (dir, cache) = (scratch.join("mount"), scratch.join("cache"));
        for d in [&dir, &cache] {
            std::fs::create_dir_all(d)?;
        }
        let program =
            peers::program(who.name()).with_context(|| format!("{} is not installed", who.name()))?;
        let mut command = peers::command(who, access, &program, (prefix, endpoint), &dir, &cache)?;
        let log = std::fs::File::create(node.places().log(who.name()))?;
        let process = Process::spawn(command.stdout(log.try_clone()?).stderr(log))?;
        let subject = Self { who, root: dir, mounted: None, peer: Some(process) };
        let before = std::fs::metadata(&scratch)?;
        let mounted = wait_until(Duration::from_secs(30), || {
            use std::os::unix::fs::MetadataExt;
            std::fs::metadata(&subject.root).is_ok_and(|now| now.dev() != before.dev())
        });
        ensure!(mounted, "{} did not mount: {}", who.name(), node.places().logs());
        Ok(subject)
    }

    pub(super) fn unmount(mut self, node: &mut Node) -> Result<()> {
        if let Some(mounted) = self.mounted.take() {
            node.unpublish(&mounted)?;
        }
        self.end_peer().context("unmount a peer")
    }

    fn end_peer(&mut self) -> Result<()> {
        let Some(peer) = self.peer.take() else { return Ok(()) };
        let unmounted = rustix::mount::unmount(&self.root, rustix::mount::UnmountFlags::DETACH);
        drop(peer);
        Ok(unmounted?)
    }

    /// Of all processes that serve this subject.
    pub(super) fn memory(&self, node: &Node) -> Memory {
        match (&self.peer, self.who) {
            (Some(peer), _) => {
                let mut memory = Memory::of(peer.pid());
                for child in processes::children(peer.pid()) {
                    memory += Memory::of(child);
                }
                memory
            }
            (None, Who::Millpond) => {
                let mut memory = node.agent().memory();
                // The parts of uploads that are on their way.
                memory.shared += processes::unmapped_memory_files(node.agent().pid());
                memory
            }
            (None, _) => Memory::default(),
        }
    }

    pub(super) fn cpu_time(&self, node: &Node) -> Duration {
        match (&self.peer, self.who) {
            (Some(peer), _) => processes::cpu_time(peer.pid()),
            (None, Who::Millpond) => node.agent().cpu_time(),
            (None, Who::Curl | Who::EightCurls | Who::ManyCurls | Who::EightUploads) => {
                processes::reaped_time()
            }
            (None, _) => Duration::ZERO,
        }
    }
}

impl Drop for Subject {
    /// Of a row that has failed: the next one must not find its mount.
    fn drop(&mut self) {
        if let Err(error) = self.end_peer() {
            eprintln!("bench: {} stays mounted: {error:#}", self.who.name());
        }
    }
}
