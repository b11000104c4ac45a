//! Azure's blobs, the reading half: the account's key is checked as Microsoft documents "Shared Key", independently of any
//! client's library; SAS tokens are looked up by their signature.

use super::access::Guard;
use super::adapter::{Adapter, Asked, Denied, decoded, pairs, token, value};
use super::bucket::Listing;
use super::checksums::Sums;
use super::encryption::{self, Names, Wrong};
use super::meta::Meta;
use super::{Key, Rights};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use http::request::Parts;
use http::{HeaderMap, Method, StatusCode};
use httpdate::fmt_http_date as http_time;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::{Timestamp, TimestampFormat};
use sha2::Sha256;
use std::time::Duration;

/// The key of the account that such a server has if not told otherwise.
pub const ACCOUNT_KEY: &str = "dGVzdGtpdC1hY2NvdW50LWtleS10aGF0LW9wZW5zLW5vdGhpbmc=";

/// How an Azure server of the testkit is. Of its [`Key`]s one has the account's key as `secret` and no token; each other is a
/// SAS token, whose signature is its `token`.
#[derive(Clone, Debug)]
pub struct Azure {
    pub account: String,
}

/// A SAS token as a portal gives it out.
pub fn sas_token(signature: &str, until: &str) -> String {
    let signature = utf8_percent_encode(signature, NON_ALPHANUMERIC);
    format!("?sv=2023-11-03&ss=b&srt=sco&sp=rl&se={until}&spr=https,http&sig={signature}")
}

const CUSTOMER_KEY: Names = Names {
    key: "x-ms-encryption-key",
    algorithm: "x-ms-encryption-algorithm",
    digest: "x-ms-encryption-key-sha256",
    digested: encryption::sha256,
};

const SKEW_MAX: Duration = Duration::from_secs(15 * 60);
const UNSIGNED: &str = "Server failed to authenticate the request. Make sure the value of Authorization header is formed \
                        correctly including the signature.";

impl Adapter for Azure {
    fn asked(&self, method: &Method, path: &str, query: &str) -> Asked {
        let Some(rest) = path.strip_prefix(&format!("/{}/", self.account)) else { return Asked::default() };
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        let mut asked = Asked { bucket: decoded(bucket), key: decoded(key), query: pairs(query), op: "" };
        asked.op = match (method, asked.value("comp")) {
            (&Method::GET, Some("list")) if asked.value("restype") == Some("container") => {
                asked.key = asked.value("prefix").unwrap_or_default().to_owned();
                "ListObjectsV2"
            }
            (&Method::GET, None) => "GetObject",
            (&Method::HEAD, None) => "HeadObject",
            _ => "",
        };
        asked
    }

    fn who(&self, parts: &Parts, asked: &Asked, guard: &Guard) -> Result<Rights, Denied> {
        let Guard { keys, anonymous, .. } = guard;
        let failed = |detail: &str| (StatusCode::FORBIDDEN, "AuthenticationFailed", detail.to_owned());
        if let Some(signature) = asked.value("sig") {
            let key = keys.iter().find(|key| key.token.as_deref() == Some(signature));
            let key = key.ok_or_else(|| failed("Signature did not match."))?;
            let until = asked.value("se").unwrap_or_default();
            let until =
                Timestamp::parse(TimestampFormat::DateTime, until).map_err(|_| failed("se is no time"))?;
            if until < Timestamp::from(guard.now()) {
                return Err(failed(
                    "Signature not valid in the specified time frame: Start [then] - Expiry [then]",
                ));
            }
            return Ok(key.rights);
        }
        let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
        let Some(authorization) = header("authorization") else {
            return match *anonymous {
                true => Ok(Rights::All),
                false => Err((
                    StatusCode::UNAUTHORIZED,
                    "NoAuthenticationInformation",
                    "Server failed to authenticate the request. Please refer to the information in the www-authenticate header."
                        .into(),
                )),
            };
        };
        let date = header("x-ms-date").or_else(|| header("date")).ok_or_else(|| failed("no date"))?;
        let date = Timestamp::parse(TimestampFormat::HttpDate, date).map_err(|_| failed("no date"))?;
        let now = guard.now();
        if date < Timestamp::from(now - SKEW_MAX) || date > Timestamp::from(now + SKEW_MAX) {
            return Err(failed("Request date header too old"));
        }
        let account = format!("SharedKey {}:", self.account);
        let signature = authorization.strip_prefix(&account).ok_or_else(|| failed("another account"))?;
        let text = self.to_sign(parts, asked);
        let is_signed = |key: &&Key| {
            let Ok(secret) = BASE64_STANDARD.decode(&key.secret) else { return false };
            let mut mac = Hmac::<Sha256>::new_from_slice(&secret).expect("HMAC takes keys of any length");
            mac.update(text.as_bytes());
            BASE64_STANDARD.encode(mac.finalize().into_bytes()) == signature
        };
        let key = keys.iter().filter(|key| key.token.is_none()).find(is_signed);
        let mismatch =
            "The MAC signature found in the HTTP request is not the same as any computed signature.";
        key.map(|key| key.rights).ok_or_else(|| failed(mismatch))
    }

