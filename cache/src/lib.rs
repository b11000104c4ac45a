//! What a node keeps: object data in sparse files (`data`), names and attributes in a memory map (`meta`).
//!
//! Both may be thrown away at any doubt. Neither knows of FUSE, CSI or processes.

pub mod data;
pub mod meta;
