//! The API server is away: publish, unpublish, container restarts and heals go on. How long a warm publish takes.

use super::notebook::kill_worker;
use crate::cluster::Suite;
use crate::cluster::csi::{BY_HAND, NodeSocket};
use crate::cluster::names::*;
use crate::cluster::objects::Pod;
use crate::cluster::view::status;
use crate::cluster::waits::{PATIENCE, uid};
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

const PODS: usize = 50;
const AT_ONCE: usize = 30;
/// What the issue asks of the median.
const MEDIAN: Duration = Duration::from_millis(300);

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    let volume = suite.claim("offline")?;
    let k = &suite.kubectl;
    let volume = k.get("pv", "", &volume)?;

    // Real pods first, as many volumes at once as the check is about.
    let begun = Instant::now();
    let crowd = Pod::sleeper(TENANT, "crowd").claim("offline");
    k.apply(&[crowd.deployment(AT_ONCE as u64)])?;
    k.wait_rolled_out("deployment", TENANT, "crowd")?;
    let mounts = targets(suite)?;
    println!(
        "    {AT_ONCE} pods Ready in {:.0} s, {mounts} volumes on the node at once",
        begun.elapsed().as_secs_f64()
    );
    ensure!(mounts == AT_ONCE, "{mounts} volumes are mounted");
    k.delete("deployment", TENANT, "crowd")?;
    k.wait("the crowd gone", PATIENCE, |k| Ok(k.pods_of(TENANT, "crowd")?.is_empty().then_some(())))?;

    let pod = Pod::new(
        TENANT,
        "offline",
        "ls /data > /tmp/names; trap 'exit 0' TERM; while :; do cat /data/d000/f00000 > /dev/null || exit 1; sleep 0.1 & wait $!; done",
    );
    k.apply(&[pod.claim("offline").with("restartPolicy", "Always".into()).object()])?;
    let pod_uid = uid(&k.wait_ready(TENANT, "offline")?)?;

    suite.machine().stop_part("kube-apiserver", "KILL")?;
    let outcome = without_api(suite, &volume, &pod_uid);
    suite.machine().start_part("kube-apiserver")?;
    suite.machine().wait_for_api(k)?;
    suite.machine().wait_for_node(k)?;
    outcome?;
    k.wait("the restart known to the API server", PATIENCE, |k| {
        let pod = k.get("pod", TENANT, "offline")?;
        Ok((pod["status"]["containerStatuses"][0]["restartCount"].as_u64() == Some(1)).then_some(()))
    })?;
    k.delete("pod", TENANT, "offline")?;
    k.wait_gone("pod", TENANT, "offline").map(drop)
}

fn without_api(suite: &Suite, volume: &serde_json::Value, pod_uid: &str) -> Result<()> {
    let k = &suite.kubectl;
    ensure!(k.run(&["get", "--raw", "/readyz"]).is_err(), "the API server still answers");
    let (first, restarted) = container_restart(suite, pod_uid)?;
    publishes(suite, volume)?;
    for _ in 0..5 {
        kill_worker(suite)?;
    }
    // The shell ends with the first cat that fails: it must still be the same process.
    ensure!(shell(suite, pod_uid, &[first])? == restarted, "a read failed while the worker was healed");
    println!("    5 heals: no read failed");
    Ok(())
}

/// A container that dies is started again by kubelet alone, and finds its volume. Returns its first process, before and after.
/// This goes first: kubelet looks for the claim once a minute or so, and where it has looked in vain it refuses to start a
/// container of the pod, sometimes for minutes (1.34: an error of `processPodVolumes` fails the next `WaitForAttachAndMount`).
fn container_restart(suite: &Suite, pod_uid: &str) -> Result<(u32, u32)> {
    let first = shell(suite, pod_uid, &[])?;
    suite.view().kill(first)?;
    let restarted = shell(suite, pod_uid, &[first])?;
    let names = suite
        .kubectl
        .wait("the restarted container's listing", PATIENCE, |_| {
            let text = std::fs::read_to_string(format!("/proc/{restarted}/root/tmp/names"))?;
            Ok((!text.is_empty()).then_some(text))
        })
        .context("the restarted container does not see its volume")?;
    println!("    container restarted: it lists {} names", names.lines().count());
    Ok((first, restarted))
}

/// Process 1 of the pod's container, not a child that has not become `cat` yet, nor one of `not`.
fn shell(suite: &Suite, pod_uid: &str, not: &[u32]) -> Result<u32> {
    let view = suite.view();
    suite.kubectl.wait("the container's process", PATIENCE, |_| {
        let is_shell = |&pid: &u32| {
            let words = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let first = status(pid, "NSpid").is_ok_and(|ids| ids.split_whitespace().last() == Some("1"));
            words.contains("/tmp/names") && first && !not.contains(&pid)
        };
        Ok(view.processes_of_pod(pod_uid).into_iter().find(is_shell))
    })
}

fn publishes(suite: &Suite, volume: &serde_json::Value) -> Result<()> {
    let machine = suite.machine();
    let socket = NodeSocket::open(machine)?;
    let secrets = crate::node::secrets();
    let (mut published, mut times, mut unpublish_times) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..PODS {
        if published.len() == AT_ONCE {
            unpublish_times.push(socket.unpublish(&published.remove(0))?);
        }
        let uid = format!("00000000-0000-4000-8000-{number:012}");
        let one = socket.publish(machine, volume, &uid, &secrets)?;
        times.push(one.took);
        published.push(one);
    }
    let mounted = targets(suite)?;
    for one in &published {
        unpublish_times.push(socket.unpublish(one)?);
    }
    for number in 0..PODS {
        let target = machine.path(&format!("{BY_HAND}/00000000-0000-4000-8000-{number:012}/mount"));
        ensure!(!target.exists(), "unpublish left {}", target.display());
    }
    std::fs::remove_dir_all(machine.path(BY_HAND))?; // the suite's own
    times.sort();
    unpublish_times.sort();
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    println!(
        "    without an API server: {PODS} warm publishes median {:.1} ms, max {:.1} ms; unpublish median {:.1} ms, \
         max {:.1} ms; {mounted} volumes at once",
        ms(times[PODS / 2]),
        ms(times[PODS - 1]),
        ms(unpublish_times[PODS / 2]),
        ms(unpublish_times[PODS - 1]),
    );
    ensure!(times[PODS / 2] <= MEDIAN, "a warm publish takes {:?} in the median", times[PODS / 2]);
    ensure!(mounted > AT_ONCE, "only {mounted} volumes were mounted at once");
    Ok(())
}

/// Volumes at pods' targets.
fn targets(suite: &Suite) -> Result<usize> {
    let all = suite.view().volumes()?;
    let mut points: Vec<_> =
        all.iter().filter(|m| m.point.starts_with("/var/lib/kubelet")).map(|m| &m.point).collect();
    points.sort();
    points.dedup();
    Ok(points.len())
}
