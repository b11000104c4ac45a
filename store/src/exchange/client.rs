//! One attempt at one request: built, signed, sent, its status judged.

use super::answer::{self, judge};
use super::field::{quoted, size, unquoted};
use super::{date, listing};
use crate::access::Access;
use crate::dispatch::Lane;
use crate::egress::Refused;
use crate::keys::{encode_path, encode_query, show};
use crate::limits::Limits;
use crate::observe::{Observer, RetryCause};
use crate::retry::{self, Fault, chain};
use crate::traffic::Place;
use crate::{StoreError, Version};
use bytes::BytesMut;
use http::header::{
    CONTENT_LENGTH, ETAG, HeaderMap, HeaderValue, IF_MATCH, LAST_MODIFIED, RANGE, RETRY_AFTER,
};
use http::{Method, Request, StatusCode};
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::client::HttpRequestBody;
use reqwest::{Response, Url};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::timeout;
use volume::{Addressing, Credentials, Parameters};

/// Everything that is the same for all requests of one source.
pub(super) struct Client {
    http: reqwest::Client,
    limits: Arc<Limits>,
    place: Place,
    observer: Arc<dyn Observer>,
    access: Arc<Access>,
    /// What the signer needs, of the credentials that it was made from: not made anew for each request, for each copy of
    /// a secret stays in memory that was given back.
    signing: Mutex<(Credentials, Option<Arc<AwsCredential>>)>,
    region: String,
    bucket: String,
    /// Scheme, host, port; for messages.
    endpoint: String,
    /// What URLs start with, parsed once: of a request only the path and the query are new. Ends in "/".
    base: Url,
}

