//! Answers in the kernel's own encoding (include/uapi/linux/fuse.h, protocol 7.31 and later).
//!
//! fuser writes `nodeid = attr.ino` into entry replies, though the kernel keeps the two apart; here a file keeps its
//! inode number when its nodeid changes. A [`Reply`] that is dropped answers EIO, so that no caller waits for ever.

use crate::errno::{Failure, errno};
use fuse_abi::{
    Attr, AttrOut, Dirent, Direntplus, EntryOut, GetxattrOut, Kstatfs, NotifyInvalInodeOut, OpenOut, WriteOut,
};
use fuse_abi::{dirent, notify};
use link::Cause;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// Whether the kernel took an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    Delivered,
    /// It was answered before, or the caller is gone: no RELEASE and no FORGET will come for what was promised.
    Dropped,
}

/// Where answers go: the transport, or a test.
pub trait Sink: Send + Sync {
    /// `error`: 0 or a negative errno.
    fn send(&self, unique: u64, error: i32, body: &[IoSlice<'_>]) -> Delivery;
    /// As `send` of `len` bytes of a file, from `offset` on, without copying them through this process. None: not
    /// possible, the request still waits.
    fn send_file(&self, _: u64, _: BorrowedFd<'_>, _offset: u64, _len: usize) -> Option<Delivery> {
        None
    }
    /// Tells the kernel something that it did not ask for.
    fn notify(&self, code: i32, body: &[u8]);
}

/// What stat shows of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    pub ino: u64,
    pub size: u64,
    /// Bytes that it takes.
    pub stored: u64,
    pub atime_ns: i64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
    /// Type and permissions.
    pub mode: u32,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
}

impl Stat {
    /// Of what only its source changes: it has one time.
    pub fn of_source(ino: u64, size: u64, time_ns: i64, mode: u32, (uid, gid): (u32, u32)) -> Self {
        let links = if mode & libc::S_IFMT == libc::S_IFDIR { 2 } else { 1 };
        let (atime_ns, mtime_ns, ctime_ns) = (time_ns, time_ns, time_ns);
        Self { ino, size, stored: size, atime_ns, mtime_ns, ctime_ns, mode, links, uid, gid }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub nodeid: u64,
    pub ttl: Duration,
    pub stat: Stat,
}

/// The duty to answer one request.
#[must_use = "every request is answered"]
pub struct Reply {
    sink: Arc<dyn Sink>,
    unique: u64,
    open: bool,
}

impl Reply {
    pub fn new(sink: Arc<dyn Sink>, unique: u64) -> Self {
        Self { sink, unique, open: true }
    }

    pub fn unique(&self) -> u64 {
        self.unique
    }

    /// Makes the kernel ask for the attributes of a node id before it opens or shows it again.
    ///
    /// The only notification that a worker may send: it takes no lock that waits for an answer of the worker's. (One that
    /// invalidates an entry waits for the directory, behind the very look-ups that this worker is to answer.)
    pub(crate) fn distrust_attributes(&self, nodeid: u64) {
        let body = NotifyInvalInodeOut { ino: nodeid, off: -1, len: 0 }; // attributes only, the pages stay
        self.sink.notify(notify::INVAL_INODE, &body.to_bytes());
    }

    pub fn fail(self, failure: impl Into<Failure>) {
        self.send(-errno(failure.into()), &[]);
    }

    pub fn ok(self) {
        self.send(0, &[]);
    }

    pub fn data(self, data: &[u8]) {
        self.send(0, data);
    }

