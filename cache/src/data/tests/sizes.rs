//! What a source claims of an object's size decides nothing but where the object ends.

use super::*;
use proptest::prelude::*;

const LARGEST: u64 = volume::FILE_BYTES_MAX;

/// A disk that would take any file, on each kind of file system that is at hand.
fn without_quota(dir: &Path) -> Config {
    config(vec![Tier { quota_bytes: u64::MAX, ..tier(&[dir]) }])
}

fn directories() -> Vec<tempfile::TempDir> {
    // Their limits differ: ext4 ends at 16 TiB, tmpfs takes what the kernel does.
    vec![tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()]
}

async fn check_ends(file: &Arc<File>, object: &Object) {
    let len = BLOCK.min(object.size);
    for start in [0, object.size - len, object.size / 2 / BLOCK * BLOCK] {
        let end = (start + len).min(object.size);
        let bytes = get(file, start, (end - start) as u32).await.expect("the read succeeds");
        assert!(bytes == object.content(start..end), "wrong bytes at {start} of {}", object.size);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_of_any_size_opens_and_its_first_and_last_block_are_read() {
    for dir in directories() {
        for config in [config(vec![tier(&[dir.path()])]), without_quota(dir.path())] {
            let (engine, _, counts) = open(&config);
            for size in [1 << 31, (1 << 32) + 1, 1 << 53, 1 << 60, LARGEST - 1, LARGEST] {
                let object = Object::new(size, size);
                let file = file(&engine, &format!("claims {size}"), &object);
                check_ends(&file, &object).await;
                assert!(!file.is_whole() && object.fetched() <= 64 * MIB, "{} of {size}", object.fetched());
            }
            // A size that a file system cannot take is not a disk that fails.
            assert_eq!(counts.degraded.load(SeqCst), 0);
            let small = Object::new(5, 3 * BLOCK);
            check_all(&file(&engine, "small", &small), &small, BLOCK).await;
            engine.shutdown().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_kept_of_many_large_claims_is_as_little_as_what_was_read_of_them() {
    const FILES: u64 = 64;
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let config = without_quota(dir.path());
    let objects: Vec<_> = (0..FILES).map(|k| Object::new(k, 1 << 50)).collect();
    let name = |k: u64| format!("claim{k}");
    {
        let (engine, _, _) = open(&config);
        let mut held = Vec::new();
        for object in &objects {
            let file = file(&engine, &name(object.seed), object);
            get(&file, object.size - BLOCK, 10).await.unwrap();
            get(&file, object.size / 3, 10).await.unwrap();
            let bitmap = file.descriptors().await.unwrap().presence.unwrap();
            assert!(rustix::fs::fstat(&bitmap).unwrap().st_size <= 128 << 10);
            held.push(file);
        }
        drop(held);
        engine.shutdown().await;
    }
    let disk = |path: &PathBuf| std::os::unix::fs::MetadataExt::blocks(&path.metadata().unwrap()) * 512;
    let taken: u64 = files_below(dir.path()).iter().map(disk).sum();
    assert!(taken <= FILES * 4 * BLOCK + (64 << 10), "{taken} bytes for {FILES} files");
    // Kept all the same: nothing of it is fetched again.
    let before: u64 = objects.iter().map(|o| o.requests()).sum();
    let (engine, recovery, _) = open(&config);
    assert_eq!((recovery.files, recovery.dropped), (FILES, 0));
    for object in &objects {
        let file = file(&engine, &name(object.seed), object);
        let end = object.size - BLOCK;
        assert!(get(&file, end, 10).await.unwrap() == object.content(end..end + 10));
    }
    assert_eq!(objects.iter().map(|o| o.requests()).sum::<u64>(), before);
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bringing_in_all_of_a_file_that_no_disk_can_hold_fails_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(1, 1 << 60);
    let file = file(&engine, "huge", &object);
    let error = file.whole().await.unwrap_err();
    assert!(error.message.contains("no cache directory can take this file"), "{error}");
    assert!(object.fetched() <= 16 * MIB, "{}", object.fetched());
    engine.shutdown().await;
}

#[test]
fn claims_do_not_decide_where_other_files_go() {
    let mut index = index::Index::new(2, BLOCK);
    let scope_number = index.scope(&scope(1), None);
    let mut place = |root: u8, size: u64, written: u64| {
        let id = index.new_id();
        let key = key(&format!("file{id}"), size);
        index.add(id, &key, scope_number);
        index.set_root(id, &key, root, index::Rest::Partial);
        index.charge(id, written);
        index.roots[usize::from(root)].turned
    };
    assert_eq!(place(0, 1 << 60, BLOCK), BLOCK);
    assert_eq!(place(0, LARGEST, BLOCK), 2 * BLOCK);
    // A small file comes at once.
    assert_eq!(place(1, 3 * BLOCK, 0), 3 * BLOCK);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn sizes_around_every_boundary_have_right_first_and_last_bytes(
        boundary in prop::sample::select(vec![
            1, BLOCK, SMALL_BLOCKS * BLOCK, 1 << 31, 1 << 32, 1 << 44, 1 << 53, 1 << 62, LARGEST,
        ]),
        beside in -2i64..=2,
        without_limit in any::<bool>(),
        reads in prop::collection::vec((any::<u64>(), 1u32..3 * BLOCK as u32), 0..8),
    ) {
        let size = boundary.saturating_add_signed(beside).min(LARGEST);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir_in("/dev/shm").unwrap();
            let config =
                if without_limit { without_quota(dir.path()) } else { config(vec![tier(&[dir.path()])]) };
            let object = Object::new(size, size);
            for restart in [false, true] {
                let (engine, _, _) = open(&config);
                let file = file(&engine, "object", &object);
                if size > 0 {
                    check_ends(&file, &object).await;
                    for (offset, len) in &reads {
                        let offset = offset % size;
                        let end = (offset + u64::from(*len)).min(size);
                        let bytes = get(&file, offset, *len).await.unwrap();
                        assert!(bytes == object.content(offset..end), "{offset} of {size}, again: {restart}");
                    }
                }
                drop(file);
                engine.shutdown().await;
            }
        });
    }
}
