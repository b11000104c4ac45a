//! The few acts that need privileges: asked of the broker, or of the program that embeds the agent.

use link::Refusal;
use link::broker::{BrokerAnswer, BrokerRequest, MountId, Report};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The broker behind its socket, or the embedding program on a laptop.
#[async_trait::async_trait]
pub trait Privileged: Send + Sync {
    async fn ask(&self, request: BrokerRequest, fds: Vec<OwnedFd>) -> Result<BrokerAnswer, Refusal>;
    fn connected(&self) -> bool;
}

/// Tells the owner of a mount what happened to it. Waits for nothing: a lost Event harms no mount.
pub(crate) fn report(privileged: &Arc<dyn Privileged>, runtime: &Handle, mount: MountId, report: Report) {
    let privileged = privileged.clone();
    runtime.spawn(async move {
        if let Err(error) = privileged.ask(BrokerRequest::Report { mount, report }, Vec::new()).await {
            tracing::debug!(%mount, %error, "a report did not reach the broker");
        }
    });
}
