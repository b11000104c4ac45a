//! The node agent: owns everything that is cached on the node, the network, and the life of every worker.
//!
//! Never here: a mount system call (the broker's), a FUSE request (a worker's), a Kubernetes API call.

#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod api;
pub mod app;
mod asked;
mod beat;
mod broker_client;
mod candidate;
mod collect;
pub mod config;
mod departure;
mod directories;
mod flights;
#[cfg(test)]
#[allow(dead_code, reason = "each crate uses some of it")]
#[path = "../../testkit/src/golden.rs"]
mod golden;
mod handover;
mod heals;
mod health;
mod http;
#[cfg(test)]
mod manifests;
mod memory;
mod metrics;
mod neighbours;
mod oom;
mod owner;
pub mod privileged;
mod profile;
pub mod publish;
mod questions;
mod scope;
mod seldom;
mod serve;
mod stale;
mod state;
mod supervisor;
#[cfg(test)]
mod testing;
mod together;
mod warm;

pub use app::App;
pub use config::Config;
