//! The HTTP proxy that an operator names for requests to stores, and the hosts that are asked without it. Nothing else
//! reroutes them: no environment variable is looked at.

use crate::network::Network;
use serde::Deserialize;
use std::fmt;
use std::net::IpAddr;
use url::{Host, Url};

/// `http://proxy.example:3128`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ProxyUrl(Url);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("write the proxy as http://host:port, without user, password, path or query")]
pub struct BadProxy;

impl TryFrom<String> for ProxyUrl {
    type Error = BadProxy;
    fn try_from(text: String) -> Result<Self, BadProxy> {
        let url = Url::parse(&text).map_err(|_| BadProxy)?;
        let is_plain = url.scheme() == "http"
            && url.host().is_some()
            && url.username().is_empty()
            && url.password().is_none()
            && url.path() == "/"
            && url.query().is_none()
            && url.fragment().is_none();
        if is_plain { Ok(Self(url)) } else { Err(BadProxy) }
    }
}

impl fmt::Display for ProxyUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str().trim_end_matches('/'))
    }
}

/// What is asked without the proxy: a host and all below it, or a network of addresses.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Direct {
    Below(String),
    Network(Network),
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{0:?} is neither a host such as example.com, which stands for all below it, too, nor a network such as 10.0.0.0/8"
)]
pub struct BadDirect(String);

impl TryFrom<String> for Direct {
    type Error = BadDirect;
    fn try_from(text: String) -> Result<Self, BadDirect> {
        if let Ok(network) = text.parse() {
            return Ok(Self::Network(network));
        }
        // As others write it, with a dot before the name.
        match Host::parse(text.strip_prefix('.').unwrap_or(&text)) {
            Ok(Host::Domain(name)) if !text.contains('*') => Ok(Self::Below(name)),
            _ => Err(BadDirect(text)),
        }
    }
}

impl Direct {
    fn covers(&self, host: &Host<&str>) -> bool {
        match (self, host) {
            (Self::Below(name), Host::Domain(host)) => {
                let host = host.trim_end_matches('.');
                host.strip_suffix(name.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            }
            (Self::Network(network), Host::Ipv4(address)) => network.contains(IpAddr::V4(*address)),
            (Self::Network(network), Host::Ipv6(address)) => network.contains(IpAddr::V6(*address)),
            _ => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    pub url: ProxyUrl,
    pub except: Vec<Direct>,
}

impl Proxy {
    pub(crate) fn takes(&self, endpoint: &Url) -> bool {
        endpoint.host().is_some_and(|host| !self.except.iter().any(|direct| direct.covers(&host)))
    }

    /// All requests of a client that asks nothing without it.
    pub(crate) fn for_client(&self) -> reqwest::Result<reqwest::Proxy> {
        reqwest::Proxy::all(self.url.0.clone())
    }
}

/// Names of which a proxy's resolver may make anything: those of no domain, those that the Internet does not have
/// (RFC 6761, RFC 6762, and ICANN's `internal`), and those by which clouds and clusters know their own.
pub(crate) fn is_private(name: &str) -> bool {
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    match name.rsplit_once('.') {
        None => true,
        Some((_, last)) => {
            matches!(last, "localhost" | "local" | "internal" | "arpa" | "svc") || name == "metadata.goog"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_a_host_and_a_port_and_its_mistakes_are_not_repeated() {
        for text in
            ["http://proxy:3128", "http://10.0.0.1:80", "http://[fd00::1]:3128/", "http://proxy.example"]
        {
            let url = ProxyUrl::try_from(text.to_owned()).unwrap();
            assert_eq!(url.to_string(), text.trim_end_matches('/').trim_end_matches(":80"));
        }
        for text in [
            "proxy:3128",
            "https://proxy",
            "socks5://proxy",
            "http://user:hunter2@proxy",
            "http://proxy/x",
            "",
        ] {
            let error = ProxyUrl::try_from(text.to_owned()).unwrap_err().to_string();
            assert!(error.contains("http://host:port") && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn what_is_asked_without_it_is_a_domain_or_a_network() {
        let except = ["example.com", ".Internal.Example", "10.0.0.0/8", "fd00::/8", "192.168.0.1"];
        let except = except.map(|text| Direct::try_from(text.to_owned()).unwrap()).to_vec();
        let proxy = Proxy { url: ProxyUrl::try_from("http://proxy:3128".to_owned()).unwrap(), except };
        for (endpoint, takes) in [
            ("https://example.com", false),
            ("https://s3.EXAMPLE.com:9000", false),
            ("https://s3.example.com.", false),
            ("https://notexample.com", true),
            ("https://example.com.evil.net", true),
            ("https://a.internal.example", false),
            ("https://10.1.2.3", false),
            ("https://11.1.2.3", true),
            ("https://[fd00::7]", false),
            ("https://192.168.0.1", false),
            ("https://192.168.0.2", true),
        ] {
            assert_eq!(proxy.takes(&Url::parse(endpoint).unwrap()), takes, "{endpoint}");
        }
        for text in ["", "*", "*.example.com", "a b", "https://example.com", "10.0.0.0/33"] {
            assert!(Direct::try_from(text.to_owned()).is_err(), "{text}");
        }
    }

    #[test]
    fn names_that_a_proxy_may_know_as_its_own_are_private() {
        for name in [
            "localhost",
            "proxy",
            "a.localhost",
            "metadata.google.internal.",
            "METADATA.goog",
            "x.svc",
            "k.svc.cluster.local",
        ] {
            assert!(is_private(name), "{name}");
        }
        for name in
            ["s3.amazonaws.com", "internal.example", "localhost.example.com", "storage.googleapis.com"]
        {
            assert!(!is_private(name), "{name}");
        }
    }
}
