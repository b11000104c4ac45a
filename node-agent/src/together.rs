//! Pods that open the same large file at the same time.
//!
//! Each pod's mount has a page cache of its own. Read while it is being fetched, a file is copied through one worker per
//! pod, and kept in memory once per pod; opened when it is whole, it is passed through to the one copy in the cache. So
//! an OPEN waits where the file will be whole soon because another pod is reading it from its start to its end.
//!
//! ```text
//!  OPEN ─► whole? small? nobody else? ──────────────────────────────────────────► go on
//!            │ another pod opened it just now, or it is being fetched
//!            ▼
//!          WATCHED: read in sequence by now? ── no ─► go on, and do not watch again for a while
//!            │ yes: fetch all of it
//!            ▼
//!          MEASURED: will the rest be there in time? ── no ─► go on, the same
//!            │ yes
//!            ▼
//!          whole, or LIMIT ─► go on
//! ```

use crate::supervisor::Mount;
use cache::data::{File, Progress};
use link::broker::MountId;
use link::worker::ANNOUNCED_FROM;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use volume::ScopeId;

/// No OPEN waits longer. Whoever reads all of the file is not done before it is whole, whether he waits or not.
const LIMIT: Duration = Duration::from_secs(10);
/// How long a reader that opened the file just before may take until it is seen to read in sequence.
const WATCHED: Duration = Duration::from_millis(250);
/// How long the rate is measured: after a first look a hopeless wait ends, after the second a doubtful one. Connections
/// are being opened meanwhile, so the first tells half of the truth.
const MEASURED: [Duration; 2] = [Duration::from_millis(300), Duration::from_millis(1000)];
const LOOK: Duration = Duration::from_millis(10);
/// Two opens this far apart belong together.
const TOGETHER: Duration = Duration::from_secs(2);
/// A reader that has come this far reads on.
const IN_SEQUENCE: u64 = 4 << 20;
/// After a wait that brought nothing, no other is tried in the same scope for this long.
const QUIET: Duration = Duration::from_secs(10);
/// Files whose openers are remembered; beyond that old ones are forgotten.
const FILES_MAX: usize = 1024;

#[derive(Default)]
pub(crate) struct Together {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// By cache file: which mounts have opened it lately and read while it is fetched.
    opened: HashMap<u64, Vec<(MountId, Instant)>>,
    /// Where a wait was in vain, and when.
    quiet: HashMap<ScopeId, Instant>,
}

fn note(opened: &mut Vec<(MountId, Instant)>, mount: MountId) {
    opened.retain(|(id, _)| *id != mount);
    opened.push((mount, Instant::now()));
}

/// What one look at a file says about those who wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Judgement {
    Wait,
    /// Now, whatever else: it is whole, or time is up.
    Go,
    /// It was not worth waiting.
    InVain,
}

/// Since when a reader in sequence has been seen, and what was there at that moment.
type Seen = (Duration, u64);

/// `waited`: since the OPEN came.
fn judge(now: &Progress, waited: Duration, seen: &mut Option<Seen>) -> Judgement {
    if now.whole || waited >= LIMIT {
        return Judgement::Go;
    }
    let Some((since, before)) = *seen else {
        if now.fetching && now.in_sequence >= IN_SEQUENCE {
            *seen = Some((waited, now.present));
        } else if waited >= WATCHED {
            return Judgement::InVain;
        }
        return Judgement::Wait;
    };
    let measured = waited - since;
    let hope = match MEASURED.map(|least| measured >= least) {
        [false, _] => return Judgement::Wait,
        [true, false] => 2.0,
        [true, true] => 1.0,
    };
    let rate = now.present.saturating_sub(before) as f64 / measured.as_secs_f64();
    let needed = (now.size - now.present) as f64 / rate.max(1.0);
    if needed <= hope * (LIMIT - waited).as_secs_f64() { Judgement::Wait } else { Judgement::InVain }
}

