//! Bytes: from the cache file where they are present, through the agent where they are not.
//!
//! ```text
//!  read ─► file open? ──► bits set? ──► splice, or pread ──► data
//!            │ no           │ no          │ short, EIO
//!            ▼              ▼             ▼
//!        Ask::File      Ask::Read     Ask::Damaged (unless the disk hung as the file was opened), then once more
//!                                     from the start, in the end Ask::Direct, past the cache
//! ```

use super::counters::Counters;
use super::fault_injection::FaultInjection;
use super::files::{Files, Key, OpenFile};
use super::node::{OldContents, version_of};
use super::shown::Shown;
use super::space::Buffers;
use super::{ino_of, internal};
use crate::client::{Answer, Link};
use crate::errno::Failure;
use crate::reply::Reply;
use cache::meta::View;
use link::Cause;
use link::worker::{Ask, FromWorker, Mode, READ_MAX, Reply as AgentReply};
use link::writable::{Done, Operation};
use rustix::io::Errno;
use startup::log::say;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// How often a file that is dropped or damaged under a reader is fetched anew. The last time its bytes come without it.
const ATTEMPTS: u32 = 4;
/// How often it is asked at most where the bytes of one READ are.
const LOCATED_MAX: u32 = 4;

/// A range of one content, clamped to its size once the file is known.
#[derive(Clone, Copy, Debug)]
struct Range {
    nodeid: u64,
    key: Key,
    offset: u64,
    len: u32,
    attempt: u32,
    /// Of a volume that can be written to: how often the agent was asked where its bytes are.
    located: u32,
}

/// READ.
pub(super) struct Reads {
    pub(super) view: View,
    pub(super) shown: Shown,
    pub(super) known: Arc<OldContents>,
    pub(super) files: Arc<Files>,
    pub(super) buffers: Buffers,
    pub(super) faults: FaultInjection,
    pub(super) link: Arc<dyn Link>,
    pub(super) counters: Arc<Counters>,
}

impl Reads {
    /// Frees the buffers if none was used since the last call.
    pub(super) fn trim(&self) {
        self.buffers.trim();
    }

    /// `handle`: what OPEN gave out; 0 where the kernel opens without asking.
    pub(super) fn read(self: &Arc<Self>, nodeid: u64, handle: u64, offset: u64, len: u32, reply: Reply) {
        if len == 0 || len > READ_MAX {
            return reply.data(&[]);
        }
        self.faults.at_node(nodeid);
        let ino = ino_of(nodeid);
        let version = match u32::try_from(handle) {
            Ok(version) if version != 0 => version,
            _ => match self.view.last_attributes(ino) {
                Ok(Some(now)) => match version_of(self.shown.mode(), nodeid, &now) {
                    Some(version) => {
                        if version == now.version {
                            self.known.note(nodeid, &now);
                        }
                        version
                    }
                    None => return self.refuse(nodeid, Cause::Stale.into(), reply),
                },
                Ok(None) => return self.refuse(nodeid, Cause::Stale.into(), reply),
                Err(error) => return reply.fail(error),
            },
        };
        self.serve(Range { nodeid, key: (ino, version), offset, len, attempt: 0, located: 0 }, reply);
    }

    /// READ of a volume that can be written to: the agent is asked where the bytes are.
    pub(super) fn locate(self: &Arc<Self>, ino: u64, offset: u64, len: u32, located: u32, reply: Reply) {
        let reads = self.clone();
        let answered = move |answer: Answer| match answer {
            Ok((AgentReply::Writable { done: Ok(done), .. }, fds)) => match (done, fds.first()) {
                (Done::Stored { version }, _) => {
                    reads.faults.at_node(ino);
                    let (key, located) = ((ino, version), located + 1);
                    reads.serve(Range { nodeid: ino, key, offset, len, attempt: 0, located }, reply);
                }
                (Done::Staged { size }, Some(file)) => reads.send_staged(file, size, offset, len, reply),
                _ => reply.fail(internal("the agent answered an operation with another one's outcome")),
            },
            Ok((AgentReply::Writable { done: Err(wrong), .. }, _)) => reply.fail(Failure::Wrong(wrong)),
            Ok(_) => reply.fail(internal("the agent answered an operation with something else")),
            Err(cause) => reply.fail(cause),
        };
        self.link.ask(Ask::Writable(Operation::Locate { ino }), Box::new(answered));
    }

    fn send_staged(&self, file: &OwnedFd, size: u64, offset: u64, len: u32, reply: Reply) {
        let len = u64::from(len).min(size.saturating_sub(offset)) as usize;
        if len == 0 {
            return reply.data(&[]);
        }
        if let Err(reply) = reply.file(file.as_fd(), offset, len) {
            let mut buffer = self.buffers.take(len);
            match read_fully(file, &mut buffer[..len], offset) {
                Ok(read) => reply.data(&buffer[..read]), // cut off meanwhile: what there is
                Err(_) => reply.fail(Cause::Unavailable),
            }
        }
    }

    /// In profile *small* the kernel opens without asking. Once it learns that a content is gone, it asks for the
    /// attributes at the next open, which is sent to look the name up again.
    fn refuse(&self, nodeid: u64, failure: Failure, reply: Reply) {
        if self.shown.mode() == Mode::NoOpen && failure == Failure::Cause(Cause::Stale) {
            self.known.mark_stale(nodeid);
            reply.distrust_attributes(nodeid);
        }
        reply.fail(failure);
    }

