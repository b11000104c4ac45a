//! FUSE mounts that are nowhere yet: made and served first, put in a dead mount's place when they work.

use crate::place::{Descriptors, ONTO, shown, swap};
use crate::{Connection, FUSE_TYPE, KernelError, MountOptions, MountSource, Target};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Ends when it is dropped, unless it was put somewhere.
#[derive(Debug)]
pub struct Detached {
    pub connection: Connection,
    pub(crate) mount: OwnedFd,
}

impl Detached {
    pub(crate) fn make(
        device: BorrowedFd<'_>,
        source: &MountSource,
        options: MountOptions,
    ) -> Result<Self, KernelError> {
        let make = || -> rustix::io::Result<Self> {
            let (kind, subtype) = FUSE_TYPE.split_once('.').unwrap_or((FUSE_TYPE, ""));
            let fs = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
            let device = device.as_raw_fd().to_string();
            for (key, value) in [
                ("source", source.fuse_text().as_str()),
                ("subtype", subtype),
                ("fd", &device),
                ("rootmode", "40000"),
                ("user_id", "0"),
                ("group_id", "0"),
            ] {
                rustix::mount::fsconfig_set_string(&fs, key, value)?;
            }
            // The superblock, too: a container that remounts its own mount can make only that one writable.
            if !options.writable {
                rustix::mount::fsconfig_set_flag(&fs, "ro")?;
            }
            for flag in ["default_permissions", "allow_other"] {
                rustix::mount::fsconfig_set_flag(&fs, flag)?;
            }
            rustix::mount::fsconfig_create(&fs)?;
            let mut flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
            flags.set(MountAttrFlags::MOUNT_ATTR_RDONLY, !options.writable);
            flags.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, options.no_exec);
            flags.set(MountAttrFlags::MOUNT_ATTR_NOATIME, options.no_atime);
            let mount = rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, flags)?;
            Ok(Self { connection: shown(&mount)?.device, mount })
        };
        make().map_err(|e| KernelError::call("make a mount of", source.fuse_text(), e))
    }

    /// On top at `target` is a mount of the dead connection `dead`, which goes; what lies below it stays.
    pub(crate) fn put(&self, target: &Target, dead: Connection) -> Result<(), KernelError> {
        let failed = |e: rustix::io::Errno| {
            KernelError::call("replace the dead mount at", target.path().display().to_string(), e)
        };
        let old = target.open()?;
        if shown(&old).map_err(failed)?.device != dead {
            return Err(KernelError::Vanished(target.path().to_owned()));
        }
        let place = || {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::open(target.pinned_path(), flags, Mode::empty())
        };
        swap(self.mount.as_fd(), old, Descriptors("/proc/self/fd"), place).map_err(failed)
    }

    /// On top at `target` is a guard, by its device number.
    pub(crate) fn put_on(&self, target: &Target, guard: Connection) -> Result<(), KernelError> {
        let failed =
            |e: rustix::io::Errno| KernelError::call("mount at", target.path().display().to_string(), e);
        let place = target.open()?;
        if shown(&place).map_err(failed)?.device != guard {
            return Err(KernelError::Vanished(target.path().to_owned()));
        }
        rustix::mount::move_mount(&self.mount, "", &place, "", ONTO).map_err(failed)
    }
}
