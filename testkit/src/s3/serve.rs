//! Connections: accept, count, ask the fault script, hand the request to `s3s` or to who speaks its protocol.

use super::adapter::{self, Asked};
use super::body::{Answer, Socket};
use super::checksums::Sums;
use super::classify::classify;
use super::control::control;
use super::encryption::{self, Names, Wrong};
use super::execute::execute;
use super::incoming;
use super::oss::Denied;
use super::shared::{Shared, Speaks};
use super::stats::Counters;
use super::writes::Raw;
use crate::faults::{Decision, Seen};
use async_trait::async_trait;
use futures::StreamExt;
use hyper::body::{Body, Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use s3s::auth::{S3Auth, SecretKey, SimpleAuth};
use s3s::{S3Result, s3_error};
use std::future::poll_fn;
use std::io;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

const CUSTOMER_KEY: Names = Names {
    key: "x-amz-server-side-encryption-customer-key",
    algorithm: "x-amz-server-side-encryption-customer-algorithm",
    digest: "x-amz-server-side-encryption-customer-key-md5",
    digested: encryption::md5,
};

/// As AWS refuses them.
fn opens(headers: &http::HeaderMap, held: Option<&str>) -> Result<(), Denied> {
    let bad = |code, message| Err((StatusCode::BAD_REQUEST, code, message));
    match encryption::open(headers, &CUSTOMER_KEY, held) {
        Ok(()) => Ok(()),
        Err(Wrong::Missing) => bad(
            "InvalidRequest",
            "The object was stored using a form of Server Side Encryption. The correct parameters must be provided to retrieve the \
             object.",
        ),
        Err(Wrong::NotNeeded) => {
            bad("InvalidRequest", "The encryption parameters are not applicable to this object.")
        }
        Err(Wrong::Digest) => bad(
            "InvalidArgument",
            "The calculated MD5 hash of the key did not match the hash that was provided.",
        ),
        Err(Wrong::Other) => Err((StatusCode::FORBIDDEN, "AccessDenied", "Access Denied")),
    }
}

/// By this machine's clock `s3s` itself sees to it.
const SKEW_MAX: Duration = Duration::from_secs(15 * 60);

/// Who may not even ask `s3s`.
fn admit(parts: &mut http::request::Parts, shared: &Shared, op: &str) -> Result<(), Denied> {
    let oss = if let Speaks::Oss(oss) = &shared.speaks { Some(oss) } else { None };
    let payer = if oss.is_some() { "x-oss-request-payer" } else { "x-amz-request-payer" };
    let pays = parts.headers.get(payer).is_some_and(|who| who == "requester");
    if let Some(oss) = oss {
        oss.admit(parts, &shared.guard, op)?;
    }
    if oss.is_none() && shared.guard.clock_ahead > SKEW_MAX && parts.headers.contains_key("authorization") {
        let why = "the difference between the request time and the current time is too large";
        return Err((StatusCode::FORBIDDEN, "RequestTimeTooSkewed", why));
    }
    if oss.is_none() && matches!(op, "GetObject" | "HeadObject") {
        opens(&parts.headers, shared.guard.customer_key.as_deref())?;
    }
    match shared.guard.requester_pays && !pays {
        true => Err((StatusCode::FORBIDDEN, "AccessDenied", "whoever asks for these objects pays for them")),
        false => Ok(()),
    }
}

/// The answer to an unknown key that AWS gives; `SimpleAuth` alone says NotSignedUp.
pub(super) struct Auth(pub(super) SimpleAuth);

#[async_trait]
impl S3Auth for Auth {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        let found = self.0.lookup(access_key).cloned();
        found.ok_or_else(|| s3_error!(InvalidAccessKeyId, "the access key id does not exist"))
    }
}

pub(super) async fn accept(listener: TcpListener, shared: Shared) {
    // Dropping the set with this task ends every connection: a stopped server is really gone.
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                connections.spawn(connection(stream, shared.clone()));
            }
            // Out of descriptors, or the peer was faster: the next accept may do better.
            Err(e) => {
                tracing::warn!(error = %e, "accept");
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, shared: Shared) {
    shared.counters.lock().connections += 1;
    let _ = stream.set_nodelay(true);
    let socket = Socket(stream.as_raw_fd());
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move {
            let mut response = answer(request, shared.clone(), socket).await?;
            if !shared.guard.clock_ahead.is_zero() {
                let now = httpdate::fmt_http_date(shared.guard.now());
                let now = http::HeaderValue::try_from(now).expect("a time can be sent");
                response.headers_mut().insert("date", now);
            }
            Ok::<_, io::Error>(response)
        }
    });
    // Errors are what the script asked for, or the client's going away.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

