//! The models: what a few threads do to the shared memory, and what none of them may find.

use super::atomic::AtomicU64;
use super::check::{Model, saw};
use crate::collect::Blame;
use crate::memory::Memory;
use crate::operations::{Operation, OperationError, Outcome, Recorded};
use crate::table::{ANSWERING, Slot, state_of};
use crate::{Backing, Inflight, Interrupted, Kernel, Orphan, Probe, Room, add_present, present};
use fuse_abi::{InHeader, opcode};
use loom::thread::spawn;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst};

/// A model: what is explored, and what happens in some of its executions.
macro_rules! models {
    ($($name:literal, $body:ident, $preemptions:expr, [$($outcome:literal),*];)*) => {
        pub(super) static MODELS: &[Model] = &[
            $(Model { name: $name, body: $body, preemptions: $preemptions, outcomes: &[$($outcome),*] }),*
        ];
    };
}

models! {
    "answer or EINTR", answer_or_eintr, Some(3), ["answered", "interrupted", "not there"];
    "refused answer", refused_answer, Some(4), ["refused first", "answered first"];
    "late claim", late_claim, Some(3), ["late", "in time"];
    "next in a slot", next_in_a_slot, None, ["answered", "not there"];
    "two readers", two_readers, Some(2), ["one seen", "both seen"];
    "mark", mark, None, ["marked", "too early"];
    "mark and reuse", mark_and_reuse, Some(4), ["the first", "the second", "none"];
    "head and reuse", head_and_reuse, Some(3), ["read", "gone"];
    "effect and reuse", effect_and_reuse, Some(4), ["noted", "late"];
    "staging buffers", staging_buffers, Some(4), ["the same", "another"];
    "pinned buffer", pinned_buffer, None, ["pinned", "free"];
    "operation's record", operation_record, None, ["nothing", "intended", "concluded"];
    "operation or EINTR", operation_or_eintr, None, ["done", "interrupted"];
    "refused outcome", refused_outcome, None, ["refused", "claimed"];
    "orphans", orphans, Some(2), ["shared", "all one's"];
    "suspects", suspects, Some(2), ["later", "in turn"];
    "backing ids", backing_ids, Some(3), ["none", "seen"];
    "ESTALE", estale, None, ["once", "twice"];
    "seats", seats, None, ["the same", "another"];
    "INIT", init, None, ["not there", "there"];
    "presence bitmap", presence_bitmap, None, ["none", "one", "both"];
}

const LEN: usize = InHeader::BYTES + 8;

fn shared() -> Arc<Inflight> {
    Arc::new(Inflight { memory: Memory::new(), room: Room::ReadOnly, held: None })
}

fn pid(unique: u64) -> u32 {
    unique as u32 * 10
}

fn request(unique: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![unique as u8; len];
    bytes[0..4].copy_from_slice(&(len as u32).to_ne_bytes());
    bytes[4..8].copy_from_slice(&opcode::READ.to_ne_bytes());
    bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
    bytes[16..24].copy_from_slice(&(unique * 100).to_ne_bytes());
    bytes[32..36].copy_from_slice(&pid(unique).to_ne_bytes());
    bytes
}

/// As read(2) on the device does.
fn arrive(inflight: &Inflight, stage: usize, unique: u64, len: usize) {
    inflight.memory.store(inflight.room.stage_at(stage), &request(unique, len));
}

/// A reader's turn.
fn take(inflight: &Inflight, unique: u64, len: usize) -> Slot {
    let stage = inflight.acquire_stage().expect("there are more buffers than threads");
    arrive(inflight, stage, unique, len);
    let slot =
        inflight.put(stage, &inflight.stage_header(stage)).expect("there are more slots than requests");
    inflight.commit_stage(stage, unique);
    inflight.release_stage(stage);
    slot
}

/// What is recorded of a request that nobody else frees is what arrived.
fn intact(inflight: &Inflight, unique: u64, len: usize) {
    let (slot, _) = inflight.find(unique).expect("it is there");
    let mut bytes = vec![0; len];
    assert!(inflight.body(slot, &mut bytes).is_some() && bytes == request(unique, len), "its bytes");
    assert_eq!(inflight.note_nodeid(slot.0), unique * 100, "its note");
    assert_eq!(inflight.note_opcode(slot.0), opcode::READ, "its note");
}

