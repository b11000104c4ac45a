//! Connections that another process ends, over a pretended kernel: an abort, `umount -f`, an unmount; beside everything
//! else that happens to a mount. Nothing is compared here: they are noticed by themselves.

use crate::common::api::Api;
use crate::common::{
    Agent, Driver, LIMIT, Setup, capability, context, hello, obliging, source_away, until, waiting,
};
use link::broker::{AgentRequest, BrokerAnswer, BrokerRequest, Hello, Hold, Publish, Report, Resume};
use link::worker::Mode;
use link::{Refusal, RefusalKind};
use mounts::{FUSE_TYPE, FakeState, stack_at};
use proto::csi::v1::volume_capability::access_mode::Mode as AccessMode;
use proto::csi::v1::{NodeGetVolumeStatsRequest, NodePublishVolumeRequest, VolumeCondition};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const SECRET: [(&str, &str); 2] = [("accessKeyId", "AKIA"), ("secretAccessKey", "hunter2")];

/// Of a pod, and no mount's time is over but by what the tests do.
fn published(driver: &Driver) -> NodePublishVolumeRequest {
    let mut request = driver.publish("v", "a");
    request.volume_context.extend(context(&[
        ("healTimeout", "1h"),
        ("csi.storage.k8s.io/pod.name", "pod"),
        ("csi.storage.k8s.io/pod.namespace", "team"),
        ("csi.storage.k8s.io/pod.uid", "uid-pod"),
    ]));
    request
}

async fn with_events() -> (Api, Driver) {
    let api = Api::start().await;
    let driver = Driver::with(Setup { events: Some(api.address.clone()), ..Setup::default() }).await;
    (api, driver)
}

/// Of the FUSE mount that is seen at the target.
fn top(driver: &Driver) -> Option<u32> {
    top_of(&driver.kernel.state(), driver)
}

fn top_of(state: &FakeState, driver: &Driver) -> Option<u32> {
    stack_at(&state.table, &driver.target("a")).last().filter(|e| e.fs_type == FUSE_TYPE).map(|e| e.minor)
}

/// A container has what is mounted now.
fn in_a_container(driver: &Driver) -> u32 {
    let minor = top(driver).unwrap();
    driver.kernel.state().elsewhere = vec![minor];
    minor
}

/// `umount -f`: the connection ends, the mount at the target goes, a container keeps its own, dead.
fn umount_f(driver: &Driver) {
    let mut state = driver.kernel.state();
    let top = stack_at(&state.table, &driver.target("a")).last().map(|e| (e.fs_type == FUSE_TYPE, e.minor));
    if let Some((true, minor)) = top {
        state.aborted.insert(minor);
        state.unmount_top(&driver.target("a"));
    }
}

async fn until_anew(driver: &Driver, dead: u32) {
    until("another one is at the target and in the container", || {
        let new = top(driver);
        new.is_some_and(|new| new != dead && driver.kernel.state().elsewhere == [new])
    })
    .await;
    assert_eq!(driver.mounts(), 2, "guard and mount");
}

fn records(driver: &Driver) -> usize {
    std::fs::read_dir(driver.dir.path().join("state/targets")).unwrap().count()
}

fn messages(api: &Api, reason: &str) -> Vec<String> {
    api.events("Pod", reason).iter().map(|e| e["message"].as_str().unwrap().to_owned()).collect()
}

async fn condition(driver: &Driver) -> VolumeCondition {
    let request = NodeGetVolumeStatsRequest {
        volume_id: "v".into(),
        volume_path: driver.target("a").display().to_string(),
        ..Default::default()
    };
    let answer = driver.node().node_get_volume_stats(request).await.unwrap().into_inner();
    assert_eq!(answer.usage.len(), 2, "kubelet takes an answer without usage for a failure");
    answer.volume_condition.expect("a condition")
}

async fn until_well(driver: &Driver) {
    let end = Instant::now() + LIMIT;
    loop {
        let now = condition(driver).await;
        if !now.abnormal {
            return;
        }
        assert!(Instant::now() < end, "still abnormal: {}", now.message);
    }
}

