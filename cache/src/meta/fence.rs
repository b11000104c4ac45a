//! Keeps the pages that readers in other processes may be looking at.
//!
//! Readers of other processes leave no trace: they open the store without LMDB's lock file, for whoever may write its
//! reader table holds the agent's memory and its locks in his hands, and a worker serves requests of strangers. Instead
//! the writer keeps snapshots of its own, and with them every page that has been in use within the last [`KEPT`]; a
//! reader whose question took longer than [`READER_LIMIT`] throws its answer away and asks again (`view`).
//!
//! ```text
//!  reader      begin ── at most READER_LIMIT ──► answer        later: not believed
//!  writer   ─────┼──── a page of that moment stays for KEPT ─────────┤ used again
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a page stays after a commit has replaced it. Each commit replaces some ten, so this is what the file is
/// larger for: a thousand look-ups a second are 24 MB of pages.
pub(super) const KEPT: Duration = Duration::from_millis(400);
/// A question takes microseconds. One that takes longer than this was held up, and may have read pages of any time.
pub(super) const READER_LIMIT: Duration = Duration::from_millis(100);
/// So many snapshots are held at once at most, and one more.
const STEPS: u32 = 4;

/// Snapshots of type `S`, oldest first.
#[derive(Debug)]
pub(super) struct Fence<S> {
    kept: Duration,
    held: VecDeque<(Instant, S)>,
    /// Every commit is older.
    last_write: Option<Instant>,
}

impl<S> Default for Fence<S> {
    fn default() -> Self {
        Self { kept: KEPT, held: VecDeque::new(), last_write: None }
    }
}

impl<S> Fence<S> {
    /// Before each write: `snapshot` takes one of what is committed now. What readers that began within the last
    /// [`KEPT`] may see stays behind the oldest one that is held.
    pub(super) fn advance<E>(
        &mut self,
        now: Instant,
        snapshot: impl FnOnce() -> Result<S, E>,
    ) -> Result<(), E> {
        if self.last_write.is_some_and(|last| now.saturating_duration_since(last) > self.kept) {
            self.held.clear(); // all readers in time see what is committed now
        }
        if self
            .held
            .back()
            .is_none_or(|(taken, _)| now.saturating_duration_since(*taken) >= self.kept / STEPS)
        {
            self.held.push_back((now, snapshot()?));
        }
        // The second one does for all who began after it was taken.
        while self.held.get(1).is_some_and(|(taken, _)| now.saturating_duration_since(*taken) > self.kept) {
            self.held.pop_front();
        }
        self.last_write = Some(now);
        Ok(())
    }

    /// After how much time without a write all pages that were replaced can be used again. None: there are none.
    pub(super) fn room_in(&self, now: Instant) -> Option<Duration> {
        let last = self.last_write?;
        let passed = now.saturating_duration_since(last);
        // The newest snapshot may be older than the last write. One that is alone and is that old holds little.
        (passed <= self.kept).then(|| self.kept - passed + Duration::from_millis(1))
    }

    #[cfg(test)]
    pub(super) fn keep_for(&mut self, kept: Duration) {
        self.kept = kept;
    }

    /// No reader is left.
    pub(super) fn clear(&mut self) {
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Versions are counted; each write commits the next one. A page of version v that write v + 1 has replaced may
        /// be used again by a write that holds no snapshot of version v or older.
        #[test]
        fn what_a_reader_in_time_may_see_is_held_and_little_more(pauses in proptest::collection::vec(0u64..700, 1..200)) {
            let mut fence = Fence::<u64>::default();
            let mut now = Instant::now();
            // When each version was committed.
            let mut committed = vec![now];
            for pause in pauses {
                now += Duration::from_millis(pause);
                let newest = committed.len() as u64 - 1;
                // As a disk without room has it.
                if pause == 0
                    && let Some(wait) = fence.room_in(now)
                {
                    now += wait;
                }
                fence.advance(now, || Ok::<_, ()>(newest)).unwrap();
                let oldest_held = fence.held.front().unwrap().1;
                // A reader that began KEPT ago saw the newest version of that moment.
                let seen = committed.iter().rposition(|at| now.duration_since(*at) >= KEPT).unwrap_or(0) as u64;
                prop_assert!(oldest_held <= seen, "a reader of version {seen} is left to {oldest_held}");
                prop_assert!(fence.held.len() <= STEPS as usize + 2);
                committed.push(now);
            }
        }

        /// However old the store: what is held is not older than the last write but one, or than twice the time.
        #[test]
        fn what_no_reader_can_see_is_let_go(pauses in proptest::collection::vec(1u64..150, 30..200)) {
            let mut fence = Fence::<Instant>::default();
            let mut now = Instant::now();
            for pause in &pauses {
                now += Duration::from_millis(*pause);
                fence.advance(now, || Ok::<_, ()>(now)).unwrap();
                let age = now.duration_since(fence.held.front().unwrap().1);
                prop_assert!(age <= KEPT * 2, "{age:?}");
            }
        }
    }
}
