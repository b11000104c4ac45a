//! Two programs at once, or one whose agent dies: what they are answered, and what stays.

use super::super::Area;
use super::super::executed::Executed;
use super::super::histories::number;
use super::super::lingering::KEPT;
use super::super::testing::{Does, MOUNT, Node, SOON, bring_create, bring_write, until};
use super::*;
use cache::meta::ROOT;
use link::broker::MountId;
use link::writable::SetAttributes;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
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

async fn node_size(node: &Node, area: &Area) -> u64 {
    node.finds(area, "a").await.unwrap().size
}

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

/// The clock stands still, also while the staging disk is waited for: it goes on by itself where nothing else does, but not beside a
/// blocking task (tokio::time::pause). On a runtime of one thread.
struct StoppedClock {
    _stops: mpsc::Sender<()>,
}

impl StoppedClock {
    fn stop() -> Self {
        tokio::time::pause();
        let (stops, stopped) = mpsc::channel();
        tokio::task::spawn_blocking(move || stopped.recv());
        Self { _stops: stops }
    }

    async fn goes_on_after(self, time: Duration) {
        tokio::time::advance(time).await;
        tokio::time::resume();
    }
}

#[tokio::test]
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
    let clock = StoppedClock::stop();
    node.does(&area, unlink("b")).await;
    node.does(&area, open(ino)).await; // as /proc/self/fd does
    for _ in 0..2 {
        assert_eq!(reads(&node, &area, ino).await, BYTES);
        node.does(&area, Operation::Close { ino }).await;
    }
    node.does(&area, open(ino)).await; // by a kernel that has found it a moment before
    assert_eq!(reads(&node, &area, ino).await, BYTES);
    node.does(&area, Operation::Close { ino }).await;
    clock.goes_on_after(KEPT).await;
    until(|| area.by_ino(ino).is_none()).await;
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
    const ROUNDS: u64 = 300;
    let seed = number("MILLPOND_SEED").unwrap_or_else(rand::random);
    println!("MILLPOND_SEED={seed}");
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut node = Node::new();
    node.spec.parameters.write_mode = WriteMode::Through;
    node.does.send_replace(Does::Takes);
    let area = node.area().await;
    let mut in_time = 0;
    for n in 0..ROUNDS {
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
        let pause = rng.random_range(0..10);
        let opens = async {
            for _ in 0..pause {
                tokio::task::yield_now().await;
            }
            node.asks(&area, open(ino)).await
        };
        let removes = node.asks(&area, removes);
        // In some rounds it is certain who is first, so that both outcomes are seen however fast this machine is.
        let (removed, opened) = match n % 20 {
            0 | 1 => {
                let opened = opens.await;
                assert!(opened.is_ok(), "{n}: {opened:?}");
                (removes.await, opened)
            }
            2 | 3 => {
                let removed = removes.await;
                let opened = opens.await;
                assert_eq!(opened, STALE, "{n}");
                (removed, opened)
            }
            _ if rng.random() => tokio::join!(removes, opens),
            _ => {
                let (opened, removed) = tokio::join!(opens, removes);
                (removed, opened)
            }
        };
        removed.unwrap();
        match opened {
            Ok(_) => {
                in_time += 1;
                assert_eq!(reads(&node, &area, ino).await, BYTES, "{n}");
                node.does(&area, Operation::Close { ino }).await;
            }
            opened => assert_eq!(opened, STALE, "{n}"),
        }
        assert!(!area.state().is_open(ino), "{n}");
    }
    area.forget_lingering(Duration::ZERO).await;
    assert_eq!(area.state().files.values().filter(|file| file.record().path.is_none()).count(), 0);
    println!("{in_time} of {ROUNDS} were opened in time");
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

