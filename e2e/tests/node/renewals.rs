//! Agent and broker are killed at once: what was open is lost, paths work again without a restart.

use crate::node_with;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::mountinfo;
use e2e::node::Node;
use e2e::pod::Pod;
use e2e::scenario::renewals::{self, is_dead};
use e2e::scenario::resources::Resources;
use e2e::tree::{Shape, Tree};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

/// In the pod and outside.
fn mounts(node: &Node, pod: &Pod) -> Result<(usize, usize)> {
    let root = node.places().root();
    Ok((pod.mounts(root)?.len(), mountinfo::below(root)?.len()))
}

#[test]
fn agent_and_broker_killed_at_once_are_survived_by_every_path() -> Result<()> {
    let mut node = renewals::node()?;
    let report = renewals::run(&mut node, 4)?;
    println!("{report}");
    ensure!(report.held_dead > 0, "what was open before cannot be served by any process: {report}");
    node.finish()
}

#[test]
fn a_volume_with_a_secret_works_again_with_its_republish() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let volume = node.create("v", "set", &[])?;
    let mounted = node.publish(&volume, "pod")?;
    let pod = node.pod(&mounted)?;
    pod.verify(&tree, 1)?.ensure_all(&tree)?;
    let before = mounts(&node, &pod)?;
    node.kill_both()?;
    node.spawn_agent()?;
    node.start_plugin()?;
    let logged = || node.places().logs().contains("no process of this node knows its secret");
    ensure!(wait_until(PATIENCE, logged), "the log does not say that a secret is missing");
    ensure!(is_dead(&mounted.target), "a process has kept a secret");
    // As kubelet does from time to time (requiresRepublish).
    node.publish(&volume, "pod")?;
    pod.verify(&tree, 1)?.ensure_all(&tree)?;
    assert_eq!(mounts(&node, &pod)?, before);
    node.finish()
}

#[test]
fn brokers_that_die_while_they_make_a_mount_anew_leave_the_rest_to_the_next() -> Result<()> {
    let mut node = renewals::node()?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let volume = node.create("v", "set", &[])?;
    let mounted = node.publish_with(&volume, "pod", &[])?;
    let pod = node.pod(&mounted)?;
    let before = mounts(&node, &pod)?;
    for step in ["broker.renewal-noted", "broker.renewal-served", "broker.renewal-put", "broker.renewed"] {
        node.kill_both()?;
        node.spawn_agent()?;
        node.options().failpoints.plugin = Some(step);
        node.spawn_plugin()?;
        ensure!(wait_until(PATIENCE, || node.plugin_has_ended()), "{step}: the broker lives");
        node.kill_plugin()?;
        // The next one dies there, too, unless the first has come so far that there is nothing left to do.
        node.spawn_plugin()?;
        let done = || std::fs::read_dir(pod.reach()).is_ok();
        ensure!(wait_until(PATIENCE, || node.plugin_has_ended() || done()), "{step}: nothing happens");
        node.kill_plugin()?;
        node.options().failpoints.plugin = None;
        node.start_plugin()?;
        let reads = || std::fs::read_dir(pod.reach()).is_ok();
        ensure!(wait_until(PATIENCE, reads), "{step}: the pod's paths do not work again");
        pod.verify(&tree, 1)?.ensure_all(&tree).context(step)?;
        assert_eq!(mounts(&node, &pod)?, before, "{step}");
        node.wait_whole(PATIENCE).context(step)?;
    }
    drop(pod);
    node.finish()
}

#[test]
fn nothing_grows_with_the_renewals() -> Result<()> {
    let mut node = renewals::node()?;
    renewals::run(&mut node, 1)?;
    let before = Resources::of(&node)?;
    renewals::run(&mut node, 3)?;
    before.ensure_same(&node)?;
    node.finish()
}
