//! Names that this node makes at the source: renames and what was written.

use super::super::{FIRST_INO, Lookup, ROOT};
use super::*;
use volume::Permissions;

fn found(store: &Store, parent: u64, name: &[u8]) -> Option<(u64, u32, String)> {
    match store.lookup(parent, name).unwrap() {
        Lookup::Found { attributes, .. } => Some((attributes.ino, attributes.version, attributes.token)),
        _ => None,
    }
}

fn listed(store: &Store, dir: u64) -> Vec<(String, u64)> {
    let mut names = Vec::new();
    store
        .read_dir(dir, None, &mut |name, attributes| {
            names.push((String::from_utf8(name.to_vec()).unwrap(), attributes.ino));
            true
        })
        .unwrap()
        .expect("a complete listing");
    names
}

fn list(store: &Store, dir: u64, entries: &[Incoming]) {
    let mut listing = store.begin_listing(dir).unwrap();
    listing.page(entries).unwrap();
    listing.finish().unwrap();
}

#[test]
fn an_inode_takes_a_new_name_and_its_own_number_along() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[file("a", "one"), file("b", "two"), file("c", "three")]);
    let (a, version, _) = found(&store, ROOT, b"a").unwrap();
    let (b, ..) = found(&store, ROOT, b"b").unwrap();
    let placed = store.place(ROOT, &file("b", "one"), a).unwrap();
    assert_eq!((placed.ino, placed.token.as_str()), (a, "one"));
    assert!(placed.version > version, "what was known of the version is of the old path");
    assert_eq!(found(&store, ROOT, b"a"), None);
    assert!(matches!(store.lookup(ROOT, b"a").unwrap(), Lookup::Absent { .. }));
    assert_eq!(store.attributes(b).unwrap(), None, "what had the name is known no more");
    assert_eq!(store.path(a).unwrap().unwrap(), b"b");
    assert_eq!(listed(&store, ROOT).iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["b", "c"]);
    assert_eq!(store.listing(ROOT).unwrap().unwrap().entries, 2);
    list(&store, ROOT, &[file("b", "one"), file("c", "three")]);
    assert_eq!(found(&store, ROOT, b"b").unwrap().0, a, "also after the next listing");
}

#[test]
fn a_new_inode_gets_a_name_that_was_absent_unknown_or_anothers() {
    let bench = Bench::new();
    let store = bench.open();
    store.put_absent(ROOT, b"absent").unwrap();
    let other = store.put(ROOT, &file("other", "x")).unwrap().ino;
    for name in ["absent", "unknown", "other"] {
        let ino = bench.numbers.next().unwrap();
        assert_eq!(store.place(ROOT, &file(name, "new"), ino).unwrap().ino, ino);
        assert_eq!(found(&store, ROOT, name.as_bytes()).unwrap().0, ino);
        let again = store.place(ROOT, &file(name, "newer"), ino).unwrap();
        assert_eq!((again.ino, again.token.as_str()), (ino, "newer"));
    }
    assert_eq!(store.attributes(other).unwrap(), None);
    assert!(store.place(ROOT, &file("x", "x"), FIRST_INO - 1).is_err());
    assert!(matches!(store.place(9_999, &file("x", "x"), 77), Err(MetaError::UnknownInode(9_999))));
    assert_eq!(found(&store, ROOT, b"x"), None);
}

#[test]
fn a_directory_that_is_moved_keeps_what_is_in_it() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[directory("old"), directory("parent")]);
    let (old, ..) = found(&store, ROOT, b"old").unwrap();
    let (parent, ..) = found(&store, ROOT, b"parent").unwrap();
    list(&store, old, &[file("f", "one")]);
    let (f, ..) = found(&store, old, b"f").unwrap();
    assert_eq!(store.place(parent, &directory("new"), old).unwrap().ino, old);
    assert_eq!(store.path(f).unwrap().unwrap(), b"parent/new/f");
    assert_eq!(found(&store, parent, b"new").unwrap().0, old);
    assert_eq!(found(&store, ROOT, b"old"), None);
}

