//! The writing half of a store: whole objects, objects in parts, copies, removals.
//!
//! Each write has a [`WriteId`] that its caller draws, and keeps, before it asks. The object carries it, so that a write whose
//! answer was lost, or whose caller died, is found again by looking ([`Sink::look`]) and never made twice on suspicion.

use crate::{StoreError, Version};
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What must be there for a write to take place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Condition {
    /// Whatever is. An answer that is lost may then come to pass later, over somebody's newer object: only where the store
    /// knows no conditions.
    Any,
    Absent,
    Is(Version),
}

/// Names one write for ever: drawn at random, 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WriteId([u8; 16]);

impl WriteId {
    /// Of an upload that a listing tells of: the store keeps it back until there is an object. Never drawn.
    pub(crate) const UNKNOWN: Self = Self([0; 16]);

    pub fn new(random: [u8; 16]) -> Self {
        Self(random)
    }

    /// As [`fmt::Display`] writes it.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = digits.then(|| u128::from_str_radix(text, 16).ok())??;
        Some(Self(number.to_be_bytes()))
    }
}

impl fmt::Display for WriteId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for WriteId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteId({self})")
    }
}

/// What a file system knows of a file besides its bytes. None: it was not said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// Permissions alone (07777): an object in a bucket is a file, or a directory by its name.
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    /// Since the epoch.
    pub modified_ns: Option<i64>,
}

/// What goes with the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Write {
    pub id: WriteId,
    pub attributes: Attributes,
}

/// Bytes of a file of ours. They must not change while they are sent: a retry reads them again.
#[derive(Clone, Debug)]
pub struct Body {
    pub file: Arc<File>,
    pub range: Range<u64>,
    /// Of these bytes as they were written (CRC-32C): what the file gives back must add up to it, and so must what arrives.
    pub crc32c: u32,
}

impl Body {
    pub fn len(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What came of a write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    pub version: Version,
    /// The store has told a checksum of what it holds, and it is that of what was sent.
    pub confirmed: bool,
}

/// An object that is being put together from parts. Outlives this process: it goes on by its id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upload {
    pub path: Vec<u8>,
    /// The store's name for it.
    pub id: String,
    pub write: WriteId,
}

/// A part that has arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// From 1 on.
    pub number: u32,
    pub bytes: u64,
    pub crc32c: u32,
    /// The store's name for it.
    pub tag: String,
    /// As [`Written::confirmed`].
    pub confirmed: bool,
}

/// What a store shows of an object to whoever writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub version: Version,
    pub size: u64,
    pub attributes: Attributes,
    /// Of the write that made it, if it was one of these.
    pub write: Option<WriteId>,
}

/// An upload that nobody has completed, whoever began it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// The id of its write is not known.
    pub upload: Upload,
    /// By the store's clock alone.
    pub age: Duration,
}

/// Why a store can have nothing at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPlace {
    /// With what is in front of it.
    TooLong,
    /// Its names are no UTF-8.
    NotText,
}

/// What one store takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SinkLimits {
    /// Of an object in one piece.
    pub put_bytes_max: u64,
    /// Of each part but the last.
    pub part_bytes_min: u64,
    pub part_bytes_max: u64,
    pub parts_max: u32,
    pub object_bytes_max: u64,
}

impl SinkLimits {
    /// The least part size, from `wanted` on, with which an object of `bytes` fits. None: it does not fit at all.
    pub fn part_bytes(&self, bytes: u64, wanted: u64) -> Option<u64> {
        if bytes > self.object_bytes_max {
            return None;
        }
        let least = bytes.div_ceil(u64::from(self.parts_max.max(1)));
        let part = least.max(wanted).max(self.part_bytes_min).next_multiple_of(PART_STEP);
        let part = part.min(self.part_bytes_max);
        (part.saturating_mul(u64::from(self.parts_max)) >= bytes).then_some(part)
    }
}

/// Parts end where blocks of the cache do.
const PART_STEP: u64 = 1 << 20;

/// Where a volume's bytes go. Every call is bounded by the `storeTimeout` of its access, retries included. After an
/// `Unavailable` nobody knows whether it has taken place: [`Sink::look`] tells, now or after the caller's next start.
#[async_trait]
pub trait Sink: Send + Sync + fmt::Debug {
    fn limits(&self) -> SinkLimits;

    /// Can anything be written at this path? Said before it is tried.
    fn takes(&self, _path: &[u8]) -> Result<(), NoPlace> {
        Ok(())
    }

