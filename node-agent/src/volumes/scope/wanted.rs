//! Which listings readers wait for. A source may have names without end: a listing without a waiting reader ends.
//!
//! Not at once: a reader that was killed, or was impatient, may come back, and finds the listing further or done. A
//! listing that was begun for the sake of single look-ups has no caller that waits for it; it is wanted as long as
//! there are look-ups.

use crate::lock::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// For so long a listing goes on after the last one that wanted it.
const LINGER: Duration = if cfg!(test) { Duration::from_millis(200) } else { Duration::from_secs(30) };

#[derive(Debug, Default)]
pub(super) struct Wanted(Mutex<HashMap<u64, Want>>);

/// Of one directory. There is one while a caller waits, or a listing is under way.
#[derive(Debug)]
struct Want {
    waiters: usize,
    under_way: bool,
    last: Instant,
}

impl Wanted {
    /// A caller waits for the listing of this directory, until the answer is dropped.
    pub(super) fn wait(&self, dir: u64) -> Waiter<'_> {
        lock(&self.0).entry(dir).or_insert_with(Want::new).waiters += 1;
        Waiter { wanted: self, dir }
    }

    /// A look-up has asked for a name in it.
    pub(super) fn touch(&self, dir: u64) {
        if let Some(want) = lock(&self.0).get_mut(&dir) {
            want.last = Instant::now();
        }
    }

    pub(super) fn begins(&self, dir: u64) {
        lock(&self.0).entry(dir).or_insert_with(Want::new).under_way = true;
    }

    pub(super) fn ends(&self, dir: u64) {
        let mut all = lock(&self.0);
        if let Some(want) = all.get_mut(&dir) {
            want.under_way = false;
            if want.waiters == 0 {
                all.remove(&dir);
            }
        }
    }

    /// Shall a listing of it that is under way go on?
    pub(super) fn is_wanted(&self, dir: u64) -> bool {
        lock(&self.0).get(&dir).is_some_and(|want| want.waiters > 0 || want.last.elapsed() < LINGER)
    }
}

impl Want {
    fn new() -> Self {
        Self { waiters: 0, under_way: false, last: Instant::now() }
    }
}

pub(super) struct Waiter<'a> {
    wanted: &'a Wanted,
    dir: u64,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut all = lock(&self.wanted.0);
        let Some(want) = all.get_mut(&self.dir) else { return };
        (want.waiters, want.last) = (want.waiters.saturating_sub(1), Instant::now());
        if want.waiters == 0 && !want.under_way {
            all.remove(&self.dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Does, Scripted};
    use cache::meta::ROOT;
    use link::Cause;
    use volume::Freshness;

    const TTL: Freshness = Freshness::Ttl(Duration::from_secs(60));
    const LIMIT: Duration = Duration::from_secs(20);

    /// Is the source asked nothing for so long that no reader misses it?
    async fn falls_silent(source: &Scripted) -> bool {
        let (begun, mut last, mut since) = (Instant::now(), source.asked(), Instant::now());
        while begun.elapsed() < LIMIT {
            if source.asked() != last {
                (last, since) = (source.asked(), Instant::now());
            }
            if since.elapsed() > 2 * LINGER {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        false
    }

    async fn goes_on(source: &Scripted) {
        let from = source.asked();
        let wait = async {
            while source.asked() < from + 5 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(LIMIT, wait).await.expect("no page is asked for");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_listing_without_end_ends_when_nobody_waits_for_it() {
        let source = Scripted::new(0);
        let scope = source.scope();
        source.does(Does::Endless);
        let listing = |scope: &std::sync::Arc<crate::volumes::scope::Scope>| {
            let scope = scope.clone();
            tokio::spawn(async move { scope.list(ROOT, TTL).await })
        };
        let first = listing(&scope);
        goes_on(&source).await;
        // A reader that comes back finds it under way, and waits for it as long as it likes.
        first.abort();
        let second = listing(&scope);
        tokio::time::sleep(3 * LINGER).await;
        goes_on(&source).await;
        assert_eq!(source.begun(), 1, "it began anew");
        second.abort();
        assert!(falls_silent(&source).await, "{} pages, and no reader waits", source.asked());
        assert!(lock(&scope.wanted.0).is_empty());
        // The next question is answered.
        source.does(Does::Answers);
        assert_eq!(scope.list(ROOT, TTL).await, Ok(()));
        assert!(lock(&scope.wanted.0).is_empty());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_listing_for_the_sake_of_look_ups_ends_with_them() {
        let source = Scripted::new(0);
        let scope = source.scope();
        source.does(Does::Endless);
        for n in 0..20 {
            // Each of a name of its own: nothing is known of it.
            scope.lookup(ROOT, format!("absent{n}").as_bytes(), TTL).await.unwrap();
        }
        goes_on(&source).await;
        assert!(falls_silent(&source).await, "{} pages, and no look-up waits", source.asked());
        assert!(lock(&scope.wanted.0).is_empty());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_listing_ends_with_the_last_volume() {
        let source = Scripted::new(0);
        let scope = source.scope();
        source.does(Does::Endless);
        let waits = {
            let scope = scope.clone();
            tokio::spawn(async move { scope.list(ROOT, TTL).await })
        };
        goes_on(&source).await;
        scope.source.access.end();
        let answer = tokio::time::timeout(LIMIT, waits).await.expect("it goes on for a volume that is gone");
        assert_eq!(answer.unwrap(), Err(Cause::Unavailable));
        assert!(falls_silent(&source).await);
    }
}
