//! Which addresses may be asked: where clouds and clusters keep what is theirs, no tenant sends requests of the
//! agent's.
//!
//! The author of a volume picks its endpoint among `allow.endpoints`. Where such an entry has a star, the name can be
//! anybody's, and its owner decides what address it has; asked a second time, another one. So the addresses themselves
//! are judged, in the resolver of the HTTP client: it connects to nothing but what the resolver returned. An endpoint
//! whose host an operator wrote down is meant, whatever its address.
//!
//! Behind a proxy it is the proxy that finds addresses, and nothing here learns them: what it lets through is its
//! operator's to say. What can be judged still is: an address in a URL, and a name that only private networks have.

use crate::StoreError;
use crate::network::Network;
use crate::proxy::{self, Proxy};
use crate::resolve::Names;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use url::{Host, Url};
use volume::EndpointPattern;

/// What operators say about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressConfig {
    /// Endpoints that are asked wherever they are; entries with a star for a host name none.
    pub named: Vec<EndpointPattern>,
    /// The cluster's own ranges: nothing but named endpoints is asked there.
    pub forbidden: Vec<Network>,
    /// Its own address is the operator's word, and not judged.
    pub proxy: Option<Proxy>,
}

/// Why an address is not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Unspecified,
    Loopback,
    LinkLocal,
    Metadata,
    Multicast,
    Reserved,
    Forbidden(Network),
    /// Of a name, where the proxy makes an address of it.
    PrivateName,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unspecified => f.write_str("this machine itself"),
            Self::Loopback => f.write_str("loopback: this machine itself"),
            Self::LinkLocal => {
                f.write_str("link-local, where clouds serve metadata and credentials of the node")
            }
            Self::Metadata => f.write_str("a cloud's metadata service"),
            Self::Multicast => f.write_str("multicast"),
            Self::Reserved => f.write_str("reserved"),
            Self::PrivateName => {
                f.write_str("a name that only private networks have, and this node's proxy would ask there")
            }
            Self::Forbidden(network) => write!(f, "in {network}, one of the cluster's own networks"),
        }
    }
}

/// No address of a host may be asked.
#[derive(Debug, thiserror::Error)]
#[error(
    "{host}{} is not asked ({rule}): if this store is meant, have the platform team add its endpoint to allow.endpoints, with the host written out",
    .address.map(|address| format!(" has address {address}, which")).unwrap_or_default()
)]
pub(crate) struct Refused {
    host: String,
    /// None: its name is reason enough.
    address: Option<IpAddr>,
    rule: Rule,
}

impl Refused {
    /// The message that every caller gets.
    pub(crate) fn of(&self, what: &str) -> StoreError {
        StoreError::Invalid { what: what.to_owned(), why: self.to_string() }
    }

    /// In whatever an HTTP client wrapped around it.
    pub(crate) fn find<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(refused) = error.downcast_ref::<Self>() {
                return Some(refused);
            }
            next = error.source();
        }
        None
    }
}

/// May this endpoint be asked anywhere, or is each of its addresses to be judged?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permission {
    Anywhere,
    Judged,
    /// The proxy asks, and finds the address.
    Proxied,
}

impl EgressConfig {
    pub(crate) fn permission(&self, endpoint: &Url) -> Permission {
        match (self.proxy_of(endpoint), self.is_named(endpoint)) {
            (Some(_), _) => Permission::Proxied,
            (None, true) => Permission::Anywhere,
            (None, false) => Permission::Judged,
        }
    }

    fn is_named(&self, endpoint: &Url) -> bool {
        self.named.iter().any(|entry| entry.is_named() && entry.covers(endpoint))
    }

    /// Through which this endpoint is asked.
    pub(crate) fn proxy_of(&self, endpoint: &Url) -> Option<&Proxy> {
        self.proxy.as_ref().filter(|proxy| proxy.takes(endpoint))
    }

    /// What [`crate::open`] would say of this endpoint's address.
    pub fn allows(&self, endpoint: &Url) -> Result<(), StoreError> {
        self.check(endpoint).map(drop).map_err(|refused| refused.of(endpoint.as_str()))
    }

    /// An address in a URL is not resolved, so it is judged before anything is sent.
    pub(crate) fn check(&self, endpoint: &Url) -> Result<Permission, Refused> {
        let permission = self.permission(endpoint);
        let address = match endpoint.host() {
            Some(Host::Ipv4(address)) => IpAddr::V4(address),
            Some(Host::Ipv6(address)) => IpAddr::V6(address),
            Some(Host::Domain(name)) => {
                let is_meant = permission != Permission::Proxied || self.is_named(endpoint);
                return match is_meant || !proxy::is_private(name) {
                    true => Ok(permission),
                    false => Err(Refused { host: name.to_owned(), address: None, rule: Rule::PrivateName }),
                };
            }
            None => return Ok(permission),
        };
        match self.judge(address).filter(|_| !self.is_named(endpoint)) {
            None => Ok(permission),
            Some(rule) => Err(Refused { host: address.to_string(), address: Some(address), rule }),
        }
    }

