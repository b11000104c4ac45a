//! Google Cloud Storage's JSON interface, the reading half. Tokens are those that a service account signs itself: they are
//! checked with the public half of its key.

use super::access::Guard;
use super::adapter::{Adapter, Asked, Denied, decoded, pairs, token, value};
use super::bucket::Listing;
use super::checksums::Sums;
use super::encryption::{self, Names, Wrong};
use super::meta::Meta;
use super::{Key, Rights};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use http::request::Parts;
use http::{HeaderMap, Method, StatusCode};
use ring::signature::{KeyPair, RSA_PKCS1_2048_8192_SHA256, RsaKeyPair, UnparsedPublicKey};
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject;
use s3s::dto::{Timestamp, TimestampFormat};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::time::{Duration, UNIX_EPOCH};

/// Private keys of service accounts (PEM), made for these tests: they open nothing.
pub const SERVICE_ACCOUNT_KEY: &str = include_str!("keys/ours.pem");
pub const OTHER_SERVICE_ACCOUNT_KEY: &str = include_str!("keys/other.pem");

/// A key file as Google's console gives it out. Of a [`Key`] of such a server `id` is the account's address, and `secret`
/// its private key.
pub fn key_file(id: &str, private_key: &str) -> String {
    let file = json!({
        "type": "service_account",
        "project_id": "testkit-project",
        "private_key_id": "7",
        "private_key": private_key,
        "client_email": id,
        "client_id": "1",
        "token_uri": "https://oauth2.googleapis.com/token",
    });
    format!("{file:#}\n")
}

/// The generation of an object: a number that each put makes anew.
pub fn generation(meta: &Meta) -> String {
    let digest = Sha256::digest(meta.etag.as_bytes());
    let number = digest.iter().take(7).fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    number.max(1).to_string()
}

#[derive(Debug)]
pub(super) struct Gcs;

const CUSTOMER_KEY: Names = Names {
    key: "x-goog-encryption-key",
    algorithm: "x-goog-encryption-algorithm",
    digest: "x-goog-encryption-key-sha256",
    digested: encryption::sha256,
};

const SKEW_MAX: Duration = Duration::from_secs(5 * 60);

impl Adapter for Gcs {
    fn asked(&self, method: &Method, path: &str, query: &str) -> Asked {
        let query = pairs(query);
        let Some((bucket, object)) = path
            .strip_prefix("/storage/v1/b/")
            .and_then(|rest| rest.split_once("/o"))
            .filter(|_| *method == Method::GET)
        else {
            return Asked::default();
        };
        let bucket = decoded(bucket);
        let mut asked = Asked { bucket, query, ..Asked::default() };
        match object.strip_prefix('/') {
            None => {
                asked.op = "ListObjectsV2";
                asked.key = asked.value("prefix").unwrap_or_default().to_owned();
            }
            Some(key) => {
                asked.op = if asked.value("alt") == Some("media") { "GetObject" } else { "HeadObject" };
                asked.key = decoded(key);
            }
        }
        asked
    }

    fn who(&self, parts: &Parts, _: &Asked, guard: &Guard) -> Result<Rights, Denied> {
        let Guard { anonymous, .. } = guard;
        let refused = |message: &str| (StatusCode::UNAUTHORIZED, "authError", message.to_owned());
        let header = parts.headers.get("authorization").and_then(|value| value.to_str().ok());
        let token = match header.map(|value| value.strip_prefix("Bearer ")) {
            None if *anonymous => return Ok(Rights::All),
            None => {
                let message = "Anonymous caller does not have storage.objects.list access to the bucket.";
                return Err((StatusCode::UNAUTHORIZED, "required", message.into()));
            }
            Some(None) => return Err(refused("Invalid Credentials")),
            Some(Some(token)) => token,
        };
        let key = signed_by(token, guard).map_err(refused)?;
        Ok(key.rights)
    }

    fn pays(&self, headers: &HeaderMap) -> bool {
        headers.get("x-goog-user-project").is_some_and(|project| project == "testkit-project")
    }

    fn sums(&self) -> Sums {
        Sums::Gcs
    }

    fn listing(&self, asked: &Asked, page: Listing) -> (HeaderMap, String) {
        let items: Vec<_> =
            page.objects.iter().map(|(key, meta)| described(&asked.bucket, key, meta)).collect();
        let mut listing = json!({ "kind": "storage#objects" });
        if !items.is_empty() {
            listing["items"] = items.into();
        }
        if !page.prefixes.is_empty() {
            listing["prefixes"] = page.prefixes.into();
        }
        if let Some(next) = page.next {
            listing["nextPageToken"] = token(&next).into();
        }
        (json_headers(), listing.to_string())
    }

    fn about(&self, asked: &Asked, meta: &Meta) -> (HeaderMap, String) {
        (json_headers(), described("", &asked.key, meta).to_string())
    }

    fn version(&self, _: &Parts, asked: &Asked, meta: &Meta) -> Result<HeaderMap, Denied> {
        let found = generation(meta);
        if asked.value("ifGenerationMatch").is_some_and(|wanted| wanted != found) {
            let message = "At least one of the pre-conditions you specified did not hold.";
            return Err((StatusCode::PRECONDITION_FAILED, "conditionNotMet", message.into()));
        }
        let mut headers = HeaderMap::new();
        headers.insert("content-type", value("application/octet-stream"));
        headers.insert("x-goog-generation", value(&found));
        headers.insert("x-goog-stored-content-encoding", value("identity"));
        Ok(headers)
    }

