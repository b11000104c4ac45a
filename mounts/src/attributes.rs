//! What a mount carries beside its superblock, flags and propagation: a mount that replaces another one gets the same.

use rustix::mount::{MountAttrFlags, MountFlags, MountPropagationFlags};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    flags: MountFlags,
    propagation: MountPropagationFlags,
}

impl Default for Attributes {
    fn default() -> Self {
        Self { flags: MountFlags::STRICTATIME, propagation: MountPropagationFlags::PRIVATE }
    }
}

impl Attributes {
    /// From the mount options and the optional fields of a line of the mount table.
    pub(crate) fn parse<'l>(options: &[u8], optional: impl Iterator<Item = &'l [u8]>) -> Self {
        let mut flags = MountFlags::empty();
        for option in options.split(|b| *b == b',') {
            flags |= match option {
                b"ro" => MountFlags::RDONLY,
                b"nosuid" => MountFlags::NOSUID,
                b"nodev" => MountFlags::NODEV,
                b"noexec" => MountFlags::NOEXEC,
                b"noatime" => MountFlags::NOATIME,
                b"nodiratime" => MountFlags::NODIRATIME,
                b"relatime" => MountFlags::RELATIME,
                _ => MountFlags::empty(),
            };
        }
        // Said aloud, because a remount that says nothing of access times keeps what it finds.
        if !flags.intersects(MountFlags::NOATIME | MountFlags::RELATIME) {
            flags |= MountFlags::STRICTATIME;
        }
        let mut propagation = MountPropagationFlags::PRIVATE;
        for field in optional {
            if field.starts_with(b"shared:") {
                propagation = MountPropagationFlags::SHARED;
            } else if field.starts_with(b"master:") && propagation != MountPropagationFlags::SHARED {
                propagation = MountPropagationFlags::DOWNSTREAM;
            } else if field == b"unbindable" {
                propagation = MountPropagationFlags::UNBINDABLE;
            }
        }
        Self { flags, propagation }
    }

    /// To the mount at `path`.
    pub(crate) fn apply(self, path: &Path) -> rustix::io::Result<()> {
        rustix::mount::mount_remount(path, self.flags | MountFlags::BIND, "")?;
        rustix::mount::mount_change(path, self.propagation)
    }

    /// To a mount that is nowhere yet. [`Self::apply`] wants a place, and there a process of the container could open a
    /// file for writing before it is told not to. Without the call (Linux 5.12; or a filter refuses it) there is that
    /// moment.
    pub(crate) fn forbid_writes(self, detached: BorrowedFd<'_>) -> std::io::Result<()> {
        if !self.is_read_only() {
            return Ok(());
        }
        let read_only = u64::from(MountAttrFlags::MOUNT_ATTR_RDONLY.bits());
        let attr = libc::mount_attr { attr_set: read_only, attr_clr: 0, propagation: 0, userns_fd: 0 };
        // Needed: neither rustix nor nix has the call. SAFETY: path and struct live through it, the kernel reads them
        // and no more than the size that it is told, and writes to neither.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                libc::c_long::from(detached.as_raw_fd()),
                c"".as_ptr(),
                libc::c_long::from(libc::AT_EMPTY_PATH),
                &raw const attr,
                size_of::<libc::mount_attr>(),
            )
        };
        match (done, std::io::Error::last_os_error()) {
            (0, _) => Ok(()),
            (_, error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => Ok(()),
            (_, error) => Err(error),
        }
    }

    pub fn is_read_only(self) -> bool {
        self.flags.contains(MountFlags::RDONLY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_and_optional_fields_are_understood() {
        let parse = |options: &str, optional: &[&str]| {
            Attributes::parse(options.as_bytes(), optional.iter().map(|o| o.as_bytes()))
        };
        let all = parse("ro,nosuid,nodev,noexec,noatime", &["master:7"]);
        let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        assert_eq!(all.flags, flags | MountFlags::NOATIME);
        assert_eq!(all.propagation, MountPropagationFlags::DOWNSTREAM);
        assert_eq!(parse("rw,relatime", &[]).flags, MountFlags::RELATIME);
        assert_eq!(parse("rw", &[]), Attributes::default());
        for order in [["shared:1", "master:2"], ["master:2", "shared:1"]] {
            assert_eq!(parse("rw", &order).propagation, MountPropagationFlags::SHARED);
        }
        assert!(all.is_read_only() && !Attributes::default().is_read_only());
    }
}
