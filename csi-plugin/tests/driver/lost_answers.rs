//! CreateVolume whose answer did not arrive: asked again, and not asked again.

use crate::common::api::{Api, VOLUMES};
use crate::common::{Driver, Setup, until};
use crate::kubernetes::{ALLOWED, CHOSEN, UID, claimed, controller, create, refused};
use csi_plugin::controller::unclaimed::Pace;
use proto::csi::v1::*;
use std::time::Duration;
use tonic::Code;

const CLAIM: &str = "/api/v1/namespaces/team/persistentvolumeclaims/claim";
const SOURCE: &str = "millpond.io/source";

fn record() -> String {
    format!("{VOLUMES}/pvc-{UID}")
}

/// The claim of [`claimed`], whose uid is in the volume's name.
fn claim(api: &Api, annotations: &[(&str, &str)]) {
    api.claim("team", "claim", "choose", annotations);
    api.state().objects.get_mut(CLAIM).unwrap()["metadata"]["uid"] = UID.into();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_given_again_whatever_became_of_the_claim() {
    let api = Api::start().await;
    let (one, two) = (controller(&api).await, controller(&api).await);
    let class = [CHOSEN, ALLOWED];
    api.class("choose", &class);
    claim(&api, &[(SOURCE, "s3://bucket/team/first")]);
    let first = one.controller().create_volume(claimed(&class)).await.unwrap().into_inner();

    // The answer is lost; the other replica is asked, and the claim says something else by now.
    let mut client = two.controller();
    for source in ["s3://bucket/team/second", "s3://bucket/elsewhere", "not a source", ""] {
        claim(&api, &[(SOURCE, source)]);
        let again = client.create_volume(claimed(&class)).await;
        assert_eq!(again.unwrap().into_inner(), first, "{source:?}");
    }
    claim(&api, &[]);
    assert_eq!(client.create_volume(claimed(&class)).await.unwrap().into_inner(), first);
    // Deleted: the provisioner asks on, in order to delete what it gets.
    api.state().objects.remove(CLAIM);
    assert_eq!(client.create_volume(claimed(&class)).await.unwrap().into_inner(), first);

    // A class that was made anew with another claim's secret is no better for an answer that was lost; nor one that
    // cannot be looked at.
    claim(&api, &[(SOURCE, "s3://bucket/team/second")]);
    let foreign = ("csi.storage.k8s.io/node-publish-secret-namespace", "kube-system");
    api.class("choose", &[CHOSEN, ALLOWED, foreign]);
    refused(client.create_volume(claimed(&class)).await, Code::PermissionDenied, &["kube-system"]);
    api.state().objects.remove("/apis/storage.k8s.io/v1/storageclasses/choose");
    refused(client.create_volume(claimed(&class)).await, Code::Unavailable, &["choose"]);
    api.class("choose", &class);

    // Other parameters, another claim, another size: not the same question.
    let other = [CHOSEN, ALLOWED, ("uid", "7")];
    api.class("choose", &other);
    claim(&api, &[(SOURCE, "s3://bucket/team/first")]);
    refused(client.create_volume(claimed(&other)).await, Code::AlreadyExists, &["another parameters"]);
    api.class("choose", &class);
    let mut bigger = claimed(&class);
    bigger.capacity_range = Some(CapacityRange { required_bytes: 1 << 30, limit_bytes: 0 });
    refused(client.create_volume(bigger).await, Code::AlreadyExists, &["another capacity"]);
    for (key, value) in [("pvc/name", "other"), ("pvc/namespace", "other")] {
        api.claim("team", "other", "choose", &[(SOURCE, "s3://bucket/team/first")]);
        api.claim("other", "claim", "choose", &[(SOURCE, "s3://bucket/team/first")]);
        let mut theirs = claimed(&class);
        theirs.parameters.insert(format!("csi.storage.k8s.io/{key}"), value.into());
        refused(client.create_volume(theirs).await, Code::AlreadyExists, &["another parameters"]);
    }
    let _ = (one.stop().await, two.stop().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_of_the_version_before_is_compared_as_it_was() {
    let api = Api::start().await;
    let driver = controller(&api).await;
    let mut client = driver.controller();
    let class = [CHOSEN, ALLOWED];
    api.class("choose", &class);
    claim(&api, &[(SOURCE, "s3://bucket/team/first")]);
    let first = client.create_volume(claimed(&class)).await.unwrap().into_inner();
    api.state().objects.get_mut(&record()).unwrap()["spec"].as_object_mut().unwrap().remove("request");
    assert_eq!(client.create_volume(claimed(&class)).await.unwrap().into_inner(), first);
    claim(&api, &[(SOURCE, "s3://bucket/team/second")]);
    refused(client.create_volume(claimed(&class)).await, Code::AlreadyExists, &["another parameters"]);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_without_claim_and_volume_is_removed_and_no_other() {
    let api = Api::start().await;
    let pace = Pace { every: Duration::from_millis(20), grace: Duration::from_millis(100) };
    let setup = || Setup { records: Some(api.address.clone()), unclaimed: Some(pace), ..Setup::default() };
    let class = [CHOSEN, ALLOWED];
    api.class("choose", &class);
    let maker = controller(&api).await;
    let mut client = maker.controller();
    // One without an owner; one with a claim, one with a volume, and one with a volume of another name.
    let names: [u8; 4] = [0, 1, 2, 3];
    let name = |n: u8| format!("pvc-{n}{}", &UID[1..]);
    for n in names {
        let (claim, uid) = (format!("claim-{n}"), format!("{n}{}", &UID[1..]));
        api.claim("team", &claim, "choose", &[(SOURCE, "s3://bucket/team/x")]);
        let path = format!("/api/v1/namespaces/team/persistentvolumeclaims/{claim}");
        api.state().objects.get_mut(&path).unwrap()["metadata"]["uid"] = uid.into();
        let mut request = claimed(&class);
        request.name = name(n);
        request.parameters.insert("csi.storage.k8s.io/pvc/name".into(), claim);
        client.create_volume(request).await.unwrap();
        if n != 1 {
            api.state().objects.remove(&path);
        }
    }
    // A claim of the same name that is another one is not the record's.
    api.claim("team", "claim-0", "choose", &[(SOURCE, "s3://bucket/team/x")]);
    api.persistent_volume(&name(2), &name(2));
    api.persistent_volume("restored", &name(3));
    // Not of a claim: nothing says whose it is.
    client.create_volume(create("by-hand", &[("source", "s3://bucket/a")])).await.unwrap();
    let there = |n: u8| api.state().objects.contains_key(&format!("{VOLUMES}/{}", name(n)));
    let seen = || api.state().seen.iter().filter(|s| s.starts_with("GET") && s.ends_with(VOLUMES)).count();

    // Two replicas look, neither leads.
    let (one, two) = (Driver::with(setup()).await, Driver::with(setup()).await);
    until("the record is gone", || !there(0)).await;
    let before = seen();
    until("it was looked on", || seen() > before + 40).await;
    assert!(there(1) && there(2) && there(3));
    assert!(api.state().objects.contains_key(&format!("{VOLUMES}/by-hand")));

    // The claim goes, and the volume; both records follow.
    api.state().objects.remove("/api/v1/namespaces/team/persistentvolumeclaims/claim-1");
    api.state().objects.remove(&format!("/api/v1/persistentvolumes/{}", name(2)));
    until("their records are gone", || !there(1) && !there(2)).await;
    assert!(there(3));
    let _ = (one.stop().await, two.stop().await, maker.stop().await);
}

/// A record that is handed out again at that moment is not taken away from the caller that just got it.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_is_handed_out_again_is_another_version_of_it() {
    let api = Api::start().await;
    let driver = controller(&api).await;
    let mut client = driver.controller();
    let class = [CHOSEN, ALLOWED];
    api.class("choose", &class);
    claim(&api, &[(SOURCE, "s3://bucket/team/first")]);
    let version = || api.state().objects[&record()]["metadata"]["resourceVersion"].clone();
    client.create_volume(claimed(&class)).await.unwrap();
    let first = version();
    client.create_volume(claimed(&class)).await.unwrap();
    let second = version();
    assert_ne!(first, second);
    assert_eq!(api.state().objects[&record()]["spec"]["name"], format!("pvc-{UID}"), "and nothing else");

    // Without an owner now; and while a replica removes it, the other one hands it out.
    api.state().objects.remove(CLAIM);
    api.state().touch_before_delete = true;
    let pace = Pace { every: Duration::from_millis(10), grace: Duration::from_millis(50) };
    let setup = Setup { records: Some(api.address.clone()), unclaimed: Some(pace), ..Setup::default() };
    let looking = Driver::with(setup).await;
    until("it is gone", || !api.state().objects.contains_key(&record())).await;
    let deletion = format!("DELETE {}", record());
    let deletions = api.state().seen.iter().filter(|s| **s == deletion).count();
    assert_eq!(deletions, 2, "the first came second, and its time began anew");
    let _ = (driver.stop().await, looking.stop().await);
}
