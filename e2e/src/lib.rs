//! A node without Kubernetes (the real processes, a real S3 server, and pods that are processes in mount namespaces), and
//! a cluster with it.
//!
//! Nothing here is built on the inside of the product: it gets what operators and orchestrators get (command
//! lines, a configuration file, CSI, the operator API) and looks at what the kernel shows.

pub mod bench;
pub mod clock;
pub mod cluster;
pub mod mountinfo;
pub mod node;
pub mod oracle;
pub mod pages;
pub mod pod;
pub mod processes;
pub mod random;
pub mod scenario;
pub mod supervised;
pub mod tree;