async fn next_agent(driver: &Driver, life: u64) -> Agent {
    let socket = driver.dir.path().join("broker.sock");
    let mut next = None;
    until("the agent's place is free", || {
        next = Agent::introduce_with(&socket, Hello { life, ..hello() }, obliging).ok();
        next.is_some()
    })
    .await;
    next.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abort_is_noticed_told_once_and_made_anew() {
    let (api, driver) = with_events().await;
    let agent = driver.agent();
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    let dead = in_a_container(&driver);
    assert!(!condition(&driver).await.abnormal);
    driver.kernel.state().aborted.insert(dead);
    until_anew(&driver, dead).await;
    until("both are posted", || {
        messages(&api, "MountFailed").len() == 1 && messages(&api, "MountRecovered").len() == 1
    })
    .await;
    assert!(
        messages(&api, "MountFailed")[0]
            .contains("a process on node node-1 that is not Millpond's has ended its mount")
    );
    assert!(messages(&api, "MountRecovered")[0].contains("another process had ended was made anew"));
    assert_eq!((api.events("Pod", "MountFailed")[0]["count"].as_u64(), agent.saw("Publish")), (Some(1), 2));
    until_well(&driver).await;
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!((driver.mounts(), records(&driver)), (0, 0));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forced_unmount_is_made_anew_on_the_guard_and_in_the_container() {
    let (api, driver) = with_events().await;
    let agent = driver.agent();
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    for round in 1..4 {
        let dead = in_a_container(&driver);
        umount_f(&driver);
        until_anew(&driver, dead).await;
        assert_eq!(agent.saw("Publish"), 1 + round);
    }
    until("it is posted", || messages(&api, "MountRecovered").len() == 1).await;
    // As published, for every caller.
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    assert_eq!(agent.saw("Publish"), 4);
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!((driver.mounts(), records(&driver)), (0, 0));
    let _ = driver.stop().await;
}

/// A pod that is being deleted: its containers are gone, kubelet has not come to the volume yet, and another process
/// unmounts.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_unmounted_and_in_no_container_is_not_made_anew() {
    for guard_goes_too in [false, true] {
        let (api, driver) = with_events().await;
        let agent = driver.agent();
        driver.node().node_publish_volume(published(&driver)).await.unwrap();
        umount_f(&driver);
        if guard_goes_too {
            driver.kernel.state().table.clear();
        }
        until("it is forgotten", || records(&driver) == 0).await;
        until("and posted", || messages(&api, "MountFailed").len() == 1).await;
        assert!(messages(&api, "MountFailed")[0].contains("no container has it any more"));
        // Neither another agent nor anything else brings it back.
        drop(agent);
        let agent = next_agent(&driver, 2).await;
        driver.node().node_publish_volume(driver.publish("w", "b")).await.unwrap();
        driver.node().node_unpublish_volume(driver.unpublish("w", "b")).await.unwrap();
        assert_eq!((agent.saw("Publish"), agent.saw("Adopt"), top(&driver)), (1, 0, None));
        driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
        assert_eq!((driver.mounts(), driver.target("a").exists()), (0, false));
        assert!(messages(&api, "MountRecovered").is_empty());
        let _ = driver.stop().await;
    }
}

/// Each target counts for itself, wherever else the volume is mounted.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_no_container_is_told_so_while_the_same_volume_is_mounted_elsewhere() {
    let (api, driver) = with_events().await;
    let agent = driver.agent();
    let reader = |target: &str| NodePublishVolumeRequest {
        volume_capability: Some(capability(AccessMode::MultiNodeReaderOnly)),
        target_path: driver.target(target).display().to_string(),
        ..published(&driver)
    };
    for target in ["a", "b"] {
        driver.node().node_publish_volume(reader(target)).await.unwrap();
    }
    umount_f(&driver);
    until("one is forgotten", || records(&driver) == 1).await;
    until("and posted", || messages(&api, "MountFailed").len() == 1).await;
    assert!(messages(&api, "MountFailed")[0].contains("no container has it any more"));
    assert_eq!((agent.saw("Publish"), top(&driver), driver.mounts()), (2, None, 3));
    let _ = driver.stop().await;
}

