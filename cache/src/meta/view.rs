//! Reading the store, from any process and any thread, one short transaction per question.
//!
//! The process that writes (the agent) reads under LMDB's locks. The others open the store without them and so leave no
//! trace that the agent would have to trust: how they are kept from reading a page that is being used again, see
//! `fence`. No question makes a system call.

use super::clock::{Base, since_boot_ms, wall_base_ms};
use super::fence::READER_LIMIT;
use super::record::{self, CLOCK, Directory, FORMAT, NameKey, Record, split_key};
use super::types::{Attributes, DISK_FULL, LIMIT_REACHED, ListingState, Lookup, MetaError, ROOT};
use heed::types::Bytes;
use heed::{Database, Env, EnvFlags, EnvOpenOptions, MdbError, RoTxn, WithoutTls};
use std::ops::Bound;
use std::path::Path;
use std::time::{Duration, Instant};

/// How deep a path may be: keys have 1,024 bytes at most, so this is never reached but by damage.
const DEPTH_MAX: usize = 4096;
pub(super) const DATABASES: u32 = 4;
/// A thread that is held up so often in the middle of microseconds is being stopped from outside.
const ATTEMPTS: u32 = 16;
/// Names that are not shown, of which one is looked at in much less than a microsecond: between two looks at the clock.
const UNSEEN_AT_ONCE: u32 = 1024;
/// Commits that a reader may meet while it begins.
const BEGIN_ATTEMPTS: u32 = 10_000;

/// A way to read one scope's names. Cheap to clone; all clones share one map.
#[derive(Clone, Debug)]
pub struct View {
    pub(super) env: Env<WithoutTls>,
    pub(super) tables: Tables,
    /// Of the store's clock, for this boot.
    pub(super) base_ms: u64,
    /// How long an answer may take to be believed. None: in the process that writes, under its locks.
    pub(super) limit: Option<Duration>,
}

/// A question under way.
struct Question<'v> {
    txn: RoTxn<'v, WithoutTls>,
    begun: Instant,
    /// How long its answer is believed.
    limit: Option<Duration>,
}

impl Question<'_> {
    fn is_in_time(&self) -> bool {
        self.limit.is_none_or(|limit| self.begun.elapsed() < limit)
    }

    fn is_half_over(&self) -> bool {
        self.limit.is_some_and(|limit| self.begun.elapsed() >= limit / 2)
    }
}

/// Where a listing goes on.
#[derive(Clone, Copy)]
enum After<'a> {
    Nothing,
    /// After the name of this inode.
    Inode(u64),
    Name(&'a [u8]),
}

/// What a question found of a directory.
enum Part {
    /// All that was asked for, or as much as there was time for.
    All,
    /// No name to show yet: the time is up, and what lies before the place that was noted need not be looked at again.
    Passed,
    Unlisted,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Tables {
    pub(super) names: Database<Bytes, Bytes>,
    pub(super) inodes: Database<Bytes, Bytes>,
    pub(super) directories: Database<Bytes, Bytes>,
    pub(super) about: Database<Bytes, Bytes>,
}

impl View {
    /// Opens the store of another process, in which the agent has it open. `data.mdb` is mapped read-only; nothing is
    /// written, no lock taken. After this returns no file is opened any more: a process may lock itself down now.
    pub fn open(dir: &Path) -> Result<Self, MetaError> {
        Self::open_with(dir, READER_LIMIT)
    }

    pub(super) fn open_with(dir: &Path, limit: Duration) -> Result<Self, MetaError> {
        // LMDB would create what is missing.
        if !dir.join("data.mdb").is_file() {
            return Err(MetaError::NotReady(dir.to_owned()));
        }
        // The size of the map comes from the file: it is what the agent chose.
        let mut options = EnvOpenOptions::new().read_txn_without_tls();
        options.max_dbs(DATABASES);
        // SAFETY: without locks the writer does not know its readers, and may use pages again that one of them is
        // looking at. It does not before `fence::KEPT` has passed, and every question here ends before that or is
        // asked again. One that is held up for so long inside LMDB may find anything, and LMDB may then stop this
        // process: a worker, whose successor goes on.
        unsafe { options.flags(EnvFlags::READ_ONLY | EnvFlags::NO_LOCK) };
        // SAFETY: `data.mdb` is changed by the agent alone, through LMDB. When the agent sets a file aside it renames
        // it, so that the pages mapped here stay what they were.
        let env = unsafe { options.open(dir) }.map_err(|e| from_heed(e, dir))?;
        let txn = env.read_txn().map_err(|e| from_heed(e, dir))?;
        let table = |name| {
            env.open_database::<Bytes, Bytes>(&txn, Some(name))
                .map_err(|e| from_heed(e, dir))?
                .ok_or_else(|| MetaError::NotReady(dir.to_owned()))
        };
        let about = table("about")?;
        match about.get(&txn, b"format").map_err(|e| from_heed(e, dir))? {
            Some(bytes) if record::stored(bytes).is_some_and(record::is_known) => {}
            other => return Err(MetaError::Format { found: format!("{other:?}"), expected: FORMAT }),
        }
        let clock = about.get(&txn, CLOCK).map_err(|e| from_heed(e, dir))?;
        // An agent of a build that does not know the clock takes the wall's.
        let base_ms = clock.and_then(Base::decode).map_or_else(wall_base_ms, |base| base.ms);
        let tables = Tables {
            names: table("names")?,
            inodes: table("inodes")?,
            directories: table("directories")?,
            about,
        };
        // Dropped, the handles would be forgotten with it.
        txn.commit().map_err(|e| from_heed(e, dir))?;
        Ok(Self { env, tables, base_ms, limit: Some(limit) })
    }

