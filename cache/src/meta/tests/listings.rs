//! Listings: what is seen before, during and after one.

use super::*;
use crate::meta::ROOT;

#[test]
fn a_listing_is_unseen_until_it_is_finished() {
    let bench = Bench::new();
    let store = bench.open();
    let mut first = store.begin_listing(ROOT).unwrap().with_batch(1);
    first.page(&[file("a", "1"), file("b", "1")]).unwrap();
    assert_eq!(names(&store, ROOT, None), None);
    assert_eq!(store.lookup(ROOT, b"c").unwrap(), Lookup::Unknown);
    // What the source has said of single names is true already.
    assert_eq!(found(&store, ROOT, "a").token, "1");
    first.finish().unwrap();
    assert_eq!(names(&store, ROOT, None).unwrap(), ["a", "b"]);

    bench.at(2_000);
    let mut second = store.begin_listing(ROOT).unwrap().with_batch(1);
    second.page(&[file("b", "1"), file("c", "1")]).unwrap();
    assert_eq!(names(&store, ROOT, None).unwrap(), ["a", "b"]);
    assert_eq!(store.lookup(ROOT, b"c").unwrap(), Lookup::Absent { seen_ms: 1_000 });
    bench.at(3_000);
    let state = second.finish().unwrap();
    assert_eq!((state.complete, state.seen_ms, state.entries, state.hidden), (true, 2_000, 2, 0));
    assert_eq!(store.listing(ROOT).unwrap(), Some(state));
    assert_eq!(names(&store, ROOT, None).unwrap(), ["b", "c"]);
}

#[test]
fn names_that_a_complete_listing_lacks_are_absent_since_it_was_begun() {
    let bench = Bench::new();
    let store = bench.open();
    assert_eq!(store.lookup(ROOT, b"a").unwrap(), Lookup::Unknown);
    assert_eq!(store.listing(ROOT).unwrap(), None);
    list(&store, ROOT, &[file("a", "1")]);
    bench.at(5_000);
    assert_eq!(store.lookup(ROOT, b"never").unwrap(), Lookup::Absent { seen_ms: 1_000 });
    let a = found(&store, ROOT, "a");
    list(&store, ROOT, &[]);
    assert_eq!(store.lookup(ROOT, b"a").unwrap(), Lookup::Absent { seen_ms: 5_000 });
    assert_eq!(store.attributes(a.ino).unwrap(), None);
    assert_eq!(store.last_attributes(a.ino).unwrap(), Some(a));
}

#[test]
fn a_dropped_listing_leaves_the_old_one() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[file("a", "1"), file("b", "1")]);
    for _ in 0..3 {
        let mut dropped = store.begin_listing(ROOT).unwrap().with_batch(1);
        dropped.page(&[file("b", "2"), file("c", "1")]).unwrap();
        drop(dropped);
        assert_eq!(names(&store, ROOT, None).unwrap(), ["a", "b"]);
    }
    // What the dropped ones brought does not shine through the next one.
    list(&store, ROOT, &[file("d", "1")]);
    assert_eq!(names(&store, ROOT, None).unwrap(), ["d"]);
    assert_eq!(store.listing(ROOT).unwrap().unwrap().entries, 1);
}

#[test]
fn one_listing_of_a_directory_at_a_time() {
    let bench = Bench::new();
    let store = bench.open();
    let d = store.put(ROOT, &directory("d")).unwrap().ino;
    let first = store.begin_listing(ROOT).unwrap();
    assert!(matches!(store.begin_listing(ROOT), Err(MetaError::ListingInProgress(ROOT))));
    store.begin_listing(d).unwrap().finish().unwrap();
    drop(first);
    store.begin_listing(ROOT).unwrap().finish().unwrap();
    assert!(matches!(store.begin_listing(9_999), Err(MetaError::UnknownInode(9_999))));
}

#[test]
fn names_asked_for_correct_a_listing_under_way_and_the_one_in_force() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[file("a", "1"), file("b", "1")]);
    bench.at(2_000);
    let mut second = store.begin_listing(ROOT).unwrap().with_batch(1);
    second.page(&[file("a", "1"), file("b", "1"), file("e", "1")]).unwrap();
    bench.at(2_500);
    store.put(ROOT, &file("new", "1")).unwrap();
    store.put_absent(ROOT, b"a").unwrap();
    store.put_absent(ROOT, b"nothing").unwrap();
    assert_eq!(names(&store, ROOT, None).unwrap(), ["b", "new"]);
    assert_eq!(store.listing(ROOT).unwrap().unwrap().entries, 2);
    let state = second.finish().unwrap();
    assert_eq!(names(&store, ROOT, None).unwrap(), ["b", "e", "new"]);
    assert_eq!(state.entries, 3);
    assert_eq!(store.lookup(ROOT, b"a").unwrap(), Lookup::Absent { seen_ms: 2_500 });
    assert_eq!(store.lookup(ROOT, b"nothing").unwrap(), Lookup::Absent { seen_ms: 2_500 });
}

