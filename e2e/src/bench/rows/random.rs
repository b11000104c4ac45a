//! Random reads of one large file that is whole in the cache: of pages that are kept, beside the same file in the cache
//! read natively and through a mount that does nothing; and of pages that were dropped.

use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::who::Who;
use crate::bench::work;
use crate::bench::workload::{RANDOM_DROPPED, RANDOM_KEPT};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use testkit::passthrough;

pub(super) fn kept(stage: &mut Stage, subject: &Subject, file: &Path, round: usize) -> Result<()> {
    if !stage.wants_any(RANDOM_KEPT.map(|(workload, _)| workload)) {
        return Ok(());
    }
    if subject.who != Who::Millpond {
        return RANDOM_KEPT
            .iter()
            .try_for_each(|(workload, threads)| reads(stage, subject, file, workload, *threads, round));
    }
    let cached = cache_file(&stage.node().places().cache(), file)?;
    let at = stage.node().places().root().join("passthrough");
    std::fs::create_dir_all(&at)?;
    let mount = passthrough::Mounted::mount(&cached, &at);
    let mut others = vec![(Subject::bare(Who::CacheFile, &cached), cached.clone())];
    match &mount {
        Ok(_) => others.push((Subject::bare(Who::Passthrough, &at), at.join(passthrough::NAME))),
        Err(error) => stage.leave_out(format!("the mount that does nothing: {error:#}")),
    }
    for (workload, threads) in RANDOM_KEPT {
        // First and last in turn: what drifts within a round is for or against none of them.
        let ours_first = round.is_multiple_of(2);
        if ours_first {
            reads(stage, subject, file, workload, threads, round)?;
        }
        for (other, path) in &others {
            reads(stage, other, path, workload, threads, round)?;
        }
        if !ours_first {
            reads(stage, subject, file, workload, threads, round)?;
        }
    }
    mount.map_or(Ok(()), passthrough::Mounted::unmount)
}

pub(super) fn dropped(stage: &mut Stage, subject: &Subject, file: &Path, round: usize) -> Result<()> {
    for (workload, threads) in RANDOM_DROPPED {
        if stage.plays(workload, subject.who, round) {
            work::drop_page_cache()?;
            reads(stage, subject, file, workload, threads, round)?;
        }
    }
    Ok(())
}

fn reads(
    stage: &mut Stage,
    subject: &Subject,
    file: &Path,
    workload: &'static str,
    threads: usize,
    round: usize,
) -> Result<()> {
    let limit = Duration::from_millis(stage.size().random_ms);
    stage.sample(subject, workload, round, || work::random(file, threads, limit, round as u64))
}

/// The file below `cache` that holds the bytes of `shown`, found by its size and by what is in it.
fn cache_file(cache: &Path, shown: &Path) -> Result<PathBuf> {
    let bytes = std::fs::metadata(shown)?.len();
    let mut found = Vec::new();
    let mut open = vec![cache.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let entry = entry?;
            let data = entry.metadata()?;
            if data.is_dir() {
                open.push(entry.path());
            } else if data.len() == bytes && holds_the_same(&entry.path(), shown, bytes)? {
                found.push(entry.path());
            }
        }
    }
    ensure!(found.len() == 1, "{} files below {} hold {}", found.len(), cache.display(), shown.display());
    Ok(found.remove(0))
}

fn holds_the_same(a: &Path, b: &Path, bytes: u64) -> Result<bool> {
    let (a, b) = (File::open(a)?, File::open(b)?);
    let (mut of_a, mut of_b) = ([0; 4096], [0; 4096]);
    for part in 0..64 {
        let offset = bytes.saturating_sub(4096) / 63 * part;
        let read = a.read_at(&mut of_a, offset)?;
        b.read_exact_at(&mut of_b[..read], offset)?;
        if of_a[..read] != of_b[..read] {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_file_is_found_by_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, shown) = (dir.path().join("cache/aa"), dir.path().join("shown"));
        std::fs::create_dir_all(&cache).unwrap();
        let content = testkit::content::bytes(1, 0..300_000);
        std::fs::write(&shown, &content).unwrap();
        std::fs::write(cache.join("other"), testkit::content::bytes(2, 0..300_000)).unwrap();
        std::fs::write(cache.join("short"), &content[..1000]).unwrap();
        let below = dir.path().join("cache");
        assert!(cache_file(&below, &shown).is_err());
        std::fs::write(cache.join("right"), &content).unwrap();
        assert_eq!(cache_file(&below, &shown).unwrap(), cache.join("right"));
    }
}
