//! A worker's death is not an event in the life of an application.

use crate::{node_with, seed};
use anyhow::Result;
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Node};
use e2e::processes;
use e2e::scenario::kills::{self, KillPlan};
use std::time::Duration;

#[test]
fn fifty_deaths_of_workers_are_not_noticed() -> Result<()> {
    let seed = seed();
    let mut node = Node::start(AgentOptions::default())?;
    let report = kills::run(&mut node, &KillPlan::short(seed))?;
    println!("{report}");
    report.report.ensure_clean()?;
    assert!(report.report.alarms > 0, "the alarm never rang");
    node.finish()
}

#[test]
fn deaths_are_not_noticed_where_the_kernel_offers_nothing() -> Result<()> {
    let seed = seed();
    let disabled_features =
        vec!["passthrough", "no_open", "readdirplus", "landlock", "populate_write", "splice"];
    let mut node = Node::start(AgentOptions { disabled_features, ..AgentOptions::default() })?;
    let report = kills::run(&mut node, &KillPlan { kills: 20, ..KillPlan::short(seed) })?;
    println!("{report}");
    report.report.ensure_clean()?;
    node.finish()
}

#[test]
fn without_any_worker_open_files_and_warm_small_files_go_on() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let large = node.volume("large", "set", &[("profile", "large")])?;
    let small = node.volume("small", "set", &[("profile", "small"), ("freshness", "static")])?;
    let (large_pod, small_pod) = (node.pod(&large)?, node.pod(&small)?);
    // Warm: whole in the cache for one, in the kernel for the other.
    node.agent().warm(std::slice::from_ref(&large.target), Duration::from_secs(60))?;
    for _ in 0..2 {
        large_pod.verify(&tree, 2)?.ensure_all(&tree)?;
        small_pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    let warm = |pod: &e2e::pod::Pod, kinds: &str| {
        pod.oracle(&tree, &["--keep-cache", "--pause-us", "200", "--kinds", kinds])
    };
    // "Warm" is the claim's condition: this machine may page out what it thinks is cold (DAMON) in the middle of it.
    let files = tree.files.iter().map(|f| e2e::pages::Pinned::new(&small.target.join(&f.path)));
    let pinned = files.collect::<Result<Vec<_>>>()?;
    // One round with the workers there, so that what the run itself needs (absent names, say) is known to the kernel.
    let once = warm(&small_pod, "small,open,stat,readdir")?;
    std::thread::sleep(Duration::from_secs(3));
    once.finish(Duration::from_secs(30))?.ensure_clean()?;
    let held = warm(&large_pod, "held,held")?;

    node.suspend_respawn(true)?;
    let agent = node.agent().pid();
    let none_left = || {
        for pid in processes::children(agent) {
            let _ = processes::kill_child(pid, agent); // ended meanwhile
        }
        processes::fuse_children(agent).is_empty()
    };
    assert!(
        wait_until(Duration::from_secs(10), none_left),
        "workers keep coming although respawn is suspended"
    );
    let opened = warm(&small_pod, "small,small,open,stat,readdir")?;
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(processes::fuse_children(agent), Vec::<u32>::new());
    for (name, report) in
        [("large", held.finish(Duration::from_secs(30))?), ("small", opened.finish(Duration::from_secs(30))?)]
    {
        println!("{name}: {}", report.summary());
        report.ensure_clean()?;
    }

    drop(pinned);
    node.suspend_respawn(false)?;
    let back = || node.agent().serving().is_ok_and(|s| s.len() == 2);
    assert!(wait_until(Duration::from_secs(20), back), "{:?}", node.agent().volumes()?);
    large_pod.verify(&tree, 2)?.ensure_all(&tree)?;
    drop((large_pod, small_pod));
    node.finish()
}
