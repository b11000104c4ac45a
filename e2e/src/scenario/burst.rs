//! Pods that come and go at a steady rate, as when jobs of many small steps run: what a node has at the end it had in the
//! beginning.

use super::resources::slope;
use super::sources::{Source, Sources};
use crate::node::Node;
use crate::oracle::Stalls;
use crate::processes::{self, Memory};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Sources; a pod's is used by others before and after it.
const SOURCES: usize = 200;
/// Between publish and unpublish.
const POD_LIVES: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// The first looks: allocators and caches fill.
const WARM_UP: usize = 3;
const STACK_BYTES: usize = 256 << 10;

/// What a node holds at one moment.
#[derive(Clone, Copy, Debug, Serialize)]
struct Look {
    agent: u64,
    plugin: u64,
    agent_descriptors: usize,
    plugin_descriptors: usize,
}

#[derive(Clone, Debug, Serialize)]
pub struct BurstReport {
    pub per_minute: u32,
    pub seconds: f64,
    pub published: Stalls,
    pub unpublished: Stalls,
    /// Of the longest lag of a publish behind its time, seconds.
    pub late_s: f64,
    first: Look,
    last: Look,
    /// Anonymous memory, bytes an hour, by least squares: agent, plugin.
    pub growth: [f64; 2],
}

impl fmt::Display for BurstReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        write!(
            f,
            "{} publishes, {} a minute for {:.0} s, at most {:.1} s late: publish p50 {:.0} ms, p99 {:.0}, max {:.0}; \
             unpublish p50 {:.0} ms, p99 {:.0}; agent {:.1} to {:.1} MiB ({:+.2} an hour), {} to {} descriptors; plugin {:.1} \
             to {:.1} MiB ({:+.2} an hour), {} to {} descriptors",
            self.published.count,
            self.per_minute,
            self.seconds,
            self.late_s,
            self.published.p50_ms,
            self.published.p99_ms,
            self.published.max_ms,
            self.unpublished.p50_ms,
            self.unpublished.p99_ms,
            mib(self.first.agent as f64),
            mib(self.last.agent as f64),
            mib(self.growth[0]),
            self.first.agent_descriptors,
            self.last.agent_descriptors,
            mib(self.first.plugin as f64),
            mib(self.last.plugin as f64),
            mib(self.growth[1]),
            self.first.plugin_descriptors,
            self.last.plugin_descriptors,
        )
    }
}

#[derive(Default)]
struct Done {
    published_ns: Vec<u64>,
    unpublished_ns: Vec<u64>,
    failed: Option<anyhow::Error>,
}

/// One pod after the other, each by a thread of its own, for so long. Fails with the first call that does.
pub fn run(node: &mut Node, per_minute: u32, time: Duration) -> Result<BurstReport> {
    ensure!(per_minute > 0 && time > POD_LIVES, "a rate, and longer than {POD_LIVES:?}");
    let sources = Sources::create(node, SOURCES)?;
    let done = Mutex::new(Done::default());
    let every = Duration::from_secs(60) / per_minute;
    let (mut looks, mut late) = (Vec::new(), Duration::ZERO);
    let begun = Instant::now();
    {
        let (node, done) = (&*node, &done);
        std::thread::scope(|threads| -> Result<()> {
            let mut next_look = begun + LOOK_EVERY;
            for n in 0u32.. {
                let due = begun + every * n;
                if due - begun >= time || lock(done).failed.is_some() {
                    break;
                }
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                late = late.max(Instant::now() - due);
                let source = &sources.all[n as usize % SOURCES];
                let pod = std::thread::Builder::new().stack_size(STACK_BYTES);
                pod.spawn_scoped(threads, move || {
                    let result = live(node, source, n);
                    let mut done = lock(done);
                    match result {
                        Ok((published, unpublished)) => {
                            done.published_ns.push(published.as_nanos() as u64);
                            done.unpublished_ns.push(unpublished.as_nanos() as u64);
                        }
                        Err(error) => drop(done.failed.get_or_insert(error.context(format!("pod {n}")))),
                    }
                })?;
                if Instant::now() >= next_look {
                    next_look += LOOK_EVERY;
                    looks.push(look(node));
                }
            }
            Ok(())
        })?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(error) = done.failed {
        return Err(error);
    }
    sources.delete(node)?;
    let looks = looks.get(WARM_UP..).filter(|looks| looks.len() > 1).context("too short for a look")?;
    let an_hour = Duration::from_secs(3600).as_secs_f64() / LOOK_EVERY.as_secs_f64();
    let growth = |of: fn(&Look) -> u64| slope(&looks.iter().map(of).collect::<Vec<_>>()) * an_hour;
    Ok(BurstReport {
        per_minute,
        seconds,
        published: Stalls::of(done.published_ns),
        unpublished: Stalls::of(done.unpublished_ns),
        late_s: late.as_secs_f64(),
        first: looks[0],
        last: looks[looks.len() - 1],
        growth: [growth(|look| look.agent), growth(|look| look.plugin)],
    })
}

fn lock(done: &Mutex<Done>) -> std::sync::MutexGuard<'_, Done> {
    done.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn look(node: &Node) -> Look {
    let (agent, plugin) = (node.agent().pid(), node.plugin().pid());
    Look {
        agent: Memory::of(agent).anonymous,
        plugin: Memory::of(plugin).anonymous,
        agent_descriptors: processes::descriptors(agent),
        plugin_descriptors: processes::descriptors(plugin),
    }
}

/// Published, read, kept for a while, unpublished; how long the first and the last took.
fn live(node: &Node, source: &Source, n: u32) -> Result<(Duration, Duration)> {
    let volume = &source.volume;
    let target = node.target(volume, &format!("pod-{n}"))?;
    let begun = Instant::now();
    node.plugin().publish(node.publish_request(volume, &target))?;
    let published = begun.elapsed();
    source.verify(&target)?;
    std::thread::sleep(POD_LIVES);
    let begun = Instant::now();
    node.plugin().unpublish(&volume.id, &target)?;
    ensure!(!target.exists(), "unpublish left {}", target.display());
    Ok((published, begun.elapsed()))
}
