//! The CSI plugin of a test: its process and what a container orchestrator asks of it.

use super::log::{LogTo, Logged, limit_descriptors, spawn};
use super::places::{Places, Version};
use crate::clock::wait_until;
use anyhow::{Result, ensure};
use proto::csi::v1 as csi;
use proto::csi::v1::controller_client::ControllerClient;
use proto::csi::v1::identity_client::IdentityClient;
use proto::csi::v1::node_client::NodeClient;
use proto::csi::v1::volume_capability::access_mode::Mode;
use proto::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;
use tokio::runtime::Handle;
use tonic::Status;
use tonic::transport::Channel;

#[derive(Debug)]
pub struct Plugin {
    logged: Logged,
    channel: Channel,
    runtime: Handle,
}

/// What a plugin's command line says.
#[derive(Debug)]
pub(super) struct PluginOptions {
    pub(super) agent_uid: u32,
    pub(super) cache_roots: Vec<PathBuf>,
    pub(super) hang_limit: Option<Duration>,
    pub(super) failpoint: Option<&'static str>,
    pub(super) version: Version,
    pub(super) log: LogTo,
    pub(super) descriptors: Option<u64>,
    pub(super) allow_config: Option<PathBuf>,
}

impl Plugin {
    /// Returns at once.
    pub(super) fn spawn(places: &Places, options: &PluginOptions, runtime: &Handle) -> Result<Self> {
        let mut command = Command::new(places.bin_of(options.version, "csi-plugin")?);
        command.args(["--mode", "all", "--node-id", "e2e-node"]);
        command.arg("--endpoint").arg(format!("unix://{}", places.csi_socket().display()));
        command.arg("--state-dir").arg(places.state("plugin"));
        command.arg("--broker-socket").arg(places.broker_socket());
        command.arg("--kubelet-dir").arg(places.kubelet());
        command.arg("--agent-uid").arg(options.agent_uid.to_string());
        for root in &options.cache_roots {
            command.arg("--cache-root").arg(root);
        }
        if let Some(config) = &options.allow_config {
            command.arg("--allow-config").arg(config);
        }
        if let Some(limit) = options.hang_limit {
            command.arg("--agent-hang-limit").arg(format!("{}ms", limit.as_millis()));
        }
        command.envs(options.failpoint.map(|step| ("MILLPOND_FAILPOINT", step)));
        limit_descriptors(&mut command, options.descriptors);
        let logged = spawn(&mut command, places, "csi-plugin", options.log)?;
        let channel = super::channel(&places.csi_socket(), runtime)?;
        Ok(Self { logged, channel, runtime: runtime.clone() })
    }

    /// Returns when the plugin answers.
    pub(super) fn start(places: &Places, options: &PluginOptions, runtime: &Handle) -> Result<Self> {
        let mut plugin = Self::spawn(places, options, runtime)?;
        let ready = wait_until(Duration::from_secs(30), || plugin.probe().is_ok() || !plugin.is_alive());
        ensure!(ready && plugin.is_alive(), "the plugin did not become ready");
        Ok(plugin)
    }

    pub fn pid(&self) -> u32 {
        self.logged.process.pid()
    }
    pub fn is_alive(&mut self) -> bool {
        matches!(self.logged.process.child().try_wait(), Ok(None))
    }
    /// None: it lives.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.logged.process.child().try_wait()?)
    }
    pub fn kill(mut self) -> Result<()> {
        self.logged.process.kill().map(drop)
    }
    pub fn terminate(mut self, limit: Duration) -> Result<()> {
        let status = self.logged.process.terminate(limit)?;
        ensure!(status.success(), "the plugin ended with {status}");
        Ok(())
    }

    fn wait<T>(&self, call: impl Future<Output = Result<tonic::Response<T>, Status>>) -> Result<T, Status> {
        // No RPC may take longer; a harness that waited for ever would hide it.
        let limit = Duration::from_secs(60);
        let answer = self.runtime.block_on(async { tokio::time::timeout(limit, call).await });
        answer
            .map_err(|_| Status::deadline_exceeded("no answer within 60 s"))?
            .map(tonic::Response::into_inner)
    }

    pub fn probe(&self) -> Result<csi::ProbeResponse, Status> {
        self.wait(IdentityClient::new(self.channel.clone()).probe(csi::ProbeRequest {}))
    }

    pub fn create(&self, name: &str, parameters: &HashMap<String, String>) -> Result<csi::Volume, Status> {
        self.create_with_secret(name, parameters, HashMap::new())
    }

    /// The same with the provisioner's secret.
    pub(super) fn create_with_secret(
        &self,
        name: &str,
        parameters: &HashMap<String, String>,
        secrets: HashMap<String, String>,
    ) -> Result<csi::Volume, Status> {
        let request = csi::CreateVolumeRequest {
            name: name.to_owned(),
            volume_capabilities: vec![capability()],
            parameters: parameters.clone(),
            secrets,
            ..Default::default()
        };
        let answer = self.wait(ControllerClient::new(self.channel.clone()).create_volume(request))?;
        answer.volume.ok_or_else(|| Status::internal("CreateVolume answered without a volume"))
    }

    pub fn delete(&self, id: &str) -> Result<(), Status> {
        self.delete_with_secret(id, HashMap::new())
    }

    /// The same with the provisioner's secret.
    pub(super) fn delete_with_secret(
        &self,
        id: &str,
        secrets: HashMap<String, String>,
    ) -> Result<(), Status> {
        let request = csi::DeleteVolumeRequest { volume_id: id.to_owned(), secrets };
        self.wait(ControllerClient::new(self.channel.clone()).delete_volume(request)).map(drop)
    }

    pub fn publish(&self, request: csi::NodePublishVolumeRequest) -> Result<(), Status> {
        self.wait(NodeClient::new(self.channel.clone()).node_publish_volume(request)).map(drop)
    }

    pub fn unpublish(&self, id: &str, target: &Path) -> Result<(), Status> {
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            target_path: target.display().to_string(),
        };
        self.wait(NodeClient::new(self.channel.clone()).node_unpublish_volume(request)).map(drop)
    }

    pub fn stats(&self, id: &str, target: &Path) -> Result<csi::NodeGetVolumeStatsResponse, Status> {
        let request = csi::NodeGetVolumeStatsRequest {
            volume_id: id.to_owned(),
            volume_path: target.display().to_string(),
            ..Default::default()
        };
        self.wait(NodeClient::new(self.channel.clone()).node_get_volume_stats(request))
    }
}

/// What a PVC of access mode ReadOnlyMany asks for.
pub fn capability() -> csi::VolumeCapability {
    capability_of(Mode::MultiNodeReaderOnly)
}

pub(super) fn capability_of(mode: Mode) -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}
