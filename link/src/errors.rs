//! Why a publish was refused, in words that survive a process boundary.

use serde::{Deserialize, Serialize};

/// Why a publish was refused: `kind` decides the gRPC code, `message` tells the user what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub kind: RefusalKind,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalKind {
    /// The request itself is wrong: a bad parameter, a malformed secret.
    Invalid,
    /// Not in the allow-list, wrong key, no permission at the source.
    Denied,
    /// Bucket or prefix does not exist.
    NotFound,
    /// Source not reachable in time, agent not running or overloaded: worth a retry.
    Unavailable,
    /// The volume is known already with other parameters.
    Conflict,
    /// A defect; or a reason that only a later version knows: the message says it.
    #[serde(other)]
    Internal,
}

impl Refusal {
    pub fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}
