//! The worker under a real kernel: root and /dev/fuse are needed, and a machine without them fails here.
#![allow(clippy::unwrap_used)] // helpers of tests, on which clippy sees no #[test]

#[allow(unreachable_pub)]
mod support;

use fuse_abi::{InitOut, OutHeader};
use inflight::Room;
use link::worker::Mode;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use support::copying::killed_in_the_copy;
use support::load::{self, Application, big, small};
use support::mutating::Mutating;
use support::writing::let_write;
use support::{Mount, Object, show, wait_for};

const FILES: u64 = 40;

/// Not a test: the application that the tests start.
#[test]
fn application() {
    load::main();
}

/// Small files whole in the cache, big ones not.
fn objects() -> Vec<Object> {
    let object = |(path, seed, size), whole| Object { path, seed, size, whole };
    let small = (0..FILES).map(|i| object(small(i), true));
    small.chain((0..4).map(|i| object(big(i), false))).collect()
}

fn seed() -> u64 {
    let seed = std::env::var("SEED").map_or_else(|_| std::process::id().into(), |text| text.parse().unwrap());
    println!("SEED={seed}");
    seed
}

/// `kills` deaths under load: no call may fail.
fn survives(mode: Mode, ttl: Option<Duration>, kills: u32) {
    let mut random = seed() | 1;
    let mut mount = Mount::new(mode, show(ttl), objects());
    assert_eq!(mount.answered, Some(mode));
    let application =
        Application::start("mixed", &[mount.target.to_str().unwrap(), &FILES.to_string(), "alarm"]);
    wait_for("first question", || mount.agent.asked("list") > 0);
    let mut orphans = 0;
    let mut stalls = Vec::new();
    for kill in 0..kills {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        std::thread::sleep(Duration::from_micros((random >> 33) % 60_000));
        let dying = Instant::now();
        let collected = mount.kill();
        assert!(collected.poisoned.is_empty() && collected.lost == 0, "kill {kill}: {collected:?}");
        orphans += collected.orphans;
        mount.start();
        stalls.push(dying.elapsed());
    }
    let report = application.finish();
    assert_eq!(report.failures, Vec::<String>::new());
    mount.wait_until_idle();
    stalls.sort();
    println!(
        "{mode:?}: {kills} kills, {orphans} requests replayed, {} calls, stall p50 {:?} max {:?}",
        report.calls,
        stalls[stalls.len() / 2],
        stalls[stalls.len() - 1]
    );
    assert!(report.calls > 100);
}

#[test]
fn kill_9_of_a_passthrough_worker_fails_no_call() {
    survives(Mode::Passthrough, None, 40);
}

#[test]
fn kill_9_of_a_no_open_worker_fails_no_call() {
    survives(Mode::NoOpen, None, 40);
}

#[test]
fn kill_9_of_a_worker_with_short_ttls_fails_no_call() {
    survives(Mode::Kept, Some(Duration::from_millis(20)), 40);
}

#[test]
fn large_reads_are_answered_without_a_copy() {
    let mount = Mount::new(Mode::Kept, show(None), objects());
    let (name, ..) = big(0);
    let report = Application::start("whole", &[mount.target.to_str().unwrap(), &name]).finish();
    assert_eq!(report.failures, Vec::<String>::new());
    wait_for("count", || mount.agent.reads_spliced.load(SeqCst) > 0);
}

