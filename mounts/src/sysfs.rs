//! `/sys` that can be written: container runtimes mount it read-only, even for a privileged container whose root is.

use crate::KernelError;
use rustix::fs::StatVfsMountFlags;
use rustix::mount::MountFlags;
use std::path::Path;

/// Makes the sysfs at `dir` writable in this mount namespace. Its only use here is the readahead of our own mounts.
pub fn make_writable(dir: &Path) -> Result<(), KernelError> {
    let failed = |e| KernelError::call("remount", dir.display().to_string(), e);
    if !rustix::fs::statvfs(dir).map_err(failed)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Ok(());
    }
    // Not MS_BIND: the superblock, of the pod's network namespace, is read-only, too.
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount_remount(dir, flags, "").map_err(failed)
}
