//! The inodes that the kernel knows: one O_PATH descriptor each, so that rename and unlink change nothing for us.

use fuser::{FileAttr, FileType, INodeNo};
use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A node's id is its inode number below, but for the root. The descriptor keeps that number from being reused.
#[derive(Debug)]
pub(super) struct Nodes {
    root: Arc<OwnedFd>,
    known: Mutex<HashMap<u64, (Arc<OwnedFd>, u64)>>,
}

impl Nodes {
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        let root = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { root: Arc::new(root), known: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, (Arc<OwnedFd>, u64)>> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn ids(&self) -> Vec<u64> {
        self.lock().keys().copied().chain([INodeNo::ROOT.0]).collect()
    }

    pub(super) fn get(&self, id: INodeNo) -> io::Result<Arc<OwnedFd>> {
        if id == INodeNo::ROOT {
            return Ok(self.root.clone());
        }
        let known = self.lock();
        known.get(&id.0).map(|(fd, _)| fd.clone()).ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))
    }

    /// Finds `name` and counts the kernel's reference to it.
    pub(super) fn lookup(&self, parent: INodeNo, name: &OsStr) -> io::Result<FileAttr> {
        let parent = self.get(parent)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&*parent, name, flags, Mode::empty())?;
        let found = rustix::fs::fstat(&fd)?;
        self.lock().entry(found.st_ino).or_insert_with(|| (Arc::new(fd), 0)).1 += 1;
        Ok(attributes(found.st_ino, &found))
    }

    /// Drops references; returns the bytes that became free because the last name went before.
    pub(super) fn forget(&self, id: INodeNo, count: u64) -> u64 {
        let mut known = self.lock();
        let Some((fd, references)) = known.get_mut(&id.0) else { return 0 };
        *references = references.saturating_sub(count);
        if *references > 0 {
            return 0;
        }
        let freed = match rustix::fs::fstat(&**fd) {
            Ok(found) if found.st_nlink == 0 => blocks(&found),
            _ => 0,
        };
        known.remove(&id.0);
        freed
    }

    pub(super) fn attributes(&self, id: INodeNo) -> io::Result<FileAttr> {
        let found = rustix::fs::statat(&*self.get(id)?, "", AtFlags::EMPTY_PATH)?;
        Ok(attributes(id.0, &found))
    }
}

/// Opening this opens the node itself, whatever its names are by now.
pub(super) fn path(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Allocated bytes.
pub(super) fn blocks(found: &Stat) -> u64 {
    u64::try_from(found.st_blocks).unwrap_or(0) * 512
}

pub(super) fn kind(mode: u32) -> FileType {
    match mode & libc::S_IFMT {
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFLNK => FileType::Symlink,
        libc::S_IFSOCK => FileType::Socket,
        libc::S_IFIFO => FileType::NamedPipe,
        libc::S_IFCHR => FileType::CharDevice,
        libc::S_IFBLK => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

#[allow(clippy::unnecessary_cast)] // The widths differ between platforms.
fn attributes(id: u64, found: &Stat) -> FileAttr {
    let time = |seconds: i64, nanos: i64| -> SystemTime {
        UNIX_EPOCH + Duration::new(u64::try_from(seconds).unwrap_or(0), nanos as u32)
    };
    let mtime = time(found.st_mtime as i64, found.st_mtime_nsec as i64);
    FileAttr {
        ino: INodeNo(id),
        size: u64::try_from(found.st_size).unwrap_or(0),
        blocks: u64::try_from(found.st_blocks).unwrap_or(0),
        atime: time(found.st_atime as i64, found.st_atime_nsec as i64),
        mtime,
        ctime: time(found.st_ctime as i64, found.st_ctime_nsec as i64),
        crtime: mtime,
        kind: kind(found.st_mode),
        perm: (found.st_mode & 0o7777) as u16,
        nlink: found.st_nlink as u32,
        uid: found.st_uid,
        gid: found.st_gid,
        rdev: found.st_rdev as u32,
        blksize: 4096,
        flags: 0,
    }
}
