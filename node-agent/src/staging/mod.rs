//! Volumes that can be written to: what was written on this node and is not in the store yet, and what the programs of this
//! node see of it.
//!
//! ```text
//!  worker ──Operation──► Area ──► journal: names, owners, what is sent      on the node's disk, in `staging_dir`
//!                          │      one file for the bytes of each staged file
//!                          └────► send ──► store::Sink                      when a program waits for it, or a while later
//! ```
//!
//! Of a file whose store has all of it, the store's word counts (the metadata store, as fresh as the volume wants it); of one
//! that has not, the area's. A change is in the journal before it is answered; the result of one that must not happen twice
//! stands in the same frame, under the request's id. Nothing here is thrown away but what the store has, or what a person
//! discards.

mod area;
mod believed;
mod bring;
mod buffers;
mod clean;
mod closed;
mod conditions;
mod description;
mod directories;
mod discard;
mod discards;
mod disk;
mod elsewhere;
mod executed;
mod failures;
mod fence;
mod file;
mod former;
#[cfg(test)]
mod histories;
mod inspect;
mod lag;
mod late;
mod lingering;
mod listing;
mod locks;
mod making_way;
mod moves;
mod names;
mod ongoing;
mod opening;
mod opens;
mod operate;
mod parts;
mod pieces;
mod placing;
mod random;
mod reading;
mod record;
mod recover;
mod registry;
mod rest;
mod room;
mod send;
mod sent;
#[cfg(test)]
mod simulated;
mod staged;
mod sums;
mod sync;
mod tenure;
#[cfg(test)]
mod testing;
mod times;
mod told;
mod upkeep;
mod uploads;
mod vacated;
mod write;

pub(crate) use area::{Area, Caller};
pub(crate) use executed::Executed;
pub use inspect::what_waits;
pub(crate) use inspect::{Inspected, Looked};
pub(crate) use reading::Readable;
pub(crate) use registry::{DIRECTORY, Staging, make_root};
pub(crate) use staged::{StagedFile, StagedState, lies_at_or_below};

use link::writable::{Done, Wrong};

/// The steps at which an agent can die here; each is one of a history.
pub const STEPS: &[&str] = &[
    "agent.staging.brought",
    "agent.staging.commit",
    "agent.staging.committed",
    "agent.staging.complete",
    "agent.staging.completed",
    "agent.staging.copied",
    "agent.staging.copy",
    "agent.staging.delete",
    "agent.staging.deleted",
    "agent.staging.made",
    "agent.staging.mkdir",
    "agent.staging.move",
    "agent.staging.move-copied",
    "agent.staging.move-end",
    "agent.staging.moved",
    "agent.staging.put",
    "agent.staging.put-done",
    "agent.staging.removed",
    "agent.staging.rmdir",
    "agent.staging.sent",
    "agent.staging.upload-begun",
    "agent.staging.upload-noted",
    "agent.staging.write",
];

/// What stores do not have yet.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waiting {
    pub(crate) files: usize,
    pub(crate) bytes: u64,
    /// Of them, those that somebody else has changed in the store meanwhile.
    pub(crate) conflicts: usize,
}

impl Waiting {
    /// With this file of `size` bytes, if anything of it waits.
    fn and(self, record: &record::Record, size: u64) -> Self {
        if !record.waits() {
            return self;
        }
        // Of one that was removed no bytes go anywhere.
        let bytes = if record.path.is_some() { size } else { 0 };
        Self {
            files: self.files + 1,
            bytes: self.bytes.saturating_add(bytes),
            conflicts: self.conflicts + usize::from(record.conflict),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            files: self.files + other.files,
            bytes: self.bytes.saturating_add(other.bytes),
            conflicts: self.conflicts + other.conflicts,
        }
    }
}

/// What came of an operation.
pub(crate) type Outcome = Result<Done, Wrong>;
