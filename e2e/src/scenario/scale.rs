//! Very many volumes on one node: published at once, read, handed over to another agent, unpublished at once.

use super::memory;
use super::sources::{Source, Sources};
use crate::clock::monotonic_ns;
use crate::node::{Mounted, Node, Server, Volume};
use crate::oracle::Stalls;
use crate::processes::{self, Memory};
use crate::{mountinfo, random};
use anyhow::{Context, Result, ensure};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde::Serialize;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use testkit::content;

/// Publishes and unpublishes, one at a time, beside those that are there.
const SINGLES: usize = 50;
/// As kubelet does what could not be done: for so long, and after such a pause.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_millis(500);
/// Between two looks through a mount while agents change.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// What one number of volumes costs.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    pub volumes: usize,
    /// All at once: until the last one was published, seconds; of each; and calls that had to be repeated.
    pub all_published_s: f64,
    pub published: Stalls,
    pub repeated: usize,
    /// One more at a time, beside all of them.
    pub one_published: Stalls,
    pub one_unpublished: Stalls,
    /// A file of each volume, seconds.
    pub read_s: f64,
    /// From the start of the next agent until it serves all, seconds; and how long calls through mounts took meanwhile.
    pub handed_over_s: f64,
    pub pause: Stalls,
    /// Until the last one was unpublished, seconds; and of each.
    pub all_unpublished_s: f64,
    pub unpublished: Stalls,
    /// Bytes of anonymous memory.
    pub agent: u64,
    pub plugin: u64,
    /// Anonymous and shared, of all workers.
    pub workers: u64,
    pub processes: usize,
    pub agent_descriptors: usize,
    pub plugin_descriptors: usize,
    pub mounts: usize,
    pub groups: usize,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct ScaleReport {
    pub steps: Vec<Step>,
}

impl fmt::Display for ScaleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let ms = |s: &Stalls| format!("{:.0} / {:.0}", s.p50_ms, s.p99_ms);
        writeln!(
            f,
            "| volumes | all published, s | each, p50 / p99 ms | repeated | one more, p50 / p99 ms | one less, p50 / p99 ms \
             | read, s | handed over, s | pause p99 / max, ms | all unpublished, s | agent, MiB | plugin, MiB | a worker, MiB \
             | processes | descriptors of agent, plugin | mounts | groups |"
        )?;
        writeln!(f, "|{}", "---:|".repeat(17))?;
        for s in &self.steps {
            writeln!(
                f,
                "| {} | {:.1} | {} | {} | {} | {} | {:.1} | {:.1} | {:.0} / {:.0} | {:.1} | {:.1} | {:.1} | {:.2} | {} | {}, {} | {} | {} |",
                s.volumes,
                s.all_published_s,
                ms(&s.published),
                s.repeated,
                ms(&s.one_published),
                ms(&s.one_unpublished),
                s.read_s,
                s.handed_over_s,
                s.pause.p99_ms,
                s.pause.max_ms,
                s.all_unpublished_s,
                mib(s.agent),
                mib(s.plugin),
                mib(s.workers) / s.volumes as f64,
                s.processes,
                s.agent_descriptors,
                s.plugin_descriptors,
                s.mounts,
                s.groups
            )?;
        }
        Ok(())
    }
}

impl ScaleReport {
    /// A publish beside all of them takes at most `times` as long as beside the fewest, in 99 of 100.
    pub fn ensure_flat(&self, times: f64) -> Result<()> {
        let (Some(first), Some(last)) = (self.steps.first(), self.steps.last()) else { return Ok(()) };
        let ratio = last.one_published.p99_ms / first.one_published.p99_ms;
        ensure!(
            ratio <= times,
            "a publish beside {} volumes takes {ratio:.1} times as long as beside {}",
            last.volumes,
            first.volumes
        );
        Ok(())
    }
}

/// Each of `counts`, one after the other; every volume has a source of its own.
pub fn run(node: &mut Node, counts: &[usize]) -> Result<ScaleReport> {
    let most = counts.iter().copied().max().unwrap_or_default() + SINGLES;
    let sources = Sources::create(node, most)?;
    let mut report = ScaleReport::default();
    for &count in counts {
        let (many, rest) = sources.all.split_at(count);
        let step = step(node, many, &rest[..SINGLES]).with_context(|| format!("{count} volumes"))?;
        report.steps.push(step);
        eprintln!("{report}");
    }
    sources.delete(node)?;
    Ok(report)
}

