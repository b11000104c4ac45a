//! The CSI socket of the node, called as kubelet calls it.

use super::machine::Machine;
use super::names::CSI_SOCKET;
use crate::node::{capability, channel};
use anyhow::{Context, Result};
use proto::csi::v1 as csi;
use proto::csi::v1::node_client::NodeClient;
use serde_json::Value;
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// Targets that kubelet does not look at.
pub const BY_HAND: &str = "/var/lib/kubelet/millpond-e2e";

#[derive(Debug)]
pub struct NodeSocket {
    channel: Channel,
    runtime: tokio::runtime::Runtime,
}

/// A published volume: what unpublish needs.
#[derive(Clone, Debug)]
pub struct Published {
    pub id: String,
    /// As the node sees it.
    pub target: String,
    pub took: Duration,
}

impl NodeSocket {
    pub fn open(machine: &Machine) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let channel = channel(&machine.path(CSI_SOCKET), runtime.handle())?;
        Ok(Self { channel, runtime })
    }

    /// Publishes the volume of a PersistentVolume for a pod that kubelet does not know.
    pub fn publish(
        &self,
        machine: &Machine,
        volume: &Value,
        pod_uid: &str,
        secrets: &[(&str, &str)],
    ) -> Result<Published> {
        let source = &volume["spec"]["csi"];
        let id = source["volumeHandle"].as_str().context("a CSI volume has a handle")?.to_owned();
        // Not below pods/: kubelet removes directories of pods that it does not know.
        let parent = format!("{BY_HAND}/{pod_uid}");
        std::fs::create_dir_all(machine.path(&parent))?;
        let target = format!("{parent}/mount");
        let pair = |(k, v): (&String, &Value)| Some((k.clone(), v.as_str()?.to_owned()));
        let mut context: std::collections::HashMap<_, _> =
            source["volumeAttributes"].as_object().into_iter().flatten().filter_map(pair).collect();
        for (key, value) in [("name", "by-hand"), ("namespace", super::names::TENANT), ("uid", pod_uid)] {
            context.insert(format!("csi.storage.k8s.io/pod.{key}"), value.to_owned());
        }
        context.insert("csi.storage.k8s.io/ephemeral".to_owned(), "false".to_owned());
        let request = csi::NodePublishVolumeRequest {
            volume_id: id.clone(),
            target_path: target.clone(),
            volume_capability: Some(capability()),
            readonly: true,
            secrets: secrets.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            volume_context: context.into_iter().collect(),
            ..Default::default()
        };
        let begun = Instant::now();
        self.call(NodeClient::new(self.channel.clone()).node_publish_volume(request))?;
        Ok(Published { id, target, took: begun.elapsed() })
    }

    /// How long it took.
    pub fn unpublish(&self, published: &Published) -> Result<Duration> {
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: published.id.clone(),
            target_path: published.target.clone(),
        };
        let begun = Instant::now();
        self.call(NodeClient::new(self.channel.clone()).node_unpublish_volume(request))?;
        Ok(begun.elapsed())
    }

    fn call<T>(&self, call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>) -> Result<T> {
        let limited = async { tokio::time::timeout(Duration::from_secs(60), call).await };
        let answer = self.runtime.block_on(limited).context("no answer within 60 s")?;
        answer
            .map(tonic::Response::into_inner)
            .map_err(|s| anyhow::anyhow!("{:?}: {}", s.code(), s.message()))
    }
}
