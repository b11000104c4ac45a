//! Bad input as a user meets it: what `kubectl describe` says, and that the pod starts by itself once it is mended.

use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::{self, Pod};
use crate::cluster::suite::{BUCKET, SET};
use crate::node::Protocol;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::path::PathBuf;
use testkit::s3::SECRET_KEY;

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    suite.tenant(TENANT)?;
    misspelled_parameter(suite).context("misspelled parameter")?;
    missing_secret(suite).context("missing secret")?;
    wrong_key(suite).context("wrong key")?;
    if suite.is_ours() {
        missing_bucket(suite).context("missing bucket")?;
    } else {
        println!("    not run: a missing bucket (it would need a second store)");
    }
    source_not_allowed(suite).context("a source outside the allow-list")?;
    empty_template_value(suite).context("an empty template value")?;
    class_outside_its_own_list(suite).context("a claim that leaves its class's sources")?;
    no_agent(suite).context("an agent that is not running")
}

/// A pod that reads one file and ends; it is applied before the mistake is mended and must start by itself afterwards.
fn reader(name: &str) -> Pod {
    Pod::new(TENANT, name, "cat /data/d000/f00000 | wc -c").claim(name)
}

/// Waits for the reader's good end, then removes what the mistake was about.
fn mended(suite: &Suite, name: &str, class: Option<&str>) -> Result<()> {
    let k = &suite.kubectl;
    let bytes = k.wait_succeeded(TENANT, name)?;
    ensure!(bytes.trim() == "100000", "the pod read {bytes} bytes");
    println!("    mended: the pod started by itself and read its file");
    k.delete("pod", TENANT, name)?;
    k.wait_gone("pod", TENANT, name)?;
    k.delete("pvc", TENANT, name)?;
    k.wait_gone("pvc", TENANT, name)?;
    if let Some(class) = class {
        k.run(&["delete", "storageclass", class])?;
    }
    Ok(())
}

fn claim_and_reader(suite: &Suite, name: &str, class: &str, annotations: &[(&str, &str)]) -> Result<()> {
    suite
        .kubectl
        .apply(&[objects::claim(TENANT, name, class, "ReadOnlyMany", annotations), reader(name).object()])
}

fn misspelled_parameter(suite: &Suite) -> Result<()> {
    let (k, name) = (&suite.kubectl, "misspelled");
    k.apply(&[suite.class(name, &[("freshnes", "static")], &[])])?;
    claim_and_reader(suite, name, name, &[])?;
    k.wait_event(TENANT, "PersistentVolumeClaim", name, &["freshnes", "freshness"])?;
    // Parameters of a class cannot be edited: its owner makes it anew.
    k.run(&["delete", "storageclass", name])?;
    k.apply(&[suite.class(name, &[("freshness", "static")], &[])])?;
    mended(suite, name, Some(name))
}

fn missing_secret(suite: &Suite) -> Result<()> {
    let (k, name) = (&suite.kubectl, "no-secret");
    k.apply(&[suite.class(name, &objects::with_secret("later", TENANT), &[])])?;
    claim_and_reader(suite, name, name, &[])?;
    k.wait_event(TENANT, "Pod", name, &["later", "not found"])?;
    k.apply(&[objects::secret(TENANT, "later", SECRET_KEY)])?;
    mended(suite, name, Some(name))?;
    k.delete("secret", TENANT, "later")
}

fn wrong_key(suite: &Suite) -> Result<()> {
    let (k, name) = (&suite.kubectl, "wrong-key");
    k.apply(&[
        objects::secret(TENANT, name, "not-the-key"),
        suite.class(name, &objects::with_secret(name, TENANT), &[]),
    ])?;
    claim_and_reader(suite, name, name, &[])?;
    let event = k
        .wait_event(TENANT, "Pod", name, &["s3://", "403"])
        .or_else(|_| k.wait_event(TENANT, "Pod", name, &["s3://", "denied"]))?;
    ensure!(!event.message.contains("not-the-key"), "the Event shows the secret");
    k.apply(&[objects::secret(TENANT, name, SECRET_KEY)])?;
    mended(suite, name, Some(name))?;
    k.delete("secret", TENANT, name)
}

