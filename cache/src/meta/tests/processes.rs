//! The store between processes: what one writes another sees, and one that dies harms no other.
//!
//! Other processes are this test binary again: an environment variable has it run one of the roles below.

use super::*;
use crate::meta::{Opened, ROOT};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// The i-th name of a listing in some order.
type Order = fn(u64) -> u64;

const ROLE: &str = "MILLPOND_META_TEST_ROLE";
const DIR: &str = "MILLPOND_META_TEST_DIR";
/// Longer than any machine takes.
const PATIENCE: Duration = Duration::from_secs(600);

pub(super) struct Role {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Role {
    pub(super) fn start(role: &str, dir: &Path) -> Self {
        Self::spawn(Command::new(std::env::current_exe().unwrap()), role, dir)
    }

    pub(super) fn spawn(mut command: Command, role: &str, dir: &Path) -> Self {
        let mut child = command
            .args(["--exact", "meta::tests::processes::role", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(DIR, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (say, hear) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, say, hear }
    }

    pub(super) fn ask(&mut self, question: &str) -> String {
        writeln!(self.say, "{question}").unwrap();
        self.answer()
    }

    /// The next line that a role printed (the test harness prints others).
    pub(super) fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.hear.read_line(&mut line).unwrap(), 0, "the other process ended");
            if let Some((_, answer)) = line.split_once("ANSWER ") {
                return answer.trim_end().to_owned();
            }
        }
    }

    pub(super) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// By a signal, of itself.
    pub(super) fn dies(mut self) {
        assert_eq!(self.child.wait().unwrap().code(), None);
    }

    pub(super) fn end(mut self) {
        drop(self.say);
        assert!(self.child.wait().unwrap().success());
    }
}

pub(super) fn answer(text: impl std::fmt::Display) {
    println!("\nANSWER {text}");
}

pub(super) fn questions() -> impl Iterator<Item = String> {
    std::io::stdin().lines().map(|line| line.unwrap())
}

#[test]
#[ignore = "not a test: what the other processes of the tests below do"]
fn role() {
    // A test that is killed leaves nothing behind.
    use rustix::process::{Signal, set_parent_process_death_signal};
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let dir = std::path::PathBuf::from(std::env::var_os(DIR).expect("started by a test"));
    match std::env::var(ROLE).unwrap().as_str() {
        "reader" => reader(&dir),
        "stuck" => stuck(&dir),
        "patient" => patient(&dir),
        "held up" => held_up(&dir),
        "passing" => passing(&dir),
        "writer" => writer(&dir),
        "million" => million(&dir),
        "full" => full(&dir),
        "reserve" => reserve(&dir),
        "successor" => successor(&dir),
        "many" => super::idle::many(&dir),
        "remover" => super::idle::remover(&dir),
        other => panic!("no role {other}"),
    }
}

fn reader(dir: &Path) {
    let view = View::open(dir).unwrap();
    for question in questions() {
        match question.split_once(' ') {
            Some(("lookup", name)) => answer(match view.lookup(ROOT, name.as_bytes()).unwrap() {
                Lookup::Found { attributes, .. } => format!("version {}", attributes.version),
                Lookup::Absent { seen_ms } => format!("absent {seen_ms}"),
                Lookup::Unknown => "unknown".into(),
            }),
            _ if question == "maps" => {
                let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
                answer(maps.lines().find(|l| l.ends_with("data.mdb")).unwrap());
            }
            _ if question == "writable" => {
                let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
                let dir = dir.to_str().unwrap();
                let writable = maps.lines().filter(|l| l.contains(dir) && l.contains(" rw"));
                answer(format!("{:?}", writable.collect::<Vec<_>>()));
            }
            _ => panic!("{question}"),
        }
    }
}

/// Reads half of the names, waits for a line, and reads the rest.
fn patient(dir: &Path) {
    let view = View::open_with(dir, PATIENCE).unwrap();
    let (mut names, mut tokens) = (0, std::collections::BTreeSet::new());
    view.read_dir(ROOT, None, &mut |_, attributes| {
        names += 1;
        tokens.insert(attributes.token.clone());
        if names == 1_500 {
            answer("reading");
            questions().next().unwrap();
        }
        true
    })
    .unwrap();
    answer(format!("{names} names, tokens {tokens:?}"));
}

