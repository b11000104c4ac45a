//! What people get wrong, and what they read then. Each message names the thing and says what to do.

use crate::node_with;
use anyhow::{Result, ensure};
use e2e::mountinfo;
use e2e::node::{AgentOptions, Node, Volume};
use e2e::tree::{Shape, Tree};
use std::time::{Duration, Instant};
use testkit::s3::{Config, Directory, Key, Rights, Server};
use tonic::{Code, Status};

/// Prints the message for people, checks it for machines.
fn refused<T: std::fmt::Debug>(
    what: &str,
    answer: Result<T, Status>,
    codes: &[Code],
    says: &[&str],
) -> Result<()> {
    let status = match answer {
        Ok(answer) => anyhow::bail!("{what}: accepted: {answer:?}"),
        Err(status) => status,
    };
    println!("{what}\n    {:?}: {}", status.code(), status.message());
    ensure!(codes.contains(&status.code()), "{what}: {:?} instead of {codes:?}", status.code());
    for text in says {
        let found = status.message().to_lowercase().contains(&text.to_lowercase());
        ensure!(found, "{what}: the message does not say {text:?}: {}", status.message());
    }
    Ok(())
}

#[test]
fn wrong_parameters_are_refused_by_create() -> Result<()> {
    let (mut node, _tree) = node_with("set")?;
    let invalid = [Code::InvalidArgument];
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [&'a str]);
    let cases: &[Case<'_>] = &[
        ("unknown parameter", &[("freshnes", "ttl")], &["freshnes", "did you mean", "freshness"]),
        ("bad URL", &[("source", "bucket/prefix")], &["not a URL", "s3://"]),
        ("unknown scheme", &[("source", "ftp://host/x")], &["ftp", "not supported"]),
        ("path that escapes", &[("path", "../other")], &["leave the source"]),
        ("unknown template variable", &[("path", "${pod.name}")], &["${pod.name}", "${pvc.name}"]),
        (
            "template value that escapes",
            &[("path", "${pvc.name}"), ("csi.storage.k8s.io/pvc/name", "..")],
            &["leave the source"],
        ),
        ("plain HTTP not allowed", &[("allowHttp", "false")], &["allowHttp"]),
        ("small and strict", &[("profile", "small"), ("freshness", "strict")], &["small", "strict"]),
        ("wrong duration", &[("healTimeout", "soon")], &["healTimeout", "soon", "1s to 1h"]),
    ];
    for (what, parameters, says) in cases {
        refused(what, node.create("bad", "set", parameters), &invalid, says)?;
    }
    node.finish()
}

#[test]
fn sources_that_cannot_be_read_are_refused_by_publish_and_leave_no_mount() -> Result<()> {
    let options = AgentOptions { source_wait: "4s", ..AgentOptions::default() };
    let mut node = Node::start(options)?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    // A second server whose keys may do less.
    let limited = Config {
        keys: vec![
            Key::new("list-only", "secret-1", Rights::ListOnly),
            Key::new("nothing", "secret-2", Rights::None),
        ],
        ..Config::default()
    };
    let limited = limited.bucket("data", Directory::new(node.server.dir(), Duration::from_millis(200)));
    let limited = node.runtime().block_on(Server::start(limited))?;

    let publish = |node: &Node, volume: &Volume, secrets: &[(&str, &str)]| {
        let target = node.target(volume, "pod-x").map_err(|e| Status::internal(e.to_string()))?;
        let mut request = node.publish_request(volume, &target);
        request.secrets = secrets.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        node.plugin().publish(request)
    };
    let right = e2e::node::secrets();

    let volume = node.create("missing-bucket", "", &[("source", "s3://absent-bucket/set")])?;
    refused("missing bucket", publish(&node, &volume, &right), &[Code::NotFound], &["absent-bucket"])?;
    let volume = node.create("missing-prefix", "no/such/prefix", &[])?;
    refused("missing prefix", publish(&node, &volume, &right), &[Code::NotFound], &["no/such/prefix"])?;

    let volume = node.create("keys", "set", &[])?;
    let wrong = [("accessKeyId", "nobody"), ("secretAccessKey", "x")];
    refused("unknown key", publish(&node, &volume, &wrong), &[Code::PermissionDenied], &["key"])?;
    let wrong = [("accessKeyId", right[0].1), ("secretAccessKey", "not-the-secret")];
    refused("wrong secret key", publish(&node, &volume, &wrong), &[Code::PermissionDenied], &["key"])?;
    refused("no key at all", publish(&node, &volume, &[]), &[Code::PermissionDenied], &["credentials"])?;
    let half = [("accessKeyId", "x")];
    refused("half a secret", publish(&node, &volume, &half), &[Code::InvalidArgument], &["secretAccessKey"])?;

    let endpoint = limited.endpoint();
    let volume = node.create("rights", "set", &[("endpoint", endpoint.as_str())])?;
    let nothing = [("accessKeyId", "nothing"), ("secretAccessKey", "secret-2")];
    refused("no permission", publish(&node, &volume, &nothing), &[Code::PermissionDenied], &["data"])?;

    let volume = node.create("down", "set", &[("endpoint", "http://127.0.0.1:9")])?;
    let begun = Instant::now();
    refused("endpoint down", publish(&node, &volume, &right), &[Code::Unavailable], &["127.0.0.1:9"])?;
    ensure!(
        begun.elapsed() < Duration::from_secs(10),
        "a source that is down held publish {:?}",
        begun.elapsed()
    );

    let denied = [Code::PermissionDenied, Code::InvalidArgument];
    let outside = [("source", "file:///etc"), ("endpoint", ""), ("allowHttp", "")];
    let mut parameters = node.parameters("", &outside);
    parameters.retain(|_, value| !value.is_empty());
    let answer = node.create_with("outside", &parameters).and_then(|volume| publish(&node, &volume, &[]));
    refused("directory outside the allowed roots", answer, &denied, &["/etc", "allow"])?;

    assert_eq!(mountinfo::below(&node.places().kubelet())?, [], "failed publishes left mounts");
    let logs = node.places().logs();
    for secret in ["not-the-secret", "secret-1", "secret-2", right[1].1] {
        ensure!(!logs.contains(secret), "a secret is in a log");
    }
    node.finish()
}

#[test]
fn wrong_targets_are_refused() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let volume = node.create("v", "set", &[])?;
    let wrong = [Code::InvalidArgument, Code::FailedPrecondition];

    let file = node.target(&volume, "pod-file")?;
    std::fs::write(&file, "precious")?;
    let answer = node.plugin().publish(node.publish_request(&volume, &file));
    refused("target that is a file", answer, &wrong, &["not a directory"])?;
    assert_eq!(std::fs::read_to_string(&file)?, "precious");

    let link = node.target(&volume, "pod-link")?;
    std::os::unix::fs::symlink(node.places().pods(), &link)?;
    let answer = node.plugin().publish(node.publish_request(&volume, &link));
    refused("target that is a symlink", answer, &wrong, &["symbolic link"])?;
    assert!(link.is_symlink());

    let outside = node.places().root().join("elsewhere");
    let answer = node.plugin().publish(node.publish_request(&volume, &outside));
    refused("target outside the kubelet directory", answer, &wrong, &["elsewhere"])?;

    let mounted = node.publish(&volume, "pod")?;
    node.publish(&volume, "pod")?; // the same again: a success
    assert_eq!(node.fuse_mounts()?.len(), 1);
    let mut request = node.publish_request(&volume, &mounted.target);
    request.volume_context.insert("fileMode".into(), "0400".into());
    let codes = [Code::AlreadyExists, Code::FailedPrecondition, Code::Unavailable];
    refused("second publish with other parameters", node.plugin().publish(request), &codes, &["parameters"])?;
    node.pod(&mounted)?.verify(&tree, 1)?.ensure_all(&tree)?;
    node.finish()
}

#[test]
fn an_agent_that_is_not_running_is_unavailable() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let volume = node.create("v", "set", &[])?;
    node.stop_agent()?;
    let begun = Instant::now();
    refused("agent not running", node.publish(&volume, "pod"), &[Code::Unavailable], &["agent"])?;
    ensure!(begun.elapsed() < Duration::from_secs(20), "it took {:?} to say so", begun.elapsed());
    assert_eq!(mountinfo::below(&node.places().kubelet())?, []);
    node.plugin().probe()?;
    node.start_agent()?;
    let mounted = node.publish(&volume, "pod")?;
    node.pod(&mounted)?.verify(&tree, 1)?.ensure_all(&tree)?;
    node.finish()
}
