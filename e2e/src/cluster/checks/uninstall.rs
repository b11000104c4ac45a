//! Uninstall: a clean-up on each node, then `kubectl delete -k`. Nothing stays but the cache.

use super::writable;
use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::{self, Pod};
use crate::cluster::waits::PATIENCE;
use anyhow::{Context, Result, ensure};
use std::process::Command;

/// Of the volume of which something is not in its store.
const LEFT: &str = "left-behind";
/// Of everything that the manifests may make.
const KINDS: &str = "customresourcedefinitions,csidrivers,storageclasses,clusterroles,clusterrolebindings,priorityclasses,namespaces";

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    let k = &suite.kubectl;
    suite.claim("last")?;
    k.apply(&[Pod::sleeper(TENANT, "last").claim("last").object()])?;
    k.wait_ready(TENANT, "last")?;
    // The store of another cluster is a pod that takes everything.
    if suite.is_ours() {
        leave_something(suite)?;
    }
    let refused = clean_up(suite, &[])?;
    ensure!(!refused.0, "the clean-up removed what a pod uses");
    ensure!(refused.1.contains("mounted"), "the clean-up does not say why it refuses: {}", refused.1);

    // As docs/operations.md has it: pods and claims, DaemonSets, the nodes, the rest.
    k.delete("pod", TENANT, "last")?;
    k.wait_gone("pod", TENANT, "last")?;
    let volume = k.wait_bound(TENANT, "last")?;
    k.delete("pvc", TENANT, "last")?;
    k.wait_gone("pv", "", &volume)?;
    k.run(&["delete", "pods,pvc,jobs,deployments", "--all", "-n", TENANT])?;
    k.run(&["delete", "storageclass", CLASS, LEFT, "deletion", "--ignore-not-found"])?;
    k.wait("no volume left", PATIENCE, |k| Ok(k.list("pv", "", &[])?.is_empty().then_some(())))?;
    k.run(&["delete", "daemonset", AGENT, NODE, "-n", SYSTEM, "--wait=true", "--timeout=300s"])?;
    k.wait("the DaemonSets' pods gone", PATIENCE, |k| {
        let pods = k.list("pods", SYSTEM, &["-l", "app.kubernetes.io/component in (node, agent)"])?;
        Ok(pods.is_empty().then_some(()))
    })?;
    if suite.is_ours() {
        let refused = clean_up(suite, &[])?;
        ensure!(!refused.0, "the clean-up removed what no store has");
        ensure!(refused.1.contains("1 file"), "the clean-up does not say what waits: {}", refused.1);
    }
    let done = clean_up(suite, if suite.is_ours() { &["--discard-staging"] } else { &[] })?;
    ensure!(done.0, "the clean-up failed: {}", done.1);
    ensure!(done.1.contains(CACHE), "the clean-up does not name the cache that it leaves");

    let overlay = suite.source().join("e2e/cluster/overlay");
    let overlay = overlay.to_str().context("the checkout's path is UTF-8")?;
    k.run(&["delete", "-k", overlay, "--ignore-not-found", "--timeout=240s"])?;
    k.wait("no object left", PATIENCE, |k| {
        let left = k.run(&["get", KINDS, "-l", "app.kubernetes.io/name=millpond", "-o", "name"])?;
        ensure!(left.trim().is_empty(), "objects are left: {left}");
        Ok(Some(()))
    })?;
    let named = k.run(&["get", KINDS, "-o", "name"])?;
    let left: Vec<_> = named.lines().filter(|l| l.contains("millpond") && !l.contains(TENANT)).collect();
    ensure!(left.iter().all(|l| l.contains("millpond-e2e")), "objects are left: {left:?}");
    if suite.is_ours() {
        nothing_on_the_node(suite)?;
    }
    println!("    no object left");
    Ok(())
}

/// What a pod has written stays in a staging area: its store does not take it.
fn leave_something(suite: &Suite) -> Result<()> {
    let k = &suite.kubectl;
    k.apply(&[
        writable::class(suite, LEFT, &[("writeMode", "back")]),
        objects::claim(TENANT, LEFT, LEFT, "ReadWriteMany", &[]),
        writable::writer(Pod::sleeper(TENANT, LEFT).claim(LEFT)).object(),
    ])?;
    k.wait_ready(TENANT, LEFT)?;
    writable::refuse_writes(suite)?;
    writable::shell(suite, LEFT, "echo lost > /data/lost && sync /data/lost")?;
    k.delete("pod", TENANT, LEFT)?;
    k.wait_gone("pod", TENANT, LEFT)?;
    suite.bucket.no_faults()
}

/// Whether it did its work, and what it said.
fn clean_up(suite: &Suite, arguments: &[&str]) -> Result<(bool, String)> {
    let mut command = Command::new(suite.source().join("deploy/manifests/cleanup/run"));
    command.args(arguments).env("KUBECTL", suite.kubectl.words());
    let output = command.output()?;
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    for line in text.lines() {
        println!("    {line}");
    }
    Ok((output.status.success(), text))
}

fn nothing_on_the_node(suite: &Suite) -> Result<()> {
    let view = suite.view();
    suite.kubectl.wait("no process left", PATIENCE, |_| {
        for program in [
            "csi-plugin",
            "node-agent",
            "fuse-worker",
            "csi-provisioner",
            "csi-node-driver-registrar",
            "livenessprobe",
        ] {
            ensure!(view.processes(program)?.is_empty(), "{program} still runs");
        }
        Ok(Some(()))
    })?;
    let ours = |m: &crate::mountinfo::Mount| {
        let point = m.point.to_string_lossy();
        let is_volume = m.kind == FILE_SYSTEM && m.point.starts_with(KUBELET);
        is_volume || point.starts_with("/run/millpond") || point.contains("csi.millpond.io")
    };
    let mounts: Vec<_> = suite.machine().mounts()?.into_iter().filter(ours).collect();
    ensure!(mounts.is_empty(), "mounts are left: {mounts:?}");
    let gone = [
        "/run/millpond",
        "/var/lib/kubelet/plugins/csi.millpond.io",
        "/var/lib/kubelet/plugins_registry/csi.millpond.io-reg.sock",
    ];
    for path in gone {
        ensure!(!suite.machine().path(path).exists(), "{path} is left");
    }
    let names: Vec<_> = std::fs::read_dir(suite.machine().path("/var/lib/millpond"))?
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .collect();
    println!("    on the node: no process, no mount; /var/lib/millpond holds {names:?}");
    ensure!(names == ["cache"], "more than the cache is left: {names:?}");
    Ok(())
}
