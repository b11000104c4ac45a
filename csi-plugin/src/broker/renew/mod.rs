//! Mounts whose connection has ended are made anew, once there is an agent: in their own place and in every container
//! that has them. What was open before stays dead; paths work again.
//!
//! ```text
//!  an agent has come ──► look: which mounts of ours are dead? ──► mount anew, replace ──► look again, later:
//!  or gave a mount back                                            (see `mount`)           a container may have
//!                                                                                          started meanwhile
//! ```
//!
//! A mount is dead if the kernel says so; one that a living agent is about to show to a new broker is not. What fails
//! is tried again, ever more slowly. Here is who looks when.

mod look;
mod mount;

pub(super) use look::candidates;

use super::Broker;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Pauses before the looks that follow a wake-up. Containers that started while mounts were replaced are found by
/// the later ones.
const PAUSES: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(500),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(15),
];
/// And after them, as long as something has failed.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// How long before the watcher sees whether its broker is still there.
const IDLE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct Renewals {
    schedule: Mutex<Schedule>,
    changed: Condvar,
    /// What was said last about a target, so that it is said once.
    told: Mutex<BTreeMap<PathBuf, String>>,
}

#[derive(Debug, Default)]
struct Schedule {
    /// Looks since the last wake-up.
    looks: usize,
    due: Option<Instant>,
    over: bool,
}

/// How long until the next look, if there was something to do in the last one.
fn pause(looks: usize) -> Duration {
    PAUSES.get(looks).copied().unwrap_or(PAUSE_MAX)
}

/// Is this the last look for containers that have started meanwhile?
fn is_last(look: usize) -> bool {
    look + 1 >= PAUSES.len()
}

impl Renewals {
    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something has changed: look now, and some times after that.
    pub(super) fn wake(&self) {
        let mut schedule = self.schedule();
        schedule.looks = 0;
        schedule.due = Some(Instant::now());
        self.changed.notify_all();
    }

    pub(super) fn end(&self) {
        self.schedule().over = true;
        self.changed.notify_all();
    }

    /// Waits; which look is due? None: none yet.
    fn wait(&self) -> Option<usize> {
        let mut schedule = self.schedule();
        let left = |s: &Schedule| s.due.map_or(IDLE, |due| due.saturating_duration_since(Instant::now()));
        let wait = left(&schedule).min(IDLE);
        if !wait.is_zero() && !schedule.over {
            schedule = self.changed.wait_timeout(schedule, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        let is_due = schedule.due.is_some_and(|due| due <= Instant::now());
        is_due.then(|| {
            schedule.due = None;
            schedule.looks
        })
    }

    /// After a look: another one, unless somebody has asked for it meanwhile.
    fn plan(&self, look: usize, unfinished: bool) {
        let mut schedule = self.schedule();
        if schedule.due.is_none() && unfinished {
            schedule.looks = look + 1;
            schedule.due = Some(Instant::now() + pause(schedule.looks));
        }
    }

    fn is_over(&self) -> bool {
        self.schedule().over
    }

    /// True if this is news.
    fn tell(&self, target: &Path, what: &str) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.insert(target.to_owned(), what.to_owned()).is_none_or(|before| before != what)
    }

    /// Why a target's mount is not made anew, if that was said.
    pub(super) fn told_of(&self, target: &Path) -> Option<String> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).get(target).cloned()
    }

    /// It is well, or gone.
    pub(super) fn all_told(&self, target: &Path) {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).remove(target);
    }
}

/// Runs until the broker is dropped or stopped.
pub(super) fn watch(broker: &Weak<Broker>, renewals: &Arc<Renewals>) {
    while !renewals.is_over() {
        let due = renewals.wait();
        let Some(broker) = broker.upgrade() else { return };
        if let Some(look) = due {
            let unfinished = broker.look_for_dead(look);
            renewals.plan(look, unfinished);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_become_rarer_and_end_when_nothing_is_left_to_do() {
        let renewals = Renewals::default();
        renewals.wake();
        assert_eq!(renewals.wait(), Some(0));
        renewals.plan(0, true);
        assert!(renewals.schedule().due.is_some_and(|due| due > Instant::now()));
        renewals.wake();
        assert_eq!(renewals.wait(), Some(0), "whoever wakes begins anew");
        renewals.plan(0, false);
        assert_eq!(renewals.schedule().due, None);
        let pauses: Vec<Duration> = (0..9).map(pause).collect();
        assert!(pauses.is_sorted() && pauses[8] == PAUSE_MAX, "{pauses:?}");
        assert!(!is_last(0) && is_last(PAUSES.len() - 1) && is_last(100));
    }

    #[test]
    fn the_same_is_told_once() {
        let (renewals, at) = (Renewals::default(), Path::new("/t"));
        let told: Vec<bool> = ["a", "a", "b", "a"].map(|what| renewals.tell(at, what)).into();
        assert_eq!(told, [true, false, true, true]);
        renewals.all_told(at);
        assert!(renewals.tell(at, "a"));
    }
}
