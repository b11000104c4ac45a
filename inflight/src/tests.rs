//! The table against a model of the kernel, with workers that die at any access to the shared memory.

mod agents;
mod bodies;

use super::collect::LIMIT_DEATHS;
use super::memory::crash::within;
use super::operations::INTENT_BYTES;
use super::*;
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::fd::AsFd;

/// What the kernel knows: the requests that it waits for.
#[derive(Default)]
struct Model {
    waiting: BTreeMap<u64, Vec<u8>>,
    failed: BTreeSet<u64>,
    next: u64,
    nodeid: u64,
}

impl Kernel for Model {
    fn probe(&mut self, unique: u64) -> io::Result<Probe> {
        Ok(if self.waiting.contains_key(&unique) { Probe::Waiting } else { Probe::Gone })
    }
    fn fail(&mut self, unique: u64) {
        assert!(self.waiting.remove(&unique).is_some(), "failed a request without a caller");
        self.failed.insert(unique);
    }
}

impl Model {
    fn request(&mut self, len: usize) -> Vec<u8> {
        self.next += 2;
        let mut bytes: Vec<u8> = (0..len).map(|i| (i as u64 * 7 + self.next) as u8).collect();
        bytes[0..4].copy_from_slice(&(len as u32).to_ne_bytes());
        bytes[4..8].copy_from_slice(&fuse_abi::opcode::READ.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.next.to_ne_bytes());
        bytes[16..24].copy_from_slice(&if self.nodeid == 0 { 77 } else { self.nodeid }.to_ne_bytes());
        bytes[32..36].copy_from_slice(&4321u32.to_ne_bytes());
        self.waiting.insert(self.next, bytes.clone());
        bytes
    }
}

fn inflight() -> Inflight {
    with_room(Room::ReadOnly)
}

fn with_room(room: Room) -> Inflight {
    Inflight::map(Inflight::create(room).unwrap()).unwrap()
}

/// As read(2) on the device does.
fn arrive(inflight: &Inflight, stage: usize, bytes: &[u8]) {
    assert!(bytes.len() <= inflight.stage_bytes_max());
    // SAFETY: the buffer is no shorter.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), inflight.stage_pointer(stage), bytes.len()) }
}

/// One reader thread's turn.
fn take(inflight: &Inflight, model: &mut Model, len: usize) -> Option<u64> {
    let stage = inflight.acquire_stage()?;
    let bytes = model.request(len);
    arrive(inflight, stage, &bytes);
    let header = inflight.stage_header(stage);
    let slot = inflight.put(stage, &header).unwrap();
    inflight.commit_stage(stage, header.unique);
    inflight.park(slot, header.unique);
    inflight.release_stage(stage);
    Some(header.unique)
}

fn deaths_of(inflight: &Inflight, unique: u64) -> u32 {
    inflight.find(unique).map_or(0, |(Slot(slot), _)| inflight.deaths_at(slot))
}

fn reply(inflight: &Inflight, model: &mut Model, unique: u64) {
    if let Some(claim) = inflight.claim(unique) {
        assert!(model.waiting.remove(&claim.unique()).is_some(), "answered twice");
        inflight.answered(claim);
    }
}

/// Everything that the kernel waits for comes out once, unchanged, and can be answered.
fn successor_finishes(inflight: &Inflight, model: &mut Model) {
    let mut buffer = vec![0; inflight.stage_bytes_max()];
    let mut seen = BTreeSet::new();
    while let Some(orphan) = inflight.next_orphan(&mut buffer) {
        let Orphan::Request(_, header) = orphan else { panic!("torn: {orphan:?}") };
        assert!(seen.insert(header.unique), "replayed twice");
        assert_eq!(&buffer[..header.len as usize], &model.waiting[&header.unique][..]);
    }
    assert_eq!(seen, model.waiting.keys().copied().collect(), "the kernel waits for what no worker replays");
    for unique in seen {
        reply(inflight, model, unique);
    }
    assert!(model.waiting.is_empty());
    assert_eq!(inflight.in_flight(), 0);
    let stages: Vec<_> = std::iter::from_fn(|| inflight.acquire_stage()).collect();
    assert_eq!(stages.len(), inflight.stages(), "a staging buffer was lost");
    stages.into_iter().for_each(|stage| inflight.release_stage(stage));
}

