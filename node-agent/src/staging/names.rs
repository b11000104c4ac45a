//! What an area knows: its files by inode number and by name, who has what open, and how that stands in the journal.

use super::elsewhere::Elsewhere;
use super::file::File;
use super::locks::{name, parent};
use super::ongoing::Noted;
use super::record::{Append, Late, Moved, Record, Root};
use crate::lock::lock;
use journal::Change;
use link::Cause;
use link::broker::MountId;
use link::writable::Wrong;
use rustix::fs::{Mode, OFlags};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use store::WriteId;

/// Where the bytes of files lie, below the area's directory.
pub(super) const FILES: &str = "files";
/// First bytes of the journal's keys. What a file has elsewhere is read before the file.
pub(super) const ELSEWHERE: u8 = b'e';
pub(super) const FILE: u8 = b'f';
pub(super) const RESULT: u8 = b'r';
pub(super) const APPEND: u8 = b'a';
pub(super) const BEGUN: u8 = b'b';
pub(super) const OPEN: u8 = b'o';
pub(super) const LATE: u8 = b'l';
pub(super) const MOVED: u8 = b'm';
pub(super) const UPLOAD: u8 = b'u';
pub(super) const PROBE_KEY: &[u8] = b"p";
pub(super) const ROOT_KEY: &[u8] = b"d";
pub(super) const SOURCE_KEY: &[u8] = b"s";
pub(super) const BOOT_KEY: &[u8] = b"k";
pub(super) const TAG_KEY: &[u8] = b"t";

#[derive(Default)]
pub(super) struct State {
    /// By inode number.
    pub(super) files: HashMap<u64, Arc<File>>,
    /// Those that have a name.
    pub(super) paths: BTreeMap<Vec<u8>, u64>,
    /// Names that the store still has, of which this inode's object is to be removed.
    pub(super) gone: BTreeMap<Vec<u8>, u64>,
    /// Names of directories that the store still has, and that are others here, or (None) were made for nothing.
    pub(super) moved: BTreeMap<Vec<u8>, Option<Moved>>,
    /// How often it is open, by inode number and mount.
    pub(super) opens: HashMap<u64, HashMap<MountId, u32>>,
    pub(super) root: Option<Root>,
    /// What the volume showed when its journal was begun.
    pub(super) source: Option<String>,
    /// The run of the kernel in which it was opened last.
    pub(super) boot: Option<String>,
    /// With what the names of this area's writes begin, and (after it) those before a loss of power began.
    pub(super) tags: Vec<Tag>,
    /// The file on which this node tries what the store can do: the same each time, so that what a dead agent has left of it
    /// goes.
    pub(super) probe: Option<String>,
    /// Of requests that append, by mount and request.
    pub(super) appends: HashMap<(MountId, u64), Append>,
    /// What an agent before this one had begun at the store and not seen the end of.
    pub(super) begun: HashSet<(MountId, u64)>,
    /// Writes that were given up, by id.
    pub(super) late: BTreeMap<String, Late>,
    /// Uploads in parts that the store may have, by their writes.
    pub(super) uploads: BTreeMap<WriteId, Noted>,
    /// Of files that follow in the journal, by inode number.
    pub(super) elsewhere: HashMap<u64, Elsewhere>,
    /// Whose results stand in the journal.
    pub(super) results: HashMap<MountId, VecDeque<u64>>,
}

/// Random, of the writes of one area between two losses of power.
pub(super) type Tag = [u8; 8];

/// By mount and id.
pub(super) type Request = (MountId, u64);

/// One change of the journal: a key, and its value if it is to have one.
pub(super) type Entry = (Vec<u8>, Option<Vec<u8>>);

pub(super) fn changes(entries: &[Entry]) -> Vec<Change<'_>> {
    entries
        .iter()
        .map(|(key, value)| match value {
            Some(value) => Change::Put { key, value },
            None => Change::Delete { key },
        })
        .collect()
}

pub(super) fn data_name(ino: u64) -> String {
    format!("{ino:016x}")
}

pub(super) fn result_key(kind: u8, mount: MountId, unique: u64) -> Vec<u8> {
    [&[kind][..], &mount.0.to_be_bytes(), &unique.to_be_bytes()].concat()
}

pub(super) fn result_of(key: &[u8]) -> Option<(MountId, u64)> {
    let (mount, unique) = key.split_first_chunk::<8>()?;
    Some((MountId(u64::from_be_bytes(*mount)), u64::from_be_bytes(unique.try_into().ok()?)))
}

pub(super) fn append_entry((mount, unique): (MountId, u64), append: &Append) -> Result<Entry, Wrong> {
    let value = postcard::to_stdvec(append).map_err(|_| Wrong::Cause(Cause::Internal))?;
    Ok((result_key(APPEND, mount, unique), Some(value)))
}

pub(super) fn open_entry(mount: MountId, ino: u64, times: u32) -> Entry {
    let value = (times > 0).then(|| times.to_be_bytes().to_vec());
    (result_key(OPEN, mount, ino), value)
}

pub(super) fn file_entry(ino: u64, record: Option<&Record>) -> Result<Entry, Wrong> {
    let value = record.map(postcard::to_stdvec).transpose().map_err(|_| Wrong::Cause(Cause::Internal))?;
    Ok(([&[FILE][..], &ino.to_be_bytes()].concat(), value))
}

pub(super) fn elsewhere_entry(ino: u64, elsewhere: Option<&Elsewhere>) -> Result<Entry, Wrong> {
    let value = elsewhere.map(postcard::to_stdvec).transpose().map_err(|_| Wrong::Cause(Cause::Internal))?;
    Ok(([&[ELSEWHERE][..], &ino.to_be_bytes()].concat(), value))
}