/// Guard and mount were taken away: that is how a pod's directory is cleaned, whatever its containers still do.
#[tokio::test(flavor = "multi_thread")]
async fn where_the_guard_is_gone_nothing_is_made_anew() {
    let (api, driver) = with_events().await;
    let agent = driver.agent();
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    in_a_container(&driver);
    umount_f(&driver);
    driver.kernel.state().table.clear();
    until("the reason is posted", || messages(&api, "MountDegraded").len() == 1).await;
    assert!(messages(&api, "MountDegraded")[0].contains("has taken everything from its target"));
    assert_eq!((agent.saw("Publish"), driver.mounts()), (1, 0));
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!((driver.mounts(), records(&driver)), (0, 0));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_republish_of_what_has_just_been_ended_makes_it_anew() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    for forced in [false, true] {
        driver.node().node_publish_volume(published(&driver)).await.unwrap();
        let dead = in_a_container(&driver);
        match forced {
            true => umount_f(&driver),
            false => assert!(driver.kernel.state().aborted.insert(dead)),
        }
        driver.node().node_publish_volume(published(&driver)).await.unwrap();
        assert!(top(&driver).is_some_and(|new| new != dead), "OK, and it is dead: {dead}");
        until_anew(&driver, dead).await;
    }
    assert_eq!(agent.saw("Publish"), 3);
    let _ = driver.stop().await;
}

/// Unmounted at the target, alive in a container: nothing is ended there, until kubelet asks for the target again.
#[tokio::test(flavor = "multi_thread")]
async fn a_republish_of_what_lives_in_a_container_only_gives_the_container_the_new_one() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    let old = in_a_container(&driver);
    driver.kernel.state().unmount_top(&driver.target("a"));
    let unmounted = condition(&driver).await;
    assert!(
        unmounted.abnormal && unmounted.message.contains("a process that is not Millpond's has unmounted it"),
        "{unmounted:?}"
    );
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    until_anew(&driver, old).await;
    assert!(driver.kernel.state().aborted.contains(&old) && agent.saw("Publish") == 2);
    let _ = driver.stop().await;
}

/// The container goes on reading what it has until there is another one for it.
#[tokio::test(flavor = "multi_thread")]
async fn what_lives_in_a_container_only_is_not_ended_by_a_republish_that_fails() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    let old = in_a_container(&driver);
    driver.kernel.state().unmount_top(&driver.target("a"));
    agent.behave(|request, fds| match request {
        AgentRequest::Publish(_) => Some(Err(Refusal::new(RefusalKind::Unavailable, "no worker comes up"))),
        _ => obliging(request, fds),
    });
    let status = driver.node().node_publish_volume(published(&driver)).await.unwrap_err();
    assert_eq!(status.message(), "no worker comes up");
    assert!(!driver.kernel.state().aborted.contains(&old), "its readers get ENOTCONN");
    agent.behave(obliging);
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    until_anew(&driver, old).await;
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_said_to_serve_what_has_ended() {
    let (api, driver) = with_events().await;
    let agent = driver.agent();
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    let dead = in_a_container(&driver);
    // The agent goes at the same moment, and the next one takes over what there is.
    driver.kernel.state().aborted.insert(dead);
    drop(agent);
    let agent = next_agent(&driver, 2).await;
    until_anew(&driver, dead).await;
    until("it is posted", || !messages(&api, "MountRecovered").is_empty()).await;
    let of_the_dead = |message: &String| message.contains("is served again");
    assert!(
        !messages(&api, "MountRecovered").iter().any(of_the_dead),
        "{:?}",
        messages(&api, "MountRecovered")
    );
    assert_eq!((agent.saw("Adopt"), agent.saw("Publish")), (0, 1));

    // And what its agent says of it afterwards is old.
    let dead = in_a_container(&driver);
    let id = link::broker::MountId(2);
    driver.kernel.state().aborted.insert(dead);
    for report in [Report::Recovered, Report::Healed { cause: "signal".into(), took_us: 1 }] {
        let _ = agent.ask(BrokerRequest::Report { mount: id, report }, &[]); // it may be let go of already
    }
    until_anew(&driver, dead).await;
    until("it is posted", || api.events("Pod", "MountRecovered")[0]["count"].as_u64() == Some(2)).await;
    assert!(messages(&api, "MountHealed").is_empty());
    assert!(
        !messages(&api, "MountRecovered").iter().any(of_the_dead),
        "{:?}",
        messages(&api, "MountRecovered")
    );
    let _ = driver.stop().await;
}

/// Everything of the message but its INIT, and the device.
fn watch_publishes(agent: &Agent) -> mpsc::Receiver<(serde_json::Value, OwnedFd)> {
    let (send, receive) = mpsc::channel();
    agent.behave(move |request, fds| {
        if let AgentRequest::Publish(publish) = request {
            let _ = send.send((serde_json::to_value(publish).unwrap(), fds[0].try_clone().unwrap()));
        }
        obliging(request, fds)
    });
    receive
}

