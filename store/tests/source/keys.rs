//! Keys as object stores allow them: served, or reported, and never in the way of others.

use crate::common::*;
use std::collections::BTreeMap;
use store::{Kind, Source, StoreError};
use testkit::content;
use testkit::s3::{Bucket, Gateway, Server};

async fn names(source: &dyn Source, dir: &str) -> (BTreeMap<String, Kind>, Vec<String>) {
    let (mut found, mut unnameable, mut token) = (BTreeMap::new(), Vec::new(), None);
    loop {
        let page = source.list(dir.as_bytes(), token.as_deref()).await.unwrap();
        for entry in page.entries {
            let name = String::from_utf8(entry.name).unwrap();
            // A name may come as a file and as a directory; here the directory is remembered.
            if found.get(&name) != Some(&Kind::Directory) {
                found.insert(name, entry.kind);
            }
        }
        unnameable.extend(page.unnameable);
        token = page.next;
        if token.is_none() {
            return (found, unnameable);
        }
    }
}

#[tokio::test]
async fn listing_and_head_agree_on_what_is_too_large_for_a_file() {
    let server = Server::memory(BUCKET).await.unwrap();
    let largest = volume::FILE_BYTES_MAX;
    for (key, size) in [("zero", 0), ("largest", largest), ("one-more", largest + 1), ("u64", u64::MAX)] {
        server.claim(BUCKET, key, size).unwrap();
    }
    let source = source(&server);
    let (found, hidden) = names(&*source, "").await;
    assert_eq!(found.keys().collect::<Vec<_>>(), ["largest", "zero"]);
    assert_eq!(hidden, ["one-more (too large for a file)", "u64 (too large for a file)"]);
    for key in ["one-more", "u64"] {
        assert_eq!(source.head(key.as_bytes()).await.unwrap(), None, "{key}");
    }
    let Some(store::Entry { kind: Kind::File { size, version }, .. }) =
        source.head(b"largest").await.unwrap()
    else {
        panic!("the largest file that there can be is shown")
    };
    assert_eq!(size, largest);
    for start in [0, largest / 2, largest - 100] {
        let bytes = read(&*source, b"largest", &version, start..start + 100).await.unwrap();
        assert_eq!(bytes, content::bytes(content::id("largest"), start..start + 100), "from {start}");
    }
}

/// Empty directories of gateways in front of a file system: common prefixes of their parents, without a key below them.
#[tokio::test]
async fn an_empty_directory_that_its_parent_lists_is_shown_empty() {
    let shown = ["empty", "a/b/empty", "many"];
    let bucket = Gateway::with_directories(&shown).unwrap();
    // More than a page of what sorts before `many/`.
    for k in 0..2_500 {
        bucket.put(&format!("many-{k:04}"), "x".into()).unwrap();
    }
    bucket.put("full/file", "x".into()).unwrap();
    let config = testkit::s3::Config::default().bucket(BUCKET, bucket);
    let server = Server::start(config).await.unwrap();
    let source = source(&server);
    assert_eq!(names(&*source, "").await.0.get("empty"), Some(&Kind::Directory));
    for dir in shown {
        assert_eq!(names(&*source, dir).await, (BTreeMap::new(), vec![]), "{dir}");
        let found = source.head(dir.as_bytes()).await.unwrap();
        assert_eq!(found.map(|entry| entry.kind), Some(Kind::Directory), "{dir}");
    }
    for nothing in ["emp", "empty/", "a/b/emptyx", "full/fil"] {
        let listed = source.list(nothing.as_bytes(), None).await;
        assert!(matches!(listed, Err(StoreError::NotFound { .. })), "{nothing}: {listed:?}");
        assert_eq!(source.head(nothing.as_bytes()).await.unwrap(), None, "{nothing}");
    }
    server.reset_stats();
    let fresh = crate::common::source(&server);
    assert_eq!(fresh.head(b"nothing").await.unwrap(), None);
    assert_eq!(server.stats().total(), 2, "no more than stores without such directories need");
}

#[tokio::test]
async fn every_nameable_key_round_trips() {
    let server = Server::memory(BUCKET).await.unwrap();
    let odd = || ODD_KEYS.into_iter().chain(["ünï/cödé"]);
    for key in odd() {
        server.put(BUCKET, &format!("dir é+/{key}"), content::bytes(content::id(key), 0..500)).unwrap();
    }
    server.put(BUCKET, &format!("dir é+/{}", "x".repeat(255)), "x").unwrap();
    let source = source(&server);
    let (found, unnameable) = names(&*source, "dir é+").await;
    assert_eq!(unnameable, Vec::<String>::new());
    assert_eq!(found.len(), odd().count() + 1);
    for key in odd() {
        let path = format!("dir é+/{key}");
        let entry =
            source.head(path.as_bytes()).await.unwrap().unwrap_or_else(|| panic!("{key:?} is not found"));
        let name = key.split('/').next().unwrap();
        assert!(found.contains_key(name), "{key:?} is not listed");
        let Kind::File { size, version } = entry.kind else { panic!("{key:?} is {entry:?}") };
        let bytes = read(&*source, path.as_bytes(), &version, 0..size).await.unwrap();
        assert_eq!(content::first_wrong_byte(content::id(key), 0, &bytes), None, "{key:?}");
        if name == key {
            assert_eq!(found[key], Kind::File { size, version }, "{key:?}");
        }
    }
}

