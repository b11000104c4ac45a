//! Benchmarks: the workloads that matter, native beside ours beside peers, interleaved in rounds. Numbers, no verdict.

mod measure;
mod subject;
mod work;

pub use measure::{Aim, Sample, Workload, markdown, median};
pub use subject::{Subject, Who};

use crate::node::{AgentOptions, Node, Proxy};
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use measure::measure;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The long-distance link of the table: round trip and bandwidth per connection.
const RTT_MS: u64 = 20;
const MEGABYTES_PER_S: u64 = 100;

#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub file_bytes: u64,
    pub files: usize,
    pub objects: usize,
    pub rounds: usize,
    /// Peers are slow, and not what is being developed: in how many of the rounds they take part.
    pub peer_rounds: usize,
    pub random_for: Duration,
}

impl Size {
    /// `scale` 1 is the table of the documentation; smaller is for a quick look.
    pub fn scaled(scale: f64, rounds: usize, peer_rounds: usize) -> Self {
        let of = |full: f64, least: f64| (full * scale).max(least);
        Self {
            file_bytes: of(2_147_483_648.0, 67_108_864.0) as u64 & !4095,
            files: of(20_000.0, 200.0) as usize,
            objects: of(100_000.0, 1000.0) as usize,
            rounds,
            peer_rounds,
            random_for: Duration::from_secs_f64(of(2.0, 1.0)),
        }
    }
}

/// Every workload, in the order of the table.
pub fn workloads(size: Size) -> Vec<Workload> {
    let w = |name, unit, less_is_better, aim, bytes| Workload { name, unit, less_is_better, aim, bytes };
    let (file, files) = (size.file_bytes, size.files as u64 * FILE_BYTES);
    vec![
        w("sequential cold, loopback", "MB/s", false, Aim::Absolute(1000.0), file),
        w("sequential cold, 20 ms link", "MB/s", false, Aim::Absolute(850.0), file),
        w("sequential warm", "MB/s", false, Aim::OfNative(0.9), file),
        w("random 4 KiB, kept, 1 thread", "reads/s", false, Aim::OfNative(0.9), 0),
        w("random 4 KiB, kept, 8 threads", "reads/s", false, Aim::OfNative(0.9), 0),
        w("random 4 KiB, dropped, 1 thread", "reads/s", false, Aim::OfNative(0.9), 0),
        w("random 4 KiB, dropped, 8 threads", "reads/s", false, Aim::OfNative(0.9), 0),
        w("8 readers of one cold file", "MB/s", false, Aim::Absolute(5500.0), file),
        w("small files, kept, 1 thread", "files/s", false, Aim::OfNative(0.7), files),
        w("small files, kept, 4 threads", "files/s", false, Aim::OfNative(0.7), files),
        w("small files, dropped, 1 thread", "files/s", false, Aim::OfNative(0.7), files),
        w("small files, dropped, 4 threads", "files/s", false, Aim::OfNative(0.7), files),
        w("small files, cold, 20 ms link, 1 thread", "files/s", false, Aim::Absolute(400.0), files),
        w("small files, cold, 20 ms link, 4 threads", "files/s", false, Aim::Absolute(1000.0), files),
        w("ls -lR, cold", "s", true, Aim::Absolute(1.5), 0),
        w("ls -lR, warm", "s", true, Aim::Absolute(0.3), 0),
    ]
}

const FILE_BYTES: u64 = 100_000;

/// What every subject must be able to read before anything is measured.
const TRIAL: Shape = Shape { directories: 0, files: 0, small_bytes: 0, large: 1, large_bytes: 4096 };

/// A peer that cannot talk to the server is found in seconds, not after an hour of measuring.
fn try_out(node: &mut Node, who: Who) -> Result<()> {
    let endpoint = node.server.endpoint();
    let subject = Subject::mount(node, who, "trial", &endpoint, "large")?;
    let read = std::fs::read(subject.root.join("large0"));
    subject.unmount(node)?;
    let bytes = read?.len();
    ensure!(bytes as u64 == TRIAL.large_bytes, "a file of {} bytes has {bytes}", TRIAL.large_bytes);
    Ok(())
}