    /// As [`Self::data`], with bytes of a file that are not copied through this process. Err: that is not possible.
    pub(crate) fn file(mut self, file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<(), Self> {
        match self.sink.send_file(self.unique, file, offset, len) {
            Some(_) => {
                self.open = false;
                Ok(())
            }
            None => Err(self),
        }
    }

    pub fn entry(self, entry: &Entry) {
        self.send(0, &entry_out(entry).to_bytes());
    }

    /// A name that does not exist, for as long as `ttl`: an entry with nodeid 0.
    pub fn absent(self, ttl: Duration) {
        if ttl.is_zero() {
            return self.fail(Cause::NotFound);
        }
        let stat = Stat::of_source(0, 0, 0, 0, (0, 0));
        self.entry(&Entry { nodeid: 0, ttl, stat });
    }

    pub fn attr(self, ttl: Duration, stat: &Stat) {
        let body = AttrOut {
            attr_valid: ttl.as_secs(),
            attr_valid_nsec: ttl.subsec_nanos(),
            attr: attr(stat),
            ..AttrOut::default()
        };
        self.send(0, &body.to_bytes());
    }

    /// `flags`: `fuse_abi::open::FOPEN_*`.
    pub fn opened(self, handle: u64, flags: u32, backing: u32) -> Delivery {
        let body = OpenOut { fh: handle, open_flags: flags, backing_id: backing };
        self.send(0, &body.to_bytes())
    }

    /// A name that is new, and open.
    pub(crate) fn created(self, entry: &Entry, handle: u64, flags: u32) -> Delivery {
        let opened = OpenOut { fh: handle, open_flags: flags, backing_id: 0 };
        let body = [&entry_out(entry).to_bytes()[..], &opened.to_bytes()].concat();
        self.send(0, &body)
    }

    pub(crate) fn written(self, bytes: u32) {
        self.send(0, &WriteOut { size: bytes, padding: 0 }.to_bytes());
    }

    /// The value of an extended attribute, or with `size` 0 its length.
    pub fn xattr(self, size: u32, value: &[u8]) {
        if size == 0 {
            self.send(0, &GetxattrOut { size: value.len() as u32, padding: 0 }.to_bytes());
        } else if value.len() > size as usize {
            self.fail(Failure::TooSmall);
        } else {
            self.send(0, value);
        }
    }

    /// In blocks of 4 KiB.
    pub fn statfs(self, total_bytes: u64, free_bytes: u64, total_inodes: u64) {
        const BLOCK: u32 = 4096;
        let body = Kstatfs {
            blocks: total_bytes.div_ceil(u64::from(BLOCK)),
            bfree: free_bytes / u64::from(BLOCK),
            bavail: free_bytes / u64::from(BLOCK),
            files: total_inodes,
            bsize: BLOCK,
            namelen: 255,
            frsize: BLOCK,
            ..Kstatfs::default()
        };
        self.send(0, &body.to_bytes());
    }

    fn send(mut self, error: i32, body: &[u8]) -> Delivery {
        self.open = false;
        self.sink.send(self.unique, error, &[IoSlice::new(body)])
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if self.open {
            self.sink.send(self.unique, -errno(Cause::Internal.into()), &[]);
        }
    }
}

/// A directory's entries, up to the size that the kernel asked for.
pub struct Listing {
    body: Vec<u8>,
    bytes_max: usize,
}

impl Listing {
    pub fn new(bytes_max: usize) -> Self {
        Self { body: Vec::new(), bytes_max: bytes_max.min(1 << 20) }
    }

    /// A fuse_dirent; false: it does not fit. `next`: where to go on after it.
    pub fn add(&mut self, name: &[u8], ino: u64, mode: u32, next: u64) -> bool {
        if !self.fits(Dirent::BYTES + name.len()) {
            return false;
        }
        self.push_dirent(name, ino, mode, next);
        true
    }

    /// A fuse_direntplus; false: it does not fit. An entry with nodeid 0 counts as no lookup.
    pub(crate) fn add_plus(&mut self, name: &[u8], entry: &Entry, next: u64) -> bool {
        if !self.fits(Direntplus::BYTES + name.len()) {
            return false;
        }
        self.body.extend_from_slice(&entry_out(entry).to_bytes());
        self.push_dirent(name, entry.stat.ino, entry.stat.mode, next);
        true
    }

    pub fn bytes(&self) -> &[u8] {
        &self.body
    }

    fn fits(&self, bytes: usize) -> bool {
        self.body.len() + bytes.next_multiple_of(dirent::ALIGN) <= self.bytes_max
    }

