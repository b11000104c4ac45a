//! Reads: what they cost at the source, when they wake, and how they fail.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_readers_of_one_cold_file_fetch_it_once() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(7, 12 * MIB + 123);
    object.jitter.store(true, SeqCst);
    let readers: Vec<_> = (0..8)
        .map(|_| {
            let (engine, object) = (engine.clone(), object.clone());
            tokio::spawn(async move {
                let file = file(&engine, "big", &object);
                check_all(&file, &object, 64 << 10).await;
            })
        })
        .collect();
    for reader in readers {
        reader.await.unwrap();
    }
    assert_eq!(object.fetched(), object.size, "1.00x");
    assert!(object.in_flight_max.load(SeqCst) > 1, "parts are fetched in parallel");
    assert!(object.in_flight_max.load(SeqCst) <= 5, "parallel_parts and a reader's own");
    assert!(object.requests() < 80, "{} requests", object.requests());
}

#[tokio::test]
async fn a_small_file_is_one_request_however_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let mut events = engine.events();
    let object = Object::new(8, 30 * BLOCK + 5);
    let file = file(&engine, "small", &object);
    let offset = 29 * BLOCK + 10;
    assert_eq!(get(&file, offset, 100).await.unwrap(), object.content(offset..offset + 100));
    check_all(&file, &object, 1000).await;
    assert_eq!((object.requests(), object.fetched()), (1, object.size));
    assert!(file.is_whole());
    let Some(Event::Whole { file: id, root: 0, key }) = events.recv().await else { panic!("no Whole event") };
    assert_eq!((id, &*key), (file.id(), &**file.key()));
    let path = dir.path().join(scope(1).as_str()).join(file_name(id));
    assert_eq!(std::fs::read(path).unwrap(), object.content(0..object.size));
    assert!(file.descriptors().await.unwrap().presence.is_none());
}

/// Looks at a file in the moment in which a reader of it is woken.
struct Looks {
    file: Arc<File>,
    woken: AtomicBool,
    too_early: AtomicBool,
}
impl std::task::Wake for Looks {
    fn wake(self: Arc<Self>) {
        let progress = self.file.progress();
        self.too_early.fetch_or(progress.present == progress.size && !progress.whole, SeqCst);
        self.woken.store(true, SeqCst);
    }
}

#[tokio::test]
async fn who_waits_for_all_of_a_file_is_woken_when_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    for (name, size) in [("small", 3), ("large", 3 * MIB)] {
        let file = file(&engine, name, &Object::new(10, size));
        let looks = Arc::new(Looks { file: file.clone(), woken: false.into(), too_early: false.into() });
        let waker = std::task::Waker::from(looks.clone());
        let mut reader = std::pin::pin!(file.read(0, size as u32));
        while reader.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending() {
            until("the reader is woken", || looks.woken.swap(false, SeqCst)).await;
        }
        assert!(file.is_whole() && !looks.too_early.load(SeqCst), "{name}");
    }
}

#[tokio::test]
async fn a_reader_wakes_when_its_own_range_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(9, 4 * MIB);
    object.gated.store(true, SeqCst);
    let options = ReadOptions { readahead_bytes: Some(0), ..ReadOptions::default() };
    let file = engine.file(key("gated", object.size), Arc::new(From(object.clone())), options);
    let read = |len: u32| {
        let file = file.clone();
        tokio::spawn(async move { get(&file, 0, len).await })
    };
    let long = read(64 << 10);
    until("the fetch has begun", || object.requests() == 1).await;
    let short = read(100);
    // Two chunks of 3,000 bytes complete the first block of 4,096 and no other.
    object.gate.add_permits(2);
    assert_eq!(short.await.unwrap().unwrap(), object.content(0..100));
    assert!(object.fetched() <= 6000 && !long.is_finished());
    let presence = file.descriptors().await.unwrap().presence.expect("not whole");
    let mut word = [0; 8];
    std::fs::File::from(presence).read_exact_at(&mut word, 0).unwrap();
    assert_eq!(u64::from_le_bytes(word), 1);
    object.gate.add_permits(1 << 20);
    assert_eq!(long.await.unwrap().unwrap(), object.content(0..64 << 10));
    assert_eq!((object.fetched(), object.requests()), (64 << 10, 1));
}

