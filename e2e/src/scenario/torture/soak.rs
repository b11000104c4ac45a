//! The same faults, seldom, for hours: pods come and go meanwhile, and whatever a node could keep too much of is measured.
//!
//! A process's memory says something once it has lived for a while. So agent and broker end by a fault once in a
//! [`SoakPlan::rest`], workers as they are struck.

use super::super::memory::groups;
use super::super::resources::{disk_bytes, slope_of};
use super::Class;
use crate::node::{Mounted, Node, Volume};
use crate::processes::{self, Memory};
use crate::{mountinfo, tree};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

/// Pods that come and go are there for so many faults.
const PODS_LIVE: usize = 6;
/// Sources of theirs, in turn.
const PODS: usize = 50;
/// What a process takes after its start it takes once.
const WARM_UP: Duration = Duration::from_secs(120);
/// What a process has in a moment goes up and down with what it does (the agent's bodies: by 20 MiB). What it keeps is the
/// least that it has in so long, and a leak raises that.
const WINDOW: Duration = Duration::from_secs(300);
/// Fewer of them have no slope: a run that is so short is judged by all that a process has.
const WINDOWS_LEAST: usize = 6;

#[derive(Clone, Copy, Debug)]
pub struct SoakPlan {
    /// A fault.
    pub every: Duration,
    /// An end of the agent or of the broker.
    pub rest: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    Agent,
    Broker,
    Worker,
}

/// Of all processes of one role.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Growth {
    pub processes: usize,
    /// Those that lived longer than the warm-up, and the longest life, seconds.
    pub measured: usize,
    pub longest_s: f64,
    /// Anonymous memory, bytes: the most that one had, and what the lives have in common, an hour.
    pub most: u64,
    pub an_hour: f64,
    /// The same of what was kept: the least of each five minutes, of which there were so many in all lives.
    pub kept_an_hour: f64,
    pub windows: usize,
    /// What each measured life kept, MiB, in the order of its windows: a slope may be one of them.
    pub kept_mib: Vec<Vec<f64>>,
}

impl Growth {
    fn judged(&self) -> f64 {
        if self.windows < WINDOWS_LEAST { self.an_hour } else { self.kept_an_hour }
    }
}

/// What a node has of one kind, while the same volumes are mounted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Level {
    pub first: f64,
    pub last: f64,
    /// By least squares.
    pub an_hour: f64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SoakReport {
    pub seconds: f64,
    pub pods: usize,
    pub memory: BTreeMap<Role, Growth>,
    pub levels: BTreeMap<String, Level>,
}

impl fmt::Display for SoakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        writeln!(f, "{:.2} h, {} pods came and went", self.seconds / 3600.0, self.pods)?;
        writeln!(
            f,
            "| process | lives | measured | longest, min | most, MiB | an hour, MiB | kept, an hour, MiB |"
        )?;
        writeln!(f, "|---|---:|---:|---:|---:|---:|---:|")?;
        for (role, g) in &self.memory {
            writeln!(
                f,
                "| {role:?} | {} | {} | {:.1} | {:.1} | {:+.2} | {:+.2} |",
                g.processes,
                g.measured,
                g.longest_s / 60.0,
                mib(g.most as f64),
                mib(g.an_hour),
                mib(g.kept_an_hour)
            )?;
        }
        for (role, growth) in &self.memory {
            for life in &growth.kept_mib {
                let life: Vec<String> = life.iter().map(|mib| format!("{mib:.1}")).collect();
                writeln!(f, "{role:?} kept, MiB, each five minutes: {}", life.join(" "))?;
            }
        }
        writeln!(f, "\n| of the node | first | last | an hour |")?;
        writeln!(f, "|---|---:|---:|---:|")?;
        for (name, level) in &self.levels {
            writeln!(f, "| {name} | {:.0} | {:.0} | {:+.1} |", level.first, level.last, level.an_hour)?;
        }
        Ok(())
    }
}

impl SoakReport {
    /// No process grows by more than so many bytes an hour.
    pub fn ensure_flat(&self, most: f64) -> Result<()> {
        let steep: Vec<_> =
            self.memory.iter().filter(|(_, growth)| growth.measured > 0 && growth.judged() > most).collect();
        ensure!(steep.is_empty(), "memory grows by more than {most} bytes an hour: {steep:?}");
        Ok(())
    }
}