    fn sums(&self) -> Sums {
        Sums::Azure
    }

    fn listing(&self, asked: &Asked, page: Listing) -> (HeaderMap, String) {
        let mut blobs = String::new();
        for (key, meta) in &page.objects {
            blobs.push_str(&format!(
                "<Blob>{}<Properties><Last-Modified>{}</Last-Modified><Etag>{}</Etag><Content-Length>{}</Content-Length>\
                 <BlobType>BlockBlob</BlobType></Properties></Blob>",
                name(key),
                http_time(meta.modified),
                meta.etag,
                meta.size,
            ));
        }
        for prefix in &page.prefixes {
            blobs.push_str(&format!("<BlobPrefix>{}</BlobPrefix>", name(prefix)));
        }
        let next = page.next.map_or_else(
            || "<NextMarker />".into(),
            |next| format!("<NextMarker>{}</NextMarker>", token(&next)),
        );
        let text = format!(
            "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults ContainerName=\"{}\"><Blobs>{blobs}</Blobs>{next}\
             </EnumerationResults>",
            asked.bucket
        );
        (headers(), text)
    }

    fn about(&self, _: &Asked, meta: &Meta) -> (HeaderMap, String) {
        let mut headers = described(meta);
        headers.insert("content-length", meta.size.into());
        (headers, String::new())
    }

    fn version(&self, parts: &Parts, _: &Asked, meta: &Meta) -> Result<HeaderMap, Denied> {
        let wanted = parts.headers.get("if-match");
        match wanted.is_some_and(|wanted| *wanted != format!("\"{}\"", meta.etag)) {
            true => {
                Err((StatusCode::PRECONDITION_FAILED, "ConditionNotMet", "The condition is not met.".into()))
            }
            false => Ok(described(meta)),
        }
    }

    fn opens(&self, headers: &HeaderMap, _: &str, held: Option<&str>) -> Result<(), Wrong> {
        encryption::open(headers, &CUSTOMER_KEY, held)
    }

    fn sealed(&self, wrong: Wrong) -> Denied {
        let (status, code, message) = match wrong {
            Wrong::Missing => (
                StatusCode::CONFLICT,
                "BlobUsesCustomerSpecifiedEncryption",
                "The blob is encrypted with customer specified encryption, but it was not provided in the request.",
            ),
            Wrong::Other => (
                StatusCode::CONFLICT,
                "BlobCustomerSpecifiedEncryptionMismatch",
                "The given customer specified encryption does not match the encryption used to encrypt the blob.",
            ),
            Wrong::NotNeeded => (
                StatusCode::CONFLICT,
                "BlobDoesNotUseCustomerSpecifiedEncryption",
                "The blob is not encrypted with customer specified encryption, but one was provided in the request.",
            ),
            Wrong::Digest => (
                StatusCode::BAD_REQUEST,
                "InvalidHeaderValue",
                "The value for one of the HTTP headers is not in the correct format.",
            ),
        };
        (status, code, message.into())
    }

