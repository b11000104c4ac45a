//! Disks that are full, read-only or gone: readers get right bytes and no error.

use super::*;
use rustix::mount::{MountFlags, UnmountFlags};

/// A tmpfs of its own, unmounted whatever happens. Needs root, as all tests of this project that mount.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn new(bytes: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        rustix::mount::mount("millpond-test", dir.path(), "tmpfs", MountFlags::empty(), Some(&*options))
            .expect("these tests run as root");
        Self(dir)
    }
    fn path(&self) -> &Path {
        self.0.path()
    }
    fn read_only(&self, on: bool) {
        let flags = if on { MountFlags::RDONLY } else { MountFlags::empty() };
        rustix::mount::mount_remount(self.path(), flags, c"").unwrap();
    }
}
impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.path(), UnmountFlags::DETACH);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_a_miss_and_never_an_error() {
    let disk = Tmpfs::new(2 * MIB);
    // The quota promises more than the disk has.
    let (engine, _, counts) = open(&config(vec![tier(&[disk.path()])]));
    for k in 0..8 {
        let object = Object::new(k, MIB + 1000);
        check_all(&file(&engine, &format!("f{k}"), &object), &object, 64 << 10).await;
    }
    assert!(counts.disk_errors.load(SeqCst) > 0 && counts.degraded.load(SeqCst) > 0);
    until("eviction made room and a probe succeeded", || {
        counts.recovered.load(SeqCst) == counts.degraded.load(SeqCst)
    })
    .await;
    assert!(counts.reasons.lock().unwrap().contains(&Reason::DiskFull));
    let object = Object::new(100, 10_000);
    let cached = file(&engine, "after", &object);
    check_all(&cached, &object, MIB).await;
    assert_eq!(cached.root(), 0, "it is cached again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_larger_than_the_disk_is_read_without_an_error() {
    let disk = Tmpfs::new(2 * MIB);
    let (engine, _, counts) = open(&config(vec![tier(&[disk.path()])]));
    let object = Object::new(1, 12 * MIB);
    check_all(&file(&engine, "large", &object), &object, 128 << 10).await;
    // Of smaller ones a probe may find room again before a reader has to read past the disk.
    assert!(counts.uncached.load(SeqCst) > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_turns_read_only_serves_what_it_has_and_the_rest_comes_uncached() {
    let disk = Tmpfs::new(64 * MIB);
    let config = config(vec![tier(&[disk.path()])]);
    let (warm, large) = (Object::new(1, 100_000), Object::new(2, 8 * MIB));
    let cold = Object::new(3, 5 * MIB);
    {
        let (engine, _, counts) = open(&config);
        let open_before = file(&engine, "large", &large);
        check_all(&file(&engine, "warm", &warm), &warm, MIB).await;
        get(&open_before, 0, 4096).await.unwrap();
        until("the readahead has ended", || large.in_flight.load(SeqCst) == 0).await;
        until("and is on the disk", || used(&engine) >= large.fetched()).await;
        // Our own descriptors for writing would keep the disk from turning read-only.
        drop(open_before);
        drop(engine.lock_index().let_go(|_| true));
        engine.reclaim();
        engine.roots[0].journal.lock().unwrap().close();
        // A sidecar that is still to be written would be lost with the right to write.
        let saved = |p: &PathBuf| p.extension().is_some_and(|e| e == "idx");
        until("the sidecar is saved", || files_below(disk.path()).iter().any(saved)).await;
        until("remounted", || {
            let flags = MountFlags::RDONLY;
            rustix::mount::mount_remount(disk.path(), flags, c"").is_ok()
        })
        .await;
        for (name, object) in [("warm", &warm), ("large", &large), ("cold", &cold)] {
            check_all(&file(&engine, name, object), object, 64 << 10).await;
        }
        assert!(counts.degraded.load(SeqCst) > 0);
        assert_eq!(warm.requests(), 1, "what was cached needs no source");
        engine.shutdown().await;
    }
    let (engine, recovery, _) = open(&config);
    assert!(recovery.unusable.is_empty() && recovery.files >= 2, "{recovery:?}");
    for (name, object) in [("warm", &warm), ("large", &large), ("cold", &cold)] {
        check_all(&file(&engine, name, object), object, 64 << 10).await;
    }
    assert_eq!(warm.requests(), 1, "nor after a restart");
    disk.read_only(false);
    until("a probe finds it writable again", || !engine.usage().tiers[0].roots[0].degraded).await;
}

#[tokio::test]
async fn a_cache_directory_that_cannot_be_made_is_reported_and_reads_go_on() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    let (engine, recovery, _) = open(&config(vec![tier(&[&dir.path().join("file/below")])]));
    assert_eq!(recovery.unusable.len(), 1);
    let object = Object::new(1, 3 * MIB);
    check_all(&file(&engine, "x", &object), &object, 128 << 10).await;
    assert_eq!(object.fetched(), object.size);
}

#[tokio::test]
async fn the_floor_of_the_file_system_holds_whatever_the_quota() {
    let disk = Tmpfs::new(16 * MIB);
    let tier = Tier { min_free_bytes_percent: 50, ..tier(&[disk.path()]) };
    let (engine, _, counts) = open(&config(vec![tier]));
    for k in 0..60 {
        let object = Object::new(k, 400 << 10);
        check_all(&file(&engine, &format!("f{k}"), &object), &object, MIB).await;
        keep(&engine).await;
    }
    keep(&engine).await;
    let space = rustix::fs::statvfs(disk.path()).unwrap();
    assert!(space.f_bavail * 2 >= space.f_blocks - 200, "{} of {}", space.f_bavail, space.f_blocks);
    assert!(counts.reasons.lock().unwrap().contains(&Reason::FreeSpace));
}
