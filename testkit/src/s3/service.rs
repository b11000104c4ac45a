//! The S3 operations, as `s3s` hands them over after it has parsed and authenticated the request.

use super::bucket::{Bucket, Meta, list};
use super::memory::Memory;
use super::{Key, Rights};
use async_trait::async_trait;
use futures::{Stream, StreamExt};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::access::{S3Access, S3AccessContext};
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, RwLock};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

pub(super) type Buckets = Arc<RwLock<BTreeMap<String, Arc<dyn Bucket>>>>;

pub(super) struct Service {
    pub(super) buckets: Buckets,
    pub(super) page_max: usize,
}

impl Service {
    fn bucket(&self, name: &str) -> S3Result<Arc<dyn Bucket>> {
        let buckets = self.buckets.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        buckets.get(name).cloned().ok_or_else(|| s3_error!(NoSuchBucket, "no such bucket"))
    }

    fn object(&self, bucket: &str, key: &str) -> S3Result<(Arc<dyn Bucket>, Meta)> {
        let bucket = self.bucket(bucket)?;
        let meta = bucket.stat(key).map_err(internal)?;
        Ok((bucket, meta.ok_or_else(|| s3_error!(NoSuchKey, "no such key"))?))
    }
}

fn internal(e: std::io::Error) -> s3s::S3Error {
    s3_error!(e, InternalError, "backend failed")
}

fn check_match(condition: Option<&ETagCondition>, meta: &Meta) -> S3Result<()> {
    let matches = match condition {
        None => true,
        Some(condition) if condition.is_any() => true,
        Some(condition) => condition.as_etag().and_then(|etag| etag.as_strong()) == Some(meta.etag.as_str()),
    };
    if matches { Ok(()) } else { Err(s3_error!(PreconditionFailed, "the object has another ETag")) }
}

/// `s3s` knows no larger sizes; [`unsigned_sizes`] and `serve` undo this.
fn signed(size: u64) -> i64 {
    size.cast_signed()
}

/// A listing in which sizes from 2^63 on are what they claim to be, not negative.
pub(super) fn unsigned_sizes(listing: &str) -> String {
    const TAG: &str = "<Size>-";
    let mut parts = listing.split(TAG);
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (digits, rest) = part.split_at(part.find('<').unwrap_or(part.len()));
        let size = format!("-{digits}").parse().map_or(0, i64::cast_unsigned);
        text.push_str(&format!("<Size>{size}{rest}"));
    }
    text
}

fn etag(meta: &Meta) -> Option<ETag> {
    Some(ETag::Strong(meta.etag.clone()))
}

/// `encoding-type=url` the way AWS does it: like a form, a space becomes `+`.
const FORM: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'*').remove(b'/').remove(b' ');

fn encode(text: &str, url: bool) -> String {
    if url { utf8_percent_encode(text, FORM).to_string().replace(' ', "+") } else { text.to_owned() }
}

#[async_trait]
impl S3 for Service {
    async fn create_bucket(
        &self,
        req: S3Request<CreateBucketInput>,
    ) -> S3Result<S3Response<CreateBucketOutput>> {
        let mut buckets = self.buckets.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        buckets.entry(req.input.bucket).or_insert_with(|| Arc::new(Memory::default()));
        Ok(S3Response::new(CreateBucketOutput::default()))
    }

    async fn head_bucket(&self, req: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
        self.bucket(&req.input.bucket)?;
        Ok(S3Response::new(HeadBucketOutput::default()))
    }

    async fn list_objects_v2(
        &self,
        req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = req.input;
        let bucket = self.bucket(&input.bucket)?;
        let url = input.encoding_type.as_ref().is_some_and(|kind| kind.as_str() == EncodingType::URL);
        let prefix = input.prefix.unwrap_or_default();
        let max_keys = input.max_keys.unwrap_or(1000).clamp(0, 1000);
        let token = match &input.continuation_token {
            // Opaque to the client; encoded, because XML cannot carry every character.
            Some(token) => Some(
                percent_encoding::percent_decode_str(token)
                    .decode_utf8()
                    .map_err(|e| s3_error!(e, InvalidArgument, "bad continuation token"))?
                    .into_owned(),
            ),
            None => input.start_after.clone(),
        };
        let delimiter = input.delimiter.as_deref().filter(|delimiter| !delimiter.is_empty());
        let page = list(&*bucket, &prefix, delimiter, token.as_deref(), self.page_max.min(max_keys as usize))
            .map_err(internal)?;
        let contents = page.objects.iter().map(|(key, meta)| Object {
            key: Some(encode(key, url)),
            size: Some(signed(meta.size)),
            e_tag: etag(meta),
            last_modified: Some(meta.modified.into()),
            ..Object::default()
        });
        let prefixes = page.prefixes.iter().map(|prefix| CommonPrefix { prefix: Some(encode(prefix, url)) });
        let output = ListObjectsV2Output {
            name: Some(input.bucket),
            key_count: Some((page.objects.len() + page.prefixes.len()) as i32),
            max_keys: Some(max_keys),
            is_truncated: Some(page.next.is_some()),
            next_continuation_token: page
                .next
                .map(|key| utf8_percent_encode(&key, NON_ALPHANUMERIC).to_string()),
            continuation_token: input.continuation_token,
            contents: Some(contents.collect()),
            common_prefixes: Some(prefixes.collect()),
            delimiter: input.delimiter.map(|delimiter| encode(&delimiter, url)),
            prefix: Some(encode(&prefix, url)),
            start_after: input.start_after.map(|key| encode(&key, url)),
            encoding_type: input.encoding_type,
            ..ListObjectsV2Output::default()
        };
        Ok(S3Response::new(output))
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = req.input;
        let (_, meta) = self.object(&input.bucket, &input.key)?;
        check_match(input.if_match.as_ref(), &meta)?;
        let output = HeadObjectOutput {
            content_length: Some(signed(meta.size)),
            e_tag: etag(&meta),
            last_modified: Some(meta.modified.into()),
            accept_ranges: Some("bytes".into()),
            ..HeadObjectOutput::default()
        };
        Ok(S3Response::new(output))
    }

