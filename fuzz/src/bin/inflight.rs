//! The shared memory of a connection, written by a peer that has been taken over while agent and successor read it.
//!
//! An input is a list of steps: words of the peer's, and questions of those who read. The kernel is the input's, too,
//! and the peer writes on while it is asked.

#![no_main]

use fuzz::{Bound, Numbers};
use inflight::fuzz::{Peer, collect};
use inflight::{Blame, Counter, Inflight, Kernel, Operation, Orphan, Outcome, Probe, Room, SLOTS};
use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;
use std::io;

/// A poisoned request is reported in 32 bytes, of each slot; the peer's memory is no one's heap.
const BOUND: Bound = Bound { times: 4, besides: SLOTS * 64 + (512 << 10) };
/// Steps of one input, and orphans taken in one step: each may look at all slots.
const STEPS_MAX: usize = 48;
const ORPHANS_MAX: usize = 64;
/// Longer requests are copied nowhere: a mebibyte of each slot would take all the time.
const COPIED_MAX: usize = 64 << 10;

struct Hostile<'n, 'i> {
    numbers: &'n RefCell<Numbers<'i>>,
    peer: &'n Peer,
    waiting: Option<u64>,
}

impl Kernel for Hostile<'_, '_> {
    fn probe(&mut self, unique: u64) -> io::Result<Probe> {
        let said = self.numbers.borrow_mut().u8();
        if said & 0xf0 == 0x50 {
            write(self.peer, &mut self.numbers.borrow_mut());
        }
        self.waiting = None;
        match said {
            0xff => Err(io::Error::other("the device is gone")),
            0xfe => Ok(Probe::Ended),
            _ if said & 3 == 3 => Ok(Probe::Gone),
            _ => {
                self.waiting = Some(unique);
                Ok(Probe::Waiting)
            }
        }
    }

    fn fail(&mut self, unique: u64) {
        assert_eq!(self.waiting.take(), Some(unique), "failed without a caller, or twice");
    }
}

struct Create;
impl Operation for Create {
    fn intend(&mut self) -> Vec<u8> {
        b"intent".to_vec()
    }
    fn resolve(&mut self, intent: &[u8]) -> Option<Outcome> {
        assert!(intent.len() <= 96);
        intent.is_empty().then(|| Outcome { errno: 0, body: Vec::new() })
    }
    fn execute(&mut self) -> Outcome {
        Outcome { errno: 17, body: b"outcome".to_vec() }
    }
}

/// A word as the fields of the memory have them, or any.
fn word(numbers: &mut Numbers<'_>) -> u64 {
    match numbers.u8() {
        kind @ 0..=7 => u64::from(numbers.u8()) << 3 | u64::from(kind), // a slot's: unique and state
        8 => u64::from(numbers.u8()),
        9 => u64::from(numbers.u8()) << 32 | u64::from(numbers.u8()),
        10 => 1 << 63 | u64::from(numbers.u8()), // a guilty seat
        11 => u64::from(numbers.u16()) | u64::from(numbers.u16()) << 32,
        _ => numbers.u64(),
    }
}

fn write(peer: &Peer, numbers: &mut Numbers<'_>) {
    let (area, index, field) = (numbers.u8(), numbers.u16(), numbers.u8());
    let (first, more) = (word(numbers), numbers.u8());
    // The same in many slots, or a row of numbers.
    let (count, step) = match more {
        0..=199 => (1, 0),
        200..=229 => (usize::from(more - 198), u64::from(numbers.u8())),
        _ => (SLOTS, u64::from(numbers.u8())),
    };
    for k in 0..count {
        let word = first.wrapping_add(step.wrapping_mul(k as u64));
        peer.write(area, usize::from(index).wrapping_add(k), usize::from(field), word);
    }
}

fuzz_target!(|input: &[u8]| {
    // By its length, so that the steps of an input are the same in either.
    let room = if input.len().is_multiple_of(2) { Room::ReadOnly } else { Room::ReadWrite };
    let fd = Inflight::create(room).expect("a memory file");
    let peer = Peer::map(&fd, room).expect("it was just made");
    let inflight = Inflight::map(&fd).expect("likewise");
    BOUND.hold(input, || run(input, &peer, &inflight));
    // What it holds now is refused or read by the next process.
    let _ = Inflight::map(&fd);
});

