//! Google Cloud Storage, by its JSON interface: an object's generation is its version.
//!
//! Objects that were stored compressed (`Content-Encoding: gzip`) are taken as they lie there: who does not say so would be
//! sent them uncompressed, of a length that nothing announces and without ranges.

use super::answer::{self, Said, Words};
use super::checksum::{self, Checksum};
use super::encryption::{self, CustomerKey, Wrong};
use super::listing::{self, is_page};
use super::{
    BucketDialect, Dialect, From, Object, Place, Refusal, Signer, can_be_sent, date, field, header, not_ours,
};
use crate::keys::encode_query;
use crate::observe::RetryCause;
use crate::retry::Fault;
use crate::{StoreError, Version};
use async_trait::async_trait;
use crc_fast::CrcAlgorithm;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, HeaderMap, HeaderName, HeaderValue, RANGE,
};
use http::{Method, StatusCode, request};
use object_store::client::{
    ClientOptions, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpService,
};
use object_store::gcp::{GcpCredentialProvider, GoogleCloudStorageBuilder};
use serde::Deserialize;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use url::Url;
use volume::{Addressing, Credentials, CredentialsKind, Parameters};

const PUBLIC: &str = "https://storage.googleapis.com";

/// Of the object that an answer's bytes are of.
const HASH: HeaderName = HeaderName::from_static("x-goog-hash");
const GENERATION: HeaderName = HeaderName::from_static("x-goog-generation");

const STORED_ENCODING: HeaderName = HeaderName::from_static("x-goog-stored-content-encoding");

/// Who pays for a request: a project.
const PAYER: HeaderName = HeaderName::from_static("x-goog-user-project");

const CUSTOMER_KEY: encryption::Names = [
    HeaderName::from_static("x-goog-encryption-algorithm"),
    HeaderName::from_static("x-goog-encryption-key"),
    HeaderName::from_static("x-goog-encryption-key-sha256"),
];

/// Of an object all that we look at; without it an answer has forty fields.
const FIELDS: &str = "name,size,generation,updated";

#[derive(Debug)]
pub(crate) struct Gcs {
    place: Place,
    /// `…/storage/v1/b/bucket/o`
    objects: Url,
    requester_pays: bool,
}

impl Gcs {
    pub(crate) fn new(bucket: &str, parameters: &Parameters) -> Result<Self, StoreError> {
        let endpoint = parameters.endpoint.as_ref().map_or(PUBLIC, Url::as_str);
        let place = Place::new("gs", bucket, endpoint, Addressing::Path)?;
        let mut objects = place.base.clone();
        objects.set_path(&format!("/storage/v1/b/{bucket}/o"));
        Ok(Self { place, objects, requester_pays: parameters.requester_pays })
    }

    fn with(&self, key: &[u8], query: &str) -> Url {
        let mut url = self.object(key);
        url.set_query(Some(query));
        url
    }
}

/// A page of objects, or one of them.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Listed {
    kind: String,
    #[serde(default)]
    prefixes: Vec<String>,
    #[serde(default)]
    items: Vec<Item>,
    next_page_token: Option<String>,
}

/// Numbers are texts, for JavaScript's sake.
#[derive(Deserialize)]
struct Item {
    name: String,
    size: String,
    generation: String,
    updated: Option<String>,
}

impl Item {
    fn object(&self) -> Result<listing::Object, String> {
        let size = field::size(&self.size).ok_or("an object with a size that is no number")?;
        let modified_ns = self.updated.as_deref().and_then(date::parse_iso).unwrap_or(0);
        let key = self.name.clone().into_bytes();
        Ok(listing::Object { key, size, version: generation(&self.generation), modified_ns })
    }
}

/// None: no request could name it.
fn generation(text: &str) -> Option<Version> {
    let number = text.parse::<i64>().ok().filter(|number| *number >= 0)?;
    Some(Version(number.to_string()))
}

impl Dialect for Gcs {
    fn place(&self) -> &Place {
        &self.place
    }

    fn headers(&self) -> HeaderMap {
        HeaderMap::new()
    }

    fn with_key(&self, key: &CustomerKey) -> Option<HeaderMap> {
        Some(key.with_sha256(CUSTOMER_KEY))
    }

    /// The name is one segment of the path: also its slashes are encoded.
    fn object(&self, key: &[u8]) -> Url {
        let mut url = self.objects.clone();
        url.set_path(&format!("{}/{}", self.objects.path(), encode_query(key)));
        url
    }

