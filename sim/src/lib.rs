//! A node in one process: the decisions of agent and broker are the product's own, everything else is simulated.
//!
//! ```text
//!   kubelet ──► broker: mounts_table, compare, expiry, ◄──► agents: a supervisor::machine for each mount
//!            handoff::machine, renew::schedule
//!                  │ messages take time and get lost          │ actions take time and fail
//!                  ▼                                          ▼
//!               kernel: connections, requests  ◄────────── workers: take, answer, die, stand still
//! ```
//!
//! No thread, no process, no root, no waiting: an hour of a node takes milliseconds. What happens is decided by a seed; a
//! history that fails prints it, and is the same again.
//!
//! Beside it, for what is fetched before it is asked for: [`small_files`] (the prefetch of a directory) and [`large_file`] (the
//! windows of sequential readers), each with its link and its programs.
//!
//! Not here: eviction, which depends on nothing that dies.

pub mod agent;
pub mod broker;
pub mod handoff;
pub mod kernel;
mod kubelet;
pub mod large_file;
pub mod queue;
pub mod small_files;
pub mod world;

pub use world::{Plan, STEPS, Summary, World};
