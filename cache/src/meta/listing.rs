//! Storing a listing, of any length, in bounded memory, unseen until its end.

use super::record::Directory;
use super::store::{BATCH, Store, under_way};
use super::types::{Incoming, Kind, ListingState, MetaError};
use super::write::{Listed, Pending, is_showable};
use std::ops::Deref;

/// Most files that wait for the end of the listing to learn whether a directory takes their name. They are names
/// that were directories before; beyond this many they are stored at once, at worst for one version too many.
const UNDECIDED_MAX: usize = 10_000;

/// A listing on its way in. Dropped before [`ListingWriter::finish`], it leaves the old listing in force.
#[derive(Debug)]
pub struct ListingWriter<S: Deref<Target = Store> + Clone> {
    store: S,
    dir: u64,
    number: u32,
    batch: Vec<Incoming>,
    /// Entries per transaction.
    batch_max: usize,
    undecided: Vec<Incoming>,
    /// Entries that no directory can show, since the last batch.
    hidden: u64,
    failed: bool,
}

impl<S: Deref<Target = Store> + Clone> ListingWriter<S> {
    pub(super) fn new(store: S, dir: u64, number: u32) -> Self {
        Self {
            store,
            dir,
            number,
            batch: Vec::new(),
            batch_max: BATCH,
            undecided: Vec::new(),
            hidden: 0,
            failed: false,
        }
    }

    /// Makes borders between transactions testable without ten thousand entries.
    #[cfg(test)]
    pub(super) fn with_batch(mut self, entries: usize) -> Self {
        self.batch_max = entries;
        self
    }

    /// Takes entries, in any order. Those that cannot be shown are counted as hidden.
    pub fn page(&mut self, entries: &[Incoming]) -> Result<(), MetaError> {
        for entry in entries {
            if is_showable(entry) {
                self.batch.push(entry.clone());
            } else {
                self.hidden += 1;
            }
            if self.batch.len() >= self.batch_max {
                self.flush(false)?;
            }
        }
        Ok(())
    }

    /// Counts objects that the caller could not even name.
    pub fn hide(&mut self, objects: u64) {
        self.hidden += objects;
    }

    /// Puts the listing in force: names that it did not have are gone from now on.
    pub fn finish(mut self) -> Result<ListingState, MetaError> {
        self.flush(false)?;
        self.batch = std::mem::take(&mut self.undecided);
        self.flush(true)?;

        let (directory, seen_ms) = self.store.with_room(|| self.put_in_force())?;
        self.failed = true; // nothing to abort in drop
        if directory.negatives > 0
            && let Err(error) = self.store.prune_negatives(self.dir, seen_ms)
        {
            // The listing is in force; what was not deleted says the same as it.
            tracing::debug!(%error, dir = self.dir, "superfluous absences stay for now");
        }
        Ok(directory.state())
    }

    /// Gives the listing up, and deletes what it has brought that no reader has seen, as long as `go_on` says so: a listing
    /// without end would leave millions of names. What is left is passed over by readers.
    pub fn take_back(mut self, go_on: impl Fn() -> bool) -> Result<(), MetaError> {
        self.abort();
        self.store.take_back(self.dir, self.number, go_on)
    }

    fn put_in_force(&self) -> Result<(Directory, u64), MetaError> {
        let mut pending = self.store.pending();
        let mut write = self.store.begin_write()?;
        let mut directory = write.directory_to_fill(self.dir)?;
        let listing = self.mine(under_way(&pending, self.dir, &directory))?;
        directory.in_force = listing.number;
        directory.complete = true;
        directory.seen_ms = listing.seen_ms;
        directory.entries = listing.entries;
        directory.hidden = listing.hidden;
        write.put_directory(self.dir, &directory)?;
        write.commit()?;
        pending.remove(&self.dir);
        Ok((directory, listing.seen_ms))
    }

    /// Writes the batch in one transaction.
    fn flush(&mut self, last_word: bool) -> Result<(), MetaError> {
        if self.failed {
            return Err(MetaError::ListingFailed(self.dir));
        }
        let store = self.store.clone();
        let result = store.with_room(|| self.write(last_word));
        if result.is_err() {
            self.abort();
        }
        result
    }

    fn write(&mut self, last_word: bool) -> Result<(), MetaError> {
        // In key order a transaction touches each page of the map once. A stable sort: the last word on a name wins.
        self.batch.sort_by(|a, b| a.name.cmp(&b.name));
        let now_ms = self.store.order().now(self.store.now_ms());
        self.store.keep_reserve()?;
        let mut pending = self.store.pending();
        let mut write = self.store.begin_write()?;
        let mut directory = write.directory_to_fill(self.dir)?;
        let mut listing = self.mine(under_way(&pending, self.dir, &directory))?;
        listing.hidden += self.hidden;
        let mut undecided = Vec::new();
        for entry in &self.batch {
            let last_word = last_word || self.undecided.len() + undecided.len() >= UNDECIDED_MAX;
            let numbers = self.store.numbers();
            let outcome =
                write.list(self.dir, &mut directory, &mut listing, entry, last_word, now_ms, numbers)?;
            if let Listed::Undecided = outcome {
                debug_assert!(entry.kind != Kind::Directory, "only files wait for a directory");
                undecided.push(entry.clone());
            }
        }
        write.put_directory(self.dir, &directory)?;
        write.commit()?;
        pending.insert(self.dir, listing);
        self.undecided.append(&mut undecided);
        self.hidden = 0;
        self.batch.clear();
        Ok(())
    }

    fn mine(&self, listing: Option<Pending>) -> Result<Pending, MetaError> {
        listing.filter(|l| l.number == self.number).ok_or(MetaError::ListingFailed(self.dir))
    }

    fn abort(&mut self) {
        if !self.failed {
            self.failed = true;
            let mut pending = self.store.pending();
            if pending.get(&self.dir).is_some_and(|listing| listing.number == self.number) {
                pending.remove(&self.dir);
            }
        }
    }
}

impl<S: Deref<Target = Store> + Clone> Drop for ListingWriter<S> {
    fn drop(&mut self) {
        self.abort();
    }
}
