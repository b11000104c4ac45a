//! What docs/semantics.md promises when the source changes: freshness and versions, on a whole node.

use crate::promises::{errno, names, node_and_store, volume};
use anyhow::{Result, ensure};
use e2e::node::BUCKET;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use testkit::content;
use testkit::faults::{Fault, Rule, Script};

#[test]
fn strict_sees_a_change_at_the_next_open() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    store.put(BUCKET, "set/f", "first")?;
    let mounted = volume(&mut node, &store, "v", "set", &[("freshness", "strict"), ("profile", "large")])?;
    let f = mounted.target.join("f");
    for round in 0..30_u32 {
        // The same size in every second round: a change is a change of the version, not of the size.
        let body = format!("{:0width$}", round, width = 100 + 1000 * (round as usize / 2 % 5));
        store.put(BUCKET, "set/f", body.clone())?;
        assert_eq!(fs::read_to_string(&f)?, body, "round {round}");
        let new = mounted.target.join(format!("new{round}"));
        assert_eq!(errno(fs::metadata(&new)), Some(libc::ENOENT));
        store.put(BUCKET, &format!("set/new{round}"), "x")?;
        assert_eq!(fs::metadata(&new)?.len(), 1, "round {round}: a name that was absent has come");
        store.delete(BUCKET, &format!("set/new{round}"))?;
        assert_eq!(errno(File::open(&new)), Some(libc::ENOENT), "round {round}: a name is gone");
    }
    node.finish()
}

#[test]
fn static_is_not_asked_again_also_after_a_remount() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    for profile in ["large", "small"] {
        let key = |name: &str| format!("{profile}/{name}");
        store.put(BUCKET, &key("f"), "old")?;
        store.put(BUCKET, &key("d/g"), "old below")?;
        let more = [("freshness", "static"), ("profile", profile)];
        let first = volume(&mut node, &store, &format!("{profile}-1"), profile, &more)?;
        let look = |target: &std::path::Path| -> io::Result<_> {
            let read = |name: &str| fs::read_to_string(target.join(name));
            Ok((names(target)?, names(&target.join("d"))?, read("f")?, read("d/g")?))
        };
        let before = look(&first.target)?;
        store.put(BUCKET, &key("f"), "new and longer")?;
        store.put(BUCKET, &key("d/g"), "new")?;
        store.put(BUCKET, &key("d/another"), "new")?;
        store.reset_stats();
        assert_eq!(look(&first.target)?, before, "profile {profile}");
        assert_eq!(store.stats().total(), 0, "profile {profile}: {:?}", store.stats());
        node.unpublish(&first)?;
        let again = volume(&mut node, &store, &format!("{profile}-2"), profile, &more)?;
        store.reset_stats(); // publish makes sure that the source is there
        assert_eq!(look(&again.target)?, before, "profile {profile}, remounted");
        assert_eq!(store.stats().total(), 0, "profile {profile}, remounted: {:?}", store.stats());
    }
    node.finish()
}

#[test]
fn a_listing_slower_than_its_ttl_is_answered_once() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    for k in 0..20 {
        store.put(BUCKET, &format!("set/d/f{k}"), "x")?;
    }
    let mounted = volume(&mut node, &store, "v", "set", &[("profile", "large"), ("metadataTtl", "200ms")])?;
    let dir = File::open(mounted.target.join("d"))?;
    store.reset_stats();
    let slow = Rule::always(Fault::Latency { ms: 1000 }).op("ListObjectsV2");
    store.faults().set(Script { seed: 0, rules: vec![slow] });
    // Through the handle, so that no look-up of the directory itself asks the store as well.
    let seen = rustix::fs::Dir::read_from(&dir)?
        .filter(|e| e.as_ref().is_ok_and(|e| e.file_name().to_bytes()[0] == b'f'));
    assert_eq!(seen.count(), 20);
    assert_eq!(store.stats().of("ListObjectsV2"), 1, "{:?}", store.stats());
    node.finish()
}

