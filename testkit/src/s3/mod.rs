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

mod access;
mod adapter;
mod answers;
mod azure;
mod beside;
mod body;
mod bucket;
mod checksums;
mod classify;
mod conditions;
mod control;
mod digests;
mod directory;
mod draft;
mod encryption;
mod execute;
mod gateway;
mod gcs;
mod incoming;
mod lies;
mod memory;
mod meta;
mod multipart;
mod oss;
mod pieces;
mod quota;
mod serve;
mod service;
mod shared;
mod state;
mod stats;
mod synthetic;
#[cfg(test)]
mod tests;
mod uploads;
mod web;
mod writes;

pub use azure::{ACCOUNT_KEY, Azure, sas_token};
pub use bucket::{Attempt, Body, Bucket, Listing, Next, Visitor, list};
pub use conditions::{Condition, Unmet};
pub use digests::{Algorithm, Checksum};
pub use directory::Directory;
pub use draft::{About, Draft};
pub use gateway::Gateway;
pub use gcs::{OTHER_SERVICE_ACCOUNT_KEY, SERVICE_ACCOUNT_KEY, generation, key_file};
pub use lies::Lies;
pub use memory::Memory;
pub use meta::Meta;
pub use oss::Oss;
pub use pieces::Pieces;
pub use stats::Stats;
pub use synthetic::Synthetic;
pub use web::{Index, Web, time_and_length};

use crate::faults::{Faults, Script};
use access::Access;
use bucket::Buckets;
use bytes::Bytes;
use futures::future::BoxFuture;
use quota::Quota;
use state::{Limits, Service};
use stats::Counters;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, RwLock};
use std::time::Duration;
use tokio::task::JoinHandle;
use uploads::Uploads;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    All,
    /// May all but delete objects.
    NoDelete,
    /// May read and list.
    NoWrite,
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
    /// Least bytes of each part of an upload but the last.
    pub part_min: u64,
    /// Most bytes that one copy copies.
    pub copy_max: u64,
    /// Most bytes that the server holds, in objects and in parts of uploads under way.
    pub bytes_max: Option<u64>,
    pub lies: Lies,
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
            part_min: 5 << 20,
            copy_max: 5 << 30,
            bytes_max: None,
            lies: Lies::default(),
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
    uploads: Arc<Uploads>,
    late: execute::Late,
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
        let (anonymous, keys) = (config.anonymous, config.keys.clone());
        let guard = Arc::new(access::Guard {
            keys: config.keys,
            anonymous,
            requester_pays: config.requester_pays,
            customer_key: config.customer_key,
            gate: config.gate,
            page_max: config.page_max,
            clock_ahead: config.clock_ahead,
        });
        let uploads = Arc::new(Uploads::default());
        let mut builder = s3s::service::S3ServiceBuilder::new(Service {
            buckets: buckets.clone(),
            guard: guard.clone(),
            uploads: uploads.clone(),
            quota: Quota::new(config.bytes_max),
            limits: Limits { part_min: config.part_min, copy_max: config.copy_max },
            lies: config.lies,
        });
        builder.set_auth(serve::Auth(auth));
        // Whom another protocol has let in brings no signature.
        let anonymous = anonymous || !matches!(config.protocol, Protocol::S3);
        builder.set_access(Access { anonymous, keys });
        let speaks = match config.protocol {
            Protocol::S3 => shared::Speaks::S3,
            Protocol::Oss(oss) => shared::Speaks::Oss(oss),
            Protocol::Gcs => shared::Speaks::Other(Arc::new(gcs::Gcs)),
            Protocol::Azure(azure) => shared::Speaks::Other(Arc::new(azure)),
            Protocol::Web(web) => shared::Speaks::Other(Arc::new(web)),
        };
        let faults = Faults::new(config.faults);
        let counters = Arc::new(Counters::default());
        let late = execute::Late::default();
        let shared = shared::Shared {
            s3: builder.build(),
            speaks,
            guard,
            buckets: buckets.clone(),
            uploads: uploads.clone(),
            checksums: config.checksums && !config.lies.no_checksums,
            faults: faults.clone(),
            counters: counters.clone(),
            late: late.clone(),
        };
        let acceptor = tokio::spawn(serve::accept(listener, shared));
        Ok(Self { address, buckets, faults, counters, uploads, late, acceptor })
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
        self.counters.snapshot(&self.uploads)
    }
    /// Requests whose clients are gone, and which are yet to be executed.
    pub fn late(&self) -> usize {
        self.late.count()
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
