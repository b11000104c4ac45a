//! How the store's records lie in the memory map: fixed offsets, little endian, decoded without copying.
//!
//! | database      | key                       | value                                              |
//! |---------------|---------------------------|----------------------------------------------------|
//! | `names`       | parent u64 BE, name       | [`Record`]: the inode and all that is known of it  |
//! | `inodes`      | ino u64 BE                | parent u64 BE, name: the key of its `Record`       |
//! | `directories` | ino u64 BE                | [`Directory`]: its listing                         |
//! | `about`       | `format`                  | u32 LE                                             |
//! |               | `clock`                   | the clock's base in the boot of its last opening   |
//!
//! # Which names a directory shows
//!
//! Every listing of a directory has a number, higher than any before. A record carries the numbers of the `first` and
//! the `last` listing that had it, a directory the number of the listing that is in force. A name is visible while
//! `first ≤ in force ≤ last`. So a listing is written in as many transactions as it takes, unseen; raising the one
//! number shows it, and hides without a further write every name that it did not have.
//!
//! The number below its own is a listing's, too: it is the `first` of names that were known before and are not in
//! force. So a listing that is given up takes back what it alone has brought and no reader has seen.

use super::types::{Attributes, Cached, EPOCH_MAX, Kind, MetaError, NAME_MAX};
use volume::Permissions;

/// Raised by every change of this file. Node ids of live mounts are in here: a build reads and writes the stores of its
/// direct neighbours, so a change adds what the build before can do without, and nothing else.
pub(super) const FORMAT: u32 = 2 + version::STEPS;

/// Key in `about`. A build that does not know it compares with the wall clock, which is about the same.
pub(super) const CLOCK: &[u8] = b"clock";

/// Can this build work with a store of that format?
pub(super) fn is_known(format: u32) -> bool {
    format > 0 && version::neighbours(format, FORMAT)
}

/// As it stands in a store.
pub(super) fn stored(format: &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(format.try_into().ok()?))
}

const HEADER: usize = 56;
const CACHED: usize = 17;
/// The source said that the name does not exist.
const FLAG_ABSENT: u8 = 1;
const FLAG_CACHED: u8 = 2;
/// Behind the token, where a symlink has its target, are owner and mode: builds that do not know them make nothing of
/// what is there. (Of a symlink all is allowed, whatever its mode.)
const FLAG_PERMISSIONS: u8 = 4;
const PERMISSIONS: usize = 12;

/// The `first` listing of a name that this node has removed from the source: no listing that was begun before has it.
pub(super) const REMOVED: u32 = u32::MAX;

/// Key of a name: the parent in big endian, so that one directory's names lie together, in byte order.
pub(super) struct NameKey {
    bytes: [u8; 8 + NAME_MAX],
    len: usize,
}

