//! What a publish may ask for: checked, honoured or refused, and whose rights it gets.

use crate::common::{Driver, LIMIT, capability, context, obliging};
use link::broker::{AgentRequest, BrokerRequest, Hold, MountId, Resume};
use link::worker::Mode as ServedMode;
use link::{Refusal, RefusalKind};
use proto::csi::v1::volume_capability::{AccessType, MountVolume, access_mode::Mode};
use proto::csi::v1::*;
use std::os::fd::AsFd;
use tonic::Code;

fn with_flags(flags: &[&str]) -> VolumeCapability {
    let mount_flags = flags.iter().map(|f| (*f).to_owned()).collect();
    let mount = MountVolume { mount_flags, ..Default::default() };
    VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..capability(Mode::SingleNodeWriter) }
}

#[tokio::test(flavor = "multi_thread")]
async fn mount_options_are_honoured_or_refused_by_name() {
    let driver = Driver::start().await;
    let _agent = driver.agent();
    let mut node = driver.node();
    let publish = |target: &str, flags: &[&str]| NodePublishVolumeRequest {
        volume_capability: Some(with_flags(flags)),
        ..driver.publish("v", target)
    };
    for (target, flags, no_exec, no_atime) in [
        ("a", &["ro", "noexec"][..], true, false),
        ("b", &["rw", "noatime"], false, true),
        ("c", &["noatime", "noexec", "ro"], true, true),
        ("d", &[], false, false),
    ] {
        node.node_publish_volume(publish(target, flags)).await.unwrap();
        let options = driver.kernel.state().options.unwrap();
        assert_eq!((options.no_exec, options.no_atime), (no_exec, no_atime), "{flags:?}");
        // The same again is the same mount; without its options it is another.
        node.node_publish_volume(publish(target, flags)).await.unwrap();
    }
    let other = node.node_publish_volume(publish("a", &[])).await.unwrap_err();
    assert_eq!(other.code(), Code::Unavailable);
    for flag in ["sync", "allow_other", "nosuid", "exec", "uid=0", ""] {
        let status = node.node_publish_volume(publish("e", &["ro", flag])).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(&format!("{flag:?}")), "{}", status.message());
    }
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_with_options_is_taken_back_by_the_next_broker() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let (send, receive) = std::sync::mpsc::channel();
    agent.behave(move |request, fds| {
        if let AgentRequest::Publish(p) = request {
            send.send(serde_json::to_value(p).unwrap()).unwrap();
        }
        obliging(request, fds)
    });
    let volume_capability = Some(with_flags(&["ro", "noexec", "noatime"]));
    let request = NodePublishVolumeRequest { volume_capability, ..driver.publish("v", "a") };
    driver.node().node_publish_volume(request.clone()).await.unwrap();
    let publish = receive.recv_timeout(LIMIT).unwrap();
    drop(agent);
    let (dir, kernel) = driver.stop().await;

    let driver = Driver::start_over(dir, kernel).await;
    let agent = driver.agent();
    let hold = Hold {
        publish: serde_json::from_value(publish).unwrap(),
        resume: Resume::new(ServedMode::Passthrough, "0".repeat(32)),
        backing: Vec::new(),
    };
    let (device, shared) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    agent.ask(BrokerRequest::Hold(Box::new(hold)), &[device.as_fd(), shared.as_fd()]).unwrap();
    driver.node().node_publish_volume(request).await.unwrap();
    assert_eq!((driver.mounts(), agent.saw("Publish")), (2, 0));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_an_administrator_wrote_may_use_the_agents_own_credentials() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let (send, receive) = std::sync::mpsc::channel();
    agent.behave(move |request, fds| {
        if let AgentRequest::Publish(p) = request {
            send.send((p.spec.environment, p.spec.subjects.pod.clone())).unwrap();
        }
        obliging(request, fds)
    });
    let inline = format!("csi-{}", "0a".repeat(32));
    for (target, volume, pairs, environment) in [
        ("a", "static", &[][..], true),
        ("b", "chosen", &[("internal.millpond.io/credentials", "own")], false),
        ("c", "inline", &[("csi.storage.k8s.io/ephemeral", "true")], false),
        ("d", inline.as_str(), &[("csi.storage.k8s.io/ephemeral", "false")], false),
    ] {
        let mut request = driver.publish(volume, target);
        request.volume_context.extend(context(pairs));
        request.volume_context.extend(context(&[
            ("csi.storage.k8s.io/pod.name", "pod"),
            ("csi.storage.k8s.io/pod.namespace", "team"),
        ]));
        driver.node().node_publish_volume(request).await.unwrap();
        let (found, pod) = receive.recv_timeout(LIMIT).unwrap();
        assert_eq!((found, pod.unwrap().namespace.as_str()), (environment, "team"), "{volume}");
    }
    let mut forged = driver.publish("inline", "e");
    forged.volume_context.extend(context(&[
        ("csi.storage.k8s.io/ephemeral", "true"),
        ("internal.millpond.io/credentials", "agent"),
    ]));
    let status = driver.node().node_publish_volume(forged).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("internal.millpond.io/credentials"), "{}", status.message());
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_an_existing_mount_the_answer_is_ok_or_unavailable() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let mut node = driver.node();
    let good = driver.publish("v", "a");
    node.node_publish_volume(good.clone()).await.unwrap();
    for bad in [
        NodePublishVolumeRequest { secrets: context(&[("password", "x")]), ..good.clone() },
        NodePublishVolumeRequest { volume_capability: Some(with_flags(&["sync"])), ..good.clone() },
        NodePublishVolumeRequest { volume_context: context(&[("source", "x")]), ..good.clone() },
    ] {
        let status = node.node_publish_volume(bad).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    }
    // A dead mount, whose agent says no: still there, still not final.
    agent.ask(BrokerRequest::Abort { mount: MountId(1), why: "no worker".into() }, &[]).unwrap();
    let secrets = context(&[("password", "x")]);
    let status = node.node_publish_volume(NodePublishVolumeRequest { secrets, ..good }).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_that_changed_is_given_to_the_agent_until_it_takes_it() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let mut node = driver.node();
    let with = |secret: &str| NodePublishVolumeRequest {
        secrets: context(&[("accessKeyId", "id"), ("secretAccessKey", secret)]),
        ..driver.publish("v", "a")
    };
    node.node_publish_volume(with("first")).await.unwrap();
    node.node_publish_volume(with("first")).await.unwrap();
    assert_eq!(agent.saw("Rotate"), 0);

    // Refused, or not known yet: the mount goes on, and the next republish asks again.
    for kind in [RefusalKind::Denied, RefusalKind::Unavailable] {
        agent.behave(move |request, fds| match request {
            AgentRequest::Rotate { .. } => Some(Err(Refusal::new(kind, "no"))),
            _ => obliging(request, fds),
        });
        node.node_publish_volume(with("second")).await.unwrap();
    }
    assert_eq!(agent.saw("Rotate"), 2);
    let (send, receive) = std::sync::mpsc::channel();
    agent.behave(move |request, fds| {
        if let AgentRequest::Rotate { secrets, .. } = request {
            send.send(secrets.0["secretAccessKey"].clone()).unwrap();
        }
        obliging(request, fds)
    });
    for _ in 0..2 {
        node.node_publish_volume(with("second")).await.unwrap();
    }
    // A secret that was taken away takes nothing away.
    node.node_publish_volume(driver.publish("v", "a")).await.unwrap();
    assert_eq!(receive.recv_timeout(LIMIT).unwrap(), "second");
    assert_eq!(agent.saw("Rotate"), 3);
    assert_eq!(agent.saw("Publish"), 1);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_checked_before_anything_happens() {
    let driver = Driver::start().await;
    let mut node = driver.node();
    let good = driver.publish("v", "a");
    let group = |text: &str| VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume {
            volume_mount_group: text.into(),
            ..Default::default()
        })),
        ..capability(Mode::SingleNodeWriter)
    };
    let flags = VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume {
            mount_flags: vec!["sync".into()],
            ..Default::default()
        })),
        ..capability(Mode::SingleNodeWriter)
    };
    for bad in [
        NodePublishVolumeRequest { volume_id: String::new(), ..good.clone() },
        NodePublishVolumeRequest { volume_id: "a/b".into(), ..good.clone() },
        NodePublishVolumeRequest { target_path: String::new(), ..good.clone() },
        NodePublishVolumeRequest { volume_capability: None, ..good.clone() },
        NodePublishVolumeRequest { volume_capability: Some(capability(Mode::Unknown)), ..good.clone() },
        NodePublishVolumeRequest { volume_capability: Some(group("wheel")), ..good.clone() },
        NodePublishVolumeRequest { volume_capability: Some(flags), ..good.clone() },
        NodePublishVolumeRequest { volume_context: context(&[("source", "x")]), ..good.clone() },
        NodePublishVolumeRequest { secrets: context(&[("password", "x")]), ..good.clone() },
    ] {
        let status = node.node_publish_volume(bad).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    }
    // The group of fsGroup owns the files and may read them.
    let agent = driver.agent();
    let (send, receive) = std::sync::mpsc::channel();
    agent.behave(move |request, fds| {
        if let AgentRequest::Publish(p) = request {
            send.send(p.spec.understand().unwrap().parameters).unwrap();
        }
        obliging(request, fds)
    });
    let modes = context(&[("source", "s3://bucket"), ("fileMode", "0400"), ("dirMode", "0500")]);
    let request =
        NodePublishVolumeRequest { volume_capability: Some(group("77")), volume_context: modes, ..good };
    node.node_publish_volume(request).await.unwrap();
    let parameters = receive.recv_timeout(LIMIT).unwrap();
    assert_eq!((parameters.gid, parameters.file_mode, parameters.dir_mode), (77, 0o440, 0o550));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_targets_are_refused_by_reason() {
    let driver = Driver::start().await;
    let _agent = driver.agent();
    let mut node = driver.node();
    std::fs::write(driver.target("file"), b"").unwrap();
    std::os::unix::fs::symlink("/tmp", driver.target("link")).unwrap();
    for (target, text) in [
        ("file", "is not a directory"),
        ("link", "symbolic link"),
        ("link/below", "symbolic link"),
        ("missing/below", "does not exist"),
        ("../outside", "without '..'"),
    ] {
        let status = node.node_publish_volume(driver.publish("v", target)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{target}");
        assert!(status.message().contains(text), "{target}: {}", status.message());
    }
    let outside = NodePublishVolumeRequest { target_path: "/mnt/x".into(), ..driver.publish("v", "a") };
    assert_eq!(node.node_publish_volume(outside).await.unwrap_err().code(), Code::InvalidArgument);
    let _ = driver.stop().await;
}
