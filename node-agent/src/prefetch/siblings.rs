//! Small files, fetched before a program asks for them.
//!
//! A training epoch reads thousands of small files in a random order, and each of them costs a round
//! trip to the store. What can be foreseen is that a directory of which many files were asked for will be read to its
//! end: so its other files are fetched ahead, in the order of its listing, the more of them the more were missed.
//! A reader of a few files of a directory pays for a few more.

use super::ledger::Ledger;
use crate::lock::lock;
use crate::volumes::scope::Scope;
use cache::data::{Engine, ReadOptions, Usage};
use cache::meta::Kind;
use inflight::carry;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use volume::ScopeId;

/// Files up to this size are fetched whole when they are first read, bytes; larger ones have readahead of their own.
pub(crate) const SMALL: u64 = 1 << 20;
const DIRECTORIES_MAX: usize = 4096;
/// Fetching ahead must not evict: it ends when this much of a quota is used.
const FULL_PERCENT: u64 = 85;

pub(crate) struct SiblingPrefetch {
    engine: Arc<Engine>,
    directories: Mutex<HashMap<(ScopeId, u64), Ledger>>,
}

impl SiblingPrefetch {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, directories: Mutex::default() }
    }

    /// A small file of `scope` had to be fetched for a reader. To be called within the runtime.
    pub(crate) fn missed(self: &Arc<Self>, scope: &Arc<Scope>, ino: u64, options: ReadOptions) {
        if options.readahead_bytes == Some(0) {
            return;
        }
        let Ok(Some(dir)) = scope.names.parent(ino) else { return };
        let now = Instant::now();
        let mut directories = self.lock();
        if directories.len() >= DIRECTORIES_MAX {
            directories.retain(|_, ledger| !ledger.is_forgotten(now));
            if directories.len() >= DIRECTORIES_MAX {
                return;
            }
        }
        let ledger = directories.entry((scope.id.clone(), dir)).or_insert_with(|| Ledger::new(now));
        if ledger.missed(now) {
            drop(directories);
            let (me, scope) = (self.clone(), scope.clone());
            tokio::spawn(carry(async move { me.fetch(&scope, dir, options).await }));
        }
    }

    /// Pays what is owed to a directory, until nothing is or it has no more files.
    async fn fetch(self: Arc<Self>, scope: &Arc<Scope>, dir: u64, options: ReadOptions) {
        let key = (scope.id.clone(), dir);
        loop {
            let has_room = has_room(&self.engine.usage(), &scope.id);
            let due = self.lock().get_mut(&key).and_then(|ledger| ledger.due(has_room));
            let Some((owed, after)) = due else { return };
            let (files, last) = next_files(scope, dir, after, owed as usize);
            let found = files.len() as u32;
            let goes_on = |ledger: &mut Ledger| ledger.found(found, last, Instant::now());
            if !self.lock().get_mut(&key).is_some_and(goes_on) {
                return;
            }
            for (ino, version) in files {
                let Ok(file) = scope.file(ino, version, options) else { continue };
                // Its record is of an agent before this one.
                if file.is_whole() {
                    self.lock().entry(key.clone()).and_modify(Ledger::was_there);
                    tokio::task::yield_now().await;
                    continue;
                }
                let Ok(slot) = scope.ahead.clone().acquire_owned().await else { return };
                let (me, key) = (self.clone(), key.clone());
                tokio::spawn(carry(async move {
                    let failed = file.whole().await.is_err(); // its reader will get the error
                    drop(slot);
                    if let Some(ledger) = me.lock().get_mut(&key).filter(|_| failed) {
                        ledger.failed();
                    }
                }));
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(ScopeId, u64), Ledger>> {
        lock(&self.directories)
    }
}

/// In a tier, and in what the scope may have.
fn has_room(usage: &Usage, scope: &ScopeId) -> bool {
    let below = |bytes: u64, quota: u64| bytes < quota / 100 * FULL_PERCENT;
    let limited =
        usage.scopes.iter().find(|s| s.scope == *scope).and_then(|s| Some((s.bytes, s.limit_bytes?)));
    usage.tiers.iter().any(|t| below(t.bytes, t.quota_bytes) && below(t.inodes, t.quota_inodes))
        && limited.is_none_or(|(bytes, limit)| below(bytes, limit))
}

/// The next small files of a directory that are not in the cache (inode number and version), at most `most`, and the
/// last name that was looked at. Empty at the end, or without a complete listing.
fn next_files(scope: &Scope, dir: u64, after: Option<u64>, most: usize) -> (Vec<(u64, u32)>, Option<u64>) {
    let (mut files, mut last) = (Vec::new(), after);
    let read = scope.names.read_dir(dir, after, &mut |_, attributes| {
        last = Some(attributes.ino);
        let small = attributes.kind == Kind::File && (1..=SMALL).contains(&attributes.size);
        if small && !attributes.cached.is_some_and(|cached| scope.has(&cached)) {
            files.push((attributes.ino, attributes.version));
        }
        files.len() < most
    });
    match read {
        Ok(Some(())) => (files, last),
        // The name to go on from has vanished, or there is no listing: the next miss begins anew.
        Ok(None) | Err(_) => (Vec::new(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefetch::ledger::PATIENCE;
    use crate::testing::{SMALL_BYTES, Scripted};
    use cache::data::{ScopeUsage, TierUsage};
    use cache::meta::ROOT;
    use std::time::Duration;

    /// Fetched so far, once no more come: what is owed was paid.
    async fn fetched(scripted: &Scripted, at_least: u64) -> u64 {
        let all = async {
            while scripted.sent() < at_least * SMALL_BYTES {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), all).await.expect("what is owed is fetched");
        scripted.sent() / SMALL_BYTES
    }

    /// Reads a file, and tells its scope as the index does: its bytes are there a moment before the index says so.
    async fn becomes_whole(scope: &Scope, ino: u64, version: u32) {
        let file = scope.file(ino, version, ReadOptions::default()).unwrap();
        file.whole().await.unwrap();
        while !scope.engine().is_whole(&scope.id, file.id()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        scope.became_whole(&[(file.id(), file.root())]).unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_owed_to_a_directory_is_fetched_and_no_more() {
        let scripted = Scripted::with_files(2, 200);
        let scope = scripted.scope();
        let ttl = volume::Freshness::Ttl(Duration::from_secs(60));
        scope.list(cache::meta::ROOT, ttl).await.unwrap();
        let siblings = Arc::new(SiblingPrefetch::new(scope.engine().clone()));
        let ino = scope.names.resolve(b"s7").unwrap().unwrap();
        let options = ReadOptions::default();
        (0..PATIENCE).for_each(|_| siblings.missed(&scope, ino, options));
        assert!(siblings.lock().values().all(|ledger| !ledger.running && ledger.owed == 0));
        // Without readahead nothing is fetched ahead either.
        let none = ReadOptions { readahead_bytes: Some(0), ..ReadOptions::default() };
        siblings.missed(&scope, ino, none);
        assert_eq!(siblings.lock().values().map(|ledger| ledger.misses).sum::<u32>(), PATIENCE);
        siblings.missed(&scope, ino, options);
        let first = u64::from(PATIENCE.div_ceil(2));
        assert_eq!(fetched(&scripted, first).await, first);
        // Much more than there is: to the end, each file once, and then the directory begins anew.
        while siblings.lock().values().all(|ledger| ledger.misses > 0) {
            siblings.missed(&scope, ino, options);
            tokio::task::yield_now().await;
        }
        assert_eq!(fetched(&scripted, 200).await, 200);
    }

    /// An agent that has followed another one knows from no record that they are there.
    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_there_already_takes_nothing_of_what_is_owed() {
        let scripted = Scripted::with_files(2, 200);
        let scope = scripted.scope();
        scope.list(ROOT, volume::Freshness::Ttl(Duration::from_secs(60))).await.unwrap();
        let there = next_files(&scope, ROOT, None, 100).0;
        for (ino, version) in &there {
            scope.file(*ino, *version, ReadOptions::default()).unwrap().whole().await.unwrap();
        }
        assert_eq!(fetched(&scripted, 100).await, 100);
        let siblings = Arc::new(SiblingPrefetch::new(scope.engine().clone()));
        (0..=PATIENCE).for_each(|_| siblings.missed(&scope, there[0].0, ReadOptions::default()));
        let owed = u64::from(PATIENCE.div_ceil(2));
        assert_eq!(fetched(&scripted, 100 + owed).await, 100 + owed);
    }

    #[test]
    fn there_is_room_below_the_percentage_of_one_tier_and_of_the_scopes_limit() {
        let scope = |digit: &str| ScopeId::parse(&digit.repeat(32)).unwrap();
        let tier = |bytes, inodes| TierUsage {
            name: "ssd".into(),
            bytes,
            inodes,
            quota_bytes: 1000,
            quota_inodes: 100,
            roots: Vec::new(),
        };
        let limited = |digit: &str, bytes, limit_bytes| ScopeUsage {
            scope: scope(digit),
            bytes,
            files: 1,
            limit_bytes,
        };
        let room = |tiers: &[TierUsage], scopes: &[ScopeUsage]| {
            has_room(&Usage { tiers: tiers.to_vec(), scopes: scopes.to_vec() }, &scope("a"))
        };
        let (free, full, many) = (|| tier(849, 84), || tier(850, 0), || tier(0, 85));
        assert!(room(&[free()], &[]) && !room(&[full()], &[]) && !room(&[many()], &[]));
        assert!(room(&[full(), many(), free()], &[]) && !room(&[many(), full()], &[]));
        assert!(!room(&[], &[]));
        for (bytes, limit, has) in [(84, Some(100), true), (85, Some(100), false), (9000, None, true)] {
            assert_eq!(room(&[free()], &[limited("a", bytes, limit)]), has, "{bytes} of {limit:?}");
        }
        assert!(room(&[free()], &[limited("b", 100, Some(100))]), "another scope's limit");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn small_files_that_are_not_cached_come_next_so_many_at_a_time() {
        let (scripted, most) = (Scripted::with_files(2, 5), 2);
        let scope = scripted.scope();
        let ttl = volume::Freshness::Ttl(Duration::from_secs(60));
        assert_eq!(next_files(&scope, ROOT, None, most), (vec![], None), "there is no listing");
        scope.list(ROOT, ttl).await.unwrap();
        let (mut seen, mut after) = (Vec::new(), None);
        for count in [2, 2, 1] {
            let (files, last) = next_files(&scope, ROOT, after, most);
            assert_eq!(files.len(), count);
            seen.extend(files);
            after = last;
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!((seen.len(), next_files(&scope, ROOT, after, most).0.len()), (5, 0), "each once");
        let (ino, version) = seen[0];
        becomes_whole(&scope, ino, version).await;
        let left = next_files(&scope, ROOT, None, 10).0;
        assert!(left.len() == 4 && !left.contains(&(ino, version)), "{left:?}");
    }

    /// As it happens to a data set between two jobs: its volume goes, others take its place in the cache, it comes again.
    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_given_up_while_nobody_looked_comes_again() {
        let scripted = Scripted::with_files(2, 3);
        let scope = scripted.scope();
        scope.list(ROOT, volume::Freshness::Ttl(Duration::from_secs(60))).await.unwrap();
        let mut found = next_files(&scope, ROOT, None, 10).0;
        found.sort_unstable();
        for (ino, version) in &found {
            becomes_whole(&scope, *ino, *version).await;
        }
        assert_eq!(next_files(&scope, ROOT, None, 10).0, []);
        scope.engine().evict(None, b"").await;
        let mut again = next_files(&scope, ROOT, None, 10).0;
        again.sort_unstable();
        assert_eq!(again, found);
    }

    #[tokio::test]
    async fn a_file_is_small_from_one_byte_to_the_limit() {
        for (bytes, is_small) in [(0, false), (1, true), (SMALL, true), (SMALL + 1, false)] {
            let scripted = Scripted::new(2);
            scripted.resize(bytes);
            let scope = scripted.scope();
            scope.list(ROOT, volume::Freshness::Ttl(Duration::from_secs(60))).await.unwrap();
            assert_eq!(next_files(&scope, ROOT, None, 10).0.len(), usize::from(is_small), "{bytes}");
        }
    }
}
