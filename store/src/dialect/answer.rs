//! What refusals in S3's words mean: retry, or an error that says what to do.

use super::xml::named;
use super::{Place, Refusal};
use crate::StoreError;
use crate::observe::RetryCause;
use crate::retry::Fault;
use http::StatusCode;
use percent_encoding::percent_decode_str;
use quick_xml::Reader;
use quick_xml::events::Event;
use std::ops::Range;
use std::time::Duration;
use url::Url;

/// The parts of an error document that help.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    /// As it was sent: it decides, and is shown only by way of `shown`.
    pub(super) code: String,
    shown: String,
    pub(super) message: String,
    pub(super) region: Option<String>,
    pub(super) endpoint: Option<String>,
}

/// What differs between stores that speak alike.
pub(super) struct Words {
    /// What a reader needs.
    pub(super) rights: &'static str,
}

impl Said {
    pub(super) fn of(code: String, message: String) -> Self {
        Self { shown: code.clone(), code, message, ..Self::default() }
    }

    /// Stores like to repeat the key id; with some luck, so do logs. A key id may be a part of a code: that is no reason
    /// not to understand it.
    pub(super) fn scrub(&mut self, secrets: &[impl AsRef<str>]) {
        let texts = [&mut self.message, &mut self.shown];
        for text in texts.into_iter().chain(&mut self.region).chain(&mut self.endpoint) {
            for secret in secrets.iter().map(AsRef::as_ref).filter(|secret| !secret.is_empty()) {
                if text.contains(secret) {
                    *text = text.replace(secret, "…");
                }
            }
            if let Some((end, _)) = text.char_indices().nth(MESSAGE_CHARS_MAX) {
                text.truncate(end);
            }
        }
    }

    /// `SlowDown: reduce your request rate`
    pub(super) fn text(&self, status: StatusCode) -> String {
        match (self.shown.as_str(), self.message.as_str()) {
            ("", _) => format!("HTTP {}", status.as_u16()),
            (code, "") => format!("HTTP {} {code}", status.as_u16()),
            (code, message) => format!("HTTP {} {code}: {message}", status.as_u16()),
        }
    }
}

const MESSAGE_CHARS_MAX: usize = 200;

/// What only writes are refused for.
fn of_write(refusal: &Refusal<'_>, said: &Said) -> Option<Fault> {
    let (what, text) = (refusal.what.to_owned(), said.text(refusal.status));
    Some(match (refusal.status.as_u16(), said.code.as_str()) {
        // AWS refuses one of two conditional writes of a key at once, and says to ask again.
        (409, "ConditionalRequestConflict" | "OperationAborted") => {
            let after = refusal.retry_after();
            Fault::Retry { cause: RetryCause::Throttled, detail: text, after }
        }
        (
            _,
            "XMinioStorageFull" | "XMinioAdminBucketQuotaExceeded" | "QuotaExceeded" | "UserQuotaExceeded",
        )
        | (507, _) => Fault::Fail(StoreError::Full { what, why: text }),
        (400, "EntityTooLarge") | (413, _) => {
            let why = format!("it is larger than what the store, or a proxy before it, takes ({text})");
            Fault::Fail(StoreError::Unsupported { what, why })
        }
        (400, "BadDigest" | "XAmzContentChecksumMismatch" | "InvalidDigest") => {
            Fault::retry(RetryCause::Corrupted, format!("what arrived is not what was sent ({text})"))
        }
        // The upload has no such part, or has it with other bytes.
        (400, "InvalidPart") => Fault::Fail(StoreError::not_found(&what)),
        _ => return None,
    })
}

