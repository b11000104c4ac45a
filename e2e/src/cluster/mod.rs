//! A real Kubernetes on this machine: started in namespaces of its own, asked through `kubectl`, looked at through `/proc`.
//!
//! The parts come from `e2e/cluster` (scripts that build, configure and start them); this module drives them and judges. What is
//! checked lies in [`checks`]; nothing here knows Millpond's inside: it learns what a cluster's operator learns.

pub mod checks;
pub mod csi;
pub mod kubectl;
pub mod machine;
pub mod names;
pub mod notebook;
pub mod objects;
pub mod places;
mod store_pod;
pub mod suite;
pub mod view;
pub mod waits;

pub use suite::Suite;