/// As the kernel would have let him, and he only.
#[tokio::test(flavor = "multi_thread")]
async fn its_owner_opens_what_was_made_meanwhile_and_others_are_sent_back() {
    let mut node = Node::new();
    let area = node.area().await;
    let ino = node.write(&area, "a", BYTES, false).await;
    let attributes = |mode: u32| {
        let set = SetAttributes { uid: Some(3), mode: Some(mode), ..SetAttributes::default() };
        Operation::SetAttributes { ino, set }
    };
    let size = async |area: &Arc<Area>| node_size(&node, area).await;
    for (mode, uid, flags, opens, left) in [
        (0o640, 0, libc::O_RDWR, false, BYTES.len()),
        (0o640, 4, libc::O_RDONLY, false, BYTES.len()),
        (0o440, 3, libc::O_WRONLY, false, BYTES.len()),
        (0o440, 3, libc::O_RDONLY | libc::O_TRUNC, false, BYTES.len()),
        (0o240, 3, libc::O_RDONLY, false, BYTES.len()),
        (0o4640, 3, libc::O_RDWR, false, BYTES.len()),
        (0o440, 3, libc::O_RDONLY, true, BYTES.len()),
        (0o240, 3, libc::O_WRONLY, true, BYTES.len()),
        (0o640, 3, libc::O_RDWR, true, BYTES.len()),
        (0o200, 3, libc::O_WRONLY | libc::O_TRUNC, true, 0),
    ] {
        node.does(&area, attributes(mode)).await;
        let (unique, before) = (node.next_unique(), area.state().times_open(MOUNT, ino));
        bring_create(&node.inflight, unique, uid, flags | libc::O_CREAT);
        let made = node.asks_as(&area, MOUNT, unique, create("a", false)).await;
        let case = format!("mode {mode:o}, user {uid}, flags {flags:o}: {made:?}");
        match opens {
            true => assert!(
                matches!(&made, Ok(Done::Node(of)) if of.ino == ino && of.size == left as u64),
                "{case}"
            ),
            false => assert_eq!(made, STALE, "{case}"),
        }
        assert_eq!(area.state().times_open(MOUNT, ino), before + u32::from(opens), "{case}");
        assert_eq!(size(&area).await, left as u64, "{case}");
        // Its agent dies before it is known that it was answered.
        if left == 0 {
            node.dies(area).await;
            let area = node.area().await;
            assert_eq!(node.asks_as(&area, MOUNT, unique, create("a", false)).await, made);
            assert_eq!(area.state().times_open(MOUNT, ino), before + 1);
            return;
        }
        let claim = node.inflight.claim(unique).expect("it waits");
        node.inflight.answered(claim);
    }
}

/// Its name leads to another one, of which the store is not told yet.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_replaced_here_is_neither_opened_nor_changed_any_more() {
    let mut node = Node::new();
    for name in ["a", "b"] {
        fs::write(node.store(name), BYTES).unwrap();
    }
    let area = node.area().await;
    let [a, b] = [node.finds(&area, "a").await.unwrap().ino, node.finds(&area, "b").await.unwrap().ino];
    let over = node.write(&area, "over", b"over", false).await;
    node.does(&area, rename("over", "a")).await;
    let elsewhere =
        node.does(&area, Operation::MakeDirectory { parent: ROOT, name: b"d".into(), owner: OWNER });
    let Done::Node(dir) = elsewhere.await else { panic!("a directory was made") };
    let to_name = b"b".to_vec();
    node.does(
        &area,
        Operation::Rename { parent: ROOT, name: b"b".into(), to: dir.ino, to_name, keep: false },
    )
    .await;
    for _ in 0..2 {
        for operation in [open(a), mode(a, 0o600), Operation::Attributes { ino: a }] {
            assert_eq!(node.asks(&area, operation.clone()).await, STALE, "{operation:?}");
        }
        assert_eq!(node.finds(&area, "a").await.unwrap().ino, over);
        node.does(&area, mode(b, 0o600)).await; // under its other name
        assert!(node.finds(&area, "b").await.is_none());
        node.does.send_replace(Does::Takes);
        assert!(area.send_all(SOON).await && area.waiting().conflicts == 0);
        assert_eq!(fs::read(node.store("a")).unwrap(), b"over");
        assert!(node.store("d/b").exists() && !node.store("b").exists());
    }
}

