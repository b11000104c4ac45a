//! Why something of a volume could not be read.

use serde::{Deserialize, Serialize};

/// The reader's view of a failure. It is made of a store's error in one place, `store::StoreError::cause`, travels as it
/// is, and becomes an errno in one place, `fuse-worker/src/errno.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Cause {
    /// The source has no such object (any more).
    NotFound,
    /// The source refused the credentials, or the object is not theirs to read.
    Denied,
    /// The version that was opened is gone from the source and not in the cache; or the inode is unknown.
    Stale,
    /// The store did not answer properly within `storeTimeout`.
    Unavailable,
    /// Not a directory where one was needed.
    NotADirectory,
    /// A defect of ours; the agent has logged it.
    Internal,
}

impl Cause {
    /// Of a version of an object that was there before: one that is gone has changed.
    pub fn of_version(self) -> Self {
        match self {
            Self::NotFound | Self::NotADirectory | Self::Stale => Self::Stale,
            Self::Denied | Self::Unavailable | Self::Internal => self,
        }
    }
}
