//! Whether a store answers at all, found out by as few requests as possible.
//!
//! ```text
//!                    5 failures in a row
//!        Closed ─────────────────────────► Open ◄──────────────┐
//!          ▲                                │ pause is over     │ the probe fails: the pause doubles
//!          │                                ▼                   │
//!          │                            HalfOpen ───────────────┤
//!          │ as many at once                │ any answer        │
//!          │ as ever                        ▼                   │
//!          └─────────────────────────── Recovering ─────────────┘
//!                                   2 at once, one more for each answer,
//!                                   and for one that has none for 5 s
//! ```
//!
//! While it is open no request is refused: requests wait, without a slot, as long as their callers may. It only decides
//! who goes first, and how many at a time when the store is back. A probe is a request that a reader wants, so a store
//! without a reader is not probed. Pure: the time and the dice come in.

use std::time::Duration;
use tokio::time::Instant;

/// Requests in a row without an answer. Fewer, and an object that always fails looks like a store that is away.
const FAILURES: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// A store that is back is noticed within this.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A probe that has no answer for so long does not keep the next one waiting: where packets are lost, it never gets
/// one. Nor do those that were let through after it.
const PROBE_MAX: Duration = Duration::from_secs(5);
const FIRST_ALLOWED: u32 = 2;
/// As many at once as this, all answered: it is as before.
const RECOVERED: u32 = 64;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The store said something, be it no.
    Answered,
    /// It did not, or said that it cannot.
    Failed,
    /// Nothing was learned: the caller went away.
    Unknown,
}

/// In which of the breaker's states a request was let through: what it learns counts for that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pass(u32);

#[derive(Debug)]
pub(crate) struct Breaker {
    state: State,
    generation: u32,
}

#[derive(Debug)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant, pause: Duration },
    HalfOpen { since: Instant, pause: Duration },
    Recovering { allowed: u32, under_way: u32, since: Instant, pause: Duration },
}

impl Breaker {
    pub(crate) fn new() -> Self {
        Self { state: State::Closed { failures: 0 }, generation: 0 }
    }

