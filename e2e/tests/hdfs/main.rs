//! Volumes on HDFS through the CSI sockets, against Hadoop itself: `scripts/stores hdfs` installs it and runs this,
//! `scripts/stores hdfs-plain` the tests that need neither a second NameNode nor a KDC.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use e2e::clock::wait_until;
use e2e::node::{ALICE, AgentOptions, BUCKET, Mounted, Node, Protocol};
use e2e::processes;
use e2e::scenario::memory;
use e2e::tree::{Shape, Tree};
use rustix::process::Signal;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};
use tonic::Code;

const PATIENCE: Duration = Duration::from_secs(60);

/// `mode`: plain, ha or kerberos.
fn node(mode: &'static [&'static str], options: AgentOptions) -> Result<(Node, Tree)> {
    let node = Node::start(AgentOptions { server_flags: mode, ..options })?;
    let shape = Shape { directories: 4, files: 40, small_bytes: 30_000, large: 2, large_bytes: 40 << 20 };
    let tree = Tree::generated("", shape);
    node.server.add(&tree, "set")?;
    Ok((node, tree))
}

fn plain() -> AgentOptions {
    AgentOptions::with_store(Protocol::Hdfs)
}

fn proc(pid: u32, file: &str) -> Result<String> {
    Ok(String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/{file}"))?).into_owned())
}

#[test]
fn a_plain_volume_is_read_once_while_workers_and_helpers_are_killed() -> Result<()> {
    let (mut node, tree) = node(&["plain"], plain())?;
    for profile in ["large", "small"] {
        node.server.reset()?;
        let mounted = node.volume(&format!("v-{profile}"), "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        let application = pod.oracle(&tree, &[])?;
        for _ in 0..3 {
            let worker = node.worker_of(&mounted.id, PATIENCE)?;
            node.signal_worker(worker, Signal::KILL)?;
            for helper in node.helpers() {
                processes::kill_child(helper, node.agent().pid())?;
            }
            pod.verify(&tree, 2)?.ensure_all(&tree)?;
        }
        application.finish(PATIENCE)?.ensure_clean()?;
        let stats = node.server.stats()?;
        println!("{profile}: {} bytes for {} of files, {:?}", stats.bytes_get, tree.bytes(), stats.requests);
        // A helper that dies with its answer half read is asked for the rest of a part again.
        let (fetched, whole) = (stats.bytes_get, tree.bytes());
        ensure!(fetched >= whole && fetched < whole + whole / 2, "{profile}: {fetched} bytes of {whole}");
        node.server.reset()?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        ensure!(node.server.stats()?.bytes_get == 0, "{profile}: what is cached was fetched");
        drop(pod);
        node.unpublish(&mounted)?;
        node.agent().evict_all()?;
    }
    ensure!(wait_until(PATIENCE, || node.helpers().is_empty()), "a helper outlives its volumes");
    node.finish()
}

#[test]
fn a_plain_helper_has_no_rights_and_knows_no_more_than_it_must() -> Result<()> {
    let (mut node, tree) = node(&["plain"], plain())?;
    let mounted = node.volume("v", "set", &[])?;
    node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
    let all = node.helpers();
    let [helper] = all[..] else { anyhow::bail!("{all:?}") };
    let status = proc(helper, "status")?;
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1)).unwrap_or_default().to_owned()
    };
    let agent = proc(node.agent().pid(), "status")?;
    ensure!(agent.contains(&format!("Uid:\t{}", field("Uid:"))) && field("Uid:") != "0", "{status}");
    ensure!(field("NoNewPrivs:") == "1" && field("Seccomp:") == "2", "{status}");
    ensure!(field("CapEff:").trim_matches('0').is_empty(), "{status}");
    ensure!(proc(helper, "environ")?.trim_matches('\0').is_empty());
    let words = proc(helper, "cmdline")?;
    ensure!(!words.contains("alice") && !words.contains("set"), "{words:?}");
    println!("helper {helper}: VmRSS {} kB", field("VmRSS:"));
    // The broker is asked for it beside the helper's work. Where it can make none, it says so.
    let of_agent = proc(node.agent().pid(), "cgroup")?;
    let is_apart = || proc(helper, "cgroup").is_ok_and(|groups| groups != of_agent);
    ensure!(!memory::is_writable()? || wait_until(PATIENCE, is_apart), "it has no memory group of its own");
    node.finish()
}

