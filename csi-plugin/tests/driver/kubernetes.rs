//! Records, claims and Events against a small Kubernetes API server in this process.

use crate::common::api::{Api, VOLUMES};
use crate::common::{Driver, Setup, capability, context, of_pod, until};
use csi_plugin::cluster::Cluster;
use csi_plugin::controller::records::MillpondVolume;
use csi_plugin::events::{Events, Pace, Reason};
use kube::CustomResourceExt;
use link::broker::{BrokerRequest, MountId, Report};
use link::{Pod, Subjects};
use proto::csi::v1::volume_capability::access_mode::Mode;
use proto::csi::v1::*;
use std::path::Path;
use std::time::Duration;
use tonic::{Code, Status};

pub(crate) const UID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

pub(crate) async fn controller(api: &Api) -> Driver {
    Driver::with(Setup { records: Some(api.address.clone()), ..Setup::default() }).await
}

pub(crate) fn create(name: &str, parameters: &[(&str, &str)]) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.into(),
        volume_capabilities: vec![capability(Mode::MultiNodeReaderOnly)],
        parameters: context(parameters),
        ..Default::default()
    }
}

/// As the provisioner with `--extra-create-metadata` asks for the claim team/claim.
pub(crate) fn claimed(parameters: &[(&str, &str)]) -> CreateVolumeRequest {
    let claim = [("csi.storage.k8s.io/pvc/name", "claim"), ("csi.storage.k8s.io/pvc/namespace", "team")];
    create(&format!("pvc-{UID}"), &[parameters, &claim].concat())
}

pub(crate) fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code, says: &[&str]) {
    let status = answer.unwrap_err();
    println!("{code:?}: {}", status.message());
    assert_eq!(status.code(), code, "{status:?}");
    for text in says {
        assert!(status.message().contains(text), "{text}: {}", status.message());
    }
}

