//! The command line, parsed and checked as a whole before anything is bound or mounted.

use crate::controller::{erasures, unclaimed};
use clap::{Parser, ValueEnum};
use link::budget;
use mounts::MemoryTier;
use std::path::{Path, PathBuf};
use std::time::Duration;
use store::{Direct, EgressConfig, LimitsConfig, Network, Proxy, ProxyUrl, TlsVersion};
use volume::AllowList;

/// Twice what the agent's signs of life are apart.
const AGENT_HANG_LIMIT_MIN: Duration = budget::AGENT_HANG_LIMIT_LEAST.time;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    Controller,
    Node,
    All,
    /// Remove what Millpond keeps on this node, then exit.
    Cleanup,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RecordsIn {
    /// Files below the state directory.
    Directory,
    /// MillpondVolume objects of the Kubernetes API: needed for more than one replica and for templates with PVC
    /// annotations.
    Kubernetes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Json,
    Text,
}

/// Millpond's CSI driver.
#[derive(Clone, Debug, Parser)]
#[command(name = "csi-plugin", version)]
pub struct Arguments {
    /// Which services to offer.
    #[arg(long, value_enum, env = "MILLPOND_MODE", default_value = "all")]
    pub mode: Mode,
    /// Where the CSI services listen: unix:///path.
    #[arg(long, env = "CSI_ENDPOINT", default_value = "unix:///csi/csi.sock")]
    pub endpoint: String,
    /// What must survive a restart: volume records (controller), the mount counter (node).
    #[arg(long, env = "MILLPOND_STATE_DIR", default_value = "/var/lib/millpond/csi")]
    pub state_dir: PathBuf,
    /// Where the node agent connects to.
    #[arg(long, env = "MILLPOND_BROKER_SOCKET", default_value = "/run/millpond/broker.sock")]
    pub broker_socket: PathBuf,
    /// User id of the node agent; it and root may connect.
    #[arg(long, env = "MILLPOND_AGENT_UID", default_value_t = 0)]
    pub agent_uid: u32,
    /// Target paths must lie below one of these directories.
    #[arg(
        long = "kubelet-dir",
        env = "MILLPOND_KUBELET_DIR",
        value_delimiter = ',',
        default_value = "/var/lib/kubelet"
    )]
    pub kubelet_dirs: Vec<PathBuf>,
    /// Files that are passed through must lie below one of these directories.
    #[arg(long = "cache-root", env = "MILLPOND_CACHE_ROOT", value_delimiter = ',')]
    pub cache_roots: Vec<PathBuf>,
    /// This node's name in Kubernetes.
    #[arg(long, env = "NODE_ID")]
    pub node_id: Option<String>,
    #[arg(long, env = "MILLPOND_DRIVER_NAME", default_value = "csi.millpond.io")]
    pub driver_name: String,
    /// How long the first publish of a source may wait for that source.
    #[arg(long, env = "MILLPOND_AGENT_SOURCE_WAIT", default_value = "20s", value_parser = duration)]
    pub agent_source_wait: Duration,
    /// Asked to stop (SIGTERM), wait at most so long for an agent that holds every mount. Below the pod's grace period.
    #[arg(long, env = "MILLPOND_HANDOVER_WAIT", default_value = "290s", value_parser = duration)]
    pub handover_wait: Duration,
    /// A node agent that has given no sign of life for so long is killed: its successor takes its mounts over.
    #[arg(long, env = "MILLPOND_AGENT_HANG_LIMIT", default_value = "15s", value_parser = duration)]
    pub agent_hang_limit: Duration,
    /// TOML file, such as the agent's: its table [allow] limits the sources that CreateVolume accepts, without it the node
    /// decides; and how stores are reached, in [store], holds for volumes that are deleted with their directories.
    #[arg(long, env = "MILLPOND_ALLOW_CONFIG")]
    pub allow_config: Option<PathBuf>,
    /// Where the controller keeps volume records.
    #[arg(long, value_enum, env = "MILLPOND_RECORDS", default_value = "directory")]
    pub records: RecordsIn,
    /// Post Kubernetes Events on pods and claims when a mount is healed, degraded, or fails.
    #[arg(long, env = "MILLPOND_EVENTS")]
    pub events: bool,
    /// Directories that the node agent owns: made if they are missing, for its user, mode 0700.
    #[arg(long = "own-dir", env = "MILLPOND_OWN_DIR", value_delimiter = ',')]
    pub own_dirs: Vec<PathBuf>,
    /// A tmpfs for the agent's memory tier, mounted if it is not: PATH=SIZE, such as /run/millpond/memory=2Gi.
    #[arg(long, env = "MILLPOND_MEMORY_TIER", value_parser = memory_tier)]
    pub memory_tier: Option<MemoryTier>,
    /// With --mode cleanup: remove the cache as well.
    #[arg(long)]
    pub cache: bool,
    /// With --mode cleanup: remove staging areas also if something that was written is not in its store yet. It is lost then.
    #[arg(long)]
    pub discard_staging: bool,
    /// Address of the API server, without authentication; default: KUBECONFIG, else from inside the cluster.
    #[arg(long, env = "MILLPOND_KUBERNETES_API", hide = true)]
    pub kubernetes_api: Option<String>,
    #[arg(long, value_enum, env = "MILLPOND_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// Where the fusectl file system is mounted.
    #[arg(long, env = "MILLPOND_FUSECTL_DIR", default_value = "/sys/fs/fuse/connections", hide = true)]
    pub fusectl_dir: PathBuf,
    /// For a container, whose /sys is its own: mount fusectl there, and make /sys writable for the readahead of mounts.
    #[arg(long, env = "MILLPOND_MOUNT_FUSECTL")]
    pub mount_fusectl: bool,
}

