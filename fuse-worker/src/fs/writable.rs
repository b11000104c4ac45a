//! Volumes that can be written to. The agent knows what is staged and what is in the store, so it is asked for every name,
//! attribute and place of bytes; here its answers become the kernel's. Nothing is kept between two requests.
//!
//! The kernel keeps names and attributes for as long as the agent says: for a moment, or for no time where several pods of the
//! node have the volume. It keeps pages for as long as the modification time stays the same (FUSE_AUTO_INVAL_DATA). So each pod
//! of the node sees at once what another writes.

use super::read::Reads;
use super::shown::Shown;
use super::{Batch, internal};
use crate::client::{Answer, Link};
use crate::errno::Failure;
use crate::reply::{Delivery, Entry, Listing, Reply, Stat};
use crate::transport::{Current, current, set_current};
use cache::meta::ROOT;
use fuse_abi::header::INT_REQ_BIT;
use fuse_abi::open::{FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE};
use link::worker::{Ask, READ_MAX, Reply as AgentReply};
use link::writable::{BELIEVED_MAX, Done, Node, Operation, Owner, SetAttributes};
use std::sync::Arc;
use std::time::Duration;

/// The handle of a file that is open for writing. That of one that is only read is 0.
const WRITES: u64 = 1;

pub(super) struct Writable {
    pub(super) link: Arc<dyn Link>,
    /// For what is in the store and not staged.
    pub(super) reads: Arc<Reads>,
    pub(super) shown: Shown,
}

impl Writable {
    /// Asks the agent, and goes on with what was done and for how long the kernel may believe it, or fails the request.
    fn ask(
        &self,
        operation: Operation,
        reply: Reply,
        then: impl FnOnce(Done, Duration, Reply) + Send + 'static,
    ) {
        let shown = self.shown.clone();
        let answered = move |answer: Answer| match answer {
            Ok((AgentReply::Writable { done: Ok(done), until_ms }, _)) => {
                let ttl = Duration::from_millis(until_ms.saturating_sub(shown.now_ms()));
                then(done, ttl.min(BELIEVED_MAX), reply) // whatever the clock says
            }
            Ok((AgentReply::Writable { done: Err(wrong), .. }, _)) => reply.fail(Failure::Wrong(wrong)),
            Ok(_) => reply.fail(internal("the agent answered an operation with something else")),
            Err(cause) => reply.fail(cause),
        };
        self.link.ask(Ask::Writable(operation), Box::new(answered));
    }

    fn ask_done(&self, operation: Operation, reply: Reply) {
        self.ask(operation, reply, |done, _, reply| match done {
            Done::Done => reply.ok(),
            _ => unexpected(reply),
        });
    }

    fn ask_entry(&self, operation: Operation, reply: Reply) {
        self.ask(operation, reply, |done, ttl, reply| match done {
            Done::Node(node) => reply.entry(&entry(&node, ttl)),
            Done::Absent => reply.absent(ttl),
            _ => unexpected(reply),
        });
    }

    fn ask_attributes(&self, operation: Operation, reply: Reply) {
        self.ask(operation, reply, |done, ttl, reply| match done {
            Done::Node(node) => reply.attr(ttl, &stat(&node)),
            _ => unexpected(reply),
        });
    }

    pub(super) fn lookup(&self, parent: u64, name: &[u8], reply: Reply) {
        self.ask_entry(Operation::Lookup { parent, name: name.to_vec() }, reply);
    }

    pub(super) fn getattr(&self, ino: u64, reply: Reply) {
        self.ask_attributes(Operation::Attributes { ino }, reply);
    }

    pub(super) fn setattr(&self, ino: u64, set: SetAttributes, reply: Reply) {
        self.ask_attributes(Operation::SetAttributes { ino, set }, reply);
    }

    pub(super) fn create(&self, parent: u64, name: &[u8], owner: Owner, flags: i32, reply: Reply) {
        let exclusive = flags & libc::O_EXCL != 0;
        let operation = Operation::Create { parent, name: name.to_vec(), owner, exclusive, open: true };
        let (link, unique) = (self.link.clone(), reply.unique());
        self.ask(operation, reply, move |done, ttl, reply| match done {
            Done::Node(node) => {
                let delivery = reply.created(&entry(&node, ttl), WRITES, opened(flags));
                close_unless(delivery, &*link, node.ino, unique);
            }
            _ => unexpected(reply),
        });
    }

    /// As [`Self::create`], without opening it.
    pub(super) fn make_file(&self, parent: u64, name: &[u8], owner: Owner, reply: Reply) {
        let name = name.to_vec();
        self.ask_entry(Operation::Create { parent, name, owner, exclusive: true, open: false }, reply);
    }

    pub(super) fn mkdir(&self, parent: u64, name: &[u8], owner: Owner, reply: Reply) {
        self.ask_entry(Operation::MakeDirectory { parent, name: name.to_vec(), owner }, reply);
    }

    pub(super) fn unlink(&self, parent: u64, name: &[u8], reply: Reply) {
        self.ask_done(Operation::Unlink { parent, name: name.to_vec() }, reply);
    }

    pub(super) fn rmdir(&self, parent: u64, name: &[u8], reply: Reply) {
        self.ask_done(Operation::RemoveDirectory { parent, name: name.to_vec() }, reply);
    }

