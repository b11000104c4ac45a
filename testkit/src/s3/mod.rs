//! A real S3 server over HTTP on loopback, with signature checking, scripted faults and counters.
//!
//! `s3s` speaks the protocol and checks signatures; the buckets and the faults are ours. Besides S3 it answers, on
//! paths that no bucket can have:
//!
//! ```text
//! GET  /_stats      counters as JSON          POST /_faults    replaces the fault script (JSON)
//! POST /_reset      counters back to 0        POST /_release   lets stalled requests go on
//! POST /_rescan     directories are walked again, before the answer
//! ```

mod adapter;
mod azure;
mod body;
mod bucket;
mod checksums;
mod directory;
mod encryption;
mod gateway;
mod gcs;
mod memory;
mod oss;
mod serve;
mod service;
mod stats;
mod synthetic;
#[cfg(test)]
mod tests;
mod web;

pub use azure::{ACCOUNT_KEY, Azure, sas_token};
pub use bucket::{Body, Bucket, Listing, Meta, Next, Visitor, list};
pub use directory::Directory;
pub use gateway::Gateway;
pub use gcs::{OTHER_SERVICE_ACCOUNT_KEY, SERVICE_ACCOUNT_KEY, generation, key_file};
pub use memory::Memory;
pub use oss::Oss;
pub use stats::Stats;
pub use synthetic::Synthetic;
pub use web::{Index, Web, time_and_length};

use crate::faults::{Faults, Script};
use bytes::Bytes;
use futures::future::BoxFuture;
use service::{Access, Buckets, Service};
use stats::Counters;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, RwLock};
use std::time::Duration;
use tokio::task::JoinHandle;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    All,
    /// May list but not read.
    ListOnly,
    /// May read but not list.
    ReadOnly,
    /// Is known, and may do nothing.
    None,
}

/// An access key of the server.
#[derive(Clone, Debug)]
pub struct Key {
    pub id: String,
    pub secret: String,
    /// Requests must carry this session token; another one has expired.
    pub token: Option<String>,
    pub rights: Rights,
}

impl Key {
    pub fn new(id: &str, secret: &str, rights: Rights) -> Self {
        Self { id: id.into(), secret: secret.into(), token: None, rights }
    }

    pub fn with_token(self, token: &str) -> Self {
        Self { token: Some(token.into()), ..self }
    }
}

/// What a server speaks.
#[derive(Clone, Debug, Default)]
pub enum Protocol {
    #[default]
    S3,
    Oss(Oss),
    Gcs,
    Azure(Azure),
    Web(Web),
}

/// Builds a [`Server`].
pub struct Config {
    pub listen: SocketAddr,
    pub anonymous: bool,
    pub keys: Vec<Key>,
    pub protocol: Protocol,
    /// Who asks must say that he pays.
    pub requester_pays: bool,
    /// Small objects come with a checksum.
    pub checksums: bool,
    /// Most entries of a page, whatever is asked for.
    pub page_max: usize,
    /// The server's clock is so far ahead of this machine's.
    pub clock_ahead: Duration,
    /// What all objects are encrypted with, and the server does not keep: 32 bytes, base64.
    pub customer_key: Option<String>,
    /// A gateway before it wants to see this header, with this value.
    pub gate: Option<(&'static str, &'static str)>,
    pub faults: Script,
    pub buckets: BTreeMap<String, Arc<dyn Bucket>>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: ([127, 0, 0, 1], 0).into(),
            anonymous: false,
            keys: vec![Key::new(ACCESS_KEY, SECRET_KEY, Rights::All)],
            protocol: Protocol::S3,
            requester_pays: false,
            checksums: false,
            page_max: usize::MAX,
            clock_ahead: Duration::ZERO,
            customer_key: None,
            gate: None,
            faults: Script::default(),
            buckets: BTreeMap::new(),
        }
    }
}

impl Config {
    pub fn bucket(mut self, name: &str, bucket: impl Bucket) -> Self {
        self.buckets.insert(name.to_owned(), Arc::new(bucket));
        self
    }
}

