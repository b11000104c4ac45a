//! Inode numbers, versions and epochs.

use super::*;
use crate::meta::{Attributes, Cached, EPOCH_MAX, ROOT};

const HERE: Cached = Cached { generation: 1, root: 0, file: 11 };

#[test]
fn inode_numbers_belong_to_names_for_ever() {
    let bench = Bench::new();
    let store = bench.open();
    let a = store.put(ROOT, &file("a", "1")).unwrap().ino;
    store.put_absent(ROOT, b"a").unwrap();
    let b = store.put(ROOT, &file("b", "1")).unwrap().ino;
    list(&store, ROOT, &[file("b", "1")]);
    drop(store);
    let store = bench.open();
    assert_eq!(store.put(ROOT, &directory("a")).unwrap().ino, a);
    let c = store.put(ROOT, &file("c", "1")).unwrap().ino;
    assert!(a >= crate::meta::FIRST_INO && a != b && b != c && a != c);
    assert_eq!(store.stats().unwrap().highest_ino, c);
}

#[test]
fn numbers_of_a_store_that_was_thrown_away_are_not_given_out_again() {
    let bench = Bench::new();
    let before = {
        let store = bench.open();
        store.put(ROOT, &file("a", "1")).unwrap().ino
    };
    std::fs::remove_file(bench.dir.path().join("marker")).unwrap();
    assert!(bench.open().put(ROOT, &file("a", "1")).unwrap().ino > before);
}

#[test]
fn numbers_out_of_bounds_are_refused() {
    let bench = Bench::new();
    let store = bench.open();
    bench.numbers.0.store(crate::meta::INO_LIMIT, Ordering::Relaxed);
    assert!(matches!(store.put(ROOT, &file("a", "1")), Err(MetaError::InodesExhausted)));
    assert_eq!(store.lookup(ROOT, b"a").unwrap(), Lookup::Unknown);
}

#[test]
fn the_version_counts_contents() {
    let bench = Bench::new();
    let store = bench.open();
    let base = file("a", "1");
    let put = |i: &Incoming| store.put(ROOT, i).unwrap().version;
    assert_eq!(put(&base), 1);
    assert_eq!(put(&base), 1);
    let bigger = Incoming { size: 100, ..base.clone() };
    assert_eq!(put(&bigger), 2);
    for mode in [0o644, 0o600] {
        let permissions = Some(volume::Permissions { mode, uid: Some(7), gid: None });
        let kept = store.put(ROOT, &Incoming { permissions, ..bigger.clone() }).unwrap();
        assert_eq!((kept.version, kept.permissions), (2, permissions), "no part of the content");
        assert_eq!(found(&store.view(), ROOT, "a").permissions, permissions);
    }
    let other = Incoming { token: "2".into(), ..bigger.clone() };
    assert_eq!(put(&other), 3);
    let later = Incoming { mtime_ns: other.mtime_ns + 1_000_000_000, ..other };
    assert_eq!(put(&later), 4);
    assert_eq!(put(&base), 5);
    assert_eq!(put(&directory("a")), 6);
    assert_eq!(put(&Incoming { mtime_ns: 1, ..directory("a") }), 6);
    let link = Incoming { kind: Kind::Symlink, target: b"x".to_vec(), ..base };
    assert_eq!(put(&link), 7);
    assert_eq!(put(&Incoming { target: b"y".to_vec(), ..link }), 8);
}

#[test]
fn one_time_told_in_seconds_and_in_milliseconds_is_one_version() {
    let bench = Bench::new();
    let store = bench.open();
    let coarse = file("a", "1");
    let fine = Incoming { mtime_ns: coarse.mtime_ns + 123_000_000, ..coarse.clone() };
    store.put(ROOT, &coarse).unwrap();
    for incoming in [&fine, &coarse, &fine, &coarse] {
        let attributes = store.put(ROOT, incoming).unwrap();
        assert_eq!((attributes.version, attributes.mtime_ns), (1, fine.mtime_ns));
    }
    let finer = Incoming { mtime_ns: fine.mtime_ns + 1, ..coarse };
    assert_eq!(store.put(ROOT, &finer).unwrap().version, 2);
}

#[test]
fn the_epoch_is_odd_while_the_content_is_whole_in_the_cache() {
    let bench = Bench::new();
    let store = bench.open();
    let a = store.put(ROOT, &file("a", "1")).unwrap();
    let epoch = |a: Option<Attributes>| a.unwrap().epoch;
    assert_eq!(a.epoch, 0);
    assert_eq!(epoch(store.set_cached(a.ino, 1, Some(HERE)).unwrap()), 1);
    assert_eq!(epoch(store.set_cached(a.ino, 1, Some(HERE)).unwrap()), 1);
    let elsewhere = Some(Cached { file: 12, ..HERE });
    assert_eq!(epoch(store.set_cached(a.ino, 1, elsewhere).unwrap()), 3);
    assert_eq!(found(&store, ROOT, "a").cached, elsewhere);
    let after_restart = elsewhere.map(|cached| Cached { generation: cached.generation + 1, ..cached });
    assert_eq!(
        epoch(store.set_cached(a.ino, 1, after_restart).unwrap()),
        3,
        "the same file stays in its epoch"
    );
    assert_eq!(epoch(store.set_cached(a.ino, 1, None).unwrap()), 4);
    assert_eq!(epoch(store.set_cached(a.ino, 1, None).unwrap()), 4);
    assert_eq!(epoch(store.set_cached(a.ino, 1, Some(HERE)).unwrap()), 5);
    let newer = store.put(ROOT, &file("a", "22")).unwrap();
    assert_eq!((newer.version, newer.epoch, newer.since_epoch, newer.cached), (2, 6, 6, None));
    // A new version of what was not cached changes the epoch as well.
    assert_eq!(store.put(ROOT, &file("a", "333")).unwrap().epoch, 8);
}