#[derive(Clone, Debug)]
enum Step {
    Take { len: usize },
    Reply { nth: usize },
    Refuse { nth: usize },
    Interrupt { nth: usize },
}

fn step(room: Room) -> impl Strategy<Value = Step> {
    let most = room.stage_bytes();
    prop_oneof![
        4 => prop_oneof![Just(56usize), Just(INLINE_BYTES), Just(INLINE_BYTES + 1), Just(4000), Just(most)]
            .prop_map(|len| Step::Take { len }),
        3 => any::<usize>().prop_map(|nth| Step::Reply { nth }),
        1 => any::<usize>().prop_map(|nth| Step::Refuse { nth }),
        1 => any::<usize>().prop_map(|nth| Step::Interrupt { nth }),
    ]
}

fn run(inflight: &Inflight, model: &mut Model, step: &Step) {
    let nth = |model: &Model, n: usize| model.waiting.keys().copied().nth(n % model.waiting.len().max(1));
    match step {
        Step::Take { len } => {
            take(inflight, model, *len);
        }
        Step::Reply { nth: n } => {
            if let Some(unique) = nth(model, *n) {
                reply(inflight, model, unique);
            }
        }
        Step::Refuse { nth: n } => {
            if let Some(claim) = nth(model, *n).and_then(|unique| inflight.claim(unique)) {
                inflight.refused(claim);
            }
        }
        Step::Interrupt { nth: n } => {
            if let Some(unique) = nth(model, *n) {
                assert!(inflight.mark_interrupted(unique));
                assert!(inflight.interrupted().contains(&Interrupted { unique, pid: 4321 }));
            }
        }
    }
}

/// Each step of a worker's, and after how many accesses it dies in it, if it does.
type Steps = Vec<(Step, Option<u32>)>;

fn steps(room: Room, most: usize) -> impl Strategy<Value = Steps> {
    proptest::collection::vec((step(room), proptest::option::weighted(0.3, 0u32..120)), 1..most)
}

fn nothing_is_lost(room: Room, steps: &Steps, collector_dies: Option<u32>, blame: Blame) {
    let inflight = with_room(room);
    let mut model = Model::default();
    for (step, death) in steps {
        let Some(accesses) = death else {
            run(&inflight, &mut model, step);
            continue;
        };
        if within(*accesses, || run(&inflight, &mut model, step)).is_some() {
            continue;
        }
        if let Some(accesses) = collector_dies {
            within(accesses, || inflight.collect_with(&mut model, blame).unwrap());
        }
        // A request that was not yet copied out of the kernel stays in the kernel's queue.
        let read: BTreeSet<u64> = (0..inflight.stages()).map(|s| inflight.stage_header(s).unique).collect();
        let recorded: Vec<u64> =
            model.waiting.keys().copied().filter(|u| read.contains(u) || inflight.is_in_flight(*u)).collect();
        model.waiting.retain(|unique, _| recorded.contains(unique));
        let collected = inflight.collect_with(&mut model, blame).unwrap();
        assert_eq!(collected.lost, 0);
        assert_eq!(collected.orphans, model.waiting.len());
        assert!(collected.poisoned.is_empty() || !model.failed.is_empty());
        successor_finishes(&inflight, &mut model);
    }
    inflight.collect_with(&mut model, Blame::Executing).unwrap();
    successor_finishes(&inflight, &mut model);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_or_done_twice_wherever_a_worker_dies(
        steps in steps(Room::ReadOnly, 40),
        collector_dies in proptest::option::of(0u32..4000),
        blame in proptest::sample::select(vec![Blame::Executing, Blame::Agent]),
    ) {
        nothing_is_lost(Room::ReadOnly, &steps, collector_dies, blame);
    }
}

