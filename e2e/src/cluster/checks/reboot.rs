//! The node loses its power: what the boot before left is cleaned, pods come back, the cache is warm.

use super::writable;
use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::{self, Pod};
use crate::cluster::suite::SET;
use crate::cluster::waits::{PATIENCE, uid};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::Path;
use std::time::Instant;

const PENDING: &str = "pending";
const FORMER: &str = "00000000-0000-0000-0000-000000000000";

const VERIFY: &str = "oracle verify --root /data --tree /trees/set.json --threads 2 > /tmp/report && touch /tmp/good; \
    trap 'exit 0' TERM; while :; do sleep 0.2 & wait $!; done";

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    suite.claim("reboot")?;
    let app = Pod::new(TENANT, "reboot", VERIFY).claim("reboot").deployment(2);
    suite.kubectl.apply(&[app])?;
    suite.kubectl.wait_rolled_out("deployment", TENANT, "reboot")?;
    all_verified(suite)?;
    // A pod of its own, deleted while the node is down: only kubelet comes back for its directory.
    let k = &suite.kubectl;
    k.apply(&[Pod::sleeper(TENANT, "gone").claim("reboot").object()])?;
    let gone = uid(&k.wait_ready(TENANT, "gone")?)?;
    let mounted = suite.view().volumes()?.len();
    println!("    before: {mounted} mounts");

    let written = pending(suite).context("a volume that was written to")?;
    suite.bucket.reset()?;
    let begun = Instant::now();
    let (machine, kubectl) = suite.machine_mut();
    machine.reboot(kubectl, |places| {
        // The kernel of this machine has not been booted again, and containers see its boot id: make the plugin's records
        // of targets what they would be then.
        let changed = records(&places.root().join("disk/millpond/csi/targets"), |record| {
            record["boot"] = FORMER.into()
        })?;
        println!("    power off; {changed} targets are on record");
        ensure!(changed >= 3, "the plugin does not record its targets");
        Ok(())
    })?;
    let k = &suite.kubectl;
    k.delete("pod", TENANT, "gone")?;
    // The API server still shows the state of before: look at the node.
    for program in ["csi-plugin", "node-agent"] {
        k.wait(program, PATIENCE, |_| Ok((!suite.view().processes(program)?.is_empty()).then_some(())))?;
    }
    k.wait_millpond()?;
    println!("    Millpond Ready {:.0} s after the power failed", begun.elapsed().as_secs_f64());
    k.wait_gone("pod", TENANT, "gone")?;
    super::deletion::nothing_left(suite, &gone)?;
    k.wait_rolled_out("deployment", TENANT, "reboot")?;
    all_verified(suite)?;
    println!("    pods are back {:.0} s after it, and read everything right", begun.elapsed().as_secs_f64());
    sent(suite, &written).context("a volume that was written to")?;
    let mut former = 0;
    let all = records(&suite.machine().path("/var/lib/millpond/csi/targets"), |record| {
        former += usize::from(record["boot"] == FORMER);
    })?;
    println!("    targets on record: {all}, of them of the boot before: {former}");
    ensure!(former == 0, "records of the boot before are left");
    let stats = suite.bucket.stats()?;
    println!("    the S3 server sent {} bytes of files; {:?}", stats.bytes_get, stats.requests);
    ensure!(stats.bytes_get == 0, "the cache was not warm: {} bytes fetched again", stats.bytes_get);
    // The machine knows one mount for each pod, and the plugin's table no other.
    suite.kubectl.delete("deployment", TENANT, "reboot")?;
    suite
        .kubectl
        .wait("the pods gone", PATIENCE, |k| Ok(k.pods_of(TENANT, "reboot")?.is_empty().then_some(())))?;
    suite
        .kubectl
        .wait("no mount left", PATIENCE, |_| Ok(suite.view().volumes()?.is_empty().then_some(())))?;
    suite.kubectl.delete("pvc", TENANT, "reboot")
}

/// A pod that has written what its store does not take. Its volume is the answer.
fn pending(suite: &Suite) -> Result<String> {
    let k = &suite.kubectl;
    k.apply(&[
        writable::class(suite, PENDING, &[("writeMode", "back")]),
        objects::claim(TENANT, PENDING, PENDING, "ReadWriteMany", &[]),
    ])?;
    let volume = k.wait_bound(TENANT, PENDING)?;
    let app = writable::writer(Pod::sleeper(TENANT, PENDING).claim(PENDING)).deployment(1);
    k.apply(&[app])?;
    k.wait_rolled_out("deployment", TENANT, PENDING)?;
    writable::refuse_writes(suite)?;
    let pod = only_pod(suite)?;
    writable::shell(suite, &pod, "seq 100000 > /data/numbers && sync /data/numbers")?;
    ensure!(writable::object(suite, &volume, "numbers").is_none(), "the store has it");
    Ok(volume)
}

/// It is there for the pod of after, and goes to the store once that takes it.
fn sent(suite: &Suite, volume: &str) -> Result<()> {
    let k = &suite.kubectl;
    k.wait_rolled_out("deployment", TENANT, PENDING)?;
    let pod = only_pod(suite)?;
    let numbers = writable::shell(suite, &pod, "cat /data/numbers")?;
    ensure!(numbers.lines().eq((1..=100_000).map(|n| n.to_string())), "{} bytes", numbers.len());
    ensure!(writable::object(suite, volume, "numbers").is_none(), "the store has it");
    suite.bucket.no_faults()?;
    k.wait("what was pending in the store", PATIENCE, |_| {
        Ok((writable::object(suite, volume, "numbers").as_deref() == Some(numbers.as_bytes())).then_some(()))
    })?;
    println!("    what was written and not uploaded before the power failed is there, and went to the store");
    k.delete("deployment", TENANT, PENDING)?;
    k.wait("its pod gone", PATIENCE, |k| Ok(k.pods_of(TENANT, PENDING)?.is_empty().then_some(())))?;
    k.delete("pvc", TENANT, PENDING)?;
    k.run(&["delete", "storageclass", PENDING]).map(drop)
}

fn only_pod(suite: &Suite) -> Result<String> {
    suite.kubectl.wait("one pod of the Deployment", PATIENCE, |k| {
        let mut pods = k.pods_of(TENANT, PENDING)?;
        Ok((pods.len() == 1).then(|| pods.remove(0)))
    })
}

/// Looks at each of the plugin's records of targets, and writes back what was changed.
fn records(directory: &Path, mut look: impl FnMut(&mut Value)) -> Result<usize> {
    let mut count = 0;
    for entry in std::fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "json") {
            continue; // being written
        }
        let mut record: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        let before = record.clone();
        look(&mut record);
        if record != before {
            std::fs::write(&path, record.to_string())?;
        }
        count += 1;
    }
    Ok(count)
}

/// Every pod of the Deployment that runs has read the whole data set.
fn all_verified(suite: &Suite) -> Result<()> {
    let k = &suite.kubectl;
    let tree = suite.tree(SET);
    k.wait("two pods that have read everything", PATIENCE, |k| {
        let mut good = 0;
        for pod in k.pods_of(TENANT, "reboot")? {
            let text = k.exec(TENANT, &pod, "main", &["cat", "/tmp/good", "/tmp/report"])?;
            let verified: crate::oracle::Verified = serde_json::from_str(text.trim())?;
            verified.ensure_all(tree)?;
            good += 1;
        }
        Ok((good == 2).then_some(()))
    })
    .context("the data set is not right")
}
