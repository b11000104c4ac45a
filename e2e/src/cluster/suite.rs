//! What all checks share: the cluster, the bucket, the trees in it.

use super::kubectl::Kubectl;
use super::machine::{self, Machine, NODE_IP};
use super::names::*;
use super::objects;
use super::places::{Places, run};
use super::view::View;
use crate::node::{Protocol, Server, programs};
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Debug)]
pub struct Suite {
    pub kubectl: Kubectl,
    pub bucket: Server,
    /// None: a cluster that is not ours.
    machine: Option<Machine>,
    source: PathBuf,
    /// Prefix in the bucket → what lies there.
    trees: Vec<(String, Tree)>,
}

pub const BUCKET: &str = "data";
/// Mixed sizes, some 30 MB.
pub const SET: &str = "set";
/// A second data set, of which nothing is cached by other checks.
pub const OTHER: &str = "other";

impl Suite {
    /// A cluster of our own. The network namespace is entered here: no thread may exist yet.
    pub fn start(source: &Path, cache: &Path, image: Option<PathBuf>, logs: &Path) -> Result<Self> {
        let places = Places::create(source, cache)?;
        let images = images(&places, image)?;
        machine::enter_network()?;
        let trees = trees();
        let bucket = Server::listening(
            Protocol::S3,
            &programs()?.join("s3-server"),
            &format!("{NODE_IP}:9000"),
            BUCKET,
            places.root().join("bucket"),
            &places.logs().join("s3-server.log"),
        )?;
        for (prefix, tree) in &trees {
            bucket.add(tree, prefix)?;
        }
        let kubectl = Kubectl::new(places.program_dir("KUBERNETES")?.join("kubectl"), places.kubeconfig());
        let machine = Machine::start(places, &images, &kubectl, logs)?;
        Ok(Self { kubectl, bucket, machine: Some(machine), source: source.canonicalize()?, trees })
    }

    /// A cluster of the user's: the S3 server becomes a pod in it.
    pub fn attach(source: &Path, kubeconfig: PathBuf) -> Result<Self> {
        let kubectl = Kubectl::new("kubectl".into(), kubeconfig);
        ensure!(
            !kubectl.exists("namespace", "", SYSTEM)?,
            "Millpond is installed in that cluster already, and the suite would remove it in the end: use another cluster"
        );
        let trees = trees();
        let bucket = super::store_pod::start(&kubectl, &trees)?;
        Ok(Self { kubectl, bucket, machine: None, source: source.canonicalize()?, trees })
    }

