//! fuser's callbacks, turned into calls of the file system. No decision is made here.
//!
//! fuser's reply objects are not used: each request is answered through the transport, which knows whether the answer
//! arrived. They own no memory as long as nothing was added to them; forgetting one leaks a count of fuser's handle of
//! `/dev/null`, which the end of the process takes along.

use crate::errno::Failure;
use crate::fs::{Batch, Fs};
use crate::init::Offer;
use crate::reply::Reply;
use crate::transport::{Transport, current};
use fuser::{
    BsdFileFlags, FileHandle, Filesystem, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyStatfs, ReplyXattr, Request, TimeOrNow,
};
use link::writable::{Owner, SetAttributes, Wrong};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Requests that the kernel sends ahead; 12, its default, costs a third of the throughput.
const BACKGROUND_MAX: u16 = 128;
/// Together with max_pages: how much one READ may ask for.
const READ_MAX: u32 = 1 << 20;

pub(crate) struct Adapter {
    pub(crate) fs: Arc<Fs>,
    pub(crate) transport: Arc<Transport>,
    pub(crate) offer: Offer,
}

impl Adapter {
    fn reply<T>(&self, request: &Request, unused: T) -> Reply {
        std::mem::forget(unused);
        Reply::new(self.transport.clone(), request.unique().0)
    }

    fn batch(dir: INodeNo, offset: u64, plus: bool) -> Batch {
        Batch { dir: dir.0, offset, bytes_max: current().listing_bytes as usize, plus }
    }
}

/// Of a mode, what is not its type.
const PERMISSIONS: u32 = 0o7777;

/// The kernel has applied the umask.
fn owner(request: &Request, mode: u32) -> Owner {
    Owner { mode: mode & PERMISSIONS, uid: request.uid(), gid: request.gid() }
}

/// Since 1970.
fn nanoseconds(time: TimeOrNow) -> i64 {
    let time = match time {
        TimeOrNow::SpecificTime(time) => time,
        TimeOrNow::Now => SystemTime::now(),
    };
    let of = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => of(since),
        Err(before) => -of(before.duration()),
    }
}

impl Filesystem for Adapter {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = self.offer.flags;
        if wanted.contains(InitFlags::FUSE_PASSTHROUGH) {
            config.set_max_stack_depth(1).map_err(|most| io::Error::other(format!("stack depth {most}")))?;
        }
        if let Err(missing) = config.add_capabilities(wanted) {
            let _ = config.add_capabilities(wanted & !missing);
        }
        // fuser derives max_pages from this; the transport tells the kernel a smaller max_write.
        let _ = config.set_max_write(READ_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.fs.lookup(parent.0, name.as_bytes(), self.reply(request, reply));
    }

    fn getattr(&self, request: &Request, ino: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        self.fs.getattr(ino.0, handle.is_some(), self.reply(request, reply));
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        self.fs.readlink(ino.0, self.reply(request, reply));
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.fs.open(ino.0, flags.0, self.reply(request, reply));
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.fs.read(ino.0, handle.0, offset, size, self.reply(request, reply));
    }

    fn flush(&self, request: &Request, ino: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.fs.flush(ino.0, handle.0, self.reply(request, reply));
    }

    fn fsync(&self, request: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.fs.fsync(ino.0, self.reply(request, reply));
    }

    fn fsyncdir(&self, request: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.fs.fsync(ino.0, self.reply(request, reply));
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mode = mode.map(|mode| mode & PERMISSIONS);
        let (atime_ns, mtime_ns) = (atime.map(nanoseconds), mtime.map(nanoseconds));
        let set = SetAttributes { mode, uid, gid, size, atime_ns, mtime_ns };
        self.fs.setattr(ino.0, set, self.reply(request, reply));
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        self.fs.create(parent.0, name.as_bytes(), owner(request, mode), flags, self.reply(request, reply));
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let reply = self.reply(request, reply);
        match mode & libc::S_IFMT {
            libc::S_IFREG | 0 => self.fs.make_file(parent.0, name.as_bytes(), owner(request, mode), reply),
            _ => reply.fail(Failure::Wrong(Wrong::NotPermitted)), // no store knows devices, pipes and sockets
        }
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        self.fs.mkdir(parent.0, name.as_bytes(), owner(request, mode), self.reply(request, reply));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.fs.unlink(parent.0, name.as_bytes(), self.reply(request, reply));
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.fs.rmdir(parent.0, name.as_bytes(), self.reply(request, reply));
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        to: INodeNo,
        to_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((parent.0, name.as_bytes()), (to.0, to_name.as_bytes()));
        self.fs.rename(from, to, flags.bits(), self.reply(request, reply));
    }

    fn release(
        &self,
        request: &Request,
        ino: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.fs.release(ino.0, self.reply(request, reply));
    }

    fn opendir(&self, request: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.fs.opendir(self.reply(request, reply));
    }

    fn readdir(&self, request: &Request, ino: INodeNo, _: FileHandle, offset: u64, reply: ReplyDirectory) {
        self.fs.readdir(Self::batch(ino, offset, false), self.reply(request, reply));
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.fs.readdir(Self::batch(ino, offset, true), self.reply(request, reply));
    }

    fn releasedir(&self, request: &Request, _: INodeNo, _: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.reply(request, reply).ok();
    }

    fn statfs(&self, request: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.fs.statfs(self.reply(request, reply));
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.fs.getxattr(ino.0, name.as_bytes(), size, self.reply(request, reply));
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.fs.listxattr(ino.0, size, self.reply(request, reply));
    }
}
