//! A store that misbehaves in every scripted way still gives the right bytes, or the right error in time.

use crate::common::*;
use futures::{StreamExt, TryStreamExt};
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{LimitsConfig, Outcome, RetryCause, StoreError};
use testkit::content;
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::Server;

const SIZE: u64 = 3 << 20;

async fn one_object() -> (Server, store::Version) {
    let server = Server::memory(BUCKET).await.unwrap();
    let meta = server.put(BUCKET, "o", content::bytes(1, 0..SIZE)).unwrap();
    (server, version(&meta))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_epoch_under_all_faults_has_right_bytes() {
    let server = Server::memory(BUCKET).await.unwrap();
    for n in 0..400_u64 {
        server.put(BUCKET, &format!("d{}/f{n}", n % 4), content::bytes(n, 0..100_000 + n)).unwrap();
    }
    let kinds = [
        Fault::Status { code: 503, retry_after_s: None },
        Fault::Status { code: 429, retry_after_s: Some(0) },
        Fault::Status { code: 500, retry_after_s: None },
        Fault::Latency { ms: 20 },
        Fault::Reset,
        Fault::ResetBody,
        Fault::Truncate,
        Fault::WrongLength,
        Fault::Stall { ms: None },
        Fault::StallBody { ms: None },
    ];
    let rules = kinds.into_iter().zip([0.05, 0.01].into_iter().cycle());
    let rules = rules.map(|(fault, probability)| Rule::with_probability(fault, probability)).collect();
    server.faults().set(Script { seed: 20_261_121, rules });

    let log = Arc::new(Log::default());
    let source = open(&spec(&server, "s3://bucket"), quick(), log.clone());
    let mut files = Vec::new();
    for dir in 0..4 {
        let dir = format!("d{dir}");
        let page = source.list(dir.as_bytes(), None).await.unwrap();
        assert_eq!((page.entries.len(), page.next), (100, None));
        files.extend(page.entries.into_iter().map(|entry| (dir.clone(), entry)));
    }
    futures::stream::iter(files)
        .for_each_concurrent(32, |(dir, entry)| {
            let source = source.clone();
            async move {
                let name = String::from_utf8(entry.name).unwrap();
                let n: u64 = name[1..].parse().unwrap();
                let path = format!("{dir}/{name}");
                let found = source.head(path.as_bytes()).await.unwrap().unwrap();
                assert_eq!(found.kind, entry.kind, "{path}");
                let store::Kind::File { size, version } = entry.kind else { panic!("{path} is no file") };
                let bytes = read(&*source, path.as_bytes(), &version, 0..size).await.unwrap();
                assert_eq!(bytes.len() as u64, size, "{path}");
                assert_eq!(content::first_wrong_byte(n, 0, &bytes), None, "{path}");
            }
        })
        .await;
    assert!(server.faults().hits() > 100, "the script was hardly used: {}", server.faults().hits());
    let retries = log.retries.lock().unwrap();
    for cause in [
        RetryCause::Throttled,
        RetryCause::ServerError,
        RetryCause::Reset,
        RetryCause::Truncated,
        RetryCause::Stalled,
        RetryCause::Malformed,
    ] {
        assert!(retries.iter().any(|(_, seen)| *seen == cause), "no retry because of {cause:?}");
    }
}

#[tokio::test]
async fn a_broken_body_goes_on_from_where_it_stopped() {
    for fault in [Fault::ResetBody, Fault::Truncate, Fault::StallBody { ms: None }] {
        let (server, version) = one_object().await;
        let source = source(&server);
        server.faults().set(Script { seed: 3, rules: vec![Rule::nth(fault.clone(), &[1, 2])] });
        let bytes = read(&*source, b"o", &version, 5..SIZE - 5).await.unwrap();
        assert_eq!(bytes.len() as u64, SIZE - 10);
        assert_eq!(content::first_wrong_byte(1, 5, &bytes), None, "{fault:?}");
        let stats = server.stats();
        assert_eq!(stats.of("GetObject"), 3, "{fault:?}");
        // What hyper had handed to the socket when it was reset may be lost; what was read is not asked for again.
        assert!(stats.bytes_get < 2 * SIZE, "{fault:?}: {} bytes sent for {SIZE}", stats.bytes_get);
    }
}

#[tokio::test]
async fn another_version_is_stale_whether_or_not_the_store_checks() {
    let (server, version) = one_object().await;
    let source = source(&server);
    // A store that ignores If-Match.
    server.faults().set(Script { seed: 0, rules: vec![Rule::always(Fault::ChangedEtag)] });
    let error = read(&*source, b"o", &version, 0..10).await.unwrap_err();
    assert!(matches!(error, StoreError::Stale { .. }), "{error}");
    // One that answers 412.
    server.faults().clear();
    server.put(BUCKET, "o", content::bytes(2, 0..SIZE)).unwrap();
    let error = read(&*source, b"o", &version, 0..10).await.unwrap_err();
    assert!(matches!(error, StoreError::Stale { .. }), "{error}");
    // Gone altogether.
    server.delete(BUCKET, "o").unwrap();
    let error = read(&*source, b"o", &version, 0..10).await.unwrap_err();
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
    assert_eq!(source.head(b"o").await.unwrap(), None);
}

#[tokio::test]
async fn a_version_that_changes_while_a_body_is_resumed_is_stale_not_a_mixture() {
    let (server, version) = one_object().await;
    let source = source(&server);
    server.faults().set(Script { seed: 1, rules: vec![Rule::nth(Fault::StallBody { ms: None }, &[1])] });
    let mut stream = source.get(b"o", &version, 0..SIZE).await.unwrap();
    let first = stream.try_next().await.unwrap().unwrap();
    assert_eq!(content::first_wrong_byte(1, 0, &first), None);
    server.put(BUCKET, "o", content::bytes(2, 0..SIZE)).unwrap();
    let rest: Result<Vec<_>, _> = stream.try_collect().await;
    assert!(matches!(rest, Err(StoreError::Stale { .. })), "{rest:?}");
}

#[tokio::test]
async fn a_store_that_hangs_is_given_up_after_store_timeout() {
    let (server, version) = one_object().await;
    let mut spec = spec(&server, "s3://bucket");
    spec.parameters.store_timeout = Duration::from_secs(2);
    let source = open(&spec, quick(), Arc::new(store::NoObserver));
    server.faults().set(Script { seed: 1, rules: vec![Rule::always(Fault::Stall { ms: None })] });
    let started = Instant::now();
    let error = read(&*source, b"o", &version, 0..10).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("s3://bucket/o"), "{error}");
    let error = source.list(b"", None).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_length_that_is_always_wrong_is_malformed_before_the_timeout() {
    let (server, version) = one_object().await;
    let source = source(&server);
    server.faults().set(Script { seed: 1, rules: vec![Rule::always(Fault::WrongLength)] });
    let error = read(&*source, b"o", &version, 0..1000).await.unwrap_err();
    assert!(matches!(&error, StoreError::Malformed { why, .. } if why.contains("length")), "{error}");
}

#[tokio::test]
async fn retry_after_is_honoured() {
    let (server, version) = one_object().await;
    let source = source(&server);
    let fault = Fault::Status { code: 503, retry_after_s: Some(1) };
    server.faults().set(Script { seed: 1, rules: vec![Rule::nth(fault, &[1])] });
    let started = Instant::now();
    read(&*source, b"o", &version, 0..1000).await.unwrap();
    assert!(started.elapsed() >= Duration::from_secs(1), "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrency_is_capped_and_a_request_that_backs_off_holds_no_slot() {
    let (server, version) = one_object().await;
    server.put(BUCKET, "bad", "x").unwrap();
    // 3 slots for data.
    let limits = LimitsConfig { requests: 4, ..quick() };
    let source = open(&spec(&server, "s3://bucket"), limits, Arc::new(store::NoObserver));
    let rules = vec![
        Rule::always(Fault::Status { code: 503, retry_after_s: Some(20) }).key("bad"),
        Rule::always(Fault::Latency { ms: 10 }),
    ];
    server.faults().set(Script { seed: 1, rules });
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let (source, version) = (source.clone(), version.clone());
            tokio::spawn(async move { read(&*source, b"bad", &version, 0..1).await })
        })
        .collect();
    while server.stats().answers.get(&503).copied().unwrap_or(0) < 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // All three back off for 20 s and more; all others go on.
    let reads = (0..30).map(|n| read(&*source, b"o", &version, n..n + 1000));
    let reads = futures::future::try_join_all(reads);
    tokio::time::timeout(Duration::from_secs(10), reads).await.expect("slots were held").unwrap();
    assert!(server.stats().in_flight_max <= 3, "{:?}", server.stats());
    waiting.iter().for_each(|task| task.abort());
}