fn missing_bucket(suite: &Suite) -> Result<()> {
    let (k, name) = (&suite.kubectl, "late");
    let source = format!("s3://late/{SET}");
    // A server of its own, which does not have that bucket yet.
    let dir = suite.machine().places().root().join("late-bucket");
    let server = |bucket: &str| {
        let program = crate::node::programs()?.join("s3-server");
        let log: PathBuf = suite.machine().places().logs().join("s3-server-late.log");
        let listen = format!("{}:9001", crate::cluster::machine::NODE_IP);
        crate::node::Server::listening(Protocol::S3, &program, &listen, bucket, dir.clone(), &log)
    };
    let early = server("another")?;
    early.add(suite.tree(SET), SET)?;
    let endpoint = early.endpoint();
    k.apply(&[suite.class(name, &[("source", &source), ("endpoint", &endpoint)], &[])])?;
    claim_and_reader(suite, name, name, &[])?;
    k.wait_event(TENANT, "Pod", name, &["late", "bucket"])?;
    drop(early);
    let _late = server("late")?;
    mended(suite, name, Some(name))
}

fn source_not_allowed(suite: &Suite) -> Result<()> {
    let (k, name) = (&suite.kubectl, "not-allowed");
    k.apply(&[suite.class(name, &[("source", "s3://forbidden/set")], &[])])?;
    claim_and_reader(suite, name, name, &[])?;
    k.wait_event(TENANT, "PersistentVolumeClaim", name, &["s3://forbidden", "allow"])?;
    k.run(&["delete", "storageclass", name])?;
    k.apply(&[suite.class(name, &[], &[])])?;
    mended(suite, name, Some(name))
}

/// The class by which claims choose: its secret must be the claim's own.
pub(super) fn choosing_class(suite: &Suite, name: &str) -> serde_json::Value {
    let allowed = format!("s3://{BUCKET}/{SET}");
    let parameters = [
        ("source", "${pvc.annotations['millpond.io/source']}"),
        ("allowedSources", allowed.as_str()),
        ("csi.storage.k8s.io/node-publish-secret-name", "${pvc.annotations['millpond.io/secret']}"),
        ("csi.storage.k8s.io/node-publish-secret-namespace", "${pvc.namespace}"),
    ];
    objects::class(name, &suite.endpoint(), &parameters, &[])
}

fn empty_template_value(suite: &Suite) -> Result<()> {
    let (k, name) = (&suite.kubectl, "empty");
    k.apply(&[choosing_class(suite, name)])?;
    claim_and_reader(suite, name, name, &[(SECRET, S3_SECRET)])?;
    k.wait_event(TENANT, "PersistentVolumeClaim", name, &[SOURCE])?;
    k.run(&["annotate", "pvc", name, "-n", TENANT, &format!("{SOURCE}=s3://{BUCKET}/{SET}")])?;
    mended(suite, name, Some(name))
}

fn class_outside_its_own_list(suite: &Suite) -> Result<()> {
    let (k, name) = (&suite.kubectl, "outside");
    k.apply(&[choosing_class(suite, name)])?;
    let elsewhere = format!("s3://{BUCKET}/{SET}-of-others");
    claim_and_reader(suite, name, name, &[(SECRET, S3_SECRET), (SOURCE, &elsewhere)])?;
    k.wait_event(TENANT, "PersistentVolumeClaim", name, &[&elsewhere, "allowedSources"])?;
    k.run(&["annotate", "--overwrite", "pvc", name, "-n", TENANT, &format!("{SOURCE}=s3://{BUCKET}/{SET}")])?;
    mended(suite, name, Some(name))
}

/// DaemonSets cannot be scaled to nothing: a selector that no node has does it.
pub(super) fn without_agent(suite: &Suite, away: bool) -> Result<()> {
    let k = &suite.kubectl;
    let value = if away { json!("away") } else { json!(null) };
    let patch =
        json!({ "spec": { "template": { "spec": { "nodeSelector": { "millpond.io/e2e": value } } } } });
    k.run(&["patch", "daemonset", AGENT, "-n", SYSTEM, "-p", &patch.to_string()])?;
    if away {
        // OnDelete: the pod of the old template is deleted by hand.
        k.run(&[
            "delete",
            "pods",
            "-n",
            SYSTEM,
            "-l",
            "app.kubernetes.io/component=agent",
            "--wait=true",
            "--timeout=240s",
        ])?;
        if suite.is_ours() {
            ensure!(suite.view().processes("node-agent")?.is_empty(), "an agent is still running");
        }
        Ok(())
    } else {
        k.wait_millpond()
    }
}

fn no_agent(suite: &Suite) -> Result<()> {
    let (k, name) = (&suite.kubectl, "lonely");
    without_agent(suite, true)?;
    let outcome = (|| {
        suite.claim(name)?;
        k.apply(&[reader(name).object()])?;
        k.wait_event(TENANT, "Pod", name, &["agent"])
    })();
    without_agent(suite, false)?;
    outcome?;
    mended(suite, name, None)
}
