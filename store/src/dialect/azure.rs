//! Azure's blobs: containers of an account. What `az://`, `abfs://` and `wasb://` mean; also an account with directories of
//! its own (a hierarchical namespace) answers in this protocol.

use super::answer::{self, Said, Words};
use super::checksum::{Checksum, HELD_MAX};
use super::encryption::{self, CustomerKey, Wrong};
use super::listing::{self, is_page};
use super::xml::{Tag, walk};
use super::{
    BucketDialect, Dialect, From, Object, Place, Refusal, Signer, authorize, date, field, has_name, header,
    not_ours,
};
use crate::keys::encode_query;
use crate::observe::RetryCause;
use crate::retry::Fault;
use crate::{StoreError, Version};
use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crc_fast::CrcAlgorithm;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::request;
use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use url::Url;
use volume::{Addressing, Credentials, CredentialsKind, Parameters};

/// Of the protocol: all that we use has been in it since this one.
const VERSION: (HeaderName, HeaderValue) =
    (HeaderName::from_static("x-ms-version"), HeaderValue::from_static("2023-11-03"));

const CUSTOMER_KEY: encryption::Names = [
    HeaderName::from_static("x-ms-encryption-algorithm"),
    HeaderName::from_static("x-ms-encryption-key"),
    HeaderName::from_static("x-ms-encryption-key-sha256"),
];

/// The code of an error: the answer to a HEAD has it nowhere else.
const CODE: HeaderName = HeaderName::from_static("x-ms-error-code");

/// Azurite's word for what it lacks.
const UNSUPPORTED: &str = "FeatureNotSupported";

const SUM_RANGE: HeaderName = HeaderName::from_static("x-ms-range-get-content-crc64");
/// Azure computes checksums of no larger ranges.
const SUMMED_MAX: u64 = 4 << 20;
const CRC64: HeaderName = HeaderName::from_static("x-ms-content-crc64");

/// Of a directory, in an account that has such.
const RESOURCE: HeaderName = HeaderName::from_static("x-ms-resource-type");

#[derive(Debug)]
pub(crate) struct Azure {
    place: Place,
    account: String,
    /// `…/container?restype=container&comp=list`
    container: Url,
    /// It has not said yet that it computes no checksums of ranges, as Azurite says.
    sums_ranges: AtomicBool,
}

impl Azure {
    /// `endpoint`: of the source, or of the parameters. `account`: likewise.
    pub(crate) fn new(
        container: &str,
        endpoint: Option<&Url>,
        account: Option<&str>,
        parameters: &Parameters,
    ) -> Result<Self, StoreError> {
        let account =
            account.or(parameters.storage_account.as_deref()).ok_or_else(|| StoreError::Invalid {
                what: format!("az://{container}"),
                why: "set 'storageAccount', or write az://container@ACCOUNT.blob.core.windows.net/prefix"
                    .into(),
            })?;
        let endpoint =
            endpoint.map_or_else(|| format!("https://{account}.blob.core.windows.net"), Url::to_string);
        // What has an address for a name is an emulator, which has the account in its paths.
        let at = match has_name(&endpoint) {
            true => endpoint.clone(),
            false => format!("{}/{account}", endpoint.trim_end_matches('/')),
        };
        let mut place = Place::new("az", container, &at, Addressing::Path)?;
        place.endpoint = endpoint.trim_end_matches('/').to_owned();
        let mut url = place.base.clone();
        url.set_path(place.base.path().trim_end_matches('/'));
        url.set_query(Some("restype=container&comp=list"));
        Ok(Self { place, account: account.to_owned(), container: url, sums_ranges: AtomicBool::new(true) })
    }
}

impl Dialect for Azure {
    fn place(&self) -> &Place {
        &self.place
    }

    fn headers(&self) -> HeaderMap {
        [VERSION].into_iter().collect()
    }

    fn with_key(&self, key: &CustomerKey) -> Option<HeaderMap> {
        Some(key.with_sha256(CUSTOMER_KEY))
    }

