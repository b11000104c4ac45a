//! `allow.endpoints`: patterns of the addresses that a volume may have a node ask.
//!
//! `SCHEME://HOST[:PORT]`. HOST is a name or an address; `*.example.com`, every name below that domain; or `*`, all.
//! PORT is a number, `*`, or left out: the scheme's own, and for the host `*` all. Nothing else matches anything else:
//! a star is never a part of a name, and what is compared is what a request would be sent to (the name in lower case,
//! IDNA and percent-encoding resolved, without the dot at its end), not text.

use serde::{Deserialize, Serialize};
use url::{Host, Url};

/// One entry of `allow.endpoints`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EndpointPattern {
    text: String,
    scheme: String,
    host: HostPattern,
    /// None: any.
    port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum HostPattern {
    Any,
    /// `.example.com`
    Below(String),
    /// As [`host`] writes it.
    Named(String),
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "endpoint {0:?} in allow.endpoints: write https://host[:port], https://*.domain for all names below a domain, or https://* for all hosts; a port may be '*', and there is no other '*'"
)]
pub struct BadPattern(String);

/// The host of a request, in one spelling.
fn host(url: &Url) -> Option<String> {
    match url.host()? {
        Host::Domain(name) => {
            let name = name.strip_suffix('.').unwrap_or(name);
            name.split('.').all(|label| !label.is_empty()).then(|| name.to_ascii_lowercase())
        }
        address => Some(address.to_string()),
    }
}

impl EndpointPattern {
    pub fn parse(text: &str) -> Result<Self, BadPattern> {
        Self::of(text).ok_or_else(|| BadPattern(text.to_owned()))
    }

    fn of(text: &str) -> Option<Self> {
        let (scheme, rest) = text.split_once("://").filter(|(s, _)| matches!(*s, "http" | "https"))?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (rest, any_port) = match rest.strip_suffix(":*") {
            Some(rest) => (rest, true),
            None => (rest, false),
        };
        let (any_host, below) = (rest == "*" || rest.starts_with("*:"), rest.starts_with("*."));
        // What stands for the star is parsed with the rest and then taken off again.
        let concrete = match (any_host, below) {
            (true, _) => rest.replacen('*', "any", 1),
            (false, true) => rest[2..].to_owned(),
            (false, false) => rest.to_owned(),
        };
        if concrete.is_empty() || concrete.contains(['*', '@', '/', '\\', '?', '#', '%']) {
            return None;
        }
        if concrete.contains(char::is_whitespace) || concrete.contains(char::is_control) {
            return None;
        }
        let url = Url::parse(&format!("{scheme}://{concrete}")).ok()?;
        // "host:" has no port, and a second port is none.
        if concrete.ends_with(':') || (any_port && url.port().is_some()) {
            return None;
        }
        let port = match any_port || (any_host && !rest.contains(':')) {
            true => None,
            false => Some(url.port_or_known_default()?),
        };
        let host = match (any_host, below) {
            (true, _) => HostPattern::Any,
            (false, true) if !matches!(url.host(), Some(Host::Domain(_))) => return None,
            (false, true) => HostPattern::Below(format!(".{}", host(&url)?)),
            (false, false) => HostPattern::Named(host(&url)?),
        };
        Some(Self { text: text.to_owned(), scheme: scheme.to_owned(), host, port })
    }

    pub fn covers(&self, endpoint: &Url) -> bool {
        let Some(found) = host(endpoint) else { return false };
        let is_name = matches!(endpoint.host(), Some(Host::Domain(_)));
        let same_host = match &self.host {
            HostPattern::Any => true,
            HostPattern::Below(domain) => {
                is_name && found.len() > domain.len() && found.ends_with(domain.as_str())
            }
            HostPattern::Named(name) => *name == found,
        };
        same_host
            && endpoint.scheme() == self.scheme
            && self.port.is_none_or(|port| endpoint.port_or_known_default() == Some(port))
    }

    /// This very host was written down, not a star that stands for it.
    pub fn is_named(&self) -> bool {
        matches!(self.host, HostPattern::Named(_))
    }
}

impl TryFrom<String> for EndpointPattern {
    type Error = BadPattern;
    fn try_from(text: String) -> Result<Self, BadPattern> {
        Self::parse(&text)
    }
}

impl From<EndpointPattern> for String {
    fn from(pattern: EndpointPattern) -> Self {
        pattern.text
    }
}