#[test]
fn a_killed_caller_gets_out_while_its_read_is_never_answered() {
    let mut mount = Mount::new(Mode::Kept, show(None), objects());
    mount.agent.freeze_reads.store(true, SeqCst);
    let mut get_out = |task, file, noted_by_the_dead, successor| {
        let asked = mount.agent.asked("read");
        mount.agent.freeze_dying.store(noted_by_the_dead, SeqCst);
        let mut application = Application::start(task, &[mount.target.to_str().unwrap(), &big(file).0]);
        wait_for("frozen read", || mount.agent.asked("read") > asked);
        if successor && !noted_by_the_dead {
            mount.kill();
        }
        assert!(!application.has_ended());
        let mut killed = Instant::now();
        application.kill();
        if noted_by_the_dead {
            // The kernel tells of a signal once. The mark must survive the worker that got it, and has not acted on it.
            wait_for("mark", || !mount.inflight.interrupted().is_empty());
            mount.kill();
            assert!(!application.has_ended(), "it was let go by a worker that should not have been able to");
            mount.agent.freeze_dying.store(false, SeqCst);
            killed = Instant::now();
        }
        if successor {
            mount.start();
        }
        wait_for("end of the killed caller", || application.has_ended());
        println!("out after {:?}", killed.elapsed());
        assert!(killed.elapsed() < Duration::from_secs(1));
    };
    // Not the same file twice: a second reader would wait in the kernel for the first one's readahead.
    get_out("once", 0, false, false);
    get_out("once", 1, false, true);
    get_out("direct", 2, false, false);
    get_out("direct", 3, true, true);
}

#[test]
fn small_files_are_listed_opened_and_read_while_no_worker_is_alive() {
    let mut mount = Mount::new(Mode::NoOpen, show(None), objects());
    let target = mount.target.to_str().unwrap().to_owned();
    let tour = |what: &str| {
        let report = Application::start("tour", &[&target, &FILES.to_string()]).finish();
        assert_eq!(report.failures, Vec::<String>::new(), "{what}");
    };
    tour("cold");
    mount.wait_until_idle();
    let reads = mount.agent.asked("read");
    mount.kill();
    tour("with no worker");
    mount.start();
    assert_eq!(mount.agent.asked("read"), reads);
}

#[test]
fn passthrough_files_are_read_while_no_worker_is_alive() {
    let mut mount = Mount::new(Mode::Passthrough, show(None), objects());
    let report = held_open(&mut mount, &small(3).0, |mount| {
        mount.kill();
    });
    assert_eq!(report, "right");
    mount.start();
    mount.wait_until_idle();
    assert_eq!(mount.inflight.backings().len(), 1, "the id is kept for the next open");
}

#[test]
fn becoming_whole_and_being_evicted_is_invisible_to_the_application() {
    let mut mount = Mount::new(Mode::Passthrough, show(None), objects());
    let (path, ..) = big(1);
    let target = mount.target.to_str().unwrap().to_owned();
    let read = |mount: &Mount| {
        let ino = Application::start("whole", &[&target, &path]).finish();
        assert_eq!(ino.failures, Vec::<String>::new());
        mount.wait_until_idle();
    };
    read(&mount);
    assert_eq!(mount.agent.passthrough_opens.load(SeqCst), 0);
    mount.agent.make_whole(&path);
    read(&mount);
    assert_eq!(mount.agent.passthrough_opens.load(SeqCst), 1, "the new node id is passed through");
    mount.agent.evict(&path);
    read(&mount);
    wait_for("closed id", || mount.agent.backing_closed.load(SeqCst) == 1);
    mount.kill();
    mount.start();
    read(&mount);
}

#[test]
fn switching_node_ids_under_readers_fails_no_call() {
    let mount = Mount::new(Mode::Passthrough, show(None), objects());
    let application = Application::start("mixed", &[mount.target.to_str().unwrap(), &FILES.to_string()]);
    wait_for("first read", || mount.agent.asked("read") > 0);
    for round in 0..100 {
        let (path, ..) = big(round % 4);
        mount.agent.make_whole(&path);
        std::thread::sleep(Duration::from_millis(5));
        mount.agent.evict(&path);
    }
    let report = application.finish();
    assert_eq!(report.failures, Vec::<String>::new());
    let (opened, closed) =
        (mount.agent.passthrough_opens.load(SeqCst), mount.agent.backing_closed.load(SeqCst));
    println!("{} calls, {opened} ids opened, {closed} closed", report.calls);
    mount.wait_until_idle();
    // Those of the small files stay for their next open.
    wait_for("closed ids", || {
        opened - mount.agent.backing_closed.load(SeqCst) == mount.inflight.backings().len() as u64
    });
    assert!(opened > FILES && mount.inflight.backings().iter().all(|(_, backing)| backing.refs == 0));
}

