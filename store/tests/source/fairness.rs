//! One store that freezes, trickles or fails is no other's concern, and is not hammered when it comes back.

use crate::common::*;
use futures::StreamExt;
use std::sync::Arc;
use std::time::Duration;
use store::{Limits, LimitsConfig, Source};
use testkit::content;
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::{ACCESS_KEY, SECRET_KEY, Server};
use tokio::task::JoinHandle;

/// No stall is given up in the time of a test: what goes on goes on beside it.
fn patient(requests: usize) -> Arc<Limits> {
    let stall_timeout = Duration::from_secs(50);
    Arc::new(Limits::new(LimitsConfig { requests, stall_timeout, ..quick() }))
}

fn with(limits: &Arc<Limits>, server: &Server, source: &str) -> Arc<dyn Source> {
    let keys = keys(ACCESS_KEY, SECRET_KEY);
    let spec = spec(server, source);
    let access = store::Access::fixed(&spec, keys);
    store::open(&spec, access, limits.clone(), Arc::new(store::NoObserver)).unwrap()
}

const SIZE: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(20);

async fn server_with_an_object() -> (Server, store::Version) {
    let server = Server::memory(BUCKET).await.unwrap();
    let meta = server.put(BUCKET, "p/o", content::bytes(1, 0..SIZE)).unwrap();
    (server, version(&meta))
}

fn always(fault: Fault) -> Script {
    Script { seed: 1, rules: vec![Rule::always(fault)] }
}

/// So many readers, and so many that list, of one object.
fn crowd(
    source: &Arc<dyn Source>,
    version: &store::Version,
    many: usize,
) -> Vec<JoinHandle<Result<(), store::StoreError>>> {
    let mut tasks = Vec::new();
    for _ in 0..many {
        let (s, v) = (source.clone(), version.clone());
        tasks.push(tokio::spawn(async move { read(&*s, b"o", &v, 0..SIZE).await.map(drop) }));
        let s = source.clone();
        tasks.push(tokio::spawn(async move { s.list(b"", None).await.map(drop) }));
    }
    tasks
}

async fn until(mut done: impl FnMut() -> bool) {
    let waiting = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LIMIT, waiting).await.expect("it never came to that");
}