/// Where a listing begins.
#[derive(Clone, Copy, Debug)]
pub(super) enum From<'a> {
    Start,
    /// Where the page before said.
    Token(&'a str),
    /// After this key. Not every store can do that: some begin at the start.
    After(&'a [u8]),
}

impl<'a> From<'a> {
    pub(super) fn page(token: Option<&'a str>) -> Self {
        token.map_or(Self::Start, Self::Token)
    }
}

/// What HEAD tells.
pub(super) struct Object {
    pub(super) size: u64,
    pub(super) version: Version,
    pub(super) modified_ns: i64,
}

impl Client {
    pub(super) fn new(
        bucket: &str,
        parameters: &Parameters,
        access: Arc<Access>,
        readers: &str,
        limits: Arc<Limits>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StoreError> {
        let region = parameters.region.clone().unwrap_or_else(|| "us-east-1".to_owned());
        let endpoint = match &parameters.endpoint {
            Some(url) => url.as_str().trim_end_matches('/').to_owned(),
            None if region.starts_with("cn-") => format!("https://s3.{region}.amazonaws.com.cn"),
            None => format!("https://s3.{region}.amazonaws.com"),
        };
        let base = match parameters.addressing {
            Addressing::Path => format!("{endpoint}/{bucket}/"),
            Addressing::Virtual => format!("{}/", endpoint.replacen("://", &format!("://{bucket}."), 1)),
        };
        // An IP address, or a bucket that no host can be called, in virtual style. The signer would panic on it.
        let base = Url::parse(&base).map_err(|e| {
            let why = format!(
                "{base} is no URL ({e}): use addressingStyle \"path\", or an endpoint with a host name"
            );
            StoreError::Invalid { what: format!("s3://{bucket}"), why }
        })?;
        let http = limits.client(&endpoint)?;
        let credentials = access.credentials();
        let signing = Mutex::new((credentials.clone(), credential(&credentials)?));
        // Where requests really go: a bucket that is a host of its own is an endpoint of its own.
        let place = limits.place(&base.origin().ascii_serialization(), readers, 1);
        let bucket = bucket.to_owned();
        Ok(Self { http, limits, place, observer, access, signing, region, bucket, endpoint, base })
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }
    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// What all attempts of one request have in common.
    pub(super) fn request<'a>(&'a self, op: &'static str, lane: Lane, what: &'a str) -> retry::Request<'a> {
        let stall_timeout = self.limits.config().stall_timeout;
        let (endpoint, place) = (&*self.endpoint, &self.place);
        retry::Request { what, endpoint, op, place, lane, observer: &self.observer, stall_timeout }
    }

    /// A key as messages name it.
    pub(super) fn what(&self, key: &[u8]) -> String {
        format!("s3://{}/{}", self.bucket, show(key))
    }

    pub(super) fn object_url(&self, key: &[u8]) -> Url {
        let mut url = self.base.clone();
        url.set_path(&format!("{}{}", self.base.path(), encode_path(key)));
        url
    }

    pub(super) fn list_url(&self, prefix: &[u8], delimiter: bool, from: From<'_>, max: usize) -> Url {
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
        let mut url = self.base.clone();
        url.set_query(Some(&query));
        url
    }

    pub(super) async fn list(
        &self,
        url: &Url,
        what: &str,
        patience: Duration,
    ) -> Result<(listing::Answer, u64), Fault> {
        let response = self.send(Method::GET, url, what, HeaderMap::new(), patience).await?;
        let body = read_all(response, LISTING_BYTES_MAX, patience).await?;
        let malformed = |why| Fault::retry(RetryCause::Malformed, why);
        Ok((listing::parse(&body).map_err(malformed)?, body.len() as u64))
    }

    pub(super) async fn head(
        &self,
        url: &Url,
        what: &str,
        patience: Duration,
    ) -> Result<(Option<Object>, u64), Fault> {
        let response = self.send(Method::HEAD, url, what, HeaderMap::new(), patience).await?;
        let malformed = |why: &str| Fault::retry(RetryCause::Malformed, why);
        let headers = response.headers();
        // Not Response::content_length(): of a HEAD answer that is the length of the body that does not come.
        let size = header(headers, CONTENT_LENGTH).and_then(size);
        let modified = header(headers, LAST_MODIFIED).and_then(date::parse_http);
        let size = size.ok_or_else(|| malformed("HEAD without a Content-Length"))?;
        let etag = header(headers, ETAG).ok_or_else(|| malformed("HEAD without an ETag"))?;
        // As in a listing: a size that no file has, or a version that cannot be asked for.
        let version = unquoted(etag).filter(|_| size <= volume::FILE_BYTES_MAX);
        Ok((version.map(|version| Object { size, version, modified_ns: modified.unwrap_or(0) }), 0))
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
        let mut headers = HeaderMap::new();
        let value = |text: String| {
            HeaderValue::try_from(text).map_err(|_| {
                Fault::Fail(StoreError::malformed(what, "its version cannot be written into a header"))
            })
        };
        headers.insert(RANGE, value(format!("bytes={}-{}", range.start, range.end - 1))?);
        headers.insert(IF_MATCH, value(quoted(wanted))?);
        let response = self.send(Method::GET, url, what, headers, patience).await?;
        let length = range.end - range.start;
        let covered = match response.status() {
            StatusCode::PARTIAL_CONTENT => header(response.headers(), http::header::CONTENT_RANGE)
                .and_then(answer::content_range)
                .is_some_and(|covered| covered == range),
            // A store without ranges, or one that sends the whole because the whole was asked for.
            _ => range.start == 0 && response.content_length() == Some(length),
        };
        if !covered {
            return Err(Fault::retry(
                RetryCause::Malformed,
                "the answer covers another range than was asked for",
            ));
        }
        if response.content_length().is_some_and(|claimed| claimed != length) {
            return Err(Fault::retry(RetryCause::Malformed, "the answer has another length than its range"));
        }
        // A store that ignores If-Match must not slip another version under the reader.
        match version(response.headers()) {
            Some(found) if found == *wanted => Ok(response),
            Some(_) => Err(Fault::Fail(StoreError::Stale { what: what.to_owned() })),
            None => Err(Fault::retry(RetryCause::Malformed, "GET without an ETag")),
        }
    }

    /// Sends and waits for the headers; any status but success is a fault.
    async fn send(
        &self,
        method: Method,
        url: &Url,
        what: &str,
        headers: HeaderMap,
        patience: Duration,
    ) -> Result<Response, Fault> {
        let broken = |why: String| Fault::Fail(StoreError::Invalid { what: what.to_owned(), why });
        let head = method == Method::HEAD;
        let mut request = Request::new(HttpRequestBody::empty());
        *request.method_mut() = method;
        *request.uri_mut() =
            url.as_str().parse().map_err(|e| broken(format!("no URL can be made of it: {e}")))?;
        *request.headers_mut() = headers;
        let credential = self.credential().map_err(Fault::Fail)?;
        if let Some(credential) = &credential {
            AwsAuthorizer::new(credential, "s3", &self.region)
                .try_authorize(&mut request, None)
                .map_err(|_| broken("the request could not be signed".to_owned()))?;
        }
        let (parts, _) = request.into_parts();
        let mut request = reqwest::Request::new(parts.method, url.clone());
        *request.headers_mut() = parts.headers;

        let response = match timeout(patience, self.http.execute(request)).await {
            // Not even its name server may have answered.
            Err(_) => {
                let (endpoint, seconds) = (&self.endpoint, patience.as_secs_f64());
                let why = format!(
                    "{endpoint} sent nothing for {seconds:.1} s; check 'endpoint', and the network of this node"
                );
                return Err(Fault::retry(RetryCause::Stalled, why));
            }
            Ok(Err(e)) => return Err(self.unreachable(what, e)),
            Ok(Ok(response)) => response,
        };
        let status = response.status();
        if status == StatusCode::OK || status == StatusCode::PARTIAL_CONTENT {
            return Ok(response);
        }
        let retry_after = header(response.headers(), RETRY_AFTER).and_then(answer::retry_after);
        let region = header(response.headers(), "x-amz-bucket-region").map(str::to_owned);
        // What the store says is for the message only: if it cannot be read, the status must do.
        let body = if head { None } else { read_all(response, ERROR_BYTES_MAX, patience).await.ok() };
        let mut said = body.map(|body| answer::parse(&body)).unwrap_or_default();
        said.region = said.region.or(region);
        said.scrub(&secrets(credential.as_deref()));
        let place = answer::Place { what, bucket: &self.bucket, endpoint: &self.endpoint };
        Err(judge(status, &said, retry_after, &place))
    }

    /// Of the credentials that are in force now.
    fn credential(&self) -> Result<Option<Arc<AwsCredential>>, StoreError> {
        let mut signing = self.signing.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !self.access.has(&signing.0) {
            let credentials = self.access.credentials();
            let made = credential(&credentials)?;
            *signing = (credentials, made);
        }
        Ok(signing.1.clone())
    }

    /// No answer at all: why, and is it worth a retry?
    fn unreachable(&self, what: &str, error: reqwest::Error) -> Fault {
        // Nor does asking again make another address of it. (The next request of the volume's resolves it anew.)
        if let Some(refused) = Refused::find(&error) {
            return Fault::Fail(refused.of(what));
        }
        let connect = error.is_connect();
        let why = chain(&error.without_url());
        // rustls's words; its types are not ours to name. A certificate does not become valid by asking again.
        let lower = why.to_ascii_lowercase();
        if ["certificate", "corrupt message", "handshake", "protocolversion"]
            .iter()
            .any(|word| lower.contains(word))
        {
            return Fault::Fail(StoreError::Invalid {
                what: what.to_owned(),
                why: format!(
                    "no TLS connection to {}: {why}; check that 'endpoint' speaks https and that its certificate is \
                     signed by a CA that this node trusts",
                    self.endpoint
                ),
            });
        }
        match connect {
            true => Fault::retry(
                RetryCause::Connect,
                format!(
                    "cannot connect to {}: {why}; check 'endpoint', and the network of this node",
                    self.endpoint
                ),
            ),
            false => Fault::retry(RetryCause::Reset, format!("connection to {} broke: {why}", self.endpoint)),
        }
    }
}

