//! The journal: one appended record per small file that is whole, with its key and checksums.
//!
//! A record of a file that has gone is dead; compaction drops the dead. A torn record is skipped: the reader looks
//! for the next one that carries the magic number and a matching checksum.

use super::FileKey;
use super::layout::JOURNAL;
use super::pool::call_returned;
use crc_fast::crc32_iscsi;
use rustix::fs::{AtFlags, Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use volume::ScopeId;

pub(super) const MAGIC: u32 = 0x4a50_4d31;
const HEAD: usize = 12;
const FIXED: usize = 8 + 8 + 32 + 4 + 4 + 4;
/// Longer than any key of any store.
const RECORD_MAX: usize = 64 << 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub id: u64,
    pub key: FileKey,
    /// One per block.
    pub crcs: Box<[u32]>,
}

/// The open journal of one root. Created when the first record is written.
#[derive(Default)]
pub(crate) struct Journal {
    file: Option<OwnedFd>,
    /// Records in the file, dead ones included.
    pub records: u64,
}

impl Journal {
    pub(crate) fn append(&mut self, dir: BorrowedFd<'_>, record: &Record) -> io::Result<()> {
        if self.file.is_none() {
            self.file = Some(open(dir, JOURNAL, OFlags::CREATE | OFlags::APPEND)?);
        }
        let file = self.file.as_ref().expect("opened above");
        let bytes = encode(record);
        if bytes.len() > HEAD + RECORD_MAX {
            return Ok(()); // no store has such names: no look-up would find the record, and the file is a miss
        }
        // One write: a short one (disk full) leaves a torn record, which readers skip.
        let written = rustix::io::write(file, &bytes)?;
        if written != bytes.len() {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.records += 1;
        Ok(())
    }

    /// Every sound record and the number of torn or damaged stretches.
    pub(crate) fn load(&mut self, dir: BorrowedFd<'_>) -> io::Result<(Vec<Record>, u64)> {
        let bytes = match open(dir, JOURNAL, OFlags::empty()) {
            Ok(file) => read_to_end(file.as_fd())?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), 0)),
            Err(e) => return Err(e),
        };
        call_returned();
        let (records, torn) = decode_all(&bytes);
        call_returned();
        self.records = records.len() as u64;
        Ok((records, torn))
    }

    /// Keeps the records that `live` wants, by rename.
    pub(crate) fn compact(&mut self, dir: BorrowedFd<'_>, live: impl Fn(u64) -> bool) -> io::Result<()> {
        let (records, _) = self.load(dir)?;
        call_returned();
        let temporary = format!("{JOURNAL}.tmp");
        let file = open(dir, &temporary, OFlags::CREATE | OFlags::TRUNC | OFlags::APPEND)?;
        let mut kept = 0;
        for chunk in records.chunks(1024) {
            let mut bytes = Vec::new();
            for record in chunk.iter().filter(|r| live(r.id)) {
                bytes.extend_from_slice(&encode(record));
                kept += 1;
            }
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                rest = &rest[rustix::io::write(&file, rest)?..];
                call_returned();
            }
        }
        rustix::fs::renameat(dir, &temporary, dir, JOURNAL)?;
        *self = Self { file: Some(file), records: kept };
        Ok(())
    }

    /// Opened again by the next append.
    #[cfg(test)]
    pub(crate) fn close(&mut self) {
        self.file = None;
    }

    pub(crate) fn discard(dir: BorrowedFd<'_>) {
        let _ = rustix::fs::unlinkat(dir, JOURNAL, AtFlags::empty());
    }
}

fn open(dir: BorrowedFd<'_>, name: &str, extra: OFlags) -> io::Result<OwnedFd> {
    let access = if extra.is_empty() { OFlags::RDONLY } else { OFlags::RDWR };
    let flags = access | extra | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?)
}

