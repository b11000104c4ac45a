//! The bucket as a sink.
//!
//! A request that makes an object may have been executed although its answer did not come: such a request is in doubt, and
//! before it is sent again the object is looked at. If it carries this write's id, that was the answer.
//!
//! ```text
//!            ┌────────────── back off ◄─────────────┐ no answer, 5xx: in doubt
//!            ▼                                      │
//!   put() ► in doubt? ── no ──────────────► send ───┼─ 200 ─────────────────────► written
//!            │ yes                            ▲     ├─ 412, 409: look ── ours ──► written
//!            ▼                                │     │                └─ another ► Conflict
//!           look ── another, nothing ─────────┘     └─ 403, 404, 507 …: error, nothing was written
//!            └───── ours ───────────────────────────────────────────────────────► written
//! ```

use super::client::{Ask, Client, Opens, Sends, content, read_all};
use super::sending::Progress;
use super::{Prefix, uploads};
use crate::access::Access;
use crate::dialect::writes::{self, Writes};
use crate::dialect::{Refusal, header};
use crate::dispatch::Lane;
use crate::keys::is_path;
use crate::observe::{Outcome, RetryCause};
use crate::retry::{Attempts, Fault};
use crate::sink::{
    Body, Condition, Leftover, NoPlace, Part, Seen, Sink, SinkLimits, Upload, Write, WriteId, Written,
};
use crate::traffic::Mover;
use crate::{StoreError, Version};
use async_trait::async_trait;
use crc_fast::{CrcAlgorithm, checksum_combine};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};
use http::header::ETAG;
use http::{HeaderMap, Method, StatusCode};
use reqwest::Url;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// S3's, in UTF-8.
const KEY_BYTES_MAX: usize = 1024;
/// What a store says about a write.
const ANSWER_BYTES_MAX: usize = 64 << 10;
/// Parts of one object that the store copies at once.
const COPIES_AT_ONCE: usize = 8;

pub(super) struct BucketSink {
    pub(super) client: Arc<Client>,
    pub(super) store: Arc<dyn Writes>,
    pub(super) prefix: Prefix,
    pub(super) access: Arc<Access>,
}

impl std::fmt::Debug for BucketSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BucketSink({})", self.client.what(self.prefix.0.as_bytes()))
    }
}

/// One object that is to be made, through all attempts.
struct Making<'a> {
    key: &'a [u8],
    what: &'a str,
    id: WriteId,
    condition: &'a Condition,
    /// Of all its bytes, where they are known here.
    crc32c: Option<u32>,
    /// An attempt may have been executed.
    in_doubt: AtomicBool,
}

/// What a store shows of an object, and the checksum that it tells.
struct Found {
    seen: Seen,
    crc32c: Option<u32>,
}

/// An answer whose body has come.
struct Answer {
    headers: HeaderMap,
    body: Vec<u8>,
}

/// The answers that a store gives to what it has removed.
fn removed(_: &Url, status: StatusCode, _: &HeaderMap) -> bool {
    status.is_success()
}

impl BucketSink {
    fn key(&self, path: &[u8]) -> Result<(Vec<u8>, String), StoreError> {
        let key = self.prefix.key(path);
        let what = self.client.what(&key);
        if !is_path(path) {
            let why = "no object can have this name: names are UTF-8, of at most 255 bytes".into();
            return Err(StoreError::Unsupported { what, why });
        }
        if key.len() > KEY_BYTES_MAX {
            let why = format!("its path has {} bytes, and a key at most {KEY_BYTES_MAX}", key.len());
            return Err(StoreError::Unsupported { what, why });
        }
        Ok((key, what))
    }

    /// One attempt at a request whose answer is read to its end. Stores that take long send a status first, and what it is worth later.
    async fn once(
        &self,
        ask: Ask<'_>,
        sends: Sends<'_>,
        what: &str,
        patience: Duration,
    ) -> Result<Answer, Fault> {
        let url = ask.url;
        let response = self.client.send_with(ask, sends, what, patience).await?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = read_all(response, ANSWER_BYTES_MAX, patience).await?;
        if writes::is_error(status, &body) {
            let status = StatusCode::INTERNAL_SERVER_ERROR;
            let refusal = Refusal { what, url, status, headers: &headers, body: Some(&body), is_write: true };
            return Err(self.store.refused(&refusal, &self.client.secrets()));
        }
        Ok(Answer { headers, body: body.to_vec() })
    }

