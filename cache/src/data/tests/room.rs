//! Room: watermarks, quotas, tiers and what an operator may do.

use super::*;

/// A root that holds `quota` bytes.
fn small_root(path: &Path, quota: u64) -> Tier {
    Tier { quota_bytes: quota, ..tier(&[path]) }
}

#[tokio::test]
async fn a_root_stays_below_its_quota_and_goes_down_to_the_low_watermark() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, counts) = open(&config(vec![small_root(dir.path(), 4 * MIB)]));
    for k in 0..200 {
        let object = Object::new(k, 64 << 10);
        check_all(&file(&engine, &format!("f{k}"), &object), &object, 64 << 10).await;
        assert!(used(&engine) <= 4 * MIB + (64 << 10), "{}", used(&engine));
    }
    until("eviction has come down", || used(&engine) <= 4 * MIB * 9 / 10).await;
    assert!(used(&engine) >= 4 * MIB / 2, "it does not evict more than it must");
    assert!(counts.evicted_files.load(SeqCst) > 100);
    let on_disk = || data_files(dir.path()).iter().map(|p| p.metadata().map_or(0, |m| m.len())).sum::<u64>();
    until("the books agree with the disk", || on_disk() == used(&engine)).await;
}

#[tokio::test]
async fn inodes_have_a_quota_too() {
    let dir = tempfile::tempdir().unwrap();
    let tier = Tier { quota_inodes: 50, ..tier(&[dir.path()]) };
    let (engine, _, counts) = open(&config(vec![tier]));
    for k in 0..150 {
        let object = Object::new(k, 10);
        check_all(&file(&engine, &format!("f{k}"), &object), &object, 10).await;
    }
    until("below the watermark", || engine.usage().tiers[0].inodes <= 45).await;
    assert!(counts.reasons.lock().unwrap().contains(&Reason::Inodes));
}

#[tokio::test]
async fn files_that_are_read_again_outlive_a_scan() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![small_root(dir.path(), 4 * MIB)]));
    let hot: Vec<_> = (0..10).map(|k| Object::new(1000 + k, 64 << 10)).collect();
    for _ in 0..4 {
        for (k, object) in hot.iter().enumerate() {
            check_all(&file(&engine, &format!("hot{k}"), object), object, 64 << 10).await;
        }
    }
    for k in 0..400 {
        let object = Object::new(k, 64 << 10);
        check_all(&file(&engine, &format!("scan{k}"), &object), &object, 64 << 10).await;
    }
    let kept = (0..10).filter(|k| engine.cached_bytes(&key(&format!("hot{k}"), 64 << 10)) > 0).count();
    assert_eq!(kept, 10, "the scan passed through the small queue");
}

#[tokio::test]
async fn a_greedy_scope_evicts_itself_and_not_its_neighbour() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, counts) = open(&config(vec![small_root(dir.path(), 64 * MIB)]));
    let neighbour = Object::new(1, 256 << 10);
    check_all(&file(&engine, "neighbour", &neighbour), &neighbour, MIB).await;
    engine.hold_scope(&scope(2), Some(2 * MIB));
    for k in 0..100 {
        let object = Object::new(k, 100 << 10);
        let key = FileKey { scope: scope(2), ..key(&format!("g{k}"), object.size) };
        let file = engine.file(key, Arc::new(From(object.clone())), ReadOptions::default());
        check_all(&file, &object, MIB).await;
    }
    let of = |n: u8| engine.usage().scopes.into_iter().find(|s| s.scope == scope(n)).unwrap();
    until("the scope is below its limit", || of(2).bytes <= 2 * MIB).await;
    assert!(of(2).bytes > MIB);
    assert_eq!(of(1).bytes, neighbour.size);
    assert!(counts.reasons.lock().unwrap().iter().all(|r| *r == Reason::ScopeLimit));
}

