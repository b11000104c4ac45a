//! Multipart uploads under way, of all buckets.
//!
//! ```text
//!                  part (again and again)
//!                  ┌──┐
//! CreateMultipart ─┴─► open ──► completed: the object is there
//!                        └────► aborted:   its parts are gone
//! ```
//!
//! After its end an upload is unknown.

use super::digests::{Algorithm, Checksum};
use super::draft::About;
use super::pieces::Pieces;
use crate::content;
use bytes::Bytes;
use s3s::{S3Result, s3_error};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

/// Bucket, key, id: the order in which uploads are listed. Ids of one key are in the order of their beginnings.
type Name = (String, String, String);

#[derive(Debug)]
pub(super) struct Upload {
    pub(super) initiated: SystemTime,
    pub(super) about: About,
    /// Each part brings a checksum of this kind.
    pub(super) algorithm: Option<Algorithm>,
    /// Its checksum would be one of its parts' checksums, which nobody here tells.
    pub(super) composite: bool,
    pub(super) parts: BTreeMap<i32, Part>,
}

#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) body: Bytes,
    pub(super) etag: String,
    pub(super) modified: SystemTime,
    pub(super) checksum: Option<Checksum>,
}

impl Upload {
    pub(super) fn bytes(&self) -> u64 {
        self.parts.values().map(|part| part.body.len() as u64).sum()
    }

    /// Of an object of these parts: where each brought one of the same kind, it is told of the whole.
    pub(super) fn checksum(&self, parts: &[&Part], body: &Pieces) -> Option<Checksum> {
        let algorithm = parts.first()?.checksum.as_ref()?.algorithm;
        let alike = |part: &&Part| part.checksum.as_ref().is_some_and(|sum| sum.algorithm == algorithm);
        (!self.composite && parts.iter().all(alike)).then(|| algorithm.of(body))
    }
}

#[derive(Debug)]
pub(super) struct Uploads {
    /// Nobody mistakes an upload of this process for one of an earlier one.
    born: u128,
    named: AtomicU64,
    /// Before a bucket's lock, where both are taken.
    open: Mutex<BTreeMap<Name, Upload>>,
}

impl Default for Uploads {
    fn default() -> Self {
        let born = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        Self { born, named: AtomicU64::new(0), open: Mutex::default() }
    }
}

/// One page of ListMultipartUploads: key, id, beginning.
pub(super) struct Page {
    pub(super) uploads: Vec<(String, String, SystemTime)>,
    pub(super) is_truncated: bool,
}

impl Uploads {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Name, Upload>> {
        self.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn open(&self, bucket: &str, key: &str, upload: Upload) -> String {
        let id = format!("{:032x}{:08x}", self.born, self.named.fetch_add(1, Ordering::Relaxed));
        self.lock().insert((bucket.to_owned(), key.to_owned(), id.clone()), upload);
        id
    }

    /// Every part is a new version, also of equal bytes, at which nobody looks for it.
    pub(super) fn part_etag(&self, body: &Bytes) -> String {
        format!("{:016x}{:016x}", content::mix(body.len() as u64), self.named.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn with<T>(
        &self,
        (bucket, key, id): (&str, &str, &str),
        act: impl FnOnce(&mut Upload) -> S3Result<T>,
    ) -> S3Result<T> {
        let name = (bucket.to_owned(), key.to_owned(), id.to_owned());
        act(self.lock().get_mut(&name).ok_or_else(|| s3_error!(NoSuchUpload, "no such upload"))?)
    }

    /// Ends the upload if `act` succeeds; meanwhile nobody else sees it.
    pub(super) fn end<T>(
        &self,
        (bucket, key, id): (&str, &str, &str),
        act: impl FnOnce(&Upload) -> S3Result<T>,
    ) -> S3Result<T> {
        let name = (bucket.to_owned(), key.to_owned(), id.to_owned());
        let mut open = self.lock();
        let upload = open.get(&name).ok_or_else(|| s3_error!(NoSuchUpload, "no such upload"))?;
        let done = act(upload)?;
        open.remove(&name);
        Ok(done)
    }

    pub(super) fn count(&self) -> u64 {
        self.lock().len() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        self.lock().values().map(Upload::bytes).sum()
    }

    /// After the upload `id` of `key`, or after all of `key`'s where no id is said.
    pub(super) fn list(
        &self,
        bucket: &str,
        prefix: &str,
        after: Option<(&str, Option<&str>)>,
        max: usize,
    ) -> Page {
        let open = self.lock();
        let start = (bucket.to_owned(), prefix.to_owned(), String::new());
        let is_after = |key: &str, id: &str| match after {
            None => true,
            Some((marker, None)) => key > marker,
            Some((marker, Some(last))) => (key, id) > (marker, last),
        };
        let mut found = open
            .range((Bound::Included(start), Bound::Unbounded))
            .take_while(|((of, key, _), _)| of == bucket && key.starts_with(prefix))
            .filter(|((_, key, id), _)| is_after(key, id))
            .map(|((_, key, id), upload)| (key.clone(), id.clone(), upload.initiated));
        let uploads: Vec<_> = found.by_ref().take(max).collect();
        Page { uploads, is_truncated: found.next().is_some() }
    }
}
