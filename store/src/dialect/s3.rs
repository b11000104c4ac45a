//! S3, and what speaks it.

use super::answer::{self, Words};
use super::checksum::{self, Checksum};
use super::encryption::{self, CustomerKey, Wrong};
use super::writes::Writes;
use super::{BucketDialect, Dialect, Keys, Payload, Place, Refusal, Signer, authorize, field, header};
use crate::keys::encode_path;
use crate::retry::Fault;
use crate::sink::SinkLimits;
use crate::{StoreError, Version};
use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crc_fast::CrcAlgorithm;
use http::header::{HeaderMap, HeaderName, HeaderValue, IF_MATCH};
use http::{StatusCode, request};
use object_store::aws::{AwsAuthorizer, AwsCredential};
use std::ops::Range;
use std::sync::Arc;
use volume::{Credentials, Parameters};

const CHECKSUM_MODE: HeaderName = HeaderName::from_static("x-amz-checksum-mode");
const CRC32C: HeaderName = HeaderName::from_static("x-amz-checksum-crc32c");
const PAYER: HeaderName = HeaderName::from_static("x-amz-request-payer");

const CUSTOMER_KEY: encryption::Names = [
    HeaderName::from_static("x-amz-server-side-encryption-customer-algorithm"),
    HeaderName::from_static("x-amz-server-side-encryption-customer-key"),
    HeaderName::from_static("x-amz-server-side-encryption-customer-key-md5"),
];

#[derive(Debug)]
pub(crate) struct S3 {
    place: Place,
    region: String,
    requester_pays: bool,
}

impl S3 {
    pub(crate) fn new(bucket: &str, parameters: &Parameters) -> Result<Self, StoreError> {
        let region = parameters.region.clone().unwrap_or_else(|| "us-east-1".to_owned());
        let endpoint = match &parameters.endpoint {
            Some(url) => url.to_string(),
            None if region.starts_with("cn-") => format!("https://s3.{region}.amazonaws.com.cn"),
            None => format!("https://s3.{region}.amazonaws.com"),
        };
        let place = Place::new("s3", bucket, &endpoint, parameters.addressing)?;
        Ok(Self { place, region, requester_pays: parameters.requester_pays })
    }
}

impl Dialect for S3 {
    fn writes(self: Arc<Self>) -> Option<Arc<dyn Writes>> {
        Some(self)
    }

    fn place(&self) -> &Place {
        &self.place
    }

    fn headers(&self) -> HeaderMap {
        let pays = self.requester_pays.then(|| (PAYER, HeaderValue::from_static("requester")));
        pays.into_iter().collect()
    }

    fn with_key(&self, key: &CustomerKey) -> Option<HeaderMap> {
        Some(key.with_md5(CUSTOMER_KEY))
    }

    fn reading(&self, version: &Version, range: &Range<u64>) -> Option<HeaderMap> {
        let mut headers = super::reading(version, range)?;
        headers.insert(CHECKSUM_MODE, HeaderValue::from_static("ENABLED"));
        Some(headers)
    }

    /// Who uploads without one gets this one.
    fn sums(&self, _size: u64) -> Option<CrcAlgorithm> {
        Some(CrcAlgorithm::Crc64Nvme)
    }

    fn telling(&self, version: &Version) -> Option<HeaderMap> {
        let match_it = super::value(field::quoted(version))?;
        let mode = HeaderValue::from_static("ENABLED");
        Some([(IF_MATCH, match_it), (CHECKSUM_MODE, mode)].into_iter().collect())
    }

    fn checksum(&self, headers: &HeaderMap) -> Option<Checksum> {
        checksum::s3(headers)
    }

    fn refused(&self, refusal: &Refusal<'_>, secrets: &[String]) -> Fault {
        let mut said = refusal.body.map(answer::parse).unwrap_or_default();
        let region = header(refusal.headers, "x-amz-bucket-region").map(str::to_owned);
        said.region = said.region.or(region);
        said.scrub(secrets);
        // One code for all of them.
        if refusal.status == StatusCode::BAD_REQUEST
            && matches!(said.code.as_str(), "InvalidRequest" | "InvalidArgument")
        {
            let message = said.message.to_ascii_lowercase();
            let says = [
                ("stored using a form of server side encryption", Wrong::Missing),
                ("encryption parameters are not applicable", Wrong::NotNeeded),
                ("must be made over a secure connection", Wrong::InClear),
            ];
            if let Some((_, wrong)) = says.into_iter().find(|(words, _)| message.contains(words)) {
                return encryption::wrong_key(refusal, &said, wrong);
            }
        }
        if let Some(fault) = encryption::key_service(refusal, &said) {
            return fault;
        }
        let rights = if refusal.is_write { self.right_to_write() } else { "s3:ListBucket and s3:GetObject" };
        answer::judge(refusal, &said, &self.place, &Words { rights })
    }

    fn signer(&self, credentials: &Credentials) -> Result<Option<Arc<dyn Signer>>, StoreError> {
        let Some(Keys { id, secret, token }) = Keys::of(credentials, "s3")? else { return Ok(None) };
        let credential = AwsCredential { key_id: id, secret_key: secret, token };
        Ok(Some(Arc::new(Signs { credential, region: self.region.clone() })))
    }
}

impl BucketDialect for S3 {}

