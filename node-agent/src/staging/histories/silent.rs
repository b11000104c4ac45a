//! A staging disk that does not answer, and an agent whose successor has it, call by call.

use super::client::OWNER;
use super::uploads::{Node, SOON, store};
use crate::staging::disk::THREADS;
use crate::staging::testing::bring_write;
use crate::staging::{Area, Caller, Executed, Outcome};
use cache::meta::ROOT;
use inflight::{Inflight, Room};
use link::Cause;
use link::broker::MountId;
use link::writable::{Done, Operation, SetAttributes, Wrong};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const MOUNT: MountId = MountId(1);
const LIMIT: Duration = Duration::from_millis(200);

/// All threads of the disk wait until what is returned goes.
async fn hang(area: &Arc<Area>) -> Vec<mpsc::Sender<()>> {
    let mut stuck = Vec::new();
    for _ in 0..THREADS {
        let (mend, mended) = mpsc::channel::<()>();
        let (enter, entered) = oneshot::channel();
        let area = area.clone();
        let wait = move || {
            let _ = enter.send(());
            let _ = mended.recv(); // its end is what is waited for
            Ok(())
        };
        tokio::spawn(async move { area.on_disk(wait).await });
        entered.await.unwrap();
        stuck.push(mend);
    }
    stuck
}

/// As the server of questions asks: what came of it, or an error and what goes on.
async fn ask(
    area: &Arc<Area>,
    executed: &Arc<Executed>,
    unique: u64,
    operation: Operation,
) -> Result<Outcome, JoinHandle<Outcome>> {
    let inflight = Inflight::map(Inflight::create(Room::ReadWrite).unwrap()).unwrap();
    ask_with(area, executed, unique, operation, inflight).await
}

async fn ask_with(
    area: &Arc<Area>,
    executed: &Arc<Executed>,
    unique: u64,
    operation: Operation,
    inflight: Inflight,
) -> Result<Outcome, JoinHandle<Outcome>> {
    let mut work = {
        let (area, executed) = (area.clone(), executed.clone());
        tokio::spawn(async move {
            let waits = |_| true;
            let caller =
                Caller { mount: MOUNT, unique, waits: &waits, inflight: &inflight, read_only: false };
            area.execute(&caller, &executed, operation).await.map(|(done, _)| done)
        })
    };
    tokio::select! {
        biased;
        done = &mut work => Ok(done.unwrap()),
        wrong = area.is_silent_to(executed, unique) => {
            assert_eq!(wrong, Wrong::Cause(Cause::Unavailable));
            Err(work)
        }
    }
}

async fn append(area: &Arc<Area>, executed: &Arc<Executed>, unique: u64, ino: u64, text: &str) -> Outcome {
    let inflight = Inflight::map(Inflight::create(Room::ReadWrite).unwrap()).unwrap();
    bring_write(&inflight, unique, 0, text.as_bytes(), libc::O_APPEND as u32);
    let asked = ask_with(area, executed, unique, Operation::Write { ino }, inflight).await;
    let Ok(outcome) = asked else { panic!("the disk does not answer") };
    outcome
}

fn create(name: &str) -> Operation {
    Operation::Create { parent: ROOT, name: name.into(), owner: OWNER, exclusive: true, open: true }
}

/// That is open, by its inode number.
async fn with_a_file(limit: Duration) -> (Node, Arc<Area>, Arc<Executed>, u64) {
    let mut node = Node::on_disk(&store(), limit);
    let area = node.open().await.unwrap();
    let executed = Arc::new(Executed::default());
    area.join(MOUNT, &executed);
    let Ok(Ok(Done::Node(made))) = ask(&area, &executed, 1, create("a")).await else { panic!("not made") };
    (node, area, executed, made.ino)
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_told_that_an_open_has_failed_has_nothing_open_when_it_is_done_after_all() {
    let (mut node, area, executed, ino) = with_a_file(LIMIT).await;
    let times = |ino| area.state().times_open(MOUNT, ino);
    assert_eq!(times(ino), 1);

    // Both have begun before anybody knows that it hangs.
    let stuck = hang(&area).await;
    let open = Operation::Open { ino, write: true };
    let (opened, created) =
        tokio::join!(ask(&area, &executed, 2, open.clone()), ask(&area, &executed, 3, create("b")));
    let (Err(opened), Err(created)) = (opened, created) else {
        panic!("they were done on a disk that hangs")
    };
    // Nothing new is begun then.
    let refused = match ask(&area, &executed, 4, create("c")).await {
        Ok(outcome) => outcome,
        Err(later) => later.await.unwrap(),
    };
    assert_eq!(refused, Err(Wrong::Cause(Cause::Unavailable)));
    drop(stuck);
    for done in [opened, created] {
        assert_eq!(done.await.unwrap(), Err(Wrong::Cause(Cause::Unavailable)));
    }
    assert_eq!(times(ino), 1, "once, as it was");
    // A worker that comes after the one that asked gets the same answer.
    let again = ask(&area, &executed, 2, open.clone()).await.ok().unwrap();
    assert_eq!(again, Err(Wrong::Cause(Cause::Unavailable)));
    let find = |name: &str| Operation::Lookup { parent: ROOT, name: name.into() };
    let Ok(Ok(Done::Node(b))) = ask(&area, &executed, 5, find("b")).await else { panic!("b is not there") };
    assert_eq!(times(b.ino), 0);
    let c = ask(&area, &executed, 6, find("c")).await.ok().unwrap();
    assert_eq!(c, Ok(Done::Absent), "it was begun on a disk that hangs");
    // And so does one of the next agent's.
    let area = node.succeed(area).await;
    let executed = Arc::new(Executed::default());
    area.join(MOUNT, &executed);
    let again = ask(&area, &executed, 2, open).await.ok().unwrap();
    assert_eq!(again, Err(Wrong::Cause(Cause::Unavailable)));
    assert_eq!(area.state().times_open(MOUNT, ino), 1);
}

/// What it has begun may get to the disk when its successor has executed it anew, and others have gone on from there.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_was_succeeded_changes_no_bytes() {
    let (node, area, executed, ino) = with_a_file(LIMIT).await;
    let cut = |size| {
        let set = SetAttributes { size: Some(size), ..SetAttributes::default() };
        Operation::SetAttributes { ino, set }
    };
    let Ok(Ok(_)) = ask(&area, &executed, 2, cut(5)).await else { panic!("not done") };
    // It waits for a thread of the disk when the successor comes.
    let stuck = hang(&area).await;
    let waiting = {
        let (area, executed, operation) = (area.clone(), executed.clone(), cut(0));
        tokio::spawn(async move { ask(&area, &executed, 3, operation).await.map_err(drop) })
    };
    while !executed.is_begun(3) {
        tokio::task::yield_now().await;
    }
    assert!(area.release(Instant::now() + LIMIT));
    drop(stuck);
    let done = waiting.await.unwrap();
    assert!(!matches!(done, Ok(Ok(_))), "{done:?}");
    assert_eq!(node.staged(ino), 5);
    assert!(ask(&area, &executed, 4, cut(1)).await.is_ok_and(|done| done.is_err()));
    assert_eq!(node.staged(ino), 5);
}

