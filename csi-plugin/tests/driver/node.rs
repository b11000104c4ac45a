//! The node service and its broker over a pretended kernel, with an agent that does what the test says.

use crate::common::{Agent, Driver, LIMIT, capability, context, hello, obliging, until, waiting};
use link::broker::{AgentAnswer, AgentRequest, BrokerAnswer, BrokerRequest, Hello, MountId};
use link::{Refusal, RefusalKind};
use mounts::{Fake, FakeState, MountSource};
use proto::csi::v1::volume_capability::access_mode::Mode;
use proto::csi::v1::*;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn publish_and_unpublish_can_be_repeated_and_leave_nothing() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let (send, inits) = mpsc::channel();
    agent.behave(move |request, fds| {
        if let AgentRequest::Publish(publish) = request {
            send.send(publish.init.clone()).unwrap();
        }
        obliging(request, fds)
    });
    let mut node = driver.node();
    for _ in 0..2 {
        node.node_publish_volume(driver.publish("v", "a")).await.unwrap();
    }
    assert_eq!(inits.try_iter().collect::<Vec<_>>(), [Fake::init()]);
    assert_eq!(driver.mounts(), 2);
    {
        let state = driver.kernel.state();
        assert_eq!(state.init_replies, [vec![7; 80]]);
        assert_eq!(state.read_ahead_kb.values().copied().collect::<Vec<_>>(), [4096]);
    }
    assert_eq!((agent.saw("Publish"), agent.saw("Start")), (1, 1));

    let other = NodePublishVolumeRequest {
        volume_context: context(&[("source", "s3://bucket/other")]),
        ..driver.publish("v", "a")
    };
    // Any other code on a republish makes older kubelets delete the pod's directory.
    let status = node.node_publish_volume(other).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("other parameters"), "{}", status.message());
    // Secrets and what Kubernetes adds make no other volume.
    let mut rotated = driver.publish("v", "a");
    rotated.secrets = context(&[("accessKeyId", "a"), ("secretAccessKey", "b")]);
    rotated.volume_context.insert("csi.storage.k8s.io/pod.name".into(), "p".into());
    rotated.volume_context.insert("storage.kubernetes.io/csiProvisionerIdentity".into(), "x".into());
    node.node_publish_volume(rotated).await.unwrap();

    for _ in 0..2 {
        node.node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    }
    assert_eq!(driver.mounts(), 0);
    assert_eq!(agent.saw("Unpublish"), 1);
    assert!(!driver.target("a").exists());
    assert_eq!(driver.kernel.state().aborted.len(), 1);
    let _ = driver.stop().await;
}

