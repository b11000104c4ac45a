//! Disks that do not answer: a reader of what they hold gets it from the source, and all else goes on. Real FUSE.

use super::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use testkit::fault_fs::{Call, DiskFaults, Mounted, Status};

/// How long one call may take here.
const TIMEOUT: Duration = Duration::from_secs(1);
/// What only a defect takes.
const PATIENCE: Duration = Duration::from_secs(15);

/// A disk that answers until its test says not to. A process of its own: what waits for it can be let go only by its
/// end, which must come when this one is killed. Needs root, as all tests of this project that mount.
struct Disk {
    process: Child,
    control: BufReader<UnixStream>,
    base: tempfile::TempDir,
}

const BASE: &str = "MILLPOND_HANGS_TEST_DIR";

/// Not a test: the process of a [`Disk`].
#[test]
#[ignore = "the other tests start it"]
fn disk() {
    let Some(base) = std::env::var_os(BASE).map(PathBuf::from) else { return };
    let mut mounted =
        Mounted::mount(&base.join("below"), &base.join("disk")).expect("these tests run as root");
    mounted.listen(&base.join("control")).unwrap();
    std::fs::write(base.join("ready"), "").unwrap();
    // Until the other end is closed.
    let _ = std::io::stdin().read(&mut [0]);
    let _ = rustix::mount::unmount(base.join("disk"), rustix::mount::UnmountFlags::DETACH);
    std::process::exit(0); // a call that still waits gets an error
}

