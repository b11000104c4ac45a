//! How many small files are fetched ahead, as a state without I/O: misses in, files owed out. Who fetches them is
//! [`super::siblings`], or a simulation.
//!
//! ```text
//!  resting ──a miss that is worth something──► running ──due: nothing owed, no room──► resting
//!     ▲                                           │
//!     └────────── found: the directory's end ─────┘   (and begins anew)
//! ```

use std::time::{Duration, Instant};

/// Misses in one directory before anything is fetched ahead.
pub(crate) const PATIENCE: u32 = 8;
/// Files that one further miss is worth at most.
const CREDIT_MAX: u32 = 64;
/// A directory that was left alone for this long begins anew.
const FORGOTTEN: Duration = Duration::from_secs(120);

/// Files that a source fetches ahead at once, of the slots for bodies that the node has: a quarter is left to readers, who
/// come first.
pub fn at_once(data_slots: usize) -> usize {
    (data_slots - data_slots / 4).max(1)
}

/// Files that the miss with this number is worth: half as many as were missed so far, and as many once that was twice the
/// patience. So a thousand files that are read in a random order cost some 45 round trips; who reads sixteen of them pays
/// for fifty more, and who reads 32 for 440.
fn worth(misses: u32) -> u32 {
    match misses {
        0..=PATIENCE => 0,
        n if n <= 2 * PATIENCE => n / 2,
        n => n.min(CREDIT_MAX),
    }
}

/// What the readers of one directory have earned.
#[derive(Debug)]
pub struct Ledger {
    pub(crate) misses: u32,
    /// Files still to be fetched ahead.
    pub(crate) owed: u32,
    /// The last name that was looked at, by its inode number.
    after: Option<u64>,
    /// Somebody fetches what is owed.
    pub(crate) running: bool,
    last: Instant,
}

impl Ledger {
    pub fn new(now: Instant) -> Self {
        Self { misses: 0, owed: 0, after: None, running: false, last: now }
    }

    /// A reader had to wait for a file. True: the caller has to begin to fetch what is owed.
    pub fn missed(&mut self, now: Instant) -> bool {
        if self.is_forgotten(now) {
            *self = Self::new(now);
        }
        self.last = now;
        self.misses += 1;
        self.owed += worth(self.misses);
        self.owed > 0 && !std::mem::replace(&mut self.running, self.owed > 0)
    }

    /// How many files to look for, and after which name. None: that was all, whoever fetches ends.
    pub fn due(&mut self, has_room: bool) -> Option<(u32, Option<u64>)> {
        if self.owed == 0 || !has_room {
            (self.running, self.owed) = (false, 0);
            return None;
        }
        Some((self.owed, self.after))
    }

    /// So many of what was due were found, `last` being the last name that was looked at; all of them are fetched now.
    /// False: none is left, whoever fetches ends. What is missed from then on was evicted, or is new.
    pub fn found(&mut self, files: u32, last: Option<u64>, now: Instant) -> bool {
        self.owed -= self.owed.min(files);
        self.after = last;
        if files == 0 {
            *self = Self::new(now);
        }
        files > 0
    }

    /// One of them did not have to be fetched: another is, in its place.
    pub fn was_there(&mut self) {
        self.owed += 1;
    }

    /// One of them could not be fetched: a store that fails is not asked for more than what readers need.
    pub fn failed(&mut self) {
        self.owed = 0;
    }

    pub(crate) fn is_forgotten(&self, now: Instant) -> bool {
        now.duration_since(self.last) > FORGOTTEN && !self.running
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_readers_have_earned_is_forgotten_after_a_pause() {
        let start = Instant::now();
        let mut ledger = Ledger::new(start);
        let mut owed = |misses: u32, at: Instant| {
            let _begun = (0..misses).filter(|_| ledger.missed(at)).count();
            ledger.running = false;
            ledger.owed
        };
        assert_eq!(owed(PATIENCE, start), 0);
        assert!(owed(1, start + FORGOTTEN) > 0, "the pause is not longer yet");
        assert_eq!(owed(PATIENCE, start + 2 * FORGOTTEN + Duration::from_nanos(1)), 0);
    }

    /// Files fetched ahead after each of `misses` in a row.
    fn owed(misses: u32) -> Vec<u32> {
        let now = Instant::now();
        let mut ledger = Ledger::new(now);
        (0..misses)
            .map(|_| {
                ledger.missed(now);
                ledger.owed
            })
            .collect()
    }

    #[test]
    fn a_few_files_of_a_directory_bring_nothing_and_some_more_bring_a_few() {
        let owed = owed(32);
        assert!(owed[..8].iter().all(|&n| n == 0));
        assert!((1..=4).contains(&owed[8]) && owed[15] <= 3 * 16, "{owed:?}");
    }

    #[test]
    fn a_directory_of_a_thousand_is_paid_for_after_a_twentieth_of_it() {
        let owed = owed(100);
        assert!(owed[31] <= 450 && owed[45] >= 900, "{owed:?}");
        assert!(owed.windows(2).all(|pair| pair[1] - pair[0] <= CREDIT_MAX));
    }

    #[test]
    fn one_begins_and_after_a_while_everything_begins_anew() {
        let now = Instant::now();
        let mut ledger = Ledger::new(now);
        let begun: Vec<bool> = (0..10).map(|_| ledger.missed(now)).collect();
        assert_eq!(begun.iter().filter(|&&begins| begins).count(), 1);
        ledger.running = false;
        ledger.missed(now + FORGOTTEN + Duration::from_secs(1));
        assert_eq!((ledger.misses, ledger.owed), (1, 0));
    }

    #[test]
    fn whoever_fetches_ends_without_room_at_the_end_and_when_all_is_paid_and_another_miss_begins_again() {
        let now = Instant::now();
        let begun = || {
            let mut ledger = Ledger::new(now);
            assert_eq!((0..9).filter(|_| ledger.missed(now)).count(), 1);
            ledger
        };
        let mut paid = begun();
        let (owed, after) = paid.due(true).unwrap();
        assert_eq!((owed, after), (4, None));
        assert!(paid.found(3, Some(7), now), "there may be more");
        assert_eq!(paid.due(true), Some((1, Some(7))));
        assert!(paid.found(1, Some(8), now));
        assert_eq!(paid.due(true), None);
        assert!(paid.missed(now), "and goes on from there");
        assert_eq!(paid.due(true), Some((5, Some(8))));
        assert!(paid.found(5, Some(9), now));
        paid.was_there();
        assert_eq!(paid.due(true), Some((1, Some(9))));
        paid.failed();
        assert_eq!(paid.due(true), None);

        let mut full = begun();
        assert_eq!(full.due(false), None);
        assert!(full.missed(now) && full.due(true) == Some((5, None)), "what was owed before is forgiven");

        let mut ended = begun();
        assert!(!ended.found(0, Some(9), now));
        assert_eq!((ended.due(true), ended.missed(now)), (None, false), "it begins anew");
    }
}