    /// `flags`: those of renameat2(2).
    pub(super) fn rename(
        &self,
        (parent, name): (u64, &[u8]),
        (to, to_name): (u64, &[u8]),
        flags: u32,
        reply: Reply,
    ) {
        if flags & !libc::RENAME_NOREPLACE != 0 {
            return reply.fail(Failure::Invalid); // two names cannot be exchanged in one step in an object store
        }
        let keep = flags & libc::RENAME_NOREPLACE != 0;
        let (name, to_name) = (name.to_vec(), to_name.to_vec());
        self.ask_done(Operation::Rename { parent, name, to, to_name, keep }, reply);
    }

    pub(super) fn open(&self, ino: u64, flags: i32, reply: Reply) {
        let write = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let (link, unique) = (self.link.clone(), reply.unique());
        self.ask(Operation::Open { ino, write }, reply, move |done, _, reply| match done {
            Done::Done => {
                let delivery = reply.opened(u64::from(write), opened(flags), 0);
                close_unless(delivery, &*link, ino, unique);
            }
            _ => unexpected(reply),
        });
    }

    pub(super) fn release(&self, ino: u64, reply: Reply) {
        self.ask_done(Operation::Close { ino }, reply);
    }

    /// A close(2), of which there may be several of one open file. Who only reads waits for no store.
    pub(super) fn flush(&self, ino: u64, handle: u64, reply: Reply) {
        match handle {
            WRITES => self.sync(ino, true, reply),
            _ => reply.ok(),
        }
    }

    pub(super) fn sync(&self, ino: u64, closing: bool, reply: Reply) {
        self.ask_done(Operation::Sync { ino, closing }, reply);
    }

    /// The agent takes the bytes from the connection's shared memory, where this request lies until it is answered.
    pub(super) fn write(&self, ino: u64, reply: Reply) {
        self.ask(Operation::Write { ino }, reply, |done, _, reply| match done {
            Done::Written { bytes } => reply.written(bytes),
            _ => unexpected(reply),
        });
    }

    pub(super) fn statfs(&self, reply: Reply) {
        self.ask(Operation::Space, reply, |done, _, reply| match done {
            Done::Space { total_bytes, free_bytes, total_inodes } => {
                reply.statfs(total_bytes, free_bytes, total_inodes)
            }
            _ => unexpected(reply),
        });
    }

    pub(super) fn readdir(&self, batch: Batch, reply: Reply) {
        let operation = Operation::ReadDirectory { dir: batch.dir, offset: batch.offset };
        self.ask(operation, reply, move |done, ttl, reply| match done {
            Done::Names(names) => {
                let mut listing = Listing::new(batch.bytes_max);
                for name in &names {
                    let is_self = name.name == b"." || name.name == b"..";
                    let fits = match batch.plus {
                        // The kernel counts no look-up of these.
                        true if is_self => {
                            let unseen = Entry { nodeid: 0, ..entry(&name.node, ttl) };
                            listing.add_plus(&name.name, &unseen, name.next)
                        }
                        true => listing.add_plus(&name.name, &entry(&name.node, ttl), name.next),
                        false => listing.add(&name.name, name.node.ino, name.node.mode, name.next),
                    };
                    if !fits {
                        break; // the kernel asks again, from the last one that did
                    }
                }
                reply.data(listing.bytes());
            }
            _ => unexpected(reply),
        });
    }

    pub(super) fn read(&self, ino: u64, offset: u64, len: u32, reply: Reply) {
        if len == 0 || len > READ_MAX {
            return reply.data(&[]);
        }
        self.reads.locate(ino, offset, len, 0, reply);
    }
}

/// A file that the agent has counted as open, for a program that was killed meanwhile: no RELEASE will come. Asked under an id that no
/// request of the kernel's has, for each is executed once.
fn close_unless(delivery: Delivery, link: &dyn Link, ino: u64, unique: u64) {
    if delivery == Delivery::Dropped {
        let before = current();
        set_current(Current { unique: unique | INT_REQ_BIT, ..before });
        link.ask(Ask::Writable(Operation::Close { ino }), Box::new(|_| ()));
        set_current(before);
    }
}

/// What is only written goes from the program's pages to the agent, and not into a second page cache beside that of the
/// staged file. The kernel drops what the cache of this mount has of it.
fn opened(flags: i32) -> u32 {
    match flags & libc::O_ACCMODE {
        libc::O_WRONLY => FOPEN_KEEP_CACHE | FOPEN_DIRECT_IO,
        _ => FOPEN_KEEP_CACHE,
    }
}

fn unexpected(reply: Reply) {
    reply.fail(internal("the agent answered an operation with another one's outcome"));
}

fn entry(node: &Node, ttl: Duration) -> Entry {
    Entry { nodeid: node.ino, ttl, stat: stat(node) }
}

fn stat(node: &Node) -> Stat {
    Stat {
        ino: if node.ino == 0 { ROOT } else { node.ino },
        size: node.size,
        stored: node.stored,
        atime_ns: node.atime_ns,
        mtime_ns: node.mtime_ns,
        ctime_ns: node.ctime_ns,
        mode: node.mode,
        links: node.links,
        uid: node.uid,
        gid: node.gid,
    }
}
