//! What is kept and what is set aside when a store is opened.

use super::*;
use crate::meta::record::FORMAT;
use crate::meta::{Cached, Opened, ROOT};
use heed::types::Bytes;
use std::fs;
use std::time::{Duration, Instant};

fn why(store: &Store) -> &str {
    match store.opened() {
        Opened::SetAside { why } => why,
        other => panic!("{other:?}"),
    }
}

fn filled(bench: &Bench) {
    let store = bench.open();
    assert_eq!(*store.opened(), Opened::Fresh);
    list(&store, ROOT, &[file("a", "1")]);
}

fn rewrite_marker(bench: &Bench, from: &str, to: &str) {
    let path = bench.dir.path().join("marker");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(path, text.replace(from, to)).unwrap();
}

fn starts_empty(bench: &Bench) -> String {
    let store = bench.open();
    assert_eq!(store.lookup(ROOT, b"a").unwrap(), Lookup::Unknown);
    assert!(bench.dir.path().join("data.mdb.set-aside").exists());
    let why = why(&store).to_owned();
    // And goes on from there.
    list(&store, ROOT, &[file("b", "1")]);
    drop(store);
    assert_eq!(*bench.open().opened(), Opened::Kept);
    why
}

/// But for the boot id.
#[test]
fn a_stores_marker_is_that_of_the_golden_file() {
    let bench = Bench::new();
    filled(&bench);
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let text = fs::read_to_string(bench.dir.path().join("marker")).unwrap();
    assert_eq!(text.len(), 128, "an older one must not show behind it");
    let text = text.replace(boot.trim(), "BOOT").trim_end().to_owned() + "\n";
    let name = format!("meta-marker-{}.txt", FORMAT - version::STEPS);
    let text = match version::STEPS {
        0 => crate::golden::same(crate::GOLDEN, &name, &text),
        _ => crate::golden::read(crate::GOLDEN, &name),
    };
    fs::write(bench.dir.path().join("marker"), text.replace("BOOT", boot.trim())).unwrap();
    assert_eq!(*bench.open().opened(), Opened::Kept);
}

#[test]
fn a_closed_store_is_kept_even_by_another_boot() {
    let bench = Bench::new();
    filled(&bench);
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    rewrite_marker(&bench, boot.trim(), "00000000-0000-0000-0000-000000000000");
    let store = bench.open();
    assert_eq!(*store.opened(), Opened::Kept);
    found(&store, ROOT, "a");
}

#[test]
fn a_store_that_another_boot_left_open_is_set_aside() {
    let bench = Bench::new();
    filled(&bench);
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    rewrite_marker(&bench, boot.trim(), "00000000-0000-0000-0000-000000000000");
    rewrite_marker(&bench, "clean", "open");
    assert!(starts_empty(&bench).contains("machine stopped"));
}

/// As a build of that version leaves it.
fn make_of(bench: &Bench, format: u32) {
    rewrite_marker(bench, &format!("millpond-meta {FORMAT}"), &format!("millpond-meta {format}"));
    let mut options = heed::EnvOpenOptions::new();
    options.max_dbs(4).map_size(16 << 20);
    // SAFETY: nothing else has the store open.
    let env = unsafe { options.open(bench.dir.path()) }.unwrap();
    let mut txn = env.write_txn().unwrap();
    let about = env.open_database::<Bytes, Bytes>(&txn, Some("about")).unwrap().unwrap();
    about.put(&mut txn, b"format", &format.to_le_bytes()).unwrap();
    txn.commit().unwrap();
    env.prepare_for_closing().wait();
}

#[test]
fn a_store_of_a_neighbouring_format_is_read_and_written_on() {
    let bench = Bench::new();
    filled(&bench);
    make_of(&bench, FORMAT + 1);
    let store = bench.open();
    assert_eq!(*store.opened(), Opened::Kept);
    found(&store, ROOT, "a");
    list(&store, ROOT, &[file("a", "1"), file("b", "1")]);
    drop(store);
    // It is this build's now, so that the one before may follow.
    let marker = fs::read_to_string(bench.dir.path().join("marker")).unwrap();
    assert!(marker.starts_with(&format!("millpond-meta {FORMAT} clean")), "{marker}");
    found(&bench.open(), ROOT, "b");
}

#[test]
fn a_store_of_a_far_format_is_set_aside_whatever_its_marker_says() {
    let bench = Bench::new();
    filled(&bench);
    make_of(&bench, FORMAT + 2);
    rewrite_marker(&bench, &format!("millpond-meta {}", FORMAT + 2), &format!("millpond-meta {FORMAT}"));
    starts_empty(&bench);
}

#[test]
fn a_store_of_an_unknown_format_is_set_aside() {
    let bench = Bench::new();
    filled(&bench);
    rewrite_marker(&bench, &format!("millpond-meta {FORMAT}"), "millpond-meta 999");
    assert!(starts_empty(&bench).contains("format is 999"));
}

#[test]
fn a_store_with_a_strange_or_missing_marker_is_set_aside() {
    for content in [&b"\xff\xff"[..], b"", b"millpond-meta 1 sideways x", &[b'x'; 10_000]] {
        let bench = Bench::new();
        filled(&bench);
        fs::write(bench.dir.path().join("marker"), content).unwrap();
        starts_empty(&bench);
    }
    let bench = Bench::new();
    filled(&bench);
    fs::remove_file(bench.dir.path().join("marker")).unwrap();
    assert!(starts_empty(&bench).contains("no marker"));
}

