//! What readers are promised holds for every store: the volume's source is the only difference.

use crate::node_with_options;
use anyhow::{Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Protocol};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn volumes_of_each_store_are_read_once_and_survive_their_workers() -> Result<()> {
    for store in Protocol::ALL {
        let scheme = store.name();
        let (mut node, tree) = node_with_options("set", AgentOptions::with_store(store))?;
        for profile in ["large", "small"] {
            node.server.reset()?;
            let mounted = node.volume(&format!("{scheme}-{profile}"), "set", &[("profile", profile)])?;
            let pod = node.pod(&mounted)?;
            let application = pod.oracle(&tree, &[])?;
            for _ in 0..3 {
                let worker = node.worker_of(&mounted.id, PATIENCE)?;
                node.signal_worker(worker, rustix::process::Signal::KILL)?;
                pod.verify(&tree, 2)?.ensure_all(&tree)?;
                let replaced = || node.worker_of(&mounted.id, PATIENCE).is_ok_and(|now| now != worker);
                ensure!(wait_until(PATIENCE, replaced), "{scheme}: the worker is not replaced");
            }
            application.finish(PATIENCE)?.ensure_clean()?;
            let stats = node.server.stats()?;
            println!(
                "{scheme}, {profile}: {} bytes for {} of files, {:?}",
                stats.bytes_get,
                tree.bytes(),
                stats.requests
            );
            node.server.reset()?;
            pod.verify(&tree, 2)?.ensure_all(&tree)?;
            ensure!(
                node.server.stats()?.of("GetObject") == 0,
                "{scheme}, {profile}: what is cached was fetched"
            );
            drop(pod);
            node.unpublish(&mounted)?;
            node.agent().evict_all()?;
        }
        node.finish()?;
    }
    Ok(())
}

/// As Azure's CSI driver for blobs wants it, and as a key file becomes a Secret with kubectl.
#[test]
fn a_secret_of_the_clouds_own_drivers_works_as_it_is() -> Result<()> {
    for (store, other, more) in [
        (Protocol::Azure, "azurestorageaccountkey", Some(("azurestorageaccountname", "testkit"))),
        (Protocol::Gcs, "key.json", None),
    ] {
        let (mut node, tree) = node_with_options("set", AgentOptions::with_store(store))?;
        let ours = store.secrets();
        let volume = node.create("v", "set", &[])?;
        let secrets: Vec<_> = [(other, ours[0].1.as_str())].into_iter().chain(more).collect();
        let mounted = node.publish_with(&volume, "pod", &secrets)?;
        node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
        let refused =
            node.publish_with(&volume, "another", &[("accessKeyId", "k"), ("secretAccessKey", "s")]);
        let refused = refused.unwrap_err();
        ensure!(refused.message().contains("secret"), "{refused:?}");
        node.finish()?;
    }
    Ok(())
}

/// As the documentation of Fluid with JindoCache writes it, and that of other drivers.
#[test]
fn a_secret_that_others_documentation_shows_works_as_it_is() -> Result<()> {
    let (mut node, tree) = node_with_options("set", AgentOptions::with_store(Protocol::Oss))?;
    let [(_, id), (_, secret)] = e2e::node::secrets();
    for (k, names) in [
        ["fs.oss.accessKeyId", "fs.oss.accessKeySecret"], // Fluid
        ["access-key", "secret-key"],                     // JuiceFS
        ["akId", "akSecret"],                             // Alibaba Cloud's CSI driver
    ]
    .iter()
    .enumerate()
    {
        let volume = node.create(&format!("v{k}"), "set", &[])?;
        let mounted =
            node.publish_with(&volume, &format!("pod-{k}"), &[(names[0], id), (names[1], secret)])?;
        node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
        node.unpublish(&mounted)?;
    }
    let volume = node.create("unknown", "set", &[])?;
    let refused = node.publish_with(&volume, "pod", &[("user", id), ("password", secret)]).unwrap_err();
    ensure!(refused.message().contains("accessKeyId") && !refused.message().contains(secret), "{refused:?}");
    node.finish()
}

/// Large objects are compared with their store's checksum once they are whole.
#[test]
fn a_large_object_that_was_changed_on_its_way_does_not_stay() -> Result<()> {
    use e2e::tree::{Shape, Tree};
    use testkit::faults::{Fault, Rule, Script};
    const CHANGED: &str = "millpond_cache_events_total{kind=\"changed_on_its_way\"}";
    let shape = Shape { directories: 1, files: 0, small_bytes: 0, large: 1, large_bytes: 20 << 20 };
    let tree = Tree::generated("set/", shape);
    for store in [Protocol::S3, Protocol::Oss, Protocol::Gcs] {
        let options = AgentOptions { server_flags: &["--checksums"], ..AgentOptions::with_store(store) };
        let (mut node, _) = node_with_options("other", options)?;
        node.server.add(&tree, "set")?;
        let mounted = node.volume("v", "set", &[("part", "4Mi")])?;
        let flipped = Rule::nth(Fault::FlippedBit, &[3]).op("GetObject");
        node.server.set_faults(&Script { seed: 1, rules: vec![flipped] })?;
        node.server.reset()?;
        node.agent().warm(std::slice::from_ref(&mounted.target), PATIENCE)?;
        let changed = || node.agent().stats().is_ok_and(|stats| stats.get(CHANGED) == Some(&1.0));
        ensure!(wait_until(PATIENCE, changed), "{store}: {:?}", node.agent().stats()?);
        // Nobody reads what came first.
        let pod = node.pod(&mounted)?;
        pod.verify(&tree, 1)?.ensure_all(&tree)?;
        let (once, fetched) = (tree.bytes(), node.server.stats()?.bytes_get);
        ensure!(fetched >= 2 * once && fetched < 3 * once, "{store}: {fetched} bytes of {once}");
        // What came then stays.
        node.server.reset()?;
        pod.verify(&tree, 1)?.ensure_all(&tree)?;
        ensure!(node.server.stats()?.bytes_get == 0, "{store}");
        drop(pod);
        node.finish()?;
    }
    Ok(())
}
