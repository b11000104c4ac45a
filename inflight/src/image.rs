//! The shared memory of a connection as this version lays it out: `tests/golden/inflight-<INFLIGHT>.txt` holds its sizes and
//! offsets, and every word of one that was used. A build of the next version takes such a memory over.

use super::*;
use crate::golden;
use std::fmt::Write;
use version::STEPS;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");

fn request(unique: u64, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    bytes[0..4].copy_from_slice(&(len as u32).to_ne_bytes());
    bytes[4..8].copy_from_slice(&fuse_abi::opcode::READ.to_ne_bytes());
    bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
    bytes[16..24].copy_from_slice(&77u64.to_ne_bytes());
    bytes[32..36].copy_from_slice(&4321u32.to_ne_bytes());
    bytes
}

const COUNTERS: [Counter; 7] = [
    Counter::Full,
    Counter::Replayed,
    Counter::Interrupts,
    Counter::Interrupted,
    Counter::Requeued,
    Counter::Dropped,
    Counter::InjectedFaults,
];

struct Create;
impl Operation for Create {
    fn intend(&mut self) -> Vec<u8> {
        b"intent".to_vec()
    }
    fn resolve(&mut self, _: &[u8]) -> Option<Outcome> {
        panic!("no worker died")
    }
    fn execute(&mut self) -> Outcome {
        Outcome { errno: 17, body: b"outcome".to_vec() }
    }
}

/// Everything that a connection can leave behind, once.
fn use_all(inflight: &Inflight) {
    inflight.set_init(&[7; 104]).unwrap();
    inflight.set_init_reply(&[9; 80]).unwrap();
    inflight.beat();
    for (times, counter) in COUNTERS.into_iter().enumerate() {
        (0..=times).for_each(|_| inflight.count(counter));
    }
    for (unique, len) in [(2, 56), (4, INLINE_BYTES + 1), (6, 56)] {
        let stage = inflight.acquire_stage().unwrap();
        let bytes = request(unique, len);
        inflight.memory.store(STAGES_AT + stage * STAGE_BYTES, &bytes);
        let slot = inflight.put(stage, &inflight.stage_header(stage)).unwrap();
        inflight.commit_stage(stage, unique);
        if unique != 2 {
            inflight.park(slot, unique);
        }
        inflight.release_stage(stage);
    }
    inflight.set_effect(2);
    inflight.mark_interrupted(4);
    inflight.once(6, &mut Create).unwrap();
    let index = inflight.add_backing(1 << 40 | 77, 5, 1234).unwrap();
    inflight.ref_backing(index);
    inflight.give_estale(2 << 40 | 77);
}

fn layout() -> String {
    let mut text = String::new();
    for (name, value) in [
        ("bytes", BYTES),
        ("init", INIT_BYTES),
        ("slots", SLOTS),
        ("inline", INLINE_BYTES),
        ("note", table::NOTE_BYTES),
        ("stages", STAGES),
        ("stage", STAGE_BYTES),
        ("backings", BACKINGS),
        ("backing", backing::ENTRY_BYTES),
        ("given sets", backing::GIVEN_SETS),
        ("operation", operations::RECORD_BYTES),
        ("at format", FORMAT_AT),
        ("at heartbeat", HEARTBEAT_AT),
        ("at high slot", HIGH_SLOT_AT),
        ("at high backing", HIGH_BACKING_AT),
        ("at counters", COUNTERS_AT),
        ("at init", INIT_AT),
        ("at reply", REPLY_AT),
        ("at words", WORDS_AT),
        ("at notes", NOTES_AT),
        ("at bodies", BODIES_AT),
        ("at stage words", STAGE_WORDS_AT),
        ("at stages", STAGES_AT),
        ("at backings", BACKINGS_AT),
        ("at given", GIVEN_AT),
        ("at operations", OPERATIONS_AT),
    ] {
        writeln!(text, "{name} = {value}").unwrap();
    }
    text
}

/// Offset and value of each word that is not 0.
fn words(inflight: &Inflight) -> String {
    let mut text = String::new();
    for at in (0..BYTES).step_by(8) {
        let word = inflight.memory.u64(at).load(Relaxed);
        if word != 0 {
            writeln!(text, "{at:08x} {word:016x}").unwrap();
        }
    }
    text
}

fn load(text: &str) -> OwnedFd {
    let fd = memory::create(BYTES).unwrap();
    let memory = Memory::map(&fd, BYTES).unwrap();
    for (at, word) in text.lines().filter(|line| !line.contains('=')).filter_map(|line| line.split_once(' '))
    {
        let at = usize::from_str_radix(at, 16).unwrap();
        memory.u64(at).store(u64::from_str_radix(word, 16).unwrap(), Relaxed);
    }
    fd
}

#[test]
fn the_shared_memory_is_laid_out_as_in_the_golden_file_and_is_taken_over() {
    let name = format!("inflight-{}.txt", INFLIGHT - STEPS);
    let text = match STEPS {
        0 => {
            let inflight = Inflight::map(Inflight::create(Room::ReadOnly).unwrap()).unwrap();
            use_all(&inflight);
            golden::same(GOLDEN, &name, &(layout() + &words(&inflight)))
        }
        _ => golden::read(GOLDEN, &name),
    };

    let inflight = Inflight::map(load(&text)).unwrap();
    assert_eq!((inflight.init(), inflight.init_reply()), (Some(vec![7; 104]), Some(vec![9; 80])));
    assert_eq!(inflight.heartbeat(), 1);
    assert_eq!(COUNTERS.map(|counter| inflight.counter(counter)), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(inflight.in_flight(), 3);
    assert!(inflight.has_effect(2) && !inflight.has_effect(4));
    assert_eq!(inflight.interrupted(), [Interrupted { unique: 4, pid: 4321 }]);
    let backing = Backing { nodeid: 1 << 40 | 77, id: 5, refs: 1, file: 1234 };
    assert_eq!(inflight.backings(), [(0, backing)]);
    assert!(!inflight.give_estale(2 << 40 | 77), "it has been answered ESTALE");
    let mut buffer = vec![0; STAGE_BYTES];
    for (slot, unique, len) in [(0, 2, 56), (1, 4, INLINE_BYTES + 1), (2, 6, 56)] {
        let header = inflight.body(Slot(slot), &mut buffer).unwrap();
        assert_eq!((header.unique, &buffer[..len]), (unique, &request(unique, len)[..]));
    }
    // The operation has happened, and does not happen again once its request is executed again.
    inflight.word(2).store(table::word(6, table::WAITING), Relaxed);
    let outcome = inflight.once(6, &mut Create).unwrap();
    assert_eq!((outcome.errno, outcome.body.as_slice()), (17, &b"outcome"[..]));
}
