//! The S3 server as a pod, for a cluster that is not on this machine. Controlled through `kubectl port-forward`.

use super::kubectl::Kubectl;
use super::names::POD_IMAGE;
use super::objects;
use super::suite::{BUCKET, tree_map};
use crate::node::Server;
use crate::tree::Tree;
use anyhow::{Context, Result};
use serde_json::json;
use std::net::TcpListener;
use testkit::process::Process;

const NAMESPACE: &str = "millpond-e2e-store";

pub(super) fn start(kubectl: &Kubectl, trees: &[(String, Tree)]) -> Result<Server> {
    let writes: String = trees
        .iter()
        .map(|(prefix, _)| format!("oracle write --tree /trees/{prefix}.json --to /tmp/bucket/{prefix} && "))
        .collect();
    let script = format!(
        "{writes} exec s3-server --listen 0.0.0.0:9000 --bucket {BUCKET} --dir /tmp/bucket --rescan-ms 200"
    );
    let pod = objects::Pod::new(NAMESPACE, "s3", &script)
        .container_with("readinessProbe", json!({ "tcpSocket": { "port": 9000 }, "periodSeconds": 1 }));
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "s3", "namespace": NAMESPACE },
        "spec": { "selector": { "app": "s3" }, "ports": [{ "port": 9000 }] },
    });
    kubectl.apply(&[objects::namespace(NAMESPACE)])?;
    kubectl.apply(&[tree_map(NAMESPACE, trees)?, pod.object(), service])?;
    kubectl.wait_ready(NAMESPACE, "s3").with_context(|| {
        format!("the suite's store; your cluster's nodes need the image {POD_IMAGE} (e2e/cluster/images makes its tar)")
    })?;
    let service = kubectl.get("service", NAMESPACE, "s3")?;
    let address = service["spec"]["clusterIP"].as_str().context("a Service has an address")?.to_owned();
    // A port that is free now; kubectl says so when another process was faster.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut command = kubectl.command(&["port-forward", "-n", NAMESPACE, "pod/s3", &format!("{port}:9000")]);
    Server::behind(
        Process::spawn(&mut command)?,
        format!("127.0.0.1:{port}"),
        format!("http://{address}:9000"),
    )
}

pub(super) fn remove(kubectl: &Kubectl) -> Result<()> {
    for namespace in [NAMESPACE, super::names::TENANT] {
        kubectl.run(&["delete", "namespace", namespace, "--ignore-not-found"])?;
    }
    Ok(())
}