pub(super) fn judge(refusal: &Refusal<'_>, said: &Said, place: &Place, words: &Words) -> Fault {
    let (status, after) = (refusal.status, refusal.retry_after());
    let what = refusal.what.to_owned();
    let text = said.text(status);
    let denied = |why: String| Fault::Fail(StoreError::Denied { what: what.clone(), why });
    let invalid = |why: String| Fault::Fail(StoreError::Invalid { what: what.clone(), why });
    let retry = |cause| Fault::Retry { cause, detail: text.clone(), after };
    if refusal.is_write
        && let Some(fault) = of_write(refusal, said)
    {
        return fault;
    }
    match (status.as_u16(), said.code.as_str()) {
        // versitygw's is a 404, which says nothing of the object.
        (_, "InvalidAccessKeyId" | "NotSignedUp" | "XAdminUserNotFound") => denied(format!(
            "the store does not know this access key: check accessKeyId in the secret, and that {} issued it ({text})",
            place.endpoint
        )),
        (_, "SignatureDoesNotMatch") => denied(format!(
            "the signature is wrong: check secretAccessKey in the secret, and 'region' ({text})"
        )),
        // MinIO's is InvalidTokenId.
        (_, "ExpiredToken" | "InvalidToken" | "InvalidTokenId" | "TokenRefreshRequired") => {
            Fault::Fail(StoreError::Expired {
                what,
                why: format!("the session token is not valid any more: renew the secret ({text})"),
            })
        }
        (_, "RequestTimeTooSkewed") => {
            denied(format!("this node's clock differs from the store's: synchronise it ({text})"))
        }
        (_, "InvalidObjectState") => denied(format!("the object is archived: restore it first ({text})")),
        (401 | 403, _) => denied(format!(
            "these credentials may not do that: grant {}, or check the secret ({text})",
            words.rights
        )),
        (404, "NoSuchBucket") => Fault::Fail(StoreError::NotFound {
            what: format!("bucket {} at {}", place.bucket, place.endpoint),
            advice: ": check 'source', 'endpoint' and 'region'",
        }),
        (404, _) => Fault::Fail(StoreError::not_found(&what)),
        // No object has such a key. A HEAD's answer has no body that says so.
        (400, "KeyTooLongError") => Fault::Fail(StoreError::not_found(&what)),
        (400, "") if is_too_long(refusal.url, place) => Fault::Fail(StoreError::not_found(&what)),
        // 416 means that the object has become shorter: some stores look at Range before If-Match.
        (412 | 416, _) => Fault::Fail(StoreError::Stale { what }),
        (301 | 302 | 307 | 308, _)
        | (400, "AuthorizationHeaderMalformed" | "IllegalLocationConstraintException") => {
            let to = match (&said.region, &said.endpoint) {
                (Some(region), _) => format!("set 'region' to {region}"),
                (None, Some(endpoint)) => {
                    format!("it is at {endpoint}: set 'endpoint' or 'region' accordingly")
                }
                (None, None) => "check 'endpoint' and 'region'".to_owned(),
            };
            invalid(format!("bucket {} is not served at {}: {to} ({text})", place.bucket, place.endpoint))
        }
        (408, _) | (400, "RequestTimeout") => retry(RetryCause::Stalled),
        (429 | 503, _) => retry(RetryCause::Throttled),
        // 501 is a promise that asking again does not help.
        (501, _) => Fault::Fail(StoreError::malformed(&what, text)),
        (500..=599, _) => retry(RetryCause::ServerError),
        _ => Fault::Fail(StoreError::malformed(&what, text)),
    }
}

/// Of S3's objects the key has up to 1,024 bytes, of OSS's 1,023.
fn is_too_long(object: &Url, place: &Place) -> bool {
    let key = object.path().strip_prefix(place.base.path()).unwrap_or_default();
    percent_decode_str(key).count() > 1023
}

/// Anything that is not an S3 error document (a proxy's HTML page) gives an empty answer, one that stops short what came.
pub(super) fn parse(body: &[u8]) -> Said {
    let mut said = Said::default();
    let text = String::from_utf8_lossy(body);
    let mut reader = Reader::from_str(&text);
    let (mut field, mut detail) = (String::new(), String::new());
    let (mut region, mut endpoint) = (String::new(), String::new());
    loop {
        // A text comes in pieces: an entity is one of its own.
        let piece = match reader.read_event() {
            Ok(Event::Text(text)) => text.to_string(),
            Ok(Event::GeneralRef(entity)) => {
                let character = entity.resolve_char_ref().ok().flatten().or_else(|| named(&entity));
                character.map(String::from).unwrap_or_default()
            }
            Ok(Event::Start(start)) => {
                field = start.local_name().as_ref().to_owned();
                continue;
            }
            Ok(Event::End(_)) => {
                field.clear();
                continue;
            }
            Ok(Event::Eof) | Err(_) => break,
            Ok(_) => continue,
        };
        match field.as_str() {
            "Code" => said.code.push_str(&piece),
            "Message" => said.message.push_str(&piece),
            // Azure's message says the same of every signature.
            "AuthenticationErrorDetail" => detail.push_str(&piece),
            "Region" => region.push_str(&piece),
            "Endpoint" => endpoint.push_str(&piece),
            _ => {}
        }
    }
    let trimmed = |text: String| text.trim().to_owned();
    let unless_empty = |text: String| Some(trimmed(text)).filter(|text| !text.is_empty());
    said.code = trimmed(said.code);
    said.shown = said.code.clone();
    said.message = unless_empty(detail).unwrap_or_else(|| trimmed(said.message));
    (said.region, said.endpoint) = (unless_empty(region), unless_empty(endpoint));
    said
}