#[test]
fn plain_mistakes_are_named_at_the_publish() -> Result<()> {
    let (mut node, _) = node(&["plain"], plain())?;
    let port = node.server.told().last().cloned().context("a port")?;
    node.server.hadoop(&format!("mkdir {}", testkit::hdfs::Hdfs::name("/closed")))?;
    node.server.hadoop(&format!("chmod {} 700", testkit::hdfs::Hdfs::name("/closed")))?;
    let source = |path: &str| format!("hdfs://127.0.0.1:{port}/{path}");
    let mut refused =
        |name: &str, pairs: &[(&str, &str)], secrets: &[(&str, &str)]| -> Result<tonic::Status> {
            let pairs = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            let parameters: HashMap<_, _> = pairs.collect();
            let status = match node.create_with(name, &parameters) {
                Err(status) => status,
                Ok(volume) => {
                    let published = node.publish_with(&volume, "pod", secrets);
                    published.err().with_context(|| format!("{name} was published"))?
                }
            };
            println!("{name}: {:?} {}", status.code(), status.message());
            Ok(status)
        };
    let says = |status: tonic::Status, word: &str| -> Result<()> {
        ensure!(status.message().contains(word), "{status:?}");
        Ok(())
    };
    let alice = [("hdfsUser", "alice")];
    let closed = refused("closed", &[("source", &source("closed"))], &alice)?;
    ensure!(closed.code() == Code::PermissionDenied, "{closed:?}");
    says(closed, "alice")?;
    says(refused("nothing", &[("source", &source("nothing"))], &alice)?, "check 'source'")?;
    says(refused("view", &[("source", "viewfs://cluster/x")], &alice)?, "from several file systems")?;
    let elsewhere = [("source", "hdfs://169.254.169.254/x")];
    says(refused("elsewhere", &elsewhere, &alice)?, "hdfs.networks")?;
    let both = [("source", source(BUCKET)), ("hdfsUser", "bob".to_owned())];
    let both = both.each_ref().map(|(name, value)| (*name, value.as_str()));
    says(refused("both", &both, &alice)?, "the secret says another")?;
    let unknown = [("source", source(BUCKET)), ("hadoopConfig", "prod".to_owned())];
    let unknown = unknown.each_ref().map(|(name, value)| (*name, value.as_str()));
    says(refused("unknown", &unknown, &alice)?, "this node does not have")?;
    let keys = [("accessKeyId", "a"), ("secretAccessKey", "b")];
    says(refused("keys", &[("source", &source(BUCKET))], &keys)?, "with which no HDFS is asked")?;
    says(refused("raw", &[("source", &source(BUCKET))], &[("principal", "a"), ("keytab", "?")])?, "base64")?;
    node.finish()
}

#[test]
fn plain_owner_and_mode_are_hadoops_if_the_volume_wants_them() -> Result<()> {
    let (mut node, tree) = node(&["plain"], plain())?;
    let file = tree.files.first().context("a file")?;
    let path = testkit::hdfs::Hdfs::name(&format!("/{BUCKET}/set/{}", file.path));
    node.server.hadoop(&format!("chown {path} alice 3000"))?;
    node.server.hadoop(&format!("chmod {path} 640"))?;
    let shown = |mounted: &Mounted| -> Result<_> {
        let seen = std::fs::metadata(mounted.target.join(&file.path))?;
        Ok((seen.uid(), seen.gid(), seen.mode() & 0o7777))
    };
    let volumes = node.volume("volumes", "set", &[("uid", "7")])?;
    let sources = node.volume("sources", "set", &[("uid", "7"), ("attributes", "source")])?;
    ensure!(shown(&volumes)? == (7, 0, 0o444), "{:?}", shown(&volumes));
    ensure!(shown(&sources)? == (ALICE, 3000, 0o640), "{:?}", shown(&sources));
    node.server.reset()?;
    // Both have one cache.
    node.pod(&volumes)?.verify(&tree, 2)?.ensure_all(&tree)?;
    let read = node.pod(&sources)?.command("cat")?.arg(sources.target.join(&file.path)).output()?;
    ensure!(!read.status.success(), "a pod of another user's read it");
    node.finish()
}