    /// A small request that may be made twice.
    async fn ask(
        &self,
        op: &'static str,
        what: &str,
        method: Method,
        url: &Url,
        headers: &HeaderMap,
    ) -> Result<Answer, StoreError> {
        let attempt = async |patience| {
            let (method, headers) = (method.clone(), headers.clone());
            let ask = Ask { method, url, headers, takes: removed, opens: Opens::Nothing };
            Ok((self.once(ask, Sends::Nothing, what, patience).await?, 0))
        };
        self.client.ask(op, what, self.access.question(), |patience| attempt(patience).boxed()).await
    }

    async fn find_once(&self, key: &[u8], what: &str, patience: Duration) -> Result<Option<Found>, Fault> {
        let url = self.store.object(key);
        let headers = self.store.asks_for_sums();
        let ask = Ask { method: Method::HEAD, url: &url, headers, takes: content, opens: Opens::Object };
        let response = match self.client.send(ask, what, patience).await {
            Err(Fault::Fail(StoreError::NotFound { .. })) => return Ok(None),
            answer => answer?,
        };
        let headers = response.headers();
        let seen = self.store.seen(headers, &[]);
        let seen = seen.map_err(|why| Fault::retry(RetryCause::Malformed, why))?;
        let object = seen.ok_or_else(|| {
            Fault::Fail(StoreError::malformed(what, "its size or its version is none that it could have"))
        })?;
        let (attributes, write) = (self.store.attributes(headers), self.store.written_by(headers));
        let seen = Seen { version: object.version, size: object.size, attributes, write };
        Ok(Some(Found { seen, crc32c: self.store.arrived(headers) }))
    }

    /// `send` makes the object, once; see the head of this file.
    async fn attempt(
        &self,
        making: &Making<'_>,
        patience: Duration,
        send: impl Future<Output = Result<Written, Fault>>,
    ) -> Result<Written, Fault> {
        let was_in_doubt = making.in_doubt.load(Ordering::Relaxed);
        if was_in_doubt
            && let Some(found) = self.find_once(making.key, making.what, patience).await?
            && let Some(written) = making.made(&found)
        {
            return Ok(written);
        }
        // From here on whoever drops this attempt leaves it open.
        making.in_doubt.store(true, Ordering::Relaxed);
        match send.await {
            Ok(written) => Ok(written),
            Err(Fault::Fail(error @ (StoreError::Stale { .. } | StoreError::NotFound { .. }))) => {
                let found = self.find_once(making.key, making.what, patience).await?;
                match found.as_ref().and_then(|found| making.made(found)) {
                    Some(written) => Ok(written),
                    None => Err(Fault::Fail(making.refused(error, found.map(|found| found.seen.version)))),
                }
            }
            Err(fault) => {
                // It has not left this node.
                if matches!(fault, Fault::Retry { cause: RetryCause::Connect, .. }) {
                    making.in_doubt.store(was_in_doubt, Ordering::Relaxed);
                }
                Err(fault)
            }
        }
    }

