//! Processes of the node die, hang and are replaced at random while applications judge every call.
//!
//! ```text
//!  legs:    applications start ── strike, whole again, strike, whole again, … ── applications tell what they saw
//!  killer:  draws a class, strikes, restarts agent and broker as kubelet would, waits until the node is whole
//! ```
//!
//! A node that does not become whole within the limit fails the run, and so does a leg in which a call failed. Two things
//! are declared in docs/failures.md and judged as such: what was open on a mount that another process ends is lost
//! (`ended`), and a reader of a file that is passed through from a disk that hangs waits for that disk (`disk`).

mod class;
mod crowd;
mod disk;
mod ended;
mod killer;
pub mod panics;
mod soak;
mod table;
pub mod writers;

pub use class::Class;
pub use soak::{SoakPlan, SoakReport};
pub use table::{ClassReport, TortureReport};

use super::deck::Deck;
use super::memory;
use super::resources::Resources;
use crate::clock::monotonic_ns;
use crate::node::{Mounted, Node, Protocol};
use crate::oracle::{HANG, Report};
use crate::pod::{Pod, Running};
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result};
use disk::{HangingDisk, waited_for_disk};
use killer::{Fault, Killer};
use soak::Soak;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Ordinary work of the applications after the last fault of a leg.
const AFTERMATH: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug)]
pub enum Length {
    /// One of each class, then as they are drawn.
    Faults(usize),
    Time(Duration),
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub length: Length,
    pub classes: Vec<Class>,
    /// Mounted volumes; every second one has profile *small*. A crowd and mounts that end have their own besides.
    pub volumes: usize,
    /// How many of them an application works on (each profile in turn); the others are there to be killed as well.
    pub applications: usize,
    pub shape: Shape,
    pub seed: u64,
    /// Pause of each application thread between two rounds, microseconds.
    pub pause_us: u64,
    /// Longest pause before a fault.
    pub gap: Duration,
    /// Before about one in so many faults the cache is emptied, so that reads are cold again.
    pub cold_every: u64,
    /// Threads of a crowd.
    pub crowd: usize,
    /// After so much time the applications are asked what they saw, and started anew.
    pub leg: Duration,
    /// Longest wait until everything is whole again.
    pub patience: Duration,
    /// Longest that a call of an application may take.
    pub hang: Duration,
    /// Faults are seldom, and the node is measured between them.
    pub soak: Option<SoakPlan>,
}

impl Plan {
    /// Every class that can be had: hangs, those of disks, too, need a limit that is shorter than an oracle's patience, an
    /// OOM kill a group, helpers an HDFS, a crowd another store.
    pub fn classes(hang_limit: Option<Duration>, store: Protocol) -> Result<Vec<Class>> {
        let groups = memory::is_writable()?;
        let had = |class: &Class| match class {
            Class::WorkerHang | Class::AgentHang | Class::DiskHang => hang_limit.is_some(),
            Class::WorkerOom => groups,
            Class::Helpers => store == Protocol::Hdfs,
            // Its own store is one that can be frozen by a request.
            Class::Crowd => store != Protocol::Hdfs,
            _ => true,
        };
        Ok(Class::ALL.into_iter().filter(had).collect())
    }

    pub fn short(seed: u64) -> Result<Self> {
        Ok(Self {
            length: Length::Faults(40),
            classes: Self::classes(None, Protocol::S3)?,
            volumes: 20,
            applications: 4,
            shape: Shape::LITTLE,
            seed,
            pause_us: 2000,
            gap: Duration::from_millis(100),
            cold_every: 8,
            crowd: 5000,
            leg: Duration::from_secs(300),
            patience: Duration::from_secs(30),
            hang: HANG,
            soak: None,
        })
    }

    pub fn long(seed: u64, length: Length) -> Result<Self> {
        let shape =
            Shape { directories: 10, files: 20, small_bytes: 100_000, large: 3, large_bytes: 24 << 20 };
        Ok(Self { length, shape, applications: 4, pause_us: 5000, cold_every: 25, ..Self::short(seed)? })
    }

    /// So many faults of each of these classes, in any order; for a machine that is twenty times slower than ours, where no
    /// time is judged.
    pub fn slow(seed: u64, volumes: usize, faults: &[(Class, usize)]) -> Result<Self> {
        let classes: Vec<_> = faults.iter().flat_map(|&(class, n)| std::iter::repeat_n(class, n)).collect();
        Ok(Self {
            length: Length::Faults(classes.len()),
            classes,
            volumes,
            applications: 2,
            shape: Shape { directories: 3, files: 20, small_bytes: 30_000, large: 2, large_bytes: 3 << 20 },
            pause_us: 3000,
            patience: Duration::from_secs(240),
            hang: Duration::from_secs(240),
            ..Self::short(seed)?
        })
    }
}

