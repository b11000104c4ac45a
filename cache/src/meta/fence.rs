//! Keeps the pages that readers in other processes may be looking at.
//!
//! Readers of other processes leave no trace: they open the store without LMDB's lock file, for a process that may
//! write its reader table holds the agent's memory and its locks in its hands, and a worker serves requests of
//! strangers. Instead the writer keeps snapshots of its own, and with them every page that has been in use within the
//! last [`KEPT`]; a reader whose question took longer than [`READER_LIMIT`] throws its answer away and asks again
//! (`view`).
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
/// So many writes wait for room at a time; others fail at once. Each holds a thread of a pool that all scopes share.
const WAITING_MAX: u32 = 4;
/// So many snapshots are held at once at most, and one more.
const STEPS: u32 = 4;

/// Snapshots of type `S`, oldest first.
#[derive(Debug)]
pub(super) struct Fence<S> {
    kept: Duration,
    held: VecDeque<(Instant, S)>,
    /// Every commit is older.
    last_write: Option<Instant>,
    /// The store is full: when all pages that were kept as it became so can be used again. A writer that finds no room
    /// after that need not wait: nothing more is given back.
    full_until: Option<Instant>,
    waiting: u32,
}

impl<S> Default for Fence<S> {
    fn default() -> Self {
        Self { kept: KEPT, held: VecDeque::new(), last_write: None, full_until: None, waiting: 0 }
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
        // The second one does for all that began after it was taken.
        while self.held.get(1).is_some_and(|(taken, _)| now.saturating_duration_since(*taken) > self.kept) {
            self.held.pop_front();
        }
        self.last_write = Some(now);
        Ok(())
    }

    /// A write found no room: after how much time without a write all pages that were replaced can be used again. None:
    /// it is not to wait. A writer that waits says [`Self::waited`] afterwards.
    pub(super) fn wait_for_room(&mut self, now: Instant) -> Option<Duration> {
        // The newest snapshot may be older than the last write. One that is alone and is that old holds little.
        let room_at = self.last_write? + self.kept + Duration::from_millis(1);
        let wait = self.full_until.get_or_insert(room_at).saturating_duration_since(now);
        if wait.is_zero() || self.waiting == WAITING_MAX {
            return None;
        }
        self.waiting += 1;
        Some(wait)
    }

    pub(super) fn waited(&mut self) {
        self.waiting -= 1;
    }

    /// A write found room.
    pub(super) fn has_room(&mut self) {
        self.full_until = None;
    }

    #[cfg(test)]
    pub(super) fn keep_for(&mut self, kept: Duration) {
        self.kept = kept;
        self.full_until = None;
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

    #[test]
    fn few_wait_for_room_and_only_until_the_pages_are_back() {
        let mut fence = Fence::<()>::default();
        let mut now = Instant::now();
        assert_eq!(fence.wait_for_room(now), None, "nothing was written, so nothing is kept");
        fence.advance(now, || Ok::<_, ()>(())).unwrap();
        let waits: Vec<_> = (0..10).map_while(|_| fence.wait_for_room(now)).collect();
        assert_eq!(waits.len(), WAITING_MAX as usize);
        now += waits[0];
        waits.iter().for_each(|_| fence.waited());
        // Each of them tries again, and finds no room.
        for _ in 0..10 {
            fence.advance(now, || Ok::<_, ()>(())).unwrap();
            assert_eq!(fence.wait_for_room(now), None);
            now += Duration::from_millis(100);
        }
        fence.has_room();
        fence.advance(now, || Ok::<_, ()>(())).unwrap();
        assert!(fence.wait_for_room(now).is_some(), "it has become full again");
    }

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
                    && let Some(wait) = fence.wait_for_room(now)
                {
                    now += wait;
                    fence.waited();
                }
                fence.advance(now, || Ok::<_, ()>(newest)).unwrap();
                fence.has_room();
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
