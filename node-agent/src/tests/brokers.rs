//! Brokers that go away, come back, stand still, or refuse.

use super::node::{Node, look_up};
use super::until;
use super::worker::Conduct;
use link::broker::{AgentRequest, BrokerAnswer, BrokerRequest, MountId};
use link::{Refusal, RefusalKind};
use std::sync::{Arc, Mutex};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_broker_is_shown_every_mount_and_calls_go_on_meanwhile() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (mount, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    node.broker.die();
    assert_eq!(look_up(&app.volumes, &worker, "f").unwrap().2, 5);
    node.broker.start();
    until("it holds the mount", || node.broker.held.lock().unwrap().contains_key(&mount.id)).await;
    let held = node.broker.held.lock().unwrap().remove(&mount.id).unwrap();
    assert_eq!((held.fds.len(), held.hold.publish.spec.target), (2, mount.publish.spec.target));
    assert_eq!(held.hold.resume, mount.resume);
    until("the heal is proved", || {
        let heals = app.volumes.context.heals.recent();
        heals.iter().any(|heal| heal.cause.name() == "broker")
    })
    .await;
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_without_time_is_shown_a_mount_again_and_one_that_refuses_is_not() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    node.mount(&agent, node.publish(1, "data", &[])).await;
    node.mount(&agent, node.publish(2, "data", &[])).await;
    // How often it was asked to hold each of them.
    let asked = Arc::new(Mutex::new((0, 0)));
    let counts = asked.clone();
    node.broker.answers(move |request| {
        let BrokerRequest::Hold(hold) = request else { return None };
        let mut asked = counts.lock().unwrap();
        match hold.publish.mount {
            MountId(1) => {
                asked.0 += 1;
                (asked.0 < 3).then(|| Err(Refusal::new(RefusalKind::Unavailable, "busy")))
            }
            _ => {
                asked.1 += 1;
                Some(Err(Refusal::new(RefusalKind::Invalid, "no")))
            }
        }
    });
    app.volumes.clone().show_to_broker(None).await;
    until("it holds the first", || node.broker.held.lock().unwrap().contains_key(&MountId(1))).await;
    assert!(!node.broker.held.lock().unwrap().contains_key(&MountId(2)));
    assert_eq!(*asked.lock().unwrap(), (3, 1));
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_that_ended_with_its_broker_is_dropped() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let prepared = node.prepare(&agent, node.publish(1, "data", &[])).await.unwrap();
    assert_eq!(app.volumes.mounts().len(), 1);
    node.broker.die();
    node.broker.start();
    until("it is dropped", || app.volumes.mounts().is_empty()).await;
    // The broker repeats it under another number.
    let agent = node.broker.agent(false).await;
    drop(prepared);
    node.mount(&agent, node.publish(2, "data", &[])).await;
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpublish_in_the_middle_of_a_publish_ends_it() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    // None comes up.
    node.workers.next(&[Conduct::TalksNonsense; 50]);
    let (refused, _) = tokio::join!(node.prepare(&agent, node.publish(1, "data", &[])), async {
        until("it is on its way", || app.volumes.has(MountId(1)) || node.workers.count() > 0).await;
        agent.done(AgentRequest::Unpublish { mount: MountId(1) }).await
    });
    assert!(refused.is_err());
    until("nothing is left", || app.volumes.mounts().is_empty() && app.volumes.scopes.all().is_empty()).await;
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_refuses_the_agent_is_asked_again() {
    let node = Node::new();
    let hellos = std::sync::atomic::AtomicUsize::new(0);
    node.broker.answers(move |request| match request {
        BrokerRequest::Hello(_) => match hellos.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
            0 => Some(Err(Refusal::new(RefusalKind::Unavailable, "not now"))),
            1 => Some(Ok(BrokerAnswer::Done)),
            _ => None,
        },
        _ => None,
    });
    let (app, agent) = node.start().await;
    assert!(agent.hello.beats && !agent.hello.successor);
    until("it is connected", || app.volumes.context.privileged.connected()).await;
    app.shutdown().await;
}
