//! A panic in whatever thread is the death of its process, and is healed as any other.

use crate::workload::{judge, volumes};
use crate::{node_with, seed};
use anyhow::{Context, Result};
use e2e::random::Random;
use e2e::scenario::torture::panics;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);
const ROUNDS: usize = 3;

#[test]
fn a_panic_in_agent_broker_or_worker_is_its_death_and_no_call_fails() -> Result<()> {
    let mut random = Random(seed());
    let (mut node, tree) = node_with("set")?;
    panics::allow(&mut node);
    node.kill_plugin()?;
    node.start_plugin()?;
    // After the broker: it is ready when it has found it.
    node.kill_agent()?;
    node.start_agent()?;
    let mounted = volumes(&mut node)?;
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    let running = pods
        .iter()
        .map(|p| p.oracle(&tree, &["--alarm", "--pause-us", "500"]))
        .collect::<Result<Vec<_>>>()?;
    for round in 0..ROUNDS {
        // What is cold is asked of the agent, and of the store.
        node.agent().evict_all()?;
        panics::agent(&mut node, &mut random, PATIENCE).with_context(|| format!("agent, round {round}"))?;
        node.kill_agent()?;
        node.start_agent()?;
        node.wait_whole(PATIENCE)?;
        panics::broker(&mut node, &mut random, PATIENCE).with_context(|| format!("broker, round {round}"))?;
        node.kill_plugin()?;
        node.start_plugin()?;
        node.wait_whole(PATIENCE)?;
        let pid = node.worker_of(&mounted[round % mounted.len()].id, PATIENCE)?;
        panics::worker(&node, pid, &mut random, PATIENCE)
            .with_context(|| format!("worker, round {round}"))?;
        node.wait_served(PATIENCE)?;
    }
    eprintln!("panics at {}", panics::places(&node)?);
    running.into_iter().try_for_each(judge)?;
    drop(pods);
    node.finish()
}
