//! A web server: files by their path. A file's version is its strong ETag, or when it was modified and how long it is.

use super::{Dialect, Object, Place, Refusal, Signer, can_be_sent, date, field, header, not_ours};
use crate::keys::encode_path;
use crate::observe::RetryCause;
use crate::retry::Fault;
use crate::{StoreError, Version};
use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, DATE, ETAG, HeaderMap,
    HeaderValue, IF_MATCH, IF_UNMODIFIED_SINCE, LAST_MODIFIED, LOCATION, RANGE, WWW_AUTHENTICATE,
};
use http::{StatusCode, request};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, UNIX_EPOCH};
use url::Url;
use volume::{Credentials, CredentialsKind};

#[derive(Debug)]
pub(crate) struct Web {
    place: Place,
    /// Its directories tell times and sizes and no ETags: versions are made of those, whoever tells them.
    by_time: AtomicBool,
}

const NANOS: i64 = 1_000_000_000;

impl Web {
    pub(crate) fn new(origin: &str) -> Result<Self, StoreError> {
        let base = Url::parse(origin).map_err(|e| StoreError::Invalid {
            what: origin.to_owned(),
            why: format!("it is no URL ({e})"),
        })?;
        let endpoint = origin.trim_end_matches('/').to_owned();
        let place =
            Place { shown: endpoint.clone(), bucket: String::new(), endpoint, said_by: "source", base };
        Ok(Self { place, by_time: AtomicBool::new(false) })
    }

    pub(crate) fn tell_versions_by_time(&self, yes: bool) {
        self.by_time.store(yes, Ordering::Relaxed);
    }

    /// Of a 401: a bearer's token has ended, been withdrawn, or was never any (RFC 6750, 3.1).
    pub(crate) fn has_expired(headers: &HeaderMap) -> bool {
        header(headers, WWW_AUTHENTICATE).is_some_and(|says| says.contains("invalid_token"))
    }

    /// Of a redirect: does it only add the slash that a directory's path ends in?
    pub(crate) fn adds_slash(url: &Url, headers: &HeaderMap) -> bool {
        let to = header(headers, LOCATION).and_then(|location| url.join(location).ok());
        // Behind a proxy a server may think that it has another name, port or scheme.
        to.is_some_and(|to| to.path().strip_suffix('/') == Some(url.path()))
    }
}

/// How servers say that a path lacks its last slash, or that something is elsewhere.
pub(crate) const REDIRECTS: [StatusCode; 5] = [
    StatusCode::MOVED_PERMANENTLY,
    StatusCode::FOUND,
    StatusCode::SEE_OTHER,
    StatusCode::TEMPORARY_REDIRECT,
    StatusCode::PERMANENT_REDIRECT,
];

/// A strong ETag, with its quotes: no time looks like one.
pub(super) fn by_etag(etag: &str) -> Option<Version> {
    let etag = etag.trim();
    let is_strong = etag.len() > 2 && etag.starts_with('"') && etag.ends_with('"');
    let version = field::unquoted(etag).filter(|_| is_strong)?;
    Some(Version(field::quoted(&version)))
}

/// `modified_ns` in whole seconds, as HTTP tells it. None: HTTP has no such time.
pub(super) fn by_time(modified_ns: i64, size: u64) -> Option<Version> {
    (modified_ns >= 0).then(|| Version(format!("{}-{size}", modified_ns / NANOS)))
}

/// The time in such a version, seconds.
fn time_of(version: &Version) -> Option<u64> {
    version.0.split_once('-')?.0.parse().ok()
}

pub(super) fn object(size: u64, version: Option<Version>, modified_ns: i64) -> Option<Object> {
    let version = version.filter(|_| size <= volume::FILE_BYTES_MAX)?;
    Some(Object { size, version, modified_ns })
}

impl Dialect for Web {
    fn place(&self) -> &Place {
        &self.place
    }

    fn headers(&self) -> HeaderMap {
        [(ACCEPT_ENCODING, HeaderValue::from_static("identity"))].into_iter().collect()
    }

    fn object(&self, key: &[u8]) -> Url {
        let mut url = self.place.base.clone();
        url.set_path(&format!("/{}", encode_path(key)));
        url
    }

