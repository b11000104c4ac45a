//! Install, first claim, first Job, and the end of that claim.

use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::{self, Pod};
use crate::cluster::suite::SET;
use crate::oracle::Verified;
use anyhow::{Context, Result, ensure};
use std::time::Instant;

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    let k = &suite.kubectl;
    let begun = Instant::now();
    apply(suite)?;
    k.wait_millpond()?;
    println!("    everything Ready {:.1} s after kubectl apply -k", begun.elapsed().as_secs_f64());

    suite.tenant(TENANT)?;
    let begun = Instant::now();
    k.apply(&[suite.class(CLASS, &[], &[]), objects::claim(TENANT, "job", CLASS, "ReadOnlyMany", &[])])?;
    let volume = k.wait_bound(TENANT, "job")?;
    let handle = k.get("pv", "", &volume)?["spec"]["csi"]["volumeHandle"].clone();
    println!("    claim bound in {:.1} s", begun.elapsed().as_secs_f64());

    let records = k.list(RECORDS, "", &[])?;
    ensure!(
        records.iter().any(|r| r["spec"]["id"] == handle),
        "the volume {handle} has no record: {records:?}"
    );

    suite.bucket.reset()?;
    let script = "oracle verify --root /data --tree /trees/set.json --threads 2 --seed $$$$";
    k.apply(&[Pod::new(TENANT, "job", script).claim("job").job(4)])?;
    k.wait_job(TENANT, "job")?;
    let tree = suite.tree(SET);
    for pod in k.pods_of(TENANT, "job")? {
        let log = k.logs(TENANT, &pod, "main")?;
        let verified: Verified = serde_json::from_str(log.trim()).with_context(|| log.clone())?;
        verified.ensure_all(tree).with_context(|| pod.clone())?;
        println!(
            "    {pod}: {} files, {} bytes, all right, {:.2} s",
            verified.files, verified.bytes, verified.seconds
        );
    }
    let stats = suite.bucket.stats()?;
    let ratio = stats.bytes_get as f64 / tree.bytes() as f64;
    println!(
        "    the S3 server sent {} bytes for {}: {ratio:.2}x; {:?}",
        stats.bytes_get,
        tree.bytes(),
        stats.requests
    );
    ensure!(stats.bytes_get == tree.bytes(), "four pods of one node fetched {ratio:.3}x");

    k.delete("job", TENANT, "job")?;
    k.delete("pvc", TENANT, "job")?;
    k.wait_gone("pvc", TENANT, "job")?;
    k.wait_gone("pv", "", &volume)?;
    let left = k.list(RECORDS, "", &[])?;
    ensure!(!left.iter().any(|r| r["spec"]["id"] == handle), "the record of {volume} is left: {left:?}");
    if suite.is_ours() {
        let mounts = suite.view().volumes()?;
        ensure!(mounts.is_empty(), "mounts are left: {mounts:?}");
        println!("    the node has no mount of ours any more");
    }
    println!("    claim deleted: no volume, no record");
    Ok(())
}

/// The whole install, as the README says.
pub(super) fn apply(suite: &Suite) -> Result<()> {
    let overlay = suite.source().join("e2e/cluster/overlay");
    let overlay = overlay.to_str().context("the checkout's path is UTF-8")?;
    suite.kubectl.run(&["apply", "-k", overlay]).map(drop)
}
