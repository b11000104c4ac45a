//! What applications may write to: what volume, claim and pod say decides it, and it stays so.

use crate::common::{Agent, Driver, LIMIT, capability, context, obliging, until};
use link::Access;
use link::broker::{AgentRequest, BrokerAnswer, BrokerRequest, Hold, Publish, Resume};
use link::worker::Mode as ServedMode;
use link::{Refusal, RefusalKind};
use mounts::stack_at;
use proto::csi::v1::volume_capability::{AccessType, MountVolume, access_mode::Mode};
use proto::csi::v1::{NodePublishVolumeRequest, VolumeCapability};
use serde_json::{Value, json};
use std::os::fd::AsFd;
use std::sync::mpsc;
use tonic::Code;

const WRITING: [Mode; 5] = [
    Mode::SingleNodeWriter,
    Mode::SingleNodeSingleWriter,
    Mode::SingleNodeMultiWriter,
    Mode::MultiNodeSingleWriter,
    Mode::MultiNodeMultiWriter,
];
const READING: [Mode; 2] = [Mode::SingleNodeReaderOnly, Mode::MultiNodeReaderOnly];

fn of_writable_class(driver: &Driver, volume: &str, target: &str) -> NodePublishVolumeRequest {
    let mut request = driver.publish(volume, target);
    request.volume_context.insert("access".into(), "readWrite".into());
    request
}

fn read_only(request: NodePublishVolumeRequest) -> NodePublishVolumeRequest {
    NodePublishVolumeRequest { readonly: true, ..request }
}

fn mounted_with(mode: Mode, mount: MountVolume) -> VolumeCapability {
    VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..capability(mode) }
}

/// Device number of what is visible at a target.
fn minor(driver: &Driver, target: &str) -> u32 {
    stack_at(&driver.kernel.state().table, &driver.target(target)).last().unwrap().minor
}

/// Is what is visible at a target mounted without MS_RDONLY?
fn is_writable(driver: &Driver, target: &str) -> bool {
    let minor = minor(driver, target);
    driver.kernel.state().writable.contains(&minor)
}

/// An agent, and what it is asked to serve.
fn listening(driver: &Driver) -> (Agent, mpsc::Receiver<Value>) {
    let agent = driver.agent();
    let (send, receive) = mpsc::channel();
    agent.behave(move |request, fds| {
        if let AgentRequest::Publish(publish) = request {
            send.send(serde_json::to_value(publish).unwrap()).unwrap();
        }
        obliging(request, fds)
    });
    (agent, receive)
}

fn access(publish: &Value) -> Access {
    serde_json::from_value::<Publish>(publish.clone()).unwrap().spec.access
}

