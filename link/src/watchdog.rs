//! How long a counter that should move has stood still, as far as its watcher could see it: a watcher that did not run
//! (a suspended machine, a stopped process, no processor) must not blame the watched process.

use std::time::{Duration, Instant};

/// A counter that another process raises, looked at now and then.
#[derive(Debug)]
pub struct Watchdog {
    value: u64,
    still: Duration,
    looked: Instant,
    longest_gap: Duration,
}

impl Watchdog {
    /// `every`: how often the watcher means to look. What a longer gap hides counts for two looks.
    pub fn new(value: u64, every: Duration, now: Instant) -> Self {
        Self { value, still: Duration::ZERO, looked: now, longest_gap: 2 * every }
    }

    /// How long the value has been what it is.
    pub fn look(&mut self, value: u64, now: Instant) -> Duration {
        let gap = now.saturating_duration_since(self.looked).min(self.longest_gap);
        self.looked = now;
        if self.value == value {
            self.still += gap;
        } else {
            self.value = value;
            self.still = Duration::ZERO;
        }
        self.still
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_does_not_move_is_seen_to_stand_still() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(7, SECOND, start);
        for n in 1..20 {
            assert_eq!(watchdog.look(7, start + n * SECOND), n * SECOND);
        }
        assert_eq!(watchdog.look(8, start + 20 * SECOND), Duration::ZERO);
        assert_eq!(watchdog.look(8, start + 21 * SECOND), SECOND);
    }

    #[test]
    fn a_watcher_that_did_not_run_blames_nobody() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(7, SECOND, start);
        assert_eq!(watchdog.look(7, start + 3600 * SECOND), 2 * SECOND);
        assert_eq!(watchdog.look(8, start + 7200 * SECOND), Duration::ZERO);
    }
}
