//! Thousands of threads that each read one page of one file, all at once and past the page cache: as many requests wait.

use super::calls;
use crate::tree::Tree;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

const PAGE: usize = 4096;
const STACK: usize = 64 << 10;

/// What became of the crowd.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Crowd {
    pub calls: u64,
    pub seconds: f64,
    /// Wrong answers included.
    pub failed: u64,
    pub wrong: u64,
    /// The first hundred.
    pub failures: Vec<String>,
}

impl Crowd {
    fn note(&mut self, page: u64, result: std::io::Result<Option<u64>>) {
        self.calls += 1;
        let what = match result {
            Ok(None) => return,
            Ok(Some(at)) => {
                self.wrong += 1;
                format!("page {page}: wrong from byte {at} on")
            }
            Err(error) => format!("page {page}: {error}"),
        };
        self.failed += 1;
        if self.failures.len() < 100 {
            self.failures.push(what);
        }
    }
}

/// Opens the tree's first file with that many pages, says "opened", waits until stdin closes, and reads.
pub fn crowd(root: &Path, tree: &Tree, threads: usize) -> Result<Crowd> {
    let large = tree.files.iter().find(|f| f.size >= (threads * PAGE) as u64);
    let file = large.context("no file of the tree has a page for every thread")?;
    // Past the page cache: a read of one page is one request, and waits for no other.
    let fd = calls::open(&root.join(&file.path), libc::O_RDONLY | libc::O_DIRECT)?;
    println!("opened");
    std::io::stdout().flush()?;
    let _ = std::io::stdin().read(&mut [0]); // EOF and an error mean the same: go
    let begun = Instant::now();
    let all = Mutex::new(Crowd::default());
    let (fd, noted) = (&fd, &all);
    std::thread::scope(|scope| -> Result<()> {
        for page in 0..threads as u64 {
            let read = move || {
                let reference = tree.reference(file);
                let mut buffer = vec![0; PAGE];
                let at = page * PAGE as u64;
                let result = calls::pread(fd, &mut buffer, at).and_then(|n| {
                    let reference = reference.map_err(std::io::Error::other)?;
                    Ok(match n {
                        PAGE => reference.first_difference(at, &buffer),
                        short => Some(at + short as u64),
                    })
                });
                noted.lock().unwrap_or_else(|e| e.into_inner()).note(page, result);
            };
            std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, read)?;
        }
        Ok(())
    })?;
    let mut crowd = all.into_inner().unwrap_or_else(|e| e.into_inner());
    ensure!(crowd.calls == threads as u64, "{} threads came back", crowd.calls);
    crowd.seconds = begun.elapsed().as_secs_f64();
    Ok(crowd)
}