/// Seconds since the begin, and a value.
type Series = Vec<(f64, f64)>;

pub(super) struct Soak {
    plan: SoakPlan,
    begun: Instant,
    next: Instant,
    /// When agent and broker may end again.
    rested: Instant,
    pods: Vec<Volume>,
    live: VecDeque<Mounted>,
    came: usize,
    lives: BTreeMap<(Role, u32), Series>,
    levels: BTreeMap<&'static str, Series>,
}

/// Ends the process of the agent or of the broker.
fn ends_them(class: Class) -> bool {
    !matches!(
        class,
        Class::Worker
            | Class::Workers
            | Class::Crowd
            | Class::WorkerOom
            | Class::WorkerPanic
            | Class::WorkerHang
            | Class::DiskHang
            | Class::Helpers
    )
}

impl Soak {
    pub(super) fn new(node: &mut Node, plan: SoakPlan, shape: tree::Shape) -> Result<Self> {
        let mut pods = Vec::new();
        for n in 0..PODS {
            let prefix = format!("soak{n}");
            let tree = tree::Tree::generated(
                &format!("{prefix}/"),
                tree::Shape { directories: 1, files: 3, large: 0, ..shape },
            );
            node.server.add(&tree, &prefix)?;
            let profile = if n.is_multiple_of(2) { "large" } else { "small" };
            pods.push(node.create(&prefix, &prefix, &[("profile", profile)])?);
        }
        let now = Instant::now();
        Ok(Self {
            plan,
            begun: now,
            next: now,
            rested: now + plan.rest,
            pods,
            live: VecDeque::new(),
            came: 0,
            lives: BTreeMap::new(),
            levels: BTreeMap::new(),
        })
    }

    /// May such a fault be the next?
    pub(super) fn allows(&mut self, class: Class) -> bool {
        if !ends_them(class) {
            return true;
        }
        let rested = Instant::now() >= self.rested;
        if rested {
            self.rested = Instant::now() + self.plan.rest;
        }
        rested
    }

    /// The node is whole. Looks at it, lets a pod come and another go, and waits for the time of the next fault.
    pub(super) fn between(&mut self, node: &mut Node) -> Result<()> {
        let volume = &self.pods[self.came % PODS];
        let pod = format!("pod-soak{}", self.came);
        self.came += 1;
        let mounted = node.publish(volume, &pod).with_context(|| pod.clone())?;
        for entry in fs::read_dir(&mounted.target)? {
            let path = entry?.path();
            if path.is_file() {
                fs::read(&path).with_context(|| path.display().to_string())?;
            }
        }
        self.live.push_back(mounted);
        if self.live.len() > PODS_LIVE {
            let gone = self.live.pop_front().context("there are some")?;
            node.unpublish(&gone)?;
            // As many are there as before: a level is the node's own.
            self.look(node)?;
        }
        self.next = (self.next + self.plan.every).max(Instant::now());
        std::thread::sleep(self.next.saturating_duration_since(Instant::now()));
        Ok(())
    }

    fn look(&mut self, node: &Node) -> Result<()> {
        let at = self.begun.elapsed().as_secs_f64();
        let (agent, plugin) = (node.agent().pid(), node.plugin().pid());
        let workers = processes::fuse_children(agent);
        let all = workers.iter().map(|pid| (Role::Worker, *pid));
        for (role, pid) in all.chain([(Role::Agent, agent), (Role::Broker, plugin)]) {
            let bytes = Memory::of(pid).anonymous;
            // One that has just ended has none.
            if bytes > 0 {
                self.lives.entry((role, pid)).or_default().push((at, bytes as f64));
            }
        }
        let cache = node.places().cache();
        let levels = [
            ("descriptors of the agent", processes::descriptors(agent)),
            ("descriptors of the broker", processes::descriptors(plugin)),
            ("processes", processes::children(agent).len() + 2),
            ("mounts", mountinfo::below(node.places().root())?.len()),
            ("groups of memory", groups()),
            (
                "MiB of names and state on disk",
                ((disk_bytes(&cache.join("meta")) + disk_bytes(&node.places().state("agent"))) >> 20)
                    as usize,
            ),
        ];
        for (name, value) in levels {
            self.levels.entry(name).or_default().push((at, value as f64));
        }
        Ok(())
    }