#[tokio::test]
async fn random_reads_fetch_only_their_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(10, 256 * MIB);
    let file = file(&engine, "random", &object);
    let seed = 42u64;
    println!("seed {seed}");
    for k in 0..200u64 {
        let offset = mix(seed ^ k) % (object.size / BLOCK - 1) * BLOCK + BLOCK;
        let wanted = offset.min(object.size - BLOCK);
        assert_eq!(get(&file, wanted, BLOCK as u32).await.unwrap(), object.content(wanted..wanted + BLOCK));
    }
    assert!(object.fetched() <= 200 * BLOCK, "{} bytes for 200 blocks", object.fetched());
}

#[tokio::test]
async fn a_sequential_reader_gets_growing_windows_and_marks() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(11, 64 * MIB);
    let file = file(&engine, "sequential", &object);
    let Presence::Present { mark: Some(mark) } = file.read(0, 4096).await.unwrap() else { panic!("a mark") };
    assert!(mark > 0 && mark <= 4 * MIB, "{mark}");
    until("the first window is there", || object.fetched() >= 4 * MIB).await;
    // The worker reads on without asking, passes the mark and says so.
    file.advance(mark, ReadOptions::default());
    until("the window moved on", || object.fetched() > 9 * MIB / 2).await;
    let mut at = mark;
    while at < object.size {
        get(&file, at, 128 << 10).await.unwrap();
        at += 128 << 10;
    }
    until("the file is whole", || file.is_whole()).await;
    assert_eq!(object.fetched(), object.size);
    assert!(object.requests() <= 64 * 2 + 20, "{} requests", object.requests());
}

#[tokio::test]
async fn each_reader_is_fetched_ahead_for_as_it_says_whoever_opened_the_file_last() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(13, 64 * MIB);
    let none = ReadOptions { readahead_bytes: Some(0), ..ReadOptions::default() };
    // The last opener wants much, this reader nothing.
    let file = file(&engine, "shared", &object);
    for k in 0..64 {
        file.read_with(k * BLOCK, BLOCK as u32, none).await.unwrap();
    }
    assert_eq!(object.fetched(), 64 * BLOCK);
    // And the other way round.
    engine.file(key("shared", object.size), Arc::new(From(object.clone())), none);
    let much = ReadOptions { readahead_bytes: Some(4 * MIB), ..ReadOptions::default() };
    for k in 0..64 {
        file.read_with(32 * MIB + k * BLOCK, BLOCK as u32, much).await.unwrap();
    }
    until("there is more than was read", || object.fetched() > (64 + 64 + 16) * BLOCK).await;
}

/// Reads an object from its beginning to its end. Returns how many requests it took and how many were under way at once.
async fn stream(engine: &Arc<Engine>, path: &str, options: ReadOptions) -> (u64, usize) {
    let object = Object::new(14, 8 * MIB);
    let file = file(engine, path, &object);
    for k in 0..object.size / (64 << 10) {
        file.read_with(k * (64 << 10), 64 << 10, options).await.unwrap();
    }
    assert_eq!(object.fetched(), object.size);
    (object.requests(), object.in_flight_max.load(SeqCst))
}

#[tokio::test]
async fn each_reader_has_the_parts_that_it_asks_for_within_the_operators_limits() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let (part, parts) = (engine.config.reading_max.part_bytes, engine.config.reading_max.parallel_parts);
    let with = |part_bytes, parallel_parts| ReadOptions {
        part_bytes: Some(part_bytes),
        parallel_parts: Some(parallel_parts),
        ..ReadOptions::default()
    };
    let (requests, at_once) = stream(&engine, "one small part", with(128 << 10, 1)).await;
    assert!(requests >= 64, "{requests} requests");
    assert!(at_once <= 2, "{at_once} at once: one, and a reader's own");
    let (requests, _) = stream(&engine, "large parts", with(part, 2)).await;
    assert!(requests <= 16, "{requests} requests");
    let (requests, at_once) = stream(&engine, "more than there is", with(1 << 40, usize::MAX)).await;
    assert!(requests >= 8 && at_once <= parts + 1, "{requests} requests, {at_once} at once");
    let (requests, _) = stream(&engine, "nothing", with(0, 0)).await;
    assert!(requests <= 8 * MIB / BLOCK, "{requests} requests");
}

