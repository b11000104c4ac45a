//! One attempt at one request: built, signed, sent, its status judged.

use super::sending::{Progress, Sending};
use super::told::Told;
use crate::access::{Access, Question};
use crate::certificate;
use crate::dialect::encryption::{self, CustomerKey};
use crate::dialect::writes::Writes;
use crate::dialect::{Dialect, Object, Payload, Refusal, Signer, content_range, header};
use crate::dispatch::Lane;
use crate::egress::Refused;
use crate::keys::show;
use crate::limits::Limits;
use crate::observe::{Observer, RetryCause};
use crate::proxy::Proxy;
use crate::retry::{self, Attempts, Fault, chain};
use crate::sink::Body;
use crate::traffic::{Mover, Place};
use crate::{StoreError, Version};
use bytes::BytesMut;
use futures::FutureExt;
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, HeaderValue};
use http::{Method, Request, StatusCode};
use reqwest::{Response, Url};
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, timeout};
use volume::Credentials;

/// Everything that is the same for all requests of one source.
pub(super) struct Client {
    limits: Arc<Limits>,
    place: Place,
    observer: Arc<dyn Observer>,
    access: Arc<Access>,
    dialect: Arc<dyn Dialect>,
    /// The same, where it can be written to.
    writes: Option<Arc<dyn Writes>>,
    /// What the volume's parameters add to each request; never what is ours to say.
    extra: HeaderMap,
    told: Told,
    session: Mutex<Arc<Session>>,
}

/// What requests are sent with, of the credentials that it was made from: not made anew for each request, for each copy
/// of a secret stays in memory that was given back.
struct Session {
    credentials: Credentials,
    signer: Option<Arc<dyn Signer>>,
    /// What the store needs to open an object with: see [`CustomerKey`].
    key: HeaderMap,
    http: reqwest::Client,
}

/// Does a request need the key that an object is encrypted with?
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Opens {
    Object,
    /// It is read and written in one request.
    Both,
    Nothing,
}

impl Session {
    fn new(
        credentials: Credentials,
        dialect: &dyn Dialect,
        limits: &Limits,
    ) -> Result<Arc<Self>, StoreError> {
        let http = limits.client(&dialect.place().endpoint, &credentials)?;
        let signer = dialect.signer(&credentials)?;
        let key = match CustomerKey::of(&credentials) {
            None => HeaderMap::new(),
            Some(key) => dialect.with_key(&key).ok_or_else(|| StoreError::Invalid {
                what: dialect.place().shown.clone(),
                why: "this store takes no key of the customer's with a request: take customerKey out of the secret (what it \
                      encrypts with keys of its own, or of a key service, is read without)"
                    .into(),
            })?,
        };
        Ok(Arc::new(Self { credentials, signer, key, http }))
    }

    /// What each request carries in clear: stores like to repeat it.
    fn sent(&self) -> Vec<String> {
        let mut sent = self.signer.as_ref().map(|signer| signer.sent()).unwrap_or_default();
        let key =
            self.key.values().filter(|value| value.is_sensitive()).filter_map(|value| value.to_str().ok());
        sent.extend(key.map(str::to_owned));
        sent
    }
}

/// One request.
pub(super) struct Ask<'a> {
    pub(super) method: Method,
    pub(super) url: &'a Url,
    pub(super) headers: HeaderMap,
    /// Any other answer is a refusal.
    pub(super) takes: fn(&Url, StatusCode, &HeaderMap) -> bool,
    pub(super) opens: Opens,
}

/// What a request brings along.
pub(super) enum Sends<'a> {
    Nothing,
    Text(&'a str),
    File { body: &'a Body, with_md5: bool, progress: &'a Arc<Progress>, mover: Mover },
}

