//! What only web servers do: forms of an index, manifests, pages that are none, redirects, times in seconds.

use crate::common::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use store::{Access, Kind, Limits, NoObserver, Observer, Source, StoreError, Version};
use testkit::content;
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::{Config, Index, Memory, Protocol, Server, Web};
use volume::{Credentials, Parameters, SourceUrl, VolumeId, VolumeSpec};

async fn server(index: Index) -> Server {
    let config = Config { protocol: Protocol::Web(Web { index }), anonymous: true, ..Config::default() };
    Server::start(config.bucket(BUCKET, Memory::default())).await.unwrap()
}

fn open_at(url: &str, manifest: Option<&str>, observer: Arc<dyn Observer>) -> Arc<dyn Source> {
    let parameters = Parameters {
        allow_http: true,
        manifest: manifest.map(str::to_owned),
        store_timeout: Duration::from_secs(4),
        ..Parameters::default()
    };
    let source = SourceUrl::parse(url).unwrap();
    let spec = VolumeSpec { id: VolumeId::parse("v").unwrap(), source, parameters };
    let access = Access::fixed(&spec, Credentials::anonymous());
    store::open(&spec, access, Arc::new(Limits::new(quick())), observer).unwrap()
}

fn quiet(url: &str) -> Arc<dyn Source> {
    open_at(url, None, Arc::new(NoObserver))
}

async fn check(source: &dyn Source) -> Result<(), StoreError> {
    source.check(Duration::from_secs(5)).await
}

fn names(found: &BTreeMap<Vec<u8>, Kind>) -> Vec<(&str, bool)> {
    found.iter().map(|(name, kind)| (std::str::from_utf8(name).unwrap(), *kind == Kind::Directory)).collect()
}

#[tokio::test]
async fn a_manifest_is_the_tree_of_a_server_that_makes_no_index() {
    let server = server(Index::None).await;
    let put = |key: &str| server.put(BUCKET, key, content::bytes(content::id(key), 0..500)).unwrap();
    let base = format!("{}/{BUCKET}", server.endpoint());
    put("sets/a b.tar");
    put("sets/deep/x/y");
    put("sets/not-listed");
    let manifest =
        |lines: &str| server.put(BUCKET, "sets/files.tsv", format!("TsvHttpData-1.0\n{lines}")).unwrap();
    manifest(&format!("{base}/sets/a%20b.tar\t500\tx\n{base}/sets/deep/x/y\ndeep/gone\n"));
    let log = Arc::new(Log::default());
    let source = open_at(&format!("{base}/sets"), Some("files.tsv"), log.clone());
    check(&*source).await.unwrap();
    assert_eq!(names(&listed(&*source, "").await), [("a b.tar", false), ("deep", true)]);
    // What is listed and not there is not shown.
    assert_eq!(names(&listed(&*source, "deep").await), [("x", true)]);
    for (path, kind) in
        [("deep/x", Some(true)), ("deep/x/y", Some(false)), ("not-listed", None), ("deep/gone", None)]
    {
        let found = source.head(path.as_bytes()).await.unwrap();
        assert_eq!(found.map(|entry| entry.kind == Kind::Directory), kind, "{path}");
    }
    let Kind::File { size, version } = source.head(b"a b.tar").await.unwrap().unwrap().kind else { panic!() };
    assert_eq!(
        read(&*source, b"a b.tar", &version, 0..size).await.unwrap(),
        content::bytes(content::id("sets/a b.tar"), 0..500)
    );
    assert!(matches!(source.list(b"nothing", None).await, Err(StoreError::NotFound { .. })));

    // Sent once (all have waited for its second to end), and again when it has changed.
    let lists = || {
        log.requests
            .lock()
            .unwrap()
            .iter()
            .filter(|(op, ..)| *op == "list")
            .map(|(.., bytes)| *bytes)
            .collect::<Vec<_>>()
    };
    let before = lists().len();
    listed(&*source, "").await;
    listed(&*source, "").await;
    assert_eq!(lists()[before + 1..], [0], "{:?}", lists());
    manifest("deep/x/y\n");
    assert_eq!(names(&listed(&*source, "").await), [("deep", true)]);

    manifest(&format!("{base}/elsewhere/x\n"));
    let error = check(&*source).await.unwrap_err().to_string();
    assert!(error.contains("line 2 of the manifest"), "{error}");
    let error = check(&*open_at(&base, Some("nothing.tsv"), Arc::new(NoObserver))).await.unwrap_err();
    assert!(matches!(&error, StoreError::NotFound { what, .. } if what.ends_with("nothing.tsv")), "{error}");
}