impl Together {
    /// Returns when the OPEN of `file` (inode number `ino`) by `mount` may go on.
    pub(crate) async fn open(&self, mount: &Mount, ino: u64, file: &Arc<File>) {
        if file.key().size < ANNOUNCED_FROM || file.is_whole() || !self.has_company(mount, file) {
            return;
        }
        // Whole is not enough: the metadata store must say so before the worker looks there.
        let noted =
            || mount.scope.names.last_attributes(ino).is_ok_and(|a| a.is_some_and(|a| a.cached.is_some()));
        let (begun, mut seen, mut hurry) = (Instant::now(), None, None);
        loop {
            let (now, waited) = (file.progress(), begun.elapsed());
            let judgement = judge(&now, waited, &mut seen);
            if judgement != Judgement::Wait {
                tracing::debug!(mount = %mount.id, file = file.id(), ?judgement, ?waited, ?now, "an open that waited");
            }
            match judgement {
                Judgement::Go if now.whole && waited < LIMIT && !noted() => {}
                Judgement::Go => break,
                Judgement::Wait if seen.is_some() && hurry.is_none() => hurry = Some(file.hurry()),
                Judgement::Wait => {}
                Judgement::InVain => {
                    let mut known = self.lock();
                    known.quiet.retain(|_, since| since.elapsed() < QUIET);
                    known.quiet.insert(mount.scope.id.clone(), Instant::now());
                    break;
                }
            }
            tokio::time::sleep(LOOK).await;
        }
        let mut known = self.lock();
        if file.is_whole() {
            known.opened.remove(&file.id());
        } else if let Some(opened) = known.opened.get_mut(&file.id()) {
            note(opened, mount.id);
        }
    }

    /// Another mount reads this file, or is about to. If none does, this one is noted as the first.
    fn has_company(&self, mount: &Mount, file: &Arc<File>) -> bool {
        let mut known = self.lock();
        let quiet = known.quiet.get(&mount.scope.id).is_some_and(|since| since.elapsed() < QUIET);
        if known.opened.len() >= FILES_MAX {
            known.opened.retain(|_, by| by.iter().any(|(_, at)| at.elapsed() < TOGETHER));
            if known.opened.len() >= FILES_MAX {
                return false;
            }
        }
        let opened = known.opened.entry(file.id()).or_default();
        let last = opened.iter().filter(|(id, _)| *id != mount.id).map(|(_, at)| at.elapsed()).min();
        let is_read = || {
            let now = file.progress();
            now.fetching && now.in_sequence >= IN_SEQUENCE
        };
        if !quiet && last.is_some_and(|last| last < TOGETHER || is_read()) {
            return true;
        }
        note(opened, mount.id);
        false
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn at(present: u64) -> Progress {
        Progress { whole: false, size: 2 * GIB, present, fetching: true, in_sequence: 64 << 20 }
    }
    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_file_that_arrives_fast_is_waited_for_until_it_is_whole() {
        let mut seen = None;
        for t in (0..2000).step_by(10) {
            assert_eq!(judge(&at(t * GIB / 1000), ms(t), &mut seen), Judgement::Wait, "at {t} ms");
        }
        let whole = Progress { whole: true, fetching: false, ..at(2 * GIB) };
        assert_eq!(judge(&whole, ms(2000), &mut seen), Judgement::Go);
    }

    #[test]
    fn one_that_would_take_too_long_is_given_up_as_soon_as_that_is_known() {
        let mut seen = None;
        let slow = |t: u64, per_s: u64| at(t * per_s / 1000);
        assert_eq!(judge(&slow(0, GIB / 20), ms(0), &mut seen), Judgement::Wait);
        assert_eq!(judge(&slow(290, GIB / 20), ms(290), &mut seen), Judgement::Wait);
        assert_eq!(judge(&slow(300, GIB / 20), ms(300), &mut seen), Judgement::InVain, "40 s");
        assert_eq!(
            judge(&slow(990, GIB / 8), ms(990), &mut seen),
            Judgement::Wait,
            "16 s, it may get faster"
        );
        assert_eq!(judge(&slow(1000, GIB / 8), ms(1000), &mut seen), Judgement::InVain, "it did not");
        assert_eq!(judge(&slow(1000, GIB / 4), ms(1000), &mut seen), Judgement::Wait, "7 s");
    }

    #[test]
    fn one_that_nobody_reads_in_sequence_is_watched_for_a_moment_only() {
        let mut seen = None;
        let random = Progress { in_sequence: 1 << 20, ..at(0) };
        assert_eq!(judge(&random, ms(240), &mut seen), Judgement::Wait);
        assert_eq!(judge(&random, WATCHED, &mut seen), Judgement::InVain);
    }

    #[test]
    fn no_open_waits_beyond_the_limit() {
        let mut seen = Some((ms(0), 0));
        assert_eq!(judge(&at(2 * GIB - 1), LIMIT, &mut seen), Judgement::Go);
    }
}
