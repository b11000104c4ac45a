//! Pods that open the same large file at the same time.
//!
//! Each pod's mount has a page cache of its own. Read while it is being fetched, a file is copied through one worker
//! per pod, and kept in memory once per pod; opened when it is whole, it is passed through to the one copy in the
//! cache. So an OPEN waits where the file will be whole soon because another pod is reading it from its start to its
//! end.
//!
//! ```text
//!  OPEN ─► whole? small? no other pod? ─────────────────────────────────────────► go on
//!            │ another pod opened it just now, or it is being fetched
//!            ▼
//!          WATCHED: read in sequence by now? ── no ─► go on, and no wait in this scope for QUIET
//!            │ yes: fetch all of it
//!            ▼
//!          KNOWN: will the rest be there in time? ── no ─► go on, the same
//!            │ it seems so
//!            ▼
//!          SURE: is it still so? ── no ─► go on, the same
//!            │ yes
//!            ▼
//!          whole, or LIMIT ─► go on; at LIMIT the same
//! ```
//!
//! LIMIT, KNOWN and QUIET are promised (docs/semantics.md, R12), and count from the OPEN.

use crate::lock::lock;
use crate::volumes::scope::Scope;
use cache::data::{File, Progress};
use link::broker::MountId;
use link::worker::ANNOUNCED_FROM;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use volume::ScopeId;

/// No OPEN waits longer. A reader of all of the file is not done before it is whole, whether it waits or not.
const LIMIT: Duration = Duration::from_secs(5);
/// How long a reader that opened the file just before may take until it is seen to read in sequence.
const WATCHED: Duration = Duration::from_millis(150);
/// A hopeless wait ends here. Connections are being opened meanwhile: the rate is half of the truth, and counts twice.
const KNOWN: Duration = Duration::from_millis(300);
/// And a doubtful one here.
const SURE: Duration = Duration::from_millis(1000);
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
pub(crate) struct OpenGate {
    known: Mutex<Openers>,
}

#[derive(Default)]
struct Openers {
    /// By cache file: which mounts have opened it lately and read while it is fetched.
    opened: HashMap<u64, Vec<(MountId, Instant)>>,
    /// Where a wait was in vain, and when.
    quiet: HashMap<ScopeId, Instant>,
}

impl Openers {
    /// Another mount reads this file, or is about to. If none does, this one is noted as the first.
    fn has_company(
        &mut self,
        scope: &ScopeId,
        mount: MountId,
        file: u64,
        now: Instant,
        is_read: impl FnOnce() -> bool,
    ) -> bool {
        let since = |at: Instant| now.saturating_duration_since(at);
        self.quiet.retain(|_, at| since(*at) < QUIET);
        if self.opened.len() >= FILES_MAX {
            self.opened.retain(|_, by| by.iter().any(|(_, at)| since(*at) < TOGETHER));
            if self.opened.len() >= FILES_MAX {
                return false;
            }
        }
        let quiet = self.quiet.contains_key(scope);
        let opened = self.opened.entry(file).or_default();
        let last = opened.iter().filter(|(id, _)| *id != mount).map(|(_, at)| since(*at)).min();
        if !quiet && last.is_some_and(|last| last < TOGETHER || is_read()) {
            return true;
        }
        note(opened, mount, now);
        false
    }

    /// The OPEN goes on, the file being whole or not.
    fn goes_on(&mut self, scope: &ScopeId, mount: MountId, file: u64, now: Instant, whole: bool) {
        if whole {
            self.opened.remove(&file);
            return;
        }
        // Given up or out of time: it was in vain.
        self.quiet.insert(scope.clone(), now);
        if let Some(opened) = self.opened.get_mut(&file) {
            note(opened, mount, now);
        }
    }
}

fn note(opened: &mut Vec<(MountId, Instant)>, mount: MountId, now: Instant) {
    opened.retain(|(id, _)| *id != mount);
    opened.push((mount, now));
}

