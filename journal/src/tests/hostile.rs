//! Files that no journal has written, and journals that a disk has damaged.

use super::sim::Sim;
use super::{FORMAT, NAME, open, records, table};
use crate::JournalError;
use crate::frame::{FRAMES, Frame, Header};
use proptest::prelude::*;

/// Three synced records, one to a frame, and where each frame begins; two more that are not synced.
fn written() -> (Vec<u8>, Vec<u64>) {
    let sim = Sim::new(1);
    let (mut journal, _) = open(&sim).unwrap();
    let mut starts = Vec::new();
    for key in [b"a", b"b", b"c", b"d", b"e"] {
        starts.push(journal.end);
        journal.put(key, b"value").unwrap();
        if key == b"c" {
            journal.sync().unwrap();
        }
    }
    (sim.bytes(NAME), starts)
}

#[test]
fn a_bad_frame_before_the_mark_is_damage_and_one_behind_it_is_a_tear() {
    let (sound, starts) = written();
    for at in FRAMES..sound.len() {
        let mut bytes = sound.clone();
        bytes[at] ^= 0x10;
        let sim = Sim::with(NAME, &bytes);
        let bad = *starts.iter().rfind(|start| **start <= at as u64).unwrap();
        match open(&sim) {
            Err(JournalError::Damaged { at }) => {
                assert!(bad < starts[3] && at == bad, "{at}");
                assert!(sim.bytes(NAME) == bytes, "nothing is changed");
            }
            Ok((journal, recovered)) => {
                assert!(bad >= starts[3], "damage of synced bytes was not seen: {at}");
                assert_eq!(recovered.cut_bytes, sound.len() as u64 - bad, "cut at the first bad one");
                assert_eq!(journal.end, bad);
                assert_eq!(sim.bytes(NAME).len() as u64, bad);
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn a_file_cut_short_before_the_mark_is_damage() {
    let (sound, starts) = written();
    for len in 0..sound.len() {
        let sim = Sim::with(NAME, &sound[..len]);
        match open(&sim) {
            Err(JournalError::Damaged { at }) => {
                assert!((len as u64) < starts[3] && at <= len as u64);
                assert_eq!(sim.bytes(NAME).len(), len, "nothing is changed");
            }
            Ok((journal, _)) => {
                assert!(len as u64 >= starts[3]);
                assert_eq!(records(&journal).len(), if len as u64 >= starts[4] { 4 } else { 3 });
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn damage_of_the_header_is_seen_and_of_a_mark_is_survived() {
    let (sound, _) = written();
    for at in 0..FRAMES {
        let mut bytes = sound.clone();
        bytes[at] ^= 0x10;
        let result = open(&Sim::with(NAME, &bytes));
        match at {
            0..24 => assert!(matches!(result, Err(JournalError::Damaged { at: 0 })), "{at}: {result:?}"),
            _ => assert_eq!(result.unwrap().1.records, 5, "{at}"),
        }
    }
    let mut bytes = sound;
    bytes[512..2048].fill(0);
    assert!(matches!(open(&Sim::with(NAME, &bytes)), Err(JournalError::Damaged { at: 512 })));
}

#[test]
fn frames_of_another_number_are_not_replayed() {
    let (sound, starts) = written();
    let mut bytes = sound.clone();
    // The last frame once more: right checksum, wrong number.
    bytes.extend_from_slice(&sound[starts[4] as usize..]);
    let (journal, recovered) = open(&Sim::with(NAME, &bytes)).unwrap();
    assert_eq!((records(&journal).len(), recovered.cut_bytes), (5, sound.len() as u64 - starts[4]));
}

#[test]
fn an_empty_file_is_damage() {
    assert!(matches!(open(&Sim::with(NAME, b"")), Err(JournalError::Damaged { at: 0 })));
    assert_eq!(records(&open(&Sim::new(0)).unwrap().0), table(&[]));
}

/// No panic, no buffer beyond the file's size, and a file that was refused is unchanged.
fn survives(bytes: &[u8]) -> Result<(), TestCaseError> {
    let sim = Sim::with(NAME, bytes);
    match open(&sim) {
        Ok((journal, recovered)) => {
            prop_assert_eq!(journal.end + recovered.cut_bytes, bytes.len() as u64);
            let again = open(&sim).unwrap();
            prop_assert_eq!((records(&again.0), again.1.cut_bytes), (records(&journal), 0));
        }
        Err(JournalError::Damaged { at }) => {
            prop_assert!(at <= bytes.len() as u64);
            prop_assert!(sim.bytes(NAME) == bytes);
        }
        Err(JournalError::Format { .. }) => prop_assert!(sim.bytes(NAME) == bytes),
        Err(error) => panic!("{error:?}"),
    }
    prop_assert!(sim.read_max() <= bytes.len());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
        survives(&bytes)?;
    }

    #[test]
    fn random_frames_behind_a_sound_header_are_survived(
        bytes in prop::collection::vec(prop_oneof![Just(0u8), Just(0xff), any::<u8>()], 0..300),
        durable in prop_oneof![Just(FRAMES as u64), any::<u64>(), 0u64..5000],
        first in prop_oneof![Just(u64::MAX), 0u64..3],
    ) {
        let mut file = Header { format: FORMAT, first }.page(durable);
        file.extend_from_slice(&bytes);
        survives(&file)?;
    }

    #[test]
    fn forged_frames_with_right_checksums_are_survived(
        frames in prop::collection::vec(
            prop::collection::vec(prop_oneof![3 => 0u8..3, 1 => any::<u8>()], 0..40), 0..4),
        durable in FRAMES as u64..FRAMES as u64 + 100,
    ) {
        let mut file = Header { format: FORMAT, first: 0 }.page(durable);
        for (sequence, payload) in frames.iter().enumerate() {
            file.extend(Frame::forged(payload).finish(sequence as u64));
        }
        survives(&file)?;
    }

    #[test]
    fn edits_of_a_journal_are_survived(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        more in prop::collection::vec(any::<u8>(), 0..50),
    ) {
        let (mut bytes, _) = written();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(cut.index(bytes.len() + 1).max(FRAMES - 1));
        bytes.extend(more);
        survives(&bytes)?;
    }
}
