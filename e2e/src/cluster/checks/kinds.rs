//! The ways in which pods ask for a volume: sub-paths, options, groups, access modes, ephemeral, inline, static.

use super::mistakes::choosing_class;
use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::{self, Pod};
use crate::cluster::suite::{BUCKET, SET};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

const CLAIM: &str = "kinds";

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    suite.claim(CLAIM)?;
    sub_path(suite).context("subPath")?;
    read_only(suite).context("readOnly")?;
    mount_options(suite).context("mountOptions")?;
    groups_and_users(suite).context("fsGroup, runAsUser")?;
    two_claims_of_one_bucket(suite).context("two claims of one bucket")?;
    access_modes(suite).context("access modes")?;
    annotated(suite).context("a claim that names its data set")?;
    generic_ephemeral(suite).context("a generic ephemeral volume")?;
    inline(suite).context("an inline volume")?;
    static_volume(suite).context("a static PersistentVolume")?;
    suite.kubectl.delete("pvc", TENANT, CLAIM)
}

/// Runs a pod whose script must print exactly this.
fn expect(suite: &Suite, name: &str, pod: &Pod, expected: &str) -> Result<()> {
    let log = suite.kubectl.run_pod(TENANT, name, &pod.object())?;
    ensure!(log.trim() == expected, "the pod said {:?} instead of {expected:?}", log.trim());
    println!("    {name}: {}", expected.replace('\n', ", "));
    Ok(())
}

const ONE_FILE: &str = "cat /data/d000/f00000 | wc -c";

fn sub_path(suite: &Suite) -> Result<()> {
    let volume = json!({ "persistentVolumeClaim": { "claimName": CLAIM }, "name": "data" });
    let pod = Pod::new(TENANT, "sub-path", "ls /data | wc -l; cat /data/f00000 | wc -c")
        .with("volumes", json!([volume, { "name": "trees", "configMap": { "name": "trees" } }]))
        .mount(json!({ "name": "data", "mountPath": "/data", "subPath": "d001" }));
    expect(suite, "sub-path", &pod, "10\n100000")
}

fn read_only(suite: &Suite) -> Result<()> {
    let script = "touch /data/new 2>&1 | grep -o 'Read-only file system'; grep ' /data ' /proc/mounts | cut -d' ' -f4 | cut -d, -f1";
    let claim = json!({ "persistentVolumeClaim": { "claimName": CLAIM, "readOnly": true } });
    expect(
        suite,
        "read-only",
        &Pod::new(TENANT, "read-only", script).volume(claim),
        "Read-only file system\nro",
    )?;
    // Without being asked for, too: data sets are read-only.
    expect(
        suite,
        "not-asked",
        &Pod::new(TENANT, "not-asked", script).claim(CLAIM),
        "Read-only file system\nro",
    )
}

