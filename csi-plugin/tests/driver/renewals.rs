//! All that held a mount have died: it is made anew over a pretended kernel, here and in pretended containers.

use crate::common::api::Api;
use crate::common::{Driver, Setup, context, obliging, until};
use link::broker::{AgentRequest, BrokerAnswer, BrokerRequest, Hold, MountId, Publish, Resume};
use link::worker::Mode;
use link::{Refusal, RefusalKind};
use mounts::{Fake, Ours};
use proto::csi::v1::NodePublishVolumeRequest;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use tonic::Code;

const SECRET: [(&str, &str); 2] = [("accessKeyId", "AKIA"), ("secretAccessKey", "hunter2")];

/// Device number of the one FUSE mount.
fn minor(kernel: &Fake) -> u32 {
    let state = kernel.state();
    let fuse = state.table.iter().find(|e| matches!(e.ours(), Some(Ours::Fuse(_))));
    fuse.unwrap().minor
}

fn guard(kernel: &Fake) -> u64 {
    let state = kernel.state();
    let guard = state.table.iter().find(|e| matches!(e.ours(), Some(Ours::Guard { .. })));
    guard.unwrap().id
}

/// Agent and broker are killed at once; a container has the mount. The next broker runs, without an agent yet.
async fn after_the_death_of_both(
    setup: Setup,
    request: impl Fn(&Driver) -> NodePublishVolumeRequest,
) -> Driver {
    let driver = Driver::with(setup.clone()).await;
    let agent = driver.agent();
    driver.node().node_publish_volume(request(&driver)).await.unwrap();
    // The broker first: it must not live to report that the agent is gone.
    let (dir, kernel) = driver.stop().await;
    drop(agent);
    let container = minor(&kernel);
    kernel.state().elsewhere = vec![container];
    kernel.state().kill_all_holders();
    Driver::with(Setup { dir: Some(dir), kernel: Some(kernel), ..setup }).await
}

/// With the pod that Events are for.
fn of_a_pod(mut request: NodePublishVolumeRequest) -> NodePublishVolumeRequest {
    request.volume_context.extend(context(&[
        ("csi.storage.k8s.io/pod.name", "pod"),
        ("csi.storage.k8s.io/pod.namespace", "team"),
        ("csi.storage.k8s.io/pod.uid", "uid-pod"),
    ]));
    request
}