    /// What time it is, on the clock of which `seen_ms` tells everywhere here. No administrator can set it; see `clock`.
    pub fn now_ms(&self) -> u64 {
        self.base_ms.saturating_add(since_boot_ms())
    }

    /// What is known of `name` in the directory `parent`. A directory that was never heard of knows nothing.
    pub fn lookup(&self, parent: u64, name: &[u8]) -> Result<Lookup, MetaError> {
        let Some(key) = NameKey::new(parent, name).filter(|_| !name.is_empty()) else {
            return Err(MetaError::BadName);
        };
        self.ask(|txn| {
            let directory = self.tables.directory(txn, parent)?.unwrap_or_default();
            let record = self.tables.record(txn, key.as_bytes())?;
            if let Some(record) = record {
                if record.is_visible(directory.in_force) {
                    return Ok(Lookup::Found { attributes: record.attributes()?, seen_ms: record.seen_ms() });
                }
                if record.is_absent() {
                    let listed = if directory.complete { directory.seen_ms } else { 0 };
                    return Ok(Lookup::Absent { seen_ms: record.seen_ms().max(listed) });
                }
            }
            Ok(if directory.complete {
                Lookup::Absent { seen_ms: directory.seen_ms }
            } else {
                Lookup::Unknown
            })
        })
    }

    /// Attributes of an inode whose name exists, with the moment for which that is known. The root always exists; its
    /// `seen_ms` is [`super::ALWAYS_MS`].
    pub fn attributes(&self, ino: u64) -> Result<Option<(Attributes, u64)>, MetaError> {
        self.ask(|txn| {
            let Some((parent, record)) = self.tables.record_of(txn, ino)? else { return Ok(None) };
            let in_force = self.tables.directory(txn, parent)?.unwrap_or_default().in_force;
            if !record.is_visible(in_force) {
                return Ok(None);
            }
            Ok(Some((record.attributes()?, record.seen_ms())))
        })
    }

    /// Attributes of an inode as last known, also after its name has vanished: for what a file still open looks like.
    pub fn last_attributes(&self, ino: u64) -> Result<Option<Attributes>, MetaError> {
        self.ask(|txn| self.tables.record_of(txn, ino)?.map(|(_, record)| record.attributes()).transpose())
    }

    /// Inode of the directory in which `ino` lies, also after it has vanished. The root's parent is the root.
    pub fn parent(&self, ino: u64) -> Result<Option<u64>, MetaError> {
        if ino == ROOT {
            return Ok(Some(ROOT));
        }
        self.ask(|txn| match self.tables.key_of(txn, ino)? {
            Some(key) => Ok(Some(split_key(key)?.0)),
            None => Ok(None),
        })
    }

    /// Path below the source, segments joined by slashes, empty for the root; also of what has vanished.
    pub fn path(&self, ino: u64) -> Result<Option<Vec<u8>>, MetaError> {
        self.ask(|txn| {
            let mut segments = Vec::new();
            let mut at = ino;
            while at != ROOT {
                let Some(key) = self.tables.key_of(txn, at)? else { return Ok(None) };
                let (parent, name) = split_key(key)?;
                segments.push(name);
                if segments.len() > DEPTH_MAX {
                    return Err(MetaError::Damaged(format!("inode {ino} has no way to the root")));
                }
                at = parent;
            }
            segments.reverse();
            Ok(Some(segments.join(&b'/')))
        })
    }

