//! One write transaction: how a name, its absence or a page of a listing changes what is known.

use super::record::{Directory, Known, NameKey, next_even, next_odd, split_key};
use super::types::{
    Attributes, Cached, DISK_FULL, FIRST_INO, INO_LIMIT, Incoming, InodeNumbers, Kind, MetaError, NAME_MAX,
};
use super::view::{Tables, View, is_no_room, unexpected};
use heed::types::Bytes;
use heed::{Database, MdbError, PutFlags, RwTxn};
use std::ops::Bound;

/// A transaction that is abandoned unless it is committed.
pub(super) struct Write<'v> {
    view: &'v View,
    txn: RwTxn<'v>,
    /// Where records are encoded.
    buffer: Vec<u8>,
}

/// A listing that is being stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    pub(super) number: u32,
    /// When it was begun.
    pub(super) seen_ms: u64,
    pub(super) entries: u64,
    pub(super) hidden: u64,
}

/// How the source came to speak of a name.
#[derive(Clone, Copy, Debug)]
pub(super) enum Origin {
    /// It was asked for this name.
    Asked { seen_ms: u64 },
    /// A page of a listing had it. It may have been read at any time since the listing was begun.
    Listed { seen_ms: u64, now_ms: u64 },
}

/// What became of an entry of a listing.
pub(super) enum Listed {
    Stored,
    /// A file where a directory was known: the directory may still come, on a later page.
    Undecided,
}

/// The file whose content lies there now.
pub(super) struct Located {
    pub(super) attributes: Attributes,
    /// It was not known to lie there before.
    pub(super) changed: bool,
}

/// Can a directory show this name?
pub fn is_name(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= NAME_MAX
        && name != b"."
        && name != b".."
        && !name.iter().any(|b| *b == b'/' || *b == 0)
}

/// Can a directory show this? What its size claims must fit into a file, and its version into a record.
pub(super) fn is_showable(entry: &Incoming) -> bool {
    is_name(&entry.name) && entry.size <= volume::FILE_BYTES_MAX && entry.token.len() <= usize::from(u16::MAX)
}

pub(super) fn key_of(parent: u64, name: &[u8]) -> Result<NameKey, MetaError> {
    NameKey::new(parent, name).ok_or(MetaError::BadName)
}

impl<'v> Write<'v> {
    pub(super) fn begin(view: &'v View) -> Result<Self, MetaError> {
        let txn = view.env.write_txn().map_err(unexpected)?;
        Ok(Self { view, txn, buffer: Vec::new() })
    }

