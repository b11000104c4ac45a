//! What one kind of store speaks: requests out; entries, versions and faults in. Functions of bytes, without I/O.
//!
//! ```text
//! s3.rs      S3 and what speaks it             listing.rs          a page of keys: entries, unnameable keys
//! oss.rs     Alibaba Cloud OSS                 list_objects_v2.rs  S3's and OSS's page of them
//! writes.rs  what S3 is told to write     batch.rs            what it is told to delete, many at once
//! gcs.rs     Google Cloud Storage, by JSON     xml.rs              a listing in XML, tag by tag
//! azure.rs   Azure's blobs                     answer.rs           an error document in XML: what to do
//! web.rs     a web server                      index.rs            its directories, in the forms that they have
//!                                              encryption.rs       keys of objects: sent, missed, refused
//!                                              field.rs, date.rs   sizes, ETags, times
//!                                              checksum.rs         of bodies
//! ```
//!
//! Who sends them, waits, retries and resumes is [`crate::exchange`], once for all. Signatures, which must be exactly right,
//! are libraries'.

mod answer;
mod azure;
pub(crate) mod batch;
pub(crate) mod checksum;
mod date;
pub(crate) mod encryption;
mod field;
#[cfg(fuzzing)]
pub mod fuzz;
mod gcs;
pub(crate) mod index;
mod list_objects_v2;
pub(crate) mod listing;
mod oss;
mod s3;
pub(crate) mod web;
pub(crate) mod writes;
mod xml;

pub(crate) use azure::Azure;
pub(crate) use gcs::Gcs;
pub(crate) use oss::Oss;
pub(crate) use s3::S3;

use self::checksum::Checksum;
use crate::keys::{encode_path, encode_query};
use crate::retry::Fault;
use crate::{StoreError, Version};
use async_trait::async_trait;
use crc_fast::CrcAlgorithm;
use encryption::CustomerKey;
use http::header::{CONTENT_LENGTH, ETAG, HeaderMap, HeaderValue, IF_MATCH, LAST_MODIFIED, RANGE};
use http::{Method, Request, StatusCode, request};
use object_store::client::{HttpRequest, HttpRequestBody};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use url::{Host, Url};
use volume::{Addressing, Credentials, CredentialsKind};

/// What one store speaks about an object, and how it signs. What is not said otherwise is as S3 has it.
pub(crate) trait Dialect: Debug + Send + Sync {
    fn place(&self) -> &Place;

    /// How it is written to. None: it is only read.
    fn writes(self: Arc<Self>) -> Option<Arc<dyn writes::Writes>> {
        None
    }

    /// What every request carries.
    fn headers(&self) -> HeaderMap;

    /// What a request for an object carries that is encrypted with this key. None: such keys are not known here.
    fn with_key(&self, _key: &CustomerKey) -> Option<HeaderMap> {
        None
    }

    fn object(&self, key: &[u8]) -> Url {
        let base = &self.place().base;
        let mut url = base.clone();
        url.set_path(&format!("{}{}", base.path(), encode_path(key)));
        url
    }

    /// What asks about an object and not for its bytes.
    fn looking(&self, key: &[u8]) -> (Method, Url) {
        (Method::HEAD, self.object(key))
    }

    /// What the answer to [`Self::looking`] tells. None: of a size that no file has, or of a version that cannot be asked
    /// for, as in a listing. `body`: empty but for a GET's.
    fn seen(&self, headers: &HeaderMap, _body: &[u8]) -> Result<Option<Object>, &'static str> {
        seen(headers)
    }

    /// What is asked for the bytes of this version. None: no request can name it.
    fn content(&self, key: &[u8], _version: &Version) -> Option<Url> {
        Some(self.object(key))
    }

    /// What makes a GET one of `range` of this version and no other. None: no header can carry that version.
    fn reading(&self, version: &Version, range: &Range<u64>) -> Option<HeaderMap> {
        reading(version, range)
    }

    /// Are these the object's bytes as they lie there, not packed or unpacked on the way?
    fn is_as_stored(&self, _headers: &HeaderMap) -> bool {
        true
    }

    /// What an answer tells about the bytes that it brings, or about the whole object.
    fn checksum(&self, _headers: &HeaderMap) -> Option<Checksum> {
        None
    }

    /// Is [`Self::checksum`] that of the whole object also where the answer brings a part of it?
    fn tells_of_all(&self) -> bool {
        false
    }

    /// What [`Self::checksum`] mostly is of a whole object of this size. None: there is none.
    fn sums(&self, _size: u64) -> Option<CrcAlgorithm> {
        None
    }

    /// What makes a HEAD of this version tell the checksum of the whole object. None: nothing does.
    fn telling(&self, _version: &Version) -> Option<HeaderMap> {
        None
    }

    /// Has what a GET's answer brings been as it is for long enough that a change of it would make another version?
    fn is_settled(&self, _headers: &HeaderMap) -> bool {
        true
    }

    /// Of the object that a GET's answer brings, told in the way in which `wanted` is.
    fn version(&self, headers: &HeaderMap, _wanted: &Version) -> Option<Version> {
        field::unquoted(header(headers, ETAG)?)
    }

    /// An answer with any status but success. `secrets`: what no message may repeat.
    fn refused(&self, refusal: &Refusal<'_>, secrets: &[String]) -> Fault;

    /// None: requests are not signed.
    fn signer(&self, credentials: &Credentials) -> Result<Option<Arc<dyn Signer>>, StoreError>;
}

