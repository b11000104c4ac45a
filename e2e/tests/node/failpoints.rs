//! Successors that die themselves, twice in a row, at each step of taking over.

use crate::node_with;
use crate::workload::judge;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Failpoints, Node};
use e2e::oracle::Report;
use e2e::pod::Running;
use e2e::tree::{Shape, Tree};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::time::Duration;

const WORKER_STEPS: &[&str] = &[
    "worker.assigned",
    "worker.prepared",
    "worker.go",
    "worker.serving",
    "worker.orphan",
    "worker.read",
    "worker.recorded",
    "worker.answering",
    "worker.answered",
];
/// Of an agent that is given mounts.
pub(crate) const AGENT_STEPS: &[&str] = &[
    "agent.adopt",
    "agent.scope-opened",
    "agent.memory-mapped",
    "agent.workers-gone",
    "agent.collected",
    "agent.worker-assigned",
    "agent.worker-serving",
    "agent.adopted",
];
const BROKER_STEPS: &[&str] = &["broker.hold", "broker.noted", "broker.prepared", "broker.held"];

const PATIENCE: Duration = Duration::from_secs(30);

/// Processes that have said that they abort at this step.
fn aborted(node: &Node, step: &str) -> Result<usize> {
    let said = format!("failpoint: aborted at {step}");
    let mut times = 0;
    for log in ["node-agent", "csi-plugin"] {
        let text = std::fs::read(node.places().log(log))?;
        times += String::from_utf8_lossy(&text).lines().filter(|line| *line == said).count();
    }
    Ok(times)
}

fn died_twice(node: &Node, step: &str, limit: Duration) -> bool {
    wait_until(limit, || aborted(node, step).is_ok_and(|times| times == 2))
}

fn finish(node: Node, running: Vec<Running<Report>>) -> Result<()> {
    running.into_iter().try_for_each(judge)?;
    node.finish()
}

#[test]
fn workers_that_die_while_they_take_over_are_not_noticed() -> Result<()> {
    // Each worker is started when it is needed, so that the n-th step is the n-th worker's.
    let mut node = Node::start(AgentOptions { standby: 0, ..AgentOptions::default() })?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let mounted = node.volume("v", "set", &[("profile", "large"), ("metadataTtl", "1s")])?;
    let pod = node.pod(&mounted)?;
    let running = vec![pod.oracle(&tree, &["--alarm", "--pause-us", "200"])?];
    for step in WORKER_STEPS {
        // The first serves what the new agent has taken over; the next two die; the one after them lives.
        node.options().failpoints = Failpoints { workers: vec!["", step, step], ..Failpoints::default() };
        node.kill_agent()?;
        node.start_agent()?;
        node.wait_whole(PATIENCE)?;
        // With the store frozen, requests wait: there is something to take over.
        node.agent().evict_all()?;
        node.server.freeze()?;
        let asked = wait_until(PATIENCE, || node.server.stats().is_ok_and(|s| s.in_flight > 0));
        node.signal_worker(node.worker_of(&mounted.id, PATIENCE)?, Signal::KILL)?;
        died_twice(&node, step, Duration::from_millis(500));
        node.server.no_faults()?;
        ensure!(asked, "{step}: the application never asked the store");
        // Some steps are those of requests that come only now.
        ensure!(died_twice(&node, step, PATIENCE), "{step}: {} deaths", aborted(&node, step)?);
        node.wait_whole(PATIENCE).context(*step)?;
    }
    finish(node, running)
}

#[test]
fn agents_that_die_while_they_take_over_are_not_noticed() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mut pods = Vec::new();
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        pods.push(node.pod(&mounted)?);
    }
    let running = pods.iter().map(|p| p.oracle(&tree, &["--alarm"])).collect::<Result<Vec<_>>>()?;
    for step in AGENT_STEPS {
        node.kill_agent()?;
        node.options().failpoints.agent = Some(step);
        for death in 0..2 {
            node.spawn_agent()?;
            let ended = wait_until(PATIENCE, || node.agent_has_ended());
            ensure!(ended, "{step}: successor {death} lives");
            node.kill_agent()?;
        }
        ensure!(aborted(&node, step)? == 2, "{step}: the successors died of something else");
        node.options().failpoints.agent = None;
        node.start_agent()?;
        node.wait_whole(PATIENCE).context(*step)?;
    }
    finish(node, running)
}

#[test]
fn brokers_that_die_while_they_take_mounts_back_are_not_noticed() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mut pods = Vec::new();
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        pods.push(node.pod(&mounted)?);
    }
    let running = pods.iter().map(|p| p.oracle(&tree, &["--alarm"])).collect::<Result<Vec<_>>>()?;
    for step in BROKER_STEPS {
        node.kill_plugin()?;
        node.options().failpoints.plugin = Some(step);
        for death in 0..2 {
            node.spawn_plugin()?;
            let ended = wait_until(PATIENCE, || node.plugin_has_ended());
            ensure!(ended, "{step}: successor {death} lives");
            node.kill_plugin()?;
        }
        ensure!(aborted(&node, step)? == 2, "{step}: the successors died of something else");
        node.options().failpoints.plugin = None;
        node.start_plugin()?;
        node.wait_whole(PATIENCE).context(*step)?;
    }
    finish(node, running)
}

/// A step that nobody dies at proves nothing.
#[test]
fn every_step_of_taking_over_has_a_test() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the crate lies in the workspace")?;
    let tests = texts(vec![root.join("e2e/tests/node")])?.concat();
    let mut steps = 0;
    for text in
        texts(["fuse-worker/src", "node-agent/src", "csi-plugin/src"].map(|dir| root.join(dir)).to_vec())?
    {
        for rest in text.split("failpoint::hit(\"").skip(1) {
            let step = rest.split('"').next().unwrap_or_default();
            ensure!(tests.contains(&format!("\"{step}\"")), "nobody dies at {step}");
            steps += 1;
        }
    }
    ensure!(steps >= 20, "only {steps} steps were found");
    Ok(())
}

/// Of every file below these.
fn texts(mut open: Vec<PathBuf>) -> Result<Vec<String>> {
    let mut found = Vec::new();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(std::fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?);
        } else {
            found.push(std::fs::read_to_string(path)?);
        }
    }
    Ok(found)
}
