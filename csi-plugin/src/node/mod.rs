//! The node service: requests parsed, serialised per volume, handed to the broker on threads that may block.

mod context;
pub mod publish;
mod stats;
mod unpublish;

use crate::broker::Broker;
use crate::calls;
use crate::request::not_offered;
use proto::csi::v1::node_server::Node;
use proto::csi::v1::node_service_capability::{Rpc, Type, rpc};
use proto::csi::v1::*;
use std::sync::Arc;
use tonic::{Request, Response, Status};

#[derive(Clone, Debug)]
pub struct NodeService {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) broker: Arc<Broker>,
}

impl NodeService {
    pub fn new(broker: Arc<Broker>) -> Self {
        Self { inner: Arc::new(Inner { broker }) }
    }
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        calls::blocking(&self.inner, "publish", move |inner| {
            inner.publish(&request).map(|()| NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        calls::blocking(&self.inner, "unpublish", move |inner| {
            inner.unpublish(&request).map(|()| NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        calls::blocking(&self.inner, "volume stats", move |inner| inner.stats(&request)).await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let offered = [
            rpc::Type::GetVolumeStats,
            rpc::Type::SingleNodeMultiWriter,
            rpc::Type::VolumeMountGroup,
            rpc::Type::VolumeCondition,
        ];
        let capability =
            |kind: rpc::Type| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })) };
        Ok(Response::new(NodeGetCapabilitiesResponse {
            capabilities: offered.into_iter().map(capability).collect(),
        }))
    }

    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.inner.broker.config.node_id.clone(),
            max_volumes_per_node: 0,
            accessible_topology: None,
        }))
    }

    not_offered! {
        node_stage_volume: NodeStageVolumeRequest -> NodeStageVolumeResponse,
        node_unstage_volume: NodeUnstageVolumeRequest -> NodeUnstageVolumeResponse,
        node_expand_volume: NodeExpandVolumeRequest -> NodeExpandVolumeResponse,
    }
}