impl Writes for S3 {
    /// <https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html>
    fn sink_limits(&self) -> SinkLimits {
        SinkLimits {
            put_bytes_max: 5 << 30,
            part_bytes_min: 5 << 20,
            part_bytes_max: 5 << 30,
            parts_max: 10_000,
            object_bytes_max: 5 << 40,
        }
    }

    fn metadata_prefix(&self) -> &'static str {
        "x-amz-meta-"
    }

    fn summed(&self, crc32c: u32) -> HeaderMap {
        let sum = HeaderValue::try_from(BASE64_STANDARD.encode(crc32c.to_be_bytes()));
        [(CRC32C, sum.expect("Base64 can be sent"))].into_iter().collect()
    }

    fn summed_in_parts(&self) -> HeaderMap {
        let pairs = [("x-amz-checksum-algorithm", "CRC32C"), ("x-amz-checksum-type", "FULL_OBJECT")];
        pairs
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .into_iter()
            .collect()
    }

    fn summed_part(&self, crc32c: u32) -> String {
        format!("<ChecksumCRC32C>{}</ChecksumCRC32C>", BASE64_STANDARD.encode(crc32c.to_be_bytes()))
    }

    fn asks_for_sums(&self) -> HeaderMap {
        [(CHECKSUM_MODE, HeaderValue::from_static("ENABLED"))].into_iter().collect()
    }

    fn arrived(&self, headers: &HeaderMap) -> Option<u32> {
        let value = checksum::big_endian(header(headers, CRC32C)?, CrcAlgorithm::Crc32Iscsi)?;
        u32::try_from(value).ok()
    }

    fn copying(&self, from: &[u8], version: &Version) -> Option<HeaderMap> {
        let source = format!("/{}/{}", self.place.bucket, encode_path(from));
        let directive = HeaderName::from_static("x-amz-metadata-directive");
        let pairs = [
            (HeaderName::from_static("x-amz-copy-source"), super::value(source)?),
            (HeaderName::from_static("x-amz-copy-source-if-match"), super::value(field::quoted(version))?),
            (directive, HeaderValue::from_static("REPLACE")),
        ];
        Some(pairs.into_iter().collect())
    }

    fn copying_range(&self, bytes: &Range<u64>) -> HeaderMap {
        let text = super::value(format!("bytes={}-{}", bytes.start, bytes.end.saturating_sub(1)));
        let name = HeaderName::from_static("x-amz-copy-source-range");
        [(name, text.expect("numbers can be sent"))].into_iter().collect()
    }

    fn opening_source(&self, key: &HeaderMap) -> HeaderMap {
        let renamed = |(name, value): (&HeaderName, &HeaderValue)| {
            let rest = name.as_str().strip_prefix("x-amz-")?;
            Some((HeaderName::try_from(format!("x-amz-copy-source-{rest}")).ok()?, value.clone()))
        };
        key.iter().filter_map(renamed).collect()
    }

    fn right_to_write(&self) -> &'static str {
        "s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and s3:ListBucketMultipartUploads"
    }
}

struct Signs {
    credential: AwsCredential,
    region: String,
}

#[async_trait]
impl Signer for Signs {
    async fn sign(&self, parts: &mut request::Parts) -> Result<(), ()> {
        self.sign_with(parts, Payload::Empty).await
    }

    async fn sign_with(&self, parts: &mut request::Parts, payload: Payload) -> Result<(), ()> {
        let digest = if let Payload::Digest(digest) = &payload { Some(digest.as_slice()) } else { None };
        authorize(parts, |request| {
            AwsAuthorizer::new(&self.credential, "s3", &self.region)
                .with_sign_payload(payload != Payload::Unsigned)
                .try_authorize(request, digest)
        })
    }

    /// The secret key is never sent, so no store can echo it.
    fn sent(&self) -> Vec<String> {
        [Some(&self.credential.key_id), self.credential.token.as_ref()]
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::From;
    use proptest::prelude::*;
    use url::Url;
    use volume::Addressing;

    fn s3(parameters: &Parameters) -> S3 {
        S3::new("data", parameters).unwrap()
    }

    #[test]
    fn urls_follow_the_addressing_style() {
        let aws = Parameters { region: Some("eu-central-1".into()), ..Parameters::default() };
        assert_eq!(s3(&aws).object(b"a b").as_str(), "https://s3.eu-central-1.amazonaws.com/data/a%20b");
        let endpoint = Some(Url::parse("https://h.example:9000").unwrap());
        let own = Parameters { endpoint, addressing: Addressing::Virtual, ..Parameters::default() };
        assert_eq!(s3(&own).object(b"a+b").as_str(), "https://data.h.example:9000/a%2Bb");
        assert_eq!(
            s3(&own).list(b"x&y/", true, From::Token("t=="), 7).as_str(),
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
            let s3 = s3(&Parameters { endpoint: Some(endpoint), addressing, ..Parameters::default() });
            let whole = format!("{}{}", s3.place.base, encode_path(&key));
            let made = s3.object(&key);
            prop_assert_eq!(made.as_str(), whole.as_str());
            prop_assert_eq!(Url::parse(&whole).unwrap(), made);
            let list = s3.list(&key, true, From::Token("t+/="), 7);
            prop_assert_eq!(Url::parse(list.as_str()).unwrap(), list);
        }
    }
}
