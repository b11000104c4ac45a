//! What a server holds, and the few steps that all its operations share.

use super::Lies;
use super::access::Guard;
use super::answers::failed;
use super::bucket::{Bucket, Buckets};
use super::conditions::Condition;
use super::draft::Draft;
use super::meta::Meta;
use super::quota::Quota;
use super::uploads::Uploads;
use s3s::{S3Result, s3_error};
use std::sync::Arc;

pub(super) struct Service {
    pub(super) buckets: Buckets,
    pub(super) guard: Arc<Guard>,
    pub(super) uploads: Arc<Uploads>,
    pub(super) quota: Quota,
    pub(super) limits: Limits,
    pub(super) lies: Lies,
}

pub(super) struct Limits {
    pub(super) part_min: u64,
    pub(super) copy_max: u64,
}

impl Service {
    pub(super) fn bucket(&self, name: &str) -> S3Result<Arc<dyn Bucket>> {
        let buckets = self.buckets.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        buckets.get(name).cloned().ok_or_else(|| s3_error!(NoSuchBucket, "no such bucket"))
    }

    pub(super) fn object(&self, bucket: &str, key: &str) -> S3Result<(Arc<dyn Bucket>, Meta)> {
        let bucket = self.bucket(bucket)?;
        let meta = bucket.stat(key).map_err(failed)?;
        Ok((bucket, meta.ok_or_else(|| s3_error!(NoSuchKey, "no such key"))?))
    }

    /// Puts, within the quota.
    pub(super) fn store(
        &self,
        bucket: &Arc<dyn Bucket>,
        key: &str,
        draft: Draft,
        condition: &Condition,
    ) -> S3Result<Meta> {
        let replaced = || Ok(bucket.stat(key).map_err(failed)?.map_or(0, |meta| meta.size));
        self.quota.within((&self.buckets, &self.uploads), draft.body.size(), replaced, || {
            Ok(bucket.put_if(key, draft, condition).map_err(failed)??)
        })
    }
}
