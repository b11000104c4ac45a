//! Keys that objects are encrypted with: one of the customer's, which each request for an object brings, for the store does not
//! keep it; and those of a key service, of which a reader need not know.

use super::answer::Said;
use super::{Refusal, value};
use crate::StoreError;
use crate::observe::RetryCause;
use crate::retry::Fault;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::StatusCode;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use md5::Md5;
use sha2::{Digest, Sha256};
use volume::Credentials;

/// A key of the customer's. No `Debug`, on purpose.
pub(crate) struct CustomerKey {
    /// Base64.
    text: String,
    bytes: Vec<u8>,
}

/// What a store calls the algorithm, the key and its digest.
pub(super) type Names = [HeaderName; 3];

impl CustomerKey {
    /// None: the secret has none.
    pub(crate) fn of(credentials: &Credentials) -> Option<Self> {
        let text = credentials.customer_key()?.to_owned();
        let bytes = BASE64_STANDARD.decode(&text).expect("credentials are parsed with it");
        Some(Self { text, bytes })
    }

    pub(super) fn with_md5(&self, names: Names) -> HeaderMap {
        self.headers(names, &Md5::digest(&self.bytes))
    }

    pub(super) fn with_sha256(&self, names: Names) -> HeaderMap {
        self.headers(names, &Sha256::digest(&self.bytes))
    }

    fn headers(&self, [algorithm, key, digest]: Names, digested: &[u8]) -> HeaderMap {
        let sensitive = |text: String| {
            let mut value = value(text).expect("base64 can be a header");
            value.set_sensitive(true);
            value
        };
        HeaderMap::from_iter([
            (algorithm, HeaderValue::from_static("AES256")),
            (key, sensitive(self.text.clone())),
            (digest, sensitive(BASE64_STANDARD.encode(digested))),
        ])
    }
}

/// What may be wrong with it, as far as a store's code says.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wrong {
    Missing,
    Other,
    /// The object is not encrypted with any.
    NotNeeded,
    /// It would travel in clear.
    InClear,
}

pub(super) fn wrong_key(refusal: &Refusal<'_>, said: &Said, wrong: Wrong) -> Fault {
    let advice = match wrong {
        Wrong::Missing => MISSING,
        Wrong::Other => {
            "customerKey in the secret is not the key that the object is encrypted with: put that one in"
        }
        Wrong::NotNeeded => NOT_NEEDED,
        Wrong::InClear => "the store takes a customer's key over TLS alone: use an https endpoint",
    };
    let why = format!("{advice} ({})", said.text(refusal.status));
    Fault::Fail(StoreError::Invalid { what: refusal.what.to_owned(), why })
}

const MISSING: &str =
    "the object is encrypted with a customer's key: put that key into the secret as customerKey";
const NOT_NEEDED: &str = "the object is not encrypted with a customer's key: read it through a volume whose secret has no customerKey";

const CODE: &str = "AccessDenied";

/// What only the exchange knows of a request for an object: did it bring a key, and can its answer say anything?
pub(crate) fn explained(fault: Fault, brought: bool, refusal: &Refusal<'_>) -> Fault {
    // S3 says the same of a wrong key as of a missing right, and to a HEAD nothing.
    let says = |body: &[u8]| body.windows(CODE.len()).any(|part| part == CODE.as_bytes());
    let may_mean_key = brought && refusal.body.is_none_or(says);
    match (fault, refusal.status) {
        (Fault::Fail(StoreError::Denied { what, why }), StatusCode::FORBIDDEN) if may_mean_key => {
            let why = format!(
                "{why}; if they may, customerKey in the secret is not the key that the object is encrypted with"
            );
            Fault::Fail(StoreError::Denied { what, why })
        }
        // The answer to a HEAD.
        (Fault::Fail(StoreError::Malformed { what, why }), StatusCode::BAD_REQUEST)
            if refusal.body.is_none() =>
        {
            let perhaps = if brought { NOT_NEEDED } else { MISSING };
            Fault::Fail(StoreError::Invalid {
                what,
                why: format!("{why}, without a reason; perhaps {perhaps}"),
            })
        }
        (fault, _) => fault,
    }
}

/// What S3, and what speaks like it, says of a key service. None: it speaks of something else.
pub(super) fn key_service(refusal: &Refusal<'_>, said: &Said) -> Option<Fault> {
    let message = said.message.to_ascii_lowercase();
    let advice = match (refusal.status, said.code.as_str()) {
        (_, code) if code.ends_with("ThrottlingException") => {
            let (cause, after) = (RetryCause::Throttled, refusal.retry_after());
            return Some(Fault::Retry { cause, detail: said.text(refusal.status), after });
        }
        (StatusCode::FORBIDDEN | StatusCode::BAD_REQUEST, _)
            if message.contains("kms:decrypt")
                || message.contains("the ciphertext refers to a customer master key") =>
        {
            "these credentials may not use the KMS key that the object is encrypted with: grant kms:Decrypt on it, also in the \
             policy of the key where it is of another account"
        }
        (_, "KMS.DisabledException") => {
            "the KMS key that the object is encrypted with is disabled: enable it"
        }
        (_, "KMS.NotFoundException") => {
            "the KMS key that the object is encrypted with does not exist any more: the object cannot be read"
        }
        (_, "KMS.KMSInvalidStateException") => {
            "the KMS key that the object is encrypted with is in no state to be used: if its deletion is scheduled, cancel that"
        }
        (_, code) if code.starts_with("KMS.") => {
            "the KMS key that the object is encrypted with cannot be used: look at its state and its policy"
        }
        _ => return None,
    };
    Some(denied(refusal, said, advice))
}

pub(super) fn denied(refusal: &Refusal<'_>, said: &Said, advice: &str) -> Fault {
    let why = format!("{advice} ({})", said.text(refusal.status));
    Fault::Fail(StoreError::Denied { what: refusal.what.to_owned(), why })
}
