//! The agent's configuration file: TOML, parsed once, refused as a whole when any of it is wrong.

use cache::data::Reading;
use link::budget;
use link::worker::InjectedFault;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use volume::{AllowList, Parameters, RequestTimeout, VolumeSpec, parse_bytes, parse_duration};

/// Everything an agent needs to know. `docs/configuration.md` documents each key.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub agent: Agent,
    #[serde(default)]
    pub allow: AllowList,
    pub cache: Cache,
    #[serde(default)]
    pub store: Store,
    #[serde(default)]
    pub workers: Workers,
    #[serde(default)]
    pub hdfs: Hdfs,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agent {
    /// Where the mount broker listens. None: mounts are made by the program that embeds the agent (`millpond mount`).
    pub broker_socket: Option<PathBuf>,
    /// Operator API.
    pub api_socket: PathBuf,
    /// What must not be lost: the inode high-water mark, the key of the scopes' names, and in `staging` what was written and is not
    /// in its store yet, whether a mount has the volume or not.
    pub state_dir: PathBuf,
    /// The fuse-worker binary; default: next to this one.
    pub worker: Option<PathBuf>,
    /// Address of the Prometheus page; None: off.
    pub metrics: Option<SocketAddr>,
    #[serde(default)]
    pub log_format: LogFormat,
    /// Whether volumes without a secret may use the agent's own AWS_* environment.
    #[serde(default)]
    pub environment_credentials: bool,
    /// How long a first publish waits for its source.
    #[serde(default = "twenty_seconds")]
    pub source_wait: Span,
    /// How long to wait at start for directories that another program makes for us.
    #[serde(default = "a_minute")]
    pub directories_wait: Span,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Where the metadata stores live. Not on a tier: a disk that fails under LMDB is a SIGBUS.
    pub metadata_dir: PathBuf,
    /// Most bytes of one scope's metadata store.
    #[serde(default = "metadata_limit")]
    pub metadata_limit: Size,
    /// Bytes of its disk that each store takes ahead for new names.
    #[serde(default = "metadata_reserve")]
    pub metadata_reserve: Size,
    /// Most bytes of all metadata stores.
    #[serde(default = "metadata_total")]
    pub metadata_total: Size,
    /// How long, and how many of, the stores that no volume uses are kept.
    #[serde(default = "two_weeks")]
    pub metadata_idle: Span,
    #[serde(default = "thousand")]
    pub metadata_stores: usize,
    #[serde(default = "block")]
    pub block: Size,
    /// Most bytes of bodies in flight between network and disk.
    #[serde(default = "memory")]
    pub memory: Size,
    /// Most bytes one credential scope may hold, whatever its volumes want; None: the whole tier.
    pub scope_limit: Option<Size>,
    /// Largest readahead of a sequential reader, of volumes that do not say theirs; and what no volume goes beyond.
    #[serde(default = "readahead")]
    pub readahead: Size,
    pub readahead_max: Option<Size>,
    /// Size of one ranged GET of a large file, and how many run at once for one file; likewise.
    #[serde(default = "part")]
    pub part: Size,
    pub part_max: Option<Size>,
    #[serde(default = "parallel_parts")]
    pub parallel_parts: usize,
    pub parallel_parts_max: Option<usize>,
    /// A cache disk that takes longer for one call is passed by until it answers; see [`Config::disk_timeout`].
    #[serde(default = "ten_seconds")]
    pub disk_timeout: Span,
    pub tiers: Vec<Tier>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    pub name: String,
    pub kind: TierKind,
    pub paths: Vec<PathBuf>,
    pub quota: Size,
    #[serde(default = "million")]
    pub inodes: u64,
    #[serde(default = "high")]
    pub high: u8,
    #[serde(default = "low")]
    pub low: u8,
    /// Percent of the file system that stays free, above kubelet's eviction thresholds.
    #[serde(default = "free_bytes")]
    pub min_free_bytes: u8,
    #[serde(default = "free_inodes")]
    pub min_free_inodes: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TierKind {
    Memory,
    Ssd,
    Hdd,
}

impl TierKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Ssd => "ssd",
            Self::Hdd => "hdd",
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Store {
    /// Most requests to all stores at once.
    pub max_requests: usize,
    /// Most bytes per second from all stores; 0 is no limit.
    pub bandwidth: Size,
    /// What was written and is not in its store for so long is told to the owners of the volume.
    pub uploads_late: Span,
    /// Stores that speak nothing of this version or later are not asked.
    pub tls_min: store::TlsVersion,
    /// Stores are asked through it, but for these hosts. The environment's `HTTPS_PROXY` and the like count for nothing.
    pub proxy: Option<store::ProxyUrl>,
    pub no_proxy: Vec<store::Direct>,
    /// The cluster's own networks: only endpoints whose host is written out in `allow.endpoints` are asked there.
    pub forbidden_networks: Vec<store::Network>,
    /// Where pods find the API server. Not of the file: the kubelet tells each pod.
    #[serde(skip)]
    pub api_server: Option<store::Network>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Workers {
    /// Reader threads of each worker.
    pub threads: u32,
    /// Pre-initialised workers that stand by.
    pub standby: usize,
    /// RLIMIT_DATA of one worker: a backstop for private memory, most of it reserved and never touched.
    pub memory: Size,
    /// Most memory of one worker, its share of the page cache included; 0: no limit of its own.
    pub memory_limit: Size,
    /// A worker that stands still for this long while requests wait is replaced.
    pub hang_limit: Span,
    /// Debug: while this file exists no worker is started again.
    pub suspend_respawn_file: Option<PathBuf>,
    /// Debug: where the kernel's limits for FUSE are read.
    pub fuse_sysctl: PathBuf,
    /// Debug: kernel features that workers do without.
    #[serde(alias = "withhold")] // until 0.2
    pub disabled_features: Vec<Feature>,
    /// Debug: what workers do to themselves at files of certain names.
    #[serde(alias = "misbehave")] // until 0.2
    pub inject_faults: Vec<InjectedFault>,
}

/// What volumes on HDFS take.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hdfs {
    /// The hdfs-helper binary; default: next to this one.
    pub helper: Option<PathBuf>,
    /// RLIMIT_DATA of one helper: its private memory.
    pub memory: Size,
    /// Most memory of one helper; 0: no limit of its own.
    pub memory_limit: Size,
    /// In each directory of it are a core-site.xml, an hdfs-site.xml and a krb5.conf that volumes name (`hadoopConfig`).
    pub configurations: Option<PathBuf>,
    /// Where HDFS's servers may be although no other store is asked there: in the cluster's own networks, on the node.
    pub networks: Vec<store::Network>,
    /// Which number a user or group of HDFS's has in pods, for volumes that show owners (`attributes: source`).
    pub users: BTreeMap<String, u32>,
    pub groups: BTreeMap<String, u32>,
}

impl Workers {
    /// The volume as calls wait for it: they get EIO before the kernel ends their connection.
    pub(crate) fn in_time(&self, spec: &VolumeSpec) -> VolumeSpec {
        let read = |name: &str| std::fs::read_to_string(self.fuse_sysctl.join(name));
        volume::within(spec, RequestTimeout::of_sysctl(read))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feature {
    Passthrough,
    NoOpen,
    Readdirplus,
    Landlock,
    PopulateWrite,
    Splice,
}

/// A size as people write it: `128Ki`, `20Gi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Size(pub u64);
impl TryFrom<String> for Size {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        parse_bytes(&text).map(Size).ok_or_else(|| format!("{text:?} is not a size such as 128Ki or 20Gi"))
    }
}

/// A duration as people write it: `20s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Span(pub Duration);
impl TryFrom<String> for Span {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        parse_duration(&text).map(Span).ok_or_else(|| format!("{text:?} is not a duration such as 20s"))
    }
}

impl Cache {
    /// Defaults for all but where things lie.
    pub fn with_tiers(metadata_dir: PathBuf, tiers: Vec<Tier>) -> Self {
        Self {
            metadata_dir,
            metadata_limit: metadata_limit(),
            metadata_reserve: metadata_reserve(),
            metadata_total: metadata_total(),
            metadata_idle: two_weeks(),
            metadata_stores: thousand(),
            block: block(),
            memory: memory(),
            scope_limit: None,
            readahead: readahead(),
            readahead_max: None,
            disk_timeout: ten_seconds(),
            part: part(),
            part_max: None,
            parallel_parts: parallel_parts(),
            parallel_parts_max: None,
            tiers,
        }
    }

    /// How files are brought for volumes that do not say otherwise.
    pub fn reading(&self) -> Reading {
        Reading {
            readahead_bytes: self.readahead.0,
            part_bytes: self.part.0,
            parallel_parts: self.parallel_parts,
        }
    }

    /// What no volume's parameters go beyond. Where the operator does not say it, it is at least what volumes get that do
    /// not say theirs.
    pub fn reading_max(&self) -> Reading {
        let Reading { readahead_bytes, part_bytes, parallel_parts } = self.reading();
        let bytes = |said: Option<Size>, otherwise: u64| said.map_or(otherwise, |size| size.0);
        Reading {
            readahead_bytes: bytes(self.readahead_max, readahead_bytes.max(READAHEAD_MAX)),
            part_bytes: bytes(self.part_max, part_bytes.max(PART_MAX)),
            parallel_parts: self.parallel_parts_max.unwrap_or(parallel_parts.max(PARALLEL_PARTS_MAX)),
        }
    }

    /// What of these a volume does not get, a sentence each.
    pub fn limited(&self, parameters: &Parameters) -> Vec<String> {
        let most = self.reading_max();
        let asked = [
            ("readahead", parameters.readahead, most.readahead_bytes, "readahead_max"),
            ("part", parameters.part, most.part_bytes, "part_max"),
            (
                "parallelParts",
                parameters.parallel_parts.map(u64::from),
                most.parallel_parts as u64,
                "parallel_parts_max",
            ),
        ];
        let beyond = asked.into_iter().filter_map(|(name, asked, most, limit)| {
            let asked = asked.filter(|asked| *asked > most)?;
            Some(format!("{name} {asked} is above cache.{limit} of this node, and counts as {most}"))
        });
        beyond.collect()
    }

    pub fn metadata(&self) -> cache::meta::Options {
        cache::meta::Options {
            map_bytes: self.metadata_limit.0 as usize,
            reserve_bytes: self.metadata_reserve.0,
            ..cache::meta::Options::default()
        }
    }
}

const READAHEAD_MAX: u64 = 1 << 30;
/// A part takes as long as its bytes take, within `storeTimeout`.
const PART_MAX: u64 = 64 << 20;
/// Of the requests that an endpoint gets from a node at once.
const PARALLEL_PARTS_MAX: usize = 64;

/// Shorter, and a busy machine looks like a worker that hangs; longer, and its readers might as well hang.
const HANG_LIMIT_MIN: Duration = budget::HANG_LIMIT_LEAST.time;
const HANG_LIMIT_MAX: Duration = Duration::from_secs(600);

/// Shorter, and a busy disk looks like one that hangs; longer, and those that read from it might as well hang.
const DISK_TIMEOUT_MIN: Duration = Duration::from_secs(1);
const DISK_TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// A worker with four threads and their buffers needs this.
const MEMORY_LIMIT_MIN: u64 = 32 << 20;

/// The arenas of its threads are most of it, and never touched.
const HELPER_MEMORY_MIN: u64 = 256 << 20;

fn ten_seconds() -> Span {
    Span(Duration::from_secs(10))
}
fn twenty_seconds() -> Span {
    Span(Duration::from_secs(20))
}
fn a_minute() -> Span {
    Span(Duration::from_secs(60))
}
fn metadata_limit() -> Size {
    Size(cache::meta::Options::default().map_bytes as u64)
}
fn metadata_reserve() -> Size {
    Size(cache::meta::Options::default().reserve_bytes)
}
fn metadata_total() -> Size {
    Size(64 << 30)
}
fn two_weeks() -> Span {
    Span(Duration::from_secs(14 * 86_400))
}
fn thousand() -> usize {
    1000
}
fn block() -> Size {
    Size(128 << 10)
}
fn memory() -> Size {
    Size(96 << 20)
}
fn readahead() -> Size {
    Size(256 << 20)
}
fn part() -> Size {
    Size(8 << 20)
}
fn parallel_parts() -> usize {
    32
}
fn million() -> u64 {
    1_000_000
}
fn high() -> u8 {
    95
}
fn low() -> u8 {
    90
}
fn free_bytes() -> u8 {
    15
}
fn free_inodes() -> u8 {
    10
}

impl Default for Store {
    fn default() -> Self {
        Self {
            max_requests: 128,
            bandwidth: Size(0),
            uploads_late: Span(Duration::from_secs(300)),
            tls_min: store::TlsVersion::default(),
            proxy: None,
            no_proxy: Vec::new(),
            forbidden_networks: Vec::new(),
            api_server: None,
        }
    }
}

impl Default for Hdfs {
    fn default() -> Self {
        Self {
            helper: None,
            memory: Size(1 << 30),
            memory_limit: Size(512 << 20),
            configurations: None,
            networks: Vec::new(),
            users: BTreeMap::new(),
            groups: BTreeMap::new(),
        }
    }
}

impl Default for Workers {
    fn default() -> Self {
        Self {
            threads: 4,
            standby: 1,
            memory: Size(256 << 20),
            memory_limit: Size(512 << 20),
            hang_limit: Span(Duration::from_secs(15)),
            suspend_respawn_file: None,
            fuse_sysctl: volume::FUSE_SYSCTL.into(),
            disabled_features: Vec::new(),
            inject_faults: Vec::new(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("configuration {path}: {source}")]
    Parse { path: PathBuf, source: Box<toml::de::Error> },
    #[error("configuration: {0}")]
    Meaning(String),
}

impl Config {
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let mut config: Self = toml::from_str(&text)
            .map_err(|source| ConfigError::Parse { path: path.to_owned(), source: Box::new(source) })?;
        // A name there would be an odd cluster's; it is not resolved here.
        config.store.api_server =
            std::env::var("KUBERNETES_SERVICE_HOST").ok().and_then(|address| address.parse().ok());
        config.check()?;
        Ok(config)
    }

    /// How long one call of a cache disk may take. Less than what makes a worker hang: when one that is stuck in such a
    /// disk is replaced, its successor must find that the disk is passed by.
    pub(crate) fn disk_timeout(&self) -> Duration {
        self.cache.disk_timeout.0.min(self.workers.hang_limit.0 * 2 / 3)
    }

    /// What the types cannot say.
    pub fn check(&self) -> Result<(), ConfigError> {
        let wrong = |text: String| Err(ConfigError::Meaning(text));
        if self.cache.tiers.is_empty() {
            return wrong(
                "cache.tiers is empty: give at least one [[cache.tiers]] with paths and a quota".into(),
            );
        }
        let block = self.cache.block.0;
        if !block.is_power_of_two() || !(4096..=1 << 20).contains(&block) {
            return wrong(format!("cache.block {block} must be a power of two from 4Ki to 1Mi"));
        }
        if !(16 << 20..=1 << 40).contains(&self.cache.metadata_limit.0) {
            return wrong("cache.metadata_limit must be from 16Mi to 1Ti".into());
        }
        if self.cache.metadata_total.0 < self.cache.metadata_reserve.0.max(16 << 20) {
            return wrong(
                "cache.metadata_total must be at least 16Mi, and at least cache.metadata_reserve".into(),
            );
        }
        if self.cache.part.0 < block || !self.cache.part.0.is_multiple_of(block) {
            return wrong("cache.part must be a multiple of cache.block".into());
        }
        let (reading, most) = (self.cache.reading(), self.cache.reading_max());
        for (name, value, max) in [
            ("readahead", reading.readahead_bytes, most.readahead_bytes),
            ("part", reading.part_bytes, most.part_bytes),
            ("parallel_parts", reading.parallel_parts as u64, most.parallel_parts as u64),
        ] {
            if value > max {
                return wrong(format!(
                    "cache.{name} is above cache.{name}_max: lower the one or raise the other"
                ));
            }
        }
        if self.cache.parallel_parts == 0 || self.store.max_requests == 0 || self.workers.threads == 0 {
            return wrong(
                "cache.parallel_parts, store.max_requests and workers.threads must be at least 1".into(),
            );
        }
        if self.store.proxy.is_none() && !self.store.no_proxy.is_empty() {
            return wrong(
                "store.no_proxy has no meaning without store.proxy: set that, or leave it out".into(),
            );
        }
        if !(HANG_LIMIT_MIN..=HANG_LIMIT_MAX).contains(&self.workers.hang_limit.0) {
            return wrong(format!(
                "workers.hang_limit must be from {HANG_LIMIT_MIN:?} to {HANG_LIMIT_MAX:?}"
            ));
        }
        if !(DISK_TIMEOUT_MIN..=DISK_TIMEOUT_MAX).contains(&self.cache.disk_timeout.0) {
            return wrong(format!(
                "cache.disk_timeout must be from {DISK_TIMEOUT_MIN:?} to {DISK_TIMEOUT_MAX:?}"
            ));
        }
        if (1..MEMORY_LIMIT_MIN).contains(&self.workers.memory_limit.0) {
            return wrong("workers.memory_limit must be 0 (none) or at least 32Mi".into());
        }
        if (1..MEMORY_LIMIT_MIN).contains(&self.hdfs.memory_limit.0) || self.hdfs.memory.0 < HELPER_MEMORY_MIN
        {
            return wrong(
                "hdfs.memory must be at least 256Mi, and hdfs.memory_limit 0 (none) or at least 32Mi".into(),
            );
        }
        for tier in &self.cache.tiers {
            if tier.paths.is_empty() {
                return wrong(format!("tier {:?} has no paths", tier.name));
            }
            if tier.low >= tier.high
                || tier.high > 100
                || tier.min_free_bytes >= 100
                || tier.min_free_inodes >= 100
            {
                return wrong(format!("tier {:?}: low < high ≤ 100 and free percentages < 100", tier.name));
            }
        }
        let absolute = self.cache.tiers.iter().flat_map(|t| &t.paths).chain([
            &self.agent.api_socket,
            &self.agent.state_dir,
            &self.cache.metadata_dir,
        ]);
        for path in absolute {
            if !path.is_absolute() {
                return wrong(format!("{} must be an absolute path", path.display()));
            }
        }
        Ok(())
    }

    /// Which addresses stores may have.
    pub fn egress(&self) -> store::EgressConfig {
        let forbidden = self.store.forbidden_networks.iter().chain(&self.store.api_server);
        let proxy = |url| store::Proxy { url, except: self.store.no_proxy.clone() };
        store::EgressConfig {
            named: self.allow.endpoints.clone(),
            forbidden: forbidden.copied().collect(),
            proxy: self.store.proxy.clone().map(proxy),
        }
    }

    pub fn disabled_features(&self) -> link::worker::DisabledFeatures {
        let has = |f| self.workers.disabled_features.contains(&f);
        link::worker::DisabledFeatures {
            passthrough: has(Feature::Passthrough),
            no_open: has(Feature::NoOpen),
            readdirplus: has(Feature::Readdirplus),
            landlock: has(Feature::Landlock),
            populate_write: has(Feature::PopulateWrite),
            splice: has(Feature::Splice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        [agent]
        api_socket = "/run/a.sock"
        state_dir = "/var/lib/a"
        [cache]
        metadata_dir = "/var/lib/m"
        [[cache.tiers]]
        name = "ssd"
        kind = "ssd"
        paths = ["/cache"]
        quota = "10Gi"
    "#;

    fn parse(text: &str) -> Result<Config, String> {
        let config: Config = toml::from_str(text).map_err(|e| e.to_string())?;
        config.check().map_err(|e| e.to_string())?;
        Ok(config)
    }

    #[test]
    fn defaults_fill_what_is_left_out() {
        let config = parse(GOOD).unwrap();
        assert_eq!(config.cache.block, Size(128 << 10));
        assert_eq!(config.cache.tiers[0].min_free_bytes, 15);
        assert_eq!(config.store.max_requests, 128);
        assert_eq!(config.store.tls_min, store::TlsVersion::Tls12);
        assert_eq!(config.workers.hang_limit, Span(Duration::from_secs(15)));
        assert_eq!(config.disk_timeout(), Duration::from_secs(10));
    }

    #[test]
    fn a_proxy_and_what_goes_without_it_are_the_operators_word() {
        let store =
            "[store]\nproxy = \"http://proxy:3128\"\nno_proxy = [\"example.com\", \"10.0.0.0/8\"]\n[cache]";
        let proxy = parse(&GOOD.replace("[cache]", store)).unwrap().egress().proxy.unwrap();
        assert_eq!((proxy.url.to_string().as_str(), proxy.except.len()), ("http://proxy:3128", 2));
        assert_eq!(parse(GOOD).unwrap().egress().proxy, None);
    }

    #[test]
    fn the_limits_of_what_volumes_ask_for_are_never_below_what_volumes_get_that_ask_for_nothing() {
        let with = |more: &str| parse(&GOOD.replace("[cache]", &format!("[cache]\n{more}")));
        let most = with("").unwrap().cache.reading_max();
        assert_eq!((most.readahead_bytes, most.part_bytes, most.parallel_parts), (1 << 30, 64 << 20, 64));
        // A configuration from before there were limits.
        let most = with("part = \"128Mi\"\nparallel_parts = 100").unwrap().cache.reading_max();
        assert_eq!((most.part_bytes, most.parallel_parts), (128 << 20, 100));
        let most = with("parallel_parts_max = 32\nreadahead_max = \"256Mi\"").unwrap().cache.reading_max();
        assert_eq!((most.readahead_bytes, most.parallel_parts), (256 << 20, 32));
        let error = with("part_max = \"4Mi\"").unwrap_err().to_string();
        assert!(error.contains("cache.part is above cache.part_max"), "{error}");
    }

    #[test]
    fn a_volume_is_told_which_of_its_parameters_are_limited() {
        let cache = parse(&GOOD.replace("[cache]", "[cache]\nparallel_parts_max = 32")).unwrap().cache;
        let asks = |readahead, parallel_parts| Parameters {
            readahead,
            parallel_parts,
            part: Some(64 << 20),
            ..Parameters::default()
        };
        assert_eq!(cache.limited(&asks(None, None)), [""; 0]);
        assert_eq!(cache.limited(&asks(Some(1 << 30), Some(32))), [""; 0]);
        assert_eq!(
            cache.limited(&asks(Some(0), Some(33))),
            ["parallelParts 33 is above cache.parallel_parts_max of this node, and counts as 32"]
        );
    }

    /// Until 0.2.
    #[test]
    fn the_names_of_settings_in_the_release_before_are_understood() {
        let old =
            "[workers]\nwithhold = [\"no_open\"]\nmisbehave = [{ name = \"a\", do = \"abort\" }]\n[cache]";
        let config = parse(&GOOD.replace("[cache]", old)).unwrap();
        assert!(config.disabled_features().no_open);
        assert_eq!(config.workers.inject_faults.len(), 1);
    }

    #[test]
    fn mistakes_are_named() {
        for (from, to, says) in [
            ("quota", "qouta", "qouta"),
            ("10Gi", "10 gigs", "not a size"),
            ("\"/cache\"", "\"cache\"", "absolute"),
            ("[cache]", "[cache]\nmetadata_total = \"1Mi\"", "metadata_total"),
            ("[cache]", "[cache]\nmetadata_idle = \"14\"", "not a duration"),
            ("kind = \"ssd\"", "kind = \"tape\"", "tape"),
            ("paths = [\"/cache\"]", "paths = []", "no paths"),
            ("[cache]", "[cache]\ndisk_timeout = \"100ms\"", "disk_timeout"),
            ("[cache]", "[allow]\nendpoints = [\"https://minio*\"]\n[cache]", "https://*.domain"),
            ("[cache]", "[store]\nforbidden_networks = [\"10.96/12\"]\n[cache]", "10.96.0.0/12"),
            ("[cache]", "[store]\ntls_min = \"1.1\"\n[cache]", "expected `1.2` or `1.3`"),
            ("[cache]", "[store]\nproxy = \"proxy:3128\"\n[cache]", "http://host:port"),
            ("[cache]", "[store]\nno_proxy = [\"*.x\"]\n[cache]", "stands for all below it"),
            ("[cache]", "[store]\nno_proxy = [\"x.example\"]\n[cache]", "without store.proxy"),
            ("[cache]", "[hdfs]\nmemory = \"1Mi\"\n[cache]", "hdfs.memory must be"),
            ("[cache]", "[hdfs]\nnetworks = [\"pods\"]\n[cache]", "10.96.0.0/12"),
            ("[cache]", "[hdfs.users]\nalice = -1\n[cache]", "invalid value"),
            ("[cache]", "[workers]\nhang_limit = \"1s\"\n[cache]", "hang_limit"),
            ("[cache]", "[workers]\ninject_faults = [{name = \"a\", do = \"dance\"}]\n[cache]", "dance"),
        ] {
            let error = parse(&GOOD.replace(from, to)).unwrap_err();
            assert!(error.contains(says), "{from} → {to}: {error}");
        }
    }
}