    fn looking(&self, key: &[u8]) -> (Method, Url) {
        (Method::GET, self.with(key, &format!("fields={FIELDS}")))
    }

    fn seen(&self, _: &HeaderMap, body: &[u8]) -> Result<Option<Object>, &'static str> {
        let item: Item = serde_json::from_slice(body).map_err(|_| "what is no object in Google's JSON")?;
        let object = item.object().map_err(|_| "an object with a size that is no number")?;
        let version = object.version.filter(|_| object.size <= volume::FILE_BYTES_MAX);
        let (size, modified_ns) = (object.size, object.modified_ns);
        Ok(version.map(|version| Object { size, version, modified_ns }))
    }

    fn content(&self, key: &[u8], version: &Version) -> Option<Url> {
        let generation = generation(version.as_str())?;
        Some(self.with(key, &format!("alt=media&ifGenerationMatch={}", generation.as_str())))
    }

    fn reading(&self, _: &Version, range: &Range<u64>) -> Option<HeaderMap> {
        let mut headers = HeaderMap::new();
        headers.insert(RANGE, super::value(format!("bytes={}-{}", range.start, range.end - 1))?);
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        Some(headers)
    }

    fn is_as_stored(&self, headers: &HeaderMap) -> bool {
        let encoding = |name: HeaderName| header(headers, name).filter(|encoding| *encoding != "identity");
        encoding(CONTENT_ENCODING) == encoding(STORED_ENCODING)
    }

    /// `crc32c=4waSgw==,md5=…`, in one header or two.
    fn checksum(&self, headers: &HeaderMap) -> Option<Checksum> {
        let told = headers.get_all(HASH).iter().filter_map(|value| value.to_str().ok());
        let crc =
            told.flat_map(|value| value.split(',')).find_map(|part| part.trim().strip_prefix("crc32c="))?;
        let value = checksum::big_endian(crc, CrcAlgorithm::Crc32Iscsi)?;
        Some(Checksum { algorithm: CrcAlgorithm::Crc32Iscsi, value, of_range: false })
    }

    fn tells_of_all(&self) -> bool {
        true
    }

    fn sums(&self, _size: u64) -> Option<CrcAlgorithm> {
        Some(CrcAlgorithm::Crc32Iscsi)
    }

    fn version(&self, headers: &HeaderMap, _: &Version) -> Option<Version> {
        generation(header(headers, GENERATION)?)
    }

    fn refused(&self, refusal: &Refusal<'_>, secrets: &[String]) -> Fault {
        let mut said = refusal.body.map(parse).unwrap_or_default();
        said.scrub(secrets);
        let what = || refusal.what.to_owned();
        let text = said.text(refusal.status);
        let denied = |why: String| Fault::Fail(StoreError::Denied { what: what(), why });
        let throttled =
            Fault::Retry { cause: RetryCause::Throttled, detail: text.clone(), after: refusal.retry_after() };
        let message = said.message.to_ascii_lowercase();
        // The two interfaces of Google's write them with a small letter and with a capital one.
        let wrong = match said.code.to_ascii_lowercase().as_str() {
            "resourceisencryptedwithcustomerencryptionkey" => Some(Wrong::Missing),
            "customerencryptionkeyisincorrect" => Some(Wrong::Other),
            "resourcenotencryptedwithcustomerencryptionkey" => Some(Wrong::NotNeeded),
            _ => None,
        };
        if let Some(wrong) = wrong {
            return encryption::wrong_key(refusal, &said, wrong);
        }
        match (refusal.status, said.code.as_str()) {
            (StatusCode::BAD_REQUEST | StatusCode::FORBIDDEN, _)
                if message.contains("cloud kms") || message.contains("cloudkms") =>
            {
                let advice = "the Cloud KMS key that the object is encrypted with cannot be used: let the storage service agent of the \
                              bucket's project use it (roles/cloudkms.cryptoKeyEncrypterDecrypter), and see that it is enabled";
                encryption::denied(refusal, &said, advice)
            }
            (StatusCode::UNAUTHORIZED, _) => denied(format!(
                "the store does not know who asks: give the volume a secret with serviceAccountKey; if it has one, check \
                 serviceAccountKey in the secret, that the service account still has that key, and this node's clock ({text})"
            )),
            (_, "rateLimitExceeded" | "userRateLimitExceeded" | "quotaExceeded" | "backendError") => {
                throttled
            }
            (StatusCode::BAD_REQUEST | StatusCode::FORBIDDEN, _)
                if message.contains("requester pays") || message.contains("user project") =>
            {
                denied(format!(
                    "whoever reads this bucket pays for it: set 'requesterPays' to \"true\", and let the service account use its \
                 project (serviceusage.services.use) ({text})"
                ))
            }
            // Of an object the message repeats the name.
            (StatusCode::NOT_FOUND, _)
                if refusal.url.path() == self.objects.path()
                    || message.starts_with("the specified bucket") =>
            {
                Fault::Fail(StoreError::NotFound {
                    what: format!("bucket {} at {}", self.place.bucket, self.place.endpoint),
                    advice: ": check 'source' and 'endpoint'",
                })
            }
            _ => {
                let words = Words { rights: "storage.objects.list and storage.objects.get" };
                answer::judge(refusal, &said, &self.place, &words)
            }
        }
    }

    fn signer(&self, credentials: &Credentials) -> Result<Option<Arc<dyn Signer>>, StoreError> {
        match credentials.kind() {
            CredentialsKind::Anonymous => return Ok(None),
            CredentialsKind::ServiceAccount => {}
            // Google's S3 interface has keys such as these.
            CredentialsKind::Keys => {
                let why = "the secret has accessKeyId and secretAccessKey, which are HMAC keys: with them use an s3:// source and \
                           endpoint https://storage.googleapis.com, or put a serviceAccountKey in";
                return Err(StoreError::Invalid { what: "credentials".into(), why: why.into() });
            }
            other => return Err(not_ours(other, "gs", "serviceAccountKey")),
        }
        let file = credentials.to_secrets().remove("serviceAccountKey").unwrap_or_default();
        Ok(Some(Arc::new(Signs::new(&file, self.requester_pays)?)))
    }
}