    fn seen(&self, headers: &HeaderMap, _: &[u8]) -> Result<Option<Object>, &'static str> {
        // Its listing has it as a prefix.
        if header(headers, RESOURCE) == Some("directory") {
            return Ok(None);
        }
        super::seen(headers)
    }

    /// Azure computes it for whoever asks: it is asked where it is compared, which is also where a range may be all of an object.
    fn reading(&self, version: &Version, range: &Range<u64>) -> Option<HeaderMap> {
        let mut headers = super::reading(version, range)?;
        let begins = range.start == 0 && range.end <= SUMMED_MAX;
        if (begins || range.end - range.start <= HELD_MAX) && self.sums_ranges.load(Ordering::Relaxed) {
            headers.insert(SUM_RANGE, HeaderValue::from_static("true"));
        }
        Some(headers)
    }

    /// Of an object that comes as one range.
    fn sums(&self, size: u64) -> Option<CrcAlgorithm> {
        (size <= SUMMED_MAX).then_some(CrcAlgorithm::Crc64Nvme)
    }

    fn checksum(&self, headers: &HeaderMap) -> Option<Checksum> {
        let bytes = BASE64_STANDARD.decode(header(headers, CRC64)?.trim()).ok()?;
        let value = u64::from_le_bytes(bytes.try_into().ok()?);
        Some(Checksum { algorithm: CrcAlgorithm::Crc64Nvme, value, of_range: true })
    }

    fn refused(&self, refusal: &Refusal<'_>, secrets: &[String]) -> Fault {
        let mut said = refusal.body.map(answer::parse).unwrap_or_default();
        if said.code.is_empty()
            && let Some(code) = header(refusal.headers, CODE)
        {
            said = Said::of(code.to_owned(), String::new());
        }
        // Of no use to who reads it; the store's support asks for them.
        if let Some(end) = said.message.find("\nRequestId:") {
            said.message.truncate(end);
        }
        said.scrub(secrets);
        if said.code == UNSUPPORTED {
            // No fault of the server's, which then need not be asked less.
            self.sums_ranges.store(false, Ordering::Relaxed);
            return Fault::retry(RetryCause::Malformed, said.text(refusal.status));
        }
        let (what, place) = (refusal.what.to_owned(), &self.place);
        let text = said.text(refusal.status);
        let denied = |why: String| Fault::Fail(StoreError::Denied { what: what.clone(), why });
        let container = || {
            Fault::Fail(StoreError::NotFound {
                what: format!("container {} of account {} at {}", place.bucket, self.account, place.endpoint),
                advice: ": check 'source', 'storageAccount' and 'endpoint'; without a secret, the container must be public",
            })
        };
        let signature = || {
            denied(format!(
                "the signature is wrong: check accountKey (or sasToken) in the secret, that it is of account {}, and this node's \
                 clock ({text})",
                self.account
            ))
        };
        let detail = said.message.to_ascii_lowercase();
        match (refusal.status.as_u16(), said.code.as_str()) {
            (403, "AuthenticationFailed") if detail.contains("time frame") => {
                Fault::Fail(StoreError::Expired {
                    what,
                    why: format!(
                        "the SAS token is not valid any more, or not yet: renew the secret ({text})"
                    ),
                })
            }
            (403, "AuthenticationFailed") if detail.contains("date header") => {
                denied(format!("this node's clock differs from the store's: synchronise it ({text})"))
            }
            // The second is Azurite's.
            (401 | 403, "AuthenticationFailed" | "InvalidAuthenticationInfo") => signature(),
            (403, "AuthorizationFailure") if detail.contains("signature") => signature(),
            (401, "NoAuthenticationInformation") | (409, "PublicAccessNotPermitted") => denied(format!(
                "account {} lets nobody read without signing: give the volume a secret with accountKey or sasToken ({text})",
                self.account
            )),
            (403, "AuthorizationFailure") => denied(format!(
                "account {} does not let this node in: check its network rules, and what the SAS token allows ({text})",
                self.account
            )),
            (404, "ContainerNotFound") => container(),
            // What who may not know is told, of a container or of a blob.
            (404, "ResourceNotFound") => container(),
            (409, "BlobArchived" | "BlobBeingRehydrated") => {
                denied(format!("the blob is archived: rehydrate it first ({text})"))
            }
            (409, "ContainerBeingDeleted") => container(),
            (409, "BlobUsesCustomerSpecifiedEncryption") => {
                encryption::wrong_key(refusal, &said, Wrong::Missing)
            }
            (409, "BlobCustomerSpecifiedEncryptionMismatch") => {
                encryption::wrong_key(refusal, &said, Wrong::Other)
            }
            (409, "BlobDoesNotUseCustomerSpecifiedEncryption") => {
                encryption::wrong_key(refusal, &said, Wrong::NotNeeded)
            }
            (_, code) if code.starts_with("KeyVault") => denied(format!(
                "account {} cannot use the key in the key vault that its blobs are encrypted with: see that the key is there and enabled, \
                 and that the account's identity may use it ({text})",
                self.account
            )),
            _ => answer::judge(
                refusal,
                &said,
                place,
                &Words { rights: "Storage Blob Data Reader (of a SAS token: read and list)" },
            ),
        }
    }

    fn signer(&self, credentials: &Credentials) -> Result<Option<Arc<dyn Signer>>, StoreError> {
        let invalid = |why: String| StoreError::Invalid { what: "credentials".into(), why };
        let mut secrets = credentials.to_secrets();
        let mut take = |name: &str| secrets.remove(name).unwrap_or_default();
        let (name, credential) = match credentials.kind() {
            CredentialsKind::Anonymous => return Ok(None),
            CredentialsKind::Account => (take("accountName"), account_key(&take("accountKey"))),
            // As JuiceFS calls them.
            CredentialsKind::Keys => (take("accessKeyId"), account_key(&take("secretAccessKey"))),
            CredentialsKind::Sas => {
                let token = take("sasToken");
                let pairs: Vec<(String, String)> =
                    url::form_urlencoded::parse(token.trim_start_matches('?').as_bytes())
                        .into_owned()
                        .collect();
                let is_one = pairs.iter().any(|(name, value)| name == "sig" && !value.is_empty());
                let credential = is_one.then_some(AzureCredential::SASToken(pairs));
                (take("accountName"), credential.ok_or("sasToken in the secret has no sig: copy all of it"))
            }
            other => return Err(not_ours(other, "az", "accountKey or sasToken")),
        };
        if !name.is_empty() && name != self.account {
            return Err(invalid(format!(
                "the secret is of another account than the source, which is in {}: check accountName in the secret, and \
                 'storageAccount'",
                self.account
            )));
        }
        let credential = credential.map_err(|why| invalid(why.into()))?;
        Ok(Some(Arc::new(Signs { credential, account: self.account.clone() })))
    }
}

