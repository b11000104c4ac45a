//! Attributes, plain and extended; symlinks; the size of the volume.

use super::metadata::Metadata;
use super::node::{OldContents, version_of};
use super::shown::Shown;
use super::{freshness, ino_of};
use crate::client::Link;
use crate::errno::Failure;
use crate::reply::{Reply, Stat};
use cache::meta::{Attributes, Kind};
use link::Cause;
use link::worker::{Ask, Reply as AgentReply};
use std::sync::Arc;
use std::time::Duration;

const ETAG: &[u8] = b"user.millpond.etag";
const VERSION: &[u8] = b"user.millpond.version";
const CACHED_BYTES: &[u8] = b"user.millpond.cached_bytes";
const SOURCE: &[u8] = b"user.millpond.source";
const HIDDEN_KEYS: &[u8] = b"user.millpond.hidden_keys";

/// GETATTR, READLINK, STATFS and the extended attributes.
pub(super) struct Inodes {
    pub(super) metadata: Metadata,
    pub(super) shown: Shown,
    pub(super) known: Arc<OldContents>,
    pub(super) link: Arc<dyn Link>,
    /// Of the volume, as a user sees it.
    pub(super) source: String,
}

impl Inodes {
    /// `by_handle`: on behalf of an open file that is being read.
    pub(super) fn getattr(self: &Arc<Self>, nodeid: u64, by_handle: bool, reply: Reply) {
        if !by_handle && self.known.is_stale(nodeid) {
            // An open or a stat by name: at this the kernel looks the name up again.
            return reply.fail(Cause::Stale);
        }
        self.getattr_again(nodeid, reply, false);
    }

    fn getattr_again(self: &Arc<Self>, nodeid: u64, reply: Reply, asked: bool) {
        // Of what is stale nothing is remembered, or the next open by name would not ask.
        let capped = |ttl| if self.known.is_stale(nodeid) { Duration::ZERO } else { ttl };
        match self.look_at(nodeid, asked) {
            Ok(Some((attributes, ttl))) => {
                self.metadata.count_hit(asked);
                let mut stat = self.shown.stat(&attributes);
                if version_of(self.shown.mode(), nodeid, &attributes) == Some(attributes.version) {
                    return reply.attr(capped(ttl), &stat);
                }
                // An older content that is still open: what it looked like, which does not change any more. The new
                // size would make the kernel cut off the old pages.
                match self.known.get(nodeid) {
                    Some(opened) if opened.version == attributes.version => reply.attr(capped(ttl), &stat),
                    Some(opened) => {
                        stat = Stat::of_source(
                            stat.ino,
                            opened.size,
                            opened.mtime_ns,
                            stat.mode,
                            (stat.uid, stat.gid),
                        );
                        reply.attr(capped(freshness::FOR_EVER), &stat);
                    }
                    None => reply.fail(Cause::Stale),
                }
            }
            Ok(None) => {
                let question = Ask::Attributes { ino: ino_of(nodeid), force: false };
                let inodes = self.clone();
                self.metadata.ask(question, reply, move |reply| inodes.getattr_again(nodeid, reply, true));
            }
            Err(failure) => reply.fail(failure),
        }
    }

    /// Attributes and how long they may be trusted; None: the agent must be asked first.
    fn look_at(&self, nodeid: u64, asked: bool) -> Result<Option<(Attributes, Duration)>, Failure> {
        let ino = ino_of(nodeid);
        if let Some((attributes, seen_ms)) = self.metadata.view().attributes(ino)? {
            return Ok(self.shown.freshness(asked, seen_ms).map(|ttl| (attributes, ttl)));
        }
        if !asked {
            return Ok(None);
        }
        // The name has vanished. A process that has the file open may still look at it.
        let last = self.metadata.view().last_attributes(ino)?.ok_or(Cause::Stale)?;
        Ok(Some((last, Duration::ZERO)))
    }