fn held_up(dir: &Path) {
    const LIMIT: Duration = Duration::from_millis(500);
    let view = View::open_with(dir, LIMIT).unwrap();
    let (mut calls, mut names, mut after) = (0, 0, None);
    loop {
        let before = names;
        view.read_dir(ROOT, after, &mut |_, attributes| {
            (names, after) = (names + 1, Some(attributes.ino));
            if names % 10 == 0 {
                std::thread::sleep(LIMIT);
            }
            true
        })
        .unwrap()
        .unwrap();
        if names == before {
            break;
        }
        calls += 1;
    }
    answer(format!("{calls} {names}"));
    let asked = std::cell::Cell::new(0);
    view.ask(|_| {
        asked.set(asked.get() + 1);
        if asked.get() < 3 {
            std::thread::sleep(LIMIT);
            return Err(MetaError::Damaged("what a page says that is used again".into()));
        }
        Ok(())
    })
    .unwrap();
    answer(format!("asked {} times", asked.get()));
}

/// Has much less time for a question than all the names that are not shown take.
fn passing(dir: &Path) {
    let view = View::open_with(dir, Duration::from_millis(4)).unwrap();
    for after in questions().map(|after| after.parse().ok()) {
        let (mut shown, mut after) = (Vec::new(), after);
        loop {
            let before = shown.len();
            view.read_dir(ROOT, after, &mut |name, attributes| {
                shown.push(String::from_utf8_lossy(name).into_owned());
                after = Some(attributes.ino);
                true
            })
            .unwrap()
            .unwrap();
            if shown.len() == before {
                break;
            }
        }
        answer(shown.join(" "));
    }
}

/// Reads for ever: a reader that is stopped inside its transaction.
fn stuck(dir: &Path) {
    let view = View::open(dir).unwrap();
    view.read_dir(ROOT, None, &mut |_, _| {
        answer("reading");
        loop {
            std::thread::park();
        }
    })
    .unwrap();
}

/// Lists and lists; only SIGKILL stops it.
fn writer(dir: &Path) {
    let bench = Bench { dir: tempfile::tempdir_in(dir).unwrap(), ..Bench::new() };
    let store = open(&dir.join("store"), &SMALL, &bench.clock, &bench.numbers).unwrap();
    let entries: Vec<Incoming> = (0..3_000).map(|i| file(&format!("{i:05}"), "token")).collect();
    list(&store, ROOT, &entries);
    answer("listed");
    for round in 0.. {
        let mut listing = store.begin_listing(ROOT).unwrap().with_batch(500);
        let changed = |e: &Incoming| Incoming { token: format!("token{round}"), ..e.clone() };
        listing.page(&entries.iter().map(changed).collect::<Vec<_>>()).unwrap();
        listing.finish().unwrap();
    }
}

#[test]
fn another_process_sees_each_commit_at_once() {
    let bench = Bench::new();
    let store = bench.open();
    store.put(ROOT, &file("a", "1")).unwrap();
    let mut reader = Role::start("reader", bench.dir.path());
    assert_eq!(reader.ask("lookup a"), "version 1");
    assert_eq!(reader.ask("lookup b"), "unknown");
    for version in 2..50 {
        store.put(ROOT, &file("a", &"x".repeat(version))).unwrap();
        assert_eq!(reader.ask("lookup a"), format!("version {version}"));
    }
    bench.at(4_000);
    list(&store, ROOT, &[file("b", "1")]);
    assert_eq!(reader.ask("lookup a"), "absent 4000");
    assert_eq!(reader.ask("lookup b"), "version 1");
    reader.end();
}

#[test]
fn a_reader_cannot_write_the_map() {
    let bench = Bench::new();
    let _store = bench.open();
    let mut reader = Role::start("reader", bench.dir.path());
    let map = reader.ask("maps");
    assert!(map.contains(" r--s "), "{map}");
    reader.end();
}

#[test]
fn a_reader_holds_nothing_that_it_could_write() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[file("a", "1")]);
    let mut reader = Role::start("reader", bench.dir.path());
    assert_eq!(reader.ask("lookup a"), "version 1");
    // The reader table and the locks of LMDB: a worker that writes there reaches into the agent.
    assert_eq!(reader.ask("writable"), "[]");
    reader.end();
}