fn mount_options(suite: &Suite) -> Result<()> {
    let k = &suite.kubectl;
    let options = "grep ' /data ' /proc/mounts | cut -d' ' -f4 | tr ',' '\\n' | grep -xE 'ro|noatime|noexec' | sort | xargs";
    k.apply(&[
        suite.class("options", &[], &["ro", "noatime", "noexec"]),
        objects::claim(TENANT, "options", "options", "ReadOnlyMany", &[]),
        suite.class("bad-option", &[], &["ro", "sync"]),
        objects::claim(TENANT, "bad-option", "bad-option", "ReadOnlyMany", &[]),
    ])?;
    expect(suite, "options", &Pod::new(TENANT, "options", options).claim("options"), "noatime noexec ro")?;
    // Refused by name: at the claim already, or at the pod.
    k.apply(&[Pod::new(TENANT, "bad-option", ONE_FILE).claim("bad-option").object()])?;
    let refused = k.wait("the option refused by name", crate::cluster::waits::PATIENCE, |k| {
        for (kind, name) in [("PersistentVolumeClaim", "bad-option"), ("Pod", "bad-option")] {
            let found = k.events(TENANT, kind, name)?.into_iter().find(|e| e.message.contains("sync"));
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    })?;
    println!("    {}/{}: {}: {}", refused.kind, refused.name, refused.reason, refused.message);
    for name in ["options", "bad-option"] {
        k.delete("pod", TENANT, name)?;
        k.wait_gone("pod", TENANT, name)?;
        k.delete("pvc", TENANT, name)?;
        k.run(&["delete", "storageclass", name])?;
    }
    Ok(())
}

fn groups_and_users(suite: &Suite) -> Result<()> {
    let context = json!({ "runAsUser": 4711, "runAsGroup": 4712, "fsGroup": 4713, "runAsNonRoot": true });
    let script = format!("id -u; id -G | tr ' ' '\\n' | grep -x 4713; stat -c %g /data/large0; {ONE_FILE}");
    let pod = Pod::new(TENANT, "groups", &script).claim(CLAIM).with("securityContext", context);
    expect(suite, "groups", &pod, "4711\n4713\n4713\n100000")?;
    // Files that only their group may read, for a pod of that group and for one that is not.
    let k = &suite.kubectl;
    k.apply(&[
        suite.class("group-only", &[("fileMode", "0440"), ("dirMode", "0550")], &[]),
        objects::claim(TENANT, "group-only", "group-only", "ReadOnlyMany", &[]),
    ])?;
    let user = |group: Option<u32>| json!({ "runAsUser": 4711, "runAsGroup": 4712, "fsGroup": group });
    let member =
        Pod::new(TENANT, "member", ONE_FILE).claim("group-only").with("securityContext", user(Some(4713)));
    expect(suite, "member", &member, "100000")?;
    let stranger = Pod::new(TENANT, "stranger", "ls /data 2>&1 | grep -o 'Permission denied'");
    let stranger = stranger.claim("group-only").with("securityContext", user(None));
    expect(suite, "stranger", &stranger, "Permission denied")?;
    k.delete("pvc", TENANT, "group-only")?;
    k.run(&["delete", "storageclass", "group-only"]).map(drop)
}

fn two_claims_of_one_bucket(suite: &Suite) -> Result<()> {
    let k = &suite.kubectl;
    k.apply(&[objects::claim(TENANT, "second", CLASS, "ReadOnlyMany", &[])])?;
    let two = json!({ "persistentVolumeClaim": { "claimName": "second" }, "name": "second" });
    let pod = Pod::new(TENANT, "two", "cmp /data/large0 /second/large0 && echo same").claim(CLAIM);
    let mut object = pod.mount(json!({ "name": "second", "mountPath": "/second" })).object();
    object["spec"]["volumes"].as_array_mut().context("a pod has volumes")?.push(two);
    // Once to be warm, then with nothing to fetch: both claims share what the node has.
    k.run_pod(TENANT, "two", &object)?;
    suite.bucket.reset()?;
    let log = k.run_pod(TENANT, "two", &object)?;
    let fetched = suite.bucket.stats()?.bytes_get;
    println!("    two claims: {}, {fetched} bytes fetched", log.trim());
    ensure!(log.trim() == "same" && fetched == 0, "two claims of one bucket: {log}, {fetched} bytes fetched");
    k.delete("pvc", TENANT, "second")
}

fn access_modes(suite: &Suite) -> Result<()> {
    let k = &suite.kubectl;
    k.apply(&[objects::claim(TENANT, "once-pod", CLASS, "ReadWriteOncePod", &[])])?;
    let holder = Pod::sleeper(TENANT, "holder").claim("once-pod");
    k.apply(&[holder.object()])?;
    k.wait_ready(TENANT, "holder")?;
    k.apply(&[Pod::new(TENANT, "waits", ONE_FILE).claim("once-pod").object()])?;
    k.wait_event(TENANT, "Pod", "waits", &["ReadWriteOncePod"])?;
    k.delete("pod", TENANT, "holder")?;
    let bytes = k.wait_succeeded(TENANT, "waits")?;
    ensure!(bytes.trim() == "100000", "{bytes}");
    println!(
        "    ReadWriteOncePod: the second pod ran when the first had gone; ReadOnlyMany: all other pods of this check"
    );
    k.delete("pod", TENANT, "waits")?;
    k.wait_gone("pod", TENANT, "waits")?;
    k.delete("pvc", TENANT, "once-pod")
}

fn annotated(suite: &Suite) -> Result<()> {
    let k = &suite.kubectl;
    let source = format!("s3://{BUCKET}/{SET}/d002");
    k.apply(&[
        choosing_class(suite, "choosing"),
        objects::claim(
            TENANT,
            "chosen",
            "choosing",
            "ReadOnlyMany",
            &[(SOURCE, &source), (SECRET, S3_SECRET)],
        ),
    ])?;
    expect(suite, "chosen", &Pod::new(TENANT, "chosen", "ls /data | wc -l").claim("chosen"), "10")?;
    k.delete("pvc", TENANT, "chosen")?;
    k.run(&["delete", "storageclass", "choosing"]).map(drop)
}

fn generic_ephemeral(suite: &Suite) -> Result<()> {
    let template = json!({ "ephemeral": { "volumeClaimTemplate": { "spec": {
        "accessModes": ["ReadOnlyMany"], "storageClassName": CLASS,
        "resources": { "requests": { "storage": "1Gi" } },
    } } } });
    expect(suite, "generic", &Pod::new(TENANT, "generic", ONE_FILE).volume(template), "100000")?;
    suite.kubectl.wait_gone("pvc", TENANT, "generic-data").map(drop)
}

/// What an inline volume or a static volume says of its source.
pub(super) fn attributes(suite: &Suite) -> Value {
    json!({ "source": format!("s3://{BUCKET}/{SET}"), "endpoint": suite.endpoint(), "allowHttp": "true" })
}

fn inline(suite: &Suite) -> Result<()> {
    let pod = Pod::new(TENANT, "inline", ONE_FILE).inline(attributes(suite), Some(S3_SECRET));
    expect(suite, "inline", &pod, "100000")
}

fn static_volume(suite: &Suite) -> Result<()> {
    let k = &suite.kubectl;
    let secret = json!({ "name": S3_SECRET, "namespace": TENANT });
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": "e2e-static" },
        "spec": {
            "capacity": { "storage": "1Gi" }, "accessModes": ["ReadOnlyMany"], "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain", "claimRef": { "namespace": TENANT, "name": "static" },
            "csi": {
                "driver": DRIVER, "volumeHandle": "e2e-static", "volumeAttributes": attributes(suite),
                "nodePublishSecretRef": secret, "readOnly": true,
            },
        },
    });
    let mut claim = objects::claim(TENANT, "static", "", "ReadOnlyMany", &[]);
    claim["spec"]["volumeName"] = json!("e2e-static");
    k.apply(&[volume, claim])?;
    k.wait_bound(TENANT, "static")?;
    expect(suite, "static", &Pod::new(TENANT, "static", ONE_FILE).claim("static"), "100000")?;
    k.delete("pvc", TENANT, "static")?;
    k.wait_gone("pvc", TENANT, "static")?;
    k.run(&["delete", "pv", "e2e-static"]).map(drop)
}
