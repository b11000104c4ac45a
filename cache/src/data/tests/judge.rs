//! What comes whole is held against the checksum that its store tells.

use super::*;

/// An object's `Fetch` that tells a checksum.
struct Telling {
    object: Arc<Object>,
    sums: Option<CrcAlgorithm>,
    told: Result<Option<Checksum>, Cause>,
    asked: AtomicU64,
    wrong: AtomicU64,
}

#[async_trait]
impl Fetch for Telling {
    async fn fetch(
        &self,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, FetchError>>, FetchError> {
        From(self.object.clone()).fetch(range).await
    }
    fn sums(&self) -> Option<CrcAlgorithm> {
        self.sums
    }
    async fn checksum(&self) -> Result<Option<Checksum>, FetchError> {
        self.asked.fetch_add(1, SeqCst);
        self.told.map_err(error)
    }
    fn came_wrong(&self, again: bool) {
        self.wrong.fetch_add(u64::from(again), SeqCst);
    }
}

const NVME: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;
const SIZE: u64 = 3 * MIB + 17;

fn truth(object: &Object, algorithm: CrcAlgorithm) -> Checksum {
    let value = crc_fast::checksum(algorithm, &object.content(0..object.size));
    Checksum { algorithm, value }
}

fn telling(object: &Arc<Object>, told: Result<Option<Checksum>, Cause>) -> Arc<Telling> {
    Arc::new(Telling {
        object: object.clone(),
        sums: Some(NVME),
        told,
        asked: AtomicU64::new(0),
        wrong: AtomicU64::new(0),
    })
}

async fn come(engine: &Arc<Engine>, fetch: &Arc<Telling>) -> Arc<File> {
    let file = engine.file(key("o", fetch.object.size), fetch.clone(), ReadOptions::default());
    file.whole().await.expect("it comes");
    assert!(file.is_whole());
    file
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap_or_else(|_| panic!("{what}"));
}

fn script(object: &Object, faults: impl IntoIterator<Item = Fault>) {
    object.script.lock().unwrap().extend(faults);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_was_changed_on_its_way_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, counts) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(1, SIZE);
    // Told of in the way that was foreseen, and in another.
    for (round, algorithm) in [NVME, CrcAlgorithm::Crc32Iscsi].into_iter().enumerate() {
        let fetch = telling(&object, Ok(Some(truth(&object, algorithm))));
        script(&object, [Fault::CutAt(0), Fault::Flip]);
        let path = key("o", SIZE);
        let file = engine.file(path, fetch.clone(), ReadOptions::default());
        let _ = file.read(0, 4096).await; // the one that is cut
        file.whole().await.unwrap();
        until("it is let go of", || counts.changed.load(SeqCst) == round as u64 + 1).await;
        until("it is gone", || file.is_gone()).await;
        assert_eq!(counts.reasons.lock().unwrap().last(), Some(&Reason::Corrupted));
        // Whoever opens it next gets what the store has.
        let again = come(&engine, &fetch).await;
        assert_ne!(again.id(), file.id());
        assert!(get(&again, 0, SIZE as u32).await.unwrap() == object.content(0..SIZE));
        until("it is judged", || fetch.asked.load(SeqCst) == 2).await;
        engine.evict(None, b"").await;
    }
    assert_eq!(counts.changed.load(SeqCst), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fits_stays_and_costs_one_question() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(vec![tier(&[dir.path()])]);
    let (engine, _, counts) = open(&config);
    let object = Object::new(2, SIZE);
    let fetch = telling(&object, Ok(Some(truth(&object, NVME))));
    // A part breaks off, so that it is no part, and comes again.
    script(&object, [Fault::CutAt(10_000)]);
    let file = engine.file(key("o", SIZE), fetch.clone(), ReadOptions::default());
    let _ = file.read(0, 100_000).await;
    file.whole().await.unwrap();
    until("it is judged", || fetch.asked.load(SeqCst) == 1).await;
    let requests = object.requests();
    drop(file);
    engine.shutdown().await;
    drop(engine);
    // The next run finds it whole, and asks nobody.
    let (engine, _, again) = open(&config);
    let file = come(&engine, &fetch).await;
    assert!(get(&file, 0, SIZE as u32).await.unwrap() == object.content(0..SIZE));
    assert_eq!((object.requests(), fetch.asked.load(SeqCst)), (requests, 1));
    assert_eq!((counts.changed.load(SeqCst), again.changed.load(SeqCst)), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_one_run_began_and_another_ended_is_judged_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(vec![tier(&[dir.path()])]);
    let object = Object::new(3, SIZE);
    let fetch = telling(&object, Ok(Some(truth(&object, NVME))));
    let (engine, ..) = open(&config);
    script(&object, [Fault::Flip]);
    let random = ReadOptions { readahead_bytes: Some(0), ..ReadOptions::default() };
    let file = engine.file(key("o", SIZE), fetch.clone(), random);
    file.read_with(MIB, BLOCK as u32, random).await.unwrap();
    assert!(!file.is_whole());
    drop(file);
    engine.shutdown().await;
    drop(engine);
    let (engine, _, counts) = open(&config);
    let file = come(&engine, &fetch).await;
    until("it is let go of", || file.is_gone()).await;
    assert_eq!(counts.changed.load(SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_tells_nonsense_costs_one_more_fetch_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, counts) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(4, SIZE);
    let fetch = telling(&object, Ok(Some(Checksum { algorithm: NVME, value: 7 })));
    let first = come(&engine, &fetch).await;
    until("it is let go of", || first.is_gone()).await;
    let second = come(&engine, &fetch).await;
    until("it is judged", || counts.changed.load(SeqCst) == 2).await;
    until("its store is told", || fetch.wrong.load(SeqCst) == 1).await;
    assert!(!second.is_gone() && second.is_whole());
    let requests = object.requests();
    assert_eq!(come(&engine, &fetch).await.id(), second.id());
    assert_eq!(object.requests(), requests);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_tells_nothing_or_fails_to_takes_nothing_away() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _, counts) = open(&config(vec![tier(&[dir.path()])]));
    let object = Object::new(5, SIZE);
    for told in [Ok(None), Err(Cause::Unavailable), Err(Cause::Stale)] {
        let fetch = telling(&object, told);
        let file = come(&engine, &fetch).await;
        until("it is asked for", || fetch.asked.load(SeqCst) == 1).await;
        keep(&engine).await;
        assert!(!file.is_gone());
        engine.evict(None, b"").await;
    }
    // A source that has none is not even asked.
    let fetch = Arc::new(Telling {
        object: object.clone(),
        sums: None,
        told: Ok(Some(Checksum { algorithm: NVME, value: 7 })),
        asked: AtomicU64::new(0),
        wrong: AtomicU64::new(0),
    });
    let file = come(&engine, &fetch).await;
    keep(&engine).await;
    assert!(!file.is_gone() && fetch.asked.load(SeqCst) == 0);
    assert_eq!(counts.changed.load(SeqCst), 0);
}
