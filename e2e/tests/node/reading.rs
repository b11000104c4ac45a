//! A claim becomes a directory, and its bytes are fetched once.

use crate::node_with;
use anyhow::Result;
use e2e::node::{AgentOptions, Node};
use e2e::tree::{Shape, Tree};
use std::time::Duration;

#[test]
fn published_volumes_show_the_right_bytes_in_every_profile() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    for profile in ["large", "small", "auto"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        let application = pod.oracle(&tree, &[])?;
        std::thread::sleep(Duration::from_secs(1));
        application.finish(Duration::from_secs(30))?.ensure_clean()?;
        node.server.reset()?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        assert_eq!(node.server.stats()?.of("GetObject"), 0, "profile {profile}: the second epoch fetched");
    }
    node.finish()
}

#[test]
fn what_the_kernel_does_not_offer_is_done_without() -> Result<()> {
    for disabled_features in
        [vec!["passthrough"], vec!["no_open"], vec!["readdirplus", "landlock", "populate_write", "splice"]]
    {
        let mut node = Node::start(AgentOptions {
            disabled_features: disabled_features.clone(),
            ..AgentOptions::default()
        })?;
        let tree = Tree::generated("", Shape::LITTLE);
        node.server.add(&tree, "set")?;
        for profile in ["large", "small"] {
            let mounted = node.volume(profile, "set", &[("profile", profile)])?;
            let volume = node.agent().volumes()?.into_iter().find(|v| v.volume_id == mounted.id);
            let mode = volume.expect("a published volume is listed").mode;
            let withheld = match mode.as_str() {
                "passthrough" => disabled_features.contains(&"passthrough"),
                "no-open" => disabled_features.contains(&"no_open"),
                _ => false,
            };
            assert!(!withheld, "mode {mode} although {disabled_features:?} is withheld");
            let pod = node.pod(&mounted)?;
            pod.verify(&tree, 2)?.ensure_all(&tree)?;
            pod.verify(&tree, 2)?.ensure_all(&tree)?;
        }
        node.finish()?;
    }
    Ok(())
}

#[test]
fn twenty_volumes_are_read_side_by_side() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mut running = Vec::new();
    let mut pods = Vec::new();
    for k in 0..20 {
        let profile = if k % 2 == 0 { "large" } else { "small" };
        let mounted = node.volume(&format!("v{k}"), "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        running.push(pod.start_verify(&tree, 1, k + 1)?);
        pods.push(pod);
    }
    for verify in running {
        verify.finish(Duration::from_secs(120))?.ensure_all(&tree)?;
    }
    assert_eq!(node.fuse_mounts()?.len(), 20);
    let fetched = node.server.stats()?.bytes_get;
    assert_eq!(fetched, tree.bytes(), "twenty volumes of one source share what was fetched");
    drop(pods);
    node.finish()
}

#[test]
fn eight_pods_that_read_one_cold_file_fetch_it_once() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let shape = Shape { directories: 0, files: 0, small_bytes: 0, large: 1, large_bytes: 256 << 20 };
    let tree = Tree::generated("", shape);
    node.server.add(&tree, "one")?;
    let mut pods = Vec::new();
    for k in 0..8 {
        let mounted = node.volume(&format!("v{k}"), "one", &[("profile", "large")])?;
        pods.push(node.pod(&mounted)?);
    }
    node.server.reset()?;
    let running: Vec<_> = pods.iter().map(|p| p.start_verify(&tree, 1, 0)).collect::<Result<_>>()?;
    for verify in running {
        verify.finish(Duration::from_secs(120))?.ensure_all(&tree)?;
    }
    let fetched = node.server.stats()?.bytes_get;
    assert_eq!(fetched, tree.bytes(), "{:.3}× fetched", fetched as f64 / tree.bytes() as f64);
    drop(pods);
    node.finish()
}

#[test]
fn small_files_of_a_directory_are_fetched_ahead_of_their_readers() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let shape = Shape { directories: 2, files: 300, small_bytes: 20_000, large: 0, large_bytes: 0 };
    let tree = Tree::generated("", shape);
    node.server.add(&tree, "set")?;
    let number = |path: &str| path[path.len() - 5..].parse::<usize>().unwrap_or(0);
    let few = tree.only(|f| f.path.starts_with("d000") && number(&f.path) % 50 == 0);
    let many = tree.only(|f| f.path.starts_with("d001") && number(&f.path) % 3 != 0);
    let mounted = node.volume("v", "set", &[("profile", "small")])?;
    let pod = node.pod(&mounted)?;
    pod.start_verify_some(&few, 1)?.finish(Duration::from_secs(60))?.ensure_all(&few)?;
    node.server.reset()?;
    pod.start_verify_some(&many, 1)?.finish(Duration::from_secs(60))?.ensure_all(&many)?;
    let unasked = || node.server.stats().is_ok_and(|s| s.of("GetObject") as usize > many.files.len());
    assert!(e2e::clock::wait_until(Duration::from_secs(20), unasked), "{:?}", node.server.stats()?);
    pod.start_verify(&tree, 1, 1)?.finish(Duration::from_secs(60))?.ensure_all(&tree)?;
    let stats = node.server.stats()?;
    assert_eq!(stats.bytes_get, tree.bytes() - few.bytes(), "each byte once");
    drop(pod);
    node.finish()
}

#[test]
fn slow_fetches_do_not_hold_up_cached_reads() -> Result<()> {
    use testkit::faults::{Fault, Rule, Script};
    let (mut node, tree) = node_with("warm")?;
    let cold = Tree::generated(
        "cold/",
        Shape { directories: 1, files: 40, small_bytes: 50_000, large: 0, large_bytes: 0 },
    );
    node.server.add(&cold, "warm/cold")?;
    let everything = node.volume("v", "warm", &[("profile", "large")])?;
    let pod = node.pod(&everything)?;
    pod.start_verify_below("", &tree)?.finish(Duration::from_secs(60))?;
    let stall = Rule::always(Fault::Stall { ms: None }).op("GetObject");
    node.server.set_faults(&Script { seed: 0, rules: vec![stall] })?;
    // Forty readers that wait for the store: more than any pool of threads would bear.
    let mut waiting = Vec::new();
    for k in 0..40 {
        let one = cold.only(|f| f.path.ends_with(&format!("f{k:05}")));
        waiting.push(pod.start_verify_below("cold", &one)?);
    }
    let slow = || node.server.stats().is_ok_and(|s| s.in_flight >= 30);
    assert!(e2e::clock::wait_until(Duration::from_secs(20), slow), "{:?}", node.server.stats()?);
    // A fetch that holds up a cached read holds it up for ever.
    let read = pod.start_verify_below("", &tree)?.finish(Duration::from_secs(60))?;
    assert_eq!(read.failed, 0, "{:?}", read.failures);
    node.server.no_faults()?;
    for reader in waiting {
        let read = reader.finish(Duration::from_secs(60))?;
        assert_eq!((read.failed, read.files), (0, 1), "{:?}", read.failures);
    }
    drop(pod);
    node.finish()
}