proptest! {
    // Requests of a mebibyte are made, copied and compared.
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_or_done_twice_wherever_a_worker_dies_that_has_room_for_writes(
        steps in steps(Room::ReadWrite, 20),
        collector_dies in proptest::option::of(0u32..4000),
        blame in proptest::sample::select(vec![Blame::Executing, Blame::Agent]),
    ) {
        nothing_is_lost(Room::ReadWrite, &steps, collector_dies, blame);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn a_map_full_of_garbage_neither_panics_nor_loops(
        garbage in proptest::collection::vec(any::<u8>(), 64..4096),
        room in proptest::sample::select(vec![Room::ReadOnly, Room::ReadWrite]),
    ) {
        let fd = Inflight::create(room).unwrap();
        let mut file = std::fs::File::from(fd.as_fd().try_clone_to_owned().unwrap());
        file.write_all(&(MARK | u64::from(INFLIGHT)).to_ne_bytes()).unwrap();
        for _ in 0..400 {
            file.write_all(&garbage).unwrap();
        }
        let inflight = Inflight::map(fd).unwrap();
        struct Deaf;
        impl Kernel for Deaf {
            fn probe(&mut self, unique: u64) -> io::Result<Probe> {
                Ok(if unique.is_multiple_of(3) { Probe::Waiting } else { Probe::Gone })
            }
            fn fail(&mut self, _: u64) {}
        }
        inflight.collect_with(&mut Deaf, Blame::Executing).unwrap();
        inflight.collect_with(&mut Deaf, Blame::Agent).unwrap();
        inflight.init();
        inflight.init_reply();
        inflight.interrupted();
        inflight.backings();
        let mut buffer = [0; STAGE_BYTES];
        while !matches!(inflight.next_orphan(&mut buffer), None | Some(Orphan::Later)) {}
    }
}

#[test]
fn a_request_that_kills_worker_after_worker_is_failed_and_the_bystander_is_not() {
    let inflight = inflight();
    let mut model = Model::default();
    let bystander = take(&inflight, &mut model, 80).unwrap();
    let stage = inflight.acquire_stage().unwrap();
    let bytes = model.request(90);
    arrive(&inflight, stage, &bytes);
    let header = inflight.stage_header(stage);
    inflight.put(stage, &header).unwrap();
    inflight.commit_stage(stage, header.unique);
    for death in 1..LIMIT_DEATHS {
        let collected = inflight.collect_with(&mut model, Blame::Executing).unwrap();
        assert_eq!((collected.orphans, collected.poisoned.len()), (2, 0), "death {death}");
        let mut buffer = [0; STAGE_BYTES];
        while let Some(Orphan::Request(slot, taken)) = inflight.next_orphan(&mut buffer) {
            if taken.unique == bystander {
                inflight.park(slot, bystander);
            }
        }
    }
    let collected = inflight.collect_with(&mut model, Blame::Executing).unwrap();
    let poisoned =
        Poisoned { unique: header.unique, opcode: fuse_abi::opcode::READ, nodeid: 77, deaths: LIMIT_DEATHS };
    assert_eq!((collected.orphans, collected.poisoned), (1, vec![poisoned]));
    assert_eq!(model.failed, BTreeSet::from([header.unique]));
}

#[test]
fn whoever_is_executed_beside_a_poisonous_request_is_not_failed_with_it() {
    let inflight = inflight();
    let mut model = Model::default();
    let bystanders: Vec<u64> = (0..3).map(|_| take(&inflight, &mut model, 80).unwrap()).collect();
    let poison = take(&inflight, &mut model, 90).unwrap();
    // Every request that a worker takes up is under execution when the poison kills it.
    bystanders.iter().chain([&poison]).for_each(|unique| inflight.resume(*unique));
    let mut answered = BTreeSet::new();
    let mut deaths = 0;
    loop {
        let collected = inflight.collect_with(&mut model, Blame::Executing).unwrap();
        deaths += 1;
        assert!(deaths < 20, "the poison is never found out");
        if let [found] = &collected.poisoned[..] {
            assert_eq!((found.unique, found.deaths), (poison, LIMIT_DEATHS));
            break;
        }
        // A worker: its threads take what they are given, and answer what does not kill them.
        let mut buffer = [0; STAGE_BYTES];
        let mut dead = false;
        while !dead {
            let mut taken = Vec::new();
            while let Some(Orphan::Request(_, header)) = inflight.next_orphan(&mut buffer) {
                taken.push(header.unique);
            }
            let suspects = taken.iter().filter(|unique| deaths_of(&inflight, **unique) >= 2).count();
            assert!(suspects <= 1, "{suspects} suspects at once");
            dead = taken.is_empty() || taken.contains(&poison);
            if !dead {
                for unique in taken {
                    reply(&inflight, &mut model, unique);
                    answered.insert(unique);
                }
            }
        }
    }
    successor_finishes(&inflight, &mut model);
    assert_eq!(model.failed, BTreeSet::from([poison]));
    assert!(answered.is_subset(&bystanders.into_iter().collect()));
}

#[test]
fn a_worker_that_somebody_else_ended_makes_no_request_a_suspect() {
    let inflight = inflight();
    let mut model = Model::default();
    let unique = take(&inflight, &mut model, 80).unwrap();
    let mut buffer = [0; STAGE_BYTES];
    for _ in 0..3 * LIMIT_DEATHS {
        inflight.resume(unique);
        let collected = inflight.collect_with(&mut model, Blame::Nobody).unwrap();
        assert_eq!((collected.orphans, collected.poisoned.len()), (1, 0));
        assert!(matches!(inflight.next_orphan(&mut buffer), Some(Orphan::Request(..))));
    }
    assert_eq!(deaths_of(&inflight, unique), 0);
}

#[test]
fn a_full_table_refuses_and_recovers() {
    let inflight = inflight();
    let mut model = Model::default();
    for _ in 0..SLOTS {
        take(&inflight, &mut model, 48).unwrap();
    }
    let stage = inflight.acquire_stage().unwrap();
    let bytes = model.request(48);
    arrive(&inflight, stage, &bytes);
    let header = inflight.stage_header(stage);
    assert!(inflight.put(stage, &header).is_none());
    reply(&inflight, &mut model, 2 * SLOTS as u64);
    assert!(inflight.put(stage, &header).is_some());
}

#[test]
fn the_second_answer_to_a_request_finds_no_claim() {
    let inflight = inflight();
    let unique = take(&inflight, &mut Model::default(), 60).unwrap();
    let claim = inflight.claim(unique).unwrap();
    assert!(inflight.claim(unique).is_none());
    inflight.refused(claim);
    inflight.answered(inflight.claim(unique).unwrap());
    assert!(inflight.claim(unique).is_none());
}

#[test]
fn effects_are_noted_once_and_survive_a_death() {
    let inflight = inflight();
    let mut model = Model::default();
    let unique = take(&inflight, &mut model, 60).unwrap();
    assert!(inflight.set_effect(unique));
    inflight.collect_with(&mut model, Blame::Executing).unwrap();
    assert!(inflight.next_orphan(&mut [0; 64]).is_some());
    assert!(!inflight.set_effect(unique));
    assert!(inflight.has_effect(unique));
}

/// Adds one to a number that outlives every worker, and tells what it was.
struct Addition<'a>(&'a Cell<u64>);

