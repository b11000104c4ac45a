//! Two programs at once, or one whose agent dies: what they are answered, and what stays.

use super::super::Area;
use super::super::executed::Executed;
use super::super::testing::{Does, MOUNT, Node, SOON, bring_write, until};
use super::*;
use link::broker::MountId;
use link::writable::SetAttributes;
use rand::RngExt;
use std::fs;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use volume::WriteMode;

const OTHER: MountId = MountId(2);
const BYTES: &[u8] = b"the bytes of a file that somebody reads";
const OWNER: Owner = Owner { mode: 0o644, uid: 0, gid: 0 };

fn open(ino: u64) -> Operation {
    Operation::Open { ino, write: true }
}

fn unlink(name: &str) -> Operation {
    Operation::Unlink { parent: ROOT, name: name.into() }
}

fn rename(name: &str, to_name: &str) -> Operation {
    Operation::Rename { parent: ROOT, name: name.into(), to: ROOT, to_name: to_name.into(), keep: false }
}

fn mode(ino: u64, mode: u32) -> Operation {
    Operation::SetAttributes { ino, set: SetAttributes { mode: Some(mode), ..SetAttributes::default() } }
}

fn create(name: &str, exclusive: bool) -> Operation {
    Operation::Create { parent: ROOT, name: name.into(), owner: OWNER, exclusive, open: true }
}

const STALE: Outcome = Err(Wrong::Cause(Cause::Stale));