#[test]
fn what_a_reader_in_time_looks_at_stays_what_it_was_however_much_is_written() {
    let bench = Bench::new();
    let store = bench.open();
    store.keep_pages_for(PATIENCE);
    let entries =
        |token: &str| (0..3_000).map(|i| file(&format!("{i:05}"), token)).collect::<Vec<Incoming>>();
    list(&store, ROOT, &entries("old"));
    let mut reader = Role::start("patient", bench.dir.path());
    assert_eq!(reader.answer(), "reading");
    for round in 0..8 {
        list(&store, ROOT, &entries(&format!("new{round}")));
    }
    assert_eq!(reader.ask("go on"), "3000 names, tokens {\"old\"}");
    reader.end();
}

#[test]
fn a_reader_that_was_held_up_is_not_believed_and_goes_on_from_what_it_has() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &(0..100).map(|i| file(&format!("{i:05}"), "1")).collect::<Vec<_>>());
    let mut reader = Role::start("held up", bench.dir.path());
    // Held up at each tenth name, it has to come again; names are neither lost nor shown twice.
    let [calls, names] =
        reader.answer().split(' ').map(|n| n.parse::<u32>().unwrap()).collect::<Vec<_>>()[..]
    else {
        panic!("two numbers")
    };
    assert_eq!(names, 100);
    assert!(calls >= 10, "{calls}");
    assert_eq!(reader.answer(), "asked 3 times");
    reader.end();
}

#[test]
fn a_directory_is_read_however_many_names_it_does_not_show() {
    let bench = Bench::new();
    let store = bench.open();
    list(&store, ROOT, &[file("a", "1"), file("k", "1"), file("z", "1")]);
    // A listing that is under way, or was given up.
    let mut listing = store.begin_listing(ROOT).unwrap();
    for page in 0..60 {
        let name = |n| format!("{}{:06}", if page % 3 == 0 { "b" } else { "l" }, page * 10_000 + n);
        listing.page(&(0..10_000).map(|n| file(&name(n), "1")).collect::<Vec<_>>()).unwrap();
    }
    let mut reader = Role::start("passing", bench.dir.path());
    assert_eq!(reader.ask("from the first"), "a k z");
    let Lookup::Found { attributes, .. } = store.lookup(ROOT, b"k").unwrap() else { panic!("k is there") };
    assert_eq!(reader.ask(&attributes.ino.to_string()), "z");
    drop(listing);
    assert_eq!(reader.ask("from the first"), "a k z");
    reader.end();
}

#[test]
fn killed_readers_do_not_make_the_file_grow() {
    let bench = Bench::new();
    let store = bench.open();
    store.keep_pages_for(Duration::ZERO);
    let entries: Vec<Incoming> = (0..2_000).map(|i| file(&format!("{i:05}"), "token")).collect();
    for _ in 0..5 {
        list(&store, ROOT, &entries);
    }
    let settled = store.stats().unwrap().used_bytes;
    for _ in 0..10 {
        let mut reader = Role::start("stuck", bench.dir.path());
        assert_eq!(reader.answer(), "reading");
        reader.kill();
        list(&store, ROOT, &entries);
    }
    let used = store.stats().unwrap().used_bytes;
    assert!(used < settled * 2, "{settled} bytes in use before, {used} after");
}

/// How many names the root has. A call that is held up ends early, and its caller goes on.
fn all_names(view: &View) -> usize {
    let (mut count, mut after) = (0, None);
    loop {
        let before = count;
        let listed = view.read_dir(ROOT, after, &mut |_, attributes| {
            count += 1;
            after = Some(attributes.ino);
            true
        });
        listed.unwrap().unwrap();
        if count == before {
            return count;
        }
    }
}

