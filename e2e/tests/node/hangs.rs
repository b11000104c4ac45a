//! Processes that stand still instead of dying: found within their limit, killed and succeeded. Waiting is no hang.

use crate::disks::{node_on, on_a_faulty_disk, pinned};
use crate::outages::worker_of;
use crate::workload::judge;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, InjectedFault, Node, small_disk};
use e2e::processes::signal;
use e2e::scenario::frozen;
use e2e::tree::{Shape, Tree};
use rustix::process::Signal;
use std::path::Path;
use std::time::{Duration, Instant};
use testkit::fault_fs::{Call, DiskFaults};

const LIMIT: Duration = Duration::from_secs(4);
/// For what a busy machine needs besides.
const SLACK: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(60);

fn node_with(inject_faults: Vec<InjectedFault>) -> Result<(Node, Tree)> {
    let options = AgentOptions { hang_limit: Some(LIMIT), inject_faults, ..AgentOptions::default() };
    let node = Node::start(options)?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    Ok((node, tree))
}

/// Causes of the heals of one volume, as soon as there are any.
fn causes(node: &Node, volume: &str, limit: Duration) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let any = || {
        let heals = node.agent().heals().unwrap_or_default();
        found = heals.into_iter().filter(|h| h.volume_id == volume).map(|h| h.cause).collect();
        !found.is_empty()
    };
    ensure!(wait_until(limit, any), "no heal within {limit:?}: {:?}", node.agent().volumes()?);
    Ok(found)
}

#[test]
fn a_worker_that_stands_still_is_replaced_and_no_call_fails() -> Result<()> {
    let (mut node, tree) = node_with(Vec::new())?;
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile), ("metadataTtl", "1s")])?;
        let pod = node.pod(&mounted)?;
        let stopped = worker_of(&node, &mounted.id).context("no worker serves")?;
        signal(stopped, Signal::STOP)?;
        // Everything is cold: all of these wait for the one that stands still.
        let readers: Vec<_> = (0..3).map(|k| pod.start_verify(&tree, 2, k)).collect::<Result<_>>()?;
        assert_eq!(causes(&node, &mounted.id, LIMIT + SLACK)?, ["hang"]);
        assert_ne!(worker_of(&node, &mounted.id), Some(stopped));
        for reader in readers {
            reader.finish(PATIENCE)?.ensure_all(&tree)?;
        }
    }
    node.finish()
}

/// The other threads go on: only the one that is stuck, and what waits for it, could tell.
#[test]
fn a_worker_of_which_one_thread_is_stuck_is_replaced_and_no_call_fails() -> Result<()> {
    for what in ["deadlock", "spin"] {
        let (mut node, tree) = node_with(vec![InjectedFault::new("large1", what, 1)])?;
        for profile in ["large", "small"] {
            let mounted = node.volume(profile, "set", &[("profile", profile)])?;
            let pod = node.pod(&mounted)?;
            let begun = Instant::now();
            let reader = pod.start_verify(&tree, 2, 0)?;
            assert_eq!(causes(&node, &mounted.id, LIMIT + SLACK)?, ["hang"], "{what}");
            println!("{what}, profile {profile}: replaced {:?} after the first read", begun.elapsed());
            reader.finish(PATIENCE)?.ensure_all(&tree)?;
        }
        node.finish()?;
    }
    Ok(())
}

/// Not even a SIGKILL ends a thread that waits for such a disk: its successor passes it by.
#[test]
fn a_worker_that_is_stuck_in_the_kernel_does_not_hold_up_its_successor() -> Result<()> {
    let (disk, mut node, tree) = on_a_faulty_disk(|options| {
        options.hang_limit = Some(LIMIT);
        // This disk keeps a pread from the page cache, so that its reader is stuck where no signal reaches it. From a splice
        // it does not, and opening the file again would wait for the page that never comes (fuse_open drops the file's
        // pages), which no file system but such a one does.
        options.disabled_features = vec!["passthrough", "no_open", "splice"];
    })?;
    // The first pod fills the cache; the second has nothing in the kernel's, and its worker reads the disk.
    let (first, second) = (node.volume("first", "set", &[])?, node.volume("second", "set", &[])?);
    node.pod(&first)?.verify(&tree, 2)?.ensure_all(&tree)?;
    let pod = node.pod(&second)?;
    disk.set(&DiskFaults { hang: 1, ..DiskFaults::default() })?;
    let stuck = worker_of(&node, &second.id).context("no worker serves")?;
    pod.start_verify(&tree, 2, 0)?.finish(PATIENCE)?.ensure_all(&tree)?;
    assert_eq!(causes(&node, &second.id, PATIENCE)?, ["hang"]);
    let is_there = || Path::new(&format!("/proc/{stuck}")).exists();
    assert!(is_there(), "the disk hangs, and its reader was killed: this shows nothing");
    disk.set(&DiskFaults::default())?;
    assert!(wait_until(PATIENCE, || !is_there()), "a worker that is stuck no more is not reaped");
    drop(pod);
    node.finish()
}

