//! Claims that are deleted, with what was written to their volumes and without: against a store that checks signatures.

use crate::common::api::{Api, VOLUMES};
use crate::common::{Driver, LIMIT, Setup, capability, context, until};
use crate::kubernetes::{UID, refused};
use csi_plugin::controller::erasures::Pace;
use proto::csi::v1::volume_capability::access_mode::Mode;
use proto::csi::v1::*;
use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::{ACCESS_KEY, Bucket, Config, Key, Memory, Next, Rights, SECRET_KEY, Server};
use tonic::Code;

const BUCKET: &str = "bucket";
/// Short enough for a test that waits for it.
const SOON: Duration = Duration::from_millis(300);

struct Store {
    server: Server,
    bucket: Arc<Memory>,
}

impl Store {
    async fn with(config: Config) -> Self {
        let (bucket, mut config) = (Arc::new(Memory::default()), config);
        config.buckets.insert(BUCKET.to_owned(), bucket.clone());
        Self { server: Server::start(config).await.unwrap(), bucket }
    }

    async fn start() -> Self {
        Self::with(Config::default()).await
    }

    fn put(&self, keys: &[&str]) {
        for key in keys {
            self.server.put(BUCKET, key, "x").unwrap();
        }
    }

    fn keys(&self) -> BTreeSet<String> {
        let mut keys = BTreeSet::new();
        let mut visit = |key: &str, _: &testkit::s3::Meta| {
            keys.insert(key.to_owned());
            Next::Continue
        };
        self.bucket.scan(Bound::Unbounded, &mut visit).unwrap();
        keys
    }

    fn fault(&self, rule: Rule) {
        self.server.faults().set(Script { seed: 3, rules: vec![rule] });
    }

    /// A CreateVolume for the claim team/`claim` of a class with these parameters beside the endpoint.
    fn claimed(&self, claim: &str, class: &[(&str, &str)]) -> CreateVolumeRequest {
        let endpoint = self.server.endpoint();
        let name = format!("pv-{claim}");
        let common = [
            ("endpoint", endpoint.as_str()),
            ("allowHttp", "true"),
            ("csi.storage.k8s.io/pvc/name", claim),
            ("csi.storage.k8s.io/pvc/namespace", "team"),
            ("csi.storage.k8s.io/pv/name", &name),
        ];
        CreateVolumeRequest {
            name: name.clone(),
            volume_capabilities: vec![capability(Mode::MultiNodeMultiWriter)],
            parameters: context(&[class, &common].concat()),
            secrets: secrets(SECRET_KEY),
            ..Default::default()
        }
    }
}

const WORK: (&str, &str) = ("source", "s3://bucket/work");
const OWN: (&str, &str) = ("path", "${pvc.namespace}/${pvc.name}");
const WRITES: (&str, &str) = ("access", "readWrite");
const DELETES: [(&str, &str); 4] = [WORK, OWN, WRITES, ("onDelete", "delete")];

fn secrets(secret: &str) -> HashMap<String, String> {
    context(&[("accessKeyId", ACCESS_KEY), ("secretAccessKey", secret)])
}

fn delete(volume: &Volume) -> DeleteVolumeRequest {
    DeleteVolumeRequest { volume_id: volume.volume_id.clone(), secrets: secrets(SECRET_KEY) }
}

async fn create(driver: &Driver, request: &CreateVolumeRequest) -> Volume {
    driver.controller().create_volume(request.clone()).await.unwrap().into_inner().volume.unwrap()
}

/// Driver with records in files; a DeleteVolume waits so long.
async fn waiting(wait: Duration) -> Driver {
    Driver::with(Setup { deletion: Some(Pace { wait, settle: Duration::ZERO }), ..Setup::default() }).await
}