impl Sends<'_> {
    fn payload(&self) -> Payload {
        match self {
            Self::Nothing => Payload::Empty,
            Self::Text(text) => Payload::Digest(Sha256::digest(text).into()),
            Self::File { .. } => Payload::Unsigned,
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Text(text) => text.is_empty(),
            Self::File { body, .. } => body.is_empty(),
        }
    }

    fn body(&self) -> Option<reqwest::Body> {
        match self {
            Self::Nothing => None,
            Self::Text(text) => Some((*text).to_owned().into()),
            Self::File { body, with_md5, progress, .. } => {
                Some(reqwest::Body::wrap(Sending::new(body, *with_md5, (*progress).clone())))
            }
        }
    }

    fn broken(&self) -> Option<String> {
        if let Self::File { progress, .. } = self { progress.broken() } else { None }
    }

    /// The answer. None: for `patience` nothing was taken of the body, or nothing came after it.
    async fn followed<T>(&self, answer: impl Future<Output = T>, patience: Duration) -> Option<T> {
        let Self::File { progress, mover, .. } = self else { return timeout(patience, answer).await.ok() };
        tokio::pin!(answer);
        let (mut taken, mut since) = (0, Instant::now());
        loop {
            if let Ok(answer) = timeout(LOOK, &mut answer).await {
                return Some(answer);
            }
            let now = progress.taken();
            if now != taken {
                mover.moves(now - taken);
                (taken, since) = (now, Instant::now());
            }
            mover.waits();
            if since.elapsed() >= patience {
                return None;
            }
        }
    }
}

/// How often a body that is being sent is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// What most requests are answered with.
pub(super) fn content(_: &Url, status: StatusCode, _: &HeaderMap) -> bool {
    matches!(status, StatusCode::OK | StatusCode::PARTIAL_CONTENT)
}

/// An answer whose body has come.
pub(super) struct Whole {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: BytesMut,
}

/// What a first answer tells.
pub(super) struct Hello {
    pub(super) took: Duration,
    /// How far this node's clock is ahead of the store's, seconds; None: it tells no time.
    pub(super) ahead_s: Option<i64>,
}

