//! The few acts that need privileges: asked of whoever has them.

use link::Refusal;
use link::broker::{BrokerAnswer, BrokerRequest};
use std::os::fd::OwnedFd;

/// The broker behind its socket, or the embedding program on a laptop.
#[async_trait::async_trait]
pub trait Privileged: Send + Sync {
    async fn ask(&self, request: BrokerRequest, fds: Vec<OwnedFd>) -> Result<BrokerAnswer, Refusal>;
    fn connected(&self) -> bool;
}
