//! The writing side: the one process that learns from the source tells the others through here.

use super::clock::Clock;
use super::environment::{Home, State, boot_id};
use super::fence::Fence;
use super::listing::ListingWriter;
use super::order::Order;
use super::record::{Directory, NameKey};
use super::room::Room;
use super::types::{
    Attributes, Cached, INO_LIMIT, Incoming, InodeNumbers, MetaError, Opened, Options, Stats, TOTAL_REACHED,
};
use super::view::{View, unexpected};
use super::write::{Origin, Pending, Write, is_name, is_showable};
use heed::{RoTxn, WithoutTls};
use std::collections::HashMap;
use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Most negative records that one directory keeps without a complete listing: they come from guesses (import paths,
/// optional files), and guesses have no end.
const NEGATIVES_MAX: u64 = 65_536;
/// A store that cannot have a reserve takes room in such steps; more than a transaction writes.
const LAST_BYTES: u64 = 4 << 20;
/// Entries written in one transaction.
pub(super) const BATCH: usize = 10_000;

/// One scope's names, open for writing. Reads go through the [`View`] that it dereferences to.
pub struct Store {
    view: View,
    home: Home,
    numbers: Arc<dyn InodeNumbers>,
    clock: Clock,
    opened: Opened,
    /// The marker is final: dropping must not write it again.
    settled: AtomicBool,
    /// Another process may have the store by now.
    released: AtomicBool,
    /// For readers in other processes. Lock order: `pending`, then this, then LMDB's writer lock.
    fence: Mutex<Fence<RoTxn<'static, WithoutTls>>>,
    /// Listings that are being stored, by directory. Lock order: this, then LMDB's writer lock, then `numbers`.
    pending: Mutex<HashMap<u64, Pending>>,
    order: Mutex<Order>,
    reserve_bytes: u64,
    /// Blocks of the disk are taken up to here, bytes from the start of the file.
    reserved_to: AtomicU64,
    /// Shared by all stores, and what this one has of it. A leaf in the lock order.
    room: Arc<Room>,
    counted: Mutex<u64>,
}

impl Store {
    /// Opens or creates the store in `dir` with the default [`Options`].
    pub fn open(dir: &Path, numbers: Arc<dyn InodeNumbers>) -> Result<Self, MetaError> {
        Self::open_with(dir, &Options::default(), numbers)
    }

    /// What cannot be trusted or read is set aside and a new store started: see [`Store::opened`].
    pub(crate) fn open_with(
        dir: &Path,
        options: &Options,
        numbers: Arc<dyn InodeNumbers>,
    ) -> Result<Self, MetaError> {
        Self::open_at(dir, options, numbers, Clock::of_machine(&boot_id()?))
    }

    /// As [`Self::open_with`], with a clock that others hold: for tests.
    pub fn open_at(
        dir: &Path,
        options: &Options,
        numbers: Arc<dyn InodeNumbers>,
        clock: Clock,
    ) -> Result<Self, MetaError> {
        Self::open_both(dir, options, numbers, clock, Arc::new(Room::new(u64::MAX)))
    }

    /// As one of those that share `room`.
    pub fn open_in(
        dir: &Path,
        options: &Options,
        numbers: Arc<dyn InodeNumbers>,
        room: Arc<Room>,
    ) -> Result<Self, MetaError> {
        Self::open_both(dir, options, numbers, Clock::of_machine(&boot_id()?), room)
    }

    pub(super) fn open_both(
        dir: &Path,
        options: &Options,
        numbers: Arc<dyn InodeNumbers>,
        clock: Clock,
        room: Arc<Room>,
    ) -> Result<Self, MetaError> {
        let home = Home::take(dir)?;
        let (view, opened) = home.open(options, &clock)?;
        let store = Self {
            view,
            home,
            numbers,
            clock,
            opened,
            settled: AtomicBool::new(false),
            released: AtomicBool::new(false),
            fence: Mutex::default(),
            pending: Mutex::default(),
            order: Mutex::default(),
            reserve_bytes: options.reserve_bytes,
            reserved_to: AtomicU64::new(0),
            room,
            counted: Mutex::new(0),
        };
        let _ = store.keep_reserve(); // without room it is read all the same
        Ok(store)
    }

    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// For readers in this process, in which [`View::open`] would be a second opening.
    pub fn view(&self) -> View {
        self.view.clone()
    }

    /// Starts to store a listing. Until [`ListingWriter::finish`] readers see the listing before it, or none.
    pub fn begin_listing(&self, dir: u64) -> Result<ListingWriter<&Self>, MetaError> {
        Ok(ListingWriter::new(self, dir, self.number_listing(dir)?))
    }

    /// As [`Store::begin_listing`]. Between two pages it needs no thread: the next one may come to another.
    pub fn begin_listing_owned(self: Arc<Self>, dir: u64) -> Result<ListingWriter<Arc<Self>>, MetaError> {
        let number = self.number_listing(dir)?;
        Ok(ListingWriter::new(self, dir, number))
    }

    fn number_listing(&self, dir: u64) -> Result<u32, MetaError> {
        let seen_ms = self.order().begins(self.now_ms());
        let mut pending = self.pending();
        let mut write = self.begin_write()?;
        let mut directory = write.directory_to_fill(dir)?;
        if under_way(&pending, dir, &directory).is_some() {
            return Err(MetaError::ListingInProgress(dir));
        }
        directory.newest = directory
            .newest
            .checked_add(2) // see `record`
            .ok_or_else(|| MetaError::Unexpected("listing numbers are used up".into()))?;
        write.put_directory(dir, &directory)?;
        write.commit()?;
        pending.insert(dir, Pending { number: directory.newest, seen_ms, entries: 0, hidden: 0 });
        Ok(directory.newest)
    }

    /// Records one name as the source has it now, and returns what it became.
    pub fn put(&self, parent: u64, incoming: &Incoming) -> Result<Attributes, MetaError> {
        if !is_showable(incoming) {
            return Err(MetaError::BadName);
        }
        self.keep_reserve()?;
        let seen_ms = self.now_ms();
        self.with_room(|| self.put_seen(parent, incoming, seen_ms))
    }

    /// To be called before the source is asked for a name: for [`Store::put_answer`].
    pub fn asks(&self) -> u64 {
        self.order().begins(self.now_ms())
    }

    /// As [`Store::put`] and (None) [`Store::put_absent`], unless this node has changed the name since the source was asked: then the
    /// answer may be older than that.
    pub fn put_answer(
        &self,
        parent: u64,
        name: &[u8],
        found: Option<&Incoming>,
        asked_ms: u64,
    ) -> Result<(), MetaError> {
        let changed_ms = self.order().changed_since(asked_ms);
        let is_overtaken = match (changed_ms, NameKey::new(parent, name)) {
            (Some(changed_ms), Some(key)) => {
                let known = self.begin_write()?.known(&key)?;
                known.is_some_and(|known| asked_ms < known.seen_ms && known.seen_ms <= changed_ms)
            }
            _ => false,
        };
        match found {
            _ if is_overtaken => Ok(()),
            Some(incoming) => self.put(parent, incoming).map(drop),
            None => self.put_absent(parent, name),
        }
    }

    fn put_seen(&self, parent: u64, incoming: &Incoming, seen_ms: u64) -> Result<Attributes, MetaError> {
        let mut pending = self.pending();
        let mut write = self.begin_write()?;
        let mut directory = write.directory_to_fill(parent)?;
        let mut listing = under_way(&pending, parent, &directory);
        let origin = Origin::Asked { seen_ms };
        let attributes =
            write.upsert(parent, &mut directory, listing.as_mut(), incoming, origin, &*self.numbers)?;
        write.put_directory(parent, &directory)?;
        write.commit()?;
        if let Some(listing) = listing {
            pending.insert(parent, listing);
        }
        Ok(attributes)
    }

    /// Records that the source has no such name now.
    pub fn put_absent(&self, parent: u64, name: &[u8]) -> Result<(), MetaError> {
        if !is_name(name) {
            return Err(MetaError::BadName);
        }
        self.keep_reserve()?;
        let seen_ms = self.now_ms();
        self.with_room(|| self.put_absent_seen(parent, name, seen_ms))
    }

    fn put_absent_seen(&self, parent: u64, name: &[u8], seen_ms: u64) -> Result<(), MetaError> {
        let mut pending = self.pending();
        let mut write = self.begin_write()?;
        let mut directory = write.directory_to_fill(parent)?;
        let mut listing = under_way(&pending, parent, &directory);
        if directory.negatives >= NEGATIVES_MAX {
            write.forget_negatives(parent, &mut directory, u64::MAX, usize::MAX)?;
        }
        write.absent(parent, &mut directory, listing.as_mut(), name, seen_ms)?;
        write.put_directory(parent, &directory)?;
        write.commit()?;
        if let Some(listing) = listing {
            pending.insert(parent, listing);
        }
        Ok(())
    }

    /// Records where the whole and verified content of this version lies, or that it lies nowhere any more. None: the
    /// inode is unknown, no file, or has another version by now; nothing changed. A full store says so at once: the thread
    /// that calls this serves all scopes, and what is not located here the agent locates when it is asked.
    pub fn set_cached(
        &self,
        ino: u64,
        version: u32,
        cached: Option<Cached>,
    ) -> Result<Option<Attributes>, MetaError> {
        let _order = self.pending();
        let mut write = self.begin_write()?;
        let located = write.locate(ino, version, cached)?;
        if located.as_ref().is_some_and(|located| located.changed) {
            write.commit()?;
        }
        Ok(located.map(|located| located.attributes))
    }

    /// As [`Self::set_cached`] for each of them, in one commit. An error: of none.
    pub fn set_cached_all(&self, all: &[(u64, u32, Option<Cached>)]) -> Result<(), MetaError> {
        let _order = self.pending();
        let mut write = self.begin_write()?;
        let mut changed = false;
        for (ino, version, cached) in all {
            changed |= write.locate(*ino, *version, *cached)?.is_some_and(|located| located.changed);
        }
        if changed { write.commit() } else { Ok(()) }
    }

    /// Makes a directory unknown again, as if it had never been listed nor a name in it asked for. Inode numbers stay.
    pub fn forget(&self, dir: u64) -> Result<(), MetaError> {
        let _order = self.pending();
        let mut write = self.begin_write()?;
        let Some(mut directory) = write.directory(dir)? else { return Ok(()) };
        write.forget_names(dir, &mut directory)?;
        write.put_directory(dir, &directory)?;
        write.commit()
    }

    pub fn stats(&self) -> Result<Stats, MetaError> {
        let txn = self.view.read()?;
        let tables = &self.view.tables;
        let highest = tables.inodes.last(&txn).map_err(unexpected)?;
        let info = self.view.env.info();
        Ok(Stats {
            inodes: tables.inodes.len(&txn).map_err(unexpected)?,
            names: tables.names.len(&txn).map_err(unexpected)?,
            directories: tables.directories.len(&txn).map_err(unexpected)?,
            used_bytes: self.used_bytes(),
            map_bytes: info.map_size as u64,
            highest_ino: highest
                .and_then(|(key, _)| key.try_into().ok())
                .map_or(0, u64::from_be_bytes)
                .min(INO_LIMIT),
        })
    }

    fn used_bytes(&self) -> u64 {
        let page = u64::from(self.view.env.stat().page_size);
        (self.view.env.info().last_page_number as u64 + 1) * page
    }

    /// To be called before names are stored: takes blocks ahead for them. What the disk does not give now is asked for again the
    /// next time. An error: the stores have no more room, all together.
    pub(super) fn keep_reserve(&self) -> Result<(), MetaError> {
        let used = self.used_bytes();
        let reserved_to = self.reserved_to.load(Ordering::Relaxed);
        if used + self.reserve_bytes / 2 <= reserved_to {
            return Ok(());
        }
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = used + self.reserve_bytes;
        if !self.room.take(&mut counted, wanted) {
            // What it has, it may use up.
            let full = used + LAST_BYTES > *counted && !self.room.take(&mut counted, used + LAST_BYTES);
            return if full { Err(MetaError::Full(TOTAL_REACHED)) } else { Ok(()) };
        }
        let reserved_to = self.home.reserve(used, self.reserve_bytes).max(reserved_to);
        self.reserved_to.store(reserved_to, Ordering::Relaxed);
        Ok(())
    }

    /// Damage was found: the next opening sets this store aside.
    pub fn distrust(&self) -> Result<(), MetaError> {
        self.settled.store(true, Ordering::Relaxed);
        self.home.mark(State::Distrusted)
    }

    /// Writes everything out, so that the store is kept even if the machine is restarted. Dropping does the same,
    /// without telling of errors.
    pub fn close(self) -> Result<(), MetaError> {
        self.write_out()
    }

    /// Leaves the store to another process as it is, at once: nothing is written out, nothing can be written from here
    /// on. What is read still is what the other process writes.
    pub fn release(&self) {
        let _order = self.pending(); // no write is under way
        self.released.store(true, Ordering::Relaxed);
        self.settled.store(true, Ordering::Relaxed);
        // The readers of this agent have ended.
        self.fence().clear();
        self.home.unlock();
    }

    /// Runs `write`, and where no room is left once more as soon as the pages that are kept for readers can be used again. A
    /// store that is full all the same is not waited for until something was written to it.
    pub(super) fn with_room<T>(
        &self,
        mut write: impl FnMut() -> Result<T, MetaError>,
    ) -> Result<T, MetaError> {
        let mut result = write();
        if matches!(result, Err(MetaError::Full(_))) {
            let wait = self.fence().wait_for_room(Instant::now());
            let Some(wait) = wait else { return result };
            std::thread::sleep(wait);
            self.fence().waited();
            result = write();
        }
        if result.is_ok() {
            self.fence().has_room();
        }
        result
    }

    /// To be called with `pending` locked.
    pub(super) fn begin_write(&self) -> Result<Write<'_>, MetaError> {
        if self.released.load(Ordering::Relaxed) {
            return Err(MetaError::Released);
        }
        let snapshot = || self.view.env.clone().static_read_txn().map_err(unexpected);
        self.fence().advance(Instant::now(), snapshot)?;
        Write::begin(&self.view)
    }

    #[cfg(test)]
    pub(super) fn keep_pages_for(&self, kept: std::time::Duration) {
        self.fence().keep_for(kept);
    }

    fn fence(&self) -> MutexGuard<'_, Fence<RoTxn<'static, WithoutTls>>> {
        // A panic in between leaves one snapshot more or less than wanted.
        self.fence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_out(&self) -> Result<(), MetaError> {
        if self.settled.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.view.env.force_sync().map_err(unexpected)?;
        self.home.mark(State::Clean)?;
        self.settled.store(true, Ordering::Relaxed);
        self.home.give_back();
        Ok(())
    }

    pub(super) fn pending(&self) -> MutexGuard<'_, HashMap<u64, Pending>> {
        // What it guards is replaced in one step after each commit, so a panic elsewhere leaves it whole.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.clock.now_ms(self.view.base_ms)
    }

    pub(super) fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn numbers(&self) -> &dyn InodeNumbers {
        &*self.numbers
    }

    /// Deletes what only a listing has that is not under way any more, a batch at a time.
    pub(super) fn take_back(&self, dir: u64, number: u32, go_on: impl Fn() -> bool) -> Result<(), MetaError> {
        let mut after = Vec::new();
        while go_on() {
            let next = self.with_room(|| {
                let _order = self.pending();
                let mut write = self.begin_write()?;
                let next = write.take_back(dir, number, &after, BATCH)?;
                write.commit()?;
                Ok(next)
            })?;
            match next {
                Some(next) => after = next,
                None => break,
            }
        }
        Ok(())
    }

    /// Deletes what a complete listing has made superfluous, a batch at a time.
    pub(super) fn prune_negatives(&self, dir: u64, seen_ms: u64) -> Result<(), MetaError> {
        loop {
            let _order = self.pending();
            let mut write = self.begin_write()?;
            let Some(mut directory) = write.directory(dir)?.filter(|d| d.negatives > 0) else {
                return Ok(());
            };
            if write.forget_negatives(dir, &mut directory, seen_ms, BATCH)? == 0 {
                return Ok(());
            }
            write.put_directory(dir, &directory)?;
            write.commit()?;
        }
    }
}

/// The listing of `dir` that is being stored. One that is not newer than what is in force was overtaken: the directory
/// has been forgotten since it was begun.
pub(super) fn under_way(pending: &HashMap<u64, Pending>, dir: u64, directory: &Directory) -> Option<Pending> {
    pending.get(&dir).copied().filter(|listing| listing.number > directory.in_force)
}

impl Deref for Store {
    type Target = View;

    fn deref(&self) -> &View {
        &self.view
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Err(e) = self.write_out() {
            tracing::warn!(error = %e, "metadata store not written out; it is kept until the machine restarts");
        }
        let counted = self.counted.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.room.take(counted, 0);
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("home", &self.home)
            .field("opened", &self.opened)
            .finish_non_exhaustive()
    }
}
