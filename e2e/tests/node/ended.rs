//! Another process ends a mount: it is noticed, reported and made anew, and no other mount is touched.

use crate::node_with;
use anyhow::{Result, ensure};
use e2e::clock::wait_until;
use e2e::mountinfo;
use e2e::node::{AgentOptions, Mounted, Node};
use e2e::pod::Pod;
use e2e::scenario::ended::{Ending, end, number};
use e2e::scenario::renewals::{is_dead, node as with_keys_of_its_own};
use e2e::tree::{Shape, Tree};
use proto::csi::v1::VolumeCondition;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

fn reads(pod: &Pod, tree: &Tree) -> bool {
    let right = |bytes: Vec<u8>| tree.is_whole(&tree.files[0], &bytes).unwrap_or(false);
    std::fs::read(pod.reach().join(&tree.files[0].path)).is_ok_and(right)
}

fn condition(node: &Node, mounted: &Mounted) -> Result<VolumeCondition> {
    let stats = node.plugin().stats(&mounted.id, &mounted.target)?;
    ensure!(stats.usage.len() == 2, "kubelet takes an answer without usage for a failure: {stats:?}");
    stats.volume_condition.ok_or_else(|| anyhow::anyhow!("no condition"))
}

fn wait_well(node: &Node, mounted: &Mounted) -> Result<()> {
    let is_well = || condition(node, mounted).is_ok_and(|condition| !condition.abnormal);
    ensure!(wait_until(PATIENCE, is_well), "{:?}", condition(node, mounted));
    Ok(())
}

fn renewals(node: &Node, mounted: &Mounted) -> Result<usize> {
    let heals = node.agent().heals()?;
    Ok(heals.iter().filter(|h| h.level == 4 && h.cause == "ended" && h.volume_id == mounted.id).count())
}

/// In the pod and outside.
fn mounts(node: &Node, pod: &Pod) -> Result<(usize, usize)> {
    let root = node.places().root();
    Ok((pod.mounts(root)?.len(), mountinfo::below(root)?.len()))
}

#[test]
fn what_somebody_ends_works_again_in_its_pod_and_nobody_else_notices() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let volume = node.create("v", "set", &[])?;
    let mounted = node.publish(&volume, "pod")?;
    let pod = node.pod(&mounted)?;
    let other = node.volume("w", "set", &[])?;
    let bystander = node.pod(&other)?;
    pod.verify(&tree, 1)?.ensure_all(&tree)?;
    let application = bystander.oracle(&tree, &["--pause-us", "500"])?;
    let before = mounts(&node, &pod)?;
    wait_well(&node, &mounted)?;
    let endings = [Ending::Abort, Ending::ForcedUnmount, Ending::ForcedUnmount, Ending::Abort];
    for (round, how) in endings.into_iter().enumerate() {
        let begun = Instant::now();
        end(&node, &mounted, how)?;
        ensure!(wait_until(PATIENCE, || reads(&pod, &tree)), "{how:?}: its paths do not work again");
        println!("{how:?}: paths work again after {:?}", begun.elapsed());
        pod.verify(&tree, 1)?.ensure_all(&tree)?;
        let recorded = || renewals(&node, &mounted).is_ok_and(|n| n == round + 1);
        ensure!(wait_until(PATIENCE, recorded), "{how:?}: {:?}", node.agent().heals());
        wait_well(&node, &mounted)?;
        assert_eq!(mounts(&node, &pod)?, before, "{how:?}");
        // As kubelet does from time to time.
        node.publish(&volume, "pod")?;
    }
    application.finish(PATIENCE)?.ensure_clean()?;
    let levels: Vec<_> = node.agent().heals()?.iter().map(|heal| heal.level).collect();
    assert_eq!(levels, [4; 4], "no worker was taken for dead");
    drop((pod, bystander));
    for gone in [&mounted, &other] {
        node.unpublish(gone)?;
    }
    assert_eq!(mountinfo::below(&node.places().kubelet())?, []);
    node.finish()
}

