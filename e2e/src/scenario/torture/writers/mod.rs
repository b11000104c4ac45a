//! Programs that write while workers, agent and broker die: each call must succeed as on a local disk, each operation
//! must have happened once, and in the end the store must have what the programs wrote, and nothing else.
//!
//! ```text
//!  writers:  draw an operation ── do it through a pod's mount and in the model ── compare      (each in its directory)
//!  sharers:  append numbered records to one file, each from its own pod
//!  killer:   draws a class, strikes, restarts, waits until the node is whole
//! ```

mod model;
mod program;
mod shared;
mod writer;

pub use program::{LARGE, program};

use super::Plan;
use super::class::Class;
use super::killer::Killer;
use crate::clock::wait_until;
use crate::node::{AgentOptions, Mounted, Node, Protocol};
use crate::pod::Running;
use crate::random::Random;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use testkit::faults::{Fault, Rule, Script};
use writer::Writer;

/// What a name of the volume's directory must have in the end: its bytes.
type Files = BTreeMap<String, Vec<u8>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    Through,
    Back,
}

impl WriteMode {
    fn name(self) -> &'static str {
        match self {
            Self::Through => "through",
            Self::Back => "back",
        }
    }
}

#[derive(Clone, Debug)]
pub struct WritersPlan {
    pub mode: WriteMode,
    pub seed: u64,
    pub time: Duration,
    /// Each has a directory of its own; every second one works mostly in the second pod.
    pub writers: u64,
    /// Drawn evenly.
    pub classes: Vec<Class>,
    /// Longest pause before a death.
    pub gap: Duration,
    /// Of the store, from the first operation to the last.
    pub faults: Option<Script>,
    /// How long the store may take for the rest, and the node to become whole.
    pub patience: Duration,
}

impl WritersPlan {
    pub const DEATHS: [Class; 12] = [
        Class::Worker,
        Class::Worker,
        Class::Workers,
        Class::Agent,
        Class::Agent,
        Class::Broker,
        Class::AgentAndWorker,
        Class::BrokerAndWorker,
        Class::AgentTerm,
        Class::BrokerTerm,
        Class::HandOver,
        Class::HandOverAndDeath,
    ];

    pub fn short(mode: WriteMode, seed: u64) -> Self {
        Self {
            mode,
            seed,
            time: Duration::from_secs(20),
            writers: 6,
            classes: Self::DEATHS.to_vec(),
            gap: Duration::from_millis(400),
            faults: None,
            patience: Duration::from_secs(60),
        }
    }

    /// Each class of which no call is declared to fail. Hangs need a limit that is shorter than a program's patience, an OOM kill
    /// a group.
    pub fn classes(hang_limit: Option<Duration>) -> Result<Vec<Class>> {
        // A crowd is of readers, helpers are of another store; what was open on a mount that ends is lost; and a staging disk that
        // hangs is an error.
        let others = [Class::Crowd, Class::Helpers, Class::MountEnded, Class::DiskHang];
        let all = Plan::classes(hang_limit, Protocol::S3)?;
        Ok(all.into_iter().filter(|class| !others.contains(class)).collect())
    }

    /// Errors, resets, answers that are lost although the write has happened, and slow ones.
    pub fn store_faults(seed: u64) -> Script {
        let some = Rule::with_probability;
        let rules = vec![
            some(Fault::Status { code: 503, retry_after_s: None }, 0.03),
            some(Fault::Reset, 0.02),
            some(Fault::LostAnswer, 0.02),
            some(Fault::LostAnswer, 0.1).op("PutObject"),
            some(Fault::LostAnswer, 0.2).op("CompleteMultipartUpload"),
            some(Fault::LostAnswer, 0.1).op("CopyObject"),
            some(Fault::LostAnswer, 0.1).op("DeleteObject"),
            some(Fault::Latency { ms: 100 }, 0.1),
        ];
        Script { seed, rules }
    }
}

#[derive(Debug, Default)]
pub struct WritersReport {
    pub operations: u64,
    pub records: u64,
    pub deaths: BTreeMap<&'static str, u64>,
    pub files: usize,
    pub bytes: usize,
}

impl WritersReport {
    fn add(&mut self, other: Self) {
        self.operations += other.operations;
        self.records += other.records;
        for (class, deaths) in other.deaths {
            *self.deaths.entry(class).or_default() += deaths;
        }
        self.files += other.files;
        self.bytes += other.bytes;
    }
}

impl std::fmt::Display for WritersReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { operations, records, deaths, files, bytes } = self;
        let count: u64 = deaths.values().sum();
        write!(
            f,
            "{operations} operations and {records} shared records over {count} deaths ({deaths:?}); {files} files of {bytes} bytes are in the store as written"
        )
    }
}

