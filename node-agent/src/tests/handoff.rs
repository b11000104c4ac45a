//! An agent takes over from one that is there, or from one that is gone.

use super::node::{Node, Prepared, copy_of, look_up};
use super::until;
use crate::app::App;
use crate::config::Config;
use crate::handoff::drain::{self, End};
use crate::handoff::standby;
use link::RefusalKind;
use link::broker::{Adopt, AgentAnswer, AgentEnd, AgentRequest, BrokerRequest, MountId, Publish, Resume};
use link::worker::{Ask, Reply};
use std::os::fd::AsFd;
use std::time::Duration;

/// As a broker asks for it. `orphaned_ms`: for how long no agent has served it.
pub(super) fn adopt(mount: &Prepared, orphaned_ms: u64) -> Box<Adopt> {
    let Resume { mode, scope, .. } = &mount.resume;
    Box::new(Adopt {
        publish: Publish { init: Vec::new(), ..copy_of(&mount.publish) },
        resume: Resume::new(*mode, scope.clone()),
        backing: Vec::new(),
        orphaned_ms,
        ended: AgentEnd::Asked,
    })
}

/// Of an agent that is to succeed one in this process. LMDB opens nothing twice in a process: each has a copy.
fn successors(node: &Node) -> Config {
    let mut config = node.config.clone();
    config.cache.metadata_dir = node.home.path().join("meta2");
    config
}