/// Arguments that have been checked.
#[derive(Clone, Debug)]
pub struct Config {
    pub endpoint: PathBuf,
    pub driver_name: String,
    pub controller: Option<ControllerConfig>,
    pub node: Option<NodeConfig>,
    /// Nothing else is done then.
    pub cleanup: Option<CleanupConfig>,
    pub kubernetes_api: Option<String>,
    pub log_format: LogFormat,
}

#[derive(Clone, Debug)]
pub struct ControllerConfig {
    pub records: RecordsPlace,
    pub allow: Option<AllowList>,
    /// How stores are asked, where a volume's directory is deleted with it.
    pub stores: LimitsConfig,
    /// Of that.
    pub deletion: erasures::Pace,
    /// Of the search for records without a volume.
    pub unclaimed: unclaimed::Pace,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordsPlace {
    Directory(PathBuf),
    Kubernetes,
}

#[derive(Clone, Debug)]
pub struct NodeConfig {
    pub node_id: String,
    pub state_dir: PathBuf,
    pub broker_socket: PathBuf,
    pub agent_uid: u32,
    pub kubelet_dirs: Vec<PathBuf>,
    pub cache_roots: Vec<PathBuf>,
    pub agent_source_wait: Duration,
    pub handover_wait: Duration,
    pub agent_hang_limit: Duration,
    pub fusectl_dir: PathBuf,
    pub mount_fusectl: bool,
    pub events: bool,
    pub own_dirs: Vec<PathBuf>,
    pub memory_tier: Option<MemoryTier>,
    pub pace: Pace,
}

/// Times that no operator has to choose; tests are less patient.
#[derive(Clone, Debug)]
pub struct Pace {
    /// An agent takes a mount over without asking its source: this is for starting a worker on a busy machine.
    pub adopt_limit: Duration,
    /// Between two comparisons of what agent, broker and kernel hold. What is found twice is mended.
    pub compare_every: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { adopt_limit: budget::ADOPT.time, compare_every: Duration::from_secs(5) }
    }
}

/// What there may be on this node.
#[derive(Clone, Debug)]
pub struct CleanupConfig {
    pub kubelet_dirs: Vec<PathBuf>,
    pub state_dir: PathBuf,
    pub broker_socket: PathBuf,
    pub endpoint: PathBuf,
    pub driver_name: String,
    pub own_dirs: Vec<PathBuf>,
    pub cache_roots: Vec<PathBuf>,
    pub memory_tier: Option<PathBuf>,
    pub with_cache: bool,
    /// Whatever waits in staging areas is lost.
    pub discard_staging: bool,
    /// The program that knows what a staging area holds: node-agent.
    pub agent: PathBuf,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    #[error("--endpoint {0:?} is not a unix socket: write unix:///path/to/csi.sock")]
    Endpoint(String),
    #[error(
        "--driver-name {0:?} is not valid: at most 63 characters of A-Z a-z 0-9 . -, a letter at both ends"
    )]
    DriverName(String),
    #[error("--node-id is missing: mode node needs this node's name")]
    NoNodeId,
    #[error("--{flag} {} must be an absolute path", path.display())]
    Relative { flag: &'static str, path: PathBuf },
    #[error("--agent-source-wait must be between 1s and 100s: kubelet itself gives up after 120s")]
    SourceWait,
    #[error("--agent-hang-limit must be at least 2s: a busy machine looks like an agent that hangs")]
    AgentHangLimit,
    #[error("--allow-config {}: {why}", path.display())]
    Allow { path: PathBuf, why: String },
}