#[test]
fn an_idle_worker_is_small() {
    let mount = Mount::new(Mode::NoOpen, show(None), objects());
    let report = Application::start("tour", &[mount.target.to_str().unwrap(), &FILES.to_string()]).finish();
    assert_eq!(report.failures, Vec::<String>::new());
    wait_for("trimmed buffers", || {
        let kib = mount.worker_kib();
        println!("anonymous and shared memory: {kib} KiB");
        kib < 4096 || {
            std::thread::sleep(Duration::from_millis(200));
            false
        }
    });
}

#[test]
fn a_file_open_across_a_new_version_reads_the_old_one_or_nothing() {
    let mount = Mount::new(Mode::Kept, show(Some(Duration::from_millis(50))), objects());
    let (path, _, size) = big(2);
    let report = Application::start("across", &[mount.target.to_str().unwrap(), &path]);
    wait_for("first bytes", || mount.agent.asked("read") > 0);
    mount.agent.replace(Object { path: path.clone(), seed: 9, size: size / 2, whole: false });
    std::thread::sleep(Duration::from_millis(100)); // two TTLs
    let report = report.finish();
    assert_eq!(report.failures, Vec::<String>::new());
}

#[test]
fn a_cut_cache_file_is_fetched_again_without_an_error() {
    let mount = Mount::new(Mode::Kept, show(None), objects());
    mount.agent.cut(&small(5).0);
    let report = Application::start("tour", &[mount.target.to_str().unwrap(), &FILES.to_string()]).finish();
    assert_eq!(report.failures, Vec::<String>::new());
    assert!(mount.agent.asked("damaged") == 0 || mount.agent.asked("file") > 0);
}

/// The pages of a buffer must be there before the kernel copies into it: else it fails the request when the worker dies
/// meanwhile, and no other can take it over.
#[test]
fn a_worker_that_dies_while_the_kernel_copies_a_request_loses_it_only_where_pages_are_missing() {
    let bare = killed_in_the_copy(false);
    let said = String::from_utf8_lossy(&bare.stderr);
    assert!(!bare.status.success() && said.contains("Input/output error"), "the control: {bare:?}");
    let populated = killed_in_the_copy(true);
    assert!(populated.status.success(), "{populated:?}");
}

/// Steps of an operation; at each of them two workers die in a row, or one there and one at another.
const STEPS: [&str; 9] = [
    "worker.read",
    "worker.recorded",
    "mutating.begun",
    "mutating.intended",
    "mutating.executed",
    "mutating.concluded",
    "worker.answering",
    "worker.answered",
    "worker.orphan",
];

#[test]
fn an_operation_happens_once_and_its_caller_learns_how_it_ended_wherever_workers_die() {
    let mut random = seed() | 1;
    let mut mutating = Mutating::new(false);
    let (target, world) = (mutating.target.clone(), mutating.world.clone());
    mutating.start("");
    let application = Application::start("calls", &[target.to_str().unwrap(), world.to_str().unwrap()]);
    let mut deaths = BTreeMap::new();
    let mut die = |mutating: &mut Mutating, step: &'static str| {
        mutating.start(step);
        *deaths.entry(step).or_insert(0) += u32::from(mutating.let_die(Duration::from_secs(2)));
    };
    for (first, second) in STEPS.into_iter().flat_map(|a| STEPS.into_iter().map(move |b| (a, b))) {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        // Served in peace for a while (a request in which five workers died would be failed), then killed anywhere.
        mutating.let_work();
        mutating.let_die(Duration::from_micros((random >> 33) % 10_000));
        die(&mut mutating, first);
        die(&mut mutating, second);
        if second == "mutating.executed" {
            die(&mut mutating, "mutating.resolved");
        }
        mutating.start("");
    }
    let report = application.finish();
    println!("{} calls; workers that died at each step: {deaths:?}", report.calls);
    assert_eq!(report.failures, Vec::<String>::new());
    for step in STEPS.iter().chain(&["mutating.resolved"]) {
        assert!(deaths.get(step).is_some_and(|n| *n >= 5), "{step}: {deaths:?}");
    }
    assert!(report.calls > 300);
}

