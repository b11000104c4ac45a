//! Names: lookup and listings.

use super::counters::Counters;
use super::fault_injection::FaultInjection;
use super::metadata::Metadata;
use super::node::{OldContents, Switched};
use super::shown::Shown;
use super::{ino_of, internal};
use crate::errno::Failure;
use crate::reply::{Entry, Listing, Reply};
use cache::meta::{Lookup, ROOT};
use fuse_abi::open::{FOPEN_CACHE_DIR, FOPEN_KEEP_CACHE};
use link::Cause;
use link::worker::{Ask, Mode};
use std::sync::Arc;
use std::time::Duration;

/// Where a listing goes on after "." and after ".."; after a name: at its inode number, which is larger (FIRST_INO).
const AFTER_DOT: u64 = 1;
const AFTER_DOT_DOT: u64 = 2;

/// One READDIR or READDIRPLUS.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    pub dir: u64,
    /// 0, or the offset that came with the last entry read.
    pub offset: u64,
    pub bytes_max: usize,
    /// With attributes, which the kernel counts as lookups.
    pub plus: bool,
}

/// LOOKUP, OPENDIR and READDIR.
pub(super) struct Names {
    pub(super) metadata: Metadata,
    pub(super) shown: Shown,
    pub(super) known: Arc<OldContents>,
    pub(super) switched: Arc<Switched>,
    pub(super) faults: FaultInjection,
    pub(super) counters: Arc<Counters>,
    /// OPENDIR may be answered ENOSYS.
    pub(super) no_opendir: bool,
}

impl Names {
    pub(super) fn lookup(self: &Arc<Self>, parent: u64, name: &[u8], reply: Reply) {
        self.faults.at_name(name);
        self.counters.lookups.add(1);
        self.lookup_again(parent, name, reply, false);
    }

    fn lookup_again(self: &Arc<Self>, parent: u64, name: &[u8], reply: Reply, asked: bool) {
        let dir = ino_of(parent);
        let known = match self.metadata.view().lookup(dir, name) {
            Ok(known) => known,
            Err(error) => return reply.fail(error),
        };
        let fresh = match &known {
            Lookup::Found { seen_ms, .. } | Lookup::Absent { seen_ms } => {
                self.shown.freshness(asked, *seen_ms)
            }
            Lookup::Unknown => None,
        };
        match (known, fresh) {
            (Lookup::Found { attributes, .. }, Some(ttl)) => {
                self.metadata.count_hit(asked);
                if self.switched.recently(attributes.ino, self.shown.now_ms()) {
                    self.known.note(self.shown.node_id(&attributes), &attributes); // may be superseded before its open comes
                }
                let entry = self.shown.entry(&attributes, ttl);
                self.known.confirm(entry.nodeid);
                reply.entry(&entry);
            }
            (Lookup::Absent { .. }, Some(ttl)) => {
                self.metadata.count_hit(asked);
                reply.absent(ttl);
            }
            _ if asked => reply.fail(internal("the agent stored a name that is not there")),
            _ => {
                let name = name.to_vec();
                let question = Ask::Lookup { parent: dir, name: name.clone() };
                let names = self.clone();
                self.metadata
                    .ask(question, reply, move |reply| names.lookup_again(parent, &name, reply, true));
            }
        }
    }

    pub(super) fn opendir(&self, reply: Reply) {
        // A listing that the kernel keeps is asked for no more, so only a volume that never changes may have one kept.
        if !self.shown.is_static() {
            reply.opened(0, 0, 0);
        } else if self.shown.mode() == Mode::NoOpen && self.no_opendir {
            reply.fail(Failure::Unsupported);
        } else {
            reply.opened(0, FOPEN_KEEP_CACHE | FOPEN_CACHE_DIR, 0);
        }
    }

    pub(super) fn readdir(self: &Arc<Self>, batch: Batch, reply: Reply) {
        self.counters.readdirs.add(1);
        self.readdir_again(batch, reply, false);
    }

    fn readdir_again(self: &Arc<Self>, batch: Batch, reply: Reply, asked: bool) {
        let dir = ino_of(batch.dir);
        let listing = match self.metadata.view().listing(dir) {
            Ok(listing) => listing.filter(|listing| listing.complete),
            Err(error) => return reply.fail(error),
        };
        // A reader in the middle of a listing does not wait for a newer one.
        let accept = asked || batch.offset != 0;
        let ttl = listing.and_then(|listing| self.shown.freshness(accept, listing.seen_ms));
        let filled = ttl.map(|ttl| self.fill(dir, &batch, ttl));
        match filled {
            Some(Ok(Some(entries))) => {
                self.metadata.count_hit(asked);
                reply.data(entries.bytes());
            }
            Some(Err(failure)) => reply.fail(failure),
            Some(Ok(None)) | None if asked => {
                reply.fail(internal("the agent stored a listing that is not there"));
            }
            Some(Ok(None)) | None => {
                let names = self.clone();
                let then = move |reply| names.readdir_again(batch, reply, true);
                self.metadata.ask(Ask::List { dir }, reply, then);
            }
        }
    }

    /// None: the listing has vanished.
    fn fill(&self, dir: u64, batch: &Batch, ttl: Duration) -> Result<Option<Listing>, Failure> {
        let mut entries = Listing::new(batch.bytes_max);
        for (name, offset, next, ino) in [
            (&b"."[..], 0, AFTER_DOT, Some(dir)),
            (b"..", AFTER_DOT, AFTER_DOT_DOT, self.metadata.view().parent(dir)?),
        ] {
            if batch.offset > offset {
                continue;
            }
            let mut stat = self.shown.stat(&self.metadata.view().last_attributes(dir)?.ok_or(Cause::Stale)?);
            stat.ino = ino.unwrap_or(ROOT);
            let fits = if batch.plus {
                entries.add_plus(name, &Entry { nodeid: 0, ttl: Duration::ZERO, stat }, next)
            } else {
                entries.add(name, stat.ino, stat.mode, next)
            };
            if !fits {
                return Ok(Some(entries));
            }
        }
        let after = (batch.offset > AFTER_DOT_DOT).then_some(batch.offset);
        let complete = self.metadata.view().read_dir(dir, after, &mut |name, attributes| {
            let entry = self.shown.entry(attributes, ttl);
            if batch.plus {
                entries.add_plus(name, &entry, attributes.ino)
            } else {
                entries.add(name, attributes.ino, entry.stat.mode, attributes.ino)
            }
        })?;
        Ok(complete.map(|()| entries))
    }
}