/// What one look at a file says about those that wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Judgement {
    Wait,
    /// Wait, and fetch what no reader has asked for yet.
    Fetch,
    /// Now, whatever else: it is whole, or time is up.
    Go,
    /// It was not worth waiting.
    InVain,
}

/// Could an OPEN of such a file be better answered later?
fn may_gain(size: u64, whole: bool) -> bool {
    size >= ANNOUNCED_FROM && !whole
}

fn is_read_in_sequence(now: &Progress) -> bool {
    now.fetching && now.in_sequence >= IN_SEQUENCE
}

/// Since when a reader in sequence has been seen, and what was there at that moment.
type Seen = (Duration, u64);

/// `waited`: since the OPEN came.
fn judge(now: &Progress, waited: Duration, seen: &mut Option<Seen>) -> Judgement {
    if now.whole || waited >= LIMIT {
        return Judgement::Go;
    }
    let Some((since, before)) = *seen else {
        if waited >= WATCHED {
            return Judgement::InVain;
        }
        if is_read_in_sequence(now) {
            *seen = Some((waited, now.present));
            return Judgement::Fetch;
        }
        return Judgement::Wait;
    };
    if waited < KNOWN {
        return Judgement::Fetch;
    }
    let hope = if waited < SURE { 2.0 } else { 1.0 };
    let rate = now.present.saturating_sub(before) as f64 / (waited - since).as_secs_f64();
    let needed = now.size.saturating_sub(now.present) as f64 / rate.max(1.0);
    if needed <= hope * (LIMIT - waited).as_secs_f64() { Judgement::Fetch } else { Judgement::InVain }
}

impl OpenGate {
    /// Returns when the OPEN of `file` (inode number `ino`) by a mount of `scope` may go on.
    pub(crate) async fn open(&self, scope: &Scope, mount: MountId, ino: u64, file: &Arc<File>) {
        if !may_gain(file.key().size, file.is_whole()) {
            return;
        }
        let is_read = || is_read_in_sequence(&file.progress());
        if !self.lock().has_company(&scope.id, mount, file.id(), Instant::now(), is_read) {
            return;
        }
        // Whole is not enough: the metadata store must say so before the worker looks there.
        let noted = || scope.names.last_attributes(ino).is_ok_and(|a| a.is_some_and(|a| a.cached.is_some()));
        let (begun, mut seen, mut all) = (Instant::now(), None, None);
        loop {
            let (now, waited) = (file.progress(), begun.elapsed());
            let judgement = judge(&now, waited, &mut seen);
            if matches!(judgement, Judgement::Go | Judgement::InVain) {
                tracing::debug!(%mount, file = file.id(), ?judgement, ?waited, ?now, "an open that waited");
            }
            match judgement {
                Judgement::Go if now.whole && waited < LIMIT && !noted() => {}
                Judgement::Go | Judgement::InVain => break,
                Judgement::Fetch => {
                    all.get_or_insert_with(|| file.prefetch_all());
                }
                Judgement::Wait => {}
            }
            tokio::time::sleep(LOOK).await;
        }
        self.lock().goes_on(&scope.id, mount, file.id(), Instant::now(), file.is_whole());
    }

