//! What a source tells its owner's metrics.

use std::time::Duration;

/// How one attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    Ok,
    NotFound,
    Denied,
    Stale,
    /// A fault that is worth a retry.
    Fault,
    /// An answer or a configuration that no retry mends.
    Broken,
    /// The caller lost interest before the end.
    Abandoned,
}

/// Why an attempt is made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RetryCause {
    /// 429 or 503: the store asks for less.
    Throttled,
    /// Another 5xx.
    ServerError,
    /// No connection: refused, unreachable, unknown host.
    Connect,
    /// The connection broke.
    Reset,
    /// The body ended early.
    Truncated,
    /// Nothing came for the stall timeout.
    Stalled,
    /// An answer that does not fit the question: wrong length, wrong range, unreadable listing.
    Malformed,
    /// What came does not have the checksum that the store tells.
    Corrupted,
    /// What came may change once more without another version.
    Unsettled,
    /// Nothing came for a while, and another source needed the slot.
    Displaced,
    /// The process that asks the store for us ended, hung, or could not be started.
    Helper,
}

impl RetryCause {
    /// A metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Throttled => "throttled",
            Self::ServerError => "server_error",
            Self::Connect => "connect",
            Self::Reset => "reset",
            Self::Truncated => "truncated",
            Self::Stalled => "stalled",
            Self::Malformed => "malformed",
            Self::Corrupted => "corrupted",
            Self::Unsettled => "unsettled",
            Self::Displaced => "displaced",
            Self::Helper => "helper",
        }
    }
}

impl Outcome {
    /// A metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::NotFound => "not_found",
            Self::Denied => "denied",
            Self::Stale => "stale",
            Self::Fault => "fault",
            Self::Broken => "broken",
            Self::Abandoned => "abandoned",
        }
    }
}

/// `op` is `"list"`, `"head"` or `"get"`.
pub trait Observer: Send + Sync {
    /// One attempt has waited for its turn on this node; what follows is the store's time.
    fn queued(&self, _op: &'static str, _waited: Duration) {}
    /// One attempt ended; `bytes` of body had arrived by then.
    fn request(&self, op: &'static str, outcome: Outcome, latency: Duration, bytes: u64);
    /// An attempt is about to be made again.
    fn retry(&self, op: &'static str, cause: RetryCause);
}

/// Hears everything, says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn request(&self, _: &'static str, _: Outcome, _: Duration, _: u64) {}
    fn retry(&self, _: &'static str, _: RetryCause) {}
}