#[test]
fn ha_an_epoch_goes_on_through_a_failover_and_a_dead_datanode() -> Result<()> {
    let (mut node, tree) = node(&["ha"], plain())?;
    let ports: Vec<_> = node.server.told().iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let parameters = HashMap::from([
        ("source".to_owned(), format!("hdfs://millpond/{BUCKET}/set")),
        ("nameNodes".to_owned(), ports.join(",")),
    ]);
    let volume = node.create_with("v", &parameters)?;
    let mounted = node.publish(&volume, "pod")?;
    let pod = node.pod(&mounted)?;
    let application = pod.oracle(&tree, &[])?;
    let begun = Instant::now();
    let reading = pod.start_verify(&tree, 2, 0)?;
    for step in ["failover 1", "stop-datanode 1", "failover 0"] {
        node.server.hadoop(step)?;
        println!("{step} after {:?}", begun.elapsed());
        node.agent().evict_all()?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    reading.finish(PATIENCE)?.ensure_all(&tree)?;
    let report = application.finish(PATIENCE)?;
    println!("{}", report.summary());
    report.ensure_clean()?;
    drop(pod);
    node.finish()
}

#[test]
fn kerberos_with_a_keytab_of_the_secret_and_with_another_users() -> Result<()> {
    let (mut node, tree) = node(&["kerberos"], plain())?;
    let told = node.server.told();
    let [realm, kdc, port] = &told[..] else { anyhow::bail!("{told:?}") };
    let krb5_conf = format!(
        "[libdefaults]\n default_realm = {realm}\n dns_lookup_kdc = false\n rdns = false\n udp_preference_limit = 1\n\
         [realms]\n {realm} = {{\n  kdc = 127.0.0.1:{kdc}\n }}\n[domain_realm]\n localhost = {realm}\n"
    );
    let keytab = BASE64_STANDARD.encode(std::fs::read(node.server.hadoop_place()?.join("user.keytab"))?);
    let principal = format!("alice@{realm}");
    let site = "<configuration><property><name>dfs.data.transfer.protection</name><value>privacy</value></property></configuration>";
    let secrets = [
        ("principal", principal.as_str()),
        ("keytab", keytab.as_str()),
        ("krb5.conf", krb5_conf.as_str()),
        ("hdfs-site.xml", site),
    ];
    let parameters = HashMap::from([("source".to_owned(), format!("hdfs://localhost:{port}/{BUCKET}/set"))]);
    let volume = node.create_with("v", &parameters)?;
    let wrong = [("principal", "mallory"), ("keytab", keytab.as_str()), ("krb5.conf", krb5_conf.as_str())];
    let refused = node.publish_with(&volume, "mallory", &wrong).unwrap_err();
    let without = node.publish_with(&volume, "without", &secrets[..3]).unwrap_err();
    println!("without its hdfs-site.xml: {:?} {}", without.code(), without.message());
    ensure!(without.message().contains("dfs.data.transfer.protection"), "{without:?}");
    println!("another user's keytab: {:?} {}", refused.code(), refused.message());
    ensure!(refused.code() == Code::PermissionDenied, "{refused:?}");
    let mounted = node.publish_with(&volume, "pod", &secrets)?;
    let pod = node.pod(&mounted)?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    for helper in node.helpers() {
        ensure!(
            !proc(helper, "environ")?.contains(realm.as_str()) && !proc(helper, "cmdline")?.contains("alice")
        );
    }
    drop(pod);
    node.finish()
}
