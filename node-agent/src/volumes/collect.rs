//! Which metadata stores are worth their place on the disk.
//!
//! A store that no volume uses keeps the names for the next one. It goes when no volume has come back to it for long,
//! when there are too many, or when all stores together take too much: then the longest unused ones first. One that is
//! in use never goes, nor one that an agent before may have left in use: its mounts may still be given to us.

use crate::config;
use crate::volumes::Volumes;
use cache::meta::idle::{self, Left};
use rustix::fs::StatVfs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};
use volume::ScopeId;

/// Between two looks, when no volume goes meanwhile.
const PERIOD: Duration = Duration::from_secs(60);
/// From a volume's end to the look: others go with it.
const SETTLE: Duration = Duration::from_secs(1);
/// The longest `healTimeout`: for so long the broker may keep a mount for an agent that comes.
const ADOPTIONS: Duration = Duration::from_secs(3600);
/// Percent of the metadata directory's file system that idle stores leave free.
const FREE_PERCENT: u64 = 5;

/// What an agent may keep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    idle: Duration,
    stores: usize,
    bytes: u64,
}

impl Limits {
    pub(crate) fn of(cache: &config::Cache) -> Self {
        Self { idle: cache.metadata_idle.0, stores: cache.metadata_stores, bytes: cache.metadata_total.0 }
    }
}

/// A store that is not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Store {
    since: SystemTime,
    bytes: u64,
    /// Its mounts may still be given to us.
    expected: bool,
}

/// What the stores share with others.
#[derive(Clone, Copy, Debug)]
struct Around {
    /// Bytes of the stores that are open.
    open: u64,
    /// Bytes of their file system; None: it does not say.
    free: Option<(u64, u64)>,
    now: SystemTime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Age,
    Number,
    Space,
}

impl Reason {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Age => "age",
            Self::Number => "number",
            Self::Space => "space",
        }
    }
}

/// Which of `stores` go, by index.
fn choose(stores: &[Store], limits: &Limits, around: &Around) -> Vec<(usize, Reason)> {
    let mut order: Vec<usize> = (0..stores.len()).filter(|&k| !stores[k].expected).collect();
    order.sort_by_key(|&k| stores[k].since);
    let (mut count, mut bytes) = (stores.len(), stores.iter().map(|s| s.bytes).sum::<u64>());
    let (mut free, floor) = match around.free {
        Some((free, all)) => (free, all / 100 * FREE_PERCENT),
        None => (0, 0),
    };
    let mut gone = Vec::new();
    for k in order {
        let Store { since, bytes: of_this, .. } = stores[k];
        let age = around.now.duration_since(since).unwrap_or_default();
        let reason = match () {
            () if age > limits.idle => Reason::Age,
            () if count > limits.stores => Reason::Number,
            () if around.open.saturating_add(bytes) > limits.bytes || free < floor => Reason::Space,
            () => break, // all others are younger
        };
        (count, bytes, free) = (count - 1, bytes - of_this, free + of_this);
        gone.push((k, reason));
    }
    gone
}

/// Whether stores may be touched. An agent that drains stops that before its successor opens them, also in the middle
/// of a look, which runs on a thread that cannot be aborted.
#[derive(Debug, Default)]
pub(crate) struct Leave(Mutex<bool>);