#[tokio::test]
async fn keys_without_a_name_are_reported_once_and_hide_nothing() {
    let server = Server::memory(BUCKET).await.unwrap();
    let long = "y".repeat(256);
    let keys = [
        "a", "a/", "a/b", "a//b", "a//c", "a/./x", "a/../x", ".", "..", "./x", "/x", "m/", "n/o", &long,
        "good",
    ];
    for key in keys {
        server.put(BUCKET, key, if key == "a" { "file" } else { "" }).unwrap();
    }
    server.put(BUCKET, "full/", "content that no reader can open").unwrap();
    server.put(BUCKET, "full/x", "").unwrap();
    let source = source(&server);
    let (found, mut unnameable) = names(&*source, "").await;
    assert_eq!(found.keys().map(String::as_str).collect::<Vec<_>>(), ["a", "full", "good", "m", "n"]);
    assert_eq!(found["a"], Kind::Directory);
    unnameable.sort();
    assert_eq!(unnameable, [".", "..", "./", "/", long.as_str()]);
    let (found, mut unnameable) = names(&*source, "a").await;
    assert_eq!(found.keys().map(String::as_str).collect::<Vec<_>>(), ["b"]);
    unnameable.sort();
    assert_eq!(unnameable, ["a/../", "a/./", "a//"]);
    let (found, unnameable) = names(&*source, "full").await;
    assert_eq!((found.len(), unnameable), (1, vec!["full/".to_owned()]));
    // A directory that is only a marker exists, and is empty.
    assert_eq!(names(&*source, "m").await.0.len(), 0);
}

#[tokio::test]
async fn of_an_object_and_a_directory_of_one_name_the_directory_wins() {
    let server = Server::memory(BUCKET).await.unwrap();
    for key in ["a", "a/b", "marker/", "only/deep/er", "file", "file-2"] {
        server.put(BUCKET, key, "x").unwrap();
    }
    let source = source(&server);
    let is_directory =
        async |path: &str| source.head(path.as_bytes()).await.unwrap().map(|e| e.kind == Kind::Directory);
    for (path, expected) in [
        ("a", Some(true)),
        ("marker", Some(true)),
        ("only", Some(true)),
        ("only/deep", Some(true)),
        ("file", Some(false)),
        ("fil", None),
        ("only/", None),
        ("a/../file", None),
        ("./file", None),
        ("//", None),
        ("", None),
    ] {
        assert_eq!(is_directory(path).await, expected, "{path:?}");
    }
    assert!(matches!(source.list(b"nothing", None).await, Err(StoreError::NotFound { .. })));
    assert!(matches!(source.list(b"file", None).await, Err(StoreError::NotFound { .. })));
}

#[tokio::test]
async fn pages_are_bounded_and_complete() {
    let server = Server::memory(BUCKET).await.unwrap();
    for n in 0..2500 {
        server.put(BUCKET, &format!("p/d/{n:05} +%"), "").unwrap();
    }
    let source = open(&spec(&server, "s3://bucket/p"), quick(), std::sync::Arc::new(store::NoObserver));
    let (mut seen, mut token, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = source.list(b"d", token.as_deref()).await.unwrap();
        assert!(page.entries.len() <= store::PAGE_ENTRIES);
        seen.extend(page.entries.into_iter().map(|entry| entry.name));
        pages += 1;
        token = page.next;
        if token.is_none() {
            break;
        }
    }
    seen.dedup();
    assert_eq!((seen.len(), pages), (2500, 3));
}

#[tokio::test]
async fn listing_and_head_agree_on_every_attribute() {
    let server = Server::memory(BUCKET).await.unwrap();
    server.put(BUCKET, "x", "12345").unwrap();
    let source = source(&server);
    let listed = source.list(b"", None).await.unwrap().entries.remove(0);
    assert_eq!(source.head(b"x").await.unwrap(), Some(listed));
}

#[tokio::test]
async fn an_empty_range_asks_nobody() {
    let server = Server::memory(BUCKET).await.unwrap();
    let meta = server.put(BUCKET, "empty", "").unwrap();
    let source = source(&server);
    assert_eq!(read(&*source, b"empty", &version(&meta), 0..0).await.unwrap(), b"");
    assert_eq!(server.stats().of("GetObject"), 0);
}
