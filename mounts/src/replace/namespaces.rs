//! Which mount namespaces there are: those of the processes in `/proc`. Nothing is asked that could wait for a process.

use crate::{KernelError, MountEntry, parse_mountinfo};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

#[derive(Debug)]
pub(super) struct Namespace {
    /// Its inode number.
    pub(super) id: u64,
    /// A process in it.
    pub(super) pid: u32,
    pub(super) handle: OwnedFd,
}

/// Those that have a mount that `wanted` picks, our own included. Of each namespace the process with the lowest
/// number tells, a container's first.
pub(super) fn with(wanted: impl Fn(&MountEntry) -> bool) -> Result<Vec<Namespace>, KernelError> {
    let mut pids: Vec<u32> = fs::read_dir("/proc")
        .map_err(|e| KernelError::call("list", "/proc", e))?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for pid in pids {
        let process = Path::new("/proc").join(pid.to_string());
        // A process that ended meanwhile, or a thread of the kernel.
        let Ok(handle) = File::open(process.join("ns/mnt")) else { continue };
        let Ok(id) = handle.metadata().map(|m| m.ino()) else { continue };
        if seen.contains(&id) {
            continue;
        }
        let Ok(text) = fs::read(process.join("mountinfo")) else { continue };
        seen.insert(id);
        if parse_mountinfo(&text).iter().any(&wanted) {
            found.push(Namespace { id, pid, handle: handle.into() });
        }
    }
    Ok(found)
}