    /// An object in one piece. `Conflict`: the condition does not hold.
    async fn put(
        &self,
        path: &[u8],
        body: &Body,
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError>;

    /// Begins an object in parts. What it carries is said now, for stores want it so.
    async fn begin(&self, path: &[u8], write: &Write) -> Result<Upload, StoreError>;

    /// A part that was sent before is replaced. `NotFound`: the upload is over, one way or the other.
    async fn part(&self, upload: &Upload, number: u32, body: &Body) -> Result<Part, StoreError>;

    /// Makes the object of `parts`, in their order. `NotFound`: the upload was ended, and not by this write, or its parts are
    /// not these any more (a request that came late has replaced one): the object is to be begun anew.
    /// What the store says is not believed before the object was looked at. After an error the upload is to be abandoned or
    /// completed again: it may still be open.
    async fn complete(
        &self,
        upload: &Upload,
        parts: &[Part],
        condition: &Condition,
    ) -> Result<Written, StoreError>;

    /// Ends an upload and gives back what its parts take. One that is over already is no error.
    async fn abandon(&self, upload: &Upload) -> Result<(), StoreError>;

    /// Takes back what a write to `path` has left that nobody waits for any more, where a store keeps such a thing under the
    /// write's own name. It may have come to pass all the same. `condition`: what it was asked with, if that is known.
    async fn withdraw(
        &self,
        path: &[u8],
        write: WriteId,
        condition: Option<&Condition>,
    ) -> Result<(), StoreError> {
        let _ = (path, write, condition); // what of an object does not come to pass is an upload of its own, or nothing
        Ok(())
    }

    /// Uploads below the volume's prefix that are under way since `age` or longer, whoever began them. As many as one answer may
    /// have: the others are told once these are over. None of a store that does not tell its time, and none of a whole bucket,
    /// which is no volume's own.
    async fn leftovers(&self, age: Duration) -> Result<Vec<Leftover>, StoreError>;

    /// What is there now; None: nothing.
    async fn look(&self, path: &[u8]) -> Result<Option<Seen>, StoreError>;

    /// What is gone already is no error, unless it should be another version.
    async fn delete(&self, path: &[u8], condition: &Condition) -> Result<(), StoreError>;

    /// The bytes of `version` of `from`, which has `size`, under another name or other attributes. `Stale`: it has another version
    /// by now. (Not every store looks: [`crate::Abilities::is_at_copy`].)
    async fn copy(
        &self,
        from: &[u8],
        version: &Version,
        size: u64,
        to: &[u8],
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError>;

    /// An empty directory that is there although nothing is in it. One that is there already stays as it is. The empty path is
    /// the volume's own: a prefix of a bucket can be made so, a directory of a file system must be there.
    async fn make_dir(&self, path: &[u8], write: &Write) -> Result<(), StoreError>;

    /// What [`Self::make_dir`] made. What lies in it is not asked about.
    async fn remove_dir(&self, path: &[u8]) -> Result<(), StoreError>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const S3: SinkLimits = SinkLimits {
        put_bytes_max: 5 << 30,
        part_bytes_min: 5 << 20,
        part_bytes_max: 5 << 30,
        parts_max: 10_000,
        object_bytes_max: 5 << 40,
    };

    #[test]
    fn parts_are_as_large_as_the_object_needs_and_no_larger() {
        assert_eq!(S3.part_bytes(0, 8 << 20), Some(8 << 20));
        assert_eq!(S3.part_bytes(80 << 30, 8 << 20), Some(9 << 20), "ten thousand parts of 8 MiB are 78 GiB");
        assert_eq!(S3.part_bytes(5 << 40, 8 << 20), Some(525 << 20));
        assert_eq!(S3.part_bytes((5 << 40) + 1, 8 << 20), None);
        assert_eq!(S3.part_bytes(1, 1), Some(5 << 20), "no smaller one is taken");
    }

    proptest! {
        #[test]
        fn an_object_fits_into_the_parts_that_it_is_told(bytes in 0..=5_u64 << 40, wanted in 0..64_u64 << 20) {
            let part = S3.part_bytes(bytes, wanted).unwrap();
            prop_assert!(bytes.div_ceil(part) <= u64::from(S3.parts_max));
            prop_assert!((S3.part_bytes_min..=S3.part_bytes_max).contains(&part) && part.is_multiple_of(PART_STEP));
        }

        #[test]
        fn a_write_id_is_read_as_it_is_written(bytes: [u8; 16]) {
            let id = WriteId::new(bytes);
            prop_assert_eq!(WriteId::parse(&id.to_string()), Some(id));
        }
    }

    #[test]
    fn what_is_no_write_id_is_none() {
        for bad in
            ["", "0", "+0000000000000000000000000000000", "g0000000000000000000000000000000", &"0".repeat(33)]
        {
            assert_eq!(WriteId::parse(bad), None, "{bad:?}");
        }
    }
}
