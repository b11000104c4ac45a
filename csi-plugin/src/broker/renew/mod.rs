//! Mounts whose connection has ended are made anew, once there is an agent: in their own place and in every container
//! that has them. What was open before stays dead; paths work again.
//!
//! ```text
//!  an agent has come ──► look: what is there to do at which target? ──► a thread for each: mount anew, replace
//!  or a mount ended        ▲                                   (see `look`)    │                    (see `mount`)
//!                          └── again, after a pause of its own ◄───────────────┘ failed, or: a container may have
//!                                                                                started meanwhile
//! ```
//!
//! A mount is dead if the kernel says so; one that a living agent is about to show to a new broker is not. What fails
//! is tried again, ever more slowly, and whoever waits for a store that does not answer holds up nobody else. Here is
//! when what is done.

mod look;
mod mount;
mod wanted;

pub(super) use look::candidates;

use super::Broker;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use wanted::Wanted;

/// Pauses before the tries at one target since something has changed there. Containers that started while mounts were
/// replaced are found by the later ones.
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
/// Targets at which something is begun at the same time: each costs the agent a worker, and us a process.
const BUSY_MAX: usize = 8;
/// Whoever takes longer waits for a store, mostly, and does not count.
const BUSY_FOR: Duration = Duration::from_millis(250);
/// But each is a thread. More wait until one of them is done.
const THREADS_MAX: usize = 128;

#[derive(Debug, Default)]
pub(super) struct Renewals {
    schedule: Mutex<Schedule>,
    changed: Condvar,
    /// Why the mount of a target is not made anew, as it was said last: so that it is said once.
    told: Mutex<BTreeMap<PathBuf, String>>,
    wanted: Wanted,
}

#[derive(Debug, Default)]
struct Schedule {
    /// The next look.
    due: Option<Instant>,
    /// Looks in a row at which nothing could be seen.
    failed: usize,
    over: bool,
    work: BTreeMap<PathBuf, Work>,
}

/// What is to be done at one target.
#[derive(Debug)]
struct Work {
    /// Somebody is at it, since then.
    begun: Option<Instant>,
    /// How often it was tried since something has changed there.
    tries: usize,
    /// Not before.
    due: Instant,
    /// Something has changed while somebody is at it.
    changed: bool,
}

/// How long until the next try.
fn pause(tries: usize) -> Duration {
    PAUSES.get(tries).copied().unwrap_or(PAUSE_MAX)
}

/// Is this the last try to find containers that have started meanwhile?
fn is_last(tries: usize) -> bool {
    tries + 1 >= PAUSES.len()
}

impl Work {
    fn new(now: Instant) -> Self {
        Self { begun: None, tries: 0, due: now, changed: false }
    }

    fn change(&mut self, now: Instant) {
        match self.begun {
            Some(_) => self.changed = true,
            None => *self = Self::new(now),
        }
    }
}

impl Schedule {
    fn look_at(&mut self, due: Instant) {
        self.due = Some(self.due.map_or(due, |earlier| earlier.min(due)));
    }

    /// There is something to do at these targets, the first of them first. Which of them are begun, and how often were
    /// they tried?
    fn begin(&mut self, targets: &[PathBuf], now: Instant) -> Vec<(PathBuf, usize)> {
        self.work.retain(|path, work| work.begun.is_some() || work.due > now || targets.contains(path));
        let busy = |work: &&Work| work.begun.is_some_and(|begun| now < begun + BUSY_FOR);
        let mut busy = self.work.values().filter(busy).count();
        let mut threads = self.work.values().filter(|work| work.begun.is_some()).count();
        let mut begun = Vec::new();
        for path in targets {
            let work = self.work.entry(path.clone()).or_insert_with(|| Work::new(now));
            if work.begun.is_some() || work.due > now {
                continue;
            }
            if busy >= BUSY_MAX || threads >= THREADS_MAX {
                self.look_at(now + BUSY_FOR);
                break;
            }
            work.begun = Some(now);
            (busy, threads) = (busy + 1, threads + 1);
            begun.push((path.clone(), work.tries));
        }
        let later = self.work.values().filter(|work| work.begun.is_none() && work.due > now);
        if let Some(next) = later.map(|work| work.due).min() {
            self.look_at(next);
        }
        begun
    }

