//! Passthrough ids that the broker opened for one mount and that were not closed yet.

use crate::lock::lock;
use std::collections::HashSet;
use std::sync::Mutex;

/// Those that workers may record, and those that they have not recorded yet: all fit into one message.
const _: () = assert!(link::BACKING_IDS_MAX == inflight::BACKINGS + 256);

#[derive(Default)]
pub(super) struct Backings(Mutex<HashSet<u32>>);

impl Backings {
    pub(super) fn of(ids: Vec<u32>) -> Self {
        Self(Mutex::new(ids.into_iter().collect()))
    }

    pub(super) fn opened(&self, id: u32) {
        lock(&self.0).insert(id);
    }

    pub(super) fn closed(&self, id: u32) {
        lock(&self.0).remove(&id);
    }

    pub(super) fn all(&self) -> Vec<u32> {
        lock(&self.0).iter().copied().collect()
    }

    /// No worker will ever use what none has recorded.
    pub(super) fn leaked(&self, recorded: &HashSet<u32>) -> Vec<u32> {
        lock(&self.0).difference(recorded).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_worker_has_recorded_is_leaked() {
        let backings = Backings::of(vec![1, 2]);
        backings.opened(3);
        backings.closed(1);
        assert_eq!(backings.leaked(&HashSet::from([3, 9])), [2]);
        assert_eq!(backings.all().into_iter().collect::<HashSet<_>>(), HashSet::from([2, 3]));
    }
}
