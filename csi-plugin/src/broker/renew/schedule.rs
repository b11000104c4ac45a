//! When what is done: at which targets something is begun now, and when it is tried again.

use super::wanted::Wanted;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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
/// A renewal that takes longer mostly waits for a store, and does not count.
const BUSY_FOR: Duration = Duration::from_millis(250);
/// But each is a thread. More wait until one of them is done.
const THREADS_MAX: usize = 128;

#[derive(Debug, Default)]
pub(in crate::broker) struct Renewals {
    schedule: Mutex<Schedule>,
    changed: Condvar,
    /// Why the mount of a target is not made anew, as it was said last: so that it is said once.
    reasons: Mutex<BTreeMap<PathBuf, String>>,
    pub(in crate::broker) wanted: Wanted,
}

/// No clock, no thread: what is begun when, and what is tried again.
#[derive(Debug, Default)]
pub struct Schedule {
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
    /// A renewal is under way, since then.
    begun: Option<Instant>,
    /// How often it was tried since something has changed there.
    tries: usize,
    /// Not before.
    due: Instant,
    /// Something has changed while a renewal is under way.
    changed: bool,
}

/// How long until the next try.
fn pause(tries: usize) -> Duration {
    PAUSES.get(tries).copied().unwrap_or(PAUSE_MAX)
}

/// Is this the last try to find containers that have started meanwhile?
pub(super) fn is_last(tries: usize) -> bool {
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

    /// Something has changed at this target: look now, and some times after that.
    pub fn wake_for(&mut self, target: &Path, now: Instant) {
        if let Some(work) = self.work.get_mut(target) {
            work.change(now);
        }
        self.look_at(now);
    }

    /// As [`Self::wake_for`], for all of them: another agent is here.
    pub fn wake_for_all(&mut self, now: Instant) {
        self.work.values_mut().for_each(|work| work.change(now));
        self.look_at(now);
    }

    /// Is a look due? It is none any more.
    pub fn take_due(&mut self, now: Instant) -> bool {
        let is_due = self.due.is_some_and(|due| due <= now);
        self.due.take_if(|_| is_due).is_some()
    }

    /// A look was taken, at which something could be seen or not.
    pub fn looked(&mut self, seen: bool, now: Instant) {
        self.failed = if seen { 0 } else { self.failed + 1 };
        if !seen {
            self.look_at(now + pause(self.failed));
        }
    }

    /// There is something to do at these targets, the first of them first. Which of them are begun, and how often were
    /// they tried?
    pub fn begin(&mut self, targets: &[PathBuf], now: Instant) -> Vec<(PathBuf, usize)> {
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

    /// Not done: it is tried again.
    pub fn finish(&mut self, path: &Path, done: bool, now: Instant) {
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

    /// Something may have changed at an unknown target: look now.
    pub(in crate::broker) fn wake(&self) {
        self.schedule().look_at(Instant::now());
        self.changed.notify_all();
    }

    /// Something has changed at this target: look now, and some times after that.
    pub(in crate::broker) fn wake_for(&self, target: &Path) {
        self.schedule().wake_for(target, Instant::now());
        self.changed.notify_all();
    }

    /// As [`Self::wake_for`], for all of them: another agent is here.
    pub(in crate::broker) fn wake_for_all(&self) {
        self.schedule().wake_for_all(Instant::now());
        self.changed.notify_all();
    }

    pub(in crate::broker) fn end(&self) {
        self.schedule().over = true;
        self.changed.notify_all();
    }

    /// Waits; is a look due?
    pub(super) fn wait(&self) -> bool {
        let mut schedule = self.schedule();
        let left = schedule.due.map_or(IDLE, |due| due.saturating_duration_since(Instant::now()));
        if !left.is_zero() && !schedule.over {
            let wait = left.min(IDLE);
            schedule = self.changed.wait_timeout(schedule, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        schedule.take_due(Instant::now())
    }

    /// After a look, at which something could be seen or not.
    pub(super) fn looked(&self, seen: bool) {
        self.schedule().looked(seen, Instant::now());
    }

    pub(super) fn begin(&self, targets: &[PathBuf]) -> Vec<(PathBuf, usize)> {
        self.schedule().begin(targets, Instant::now())
    }

    /// Not done: it is tried again.
    pub(super) fn finish(&self, target: &Path, done: bool) {
        self.schedule().finish(target, done, Instant::now());
        self.changed.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        self.schedule().over
    }

    /// True if this is news.
    pub(super) fn tell(&self, target: &Path, what: &str) -> bool {
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        reasons.insert(target.to_owned(), what.to_owned()).is_none_or(|before| before != what)
    }

    /// Why a target's mount is not made anew, if that was said.
    pub(in crate::broker) fn told_of(&self, target: &Path) -> Option<String> {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner).get(target).cloned()
    }

    /// Those that have failed before may fail again: they come last.
    pub(super) fn order(&self, targets: &mut [PathBuf]) {
        // Locked until the end: an order that changes while it is made is a panic.
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        targets.sort_by_key(|path| reasons.contains_key(path));
    }

    /// It is well, or gone.
    pub(in crate::broker) fn all_told(&self, target: &Path) {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner).remove(target);
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
        // And if it changes while a renewal is under way, once more after that.
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
    fn a_table_that_cannot_be_seen_is_looked_at_again_ever_more_rarely() {
        let renewals = Renewals::default();
        for failed in 1..8 {
            let before = Instant::now();
            renewals.looked(false);
            let due = renewals.schedule().due.take().unwrap();
            assert!(due >= before + pause(failed) && due <= Instant::now() + pause(failed), "{failed}");
        }
        renewals.looked(true);
        assert!(renewals.schedule().due.is_none(), "seen");
        renewals.looked(false);
        let due = renewals.schedule().due.unwrap();
        assert!(due <= Instant::now() + pause(1), "the count begins anew");
    }

    #[test]
    fn the_same_is_told_once() {
        let (renewals, at) = (Renewals::default(), Path::new("/t"));
        let news: Vec<bool> = ["a", "a", "b", "a"].map(|what| renewals.tell(at, what)).into();
        assert_eq!(news, [true, false, true, true]);
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
