//! What a source of HDFS claims, against Hadoop itself: `scripts/stores hdfs` installs it and runs this.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too; clippy only knows #[test] functions.

mod cluster;
#[path = "../common/mod.rs"]
mod common;

use cluster::{Cluster, name};
use common::{Asking, Log, Spawner, file, listed, read};
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{Kind, NoObserver, StoreError};

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

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_hdfs_keeps_what_the_contract_claims() {
    let mut cluster = Cluster::start("plain");
    let authority = format!("127.0.0.1:{}", cluster.told[0]);
    println!("plain: {authority}");
    let open = |root: &str, user| {
        Asking::simple(authority.clone(), root, user).open(Spawner::new(), Arc::new(NoObserver))
    };
    let source = open("/data", "alice");
    let missing = source.check(Duration::from_secs(30)).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })), "{missing:?}");
    cluster.say(&format!("mkdir {}", name("/data")));
    source.check(Duration::from_secs(30)).await.unwrap();

    // Odd names: each is listed, found and read. HDFS refuses a colon in a path itself, by its Java client.
    let mut kept = Vec::new();
    for odd in ODD.iter().filter(|odd| !odd.contains(':')) {
        cluster.put(&format!("/data/odd/{odd}"), &content(7, 500));
        kept.push(*odd);
    }
    let (found, hidden) = listed(&*source, b"odd").await.unwrap();
    assert_eq!((found.len(), hidden), (kept.len(), 0), "{:?}", found.keys());
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

    // Pages.
    cluster.say(&format!("fill {} 2345", name("/data/many")));
    cluster.say(&format!("mkdir {}", name("/data/many/0100 d")));
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
    cluster.put("/data/f", &whole);
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
    cluster.put("/data/f", &content(2, SIZE as usize));
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
    cluster.with_content("append", "/data/f", &content(3, 100));
    let stale = read(&*open("/data", "alice"), b"f", &now, 0..10).await;
    assert!(matches!(stale, Err(StoreError::Stale { .. })), "{stale:?}");
    let (size, longer) = file(&*source, b"f").await;
    assert_eq!(size, SIZE + 100);
    assert_eq!(read(&*source, b"f", &longer, SIZE..size).await.unwrap(), content(3, 100));
    cluster.say(&format!("delete {}", name("/data/f")));
    let gone = read(&*open("/data", "alice"), b"f", &longer, 0..10).await;
    assert!(matches!(gone, Err(StoreError::Stale { .. })), "{gone:?}");

    // A file that is being written: its blocks can be read but the last one, which is an error at once; nothing hangs.
    cluster.with_content("begin", "/data/open", &content(4, 1_500_000));
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
    cluster.say(&format!("end {}", name("/data/open")));
    let (size, _) = file(&*source, b"open").await;
    assert_eq!(size, 1_500_000);

    // Rights, in words of HDFS's and without a stack trace.
    cluster.put("/data/secret", b"x");
    cluster.say(&format!("chmod {} 600", name("/data/secret")));
    let (_, version) = file(&*source, b"secret").await;
    let Err(StoreError::Denied { why, .. }) = read(&*source, b"secret", &version, 0..1).await else {
        panic!("alice may not read it")
    };
    assert!(why.contains("alice") && !why.contains("\tat ") && why.len() < 500, "{why}");

    // Bad bytes on one DataNode: their checksum tells, and the other one has them.
    cluster.put("/data/checked", &content(5, 100_000));
    cluster.say(&format!("corrupt {} 0", name("/data/checked")));
    let (size, version) = file(&*source, b"checked").await;
    for _ in 0..4 {
        let fresh = open("/data", "alice");
        assert!(read(&*fresh, b"checked", &version, 0..size).await.unwrap() == content(5, 100_000));
    }

    // Safe mode: what is there can be read.
    cluster.say("safemode ENTER");
    assert_eq!(read(&*source, b"checked", &version, 0..10).await.unwrap(), content(5, 10));
    cluster.say("safemode LEAVE");

    // A dead DataNode: the other one has everything, too.
    cluster.put("/data/both", &content(6, 2 << 20));
    let (size, version) = file(&*source, b"both").await;
    cluster.say("stop-datanode 0");
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