/// One records a request, one answers it, one has only EINTR to tell: one of the two at most does, and finds what was
/// recorded.
fn answer_or_eintr() {
    let (inflight, winners) = (shared(), Arc::new(AtomicUsize::new(0)));
    let claimers = [false, true].map(|interrupts| {
        let (inflight, winners) = (inflight.clone(), winners.clone());
        spawn(move || {
            let claim = if interrupts { inflight.claim_to_interrupt(2) } else { inflight.claim(2) };
            let Some(claim) = claim else { return saw("not there") };
            assert_eq!(winners.fetch_add(1, SeqCst), 0, "claimed twice");
            intact(&inflight, 2, LEN);
            inflight.answered(claim);
            saw(if interrupts { "interrupted" } else { "answered" });
        })
    });
    take(&inflight, 2, LEN);
    claimers.into_iter().for_each(|claimer| claimer.join().unwrap());
    assert_eq!(inflight.in_flight(), 1 - winners.load(SeqCst));
}

/// The kernel refuses one thread's answer while another has one: the request stays until one was accepted.
fn refused_answer() {
    let inflight = shared();
    take(&inflight, 2, LEN);
    let refused = spawn({
        let inflight = inflight.clone();
        move || {
            let claim = inflight.claim(2);
            let first = claim.is_some();
            if let Some(claim) = claim {
                intact(&inflight, 2, LEN);
                inflight.refused(claim);
            }
            first
        }
    });
    let answered = inflight.claim(2).map(|claim| inflight.answered(claim)).is_some();
    let refused = refused.join().unwrap();
    match answered {
        true => {
            assert_eq!(inflight.in_flight(), 0);
            saw(if refused { "refused first" } else { "answered first" });
        }
        false => {
            assert!(refused, "neither had it");
            assert!(inflight.claim(2).is_some(), "a refused answer took the request along");
        }
    }
}

/// While one answers a request and records the next in its slot, another comes late for the first: it never gets the
/// second.
fn late_claim() {
    let inflight = shared();
    take(&inflight, 2, LEN);
    let comes_late = spawn({
        let inflight = inflight.clone();
        move || match inflight.claim(2) {
            Some(claim) => {
                let (_, word) = inflight.find(2).expect("claimed requests stay");
                assert_eq!(state_of(word), ANSWERING);
                inflight.answered(claim);
                saw("in time");
                true
            }
            None => {
                saw("late");
                false
            }
        }
    });
    let answered = inflight.claim(2).map(|claim| inflight.answered(claim)).is_some();
    take(&inflight, 4, LEN);
    assert_ne!(comes_late.join().unwrap(), answered, "answered once");
    assert!(!inflight.is_in_flight(2));
    intact(&inflight, 4, LEN);
    assert!(inflight.claim(4).is_some(), "the next request is gone");
}

/// While one answers a request and records the next in its slot, another finds the second: all of it.
fn next_in_a_slot() {
    let inflight = shared();
    take(&inflight, 2, LEN);
    let answers_next = spawn({
        let inflight = inflight.clone();
        move || {
            let Some(claim) = inflight.claim(4) else { return saw("not there") };
            intact(&inflight, 4, LEN);
            inflight.answered(claim);
            saw("answered");
        }
    });
    inflight.answered(inflight.claim(2).expect("nobody else claims"));
    take(&inflight, 4, LEN);
    answers_next.join().unwrap();
}

/// Two readers at once: each has a slot and a buffer of its own, and whoever finds a request finds all of it.
fn two_readers() {
    let inflight = shared();
    let readers = [2, 4].map(|unique| {
        let inflight = inflight.clone();
        spawn(move || take(&inflight, unique, LEN))
    });
    let found = [2, 4]
        .iter()
        .filter(|unique| inflight.is_in_flight(**unique))
        .map(|unique| intact(&inflight, *unique, LEN));
    match found.count() {
        1 => saw("one seen"),
        2 => saw("both seen"),
        _ => {}
    }
    let [first, second] = readers.map(|reader| reader.join().unwrap());
    assert_ne!(first, second);
    // A collector comes.
    assert_eq!(inflight.in_flight(), 2);
    intact(&inflight, 2, LEN);
    intact(&inflight, 4, LEN);
    assert_eq!(inflight.acquire_stage(), Some(0), "a buffer was lost");
}

/// A FUSE_INTERRUPT comes while its request is recorded and set aside: where the request was found, the mark stays.
fn mark() {
    let inflight = shared();
    let marker = spawn({
        let inflight = inflight.clone();
        move || inflight.mark_interrupted(2)
    });
    let slot = take(&inflight, 2, LEN);
    inflight.park(slot, 2);
    let marked = marker.join().unwrap();
    let interrupted = inflight.interrupted();
    match marked {
        true => {
            assert_eq!(interrupted, [Interrupted { unique: 2, pid: pid(2) }]);
            saw("marked");
        }
        false => saw("too early"), // and queued again
    }
}

