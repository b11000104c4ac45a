//! Volumes with a `ttl` go on with what is known last while their source gives no answer (`staleIfError`; RFC 5861's
//! name and meaning).
//!
//! ```text
//!               a question has waited PATIENCE and nothing at all was answered, or it failed
//!   Answering ──────────────────────────────────────────────────────────────────────────► Away
//!       ▲                                                                                   │
//!       └─────────────────── any answer: to a probe, a reader, another volume ──────────────┘
//! ```
//!
//! While it is away nobody waits: what is known and not too old is the answer, at once, and one probe at a time asks the
//! source for all of them. The worker gives such an answer to the kernel for no time at all, so the next call asks
//! again. Absent names are known, too: a name that the last answer lacks stays absent.
//!
//! Only for silence and failures of the store, and for session tokens that have expired: whoever waits for the next one
//! waits as for a store that is away. A refusal (403), an absence (404) and a change are answers. What nobody has asked for
//! before waits as ever; so do bytes that are not in the cache, and what waits in this node's own queue: of that the store
//! knows nothing.

use crate::volumes::scope::{Scope, fresh};
use cache::meta::{self, Lookup, MetaError};
use link::Cause;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use volume::{Freshness, Parameters};

/// How long a question waits while the source answers nothing before it is taken to be away. Longer than what a store
/// needs on a bad day, shorter than what a person takes for a hang.
const PATIENCE: Duration = Duration::from_secs(5);
/// A probe, and the pause after it.
const PROBE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_secs(1);
/// When nobody has needed the source for so long, nobody probes it. Whoever comes begins anew.
const WANTED: Duration = Duration::from_secs(60);

/// What one volume puts up with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tolerance {
    ttl: Duration,
    /// Beyond `ttl`.
    stale: Duration,
    patience: Duration,
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
    fn covers(&self, seen_ms: u64, now_ms: u64) -> bool {
        let limit = self.ttl.saturating_add(self.stale).as_millis();
        meta::age_ms(seen_ms, now_ms).is_some_and(|age| u128::from(age) < limit)
    }
}

/// Where an answer came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Confirmed,
    Stale,
}

/// Whether a source answers.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    /// Answers, of any kind.
    answers: AtomicU64,
    /// Questions that ended in this node's own queue.
    unasked: AtomicU64,
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

impl Outage {
    /// True: it was away.
    pub(crate) fn answered(&self) -> bool {
        // Sequentially consistent, here and in `begin`: one of the two sees what the other has written first.
        self.answers.fetch_add(1, Ordering::SeqCst);
        if !self.away.load(Ordering::SeqCst) {
            return false;
        }
        let mut state = self.lock();
        self.away.store(false, Ordering::SeqCst);
        state.since.take().is_some()
    }

    /// A question ended without having been asked.
    pub(crate) fn unasked(&self) {
        self.unasked.fetch_add(1, Ordering::AcqRel);
    }

