//! Source and credentials become something that lists, describes and streams objects.
//!
//! [`open`] turns a volume's specification into a [`Source`]: a bucket of an object store, a tree on a web server or a directory. What happens here: requests,
//! retries, limits, checks of every answer, and the translation of whatever went wrong into a [`StoreError`] that says
//! what to do. What never happens here: caching, FUSE, CSI, processes. Nothing is remembered between two calls but
//! open connections.

mod abilities;
mod access;
mod breaker;
mod budget;
mod certificate;
mod dialect;
mod directory;
mod dispatch;
mod egress;
mod error;
mod exchange;
mod hdfs;
mod kept;
mod keys;
mod limits;
mod network;
mod observe;
mod proxy;
mod resolve;
mod retry;
mod shares;
mod sink;
mod traffic;

pub use abilities::{Abilities, probe};
pub use access::{Access, ExpiryObserver, Question};
#[cfg(fuzzing)]
pub use dialect::fuzz;
pub use egress::EgressConfig;
pub use error::StoreError;
pub use exchange::{ERASE_PAGE_LIMIT, Erased, Eraser, MayGoOn};
pub use hdfs::{HadoopConfig, HadoopIds, HdfsNode, Helper, Helpers};
pub use limits::{Limits, LimitsConfig, TlsVersion};
pub use network::{BadNetwork, Network};
pub use observe::{NoObserver, Observer, Outcome, RetryCause};
pub use proxy::{BadDirect, BadProxy, Direct, Proxy, ProxyUrl};
pub use sink::{
    Attributes, Body, Condition, Leftover, NoPlace, Part, Seen, Sink, SinkLimits, Upload, Write, WriteId,
    Written,
};

use async_trait::async_trait;
use bytes::Bytes;
use crc_fast::CrcAlgorithm;
use dialect::{Azure, BucketDialect, Gcs, Oss, S3};
use futures::stream::BoxStream;
use http::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use volume::{Permissions, SourceUrl, VolumeSpec};

/// Names one version of an object: equal tokens mean equal bytes. An ETag without its quotes, a generation, or made of size and times.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Version(pub String);

impl Version {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    File { size: u64, version: Version },
    Directory,
    Symlink { target: Vec<u8> },
}

/// One name in one directory. The name is a legal POSIX file name of at most 255 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: Vec<u8>,
    pub kind: Kind,
    /// Since the epoch; 0 for what has no time, such as a common prefix of keys.
    pub modified_ns: i64,
    /// Of a file or directory, where the source tells them.
    pub permissions: Option<Permissions>,
}

/// One page of a directory. `a` (an object) and `a/` (a prefix) may both come, on any pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// In no promised order; at most [`PAGE_ENTRIES`] files and as many directories, for some stores count them apart.
    pub entries: Vec<Entry>,
    /// Where the next page starts; None: this was the last.
    pub next: Option<String>,
    /// What lies in this directory at the source and cannot be shown, as text for a person; each once: keys without a
    /// POSIX name, and objects of a size that no file has.
    pub unnameable: Vec<String>,
}

/// What the bytes of an object add up to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checksum {
    pub algorithm: CrcAlgorithm,
    pub value: u64,
}

/// Chunks of tens to hundreds of kilobytes, in order. After an error the stream ends.
pub type ByteStream = BoxStream<'static, Result<Bytes, StoreError>>;

/// Where a volume's bytes live. Every call is bounded by the `storeTimeout` of its [`Access`], retries included.
#[async_trait]
pub trait Source: Send + Sync + std::fmt::Debug {
    /// One page of one directory level. `dir` is "" or "a/b" (no slash at either end); `token` is a page's `next`.
    /// A directory that does not exist is `NotFound`; the volume's own root is never.
    async fn list(&self, dir: &[u8], token: Option<&str>) -> Result<Page, StoreError>;

    /// What `path` ("a/b") is, or None. Where an object and a directory share the name, the directory wins.
    async fn head(&self, path: &[u8]) -> Result<Option<Entry>, StoreError>;

    /// Exactly `range` of exactly this version. A broken transfer goes on from where it stopped; a version that is
    /// gone is `Stale`. The whole transfer is bounded by `storeTimeout`: ask for parts that fit.
    async fn get(&self, path: &[u8], version: &Version, range: Range<u64>) -> Result<ByteStream, StoreError>;

    /// What to add an object of this size up with as it comes, because [`Self::checksum`] will most likely tell such a sum.
    /// None: there will be nothing to compare, or [`Self::get`] has compared it already.
    fn sums(&self, _size: u64) -> Option<CrcAlgorithm> {
        None
    }

    /// Of all bytes of this version, as the store tells it. None: it does not.
    async fn checksum(&self, _path: &[u8], _version: &Version) -> Result<Option<Checksum>, StoreError> {
        Ok(None)
    }

    /// What [`Self::checksum`] told was that of no bytes that came: some servers mean the checksum of their parts'
    /// checksums, and do not say so. True: it was one too many, none is told any more.
    fn told_wrong(&self) -> bool {
        false
    }

    /// Do questions to it wait for nothing but their turn on this node, so that its silence says nothing about it?
    fn is_queued(&self) -> bool {
        false
    }

    /// Does this node get something from other sources meanwhile?
    fn others_move(&self) -> bool {
        false
    }

    /// Where it can be written to. None: it cannot, or not by this program.
    fn sink(&self) -> Option<Arc<dyn Sink>> {
        None
    }