/// It gets the directories that its predecessor had, that of the disk among them, and looks at none of them.
#[test]
fn a_worker_that_comes_while_a_disk_hangs_serves() -> Result<()> {
    let (disk, mut node, tree) = on_a_faulty_disk(|options| options.hang_limit = Some(LIMIT))?;
    for profile in ["small", "large"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        // No reader needs the disk: a process that waits for it does so of its own accord.
        disk.set(&DiskFaults { hangs: Call::ALL.to_vec(), ..DiskFaults::default() })?;
        for _ in 0..2 {
            let before = node.worker_of(&mounted.id, PATIENCE)?;
            node.signal_worker(before, Signal::KILL)?;
            let next = || worker_of(&node, &mounted.id).is_some_and(|pid| pid != before);
            ensure!(wait_until(LIMIT + SLACK, next), "{profile}: {:?}", node.agent().volumes()?);
        }
        pod.start_verify(&tree, 2, 0)?.finish(PATIENCE)?.ensure_all(&tree).context(profile)?;
        disk.set(&DiskFaults::default())?;
        let used = || node.agent().cache().is_ok_and(|c| c.tiers.iter().all(|tier| !tier.degraded));
        ensure!(wait_until(PATIENCE, used), "{profile}: it is not used again");
        drop(pod);
        node.unpublish(&mounted)?;
    }
    node.finish()
}

