//! Seeded fakes and fault injectors for Millpond's tests: an S3 server, its faults, a whole HDFS, hostile stores, file contents,
//! child processes.
//!
//! Nothing here is part of the product. Everything that decides by chance takes a seed and prints it; everything that
//! starts a process or a server ends it on drop.

pub mod content;
pub mod fault_fs;
pub mod faults;
pub mod hdfs;
pub mod hostile;
pub mod passthrough;
pub mod process;
pub mod proxy;
pub mod s3;
pub mod servers;
pub mod tls;