#[test]
fn a_location_of_another_version_or_of_no_file_changes_nothing() {
    let bench = Bench::new();
    let store = bench.open();
    let a = store.put(ROOT, &file("a", "1")).unwrap();
    let d = store.put(ROOT, &directory("d")).unwrap();
    store.put(ROOT, &file("a", "22")).unwrap();
    store.set_cached(a.ino, 2, Some(HERE)).unwrap().unwrap();
    // The eviction of the old version's file arrives late.
    assert_eq!(store.set_cached(a.ino, 1, None).unwrap(), None);
    assert_eq!(found(&store, ROOT, "a").cached, Some(HERE));
    assert_eq!(store.set_cached(d.ino, 1, Some(HERE)).unwrap(), None);
    assert_eq!(store.set_cached(77_777, 1, Some(HERE)).unwrap(), None);
}

#[test]
fn many_are_located_at_once_and_those_that_cannot_be_are_passed_over() {
    let bench = Bench::new();
    let store = bench.open();
    let files: Vec<_> = (0..5).map(|k| store.put(ROOT, &file(&format!("f{k}"), "1")).unwrap()).collect();
    let d = store.put(ROOT, &directory("d")).unwrap();
    store.put(ROOT, &file("f3", "22")).unwrap();
    let there = |file: u64| Some(Cached { file, ..HERE });
    store.set_cached(files[4].ino, 1, there(44)).unwrap().unwrap();
    let mut all: Vec<_> = files.iter().map(|f| (f.ino, 1, there(f.ino))).collect();
    all.extend([(d.ino, 1, there(7)), (77_777, 1, there(8)), (files[4].ino, 1, None)]);
    store.set_cached_all(&all).unwrap();
    let now = |name: &str| found(&store, ROOT, name);
    for (k, f) in files[..3].iter().enumerate() {
        let now = now(&format!("f{k}"));
        assert_eq!((now.cached, now.epoch), (there(f.ino), 1));
    }
    assert_eq!(now("f3").cached, None, "another version");
    assert_eq!((now("f4").cached, now("f4").epoch), (None, 4), "in their order");
    let before = store.stats().unwrap();
    store.set_cached_all(&all[..3]).unwrap();
    store.set_cached_all(&[]).unwrap();
    assert_eq!(store.stats().unwrap(), before, "nothing is written where nothing changes");
}

#[test]
fn what_comes_back_is_served_by_the_worker_first() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[file("a", "1")]);
    let a = found(&store, ROOT, "a");
    store.set_cached(a.ino, 1, Some(HERE)).unwrap().unwrap();
    list(&store, ROOT, &[]);
    list(&store, ROOT, &[file("a", "1")]);
    let back = found(&store, ROOT, "a");
    assert_eq!((back.ino, back.version, back.epoch, back.cached), (a.ino, 1, 2, None));
    assert_eq!(back.since_epoch, 0, "all its epochs stood for one content");
}

#[test]
fn epochs_end_even_and_never_repeat_before() {
    let bench = Bench::new();
    let store = bench.open();
    let ino = store.put(ROOT, &file("a", "1")).unwrap().ino;
    let key = crate::meta::record::NameKey::new(ROOT, b"a").unwrap();
    let mut txn = store.env.write_txn().unwrap();
    let mut known = store.tables.record(&txn, key.as_bytes()).unwrap().unwrap().to_owned().unwrap();
    known.attributes.as_mut().unwrap().epoch = EPOCH_MAX - 4;
    let mut bytes = Vec::new();
    known.encode(&mut bytes).unwrap();
    store.tables.names.put(&mut txn, key.as_bytes(), &bytes).unwrap();
    txn.commit().unwrap();
    let mut last = EPOCH_MAX - 4;
    for round in 0..6u64 {
        let there = store.set_cached(ino, 1, Some(Cached { file: round, ..HERE })).unwrap().unwrap();
        assert!(there.epoch > last && there.epoch % 2 == 1 || there.epoch == EPOCH_MAX);
        assert_eq!(there.cached.is_some(), there.epoch % 2 == 1);
        last = there.epoch;
    }
    assert_eq!(last, EPOCH_MAX);
    let newer = store.put(ROOT, &file("a", "22")).unwrap();
    assert_eq!((newer.version, newer.epoch, newer.cached), (2, EPOCH_MAX, None));
}

#[test]
fn a_directory_that_became_a_file_has_forgotten_its_names() {
    let bench = Bench::new();
    let store = bench.open();
    let d = store.put(ROOT, &directory("d")).unwrap().ino;
    list(&store, d, &[file("x", "1")]);
    store.put(ROOT, &file("d", "1")).unwrap();
    store.put(ROOT, &directory("d")).unwrap();
    assert_eq!(store.lookup(d, b"x").unwrap(), Lookup::Unknown);
    assert_eq!(names(&store, d, None), None);
}
