//! Opens: decided by the node id, for its whole life.

use super::backing::{Acquired, Backings};
use super::counters::Counters;
use super::files::{Files, Key};
use super::metadata::Metadata;
use super::node::{OldContents, Switched, ino_of, is_passthrough, version_of};
use super::shown::Shown;
use crate::client::Link;
use crate::errno::Failure;
use crate::reply::Reply;
use cache::meta::{Attributes, Kind};
use fuse_abi::open::{FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PASSTHROUGH};
use inflight::Inflight;
use link::Cause;
use link::worker::{ANNOUNCED_FROM, Ask, Mode, Reply as AgentReply};
use std::sync::Arc;

/// OPEN and RELEASE.
pub(super) struct Opens {
    pub(super) metadata: Metadata,
    pub(super) shown: Shown,
    pub(super) known: Arc<OldContents>,
    pub(super) switched: Arc<Switched>,
    pub(super) files: Arc<Files>,
    pub(super) backings: Arc<Backings>,
    pub(super) inflight: Arc<Inflight>,
    pub(super) link: Arc<dyn Link>,
    pub(super) counters: Arc<Counters>,
}

impl Opens {
    pub(super) fn open(self: &Arc<Self>, nodeid: u64, flags: i32, reply: Reply) {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return reply.fail(Failure::ReadOnly);
        }
        if self.shown.mode() == Mode::NoOpen {
            return reply.fail(Failure::Unsupported);
        }
        if !self.shown.revalidates_on_open() {
            return self.open_known(nodeid, reply);
        }
        let question = Ask::Attributes { ino: ino_of(nodeid), force: true };
        let opens = self.clone();
        self.metadata.ask(question, reply, move |reply| opens.open_known(nodeid, reply));
    }

    fn open_known(self: &Arc<Self>, nodeid: u64, reply: Reply) {
        let attributes = match self.metadata.view().attributes(ino_of(nodeid)) {
            Ok(Some((attributes, _))) if attributes.kind == Kind::File => attributes,
            // Vanished, or something else by now: the kernel looks the name up again.
            Ok(_) => return reply.fail(Cause::Stale),
            Err(error) => return reply.fail(error),
        };
        if self.shown.node_id(&attributes) == nodeid {
            if is_passthrough(self.shown.mode(), nodeid) {
                return self.open_passthrough(nodeid, attributes, reply);
            }
            let lone = self.shown.mode() != Mode::Passthrough || attributes.size < ANNOUNCED_FROM;
            if lone || self.switched.recently(attributes.ino, self.shown.now_ms()) {
                self.known.note(nodeid, &attributes);
                return self.open_kept(attributes.version, reply);
            }
            return self.announce(nodeid, attributes, reply);
        }
        self.open_superseded(nodeid, &attributes, reply);
    }

    /// A large file that is not whole: if other pods are fetching it, the agent answers when it is, or when waiting for
    /// that has become pointless.
    fn announce(self: &Arc<Self>, nodeid: u64, attributes: Attributes, reply: Reply) {
        let opens = self.clone();
        self.link.ask(
            Ask::Open { ino: attributes.ino, version: attributes.version },
            Box::new(move |_| opens.open_announced(nodeid, attributes, reply)), // an error: the reads will tell
        );
    }

    fn open_announced(self: &Arc<Self>, nodeid: u64, before: Attributes, reply: Reply) {
        let now = self.metadata.view().attributes(before.ino).ok().flatten();
        let superseded = now.is_some_and(|(now, _)| self.shown.node_id(&now) != nodeid);
        if !superseded {
            self.known.note(nodeid, &before);
            return self.open_kept(before.version, reply);
        }
        // As in `open_superseded`; but each of those that waited is in the first try of its open, so each may be sent
        // to look the name up again.
        self.inflight.give_estale(nodeid);
        self.switched.note(before.ino, self.shown.now_ms());
        self.counters.opens_estale.add(1);
        reply.fail(Cause::Stale);
    }

    /// The first OPEN of a superseded node id is ESTALE: the kernel looks the name up again and opens the new node id,
    /// and the application sees success. A reopen (through /proc/self/fd, say) gets the old content.
    ///
    /// The kernel looks up again once only. So an inode that has just changed its node id may keep the next one a while
    /// although that is superseded, too: two ESTALEs within one open would reach the application.
    fn open_superseded(self: &Arc<Self>, nodeid: u64, now: &Attributes, reply: Reply) {
        let known = self.known.get(nodeid).map(|opened| opened.version);
        let version = version_of(self.shown.mode(), nodeid, now).or(known);
        let time_ms = self.shown.now_ms();
        let recently = self.switched.recently(now.ino, time_ms);
        let recorded = self.backings.recorded(nodeid);
        let servable = version.is_some() || recorded.is_some();
        if !servable || !recently && self.inflight.give_estale(nodeid) {
            self.switched.note(now.ino, time_ms);
            self.counters.opens_estale.add(1);
            return reply.fail(Cause::Stale);
        }
        let version = version.unwrap_or(now.version);
        if !is_passthrough(self.shown.mode(), nodeid) {
            return self.open_kept(version, reply);
        }
        let opens = self.clone();
        let acquired = self
            .backings
            .acquire(nodeid, move |index| opens.answer_open_or_direct(nodeid, index, version, reply));
        if let Acquired::Open = acquired {
            self.backings.opened(nodeid, 0, 0); // its file is gone from the cache: an ordinary open
        }
    }

    /// The handle is the version, so that reads need no memory of this worker's.
    fn open_kept(&self, version: u32, reply: Reply) {
        self.counters.opens_kept.add(1);
        reply.opened(u64::from(version), FOPEN_KEEP_CACHE | FOPEN_NOFLUSH, 0);
    }

    fn open_passthrough(self: &Arc<Self>, nodeid: u64, attributes: Attributes, reply: Reply) {
        self.known.note(nodeid, &attributes);
        let version = attributes.version;
        let opens = self.clone();
        let acquired = self
            .backings
            .acquire(nodeid, move |index| opens.answer_open_or_direct(nodeid, index, version, reply));
        match acquired {
            Acquired::Answered => {}
            Acquired::Open => match self.files.valid_cached(&attributes) {
                Some(cached) => self.open_backing(nodeid, cached.file),
                // The agent is not the one that wrote the location: it knows where the file is, if it is.
                None => self.ask_where(nodeid, (attributes.ino, version)),
            },
        }
    }

    /// Registers a cache file of which only the agent knows where it is.
    fn ask_where(self: &Arc<Self>, nodeid: u64, key: Key) {
        let opens = self.clone();
        self.files.with_file(key, move |file| match file {
            Ok(file) if file.has(0, file.size.max(1)) => opens.open_backing(nodeid, file.id),
            Ok(file) => opens.backings.opened(nodeid, 0, file.id),
            Err(_) => opens.backings.opened(nodeid, 0, 0),
        });
    }

    fn open_backing(&self, nodeid: u64, file: u64) {
        let backings = self.backings.clone();
        self.link.ask(
            Ask::BackingOpen { file },
            Box::new(move |answer| match answer {
                Ok((AgentReply::Backing { id }, _)) => backings.opened(nodeid, id, file),
                // Refused, or not possible now: an ordinary open is slower, and right.
                _ => backings.opened(nodeid, 0, file),
            }),
        );
    }

    fn answer_open_or_direct(
        self: &Arc<Self>,
        nodeid: u64,
        index: Option<usize>,
        version: u32,
        reply: Reply,
    ) {
        match index {
            Some(index) => self.answer_open(nodeid, index, version, reply),
            // No room to remember how this one was opened. Direct I/O goes with whatever comes later.
            None => {
                reply.opened(u64::from(version), FOPEN_DIRECT_IO | FOPEN_NOFLUSH, 0);
            }
        }
    }

    /// Answers an open that is counted.
    fn answer_open(self: &Arc<Self>, nodeid: u64, index: usize, version: u32, reply: Reply) {
        let Some(backing) = self.backings.count_open(nodeid, index, reply.unique()) else {
            return self.open_known(nodeid, reply); // closed since we looked
        };
        let flags = if backing.id == 0 {
            self.counters.opens_kept.add(1);
            FOPEN_KEEP_CACHE | FOPEN_NOFLUSH
        } else {
            self.counters.opens_passthrough.add(1);
            self.files.touch_id(backing.file);
            FOPEN_PASSTHROUGH | FOPEN_NOFLUSH
        };
        if reply.opened(u64::from(version), flags, backing.id) == crate::reply::Delivery::Dropped {
            self.backings.release(nodeid, None); // no RELEASE will come
        }
    }

    pub(super) fn release(&self, nodeid: u64, reply: Reply) {
        if is_passthrough(self.shown.mode(), nodeid) {
            self.backings.release(nodeid, Some(reply.unique()));
        }
        reply.ok();
    }
}