#[test]
fn an_answer_newer_than_the_listing_is_not_overwritten_by_its_page() {
    let bench = Bench::new();
    let store = bench.open();
    let mut listing = store.begin_listing(ROOT).unwrap().with_batch(1);
    bench.at(1_500);
    let asked = store.put(ROOT, &file("a", "newer")).unwrap();
    bench.at(2_000);
    listing.page(&[file("a", "older")]).unwrap();
    listing.finish().unwrap();
    assert_eq!(found(&store, ROOT, "a"), asked);
}

#[test]
fn a_time_in_the_future_does_not_hold_up_the_truth() {
    let bench = Bench::new();
    let store = bench.open();
    bench.at(9_000);
    store.put(ROOT, &file("a", "1")).unwrap();
    bench.at(2_000); // as a boot whose clock was wrong leaves it
    list(&store, ROOT, &[file("a", "22")]);
    let Lookup::Found { attributes, seen_ms } = store.lookup(ROOT, b"a").unwrap() else { panic!() };
    assert_eq!((attributes.token.as_str(), seen_ms), ("22", 2_000));
}

#[test]
fn readdir_goes_on_after_an_entry_that_has_vanished() {
    let bench = Bench::new();
    let store = bench.open();
    let all: Vec<Incoming> = (0..100).map(|i| file(&format!("f{i:02}"), "1")).collect();
    list(&store, ROOT, &all);
    let mut seen = Vec::new();
    let mut last = None;
    store
        .read_dir(ROOT, None, &mut |name, attributes| {
            seen.push(name.to_vec());
            last = Some(attributes.ino);
            seen.len() < 40
        })
        .unwrap()
        .unwrap();
    // The entry that the reader stopped at goes, one before it goes, one behind it comes.
    let mut later: Vec<Incoming> = all.into_iter().filter(|i| i.name != b"f39" && i.name != b"f10").collect();
    later.push(file("f39-and-a-half", "1"));
    list(&store, ROOT, &later);
    let rest = names(&store, ROOT, last).unwrap();
    assert_eq!((rest[0].as_str(), rest[1].as_str(), rest.len()), ("f39-and-a-half", "f40", 61));
    // A position of another directory is an error, not a listing from the start.
    let d = store.put(ROOT, &directory("d")).unwrap().ino;
    list(&store, d, &[]);
    assert!(matches!(store.read_dir(d, last, &mut |_, _| true), Err(MetaError::UnknownInode(_))));
}

#[test]
fn directories_do_not_see_each_others_names() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[directory("a"), directory("b")]);
    let (a, b) = (found(&store, ROOT, "a").ino, found(&store, ROOT, "b").ino);
    list(&store, a, &[file("x", "1")]);
    list(&store, b, &[file("x", "1"), file("y", "1")]);
    assert_eq!(names(&store, a, None).unwrap(), ["x"]);
    assert_eq!(names(&store, b, None).unwrap(), ["x", "y"]);
    let x = found(&store, b, "x").ino;
    assert_ne!(x, found(&store, a, "x").ino);
    assert_eq!(store.path(x).unwrap().unwrap(), b"b/x");
    assert_eq!(store.resolve(b"b/x").unwrap(), Some(x));
    assert_eq!(store.resolve(b"b/nothing").unwrap(), None);
    assert_eq!((store.parent(x).unwrap(), store.parent(b).unwrap()), (Some(b), Some(ROOT)));
    assert_eq!((store.path(ROOT).unwrap().unwrap(), store.parent(ROOT).unwrap()), (vec![], Some(ROOT)));
    assert_eq!((store.path(999_999).unwrap(), store.parent(999_999).unwrap()), (None, None));
    assert_eq!(store.attributes(ROOT).unwrap().unwrap().0.kind, Kind::Directory);
}

