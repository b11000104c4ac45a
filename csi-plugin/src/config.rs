//! The command line, parsed and checked as a whole before anything is bound or mounted.

use clap::{Parser, ValueEnum};
use std::path::{Path, PathBuf};
use std::time::Duration;
use volume::AllowList;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    Controller,
    Node,
    All,
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
    /// TOML file whose table [allow] limits the sources that CreateVolume accepts; without it the node decides.
    #[arg(long, env = "MILLPOND_ALLOW_CONFIG")]
    pub allow_config: Option<PathBuf>,
    #[arg(long, value_enum, env = "MILLPOND_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// Where the fusectl file system is mounted.
    #[arg(long, env = "MILLPOND_FUSECTL_DIR", default_value = "/sys/fs/fuse/connections", hide = true)]
    pub fusectl_dir: PathBuf,
    /// Mount fusectl if it is not mounted: for a container, whose /sys is its own.
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
    pub log_format: LogFormat,
}

#[derive(Clone, Debug)]
pub struct ControllerConfig {
    pub records: PathBuf,
    pub allow: Option<AllowList>,
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
    pub fusectl_dir: PathBuf,
    pub mount_fusectl: bool,
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
    #[error("--allow-config {}: {why}", path.display())]
    Allow { path: PathBuf, why: String },
}

/// Only the table that matters here, so that the agent's own configuration file can be given.
#[derive(serde::Deserialize)]
struct AllowFile {
    allow: AllowList,
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
        let allow = match &self.allow_config {
            None => None,
            Some(path) => {
                let wrap = |why: String| ConfigError::Allow { path: path.clone(), why };
                let text = std::fs::read_to_string(path).map_err(|e| wrap(e.to_string()))?;
                Some(toml::from_str::<AllowFile>(&text).map_err(|e| wrap(e.message().to_owned()))?.allow)
            }
        };
        let controller = (self.mode != Mode::Node)
            .then(|| ControllerConfig { records: self.state_dir.join("volumes"), allow });
        let node = match self.mode {
            Mode::Controller => None,
            Mode::Node | Mode::All => {
                absolute("broker-socket", &self.broker_socket)?;
                self.kubelet_dirs.iter().try_for_each(|path| absolute("kubelet-dir", path))?;
                self.cache_roots.iter().try_for_each(|path| absolute("cache-root", path))?;
                if !(1..=100).contains(&self.agent_source_wait.as_secs()) {
                    return Err(ConfigError::SourceWait);
                }
                Some(NodeConfig {
                    node_id: self.node_id.filter(|id| !id.is_empty()).ok_or(ConfigError::NoNodeId)?,
                    state_dir: self.state_dir,
                    broker_socket: self.broker_socket,
                    agent_uid: self.agent_uid,
                    kubelet_dirs: self.kubelet_dirs,
                    cache_roots: self.cache_roots,
                    agent_source_wait: self.agent_source_wait,
                    fusectl_dir: self.fusectl_dir,
                    mount_fusectl: self.mount_fusectl,
                })
            }
        };
        Ok(Config { endpoint, driver_name: name, controller, node, log_format: self.log_format })
    }
}

fn absolute(flag: &'static str, path: &Path) -> Result<(), ConfigError> {
    match path.is_absolute() {
        true => Ok(()),
        false => Err(ConfigError::Relative { flag, path: path.to_owned() }),
    }
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
        assert_eq!(both.node.unwrap().kubelet_dirs, [PathBuf::from("/a"), PathBuf::from("/b")]);
        assert_eq!(both.endpoint, Path::new("/csi/csi.sock"));
        assert!(check(&["--mode", "controller"]).unwrap().node.is_none());
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
        assert!(matches!(with(&["--allow-config", "/nonexistent"]), Err(ConfigError::Allow { .. })));
    }
}
