//! An agent takes over from one that is running: applications notice a pause at most, whatever dies meanwhile.

use crate::failpoints::AGENT_STEPS;
use crate::workload::{judge, volumes};
use crate::{node_with, seed};
use anyhow::{Context, Result, bail, ensure};
use e2e::clock::wait_until;
use e2e::mountinfo;
use e2e::node::{AgentOptions, Failpoints, Mounted, Node, Outcome, Version};
use e2e::oracle::Report;
use e2e::pod::{Pod, Running};
use e2e::processes;
use e2e::scenario::handovers::{self, HandoverPlan};
use e2e::scenario::memory;
use e2e::tree::{Shape, Tree};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use testkit::fault_fs::{Call, DiskFaults};

const PATIENCE: Duration = Duration::from_secs(30);

fn of(version: Version) -> AgentOptions {
    AgentOptions { version, ..AgentOptions::default() }
}

fn crashing(step: &'static str, version: Version) -> AgentOptions {
    let failpoints = Failpoints { agent: Some(step), ..Failpoints::default() };
    AgentOptions { failpoints, ..of(version) }
}

fn applications(node: &mut Node, tree: &Tree, mounted: &[Mounted]) -> Result<Vec<(Pod, Running<Report>)>> {
    let start = |m| {
        let pod = node.pod(m)?;
        let running = pod.oracle(tree, &["--alarm"])?;
        Ok((pod, running))
    };
    mounted.iter().map(start).collect()
}

/// The pods end after what runs in them.
fn judge_all(applications: Vec<(Pod, Running<Report>)>) -> Result<()> {
    applications.into_iter().try_for_each(|(_pod, running)| judge(running))
}

/// Waits until this process is the node's agent and serves each mount.
fn served_by(node: &Node, pid: u32) -> Result<()> {
    let all = || node.agent().status().is_ok_and(|s| s.pid == pid) && node.agent_serves_all();
    ensure!(
        wait_until(PATIENCE, all),
        "agent {pid} does not serve every mount: {:?}",
        node.agent().volumes()
    );
    Ok(())
}

#[test]
fn neighbouring_versions_hand_over_there_and_back_and_no_call_fails() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let plan = HandoverPlan { rounds: 6, volumes: 4, shape: Shape::LITTLE, alarm: true, seed: seed() };
    let report = handovers::run(&mut node, &plan)?;
    println!("{report}");
    report.report.ensure_clean()?;
    assert_eq!(mountinfo::below(&node.places().kubelet())?, []);
    node.finish()
}

#[test]
fn a_hand_over_fetches_nothing_again_and_needs_no_store() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    for pod in &pods {
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    node.server.freeze()?;
    for version in [Version::Next, Version::This] {
        node.hand_over(&of(version))?;
        served_by(&node, node.agent().pid())?;
        for pod in &pods {
            pod.verify(&tree, 2)?.ensure_all(&tree)?;
        }
        if memory::is_writable()? {
            let confined = |s: Vec<(String, u32)>| s.iter().all(|(_, worker)| memory::is_confined(*worker));
            let all = wait_until(PATIENCE, || node.agent().serving().is_ok_and(confined));
            ensure!(all, "workers of the new agent have no limit of memory");
        }
    }
    // They are written down a moment after a worker serves.
    let recorded =
        || node.agent().heals().is_ok_and(|all| all.iter().filter(|h| h.cause == "upgrade").count() == 2);
    ensure!(wait_until(PATIENCE, recorded), "{:?}", node.agent().heals());
    drop(pods);
    node.finish()
}

#[test]
fn a_far_version_is_refused_and_the_running_agent_goes_on() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let running = applications(&mut node, &tree, &mounted)?;
    let (pid, workers) = (node.agent().pid(), node.agent().serving()?);
    node.start_standby(&of(Version::Far))?;
    let Outcome::Failed(status) = node.decide()? else { bail!("a far version took over") };
    ensure!(!status.success(), "the far version ended with {status}");
    let log = std::fs::read_to_string(node.places().log("node-agent"))?;
    ensure!(log.contains("install a version between them first"), "the log does not say what to do:\n{log}");
    served_by(&node, pid)?;
    assert_eq!(node.agent().serving()?, workers, "workers were replaced");
    judge_all(running)?;
    node.finish()
}

