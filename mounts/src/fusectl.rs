//! The control file system of FUSE, where this mount namespace may not have it: a container's /sys is its own.

use crate::KernelError;
use rustix::fs::{Mode, OFlags};
use rustix::mount::MountFlags;
use std::path::Path;

/// `FUSE_CTL_SUPER_MAGIC` of the kernel's `fs/fuse/control.c`.
const MAGIC: i64 = 0x6573_5543;

/// Mounts fusectl at `dir` unless it is there. Opening `device` loads the module, which makes the directory.
pub fn ensure(dir: &Path, device: &Path) -> Result<(), KernelError> {
    if is_mounted(dir) {
        return Ok(());
    }
    rustix::fs::open(device, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| KernelError::call("open", device.display().to_string(), e))?;
    rustix::mount::mount(
        "fusectl",
        dir,
        "fusectl",
        MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
        None,
    )
    .map_err(|e| KernelError::call("mount fusectl at", dir.display().to_string(), e))
}

fn is_mounted(dir: &Path) -> bool {
    rustix::fs::statfs(dir).is_ok_and(|s| s.f_type == MAGIC)
}