#[test]
fn a_listing_that_is_under_way_does_not_undo_what_was_placed() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[file("a", "one")]);
    let (a, ..) = found(&store, ROOT, b"a").unwrap();
    let mut listing = store.begin_listing(ROOT).unwrap();
    bench.at(2_000);
    store.place(ROOT, &file("b", "one"), a).unwrap();
    bench.at(3_000);
    listing.page(&[file("a", "one")]).unwrap(); // read before the rename
    listing.finish().unwrap();
    assert_eq!(found(&store, ROOT, b"b").unwrap().0, a);
    assert_eq!(listed(&store, ROOT), [("b".to_owned(), a)]);
}

#[test]
fn what_this_node_has_removed_stays_away_from_listings_begun_before_and_comes_with_later_ones() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[file("a", "one"), file("b", "two")]);
    let (a, ..) = found(&store, ROOT, b"a").unwrap();
    let mut listing = store.begin_listing(ROOT).unwrap();
    bench.at(2_000);
    store.remove(ROOT, b"a").unwrap();
    store.remove(ROOT, b"never").unwrap();
    assert_eq!(store.last_attributes(a).unwrap().unwrap().token, "one", "somebody may read it still");
    bench.at(3_000);
    listing.page(&[file("a", "one"), file("b", "two"), file("never", "x")]).unwrap();
    assert_eq!(listing.finish().unwrap().entries, 1);
    assert_eq!(listed(&store, ROOT).len(), 1);
    bench.at(4_000);
    list(&store, ROOT, &[file("a", "one"), file("b", "two")]);
    assert_eq!(found(&store, ROOT, b"a").unwrap().0, a, "somebody has made it again");
    assert!(store.remove(ROOT, b"a/b").is_err());
}

#[test]
fn what_this_node_has_written_keeps_owner_and_time_until_it_is_another_content() {
    let bench = Bench::new();
    let store = bench.open();
    let permissions = Some(Permissions::of(0o640, Some(7), Some(8)));
    let ino = bench.numbers.next().unwrap();
    store.place(ROOT, &Incoming { permissions, ..file("f", "one") }, ino).unwrap();
    list(&store, ROOT, &[Incoming { mtime_ns: 9_000_000_000, ..file("f", "one") }]);
    let (attributes, _) = store.attributes(ino).unwrap().unwrap();
    assert_eq!(
        (attributes.permissions, attributes.mtime_ns, attributes.version),
        (permissions, 7_000_000_000, 1)
    );
    list(&store, ROOT, &[Incoming { mtime_ns: 9_000_000_000, ..file("f", "two") }]);
    let (attributes, _) = store.attributes(ino).unwrap().unwrap();
    assert_eq!((attributes.permissions, attributes.mtime_ns, attributes.version), (None, 9_000_000_000, 2));
}

/// All within one millisecond of the bench's clock.
#[test]
fn answers_that_were_asked_for_before_a_change_do_not_undo_it_and_later_ones_count() {
    let bench = Bench::new();
    let store = bench.open();
    let asked = store.asks();
    let mut listing = store.begin_listing(ROOT).unwrap();
    let (a, b) = (bench.numbers.next().unwrap(), bench.numbers.next().unwrap());
    store.place(ROOT, &file("a", "new"), a).unwrap();
    store.place(ROOT, &file("b", "new"), b).unwrap();
    store.remove(ROOT, b"b").unwrap();
    store.put_answer(ROOT, b"a", Some(&file("a", "old")), asked).unwrap();
    store.put_answer(ROOT, b"b", Some(&file("b", "new")), asked).unwrap();
    assert_eq!(found(&store, ROOT, b"a").unwrap().2, "new");
    assert_eq!(found(&store, ROOT, b"b"), None);
    store.put_answer(ROOT, b"a", None, asked).unwrap();
    listing.page(&[file("a", "old"), file("b", "new")]).unwrap();
    listing.finish().unwrap();
    assert_eq!(found(&store, ROOT, b"a").unwrap().2, "new");
    assert_eq!(found(&store, ROOT, b"b"), None);
    let asked = store.asks();
    store.put_answer(ROOT, b"a", Some(&file("a", "newer")), asked).unwrap();
    store.put_answer(ROOT, b"b", Some(&file("b", "newer")), asked).unwrap();
    assert_eq!(found(&store, ROOT, b"a").unwrap().2, "newer");
    assert_eq!(found(&store, ROOT, b"b").unwrap().2, "newer");
    list(&store, ROOT, &[file("a", "last")]);
    assert_eq!(found(&store, ROOT, b"a").unwrap().2, "last");
    assert_eq!(found(&store, ROOT, b"b"), None);
}
