//! Workers die at random moments while applications judge every call.

use super::resources::{Resources, slope};
use crate::clock::{monotonic_ns, wait_until};
use crate::node::{Mounted, Node};
use crate::oracle::{Report, Stalls};
use crate::pod::{Pod, Running};
use crate::processes::{self, Memory};
use crate::random::Random;
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

#[derive(Clone, Debug)]
pub struct KillPlan {
    pub kills: usize,
    /// Mounted volumes; every second one has profile *small*.
    pub volumes: usize,
    /// How many of them an application works on (each profile in turn); the others are there to be killed as well.
    pub applications: usize,
    pub shape: Shape,
    pub alarm: bool,
    pub seed: u64,
    /// Pause of each application thread between two rounds, microseconds.
    pub pause_us: u64,
    /// Longest pause between two kills.
    pub gap: Duration,
    /// Every so many kills several workers die at once.
    pub together_every: usize,
    /// Every so many kills the cache is emptied, so that reads are cold again.
    pub cold_every: usize,
    /// Longest wait until everything serves again.
    pub patience: Duration,
}

impl KillPlan {
    pub fn short(seed: u64) -> Self {
        Self {
            kills: 50,
            volumes: 4,
            applications: 4,
            shape: Shape::LITTLE,
            alarm: true,
            seed,
            pause_us: 500,
            gap: Duration::from_millis(40),
            together_every: 5,
            cold_every: 10,
            patience: Duration::from_secs(20),
        }
    }

    pub fn long(seed: u64, kills: usize) -> Self {
        let shape =
            Shape { directories: 10, files: 20, small_bytes: 100_000, large: 3, large_bytes: 24 << 20 };
        Self { kills, volumes: 20, applications: 6, shape, cold_every: 25, ..Self::short(seed) }
    }
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct KillReport {
    pub kills: usize,
    pub report: Report,
    pub stalls: Stalls,
    /// Kill → the same volume is served again, as the harness saw it.
    pub served_again: Stalls,
    /// Of the agent alone: growth of its unevictable memory per kill in the second half of the run, bytes.
    pub agent_growth_per_kill: f64,
    pub peak: Memory,
}

impl std::fmt::Display for KillReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} kills; {}; {}; served again p50 {:.1} ms, p99 {:.1} ms; agent's memory {:+.0} bytes per kill, peak of all {:.1} MB",
            self.kills,
            self.report.summary(),
            self.stalls,
            self.served_again.p50_ms,
            self.served_again.p99_ms,
            self.agent_growth_per_kill,
            self.peak.unevictable() as f64 / 1e6
        )
    }
}

struct Death {
    volume: String,
    at_ns: u64,
}

pub(super) struct Application {
    pub(super) volume: String,
    pub(super) running: Running<Report>,
    _pod: Pod,
}

/// Publishes, kills, unpublishes. The node is as before afterwards.
pub fn run(node: &mut Node, plan: &KillPlan) -> Result<KillReport> {
    eprintln!("kills: seed {}", plan.seed);
    let tree = Tree::generated("kills/", plan.shape);
    node.server.add(&tree, "kills")?;
    let mut mounted = Vec::new();
    for k in 0..plan.volumes {
        let profile = if k % 2 == 0 { "large" } else { "small" };
        mounted.push(node.volume(&format!("kill{k}"), "kills", &[("profile", profile)])?);
    }
    let before = Resources::of(node)?;
    let applications = start_applications(node, plan, &tree, &mounted)?;
    let mut random = Random(plan.seed);
    let mut watch =
        Watch { deaths: Vec::new(), again_ns: Vec::new(), agent: Vec::new(), peak: Memory::default() };
    while watch.deaths.len() < plan.kills {
        let round = watch.deaths.len();
        // Applications learn from a pause how far a run is; people learn it here.
        if round % 100 == 99 {
            eprintln!("kills: {} of {}", round + 1, plan.kills);
        }
        watch.kill_some(node, plan, &mut random)?;
        if random.below(plan.cold_every.max(1) as u64) == 0 {
            node.agent().evict_all()?;
        }
        std::thread::sleep(Duration::from_micros(random.below(plan.gap.as_micros() as u64)));
    }
    watch.wait_served(node, plan.patience)?;
    // A round of ordinary work after the last death.
    std::thread::sleep(Duration::from_millis(500));
    let mut all = Report::default();
    let mut felt = Vec::new();
    for application in applications {
        let report =
            application.running.finish(Duration::from_secs(60)).context(application.volume.clone())?;
        let deaths = watch.deaths.iter().filter(|d| d.volume == application.volume);
        let moments: Vec<u64> = deaths.map(|d| d.at_ns).collect();
        felt.extend(report.each_stall(&moments, 20_000_000));
        all.merge(report);
    }
    before.ensure_same(node)?;
    for m in &mounted {
        node.unpublish(m)?;
    }
    let half = &watch.agent[watch.agent.len() / 2..];
    Ok(KillReport {
        kills: watch.deaths.len(),
        report: all,
        stalls: Stalls::of(felt),
        served_again: Stalls::of(watch.again_ns),
        agent_growth_per_kill: slope(half),
        peak: watch.peak,
    })
}