impl Operation for Addition<'_> {
    fn intend(&mut self) -> Vec<u8> {
        self.0.get().to_le_bytes().to_vec()
    }
    fn resolve(&mut self, intent: &[u8]) -> Option<Outcome> {
        let before = u64::from_le_bytes(intent.try_into().unwrap());
        (self.0.get() == before + 1).then(|| outcome(before))
    }
    fn execute(&mut self) -> Outcome {
        let before = self.0.replace(self.0.get() + 1);
        outcome(before)
    }
}

fn outcome(before: u64) -> Outcome {
    Outcome { errno: 0, body: before.to_le_bytes().to_vec() }
}

#[test]
fn an_operation_happens_once_wherever_two_workers_die_in_it() {
    let mut deaths = 0;
    for (first, second) in (0..60).flat_map(|a| (0..60).map(move |b| (a, b))) {
        let (inflight, mut model, number) = (inflight(), Model::default(), Cell::new(40));
        // The slot has had an operation before.
        let earlier = take(&inflight, &mut model, 60).unwrap();
        assert_eq!(inflight.once(earlier, &mut Addition(&number)), Ok(outcome(40)));
        reply(&inflight, &mut model, earlier);
        // A bystander in a lower slot, which must not come between.
        let bystander = take(&inflight, &mut model, 60).unwrap();
        let unique = take(&inflight, &mut model, 60).unwrap();
        for accesses in [first, second] {
            if within(accesses, || inflight.once(unique, &mut Addition(&number)).unwrap()).is_none() {
                deaths += 1;
            }
            inflight.collect_with(&mut model, Blame::Executing).unwrap();
            let mut order = Vec::new();
            while let Some(Orphan::Request(slot, header)) = inflight.next_orphan(&mut [0; STAGE_BYTES]) {
                inflight.park(slot, header.unique);
                order.push(header.unique);
            }
            assert_eq!(order.len(), 2);
            assert!(number.get() == 41 || order[0] == unique, "one that has begun comes first");
        }
        assert_eq!(inflight.once(unique, &mut Addition(&number)), Ok(outcome(41)));
        assert_eq!(number.get(), 42);
        reply(&inflight, &mut model, unique);
        assert_eq!(inflight.once(bystander, &mut Addition(&number)), Ok(outcome(42)));
        reply(&inflight, &mut model, bystander);
        assert_eq!(inflight.in_flight(), 0);
    }
    assert!(deaths > 1000, "only {deaths} deaths");
}

