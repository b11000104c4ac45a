//! Successors that die themselves, twice in a row, at each step of taking over.

use crate::node_with;
use crate::workload::judge;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::mountinfo;
use e2e::node::{AgentOptions, Failpoints, Node};
use e2e::oracle::Report;
use e2e::pod::Running;
use e2e::scenario::resources::Resources;
use e2e::tree::{Shape, Tree};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const WORKER_STEPS: &[&str] = &[
    "worker.assigned",
    "worker.prepared",
    "worker.go",
    "worker.serving",
    "worker.orphan",
    "worker.read",
    "worker.recorded",
    "worker.spliced",
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
const BROKER_STEPS: &[&str] = &["broker.hold", "broker.prepared", "broker.noted", "broker.held"];

/// Of a volume that is published; and who dies there.
const PUBLISH_STEPS: &[(&str, Who)] = &[
    ("broker.mounted", Who::Broker),
    ("broker.volume-prepared", Who::Broker),
    ("broker.init-answered", Who::Broker),
    ("broker.started", Who::Broker),
    ("agent.mount-listed", Who::Agent),
    ("agent.volume-prepared", Who::Agent),
];

#[derive(Clone, Copy)]
enum Who {
    Agent,
    Broker,
}

impl Who {
    /// Kills it, if it is there, and starts another, which dies at the step.
    fn replace(self, node: &mut Node, step: Option<&'static str>) -> Result<()> {
        match self {
            Self::Agent => {
                node.kill_agent()?;
                node.options().failpoints.agent = step;
                node.start_agent()
            }
            Self::Broker => {
                node.kill_plugin()?;
                node.options().failpoints.plugin = step;
                node.start_plugin()
            }
        }
    }

    fn has_ended(self, node: &mut Node) -> bool {
        match self {
            Self::Agent => node.agent_has_ended(),
            Self::Broker => node.plugin_has_ended(),
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(30);

/// Processes that have said that they abort at this step.
fn aborted(node: &Node, step: &str) -> Result<usize> {
    // Of a worker it is a line of its agent's log.
    let said = format!("failpoint: aborted at {step}");
    let mut times = 0;
    for log in ["node-agent", "csi-plugin"] {
        let text = std::fs::read(node.places().log(log))?;
        times += String::from_utf8_lossy(&text)
            .lines()
            .filter(|line| *line == said || line.contains(&format!("{said} worker=")))
            .count();
    }
    Ok(times)
}

/// Lines of this log with this text.
fn says(node: &Node, log: &str, text: &str) -> usize {
    let log = std::fs::read(node.places().log(log)).unwrap_or_default();
    String::from_utf8_lossy(&log).lines().filter(|line| line.contains(text)).count()
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

/// As on a node whose disk hangs just as csi-plugin starts.
#[test]
fn a_broker_that_had_no_time_for_its_mounts_is_shown_them_again() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mut pods = Vec::new();
    for volume in ["a", "b", "c"] {
        let mounted = node.volume(volume, "set", &[("profile", "large")])?;
        pods.push(node.pod(&mounted)?);
    }
    let running = pods.iter().map(|p| p.oracle(&tree, &["--alarm"])).collect::<Result<Vec<_>>>()?;
    let go_on = node.places().root().join("go-on");
    node.kill_plugin()?;
    node.options().failpoints.plugin = Some(format!("broker.hold=until:{}", go_on.display()).leak());
    node.start_plugin()?;
    node.options().failpoints.plugin = None;
    let refused = || says(&node, "node-agent", "the broker has no time to take every mount back") == 1;
    ensure!(wait_until(PATIENCE, refused), "the agent waits for ever for a broker that stands still");
    std::fs::write(&go_on, "")?;
    node.wait_whole(PATIENCE)?;
    finish(node, running)
}

/// Kubelet repeats its publishes while a new broker is being shown the mounts.
#[test]
fn a_publish_while_a_broker_takes_a_mount_back_is_not_noticed() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let volume = node.create("v", "set", &[("profile", "large")])?;
    let mounted = node.publish(&volume, "pod")?;
    let pod = node.pod(&mounted)?;
    let running = vec![pod.oracle(&tree, &["--alarm"])?];
    let mounts = |node: &Node| -> Result<Vec<String>> {
        Ok(node.agent().volumes()?.into_iter().map(|volume| volume.mount).collect())
    };
    let before = mounts(&node)?;
    for step in BROKER_STEPS {
        let go_on = node.places().root().join(format!("{step}.go-on"));
        node.kill_plugin()?;
        node.options().failpoints.plugin = Some(format!("{step}=until:{}", go_on.display()).leak());
        node.start_plugin()?;
        node.options().failpoints.plugin = None;
        let waits = format!("failpoint: waits at {step}");
        ensure!(
            wait_until(PATIENCE, || says(&node, "csi-plugin", &waits) == 1),
            "{step}: no process waits there"
        );
        node.publish(&volume, "pod").context(*step)?;
        std::fs::write(&go_on, "")?;
        node.wait_whole(PATIENCE).context(*step)?;
        ensure!(mounts(&node)? == before, "{step}: it was mounted anew");
    }
    finish(node, running)
}

#[test]
fn a_publish_that_was_cut_short_is_repeated_or_undone_and_leaves_nothing() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    // What a first publish makes, and stays.
    let first = node.volume("first", "set", &[])?;
    node.unpublish(&first)?;
    let before = Resources::of(&node)?;
    for (step, who) in PUBLISH_STEPS {
        for repeated in [true, false] {
            let volume = node.create(&format!("{}-{repeated}", step.replace('.', "-")), "set", &[])?;
            who.replace(&mut node, Some(step))?;
            let begun = Instant::now();
            while !who.has_ended(&mut node) {
                // It may be too early: the orchestrator repeats it.
                ensure!(
                    node.publish(&volume, "pod").is_err(),
                    "{step}: a publish succeeded that cannot have"
                );
                ensure!(begun.elapsed() < PATIENCE, "{step}: no process has died");
                std::thread::sleep(Duration::from_millis(20));
            }
            ensure!(aborted(&node, step)? == 1 + usize::from(!repeated), "{step}: it died of something else");
            who.replace(&mut node, None)?;
            if repeated {
                wait_until(PATIENCE, || node.publish(&volume, "pod").is_ok());
                let mounted =
                    node.publish(&volume, "pod").with_context(|| format!("repeated after {step}"))?;
                let stack = mountinfo::below(&mounted.target)?;
                let fuse = stack.iter().filter(|m| m.kind.starts_with("fuse")).count();
                ensure!(fuse == 1, "{step}: mounts were stacked: {stack:?}");
                node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
                node.unpublish(&mounted)?;
            } else {
                let target = node.target(&volume, "pod")?;
                let undone = || node.plugin().unpublish(&volume.id, &target).is_ok();
                ensure!(wait_until(PATIENCE, undone), "{step}: it cannot be unpublished");
            }
            let left = mountinfo::below(&node.places().kubelet())?;
            ensure!(left.is_empty(), "{step}: left behind: {left:?}");
            let forgotten = || node.agent().volumes().is_ok_and(|volumes| volumes.is_empty());
            ensure!(wait_until(PATIENCE, forgotten), "{step}: the agent has {:?}", node.agent().volumes());
            before.ensure_same(&node).context(*step)?;
        }
    }
    node.finish()
}

/// The agent has been given the mount, and goes on when its volume is gone.
#[test]
fn a_volume_that_is_unpublished_while_an_agent_adopts_it_is_served_by_nobody() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let first = node.volume("first", "set", &[])?;
    node.unpublish(&first)?;
    let before = Resources::of(&node)?;
    for (round, step) in ["agent.adopt", "agent.scope-opened", "agent.memory-mapped"].iter().enumerate() {
        let mounted = node.volume(&step.replace('.', "-"), "set", &[])?;
        let go_on = node.places().root().join(format!("{step}.go-on"));
        node.kill_agent()?;
        node.options().failpoints.agent = Some(format!("{step}=until:{}", go_on.display()).leak());
        node.spawn_agent()?;
        node.options().failpoints.agent = None;
        let waits = format!("failpoint: waits at {step}");
        ensure!(wait_until(PATIENCE, || says(&node, "node-agent", &waits) == 1), "{step}: it is not adopted");
        node.unpublish(&mounted)?;
        std::fs::write(&go_on, "")?;
        let logged = || says(&node, "csi-plugin", "ended while it was handed over") == round + 1;
        ensure!(wait_until(PATIENCE, logged), "{step}: the broker does not know what became of it");
        let forgotten = || node.agent().volumes().is_ok_and(|volumes| volumes.is_empty());
        ensure!(wait_until(PATIENCE, forgotten), "{step}: the agent has {:?}", node.agent().volumes());
        ensure!(mountinfo::below(&node.places().kubelet())?.is_empty(), "{step}: a mount is left");
        before.ensure_same(&node).context(*step)?;
        // The same agent serves the next.
        let next = node.volume(&format!("next-{round}"), "set", &[])?;
        node.pod(&next)?.verify(&tree, 2)?.ensure_all(&tree)?;
        node.unpublish(&next)?;
    }
    node.finish()
}

/// A step at which no process dies proves nothing.
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
            ensure!(tests.contains(&format!("\"{step}\"")), "no process dies at {step}");
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
