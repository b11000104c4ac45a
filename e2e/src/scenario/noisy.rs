//! Fifteen volumes beside five that mean harm: their stores lie, trickle, never end or never answer, and their pods ask
//! for more all the time. The fifteen lose little of their throughput and none of their calls, and the agent no memory.

use crate::clock::wait_until;
use crate::node::{Mounted, Node, Server};
use crate::oracle::{Abuse, Report, Verified};
use crate::pod::{Pod, Running};
use crate::processes::{Memory, children, cpu_time, machine_time};
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use testkit::faults::{Fault, Rule, Script};
use testkit::hostile::{Harm, Hostile};

const PATIENCE: Duration = Duration::from_secs(60);
const EPOCH_MAX: Duration = Duration::from_secs(600);
/// What the issue of noisy tenants asks for: a part of the throughput, and bytes.
const KEPT: f64 = 0.8;
const MEMORY_MAX: u64 = 256 << 20;
/// Volumes that read from the store, that read from the cache, and that mean harm.
const COLD: usize = 10;
const WARM: usize = 5;
const HOSTILE: usize = 5;
/// Of each pod. A hostile one has more.
const THREADS: usize = 2;
const HOSTILE_THREADS: usize = 4;
/// Of the healthy store, as one has it that is not on the same machine. Without it an epoch is a matter of the
/// processor alone, which the kernel shares among all processes, of whichever volume: on two cores, hostile volumes cost
/// the others what their own work costs.
const LATENCY_MS: u64 = 30;
/// Applications of the warm volumes: at a steady pace, so that what they lose is not what they leave to others.
const WARM_WORK: [&str; 4] = ["--kinds", "pread,small,open,stat,readdir", "--pause-us", "20000"];

/// What one epoch of the fifteen was like.
#[derive(Clone, Debug)]
struct Epoch {
    /// From the first to the last byte of all cold volumes.
    seconds: f64,
    /// Of the warm ones.
    calls_per_second: f64,
    calls: u64,
    /// How many processors were at work: for any process of this machine; for agent and workers; for hostile pods and
    /// their stores.
    machine: f64,
    ours: f64,
    theirs: f64,
    /// Of the agent alone, and with its workers.
    agent: Memory,
    all: Memory,
}

#[derive(Clone, Debug)]
pub struct NoisyReport {
    pub seed: u64,
    pub files: usize,
    pub bytes: u64,
    alone: Vec<Epoch>,
    beside: Vec<Epoch>,
    /// What was played, and what came of it: requests to the hostile store, and what its pod did.
    harms: Vec<(Harm, u64, Abuse)>,
    /// Workers of hostile volumes that were replaced, and why.
    heals: Vec<(String, String)>,
}

impl NoisyReport {
    /// Median throughput of the cold volumes beside hostile ones, as a part of that without them.
    pub fn ratio(&self) -> f64 {
        median(&self.alone, |e| e.seconds) / median(&self.beside, |e| e.seconds)
    }

    /// The same of the warm ones' calls.
    pub fn warm_ratio(&self) -> f64 {
        median(&self.beside, |e| e.calls_per_second) / median(&self.alone, |e| e.calls_per_second)
    }

    /// Of the agent alone.
    pub fn peak(&self) -> u64 {
        self.alone.iter().chain(&self.beside).map(|e| e.agent.unevictable()).max().unwrap_or(0)
    }

    pub fn ensure_memory(&self) -> Result<()> {
        ensure!(self.peak() <= MEMORY_MAX, "the agent had {} bytes: {self}", self.peak());
        Ok(())
    }

    pub fn ensure_kept(&self) -> Result<()> {
        let (cold, warm) = (self.ratio(), self.warm_ratio());
        ensure!(cold >= KEPT && warm >= KEPT, "hostile volumes take from others: {self}");
        Ok(())
    }
}

impl fmt::Display for NoisyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let most = |of: fn(&Epoch) -> Memory| {
            let all = self.alone.iter().chain(&self.beside).map(|e| of(e).unevictable());
            mib(all.max().unwrap_or(0))
        };
        let calls: u64 = self.alone.iter().chain(&self.beside).map(|e| e.calls).sum();
        writeln!(
            f,
            "seed {}; {COLD} volumes, {} files and {:.0} MB cold: {} alone, {} beside {HOSTILE} hostile ones: {:.2} of \
             the throughput; {WARM} warm volumes: {:.2} of their calls per second; 0 of {calls} calls and no byte failed",
            self.seed,
            self.files,
            self.bytes as f64 / 1e6,
            spread(&self.alone),
            spread(&self.beside),
            self.ratio(),
            self.warm_ratio(),
        )?;
        writeln!(
            f,
            "processors at work: {:.2} alone, {:.2} beside; of that Millpond {:.2} and {:.2}, hostile pods and stores \
             {:.2}; anonymous and shared memory at most: agent {:.0} MiB, with its workers {:.0} MiB",
            median(&self.alone, |e| e.machine),
            median(&self.beside, |e| e.machine),
            median(&self.alone, |e| e.ours),
            median(&self.beside, |e| e.ours),
            median(&self.beside, |e| e.theirs),
            most(|e| e.agent),
            most(|e| e.all),
        )?;
        for (harm, asked, abuse) in &self.harms {
            writeln!(f, "  {harm:?}: {asked} requests; {abuse:?}")?;
        }
        for (volume, cause) in &self.heals {
            writeln!(f, "  the worker of {volume} was replaced: {cause}")?;
        }
        Ok(())
    }
}

