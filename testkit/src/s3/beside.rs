//! What a file cannot hold of an object: its metadata, and that its directory was put.
//!
//! A map in this process is enough. Tests change the directory behind the server's back, too, so that nothing on disk
//! could be trusted to belong to the file that is there now; the map remembers of which version of the file it speaks.

use super::meta::Meta;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::{Duration, SystemTime};

#[derive(Debug, Default)]
pub(super) struct Beside {
    known: BTreeMap<String, Known>,
    /// What [`Self::time`] told last.
    time: Option<SystemTime>,
}

#[derive(Debug)]
struct Known {
    /// Of the file by itself; of a marker "".
    etag: String,
    told: Meta,
}

impl Beside {
    /// `own`: as the file tells it.
    pub(super) fn told(&self, key: &str, own: Meta) -> Meta {
        let known = self.known.get(key).filter(|known| known.etag == own.etag);
        known.map_or(own, |known| known.told.clone())
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.known.keys().map(String::as_str)
    }

    pub(super) fn marker(&self, key: &str) -> Option<&Meta> {
        self.known.get(key).map(|known| &known.told)
    }

    pub(super) fn markers(&self) -> impl Iterator<Item = (&str, &Meta)> {
        let markers = self.known.iter().filter(|(key, _)| key.ends_with('/'));
        markers.map(|(key, known)| (key.as_str(), &known.told))
    }

    /// Is this directory or one below it an object?
    pub(super) fn has_markers(&self, directory: &str) -> bool {
        let below = self.known.range::<str, _>((Bound::Included(directory), Bound::Unbounded));
        below.take_while(|(key, _)| key.starts_with(directory)).any(|(key, _)| key.ends_with('/'))
    }

    pub(super) fn keep(&mut self, key: &str, etag: String, told: Meta) -> Meta {
        self.known.insert(key.to_owned(), Known { etag, told: told.clone() });
        told
    }

    pub(super) fn forget(&mut self, key: &str) {
        self.known.remove(key);
    }

    /// `now`, or a nanosecond after the last one.
    pub(super) fn time(&mut self, now: SystemTime) -> SystemTime {
        let next = self.time.map_or(now, |last| now.max(last + Duration::from_nanos(1)));
        self.time = Some(next);
        next
    }
}
