//! A store that means harm: what a tenant's own endpoint may answer to the platform's agent.
//!
//! It begins as a proper bucket, as it must to be mounted, and turns bad on command ([`Hostile::play`]). It
//! checks no signature: who asks it is not its concern.

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::future::{Future, pending};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Sleep;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Harm {
    /// Some files that can be read, in some directories.
    None,
    /// Objects that claim to be of up to 2^64 - 1 bytes. Whatever part is asked for is sent.
    HugeSizes,
    /// Page after page of names, directories among them, as long as an agent asks.
    EndlessListings,
    /// Bodies of one byte a second: of objects, and of the listings of directories.
    OneByteASecond,
    /// Bodies longer or shorter than what was listed, asked for or announced.
    WrongLengths,
    /// A key of 10 MB in a listing, or some of 1 MB.
    LongKeys,
    /// Every request has a token that has expired.
    Expired,
    /// A connection that is taken, and no answer.
    Silent,
}

impl Harm {
    /// All that is harmful.
    pub const ALL: [Self; 7] = [
        Self::HugeSizes,
        Self::EndlessListings,
        Self::OneByteASecond,
        Self::WrongLengths,
        Self::LongKeys,
        Self::Expired,
        Self::Silent,
    ];
}

/// Of objects that claim no other.
const OBJECT_BYTES: u64 = 200_000;
/// Of one proper directory; of one endless page.
const NAMES: [u64; 2] = [20, 1000];
const PIECE: usize = 64 << 10;
/// hyper throws away what it has not yet written when a body fails: long enough that it writes.
const FLUSH: Duration = Duration::from_millis(10);
const LONG_KEY: usize = 10_000_000;
/// Longest part of an object that is sent at once.
const PART_MAX: u64 = 64 << 20;

/// A running server; stops on drop.
#[derive(Debug)]
pub struct Hostile {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    harm: Mutex<Harm>,
    /// Requests since the last [`Hostile::play`].
    asked: AtomicU64,
    zeros: Bytes,
    /// A listing of one key that is 10 MB long.
    long_key: Bytes,
}

impl Hostile {
    /// Binds and serves on the current tokio runtime; harmless as yet.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let long_key = page(&[object(&"k".repeat(LONG_KEY), 1)], None);
        let shared = Arc::new(Shared {
            harm: Mutex::new(Harm::None),
            asked: AtomicU64::new(0),
            zeros: Bytes::from(vec![0; PIECE]),
            long_key: Bytes::from(long_key),
        });
        let acceptor = tokio::spawn(accept(listener, shared.clone()));
        Ok(Self { address, shared, acceptor })
    }

    /// `http://127.0.0.1:port`
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// From the next request on.
    pub fn play(&self, harm: Harm) {
        *self.shared.harm.lock().unwrap_or_else(PoisonError::into_inner) = harm;
        self.shared.asked.store(0, Relaxed);
    }

    /// Requests since the last [`Hostile::play`].
    pub fn asked(&self) -> u64 {
        self.shared.asked.load(Relaxed)
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                connections.spawn(connection(stream, shared.clone()));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await, // out of descriptors, say
        }
    }
}

async fn connection(stream: TcpStream, shared: Arc<Shared>) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(answer(&request, &shared).await) }
    });
    // Errors are what this server is for, or the client's going away.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn answer(request: &Request<Incoming>, shared: &Shared) -> Response<Payload> {
    let harm = *shared.harm.lock().unwrap_or_else(PoisonError::into_inner);
    let number = shared.asked.fetch_add(1, Relaxed);
    match harm {
        Harm::Silent => return pending().await,
        Harm::Expired => {
            let text =
                "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>";
            return response(StatusCode::FORBIDDEN, Payload::of(text.into()));
        }
        _ => {}
    }
    // /BUCKET?list-type=2&…, /BUCKET/KEY
    let key = request.uri().path().trim_start_matches('/').split_once('/').map_or("", |(_, key)| key);
    if key.is_empty() {
        let listing = listing(request.uri().query().unwrap_or_default(), harm, number, shared);
        return response(StatusCode::OK, listing);
    }
    get(request, key, harm, number, shared)
}

