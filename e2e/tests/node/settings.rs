//! Volumes of one source and one set of credentials share a cache, and nothing else: each keeps the settings that it was
//! published with, whatever comes after it.

use crate::node_with;
use crate::promises::errno;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Mounted, Node};
use e2e::tree::{Shape, Tree};
use std::fs;
use std::thread::JoinHandle;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_volume_that_addresses_the_store_wrongly_breaks_no_other() -> Result<()> {
    // In time: the wrong one is given up as soon as that is known.
    let mut node = Node::start(AgentOptions { source_wait: "2s", ..AgentOptions::default() })?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let limit = ("storeTimeout", "5s");
    let right = node.volume("right", "set", &[("profile", "large"), ("metadataTtl", "100ms"), limit])?;
    let pod = node.pod(&right)?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    // The bucket's name becomes part of the host's, which then is none.
    let wrong =
        node.create("wrong", "set", &[("addressingStyle", "virtual"), ("profile", "large"), limit])?;
    let published = node.publish(&wrong, "pod-wrong");
    node.agent().evict_all()?;
    pod.verify(&tree, 2)?.ensure_all(&tree).context("after another volume was published")?;
    ensure!(published.is_err(), "a volume that reaches no store was published");
    drop(pod);
    node.finish()
}

/// A look at a name that the store has to tell, and a read of bytes that it has to send.
fn asks(mounted: &Mounted, directory: &str) -> [JoinHandle<std::io::Result<u64>>; 2] {
    let (name, file) = (mounted.target.join(directory).join("f00000"), mounted.target.join("large0"));
    [
        std::thread::spawn(move || Ok(fs::metadata(name)?.len())),
        std::thread::spawn(move || Ok(fs::read(file)?.len() as u64)),
    ]
}

#[test]
fn each_volume_waits_for_the_store_as_long_as_it_says_whoever_was_published_last() -> Result<()> {
    let (mut node, _) = node_with("set")?;
    for round in ["hasty-last", "patient-last"] {
        let directory = if round == "hasty-last" { "d000" } else { "d001" };
        let mut publish = |limit: &str| -> Result<Mounted> {
            let more = [("profile", "large"), ("metadataTtl", "1h"), ("storeTimeout", limit)];
            node.volume(&format!("{round}-{limit}"), "set", &more)
        };
        let (hasty, patient) = match round {
            "hasty-last" => {
                let patient = publish("10m")?;
                (publish("2s")?, patient)
            }
            _ => (publish("2s")?, publish("10m")?),
        };
        // Names of the root are known and fresh, the directory's are not.
        for mounted in [&hasty, &patient] {
            fs::metadata(mounted.target.join("large0"))?;
        }
        node.agent().evict_all()?;
        node.server.freeze()?;
        // Whose questions the others join.
        let waiting = asks(&patient, directory);
        let asked = || node.server.stats().is_ok_and(|s| s.in_flight >= 2);
        ensure!(wait_until(PATIENCE, asked), "the patient volume never asked the store");
        let hasty_asks = asks(&hasty, directory);
        let over = || hasty_asks.iter().all(JoinHandle::is_finished);
        ensure!(wait_until(PATIENCE, over), "{round}: a volume of 2 s waits as long as its neighbour");
        for ask in hasty_asks {
            assert_eq!(errno(ask.join().expect("it does not panic")), Some(libc::EIO), "{round}");
        }
        for ask in &waiting {
            ensure!(!ask.is_finished(), "{round}: a volume of 10 min gave up with its neighbour");
        }
        node.server.no_faults()?;
        for ask in waiting {
            ensure!(ask.join().expect("it does not panic")? > 0, "{round}");
        }
        node.unpublish(&hasty)?;
        node.unpublish(&patient)?;
    }
    node.finish()
}

#[test]
fn a_cache_limit_binds_no_volume_without_one_and_goes_with_its_volume() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let large = [("profile", "large")];
    let unlimited = node.volume("unlimited", "set", &large)?;
    let pod = node.pod(&unlimited)?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    let bytes: u64 = tree.files.iter().map(|f| f.size).sum();
    let held =
        |node: &Node| -> Result<u64> { Ok(node.agent().cache()?.scopes.iter().map(|s| s.bytes).sum()) };
    ensure!(held(&node)? >= bytes, "not all is cached");

    let limited = node.volume("limited", "set", &[("profile", "large"), ("cacheLimit", "1Mi")])?;
    let second = node.pod(&limited)?;
    second.verify(&tree, 2)?.ensure_all(&tree)?;
    node.server.reset()?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    assert_eq!(
        node.server.stats()?.of("GetObject"),
        0,
        "a neighbour's limit has evicted this volume's files"
    );

    // Alone, it keeps to it.
    drop(pod);
    node.unpublish(&unlimited)?;
    let small = || held(&node).is_ok_and(|held| held <= 1 << 20);
    ensure!(wait_until(PATIENCE, small), "{} bytes are held", held(&node)?);

    // Gone, it binds no other.
    drop(second);
    node.unpublish(&limited)?;
    let again = node.volume("again", "set", &large)?;
    let pod = node.pod(&again)?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    ensure!(held(&node)? >= bytes, "the limit of a volume that is gone still holds");
    drop(pod);
    node.finish()
}

#[test]
fn no_volume_lifts_the_operators_limit() -> Result<()> {
    let mut node = Node::start(AgentOptions { scope_limit: Some("2Mi"), ..AgentOptions::default() })?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let greedy = node.volume("greedy", "set", &[("profile", "large"), ("cacheLimit", "100Gi")])?;
    let pod = node.pod(&greedy)?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    let held = || node.agent().cache().map(|c| c.scopes.iter().map(|s| s.bytes).sum::<u64>());
    ensure!(wait_until(PATIENCE, || held().is_ok_and(|held| held <= 2 << 20)), "{} bytes are held", held()?);
    drop(pod);
    node.finish()
}