impl BucketDialect for Gcs {
    fn right_to_read(&self) -> &'static str {
        "storage.objects.get"
    }

    fn list(&self, prefix: &[u8], delimiter: bool, from: From<'_>, max: usize) -> Url {
        let mut query = format!("maxResults={max}&fields=kind,prefixes,nextPageToken,items({FIELDS})");
        if delimiter {
            query.push_str("&delimiter=%2F");
        }
        let mut say = |name: &str, value: &[u8]| {
            query.push_str(&format!("&{name}={}", encode_query(value)));
        };
        if !prefix.is_empty() {
            say("prefix", prefix);
        }
        match from {
            From::Start => {}
            From::Token(token) => say("pageToken", token.as_bytes()),
            From::After(key) => say("startOffset", key),
        }
        let mut url = self.objects.clone();
        url.set_query(Some(&query));
        url
    }

    fn listed(&self, body: &[u8]) -> Result<listing::Answer, String> {
        let listed: Listed =
            serde_json::from_slice(body).map_err(|e| format!("the listing is not Google's JSON: {e}"))?;
        if listed.kind != "storage#objects" {
            return Err("a listing that is of another kind".into());
        }
        is_page(listed.items.len())?;
        is_page(listed.prefixes.len())?;
        Ok(listing::Answer {
            objects: listed.items.iter().map(Item::object).collect::<Result<_, _>>()?,
            prefixes: listed.prefixes.into_iter().map(String::into_bytes).collect(),
            next: listed.next_page_token.filter(|token| !token.is_empty()),
        })
    }
}

/// `{"error": {"message": …, "errors": [{"reason": …}]}}`; anything else gives an empty answer.
fn parse(body: &[u8]) -> Said {
    #[derive(Deserialize)]
    struct Document {
        error: Refused,
    }
    #[derive(Deserialize)]
    struct Refused {
        #[serde(default)]
        message: String,
        #[serde(default)]
        errors: Vec<Reason>,
    }
    #[derive(Deserialize)]
    struct Reason {
        #[serde(default)]
        reason: String,
    }
    let Ok(Document { error }) = serde_json::from_slice(body) else { return Said::default() };
    let reason = error.errors.into_iter().next().map(|first| first.reason);
    Said::of(reason.unwrap_or_default(), error.message)
}

/// Google's own library signs a token with the account's key, good for an hour, and asks nobody for it.
struct Signs {
    tokens: GcpCredentialProvider,
    project: Option<HeaderValue>,
    /// The token of now.
    sent: Mutex<String>,
}