fn show(agent: &Agent, publish: &Value) -> Result<BrokerAnswer, Refusal> {
    let hold = Hold {
        publish: serde_json::from_value(publish.clone()).unwrap(),
        resume: Resume::new(ServedMode::Passthrough, "0".repeat(32)),
        backing: Vec::new(),
    };
    let (device, shared) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    agent.ask(BrokerRequest::Hold(Box::new(hold)), &[device.as_fd(), shared.as_fd()])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_is_writable_where_volume_claim_and_pod_agree_and_nowhere_else() {
    let driver = Driver::start().await;
    let (_agent, asked) = listening(&driver);
    let plain = MountVolume::default;
    let flags = |flag: &str| MountVolume { mount_flags: vec![flag.to_owned()], ..plain() };
    let mut cases = vec![
        (true, Mode::MultiNodeMultiWriter, plain(), true, false),
        (true, Mode::SingleNodeWriter, flags("ro"), false, false),
        (true, Mode::SingleNodeWriter, flags("rw"), false, true),
        (false, Mode::SingleNodeWriter, flags("rw"), false, false),
    ];
    for mode in WRITING {
        cases.extend([(true, mode, plain(), false, true), (false, mode, plain(), false, false)]);
    }
    cases.extend(READING.map(|mode| (true, mode, plain(), false, false)));
    for (n, (class, mode, mount, readonly, writable)) in cases.into_iter().enumerate() {
        let (volume, target) = (format!("v{n}"), format!("t{n}"));
        let request = match class {
            true => of_writable_class(&driver, &volume, &target),
            false => driver.publish(&volume, &target),
        };
        let case = format!("class: {class}, {mode:?}, {:?}, readonly: {readonly}", mount.mount_flags);
        let volume_capability = Some(mounted_with(mode, mount));
        let request = NodePublishVolumeRequest { volume_capability, readonly, ..request };
        // The same again is the same mount.
        for _ in 0..2 {
            driver.node().node_publish_volume(request.clone()).await.unwrap();
        }
        let wanted = if writable { Access::ReadWrite } else { Access::ReadOnly };
        assert_eq!(access(&asked.recv_timeout(LIMIT).unwrap()), wanted, "{case}");
        assert_eq!(is_writable(&driver, &target), writable, "{case}");
    }
    assert!(asked.try_recv().is_err());
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_does_not_change_its_access_while_it_lives() {
    let driver = Driver::start().await;
    let _agent = driver.agent();
    let request = of_writable_class(&driver, "v", "a");
    driver.node().node_publish_volume(request.clone()).await.unwrap();
    let status = driver.node().node_publish_volume(read_only(request)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("other parameters"), "{}", status.message());
    assert!(is_writable(&driver, "a"));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_mount_is_made_anew_with_the_access_that_it_had() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let written = of_writable_class(&driver, "v", "written");
    let read = read_only(of_writable_class(&driver, "v", "read"));
    for request in [&written, &read] {
        driver.node().node_publish_volume(request.clone()).await.unwrap();
    }
    // From what the broker holds.
    let before = ["written", "read"].map(|target| minor(&driver, target));
    agent.die();
    until("healTimeout is over", || driver.kernel.state().aborted.len() == 2).await;
    let (agent, asked) = listening(&driver);
    let new = |driver: &Driver, before: [u32; 2]| {
        minor(driver, "written") != before[0] && minor(driver, "read") != before[1]
    };
    until("they are made anew", || new(&driver, before)).await;
    assert!(is_writable(&driver, "written") && !is_writable(&driver, "read"));
    let mut seen: Vec<_> = (0..2).map(|_| access(&asked.recv_timeout(LIMIT).unwrap())).collect();
    seen.sort_by_key(|access| access.is_writable());
    assert_eq!(seen, [Access::ReadOnly, Access::ReadWrite]);

    // And from its records, when every process that held them has died.
    let before = ["written", "read"].map(|target| minor(&driver, target));
    let (dir, kernel) = driver.stop().await;
    drop(agent);
    kernel.state().kill_all_holders();
    let driver = Driver::start_over(dir, kernel).await;
    let _agent = driver.agent();
    until("they are made anew", || new(&driver, before)).await;
    assert!(is_writable(&driver, "written") && !is_writable(&driver, "read"));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_starts_anew_takes_a_mount_back_with_its_access_and_no_agent_widens_it() {
    let driver = Driver::start().await;
    let (agent, asked) = listening(&driver);
    let mut shown = Vec::new();
    for request in [of_writable_class(&driver, "v", "a"), read_only(of_writable_class(&driver, "w", "b"))] {
        driver.node().node_publish_volume(request).await.unwrap();
        shown.push(asked.recv_timeout(LIMIT).unwrap());
    }
    drop(agent);
    let (dir, kernel) = driver.stop().await;

    let driver = Driver::start_over(dir, kernel).await;
    let agent = driver.agent();
    let (written, read) = (&shown[0], &shown[1]);
    let mut widened = read.clone();
    widened["access"] = json!("readWrite");
    assert!(access(&widened).is_writable() && !access(read).is_writable());
    let refusal = show(&agent, &widened).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::NotFound);
    assert!(refusal.message.contains("another access"), "{}", refusal.message);
    for publish in [written, read] {
        assert!(matches!(show(&agent, publish), Ok(BrokerAnswer::Done)));
    }
    let before = ["a", "b"].map(|target| minor(&driver, target));
    agent.die();
    until("healTimeout is over", || driver.kernel.state().aborted.len() == 2).await;
    let _agent = driver.agent();
    until("they are made anew", || minor(&driver, "a") != before[0] && minor(&driver, "b") != before[1])
        .await;
    assert!(is_writable(&driver, "a") && !is_writable(&driver, "b"));
    let _ = driver.stop().await;
}

/// Its secret's rights are its author's; the agent's are not, and a directory is written to with those.
#[tokio::test(flavor = "multi_thread")]
async fn an_inline_volume_is_written_to_with_its_own_rights_or_not_at_all() {
    let driver = Driver::start().await;
    let (_agent, asked) = listening(&driver);
    let of = |source: &str, inline: bool, target: &str| {
        let mut request = of_writable_class(&driver, target, target);
        let pairs =
            [("source", source), ("csi.storage.k8s.io/ephemeral", if inline { "true" } else { "false" })];
        request.volume_context.extend(context(&pairs));
        request
    };
    driver.node().node_publish_volume(of("s3://bucket/data", true, "a")).await.unwrap();
    let publish: Publish = serde_json::from_value(asked.recv_timeout(LIMIT).unwrap()).unwrap();
    assert_eq!((publish.spec.access, publish.spec.environment), (Access::ReadWrite, false));

    let status = driver.node().node_publish_volume(of("file:///data", true, "b")).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    assert!(status.message().contains("StorageClass"), "{}", status.message());
    driver.node().node_publish_volume(read_only(of("file:///data", true, "b"))).await.unwrap_err();
    driver.node().node_publish_volume(of("file:///data", false, "c")).await.unwrap();
    let mut read = of("file:///data", true, "d");
    read.volume_context.remove("access");
    driver.node().node_publish_volume(read).await.unwrap();
    assert!(is_writable(&driver, "c") && !is_writable(&driver, "d"));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_group_of_a_pod_may_write_what_the_owner_may() {
    let driver = Driver::start().await;
    let (_agent, asked) = listening(&driver);
    let mount = || MountVolume { volume_mount_group: "77".into(), ..MountVolume::default() };
    for (n, (pairs, modes)) in [
        (&[][..], (0o664, 0o775)),
        (&[("fileMode", "0600"), ("dirMode", "0700")], (0o660, 0o770)),
        (&[("fileMode", "0444"), ("dirMode", "0555")], (0o444, 0o555)),
    ]
    .into_iter()
    .enumerate()
    {
        let mut request = of_writable_class(&driver, &format!("v{n}"), &format!("t{n}"));
        request.volume_capability = Some(mounted_with(Mode::MultiNodeMultiWriter, mount()));
        request.volume_context.extend(context(pairs));
        driver.node().node_publish_volume(request).await.unwrap();
        let publish: Publish = serde_json::from_value(asked.recv_timeout(LIMIT).unwrap()).unwrap();
        let parameters = publish.spec.understand().unwrap().parameters;
        assert_eq!((parameters.gid, parameters.file_mode, parameters.dir_mode), (77, modes.0, modes.1));
    }
    // What is only read has no use for it.
    let mut request = driver.publish("read", "read");
    request.volume_capability = Some(mounted_with(Mode::MultiNodeMultiWriter, mount()));
    request.volume_context.extend(context(&[("fileMode", "0600"), ("dirMode", "0700")]));
    driver.node().node_publish_volume(request).await.unwrap();
    let publish: Publish = serde_json::from_value(asked.recv_timeout(LIMIT).unwrap()).unwrap();
    let parameters = publish.spec.understand().unwrap().parameters;
    assert_eq!((parameters.file_mode, parameters.dir_mode), (0o640, 0o750));
    let _ = driver.stop().await;
}
