//! A notebook that keeps reading while its worker dies, its container restarts, kubelet and containerd restart.

use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::Pod;
use crate::cluster::waits::{PATIENCE, uid};
use crate::oracle::Report;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::Duration;

const KILLS: usize = 100;
const POD: &str = "notebook";
/// The oracle ends when its stdin does; afterwards the container stays, so that its log is the log of one life.
const ORACLE: &str = "(while [ ! -e /tmp/end ]; do sleep 0.2; done) \
    | oracle run --root /data --tree /trees/set.json --kinds pread,small,open,stat,readdir,mmap,sequential --pause-us 3000; \
    trap 'exit 0' TERM; while :; do sleep 0.2 & wait $!; done";

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    suite.claim(POD)?;
    let k = &suite.kubectl;
    let pod = Pod::new(TENANT, POD, ORACLE)
        .claim(POD)
        .container("python", "exec python3 /trees/notebook.py /data /trees/set.json");
    k.apply(&[pod.with("restartPolicy", "Always".into()).object()])?;
    let before = k.wait_ready(TENANT, POD)?;
    k.wait("the oracle at work", PATIENCE, |k| {
        Ok(k.logs(TENANT, POD, "main")?.contains("started").then_some(()))
    })?;

    let mut moments = Vec::new();
    for kill in 0..KILLS {
        if kill == KILLS * 3 / 10 {
            // The shell of an image has no better way: process 1 of the container is Python, which ends on SIGTERM.
            k.exec(TENANT, POD, "python", &["kill", "-TERM", "1"])?;
            println!("    {kill} deaths; container restarted");
        }
        if kill == KILLS / 2 {
            restart(suite, "kubelet")?;
            println!("    {kill} deaths; kubelet restarted");
        }
        if kill == KILLS * 7 / 10 {
            restart(suite, "containerd")?;
            println!("    {kill} deaths; containerd restarted");
        }
        moments.push(crate::clock::monotonic_ns());
        kill_worker(suite)?;
    }
    println!("    {KILLS} deaths");

    k.exec(TENANT, POD, "main", &["touch", "/tmp/end"])?;
    let report = k.wait("the oracle's report", PATIENCE, |k| {
        let log = k.logs(TENANT, POD, "main")?;
        Ok(log.lines().find(|l| l.starts_with('{')).map(str::to_owned))
    })?;
    let report: Report = serde_json::from_str(&report)?;
    println!("    oracle: {}", report.summary());
    let stalls = report.stalls(&moments, 50_000_000);
    println!("    a death was felt for {:.1} ms (p50), {:.1} ms (max)", stalls.p50_ms, stalls.max_ms);
    report.ensure_clean()?;

    // kubelet's word of the restart comes a moment after the restart.
    let first_life = k.wait("the log of the notebook's first life", PATIENCE, |k| {
        Ok(k.run(&["logs", "-n", TENANT, POD, "-c", "python", "--previous"]).ok())
    })?;
    for (life, log) in [("first life", first_life), ("second life", k.logs(TENANT, POD, "python")?)] {
        let last: Value = serde_json::from_str(log.lines().last().context("the notebook said nothing")?)?;
        println!("    notebook, {life}: {last}");
        ensure!(last["failed"] == 0 && last["calls"].as_u64() > Some(0), "the notebook saw failures: {log}");
    }

    let after = k.get("pod", TENANT, POD)?;
    ensure!(uid(&before)? == uid(&after)?, "another pod");
    let restarts = |name: &str| {
        let all = after["status"]["containerStatuses"].as_array()?;
        all.iter().find(|c| c["name"] == name)?["restartCount"].as_u64()
    };
    println!(
        "    restarts: oracle {:?}, notebook {:?} (asked for: 0 and 1)",
        restarts("main"),
        restarts("python")
    );
    ensure!((restarts("main"), restarts("python")) == (Some(0), Some(1)), "unasked restarts");

    for (kind, name) in [("Pod", POD), ("PersistentVolumeClaim", POD)] {
        let healed = k.wait("an Event for the heals", PATIENCE, |k| {
            let all = k.events(TENANT, kind, name)?;
            let healed: Vec<_> = all.into_iter().filter(|e| e.reason == "MountHealed").collect();
            Ok((!healed.is_empty()).then_some(healed))
        })?;
        println!("    {kind}/{name}: {}: {}", healed[0].reason, healed[0].message);
        let counted: u64 = healed.iter().map(|e| e.count).sum();
        println!("    {kind}: {} Event objects for {counted} heals", healed.len());
        ensure!(healed.len() <= 3, "not aggregated: {healed:#?}");
    }
    k.delete("pod", TENANT, POD)?;
    k.wait_gone("pod", TENANT, POD).map(drop)
}

fn restart(suite: &Suite, part: &str) -> Result<()> {
    suite.machine().stop_part(part, "TERM")?;
    suite.machine().start_part(part)?;
    suite.machine().wait_for_node(&suite.kubectl)?;
    // The node is called Ready for some time after its kubelet has gone: exec needs kubelet and containerd.
    suite
        .kubectl
        .wait("exec through kubelet", PATIENCE, |k| k.exec(TENANT, POD, "main", &["true"]).map(Some))
        .map(drop)
}

/// `kill -9` of the one worker at work; returns when a successor serves.
pub(super) fn kill_worker(suite: &Suite) -> Result<()> {
    let view = suite.view();
    let worker = |k: &crate::cluster::kubectl::Kubectl, not: u32| {
        k.wait("a worker at work", Duration::from_secs(30), |_| {
            Ok(view.workers()?.into_iter().find(|&pid| pid != not))
        })
    };
    let pid = worker(&suite.kubectl, 0)?;
    view.kill(pid)?;
    worker(&suite.kubectl, pid).map(drop)
}
