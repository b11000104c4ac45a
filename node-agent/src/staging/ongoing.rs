//! An upload in parts that is under way.

use super::record::Multipart;
use link::writable::Owner;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use store::{Part, Upload, WriteId};
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
    /// As long as this is here nobody ends it.
    pub(super) _held: Holder,
    /// Owner and mode that the object will have: stores want them said at the beginning.
    pub(super) owner: Owner,
    /// With the change of the file up to which each has it.
    pub(super) parts: BTreeMap<u32, (Part, u64)>,
}

/// By whom an upload is being sent.
pub(super) type Holder = Arc<()>;

/// An upload that the journal tells of.
pub(super) struct Noted {
    multipart: Multipart,
    holder: Weak<()>,
}

impl Noted {
    /// As the journal has it: of an agent that is gone.
    pub(super) fn recalled(multipart: Multipart) -> Self {
        Self { multipart, holder: Weak::new() }
    }

    pub(super) fn held(multipart: Multipart, by: &Holder) -> Self {
        Self { multipart, holder: Arc::downgrade(by) }
    }

    /// Nobody sends it any more.
    pub(super) fn is_left(&self) -> bool {
        self.holder.strong_count() == 0
    }

    pub(super) fn is_of(&self, upload: &Upload) -> bool {
        self.multipart.id == upload.id && self.multipart.path == upload.path
    }

    pub(super) fn begun_ns(&self) -> i64 {
        self.multipart.begun_ns
    }

    pub(super) fn upload(&self, write: WriteId) -> Upload {
        let Multipart { path, id, .. } = &self.multipart;
        Upload { path: path.clone(), id: id.clone(), write }
    }
}