fn record(driver: &Driver, id: &str) -> Option<String> {
    std::fs::read_to_string(driver.dir.path().join("volumes").join(format!("{id}.json"))).ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_deleted_takes_its_directory_along_only_where_its_class_says_so() {
    let store = Store::start().await;
    let driver = Driver::start().await;
    let gone = create(&driver, &store.claimed("gone", &DELETES)).await;
    let kept = create(&driver, &store.claimed("kept", &[WORK, OWN, WRITES, ("onDelete", "retain")])).await;
    let unsaid = create(&driver, &store.claimed("unsaid", &[WORK, OWN, WRITES])).await;
    // What the node gets is the same.
    assert_eq!(gone.volume_context["source"], "s3://bucket/work/team/gone/");
    assert!(!gone.volume_context.contains_key("onDelete") && !kept.volume_context.contains_key("onDelete"));
    let text = record(&driver, &gone.volume_id).unwrap();
    assert!(text.contains("\"deletion\": \"planned\""), "{text}");
    assert!(!text.contains(SECRET_KEY) && !text.contains(ACCESS_KEY), "{text}");
    assert!(!record(&driver, &kept.volume_id).unwrap().contains("deletion"));
    assert!(!record(&driver, &unsaid.volume_id).unwrap().contains("deletion"));

    let neighbours = [
        "work/team/gone",
        "work/team/gone-2/a",
        "work/team/kept/a",
        "work/team/unsaid/a",
        "other/team/gone/a",
    ];
    store.put(&neighbours);
    store.put(&["work/team/gone/", "work/team/gone/a", "work/team/gone/d/e/f", "work/team/gone/d/"]);
    let mut client = driver.controller();
    for volume in [&gone, &kept, &unsaid, &gone, &kept] {
        client.delete_volume(delete(volume)).await.unwrap();
        assert_eq!(record(&driver, &volume.volume_id), None);
    }
    assert_eq!(store.keys(), neighbours.map(str::to_owned).into());
    // The next claim of that name begins with nothing.
    assert_eq!(create(&driver, &store.claimed("gone", &DELETES)).await, gone);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_that_lasts_says_how_far_it_is_and_outlives_its_controller() {
    let store = Store::with(Config { page_max: 10, ..Config::default() }).await;
    let driver = waiting(SOON).await;
    let request = store.claimed("big", &DELETES);
    let volume = create(&driver, &request).await;
    for number in 0..35 {
        store.put(&[&format!("work/team/big/{number:02}")]);
    }
    store.fault(Rule::nth(Fault::Stall { ms: None }, &[2]).op("DeleteObjects"));
    let mut client = driver.controller();
    refused(client.delete_volume(delete(&volume)).await, Code::Aborted, &["10 objects so far", "repeat"]);
    assert_eq!(store.keys().len(), 25);
    // Whoever asks meanwhile joins; nobody gets the volume.
    refused(client.delete_volume(delete(&volume)).await, Code::Aborted, &["10 objects so far"]);
    assert_eq!(store.server.stats().of("DeleteObjects"), 2);
    refused(client.create_volume(request.clone()).await, Code::Aborted, &["being deleted"]);
    // A volume that can be written to is not made in it either; one that is read may be, and stops it.
    let inside = [("source", "s3://bucket/work/team/big/sub")];
    let writer = store.claimed("writer", &[inside[0], WRITES]);
    refused(client.create_volume(writer.clone()).await, Code::Unavailable, &["is being deleted", "team/big"]);
    assert_eq!(record(&driver, "pv-writer"), None);
    assert!(record(&driver, &volume.volume_id).unwrap().contains("\"deletion\": \"begun\""));

    let (dir, kernel) = driver.stop().await;
    let driver = Driver::with(Setup { dir: Some(dir), kernel: Some(kernel), ..Setup::default() }).await;
    let mut client = driver.controller();
    refused(client.create_volume(request.clone()).await, Code::Aborted, &["being deleted"]);
    store.server.faults().clear();
    client.delete_volume(delete(&volume)).await.unwrap();
    client.delete_volume(delete(&volume)).await.unwrap();
    assert_eq!(store.keys(), BTreeSet::new());
    assert_eq!(record(&driver, &volume.volume_id), None);
    client.create_volume(request).await.unwrap();
    client.create_volume(writer).await.map(drop).unwrap();
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ends_in_the_background_is_found_by_the_next_call() {
    let store = Store::start().await;
    let driver = waiting(SOON).await;
    let volume = create(&driver, &store.claimed("big", &DELETES)).await;
    store.put(&["work/team/big/a"]);
    store.fault(Rule::nth(Fault::Stall { ms: None }, &[1]).op("DeleteObjects"));
    let mut client = driver.controller();
    refused(client.delete_volume(delete(&volume)).await, Code::Aborted, &["0 objects so far"]);
    store.server.faults().release();
    until("the directory is empty", || store.keys().is_empty()).await;
    let deadline = std::time::Instant::now() + LIMIT;
    while let Err(status) = client.delete_volume(delete(&volume)).await {
        assert_eq!(status.code(), Code::Aborted, "{status:?}");
        assert!(std::time::Instant::now() < deadline, "{status:?}");
    }
    assert_eq!(record(&driver, &volume.volume_id), None);
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_class_that_cannot_keep_its_word_is_refused_at_the_claim() {
    let store = Store::start().await;
    let driver = Driver::start().await;
    let mut client = driver.controller();
    let deletes = ("onDelete", "delete");
    for (class, says) in [
        (&[WORK, OWN, deletes][..], "can only be read"),
        (&[WORK, WRITES, deletes], "another volume's"),
        (&[WORK, WRITES, deletes, ("path", "${pvc.name}")], "${pvc.namespace}/${pvc.name}"),
        (&[("source", "s3://bucket"), WRITES, deletes], "another volume's"),
        (&[("source", "s3://bucket-${pv.name}"), WRITES, deletes], "whole bucket"),
        (&[WORK, OWN, WRITES, ("onDelete", "yes")], "use \"retain\" or \"delete\""),
    ] {
        refused(client.create_volume(store.claimed("c", class)).await, Code::InvalidArgument, &[says]);
    }
    let mut directory = store.claimed("c", &[("source", "file:///data"), OWN, WRITES, deletes]);
    directory.parameters.retain(|name, _| !matches!(name.as_str(), "endpoint" | "allowHttp"));
    refused(client.create_volume(directory).await, Code::InvalidArgument, &["lies on nodes"]);

    let good = store.claimed("c", &DELETES);
    let none = CreateVolumeRequest { secrets: HashMap::new(), ..good.clone() };
    let says = ["csi.storage.k8s.io/provisioner-secret-name"];
    refused(client.create_volume(none).await, Code::FailedPrecondition, &says);
    let other = context(&[("username", "u"), ("password", "hunter2")]);
    let other = CreateVolumeRequest { secrets: other, ..good.clone() };
    refused(client.create_volume(other).await, Code::FailedPrecondition, &["accessKeyId"]);
    // Of an endpoint that no operator has named, nothing is asked there.
    let mut node = good.clone();
    node.parameters.insert("endpoint".into(), "http://169.254.169.254".into());
    refused(client.create_volume(node).await, Code::FailedPrecondition, &["link-local"]);
    assert_eq!(store.server.stats().total(), 0, "CreateVolume asks no store");
    assert_eq!(driver.list_in_pages().await.0, Vec::<String>::new());
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_in_which_another_volume_has_a_part_is_not_deleted() {
    let store = Store::start().await;
    let driver = Driver::start().await;
    let mut client = driver.controller();
    let around = create(&driver, &store.claimed("around", &[("source", "s3://bucket")])).await;
    let mine = store.claimed("mine", &DELETES);
    let says = ["s3://bucket/", "team/around", "choose another source"];
    refused(client.create_volume(mine.clone()).await, Code::FailedPrecondition, &says);
    client.delete_volume(delete(&around)).await.unwrap();

    let volume = create(&driver, &mine).await;
    store.put(&["work/team/mine/a", "work/team/mine/sub/b"]);
    for source in [
        "s3://bucket/work/team/mine/sub",
        "s3://bucket/work/team",
        "s3://bucket/work/team/mine",
        "gs://bucket",
    ] {
        let mut reader = store.claimed("reader", &[("source", source)]);
        if source.starts_with("gs:") {
            reader.parameters.remove("allowHttp");
            reader.parameters.remove("endpoint");
        }
        let reader = create(&driver, &reader).await;
        let says = ["is not deleted as long as", "team/reader", "pv-mine"];
        refused(client.delete_volume(delete(&volume)).await, Code::FailedPrecondition, &says);
        assert_eq!(store.keys().len(), 2, "{source}");
        client.delete_volume(delete(&reader)).await.unwrap();
    }
    // Another one that deletes, too: not at the same place, whoever came first.
    let nested = [("source", "s3://bucket/work/team/mine"), ("path", "${pv.name}"), WRITES, DELETES[3]];
    refused(
        client.create_volume(store.claimed("nested", &nested)).await,
        Code::FailedPrecondition,
        &["team/mine"],
    );
    client.delete_volume(delete(&volume)).await.unwrap();
    assert_eq!(store.keys(), BTreeSet::new());
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_that_is_refused_goes_on_with_a_better_secret() {
    let keys =
        vec![Key::new(ACCESS_KEY, SECRET_KEY, Rights::All), Key::new("reader", "reads", Rights::NoWrite)];
    let store = Store::with(Config { keys, ..Config::default() }).await;
    let driver = Driver::start().await;
    let volume = create(&driver, &store.claimed("c", &DELETES)).await;
    store.put(&["work/team/c/a"]);
    let mut client = driver.controller();
    let with = |secrets| DeleteVolumeRequest { secrets, ..delete(&volume) };
    let says = ["provisioner-deletion-secret-name"];
    refused(client.delete_volume(with(HashMap::new())).await, Code::FailedPrecondition, &says);
    let reader = context(&[("accessKeyId", "reader"), ("secretAccessKey", "reads")]);
    refused(client.delete_volume(with(reader)).await, Code::PermissionDenied, &["s3:DeleteObject"]);
    let wrong = client.delete_volume(with(secrets("hunter2"))).await.unwrap_err();
    assert_eq!(wrong.code(), Code::PermissionDenied);
    assert!(!wrong.message().contains("hunter2"), "{wrong:?}");
    assert_eq!(store.keys().len(), 1);
    client.delete_volume(delete(&volume)).await.unwrap();
    assert_eq!((store.keys(), record(&driver, &volume.volume_id)), (BTreeSet::new(), None));
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_removes_the_record_keeps_the_directory() {
    let store = Store::start().await;
    let driver = waiting(SOON).await;
    let volume = create(&driver, &store.claimed("c", &DELETES)).await;
    store.put(&["work/team/c/a"]);
    store.fault(Rule::always(Fault::Stall { ms: None }).op("ListObjectsV2"));
    let mut client = driver.controller();
    refused(client.delete_volume(delete(&volume)).await, Code::Aborted, &["0 objects so far"]);
    std::fs::remove_file(driver.dir.path().join("volumes").join(format!("{}.json", volume.volume_id)))
        .unwrap();
    client.delete_volume(delete(&volume)).await.unwrap();
    store.server.faults().clear();
    store.server.faults().release();
    // Its task is gone, and with it the request that waited.
    until("nobody asks", || store.server.stats().in_flight == 0).await;
    assert_eq!(store.keys().len(), 1);
    let _ = driver.stop().await;
}

fn in_cluster(api: &Api) -> Setup {
    Setup { records: Some(api.address.clone()), ..Setup::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_delete_one_directory_once() {
    let (store, api) = (Store::with(Config { page_max: 10, ..Config::default() }).await, Api::start().await);
    let (one, two) = (Driver::with(in_cluster(&api)).await, Driver::with(in_cluster(&api)).await);
    let volume = create(&one, &store.claimed("c", &DELETES)).await;
    let path = format!("{VOLUMES}/{}", volume.volume_id);
    assert_eq!(api.state().objects[&path]["spec"]["deletion"], "planned");
    store.put(&["work/team/d/x"]);
    for number in 0..200 {
        store.put(&[&format!("work/team/c/{number}")]);
    }
    let (mut first, mut second) = (one.controller(), two.controller());
    let (a, b) = tokio::join!(first.delete_volume(delete(&volume)), second.delete_volume(delete(&volume)));
    a.unwrap();
    b.unwrap();
    assert_eq!(store.keys(), BTreeSet::from(["work/team/d/x".to_owned()]));
    assert!(!api.state().objects.contains_key(&path));
    let _ = (one.stop().await, two.stop().await);
}

/// The one that leads no more must not delete what the next claim of that name has written.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_is_late_deletes_nothing_of_the_next_volume() {
    let (store, api) = (Store::with(Config { page_max: 10, ..Config::default() }).await, Api::start().await);
    let pace = |wait| Some(Pace { wait, settle: SOON });
    let late = Driver::with(Setup { deletion: pace(SOON), ..in_cluster(&api) }).await;
    let leader = Driver::with(Setup { deletion: pace(LIMIT), ..in_cluster(&api) }).await;
    let volume = create(&late, &store.claimed("c", &DELETES)).await;
    for number in 0..25 {
        store.put(&[&format!("work/team/c/{number:02}")]);
    }
    // It has deleted a page, and waits for the names of the next.
    store.fault(Rule::nth(Fault::Stall { ms: None }, &[2]).op("ListObjectsV2"));
    refused(late.controller().delete_volume(delete(&volume)).await, Code::Aborted, &["10 objects so far"]);
    let mut client = leader.controller();
    client.delete_volume(delete(&volume)).await.unwrap();
    assert_eq!(store.keys(), BTreeSet::new());
    let again = CreateVolumeRequest { name: "pv-again".into(), ..store.claimed("c", &DELETES) };
    create(&leader, &again).await;
    store.put(&["work/team/c/10", "work/team/c/new"]);
    let asked = api.state().seen.len();
    store.server.faults().release();
    let record = format!("GET {VOLUMES}/{}", volume.volume_id);
    until("it has asked", || api.state().seen[asked..].contains(&record)).await;
    until("it has ended", || store.server.stats().in_flight == 0).await;
    assert_eq!(store.keys().len(), 2);
    assert_eq!(store.server.stats().of("DeleteObjects"), 3, "{:?}", store.server.stats());
    let _ = (late.stop().await, leader.stop().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_stands_until_no_other_replica_can_have_anything_under_way() {
    let (store, api) = (Store::start().await, Api::start().await);
    let pace = Pace { wait: SOON, settle: 3 * SOON };
    let driver = Driver::with(Setup { deletion: Some(pace), ..in_cluster(&api) }).await;
    let volume = create(&driver, &store.claimed("c", &DELETES)).await;
    store.put(&["work/team/c/a"]);
    let path = format!("{VOLUMES}/{}", volume.volume_id);
    let mut client = driver.controller();
    refused(client.delete_volume(delete(&volume)).await, Code::Aborted, &["is deleted", "repeat the call"]);
    assert_eq!(
        (store.keys(), &api.state().objects[&path]["spec"]["deletion"]),
        (BTreeSet::new(), &"ended".into())
    );
    // No other claim gets the directory, and this one is not handed out.
    let other = CreateVolumeRequest { name: "pv-other".into(), ..store.claimed("c", &[WORK, OWN, WRITES]) };
    refused(client.create_volume(other.clone()).await, Code::Unavailable, &["is being deleted"]);
    refused(client.create_volume(store.claimed("c", &DELETES)).await, Code::Aborted, &["being deleted"]);
    // It needs no secret any more.
    let bare = DeleteVolumeRequest { secrets: HashMap::new(), ..delete(&volume) };
    let deadline = std::time::Instant::now() + LIMIT;
    while let Err(status) = client.delete_volume(bare.clone()).await {
        assert_eq!(status.code(), Code::Aborted, "{status:?}");
        assert!(std::time::Instant::now() < deadline, "{status:?}");
    }
    assert!(!api.state().objects.contains_key(&path));
    client.create_volume(other).await.unwrap();
    // A directory that no other volume can have is gone at once.
    let own = [WORK, ("path", "${pv.name}"), WRITES, DELETES[3]];
    let mut unique = store.claimed("unique", &own);
    unique.name = format!("pvc-{UID}");
    unique.parameters.insert("csi.storage.k8s.io/pv/name".into(), unique.name.clone());
    let unique = create(&driver, &unique).await;
    let begun = std::time::Instant::now();
    client.delete_volume(delete(&unique)).await.unwrap();
    assert!(begun.elapsed() < pace.settle, "{:?}", begun.elapsed());
    let _ = driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_cannot_say_so_is_none() {
    let (store, api) = (Store::start().await, Api::start().await);
    let driver = Driver::with(in_cluster(&api)).await;
    let mut client = driver.controller();
    api.state().prunes = true;
    let says = ["CRD", "deploy/manifests/base/crd.yaml"];
    refused(client.create_volume(store.claimed("c", &DELETES)).await, Code::Internal, &says);
    assert!(!api.state().objects.keys().any(|path| path.starts_with(VOLUMES)));
    // Others are as they were.
    create(&driver, &store.claimed("d", &[WORK, OWN, WRITES])).await;
    api.state().prunes = false;
    create(&driver, &store.claimed("c", &DELETES)).await;
    let _ = driver.stop().await;
}
