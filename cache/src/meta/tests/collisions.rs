//! Keys that an object store allows and a directory cannot show.

use super::*;
use crate::meta::ROOT;

#[test]
fn a_directory_wins_over_a_file_of_its_name_wherever_they_come() {
    for split in [false, true] {
        for first in [file("a", "1"), directory("a")] {
            let bench = Bench::new();
            let store = bench.open();
            let second = if first.kind == Kind::File { directory("a") } else { file("a", "1") };
            let mut version = None;
            for _ in 0..3 {
                let mut listing = store.begin_listing(ROOT).unwrap();
                if split {
                    listing = listing.with_batch(1);
                }
                listing.page(std::slice::from_ref(&first)).unwrap();
                listing.page(&[file("z", "1")]).unwrap();
                listing.page(std::slice::from_ref(&second)).unwrap();
                let state = listing.finish().unwrap();
                assert_eq!((state.entries, state.hidden), (2, 1), "{first:?} first, split {split}");
                let a = found(&store, ROOT, "a");
                assert_eq!(a.kind, Kind::Directory);
                // Listing the same again must not look like new content.
                assert_eq!(*version.get_or_insert(a.version), a.version);
            }
            assert_eq!(names(&store, ROOT, None).unwrap(), ["a", "z"]);
        }
    }
}

#[test]
fn a_directory_that_became_a_file_is_one_after_the_next_listing() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[directory("a")]);
    let ino = found(&store, ROOT, "a").ino;
    let state = list(&store, ROOT, &[file("a", "1")]);
    let a = found(&store, ROOT, "a");
    assert_eq!((a.kind, a.ino, a.version, state.entries, state.hidden), (Kind::File, ino, 2, 1, 0));
}

#[test]
fn names_that_no_directory_can_show_are_counted() {
    let bench = Bench::new();
    let store = bench.open();
    let long = "x".repeat(256);
    let mut listing = store.begin_listing(ROOT).unwrap();
    let odd = ["", ".", "..", "a/b", "nul\0", &long];
    listing.page(&odd.map(|name| file(name, "1"))).unwrap();
    listing.page(&[file("...", "1"), file(&long[1..], "1")]).unwrap();
    listing.hide(2);
    let state = listing.finish().unwrap();
    assert_eq!((state.entries, state.hidden), (2, 8));
    for name in odd {
        assert!(matches!(store.put(ROOT, &file(name, "1")), Err(MetaError::BadName)));
    }
    assert!(matches!(store.lookup(ROOT, long.as_bytes()), Err(MetaError::BadName)));
}

#[test]
fn sizes_that_no_file_has_are_counted_and_hide_nothing() {
    let bench = Bench::new();
    let store = bench.open();
    let of = |name: &str, size| Incoming { size, ..file(name, "1") };
    let largest = i64::MAX as u64;
    let sizes = [of("a", largest + 1), of("b", largest), of("c", u64::MAX), of("d", 0)];
    let state = list(&store, ROOT, &sizes);
    assert_eq!((state.entries, state.hidden), (2, 2));
    assert_eq!(names(&store, ROOT, None).unwrap(), ["b", "d"]);
    assert_eq!(found(&store, ROOT, "b").size, largest);
    assert!(matches!(store.put(ROOT, &of("e", u64::MAX)), Err(MetaError::BadName)));
    let long = Incoming { token: "t".repeat(1 << 17), ..file("f", "1") };
    assert_eq!(list(&store, ROOT, &[long, file("g", "1")]).hidden, 1);
}

#[test]
fn names_need_not_be_text() {
    let bench = Bench::new();
    let store = bench.open();
    let odd = Incoming { name: b"\xff\xfe\x01".to_vec(), ..file("", "1") };
    list(&store, ROOT, std::slice::from_ref(&odd));
    assert!(matches!(store.lookup(ROOT, &odd.name).unwrap(), Lookup::Found { .. }));
    let mut seen = Vec::new();
    store
        .read_dir(ROOT, None, &mut |name, _| {
            seen.push(name.to_vec());
            true
        })
        .unwrap()
        .unwrap();
    assert_eq!(seen, [odd.name]);
}
