//! The store does not answer for a while: readers wait, nobody is taken for hung, all is read when it answers again.

use crate::clock::wait_until;
use crate::node::Node;
use crate::tree::{Shape, Tree};
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
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
        // The names are known: it is contents that everybody will wait for.
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
    ensure!(wait, "nobody asks the store for anything");
    std::thread::sleep(time);
    let waiting = node.server.stats()?.in_flight;
    ensure!(waiting > 0, "nobody waits for the store any more");
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
