//! The kernel's files: locks, links, and processes that are killed.

use super::{FORMAT, NAME, records, table};
use crate::{COMPACT_MIN, Journal, JournalError, Recovered};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const DIR: &str = "MILLPOND_TEST_JOURNAL_DIR";
/// How many records the other process keeps, of so many bytes.
const KEYS: u64 = 20;
const VALUE: usize = 400;

fn open(dir: &Path) -> Result<(Journal, Recovered), JournalError> {
    Journal::open(File::open(dir).unwrap().as_fd(), NAME, FORMAT)
}

#[test]
fn a_journal_is_kept_in_a_file_of_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path()).unwrap();
    for n in 0u64..1000 {
        journal.put(b"key", &n.to_le_bytes().repeat(20)).unwrap();
    }
    journal.sync().unwrap();
    let meta = std::fs::metadata(dir.path().join(NAME)).unwrap();
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    assert!(meta.len() < COMPACT_MIN, "it was compacted");
    let expected = records(&journal);
    drop(journal);
    let (journal, recovered) = open(dir.path()).unwrap();
    assert_eq!((records(&journal), recovered.cut_bytes), (expected, 0));
    let mut names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [NAME, "staged.lock"]);
}

#[test]
fn a_journal_is_opened_once_in_a_process() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path()).unwrap();
    assert!(matches!(open(dir.path()), Err(JournalError::InUse)));
    for n in 0u64..1000 {
        journal.put(b"key", &n.to_le_bytes().repeat(20)).unwrap();
    }
    assert!(matches!(open(dir.path()), Err(JournalError::InUse)), "nor after a compaction");
    drop(journal);
    open(dir.path()).unwrap();
}

#[test]
fn a_link_in_its_place_is_not_followed() {
    for name in [NAME, "staged.new", "staged.lock"] {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join(name);
        std::os::unix::fs::symlink("elsewhere", &link).unwrap();
        let result = open(dir.path());
        assert_eq!(result.is_ok(), name == "staged.new", "{result:?}");
        assert!(!dir.path().join("elsewhere").exists());
    }
    let dir = tempfile::tempdir().unwrap();
    let slash = Journal::open(File::open(dir.path()).unwrap().as_fd(), "a/b", FORMAT);
    assert!(matches!(slash, Err(JournalError::Io { .. })));
    assert_eq!(records(&open(dir.path()).unwrap().0), table(&[]));
}

/// What `spawn` starts; alone, it does nothing.
#[test]
fn the_other_process() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let (mut journal, _) = open(Path::new(&dir)).unwrap();
    let last = journal.get(b"last").map_or(0, |n| u64::from_le_bytes(n.try_into().unwrap()));
    for n in last + 1.. {
        let (key, value, n) =
            (format!("key{}", n % KEYS), n.to_le_bytes().repeat(VALUE / 8), n.to_le_bytes());
        let puts = [(key.as_bytes(), &value[..]), (b"last", &n)];
        journal.batch(&puts.map(|(key, value)| crate::Change::Put { key, value })).unwrap();
        println!("\n{}", u64::from_le_bytes(n));
    }
}

fn spawn(dir: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "tests::processes::the_other_process", "--nocapture"]);
    command.env(DIR, dir).stdout(Stdio::piped()).spawn().unwrap()
}

fn numbers(child: &mut Child) -> impl Iterator<Item = u64> + use<> {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.filter_map(|line| line.ok()?.parse().ok())
}

#[test]
fn a_process_killed_at_any_time_leaves_every_change_that_returned() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..12 {
        let mut child = spawn(dir.path());
        let mut numbers = numbers(&mut child);
        // Far enough for compactions.
        let seen = numbers.by_ref().nth(150 + 37 * round).unwrap();
        assert!(matches!(open(dir.path()), Err(JournalError::InUse)), "another process has it");
        child.kill().unwrap();
        let returned = numbers.last().unwrap_or(seen);
        child.wait().unwrap();
        let (journal, _) = open(dir.path()).unwrap();
        let last = u64::from_le_bytes(journal.get(b"last").unwrap().try_into().unwrap());
        assert!(
            last == returned || last == returned + 1,
            "round {round}: {returned} returned, {last} is there"
        );
        for n in last.saturating_sub(KEYS - 1).max(1)..=last {
            let value = journal.get(format!("key{}", n % KEYS).as_bytes()).unwrap();
            assert!(value == n.to_le_bytes().repeat(VALUE / 8), "round {round}: a batch is whole");
        }
    }
}
