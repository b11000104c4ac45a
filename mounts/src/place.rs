//! Mounts by descriptor: which mount a descriptor shows, and how one takes another's place.
//!
//! Nothing here asks a FUSE worker, and nothing follows a path that another process could change meanwhile.

use crate::Connection;
use rustix::fs::{AtFlags, Statx, StatxAttributes, StatxFlags};
use rustix::io::{Errno, Result};
use rustix::mount::{MoveMountFlags, UnmountFlags};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) mount_id: u64,
    pub(crate) device: Connection,
}

/// Which mount does this descriptor (of any file in it, `O_PATH` too) belong to?
pub(crate) fn shown(file: impl AsFd) -> Result<Shown> {
    // The kernel's own knowledge: without DONT_SYNC it would ask the worker, which a dead mount does not have.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, "", flags, StatxFlags::MNT_ID).map(Shown::of)
}

/// What is mounted at `name` in `parent`; None: nothing.
pub(crate) fn shown_at(parent: impl AsFd, name: &OsStr) -> Result<Option<Shown>> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    match rustix::fs::statx(parent, name, flags, StatxFlags::MNT_ID) {
        Ok(stat) if stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) => Ok(Some(Shown::of(stat))),
        Ok(_) | Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Shown {
    fn of(stat: Statx) -> Self {
        let device = Connection { major: stat.stx_dev_major, minor: stat.stx_dev_minor };
        Self { mount_id: stat.stx_mnt_id, device }
    }
}

/// A directory with this process's descriptors by number, through which calls that want a path reach a mount.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptors(pub(crate) &'static str);

impl Descriptors {
    pub(crate) fn path(self, file: BorrowedFd<'_>) -> PathBuf {
        Path::new(self.0).join(file.as_raw_fd().to_string())
    }
}

pub(crate) const ONTO: MoveMountFlags =
    MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH.union(MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH);

/// Puts `new`, a mount that is nowhere, where `old` is, which goes. `place` opens the mount point when `old` is gone.
pub(crate) fn swap(
    new: BorrowedFd<'_>,
    old: OwnedFd,
    descriptors: Descriptors,
    place: impl FnOnce() -> Result<OwnedFd>,
) -> Result<()> {
    // First under the old one, which is then taken off: there is a mount at every moment. Linux 6.5.
    match rustix::mount::move_mount(new, "", &old, "", ONTO | MoveMountFlags::MOVE_MOUNT_BENEATH) {
        Ok(()) => detach(&old, descriptors),
        Err(Errno::INVAL) => swap_with_a_gap(new, old, descriptors, place),
        Err(error) => Err(error),
    }
}

/// For kernels that cannot: for a moment nothing is mounted.
fn swap_with_a_gap(
    new: BorrowedFd<'_>,
    old: OwnedFd,
    descriptors: Descriptors,
    place: impl FnOnce() -> Result<OwnedFd>,
) -> Result<()> {
    detach(&old, descriptors)?;
    rustix::mount::move_mount(new, "", place()?, "", ONTO)
}

fn detach(mount: &OwnedFd, descriptors: Descriptors) -> Result<()> {
    rustix::mount::unmount(descriptors.path(mount.as_fd()), UnmountFlags::DETACH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{parse_mountinfo, stack_at};
    use rustix::fs::{CWD, Mode, OFlags};
    use rustix::mount::{MountFlags, OpenTreeFlags};
    use std::os::fd::OwnedFd;

    /// Unmounts on the way out of a test that fails, too.
    struct Mounted(PathBuf);

    impl Drop for Mounted {
        fn drop(&mut self) {
            while rustix::mount::unmount(&self.0, UnmountFlags::DETACH).is_ok() {}
        }
    }

    fn tmpfs(at: &Path, file: &str) -> Mounted {
        std::fs::create_dir_all(at).unwrap();
        rustix::mount::mount("test", at, "tmpfs", MountFlags::empty(), None).expect("this test needs root");
        std::fs::write(at.join(file), b"").unwrap();
        Mounted(at.to_owned())
    }

    fn open(path: &Path) -> OwnedFd {
        rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }

    const DESCRIPTORS: Descriptors = Descriptors("/proc/self/fd");

    #[test]
    fn one_mount_takes_the_place_of_another_on_new_kernels_and_on_old() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (old, new) = (root.join("old"), root.join("new"));
        let _new = tmpfs(&new, "new");
        for gap in [false, true] {
            let _old = tmpfs(&old, "old");
            let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            let tree = rustix::mount::open_tree(CWD, &new, clone).unwrap();
            let place = || Ok(open(&old));
            match gap {
                false => swap(tree.as_fd(), open(&old), DESCRIPTORS, place).unwrap(),
                true => swap_with_a_gap(tree.as_fd(), open(&old), DESCRIPTORS, place).unwrap(),
            }
            assert!(old.join("new").exists() && !old.join("old").exists(), "gap: {gap}");
            let table = parse_mountinfo(&std::fs::read("/proc/self/mountinfo").unwrap());
            assert_eq!(stack_at(&table, &old).len(), 1, "gap: {gap}");
            let top = stack_at(&table, &old)[0];
            assert_eq!(shown(open(&old)).unwrap(), Shown { mount_id: top.id, device: top.connection() });
        }
    }
}
