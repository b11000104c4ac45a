//! One file through a FUSE mount that passes every read on to it in the kernel and does nothing else: what passthrough
//! itself costs.

use anyhow::{Context, Result};
use fuser::{
    BackgroundSession, BackingId, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyEmpty,
    ReplyEntry, ReplyOpen, Request,
};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, UNIX_EPOCH};

/// The name of the file.
pub const NAME: &str = "file";
const FILE: INodeNo = INodeNo(2);
/// Nothing changes while it is mounted.
const TTL: Duration = Duration::from_secs(3600);

/// Unmounted on drop.
pub struct Mounted(Option<BackgroundSession>);

impl Mounted {
    /// Shows `file` as [`NAME`] in the directory `mountpoint`. Needs root, and Linux 6.9.
    pub fn mount(file: &Path, mountpoint: &Path) -> Result<Self> {
        let backing = File::open(file).with_context(|| file.display().to_string())?;
        let bytes = backing.metadata()?.len();
        let fs = OneFile { backing, bytes, passed_to: OnceLock::new() };
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("passthrough".into()), MountOption::RO];
        let session = fuser::spawn_mount(fs, mountpoint, &config)
            .with_context(|| format!("mount {}", mountpoint.display()))?;
        Ok(Self(Some(session)))
    }

    pub fn unmount(mut self) -> Result<()> {
        match self.0.take() {
            Some(session) => session.umount_and_join().context("unmount"),
            None => Ok(()),
        }
    }
}

struct OneFile {
    backing: File,
    bytes: u64,
    /// Of every open: the kernel takes no second one of an inode that is open.
    passed_to: OnceLock<io::Result<BackingId>>,
}

impl OneFile {
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let root = inode == INodeNo::ROOT;
        FileAttr {
            ino: inode,
            size: if root { 0 } else { self.bytes },
            blocks: self.bytes.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if root { FileType::Directory } else { FileType::RegularFile },
            perm: if root { 0o555 } else { 0o444 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for OneFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let missing = |_| io::Error::other("this kernel has no FUSE passthrough");
        config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).map_err(missing)?;
        config.set_max_stack_depth(1).map(drop).map_err(|_| io::Error::other("no stack depth of one"))
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match parent == INodeNo::ROOT && name == NAME {
            true => reply.entry(&TTL, &self.attributes(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(inode));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.passed_to.get_or_init(|| reply.open_backing(&self.backing)) {
            Ok(backing) => reply.opened_passthrough(FileHandle(0), FopenFlags::empty(), backing),
            Err(error) => reply.error(Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))),
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }
}