#[test]
fn an_operation_that_has_begun_is_not_answered_eintr() {
    struct Look<'a>(&'a Inflight, u64);
    impl Operation for Look<'_> {
        fn intend(&mut self) -> Vec<u8> {
            Vec::new()
        }
        fn resolve(&mut self, _: &[u8]) -> Option<Outcome> {
            None
        }
        fn execute(&mut self) -> Outcome {
            assert!(self.0.mark_interrupted(self.1));
            assert!(self.0.interrupted().is_empty() && self.0.claim_to_interrupt(self.1).is_none());
            Outcome { errno: 17, body: Vec::new() }
        }
    }
    let inflight = inflight();
    let mut model = Model::default();
    let unique = take(&inflight, &mut model, 60).unwrap();
    let done = inflight.once(unique, &mut Look(&inflight, unique));
    assert_eq!(done, Ok(Outcome { errno: 17, body: Vec::new() }));
    reply(&inflight, &mut model, unique);
    assert_eq!(inflight.once(unique, &mut Look(&inflight, unique)), Err(OperationError::Answered));
    // One that has not begun is.
    let other = take(&inflight, &mut model, 60).unwrap();
    inflight.answered(inflight.claim_to_interrupt(other).unwrap());
    assert_eq!(inflight.once(other, &mut Look(&inflight, other)), Err(OperationError::Answered));
}

#[test]
fn what_does_not_fit_into_a_record_is_refused_before_anything_is_done() {
    struct Long<'a>(&'a Cell<u64>);
    impl Operation for Long<'_> {
        fn intend(&mut self) -> Vec<u8> {
            vec![1; INTENT_BYTES + 1]
        }
        fn resolve(&mut self, _: &[u8]) -> Option<Outcome> {
            None
        }
        fn execute(&mut self) -> Outcome {
            self.0.set(1);
            outcome(0)
        }
    }
    let (inflight, number) = (inflight(), Cell::new(0));
    let unique = take(&inflight, &mut Model::default(), 60).unwrap();
    let done = inflight.once(unique, &mut Long(&number));
    assert_eq!((done, number.get()), (Err(OperationError::Size(INTENT_BYTES + 1)), 0));
}

