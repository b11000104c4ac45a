//! Protocols that `s3s` does not speak: each reads a request in its own words, says who asks, and answers from a bucket.

use super::Rights;
use super::access::Guard;
use super::bucket::Buckets;
use super::bucket::{Bucket, Listing, list};
use super::checksums::Sums;
use super::encryption::Wrong;
use super::meta::Meta;
use super::service::Shareable;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use s3s::dto::StreamingBlob;
use std::ops::Range;
use std::sync::Arc;

/// Status, the store's word for it, and a sentence.
pub(super) type Denied = (StatusCode, &'static str, String);

/// What a request asks for, in S3's words.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// "" where it is nothing that a reader asks for.
    pub(super) op: &'static str,
    pub(super) bucket: String,
    /// Of a listing: its prefix.
    pub(super) key: String,
    pub(super) query: Vec<(String, String)>,
}

impl Asked {
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(of, _)| of == name).map(|(_, value)| value.as_str())
    }
}

/// One such protocol.
pub(super) trait Adapter: Send + Sync {
    fn asked(&self, method: &Method, path: &str, query: &str) -> Asked;

    /// Who asks. Err: whom it lets ask nothing.
    fn who(&self, parts: &Parts, asked: &Asked, guard: &Guard) -> Result<Rights, Denied>;

    /// Has whoever asks said that he pays?
    fn pays(&self, _headers: &HeaderMap) -> bool {
        false
    }

    fn listing(&self, asked: &Asked, page: Listing) -> (HeaderMap, String);

    fn sums(&self) -> Sums {
        Sums::Nobody
    }

    /// Are its directories something of their own, so that an empty one is not there, and one without its slash is redirected?
    fn is_tree(&self) -> bool {
        false
    }

    /// With which a listing, and what is said about an object, is answered.
    fn status(&self, _asked: &Asked) -> StatusCode {
        StatusCode::OK
    }

    /// What is said about an object: headers, and a body where the protocol has one.
    fn about(&self, asked: &Asked, meta: &Meta) -> (HeaderMap, String);

    /// What a GET's answer says besides its range; Err: it asks for another version.
    fn version(&self, parts: &Parts, asked: &Asked, meta: &Meta) -> Result<HeaderMap, Denied>;

    /// Does a request for an object bring the key that it is encrypted with?
    fn opens(&self, _headers: &HeaderMap, _op: &str, _held: Option<&str>) -> Result<(), Wrong> {
        Ok(())
    }
    fn sealed(&self, _wrong: Wrong) -> Denied {
        self.denied()
    }

    fn no_bucket(&self) -> Denied;
    fn no_object(&self) -> Denied;
    fn denied(&self) -> Denied;
    fn beyond(&self) -> Denied;

    fn error(&self, denied: &Denied) -> (HeaderMap, String);

    /// The page token of this request, and how many entries it wants.
    fn page(&self, asked: &Asked) -> (Option<String>, usize);
}

/// Opaque to the client.
pub(super) fn token(key: &str) -> String {
    utf8_percent_encode(key, NON_ALPHANUMERIC).to_string()
}

pub(super) fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

pub(super) fn pairs(query: &str) -> Vec<(String, String)> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    // None of them is a form: a plus is a plus.
    pairs.map(|(name, value)| (decoded(name), decoded(value))).collect()
}

pub(super) fn answer(
    adapter: &dyn Adapter,
    parts: &Parts,
    asked: &Asked,
    guard: &Guard,
    buckets: &Buckets,
) -> Response<s3s::Body> {
    let respond = |status: StatusCode, headers: HeaderMap, body: s3s::Body| {
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response
    };
    let answered = || -> Result<Response<s3s::Body>, Denied> {
        let rights = adapter.who(parts, asked, guard)?;
        let allowed = rights.allow(asked.op);
        if !allowed || (guard.requester_pays && !adapter.pays(&parts.headers)) {
            return Err(adapter.denied());
        }
        let bucket: Arc<dyn Bucket> = {
            let buckets = buckets.read().unwrap_or_else(|poisoned| poisoned.into_inner());
            buckets.get(&asked.bucket).cloned().ok_or_else(|| adapter.no_bucket())?
        };
        let failed = |e: std::io::Error| (StatusCode::INTERNAL_SERVER_ERROR, "InternalError", e.to_string());
        if asked.op == "ListObjectsV2" {
            let delimiter = asked.value("delimiter").filter(|delimiter| !delimiter.is_empty());
            let (after, max) = adapter.page(asked);
            let max = max.min(if adapter.is_tree() { usize::MAX } else { guard.page_max });
            let after = after.map(|token| decoded(&token));
            let page = list(&*bucket, &asked.key, delimiter, after.as_deref(), max).map_err(failed)?;
            if adapter.is_tree()
                && page.objects.is_empty()
                && page.prefixes.is_empty()
                && !asked.key.is_empty()
            {
                return Err(adapter.no_object());
            }
            let (headers, text) = adapter.listing(asked, page);
            return Ok(respond(adapter.status(asked), headers, Bytes::from(text).into()));
        }
        let found = bucket.stat(&asked.key).map_err(failed)?;
        if found.is_none() && adapter.is_tree() {
            let below = list(&*bucket, &format!("{}/", asked.key), None, None, 1).map_err(failed)?;
            if !below.objects.is_empty() {
                let slashed = value(&format!("{}/", parts.uri.path()));
                let headers = [(http::header::LOCATION, slashed)].into_iter().collect();
                return Ok(respond(StatusCode::MOVED_PERMANENTLY, headers, Bytes::new().into()));
            }
        }
        let meta = found.ok_or_else(|| adapter.no_object())?;
        if let Err(wrong) = adapter.opens(&parts.headers, asked.op, guard.customer_key.as_deref()) {
            return Err(adapter.sealed(wrong));
        }
        if asked.op == "HeadObject" {
            let (headers, text) = adapter.about(asked, &meta);
            return Ok(respond(adapter.status(asked), headers, Bytes::from(text).into()));
        }
        let mut headers = adapter.version(parts, asked, &meta)?;
        let range = parts.headers.get("range").and_then(|range| range.to_str().ok());
        let (status, range) = match range.map(|range| bounds(range, meta.size)) {
            None => (StatusCode::OK, 0..meta.size),
            Some(None) => return Err(adapter.beyond()),
            Some(Some(range)) => {
                let text = format!("bytes {}-{}/{}", range.start, range.end - 1, meta.size);
                headers.insert("content-range", value(&text));
                (StatusCode::PARTIAL_CONTENT, range)
            }
        };
        headers.insert("content-length", (range.end - range.start).into());
        let body = bucket.read(&asked.key, &meta, range).map_err(failed)?;
        Ok(respond(status, headers, StreamingBlob::wrap(Shareable::new(body)).into()))
    };
    answered().unwrap_or_else(|denied| {
        let (headers, text) = adapter.error(&denied);
        let text = if parts.method == Method::HEAD { String::new() } else { text };
        respond(denied.0, headers, Bytes::from(text).into())
    })
}

/// `bytes=a-b` within an object. None: beyond its end, or nothing that is understood here.
fn bounds(range: &str, size: u64) -> Option<Range<u64>> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let first: u64 = first.parse().ok()?;
    let last: u64 = if last.is_empty() { u64::MAX } else { last.parse().ok()? };
    (first < size && first <= last).then(|| first..last.min(size - 1) + 1)
}

pub(super) fn value(text: &str) -> HeaderValue {
    HeaderValue::try_from(text).expect("what the testkit says can be a header")
}
