//! Which scopes volumes use, how much each may keep, and what becomes of unused ones.
//!
//! What a scope has cached stays when its last volume is gone, until others need the room: the next volume finds it.
//! What serves the scope only while it is used (descriptors of its directories) goes at once; when nothing is cached
//! any more, so do the directories and its place in the index.

use super::engine::Engine;
use super::root::Root;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use volume::ScopeId;

impl Engine {
    /// Volumes use this scope from now on, and want to keep at most `limit_bytes` in it. The operator's limit holds
    /// whatever they want. What is beyond the limit is evicted in due course.
    pub fn hold_scope(&self, scope: &ScopeId, limit_bytes: Option<u64>) {
        let ceiling = self.config.scope_limit_bytes;
        let mut index = self.lock_index();
        let number = index.scope(scope, ceiling);
        let known = &mut index.scopes[number as usize];
        known.limit = [limit_bytes, ceiling].into_iter().flatten().min();
        // Before a worker asks for a directory of it: see `Root::remove_scope`.
        known.held.store(true, Ordering::SeqCst);
    }

    /// No volume uses it any more. What it has cached stays, until others need the room.
    pub fn let_go_of_scope(&self, scope: &ScopeId) {
        let ceiling = self.config.scope_limit_bytes;
        let mut index = self.lock_index();
        if let Some(number) = index.scope_number(scope) {
            let known = &mut index.scopes[number as usize];
            known.limit = ceiling;
            known.held.store(false, Ordering::SeqCst);
        }
    }

    /// Gives back what scopes without volumes have, on each disk's own threads. Nothing is done while the last time is
    /// not over.
    pub(crate) fn sweep_scopes(self: &Arc<Self>) {
        if self.sweeping.swap(true, Ordering::AcqRel) {
            return;
        }
        let unused = self.lock_index().unused_scopes();
        let sweep =
            Arc::new(Sweep { engine: self.clone(), unused, left: AtomicUsize::new(self.roots.len()) });
        for root in &self.roots {
            let (root, sweep) = (root.clone(), sweep.clone());
            root.clone().pool.submit(move || sweep.on(&root));
        }
    }
}

/// Forgets, when it is over, what every disk has let go of. A disk that hangs ends it earlier, and forgets nothing.
struct Sweep {
    engine: Arc<Engine>,
    unused: Vec<(ScopeId, Arc<AtomicBool>)>,
    left: AtomicUsize,
}

impl Sweep {
    fn on(&self, root: &Root) {
        // Volumes may have come since the sweep began.
        let held: HashSet<ScopeId> = {
            let index = self.engine.lock_index();
            let held = index.known_scopes().filter(|s| s.held.load(Ordering::Relaxed));
            held.map(|s| s.id.clone()).collect()
        };
        root.close_scopes(|scope| !held.contains(scope));
        self.unused.iter().for_each(|(scope, held)| root.remove_scope(scope, held));
        self.left.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Sweep {
    fn drop(&mut self) {
        if *self.left.get_mut() == 0 {
            let mut index = self.engine.lock_index();
            self.unused.iter().for_each(|(scope, _)| index.forget_scope(scope));
        }
        self.engine.sweeping.store(false, Ordering::Release);
    }
}
