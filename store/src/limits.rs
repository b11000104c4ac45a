//! What all sources of one agent share: request slots, bandwidth, and the HTTP client with its connections.

use crate::StoreError;
use crate::dispatch::Lane;
use crate::egress::{EgressConfig, Judging, Permission};
use crate::kept::Kept;
use crate::resolve::Names;
use crate::traffic::{Place, Traffic};
use serde::Deserialize;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::time::Instant;
use volume::{Credentials, ScopeId, ScopeKey, VolumeSpec};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitsConfig {
    /// Requests under way at once, over all volumes; at least 2. Those for which a store is silent do not count, and
    /// are at most as many again.
    pub requests: usize,
    /// Body bytes per second, over all volumes; None: no limit.
    pub bytes_per_second: Option<u64>,
    /// For TCP and TLS together.
    pub connect_timeout: Duration,
    /// How long a store may send nothing before the attempt is given up; doubles with each such attempt of one
    /// request, so that a store that is only slow gets its answer through.
    pub stall_timeout: Duration,
    pub tls_min: TlsVersion,
    /// Which addresses may be asked.
    pub egress: EgressConfig,
}

/// The oldest version of TLS that stores are asked in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum TlsVersion {
    #[default]
    #[serde(rename = "1.2")]
    Tls12,
    #[serde(rename = "1.3")]
    Tls13,
}

impl fmt::Display for TlsVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tls12 => "TLS 1.2",
            Self::Tls13 => "TLS 1.3",
        })
    }
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            requests: 128,
            bytes_per_second: None,
            connect_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(10),
            tls_min: TlsVersion::default(),
            egress: EgressConfig::default(),
        }
    }
}

impl LimitsConfig {
    /// Requests for bodies under way at once; the others are for names, which do not queue behind them.
    pub fn data_slots(&self) -> usize {
        let requests = self.requests.max(2);
        requests - (requests / 4).max(1)
    }

    /// Bodies being sent at once: on top of [`Self::requests`], for readers do without none of theirs.
    fn upload_slots(&self) -> usize {
        (self.requests / 8).max(2)
    }
}

#[derive(Debug)]
pub struct Limits {
    config: LimitsConfig,
    traffic: Arc<Traffic>,
    names: Names,
    /// Of this life of the process: names of readers are valid in this process alone.
    key: ScopeKey,
    bandwidth: Option<Mutex<Bucket>>,
    clients: Clients,
    kept: Kept,
}

/// Made when they are needed. Those for `http://` are apart because they must work on a machine without certificates;
/// those for endpoints that may be anywhere, because what they are connected to is not judged.
#[derive(Debug, Default)]
struct Clients {
    plain: OnceLock<reqwest::Client>,
    secure: OnceLock<reqwest::Client>,
    plain_anywhere: OnceLock<reqwest::Client>,
    secure_anywhere: OnceLock<reqwest::Client>,
    plain_proxied: OnceLock<reqwest::Client>,
    secure_proxied: OnceLock<reqwest::Client>,
}

