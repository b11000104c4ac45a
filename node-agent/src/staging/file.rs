//! One staged file: its record, its bytes, and how far the store has it.

use super::ongoing::Ongoing;
use super::parts;
use super::record::Record;
use super::rest::Rest;
use super::sums::Sums;
use crate::lock::lock;
use link::writable::Node;
use std::collections::HashMap;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;

pub(super) struct File {
    pub(super) ino: u64,
    pub(super) record: Mutex<Record>,
    /// Its file here, once it has one. Read by those who write into it; alone for whoever needs the bytes to stay as they are.
    pub(super) content: tokio::sync::RwLock<Option<Arc<std::fs::File>>>,
    size: AtomicU64,
    mtime_ns: AtomicI64,
    /// When its bytes or its length were changed last, which a program cannot set.
    touched_ns: AtomicI64,
    /// Rises with each change of bytes, attributes or name.
    changes: AtomicU64,
    /// Up to this change the store has had it under the name that it had then.
    sent: AtomicU64,
    /// Up to this change its bytes were written out.
    written_out: AtomicU64,
    /// Bytes that were written since it was begun to be written out last, as far as is known.
    unwritten: AtomicU64,
    /// Up to this change all of it was, with what the journal says of it.
    synced: AtomicU64,
    pub(super) changed_at: Mutex<Instant>,
    /// Since when something of it waits that the store does not have.
    waits_since: Mutex<Option<Instant>>,
    /// Held by whoever brings it into the store.
    pub(super) sending: tokio::sync::Mutex<Ongoing>,
    /// So many wait to do that.
    waiting: AtomicU32,
    /// A writer has filled another part, or somebody has come to wait.
    pub(super) grown: tokio::sync::Notify,
    /// The store had its name before it came here, and so do listings.
    is_listed: AtomicBool,
    /// [`Area::stale`](super::Area) when it was asked last what its object is.
    pub(super) looked: AtomicU64,
    /// Up to here it was written in order, from its beginning.
    in_order: AtomicU64,
    /// Change by which a part was touched last, by its number.
    touched: Mutex<HashMap<u32, u64>>,
    pub(super) sums: Sums,
    pub(super) doubt: Arc<Doubt>,
    pub(super) rest: Arc<Rest>,
}

/// Whether the kernel may take pages of a file for clean that are not on the disk.
#[derive(Default)]
pub(super) struct Doubt {
    /// Held on a thread of the disk while the file is written out: of two who do it at once one alone learns of an error.
    pub(super) turn: Mutex<()>,
    /// The last attempt has failed. Lost with this agent.
    pub(super) has_failed: AtomicBool,
}

/// Now, nanoseconds since 1970.
pub(super) fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// When the clock on the wall showed this; now, if that is not yet.
fn instant_of(ns: i64) -> Instant {
    let age = Duration::from_nanos(now_ns().saturating_sub(ns).try_into().unwrap_or(0));
    Instant::now().checked_sub(age).unwrap_or_else(Instant::now)
}

impl File {
    pub(super) fn new(ino: u64, record: Record, data: Option<Arc<std::fs::File>>, size: u64) -> Arc<Self> {
        let (mtime_ns, touched_ns) = (record.mtime_ns, record.ctime_ns);
        let waits_since = record.waits().then(|| instant_of(record.ctime_ns));
        let is_listed = record.base.as_ref().is_some_and(|base| record.path.as_ref() == Some(&base.path));
        Arc::new(Self {
            ino,
            record: Mutex::new(record),
            content: tokio::sync::RwLock::new(data),
            size: AtomicU64::new(size),
            mtime_ns: AtomicI64::new(mtime_ns),
            touched_ns: AtomicI64::new(touched_ns),
            changes: AtomicU64::new(1),
            sent: AtomicU64::new(0),
            written_out: AtomicU64::new(0),
            unwritten: AtomicU64::new(size),
            synced: AtomicU64::new(0),
            changed_at: Mutex::new(Instant::now()),
            waits_since: Mutex::new(waits_since),
            sending: tokio::sync::Mutex::default(),
            waiting: AtomicU32::new(0),
            grown: tokio::sync::Notify::new(),
            is_listed: AtomicBool::new(is_listed),
            looked: AtomicU64::new(0),
            in_order: AtomicU64::new(0),
            touched: Mutex::default(),
            sums: Sums::default(),
            doubt: Arc::default(),
            rest: Arc::default(),
        })
    }