impl NameKey {
    /// None: no such name can exist.
    pub(super) fn new(parent: u64, name: &[u8]) -> Option<Self> {
        if name.len() > NAME_MAX {
            return None;
        }
        let mut bytes = [0; 8 + NAME_MAX];
        bytes[..8].copy_from_slice(&parent.to_be_bytes());
        bytes[8..8 + name.len()].copy_from_slice(name);
        Some(Self { bytes, len: 8 + name.len() })
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Parent and name of a key of `names` (which is also the value in `inodes`).
pub(super) fn split_key(key: &[u8]) -> Result<(u64, &[u8]), MetaError> {
    let (parent, name) = key.split_first_chunk::<8>().ok_or_else(|| damaged("a key"))?;
    Ok((u64::from_be_bytes(*parent), name))
}

fn damaged(what: &str) -> MetaError {
    MetaError::Damaged(format!("{what} is too short or of an unknown kind"))
}

fn permissions(bytes: &[u8]) -> Option<Permissions> {
    let bytes: &[u8; PERMISSIONS] = bytes.try_into().ok()?;
    let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    Some(Permissions::of(u32_at(0), Some(u32_at(4)), Some(u32_at(8))))
}

/// One name, as it lies in the map.
#[derive(Clone, Copy)]
pub(super) struct Record<'a>(&'a [u8]);

impl<'a> Record<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Result<Self, MetaError> {
        let record = (bytes.len() >= HEADER).then_some(Self(bytes)).ok_or_else(|| damaged("a record"))?;
        if bytes.len() < record.token_at() + record.token_len() {
            return Err(damaged("a record"));
        }
        Ok(record)
    }

    fn u32(&self, at: usize) -> u32 {
        let mut b = [0; 4];
        b.copy_from_slice(&self.0[at..at + 4]);
        u32::from_le_bytes(b)
    }

    fn u64(&self, at: usize) -> u64 {
        let mut b = [0; 8];
        b.copy_from_slice(&self.0[at..at + 8]);
        u64::from_le_bytes(b)
    }

    fn token_len(&self) -> usize {
        usize::from(u16::from_le_bytes([self.0[2], self.0[3]]))
    }

    fn token_at(&self) -> usize {
        HEADER + if self.0[1] & FLAG_CACHED != 0 { CACHED } else { 0 }
    }

    fn first(&self) -> u32 {
        self.u32(12)
    }

    pub(super) fn last(&self) -> u32 {
        self.u32(16)
    }

    /// 0: a name that has only ever been absent.
    pub(super) fn ino(&self) -> u64 {
        self.u64(24)
    }

    pub(super) fn seen_ms(&self) -> u64 {
        self.u64(48)
    }

    /// Absent because the source was asked for this very name.
    pub(super) fn is_absent(&self) -> bool {
        self.0[1] & FLAG_ABSENT != 0
    }

    /// As [`Self::is_absent`], and this node has made it so.
    pub(super) fn is_removed(&self) -> bool {
        self.is_absent() && self.first() == REMOVED
    }

    /// A build that did not look may have stored a size that no file has.
    pub(super) fn is_visible(&self, in_force: u32) -> bool {
        let fits = self.u64(32) <= volume::FILE_BYTES_MAX;
        !self.is_absent() && fits && self.first() <= in_force && in_force <= self.last()
    }

    /// The listing of that number stored it, and no other answer has named it before or since.
    pub(super) fn is_of_only(&self, number: u32) -> bool {
        !self.is_absent() && self.first() == number && self.last() == number
    }

    pub(super) fn kind(&self) -> Result<Kind, MetaError> {
        match self.0[0] {
            1 => Ok(Kind::File),
            2 => Ok(Kind::Directory),
            3 => Ok(Kind::Symlink),
            _ => Err(damaged("a record")),
        }
    }

    pub(super) fn attributes(&self) -> Result<Attributes, MetaError> {
        let (kind, epoch) = (self.kind()?, self.u32(8));
        // What comes after it is counted up from it.
        if epoch > EPOCH_MAX {
            return Err(damaged("a record"));
        }
        let at = self.token_at();
        let (token, behind) = self.0[at..].split_at(self.token_len());
        let has_permissions = kind != Kind::Symlink && self.0[1] & FLAG_PERMISSIONS != 0;
        let permissions = match has_permissions {
            false => None,
            true => Some(permissions(behind).ok_or_else(|| damaged("owner and mode"))?),
        };
        Ok(Attributes {
            ino: self.ino(),
            kind,
            size: self.u64(32),
            mtime_ns: self.u64(40) as i64,
            version: self.u32(4),
            epoch,
            // Empty in records of a build that did not know it: then nothing is known of earlier epochs.
            since_epoch: self.u32(20).checked_sub(1).unwrap_or(epoch),
            token: std::str::from_utf8(token).map_err(|_| damaged("a token"))?.to_owned(),
            cached: (self.0[1] & FLAG_CACHED != 0).then(|| Cached {
                generation: self.u64(HEADER),
                file: self.u64(HEADER + 8),
                root: self.0[HEADER + 16],
            }),
            // Of all else it may be what a build before has kept without knowing it.
            target: if kind == Kind::Symlink { behind.to_vec() } else { Vec::new() },
            permissions,
        })
    }

    pub(super) fn to_owned(self) -> Result<Known, MetaError> {
        let attributes = if self.ino() == 0 { None } else { Some(self.attributes()?) };
        Ok(Known {
            attributes,
            absent: self.is_absent(),
            first: self.first(),
            last: self.last(),
            seen_ms: self.seen_ms(),
        })
    }
}

