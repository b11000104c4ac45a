//! Volumes are published, shared, refused, changed and unpublished.

use super::node::{Node, copy_of, look_up};
use super::until;
use link::broker::{AgentAnswer, AgentRequest, BrokerRequest, MountId, Secrets};
use link::worker::{Ask, Mode, Reply};
use link::{Pod, RefusalKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

const SMALL: &[(&str, &str)] = &[("profile", "small")];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_prepared_started_used_and_released() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let prepared = node.prepare(&agent, node.publish(1, "data", SMALL)).await.unwrap();
    let held = agent.done(AgentRequest::Holding).await.unwrap();
    assert!(matches!(held, AgentAnswer::Holding { mounts } if mounts.is_empty()), "not before it is started");
    agent.done(AgentRequest::Start { mount: prepared.id }).await.unwrap();
    let worker = node.workers.serving(1, None).await;
    let assign = &worker.assigned().assign;
    assert_eq!((assign.mode, assign.takeover, assign.roots), (Mode::NoOpen, false, 1));
    assert_eq!(worker.assigned().roots.len(), 1);
    assert_eq!(look_up(&app.volumes, &worker, "f").unwrap().2, 5);
    assert_eq!(look_up(&app.volumes, &worker, "g"), None);
    let held = agent.done(AgentRequest::Holding).await.unwrap();
    assert!(matches!(held, AgentAnswer::Holding { mounts } if mounts == [prepared.id]));
    let AgentAnswer::Usage(usage) = agent.done(AgentRequest::Usage { mount: prepared.id }).await.unwrap()
    else {
        panic!("no usage")
    };
    assert!(usage.total_bytes >= 5 && usage.away.is_none(), "{usage:?}");
    let (mount, rest) = app.volumes.find(std::path::Path::new("/pods/1/mount/a/b")).unwrap();
    assert_eq!((mount.id, rest.to_str()), (prepared.id, Some("a/b")));
    assert!(app.volumes.find(std::path::Path::new("/pods/2/mount")).is_none());
    node.broker
        .was_asked("its worker is confined", |asked| {
            matches!(asked, BrokerRequest::Confine { .. }).then_some(())
        })
        .await;

    agent.done(AgentRequest::Unpublish { mount: prepared.id }).await.unwrap();
    until("its worker is gone", || worker.has_ended()).await;
    assert!(app.volumes.mounts().is_empty() && app.volumes.scopes.all().is_empty());
    for unknown in [AgentRequest::Start { mount: prepared.id }, AgentRequest::Usage { mount: prepared.id }] {
        assert_eq!(agent.done(unknown).await.unwrap_err().kind, RefusalKind::NotFound);
    }
    // And again, for kubelet repeats it.
    agent.done(AgentRequest::Unpublish { mount: prepared.id }).await.unwrap();
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_published_is_refused_and_leaves_nothing() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let mut elsewhere = node.publish(1, "data", &[]);
    elsewhere.spec.volume.source = "file:///etc".into();
    let mut unknown = node.publish(1, "data", &[]);
    unknown.spec.volume.parameters.insert("later".into(), "x".into());
    let mut sources = node.publish(1, "data", &[]);
    sources.spec.sources = vec![link::SourceAt { path: "a".into(), source: "file:///a".into() }];
    for (publish, kind) in [
        (elsewhere, RefusalKind::Denied),
        (node.publish(1, "absent", &[]), RefusalKind::NotFound),
        (unknown, RefusalKind::Invalid),
        (sources, RefusalKind::Invalid),
    ] {
        let refused = node.prepare(&agent, publish).await.map(|prepared| prepared.id);
        assert_eq!(refused.unwrap_err().kind, kind);
    }
    let bare = AgentRequest::Publish(Box::new(node.publish(1, "data", &[])));
    assert_eq!(agent.done(bare).await.unwrap_err().kind, RefusalKind::Internal);
    assert!(app.volumes.mounts().is_empty() && app.volumes.scopes.all().is_empty());
    assert_eq!(node.workers.count(), 0);

    let (prepared, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    let again = node.prepare(&agent, copy_of(&prepared.publish)).await.map(|prepared| prepared.id);
    assert_eq!(again.unwrap_err().kind, RefusalKind::Conflict);
    assert!(!worker.has_ended(), "the one that is there goes on");
    for request in [
        AgentRequest::Succeed,
        AgentRequest::Dismiss { why: "test".into() },
        AgentRequest::Prepare(super::handoff::adopt(&prepared, 0)),
    ] {
        let refused = agent.done(request).await.unwrap_err();
        assert_eq!(refused.kind, RefusalKind::Conflict, "{refused}");
    }
    app.shutdown().await;
    assert!(worker.has_ended());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_of_one_source_share_what_is_known_and_cached() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (first, worker) = node.mount(&agent, node.publish(1, "data", SMALL)).await;
    let (ino, version, _) = look_up(&app.volumes, &worker, "f").unwrap();
    worker.ask(Ask::File { ino, version }).unwrap();
    let (_, second) = node.mount(&agent, node.publish(2, "data", SMALL)).await;
    let cached = || matches!(second.ask(Ask::Cached { ino, version }), Ok((Reply::Cached { bytes: 5 }, _)));
    until("what the first has read is cached for the second", cached).await;
    assert_eq!(app.volumes.scopes.all().len(), 1);
    agent.done(AgentRequest::Unpublish { mount: first.id }).await.unwrap();
    assert_eq!(app.volumes.scopes.all().len(), 1, "the second uses it");
    assert_eq!(look_up(&app.volumes, &second, "f").unwrap().0, ino);
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rotated_keys_are_not_shared_with_another_namespace() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let keys = |key: &str| {
        let pairs = [("accessKeyId", key), ("secretAccessKey", "x")];
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter().collect::<BTreeMap<_, _>>()
    };
    let rotate = |mount, key: &str| AgentRequest::Rotate { mount, secrets: Secrets(keys(key)) };
    let publish = |id, namespace: &str| {
        let mut publish = node.publish(id, "data", SMALL);
        publish.secrets = keys("old");
        publish.spec.subjects.pod = Some(Pod { namespace: namespace.into(), ..Pod::default() });
        publish
    };
    let (first, _) = node.mount(&agent, publish(1, "team-a")).await;
    agent.done(rotate(first.id, "old")).await.unwrap();
    agent.done(rotate(first.id, "new")).await.unwrap();
    assert_eq!(app.volumes.get(first.id).unwrap().secrets(), keys("new"));
    // Where to ask is no key: what another place tells is not shown as this one's.
    let mut elsewhere = keys("new");
    let site =
        "<configuration><property><name>dfs.ha.namenodes.a</name><value>b</value></property></configuration>";
    elsewhere.insert("hdfsSite".into(), site.into());
    let moved = AgentRequest::Rotate { mount: first.id, secrets: Secrets(elsewhere) };
    let refused = agent.done(moved).await.unwrap_err();
    assert!(refused.kind == RefusalKind::Denied && refused.message.contains("restart the pod"), "{refused}");
    let refused = node.prepare(&agent, publish(2, "team-b")).await.map(|prepared| prepared.id).unwrap_err();
    assert_eq!(refused.kind, RefusalKind::Denied, "{refused}");
    let (own, _) = node.mount(&agent, publish(3, "team-a")).await;
    agent.done(AgentRequest::Unpublish { mount: own.id }).await.unwrap();
    // Two namespaces with the same keys: neither may exchange them for both.
    agent.done(AgentRequest::Unpublish { mount: first.id }).await.unwrap();
    let (third, _) = node.mount(&agent, publish(4, "team-a")).await;
    let (_fourth, _) = node.mount(&agent, publish(5, "team-b")).await;
    assert_eq!(agent.done(rotate(third.id, "new")).await.unwrap_err().kind, RefusalKind::Denied);
    let nonsense = AgentRequest::Rotate {
        mount: third.id,
        secrets: Secrets(BTreeMap::from([("a".into(), "b".into())])),
    };
    assert_eq!(agent.done(nonsense).await.unwrap_err().kind, RefusalKind::Invalid);
    assert_eq!(agent.done(rotate(MountId(99), "new")).await.unwrap_err().kind, RefusalKind::NotFound);
    app.shutdown().await;
}

fn has_ended(device: &OwnedFd) -> bool {
    let mut device = [PollFd::new(device, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut device, Some(&now)).unwrap();
    device[0].revents().contains(PollFlags::ERR)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_whose_connection_has_ended_is_released_by_itself() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (mount, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    // Unmounted: the worker reads ENODEV and ends.
    drop(mount.kernel);
    // A child of another test's that has not executed its program yet has a copy.
    until("the kernel has ended the connection", || has_ended(&mount.device)).await;
    worker.exit();
    until("the mount is released", || app.volumes.mounts().is_empty()).await;
    until("its scope is closed", || app.volumes.scopes.all().is_empty()).await;
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_mount_was_renewed_for_is_counted() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (mount, _worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    agent.done(AgentRequest::Renewed { mount: mount.id, took_us: 1500 }).await.unwrap();
    assert_eq!(app.volumes.mounts()[0].state().heals, 1);
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_leaves_takes_no_new_volume() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (mount, _worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    // The broker does not hold it yet, and is shown it.
    let leaving = app.volumes.clone();
    let left = tokio::spawn(async move { leaving.leave().await });
    node.broker
        .was_asked("the agent asks what is held", |asked| {
            matches!(asked, BrokerRequest::Leaving).then_some(())
        })
        .await;
    assert!(!left.is_finished());
    let refused =
        node.prepare(&agent, node.publish(2, "data", &[])).await.map(|prepared| prepared.id).unwrap_err();
    assert_eq!(refused.kind, RefusalKind::Unavailable, "{refused}");
    let held = agent.done(AgentRequest::Holding).await.unwrap();
    assert!(
        matches!(held, AgentAnswer::Holding { mounts } if mounts.is_empty()),
        "what leaves takes no mount"
    );
    app.volumes.clone().show_to_broker(None).await;
    tokio::time::timeout(Duration::from_secs(30), left).await.expect("every mount is held").unwrap();
    assert_eq!(node.broker.held.lock().unwrap()[&mount.id].fds.len(), 2);
    app.shutdown().await;
}
