//! The FUSE operations: ask the faults, then do on the directory below what was asked.

use super::nodes::{Nodes, blocks, kind, path};
use super::{Call, Control};
use fuser::*;
use rustix::fs::{AtFlags, Mode, OFlags, SeekFrom};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

/// The directory has no other writer, so the kernel may believe us for a while.
const TTL: Duration = Duration::from_secs(1);
/// Closing a file asks nothing of a local disk, even one that hangs: every process that the agent starts closes what the
/// agent has open.
const CLOSE: FopenFlags = FopenFlags::FOPEN_NOFLUSH;

pub(super) struct FaultFs {
    nodes: Arc<Nodes>,
    control: Control,
    handles: Mutex<HashMap<u64, Handle>>,
    next_handle: AtomicU64,
    /// Held while file data grows or shrinks: used space is measured before and after.
    growing: Mutex<()>,
}

#[derive(Clone)]
enum Handle {
    File(Arc<File>),
    /// As it was at opendir.
    Dir(Arc<Vec<(u64, FileType, OsString)>>),
}

fn os(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

impl FaultFs {
    pub(super) fn new(nodes: Arc<Nodes>, control: Control) -> Self {
        let handles = Mutex::default();
        Self { nodes, control, handles, next_handle: AtomicU64::new(1), growing: Mutex::default() }
    }

    /// Fails if the faults say so. `changes`: does the call need a writable disk?
    fn ask(&self, call: Call, changes: bool) -> io::Result<()> {
        self.hang_at(call);
        let mut state = self.control.lock();
        if state.faults.eio.contains(&call) {
            state.candidates += 1;
            if state.candidates.is_multiple_of(state.faults.every.unwrap_or(1).max(1)) {
                state.status.failed += 1;
                return Err(os(libc::EIO));
            }
        }
        if changes && state.faults.readonly {
            state.status.failed += 1;
            return Err(os(libc::EROFS));
        }
        Ok(())
    }

    /// Waits for other faults, if it is this read's turn to hang.
    fn hang(&self) {
        let began = {
            let mut state = self.control.lock();
            if state.hung >= state.faults.hang {
                return;
            }
            state.hung += 1;
            state.generation
        };
        self.wait_for_others(began);
    }

    /// Waits for other faults, if calls of this kind hang.
    fn hang_at(&self, call: Call) {
        let began = {
            let state = self.control.lock();
            if !state.faults.hangs.contains(&call) {
                return;
            }
            state.generation
        };
        self.wait_for_others(began);
    }

    fn wait_for_others(&self, began: u64) {
        self.control.lock().status.hanging += 1;
        while self.control.lock().generation == began {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.control.lock().status.hanging -= 1;
    }

    fn handles(&self) -> MutexGuard<'_, HashMap<u64, Handle>> {
        self.handles.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn keep(&self, handle: Handle) -> FileHandle {
        let number = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.handles().insert(number, handle);
        FileHandle(number)
    }

    fn file(&self, handle: FileHandle) -> io::Result<Arc<File>> {
        match self.handles().get(&handle.0) {
            Some(Handle::File(file)) => Ok(file.clone()),
            _ => Err(os(libc::EBADF)),
        }
    }

    /// Does `change` to the file's data and accounts for the space. `grows` is where it may allocate.
    fn resize<T>(
        &self,
        file: &File,
        grows: Option<(u64, u64)>,
        change: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let _one_at_a_time = self.growing.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some((offset, length)) = grows {
            let mut state = self.control.lock();
            let full = state.faults.budget.is_some_and(|budget| state.status.used + length > budget);
            if full && !allocated(file, offset, length) {
                state.status.failed += 1;
                return Err(os(libc::ENOSPC));
            }
        }
        let before = blocks(&rustix::fs::fstat(file)?);
        let result = change();
        let after = blocks(&rustix::fs::fstat(file)?);
        let used = &mut self.control.lock().status.used;
        *used = (*used + after).saturating_sub(before);
        result
    }

    fn open_node(&self, ino: INodeNo, flags: OpenFlags) -> io::Result<File> {
        let writes = flags.0 & libc::O_ACCMODE != libc::O_RDONLY;
        self.ask(Call::Open, writes)?;
        let node = self.nodes.get(ino)?;
        // The kernel sends appends with their offset; O_APPEND below would ignore it.
        let custom =
            flags.0 & !(libc::O_ACCMODE | libc::O_APPEND | libc::O_NOFOLLOW | libc::O_CREAT | libc::O_EXCL);
        let mut options = OpenOptions::new();
        options
            .read(flags.0 & libc::O_ACCMODE != libc::O_WRONLY)
            .write(writes)
            .custom_flags(custom & !libc::O_TRUNC);
        let file = options.open(path(&node))?;
        if flags.0 & libc::O_TRUNC != 0 && writes {
            self.resize(&file, None, || file.set_len(0))?;
        }
        Ok(file)
    }

    /// A name was made by us, as root: it belongs to the caller.
    fn made(&self, req: &Request, parent: INodeNo, name: &OsStr) -> io::Result<FileAttr> {
        let dir = self.nodes.get(parent)?;
        let (uid, gid) = (rustix::fs::Uid::from_raw(req.uid()), rustix::fs::Gid::from_raw(req.gid()));
        rustix::fs::chownat(&*dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        self.nodes.lookup(parent, name)
    }

    fn forget_node(&self, ino: INodeNo, count: u64) {
        let freed = self.nodes.forget(ino, count);
        let used = &mut self.control.lock().status.used;
        *used = used.saturating_sub(freed);
    }

    fn change_attributes(&self, ino: INodeNo, change: &Change) -> io::Result<FileAttr> {
        self.ask(Call::Write, true)?;
        let node = self.nodes.get(ino)?;
        let path = path(&node);
        if let Some(mode) = change.mode {
            rustix::fs::chmod(&path, Mode::from_raw_mode(mode))?;
        }
        if change.uid.is_some() || change.gid.is_some() {
            let (uid, gid) =
                (change.uid.map(rustix::fs::Uid::from_raw), change.gid.map(rustix::fs::Gid::from_raw));
            rustix::fs::chownat(&*node, "", uid, gid, AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW)?;
        }
        if let Some(size) = change.size {
            let file = OpenOptions::new().write(true).open(&path)?;
            self.resize(&file, None, || file.set_len(size))?;
        }
        if change.atime.is_some() || change.mtime.is_some() {
            let time = |time: Option<TimeOrNow>| match time {
                None => rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
                Some(TimeOrNow::Now) => rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
                Some(TimeOrNow::SpecificTime(time)) => {
                    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                    rustix::fs::Timespec {
                        tv_sec: since.as_secs() as i64,
                        tv_nsec: since.subsec_nanos().into(),
                    }
                }
            };
            let times = rustix::fs::Timestamps {
                last_access: time(change.atime),
                last_modification: time(change.mtime),
            };
            rustix::fs::utimensat(rustix::fs::CWD, &path, &times, AtFlags::empty())?;
        }
        self.nodes.attributes(ino)
    }
}

struct Change {
    mode: Option<u32>,
    uid: Option<u32>,
    gid: Option<u32>,
    size: Option<u64>,
    atime: Option<TimeOrNow>,
    mtime: Option<TimeOrNow>,
}

/// Overwriting costs no space: a full disk still takes it.
fn allocated(file: &File, offset: u64, length: u64) -> bool {
    let end = offset + length;
    let size = file.metadata().map_or(0, |found| found.len());
    end <= size && rustix::fs::seek(file, SeekFrom::Hole(offset)).is_ok_and(|hole| hole >= end)
}

/// Answers with the value or the errno.
macro_rules! answer {
    ($reply:ident, $result:expr, $value:pat => $ok:expr) => {
        match $result {
            Ok($value) => $ok,
            Err(e) => $reply.error(Errno::from(io::Error::from(e))),
        }
    };
}

impl Filesystem for FaultFs {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.ask(Call::Stat, false).and_then(|()| self.nodes.lookup(parent, name));
        answer!(reply, found, attr => reply.entry(&TTL, &attr, Generation(0)))
    }

    fn forget(&self, _: &Request, ino: INodeNo, count: u64) {
        self.forget_node(ino, count);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.ask(Call::Stat, false).and_then(|()| self.nodes.attributes(ino));
        answer!(reply, found, attr => reply.attr(&TTL, &attr))
    }

    fn setattr(
        &self,
        _: &Request,
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
        let change = Change { mode, uid, gid, size, atime, mtime };
        answer!(reply, self.change_attributes(ino, &change), attr => reply.attr(&TTL, &attr))
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        let target = self.nodes.get(ino).and_then(|node| Ok(rustix::fs::readlinkat(&*node, "", Vec::new())?));
        answer!(reply, target, target => reply.data(target.as_bytes()))
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let made = self.ask(Call::Metadata, true).and_then(|()| {
            rustix::fs::mkdirat(&*self.nodes.get(parent)?, name, Mode::from_raw_mode(mode & !umask))?;
            self.made(req, parent, name)
        });
        answer!(reply, made, attr => reply.entry(&TTL, &attr, Generation(0)))
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let made = self.ask(Call::Metadata, true).and_then(|()| {
            rustix::fs::symlinkat(target, &*self.nodes.get(parent)?, name)?;
            self.made(req, parent, name)
        });
        answer!(reply, made, attr => reply.entry(&TTL, &attr, Generation(0)))
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let made = self.ask(Call::Metadata, true).and_then(|()| {
            let (node, dir) = (self.nodes.get(ino)?, self.nodes.get(parent)?);
            rustix::fs::linkat(rustix::fs::CWD, path(&node), &*dir, name, AtFlags::SYMLINK_FOLLOW)?;
            self.nodes.lookup(parent, name)
        });
        answer!(reply, made, attr => reply.entry(&TTL, &attr, Generation(0)))
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        // The kernel has looked the name up before, so the node is known and its space is freed when it is forgotten.
        let done = self
            .ask(Call::Metadata, true)
            .and_then(|()| Ok(rustix::fs::unlinkat(&*self.nodes.get(parent)?, name, AtFlags::empty())?));
        answer!(reply, done, () => reply.ok())
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self
            .ask(Call::Metadata, true)
            .and_then(|()| Ok(rustix::fs::unlinkat(&*self.nodes.get(parent)?, name, AtFlags::REMOVEDIR)?));
        answer!(reply, done, () => reply.ok())
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let done = self.ask(Call::Metadata, true).and_then(|()| {
            let (from, to) = (self.nodes.get(parent)?, self.nodes.get(new_parent)?);
            let flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
            Ok(rustix::fs::renameat_with(&*from, name, &*to, new_name, flags)?)
        });
        answer!(reply, done, () => reply.ok())
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        answer!(reply, self.open_node(ino, flags), file => {
            let hangs = {
                let faults = &self.control.lock().faults;
                faults.hang > 0 || faults.hangs.contains(&Call::Read)
            };
            let direct = if hangs { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::empty() };
            reply.opened(self.keep(Handle::File(Arc::new(file))), direct | CLOSE);
        })
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let made = self.ask(Call::Open, true).and_then(|()| {
            let dir = self.nodes.get(parent)?;
            let flags = (flags & !(libc::O_APPEND | libc::O_ACCMODE)) | libc::O_RDWR | libc::O_CREAT;
            let flags = OFlags::from_bits_retain(flags as u32) | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let fd = rustix::fs::openat(&*dir, name, flags, Mode::from_raw_mode(mode & !umask))?;
            Ok((File::from(fd), self.made(req, parent, name)?))
        });
        answer!(reply, made, (file, attr) => {
            let handle = self.keep(Handle::File(Arc::new(file)));
            reply.created(&TTL, &attr, Generation(0), handle, CLOSE);
        })
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.hang();
        let data = self.ask(Call::Read, false).and_then(|()| {
            let file = self.file(handle)?;
            let mut buffer = Vec::with_capacity(size as usize);
            rustix::io::pread(&*file, rustix::buffer::spare_capacity(&mut buffer), offset)?;
            buffer.truncate(size as usize);
            Ok(buffer)
        });
        answer!(reply, data, data => reply.data(&data))
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.ask(Call::Write, true).and_then(|()| {
            // Pages of a shared mapping may come with a guessed handle, or after the last one is closed.
            let file = match self.file(handle) {
                Ok(file) => file,
                Err(_) => Arc::new(OpenOptions::new().write(true).open(path(&*self.nodes.get(ino)?))?),
            };
            self.resize(&file, Some((offset, data.len() as u64)), || file.write_all_at(data, offset))
        });
        answer!(reply, written, () => reply.written(data.len() as u32))
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.handles().remove(&handle.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let done = self.ask(Call::Fsync, false).and_then(|()| {
            let file = self.file(handle)?;
            if datasync { file.sync_data() } else { file.sync_all() }
        });
        answer!(reply, done, () => reply.ok())
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let names = self.ask(Call::Stat, false).and_then(|()| self.nodes.get(ino)).and_then(|node| {
            let fd = rustix::fs::open(
                path(&node),
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            let mut names = Vec::new();
            for entry in rustix::fs::Dir::new(fd)? {
                let entry = entry?;
                let kind = kind(entry.file_type().as_raw_mode());
                names.push((entry.ino(), kind, OsStr::from_bytes(entry.file_name().to_bytes()).to_owned()));
            }
            Ok(names)
        });
        answer!(reply, names, names => {
            reply.opened(self.keep(Handle::Dir(Arc::new(names))), FopenFlags::empty());
        })
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let Some(Handle::Dir(names)) = self.handles().get(&handle.0).cloned() else {
            return reply.error(Errno::EBADF);
        };
        for (index, (ino, kind, name)) in names.iter().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(*ino), index as u64 + 1, *kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.handles().remove(&handle.0);
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let done =
            self.ask(Call::Fsync, false).and_then(|()| File::open(path(&*self.nodes.get(ino)?))?.sync_all());
        answer!(reply, done, () => reply.ok())
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        if let Err(error) = self.ask(Call::Stat, false) {
            return reply.error(Errno::from(error));
        }
        let (budget, used) = {
            let state = self.control.lock();
            (state.faults.budget, state.status.used)
        };
        let below = self.nodes.get(INodeNo::ROOT).and_then(|root| Ok(rustix::fs::fstatvfs(&*root)?));
        answer!(reply, below, below => {
            let block = below.f_frsize.max(1);
            let (total, free) = match budget {
                Some(budget) => (budget / block, budget.saturating_sub(used) / block),
                None => (below.f_blocks, below.f_bfree),
            };
            let available = if budget.is_some() { free } else { below.f_bavail };
            reply.statfs(total, free, available, below.f_files, below.f_ffree, block as u32, 255, block as u32);
        })
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let done = self.ask(Call::Write, true).and_then(|()| {
            let file = self.file(handle)?;
            let flags = rustix::fs::FallocateFlags::from_bits_retain(mode as u32);
            let frees = flags.contains(rustix::fs::FallocateFlags::PUNCH_HOLE);
            let grows = (!frees).then_some((offset, length));
            self.resize(&file, grows, || Ok(rustix::fs::fallocate(&*file, flags, offset, length)?))
        });
        answer!(reply, done, () => reply.ok())
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let found = self.file(handle).and_then(|file| {
            let offset = u64::try_from(offset).map_err(|_| os(libc::EINVAL))?;
            let to = match whence {
                libc::SEEK_DATA => SeekFrom::Data(offset),
                libc::SEEK_HOLE => SeekFrom::Hole(offset),
                _ => return Err(os(libc::EINVAL)),
            };
            Ok(rustix::fs::seek(&*file, to)?)
        });
        answer!(reply, found, offset => reply.offset(offset as i64))
    }
}
