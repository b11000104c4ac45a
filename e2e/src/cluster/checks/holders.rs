//! Agent and broker are deleted, killed, run out of memory and are rolled under a notebook that keeps reading.

use super::deletion::node_process;
use super::notebook::{another_worker, kill_worker, restart};
use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::notebook::Notebook;
use crate::cluster::waits::PATIENCE;
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use testkit::process::Process;

/// Rounds of rolling both DaemonSets to the next version and back: `MILLPOND_ROLLS`.
const ROLLS: usize = 1;

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    let mut notebook = Notebook::start(suite, "holders")?;
    let lives = under_the_notebook(suite, &mut notebook);
    // What the oracle saw explains a failure of the steps, too.
    let judged = notebook.end(suite);
    let lives = lives?;
    let report = judged?;
    let longest = report.slow.iter().map(|call| call.end_ns - call.start_ns).max().unwrap_or(0);
    println!("    longest call {:.1} s", longest as f64 / 1e9);
    notebook.ensure_told(suite, "MountHealed", lives)?;
    notebook.delete(suite)
}

/// Returns how many lives the broker has had.
fn under_the_notebook(suite: &Suite, notebook: &mut Notebook) -> Result<usize> {
    for holders in CHOICES {
        replaced(suite, holders, || delete_pods(suite, holders))?;
        println!("    pods deleted and replaced: {holders:?}");
    }
    out_of_memory(suite).context("the agent runs out of memory")?;
    println!("    agent ran out of memory");
    hung_worker(suite)?;
    println!("    worker stood still");
    notebook.restart_container(suite)?;
    for part in ["kubelet", "containerd"] {
        restart(suite, notebook, part)?;
    }
    println!("    container, kubelet and containerd restarted");
    let rounds =
        std::env::var("MILLPOND_ROLLS").ok().map_or(Ok(ROLLS), |n| n.parse()).context("MILLPOND_ROLLS")?;
    for round in 1..=rounds {
        there_and_back(suite, round)?;
        println!("    both DaemonSets rolled to the next version and back, round {round} of {rounds}");
    }
    without_api(suite, notebook)?;
    // Each choice once when pods are deleted; there and back in each round; one is killed without an API server.
    let with_broker = CHOICES.iter().filter(|holders| holders.contains(&Holder::Broker)).count();
    Ok(1 + with_broker + 2 * rounds + 1)
}

/// A process that holds the mounts' descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    Agent,
    Broker,
}

/// Apart and at once.
pub(super) const CHOICES: [&[Holder]; 3] =
    [&[Holder::Agent], &[Holder::Broker], &[Holder::Agent, Holder::Broker]];

impl Holder {
    fn daemon_set(self) -> &'static str {
        match self {
            Self::Agent => AGENT,
            Self::Broker => NODE,
        }
    }

    fn container(self) -> &'static str {
        match self {
            Self::Agent => "node-agent",
            Self::Broker => "csi-plugin",
        }
    }

    fn component(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Broker => "node",
        }
    }

    /// Waits until one that is not `other` runs. Ready pods alone say less: one that ends counts as ready for a moment.
    pub(super) fn wait(self, suite: &Suite, other: Option<u32>) -> Result<u32> {
        suite.kubectl.wait(&format!("one {self:?}, not {other:?}"), PATIENCE, |_| {
            let pid = match self {
                Self::Agent => suite.view().only("node-agent"),
                Self::Broker => node_process(suite),
            }?;
            Ok((Some(pid) != other).then_some(pid))
        })
    }
}

pub(super) fn delete_pods(suite: &Suite, holders: &[Holder]) -> Result<()> {
    let components: Vec<_> = holders.iter().map(|h| h.component()).collect();
    let labels = format!("app.kubernetes.io/component in ({})", components.join(","));
    suite.kubectl.run(&["delete", "pods", "-n", SYSTEM, "-l", &labels, "--wait=false"]).map(drop)
}

/// One after the other in one direction, at once in the other; the next round the other way round, so that each is newer
/// than its partner for a time.
fn there_and_back(suite: &Suite, round: usize) -> Result<()> {
    let image = |holder: Holder| -> Result<String> {
        let object = suite.kubectl.get("daemonset", SYSTEM, holder.daemon_set())?;
        let containers =
            object["spec"]["template"]["spec"]["containers"].as_array().cloned().unwrap_or_default();
        let ours = containers.into_iter().find(|c| c["name"] == holder.container());
        ours.and_then(|c| c["image"].as_str().map(str::to_owned)).context("the container's image")
    };
    let state = || {
        std::fs::read_to_string(suite.machine().path(STATE_VERSION))
            .context("the version of the agent's state")
    };
    let (this, before) = (image(Holder::Agent)?, state()?);
    ensure!(this != NEXT_IMAGE, "the next version runs already");
    let apart: [&[Holder]; 2] = [&[Holder::Agent], &[Holder::Broker]];
    let at_once: [&[Holder]; 1] = [&[Holder::Agent, Holder::Broker]];
    let steps: [&[&[Holder]]; 2] = match round % 2 {
        1 => [&apart, &at_once],
        _ => [&at_once, &apart],
    };
    for (steps, image) in steps.into_iter().zip([NEXT_IMAGE, &this]) {
        for holders in steps {
            replaced(suite, holders, || roll(suite, holders, image))?;
        }
        ensure!(
            (state()? == before) == (image == this),
            "the agent's state is of version {:?} after a roll to {image}, and was {before:?}",
            state()?
        );
    }
    Ok(())
}

