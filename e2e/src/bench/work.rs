//! What the benchmarks do with a directory; the same code for the native file system, for us and for peers.

use crate::random::Random;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Seconds to read a file from the first byte to the last, 1 MiB at a time.
pub(super) fn sequential(path: &Path) -> Result<f64> {
    let begun = Instant::now();
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    let size = file.metadata()?.len();
    let (mut buffer, mut total) = (vec![0; 1 << 20], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => total += n as u64,
        }
    }
    ensure!(total == size, "{}: {total} bytes instead of {size}", path.display());
    Ok(begun.elapsed().as_secs_f64())
}

/// `readers` at once, each the whole file; seconds until the last is done.
pub(super) fn many_readers(paths: &[impl AsRef<Path> + Sync]) -> Result<f64> {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = paths.iter().map(|p| scope.spawn(|| sequential(p.as_ref()))).collect();
        threads.into_iter().try_for_each(|t| t.join().expect("a reader does not panic").map(drop))
    })?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Random 4 KiB reads per second of one file by `threads`, for `limit`.
pub(super) fn random(path: &Path, threads: usize, limit: Duration, seed: u64) -> Result<f64> {
    let pages = std::fs::metadata(path)?.len() / 4096;
    let (reads, begun) = (AtomicU64::new(0), Instant::now());
    std::thread::scope(|scope| {
        let work = |k: usize| -> Result<()> {
            let file = File::open(path)?;
            let (mut random, mut buffer, mut done) = (Random(seed + k as u64), [0; 4096], 0);
            while begun.elapsed() < limit {
                for _ in 0..32 {
                    file.read_exact_at(&mut buffer, random.below(pages) * 4096)?;
                }
                done += 32;
            }
            reads.fetch_add(done, Relaxed);
            Ok(())
        };
        let threads: Vec<_> = (0..threads).map(|k| scope.spawn(move || work(k))).collect();
        threads.into_iter().try_for_each(|t| t.join().expect("a reader does not panic"))
    })?;
    Ok(reads.load(Relaxed) as f64 / begun.elapsed().as_secs_f64())
}

/// Files per second: each opened, read whole and closed, shuffled by `seed`.
pub(super) fn epoch(root: &Path, names: &[String], threads: usize, seed: u64) -> Result<f64> {
    let mut order: Vec<usize> = (0..names.len()).collect();
    let mut random = Random(seed);
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i as u64 + 1) as usize);
    }
    let (next, begun) = (AtomicUsize::new(0), Instant::now());
    std::thread::scope(|scope| {
        let work = || -> Result<()> {
            let mut buffer = vec![0; 1 << 20];
            while let Some(&k) = order.get(next.fetch_add(1, Relaxed)) {
                let path = root.join(&names[k]);
                let mut file = File::open(&path).with_context(|| path.display().to_string())?;
                while file.read(&mut buffer)? > 0 {}
            }
            Ok(())
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|t| t.join().expect("a reader does not panic"))
    })?;
    Ok(names.len() as f64 / begun.elapsed().as_secs_f64())
}

/// What `ls -lR` does: every directory listed, every name looked at. Seconds, and how many names.
pub(super) fn walk(root: &Path, limit: Duration) -> Result<(f64, u64)> {
    let begun = Instant::now();
    let (mut open, mut names) = (vec![root.to_owned()], 0);
    while let Some(dir) = open.pop() {
        ensure!(begun.elapsed() < limit, "after {limit:?} it has seen {names} names, and is given up");
        for entry in std::fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let entry = entry?;
            // DirEntry::metadata is an fstatat without following: what ls -l calls.
            if entry.metadata()?.is_dir() {
                open.push(entry.path());
            }
            names += 1;
        }
    }
    Ok((begun.elapsed().as_secs_f64(), names))
}

/// Reads everything below `root`, so that it is in the page cache; of files of `most` bytes or more nothing, for they would
/// take the place of the rest.
pub(super) fn heat(root: &Path, most: u64) -> Result<()> {
    let (mut open, mut buffer) = (vec![root.to_owned()], vec![0; 1 << 20]);
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let entry = entry?;
            let found = entry.metadata()?;
            if found.is_dir() {
                open.push(entry.path());
            } else if found.len() < most {
                let mut file = File::open(entry.path())?;
                while file.read(&mut buffer)? > 0 {}
            }
        }
    }
    Ok(())
}

/// The host of a virtual machine may have taken back memory that was free for a while. The first touch of each such page
/// is slow, and would be measured with the subject that comes first.
pub(super) fn touch_free_memory(bytes: u64) {
    drop(std::hint::black_box(vec![1u8; bytes as usize]));
}

/// The whole machine's clean page cache, dentries and inodes.
pub(super) fn drop_page_cache() -> Result<()> {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").context("drop the page cache")
}