    fn no_bucket(&self) -> Denied {
        (StatusCode::NOT_FOUND, "ContainerNotFound", "The specified container does not exist.".into())
    }
    fn no_object(&self) -> Denied {
        (StatusCode::NOT_FOUND, "BlobNotFound", "The specified blob does not exist.".into())
    }
    fn denied(&self) -> Denied {
        let message = "This request is not authorized to perform this operation using this permission.";
        (StatusCode::FORBIDDEN, "AuthorizationPermissionMismatch", message.into())
    }
    fn beyond(&self) -> Denied {
        (StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange", "The range specified is invalid.".into())
    }

    fn error(&self, (_, code, message): &Denied) -> (HeaderMap, String) {
        let mut headers = headers();
        headers.insert("x-ms-error-code", value(code));
        let (message, detail) = match *code {
            "AuthenticationFailed" => (UNSIGNED, Some(message)),
            _ => (message.as_str(), None),
        };
        let detail =
            detail.map(|detail| format!("<AuthenticationErrorDetail>{detail}</AuthenticationErrorDetail>"));
        let text = format!(
            "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><Error><Code>{code}</Code><Message>{message}\nRequestId:1\nTime:now\
             </Message>{}</Error>",
            detail.unwrap_or_default()
        );
        (headers, text)
    }

    fn page(&self, asked: &Asked) -> (Option<String>, usize) {
        let max = asked.value("maxresults").and_then(|max| max.parse().ok()).unwrap_or(5000);
        (asked.value("marker").map(str::to_owned), max.clamp(1, 5000))
    }
}

impl Azure {
    /// Everything of a request that changes what it does, in the one spelling that both sides compute.
    fn to_sign(&self, parts: &Parts, asked: &Asked) -> String {
        let header =
            |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let length = Some(header("content-length")).filter(|length| *length != "0").unwrap_or_default();
        let theirs_say_when = parts.headers.contains_key("x-ms-date");
        let lines = [
            parts.method.as_str(),
            header("content-encoding"),
            header("content-language"),
            length,
            header("content-md5"),
            header("content-type"),
            if theirs_say_when { "" } else { header("date") },
            header("if-modified-since"),
            header("if-match"),
            header("if-none-match"),
            header("if-unmodified-since"),
            header("range"),
        ];
        let mut theirs: Vec<_> = parts
            .headers
            .iter()
            .filter(|(name, _)| name.as_str().starts_with("x-ms-"))
            .map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value.as_bytes())))
            .collect();
        // By name: a colon is behind what a longer name goes on with.
        theirs.sort();
        let theirs: String =
            theirs.iter().map(|(name, value)| format!("{name}:{}\n", value.trim())).collect();
        let mut query: Vec<_> =
            asked.query.iter().map(|(name, value)| format!("\n{}:{value}", name.to_lowercase())).collect();
        query.sort();
        format!("{}\n{theirs}/{}{}{}", lines.join("\n"), self.account, parts.uri.path(), query.concat())
    }
}

fn headers() -> HeaderMap {
    [(http::header::CONTENT_TYPE, value("application/xml"))].into_iter().collect()
}

fn described(meta: &Meta) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", value("application/octet-stream"));
    headers.insert("etag", value(&format!("\"{}\"", meta.etag)));
    headers.insert("last-modified", value(&http_time(meta.modified)));
    headers.insert("x-ms-blob-type", value("BlockBlob"));
    headers
}

/// What XML cannot carry is encoded, and said to be.
fn name(key: &str) -> String {
    if key.chars().any(|c| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}')) {
        return format!("<Name Encoded=\"true\">{}</Name>", utf8_percent_encode(key, NON_ALPHANUMERIC));
    }
    let escaped = key.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<Name>{escaped}</Name>")
}