/// Called after each row with what has been measured so far.
type Keep = Box<dyn Fn(&[Who], &[Sample]) -> Result<()>>;

pub struct Bench {
    node: Node,
    size: Size,
    present: Vec<Who>,
    samples: Vec<Sample>,
    only: Option<String>,
    /// Called after every sample with all so far: a run that is cut loses nothing.
    keep: Keep,
    /// Hard-linked copies of the data under prefixes that no subject has read yet.
    fresh: usize,
}

impl Bench {
    pub fn start(
        size: Size,
        peers: bool,
        only: Option<String>,
        keep: impl Fn(&[Who], &[Sample]) -> Result<()> + 'static,
    ) -> Result<Self> {
        let mut node = Node::start(AgentOptions::default())?;
        let mut present = Who::present();
        if !peers {
            present.retain(|w| matches!(w, Who::Native | Who::Millpond));
        }
        node.server.add(&Tree::generated("", TRIAL), "trial")?;
        present.retain(|&who| match try_out(&mut node, who) {
            Ok(()) => true,
            Err(error) => {
                eprintln!(
                    "bench: {} is left out, it cannot read from the server here: {error:#}",
                    who.name()
                );
                false
            }
        });
        eprintln!("bench: {} on {size:?}", present.iter().map(|w| w.name()).collect::<Vec<_>>().join(", "));
        Ok(Self { node, size, present, samples: Vec::new(), only, keep: Box::new(keep), fresh: 0 })
    }

    pub fn run(mut self) -> Result<(Vec<Who>, Vec<Sample>)> {
        if self.wants("sequential") || self.wants("random") || self.wants("8 readers") {
            self.large_file()?;
        }
        if self.wants("small files") {
            self.small_files()?;
        }
        if self.wants("ls -lR") {
            self.listing()?;
        }
        self.node.finish()?;
        Ok((self.present, self.samples))
    }

    fn wants(&self, workload: &str) -> bool {
        self.only.as_deref().is_none_or(|only| workload.contains(only) || only.contains(workload))
    }

    /// A prefix with the same files (hard links) that no cache knows.
    fn fresh(&mut self, of: &str) -> Result<String> {
        self.fresh += 1;
        let prefix = format!("fresh{}", self.fresh);
        let root = self.node.server.dir();
        link_tree(&root.join(of), &root.join(&prefix))?;
        self.node.server.rescan()?;
        // What earlier rows wrote is on the disk: no row pays for another's dirty pages.
        rustix::fs::sync();
        Ok(prefix)
    }

    /// Takes a subject down together with what its rows left in the bucket and in the cache.
    fn done(&mut self, subject: Subject, prefix: &str) -> Result<()> {
        let who = subject.who;
        subject.unmount(&mut self.node)?;
        if who == Who::Millpond {
            self.node.agent().evict_all()?;
        }
        Ok(std::fs::remove_dir_all(self.node.server.dir().join(prefix))?)
    }

    /// Who is measured in this round.
    fn takes_part(&self, round: usize) -> Vec<Who> {
        let ours = |who: &Who| matches!(who, Who::Native | Who::Millpond) || round < self.size.peer_rounds;
        self.present.iter().copied().filter(ours).collect()
    }

    fn wants_any(&self, workloads: &[&str]) -> bool {
        workloads.iter().any(|workload| self.wants(workload))
    }

    fn sample(
        &mut self,
        subject: &Subject,
        workload: &'static str,
        round: usize,
        work: impl FnOnce() -> Result<f64>,
    ) -> Result<()> {
        if self.wants(workload) {
            work::touch_free_memory(2 * self.size.file_bytes);
            self.samples.push(measure(&self.node, subject, workload, round, work)?);
            (self.keep)(&self.present, &self.samples)?;
        }
        Ok(())
    }

    fn large_file(&mut self) -> Result<()> {
        let shape =
            Shape { directories: 0, files: 0, small_bytes: 0, large: 1, large_bytes: self.size.file_bytes };
        self.node.server.add(&Tree::generated("", shape), "one")?;
        let bytes = self.size.file_bytes as f64 / 1e6;
        let rate = move |seconds: f64| bytes / seconds;
        let proxy = Proxy::start(self.node.places(), &self.node.server, RTT_MS, MEGABYTES_PER_S)?;
        for round in 0..self.size.rounds {
            for who in self.takes_part(round) {
                if self.wants_any(&["sequential cold, loopback", "sequential warm", "random"]) {
                    self.one_reader(who, round, rate)?;
                }
                self.far(&proxy, who, round, rate)?;
                self.readers(who, round, rate)?;
            }
        }
        Ok(())
    }

