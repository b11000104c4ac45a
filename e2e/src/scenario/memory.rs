//! One worker after the other takes more memory than it may: only that worker dies, and no call notices.

use crate::clock::{wait_until, within};
use crate::node::{AgentOptions, InjectedFault, Node};
use crate::oracle::Stalls;
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testkit::process::Process;

/// Longest that anything may take on a machine like ours.
pub const PATIENCE: Duration = Duration::from_secs(30);
const GROUP: &str = "millpond-worker-";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limits {
    /// Each worker has one.
    Own,
    /// No memory controller can be written here.
    None,
}

#[derive(Clone, Debug)]
pub struct MemoryReport {
    pub limits: Limits,
    pub deaths: usize,
    /// Of the reads in which a worker died.
    pub reads: Stalls,
}

impl std::fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.limits {
            Limits::Own => {
                write!(f, "{} workers out of memory, each alone; reads {}", self.deaths, self.reads)
            }
            Limits::None => {
                write!(f, "no memory controller can be written here: workers have no limit, and it is said")
            }
        }
    }
}

/// Starts a node of its own, and ends it. Within `patience` a worker has filled its memory: where that takes long, it must
/// not be taken for a hang.
pub fn run(times: usize, patience: Duration) -> Result<MemoryReport> {
    let name = |k: usize| format!("f{k:05}");
    // The k-th file is poisonous for the k-th worker only.
    let inject_faults = (0..times).map(|k| InjectedFault::new(name(k), "allocate", k as u32 + 1)).collect();
    let options = AgentOptions {
        inject_faults,
        worker_memory: "2Gi",
        memory_limit: "96Mi",
        hang_limit: Some(patience),
        ..AgentOptions::default()
    };
    let mut node = Node::start(options)?;
    let shape = Shape { directories: 1, files: times, small_bytes: 50_000, large: 0, large_bytes: 0 };
    let tree = Tree::generated("", shape);
    node.server.add(&tree, "set")?;
    let greedy = node.volume("greedy", "set", &[("profile", "small")])?;
    let other = node.volume("other", "set", &[("profile", "large")])?;
    if !is_writable()? {
        let said = || node.places().logs().contains("no limit of memory of their own");
        ensure!(wait_until(patience, said), "workers have no limit, and no log says so");
        node.finish()?;
        return Ok(MemoryReport { limits: Limits::None, deaths: 0, reads: Stalls::of(Vec::new()) });
    }
    let worker = |node: &Node, volume: &str| {
        let serving = node.agent().serving().unwrap_or_default();
        serving.into_iter().find(|(id, _)| id == volume).map(|(_, pid)| pid)
    };
    let confined = |node: &Node, volume: &str| worker(node, volume).and_then(group_of);
    let waits = wait_until(patience, || confined(&node, &other.id).is_some());
    ensure!(waits, "workers get no memory group of their own although this machine has a controller");
    let (agent, bystander) = (node.agent().pid(), worker(&node, &other.id));
    let base = confined(&node, &other.id).and_then(|group| Some(group.parent()?.to_owned()));
    let base = base.context("the other volume's worker is gone")?;
    let mut reads = Vec::new();
    for k in 0..times {
        ensure!(wait_until(patience, || confined(&node, &greedy.id).is_some()), "worker {k} has no group");
        let path = format!("d000/{}", name(k));
        let begun = Instant::now();
        let read = greedy.target.join(&path);
        let bytes = within(patience, move || std::fs::read(read))?.with_context(|| path.clone())?;
        reads.push(begun.elapsed().as_nanos() as u64);
        let file = tree.files.iter().find(|f| f.path == path).context("the tree has it")?;
        let wrong = tree.reference(file)?.first_difference(0, &bytes);
        ensure!(bytes.len() as u64 == file.size && wrong.is_none(), "{path}: wrong bytes");
        let healed = || node.agent().heals().is_ok_and(|heals| heals.len() == k + 1);
        ensure!(wait_until(patience, healed), "death {k}: {:?}", node.agent().heals());
    }
    let heals = node.agent().heals()?;
    let odd: Vec<_> = heals.iter().filter(|h| h.cause != "oom" || h.volume_id != greedy.id).collect();
    ensure!(odd.is_empty(), "{odd:?}");
    ensure!(node.agent().pid() == agent && !node.agent_has_ended(), "the agent died, too");
    ensure!(worker(&node, &other.id) == bystander, "another volume's worker died, too");
    node.finish()?;
    let groups = || -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&base).into_iter().flatten().flatten().map(|e| e.path());
        entries.filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(GROUP))).collect()
    };
    ensure!(wait_until(patience, || groups().is_empty()), "groups are left: {:?}", groups());
    Ok(MemoryReport { limits: Limits::Own, deaths: heals.len(), reads: Stalls::of(reads) })
}