#[test]
fn guesses_do_not_pile_up() {
    let bench = Bench::new();
    let store = bench.open();
    store.put(ROOT, &file("real", "1")).unwrap();
    for i in 0..500 {
        store.put_absent(ROOT, format!("guess{i}").as_bytes()).unwrap();
    }
    assert_eq!(store.stats().unwrap().names, 502);
    bench.at(2_000);
    list(&store, ROOT, &[file("real", "1")]);
    assert_eq!(store.stats().unwrap().names, 2);
    assert_eq!(store.lookup(ROOT, b"guess3").unwrap(), Lookup::Absent { seen_ms: 2_000 });
}

#[test]
fn a_forgotten_directory_is_unknown_but_keeps_its_numbers() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[file("a", "1"), file("b", "1")]);
    store.put_absent(ROOT, b"b").unwrap();
    store.put_absent(ROOT, b"c").unwrap();
    let ino = found(&store, ROOT, "a").ino;
    store.forget(ROOT).unwrap();
    for name in [b"a", b"b", b"c"] {
        assert_eq!(store.lookup(ROOT, name).unwrap(), Lookup::Unknown);
    }
    assert_eq!(names(&store, ROOT, None), None);
    assert_eq!(store.put(ROOT, &file("a", "1")).unwrap().ino, ino);
    assert_eq!(list(&store, ROOT, &[file("a", "1")]).entries, 1);
}

#[test]
fn readers_on_many_threads_see_whole_listings_only() {
    let bench = Bench::new();
    let store = bench.open();
    let even: Vec<Incoming> = (0..200).map(|i| file(&format!("{:03}", i * 2), "e")).collect();
    let odd: Vec<Incoming> = (0..150).map(|i| file(&format!("{:03}", i * 2 + 1), "o")).collect();
    list(&store, ROOT, &even);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let view = store.view();
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let count = names(&view, ROOT, None).unwrap().len();
                    assert!(count == 200 || count == 150, "{count} names");
                }
            });
        }
        for round in 0..40 {
            let entries = if round % 2 == 0 { &odd } else { &even };
            let mut listing = store.begin_listing(ROOT).unwrap().with_batch(30);
            listing.page(entries).unwrap();
            listing.finish().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_listing_that_is_given_up_leaves_nothing_that_only_it_had() {
    let bench = Bench::new();
    let store = Arc::new(bench.open());
    list(&store, ROOT, &[file("a", "1"), file("m", "1"), file("z", "1")]);
    list(&store, ROOT, &[file("a", "1"), file("z", "1")]);
    let (before, m) = (store.stats().unwrap(), store.resolve(b"m").unwrap().unwrap());
    let mut endless = store.clone().begin_listing_owned(ROOT).unwrap();
    for page in 0..25 {
        endless
            .page(&(0..1_000).map(|n| file(&format!("n{:06}", page * 1_000 + n), "1")).collect::<Vec<_>>())
            .unwrap();
    }
    endless.page(&[file("m", "1"), file("z", "2")]).unwrap();
    // Asked for by name meanwhile: a reader may have it open.
    let asked = store.put(ROOT, &file("n000007", "1")).unwrap();
    assert!(store.stats().unwrap().names > before.names + 19_000, "what is stored in batches");
    // Called off half-way, and left undone: it is passed over.
    let calls = std::cell::Cell::new(0);
    endless.take_back(|| calls.replace(calls.get() + 1) < 1).unwrap();
    assert!(store.stats().unwrap().names > before.names + 5_000);
    assert_eq!(names(&store, ROOT, None).unwrap(), ["a", "n000007", "z"]);

    let mut endless = store.clone().begin_listing_owned(ROOT).unwrap();
    endless.page(&(0..30_000).map(|n| file(&format!("o{n:06}"), "1")).collect::<Vec<_>>()).unwrap();
    let with_leftovers = store.stats().unwrap().names;
    endless.take_back(|| true).unwrap();
    assert_eq!(store.stats().unwrap().names, with_leftovers - 30_000);
    assert_eq!(store.stats().unwrap().names, store.stats().unwrap().inodes);
    assert_eq!(names(&store, ROOT, None).unwrap(), ["a", "n000007", "z"]);
    assert_eq!(found(&store, ROOT, "n000007").ino, asked.ino);
    // Numbers of names that have been seen stay, whether they are there or not.
    assert_eq!(store.resolve(b"m").unwrap(), Some(m));
    list(&store, ROOT, &[file("a", "1"), file("m", "1")]);
    assert_eq!(found(&store, ROOT, "m").ino, m);
}
