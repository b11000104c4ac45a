//! A log that is closed, full or failing is no problem but its reader's.

use crate::workload::{judge, volumes};
use anyhow::{Result, ensure};
use e2e::node::{AgentOptions, LogTo, Node};
use e2e::tree::{Shape, Tree};
use rustix::process::Signal;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

/// With `log` for agent and plugin, and with it for their workers.
fn everything_goes_on(log: LogTo) -> Result<()> {
    let mut node = Node::start(AgentOptions { log, ..AgentOptions::default() })?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let mounted = volumes(&mut node)?;
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    let running = pods.iter().map(|p| p.oracle(&tree, &["--pause-us", "500"])).collect::<Result<Vec<_>>>()?;
    for _ in 0..3 {
        for m in &mounted {
            node.signal_worker(node.worker_of(&m.id, PATIENCE)?, Signal::KILL)?;
        }
        node.wait_whole(PATIENCE)?;
    }
    let lost = node.agent().stats()?.get("millpond_log_lost_lines_total").copied().unwrap_or_default();
    ensure!(lost > 0.0, "{log:?}: a log that takes nothing has lost nothing");
    // Killed and asked to stop: an end in order writes down what it can, and does not wait for the rest.
    node.kill_agent()?;
    node.start_agent()?;
    node.wait_whole(PATIENCE)?;
    node.kill_plugin()?;
    node.start_plugin()?;
    node.wait_whole(PATIENCE)?;
    node.succeed_both(PATIENCE)?;
    node.wait_whole(PATIENCE)?;
    running.into_iter().try_for_each(judge)?;
    drop(pods);
    node.finish()
}

#[test]
fn a_log_whose_reader_has_gone_fails_nothing() -> Result<()> {
    everything_goes_on(LogTo::Closed)
}

#[test]
fn a_log_that_is_full_and_never_read_holds_up_nothing() -> Result<()> {
    everything_goes_on(LogTo::Unread)
}

#[test]
fn a_log_on_a_full_disk_fails_nothing() -> Result<()> {
    everything_goes_on(LogTo::Failing)
}
