//! What scopes leave behind when no volume uses them.

use super::*;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

fn nth(n: u32) -> ScopeId {
    ScopeId::parse(&format!("{n:032x}")).unwrap()
}

fn directories(root: &Path) -> usize {
    let is_scope = |entry: &std::fs::DirEntry| entry.file_name().len() == 32;
    std::fs::read_dir(root).unwrap().filter(|entry| is_scope(entry.as_ref().unwrap())).count()
}

#[tokio::test]
async fn scopes_used_and_left_leave_no_directory_no_descriptor_and_no_place_in_the_index() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(1, 3 * BLOCK);
    for round in 0..3 {
        for n in round * 100..round * 100 + 100 {
            engine.hold_scope(&nth(n), None);
            engine.scope_dir(0, &nth(n)).await.unwrap();
            let key = FileKey { scope: nth(n), ..key("a", object.size) };
            let file = engine.file(key, Arc::new(From(object.clone())), ReadOptions::default());
            check_all(&file, &object, BLOCK).await;
            engine.let_go_of_scope(&nth(n));
        }
        assert_eq!(directories(dir.path()), 100, "what is cached stays");
        engine.evict(None, b"").await;
        until("all is gone", || directories(dir.path()) == 0 && engine.usage().scopes.is_empty()).await;
        let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| {
            let to = std::fs::read_link(fd.unwrap().path()).ok()?;
            let below = to.strip_prefix(dir.path()).ok()?.to_str()?.to_owned();
            below.starts_with("000").then_some(below)
        });
        assert_eq!(open.collect::<Vec<_>>(), Vec::<String>::new());
    }
    assert!(engine.lock_index().scopes.len() <= 100, "numbers are not given out again");
}

#[tokio::test]
async fn a_scope_that_is_held_keeps_its_directory_whatever_is_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    engine.hold_scope(&nth(1), None);
    let held = std::fs::File::from(engine.scope_dir(0, &nth(1)).await.unwrap());
    engine.evict(None, b"").await;
    keep(&engine).await;
    engine.sweep_scopes();
    until("it is swept", || !engine.sweeping.load(SeqCst)).await;
    let now = std::fs::metadata(dir.path().join(nth(1).as_str())).unwrap();
    assert_eq!(now.ino(), held.metadata().unwrap().ino());
}

/// A volume that holds a scope and has its directory has the one in which files are made.
#[tokio::test]
async fn a_volume_that_comes_while_its_scope_is_swept_has_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let over = Arc::new(AtomicBool::new(false));
    let sweeper = std::thread::spawn({
        let (engine, over) = (engine.clone(), over.clone());
        move || {
            while !over.load(SeqCst) {
                engine.sweep_scopes();
                std::thread::yield_now();
            }
        }
    });
    for round in 0..2000 {
        engine.hold_scope(&nth(1), None);
        let held = std::fs::File::from(engine.scope_dir(0, &nth(1)).await.unwrap());
        let now = std::fs::metadata(dir.path().join(nth(1).as_str()));
        assert_eq!(now.map(|now| now.ino()).ok(), held.metadata().map(|m| m.ino()).ok(), "round {round}");
        engine.let_go_of_scope(&nth(1));
    }
    over.store(true, SeqCst);
    sweeper.join().unwrap();
}

#[tokio::test]
async fn empty_directories_of_scopes_are_removed_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(vec![tier(&[dir.path()])]);
    let (engine, _, _) = open(&config);
    let object = Object::new(1, 3 * BLOCK);
    check_all(&file(&engine, "kept", &object), &object, BLOCK).await;
    engine.hold_scope(&nth(7), None);
    engine.scope_dir(0, &nth(7)).await.unwrap();
    std::fs::create_dir(dir.path().join(nth(7).as_str()).join("ab")).unwrap();
    engine.shutdown().await;
    drop(engine);
    let (engine, recovery, _) = open(&config);
    assert_eq!((recovery.files, directories(dir.path())), (1, 1));
    check_all(&file(&engine, "kept", &object), &object, BLOCK).await;
}

#[tokio::test]
async fn the_operators_limit_holds_whatever_volumes_want_and_theirs_goes_with_them() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { scope_limit_bytes: Some(8 * MIB), ..config(vec![tier(&[dir.path()])]) };
    let (engine, _, _) = open(&config);
    let limit = || engine.usage().scopes.into_iter().find(|s| s.scope == nth(1)).unwrap().limit_bytes;
    for (wanted, holds) in [(Some(MIB), MIB), (Some(64 * MIB), 8 * MIB), (None, 8 * MIB), (Some(MIB), MIB)] {
        engine.hold_scope(&nth(1), wanted);
        assert_eq!(limit(), Some(holds), "{wanted:?}");
    }
    let object = Object::new(1, BLOCK);
    let key = FileKey { scope: nth(1), ..key("a", object.size) };
    let file = engine.file(key, Arc::new(From(object.clone())), ReadOptions::default());
    check_all(&file, &object, BLOCK).await;
    engine.let_go_of_scope(&nth(1));
    assert_eq!(limit(), Some(8 * MIB));
}

#[tokio::test]
async fn a_scope_over_its_limit_shrinks_without_holding_up_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, counts) = open(&config(vec![tier(&[dir.path()])]));
    engine.hold_scope(&nth(1), None);
    let object = Object::new(1, BLOCK);
    for n in 0..300 {
        let key = FileKey { scope: nth(1), ..key(&format!("f{n}"), object.size) };
        let file = engine.file(key, Arc::new(From(object.clone())), ReadOptions::default());
        check_all(&file, &object, BLOCK).await;
    }
    engine.hold_scope(&nth(1), Some(BLOCK));
    keep(&engine).await;
    until("it has shrunk", || counts.evicted_files.load(SeqCst) >= 295).await;
    // What is reported at once was taken under one hold of the lock that every open waits for.
    let times = counts.reasons.lock().unwrap().len();
    assert!(times >= 4, "300 files were taken in {times} steps");
}

#[tokio::test]
async fn each_shelf_of_a_scope_that_is_removed_is_a_call_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    for shelf in 0..200 {
        std::fs::create_dir_all(dir.path().join(nth(1).as_str()).join(format!("{shelf:02x}"))).unwrap();
    }
    let path = dir.path().to_owned();
    let times = engine.roots[0].pool.run(move || {
        let before = super::super::pool::calls_returned();
        let root = std::fs::File::open(path).unwrap();
        super::super::root::remove_empty(root.as_fd(), nth(1).as_str()).unwrap();
        super::super::pool::calls_returned() - before
    });
    assert!(times.await.unwrap() >= 200);
    assert_eq!(directories(dir.path()), 0);
}