fn step(node: &mut Node, sources: &[Source], others: &[Source]) -> Result<Step> {
    let count = sources.len();
    let begun = Instant::now();
    let orders: Vec<(&Volume, String)> =
        sources.iter().map(|source| (&source.volume, format!("pod-{}", source.volume.id))).collect();
    let done = node.publish_all(&orders, PUBLISHED_WITHIN, PAUSE)?;
    let all_published_s = begun.elapsed().as_secs_f64();
    let repeated = done.iter().map(|published| published.tries - 1).sum();
    let mounted: Vec<Mounted> = done.iter().map(|published| published.mounted.clone()).collect();
    let published = Stalls::of(done.iter().map(|published| published.took.as_nanos() as u64).collect());

    let begun = Instant::now();
    mounted.iter().zip(sources).try_for_each(|(mounted, source)| source.verify(&mounted.target))?;
    let read_s = begun.elapsed().as_secs_f64();

    let (mut in_ns, mut out_ns) = (Vec::new(), Vec::new());
    for Source { volume, .. } in others {
        let begun = Instant::now();
        let one = node.publish(volume, &format!("pod-{}", volume.id))?;
        in_ns.push(begun.elapsed().as_nanos() as u64);
        let begun = Instant::now();
        node.unpublish(&one)?;
        out_ns.push(begun.elapsed().as_nanos() as u64);
    }

    let workers: Vec<u32> = processes::fuse_children(node.agent().pid());
    let held = workers.iter().fold(0, |sum, pid| sum + Memory::of(*pid).unevictable());
    let (agent, plugin) = (node.agent().pid(), node.plugin().pid());
    let (agent_anonymous, plugin_anonymous) = (Memory::of(agent).anonymous, Memory::of(plugin).anonymous);
    let descriptors = [agent, plugin].map(processes::descriptors);
    let mounts = mountinfo::below(node.places().root())?.len();
    let groups = memory::groups();

    let targets: Vec<PathBuf> = mounted.iter().map(|mounted| mounted.target.clone()).collect();
    let (handed_over_s, pause) = handed_over(node, &targets, count)?;

    let begun = Instant::now();
    let took = node.unpublish_all(&mounted, PUBLISHED_WITHIN, PAUSE)?;
    Ok(Step {
        volumes: count,
        all_published_s,
        published,
        repeated,
        one_published: Stalls::of(in_ns),
        one_unpublished: Stalls::of(out_ns),
        read_s,
        handed_over_s,
        pause,
        all_unpublished_s: begun.elapsed().as_secs_f64(),
        unpublished: Stalls::of(took.iter().map(|took| took.as_nanos() as u64).collect()),
        agent: agent_anonymous,
        plugin: plugin_anonymous,
        workers: held,
        processes: workers.len() + 2,
        agent_descriptors: descriptors[0],
        plugin_descriptors: descriptors[1],
        mounts,
        groups,
    })
}

/// Another agent takes over, while an application looks names up that no cache knows.
fn handed_over(node: &mut Node, targets: &[PathBuf], count: usize) -> Result<(f64, Stalls)> {
    let done = AtomicBool::new(false);
    let options = node.options().clone();
    std::thread::scope(|threads| {
        let looking = threads.spawn(|| {
            let (mut took, mut failed, mut n) = (Vec::new(), None, 0usize);
            while !done.load(Ordering::Relaxed) {
                let name = targets[n % targets.len()].join("file");
                n += 1;
                let begun = monotonic_ns();
                // Through the worker each time: the kernel keeps no pages of what is opened so.
                let read = File::open(&name).and_then(|file| file.read_at(&mut [0; 100], 0));
                took.push(monotonic_ns() - begun);
                if let Err(error) = read {
                    failed.get_or_insert((name, error));
                }
                std::thread::sleep(LOOK_EVERY);
            }
            (took, failed)
        });
        let begun = Instant::now();
        let result = node.hand_over(&options).and_then(|()| {
            let serves = || node.agent().serving().is_ok_and(|serving| serving.len() == count);
            ensure!(crate::clock::wait_until(PUBLISHED_WITHIN, serves), "not every mount is served");
            Ok(begun.elapsed().as_secs_f64())
        });
        done.store(true, Ordering::Relaxed);
        let (took, failed) =
            looking.join().map_err(|_| anyhow::anyhow!("the application ended otherwise"))?;
        if let Some((name, error)) = failed {
            anyhow::bail!("{}: {error}", name.display());
        }
        Ok((result?, Stalls::of(took)))
    })
}

/// How many files one application keeps open at once, over some volumes, and what that takes.
#[derive(Clone, Debug, Serialize)]
pub struct OpenReport {
    pub files: usize,
    pub volumes: usize,
    pub opened_s: f64,
    pub agent: u64,
    pub workers: u64,
    pub agent_descriptors: usize,
    pub most_worker_descriptors: usize,
}