    pub(super) fn record(&self) -> Record {
        lock(&self.record).clone()
    }

    /// What is known here counts, whatever the store says.
    pub(super) fn speaks(&self) -> bool {
        let record = lock(&self.record);
        !record.clean || record.path.is_none()
    }

    /// Its bytes here are those of this version of the object.
    pub(super) fn is_of(&self, token: &str) -> bool {
        lock(&self.record).base.as_ref().is_some_and(|base| base.version == token)
    }

    /// It has no name, and the store nothing of it.
    pub(super) fn is_nowhere(&self) -> bool {
        let record = lock(&self.record);
        record.path.is_none() && record.former.is_empty()
    }

    pub(super) fn is_nameless(&self) -> bool {
        lock(&self.record).path.is_none()
    }

    pub(super) fn is_listed(&self) -> bool {
        self.is_listed.load(Acquire)
    }

    pub(super) fn note_listed(&self, is_listed: bool) {
        self.is_listed.store(is_listed, Release);
    }

    pub(super) fn size(&self) -> u64 {
        self.size.load(Acquire)
    }

    /// Bytes that may have to be written out.
    pub(super) fn unwritten(&self) -> u64 {
        self.unwritten.load(Acquire)
    }

    pub(super) fn note_unwritten(&self, bytes: u64) {
        self.unwritten.fetch_add(bytes, AcqRel);
    }

    /// Bytes from the beginning that a writer has written one after the other.
    pub(super) fn in_order(&self) -> u64 {
        self.in_order.load(Acquire)
    }

