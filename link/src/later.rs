//! What only a later version than this one says to its peers: nothing.
//!
//! A build for tests of upgrades has `next_version.rs` in this module's place.

use serde::{Deserialize, Serialize};

/// Of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Later {}

impl Later {
    /// Of a mount that this build has published.
    pub fn here() -> Self {
        Self {}
    }
}
