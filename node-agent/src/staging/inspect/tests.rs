//! What people see and do of an area that operations have made, at a store that a test directs.

use super::super::discard::Discarded;
use super::super::staged::{StagedState, lies_at_or_below};
use super::super::testing::{Does, Node, SOON, until};
use super::*;
use cache::meta::ROOT;
use link::MountSpec;
use link::writable::{Done, Operation};
use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

const LIMIT: Duration = Duration::from_secs(20);

impl Node {
    async fn list(&self) -> Inspected {
        match self.staging.inspect(&self.spec.id, LIMIT).await {
            Looked::Area(area) => *area,
            Looked::Absent => panic!("there is an area"),
        }
    }

    async fn discard(&self, paths: &[&str]) -> Discarded {
        let paths: Vec<Vec<u8>> = paths.iter().map(|path| path.as_bytes().to_vec()).collect();
        self.staging.discard(&self.spec.id, &paths, LIMIT).await.unwrap()
    }

    /// All that can be read of a file.
    async fn export(&self, name: &str) -> (Vec<u8>, bool) {
        let readable = self.staging.readable(&self.spec.id, LIMIT).await.unwrap().unwrap();
        let file = readable.files.iter().find(|file| file.path == name.as_bytes()).unwrap();
        let mut reading = readable.open(file.ino).await.unwrap();
        let mut all = Vec::new();
        while let Some((offset, bytes)) = readable.next(&mut reading).await.unwrap() {
            all.resize(offset as usize, 0);
            all.extend(bytes);
        }
        let end = readable.end(&reading).await.unwrap();
        all.resize(end.size as usize, 0);
        (all, end.changed)
    }
}

fn names(area: &Inspected) -> Vec<(&str, StagedState)> {
    let name = |file: &StagedFile| std::str::from_utf8(&file.path).unwrap().to_owned();
    area.files.iter().map(|file| (name(file).leak() as &str, file.state)).collect()
}