/// One page.
fn listing(query: &str, harm: Harm, number: u64, shared: &Shared) -> Payload {
    let value = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    let prefix = percent_encoding::percent_decode_str(value("prefix").unwrap_or_default());
    let prefix = prefix.decode_utf8_lossy();
    let from: u64 = value("continuation-token").and_then(|token| token.parse().ok()).unwrap_or(0);
    let [few, many] = NAMES;
    let sizes: [u64; 6] = [1 << 40, 1 << 60, i64::MAX as u64, u64::MAX, 0, OBJECT_BYTES];
    match harm {
        Harm::LongKeys if number.is_multiple_of(2) => return Payload::of(shared.long_key.clone()),
        Harm::LongKeys => {
            let keys: Vec<_> =
                (0..7).map(|n| object(&format!("{prefix}{}{n}", "k".repeat(1 << 20)), 1)).collect();
            return Payload::of(page(&keys, None).into());
        }
        Harm::EndlessListings => {
            // All keys in order, as a listing has them.
            let name = |n| format!("{prefix}n{:020}", from + n);
            let of = |n| if n % 100 == 0 { directory(&name(n)) } else { object(&name(n), OBJECT_BYTES) };
            let names: Vec<_> = (0..many).map(of).collect();
            return Payload::of(page(&names, Some(from + many)).into());
        }
        _ => {}
    }
    let size = |n: u64| if harm == Harm::HugeSizes { sizes[(n % 6) as usize] } else { OBJECT_BYTES };
    let file = |n| object(&format!("{prefix}f{n:03}"), size(n));
    let mut names: Vec<_> = (0..few).map(file).collect();
    let root = !prefix.contains("d0"); // its directories are d000 to d019
    if root {
        names.extend((0..few).map(|n| directory(&format!("{prefix}d{n:03}"))));
    }
    let all = Payload::of(page(&names, None).into());
    if harm == Harm::OneByteASecond && !root { all.slowly() } else { all }
}

/// An object, or a part of it.
fn get(
    request: &Request<Incoming>,
    key: &str,
    harm: Harm,
    number: u64,
    shared: &Shared,
) -> Response<Payload> {
    let range = request.headers().get("range").and_then(|value| value.to_str().ok());
    let range = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let range = range.and_then(|(from, to)| Some((from.parse::<u64>().ok()?, to.parse::<u64>().ok()?)));
    let (from, to) = range.unwrap_or((0, OBJECT_BYTES - 1));
    let whole = if harm == Harm::HugeSizes { u64::MAX } else { OBJECT_BYTES };
    let asked = (to.saturating_sub(from)).saturating_add(1).min(PART_MAX);
    let mut payload = Payload { left: asked, announced: asked, ..Payload::of(shared.zeros.clone()) };
    let mut content_range = format!("bytes {from}-{}/{whole}", from.saturating_add(asked - 1));
    match (harm, number % 5) {
        (Harm::WrongLengths, 0) => payload.left /= 2, // and the connection is closed
        (Harm::WrongLengths, 1) => (payload.left, payload.announced) = (asked * 2, asked * 2),
        (Harm::WrongLengths, 2) => payload.announced = asked / 2,
        (Harm::WrongLengths, 3) => content_range = format!("bytes 0-{}/7", u64::MAX),
        (Harm::WrongLengths, _) => (payload.left, payload.announced) = (0, 0),
        (Harm::OneByteASecond, _) => payload = payload.slowly(),
        _ => {}
    }
    if request.method() == Method::HEAD {
        payload.left = 0;
    }
    let status = if range.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let mut response = response(status, payload);
    let headers = response.headers_mut();
    let text =
        |text: String| HeaderValue::from_str(&text).expect("digits and names are a header's characters");
    headers.insert(ETAG, text(format!("\"{:x}\"", crate::content::id(name_of(key)))));
    if range.is_some() {
        headers.insert(CONTENT_RANGE, text(content_range));
    }
    response
}

/// Versions are those of names, so that an object has the one that was listed.
fn name_of(key: &str) -> String {
    percent_encoding::percent_decode_str(key).decode_utf8_lossy().into_owned()
}

fn object(key: &str, size: u64) -> String {
    format!(
        "<Contents><Key>{key}</Key><Size>{size}</Size><ETag>\"{:x}\"</ETag>\
         <LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>",
        crate::content::id(key)
    )
}

fn directory(key: &str) -> String {
    format!("<CommonPrefixes><Prefix>{key}/</Prefix></CommonPrefixes>")
}

fn page(entries: &[String], next: Option<u64>) -> String {
    let more = next.map_or("<IsTruncated>false</IsTruncated>".to_owned(), |next| {
        format!("<IsTruncated>true</IsTruncated><NextContinuationToken>{next}</NextContinuationToken>")
    });
    format!("<?xml version=\"1.0\"?><ListBucketResult>{}{more}</ListBucketResult>", entries.concat())
}

fn response(status: StatusCode, payload: Payload) -> Response<Payload> {
    let length = payload.announced;
    let mut response = Response::new(payload);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_LENGTH, length.into());
    response
}