impl Disk {
    async fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        for dir in ["below", "disk"] {
            std::fs::create_dir(base.path().join(dir)).unwrap();
        }
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "data::tests::hangs::disk", "--ignored", "--nocapture", "--test-threads=1"])
            .env(BASE, base.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        until("the disk is there", || base.path().join("ready").exists()).await;
        let control = BufReader::new(UnixStream::connect(base.path().join("control")).unwrap());
        Self { process, control, base }
    }
    fn path(&self) -> PathBuf {
        self.base.path().join("disk")
    }
    /// Returns how it was doing.
    fn set(&mut self, hangs: &[Call]) -> Status {
        let faults = DiskFaults { hangs: hangs.to_vec(), ..DiskFaults::default() };
        writeln!(self.control.get_mut(), "{}", serde_json::to_string(&faults).unwrap()).unwrap();
        let mut answer = String::new();
        self.control.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// As its namesake beside this file; but a caller that reads the data file itself may be kept there by the disk, as a
/// worker may. Then another one asks.
async fn get(file: &Arc<File>, offset: u64, len: u32) -> Vec<u8> {
    let end = (offset + u64::from(len)).min(file.key().size);
    loop {
        match file.read(offset, len).await.expect("the source answers") {
            Presence::Uncached(bytes) => return bytes.to_vec(),
            Presence::Present { .. } => {
                let descriptors = file.descriptors().await.expect("descriptors");
                let data = std::fs::File::from(descriptors.data);
                let mut bytes = vec![0; (end - offset) as usize];
                let read = tokio::task::spawn_blocking(move || {
                    data.read_exact_at(&mut bytes, offset).map(|()| bytes)
                });
                // Shorter than it is: the disk has begun to hang between the two questions.
                if let Ok(Ok(Ok(bytes))) = tokio::time::timeout(2 * TIMEOUT, read).await {
                    return bytes;
                }
            }
        }
    }
}

async fn check_all(file: &Arc<File>, object: &Object, step: u64) {
    let mut at = 0;
    while at < object.size {
        let end = (at + step).min(object.size);
        let bytes = get(file, at, (end - at) as u32).await;
        assert!(bytes == object.content(at..end), "wrong bytes at {at}");
        at = end;
    }
}

fn hasty(tiers: Vec<Tier>) -> Config {
    Config { disk_timeout: TIMEOUT, ..config(tiers) }
}

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("for ever: {what}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_answer_reads_is_passed_by_and_used_again() {
    readers_go_past_a_disk_that_does_not_answer(Call::Read).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_answer_writes_is_passed_by_and_used_again() {
    readers_go_past_a_disk_that_does_not_answer(Call::Write).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_answer_opens_is_passed_by_and_used_again() {
    readers_go_past_a_disk_that_does_not_answer(Call::Open).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_answer_fsync_is_passed_by_and_used_again() {
    readers_go_past_a_disk_that_does_not_answer(Call::Fsync).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_answer_changes_of_names_is_passed_by_and_used_again() {
    readers_go_past_a_disk_that_does_not_answer(Call::Metadata).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_answer_stat_is_passed_by_and_used_again() {
    readers_go_past_a_disk_that_does_not_answer(Call::Stat).await;
}

async fn readers_go_past_a_disk_that_does_not_answer(call: Call) {
    let (mut disk, sound) = (Disk::new().await, tempfile::tempdir().unwrap());
    let mut other = tier(&[sound.path()]);
    other.name = "other".into();
    let small = Tier { quota_bytes: 40 * MIB, ..tier(&[&disk.path()]) };
    let (engine, _, counts) = open(&hasty(vec![small, other]));
    let mut events = engine.events();
    let (whole, part, cold) = (Object::new(1, 300_000), Object::new(2, 8 * MIB), Object::new(3, MIB));
    let (kept, begun) = (file(&engine, "whole", &whole), file(&engine, "part", &part));
    check_all(&kept, &whole, 64 << 10).await;
    get(&begun, 0, 4096).await;
    until("the readahead has ended", || part.in_flight.load(SeqCst) == 0).await;
    assert_eq!((kept.root(), begun.root()), (0, 0), "{call:?}");

    disk.set(&[call]);
    soon("a cold file", check_all(&file(&engine, "cold", &cold), &cold, 64 << 10)).await;
    soon("the rest of one", check_all(&begun, &part, 256 << 10)).await;
    until("it is seen to hang", || engine.hangs(0)).await;
    soon("what it has", check_all(&kept, &whole, 64 << 10)).await;
    soon("the same, opened anew", check_all(&file(&engine, "whole", &whole), &whole, MIB)).await;
    let usage = engine.usage();
    assert!(usage.tiers[0].roots[0].degraded && !usage.tiers[1].roots[0].degraded, "{call:?}");
    let late = Object::new(4, MIB);
    let placed = file(&engine, "late", &late);
    soon("a file for the other disk", check_all(&placed, &late, 64 << 10)).await;
    assert_eq!(placed.root(), 1, "{call:?}: files go to a disk that answers");
    soon("eviction", engine.evict(None, b"cold")).await;
    assert!(soon("the directory", engine.scope_dir(0, &scope(1))).await.is_err());

    disk.set(&[]);
    until("it is used again", || !engine.hangs(0) && !engine.usage().tiers[0].roots[0].degraded).await;
    soon("what it had", check_all(&kept, &whole, 64 << 10)).await;
    let next = Object::new(5, MIB);
    let placed = file(&engine, "next", &next);
    check_all(&placed, &next, 64 << 10).await;
    assert_eq!(placed.root(), 0, "{call:?}");
    let mut disks = Vec::new();
    while disks.last() != Some(&(0, true)) {
        if let Some(Event::Disk { root, works }) = soon("the news", events.recv()).await {
            disks.push((root, works));
        }
    }
    assert_eq!(disks, [(0, false), (0, true)], "{call:?}: once, and once again");
    assert_eq!(counts.degraded.load(SeqCst), counts.recovered.load(SeqCst));
    drop((kept, begun, placed));
    soon("shutdown", engine.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_keeps_neither_an_engine_from_ending_nor_the_next_from_starting() {
    let (mut disk, sound) = (Disk::new().await, tempfile::tempdir().unwrap());
    let config = hasty(vec![tier(&[&disk.path()]), tier(&[sound.path()])]);
    let object = Object::new(1, 6 * MIB);
    {
        let (engine, _, _) = open(&config);
        let begun = file(&engine, "x", &object);
        get(&begun, 0, 4096).await;
        disk.set(&Call::ALL);
        soon("shutdown", engine.shutdown()).await;
    }
    let opened = {
        let config = config.clone();
        tokio::task::spawn_blocking(move || open(&config))
    };
    let (engine, recovery, counts) = soon("a start", opened).await.unwrap();
    assert_eq!(recovery.unusable.len(), 1, "{recovery:?}");
    assert_eq!(counts.degraded.load(SeqCst), 1);
    let placed = file(&engine, "x", &object);
    soon("reading", check_all(&placed, &object, 256 << 10)).await;
    assert_eq!(placed.root(), 1);
    soon("shutdown", engine.shutdown()).await;
    disk.set(&[]);
}

/// Bodies on their way to it must not hold all the memory until it is known to hang.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_stands_still_gives_back_the_memory_that_others_wait_for() {
    let (mut disk, sound) = (Disk::new().await, tempfile::tempdir().unwrap());
    let mut config = hasty(vec![tier(&[&disk.path()]), tier(&[sound.path()])]);
    (config.disk_timeout, config.reading.parallel_parts) = (Duration::from_secs(600), 64);
    let (engine, _, _) = open(&config);
    let slow = Object::new(1, 64 * MIB);
    let begun = file(&engine, "slow", &slow);
    get(&begun, 0, 4096).await;
    disk.set(&[Call::Write]);
    let _all = begun.prefetch_all();
    until("its share of the memory is taken", || engine.memory.is_short()).await;
    // More than the fifth that one scope alone always leaves to others.
    let (other, much) = (scope(2), 3 * MIB);
    assert!(engine.memory.try_take(&other, much).is_none());
    soon("others get what they wait for", engine.memory.take(&other, much)).await;
    assert!(!engine.hangs(0));
    disk.set(&[]);
    engine.shutdown().await;
}
