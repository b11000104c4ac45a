//! A pod that reads, maps and lists without end and judges every call: the oracle and a Python process, in two containers.

use super::Suite;
use super::kubectl::Kubectl;
use super::names::*;
use super::objects::Pod;
use super::waits::{PATIENCE, uid};
use crate::oracle::Report;
use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The oracle ends when its stdin does; afterwards the container stays, so that its log is the log of one life.
const ORACLE: &str = "(while [ ! -e /tmp/end ]; do sleep 0.2; done) \
    | oracle run --root /data --tree /trees/set.json --kinds pread,small,open,stat,readdir,mmap,sequential --pause-us 3000; \
    trap 'exit 0' TERM; while :; do sleep 0.2 & wait $!; done";

#[derive(Debug)]
pub struct Notebook {
    name: &'static str,
    uid: String,
    /// How often the Python container was asked to end.
    restarts: u64,
    /// The logs of its earlier lives, as far as they were read: kubelet promises none for longer than it has use for the
    /// dead container.
    before: Vec<String>,
}

impl Notebook {
    /// With a claim of its own name; returns once the oracle is at work.
    pub fn start(suite: &Suite, name: &'static str) -> Result<Self> {
        suite.claim(name)?;
        let k = &suite.kubectl;
        let pod = Pod::new(TENANT, name, ORACLE)
            .claim(name)
            .container("python", "exec python3 /trees/notebook.py /data /trees/set.json");
        k.apply(&[pod.with("restartPolicy", "Always".into()).object()])?;
        let uid = uid(&k.wait_ready(TENANT, name)?)?;
        k.wait("the oracle at work", PATIENCE, |k| {
            Ok(k.logs(TENANT, name, "main")?.contains("started").then_some(()))
        })?;
        Ok(Self { name, uid, restarts: 0, before: Vec::new() })
    }

    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// Ends the Python process; returns when kubelet has started its container again.
    pub fn restart_container(&mut self, suite: &Suite) -> Result<()> {
        let k = &suite.kubectl;
        // The shell of an image has no better way: process 1 of the container is Python, which ends on SIGTERM.
        k.exec(TENANT, self.name, "python", &["kill", "-TERM", "1"])?;
        self.restarted();
        // A check that stops containerd before has the start fail, and counted.
        k.wait("the container's next life", PATIENCE, |k| {
            Ok((self.lives(k)?.1 >= Some(self.restarts)).then_some(()))
        })?;
        let log = self.life_before(k)?;
        self.before.push(log);
        Ok(())
    }

    /// The log of the Python container's life before this one.
    fn life_before(&self, k: &Kubectl) -> Result<String> {
        // kubelet's word of the restart comes a moment after the restart.
        let log = k.wait("the log of the notebook's life before", PATIENCE, |k| {
            k.run(&["logs", "-n", TENANT, self.name, "-c", "python", "--previous"]).map(Some)
        });
        log.with_context(|| match k.get("pod", TENANT, self.name) {
            Ok(pod) => format!("containers: {}", pod["status"]["containerStatuses"]),
            Err(e) => format!("nor its pod: {e:#}"),
        })
    }

    /// Something else ended the Python process.
    pub fn restarted(&mut self) {
        self.restarts += 1;
    }

    /// kubelet and containerd work for this pod: the node is called Ready for some time after its kubelet has gone.
    pub fn wait_exec(&self, suite: &Suite) -> Result<()> {
        suite
            .kubectl
            .wait("exec through kubelet", PATIENCE, |k| {
                k.exec(TENANT, self.name, "main", &["true"]).map(Some)
            })
            .map(drop)
    }

    /// Ends the reading and judges it: no failed call, the same pod, no restart but those that were asked for. The report
    /// is the oracle's.
    pub fn end(&self, suite: &Suite) -> Result<Report> {
        let k = &suite.kubectl;
        k.exec(TENANT, self.name, "main", &["touch", "/tmp/end"])?;
        let report = k.wait("the oracle's report", PATIENCE, |k| {
            let log = k.logs(TENANT, self.name, "main")?;
            Ok(log.lines().find(|l| l.starts_with('{')).map(str::to_owned))
        })?;
        let report: Report = serde_json::from_str(&report)?;
        println!("    oracle: {}", report.summary());
        report.ensure_clean()?;

        let mut lives = vec![("this life", k.logs(TENANT, self.name, "python")?)];
        if (self.before.len() as u64) < self.restarts {
            lives.push(("life before", self.life_before(k)?));
        }
        lives.extend(self.before.iter().map(|log| ("earlier life", log.clone())));
        for (life, log) in lives {
            let last: Value = serde_json::from_str(log.lines().last().context("the notebook said nothing")?)?;
            println!("    notebook, {life}: {last}");
            ensure!(
                last["failed"] == 0 && last["calls"].as_u64() > Some(0),
                "the notebook saw failures: {log}"
            );
        }
        self.ensure_same_pod(suite)?;
        Ok(report)
    }

    /// How often the containers of oracle and Python were started again; those that run.
    fn lives(&self, k: &Kubectl) -> Result<(Option<u64>, Option<u64>)> {
        let pod = k.get("pod", TENANT, self.name)?;
        ensure!(uid(&pod)? == self.uid, "another pod");
        let all = pod["status"]["containerStatuses"].as_array().context("container statuses")?;
        let count = |name: &str| {
            let container = all.iter().find(|c| c["name"] == name)?;
            container["state"]["running"].is_object().then(|| container["restartCount"].as_u64())?
        };
        Ok((count("main"), count("python")))
    }

    fn ensure_same_pod(&self, suite: &Suite) -> Result<()> {
        let restarts = suite.kubectl.wait("the restarts that were asked for", PATIENCE, |k| {
            let both = self.lives(k)?;
            Ok((both.1 >= Some(self.restarts)).then_some(both))
        })?;
        println!(
            "    restarts: oracle {:?}, notebook {:?} (asked for: 0 and {})",
            restarts.0, restarts.1, self.restarts
        );
        ensure!(restarts == (Some(0), Some(self.restarts)), "unasked restarts");
        Ok(())
    }

    /// A reason has one Event on the pod and one on its claim for each life of the broker, with a count, not one for each
    /// heal.
    pub fn ensure_told(&self, suite: &Suite, reason: &str, lives: usize) -> Result<()> {
        for kind in ["Pod", "PersistentVolumeClaim"] {
            let events = suite.kubectl.wait("an Event for the heals", PATIENCE, |k| {
                let mut all = k.events(TENANT, kind, self.name)?;
                all.retain(|e| e.reason == reason);
                Ok((!all.is_empty()).then_some(all))
            })?;
            let counted: u64 = events.iter().map(|e| e.count).sum();
            println!("    {kind}/{}: {reason}: {}", self.name, events[0].message);
            println!("    {kind}: {} Event objects for {counted} heals", events.len());
            ensure!(events.len() <= lives, "not aggregated: {events:#?}");
        }
        Ok(())
    }

    pub fn delete(self, suite: &Suite) -> Result<()> {
        suite.kubectl.delete("pod", TENANT, self.name)?;
        suite.kubectl.wait_gone("pod", TENANT, self.name).map(drop)
    }
}