/// So many bytes, whatever their header says: hyper learns nothing of their number.
struct Payload {
    left: u64,
    sent: u64,
    announced: u64,
    /// It ends before its announced end.
    short: bool,
    /// Sent again and again; of a text: all of it.
    piece: Bytes,
    /// Between single bytes, and before an end that comes too soon.
    pause: Option<Pin<Box<Sleep>>>,
}

impl Payload {
    fn of(text: Bytes) -> Self {
        let length = text.len() as u64;
        Self { left: length, sent: 0, announced: length, short: false, piece: text, pause: None }
    }

    fn slowly(self) -> Self {
        Self { pause: Some(Box::pin(tokio::time::sleep(Duration::ZERO))), ..self }
    }
}

impl Body for Payload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            if self.sent < self.announced && !std::mem::replace(&mut self.short, true) {
                self.pause = Some(Box::pin(tokio::time::sleep(FLUSH)));
            }
            let short = self.short;
            if let Some(pause) = self.pause.as_mut().filter(|_| short) {
                ready!(pause.as_mut().poll(context));
            }
            return Poll::Ready(None);
        }
        let mut most = self.left.min(self.piece.len() as u64);
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(context));
            pause.as_mut().reset(tokio::time::Instant::now() + Duration::from_secs(1));
            most = 1;
        }
        self.left -= most;
        self.sent += most;
        // Of a text that trickles the first byte over and over: it never becomes one.
        Poll::Ready(Some(Ok(Frame::data(self.piece.slice(..most as usize)))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// What comes within the time, and whether the connection was closed then.
    async fn ask(server: &Hostile, path: &str, limit: Duration) -> (Vec<u8>, bool) {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let head =
            format!("GET {path} HTTP/1.1\r\nhost: h\r\nrange: bytes=10-1009\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let closed = tokio::time::timeout(limit, stream.read_to_end(&mut answer)).await.is_ok();
        (answer, closed)
    }

    fn split(answer: &[u8]) -> (String, usize) {
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("an answer has a head");
        (String::from_utf8_lossy(&answer[..end]).into_owned(), answer.len() - end - 4)
    }

    #[tokio::test]
    async fn each_harm_is_what_it_says() {
        const LIST: &str = "/data?list-type=2&delimiter=%2F&prefix=";
        const LONG: Duration = Duration::from_secs(60);
        let server = Hostile::start().await.unwrap();
        let (proper, closed) = ask(&server, LIST, LONG).await;
        let text = String::from_utf8(proper).unwrap();
        assert!(
            closed && text.contains("<Key>f019</Key><Size>200000</Size>") && text.contains("d019/"),
            "{text}"
        );
        let (part, _) = ask(&server, "/data/f001", LONG).await;
        let (head, body) = split(&part);
        assert!(head.contains("content-range: bytes 10-1009/200000") && body == 1000, "{head} {body}");

        server.play(Harm::HugeSizes);
        let (huge, _) = ask(&server, LIST, LONG).await;
        assert!(String::from_utf8(huge).unwrap().contains(&format!("<Size>{}</Size>", u64::MAX)));

        server.play(Harm::EndlessListings);
        for from in [0, 1000, 123_000] {
            let (endless, _) = ask(&server, &format!("{LIST}&continuation-token={from}"), LONG).await;
            let text = String::from_utf8(endless).unwrap();
            assert!(text.contains("<IsTruncated>true</IsTruncated>"), "{from}");
            assert!(text.contains(&format!("<NextContinuationToken>{}<", from + 1000)), "{from}");
        }
        server.play(Harm::LongKeys);
        assert!(ask(&server, LIST, LONG).await.0.len() > LONG_KEY);

        server.play(Harm::WrongLengths);
        let mut wrong = 0;
        for _ in 0..5 {
            let (head, body) = split(&ask(&server, "/data/f001", LONG).await.0);
            wrong += usize::from(body != 1000 || !head.contains("bytes 10-1009/200000"));
        }
        assert_eq!(wrong, 5);
        server.play(Harm::Expired);
        let (expired, _) = ask(&server, LIST, LONG).await;
        assert!(String::from_utf8(expired).unwrap().contains("403 Forbidden"));

        let short = Duration::from_millis(100);
        server.play(Harm::OneByteASecond);
        let (slow, closed) = ask(&server, "/data/f001", short).await;
        assert!(!closed && split(&slow).1 < 100, "{slow:?}");
        server.play(Harm::Silent);
        let (none, closed) = ask(&server, LIST, short).await;
        assert!(none.is_empty() && !closed && server.asked() == 1);
    }
}
