//! Agent and broker are killed at once, so that no process holds the mounts: paths work again in every pod, none of
//! which is restarted.

use crate::clock::wait_until;
use crate::mountinfo;
use crate::node::{AgentOptions, Mounted, Node, secrets};
use crate::oracle::Stalls;
use crate::pod::Pod;
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest wait until paths work again. What is promised is less: see the report.
const PATIENCE: Duration = Duration::from_secs(30);
/// Everything is read and compared every so many rounds.
const VERIFY_EVERY: usize = 10;

#[derive(Clone, Copy, Debug)]
pub struct RenewalReport {
    pub rounds: usize,
    pub pods: usize,
    /// New broker started → paths work in every pod.
    pub again: Stalls,
    /// The same before and after.
    pub mounts: usize,
    /// Reads through a file that was opened before the first death: served by the kernel alone, or ENOTCONN.
    pub held_served: usize,
    pub held_dead: usize,
}

impl std::fmt::Display for RenewalReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} times agent and broker killed at once, {} pods, none restarted but one on purpose: paths work again after p50 {:.0} ms, p99 {:.0} ms, max {:.0} ms from the start of the broker; {} mounts before and after; files held open: {} reads served, {} ENOTCONN",
            self.rounds,
            self.pods,
            self.again.p50_ms,
            self.again.p99_ms,
            self.again.max_ms,
            self.mounts,
            self.held_served,
            self.held_dead
        )
    }
}

/// A node whose agent has keys of its own: nothing waits for a republish.
pub fn node() -> Result<Node> {
    let [(_, id), (_, secret)] = secrets();
    Node::start(AgentOptions { environment: Some((id, secret)), ..AgentOptions::default() })
}

/// A pod, and what it must see.
struct Watched {
    pod: Pod,
    part: Tree,
}

impl Watched {
    /// Has the directory `below` of the volume, as with a subPath; "" is all of it.
    fn start(node: &mut Node, mounted: &Mounted, below: &str, tree: &Tree) -> Result<Self> {
        let at = Mounted { id: mounted.id.clone(), target: mounted.target.join(below) };
        Ok(Self { pod: node.pod(&at)?, part: tree.below(below) })
    }

    fn first(&self) -> PathBuf {
        self.pod.reach().join(&self.part.files[0].path)
    }

    fn reads(&self) -> bool {
        let right = |bytes: Vec<u8>| self.part.is_whole(&self.part.files[0], &bytes).unwrap_or(false);
        std::fs::read(self.first()).is_ok_and(right)
    }

    fn verify(&self) -> Result<()> {
        self.pod.verify(&self.part, 1)?.ensure_all(&self.part)
    }

    /// A read of the first file through a descriptor of before: false is ENOTCONN.
    fn held(&self, held: &File) -> Result<bool> {
        let file = &self.part.files[0];
        // What the kernel has of it would be served for ever.
        rustix::fs::fadvise(held, 0, None, rustix::fs::Advice::DontNeed)?;
        let mut buffer = vec![0; file.size as usize];
        match held.read_exact_at(&mut buffer, 0) {
            Ok(()) => {
                ensure!(self.part.is_whole(file, &buffer)?, "a file that was held open has other bytes");
                Ok(true)
            }
            Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => Ok(false),
            Err(e) => Err(e).context("a read of a file that was held open"),
        }
    }
}

/// In our mount namespace and in all pods.
fn mounts(node: &Node, pods: &[Watched]) -> Result<usize> {
    let root = node.places().root();
    let inside = pods.iter().map(|w| Ok(w.pod.mounts(root)?.len())).sum::<Result<usize>>()?;
    Ok(inside + mountinfo::below(root)?.len())
}

/// Publishes, kills, unpublishes. The node is as before afterwards.
pub fn run(node: &mut Node, rounds: usize) -> Result<RenewalReport> {
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "renewals")?;
    let mut mounted = Vec::new();
    for profile in ["large", "small"] {
        let volume = node.create(&format!("renewed-{profile}"), "renewals", &[("profile", profile)])?;
        mounted.push(node.publish_with(&volume, &format!("pod-{profile}"), &[])?);
    }
    let directory =
        tree.files.iter().find_map(|f| f.path.split_once('/')).context("a directory")?.0.to_owned();
    let mut pods = Vec::new();
    for m in &mounted {
        for below in ["", directory.as_str()] {
            pods.push(Watched::start(node, m, below, &tree)?);
        }
    }
    // The last one's container is restarted while neither is there.
    pods.push(Watched::start(node, &mounted[0], "", &tree)?);
    let mut held = Vec::new();
    for w in &pods {
        w.verify()?;
        held.push(File::open(w.first())?);
    }
    held.pop();

    let before = mounts(node, &pods)?;
    let (mut again, mut served) = (Vec::new(), 0);
    for round in 0..rounds {
        node.kill_both()?;
        ensure!(is_dead(&mounted[0].target), "a process still holds the mounts");
        let restarted = pods.pop().context("the last pod")?;
        restarted.pod.end()?;
        pods.push(Watched::start(node, &mounted[0], "", &tree)?);
        node.spawn_agent()?;
        let begun = Instant::now();
        node.start_plugin()?;
        let work = wait_until(PATIENCE, || pods.iter().all(Watched::reads));
        ensure!(work, "round {round}: paths do not work again within {PATIENCE:?}");
        again.push(begun.elapsed().as_nanos() as u64);
        let renewed = |node: &Node| -> Result<usize> {
            Ok(node.agent().heals()?.iter().filter(|heal| heal.level == 4 && heal.cause == "ended").count())
        };
        let recorded = wait_until(PATIENCE, || renewed(node).is_ok_and(|n| n == mounted.len()));
        ensure!(recorded, "round {round}: {:?}, not a renewal of each mount", node.agent().heals());
        let now = mounts(node, &pods)?;
        ensure!(now == before, "round {round}: {before} mounts became {now}");
        for (w, file) in pods.iter().zip(&held) {
            served += usize::from(w.held(file)?);
        }
        if round % VERIFY_EVERY == 0 || round + 1 == rounds {
            pods.iter().try_for_each(Watched::verify)?;
        }
    }
    let report = RenewalReport {
        rounds,
        pods: pods.len(),
        again: Stalls::of(again),
        mounts: before,
        held_served: served,
        held_dead: rounds * held.len() - served,
    };
    pods.into_iter().try_for_each(|w| w.pod.end())?;
    for m in &mounted {
        node.unpublish(m)?;
    }
    Ok(report)
}

/// Nothing but the kernel answers this.
pub fn is_dead(target: &Path) -> bool {
    use rustix::io::Errno;
    // A call that waits while the kernel still ends the holders learns that the connection was aborted.
    rustix::fs::statfs(target).is_err_and(|e| matches!(e, Errno::NOTCONN | Errno::CONNABORTED))
}
