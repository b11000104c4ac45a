//! For tests of upgrades: what only the next version says to its peers.

use serde::{Deserialize, Serialize};

/// Of a mount. The next version does without it when a build before it has passed the mount on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Later {
    #[serde(default)]
    published_by: Option<u32>,
}

impl Later {
    /// Of a mount that this build has published.
    pub fn here() -> Self {
        Self { published_by: Some(version::LINK) }
    }
}
