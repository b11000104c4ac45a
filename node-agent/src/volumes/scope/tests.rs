use super::{AWAY_CHARS_MAX, Scope};
use crate::testing::{Does, Scripted};
use cache::data::{File, ReadOptions};
use cache::meta::{Lookup, ROOT};
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