    fn push_dirent(&mut self, name: &[u8], ino: u64, mode: u32, next: u64) {
        let kind = (mode & libc::S_IFMT) >> 12; // DT_* from S_IF*
        let dirent = Dirent { ino, off: next, namelen: name.len() as u32, kind };
        self.body.extend_from_slice(&dirent.to_bytes());
        self.body.extend_from_slice(name);
        self.body.resize(self.body.len().next_multiple_of(dirent::ALIGN), 0);
    }
}

fn entry_out(entry: &Entry) -> EntryOut {
    EntryOut {
        nodeid: entry.nodeid,
        generation: 0, // node ids are not reused
        entry_valid: entry.ttl.as_secs(),
        attr_valid: entry.ttl.as_secs(),
        entry_valid_nsec: entry.ttl.subsec_nanos(),
        attr_valid_nsec: entry.ttl.subsec_nanos(),
        attr: attr(&entry.stat),
    }
}

fn attr(stat: &Stat) -> Attr {
    let seconds = |ns: i64| ns.div_euclid(1_000_000_000);
    let nanoseconds = |ns: i64| ns.rem_euclid(1_000_000_000) as u32;
    Attr {
        ino: stat.ino,
        size: stat.size,
        blocks: stat.stored.div_ceil(512),
        atime: seconds(stat.atime_ns),
        mtime: seconds(stat.mtime_ns),
        ctime: seconds(stat.ctime_ns),
        atimensec: nanoseconds(stat.atime_ns),
        mtimensec: nanoseconds(stat.mtime_ns),
        ctimensec: nanoseconds(stat.ctime_ns),
        mode: stat.mode,
        nlink: stat.links,
        uid: stat.uid,
        gid: stat.gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Kept(Mutex<Vec<(u64, i32, Vec<u8>)>>);
    impl Sink for Kept {
        fn notify(&self, _: i32, _: &[u8]) {}
        fn send(&self, unique: u64, error: i32, body: &[IoSlice<'_>]) -> Delivery {
            self.0.lock().unwrap().push((unique, error, body.iter().flat_map(|s| s.to_vec()).collect()));
            Delivery::Delivered
        }
    }

    fn stat() -> Stat {
        Stat::of_source(42, 1000, -1, libc::S_IFREG | 0o444, (1, 2))
    }

    #[test]
    fn an_entry_keeps_nodeid_and_inode_number_apart() {
        let sink = Arc::new(Kept::default());
        let entry = Entry { nodeid: 42 | 3 << 40, ttl: Duration::from_millis(1500), stat: stat() };
        Reply::new(sink.clone(), 7).entry(&entry);
        let sent = sink.0.lock().unwrap();
        let (unique, error, body) = &sent[0];
        assert_eq!((*unique, *error, body.len()), (7, 0, 128));
        assert_eq!(body[0..8], (42u64 | 3 << 40).to_ne_bytes());
        assert_eq!(body[16..24], 1u64.to_ne_bytes());
        assert_eq!(body[32..36], 500_000_000u32.to_ne_bytes());
        assert_eq!(body[40..48], 42u64.to_ne_bytes());
        assert_eq!(body[64..72], (-1i64).to_ne_bytes(), "a time before 1970");
        assert_eq!(body[88..92], 999_999_999u32.to_ne_bytes());
    }

    #[test]
    fn a_dropped_reply_answers_eio() {
        let sink = Arc::new(Kept::default());
        drop(Reply::new(sink.clone(), 9));
        assert_eq!(*sink.0.lock().unwrap(), [(9, -libc::EIO, vec![])]);
    }

    #[test]
    fn a_listing_stops_before_it_exceeds_the_size_asked_for() {
        let mut listing = Listing::new(4096);
        let entry = Entry { nodeid: 1, ttl: Duration::ZERO, stat: stat() };
        let fitted = (0..100).take_while(|i| listing.add_plus(b"name", &entry, *i)).count();
        assert_eq!(fitted, 4096 / 160);
        assert!(listing.bytes().len() <= 4096 && listing.bytes().len().is_multiple_of(8));
    }

    #[test]
    fn xattr_sizes_follow_the_kernels_rule() {
        let sink = Arc::new(Kept::default());
        Reply::new(sink.clone(), 1).xattr(0, b"value");
        Reply::new(sink.clone(), 2).xattr(4, b"value");
        Reply::new(sink.clone(), 3).xattr(5, b"value");
        let sent = sink.0.lock().unwrap();
        assert_eq!(sent[0].2[0..4], 5u32.to_ne_bytes());
        assert_eq!(sent[1].1, -libc::ERANGE);
        assert_eq!(sent[2].2, b"value");
    }
}