/// Who looks for marks while a slot changes hands finds ids and callers that belong together.
fn mark_and_reuse() {
    let inflight = shared();
    take(&inflight, 2, LEN);
    assert!(inflight.mark_interrupted(2));
    let worker = spawn({
        let inflight = inflight.clone();
        move || {
            inflight.answered(inflight.claim(2).expect("nobody else claims"));
            take(&inflight, 4, LEN);
            assert!(inflight.mark_interrupted(4));
        }
    });
    match inflight.interrupted()[..] {
        [Interrupted { unique, pid: caller }] => {
            assert_eq!(caller, pid(unique), "the caller of {unique}");
            saw(if unique == 2 { "the first" } else { "the second" });
        }
        _ => saw("none"),
    }
    worker.join().unwrap();
}

/// Who reads a request while its slot changes hands reads that request or none.
fn head_and_reuse() {
    let inflight = shared();
    take(&inflight, 2, LEN);
    let worker = spawn({
        let inflight = inflight.clone();
        move || {
            inflight.answered(inflight.claim(2).expect("nobody else claims"));
            take(&inflight, 4, LEN);
        }
    });
    let mut bytes = [0; LEN];
    match inflight.head(2, &mut bytes) {
        Some(header) => {
            assert_eq!(header.pid, pid(2), "the caller");
            assert!(bytes[..] == request(2, LEN), "its bytes");
            saw("read");
        }
        None => saw("gone"),
    }
    worker.join().unwrap();
}

/// One notes an effect while another answers the request for it and records the next one, whose effect is its own.
fn effect_and_reuse() {
    let inflight = shared();
    take(&inflight, 2, LEN);
    let executes = spawn({
        let inflight = inflight.clone();
        move || saw(if inflight.set_effect(2) { "noted" } else { "late" })
    });
    inflight.answered(inflight.claim(2).expect("nobody else claims"));
    take(&inflight, 4, LEN);
    assert!(!inflight.has_effect(4), "another one's effect");
    assert!(inflight.set_effect(4));
    executes.join().unwrap();
    assert!(inflight.has_effect(4), "its effect is forgotten");
}

/// Two threads want a buffer at once: what one writes into its own stays until it gives it back.
fn staging_buffers() {
    let inflight = shared();
    let threads = [2, 4].map(|unique| {
        let inflight = inflight.clone();
        spawn(move || {
            let stage = inflight.acquire_stage().expect("there are more buffers than threads");
            arrive(&inflight, stage, unique, InHeader::BYTES);
            assert_eq!(inflight.stage_header(stage).unique, unique, "a buffer has two owners");
            inflight.commit_stage(stage, unique);
            assert_eq!(inflight.stage_left(stage), Some(unique), "what a collector finds");
            inflight.release_stage(stage);
            stage
        })
    });
    let [first, second] = threads.map(|thread| thread.join().unwrap());
    saw(if first == second { "the same" } else { "another" });
}

/// A request too long for its slot keeps its buffer until it is answered.
fn pinned_buffer() {
    const LONG: usize = crate::table::INLINE_BYTES + 1;
    let inflight = shared();
    take(&inflight, 2, LONG);
    let answers = spawn({
        let inflight = inflight.clone();
        move || {
            let claim = inflight.claim(2).expect("nobody else claims");
            intact(&inflight, 2, LONG);
            inflight.answered(claim);
        }
    });
    let stage = inflight.acquire_stage().expect("there are more buffers than requests");
    arrive(&inflight, stage, 4, LEN);
    saw(if stage == 0 { "free" } else { "pinned" });
    answers.join().unwrap();
    assert_eq!(inflight.stage_header(stage).unique, 4);
}

struct Create(&'static [u8], &'static [u8]);

impl Operation for Create {
    fn intend(&mut self) -> Vec<u8> {
        self.0.to_vec()
    }
    fn resolve(&mut self, _: &[u8]) -> Option<Outcome> {
        panic!("no worker died")
    }
    fn execute(&mut self) -> Outcome {
        Outcome { errno: self.1.len() as i32, body: self.1.to_vec() }
    }
}