    pub(super) fn commit(self) -> Result<(), MetaError> {
        let view = self.view;
        self.txn.commit().map_err(|e| match e {
            // LMDB says EIO of a short write, which is what the last free blocks of a disk give.
            heed::Error::Io(e)
                if e.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) && is_full(view) =>
            {
                MetaError::Full(DISK_FULL)
            }
            heed::Error::Io(e) if is_no_room(&e) => MetaError::Full(DISK_FULL),
            other => unexpected(other),
        })
    }

    fn tables(&self) -> Tables {
        self.view.tables
    }

    pub(super) fn directory(&self, dir: u64) -> Result<Option<Directory>, MetaError> {
        self.tables().directory(&self.txn, dir)
    }

    /// The listing of a directory that is about to get names: it must have an inode number.
    pub(super) fn directory_to_fill(&self, dir: u64) -> Result<Directory, MetaError> {
        match self.directory(dir)? {
            Some(directory) => Ok(directory),
            None if self.tables().key_of(&self.txn, dir)?.is_some() => Ok(Directory::default()),
            None => Err(MetaError::UnknownInode(dir)),
        }
    }

    pub(super) fn put_directory(&mut self, dir: u64, directory: &Directory) -> Result<(), MetaError> {
        let table = self.tables().directories;
        table.put(&mut self.txn, &dir.to_be_bytes(), &directory.encode()).map_err(unexpected)
    }

    pub(super) fn known(&self, key: &NameKey) -> Result<Option<Known>, MetaError> {
        self.tables().record(&self.txn, key.as_bytes())?.map(|r| r.to_owned()).transpose()
    }

    pub(super) fn known_of(&self, ino: u64) -> Result<Option<(NameKey, Known)>, MetaError> {
        let Some(key) = self.tables().key_of(&self.txn, ino)? else { return Ok(None) };
        let (parent, name) = split_key(key)?;
        let key = key_of(parent, name)?;
        Ok(self.known(&key)?.map(|known| (key, known)))
    }

    pub(super) fn put_known(&mut self, key: &NameKey, known: &Known) -> Result<(), MetaError> {
        known.encode(&mut self.buffer)?;
        self.tables().names.put(&mut self.txn, key.as_bytes(), &self.buffer).map_err(unexpected)
    }

    pub(super) fn name_inode(&mut self, ino: u64, key: &NameKey) -> Result<(), MetaError> {
        append_or_put(self.tables().inodes, &mut self.txn, &ino.to_be_bytes(), key.as_bytes())
    }

    pub(super) fn unname_inode(&mut self, ino: u64) -> Result<(), MetaError> {
        self.tables().inodes.delete(&mut self.txn, &ino.to_be_bytes()).map(drop).map_err(unexpected)
    }

    /// None: the inode is unknown, no file, or has another version.
    pub(super) fn locate(
        &mut self,
        ino: u64,
        version: u32,
        cached: Option<Cached>,
    ) -> Result<Option<Located>, MetaError> {
        let Some((key, mut known)) = self.known_of(ino)? else { return Ok(None) };
        let of_this = |a: &&mut Attributes| a.version == version && a.kind == Kind::File;
        let Some(attributes) = known.attributes.as_mut().filter(of_this) else { return Ok(None) };
        let changed = attributes.cached != cached;
        if changed {
            attributes.locate(cached);
        }
        let attributes = attributes.clone();
        if changed {
            self.put_known(&key, &known)?;
        }
        Ok(Some(Located { attributes, changed }))
    }

    /// Stores what the source says of an existing name.
    pub(super) fn upsert(
        &mut self,
        parent: u64,
        directory: &mut Directory,
        listing: Option<&mut Pending>,
        incoming: &Incoming,
        origin: Origin,
        numbers: &dyn InodeNumbers,
    ) -> Result<Attributes, MetaError> {
        let key = key_of(parent, &incoming.name)?;
        let old = self.known(&key)?;
        let visible = old.as_ref().is_some_and(|k| k.is_visible(directory.in_force));
        let number = listing.as_ref().map(|l| l.number);
        let listed = old.as_ref().is_some_and(|k| is_in(k, number));
        let old_seen_ms = old.as_ref().map_or(0, |k| k.seen_ms);
        let (first, last) = old.as_ref().map_or((0, 0), |k| (k.first, k.last));

        let is_new_record = old.is_none();
        let was_negative = old.as_ref().is_some_and(|k| k.attributes.is_none());
        let was_known = old.as_ref().is_some_and(|k| k.attributes.is_some());
        let mut was_directory = false;
        let (attributes, seen_ms) = match old.and_then(|k| k.attributes) {
            None => {
                let ino = numbers.next()?;
                if !(FIRST_INO..INO_LIMIT).contains(&ino) {
                    return Err(MetaError::InodesExhausted);
                }
                append_or_put(self.tables().inodes, &mut self.txn, &ino.to_be_bytes(), key.as_bytes())?;
                if was_negative {
                    directory.negatives = directory.negatives.saturating_sub(1);
                }
                (Attributes::first(ino, incoming), origin.seen_ms())
            }
            Some(mut attributes) => {
                if !visible && !listed {
                    // It was away: whatever lies in the cache was given up meanwhile, or will be found again.
                    attributes.locate(None);
                }
                if (visible || listed) && origin.is_older_than(old_seen_ms) {
                    (attributes, old_seen_ms)
                } else {
                    was_directory = attributes.kind == Kind::Directory;
                    attributes.absorb(incoming);
                    (attributes, origin.seen_ms())
                }
            }
        };
        if was_directory && attributes.kind != Kind::Directory {
            self.forget_children(attributes.ino)?;
        }

        let (first, last) = match (origin, number) {
            (Origin::Listed { .. }, Some(number)) if visible || listed => (first, number),
            // There is no older listing that must not show it yet.
            (Origin::Listed { .. }, Some(number)) if !directory.complete => (directory.in_force, number),
            // This separates a name that was known before from one that this listing alone has.
            (Origin::Listed { .. }, Some(number)) if was_known => (number - 1, number),
            (Origin::Listed { .. }, Some(number)) => (number, number),
            // It exists now, so also after the listing that is under way.
            (_, number) => {
                let first = if visible { first } else { directory.in_force };
                let kept = if visible || listed { last } else { directory.in_force };
                (first, kept.max(number.unwrap_or(0)))
            }
        };
        if matches!(origin, Origin::Asked { .. }) && !visible && directory.complete {
            directory.entries += 1;
        }
        if let Some(listing) = listing.filter(|_| !listed) {
            listing.entries += 1;
        }
        let known = Known { attributes: Some(attributes), absent: false, first, last, seen_ms };
        if is_new_record {
            known.encode(&mut self.buffer)?;
            append_or_put(self.tables().names, &mut self.txn, key.as_bytes(), &self.buffer)?;
        } else {
            self.put_known(&key, &known)?;
        }
        known.attributes.ok_or_else(|| MetaError::Unexpected("attributes were just stored".into()))
    }

    /// Stores one entry of a listing. A directory wins over a file of its name, whichever comes first.
    pub(super) fn list(
        &mut self,
        parent: u64,
        directory: &mut Directory,
        listing: &mut Pending,
        incoming: &Incoming,
        last_word: bool,
        now_ms: u64,
        numbers: &dyn InodeNumbers,
    ) -> Result<Listed, MetaError> {
        let old = self.tables().record(&self.txn, key_of(parent, &incoming.name)?.as_bytes())?;
        let origin = Origin::Listed { seen_ms: listing.seen_ms, now_ms };
        if old.is_some_and(|old| old.is_removed() && origin.is_older_than(old.seen_ms())) {
            return Ok(Listed::Stored); // the page was read before that, or the next listing will have it
        }
        if let Some(old) = old.filter(|r| r.ino() != 0) {
            let listed = !old.is_absent() && old.last() == listing.number;
            let was_directory = old.kind()? == Kind::Directory;
            match (was_directory, incoming.kind == Kind::Directory) {
                (true, false) if listed => {
                    listing.hidden += 1;
                    return Ok(Listed::Stored);
                }
                (true, false) if !last_word => return Ok(Listed::Undecided),
                (false, true) if listed => listing.hidden += 1,
                _ => {}
            }
        }
        self.upsert(parent, directory, Some(listing), incoming, origin, numbers)?;
        Ok(Listed::Stored)
    }

    /// Stores that the source has no such name.
    pub(super) fn absent(
        &mut self,
        parent: u64,
        directory: &mut Directory,
        listing: Option<&mut Pending>,
        name: &[u8],
        seen_ms: u64,
    ) -> Result<(), MetaError> {
        let key = key_of(parent, name)?;
        let known = match self.known(&key)? {
            None => {
                directory.negatives += 1;
                Known { attributes: None, absent: true, first: 0, last: 0, seen_ms }
            }
            Some(mut known) => {
                if known.is_visible(directory.in_force) && directory.complete {
                    directory.entries = directory.entries.saturating_sub(1);
                }
                if let Some(listing) = listing
                    && is_in(&known, Some(listing.number))
                {
                    listing.entries = listing.entries.saturating_sub(1);
                }
                if let Some(attributes) = known.attributes.as_mut() {
                    attributes.locate(None);
                }
                Known { absent: true, seen_ms, ..known }
            }
        };
        self.put_known(&key, &known)
    }

    /// Deletes up to `most` records of names that only ever were absent and were last looked for by `seen_ms`.
    pub(super) fn forget_negatives(
        &mut self,
        dir: u64,
        directory: &mut Directory,
        seen_ms: u64,
        most: usize,
    ) -> Result<usize, MetaError> {
        let mut keys = Vec::new();
        self.each(dir, |key, record| {
            if record.ino() == 0 && record.seen_ms() <= seen_ms {
                keys.push(key.to_vec());
            }
            keys.len() < most
        })?;
        for key in &keys {
            self.tables().names.delete(&mut self.txn, key).map_err(unexpected)?;
        }
        directory.negatives = directory.negatives.saturating_sub(keys.len() as u64);
        Ok(keys.len())
    }

    /// Deletes names that only this listing has, which no reader has seen yet, of up to `most` that follow the key
    /// `after` (empty: from the first). Some: the key to go on after.
    pub(super) fn take_back(
        &mut self,
        dir: u64,
        number: u32,
        after: &[u8],
        most: usize,
    ) -> Result<Option<Vec<u8>>, MetaError> {
        let Some(directory) = self.directory(dir)? else { return Ok(None) };
        let (begin, end) = (dir.to_be_bytes(), dir.saturating_add(1).to_be_bytes());
        let start = if after.is_empty() { &begin[..] } else { after };
        let range = (Bound::Excluded(start), Bound::Excluded(&end[..]));
        let (mut looked_at, mut last, mut theirs) = (0, None, Vec::new());
        for item in self.tables().names.range(&self.txn, &range).map_err(unexpected)? {
            let (key, bytes) = item.map_err(unexpected)?;
            let record = super::record::Record::new(bytes)?;
            if record.is_of_only(number) && !record.is_visible(directory.in_force) {
                theirs.push((key.to_vec(), record.ino()));
            }
            looked_at += 1;
            if looked_at == most {
                last = Some(key.to_vec());
                break;
            }
        }
        for (key, ino) in &theirs {
            self.tables().names.delete(&mut self.txn, key).map_err(unexpected)?;
            self.tables().inodes.delete(&mut self.txn, &ino.to_be_bytes()).map_err(unexpected)?;
        }
        Ok(last)
    }

    /// No name of this directory is known any more, but for its inode number.
    pub(super) fn forget_names(&mut self, dir: u64, directory: &mut Directory) -> Result<(), MetaError> {
        self.forget_negatives(dir, directory, u64::MAX, usize::MAX)?;
        let mut keys = Vec::new();
        self.each(dir, |key, record| {
            if record.is_absent() {
                keys.push(key.to_vec());
            }
            true
        })?;
        for key in keys {
            let (parent, name) = split_key(&key)?;
            let key = key_of(parent, name)?;
            if let Some(known) = self.known(&key)? {
                self.put_known(&key, &Known { absent: false, first: 0, last: 0, ..known })?;
            }
        }
        let newest = directory.newest.saturating_add(1);
        *directory = Directory { newest, in_force: newest, ..Directory::default() };
        Ok(())
    }

    fn forget_children(&mut self, dir: u64) -> Result<(), MetaError> {
        if let Some(mut directory) = self.directory(dir)? {
            self.forget_names(dir, &mut directory)?;
            self.put_directory(dir, &directory)?;
        }
        Ok(())
    }

    /// Visits all records of a directory until `visit` says false.
    fn each(
        &self,
        dir: u64,
        mut visit: impl FnMut(&[u8], super::record::Record<'_>) -> bool,
    ) -> Result<(), MetaError> {
        let (start, end) = (dir.to_be_bytes(), dir.saturating_add(1).to_be_bytes());
        let range = (Bound::Excluded(&start[..]), Bound::Excluded(&end[..]));
        for item in self.tables().names.range(&self.txn, &range).map_err(unexpected)? {
            let (key, bytes) = item.map_err(unexpected)?;
            if !visit(key, super::record::Record::new(bytes)?) {
                break;
            }
        }
        Ok(())
    }
}