#[test]
fn a_volume_that_the_new_agent_cannot_serve_keeps_the_old_one() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let running = applications(&mut node, &tree, &mounted)?;
    let (pid, workers) = (node.agent().pid(), node.agent().serving()?);
    // On its list none of these sources stands.
    let options = AgentOptions { allow: "s3://elsewhere", ..of(Version::Next) };
    node.start_standby(&options)?;
    let Outcome::Failed(status) = node.decide()? else { bail!("an agent took over that cannot serve") };
    ensure!(!status.success(), "it ended with {status}");
    let log = std::fs::read_to_string(node.places().log("node-agent"))?;
    let why =
        mounted.iter().any(|m| log.contains(&format!("volume {}", m.id)) && log.contains("allow.sources"));
    ensure!(why, "the log does not say which volume, and why:\n{log}");
    served_by(&node, pid)?;
    assert_eq!(node.agent().serving()?, workers, "workers were replaced");
    // Nor is it in the way of one that can.
    node.hand_over(&of(Version::Next))?;
    served_by(&node, node.agent().pid())?;
    judge_all(running)?;
    node.finish()
}

#[test]
fn a_successor_that_crashes_at_any_step_leaves_the_old_agent_serving() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let running = applications(&mut node, &tree, &mounted)?;
    let before = mountinfo::below(&node.places().kubelet())?.len();
    let pid = node.agent().pid();
    let as_standby = ["standby.prepares", "standby.called", "standby.owns", "standby.up"];
    let steps = as_standby.iter().chain(AGENT_STEPS).copied();
    for step in steps {
        // And its successor at the same step, too.
        for _ in 0..2 {
            node.start_standby(&crashing(step, Version::Next))?;
            let outcome = node.decide().context(step)?;
            let Outcome::Failed(status) = outcome else { bail!("{step}: {outcome:?}") };
            ensure!(!status.success(), "{step}: it did not crash: {status}");
            served_by(&node, pid).context(step)?;
        }
    }
    node.hand_over(&of(Version::Next))?;
    served_by(&node, node.agent().pid())?;
    assert_eq!(mountinfo::below(&node.places().kubelet())?.len(), before, "mounts were stacked");
    judge_all(running)?;
    node.finish()
}

#[test]
fn an_agent_that_crashes_while_it_steps_back_is_succeeded() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let running = applications(&mut node, &tree, &mounted)?;
    // Twice in a row at each.
    for step in ["old.called", "old.called", "old.drained", "old.drained"] {
        node.hand_over(&crashing(step, Version::This))?;
        node.start_standby(&of(Version::Next))?;
        let outcome = node.decide().context(step)?;
        let Outcome::Succeeded(status) = outcome else { bail!("{step}: {outcome:?}") };
        ensure!(!status.success(), "{step}: the old one did not crash: {status}");
        served_by(&node, node.agent().pid()).context(step)?;
    }
    judge_all(running)?;
    node.finish()
}

#[test]
fn an_agent_that_hangs_is_succeeded_by_one_that_comes() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    processes::signal(node.agent().pid(), Signal::STOP)?;
    node.start_standby(&of(Version::Next))?;
    let outcome = node.decide()?;
    let Outcome::Succeeded(status) = outcome else { bail!("{outcome:?}") };
    ensure!(!status.success(), "it was not killed: {status}");
    served_by(&node, node.agent().pid())?;
    for pod in &pods {
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    drop(pods);
    node.finish()
}

/// One of the agent's threads for it is in a call of this disk, which is a FUSE file system.
fn waits_for_its_staging_disk(agent: u32) -> bool {
    let read = |task: &Path, file: &str| fs::read_to_string(task.join(file)).unwrap_or_default();
    let waits = |task: &Path| {
        read(task, "comm").starts_with("staging-") && read(task, "wchan").contains("request_wait_answer")
    };
    let tasks = fs::read_dir(format!("/proc/{agent}/task"));
    tasks.is_ok_and(|tasks| tasks.flatten().any(|task| waits(&task.path())))
}

