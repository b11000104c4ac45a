//! The CSI driver: what Kubernetes calls (identity, controller, node) and the mount broker, the only privileged code.
//!
//! Nothing here reads a source, touches the inside of a mount or calls the Kubernetes API.

pub mod broker;
pub mod busy;
pub mod config;
pub mod controller;
pub mod identity;
pub mod node;
pub mod request;
pub mod server;
pub mod status;