/// An error makes hyper drop the connection without an answer.
async fn answer(request: Request<Incoming>, shared: Shared, socket: Socket) -> io::Result<Response<Answer>> {
    {
        let mut stats = shared.counters.lock();
        stats.in_flight += 1;
        stats.in_flight_max = stats.in_flight_max.max(stats.in_flight);
    }
    let in_flight = InFlight(Some(shared.counters.clone()));
    if request.uri().path().starts_with("/_") {
        let (status, text) = control(request, &shared).await;
        let body = Bytes::from(text);
        return Ok(in_flight.answer(status, body.into(), None, "", &Decision::default(), &shared, socket));
    }
    if let Some((name, value)) = shared.guard.gate
        && request.headers().get(name).is_none_or(|found| found != value)
    {
        let (status, body) = (StatusCode::FORBIDDEN, Bytes::from("the gateway lets nobody through without"));
        return Ok(in_flight.answer(status, body.into(), None, "", &Decision::default(), &shared, socket));
    }
    let (mut parts, body) = request.into_parts();
    let asked = match &shared.speaks {
        Speaks::S3 | Speaks::Oss(_) => classify(&parts),
        Speaks::Other(adapter) => {
            let asked = adapter.asked(&parts.method, parts.uri.path(), parts.uri.query().unwrap_or_default());
            if asked.op.is_empty() { Asked { op: "Other", ..asked } } else { asked }
        }
    };
    let (op, key) = (asked.op, asked.key.clone());
    let bucket = asked.bucket.clone();
    *shared.counters.lock().requests.entry(op.to_owned()).or_insert(0) += 1;
    // Each part of an upload is a request of its own, as each range of an object is.
    let range = parts.headers.get("range").and_then(|value| value.to_str().ok());
    let range = range.or(asked.value("partNumber")).unwrap_or_default();
    let decision = shared.faults.decide(Seen { op, key: &key, range });

    if !decision.latency.is_zero() {
        tokio::time::sleep(decision.latency).await;
    }
    if let Some(time) = decision.stall {
        shared.faults.stall(time).await;
    }
    if decision.reset {
        socket.reset_on_close();
        return Err(io::Error::other("scripted reset"));
    }
    let body = incoming::receive(body, op, &decision, &shared.faults, &shared.counters, socket).await?;
    let head = parts.method == Method::HEAD;
    if let Some((code, retry_after)) = decision.status {
        let status = StatusCode::from_u16(code).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
        let name = match code {
            503 => "SlowDown",
            429 => "TooManyRequests",
            _ => "InternalError",
        };
        let text = if head {
            String::new()
        } else {
            format!("<?xml version=\"1.0\"?><Error><Code>{name}</Code><Message>scripted</Message></Error>")
        };
        let quiet = Decision::default();
        let mut response =
            in_flight.answer(status, Bytes::from(text).into(), None, op, &quiet, &shared, socket);
        if let Some(seconds) = retry_after {
            response.headers_mut().insert("retry-after", seconds.into());
        }
        return Ok(response);
    }
    let asks = parts.headers.clone();
    let response = if let Speaks::Other(adapter) = &shared.speaks {
        adapter::answer(&**adapter, &parts, &asked, &shared.guard, &shared.buckets)
    } else {
        if let Err((status, code, message)) = admit(&mut parts, &shared, op) {
            let text = format!(
                "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
            );
            let text = if head { String::new() } else { text };
            let quiet = Decision::default();
            return Ok(in_flight.answer(status, Bytes::from(text).into(), None, op, &quiet, &shared, socket));
        }
        parts.extensions.insert(Raw(body.clone()));
        let request = Request::from_parts(parts, s3s::Body::from(body));
        match execute(&shared.s3, request, op, &decision, &shared.late).await? {
            Some(response) => response,
            None => {
                socket.reset_on_close();
                return Err(io::Error::other("scripted reset"));
            }
        }
    };
    let (mut parts, mut body) = response.into_parts();
    if op == "ListObjectsV2"
        && !matches!(shared.speaks, Speaks::Other(_))
        && let Some(bytes) = body.take_bytes()
    {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let claimed = super::service::unsigned_sizes(&text);
        let claimed = match &shared.speaks {
            Speaks::Oss(oss) => oss.listing(&claimed),
            _ => claimed,
        };
        // The listing's own length only changes with what `s3s` could not write.
        if claimed.len() != text.len() && parts.headers.contains_key("content-length") {
            parts.headers.insert("content-length", claimed.len().into());
        }
        body = Bytes::from(claimed).into();
    }
    let is_told = parts.headers.contains_key("x-amz-checksum-type");
    let tells = shared.checksums && !is_told && parts.status.is_success();
    if op == "GetObject" && parts.status.is_success() && (tells || decision.flipped_bit) {
        let whole = whole_object(&shared, &bucket, &key).await?;
        let sums = if tells { shared.speaks.sums() } else { Sums::Nobody };
        body = summed(&mut parts.headers, body, &whole, &asks, sums, &decision).await?;
    }
    if op == "HeadObject" && tells {
        let whole = whole_object(&shared, &bucket, &key).await?;
        parts.headers.extend(shared.speaks.sums().of(&asks, None, &whole));
    }
    let claimed = parts.headers.get("content-length").and_then(|value| value.to_str().ok());
    let length = claimed.and_then(|claimed| claimed.parse::<i64>().ok()).map(i64::cast_unsigned);
    if let Some(length) = length.filter(|_| head) {
        parts.headers.insert("content-length", length.into());
    }
    let length = length.or_else(|| body.size_hint().exact()).filter(|_| !head);
    if decision.changed_etag && parts.headers.contains_key("etag") {
        parts.headers.insert("etag", http::HeaderValue::from_static("\"scripted-other-etag\""));
    }
    if decision.changed_etag && parts.headers.contains_key("x-goog-generation") {
        parts.headers.insert("x-goog-generation", http::HeaderValue::from_static("1"));
    }
    if let Some(length) = length {
        let claimed = if decision.wrong_length { length.saturating_sub(1) } else { length };
        parts.headers.insert("content-length", claimed.into());
    }
    let mut response = in_flight.answer(parts.status, body, length, op, &decision, &shared, socket);
    *response.headers_mut() = parts.headers;
    Ok(response)
}