/// Only what matters here, so that the agent's own configuration file can be given.
#[derive(serde::Deserialize)]
struct AllowFile {
    allow: AllowList,
    #[serde(default)]
    store: StoreTable,
}

#[derive(Default, serde::Deserialize)]
#[serde(default)]
struct StoreTable {
    tls_min: TlsVersion,
    proxy: Option<ProxyUrl>,
    no_proxy: Vec<Direct>,
    forbidden_networks: Vec<Network>,
}

/// Requests at once, of all directories that are being deleted.
const STORE_REQUESTS: usize = 32;

impl StoreTable {
    fn limits(self, allow: Option<&AllowList>) -> LimitsConfig {
        // A name there would be an odd cluster's; it is not resolved here.
        let api_server =
            std::env::var("KUBERNETES_SERVICE_HOST").ok().and_then(|address| address.parse().ok());
        let Self { tls_min, proxy, no_proxy, forbidden_networks } = self;
        let egress = EgressConfig {
            named: allow.map(|allow| allow.endpoints.clone()).unwrap_or_default(),
            forbidden: forbidden_networks.into_iter().chain(api_server).collect(),
            proxy: proxy.map(|url| Proxy { url, except: no_proxy }),
        };
        LimitsConfig { requests: STORE_REQUESTS, tls_min, egress, ..LimitsConfig::default() }
    }
}

impl Arguments {
    pub fn check(self) -> Result<Config, ConfigError> {
        let endpoint = match self.endpoint.strip_prefix("unix://") {
            Some(path) if path.starts_with('/') && path.len() > 1 => PathBuf::from(path),
            _ => return Err(ConfigError::Endpoint(self.endpoint)),
        };
        let name = self.driver_name;
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
        let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphabetic());
        if name.len() > 63
            || !name.chars().all(legal)
            || !ends(name.chars().next())
            || !ends(name.chars().last())
        {
            return Err(ConfigError::DriverName(name));
        }
        absolute("state-dir", &self.state_dir)?;
        self.own_dirs.iter().try_for_each(|path| absolute("own-dir", path))?;
        if let Some(tier) = &self.memory_tier {
            absolute("memory-tier", &tier.path)?;
        }
        let (allow, stores) = match &self.allow_config {
            None => (None, StoreTable::default()),
            Some(path) => {
                let wrap = |why: String| ConfigError::Allow { path: path.clone(), why };
                let text = std::fs::read_to_string(path).map_err(|e| wrap(e.to_string()))?;
                let file = toml::from_str::<AllowFile>(&text).map_err(|e| wrap(e.message().to_owned()))?;
                (Some(file.allow), file.store)
            }
        };
        let controller = matches!(self.mode, Mode::Controller | Mode::All).then(|| ControllerConfig {
            records: match self.records {
                RecordsIn::Directory => RecordsPlace::Directory(self.state_dir.join("volumes")),
                RecordsIn::Kubernetes => RecordsPlace::Kubernetes,
            },
            stores: stores.limits(allow.as_ref()),
            deletion: erasures::Pace::default(),
            allow,
            unclaimed: unclaimed::Pace::default(),
        });
        let cleanup = (self.mode == Mode::Cleanup).then(|| CleanupConfig {
            kubelet_dirs: self.kubelet_dirs.clone(),
            state_dir: self.state_dir.clone(),
            broker_socket: self.broker_socket.clone(),
            endpoint: endpoint.clone(),
            driver_name: name.clone(),
            own_dirs: self.own_dirs.clone(),
            cache_roots: self.cache_roots.clone(),
            memory_tier: self.memory_tier.as_ref().map(|tier| tier.path.clone()),
            with_cache: self.cache,
            discard_staging: self.discard_staging,
            // They come in one image, and in one directory.
            agent: std::env::current_exe().unwrap_or_default().with_file_name("node-agent"),
        });
        let node = match self.mode {
            Mode::Controller | Mode::Cleanup => None,
            Mode::Node | Mode::All => {
                absolute("broker-socket", &self.broker_socket)?;
                self.kubelet_dirs.iter().try_for_each(|path| absolute("kubelet-dir", path))?;
                self.cache_roots.iter().try_for_each(|path| absolute("cache-root", path))?;
                if !(1..=100).contains(&self.agent_source_wait.as_secs()) {
                    return Err(ConfigError::SourceWait);
                }
                if self.agent_hang_limit < AGENT_HANG_LIMIT_MIN {
                    return Err(ConfigError::AgentHangLimit);
                }
                Some(NodeConfig {
                    node_id: self.node_id.filter(|id| !id.is_empty()).ok_or(ConfigError::NoNodeId)?,
                    state_dir: self.state_dir,
                    broker_socket: self.broker_socket,
                    agent_uid: self.agent_uid,
                    kubelet_dirs: self.kubelet_dirs,
                    cache_roots: self.cache_roots,
                    agent_source_wait: self.agent_source_wait,
                    handover_wait: self.handover_wait,
                    agent_hang_limit: self.agent_hang_limit,
                    fusectl_dir: self.fusectl_dir,
                    mount_fusectl: self.mount_fusectl,
                    events: self.events,
                    own_dirs: self.own_dirs,
                    memory_tier: self.memory_tier,
                    pace: Pace::default(),
                })
            }
        };
        Ok(Config {
            endpoint,
            driver_name: name,
            controller,
            node,
            cleanup,
            kubernetes_api: self.kubernetes_api,
            log_format: self.log_format,
        })
    }
}