#[test]
fn backing_ids_are_counted_and_found_again() {
    let fd = Inflight::create(Room::ReadOnly).unwrap();
    let first = Inflight::map(&fd).unwrap();
    let index = first.add_backing(3 | 1 << 40, 9, 0xabc).unwrap();
    first.ref_backing(index);
    first.ref_backing(index);
    drop(first);
    let second = Inflight::map(&fd).unwrap();
    assert_eq!(second.backings(), [(index, Backing { nodeid: 3 | 1 << 40, id: 9, refs: 2, file: 0xabc })]);
    assert_eq!(second.unref_backing(index), 1);
    assert_eq!(second.unref_backing(index), 0);
    assert_eq!(second.unref_backing(index), 0, "one RELEASE too many");
    second.remove_backing(index);
    assert!(second.backings().is_empty());
}

#[test]
fn estale_is_given_once_per_nodeid() {
    let inflight = inflight();
    for nodeid in 1..3000 {
        assert!(inflight.give_estale(nodeid));
    }
    let repeated = (2900..3000).filter(|&nodeid| inflight.give_estale(nodeid)).count();
    assert!(repeated < 5, "{repeated} of the latest 100 were forgotten");
}

#[test]
fn far_versions_other_sizes_and_unsealed_files_are_refused() {
    let fd = Inflight::create(Room::ReadOnly).unwrap();
    Inflight::map(&fd).unwrap();
    let file = std::fs::File::from(fd.as_fd().try_clone_to_owned().unwrap());
    let says = |format: u64| {
        std::os::unix::fs::FileExt::write_all_at(&file, &format.to_ne_bytes(), 0).unwrap();
        Inflight::map(&fd)
    };
    let version = u64::from(INFLIGHT);
    for neighbour in [version - 1, version + 1] {
        assert!(says(MARK | neighbour).is_ok());
    }
    for other in [MARK | (version + 2), version, u64::MAX] {
        assert!(matches!(says(other), Err(InflightError::Format { found }) if found == other));
    }
    assert!(rustix::fs::ftruncate(&fd, 4096).is_err(), "no worker may shrink it under the agent");
    for room in [Room::ReadOnly, Room::ReadWrite] {
        let other = tempfile::tempfile().unwrap();
        other.set_len(room.bytes() as u64).unwrap();
        assert!(matches!(Inflight::map(&other), Err(InflightError::Map(_))), "not sealed");
        for bytes in [room.bytes() - 4096, room.bytes() + 4096] {
            let other = memory::create(bytes).unwrap();
            assert!(matches!(Inflight::map(&other), Err(InflightError::Map(_))), "of another size");
        }
    }
}

#[test]
fn an_idle_connection_touches_few_pages() {
    let fd = Inflight::create(Room::ReadOnly).unwrap();
    let inflight = Inflight::map(&fd).unwrap();
    let mut model = Model::default();
    inflight.set_init(&[1; 104]).unwrap();
    inflight.set_init_reply(&[2; 80]).unwrap();
    for _ in 0..1000 {
        let unique = take(&inflight, &mut model, 100).unwrap();
        reply(&inflight, &mut model, unique);
    }
    assert!(!inflight.is_in_flight(1));
    let kib = rustix::fs::fstat(&fd).unwrap().st_blocks / 2;
    assert!(kib <= 40, "{kib} KiB");
}

#[test]
fn init_is_kept_and_oversized_messages_are_refused() {
    let inflight = inflight();
    assert_eq!((inflight.init(), inflight.init_reply()), (None, None));
    inflight.set_init(&[7; 104]).unwrap();
    assert_eq!(inflight.init().unwrap(), vec![7; 104]);
    assert!(matches!(inflight.set_init_reply(&[0; INIT_BYTES + 1]), Err(InflightError::InitSize(_))));
}

#[test]
fn an_answer_is_one_header_with_a_negative_errno() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    answer_errno(&writer, 42, 5).unwrap();
    let mut header = [0; 16];
    reader.read_exact(&mut header).unwrap();
    assert_eq!(header[4..8], (-5i32).to_ne_bytes());
    assert_eq!(header[8..16], 42u64.to_ne_bytes());
}
