//! What a worker may ask, and what one may that is not ours any more.

use super::node::{Node, look_up};
use super::until;
use link::broker::{BrokerAnswer, BrokerRequest};
use link::worker::{Ask, Counts, FromWorker, Reply};
use link::{Cause, Refusal, RefusalKind};
use std::fs::File;
use std::os::unix::fs::FileExt;

const LARGE: &[(&str, &str)] = &[("profile", "large")];

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * 31 % 251) as u8).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_question_of_a_worker_has_its_answer() {
    let node = Node::new();
    // Larger than what comes whole with the first question.
    let content = bytes(3 << 20);
    node.file("data/d/f", &content);
    let (app, agent) = node.start().await;
    let (_mount, worker) = node.mount(&agent, node.publish(1, "data", LARGE)).await;
    let (ino, version, size) = look_up(&app.volumes, &worker, "d/f").unwrap();
    assert_eq!(size, content.len() as u64);
    let stored = |body| matches!(worker.ask(body), Ok((Reply::Stored, _)));
    assert!(stored(Ask::List { dir: cache::meta::ROOT }));
    assert!(stored(Ask::Attributes { ino, force: true }));
    assert!(stored(Ask::Open { ino, version }));
    assert!(matches!(worker.ask(Ask::Lookup { parent: ino, name: vec![b'x'; 300] }), Err(Cause::NotFound)));

    let (Reply::File { file, whole: false, .. }, fds) = worker.ask(Ask::File { ino, version }).unwrap()
    else {
        panic!("no file that is partly there")
    };
    let [data, presence] = <[_; 2]>::try_from(fds).unwrap();
    let (data, presence) = (File::from(data), File::from(presence));
    assert!(matches!(
        worker.ask(Ask::Read { file, offset: 8192, len: 4096 }),
        Ok((Reply::Present { .. }, _))
    ));
    let mut bits = [0];
    presence.read_exact_at(&mut bits, 0).unwrap();
    assert!(bits[0] & 1 << 2 != 0, "{bits:?}");
    let mut read = vec![0; 4096];
    data.read_exact_at(&mut read, 8192).unwrap();
    assert_eq!(read, content[8192..12288]);
    worker.send(FromWorker::Advance { file, offset: 64 << 10 });
    worker.send(FromWorker::Touched { files: vec![file, 7] });

    let direct = Ask::Direct { ino, version, offset: 100, len: 1000 };
    let (Reply::Uncached { len: 1000, number }, fds) = worker.ask(direct).unwrap() else {
        panic!("no bytes")
    };
    let mut read = vec![0; 1000];
    File::from(fds.into_iter().next().unwrap()).read_exact_at(&mut read, 0).unwrap();
    assert_eq!(read, content[100..1100]);
    worker.send(FromWorker::GivenBack { number });

    // Not whole yet: no passthrough.
    assert!(matches!(worker.ask(Ask::BackingOpen { file }), Err(Cause::Stale)));
    for offset in (0..size).step_by(64 << 10) {
        assert!(matches!(
            worker.ask(Ask::Read { file, offset, len: 64 << 10 }),
            Ok((Reply::Present { .. }, _))
        ));
    }
    let mount = app.volumes.mounts().pop().unwrap();
    let whole = || matches!(worker.ask(Ask::BackingOpen { file }), Ok((Reply::Backing { id: 5 }, _)));
    until("the file is whole", whole).await;
    assert_eq!(mount.backing(), [5]);
    assert!(stored(Ask::BackingClose { id: 5 }));
    assert!(mount.backing().is_empty());
    let cached = worker.ask(Ask::Cached { ino, version });
    assert!(matches!(cached, Ok((Reply::Cached { bytes }, _)) if bytes == size));
    assert!(
        matches!(worker.ask(Ask::Dying { tids: vec![3, 4] }), Ok((Reply::Dying { tids }, _)) if tids == [3])
    );
    let space = worker.ask(Ask::Space);
    assert!(matches!(space, Ok((Reply::Space { total_bytes, .. }, _)) if total_bytes >= size), "{space:?}");

    // A damaged file is dropped, and comes anew.
    assert!(stored(Ask::Damaged { file }));
    assert!(matches!(worker.ask(Ask::Read { file, offset: 0, len: 1 }), Ok((Reply::Gone, _))));
    let (Reply::File { file: other, .. }, _) = worker.ask(Ask::File { ino, version }).unwrap() else {
        panic!()
    };
    assert_ne!(file, other);
    until("the worker learns of it", || worker.forgotten.lock().unwrap().contains(&file)).await;

    worker.send(FromWorker::Counted(Counts { reads_hit: 3, ..Counts::default() }));
    until("it is counted", || mount.state().counts.reads_hit == 3).await;
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_broker_refuses_costs_a_feature_and_no_call() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (_mount, worker) = node.mount(&agent, node.publish(1, "data", LARGE)).await;
    let (ino, version, _) = look_up(&app.volumes, &worker, "f").unwrap();
    let (Reply::File { file, .. }, _) = worker.ask(Ask::File { ino, version }).unwrap() else {
        panic!("no file")
    };
    for kind in [RefusalKind::Unavailable, RefusalKind::Denied] {
        node.broker.answers(move |asked| {
            let refused = matches!(
                asked,
                BrokerRequest::BackingOpen { .. }
                    | BrokerRequest::BackingClose { .. }
                    | BrokerRequest::Dying { .. }
            );
            refused.then(|| Err(Refusal::new(kind, "as the test wants it")))
        });
        assert!(matches!(worker.ask(Ask::BackingOpen { file }), Err(Cause::Internal)));
        assert!(matches!(worker.ask(Ask::BackingClose { id: 3 }), Err(Cause::Internal)));
        assert!(
            matches!(worker.ask(Ask::Dying { tids: vec![1] }), Ok((Reply::Dying { tids }, _)) if tids.is_empty())
        );
    }
    node.broker.answers(|asked| {
        matches!(asked, BrokerRequest::BackingOpen { .. }).then_some(Ok(BrokerAnswer::Done))
    });
    assert!(matches!(worker.ask(Ask::BackingOpen { file }), Err(Cause::Internal)));
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_gets_nothing_of_what_is_not_its_volumes() {
    let node = Node::new();
    node.file("a/secret", &bytes(200 << 10));
    node.file("b/f", b"hello");
    let (app, agent) = node.start().await;
    let (_, owner) = node.mount(&agent, node.publish(1, "a", LARGE)).await;
    let (_, thief) = node.mount(&agent, node.publish(2, "b", LARGE)).await;
    let (ino, version, _) = look_up(&app.volumes, &owner, "secret").unwrap();
    let (Reply::File { file, .. }, _) = owner.ask(Ask::File { ino, version }).unwrap() else {
        panic!("no file")
    };
    assert!(matches!(thief.ask(Ask::Read { file, offset: 0, len: 4096 }), Ok((Reply::Gone, _))));
    assert!(matches!(thief.ask(Ask::BackingOpen { file }), Err(Cause::Stale)));
    assert!(thief.ask(Ask::File { ino, version }).is_err());
    assert!(thief.ask(Ask::Direct { ino, version, offset: 0, len: 10 }).is_err());
    assert!(matches!(thief.ask(Ask::Damaged { file }), Ok((Reply::Stored, _))));
    thief.send(FromWorker::Touched { files: vec![file] });
    thief.send(FromWorker::Advance { file, offset: 0 });
    thief.send(FromWorker::GivenBack { number: 12 });
    thief.send(FromWorker::Serving);
    // It is there as before.
    assert!(matches!(owner.ask(Ask::Read { file, offset: 0, len: 4096 }), Ok((Reply::Present { .. }, _))));
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_talks_nonsense_is_replaced() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (_mount, worker) = node.mount(&agent, node.publish(1, "data", LARGE)).await;
    worker.send_raw(&[0xff; 200]);
    let successor = node.workers.serving(1, Some(worker.pid)).await;
    assert!(successor.assigned().assign.takeover);
    until("the first is gone", || worker.has_ended()).await;
    assert_eq!(look_up(&app.volumes, &successor, "f").unwrap().2, 5);
    app.shutdown().await;
}
