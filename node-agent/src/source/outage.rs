//! Whether a source answers, and what a volume puts up with while it does not.

use cache::meta;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use volume::{Freshness, Parameters};

/// How long a question waits while the source answers nothing before it is taken to be away. Longer than what a store
/// needs on a bad day, shorter than what a person takes for a hang.
const PATIENCE: Duration = Duration::from_secs(5);
/// A source that no question has needed for so long is not probed. The next question begins anew.
const WANTED: Duration = Duration::from_secs(60);

/// What one volume puts up with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tolerance {
    pub(super) ttl: Duration,
    /// Beyond `ttl`.
    pub(super) stale: Duration,
    pub(super) patience: Duration,
}

impl Tolerance {
    /// None: an answer, or an error.
    pub(crate) fn of(parameters: &Parameters) -> Option<Self> {
        match parameters.freshness {
            Freshness::Ttl(ttl) if !parameters.stale_if_error.is_zero() => {
                let patience = PATIENCE.min(parameters.store_timeout);
                Some(Self { ttl, stale: parameters.stale_if_error, patience })
            }
            _ => None,
        }
    }

    /// May what was confirmed at `seen_ms` be used although the source confirms nothing now?
    pub(super) fn covers(&self, seen_ms: u64, now_ms: u64) -> bool {
        let limit = self.ttl.saturating_add(self.stale).as_millis();
        meta::age_ms(seen_ms, now_ms).is_some_and(|age| u128::from(age) < limit)
    }
}

/// When a question was asked: how many answers there had been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked(u64);

/// Whether a source answers.
#[derive(Debug)]
pub(crate) struct Outage {
    born: Instant,
    /// Answers, of any kind.
    answers: AtomicU64,
    /// The last of them: microseconds since `born`.
    answered_us: AtomicU64,
    /// Questions that ended in this node's own queue.
    pub(super) unasked: AtomicU64,
    /// Whether the state has a `since`, or is about to have one: an answer is nearly always one of many, and then
    /// takes no lock.
    away: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    since: Option<SystemTime>,
    wanted: Option<Instant>,
    probed: bool,
}

impl Default for Outage {
    fn default() -> Self {
        Self {
            born: Instant::now(),
            answers: AtomicU64::new(0),
            answered_us: AtomicU64::new(0),
            unasked: AtomicU64::new(0),
            away: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }
}

impl Outage {
    /// True: it was away.
    pub(crate) fn answered(&self) -> bool {
        // Before it is counted: a reader that sees the count sees this time, or a later one.
        self.answered_us.fetch_max(self.born.elapsed().as_micros() as u64, Ordering::Relaxed);
        // Sequentially consistent, here and in `begin`: one of the two sees what the other has written first.
        self.answers.fetch_add(1, Ordering::SeqCst);
        if !self.away.load(Ordering::SeqCst) {
            return false;
        }
        let mut state = self.lock();
        self.away.store(false, Ordering::SeqCst);
        state.since.take().is_some()
    }

    pub(crate) fn asks(&self) -> Asked {
        Asked(self.answers.load(Ordering::SeqCst))
    }

    /// Has the source answered since, whatever it was asked?
    pub(crate) fn has_answered(&self, asked: Asked) -> bool {
        self.asks() != asked
    }

    /// When the last answer came, of those that were counted.
    pub(super) fn last_answer(&self) -> Instant {
        self.born + Duration::from_micros(self.answered_us.load(Ordering::Relaxed))
    }

    /// A question ended without having been asked.
    pub(crate) fn unasked(&self) {
        self.unasked.fetch_add(1, Ordering::AcqRel);
    }

    /// False: it has answered since, or is known to be away.
    pub(super) fn begin(&self, asked: Asked) -> bool {
        let mut state = self.lock();
        if state.since.is_some() {
            return false;
        }
        self.away.store(true, Ordering::SeqCst);
        let begins = !self.has_answered(asked);
        match begins {
            true => state.since = Some(SystemTime::now()),
            false => self.away.store(false, Ordering::SeqCst),
        }
        begins
    }

    /// Since when it gives no answer.
    pub(crate) fn since(&self) -> Option<SystemTime> {
        self.lock().since
    }

    /// A reader needs the source. True: and no probe is under way.
    pub(super) fn want(&self, now: Instant) -> bool {
        let mut state = self.lock();
        state.wanted = Some(now);
        !std::mem::replace(&mut state.probed, true)
    }

    /// Shall it be probed again? If not, the next one that wants it begins anew.
    pub(super) fn probe_again(&self, now: Instant) -> bool {
        let mut state = self.lock();
        let wanted = state.wanted.is_some_and(|at| now.saturating_duration_since(at) < WANTED);
        state.probed = state.since.is_some() && wanted;
        state.probed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_answer_at_the_moment_at_which_an_outage_begins_is_not_lost() {
        for round in 0..5000 {
            let outage = Outage::default();
            let start = std::sync::Barrier::new(2);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    start.wait();
                    outage.begin(Asked(0));
                });
                start.wait();
                outage.answered();
            });
            assert_eq!(outage.since(), None, "round {round}");
            assert!(outage.begin(outage.asks()) && outage.answered(), "round {round}");
        }
    }

    fn parameters(freshness: Freshness, stale: u64) -> Parameters {
        Parameters { freshness, stale_if_error: Duration::from_secs(stale), ..Parameters::default() }
    }

    #[test]
    fn only_volumes_with_a_ttl_go_on_with_what_is_known_last() {
        let ttl = Freshness::Ttl(Duration::from_secs(60));
        assert!(Tolerance::of(&parameters(ttl, 1)).is_some());
        for p in [parameters(ttl, 0), parameters(Freshness::Strict, 9), parameters(Freshness::Static, 9)] {
            assert_eq!(Tolerance::of(&p), None);
        }
        assert_eq!(Tolerance::of(&parameters(ttl, 1)).map(|t| t.patience), Some(PATIENCE));
        let quick = Parameters { store_timeout: Duration::from_secs(2), ..parameters(ttl, 1) };
        assert_eq!(Tolerance::of(&quick).map(|t| t.patience), Some(Duration::from_secs(2)));
    }

    proptest! {
        #[test]
        fn nothing_is_used_beyond_its_ttl_and_the_bound(seen: u64, age in 0u64..10_000_000, ttl in 0u64..5000, stale in 0u64..5000) {
            let seen = seen / 2;
            let tolerance = Tolerance { ttl: Duration::from_secs(ttl), stale: Duration::from_secs(stale), patience: PATIENCE };
            prop_assert_eq!(tolerance.covers(seen, seen + age), age < (ttl + stale) * 1000);
        }
    }

    #[test]
    fn an_answer_that_came_meanwhile_keeps_an_outage_from_beginning_and_ends_one() {
        let outage = Outage::default();
        let before = outage.asks();
        assert!(!outage.answered() && outage.has_answered(before));
        assert!(!outage.begin(before) && outage.since().is_none());
        let after = outage.asks();
        assert!(outage.begin(after) && outage.since().is_some());
        assert!(!outage.begin(after), "it begins once");
        assert!(outage.answered() && outage.since().is_none());
    }

    #[test]
    fn one_probes_for_all_as_long_as_anybody_wants_it() {
        let (outage, now) = (Outage::default(), Instant::now());
        assert!(outage.begin(outage.asks()));
        assert!(outage.want(now) && !outage.want(now));
        assert!(outage.probe_again(now + WANTED / 2));
        assert!(!outage.probe_again(now + WANTED));
        assert!(outage.want(now + WANTED), "the next one begins anew");
        outage.answered();
        assert!(!outage.probe_again(now + WANTED));
    }
}
