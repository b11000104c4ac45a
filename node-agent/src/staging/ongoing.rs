//! An upload in parts that is under way.

use link::writable::Owner;
use std::collections::BTreeMap;
use store::{Part, Upload};
use tokio::time::Instant;

/// Of one file. Held by whoever brings it into the store.
#[derive(Default)]
pub(super) struct Ongoing {
    pub(super) upload: Option<Begun>,
    /// When it was sent last without anybody waiting for it, in vain.
    pub(super) tried: Option<Instant>,
}

pub(super) struct Begun {
    pub(super) upload: Upload,
    /// Owner and mode that the object will have: stores want them said at the beginning.
    pub(super) owner: Owner,
    /// With the change of the file up to which each has it.
    pub(super) parts: BTreeMap<u32, (Part, u64)>,
}
