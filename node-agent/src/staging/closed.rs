//! A staging area that no mount has, as its journal tells of it. Nothing of it is made, sent or tidied up here.

use super::Waiting;
use super::elsewhere::Elsewhere;
use super::late::{MOST, late_entry, late_of};
use super::names::{ELSEWHERE, Entry, FILE, FILES, LATE, OPEN, SOURCE_KEY, changes, data_name, result_of};
use super::opening::{FORMAT, JOURNAL};
use super::record::Record;
use super::staged::{StagedFile, in_order};
use journal::Journal;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Files that one frame of the journal forgets.
const AT_ONCE: usize = 1000;

pub(super) struct Closed {
    journal: Journal,
    /// Where its bytes lie.
    pub(super) files: OwnedFd,
    pub(super) source: Option<String>,
    records: Vec<(u64, Record, u64)>,
    /// Of files that have not all their bytes here, by inode number.
    elsewhere: HashMap<u64, Elsewhere>,
    /// How often its programs had it open when its agent was gone, by inode number.
    opens: HashMap<u64, u32>,
    /// Writes that were given up and may come to pass.
    late: usize,
}

impl Closed {
    /// Blocking. None: there is no area, or nothing has ever been in it. No other process or thread may have it open.
    pub(super) fn open(dir: &Path) -> Result<Option<Self>, String> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let top = match rustix::fs::open(dir, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            top => top.map_err(|e| format!("its directory: {e}"))?,
        };
        match rustix::fs::statat(&top, JOURNAL, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(None), // it would be made
            about => about.map_err(|e| format!("its journal: {e}"))?,
        };
        let files =
            rustix::fs::openat(&top, FILES, flags, Mode::empty()).map_err(|e| format!("its files: {e}"))?;
        let (journal, _) =
            Journal::open(top.as_fd(), JOURNAL, FORMAT).map_err(|e| format!("its journal: {e}"))?;
        let (records, elsewhere, opens) = (Vec::new(), HashMap::new(), HashMap::new());
        let mut closed = Self { journal, files, source: None, records, elsewhere, opens, late: 0 };
        closed.read()?;
        Ok(Some(closed))
    }

    fn read(&mut self) -> Result<(), String> {
        let unknown = |key: &[u8]| {
            format!("its journal has a record that this version does not understand ({key:02x?})")
        };
        for (key, value) in self.journal.iter() {
            match key.split_first() {
                Some((&FILE, ino)) => {
                    let ino = u64::from_be_bytes(ino.try_into().map_err(|_| unknown(key))?);
                    let record: Record = postcard::from_bytes(value).map_err(|_| unknown(key))?;
                    let size = size(&self.files, ino, &record);
                    self.records.push((ino, record, size));
                }
                Some((&ELSEWHERE, ino)) => {
                    let ino = u64::from_be_bytes(ino.try_into().map_err(|_| unknown(key))?);
                    self.elsewhere.insert(ino, postcard::from_bytes(value).map_err(|_| unknown(key))?);
                }
                Some((&OPEN, rest)) => {
                    let (_, ino) = result_of(rest).ok_or_else(|| unknown(key))?;
                    let times = u32::from_be_bytes(value.try_into().map_err(|_| unknown(key))?);
                    let opens = self.opens.entry(ino).or_default();
                    *opens = opens.saturating_add(times);
                }
                Some((&LATE, _)) => self.late += 1,
                _ if key == SOURCE_KEY => self.source = Some(String::from_utf8_lossy(value).into_owned()),
                // Of requests, probes and the root: nothing that waits.
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn waiting(&self) -> Waiting {
        self.records.iter().fold(Waiting::default(), |sum, (_, record, size)| sum.and(record, *size))
    }

    pub(super) fn files_that_wait(&self) -> Vec<StagedFile> {
        let shown = self.records.iter().filter_map(|(ino, record, size)| {
            let since = Duration::from_nanos(record.ctime_ns.try_into().unwrap_or(0));
            let since = UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH).min(SystemTime::now());
            let opens = self.opens.get(ino).copied().unwrap_or(0);
            let elsewhere = self.elsewhere.get(ino).filter(|_| record.local);
            let missing = elsewhere.map_or(0, Elsewhere::missing);
            StagedFile::of(*ino, record, (*size, missing), since, opens)
        });
        in_order(shown.collect())
    }

    /// Files of which the store has all and that no program had open, by inode number, the least lately changed first.
    pub(super) fn clean(&self) -> Vec<u64> {
        let is_open = |ino: &u64| self.opens.get(ino).is_some_and(|times| *times > 0);
        let clean = self.records.iter().filter(|(ino, record, _)| record.clean && !is_open(ino));
        let mut clean: Vec<_> = clean.map(|(ino, record, _)| (record.ctime_ns, *ino)).collect();
        clean.sort_unstable();
        clean.into_iter().map(|(_, ino)| ino).collect()
    }

    /// Forgets these files, and then removes their bytes. Blocking.
    pub(super) fn discard(mut self, inos: &[u64]) -> Result<(), String> {
        let failed = |e: journal::JournalError| format!("its journal: {e}");
        // What the store was asked for may come to pass all the same, and is ours.
        let dropped: HashSet<u64> = inos.iter().copied().collect();
        let mut room = MOST.saturating_sub(self.late);
        for (_, record, _) in self.records.iter().filter(|(ino, ..)| dropped.contains(ino)) {
            let late = late_of(record);
            room = match room.checked_sub(late.len()) {
                Some(room) => room,
                None => break, // more are not remembered
            };
            let entries = late.iter().map(|(id, late)| late_entry(id, late.as_ref()));
            let entries = entries.collect::<Result<Vec<_>, _>>().map_err(|wrong| format!("{wrong:?}"))?;
            self.journal.batch(&changes(&entries)).map_err(failed)?;
        }
        for some in inos.chunks(AT_ONCE) {
            let gone = |ino: &u64| ([&[FILE][..], &ino.to_be_bytes()].concat(), None);
            let entries: Vec<Entry> = some.iter().map(gone).collect();
            self.journal.batch(&changes(&entries)).map_err(failed)?;
        }
        failpoint::hit("agent.staging.discarded");
        // A record that came back without its bytes would be sent as an empty file.
        self.journal.sync().map_err(failed)?;
        for ino in inos {
            // A stray is removed when the area is opened next.
            let _ = rustix::fs::unlinkat(&self.files, data_name(*ino), AtFlags::empty());
        }
        Ok(())
    }
}

/// Bytes. What a power loss has taken of a file was never said to be safe.
fn size(files: &OwnedFd, ino: u64, record: &Record) -> u64 {
    match record.local {
        true => {
            let about = rustix::fs::statat(files, data_name(ino), AtFlags::SYMLINK_NOFOLLOW);
            about.map_or(0, |about| about.st_size as u64)
        }
        false => record.base.as_ref().map_or(0, |base| base.size),
    }
}