    /// What is told of an object is not encrypted with it.
    fn opens(&self, headers: &HeaderMap, op: &str, held: Option<&str>) -> Result<(), Wrong> {
        match op {
            "GetObject" => encryption::open(headers, &CUSTOMER_KEY, held),
            _ => Ok(()),
        }
    }

    fn sealed(&self, wrong: Wrong) -> Denied {
        let (reason, message) = match wrong {
            Wrong::Missing => (
                "resourceIsEncryptedWithCustomerEncryptionKey",
                "The target object is encrypted by a customer-supplied encryption key.",
            ),
            Wrong::Other => ("customerEncryptionKeyIsIncorrect", "The provided encryption key is incorrect."),
            Wrong::NotNeeded => (
                "resourceNotEncryptedWithCustomerEncryptionKey",
                "The target object is not encrypted by a customer-supplied encryption key.",
            ),
            Wrong::Digest => (
                "customerEncryptionKeySha256IsInvalid",
                "Missing a SHA256 hash of the encryption key, or it is not base64 encoded, or it does not match the encryption key.",
            ),
        };
        (StatusCode::BAD_REQUEST, reason, message.into())
    }

    fn no_bucket(&self) -> Denied {
        (StatusCode::NOT_FOUND, "notFound", "The specified bucket does not exist.".into())
    }
    fn no_object(&self) -> Denied {
        (StatusCode::NOT_FOUND, "notFound", "No such object".into())
    }
    fn denied(&self) -> Denied {
        (StatusCode::FORBIDDEN, "forbidden", "The account does not have access to it.".into())
    }
    fn beyond(&self) -> Denied {
        (
            StatusCode::RANGE_NOT_SATISFIABLE,
            "requestedRangeNotSatisfiable",
            "Request range not satisfiable".into(),
        )
    }

    fn error(&self, (status, reason, message): &Denied) -> (HeaderMap, String) {
        let first = json!({ "message": message, "domain": "global", "reason": reason });
        let document = json!({ "error": { "code": status.as_u16(), "message": message, "errors": [first] } });
        (json_headers(), document.to_string())
    }

    fn page(&self, asked: &Asked) -> (Option<String>, usize) {
        // Google's startOffset is included in the page, ours is not: nobody here begins at a key that there is.
        let start =
            asked.value("pageToken").map(str::to_owned).or_else(|| asked.value("startOffset").map(token));
        let max = asked.value("maxResults").and_then(|max| max.parse().ok()).unwrap_or(1000);
        (start, max.clamp(1, 1000))
    }
}

fn json_headers() -> HeaderMap {
    [(http::header::CONTENT_TYPE, value("application/json; charset=UTF-8"))].into_iter().collect()
}

fn described(bucket: &str, key: &str, meta: &Meta) -> Value {
    let mut updated = Vec::new();
    Timestamp::from(meta.modified)
        .format(TimestampFormat::DateTime, &mut updated)
        .expect("a time of today can be written");
    json!({
        "kind": "storage#object",
        "bucket": bucket,
        "name": key,
        "size": meta.size.to_string(),
        "generation": generation(meta),
        "metageneration": "1",
        "updated": String::from_utf8_lossy(&updated),
        "contentType": "application/octet-stream",
        "storageClass": "STANDARD",
        "etag": "CAE=",
    })
}

/// Of a token that is in force, whose it is.
fn signed_by<'a>(token: &str, guard: &'a Guard) -> Result<&'a Key, &'static str> {
    const INVALID: &str = "Invalid Credentials";
    let [header, claims, signature] = token.split('.').collect::<Vec<_>>()[..] else { return Err(INVALID) };
    let bytes = |text: &str| BASE64_URL_SAFE_NO_PAD.decode(text).map_err(|_| INVALID);
    let document = |text: &str| -> Result<Value, &'static str> {
        serde_json::from_slice(&bytes(text)?).map_err(|_| INVALID)
    };
    let (head, said) = (document(header)?, document(claims)?);
    let key = guard.keys.iter().find(|key| said["iss"] == key.id.as_str()).ok_or(INVALID)?;
    let private = PrivateKeyDer::from_pem_slice(key.secret.as_bytes()).map_err(|_| INVALID)?;
    let pair = RsaKeyPair::from_pkcs8(private.secret_der()).map_err(|_| INVALID)?;
    let public = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, pair.public_key().as_ref());
    let message = format!("{header}.{claims}");
    public.verify(message.as_bytes(), &bytes(signature)?).map_err(|_| INVALID)?;
    let now = guard.now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let time = |name: &str| said[name].as_u64().map(Duration::from_secs).ok_or(INVALID);
    let (issued, expires) = (time("iat")?, time("exp")?);
    let in_force = issued <= now + SKEW_MAX && now < expires && expires - issued <= Duration::from_secs(3600);
    let scoped = said["scope"].as_str().is_some_and(|scope| scope.contains("googleapis.com/auth/"));
    match in_force && scoped && head["alg"] == "RS256" {
        true => Ok(key),
        false => Err(INVALID),
    }
}