    /// First contact at publish: does the source exist, may we list and read it? Gives up after `limit`.
    async fn check(&self, limit: Duration) -> Result<(), StoreError>;

    /// The same step by step, for a person who wants to know where it fails; what comes after a failure is left out. Each
    /// step takes no longer than `limit`.
    async fn examine(&self, limit: Duration) -> Vec<Examined> {
        let result = self.check(limit).await;
        let result = result.map(|()| "may list and read".to_owned()).map_err(|e| e.to_string());
        vec![Examined { step: Step::Access, result }]
    }
}

/// One step of a first contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The endpoint's name has an address.
    Name,
    /// It answers, over TLS where it should.
    Connection,
    /// Its clock and this node's agree.
    Clock,
    /// The credentials are accepted, the source exists, may be listed and read.
    Access,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Examined {
    pub step: Step,
    /// What was seen, or what is wrong.
    pub result: Result<String, String>,
}

/// What one [`Page`] is asked to hold.
pub const PAGE_ENTRIES: usize = 1000;

/// Opens a source. Makes no contact: that is [`Source::check`].
pub fn open(
    spec: &VolumeSpec,
    access: Arc<Access>,
    limits: Arc<Limits>,
    observer: Arc<dyn Observer>,
) -> Result<Arc<dyn Source>, StoreError> {
    // Volumes that share what they bring in share what they may ask for, too.
    let readers = limits.readers(spec, &access.credentials());
    let extra = extra_headers(spec)?;
    let (store, prefix): (Arc<dyn BucketDialect>, &str) = match &spec.source {
        SourceUrl::S3 { bucket, prefix } => (Arc::new(S3::new(bucket, &spec.parameters)?), prefix),
        SourceUrl::Oss { bucket, prefix, .. } => {
            let endpoint = spec.endpoint();
            (Arc::new(Oss::new(bucket, endpoint.as_ref(), &spec.parameters)?), prefix)
        }
        SourceUrl::Gcs { bucket, prefix } => (Arc::new(Gcs::new(bucket, &spec.parameters)?), prefix),
        SourceUrl::Azure { container, prefix, .. } => {
            let (endpoint, account) = (spec.endpoint(), spec.source.storage_account());
            (Arc::new(Azure::new(container, endpoint.as_ref(), account, &spec.parameters)?), prefix)
        }
        SourceUrl::Web { origin, prefix } => {
            let manifest = spec.parameters.manifest.as_deref();
            let place = (origin.as_str(), prefix.as_str());
            let source =
                exchange::Tree::open(place, manifest, extra, access, readers.as_str(), limits, observer)?;
            return Ok(Arc::new(source));
        }
        SourceUrl::Hdfs { .. } => {
            let why = "this program starts no HDFS helper: use a node with Millpond's agent".to_owned();
            return Err(StoreError::Invalid { what: spec.source.to_string(), why });
        }
        SourceUrl::Dir { path } => {
            let source = directory::Directory::new(path.clone(), access, readers.as_str(), &limits, observer);
            return Ok(Arc::new(source));
        }
    };
    Ok(Arc::new(exchange::Bucket::open(store, prefix, extra, access, readers.as_str(), limits, observer)?))
}

/// What removes all that is in a volume. Makes no contact. `Unsupported`: this store's volumes are not removed, or the volume
/// is a whole bucket, which is nobody's.
pub fn open_eraser(
    spec: &VolumeSpec,
    access: Arc<Access>,
    limits: Arc<Limits>,
    observer: Arc<dyn Observer>,
) -> Result<Eraser, StoreError> {
    let unsupported = |why: &str| StoreError::Unsupported { what: spec.source.to_string(), why: why.into() };
    let SourceUrl::S3 { bucket, prefix } = &spec.source else {
        return Err(unsupported("only directories in buckets of s3:// are deleted with their volumes"));
    };
    let readers = limits.readers(spec, &access.credentials());
    let store = Arc::new(S3::new(bucket, &spec.parameters)?);
    let extra = extra_headers(spec)?;
    let bucket = exchange::Bucket::open(store, prefix, extra, access, readers.as_str(), limits, observer)?;
    Eraser::of(bucket).ok_or_else(|| unsupported("a whole bucket is not deleted with a volume"))
}

/// As [`open`], on a node that can start HDFS helpers.
pub fn open_on(
    spec: &VolumeSpec,
    access: Arc<Access>,
    limits: Arc<Limits>,
    observer: Arc<dyn Observer>,
    hdfs: Arc<HdfsNode>,
) -> Result<Arc<dyn Source>, StoreError> {
    match hdfs::Hdfs::open(spec, access.clone(), limits.clone(), observer.clone(), hdfs) {
        Some(source) => Ok(Arc::new(source)),
        None => open(spec, access, limits, observer),
    }
}

/// What every request carries for somebody before the store.
fn extra_headers(spec: &VolumeSpec) -> Result<HeaderMap, StoreError> {
    let header = |(name, value): (&String, &String)| {
        let header = HeaderName::try_from(name).ok().zip(HeaderValue::try_from(value).ok());
        header.ok_or_else(|| StoreError::Invalid {
            what: spec.source.to_string(),
            why: format!("no request can carry header {name:?} of 'extraHeaders'"),
        })
    };
    spec.parameters.extra_headers.iter().map(header).collect()
}
