//! Answers in the kernel's own encoding (include/uapi/linux/fuse.h, protocol 7.31 and later).
//!
//! fuser writes `nodeid = attr.ino` into entry replies, though the kernel keeps the two apart; here a file keeps its
//! inode number when its nodeid changes. A [`Reply`] that is dropped answers EIO, so that no caller waits for ever.

use crate::errno::{Failure, errno};
use link::Cause;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

pub const FOPEN_DIRECT_IO: u32 = 1 << 0;
pub const FOPEN_KEEP_CACHE: u32 = 1 << 1;
pub const FOPEN_CACHE_DIR: u32 = 1 << 3;
pub const FOPEN_NOFLUSH: u32 = 1 << 5;
pub const FOPEN_PASSTHROUGH: u32 = 1 << 7;

/// The only notification that a worker may send: it takes no lock that waits for an answer of the worker's. (One that
/// invalidates an entry waits for the directory, behind the very look-ups that this worker is to answer.)
const NOTIFY_INVAL_INODE: i32 = 2;

const ATTR_BYTES: usize = 88;
const ENTRY_BYTES: usize = 40 + ATTR_BYTES;
const DIRENT_BYTES: usize = 24;

/// Whether the kernel took an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    Delivered,
    /// Somebody answered before, or the caller is gone: no RELEASE and no FORGET will come for what was promised.
    Dropped,
}