impl Signs {
    fn new(file: &str, requester_pays: bool) -> Result<Self, StoreError> {
        let invalid = |why: String| StoreError::Invalid { what: "credentials".into(), why };
        // The library's and the parser's errors may repeat what they have read.
        let advice = "put in the JSON key file of a service account, as Google's console has given it out";
        #[derive(Deserialize)]
        struct File {
            r#type: String,
            project_id: Option<String>,
        }
        let parsed: File = serde_json::from_str(file)
            .map_err(|_| invalid(format!("serviceAccountKey in the secret is no key file: {advice}")))?;
        if parsed.r#type != "service_account" {
            let kind: String = parsed.r#type.chars().filter(|c| c.is_ascii_graphic()).take(40).collect();
            return Err(invalid(format!(
                "serviceAccountKey in the secret is a file of type {kind:?}: {advice}"
            )));
        }
        let project = match (requester_pays, parsed.project_id) {
            (false, _) => None,
            (true, Some(project)) if !project.is_empty() => {
                can_be_sent("project_id", &project)?;
                super::value(project)
            }
            (true, _) => {
                return Err(invalid(
                    "serviceAccountKey in the secret has no project_id, which would pay".into(),
                ));
            }
        };
        let builder = GoogleCloudStorageBuilder::new()
            .with_bucket_name("none")
            .with_http_connector(Nowhere)
            .with_service_account_key(file);
        let store = builder.build();
        let store = store.map_err(|_| {
            invalid(format!("the private key in the secret's serviceAccountKey cannot be read: {advice}"))
        })?;
        Ok(Self { tokens: store.credentials().clone(), project, sent: Mutex::default() })
    }
}

#[async_trait]
impl Signer for Signs {
    async fn sign(&self, request: &mut request::Parts) -> Result<(), ()> {
        let token = self.tokens.get_credential().await.map_err(drop)?;
        let mut value =
            super::value(format!("Bearer {}", token.bearer)).filter(|_| !token.bearer.is_empty()).ok_or(())?;
        value.set_sensitive(true);
        request.headers.insert(AUTHORIZATION, value);
        request.headers.extend(self.project.iter().map(|project| (PAYER, project.clone())));
        let mut sent = self.sent.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if *sent != token.bearer {
            sent.clone_from(&token.bearer);
        }
        Ok(())
    }

    fn sent(&self) -> Vec<String> {
        vec![self.sent.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()]
    }
}

/// What needs no network gets none.
#[derive(Debug)]
struct Nowhere;

impl HttpConnector for Nowhere {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Nowhere))
    }
}

