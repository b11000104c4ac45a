//! What a successor finds: what was saved is not fetched again, what was damaged is.

use super::*;

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => copy(&entry.path(), &target),
            // A file may be renamed or unlinked while we copy: as after a kill, it is then simply not there.
            _ => drop(std::fs::copy(entry.path(), target)),
        }
    }
}

#[tokio::test]
async fn after_a_restart_nothing_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(vec![tier(&[dir.path()])]);
    let objects: Vec<_> =
        [1, 5 * BLOCK, 32 * BLOCK, 3 * MIB + 1, 9 * MIB].map(|s| Object::new(s, s)).to_vec();
    let partial = Object::new(99, 64 * MIB);
    {
        let (engine, _, _) = open(&config);
        for (k, object) in objects.iter().enumerate() {
            file(&engine, &format!("f{k}"), object).whole().await.unwrap();
        }
        let file = file(&engine, "partial", &partial);
        get(&file, 40 * MIB, 4096).await.unwrap();
        engine.shutdown().await;
    }
    let before: Vec<u64> = objects.iter().map(|o| o.fetched()).collect();
    let (engine, recovery, counts) = open(&config);
    assert_eq!((recovery.files, recovery.dropped), (6, 0), "{recovery:?}");
    let mut events = engine.events();
    for (k, object) in objects.iter().enumerate() {
        let file = file(&engine, &format!("f{k}"), object);
        check_all(&file, object, 100_000).await;
        until("verified as a whole", || file.is_whole()).await;
        assert!(matches!(events.recv().await, Some(Event::Whole { .. })));
    }
    let file = file(&engine, "partial", &partial);
    assert!(!file.is_whole());
    assert_eq!(get(&file, 40 * MIB, 4096).await.unwrap(), partial.content(40 * MIB..40 * MIB + 4096));
    assert_eq!(objects.iter().map(|o| o.fetched()).collect::<Vec<_>>(), before, "0 bytes again");
    assert_eq!(partial.fetched(), 4096);
    assert_eq!(counts.checksum_failed.load(SeqCst), 0);
}

#[tokio::test]
async fn bits_flipped_while_down_are_fetched_again_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(vec![tier(&[dir.path()])]);
    let (small, large) = (Object::new(1, 9 * BLOCK), Object::new(2, 5 * MIB));
    {
        let (engine, _, _) = open(&config);
        file(&engine, "small", &small).whole().await.unwrap();
        file(&engine, "large", &large).whole().await.unwrap();
        engine.shutdown().await;
    }
    for path in data_files(dir.path()) {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 3 * BLOCK + 17).unwrap();
        file.write_all_at(&[byte[0] ^ 4], 3 * BLOCK + 17).unwrap();
    }
    let (engine, _, counts) = open(&config);
    for (name, object) in [("small", &small), ("large", &large)] {
        let file = file(&engine, name, object);
        check_all(&file, object, 10_000).await;
        until("whole again", || file.is_whole()).await;
        assert!(object.fetched() <= object.size + BLOCK, "one block again: {}", object.fetched());
    }
    assert_eq!(counts.checksum_failed.load(SeqCst), 2);
}

#[tokio::test]
async fn truncated_data_and_damaged_sidecars_are_misses() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(vec![tier(&[dir.path()])]);
    let objects = [Object::new(1, 3 * BLOCK), Object::new(2, 2 * MIB), Object::new(3, 2 * MIB)];
    let mut ids = Vec::new();
    {
        let (engine, _, _) = open(&config);
        for (k, object) in objects.iter().enumerate() {
            let file = file(&engine, &format!("f{k}"), object);
            file.whole().await.unwrap();
            ids.push(file.id());
        }
        engine.shutdown().await;
    }
    let at = |id: u64| dir.path().join(scope(1).as_str()).join(file_name(id));
    std::fs::OpenOptions::new().write(true).open(at(ids[0])).unwrap().set_len(100).unwrap();
    std::fs::OpenOptions::new().write(true).open(at(ids[1])).unwrap().set_len(MIB).unwrap();
    let sidecar = at(ids[2]).with_extension("idx");
    let mut bytes = std::fs::read(&sidecar).unwrap();
    let last = bytes.len() - 9;
    bytes[last] ^= 1;
    std::fs::write(&sidecar, bytes).unwrap();
    let (engine, _, counts) = open(&config);
    for (k, object) in objects.iter().enumerate() {
        check_all(&file(&engine, &format!("f{k}"), object), object, 50_000).await;
    }
    assert!(counts.checksum_failed.load(SeqCst) >= 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_moment_the_successor_reads_right_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let live = dir.path().join("live");
    let config_live = config(vec![tier(&[&live])]);
    let (engine, _, _) = open(&config_live);
    let objects: Vec<_> =
        (0..40).map(|k| Object::new(k, if k % 4 == 0 { 2 * MIB } else { 5000 * k })).collect();
    for object in &objects {
        object.jitter.store(true, SeqCst);
    }
    let writer = tokio::spawn({
        let (engine, objects) = (engine.clone(), objects.clone());
        async move {
            for (k, object) in objects.iter().enumerate() {
                file(&engine, &format!("f{k}"), object).whole().await.unwrap();
            }
        }
    });
    for round in 0..6 {
        until("it went on", || objects.iter().filter(|o| o.requests() > 0).count() > round * 5).await;
        let copied = dir.path().join(format!("copy{round}"));
        copy(&live, &copied);
        let (successor, recovery, _) = open(&config(vec![tier(&[&copied])]));
        let again: Vec<_> = objects.iter().map(|o| Object::new(o.seed, o.size)).collect();
        for (k, object) in again.iter().enumerate() {
            check_all(&file(&successor, &format!("f{k}"), object), object, 300_000).await;
        }
        println!("round {round}: {recovery:?}");
        if round > 0 {
            assert!(recovery.files > 0);
        }
        successor.shutdown().await;
    }
    writer.await.unwrap();
}