#[test]
fn after_an_estale_the_next_open_sees_the_new_version() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    for profile in ["large", "small"] {
        let key = format!("{profile}/f");
        let size = 16 << 20;
        store.put(BUCKET, &key, content::bytes(1, 0..size))?;
        let gone = format!("{profile}/g");
        store.put(BUCKET, &gone, content::bytes(3, 0..size))?;
        let more = [("profile", profile), ("metadataTtl", "1h"), ("readahead", "0")];
        let mounted = volume(&mut node, &store, profile, profile, &more)?;
        let f = mounted.target.join("f");
        let open = File::open(&f)?;
        let mut first = vec![0; 4096];
        open.read_exact_at(&mut first, 0)?;
        assert_eq!(content::first_wrong_byte(1, 0, &first), None);
        store.put(BUCKET, &key, content::bytes(2, 0..size - 5))?;
        // A slow answer must not let the next open through with the old version.
        let slow = Rule::always(Fault::Latency { ms: 300 }).op("HeadObject");
        store.faults().set(Script { seed: 0, rules: vec![slow] });
        let mut far = vec![0; 4096];
        assert_eq!(errno(open.read_exact_at(&mut far, 12 << 20)), Some(libc::ESTALE), "profile {profile}");
        let anew = fs::read(&f)?;
        assert_eq!(fs::metadata(&f)?.len(), size - 5, "profile {profile}");
        store.faults().clear();
        assert_eq!(anew.len() as u64, size - 5, "profile {profile}");
        assert_eq!(content::first_wrong_byte(2, 0, &anew), None, "profile {profile}");
        // The old one goes on where it is in the cache (V3), or is stale. It is never another's.
        match open.read_exact_at(&mut first, 0) {
            Ok(()) => assert_eq!(content::first_wrong_byte(1, 0, &first), None),
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::ESTALE), "profile {profile}"),
        }
        // An object that is gone altogether.
        let g = mounted.target.join("g");
        let open = File::open(&g)?;
        open.read_exact_at(&mut first, 0)?;
        store.delete(BUCKET, &gone)?;
        let far = open.read_exact_at(&mut far, 12 << 20);
        assert_eq!(errno(far), Some(libc::ESTALE), "profile {profile}");
        assert_eq!(errno(File::open(&g)), Some(libc::ENOENT), "profile {profile}");
        assert_eq!(errno(fs::metadata(&g)), Some(libc::ENOENT), "profile {profile}");
    }
    node.finish()
}

#[test]
fn one_open_sees_one_version_while_the_object_changes() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    let size = 2 << 20;
    for (profile, freshness) in [("large", "strict"), ("large", "ttl"), ("small", "ttl")] {
        let prefix = format!("{profile}-{freshness}");
        let key = format!("{prefix}/f");
        store.put(BUCKET, &key, content::bytes(0, 0..size))?;
        let mut more = vec![("profile", profile), ("freshness", freshness), ("readahead", "0")];
        if freshness == "ttl" {
            more.push(("metadataTtl", "100ms"));
        }
        let mounted = volume(&mut node, &store, &prefix, &prefix, &more)?;
        let f = mounted.target.join("f");
        let done = AtomicBool::new(false);
        let (mut whole, mut stale) = (0, 0);
        std::thread::scope(|scope| -> Result<()> {
            let writer = scope.spawn(|| -> io::Result<()> {
                // Versions are distinguished by what they are made of; each lives for some reads.
                let mut version = 1;
                while !done.load(Ordering::Relaxed) {
                    store.put(BUCKET, &key, content::bytes(version, 0..size))?;
                    version += 1;
                    std::thread::sleep(Duration::from_millis(20 + 17 * (version % 7)));
                }
                Ok(())
            });
            let mut round = || -> Result<()> {
                let open = File::open(&f)?;
                let mut bytes = vec![0; size as usize];
                for (k, piece) in bytes.chunks_mut(256 << 10).enumerate() {
                    match open.read_exact_at(piece, (k as u64) * (256 << 10)) {
                        Ok(()) => {}
                        Err(e) if e.raw_os_error() == Some(libc::ESTALE) => {
                            stale += 1;
                            return Ok(());
                        }
                        Err(e) => return Err(e.into()),
                    }
                }
                let one = (0..100_000).find(|&v| content::first_wrong_byte(v, 0, &bytes[..64]).is_none());
                ensure!(
                    one.is_some_and(|v| content::first_wrong_byte(v, 0, &bytes).is_none()),
                    "a mixture of versions"
                );
                whole += 1;
                Ok(())
            };
            let result = (0..40).try_for_each(|_| round());
            done.store(true, Ordering::Relaxed);
            writer.join().expect("the writer does not panic")?;
            result
        })?;
        println!("{prefix}: {whole} whole, {stale} stale");
        assert!(whole > 0, "{prefix}: no read came to its end");
        node.unpublish(&mounted)?;
    }
    node.finish()
}