/// Stores tell the checksum of all of it beside a part of it.
async fn whole_object(shared: &Shared, bucket: &str, key: &str) -> io::Result<Vec<u8>> {
    let bucket = {
        let buckets = shared.buckets.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        buckets.get(bucket).cloned().ok_or_else(|| io::Error::other("no such bucket"))?
    };
    let meta = bucket.stat(key)?.ok_or_else(|| io::Error::other("no such object"))?;
    let mut pieces = bucket.read(key, &meta, 0..meta.size)?;
    let mut whole = Vec::new();
    while let Some(piece) = pieces.next().await {
        whole.extend_from_slice(&piece?);
    }
    Ok(whole)
}

/// The same body with what is told about it; and then, where the script says so, not quite the same.
async fn summed(
    headers: &mut HeaderMap,
    mut body: s3s::Body,
    whole: &[u8],
    asked: &HeaderMap,
    sums: Sums,
    decision: &Decision,
) -> io::Result<s3s::Body> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        if let Ok(data) = frame.map_err(io::Error::other)?.into_data() {
            bytes.extend_from_slice(&data);
        }
    }
    headers.extend(sums.of(asked, Some(&bytes), whole));
    if decision.flipped_bit && !bytes.is_empty() {
        let at = (bytes.len() - 1) as f64 * decision.place;
        bytes[at as usize] ^= 1;
    }
    Ok(Bytes::from(bytes).into())
}

/// Counts the request as under way until its body, or the future that would have made one, is gone.
struct InFlight(Option<Arc<Counters>>);

impl InFlight {
    fn answer(
        mut self,
        status: StatusCode,
        body: s3s::Body,
        length: Option<u64>,
        op: &str,
        decision: &Decision,
        shared: &Shared,
        socket: Socket,
    ) -> Response<Answer> {
        let counters = self.0.take().expect("taken only here, and self is consumed");
        if !op.is_empty() {
            *counters.lock().answers.entry(status.as_u16()).or_insert(0) += 1;
        }
        let known = length.or_else(|| body.size_hint().exact());
        let answer = Answer::new(body, known, op == "GetObject", decision, &shared.faults, socket, counters);
        let mut response = Response::new(answer);
        *response.status_mut() = status;
        if let Some(known) = known {
            response.headers_mut().insert("content-length", known.into());
        }
        response
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(counters) = &self.0 {
            counters.lock().in_flight -= 1;
        }
    }
}
