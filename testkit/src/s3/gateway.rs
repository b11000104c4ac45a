//! A bucket as gateways in front of a file system have it (versitygw): an empty directory is a common prefix of its
//! parent's listing, and its own listing has nothing.

use super::bucket::{Attempt, Body, Bucket, Visitor};
use super::conditions::Condition;
use super::draft::Draft;
use super::memory::Memory;
use super::meta::Meta;
use bytes::Bytes;
use std::collections::BTreeSet;
use std::io;
use std::ops::{Bound, Range};

#[derive(Default)]
pub struct Gateway {
    objects: Memory,
    /// Each ends in "/".
    directories: BTreeSet<String>,
}

impl Gateway {
    /// With these empty directories ("a/b").
    pub fn with_directories(directories: &[&str]) -> io::Result<Self> {
        let gateway =
            Self { directories: directories.iter().map(|d| format!("{d}/")).collect(), ..Self::default() };
        // A key that the listing of its parent comes upon.
        gateway.directories.iter().try_for_each(|d| gateway.objects.put(d, Bytes::new()).map(drop))?;
        Ok(gateway)
    }
}

impl Bucket for Gateway {
    fn scan(&self, start: Bound<&str>, visit: Visitor<'_>) -> io::Result<()> {
        self.objects.scan(start, visit)
    }
    fn is_directory(&self, key: &str) -> bool {
        self.directories.contains(key)
    }
    fn stat(&self, key: &str) -> io::Result<Option<Meta>> {
        if self.is_directory(key) { Ok(None) } else { self.objects.stat(key) }
    }
    fn read(&self, key: &str, meta: &Meta, range: Range<u64>) -> io::Result<Body> {
        self.objects.read(key, meta, range)
    }
    fn put(&self, key: &str, body: Bytes) -> io::Result<Meta> {
        self.objects.put(key, body)
    }
    fn delete(&self, key: &str) -> io::Result<()> {
        self.objects.delete(key)
    }
    fn put_if(&self, key: &str, draft: Draft, condition: &Condition) -> Attempt<Meta> {
        self.objects.put_if(key, draft, condition)
    }
    fn delete_if(&self, key: &str, condition: &Condition) -> Attempt<()> {
        self.objects.delete_if(key, condition)
    }
}