async fn epoch(source: &Arc<dyn Source>, version: &store::Version) {
    let reads = futures::stream::iter(0..200_u64).for_each_concurrent(16, |n| async move {
        let bytes = read(&**source, b"o", version, n * 1000..n * 1000 + 5000).await.unwrap();
        assert_eq!(content::first_wrong_byte(1, n * 1000, &bytes), None);
        source.list(b"", None).await.unwrap();
    });
    tokio::time::timeout(LIMIT, reads).await.expect("kept waiting by another store");
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_endpoints_keep_no_other_endpoint_out() {
    let limits = patient(8);
    let mut frozen = Vec::new();
    // More of them than slots, whatever is lent: each takes what it can get, one after the other.
    for _ in 0..6 {
        let (server, version) = server_with_an_object().await;
        server.faults().set(always(Fault::Stall { ms: None }));
        let tasks = crowd(&with(&limits, &server, "s3://bucket/p"), &version, 100);
        until(|| server.stats().in_flight > 0).await;
        frozen.push((server, tasks));
    }
    let (server, version) = server_with_an_object().await;
    epoch(&with(&limits, &server, "s3://bucket/p"), &version).await;
    // All that may ever be under way: twice the limit.
    let held: u64 = frozen.iter().map(|(server, _)| server.stats().in_flight).sum();
    assert!(held <= 2 * 8, "{held} requests under way");
    frozen.iter().flat_map(|(_, tasks)| tasks).for_each(|task| task.abort());
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_stop_half_way_keep_nobody_out() {
    let limits = patient(8);
    let (stopped, version) = server_with_an_object().await;
    stopped.faults().set(always(Fault::StallBody { ms: None }));
    let tasks = crowd(&with(&limits, &stopped, "s3://bucket/p"), &version, 100);
    until(|| stopped.stats().in_flight > 0).await;
    let (server, version) = server_with_an_object().await;
    epoch(&with(&limits, &server, "s3://bucket/p"), &version).await;
    tasks.iter().for_each(|task| task.abort());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_tenant_does_to_a_store_stops_no_other_tenants_requests_to_it() {
    let limits = patient(8);
    let (server, version) = server_with_an_object().await;
    server.put(BUCKET, "q/o", content::bytes(1, 0..SIZE)).unwrap();
    let rules = vec![Rule::always(Fault::Status { code: 500, retry_after_s: None }).key("q")];
    server.faults().set(Script { seed: 1, rules });
    let tasks = crowd(&with(&limits, &server, "s3://bucket/q"), &version, 50);
    until(|| server.stats().answers.get(&500).copied().unwrap_or(0) >= 5).await;
    epoch(&with(&limits, &server, "s3://bucket/p"), &version).await;
    tasks.iter().for_each(|task| task.abort());
}

/// Requests that arrive at a store that refuses everything, and when it takes them again.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_readers_do_not_hammer_a_store_that_comes_back() {
    const READERS: usize = 500; // and as many that list
    let limits = Arc::new(Limits::new(LimitsConfig { egress: named(), ..LimitsConfig::default() }));
    let most = limits.config().requests as u64;
    let (server, version) = server_with_an_object().await;
    server.faults().set(always(Fault::Status { code: 503, retry_after_s: None }));
    let tasks = crowd(&with(&limits, &server, "s3://bucket/p"), &version, READERS);
    until(|| server.stats().total() >= 10).await;
    // A rate can only be seen over some time.
    let while_away = Duration::from_secs(6);
    tokio::time::sleep(while_away).await;
    let asked = server.stats().total();
    println!("{asked} requests in {while_away:?} at a store that refuses them all");
    // Those that were under way when it was found out, and then one at a time with growing pauses.
    assert!(asked <= most + 30, "{asked} requests by {} readers", 2 * READERS);
    server.reset_stats();
    server.faults().clear();
    let all = futures::future::try_join_all(tasks);
    let all = tokio::time::timeout(Duration::from_secs(60), all).await.expect("not all were served");
    assert!(all.unwrap().iter().all(Result::is_ok));
    // No reader asked twice, and never more at once than may.
    let stats = server.stats();
    assert!(stats.total() <= 2 * READERS as u64 + 1 && stats.in_flight_max <= most, "{stats:?}");
}

/// Remembers how long requests waited for their turn, and how long for the store.
#[derive(Debug, Default)]
struct Times(std::sync::Mutex<(Vec<Duration>, Vec<Duration>)>);

impl store::Observer for Times {
    fn queued(&self, _: &'static str, waited: Duration) {
        self.0.lock().unwrap().0.push(waited);
    }
    fn request(&self, _: &'static str, _: store::Outcome, latency: Duration, _: u64) {
        self.0.lock().unwrap().1.push(latency);
    }
    fn retry(&self, _: &'static str, _: store::RetryCause) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn the_time_in_our_own_queue_is_not_the_stores() {
    let limits = patient(2); // one for data
    let (server, version) = server_with_an_object().await;
    // A reader that does not read on keeps the slot, and the store waits for us.
    let first = with(&limits, &server, "s3://bucket/p").get(b"o", &version, 0..SIZE).await.unwrap();
    let mut hasty = spec(&server, "s3://bucket/p");
    hasty.parameters.store_timeout = Duration::from_secs(2);
    let times = Arc::new(Times::default());
    let keys = keys(ACCESS_KEY, SECRET_KEY);
    let source =
        store::open(&hasty, store::Access::fixed(&hasty, keys), limits.clone(), times.clone()).unwrap();
    let error = read(&*source, b"o", &version, 0..10).await.unwrap_err();
    assert!(matches!(&error, store::StoreError::Busy { .. }), "{error}");
    assert!(error.to_string().contains("all request slots of this node were taken"), "{error}");
    drop(first);
    read(&*source, b"o", &version, 0..10).await.unwrap();
    let (queued, at_store) = times.0.lock().unwrap().clone();
    assert!(queued[0] >= Duration::from_secs(2) && at_store.len() == 1, "{queued:?} {at_store:?}");
    // And of what the store does not answer the error tells both.
    server.faults().set(always(Fault::Stall { ms: None }));
    let error = read(&*source, b"o", &version, 0..10).await.unwrap_err().to_string();
    assert!(error.contains("no proper answer from the store after 2.0 s (0.0 s of them in"), "{error}");
}