    fn refuse_range(self: &Arc<Self>, range: Range, failure: Failure, reply: Reply) {
        if failure == Failure::Cause(Cause::Stale) && (1..LOCATED_MAX).contains(&range.located) {
            // This node has replaced the object since, by one with the same bytes and another name or owner.
            return self.locate(range.nodeid, range.offset, range.len, range.located, reply);
        }
        self.refuse(range.nodeid, failure, reply);
    }

    fn serve(self: &Arc<Self>, range: Range, reply: Reply) {
        let reads = self.clone();
        self.files.with_file(range.key, move |file| match file {
            Ok(file) => reads.serve_from(&file, range, reply),
            // No cache file to be had, for reasons of the cache: the bytes still exist.
            Err(Failure::Cause(Cause::Internal)) => reads.direct(range, reply),
            Err(failure) => reads.refuse_range(range, failure, reply),
        });
    }

    fn serve_from(self: &Arc<Self>, file: &Arc<OpenFile>, range: Range, reply: Reply) {
        let len = u64::from(range.len).min(file.size.saturating_sub(range.offset));
        if len == 0 {
            return reply.data(&[]);
        }
        let range = Range { len: len as u32, ..range };
        if !file.has(range.offset, len) {
            return self.miss(file, range, reply);
        }
        self.counters.reads_hit.add(1);
        self.counters.bytes_hit.add(len);
        self.send_bytes(file, range, reply);
    }

    /// Reads a range that is present, and answers.
    fn send_bytes(self: &Arc<Self>, file: &Arc<OpenFile>, range: Range, reply: Reply) {
        let len = range.len as usize;
        match reply.file(file.data.as_fd(), range.offset, len) {
            Ok(()) => self.counters.reads_spliced.add(1),
            Err(reply) => {
                let mut buffer = self.buffers.take(len);
                let read = read_fully(&file.data, &mut buffer[..len], range.offset);
                if read != Ok(len) {
                    drop(buffer);
                    if file.is_placeholder() {
                        return self.once_more(file, range, reply); // its disk answers again
                    }
                    return self.damaged(file, range, reply);
                }
                reply.data(&buffer[..len]);
            }
        }
        self.files.touch(file);
        let end = range.offset + range.len as u64;
        if file.passes_mark(end) {
            self.link.tell(FromWorker::Advance { file: file.id, offset: end });
        }
    }

    fn miss(self: &Arc<Self>, file: &Arc<OpenFile>, range: Range, reply: Reply) {
        self.counters.reads_miss.add(1);
        self.counters.bytes_miss.add(u64::from(range.len));
        let (reads, file) = (self.clone(), file.clone());
        self.link.ask(
            Ask::Read { file: file.id, offset: range.offset, len: range.len },
            Box::new(move |answer| match answer {
                Ok((AgentReply::Present { mark }, _)) => {
                    file.set_mark(range.offset + u64::from(range.len), mark);
                    reads.send_bytes(&file, range, reply);
                }
                Ok((AgentReply::Uncached { len, number }, fds)) => {
                    reads.send_uncached(len, fds, range, reply);
                    reads.link.tell(FromWorker::GivenBack { number });
                }
                Ok((AgentReply::Gone, _)) => reads.once_more(&file, range, reply),
                Ok(_) => reply.fail(internal("the agent answered a question for bytes with something else")),
                Err(cause) => reads.refuse_range(range, cause.into(), reply),
            }),
        );
    }

    /// The cache could not take the bytes: they came along.
    fn send_uncached(&self, len: u32, fds: Vec<OwnedFd>, range: Range, reply: Reply) {
        self.counters.reads_uncached.add(1);
        let len = len.min(range.len) as usize;
        let mut buffer = self.buffers.take(len);
        match fds.first().map(|bytes| read_fully(bytes, &mut buffer[..len], 0)) {
            Some(Ok(read)) if read == len => reply.data(&buffer[..len]),
            _ => reply.fail(internal("uncached bytes came without their memory file")),
        }
    }

    /// The cache file is shorter than it must be, or its disk fails.
    fn damaged(self: &Arc<Self>, file: &Arc<OpenFile>, range: Range, reply: Reply) {
        say(&format!("fuse-worker: cache file {:016x} cannot be read at {}", file.id, range.offset));
        let (reads, file) = (self.clone(), file.clone());
        self.link.ask(
            Ask::Damaged { file: file.id },
            Box::new(move |answer| match answer {
                Ok(_) => reads.once_more(&file, range, reply),
                Err(cause) => reply.fail(cause),
            }),
        );
    }

    fn once_more(self: &Arc<Self>, file: &Arc<OpenFile>, range: Range, reply: Reply) {
        self.files.drop_file(range.key, file);
        if range.attempt + 1 == ATTEMPTS {
            return self.direct(range, reply);
        }
        self.serve(Range { attempt: range.attempt + 1, ..range }, reply);
    }

    /// The last resort: the agent brings the bytes past the cache.
    fn direct(self: &Arc<Self>, range: Range, reply: Reply) {
        let reads = self.clone();
        let (ino, version) = range.key;
        self.link.ask(
            Ask::Direct { ino, version, offset: range.offset, len: range.len },
            Box::new(move |answer| match answer {
                Ok((AgentReply::Uncached { len, number }, fds)) => {
                    reads.send_uncached(len, fds, range, reply);
                    reads.link.tell(FromWorker::GivenBack { number });
                }
                Ok(_) => reply.fail(internal("the agent answered a question for bytes with something else")),
                Err(cause) => reads.refuse_range(range, cause.into(), reply),
            }),
        );
    }
}

/// As many bytes as there are, up to the buffer's length.
fn read_fully(file: impl std::os::fd::AsFd, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut done = 0;
    while done < buffer.len() {
        match rustix::io::pread(&file, &mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}
