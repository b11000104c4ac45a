//! A source on a fresh server, and an observer that remembers.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub)] // Each test binary uses its own part.

pub mod sink;

use futures::TryStreamExt;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use store::{
    Access, EgressConfig, Kind, Limits, LimitsConfig, Observer, Outcome, RetryCause, Source, StoreError,
    Version,
};
use testkit::s3::{ACCESS_KEY, SECRET_KEY, Server};
use volume::{Credentials, EndpointPattern, Parameters, SourceUrl, VolumeId, VolumeSpec};

pub const BUCKET: &str = "bucket";

pub fn spec(server: &Server, source: &str) -> VolumeSpec {
    let parameters = Parameters {
        endpoint: Some(server.endpoint().parse().unwrap()),
        allow_http: true,
        store_timeout: Duration::from_secs(60),
        ..Parameters::default()
    };
    VolumeSpec { id: VolumeId::parse("v").unwrap(), source: SourceUrl::parse(source).unwrap(), parameters }
}

pub fn keys(id: &str, secret: &str) -> Credentials {
    Credentials::from_secrets([("accessKeyId", id), ("secretAccessKey", secret)]).unwrap()
}

/// Short enough that a test can wait for a stall.
pub fn quick() -> LimitsConfig {
    LimitsConfig { stall_timeout: Duration::from_millis(300), egress: named(), ..LimitsConfig::default() }
}

/// The servers of tests are on this machine, which an operator must name.
pub fn named() -> EgressConfig {
    let entries = ["http://127.0.0.1:*", "https://127.0.0.1:*"];
    let named = entries.map(|entry| EndpointPattern::parse(entry).unwrap()).to_vec();
    EgressConfig { named, ..EgressConfig::default() }
}

pub fn open(spec: &VolumeSpec, limits: LimitsConfig, observer: Arc<dyn Observer>) -> Arc<dyn Source> {
    let access = Access::fixed(spec, keys(ACCESS_KEY, SECRET_KEY));
    store::open(spec, access, Arc::new(Limits::new(limits)), observer).unwrap()
}

pub fn source(server: &Server) -> Arc<dyn Source> {
    open(&spec(server, "s3://bucket"), quick(), Arc::new(store::NoObserver))
}

pub async fn read(
    source: &dyn Source,
    path: &[u8],
    version: &Version,
    range: Range<u64>,
) -> Result<Vec<u8>, StoreError> {
    let mut stream = source.get(path, version, range).await?;
    let mut bytes = Vec::new();
    while let Some(piece) = stream.try_next().await? {
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

pub fn version(meta: &testkit::s3::Meta) -> Version {
    Version(meta.etag.clone())
}

#[derive(Debug, Default)]
pub struct Log {
    pub requests: Mutex<Vec<(&'static str, Outcome, u64)>>,
    pub retries: Mutex<Vec<(&'static str, RetryCause)>>,
}

impl Observer for Log {
    fn request(&self, op: &'static str, outcome: Outcome, _: Duration, bytes: u64) {
        self.requests.lock().unwrap().push((op, outcome, bytes));
    }
    fn retry(&self, op: &'static str, cause: RetryCause) {
        self.retries.lock().unwrap().push((op, cause));
    }
}

/// Names that POSIX allows and that some store, library or URL parser has trouble with.
pub const ODD_KEYS: [&str; 30] = [
    "space in name",
    " leading",
    "trailing ",
    "per%cent",
    "%41",
    "%2F",
    "plus+plus",
    "a&b=c",
    "hash#",
    "question?",
    "semi;colon",
    "quote\"'",
    "back\\slash",
    "日本",
    "emoji 🦀",
    "new\nline",
    "tab\t",
    "\u{1}\u{7f}",
    "colon:at@",
    "tilde~",
    "*star*",
    "...",
    "..a",
    ".hidden",
    "a,b",
    "[x]{y}|z",
    "<xml>&amp;",
    "$dollar",
    "(paren)!",
    "e\u{301}",
];

/// All pages of one directory.
pub async fn listed(source: &dyn Source, dir: &str) -> BTreeMap<Vec<u8>, Kind> {
    let (mut found, mut token) = (BTreeMap::new(), None);
    loop {
        let page = source.list(dir.as_bytes(), token.as_deref()).await.unwrap();
        found.extend(page.entries.into_iter().map(|entry| (entry.name, entry.kind)));
        token = page.next;
        if token.is_none() {
            return found;
        }
    }
}

/// Answers each request with what `answer` makes of it.
pub async fn answering(answer: impl Fn(&str) -> String + Send + 'static) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (mut head, mut piece) = (Vec::new(), [0; 4096]);
            while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                match stream.read(&mut piece).await {
                    Ok(0) | Err(_) => break,
                    Ok(read) => head.extend_from_slice(&piece[..read]),
                }
            }
            // A body that is not read makes a reset of the answer.
            let end = head.windows(4).position(|end| end == b"\r\n\r\n").map_or(head.len(), |end| end + 4);
            let lower = String::from_utf8_lossy(&head[..end]).to_ascii_lowercase();
            let length =
                lower.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
            while head.len() < end + length.unwrap_or(0_usize) {
                match stream.read(&mut piece).await {
                    Ok(0) | Err(_) => break,
                    Ok(read) => head.extend_from_slice(&piece[..read]),
                }
            }
            let text = answer(&String::from_utf8_lossy(&head));
            let _ = stream.write_all(text.as_bytes()).await;
        }
    });
    format!("http://{address}")
}

pub fn reply(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
}