/// The store's names keep their inode numbers.
#[tokio::test(flavor = "multi_thread")]
async fn what_comes_to_the_name_of_a_removed_file_is_not_that_file() {
    const THEIRS: &[u8] = b"theirs, and longer than what was there before";
    let mut node = Node::new();
    node.does.send_replace(Does::Takes);
    for name in ["open", "closed", "listed"] {
        fs::write(node.store(name), BYTES).unwrap();
    }
    let area = node.area().await;
    let mut before = Vec::new();
    for name in ["open", "closed", "listed"] {
        let ino = node.write(&area, name, BYTES, name != "closed").await;
        assert!(area.send_all(SOON).await);
        node.does(&area, unlink(name)).await;
        assert!(area.send_all(SOON).await && !node.store(name).exists());
        fs::write(node.store(name), THEIRS).unwrap();
        area.look_again(name.as_bytes()).await;
        before.push(ino);
    }
    let Done::Names(names) = node.does(&area, Operation::ReadDirectory { dir: ROOT, offset: 0 }).await else {
        panic!("names were asked for")
    };
    for name in names.iter().filter(|name| name.name.len() > 2) {
        assert!(name.node.size == THEIRS.len() as u64 && name.node.ino != before[2], "{name:?}");
    }
    assert_eq!(names.len(), 5);
    for name in ["open", "closed", "listed"] {
        let found = node.finds(&area, name).await.unwrap();
        assert_eq!(found.size, THEIRS.len() as u64, "{name}");
        node.does(&area, open(found.ino)).await;
        let bytes = node.does(&area, Operation::Locate { ino: found.ino }).await;
        assert!(matches!(bytes, Done::Stored { .. }), "{name}: {bytes:?}");
    }
    assert_eq!(reads(&node, &area, before[0]).await, BYTES, "who had it open goes on");
    let ino = node.write(&area, "dir", BYTES, true).await;
    assert!(area.send_all(SOON).await);
    node.does(&area, unlink("dir")).await;
    assert!(area.send_all(SOON).await);
    fs::create_dir(node.store("dir")).unwrap();
    area.look_again(b"dir").await;
    let found = node.finds(&area, "dir").await.unwrap();
    assert!(found.ino != ino && found.mode & libc::S_IFMT == libc::S_IFDIR, "{found:?}");
    assert_eq!(reads(&node, &area, ino).await, BYTES);
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
    for (unique, operation) in &first {
        node.asks_as(&area, MOUNT, *unique, operation.clone()).await.unwrap();
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
    for (unique, operation) in first {
        let again = node.asks_as(&area, MOUNT, unique, operation.clone()).await;
        match operation {
            Operation::SetAttributes { ino, .. } => {
                let now = node.asks(&area, Operation::Attributes { ino }).await;
                assert_eq!(again, now, "no answer of then, which the kernel would believe");
            }
            _ => assert_eq!(again, Ok(Done::Written { bytes: 2 })),
        }
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
    fs::write(node.store(".millpond-probe-of-another-node"), BYTES).unwrap();
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

/// All that is left of a listing, once each.
async fn rest(node: &Node, area: &Area, dir: u64, mut offset: u64) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        let listed = node.does(area, Operation::ReadDirectory { dir, offset }).await;
        let Done::Names(names) = listed else { panic!("names were asked for") };
        let Some(last) = names.last() else { break };
        offset = last.next;
        all.extend(names.into_iter().map(|name| String::from_utf8(name.name).unwrap()));
        assert!(all.len() < 1000, "it has an end");
    }
    let mut once = all.clone();
    once.sort();
    once.dedup();
    assert_eq!(once.len(), all.len());
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_goes_on_where_its_last_name_has_left_the_directory() {
    let mut node = Node::new();
    node.does.send_replace(Does::Takes);
    let name = |n: u32| format!("{n:04}{}", "x".repeat(200));
    for n in 0..300 {
        fs::write(node.store(&name(n)), BYTES).unwrap();
    }
    fs::create_dir(node.store("zz-elsewhere")).unwrap();
    let area = node.area().await;
    let dir = node.finds(&area, "zz-elsewhere").await.unwrap().ino;
    let mut offset = 0;
    let listed = listed(&node, &area, &mut offset).await;
    let last = listed.last().unwrap();
    let away = |name: &str| Operation::Rename {
        parent: ROOT,
        name: name.into(),
        to: dir,
        to_name: name.into(),
        keep: false,
    };
    // Made anew under the same number as far as the store's names go.
    node.does(&area, unlink(last)).await;
    node.write(&area, last, BYTES, false).await;
    assert!(area.send_all(SOON).await);
    let after = rest(&node, &area, ROOT, offset).await;
    assert_eq!(after.len(), 303 - listed.len() + 1, "it is new");
    node.does(&area, away(last)).await;
    // One that another replaces, too.
    let replaced = &listed[listed.len() - 2];
    let of_it = node.finds(&area, replaced).await.unwrap().ino;
    node.does(&area, rename(&name(299), replaced)).await;
    assert!(area.send_all(SOON).await);
    // What has got a name that was there before may be shown again.
    let others = |mut left: Vec<String>| {
        left.retain(|name| name != replaced && *name != listed[4]);
        left
    };
    node.does(&area, rename(&listed[5], &listed[4])).await; // long behind
    let left = others(rest(&node, &area, ROOT, offset).await);
    assert_eq!(left.len(), 303 - 1 - listed.len(), "all but what has left");
    assert!(!left.contains(last) && !left.contains(&name(299)));
    assert_eq!(others(rest(&node, &area, ROOT, of_it).await), left);
    // Under its new name it has a place of its own.
    node.does(&area, rename("zz-elsewhere", "aa")).await;
    assert_eq!(rest(&node, &area, ROOT, 0).await.len(), 303 - 3, "three have gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_gets_another_name_is_listed_whole_while_its_files_get_to_the_store() {
    let mut node = Node::new();
    node.does.send_replace(Does::Takes);
    fs::create_dir(node.store("d")).unwrap();
    let name = |n: u32| format!("d/{n:04}{}", "x".repeat(200));
    for n in 0..300 {
        fs::write(node.store(&name(n)), BYTES).unwrap();
    }
    let area = node.area().await;
    let dir = node.finds(&area, "d").await.unwrap().ino;
    node.does(&area, Operation::ReadDirectory { dir, offset: 0 }).await;
    let changed = Operation::Lookup { parent: dir, name: name(1)[2..].into() };
    let Done::Node(changed) = node.does(&area, changed).await else { panic!("it is there") };
    let file = area.to_change(changed.ino).await.unwrap();
    node.does(&area, rename("d", "e")).await;
    assert!(!file.record().clean, "it waits under its new name");
    drop(file);
    let first = node.does(&area, Operation::ReadDirectory { dir, offset: 0 }).await;
    let Done::Names(first) = first else { panic!("names were asked for") };
    assert!(area.send_all(SOON).await);
    let rest = rest(&node, &area, dir, first.last().unwrap().next).await;
    assert_eq!(first.len() + rest.len(), 302, "with . and ..");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_what_is_discarded_no_more_is_remembered_than_of_what_was_given_up() {
    for is_open in [true, false] {
        let mut node = Node::new();
        let area = node.area().await;
        for n in 0..1100 {
            let ino = node.write(&area, &format!("{n}"), b"1", false).await;
            let file = area.by_ino(ino).unwrap();
            let _alone = file.content.write().await;
            area.begin_write(&file).await.unwrap();
        }
        let area = if is_open {
            Some(area)
        } else {
            node.close(area).await;
            None
        };
        let discarded = node.staging.discard(&node.spec.id, &[], SOON).await.unwrap();
        assert_eq!((discarded.files, discarded.left.len()), (1100, 0));
        let area = match area {
            Some(area) => area,
            None => node.area().await,
        };
        let late = area.state().late.len();
        assert!(late <= 1024 && late > 1000, "{late}");
    }
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
        // One that was given up long ago, and that nobody could look for until now, is looked for before it is forgotten.
        let (id, long_ago) = (area.draw(), now_ns() - 3600 * 1_000_000_000);
        let late =
            super::super::record::Late { path: b"b".to_vec(), given_up_ns: long_ago, is_removed: true };
        area.state().late.insert(id.to_string(), late);
        let write = store::Write { id, ..write };
        sink.put(b"b", &body, &write, &store::Condition::Absent).await.unwrap();
        area.remove_late().await;
        assert!(!node.store("b").exists() && !area.state().late.contains_key(&id.to_string()));
    }
}