/// Where answers go: the transport, or a test.
pub trait Sink: Send + Sync {
    /// `error`: 0 or a negative errno.
    fn send(&self, unique: u64, error: i32, body: &[IoSlice<'_>]) -> Delivery;
    /// Tells the kernel something that it did not ask for.
    fn notify(&self, code: i32, body: &[u8]);
}

/// What stat shows of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    pub ino: u64,
    pub size: u64,
    pub mtime_ns: i64,
    /// Type and permissions.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
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
    pub fn distrust_attributes(&self, nodeid: u64) {
        let mut body = Vec::with_capacity(24); // fuse_notify_inval_inode_out
        push64(&mut body, nodeid);
        push64(&mut body, -1_i64 as u64); // before the first byte: attributes only, the pages stay
        push64(&mut body, 0);
        self.sink.notify(NOTIFY_INVAL_INODE, &body);
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

    /// fuse_entry_out
    pub fn entry(self, entry: &Entry) {
        let mut body = Vec::with_capacity(ENTRY_BYTES);
        push_entry(&mut body, entry);
        self.send(0, &body);
    }

    /// A name that does not exist, for as long as `ttl`: an entry with nodeid 0.
    pub fn absent(self, ttl: Duration) {
        if ttl.is_zero() {
            return self.fail(Cause::NotFound);
        }
        let stat = Stat { ino: 0, size: 0, mtime_ns: 0, mode: 0, uid: 0, gid: 0 };
        self.entry(&Entry { nodeid: 0, ttl, stat });
    }

    /// fuse_attr_out
    pub fn attr(self, ttl: Duration, stat: &Stat) {
        let mut body = Vec::with_capacity(16 + ATTR_BYTES);
        push64(&mut body, ttl.as_secs());
        push32(&mut body, ttl.subsec_nanos());
        push32(&mut body, 0);
        push_stat(&mut body, stat);
        self.send(0, &body);
    }

    /// fuse_open_out
    pub fn opened(self, handle: u64, flags: u32, backing: u32) -> Delivery {
        let mut body = Vec::with_capacity(16);
        push64(&mut body, handle);
        push32(&mut body, flags);
        push32(&mut body, backing);
        self.send(0, &body)
    }

    /// The value of an extended attribute, or with `size` 0 its length (fuse_getxattr_out).
    pub fn xattr(self, size: u32, value: &[u8]) {
        if size == 0 {
            let mut body = Vec::with_capacity(8);
            push32(&mut body, value.len() as u32);
            push32(&mut body, 0);
            self.send(0, &body);
        } else if value.len() > size as usize {
            self.fail(Failure::TooSmall);
        } else {
            self.send(0, value);
        }
    }

    /// fuse_kstatfs, in blocks of 4 KiB; nothing is free on a read-only volume.
    pub fn statfs(self, total_bytes: u64, total_inodes: u64) {
        const BLOCK: u64 = 4096;
        let mut body = Vec::with_capacity(80);
        for value in [total_bytes.div_ceil(BLOCK), 0, 0, total_inodes, 0] {
            push64(&mut body, value);
        }
        for value in [BLOCK as u32, 255, BLOCK as u32, 0] {
            push32(&mut body, value);
        }
        body.resize(80, 0);
        self.send(0, &body);
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
        if !self.fits(DIRENT_BYTES + name.len()) {
            return false;
        }
        self.push_dirent(name, ino, mode, next);
        true
    }

    /// A fuse_direntplus; false: it does not fit. An entry with nodeid 0 counts as no lookup.
    pub fn add_plus(&mut self, name: &[u8], entry: &Entry, next: u64) -> bool {
        if !self.fits(ENTRY_BYTES + DIRENT_BYTES + name.len()) {
            return false;
        }
        push_entry(&mut self.body, entry);
        self.push_dirent(name, entry.stat.ino, entry.stat.mode, next);
        true
    }

    pub fn bytes(&self) -> &[u8] {
        &self.body
    }

    fn fits(&self, bytes: usize) -> bool {
        self.body.len() + bytes.next_multiple_of(8) <= self.bytes_max
    }

    fn push_dirent(&mut self, name: &[u8], ino: u64, mode: u32, next: u64) {
        push64(&mut self.body, ino);
        push64(&mut self.body, next);
        push32(&mut self.body, name.len() as u32);
        push32(&mut self.body, (mode & libc::S_IFMT) >> 12); // DT_* from S_IF*
        self.body.extend_from_slice(name);
        self.body.resize(self.body.len().next_multiple_of(8), 0);
    }
}

fn push32(body: &mut Vec<u8>, value: u32) {
    body.extend_from_slice(&value.to_ne_bytes());
}
fn push64(body: &mut Vec<u8>, value: u64) {
    body.extend_from_slice(&value.to_ne_bytes());
}

fn push_entry(body: &mut Vec<u8>, entry: &Entry) {
    push64(body, entry.nodeid);
    push64(body, 0); // generation: nodeids are not reused
    push64(body, entry.ttl.as_secs());
    push64(body, entry.ttl.as_secs());
    push32(body, entry.ttl.subsec_nanos());
    push32(body, entry.ttl.subsec_nanos());
    push_stat(body, &entry.stat);
}

fn push_stat(body: &mut Vec<u8>, stat: &Stat) {
    let seconds = stat.mtime_ns.div_euclid(1_000_000_000);
    let nanoseconds = stat.mtime_ns.rem_euclid(1_000_000_000) as u32;
    let links = if stat.mode & libc::S_IFMT == libc::S_IFDIR { 2 } else { 1 };
    push64(body, stat.ino);
    push64(body, stat.size);
    push64(body, stat.size.div_ceil(512));
    for _ in 0..3 {
        push64(body, seconds as u64); // atime, mtime, ctime
    }
    for value in [nanoseconds, nanoseconds, nanoseconds, stat.mode, links, stat.uid, stat.gid, 0, 4096, 0] {
        push32(body, value);
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

    const STAT: Stat =
        Stat { ino: 42, size: 1000, mtime_ns: -1, mode: libc::S_IFREG | 0o444, uid: 1, gid: 2 };

    #[test]
    fn an_entry_keeps_nodeid_and_inode_number_apart() {
        let sink = Arc::new(Kept::default());
        let entry = Entry { nodeid: 42 | 3 << 40, ttl: Duration::from_millis(1500), stat: STAT };
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
        let entry = Entry { nodeid: 1, ttl: Duration::ZERO, stat: STAT };
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