    pub(super) fn readlink(self: &Arc<Self>, nodeid: u64, reply: Reply) {
        match self.metadata.view().last_attributes(ino_of(nodeid)) {
            Ok(Some(Attributes { kind: Kind::Symlink, target, .. })) => reply.data(&target),
            Ok(Some(_)) => reply.fail(Failure::NotASymlink),
            Ok(None) => reply.fail(Cause::Stale),
            Err(error) => reply.fail(error),
        }
    }

    pub(super) fn statfs(self: &Arc<Self>, reply: Reply) {
        self.link.ask(
            Ask::Space,
            Box::new(move |answer| match answer {
                Ok((AgentReply::Space { total_bytes, total_inodes }, _)) => {
                    reply.statfs(total_bytes, 0, total_inodes) // nothing is free on a read-only volume
                }
                Ok(_) => reply.fail(Cause::Internal),
                Err(cause) => reply.fail(cause),
            }),
        );
    }

    pub(super) fn listxattr(&self, nodeid: u64, size: u32, reply: Reply) {
        let names: &[&[u8]] = match self.metadata.view().last_attributes(ino_of(nodeid)) {
            Ok(Some(Attributes { kind: Kind::File, .. })) => &[ETAG, VERSION, CACHED_BYTES, SOURCE],
            Ok(Some(Attributes { kind: Kind::Directory, .. })) => &[SOURCE, HIDDEN_KEYS],
            Ok(Some(Attributes { kind: Kind::Symlink, .. })) => &[],
            Ok(None) => return reply.fail(Cause::Stale),
            Err(error) => return reply.fail(error),
        };
        let list: Vec<u8> = names.iter().flat_map(|name| name.iter().copied().chain([0])).collect();
        reply.xattr(size, &list);
    }

    pub(super) fn getxattr(self: &Arc<Self>, nodeid: u64, name: &[u8], size: u32, reply: Reply) {
        if !name.starts_with(b"user.millpond.") {
            return reply.fail(Failure::NoAttribute);
        }
        let attributes = match self.metadata.view().last_attributes(ino_of(nodeid)) {
            Ok(Some(attributes)) => attributes,
            Ok(None) => return reply.fail(Cause::Stale),
            Err(error) => return reply.fail(error),
        };
        if name == CACHED_BYTES && attributes.kind == Kind::File {
            return self.cached_bytes(attributes, size, reply);
        }
        match self.attribute(name, &attributes) {
            Ok(Some(value)) => reply.xattr(size, &value),
            Ok(None) => reply.fail(Failure::NoAttribute),
            Err(failure) => reply.fail(failure),
        }
    }

    fn attribute(&self, name: &[u8], attributes: &Attributes) -> Result<Option<Vec<u8>>, Failure> {
        Ok(match (name, attributes.kind) {
            (ETAG, Kind::File) => Some(attributes.token.clone().into_bytes()),
            (VERSION, Kind::File) => Some(attributes.version.to_string().into_bytes()),
            (SOURCE, Kind::File | Kind::Directory) => {
                let path = self.metadata.view().path(attributes.ino)?.unwrap_or_default();
                let mut source = self.source.trim_end_matches('/').as_bytes().to_vec();
                if !path.is_empty() {
                    source.push(b'/');
                    source.extend_from_slice(&path);
                }
                Some(source)
            }
            (HIDDEN_KEYS, Kind::Directory) => {
                let hidden =
                    self.metadata.view().listing(attributes.ino)?.map_or(0, |listing| listing.hidden);
                Some(hidden.to_string().into_bytes())
            }
            _ => None,
        })
    }

    fn cached_bytes(self: &Arc<Self>, attributes: Attributes, size: u32, reply: Reply) {
        // Not from the location in the metadata store, which follows an eviction a moment later.
        self.link.ask(
            Ask::Cached { ino: attributes.ino, version: attributes.version },
            Box::new(move |answer| match answer {
                Ok((AgentReply::Cached { bytes }, _)) => reply.xattr(size, bytes.to_string().as_bytes()),
                Ok(_) => reply.fail(Cause::Internal),
                Err(cause) => reply.fail(cause),
            }),
        );
    }
}
