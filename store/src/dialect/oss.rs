//! Alibaba Cloud OSS: S3's listings and errors, headers and signature of its own.

use super::answer::{self, Words};
use super::checksum::Checksum;
use super::encryption;
use super::listing::Answer;
use super::{BucketDialect, Dialect, Keys, Place, Refusal, Signer, field, has_name, header, list_objects_v2};
use crate::retry::Fault;
use crate::{StoreError, Version};
use async_trait::async_trait;
use crc_fast::CrcAlgorithm;
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, IF_MATCH};
use http::request;
use percent_encoding::percent_decode_str;
use reqsign_aliyun_oss::{Credential, RequestSigner, SigningVersion};
use reqsign_core::{Context, SignRequest};
use std::ops::Range;
use std::sync::Arc;
use url::Url;
use volume::{Addressing, Credentials, Parameters};

/// Without it OSS answers a range beyond the end with the whole object.
const RANGE_BEHAVIOR: HeaderName = HeaderName::from_static("x-oss-range-behavior");

const CRC64: HeaderName = HeaderName::from_static("x-oss-hash-crc64ecma");

const PAYER: HeaderName = HeaderName::from_static("x-oss-request-payer");

#[derive(Debug)]
pub(crate) struct Oss {
    place: Place,
    region: String,
    requester_pays: bool,
}

impl Oss {
    /// `endpoint`: of the source, or of the parameters.
    pub(crate) fn new(
        bucket: &str,
        endpoint: Option<&Url>,
        parameters: &Parameters,
    ) -> Result<Self, StoreError> {
        let invalid = |why: String| StoreError::Invalid { what: format!("oss://{bucket}"), why };
        let region = parameters.region.clone().or_else(|| endpoint.and_then(region_of));
        let region = region.ok_or_else(|| match endpoint {
            None => invalid("set 'region' such as cn-shanghai, or name the endpoint: oss://bucket.oss-cn-shanghai.aliyuncs.com/prefix".into()),
            Some(endpoint) => invalid(format!("the region of {endpoint} is not in its name: set 'region' such as cn-shanghai")),
        })?;
        let public = || format!("https://oss-{region}.aliyuncs.com");
        let endpoint = endpoint.map_or_else(public, Url::to_string);
        // OSS refuses path style; what has an address for a name is no OSS, and can be asked in no other.
        let addressing = if has_name(&endpoint) { Addressing::Virtual } else { Addressing::Path };
        let place = Place::new("oss", bucket, &endpoint, addressing)?;
        Ok(Self { place, region, requester_pays: parameters.requester_pays })
    }
}

/// `oss-cn-shanghai-internal.aliyuncs.com` → `cn-shanghai`
fn region_of(endpoint: &Url) -> Option<String> {
    let name = endpoint.host_str()?.strip_suffix(".aliyuncs.com")?.strip_prefix("oss-")?;
    let region = name.strip_suffix("-internal").unwrap_or(name);
    let plain = region.contains('-') && !region.contains('.') && region != "accelerate-overseas";
    plain.then(|| region.to_owned())
}

impl Dialect for Oss {
    fn place(&self) -> &Place {
        &self.place
    }

    fn headers(&self) -> HeaderMap {
        let pays = self.requester_pays.then(|| (PAYER, HeaderValue::from_static("requester")));
        pays.into_iter().collect()
    }

    /// Every object has one.
    fn checksum(&self, headers: &HeaderMap) -> Option<Checksum> {
        let value = header(headers, CRC64)?.trim().parse().ok()?;
        Some(Checksum { algorithm: CrcAlgorithm::Crc64Xz, value, of_range: false })
    }

    fn tells_of_all(&self) -> bool {
        true
    }

    fn sums(&self, _size: u64) -> Option<CrcAlgorithm> {
        Some(CrcAlgorithm::Crc64Xz)
    }

    fn telling(&self, version: &Version) -> Option<HeaderMap> {
        Some([(IF_MATCH, super::value(field::quoted(version))?)].into_iter().collect())
    }

    fn reading(&self, version: &Version, range: &Range<u64>) -> Option<HeaderMap> {
        let mut headers = super::reading(version, range)?;
        headers.insert(RANGE_BEHAVIOR, HeaderValue::from_static("standard"));
        Some(headers)
    }

    fn refused(&self, refusal: &Refusal<'_>, secrets: &[String]) -> Fault {
        let mut said = refusal.body.map(answer::parse).unwrap_or_default();
        said.scrub(secrets);
        let what = || refusal.what.to_owned();
        let place = &self.place;
        let invalid = |why: String| Fault::Fail(StoreError::Invalid { what: what(), why });
        match (said.code.as_str(), &said.endpoint) {
            ("SecurityTokenExpired" | "InvalidSecurityToken", _) => {
                let why = format!(
                    "the session token is not valid any more: renew the secret ({})",
                    said.text(refusal.status)
                );
                return Fault::Fail(StoreError::Expired { what: what(), why });
            }
            ("AccessDenied", Some(endpoint)) => {
                return invalid(format!(
                    "bucket {} is not served at {}: it is at {endpoint}; set 'endpoint' or 'region' accordingly",
                    place.bucket, place.endpoint
                ));
            }
            ("SecondLevelDomainForbidden", _) => {
                return invalid(format!(
                    "{} wants buckets as hosts: use an endpoint with a host name",
                    place.endpoint
                ));
            }
            ("InvalidArgument", _) if said.message.to_ascii_lowercase().contains("signing region") => {
                return invalid(format!(
                    "{} is not in region {}: set 'region' to where the bucket is ({})",
                    place.endpoint,
                    self.region,
                    said.text(refusal.status)
                ));
            }
            _ => {}
        }
        if let Some(fault) = encryption::key_service(refusal, &said) {
            return fault;
        }
        answer::judge(refusal, &said, &self.place, &Words { rights: "oss:ListObjects and oss:GetObject" })
    }