#[test]
fn the_manifest_of_the_resource_is_what_the_type_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/manifests/base/crd.yaml");
    let generated = serde_json::to_value(MillpondVolume::crd()).unwrap();
    if std::env::var_os("MILLPOND_WRITE_CRD").is_some() {
        let yaml = serde_saphyr::to_string(&generated).unwrap();
        let head = "# Written by: MILLPOND_WRITE_CRD=1 cargo test -p millpond-csi-plugin --test kubernetes\n";
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, format!("{head}{yaml}")).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let written: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
    assert_eq!(
        written,
        generated,
        "{} is not up to date: write it anew with MILLPOND_WRITE_CRD=1",
        path.display()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_controllers_give_one_answer() {
    let api = Api::start().await;
    let (one, two) = (controller(&api).await, controller(&api).await);
    let request = create("v", &[("source", "s3://bucket/a")]);
    let (mut first, mut second) = (one.controller(), two.controller());
    let (a, b) = tokio::join!(first.create_volume(request.clone()), second.create_volume(request.clone()));
    let a = a.unwrap().into_inner().volume.unwrap();
    assert_eq!(a, b.unwrap().into_inner().volume.unwrap());
    let other = create("v", &[("source", "s3://bucket/b")]);
    refused(second.create_volume(other).await, Code::AlreadyExists, &["another parameters"]);

    // What the one created the other validates and deletes; deleting twice is fine.
    let delete = DeleteVolumeRequest { volume_id: a.volume_id.clone(), ..Default::default() };
    second.delete_volume(delete.clone()).await.unwrap();
    first.delete_volume(delete).await.unwrap();
    let gone = ValidateVolumeCapabilitiesRequest {
        volume_id: a.volume_id,
        volume_capabilities: request.volume_capabilities,
        ..Default::default()
    };
    refused(first.validate_volume_capabilities(gone).await, Code::NotFound, &["does not exist"]);
    assert!(!api.state().objects.keys().any(|path| path.starts_with(VOLUMES)));
    assert!(!one.dir.path().join("volumes").exists(), "no state on a disk");
    let _ = (one.stop().await, two.stop().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_listed_with_the_same_tokens_as_files() {
    let api = Api::start().await;
    let driver = controller(&api).await;
    let mut client = driver.controller();
    // Ids that are no names of objects are listed in their place.
    let names = ["A", "a_b", "v0", "v1", "v2"];
    for name in names {
        client.create_volume(create(name, &[("source", "s3://bucket")])).await.unwrap();
    }
    let (seen, tokens) = driver.list_in_pages().await;
    assert_eq!(seen, names);
    assert!(tokens.iter().all(|token| token.starts_with("after:")), "{tokens:?}");

    // More than one chunk of the API, whose continuation expires on the way.
    let template = api.state().objects[&format!("{VOLUMES}/v0")].clone();
    for n in 0..1200 {
        let name = format!("w{n:04}");
        let mut object = template.clone();
        object["metadata"]["name"] = name.clone().into();
        object["spec"]["id"] = name.clone().into();
        api.put(&format!("{VOLUMES}/{name}"), object);
    }
    api.state().expire = true;
    let request = ListVolumesRequest { max_entries: 0, starting_token: "after:v2".into() };
    let page = client.list_volumes(request).await.unwrap().into_inner();
    assert_eq!((page.entries.len(), page.next_token.as_str()), (1000, "after:w0999"));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_is_away_or_refuses_is_told_apart() {
    let api = Api::start().await;
    let driver = controller(&api).await;
    let mut client = driver.controller();
    let request = create("v", &[("source", "s3://bucket")]);
    api.state().fail = Some(500);
    refused(client.create_volume(request.clone()).await, Code::Unavailable, &["API server", "repeated"]);
    api.state().fail = Some(403);
    refused(client.create_volume(request.clone()).await, Code::Internal, &["RBAC"]);
    api.state().fail = None;
    client.create_volume(request.clone()).await.unwrap();
    drop(api);
    refused(client.create_volume(request).await, Code::Unavailable, &["did not answer"]);
    let _ = driver.stop().await;
}

pub(crate) const CHOSEN: (&str, &str) = ("source", "${pvc.annotations['millpond.io/source']}");
pub(crate) const ALLOWED: (&str, &str) = ("allowedSources", "s3://bucket/team");

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_chooses_its_source_and_is_marked() {
    let api = Api::start().await;
    let driver = controller(&api).await;
    let mut client = driver.controller();
    let class = [CHOSEN, ALLOWED, ("uid", "${pvc.annotations['uid']}")];
    let secret = [
        ("csi.storage.k8s.io/node-publish-secret-name", "${pvc.annotations['millpond.io/secret']}"),
        ("csi.storage.k8s.io/node-publish-secret-namespace", "${pvc.namespace}"),
    ];
    api.class("choose", &[&class[..], &secret].concat());
    api.claim("team", "claim", "choose", &[("millpond.io/source", "s3://bucket/team/set"), ("uid", "7")]);
    let volume = client.create_volume(claimed(&class)).await.unwrap().into_inner().volume.unwrap();
    let expected = context(&[
        ("source", "s3://bucket/team/set/"),
        ALLOWED,
        ("uid", "7"),
        ("internal.millpond.io/credentials", "own"),
        ("internal.millpond.io/pvc-name", "claim"),
        ("internal.millpond.io/pvc-namespace", "team"),
        ("internal.millpond.io/pvc-uid", "uid-claim"),
    ]);
    assert_eq!(volume.volume_context, expected);

    // A class that chooses the source itself is not marked, and its claim not asked for.
    let seen = api.state().seen.len();
    let plain = client.create_volume(CreateVolumeRequest {
        name: "pvc-plain".into(),
        ..claimed(&[("source", "s3://bucket/team"), ("path", "${pvc.namespace}/${pvc.name}")])
    });
    let context = plain.await.unwrap().into_inner().volume.unwrap().volume_context;
    assert!(!context.contains_key("internal.millpond.io/credentials"), "{context:?}");
    assert_eq!(api.state().seen.len(), seen + 1, "one POST");
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_claim_may_not_choose_is_refused_with_its_reason() {
    let api = Api::start().await;
    let driver = controller(&api).await;
    let mut client = driver.controller();
    let class = [CHOSEN, ALLOWED];
    api.class("choose", &class);
    let request = claimed(&class);

    refused(client.create_volume(request.clone()).await, Code::Unavailable, &["team/claim", "any more"]);
    for annotations in [&[][..], &[("millpond.io/source", "")]] {
        api.claim("team", "claim", "choose", annotations);
        let says = ["\"millpond.io/source\"", "team/claim"];
        refused(client.create_volume(request.clone()).await, Code::InvalidArgument, &says);
    }
    for source in ["s3://bucket/team-b", "s3://bucket", "s3://other/team", "s3://bucket/%74eam"] {
        api.claim("team", "claim", "choose", &[("millpond.io/source", source)]);
        let says = [source, "s3://bucket/team", "allowedSources"];
        refused(client.create_volume(request.clone()).await, Code::PermissionDenied, &says);
    }
    for source in ["s3://bucket/team/../other", "s3://bucket/team//x", "team/x"] {
        api.claim("team", "claim", "choose", &[("millpond.io/source", source)]);
        refused(client.create_volume(request.clone()).await, Code::InvalidArgument, &["source"]);
    }

    api.claim("team", "claim", "choose", &[("millpond.io/source", "s3://bucket/team/x")]);
    refused(client.create_volume(claimed(&[CHOSEN])).await, Code::Unavailable, &["choose"]);
    api.class("choose", &[CHOSEN]);
    refused(client.create_volume(claimed(&[CHOSEN])).await, Code::InvalidArgument, &["allowedSources"]);
    let mark = ("internal.millpond.io/credentials", "agent");
    refused(client.create_volume(claimed(&[ALLOWED, mark])).await, Code::InvalidArgument, &[mark.0]);
    refused(
        client.create_volume(create("v", &class)).await,
        Code::InvalidArgument,
        &["--extra-create-metadata"],
    );
    assert!(!api.state().objects.keys().any(|path| path.starts_with(VOLUMES)));

    let alone = Driver::start().await;
    refused(
        alone.controller().create_volume(request).await,
        Code::FailedPrecondition,
        &["--records kubernetes"],
    );
    let _ = (driver.stop().await, alone.stop().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_class_that_gives_claims_somebody_elses_secret_is_refused() {
    let api = Api::start().await;
    let driver = controller(&api).await;
    let mut client = driver.controller();
    let class = [CHOSEN, ALLOWED];
    let foreign = [
        ("csi.storage.k8s.io/node-publish-secret-name", "keys"),
        ("csi.storage.k8s.io/node-publish-secret-namespace", "kube-system"),
    ];
    api.class("foreign", &[&class[..], &foreign].concat());
    api.class("harmless", &class);
    let source = ("millpond.io/source", "s3://bucket/team/x");
    api.claim("team", "claim", "foreign", &[source]);
    let says = ["\"foreign\"", "kube-system", "${pvc.namespace}"];
    refused(client.create_volume(claimed(&class)).await, Code::PermissionDenied, &says);

    // The annotation of old decides for the provisioner, so it decides here.
    let beta = ("volume.beta.kubernetes.io/storage-class", "foreign");
    api.claim("team", "claim", "harmless", &[source, beta]);
    refused(client.create_volume(claimed(&class)).await, Code::PermissionDenied, &says);
    api.claim("team", "claim", "harmless", &[source]);
    client.create_volume(claimed(&class)).await.unwrap();
    let _ = driver.stop().await;
}

/// The table of external-provisioner 5.3 (`pkg/controller/controller.go`): whatever of it is not the claim's own.
#[tokio::test(flavor = "multi_thread")]
async fn no_pair_that_the_provisioner_honours_names_another_namespace() {
    let api = Api::start().await;
    let driver = controller(&api).await;
    let mut client = driver.controller();
    let class = [CHOSEN, ALLOWED];
    api.claim("team", "claim", "choose", &[("millpond.io/source", "s3://bucket/team/x")]);
    let prefixed = [
        "",
        "provisioner-",
        "controller-publish-",
        "node-stage-",
        "node-publish-",
        "controller-expand-",
        "node-expand-",
    ];
    let pair = |prefix: &str| {
        let key = |what: &str| format!("csi.storage.k8s.io/{prefix}secret-{what}");
        (key("name"), key("namespace"))
    };
    for (name, namespace) in prefixed.map(pair) {
        for foreign in ["kube-system", "${pv.name}", "${pvc.annotations['ns']}", "team-${pvc.namespace}", ""]
        {
            api.class("choose", &[&class[..], &[(&name, "keys"), (&namespace, foreign)]].concat());
            let says = ["\"choose\"", namespace.as_str(), "${pvc.namespace}"];
            refused(client.create_volume(claimed(&class)).await, Code::PermissionDenied, &says);
        }
        api.class("choose", &[&class[..], &[(name.as_str(), "keys")]].concat());
        refused(client.create_volume(claimed(&class)).await, Code::PermissionDenied, &[&namespace]);
    }
    // A pair that a later provisioner may honour is not one that we have understood.
    let unknown = [("csi.storage.k8s.io/node-prepare-secret-namespace", "${pvc.namespace}")];
    api.class("choose", &[&class[..], &unknown].concat());
    refused(
        client.create_volume(claimed(&class)).await,
        Code::PermissionDenied,
        &[unknown[0].0, "leave it out"],
    );
    // The spelling of old ones is handed on with the other parameters.
    for old in ["Provisioner", "ControllerPublish", "NodeStage", "NodePublish"] {
        let (name, namespace) = (format!("csi{old}SecretName"), format!("csi{old}SecretNamespace"));
        let class = [&class[..], &[(&name, "keys"), (&namespace, "kube-system")]].concat();
        api.class("choose", &class);
        refused(client.create_volume(claimed(&class)).await, Code::PermissionDenied, &[&namespace]);
    }
    assert!(!api.state().objects.keys().any(|path| path.starts_with(VOLUMES)));

    // All of them at once, each of the claim's own namespace, as a template or by its name.
    for own in ["${pvc.namespace}", "team"] {
        let pairs = prefixed.map(pair);
        let all = pairs.iter().flat_map(|(name, ns)| [(name.as_str(), "keys"), (ns.as_str(), own)]);
        api.class("choose", &class.into_iter().chain(all).collect::<Vec<_>>());
        client.create_volume(claimed(&class)).await.unwrap();
    }
    let _ = driver.stop().await;
}

/// A publish by kubelet of a provisioned volume into pod team/pod.
fn publish(driver: &Driver) -> NodePublishVolumeRequest {
    let mut request = driver.publish("v", "a");
    request.volume_context.extend(of_pod());
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_to_a_mount_is_told_on_its_pod_and_its_claim() {
    let api = Api::start().await;
    let driver = Driver::with(Setup { events: Some(api.address.clone()), ..Setup::default() }).await;
    let mut node = driver.node();
    let mut request = publish(&driver);
    request.secrets = context(&[("accessKeyId", "AKIA"), ("secretAccessKey", "hunter2")]);
    node.node_publish_volume(request.clone()).await.unwrap_err();
    for (kind, uid) in [("Pod", Some("uid-pod")), ("PersistentVolumeClaim", None)] {
        until("the failed publish is posted", || api.events(kind, "MountFailed").len() == 1).await;
        let event = &api.events(kind, "MountFailed")[0];
        assert_eq!(event["involvedObject"]["uid"].as_str(), uid, "{event}");
        assert_eq!((&event["type"], &event["count"]), (&"Warning".into(), &1.into()), "{event}");
        let message = event["message"].as_str().unwrap();
        assert!(message.contains("node agent is not running"), "{message}");
    }

    let agent = driver.agent();
    node.node_publish_volume(request.clone()).await.unwrap();
    let healed = || Report::Healed { cause: "signal".into(), took_us: 2500 };
    for _ in 0..100 {
        agent.ask(BrokerRequest::Report { mount: MountId(1), report: healed() }, &[]).unwrap();
    }
    until("the heals are posted", || api.events("Pod", "MountHealed").len() == 1).await;
    let message = api.events("Pod", "MountHealed")[0]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("no call failed") && message.contains("node-1"), "{message}");
    let why = "no worker comes up".to_owned();
    agent.ask(BrokerRequest::Report { mount: MountId(1), report: Report::Degraded { why } }, &[]).unwrap();
    agent.ask(BrokerRequest::Report { mount: MountId(1), report: Report::Recovered }, &[]).unwrap();
    let away = |stale| Report::SourceAway { why: "no answer for 5s".into(), stale };
    for stale in [true, false] {
        agent.ask(BrokerRequest::Report { mount: MountId(1), report: away(stale) }, &[]).unwrap();
    }
    until("stale", || api.events("Pod", "MountServingStale").len() == 1).await;
    let message = api.events("Pod", "MountServingStale")[0]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("no answer for 5s") && message.contains("staleIfError"), "{message}");
    for _ in 0..10 {
        let poisoned = Report::Poisoned { operation: "READ".into(), deaths: 5 };
        agent.ask(BrokerRequest::Report { mount: MountId(1), report: poisoned }, &[]).unwrap();
    }
    agent.ask(BrokerRequest::Abort { mount: MountId(1), why: "no worker".into() }, &[]).unwrap();
    for reason in ["MountDegraded", "MountRecovered", "MountRequestFailed"] {
        until(reason, || api.events("PersistentVolumeClaim", reason).len() == 1).await;
    }
    // One object for each object and reason, whatever comes: a hundred heals are no flood.
    let posts = api.state().seen.iter().filter(|s| s.starts_with("POST")).count();
    assert_eq!(posts, api.state().objects.len());
    let all = format!("{:?}", api.state().objects);
    assert!(!all.contains("hunter2") && !all.contains("AKIA"), "{all}");
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_events_are_one_object_that_counts_also_those_that_were_dropped() {
    let api = Api::start().await;
    let cluster = Cluster::configure(Some(&api.address)).await.unwrap();
    let pace = Pace {
        interval: Duration::from_millis(1),
        tries: 2,
        pause: Duration::from_millis(1),
        limit: Duration::from_secs(5),
    };
    let events = Events::start(&cluster, "node-1", pace);
    let pod = Pod { name: "pod".into(), namespace: "team".into(), uid: "uid-pod".into() };
    let subjects = Subjects { pod: Some(pod), claim: None };
    api.state().fail = Some(500);
    events.note(&subjects, Reason::Degraded, "first");
    let tries = || api.state().seen.len();
    until("it was given up", || tries() == 2).await;
    api.state().fail = None;
    for n in 2..=50 {
        events.note(&subjects, Reason::Degraded, &format!("number {n}"));
    }
    let posted = || api.events("Pod", "MountDegraded");
    until("all are counted", || posted().first().is_some_and(|e| e["count"] == 50)).await;
    assert_eq!(posted()[0]["message"], "number 50");

    // The API server forgets Events after an hour.
    api.state().objects.clear();
    events.note(&subjects, Reason::Degraded, "again");
    until("it is there again", || posted().first().is_some_and(|e| e["count"] == 51)).await;
    events.note(&subjects, Reason::Healed, "other");
    until("another reason is another object", || api.state().objects.len() == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn inline_volumes_tell_their_pod_only_and_believe_nobody_about_a_claim() {
    let api = Api::start().await;
    let driver = Driver::with(Setup { events: Some(api.address.clone()), ..Setup::default() }).await;
    let mut request = publish(&driver);
    request.volume_context.insert("csi.storage.k8s.io/ephemeral".into(), "true".into());
    refused(driver.node().node_publish_volume(request.clone()).await, Code::InvalidArgument, &["internal."]);
    until("the pod gets an Event", || api.events("Pod", "MountFailed").len() == 1).await;
    request.volume_context.retain(|key, _| !key.starts_with("internal."));
    request.volume_context.insert("freshnes".into(), "ttl".into());
    refused(
        driver.node().node_publish_volume(request).await,
        Code::InvalidArgument,
        &["did you mean \"freshness\""],
    );
    assert!(api.events("PersistentVolumeClaim", "MountFailed").is_empty());
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_is_away_holds_up_nobody() {
    let api = Api::start().await;
    let driver = Driver::with(Setup { events: Some(api.address.clone()), ..Setup::default() }).await;
    api.state().fail = Some(503);
    let agent = driver.agent();
    let mut node = driver.node();
    node.node_publish_volume(publish(&driver)).await.unwrap();
    // More than the queue holds.
    for _ in 0..600 {
        let report = Report::Degraded { why: "x".into() };
        agent.ask(BrokerRequest::Report { mount: MountId(1), report }, &[]).unwrap();
    }
    until("it was tried", || api.state().seen.iter().any(|s| s.contains("/events"))).await;
    drop(api);
    node.node_publish_volume(publish(&driver)).await.unwrap();
    node.node_unpublish_volume(driver.unpublish("v", "a")).await.unwrap();
    let _ = driver.stop().await;
}