/// The kernel reads ahead into memory of the node, whatever an agent names.
#[tokio::test(flavor = "multi_thread")]
async fn no_agent_has_more_read_ahead_than_64_mib() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    agent.behave(|request, fds| {
        let mut answer = obliging(request, fds);
        if let Some(Ok((AgentAnswer::Prepared { read_ahead_kb, .. }, _))) = &mut answer {
            *read_ahead_kb = u32::MAX;
        }
        answer
    });
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    assert_eq!(driver.kernel.state().read_ahead_kb.values().copied().collect::<Vec<_>>(), [64 << 10]);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_agent_the_message_names_the_node() {
    let driver = Driver::start().await;
    let status = driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("the node agent is not running"), "{}", status.message());
    assert!(status.message().contains("node-1"), "{}", status.message());
    assert_eq!(driver.mounts(), 0);
    assert!(!driver.target("a").exists());
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_failure_of_a_publish_leaves_a_mount() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let mut node = driver.node();
    for call in ["open_device", "mount", "read_init", "write_init_reply", "probe"] {
        driver.kernel.state().fail = Some(call);
        let status = node.node_publish_volume(driver.publish("v", "a")).await.unwrap_err();
        assert_eq!(driver.mounts(), 0, "{call}: {status:?}");
        assert!(!driver.target("a").exists(), "{call}");
    }
    for probe in [mounts::FakeProbe::Dead, mounts::FakeProbe::TimesOut] {
        driver.kernel.state().probe = Some(probe);
        let status = node.node_publish_volume(driver.publish("v", "a")).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        assert_eq!(driver.mounts(), 0);
    }
    driver.kernel.state().probe = None;
    let codes = [
        (RefusalKind::Invalid, Code::InvalidArgument),
        (RefusalKind::Denied, Code::PermissionDenied),
        (RefusalKind::NotFound, Code::NotFound),
        (RefusalKind::Unavailable, Code::Unavailable),
        (RefusalKind::Internal, Code::Internal),
    ];
    for (kind, code) in codes {
        agent.behave(move |request, fds| match request {
            AgentRequest::Publish(_) => Some(Err(Refusal::new(kind, "bucket says no"))),
            _ => obliging(request, fds),
        });
        let status = node.node_publish_volume(driver.publish("v", "a")).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (code, "bucket says no"));
        assert_eq!(driver.mounts(), 0);
    }
    // An existing directory of the caller's stays.
    std::fs::create_dir(driver.target("a")).unwrap();
    node.node_publish_volume(driver.publish("v", "a")).await.unwrap_err();
    assert!(driver.target("a").exists());
    agent.behave(obliging);
    node.node_publish_volume(driver.publish("v", "a")).await.unwrap();
    let _ = driver.stop().await;
}

