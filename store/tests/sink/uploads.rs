//! Uploads that nobody has completed: what a store says of them is believed as far as it can be ended without harm.

use crate::common::sink::{body, write};
use crate::common::{BUCKET, answering, open, quick, spec};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use store::{Leftover, LimitsConfig, NoObserver, Sink, StoreError};
use testkit::s3::{ACCESS_KEY, Config, Key, Memory, Rights, SECRET_KEY, Server};

const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
const NOW: &str = "date: Fri, 30 Jan 2026 12:00:00 GMT\r\n";
const OLD: &str = "2026-01-20T00:00:00.000Z";

fn sink(server: &Server, source: &str) -> Arc<dyn Sink> {
    let limits = LimitsConfig { stall_timeout: Duration::from_secs(20), ..quick() };
    open(&spec(server, source), limits, Arc::new(NoObserver)).sink().unwrap()
}

fn upload(key: &str, id: &str, initiated: &str) -> String {
    let initiated = match initiated {
        "" => String::new(),
        time => format!("<Initiated>{time}</Initiated>"),
    };
    format!("<Upload><Key>{key}</Key><UploadId>{id}</UploadId>{initiated}</Upload>")
}

fn page(date: &str, uploads: &str, next: Option<(&str, &str)>) -> String {
    let more = next.map_or(String::new(), |(key, id)| {
        format!(
            "<IsTruncated>true</IsTruncated><NextKeyMarker>{key}</NextKeyMarker>\
             <NextUploadIdMarker>{id}</NextUploadIdMarker>"
        )
    });
    let body = format!("<ListMultipartUploadsResult>{more}{uploads}</ListMultipartUploadsResult>");
    answer("200 OK", date, &body)
}

fn answer(status: &str, date: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\n{date}content-length: {length}\r\nconnection: close\r\n\r\n{body}")
}

/// What is found at a store that answers so, the how-many-th request it is, and how many there were.
async fn found(
    answer: impl Fn(u64) -> String + Send + Sync + 'static,
) -> (Result<Vec<Leftover>, StoreError>, u64) {
    let asked = Arc::new(AtomicU64::new(0));
    let counted = asked.clone();
    let endpoint = answering(move |request| {
        assert!(request.starts_with("GET") && request.contains("uploads="), "{request}");
        answer(counted.fetch_add(1, Ordering::Relaxed))
    })
    .await;
    let honest = Server::memory(BUCKET).await.unwrap();
    let mut spec = spec(&honest, "s3://bucket/v");
    spec.parameters.endpoint = Some(endpoint.parse().unwrap());
    let sink = open(&spec, quick(), Arc::new(NoObserver)).sink().unwrap();
    let found = sink.leftovers(WEEK).await;
    (found, asked.load(Ordering::Relaxed))
}