/// The agent alone knows its secret by now.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_ended_while_there_is_no_broker_is_made_anew_with_the_secret_that_its_agent_shows() {
    // Before its agent shows it, and while it does.
    for meanwhile in [false, true] {
        let driver = Driver::start().await;
        let agent = driver.agent();
        let receive = watch_publishes(&agent);
        let request = NodePublishVolumeRequest { secrets: context(&SECRET), ..published(&driver) };
        driver.node().node_publish_volume(request).await.unwrap();
        let (publish, device) = receive.recv_timeout(LIMIT).unwrap();
        let dead = in_a_container(&driver);
        drop(agent);
        let (dir, kernel) = driver.stop().await;
        match meanwhile {
            true => kernel.state().ends_in = Some(("control", dead)),
            false => assert!(kernel.state().aborted.insert(dead)),
        }
        let driver = Driver::start_over(dir, kernel).await;
        let agent = driver.agent();
        let receive = watch_publishes(&agent);
        let hold = Hold {
            publish: serde_json::from_value::<Publish>(publish).unwrap(),
            resume: Resume::new(Mode::Passthrough, "0".repeat(32)),
            backing: Vec::new(),
        };
        let shared = tempfile::tempfile().unwrap();
        let held = agent.ask(BrokerRequest::Hold(Box::new(hold)), &[device.as_fd(), shared.as_fd()]);
        assert!(held.is_err(), "it has ended: {held:?}");
        until_anew(&driver, dead).await;
        let (publish, _) = receive.recv_timeout(LIMIT).unwrap();
        assert_eq!(publish["secrets"]["secretAccessKey"], "hunter2");
        until("it lets go of the dead one when it was shown, and when it was replaced", || {
            agent.saw("Unpublish") == 2
        })
        .await;
        let _ = driver.stop().await;
    }
}

/// The next one finds the guard alone, and a container that has the dead mount: with the republish it gets the new one.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_unmounted_while_there_is_no_broker_is_made_anew_in_its_container_by_the_next_republish() {
    let mut driver = Driver::start().await;
    let mut agent = Some(driver.agent());
    let request =
        |driver: &Driver| NodePublishVolumeRequest { secrets: context(&SECRET), ..published(driver) };
    driver.node().node_publish_volume(request(&driver)).await.unwrap();
    // First of a mount as it was published, then of one that was made anew.
    for life in 2..4 {
        let dead = in_a_container(&driver);
        drop(agent.take());
        let (dir, kernel) = driver.stop().await;
        driver = Driver::start_over(dir, kernel).await;
        umount_f(&driver);
        agent = Some(next_agent(&driver, life).await);
        driver.node().node_publish_volume(request(&driver)).await.unwrap();
        until_anew(&driver, dead).await;
    }
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!((driver.mounts(), records(&driver)), (0, 0));
    let _ = driver.stop().await;
}

