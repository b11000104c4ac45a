//! A volume's directory goes with all that is in it, and nothing else does, whatever the store says.

use crate::common::sink::write;
use crate::common::{BUCKET, answering, keys, open, quick, reply, spec};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use store::{Access, Erased, Eraser, Limits, LimitsConfig, NoObserver, StoreError};
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::{ACCESS_KEY, Config, Key, Memory, Next, Rights, SECRET_KEY, Server};
use volume::{SourceUrl, VolumeSpec};

fn eraser(spec: &VolumeSpec) -> Eraser {
    let limits = LimitsConfig { stall_timeout: Duration::from_secs(20), ..quick() };
    let access = Access::fixed(spec, keys(ACCESS_KEY, SECRET_KEY));
    store::open_eraser(spec, access, Arc::new(Limits::new(limits)), Arc::new(NoObserver)).unwrap()
}

/// Whoever is asked says yes.
async fn erase(eraser: Eraser, erased: &Erased) -> Result<(), StoreError> {
    let done = eraser.erase(erased, &|| Box::pin(async { true })).await?;
    assert!(done);
    Ok(())
}

/// With the bucket, whose keys can be looked at.
async fn server(config: Config) -> (Server, Arc<Memory>) {
    let bucket = Arc::new(Memory::default());
    let mut config = config;
    config.buckets.insert(BUCKET.to_owned(), bucket.clone());
    (Server::start(config).await.unwrap(), bucket)
}

fn left(bucket: &Memory) -> BTreeSet<String> {
    use std::ops::Bound;
    use testkit::s3::Bucket;
    let mut keys = BTreeSet::new();
    let mut visit = |key: &str, _: &testkit::s3::Meta| {
        keys.insert(key.to_owned());
        Next::Continue
    };
    bucket.scan(Bound::Unbounded, &mut visit).unwrap();
    keys
}

const NEIGHBOURS: [&str; 6] =
    ["team/claim", "team/claim-2/x", "team/claim.txt", "team/", "other/team/claim/x", "x"];