    fn lock(&self) -> MutexGuard<'_, Openers> {
        lock(&self.known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scripted;
    use cache::data::ReadOptions;
    use cache::meta::ROOT;
    use proptest::prelude::*;

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
            assert_eq!(judge(&at(t * GIB / 1000), ms(t), &mut seen), Judgement::Fetch, "at {t} ms");
        }
        let whole = Progress { whole: true, fetching: false, ..at(2 * GIB) };
        assert_eq!(judge(&whole, ms(2000), &mut seen), Judgement::Go);
    }

    #[test]
    fn one_that_would_take_too_long_is_given_up_as_soon_as_that_is_known() {
        let mut seen = None;
        let slow = |t: u64, per_s: u64| at(t * per_s / 1000);
        assert_eq!(judge(&slow(0, GIB / 20), ms(0), &mut seen), Judgement::Fetch);
        assert_eq!(judge(&slow(290, GIB / 20), ms(290), &mut seen), Judgement::Fetch);
        assert_eq!(judge(&slow(300, GIB / 20), ms(300), &mut seen), Judgement::InVain, "40 s");
        assert_eq!(
            judge(&slow(990, GIB / 4), ms(990), &mut seen),
            Judgement::Fetch,
            "8 s, it may get faster"
        );
        assert_eq!(judge(&slow(1000, GIB / 4), ms(1000), &mut seen), Judgement::InVain, "it did not");
        assert_eq!(judge(&slow(1000, GIB / 2), ms(1000), &mut seen), Judgement::Fetch, "4 s");
    }

    #[test]
    fn one_that_nobody_reads_in_sequence_is_watched_for_a_moment_only() {
        let mut seen = None;
        let random = Progress { in_sequence: 1 << 20, ..at(0) };
        assert_eq!(judge(&random, ms(140), &mut seen), Judgement::Wait);
        assert_eq!(judge(&random, WATCHED, &mut seen), Judgement::InVain);
    }

    /// R12's numbers. Whatever a file does: jumps, stands still, loses its reader, fails to be fetched.
    #[test]
    fn no_open_waits_longer_than_promised() {
        let (promised, until_known) = (ms(5000), ms(300));
        let mut seen = Some((ms(0), 0));
        assert_eq!(judge(&at(2 * GIB - 1), promised, &mut seen), Judgement::Go);
        proptest!(|(steps in proptest::collection::vec((0_u64..64 << 20, any::<bool>(), 0_u64..8 << 20), 600))| {
            let (mut seen, mut present, mut first) = (None, 0, None);
            for (n, (bytes, fetching, in_sequence)) in steps.into_iter().enumerate() {
                let waited = ms(10 * n as u64);
                let now = Progress { whole: false, size: 2 * GIB, present, fetching, in_sequence };
                let judgement = judge(&now, waited, &mut seen);
                if seen.is_some() {
                    first.get_or_insert((waited, present));
                }
                // Twice the rate that was seen must bring the rest in time, or it is known that it does not.
                let waits = matches!(judgement, Judgement::Wait | Judgement::Fetch);
                if waited >= until_known && waits {
                    let (since, before) = first.expect("a wait beyond that has a reader");
                    let rate = (present - before) as f64 / (waited - since).as_secs_f64();
                    let rest = (2 * GIB - present) as f64;
                    prop_assert!(rest <= 2.0 * rate * (promised - waited).as_secs_f64() + 1.0, "{waited:?}");
                }
                if !waits {
                    return Ok(());
                }
                prop_assert!(waited < promised);
                present = (present + bytes).min(2 * GIB - 1);
            }
            prop_assert!(false, "it waits for ever");
        });
    }

    #[test]
    fn a_wait_that_brought_nothing_is_not_repeated_for_ten_seconds() {
        let id = |digit: &str| ScopeId::parse(&digit.repeat(32)).expect("32 hexadecimal digits are a scope");
        let (scope, other) = (id("a"), id("b"));
        let (start, mut known) = (Instant::now(), Openers::default());
        let mut opens = |scope: &ScopeId, file: u64, mount: u64, at: u64| {
            known.has_company(scope, MountId(mount), file, start + ms(at), || true)
        };
        assert!(!opens(&scope, 1, 1, 0), "the first");
        assert!(opens(&scope, 1, 2, 10), "waits for it");
        // Out of time, as well as given up: either brought nothing.
        known.goes_on(&scope, MountId(2), 1, start + ms(5010), false);
        let mut opens = |scope: &ScopeId, file: u64, mount: u64, at: u64| {
            known.has_company(scope, MountId(mount), file, start + ms(at), || true)
        };
        for (file, mount, at) in [(1, 3, 5020), (2, 1, 5030), (2, 2, 6000), (1, 4, 15_000)] {
            assert!(!opens(&scope, file, mount, at), "no wait at {at} ms");
        }
        assert!(!opens(&other, 9, 1, 6000) && opens(&other, 9, 2, 6010), "another scope's is its own");
        assert!(opens(&scope, 1, 5, 15_011), "ten seconds later");
        known.goes_on(&scope, MountId(5), 1, start + ms(15_100), true);
        assert!(known.quiet.is_empty() && !known.opened.contains_key(&1), "nothing is kept of what is over");
    }

    #[test]
    fn opens_less_than_two_seconds_apart_belong_together_and_later_ones_where_the_file_is_read() {
        let scope = ScopeId::parse(&"a".repeat(32)).expect("32 hexadecimal digits are a scope");
        let start = Instant::now();
        for (mount, at, is_read, company) in [
            (2, 1999, false, true),
            (2, 2000, false, false),
            (2, 2000, true, true),
            (1, 10, true, false), // itself
        ] {
            let mut known = Openers::default();
            assert!(!known.has_company(&scope, MountId(1), 7, start, || true), "the first");
            let has = known.has_company(&scope, MountId(mount), 7, start + ms(at), || is_read);
            assert_eq!(has, company, "{mount} at {at} ms");
        }
    }

    #[test]
    fn openers_of_more_files_than_are_remembered_replace_old_ones() {
        let scope = ScopeId::parse(&"a".repeat(32)).expect("32 hexadecimal digits are a scope");
        let (start, mut known) = (Instant::now(), Openers::default());
        for file in 0..FILES_MAX as u64 {
            known.has_company(&scope, MountId(1), file, start, || true);
        }
        let mut opens = |file: u64, at: u64| {
            let has = known.has_company(&scope, MountId(2), file, start + ms(at), || true);
            (has, known.opened.len())
        };
        assert_eq!(opens(9999, 1999), (false, FILES_MAX), "all of them may have company yet");
        assert_eq!(opens(0, 1999), (false, FILES_MAX), "and none is looked for");
        assert_eq!(opens(9999, 2000), (false, 1));
    }

    #[test]
    fn large_files_that_are_not_whole_may_be_waited_for() {
        let may = |size| (may_gain(size, false), may_gain(size, true));
        assert_eq!([may(0), may(ANNOUNCED_FROM - 1)], [(false, false); 2]);
        assert_eq!([may(ANNOUNCED_FROM), may(u64::MAX)], [(true, false); 2]);
    }

    #[test]
    fn a_reader_in_sequence_has_read_enough_of_what_is_being_fetched() {
        let read = |fetching, in_sequence| is_read_in_sequence(&Progress { fetching, in_sequence, ..at(0) });
        assert!(read(true, IN_SEQUENCE) && !read(true, IN_SEQUENCE - 1) && !read(false, IN_SEQUENCE));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_open_waits_for_a_large_file_that_another_mount_has_opened_and_for_no_other() {
        for (size, waits) in [(ANNOUNCED_FROM - 1, false), (ANNOUNCED_FROM, true)] {
            let (source, gate) = (Scripted::new(0), OpenGate::default());
            source.resize(size);
            let scope = source.scope();
            scope.head(ROOT, b"f").await.unwrap();
            let ino = scope.names.resolve(b"f").unwrap().unwrap();
            let attributes = scope.names.last_attributes(ino).unwrap().unwrap();
            let file = scope.current(&attributes, ReadOptions::default()).unwrap();
            for mount in [1, 1, 2] {
                assert!(gate.lock().quiet.is_empty(), "no open has waited before");
                gate.open(&scope, MountId(mount), ino, &file).await;
            }
            // No mount reads it: that wait was in vain.
            assert_eq!(gate.lock().quiet.contains_key(&scope.id), waits, "{size}");
            assert_eq!(gate.lock().opened.len(), usize::from(waits));
        }
    }
}
