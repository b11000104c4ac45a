//! A bucket in memory: keys are any strings, also those that no file system could name. Objects may claim to be of any
//! size: what they claim beyond what was put is computed as it is read.

use super::bucket::{Attempt, Body, Bucket, Next, Visitor};
use super::conditions::Condition;
use super::draft::{About, Draft};
use super::meta::Meta;
use super::pieces::Pieces;
use super::synthetic::computed;
use crate::content;
use bytes::Bytes;
use futures::StreamExt;
use std::collections::BTreeMap;
use std::io;
use std::ops::{Bound, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockWriteGuard};
use std::time::SystemTime;

#[derive(Debug, Default)]
pub struct Memory {
    objects: RwLock<BTreeMap<String, (Meta, Content)>>,
    puts: AtomicU64,
}

#[derive(Clone, Debug)]
enum Content {
    Stored(Pieces),
    /// As [`content::bytes`] of [`content::id`] of the key.
    Claimed,
}

impl Memory {
    /// Every put is a new version, also of equal bytes.
    fn etag(&self, of: u64) -> String {
        format!("{of:016x}{:016x}", self.puts.fetch_add(1, Ordering::Relaxed))
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, (Meta, Content)>> {
        self.objects.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Bucket for Memory {
    fn scan(&self, start: Bound<&str>, visit: Visitor<'_>) -> io::Result<()> {
        let objects = self.objects.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut cursor = objects.range::<str, _>((start, Bound::Unbounded));
        while let Some((key, (meta, _))) = cursor.next() {
            match visit(key, meta) {
                Next::Continue => {}
                Next::SkipTo(key) => {
                    cursor = objects.range::<str, _>((Bound::Included(&*key), Bound::Unbounded))
                }
                Next::Stop => break,
            }
        }
        Ok(())
    }

    fn stat(&self, key: &str) -> io::Result<Option<Meta>> {
        let objects = self.objects.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        Ok(objects.get(key).map(|(meta, _)| meta.clone()))
    }

    fn read(&self, key: &str, meta: &Meta, range: Range<u64>) -> io::Result<Body> {
        let objects = self.objects.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let found = objects.get(key).filter(|(current, _)| current == meta);
        let (_, content) = found.ok_or(io::ErrorKind::NotFound)?;
        let Content::Stored(pieces) = content else { return Ok(computed(content::id(key), range)) };
        // In pieces, so that a fault in the middle of the body finds a middle.
        Ok(futures::stream::iter(pieces.slice(range, PIECE).into_iter().map(Ok)).boxed())
    }

    fn put(&self, key: &str, body: Bytes) -> io::Result<Meta> {
        let about = About::default();
        let draft = Draft { body: body.into(), about, parts: None, modified: SystemTime::now() };
        self.put_if(key, draft, &Condition::None).map(|put| put.expect("nothing was expected"))
    }

    fn claim(&self, key: &str, size: u64) -> io::Result<Meta> {
        let meta = Meta { size, etag: self.etag(size), modified: SystemTime::now(), about: None };
        self.write().insert(key.to_owned(), (meta.clone(), Content::Claimed));
        Ok(meta)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.write().remove(key);
        Ok(())
    }

    fn put_if(&self, key: &str, draft: Draft, condition: &Condition) -> Attempt<Meta> {
        // Not of the bytes: to look at each of them would cost a benchmark more than to receive them.
        let of = content::mix(draft.body.size());
        let meta = Meta {
            size: draft.body.size(),
            etag: draft.etag(self.etag(of)),
            modified: draft.modified,
            about: Some(Arc::new(draft.about)),
        };
        let mut objects = self.write();
        if let Err(unmet) = condition.check(objects.get(key).map(|(meta, _)| meta)) {
            return Ok(Err(unmet));
        }
        objects.insert(key.to_owned(), (meta.clone(), Content::Stored(draft.body)));
        Ok(Ok(meta))
    }

    fn delete_if(&self, key: &str, condition: &Condition) -> Attempt<()> {
        let mut objects = self.write();
        if let Err(unmet) = condition.check(objects.get(key).map(|(meta, _)| meta)) {
            return Ok(Err(unmet));
        }
        objects.remove(key);
        Ok(Ok(()))
    }
}

const PIECE: usize = 512 << 10;
