//! The rest of a large object whose file is changed: the bytes that are not here yet, and who brings them.

use super::elsewhere::{Blocks, Elsewhere};
use crate::lock::lock;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// Of one staged file.
#[derive(Default)]
pub(super) struct Rest {
    /// None: all its bytes are here, or none.
    elsewhere: Mutex<Option<Elsewhere>>,
    /// The journal says something of that.
    is_noted: AtomicBool,
    /// Blocks that are being brought, and who waits for one of them.
    coming: Mutex<BTreeSet<u64>>,
    came: Notify,
    /// Held by whoever notes that a block has come.
    pub(super) noting: tokio::sync::Mutex<()>,
}

/// Nobody else brings this block meanwhile.
pub(super) struct Claim {
    rest: Arc<Rest>,
    block: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        lock(&self.rest.coming).remove(&self.block);
        self.rest.came.notify_waiters();
    }
}

impl Rest {
    /// As the journal has it.
    pub(super) fn recall(&self, elsewhere: Elsewhere) {
        self.set(Some(elsewhere));
        self.note_noted(true);
    }

    pub(super) fn get(&self) -> Option<Elsewhere> {
        lock(&self.elsewhere).clone()
    }

    pub(super) fn set(&self, elsewhere: Option<Elsewhere>) {
        *lock(&self.elsewhere) = elsewhere;
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Elsewhere)) {
        if let Some(elsewhere) = lock(&self.elsewhere).as_mut() {
            change(elsewhere);
        }
    }

    /// The first block with a byte of `range` that is not here, and its bytes.
    pub(super) fn first_missing(&self, range: Range<u64>) -> Option<(u64, Range<u64>)> {
        lock(&self.elsewhere).as_ref().and_then(|elsewhere| elsewhere.first_missing(range))
    }

    /// The bytes of this block, if it is not here.
    pub(super) fn missing_block(&self, block: u64) -> Option<Range<u64>> {
        lock(&self.elsewhere).as_ref().and_then(|elsewhere| elsewhere.missing_block(block))
    }

    /// The right to bring this block, once nobody else does. None: it is here.
    pub(super) async fn claim(self: &Arc<Self>, block: u64) -> Option<Claim> {
        loop {
            let came = self.came.notified();
            tokio::pin!(came);
            came.as_mut().enable();
            self.missing_block(block)?;
            if lock(&self.coming).insert(block) {
                return Some(Claim { rest: self.clone(), block });
            }
            came.await;
        }
    }

    /// Bytes that its object has and that are not here.
    pub(super) fn bytes(&self) -> u64 {
        lock(&self.elsewhere).as_ref().map_or(0, Elsewhere::missing)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first_missing(0..u64::MAX).is_none()
    }

    /// No loss of power takes a block that has come.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.elsewhere).as_ref().is_none_or(Elsewhere::is_over)
    }

    /// The blocks that are here.
    pub(super) fn brought(&self) -> Option<Blocks> {
        lock(&self.elsewhere).as_ref().map(Elsewhere::now)
    }

    /// What the journal is to have beside the record of a file whose bytes are here (`is_local`) or not, and whether it has
    /// something then. To be called with the content alone.
    pub(super) fn beside(&self, is_local: bool) -> (Option<Elsewhere>, bool) {
        let mut elsewhere = lock(&self.elsewhere);
        elsewhere.take_if(|elsewhere| !is_local || elsewhere.is_over());
        (elsewhere.clone(), self.is_noted.load(Acquire))
    }

    pub(super) fn note_noted(&self, is_noted: bool) {
        self.is_noted.store(is_noted, Release);
    }
}