    fn signer(&self, credentials: &Credentials) -> Result<Option<Arc<dyn Signer>>, StoreError> {
        let Some(Keys { id, secret, token }) = Keys::of(credentials, "oss")? else { return Ok(None) };
        let credential = Credential {
            access_key_id: id,
            access_key_secret: secret,
            security_token: token,
            expires_in: None,
        };
        let signer = RequestSigner::new(&self.place.bucket)
            .with_region(&self.region)
            .with_signing_version(SigningVersion::V4);
        Ok(Some(Arc::new(Signs { credential, signer, context: Context::new() })))
    }
}

impl BucketDialect for Oss {
    fn right_to_read(&self) -> &'static str {
        "oss:GetObject"
    }

    fn listed(&self, body: &[u8]) -> Result<Answer, String> {
        let (mut answer, encoded) = list_objects_v2::page(body)?;
        // Unlike S3's its token is encoded with the keys.
        if let Some(token) = answer.next.take_if(|_| encoded) {
            let token = percent_decode_str(&token).decode_utf8();
            answer.next = Some(token.map_err(|_| "a continuation token not in UTF-8")?.into_owned());
        }
        Ok(answer)
    }
}

struct Signs {
    credential: Credential,
    signer: RequestSigner,
    /// It signs without one: neither file nor network is looked at.
    context: Context,
}

#[async_trait]
impl Signer for Signs {
    async fn sign(&self, request: &mut request::Parts) -> Result<(), ()> {
        let signed = self.signer.sign_request(&self.context, request, Some(&self.credential), None);
        signed.await.map_err(drop)?;
        let authorization = request.headers.get_mut(AUTHORIZATION).ok_or(())?;
        *authorization = as_theirs(authorization).ok_or(())?;
        Ok(())
    }

    fn sent(&self) -> Vec<String> {
        let Credential { access_key_id, security_token, .. } = &self.credential;
        [Some(access_key_id), security_token.as_ref()].into_iter().flatten().cloned().collect()
    }
}

/// The library says that there are no additional headers. Alibaba Cloud's own client says nothing then, and no spaces: that is
/// known to be understood.
fn as_theirs(authorization: &HeaderValue) -> Option<HeaderValue> {
    let plain = authorization.to_str().ok()?.replace(", ", ",").replacen(",AdditionalHeaders=,", ",", 1);
    let mut value = HeaderValue::try_from(plain).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn oss(endpoint: Option<&str>, region: Option<&str>) -> Result<Oss, String> {
        let parameters = Parameters { region: region.map(str::to_owned), ..Parameters::default() };
        let endpoint = endpoint.map(|text| Url::parse(text).unwrap());
        Oss::new("data", endpoint.as_ref(), &parameters).map_err(|error| error.to_string())
    }

    #[test]
    fn a_token_is_encoded_where_the_keys_are() {
        for (encoding, token) in [("<EncodingType>url</EncodingType>", "a+b/%"), ("", "a%2Bb%2F%25")] {
            let body = format!(
                "<ListBucketResult>{encoding}<IsTruncated>true</IsTruncated>\
                 <NextContinuationToken>a%2Bb%2F%25</NextContinuationToken></ListBucketResult>"
            );
            let answer = oss(None, Some("r")).unwrap().listed(body.as_bytes()).unwrap();
            assert_eq!(answer.next(), Some(token));
        }
    }

    #[test]
    fn an_authorization_is_written_as_alibaba_clouds_client_writes_it() {
        for (headers, expected) in [
            ("", "OSS4-HMAC-SHA256 Credential=x/oss,Signature=y"),
            (
                "if-match;range",
                "OSS4-HMAC-SHA256 Credential=x/oss,AdditionalHeaders=if-match;range,Signature=y",
            ),
        ] {
            let text = format!("OSS4-HMAC-SHA256 Credential=x/oss, AdditionalHeaders={headers}, Signature=y");
            let value = as_theirs(&HeaderValue::try_from(text).unwrap()).unwrap();
            assert_eq!((value.to_str().unwrap(), value.is_sensitive()), (expected, true));
        }
    }

    #[test]
    fn a_bucket_is_a_host_of_its_endpoint_and_the_region_is_in_its_name() {
        for (endpoint, region, base, found) in [
            (
                Some("https://oss-cn-shanghai-internal.aliyuncs.com"),
                None,
                "https://data.oss-cn-shanghai-internal.aliyuncs.com/",
                "cn-shanghai",
            ),
            (
                Some("https://oss-us-west-1.aliyuncs.com"),
                None,
                "https://data.oss-us-west-1.aliyuncs.com/",
                "us-west-1",
            ),
            (None, Some("cn-beijing"), "https://data.oss-cn-beijing.aliyuncs.com/", "cn-beijing"),
            (Some("https://oss.example:8443"), Some("r"), "https://data.oss.example:8443/", "r"),
            (Some("http://127.0.0.1:9000"), Some("r"), "http://127.0.0.1:9000/data/", "r"),
        ] {
            let oss = oss(endpoint, region).unwrap();
            assert_eq!((oss.place.base.as_str(), oss.region.as_str()), (base, found));
        }
        for (endpoint, words) in [
            (None, "set 'region'"),
            (Some("https://oss-accelerate.aliyuncs.com"), "region of https://oss-accelerate"),
            (Some("https://oss-accelerate-overseas.aliyuncs.com"), "set 'region'"),
            (Some("https://oss.example"), "set 'region'"),
        ] {
            let error = oss(endpoint, None).unwrap_err();
            assert!(error.contains(words), "{endpoint:?}: {error}");
        }
    }
}
