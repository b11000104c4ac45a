//! How long a kernel may believe what it is told of names and attributes.
//!
//! While one mount has the area, whatever changes it on this node goes through that mount's kernel, which knows what it has done:
//! it need not ask again for a moment. Another mount is let in when nothing that the first was told counts any more, and from
//! its arrival on nobody is told anything that does.

use super::area::Area;
use super::send::STRANGERS;
use crate::lock::lock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::time::Duration;
use tokio::time::Instant;
use volume::Freshness;

/// Changes of other nodes, and what an operator discards, may be seen so much later. As long as a pod may wait for its volume
/// without anybody noticing, too.
const LONGEST: Duration = Duration::from_secs(1);
/// No more of a volume's freshness than this part.
const OF_FRESHNESS: u32 = 10;

pub(super) fn longest(freshness: Freshness) -> Duration {
    match freshness {
        Freshness::Static => LONGEST,
        Freshness::Ttl(ttl) => LONGEST.min(ttl / OF_FRESHNESS),
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
            Self::After(started) => LONGEST.saturating_sub(started.elapsed()),
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

impl Area {
    /// What is said now may be believed until then, milliseconds of the clock of names; 0: not at all. To be asked after an
    /// operation was done.
    pub(crate) fn believed_until_ms(&self) -> u64 {
        let longest = longest(self.freshness()).as_millis() as u64;
        let mounts = lock(&self.mounts);
        let is_alone = mounts.len() == 1 && self.coming.load(Acquire) == 0;
        if longest == 0 || !is_alone || !lock(&self.all_known).is_so() {
            return 0;
        }
        let until = self.scope.names.now_ms().saturating_add(longest);
        self.promised_ms.fetch_max(until, AcqRel);
        until
    }

    /// A mount of an agent before was given to this one. There may be others still to come, which nobody holds up.
    pub(crate) fn note_adopted(&self) {
        *lock(&self.all_known) = AllKnown::After(Instant::now());
    }

    /// For a mount that no agent has served before. Returns when no other one believes what may change from now on; it may join
    /// as long as it holds what it gets.
    pub(crate) async fn welcome(&self) -> Coming<'_> {
        let promised = {
            let _mounts = lock(&self.mounts);
            self.coming.fetch_add(1, AcqRel);
            self.promised_ms.load(Acquire)
        };
        let coming = Coming(&self.coming);
        let before = lock(&self.all_known).promised_before();
        if !before.is_zero() {
            tokio::time::sleep(before).await;
        }
        // No longer than that, whatever the clock says.
        let left = promised.saturating_sub(self.scope.names.now_ms()).min(LONGEST.as_millis() as u64);
        if left > 0 && !lock(&self.mounts).is_empty() {
            tokio::time::sleep(Duration::from_millis(left + 1)).await;
        }
        coming
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
        assert_eq!((AllKnown::Now.promised_before(), follows.promised_before()), (Duration::ZERO, LONGEST));
        tokio::time::advance(LONGEST).await;
        assert_eq!(follows.promised_before(), Duration::ZERO);
        tokio::time::advance(STRANGERS - LONGEST).await;
        assert!(follows.is_so());
    }
}