    pub(super) fn end(self, node: &mut Node) -> Result<SoakReport> {
        for mounted in &self.live {
            node.unpublish(mounted)?;
        }
        for volume in &self.pods {
            node.delete(volume)?;
        }
        let mut report = SoakReport {
            seconds: self.begun.elapsed().as_secs_f64(),
            pods: self.came,
            ..SoakReport::default()
        };
        let mut measured: BTreeMap<Role, Vec<Series>> = BTreeMap::new();
        for ((role, _), series) in self.lives {
            let growth = report.memory.entry(role).or_default();
            let (Some(first), Some(last)) = (series.first(), series.last()) else { continue };
            growth.processes += 1;
            growth.longest_s = growth.longest_s.max(last.0 - first.0);
            growth.most =
                growth.most.max(series.iter().fold(0.0, |most: f64, (_, bytes)| most.max(*bytes)) as u64);
            let from = first.0 + WARM_UP.as_secs_f64();
            let later: Series = series.iter().copied().filter(|(at, _)| *at >= from).collect();
            if later.len() > 2 {
                growth.measured += 1;
                measured.entry(role).or_default().push(later);
            }
        }
        for (role, lives) in measured {
            if let Some(growth) = report.memory.get_mut(&role) {
                growth.an_hour = an_hour(&lives);
                let kept: Vec<Series> = lives.iter().map(|life| kept(life)).collect();
                growth.kept_an_hour = an_hour(&kept);
                growth.windows = kept.iter().map(Vec::len).sum();
                let mib = |life: &Series| life.iter().map(|(_, bytes)| bytes / f64::from(1 << 20)).collect();
                growth.kept_mib = match role {
                    // Thousands, and they keep next to nothing.
                    Role::Worker => Vec::new(),
                    Role::Agent | Role::Broker => kept.iter().map(mib).collect(),
                };
            }
        }
        for (name, series) in self.levels {
            let level = Level {
                first: series.first().map_or(0.0, |(_, value)| *value),
                last: series.last().map_or(0.0, |(_, value)| *value),
                an_hour: an_hour(&[series]),
            };
            report.levels.insert(name.to_owned(), level);
        }
        Ok(report)
    }
}

fn an_hour(lives: &[Series]) -> f64 {
    3600.0 * slope_of(lives)
}

/// The least of each whole window.
fn kept(life: &[(f64, f64)]) -> Series {
    let (Some((begun, _)), Some((ended, _))) = (life.first(), life.last()) else { return Vec::new() };
    let window = WINDOW.as_secs_f64();
    let least = |n: usize| {
        let from = begun + n as f64 * window;
        let values =
            life.iter().filter(|(at, _)| (from..from + window).contains(at)).map(|(_, value)| *value);
        values.reduce(f64::min).map(|value| (from, value))
    };
    (0..((ended - begun) / window) as usize).filter_map(least).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_keeps_is_told_from_what_it_has_in_a_moment() {
        let every_10_s = |value: &dyn Fn(f64) -> f64| {
            (0..360).map(|n| f64::from(n) * 10.0).map(|at| (at, value(at))).collect()
        };
        // Up and down, and at its highest at the end.
        let busy: Series = every_10_s(&|at| if at % 70.0 < 60.0 { 10.0 + at / 100.0 } else { 10.0 });
        assert!(an_hour(std::slice::from_ref(&busy)) > 10.0);
        assert_eq!(an_hour(&[kept(&busy)]), 0.0);
        // A leak below that.
        let leaks: Series = busy.iter().map(|(at, value)| (*at, value + at / 600.0)).collect();
        assert!((an_hour(&[kept(&leaks)]) - 6.0).abs() < 0.7, "{:?}", kept(&leaks));
        assert_eq!(kept(&leaks).len(), 11, "the last window is not whole");
        assert_eq!((kept(&[]), kept(&leaks[..20])), (vec![], vec![]));
        // Too short to tell the two apart: nothing is let through for that.
        let short = Growth { measured: 1, an_hour: 5.0, kept_an_hour: 0.0, windows: 3, ..Growth::default() };
        let memory = BTreeMap::from([(Role::Agent, short)]);
        assert!(SoakReport { memory, ..SoakReport::default() }.ensure_flat(1.0).is_err());
    }
}