    /// False: it has answered since `answers` were counted, or is known to be away.
    fn begin(&self, answers: u64) -> bool {
        let mut state = self.lock();
        if state.since.is_some() {
            return false;
        }
        self.away.store(true, Ordering::SeqCst);
        let begins = self.answers.load(Ordering::SeqCst) == answers;
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

    /// Somebody needs the source. True: and nobody probes it.
    fn want(&self, now: Instant) -> bool {
        let mut state = self.lock();
        state.wanted = Some(now);
        !std::mem::replace(&mut state.probed, true)
    }

    /// Shall it be probed again? If not, the next one who wants it begins anew.
    fn probe_again(&self, now: Instant) -> bool {
        let mut state = self.lock();
        let wanted = state.wanted.is_some_and(|at| now.saturating_duration_since(at) < WANTED);
        state.probed = state.since.is_some() && wanted;
        state.probed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks; while the source gives no answer, is content with what `known` says. `known`: the moment of the last answer.
pub(crate) async fn ask(
    scope: &Arc<Scope>,
    tolerance: Option<Tolerance>,
    known: impl Fn(&meta::View) -> Result<Option<u64>, MetaError>,
    question: impl Future<Output = Result<(), Cause>>,
) -> Result<Told, Cause> {
    let confirmed = |done: Result<(), Cause>| done.map(|()| Told::Confirmed);
    let Some(tolerance) = tolerance else { return confirmed(question.await) };
    // A store of names that fails is an error of the question's.
    let seen_ms = known(&scope.names).ok().flatten();
    let now = scope.names.now_ms();
    let Some(seen_ms) = seen_ms.filter(|seen| tolerance.covers(*seen, now)) else {
        return confirmed(question.await);
    };
    if fresh(Freshness::Ttl(tolerance.ttl), seen_ms, now) {
        return confirmed(question.await); // which asks nobody
    }
    let outage = &scope.outage;
    if outage.since().is_some() {
        want(scope);
        return Ok(Told::Stale);
    }
    tokio::pin!(question);
    let mut answers = outage.answers.load(Ordering::Acquire);
    let unasked = outage.unasked.load(Ordering::Acquire);
    loop {
        let why = match tokio::time::timeout(tolerance.patience, &mut question).await {
            Ok(Err(cause)) if outage.unasked.load(Ordering::Acquire) != unasked => return Err(cause),
            Ok(Err(Cause::Unavailable)) => None, // it was said why
            Ok(done) => return confirmed(done),
            Err(_) => {
                let before = std::mem::replace(&mut answers, outage.answers.load(Ordering::Acquire));
                if before != answers {
                    continue; // slow is not away: a long listing
                }
                if scope.source.current().is_queued() {
                    continue; // it was not asked yet
                }
                Some(format!("no answer for {:?}", tolerance.patience))
            }
        };
        if outage.begin(answers) {
            tracing::warn!(source = %scope.shown, "no answer: what is known last is used (staleIfError)");
            if let Some(why) = why {
                scope.silent(&why);
            }
        }
        want(scope);
        return Ok(Told::Stale);
    }
}

/// The moment of the last answer about a name.
pub(crate) fn of_name(names: &meta::View, parent: u64, name: &[u8]) -> Result<Option<u64>, MetaError> {
    Ok(match names.lookup(parent, name)? {
        Lookup::Found { seen_ms, .. } | Lookup::Absent { seen_ms } => Some(seen_ms),
        Lookup::Unknown => None,
    })
}

pub(crate) fn of_listing(names: &meta::View, dir: u64) -> Result<Option<u64>, MetaError> {
    Ok(names.listing(dir)?.filter(|listing| listing.complete).map(|listing| listing.seen_ms))
}

/// Of a file; a directory's attributes are ours.
pub(crate) fn of_attributes(names: &meta::View, ino: u64) -> Result<Option<u64>, MetaError> {
    let attributes = names.attributes(ino)?;
    Ok(attributes.filter(|(a, _)| a.kind != meta::Kind::Directory).map(|(_, seen_ms)| seen_ms))
}

/// Asks the source, for everybody who was given a stale answer, until it answers or nobody wants it any more.
fn want(scope: &Arc<Scope>) {
    if !scope.outage.want(Instant::now()) {
        return;
    }
    let weak = Arc::downgrade(scope);
    tokio::spawn(async move {
        loop {
            let Some(scope) = weak.upgrade() else { return };
            let source = scope.source.current();
            drop(scope); // a probe does not keep the names of a volume that is gone
            let answer = tokio::time::timeout(PROBE, source.check(PROBE)).await;
            let Some(scope) = weak.upgrade() else { return };
            match answer {
                Ok(Ok(())) => scope.answered(),
                Ok(Err(error)) => scope.heard(&error),
                Err(_) => {}
            }
            if !scope.outage.probe_again(Instant::now()) {
                return;
            }
            drop(scope);
            tokio::time::sleep(PAUSE).await;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Does, Scripted};
    use cache::meta::ROOT;
    use proptest::prelude::*;

    /// Everything is out of date at once, and nobody waits long.
    const QUICK: Tolerance = Tolerance {
        ttl: Duration::ZERO,
        stale: Duration::from_secs(3600),
        patience: Duration::from_millis(50),
    };
    const NOW: Freshness = Freshness::Ttl(Duration::ZERO);

    async fn look_up(scope: &Arc<Scope>, tolerance: Option<Tolerance>, name: &[u8]) -> Result<Told, Cause> {
        let question = scope.lookup(ROOT, name, NOW);
        let asking = ask(scope, tolerance, |names| of_name(names, ROOT, name), question);
        tokio::time::timeout(Duration::from_secs(20), asking).await.expect("it waits for ever")
    }

    fn size(scope: &Scope) -> u64 {
        match scope.names.lookup(ROOT, b"f") {
            Ok(Lookup::Found { attributes, .. }) => attributes.size,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_known_is_shown_while_the_source_is_silent_and_the_truth_when_it_answers() {
        for silence in [Does::Nothing, Does::Refuses] {
            let source = Scripted::new(0);
            let (scope, mut changes) = source.scope_and_changes();
            assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Confirmed));
            source.does(silence);
            source.change();
            for _ in 0..1000 {
                assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Stale), "{silence:?}");
                // Absence is known, too.
                assert_eq!(look_up(&scope, Some(QUICK), b"absent").await, Ok(Told::Stale));
            }
            assert_eq!(size(&scope), 1);
            assert!(source.asked() < 50, "{} questions at a source that is away", source.asked());
            source.does(Does::Answers);
            let back = async {
                while look_up(&scope, Some(QUICK), b"f").await == Ok(Told::Stale) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), back).await.expect("its return is not noticed");
            assert_eq!(size(&scope), 2);
            // Said once that it is away, and once that it is back.
            let told: Vec<_> =
                std::iter::from_fn(|| changes.try_recv().ok()).map(|c| c.1.is_some()).collect();
            assert_eq!(told, [true, false], "{silence:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn refusals_are_answers_and_what_nobody_knows_or_tolerates_is_waited_for() {
        let source = Scripted::new(1);
        let scope = source.scope();
        assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Confirmed));
        source.does(Does::Denies);
        assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Err(Cause::Denied));
        source.does(Does::Refuses);
        assert_eq!(look_up(&scope, None, b"f").await, Err(Cause::Unavailable));
        let too_old = Tolerance { stale: Duration::ZERO, ..QUICK };
        assert_eq!(look_up(&scope, Some(too_old), b"f").await, Err(Cause::Unavailable));
        // Of the directory nothing was ever told.
        let dir = scope.names.resolve(b"d0").unwrap().unwrap();
        let listed = ask(&scope, Some(QUICK), |names| of_listing(names, dir), scope.list(dir, NOW)).await;
        assert_eq!(listed, Err(Cause::Unavailable));
        let listed = ask(&scope, Some(QUICK), |names| of_listing(names, ROOT), scope.list(ROOT, NOW)).await;
        assert_eq!(listed, Ok(Told::Stale));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_source_that_answers_others_is_slow_and_not_away() {
        let source = Scripted::new(0);
        let scope = source.scope();
        assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Confirmed));
        source.does(Does::Nothing);
        let patience = Duration::from_secs(1);
        let asking = {
            let (scope, tolerance) = (scope.clone(), Tolerance { patience, ..QUICK });
            tokio::spawn(async move { look_up(&scope, Some(tolerance), b"f").await })
        };
        for _ in 0..60 {
            scope.answered(); // of another question
            tokio::time::sleep(patience / 20).await;
        }
        assert!(!asking.is_finished() && scope.outage.since().is_none());
        source.does(Does::Answers);
        assert_eq!(asking.await.unwrap(), Ok(Told::Confirmed));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_token_that_has_expired_is_one_outage_until_it_is_renewed() {
        let source = Scripted::new(0);
        let (scope, mut changes) = source.scope_and_changes();
        assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Confirmed));
        source.does(Does::Expires);
        assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Stale));
        let (since, before) = (scope.outage.since(), source.asked());
        assert!(since.is_some());
        // Also after probes, which are told at once that it has expired.
        let probed = async {
            while source.asked() < before + 3 {
                assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Stale));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), probed).await.expect("nobody probes");
        assert_eq!(scope.outage.since(), since, "it began anew");
        source.does(Does::Answers);
        scope.source.replace(volume::Credentials::anonymous()).unwrap(); // the renewed one
        let back = async {
            while look_up(&scope, Some(QUICK), b"f").await == Ok(Told::Stale) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), back).await.expect("its return is not noticed");
        let told: Vec<_> = std::iter::from_fn(|| changes.try_recv().ok()).map(|c| c.1.is_some()).collect();
        assert_eq!(told, [true, false]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_queue_of_this_nodes_own_is_no_outage() {
        let source = Scripted::new(0);
        let (scope, mut changes) = source.scope_and_changes();
        assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Confirmed));
        source.does(Does::Queues);
        let asking = {
            let scope = scope.clone();
            tokio::spawn(async move { look_up(&scope, Some(QUICK), b"f").await })
        };
        // As long as it may last, nobody is told that the source is away.
        let patient = async {
            while source.looked_at() < 3 && !asking.is_finished() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), patient)
            .await
            .expect("nobody asks whether it is queued");
        assert!(!asking.is_finished() && scope.outage.since().is_none());
        source.does(Does::IsFull);
        assert_eq!(asking.await.unwrap(), Err(Cause::Unavailable));
        assert!(scope.outage.since().is_none() && changes.try_recv().is_err());
        // What the store does not answer afterwards is one.
        source.does(Does::Refuses);
        assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Stale));
    }

    #[test]
    fn an_answer_at_the_moment_at_which_an_outage_begins_is_not_lost() {
        for round in 0..5000 {
            let outage = Outage::default();
            let start = std::sync::Barrier::new(2);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    start.wait();
                    outage.begin(0);
                });
                start.wait();
                outage.answered();
            });
            assert_eq!(outage.since(), None, "round {round}");
            let answers = outage.answers.load(Ordering::Acquire);
            assert!(outage.begin(answers) && outage.answered(), "round {round}");
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
        let before = outage.answers.load(Ordering::Acquire);
        assert!(!outage.answered());
        assert!(!outage.begin(before) && outage.since().is_none());
        assert!(outage.begin(before + 1) && outage.since().is_some());
        assert!(!outage.begin(before + 1), "it begins once");
        assert!(outage.answered() && outage.since().is_none());
    }

    #[test]
    fn one_probes_for_all_as_long_as_anybody_wants_it() {
        let (outage, now) = (Outage::default(), Instant::now());
        assert!(outage.begin(0));
        assert!(outage.want(now) && !outage.want(now));
        assert!(outage.probe_again(now + WANTED / 2));
        assert!(!outage.probe_again(now + WANTED));
        assert!(outage.want(now + WANTED), "whoever comes begins anew");
        outage.answered();
        assert!(!outage.probe_again(now + WANTED));
    }
}
