//! A broker beside agents of other versions, and on mounts that other versions have made.

use crate::common::{Agent, Driver, LIMIT, context, hello, obliging, until, waiting};
use link::broker::{AgentRequest, BrokerAnswer, BrokerRequest, Hello, Hold, Publish, Resume};
use link::worker::Mode;
use link::{Refusal, RefusalKind};
use mounts::FUSE_TYPE;
use proto::csi::v1::NodePublishVolumeRequest;
use serde_json::{Value, json};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::time::Instant;
use tonic::Code;
use volume::WireSpec;

/// Publishes; what the agent was given, and the device.
async fn publish(driver: &Driver, request: &NodePublishVolumeRequest) -> (Agent, Value, OwnedFd) {
    let agent = driver.agent();
    let (send, receive) = mpsc::channel();
    agent.behave(move |request, fds| {
        if let AgentRequest::Publish(publish) = request {
            send.send((serde_json::to_value(publish).unwrap(), fds[0].try_clone().unwrap())).unwrap();
        }
        obliging(request, fds)
    });
    driver.node().node_publish_volume(request.clone()).await.unwrap();
    let (publish, device) = receive.recv_timeout(LIMIT).unwrap();
    (agent, publish, device)
}

/// The broker starts anew, beside mounts that look as if this digest's build had made them.
async fn start_over(driver: Driver, agent: Agent, digest: &str) -> Driver {
    drop(agent);
    let (dir, kernel) = driver.stop().await;
    for entry in kernel.state().table.iter_mut().filter(|entry| entry.fs_type == FUSE_TYPE) {
        entry.source = format!("millpond:v:{digest}");
    }
    Driver::start_over(dir, kernel).await
}

fn show(agent: &Agent, publish: &Value, device: &OwnedFd) -> Result<BrokerAnswer, Refusal> {
    let hold = Hold {
        publish: serde_json::from_value::<Publish>(publish.clone()).unwrap(),
        resume: Resume::new(Mode::Passthrough, "0".repeat(32)),
        backing: Vec::new(),
    };
    let shared = tempfile::tempfile().unwrap();
    agent.ask(BrokerRequest::Hold(Box::new(hold)), &[device.as_fd(), shared.as_fd()])
}

fn elsewhere(request: &NodePublishVolumeRequest) -> NodePublishVolumeRequest {
    let volume_context = context(&[("source", "s3://bucket/other"), ("healTimeout", "1s")]);
    NodePublishVolumeRequest { volume_context, ..request.clone() }
}

/// Digests of before the first release, and of a build to come.
#[tokio::test(flavor = "multi_thread")]
async fn a_mount_with_a_digest_of_another_build_is_held_and_its_republish_is_ok() {
    for digest in ["790f7432a22277c4", "v9-00"] {
        let driver = Driver::start().await;
        let request = driver.publish("v", "a");
        let (agent, mut publish, device) = publish(&driver, &request).await;
        let driver = start_over(driver, agent, digest).await;
        let mut node = driver.node();
        // Before its agent has shown it: by the record of its target.
        node.node_publish_volume(request.clone()).await.unwrap();
        let refused = node.node_publish_volume(elsewhere(&request)).await.unwrap_err();
        assert!(refused.message().contains("with other parameters"), "{refused}");

        // As an agent of before the first release describes it.
        publish["spec"]["source"] = json!({ "s3": { "bucket": "bucket", "prefix": "data/" } });
        publish["spec"]["parameters"] = json!({
            "endpoint": null, "region": null, "addressing": "path", "allowHttp": false,
            "freshness": { "ttl": { "secs": 60, "nanos": 0 } }, "profile": "auto", "readahead": null,
            "cacheLimit": null, "uid": 0, "gid": 0, "fileMode": 292, "dirMode": 365,
            "healTimeout": { "secs": 1, "nanos": 0 }, "storeTimeout": { "secs": 300, "nanos": 0 },
        });
        let agent = driver.agent();
        assert!(matches!(show(&agent, &publish, &device), Ok(BrokerAnswer::Done)), "{digest}");
        node.node_publish_volume(request.clone()).await.unwrap();
        let refused = node.node_publish_volume(elsewhere(&request)).await.unwrap_err();
        assert!(refused.message().contains("with other parameters"), "{refused}");
        assert_eq!((driver.mounts(), agent.saw("Publish")), (2, 0), "it was mounted anew");
        node.node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
        assert_eq!(driver.mounts(), 0);
        let _ = driver.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_record_a_mount_of_another_build_is_taken_for_what_is_wanted() {
    let driver = Driver::start().await;
    let request = driver.publish("v", "a");
    let (agent, _, _device) = publish(&driver, &request).await;
    std::fs::remove_dir_all(driver.dir.path().join("state/targets")).unwrap();
    let driver = start_over(driver, agent, "v9-00").await;
    driver.node().node_publish_volume(request).await.unwrap();
    assert_eq!(driver.mounts(), 2);
    let _ = driver.stop().await;
}

/// What this broker does not know is passed on as it came, and everything that a broker does works.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_only_a_later_version_understands_is_held_and_passed_on_unchanged() {
    let driver = Driver::start().await;
    let request = driver.publish("v", "a");
    let (agent, mut publish, device) = publish(&driver, &request).await;
    publish["spec"] = json!({
        "id": "v", "source": "later://x", "parameters": { "rule": "r", "healTimeout": "3600s" },
        "hints": { "hint": "h" },
    });
    let spec: WireSpec = serde_json::from_value(publish["spec"].clone()).unwrap();
    let driver = start_over(driver, agent, &spec.digest()).await;
    let agent = driver.agent();
    assert!(matches!(show(&agent, &publish, &device), Ok(BrokerAnswer::Done)));
    // Kubelet repeats a publish that this version does not understand.
    let mut later = request.clone();
    later.volume_context.insert("rule".into(), "r".into());
    let status = driver.node().node_publish_volume(later).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");

    // The next agent is given what the one before has shown.
    agent.die();
    let (send, given) = mpsc::channel();
    let behave = move |request: &AgentRequest, fds: &[OwnedFd]| {
        if let AgentRequest::Adopt(adopt) = request {
            send.send(adopt.publish.spec.volume.clone()).unwrap();
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
    assert_eq!(given.recv_timeout(LIMIT).unwrap(), spec);
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!(driver.mounts(), 0);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_of_a_later_version_is_refused_and_the_connection_goes_on() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    for body in
        [r#"{"nextWish":{"x":1}}"#, r#""nextWish""#, r#"{"report":{"mount":1,"report":"nextReport"}}"#]
    {
        let refusal = agent.ask_in_words(body).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Internal);
        assert!(refusal.message.contains("another version"), "{refusal}");
    }
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_a_later_version_fails_its_question_at_once() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    agent.behave(waiting);
    let (mut node, request) = (driver.node(), driver.publish("v", "a"));
    let publishing = tokio::spawn(async move { node.node_publish_volume(request).await });
    until("it is asked", || agent.saw("Publish") == 1).await;
    let answered = Instant::now();
    until("it has been noted", || agent.answer_in_words(r#"{"Ok":{"nextAnswer":{}}}"#) > 0).await;
    let status = publishing.await.unwrap().unwrap_err();
    assert!(status.message().contains("another version"), "{status} after {:?}", answered.elapsed());
    assert_eq!(driver.mounts(), 0);
    let _ = driver.stop().await;
}