#[tokio::test]
async fn tiers_fill_in_order_and_a_file_too_large_for_all_is_read_uncached() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (engine, _, counts) = open(&config(vec![small_root(a.path(), MIB), small_root(b.path(), 8 * MIB)]));
    let objects: Vec<_> = (0..20).map(|k| Object::new(k, 100 << 10)).collect();
    let mut roots = Vec::new();
    for (k, object) in objects.iter().enumerate() {
        let file = file(&engine, &format!("f{k}"), object);
        check_all(&file, object, MIB).await;
        roots.push(file.root());
    }
    assert_eq!(roots[..9], [0; 9]);
    assert_eq!(roots[9..], [1; 11], "{roots:?}");
    let large = Object::new(50, 4 * MIB);
    let placed = file(&engine, "large", &large);
    check_all(&placed, &large, MIB).await;
    assert_eq!(placed.root(), 1);
    let huge = Object::new(51, 32 * MIB);
    let unplaced = file(&engine, "huge", &huge);
    check_all(&unplaced, &huge, 128 << 10).await;
    assert_eq!(unplaced.root(), NO_ROOT);
    assert_eq!(counts.uncached.load(SeqCst), huge.size);
    assert_eq!(huge.fetched(), huge.size, "a sequential uncached reader pays once");
    assert!(unplaced.descriptors().await.unwrap().presence.is_some());
    assert_eq!(unplaced.whole().await.unwrap_err().cause, Cause::Internal);
}

#[tokio::test]
async fn an_evicted_file_stays_readable_for_those_who_hold_it_and_counts_until_they_let_go() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let mut events = engine.events();
    let object = Object::new(3, 3 * MIB);
    let held = file(&engine, "dir/held", &object);
    held.whole().await.unwrap();
    assert!(matches!(events.recv().await, Some(Event::Whole { .. })));
    let data = std::fs::File::from(held.descriptors().await.unwrap().data);
    assert_eq!(engine.evict(Some(&scope(2)), b"").await, Evicted::default());
    assert_eq!(engine.evict(Some(&scope(1)), b"dir/").await, Evicted { files: 1, bytes: object.size });
    assert!(files_below(&dir.path().join(scope(1).as_str())).is_empty(), "data and sidecar are gone");
    let root = || engine.usage().tiers[0].roots[0].clone();
    assert_eq!((root().bytes, root().unlinked_bytes), (0, object.size));
    let mut bytes = vec![0; 1000];
    data.read_exact_at(&mut bytes, 2 * MIB).unwrap();
    assert_eq!(bytes, object.content(2 * MIB..2 * MIB + 1000));
    check_all(&held, &object, MIB).await;
    drop(held);
    until("the space is free", || root().unlinked_bytes == 0).await;
    assert!(matches!(events.recv().await, Some(Event::Gone { .. })));
}

#[tokio::test]
async fn a_damaged_file_is_dropped_and_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, counts) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(4, 50_000);
    let first = file(&engine, "x", &object);
    check_all(&first, &object, MIB).await;
    engine.damaged(first.id());
    assert_eq!(*counts.reasons.lock().unwrap(), [Reason::Damaged]);
    let second = file(&engine, "x", &object);
    assert_ne!(first.id(), second.id());
    check_all(&second, &object, MIB).await;
    assert_eq!(object.fetched(), 2 * object.size);
}

#[tokio::test]
async fn a_whole_file_is_found_by_its_id_when_nobody_has_it_open() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(5, 50_000);
    let id = {
        let file = file(&engine, "x", &object);
        check_all(&file, &object, MIB).await;
        until("whole", || file.is_whole()).await;
        file.id()
    };
    let again = engine.by_id(id).expect("it is whole");
    check_all(&again, &object, MIB).await;
    engine.touched(&again.key().scope, &[id, 12345]);
    assert_eq!(engine.by_id_of(&again.key().scope, id).map(|file| file.id()), Some(id));
    assert!(engine.by_id_of(&scope(99), id).is_none());
    assert!(engine.by_id(12345).is_none());
    assert_eq!(object.requests(), 1);
}