/// Another process ends the new mount, too, before it serves: what is known of the first is still known.
#[tokio::test(flavor = "multi_thread")]
async fn what_ends_while_it_is_made_anew_is_made_anew_again_with_its_secret() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let request = NodePublishVolumeRequest { secrets: context(&SECRET), ..published(&driver) };
    driver.node().node_publish_volume(request).await.unwrap();
    let dead = in_a_container(&driver);
    let kernel = driver.kernel.clone();
    agent.behave(move |request, fds| {
        let mut state = kernel.state();
        match request {
            // It is at its target when it is looked through.
            AgentRequest::Start { mount } if mount.0 == 2 => {
                let newest = state.newest();
                state.aborted.insert(newest);
            }
            _ => {}
        }
        drop(state);
        obliging(request, fds)
    });
    driver.kernel.state().aborted.insert(dead);
    until_anew(&driver, dead).await;
    until("the one that lives is there", || {
        let state = driver.kernel.state();
        top_of(&state, &driver).is_some_and(|minor| !state.aborted.contains(&minor))
    })
    .await;
    until_well(&driver).await;
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_condition_of_a_volume_is_what_its_events_say() {
    let (api, driver) = with_events().await;
    let agent = driver.agent();
    let request = NodePublishVolumeRequest { secrets: context(&SECRET), ..published(&driver) };
    driver.node().node_publish_volume(request.clone()).await.unwrap();
    let well = condition(&driver).await;
    assert!(!well.abnormal && well.message == "the mount is served", "{well:?}");
    // Its source is away, and comes back.
    let id = link::broker::MountId(1);
    let tell = |report: Report| agent.ask(BrokerRequest::Report { mount: id, report }, &[]).unwrap();
    assert!(matches!(tell(Report::SourceAway { why: "503".into(), stale: false }), BrokerAnswer::Done));
    agent.behave(source_away);
    let away = condition(&driver).await;
    until("it is posted in the same words", || messages(&api, "MountDegraded") == [away.message.clone()])
        .await;
    assert!(away.abnormal && away.message.contains("its source does not answer (503)"), "{away:?}");
    agent.behave(obliging);
    assert!(!condition(&driver).await.abnormal);

    // No worker serves it.
    drop(agent);
    until("it is posted", || messages(&api, "MountDegraded").iter().any(|m| m.contains("no worker serves")))
        .await;
    let orphaned = condition(&driver).await;
    assert!(orphaned.abnormal && orphaned.message.contains("no worker serves the mount"), "{orphaned:?}");

    // Another process ends it, and no agent is there to make it anew.
    let dead = in_a_container(&driver);
    umount_f(&driver);
    let ended = condition(&driver).await;
    assert!(
        ended.abnormal && ended.message.contains("a process on node node-1 that is not Millpond's"),
        "{ended:?}"
    );
    until("it is posted in the same words", || messages(&api, "MountFailed") == [ended.message.clone()])
        .await;
    let _agent = next_agent(&driver, 2).await;
    until_anew(&driver, dead).await;
    until_well(&driver).await;

    // Another broker, to which no agent shows anything, and a dead mount whose secret is on no disk.
    let (dir, kernel) = driver.stop().await;
    kernel.state().kill_all_holders();
    let driver = Driver::start_over(dir, kernel).await;
    let dead = condition(&driver).await;
    assert!(dead.abnormal && dead.message.contains("the mount is dead"), "{dead:?}");
    let _agent = driver.agent();
    let end = Instant::now() + LIMIT;
    while !condition(&driver).await.message.contains("no process of this node knows its secret") {
        assert!(Instant::now() < end, "{:?}", condition(&driver).await);
    }
    driver.node().node_publish_volume(request).await.unwrap();
    assert!(!condition(&driver).await.abnormal);
    let _ = driver.stop().await;
}

/// `fs.fuse.max_request_timeout`: what would end the mount again and again is posted, and our own waits end before it.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_timeout_of_the_kernel_is_told_once_and_shortens_the_wait_for_an_agent() {
    let (api, driver) = with_events().await;
    let agent = driver.agent();
    driver.kernel.state().sysctl.insert("max_request_timeout", "1\n".into());
    for _ in 0..3 {
        driver.node().node_publish_volume(published(&driver)).await.unwrap();
    }
    until("it is posted", || messages(&api, "MountDegraded").len() == 1).await;
    let message = messages(&api, "MountDegraded").remove(0);
    assert!(message.contains("takes longer than 15s") && message.contains("after 6s"), "{message}");
    assert_eq!(api.events("Pod", "MountDegraded")[0]["count"].as_u64(), Some(1));
    assert!(!condition(&driver).await.abnormal, "it is served");
    // An hour by its own parameter.
    drop(agent);
    until("it ends before the kernel ends it", || driver.kernel.state().aborted.len() == 1).await;
    let _ = driver.stop().await;

    let (api, driver) = with_events().await;
    let _agent = driver.agent();
    driver.kernel.state().sysctl.insert("max_request_timeout", "65000\n".into());
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert!(messages(&api, "MountDegraded").is_empty(), "it leaves time enough");
    let _ = driver.stop().await;
}

/// The mount is being made anew, and waits for its source: kubelet's unpublish wins at once.
#[tokio::test(flavor = "multi_thread")]
async fn an_unpublish_wins_over_the_mount_that_is_being_made_anew() {
    let endless = Setup { source_wait: Some(Duration::from_secs(3600)), ..Setup::default() };
    let driver = Driver::with(endless).await;
    let agent = driver.agent();
    driver.node().node_publish_volume(published(&driver)).await.unwrap();
    agent.behave(waiting);
    in_a_container(&driver);
    umount_f(&driver);
    until("it is being made anew", || agent.saw("Publish") >= 2).await;
    let begun = Instant::now();
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(3), "B11: {:?}", begun.elapsed());
    assert_eq!((driver.mounts(), records(&driver)), (0, 0));
    // Whatever the agent has got meanwhile, and whatever it answers now, nothing comes of it.
    let asked = agent.saw("Publish");
    agent.behave(obliging);
    agent.answer_late();
    driver.node().node_publish_volume(driver.publish("w", "b")).await.unwrap();
    driver.node().node_unpublish_volume(driver.unpublish("w", "b")).await.unwrap();
    assert_eq!((driver.mounts(), agent.saw("Publish")), (0, asked + 1));
    let _ = driver.stop().await;
}

