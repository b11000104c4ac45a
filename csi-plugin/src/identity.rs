//! Who this plugin is, and that its process lives.

use proto::csi::v1::identity_server::Identity;
use proto::csi::v1::plugin_capability::{Service, Type, service};
use proto::csi::v1::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse,
};
use tonic::{Request, Response, Status};

#[derive(Clone, Debug)]
pub struct IdentityService {
    pub driver_name: String,
    pub has_controller: bool,
}

#[async_trait::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.driver_name.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: Default::default(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let service = |kind: service::Type| PluginCapability {
            r#type: Some(Type::Service(Service { r#type: kind.into() })),
        };
        let capabilities =
            self.has_controller.then(|| service(service::Type::ControllerService)).into_iter().collect();
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    /// Ready because it answers. A liveness probe that looked at the agent or the store would restart the broker in
    /// an outage, when it is needed most.
    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}