    fn finish(&mut self, path: &Path, done: bool, now: Instant) {
        let Some(work) = self.work.remove(path) else { return };
        let tries = work.tries + 1;
        let again = match done {
            _ if work.changed => Work::new(now),
            true => return,
            false => Work { tries, due: now + pause(tries), ..Work::new(now) },
        };
        self.look_at(again.due);
        self.work.insert(path.to_owned(), again);
    }
}

impl Renewals {
    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something may have changed, and nobody knows where: look now.
    pub(super) fn wake(&self) {
        self.schedule().look_at(Instant::now());
        self.changed.notify_all();
    }

    /// Something has changed at this target: look now, and some times after that.
    pub(super) fn wake_for(&self, target: &Path) {
        let now = Instant::now();
        let mut schedule = self.schedule();
        if let Some(work) = schedule.work.get_mut(target) {
            work.change(now);
        }
        schedule.look_at(now);
        self.changed.notify_all();
    }

    /// As [`Self::wake_for`], for all of them: another agent is here.
    pub(super) fn wake_for_all(&self) {
        let now = Instant::now();
        let mut schedule = self.schedule();
        schedule.work.values_mut().for_each(|work| work.change(now));
        schedule.look_at(now);
        self.changed.notify_all();
    }

    pub(super) fn end(&self) {
        self.schedule().over = true;
        self.changed.notify_all();
    }

