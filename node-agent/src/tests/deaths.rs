//! Workers that die, hang, or never come to serve.

use super::node::{Node, look_up};
use super::until;
use super::worker::Conduct;
use crate::app::App;
use crate::supervisor::Phase;
use link::broker::{BrokerAnswer, BrokerRequest, MountId, Report};
use link::{Refusal, RefusalKind};
use nix::sys::signal::Signal;

/// The causes of the heals so far, oldest first.
async fn healed(app: &App, count: usize) -> Vec<String> {
    let heals = || app.volumes.context.heals.recent();
    until("a heal is proved", || heals().len() >= count).await;
    let mut causes: Vec<String> = heals().iter().map(|heal| heal.cause.name().to_owned()).collect();
    causes.sort();
    causes
}

async fn reported(node: &Node, what: &str, wanted: impl Fn(&Report) -> bool) {
    let is_it = |asked: &BrokerRequest| match asked {
        BrokerRequest::Report { report, .. } if wanted(report) => Some(()),
        _ => None,
    };
    node.broker.was_asked(what, is_it).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_dies_is_succeeded_and_the_heal_says_of_what_it_died() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (_mount, first) = node.mount(&agent, node.publish(1, "data", &[])).await;
    first.die(Signal::SIGKILL);
    let second = node.workers.serving(1, Some(first.pid)).await;
    assert!(second.assigned().assign.takeover);
    assert_eq!(healed(&app, 1).await, ["signal"]);
    assert!(app.volumes.context.heals.recent()[0].ended.contains("SIGKILL"));
    second.exit();
    let third = node.workers.serving(1, Some(second.pid)).await;
    assert_eq!(healed(&app, 2).await, ["exit", "signal"]);
    // Its memory group knows that the kernel has killed in it.
    let in_group = |asked: &BrokerRequest| {
        matches!(asked, BrokerRequest::Release { .. }).then_some(Ok(BrokerAnswer::Released { oom_kills: 1 }))
    };
    node.broker.answers(in_group);
    until("it is confined", || app.volumes.mounts()[0].worker_without_group().is_none()).await;
    third.die(Signal::SIGKILL);
    node.workers.serving(1, Some(third.pid)).await;
    assert_eq!(healed(&app, 3).await, ["exit", "oom", "signal"]);
    assert_eq!(app.volumes.mounts()[0].state().heals, 3);
    reported(
        &node,
        "the owner learns of it",
        |r| matches!(r, Report::Healed { cause, .. } if cause == "oom"),
    )
    .await;
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_hangs_while_requests_wait_is_replaced_and_no_other() {
    let node = Node::with("hang_limit = \"2s\"");
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (_mount, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    node.broker.answers(|asked| match asked {
        BrokerRequest::Waiting { .. } => Some(Ok(BrokerAnswer::Waiting { count: 0 })),
        _ => None,
    });
    worker.hang();
    tokio::time::sleep(app.volumes.context.hang_limit * 2).await; // it may be ended too early now
    assert!(!worker.has_ended(), "no request waits for it");
    node.broker.answers_as_usual();
    let successor = node.workers.serving(1, Some(worker.pid)).await;
    until("it is killed", || worker.has_ended()).await;
    assert_eq!(healed(&app, 1).await, ["hang"]);
    assert!(!successor.has_ended());
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_that_does_not_come_up_is_tried_again() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (_mount, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    node.workers.next(&[
        Conduct::OfAnotherBuild,
        Conduct::FailsAtStart,
        Conduct::FailsAtAssign,
        Conduct::TalksNonsense,
        Conduct::DiesAtGo,
        Conduct::FailsAtGo,
    ]);
    worker.die(Signal::SIGBUS);
    node.workers.serving(1, Some(worker.pid)).await;
    assert_eq!(node.workers.count(), 8);
    healed(&app, 1).await;
    let gone = node.workers.all().into_iter().take(7).all(|worker| worker.has_ended());
    assert!(gone, "no process of those that failed is left");
    reported(&node, "the owner learns that calls wait", |r| matches!(r, Report::Degraded { .. })).await;
    reported(&node, "and that they go on", |r| matches!(r, Report::Recovered)).await;
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_worker_that_does_not_come_up_is_tried_again() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    node.workers.next(&[Conduct::FailsAtAssign, Conduct::TalksNonsense]);
    let (_mount, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    assert_eq!(node.workers.count(), 3);
    assert!(!worker.assigned().assign.takeover, "the kernel has no answer to INIT yet");
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_that_no_worker_serves_in_time_is_given_up() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (mount, worker) = node.mount(&agent, node.publish(1, "data", &[("healTimeout", "1s")])).await;
    node.workers.next(&[Conduct::FailsAtAssign; 50]);
    worker.die(Signal::SIGKILL);
    let aborted = |asked: &BrokerRequest| match asked {
        BrokerRequest::Abort { mount, why } => Some((*mount, why.clone())),
        _ => None,
    };
    let (id, why) = node.broker.was_asked("the connection is aborted", aborted).await;
    assert_eq!(id, mount.id);
    assert!(why.contains("as the test wants it"), "{why}");
    until("it has failed", || app.volumes.mounts()[0].state().phase == Phase::Failed).await;
    // A new broker does not see it, and it is not waited for.
    node.broker.die();
    node.broker.start();
    until("it is dropped", || app.volumes.mounts().is_empty()).await;
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_worker_is_started_while_the_debug_file_exists() {
    let stop = tempfile::NamedTempFile::new().unwrap();
    let path = stop.path().to_owned();
    let node = Node::with(&format!("suspend_respawn_file = {path:?}"));
    std::fs::remove_file(&path).unwrap();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (_mount, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    std::fs::write(&path, "").unwrap();
    worker.die(Signal::SIGKILL);
    until("it is suspended", || app.volumes.mounts()[0].state().phase == Phase::Suspended).await;
    assert_eq!(node.workers.count(), 1);
    std::fs::remove_file(&path).unwrap();
    node.workers.serving(1, Some(worker.pid)).await;
    app.shutdown().await;
    assert!(!path.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_heal_waits_for_a_broker_that_sees_it_and_costs_no_reader() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (_mount, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    let blind = |asked: &BrokerRequest| match asked {
        BrokerRequest::Probe { mount: MountId(1) } => Some(Ok(BrokerAnswer::Probed { serving: false })),
        BrokerRequest::Confine { .. } => Some(Err(Refusal::new(RefusalKind::Denied, "no cgroups here"))),
        _ => None,
    };
    node.broker.answers(blind);
    worker.die(Signal::SIGKILL);
    let successor = node.workers.serving(1, Some(worker.pid)).await;
    assert_eq!(look_up(&app.volumes, &successor, "f").unwrap().2, 5, "it is read meanwhile");
    node.broker
        .was_asked("the agent asks for a proof", |a| matches!(a, BrokerRequest::Probe { .. }).then_some(()))
        .await;
    assert!(app.volumes.context.heals.recent().is_empty());
    node.broker.answers_as_usual();
    assert_eq!(healed(&app, 1).await, ["signal"]);
    app.shutdown().await;
}
