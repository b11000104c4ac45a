//! What a node keeps: object data in sparse files (`data`), names and attributes in a memory map (`meta`).
//!
//! Both may be thrown away at any doubt. Neither knows of FUSE, CSI or processes.

pub mod data;
/// Where the golden files of this crate lie.
#[cfg(test)]
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
#[cfg(test)]
#[allow(dead_code, reason = "each crate uses some of it")]
#[path = "../../testkit/src/golden.rs"]
mod golden;
pub mod meta;