/// What must appear in no message. The secret key is never sent, so no store can echo it.
fn secrets(credential: Option<&AwsCredential>) -> Vec<&str> {
    let sent = credential.into_iter().flat_map(|c| [Some(c.key_id.as_str()), c.token.as_deref()]);
    sent.flatten().collect()
}

/// Twice what 1,000 keys of 1,024 bytes take with every byte encoded.
const LISTING_BYTES_MAX: usize = 8 << 20;
const ERROR_BYTES_MAX: usize = 64 << 10;

fn credential(credentials: &Credentials) -> Result<Option<Arc<AwsCredential>>, StoreError> {
    if credentials.is_anonymous() {
        return Ok(None);
    }
    let mut secrets = credentials.to_secrets();
    let mut take = |name: &str| secrets.remove(name).unwrap_or_default();
    let (key_id, secret_key) = (take("accessKeyId"), take("secretAccessKey"));
    let token = Some(take("sessionToken")).filter(|token| !token.is_empty());
    // Both travel in headers; the signer takes it for granted that they can.
    for (name, value) in [("accessKeyId", Some(&key_id)), ("sessionToken", token.as_ref())] {
        if value.is_some_and(|value| !value.bytes().all(|byte| byte.is_ascii_graphic())) {
            let why = format!("{name} has characters that no request can carry: copy it again");
            return Err(StoreError::Invalid { what: "credentials".into(), why });
        }
    }
    Ok(Some(Arc::new(AwsCredential { key_id, secret_key, token })))
}