pub(super) fn start_applications(
    node: &mut Node,
    plan: &KillPlan,
    tree: &Tree,
    mounted: &[Mounted],
) -> Result<Vec<Application>> {
    let mut all = Vec::new();
    for (k, m) in mounted.iter().take(plan.applications).enumerate() {
        let pod = node.pod(m)?;
        let (seed, pause) = ((plan.seed + k as u64).to_string(), plan.pause_us.to_string());
        let kinds = match k % 2 {
            0 => "pread,pread,open,stat,readdir,mmap,sequential,small,held",
            _ => "small,small,open,stat,readdir,mmap,pread",
        };
        let mut arguments = vec!["--seed", &seed, "--pause-us", &pause, "--kinds", kinds];
        if plan.alarm {
            arguments.push("--alarm");
        }
        let running = pod.oracle(tree, &arguments)?;
        all.push(Application { volume: m.id.clone(), running, _pod: pod });
    }
    Ok(all)
}

struct Watch {
    deaths: Vec<Death>,
    again_ns: Vec<u64>,
    agent: Vec<u64>,
    peak: Memory,
}

impl Watch {
    fn kill_some(&mut self, node: &Node, plan: &KillPlan, random: &mut Random) -> Result<()> {
        // All may be between two workers just now.
        let mut serving = Vec::new();
        let found = crate::clock::wait_until(plan.patience, || {
            serving = node.agent().serving().unwrap_or_default();
            !serving.is_empty()
        });
        ensure!(found, "no worker serves anything within {:?}", plan.patience);
        let together = random.one_in(plan.together_every.max(1) as u64);
        let n = if together { 2 + random.below(3) as usize } else { 1 };
        let mut killed = Vec::new();
        for _ in 0..n.min(serving.len()) {
            let (volume, pid) = serving.swap_remove(random.below(serving.len() as u64) as usize);
            let at_ns = monotonic_ns();
            // It may have been replaced since the list was made (a successor of the last round, say).
            if processes::kill_child(pid, node.agent().pid()).is_ok() {
                self.deaths.push(Death { volume: volume.clone(), at_ns });
                killed.push((volume, pid, at_ns));
            }
        }
        // Now and then the next victim is the process that is taking over.
        if !random.one_in(4) {
            self.wait_replaced(node, plan.patience, &killed)?;
        }
        let memory = node.agent().memory();
        self.peak = self.peak.max(memory);
        self.agent.push(Memory::of(node.agent().pid()).unevictable());
        Ok(())
    }

    fn wait_replaced(
        &mut self,
        node: &Node,
        patience: Duration,
        killed: &[(String, u32, u64)],
    ) -> Result<()> {
        let mut waiting: Vec<_> = killed.to_vec();
        let begun = Instant::now();
        while !waiting.is_empty() {
            let serving = node.agent().serving()?;
            waiting.retain(|(volume, pid, at_ns)| {
                let served = serving.iter().any(|(v, p)| v == volume && p != pid);
                if served {
                    self.again_ns.push(monotonic_ns() - at_ns);
                }
                !served
            });
            ensure!(begun.elapsed() < patience, "still not served after {patience:?}: {waiting:?}");
            if !waiting.is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    fn wait_served(&self, node: &Node, patience: Duration) -> Result<()> {
        let wanted = node.agent().volumes()?.len();
        let all = wait_until(patience, || node.agent().serving().is_ok_and(|s| s.len() == wanted));
        ensure!(
            all,
            "not every volume is served {patience:?} after the last death: {:?}",
            node.agent().volumes()?
        );
        Ok(())
    }
}