/// A bucket: a store that lists its keys in pages, by what they begin with. What is not said otherwise is as S3 has it.
pub(crate) trait BucketDialect: Dialect {
    /// What a store calls the right to read objects.
    fn right_to_read(&self) -> &'static str {
        "s3:GetObject"
    }

    /// One page of the keys that begin with `prefix`; with `delimiter`, those beyond the next "/" as common prefixes.
    fn list(&self, prefix: &[u8], delimiter: bool, from: From<'_>, max: usize) -> Url {
        let mut query = format!("list-type=2&encoding-type=url&max-keys={max}");
        if delimiter {
            query.push_str("&delimiter=%2F");
        }
        if !prefix.is_empty() {
            query.push_str("&prefix=");
            query.push_str(&encode_query(prefix));
        }
        match from {
            From::Start => {}
            From::Token(token) => {
                query.push_str("&continuation-token=");
                query.push_str(&encode_query(token.as_bytes()));
            }
            From::After(key) => {
                query.push_str("&start-after=");
                query.push_str(&encode_query(key));
            }
        }
        let mut url = self.place().base.clone();
        url.set_query(Some(&query));
        url
    }

    fn listed(&self, body: &[u8]) -> Result<listing::Answer, String> {
        list_objects_v2::parse(body)
    }
}

fn reading(version: &Version, range: &Range<u64>) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(RANGE, value(format!("bytes={}-{}", range.start, range.end - 1))?);
    headers.insert(IF_MATCH, value(field::quoted(version))?);
    Some(headers)
}

/// What the headers of a HEAD's answer tell.
fn seen(headers: &HeaderMap) -> Result<Option<Object>, &'static str> {
    // Not Response::content_length(): of a HEAD answer that is the length of the body that does not come.
    let size =
        header(headers, CONTENT_LENGTH).and_then(field::size).ok_or("HEAD without a Content-Length")?;
    let modified = header(headers, LAST_MODIFIED).and_then(date::parse_http);
    let etag = header(headers, ETAG).ok_or("HEAD without an ETag")?;
    let version = field::unquoted(etag).filter(|_| size <= volume::FILE_BYTES_MAX);
    Ok(version.map(|version| Object { size, version, modified_ns: modified.unwrap_or(0) }))
}

/// Signs with one set of credentials.
#[async_trait]
pub(crate) trait Signer: Send + Sync {
    /// Err: that cannot be signed.
    async fn sign(&self, request: &mut request::Parts) -> Result<(), ()>;
    /// The same of a request with a body.
    async fn sign_with(&self, request: &mut request::Parts, _payload: Payload) -> Result<(), ()> {
        self.sign(request).await
    }
    /// Of the credentials, what each request carries in clear: stores like to repeat it.
    fn sent(&self) -> Vec<String>;
}

/// What a signature says of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    Empty,
    /// Its SHA-256.
    Digest([u8; 32]),
    /// Nothing: it is read as it is sent, and has a checksum in a header that is signed.
    Unsigned,
}

/// With one of object_store's signers, which want a whole request.
fn authorize(
    parts: &mut request::Parts,
    sign: impl FnOnce(&mut HttpRequest) -> object_store::Result<()>,
) -> Result<(), ()> {
    let (nothing, ()) = Request::new(()).into_parts();
    let mut request = Request::from_parts(std::mem::replace(parts, nothing), HttpRequestBody::empty());
    sign(&mut request).map_err(drop)?;
    (*parts, _) = request.into_parts();
    Ok(())
}

/// Has the endpoint a name, and not an address, as clouds have and emulators have not?
fn has_name(endpoint: &str) -> bool {
    matches!(Url::parse(endpoint).ok().as_ref().and_then(Url::host), Some(Host::Domain(_)))
}

