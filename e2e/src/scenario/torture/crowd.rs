//! Workers that die while thousands of requests wait for a frozen store. It is a store of its own: the applications'
//! one goes on.

use crate::clock::wait_until;
use crate::mountinfo;
use crate::node::{Mounted, Node, Server};
use crate::oracle::Crowd;
use crate::pod::Pod;
use crate::random::Random;
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::Signal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const DEATHS: u64 = 3;
/// A crowd that grows no more.
const SETTLED: Duration = Duration::from_secs(5);
/// From the thaw to the last answer.
const ANSWERED: Duration = Duration::from_secs(60);

pub(super) struct CrowdVolume {
    server: Server,
    mounted: Mounted,
    pod: Pod,
    tree: Tree,
    threads: usize,
    /// Where the kernel tells how many requests wait.
    control: PathBuf,
}

impl CrowdVolume {
    pub(super) fn publish(node: &mut Node, threads: usize) -> Result<Self> {
        let large_bytes = (threads as u64 * 4096).next_multiple_of(1 << 20);
        let shape = Shape { directories: 0, files: 0, small_bytes: 0, large: 1, large_bytes };
        let tree = Tree::generated("crowd/", shape);
        let server = Server::speaking(node.options().store, &[], node.places(), "s3-crowd")?;
        server.add(&tree, "crowd")?;
        let endpoint = server.endpoint();
        let more = [("endpoint", endpoint.as_str()), ("profile", "large"), ("freshness", "static")];
        let mounted = node.volume("crowd", "crowd", &more)?;
        let pod = node.pod(&mounted)?;
        // Below the node's directory: taken away with it, should this run fail.
        let control = node.places().root().join("run/fusectl");
        std::fs::create_dir_all(&control)?;
        rustix::mount::mount("fusectl", &control, "fusectl", MountFlags::empty(), None)?;
        Ok(Self { server, mounted, pod, tree, threads, control })
    }

    pub(super) fn volume(&self) -> &str {
        &self.mounted.id
    }

    pub(super) fn unpublish(self, node: &mut Node) -> Result<()> {
        rustix::mount::unmount(&self.control, UnmountFlags::empty())?;
        self.pod.end()?;
        Ok(node.unpublish(&self.mounted)?)
    }

    /// All callers wait, workers die, the store thaws, all are answered. Returns how many workers died, too.
    pub(super) fn strike(
        &self,
        node: &Node,
        random: &mut Random,
        patience: Duration,
    ) -> Result<(u64, Crowd)> {
        node.agent().evict_all()?;
        let mut crowd = self.pod.crowd(&self.tree, self.threads)?;
        let frozen = self.server.frozen()?;
        crowd.go();
        let crowded = self.crowded(patience)?;
        let (begun, mut deaths) = (Instant::now(), 0);
        // Until a successor has taken over all of them: the first worker may not have read every request when it dies.
        loop {
            deaths += 1;
            let taken_over = self.kill_worker(node, patience)?;
            if deaths >= DEATHS && taken_over >= crowded {
                break;
            }
            ensure!(begun.elapsed() < patience, "{taken_over} of {crowded} taken over");
            std::thread::sleep(Duration::from_millis(random.below(100)));
        }
        drop(frozen);
        Ok((deaths, crowd.finish(ANSWERED).context("the crowd was not answered")?))
    }

    /// How many requests wait, once no more of them come: of a crowd before, whose last pages were read as the cache was
    /// emptied, the kernel may still know some hundred.
    fn crowded(&self, patience: Duration) -> Result<u64> {
        let all = self.threads as u64;
        let (mut waiting, mut since) = (0, Instant::now());
        let settled = wait_until(patience, || {
            let now = self.waiting().unwrap_or(0);
            if now != waiting {
                (waiting, since) = (now, Instant::now());
            }
            waiting >= all || waiting >= all / 2 && since.elapsed() > SETTLED
        });
        ensure!(settled, "{waiting} of {all} requests wait after {patience:?}");
        Ok(waiting.min(all))
    }

    /// How many requests the successor took over.
    fn kill_worker(&self, node: &Node, patience: Duration) -> Result<u64> {
        let heals = || -> Result<Vec<_>> {
            let all = node.agent().heals()?;
            Ok(all.into_iter().filter(|h| h.level == 1 && h.volume_id == self.mounted.id).collect())
        };
        let before = heals()?.len();
        node.signal_worker(node.worker_of(&self.mounted.id, patience)?, Signal::KILL)?;
        let mut now = Vec::new();
        let healed = wait_until(patience, || {
            now = heals().unwrap_or_default();
            now.len() > before
        });
        ensure!(healed, "the crowd's worker was not replaced within {patience:?}");
        Ok(now.first().map_or(0, |newest| newest.replayed))
    }

    /// Requests that the kernel holds for this connection, whose number is the minor of its device.
    fn waiting(&self) -> Result<u64> {
        let all = mountinfo::below(&self.mounted.target)?;
        let fuse =
            all.into_iter().rfind(|m| m.kind.starts_with("fuse")).context("the crowd's mount is gone")?;
        let number = fuse.device.rsplit(':').next().unwrap_or_default();
        Ok(std::fs::read_to_string(self.control.join(number).join("waiting"))?.trim().parse()?)
    }
}
