//! A durable table of small records, kept as an append-only log, for what must survive SIGKILL and power losses.
//!
//! ```text
//!  put, delete, batch ─► one frame, one write at the end ─► the table in memory     there after SIGKILL
//!  sync               ─► fdatasync ─► the durable mark in the file's header         there after a power loss
//!  log > 4 × live     ─► name.new: all live records ─► fsync ─► rename ─► fsync of the directory
//! ```
//!
//! # What a crash leaves
//!
//! A process that dies leaves every change whose call returned, and of the one that it was in all or nothing. A power
//! loss leaves some prefix of the changes that has at least all before the last `sync`. A batch is there as a whole or
//! not at all.
//!
//! # Torn or damaged
//!
//! The disk writes sectors of unsynced frames in any order, so after a power loss sound frames may stand behind a bad
//! one, and nothing is wrong. A bad frame that had been synced is a disk that lost bytes. What frames stand behind it
//! does not tell the two apart; the durable mark does. It is an offset in the header, raised after each fdatasync that
//! succeeded, never before: all bytes below it were durable when it was written. It is not synced itself, as one that
//! is lost leaves an older one, which is still true (two slots in turns: a torn one is not read). Therefore:
//!
//! - The first bad frame at or behind the mark is a tear of unsynced writes: it is cut off with all behind it.
//! - A bad frame, or the file's end, before the mark is damage: `open` fails and leaves the file as it is.
//! - Damage behind the mark that is on the disk cannot be told from a tear. Synced frames stand there only after a power
//!   loss between an fdatasync and the write-back of its mark, or when the newest mark is damaged as well.
//!
//! # Never believe an older fsync
//!
//! Three rules keep the prefix a prefix:
//!
//! - What is cut off (a tear, a write that failed) is cut off durably before anything else is written: else a power
//!   loss could bring the old bytes back, right behind a new frame that ends where they begin.
//! - After an fsync that failed, dirty pages may be marked as clean and be lost later. The journal is poisoned, and
//!   `open` writes all frames behind the mark once more before it syncs them.
//! - What `open` found is durable when it returns. A process that died may have left it in the page cache alone.
//!
//! What never happens here: a journal is not shared between processes, no value is compared or understood, nothing is
//! read from the file after `open`.

mod disk;
mod error;
mod frame;
mod replay;
mod table;
#[cfg(test)]
mod tests;

pub use error::JournalError;
pub use frame::Change;

use disk::{Directory, Disk, File};
use error::while_it;
use frame::{FRAME_MAX, FRAMES, Frame, HEAD, Header, KEY_MAX, Mark, VALUE_MAX};
use replay::replay;
use std::fmt;
use std::io;
use std::ops::Bound;
use std::os::fd::BorrowedFd;
use table::Table;

/// A smaller log is not worth a compaction.
const COMPACT_MIN: u64 = 64 << 10;
/// A log that is so many times what its live records take is compacted.
const COMPACT_FACTOR: u64 = 4;
/// A frame of a compaction is written when it has so many bytes.
const COMPACT_FRAME: usize = 256 << 10;

/// What `open` found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// In the table.
    pub records: usize,
    /// Of changes that were never synced and are torn.
    pub cut_bytes: u64,
}

pub struct Journal {
    disk: Box<dyn Disk>,
    name: String,
    file: Box<dyn File>,
    header: Header,
    mark: Mark,
    /// Where the next frame goes, and its sequence number.
    end: u64,
    next: u64,
    table: Table,
    /// Something was written since the last sync.
    is_dirty: bool,
    /// What is in the file is not known any more.
    is_poisoned: bool,
    /// A compaction failed: none below this size.
    compact_from: u64,
}

impl Journal {
    /// Opens the journal `name` in `dir`, or creates it; `name`, `name.new` and `name.lock` are its files. `format` is
    /// the version of what the caller keeps in it. Blocks on the disk, as all changes do. What it has found is durable.
    pub fn open(dir: BorrowedFd<'_>, name: &str, format: u32) -> Result<(Journal, Recovered), JournalError> {
        if name.is_empty() || name.contains('/') {
            // It would lie in another directory than the one that is synced.
            return Err(while_it("have such a name")(io::ErrorKind::InvalidInput.into()));
        }
        Journal::open_on(Box::new(Directory::lock(dir, name)?), name, format)
    }

