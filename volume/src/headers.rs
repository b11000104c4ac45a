//! Headers that a volume's requests carry besides their own: what a gateway before the store wants to know.
//!
//! Whoever writes them may be a tenant (an inline volume), so they change nothing of what is asked, by whom, and of whom: the
//! names that decide that are refused.

use std::collections::BTreeMap;

/// By name, in small letters.
pub(crate) type Headers = BTreeMap<String, String>;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum HeaderError {
    #[error("write one header a line, as Name: value")]
    NoHeader,
    #[error("a header's name has letters, digits and hyphens, and at most 64 of them")]
    Name,
    #[error("header {0:?} has no value, or one with control characters or other characters than ASCII's")]
    Value(String),
    #[error("header {0:?} stands there twice: keep one")]
    Twice(String),
    #[error(
        "header {0:?} is not the volume's to set: it decides what is asked, by whom or over which connection; credentials belong into \
         the secret"
    )]
    Owned(String),
    #[error("at most 16 headers, and 4 KiB of them")]
    TooMany,
}

const HEADERS_MAX: usize = 16;
const BYTES_MAX: usize = 4 << 10;
const NAME_BYTES_MAX: usize = 64;

/// Of HTTP, of the stores' protocols, and what others before a store believe of a request.
const OWNED: &[&str] = &[
    "accept",
    "accept-encoding",
    "authorization",
    "connection",
    "cookie",
    "date",
    "depth",
    "expect",
    "forwarded",
    "host",
    "keep-alive",
    "range",
    "te",
    "trailer",
    "transfer-encoding",
    "true-client-ip",
    "upgrade",
    "user-agent",
    "via",
    "x-real-ip",
    // Another method than GET.
    "x-http-method",
    "x-method-override",
    // By which clouds' metadata services know that no request was smuggled to them.
    "metadata",
    "metadata-flavor",
];
const OWNED_PREFIXES: &[&str] = &[
    "content-",
    "if-",
    "proxy-",
    "sec-",
    "x-amz-",
    "x-aws-",
    "x-forwarded-",
    "x-goog-",
    "x-google-",
    "x-http-method-",
    "x-ms-",
    "x-oss-",
];

/// A header a line. No error repeats a value: somebody may have taken it for the place of a password.
pub(crate) fn parse(text: &str) -> Result<Headers, HeaderError> {
    if text.len() > BYTES_MAX {
        return Err(HeaderError::TooMany);
    }
    let mut headers = Headers::new();
    for line in text.split('\n').filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').ok_or(HeaderError::NoHeader)?;
        let is_name = (1..=NAME_BYTES_MAX).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if !is_name {
            return Err(HeaderError::Name);
        }
        let (name, value) = (name.to_ascii_lowercase(), value.trim_matches(' '));
        if OWNED.contains(&name.as_str()) || OWNED_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
            return Err(HeaderError::Owned(name));
        }
        if value.is_empty() || !value.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
            return Err(HeaderError::Value(name));
        }
        if headers.insert(name.clone(), value.to_owned()).is_some() {
            return Err(HeaderError::Twice(name));
        }
    }
    if headers.len() > HEADERS_MAX { Err(HeaderError::TooMany) } else { Ok(headers) }
}

/// The one spelling of them that there is. None: there are none.
pub(crate) fn text(headers: &Headers) -> Option<String> {
    let lines: Vec<_> = headers.iter().map(|(name, value)| format!("{name}: {value}")).collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn headers_stand_one_a_line_as_yaml_has_lines() {
        let headers = parse("X-Tenant: team a, b:c\nx-route:eu\n").unwrap();
        assert_eq!(text(&headers).unwrap(), "x-route: eu\nx-tenant: team a, b:c");
        assert!(parse("").unwrap().is_empty() && text(&Headers::new()).is_none());
    }

    #[test]
    fn what_is_not_the_volumes_to_say_is_refused_and_no_value_repeated() {
        let owned = |name: &str| HeaderError::Owned(name.to_ascii_lowercase());
        for name in [
            "Authorization",
            "HOST",
            "Range",
            "If-None-Match",
            "Content-Length",
            "Transfer-Encoding",
            "Connection",
            "Cookie",
            "Proxy-Authorization",
            "X-Amz-Security-Token",
            "x-amz-server-side-encryption-customer-key",
            "x-oss-date",
            "x-ms-version",
            "x-goog-user-project",
            "X-HTTP-Method-Override",
            "X-Forwarded-For",
            "Metadata-Flavor",
            "Metadata",
            "X-aws-ec2-metadata-token",
        ] {
            let error = parse(&format!("{name}: hunter2")).unwrap_err();
            assert_eq!(error, owned(name));
            assert!(!error.to_string().contains("hunter2"));
        }
        let value = || HeaderError::Value("x-a".into());
        let long = format!("x-a: {}", "x".repeat(BYTES_MAX));
        let many: String = (0..=HEADERS_MAX).map(|k| format!("x-{k}: 1\n")).collect();
        for (text, error) in [
            ("hunter2", HeaderError::NoHeader),
            ("x-a: b\n hunter2", HeaderError::NoHeader), // a folded line
            ("x a: hunter2", HeaderError::Name),
            (": hunter2", HeaderError::Name),
            ("x-a\r: hunter2", HeaderError::Name),
            ("x-a:", value()),
            ("x-a: hunter2\r", value()),
            ("x-a: hunter2\rx-b: 1", value()),
            ("x-a: hunter2\0", value()),
            ("x-a: hünter2", value()),
            ("x-a: 1\nX-A: hunter2", HeaderError::Twice("x-a".into())),
            (&long, HeaderError::TooMany),
            (&many, HeaderError::TooMany),
        ] {
            let found = parse(text).unwrap_err();
            assert!(found == error && !found.to_string().contains("hunter2"), "{text:?}: {found}");
        }
    }

    proptest! {
        #[test]
        fn what_is_parsed_is_parsed_again_and_cannot_break_a_line(text in "[xX:a \r\n\t-]{0,60}") {
            if let Ok(headers) = parse(&text) {
                prop_assert!(headers.iter().all(|(name, value)| !(name.clone() + value).contains(char::is_control)));
                let again = super::text(&headers).unwrap_or_default();
                prop_assert_eq!(parse(&again), Ok(headers));
            }
        }
    }
}