#[test]
fn a_file_that_is_no_store_is_set_aside() {
    for content in [&b""[..], b"short", &[0x5a; 20_000]] {
        let bench = Bench::new();
        filled(&bench);
        fs::write(bench.dir.path().join("data.mdb"), content).unwrap();
        if content.is_empty() {
            // LMDB takes an empty file for a new one: nothing is lost by that.
            assert_eq!(bench.open().lookup(ROOT, b"a").unwrap(), Lookup::Unknown);
        } else {
            starts_empty(&bench);
        }
    }
}

#[test]
fn a_store_in_which_damage_was_found_is_set_aside() {
    let bench = Bench::new();
    filled(&bench);
    bench.open().distrust().unwrap();
    assert!(starts_empty(&bench).contains("damage"));
}

#[test]
fn a_store_has_one_owner() {
    let bench = Bench::new();
    let store = bench.open();
    let second = open(bench.dir.path(), &SMALL, &bench.clock, &bench.numbers);
    assert!(matches!(second, Err(MetaError::InUse(_))));
    assert!(matches!(View::open(bench.dir.path()), Err(MetaError::InUse(_))));
    drop(store);
    bench.open();
}

#[test]
fn a_view_of_nothing_says_so_and_creates_nothing() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(View::open(dir.path()), Err(MetaError::NotReady(_))));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_store_at_its_size_limit_says_full_and_goes_on_reading() {
    let bench = Bench::new();
    let tight = Options { map_bytes: 1 << 20, ..SMALL };
    let store = open(bench.dir.path(), &tight, &bench.clock, &bench.numbers).unwrap();
    let d = store.put(ROOT, &directory("d")).unwrap().ino;
    list(&store, d, &[file("a", "1")]);
    let many: Vec<Incoming> = (0..20_000).map(|i| file(&format!("file-{i}"), "1234567890")).collect();
    let mut listing = store.begin_listing(ROOT).unwrap();
    assert!(matches!(listing.page(&many), Err(MetaError::Full(_))));
    assert!(matches!(listing.finish(), Err(MetaError::ListingFailed(ROOT))));
    assert_eq!(names(&store, d, None).unwrap(), ["a"]);
    assert_eq!(names(&store, ROOT, None), None);
    found(&store, ROOT, "d");
}

#[test]
fn a_full_store_is_waited_for_once_and_never_where_a_file_is_located() {
    let bench = Bench::new();
    let tight = Options { map_bytes: 1 << 20, ..SMALL };
    let store = open(bench.dir.path(), &tight, &bench.clock, &bench.numbers).unwrap();
    store.keep_pages_for(Duration::ZERO);
    let located = store.put(ROOT, &file("located", "1")).unwrap().ino;
    let mut names = 0;
    while store.put(ROOT, &file(&format!("file-{names}"), "1234567890")).is_ok() {
        names += 1;
    }
    // From here on each write needs pages that are kept for longer than the test takes.
    let kept = Duration::from_secs(2);
    store.keep_pages_for(kept);
    let started = Instant::now();
    let here = |file| Some(Cached { generation: 1, root: 0, file });
    let mut refused = 0;
    for k in 0..400 {
        match store.set_cached(located, 1, here(k)) {
            Ok(_) => {}
            Err(MetaError::Full(_)) => refused += 1,
            Err(other) => panic!("{other}"),
        }
        assert!(started.elapsed() < kept * 10, "the thread that serves all scopes was kept at the {k}th");
    }
    assert!(refused > 0, "it is full");
    let (started, long) = (Instant::now(), "x".repeat(9_000));
    for k in 0..40 {
        assert!(matches!(store.put(ROOT, &file("more", &long)), Err(MetaError::Full(_))));
        assert!(started.elapsed() < kept * 10, "each write waits, the {k}th too");
    }
    found(&store, ROOT, "located");
}

#[test]
fn a_store_that_was_nearly_full_is_started_anew_and_leaves_nothing_on_the_disk() {
    let bench = Bench::new();
    let tight = Options { map_bytes: 1 << 20, ..SMALL };
    let store = open(bench.dir.path(), &tight, &bench.clock, &bench.numbers).unwrap();
    store.keep_pages_for(Duration::ZERO); // of so small a map they would be most
    let highest = loop {
        let name = format!("file-{}", store.stats().unwrap().inodes);
        match store.put(ROOT, &file(&name, "1234567890")) {
            Ok(_) => {}
            Err(error) => {
                assert!(error.to_string().contains("cache.metadata_limit"), "{error}");
                break store.stats().unwrap().highest_ino;
            }
        }
    };
    drop(store);
    let in_use = Options { start_anew: false, ..tight };
    let store = open(bench.dir.path(), &in_use, &bench.clock, &bench.numbers).unwrap();
    assert_eq!(*store.opened(), Opened::Kept, "mounts that are taken over need it");
    drop(store);
    let store = open(bench.dir.path(), &tight, &bench.clock, &bench.numbers).unwrap();
    assert!(matches!(store.opened(), Opened::StartedAnew { .. }), "{:?}", store.opened());
    assert!(!bench.dir.path().join("data.mdb.set-aside").exists());
    list(&store, ROOT, &[file("a", "1")]);
    assert!(found(&store, ROOT, "a").ino > highest, "numbers are not given out again");
    drop(store);
    let store = open(bench.dir.path(), &tight, &bench.clock, &bench.numbers).unwrap();
    assert_eq!(*store.opened(), Opened::Kept);
}