    /// Inode of a path below the source, if every segment of it is known; also of what has vanished.
    pub fn resolve(&self, path: &[u8]) -> Result<Option<u64>, MetaError> {
        self.ask(|txn| {
            let mut at = ROOT;
            for name in path.split(|b| *b == b'/').filter(|s| !s.is_empty()) {
                let Some(key) = NameKey::new(at, name) else { return Ok(None) };
                match self.tables.record(txn, key.as_bytes())?.map(|r| r.ino()) {
                    None | Some(0) => return Ok(None),
                    Some(ino) => at = ino,
                }
            }
            Ok(Some(at))
        })
    }

    /// None: no name of this directory was ever stored, nor a listing begun.
    pub fn listing(&self, dir: u64) -> Result<Option<ListingState>, MetaError> {
        self.ask(|txn| Ok(self.tables.directory(txn, dir)?.map(|d| d.state())))
    }

    /// Calls `each` with the names of a directory in byte order, after the name of the inode `after` (which may have
    /// vanished since), until it says false. None: there is no complete listing.
    ///
    /// `each` runs inside a read transaction: it must be quick and must not ask this store anything. In a
    /// process that does not write, a call that was held up ends early, after at least one name.
    pub fn read_dir(
        &self,
        dir: u64,
        after: Option<u64>,
        each: &mut dyn FnMut(&[u8], &Attributes) -> bool,
    ) -> Result<Option<()>, MetaError> {
        self.read_dir_from(dir, after.map_or(After::Nothing, After::Inode), each)
    }

    /// The same after this name, which need not be there any more.
    pub fn read_dir_after_name(
        &self,
        dir: u64,
        name: &[u8],
        each: &mut dyn FnMut(&[u8], &Attributes) -> bool,
    ) -> Result<Option<()>, MetaError> {
        self.read_dir_from(dir, After::Name(name), each)
    }

    fn read_dir_from(
        &self,
        dir: u64,
        after: After<'_>,
        each: &mut dyn FnMut(&[u8], &Attributes) -> bool,
    ) -> Result<Option<()>, MetaError> {
        let (mut name, mut shown) = (Vec::new(), false);
        // Names that are not shown may be many: of a listing that is being stored, and of those before.
        let mut passed = Vec::new();
        let mut attempts = 0;
        while attempts < ATTEMPTS {
            let question = self.begin()?;
            let part = self.read_dir_in(&question, dir, after, &mut passed, &mut |found, attributes| {
                name.clear();
                name.extend_from_slice(found);
                // What was copied until now is what it was.
                if !question.is_in_time() {
                    return false;
                }
                shown = true;
                each(&name, attributes)
            });
            let in_time = question.is_in_time();
            match part {
                Ok(Part::Passed) => attempts = 0,
                Ok(Part::All) | Err(_) if in_time => return part.map(|_| Some(())),
                Ok(Part::Unlisted) if in_time => return Ok(None),
                _ if shown => return Ok(Some(())), // the caller goes on from the last name that it was shown
                _ => attempts += 1,
            }
        }
        Err(MetaError::Overtaken)
    }

    /// Goes on after the key `passed`, if that is not empty, and moves it on where it was not held up.
    fn read_dir_in(
        &self,
        question: &Question<'_>,
        dir: u64,
        after: After<'_>,
        passed: &mut Vec<u8>,
        each: &mut dyn FnMut(&[u8], &Attributes) -> bool,
    ) -> Result<Part, MetaError> {
        let txn = &question.txn;
        let Some(directory) = self.tables.directory(txn, dir)?.filter(|d| d.complete) else {
            return Ok(Part::Unlisted);
        };
        let start = match after {
            _ if !passed.is_empty() => passed.clone(),
            // No name is empty but the root's own, which has parent 0.
            After::Nothing => dir.to_be_bytes().to_vec(),
            After::Name(name) => [&dir.to_be_bytes()[..], name].concat(),
            After::Inode(ino) => match self.tables.key_of(txn, ino)? {
                Some(key) if split_key(key)?.0 == dir => key.to_vec(),
                _ => return Err(MetaError::UnknownInode(ino)),
            },
        };
        let end = dir.saturating_add(1).to_be_bytes();
        let range = (Bound::Excluded(&start[..]), Bound::Excluded(&end[..]));
        let (mut unseen, mut shown, mut copied) = (0u32, false, Vec::new());
        for item in self.tables.names.range(txn, &range).map_err(unexpected)? {
            let (key, bytes) = item.map_err(unexpected)?;
            let record = Record::new(bytes)?;
            if record.is_visible(directory.in_force) {
                shown = true;
                if !each(split_key(key)?.1, &record.attributes()?) {
                    break;
                }
            } else {
                unseen = unseen.wrapping_add(1);
                if unseen.is_multiple_of(UNSEEN_AT_ONCE) && question.limit.is_some() {
                    copied.clear();
                    copied.extend_from_slice(key);
                    if !question.is_in_time() || shown && question.is_half_over() {
                        break;
                    }
                    std::mem::swap(passed, &mut copied);
                    if question.is_half_over() {
                        return Ok(Part::Passed);
                    }
                }
            }
        }
        Ok(Part::All)
    }

