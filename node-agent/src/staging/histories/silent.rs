//! A staging disk that does not answer, and an agent whose successor has it, call by call.

use super::client::OWNER;
use super::uploads::{Node, store};
use crate::staging::disk::THREADS;
use crate::staging::{Area, Caller, Executed, Outcome};
use cache::meta::ROOT;
use inflight::{Inflight, Room};
use link::Cause;
use link::broker::MountId;
use link::writable::{Done, Operation, SetAttributes, Wrong};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;
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
    let mut work = {
        let (area, executed) = (area.clone(), executed.clone());
        tokio::spawn(async move {
            let inflight = Inflight::map(Inflight::create(Room::ReadWrite).unwrap()).unwrap();
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

fn create(name: &str) -> Operation {
    Operation::Create { parent: ROOT, name: name.into(), owner: OWNER, exclusive: true, open: true }
}

/// That is open, by its inode number.
async fn with_a_file() -> (Node, Arc<Area>, Arc<Executed>, u64) {
    let mut node = Node::on_disk(&store(), LIMIT);
    let area = node.open().await.unwrap();
    let executed = Arc::new(Executed::default());
    area.join(MOUNT, &executed);
    let Ok(Ok(Done::Node(made))) = ask(&area, &executed, 1, create("a")).await else { panic!("not made") };
    (node, area, executed, made.ino)
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_told_that_an_open_has_failed_has_nothing_open_when_it_is_done_after_all() {
    let (_node, area, executed, ino) = with_a_file().await;
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
    let again = ask(&area, &executed, 2, open).await.ok().unwrap();
    assert_eq!(again, Err(Wrong::Cause(Cause::Unavailable)));
    let find = |name: &str| Operation::Lookup { parent: ROOT, name: name.into() };
    let Ok(Ok(Done::Node(b))) = ask(&area, &executed, 5, find("b")).await else { panic!("b is not there") };
    assert_eq!(times(b.ino), 0);
    let c = ask(&area, &executed, 6, find("c")).await.ok().unwrap();
    assert_eq!(c, Ok(Done::Absent), "it was begun on a disk that hangs");
}

/// What it has begun may get to the disk when its successor has executed it anew, and others have gone on from there.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_was_succeeded_changes_no_bytes() {
    let (node, area, executed, ino) = with_a_file().await;
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
    area.release();
    drop(stuck);
    let done = waiting.await.unwrap();
    assert!(!matches!(done, Ok(Ok(_))), "{done:?}");
    assert_eq!(node.staged(ino), 5);
    assert!(ask(&area, &executed, 4, cut(1)).await.is_ok_and(|done| done.is_err()));
    assert_eq!(node.staged(ino), 5);
}