fn read_to_end(file: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    std::fs::File::from(file.try_clone_to_owned()?).read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub(super) fn encode(record: &Record) -> Vec<u8> {
    let key = &record.key;
    let mut body = Vec::with_capacity(FIXED + key.path.len() + key.token.len() + record.crcs.len() * 4);
    body.extend_from_slice(&record.id.to_le_bytes());
    body.extend_from_slice(&key.size.to_le_bytes());
    body.extend_from_slice(key.scope.as_str().as_bytes());
    for len in [key.path.len(), key.token.len(), record.crcs.len()] {
        body.extend_from_slice(&(len as u32).to_le_bytes());
    }
    body.extend_from_slice(&key.path);
    body.extend_from_slice(key.token.as_bytes());
    record.crcs.iter().for_each(|crc| body.extend_from_slice(&crc.to_le_bytes()));
    let mut bytes = Vec::with_capacity(HEAD + body.len());
    for word in [MAGIC, body.len() as u32, crc32_iscsi(&body)] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.append(&mut body);
    bytes
}

pub(super) fn decode_all(mut bytes: &[u8]) -> (Vec<Record>, u64) {
    let (mut records, mut torn, mut lost) = (Vec::new(), 0, false);
    while !bytes.is_empty() {
        match decode(bytes) {
            Some((record, used)) => {
                records.push(record);
                bytes = &bytes[used..];
                lost = false;
            }
            None => {
                torn += u64::from(!lost);
                lost = true;
                bytes = &bytes[1..];
            }
        }
    }
    (records, torn)
}

fn decode(bytes: &[u8]) -> Option<(Record, usize)> {
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    if word(0)? != MAGIC {
        return None;
    }
    let len = word(4)? as usize;
    if !(FIXED..=RECORD_MAX).contains(&len) {
        return None;
    }
    let body = bytes.get(HEAD..HEAD + len)?;
    if crc32_iscsi(body) != word(8)? {
        return None;
    }
    let long = |at: usize| Some(u64::from_le_bytes(body.get(at..at + 8)?.try_into().ok()?));
    let short = |at: usize| Some(u32::from_le_bytes(body.get(at..at + 4)?.try_into().ok()?) as usize);
    let (path_len, token_len, crc_count) = (short(48)?, short(52)?, short(56)?);
    if FIXED + path_len + token_len + crc_count * 4 != len {
        return None;
    }
    let scope = ScopeId::parse(std::str::from_utf8(&body[16..48]).ok()?)?;
    let (path, rest) = body[FIXED..].split_at(path_len);
    let (token, crcs) = rest.split_at(token_len);
    let key = FileKey {
        scope,
        path: path.to_vec(),
        token: String::from_utf8(token.to_vec()).ok()?,
        size: long(8)?,
    };
    let crcs = crcs.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    Some((Record { id: long(0)?, key, crcs }, HEAD + len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(id: u64, path: &[u8]) -> Record {
        let scope = ScopeId::parse(&"0a".repeat(16)).unwrap();
        let key = FileKey { scope, path: path.to_vec(), token: "etag".into(), size: 7 };
        Record { id, key, crcs: Box::new([1, 2, 3]) }
    }

    #[test]
    fn records_are_those_of_the_golden_file() {
        let records = [record(1, b"a/b"), record(u64::MAX, b"\xff")];
        let bytes: Vec<u8> = records.iter().flat_map(encode).collect();
        let hex = crate::golden::same(crate::GOLDEN, "journal-1.txt", &crate::golden::to_hex(&bytes));
        assert_eq!(decode_all(&crate::golden::from_hex(&hex)), (records.to_vec(), 0));
    }

    proptest! {
        #[test]
        fn records_around_a_damaged_stretch_survive(
            paths in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 3..8),
            at in any::<prop::sample::Index>(),
            flip in 1u8..,
        ) {
            let records: Vec<Record> = paths.iter().enumerate().map(|(k, p)| record(k as u64, p)).collect();
            let mut bytes: Vec<u8> = records.iter().flat_map(encode).collect();
            prop_assert_eq!(decode_all(&bytes), (records.clone(), 0));
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let (found, torn) = decode_all(&bytes);
            prop_assert_eq!(torn, 1);
            prop_assert_eq!(found.len(), records.len() - 1);
            prop_assert!(found.iter().all(|r| records.contains(r)));
        }
    }
}