    fn seen(&self, headers: &HeaderMap, _: &[u8]) -> Result<Option<Object>, &'static str> {
        // What is made when it is asked for has no length beforehand, what is packed has another.
        let size = header(headers, CONTENT_LENGTH).and_then(field::size);
        let Some(size) = size.filter(|_| self.is_as_stored(headers)) else { return Ok(None) };
        let modified = header(headers, LAST_MODIFIED).and_then(date::parse_http);
        let etag = header(headers, ETAG).filter(|_| !self.by_time.load(Ordering::Relaxed)).and_then(by_etag);
        let version = etag.or_else(|| modified.and_then(|modified| by_time(modified, size)));
        Ok(object(size, version, modified.unwrap_or(0)))
    }

    fn reading(&self, version: &Version, range: &Range<u64>) -> Option<HeaderMap> {
        let mut headers = HeaderMap::new();
        headers.insert(RANGE, super::value(format!("bytes={}-{}", range.start, range.end - 1))?);
        match version.0.starts_with('"') {
            true => headers.insert(IF_MATCH, super::value(version.0.clone())?),
            false => {
                let time = UNIX_EPOCH.checked_add(Duration::from_secs(time_of(version)?))?;
                // The year 9999 is the last that HTTP can write.
                let year_10000 = UNIX_EPOCH + Duration::from_secs(253_402_300_800);
                let text = (time < year_10000).then(|| httpdate::fmt_http_date(time))?;
                headers.insert(IF_UNMODIFIED_SINCE, super::value(text)?)
            }
        };
        Some(headers)
    }

    fn is_as_stored(&self, headers: &HeaderMap) -> bool {
        header(headers, CONTENT_ENCODING).is_none_or(|encoding| encoding == "identity")
    }

    /// HTTP tells times in seconds: of two changes within one, the second leaves no trace.
    fn is_settled(&self, headers: &HeaderMap) -> bool {
        let time = |name| header(headers, name).and_then(date::parse_http);
        match (time(LAST_MODIFIED), time(DATE)) {
            (Some(modified), Some(now)) => modified != now,
            _ => true,
        }
    }

    fn version(&self, headers: &HeaderMap, wanted: &Version) -> Option<Version> {
        if wanted.0.starts_with('"') {
            return by_etag(header(headers, ETAG)?);
        }
        let modified = header(headers, LAST_MODIFIED).and_then(date::parse_http)?;
        let size = match header(headers, CONTENT_RANGE) {
            Some(range) => super::whole_size(range)?,
            None => header(headers, CONTENT_LENGTH).and_then(field::size)?,
        };
        by_time(modified, size)
    }

    /// Bodies are pages for people: the status says what there is to say.
    fn refused(&self, refusal: &Refusal<'_>, secrets: &[String]) -> Fault {
        let (what, status) = (refusal.what.to_owned(), refusal.status.as_u16());
        let text = format!("HTTP {status}");
        let denied = |why: String| Fault::Fail(StoreError::Denied { what: what.clone(), why });
        let retry = |cause| Fault::Retry { cause, detail: text.clone(), after: refusal.retry_after() };
        match status {
            // A bearer's token that has ended, been withdrawn, or was never any (RFC 6750, 3.1).
            401 if header(refusal.headers, WWW_AUTHENTICATE)
                .is_some_and(|says| says.contains("invalid_token")) =>
            {
                let why = format!("the bearerToken is not valid any more: renew the secret ({text})");
                Fault::Fail(StoreError::Expired { what, why })
            }
            401 => denied(format!(
                "the server wants to know who asks: put username and password, or bearerToken, into the secret, or check those that \
                 are there ({text})"
            )),
            403 => denied(format!(
                "the server refuses it: check the rights of the file, and the secret ({text})"
            )),
            404 | 410 => Fault::Fail(StoreError::not_found(&what)),
            412 | 416 => Fault::Fail(StoreError::Stale { what }),
            300..=399 => {
                let to =
                    header(refusal.headers, LOCATION).and_then(|location| refusal.url.join(location).ok());
                let to = to.map(|to| to.origin().ascii_serialization());
                let is_secret =
                    |to: &String| secrets.iter().any(|secret| !secret.is_empty() && to.contains(secret));
                let to = to
                    .filter(|to| to.len() < 300 && !is_secret(to))
                    .unwrap_or_else(|| "another place".into());
                Fault::Fail(StoreError::Invalid {
                    what,
                    why: format!(
                        "the server sends this to {to}, and no redirect is followed: name what it leads to as the source ({text})"
                    ),
                })
            }
            408 => retry(RetryCause::Stalled),
            429 | 503 => retry(RetryCause::Throttled),
            // 501 is a promise that asking again does not help.
            501 => Fault::Fail(StoreError::malformed(&what, text)),
            500..=599 => retry(RetryCause::ServerError),
            _ => Fault::Fail(StoreError::malformed(&what, text)),
        }
    }

    fn signer(&self, credentials: &Credentials) -> Result<Option<Arc<dyn Signer>>, StoreError> {
        let mut secrets = credentials.to_secrets();
        let mut take = |name: &str| secrets.remove(name).unwrap_or_default();
        let (value, sent) = match credentials.kind() {
            CredentialsKind::Anonymous => return Ok(None),
            CredentialsKind::Password => {
                let (user, password) = (take("username"), take("password"));
                if user.contains(':') {
                    let why = "username has a colon, which HTTP takes for its end".to_owned();
                    return Err(StoreError::Invalid { what: "credentials".into(), why });
                }
                let pair = BASE64_STANDARD.encode(format!("{user}:{password}"));
                (format!("Basic {pair}"), vec![pair, user, password])
            }
            CredentialsKind::Bearer => {
                let token = take("bearerToken");
                can_be_sent("bearerToken", &token)?;
                (format!("Bearer {token}"), vec![token])
            }
            other => return Err(not_ours(other, "https", "username and password, or bearerToken")),
        };
        let mut value = super::value(value).ok_or_else(|| {
            let why = "they have characters that no request can carry: copy them again".to_owned();
            StoreError::Invalid { what: "credentials".into(), why }
        })?;
        value.set_sensitive(true);
        Ok(Some(Arc::new(Says { value, sent })))
    }
}