    /// Runs a request with a body until it is answered. `attempt`'s second value is the bytes that it sent.
    async fn send<'a, T>(
        &'a self,
        op: &'static str,
        what: &'a str,
        attempt: impl Fn(Duration, Mover) -> BoxFuture<'a, Result<(T, u64), Fault>>,
    ) -> Result<T, StoreError> {
        let request = self.client.request(op, Lane::Upload, what);
        let mut attempts = Attempts::new(self.access.question());
        let (answered, _slot, mut meter) = attempts.ask_with(&request, attempt).await?;
        meter.bytes = answered.1;
        meter.end(Outcome::Ok);
        Ok(answered.0)
    }

    fn conditions(&self, what: &str, condition: &Condition) -> Result<HeaderMap, StoreError> {
        let headers = self.store.conditions(condition);
        headers.ok_or_else(|| StoreError::malformed(what, "its version cannot be written into a header"))
    }

    /// Sends a body, and what the answer tells of it: its tag, and whether what arrived is what was sent.
    async fn body(
        &self,
        url: &Url,
        headers: HeaderMap,
        body: &Body,
        what: &str,
        patience: Duration,
        mover: Mover,
    ) -> Result<Written, Fault> {
        let progress = Arc::new(Progress::default());
        let ask = Ask { method: Method::PUT, url, headers, takes: content, opens: Opens::Object };
        let with_md5 = !self.client.told().tells_sums();
        let sends = Sends::File { body, with_md5, progress: &progress, mover };
        let answer = self.once(ask, sends, what, patience).await?;
        let tag = header(&answer.headers, ETAG).and_then(crate::dialect::unquoted);
        let version =
            tag.ok_or_else(|| Fault::retry(RetryCause::Malformed, "no ETag of what was written"))?;
        let arrived = self.store.arrived(&answer.headers);
        self.client.told().arrived(arrived.is_some());
        if arrived.is_some_and(|arrived| arrived != body.crc32c) {
            return Err(Fault::retry(RetryCause::Corrupted, "what arrived is not what was sent"));
        }
        let is_md5 = || progress.md5().is_some_and(|md5| hex(&md5) == version.0);
        Ok(Written { confirmed: arrived.is_some() || is_md5(), version })
    }

    /// The whole of `from`, by parts, for stores copy no large objects in one request.
    async fn copy_in_parts(
        &self,
        from: &[u8],
        version: &Version,
        size: u64,
        to: &[u8],
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        let limits = self.limits();
        let part_bytes = limits.part_bytes(size, COPY_PART_BYTES).ok_or_else(|| StoreError::Unsupported {
            what: self.client.what(from),
            why: "it is larger than an object can be".into(),
        })?;
        let upload = self.begin(to, write).await?;
        let numbered = (0..size.div_ceil(part_bytes)).zip(1_u32..);
        let ranges = numbered.map(|(k, number)| (number, k * part_bytes..((k + 1) * part_bytes).min(size)));
        let parts = futures::stream::iter(ranges)
            .map(|(number, range)| self.copy_part(from, version, range, &upload, number))
            .buffered(COPIES_AT_ONCE);
        let done = async { self.complete(&upload, &parts.try_collect::<Vec<_>>().await?, condition).await };
        let done = done.await;
        // After an Unavailable it may be there, and ends of itself or as a leftover.
        if matches!(&done, Err(error) if !matches!(error, StoreError::Unavailable { .. })) {
            let _ = self.abandon(&upload).await;
        }
        done
    }

    async fn copy_part(
        &self,
        from: &[u8],
        version: &Version,
        bytes: Range<u64>,
        upload: &Upload,
        number: u32,
    ) -> Result<Part, StoreError> {
        let ((source, shown), (key, what)) = (self.key(from)?, self.key(&upload.path)?);
        let unnamed = || StoreError::malformed(&shown, "its version cannot be written into a header");
        let mut headers = self.store.copying(&source, version).ok_or_else(unnamed)?;
        headers.extend(self.store.copying_range(&bytes));
        let url = writes::part(&self.store.object(&key), &upload.id, number);
        let attempt = async |patience| {
            let headers = headers.clone();
            let ask = Ask { method: Method::PUT, url: &url, headers, takes: content, opens: Opens::Both };
            let answer = self.once(ask, Sends::Nothing, &what, patience).await?;
            let made = writes::made(&answer.body, "CopyPartResult");
            Ok((made.map_err(|why| Fault::retry(RetryCause::Malformed, why))?, 0))
        };
        let question = self.access.question();
        let tag = self.client.ask("copy", &what, question, |patience| attempt(patience).boxed()).await;
        let tag = tag.map_err(|error| match error {
            StoreError::Stale { .. } => StoreError::Stale { what: shown },
            error => error,
        })?;
        Ok(Part { number, bytes: bytes.end - bytes.start, crc32c: 0, tag: tag.0, confirmed: false })
    }
}

/// So much of an object is copied by one request.
const COPY_PART_BYTES: u64 = 256 << 20;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Making<'_> {
    /// Was it made by this write?
    fn made(&self, found: &Found) -> Option<Written> {
        let Found { seen, crc32c } = found;
        let confirmed = crc32c.is_some() && *crc32c == self.crc32c;
        (seen.write == Some(self.id)).then(|| Written { version: seen.version.clone(), confirmed })
    }

    /// The condition did not hold, or what the request needs is not there: what is there now tells which.
    fn refused(&self, error: StoreError, found: Option<Version>) -> StoreError {
        match (error, self.condition) {
            (StoreError::Stale { what }, _) => StoreError::Conflict { what, found },
            // A key that is not there has no version; an upload that is over is another thing.
            (StoreError::NotFound { .. }, Condition::Is(version)) if found.as_ref() != Some(version) => {
                StoreError::Conflict { what: self.what.to_owned(), found }
            }
            (error, _) => error,
        }
    }
}

#[async_trait]
impl Sink for BucketSink {
    fn limits(&self) -> SinkLimits {
        self.store.sink_limits()
    }

    fn takes(&self, path: &[u8]) -> Result<(), NoPlace> {
        if !is_path(path) {
            return Err(NoPlace::NotText);
        }
        // A directory's marker has a byte more.
        if self.prefix.key(path).len() < KEY_BYTES_MAX { Ok(()) } else { Err(NoPlace::TooLong) }
    }