/// Does the listing that is under way have this name already?
fn is_in(known: &Known, number: Option<u32>) -> bool {
    !known.absent && number == Some(known.last)
}

/// Keys that come in order fill their pages if LMDB knows that they do, and half of each page otherwise.
fn append_or_put(
    table: Database<Bytes, Bytes>,
    txn: &mut RwTxn<'_>,
    key: &[u8],
    value: &[u8],
) -> Result<(), MetaError> {
    match table.put_with_flags(txn, PutFlags::APPEND, key, value) {
        Err(heed::Error::Mdb(MdbError::KeyExist)) => table.put(txn, key, value).map_err(unexpected),
        other => other.map_err(unexpected),
    }
}

fn is_full(view: &View) -> bool {
    rustix::fs::statvfs(view.env.path()).is_ok_and(|s| s.f_bavail.saturating_mul(s.f_frsize) < 1 << 20)
}

impl Origin {
    fn seen_ms(self) -> u64 {
        match self {
            Self::Asked { seen_ms } | Self::Listed { seen_ms, .. } => seen_ms,
        }
    }

    /// Was the name asked for while this listing was under way? Then that answer is at least as new as the page, of
    /// of which it is unknown when the source made it. (A time in the future comes from another boot, whose clock was
    /// wrong.)
    fn is_older_than(self, seen_ms: u64) -> bool {
        matches!(self, Self::Listed { seen_ms: begun, now_ms } if begun < seen_ms && seen_ms <= now_ms)
    }
}

