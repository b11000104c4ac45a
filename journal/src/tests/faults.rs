//! Errors of the disk, and what they must not lead to.

use super::sim::{Kind, Sim};
use super::{FORMAT, NAME, open, records, table};
use crate::frame::{FRAME_MAX, Frame, HEAD, KEY_MAX, VALUE_MAX};
use crate::{COMPACT_MIN, Change, Journal, JournalError};

#[test]
fn what_was_put_is_found_by_key_and_prefix_and_after_reopening() {
    let sim = Sim::new(1);
    let (mut journal, recovered) = open(&sim).unwrap();
    assert_eq!((recovered.records, recovered.cut_bytes), (0, 0));
    journal.put(b"b/2", b"two").unwrap();
    journal.batch(&[Change::Put { key: b"b/1", value: b"" }, Change::Delete { key: b"none" }]).unwrap();
    journal.put(b"a", b"old").unwrap();
    journal.put(b"a", b"new").unwrap();
    journal.put(b"c", b"gone").unwrap();
    journal.delete(b"c").unwrap();
    drop(journal);
    let (journal, recovered) = open(&sim).unwrap();
    assert_eq!((recovered.records, recovered.cut_bytes), (3, 0));
    assert_eq!(records(&journal), table(&[("a", "new"), ("b/1", ""), ("b/2", "two")]));
    assert_eq!((journal.get(b"a"), journal.get(b"c")), (Some(&b"new"[..]), None));
    let found: Vec<_> = journal.range(b"b/").map(|(key, _)| key).collect();
    assert_eq!(found, [b"b/1", b"b/2"]);
}

#[test]
fn a_change_is_one_write_and_a_sync_one_fsync_and_a_mark() {
    let sim = Sim::new(1);
    let (mut journal, _) = open(&sim).unwrap();
    sim.take_log();
    journal.put(b"a", b"1").unwrap();
    assert_eq!(sim.take_log(), ["write"]);
    journal.sync().unwrap();
    assert_eq!(sim.take_log(), ["sync", "write"]);
    journal.sync().unwrap();
    journal.batch(&[]).unwrap();
    assert!(sim.take_log().is_empty(), "nothing was written since");
}

#[test]
fn a_full_disk_refuses_the_change_and_keeps_all_before() {
    let sim = Sim::new(3);
    let (mut journal, _) = open(&sim).unwrap();
    journal.put(b"a", b"1").unwrap();
    let before = sim.bytes(NAME).len();
    for _ in 0..20 {
        sim.fail_next(0, Kind::Full, 1);
        assert!(matches!(journal.put(b"b", &[7; 500]), Err(JournalError::Full(_))));
        assert_eq!(sim.bytes(NAME).len(), before, "a short write is cut off");
        assert_eq!(records(&journal), table(&[("a", "1")]));
    }
    sim.begin(&[]);
    journal.put(b"c", b"3").unwrap();
    let (journal, recovered) = open(&sim).unwrap();
    assert_eq!(recovered.cut_bytes, 0);
    assert_eq!(records(&journal), table(&[("a", "1"), ("c", "3")]));
}

#[test]
fn a_short_write_that_cannot_be_cut_off_poisons_until_it_is_opened_again() {
    let sim = Sim::new(3);
    let (mut journal, _) = open(&sim).unwrap();
    journal.put(b"a", b"1").unwrap();
    sim.fail_next(0, Kind::Eio, 100);
    assert!(matches!(journal.put(b"b", &[7; 500]), Err(JournalError::Io { .. })));
    sim.begin(&[]);
    assert!(matches!(journal.put(b"c", b"3"), Err(JournalError::Poisoned)));
    assert!(matches!(journal.delete(b"a"), Err(JournalError::Poisoned)));
    assert!(matches!(journal.batch(&[]), Err(JournalError::Poisoned)));
    assert!(matches!(journal.sync(), Err(JournalError::Poisoned)));
    let (mut journal, _) = open(&sim).unwrap();
    assert_eq!(records(&journal), table(&[("a", "1")]));
    journal.put(b"c", b"3").unwrap();
}