    fn judge(&self, address: IpAddr) -> Option<Rule> {
        let of_v6 = match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(address) => v6(address),
        };
        let embedded = std::iter::once(address).chain(embedded(address).into_iter().map(IpAddr::V4));
        of_v6.or_else(|| {
            embedded.into_iter().find_map(|address| {
                let by_kind = match address {
                    IpAddr::V4(address) => v4(address),
                    IpAddr::V6(_) => None,
                };
                let listed = || self.forbidden.iter().find(|network| network.contains(address));
                by_kind.or_else(|| listed().map(|network| Rule::Forbidden(*network)))
            })
        })
    }

    /// Where nothing is asked, as far as that is a matter of networks, for those who cannot ask for a name: where clouds
    /// and protocols are, and what an operator may mean nevertheless (this machine, the cluster's own, and IPv6
    /// addresses that stand for one of IPv4).
    pub(crate) fn networks(&self) -> (Vec<Network>, Vec<Network>) {
        let always = [
            "0.0.0.0/8",
            "169.254.0.0/16",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
            "224.0.0.0/4",
            "240.0.0.0/4",
            "::/128",
            "fe80::/9",
            "fd00:ec2::/32",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "ff00::/8",
        ];
        let own = [
            "127.0.0.0/8",
            "::/96",
            "::ffff:0:0:0/96",
            "64:ff9b::/96",
            "64:ff9b:1::/48",
            "2001::/32",
            "2002::/16",
        ];
        let read = |text: &&str| text.parse().expect("a network");
        let own = own.iter().map(read).chain(self.forbidden.iter().copied());
        (always.iter().map(read).collect(), own.collect())
    }

    fn permitted(&self, host: &str, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Refused> {
        let mut refused = None;
        let mut permitted = Vec::with_capacity(found.len());
        for address in found {
            match self.judge(address.ip()) {
                None => permitted.push(address),
                Some(rule) => {
                    refused = Some(Refused { host: host.to_owned(), address: Some(address.ip()), rule });
                }
            }
        }
        match refused.filter(|_| permitted.is_empty()) {
            None => Ok(permitted),
            Some(refused) => Err(refused),
        }
    }
}

fn v4(address: Ipv4Addr) -> Option<Rule> {
    Some(match address.octets() {
        [0, ..] => Rule::Unspecified,
        [127, ..] => Rule::Loopback,
        [169, 254, ..] => Rule::LinkLocal,
        // Alibaba; Oracle; Azure's wire server.
        [100, 100, 100, 200] | [192, 0, 0, 192] | [168, 63, 129, 16] => Rule::Metadata,
        [224..=239, ..] => Rule::Multicast,
        [240..=255, ..] => Rule::Reserved,
        _ => return None,
    })
}

fn v6(address: Ipv6Addr) -> Option<Rule> {
    Some(match address.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0] => Rule::Unspecified,
        [0, 0, 0, 0, 0, 0, 0, 1] => Rule::Loopback,
        // Link-local, and site-local as it was once called.
        [0xfe80..=0xfeff, ..] => Rule::LinkLocal,
        // Amazon (metadata, credentials of pods, DNS); Google; Oracle; Scaleway.
        [0xfd00, 0x0ec2, ..]
        | [0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x0254]
        | [0xfd00, 0x00c1, 0, 0, 0, 0, 0xa9fe, 0xa9fe]
        | [0xfd00, 0x0042, 0, 0, 0, 0, 0, 0x0042] => Rule::Metadata,
        [0xff00..=0xffff, ..] => Rule::Multicast,
        _ => return None,
    })
}

/// IPv4 addresses that an IPv6 address stands for, in whatever way a gateway on the path could take it.
fn embedded(address: IpAddr) -> Vec<Ipv4Addr> {
    let IpAddr::V6(address) = address else { return Vec::new() };
    let v4 = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    match address.segments() {
        // Mapped, compatible, translated (SIIT).
        [0, 0, 0, 0, 0, 0xffff, a, b] | [0, 0, 0, 0, 0, 0, a, b] | [0, 0, 0, 0, 0xffff, 0, a, b] => {
            vec![v4(a, b)]
        }
        // NAT64: the well-known prefix, and those for local use, which embed at the end or around bits 64 to 71.
        [0x0064, 0xff9b, 0, 0, 0, 0, a, b] => vec![v4(a, b)],
        [0x0064, 0xff9b, 1, c, d, e, a, b] => {
            let around =
                Ipv4Addr::from_bits(u32::from(c) << 16 | u32::from(d & 0xff) << 8 | u32::from(e >> 8));
            vec![v4(a, b), around]
        }
        // 6to4; Teredo, whose client address is inverted.
        [0x2002, a, b, ..] => vec![v4(a, b)],
        [0x2001, 0, c, d, _, _, a, b] => vec![v4(!a, !b), v4(c, d)],
        // ISATAP.
        [_, _, _, _, 0x0000 | 0x0200, 0x5efe, a, b] => vec![v4(a, b)],
        _ => Vec::new(),
    }
}

