//! A bucket that stores nothing: N objects of one size, named by a pattern, with computed content.

use super::bucket::{Body, Bucket, Next, Visitor};
use super::meta::Meta;
use crate::content;
use bytes::Bytes;
use futures::StreamExt;
use std::io;
use std::ops::{Bound, Range};
use std::time::{Duration, SystemTime};

/// Keys are `pattern` with `{n}` replaced by the object's number and `{dir}` by its directory's, zero-padded so that
/// number order is key order. `{dir}`, if used, must come first.
#[derive(Clone, Debug)]
pub struct Synthetic {
    pub count: u64,
    pub size: u64,
    pub pattern: String,
    /// Objects in one `{dir}`.
    pub per_dir: u64,
}

impl Default for Synthetic {
    fn default() -> Self {
        Self { count: 1000, size: 100_000, pattern: "file-{n}".into(), per_dir: 1000 }
    }
}

impl Synthetic {
    pub fn key(&self, n: u64) -> String {
        let width = self.count.saturating_sub(1).to_string().len();
        let dirs = self.count.div_ceil(self.per_dir.max(1));
        let dir_width = dirs.saturating_sub(1).to_string().len();
        let dir = format!("{:0dir_width$}", n / self.per_dir.max(1));
        self.pattern.replace("{dir}", &dir).replace("{n}", &format!("{n:0width$}"))
    }

    /// The content of an object is that of [`content::id`] of its key.
    pub fn content_id(key: &str) -> u64 {
        content::id(key)
    }

    /// The first number whose key is not below `start`.
    fn seek(&self, start: Bound<&str>) -> u64 {
        let below = |n: u64| match start {
            Bound::Included(key) => self.key(n).as_str() < key,
            Bound::Excluded(key) => self.key(n).as_str() <= key,
            Bound::Unbounded => false,
        };
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low + (high - low) / 2;
            if below(middle) { low = middle + 1 } else { high = middle }
        }
        low
    }

    fn meta(&self, key: &str) -> Meta {
        let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let etag = format!("{:016x}-{:x}", content::id(key), self.size);
        Meta { size: self.size, etag, modified, about: None }
    }
}

/// A body of computed content.
pub(super) fn computed(id: u64, range: Range<u64>) -> Body {
    let pieces = futures::stream::unfold(range, move |rest| async move {
        if rest.is_empty() {
            return None;
        }
        let end = rest.end.min(rest.start.saturating_add(512 << 10));
        Some((Ok(Bytes::from(content::bytes(id, rest.start..end))), end..rest.end))
    });
    pieces.boxed()
}

impl Bucket for Synthetic {
    fn scan(&self, start: Bound<&str>, visit: Visitor<'_>) -> io::Result<()> {
        let mut n = self.seek(start);
        while n < self.count {
            let key = self.key(n);
            n = match visit(&key, &self.meta(&key)) {
                Next::Continue => n + 1,
                Next::SkipTo(key) => self.seek(Bound::Included(&key)).max(n + 1),
                Next::Stop => break,
            };
        }
        Ok(())
    }

    fn stat(&self, key: &str) -> io::Result<Option<Meta>> {
        let n = self.seek(Bound::Included(key));
        Ok((n < self.count && self.key(n) == key).then(|| self.meta(key)))
    }

    fn read(&self, key: &str, _: &Meta, range: Range<u64>) -> io::Result<Body> {
        Ok(computed(Self::content_id(key), range))
    }

    fn put(&self, _: &str, _: Bytes) -> io::Result<Meta> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn delete(&self, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
}
