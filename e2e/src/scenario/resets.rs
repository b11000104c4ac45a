//! Many runs over an HDFS whose connections break: how many of them see a failure, and how many a client without
//! retries would have seen. (Weibo reported 37.1 % of its training jobs succeeding on HDFS, and 98.3 % with a cache before it.)

use crate::node::{AgentOptions, Node, Protocol};
use crate::processes;
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const FILE_BYTES: u64 = 4_000;
const DIRECTORIES: usize = 8;
/// All of a run's reading takes no longer, the outage included.
const PATIENCE: Duration = Duration::from_secs(400);

#[derive(Clone, Copy, Debug)]
pub struct ResetsPlan {
    pub runs: usize,
    /// Of one run, each of a file of its own.
    pub reads: usize,
    /// Of so many receives one fails.
    pub one_in: u64,
    /// In the middle run HDFS does not answer for so long.
    pub outage: Duration,
    pub seed: u64,
}

#[derive(Debug, Default)]
pub struct ResetsReport {
    pub runs: usize,
    /// In which at least one call failed, or a byte was wrong.
    pub failed: usize,
    /// In which at least one connection was reset: a client without retries fails there.
    pub hit: usize,
    pub resets: u64,
    /// How often a cached volume was read during the outage.
    pub read_meanwhile: usize,
    pub took: Duration,
}

/// What resets connections, and where it counts them.
struct Breaker {
    helper: PathBuf,
    count: PathBuf,
    _place: TempDir,
}

impl Breaker {
    fn build(programs: &Path, plan: &ResetsPlan) -> Result<Self> {
        let place = tempfile::tempdir()?;
        let root = place.path();
        std::fs::set_permissions(root, std::fs::Permissions::from_mode(0o755))?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/hdfs/resets.c");
        let library = root.join("resets.so");
        let built =
            Command::new("cc").args(["-shared", "-fPIC", "-O2", "-o"]).arg(&library).arg(&source).status()?;
        ensure!(built.success(), "cc {}: {built}", source.display());
        let program = root.join("hdfs-helper");
        std::fs::copy(programs.join("hdfs-helper"), &program)?;
        let (helper, count) = (root.join("helper"), root.join("count"));
        std::fs::write(&count, "")?;
        std::fs::set_permissions(&count, std::fs::Permissions::from_mode(0o666))?;
        let (file, library, program) = (count.display(), library.display(), program.display());
        std::fs::write(
            &helper,
            format!(
                "#!/bin/sh\nexport RESETS_ONE_IN={} RESETS_SEED={} RESETS_FILE={file} LD_PRELOAD={library}\nexec {program} \"$@\"\n",
                plan.one_in, plan.seed
            ),
        )?;
        for path in [&helper, &root.join("hdfs-helper"), &root.join("resets.so")] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?;
        }
        Ok(Self { helper, count, _place: place })
    }

    fn resets(&self) -> Result<u64> {
        Ok(std::fs::metadata(&self.count)?.len())
    }
}

pub fn run(plan: &ResetsPlan) -> Result<ResetsReport> {
    let breaker = Breaker::build(&crate::node::programs()?, plan)?;
    let options = AgentOptions::with_store(Protocol::Hdfs);
    let mut node = Node::start(AgentOptions { helper: Some(breaker.helper.clone()), ..options })?;
    let shape = |files: usize| Shape {
        directories: DIRECTORIES,
        files: files.div_ceil(DIRECTORIES),
        small_bytes: FILE_BYTES,
        large: 0,
        large_bytes: 0,
    };
    let (tree, kept) = (Tree::generated("", shape(plan.reads)), Tree::generated("", shape(200)));
    node.server.add(&tree, "runs")?;
    node.server.add(&kept, "kept")?;
    let cached = node.volume("kept", "kept", &[("freshness", "static")])?;
    let cached_pod = node.pod(&cached)?;
    cached_pod.verify(&kept, 2)?.ensure_all(&kept)?;
    let (begun, mut report) = (Instant::now(), ResetsReport::default());
    for number in 0..plan.runs {
        let before = breaker.resets()?;
        let mounted = node.volume("runs", "runs", &[("storeTimeout", "300s")])?;
        let pod = node.pod(&mounted)?;
        let reading = pod.start_verify(&tree, 4, number as u64)?;
        if number == plan.runs / 2 {
            report.read_meanwhile =
                outage(&node, plan.outage, || cached_pod.verify(&kept, 2)?.ensure_all(&kept))?;
        }
        let verified = reading.finish(PATIENCE)?;
        let (is_right, resets) = (verified.ensure_all(&tree).is_ok(), breaker.resets()? - before);
        for failure in verified.failures.iter().take(3) {
            eprintln!("run {number}: {failure}");
        }
        report.runs += 1;
        report.failed += usize::from(!is_right);
        report.hit += usize::from(resets > 0);
        report.resets += resets;
        drop(pod);
        // The kept volume's files are another source's: they stay.
        node.agent().evict(&mounted.target)?;
        node.unpublish(&mounted)?;
        eprintln!(
            "run {number}: {resets} resets, right: {is_right}, {:.0} s in all",
            begun.elapsed().as_secs_f64()
        );
    }
    report.took = begun.elapsed();
    drop(cached_pod);
    node.finish()?;
    Ok(report)
}

/// Nothing of HDFS runs for so long; returns how often `read` was done meanwhile.
fn outage(node: &Node, time: Duration, read: impl Fn() -> Result<()>) -> Result<usize> {
    let pid = node.server.pid().context("the process of the HDFS")?;
    processes::signal(pid, Signal::STOP)?;
    let end = Instant::now() + time;
    let mut times = 0;
    let mut result = Ok(());
    while Instant::now() < end && result.is_ok() {
        result = read();
        times += 1;
        std::thread::sleep(Duration::from_millis(200));
    }
    processes::signal(pid, Signal::CONT)?;
    result.map(|()| times).context("what is cached, during the outage")
}

impl fmt::Display for ResetsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |part: usize| 100.0 * (self.runs - part) as f64 / self.runs.max(1) as f64;
        write!(
            f,
            "{} runs in {:.0} s, {} connections reset: {:.1} % without a failure; {:.1} % without a reset, which is all that a client \
             without retries gets; a cached volume was read {} times during the outage",
            self.runs,
            self.took.as_secs_f64(),
            self.resets,
            percent(self.failed),
            percent(self.hit),
            self.read_meanwhile
        )
    }
}