#[test]
fn a_store_whose_owner_was_killed_is_kept_and_whole() {
    for round in 0..6u64 {
        let bench = Bench::new();
        let mut owner = Role::start("writer", bench.dir.path());
        assert_eq!(owner.answer(), "listed");
        // Somewhere in the middle of its listings: a different place each round, whatever the machine's speed.
        let (until, view) = (Instant::now(), View::open(&bench.dir.path().join("store")).unwrap());
        let mut looks = 0;
        while until.elapsed().as_millis() < u128::from(20 + round * 7) || looks < 10 {
            assert_eq!(all_names(&view), 3_000);
            looks += 1;
        }
        owner.kill();
        drop(view);
        let store = open(&bench.dir.path().join("store"), &SMALL, &bench.clock, &bench.numbers).unwrap();
        assert_eq!(*store.opened(), Opened::Kept);
        let mut inodes = Vec::new();
        store
            .read_dir(ROOT, None, &mut |_, a| {
                inodes.push(a.ino);
                true
            })
            .unwrap()
            .unwrap();
        assert_eq!(inodes.len(), 3_000);
        for ino in inodes {
            store.attributes(ino).unwrap().unwrap();
        }
        bench.numbers.0.store(store.stats().unwrap().highest_ino + 1, Ordering::Relaxed);
        assert_eq!(list(&store, ROOT, &[file("00007", "token"), file("new", "1")]).entries, 2);
    }
}

#[test]
fn a_store_that_was_released_is_written_by_its_next_owner_alone() {
    let bench = Bench::new();
    let store = bench.open();
    let known = store.put(ROOT, &file("a", "1")).unwrap();
    let mut listing = store.begin_listing(ROOT).unwrap();
    store.release();
    let mut next = Role::start("successor", bench.dir.path());
    assert_eq!(next.answer(), "Kept", "it need not be written out");
    assert_eq!(next.ask("put b"), "done");
    assert!(matches!(
        listing.page(&[file("c", "1")]).and_then(|()| listing.finish()),
        Err(MetaError::Released)
    ));
    assert!(matches!(store.put(ROOT, &file("c", "1")), Err(MetaError::Released)));
    assert!(matches!(store.put_absent(ROOT, b"a"), Err(MetaError::Released)));
    assert_eq!(found(&store, ROOT, "a").ino, known.ino);
    assert_ne!(found(&store, ROOT, "b").ino, known.ino);
    drop(store); // leaves the marker to the next owner
    next.kill();
    assert_eq!(*bench.open().opened(), Opened::Kept);
}

fn successor(dir: &Path) {
    let bench = Bench::new();
    bench.numbers.0.store(1 << 20, Ordering::Relaxed);
    let store = open(dir, &SMALL, &bench.clock, &bench.numbers).unwrap();
    answer(format!("{:?}", store.opened()));
    for question in questions() {
        let name = question.strip_prefix("put ").unwrap();
        store.put(ROOT, &file(name, "1")).unwrap();
        answer("done");
    }
}

#[test]
fn a_full_disk_is_an_error_and_reading_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    // A disk of its own in a mount namespace of its own, gone with the process.
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .arg("mount -t tmpfs -o size=2m none \"$MILLPOND_META_TEST_DIR\" && exec \"$0\" \"$@\"");
    command.arg(std::env::current_exe().unwrap());
    let mut role = Role::spawn(command, "full", dir.path());
    assert_eq!(role.answer(), "full");
    assert_eq!(role.answer(), "reads go on");
    assert_eq!(role.answer(), "kept");
    role.end();
}

#[test]
fn a_disk_that_others_fill_takes_new_names_from_the_reserve() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .arg("mount -t tmpfs -o size=32m none \"$MILLPOND_META_TEST_DIR\" && exec \"$0\" \"$@\"");
    command.arg(std::env::current_exe().unwrap());
    let mut role = Role::spawn(command, "reserve", dir.path());
    let stored: u64 = role.answer().parse().unwrap();
    role.end();
    println!("{stored} names in a reserve of {} bytes", SMALL.reserve_bytes);
    assert!(stored > 10_000, "{stored}");
}

fn reserve(dir: &Path) {
    let bench = Bench::new();
    let store = open(dir, &SMALL, &bench.clock, &bench.numbers).unwrap();
    let mut hog = std::fs::File::create(dir.join("hog")).unwrap();
    while std::io::Write::write(&mut hog, &[1; 65_536]).is_ok() {}
    let mut stored = 0;
    loop {
        let names: Vec<_> = (0..1000).map(|i| file(&format!("file-{stored}-{i:03}"), "0123456789")).collect();
        let dir = store.put(ROOT, &directory(&format!("d{stored}")));
        let Ok(dir) = dir else { break };
        let Ok(mut listing) = store.begin_listing(dir.ino) else { break };
        if listing.page(&names).is_err() || listing.finish().is_err() {
            break;
        }
        stored += 1000;
    }
    answer(stored.to_string());
    // With room again, so does everything.
    std::fs::remove_file(dir.join("hog")).unwrap();
    list(&store, store.put(ROOT, &directory("after")).unwrap().ino, &[file("a", "1")]);
}

