//! Pods go when they are deleted, whatever is broken underneath, and leave nothing on the node.

use super::holders::renew_pods;
use super::mistakes::without_agent;
use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::{self, Pod};
use crate::cluster::suite::{BUCKET, OTHER};
use crate::cluster::waits::{PATIENCE, uid};
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use std::time::Duration;

/// `terminationGracePeriodSeconds` of the suite's pods.
const GRACE: Duration = Duration::from_secs(2);
/// What the issue allows above it.
const MORE: Duration = Duration::from_secs(10);
const HEAL_TIMEOUT: Duration = Duration::from_secs(15);

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    suite.tenant(TENANT)?;
    // A class whose healTimeout is short, over data that nothing else reads.
    let source = format!("s3://{BUCKET}/{OTHER}");
    let timeout = format!("{}s", HEAL_TIMEOUT.as_secs());
    let class = suite.class("deletion", &[("source", &source), ("healTimeout", &timeout)], &[]);
    suite.kubectl.apply(&[class, objects::claim(TENANT, "deletion", "deletion", "ReadOnlyMany", &[])])?;
    suite.kubectl.wait_bound(TENANT, "deletion")?;
    dead_worker(suite).context("with a dead worker")?;
    hung_worker(suite).context("with a hung worker")?;
    frozen_backend(suite, "large0", false).context("with a frozen backend")?;
    frozen_backend(suite, "large1", true).context("with a frozen backend during a takeover")?;
    no_agent(suite).context("without an agent")?;
    all_holders_dead(suite).context("with broker and agent killed")?;
    suite.kubectl.delete("pvc", TENANT, "deletion")
}

/// Starts a pod; the answer is its uid.
fn start(suite: &Suite, name: &str, pod: Pod) -> Result<String> {
    suite.kubectl.apply(&[pod.claim("deletion").object()])?;
    uid(&suite.kubectl.wait_ready(TENANT, name)?)
}

/// Deletes a pod and judges how long it takes and what it leaves.
fn end(suite: &Suite, what: &str, name: &str, pod_uid: &str, limit: Duration) -> Result<()> {
    suite.kubectl.delete("pod", TENANT, name)?;
    let took = suite.kubectl.wait_gone("pod", TENANT, name)?;
    println!(
        "    {what}: gone {:.1} s after its deletion (at most {:.0} s)",
        took.as_secs_f64(),
        limit.as_secs_f64()
    );
    nothing_left(suite, pod_uid)?;
    ensure!(took <= limit, "{what}: {took:?}, longer than {limit:?}");
    Ok(())
}

/// kubelet removes a pod's directory shortly after the pod is gone from the API server.
pub(super) fn nothing_left(suite: &Suite, pod_uid: &str) -> Result<()> {
    let view = suite.view();
    suite
        .kubectl
        .wait("nothing of the pod left on the node", PATIENCE, |_| {
            let left = view.leftovers(pod_uid)?;
            ensure!(left.is_empty(), "{left:?}");
            Ok(Some(()))
        })
        .map(drop)
}

fn dead_worker(suite: &Suite) -> Result<()> {
    let pod = start(suite, "dead-worker", Pod::sleeper(TENANT, "dead-worker"))?;
    without_workers(suite, || end(suite, "dead worker", "dead-worker", &pod, GRACE + MORE))
}

/// Kills the workers, and lets none take over while `then` runs.
fn without_workers(suite: &Suite, then: impl FnOnce() -> Result<()>) -> Result<()> {
    let suspend = suite.machine().path(SUSPEND);
    std::fs::write(&suspend, "").context("the agent's directory of the node")?;
    let outcome = (|| {
        for worker in suite.view().workers()? {
            suite.view().kill(worker)?;
        }
        suite
            .kubectl
            .wait("no worker", PATIENCE, |_| Ok(suite.view().workers()?.is_empty().then_some(())))?;
        then()
    })();
    std::fs::remove_file(&suspend)?;
    outcome
}

