//! Reads a whole tree once and compares every byte, name and size.

use super::{calls, kinds::LARGE_BYTES};
use crate::tree::Tree;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verified {
    pub files: u64,
    pub bytes: u64,
    pub seconds: f64,
    pub failed: u64,
    /// The first hundred.
    pub failures: Vec<String>,
}

impl Verified {
    /// Everything was there, everything was right.
    pub fn ensure_all(&self, tree: &Tree) -> Result<()> {
        anyhow::ensure!(self.failed == 0, "{} failures: {:#?}", self.failed, self.failures);
        anyhow::ensure!(
            (self.files, self.bytes) == (tree.files.len() as u64, tree.bytes()),
            "{} files and {} bytes instead of {} and {}",
            self.files,
            self.bytes,
            tree.files.len(),
            tree.bytes()
        );
        Ok(())
    }
}

/// With `names` every directory must list exactly the names of the tree. Files are read by `threads` threads, shuffled
/// by `seed` unless that is 0.
pub fn verify(root: &Path, tree: &Tree, threads: usize, seed: u64, names: bool) -> Result<Verified> {
    let begun = Instant::now();
    let mut order: Vec<usize> = (0..tree.files.len()).collect();
    if seed != 0 {
        let mut random = crate::random::Random(seed);
        for i in (1..order.len()).rev() {
            order.swap(i, random.below(i as u64 + 1) as usize);
        }
    }
    let (next, total) = (AtomicUsize::new(0), Mutex::new(Verified::default()));
    if names {
        for (dir, wanted) in tree.directories() {
            let problem = match list(&root.join(&dir)) {
                Ok(found) if found == wanted => continue,
                Ok(found) => {
                    let missing: Vec<_> = wanted.difference(&found).take(5).collect();
                    let extra: Vec<_> = found.difference(&wanted).take(5).collect();
                    format!("{dir}/: missing {missing:?}, unexpected {extra:?}")
                }
                Err(e) => format!("{dir}/: {e}"),
            };
            note(&total, problem);
        }
    }
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let mut buffer = vec![0; LARGE_BYTES as usize];
                while let Some(&index) = order.get(next.fetch_add(1, Relaxed)) {
                    match read_whole(root, tree, index, &mut buffer) {
                        Ok(bytes) => {
                            let mut total = total.lock().unwrap_or_else(|e| e.into_inner());
                            total.files += 1;
                            total.bytes += bytes;
                        }
                        Err(e) => note(&total, format!("{}: {e:#}", tree.files[index].path)),
                    }
                }
            });
        }
    });
    let total = total.into_inner().unwrap_or_else(|e| e.into_inner());
    Ok(Verified { seconds: begun.elapsed().as_secs_f64(), ..total })
}

fn note(total: &Mutex<Verified>, problem: String) {
    let mut total = total.lock().unwrap_or_else(|e| e.into_inner());
    total.failed += 1;
    if total.failures.len() < 100 {
        total.failures.push(problem);
    }
}

fn list(dir: &Path) -> std::io::Result<BTreeSet<String>> {
    std::fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

fn read_whole(root: &Path, tree: &Tree, index: usize, buffer: &mut [u8]) -> Result<u64> {
    let file = &tree.files[index];
    let reference = tree.reference(file)?;
    let fd = calls::open(&root.join(&file.path), libc::O_RDONLY)?;
    let mut at = 0;
    loop {
        let n = calls::pread(&fd, buffer, at)?;
        if n == 0 {
            break;
        }
        if let Some(wrong) = reference.first_difference(at, &buffer[..n]) {
            anyhow::bail!("wrong byte at {wrong}");
        }
        at += n as u64;
    }
    anyhow::ensure!(at == file.size, "{at} bytes instead of {}", file.size);
    calls::close(fd)?;
    Ok(at)
}