    async fn put(
        &self,
        path: &[u8],
        body: &Body,
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        let (key, what) = self.key(path)?;
        let url = self.store.object(&key);
        let mut headers = self.conditions(&what, condition)?;
        headers.extend(self.store.carried(write));
        headers.extend(self.store.summed(body.crc32c));
        let in_doubt = AtomicBool::new(false);
        let crc32c = Some(body.crc32c);
        let making = Making { key: &key, what: &what, id: write.id, condition, crc32c, in_doubt };
        let attempt = async |patience, mover| {
            let send = self.body(&url, headers.clone(), body, &what, patience, mover);
            Ok((self.attempt(&making, patience, send).await?, body.len()))
        };
        self.send("put", &what, |patience, mover| attempt(patience, mover).boxed()).await
    }

    async fn begin(&self, path: &[u8], write: &Write) -> Result<Upload, StoreError> {
        let (key, what) = self.key(path)?;
        let (method, url) = writes::beginning(&self.store.object(&key));
        let mut headers = self.store.carried(write);
        headers.extend(self.store.summed_in_parts());
        let attempt = async |patience| {
            let (method, headers) = (method.clone(), headers.clone());
            let ask = Ask { method, url: &url, headers, takes: content, opens: Opens::Object };
            let answer = self.once(ask, Sends::Nothing, &what, patience).await?;
            let id = writes::begun(&answer.body);
            Ok((id.map_err(|why| Fault::retry(RetryCause::Malformed, why))?, 0))
        };
        let question = self.access.question();
        let id = self.client.ask("begin", &what, question, |patience| attempt(patience).boxed()).await?;
        Ok(Upload { path: path.to_vec(), id, write: write.id })
    }

    async fn part(&self, upload: &Upload, number: u32, body: &Body) -> Result<Part, StoreError> {
        let (key, what) = self.key(&upload.path)?;
        let url = writes::part(&self.store.object(&key), &upload.id, number);
        let headers = self.store.summed(body.crc32c);
        let attempt = async |patience, mover| {
            let sent = self.body(&url, headers.clone(), body, &what, patience, mover).await?;
            Ok((sent, body.len()))
        };
        let Written { version, confirmed } =
            self.send("part", &what, |patience, mover| attempt(patience, mover).boxed()).await?;
        Ok(Part { number, bytes: body.len(), crc32c: body.crc32c, tag: version.0, confirmed })
    }

    async fn complete(
        &self,
        upload: &Upload,
        parts: &[Part],
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        let (key, what) = self.key(&upload.path)?;
        let url = writes::upload(&self.store.object(&key), &upload.id);
        let headers = self.conditions(&what, condition)?;
        let text = writes::completing(parts, |crc32c| self.store.summed_part(crc32c));
        let crc32c = parts.iter().fold(0, |all, part| {
            checksum_combine(CrcAlgorithm::Crc32Iscsi, all, u64::from(part.crc32c), part.bytes)
        });
        let (in_doubt, crc32c) = (AtomicBool::new(false), u32::try_from(crc32c).ok());
        let making = Making { key: &key, what: &what, id: upload.write, condition, crc32c, in_doubt };
        let send = async |patience| {
            let headers = headers.clone();
            let ask = Ask { method: Method::POST, url: &url, headers, takes: content, opens: Opens::Object };
            let answer = self.once(ask, Sends::Text(&text), &what, patience).await?;
            writes::is_made(&answer.body).map_err(|why| Fault::retry(RetryCause::Malformed, why))?;
            // Ceph tells no ETag of it. Versitygw acknowledges the completion of an upload that was ended, and makes nothing of it.
            let found = self.find_once(&key, &what, patience).await?;
            let ours = found.as_ref().and_then(|found| making.made(found));
            ours.ok_or_else(|| {
                let found = found.map(|found| found.seen.version);
                Fault::Fail(StoreError::Conflict { what: what.clone(), found })
            })
        };
        let attempt = async |patience| Ok((self.attempt(&making, patience, send(patience)).await?, 0));
        let question = self.access.question();
        let done = self.client.ask("complete", &what, question, |patience| attempt(patience).boxed());
        let mut written = done.await?;
        written.confirmed |= parts.iter().all(|part| part.confirmed);
        Ok(written)
    }