/// Seconds only; a date would make us trust the store's clock.
pub(super) fn retry_after(text: &str) -> Option<Duration> {
    text.trim().parse().ok().map(Duration::from_secs)
}

/// `bytes 0-99/1000` → 0..100
pub(crate) fn content_range(text: &str) -> Option<Range<u64>> {
    let (range, _) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some(first.trim().parse().ok()?..last.trim().parse::<u64>().ok()?.checked_add(1)?)
}

/// `bytes 0-99/1000` → 1000
pub(crate) fn whole_size(text: &str) -> Option<u64> {
    text.rsplit_once('/')?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged_said(status: u16, said: &Said) -> Fault {
        let place = Place::new("s3", "b", "https://h", volume::Addressing::Path).unwrap();
        let status = StatusCode::from_u16(status).unwrap();
        let headers = http::HeaderMap::new();
        let refusal = Refusal {
            what: "s3://b/k",
            url: &place.base,
            status,
            headers: &headers,
            body: None,
            is_write: false,
        };
        judge(&refusal, said, &place, &Words { rights: "s3:ListBucket" })
    }

    fn judged(status: u16, body: &str) -> Fault {
        judged_said(status, &parse(body.as_bytes()))
    }

    #[test]
    fn what_writes_are_refused_for_is_told_apart_and_no_read_is_refused_for_it() {
        let place = Place::new("s3", "b", "https://h", volume::Addressing::Path).unwrap();
        let headers = http::HeaderMap::new();
        let judged = |status, code: &str, is_write| {
            let status = StatusCode::from_u16(status).unwrap();
            let said = parse(format!("<Error><Code>{code}</Code></Error>").as_bytes());
            let (what, url) = ("s3://b/k", &place.base);
            let refusal = Refusal { what, url, status, headers: &headers, body: None, is_write };
            judge(&refusal, &said, &place, &Words { rights: "" })
        };
        // Ceph's quota is a 403, MinIO's a 400.
        for (status, code) in [
            (403, "QuotaExceeded"),
            (400, "XMinioAdminBucketQuotaExceeded"),
            (507, ""),
            (507, "XMinioStorageFull"),
        ] {
            let fault = judged(status, code, true);
            assert!(matches!(fault, Fault::Fail(StoreError::Full { .. })), "{code}: {fault:?}");
            let fault = judged(status, code, false);
            assert!(!matches!(fault, Fault::Fail(StoreError::Full { .. })), "{code}: {fault:?}");
        }
        for (status, code) in [(400, "EntityTooLarge"), (413, "")] {
            let fault = judged(status, code, true);
            assert!(matches!(fault, Fault::Fail(StoreError::Unsupported { .. })), "{code}: {fault:?}");
        }
        for (status, code) in
            [(409, "ConditionalRequestConflict"), (409, "OperationAborted"), (400, "BadDigest")]
        {
            let fault = judged(status, code, true);
            assert!(matches!(fault, Fault::Retry { .. }), "{code}: {fault:?}");
        }
        let part = judged(400, "InvalidPart", true);
        assert!(matches!(part, Fault::Fail(StoreError::NotFound { .. })), "{part:?}");
        assert!(matches!(judged(507, "", false), Fault::Retry { .. }), "a read is tried again");
        assert!(matches!(judged(403, "AccessDenied", true), Fault::Fail(StoreError::Denied { .. })));
    }

    #[test]
    fn each_refusal_says_what_to_do() {
        for (status, code, advice) in [
            (403, "InvalidAccessKeyId", "check accessKeyId"),
            (404, "XAdminUserNotFound", "check accessKeyId"),
            (403, "SignatureDoesNotMatch", "check secretAccessKey"),
            (400, "ExpiredToken", "renew the secret"),
            (403, "InvalidTokenId", "renew the secret"),
            (400, "KeyTooLongError", "does not exist"),
            (403, "RequestTimeTooSkewed", "synchronise"),
            (403, "AccessDenied", "grant s3:ListBucket"),
            (404, "NoSuchBucket", "check 'source'"),
        ] {
            let body = format!("<Error><Code>{code}</Code><Message>no</Message></Error>");
            match judged(status, &body) {
                Fault::Fail(error) => assert!(error.to_string().contains(advice), "{code}: {error}"),
                retry => panic!("{code}: {retry:?}"),
            }
        }
        let moved =
            "<Error><Code>PermanentRedirect</Code><Endpoint>b.s3.eu-west-1.amazonaws.com</Endpoint></Error>";
        assert!(
            matches!(judged(301, moved), Fault::Fail(StoreError::Invalid { why, .. }) if why.contains("eu-west-1"))
        );
        let region = "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>";
        assert!(
            matches!(judged(400, region), Fault::Fail(StoreError::Invalid { why, .. }) if why.contains("set 'region' to eu-west-1"))
        );
    }

    #[test]
    fn a_key_that_is_too_long_is_that_of_no_object() {
        let place = Place::new("s3", "b", "https://h", volume::Addressing::Path).unwrap();
        let headers = http::HeaderMap::new();
        for (length, gone) in [(1023, false), (1024, true), (1025, true)] {
            let mut url = place.base.clone();
            url.set_path(&format!("{}{}{}", place.base.path(), "k".repeat(length - 2), "%C3%A9"));
            let (what, status) = ("s3://b/k", StatusCode::BAD_REQUEST);
            let refusal = Refusal { what, url: &url, status, headers: &headers, body: None, is_write: false };
            let fault = judge(&refusal, &Said::default(), &place, &Words { rights: "" });
            let found = matches!(fault, Fault::Fail(StoreError::NotFound { .. }));
            assert_eq!(found, gone, "{length}: {fault:?}");
        }
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        for status in [408, 429, 500, 502, 503, 504] {
            assert!(matches!(judged(status, "<html>proxy"), Fault::Retry { .. }), "{status}");
        }
        for status in [400, 401, 403, 404, 405, 412, 416, 501] {
            assert!(matches!(judged(status, ""), Fault::Fail(_)), "{status}");
        }
    }

    #[test]
    fn key_ids_and_tokens_are_scrubbed() {
        let mut said = parse(
            b"<Error><Code>X</Code><Message>key AKIA1 token T0K</Message><Region>AKIA1</Region><Endpoint>T0K.h</Endpoint></Error>",
        );
        said.scrub(&["AKIA1", "T0K"]);
        assert_eq!(said.message, "key … token …");
        assert_eq!((said.region.as_deref(), said.endpoint.as_deref()), (Some("…"), Some("….h")));
    }

    #[test]
    fn entities_of_a_message_are_characters_of_it() {
        let body = b"<Error><Message> the region &#39;x&#39; is &lt;wrong&gt;, &unknown; &amp;c </Message><Region/></Error>";
        let mut said = parse(body);
        assert_eq!((said.message.as_str(), said.region.as_deref()), ("the region 'x' is <wrong>,  &c", None));
        said.scrub(&["<wrong>"]);
        assert_eq!(said.message, "the region 'x' is \u{2026},  &c");
    }

    #[test]
    fn a_code_that_has_the_key_id_in_it_is_understood_and_not_shown() {
        let body = b"<Error><Code>InvalidObjectState</Code><Message>it is a glacier</Message></Error>";
        let mut said = parse(body);
        said.scrub(&["a"]);
        match judged_said(403, &said) {
            Fault::Fail(StoreError::Denied { why, .. }) => {
                assert!(
                    why.contains("restore it first") && why.contains("Inv…lidObjectSt…te: it is … gl…cier"),
                    "{why}"
                );
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn ranges_are_read_exactly() {
        assert_eq!(content_range("bytes 0-99/1000"), Some(0..100));
        assert_eq!(content_range("bytes 5-5/*"), Some(5..6));
        assert_eq!((whole_size("bytes 0-99/1000"), whole_size("bytes 5-5/*")), (Some(1000), None));
        for bad in ["bytes */1000", "0-99/1000", "bytes 0-18446744073709551615/1"] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }
}
