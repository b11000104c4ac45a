//! How an inode is shown to the kernel: by which node id, with which attributes, and for how long they may be trusted.

use super::{Clock, Settings, freshness, node};
use crate::reply::{Entry, Stat};
use cache::meta::{Attributes, Kind};
use link::worker::{Mode, Show};
use std::time::Duration;

/// Does not change in the life of a connection; each part has its own.
#[derive(Clone)]
pub(super) struct Shown {
    mode: Mode,
    show: Show,
    clock: Clock,
}

impl Shown {
    pub(super) fn new(settings: &Settings, clock: Clock) -> Self {
        Self { mode: settings.mode, show: settings.show, clock }
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    /// No name, listing or attribute ever changes.
    pub(super) fn is_static(&self) -> bool {
        self.show.ttl.is_none()
    }

    /// The source is asked at every open.
    pub(super) fn revalidates_on_open(&self) -> bool {
        self.show.revalidate_on_open
    }

    /// Wall clock, milliseconds since 1970.
    pub(super) fn now_ms(&self) -> u64 {
        (self.clock)()
    }

    pub(super) fn node_id(&self, attributes: &Attributes) -> u64 {
        node::node_id(self.mode, attributes)
    }

    pub(super) fn entry(&self, attributes: &Attributes, ttl: Duration) -> Entry {
        Entry { nodeid: self.node_id(attributes), ttl, stat: self.stat(attributes) }
    }

    pub(super) fn stat(&self, attributes: &Attributes) -> Stat {
        let show = &self.show;
        let told = attributes.permissions.filter(|_| show.attributes_of_source);
        let mode_or = |volumes: u32| told.map_or(volumes & 0o7777, |told| u32::from(told.mode) & 0o777);
        let (mode, size) = match attributes.kind {
            Kind::File => (libc::S_IFREG | mode_or(show.file_mode), attributes.size),
            Kind::Directory => (libc::S_IFDIR | mode_or(show.dir_mode), 0),
            Kind::Symlink => (libc::S_IFLNK | 0o777, attributes.target.len() as u64),
        };
        let uid = told.and_then(|told| told.uid).unwrap_or(show.uid);
        let gid = told.and_then(|told| told.gid).unwrap_or(show.gid);
        Stat::of_source(attributes.ino, size, attributes.mtime_ns, mode, (uid, gid))
    }

    /// How long what was seen at `seen_ms` may still be trusted; None: it must be asked again. What the agent has just
    /// confirmed (`asked`) is good for this one answer, however short the limit.
    pub(super) fn freshness(&self, asked: bool, seen_ms: u64) -> Option<Duration> {
        let left = freshness::remaining(self.show.ttl, seen_ms, self.now_ms());
        left.or(asked.then_some(Duration::ZERO))
    }
}
