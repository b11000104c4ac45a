//! The node agent: owns everything that is cached on the node, the network, and the life of every worker.
//!
//! Never here: a mount system call (the broker's), a FUSE request (a worker's), a Kubernetes API call.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod admission;
pub mod api;
pub mod app;
mod broker_client;
mod child_log;
pub mod config;
mod directories;
#[cfg(test)]
#[allow(dead_code, reason = "each crate uses some of it")]
#[path = "../../testkit/src/golden.rs"]
mod golden;
mod hadoop;
mod handoff;
mod heartbeat;
mod lock;
mod log_limit;
#[cfg(test)]
mod manifests;
mod memory;
mod metrics;
pub mod prefetch;
pub mod privileged;
mod run;
mod serve;
mod single_flight;
mod source;
mod staging;
mod state;
pub mod supervisor;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod volumes;

pub use app::App;
pub use config::Config;
pub use run::run;
pub use staging::STEPS as STAGING_STEPS;
pub use staging::what_waits;
