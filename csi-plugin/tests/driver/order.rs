//! Publish, unpublish, adoption and hand-over of one mount in whatever order, and what a comparison finds afterwards.

use crate::common::api::Api;
use crate::common::{Agent, Answer, Driver, LIMIT, Setup, context, hello, obliging, undisturbed, until};
use csi_plugin::config::Pace;
use link::broker::{
    AgentAnswer, AgentRequest, BrokerAnswer, BrokerRequest, Hello, Hold, MountId, Publish, Resume,
};
use link::worker::Mode;
use link::{Refusal, RefusalKind};
use mounts::{FUSE_TYPE, Fake};
use proto::csi::v1::NodePublishVolumeRequest;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// No mount comes to its end in these tests but by what they do.
fn patient(driver: &Driver) -> NodePublishVolumeRequest {
    let mut request = driver.publish("v", "a");
    request.volume_context.insert("healTimeout".into(), "1h".into());
    request
}

fn comparing() -> Setup {
    let pace = Pace { compare_every: Duration::from_millis(20), ..Pace::default() };
    Setup { pace: Some(pace), ..Setup::default() }
}

/// Says that it holds these.
fn holding(ids: &'static [u64]) -> impl FnMut(&AgentRequest, &[OwnedFd]) -> Option<Answer> + Send + 'static {
    move |request, fds| match request {
        AgentRequest::Holding => {
            let mounts = ids.iter().copied().map(MountId).collect();
            Some(Ok((AgentAnswer::Holding { mounts }, vec![])))
        }
        _ => obliging(request, fds),
    }
}

/// Does not answer when it is given a mount, until the test does.
fn late(request: &AgentRequest, fds: &[OwnedFd]) -> Option<Answer> {
    match request {
        AgentRequest::Adopt(_) => None,
        _ => obliging(request, fds),
    }
}

/// The one before is gone, which the broker may not have noted yet.
async fn next_agent(
    driver: &Driver,
    life: u64,
    behave: impl FnMut(&AgentRequest, &[OwnedFd]) -> Option<Answer> + Send + Clone + 'static,
) -> Agent {
    let socket = driver.dir.path().join("broker.sock");
    let mut next = None;
    until("the agent's place is free", || {
        next = Agent::introduce_with(&socket, Hello { life, ..hello() }, behave.clone()).ok();
        next.is_some()
    })
    .await;
    next.unwrap()
}

/// An agent has published, is gone, and the next one has been asked to adopt.
async fn while_adopting(driver: &Driver, request: NodePublishVolumeRequest) -> Agent {
    let old = driver.agent();
    driver.node().node_publish_volume(request).await.unwrap();
    drop(old);
    let new = next_agent(driver, 2, late).await;
    until("it is given the mount", || new.saw("Adopt") == 1).await;
    new
}

/// Has it been compared so often since?
async fn looks(agent: &Agent, count: usize) {
    let before = agent.saw("Holding");
    until("it is compared", || agent.saw("Holding") >= before + count).await;
}

fn fuse_minor(driver: &Driver) -> u32 {
    let state = driver.kernel.state();
    state.table.iter().find(|e| e.fs_type == FUSE_TYPE).unwrap().minor
}

fn records(driver: &Driver) -> usize {
    std::fs::read_dir(driver.dir.path().join("state/targets")).unwrap().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_adopts_what_was_unpublished_meanwhile_is_told_to_let_go() {
    let driver = Driver::start().await;
    let agent = while_adopting(&driver, patient(&driver)).await;
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!((driver.mounts(), agent.saw("Unpublish")), (0, 1));
    agent.answer_late();
    until("it gets the order after its answer, too", || agent.saw("Unpublish") == 2).await;
    // The next one is another mount.
    driver.node().node_publish_volume(patient(&driver)).await.unwrap();
    assert_eq!((driver.mounts(), agent.saw("Publish")), (2, 1));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_does_not_answer_before_its_mount_is_unpublished_is_told_to_let_go() {
    let pace = Pace { adopt_limit: Duration::from_secs(2), ..undisturbed() };
    let driver = Driver::with(Setup { pace: Some(pace), ..Setup::default() }).await;
    let agent = while_adopting(&driver, patient(&driver)).await;
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    until("it gets the order when no caller waits for its answer any more", || agent.saw("Unpublish") == 2)
        .await;
    agent.answer_late();
    assert_eq!(driver.mounts(), 0);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adoption_that_is_done_after_its_time_is_found_and_serves() {
    let pace = Pace { adopt_limit: Duration::from_millis(100), ..comparing().pace.unwrap() };
    let driver = Driver::with(Setup { pace: Some(pace), ..Setup::default() }).await;
    let agent = while_adopting(&driver, patient(&driver)).await;
    let refused = || async { driver.node().node_publish_volume(patient(&driver)).await.is_err() };
    looks(&agent, 3).await;
    assert!(refused().await, "no worker serves it yet");
    agent.answer_late();
    agent.behave(holding(&[1]));
    let end = Instant::now() + LIMIT;
    while refused().await {
        assert!(Instant::now() < end, "the agent holds it, and the broker does not see it");
    }
    assert_eq!((agent.saw("Adopt"), agent.saw("Unpublish")), (1, 0));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_lost_with_its_last_word_serves_nothing() {
    let driver = Driver::start().await;
    let old = driver.agent();
    driver.node().node_publish_volume(patient(&driver)).await.unwrap();
    drop(old);
    for life in 2..22 {
        let agent = next_agent(&driver, life, late).await;
        until("it is given the mount", || agent.saw("Adopt") == 1).await;
        agent.answer_late();
        agent.die();
        let end = Instant::now() + LIMIT;
        while driver.node().node_publish_volume(patient(&driver)).await.is_ok() {
            assert!(Instant::now() < end, "life {life}: no worker serves it, and a publish succeeds");
        }
    }
    let last = next_agent(&driver, 99, obliging).await;
    until("it is given the mount", || last.saw("Adopt") == 1).await;
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_whose_time_is_over_while_it_is_adopted_ends_and_the_agent_lets_go() {
    let driver = Driver::start().await;
    let agent = while_adopting(&driver, driver.publish("v", "a")).await;
    until("its healTimeout is over", || driver.kernel.state().aborted.len() == 1).await;
    assert_eq!(agent.saw("Unpublish"), 0);
    agent.answer_late();
    // Then it is made anew, as any dead mount.
    until("it gets the order, and another is in its place", || agent.saw("Start") == 1).await;
    let seen = agent.seen.lock().unwrap().clone();
    let first = |what: &str| seen.iter().position(|s| s.starts_with(what)).unwrap();
    assert!(first("Unpublish") < first("Publish"), "{seen:?}");
    assert_eq!((driver.mounts(), agent.saw("Adopt")), (2, 1));
    let _ = driver.stop().await;
}

/// What an agent was given with a publish: everything of the message but its INIT, and the device.
fn published(agent: &Agent) -> mpsc::Receiver<(serde_json::Value, OwnedFd)> {
    let (send, receive) = mpsc::channel();
    agent.behave(move |request, fds| {
        if let AgentRequest::Publish(publish) = request {
            send.send((serde_json::to_value(publish).unwrap(), fds[0].try_clone().unwrap())).unwrap();
        }
        obliging(request, fds)
    });
    receive
}

fn show(agent: &Agent, publish: &serde_json::Value, device: &OwnedFd) -> Result<BrokerAnswer, Refusal> {
    let hold = Hold {
        publish: serde_json::from_value::<Publish>(publish.clone()).unwrap(),
        resume: Resume::new(Mode::Passthrough, "0".repeat(32)),
        backing: Vec::new(),
    };
    let shared = tempfile::tempfile().unwrap();
    agent.ask(BrokerRequest::Hold(Box::new(hold)), &[device.as_fd(), shared.as_fd()])
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_shows_what_was_unpublished_is_told_to_let_go() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let receive = published(&agent);
    driver.node().node_publish_volume(patient(&driver)).await.unwrap();
    driver.node().node_publish_volume(driver.publish("w", "b")).await.unwrap();
    let (publish, device) = receive.recv_timeout(LIMIT).unwrap();
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    // Something that does not say by itself that it has ended.
    let other = OwnedFd::from(tempfile::tempfile().unwrap());
    let refusal = show(&agent, &publish, &other).unwrap_err();
    assert_eq!((refusal.kind, agent.saw("Unpublish")), (RefusalKind::NotFound, 2));

    // By a broker that cannot know it.
    let (publish_w, device_w) = receive.recv_timeout(LIMIT).unwrap();
    drop(agent);
    let (dir, kernel) = driver.stop().await;
    let driver = Driver::start_over(dir, kernel).await;
    driver.node().node_unpublish_volume(driver.unpublish("w", "b")).await.unwrap();
    let agent = driver.agent();
    for (publish, device) in [(&publish, &device), (&publish_w, &device_w)] {
        assert_eq!(show(&agent, publish, device).unwrap_err().kind, RefusalKind::NotFound);
    }
    assert_eq!((agent.saw("Unpublish"), driver.mounts()), (2, 0));
    let _ = driver.stop().await;
}

/// A broker has published, and it and its agent are gone: what they leave, what the agent was given, and the device.
async fn left_behind(driver: Driver) -> (Arc<tempfile::TempDir>, Arc<Fake>, serde_json::Value, OwnedFd) {
    let agent = driver.agent();
    let receive = published(&agent);
    driver.node().node_publish_volume(patient(&driver)).await.unwrap();
    let (publish, device) = receive.recv_timeout(LIMIT).unwrap();
    drop(agent);
    let (dir, kernel) = driver.stop().await;
    (dir, kernel, publish, device)
}

/// The next broker counts its requests, ends it through its control, and cuts its waits, as the one that mounted it.
#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_an_agent_shows_is_as_one_that_this_broker_mounted() {
    let driver = Driver::start().await;
    driver.kernel.state().sysctl.insert("max_request_timeout", "1\n".into());
    let (dir, kernel, publish, device) = left_behind(driver).await;
    let driver = Driver::start_over(dir, kernel).await;
    let agent = driver.agent();
    show(&agent, &publish, &device).unwrap();
    driver.kernel.state().waiting = 3;
    let waiting = agent.ask(BrokerRequest::Waiting { mount: MountId(1) }, &[]).unwrap();
    assert!(matches!(waiting, BrokerAnswer::Waiting { count: 3 }));
    // An hour by its own parameter, 6 s by the kernel's limit.
    drop(agent);
    until("it ends before the kernel ends it", || driver.kernel.state().aborted.len() == 1).await;
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!((driver.mounts(), records(&driver)), (0, 0));
    let _ = driver.stop().await;
}

/// Whatever comes first: afterwards the broker has nothing, and the agent has the order.
#[tokio::test(flavor = "multi_thread")]
async fn unpublish_and_the_showing_of_a_mount_come_in_any_order() {
    let (mut dir, mut kernel, publish, device) = left_behind(Driver::start().await).await;
    let left = kernel.state().table.clone();
    for round in 0..20 {
        {
            let mut state = kernel.state();
            state.table = left.clone();
            state.aborted.clear();
            state.unmounted.clear();
        }
        let driver = Driver::start_over(dir, kernel).await;
        std::fs::create_dir_all(driver.target("a")).unwrap();
        let agent = Arc::new(driver.agent());
        let (shower, what, of) = (agent.clone(), publish.clone(), device.try_clone().unwrap());
        let showing = tokio::task::spawn_blocking(move || {
            let _ = show(&shower, &what, &of); // it may be too late
        });
        driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
        showing.await.unwrap();
        assert_eq!(driver.mounts(), 0, "round {round}");
        let shown_again = show(&agent, &publish, &device);
        assert_eq!(shown_again.unwrap_err().kind, RefusalKind::NotFound, "round {round}: it is held");
        assert!(agent.saw("Unpublish") > 0, "round {round}");
        drop(agent);
        (dir, kernel) = driver.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_could_not_be_unmounted_is_served_no_more_and_the_next_call_goes_on() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let mut node = driver.node();
    for then_publish in [false, true] {
        node.node_publish_volume(patient(&driver)).await.unwrap();
        driver.kernel.state().fail = Some("unmount");
        assert!(node.node_unpublish_volume(driver.unpublish("v", "a")).await.is_err());
        assert_eq!(driver.mounts(), 2);
        if then_publish {
            node.node_publish_volume(patient(&driver)).await.unwrap();
            assert_eq!(driver.mounts(), 2);
        }
        // Neither the return of its agent nor a look for dead mounts brings it back.
        let publishes = agent.saw("Publish");
        node.node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
        assert_eq!((driver.mounts(), records(&driver)), (0, 0));
        assert_eq!(agent.saw("Publish"), publishes);
    }
    node.node_publish_volume(patient(&driver)).await.unwrap();
    driver.kernel.state().fail = Some("unmount");
    assert!(node.node_unpublish_volume(driver.unpublish("v", "a")).await.is_err());
    drop(agent);
    let next = next_agent(&driver, 2, obliging).await;
    // It is looked for dead mounts when an agent has come: once it can publish, that has begun.
    node.node_publish_volume(driver.publish("w", "b")).await.unwrap();
    node.node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!((next.saw("Adopt"), next.saw("Publish"), driver.mounts()), (0, 1, 2));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_agent_alone_holds_is_ended() {
    let driver = Driver::with(comparing()).await;
    let agent = driver.agent();
    agent.behave(holding(&[1]));
    driver.node().node_publish_volume(patient(&driver)).await.unwrap();
    looks(&agent, 4).await;
    assert_eq!(agent.saw("Unpublish"), 0);
    // It does not let go when it gets the order.
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    until("it gets the order again", || agent.saw("Unpublish") >= 3).await;
    agent.behave(obliging);
    let before = agent.saw("Unpublish");
    looks(&agent, 2).await;
    assert!(agent.saw("Unpublish") <= before + 1);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_never_shown_may_be_in_use_and_is_not_ended() {
    let driver = Driver::with(comparing()).await;
    let agent = driver.agent();
    agent.behave(holding(&[77]));
    looks(&agent, 6).await;
    assert_eq!(agent.saw("Unpublish"), 0);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_agent_does_not_hold_is_given_to_it_again() {
    let driver = Driver::with(comparing()).await;
    let agent = driver.agent();
    let has_it = Arc::new(AtomicBool::new(false));
    agent.behave(move |request, fds| match request {
        AgentRequest::Adopt(_) => {
            has_it.store(true, Ordering::SeqCst);
            obliging(request, fds)
        }
        AgentRequest::Holding if has_it.load(Ordering::SeqCst) => holding(&[1])(request, fds),
        _ => obliging(request, fds),
    });
    driver.node().node_publish_volume(patient(&driver)).await.unwrap();
    until("it is given the mount", || agent.saw("Adopt") == 1).await;
    looks(&agent, 6).await;
    assert_eq!((agent.saw("Adopt"), agent.saw("Unpublish")), (1, 0));
    driver.node().node_publish_volume(patient(&driver)).await.unwrap();
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_agent_does_not_hold_and_does_not_take_ends_in_time() {
    let driver = Driver::with(comparing()).await;
    let agent = driver.agent();
    agent.behave(|request, fds| match request {
        AgentRequest::Adopt(_) => Some(Err(Refusal::new(RefusalKind::Conflict, "it was given up"))),
        _ => obliging(request, fds),
    });
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    until("its healTimeout is over", || driver.kernel.state().aborted.len() == 1).await;
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_asked_to_stop_still_serves() {
    let driver = Driver::with(comparing()).await;
    let agent = driver.agent();
    agent.behave(holding(&[1]));
    driver.node().node_publish_volume(patient(&driver)).await.unwrap();
    agent.ask(BrokerRequest::Leaving, &[]).unwrap();
    agent.behave(obliging); // it says that it holds nothing
    looks(&agent, 6).await;
    assert_eq!((agent.saw("Adopt"), agent.saw("Unpublish")), (0, 0));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_unmounted_by_somebody_else_is_let_go_of_and_its_owner_is_told() {
    let api = Api::start().await;
    let driver = Driver::with(Setup { events: Some(api.address.clone()), ..comparing() }).await;
    let agent = driver.agent();
    agent.behave(holding(&[1]));
    let mut request = patient(&driver);
    request.volume_context.extend(context(&[
        ("csi.storage.k8s.io/pod.name", "pod"),
        ("csi.storage.k8s.io/pod.namespace", "team"),
        ("csi.storage.k8s.io/pod.uid", "uid-pod"),
    ]));
    driver.node().node_publish_volume(request.clone()).await.unwrap();
    // A container still has it: it lives.
    let minor = fuse_minor(&driver);
    driver.kernel.state().elsewhere = vec![minor];
    driver.kernel.state().unmount_top(&driver.target("a"));
    looks(&agent, 6).await;
    assert_eq!((agent.saw("Unpublish"), driver.kernel.state().aborted.len()), (0, 0));
    // And now no container has it.
    driver.kernel.state().elsewhere.clear();
    until("the agent gets the order", || agent.saw("Unpublish") >= 1).await;
    until("the owner learns it", || api.events("Pod", "MountFailed").len() == 1).await;
    until("its record is gone", || records(&driver) == 0).await;
    assert_eq!(driver.kernel.state().aborted.len(), 0);
    agent.behave(holding(&[2]));
    driver.node().node_publish_volume(request).await.unwrap();
    assert_eq!((driver.mounts(), agent.saw("Publish")), (2, 2));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_has_aborted_is_made_anew() {
    let driver = Driver::with(comparing()).await;
    let agent = driver.agent();
    agent.behave(holding(&[1]));
    driver.node().node_publish_volume(patient(&driver)).await.unwrap();
    let dead = fuse_minor(&driver);
    driver.kernel.state().aborted.insert(dead);
    until("another one is in its place", || fuse_minor(&driver) != dead).await;
    assert_eq!((driver.mounts(), agent.saw("Publish")), (2, 2));
    let _ = driver.stop().await;
}
