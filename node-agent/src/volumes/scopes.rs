//! The scopes that are open on this node, and the order in which each is opened, closed and removed.
//!
//! ```text
//!  (nothing) ──enter──► open ──close──► closing ──written out──► (nothing)
//!                        ▲                 │ enter, while a question still holds it
//!                        └─────────────────┘
//! ```
//!
//! Each scope has a lock of its own, under which it changes its state: a second publish waits for the first, a publish
//! for a closing, and a collector that removes a store is sure that no volume opens it meanwhile. A look for
//! an open scope does not wait for it: a cache file's end is reported once.

use crate::lock::lock;
use crate::volumes::scope::Scope;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::{Notify, OwnedMutexGuard};
use volume::ScopeId;

#[derive(Clone, Default)]
pub(crate) struct Scopes {
    slots: Arc<Mutex<HashMap<ScopeId, Slot>>>,
    /// Notified when one was closed.
    closed: Arc<Notify>,
}

#[derive(Clone)]
struct Slot {
    open: Open,
    place: Arc<tokio::sync::Mutex<Place>>,
}

/// Written by the holder of the place, read by all. Its lock is held for no longer than that.
type Open = Arc<Mutex<Option<Arc<Scope>>>>;

pub(super) struct Place {
    open: Open,
    /// Closed, but a question that is under way may still hold it: then it is the one to go on with.
    closing: Weak<Scope>,
}

impl Place {
    pub(super) fn open(&mut self, scope: Arc<Scope>) {
        *lock(&self.open) = Some(scope);
    }

    /// The scope, if anything of it is left in this process.
    pub(super) fn again(&mut self) -> Option<Arc<Scope>> {
        let mut open = lock(&self.open);
        if open.is_none() {
            *open = self.closing.upgrade();
        }
        open.clone()
    }

    fn is_open(&self) -> bool {
        lock(&self.open).is_some()
    }

    fn is_empty(&self) -> bool {
        !self.is_open() && self.closing.strong_count() == 0
    }
}

impl Default for Slot {
    fn default() -> Self {
        let open = Open::default();
        let place = Place { open: open.clone(), closing: Weak::new() };
        Self { open, place: Arc::new(tokio::sync::Mutex::new(place)) }
    }
}

