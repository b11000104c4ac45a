//! Mount ids: a counter on disk, never given out twice in the life of a state directory.

use link::broker::MountId;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Ids reserved by one write to disk; those unused at a restart are skipped.
const BATCH: u64 = 1000;

#[derive(Debug)]
pub(super) struct Counter {
    file: PathBuf,
    state: Mutex<Reserved>,
}

#[derive(Debug)]
struct Reserved {
    next: u64,
    end: u64,
}

impl Counter {
    pub(super) fn open(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let file = directory.join("mount-id");
        let next = match fs::read_to_string(&file) {
            Ok(text) => text.trim().parse().map_err(|_| {
                io::Error::other(format!(
                    "{} holds no number: write one above every id used so far",
                    file.display()
                ))
            })?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => 1,
            Err(e) => return Err(e),
        };
        Ok(Self { file, state: Mutex::new(Reserved { next, end: next }) })
    }

    pub(super) fn next(&self) -> io::Result<MountId> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.next == state.end {
            let end = state.next + BATCH;
            self.write(end)?;
            state.end = end;
        }
        state.next += 1;
        Ok(MountId(state.next - 1))
    }

    fn write(&self, value: u64) -> io::Result<()> {
        let draft = self.file.with_extension("new");
        let mut file = File::create(&draft)?;
        writeln!(file, "{value}")?;
        file.sync_all()?;
        fs::rename(&draft, &self.file)?;
        match self.file.parent() {
            Some(directory) => File::open(directory)?.sync_all(),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_that_of_the_golden_one() {
        let dir = tempfile::tempdir().unwrap();
        Counter::open(dir.path()).unwrap().next().unwrap();
        let file = dir.path().join("mount-id");
        let text = crate::golden::same(crate::GOLDEN, "mount-id-1.txt", &fs::read_to_string(&file).unwrap());
        fs::write(file, text).unwrap();
        assert_eq!(Counter::open(dir.path()).unwrap().next().unwrap(), MountId(1001));
    }

    #[test]
    fn ids_are_never_given_out_twice() {
        let dir = tempfile::tempdir().unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..3 {
            let counter = Counter::open(dir.path()).unwrap();
            for _ in 0..BATCH + 1 {
                assert!(seen.insert(counter.next().unwrap()));
            }
        }
        fs::write(dir.path().join("mount-id"), "x").unwrap();
        assert!(Counter::open(dir.path()).is_err());
    }
}