/// A value may be somebody's bytes: here it is a frame, at the place and with the number that the next one has.
#[test]
fn what_a_failed_write_left_is_never_replayed_behind_the_next_frame() {
    for seed in 0..300 {
        let sim = Sim::new(seed);
        let (mut journal, _) = open(&sim).unwrap();
        journal.put(b"a", b"1").unwrap();
        let mut forged = Frame::new();
        forged.push(&Change::Put { key: b"forged", value: b"" });
        let next = [b"k".as_slice(), &[1; 100]];
        let next_len = HEAD + Change::Put { key: next[0], value: next[1] }.bytes();
        // Head, lengths and key of the record that carries it.
        let mut value = vec![0; next_len - HEAD - 9 - 1];
        value.extend(forged.finish(journal.next + 1));
        value.resize(value.len() + 64, 0);
        sim.fail_next(0, Kind::Full, 1);
        assert!(journal.put(b"v", &value).is_err());
        sim.begin(&[]);
        journal.put(next[0], next[1]).unwrap();
        if seed % 2 == 0 {
            sim.power_loss();
        }
        let (journal, _) = open(&sim).unwrap();
        assert_eq!(journal.get(b"forged"), None, "seed {seed}");
    }
}

/// As above, of a tear: a frame that a power loss has let through stands behind one that it has not.
#[test]
fn what_a_tear_left_is_never_replayed_behind_the_next_frame() {
    for seed in 0..1000 {
        let sim = Sim::new(seed);
        let (mut journal, _) = open(&sim).unwrap();
        journal.put(b"a", b"1").unwrap();
        journal.put(b"b", b"2").unwrap();
        sim.power_loss();
        let (mut journal, _) = open(&sim).unwrap();
        let before = records(&journal);
        journal.put(b"c", b"3").unwrap();
        sim.power_loss();
        let (journal, _) = open(&sim).unwrap();
        let mut after = before.clone();
        after.insert(b"c".to_vec(), b"3".to_vec());
        let found = records(&journal);
        assert!(found == before || found == after, "seed {seed}: {before:?} became {found:?}");
    }
}

#[test]
fn a_failed_fsync_poisons_and_reopening_writes_again_what_it_may_have_dropped() {
    for seed in 0..400 {
        let sim = Sim::new(seed);
        let (mut journal, _) = open(&sim).unwrap();
        journal.put(b"0", b"0").unwrap();
        // Its mark is what the next fsync tears, as well; the one before must not be written over until it is whole.
        journal.sync().unwrap();
        journal.put(b"a", b"1").unwrap();
        sim.fail_next(0, Kind::Eio, 1);
        assert!(matches!(journal.sync(), Err(JournalError::NotDurable(_))));
        sim.begin(&[]);
        assert!(matches!(journal.sync(), Err(JournalError::Poisoned)));
        assert!(matches!(journal.put(b"b", b"2"), Err(JournalError::Poisoned)));
        assert_eq!(journal.get(b"a"), Some(&b"1"[..]), "reads go on");
        let (journal, _) = open(&sim).unwrap();
        assert_eq!(records(&journal), table(&[("0", "0"), ("a", "1")]));
        sim.power_loss();
        let (journal, _) = open(&sim).unwrap();
        assert_eq!(
            records(&journal),
            table(&[("0", "0"), ("a", "1")]),
            "seed {seed}: open said that it was durable"
        );
    }
}

fn compacts_next(sim: &Sim) -> Journal {
    let (mut journal, _) = open(sim).unwrap();
    while journal.end + 3000 <= COMPACT_MIN {
        journal.put(b"a", &[1; 3000]).unwrap();
    }
    journal
}

#[test]
fn a_compaction_syncs_the_new_file_before_the_rename_and_the_directory_after() {
    let sim = Sim::new(1);
    let mut journal = compacts_next(&sim);
    sim.take_log();
    journal.put(b"a", &[2; 3000]).unwrap();
    let compaction = ["remove", "create", "write", "write", "sync", "rename", "sync_dir"];
    assert_eq!(sim.take_log(), [&["write"][..], &compaction].concat());
    assert!(sim.bytes(NAME).len() < 8000);
    assert_eq!(sim.names(), [NAME]);
    journal.sync().unwrap();
    assert!(sim.take_log().is_empty(), "all is durable");
    let cut = &sim.bytes(NAME)[..journal.end as usize - 1];
    assert!(matches!(open(&Sim::with(NAME, cut)), Err(JournalError::Damaged { .. })), "and marked so");
    journal.put(b"b", b"2").unwrap();
    let expected = records(&journal);
    let (journal, recovered) = open(&sim).unwrap();
    assert_eq!((records(&journal), recovered.cut_bytes), (expected, 0));
}