    fn open_on(disk: Box<dyn Disk>, name: &str, format: u32) -> Result<(Journal, Recovered), JournalError> {
        disk.remove(&new_name(name)).map_err(while_it("remove what a compaction left"))?;
        let file = match disk.open(name).map_err(while_it("be opened"))? {
            Some(file) => file,
            // Behind a rename as well: a journal that is there is whole, header and all.
            None => {
                let first = Header { format, first: 0 };
                let (file, _, _) = write_new(&*disk, name, first, &Table::default())
                    .and_then(|new| disk.rename(&new_name(name), name).map(|()| new))
                    .map_err(while_it("be created"))?;
                file
            }
        };
        let found = replay(&*file, format)?;
        let recovered = Recovered { records: found.table.records.len(), cut_bytes: found.torn };
        let mut journal = Journal {
            disk,
            name: name.to_owned(),
            file,
            header: found.header,
            mark: found.mark,
            end: found.end,
            next: found.next,
            table: found.table,
            is_dirty: true,
            is_poisoned: false,
            compact_from: 0,
        };
        if found.torn > 0 {
            journal.file.set_size(found.end).map_err(while_it("cut off its torn end"))?;
        }
        // As the frames behind it (`replay`): the other slot is written only when this one is on the disk.
        let mark = journal.mark;
        journal
            .file
            .write_all(&mark.encode(journal.header.first), mark.at())
            .map_err(while_it("be written"))?;
        journal.make_durable()?;
        // Its creation or last compaction may have died between the rename and this.
        journal.disk.sync().map_err(JournalError::NotDurable)?;
        Ok((journal, recovered))
    }

    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.table.records.get(key).map(Vec::as_slice)
    }

    /// All records, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.range(b"")
    }

    /// The records whose keys start with `prefix`, by key.
    pub fn range<'a>(&'a self, prefix: &'a [u8]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let records = self.table.records.range::<[u8], _>(from);
        records.map(|(key, value)| (&key[..], &value[..])).take_while(move |(key, _)| key.starts_with(prefix))
    }

    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), JournalError> {
        self.batch(&[Change::Put { key, value }])
    }

    /// A key that is not there is a success.
    pub fn delete(&mut self, key: &[u8]) -> Result<(), JournalError> {
        self.batch(&[Change::Delete { key }])
    }

    /// Makes all changes, in their order, or none of them, whatever crashes. After an error none was made, except that
    /// a poisoned journal may show them when it is opened again. When the log has grown too long, this compacts it,
    /// which takes as long as two fsyncs and a write of all live records.
    pub fn batch(&mut self, changes: &[Change<'_>]) -> Result<(), JournalError> {
        if self.is_poisoned {
            return Err(JournalError::Poisoned);
        }
        check_sizes(changes)?;
        if changes.is_empty() {
            return Ok(());
        }
        let mut frame = Frame::new();
        changes.iter().for_each(|change| frame.push(change));
        let frame = frame.finish(self.next);
        if let Err(error) = self.file.write_all(&frame, self.end) {
            self.undo();
            return Err(while_it("be written")(error));
        }
        self.is_dirty = true;
        self.end += frame.len() as u64;
        self.next = self.next.wrapping_add(1);
        changes.iter().for_each(|change| self.table.apply(change));
        let is_long = self.end > COMPACT_MIN.max(COMPACT_FACTOR * self.table.bytes);
        if is_long && self.end >= self.compact_from {
            self.compact();
        }
        Ok(())
    }

    /// Makes all changes so far durable.
    pub fn sync(&mut self) -> Result<(), JournalError> {
        if self.is_poisoned {
            return Err(JournalError::Poisoned);
        }
        if self.is_dirty { self.make_durable() } else { Ok(()) }
    }

    fn make_durable(&mut self) -> Result<(), JournalError> {
        if let Err(error) = self.file.sync() {
            self.is_poisoned = true;
            return Err(JournalError::NotDurable(error));
        }
        self.is_dirty = false;
        if self.end > self.mark.durable {
            let mark = Mark { slot: 1 - self.mark.slot, durable: self.end };
            // A mark that could not be written leaves the older one: less damage is told from a tear, none is hidden.
            if self.file.write_all(&mark.encode(self.header.first), mark.at()).is_ok() {
                self.mark = mark;
            }
        }
        Ok(())
    }

    /// Cuts off what a failed write has left, durably.
    fn undo(&mut self) {
        match self.file.set_size(self.end) {
            // A failure has poisoned the journal, and the caller is told of the write's.
            Ok(()) => drop(self.make_durable()),
            Err(_) => self.is_poisoned = true,
        }
    }

    /// Its errors are not the change's: the log is as good as before, but for one that poisons it.
    fn compact(&mut self) {
        let header = Header { first: self.next, ..self.header };
        let (file, end, next) = match write_new(&*self.disk, &self.name, header, &self.table) {
            Ok(new) => new,
            Err(error) => {
                tracing::warn!(journal = self.name, %error, "not compacted: tried again when it has grown");
                let _ = self.disk.remove(&new_name(&self.name)); // the next try removes it
                self.compact_from = self.end + self.end / 2;
                return;
            }
        };
        let renamed = self.disk.rename(&new_name(&self.name), &self.name);
        if renamed.is_ok() {
            self.mark = Mark { slot: 0, durable: end };
            (self.file, self.header, self.end, self.next) = (file, header, end, next);
            (self.is_dirty, self.compact_from) = (false, 0);
        }
        // A rename that failed may have been made, and one that is not durable may be lost: in both cases nobody knows
        // which of the two files a successor reads, and more must be written to neither.
        if let Err(error) = renamed.and_then(|()| self.disk.sync()) {
            tracing::warn!(journal = self.name, %error, "to be opened again: a compaction failed at its rename");
            self.is_poisoned = true;
        }
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Journal { name, end, mark, is_dirty, is_poisoned, .. } = self;
        write!(f, "Journal({name}, {end} bytes, {mark:?}, dirty: {is_dirty}, poisoned: {is_poisoned})")
    }
}