async fn until_replaced(kernel: &Arc<Fake>, dead: u32) {
    until("the container has the new mount", || {
        let (new, elsewhere) = (minor(kernel), kernel.state().elsewhere.clone());
        new != dead && elsewhere == [new]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_mount_is_made_anew_when_an_agent_comes() {
    let driver = after_the_death_of_both(Setup::default(), |d| d.publish("v", "a")).await;
    let (dead, guard_before) = (minor(&driver.kernel), guard(&driver.kernel));
    let agent = driver.agent();
    until_replaced(&driver.kernel, dead).await;
    assert_eq!((driver.mounts(), guard(&driver.kernel)), (2, guard_before), "the guard never moved");
    // Nothing else is left to be done for a republish.
    driver.node().node_publish_volume(driver.publish("v", "a")).await.unwrap();
    assert_eq!((driver.mounts(), agent.saw("Publish"), agent.saw("Start")), (2, 1, 1));
    driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    assert_eq!(driver.mounts(), 0);
    assert_eq!(std::fs::read_dir(driver.dir.path().join("state/targets")).unwrap().count(), 0);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_whose_secret_is_not_known_waits_for_its_republish() {
    let api = Api::start().await;
    let with_secret =
        |d: &Driver| NodePublishVolumeRequest { secrets: context(&SECRET), ..of_a_pod(d.publish("v", "a")) };
    let setup = Setup { events: Some(api.address.clone()), ..Setup::default() };
    let driver = after_the_death_of_both(setup, with_secret).await;
    let dead = minor(&driver.kernel);
    let agent = driver.agent();
    until("its owner learns it", || api.events("Pod", "MountDegraded").len() == 1).await;
    let message = api.events("Pod", "MountDegraded")[0]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("secret") && message.contains("republish"), "{message}");
    assert_eq!((agent.saw("Publish"), minor(&driver.kernel)), (0, dead));

    driver.node().node_publish_volume(with_secret(&driver)).await.unwrap();
    assert_eq!((driver.mounts(), agent.saw("Publish")), (2, 1));
    until_replaced(&driver.kernel, dead).await;
    until("its owner learns it", || api.events("Pod", "MountRecovered").len() == 1).await;
    assert!(!format!("{:?}", api.state().objects).contains("hunter2"));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_leaves_the_dead_mount_where_it_is_and_is_tried_again() {
    for call in ["open_device", "mount_detached", "read_init", "write_init_reply", "put", "probe"] {
        let driver = after_the_death_of_both(Setup::default(), |d| d.publish("v", "a")).await;
        let (dead, guard_before) = (minor(&driver.kernel), guard(&driver.kernel));
        driver.kernel.state().fail = Some(call);
        let _agent = driver.agent();
        until_replaced(&driver.kernel, dead).await;
        assert_eq!(driver.kernel.state().fail, None, "{call}");
        assert_eq!((driver.mounts(), guard(&driver.kernel)), (2, guard_before), "{call}");
        let _ = driver.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_republish_of_a_dead_mount_that_fails_leaves_it_and_is_unavailable() {
    let driver = after_the_death_of_both(Setup::default(), |d| NodePublishVolumeRequest {
        secrets: context(&SECRET),
        ..d.publish("v", "a")
    })
    .await;
    let dead = minor(&driver.kernel);
    let agent = driver.agent();
    agent.behave(|request, fds| match request {
        AgentRequest::Publish(_) => Some(Err(Refusal::new(RefusalKind::Denied, "bucket says no"))),
        _ => obliging(request, fds),
    });
    let request = NodePublishVolumeRequest { secrets: context(&SECRET), ..driver.publish("v", "a") };
    let status = driver.node().node_publish_volume(request).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "bucket says no"));
    assert_eq!((driver.mounts(), minor(&driver.kernel)), (2, dead));
    let _ = driver.stop().await;
}

/// The records of what is still to be replaced.
fn dead_on_record(dir: &Path) -> Vec<u64> {
    let files = std::fs::read_dir(dir.join("state/targets")).unwrap();
    let record = |file: std::io::Result<std::fs::DirEntry>| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(file.unwrap().path()).unwrap()).unwrap()
    };
    let dead = files.flat_map(|f| record(f)["dead"].as_array().unwrap().clone());
    dead.map(|pair| pair[1].as_u64().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_replaced_is_told_and_left_to_the_next_broker() {
    let api = Api::start().await;
    let setup = Setup { events: Some(api.address.clone()), ..Setup::default() };
    let driver = after_the_death_of_both(setup.clone(), |d| of_a_pod(d.publish("v", "a"))).await;
    let dead = minor(&driver.kernel);
    driver.kernel.state().stuck.insert(dead);
    let agent = driver.agent();
    until("its owner learns it", || api.events("Pod", "MountDegraded").len() == 1).await;
    let message = api.events("Pod", "MountDegraded")[0]["message"].as_str().unwrap().to_owned();
    assert!(message.contains(&format!("{dead} is stuck")) && message.contains("restart"), "{message}");
    let new = minor(&driver.kernel);
    assert_ne!(new, dead, "its own place has the new mount");
    assert_eq!(driver.kernel.state().elsewhere, [dead]);
    assert_eq!(dead_on_record(driver.dir.path()), [u64::from(dead)]);

    // A new broker, to which the living agent shows the mount.
    drop(agent);
    let (dir, kernel) = driver.stop().await;
    kernel.state().stuck.clear();
    let driver = Driver::with(Setup { dir: Some(dir), kernel: Some(kernel), ..setup }).await;
    let agent = driver.agent();
    let recorded = std::fs::read_dir(driver.dir.path().join("state/targets")).unwrap().next().unwrap();
    let record: serde_json::Value =
        serde_json::from_slice(&std::fs::read(recorded.unwrap().path()).unwrap()).unwrap();
    let publish = Publish {
        mount: MountId(1_000_000),
        spec: serde_json::from_value(record["recipe"].clone()).unwrap(),
        secrets: Default::default(),
        init: Vec::new(),
    };
    let resume = Resume::new(Mode::Passthrough, String::new());
    let hold = Hold { publish, resume, backing: Vec::new() };
    let (device, inflight) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let held = agent.ask(BrokerRequest::Hold(Box::new(hold)), &[device.as_fd(), inflight.as_fd()]);
    assert!(matches!(held, Ok(BrokerAnswer::Done)), "{held:?}");
    until("the container has the new mount", || driver.kernel.state().elsewhere == [new]).await;
    assert_eq!(agent.saw("Publish"), 0, "the new mount itself is well");
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_ended_for_want_of_an_agent_is_made_anew_with_the_secret_that_is_known() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let request = NodePublishVolumeRequest { secrets: context(&SECRET), ..driver.publish("v", "a") };
    driver.node().node_publish_volume(request).await.unwrap();
    let dead = minor(&driver.kernel);
    driver.kernel.state().elsewhere = vec![dead];
    agent.die();
    until("healTimeout is over", || driver.kernel.state().aborted.contains(&dead)).await;
    let agent = driver.agent();
    until_replaced(&driver.kernel, dead).await;
    assert_eq!((driver.mounts(), agent.saw("Publish")), (2, 1));
    assert!(agent.seen.lock().unwrap().iter().any(|s| s.starts_with("Publish")));
    let _ = driver.stop().await;
}
