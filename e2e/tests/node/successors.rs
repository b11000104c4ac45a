//! The agent, the broker, or one after the other is gone and comes back: applications notice nothing.

use crate::node_with;
use crate::workload::{judge, volumes};
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::mountinfo;
use e2e::node::Node;
use e2e::scenario::resources::Resources;
use rustix::process::Signal;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn applications_do_not_notice_that_the_agent_was_killed() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    let before = mountinfo::below(&node.places().kubelet())?.len();
    for _ in 0..2 {
        let running = pods.iter().map(|p| p.oracle(&tree, &["--alarm"])).collect::<Result<Vec<_>>>()?;
        // A request that is executed while a third agent dies is taken for the cause, and answered EIO: it would live for
        // so long where agents die as soon as they serve.
        for _ in 0..2 {
            node.kill_agent()?;
            node.start_agent()?;
            node.wait_served(PATIENCE)?;
        }
        running.into_iter().try_for_each(judge)?;
    }
    assert_eq!(mountinfo::below(&node.places().kubelet())?.len(), before, "mounts were stacked");
    // Recorded when a probe has read through the mount, which no caller waits for.
    let recorded = || node.agent().heals().is_ok_and(|heals| heals.iter().any(|h| h.cause == "agent"));
    ensure!(wait_until(PATIENCE, recorded), "no heal was recorded: {:?}", node.agent().heals());
    drop(pods);
    for m in &mounted {
        node.unpublish(m)?;
    }
    assert_eq!(mountinfo::below(&node.places().kubelet())?, []);
    node.finish()
}

#[test]
fn an_agent_comes_back_while_the_store_is_away_and_serves_what_is_cached() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    for pod in &pods {
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    node.server.freeze()?;
    node.kill_agent()?;
    node.start_agent()?;
    node.wait_served(PATIENCE)?;
    for pod in &pods {
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    node.finish()
}

#[test]
fn mounts_that_cannot_be_looked_through_do_not_hold_up_the_others() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    // More than are handed over at a time, and nothing is known of their names once the store is away.
    let names: Vec<String> = (0..6).map(|k| format!("v{k}")).collect();
    let more = [("profile", "large"), ("metadataTtl", "100ms")];
    let mounted = names.iter().map(|name| node.volume(name, "set", &more)).collect::<Result<Vec<_>>>()?;
    node.server.freeze()?;
    node.kill_agent()?;
    let begun = Instant::now();
    node.start_agent()?;
    node.wait_served(PATIENCE)?;
    // A look through one mount alone is given up after ten seconds.
    let took = begun.elapsed();
    ensure!(took < Duration::from_secs(8), "the last mount was served after {took:?}");
    node.server.no_faults()?;
    for m in &mounted {
        node.pod(m)?.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    node.finish()
}

#[test]
fn a_broker_that_was_killed_knows_its_mounts_again_and_hands_them_to_the_next_agent() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    let running = pods.iter().map(|p| p.oracle(&tree, &[])).collect::<Result<Vec<_>>>()?;
    for _ in 0..3 {
        node.kill_plugin()?;
        node.start_plugin()?;
        node.wait_served(PATIENCE)?;
        for m in &mounted {
            // Answered from the agent's memory through the broker's table: it knows the mount.
            let known = || node.plugin().stats(&m.id, &m.target).is_ok();
            ensure!(wait_until(PATIENCE, known), "the new broker does not know {}", m.target.display());
            let heals = || node.agent().heals().unwrap_or_default();
            let recorded =
                || heals().iter().any(|h| h.volume_id == m.id && (h.level, &*h.cause) == (3, "broker"));
            ensure!(wait_until(PATIENCE, recorded), "no heal of level 3 was recorded: {:?}", heals());
        }
        node.kill_agent()?;
        node.start_agent()?;
        node.wait_served(PATIENCE)?;
    }
    running.into_iter().try_for_each(judge)?;
    drop(pods);
    for m in &mounted {
        node.unpublish(m)?;
    }
    assert_eq!(mountinfo::below(&node.places().kubelet())?, []);
    node.finish()
}

/// What was answered to the kernel's INIT holds for the life of a connection, whatever a later agent would say.
#[test]
fn an_agent_that_would_answer_init_otherwise_serves_what_was_agreed() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    let running = pods.iter().map(|p| p.oracle(&tree, &["--alarm"])).collect::<Result<Vec<_>>>()?;
    let mode = |node: &Node, id: &str| -> Result<String> {
        let volume = node.agent().volumes()?.into_iter().find(|v| v.volume_id == id);
        Ok(volume.with_context(|| format!("{id} is not served"))?.mode)
    };
    let agreed = ["passthrough", "no-open"];
    let mut later = Vec::new();
    for (disabled_features, fresh) in
        [(vec!["passthrough", "no_open", "readdirplus"], ["kept"; 2]), (vec![], agreed)]
    {
        node.options().disabled_features = disabled_features;
        node.kill_agent()?;
        node.start_agent()?;
        node.wait_whole(PATIENCE)?;
        for (m, agreed) in mounted.iter().zip(agreed) {
            assert_eq!(mode(&node, &m.id)?, agreed);
        }
        // A worker of this agent that takes over from another of its own, too.
        for (_, pid) in node.agent().serving()? {
            node.signal_worker(pid, Signal::KILL)?;
        }
        node.wait_whole(PATIENCE)?;
        for (profile, mode_of_new) in ["large", "small"].into_iter().zip(fresh) {
            let m = node.volume(&format!("{profile}-{mode_of_new}"), "set", &[("profile", profile)])?;
            later.push((m, mode_of_new));
        }
        for (m, agreed) in &later {
            assert_eq!(mode(&node, &m.id)?, *agreed);
            node.pod(m)?.verify(&tree, 2)?.ensure_all(&tree)?;
        }
    }
    running.into_iter().try_for_each(judge)?;
    drop(pods);
    node.finish()
}

#[test]
fn agent_and_broker_asked_to_stop_at_once_lose_nothing() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    let running = pods.iter().map(|p| p.oracle(&tree, &[])).collect::<Result<Vec<_>>>()?;
    for _ in 0..10 {
        node.succeed_both(PATIENCE)?;
        node.wait_served(PATIENCE)?;
    }
    node.stop_agent()?;
    node.start_agent()?;
    let heals = || node.agent().heals().unwrap_or_default();
    let recorded =
        || heals().iter().filter(|h| (h.level, &*h.cause) == (2, "upgrade")).count() == mounted.len();
    ensure!(wait_until(PATIENCE, recorded), "{:?}", heals());
    running.into_iter().try_for_each(judge)?;
    node.finish()
}

#[test]
fn nothing_grows_with_the_agents_that_came_and_went() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    let cycle = |node: &mut Node| -> Result<()> {
        node.kill_agent()?;
        node.start_agent()?;
        node.wait_served(PATIENCE)?;
        for pod in &pods {
            pod.verify(&tree, 1)?.ensure_all(&tree)?;
        }
        Ok(())
    };
    cycle(&mut node)?;
    let before = Resources::of(&node)?;
    for _ in 0..5 {
        cycle(&mut node)?;
    }
    before.ensure_same(&node)?;
    drop(pods);
    node.finish()
}
