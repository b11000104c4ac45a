//! A volume is published, used, hurt and unpublished, again and again: nothing may be left, nothing may grow.

use super::deck::Deck;
use super::resources::{Resources, slope_within};
use crate::mountinfo;
use crate::node::{Mounted, Node};
use crate::oracle::Verified;
use crate::pod::Running;
use crate::processes::Memory;
use crate::random::Random;
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);
/// Longest unpublish, whatever became of the worker.
const UNPUBLISH_LIMIT: Duration = Duration::from_secs(5);
/// Rounds after its start in which a process takes memory that it keeps.
const WARM_UP: usize = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Hurt {
    Nothing,
    /// In the middle of reading.
    Worker,
    Agent,
    Broker,
    /// Just before the volume is unpublished.
    LastWorker,
    /// The same, but it is stopped and stays so.
    StoppedWorker,
}

impl Hurt {
    fn weighed() -> Vec<(Self, u64)> {
        let all = [
            (Self::Nothing, 20),
            (Self::Worker, 100),
            // Seldom: growth is seen in those that live for long.
            (Self::Agent, 1),
            (Self::Broker, 1),
            (Self::LastWorker, 40),
            (Self::StoppedWorker, 38),
        ];
        all.to_vec()
    }
}

#[derive(Clone, Debug)]
pub struct CycleReport {
    pub seed: u64,
    hurts: BTreeMap<Hurt, usize>,
    pub bytes: u64,
    pub took: Duration,
    /// Slowest unpublish.
    pub unpublish_max: Duration,
    /// Anonymous memory, bytes per round, within the lives of each process.
    pub agent_growth: f64,
    pub plugin_growth: f64,
    before: Resources,
    state_files: usize,
}

impl fmt::Display for CycleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} rounds in {:.0} s, seed {}: {:?}; {:.1} MB compared; unpublish {:.0} ms at most; left behind: nothing \
             (before and after: {:?}, {} state files); anonymous memory per round: agent {:+.0} bytes, plugin {:+.0} bytes",
            self.hurts.values().sum::<usize>(),
            self.took.as_secs_f64(),
            self.seed,
            self.hurts,
            self.bytes as f64 / 1e6,
            self.unpublish_max.as_secs_f64() * 1e3,
            self.before,
            self.state_files,
            self.agent_growth,
            self.plugin_growth
        )
    }
}

/// Fails when a read fails or is wrong, an unpublish does not end, or something is left.
pub fn run(node: &mut Node, rounds: usize, seed: u64) -> Result<CycleReport> {
    eprintln!("cycles: seed {seed}");
    let begun = Instant::now();
    let tree = Tree::generated("cycles/", Shape::LITTLE);
    node.server.add(&tree, "cycles")?;
    let mut cycle = Cycle { tree, random: Random(seed), bytes: 0, unpublish_max: Duration::ZERO };
    // The first of each kind makes what stays: a connection to the store, a directory of state.
    for (n, hurt) in [Hurt::Agent, Hurt::Broker, Hurt::Worker].into_iter().enumerate() {
        cycle.round(node, &format!("warm-up{n}"), hurt)?;
    }
    let before = Resources::of(node)?;
    let state_files = files(&node.places().state(""))?;
    let mut deck = Deck::new(Hurt::weighed(), seed);
    let mut hurts = BTreeMap::new();
    let (mut agent, mut plugin) = (Lives::default(), Lives::default());
    for round in 0..rounds {
        if round % 100 == 99 {
            eprintln!("cycles: round {} of {rounds}", round + 1);
        }
        let hurt = deck.draw();
        *hurts.entry(hurt).or_insert(0) += 1;
        let name = format!("cycle{round}");
        cycle.round(node, &name, hurt).with_context(|| format!("round {round}, hurt: {hurt:?}"))?;
        agent.note(node.agent().pid());
        plugin.note(node.plugin().pid());
        let left = mountinfo::below(&node.places().kubelet())?;
        ensure!(left.is_empty(), "round {round} ({hurt:?}) left mounts: {left:#?}");
    }
    before.ensure_same(node)?;
    let state_after = files(&node.places().state(""))?;
    ensure!(state_after == state_files, "{state_files} state files before, {state_after} after");
    Ok(CycleReport {
        seed,
        hurts,
        bytes: cycle.bytes,
        took: begun.elapsed(),
        unpublish_max: cycle.unpublish_max,
        agent_growth: agent.growth(),
        plugin_growth: plugin.growth(),
        before,
        state_files,
    })
}