pub(super) fn moved_entry(path: &[u8], moved: Option<&Option<Moved>>) -> Result<Entry, Wrong> {
    let value = moved.map(postcard::to_stdvec).transpose().map_err(|_| Wrong::Cause(Cause::Internal))?;
    Ok(([&[MOVED][..], path].concat(), value))
}

/// Longer than any difference between the clock that times files and the one that times our changes, nanoseconds.
const TICK_NS: i64 = 10_000_000;

impl State {
    pub(super) fn recall(
        &mut self,
        ino: u64,
        mut record: Record,
        files: BorrowedFd<'_>,
    ) -> Result<(), String> {
        let mut size = record.base.as_ref().map_or(0, |base| base.size);
        let mut data = None;
        if record.local {
            // Made before its record; what a power loss has taken of it was never said to be safe.
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let opened = rustix::fs::openat(files, data_name(ino), flags, Mode::from_raw_mode(0o600));
            let opened = opened.map_err(|e| format!("the bytes of {:?}: {e}", record.path))?;
            let about = rustix::fs::fstat(&opened).map_err(|e| e.to_string())?;
            size = about.st_size as u64;
            let written_ns = (about.st_mtime as i64)
                .saturating_mul(1_000_000_000)
                .saturating_add(about.st_mtime_nsec as i64);
            if !record.clean && written_ns > record.mtime_ns {
                record.mtime_ns = written_ns.saturating_add(TICK_NS);
                record.ctime_ns = record.ctime_ns.max(record.mtime_ns);
            }
            // Where a request has a place and no bytes yet, the next one to append comes after it.
            let of_it = self.appends.values().filter(|append| append.ino == ino && !append.is_over);
            let given = of_it
                .filter(|append| (append.offset..append.end).contains(&size))
                .map(|append| append.end)
                .max();
            if let Some(end) = given {
                rustix::fs::ftruncate(&opened, end)
                    .map_err(|e| format!("the bytes of {:?}: {e}", record.path))?;
                size = end;
            }
            data = Some(Arc::new(opened.into()));
        }
        let is_local = record.local;
        let file = File::new(ino, record, data, size);
        if is_local && let Some(mut elsewhere) = self.elsewhere.remove(&ino) {
            // It may have been cut off just before.
            elsewhere.cut(size);
            file.rest.recall(elsewhere);
        }
        self.insert(&file);
        Ok(())
    }

    /// Takes a file in, with its names.
    pub(super) fn insert(&mut self, file: &Arc<File>) {
        let record = file.record();
        self.files.insert(file.ino, file.clone());
        self.name(file.ino, &record);
    }

    /// Its record is this from now on.
    pub(super) fn set(&mut self, file: &File, record: Record) {
        let before = std::mem::replace(&mut *lock(&file.record), record.clone());
        file.note_waits(record.waits());
        self.unname(file.ino, &before);
        self.name(file.ino, &record);
    }

    fn unname(&mut self, ino: u64, record: &Record) {
        if let Some(path) = &record.path
            && self.paths.get(path) == Some(&ino)
        {
            self.paths.remove(path);
        }
        for object in &record.former {
            if self.gone.get(&object.path) == Some(&ino) {
                self.gone.remove(&object.path);
            }
        }
    }

    fn name(&mut self, ino: u64, record: &Record) {
        if let Some(path) = &record.path {
            self.paths.insert(path.clone(), ino);
        }
        for object in &record.former {
            self.gone.insert(object.path.clone(), ino);
        }
    }

    pub(super) fn remove(&mut self, ino: u64) {
        if let Some(file) = self.files.remove(&ino) {
            self.unname(ino, &file.record());
        }
    }

    /// The store has it under this name, and here it has another one or none.
    pub(super) fn is_gone(&self, path: &[u8]) -> bool {
        self.gone.contains_key(path) || self.moved.contains_key(path)
    }

    /// What this name leads to here is not this inode, whatever the store says.
    pub(super) fn is_others(&self, path: &[u8], ino: u64) -> bool {
        let other = self.by_path(path).filter(|file| file.ino != ino);
        other.is_some_and(|file| file.speaks()) || self.gone.get(path).is_some_and(|owner| *owner != ino)
    }

    pub(super) fn by_path(&self, path: &[u8]) -> Option<Arc<File>> {
        self.files.get(self.paths.get(path)?).cloned()
    }

    pub(super) fn times_open(&self, mount: MountId, ino: u64) -> u32 {
        self.opens.get(&ino).and_then(|mounts| mounts.get(&mount)).copied().unwrap_or(0)
    }

    pub(super) fn set_open(&mut self, mount: MountId, ino: u64, times: u32) {
        let mounts = self.opens.entry(ino).or_default();
        match times {
            0 => drop(mounts.remove(&mount)),
            _ => drop(mounts.insert(mount, times)),
        }
        if mounts.is_empty() {
            self.opens.remove(&ino);
        }
    }

    pub(super) fn is_open(&self, ino: u64) -> bool {
        self.opens.contains_key(&ino)
    }

    /// Those of this directory, without those further below.
    pub(super) fn in_dir<'s, T>(
        names: &'s BTreeMap<Vec<u8>, T>,
        dir: &[u8],
    ) -> impl Iterator<Item = (&'s [u8], &'s T)> {
        let prefix = if dir.is_empty() { Vec::new() } else { [dir, b"/"].concat() };
        let from = prefix.clone();
        names.range(from..).take_while(move |(path, _)| path.starts_with(&prefix)).filter_map({
            let dir = dir.to_vec();
            move |(path, of)| (parent(path) == dir).then(|| (name(path), of))
        })
    }
}