/// One name, as the writer changes it. Without attributes: a name that has only ever been absent.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) attributes: Option<Attributes>,
    pub(super) absent: bool,
    pub(super) first: u32,
    pub(super) last: u32,
    pub(super) seen_ms: u64,
}

impl Known {
    pub(super) fn is_visible(&self, in_force: u32) -> bool {
        !self.absent && self.first <= in_force && in_force <= self.last
    }

    /// Replaces `out` by this record's bytes.
    pub(super) fn encode(&self, out: &mut Vec<u8>) -> Result<(), MetaError> {
        out.clear();
        let a = self.attributes.as_ref();
        let token = a.map_or("", |a| a.token.as_str());
        let token_len =
            u16::try_from(token.len()).map_err(|_| MetaError::Unexpected("a token over 64 KiB".into()))?;
        let cached = a.and_then(|a| a.cached);
        out.push(a.map_or(0, |a| match a.kind {
            Kind::File => 1,
            Kind::Directory => 2,
            Kind::Symlink => 3,
        }));
        let permissions = a.filter(|a| a.kind != Kind::Symlink).and_then(|a| a.permissions);
        let flags = [
            (self.absent, FLAG_ABSENT),
            (cached.is_some(), FLAG_CACHED),
            (permissions.is_some(), FLAG_PERMISSIONS),
        ];
        out.push(flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag));
        out.extend(token_len.to_le_bytes());
        out.extend(a.map_or(0, |a| a.version).to_le_bytes());
        out.extend(a.map_or(0, |a| a.epoch).to_le_bytes());
        out.extend(self.first.to_le_bytes());
        out.extend(self.last.to_le_bytes());
        out.extend(a.map_or(0, |a| a.since_epoch.saturating_add(1)).to_le_bytes());
        out.extend(a.map_or(0, |a| a.ino).to_le_bytes());
        out.extend(a.map_or(0, |a| a.size).to_le_bytes());
        out.extend(a.map_or(0, |a| a.mtime_ns).to_le_bytes());
        out.extend(self.seen_ms.to_le_bytes());
        if let Some(c) = cached {
            out.extend(c.generation.to_le_bytes());
            out.extend(c.file.to_le_bytes());
            out.push(c.root);
        }
        out.extend(token.as_bytes());
        match permissions {
            None => out.extend(a.map_or(&[][..], |a| &a.target)),
            Some(Permissions { mode, uid, gid }) => {
                let words =
                    [u32::from(mode), uid.unwrap_or(Permissions::NO_ID), gid.unwrap_or(Permissions::NO_ID)];
                out.extend(words.into_iter().flat_map(u32::to_le_bytes));
            }
        }
        Ok(())
    }
}

/// The epoch of content that the worker serves, after `epoch`.
pub(super) fn next_even(epoch: u32) -> u32 {
    ((epoch | 1) + 1).min(EPOCH_MAX)
}

/// The epoch of content that is whole and verified, after `epoch`; None: used up, the inode stays with the worker.
pub(super) fn next_odd(epoch: u32) -> Option<u32> {
    Some((epoch + 1) | 1).filter(|e| *e < EPOCH_MAX)
}