#[tokio::test]
async fn whole_files_survive_a_kill_without_a_byte_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let (live, copied) = (dir.path().join("live"), dir.path().join("copy"));
    let (engine, _, _) = open(&config(vec![tier(&[&live])]));
    let mut events = engine.events();
    let objects = [Object::new(1, 7 * BLOCK), Object::new(2, 6 * MIB)];
    for (k, object) in objects.iter().enumerate() {
        file(&engine, &format!("f{k}"), object).whole().await.unwrap();
        assert!(matches!(events.recv().await, Some(Event::Whole { .. })));
    }
    copy(&live, &copied);
    let (successor, _, _) = open(&config(vec![tier(&[&copied])]));
    let fetched: Vec<u64> = objects.iter().map(|o| o.fetched()).collect();
    for (k, object) in objects.iter().enumerate() {
        check_all(&file(&successor, &format!("f{k}"), object), object, 300_000).await;
    }
    assert_eq!(objects.iter().map(|o| o.fetched()).collect::<Vec<_>>(), fetched);
}

#[tokio::test]
async fn a_dropped_instance_of_a_partial_file_forgets_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(5, 8 * MIB);
    let first = file(&engine, "partial", &object);
    get(&first, 5 * MIB, 8192).await.unwrap();
    let id = first.id();
    until("the flight has landed", || Arc::strong_count(&first) <= 2).await;
    drop(first);
    drop(engine.lock_index().let_go(|_| true));
    let second = file(&engine, "partial", &object);
    assert_eq!(second.id(), id);
    assert_eq!(get(&second, 5 * MIB, 8192).await.unwrap(), object.content(5 * MIB..5 * MIB + 8192));
    assert_eq!(object.fetched(), 8192);
}

#[tokio::test]
async fn a_directory_of_another_version_is_set_aside_and_few_are_kept() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("cache");
    let config = config(vec![tier(&[&dir])]);
    let mut asides = Vec::new();
    for round in 0..4 {
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("FORMAT"), format!("millpond-cache 999 block 4096 {round}")).unwrap();
        let (engine, recovery, _) = open(&config);
        assert_eq!(recovery.set_aside.len(), 1, "{recovery:?}");
        assert_eq!(recovery.files, 0);
        let object = Object::new(1, 100);
        check_all(&file(&engine, "x", &object), &object, 100).await;
        engine.shutdown().await;
        asides.extend(recovery.set_aside);
    }
    assert!(std::fs::read_to_string(asides[3].join("FORMAT")).unwrap().contains("999"));
    let kept = || asides.iter().filter(|p| p.exists()).count();
    until("the oldest are removed", || kept() == 2).await;
}

#[tokio::test]
async fn strange_directories_and_second_engines_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("thesis.tex"), "do not touch").unwrap();
    let config = config(vec![tier(&[dir.path()])]);
    let handle = tokio::runtime::Handle::current();
    let refused = Engine::open(config.clone(), Arc::new(()), handle.clone()).map(|_| ()).unwrap_err();
    assert!(matches!(&refused, OpenError::Foreign { name, .. } if name == "thesis.tex"), "{refused}");
    std::fs::remove_file(dir.path().join("thesis.tex")).unwrap();
    let (_engine, _, _) = open(&config);
    let refused = Engine::open(config.clone(), Arc::new(()), handle).map(|_| ()).unwrap_err();
    assert!(matches!(refused, OpenError::InUse { .. }), "{refused}");
}

#[tokio::test]
async fn a_memory_tier_starts_empty() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(vec![tier(&[dir.path()])]);
    config.tiers[0].kind = TierKind::Memory;
    for _ in 0..2 {
        let (engine, recovery, _) = open(&config);
        assert_eq!(recovery.files, 0);
        assert!(data_files(dir.path()).is_empty());
        let object = Object::new(1, 10_000);
        check_all(&file(&engine, "x", &object), &object, 100_000).await;
        engine.shutdown().await;
    }
}
