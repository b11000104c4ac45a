//! Agents and brokers come and go; what cannot be healed yet fails, it does not hang.

use crate::node_with;
use anyhow::{Result, ensure};
use e2e::clock::wait_until;
use e2e::mountinfo;
use e2e::node::{AgentOptions, Node};
use std::time::{Duration, Instant};

#[test]
fn a_restarted_agent_fetches_nothing_again() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let first = node.volume("v", "set", &[("profile", "large"), ("healTimeout", "2s")])?;
    let pod = node.pod(&first)?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    drop(pod);
    node.kill_agent()?;
    node.start_agent()?;
    node.unpublish(&first)?;
    node.server.reset()?;
    for profile in ["large", "small"] {
        let again = node.volume(&format!("again-{profile}"), "set", &[("profile", profile)])?;
        let pod = node.pod(&again)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    let stats = node.server.stats()?;
    assert_eq!((stats.of("GetObject"), stats.bytes_get), (0, 0), "{stats:?}");
    node.finish()
}

#[test]
fn without_an_agent_readers_fail_after_the_heal_timeout_and_unpublish_works() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[("profile", "large"), ("healTimeout", "2s")])?;
    let pod = node.pod(&mounted)?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    node.kill_agent()?;
    let begun = Instant::now();
    let read = pod.start_verify(&tree, 1, 0)?.finish(Duration::from_secs(30))?;
    let waited = begun.elapsed();
    ensure!(read.failed > 0, "reads succeeded without an agent and without a worker");
    ensure!(waited > Duration::from_secs(1), "readers were given up after {waited:?}, before healTimeout");
    let texts = read.failures.join("\n");
    assert!(
        texts.contains("os error 107") || texts.contains("os error 103"),
        "neither ENOTCONN nor ECONNABORTED: {texts}"
    );
    assert!(
        read.failures.iter().skip(1).all(|f| f.contains("os error 107")),
        "later calls are ENOTCONN: {texts}"
    );
    drop(pod);
    let begun = Instant::now();
    node.unpublish(&mounted)?;
    assert!(begun.elapsed() < Duration::from_secs(2), "unpublish took {:?}", begun.elapsed());
    assert_eq!(mountinfo::below(&node.places().kubelet())?, []);
    node.start_agent()?;
    let again = node.volume("w", "set", &[])?;
    node.pod(&again)?.verify(&tree, 2)?.ensure_all(&tree)?;
    node.finish()
}

#[test]
fn a_restarted_broker_leaves_mounts_reading_and_can_unpublish_them() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[("profile", "large")])?;
    let pod = node.pod(&mounted)?;
    let application = pod.oracle(&tree, &["--pause-us", "500"])?;
    node.kill_plugin()?;
    node.start_plugin()?;
    let connected = || node.agent().status().is_ok_and(|s| s.broker_connected);
    assert!(wait_until(Duration::from_secs(30), connected), "the agent did not come back to the broker");
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    application.finish(Duration::from_secs(30))?.ensure_clean()?;
    // The agent has given the mount back to the broker, or is about to.
    let known = || node.plugin().stats(&mounted.id, &mounted.target).is_ok();
    assert!(wait_until(Duration::from_secs(20), known), "no statistics after the restart");
    let usage = node.plugin().stats(&mounted.id, &mounted.target)?.usage;
    let bytes = tree.files.iter().map(|f| f.size).sum::<u64>() as i64;
    assert!(usage.iter().all(|u| u.available > 0 && u.available + u.used == u.total), "{usage:?}");
    // Directories are names, too.
    assert!(usage[0].used == bytes && usage[1].used > tree.files.len() as i64, "{usage:?}");
    drop(pod);
    node.unpublish(&mounted)?;
    assert_eq!(mountinfo::below(&node.places().kubelet())?, []);
    let again = node.volume("w", "set", &[])?;
    node.pod(&again)?.verify(&tree, 2)?.ensure_all(&tree)?;
    node.finish()
}

#[test]
fn under_a_vanished_mount_nothing_can_be_written() -> Result<()> {
    use rustix::mount::{UnmountFlags, unmount};
    let (mut node, _tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[])?;
    // What an administrator's `umount` does.
    unmount(&mounted.target, UnmountFlags::DETACH)?;
    let error = std::fs::write(mounted.target.join("lost"), "x").expect_err("nothing is there to write to");
    println!("writing under a vanished mount: {error}");
    assert!(matches!(error.raw_os_error(), Some(libc::EROFS | libc::EACCES | libc::EPERM)), "{error}");
    node.unpublish(&mounted)?;
    node.finish()
}

#[test]
fn nothing_is_left_after_many_publishes() -> Result<()> {
    use e2e::scenario::resources::Resources;
    let (mut node, tree) = node_with("set")?;
    let warm_up = node.volume("v", "set", &[])?;
    node.pod(&warm_up)?.verify(&tree, 1)?.ensure_all(&tree)?;
    node.unpublish(&warm_up)?;
    let before = Resources::of(&node)?;
    for round in 0..10 {
        let profile = if round % 2 == 0 { "large" } else { "small" };
        let mounted = node.volume(&format!("v{round}"), "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        pod.verify(&tree, 1)?.ensure_all(&tree)?;
        pod.end()?;
        node.unpublish(&mounted)?;
        // A second unpublish is a success that was designed.
        node.plugin().unpublish(&mounted.id, &mounted.target)?;
    }
    before.ensure_same(&node)?;
    node.finish()
}

#[test]
fn nothing_is_left_after_cycles_in_which_something_is_hurt() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    println!("{}", e2e::scenario::cycles::run(&mut node, 20, crate::seed())?);
    node.finish()
}