/// The key that a default server accepts.
pub const ACCESS_KEY: &str = "testkit-access-key";
pub const SECRET_KEY: &str = "testkit-secret-key";

/// A running server; stops on drop.
pub struct Server {
    address: SocketAddr,
    buckets: Buckets,
    faults: Faults,
    counters: Arc<Counters>,
    acceptor: JoinHandle<()>,
}

impl Server {
    /// Binds and serves on the current tokio runtime. Boxed, so that each test program does not compile it again.
    pub fn start(config: Config) -> BoxFuture<'static, io::Result<Self>> {
        Box::pin(Self::bind(config))
    }

    async fn bind(config: Config) -> io::Result<Self> {
        let listener = tokio::net::TcpListener::bind(config.listen).await?;
        let address = listener.local_addr()?;
        let buckets: Buckets = Arc::new(RwLock::new(config.buckets));
        let mut auth = s3s::auth::SimpleAuth::new();
        for key in &config.keys {
            auth.register(key.id.clone(), key.secret.clone().into());
        }
        let mut builder = s3s::service::S3ServiceBuilder::new(Service {
            buckets: buckets.clone(),
            page_max: config.page_max,
        });
        builder.set_auth(serve::Auth(auth));
        // Whom another protocol has let in brings no signature.
        let anonymous = config.anonymous || !matches!(config.protocol, Protocol::S3);
        builder.set_access(Access { anonymous, keys: config.keys.clone() });
        let guard = service::Guard {
            keys: config.keys,
            anonymous: config.anonymous,
            requester_pays: config.requester_pays,
            customer_key: config.customer_key,
            gate: config.gate,
            page_max: config.page_max,
            clock_ahead: config.clock_ahead,
        };
        let speaks = match config.protocol {
            Protocol::S3 => serve::Speaks::S3,
            Protocol::Oss(oss) => serve::Speaks::Oss(oss),
            Protocol::Gcs => serve::Speaks::Other(Arc::new(gcs::Gcs)),
            Protocol::Azure(azure) => serve::Speaks::Other(Arc::new(azure)),
            Protocol::Web(web) => serve::Speaks::Other(Arc::new(web)),
        };
        let faults = Faults::new(config.faults);
        let counters = Arc::new(Counters::default());
        let shared = serve::Shared {
            s3: builder.build(),
            speaks,
            guard: Arc::new(guard),
            buckets: buckets.clone(),
            checksums: config.checksums,
            faults: faults.clone(),
            counters: counters.clone(),
        };
        let acceptor = tokio::spawn(serve::accept(listener, shared));
        Ok(Self { address, buckets, faults, counters, acceptor })
    }

    /// One empty memory bucket of this name, the default key.
    pub async fn memory(bucket: &str) -> io::Result<Self> {
        Self::start(Config::default().bucket(bucket, Memory::default())).await
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
    /// `http://127.0.0.1:port`
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }
    pub fn faults(&self) -> &Faults {
        &self.faults
    }
    pub fn stats(&self) -> Stats {
        self.counters.lock().clone()
    }
    pub fn reset_stats(&self) {
        self.counters.reset();
    }

    /// Puts an object without a request.
    pub fn put(&self, bucket: &str, key: &str, body: impl Into<Bytes>) -> io::Result<Meta> {
        self.bucket(bucket)?.put(key, body.into())
    }
    /// Puts an object that claims to be of this size; see [`Bucket::claim`].
    pub fn claim(&self, bucket: &str, key: &str, size: u64) -> io::Result<Meta> {
        self.bucket(bucket)?.claim(key, size)
    }
    pub fn delete(&self, bucket: &str, key: &str) -> io::Result<()> {
        self.bucket(bucket)?.delete(key)
    }

    fn bucket(&self, name: &str) -> io::Result<Arc<dyn Bucket>> {
        let buckets = self.buckets.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        buckets.get(name).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Serves until the task is cancelled or fails; for the binary.
    pub async fn run(mut self) {
        let _ = (&mut self.acceptor).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}
