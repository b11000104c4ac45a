//! How long a kernel may believe what it is told of names and attributes.
//!
//! While one mount has the area, whatever changes it on this node goes through that mount's kernel, which knows what it has done:
//! it need not ask again for a moment. Another mount is let in when nothing that the first was told counts any more, and from
//! its arrival on nobody is told anything that does.

use crate::lock::lock;
use link::broker::MountId;
use link::writable::BELIEVED_MAX;
use std::collections::HashSet;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use tokio::time::Instant;
use volume::Freshness;

/// No more of a volume's freshness than this part.
const OF_FRESHNESS: u32 = 10;
/// By then an agent that starts has been given all mounts of the one before.
pub(super) const STRANGERS: Duration = Duration::from_secs(180);

pub(super) fn longest(freshness: Freshness) -> Duration {
    match freshness {
        Freshness::Static => BELIEVED_MAX,
        Freshness::Ttl(ttl) => BELIEVED_MAX.min(ttl / OF_FRESHNESS),
        Freshness::Strict => Duration::ZERO,
    }
}

/// When this agent knows all mounts of the area.
#[derive(Clone, Copy)]
pub(super) enum AllKnown {
    /// It has made the area: nobody had it before.
    Now,
    /// So long after this agent began to take mounts of the one before, or was given one of this area.
    After(Instant),
}

impl AllKnown {
    fn is_so(self) -> bool {
        match self {
            Self::Now => true,
            Self::After(started) => started.elapsed() >= STRANGERS,
        }
    }

    /// What an agent before has promised to a mount counts still for so long.
    fn promised_before(self) -> Duration {
        match self {
            Self::Now => Duration::ZERO,
            Self::After(started) => BELIEVED_MAX.saturating_sub(started.elapsed()),
        }
    }
}

/// A mount that is about to join.
pub(crate) struct Coming<'a>(&'a AtomicU32);

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

/// What was promised to the kernels of one area.
pub(super) struct Believed {
    all_known: Mutex<AllKnown>,
    /// Mounts that are about to join.
    coming: AtomicU32,
    /// Until when the only mount believes what it was told, milliseconds of the clock of names.
    promised_ms: AtomicU64,
}

impl Believed {
    pub(super) fn new(all_known: AllKnown) -> Self {
        let (coming, promised_ms) = (AtomicU32::new(0), AtomicU64::new(0));
        Self { all_known: Mutex::new(all_known), coming, promised_ms }
    }

    /// What is said now may be believed until then, milliseconds of the clock of names; 0: not at all. `mounts`: of the area, held
    /// so that none joins meanwhile; `now_ms`: of that clock.
    pub(super) fn until_ms(
        &self,
        mounts: &MutexGuard<'_, HashSet<MountId>>,
        freshness: Freshness,
        now_ms: u64,
    ) -> u64 {
        let longest = longest(freshness).as_millis() as u64;
        let is_alone = mounts.len() == 1 && self.coming.load(Acquire) == 0;
        if longest == 0 || !is_alone || !lock(&self.all_known).is_so() {
            return 0;
        }
        let until = now_ms.saturating_add(longest);
        self.promised_ms.fetch_max(until, AcqRel);
        until
    }

    /// From here on nobody is promised anything. To be called with the mounts held.
    pub(super) fn comes(&self) -> Coming<'_> {
        self.coming.fetch_add(1, AcqRel);
        Coming(&self.coming)
    }

    /// Returns when no mount believes what may change from now on. To be called by whoever comes. `has_mounts`: there are some.
    pub(super) async fn forgotten(&self, has_mounts: bool, now_ms: u64) {
        let before = lock(&self.all_known).promised_before();
        // No longer than that, whatever the clock says.
        let left =
            Duration::from_millis(self.promised_ms.load(Acquire).saturating_sub(now_ms)).min(BELIEVED_MAX);
        let left =
            if has_mounts && !left.is_zero() { left + Duration::from_millis(1) } else { Duration::ZERO };
        tokio::time::sleep(before.max(left)).await;
    }

    /// A mount of an agent before was given to this one. There may be others still to come, which nobody holds up.
    pub(super) fn note_adopted(&self) {
        *lock(&self.all_known) = AllKnown::After(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_a_tenth_of_what_a_volume_allows_others_to_be_seen_late() {
        let of = |s| longest(Freshness::Ttl(Duration::from_secs(s)));
        assert_eq!([of(0), of(1), of(5), of(60)].map(|d| d.as_millis()), [0, 100, 500, 1000]);
        assert_eq!(longest(Freshness::Strict), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_follows_another_one_knows_all_mounts_after_some_time() {
        let follows = AllKnown::After(Instant::now());
        assert!(AllKnown::Now.is_so() && !follows.is_so());
        assert_eq!(
            (AllKnown::Now.promised_before(), follows.promised_before()),
            (Duration::ZERO, BELIEVED_MAX)
        );
        tokio::time::advance(BELIEVED_MAX).await;
        assert_eq!(follows.promised_before(), Duration::ZERO);
        tokio::time::advance(STRANGERS - BELIEVED_MAX).await;
        assert!(follows.is_so());
    }
}