impl Limits {
    pub fn new(config: LimitsConfig) -> Self {
        let data = config.data_slots();
        Self {
            traffic: Traffic::new(config.requests.max(2) - data, data, config.upload_slots()),
            names: Names::of_the_machine(),
            key: ScopeKey::new(rand::random()),
            bandwidth: config.bytes_per_second.map(|rate| Mutex::new(Bucket::new(rate))),
            clients: Clients::default(),
            kept: Kept::default(),
            config,
        }
    }

    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }

    pub fn config(&self) -> &LimitsConfig {
        &self.config
    }

    /// Requests that could start now without waiting: (metadata, data).
    pub fn free(&self) -> (usize, usize) {
        (self.traffic.free(Lane::Metadata), self.traffic.free(Lane::Data))
    }

    /// Readers that share what they bring in share what they may ask for, too.
    pub(crate) fn readers(&self, spec: &VolumeSpec, credentials: &Credentials) -> ScopeId {
        spec.scope(credentials, &self.key)
    }

    /// Where the requests of one source wait for their slots: see [`Traffic::place`].
    pub(crate) fn place(&self, endpoint: &str, source: &str, part: usize) -> Place {
        self.traffic.place(endpoint, source, part)
    }

    /// Accounts for bytes that have arrived and waits until they are affordable: TCP does the rest.
    pub(crate) async fn pay(&self, bytes: u64) {
        let Some(bucket) = &self.bandwidth else { return };
        let due = bucket.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take(bytes, Instant::now());
        if let Some(due) = due {
            tokio::time::sleep_until(due).await;
        }
    }

    /// One client for all sources of a scheme and a permission: it holds connections and TLS roots, no credentials. A source
    /// whose secret has certificates, an authority's or a client's, has a client of its own.
    pub(crate) fn client(
        &self,
        endpoint: &str,
        credentials: &Credentials,
    ) -> Result<reqwest::Client, StoreError> {
        let invalid = |why: String| StoreError::Invalid { what: endpoint.to_owned(), why };
        let not_a_certificate =
            || invalid("caBundle in the secret is no certificate in PEM: copy it again".to_owned());
        let url = reqwest::Url::parse(endpoint).map_err(|e| invalid(format!("it is no URL: {e}")))?;
        let permission = self.config.egress.check(&url).map_err(|refused| refused.of(endpoint))?;
        let plain = endpoint.starts_with("http://");
        let kept = match (plain, permission) {
            (true, Permission::Judged) => &self.clients.plain,
            (false, Permission::Judged) => &self.clients.secure,
            (true, Permission::Anywhere) => &self.clients.plain_anywhere,
            (false, Permission::Anywhere) => &self.clients.secure_anywhere,
            (true, Permission::Proxied) => &self.clients.plain_proxied,
            (false, Permission::Proxied) => &self.clients.secure_proxied,
        };
        let ca_bundle = credentials.ca_bundle().filter(|_| !plain);
        let client_certificate = credentials.client_certificate();
        if plain && client_certificate.is_some() {
            return Err(invalid(
                "nobody asks for a certificate over plain http: use an https endpoint, or take clientCertificate and clientKey \
                 out of the secret"
                    .into(),
            ));
        }
        let is_shared = ca_bundle.is_none() && client_certificate.is_none();
        if let Some(client) = kept.get().filter(|_| is_shared) {
            return Ok(client.clone());
        }
        // Of the process; it is there already if another client came first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = reqwest::Client::builder()
            // The environment of a DaemonSet is no place to reroute signed requests from, and a redirect could send
            // them to any host.
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            // We count attempts, back off and report; a second, silent layer of retries would not.
            .retry(reqwest::retry::never())
            .connect_timeout(self.config.connect_timeout)
            // Shorter than the idle limits of the stores that we know (AWS: 20 s and more).
            .pool_idle_timeout(Duration::from_secs(15))
            .pool_max_idle_per_host(self.config.requests)
            // One stream per connection: parts in parallel want bandwidth, and HTTP/2 would share one window.
            .http1_only()
            .tls_version_min(match self.config.tls_min {
                TlsVersion::Tls12 => reqwest::tls::Version::TLS_1_2,
                TlsVersion::Tls13 => reqwest::tls::Version::TLS_1_3,
            })
            .user_agent(concat!("millpond/", env!("CARGO_PKG_VERSION")));
        builder = match permission {
            Permission::Judged => {
                builder.dns_resolver(Judging::new(self.config.egress.clone(), self.names.clone()))
            }
            // Of a proxied one it is the proxy's own name.
            Permission::Anywhere | Permission::Proxied => builder.dns_resolver(Arc::new(self.names.clone())),
        };
        if let Some(proxy) = self.config.egress.proxy_of(&url) {
            let proxy = proxy.for_client();
            builder = builder.proxy(proxy.map_err(|_| invalid("store.proxy cannot be used".into()))?);
        }
        if plain {
            // It verifies nothing, so it needs no roots; without this, building fails where there are none.
            builder = builder.tls_certs_only([]);
        }
        if let Some(pem) = ca_bundle {
            let found = reqwest::Certificate::from_pem_bundle(pem.as_bytes());
            let found = found.ok().filter(|found| !found.is_empty());
            builder = builder.tls_certs_only(found.ok_or_else(not_a_certificate)?);
        }
        if let Some((chain, key)) = client_certificate {
            builder = builder.identity(crate::certificate::identity(chain, key).map_err(invalid)?);
        }
        let client = builder.build().map_err(|e| match ca_bundle {
            Some(_) => not_a_certificate(),
            None => invalid(format!(
                "no HTTPS without CA certificates: install the package ca-certificates on this machine or in the image, or \
                 point SSL_CERT_FILE at a bundle ({})",
                crate::retry::chain(&e)
            )),
        })?;
        if !is_shared {
            return Ok(client);
        }
        Ok(kept.get_or_init(|| client).clone())
    }
}

/// A token bucket of one second's worth that may go into debt: what has arrived cannot be sent back.
#[derive(Debug)]
struct Bucket {
    rate: u64,
    /// When the bucket is (or was) empty.
    empty_at: Instant,
}

impl Bucket {
    fn new(rate: u64) -> Self {
        Self { rate: rate.max(1), empty_at: Instant::now() }
    }

    /// When the caller may go on; None: at once.
    fn take(&mut self, bytes: u64, now: Instant) -> Option<Instant> {
        const BURST: Duration = Duration::from_millis(250);
        let oldest = now.checked_sub(BURST).unwrap_or(now);
        let cost = Duration::from_secs_f64(bytes as f64 / self.rate as f64);
        self.empty_at = self.empty_at.max(oldest) + cost;
        (self.empty_at > now).then_some(self.empty_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_delivers_its_rate_and_a_short_burst() {
        let start = Instant::now();
        let mut bucket = Bucket { rate: 1000, empty_at: start };
        let later = start + Duration::from_secs(60);
        // A quarter of a second was saved up, no more.
        assert_eq!(bucket.take(250, later), None);
        assert_eq!(bucket.take(1000, later), Some(later + Duration::from_secs(1)));
        assert_eq!(bucket.take(500, later), Some(later + Duration::from_millis(1500)));
    }
}
