//! What was written and is not in its store: who is told, and how long an unpublish waits for it.

use crate::common::api::Api;
use crate::common::{Agent, Answer, Driver, Setup, obliging, of_pod, until};
use link::broker::{AgentAnswer, AgentRequest, BrokerRequest, MountId, Report, Resume, Unsent, Usage};
use link::worker::Mode;
use link::{Refusal, RefusalKind};
use proto::csi::v1::{NodeGetVolumeStatsRequest, NodePublishVolumeRequest};
use std::os::fd::OwnedFd;

fn unsent() -> Unsent {
    let why = Some("upload: access denied (403)".to_owned());
    Unsent { files: 2, bytes: 3 << 20, conflicts: 0, oldest_ms: 301_000, path: "models/a".into(), why }
}

fn writable(request: &AgentRequest, fds: &[OwnedFd]) -> Option<Answer> {
    let mut answer = obliging(request, fds)?;
    if let Ok((AgentAnswer::Prepared { resume, .. }, _)) = &mut answer {
        *resume = Resume::new(Mode::Writable, String::new());
    }
    Some(answer)
}

fn publish(driver: &Driver, volume: &str) -> NodePublishVolumeRequest {
    let mut request = driver.publish(volume, volume);
    request.volume_context.extend(of_pod());
    request.volume_context.insert("access".into(), "readWrite".into());
    request
}

/// Of the one Event of this reason on the claim.
fn message(api: &Api, reason: &str) -> String {
    api.events("PersistentVolumeClaim", reason)[0]["message"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_is_told_while_it_waits_and_what_an_unpublish_leaves() {
    let api = Api::start().await;
    let driver = Driver::with(Setup { events: Some(api.address.clone()), ..Setup::default() }).await;
    let mut node = driver.node();
    let agent = driver.agent();
    agent.behave(|request, fds| match request {
        AgentRequest::Usage { .. } => {
            let usage = Usage { unsent: Some(unsent()), ..Usage::default() };
            Some(Ok((AgentAnswer::Usage(usage), vec![])))
        }
        AgentRequest::Upload { limit_ms, .. } => {
            assert!((1_000..=60_000).contains(limit_ms));
            Some(Ok((AgentAnswer::Unsent(unsent()), vec![])))
        }
        request => writable(request, fds),
    });
    node.node_publish_volume(publish(&driver, "v")).await.unwrap();
    let conflict = Unsent { conflicts: 1, ..unsent() };
    for report in [Report::UploadsLate(unsent()), Report::UploadConflict(conflict), Report::UploadsDone] {
        agent.ask(BrokerRequest::Report { mount: MountId(1), report }, &[]).unwrap();
    }
    for (reason, kind) in
        [("UploadsLate", "Warning"), ("UploadConflict", "Warning"), ("UploadsDone", "Normal")]
    {
        until(reason, || api.events("PersistentVolumeClaim", reason).len() == 1).await;
        until(reason, || api.events("Pod", reason).len() == 1).await;
        assert_eq!(api.events("Pod", reason)[0]["type"], kind);
    }
    let late = message(&api, "UploadsLate");
    assert!(
        late.contains("2 files (3.0 MiB)") && late.contains("403") && late.contains("models/a"),
        "{late}"
    );
    assert!(message(&api, "UploadConflict").contains("millpond staging export"));

    let asked = NodeGetVolumeStatsRequest {
        volume_id: "v".into(),
        volume_path: driver.target("v").display().to_string(),
        staging_target_path: String::new(),
    };
    let condition = node.node_get_volume_stats(asked).await.unwrap().into_inner().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message == late, "{condition:?}");

    node.node_unpublish_volume(driver.unpublish("v", "v")).await.unwrap();
    until("what is left", || api.events("PersistentVolumeClaim", "UploadsLeft").len() == 1).await;
    let left = message(&api, "UploadsLeft");
    assert!(left.contains("2 files (3.0 MiB)") && left.contains("millpond staging upload"), "{left}");
    let seen = agent.seen.lock().unwrap().clone();
    let position = |what: &str| seen.iter().position(|request| request.starts_with(what)).unwrap();
    assert!(position("Upload ") < position("Unpublish "), "{seen:?}");
    assert_eq!(driver.mounts(), 0);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_asked_of_a_volume_that_nobody_wrote_to_and_an_agent_before_this_is_no_failure() {
    let driver = Driver::start().await;
    let mut node = driver.node();
    let agent = driver.agent();
    node.node_publish_volume(driver.publish("read", "read")).await.unwrap();
    node.node_unpublish_volume(driver.unpublish("read", "read")).await.unwrap();
    assert_eq!(agent.saw("Upload"), 0);
    agent.behave(|request, fds| match request {
        AgentRequest::Upload { .. } => {
            let why = "the node agent does not understand this message (unknown variant at column 30)";
            Some(Err(Refusal::new(RefusalKind::Internal, why)))
        }
        request => writable(request, fds),
    });
    node.node_publish_volume(publish(&driver, "v")).await.unwrap();
    node.node_unpublish_volume(driver.unpublish("v", "v")).await.unwrap();
    // It is told a second time, by kubelet: nothing is there any more.
    node.node_unpublish_volume(driver.unpublish("v", "v")).await.unwrap();
    assert_eq!((agent.saw("Upload"), driver.mounts()), (1, 0));
    let _ = driver.stop().await;
}

/// Of a store that takes its time.
#[tokio::test(flavor = "multi_thread")]
async fn an_unpublish_that_waits_holds_up_no_other_and_ends_with_its_agent() {
    let driver = Driver::start().await;
    let mut node = driver.node();
    let agent: Agent = driver.agent();
    agent.behave(|request, fds| match request {
        AgentRequest::Upload { mount, .. } if *mount == MountId(1) => None,
        request => writable(request, fds),
    });
    for volume in ["slow", "other"] {
        node.node_publish_volume(publish(&driver, volume)).await.unwrap();
    }
    let (mut waiting, request) = (driver.node(), driver.unpublish("slow", "slow"));
    let slow = tokio::spawn(async move { waiting.node_unpublish_volume(request).await });
    until("it waits", || agent.saw("Upload") == 1).await;
    // Another pod gets the volume meanwhile, and another volume goes.
    let mut again = publish(&driver, "slow");
    again.target_path = driver.target("again").display().to_string();
    node.node_publish_volume(again).await.unwrap();
    node.node_unpublish_volume(driver.unpublish("other", "other")).await.unwrap();
    assert!(!slow.is_finished());
    agent.die();
    slow.await.unwrap().unwrap();
    assert_eq!(agent.saw("Upload"), 2);
    let _ = driver.stop().await;
}