/// A file system may give the new file blocks of the old one, and a power loss show what was in them.
#[test]
fn frames_of_the_file_before_a_compaction_are_not_replayed() {
    let sim = Sim::new(1);
    let mut journal = compacts_next(&sim);
    let old = sim.bytes(NAME);
    journal.put(b"a", &[2; 3000]).unwrap();
    let mut bytes = sim.bytes(NAME);
    let end = bytes.len();
    assert_eq!(journal.end, end as u64);
    // All frames are of one length: here begins the second one.
    bytes.extend_from_slice(&old[end..]);
    let (journal, recovered) = open(&Sim::with(NAME, &bytes)).unwrap();
    assert_eq!(journal.get(b"a"), Some(&[2; 3000][..]));
    assert_eq!(recovered.cut_bytes, (old.len() - end) as u64);
}

#[test]
fn a_compaction_that_fails_fails_no_change_and_waits_until_the_log_has_grown_by_half() {
    let sim = Sim::new(1);
    let mut journal = compacts_next(&sim);
    sim.fail_next(1, Kind::Full, 1);
    journal.put(b"a", &[2; 3000]).unwrap();
    assert!(sim.has_failed());
    sim.begin(&[]);
    let failed_at = journal.end;
    sim.take_log();
    while journal.end + 3100 < failed_at * 3 / 2 {
        journal.put(b"a", &[3; 3000]).unwrap();
        assert_eq!(sim.take_log(), ["write"]);
    }
    journal.put(b"a", &[4; 3000]).unwrap();
    journal.put(b"a", &[5; 3000]).unwrap();
    assert!(journal.end < COMPACT_MIN / 2, "compacted");
    assert_eq!(sim.names(), [NAME]);
}

#[test]
fn after_a_rename_of_unknown_outcome_nothing_is_written_to_either_file() {
    for seed in 0..8 {
        let sim = Sim::new(seed);
        let mut journal = compacts_next(&sim);
        let (rename, sync_dir) = (6, 7);
        sim.fail_next(if seed < 4 { rename } else { sync_dir }, Kind::Eio, 1);
        journal.put(b"a", &[2; 3000]).unwrap();
        assert!(sim.has_failed());
        sim.begin(&[]);
        assert!(matches!(journal.put(b"b", b"2"), Err(JournalError::Poisoned)));
        assert!(matches!(journal.sync(), Err(JournalError::Poisoned)));
        let expected = records(&journal);
        assert_eq!(records(&open(&sim).unwrap().0), expected);
    }
}

#[test]
fn what_a_compaction_left_is_removed() {
    let sim = Sim::new(1);
    open(&sim).unwrap().0.put(b"a", b"1").unwrap();
    sim.add("staged.new", b"half of it");
    let (journal, _) = open(&sim).unwrap();
    assert_eq!((records(&journal), sim.names()), (table(&[("a", "1")]), vec![NAME.to_owned()]));
}

#[test]
fn what_is_too_large_is_refused_before_anything_is_written() {
    let sim = Sim::new(1);
    let (mut journal, _) = open(&sim).unwrap();
    sim.take_log();
    let is_refused = |result| matches!(result, Err(JournalError::TooLarge { .. }));
    assert!(is_refused(journal.put(&vec![0; KEY_MAX + 1], b"")));
    assert!(is_refused(journal.delete(&vec![0; KEY_MAX + 1])));
    assert!(is_refused(journal.put(b"", &vec![0; VALUE_MAX + 1])));
    let value = vec![0; VALUE_MAX];
    assert!(is_refused(journal.batch(&[Change::Put { key: b"k", value: &value }; FRAME_MAX / VALUE_MAX])));
    assert!(sim.take_log().is_empty());
    journal.put(&vec![0; KEY_MAX], &value).unwrap();
    let expected = records(&journal);
    assert_eq!(records(&open(&sim).unwrap().0), expected);
}

#[test]
fn another_format_is_left_alone() {
    let sim = Sim::new(1);
    open(&sim).unwrap().0.put(b"a", b"1").unwrap();
    let before = sim.bytes(NAME);
    let error = Journal::open_on(Box::new(sim.clone()), NAME, FORMAT + 1).unwrap_err();
    assert!(matches!(error, JournalError::Format { found: FORMAT, expected } if expected == FORMAT + 1));
    assert_eq!(sim.bytes(NAME), before);
}