impl Client {
    pub(super) fn new(
        dialect: Arc<dyn Dialect>,
        extra: HeaderMap,
        access: Arc<Access>,
        readers: &str,
        limits: Arc<Limits>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StoreError> {
        let session = Mutex::new(Session::new(access.credentials(), &*dialect, &limits)?);
        // Where requests really go: a bucket that is a host of its own is an endpoint of its own.
        let place = limits.place(&dialect.place().base.origin().ascii_serialization(), readers, 1);
        let told = Told::default();
        let writes = dialect.clone().writes();
        Ok(Self { limits, place, observer, access, dialect, writes, extra, told, session })
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }
    pub(super) fn told(&self) -> &Told {
        &self.told
    }
    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// What all attempts of one request have in common.
    pub(super) fn request<'a>(&'a self, op: &'static str, lane: Lane, what: &'a str) -> retry::Request<'a> {
        let stall_timeout = self.limits.config().stall_timeout;
        let (endpoint, place) = (self.endpoint(), &self.place);
        retry::Request { what, endpoint, op, place, lane, observer: &self.observer, stall_timeout }
    }

    /// A key as messages name it.
    pub(super) fn what(&self, key: &[u8]) -> String {
        format!("{}/{}", self.dialect.place().shown, show(key))
    }

    /// What no message may repeat.
    pub(super) fn secrets(&self) -> Vec<String> {
        self.session().map(|session| session.sent()).unwrap_or_default()
    }

    fn endpoint(&self) -> &str {
        &self.dialect.place().endpoint
    }

    fn proxy(&self) -> Option<&Proxy> {
        let endpoint = Url::parse(self.endpoint()).ok()?;
        self.limits.config().egress.proxy_of(&endpoint)
    }

    pub(super) fn dialect(&self) -> &dyn Dialect {
        &*self.dialect
    }

    /// Runs a small request until it is answered. An attempt's second value is the bytes of its answer.
    pub(super) async fn ask<'a, T, F>(
        &'a self,
        op: &'static str,
        what: &'a str,
        question: Question,
        attempt: impl Fn(Duration) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<(T, u64), Fault>> + Send + 'a,
    {
        let request = self.request(op, Lane::Metadata, what);
        let ((answer, bytes), _slot, mut meter) = Attempts::new(question).ask(&request, attempt).await?;
        meter.bytes = bytes;
        meter.end(crate::Outcome::Ok);
        Ok(answer)
    }

    /// The object, as the store tells it when it is looked at. None: it cannot be shown.
    pub(super) async fn look(
        &self,
        key: &[u8],
        what: &str,
        question: Question,
    ) -> Result<Option<Object>, StoreError> {
        let (method, url) = self.dialect.looking(key);
        let (method, url) = (&method, &url);
        let attempt = async |patience| {
            // What a store tells of an object in a body of its own, it tells without its key.
            let opens = if *method == Method::HEAD { Opens::Object } else { Opens::Nothing };
            let ask = Ask { method: method.clone(), url, headers: HeaderMap::new(), takes: content, opens };
            let response = self.send(ask, what, patience).await?;
            let (seen, bytes) = match *method {
                Method::HEAD => (self.dialect.seen(response.headers(), &[]), 0),
                _ => {
                    let headers = response.headers().clone();
                    let body = read_all(response, OBJECT_BYTES_MAX, patience).await?;
                    (self.dialect.seen(&headers, &body), body.len() as u64)
                }
            };
            Ok((seen.map_err(|why| Fault::retry(RetryCause::Malformed, why))?, bytes))
        };
        self.ask("head", what, question, |patience| attempt(patience).boxed()).await
    }

    /// A small answer as a whole.
    pub(super) async fn whole(&self, ask: Ask<'_>, what: &str, patience: Duration) -> Result<Whole, Fault> {
        let response = self.send(ask, what, patience).await?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = read_all(response, LISTING_BYTES_MAX, patience).await?;
        Ok(Whole { status, headers, body })
    }

    /// What the endpoint's name leads to; None: it is an address, or the proxy's to know.
    pub(super) async fn resolve(&self, patience: Duration) -> Option<Result<String, String>> {
        let base = &self.dialect.place().base;
        if self.proxy().is_some() {
            return None;
        }
        let Some(url::Host::Domain(name)) = base.host() else { return None };
        let port = base.port_or_known_default().unwrap_or(443);
        Some(match timeout(patience, tokio::net::lookup_host((name, port))).await {
            Err(_) => Err(format!("no name server answered for {name} within {} s", patience.as_secs())),
            Ok(Err(e)) => Err(format!("{name}: {e}")),
            Ok(Ok(found)) => {
                let addresses: Vec<_> = found.take(4).map(|address| address.ip().to_string()).collect();
                Ok(format!("{name} is {}", addresses.join(", ")))
            }
        })
    }

    /// A request that asks for nothing and is not signed: whatever the answer is, there is one. Err: there is none, and why.
    pub(super) async fn hello(&self, patience: Duration) -> Result<Hello, String> {
        let session = self.session().map_err(|e| e.to_string())?;
        let (base, begun) = (self.dialect.place().base.clone(), Instant::now());
        let mut request = reqwest::Request::new(Method::HEAD, base);
        *request.headers_mut() = self.extra.clone();
        let response = match timeout(patience, session.http.execute(request)).await {
            Err(_) => return Err(format!("{} sent nothing for {} s", self.endpoint(), patience.as_secs())),
            Ok(Err(e)) => {
                return Err(match self.unreachable(&session, &self.dialect.place().shown, e) {
                    Fault::Fail(error) => error.to_string(),
                    Fault::Retry { detail, .. } => detail,
                });
            }
            Ok(Ok(response)) => response,
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let theirs = header(response.headers(), http::header::DATE).and_then(crate::dialect::parse_http);
        let ahead_s =
            theirs.map(|ns| i64::try_from(now).unwrap_or(i64::MAX).saturating_sub(ns / 1_000_000_000));
        Ok(Hello { took: begun.elapsed(), ahead_s })
    }

    /// The answer to a GET of `range` of this version, its headers checked against the question.
    pub(super) async fn get(
        &self,
        url: &Url,
        what: &str,
        wanted: &Version,
        range: Range<u64>,
        patience: Duration,
    ) -> Result<Response, Fault> {
        let headers = self.dialect.reading(wanted, &range).ok_or_else(|| {
            Fault::Fail(StoreError::malformed(what, "its version cannot be written into a header"))
        })?;
        let ask = Ask { method: Method::GET, url, headers, takes: content, opens: Opens::Object };
        let response = self.send(ask, what, patience).await?;
        if !self.dialect.is_as_stored(response.headers()) {
            let why = "the store, or a proxy before it, packs or unpacks what it sends: its bytes are not the object's";
            return Err(Fault::Fail(StoreError::malformed(what, why)));
        }
        let length = range.end - range.start;
        let covered = match response.status() {
            StatusCode::PARTIAL_CONTENT => header(response.headers(), CONTENT_RANGE)
                .and_then(content_range)
                .is_some_and(|covered| covered == range),
            // A store without ranges, or one that sends the whole because the whole was asked for.
            _ => range.start == 0 && response.content_length() == Some(length),
        };
        if !covered {
            let why = match response.status() {
                StatusCode::PARTIAL_CONTENT => "the answer covers another range than was asked for",
                _ => {
                    "the answer is more than the range that was asked for: the server, or a proxy before it, serves no ranges"
                }
            };
            return Err(Fault::retry(RetryCause::Malformed, why));
        }
        if response.content_length().is_some_and(|claimed| claimed != length) {
            return Err(Fault::retry(RetryCause::Malformed, "the answer has another length than its range"));
        }
        // A store that ignores If-Match must not slip another version under the reader.
        match self.dialect.version(response.headers(), wanted) {
            Some(found) if found == *wanted && !self.dialect.is_settled(response.headers()) => {
                Err(Fault::retry(
                    RetryCause::Unsettled,
                    "it has changed within this second: another change would not be seen",
                ))
            }
            Some(found) if found == *wanted => Ok(response),
            Some(_) => Err(Fault::Fail(StoreError::Stale { what: what.to_owned() })),
            None => Err(Fault::retry(
                RetryCause::Malformed,
                "bytes of an object that does not say which version it is",
            )),
        }
    }

    /// Sends and waits for the headers; any status that is not taken is a fault.
    pub(super) async fn send(&self, ask: Ask<'_>, what: &str, patience: Duration) -> Result<Response, Fault> {
        self.send_with(ask, Sends::Nothing, what, patience).await
    }

    /// The same of a request with a body.
    pub(super) async fn send_with(
        &self,
        ask: Ask<'_>,
        sends: Sends<'_>,
        what: &str,
        patience: Duration,
    ) -> Result<Response, Fault> {
        let Ask { method, url, headers, takes, opens } = ask;
        let broken = |why: String| Fault::Fail(StoreError::Invalid { what: what.to_owned(), why });
        let head = method == Method::HEAD;
        let asked = &method;
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.method = method.clone();
        parts.uri = url.as_str().parse().map_err(|e| broken(format!("no URL can be made of it: {e}")))?;
        parts.headers = self.extra.clone();
        parts.headers.extend(headers);
        parts.headers.extend(self.dialect.headers());
        let session = self.session().map_err(Fault::Fail)?;
        if opens != Opens::Nothing {
            parts.headers.extend(session.key.clone());
        }
        if let (Opens::Both, Some(writes)) = (opens, &self.writes) {
            parts.headers.extend(writes.opening_source(&session.key));
        }
        if let Some(signer) = &session.signer {
            let signed = signer.sign_with(&mut parts, sends.payload()).await;
            signed.map_err(|()| broken("the request could not be signed".to_owned()))?;
        }
        // A signature may have become a part of it.
        let signed = match parts.uri == url.as_str() {
            true => url.clone(),
            false => Url::parse(&parts.uri.to_string())
                .map_err(|_| broken("no URL can be made of it with its signature".to_owned()))?,
        };
        let mut request = reqwest::Request::new(parts.method, signed);
        *request.headers_mut() = parts.headers;
        *request.body_mut() = sends.body();
        // The client says nothing of an empty body, and Ceph wants to know.
        if sends.is_empty() && matches!(*asked, Method::PUT | Method::POST) {
            request.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        }

        let answer = sends.followed(session.http.execute(request), patience).await;
        // Whatever the connection says of it: it broke on this side.
        if let Some(why) = sends.broken() {
            return Err(Fault::Fail(StoreError::Damaged { what: what.to_owned(), why }));
        }
        let response = match answer {
            // Not even its name server may have answered.
            None => {
                let (endpoint, seconds) = (self.endpoint(), patience.as_secs_f64());
                let said_by = self.dialect.place().said_by;
                let why = format!(
                    "{endpoint} sent nothing for {seconds:.1} s; check '{said_by}', and the network of this node"
                );
                return Err(Fault::retry(RetryCause::Stalled, why));
            }
            Some(Err(e)) => return Err(self.unreachable(&session, what, e)),
            Some(Ok(response)) => response,
        };
        let status = response.status();
        if takes(url, status, response.headers()) {
            return Ok(response);
        }
        let headers = response.headers().clone();
        // What the store says is for the message only: if it cannot be read, the status must do.
        let body = if head { None } else { read_all(response, ERROR_BYTES_MAX, patience).await.ok() };
        if let Some(advice) =
            body.as_deref().filter(|_| status == StatusCode::BAD_REQUEST).and_then(certificate::page)
        {
            let why = format!("{} answered HTTP 400: {advice}", self.endpoint());
            return Err(Fault::Fail(StoreError::Denied { what: what.to_owned(), why }));
        }
        let is_write = matches!(*asked, Method::PUT | Method::POST | Method::DELETE);
        let refusal = Refusal { what, url, status, headers: &headers, body: body.as_deref(), is_write };
        if status == StatusCode::UNAUTHORIZED {
            self.forget(&session);
        }
        let fault = self.dialect.refused(&refusal, &session.sent());
        Err(match opens {
            Opens::Object | Opens::Both => encryption::explained(fault, !session.key.is_empty(), &refusal),
            Opens::Nothing => fault,
        })
    }

    /// What was made of the credentials was refused, perhaps because a clock was wrong when it was made.
    fn forget(&self, refused: &Arc<Session>) {
        let mut session = self.session.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if Arc::ptr_eq(&session, refused)
            && let Ok(signer) = self.dialect.signer(&refused.credentials)
        {
            let Session { credentials, key, http, .. } = &**refused;
            let (credentials, key, http) = (credentials.clone(), key.clone(), http.clone());
            *session = Arc::new(Session { credentials, signer, key, http });
        }
    }

    /// Of the credentials that are in force now.
    fn session(&self) -> Result<Arc<Session>, StoreError> {
        let mut session = self.session.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !self.access.has(&session.credentials) {
            *session = Session::new(self.access.credentials(), &*self.dialect, &self.limits)?;
        }
        Ok(session.clone())
    }

    /// No answer at all: why, and is it worth a retry?
    fn unreachable(&self, session: &Session, what: &str, error: reqwest::Error) -> Fault {
        // Nor does asking again make another address of it. (The next request of the volume's resolves it anew.)
        if let Some(refused) = Refused::find(&error) {
            return Fault::Fail(refused.of(what));
        }
        let connect = error.is_connect();
        let said_by = self.dialect.place().said_by;
        let why = chain(&error.without_url());
        let has_certificate = session.credentials.client_certificate().is_some();
        if let Some(advice) = certificate::advice(&why, has_certificate) {
            let why = format!("no TLS connection to {}: {why}; {advice}", self.endpoint());
            return Fault::Fail(StoreError::Denied { what: what.to_owned(), why });
        }
        // rustls's words; its types are not ours to name. An alert of the store's, or what we found in its answer.
        let lower = why.to_ascii_lowercase();
        if ["protocolversion", "servertlsversion", "tls12or13"].iter().any(|word| lower.contains(word)) {
            let (endpoint, least) = (self.endpoint(), self.limits.config().tls_min);
            let why = format!(
                "{endpoint} speaks no {least} or later ({why}): have it do so; the least is store.tls_min of this node's agent"
            );
            return Fault::Fail(StoreError::Invalid { what: what.to_owned(), why });
        }
        // A certificate does not become valid by asking again.
        if ["certificate", "corrupt message", "handshake", "peer is incompatible"]
            .iter()
            .any(|word| lower.contains(word))
        {
            return Fault::Fail(StoreError::Invalid {
                what: what.to_owned(),
                why: format!(
                    "no TLS connection to {}: {why}; check that '{said_by}' speaks https and that its certificate is \
                     signed by a CA that this node trusts, or put that CA into the secret as caBundle",
                    self.endpoint()
                ),
            });
        }
        match (connect, self.proxy()) {
            (true, Some(proxy)) => Fault::retry(
                RetryCause::Connect,
                format!(
                    "cannot connect to {} through {}: {why}; check store.proxy of this node's agent, what that proxy lets through, \
                     and '{said_by}'",
                    self.endpoint(),
                    proxy.url
                ),
            ),
            (true, None) => Fault::retry(
                RetryCause::Connect,
                format!(
                    "cannot connect to {}: {why}; check '{said_by}', and the network of this node",
                    self.endpoint()
                ),
            ),
            (false, _) => {
                Fault::retry(RetryCause::Reset, format!("connection to {} broke: {why}", self.endpoint()))
            }
        }
    }
}