fn median(epochs: &[Epoch], of: impl Fn(&Epoch) -> f64) -> f64 {
    let mut all: Vec<f64> = epochs.iter().map(of).collect();
    all.sort_by(f64::total_cmp);
    match all.len() {
        0 => 0.0,
        n if n % 2 == 1 => all[n / 2],
        n => (all[n / 2 - 1] + all[n / 2]) / 2.0,
    }
}

fn spread(epochs: &[Epoch]) -> String {
    let all = || epochs.iter().map(|e| e.seconds);
    let (least, most) = (all().fold(f64::MAX, f64::min), all().fold(0.0, f64::max));
    format!("{:.2} s ({least:.2} to {most:.2})", median(epochs, |e| e.seconds))
}

/// One that reads what is right and judges every call.
struct Honest {
    prefix: String,
    tree: Tree,
    profile: &'static str,
}

/// A volume whose store and whose pod mean harm.
struct Tenant {
    store: Hostile,
    mounted: Mounted,
    pod: Pod,
}

/// Epochs alone and beside, in turn: two of each for a round, so that every harm is done in each round. Fails where a
/// call of an honest volume does, or a process dies. `files` in each cold volume.
pub fn run(node: &mut Node, rounds: usize, files: usize, seed: u64) -> Result<NoisyReport> {
    eprintln!("noisy: seed {seed}");
    let healthy = Server::start(node.places(), "healthy")?;
    let shape = Shape {
        directories: 4,
        files: files.div_ceil(4),
        small_bytes: 30_000,
        large: 1,
        large_bytes: 4 << 20,
    };
    let mut honest = Vec::new();
    for n in 0..COLD + WARM {
        let prefix = format!("honest{n}");
        let shape = if n < COLD { shape } else { Shape::LITTLE };
        let tree = Tree::generated(&format!("{prefix}/"), shape);
        tree.write(&healthy.dir().join(&prefix))?;
        honest.push(Honest { prefix, tree, profile: if n % 2 == 0 { "large" } else { "small" } });
    }
    healthy.rescan()?;
    healthy.set_faults(&Script { seed: 0, rules: vec![Rule::always(Fault::Latency { ms: LATENCY_MS })] })?;
    let tenants = tenants(node)?;
    let agent = node.agent().pid();

    let mut report = NoisyReport {
        seed,
        files: COLD * honest[0].tree.files.len(),
        bytes: honest[..COLD].iter().map(|h| h.tree.bytes()).sum(),
        alone: Vec::new(),
        beside: Vec::new(),
        harms: Vec::new(),
        heals: Vec::new(),
    };
    let mut number = 0;
    let mut epoch = |node: &mut Node, theirs: &[u32]| -> Result<Epoch> {
        number += 1;
        epoch(node, &healthy, &honest, theirs, number, seed)
    };
    epoch(node, &[])?; // names, connections, and the cache of the warm ones
    let mut harms = Harm::ALL.into_iter().cycle();
    for _ in 0..2 * rounds {
        report.alone.push(epoch(node, &[])?);
        let mut pods = Vec::new();
        for (tenant, harm) in tenants.iter().zip(&mut harms) {
            tenant.store.play(harm);
            pods.push((harm, tenant.pod.abuse(HOSTILE_THREADS, seed.wrapping_add(pods.len() as u64))?));
        }
        let asked = wait_until(PATIENCE, || tenants.iter().all(|tenant| tenant.store.asked() > 0));
        let pids: Vec<_> = pods.iter().map(|(_, pod)| pod.pid()).collect();
        let beside = epoch(node, &pids);
        let asked_for: Vec<_> = tenants.iter().map(|tenant| tenant.store.asked()).collect();
        ensure!(asked, "not every hostile store is asked: {asked_for:?}");
        report.beside.push(beside?);
        for ((harm, pod), asked) in pods.into_iter().zip(asked_for) {
            report.harms.push((harm, asked, pod.finish(PATIENCE).with_context(|| format!("{harm:?}"))?));
        }
        // No reader waits any more: an endless listing ends.
        for (tenant, (harm, ..)) in tenants.iter().zip(&report.harms[report.harms.len() - HOSTILE..]) {
            ensure!(
                *harm != Harm::EndlessListings || falls_silent(&tenant.store),
                "a listing goes on for no reader"
            );
            tenant.store.play(Harm::None);
        }
    }
    ensure!(!node.agent_has_ended() && node.agent().pid() == agent, "the agent is another one");
    let (of_hostile, of_others): (Vec<_>, Vec<_>) =
        node.agent().heals()?.into_iter().partition(|heal| heal.volume_id.starts_with("hostile"));
    ensure!(of_others.is_empty(), "a worker of an honest volume was replaced: {of_others:?}");
    report.heals = of_hostile.into_iter().map(|heal| (heal.volume_id, heal.cause)).collect();
    for tenant in tenants {
        tenant.pod.end()?;
        node.unpublish(&tenant.mounted)?;
    }
    Ok(report)
}