#[tokio::test]
async fn a_large_directory_is_fetched_once_for_all_its_pages() {
    let server = server(Index::Json).await;
    for k in 0..3_500 {
        server.put(BUCKET, &format!("d/{k:04}"), "").unwrap();
    }
    let source = quiet(&format!("{}/{BUCKET}", server.endpoint()));
    check(&*source).await.unwrap();
    assert_eq!(
        server.stats().requests.get("ListObjectsV2"),
        Some(&1),
        "a publish asks for the source's directory once"
    );
    server.reset_stats();
    assert_eq!(listed(&*source, "d").await.len(), 3_500);
    assert_eq!(server.stats().requests.get("ListObjectsV2"), Some(&1), "{:?}", server.stats().requests);
    // A page whose directory was forgotten meanwhile is fetched anew, and goes on by name.
    let page = source.list(b"d", None).await.unwrap();
    let other = quiet(&format!("{}/{BUCKET}", server.endpoint()));
    let next = other.list(b"d", page.next.as_deref()).await.unwrap();
    assert_eq!(next.entries[0].name, b"1000");
}

#[tokio::test]
async fn a_server_that_is_slow_tells_a_directory_in_parts_and_each_in_time() {
    let server = server(Index::Html).await;
    for name in ["a", "b", "c"] {
        server.put(BUCKET, &format!("d/{name}"), name).unwrap();
    }
    let source = quiet(&format!("{}/{BUCKET}", server.endpoint()));
    check(&*source).await.unwrap();
    let stalled = Rule::always(Fault::Stall { ms: None }).op("HeadObject").key("d/b");
    server.faults().set(Script { seed: 1, rules: vec![stalled] });
    let begun = tokio::time::Instant::now();
    let page = source.list(b"d", None).await.unwrap();
    assert_eq!(page.entries.iter().map(|entry| entry.name.as_slice()).collect::<Vec<_>>(), [b"a"]);
    let stuck = source.list(b"d", page.next.as_deref()).await;
    assert!(matches!(stuck, Err(StoreError::Unavailable { .. })), "{stuck:?}");
    // Two pages of four seconds each, whatever the number of files.
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    server.faults().set(Script::default());
    server.faults().release();
    let rest = source.list(b"d", page.next.as_deref()).await.unwrap();
    assert_eq!((rest.entries.len(), rest.next), (2, None));
}