fn named(found: &[Leftover]) -> Vec<(&str, &str)> {
    let text = |path| std::str::from_utf8(path).unwrap();
    found.iter().map(|leftover| (text(&*leftover.upload.path), &*leftover.upload.id)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_of_one_volume_are_told_page_by_page_and_end_without_the_neighbours() {
    let config = Config { page_max: 2, ..Config::default() };
    let server = Server::start(config.bucket(BUCKET, Memory::default())).await.unwrap();
    let (ours, other) = (sink(&server, "s3://bucket/team/v"), sink(&server, "s3://bucket/team/v-2"));
    let whole = sink(&server, "s3://bucket");
    for path in [&b"a"[..], b"a", b"a", b"a/b", b"c"] {
        let upload = ours.begin(path, &write()).await.unwrap();
        ours.part(&upload, 1, &body(b"x")).await.unwrap();
    }
    other.begin(b"a", &write()).await.unwrap();
    whole.begin(b"team/v", &write()).await.unwrap();
    let found = ours.leftovers(Duration::ZERO).await.unwrap();
    assert_eq!(named(&found).iter().map(|(path, _)| *path).collect::<Vec<_>>(), ["a", "a", "a", "a/b", "c"]);
    assert_eq!(ours.leftovers(Duration::from_secs(3600)).await.unwrap(), []);
    assert_eq!(whole.leftovers(Duration::ZERO).await.unwrap(), [], "a bucket is no volume's own");
    for leftover in &found {
        ours.abandon(&leftover.upload).await.unwrap();
        ours.abandon(&leftover.upload).await.unwrap();
    }
    assert_eq!(ours.leftovers(Duration::ZERO).await.unwrap(), []);
    assert_eq!((other.leftovers(Duration::ZERO).await.unwrap().len(), server.stats().uploads_open), (1, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_outside_of_the_prefix_or_of_no_name_is_left_alone() {
    let keys = ["v-2/a", "v", "a", "v/", "v//a", "v/../w/a", "v/a/..", "/v/a", "V/a", "v/a"];
    let listed: String = keys.iter().map(|key| upload(key, "u", OLD)).collect();
    let ids = ["", "a b", "\u{1f600}"].map(|id| upload("v/b", id, OLD)).concat();
    let (found, _) = found(move |_| page(NOW, &format!("{listed}{ids}"), None)).await;
    assert_eq!(named(&found.unwrap()), [("a", "u")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_age_is_what_the_stores_own_clock_makes_it() {
    let listed = [
        upload("v/old", "1", OLD),
        upload("v/young", "2", "2026-01-29T12:00:00.000Z"),
        // Begun before the store's clock was put back.
        upload("v/later", "3", "2026-03-01T00:00:00.000Z"),
        upload("v/unknown", "4", ""),
        upload("v/odd", "5", "a week ago"),
        upload("v/limit", "6", "2026-01-23T12:00:00.000Z"),
        upload("v/just", "7", "2026-01-23T12:00:01.000Z"),
    ]
    .concat();
    let of = listed.clone();
    let (all, _) = found(move |_| page(NOW, &of, None)).await;
    let all = all.unwrap();
    assert_eq!(named(&all), [("old", "1"), ("limit", "6")]);
    assert_eq!(all[0].age, Duration::from_secs((10 * 24 + 12) * 3600));
    // It does not say what time it is, or says nothing of the kind: this node's clock is not asked.
    for date in ["", "date: now\r\n", "date: Fri, 30 Jan 2026\r\n"] {
        let of = listed.clone();
        let (all, _) = found(move |_| page(date, &of, None)).await;
        assert_eq!(all.unwrap(), [], "{date:?}");
    }
    // Put back by a month between two pages: what was begun meanwhile is of the future.
    let dates = [NOW, "date: Tue, 30 Dec 2025 12:00:00 GMT\r\n"];
    let (all, _) = found(move |number| {
        let (key, next) = if number == 0 { ("v/a", Some(("v/a", "1"))) } else { ("v/b", None) };
        page(dates[number.min(1) as usize], &upload(key, "1", OLD), next)
    })
    .await;
    assert_eq!(named(&all.unwrap()), [("a", "1")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_without_an_end_is_looked_at_so_far_and_no_further() {
    // Ever new keys, all of them young.
    let young = |number: u64| {
        let key = format!("v/{number:09}");
        page(NOW, &upload(&key, "u", "2026-01-30T00:00:00Z"), Some((&key, "u")))
    };
    let (all, asked) = found(young).await;
    assert_eq!((all.unwrap(), asked), (vec![], 100));
    // All of them old: no more than can be held are told.
    let old = |number: u64| {
        let key = |k: u64| format!("v/{number:06}-{k:03}");
        let uploads: String = (0..300).map(|k| upload(&key(k), "u", OLD)).collect();
        page(NOW, &uploads, Some((&key(299), "u")))
    };
    let (all, asked) = found(old).await;
    assert_eq!((all.unwrap().len(), asked), (1000, 4));
    // Pages that have nothing.
    let (all, asked) = found(|number| page(NOW, "", Some((&format!("v/{number:09}"), "")))).await;
    assert_eq!((all.unwrap(), asked), (vec![], 100));
    // The same page again, or one before it, or none that can be asked for.
    for markers in [[("v/b", "1"), ("v/b", "1")], [("v/b", "1"), ("v/a", "2")], [("v/b", "1"), ("", "")]] {
        let (all, asked) =
            found(move |number| page(NOW, &upload("v/a", "u", OLD), Some(markers[number.min(1) as usize])))
                .await;
        let error = all.unwrap_err();
        assert!(matches!(error, StoreError::Malformed { .. }), "{error}");
        assert!(error.to_string().contains("in circles") && asked == 2, "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_lists_no_uploads_says_so_once() {
    let error = |code: &str| format!("<Error><Code>{code}</Code><Message>m</Message></Error>");
    for (status, code) in [
        ("501 Not Implemented", "NotImplemented"),
        ("405 Method Not Allowed", "MethodNotAllowed"),
        ("403 Forbidden", "AccessDenied"),
    ] {
        let text = answer(status, NOW, &error(code));
        let (all, asked) = found(move |_| text.clone()).await;
        let error = all.unwrap_err();
        assert!(matches!(error, StoreError::Malformed { .. } | StoreError::Denied { .. }), "{error}");
        assert_eq!(asked, 1, "{status}");
    }
    let keys = vec![Key::new(ACCESS_KEY, SECRET_KEY, Rights::None)];
    let config = Config { keys, ..Config::default() }.bucket(BUCKET, Memory::default());
    let server = Server::start(config).await.unwrap();
    let denied = sink(&server, "s3://bucket/v").leftovers(WEEK).await;
    assert!(matches!(denied, Err(StoreError::Denied { .. })), "{denied:?}");
}