    /// For whoever sends it because somebody waits. Who sends ahead of a writer comes to an end soon then.
    pub(super) async fn turn(&self) -> tokio::sync::MutexGuard<'_, Ongoing> {
        struct Waits<'a>(&'a AtomicU32);
        impl Drop for Waits<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, AcqRel);
            }
        }
        self.waiting.fetch_add(1, AcqRel);
        let _waits = Waits(&self.waiting);
        self.grown.notify_one();
        self.sending.lock().await
    }

    pub(super) fn is_waited_for(&self) -> bool {
        self.waiting.load(Acquire) > 0
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Acquire)
    }

    pub(super) fn note_sent(&self, change: u64) {
        self.sent.fetch_max(change, AcqRel);
        // What waits still has come since.
        lock(&self.waits_since).iter_mut().for_each(|since| *since = Instant::now());
    }

    pub(super) fn waits_since(&self) -> Option<Instant> {
        *lock(&self.waits_since)
    }

    /// To be told of each record that it gets.
    pub(super) fn note_waits(&self, waits: bool) {
        let mut since = lock(&self.waits_since);
        *since = waits.then(|| since.unwrap_or_else(Instant::now));
    }

    /// `unwritten`: how much there was to write out then, bytes.
    pub(super) fn note_written_out(&self, change: u64, unwritten: u64) {
        self.written_out.fetch_max(change, AcqRel);
        // Never fails: it always gives a value.
        let _ = self.unwritten.fetch_update(AcqRel, Acquire, |now| Some(now.saturating_sub(unwritten)));
    }

    /// No byte has changed since all were written out.
    pub(super) fn has_bytes_written_out(&self) -> bool {
        let change = self.written_out.load(Acquire);
        change > 0 && self.has_same_bytes(change)
    }

    /// Its bytes as they were at this change, and later ones, are on the disk.
    pub(super) fn is_written_out(&self, change: u64) -> bool {
        self.written_out.load(Acquire) >= change.max(1)
    }

    pub(super) fn note_synced(&self, change: u64) {
        self.synced.fetch_max(change, AcqRel);
    }

    /// No loss of power takes anything of it as it is now.
    pub(super) fn is_synced(&self) -> bool {
        self.synced.load(Acquire) >= self.changes()
    }

    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Acquire)
    }

    pub(super) fn mtime_ns(&self) -> i64 {
        self.mtime_ns.load(Acquire)
    }

    pub(super) fn set_mtime(&self, ns: i64) {
        self.mtime_ns.store(ns, Release);
    }

    /// Something of it changes. The time rises with each change, however fast they come: by it other pods of the node learn
    /// that the pages that they have are old.
    pub(super) fn change(&self) -> u64 {
        *lock(&self.changed_at) = Instant::now();
        self.changes.fetch_add(1, AcqRel) + 1
    }

    pub(super) fn touch(&self) {
        let now = now_ns();
        let after = |last: i64| now.max(last.saturating_add(1));
        // Never fails: it always gives a value.
        let last = self.touched_ns.fetch_update(AcqRel, Acquire, |last| Some(after(last)));
        self.mtime_ns.store(last.map_or(now, after), Release);
    }

    /// Bytes of `offset..end` have changed. True: they follow those that were written in order before.
    pub(super) fn wrote(&self, offset: u64, end: u64) -> bool {
        self.size.fetch_max(end, AcqRel);
        // Whoever writes elsewhere leaves it where it is.
        let is_next = self.in_order.compare_exchange(offset, end, AcqRel, Acquire).is_ok();
        self.wrote_some(offset, end);
        is_next
    }

    /// The same of a write that came to nothing, or to a part of it.
    pub(super) fn wrote_some(&self, offset: u64, end: u64) {
        self.touch();
        let change = self.change();
        let mut touched = lock(&self.touched);
        for part in parts::of(offset)..=parts::of(end.saturating_sub(1).max(offset)) {
            touched.insert(part, change);
        }
    }

    /// To be called with the content alone.
    pub(super) fn resized(&self, size: u64) {
        let before = self.size.swap(size, AcqRel);
        self.in_order.fetch_min(size, AcqRel);
        self.sums.resized(size.min(before), size.max(before));
        self.wrote(size.min(before), size.max(before));
        self.size.store(size, Release);
        self.in_order.fetch_min(size, AcqRel);
    }

    /// The object that has its bytes, of which none are here, is another one by now.
    pub(super) fn set_stored_size(&self, size: u64) {
        self.size.store(size, Release);
    }

    /// The bytes of this part have not changed since.
    pub(super) fn is_untouched(&self, part: u32, since: u64) -> bool {
        lock(&self.touched).get(&part).is_none_or(|change| *change <= since)
    }

    /// None of its bytes have, and its length has not.
    pub(super) fn has_same_bytes(&self, since: u64) -> bool {
        lock(&self.touched).values().all(|change| *change <= since)
    }

    pub(super) fn node(&self) -> Node {
        let record = self.record();
        self.node_as(&record)
    }

    /// As it looks with this record.
    pub(super) fn node_as(&self, record: &Record) -> Node {
        let (size, mtime_ns) = (self.size(), self.mtime_ns());
        Node {
            ino: self.ino,
            size,
            stored: size,
            mode: libc::S_IFREG | record.mode,
            uid: record.uid,
            gid: record.gid,
            links: u32::from(record.path.is_some()),
            atime_ns: record.atime_ns,
            mtime_ns,
            ctime_ns: record.ctime_ns.max(self.touched_ns.load(Acquire)),
        }
    }

    /// As the journal is to have it from now on.
    pub(super) fn noted(&self, mut record: Record) -> Record {
        record.mtime_ns = self.mtime_ns();
        record.ctime_ns = record.ctime_ns.max(self.touched_ns.load(Acquire));
        record
    }
}