/// What a process of programs does. It is one of its own: to close an inherited descriptor of a file that can be written
/// to is a call to the mount, so that a process with such files cannot start an agent while there is none.
#[derive(Clone, Debug, clap::Args)]
pub struct Work {
    /// The volume in each of two pods.
    #[arg(long = "root", num_args = 2)]
    pub roots: Vec<PathBuf>,
    #[arg(long)]
    pub writers: u64,
    #[arg(long)]
    pub seed: u64,
    /// Where the store keeps it, if it must have each file after fsync and close.
    #[arg(long)]
    pub store: Option<PathBuf>,
    /// What must be in the volume afterwards is written to here.
    #[arg(long)]
    pub expected: PathBuf,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Worked {
    pub operations: u64,
    pub records: u64,
    pub failed: Vec<String>,
}

/// What a thread of programs has come to.
enum Ended {
    Writer { files: Files, operations: u64 },
    Sharer { records: u64 },
}

/// Works until standard input ends, or until a program fails.
pub fn work(work: &Work) -> Result<()> {
    let over = Arc::new(AtomicBool::new(false));
    let (tell, ended) = mpsc::channel();
    let start = |name: String, work: Box<dyn FnOnce() -> Result<Ended> + Send>| {
        let (tell, over) = (tell.clone(), over.clone());
        std::thread::spawn(move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            let result = result.unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked")));
            if result.is_err() {
                over.store(true, Relaxed);
            }
            let _ = tell.send((name, result)); // received until all have told
        });
    };
    let [one, two] = <[PathBuf; 2]>::try_from(work.roots.clone()).ok().context("two roots")?;
    for k in 0..work.writers {
        let mut roots = [one.clone(), two.clone()];
        roots.rotate_left((k % 2) as usize);
        let (over, seed, store) = (over.clone(), work.seed.wrapping_mul(1000) + k, work.store.clone());
        let writes = move || {
            let (files, operations) = Writer::new(roots, &format!("w{k}"), seed, store)?.run(&over)?;
            Ok(Ended::Writer { files, operations })
        };
        start(format!("writer-{k}"), Box::new(writes));
    }
    for (pod, root) in [&one, &two].into_iter().enumerate() {
        let (over, path, seed) = (over.clone(), root.join("shared"), work.seed + pod as u64);
        let appends = move || Ok(Ended::Sharer { records: shared::append(&path, pod, seed, &over)? });
        start(format!("sharer-{pod}"), Box::new(appends));
    }
    drop(tell);
    println!("started");
    let stopped = over.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new()); // its end is what is waited for
        stopped.store(true, Relaxed);
    });
    let mut worked = Worked::default();
    for (name, result) in ended {
        match result {
            Ok(Ended::Writer { files, operations }) => {
                worked.operations += operations;
                for (name, bytes) in files {
                    let path = work.expected.join(name);
                    std::fs::create_dir_all(path.parent().context("it lies in a directory")?)?;
                    std::fs::write(path, bytes)?;
                }
            }
            Ok(Ended::Sharer { records }) => worked.records += records,
            Err(error) => worked.failed.push(format!("{name}: {error:#}")),
        }
    }
    println!("{}", serde_json::to_string(&worked)?);
    Ok(())
}

/// Legs of `leg` each, on a node of its own each: both modes, without and with a store that fails at times. The report of each
/// goes to standard error.
pub fn run_for(
    time: Duration,
    leg: Duration,
    seed: u64,
    classes: &[Class],
    hang_limit: Option<Duration>,
) -> Result<WritersReport> {
    let begun = Instant::now();
    let mut total = WritersReport::default();
    for number in 0.. {
        if begun.elapsed() >= time {
            break;
        }
        let mode = if number % 2 == 0 { WriteMode::Through } else { WriteMode::Back };
        let seed = seed.wrapping_add(number);
        let faults = (number % 4 >= 2).then(|| WritersPlan::store_faults(seed));
        let plan = WritersPlan {
            time: leg,
            classes: classes.to_vec(),
            faults,
            patience: Duration::from_secs(120),
            ..WritersPlan::short(mode, seed)
        };
        let mut node = Node::start(AgentOptions { hang_limit, ..AgentOptions::default() })?;
        if classes.iter().any(|class| class.is_panic()) {
            super::panics::allow(&mut node);
            // From their next start on.
            Killer::restart_agent(&mut node)?;
            Killer::restart_broker(&mut node)?;
            node.wait_whole(plan.patience)?;
        }
        let report = run(&mut node, &plan)?;
        node.finish()?;
        eprintln!("writers: {:.0} s, {mode:?}: {report}", begun.elapsed().as_secs_f64());
        total.add(report);
    }
    Ok(total)
}