pub(super) fn stalled(patience: Duration) -> Fault {
    Fault::retry(RetryCause::Stalled, format!("the store sent nothing for {:.1} s", patience.as_secs_f64()))
}

pub(super) fn header(headers: &HeaderMap, name: impl http::header::AsHeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

pub(super) fn version(headers: &HeaderMap) -> Option<Version> {
    unquoted(header(headers, ETAG)?)
}

/// A whole small body. A break in it is a fault like any other.
async fn read_all(mut response: Response, max: usize, patience: Duration) -> Result<BytesMut, Fault> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LimitsConfig, NoObserver};
    use proptest::prelude::*;

    fn client(parameters: &Parameters) -> Client {
        let limits = Arc::new(Limits::new(LimitsConfig::default()));
        let access = crate::access::tests::fixed();
        Client::new("data", parameters, access, "readers", limits, Arc::new(NoObserver)).unwrap()
    }

    #[test]
    fn urls_follow_the_addressing_style() {
        let aws = Parameters { region: Some("eu-central-1".into()), ..Parameters::default() };
        assert_eq!(
            client(&aws).object_url(b"a b").as_str(),
            "https://s3.eu-central-1.amazonaws.com/data/a%20b"
        );
        let endpoint = Some(Url::parse("https://h.example:9000").unwrap());
        let own = Parameters { endpoint, addressing: Addressing::Virtual, ..Parameters::default() };
        assert_eq!(client(&own).object_url(b"a+b").as_str(), "https://data.h.example:9000/a%2Bb");
        assert_eq!(
            client(&own).list_url(b"x&y/", true, From::Token("t=="), 7).as_str(),
            "https://data.h.example:9000/?list-type=2&encoding-type=url&max-keys=7&delimiter=%2F&prefix=x%26y%2F&continuation-token=t%3D%3D"
        );
    }

    proptest! {
        #[test]
        fn a_url_that_is_made_of_a_parsed_one_is_what_parsing_the_whole_gives(
            key in proptest::collection::vec(any::<u8>(), 0..40),
            endpoint in "https?://[a-z]{1,8}(:[1-9][0-9]{3})?(/[a-z%20]{0,6})?",
            is_virtual in any::<bool>(),
        ) {
            prop_assume!(key.split(|b| *b == b'/').all(|s| !matches!(s, b"." | b"..")));
            let endpoint = Url::parse(&endpoint).unwrap();
            let addressing = if is_virtual { Addressing::Virtual } else { Addressing::Path };
            let client = client(&Parameters { endpoint: Some(endpoint), addressing, ..Parameters::default() });
            let whole = format!("{}{}", client.base, encode_path(&key));
            let made = client.object_url(&key);
            prop_assert_eq!(made.as_str(), whole.as_str());
            prop_assert_eq!(Url::parse(&whole).unwrap(), made);
            let list = client.list_url(&key, true, From::Token("t+/="), 7);
            prop_assert_eq!(Url::parse(list.as_str()).unwrap(), list);
        }
    }

    #[test]
    fn credentials_that_no_header_can_carry_are_refused_not_fatal() {
        let secrets = [("accessKeyId", "schlüssel"), ("secretAccessKey", "hunter2")];
        let error = credential(&Credentials::from_secrets(secrets).unwrap()).err().unwrap().to_string();
        assert!(error.contains("accessKeyId") && !error.contains("schlüssel"), "{error}");
    }
}
