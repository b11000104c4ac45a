//! A directory of very many objects, through a mount: complete, in bounded memory, and warm for the next mount.

use crate::node::{Node, Server};
use crate::processes::{Memory, children};
use anyhow::{Context, Result, ensure};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Of one object. No call reads any.
const OBJECT_BYTES: u64 = 1000;
const STATS: u64 = 1000;

#[derive(Clone, Copy, Debug)]
pub struct ListingReport {
    pub objects: u64,
    /// The first listing, from the store to the last name.
    pub cold: Duration,
    /// The second, of the same mount.
    pub warm: Duration,
    /// The first of a second mount of the same source.
    pub remounted: Duration,
    /// A thousand look-ups of names that the kernel does not know yet.
    pub stats: Duration,
    pub list_requests: u64,
    pub before: Memory,
    pub peak: Memory,
}

/// Fails when a name is missing, or comes twice, or is asked of the store again.
pub fn run(node: &mut Node, objects: u64) -> Result<ListingReport> {
    let server = Server::synthetic(node.places(), objects, OBJECT_BYTES, "many/file-{n}")?;
    let endpoint = server.endpoint();
    let more = [("profile", "large"), ("metadataTtl", "1h"), ("endpoint", endpoint.as_str())];
    let mounted = node.volume("many", "", &more)?;
    let before = node.agent().memory();
    let (cold, peak) = watched(node.agent().pid(), || listed(&mounted.target.join("many"), objects))?;
    let list_requests = server.stats()?.of("ListObjectsV2");
    let (warm, more_peak) = watched(node.agent().pid(), || listed(&mounted.target.join("many"), objects))?;
    node.unpublish(&mounted)?;

    let again = node.volume("again", "", &more)?;
    server.reset()?; // publish makes sure that the source is there
    let (remounted, _) = watched(node.agent().pid(), || listed(&again.target.join("many"), objects))?;
    let width = (objects - 1).to_string().len();
    let begun = Instant::now();
    for k in 0..STATS.min(objects) {
        let n = k * (objects / STATS.min(objects));
        let path = again.target.join(format!("many/file-{n:0width$}"));
        let size = std::fs::metadata(&path).with_context(|| path.display().to_string())?.len();
        ensure!(size == OBJECT_BYTES, "{} has {size} bytes", path.display());
    }
    let stats = begun.elapsed();
    let asked = server.stats()?;
    ensure!(asked.total() == 0, "what is known was asked for again: {asked:?}");
    node.unpublish(&again)?;
    let peak = peak.max(more_peak);
    Ok(ListingReport { objects, cold, warm, remounted, stats, list_requests, before, peak })
}

fn listed(dir: &Path, objects: u64) -> Result<()> {
    // In the order of the names, each once: more than the last one, every time.
    let (mut last, mut count) = (std::ffi::OsString::new(), 0);
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        ensure!(name > last, "{name:?} after {last:?}");
        (last, count) = (name, count + 1);
    }
    ensure!(count == objects, "{count} names of {objects}");
    Ok(())
}

/// How long `work` takes, and the most memory of the agent and its workers meanwhile.
fn watched(agent: u32, work: impl FnOnce() -> Result<()>) -> Result<(Duration, Memory)> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut peak = Memory::default();
            while !done.load(Relaxed) {
                let mut now = Memory::of(agent);
                children(agent).into_iter().for_each(|worker| now += Memory::of(worker));
                peak = peak.max(now);
                std::thread::sleep(Duration::from_millis(20));
            }
            peak
        });
        let begun = Instant::now();
        let worked = work();
        let took = begun.elapsed();
        done.store(true, Relaxed);
        let peak = watcher.join().expect("the watcher does not panic");
        worked.map(|()| (took, peak))
    })
}

impl fmt::Display for ListingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{} objects: listed cold in {:.2} s ({} requests), again in {:.2} s, by a second mount in {:.2} s; \
             {STATS} look-ups in {:.3} s; agent and workers {:.1} MiB before, {:.1} MiB at most",
            self.objects,
            self.cold.as_secs_f64(),
            self.list_requests,
            self.warm.as_secs_f64(),
            self.remounted.as_secs_f64(),
            self.stats.as_secs_f64(),
            mib(self.before.unevictable()),
            mib(self.peak.unevictable()),
        )
    }
}