impl Attributes {
    pub(super) fn first(ino: u64, incoming: &Incoming) -> Self {
        Self {
            ino,
            kind: incoming.kind,
            size: incoming.size,
            mtime_ns: incoming.mtime_ns,
            version: 1,
            epoch: 0,
            since_epoch: 0,
            token: incoming.token.clone(),
            cached: None,
            target: incoming.target.clone(),
            permissions: incoming.permissions,
        }
    }

    /// Takes over what the source says; content that differs is a new version.
    fn absorb(&mut self, incoming: &Incoming) {
        let same_content = self.size == incoming.size && self.token == incoming.token;
        // This node has written it, with owner, mode and time, and a listing does not tell them.
        let is_told_less = self.permissions.is_some() && incoming.permissions.is_none();
        if is_told_less && same_content && self.kind == incoming.kind {
            return;
        }
        let mtime_ns = if same_content && self.kind == Kind::File {
            finer_mtime(self.mtime_ns, incoming.mtime_ns)
        } else {
            incoming.mtime_ns
        };
        let changed = self.kind != incoming.kind
            || match self.kind {
                Kind::Directory => false,
                Kind::File => {
                    !same_content || mtime_ns != self.mtime_ns && !is_refined(self.mtime_ns, mtime_ns)
                }
                Kind::Symlink => !same_content || mtime_ns != self.mtime_ns || self.target != incoming.target,
            };
        self.kind = incoming.kind;
        self.size = incoming.size;
        self.mtime_ns = mtime_ns;
        self.token.clone_from(&incoming.token);
        self.target.clone_from(&incoming.target);
        self.permissions = incoming.permissions;
        if changed {
            self.version = self.version.saturating_add(1);
            self.cached = None;
            self.epoch = next_even(self.epoch);
            self.since_epoch = self.epoch;
        }
    }