#[async_trait]
impl HttpService for Nowhere {
    async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
        Err(HttpError::new(HttpErrorKind::Connect, std::io::Error::from(std::io::ErrorKind::Unsupported)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    fn gcs(parameters: &Parameters) -> Gcs {
        Gcs::new("my_bucket", parameters).unwrap()
    }

    #[test]
    fn a_name_is_one_segment_and_a_version_is_a_generation() {
        let gcs = gcs(&Parameters::default());
        let base = "https://storage.googleapis.com/storage/v1/b/my_bucket/o";
        assert_eq!(gcs.object(b"a/b c+d").as_str(), format!("{base}/a%2Fb%20c%2Bd"));
        let version = Version("1700000000000001".into());
        assert_eq!(
            gcs.content("é".as_bytes(), &version).unwrap().as_str(),
            format!("{base}/%C3%A9?alt=media&ifGenerationMatch=1700000000000001")
        );
        assert_eq!(
            gcs.list(b"x&y/", true, From::Token("t=="), 7).as_str(),
            format!(
                "{base}?maxResults=7&fields=kind,prefixes,nextPageToken,items(name,size,generation,updated)&delimiter=%2F&\
                 prefix=x%26y%2F&pageToken=t%3D%3D"
            )
        );
        for none in ["", "e", "1&alt=json", "-1", "99999999999999999999", "1 "] {
            assert_eq!(gcs.content(b"a", &Version(none.into())), None, "{none}");
        }
        let endpoint = Some(Url::parse("http://127.0.0.1:4443").unwrap());
        let local = Gcs::new("b", &Parameters { endpoint, ..Parameters::default() }).unwrap();
        assert_eq!(local.object(b"k").as_str(), "http://127.0.0.1:4443/storage/v1/b/b/o/k");
    }

    #[test]
    fn a_page_is_googles_json_and_nothing_else() {
        let gcs = gcs(&Parameters::default());
        let page = gcs
            .listed(
                br#"{"kind": "storage#objects", "nextPageToken": "n", "prefixes": ["d/sub/"], "items": [
                    {"name": "d/a\u00e9", "size": "7", "generation": "12", "updated": "2015-10-21T07:28:00.123Z", "crc32c": "x"},
                    {"name": "d/huge", "size": "99999999999999999999999", "generation": "12"},
                    {"name": "d/odd", "size": "1", "generation": "one"}]}"#,
            )
            .unwrap()
            .into_page(b"d/");
        let names: Vec<_> = page.entries.iter().map(|entry| String::from_utf8_lossy(&entry.name)).collect();
        assert_eq!((names.as_slice(), page.next.as_deref()), (&["aé".into(), "sub".into()][..], Some("n")));
        assert_eq!(page.entries[0].kind, Kind::File { size: 7, version: Version("12".into()) });
        assert_eq!(page.entries[0].modified_ns, 1_445_412_480_000_000_000);
        assert_eq!(page.unnameable, ["d/huge (too large for a file)", "d/odd"]);
        let empty = gcs.listed(br#"{"kind": "storage#objects"}"#).unwrap();
        assert!(empty.is_empty() && empty.next().is_none());
        for wrong in [
            "{}",
            "",
            "<html>login</html>",
            r#"{"kind": "storage#buckets"}"#,
            r#"{"kind": "storage#objects", "items": ["#,
            r#"{"kind": "storage#objects", "items": [{"name": "a", "size": "-1", "generation": "1"}]}"#,
            r#"{"kind": "storage#objects", "items": [{"name": "a"}]}"#,
        ] {
            assert!(gcs.listed(wrong.as_bytes()).is_err(), "{wrong}");
        }
        let many = format!(r#"{{"kind": "storage#objects", "prefixes": [{}"p/"]}}"#, r#""p/","#.repeat(1000));
        assert!(gcs.listed(many.as_bytes()).unwrap_err().contains("more than was asked for"));
    }

    #[test]
    fn refusals_say_what_to_do() {
        let gcs = gcs(&Parameters::default());
        let headers = HeaderMap::new();
        let judge = |status: u16, reason: &str, message: &str| {
            let body = format!(
                r#"{{"error": {{"code": {status}, "message": "{message}", "errors": [{{"reason": "{reason}"}}]}}}}"#
            );
            let status = StatusCode::from_u16(status).unwrap();
            let url = gcs.object(b"k");
            let refusal = Refusal {
                what: "gs://my_bucket/k",
                url: &url,
                status,
                headers: &headers,
                body: Some(body.as_bytes()),
                is_write: false,
            };
            gcs.refused(&refusal, &["T0KEN".to_owned()])
        };
        for (status, reason, message, words) in [
            (401, "authError", "Invalid Credentials T0KEN", "check serviceAccountKey"),
            (403, "forbidden", "no storage.objects.get access", "grant storage.objects.list"),
            (404, "notFound", "The specified bucket does not exist.", "check 'source'"),
            (
                400,
                "required",
                "Bucket is a requester pays bucket but no user project provided.",
                "requesterPays",
            ),
            (404, "notFound", "No such object: my_bucket/requester pays", "gs://my_bucket/k does not exist"),
        ] {
            match judge(status, reason, message) {
                Fault::Fail(error) => {
                    let text = error.to_string();
                    assert!(text.contains(words) && !text.contains("T0KEN"), "{reason}: {text}");
                }
                retry => panic!("{reason}: {retry:?}"),
            }
        }
        assert!(matches!(judge(412, "conditionNotMet", ""), Fault::Fail(StoreError::Stale { .. })));
        assert!(matches!(
            judge(416, "requestedRangeNotSatisfiable", ""),
            Fault::Fail(StoreError::Stale { .. })
        ));
        for (status, reason) in
            [(403, "rateLimitExceeded"), (429, "rateLimitExceeded"), (503, "backendError")]
        {
            assert!(matches!(judge(status, reason, ""), Fault::Retry { .. }), "{reason}");
        }
    }

    #[test]
    fn a_key_file_that_is_none_is_refused_without_repeating_it() {
        let service = r#"{"type": "service_account", "private_key": "hunter2", "client_email": "a", "private_key_id": "1"}"#;
        for (file, words) in [
            ("hunter2", "no key file"),
            (r#"{"type": "external_account", "x": "hunter2"}"#, "external_account"),
            (r#"{"type": "service_account", "x": "hunter2"}"#, "private key"),
            (service, "private key"),
        ] {
            let error = Signs::new(file, false).map(drop).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains("hunter2"), "{file}: {error}");
        }
        let error = Signs::new(service, true).map(drop).unwrap_err().to_string();
        assert!(error.contains("project_id"), "{error}");
    }
}