    async fn abandon(&self, upload: &Upload) -> Result<(), StoreError> {
        let (key, what) = self.key(&upload.path)?;
        let url = writes::upload(&self.store.object(&key), &upload.id);
        match self.ask("abandon", &what, Method::DELETE, &url, &HeaderMap::new()).await {
            Ok(_) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn leftovers(&self, age: Duration) -> Result<Vec<Leftover>, StoreError> {
        uploads::older(&self.client, &*self.store, self.prefix.0.as_bytes(), &self.access, age).await
    }

    async fn look(&self, path: &[u8]) -> Result<Option<Seen>, StoreError> {
        let (key, what) = self.key(path)?;
        let attempt = async |patience| Ok((self.find_once(&key, &what, patience).await?, 0));
        let question = self.access.question();
        let found = self.client.ask("head", &what, question, |patience| attempt(patience).boxed()).await?;
        Ok(found.map(|found| found.seen))
    }

    async fn delete(&self, path: &[u8], condition: &Condition) -> Result<(), StoreError> {
        let (key, what) = self.key(path)?;
        let url = self.store.object(&key);
        let headers = match condition {
            Condition::Is(_) => self.conditions(&what, condition)?,
            Condition::Any | Condition::Absent => HeaderMap::new(),
        };
        match self.ask("delete", &what, Method::DELETE, &url, &headers).await {
            Ok(_) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(StoreError::Stale { what }) => {
                let found = self.look(path).await?;
                match found {
                    Some(seen) => Err(StoreError::Conflict { what, found: Some(seen.version) }),
                    None => Ok(()),
                }
            }
            Err(error) => Err(error),
        }
    }

    async fn copy(
        &self,
        from: &[u8],
        version: &Version,
        size: u64,
        to: &[u8],
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        if size > self.limits().put_bytes_max {
            return self.copy_in_parts(from, version, size, to, write, condition).await;
        }
        let ((source, shown), (key, what)) = (self.key(from)?, self.key(to)?);
        let url = self.store.object(&key);
        let unnamed = || StoreError::malformed(&shown, "its version cannot be written into a header");
        let mut headers = self.store.copying(&source, version).ok_or_else(unnamed)?;
        headers.extend(self.conditions(&what, condition)?);
        headers.extend(self.store.carried(write));
        let in_doubt = AtomicBool::new(false);
        let making = Making { key: &key, what: &what, id: write.id, condition, crc32c: None, in_doubt };
        let send = async |patience| {
            let headers = headers.clone();
            let ask = Ask { method: Method::PUT, url: &url, headers, takes: content, opens: Opens::Both };
            let answer = self.once(ask, Sends::Nothing, &what, patience).await?;
            let made = writes::made(&answer.body, "CopyObjectResult");
            let version = made.map_err(|why| Fault::retry(RetryCause::Malformed, why))?;
            Ok(Written { version, confirmed: false })
        };
        let attempt = async |patience| Ok((self.attempt(&making, patience, send(patience)).await?, 0));
        let question = self.access.question();
        let done = self.client.ask("copy", &what, question, |patience| attempt(patience).boxed()).await;
        match done {
            // One status for both: whose condition it was that did not hold, the source tells.
            Err(error @ (StoreError::Conflict { .. } | StoreError::NotFound { .. })) => {
                match self.look(from).await? {
                    Some(seen) if seen.version == *version => Err(error),
                    _ => Err(StoreError::Stale { what: shown }),
                }
            }
            done => done,
        }
    }

    async fn make_dir(&self, path: &[u8], write: &Write) -> Result<(), StoreError> {
        let (key, what) = match (path, self.prefix.0.is_empty()) {
            (b"", true) => return Ok(()), // the bucket
            (b"", false) => (self.prefix.directory(path), self.client.what(self.prefix.0.as_bytes())),
            _ => self.key(path).map(|(key, what)| ([&key[..], b"/"].concat(), what))?,
        };
        let url = self.store.object(&key);
        let mut headers = self.conditions(&what, &Condition::Absent)?;
        headers.extend(self.store.carried_by_directory(write));
        let attempt = async |patience| {
            let headers = headers.clone();
            let ask = Ask { method: Method::PUT, url: &url, headers, takes: content, opens: Opens::Object };
            self.once(ask, Sends::Text(""), &what, patience).await.map(|_| ((), 0))
        };
        let question = self.access.question();
        match self.client.ask("put", &what, question, |patience| attempt(patience).boxed()).await {
            // It is there; perhaps by an attempt whose answer was lost.
            Err(StoreError::Stale { .. }) => Ok(()),
            done => done,
        }
    }

    async fn remove_dir(&self, path: &[u8]) -> Result<(), StoreError> {
        let (mut key, what) = self.key(path)?;
        key.push(b'/');
        let url = self.store.object(&key);
        match self.ask("delete", &what, Method::DELETE, &url, &HeaderMap::new()).await {
            Ok(_) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
