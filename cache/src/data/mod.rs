//! The data engine: object bytes in sparse files on the node's disks, fetched once and read by everyone.
//!
//! ```text
//!   File::read ─► plan ─► flights (async, parallel ranged GETs) ─► writer threads ─► pwrite, crc32c, presence bit
//!       ▲                                                                │
//!       └──────────────── woken as soon as its own range is there ◄──────┘
//! ```
//!
//! One file per (scope, path, version token) at `<root>/<scope>/<2 hex>/<16 hex id>`. What is known about it on disk:
//!
//! * **small files** (whole in one GET, at most [`SMALL_BLOCKS`] blocks) have a record in the root's `journal`: one
//!   append instead of a second inode, which halves both the cost of a small file and the inodes that it takes, and
//!   lets a start read one file instead of a million;
//! * **larger files** have a sidecar `<id>.idx`, replaced by rename, with a checksum per block and the blocks present.
//!
//! Nothing is synced: a torn file is caught by its checksums, and doubt means a miss.
//! What was written by an earlier run is *unverified*: each block is read and checked before its presence bit is set.
//!
//! **Eviction** unlinks whole files, chosen by S3-FIFO (Yang et al., SOSP 2023): a small probationary queue (10 %), a
//! main queue, and a ghost queue of evicted keys. A training epoch or a backup that reads everything once passes
//! through the small queue and leaves the main queue alone, where LRU would be flushed; its misses are at or below those
//! of ARC, LIRS and TinyLFU on most published traces; and a hit is one counter, no list surgery, so that workers can
//! report hits late and folded ("touched") without changing what the policy means.
//!
//! **Faults.** A full, read-only or failing disk is never an error to a reader: the range comes back
//! [`Presence::Uncached`], the root is degraded and probed again with growing pauses.
//!
//! What never happens here: a blocking file operation on the async runtime (but [`File::descriptors`] and
//! [`Engine::evict`], which say so), a hole punched, an await under a lock, a cancelled fetch that others wait for.
//!
//! Lock order: `File::state` → `Engine::index` → the rest (pool queues, health, journals), which are leaves.

mod bitmap;
mod blocks;
mod bypass;
mod config;
mod engine;
mod evict;
mod fetch;
mod file;
#[cfg(fuzzing)]
pub mod fuzz;
mod index;
mod journal;
mod judge;
mod layout;
mod memory;
mod observe;
mod place;
mod policy;
mod pool;
mod prefetch_all;
mod read;
mod recover;
mod root;
mod save;
mod scopes;
mod sidecar;
pub mod stream;
mod sums;
mod suspicion;
#[cfg(test)]
mod tests;
mod verify;
mod waiters;
mod write;

pub use config::{Config, ConfigError, ReadOptions, Reading, Tier, TierKind};
pub use engine::{Engine, Event, Evicted};
pub use fetch::{Fetch, FetchError};
pub use file::{Descriptors, File, Found, Presence};
pub use index::{RootUsage, ScopeUsage, TierUsage, Usage};
pub use layout::file_name;
pub use observe::{Observer, Reason};
pub use prefetch_all::{PrefetchAll, Progress};
pub use recover::{OpenError, Recovery};
pub use sums::Checksum;

pub use crc_fast::CrcAlgorithm;

use volume::ScopeId;

/// Files of at most this many blocks are fetched whole, in one GET.
pub(crate) const SMALL_BLOCKS: u64 = 32;
/// The root index of a file that has no data file (empty, or no disk could take it).
pub(crate) const NO_ROOT: u8 = u8::MAX;

/// What a cached file is a copy of. Two keys that differ in anything are two files.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileKey {
    pub scope: ScopeId,
    /// Relative to the source, without slashes at the ends.
    pub path: Vec<u8>,
    /// The store's version of the object (ETag, or size and mtime).
    pub token: String,
    /// Bytes.
    pub size: u64,
}