    /// Records where the content lies. An inode whose epochs are used up stays with the worker.
    pub(super) fn locate(&mut self, cached: Option<Cached>) {
        if self.cached == cached {
            return;
        }
        if let (Some(known), Some(reported)) = (&self.cached, &cached)
            && (known.root, known.file) == (reported.root, reported.file)
        {
            // The same file, vouched for by the agent's successor: nothing that an open could see has changed, and a
            // new epoch would send every worker that opens it back to look it up.
            self.cached = cached;
            return;
        }
        match cached.and(next_odd(self.epoch)) {
            Some(epoch) => (self.epoch, self.cached) = (epoch, cached),
            None if self.cached.is_some() => (self.epoch, self.cached) = (next_even(self.epoch), None),
            None => {}
        }
    }
}

const SECOND_NS: i64 = 1_000_000_000;

/// HTTP dates have whole seconds, listings have milliseconds. Of two times that may be the same one, the finer.
fn finer_mtime(known: i64, reported: i64) -> i64 {
    if is_refined(reported, known) { known } else { reported }
}

/// Is `coarse` the time `fine` without its fraction?
fn is_refined(coarse: i64, fine: i64) -> bool {
    coarse.rem_euclid(SECOND_NS) == 0 && coarse.div_euclid(SECOND_NS) == fine.div_euclid(SECOND_NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_kernel_looks_up_are_none() {
        let long = [b'x'; NAME_MAX + 1];
        for name in [&b""[..], b".", b"..", b"a/b", b"../set/x", b"a\0b", &long] {
            assert!(!is_name(name), "{name:?}");
        }
        assert!([&b"a"[..], b"...", b"\xff", &long[1..]].iter().all(|name| is_name(name)));
    }
}