#[test]
fn a_directory_stands_for_what_is_in_it_and_not_for_what_is_called_similarly() {
    for (path, top, is_of) in [
        ("a/b", "a", true),
        ("a", "a", true),
        ("ab", "a", false),
        ("a/b", "a/b/c", false),
        ("a/b", "", true),
        ("a", "b", false),
    ] {
        assert_eq!(lies_at_or_below(path.as_bytes(), top.as_bytes()), is_of, "{path} {top}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_is_listed_with_its_bytes_age_and_failure_whether_a_mount_has_it_or_not() {
    let mut node = Node::new();
    assert!(matches!(node.staging.inspect(&node.spec.id, LIMIT).await, Looked::Absent));
    assert_eq!(node.staging.volumes(LIMIT).await.unwrap(), []);
    let area = node.area().await;
    node.write(&area, "a", b"hello", false).await;
    node.write(&area, "b", b"hi", true).await;
    let open = node.list().await;
    assert_eq!(names(&open), [("a", StagedState::Waiting), ("b", StagedState::Waiting)]);
    assert_eq!((open.waiting.files, open.waiting.bytes, open.mounts), (2, 7, 1));
    assert_eq!((open.files[0].opens, open.files[1].opens), (0, 1));
    assert!(open.is_open && open.oldest.is_some());
    assert_eq!(open.source.as_deref(), Some(&*node.spec.source.to_string()));
    assert!(!area.send_all(SOON).await);
    let failure = node.list().await.failure.expect("the store has refused");
    assert!(failure.why.starts_with("upload: "), "{failure:?}");
    assert!(node.staging.volumes(LIMIT).await.unwrap() == [node.spec.id.clone()]);
    node.close(area).await;
    let closed = node.list().await;
    assert_eq!(names(&closed), names(&open));
    assert_eq!((closed.waiting.files, closed.waiting.bytes, closed.mounts), (2, 7, 0));
    assert!(!closed.is_open && closed.source == open.source);
    assert_eq!(closed.files[0].opens + closed.files[1].opens, 0, "its mount has left in good order");
    assert!(node.dir.path().join("staging/v").join(closed.files[0].data().unwrap()).exists());
    // And is sent as if nobody had looked.
    node.does.send_replace(Does::Takes);
    let area = node.area().await;
    assert!(area.send_all(SOON).await);
    assert_eq!(
        (fs::read(node.store("a")).unwrap(), fs::read(node.store("b")).unwrap()),
        (b"hello".into(), b"hi".into())
    );
    assert_eq!((node.list().await.waiting.files, node.list().await.failure), (0, None));
    node.close(area).await;
    for _ in 0..2 {
        let idle = node.list().await;
        assert_eq!((idle.waiting.files, idle.oldest, idle.source.is_some()), (0, None, true));
    }
}

/// One that is written to again and again, and gets into the store each time, does not grow old.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_is_as_old_as_what_the_store_does_not_have() {
    let mut node = Node::new();
    node.does.send_replace(Does::Takes);
    let area = node.area().await;
    let ino = node.write(&area, "a", b"1", true).await;
    let file = area.by_ino(ino).unwrap();
    let first = file.waits_since().unwrap();
    area.send(&file).await.unwrap();
    assert_eq!(file.waits_since(), None);
    area.to_change(ino).await.unwrap();
    let second = file.waits_since().unwrap();
    assert!(second > first);
    file.wrote(0, 1);
    area.to_change(ino).await.unwrap();
    assert_eq!(file.waits_since(), Some(second), "it waits since its first change");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_are_read_as_they_are_and_holes_cost_nothing() {
    let mut node = Node::new();
    let area = node.area().await;
    let ino = node.write(&area, "a", b"hello", true).await;
    let data = area.by_ino(ino).unwrap().content.read().await.clone().unwrap();
    data.write_all_at(b"end", 5 << 20).unwrap();
    let (bytes, changed) = node.export("a").await;
    assert!(!changed && bytes.len() == (5 << 20) + 3);
    assert!(bytes.starts_with(b"hello\0") && bytes.ends_with(b"\0end"));
    // As large as a file can be, and nearly nothing in it.
    data.set_len(1 << 42).unwrap();
    let readable = node.staging.readable(&node.spec.id, LIMIT).await.unwrap().unwrap();
    let mut reading = readable.open(ino).await.unwrap();
    let mut sent = 0;
    while let Some((_, bytes)) = readable.next(&mut reading).await.unwrap() {
        sent += bytes.len();
    }
    assert!(sent < 1 << 20, "{sent} bytes of holes");
    data.write_all_at(b"J", 0).unwrap();
    let end = readable.end(&reading).await.unwrap();
    assert!(end.changed && end.size == 1 << 42);
    // One that never ends: what comes behind its end of the moment is not waited for.
    data.set_len(2 << 20).unwrap();
    let mut reading = readable.open(ino).await.unwrap();
    while let Some((offset, bytes)) = readable.next(&mut reading).await.unwrap() {
        data.write_all_at(&[1; 1 << 20], offset + bytes.len() as u64 + (1 << 20)).unwrap();
        assert!(offset < 2 << 20);
    }
    node.close(area).await;
    assert!(node.export("a").await.0.starts_with(b"Jello"), "nobody has it open");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_discarded_is_gone_and_what_is_in_use_stays() {
    let mut node = Node::new();
    fs::write(node.store("old"), b"theirs").unwrap();
    let area = node.area().await;
    for name in ["a", "b", "old"] {
        node.write(&area, name, b"ours", false).await;
    }
    node.write(&area, "held", b"ours", true).await;
    let discarded = node.discard(&["a", "old"]).await;
    assert_eq!((discarded.files, discarded.bytes, discarded.left.len()), (2, 10, 0));
    assert_eq!(names(&node.list().await), [("b", StagedState::Waiting), ("held", StagedState::Waiting)]);
    let name = b"old".to_vec();
    let Done::Node(seen) = node.does(&area, Operation::Lookup { parent: ROOT, name }).await else { panic!() };
    assert_eq!(seen.size, 6, "theirs is seen again");
    let absent = node.does(&area, Operation::Lookup { parent: ROOT, name: b"a".to_vec() }).await;
    assert_eq!(absent, Done::Absent);
    let refused = node.discard(&[]).await;
    assert_eq!((refused.files, refused.left.len()), (1, 1));
    assert!(refused.left[0].0 == b"held" && refused.left[0].1.contains("open"));
    node.close(area).await;
    assert_eq!(names(&node.list().await), [("held", StagedState::Waiting)]);
    let discarded = node.discard(&[]).await;
    assert_eq!((discarded.files, discarded.bytes), (1, 4));
    assert_eq!(fs::read_dir(node.dir.path().join("staging/v/files")).unwrap().count(), 0);
    // Nothing of it comes back.
    node.does.send_replace(Does::Takes);
    let area = node.area().await;
    assert!(area.send_all(SOON).await && area.waiting().files == 0);
    assert_eq!(fs::read_dir(node.dir.path().join("store")).unwrap().count(), 1);
    assert_eq!(fs::read(node.store("old")).unwrap(), b"theirs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_and_a_rename_that_wait_can_be_discarded_and_the_store_keeps_its_names() {
    let mut node = Node::new();
    for name in ["gone", "before"] {
        fs::write(node.store(name), name).unwrap();
    }
    let area = node.area().await;
    node.does(&area, Operation::Unlink { parent: ROOT, name: b"gone".to_vec() }).await;
    let (parent, to) = (ROOT, ROOT);
    let (name, to_name) = (b"before".to_vec(), b"after".to_vec());
    node.does(&area, Operation::Rename { parent, name, to, to_name, keep: false }).await;
    let listed = node.list().await;
    assert_eq!(names(&listed), [("after", StagedState::Waiting), ("gone", StagedState::Unlinked)]);
    assert_eq!((listed.waiting.bytes, listed.files[0].data()), (6, None), "a removal has no bytes to send");
    assert_eq!(node.discard(&[]).await.files, 2);
    for name in ["gone", "before"] {
        let seen = node.does(&area, Operation::Lookup { parent: ROOT, name: name.into() }).await;
        assert!(matches!(seen, Done::Node(_)), "{name}: {seen:?}");
    }
    let after = node.does(&area, Operation::Lookup { parent: ROOT, name: b"after".to_vec() }).await;
    assert_eq!(after, Done::Absent);
    node.does.send_replace(Does::Takes);
    assert!(area.send_all(SOON).await);
    assert!(node.store("gone").exists() && node.store("before").exists() && !node.store("after").exists());
}

/// A store that does not answer is why people discard.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_hangs_gives_way_to_who_discards_its_file() {
    let mut node = Node::new();
    node.does.send_replace(Does::Hangs);
    let area = node.area().await;
    let ino = node.write(&area, "a", b"hello", false).await;
    let file = area.by_ino(ino).unwrap();
    // Sent by itself, and hanging.
    until(|| file.record().unsettled).await;
    drop(file);
    let discarded =
        tokio::time::timeout(SOON, node.discard(&["a"])).await.expect("it does not wait for the store");
    assert_eq!((discarded.files, discarded.left.len()), (1, 0), "{discarded:?}");
    node.does.send_replace(Does::Takes);
    assert!(area.send_all(SOON).await && !node.store("a").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_is_listed_exported_and_discarded_and_theirs_is_seen_again() {
    let mut node = Node::new();
    node.does.send_replace(Does::Takes);
    let area = node.area().await;
    let ino = node.write(&area, "a", b"ours", false).await;
    fs::write(node.store("a"), b"somebody else's").unwrap();
    until(|| area.waiting().conflicts == 1).await;
    assert_eq!(names(&node.list().await), [("a", StagedState::Conflict)]);
    assert_eq!(node.export("a").await.0, b"ours");
    assert_eq!(node.discard(&["a"]).await.files, 1);
    until(|| area.by_ino(ino).is_none()).await;
    assert_eq!(fs::read(node.store("a")).unwrap(), b"somebody else's");
    let seen = |done| matches!(done, Done::Node(node) if node.size == 15);
    let lookup = || Operation::Lookup { parent: ROOT, name: b"a".to_vec() };
    assert!(seen(node.does(&area, lookup()).await));
}

/// What a dead agent's programs have open may come back with its mounts.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_mount_that_may_still_come_has_open_is_not_discarded() {
    let mut node = Node::new();
    let area = node.area().await;
    node.write(&area, "held", b"ours", true).await;
    node.write(&area, "a", b"ours", false).await;
    // As if its process were killed.
    assert!(area.release(std::time::Instant::now() + LIMIT));
    let weak = Arc::downgrade(&area);
    drop(area);
    until(|| weak.strong_count() == 0).await;
    let discarded = node.discard(&[]).await;
    assert_eq!((discarded.files, discarded.left.len()), (1, 1));
    assert!(discarded.left[0].1.contains("try again in"), "{discarded:?}");
    Arc::get_mut(&mut node.staging).unwrap().started = Instant::now().checked_sub(STRANGERS).unwrap();
    assert_eq!(node.discard(&[]).await.files, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_area_that_cannot_be_read_hides_no_other_and_is_left_as_it_is() {
    let mut node = Node::new();
    let area = node.area().await;
    node.write(&area, "a", b"ours", false).await;
    node.close(area).await;
    let bad = node.dir.path().join("staging/bad");
    fs::create_dir_all(bad.join("files")).unwrap();
    fs::write(bad.join("journal"), b"no journal of ours").unwrap();
    fs::create_dir_all(node.dir.path().join("staging/empty/files")).unwrap();
    let ids = node.staging.volumes(LIMIT).await.unwrap();
    assert_eq!(ids.iter().map(VolumeId::as_str).collect::<Vec<_>>(), ["bad", "empty", "v"]);
    let Looked::Area(looked) = node.staging.inspect(&ids[0], LIMIT).await else { panic!() };
    assert!(looked.problem.is_some(), "{looked:?}");
    assert!(node.staging.discard(&ids[0], &[], LIMIT).await.is_err());
    assert_eq!(fs::read(bad.join("journal")).unwrap(), b"no journal of ours");
    assert!(matches!(node.staging.inspect(&ids[1], LIMIT).await, Looked::Absent));
    assert!(!node.dir.path().join("staging/empty/journal").exists(), "looking makes nothing");
    assert_eq!(node.list().await.waiting.files, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_area_says_how_it_was_published_last_and_one_without_that_says_what_to_do() {
    let mut node = Node::new();
    let missing = node.staging.described(&node.spec.id, LIMIT).await.unwrap_err();
    assert_eq!(missing.kind, RefusalKind::NotFound);
    let area = node.area().await;
    node.write(&area, "a", b"ours", false).await;
    assert!(!node.list().await.is_described);
    let before = node.staging.described(&node.spec.id, LIMIT).await.unwrap_err();
    assert!(before.kind == RefusalKind::Conflict && before.message.contains("publish"), "{before}");
    let mount = MountSpec { environment: true, ..MountSpec::new(node.spec.clone(), "/t") };
    area.describe(&mount).await;
    assert!(node.list().await.is_described);
    node.close(area).await;
    assert!(node.list().await.is_described);
    let found = node.staging.described(&node.spec.id, LIMIT).await.unwrap();
    assert_eq!((found.mount, found.scope), (mount, "0a".repeat(16)));
}