/// Is it asked nothing for some seconds?
fn falls_silent(store: &Hostile) -> bool {
    let (mut last, mut since) = (store.asked(), Instant::now());
    wait_until(PATIENCE, || {
        if store.asked() != last {
            (last, since) = (store.asked(), Instant::now());
        }
        since.elapsed() > Duration::from_secs(5)
    })
}

fn tenants(node: &mut Node) -> Result<Vec<Tenant>> {
    let mut tenants = Vec::new();
    for n in 0..HOSTILE {
        let store = node.runtime().block_on(Hostile::start())?;
        let endpoint = store.endpoint();
        let profile = if n % 2 == 0 { "small" } else { "large" };
        let more = [("endpoint", endpoint.as_str()), ("profile", profile), ("metadataTtl", "1s")];
        let mounted = node.volume(&format!("hostile{n}"), "", &more)?;
        let pod = node.pod(&mounted)?;
        tenants.push(Tenant { store, mounted, pod });
    }
    Ok(tenants)
}

/// All honest volumes at once, on mounts of their own, whose pages no pod has read before. The cold ones read everything
/// once, from the store; the warm ones go on reading until the others are through.
fn epoch(
    node: &mut Node,
    healthy: &Server,
    honest: &[Honest],
    theirs: &[u32],
    number: u64,
    seed: u64,
) -> Result<Epoch> {
    let endpoint = healthy.endpoint();
    let mut pods = Vec::new();
    for volume in honest {
        let more = [("endpoint", endpoint.as_str()), ("profile", volume.profile), ("metadataTtl", "1h")];
        let mounted = node.volume(&format!("{}-{number}", volume.prefix), &volume.prefix, &more)?;
        pods.push((node.pod(&mounted)?, mounted));
    }
    for (_, mounted) in &pods[..COLD] {
        node.agent().evict(&mounted.target)?;
    }
    healthy.reset()?;
    // Their stores are this process.
    let clocks = || -> [Duration; 3] {
        let theirs: Duration = theirs.iter().map(|pid| cpu_time(*pid)).sum();
        [machine_time(), node.agent().cpu_time(), theirs + cpu_time(std::process::id())]
    };
    let (before, from) = (clocks(), Instant::now());
    let watch = Watch::start(node.agent().pid());
    let mut warm: Vec<Running<Report>> = Vec::new();
    for (volume, (pod, _)) in honest.iter().zip(&pods).skip(COLD) {
        warm.push(pod.oracle(&volume.tree, &WARM_WORK)?);
    }
    let begun = Instant::now();
    let mut cold: Vec<Running<Verified>> = Vec::new();
    for (volume, (pod, _)) in honest.iter().zip(&pods).take(COLD) {
        cold.push(pod.start_verify(&volume.tree, THREADS, seed.wrapping_add(number))?);
    }
    for (volume, read) in honest.iter().zip(cold) {
        read.finish(EPOCH_MAX)?.ensure_all(&volume.tree).with_context(|| volume.prefix.clone())?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let (mut calls, mut calls_per_second) = (0, 0.0);
    for application in warm {
        let report = application.finish(PATIENCE)?;
        report.ensure_clean()?;
        calls += report.total_calls();
        calls_per_second += report.total_calls() as f64 / report.seconds;
    }
    let (agent, all) = watch.end();
    let (after, took) = (clocks(), from.elapsed().as_secs_f64());
    let asked = healthy.stats()?.of("GetObject");
    ensure!(
        asked >= (COLD * honest[0].tree.files.len()) as u64,
        "it was not cold: {asked} objects were asked for"
    );
    for (pod, mounted) in pods {
        pod.end()?;
        node.unpublish(&mounted)?;
    }
    let [machine, ours, theirs] = [0, 1, 2].map(|k| after[k].saturating_sub(before[k]).as_secs_f64() / took);
    Ok(Epoch { seconds, calls_per_second, calls, machine, ours, theirs, agent, all })
}

/// The most memory of an agent, and of it and its workers together, from start to end.
struct Watch {
    done: std::sync::Arc<AtomicBool>,
    thread: std::thread::JoinHandle<(Memory, Memory)>,
}

impl Watch {
    fn start(agent: u32) -> Self {
        let done = std::sync::Arc::new(AtomicBool::new(false));
        let seen = done.clone();
        let thread = std::thread::spawn(move || {
            let (mut alone, mut all) = (Memory::default(), Memory::default());
            while !seen.load(Relaxed) {
                let own = Memory::of(agent);
                let mut now = own;
                children(agent).into_iter().for_each(|worker| now += Memory::of(worker));
                (alone, all) = (alone.max(own), all.max(now));
                std::thread::sleep(Duration::from_millis(100));
            }
            (alone, all)
        });
        Self { done, thread }
    }

    fn end(self) -> (Memory, Memory) {
        self.done.store(true, Relaxed);
        self.thread.join().expect("the watcher does not panic")
    }
}