#[tokio::test]
async fn bandwidth_is_capped_over_all_sources() {
    let (server, version) = one_object().await;
    let limits = LimitsConfig { bytes_per_second: Some(4 << 20), ..quick() };
    let source = open(&spec(&server, "s3://bucket"), limits, Arc::new(store::NoObserver));
    let started = Instant::now();
    let both = [read(&*source, b"o", &version, 0..SIZE), read(&*source, b"o", &version, 0..SIZE)];
    futures::future::try_join_all(both).await.unwrap();
    // 6 MiB at 4 MiB/s less a burst of a quarter of a second.
    assert!(started.elapsed() >= Duration::from_millis(1150), "{:?}", started.elapsed());
}

#[tokio::test]
async fn the_observer_hears_of_every_attempt() {
    let (server, version) = one_object().await;
    let log = Arc::new(Log::default());
    let source = open(&spec(&server, "s3://bucket"), quick(), log.clone());
    server.faults().set(Script { seed: 1, rules: vec![Rule::nth(Fault::Reset, &[1])] });
    read(&*source, b"o", &version, 0..1000).await.unwrap();
    drop(source.get(b"o", &version, 0..SIZE).await.unwrap());
    let requests = log.requests.lock().unwrap().clone();
    assert_eq!(requests[0], ("get", Outcome::Fault, 0));
    assert_eq!(requests[1], ("get", Outcome::Ok, 1000));
    assert_eq!(requests[2], ("get", Outcome::Abandoned, 0));
    assert_eq!(*log.retries.lock().unwrap(), [("get", RetryCause::Reset)]);
}

/// As the cache reads: it knows how much is to come, and does not ask whether that was all.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_whose_end_nobody_asks_for_is_whole_and_its_connection_is_used_again() {
    const READS: usize = 100;
    let (server, version) = one_object().await;
    let log = Arc::new(Log::default());
    let source = open(&spec(&server, "s3://bucket"), quick(), log.clone());
    for n in 0..READS as u64 {
        let len = [1000, 100_000, SIZE - READS as u64][n as usize % 3];
        let mut stream = source.get(b"o", &version, n..n + len).await.unwrap();
        let mut got = 0;
        while got < len {
            got += stream.try_next().await.unwrap().unwrap().len() as u64;
        }
        assert_eq!(log.requests.lock().unwrap().last(), Some(&("get", Outcome::Ok, len)));
    }
    // The client may need a moment to find that a body is over: then the next read opens another one.
    let connections = server.stats().connections;
    assert!(connections < READS as u64 / 4, "{connections} for {READS} reads, one after the other");
}
