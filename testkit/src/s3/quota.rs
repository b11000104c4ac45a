//! How much a server holds at most: its objects, and the parts of uploads under way.

use super::answers::failed;
use super::bucket::Buckets;
use super::uploads::Uploads;
use super::{Bucket, Next};
use s3s::{S3Error, S3ErrorCode, S3Result};
use std::io;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard};

pub(super) struct Quota {
    pub(super) bytes_max: Option<u64>,
    /// Two writes that fit one by one may not fit together. Before all other locks.
    counting: Mutex<()>,
}

impl Quota {
    pub(super) fn new(bytes_max: Option<u64>) -> Self {
        Self { bytes_max, counting: Mutex::new(()) }
    }

    /// Nothing else is counted or written meanwhile, if anything is counted at all.
    pub(super) fn alone(&self) -> Option<MutexGuard<'_, ()>> {
        let counting = || self.counting.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.bytes_max.map(|_| counting())
    }

    /// Runs `write`, which brings `more` bytes and replaces as many as `fewer` tells, if they fit.
    pub(super) fn within<T>(
        &self,
        (buckets, uploads): (&Buckets, &Uploads),
        more: u64,
        fewer: impl FnOnce() -> S3Result<u64>,
        write: impl FnOnce() -> S3Result<T>,
    ) -> S3Result<T> {
        let Some(bytes_max) = self.bytes_max else { return write() };
        let _alone = self.alone();
        let held = stored(buckets).map_err(failed)?.saturating_add(uploads.bytes());
        if held.saturating_sub(fewer()?).saturating_add(more) > bytes_max {
            return Err(full());
        }
        write()
    }
}

/// In the words of MinIO; AWS is never full.
fn full() -> S3Error {
    let code = S3ErrorCode::Custom("XMinioStorageFull".into());
    let mut error =
        S3Error::with_message(code, "storage backend has reached its minimum free drive threshold");
    error.set_status_code(http::StatusCode::INSUFFICIENT_STORAGE);
    error
}

fn stored(buckets: &Buckets) -> io::Result<u64> {
    let buckets: Vec<Arc<dyn Bucket>> =
        buckets.read().unwrap_or_else(|poisoned| poisoned.into_inner()).values().cloned().collect();
    let mut sum = 0_u64;
    for bucket in buckets {
        bucket.scan(Bound::Unbounded, &mut |_, meta| {
            sum = sum.saturating_add(meta.size);
            Next::Continue
        })?;
    }
    Ok(sum)
}