/// Each backing id that its predecessor left is a question to the broker, which may take as long as any.
#[test]
fn a_worker_that_comes_while_the_broker_stands_still_serves() -> Result<()> {
    let mut node = node_on(|node, uid| small_disk(node.places(), 256, uid))?;
    let disk = node.options().tiers[0].paths[0].clone();
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let mounted = node.volume("v", "set", &[("profile", "large")])?;
    let pod = node.pod(&mounted)?;
    // From the disk itself, once every file is whole: perhaps the second time, surely soon.
    for _ in 0..4 {
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    let before = worker_of(&node, &mounted.id).context("no worker serves")?;
    signal(node.plugin().pid(), Signal::STOP)?;
    node.agent().evict_all()?;
    let held = pinned(&disk)?;
    node.signal_worker(before, Signal::KILL)?;
    let next = || worker_of(&node, &mounted.id).is_some_and(|pid| pid != before);
    let served = wait_until(LIMIT + SLACK, next);
    signal(node.plugin().pid(), Signal::CONT)?;
    ensure!(served, "{:?}", node.agent().volumes()?);
    ensure!(held > 0, "no worker held the files that were evicted");
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    // At the latest the next worker finds them closed.
    node.signal_worker(node.worker_of(&mounted.id, PATIENCE)?, Signal::KILL)?;
    node.worker_of(&mounted.id, PATIENCE)?;
    node.agent().evict_all()?;
    let closed = || pinned(&disk).is_ok_and(|bytes| bytes == 0);
    ensure!(wait_until(PATIENCE, closed), "{} bytes are pinned", pinned(&disk)?);
    drop(pod);
    node.finish()
}

/// No call comes back, none of the agent's and none of the workers'. What such a disk holds comes from the store.
#[test]
fn a_cache_disk_that_hangs_is_passed_by_and_used_again_when_it_answers() -> Result<()> {
    let (disk, mut node, tree) = on_a_faulty_disk(|options| options.hang_limit = Some(LIMIT))?;
    let for_ever = DiskFaults { hangs: Call::ALL.to_vec(), ..DiskFaults::default() };
    let warm = tree.only(|f| f.path.as_str() < "d002");
    for profile in ["small", "large"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        pod.start_verify_below("", &warm)?.finish(PATIENCE)?.ensure_all(&warm)?;
        let agent = node.agent().pid();
        let degraded = |node: &Node| node.agent().cache().is_ok_and(|c| c.tiers.iter().any(|t| t.degraded));
        let begun = Instant::now();
        disk.set(&for_ever)?;
        if profile == "large" {
            // The declared exception: what is passed through before the agent has noticed waits for the disk.
            ensure!(wait_until(LIMIT + SLACK, || degraded(&node)), "the agent does not notice");
        }
        pod.start_verify(&tree, 2, 0)?.finish(PATIENCE)?.ensure_all(&tree).context(profile)?;
        println!("{profile}: read {:?} after the disk began to hang", begun.elapsed());
        ensure!(degraded(&node), "the agent did not notice");
        let late = node.volume(&format!("{profile}-late"), "set", &[("profile", profile)])?;
        node.pod(&late)?.start_verify(&tree, 2, 0)?.finish(PATIENCE)?.ensure_all(&tree)?;
        node.unpublish(&late)?;
        ensure!(node.agent().stats()?.contains_key("millpond_volumes"), "the metrics page");
        // Longer than an agent may stand still.
        ensure!(!wait_until(2 * LIMIT, || node.agent_has_ended()), "the agent was killed for its disk");
        disk.set(&DiskFaults::default())?;
        ensure!(wait_until(PATIENCE, || !degraded(&node)), "it is not used again");
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        assert_eq!(node.agent().pid(), agent);
        drop(pod);
        node.unpublish(&mounted)?;
    }
    // From the start.
    node.stop_agent()?;
    disk.set(&for_ever)?;
    node.start_agent()?;
    let mounted = node.volume("again", "set", &[])?;
    node.pod(&mounted)?.start_verify(&tree, 2, 0)?.finish(PATIENCE)?.ensure_all(&tree)?;
    disk.set(&DiskFaults::default())?;
    node.finish()
}

#[test]
fn a_worker_that_waits_for_the_store_is_not_replaced() -> Result<()> {
    let (mut node, _) = node_with(Vec::new())?;
    // Longer than a worker, or an agent, may stand still.
    println!("{}", frozen::run(&mut node, 3 * LIMIT)?);
    node.finish()
}

#[test]
fn an_agent_that_stands_still_is_killed_by_the_broker_and_its_successor_takes_over() -> Result<()> {
    let (mut node, tree) = node_with(Vec::new())?;
    let mounted = ["large", "small"].map(|p| node.volume(p, "set", &[("profile", p)]));
    let pods = mounted.into_iter().map(|m| node.pod(&m?)).collect::<Result<Vec<_>>>()?;
    let running = pods.iter().map(|p| p.oracle(&tree, &["--alarm"])).collect::<Result<Vec<_>>>()?;
    for _ in 0..2 {
        signal(node.agent().pid(), Signal::STOP)?;
        let begun = Instant::now();
        let killed = wait_until(LIMIT + SLACK, || node.agent_has_ended());
        ensure!(killed, "the broker leaves an agent that stands still alone");
        println!("killed after {:?}", begun.elapsed());
        node.replace_killed_agent()?;
        let all = || node.agent().serving().is_ok_and(|serving| serving.len() == 2);
        ensure!(wait_until(PATIENCE, all), "not every mount is served: {:?}", node.agent().volumes());
        let heals = || node.agent().heals().unwrap_or_default();
        let recorded = || heals().iter().filter(|h| (h.level, &*h.cause) == (2, "hang")).count() == 2;
        ensure!(wait_until(PATIENCE, recorded), "{:?}", heals());
    }
    running.into_iter().try_for_each(judge)?;
    drop(pods);
    node.finish()
}

/// Its process runs, and most of its threads do: only what goes through its tables stands still.
#[test]
fn an_agent_whose_tables_are_locked_for_ever_is_killed_by_the_broker_and_succeeded() -> Result<()> {
    let (mut node, tree) = node_with(Vec::new())?;
    let mounted = ["large", "small"].map(|p| node.volume(p, "set", &[("profile", p)]));
    let pods = mounted.into_iter().map(|m| node.pod(&m?)).collect::<Result<Vec<_>>>()?;
    let running = pods.iter().map(|p| p.oracle(&tree, &["--alarm"])).collect::<Result<Vec<_>>>()?;
    node.kill_agent()?;
    node.options().failpoints.agent = Some("agent.mount-listed=hang");
    node.spawn_agent()?;
    let killed = wait_until(LIMIT + SLACK, || node.agent_has_ended());
    ensure!(killed, "the broker leaves an agent alone that is stuck");
    ensure!(node.places().logs().contains("failpoint: hangs at agent.mount-listed"), "it was not stuck");
    node.options().failpoints.agent = None;
    node.replace_killed_agent()?;
    let all = || node.agent().serving().is_ok_and(|serving| serving.len() == 2);
    ensure!(wait_until(PATIENCE, all), "not every mount is served: {:?}", node.agent().volumes());
    running.into_iter().try_for_each(judge)?;
    drop(pods);
    node.finish()
}

/// A broker that stood still itself has not seen anything, and blames no agent for it.
#[test]
fn a_broker_that_stood_still_kills_no_agent() -> Result<()> {
    let (mut node, tree) = node_with(Vec::new())?;
    let mounted = node.volume("v", "set", &[])?;
    let pod = node.pod(&mounted)?;
    let agent = node.agent().pid();
    signal(node.plugin().pid(), Signal::STOP)?;
    // Longer than the limit: what a condition could wait for is what must not happen.
    let ended = wait_until(LIMIT + LIMIT / 2, || node.agent_has_ended());
    signal(node.plugin().pid(), Signal::CONT)?;
    assert!(!ended);
    assert!(!wait_until(LIMIT, || node.agent_has_ended()), "the agent was killed for the broker's sleep");
    assert_eq!(node.agent().pid(), agent);
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    drop(pod);
    node.finish()
}
