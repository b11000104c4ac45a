//! Which scopes volumes use, how much each may keep, and what becomes of those that nobody uses any more.
//!
//! What a scope has cached stays when its last volume is gone, until others need the room: the next volume finds it. What
//! serves the scope only while it is used (descriptors of its directories) goes at once; when nothing is cached any more,
//! so do the directories and its place in the index.

use super::engine::Engine;
use std::collections::HashSet;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use volume::ScopeId;

impl Engine {
    /// Volumes use this scope from now on, and want to keep at most `limit_bytes` in it. The operator's limit holds whatever
    /// they want. What is beyond the limit is evicted in due course.
    pub fn hold_scope(&self, scope: &ScopeId, limit_bytes: Option<u64>) {
        let ceiling = self.config.scope_limit_bytes;
        let mut index = self.lock_index();
        let number = index.scope(scope, ceiling);
        let known = &mut index.scopes[number as usize];
        known.limit = [limit_bytes, ceiling].into_iter().flatten().min();
        // Before anybody asks for a directory of it: see `Root::remove_scope`.
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

    /// Gives back what scopes without volumes have. Blocking.
    pub(crate) fn sweep_scopes(&self) {
        // One at a time: who comes later would not know of a volume that has come in between.
        let _alone = self.sweeping.lock().unwrap_or_else(PoisonError::into_inner);
        let (held, unused) = {
            let index = self.lock_index();
            let held = index.known_scopes().filter(|s| s.held.load(Ordering::Relaxed));
            (held.map(|s| s.id.clone()).collect::<HashSet<_>>(), index.unused_scopes())
        };
        for root in &self.roots {
            root.close_scopes(|scope| !held.contains(scope));
        }
        for (scope, held) in unused {
            self.roots.iter().for_each(|root| root.remove_scope(&scope, &held));
            self.lock_index().forget_scope(&scope);
        }
    }
}