/// Has this process a limit of memory for itself?
pub fn is_confined(pid: u32) -> bool {
    group_of(pid).is_some()
}

/// A process in this group that takes all the memory there is in it. The kernel would rather kill a worker; it ends, too,
/// when it is alone.
pub(super) fn fill(group: &Path) -> Result<Process> {
    let script = format!(
        "echo $$ > {} && exec dd if=/dev/zero of=/dev/null bs=1G",
        group.join("cgroup.procs").display()
    );
    Process::spawn(Command::new("sh").args(["-c", &script]).stdout(Stdio::null()).stderr(Stdio::null()))
}

/// The directory of the memory group that this process has for itself.
pub(super) fn group_of(pid: u32) -> Option<PathBuf> {
    memory_group(pid).filter(|dir| dir.file_name().is_some_and(|n| n.to_string_lossy().starts_with(GROUP)))
}

/// Of either version, where systemd, runc and most others mount them.
fn memory_group(pid: u32) -> Option<PathBuf> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    // Lines `id:controllers:path`; version 2 has the id 0 and no controllers.
    let groups = text.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(":/")?;
        match controllers.split(',').any(|one| one == "memory") {
            true => Some(Path::new("/sys/fs/cgroup/memory").join(path)),
            false => controllers.is_empty().then(|| Path::new("/sys/fs/cgroup").join(path)),
        }
    });
    // Version 1 comes first in the file where it has the controller.
    groups.into_iter().find(|dir| {
        ["memory.limit_in_bytes", "memory.max", "cgroup.procs"].iter().any(|f| dir.join(f).exists())
    })
}

/// How many groups there are that were made for workers, of nodes beside this process.
pub fn groups() -> usize {
    group_dirs().len()
}

/// Groups of workers that are gone, whose node can remove them no more.
pub(crate) fn remove_empty_groups() {
    for dir in group_dirs() {
        let _ = std::fs::remove_dir(dir); // one that has a process stays
    }
}

fn group_dirs() -> Vec<PathBuf> {
    fn below(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if depth > 0 {
                    below(&entry.path(), depth - 1, found);
                }
                if entry.file_name().to_string_lossy().starts_with(GROUP) {
                    found.push(entry.path());
                }
            }
        }
    }
    let mut found = Vec::new();
    // The plugin makes them in its own group, which is ours, or beside the leaf that it moves to.
    if let Some(own) = memory_group(std::process::id()) {
        below(&own, 1, &mut found);
    }
    found
}

/// Could a group with a limit be made beside this process? Leaves nothing.
pub fn is_writable() -> Result<bool> {
    let Some(own) = memory_group(std::process::id()) else { return Ok(false) };
    let trial = own.join(format!("millpond-trial-{}", std::process::id()));
    if std::fs::create_dir(&trial).is_err() {
        return Ok(false);
    }
    // Version 2: a group may give to its children what it has itself.
    let controllers = std::fs::read_to_string(own.join("cgroup.controllers")).unwrap_or_default();
    let limits = trial.join("memory.limit_in_bytes").exists() || controllers.contains("memory");
    std::fs::remove_dir(&trial)?;
    Ok(limits)
}
