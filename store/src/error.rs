//! What can go wrong at a source, in the few kinds that a caller treats differently.

use crate::Version;
use std::time::Duration;
use volume::Cause;

/// Each message names the object, the reason, and what to do. None carries a credential.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The bucket, directory or object is not there. Not worth a retry.
    #[error("{what} does not exist{advice}")]
    NotFound { what: String, advice: &'static str },
    /// The source refuses these credentials, or these rights do not suffice.
    #[error("{what}: access denied: {why}")]
    Denied { what: String, why: String },
    /// The credentials were good for a time, which is over: with fresh ones it may go on.
    #[error("{what}: access denied: {why}")]
    Expired { what: String, why: String },
    /// The object exists but no longer in the version that was asked for: look the name up again.
    #[error("{what} has changed at the source since this version was seen")]
    Stale { what: String },
    /// No proper answer within the time limit, retries included: retry later. `queued`: the part of `waited` in which
    /// it waited for its turn on this node.
    #[error(
        "{what}: no proper answer from the store after {} ({} of them in this node's queue) and {attempts} attempt(s): {cause}",
        seconds(.waited), seconds(.queued)
    )]
    Unavailable { what: String, waited: Duration, queued: Duration, attempts: u32, cause: String },
    /// It was never the turn of this request, although the store may well answer: retry later.
    #[error(
        "{what}: all request slots of this node were taken for {}: the stores are slow, or raise store.max_requests",
        seconds(.waited)
    )]
    Busy { what: String, waited: Duration },
    /// Somebody else has written it since it was seen, or has made what was to be new: nothing was written.
    #[error("{what} was changed by somebody else meanwhile, so that it was not written")]
    Conflict { what: String, found: Option<Version> },
    /// The store, or what it allows this tenant, is full: nothing was written.
    #[error("{what}: the store has no room for it: {why}")]
    Full { what: String, why: String },
    /// The store cannot do that at all.
    #[error("{what}: {why}")]
    Unsupported { what: String, why: String },
    /// What was to be written cannot be read back from this node's disk as it was written: nothing was written.
    #[error("{what}: this node's disk does not give back what was to be written: {why}")]
    Damaged { what: String, why: String },
    /// The store answered, repeatedly, with something that it should not have: its defect, or ours.
    #[error("{what}: the store's answer cannot be used: {why}")]
    Malformed { what: String, why: String },
    /// The volume's parameters cannot work with this source: a person must change them.
    #[error("{what}: {why}")]
    Invalid { what: String, why: String },
}

fn seconds(waited: &Duration) -> String {
    format!("{:.1} s", waited.as_secs_f64())
}

impl StoreError {
    /// What a reader learns of it.
    pub fn cause(&self) -> Cause {
        match self {
            Self::NotFound { .. } => Cause::NotFound,
            Self::Denied { .. } | Self::Expired { .. } => Cause::Denied,
            Self::Stale { .. } | Self::Conflict { .. } => Cause::Stale,
            Self::Unavailable { .. } | Self::Busy { .. } | Self::Malformed { .. } => Cause::Unavailable,
            // Of writes, which have errors of their own.
            Self::Full { .. } => Cause::Unavailable,
            Self::Unsupported { .. } | Self::Damaged { .. } | Self::Invalid { .. } => Cause::Internal,
        }
    }

    pub(crate) fn malformed(what: &str, why: impl Into<String>) -> Self {
        Self::Malformed { what: what.to_owned(), why: why.into() }
    }
    pub(crate) fn not_found(what: &str) -> Self {
        Self::NotFound { what: what.to_owned(), advice: "" }
    }
}
