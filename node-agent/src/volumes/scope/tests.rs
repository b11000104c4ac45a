use super::{AWAY_CHARS_MAX, Scope};
use crate::prefetch::ledger::at_once;
use crate::testing::{Does, Scripted};
use cache::data::{File, ReadOptions};
use cache::meta::{Cached, Lookup, ROOT};
use link::Cause;
use std::sync::Arc;
use std::time::Duration;
use volume::{Freshness, Parameters};

const SOON: Duration = Duration::from_secs(20);
const TTL: Freshness = Freshness::Ttl(Duration::from_secs(60));

/// It is asked for, so that no report of it can be lost, and holds for volumes that come later.
#[tokio::test]
async fn whether_its_source_is_away_is_known_for_each_volume_as_it_feels_it() {
    let scripted = Scripted::new(1);
    let scope = scripted.scope();
    let strict = Parameters { freshness: Freshness::Strict, ..Parameters::default() };
    let ttl = Freshness::Ttl(Duration::from_secs(60));
    let ttl = Parameters { freshness: ttl, stale_if_error: Duration::from_secs(60), ..Parameters::default() };
    assert_eq!((scope.away(&strict), scope.away(&ttl)), (None, None));
    scope.silent(&"long ".repeat(10_000));
    let (strict_away, ttl_away) = (scope.away(&strict).unwrap(), scope.away(&ttl).unwrap());
    assert_eq!((strict_away.stale, ttl_away.stale), (false, true));
    assert!(ttl_away.why.starts_with("long ") && ttl_away.why.len() <= AWAY_CHARS_MAX);
    scope.answered();
    assert_eq!((scope.away(&strict), scope.away(&ttl)), (None, None));
}

