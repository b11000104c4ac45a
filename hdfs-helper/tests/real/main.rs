//! What a source of HDFS claims, against Hadoop itself: `scripts/stores hdfs` installs it and runs this.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too; clippy only knows #[test] functions.

#[path = "../common/mod.rs"]
mod common;
mod kerberos;

use common::{Asking, Log, Spawner, file, listed, read};
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{Kind, NoObserver, StoreError};
use testkit::hdfs::Hdfs;
use volume::Permissions;

/// Other bytes for another seed.
fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

const ODD: &[&str] = &[
    " lead",
    "trail ",
    "a+b%20c",
    "é\u{301}ß",
    "日本語",
    "a:b",
    "#?&=",
    "'\"",
    "tab\tnew\nline",
    "\u{1f600}",
    "...",
];

fn long_owner() -> String {
    format!("{} g", "o".repeat(300))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_hdfs_keeps_what_the_contract_claims() {
    let place = tempfile::tempdir().unwrap();
    let mut cluster = Hdfs::start("plain", place.path()).unwrap();
    let authority = format!("127.0.0.1:{}", cluster.told[0]);
    println!("plain: {authority}");
    let open = |root: &str, user| {
        Asking::simple(authority.clone(), root, user).open(Spawner::new(), Arc::new(NoObserver))
    };
    let source = open("/data", "alice");
    let missing = source.check(Duration::from_secs(30)).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })), "{missing:?}");
    cluster.say(&format!("mkdir {}", Hdfs::name("/data"))).unwrap();
    source.check(Duration::from_secs(30)).await.unwrap();

    // Odd names: each is listed, found and read. HDFS refuses a colon in a path itself, by its Java client.
    let mut kept = Vec::new();
    for odd in ODD.iter().filter(|odd| !odd.contains(':')) {
        cluster.put(&format!("/data/odd/{odd}"), &content(7, 500)).unwrap();
        kept.push(*odd);
    }
    let (found, hidden) = listed(&*source, b"odd").await.unwrap();
    assert_eq!((found.len(), hidden), (kept.len(), 0), "{:?}", found.keys());
    // In the order that a listing is taken up again by: of bytes, as Java has them.
    let names: Vec<_> =
        source.list(b"odd", None).await.unwrap().entries.into_iter().map(|e| e.name).collect();
    assert!(names.is_sorted_by_key(|name| name.iter().map(|b| *b as i8).collect::<Vec<_>>()), "{names:?}");
    for odd in kept {
        let path = format!("odd/{odd}");
        let (size, version) = file(&*source, path.as_bytes()).await;
        assert_eq!(
            found.get(odd.as_bytes()),
            Some(&Kind::File { size, version: version.clone() }),
            "{odd:?}"
        );
        assert_eq!(
            read(&*source, path.as_bytes(), &version, 0..size).await.unwrap(),
            content(7, 500),
            "{odd:?}"
        );
    }

    // Owner and mode: names are numbers as the operator says.
    let put = |cluster: &mut Hdfs, name: &str, owner: &str, mode: &str| {
        let path = Hdfs::name(&format!("/data/owned/{name}"));
        cluster.put(&format!("/data/owned/{name}"), b"x").unwrap();
        cluster.say(&format!("chmod {path} {mode}")).unwrap();
        cluster.say(&format!("chown {path} {owner}")).unwrap();
    };
    for (name, owner, mode) in
        [("known", "alice 77", "640"), ("unknown", "bob staff", "1777"), ("long", &long_owner(), "400")]
    {
        put(&mut cluster, name, owner, mode);
    }
    let shown = |mode, uid, gid| Some(Permissions { mode, uid, gid });
    for entry in source.list(b"owned", None).await.unwrap().entries {
        let expected = match &entry.name[..] {
            b"known" => shown(0o640, Some(1000), Some(77)),
            // A file has no sticky bit.
            b"unknown" => shown(0o777, None, None),
            _ => shown(0o400, None, None),
        };
        assert_eq!(entry.permissions, expected, "{entry:?}");
        let path = [b"owned/", &entry.name[..]].concat();
        assert_eq!(source.head(&path).await.unwrap().unwrap().permissions, expected);
    }

    // Pages.
    cluster.say(&format!("fill {} 2345", Hdfs::name("/data/many"))).unwrap();
    cluster.say(&format!("mkdir {}", Hdfs::name("/data/many/0100 d"))).unwrap();
    let begun = Instant::now();
    let (found, _) = listed(&*source, b"many").await.unwrap();
    println!("2,346 names listed in {:?}", begun.elapsed());
    assert_eq!(found.len(), 2346);
    assert_eq!(found.values().filter(|kind| **kind == Kind::Directory).count(), 1);
    // Two at once, from pages that the other has taken the listing of.
    let first = source.list(b"many", None).await.unwrap();
    let token = first.next.unwrap();
    let (one, other) = tokio::join!(source.list(b"many", Some(&token)), source.list(b"many", Some(&token)));
    let (one, other) = (one.unwrap(), other.unwrap());
    assert_eq!(one.entries, other.entries);
    assert_eq!(one.entries.len(), 1000);

    // Pages with names of all kinds, each page from another helper.
    for k in 0..1200 {
        let name_ = format!("/data/wide/{}{k}", ["z", "é", "日", " "][k % 4]);
        cluster.say(&format!("mkdir {}", Hdfs::name(&name_))).unwrap();
    }
    let mut pages = (Vec::new(), None::<String>);
    loop {
        let page = open("/data", "alice").list(b"wide", pages.1.as_deref()).await.unwrap();
        pages.0.extend(page.entries.into_iter().map(|entry| entry.name));
        pages.1 = page.next;
        if pages.1.is_none() {
            break;
        }
    }
    let distinct: std::collections::BTreeSet<_> = pages.0.iter().collect();
    assert_eq!((pages.0.len(), distinct.len()), (1200, 1200));

    // What is not there, and what is no directory.
    assert!(matches!(source.list(b"nothing", None).await, Err(StoreError::NotFound { .. })));
    assert!(matches!(source.list(b"many/000001", None).await, Err(StoreError::NotFound { .. })));
    assert_eq!(source.head(b"nothing").await.unwrap(), None);
    assert_eq!(source.head(b"many/000001/x").await.unwrap(), None);
    assert_eq!(source.head(b"many").await.unwrap().unwrap().kind, Kind::Directory);
    assert_eq!(listed(&*open("/", "alice"), b"").await.unwrap().0.keys().next().unwrap(), b"data");

    // Ranges over three blocks and a part of one.
    const SIZE: u64 = (3 << 20) + 7;
    let whole = content(1, SIZE as usize);
    cluster.put("/data/f", &whole).unwrap();
    let (size, old) = file(&*source, b"f").await;
    assert_eq!(size, SIZE);
    for range in
        [0..1, SIZE - 1..SIZE, 0..SIZE, (1 << 20) - 1..(1 << 20) + 1, 5..5, 1..SIZE - 1, 4095..70_000]
    {
        let got = read(&*source, b"f", &old, range.clone()).await.unwrap();
        assert!(got == whole[range.start as usize..range.end as usize], "{range:?}");
    }

    // A version that is gone: replaced, replaced in the middle of a read, removed, appended to.
    let mut stream = source.get(b"f", &old, 0..SIZE).await.unwrap();
    let first = futures::StreamExt::next(&mut stream).await.unwrap().unwrap();
    assert_eq!(first, whole[..first.len()]);
    cluster.put("/data/f", &content(2, SIZE as usize)).unwrap();
    let stale = read(&*source, b"f", &old, 0..10).await;
    // Where the old version's blocks are still known they are what was asked for; they are never another version's.
    assert!(
        matches!(&stale, Err(StoreError::Stale { .. })) || stale.as_deref().ok() == Some(&whole[..10]),
        "{stale:?}"
    );
    drop(stream);
    let fresh = open("/data", "alice");
    let stale = read(&*fresh, b"f", &old, 0..10).await;
    assert!(matches!(stale, Err(StoreError::Stale { .. })), "{stale:?}");
    let (_, now) = file(&*source, b"f").await;
    assert_ne!(now, old);
    assert!(read(&*source, b"f", &now, 0..SIZE).await.unwrap() == content(2, SIZE as usize));
    cluster.with_content("append", "/data/f", &content(3, 100)).unwrap();
    let stale = read(&*open("/data", "alice"), b"f", &now, 0..10).await;
    assert!(matches!(stale, Err(StoreError::Stale { .. })), "{stale:?}");
    let (size, longer) = file(&*source, b"f").await;
    assert_eq!(size, SIZE + 100);
    assert_eq!(read(&*source, b"f", &longer, SIZE..size).await.unwrap(), content(3, 100));
    cluster.say(&format!("delete {}", Hdfs::name("/data/f"))).unwrap();
    let gone = read(&*open("/data", "alice"), b"f", &longer, 0..10).await;
    assert!(matches!(gone, Err(StoreError::Stale { .. })), "{gone:?}");

    // A file that is being written: its blocks can be read but the last one, which is an error at once; nothing hangs.
    cluster.with_content("begin", "/data/open", &content(4, 1_500_000)).unwrap();
    let (size, version) = file(&*source, b"open").await;
    println!("a file that is being written is told to have {size} of 1,500,000 bytes");
    let whole = content(4, 1_500_000);
    assert!(read(&*source, b"open", &version, 0..1 << 20).await.unwrap() == whole[..1 << 20]);
    let begun = Instant::now();
    let last = read(&*source, b"open", &version, 0..size).await;
    assert!(
        matches!(&last, Err(StoreError::Malformed { why, .. }) if why.contains("being written")),
        "{last:?}"
    );
    assert!(begun.elapsed() < Duration::from_secs(20));
    cluster.say(&format!("end {}", Hdfs::name("/data/open"))).unwrap();
    let (size, _) = file(&*source, b"open").await;
    assert_eq!(size, 1_500_000);

    // Rights, in words of HDFS's and without a stack trace.
    cluster.put("/data/secret", b"x").unwrap();
    cluster.say(&format!("chmod {} 600", Hdfs::name("/data/secret"))).unwrap();
    let (_, version) = file(&*source, b"secret").await;
    let Err(StoreError::Denied { why, .. }) = read(&*source, b"secret", &version, 0..1).await else {
        panic!("alice may not read it")
    };
    assert!(why.contains("alice") && !why.contains("\tat ") && why.len() < 500, "{why}");

    // Bad bytes on one DataNode: their checksum tells, and the other one has them.
    cluster.put("/data/checked", &content(5, 100_000)).unwrap();
    cluster.say(&format!("corrupt {} 0", Hdfs::name("/data/checked"))).unwrap();
    let (size, version) = file(&*source, b"checked").await;
    for _ in 0..4 {
        let fresh = open("/data", "alice");
        assert!(read(&*fresh, b"checked", &version, 0..size).await.unwrap() == content(5, 100_000));
    }

    // Safe mode: what is there can be read.
    cluster.say("safemode ENTER").unwrap();
    assert_eq!(read(&*source, b"checked", &version, 0..10).await.unwrap(), content(5, 10));
    cluster.say("safemode LEAVE").unwrap();

    // A dead DataNode: the other one has everything, too.
    cluster.put("/data/both", &content(6, 2 << 20)).unwrap();
    let (size, version) = file(&*source, b"both").await;
    cluster.say("stop-datanode 0").unwrap();
    let log = Arc::new(Log::default());
    let logged = Asking::simple(authority.clone(), "/data", "alice").open(Spawner::new(), log.clone());
    let begun = Instant::now();
    assert!(read(&*logged, b"both", &version, 0..size).await.unwrap() == content(6, 2 << 20));
    println!(
        "with a dead DataNode read in {:?}, retries: {:?}",
        begun.elapsed(),
        log.retries.lock().unwrap()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_helper_that_is_killed_a_hundred_times_costs_time_and_no_byte() {
    let place = tempfile::tempdir().unwrap();
    let mut cluster = Hdfs::start("plain", place.path()).unwrap();
    const SIZE: usize = 40 << 20;
    let whole = Arc::new(content(8, SIZE));
    cluster.put("/f", &whole).unwrap();
    let authority = format!("127.0.0.1:{}", cluster.told[0]);
    let (spawner, log) = (Spawner::new(), Arc::new(Log::default()));
    let source = Asking::simple(authority, "", "alice").open(spawner.clone(), log.clone());
    let (size, version) = file(&*source, b"f").await;
    assert_eq!(size, SIZE as u64);
    let readers = (0..4_u64).map(|reader| {
        let (source, version, whole, spawner) =
            (source.clone(), version.clone(), whole.clone(), spawner.clone());
        tokio::spawn(async move {
            let mut reads = 0_u64;
            while spawner.count() <= 100 {
                let start = (reads * 7_919_993 + reader * 1_000_003) % (SIZE as u64 - (4 << 20));
                let range = start..start + (4 << 20);
                let got = read(&*source, b"f", &version, range.clone()).await.unwrap();
                assert!(got == whole[range.start as usize..range.end as usize], "{range:?}");
                reads += 1;
            }
            reads
        })
    });
    let readers: Vec<_> = readers.collect();
    let killer = tokio::spawn({
        let spawner = spawner.clone();
        async move {
            let mut killed = 0;
            while spawner.count() <= 100 {
                let pid = rustix::process::Pid::from_raw(spawner.last() as i32).unwrap();
                // At whatever it does then; a helper that has ended by now is no one to kill.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                killed += 1;
                tokio::time::sleep(Duration::from_millis(10 + killed * 37 % 90)).await;
            }
        }
    });
    let begun = Instant::now();
    let mut reads = 0;
    for reader in readers {
        reads += reader.await.unwrap();
    }
    killer.await.unwrap();
    println!(
        "{reads} reads of 4 MiB over {} helpers in {:?}, {} retries, none failed",
        spawner.count(),
        begun.elapsed(),
        log.retries.lock().unwrap().len()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_do_not_read_take_little_of_a_helper_and_hold_up_no_question() {
    const READERS: u64 = 32;
    let place = tempfile::tempdir().unwrap();
    let mut cluster = Hdfs::start("plain", place.path()).unwrap();
    let whole = content(11, 24 << 20);
    cluster.put("/f", &whole).unwrap();
    let spawner = Spawner::new();
    let authority = format!("127.0.0.1:{}", cluster.told[0]);
    let source = Asking::simple(authority, "", "alice").open(spawner.clone(), Arc::new(NoObserver));
    let (size, version) = file(&*source, b"f").await;
    let peak = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", spawner.last())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
    };
    let idle = peak();
    let mut streams = Vec::new();
    for _ in 0..READERS {
        streams.push(source.get(b"f", &version, 0..size).await.unwrap());
    }
    // Until nothing more comes of it.
    let mut seen = 0;
    while seen != peak() {
        seen = peak();
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    println!("a helper takes {idle} MiB idle, and {seen} with {READERS} readers that do not read");
    assert!(seen - idle < 10 * READERS, "{seen} MiB");
    assert!(source.head(b"f").await.unwrap().is_some());
    let mut last = streams.pop().unwrap();
    let mut bytes = Vec::new();
    while let Some(piece) = futures::StreamExt::next(&mut last).await {
        bytes.extend_from_slice(&piece.unwrap());
    }
    assert!(bytes == whole);
    assert_eq!(spawner.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_of_a_hundred_thousand_files_is_listed_whole_and_takes_little() {
    const FILES: usize = 100_000;
    let place = tempfile::tempdir().unwrap();
    let mut cluster = Hdfs::start("plain", place.path()).unwrap();
    let begun = Instant::now();
    cluster.say(&format!("fill {} {FILES}", Hdfs::name("/many"))).unwrap();
    println!("{FILES} files made in {:?}", begun.elapsed());
    let authority = format!("127.0.0.1:{}", cluster.told[0]);
    let spawner = Spawner::new();
    let source = Asking::simple(authority, "", "alice").open(spawner.clone(), Arc::new(NoObserver));
    let begun = Instant::now();
    let (found, hidden) = listed(&*source, b"many").await.unwrap();
    let took = begun.elapsed();
    assert_eq!((found.len(), hidden), (FILES, 0));
    let status = std::fs::read_to_string(format!("/proc/{}/status", spawner.last())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
    println!("listed in {took:?}; the helper's peak: {peak}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_service_is_read_through_a_failover_and_a_dead_datanode() {
    let place = tempfile::tempdir().unwrap();
    let mut cluster = Hdfs::start("ha", place.path()).unwrap();
    let whole = content(9, 5 << 20);
    cluster.put("/d/f", &whole).unwrap();
    let (spawner, log) = (Spawner::new(), Arc::new(Log::default()));
    let mut asking = Asking::simple("millpond", "/d", "alice");
    asking.settings.insert("dfs.ha.namenodes.millpond".into(), "nn1,nn2".into());
    for (number, port) in cluster.told.iter().enumerate() {
        let name = format!("dfs.namenode.rpc-address.millpond.nn{}", number + 1);
        asking.settings.insert(name, format!("127.0.0.1:{port}"));
    }
    let source = asking.open(spawner.clone(), log.clone());
    source.check(Duration::from_secs(30)).await.unwrap();
    let (size, version) = file(&*source, b"f").await;
    let reading = tokio::spawn({
        let (source, version, whole) = (source.clone(), version.clone(), whole.clone());
        async move {
            let mut slowest = Duration::ZERO;
            for k in 0..400_usize {
                let begun = Instant::now();
                let start = k * 11_117 % (whole.len() - 50_000);
                let range = start as u64..start as u64 + 50_000;
                // Each asks the NameNode, too.
                assert!(source.head(b"f").await.unwrap().is_some());
                assert!(read(&*source, b"f", &version, range).await.unwrap() == whole[start..start + 50_000]);
                slowest = slowest.max(begun.elapsed());
            }
            slowest
        }
    });
    cluster.say("failover 1").unwrap();
    cluster.say("stop-datanode 1").unwrap();
    cluster.say("failover 0").unwrap();
    let slowest = reading.await.unwrap();
    println!(
        "400 look-ups and reads through two failovers and a dead DataNode: slowest {slowest:?}, retries {:?}",
        log.retries.lock().unwrap()
    );
    assert!(read(&*source, b"f", &version, 0..size).await.unwrap() == whole);
    assert_eq!(spawner.count(), 1);
}