/// Its place is noted, and its bytes are refused, because a successor is about to have them.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_appended_when_its_agent_was_released_is_appended_by_the_successor() {
    let (mut node, area, executed, ino) = with_a_file(SOON).await;
    assert_eq!(append(&area, &executed, 2, ino, "one ").await, Ok(Done::Written { bytes: 4 }));
    area.tenure.end(); // its release waits for another call of the disk
    for (unique, text) in [(3, "two "), (4, "three")] {
        assert_eq!(append(&area, &executed, unique, ino, text).await, Err(Wrong::Cause(Cause::Unavailable)));
    }
    let area = node.succeed(area).await;
    let executed = Arc::new(Executed::default());
    area.join(MOUNT, &executed);
    assert_eq!(append(&area, &executed, 3, ino, "two ").await, Ok(Done::Written { bytes: 4 }));
    assert_eq!(append(&area, &executed, 4, ino, "three").await, Ok(Done::Written { bytes: 5 }));
    assert_eq!(node.bytes(ino), b"one two three");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_could_not_be_appended_stays_so_and_its_place_is_the_next_ones() {
    let (mut node, area, executed, ino) = with_a_file(SOON).await;
    assert_eq!(append(&area, &executed, 2, ino, "one ").await, Ok(Done::Written { bytes: 4 }));
    let file = area.by_ino(ino).unwrap();
    let whole = file.content.write().await.replace(Arc::new(node.file(ino)));
    let failed = append(&area, &executed, 3, ino, "two ").await;
    assert_eq!(failed, Err(Wrong::Cause(Cause::Unavailable)));
    *file.content.write().await = whole;
    drop(file);
    assert_eq!(append(&area, &executed, 4, ino, "three ").await, Ok(Done::Written { bytes: 6 }));
    // Agent and worker die before anybody has an answer.
    let (mut area, mut executed) = (area, executed);
    for _ in 0..2 {
        node.close(area).await;
        area = node.open().await.unwrap();
        executed = Arc::new(Executed::default());
        area.join(MOUNT, &executed);
        assert_eq!(append(&area, &executed, 3, ino, "two ").await, failed);
        assert_eq!(append(&area, &executed, 4, ino, "three ").await, Ok(Done::Written { bytes: 6 }));
    }
    assert_eq!(append(&area, &executed, 5, ino, "four").await, Ok(Done::Written { bytes: 4 }));
    assert_eq!(node.bytes(ino), b"one three four");
}

/// A call that goes on could change what the successor has.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_whose_disk_hangs_keeps_what_it_is_to_leave() {
    let (mut node, area, ..) = with_a_file(SOON).await;
    let (mend, mended) = mpsc::channel::<()>();
    let (enter, entered) = oneshot::channel();
    let changing = {
        let area = area.clone();
        tokio::spawn(async move {
            let hangs = move || {
                let _ = enter.send(());
                let _ = mended.recv(); // its end is what is waited for
                Ok(())
            };
            area.change_data(hangs).await
        })
    };
    entered.await.unwrap();
    assert!(!area.release(Instant::now()));
    let other = node.another();
    let refused = node.opens(&other).await.err().expect("it is locked");
    assert!(refused.contains("another process"), "{refused}");
    drop(mend);
    changing.await.unwrap().unwrap();
    node.close(area).await; // as its process ends
    node.opens(&other).await.unwrap();
}
