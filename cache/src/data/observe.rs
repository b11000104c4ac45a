//! What the engine reports to metrics: every method is a no-op unless overridden.

use super::FetchError;
use std::io;
use std::time::Duration;

/// Why a file left the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The root's share of the tier's byte quota.
    Quota,
    /// The root's share of the tier's inode quota.
    Inodes,
    /// The scope's own limit.
    ScopeLimit,
    /// The file system was about to run low for everyone else.
    FreeSpace,
    FreeInodes,
    /// A write failed with ENOSPC or EDQUOT.
    DiskFull,
    Operator,
    Damaged,
    /// It came with another checksum than its store tells.
    Corrupted,
    /// The source no longer has this version.
    Stale,
    /// The file system has no files of that size.
    TooLarge,
}

impl Reason {
    /// A label value for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Quota => "quota",
            Self::Inodes => "inodes",
            Self::ScopeLimit => "scope_limit",
            Self::FreeSpace => "free_space",
            Self::FreeInodes => "free_inodes",
            Self::DiskFull => "disk_full",
            Self::Operator => "operator",
            Self::Damaged => "damaged",
            Self::Corrupted => "corrupted",
            Self::Stale => "stale",
            Self::TooLarge => "too_large",
        }
    }
}

/// Called from the runtime and from writer threads: must not block. Sizes are bytes.
pub trait Observer: Send + Sync {
    /// One GET ended. `first_byte` is the time until its body began, `total` until it ended.
    fn fetched(&self, _bytes: u64, _first_byte: Duration, _total: Duration, _failed: Option<&FetchError>) {}
    /// A read found its range in the cache.
    fn hit(&self, _bytes: u64) {}
    /// A read had to wait for the source (or for another reader's fetch).
    fn miss(&self, _bytes: u64) {}
    /// A read was answered from memory, because no disk could take the bytes.
    fn uncached(&self, _bytes: u64) {}
    fn evicted(&self, _files: u64, _bytes: u64, _reason: Reason) {}
    /// Blocks or records on disk that did not match their checksum.
    fn checksum_failed(&self, _root: u8, _count: u64) {}
    /// A whole file that did not have the checksum that its store tells.
    fn changed_on_its_way(&self) {}
    fn disk_error(&self, _root: u8, _operation: &'static str, _error: &io::Error) {}
    fn degraded(&self, _root: u8, _degraded: bool) {}
}

impl Observer for () {}
