//! How many retries a store is sent: a share of what it answers, and a few a second whatever it answers.
//!
//! A thousand requests that wait for one store would otherwise return to it a thousand times each, and a store that is
//! about to recover would be kept down by those that wait for it. The numbers are those of finagle and linkerd. Theirs
//! (and tower's `TpsBudget`) fail a retry that is not covered; ours waits for its turn, for a reader's call may wait
//! for `storeTimeout`, so the budget must tell when.

use std::time::Duration;
use tokio::time::Instant;

/// Retries for one answer.
const PER_ANSWER: f64 = 0.2;
/// Retries a second that need no answers.
const PER_SECOND: f64 = 10.0;
/// What can be saved up: ten seconds' worth.
const MOST: f64 = 100.0;

/// A token bucket; a token is a retry.
#[derive(Debug)]
pub(crate) struct Budget {
    tokens: f64,
    filled: Instant,
}

impl Budget {
    pub(crate) fn new(now: Instant) -> Self {
        Self { tokens: MOST, filled: now }
    }

    /// The store gave an answer.
    pub(crate) fn deposit(&mut self) {
        self.tokens = (self.tokens + PER_ANSWER).min(MOST);
    }

    /// May a request be tried again now?
    pub(crate) fn covers(&mut self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.filled).min(Duration::from_secs(3600));
        self.tokens = (self.tokens + since.as_secs_f64() * PER_SECOND).min(MOST);
        self.filled = self.filled.max(now);
        self.tokens >= 1.0
    }

    /// A request is tried again.
    pub(crate) fn withdraw(&mut self) {
        self.tokens = (self.tokens - 1.0).max(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_store_that_answers_nothing_is_asked_again_ten_times_a_second() {
        let start = Instant::now();
        let mut budget = Budget::new(start);
        let mut retries_in = |from: u64, to: u64| {
            let mut made = 0;
            for ms in from..to {
                while budget.covers(start + Duration::from_millis(ms)) {
                    budget.withdraw();
                    made += 1;
                }
            }
            made
        };
        let first = retries_in(0, 1000);
        assert!((100..=110).contains(&first), "{first}");
        let later = retries_in(1000, 11_000);
        assert!((99..=101).contains(&later), "{later}");
    }

    proptest! {
        /// Over any time: no more than what was saved up, what the time gives, and a fifth of the answers.
        #[test]
        fn retries_never_exceed_the_budget(steps in prop::collection::vec((0u64..2000, 0u32..20, 0u32..200), 1..60)) {
            let start = Instant::now();
            let mut budget = Budget::new(start);
            let (mut ms, mut answers, mut retries) = (0, 0, 0);
            for (pause, answered, wanted) in steps {
                ms += pause;
                (0..answered).for_each(|_| budget.deposit());
                answers += answered;
                for _ in 0..wanted {
                    if budget.covers(start + Duration::from_millis(ms)) {
                        budget.withdraw();
                        retries += 1;
                    }
                }
                let most = MOST + ms as f64 / 1000.0 * PER_SECOND + f64::from(answers) * PER_ANSWER;
                prop_assert!(f64::from(retries) <= most + 1e-6, "{retries} retries, {most}");
            }
        }
    }
}