/// What the one that has let go leaves to it.
fn leave_names(node: &Node) {
    let to = successors(node).cache.metadata_dir;
    for scope in std::fs::read_dir(&node.config.cache.metadata_dir).unwrap() {
        let scope = scope.unwrap();
        let to = to.join(scope.file_name());
        std::fs::create_dir_all(&to).unwrap();
        for file in std::fs::read_dir(scope.path()).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_is_handed_from_one_agent_to_the_next() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (mut old, agent) = node.start().await;
    let (mount, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    let volumes = old.volumes.clone();
    let known = look_up(&volumes, &worker, "f").unwrap();
    old.volumes.clone().show_to_broker(None).await;
    let state_dir = node.config.agent.state_dir.clone();
    let old = tokio::spawn(async move {
        let end = drain::follow(&mut old, &state_dir).await.unwrap();
        (old, end)
    });

    let config = successors(&node);
    let new = tokio::spawn(async move {
        let entry = standby::enter(&config).await?;
        App::launch(config, None, entry).await
    });
    let standby = node.broker.agent(true).await;
    let refused = standby.done(AgentRequest::Holding).await.unwrap_err();
    assert_eq!(refused.kind, RefusalKind::Unavailable, "another agent serves");
    let fds = [mount.device.as_fd(), mount.shared.as_fd()];
    standby.ask(AgentRequest::Prepare(adopt(&mount, 0)), &fds).await.unwrap();
    assert_eq!(
        standby.done(AgentRequest::Prepare(adopt(&mount, 0))).await.unwrap_err().kind,
        RefusalKind::Internal
    );
    assert!(
        !worker.has_ended() && look_up(&volumes, &worker, "f").unwrap() == known,
        "the connection was not touched"
    );

    agent.done(AgentRequest::Drain).await.unwrap();
    until("its workers are gone", || worker.has_ended()).await;
    assert_eq!(agent.done(AgentRequest::Drain).await.unwrap_err().kind, RefusalKind::Unavailable);
    leave_names(&node);
    if let Err(refusal) = standby.done(AgentRequest::Succeed).await {
        panic!("{refusal}: {:#}", new.await.unwrap().err().expect("it says why"));
    }
    standby.ask(AgentRequest::Adopt(adopt(&mount, 100)), &fds).await.unwrap();
    let successor = node.workers.serving(1, Some(worker.pid)).await;
    assert!(successor.assigned().assign.takeover);
    agent.done(AgentRequest::Depart).await.unwrap();
    let (old, end) = tokio::time::timeout(Duration::from_secs(20), old).await.expect("it departs").unwrap();
    assert!(matches!(end, End::Departed) && old.is_drained());
    let new = new.await.unwrap().unwrap();
    assert_eq!(look_up(&new.volumes, &successor, "f").unwrap(), known, "node ids of the kernel stay valid");
    until("the heal is proved", || !new.volumes.context.heals.recent().is_empty()).await;
    assert_eq!(new.volumes.context.heals.recent()[0].cause.name(), "upgrade");
    new.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_of_an_agent_that_is_gone_is_taken_over_with_what_is_cached() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (mut old, agent) = node.start().await;
    let (mount, worker) = node.mount(&agent, node.publish(1, "data", &[("profile", "small")])).await;
    let (ino, version, _) = look_up(&old.volumes, &worker, "f").unwrap();
    worker.ask(Ask::File { ino, version }).unwrap();
    // As far as this process can die: what it holds is let go, and no process learns of it.
    old.drain().await;
    node.broker.die();
    drop(old);
    std::fs::remove_dir_all(node.source()).unwrap();
    node.broker.start();

    leave_names(&node);
    let app = App::start(successors(&node), None).await.unwrap();
    let agent = until_new(&node).await;
    let fds = [mount.device.as_fd(), mount.shared.as_fd()];
    agent.ask(AgentRequest::Adopt(adopt(&mount, 5000)), &fds).await.unwrap();
    let successor = node.workers.serving(1, Some(worker.pid)).await;
    let Ok((Reply::File { file, .. }, _)) = successor.ask(Ask::File { ino, version }) else {
        panic!("no file")
    };
    let read = successor.ask(Ask::Read { file, offset: 0, len: 5 });
    assert!(matches!(read, Ok((Reply::Present { .. }, _))), "{read:?}");
    // Once more, for a broker that did not hear the answer; and one that another agent should have.
    agent.ask(AgentRequest::Adopt(adopt(&mount, 0)), &fds).await.unwrap();
    let mut without_scope = adopt(&mount, 0);
    without_scope.resume.scope = "nonsense".into();
    without_scope.publish.mount = MountId(7);
    assert_eq!(
        agent.ask(AgentRequest::Adopt(without_scope), &fds).await.unwrap_err().kind,
        RefusalKind::Internal
    );
    assert_eq!(
        agent.done(AgentRequest::Adopt(adopt(&mount, 0))).await.unwrap_err().kind,
        RefusalKind::Internal
    );
    let mut empty = adopt(&mount, 0);
    empty.publish.mount = MountId(8);
    let nothing = [mount.device.as_fd(), mount.device.as_fd()];
    let refused = agent.ask(AgentRequest::Adopt(empty), &nothing).await.unwrap_err();
    assert_eq!(refused.kind, RefusalKind::Conflict, "{refused}");
    assert_eq!(app.volumes.mounts().len(), 1);
    app.shutdown().await;
}

/// The agent that is connected and serves.
async fn until_new(node: &Node) -> std::sync::Arc<super::broker::Agent> {
    loop {
        let agent = node.broker.agent(false).await;
        if !agent.hello.drained && agent.done(AgentRequest::Holding).await.is_ok() {
            return agent;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_drains_only_if_the_broker_holds_every_mount_and_serves_again_if_told() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (mut old, agent) = node.start().await;
    let (_mount, _worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    let refused = agent.done(AgentRequest::Drain).await.unwrap_err();
    assert_eq!(refused.kind, RefusalKind::Unavailable, "{refused}");
    // An agent that serves has nothing to resume.
    agent.done(AgentRequest::Resume).await.unwrap();
    agent.done(AgentRequest::Depart).await.unwrap();
    old.volumes.clone().show_to_broker(None).await;
    let state_dir = node.config.agent.state_dir.clone();
    let following = tokio::spawn(async move { drain::follow(&mut old, &state_dir).await });
    agent.done(AgentRequest::Drain).await.unwrap();
    agent.done(AgentRequest::Resume).await.unwrap();
    let end = tokio::time::timeout(Duration::from_secs(20), following).await.expect("it goes on").unwrap();
    assert!(matches!(end, Ok(End::Again)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drained_agent_whose_broker_died_shows_its_mounts_to_the_next_and_leaves_the_rest_to_it() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (mut old, agent) = node.start().await;
    let (mount, _worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    old.volumes.clone().show_to_broker(None).await;
    let state_dir = node.config.agent.state_dir.clone();
    let following = tokio::spawn(async move { drain::follow(&mut old, &state_dir).await });
    agent.done(AgentRequest::Drain).await.unwrap();
    node.broker.die();
    node.broker.start();
    // No agent has the owner's lock: it serves again.
    let end = tokio::time::timeout(Duration::from_secs(30), following).await.expect("it goes on").unwrap();
    assert!(matches!(end, Ok(End::Again)));
    assert!(node.broker.held.lock().unwrap().contains_key(&mount.id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_that_is_not_wanted_ends_and_says_why() {
    let node = Node::new();
    let (app, _agent) = node.start().await;
    let config = node.config.clone();
    let entering = tokio::spawn(async move { standby::enter(&config).await.map(drop) });
    let standby = node.broker.agent(true).await;
    let why = "it does not understand volume-1".to_owned();
    standby.done(AgentRequest::Dismiss { why: why.clone() }).await.unwrap();
    let error = entering.await.unwrap().unwrap_err();
    assert!(error.to_string().contains(&why), "{error}");
    // Refused at its first word.
    node.broker.answers(|request| match request {
        BrokerRequest::Hello(hello) if hello.successor => {
            Some(Err(link::Refusal::new(RefusalKind::Conflict, "its state is newer")))
        }
        _ => None,
    });
    let config = node.config.clone();
    let error = standby::enter(&config).await.map(drop).unwrap_err();
    assert!(error.to_string().contains("its state is newer"), "{error}");
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_becomes_the_agent_when_the_other_ends_without_a_broker() {
    let node = Node::new();
    let (app, _agent) = node.start().await;
    let config = node.config.clone();
    let entering = tokio::spawn(async move { standby::enter(&config).await.map(drop) });
    node.broker.agent(true).await;
    node.broker.die();
    app.shutdown().await;
    tokio::time::timeout(Duration::from_secs(20), entering).await.expect("it enters").unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_agent_before_closes_late_is_waited_for_and_what_serves_is_named() {
    let mut node = Node::new();
    // As a child has them that was started in the moment in which that agent let go.
    let api = std::os::unix::net::UnixListener::bind(&node.config.agent.api_socket).unwrap();
    let page = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    node.config.agent.metrics = Some(page.local_addr().unwrap());
    let starting = App::start(node.config.clone(), None);
    let closing = async {
        tokio::time::sleep(Duration::from_millis(300)).await; // it may fail too early now
        drop((api, page));
    };
    let (app, ()) = tokio::join!(starting, closing);
    let app = app.unwrap();
    assert_eq!(app.metrics_address, node.config.agent.metrics);
    let mut other = Node::new();
    other.config.agent.api_socket = node.config.agent.api_socket.clone();
    let error = App::start(other.config.clone(), None).await.err().expect("one agent for each socket");
    assert!(error.to_string().contains("another agent serves"), "{error}");
    let mut other = Node::new();
    other.config.agent.metrics = node.config.agent.metrics;
    let error = App::start(other.config.clone(), None).await.err().expect("one agent for each address");
    assert!(error.to_string().contains("cannot be bound"), "{error}");
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_agents_without_a_broker_the_second_does_not_start() {
    let mut node = Node::new();
    let (app, _agent) = node.start().await;
    let error = App::start(node.config.clone(), None).await.err().expect("one agent at a time");
    assert!(error.to_string().contains("stop it first"), "{error}");
    node.config.agent.broker_socket = None;
    let error = standby::enter(&node.config).await.map(drop).unwrap_err();
    assert!(error.to_string().contains("no broker is configured"), "{error}");
    let held = app.serve(AgentRequest::Holding, Vec::new()).await.unwrap().0;
    assert!(matches!(held, AgentAnswer::Holding { mounts } if mounts.is_empty()));
    app.shutdown().await;
}