struct Cycle {
    tree: Tree,
    random: Random,
    bytes: u64,
    unpublish_max: Duration,
}

impl Cycle {
    fn round(&mut self, node: &mut Node, name: &str, hurt: Hurt) -> Result<()> {
        let profile = if self.random.one_in(2) { "large" } else { "small" };
        let volume = node.create(name, "cycles", &[("profile", profile)])?;
        let mounted = node.publish(&volume, &format!("pod-{name}"))?;
        let pod = node.pod(&mounted)?;
        if self.random.one_in(3) {
            node.agent().evict_all()?;
        }
        let reading = pod.start_verify(&self.tree, 2, 1 + self.random.below(1000))?;
        std::thread::sleep(Duration::from_micros(self.random.below(30_000)));
        match hurt {
            Hurt::Worker => signal_worker(node, &mounted, Signal::KILL)?,
            Hurt::Agent => {
                node.kill_agent()?;
                node.start_agent()?;
            }
            Hurt::Broker => {
                node.kill_plugin()?;
                node.start_plugin()?;
            }
            Hurt::Nothing | Hurt::LastWorker | Hurt::StoppedWorker => {}
        }
        self.finish(reading)?;
        match hurt {
            Hurt::LastWorker => signal_worker(node, &mounted, Signal::KILL)?,
            Hurt::StoppedWorker => signal_worker(node, &mounted, Signal::STOP)?,
            // The one that was hurt has the mount again, and unpublishes it as if nothing had happened.
            Hurt::Agent | Hurt::Broker => node.wait_whole(PATIENCE)?,
            Hurt::Nothing | Hurt::Worker => {}
        }
        pod.end()?;
        let begun = Instant::now();
        node.unpublish(&mounted)?;
        let took = begun.elapsed();
        ensure!(took < UNPUBLISH_LIMIT, "unpublish took {took:?}");
        self.unpublish_max = self.unpublish_max.max(took);
        node.delete(&volume)?;
        Ok(())
    }

    fn finish(&mut self, reading: Running<Verified>) -> Result<()> {
        let verified = reading.finish(Duration::from_secs(60))?;
        verified.ensure_all(&self.tree)?;
        self.bytes += verified.bytes;
        Ok(())
    }
}

fn signal_worker(node: &Node, mounted: &Mounted, signal: Signal) -> Result<()> {
    node.signal_worker(node.worker_of(&mounted.id, PATIENCE)?, signal)
}

/// Anonymous memory after each round, of one process after another.
#[derive(Default)]
struct Lives(Vec<(u32, Vec<u64>)>);

impl Lives {
    fn note(&mut self, pid: u32) {
        if self.0.last().is_none_or(|(last, _)| *last != pid) {
            self.0.push((pid, Vec::new()));
        }
        if let Some((_, life)) = self.0.last_mut() {
            life.push(Memory::of(pid).anonymous);
        }
    }

    fn growth(&self) -> f64 {
        let lives: Vec<&[u64]> = self.0.iter().filter_map(|(_, life)| life.get(WARM_UP..)).collect();
        slope_within(&lives)
    }
}

fn files(dir: &Path) -> Result<usize> {
    let mut count = 0;
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                open.push(entry.path());
            } else {
                count += 1;
            }
        }
    }
    Ok(count)
}