    /// Asks once, and again if the asking thread was held up meanwhile.
    pub(super) fn ask<T>(
        &self,
        question: impl Fn(&RoTxn<'_>) -> Result<T, MetaError>,
    ) -> Result<T, MetaError> {
        for _ in 0..ATTEMPTS {
            let begun = self.begin()?;
            let answer = question(&begun.txn);
            if begun.is_in_time() {
                return answer;
            }
        }
        Err(MetaError::Overtaken)
    }

    fn begin(&self) -> Result<Question<'_>, MetaError> {
        for _ in 0..BEGIN_ATTEMPTS {
            let begun = Instant::now();
            let txn = self.read()?;
            // The roots of the tables were copied from a page that the next commit but one writes over. If this is the
            // newest commit still, that one had not begun.
            if self.limit.is_none() || self.env.info().last_txn_id == txn.id() {
                return Ok(Question { txn, begun, limit: self.limit });
            }
        }
        Err(MetaError::Overtaken)
    }

    pub(super) fn read(&self) -> Result<RoTxn<'_, WithoutTls>, MetaError> {
        self.env.read_txn().map_err(unexpected)
    }
}

impl Tables {
    pub(super) fn directory(&self, txn: &RoTxn<'_>, ino: u64) -> Result<Option<Directory>, MetaError> {
        self.directories.get(txn, &ino.to_be_bytes()).map_err(unexpected)?.map(Directory::decode).transpose()
    }

    pub(super) fn record<'t>(&self, txn: &'t RoTxn<'_>, key: &[u8]) -> Result<Option<Record<'t>>, MetaError> {
        self.names.get(txn, key).map_err(unexpected)?.map(Record::new).transpose()
    }

    pub(super) fn key_of<'t>(&self, txn: &'t RoTxn<'_>, ino: u64) -> Result<Option<&'t [u8]>, MetaError> {
        self.inodes.get(txn, &ino.to_be_bytes()).map_err(unexpected)
    }

    /// Parent and record of an inode, visible or not.
    pub(super) fn record_of<'t>(
        &self,
        txn: &'t RoTxn<'_>,
        ino: u64,
    ) -> Result<Option<(u64, Record<'t>)>, MetaError> {
        let Some(key) = self.key_of(txn, ino)? else { return Ok(None) };
        let record = self
            .record(txn, key)?
            .ok_or_else(|| MetaError::Damaged(format!("inode {ino} points at no name")))?;
        Ok(Some((split_key(key)?.0, record)))
    }
}

impl Directory {
    pub(super) fn state(&self) -> ListingState {
        let shown = |n| if self.complete { n } else { 0 };
        ListingState {
            complete: self.complete,
            seen_ms: shown(self.seen_ms),
            entries: shown(self.entries),
            hidden: shown(self.hidden),
        }
    }
}

/// An error of an environment that is open.
pub(super) fn unexpected(e: heed::Error) -> MetaError {
    match e {
        heed::Error::Mdb(MdbError::MapFull) => MetaError::Full(LIMIT_REACHED),
        heed::Error::Mdb(MdbError::ReadersFull) => MetaError::TooManyReaders,
        heed::Error::Mdb(
            e @ (MdbError::PageNotFound | MdbError::Corrupted | MdbError::Panic | MdbError::Invalid),
        ) => MetaError::Damaged(e.to_string()),
        heed::Error::Io(e) if is_no_room(&e) => MetaError::Full(DISK_FULL),
        heed::Error::Io(source) => MetaError::Io { what: "cannot access the metadata store", source },
        other => MetaError::Unexpected(other.to_string()),
    }
}

pub(super) fn is_no_room(e: &std::io::Error) -> bool {
    let is = |errno: rustix::io::Errno| e.raw_os_error() == Some(errno.raw_os_error());
    is(rustix::io::Errno::NOSPC) || is(rustix::io::Errno::DQUOT)
}

/// An error while opening.
pub(super) fn from_heed(e: heed::Error, dir: &Path) -> MetaError {
    match e {
        heed::Error::EnvAlreadyOpened => MetaError::InUse(dir.to_owned()),
        heed::Error::Mdb(e @ MdbError::VersionMismatch) => {
            MetaError::Format { found: e.to_string(), expected: FORMAT }
        }
        other => unexpected(other),
    }
}
