//! Controller and identity over a real unix socket.

use crate::common::{Driver, capability, context};
use proto::csi::v1::volume_capability::access_mode::Mode;
use proto::csi::v1::*;
use tonic::Code;

fn create(name: &str, parameters: &[(&str, &str)], bytes: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.into(),
        volume_capabilities: vec![capability(Mode::MultiNodeMultiWriter)],
        parameters: context(parameters),
        capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_becomes_a_volume_once() {
    let driver = Driver::start().await;
    let mut client = driver.controller();
    let mut request = create(
        "pvc-1",
        &[
            ("source", "s3://bucket/base"),
            ("path", "${pvc.namespace}/${pvc.name}"),
            ("uid", "7"),
            ("csi.storage.k8s.io/pvc/name", "claim"),
            ("csi.storage.k8s.io/pvc/namespace", "team"),
        ],
        1 << 30,
    );
    request.secrets = context(&[("accessKeyId", "AKIA"), ("secretAccessKey", "hunter2")]);
    let first = client.create_volume(request.clone()).await.unwrap().into_inner().volume.unwrap();
    let second = client.create_volume(request.clone()).await.unwrap().into_inner().volume.unwrap();
    assert_eq!(first, second);
    assert_eq!(first.capacity_bytes, 1 << 30);
    let expected = [
        ("source", "s3://bucket/base/team/claim/"),
        ("uid", "7"),
        ("internal.millpond.io/pvc-name", "claim"),
        ("internal.millpond.io/pvc-namespace", "team"),
    ];
    assert_eq!(first.volume_context, context(&expected));

    let other =
        CreateVolumeRequest { parameters: context(&[("source", "s3://bucket/else")]), ..request.clone() };
    assert_eq!(client.create_volume(other).await.unwrap_err().code(), Code::AlreadyExists);
    let bigger = CreateVolumeRequest {
        capacity_range: Some(CapacityRange { required_bytes: 2 << 30, limit_bytes: 0 }),
        ..request.clone()
    };
    assert_eq!(client.create_volume(bigger).await.unwrap_err().code(), Code::AlreadyExists);

    for entry in std::fs::read_dir(driver.dir.path().join("volumes")).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        assert!(!text.contains("hunter2") && !text.contains("AKIA"), "{text}");
    }
    let delete = DeleteVolumeRequest { volume_id: first.volume_id, ..Default::default() };
    client.delete_volume(delete.clone()).await.unwrap();
    client.delete_volume(delete).await.unwrap();
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_say_what_to_fix() {
    let driver = Driver::start().await;
    let mut client = driver.controller();
    let mut cases = vec![
        (create("", &[("source", "s3://bucket")], 0), "name is missing"),
        (create("v", &[("source", "s3://bucket"), ("freshnes", "ttl")], 0), "did you mean \"freshness\""),
        (create("v", &[], 0), "\"source\" is missing"),
        (create("v", &[("source", "http:/x")], 0), "not a URL"),
        (create("v", &[("source", "s3://bucket"), ("path", "../up")], 0), "would leave the source"),
        (create("v", &[("source", "s3://bucket"), ("path", "a#b")], 0), "query or fragment"),
        (
            create("v", &[("source", "gs://bucket"), ("access", "readWrite")], 0),
            "use an s3:// or file:// source",
        ),
        (create("v", &[("source", "s3://bucket"), ("writeMode", "back")], 0), "set access to \"readWrite\""),
        (create(&"x".repeat(129), &[("source", "s3://bucket")], 0), "longer than 128"),
    ];
    let good = create("v", &[("source", "s3://bucket")], 0);
    let block = VolumeCapability {
        access_type: Some(volume_capability::AccessType::Block(Default::default())),
        ..capability(Mode::SingleNodeWriter)
    };
    cases.push((CreateVolumeRequest { volume_capabilities: vec![block], ..good.clone() }, "block volumes"));
    let no_capability = CreateVolumeRequest { volume_capabilities: vec![], ..good.clone() };
    cases.push((no_capability, "volume_capabilities is missing"));
    let secrets = context(&[("accessKeyId", "a")]);
    cases.push((CreateVolumeRequest { secrets, ..good }, "no secretAccessKey"));
    for (request, text) in cases {
        let status = client.create_volume(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().contains(text), "{text}: {}", status.message());
    }
    assert_eq!(
        client.get_capacity(GetCapacityRequest::default()).await.unwrap_err().code(),
        Code::Unimplemented
    );
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn listing_pages_through_everything_and_knows_its_tokens() {
    let driver = Driver::start().await;
    let mut client = driver.controller();
    for n in 0..5 {
        client.create_volume(create(&format!("v{n}"), &[("source", "s3://bucket")], 0)).await.unwrap();
    }
    let (seen, _) = driver.list_in_pages().await;
    assert_eq!(seen, ["v0", "v1", "v2", "v3", "v4"]);
    let bad = ListVolumesRequest { max_entries: 0, starting_token: "elsewhere".into() };
    assert_eq!(client.list_volumes(bad).await.unwrap_err().code(), Code::Aborted);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn capabilities_are_confirmed_for_known_volumes_only() {
    let driver = Driver::start().await;
    let mut client = driver.controller();
    client.create_volume(create("v", &[("source", "s3://bucket")], 0)).await.unwrap();
    let request = |id: &str| ValidateVolumeCapabilitiesRequest {
        volume_id: id.into(),
        volume_capabilities: vec![capability(Mode::SingleNodeWriter)],
        ..Default::default()
    };
    let answer = client.validate_volume_capabilities(request("v")).await.unwrap().into_inner();
    assert!(answer.confirmed.is_some());
    let unknown = client.validate_volume_capabilities(request("w")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    let _ = driver.stop().await;
}

/// What is only read has been given to claims that would write, and is.
#[tokio::test(flavor = "multi_thread")]
async fn every_access_mode_is_accepted_whatever_the_class_lets_be_done() {
    let driver = Driver::start().await;
    let mut client = driver.controller();
    for (name, pairs) in [("read", &[][..]), ("written", &[("access", "readWrite"), ("writeMode", "back")])] {
        let parameters: Vec<_> = [("source", "s3://bucket/")].iter().chain(pairs).copied().collect();
        let modes = [
            Mode::SingleNodeWriter,
            Mode::SingleNodeReaderOnly,
            Mode::MultiNodeReaderOnly,
            Mode::MultiNodeSingleWriter,
            Mode::MultiNodeMultiWriter,
            Mode::SingleNodeSingleWriter,
            Mode::SingleNodeMultiWriter,
        ];
        let volume_capabilities = modes.map(capability).to_vec();
        let request = CreateVolumeRequest {
            volume_capabilities: volume_capabilities.clone(),
            ..create(name, &parameters, 0)
        };
        let volume = client.create_volume(request).await.unwrap().into_inner().volume.unwrap();
        assert_eq!(volume.volume_context, context(&parameters));
        let request = ValidateVolumeCapabilitiesRequest {
            volume_id: volume.volume_id,
            volume_capabilities,
            ..Default::default()
        };
        let answer = client.validate_volume_capabilities(request).await.unwrap().into_inner();
        assert!(answer.confirmed.is_some(), "{}", answer.message);
    }
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plugin_is_ready_without_any_agent() {
    let driver = Driver::start().await;
    let mut client = driver.identity();
    assert_eq!(client.probe(ProbeRequest {}).await.unwrap().into_inner().ready, Some(true));
    let info = client.get_plugin_info(GetPluginInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.name, "csi.millpond.io");
    let _ = driver.stop().await;
}
