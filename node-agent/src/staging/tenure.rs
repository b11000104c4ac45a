//! How long an agent has an area: until it is released to the next one, which does anew what was not answered.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use tokio::sync::watch;

#[derive(Debug, Default)]
pub(super) struct Tenure {
    over: watch::Sender<bool>,
    /// Held with others by whoever changes what lies on the disk, so that a release knows that nobody does any more.
    changing: RwLock<()>,
}

/// Held as long as the disk is changed.
pub(super) type Changing<'t> = RwLockReadGuard<'t, ()>;

impl Tenure {
    pub(super) fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// From now on nobody begins to change anything.
    pub(super) fn end(&self) {
        self.over.send_replace(true);
    }

    /// Returns when it is.
    pub(super) async fn ended(&self) {
        let _ = self.over.subscribe().wait_for(|over| *over).await; // its sender is here
    }

    /// To be asked on a thread that may wait. None: it is over.
    pub(super) fn change(&self) -> Option<Changing<'_>> {
        let changing = self.changing.read().unwrap_or_else(PoisonError::into_inner);
        (!self.is_over()).then_some(changing)
    }

    /// Nobody changes anything just now.
    pub(super) fn is_idle(&self) -> bool {
        self.changing.try_write().is_ok()
    }
}