async fn reads(node: &Node, area: &Arc<Area>, ino: u64) -> Vec<u8> {
    let executed = Executed::default();
    let caller = Caller {
        mount: MOUNT,
        unique: node.next_unique(),
        waits: &|_| false,
        inflight: &node.inflight,
        read_only: false,
    };
    match area.execute(&caller, &executed, Operation::Locate { ino }).await.unwrap() {
        (Done::Staged { size }, Some(data)) => {
            let mut bytes = vec![0; size as usize];
            std::fs::File::from(data).read_exact_at(&mut bytes, 0).unwrap();
            bytes
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_lost_its_name_is_opened_by_nobody_who_did_not_have_it_open() {
    let mut node = Node::new();
    fs::write(node.store("a"), BYTES).unwrap();
    let area = node.area().await;
    let ino = node.finds(&area, "a").await.unwrap().ino;
    node.does(&area, unlink("a")).await; // the store is not told yet
    assert_eq!(node.asks(&area, open(ino)).await, STALE);
    assert!(!area.state().is_open(ino));
    node.write(&area, "b", BYTES, true).await;
    let ino = node.finds(&area, "b").await.unwrap().ino;
    node.does(&area, unlink("b")).await;
    node.does(&area, open(ino)).await; // as /proc/self/fd does
    for _ in 0..2 {
        assert_eq!(reads(&node, &area, ino).await, BYTES);
        node.does(&area, Operation::Close { ino }).await;
    }
    node.does(&area, open(ino)).await; // by a kernel that has found it a moment before
    assert_eq!(reads(&node, &area, ino).await, BYTES);
    node.does(&area, Operation::Close { ino }).await;
    let is_over = async {
        while area.by_ino(ino).is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, is_over).await.expect("it is kept for a moment");
    assert_eq!(node.asks(&area, open(ino)).await, STALE);
    // Those of a thousand are not.
    for n in 0..1000 {
        node.write(&area, "c", BYTES, false).await;
        node.does(&area, unlink("c")).await;
        assert!(area.state().files.len() < 300, "{n}");
    }
    node.does.send_replace(Does::Takes);
    assert!(area.send_all(SOON).await && !node.store("a").exists());
}

/// Each gets to have it open and reads all of it, or is told to look its path up again.
#[tokio::test(flavor = "multi_thread")]
async fn who_opens_a_file_while_another_one_removes_it_reads_it_or_does_not_have_it_open() {
    let mut node = Node::new();
    node.spec.parameters.write_mode = WriteMode::Through;
    node.does.send_replace(Does::Takes);
    let area = node.area().await;
    let mut opened = 0;
    for n in 0..300 {
        let (name, over) = (format!("f{n}"), format!("over{n}"));
        fs::write(node.store(&name), BYTES).unwrap();
        area.look_again(name.as_bytes()).await;
        let ino = node.finds(&area, &name).await.unwrap().ino;
        let removes = match n % 2 {
            0 => unlink(&name),
            _ => {
                node.write(&area, &over, b"another one", false).await;
                rename(&over, &name)
            }
        };
        let pause = rand::rng().random_range(0..10);
        let opens = async {
            for _ in 0..pause {
                tokio::task::yield_now().await;
            }
            node.asks(&area, open(ino)).await
        };
        let removes = node.asks(&area, removes);
        let (removed, open) = match rand::rng().random() {
            true => tokio::join!(removes, opens),
            false => {
                let (open, removed) = tokio::join!(opens, removes);
                (removed, open)
            }
        };
        removed.unwrap();
        match open {
            Ok(_) => {
                opened += 1;
                assert_eq!(reads(&node, &area, ino).await, BYTES, "{n}");
                node.does(&area, Operation::Close { ino }).await;
            }
            open => assert_eq!(open, STALE, "{n}"),
        }
        assert!(!area.state().is_open(ino), "{n}");
    }
    area.forget_parted(Duration::ZERO).await;
    assert_eq!(area.state().files.values().filter(|file| file.record().path.is_none()).count(), 0);
    println!("{opened} of 300 were opened in time");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_has_left_opens_nothing_any_more() {
    let mut node = Node::new();
    let area = node.area().await;
    let ino = node.write(&area, "a", BYTES, false).await;
    area.join(OTHER, &Executed::default());
    area.leave(OTHER).await;
    let gone = Err(Wrong::Cause(Cause::Unavailable));
    for operation in [open(ino), create("b", true)] {
        assert_eq!(node.asks_as(&area, OTHER, node.next_unique(), operation).await, gone);
    }
    assert!(!area.state().is_open(ino) && node.finds(&area, "b").await.is_none());
    assert!(area.state().results.get(&OTHER).is_none_or(|results| results.is_empty()));
}

/// The kernel asks for that when it has looked and found nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_made_meanwhile_is_looked_up_again_before_it_is_opened() {
    let mut node = Node::new();
    let area = node.area().await;
    let ino = node.write(&area, "a", BYTES, false).await;
    fs::write(node.store("b"), BYTES).unwrap();
    area.look_again(b"b").await;
    for name in ["a", "b"] {
        assert_eq!(node.asks(&area, create(name, false)).await, STALE);
        assert_eq!(node.asks(&area, create(name, true)).await, Err(Wrong::Exists));
    }
    assert!(!area.state().is_open(ino) && reads(&node, &area, ino).await == BYTES);
}

/// An agent and the worker to which it has answered die together.
#[tokio::test(flavor = "multi_thread")]
async fn what_another_mount_has_changed_since_is_not_undone_by_a_request_that_comes_again() {
    let mut node = Node::new();
    let area = node.area().await;
    let ino = node.write(&area, "a", b"0123456789", true).await;
    area.join(OTHER, &Executed::default());
    node.asks_as(&area, OTHER, node.next_unique(), open(ino)).await.unwrap();
    let dir = node.does(&area, Operation::MakeDirectory { parent: ROOT, name: b"d".into(), owner: OWNER });
    let Done::Node(dir) = dir.await else { panic!("a directory was made") };
    let [modes, of_dir, cut, write] = [(); 4].map(|()| node.next_unique());
    let cuts =
        Operation::SetAttributes { ino, set: SetAttributes { size: Some(4), ..SetAttributes::default() } };
    bring_write(&node.inflight, write, 0, b"AB", 0);
    let first = [
        (modes, mode(ino, 0o600)),
        (of_dir, mode(dir.ino, 0o700)),
        (cut, cuts),
        (write, Operation::Write { ino }),
    ];
    let mut answers = Vec::new();
    for (unique, operation) in &first {
        answers.push(node.asks_as(&area, MOUNT, *unique, operation.clone()).await.unwrap());
    }
    node.dies(area).await;
    let area = node.area().await;
    area.join(OTHER, &Executed::default());
    let others = node.next_unique();
    bring_write(&node.inflight, others, 0, b"xyz and more", 0);
    for (unique, operation) in [
        (node.next_unique(), mode(ino, 0o640)),
        (node.next_unique(), mode(dir.ino, 0o750)),
        (others, Operation::Write { ino }),
    ] {
        node.asks_as(&area, OTHER, unique, operation).await.unwrap();
    }
    for ((unique, operation), answer) in first.into_iter().zip(answers) {
        assert_eq!(node.asks_as(&area, MOUNT, unique, operation).await, Ok(answer), "the same answer again");
    }
    assert_eq!(reads(&node, &area, ino).await, b"xyz and more");
    let (a, d) = (node.finds(&area, "a").await.unwrap(), node.finds(&area, "d").await.unwrap());
    assert_eq!((a.mode & 0o7777, d.mode & 0o7777), (0o640, 0o750));
}

/// What was asked of it here is kept, and a person is told.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_mode_or_name_of_what_somebody_has_replaced_is_a_conflict() {
    for copies_anything in [false, true] {
        let mut node = Node::new();
        node.copies_anything = copies_anything;
        for name in ["mode", "name", "gone"] {
            fs::write(node.store(name), BYTES).unwrap();
        }
        let area = node.area().await;
        let mut files = Vec::new();
        for name in ["mode", "name", "gone"] {
            let ino = node.finds(&area, name).await.unwrap().ino;
            match name {
                "name" => node.does(&area, rename(name, "new")).await,
                _ => node.does(&area, mode(ino, 0o600)).await,
            };
            files.push(area.by_ino(ino).unwrap());
            fs::remove_file(node.store(name)).unwrap();
            if name != "gone" {
                fs::write(node.store(name), "theirs, and longer than what was there before").unwrap();
            }
        }
        node.does.send_replace(Does::Takes);
        for file in &files {
            assert_eq!(area.send(file).await, Err(Wrong::Conflict));
            assert!(file.record().conflict);
        }
        assert!(!node.store("new").exists(), "theirs is not ours under its new name");
        assert!(fs::read(node.store("mode")).unwrap().starts_with(b"theirs"));
        assert_eq!(area.waiting().conflicts, 3);
    }
}

async fn listed(node: &Node, area: &Area, offset: &mut u64) -> Vec<String> {
    let Done::Names(names) = node.does(area, Operation::ReadDirectory { dir: ROOT, offset: *offset }).await
    else {
        panic!("names were asked for")
    };
    *offset = names.last().map_or(*offset, |name| name.next);
    names.into_iter().map(|name| String::from_utf8(name.name).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_written_to_during_a_listing_is_in_it_once() {
    let mut node = Node::new();
    let name = |n: u32| format!("{n:04}{}", "x".repeat(200));
    for n in 0..400 {
        fs::write(node.store(&name(n)), BYTES).unwrap();
    }
    let area = node.area().await;
    node.write(&area, "made", BYTES, false).await;
    let mut offset = 0;
    let mut all = listed(&node, &area, &mut offset).await;
    assert!(all.len() > 10 && all.len() < 200, "{} at once", all.len());
    let (before, after) = (all.last().unwrap().clone(), name(399));
    node.write(&area, &before, BYTES, true).await;
    node.write(&area, &after, b"longer than what was there before, and so seen", false).await;
    node.does.send_replace(Does::Takes);
    assert!(area.send_all(SOON).await, "and what was made here gets into the store");
    node.write(&area, &name(200), BYTES, true).await;
    loop {
        let more = listed(&node, &area, &mut offset).await;
        if more.is_empty() {
            break;
        }
        all.extend(more);
    }
    let mut once = all.clone();
    once.sort();
    once.dedup();
    assert_eq!((once.len(), all.len()), (403, 403), "with . and ..");
    // Somebody else has removed what is being changed here.
    fs::remove_file(node.store(&before)).unwrap();
    node.does.send_replace(Does::Refuses);
    node.write(&area, &before, BYTES, false).await;
    let mut offset = 0;
    let mut again = Vec::new();
    while let more = listed(&node, &area, &mut offset).await
        && !more.is_empty()
    {
        again.extend(more);
    }
    assert_eq!(again.iter().filter(|name| **name == before).count(), 1);
}

/// Its agent was killed in the middle.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_write_has_left_beside_its_file_goes_with_what_comes_of_it() {
    let mut node = Node::new();
    let area = node.area().await;
    let made = node.does(&area, Operation::MakeDirectory { parent: ROOT, name: b"d".into(), owner: OWNER });
    let Done::Node(dir) = made.await else { panic!("a directory was made") };
    let mut left = Vec::new();
    for name in ["kept", "removed", "discarded"] {
        let create = Operation::Create {
            parent: dir.ino,
            name: name.into(),
            owner: OWNER,
            exclusive: true,
            open: false,
        };
        let Done::Node(made) = node.does(&area, create).await else { panic!("a file was made") };
        let file = area.by_ino(made.ino).unwrap();
        let write = {
            let _alone = file.content.write().await;
            area.begin_write(&file).await.unwrap()
        };
        let beside = node.store(&format!("d/.millpond-{}", write.id));
        fs::write(&beside, "half").unwrap();
        left.push(beside);
    }
    let unlink = |name: &str| Operation::Unlink { parent: dir.ino, name: name.into() };
    node.does(&area, unlink("removed")).await;
    let discarded = node.staging.discard(&node.spec.id, &[b"d/discarded".to_vec()], SOON).await.unwrap();
    assert_eq!((discarded.files, discarded.left.len()), (1, 0));
    until(|| !left[2].exists()).await;
    assert!(left[0].exists() && left[1].exists());
    node.does.send_replace(Does::Takes);
    assert!(area.send_all(SOON).await);
    assert_eq!(fs::read_dir(node.store("d")).unwrap().count(), 1, "the file");
    node.does(&area, unlink("kept")).await;
    node.does(&area, Operation::RemoveDirectory { parent: ROOT, name: b"d".into() }).await;
    assert!(!node.store("d").exists());
}

/// Its upload was under way, and nobody could call it back.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_discarded_and_comes_late_is_ours_and_goes() {
    for is_open in [true, false] {
        let mut node = Node::new();
        let area = node.area().await;
        let ino = node.write(&area, "a", BYTES, false).await;
        let file = area.by_ino(ino).unwrap();
        let (write, body) = {
            let content = file.content.write().await;
            let data = content.clone().unwrap();
            let body = area.body(&file, &data, 0..BYTES.len() as u64, true).await.unwrap();
            (area.begin_write(&file).await.unwrap(), body)
        };
        drop(file);
        let sink = area.scope.source.sink().unwrap();
        let discard = async |node: &Node| node.staging.discard(&node.spec.id, &[b"a".to_vec()], SOON).await;
        let (discarded, area) = if is_open {
            (discard(&node).await.unwrap(), area)
        } else {
            node.close(area).await;
            (discard(&node).await.unwrap(), node.area().await)
        };
        assert_eq!(discarded.files, 1);
        node.does.send_replace(Does::Takes);
        sink.put(b"a", &body, &write, &store::Condition::Absent).await.unwrap();
        assert!(node.store("a").exists());
        area.remove_late().await;
        assert!(!node.store("a").exists());
    }
}
