//! Virtual time: what happens next, and when. Nothing waits; the time of a history is what its events say.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Events in the order of their times; those of one time in the order in which they were added.
#[derive(Debug)]
pub struct Queue<E> {
    /// Any instant: machines compute with differences only.
    base: Instant,
    now: Duration,
    sequence: u64,
    events: BTreeMap<(Duration, u64), E>,
}

impl<E> Queue<E> {
    pub fn new() -> Self {
        Self { base: Instant::now(), now: Duration::ZERO, sequence: 0, events: BTreeMap::new() }
    }

    /// Since the beginning of the history.
    pub fn elapsed(&self) -> Duration {
        self.now
    }

    /// The time that a machine is given.
    pub fn now(&self) -> Instant {
        self.base + self.now
    }

    pub fn after(&mut self, delay: Duration, event: E) {
        self.sequence += 1;
        self.events.insert((self.now + delay, self.sequence), event);
    }

    /// At an instant that a machine has named; one that has passed is now.
    pub fn at(&mut self, instant: Instant, event: E) {
        let delay = instant.saturating_duration_since(self.now());
        self.after(delay, event);
    }

    /// The next event, to whose time the clock is set.
    pub fn pop(&mut self) -> Option<E> {
        let ((time, _), event) = self.events.pop_first()?;
        self.now = time;
        Some(event)
    }
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_the_order_of_their_times_and_then_of_their_making() {
        let mut queue = Queue::new();
        let begun = queue.now();
        queue.after(Duration::from_secs(2), "late");
        queue.after(Duration::from_secs(1), "first");
        queue.after(Duration::from_secs(1), "second");
        queue.at(begun, "now");
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, ["now", "first", "second", "late"]);
        assert_eq!((queue.elapsed(), queue.now() - begun), (Duration::from_secs(2), Duration::from_secs(2)));
    }
}