#[tokio::test]
async fn a_server_whose_index_becomes_another_goes_on() {
    let form = Arc::new(AtomicUsize::new(0));
    let now = form.clone();
    let endpoint = answering(move |head| {
        let dav = "<multistatus><response><href>/</href><propstat><prop><resourcetype><collection/></resourcetype></prop></propstat>\
                   </response><response><href>/x</href><propstat><prop><getcontentlength>7</getcontentlength>\
                   <getlastmodified>Wed, 21 Oct 2015 07:28:00 GMT</getlastmodified></prop></propstat></response></multistatus>";
        match (head.split(' ').next(), now.load(Ordering::SeqCst)) {
            (Some("PROPFIND"), 0) => reply("207 Multi-Status", dav),
            (Some("PROPFIND"), _) => reply("405 Method Not Allowed", ""),
            (Some("HEAD"), _) => {
                format!("HTTP/1.1 200 OK\r\ncontent-length: 7\r\n{THEN}connection: close\r\n\r\n")
            }
            (_, 1) => {
                reply("200 OK\r\ncontent-type: text/html", "<title>Index of /</title><a href='x'>x</a>")
            }
            _ => reply("200 OK\r\ncontent-type: application/json", r#"[{"name": "x", "type": "file"}]"#),
        }
    });
    let endpoint = endpoint.await;
    let source = quiet(&endpoint);
    for expected in [0, 1, 2, 1] {
        form.store(expected, Ordering::SeqCst);
        // The first answer that does not fit is an error; the form is found anew.
        let first = source.list(b"", None).await;
        assert!(first.is_ok() || expected == 1, "{expected}: {first:?}");
        assert_eq!(names(&listed(&*source, "").await), [("x", false)], "{expected}");
    }
    // Look-ups alone find it, too; and the source's own directory is asked for once.
    form.store(0, Ordering::SeqCst);
    let source = quiet(&endpoint);
    assert!(source.head(b"x").await.unwrap().is_some());
    form.store(1, Ordering::SeqCst);
    assert!(source.head(b"x").await.is_err());
    assert!(source.head(b"x").await.unwrap().is_some());
}

#[tokio::test]
async fn a_page_that_is_no_index_hides_no_file() {
    let pages = Arc::new(Mutex::new(String::new()));
    let shown = pages.clone();
    let endpoint = answering(move |head| {
        let page = shown.lock().unwrap().clone();
        match head.split(' ').next() {
            Some("PROPFIND") => reply("405 Method Not Allowed", ""),
            Some("HEAD") => {
                "HTTP/1.1 200 OK\r\ncontent-length: 7\r\nlast-modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\
                             connection: close\r\n\r\n"
                    .to_owned()
            }
            _ => reply("200 OK\r\ncontent-type: text/html", &page),
        }
    });
    let source = quiet(&format!("{}/sets", endpoint.await));
    let page =
        |title: &str| format!("<html><title>{title}</title><a href=\"x\">x</a><a href=\"y/\">y</a></html>");
    *pages.lock().unwrap() = page("Index of /sets/");
    assert_eq!(names(&listed(&*source, "").await), [("x", false), ("y", true)]);
    for title in ["Log in to the airport", "Welcome", ""] {
        *pages.lock().unwrap() = page(title);
        let error = source.list(b"", None).await.unwrap_err();
        assert!(
            matches!(error, StoreError::Malformed { .. }) && error.to_string().contains("autoindex"),
            "{error}"
        );
        assert!(check(&*source).await.is_err());
    }
    *pages.lock().unwrap() = String::new();
    assert!(source.list(b"", None).await.is_err());
}

const THEN: &str = "last-modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n";

#[tokio::test]
async fn a_redirect_is_followed_nowhere_and_says_where_it_leads() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let elsewhere = answering(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        reply("200 OK", "")
    })
    .await;
    let to = elsewhere.clone();
    let endpoint = answering(move |head| match head.split(' ').collect::<Vec<_>>()[..] {
        ["PROPFIND", ..] => reply("405 Method Not Allowed", ""),
        [_, "/sets/", ..] => reply(
            "200 OK\r\ncontent-type: text/html",
            "<title>Index of /</title><a href='moved'>m</a><a href='inner'>i</a><a href='secret'>s</a><a href='bare'>b</a>\
             <a href='empty'>e</a>",
        ),
        [_, "/sets/moved", ..] => reply(&format!("302 Found\r\nlocation: {to}/sets/moved"), ""),
        // As behind a proxy: its own name is another one.
        [_, "/sets/inner", ..] => {
            reply("301 Moved Permanently\r\nlocation: http://inner:8080/sets/inner/", "")
        }
        [_, "/sets/secret", ..] => reply("403 Forbidden", ""),
        // Made when it is asked for.
        [_, "/sets/bare", ..] => "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nx".to_owned(),
        // As Apache tells of an empty file.
        ["HEAD", "/sets/empty", ..] => format!("HTTP/1.1 200 OK\r\nconnection: close\r\n{THEN}\r\n"),
        [_, "/sets/empty", ..] => reply(&format!("200 OK\r\n{}", THEN.trim_end()), ""),
        _ => reply("404 Not Found", ""),
    });
    let source = quiet(&format!("{}/sets", endpoint.await));
    let page = source.list(b"", None).await.unwrap();
    let found: Vec<_> =
        page.entries.iter().map(|entry| (entry.name.as_slice(), entry.kind == Kind::Directory)).collect();
    assert_eq!(found, [(&b"empty"[..], false), (b"inner", true)]);
    let hidden = page.unnameable.join("\n");
    for words in [
        &format!("moved (the server sends this to {elsewhere},"),
        "secret (may not be read)",
        "bare (the server tells no length",
    ] {
        assert!(hidden.contains(words), "{hidden}");
    }
    let error = source.head(b"moved").await.unwrap_err().to_string();
    assert!(error.contains(&elsewhere), "{error}");
    assert_eq!(asked.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_file_that_changed_in_this_second_is_read_when_the_next_change_would_be_seen() {
    let answers = Arc::new(AtomicUsize::new(0));
    let count = answers.clone();
    let log = Arc::new(Log::default());
    let endpoint = answering(move |_| {
        // The second ends with the third answer.
        let second = if count.fetch_add(1, Ordering::SeqCst) < 2 { 0 } else { 1 };
        format!(
            "HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-3/4\r\ncontent-length: 4\r\nconnection: close\r\n\
             last-modified: Wed, 21 Oct 2015 07:28:00 GMT\r\ndate: Wed, 21 Oct 2015 07:28:0{second} GMT\r\n\r\nabcd"
        )
    });
    let source = open_at(&endpoint.await, None, log.clone());
    assert_eq!(read(&*source, b"x", &Version("1445412480-4".into()), 0..4).await.unwrap(), b"abcd");
    assert_eq!(answers.load(Ordering::SeqCst), 3);
    let retries = log.retries.lock().unwrap().clone();
    assert_eq!(retries, [("get", store::RetryCause::Unsettled); 2]);
}

#[tokio::test]
async fn a_server_that_serves_no_ranges_or_packs_what_it_sends_is_found_at_publish() {
    for (answer, words) in [
        ("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n", "serves no ranges"),
        (
            "HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-0/4\r\ncontent-length: 1\r\ncontent-encoding: gzip\r\n",
            "packs",
        ),
    ] {
        let endpoint = answering(move |head| match head.split(' ').next() {
            Some("PROPFIND") => reply("501 Not Implemented", ""),
            Some("HEAD") => {
                "HTTP/1.1 200 OK\r\ncontent-length: 4\r\nlast-modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\
                             connection: close\r\n\r\n"
                    .to_owned()
            }
            _ if head.contains(" / ") => {
                reply("200 OK\r\ncontent-type: text/html", "<title>Index of /</title><a href='x'>x</a>")
            }
            _ => format!(
                "{answer}last-modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nconnection: close\r\n\r\nabcd"
            ),
        });
        let error = check(&*quiet(&endpoint.await)).await.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