/// Publishes, lets write, kills, compares, unpublishes.
pub fn run(node: &mut Node, plan: &WritersPlan) -> Result<WritersReport> {
    eprintln!("writers: seed {}, {:?}", plan.seed, plan.mode);
    let name = format!("writers-{}", plan.mode.name());
    let one = node.workspace(&name, &name, &[("writeMode", plan.mode.name())])?;
    let two = node.workspace_again(&one, &format!("{name}-two"))?;
    let (store, expected) = (node.server.file(&name), node.places().root().join(format!("{name}-expected")));
    std::fs::create_dir_all(&expected)?;
    if let Some(faults) = &plan.faults {
        node.server.set_faults(faults)?;
    }
    let mut command = std::process::Command::new(node.places().bin("oracle"));
    command.arg("writers").arg("--root").arg(&one.target).arg(&two.target).arg("--expected").arg(&expected);
    command.args(["--writers", &plan.writers.to_string(), "--seed", &plan.seed.to_string()]);
    if plan.mode == WriteMode::Through && plan.faults.is_none() {
        command.arg("--store").arg(&store);
    }
    let mut programs = Running::<Worked>::start(command)?.after("started")?;
    let mut report = WritersReport::default();
    let struck = strike(node, plan, &[one.clone(), two.clone()], &mut programs, &mut report);
    let worked = programs.finish(plan.patience).with_context(|| format!("seed {}", plan.seed))?;
    node.server.no_faults()?;
    ensure!(worked.failed.is_empty(), "seed {}: {}", plan.seed, worked.failed.join("\n"));
    struck.with_context(|| format!("seed {}", plan.seed))?;
    (report.operations, report.records) = (worked.operations, worked.records);
    let shared = std::fs::read(one.target.join("shared"))?;
    shared::judge(&shared).with_context(|| format!("seed {}: the shared file", plan.seed))?;
    std::fs::write(expected.join("shared"), shared)?;
    let mut names = BTreeSet::new();
    collect(&expected, "", &mut names)?;
    let files = names.into_iter().map(|name| Ok((name.clone(), std::fs::read(expected.join(name))?)));
    let files = files.collect::<Result<Files>>()?;
    compare_with_store(&store, &files, plan.patience).with_context(|| format!("seed {}", plan.seed))?;
    (report.files, report.bytes) = (files.len(), files.values().map(Vec::len).sum());
    std::fs::remove_dir_all(&expected)?;
    node.unpublish(&two)?;
    node.unpublish(&one)?;
    Ok(report)
}

/// Kills until the time is over, or until a program fails.
fn strike(
    node: &mut Node,
    plan: &WritersPlan,
    mounted: &[Mounted],
    programs: &mut Running<Worked>,
    report: &mut WritersReport,
) -> Result<()> {
    let begun = Instant::now();
    if plan.classes.is_empty() {
        wait_until(plan.time, || programs.is_finished());
        return Ok(());
    }
    let (gap, patience, classes) = (plan.gap, plan.patience, plan.classes.clone());
    let how = Plan { gap, patience, classes, applications: 2, ..Plan::short(plan.seed)? };
    let mut killer = Killer::new(node, &how, mounted, None)?;
    let mut random = Random(plan.seed ^ 0x7772_6974);
    while begun.elapsed() < plan.time {
        let class = plan.classes[random.below(plan.classes.len() as u64) as usize];
        killer.strike(node, class).with_context(|| class.name())?;
        *report.deaths.entry(class.name()).or_default() += 1;
        if programs.is_finished() {
            break; // only when something has failed
        }
    }
    killer.end(node).map(drop)
}

fn compare_with_store(top: &Path, files: &Files, patience: Duration) -> Result<()> {
    let mut wrong = String::new();
    let same = wait_until(patience, || {
        wrong = match differences(top, files) {
            Ok(wrong) => wrong,
            Err(error) => format!("{error:#}"),
        };
        wrong.is_empty()
    });
    ensure!(same, "after {patience:?} the store has: {wrong}");
    Ok(())
}

fn differences(top: &Path, files: &Files) -> Result<String> {
    let mut there = BTreeSet::new();
    collect(top, "", &mut there)?;
    let mut wrong = Vec::new();
    for name in &there {
        if !files.contains_key(name) {
            wrong.push(format!("{name}, which is nowhere else"));
        }
    }
    for (name, bytes) in files {
        match std::fs::read(top.join(name)) {
            Err(error) => wrong.push(format!("not {name}: {error}")),
            Ok(stored) => {
                wrong.extend(model::difference(&stored, bytes).map(|what| format!("{name}: {what}")))
            }
        }
    }
    Ok(wrong.join("; "))
}

fn collect(dir: &Path, prefix: &str, into: &mut BTreeSet<String>) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        match entry.file_type()?.is_dir() {
            true => collect(&entry.path(), &format!("{name}/"), into)?,
            false => drop(into.insert(name)),
        }
    }
    Ok(())
}
