//! When to start a successor, and who is to blame: pure decisions over the history of deaths.

use inflight::Blame;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// A worker that got as far as serving may be replaced at once, however often it is killed. One that
/// dies before serving is broken, and so will be its successor: wait longer each time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Immediate deaths that are still taken for bad luck.
const FREE_FAILURES: u32 = 3;
/// Workers that serve and then die of themselves: as many as a few poisonous requests take. After that a crash loop
/// must not take the machine; what is asked meanwhile is served between two crashes, or failed as poisonous.
const FREE_CRASHES: u32 = 40;
const LONGEST_CRASH_PAUSE: Duration = Duration::from_secs(1);
/// After this long without a crash the slate is clean.
const QUIET: Duration = Duration::from_secs(10);

/// How a worker's time ended, as its mount's thread saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Closed,
    Failed(String),
    Hung,
    Stopped,
}

/// A SIGKILL that did not come from the kernel for want of memory, nor from us, says nothing of what was executed.
pub(super) fn blame(end: &End, status: Option<ExitStatus>, oom: bool) -> Blame {
    let killed = status.is_some_and(|s| s.signal() == Some(libc::SIGKILL));
    match end {
        End::Closed | End::Stopped if killed && !oom => Blame::Nobody,
        End::Closed | End::Stopped | End::Failed(_) | End::Hung => Blame::Executing,
    }
}

/// What happened since a worker last served.
#[derive(Clone, Debug, Default)]
pub(super) struct Deaths {
    unserved_since: Option<Instant>,
    failures: u32,
    /// Of workers that served, one soon after the other.
    crashes: u32,
    last_crash: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    StartAfter(Duration),
    /// No worker has served for `healTimeout`: fail the mount loudly.
    GiveUp,
}

impl Deaths {
    /// A worker serves: the slate is clean, but for crashes.
    pub(super) fn serving(&mut self) {
        *self = Self { crashes: self.crashes, last_crash: self.last_crash, ..Self::default() };
    }

    /// A worker is gone, or could not be brought up.
    pub(super) fn died(&mut self, now: Instant, had_served: bool) {
        self.unserved_since.get_or_insert(now);
        self.failures = if had_served { 0 } else { self.failures.saturating_add(1) };
    }

    /// A worker that served is gone, and the agent did not end it.
    pub(super) fn crashed(&mut self, now: Instant) {
        let soon = self.last_crash.is_some_and(|last| now.duration_since(last) < QUIET);
        self.crashes = if soon { self.crashes.saturating_add(1) } else { 1 };
        self.last_crash = Some(now);
    }

    pub(super) fn unserved_since(&self) -> Option<Instant> {
        self.unserved_since
    }

    /// No longer bad luck: the owner of the volume should know.
    pub(super) fn is_stuck(&self) -> bool {
        self.failures >= FREE_FAILURES
    }

    pub(super) fn decide(&self, now: Instant, heal_timeout: Duration) -> Verdict {
        if self.unserved_since.is_some_and(|since| now.duration_since(since) >= heal_timeout) {
            return Verdict::GiveUp;
        }
        let pause = |count: u32, free: u32, longest: Duration| match count.checked_sub(free) {
            None | Some(0) => Duration::ZERO,
            Some(n) => (FIRST_PAUSE * 2u32.pow(n.min(10))).min(longest),
        };
        let failed = pause(self.failures, FREE_FAILURES, LONGEST_PAUSE);
        Verdict::StartAfter(failed.max(pause(self.crashes, FREE_CRASHES, LONGEST_CRASH_PAUSE)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn only_a_worker_that_somebody_else_killed_has_no_request_to_blame() {
        let signal = |number| Some(ExitStatus::from_raw(number));
        let (abort, kill) = (signal(libc::SIGABRT), signal(libc::SIGKILL));
        assert_eq!(blame(&End::Closed, kill, false), Blame::Nobody);
        assert_eq!(blame(&End::Closed, kill, true), Blame::Executing, "for want of memory");
        assert_eq!(blame(&End::Closed, abort, false), Blame::Executing);
        assert_eq!(blame(&End::Closed, signal(256), false), Blame::Executing, "exit status 1");
        assert_eq!(blame(&End::Hung, kill, false), Blame::Executing, "that was us");
        assert_eq!(blame(&End::Closed, None, false), Blame::Executing);
    }

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
    fn a_crash_loop_slows_down_and_is_forgotten_when_it_is_over() {
        let mut deaths = Deaths::default();
        let mut now = Instant::now();
        let mut crash = |deaths: &mut Deaths, after: Duration| {
            now += after;
            deaths.died(now, true);
            deaths.crashed(now);
            let verdict = deaths.decide(now, LIMIT);
            deaths.serving();
            verdict
        };
        let soon = Duration::from_millis(100);
        for _ in 0..FREE_CRASHES {
            assert_eq!(crash(&mut deaths, soon), Verdict::StartAfter(Duration::ZERO));
        }
        assert_eq!(crash(&mut deaths, soon), Verdict::StartAfter(2 * FIRST_PAUSE));
        let mut last = Verdict::GiveUp;
        for _ in 0..20 {
            last = crash(&mut deaths, soon);
        }
        assert_eq!(last, Verdict::StartAfter(LONGEST_CRASH_PAUSE));
        assert_eq!(crash(&mut deaths, QUIET), Verdict::StartAfter(Duration::ZERO));
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