    /// Waits; is a look due?
    fn wait(&self) -> bool {
        let mut schedule = self.schedule();
        let left = schedule.due.map_or(IDLE, |due| due.saturating_duration_since(Instant::now()));
        if !left.is_zero() && !schedule.over {
            let wait = left.min(IDLE);
            schedule = self.changed.wait_timeout(schedule, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        let is_due = schedule.due.is_some_and(|due| due <= Instant::now());
        schedule.due.take_if(|_| is_due).is_some()
    }

    /// After a look, at which something could be seen or not.
    fn looked(&self, seen: bool) {
        let mut schedule = self.schedule();
        schedule.failed = if seen { 0 } else { schedule.failed + 1 };
        if !seen {
            let due = Instant::now() + pause(schedule.failed);
            schedule.look_at(due);
        }
    }

    fn begin(&self, targets: &[PathBuf]) -> Vec<(PathBuf, usize)> {
        self.schedule().begin(targets, Instant::now())
    }

    /// Not done: it is tried again.
    fn finish(&self, target: &Path, done: bool) {
        self.schedule().finish(target, done, Instant::now());
        self.changed.notify_all();
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

    /// Those that have failed before may fail again: they come last.
    fn order(&self, targets: &mut [PathBuf]) {
        // Locked until the end: an order that changes while it is made is a panic.
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        targets.sort_by_key(|path| told.contains_key(path));
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
        if due {
            renewals.looked(broker.look_for_dead());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(PathBuf::from).collect()
    }

    fn begun(schedule: &mut Schedule, names: &[&str], now: Instant) -> Vec<usize> {
        schedule.begin(&paths(names), now).into_iter().map(|(_, tries)| tries).collect()
    }

    #[test]
    fn tries_become_rarer_and_end_when_nothing_is_left_to_do() {
        let (mut schedule, mut now) = (Schedule::default(), Instant::now());
        for tries in 0..9 {
            assert_eq!(begun(&mut schedule, &["a"], now), [tries]);
            assert!(begun(&mut schedule, &["a"], now).is_empty(), "one at a time");
            schedule.finish(Path::new("a"), false, now);
            assert_eq!(schedule.due.take(), Some(now + pause(tries + 1)));
            assert!(begun(&mut schedule, &["a"], now).is_empty(), "not before its time");
            assert_eq!(schedule.due.take(), Some(now + pause(tries + 1)), "and then");
            now += pause(tries + 1);
        }
        begun(&mut schedule, &["a"], now);
        schedule.finish(Path::new("a"), true, now);
        assert!(schedule.due.is_none() && schedule.work.is_empty());
        let pauses: Vec<Duration> = (0..9).map(pause).collect();
        assert!(pauses.is_sorted() && pauses[8] == PAUSE_MAX, "{pauses:?}");
        assert!(!is_last(0) && is_last(PAUSES.len() - 1) && is_last(100));
    }

    #[test]
    fn what_changes_is_tried_at_once_and_nothing_else_is() {
        let (renewals, now) = (Renewals::default(), Instant::now());
        let failed = |path: &str| {
            let mut schedule = renewals.schedule();
            assert_eq!(begun(&mut schedule, &[path], now), [0]);
            schedule.finish(Path::new(path), false, now);
            schedule.due = None;
        };
        failed("a");
        failed("b");
        renewals.wake_for(Path::new("a"));
        assert!(renewals.wait(), "a look is due");
        assert_eq!(renewals.begin(&paths(&["b", "a"])), [(PathBuf::from("a"), 0)]);
        // And if it changes while somebody is at it, once more after that.
        renewals.wake_for_all();
        renewals.finish(Path::new("a"), true);
        assert!(renewals.wait());
        assert_eq!(renewals.begin(&paths(&["a", "b"])), [(PathBuf::from("a"), 0), (PathBuf::from("b"), 0)]);
    }

    #[test]
    fn who_waits_long_holds_up_nobody_and_there_are_not_more_threads_than_allowed() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let names: Vec<PathBuf> = (0..1000).map(|n| PathBuf::from(format!("{n:04}"))).collect();
        let mut now = start;
        for round in 0..THREADS_MAX / BUSY_MAX {
            let begun: Vec<PathBuf> = schedule.begin(&names, now).into_iter().map(|(path, _)| path).collect();
            assert_eq!(begun, names[round * BUSY_MAX..(round + 1) * BUSY_MAX]);
            assert!(schedule.begin(&names, now).is_empty());
            assert_eq!(schedule.due.take(), Some(now + BUSY_FOR));
            now += BUSY_FOR;
        }
        assert!(schedule.begin(&names, now).is_empty());
        assert_eq!(schedule.due.take(), Some(now + BUSY_FOR));
        schedule.finish(&names[0], true, now);
        assert_eq!(schedule.begin(&names[1..], now).len(), 1);
    }

    #[test]
    fn the_same_is_told_once() {
        let (renewals, at) = (Renewals::default(), Path::new("/t"));
        let told: Vec<bool> = ["a", "a", "b", "a"].map(|what| renewals.tell(at, what)).into();
        assert_eq!(told, [true, false, true, true]);
        renewals.all_told(at);
        assert!(renewals.tell(at, "a"));
    }

    #[test]
    fn targets_are_put_in_order_while_others_say_what_has_failed() {
        let renewals = Renewals::default();
        let all: Vec<PathBuf> = (0..60).map(|n| PathBuf::from(format!("/pods/{n}"))).collect();
        std::thread::scope(|scope| {
            let sorting = scope.spawn(|| {
                for _ in 0..5_000 {
                    renewals.order(&mut all.clone());
                }
            });
            while !sorting.is_finished() {
                all.iter().for_each(|path| _ = renewals.tell(path, "no answer"));
                all.iter().for_each(|path| renewals.all_told(path));
            }
        });
        renewals.tell(&all[0], "no answer");
        let mut ordered = all.clone();
        renewals.order(&mut ordered);
        assert_eq!((&ordered[0], ordered.last()), (&all[1], all.first()));
    }
}
