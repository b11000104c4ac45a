//! What sources keep between two questions because they would have to fetch it again as a whole. All sources of the node together
//! keep so much and no more: what was kept longest goes.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// One name takes up to some two hundred bytes, so this is 80 MB at worst.
const NAMES_MAX: usize = 400_000;

#[derive(Default)]
pub(crate) struct Kept {
    things: Mutex<VecDeque<Thing>>,
    sources: AtomicU64,
}

struct Thing {
    source: u64,
    what: Vec<u8>,
    names: usize,
    value: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("things", &self.things().len()).finish()
    }
}

impl Kept {
    /// A number for a source that keeps something: no other has it.
    pub(crate) fn source(&self) -> u64 {
        self.sources.fetch_add(1, Ordering::Relaxed)
    }

    /// In the place of what was kept so before. `names`: how much it is.
    pub(crate) fn put<T: Any + Send + Sync>(&self, source: u64, what: &[u8], names: usize, value: Arc<T>) {
        let mut things = self.things();
        things.retain(|thing| (thing.source, thing.what.as_slice()) != (source, what));
        things.push_back(Thing { source, what: what.to_owned(), names, value });
        let mut all: usize = things.iter().map(|thing| thing.names).sum();
        while all > NAMES_MAX {
            all -= things.pop_front().map_or(all, |thing| thing.names);
        }
    }

    pub(crate) fn get<T: Any + Send + Sync>(&self, source: u64, what: &[u8]) -> Option<Arc<T>> {
        let things = self.things();
        let thing = things.iter().find(|thing| (thing.source, thing.what.as_slice()) == (source, what))?;
        thing.value.clone().downcast().ok()
    }

    pub(crate) fn take<T: Any + Send + Sync>(&self, source: u64, what: &[u8]) -> Option<Arc<T>> {
        let mut things = self.things();
        let at = things.iter().position(|thing| (thing.source, thing.what.as_slice()) == (source, what))?;
        things.remove(at)?.value.downcast().ok()
    }

    /// Of a source that is gone.
    pub(crate) fn forget(&self, source: u64) {
        self.things().retain(|thing| thing.source != source);
    }

    fn things(&self) -> MutexGuard<'_, VecDeque<Thing>> {
        self.things.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_sources_together_keep_so_much_and_no_more() {
        let kept = Kept::default();
        let (one, other) = (kept.source(), kept.source());
        assert_ne!(one, other);
        for k in 0..1000_u64 {
            kept.put(one, &k.to_le_bytes(), NAMES_MAX / 10, Arc::new(k));
        }
        assert_eq!(kept.things().len(), 10);
        // The oldest goes first, whoever's it is.
        assert_eq!(kept.get::<u64>(one, &989_u64.to_le_bytes()), None);
        assert_eq!(kept.get::<u64>(one, &990_u64.to_le_bytes()).as_deref(), Some(&990));
        kept.put(other, b"x", NAMES_MAX / 10, Arc::new(7_u64));
        assert_eq!(kept.get::<u64>(one, &990_u64.to_le_bytes()), None);
        // Again: in its place, and as new.
        kept.put(other, b"x", 1, Arc::new(8_u64));
        assert_eq!(kept.take::<u64>(other, b"x").as_deref(), Some(&8));
        assert_eq!(kept.take::<u64>(other, b"x"), None);
        // More than all: not kept.
        kept.put(one, b"all", NAMES_MAX + 1, Arc::new(0_u64));
        assert!(kept.things().is_empty());
        kept.put(one, b"x", 1, Arc::new(0_u64));
        kept.forget(one);
        assert!(kept.things().is_empty());
    }
}
