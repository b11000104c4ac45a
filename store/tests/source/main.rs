//! Sources over real servers and real directories. One program, because each would link all of it again.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too; clippy only knows #[test] functions.

mod access;
#[path = "../common/mod.rs"]
mod common;
mod contract;
mod directory;
mod fairness;
mod faults;
mod keys;
mod refusals;
mod web;
