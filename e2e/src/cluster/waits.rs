//! Waiting for what a cluster does in its own time: pods that run, claims that are bound, Events that appear.

use super::kubectl::{Event, Kubectl};
use super::names::*;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::time::{Duration, Instant};

/// For what takes seconds on an idle machine; nothing is judged by it.
pub const PATIENCE: Duration = Duration::from_secs(240);

impl Kubectl {
    /// Deployment or DaemonSet: everything wanted is there, current and Ready.
    pub fn wait_rolled_out(&self, kind: &str, namespace: &str, name: &str) -> Result<()> {
        self.wait(&format!("{kind}/{name} ready"), PATIENCE, |k| {
            let object = k.get(kind, namespace, name)?;
            let status = &object["status"];
            if status["observedGeneration"].as_u64() < object["metadata"]["generation"].as_u64() {
                return Ok(None);
            }
            let number = |key: &str| status[key].as_u64().unwrap_or(0);
            let (wanted, ready, current) = match kind {
                "daemonset" => (
                    number("desiredNumberScheduled"),
                    number("numberReady"),
                    number("updatedNumberScheduled"),
                ),
                _ => (
                    object["spec"]["replicas"].as_u64().unwrap_or(1),
                    number("readyReplicas"),
                    number("updatedReplicas"),
                ),
            };
            Ok((wanted > 0 && ready == wanted && current == wanted).then_some(()))
        })
        .with_context(|| self.describe("pods", namespace, ""))
    }

    /// Every part of Millpond is Ready, and kubelet knows the driver.
    pub fn wait_millpond(&self) -> Result<()> {
        self.wait_rolled_out("daemonset", SYSTEM, NODE)?;
        self.wait_rolled_out("daemonset", SYSTEM, AGENT)?;
        self.wait_rolled_out("deployment", SYSTEM, CONTROLLER)?;
        self.wait("the driver registered with kubelet", PATIENCE, |k| {
            let nodes = k.list("csinodes", "", &[])?;
            let known = |n: &Value| n["spec"]["drivers"].to_string().contains(DRIVER);
            Ok(nodes.iter().any(known).then_some(()))
        })
    }

    /// A pod whose containers are all ready. Its object is the answer.
    pub fn wait_ready(&self, namespace: &str, pod: &str) -> Result<Value> {
        self.wait(&format!("pod {pod} ready"), PATIENCE, |k| {
            let object = k.get("pod", namespace, pod)?;
            let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let ready = conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
            if object["status"]["phase"] == "Failed" {
                return Ok(Some(Err(k.failed(namespace, pod))));
            }
            Ok(ready.then_some(Ok(object)))
        })
        .with_context(|| self.of_pod(namespace, pod))?
    }

    /// A pod that does its work and ends well; the log of its container `main` is the answer.
    pub fn wait_succeeded(&self, namespace: &str, pod: &str) -> Result<String> {
        self.wait(&format!("pod {pod} done"), PATIENCE, |k| {
            Ok(match k.get("pod", namespace, pod)?["status"]["phase"].as_str() {
                Some("Succeeded") => Some(Ok(())),
                Some("Failed") => Some(Err(k.failed(namespace, pod))),
                _ => None,
            })
        })
        .with_context(|| self.of_pod(namespace, pod))??;
        self.logs(namespace, pod, "main")
    }

    /// A pod that does not run, and the claims of its namespace, on which it may wait.
    fn of_pod(&self, namespace: &str, pod: &str) -> String {
        format!("{}\n{}", self.describe("pvc", namespace, ""), self.describe("pod", namespace, pod))
    }

    fn failed(&self, namespace: &str, pod: &str) -> anyhow::Error {
        let log = self.logs(namespace, pod, "main").unwrap_or_default();
        anyhow::anyhow!("pod {pod} failed: {log}")
    }

    /// Applies a pod, waits for its good end, deletes it. The answer is its log.
    pub fn run_pod(&self, namespace: &str, name: &str, object: &Value) -> Result<String> {
        self.apply(std::slice::from_ref(object))?;
        let log = self.wait_succeeded(namespace, name)?;
        self.delete("pod", namespace, name)?;
        self.wait_gone("pod", namespace, name)?;
        Ok(log)
    }

    /// The name of the volume of a claim, once it is bound.
    pub fn wait_bound(&self, namespace: &str, claim: &str) -> Result<String> {
        self.wait(&format!("claim {claim} bound"), PATIENCE, |k| {
            let object = k.get("pvc", namespace, claim)?;
            let volume = object["spec"]["volumeName"].as_str().map(str::to_owned);
            Ok((object["status"]["phase"] == "Bound").then_some(volume).flatten())
        })
        .with_context(|| self.describe("pvc", namespace, claim))
    }

    /// Until the object is gone; how long that took.
    pub fn wait_gone(&self, kind: &str, namespace: &str, name: &str) -> Result<Duration> {
        let begun = Instant::now();
        self.wait(&format!("{kind} {name} gone"), PATIENCE, |k| {
            Ok((!k.exists(kind, namespace, name)?).then_some(()))
        })?;
        Ok(begun.elapsed())
    }

    /// A warning about an object whose message holds all of `words`; printed, because a user reads it.
    pub fn wait_event(&self, namespace: &str, kind: &str, name: &str, words: &[&str]) -> Result<Event> {
        let event = self
            .wait(&format!("an Event about {kind} {name} with {words:?}"), PATIENCE, |k| {
                let all = k.events(namespace, kind, name)?;
                Ok(all.into_iter().find(|e| e.warning && words.iter().all(|w| e.message.contains(w))))
            })
            .with_context(|| self.describe(kind, namespace, name))?;
        println!("    {}/{}: {}: {}", event.kind, event.name, event.reason, event.message);
        Ok(event)
    }

    /// Names of the pods with this label `app`.
    pub fn pods_of(&self, namespace: &str, app: &str) -> Result<Vec<String>> {
        let pods = self.list("pods", namespace, &["-l", &format!("app={app}")])?;
        Ok(pods.iter().filter_map(|p| p["metadata"]["name"].as_str().map(str::to_owned)).collect())
    }

    pub fn wait_job(&self, namespace: &str, job: &str) -> Result<()> {
        let outcome = self
            .wait(&format!("job {job} done"), PATIENCE, |k| {
                let conditions = k.get("job", namespace, job)?["status"]["conditions"]
                    .as_array()
                    .cloned()
                    .unwrap_or_default();
                let is = |kind: &str| conditions.iter().any(|c| c["type"] == kind && c["status"] == "True");
                Ok(if is("Complete") { Some(true) } else { is("Failed").then_some(false) })
            })
            .with_context(|| self.describe("job", namespace, job))?;
        if !outcome {
            let logs: Vec<_> = self.pods_of(namespace, job)?;
            bail!(
                "job {job} failed: {:?}",
                logs.iter().map(|p| self.logs(namespace, p, "main")).collect::<Vec<_>>()
            );
        }
        Ok(())
    }
}

/// `metadata.uid`, by which kubelet names a pod's directory.
pub fn uid(object: &Value) -> Result<String> {
    Ok(object["metadata"]["uid"].as_str().context("an object has a uid")?.to_owned())
}
