//! S3, and what speaks it.

use super::answer::{self, Words};
use super::checksum::{self, Checksum};
use super::encryption::{self, CustomerKey, Wrong};
use super::{BucketDialect, Dialect, Keys, Place, Refusal, Signer, authorize, field, header};
use crate::retry::Fault;
use crate::{StoreError, Version};
use async_trait::async_trait;
use crc_fast::CrcAlgorithm;
use http::header::{HeaderMap, HeaderName, HeaderValue, IF_MATCH};
use http::{StatusCode, request};
use object_store::aws::{AwsAuthorizer, AwsCredential};
use std::ops::Range;
use std::sync::Arc;
use volume::{Credentials, Parameters};

const CHECKSUM_MODE: HeaderName = HeaderName::from_static("x-amz-checksum-mode");
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
        answer::judge(refusal, &said, &self.place, &Words { rights: "s3:ListBucket and s3:GetObject" })
    }

    fn signer(&self, credentials: &Credentials) -> Result<Option<Arc<dyn Signer>>, StoreError> {
        let Some(Keys { id, secret, token }) = Keys::of(credentials, "s3")? else { return Ok(None) };
        let credential = AwsCredential { key_id: id, secret_key: secret, token };
        Ok(Some(Arc::new(Signs { credential, region: self.region.clone() })))
    }
}

impl BucketDialect for S3 {}

struct Signs {
    credential: AwsCredential,
    region: String,
}

#[async_trait]
impl Signer for Signs {
    async fn sign(&self, parts: &mut request::Parts) -> Result<(), ()> {
        authorize(parts, |request| {
            AwsAuthorizer::new(&self.credential, "s3", &self.region).try_authorize(request, None)
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
    use crate::keys::encode_path;
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