fn roll(suite: &Suite, holders: &[Holder], image: &str) -> Result<()> {
    for holder in holders {
        let name = format!("daemonset/{}", holder.daemon_set());
        let container = format!("{}={image}", holder.container());
        suite.kubectl.run(&["set", "image", "-n", SYSTEM, &name, &container])?;
    }
    Ok(())
}

/// Does what ends these holders; returns when others serve in their place.
pub(super) fn replaced(suite: &Suite, holders: &[Holder], end: impl FnOnce() -> Result<()>) -> Result<()> {
    succeeded(suite, holders, end)?;
    serving(suite)
}

/// The same where nothing is mounted.
fn succeeded(suite: &Suite, holders: &[Holder], end: impl FnOnce() -> Result<()>) -> Result<()> {
    let before = holders.iter().map(|h| h.wait(suite, None)).collect::<Result<Vec<_>>>()?;
    end()?;
    for (holder, before) in holders.iter().zip(before) {
        holder.wait(suite, Some(before))?;
    }
    suite.kubectl.wait_millpond()
}

/// Agent and broker in new pods. kubelet starts a container at once that is killed for the first time, and lets one wait
/// that was killed before; and what waits for it meanwhile, longer and longer.
pub(super) fn renew_pods(suite: &Suite) -> Result<()> {
    let both = &[Holder::Agent, Holder::Broker];
    succeeded(suite, both, || delete_pods(suite, both))
}

fn serving(suite: &Suite) -> Result<()> {
    another_worker(suite, 0).map(drop)
}

/// A process fills the memory of the agent's container, whose first choice to kill is made the agent.
fn out_of_memory(suite: &Suite) -> Result<()> {
    let agent = Holder::Agent.wait(suite, None)?;
    std::fs::write(format!("/proc/{agent}/oom_score_adj"), "1000")?;
    let procs = memory_cgroup(agent)?.join("cgroup.procs");
    ensure!(procs.exists(), "{} is not there", procs.display());
    let script = format!("echo $$ > {} && exec tail /dev/zero", procs.display());
    let mut hog = None;
    replaced(suite, &[Holder::Agent], || {
        hog = Some(Process::spawn(Command::new("sh").args(["-c", &script]).stdout(Stdio::null()))?);
        Ok(())
    })
}

/// Where the kernel counts the memory of a process, cgroup v1 or v2.
fn memory_cgroup(pid: u32) -> Result<PathBuf> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let of = |controller: &str| {
        text.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers.split(',').any(|c| c == controller).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    match (of("memory"), of("")) {
        (Some(path), _) => Ok(PathBuf::from("/sys/fs/cgroup/memory").join(path)),
        (None, Some(path)) => Ok(PathBuf::from("/sys/fs/cgroup").join(path)),
        (None, None) => anyhow::bail!("process {pid} is in no memory cgroup: {text}"),
    }
}

fn hung_worker(suite: &Suite) -> Result<()> {
    let worker = another_worker(suite, 0)?;
    suite.view().signal(worker, Signal::STOP)?;
    another_worker(suite, worker).map(drop)
}

/// Agent, broker, a worker and a container end while only kubelet can start them again.
fn without_api(suite: &Suite, notebook: &mut Notebook) -> Result<()> {
    let k = &suite.kubectl;
    suite.machine().stop_part("kube-apiserver", "KILL")?;
    let outcome = (|| {
        for holder in [Holder::Agent, Holder::Broker] {
            let pid = holder.wait(suite, None)?;
            suite.view().kill(pid)?;
            holder.wait(suite, Some(pid))?;
            another_worker(suite, 0)?;
        }
        hung_worker(suite)?;
        python(suite, notebook)?;
        kill_worker(suite)
    })();
    suite.machine().start_part("kube-apiserver")?;
    suite.machine().wait_for_api(k)?;
    suite.machine().wait_for_node(k)?;
    outcome?;
    println!(
        "    without an API server: agent, broker and worker killed, a worker hung, a container restarted"
    );
    k.wait_millpond()
}

/// Ends the notebook's Python process from outside; kubelet starts another.
fn python(suite: &Suite, notebook: &mut Notebook) -> Result<()> {
    let view = suite.view();
    let running = || {
        let words = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        view.processes_of_pod(notebook.uid()).into_iter().find(|&pid| words(pid).starts_with("python3"))
    };
    let first = running().context("the notebook's Python process")?;
    view.signal(first, Signal::TERM)?;
    suite.kubectl.wait("another Python process", PATIENCE, |_| Ok(running().filter(|&pid| pid != first)))?;
    notebook.restarted();
    Ok(())
}