/// Nothing is signed: whoever has the words is let in.
struct Says {
    value: HeaderValue,
    sent: Vec<String>,
}

#[async_trait]
impl Signer for Says {
    async fn sign(&self, request: &mut request::Parts) -> Result<(), ()> {
        request.headers.insert(AUTHORIZATION, self.value.clone());
        Ok(())
    }

    fn sent(&self) -> Vec<String> {
        self.sent.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&str, &str)| {
            (http::HeaderName::try_from(*name).unwrap(), HeaderValue::try_from(*value).unwrap())
        };
        pairs.iter().map(pair).collect()
    }

    const THEN: &str = "Wed, 21 Oct 2015 07:28:00 GMT";

    fn web() -> Web {
        Web::new("https://h").unwrap()
    }

    #[test]
    fn a_version_is_a_strong_etag_or_time_and_length() {
        let of =
            |pairs: &[(&str, &str)]| web().seen(&headers(pairs), &[]).unwrap().map(|seen| seen.version.0);
        let size = ("content-length", "7");
        assert_eq!(of(&[size, ("etag", "\"a-b\""), ("last-modified", THEN)]).as_deref(), Some("\"a-b\""));
        assert_eq!(
            of(&[size, ("etag", "W/\"a\""), ("last-modified", THEN)]).as_deref(),
            Some("1445412480-7")
        );
        assert_eq!(of(&[size, ("last-modified", THEN)]).as_deref(), Some("1445412480-7"));
        for none in [
            &[size][..],
            &[size, ("etag", "W/\"a\"")],
            &[size, ("etag", "\"\"")],
            &[size, ("etag", "bare")],
            &[("etag", "\"a\"")],
            &[size, ("etag", "\"a\""), ("content-encoding", "gzip")],
            &[("content-length", "99999999999999999999"), ("etag", "\"a\"")],
        ] {
            assert_eq!(of(none), None, "{none:?}");
        }
        let by_time = web();
        by_time.tell_versions_by_time(true);
        let seen = by_time.seen(&headers(&[size, ("etag", "\"a\""), ("last-modified", THEN)]), &[]);
        assert_eq!(seen.unwrap().unwrap().version.0, "1445412480-7");
    }

    #[test]
    fn what_is_read_is_held_against_the_version_that_was_wanted() {
        let (etag, time) = (Version("\"a\"".into()), Version("1445412480-7".into()));
        let answer = headers(&[
            ("etag", "\"a\""),
            ("last-modified", THEN),
            ("content-range", "bytes 0-0/7"),
            ("content-length", "1"),
        ]);
        for version in [&etag, &time] {
            assert_eq!(web().version(&answer, version).as_ref(), Some(version));
        }
        let other = headers(&[("etag", "W/\"a\""), ("last-modified", THEN), ("content-length", "8")]);
        assert_eq!(web().version(&other, &etag), None);
        assert_ne!(web().version(&other, &time).as_ref(), Some(&time));
        let asked = |version: &Version| web().reading(version, &(2..5)).unwrap();
        assert_eq!(
            (&asked(&etag)[RANGE], &asked(&etag)[IF_MATCH]),
            (&"bytes=2-4".parse().unwrap(), &"\"a\"".parse().unwrap())
        );
        assert_eq!(asked(&time)[IF_UNMODIFIED_SINCE], THEN);
        for none in ["", "-7", "x-7", "99999999999999999999-7", "253402300800-7", "\"a\nb\""] {
            assert!(web().reading(&Version(none.into()), &(0..1)).is_none(), "{none}");
        }
    }

    #[test]
    fn what_changed_in_this_second_has_not_settled() {
        let at = |modified: &str, now: &str| {
            web().is_settled(&headers(&[("last-modified", modified), ("date", now)]))
        };
        assert!(!at(THEN, THEN));
        assert!(at(THEN, "Wed, 21 Oct 2015 07:28:01 GMT"));
        // A clock that was set back, or two clocks: nothing can be told, and no reader waits for ever.
        assert!(at("Wed, 21 Oct 2015 07:28:01 GMT", THEN));
        assert!(web().is_settled(&headers(&[("etag", "\"a\"")])));
    }

    #[test]
    fn a_redirect_is_a_directory_or_a_refusal() {
        let url = web().object(b"a/b c");
        assert_eq!(url.as_str(), "https://h/a/b%20c");
        let adds = |location: &str| Web::adds_slash(&url, &headers(&[("location", location)]));
        for same in ["/a/b%20c/", "b%20c/", "http://inner:8080/a/b%20c/"] {
            assert!(adds(same), "{same}");
        }
        for other in ["/a/b%20c", "/login/", "https://other/", "", "/a/b%20c/d/", "/a/b%20c//"] {
            assert!(!adds(other), "{other}");
        }
        let judge = |status: u16, location: &str| {
            let headers = headers(&[("location", location)]);
            let status = StatusCode::from_u16(status).unwrap();
            let refusal = Refusal {
                what: "https://h/a",
                url: &url,
                status,
                headers: &headers,
                body: None,
                is_write: false,
            };
            web().refused(&refusal, &["hunter2".to_owned()])
        };
        match judge(302, "https://login.example/?token=hunter2") {
            Fault::Fail(StoreError::Invalid { why, .. }) => {
                assert!(why.contains("https://login.example,") && !why.contains("hunter2"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        for (status, words) in
            [(401, "bearerToken"), (403, "rights"), (404, "does not exist"), (410, "does not exist")]
        {
            let Fault::Fail(error) = judge(status, "") else { panic!("{status}") };
            assert!(error.to_string().contains(words), "{status}: {error}");
        }
        for status in [412, 416] {
            assert!(matches!(judge(status, ""), Fault::Fail(StoreError::Stale { .. })), "{status}");
        }
        for status in [408, 429, 500, 502, 503, 504] {
            assert!(matches!(judge(status, ""), Fault::Retry { .. }), "{status}");
        }
    }

    #[test]
    fn a_secret_that_no_header_can_carry_is_refused_without_repeating_it() {
        let of = |pairs: &[(&str, &str)]| {
            let credentials = Credentials::from_secrets(pairs.iter().copied()).unwrap();
            web().signer(&credentials).map(drop)
        };
        for wrong in [
            &[("bearerToken", "hunter2 é")][..],
            &[("username", "hunter2:"), ("password", "x")],
            &[("accessKeyId", "a"), ("secretAccessKey", "hunter2")],
        ] {
            let error = of(wrong).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
        of(&[("username", "é"), ("password", "pässword")]).unwrap();
    }
}