fn new_name(name: &str) -> String {
    format!("{name}.new")
}

/// Writes `name.new`, whole and durable: the file, its end, and the sequence number of its next frame.
fn write_new(
    disk: &dyn Disk,
    name: &str,
    header: Header,
    table: &Table,
) -> io::Result<(Box<dyn File>, u64, u64)> {
    disk.remove(&new_name(name))?;
    let file = disk.create(&new_name(name))?;
    let (mut end, mut next, mut frame) = (FRAMES as u64, header.first, Frame::new());
    let mut write = |frame: Frame| {
        let bytes = frame.finish(next);
        file.write_all(&bytes, end)?;
        (end, next) = (end + bytes.len() as u64, next.wrapping_add(1));
        io::Result::Ok(())
    };
    for change in table.puts() {
        frame.push(&change);
        if frame.len() >= COMPACT_FRAME {
            write(std::mem::replace(&mut frame, Frame::new()))?;
        }
    }
    if frame.len() > HEAD {
        write(frame)?;
    }
    // The mark is true as soon as the file has its name, which it gets when it is durable.
    file.write_all(&header.page(end), 0)?;
    file.sync()?;
    Ok((file, end, next))
}

fn check_sizes(changes: &[Change<'_>]) -> Result<(), JournalError> {
    let check = |what, bytes, max| {
        if bytes > max { Err(JournalError::TooLarge { what, bytes, max }) } else { Ok(()) }
    };
    for change in changes {
        let (key, value) = match *change {
            Change::Put { key, value } => (key, value),
            Change::Delete { key } => (key, &b""[..]),
        };
        check("key", key.len(), KEY_MAX)?;
        check("value", value.len(), VALUE_MAX)?;
    }
    check("batch", HEAD + changes.iter().map(Change::bytes).sum::<usize>(), FRAME_MAX)
}