#[test]
fn what_a_volume_leaves_open_is_as_the_operator_says_and_nothing_goes_beyond_the_limits() {
    let config = config(Vec::new());
    assert_eq!(ReadOptions::default().within(&config, config.reading), config.reading);
    let all = ReadOptions {
        readahead_bytes: Some(u64::MAX),
        part_bytes: Some(u64::MAX),
        parallel_parts: Some(usize::MAX),
    };
    assert_eq!(all.within(&config, config.reading), config.reading_max);
    let none = ReadOptions { readahead_bytes: Some(0), part_bytes: Some(0), parallel_parts: Some(0) };
    let least = Reading { readahead_bytes: 0, part_bytes: BLOCK, parallel_parts: 1 };
    assert_eq!(none.within(&config, config.reading), least);
}

#[tokio::test]
async fn a_failed_fetch_fails_its_waiters_and_the_next_reader_tries_again() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(12, 20 * BLOCK);
    let file = file(&engine, "flaky", &object);
    for fault in [Fault::Refuse(Cause::Denied), Fault::CutAt(2 * BLOCK + 7), Fault::EndAt(5 * BLOCK)] {
        object.script.lock().unwrap().push_back(fault);
        let error = file.read(15 * BLOCK, 10).await.unwrap_err();
        assert!(matches!(error.cause, Cause::Denied | Cause::Unavailable), "{error:?}");
    }
    check_all(&file, &object, 5000).await;
    // What came before the errors was not fetched again.
    assert!(object.fetched() <= object.size + 2 * BLOCK, "{}", object.fetched());
}

#[tokio::test]
async fn a_stale_version_is_reported_and_a_new_open_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(13, 8 * MIB);
    let old = file(&engine, "changed", &object);
    get(&old, 0, 10).await.unwrap();
    until("the readahead has ended", || object.in_flight.load(SeqCst) == 0).await;
    object.script.lock().unwrap().push_back(Fault::Refuse(Cause::Stale));
    assert_eq!(old.read(7 * MIB, 10).await.unwrap_err().cause, Cause::Stale);
    assert_eq!(old.read(6 * MIB, 10).await.unwrap_err().cause, Cause::Stale, "and stays so");
    assert_eq!(get(&old, 0, 10).await.unwrap(), object.content(0..10), "what is there can be read");
    until("the file has left the cache", || engine.cached_bytes(old.key()) == 0).await;
    let new = file(&engine, "changed", &object);
    assert_ne!(new.id(), old.id());
    assert_eq!(get(&new, 7 * MIB, 10).await.unwrap(), object.content(7 * MIB..7 * MIB + 10));
}

#[tokio::test]
async fn a_reader_that_goes_away_cancels_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(14, 10 * BLOCK);
    object.gated.store(true, SeqCst);
    let file = file(&engine, "left", &object);
    let reader = tokio::spawn({
        let file = file.clone();
        async move { file.read(0, 10).await.map(|_| ()) }
    });
    until("the fetch has begun", || object.requests() == 1).await;
    reader.abort();
    object.gate.add_permits(1000);
    until("the fetch ended all the same", || file.is_whole()).await;
    check_all(&file, &object, 4096).await;
    assert_eq!(object.requests(), 1);
}

#[tokio::test]
async fn an_empty_file_is_whole_and_has_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, _) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(15, 0);
    let file = file(&engine, "empty", &object);
    assert!(file.is_whole());
    assert!(get(&file, 0, 10).await.unwrap().is_empty());
    assert_eq!(object.requests(), 0);
}

#[tokio::test]
async fn memory_for_bodies_is_bounded_and_a_stalled_source_stops_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(vec![tier(&[dir.path()])]);
    config.memory_bytes = 16 * BLOCK;
    let (engine, _, _) = open(&config);
    let stalled = Object::new(16, 8 * MIB);
    stalled.gated.store(true, SeqCst);
    let slow = file(&engine, "stalled", &stalled);
    let waiting = tokio::spawn(async move { slow.read(0, 10).await.map(|_| ()) });
    until("it is stalled", || stalled.in_flight.load(SeqCst) > 0).await;
    let object = Object::new(17, 8 * MIB);
    check_all(&file(&engine, "quick", &object), &object, 1 << 20).await;
    assert_eq!(object.fetched(), object.size);
    waiting.abort();
    stalled.gate.add_permits(1 << 20);
}
