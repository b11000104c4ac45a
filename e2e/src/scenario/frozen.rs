//! The store does not answer for a while: readers wait, no process is taken for hung, all is read when it answers again.

use crate::clock::wait_until;
use crate::node::{Node, Server};
use crate::tree::{Shape, Tree};
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const EPOCH_MAX: Duration = Duration::from_secs(300);
/// Of each pod.
const THREADS: usize = 4;

#[derive(Clone, Copy, Debug)]
pub struct FrozenReport {
    pub time: Duration,
    pub readers: usize,
    /// Requests that the store had taken and not answered, at the end of that time.
    pub waiting: u64,
    /// From its first answer until everything was read.
    pub after: Duration,
}

impl std::fmt::Display for FrozenReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "the store stood still for {:?}: {} threads waited, {} requests at the store; no process was replaced; all was read, and right, {:.2} s after the thaw",
            self.time,
            self.readers,
            self.waiting,
            self.after.as_secs_f64()
        )
    }
}

/// Publishes, freezes, thaws, unpublishes.
pub fn run(node: &mut Node, time: Duration) -> Result<FrozenReport> {
    let tree = Tree::generated("frozen/", Shape::LITTLE);
    node.server.add(&tree, "frozen")?;
    let (mut mounted, mut pods) = (Vec::new(), Vec::new());
    for profile in ["large", "small"] {
        let m = node.volume(&format!("frozen-{profile}"), "frozen", &[("profile", profile)])?;
        pods.push(node.pod(&m)?);
        // The names are known: it is contents that every reader will wait for.
        for file in &tree.files {
            std::fs::metadata(m.target.join(&file.path))?;
        }
        mounted.push(m);
    }
    let processes = |node: &Node| -> Result<_> {
        let mut serving = node.agent().serving()?;
        serving.sort();
        Ok((node.agent().pid(), serving, node.agent().heals()?.len()))
    };
    let before = processes(node)?;
    let frozen = node.server.frozen()?;
    let readers = pods.iter().map(|pod| pod.start_verify(&tree, THREADS, 0)).collect::<Result<Vec<_>>>()?;
    let wait = wait_until(PATIENCE, || node.server.stats().is_ok_and(|stats| stats.in_flight > 0));
    ensure!(wait, "no reader asks the store for anything");
    std::thread::sleep(time);
    let waiting = node.server.stats()?.in_flight;
    ensure!(waiting > 0, "no reader waits for the store any more");
    drop(frozen);
    let thaw = Instant::now();
    for reader in readers {
        reader.finish(PATIENCE)?.ensure_all(&tree)?;
    }
    let after = thaw.elapsed();
    ensure!(processes(node)? == before, "{before:?} became {:?}", processes(node)?);
    pods.into_iter().try_for_each(crate::pod::Pod::end)?;
    for m in &mounted {
        node.unpublish(m)?;
    }
    Ok(FrozenReport { time, readers: 2 * THREADS, waiting, after })
}

/// What one store is worth beside another one that does not answer.
#[derive(Clone, Copy, Debug)]
pub struct BesideReport {
    pub files: usize,
    /// Seconds for a cold epoch alone, before and after; and beside the frozen store.
    pub alone: [f64; 2],
    pub beside: f64,
    /// Requests that the frozen store had taken and not answered.
    pub waiting: u64,
}

impl BesideReport {
    /// Throughput beside a frozen store, as a part of that alone.
    pub fn ratio(&self) -> f64 {
        (self.alone[0] + self.alone[1]) / 2.0 / self.beside
    }
}

impl std::fmt::Display for BesideReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [before, after] = self.alone;
        write!(
            f,
            "{} files cold, alone in {before:.2} s and {after:.2} s, beside a frozen endpoint with {} requests in {:.2} s: {:.2} of the throughput",
            self.files,
            self.waiting,
            self.beside,
            self.ratio()
        )
    }
}

/// Epochs from a healthy endpoint, alone and while twice as many readers as there are request slots wait for another
/// endpoint that is frozen.
pub fn beside(node: &mut Node, files: usize) -> Result<BesideReport> {
    let crowd = Shape { directories: 8, files: 32, small_bytes: 30_000, large: 2, large_bytes: 64 << 20 };
    let (waited_for, shape) =
        (Tree::generated("waits/", crowd), Shape { files: files / 8, large: 0, ..crowd });
    node.server.add(&waited_for, "waits")?;
    let (healthy, tree) = (Server::start(node.places(), "healthy")?, Tree::generated("healthy/", shape));
    healthy.add(&tree, "healthy")?;
    let small = ("profile", "small");
    let waits = node.volume("waits", "waits", &[small, ("metadataTtl", "1h")])?;
    let crowds = [node.pod(&waits)?, node.pod(&waits)?];
    for file in &waited_for.files {
        std::fs::metadata(waits.target.join(&file.path))?; // the names are known
    }
    // On a mount of its own, whose pages no application has read before.
    let endpoint = healthy.endpoint();
    let epoch = |node: &mut Node, number: u64| -> Result<f64> {
        let m = node.volume(&format!("epoch-{number}"), "healthy", &[small, ("endpoint", &endpoint)])?;
        let pod = node.pod(&m)?;
        node.agent().evict_all()?;
        healthy.reset()?;
        let read = pod.start_verify(&tree, 16, number)?.finish(EPOCH_MAX)?;
        read.ensure_all(&tree)?;
        ensure!(healthy.stats()?.of("GetObject") >= tree.files.len() as u64, "it was not cold");
        pod.end()?;
        node.unpublish(&m)?;
        Ok(read.seconds)
    };
    epoch(node, 0)?; // names and connections
    let before = epoch(node, 1)?;
    node.server.freeze()?;
    let waiting = crowds.iter().map(|pod| pod.start_verify(&waited_for, 64, 0)).collect::<Result<Vec<_>>>();
    let enough = wait_until(PATIENCE, || node.server.stats().is_ok_and(|stats| stats.in_flight >= 40));
    let asked = node.server.stats()?.in_flight;
    let beside = epoch(node, 2);
    node.server.no_faults()?; // also where something has failed: a reader that waits could not be ended
    ensure!(enough, "the frozen store is asked for too little: {asked} requests");
    let (waiting, beside) = (waiting?, beside?);
    for reader in waiting {
        reader.finish(PATIENCE)?.ensure_all(&waited_for)?;
    }
    let after = epoch(node, 3)?;
    crowds.into_iter().try_for_each(crate::pod::Pod::end)?;
    node.unpublish(&waits)?;
    Ok(BesideReport { files: tree.files.len(), alone: [before, after], beside, waiting: asked })
}