impl BucketDialect for Azure {
    fn right_to_read(&self) -> &'static str {
        "Storage Blob Data Reader (of a SAS token: read)"
    }

    fn list(&self, prefix: &[u8], delimiter: bool, from: From<'_>, max: usize) -> Url {
        let mut query = format!("{}&maxresults={max}", self.container.query().unwrap_or_default());
        if delimiter {
            query.push_str("&delimiter=%2F");
        }
        if !prefix.is_empty() {
            query.push_str(&format!("&prefix={}", encode_query(prefix)));
        }
        if let From::Token(token) = from {
            query.push_str(&format!("&marker={}", encode_query(token.as_bytes())));
        }
        let mut url = self.container.clone();
        url.set_query(Some(&query));
        url
    }

    fn listed(&self, body: &[u8]) -> Result<listing::Answer, String> {
        parse(body)
    }
}

fn account_key(text: &str) -> Result<AzureCredential, &'static str> {
    let key = AzureAccessKey::try_new(text);
    key.map(AzureCredential::AccessKey)
        .map_err(|_| "accountKey in the secret is not in base64: copy it again")
}

struct Signs {
    credential: AzureCredential,
    account: String,
}

#[async_trait]
impl Signer for Signs {
    async fn sign(&self, parts: &mut request::Parts) -> Result<(), ()> {
        authorize(parts, |request| {
            AzureAuthorizer::new(&self.credential, &self.account).try_authorize(request)
        })
    }