/// One directory's listing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Directory {
    /// Number of the listing in force.
    pub(super) in_force: u32,
    /// Highest number that was ever begun.
    pub(super) newest: u32,
    /// The listing in force was stored to its end.
    pub(super) complete: bool,
    pub(super) seen_ms: u64,
    pub(super) entries: u64,
    pub(super) hidden: u64,
    /// Records without an inode.
    pub(super) negatives: u64,
}

impl Directory {
    const BYTES: usize = 48;

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, MetaError> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().map_err(|_| damaged("a directory"))?;
        let u32_at = |at: usize| bytes[at..at + 4].iter().rev().fold(0u32, |n, b| n << 8 | u32::from(*b));
        let u64_at = |at: usize| bytes[at..at + 8].iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        Ok(Self {
            in_force: u32_at(0),
            newest: u32_at(4),
            complete: u32_at(8) != 0,
            seen_ms: u64_at(16),
            entries: u64_at(24),
            hidden: u64_at(32),
            negatives: u64_at(40),
        })
    }

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&self.in_force.to_le_bytes());
        out[4..8].copy_from_slice(&self.newest.to_le_bytes());
        out[8..12].copy_from_slice(&u32::from(self.complete).to_le_bytes());
        out[16..24].copy_from_slice(&self.seen_ms.to_le_bytes());
        out[24..32].copy_from_slice(&self.entries.to_le_bytes());
        out[32..40].copy_from_slice(&self.hidden.to_le_bytes());
        out[40..48].copy_from_slice(&self.negatives.to_le_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_as_they_were_written() {
        let attributes = Attributes {
            ino: 77,
            kind: Kind::Symlink,
            size: volume::FILE_BYTES_MAX,
            mtime_ns: -5,
            version: 3,
            epoch: 8,
            since_epoch: 5,
            token: "0123456789abcdef0123456789abcdef".into(),
            cached: Some(Cached { generation: 1 << 63, root: 9, file: 42 }),
            target: b"../\xff".to_vec(),
            permissions: None,
        };
        for cached in [attributes.cached, None] {
            let known = Known {
                attributes: Some(Attributes { cached, ..attributes.clone() }),
                absent: false,
                first: 4,
                last: 6,
                seen_ms: 1 << 41,
            };
            let mut bytes = Vec::new();
            known.encode(&mut bytes).unwrap();
            let record = Record::new(&bytes).unwrap();
            assert_eq!(Some(record.attributes().unwrap()), known.attributes);
            assert_eq!((record.seen_ms(), record.last()), (1 << 41, 6));
            assert_eq!([3, 4, 6, 7].map(|n| record.is_visible(n)), [false, true, true, false]);
            assert!(Record::new(&bytes[..HEADER + 3]).is_err());
            let mut used_up = bytes.clone();
            used_up[8..12].copy_from_slice(&(EPOCH_MAX + 1).to_le_bytes());
            assert!(Record::new(&used_up).unwrap().attributes().is_err(), "an epoch that no inode has");
            let mut too_large = bytes.clone();
            too_large[32..40].fill(0xff);
            assert!(!Record::new(&too_large).unwrap().is_visible(5), "no file is that large");
            bytes[20..24].fill(0);
            let of_an_older_build = Record::new(&bytes).unwrap().attributes().unwrap();
            assert_eq!(of_an_older_build.since_epoch, 8);
        }
    }

    #[test]
    fn owner_and_mode_are_there_for_who_knows_them() {
        let permissions = Some(Permissions { mode: 0o640, uid: Some(1000), gid: None });
        for kind in [Kind::File, Kind::Directory, Kind::Symlink] {
            let target = if kind == Kind::Symlink { b"x".to_vec() } else { vec![] };
            let attributes = Attributes { kind, target, permissions, ..sample(None) };
            let known =
                Known { attributes: Some(attributes.clone()), absent: false, first: 1, last: 1, seen_ms: 1 };
            let mut bytes = Vec::new();
            known.encode(&mut bytes).unwrap();
            let read = |bytes: &[u8]| Record::new(bytes).unwrap().attributes();
            let without = Attributes { permissions: None, ..attributes.clone() };
            if kind == Kind::Symlink {
                assert_eq!(read(&bytes).unwrap(), without);
                continue;
            }
            assert_eq!(read(&bytes).unwrap(), attributes);
            assert!(read(&bytes[..bytes.len() - 1]).is_err());
            // What a build before makes of it when it has written it anew.
            bytes[1] &= !FLAG_PERMISSIONS;
            assert_eq!(read(&bytes).unwrap(), without);
        }
    }

    fn sample(cached: Option<Cached>) -> Attributes {
        Attributes {
            ino: 77,
            kind: Kind::File,
            size: 1 << 40,
            mtime_ns: -5,
            version: 3,
            epoch: 8,
            since_epoch: 5,
            token: "etag".into(),
            cached,
            target: Vec::new(),
            permissions: None,
        }
    }

    /// A record with everything, one without a copy in the cache, one of an absent name; a key; a directory. From
    /// format 2 on, last, a record with owner and mode.
    #[test]
    fn records_are_those_of_the_golden_file() {
        let known = |attributes: Option<Attributes>| Known {
            absent: attributes.is_none(),
            attributes,
            first: 4,
            last: 6,
            seen_ms: 1 << 41,
        };
        let link = Attributes { kind: Kind::Symlink, target: b"../\xff".to_vec(), ..sample(None) };
        let permissions = Some(Permissions { mode: 0o640, uid: Some(1000), gid: None });
        let all = [
            known(Some(sample(Some(Cached { generation: 1 << 63, root: 9, file: 42 })))),
            known(Some(link)),
            known(None),
        ];
        let directory = Directory {
            in_force: 1,
            newest: 2,
            complete: true,
            seen_ms: 3,
            entries: 4,
            hidden: 5,
            negatives: 6,
        };
        let encoded = |known: &Known| {
            let mut bytes = Vec::new();
            known.encode(&mut bytes).unwrap();
            crate::golden::to_hex(&bytes)
        };
        let mut text: String = all.iter().map(encoded).collect();
        text += &crate::golden::to_hex(NameKey::new(1, b"name").unwrap().as_bytes());
        text += &crate::golden::to_hex(&directory.encode());
        let owned = known(Some(Attributes { permissions, ..sample(None) }));
        text += &encoded(&owned);
        let name = format!("meta-{}.txt", FORMAT - version::STEPS);
        let text = crate::golden::same(crate::GOLDEN, &name, &text);
        let is_read = |bytes: &[u8], known: &Known| {
            let read = Record::new(bytes).unwrap().to_owned().unwrap();
            assert_eq!(format!("{read:?}"), format!("{known:?}"));
        };
        for text in [&text, &crate::golden::read(crate::GOLDEN, "meta-1.txt")] {
            let lines: Vec<Vec<u8>> = text.lines().map(crate::golden::from_hex).collect();
            lines.iter().zip(&all).for_each(|(bytes, known)| is_read(bytes, known));
            assert_eq!(split_key(&lines[3]).unwrap(), (1, &b"name"[..]));
            assert_eq!(format!("{:?}", Directory::decode(&lines[4]).unwrap()), format!("{directory:?}"));
            lines.get(5).into_iter().for_each(|bytes| is_read(bytes, &owned));
        }
    }

    #[test]
    fn epochs_alternate_and_end_even() {
        assert_eq!((next_even(0), next_even(1), next_odd(0), next_odd(1)), (2, 2, Some(1), Some(3)));
        assert_eq!(next_odd(EPOCH_MAX - 2), Some(EPOCH_MAX - 1));
        assert_eq!(next_even(EPOCH_MAX - 1), EPOCH_MAX);
        assert_eq!((next_even(EPOCH_MAX), next_odd(EPOCH_MAX)), (EPOCH_MAX, None));
        assert_eq!(EPOCH_MAX % 2, 0);
    }
}