fn absolute(flag: &'static str, path: &Path) -> Result<(), ConfigError> {
    match path.is_absolute() {
        true => Ok(()),
        false => Err(ConfigError::Relative { flag, path: path.to_owned() }),
    }
}

fn memory_tier(text: &str) -> Result<MemoryTier, String> {
    let tier = text.rsplit_once('=').and_then(|(path, size)| {
        let bytes = volume::parse_bytes(size).filter(|bytes| *bytes > 0)?;
        Some(MemoryTier { path: PathBuf::from(path), bytes })
    });
    tier.ok_or_else(|| "write PATH=SIZE such as /run/millpond/memory=2Gi".to_owned())
}

fn duration(text: &str) -> Result<Duration, String> {
    volume::parse_duration(text).ok_or_else(|| "write a duration such as 20s".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(arguments: &[&str]) -> Result<Config, ConfigError> {
        Arguments::try_parse_from(["csi-plugin"].iter().chain(arguments)).unwrap().check()
    }

    #[test]
    fn modes_ask_for_what_they_need() {
        let both = check(&["--node-id", "n1", "--kubelet-dir", "/a", "--kubelet-dir", "/b"]).unwrap();
        assert!(both.controller.is_some());
        let node = both.node.unwrap();
        assert_eq!(node.kubelet_dirs, [PathBuf::from("/a"), PathBuf::from("/b")]);
        assert_eq!(node.handover_wait, link::budget::PLUGIN_LEAVES.time);
        assert_eq!(both.endpoint, Path::new("/csi/csi.sock"));
        let controller = check(&["--mode", "controller", "--records", "kubernetes"]).unwrap();
        assert!(controller.node.is_none());
        assert_eq!(controller.controller.unwrap().records, RecordsPlace::Kubernetes);
        let cleanup = check(&["--mode", "cleanup", "--cache", "--own-dir", "/a,/b"]).unwrap();
        assert!(cleanup.node.is_none() && cleanup.controller.is_none());
        assert_eq!(cleanup.cleanup.unwrap().own_dirs, [PathBuf::from("/a"), PathBuf::from("/b")]);
        assert_eq!(check(&["--mode", "node"]).unwrap_err(), ConfigError::NoNodeId);
    }

    #[test]
    fn wrong_values_say_what_to_write() {
        assert!(matches!(check(&["--endpoint", "tcp://x:1"]), Err(ConfigError::Endpoint(_))));
        for name in ["-x.io", "x.io1", "a_b", &"x".repeat(64)] {
            assert!(
                matches!(check(&[&format!("--driver-name={name}")]), Err(ConfigError::DriverName(_))),
                "{name}"
            );
        }
        let node = ["--mode", "node", "--node-id", "n"];
        let with = |more: &[&str]| check(&[&node[..], more].concat());
        assert!(matches!(
            with(&["--cache-root", "x"]),
            Err(ConfigError::Relative { flag: "cache-root", .. })
        ));
        assert_eq!(with(&["--agent-source-wait", "10m"]).unwrap_err(), ConfigError::SourceWait);
        assert_eq!(with(&["--agent-hang-limit", "1s"]).unwrap_err(), ConfigError::AgentHangLimit);
        assert!(matches!(with(&["--own-dir", "x"]), Err(ConfigError::Relative { flag: "own-dir", .. })));
        for wrong in ["/m", "/m=", "/m=0", "/m=lots"] {
            let parsed = Arguments::try_parse_from(["csi-plugin", "--memory-tier", wrong]);
            assert!(parsed.unwrap_err().to_string().contains("PATH=SIZE"), "{wrong}");
        }
        let tier = with(&["--memory-tier", "/run/m=2Gi"]).unwrap().node.unwrap().memory_tier.unwrap();
        assert_eq!((tier.path, tier.bytes), (PathBuf::from("/run/m"), 2 << 30));
        assert!(matches!(with(&["--allow-config", "/nonexistent"]), Err(ConfigError::Allow { .. })));
    }
}