    /// Of a SAS token the signature, as it is sent and as it is meant.
    fn sent(&self) -> Vec<String> {
        match &self.credential {
            AzureCredential::SASToken(pairs) => {
                let of = pairs.iter().filter(|(name, _)| name == "sig");
                of.flat_map(|(_, sig)| [sig.clone(), encode_query(sig.as_bytes())]).collect()
            }
            AzureCredential::AccessKey(_) | AzureCredential::BearerToken(_) => Vec::new(),
        }
    }
}

/// What the current text belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Within {
    Blob,
    Prefix,
    Other,
}

fn parse(body: &[u8]) -> Result<listing::Answer, String> {
    let (mut answer, mut object) = (listing::Answer::default(), listing::Object::default());
    let (mut within, mut directory, mut encoded) = (Within::Other, false, false);
    walk(body, "EnumerationResults", |depth, name, tag| {
        let text = match (tag, depth, name) {
            (Tag::Closes(text), ..) => text,
            (Tag::Opens(_), 3, "Blob" | "BlobPrefix") => {
                within = if name == "Blob" { Within::Blob } else { Within::Prefix };
                (object, directory, encoded) = (listing::Object::default(), false, false);
                return Ok(());
            }
            (Tag::Opens(start), 4, "Name") => {
                let attribute = start.try_get_attribute("Encoded");
                let attribute = attribute.map_err(|e| format!("the listing is not XML: {e}"))?;
                encoded = attribute.is_some_and(|of| of.value.as_ref() == "true");
                return Ok(());
            }
            (Tag::Opens(_), ..) => return Ok(()),
        };
        match (depth, within, name) {
            (2, _, "NextMarker") => {
                answer.next = Some(std::mem::take(text)).filter(|marker| !marker.is_empty())
            }
            (3, Within::Blob, "Blob") => {
                within = Within::Other;
                // An empty directory of an account that has such: its prefix is listed, too.
                if !directory {
                    answer.objects.push(std::mem::take(&mut object));
                    is_page(answer.objects.len())?;
                }
            }
            (3, Within::Prefix, "BlobPrefix") => {
                within = Within::Other;
                answer.prefixes.push(std::mem::take(&mut object.key));
                is_page(answer.prefixes.len())?;
            }
            (4, Within::Blob | Within::Prefix, "Name") => {
                object.key = match encoded {
                    true => percent_encoding::percent_decode_str(text).collect(),
                    false => std::mem::take(text).into_bytes(),
                };
            }
            (5, Within::Blob, "Content-Length") => {
                object.size = field::size(text).ok_or("a listing with a size that is no number")?;
            }
            (5, Within::Blob, "Etag") => object.version = field::unquoted(text.trim()),
            (5, Within::Blob, "Last-Modified") => object.modified_ns = date::parse_http(text).unwrap_or(0),
            (5, Within::Blob, "ResourceType") => directory = text.trim() == "directory",
            _ => {}
        }
        Ok(())
    })?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, Page, Version};
    use http::StatusCode;

    fn azure() -> Azure {
        Azure::new("set", None, Some("acc"), &Parameters::default()).unwrap()
    }

    fn page(inner: &str) -> Result<Page, String> {
        let text = format!("\u{feff}<?xml version=\"1.0\"?><EnumerationResults><Blobs>{inner}");
        azure().listed(text.as_bytes()).map(|answer| answer.into_page(b"d/"))
    }

    const END: &str = "</Blobs><NextMarker>m</NextMarker></EnumerationResults>";

    #[test]
    fn an_account_is_a_host_and_an_emulators_is_in_its_paths() {
        let named = azure();
        assert_eq!(named.object(b"a b/c").as_str(), "https://acc.blob.core.windows.net/set/a%20b/c");
        assert_eq!(
            named.list(b"x&y/", true, From::Token("t=="), 7).as_str(),
            "https://acc.blob.core.windows.net/set?restype=container&comp=list&maxresults=7&delimiter=%2F&prefix=x%26y%2F&\
             marker=t%3D%3D"
        );
        let endpoint = Url::parse("http://127.0.0.1:10000").unwrap();
        let local = Azure::new("set", Some(&endpoint), Some("acc"), &Parameters::default()).unwrap();
        assert_eq!(local.object(b"k").as_str(), "http://127.0.0.1:10000/acc/set/k");
        assert_eq!(local.place.endpoint, "http://127.0.0.1:10000");
        let own = Url::parse("https://blobs.example").unwrap();
        let own = Azure::new("set", Some(&own), Some("acc"), &Parameters::default()).unwrap();
        assert_eq!(own.object(b"k").as_str(), "https://blobs.example/set/k");
        assert!(Azure::new("set", None, None, &Parameters::default()).is_err());
    }

    #[test]
    fn a_page_names_every_blob_once() {
        let blob = |name: &str, more: &str| {
            format!(
                "<Blob><Name{name}</Name><Properties><Last-Modified>Wed, 21 Oct 2015 07:28:00 GMT</Last-Modified>\
                 <Etag>0x8D</Etag><Content-Length>7</Content-Length>{more}</Properties></Blob>"
            )
        };
        let directory = "<ResourceType>directory</ResourceType>";
        let text = [
            blob(">d/a&amp;b", "<Owner><Name>x</Name></Owner>"),
            blob(" Encoded=\"true\">d/%01", ""),
            blob(">d/%41", ""),
            blob(">d/empty", directory),
            "<BlobPrefix><Name>d/empty/</Name><Properties><Etag>0x8D</Etag></Properties></BlobPrefix>".into(),
            "<Blob><Name>d/e</Name><Properties><Content-Length>7</Content-Length></Properties></Blob>".into(),
            END.into(),
        ];
        let page = page(&text.concat()).unwrap();
        let names: Vec<_> = page.entries.iter().map(|entry| String::from_utf8_lossy(&entry.name)).collect();
        assert_eq!(names, ["a&b", "\u{1}", "%41", "empty"]);
        assert_eq!(page.entries[0].kind, Kind::File { size: 7, version: Version("0x8D".into()) });
        assert_eq!(page.entries[0].modified_ns, 1_445_412_480_000_000_000);
        assert_eq!(page.entries[3].kind, Kind::Directory);
        // Of no version that a request could name.
        assert_eq!((page.unnameable, page.next.as_deref()), (vec!["d/e".to_owned()], Some("m")));
    }

    #[test]
    fn half_a_page_and_what_is_none_is_an_error() {
        for text in ["<Blob><Name>d/a</Name>", "", &"<a>".repeat(1000)] {
            assert!(page(text).is_err(), "{text}");
        }
        let one = "<Blob><Properties></Properties></Blob>";
        assert!(page(&format!("{}{END}", one.repeat(1000))).is_ok());
        assert!(page(&format!("{}{END}", one.repeat(1001))).unwrap_err().contains("more than was asked for"));
        for text in
            ["<html/>", "<html><body>login</body></html>", "<ListBucketResult></ListBucketResult>", ""]
        {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn a_server_that_computes_no_checksums_is_not_asked_for_them_again() {
        let azure = azure();
        let asks = |azure: &Azure, range| {
            azure.reading(&Version("e".into()), &range).unwrap().contains_key(SUM_RANGE)
        };
        assert!(asks(&azure, 7..7 + HELD_MAX) && !asks(&azure, 7..8 + HELD_MAX));
        assert!(asks(&azure, 0..SUMMED_MAX) && !asks(&azure, 0..SUMMED_MAX + 1));
        let headers: HeaderMap = [(CODE, HeaderValue::from_static(UNSUPPORTED))].into_iter().collect();
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        let refusal = Refusal {
            what: "az://set/k",
            url: &azure.container,
            status,
            headers: &headers,
            body: None,
            is_write: false,
        };
        assert!(matches!(azure.refused(&refusal, &[]), Fault::Retry { cause: RetryCause::Malformed, .. }));
        assert!(!asks(&azure, 0..1));
    }

    #[test]
    fn refusals_say_what_to_do() {
        let azure = azure();
        let judge = |status: u16, code: &str, detail: &str, in_header: bool| {
            let headers: HeaderMap =
                in_header.then(|| (CODE, HeaderValue::try_from(code).unwrap())).into_iter().collect();
            let body = format!(
                "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>Server failed to authenticate the request.\nRequestId:1\
                 </Message><AuthenticationErrorDetail>{detail}</AuthenticationErrorDetail></Error>"
            );
            let body = (!in_header).then_some(body.as_bytes());
            let status = StatusCode::from_u16(status).unwrap();
            let refusal = Refusal {
                what: "az://set/k",
                url: &azure.container,
                status,
                headers: &headers,
                body,
                is_write: false,
            };
            azure.refused(&refusal, &["s1g".to_owned()])
        };
        for (status, code, detail, words) in [
            (403, "AuthenticationFailed", "The MAC signature s1g is not the same", "check accountKey"),
            (403, "AuthenticationFailed", "Request date header too old: 'x'", "synchronise"),
            (
                403,
                "AuthenticationFailed",
                "Signature not valid in the specified time frame: Start",
                "renew the secret",
            ),
            (403, "AuthorizationFailure", "", "network rules"),
            (403, "AuthorizationFailure", "formed correctly including the signature.", "check accountKey"),
            (403, "AuthorizationPermissionMismatch", "", "Storage Blob Data Reader"),
            (401, "NoAuthenticationInformation", "", "give the volume a secret"),
            (409, "PublicAccessNotPermitted", "", "give the volume a secret"),
            (404, "ContainerNotFound", "", "check 'source'"),
            (409, "BlobArchived", "", "rehydrate"),
            (404, "BlobNotFound", "", "az://set/k does not exist"),
        ] {
            for in_header in [false, true] {
                if in_header && !detail.is_empty() {
                    continue;
                }
                match judge(status, code, detail, in_header) {
                    Fault::Fail(error) => {
                        let text = error.to_string();
                        assert!(text.contains(words) && !text.contains("s1g"), "{code}: {text}");
                    }
                    retry => panic!("{code}: {retry:?}"),
                }
            }
        }
        assert!(matches!(judge(412, "ConditionNotMet", "", false), Fault::Fail(StoreError::Stale { .. })));
        for (status, code) in [(503, "ServerBusy"), (500, "OperationTimedOut")] {
            assert!(matches!(judge(status, code, "", false), Fault::Retry { .. }), "{code}");
        }
    }

    #[test]
    fn a_secret_is_of_this_account_and_can_be_used() {
        let signer = |pairs: &[(&str, &str)]| {
            let credentials = Credentials::from_secrets(pairs.iter().copied()).unwrap();
            azure().signer(&credentials).map(|signer| signer.map(|signer| signer.sent()))
        };
        assert_eq!(signer(&[]).unwrap(), None);
        assert_eq!(signer(&[("accountKey", "a2V5"), ("accountName", "acc")]).unwrap(), Some(Vec::new()));
        let sas = signer(&[("sasToken", "?sv=1&sig=a%2Fb%3D")]).unwrap().unwrap();
        assert_eq!(sas, ["a/b=", "a%2Fb%3D"]);
        for (pairs, words) in [
            (&[("accountKey", "a2V5"), ("accountName", "other")][..], "another account"),
            (&[("accountKey", "h*nter2")], "base64"),
            (&[("sasToken", "h*nter2")], "copy all of it"),
            (&[("serviceAccountKey", "h*nter2")], "accountKey or sasToken"),
        ] {
            let error = signer(pairs).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains("h*nter2"), "{error}");
        }
    }
}