/// It stands still, and a reader waits for it.
fn hung_worker(suite: &Suite) -> Result<()> {
    let pod = start(suite, "hung-worker", reader("hung-worker", "d000/f00000"))?;
    for worker in suite.view().workers()? {
        suite.view().signal(worker, Signal::STOP)?;
    }
    suite.kubectl.exec(TENANT, "hung-worker", "main", &["touch", "/tmp/go"])?;
    suite.kubectl.wait("a process that reads", PATIENCE, |_| Ok(reads(suite, &pod).then_some(())))?;
    end(suite, "hung worker, a process waits for it", "hung-worker", &pod, GRACE + MORE)
}

fn reads(suite: &Suite, pod_uid: &str) -> bool {
    let is_cat = |pid: u32| {
        std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|w| w.starts_with("cat\0"))
    };
    suite.view().processes_of_pod(pod_uid).into_iter().any(is_cat)
}

fn has_open(suite: &Suite, pod_uid: &str, file: &str) -> bool {
    let is_it = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.and_then(|entry| std::fs::read_link(entry.path())).is_ok_and(|path| path.ends_with(file))
    };
    let has_it = |pid: u32| std::fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|mut all| all.any(is_it));
    suite.view().processes_of_pod(pod_uid).into_iter().any(has_it)
}

/// Reads one file when the check lets it go.
fn reader(name: &str, file: &str) -> Pod {
    let script =
        format!("trap 'exit 0' TERM; while [ ! -e /tmp/go ]; do sleep 0.1; done; exec cat /data/{file}");
    Pod::new(TENANT, name, &script)
}

/// `takeover`: the worker that waits for the store is dead, and its successor has not come, when the pod is deleted.
fn frozen_backend(suite: &Suite, file: &str, takeover: bool) -> Result<()> {
    let pod = start(suite, "frozen", reader("frozen", file))?;
    suite.bucket.freeze()?;
    let outcome = (|| {
        suite.kubectl.exec(TENANT, "frozen", "main", &["touch", "/tmp/go"])?;
        // In its read, which can be killed. A worker that dies with its LOOKUP or OPEN leaves a caller that cannot be, until
        // there is a successor.
        suite.kubectl.wait("a read that hangs", PATIENCE, |_| {
            Ok((has_open(suite, &pod, file) && suite.bucket.stats()?.in_flight > 0).then_some(()))
        })?;
        let end = |when| {
            let what = format!("frozen backend, a process blocked in read{when}");
            end(suite, &what, "frozen", &pod, GRACE + MORE)
        };
        match takeover {
            true => without_workers(suite, || end(", during a takeover")),
            false => end(""),
        }
    })();
    suite.bucket.no_faults()?;
    outcome
}

fn no_agent(suite: &Suite) -> Result<()> {
    let pod = start(suite, "orphan", Pod::sleeper(TENANT, "orphan"))?;
    without_agent(suite, true)?;
    let outcome = end(suite, "no agent", "orphan", &pod, GRACE + MORE + HEAL_TIMEOUT);
    without_agent(suite, false)?;
    outcome
}

fn all_holders_dead(suite: &Suite) -> Result<()> {
    renew_pods(suite)?;
    let pod = start(suite, "stale", Pod::sleeper(TENANT, "stale"))?;
    let view = suite.view();
    let node = node_process(suite)?;
    for pid in view.processes("node-agent")?.into_iter().chain([node]) {
        view.kill(pid)?;
    }
    let outcome = end(suite, "broker and agent killed", "stale", &pod, GRACE + MORE + HEAL_TIMEOUT);
    suite.kubectl.wait_millpond()?;
    outcome?;
    let left = view.volumes()?;
    ensure!(left.is_empty(), "stale mounts: {left:?}");
    Ok(())
}

/// csi-plugin runs as node and as controller: the broker is the one that listens on the node's socket.
pub(super) fn node_process(suite: &Suite) -> Result<u32> {
    let all = suite.view().processes("csi-plugin")?;
    let is_node = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|words| words.contains("--mode=node"))
    };
    all.into_iter().find(is_node).context("no csi-plugin of a node is running")
}
