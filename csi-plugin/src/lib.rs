//! The CSI driver: what Kubernetes calls (identity, controller, node) and the mount broker, the only privileged code.
//!
//! Nothing here reads a source or touches the inside of a mount. The controller asks the Kubernetes API, and a store only to
//! delete a volume's directory with it; the node only posts Events to the API and never waits for it.

pub mod broker;
pub mod busy;
mod calls;
pub mod cleanup;
pub mod cluster;
pub mod config;
pub mod controller;
pub mod events;
/// Where the golden files of this crate lie.
#[cfg(test)]
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
#[cfg(test)]
#[allow(dead_code, reason = "each crate uses some of it")]
#[path = "../../testkit/src/golden.rs"]
mod golden;
mod host;
pub mod identity;
pub mod node;
mod own_dir;
pub mod request;
pub mod server;
pub mod status;
