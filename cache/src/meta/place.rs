//! A name that this node has made at the source itself: the inode is the one that programs have open already.

use super::record::{Known, NameKey, REMOVED, next_even};
use super::store::{Store, under_way};
use super::types::{Attributes, FIRST_INO, INO_LIMIT, Incoming, MetaError};
use super::write::{Origin, Pending, Write, is_name, is_showable, key_of};
use std::collections::HashMap;

impl Store {
    /// Records that inode `ino` has this name and content at the source from now on, and no other name. `ino` comes from
    /// the [`super::InodeNumbers`] of this store; whatever had the name before is known no more.
    pub fn place(&self, parent: u64, incoming: &Incoming, ino: u64) -> Result<Attributes, MetaError> {
        if !is_showable(incoming) {
            return Err(MetaError::BadName);
        }
        if !(FIRST_INO..INO_LIMIT).contains(&ino) {
            return Err(MetaError::UnknownInode(ino));
        }
        self.keep_reserve()?;
        let seen_ms = self.order().changes(self.now_ms());
        self.with_room(|| self.place_seen(parent, incoming, ino, seen_ms))
    }

    /// Records that this node has removed the name at the source. As [`Store::put_absent`], and no listing that was begun
    /// before brings it back.
    pub fn remove(&self, parent: u64, name: &[u8]) -> Result<(), MetaError> {
        if !is_name(name) {
            return Err(MetaError::BadName);
        }
        let key = key_of(parent, name)?;
        self.keep_reserve()?;
        let seen_ms = self.order().changes(self.now_ms());
        self.with_room(|| {
            let mut pending = self.pending();
            let mut listings = pending.clone();
            let mut write = self.begin_write()?;
            write.unname(&key, Inode::Kept, &mut listings, seen_ms)?;
            write.commit()?;
            *pending = listings;
            Ok(())
        })
    }

    fn place_seen(
        &self,
        parent: u64,
        incoming: &Incoming,
        ino: u64,
        seen_ms: u64,
    ) -> Result<Attributes, MetaError> {
        let mut pending = self.pending();
        let mut listings = pending.clone();
        let mut write = self.begin_write()?;
        write.directory_to_fill(parent)?; // before anything is taken from elsewhere
        let key = key_of(parent, &incoming.name)?;
        let before = write.known_of(ino)?.filter(|(old, _)| old.as_bytes() != key.as_bytes());
        let moved = match before {
            Some((old, known)) => {
                write.unname(&old, Inode::Elsewhere, &mut listings, seen_ms)?;
                known.attributes
            }
            None => None,
        };
        let there = write.known(&key)?.and_then(|known| known.attributes);
        if there.is_none_or(|there| there.ino != ino) {
            write.unname(&key, Inode::Elsewhere, &mut listings, seen_ms)?;
            let attributes = match moved {
                // Another path: what was known of the inode's versions is of the old one.
                Some(mut attributes) => {
                    attributes.version = attributes.version.saturating_add(1);
                    attributes.epoch = next_even(attributes.epoch);
                    attributes.since_epoch = attributes.epoch;
                    attributes.cached = None;
                    attributes
                }
                None => Attributes::first(ino, incoming),
            };
            write.seed(&key, parent, attributes, seen_ms)?;
        }
        let mut directory = write.directory_to_fill(parent)?;
        let mut listing = under_way(&listings, parent, &directory);
        let origin = Origin::Asked { seen_ms };
        let attributes =
            write.upsert(parent, &mut directory, listing.as_mut(), incoming, origin, self.numbers())?;
        write.put_directory(parent, &directory)?;
        write.commit()?;
        if let Some(listing) = listing {
            listings.insert(parent, listing);
        }
        *pending = listings;
        Ok(attributes)
    }
}

/// What becomes of the inode whose name is taken away.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Inode {
    /// It is known still what it was: some read it.
    Kept,
    /// It gets another name, or another one has its name.
    Elsewhere,
}

impl Write<'_> {
    /// The name is absent.
    fn unname(
        &mut self,
        key: &NameKey,
        inode: Inode,
        listings: &mut HashMap<u64, Pending>,
        seen_ms: u64,
    ) -> Result<(), MetaError> {
        let (parent, name) = super::record::split_key(key.as_bytes())?;
        let mut directory = self.directory_to_fill(parent)?;
        let mut listing = under_way(listings, parent, &directory);
        self.absent(parent, &mut directory, listing.as_mut(), name, seen_ms)?;
        if let Some(mut known) = self.known(key)? {
            if inode == Inode::Elsewhere
                && let Some(attributes) = known.attributes.take()
            {
                // What was in it, if it is a directory, is found by its number.
                self.unname_inode(attributes.ino)?;
                directory.negatives += 1;
            }
            self.put_known(key, &Known { absent: true, first: REMOVED, last: 0, seen_ms, ..known })?;
        }
        self.put_directory(parent, &directory)?;
        if let Some(listing) = listing {
            listings.insert(parent, listing);
        }
        Ok(())
    }

    /// A name of this inode that is not seen yet, in place of an absent one.
    fn seed(
        &mut self,
        key: &NameKey,
        parent: u64,
        attributes: Attributes,
        seen_ms: u64,
    ) -> Result<(), MetaError> {
        let mut directory = self.directory_to_fill(parent)?;
        directory.negatives = directory.negatives.saturating_sub(1); // `unname` has left one
        self.put_directory(parent, &directory)?;
        self.name_inode(attributes.ino, key)?;
        self.put_known(key, &Known { attributes: Some(attributes), absent: true, first: 0, last: 0, seen_ms })
    }
}
