//! The scopes that are open on this node, and the order in which each is opened, closed and removed.
//!
//! ```text
//!  (nothing) ──enter──► open ──close──► closing ──written out──► (nothing)
//!                        ▲                 │ enter, while a question still holds it
//!                        └─────────────────┘
//! ```
//!
//! Each scope has a lock of its own, under which it changes its state: a second publish waits for the first, a publish for
//! a closing, and who removes a store is sure that nobody opens it meanwhile.

use super::lock;
use crate::scope::Scope;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::{Notify, OwnedMutexGuard};
use volume::ScopeId;

#[derive(Clone, Default)]
pub(super) struct Scopes {
    slots: Arc<Mutex<HashMap<ScopeId, Slot>>>,
    /// Told when one was closed.
    closed: Arc<Notify>,
}

type Slot = Arc<tokio::sync::Mutex<Place>>;

#[derive(Default)]
pub(super) struct Place {
    pub(super) open: Option<Arc<Scope>>,
    /// Closed, but a question that is under way may still hold it: then it is the one to go on with.
    closing: Weak<Scope>,
}

impl Place {
    /// The scope, if anything of it is left in this process.
    pub(super) fn again(&mut self) -> Option<&Arc<Scope>> {
        if self.open.is_none() {
            self.open = self.closing.upgrade();
        }
        self.open.as_ref()
    }
}

/// Nobody opens the scope while this lives.
pub(crate) struct Shut {
    scopes: Scopes,
    id: ScopeId,
    place: Option<OwnedMutexGuard<Place>>,
}

impl Drop for Shut {
    fn drop(&mut self) {
        self.place = None;
        self.scopes.forget(&self.id);
    }
}

impl Scopes {
    /// Waits for whoever opens or closes it.
    pub(super) async fn enter(&self, id: &ScopeId) -> OwnedMutexGuard<Place> {
        let slot = lock(&self.slots).entry(id.clone()).or_default().clone();
        slot.lock_owned().await
    }

    /// If it is open.
    pub(super) fn get(&self, id: &ScopeId) -> Option<Arc<Scope>> {
        let slot = lock(&self.slots).get(id)?.clone();
        slot.try_lock().ok()?.open.clone()
    }

    pub(super) fn all(&self) -> Vec<Arc<Scope>> {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        slots.iter().filter_map(|slot| slot.try_lock().ok()?.open.clone()).collect()
    }

    /// Closes it unless somebody is about to use it: writes its store out, on a thread that may block.
    pub(super) fn close(&self, id: &ScopeId) {
        let mut slots = lock(&self.slots);
        // A publish that is under way holds the slot.
        let Some(slot) = slots.get(id).filter(|slot| Arc::strong_count(slot) == 1).cloned() else { return };
        let Ok(mut place) = slot.try_lock_owned() else { return };
        let Some(scope) = place.open.take() else {
            let gone = place.closing.strong_count() == 0;
            drop(place);
            if gone {
                slots.remove(id);
            }
            return;
        };
        drop(slots);
        scope.asked.end();
        place.closing = Arc::downgrade(&scope);
        let (me, id) = (self.clone(), id.clone());
        let close = move || {
            drop(scope);
            drop(place);
            me.forget(&id);
            me.closed.notify_one();
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(close)),
            Err(_) => close(),
        }
    }

    /// None: it is open, or about to be.
    pub(super) fn shut(&self, id: &ScopeId) -> Option<Shut> {
        let slot = lock(&self.slots).entry(id.clone()).or_default().clone();
        let place = slot.try_lock_owned().ok()?;
        let in_use = place.open.is_some() || place.closing.strong_count() > 0;
        let shut = Shut { scopes: self.clone(), id: id.clone(), place: Some(place) };
        (!in_use).then_some(shut)
    }

    /// Those that were closed while a question still held them, and which nobody has opened since.
    pub(super) fn sweep(&self) {
        let ids: Vec<ScopeId> = lock(&self.slots).keys().cloned().collect();
        ids.iter().for_each(|id| self.forget(id));
    }

    /// Returns when a scope was closed.
    pub(super) async fn closed(&self) {
        self.closed.notified().await;
    }

    fn forget(&self, id: &ScopeId) {
        let mut slots = lock(&self.slots);
        let Some(slot) = slots.get(id).filter(|slot| Arc::strong_count(slot) == 1) else { return };
        let empty =
            slot.try_lock().is_ok_and(|place| place.open.is_none() && place.closing.strong_count() == 0);
        if empty {
            slots.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(digit: &str) -> ScopeId {
        ScopeId::parse(&digit.repeat(32)).unwrap()
    }

    #[tokio::test]
    async fn nobody_opens_a_scope_that_is_being_removed_and_none_that_is_opened_is_removed() {
        let scopes = Scopes::default();
        let a = id("a");
        let shut = scopes.shut(&a).unwrap();
        assert!(scopes.shut(&a).is_none());
        let mut entering = Box::pin(scopes.enter(&a));
        assert!(futures::poll!(&mut entering).is_pending());
        drop(shut);
        let place = entering.await;
        assert!(scopes.shut(&id("a")).is_none());
        drop(place);
        assert!(scopes.shut(&id("a")).is_some());
    }

    #[tokio::test]
    async fn what_was_never_opened_leaves_nothing() {
        let scopes = Scopes::default();
        drop(scopes.enter(&id("a")).await); // its publish failed
        scopes.close(&id("a"));
        drop(scopes.shut(&id("b")));
        drop(scopes.enter(&id("c")).await);
        scopes.sweep();
        assert!(lock(&scopes.slots).is_empty());
    }
}