    /// The node of our own cluster. Checks that need it are not run elsewhere.
    pub fn machine(&self) -> &Machine {
        self.machine.as_ref().expect("checks of our own cluster run only there")
    }
    pub fn machine_mut(&mut self) -> (&mut Machine, &Kubectl) {
        (self.machine.as_mut().expect("checks of our own cluster run only there"), &self.kubectl)
    }
    pub fn is_ours(&self) -> bool {
        self.machine.is_some()
    }
    pub fn view(&self) -> View<'_> {
        View(self.machine())
    }
    pub fn source(&self) -> &Path {
        &self.source
    }
    pub fn endpoint(&self) -> String {
        self.bucket.endpoint()
    }

    pub fn tree(&self, prefix: &str) -> &Tree {
        &self.trees.iter().find(|(p, _)| p == prefix).expect("checks name trees that start() made").1
    }

    /// What a namespace of the suite needs before its pods: itself, the secret, the descriptions of the trees.
    pub fn tenant(&self, namespace: &str) -> Result<()> {
        self.kubectl.apply(&[objects::namespace(namespace)])?;
        self.kubectl.apply(&[objects::good_secret(namespace), tree_map(namespace, &self.trees)?])
    }

    /// The class that most checks use: data set `set`, the secret of the first tenant.
    pub fn class(&self, name: &str, more: &[(&str, &str)], mount_options: &[&str]) -> Value {
        let source = format!("s3://{BUCKET}/{SET}");
        let mut parameters: Vec<(&str, &str)> = vec![("source", &source)];
        parameters.extend(objects::with_secret(S3_SECRET, TENANT));
        for (key, value) in more {
            parameters.retain(|(k, _)| k != key);
            parameters.push((key, value));
        }
        objects::class(name, &self.endpoint(), &parameters, mount_options)
    }

    /// Makes sure of the first tenant, its class and a bound claim, whatever ran before.
    pub fn claim(&self, name: &str) -> Result<String> {
        self.tenant(TENANT)?;
        self.kubectl.apply(&[
            self.class(CLASS, &[], &[]),
            objects::claim(TENANT, name, CLASS, "ReadOnlyMany", &[]),
        ])?;
        self.kubectl.wait_bound(TENANT, name)
    }

    /// Removes what a check left that ended in its middle: the next one counts mounts.
    pub fn clear(&self) -> Result<()> {
        for namespace in [TENANT, OTHER_TENANT] {
            self.kubectl.run(&[
                "delete",
                "deployments,jobs,pods",
                "--all",
                "-n",
                namespace,
                "--timeout=60s",
            ])?;
        }
        Ok(())
    }

    /// Why pods may not run: what the node says of itself, and the last errors of its kubelet.
    pub fn node_state(&self) -> String {
        let mut text = String::new();
        for node in self.kubectl.list("nodes", "", &[]).unwrap_or_default() {
            let taints = &node["spec"]["taints"];
            text += &format!("node {}: taints {taints}\n", node["metadata"]["name"]);
            for c in node["status"]["conditions"].as_array().into_iter().flatten() {
                text += &format!(
                    "  {} {} since {}: {} (seen {})\n",
                    c["type"], c["status"], c["lastTransitionTime"], c["message"], c["lastHeartbeatTime"]
                );
            }
        }
        let Some(machine) = &self.machine else { return text };
        let log = std::fs::read(machine.places().logs().join("kubelet.log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let errors: Vec<&str> = log.lines().filter(|line| line.starts_with('E')).collect();
        for line in &errors[errors.len().saturating_sub(12)..] {
            text += &format!("  kubelet: {line}\n");
        }
        text
    }

    /// Copies every log, and what the cluster says of itself, to where a person finds it.
    pub fn collect_logs(&self, to: &Path) -> Result<()> {
        let _ = std::fs::remove_dir_all(to); // of the run before
        std::fs::create_dir_all(to)?;
        if let Some(machine) = &self.machine {
            run(Command::new("cp").arg("-r").arg(machine.places().logs()).arg(to.join("parts")))?;
            let pods = machine.path("/var/log/pods");
            if pods.exists() {
                run(Command::new("cp").arg("-r").arg(pods).arg(to.join("pods")))?;
            }
            std::fs::write(to.join("mounts"), std::fs::read(format!("/proc/{}/mountinfo", machine.init()))?)?;
        }
        for (file, words) in [
            ("objects", "get nodes,pods,pvc,pv,daemonsets,deployments,jobs,csinodes -A -o wide"),
            ("events", "get events -A --sort-by=.lastTimestamp"),
            ("describe", "describe pods,pvc -A"),
        ] {
            let words: Vec<_> = words.split(' ').collect();
            let text = self.kubectl.run(&words).unwrap_or_else(|e| format!("{e:#}"));
            std::fs::write(to.join(file), text)?;
        }
        Ok(())
    }

    pub fn finish(self) -> Result<()> {
        drop(self.bucket);
        match self.machine {
            Some(machine) => machine.finish(),
            None => super::store_pod::remove(&self.kubectl),
        }
    }
}

fn trees() -> Vec<(String, Tree)> {
    let tree = |name: &str, directories| {
        let shape = Shape { directories, ..Shape::LITTLE };
        (name.to_owned(), Tree::generated(&format!("{name}/"), shape))
    };
    vec![tree(SET, 8), tree(OTHER, 2)]
}

/// The descriptions of the trees, for the oracles in pods, and the notebook.
pub(super) fn tree_map(namespace: &str, trees: &[(String, Tree)]) -> Result<Value> {
    let mut data = json!({
        "notebook.py": include_str!("../../cluster/notebook.py"),
        "workspace.py": include_str!("../../cluster/workspace.py"),
        "jupyter.py": include_str!("../../jupyter/notebook.py"),
    });
    for (prefix, tree) in trees {
        data[format!("{prefix}.json")] = json!(serde_json::to_string(tree)?);
    }
    Ok(json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": "trees", "namespace": namespace }, "data": data,
    }))
}

/// Millpond's image and the suite's own, as tars.
fn images(places: &Places, image: Option<PathBuf>) -> Result<Vec<PathBuf>> {
    let programs = programs()?;
    let output = Command::new(places.script("images")).arg(places.cache()).arg(&programs).output()?;
    if !output.status.success() {
        anyhow::bail!("e2e/cluster/images: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8(output.stdout)?;
    let mut all: Vec<PathBuf> = text.lines().map(PathBuf::from).collect();
    let made = |tar: &str, programs: &Path, more: &[&str]| -> Result<PathBuf> {
        let tar = places.root().join(tar);
        let mut command = Command::new(places.source().join("scripts/image"));
        run(command.args(more).arg("--output").arg(&tar).env("MILLPOND_BIN", programs))
            .context("scripts/image makes Millpond's image")?;
        Ok(tar)
    };
    all.push(match image {
        Some(image) => image,
        None => made("millpond.tar", &programs, &[])?,
    });
    all.push(made("millpond-next.tar", &programs.join("versions/next"), &["--name", NEXT_IMAGE])?);
    Ok(all)
}