/// No volume opens the scope while this lives.
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
    /// Waits for the task that opens or closes it.
    pub(super) async fn enter(&self, id: &ScopeId) -> OwnedMutexGuard<Place> {
        let place = lock(&self.slots).entry(id.clone()).or_default().place.clone();
        place.lock_owned().await
    }

    /// If it is open.
    pub(crate) fn get(&self, id: &ScopeId) -> Option<Arc<Scope>> {
        let open = lock(&self.slots).get(id)?.open.clone();
        lock(&open).clone()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Scope>> {
        let open: Vec<Open> = lock(&self.slots).values().map(|slot| slot.open.clone()).collect();
        open.iter().filter_map(|open| lock(open).clone()).collect()
    }

    /// Closes it unless it is used, or a volume is about to: writes its store out, on a thread that may block.
    /// `used`: looked at when no volume can open it any more. A later volume says first that it will use it, and then
    /// waits. Should a metrics scrape just look at the place, [`Self::sweep`] closes it.
    pub(super) fn close(&self, id: &ScopeId, used: impl FnOnce() -> bool) {
        let place = match lock(&self.slots).get(id) {
            // A publish that is under way holds the place, or waits for it.
            Some(slot) if Arc::strong_count(&slot.place) == 1 => slot.place.clone().try_lock_owned(),
            _ => return,
        };
        let Ok(mut place) = place else { return };
        if used() {
            return;
        }
        let open = lock(&place.open).take();
        let Some(scope) = open else {
            drop(place);
            return self.forget(id);
        };
        scope.source.access.end();
        place.closing = Arc::downgrade(&scope);
        let (me, id) = (self.clone(), id.clone());
        let close = move || {
            // A question under way that holds it is the last one then.
            if let Ok(scope) = Arc::try_unwrap(scope) {
                scope.close();
            }
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
    pub(crate) fn shut(&self, id: &ScopeId) -> Option<Shut> {
        let place = lock(&self.slots).entry(id.clone()).or_default().place.clone();
        let place = place.try_lock_owned().ok()?;
        let in_use = !place.is_empty();
        let shut = Shut { scopes: self.clone(), id: id.clone(), place: Some(place) };
        (!in_use).then_some(shut)
    }

    /// Closes what no volume uses and could not be closed when its last volume went; forgets what was closed while a
    /// question still held it, and which no volume has opened since.
    pub(super) fn sweep(&self, used: impl Fn(&ScopeId) -> bool) {
        let ids: Vec<ScopeId> = lock(&self.slots).keys().cloned().collect();
        ids.iter().for_each(|id| self.close(id, || used(id)));
    }

    /// Returns when a scope was closed.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }

    fn forget(&self, id: &ScopeId) {
        let mut slots = lock(&self.slots);
        let Some(slot) = slots.get(id).filter(|slot| Arc::strong_count(&slot.place) == 1) else { return };
        let empty = slot.place.try_lock().is_ok_and(|place| place.is_empty());
        if empty {
            slots.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scripted;
    use std::time::Duration;

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

    #[test]
    fn a_store_is_written_out_by_a_thread_that_may_block_whoever_held_its_scope_last() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
        let within = Duration::from_secs(20);
        runtime.block_on(async {
            let source = Scripted::new(1);
            let scope = source.scope();
            let marker = scope.metadata_dir.join("marker");
            let is_clean = || std::fs::read_to_string(&marker).unwrap().contains("clean");
            let scopes = Scopes::default();
            scopes.enter(&scope.id).await.open(scope.clone());
            let (id, question) = (scope.id.clone(), scope);
            scopes.close(&id, || false);
            tokio::time::timeout(within, scopes.closed()).await.unwrap();
            assert!(!is_clean(), "a question is under way");
            let (release, released) = std::sync::mpsc::channel::<()>();
            let busy = tokio::task::spawn_blocking(move || released.recv());
            drop(question);
            assert!(!is_clean(), "the runtime's own thread waited for the disk");
            drop(release);
            let _ = busy.await;
            tokio::task::spawn_blocking(|| ()).await.unwrap(); // after what was submitted before
            assert!(is_clean());
        });
    }

    #[tokio::test]
    async fn what_is_open_is_found_also_while_somebody_opens_or_closes_it() {
        let scopes = Scopes::default();
        let source = crate::testing::Scripted::new(0);
        let scope = source.scope();
        scopes.enter(&scope.id).await.open(scope.clone());
        let _publishing = scopes.enter(&scope.id).await;
        assert!(scopes.get(&scope.id).is_some_and(|found| Arc::ptr_eq(&found, &scope)));
        assert_eq!(scopes.all().len(), 1);
    }

    #[tokio::test]
    async fn what_is_used_stays_and_what_could_not_be_closed_at_once_is_closed_by_the_next_sweep() {
        let scopes = Scopes::default();
        let source = crate::testing::Scripted::new(0);
        let scope = source.scope();
        let (id, weak) = (scope.id.clone(), Arc::downgrade(&scope));
        scopes.enter(&id).await.open(scope);
        // Used by a publish that came after the last unpublish had looked.
        scopes.close(&id, || true);
        scopes.sweep(|_| true);
        assert!(scopes.get(&id).is_some());
        // A look has its place when its last volume goes.
        let looking = scopes.enter(&id).await;
        scopes.close(&id, || false);
        assert!(scopes.get(&id).is_some());
        drop(looking);
        scopes.sweep(|_| false);
        assert!(scopes.get(&id).is_none());
        scopes.closed().await;
        assert_eq!(weak.strong_count(), 0);
        assert!(lock(&scopes.slots).is_empty());
    }

    #[tokio::test]
    async fn what_was_never_opened_leaves_nothing() {
        let scopes = Scopes::default();
        drop(scopes.enter(&id("a")).await); // its publish failed
        scopes.close(&id("a"), || false);
        drop(scopes.shut(&id("b")));
        drop(scopes.enter(&id("c")).await);
        scopes.sweep(|_| false);
        assert!(lock(&scopes.slots).is_empty());
    }
}
