//! Stores that no process has open: what they leave, and how they go.

use super::processes::{Role, answer};
use super::*;
use crate::meta::idle::{self, Left};
use crate::meta::{Opened, ROOT, Room};
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Bytes of the disk, all files below together.
fn taken(dir: &Path) -> u64 {
    let about = fs::symlink_metadata(dir).unwrap();
    let below = |entries: fs::ReadDir| entries.map(|entry| taken(&entry.unwrap().path())).sum::<u64>();
    about.blocks() * 512 + if about.is_dir() { below(fs::read_dir(dir).unwrap()) } else { 0 }
}

/// A store in `name`, with a name in it, that was closed.
fn closed(bench: &Bench, name: &str) -> PathBuf {
    let dir = bench.dir.path().join(name);
    open(&dir, &SMALL, &bench.clock, &bench.numbers).unwrap().put(ROOT, &file("a", "1")).unwrap();
    dir
}

/// One of this is enough to tell that a reserve was left.
const LITTLE: u64 = 256 << 10;

#[test]
fn hundreds_of_stores_made_and_left_leave_disk_descriptors_and_memory_as_they_were() {
    let bench = Bench::new();
    let mut maker = Role::start("many", bench.dir.path());
    // The first ones warm up the process.
    assert_eq!(maker.ask("make 20"), "done");
    let before: Vec<u64> = maker.ask("used").split(' ').map(|n| n.parse().unwrap()).collect();
    let begun = std::time::Instant::now();
    assert_eq!(maker.ask("make 300"), "done");
    println!("{:?} to make, fill and close one", begun.elapsed() / 300);
    let left: Vec<PathBuf> = fs::read_dir(bench.dir.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(left.len(), 320);
    for dir in &left {
        assert!(taken(dir) < LITTLE, "{} bytes of a store that is closed", taken(dir));
    }
    let after: Vec<u64> = maker.ask("used").split(' ').map(|n| n.parse().unwrap()).collect();
    println!("descriptors, KiB: {before:?} before, {after:?} after");
    assert_eq!(after[0], before[0], "descriptors");
    assert!(after[1] < before[1] + 4096, "anonymous memory: {} KiB, then {}", before[1], after[1]);
    for dir in &left {
        assert!(idle::remove(dir).unwrap());
    }
    assert_eq!(fs::read_dir(bench.dir.path()).unwrap().count(), 0);
    maker.end();
}

/// Makes stores and leaves them; tells of its descriptors and its anonymous memory (KiB).
pub(super) fn many(dir: &Path) {
    let bench = Bench::new();
    let mut made = 0;
    for question in super::processes::questions() {
        match question.split_once(' ') {
            Some(("make", count)) => {
                for _ in 0..count.parse::<u32>().unwrap() {
                    made += 1;
                    let dir = dir.join(format!("{made:032x}"));
                    let store = open(&dir, &SMALL, &bench.clock, &bench.numbers).unwrap();
                    list(&store, ROOT, &[file("a", "1"), directory("b")]);
                    assert!(
                        taken(&dir) > SMALL.reserve_bytes,
                        "no reserve was taken: nothing is tested here"
                    );
                    drop(store);
                }
                answer("done");
            }
            _ if question == "used" => {
                let descriptors = fs::read_dir("/proc/self/fd").unwrap().count();
                answer(format!("{descriptors} {}", super::processes::anonymous_kib()));
            }
            _ => panic!("{question}"),
        }
    }
}

#[test]
fn a_store_that_was_left_is_found_again_as_it_was() {
    let bench = Bench::new();
    let dir = closed(&bench, "s");
    let found_idle = idle::look(&dir).unwrap().unwrap();
    assert_eq!((found_idle.left, found_idle.bytes), (Left::Closed, taken(&dir)));
    let store = open(&dir, &SMALL, &bench.clock, &bench.numbers).unwrap();
    assert_eq!((store.opened(), found(&store, ROOT, "a").size), (&Opened::Kept, 1));
    assert!(taken(&dir) > SMALL.reserve_bytes, "the reserve is taken again");
}

#[test]
fn what_is_not_a_store_is_not_touched() {
    let bench = Bench::new();
    let root = bench.dir.path();
    let make = |name: &str, files: &[&str]| {
        let dir = root.join(name);
        fs::create_dir(&dir).unwrap();
        files.iter().for_each(|file| fs::write(dir.join(file), "millpond-meta of another program").unwrap());
        dir
    };
    let with_more = closed(&bench, "more");
    fs::write(with_more.join("thesis.txt"), "mine").unwrap();
    let with_directory = closed(&bench, "directory");
    fs::create_dir(with_directory.join("lock.mdb")).unwrap();
    let link = root.join("link");
    symlink(closed(&bench, "target"), &link).unwrap();
    fs::write(root.join("file"), "x").unwrap();
    let strange = [
        make("unmarked", &["data.mdb"]),
        make("strange-marker", &["data.mdb", "marker"]),
        with_more,
        with_directory,
        link,
        root.join("file"),
        root.join("absent"),
    ];
    let before = taken(root);
    for dir in &strange {
        assert_eq!(idle::look(dir).unwrap(), None, "{}", dir.display());
        assert!(!idle::remove(dir).unwrap(), "{}", dir.display());
    }
    assert_eq!(taken(root), before);
    // One that was being made when its owner died.
    assert_eq!(idle::look(&make("empty", &[])).unwrap().unwrap().left, Left::Worthless);
    assert!(idle::remove(&root.join("empty")).unwrap() && !root.join("empty").exists());
}

#[test]
fn a_store_that_is_open_is_neither_removed_nor_closed() {
    let bench = Bench::new();
    let dir = closed(&bench, "s");
    let store = open(&dir, &SMALL, &bench.clock, &bench.numbers).unwrap();
    assert_eq!(idle::look(&dir).unwrap().unwrap().left, Left::Open);
    assert!(!idle::remove(&dir).unwrap() && !idle::close(&dir).unwrap());
    idle::trim(&dir).unwrap();
    store.put(ROOT, &file("b", "1")).unwrap();
    assert!(taken(&dir) > SMALL.reserve_bytes);
}

#[test]
fn the_reserve_of_a_store_whose_owner_was_killed_is_given_back() {
    let bench = Bench::new();
    let mut owner = Role::start("writer", bench.dir.path());
    assert_eq!(owner.answer(), "listed");
    owner.kill();
    let dir = bench.dir.path().join("store");
    let killed = idle::look(&dir).unwrap().unwrap();
    assert_eq!(killed.left, Left::Open);
    assert!(idle::close(&dir).unwrap());
    let now = idle::look(&dir).unwrap().unwrap();
    assert_eq!(now.left, Left::Closed);
    assert!(
        now.bytes + SMALL.reserve_bytes / 2 < killed.bytes,
        "{} of {} bytes left",
        now.bytes,
        killed.bytes
    );
    assert!(now.since >= killed.since);
    let store = open(&dir, &SMALL, &bench.clock, &bench.numbers).unwrap();
    assert_eq!((store.opened(), names(&store, ROOT, None).unwrap().len()), (&Opened::Kept, 3_000));
}

#[test]
fn whoever_is_killed_while_he_removes_a_store_leaves_one_that_starts_empty() {
    for last in ["data.mdb", "lock.mdb", "data.mdb.set-aside", "marker"] {
        let bench = Bench::new();
        let dir = closed(&bench, "s");
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.env("MILLPOND_TEST_ABORT_AFTER", last);
        Role::spawn(command, "remover", &dir).dies();
        assert_eq!(idle::look(&dir).unwrap().unwrap().left, Left::Worthless, "killed after {last}");
        let store = open(&dir, &SMALL, &bench.clock, &bench.numbers).unwrap();
        assert_eq!((store.opened(), store.lookup(ROOT, b"a").unwrap()), (&Opened::Fresh, Lookup::Unknown));
        drop(store);
        assert!(idle::remove(&dir).unwrap() && !dir.exists());
    }
}

pub(super) fn remover(dir: &Path) {
    idle::remove(dir).unwrap();
}

#[test]
fn a_time_in_the_future_is_now() {
    let bench = Bench::new();
    let dir = closed(&bench, "s");
    let future = SystemTime::now() + Duration::from_secs(1 << 30);
    fs::File::options().write(true).open(dir.join("marker")).unwrap().set_modified(future).unwrap();
    assert!(idle::look(&dir).unwrap().unwrap().since > SystemTime::now());
    idle::touch(&dir).unwrap();
    assert!(idle::look(&dir).unwrap().unwrap().since <= SystemTime::now());
}

#[test]
fn all_stores_together_stay_within_their_room_and_give_it_back() {
    let bench = Bench::new();
    let room = Arc::new(Room::new(24 << 20));
    let clock = Clock::new("boot", || 1_000, || 1_000);
    let open = |k: u32| {
        let dir = bench.dir.path().join(k.to_string());
        Store::open_both(&dir, &SMALL, bench.numbers.clone(), clock.clone(), room.clone()).unwrap()
    };
    let stores: Vec<Store> = (0..8).map(open).collect();
    assert!(room.open() <= 24 << 20);
    let full =
        |store: &Store| (0..400_000).find_map(|k| store.put(ROOT, &file(&format!("{k:0200}"), "1")).err());
    let error = full(&stores[0]).expect("it grows without end");
    assert!(error.to_string().contains("cache.metadata_total"), "{error}");
    assert!(taken(bench.dir.path()) < 32 << 20, "{} bytes", taken(bench.dir.path()));
    // What is known is read, and the others have what they took ahead.
    assert_eq!(found(&stores[0], ROOT, &format!("{:0200}", 0)).size, 1);
    drop(stores);
    assert_eq!(room.open(), 0);
    // What lies idle counts.
    room.note_idle(24 << 20);
    let last = open(9);
    assert!(last.put(ROOT, &file("b", "1")).is_err());
    room.note_idle(0);
    last.put(ROOT, &file("b", "1")).unwrap();
}