impl fmt::Display for OpenReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{} files of {} volumes opened in {:.1} s and open at once: agent {:.1} MiB and {} descriptors, workers {:.1} \
             MiB, at most {} descriptors each; all read right, closed, nothing left",
            self.files,
            self.volumes,
            self.opened_s,
            mib(self.agent),
            self.agent_descriptors,
            mib(self.workers),
            self.most_worker_descriptors
        )
    }
}

/// Opens `files` files of `volumes` volumes, reads some of them while all are open, and closes them.
pub fn open_files(node: &mut Node, files: usize, volumes: usize, seed: u64) -> Result<OpenReport> {
    let of_each = files.div_ceil(volumes);
    let server = Server::synthetic(node.places(), of_each as u64, BYTES, "d/f{n}")?;
    let width = (of_each - 1).to_string().len();
    let endpoint = server.endpoint();
    let mut mounted = Vec::new();
    for n in 0..volumes {
        let profile = if n.is_multiple_of(2) { "large" } else { "small" };
        let more = [("profile", profile), ("endpoint", endpoint.as_str())];
        mounted.push(node.volume(&format!("open{n}"), "d", &more)?);
    }
    let paths: Vec<Named> = (0..files)
        .map(|k| {
            let name = format!("f{:0width$}", k / volumes);
            Named { path: mounted[k % volumes].target.join(&name), key: format!("d/{name}") }
        })
        .collect();
    let begun = Instant::now();
    let report = keep_open(&paths, seed, || {
        let workers = processes::fuse_children(node.agent().pid());
        OpenReport {
            files,
            volumes,
            opened_s: begun.elapsed().as_secs_f64(),
            agent: Memory::of(node.agent().pid()).anonymous,
            workers: workers.iter().fold(0, |sum, pid| sum + Memory::of(*pid).unevictable()),
            agent_descriptors: processes::descriptors(node.agent().pid()),
            most_worker_descriptors: workers
                .iter()
                .map(|pid| processes::descriptors(*pid))
                .max()
                .unwrap_or(0),
        }
    })?;
    for mounted in &mounted {
        node.unpublish(mounted)?;
    }
    Ok(report)
}

/// Of each of the open files.
const BYTES: u64 = 500;

struct Named {
    path: PathBuf,
    key: String,
}

/// Calls `look` while all are open. Each thread has descriptors of its own, so that a limit that is below their number does
/// not matter.
fn keep_open<T>(files: &[Named], seed: u64, look: impl FnOnce() -> T) -> Result<T> {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let of_a_thread = usize::try_from(most).unwrap_or(usize::MAX).saturating_sub(1000);
    ensure!(of_a_thread > 0, "the limit of descriptors ({most}) is too low: ulimit -n");
    std::thread::scope(|threads| {
        let (opened, all_opened) = mpsc::channel();
        let mut ends = Vec::new();
        let mut running = Vec::new();
        for (number, share) in files.chunks(of_a_thread).enumerate() {
            let (end, ended) = mpsc::channel::<()>();
            ends.push(end);
            let opened = opened.clone();
            running.push(threads.spawn(move || -> Result<()> {
                // SAFETY: this thread uses no descriptor that another one opens or closes from here on.
                unsafe { unshare_unsafe(UnshareFlags::FILES)? };
                let open =
                    |file: &Named| File::open(&file.path).with_context(|| file.path.display().to_string());
                let open: Vec<File> = share.iter().map(open).collect::<Result<_>>()?;
                let _ = opened.send(()); // no receiver: another one has failed
                drop(opened);
                let _ = ended.recv(); // the sender is dropped
                let mut random = random::Random((seed + number as u64) | 1);
                for _ in 0..share.len().min(2000) {
                    let k = random.below(share.len() as u64) as usize;
                    let mut bytes = vec![0; BYTES as usize];
                    open[k]
                        .read_exact_at(&mut bytes, 0)
                        .with_context(|| share[k].path.display().to_string())?;
                    let wrong = content::first_wrong_byte(content::id(&share[k].key), 0, &bytes);
                    ensure!(wrong.is_none(), "{} is wrong", share[k].path.display());
                }
                Ok(())
            }));
        }
        drop(opened);
        // Ends early if one has failed, which its result says.
        let looked = (all_opened.iter().take(running.len()).count() == running.len()).then(look);
        drop(ends);
        for thread in running {
            thread.join().map_err(|_| anyhow::anyhow!("a thread that opens files ended otherwise"))??;
        }
        looked.context("not every file was opened")
    })
}