#[test]
fn listings_that_never_end_hold_no_threads() {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).max_blocking_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let frozen = Scripted::new(8);
        let scope = frozen.scope();
        scope.list(ROOT, TTL).await.unwrap();
        frozen.does(Does::FirstPage);
        let listings: Vec<_> = (0..8)
            .map(|k| {
                let (scope, name) = (scope.clone(), format!("d{k}"));
                tokio::spawn(async move {
                    let ino = scope.names.resolve(name.as_bytes()).unwrap().unwrap();
                    scope.list(ino, TTL).await
                })
            })
            .collect();
        frozen.asked_for_more(8).await;
        // What another source has answered is stored by a thread that there must be.
        let healthy = Scripted::new(1);
        let other = healthy.scope();
        let head = tokio::time::timeout(SOON, other.head(ROOT, b"d0"));
        head.await.expect("no thread was left").unwrap();
        listings.iter().for_each(|task| task.abort());
    });
    runtime.shutdown_background();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_ends_with_the_last_volume_of_its_scope() {
    for endless in [Does::EmptyPages, Does::FirstPage] {
        let source = Scripted::new(0);
        source.does(endless);
        let scope = source.scope();
        let weak = Arc::downgrade(&scope);
        let listing = tokio::spawn(async move { scope.list(ROOT, TTL).await });
        source.asked_for_more(1).await;
        // As when its last mount goes, and no reader waits for the answer any more.
        weak.upgrade().unwrap().source.access.end();
        listing.abort();
        let gone = async {
            while weak.strong_count() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, gone).await.unwrap_or_else(|_| panic!("{endless:?}: it is open for ever"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_that_does_not_get_on_is_an_error() {
    for endless in [Does::SamePage, Does::EmptyPages] {
        let source = Scripted::new(0);
        let scope = source.scope();
        scope.list(ROOT, TTL).await.unwrap();
        source.does(endless);
        let listed = tokio::time::timeout(3 * SOON, scope.list(ROOT, Freshness::Strict)).await;
        assert_eq!(listed.unwrap_or_else(|_| panic!("{endless:?}: it never ends")), Err(Cause::Unavailable));
        assert!(scope.names.listing(ROOT).unwrap().unwrap().complete, "the old one is in force");
    }
}

async fn whole(scope: &Arc<Scope>) -> Arc<File> {
    scope.head(ROOT, b"f").await.unwrap();
    let Lookup::Found { attributes, .. } = scope.names.lookup(ROOT, b"f").unwrap() else { panic!("no file") };
    let file = scope.current(&attributes, ReadOptions::default()).unwrap();
    file.whole().await.unwrap();
    file
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_forget_every_file_of_a_disk_that_hangs_though_the_store_of_names_takes_nothing() {
    let source = Scripted::new(0);
    let scope = source.scope();
    let mut files = Vec::new();
    for bytes in 1..=5 {
        source.resize(bytes);
        files.push(whole(&scope).await);
    }
    let mut expected: Vec<u64> = files.iter().map(|file| file.id()).collect();
    scope.release(); // from now on each write fails
    let mut held = scope.disk(files[0].root(), false);
    held.sort_unstable();
    expected.sort_unstable();
    assert_eq!(held, expected);
    assert!(scope.disk_fails(files[0].root()));
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_open_whole_files_of_a_disk_by_themselves_while_it_works() {
    let source = Scripted::new(0);
    source.resize(3);
    let scope = source.scope();
    let file = whole(&scope).await;
    let ino = scope.names.resolve(b"f").unwrap().unwrap();
    let cached = || scope.names.last_attributes(ino).unwrap().unwrap().cached;
    scope.disk(file.root(), true);
    assert_eq!(cached().map(|cached| (cached.root, cached.file)), Some((file.root(), file.id())));
    assert_eq!((scope.disk(file.root() + 1, false), cached().is_some()), (Vec::new(), true), "another disk");
    scope.disk(file.root(), false);
    assert_eq!(cached(), None);
    // Of a version of which nothing has arrived yet.
    source.resize(5);
    scope.head(ROOT, b"f").await.unwrap();
    let Lookup::Found { attributes, .. } = scope.names.lookup(ROOT, b"f").unwrap() else { panic!("no file") };
    let partial = scope.current(&attributes, ReadOptions::default()).unwrap();
    assert!(scope.disk(partial.root(), true).contains(&partial.id()) && !partial.is_whole());
    assert_eq!(cached(), None, "its worker would read holes");
}

#[tokio::test]
async fn attributes_are_asked_for_when_they_are_out_of_date_or_must_be_sure() {
    let source = Scripted::new(0);
    source.resize(3);
    let scope = source.scope();
    scope.head(ROOT, b"f").await.unwrap();
    let ino = scope.names.resolve(b"f").unwrap().unwrap();
    let size = || scope.names.last_attributes(ino).unwrap().unwrap().size;
    source.resize(5);
    scope.attributes(ino, TTL, false).await.unwrap();
    assert_eq!(size(), 3, "fresh enough");
    scope.attributes(ino, TTL, true).await.unwrap();
    assert_eq!(size(), 5, "fresh, and its file was seen to have changed");
    source.resize(7);
    scope.attributes(ino, Freshness::Strict, false).await.unwrap();
    assert_eq!(size(), 7);
}

#[test]
fn of_directories_without_end_only_so_many_are_counted() {
    let mut listed = std::collections::HashMap::new();
    (0..100).for_each(|dir| super::note(&mut listed, dir, 1, 10));
    assert_eq!(listed.len(), 10);
    super::note(&mut listed, 3, 7, 10);
    assert_eq!(listed.values().sum::<u64>(), 9 + 7, "those that are counted stay up to date");
}

#[tokio::test]
async fn a_look_up_brings_a_small_directory_whole_and_a_strict_one_asks_for_its_name() {
    let source = Scripted::new(3);
    let scope = source.scope();
    for name in [&b"d0"[..], b"d1", b"absent"] {
        scope.lookup(ROOT, name, TTL).await.unwrap();
        assert_eq!((source.begun(), source.asked()), (1, 1), "one listing answers all");
    }
    for asked in 2..4 {
        scope.lookup(ROOT, b"d0", Freshness::Strict).await.unwrap();
        assert_eq!((source.begun(), source.asked()), (1, asked), "what is opened is asked for");
    }
    scope.list(ROOT, TTL).await.unwrap();
    assert_eq!(source.begun(), 1, "it is fresh enough");
    scope.list(ROOT, Freshness::Strict).await.unwrap();
    assert_eq!(source.begun(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_of_many_pages_is_asked_for_its_names_and_listed_after_some_of_them() {
    let source = Scripted::new(20);
    source.does(Does::FirstPage);
    let scope = source.scope();
    let names = |k: u32| format!("d{k}").into_bytes();
    for k in 0..super::LOOKUPS_BEFORE_LISTING - 1 {
        scope.lookup(ROOT, &names(k), TTL).await.unwrap();
    }
    // One page and each of the names.
    assert_eq!((source.begun(), source.asked()), (1, super::LOOKUPS_BEFORE_LISTING as usize));
    scope.lookup(ROOT, &names(super::LOOKUPS_BEFORE_LISTING), TTL).await.unwrap();
    source.asked_for_more(1).await;
    assert_eq!(source.begun(), 2, "all of it");
    scope.lookup(ROOT, &names(19), TTL).await.unwrap();
    assert_eq!(source.begun(), 2, "once");
    scope.source.access.end();
}

#[tokio::test]
async fn paths_are_those_of_the_source() {
    let source = Scripted::new(1);
    let scope = source.scope();
    scope.list(ROOT, TTL).await.unwrap();
    let dir = scope.names.resolve(b"d0").unwrap().unwrap();
    assert_eq!(scope.child_path(ROOT, b"x").unwrap(), b"x");
    assert_eq!(scope.child_path(dir, b"x").unwrap(), b"d0/x");
    assert_eq!(scope.child_path(4711, b"x"), Err(Cause::Stale));
    let entry = store::Entry {
        name: b"deep".to_vec(),
        kind: store::Kind::Directory,
        modified_ns: 0,
        permissions: None,
    };
    scope.metadata.put(dir, &super::incoming(entry)).unwrap();
    let deep = scope.names.resolve(b"d0/deep").unwrap().unwrap();
    assert_eq!(scope.parent_and_name(dir).unwrap(), Some((ROOT, b"d0".to_vec())));
    assert_eq!(scope.parent_and_name(deep).unwrap(), Some((dir, b"deep".to_vec())));
    assert_eq!(scope.parent_and_name(4711).unwrap(), None);
}

#[test]
fn what_was_seen_is_fresh_for_less_than_its_ttl_for_ever_or_never() {
    let fresh = |freshness, age| super::fresh(freshness, 1000, 1000 + age);
    let ttl = Freshness::Ttl(Duration::from_millis(50));
    assert_eq!([0, 49, 50, 51].map(|age| fresh(ttl, age)), [true, true, false, false]);
    assert!(fresh(Freshness::Static, u64::MAX - 1000) && !fresh(Freshness::Strict, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_file_of_a_version_is_found_while_a_reader_may_have_it() {
    let source = Scripted::new(1);
    source.resize(3);
    let scope = source.scope();
    scope.list(ROOT, TTL).await.unwrap();
    let [ino, dir] = [b"f" as &[u8], b"d0"].map(|name| scope.names.resolve(name).unwrap().unwrap());
    let version = scope.names.last_attributes(ino).unwrap().unwrap().version;
    assert_eq!(scope.key(dir, 0), Err(Cause::Internal));
    assert_eq!((scope.key(ino, version + 1), scope.key(4711, 1)), (Err(Cause::Stale), Err(Cause::Stale)));
    assert_eq!(scope.cached_bytes(ino, version), Ok(0));
    let file = whole(&scope).await;
    assert_eq!(
        (file.id(), scope.cached_bytes(ino, version)),
        (scope.file(ino, version, ReadOptions::default()).unwrap().id(), Ok(3))
    );
    // Past the cache.
    for (offset, len, bytes) in [(0, 9, 3), (1, 1, 1), (2, 1, 1), (3, 1, 0), (u64::MAX, 1, 0), (0, 0, 0)] {
        assert_eq!(
            scope.direct(ino, version, offset, len).await.unwrap().len(),
            bytes,
            "{len} from {offset}"
        );
    }
    // The source has another one by now.
    source.resize(5);
    scope.head(ROOT, b"f").await.unwrap();
    let old = scope.key(ino, version).unwrap();
    assert_eq!((old.size, scope.file(ino, version, ReadOptions::default()).unwrap().id()), (3, file.id()));
    let now = scope.names.last_attributes(ino).unwrap().unwrap().version;
    assert_eq!((now != version, scope.key(ino, now).unwrap().size), (true, 5));
    // The largest that there is.
    source.resize(volume::FILE_BYTES_MAX);
    scope.head(ROOT, b"f").await.unwrap();
    let version = scope.names.last_attributes(ino).unwrap().unwrap().version;
    assert_eq!(scope.key(ino, version).unwrap().size, volume::FILE_BYTES_MAX);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_file_at_which_a_name_points_takes_its_place_away_when_it_goes() {
    let source = Scripted::new(0);
    source.resize(3);
    let scope = source.scope();
    let first = whole(&scope).await;
    scope.became_whole(&[(first.id(), first.root())]).unwrap();
    let ino = scope.names.resolve(b"f").unwrap().unwrap();
    let cached = || scope.names.last_attributes(ino).unwrap().unwrap().cached.map(|cached| cached.file);
    assert_eq!(cached(), Some(first.id()));
    scope.became_gone(first.id() + 1, b"f").unwrap();
    assert_eq!(cached(), Some(first.id()), "another file");
    source.resize(5);
    let second = whole(&scope).await;
    scope.became_whole(&[(second.id(), second.root())]).unwrap();
    scope.became_gone(first.id(), b"f").unwrap();
    assert_eq!(cached(), Some(second.id()), "the one before");
    scope.became_gone(second.id(), b"f").unwrap();
    assert_eq!(cached(), None);
    // Nor of a file that was whole before the scope was opened, and that nobody has opened since.
    let version = scope.names.last_attributes(ino).unwrap().unwrap().version;
    let before = Cached { generation: scope.generation, root: 0, file: 77 };
    scope.metadata.set_cached(ino, version, Some(before)).unwrap();
    scope.became_gone(78, b"f").unwrap();
    assert_eq!((cached(), scope.has(&before)), (Some(77), false));
    scope.became_gone(77, b"f").unwrap();
    assert_eq!(cached(), None);
    // Nothing is pointed at on a disk that fails.
    let third = whole(&scope).await;
    scope.disk(third.root(), false);
    scope.became_whole(&[(third.id(), third.root())]).unwrap();
    assert_eq!(cached(), None);
}

#[test]
fn what_is_fetched_ahead_leaves_slots_for_readers_and_is_never_nothing() {
    let ahead = |requests| {
        let slots = store::LimitsConfig { requests, ..store::LimitsConfig::default() }.data_slots();
        (at_once(slots), slots)
    };
    assert_eq!([0, 2, 8, 64, 128].map(ahead), [(1, 1), (1, 1), (5, 6), (36, 48), (72, 96)]);
    for requests in 6..1000 {
        let (ahead, slots) = ahead(requests);
        assert!((1..slots).contains(&ahead), "{ahead} of {slots}");
    }
}
