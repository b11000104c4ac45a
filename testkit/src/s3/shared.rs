//! What all connections of a server have in common.

use super::access::Guard;
use super::adapter::Adapter;
use super::bucket::Buckets;
use super::checksums::Sums;
use super::execute::Late;
use super::oss::Oss;
use super::stats::{Counters, Stats};
use super::uploads::Uploads;
use crate::faults::Faults;
use s3s::service::S3Service;
use std::sync::Arc;

#[derive(Clone)]
pub(super) struct Shared {
    pub(super) s3: S3Service,
    pub(super) speaks: Speaks,
    pub(super) guard: Arc<Guard>,
    pub(super) buckets: Buckets,
    pub(super) uploads: Arc<Uploads>,
    pub(super) checksums: bool,
    pub(super) faults: Faults,
    pub(super) counters: Arc<Counters>,
    pub(super) late: Late,
}

impl Shared {
    pub(super) fn stats(&self) -> Stats {
        self.counters.snapshot(&self.uploads)
    }
}

#[derive(Clone)]
pub(super) enum Speaks {
    /// `s3s` looks at signatures.
    S3,
    /// As S3 does, but for headers and signatures.
    Oss(Oss),
    Other(Arc<dyn Adapter>),
}

impl Speaks {
    pub(super) fn sums(&self) -> Sums {
        match self {
            Self::S3 => Sums::S3,
            Self::Oss(_) => Sums::Oss,
            Self::Other(adapter) => adapter.sums(),
        }
    }
}
