//! Cold reads of an HDFS beside Hadoop's own client (`hdfs dfs -cat`), in the same rounds.

use crate::node::{BUCKET, Node};
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;
use testkit::hdfs::Hdfs;

const BUFFER: usize = 1 << 20;
const SMALL_BYTES: u64 = 100_000;
/// Of the small files' second reading.
const READERS: usize = 4;

/// One round, seconds.
#[derive(Clone, Copy, Debug)]
pub struct HadoopRound {
    /// Of Hadoop's client for a file of no bytes: its start.
    pub start: f64,
    /// One file, by one reader.
    pub large: Pair,
    /// All small files, by one reader and by four; Hadoop's client has one.
    pub small: Pair,
    pub small_at_once: f64,
}

#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub millpond: f64,
    pub hadoop: f64,
}

#[derive(Debug)]
pub struct HadoopReport {
    pub large_bytes: u64,
    pub files: usize,
    pub rounds: Vec<HadoopRound>,
}

/// The node's server is an HDFS.
pub fn run(node: &mut Node, large_bytes: u64, files: usize, rounds: usize) -> Result<HadoopReport> {
    let large =
        Tree::generated("", Shape { directories: 0, files: 0, small_bytes: 0, large: 1, large_bytes });
    let small = Shape { directories: 1, files, small_bytes: SMALL_BYTES, large: 0, large_bytes: 0 };
    let small = Tree::generated("", small);
    node.server.add(&large, "large")?;
    node.server.add(&small, "small")?;
    let paths = |tree: &Tree| tree.files.iter().map(|file| file.path.clone()).collect::<Vec<_>>();
    let (large, small) = (paths(&large), paths(&small));
    let empty = node.places().root().join("empty");
    File::create(&empty)?;
    node.server.hadoop(&format!("put {} {} 1048576", Hdfs::name("/empty"), empty.display()))?;
    let mut report = HadoopReport { large_bytes, files, rounds: Vec::new() };
    for round in 0..rounds {
        let start = hadoop(node, "/empty")?;
        // In turn first and last.
        let mut pair = |directory: &str, files: &[String], pattern: &str| -> Result<Pair> {
            let before = (round % 2 == 1).then(|| hadoop(node, pattern)).transpose()?;
            let millpond = cold(node, directory, files, 1)?;
            let hadoop = before.map_or_else(|| hadoop(node, pattern), Ok)?;
            Ok(Pair { millpond, hadoop })
        };
        let (large, small_) = (
            pair("large", &large, &format!("/{BUCKET}/large/*"))?,
            pair("small", &small, &format!("/{BUCKET}/small/*/*"))?,
        );
        let small_at_once = cold(node, "small", &small, READERS)?;
        report.rounds.push(HadoopRound { start, large, small: small_, small_at_once });
        eprintln!("round {}: {:?}", round + 1, report.rounds.last());
    }
    Ok(report)
}

/// Seconds that Hadoop's client takes, its start included.
fn hadoop(node: &Node, pattern: &str) -> Result<f64> {
    let mut command = Hdfs::client(&node.server.hadoop_place()?, &node.server.endpoint())?;
    command.args(["-cat", pattern]).env("HADOOP_USER_NAME", "alice");
    command.stdout(File::create("/dev/null")?).stderr(Stdio::piped());
    let begun = Instant::now();
    let output = command.output()?;
    ensure!(output.status.success(), "hdfs dfs -cat {pattern}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(begun.elapsed().as_secs_f64())
}

/// Seconds until all are read through a new mount, of which nothing is cached.
fn cold(node: &mut Node, directory: &str, files: &[String], readers: usize) -> Result<f64> {
    let mounted = node.volume(&format!("{directory}-{readers}"), directory, &[])?;
    let begun = Instant::now();
    let (next, root) = (AtomicUsize::new(0), mounted.target.clone());
    let read = || -> Result<u64> {
        let (mut buffer, mut bytes) = (vec![0; BUFFER], 0);
        while let Some(path) = files.get(next.fetch_add(1, Relaxed)) {
            bytes += read_one(&root, path, &mut buffer)?;
        }
        Ok(bytes)
    };
    let bytes: Result<Vec<u64>> = std::thread::scope(|threads| {
        let running: Vec<_> = (0..readers).map(|_| threads.spawn(read)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<u64>>| {
            thread.join().map_err(|_| anyhow::anyhow!("a reader panicked"))?
        };
        running.into_iter().map(join).collect()
    });
    let took = begun.elapsed();
    ensure!(bytes?.iter().sum::<u64>() > 0, "nothing was read");
    node.unpublish(&mounted)?;
    node.agent().evict_all()?;
    Ok(took.as_secs_f64())
}

fn read_one(root: &Path, path: &str, buffer: &mut [u8]) -> Result<u64> {
    let path: PathBuf = root.join(path);
    let mut file = File::open(&path).with_context(|| path.display().to_string())?;
    let mut bytes = 0;
    loop {
        match file.read(buffer).with_context(|| path.display().to_string())? {
            0 => return Ok(bytes),
            got => bytes += got as u64,
        }
    }
}

/// Median, least and most.
fn spread(values: impl Iterator<Item = f64>) -> String {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    match (all.first(), all.get(all.len() / 2), all.last()) {
        (Some(least), Some(median), Some(most)) => format!("{median:.2} ({least:.2} to {most:.2})"),
        _ => "nothing".to_owned(),
    }
}

impl fmt::Display for HadoopReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |value: fn(&HadoopRound) -> f64| spread(self.rounds.iter().map(value));
        let megabytes = self.large_bytes as f64 / 1e6;
        let rate = |value: fn(&HadoopRound) -> f64| spread(self.rounds.iter().map(|r| megabytes / value(r)));
        let files =
            |value: fn(&HadoopRound) -> f64| spread(self.rounds.iter().map(|r| self.files as f64 / value(r)));
        writeln!(f, "{} rounds; medians (least to most)", self.rounds.len())?;
        writeln!(f, "start of hdfs dfs, s: {}", of(|r| r.start))?;
        writeln!(
            f,
            "{megabytes:.0} MB, MB/s: millpond {}, hdfs dfs -cat {}; ratio {}, without its start {}",
            rate(|r| r.large.millpond),
            rate(|r| r.large.hadoop),
            of(|r| r.large.hadoop / r.large.millpond),
            of(|r| (r.large.hadoop - r.start) / r.large.millpond)
        )?;
        write!(
            f,
            "{} files of {SMALL_BYTES} bytes, files/s: millpond {}, {READERS} readers {}, hdfs dfs -cat {}; ratio {}, {READERS} readers {}",
            self.files,
            files(|r| r.small.millpond),
            files(|r| r.small_at_once),
            files(|r| r.small.hadoop),
            of(|r| r.small.hadoop / r.small.millpond),
            of(|r| r.small.hadoop / r.small_at_once)
        )
    }
}
