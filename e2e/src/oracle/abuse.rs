//! A tenant that means harm: it lists, opens and reads whatever it finds, all the time, and does not care for errors.

use crate::random::Random;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// What it got for its trouble.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abuse {
    pub listed: u64,
    pub opened: u64,
    pub read: u64,
    pub failed: u64,
}

#[derive(Debug, Default)]
struct Counts {
    listed: AtomicU64,
    opened: AtomicU64,
    read: AtomicU64,
    failed: AtomicU64,
}

/// Names of one directory that a walk goes on with: of an endless one it takes these and reads on.
const NAMES_MAX: usize = 50;
/// Of one directory, before it looks at what it has found.
const ENTRIES_MAX: usize = 20_000;
const DEPTH_MAX: usize = 6;
const PIECE: usize = 128 << 10;

/// Until stdin closes; then prints what it did as one line of JSON and leaves, whatever its threads wait for. Each waits
/// for `pause` after every call, so that it is Millpond that works, not this process.
pub fn abuse(root: &Path, threads: usize, seed: u64, pause: Duration) -> Result<()> {
    let counts = Arc::new(Counts::default());
    for number in 0..threads {
        let (counts, root) = (counts.clone(), root.to_owned());
        let mut random = Random(seed.wrapping_mul(1000).wrapping_add(number as u64));
        std::thread::Builder::new().spawn(move || {
            loop {
                walk(&root, &mut random, &counts, pause, 0);
                std::thread::sleep(pause);
            }
        })?;
    }
    println!("started");
    std::io::stdout().flush()?;
    let _ = std::io::stdin().read(&mut [0]); // EOF and an error mean the same: enough
    let of = |count: &AtomicU64| count.load(Relaxed);
    let Counts { listed, opened, read, failed } = &*counts;
    let abuse = Abuse { listed: of(listed), opened: of(opened), read: of(read), failed: of(failed) };
    println!("{}", serde_json::to_string(&abuse)?);
    std::io::stdout().flush()?;
    // Its threads may wait for a store that never answers.
    std::process::exit(0)
}

fn walk(dir: &Path, random: &mut Random, counts: &Counts, pause: Duration, depth: usize) {
    let Ok(entries) = fs::read_dir(dir) else {
        counts.failed.fetch_add(1, Relaxed);
        return;
    };
    let (mut directories, mut files) = (Vec::new(), Vec::new());
    for entry in entries.take(ENTRIES_MAX) {
        let Ok(entry) = entry else {
            counts.failed.fetch_add(1, Relaxed);
            break;
        };
        counts.listed.fetch_add(1, Relaxed);
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let list = if is_directory { &mut directories } else { &mut files };
        if list.len() < NAMES_MAX {
            list.push(entry.path());
        }
    }
    shuffle(&mut files, random);
    shuffle(&mut directories, random);
    for file in files {
        std::thread::sleep(pause);
        match read_a_little(&file, random) {
            Ok(()) => counts.read.fetch_add(1, Relaxed),
            Err(_) => counts.failed.fetch_add(1, Relaxed),
        };
        counts.opened.fetch_add(1, Relaxed);
    }
    for directory in directories.into_iter().filter(|_| depth < DEPTH_MAX).take(3) {
        std::thread::sleep(pause);
        walk(&directory, random, counts, pause, depth + 1);
    }
}

/// The beginning, and a place where it says that there is more.
fn read_a_little(path: &Path, random: &mut Random) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut piece = vec![0; PIECE];
    let _ = file.read(&mut piece)?;
    file.seek(SeekFrom::Start(random.below(size.clamp(1, i64::MAX as u64))))?;
    file.read(&mut piece).map(drop)
}

fn shuffle(paths: &mut [PathBuf], random: &mut Random) {
    for last in (1..paths.len()).rev() {
        paths.swap(last, random.below(last as u64 + 1) as usize);
    }
}