impl Leave {
    /// One store at a time; None: not any more.
    pub(crate) fn with<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let ended = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (!*ended).then(work)
    }

    /// Returns when no thread works on a store. Blocking.
    pub(crate) fn end(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

/// Looks now, and again whenever volumes have gone, and now and then.
pub(crate) fn start(volumes: &Arc<Volumes>) -> tokio::task::JoinHandle<()> {
    let weak = Arc::downgrade(volumes);
    tokio::spawn(async move {
        let started = Started { at: Instant::now(), time: SystemTime::now() };
        let mut first = true;
        while let Some(volumes) = Weak::upgrade(&weak) {
            let looking = volumes.clone();
            let looked = tokio::task::spawn_blocking(move || look(&looking, &started, first)).await;
            if looked.is_err() {
                return; // the runtime is going, or it panicked, which has been reported
            }
            first = false;
            let closed = tokio::time::timeout(PERIOD, volumes.scopes.closed()).await.is_ok();
            drop(volumes);
            if closed {
                tokio::time::sleep(SETTLE).await;
            }
        }
    })
}

#[derive(Clone, Copy)]
struct Started {
    at: Instant,
    time: SystemTime,
}

impl Started {
    /// May the store be one of a mount that is still on its way to us? Those that were closed since are not.
    fn expects(&self, store: &idle::Idle, now: Instant) -> bool {
        let recently = self.time.checked_sub(ADOPTIONS).unwrap_or(SystemTime::UNIX_EPOCH);
        let by_another = (recently..self.time).contains(&store.since);
        now.saturating_duration_since(self.at) < ADOPTIONS
            && (store.left == Left::Open || by_another && store.left == Left::Closed)
    }
}

/// Blocking.
fn look(volumes: &Volumes, started: &Started, first: bool) {
    volumes.sweep_scopes();
    let dir = &volumes.config().cache.metadata_dir;
    let found = match find(volumes, dir, started, first) {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(dir = %dir.display(), %error, "the metadata directory cannot be looked through");
            return;
        }
    };
    let stores: Vec<Store> = found.iter().map(|(_, store)| *store).collect();
    let around = Around {
        open: volumes.opener.room.open(),
        free: rustix::fs::statvfs(dir).ok().and_then(|disk| free(&disk)),
        now: SystemTime::now(),
    };
    let mut left: u64 = stores.iter().map(|store| store.bytes).sum();
    for (k, reason) in choose(&stores, &Limits::of(&volumes.config().cache), &around) {
        let id = &found[k].0;
        // A volume may have come for it since.
        let Some(_shut) = volumes.scopes.shut(id) else { continue };
        let Some(removed) = volumes.collecting.with(|| idle::remove(&path(dir, id))) else { return };
        match removed {
            Ok(true) => {
                left -= stores[k].bytes;
                volumes.context.metrics.store_removed(reason.as_str());
                tracing::info!(scope = %id, reason = reason.as_str(), "a metadata store that no volume uses was removed");
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(scope = %id, %error, "an unused metadata store stays"),
        }
    }
    volumes.opener.room.note_idle(left);
}

/// Bytes that the file system has free, and has. None: it does not say (a 9p share, say).
fn free(disk: &StatVfs) -> Option<(u64, u64)> {
    (disk.f_blocks > 0).then_some((disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize))
}

/// The stores that are not open, tidied up.
fn find(
    volumes: &Volumes,
    dir: &std::path::Path,
    started: &Started,
    first: bool,
) -> std::io::Result<Vec<(ScopeId, Store)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        let Some(id) = name.to_str().and_then(ScopeId::parse) else { continue };
        let path = path(dir, &id);
        let seen = match idle::look(&path) {
            Ok(Some(seen)) => seen,
            Ok(None) => continue, // not ours
            Err(error) => {
                tracing::warn!(scope = %id, %error, "a metadata store cannot be looked at");
                continue;
            }
        };
        let expected = started.expects(&seen, Instant::now());
        let Some(shut) = volumes.scopes.shut(&id) else { continue };
        let tidy = || match tidying(&seen, expected, first, SystemTime::now()) {
            Tidying::Nothing => Ok(()),
            Tidying::Close => idle::close(&path).map(drop),
            Tidying::Trim => idle::trim(&path),
            Tidying::Touch => idle::touch(&path),
        };
        let Some(tidied) = volumes.collecting.with(tidy) else { break };
        drop(shut);
        if let Err(error) = tidied {
            tracing::warn!(scope = %id, %error, "an unused metadata store could not be tidied up");
        }
        let seen = idle::look(&path).ok().flatten().unwrap_or(seen);
        found.push((id, Store { since: seen.since, bytes: seen.bytes, expected }));
    }
    Ok(found)
}

/// What a store that no volume uses needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tidying {
    Nothing,
    Close,
    Trim,
    Touch,
}