    async fn get_object(&self, req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let input = req.input;
        let (bucket, meta) = self.object(&input.bucket, &input.key)?;
        check_match(input.if_match.as_ref(), &meta)?;
        let range = match &input.range {
            None => None,
            Some(range) => {
                Some(range.check(meta.size).map_err(|_| s3_error!(InvalidRange, "beyond the end"))?)
            }
        };
        let content_range =
            range.as_ref().map(|range| format!("bytes {}-{}/{}", range.start, range.end - 1, meta.size));
        let range = range.unwrap_or(0..meta.size);
        let length = range.end - range.start;
        let body = bucket.read(&input.key, &meta, range).map_err(internal)?;
        let output = GetObjectOutput {
            body: Some(StreamingBlob::wrap(Shareable::new(body))),
            content_length: Some(length as i64),
            content_range,
            e_tag: etag(&meta),
            last_modified: Some(meta.modified.into()),
            accept_ranges: Some("bytes".into()),
            ..GetObjectOutput::default()
        };
        Ok(S3Response::new(output))
    }

    async fn put_object(&self, req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let input = req.input;
        let bucket = self.bucket(&input.bucket)?;
        let mut bytes = Vec::new();
        if let Some(mut body) = input.body {
            while let Some(piece) = body.next().await {
                bytes.extend_from_slice(&piece.map_err(|e| s3_error!(InternalError, "body: {e}"))?);
            }
        }
        let meta = bucket.put(&input.key, bytes.into()).map_err(internal)?;
        Ok(S3Response::new(PutObjectOutput { e_tag: etag(&meta), ..PutObjectOutput::default() }))
    }

    async fn delete_object(
        &self,
        req: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.bucket(&req.input.bucket)?.delete(&req.input.key).map_err(internal)?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }
}

/// `s3s` wants bodies that are `Sync`; a stream is only ever polled by its one owner.
pub(super) struct Shareable(Mutex<super::bucket::Body>);

impl Shareable {
    pub(super) fn new(body: super::bucket::Body) -> Self {
        Self(Mutex::new(body))
    }
}

impl Stream for Shareable {
    type Item = std::io::Result<bytes::Bytes>;
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()).poll_next_unpin(context)
    }
}

/// Who may ask.
pub(super) struct Guard {
    pub(super) keys: Vec<Key>,
    pub(super) anonymous: bool,
    pub(super) requester_pays: bool,
    pub(super) customer_key: Option<String>,
    pub(super) gate: Option<(&'static str, &'static str)>,
    pub(super) page_max: usize,
    pub(super) clock_ahead: Duration,
}

impl Guard {
    /// By the server's clock.
    pub(super) fn now(&self) -> SystemTime {
        SystemTime::now() + self.clock_ahead
    }
}

/// Who may do what: anonymous access is a switch, and each key has its rights.
pub(super) struct Access {
    pub(super) anonymous: bool,
    pub(super) keys: Vec<Key>,
}

#[async_trait]
impl S3Access for Access {
    async fn check(&self, cx: &mut S3AccessContext<'_>) -> S3Result<()> {
        let rights = match cx.credentials() {
            None if self.anonymous => Rights::All,
            None => return Err(s3_error!(AccessDenied, "anonymous access is off")),
            Some(who) => {
                let key = self.keys.iter().find(|key| key.id == who.access_key);
                let brought = cx.headers().get("x-amz-security-token").and_then(|token| token.to_str().ok());
                if key.is_some_and(|key| key.token.is_some() && key.token.as_deref() != brought) {
                    return Err(s3_error!(ExpiredToken, "the provided token has expired"));
                }
                key.map_or(Rights::None, |key| key.rights)
            }
        };
        let allowed = match (rights, cx.s3_op().name()) {
            (Rights::All, _) => true,
            (Rights::ListOnly, op) => op == "ListObjectsV2" || op == "HeadBucket",
            (Rights::ReadOnly, op) => matches!(op, "HeadObject" | "GetObject"),
            (Rights::None, _) => false,
        };
        if allowed { Ok(()) } else { Err(s3_error!(AccessDenied, "this key may not do that")) }
    }
}
