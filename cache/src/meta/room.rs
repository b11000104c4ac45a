//! How much of the disk all stores may take together.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// One for all stores of an agent.
#[derive(Debug)]
pub struct Room {
    limit: u64,
    taken: Mutex<Taken>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    /// By stores that are open, their reserves included.
    open: u64,
    /// By all others, at the last look.
    idle: u64,
}

impl Room {
    /// Bytes.
    pub fn new(limit: u64) -> Self {
        Self { limit, taken: Mutex::default() }
    }

    /// Of the stores that are not open.
    pub fn note_idle(&self, bytes: u64) {
        self.lock().idle = bytes;
    }

    /// Bytes of the stores that are open.
    pub fn open(&self) -> u64 {
        self.lock().open
    }

    /// A store that has `counted` bytes takes `wanted` instead. False: there is no room for more, and nothing has
    /// changed.
    pub(super) fn take(&self, counted: &mut u64, wanted: u64) -> bool {
        let mut taken = self.lock();
        let others = taken.open - *counted;
        if wanted > *counted && others.saturating_add(taken.idle).saturating_add(wanted) > self.limit {
            return false;
        }
        taken.open = others + wanted;
        *counted = wanted;
        true
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        // Two numbers: whole after any panic.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