/// Publishes, strikes, unpublishes. The report tells of failed calls: they are for the caller to judge.
pub fn run(node: &mut Node, plan: &Plan) -> Result<TortureReport> {
    eprintln!("torture: seed {}, classes {}", plan.seed, names(&BTreeSet::from_iter(&plan.classes)));
    let begun = Instant::now();
    let disk = plan.classes.contains(&Class::DiskHang);
    let disk = disk.then(|| HangingDisk::insert(node, plan.patience)).transpose()?;
    let tree = Tree::generated("torture/", plan.shape);
    node.server.add(&tree, "torture")?;
    let mut mounted = Vec::new();
    for k in 0..plan.volumes {
        let profile = if is_large(k) { "large" } else { "small" };
        mounted.push(node.volume(&format!("torture{k}"), "torture", &[("profile", profile)])?);
    }
    let pods = mounted.iter().take(plan.applications).map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    let mut killer = Killer::new(node, plan, &mounted, disk)?;
    if plan.classes.iter().any(|class| class.is_panic()) {
        panics::allow(node);
    }
    // What agent and broker hold depends a little on whether they mounted something or were given it.
    killer.strike(node, Class::Agent)?;
    killer.strike(node, Class::Broker)?;
    let before = Resources::of(node)?;
    let mut soak = plan.soak.map(|soak| Soak::new(node, soak, plan.shape)).transpose()?;

    let mut schedule = Schedule::new(plan);
    let mut total = TortureReport::new(plan.seed, plan.volumes);
    while let Some(first) = schedule.next(begun) {
        let applications = start(plan, &tree, &mounted, &pods)?;
        let faults = leg(node, &mut killer, &mut schedule, &mut soak, begun, first)?;
        let mut seen = Vec::new();
        for (k, (volume, application)) in applications.into_iter().enumerate() {
            let mut report = application.finish(6 * plan.hang).context(volume.clone())?;
            if is_large(k) {
                let noticed = node.options().hang_limit.unwrap_or_default();
                excuse_waits_for_disks(&mut report, &faults, noticed, plan.hang);
            }
            seen.push((volume, report));
        }
        total.add_leg(faults, seen, begun.elapsed());
        eprintln!(
            "torture: {} faults, {} processes in {:.0} s, {} calls failed",
            total.faults(),
            total.processes(),
            total.seconds,
            total.failed
        );
        if !total.is_clean() {
            break; // the report says what; the rest of the run would only bury the logs
        }
    }
    if plan.classes.iter().any(|class| class.is_panic()) {
        eprintln!("torture: panics at {}", panics::places(node)?);
    }
    total.soak = soak.map(|soak| soak.end(node)).transpose()?;
    before.ensure_same(node)?;
    let disk = killer.end(node)?;
    pods.into_iter().try_for_each(Pod::end)?;
    for m in &mounted {
        node.unpublish(m)?;
    }
    disk.map_or(Ok(()), |disk| disk.remove(node))?;
    Ok(total)
}

/// Of profile *large*: its files are passed through.
fn is_large(k: usize) -> bool {
    k.is_multiple_of(2)
}

fn excuse_waits_for_disks(report: &mut Report, faults: &[Fault], noticed: Duration, after: Duration) {
    for fault in faults {
        let Some(mended_ns) = fault.mended_ns else { continue };
        report.excuse(|failure, slow| waited_for_disk(failure, slow, fault.at_ns, mended_ns, noticed, after));
    }
}

fn names(classes: &BTreeSet<&Class>) -> String {
    classes.iter().map(|class| class.name()).collect::<Vec<_>>().join(", ")
}

/// Strikes until the leg is over, at least once.
fn leg(
    node: &mut Node,
    killer: &mut Killer,
    schedule: &mut Schedule,
    soak: &mut Option<Soak>,
    begun: Instant,
    first: Class,
) -> Result<Vec<Fault>> {
    let leg = Instant::now();
    let mut faults = Vec::new();
    let mut next = Some(first);
    while let Some(class) = next {
        if let Some(soak) = soak {
            if !soak.allows(class) {
                next = schedule.next(begun);
                continue;
            }
            soak.between(node)?;
        }
        let at_ns = monotonic_ns();
        let fault = killer
            .strike(node, class)
            .with_context(|| format!("fault {} ({}), begun at {at_ns} ns", schedule.drawn, class.name()))?;
        faults.push(fault);
        next = (leg.elapsed() < schedule.leg).then(|| schedule.next(begun)).flatten();
    }
    std::thread::sleep(AFTERMATH);
    Ok(faults)
}

fn start(
    plan: &Plan,
    tree: &Tree,
    mounted: &[Mounted],
    pods: &[Pod],
) -> Result<Vec<(String, Running<Report>)>> {
    let mut all = Vec::new();
    for (k, (m, pod)) in mounted.iter().zip(pods).enumerate() {
        let (seed, pause) = ((plan.seed + k as u64).to_string(), plan.pause_us.to_string());
        let kinds = match is_large(k) {
            true => "pread,pread,open,stat,readdir,mmap,sequential,small,held",
            false => "small,small,open,stat,readdir,mmap,pread",
        };
        let hang = plan.hang.as_secs().to_string();
        let arguments =
            ["--alarm", "--seed", &seed, "--pause-us", &pause, "--hang-s", &hang, "--kinds", kinds];
        all.push((m.id.clone(), pod.oracle(tree, &arguments)?));
    }
    Ok(all)
}

/// Which class comes next.
struct Schedule {
    length: Length,
    deck: Deck<Class>,
    drawn: usize,
    leg: Duration,
}

impl Schedule {
    fn new(plan: &Plan) -> Self {
        let weighed = plan.classes.iter().map(|&class| (class, class.weight())).collect();
        Self { length: plan.length, deck: Deck::new(weighed, plan.seed), drawn: 0, leg: plan.leg }
    }

    fn next(&mut self, begun: Instant) -> Option<Class> {
        let more = match self.length {
            Length::Faults(faults) => self.drawn < faults,
            Length::Time(time) => begun.elapsed() < time,
        };
        more.then(|| {
            self.drawn += 1;
            self.deck.draw()
        })
    }
}
