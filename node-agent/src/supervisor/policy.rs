//! When to start a successor: pure decisions over the history of deaths.

use std::time::{Duration, Instant};

/// A worker that got as far as serving may be replaced at once, however often: whoever kills it, kills it. One that
/// dies before serving is broken, and so will be its successor: wait longer each time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Immediate deaths that are still taken for bad luck.
const FREE_FAILURES: u32 = 3;

/// What happened since somebody last served.
#[derive(Clone, Debug, Default)]
pub(super) struct Deaths {
    unserved_since: Option<Instant>,
    failures: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    StartAfter(Duration),
    /// Nobody has served for `healTimeout`: fail the mount loudly.
    GiveUp,
}

impl Deaths {
    /// A worker serves: the slate is clean.
    pub(super) fn serving(&mut self) {
        *self = Self::default();
    }

    /// A worker is gone, or could not be brought up.
    pub(super) fn died(&mut self, now: Instant, had_served: bool) {
        self.unserved_since.get_or_insert(now);
        self.failures = if had_served { 0 } else { self.failures.saturating_add(1) };
    }

    pub(super) fn unserved_since(&self) -> Option<Instant> {
        self.unserved_since
    }

    /// No longer bad luck: whoever waits should know.
    pub(super) fn is_stuck(&self) -> bool {
        self.failures >= FREE_FAILURES
    }

    pub(super) fn decide(&self, now: Instant, heal_timeout: Duration) -> Verdict {
        if self.unserved_since.is_some_and(|since| now.duration_since(since) >= heal_timeout) {
            return Verdict::GiveUp;
        }
        match self.failures.checked_sub(FREE_FAILURES) {
            None | Some(0) => Verdict::StartAfter(Duration::ZERO),
            Some(n) => Verdict::StartAfter((FIRST_PAUSE * 2u32.pow(n.min(10))).min(LONGEST_PAUSE)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_worker_that_served_is_replaced_at_once_however_often_it_dies() {
        let mut deaths = Deaths::default();
        let now = Instant::now();
        for _ in 0..1000 {
            deaths.died(now, true);
            assert_eq!(deaths.decide(now, LIMIT), Verdict::StartAfter(Duration::ZERO));
            assert!(!deaths.is_stuck());
            deaths.serving();
        }
    }

    #[test]
    fn one_that_never_serves_is_tried_ever_more_slowly_and_given_up_in_the_end() {
        let mut deaths = Deaths::default();
        let start = Instant::now();
        let mut last = Duration::ZERO;
        for n in 0..20 {
            deaths.died(start, false);
            let Verdict::StartAfter(pause) = deaths.decide(start, LIMIT) else { panic!("gave up at {n}") };
            assert!(pause >= last && pause <= LONGEST_PAUSE);
            last = pause;
        }
        assert_eq!(last, LONGEST_PAUSE);
        assert!(deaths.is_stuck());
        assert_eq!(deaths.decide(start + LIMIT, LIMIT), Verdict::GiveUp);
        deaths.serving();
        assert_eq!(deaths.decide(start + LIMIT, LIMIT), Verdict::StartAfter(Duration::ZERO));
    }
}