/// What lies at a target is distinguished from what is asked for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_request_for_the_guard_of_another_volume_is_wrong_and_not_unavailable() {
    let driver = Driver::start().await;
    let other = MountSource { volume: "other".into(), digest: "d".into() };
    driver.kernel.leave_mount(&driver.target("a"), &other);
    driver.kernel.state().unmount_top(&driver.target("a"));
    for (volume, code) in [("v", Code::InvalidArgument), ("other", Code::Unavailable)] {
        let mut request = driver.publish(volume, "a");
        request.volume_context.insert("no-such-parameter".into(), "x".into());
        let status = driver.node().node_publish_volume(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{volume}: {status}");
    }
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_does_not_answer_is_unavailable_in_time_and_busy_meanwhile() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    agent.behave(waiting);
    let started = Instant::now();
    let (mut first, request) = (driver.node(), driver.publish("v", "a"));
    let waiting = tokio::spawn(async move { first.node_publish_volume(request).await });
    until("the agent is asked", || agent.saw("Publish") == 1).await;
    let busy = driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap_err();
    assert_eq!(busy.code(), Code::Aborted);
    let status = waiting.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("s3://bucket/data/ was not ready within 1s"), "{}", status.message());
    assert!(started.elapsed() < LIMIT);
    assert_eq!(driver.mounts(), 0);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_reboot_the_targets_of_the_boot_before_are_gone_and_unpublish_works() {
    let driver = Driver::start().await;
    let _agent = driver.agent();
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    let (dir, kernel) = driver.stop().await;
    // The machine went down: no mounts any more, the directory and the record are of another boot.
    kernel.state().table.clear();
    for entry in std::fs::read_dir(dir.path().join("state/targets")).unwrap() {
        let path = entry.unwrap().path();
        let mut record: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        record["boot"] = "earlier".into();
        std::fs::write(path, record.to_string()).unwrap();
    }
    let driver = Driver::start_over(dir, kernel).await;
    assert!(!driver.target("a").exists());
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    let _agent = driver.agent();
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    assert_eq!(driver.mounts(), 2);
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!(std::fs::read_dir(driver.dir.path().join("state/targets")).unwrap().count(), 0);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_writer_volume_has_one_target() {
    let driver = Driver::start().await;
    let _agent = driver.agent();
    let mut node = driver.node();
    let single = |target: &str| NodePublishVolumeRequest {
        volume_capability: Some(capability(Mode::SingleNodeSingleWriter)),
        ..driver.publish("v", target)
    };
    node.node_publish_volume(single("a")).await.unwrap();
    // What kubelet binds for a container with a subPath is no second target.
    let part = |state: &mut FakeState, at| {
        let mut entry = state.table.last().unwrap().clone();
        (entry.mount_point, entry.root) = (at, "/sub".into());
        state.table.push(entry);
    };
    part(&mut driver.kernel.state(), driver.target("volume-subpaths"));
    node.node_publish_volume(single("a")).await.unwrap();
    assert_eq!(node.node_publish_volume(single("b")).await.unwrap_err().code(), Code::FailedPrecondition);
    node.node_publish_volume(driver.publish("v", "c")).await.unwrap();
    let wrong = node.node_unpublish_volume(driver.unpublish("w", "c")).await.unwrap_err();
    assert_eq!(wrong.code(), Code::FailedPrecondition);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_agent_is_gone_for_heal_timeout_the_mount_ends_and_can_be_replaced() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let mut node = driver.node();
    node.node_publish_volume(driver.publish("v", "a")).await.unwrap();
    agent.die();
    assert_eq!(first_refusal(&driver, &driver.publish("v", "a")).await, Code::Unavailable);
    until("the connection is aborted", || driver.kernel.state().aborted.len() == 1).await;
    assert_eq!(driver.mounts(), 2, "the dead mount stays visible");

    let again = driver.agent();
    node.node_publish_volume(driver.publish("v", "a")).await.unwrap();
    assert_eq!(driver.mounts(), 2);
    assert_eq!(again.saw("Publish"), 1);

    again.die();
    until("the second is aborted", || driver.kernel.state().aborted.len() == 2).await;
    node.node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!(driver.mounts(), 0);
    assert!(!driver.target("a").exists());
    let _ = driver.stop().await;
}

/// Publishes until the broker has noticed that the agent is gone.
async fn first_refusal(driver: &Driver, request: &NodePublishVolumeRequest) -> Code {
    let deadline = Instant::now() + LIMIT;
    loop {
        assert!(Instant::now() < deadline, "never refused");
        if let Err(status) = driver.node().node_publish_volume(request.clone()).await {
            return status.code();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_reconnects_keeps_its_mounts() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let mut node = driver.node();
    let mut request = driver.publish("v", "a");
    request.volume_context.insert("healTimeout".into(), "1h".into());
    node.node_publish_volume(request.clone()).await.unwrap();
    agent.die();
    assert_eq!(first_refusal(&driver, &request).await, Code::Unavailable);
    let again = driver.agent();
    // It is greeted before its mounts are its own again: until then a publish is refused, and repeated.
    let deadline = Instant::now() + LIMIT;
    while let Err(status) = node.node_publish_volume(request.clone()).await {
        assert!(status.code() == Code::Unavailable && Instant::now() < deadline, "{status}");
    }
    assert_eq!(again.saw("Publish"), 0);
    assert!(driver.kernel.state().aborted.is_empty());
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_mounts_are_known_from_the_mount_table() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let request = driver.publish("v", "a");
    driver.node().node_publish_volume(request.clone()).await.unwrap();
    drop(agent);
    let (dir, kernel) = driver.stop().await;
    assert_eq!(kernel.state().table.len(), 2);

    let driver = Driver::start_over(dir, kernel).await;
    let mut node = driver.node();
    node.node_publish_volume(request.clone()).await.unwrap();
    assert_eq!(driver.mounts(), 2);
    let other = NodePublishVolumeRequest {
        volume_context: context(&[("source", "s3://bucket/other")]),
        ..request.clone()
    };
    assert_eq!(node.node_publish_volume(other).await.unwrap_err().code(), Code::Unavailable);

    // All holders of its device have died: mounted anew, once there is an agent.
    driver.kernel.state().kill_all_holders();
    assert_eq!(node.node_publish_volume(request.clone()).await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(driver.mounts(), 2);
    let agent = driver.agent();
    // The broker makes it anew by itself, too, and a republish meanwhile has to come again.
    let deadline = Instant::now() + LIMIT;
    while let Err(status) = node.node_publish_volume(request.clone()).await {
        assert!(status.code() == Code::Aborted && Instant::now() < deadline, "{status}");
    }
    assert_eq!((driver.mounts(), agent.saw("Publish")), (2, 1));
    let (dir, kernel) = driver.stop().await;

    let driver = Driver::start_over(dir, kernel).await;
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!(driver.mounts(), 0);
    assert!(!driver.target("a").exists());
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_and_leftovers_at_the_target_are_told_apart() {
    let driver = Driver::start().await;
    let _agent = driver.agent();
    let mut node = driver.node();
    let source = MountSource { volume: "v".into(), digest: "old".into() };
    // Only the guard is left of a mount that vanished.
    std::fs::create_dir(driver.target("guard")).unwrap();
    driver.kernel.leave_mount(&driver.target("guard"), &source);
    driver.kernel.state().table.pop();
    node.node_publish_volume(driver.publish("v", "guard")).await.unwrap();
    assert_eq!(driver.mounts(), 2);

    let stranger = |state: &mut FakeState, at| {
        let mut entry = state.table[0].clone();
        (entry.mount_point, entry.source, entry.id) = (at, "stranger".into(), 1);
        state.table.push(entry);
    };
    stranger(&mut driver.kernel.state(), driver.target("foreign"));
    let status = node.node_publish_volume(driver.publish("v", "foreign")).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stats_come_from_the_agent_and_unknown_volumes_are_not_found() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let mut node = driver.node();
    node.node_publish_volume(driver.publish("v", "a")).await.unwrap();
    let request = |volume: &str, target: &str| NodeGetVolumeStatsRequest {
        volume_id: volume.into(),
        volume_path: driver.target(target).display().to_string(),
        ..Default::default()
    };
    let usage = node.node_get_volume_stats(request("v", "a")).await.unwrap().into_inner().usage;
    assert_eq!(usage.iter().map(|u| u.used).collect::<Vec<_>>(), [4096, 3]);
    for line in usage {
        assert!(line.available > 0 && line.available + line.used == line.total, "{line:?}");
    }
    for (volume, target) in [("w", "a"), ("v", "b"), ("v", "x/y")] {
        let status = node.node_get_volume_stats(request(volume, target)).await.unwrap_err();
        assert_eq!(status.code(), Code::NotFound, "{volume} {target}");
    }
    // What it said last is said until another agent comes.
    drop(agent);
    let end = Instant::now() + LIMIT;
    loop {
        let stats = node.node_get_volume_stats(request("v", "a")).await.unwrap().into_inner();
        assert_eq!(stats.usage.iter().map(|u| u.used).collect::<Vec<_>>(), [4096, 3]);
        if stats.volume_condition.is_some_and(|condition| condition.abnormal) {
            break;
        }
        assert!(Instant::now() < end, "the agent is still there");
    }
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_gets_passthrough_ids_and_the_truth_about_threads() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    let mount = MountId(1);
    let file = tempfile::tempfile().unwrap();
    let open = |agent: &Agent, mount| agent.ask(BrokerRequest::BackingOpen { mount }, &[file.as_fd()]);
    let Ok(BrokerAnswer::Backing { id: first }) = open(&agent, mount) else { panic!() };
    let Ok(BrokerAnswer::Backing { id: second }) = open(&agent, mount) else { panic!() };
    assert!(matches!(open(&agent, MountId(99)), Err(Refusal { kind: RefusalKind::NotFound, .. })));
    assert!(agent.ask(BrokerRequest::BackingOpen { mount }, &[]).is_err());
    agent.ask(BrokerRequest::BackingClose { mount, id: first }, &[]).unwrap();
    assert_eq!(driver.kernel.state().backing_open.iter().copied().collect::<Vec<_>>(), [second]);

    driver.kernel.state().dying.insert(42);
    driver.kernel.state().waiting = 3;
    let dying = agent.ask(BrokerRequest::Dying { tids: vec![41, 42] }, &[]).unwrap();
    assert!(matches!(dying, BrokerAnswer::Dying { tids } if tids == [42]));
    let waiting = agent.ask(BrokerRequest::Waiting { mount }, &[]).unwrap();
    assert!(matches!(waiting, BrokerAnswer::Waiting { count: 3 }));

    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert!(driver.kernel.state().backing_open.is_empty(), "nothing pins the blocks of evicted files");
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_is_looked_through_for_the_agent() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    let look = || agent.ask(BrokerRequest::Probe { mount: MountId(1) }, &[]);
    assert!(matches!(look(), Ok(BrokerAnswer::Probed { serving: true })));
    driver.kernel.state().probe = Some(mounts::FakeProbe::Dead);
    assert!(matches!(look(), Ok(BrokerAnswer::Probed { serving: false })));
    driver.kernel.state().probe = Some(mounts::FakeProbe::TimesOut);
    assert!(matches!(look(), Err(Refusal { kind: RefusalKind::Unavailable, .. })));
    let strange = agent.ask(BrokerRequest::Probe { mount: MountId(99) }, &[]);
    assert!(matches!(strange, Err(Refusal { kind: RefusalKind::NotFound, .. })));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_the_agent_gives_up_is_ended_at_once() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    agent.ask(BrokerRequest::Abort { mount: MountId(1), why: "no worker".into() }, &[]).unwrap();
    assert_eq!(driver.kernel.state().aborted.len(), 1);
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    assert_eq!((driver.mounts(), agent.saw("Publish")), (2, 2));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_successor_is_of_a_neighbouring_version_and_its_place_is_free_when_it_is_gone() {
    let driver = Driver::start().await;
    let socket = driver.dir.path().join("broker.sock");
    let introduce = |hello: Hello| Agent::introduce(&socket, hello);
    let successor = || Hello { successor: true, life: 2, ..hello() };
    let refusal = |hello: Hello| introduce(hello).err().expect("it is refused");

    assert_eq!(refusal(successor()).kind, RefusalKind::Unavailable, "there is no agent to succeed");
    let far = Hello { protocol: hello().protocol + 2, ..hello() };
    assert!(refusal(far).message.contains("in steps"));
    let old = introduce(hello()).unwrap();
    old.behave(|request, fds| match request {
        AgentRequest::Drain => Some(Err(Refusal::new(RefusalKind::Conflict, "I go on"))),
        _ => obliging(request, fds),
    });
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();

    assert!(refusal(Hello { life: 2, ..hello() }).message.contains("stop it first"));
    let far = refusal(Hello { state: hello().state + 2, ..successor() });
    assert_eq!(far.kind, RefusalKind::Conflict, "{far}");
    assert!(far.message.contains("install a version between them first"), "{far}");
    for neighbour in [hello().state - 1, hello().state + 1] {
        let mut next = None;
        until("the place is free", || {
            next = introduce(Hello { state: neighbour, protocol: neighbour, ..successor() }).ok();
            next.is_some()
        })
        .await;
        let next = next.unwrap();
        until("its mount was tried, and it has learnt that nothing comes of it", || {
            next.saw("Prepare") == 1 && next.saw("Dismiss") == 1
        })
        .await;
        assert_eq!((next.saw("Succeed"), next.saw("Adopt")), (0, 0));
    }
    // The one before serves, and is asked.
    assert_eq!((old.saw("Drain"), old.saw("Resume"), old.saw("Depart")), (2, 0, 0));
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!(old.saw("Unpublish"), 1);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_handed_over_before_the_broker_knows_every_mount() {
    let driver = Driver::start().await;
    let socket = driver.dir.path().join("broker.sock");
    let successor = || Agent::introduce(&socket, Hello { successor: true, life: 2, ..hello() });
    let old = Agent::introduce(&socket, hello()).unwrap();
    let shown = Arc::new(AtomicBool::new(false));
    let has_shown = shown.clone();
    old.behave(move |request, fds| match request {
        AgentRequest::Holding if !has_shown.load(Ordering::SeqCst) => {
            Some(Ok((AgentAnswer::Holding { mounts: vec![MountId(77)] }, vec![])))
        }
        AgentRequest::Drain => Some(Err(Refusal::new(RefusalKind::Unavailable, "not yet"))),
        _ => obliging(request, fds),
    });
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();

    let next = successor().unwrap();
    until("it was asked more than once what it holds", || old.saw("Holding") > 2).await;
    assert_eq!((next.saw("Prepare"), old.saw("Drain")), (0, 0));
    shown.store(true, Ordering::SeqCst);
    until("the old one was asked to drain, and did not", || old.saw("Drain") == 1).await;
    until("the new one may try again", || successor().is_ok()).await;
    assert_eq!((next.saw("Prepare"), next.saw("Succeed"), next.saw("Dismiss")), (1, 0, 0));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_handed_over_while_a_publish_is_under_way() {
    let driver = Driver::start().await;
    let socket = driver.dir.path().join("broker.sock");
    let old = Agent::introduce(&socket, hello()).unwrap();
    let started = Arc::new(AtomicBool::new(false));
    let (has_started, (send, drains)) = (started.clone(), mpsc::channel());
    old.behave(move |request, fds| match request {
        AgentRequest::Start { .. } => None,
        AgentRequest::Publish(publish) if publish.spec.volume.id.as_str() == "w" => {
            Some(Err(Refusal::new(RefusalKind::Unavailable, "not now")))
        }
        AgentRequest::Drain => {
            send.send(has_started.load(Ordering::SeqCst)).unwrap();
            obliging(request, fds)
        }
        _ => obliging(request, fds),
    });
    let (mut node, request) = (driver.node(), driver.publish("v", "a"));
    let publishing = tokio::spawn(async move { node.node_publish_volume(request).await });
    until("it is about to be served", || old.saw("Start") == 1).await;

    let next = Agent::introduce(&socket, Hello { successor: true, life: 2, ..hello() }).unwrap();
    let mut refused = 0;
    // More than once: the broker has the time for what it must not do.
    while refused < 20 {
        let status = driver.node().node_publish_volume(driver.publish("w", "b")).await.unwrap_err();
        refused += usize::from(status.message().contains("taking over"));
        assert!(!publishing.is_finished(), "{status}");
    }
    assert!(drains.try_recv().is_err(), "it was asked to drain");
    started.store(true, Ordering::SeqCst);
    old.answer_late();
    publishing.await.unwrap().unwrap();
    until("the new one has taken over", || next.saw("Adopt") == 1).await;
    assert_eq!(drains.recv_timeout(LIMIT), Ok(true));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn passthrough_ids_beyond_what_a_message_can_carry_are_refused_and_all_of_them_reach_the_next_agent() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    let mount = MountId(1);
    let file = tempfile::tempfile().unwrap();
    let mut refused = None;
    for _ in 0..=link::BACKING_IDS_MAX {
        if let Err(refusal) = agent.ask(BrokerRequest::BackingOpen { mount }, &[file.as_fd()]) {
            refused = Some(refusal);
        }
    }
    assert!(refused.is_some_and(|refusal| refusal.message.contains("is the limit")));
    agent.die();
    let (send, given) = mpsc::channel();
    let behave = move |request: &AgentRequest, fds: &[OwnedFd]| {
        if let AgentRequest::Adopt(adopt) = request {
            send.send(adopt.backing.len()).unwrap();
        }
        obliging(request, fds)
    };
    let socket = driver.dir.path().join("broker.sock");
    let mut next = None;
    until("the agent's place is free", || {
        next = Agent::introduce_with(&socket, Hello { life: 2, ..hello() }, behave.clone()).ok();
        next.is_some()
    })
    .await;
    assert_eq!(given.recv_timeout(LIMIT).unwrap(), link::BACKING_IDS_MAX);
    let _ = driver.stop().await;
}