type Lookup =
    dyn Fn(String) -> futures::future::BoxFuture<'static, std::io::Result<Vec<SocketAddr>>> + Send + Sync;

/// Resolves names to what may be asked of them.
pub(crate) struct Judging {
    config: EgressConfig,
    lookup: Box<Lookup>,
}

impl Judging {
    /// What `names` finds.
    pub(crate) fn new(config: EgressConfig, names: Names) -> Arc<Self> {
        let lookup = move |host: String| -> futures::future::BoxFuture<'static, _> {
            let names = names.clone();
            Box::pin(async move { names.look_up(&host).await })
        };
        Arc::new(Self { config, lookup: Box::new(lookup) })
    }
}

impl Resolve for Judging {
    fn resolve(&self, name: Name) -> Resolving {
        let host = name.as_str().to_owned();
        let (config, found) = (self.config.clone(), (self.lookup)(host.clone()));
        Box::pin(async move {
            let permitted = config.permitted(&host, found.await?)?;
            Ok(Box::new(permitted.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Mutex;
    use std::time::Duration;

    fn config(named: &[&str], forbidden: &[&str]) -> EgressConfig {
        EgressConfig {
            named: named.iter().map(|text| EndpointPattern::parse(text).unwrap()).collect(),
            forbidden: forbidden.iter().map(|text| text.parse().unwrap()).collect(),
            proxy: None,
        }
    }

    fn refused(address: &str) -> bool {
        config(&[], &["10.96.0.0/12", "fd12::/16"]).judge(address.parse().unwrap()).is_some()
    }

    #[test]
    fn what_belongs_to_node_cloud_or_cluster_is_refused_in_every_spelling() {
        for address in [
            "127.0.0.1",
            "127.255.255.255",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "169.254.170.2",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "10.96.0.1",
            "10.111.255.255",
            "::",
            "::1",
            "fe80::1",
            "fe80::a9fe:a9fe",
            "febf::1",
            "fec0::1",
            "ff02::1",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "fd12::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "::ffff:0:127.0.0.1",
            "64:ff9b::169.254.169.254",
            "64:ff9b::10.96.0.1",
            "64:ff9b:1::169.254.169.254",
            "2002:a9fe:a9fe::1",
            "2002:7f00:1::",
            "2001:0:a9fe:a9fe::1",
            "2001::1:0:0:5601:5601",
            "2001:db8::5efe:169.254.169.254",
        ] {
            assert!(refused(address), "{address}");
        }
        for address in [
            "1.1.1.1",
            "52.216.0.1",
            "10.0.0.1",
            "10.112.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "100.100.100.201",
            "169.253.255.255",
            "169.255.0.0",
            "223.255.255.255",
            "2600:1f18::1",
            "fd34::1",
            "::ffff:1.1.1.1",
            "64:ff9b::1.1.1.1",
            "2002:101:101::1",
        ] {
            assert!(!refused(address), "{address}");
        }
    }

    #[test]
    fn an_address_in_the_url_is_judged_before_anything_is_sent() {
        let url = |text: &str| Url::parse(text).unwrap();
        let open = config(&["http://127.0.0.1:9000", "https://*.example.com"], &[]);
        assert_eq!(open.check(&url("http://127.0.0.1:9000")).unwrap(), Permission::Anywhere);
        assert_eq!(open.check(&url("https://1.1.1.1")).unwrap(), Permission::Judged);
        assert_eq!(
            open.check(&url("https://s3.example.com")).unwrap(),
            Permission::Judged,
            "a star names no host"
        );
        for other in [
            "http://127.0.0.1:9001",
            "http://127.1",
            "http://0x7f000001",
            "http://2130706433",
            "http://017700000001",
            "http://[::1]",
            "http://[::ffff:7f00:1]",
            "https://169.254.169.254",
            "http://0",
        ] {
            let text = open.check(&url(other)).unwrap_err().to_string();
            assert!(text.contains("allow.endpoints") && text.contains("is not asked ("), "{other}: {text}");
        }
    }

    #[test]
    fn behind_a_proxy_what_can_be_judged_is_judged() {
        let url = |text: &str| Url::parse(text).unwrap();
        let proxy = Proxy {
            url: "http://127.0.0.1:3128".to_owned().try_into().unwrap(),
            except: vec!["minio.example".to_owned().try_into().unwrap()],
        };
        let named = ["https://10.96.0.9", "https://minio.storage.svc", "https://*.internal"];
        let config = EgressConfig { proxy: Some(proxy), ..config(&named, &["10.96.0.0/12"]) };
        for (endpoint, permission) in [
            ("https://s3.amazonaws.com", Permission::Proxied),
            ("https://1.1.1.1", Permission::Proxied),
            ("https://10.96.0.9", Permission::Proxied),
            ("https://minio.storage.svc", Permission::Proxied),
            ("https://minio.example", Permission::Judged),
            ("https://localhost.minio.example", Permission::Judged),
        ] {
            assert_eq!(config.check(&url(endpoint)).unwrap(), permission, "{endpoint}");
        }
        for endpoint in [
            "https://169.254.169.254",
            "https://[::1]",
            "https://0x7f000001",
            "https://10.96.0.1",
            "https://localhost:9000",
            "https://metadata.google.internal",
            "https://kubernetes",
        ] {
            let text = config.check(&url(endpoint)).unwrap_err().to_string();
            assert!(
                text.contains("is not asked (") && text.contains("allow.endpoints"),
                "{endpoint}: {text}"
            );
        }
    }

    proptest! {
        /// However an IPv4 address is wrapped, it is as good as itself.
        #[test]
        fn an_embedded_address_is_no_better_than_itself(bits: u32, garbage: u16) {
            let config = config(&[], &["10.96.0.0/12", "172.20.0.0/16"]);
            let plain = Ipv4Addr::from_bits(bits);
            let [a, b] = [(bits >> 16) as u16, bits as u16];
            for wrapped in [
                [0, 0, 0, 0, 0, 0xffff, a, b],
                [0x64, 0xff9b, 0, 0, 0, 0, a, b],
                [0x2002, a, b, garbage, garbage, garbage, garbage, garbage],
                [0x2001, 0, 0x0808, 0x0808, garbage, garbage, !a, !b],
            ] {
                let wrapped = config.judge(Ipv6Addr::from(wrapped).into());
                prop_assert!(config.judge(plain.into()).is_none() || wrapped.is_some(), "{plain}");
            }
        }
    }

    /// A client as `Limits` makes it, but for the names.
    fn client(config: EgressConfig, answers: &[&[&str]]) -> (reqwest::Client, Arc<Mutex<Vec<String>>>) {
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let answers: Vec<Vec<SocketAddr>> = answers
            .iter()
            .map(|one| one.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 0)).collect())
            .collect();
        let noting = asked.clone();
        let lookup = move |host: String| -> futures::future::BoxFuture<'static, _> {
            let mut asked = noting.lock().unwrap();
            let answer = answers[asked.len().min(answers.len() - 1)].clone();
            asked.push(host);
            Box::pin(async move { Ok(answer) })
        };
        let resolver = Arc::new(Judging { config, lookup: Box::new(lookup) });
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = reqwest::Client::builder().no_proxy().tls_certs_only([]).dns_resolver(resolver);
        (builder.timeout(Duration::from_secs(20)).build().unwrap(), asked)
    }

    #[tokio::test]
    async fn a_name_that_leads_to_the_node_is_not_connected_to_however_often_it_changes() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://rebind.example:{}/", server.local_addr().unwrap().port());
        // Public when the volume was made, the node itself by now; then both, in one answer.
        let (client, asked) = client(EgressConfig::default(), &[&["127.0.0.1"], &["::ffff:127.0.0.1"]]);
        for _ in 0..3 {
            let error = client.get(&url).send().await.unwrap_err();
            let refused = Refused::find(&error).expect("the reason is found again").to_string();
            assert!(refused.contains("rebind.example") && refused.contains("127.0.0.1"), "{refused}");
            assert!(refused.contains("loopback") && refused.contains("allow.endpoints"), "{refused}");
        }
        assert_eq!(asked.lock().unwrap().len(), 3, "asked at each connect");
        let connection = tokio::time::timeout(Duration::from_millis(200), server.accept()).await;
        assert!(connection.is_err(), "the client connected");
    }

    #[test]
    fn of_several_addresses_those_that_may_be_asked_remain() {
        let config = config(&[], &["10.96.0.0/12"]);
        let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), 0);
        let mixed = vec![at("127.0.0.1"), at("52.216.0.1"), at("10.96.0.1"), at("2600:1f18::1")];
        assert_eq!(config.permitted("h", mixed).unwrap(), [at("52.216.0.1"), at("2600:1f18::1")]);
        let error = config.permitted("h", vec![at("10.96.0.1")]).unwrap_err().to_string();
        assert!(error.contains("10.96.0.0/12"), "{error}");
        assert!(config.permitted("h", Vec::new()).unwrap().is_empty(), "no such name is no refusal");
    }
}
