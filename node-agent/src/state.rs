//! The agent's state directory: what must survive although the cache may be thrown away at any doubt.
//!
//! Today that is one number: the inode high-water mark. A block of numbers is reserved on disk before any of it is
//! given out, so that a number is never given out twice, whenever the agent dies.

use cache::meta::{FIRST_INO, INO_LIMIT, InodeNumbers, MetaError};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// How many inode numbers one write of the file reserves.
const RESERVE: u64 = 1 << 20;

pub struct State {
    dir: PathBuf,
    numbers: Mutex<Numbers>,
}

struct Numbers {
    next: u64,
    reserved_until: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("state directory {dir}: {source}: it must exist and be writable by the agent's user")]
    Directory { dir: PathBuf, source: io::Error },
    #[error(
        "state file {path} cannot be understood ({text:?}): restore it, or remove it together with the metadata directory"
    )]
    Corrupt { path: PathBuf, text: String },
}

impl State {
    pub fn open(dir: &Path) -> Result<Self, StateError> {
        let failed = |source| StateError::Directory { dir: dir.to_owned(), source };
        fs::create_dir_all(dir).map_err(failed)?;
        let path = dir.join("inodes");
        let next = match fs::read_to_string(&path) {
            Ok(text) => match text.trim().parse::<u64>() {
                Ok(n) if n >= FIRST_INO => n,
                _ => return Err(StateError::Corrupt { path, text: text.chars().take(40).collect() }),
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound => FIRST_INO,
            Err(e) => return Err(failed(e)),
        };
        Ok(Self { dir: dir.to_owned(), numbers: Mutex::new(Numbers { next, reserved_until: next }) })
    }

    /// Intent before effect: the file says that numbers below `until` may be in use.
    fn reserve(&self, until: u64) -> io::Result<()> {
        let temporary = self.dir.join("inodes.new");
        let mut file = File::create(&temporary)?;
        writeln!(file, "{until}")?;
        file.sync_all()?;
        fs::rename(&temporary, self.dir.join("inodes"))?;
        File::open(&self.dir)?.sync_all()
    }

    /// A number that tells this run of the agent from every other, also across reboots.
    pub fn generation() -> u64 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        (now.as_nanos() as u64) ^ u64::from(std::process::id()).rotate_left(48)
    }
}

impl InodeNumbers for State {
    fn next(&self) -> Result<u64, MetaError> {
        let mut numbers = self.numbers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if numbers.next >= INO_LIMIT {
            return Err(MetaError::InodesExhausted);
        }
        if numbers.next == numbers.reserved_until {
            let until = (numbers.next + RESERVE).min(INO_LIMIT);
            self.reserve(until).map_err(|e| MetaError::Numbers(e.to_string()))?;
            numbers.reserved_until = until;
        }
        numbers.next += 1;
        Ok(numbers.next - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_never_given_out_twice_across_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let first = State::open(dir.path()).unwrap();
        let given: Vec<u64> = (0..3).map(|_| first.next().unwrap()).collect();
        assert_eq!(given, [FIRST_INO, FIRST_INO + 1, FIRST_INO + 2]);
        drop(first); // as by kill -9: nothing is written at the end
        let again = State::open(dir.path()).unwrap().next().unwrap();
        assert!(again > given[2], "{again}");
    }

    #[test]
    fn a_corrupt_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("inodes"), "x").unwrap();
        assert!(matches!(State::open(dir.path()), Err(StateError::Corrupt { .. })));
    }
}
