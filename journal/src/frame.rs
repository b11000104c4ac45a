//! The bytes of a journal's file: header, durable marks, frames.
//!
//! ```text
//!     0  header   "MPJRNL01"  format u32  crc u32 (of all else here)  first u64      never changed
//!   512  mark 0   durable u64  crc u32 (of first and durable)                        written in turns
//!  1024  mark 1
//!  4096  frames   crc u32 (of all behind it)  length u32  sequence u64  changes      appended
//!
//!  a change       1 put   key length u32  value length u32  key  value
//!                 2 delete   key length u32  key
//! ```
//!
//! All numbers are little-endian. `first` is the sequence number of the first frame. It goes on where the file before
//! the last compaction ended, so that no frame of an older file, in a block that the file system used again, is taken
//! for one of this file.

use crate::error::JournalError;
use crc_fast::crc32_iscsi;

const MAGIC: &[u8; 8] = b"MPJRNL01";
/// Where the frames begin: a page of their own, which no write to header or marks touches.
pub(crate) const FRAMES: usize = 4096;
/// Two, in sectors of their own: while one is written, and torn, the other one holds.
const MARKS: [usize; 2] = [512, 1024];
pub(crate) const HEAD: usize = 16;

pub(crate) const KEY_MAX: usize = 64 << 10;
pub(crate) const VALUE_MAX: usize = 1 << 20;
pub(crate) const FRAME_MAX: usize = 4 << 20;

const PUT: u8 = 1;
const DELETE: u8 = 2;

/// What becomes of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    Put { key: &'a [u8], value: &'a [u8] },
    Delete { key: &'a [u8] },
}

impl Change<'_> {
    /// In a frame.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Change::Put { key, value } => 9 + key.len() + value.len(),
            Change::Delete { key } => 5 + key.len(),
        }
    }
}

/// Of which file a frame or a mark is; all of the header that is not the same in every file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) format: u32,
    pub(crate) first: u64,
}

/// Says that all bytes before `durable` were durable when it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    /// 0 or 1.
    pub(crate) slot: usize,
    pub(crate) durable: u64,
}

impl Header {
    /// All before the frames of a new file.
    pub(crate) fn page(self, durable: u64) -> Vec<u8> {
        let mut page = vec![0; FRAMES];
        page[..8].copy_from_slice(MAGIC);
        page[8..12].copy_from_slice(&self.format.to_le_bytes());
        page[16..24].copy_from_slice(&self.first.to_le_bytes());
        let crc = crc_of(&[&page[..12], &page[16..24]]);
        page[12..16].copy_from_slice(&crc.to_le_bytes());
        let mark = Mark { slot: 0, durable };
        page[MARKS[0]..][..12].copy_from_slice(&mark.encode(self.first));
        page
    }

    pub(crate) fn parse(page: &[u8], expected: u32) -> Result<(Header, Mark), JournalError> {
        let crc = crc_of(&[&page[..12], &page[16..24]]);
        if page[..8] != MAGIC[..] || u32_at(page, 12) != crc {
            return Err(JournalError::Damaged { at: 0 });
        }
        let header = Header { format: u32_at(page, 8), first: u64_at(page, 16) };
        if header.format != expected {
            return Err(JournalError::Format { found: header.format, expected });
        }
        // A mark rises with each time it is written: the higher one is the newer one.
        let marks = [0, 1].map(|slot| Mark { slot, durable: u64_at(page, MARKS[slot]) });
        let is_sound = |mark: &Mark| page[mark.at() as usize..][..12] == mark.encode(header.first);
        let newest = marks.into_iter().filter(is_sound).max_by_key(|mark| mark.durable);
        Ok((header, newest.ok_or(JournalError::Damaged { at: MARKS[0] as u64 })?))
    }
}

impl Mark {
    pub(crate) fn at(self) -> u64 {
        MARKS[self.slot] as u64
    }

    pub(crate) fn encode(self, first: u64) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&self.durable.to_le_bytes());
        let crc = crc_of(&[&first.to_le_bytes(), &bytes[..8]]);
        bytes[8..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

/// A frame that is being filled.
pub(crate) struct Frame(Vec<u8>);

impl Frame {
    pub(crate) fn new() -> Frame {
        Frame(vec![0; HEAD])
    }

    pub(crate) fn push(&mut self, change: &Change<'_>) {
        let number =
            |len: usize| u32::try_from(len).expect("keys and values have limits far below").to_le_bytes();
        match change {
            Change::Put { key, value } => {
                self.0.push(PUT);
                self.0.extend_from_slice(&number(key.len()));
                self.0.extend_from_slice(&number(value.len()));
                self.0.extend_from_slice(key);
                self.0.extend_from_slice(value);
            }
            Change::Delete { key } => {
                self.0.push(DELETE);
                self.0.extend_from_slice(&number(key.len()));
                self.0.extend_from_slice(key);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// With a payload that may be no changes.
    #[cfg(test)]
    pub(crate) fn forged(payload: &[u8]) -> Frame {
        Frame([&[0; HEAD], payload].concat())
    }

    pub(crate) fn finish(mut self, sequence: u64) -> Vec<u8> {
        let length = u32::try_from(self.0.len() - HEAD).expect("a frame has a limit far below");
        self.0[4..8].copy_from_slice(&length.to_le_bytes());
        self.0[8..16].copy_from_slice(&sequence.to_le_bytes());
        let crc = crc32_iscsi(&self.0[4..]);
        self.0[..4].copy_from_slice(&crc.to_le_bytes());
        self.0
    }
}

/// The length of the whole frame that a head speaks of; None: no frame has such a head.
pub(crate) fn frame_len(head: &[u8]) -> Option<usize> {
    let length = HEAD + u32_at(head, 4) as usize;
    (length <= FRAME_MAX).then_some(length)
}

pub(crate) fn is_sound(frame: &[u8], sequence: u64) -> bool {
    u64_at(frame, 8) == sequence && u32_at(frame, 0) == crc32_iscsi(&frame[4..])
}

/// The changes of a sound frame; None: no journal of this layout wrote it.
pub(crate) fn changes(frame: &[u8]) -> Option<Vec<Change<'_>>> {
    let mut rest = &frame[HEAD..];
    let mut changes = Vec::new();
    while let Some((&kind, behind)) = rest.split_first() {
        rest = behind;
        let mut take = |bytes: usize| rest.split_off(..bytes);
        let number = |bytes: &[u8]| u32_at(bytes, 0) as usize;
        let key_len = number(take(4)?);
        changes.push(match kind {
            PUT => {
                let value_len = number(take(4)?);
                Change::Put { key: take(key_len)?, value: take(value_len)? }
            }
            DELETE => Change::Delete { key: take(key_len)? },
            _ => return None,
        });
    }
    Some(changes)
}

fn crc_of(parts: &[&[u8]]) -> u32 {
    crc32_iscsi(&parts.concat())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
