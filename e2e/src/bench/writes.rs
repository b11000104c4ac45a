//! What the benchmarks write into a directory; the same code for the native file system, for us and for peers.

use super::pages::{BLOCK, PAGE, Pages};
use crate::random::Random;
use anyhow::{Context, Result};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Seconds to write a file in order, a block with each call, to fsync and to close it.
pub(super) fn in_order(path: &Path, bytes: u64, pass: u64) -> Result<f64> {
    let (mut pages, begun) = (Pages::new(), Instant::now());
    let mut file = File::create(path).with_context(|| path.display().to_string())?;
    let all = bytes / PAGE;
    let mut page = 0;
    while page < all {
        let end = (page + BLOCK / PAGE).min(all);
        file.write_all(pages.of(page..end, pass))?;
        page = end;
    }
    file.sync_all()?;
    drop(file);
    Ok(begun.elapsed().as_secs_f64())
}

/// What an editor does, for `limit`: a temporary file of two pages, fsync, and a rename over the file. Saves per second, and the
/// pass that came last.
pub(super) fn saves(dir: &Path, limit: Duration) -> Result<(f64, u64)> {
    let (path, beside) = (dir.join("saved"), dir.join(".saved.new"));
    let (mut pages, mut pass, begun) = (Pages::new(), 0, Instant::now());
    while begun.elapsed() < limit {
        pass += 1;
        let mut file = File::create(&beside)?;
        file.write_all(pages.of(0..2, pass))?;
        file.sync_all()?;
        drop(file);
        fs::rename(&beside, &path)?;
    }
    Ok((pass as f64 / begun.elapsed().as_secs_f64(), pass))
}

/// The name of a small file, which holds the page of its number.
pub(super) fn small_name(number: u64) -> String {
    format!("f{number:05}")
}

/// Files per second: each created, written and closed, by one of the threads.
pub(super) fn small(dir: &Path, files: u64, threads: usize, is_synced: bool, pass: u64) -> Result<f64> {
    let (next, begun) = (AtomicU64::new(0), Instant::now());
    std::thread::scope(|scope| {
        let work = || -> Result<()> {
            let mut pages = Pages::new();
            loop {
                let number = next.fetch_add(1, Relaxed);
                if number >= files {
                    return Ok(());
                }
                let mut file = File::create_new(dir.join(small_name(number)))?;
                file.write_all(pages.of(number..number + 1, pass))?;
                if is_synced {
                    file.sync_all()?;
                }
            }
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|t| t.join().expect("a writer does not panic"))
    })?;
    Ok(files as f64 / begun.elapsed().as_secs_f64())
}

/// When random writes end.
#[derive(Clone, Copy, Debug)]
pub(super) enum Until {
    /// So many, and then one fsync.
    Count(u64),
    /// Each with an fsync, until so much time has passed.
    Passed(Duration),
}

/// The pages that are overwritten, in this order.
pub(super) fn overwritten(pages: u64, seed: u64) -> impl Iterator<Item = u64> {
    let mut random = Random(seed);
    std::iter::repeat_with(move || random.below(pages))
}

/// Random pages of a file written anew. Writes per second up to the end of the last fsync, and how many they were.
pub(super) fn overwrite(path: &Path, until: Until, seed: u64, pass: u64) -> Result<(f64, u64)> {
    let file = File::options().write(true).open(path).with_context(|| path.display().to_string())?;
    let count = file.metadata()?.len() / PAGE;
    let (mut pages, mut done, begun) = (Pages::new(), 0, Instant::now());
    for page in overwritten(count, seed) {
        file.write_all_at(pages.of(page..page + 1, pass), page * PAGE)?;
        done += 1;
        match until {
            Until::Count(all) if done >= all => break,
            Until::Count(_) => {}
            Until::Passed(limit) => {
                file.sync_data()?;
                if begun.elapsed() >= limit {
                    break;
                }
            }
        }
    }
    file.sync_all()?;
    drop(file);
    Ok((done as f64 / begun.elapsed().as_secs_f64(), done))
}
