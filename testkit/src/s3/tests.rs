//! The server itself, where the store's tests do not reach: listings of every backend, the synthetic million.

mod batches;
mod client;
mod conditions;
mod faults;
mod multipart;
mod objects;

use super::*;
use std::ops::Bound;
use std::time::{Duration, Instant};

/// Gone with its value.
struct TestDir(std::path::PathBuf);

impl TestDir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("testkit-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn directory(name: &str) -> (Directory, TestDir) {
    let dir = TestDir::new(name);
    (Directory::new(&dir.0, Duration::from_secs(60)), dir)
}

fn walk(bucket: &dyn Bucket, prefix: &str, delimiter: Option<&str>, page: usize) -> Vec<String> {
    let (mut names, mut after) = (Vec::new(), None);
    loop {
        let listing = list(bucket, prefix, delimiter, after.as_deref(), page).unwrap();
        assert!(listing.objects.len() + listing.prefixes.len() <= page);
        names.extend(listing.objects.into_iter().map(|(key, _)| key));
        names.extend(listing.prefixes);
        match listing.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    names.sort();
    names
}

#[test]
fn pages_of_any_size_give_each_name_once() {
    let memory = Memory::default();
    for key in ["a", "a/", "a/b", "a/c/d", "a//e", "a-b", "ab", "b/x", "b/y", "c", "ü/1", "\u{10ffff}/x"] {
        memory.put(key, Bytes::new()).unwrap();
    }
    for page in 1..8 {
        let names = walk(&memory, "", Some("/"), page);
        assert_eq!(names, ["a", "a-b", "a/", "ab", "b/", "c", "ü/", "\u{10ffff}/"], "pages of {page}");
        assert_eq!(walk(&memory, "a/", Some("/"), page), ["a/", "a//", "a/b", "a/c/"], "pages of {page}");
        assert_eq!(walk(&memory, "", None, page).len(), 12, "pages of {page}");
    }
}

#[test]
fn claimed_sizes_are_told_as_they_are_claimed() {
    let listing = "<a><Size>-9223372036854775808</Size><Size>7</Size><Size>-1</Size></a>";
    let expected = format!("<a><Size>{}</Size><Size>7</Size><Size>{}</Size></a>", 1u64 << 63, u64::MAX);
    assert_eq!(service::unsigned_sizes(listing), expected);
    let memory = Memory::default();
    memory.claim("huge", u64::MAX).unwrap();
    assert_eq!(memory.stat("huge").unwrap().unwrap().size, u64::MAX);
}

#[test]
fn a_directory_lists_as_its_objects() {
    let dir = std::env::temp_dir().join(format!("testkit-directory-{}", std::process::id()));
    let bucket = Directory::new(&dir, Duration::from_secs(60));
    for key in ["a/b", "a/c", "d"] {
        bucket.put(key, Bytes::from_static(b"x")).unwrap();
    }
    assert_eq!(walk(&bucket, "", Some("/"), 2), ["a/", "d"]);
    assert_eq!(walk(&bucket, "a/", Some("/"), 1), ["a/b", "a/c"]);
    for odd in ["a//b", "../etc/passwd", "/etc/passwd", "a/./b", "a/", ""] {
        assert!(bucket.stat(odd).unwrap().is_none(), "{odd:?}");
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_million_synthetic_objects_list_quickly() {
    let bucket = Synthetic { count: 1_000_000, size: 1, pattern: "d{dir}/f{n}".into(), per_dir: 1000 };
    let started = Instant::now();
    assert_eq!(walk(&bucket, "", Some("/"), 1000).len(), 1000);
    assert_eq!(walk(&bucket, "d077/", Some("/"), 1000).len(), 1000);
    let mut count = 0;
    bucket
        .scan(Bound::Unbounded, &mut |_, _| {
            count += 1;
            Next::Continue
        })
        .unwrap();
    assert_eq!(count, 1_000_000);
    eprintln!("walked a million keys in {:?}", started.elapsed());
    assert_eq!(bucket.stat("d077/f077123").unwrap().map(|meta| meta.size), Some(1));
    assert!(bucket.stat("d077/f078123").unwrap().is_none());
}
