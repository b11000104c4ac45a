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
//! While it is away no reader waits: what is known and not too old is the answer, at once, and one probe at a time asks
//! the source for all of them. The worker gives such an answer to the kernel for no time at all, so the next call asks
//! again. Absent names are known, too: a name that the last answer lacks stays absent.
//!
//! Only for silence and failures of the store, and for session tokens that have expired: a question that waits for the
//! next one waits as for a store that is away. A refusal (403), an absence (404) and a change are answers. What was
//! never asked for before waits as ever; so do bytes that are not in the cache, and what waits in this node's own
//! queue: of that the store knows nothing.

use super::outage::Tolerance;
use crate::volumes::scope::{Scope, fresh};
use cache::meta::{self, Lookup, MetaError};
use link::Cause;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use volume::Freshness;

/// A probe, and the pause after it.
const PROBE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_secs(1);

/// Where an answer came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Confirmed,
    Stale,
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
        return confirmed(question.await); // which asks no source
    }
    let outage = &scope.outage;
    if outage.since().is_some() {
        want(scope);
        return Ok(Told::Stale);
    }
    tokio::pin!(question);
    let mut asked = outage.asks();
    let unasked = outage.unasked.load(Ordering::Acquire);
    let mut silent_since = Instant::now();
    loop {
        let limit = silent_since + tolerance.patience;
        let why = match tokio::time::timeout_at(limit.into(), &mut question).await {
            Ok(Err(cause)) if outage.unasked.load(Ordering::Acquire) != unasked => return Err(cause),
            // Said already, unless it was asked before the last answer.
            Ok(Err(Cause::Unavailable)) => "a question failed".to_owned(),
            Ok(done) => return confirmed(done),
            Err(_) => {
                let before = std::mem::replace(&mut asked, outage.asks());
                if before != asked {
                    // Slow is not away: a long listing. But one answer buys no second patience: it came long ago.
                    silent_since = silent_since.max(outage.last_answer());
                    continue;
                }
                if scope.source.is_queued() {
                    silent_since = Instant::now();
                    continue; // it was not asked yet
                }
                format!("no answer for {:?}", tolerance.patience)
            }
        };
        if outage.begin(asked) {
            tracing::warn!(source = %scope.shown, "no answer: what is known last is used (staleIfError)");
            scope.silent(&why);
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

/// Asks the source on behalf of all readers with a stale answer, until it answers or no reader wants it any more.
fn want(scope: &Arc<Scope>) {
    if !scope.outage.want(Instant::now()) {
        return;
    }
    let weak = Arc::downgrade(scope);
    tokio::spawn(async move {
        loop {
            let Some(scope) = weak.upgrade() else { return };
            let source = scope.source.handle();
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

    /// Everything is out of date at once, and no reader waits long.
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
            let reported: Vec<_> =
                std::iter::from_fn(|| changes.try_recv().ok()).map(|c| c.1.is_some()).collect();
            assert_eq!(reported, [true, false], "{silence:?}");
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
        // The source has never answered for this directory.
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
    async fn what_was_asked_during_an_outage_and_fails_after_it_is_no_other_outage() {
        let source = Scripted::new(0);
        let (scope, mut changes) = source.scope_and_changes();
        assert_eq!(look_up(&scope, None, b"f").await, Ok(Told::Confirmed));
        source.does(Does::Nothing);
        let before = source.asked();
        let asking = {
            let scope = scope.clone();
            tokio::spawn(async move { look_up(&scope, None, b"f").await })
        };
        while source.asked() == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        scope.silent("no answer");
        scope.answered(); // the first question that it answers is another one
        source.does(Does::Refuses);
        assert_eq!(asking.await.unwrap(), Err(Cause::Unavailable));
        let mut reported = move || -> Vec<_> {
            std::iter::from_fn(|| changes.try_recv().ok()).map(|c| c.1.is_some()).collect()
        };
        assert_eq!(reported(), [true, false]);
        assert_eq!(look_up(&scope, None, b"f").await, Err(Cause::Unavailable));
        assert_eq!(reported(), [true], "it is asked anew, and is away");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_reader_is_patient_from_the_last_answer_on_and_not_twice() {
        let source = Scripted::new(0);
        let scope = source.scope();
        assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Confirmed));
        source.does(Does::Nothing);
        let patience = Duration::from_secs(3);
        let asking = || {
            let (scope, tolerance) = (scope.clone(), Tolerance { patience, ..QUICK });
            tokio::spawn(async move { look_up(&scope, Some(tolerance), b"f").await })
        };
        let before = source.asked();
        let first = asking();
        while source.asked() == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        scope.answered(); // of another question, the last before it falls silent
        assert_eq!(asking().await.unwrap(), Ok(Told::Stale));
        let first =
            tokio::time::timeout(patience * 2 / 3, first).await.expect("it waits for longer than the second");
        assert_eq!(first.unwrap(), Ok(Told::Stale));
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
        // Also after probes, which learn at once that the token has expired.
        let probed = async {
            while source.asked() < before + 3 {
                assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Stale));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), probed).await.expect("no probe comes");
        assert_eq!(scope.outage.since(), since, "it began anew");
        source.does(Does::Answers);
        scope.source.replace(volume::Credentials::anonymous()); // the renewed one
        let back = async {
            while look_up(&scope, Some(QUICK), b"f").await == Ok(Told::Stale) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), back).await.expect("its return is not noticed");
        let reported: Vec<_> =
            std::iter::from_fn(|| changes.try_recv().ok()).map(|c| c.1.is_some()).collect();
        assert_eq!(reported, [true, false]);
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
        // Within `staleIfError` no reader learns that the source is away.
        let patient = async {
            while source.looked_at() < 3 && !asking.is_finished() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), patient)
            .await
            .expect("no look at whether it is queued");
        assert!(!asking.is_finished() && scope.outage.since().is_none());
        source.does(Does::IsFull);
        assert_eq!(asking.await.unwrap(), Err(Cause::Unavailable));
        assert!(scope.outage.since().is_none() && changes.try_recv().is_err());
        // What the store does not answer afterwards is one.
        source.does(Does::Refuses);
        assert_eq!(look_up(&scope, Some(QUICK), b"f").await, Ok(Told::Stale));
    }
}
