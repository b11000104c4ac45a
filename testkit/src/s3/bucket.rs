//! What a bucket can do, whatever holds its objects: find keys in order, tell their metadata, read and change them.

use super::conditions::{Condition, Unmet};
use super::draft::Draft;
use super::meta::Meta;
use bytes::Bytes;
use futures::stream::BoxStream;
use std::collections::BTreeMap;
use std::io;
use std::ops::{Bound, Range};
use std::sync::{Arc, RwLock};

/// What a visitor of [`Bucket::scan`] wants next.
#[derive(Debug)]
pub enum Next {
    Continue,
    /// Go on with the first key at or after this one.
    SkipTo(String),
    Stop,
}

pub(super) type Buckets = Arc<RwLock<BTreeMap<String, Arc<dyn Bucket>>>>;
pub type Visitor<'a> = &'a mut dyn FnMut(&str, &Meta) -> Next;
pub type Body = BoxStream<'static, io::Result<Bytes>>;
/// An unmet condition is a result, not an error.
pub type Attempt<T> = io::Result<Result<T, Unmet>>;

pub trait Bucket: Send + Sync + 'static {
    /// Visits keys in byte order from `start` on.
    fn scan(&self, start: Bound<&str>, visit: Visitor<'_>) -> io::Result<()>;
    /// No object, although [`Self::scan`] visits it: an empty directory, which only the listing of its parent shows.
    fn is_directory(&self, _key: &str) -> bool {
        false
    }
    fn stat(&self, key: &str) -> io::Result<Option<Meta>>;
    /// `range` lies within the object whose `meta` was just asked for.
    fn read(&self, key: &str, meta: &Meta, range: Range<u64>) -> io::Result<Body>;
    fn put(&self, key: &str, body: Bytes) -> io::Result<Meta>;
    /// Puts an object that claims to be of this size, whatever size that is; its content is that of
    /// [`crate::content::id`] of its key.
    fn claim(&self, _key: &str, _size: u64) -> io::Result<Meta> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn delete(&self, key: &str) -> io::Result<()>;
    /// Puts an object if the present one is as expected. Of several at once with one expectation exactly one is done.
    fn put_if(&self, _key: &str, _draft: Draft, _condition: &Condition) -> Attempt<Meta> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Deletes an object if it is as expected; without an expectation there need not be one.
    fn delete_if(&self, _key: &str, _condition: &Condition) -> Attempt<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Objects came or went past this bucket: look now.
    fn rescan(&self) -> io::Result<()> {
        Ok(())
    }
}

/// One page of ListObjectsV2.
#[derive(Debug, Default)]
pub struct Listing {
    pub objects: Vec<(String, Meta)>,
    pub prefixes: Vec<String>,
    /// Where the next page starts (exclusive), if there is one.
    pub next: Option<String>,
}

pub fn list(
    bucket: &dyn Bucket,
    prefix: &str,
    delimiter: Option<&str>,
    after: Option<&str>,
    max_keys: usize,
) -> io::Result<Listing> {
    let mut listing = Listing::default();
    if max_keys == 0 {
        return Ok(listing);
    }
    let mut last: Option<String> = None;
    let start = match after {
        Some(after) if after >= prefix => Bound::Excluded(after),
        _ => Bound::Included(prefix),
    };
    bucket.scan(start, &mut |key, meta| {
        if !key.starts_with(prefix) {
            return Next::Stop;
        }
        let group = delimiter.and_then(|delimiter| {
            let end = key[prefix.len()..].find(delimiter)? + prefix.len() + delimiter.len();
            Some(&key[..end])
        });
        if group.is_none() && bucket.is_directory(key) {
            return Next::Continue;
        }
        // A page that ended within a group named the group as its end: the group's other keys belong to it.
        if let Some(group) = group
            && after.is_some_and(|after| after.starts_with(group))
        {
            return Next::SkipTo(successor(group));
        }
        if listing.objects.len() + listing.prefixes.len() == max_keys {
            listing.next = last.take();
            return Next::Stop;
        }
        match group {
            Some(group) => {
                listing.prefixes.push(group.to_owned());
                last = Some(group.to_owned());
                Next::SkipTo(successor(group))
            }
            None => {
                listing.objects.push((key.to_owned(), meta.clone()));
                last = Some(key.to_owned());
                Next::Continue
            }
        }
    })?;
    Ok(listing)
}

/// The least string above every string that starts with `group`.
fn successor(group: &str) -> String {
    let mut chars: Vec<char> = group.chars().collect();
    while let Some(last) = chars.pop() {
        let next = (last as u32 + 1..=char::MAX as u32).find_map(char::from_u32);
        if let Some(next) = next {
            chars.push(next);
            break;
        }
    }
    chars.into_iter().collect()
}
