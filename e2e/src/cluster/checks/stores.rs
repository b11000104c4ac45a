//! A claim on each kind of store, with a Secret as its users have it already.

use crate::cluster::Suite;
use crate::cluster::kubectl::Kubectl;
use crate::cluster::machine::NODE_IP;
use crate::cluster::names::*;
use crate::cluster::objects::{self, Pod};
use crate::cluster::suite::{BUCKET, SET};
use crate::cluster::waits::PATIENCE;
use crate::node::{Protocol, Server, programs, secrets};
use crate::oracle::Verified;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    suite.tenant(TENANT)?;
    let [(_, id), (_, key)] = secrets();
    let own = |protocol: Protocol, name: &str| {
        let found = protocol.secrets().into_iter().find(|(of, _)| *of == name);
        found.map(|(_, value)| value).with_context(|| format!("{protocol:?} has no {name}"))
    };
    // Whose documentation shows such a Secret.
    for (k, (name, protocol, of, secret)) in [
        ("juicefs", Protocol::S3, "Opaque", json!({ "access-key": id, "secret-key": key })),
        ("fluid", Protocol::Oss, "Opaque", json!({ "fs.oss.accessKeyId": id, "fs.oss.accessKeySecret": key })),
        ("gcloud", Protocol::Gcs, "Opaque", json!({ "key.json": own(Protocol::Gcs, "serviceAccountKey")? })),
        (
            "blob-csi",
            Protocol::Azure,
            "Opaque",
            json!({ "azurestorageaccountname": "testkit", "azurestorageaccountkey": own(Protocol::Azure, "accountKey")? }),
        ),
        ("basic-auth", Protocol::Web, "kubernetes.io/basic-auth", json!({ "username": id, "password": key })),
        ("webdav", Protocol::Dav, "kubernetes.io/basic-auth", json!({ "username": id, "password": key })),
    ]
    .into_iter()
    .enumerate()
    {
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": of,
            "metadata": { "name": name, "namespace": TENANT }, "stringData": secret,
        });
        let log = suite.machine().places().logs().join(format!("{name}-server.log"));
        let listen = format!("{NODE_IP}:{}", 9100 + k);
        let dir = suite.bucket.dir().clone();
        let server = Server::listening(protocol, &programs()?.join("s3-server"), &listen, BUCKET, dir, &log);
        one(suite, name, protocol, &server?, &secret).with_context(|| format!("{name}, {protocol:?}"))?;
    }
    hdfs(suite).context("hdfs")
}

/// Hadoop's own, on the node's address: a pod's loopback is not where it is.
fn hdfs(suite: &Suite) -> Result<()> {
    let server = Server::hdfs_at(NODE_IP, suite.bucket.dir().clone())?;
    server.rescan()?;
    let site = "<configuration><property><name>dfs.client.use.datanode.hostname</name><value>true</value></property></configuration>";
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "hdfs", "namespace": TENANT },
        "stringData": { "HADOOP_USER_NAME": "alice", "hdfs-site.xml": site },
    });
    one(suite, "hdfs", Protocol::Hdfs, &server, &secret)?;
    // It lived for that source alone.
    let view = suite.view();
    let gone = |_: &Kubectl| Ok(view.processes("hdfs-helper")?.is_empty().then_some(()));
    suite.kubectl.wait("no HDFS helper left", PATIENCE, gone)
}

/// `server` has the suite's own objects, in other words.
fn one(suite: &Suite, name: &str, protocol: Protocol, server: &Server, secret: &Value) -> Result<()> {
    let k = &suite.kubectl;
    let address = protocol.address(&server.endpoint(), SET);
    let mut parameters: Vec<(&str, &str)> =
        address.iter().map(|(name, value)| (*name, value.as_str())).collect();
    if protocol != Protocol::Hdfs {
        parameters.push(("allowHttp", "true"));
    }
    parameters.extend(protocol.parameters());
    parameters.extend(objects::with_secret(name, TENANT));
    k.apply(&[
        secret.clone(),
        objects::plain_class(name, &parameters),
        objects::claim(TENANT, name, name, "ReadOnlyMany", &[]),
    ])?;
    let script = "oracle verify --root /data --tree /trees/set.json --threads 2";
    let log = k.run_pod(TENANT, name, &Pod::new(TENANT, name, script).claim(name).object())?;
    let verified: Verified = serde_json::from_str(log.trim()).with_context(|| log.clone())?;
    let tree = suite.tree(SET);
    verified.ensure_all(tree)?;
    let stats = server.stats()?;
    println!(
        "    {name}: {} files, {} bytes, all right; the server sent {:.2}x",
        verified.files,
        verified.bytes,
        stats.bytes_get as f64 / tree.bytes() as f64
    );
    // Of a web server it is tried at publish whether it serves ranges: with one byte.
    let tried = u64::from(matches!(protocol, Protocol::Web | Protocol::Dav));
    let expected = tree.bytes() + tried;
    // A DataNode counts the checksums, of each 512 bytes four, too.
    let sums = if protocol == Protocol::Hdfs { expected / 100 } else { 0 };
    let is_once = (expected..=expected + sums).contains(&stats.bytes_get);
    ensure!(is_once, "{} bytes were fetched instead of {expected}", stats.bytes_get);
    k.delete("pvc", TENANT, name)?;
    k.wait_gone("pvc", TENANT, name)?;
    k.run(&["delete", "storageclass", name])?;
    k.delete("secret", TENANT, name)
}
