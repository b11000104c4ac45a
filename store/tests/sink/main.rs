//! What is written is there, once, or the error says why not.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too; clippy only knows #[test] functions.

#[path = "../common/mod.rs"]
mod common;
mod directory;
mod erase;
mod s3;
mod uploads;