fn put(server: &Server, keys: &[&str]) {
    for key in keys {
        server.put(BUCKET, key, "x").unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_that_is_below_goes_whatever_it_is_called_and_its_neighbours_stay() {
    let (server, bucket) = server(Config { page_max: 7, ..Config::default() }).await;
    put(&server, &NEIGHBOURS);
    let below = |name: &str| server.put(BUCKET, &format!("team/claim/{name}"), "x").unwrap();
    // Markers of directories, keys that POSIX cannot name, and those that a URL turns into other ones.
    for odd in [
        "",
        "d/",
        "d/f",
        "a//b",
        "../claim-2/x",
        "a/../../../x",
        "./x",
        "..",
        "\u{1}",
        "\u{ffff}/x",
        "<&>\n\r\t\"'",
        "ü +%2F",
    ] {
        below(odd);
    }
    for number in 0..60 {
        below(&format!("f/{number}"));
    }
    let spec = spec(&server, "s3://bucket/team/claim");
    // Uploads that a node has begun, and one of a neighbour's.
    let sink = open(&spec, quick(), Arc::new(NoObserver)).sink().unwrap();
    for path in [&b"big"[..], b"big", b"d/other"] {
        sink.begin(path, &write()).await.unwrap();
    }
    let neighbour = SourceUrl::parse("s3://bucket/team/claim-2").unwrap();
    let neighbour = VolumeSpec { source: neighbour, ..spec.clone() };
    let neighbours = open(&neighbour, quick(), Arc::new(NoObserver)).sink().unwrap();
    neighbours.begin(b"x", &write()).await.unwrap();

    let erased = Erased::default();
    erase(eraser(&spec), &erased).await.unwrap();
    assert_eq!(left(&bucket), NEIGHBOURS.map(str::to_owned).into());
    assert_eq!((erased.objects(), erased.uploads(), erased.left()), (72, 3, 0));
    assert!(!erased.keeps_versions());
    assert_eq!(server.stats().uploads_open, 1);
    // Again: nothing to do.
    erase(eraser(&spec), &erased).await.unwrap();
    assert_eq!((erased.objects(), server.stats().uploads_open), (72, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_busy_resets_and_loses_answers_is_asked_again() {
    let (server, bucket) = server(Config { page_max: 40, ..Config::default() }).await;
    put(&server, &NEIGHBOURS);
    for number in 0..400 {
        server.put(BUCKET, &format!("team/claim/{number}"), "x").unwrap();
    }
    let faults =
        [Fault::Status { code: 503, retry_after_s: None }, Fault::Reset, Fault::LostAnswer, Fault::Truncate];
    let rules = faults.map(|fault| Rule::with_probability(fault, 0.1)).into();
    server.faults().set(Script { seed: 7, rules });
    let erased = Erased::default();
    erase(eraser(&spec(&server, "s3://bucket/team/claim")), &erased).await.unwrap();
    assert_eq!(left(&bucket), NEIGHBOURS.map(str::to_owned).into());
    assert!(erased.objects() >= 400, "{}", erased.objects());
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_and_one_that_is_ended_are_no_harm() {
    let (server, bucket) = server(Config { page_max: 10, ..Config::default() }).await;
    put(&server, &NEIGHBOURS);
    for number in 0..300 {
        server.put(BUCKET, &format!("team/claim/{number}"), "x").unwrap();
    }
    let spec = spec(&server, "s3://bucket/team/claim");
    let (ended, erased) = (Arc::new(Erased::default()), Erased::default());
    let first = tokio::spawn({
        let (eraser, ended) = (eraser(&spec), ended.clone());
        async move { erase(eraser, &ended).await }
    });
    while ended.objects() == 0 {
        tokio::task::yield_now().await;
    }
    first.abort();
    let _ = first.await;
    let (one, other) = (eraser(&spec), eraser(&spec));
    let (one, other) = tokio::join!(erase(one, &erased), erase(other, &erased));
    one.unwrap();
    other.unwrap();
    assert_eq!(left(&bucket), NEIGHBOURS.map(str::to_owned).into());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_more_is_deleted_once_it_may_not_go_on() {
    let (server, bucket) = server(Config { page_max: 10, ..Config::default() }).await;
    for number in 10..45 {
        server.put(BUCKET, &format!("team/claim/{number}"), "x").unwrap();
    }
    let spec = spec(&server, "s3://bucket/team/claim");
    let asked = Arc::new(AtomicU64::new(0));
    let twice = {
        let asked = asked.clone();
        move || -> futures::future::BoxFuture<'static, bool> {
            let may = asked.fetch_add(1, Ordering::Relaxed) < 2;
            Box::pin(async move { may })
        }
    };
    let erased = Erased::default();
    assert!(!eraser(&spec).erase(&erased, &twice).await.unwrap());
    assert_eq!((erased.objects(), left(&bucket).len(), asked.load(Ordering::Relaxed)), (20, 15, 3));
    // Nobody is asked where nothing is to be done.
    bucket_is_emptied(&spec, &bucket).await;
    assert!(eraser(&spec).erase(&erased, &|| unreachable!("there is nothing to delete")).await.unwrap());
    // Uploads likewise.
    let sink = open(&spec, quick(), Arc::new(NoObserver)).sink().unwrap();
    sink.begin(b"big", &write()).await.unwrap();
    assert!(!eraser(&spec).erase(&erased, &|| Box::pin(async { false })).await.unwrap());
    assert_eq!(server.stats().uploads_open, 1);
}

async fn bucket_is_emptied(spec: &VolumeSpec, bucket: &Memory) {
    erase(eraser(spec), &Erased::default()).await.unwrap();
    assert_eq!(left(bucket), BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_may_not_delete_hears_what_it_takes_and_no_key() {
    for rights in [Rights::NoDelete, Rights::NoWrite, Rights::None] {
        let keys = vec![Key::new(ACCESS_KEY, SECRET_KEY, rights)];
        let (server, bucket) = server(Config { keys, ..Config::default() }).await;
        put(&server, &["team/claim/x"]);
        let error = erase(eraser(&spec(&server, "s3://bucket/team/claim")), &Erased::default()).await;
        let error = error.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, StoreError::Denied { .. }) && text.contains("s3:DeleteObject"), "{text}");
        assert!(!text.contains(ACCESS_KEY) && !text.contains(SECRET_KEY), "{text}");
        assert_eq!(left(&bucket).len(), 1, "{rights:?}");
    }
}

fn listing(keys: &[String], next: Option<&str>) -> String {
    let keys: String = keys
        .iter()
        .map(|key| format!("<Contents><Key>{key}</Key><Size>1</Size><ETag>\"e\"</ETag></Contents>"))
        .collect();
    let more = next.map_or(String::new(), |next| {
        format!("<IsTruncated>true</IsTruncated><NextContinuationToken>{next}</NextContinuationToken>")
    });
    reply("200 OK", &format!("<ListBucketResult>{keys}{more}</ListBucketResult>"))
}

/// At a store that answers listings so, and acknowledges whatever it is told to delete: what came of it, and what it
/// was told.
async fn told(list: impl Fn(&str, u64) -> String + Send + Sync + 'static) -> (StoreError, Vec<String>) {
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let (seen, number) = (asked.clone(), AtomicU64::new(0));
    let endpoint = answering(move |request| {
        let line = request.lines().next().unwrap_or_default().to_owned();
        if line.starts_with("GET") && line.contains("uploads=") {
            return reply("200 OK", "<ListMultipartUploadsResult></ListMultipartUploadsResult>");
        }
        if line.starts_with("GET") {
            return list(&line, number.fetch_add(1, Ordering::Relaxed));
        }
        seen.lock().unwrap().push(request.to_owned());
        reply("200 OK", "<DeleteResult></DeleteResult>")
    })
    .await;
    let honest = Server::memory(BUCKET).await.unwrap();
    let mut spec = spec(&honest, "s3://bucket/team/claim");
    spec.parameters.endpoint = Some(endpoint.parse().unwrap());
    let error = erase(eraser(&spec), &Erased::default()).await.unwrap_err();
    let asked = asked.lock().unwrap().clone();
    (error, asked)
}

fn is_malformed(error: &StoreError, why: &str) {
    assert!(matches!(error, StoreError::Malformed { .. }) && error.to_string().contains(why), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_listing_has_outside_the_prefix_is_never_deleted() {
    for stray in ["team/claim-2/x", "team/claim", "x", "", "/team/claim/x", "TEAM/claim/x"] {
        let (error, asked) =
            told(move |_, _| listing(&["team/claim/x".to_owned(), stray.to_owned()], None)).await;
        is_malformed(&error, "not below it");
        assert_eq!(asked, Vec::<String>::new(), "{stray:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_that_goes_round_in_circles_ends() {
    let (error, _) =
        told(|_, number| listing(&["team/claim/x".to_owned()], Some(&format!("t{number}")))).await;
    is_malformed(&error, "in circles");
    let (error, _) = told(|_, number| listing(&[format!("team/claim/{number:09}")], Some("the same"))).await;
    is_malformed(&error, "in circles");
    // Pages that never bring a key.
    let (error, _) = told(|_, number| listing(&[], Some(&format!("t{number}")))).await;
    is_malformed(&error, "empty pages");
}

/// As [`told`], of a store that lists no object and these uploads.
async fn told_uploads(page: impl Fn(u64) -> String + Send + Sync + 'static) -> (StoreError, u64) {
    let (aborted, number) = (Arc::new(AtomicU64::new(0)), AtomicU64::new(0));
    let counted = aborted.clone();
    let endpoint = answering(move |request| {
        if request.starts_with("DELETE") {
            counted.fetch_add(1, Ordering::Relaxed);
            return reply("204 No Content", "");
        }
        match request.lines().next().is_some_and(|line| line.contains("uploads=")) {
            true => reply("200 OK", &page(number.fetch_add(1, Ordering::Relaxed))),
            false => listing(&[], None),
        }
    })
    .await;
    let honest = Server::memory(BUCKET).await.unwrap();
    let mut spec = spec(&honest, "s3://bucket/team/claim");
    spec.parameters.endpoint = Some(endpoint.parse().unwrap());
    let error = erase(eraser(&spec), &Erased::default()).await.unwrap_err();
    (error, aborted.load(Ordering::Relaxed))
}

fn upload(key: &str) -> String {
    format!("<Upload><Key>{key}</Key><UploadId>u</UploadId></Upload>")
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_outside_the_prefix_are_left_alone_and_their_listing_ends() {
    let stray = || [upload("team/claim/x"), upload("team/claim-2/x")].concat();
    let page = move |_| format!("<ListMultipartUploadsResult>{}</ListMultipartUploadsResult>", stray());
    let (error, aborted) = told_uploads(page).await;
    is_malformed(&error, "not below it");
    assert_eq!(aborted, 0);
    let circle = |_| {
        let more = "<IsTruncated>true</IsTruncated><NextKeyMarker>team/claim/x</NextKeyMarker>\
                    <NextUploadIdMarker>u</NextUploadIdMarker>";
        let upload = upload("team/claim/x");
        format!("<ListMultipartUploadsResult>{more}{upload}</ListMultipartUploadsResult>")
    };
    is_malformed(&told_uploads(circle).await.0, "in circles");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_deletes_nothing_is_not_asked_for_ever() {
    let (error, asked) = told(|_, _| listing(&["team/claim/x".to_owned()], None)).await;
    is_malformed(&error, "there is always something again");
    assert!(!asked.is_empty() && asked.iter().all(|request| request.contains("<Key>team/claim/x</Key>")));
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_deletes_a_whole_bucket_or_what_is_no_bucket() {
    let server = Server::memory(BUCKET).await.unwrap();
    for source in ["s3://bucket", "gs://bucket/a", "file:///tmp/a", "oss://bucket/a"] {
        let spec = spec(&server, source);
        let access = Access::fixed(&spec, keys(ACCESS_KEY, SECRET_KEY));
        let limits = Arc::new(Limits::new(quick()));
        let refused = store::open_eraser(&spec, access, limits, Arc::new(NoObserver)).unwrap_err();
        assert!(matches!(refused, StoreError::Unsupported { .. }), "{source}: {refused}");
    }
}