/// `expected`: mounts may come back to it. `first`: it was not looked at before.
fn tidying(seen: &idle::Idle, expected: bool, first: bool, now: SystemTime) -> Tidying {
    match seen.left {
        _ if expected => Tidying::Nothing,
        // The agent that had it open is gone.
        Left::Open => Tidying::Close,
        Left::Worthless if first => Tidying::Trim,
        // The clock was set back: from now on it ages.
        Left::Closed if seen.since > now => Tidying::Touch,
        Left::Closed | Left::Worthless => Tidying::Nothing,
    }
}

fn path(dir: &std::path::Path, id: &ScopeId) -> PathBuf {
    dir.join(id.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + HOUR * 500_000
    }

    fn store(hours_ago: u32, bytes: u64) -> Store {
        Store { since: now() - HOUR * hours_ago, bytes, expected: false }
    }

    fn gone(stores: &[Store], limits: Limits, open: u64, free: Option<(u64, u64)>) -> Vec<(usize, Reason)> {
        choose(stores, &limits, &Around { open, free, now: now() })
    }

    const WIDE: Limits = Limits { idle: Duration::from_secs(100 * 3600), stores: 100, bytes: 1000 };

    #[test]
    fn what_nobody_came_back_to_goes_and_then_the_oldest_until_the_rest_fits() {
        let stores = [store(3, 10), store(200, 10), store(1, 10), store(2, 10)];
        assert_eq!(gone(&stores, WIDE, 0, None), [(1, Reason::Age)]);
        let few = Limits { stores: 2, ..WIDE };
        assert_eq!(gone(&stores, few, 0, None), [(1, Reason::Age), (0, Reason::Number)]);
        // Those in use count, and stay.
        assert_eq!(gone(&stores[2..], WIDE, 990, None), [(1, Reason::Space)]);
        assert_eq!(gone(&stores[2..], WIDE, 5000, None), [(1, Reason::Space), (0, Reason::Space)]);
        // On a disk that others fill they make room.
        assert_eq!(gone(&stores[2..], WIDE, 0, Some((45, 1000))), [(1, Reason::Space)]);
        assert_eq!(gone(&stores[2..], WIDE, 0, Some((50, 1000))), []);
    }

    /// Whatever there is: the oldest go, no more than must, and no fewer.
    #[test]
    fn as_many_go_as_must() {
        let some = (0u32..300, 0u64..400, any::<bool>());
        let seen = prop::collection::vec(some, 0..12);
        proptest!(|(seen in seen, most in 0usize..8, open in 0u64..1500, free in prop::option::of(0u64..80))| {
            let stores: Vec<Store> =
                seen.iter().map(|&(age, bytes, expected)| Store { expected, ..store(age, bytes) }).collect();
            let limits = Limits { stores: most, ..WIDE };
            let around = Around { open, free: free.map(|free| (free, 1000)), now: now() };
            let gone = choose(&stores, &limits, &around);
            // Why one more must go once `so_many` of these are gone.
            let must = |so_many: usize, next: &Store| {
                let removed: Vec<usize> = gone[..so_many].iter().map(|(k, _)| *k).collect();
                let left = || stores.iter().enumerate().filter(|(k, _)| !removed.contains(k)).map(|(_, s)| s);
                let freed: u64 = removed.iter().map(|&k| stores[k].bytes).sum();
                if next.since < now() - limits.idle {
                    Some(Reason::Age)
                } else if left().count() > most {
                    Some(Reason::Number)
                } else if open + left().map(|s| s.bytes).sum::<u64>() > limits.bytes
                    || free.is_some_and(|free| free + freed < 50)
                {
                    Some(Reason::Space)
                } else {
                    None
                }
            };
            let mut order: Vec<usize> = (0..stores.len()).filter(|&k| !stores[k].expected).collect();
            order.sort_by_key(|&k| stores[k].since);
            prop_assert_eq!(&order[..gone.len()], &gone.iter().map(|(k, _)| *k).collect::<Vec<_>>()[..]);
            for (n, (k, reason)) in gone.iter().enumerate() {
                prop_assert_eq!(must(n, &stores[*k]), Some(*reason));
            }
            if let Some(&next) = order.get(gone.len()) {
                prop_assert_eq!(must(gone.len(), &stores[next]), None);
            }
        });
    }

    #[test]
    fn what_an_agent_before_may_have_left_in_use_stays() {
        let expected = Store { expected: true, ..store(5000, 5000) };
        assert_eq!(gone(&[expected, store(1, 10)], WIDE, 0, Some((0, 100))), [(1, Reason::Space)]);
    }

    #[test]
    fn whoever_steps_back_waits_for_the_store_at_hand_and_no_other_is_touched() {
        let leave = Arc::new(Leave::default());
        let (enter, entered) = std::sync::mpsc::channel();
        let (open, gate) = std::sync::mpsc::channel::<()>();
        let looking = std::thread::spawn({
            let leave = leave.clone();
            move || {
                leave.with(|| {
                    enter.send(()).unwrap();
                    gate.recv().unwrap();
                })
            }
        });
        entered.recv().unwrap();
        let ending = std::thread::spawn({
            let leave = leave.clone();
            move || leave.end()
        });
        std::thread::sleep(Duration::from_millis(20)); // it may end too early now
        assert!(!ending.is_finished());
        open.send(()).unwrap();
        assert!(looking.join().unwrap().is_some());
        ending.join().unwrap();
        assert!(leave.with(|| ()).is_none());
    }

    #[test]
    fn what_a_store_needs_follows_from_how_it_was_left() {
        let seen = |left, since| idle::Idle { bytes: 0, since, left };
        let (past, future) = (now() - HOUR, now() + HOUR);
        let all = [
            (Left::Open, past, [Tidying::Close, Tidying::Close]),
            (Left::Worthless, past, [Tidying::Trim, Tidying::Nothing]),
            (Left::Worthless, future, [Tidying::Trim, Tidying::Nothing]),
            (Left::Closed, past, [Tidying::Nothing, Tidying::Nothing]),
            (Left::Closed, now(), [Tidying::Nothing, Tidying::Nothing]),
            (Left::Closed, future, [Tidying::Touch, Tidying::Touch]),
        ];
        for (left, since, needs) in all {
            for (first, needs) in [true, false].into_iter().zip(needs) {
                assert_eq!(tidying(&seen(left, since), false, first, now()), needs, "{left:?} {first}");
                assert_eq!(tidying(&seen(left, since), true, first, now()), Tidying::Nothing);
            }
        }
    }

    #[test]
    fn a_time_in_the_future_is_no_age() {
        let future = Store { since: now() + HOUR * 5000, ..store(0, 10) };
        assert_eq!(gone(&[future], WIDE, 0, None), []);
    }

    #[test]
    fn mounts_may_come_for_what_was_open_or_closed_just_before_the_start() {
        let started = Started { at: Instant::now(), time: now() };
        let seen = |left, hours_ago: u32| idle::Idle { bytes: 0, since: now() - HOUR * hours_ago, left };
        let expects = |left, hours_ago| started.expects(&seen(left, hours_ago), started.at);
        assert!(expects(Left::Open, 5000));
        assert!(expects(Left::Closed, 1));
        assert!(!expects(Left::Closed, 2), "its mounts have ended");
        assert!(!expects(Left::Closed, 0), "closed by this agent");
        assert!(!expects(Left::Worthless, 1));
        // A mount that has not come by then does not come.
        let open = seen(Left::Open, 1);
        assert!(started.expects(&open, started.at + ADOPTIONS - Duration::from_nanos(1)));
        assert!(!started.expects(&open, started.at + ADOPTIONS));
    }

    #[test]
    fn a_file_system_that_does_not_tell_its_size_is_not_full() {
        let mut disk = rustix::fs::statvfs("/").unwrap();
        (disk.f_frsize, disk.f_blocks, disk.f_bavail) = (10, 7, 3);
        assert_eq!(free(&disk), Some((30, 70)));
        disk.f_blocks = 0;
        assert_eq!(free(&disk), None);
    }
}
