//! A bucket in memory: keys are any strings, also those that no file system could name. Objects may claim to be of any
//! size: what they claim beyond what was put is computed as it is read.

use super::bucket::{Body, Bucket, Meta, Next, Visitor};
use super::synthetic::computed;
use crate::content;
use bytes::Bytes;
use futures::StreamExt;
use std::collections::BTreeMap;
use std::io;
use std::ops::{Bound, Range};
use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

#[derive(Debug, Default)]
pub struct Memory {
    objects: RwLock<BTreeMap<String, (Meta, Content)>>,
    puts: AtomicU64,
}

#[derive(Clone, Debug)]
enum Content {
    Stored(Bytes),
    /// As [`content::bytes`] of [`content::id`] of the key.
    Claimed,
}

impl Memory {
    fn insert(&self, key: &str, size: u64, of: u64, content: Content) -> Meta {
        let number = self.puts.fetch_add(1, Ordering::Relaxed);
        // Every put is a new version, also of equal bytes.
        let etag = format!("{of:016x}{number:016x}");
        let meta = Meta { size, etag, modified: SystemTime::now() };
        let mut objects = self.objects.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        objects.insert(key.to_owned(), (meta.clone(), content));
        meta
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
        let Content::Stored(bytes) = content else { return Ok(computed(content::id(key), range)) };
        let range = range.start as usize..range.end as usize;
        // In pieces, so that a fault in the middle of the body finds a middle.
        let bytes = bytes.slice(range);
        let pieces = (0..bytes.len()).step_by(PIECE);
        let pieces: Vec<_> = pieces.map(|at| Ok(bytes.slice(at..bytes.len().min(at + PIECE)))).collect();
        Ok(futures::stream::iter(pieces).boxed())
    }

    fn put(&self, key: &str, body: Bytes) -> io::Result<Meta> {
        Ok(self.insert(key, body.len() as u64, content::id(&body), Content::Stored(body)))
    }

    fn claim(&self, key: &str, size: u64) -> io::Result<Meta> {
        Ok(self.insert(key, size, size, Content::Claimed))
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.objects.write().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(key);
        Ok(())
    }
}

const PIECE: usize = 512 << 10;