/// Steps of a WRITE that does not go through fuser.
const WRITE_STEPS: [&str; 7] = [
    "worker.read",
    "worker.recorded",
    "writing.begun",
    "writing.written",
    "worker.answering",
    "worker.answered",
    "worker.orphan",
];

#[test]
fn large_writes_fail_no_call_and_lose_no_byte_wherever_workers_die() {
    let mut random = seed() | 1;
    let mut mutating = Mutating::with_room(false, Room::ReadWrite);
    let (target, world) = (mutating.target.clone(), mutating.world.clone());
    mutating.start("");
    let application = Application::start("writes", &[target.to_str().unwrap(), world.to_str().unwrap()]);
    let mut deaths = BTreeMap::new();
    for (first, second) in WRITE_STEPS.into_iter().flat_map(|a| WRITE_STEPS.into_iter().map(move |b| (a, b)))
    {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let_write(&mutating);
        mutating.let_die(Duration::from_micros((random >> 33) % 10_000));
        for step in [first, second] {
            mutating.start(step);
            *deaths.entry(step).or_insert(0) += u32::from(mutating.let_die(Duration::from_secs(2)));
        }
        mutating.start("");
    }
    let report = application.finish();
    println!("{} calls; workers that died at each step: {deaths:?}", report.calls);
    assert_eq!(report.failures, Vec::<String>::new());
    for step in WRITE_STEPS {
        assert!(deaths.get(step).is_some_and(|n| *n >= 5), "{step}: {deaths:?}");
    }
    assert!(report.calls > 50);
}

#[test]
fn a_worker_with_room_for_writes_agrees_on_large_ones_and_its_successor_serves_as_before() {
    let mut mount = Mount::with_room(Mode::Kept, show(None), objects(), Room::ReadWrite);
    let reply = mount.inflight.init_reply().unwrap();
    let agreed = InitOut::from_bytes(reply[OutHeader::BYTES..].first_chunk().unwrap());
    assert_eq!((agreed.max_write, agreed.max_pages), (255 * 4096, 255));
    let tour = |what: &str, mount: &Mount| {
        let target = mount.target.to_str().unwrap();
        let report = Application::start("tour", &[target, &FILES.to_string()]).finish();
        assert_eq!(report.failures, Vec::<String>::new(), "{what}");
    };
    tour("the first", &mount);
    mount.kill();
    mount.start();
    tour("its successor", &mount);
    let report = Application::start("whole", &[mount.target.to_str().unwrap(), &big(0).0]).finish();
    assert_eq!(report.failures, Vec::<String>::new());
}

/// The control: without the records the same deaths are noticed.
#[test]
fn without_a_record_operations_happen_twice() {
    let mut mutating = Mutating::new(true);
    let (target, world) = (mutating.target.clone(), mutating.world.clone());
    mutating.start("");
    let application = Application::start("calls", &[target.to_str().unwrap(), world.to_str().unwrap()]);
    for _ in 0..5 {
        mutating.let_work();
        mutating.let_die(Duration::ZERO);
        mutating.start("mutating.executed");
        assert!(mutating.let_die(Duration::from_secs(20)));
        mutating.start("");
    }
    let report = application.finish();
    println!("{:?}", report.failures);
    assert!(!report.failures.is_empty());
}

/// Opens a file in an application, does something to the mount, and lets the application read on.
fn held_open(mount: &mut Mount, name: &str, meanwhile: impl FnOnce(&mut Mount)) -> &'static str {
    let application = Application::start("held", &[mount.target.to_str().unwrap(), name]);
    wait_for("open", || mount.agent.passthrough_opens.load(SeqCst) > 0);
    mount.wait_until_idle();
    meanwhile(mount);
    let report = application.finish();
    if report.failures.is_empty() { "right" } else { "wrong" }
}