    /// Requests go through as they come.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    /// The store is known not to answer.
    #[cfg(test)]
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.state, State::Open { .. } | State::HalfOpen { .. })
    }

    pub(crate) fn admits(&self, now: Instant) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { until, .. } => now >= until,
            State::HalfOpen { since, .. } => now.saturating_duration_since(since) >= PROBE_MAX,
            State::Recovering { allowed, under_way, since, .. } => {
                under_way < allowed || now.saturating_duration_since(since) >= PROBE_MAX
            }
        }
    }

    /// A request that was admitted begins.
    pub(crate) fn begin(&mut self, now: Instant) -> Pass {
        match &mut self.state {
            State::Closed { .. } => {}
            State::Open { pause, .. } => {
                let pause = *pause;
                self.enter(State::HalfOpen { since: now, pause });
            }
            State::HalfOpen { since, .. } => *since = now,
            // Beyond those allowed it takes the place of one that has had no answer for so long.
            State::Recovering { allowed, under_way, since, .. } => {
                *under_way = (*under_way + 1).min(*allowed);
                *since = now;
            }
        }
        Pass(self.generation)
    }

    /// The request of this pass has ended, or has just been answered. `random`: 0 to 1.
    pub(crate) fn end(&mut self, pass: Pass, verdict: Verdict, now: Instant, random: f64) {
        let of_now = pass.0 == self.generation;
        match (&mut self.state, verdict) {
            (State::Closed { failures }, Verdict::Answered) => *failures = 0,
            // A request that began before an outage that is over says nothing new.
            (State::Closed { failures }, Verdict::Failed) if of_now => {
                *failures += 1;
                if *failures >= FAILURES {
                    self.open(now, FIRST_PAUSE, random);
                }
            }
            // Any answer is one, also to a request that began long ago.
            (State::Open { pause, .. } | State::HalfOpen { pause, .. }, Verdict::Answered) => {
                let pause = *pause;
                self.enter(State::Recovering { allowed: FIRST_ALLOWED, under_way: 0, since: now, pause });
            }
            (State::HalfOpen { pause, .. }, Verdict::Failed) if of_now => {
                let pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
                self.open(now, pause, random);
            }
            (State::HalfOpen { pause, .. }, Verdict::Unknown) if of_now => {
                let pause = *pause;
                self.enter(State::Open { until: now, pause });
            }
            (State::Recovering { allowed, under_way, .. }, Verdict::Answered) if of_now => {
                *under_way = under_way.saturating_sub(1);
                *allowed += 1;
                if *allowed >= RECOVERED {
                    self.state = State::Closed { failures: 0 };
                }
            }
            (State::Recovering { pause, .. }, Verdict::Failed) if of_now => {
                let pause = *pause;
                self.open(now, pause, random);
            }
            (State::Recovering { under_way, .. }, Verdict::Unknown) if of_now => {
                *under_way = under_way.saturating_sub(1);
            }
            _ => {}
        }
    }

    /// With jitter, or the breakers of all nodes would ask at once.
    fn open(&mut self, now: Instant, pause: Duration, random: f64) {
        let until = now + pause.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0);
        self.enter(State::Open { until, pause });
    }

    fn enter(&mut self, state: State) {
        self.state = state;
        self.generation = self.generation.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn open_at(now: Instant) -> Breaker {
        let mut breaker = Breaker::new();
        for _ in 0..FAILURES {
            assert!(breaker.admits(now));
            let pass = breaker.begin(now);
            breaker.end(pass, Verdict::Failed, now, 1.0);
        }
        assert!(breaker.is_open());
        breaker
    }

    #[test]
    fn answers_in_between_keep_it_closed() {
        let now = Instant::now();
        let mut breaker = Breaker::new();
        for k in 0..100 {
            let pass = breaker.begin(now);
            let verdict = if k % FAILURES == 0 { Verdict::Answered } else { Verdict::Failed };
            breaker.end(pass, verdict, now, 1.0);
            assert!(breaker.is_closed());
        }
    }

    #[test]
    fn one_probe_after_a_pause_that_grows_to_seconds() {
        let mut now = Instant::now();
        let mut breaker = open_at(now);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let before = now;
            while !breaker.admits(now) {
                now += Duration::from_millis(10);
            }
            pauses.push(now - before);
            let pass = breaker.begin(now);
            assert!(!breaker.admits(now), "two probes at once");
            breaker.end(pass, Verdict::Failed, now, 1.0);
        }
        assert_eq!(pauses[0], FIRST_PAUSE);
        assert!(pauses.is_sorted() && pauses[7] == LONGEST_PAUSE, "{pauses:?}");
    }

    #[test]
    fn a_probe_that_hangs_is_followed_by_another_and_one_that_was_dropped_at_once() {
        let now = Instant::now();
        let mut breaker = open_at(now);
        let hung = breaker.begin(now + FIRST_PAUSE);
        let later = now + FIRST_PAUSE + PROBE_MAX;
        assert!(breaker.admits(later));
        let second = breaker.begin(later);
        assert!(!breaker.admits(later));
        breaker.end(second, Verdict::Unknown, later, 1.0);
        assert!(breaker.admits(later));
        // The first one's answer, when it comes after all, is an answer.
        breaker.end(hung, Verdict::Answered, later, 1.0);
        assert!(!breaker.is_open());
    }

    #[test]
    fn after_an_outage_requests_are_let_through_in_growing_numbers() {
        let now = Instant::now();
        let mut breaker = open_at(now);
        let probe = breaker.begin(now + FIRST_PAUSE);
        breaker.end(probe, Verdict::Answered, now, 1.0);
        let mut rounds = Vec::new();
        while !breaker.is_closed() {
            let mut round = Vec::new();
            while breaker.admits(now) && round.len() < 1000 {
                round.push(breaker.begin(now));
            }
            rounds.push(round.len());
            round.into_iter().for_each(|pass| breaker.end(pass, Verdict::Answered, now, 1.0));
        }
        assert_eq!(rounds, [2, 4, 8, 16, 32]);
    }

    #[test]
    fn requests_that_hang_after_an_outage_do_not_keep_all_others_waiting() {
        let now = Instant::now();
        let mut breaker = open_at(now);
        let probe = breaker.begin(now + FIRST_PAUSE);
        breaker.end(probe, Verdict::Answered, now, 1.0);
        let hung = [breaker.begin(now), breaker.begin(now)];
        assert!(!breaker.admits(now + PROBE_MAX / 2));
        let later = now + PROBE_MAX;
        assert!(breaker.admits(later), "two that hang keep all others out");
        let next = breaker.begin(later);
        assert!(!breaker.admits(later), "one more, not as many as like");
        // Its answer counts as any other, and so do theirs, should they come after all.
        breaker.end(next, Verdict::Answered, later, 1.0);
        assert!(breaker.admits(later));
        hung.into_iter().for_each(|pass| breaker.end(pass, Verdict::Answered, later, 1.0));
        let round = std::iter::from_fn(|| breaker.admits(later).then(|| breaker.begin(later)));
        assert_eq!(round.take(1000).count(), 5);
    }

    #[test]
    fn the_failures_of_those_who_were_under_way_neither_lengthen_nor_renew_an_outage() {
        let now = Instant::now();
        let mut breaker = Breaker::new();
        let passes: Vec<_> = (0..60).map(|_| breaker.begin(now)).collect();
        let (late, early) = passes.split_at(20);
        early.iter().for_each(|pass| breaker.end(*pass, Verdict::Failed, now, 1.0));
        assert!(breaker.admits(now + FIRST_PAUSE));
        let probe = breaker.begin(now + FIRST_PAUSE);
        breaker.end(probe, Verdict::Answered, now, 1.0);
        late.iter().for_each(|pass| breaker.end(*pass, Verdict::Failed, now, 1.0));
        assert!(!breaker.is_open());
    }

    proptest! {
        /// Whatever happened: after the longest pause one request is let through, and an answer reopens the way.
        #[test]
        fn it_never_stays_shut(
            events in prop::collection::vec((0u64..3000, 0usize..4, 0usize..8), 0..200),
            hanging in 0usize..8,
        ) {
            let mut now = Instant::now();
            let mut breaker = Breaker::new();
            let mut under_way = Vec::new();
            for (pause, what, which) in events {
                now += Duration::from_millis(pause);
                match what {
                    0 if breaker.admits(now) => under_way.push(breaker.begin(now)),
                    1..=3 if !under_way.is_empty() => {
                        let pass = under_way.swap_remove(which % under_way.len());
                        let verdict = [Verdict::Answered, Verdict::Failed, Verdict::Unknown][what - 1];
                        breaker.end(pass, verdict, now, 0.5);
                    }
                    _ => {}
                }
            }
            // Some of those under way end, some hang for ever: there is a way all the same.
            for pass in under_way.split_off(hanging.min(under_way.len())) {
                breaker.end(pass, Verdict::Failed, now, 1.0);
            }
            now += LONGEST_PAUSE.max(PROBE_MAX);
            prop_assert!(breaker.admits(now));
            let pass = breaker.begin(now);
            breaker.end(pass, Verdict::Answered, now, 1.0);
            prop_assert!(!breaker.is_open() && breaker.admits(now));
        }
    }
}