/// An operation is recorded in a slot that has had one: whoever reads the record finds no byte of the earlier one, and
/// none that is yet to come.
fn operation_record() {
    let inflight = shared();
    let Slot(slot) = take(&inflight, 2, LEN);
    inflight.once(2, &mut Create(b"an earlier intent", b"an earlier outcome")).unwrap();
    inflight.answered(inflight.claim(2).expect("nobody else claims"));
    take(&inflight, 4, LEN);
    let executes = spawn({
        let inflight = inflight.clone();
        move || inflight.once(4, &mut Create(b"intent", b"outcome")).map(|_| ()).unwrap()
    });
    match inflight.recorded(slot, 4) {
        Recorded::Nothing => saw("nothing"),
        Recorded::Intended(intent) => {
            assert_eq!(intent, b"intent");
            saw("intended");
        }
        Recorded::Concluded(outcome) => {
            assert_eq!(outcome, Outcome { errno: 7, body: b"outcome".to_vec() });
            saw("concluded");
        }
    }
    executes.join().unwrap();
}

/// An operation's caller is being killed: it gets EINTR and nothing is done, or it is done and gets no EINTR.
fn operation_or_eintr() {
    let inflight = shared();
    take(&inflight, 2, LEN);
    let executes = spawn({
        let inflight = inflight.clone();
        move || inflight.once(2, &mut Create(b"intent", b"outcome"))
    });
    let interrupted = inflight.claim_to_interrupt(2).map(|claim| inflight.answered(claim)).is_some();
    let done = executes.join().unwrap();
    match done {
        Ok(_) => {
            assert!(!interrupted, "done, and answered EINTR");
            assert!(inflight.has_begun(0), "a collector would give it back without saying that it had begun");
            assert!(inflight.claim(2).is_some(), "its caller waits for ever");
            saw("done");
        }
        Err(error) => {
            assert_eq!(error, OperationError::Answered);
            assert!(interrupted, "not done, and nobody has answered");
            saw("interrupted");
        }
    }
}

/// The kernel refuses the outcome of an operation: its caller gets another answer, and no EINTR, for it is done.
fn refused_outcome() {
    let inflight = shared();
    take(&inflight, 2, LEN);
    inflight.once(2, &mut Create(b"intent", b"outcome")).unwrap();
    let interrupts = spawn({
        let inflight = inflight.clone();
        move || {
            saw(if state_of(inflight.word(0).load(Relaxed)) == ANSWERING { "claimed" } else { "refused" });
            assert!(inflight.claim_to_interrupt(2).is_none(), "done, and answered EINTR");
        }
    });
    inflight.refused(inflight.claim(2).expect("nobody else claims"));
    inflight.answered(inflight.claim(2).expect("nobody else claims"));
    interrupts.join().unwrap();
}

struct Waits;

impl Kernel for Waits {
    fn probe(&mut self, _: u64) -> io::Result<Probe> {
        Ok(Probe::Waiting)
    }
    fn fail(&mut self, unique: u64) {
        panic!("{unique} is poison to nobody")
    }
}

/// Two threads of a successor take up what the dead worker left: each request once, whole.
fn orphans() {
    let inflight = shared();
    take(&inflight, 2, LEN);
    take(&inflight, 4, LEN);
    inflight.collect_with(&mut Waits, Blame::Nobody).unwrap();
    let threads = [(); 2].map(|()| {
        let inflight = inflight.clone();
        spawn(move || {
            let (mut buffer, mut taken) = (vec![0; LEN], Vec::new());
            while let Some(orphan) = inflight.next_orphan(&mut buffer) {
                let Orphan::Request(_, header) = orphan else { panic!("{orphan:?}") };
                assert_eq!(buffer, request(header.unique, LEN));
                taken.push(header.unique);
            }
            taken
        })
    });
    let taken = threads.map(|thread| thread.join().unwrap());
    saw(if taken.iter().any(Vec::is_empty) { "all one's" } else { "shared" });
    let mut all = taken.concat();
    all.sort_unstable();
    assert_eq!(all, [2, 4], "taken up");
}

/// Of requests in whose execution two workers died, the successor's threads execute one at a time.
fn suspects() {
    let inflight = shared();
    take(&inflight, 2, LEN);
    take(&inflight, 4, LEN);
    for _ in 0..2 {
        // Both were being executed.
        [2, 4].into_iter().for_each(|unique| inflight.resume(unique));
        inflight.collect_with(&mut Waits, Blame::Executing).unwrap();
    }
    let executing = Arc::new(AtomicUsize::new(0));
    let turn = |inflight: Arc<Inflight>, executing: Arc<AtomicUsize>| {
        move || {
            let mut buffer = vec![0; LEN];
            match inflight.next_orphan(&mut buffer) {
                Some(Orphan::Request(_, header)) => {
                    assert_eq!(executing.fetch_add(1, SeqCst), 0, "two suspects at once");
                    let claim = inflight.claim(header.unique).expect("nobody else claims");
                    executing.fetch_sub(1, SeqCst);
                    inflight.answered(claim);
                    1
                }
                Some(Orphan::Later) => {
                    saw("later");
                    0
                }
                other => panic!("{other:?}"),
            }
        }
    };
    let threads = [(); 2].map(|()| spawn(turn(inflight.clone(), executing.clone())));
    let done: usize = threads.map(|thread| thread.join().unwrap()).iter().sum();
    if done == 2 {
        saw("in turn");
    }
    assert!(done > 0, "both left it to the other");
    (done..2).for_each(|_| assert_eq!(turn(inflight.clone(), executing.clone())(), 1, "the last one"));
    assert_eq!(inflight.in_flight(), 0);
}