    fn one_reader(&mut self, who: Who, round: usize, rate: impl Fn(f64) -> f64) -> Result<()> {
        let (limit, direct) = (self.size.random_for, self.node.server.endpoint());
        let prefix = self.fresh("one")?;
        let subject = Subject::mount(&mut self.node, who, &prefix, &direct, "large")?;
        let file = subject.root.join("large0");
        if who != Who::Native {
            self.sample(&subject, "sequential cold, loopback", round, || Ok(rate(work::sequential(&file)?)))?;
        }
        if self.wants_any(&["sequential warm", "random"]) {
            // Until the cache has settled: written files flushed, a file found whole verified and passed through.
            work::sequential(&file)?;
            rustix::fs::sync();
            work::sequential(&file)?;
        }
        self.sample(&subject, "sequential warm", round, || Ok(rate(work::sequential(&file)?)))?;
        let seed = round as u64;
        let random = |threads| work::random(&file, threads, limit, seed);
        self.sample(&subject, "random 4 KiB, kept, 1 thread", round, || random(1))?;
        self.sample(&subject, "random 4 KiB, kept, 8 threads", round, || random(8))?;
        if self.wants_any(&["random 4 KiB, dropped"]) {
            work::drop_page_cache()?;
            self.sample(&subject, "random 4 KiB, dropped, 1 thread", round, || random(1))?;
            work::drop_page_cache()?;
            self.sample(&subject, "random 4 KiB, dropped, 8 threads", round, || random(8))?;
        }
        self.done(subject, &prefix)
    }

    fn far(&mut self, proxy: &Proxy, who: Who, round: usize, rate: impl Fn(f64) -> f64) -> Result<()> {
        if who == Who::Native || !self.wants("sequential cold, 20 ms link") {
            return Ok(());
        }
        let prefix = self.fresh("one")?;
        let subject = Subject::mount(&mut self.node, who, &prefix, &proxy.endpoint(), "large")?;
        let file = subject.root.join("large0");
        self.sample(&subject, "sequential cold, 20 ms link", round, || Ok(rate(work::sequential(&file)?)))?;
        self.done(subject, &prefix)
    }

    /// Millpond's eight pods are eight mounts, as in Kubernetes; a peer has one.
    fn readers(&mut self, who: Who, round: usize, rate: impl Fn(f64) -> f64) -> Result<()> {
        const WORKLOAD: &str = "8 readers of one cold file";
        if !self.wants(WORKLOAD) {
            return Ok(());
        }
        let prefix = self.fresh("one")?;
        let direct = self.node.server.endpoint();
        let subject = Subject::mount(&mut self.node, who, &prefix, &direct, "large")?;
        let mut paths = vec![subject.root.join("large0"); 8];
        let mut others = Vec::new();
        if who == Who::Millpond {
            for (k, path) in paths.iter_mut().enumerate().skip(1) {
                let more = [("profile", "large"), ("freshness", "static")];
                let mounted = self.node.volume(&format!("{prefix}-reader{k}"), &prefix, &more)?;
                *path = mounted.target.join("large0");
                others.push(mounted);
            }
        }
        if who == Who::Native {
            work::drop_page_cache()?;
        }
        self.sample(&subject, WORKLOAD, round, || Ok(8.0 * rate(work::many_readers(&paths)?)))?;
        for mounted in &others {
            self.node.unpublish(mounted)?;
        }
        self.done(subject, &prefix)
    }