fn full(dir: &Path) {
    let bench = Bench::new();
    let store = open(dir, &SMALL, &bench.clock, &bench.numbers).unwrap();
    // Each name replaces some pages: with a megabyte of room, most of the time would be waiting for them.
    store.keep_pages_for(Duration::from_millis(10));
    let mut stored = 0;
    let mut put = || store.put(ROOT, &file(&format!("file-{stored}"), "0123456789")).map(|_| stored += 1);
    loop {
        if let Err(error) = put() {
            assert!(matches!(error, MetaError::Full(_)), "{error}");
            // On a busy machine it may come before the pages are back that the last names have replaced.
            std::thread::sleep(Duration::from_millis(20));
            if put().is_err() {
                break;
            }
        }
    }
    assert!(stored > 100);
    answer("full");
    for _ in 0..3 {
        assert!(matches!(store.put(ROOT, &file("more", &"x".repeat(9_000))), Err(MetaError::Full(_))));
        found(&store, ROOT, &format!("file-{}", stored - 1));
    }
    // New readers write lock.mdb: no SIGBUS there.
    std::thread::scope(|scope| {
        for _ in 0..200 {
            scope.spawn(|| found(&store, ROOT, "file-0"));
        }
    });
    answer("reads go on");
    std::fs::write(dir.join("filler"), vec![1; 1 << 20]).unwrap_err();
    std::fs::remove_file(dir.join("filler")).unwrap();
    drop(store);
    let store = open(dir, &SMALL, &bench.clock, &bench.numbers).unwrap();
    found(&store, ROOT, "file-0");
    answer(if *store.opened() == Opened::Kept { "kept" } else { "lost" });
}

#[test]
fn a_million_names_are_listed_in_bounded_memory() {
    let dir = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let mut role = Role::start("million", dir.path());
    for _ in 0..4 {
        println!("{}", role.answer());
    }
    let peak_kib: u64 = role.answer().parse().unwrap();
    role.end();
    println!("{} KiB anonymous memory at most, {:?} in all", peak_kib, begun.elapsed());
    assert!(peak_kib < 64 << 10, "{peak_kib} KiB of anonymous memory");
}

pub(super) fn anonymous_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn million(dir: &Path) {
    const NAMES: u64 = 1_000_000;
    let bench = Bench::new();
    let store = open(dir, &Options::default(), &bench.clock, &bench.numbers).unwrap();
    let before = anonymous_kib();
    let mut peak = before;
    let name = |i: u64| format!("part-{i:08}.parquet");
    // The third in an order that hits all of the map in every transaction.
    let orders: [(&str, Order); 3] =
        [("first", |i| i), ("again", |i| i), ("shuffled", |i| i * 611_953 % NAMES)];
    for (label, order) in orders {
        let begun = Instant::now();
        let mut listing = store.begin_listing(ROOT).unwrap();
        for page in 0..NAMES / 1_000 {
            let entry = |i: u64| file(&name(i), &format!("{:032x}", i.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            let entries: Vec<Incoming> =
                (page * 1_000..(page + 1) * 1_000).map(|i| entry(order(i))).collect();
            listing.page(&entries).unwrap();
            peak = peak.max(anonymous_kib());
        }
        assert_eq!(listing.finish().unwrap().entries, NAMES);
        answer(format!(
            "{label}: {:?}, {} MiB used, {} KiB",
            begun.elapsed(),
            store.stats().unwrap().used_bytes >> 20,
            peak - before
        ));
    }
    let begun = Instant::now();
    let (mut count, mut last, mut calls) = (0u64, None, 0u64);
    loop {
        let start = count;
        let mut room = 100;
        store
            .read_dir(ROOT, last, &mut |_, a| {
                if room == 0 {
                    return false;
                }
                (room, count, last) = (room - 1, count + 1, Some(a.ino));
                true
            })
            .unwrap()
            .unwrap();
        calls += 1;
        if count == start {
            break;
        }
    }
    assert_eq!(count, NAMES);
    answer(format!("read in {calls} calls: {:?}", begun.elapsed()));
    assert_eq!(store.stats().unwrap().inodes, NAMES + 1);
    answer(peak - before);
}