impl std::fmt::Display for EndpointPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn covers(pattern: &str, endpoint: &str) -> bool {
        EndpointPattern::parse(pattern).unwrap().covers(&Url::parse(endpoint).unwrap())
    }

    #[test]
    fn a_star_stands_for_whole_labels_below_the_domain() {
        let pattern = "https://*.example.com";
        for yes in [
            "https://s3.example.com",
            "https://a.b.example.com/",
            "https://S3.EXAMPLE.com",
            "https://s3.example.com:443",
            "https://s3.example.com.",
            "https://s3.ex%61mple.com",
            "https://bücher.example.com",
        ] {
            assert!(covers(pattern, yes), "{yes}");
        }
        for no in [
            "https://example.com",
            "https://example.com.",
            "https://.example.com",
            "https://a..example.com",
            "https://badexample.com",
            "https://s3.example.com.evil.org",
            "https://s3.example.com@evil.org",
            "https://evil.org/.example.com",
            "https://evil.org?.example.com",
            "https://evil.org#.example.com",
            "https://evil.org\\.example.com",
            "https://s3.example.com:8443",
            "http://s3.example.com",
            "http://s3.example.com:443",
            "https://s3.exаmple.com", // Cyrillic
            "https://127.0.0.1",
            "https://[::1]",
        ] {
            assert!(!Url::parse(no).is_ok_and(|_| covers(pattern, no)), "{no}");
        }
        assert!(covers("https://*.bücher.example", "https://s3.xn--bcher-kva.example"));
    }

    #[test]
    fn ports_and_hosts_are_what_is_written() {
        for (pattern, yes, no) in [
            (
                "https://h",
                &["https://h", "https://h:443", "https://H./"][..],
                &["https://h:1", "http://h"][..],
            ),
            ("https://h:9000/", &["https://h:9000"], &["https://h", "https://h:90001"]),
            ("https://h:*", &["https://h", "https://h:9000"], &["https://hh", "http://h"]),
            ("https://*.d.e:9000", &["https://a.d.e:9000"], &["https://a.d.e", "https://d.e:9000"]),
            ("https://*.d.e:*", &["https://a.d.e:1"], &["https://d.e:1"]),
            ("https://*", &["https://h", "https://h:1", "https://10.0.0.1:9"], &["http://h"]),
            ("https://*:9000", &["https://h:9000"], &["https://h"]),
            ("http://127.0.0.1:*", &["http://127.0.0.1:9", "http://0x7f.1"], &["http://127.0.0.1.evil.org"]),
            ("http://[::1]:9000", &["http://[0:0::1]:9000"], &["http://[::1]", "http://[::2]:9000"]),
        ] {
            for endpoint in yes {
                assert!(covers(pattern, endpoint), "{pattern} covers {endpoint}");
            }
            for endpoint in no {
                let parses = Url::parse(endpoint).is_ok();
                assert!(!parses || !covers(pattern, endpoint), "{pattern} does not cover {endpoint}");
            }
        }
    }

    #[test]
    fn what_could_mean_two_things_is_refused() {
        for text in [
            "",
            "*",
            "example.com",
            "ftp://h",
            "HTTPS://h",
            "https://",
            "https:///",
            "https://minio*",
            "https://*minio",
            "https://a.*.example.com",
            "https://*.*.example.com",
            "https://**",
            "https://*.",
            "https://*..com",
            "https://*.127.0.0.1",
            "https://*.[::1]",
            "https://user@h",
            "https://h/path",
            "https://h?x",
            "https://h#x",
            "https://%2a.example.com",
            "https://h:",
            "https://h:x",
            "https://h:99999",
            "https://h:9000:*",
            "https://h:*:*",
            "https://h :1",
            "https://h\\x",
        ] {
            let error = EndpointPattern::parse(text).unwrap_err().to_string();
            assert!(error.contains("write https://host[:port]"), "{text}");
        }
        let text = "https://*.example.com:9000";
        let again: EndpointPattern = serde_json::from_str(&format!("{text:?}")).unwrap();
        assert_eq!(serde_json::to_string(&again).unwrap(), format!("{text:?}"));
    }

    #[test]
    fn only_a_host_that_is_written_out_is_named() {
        for (text, named) in [
            ("https://h", true),
            ("https://h:*", true),
            ("http://127.0.0.1:9", true),
            ("https://*", false),
            ("https://*.h", false),
        ] {
            assert_eq!(EndpointPattern::parse(text).unwrap().is_named(), named, "{text}");
        }
    }

    proptest! {
        /// Whatever is glued around a domain: what a pattern covers is asked below that domain, by that scheme, at that
        /// port.
        #[test]
        fn nothing_outside_the_domain_is_ever_covered(
            scheme in "https?",
            before in "[a-z0-9.@:/\\\\?#%*\\[\\]а-я-]{0,12}",
            between in "[.@:/?#%]{0,2}",
            after in "([.@:/\\\\?#%-][a-z0-9.@:-]{0,8})?",
        ) {
            let text = format!("{scheme}://{before}{between}example.com{after}");
            let pattern = EndpointPattern::parse("https://*.example.com").unwrap();
            if let Ok(url) = Url::parse(&text) && pattern.covers(&url) {
                let host = url.host_str().unwrap().trim_end_matches('.').to_owned();
                prop_assert!(host.ends_with(".example.com") && !host.starts_with('.'), "{text}");
                prop_assert_eq!(url.scheme(), "https");
                prop_assert_eq!(url.port_or_known_default(), Some(443));
            }
        }

        /// An entry covers what it names, and parsing it never panics.
        #[test]
        fn any_text_is_an_entry_or_an_error(text in "(https?://)?[a-z0-9.*@:/%\\[\\]-]{0,20}") {
            if let Ok(pattern) = EndpointPattern::parse(&text)
                && pattern.is_named()
            {
                let text = text.strip_suffix('/').unwrap_or(&text);
                let endpoint = text.strip_suffix(":*").unwrap_or(text);
                prop_assert!(pattern.covers(&Url::parse(endpoint).unwrap()), "{text}");
            }
        }
    }
}