/// Whatever comes when: afterwards the mount lives where it is published, and is nowhere where it is not.
#[tokio::test(flavor = "multi_thread")]
async fn no_order_of_ends_publishes_agents_and_brokers_leaves_anything_dead_or_behind() {
    let given = std::env::var("MILLPOND_SEED").ok();
    let seed = given.map_or_else(rand_seed, |text| text.parse().expect("MILLPOND_SEED is a number"));
    println!("MILLPOND_SEED={seed}");
    let mut random = seed | 1;
    let mut next = |n: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % n
    };
    for round in 0..12 {
        let mut driver = Driver::start().await;
        let mut life = 1;
        let mut agent = Some(driver.agent());
        let (mut story, mut calls) = (Vec::new(), Vec::new());
        driver.node().node_publish_volume(published(&driver)).await.unwrap();
        for _ in 0..8 {
            let step = next(8);
            story.push(step);
            match step {
                // Another process ends it, in one way or another, while a container has it or none.
                0..=2 => {
                    if let Some(minor) = top(&driver) {
                        driver.kernel.state().elsewhere = if next(3) > 0 { vec![minor] } else { vec![] };
                        match step {
                            0 => {
                                driver.kernel.state().aborted.insert(minor);
                            }
                            1 => umount_f(&driver),
                            _ => driver.kernel.state().unmount_top(&driver.target("a")),
                        }
                    }
                }
                3 => {
                    let (mut node, request) = (driver.node(), published(&driver));
                    calls.push(tokio::spawn(async move { node.node_publish_volume(request).await.is_ok() }));
                }
                4 => {
                    let (mut node, request) = (driver.node(), driver.unpublish("v", "a"));
                    calls
                        .push(tokio::spawn(async move { node.node_unpublish_volume(request).await.is_ok() }));
                }
                5 => agent = None,
                6 => {
                    drop(agent.take());
                    life += 1;
                    agent = Some(next_agent(&driver, life).await);
                }
                _ => {
                    drop(agent.take());
                    let (dir, kernel) = driver.stop().await;
                    driver = Driver::start_over(dir, kernel).await;
                }
            }
        }
        if agent.is_none() {
            life += 1;
            agent = Some(next_agent(&driver, life).await);
        }
        for call in calls {
            let _ = call.await.unwrap(); // busy, or without an agent: any answer is right
        }
        // And once more, whatever is there by now.
        if let Some(minor) = top(&driver) {
            driver.kernel.state().aborted.insert(minor);
        }
        let at_round = |what: &str| format!("MILLPOND_SEED={seed} round {round}, {story:?}: {what}");
        // Published once more it lives, whatever was there.
        let end = Instant::now() + LIMIT;
        loop {
            let published = driver.node().node_publish_volume(published(&driver)).await;
            let alive = |minor: u32| {
                let state = driver.kernel.state();
                !state.aborted.contains(&minor) && !state.dead.contains(&minor)
            };
            match published {
                Ok(_) if top(&driver).is_some_and(alive) => break,
                other => {
                    assert!(Instant::now() < end, "{}", at_round(&format!("{other:?}, {:?}", top(&driver))))
                }
            }
        }
        assert_eq!(driver.mounts(), 2, "{}", at_round("mounts are stacked"));
        // A container of an end may be left behind by a broker that was stopped meanwhile, never a target.
        while let Err(status) = driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await {
            assert!(Instant::now() < end, "{}", at_round(&format!("{status}")));
        }
        assert_eq!((driver.mounts(), records(&driver)), (0, 0), "{}", at_round("left behind"));
        drop(agent);
        let _agent = next_agent(&driver, life + 1).await;
        driver.node().node_publish_volume(driver.publish("w", "b")).await.unwrap();
        driver.node().node_unpublish_volume(driver.unpublish("w", "b")).await.unwrap();
        assert_eq!(driver.mounts(), 0, "{}", at_round("made anew after its unpublish"));
        let _ = driver.stop().await;
    }
}

fn rand_seed() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64
}