    fn small_files(&mut self) -> Result<()> {
        let per_directory = 1000.min(self.size.files);
        let names = self.write_small("small", self.size.files / per_directory, per_directory, FILE_BYTES)?;
        let direct = self.node.server.endpoint();
        let proxy = Proxy::start(self.node.places(), &self.node.server, RTT_MS, MEGABYTES_PER_S)?;
        for round in 0..self.size.rounds {
            let seed = 1 + round as u64;
            for who in self.takes_part(round) {
                // Peers need minutes for all of them: a tenth tells their rate as well.
                let ours = matches!(who, Who::Native | Who::Millpond);
                let part = if ours { &names[..] } else { &names[..names.len().div_ceil(10)] };
                if self.wants_any(&["small files, kept", "small files, dropped"]) {
                    let prefix = self.fresh("small")?;
                    let subject = Subject::mount(&mut self.node, who, &prefix, &direct, "small")?;
                    let root = subject.root.clone();
                    let epoch = |threads| work::epoch(&root, part, threads, seed);
                    epoch(4)?;
                    rustix::fs::sync();
                    epoch(4)?;
                    self.sample(&subject, "small files, kept, 1 thread", round, || epoch(1))?;
                    self.sample(&subject, "small files, kept, 4 threads", round, || epoch(4))?;
                    if self.wants_any(&["small files, dropped"]) {
                        work::drop_page_cache()?;
                        self.sample(&subject, "small files, dropped, 1 thread", round, || epoch(1))?;
                        work::drop_page_cache()?;
                        self.sample(&subject, "small files, dropped, 4 threads", round, || epoch(4))?;
                    }
                    self.done(subject, &prefix)?;
                }
                for (workload, threads) in [
                    ("small files, cold, 20 ms link, 1 thread", 1),
                    ("small files, cold, 20 ms link, 4 threads", 4),
                ] {
                    if who == Who::Native || !self.wants(workload) {
                        continue;
                    }
                    let prefix = self.fresh("small")?;
                    let subject = Subject::mount(&mut self.node, who, &prefix, &proxy.endpoint(), "small")?;
                    self.sample(&subject, workload, round, || {
                        work::epoch(&subject.root, part, threads, seed)
                    })?;
                    self.done(subject, &prefix)?;
                }
            }
        }
        Ok(())
    }

    fn listing(&mut self) -> Result<()> {
        let per_directory = 1000;
        let names = self.write_small("objects", self.size.objects / per_directory, per_directory, 16)?;
        let direct = self.node.server.endpoint();
        for round in 0..self.size.rounds {
            for who in self.takes_part(round) {
                let prefix = self.fresh("objects")?;
                let subject = Subject::mount(&mut self.node, who, &prefix, &direct, "small")?;
                let root = subject.root.clone();
                let walk = || {
                    let (seconds, seen) = work::walk(&root)?;
                    let wanted = names.len() + names.len() / per_directory;
                    ensure!(seen as usize == wanted, "ls -lR saw {seen} names instead of {wanted}");
                    Ok(seconds)
                };
                if who == Who::Native {
                    work::drop_page_cache()?;
                }
                self.sample(&subject, "ls -lR, cold", round, walk)?;
                self.sample(&subject, "ls -lR, warm", round, walk)?;
                self.done(subject, &prefix)?;
            }
        }
        Ok(())
    }

    fn write_small(&self, prefix: &str, directories: usize, files: usize, bytes: u64) -> Result<Vec<String>> {
        let mut names = Vec::with_capacity(directories * files);
        for d in 0..directories {
            let dir = self.node.server.dir().join(prefix).join(format!("d{d:03}"));
            std::fs::create_dir_all(&dir)?;
            for f in 0..files {
                let name = format!("d{d:03}/f{f:05}");
                std::fs::write(
                    self.node.server.dir().join(prefix).join(&name),
                    testkit::content::bytes(testkit::content::id(&name), 0..bytes),
                )?;
                names.push(name);
            }
        }
        rustix::fs::sync();
        Ok(names)
    }
}

fn link_tree(from: &Path, to: &Path) -> Result<()> {
    let mut open = vec![(from.to_owned(), to.to_owned())];
    while let Some((from, to)) = open.pop() {
        std::fs::create_dir_all(&to)?;
        for entry in std::fs::read_dir(&from).with_context(|| from.display().to_string())? {
            let entry = entry?;
            let target: PathBuf = to.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                open.push((entry.path(), target));
            } else {
                std::fs::hard_link(entry.path(), target)?;
            }
        }
    }
    Ok(())
}