#[test]
fn the_condition_says_what_is_wrong_until_it_is_mended() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[])?;
    let pod = node.pod(&mounted)?;
    pod.verify(&tree, 1)?.ensure_all(&tree)?;
    // The source is asked before a mount is made anew, and does not answer.
    let frozen = node.server.frozen()?;
    end(&node, &mounted, Ending::Abort)?;
    let ended = || condition(&node, &mounted).is_ok_and(|c| c.abnormal && c.message.contains("its mount"));
    ensure!(wait_until(PATIENCE, ended), "{:?}", condition(&node, &mounted));
    ensure!(is_dead(&mounted.target), "it is served without its source");
    drop(frozen);
    ensure!(wait_until(PATIENCE * 2, || reads(&pod, &tree)), "its paths do not work again");
    wait_well(&node, &mounted)?;
    drop(pod);
    node.finish()
}

/// Its containers are gone, kubelet has not come to the volume yet, and another process unmounts.
#[test]
fn what_is_unmounted_while_its_pod_is_deleted_is_not_made_anew() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[])?;
    let pod = node.pod(&mounted)?;
    pod.verify(&tree, 1)?.ensure_all(&tree)?;
    pod.end()?;
    end(&node, &mounted, Ending::ForcedUnmount)?;
    let forgotten = || node.places().logs().contains("no container has it any more: forgotten");
    ensure!(wait_until(PATIENCE, forgotten), "it is not forgotten");
    ensure!(number(&mounted.target).is_err(), "it was made anew");
    let condition = condition(&node, &mounted)?;
    ensure!(condition.abnormal, "{condition:?}");
    node.unpublish(&mounted)?;
    assert_eq!(mountinfo::below(&node.places().kubelet())?, []);
    ensure!(!mounted.target.exists(), "its directory stays");
    // The next one is another mount.
    let again = node.volume("again", "set", &[])?;
    let pod = node.pod(&again)?;
    pod.verify(&tree, 1)?.ensure_all(&tree)?;
    drop(pod);
    node.finish()
}

#[test]
fn what_is_ended_while_there_is_no_broker_works_again_when_there_is_one() -> Result<()> {
    let mut node = with_keys_of_its_own()?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let volume = node.create("v", "set", &[])?;
    let mounted = node.publish_with(&volume, "pod", &[])?;
    let pod = node.pod(&mounted)?;
    pod.verify(&tree, 1)?.ensure_all(&tree)?;
    let before = mounts(&node, &pod)?;
    node.kill_plugin()?;
    end(&node, &mounted, Ending::Abort)?;
    node.start_plugin()?;
    ensure!(wait_until(PATIENCE, || reads(&pod, &tree)), "its paths do not work again");
    pod.verify(&tree, 1)?.ensure_all(&tree)?;
    wait_well(&node, &mounted)?;
    assert_eq!(mounts(&node, &pod)?, before);
    drop(pod);
    node.unpublish(&mounted)?;
    node.finish()
}

/// The kernel would end the connection after 15 s, and each one that is made anew likewise.
#[test]
fn a_slow_store_is_eio_before_the_kernels_own_limit_ends_the_mount() -> Result<()> {
    let options = AgentOptions { request_timeout: Some(15), ..AgentOptions::default() };
    let mut node = Node::start(options)?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let mounted = node.volume("v", "set", &[("storeTimeout", "1h"), ("profile", "large")])?;
    let pod = node.pod(&mounted)?;
    // Names are known, bytes are not.
    let known = std::fs::metadata(pod.reach().join(&tree.files[0].path))?;
    ensure!(known.len() == tree.files[0].size, "{known:?}");
    let frozen = node.server.frozen()?;
    let begun = Instant::now();
    let failed = std::fs::read(pod.reach().join(&tree.files[0].path)).expect_err("its bytes are nowhere");
    println!("{failed} after {:?}", begun.elapsed());
    assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{failed}");
    // One call is several requests; each of them waits for half of the limit, less what an answer takes.
    let given_up = "no proper answer from the store after 6.0 s";
    ensure!(node.places().logs().contains(given_up), "a request waits longer than the kernel would");
    drop(frozen);
    pod.verify(&tree, 1)?.ensure_all(&tree)?;
    drop(pod);
    node.finish()
}