/// It cannot let go of what it may still change. All else is served meanwhile, and that when the disk answers.
#[test]
fn an_agent_whose_staging_disk_hangs_is_succeeded() -> Result<()> {
    let (mut node, disk) = Node::on_faulty_staging_disk(AgentOptions::default())?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let data_set = node.volume("set", "set", &[])?;
    let reader = node.pod(&data_set)?;
    let mounted = node.workspace("hangs", "hangs", &[("writeMode", "back")])?;
    let path = mounted.target.join("a");
    let mut file = File::create_new(&path)?;
    file.write_all(b"first")?;
    file.sync_all()?;
    drop(file);
    disk.set(&DiskFaults { hangs: vec![Call::Write], ..DiskFaults::default() })?;
    // A process of its own: whoever has the file open would wait for this mount where he starts another one.
    let append = format!("printf second >> '{}'", path.display());
    let mut writer = Command::new("sh").arg("-c").arg(append).stderr(Stdio::null()).spawn()?;
    let old = node.agent().pid();
    ensure!(wait_until(PATIENCE, || waits_for_its_staging_disk(old)), "nothing is written to the disk");
    node.start_standby(&of(Version::Next))?;
    ensure!(wait_until(PATIENCE, || processes::fuse_children(old).is_empty()), "it does not drain");
    reader.verify(&tree, 2)?.ensure_all(&tree)?;
    disk.set(&DiskFaults::default())?;
    let outcome = node.decide()?;
    let Outcome::Succeeded(status) = outcome else { bail!("{outcome:?}") };
    ensure!(!status.success(), "it let go of what it might still change: {status}");
    served_by(&node, node.agent().pid())?;
    let written = writer.wait()?;
    let found = fs::read(&path)?;
    let expected: &[u8] = if written.success() { b"firstsecond" } else { b"first" };
    ensure!(found == expected, "{written}, and {:?}", String::from_utf8_lossy(&found));
    drop(reader);
    node.finish()
}

#[test]
fn an_agent_that_is_killed_while_another_prepares_is_succeeded() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let running = applications(&mut node, &tree, &mounted)?;
    for k in 0..4 {
        node.start_standby(&of(if k % 2 == 0 { Version::Next } else { Version::This }))?;
        std::thread::sleep(Duration::from_millis(60 * k)); // at some moment of its start
        node.kill_old_agent()?;
        let outcome = node.decide()?;
        ensure!(matches!(outcome, Outcome::Succeeded(_)), "{outcome:?}");
        served_by(&node, node.agent().pid())?;
    }
    judge_all(running)?;
    node.finish()
}

#[test]
fn a_broker_that_crashes_in_the_middle_of_a_hand_over_leaves_one_agent_that_serves() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = volumes(&mut node)?;
    let running = applications(&mut node, &tree, &mounted)?;
    // More than are given to a new agent at a time.
    for k in 0..12 {
        node.volume(&format!("more-{k}"), "set", &[])?;
    }
    let steps = ["handoff.prepared", "handoff.drained", "handoff.succeeded", "broker.adopted-one"];
    for step in steps {
        node.stop_plugin()?;
        node.options().failpoints.plugin = Some(step);
        node.start_plugin()?;
        node.options().failpoints.plugin = None;
        served_by(&node, node.agent().pid())?;
        node.start_standby(&of(Version::This))?;
        ensure!(wait_until(PATIENCE, || node.plugin_has_ended()), "{step}: the broker did not crash");
        node.kill_plugin()?;
        node.start_plugin()?;
        let outcome = node.decide().context(step)?;
        println!("{step}: {outcome:?}");
        served_by(&node, node.agent().pid()).context(step)?;
    }
    judge_all(running)?;
    node.finish()
}