/// Twice what 1,000 keys of 1,024 bytes take with every byte encoded.
const LISTING_BYTES_MAX: usize = 8 << 20;
/// What a store says about one object.
const OBJECT_BYTES_MAX: usize = 64 << 10;
const ERROR_BYTES_MAX: usize = 64 << 10;

pub(super) fn stalled(patience: Duration) -> Fault {
    Fault::retry(RetryCause::Stalled, format!("the store sent nothing for {:.1} s", patience.as_secs_f64()))
}

/// A whole small body. A break in it is a fault like any other.
pub(super) async fn read_all(
    mut response: Response,
    max: usize,
    patience: Duration,
) -> Result<BytesMut, Fault> {
    let mut body = BytesMut::new();
    loop {
        match timeout(patience, response.chunk()).await {
            Err(_) => return Err(stalled(patience)),
            Ok(Err(e)) => return Err(broken_body(e)),
            Ok(Ok(None)) => return Ok(body),
            Ok(Ok(Some(piece))) if body.len() + piece.len() > max => {
                return Err(Fault::retry(
                    RetryCause::Malformed,
                    format!("an answer of more than {max} bytes"),
                ));
            }
            Ok(Ok(Some(piece))) => body.extend_from_slice(&piece),
        }
    }
}

pub(super) fn broken_body(error: reqwest::Error) -> Fault {
    let why = chain(&error.without_url());
    // hyper's word for "closed before Content-Length was reached".
    let truncated =
        why.contains("end of file") || why.contains("IncompleteMessage") || why.contains("incomplete");
    let cause = if truncated { RetryCause::Truncated } else { RetryCause::Reset };
    Fault::retry(cause, format!("the transfer broke: {why}"))
}