fn run(input: &[u8], peer: &Peer, inflight: &Inflight) {
    let numbers = RefCell::new(Numbers::new(input));
    let mut buffer = vec![0; inflight.stage_bytes_max().min(COPIED_MAX)];
    for _ in 0..STEPS_MAX {
        if numbers.borrow().is_empty() {
            break;
        }
        let step = numbers.borrow_mut().u8() % 16;
        match step {
            0..=5 => write(peer, &mut numbers.borrow_mut()),
            6 | 7 => {
                let blame = match numbers.borrow_mut().u8() % 3 {
                    0 => Blame::Executing,
                    1 => Blame::Agent,
                    _ => Blame::Nobody,
                };
                let mut kernel = Hostile { numbers: &numbers, peer, waiting: None };
                if let Ok(collected) = collect(inflight, &mut kernel, blame) {
                    let stages = inflight.stages();
                    assert!(collected.orphans <= SLOTS + stages && collected.unrecorded <= stages);
                    assert!(collected.poisoned.len() + collected.answered <= SLOTS);
                    for poisoned in &collected.poisoned {
                        let _ = (poisoned.operation(), poisoned.subject());
                        assert!(poisoned.deaths >= 5);
                    }
                }
            }
            8 => orphans(inflight, &mut buffer),
            9 => {
                let unique = u64::from(numbers.borrow_mut().u8());
                let _ =
                    (inflight.subject(unique), inflight.is_in_flight(unique), inflight.has_effect(unique));
                inflight.resume(unique);
                inflight.set_effect(unique);
                inflight.mark_interrupted(unique);
                assert!(inflight.interrupted().len() <= SLOTS && inflight.in_flight() <= SLOTS);
                bytes(inflight, unique, &mut numbers.borrow_mut(), &mut buffer);
                inflight.suspend(unique);
            }
            10 => {
                let [unique, refuse] = [(); 2].map(|()| u64::from(numbers.borrow_mut().u8()));
                let claim = match refuse & 2 {
                    0 => inflight.claim(unique),
                    _ => inflight.claim_to_interrupt(unique),
                };
                if let Some(claim) = claim {
                    assert_eq!(claim.unique(), unique);
                    assert!(inflight.claim(unique).is_none_or(|other| other.unique() == unique));
                    match refuse & 1 {
                        0 => inflight.answered(claim),
                        _ => inflight.refused(claim),
                    }
                }
            }
            11 => {
                let unique = u64::from(numbers.borrow_mut().u8());
                if let Ok(outcome) = inflight.once(unique, &mut Create) {
                    assert!(outcome.body.len() <= 144);
                }
            }
            12 => {
                for message in [inflight.init(), inflight.init_reply()].into_iter().flatten() {
                    assert!((1..=512).contains(&message.len()));
                }
                inflight.beat();
                inflight.count(Counter::Full);
                let _ = (inflight.heartbeat(), inflight.counter(Counter::Full));
            }
            13 => backings(inflight, &mut numbers.borrow_mut()),
            14 => request(inflight, peer, &mut numbers.borrow_mut()),
            _ => inflight.vacate(),
        }
    }
}

/// As a successor takes them.
fn orphans(inflight: &Inflight, buffer: &mut [u8]) {
    for _ in 0..ORPHANS_MAX {
        match inflight.next_orphan(buffer) {
            Some(Orphan::Request(slot, header)) => {
                assert!((40..=buffer.len()).contains(&(header.len as usize)));
                inflight.park(slot, header.unique);
            }
            Some(Orphan::Torn { .. }) => {}
            Some(Orphan::Later) | None => return,
        }
    }
}

/// As an agent reads a request, and has its bytes written.
fn bytes(inflight: &Inflight, unique: u64, numbers: &mut Numbers<'_>, buffer: &mut [u8]) {
    let mut head = [0; 80];
    let Some(header) = inflight.head(unique, &mut head) else { return };
    assert!(header.unique == unique && (40..=inflight.stage_bytes_max()).contains(&(header.len as usize)));
    let len = usize::from(numbers.u16()).min(buffer.len());
    let again = inflight.head(unique, &mut buffer[..len]);
    assert!(again.is_none_or(|again| again.unique == unique));
}

fn backings(inflight: &Inflight, numbers: &mut Numbers<'_>) {
    let all = inflight.backings();
    assert!(all.len() <= inflight::BACKINGS);
    for (index, backing) in all.iter().take(16) {
        assert!(backing.nodeid != 0);
        inflight.ref_backing(*index);
        inflight.unref_backing(*index);
        if numbers.u8() & 1 == 1 {
            inflight.remove_backing(*index);
        }
    }
    let nodeid = word(numbers);
    if let Some(index) = inflight.add_backing(nodeid, 1, 2) {
        inflight.ref_backing(index);
        let _ = inflight.backing(index);
    }
    inflight.give_estale(nodeid);
}

/// A thread that reads the device takes a request, which the peer has put there in the kernel's place.
fn request(inflight: &Inflight, peer: &Peer, numbers: &mut Numbers<'_>) {
    let Some(stage) = inflight.acquire_stage() else { return };
    let (len, opcode, unique) = (numbers.u16(), numbers.u8(), numbers.u8());
    let len = match inflight.room() {
        Room::ReadOnly => u32::from(len % 8193),
        Room::ReadWrite => u32::from(len) * 17,
    };
    peer.write(6, stage, 0, u64::from(len) | u64::from(opcode) << 32);
    peer.write(6, stage, 1, u64::from(unique));
    let header = inflight.stage_header(stage);
    if (40..=inflight.stage_bytes_max()).contains(&(header.len as usize)) {
        match numbers.u8() & 3 {
            0 => return, // it died here
            1 => drop(inflight.put(stage, &header)),
            _ => {
                if let Some(slot) = inflight.put(stage, &header) {
                    inflight.park(slot, header.unique);
                }
                inflight.commit_stage(stage, header.unique);
            }
        }
    }
    if inflight.stage_is_free(stage) || numbers.u8() & 1 == 1 {
        inflight.release_stage(stage);
    }
}