/// Whoever finds a backing id finds what belongs to it, also where another one was before; opens and releases at once are
/// counted.
fn backing_ids() {
    let inflight = shared();
    let index = inflight.add_backing(6, 4, 8).unwrap();
    inflight.remove_backing(index);
    let adds = spawn({
        let inflight = inflight.clone();
        move || {
            assert_eq!(inflight.add_backing(7, 5, 9), Some(index));
            let open_and_release = move |inflight: &Inflight| {
                inflight.ref_backing(index);
                inflight.unref_backing(index)
            };
            let other = spawn({
                let inflight = inflight.clone();
                move || open_and_release(&inflight)
            });
            let left = [open_and_release(&inflight), other.join().unwrap()];
            assert!(left.contains(&0), "neither was the last: {left:?}");
            assert_eq!(inflight.backing(index).map(|backing| backing.refs), Some(0), "opens that are left");
        }
    });
    match inflight.backings()[..] {
        [] => saw("none"),
        [(0, Backing { nodeid: 7, id: 5, refs: 0..=2, file: 9 })] => saw("seen"),
        ref other => panic!("{other:?}"),
    }
    adds.join().unwrap();
}

/// Two opens of a superseded file at once. Each is in its first try, so both may be answered ESTALE, but one must be, and
/// none that comes after them.
fn estale() {
    let inflight = shared();
    let opens = [(); 2].map(|()| {
        let inflight = inflight.clone();
        spawn(move || inflight.give_estale(7))
    });
    match opens.map(|open| open.join().unwrap()) {
        [true, true] => saw("twice"),
        [false, false] => panic!("nobody is sent to look the name up again"),
        _ => saw("once"),
    }
    assert!(!inflight.give_estale(7), "a second time in one open");
}

/// Two threads of the agent run for a request each: each in a seat of its own, and found there by the next agent.
fn seats() {
    let inflight = shared();
    let leaves = spawn({
        let inflight = inflight.clone();
        move || {
            let seat = inflight.sit(2).expect("there are more seats than threads");
            assert_eq!(inflight.seat(seat).load(Relaxed), 2, "two in one seat");
            inflight.seat(seat).store(0, Release); // as `Seated` does
            seat
        }
    });
    let stays = spawn({
        let inflight = inflight.clone();
        move || inflight.sit(4).expect("there are more seats than threads")
    });
    saw(if leaves.join().unwrap() == stays.join().unwrap() { "the same" } else { "another" });
    assert_eq!(inflight.take_seats(), (vec![4], false));
}

/// INIT is recorded while another process asks for it.
fn init() {
    let inflight = shared();
    let records = spawn({
        let inflight = inflight.clone();
        move || inflight.set_init(b"the kernel's INIT").unwrap()
    });
    match inflight.init() {
        None => saw("not there"),
        Some(message) => {
            assert_eq!(message, b"the kernel's INIT");
            saw("there");
        }
    }
    records.join().unwrap();
}

/// Two threads of the agent write a block each and set its bit, in one word; a worker reads what is present.
fn presence_bitmap() {
    let (word, blocks) = (AtomicU64::modelled(), [(); 2].map(|()| AtomicU64::modelled()));
    let cache = Arc::new((word, blocks));
    let agents = [0, 1].map(|block| {
        let cache = cache.clone();
        spawn(move || {
            cache.1[block].store(7, Relaxed); // the bytes
            add_present(&cache.0, 1 << block);
        })
    });
    let bits = present(&cache.0);
    for block in [0, 1] {
        assert!(bits >> block & 1 == 0 || cache.1[block].load(Relaxed) == 7, "a bit before its bytes");
    }
    saw(["none", "one", "one", "both"][bits as usize]);
    agents.into_iter().for_each(|agent| agent.join().unwrap());
    assert_eq!(present(&cache.0), 3, "a bit is lost");
}