/// Where a bucket is.
#[derive(Debug)]
pub(crate) struct Place {
    /// `s3://bucket`, for messages.
    pub(crate) shown: String,
    pub(crate) bucket: String,
    /// Scheme, host and port, for messages.
    pub(crate) endpoint: String,
    /// The parameter that says where it is, for messages.
    pub(crate) said_by: &'static str,
    /// What URLs start with, parsed once: of a request only path and query are new. Ends in "/".
    pub(crate) base: Url,
}

impl Place {
    fn new(scheme: &str, bucket: &str, endpoint: &str, addressing: Addressing) -> Result<Self, StoreError> {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let shown = format!("{scheme}://{bucket}");
        let base = match addressing {
            Addressing::Path => format!("{endpoint}/{bucket}/"),
            Addressing::Virtual => format!("{}/", endpoint.replacen("://", &format!("://{bucket}."), 1)),
        };
        // An IP address, or a bucket that no host can be called, in virtual style. Signers would panic on it.
        let base = Url::parse(&base).map_err(|e| {
            let why = format!(
                "{base} is no URL ({e}): use addressingStyle \"path\", or an endpoint with a host name"
            );
            StoreError::Invalid { what: shown.clone(), why }
        })?;
        Ok(Self { shown, bucket: bucket.to_owned(), endpoint, said_by: "endpoint", base })
    }
}

/// Where a listing begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum From<'a> {
    Start,
    /// Where the page before said.
    Token(&'a str),
    /// After this key. Not every store can do that: some begin at the start.
    After(&'a [u8]),
}

/// What HEAD tells.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) size: u64,
    pub(crate) version: Version,
    pub(crate) modified_ns: i64,
}

/// An answer that is none.
#[derive(Debug)]
pub(crate) struct Refusal<'a> {
    /// What was asked for.
    pub(crate) what: &'a str,
    pub(crate) url: &'a Url,
    pub(crate) status: StatusCode,
    pub(crate) headers: &'a HeaderMap,
    /// None: it has none, or it could not be read.
    pub(crate) body: Option<&'a [u8]>,
    /// What was asked for would have changed something.
    pub(crate) is_write: bool,
}

impl Refusal<'_> {
    fn retry_after(&self) -> Option<Duration> {
        header(self.headers, http::header::RETRY_AFTER).and_then(answer::retry_after)
    }
}

/// Of the range that an answer covers.
pub(crate) use answer::{content_range, whole_size};
/// `Wed, 21 Oct 2015 07:28:00 GMT` → ns since the epoch.
pub(crate) use date::parse_http;
/// `"abc"` → `abc`. None: no version that a request could name.
pub(crate) use field::unquoted;

pub(crate) fn header(headers: &HeaderMap, name: impl http::header::AsHeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

fn value(text: String) -> Option<HeaderValue> {
    HeaderValue::try_from(text).ok()
}

/// Keys and tokens travel in headers; signers take it for granted that they can.
fn can_be_sent(name: &str, text: &str) -> Result<(), StoreError> {
    if text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    let why = format!("{name} has characters that no request can carry: copy it again");
    Err(StoreError::Invalid { what: "credentials".into(), why })
}

/// A secret of another store's.
fn not_ours(kind: CredentialsKind, scheme: &str, takes: &str) -> StoreError {
    let why = format!("the secret has {}, and {scheme}:// takes {takes}: put those in", kind.names());
    StoreError::Invalid { what: "credentials".into(), why }
}

/// The keys of a volume's secret.
struct Keys {
    id: String,
    secret: String,
    token: Option<String>,
}

impl Keys {
    /// None: the volume is anonymous.
    fn of(credentials: &Credentials, scheme: &str) -> Result<Option<Self>, StoreError> {
        match credentials.kind() {
            CredentialsKind::Anonymous => return Ok(None),
            CredentialsKind::Keys => {}
            other => return Err(not_ours(other, scheme, CredentialsKind::Keys.names())),
        }
        let mut secrets = credentials.to_secrets();
        let mut take = |name: &str| secrets.remove(name).unwrap_or_default();
        let (id, secret) = (take("accessKeyId"), take("secretAccessKey"));
        let token = Some(take("sessionToken")).filter(|token| !token.is_empty());
        can_be_sent("accessKeyId", &id)?;
        token.iter().try_for_each(|token| can_be_sent("sessionToken", token))?;
        Ok(Some(Self { id, secret, token }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_that_no_header_can_carry_are_refused_not_fatal() {
        let secrets = [("accessKeyId", "schlüssel"), ("secretAccessKey", "hunter2")];
        let error = Keys::of(&Credentials::from_secrets(secrets).unwrap(), "s3").err().unwrap().to_string();
        assert!(error.contains("accessKeyId") && !error.contains("schlüssel"), "{error}");
    }
}
