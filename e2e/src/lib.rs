//! A node without Kubernetes: the real processes, a real S3 server, and pods that are processes in mount namespaces.

pub mod clock;
pub mod content;
pub mod oracle;
pub mod tree;
