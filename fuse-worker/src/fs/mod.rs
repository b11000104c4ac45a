//! The file system: names from the metadata store, bytes from cache files, and the agent for what is missing. A volume that
//! can be written to asks the agent for everything (`writable`).
//!
//! It knows nothing of fuser or the device: requests are calls, answers are [`Reply`]s, the agent is a [`Link`]. No
//! call waits for the agent; what is to happen with its answer is parked there.

mod attributes;
mod backing;
mod counters;
mod fault_injection;
mod files;
mod freshness;
mod metadata;
mod names;
mod node;
mod open;
mod read;
mod shown;
mod space;
#[cfg(test)]
mod tests;
mod writable;

pub use counters::Counters;
pub use names::Batch;
pub(crate) use node::ino_of;
pub use node::node_id;

use crate::client::Link;
use crate::errno::Failure;
use crate::reply::Reply;
use attributes::Inodes;
use backing::Backings;
use cache::meta::View;
use fault_injection::FaultInjection;
use files::Files;
use inflight::Inflight;
use link::worker::{InjectedFault, Mode, Show};
use link::writable::{Owner, SetAttributes};
use metadata::Metadata;
use names::Names;
use node::{OldContents, Switched};
use open::Opens;
use read::Reads;
use shown::Shown;
use space::Buffers;
use startup::log::say;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use writable::Writable;

/// Wall clock, milliseconds since 1970.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// What does not change in the life of a connection.
#[derive(Clone, Debug)]
pub struct Settings {
    pub mode: Mode,
    pub show: Show,
    /// Only cache locations of this agent generation may be opened without asking.
    pub generation: u64,
    pub block_bytes: u64,
    pub source: String,
    /// OPENDIR may be answered ENOSYS.
    pub no_opendir: bool,
    /// Cache files held open at most.
    pub files_max: usize,
    /// Bytes on their way to the kernel at most.
    pub buffer_bytes: usize,
    /// Another worker served this connection before.
    pub successor: bool,
    /// Debug.
    pub injected_faults: Vec<InjectedFault>,
}

/// Routes each request to the part that answers it. Each part has its own state, only `Fs` has the four that answer,
/// and what they share keeps its state to itself:
///
/// ```text
///  names     LOOKUP, READDIR …       metadata (store and agent), shown, node ids known and switched, faults
///  inodes    GETATTR, READLINK …     metadata, shown, node ids known
///  opens     OPEN, RELEASE           metadata, shown, node ids known and switched, backings, files
///  reads     READ                    files, buffers, shown, node ids known, faults
/// ```
pub struct Fs {
    names: Arc<Names>,
    inodes: Arc<Inodes>,
    opens: Arc<Opens>,
    reads: Arc<Reads>,
    files: Arc<Files>,
    backings: Arc<Backings>,
    counters: Arc<Counters>,
    /// In place of names, inodes and opens.
    writable: Option<Writable>,
}

impl Fs {
    pub fn new(
        settings: Settings,
        view: View,
        link: Arc<dyn Link>,
        inflight: Arc<Inflight>,
        roots: Vec<OwnedFd>,
        clock: Clock,
    ) -> Arc<Self> {
        let counters = Arc::new(Counters::default());
        let known = Arc::new(OldContents::default());
        let switched = Arc::new(Switched::new(settings.successor.then(|| clock())));
        let shown = Shown::new(&settings, clock);
        let metadata = Metadata::new(view.clone(), link.clone(), counters.clone());
        let faults = FaultInjection::new(&settings.injected_faults, view.clone(), inflight.clone());
        let files = Arc::new(Files::new(&settings, view.clone(), link.clone(), roots));
        let backings =
            Arc::new(Backings::recall(inflight.clone(), link.clone(), view.clone(), shown.clone()));
        let names = Names {
            metadata: metadata.clone(),
            shown: shown.clone(),
            known: known.clone(),
            switched: switched.clone(),
            faults: faults.clone(),
            counters: counters.clone(),
            no_opendir: settings.no_opendir,
        };
        let inodes = Inodes {
            metadata: metadata.clone(),
            shown: shown.clone(),
            known: known.clone(),
            link: link.clone(),
            source: settings.source,
        };
        let reads = Reads {
            view,
            shown: shown.clone(),
            known: known.clone(),
            files: files.clone(),
            buffers: Buffers::new(settings.buffer_bytes),
            faults,
            link: link.clone(),
            counters: counters.clone(),
        };
        let reads = Arc::new(reads);
        let writable = (settings.mode == Mode::Writable).then(|| Writable {
            link: link.clone(),
            reads: reads.clone(),
            shown: shown.clone(),
        });
        let opens = Opens {
            metadata,
            shown,
            known,
            switched,
            files: files.clone(),
            backings: backings.clone(),
            inflight,
            link,
            counters: counters.clone(),
        };
        Arc::new(Self {
            names: Arc::new(names),
            inodes: Arc::new(inodes),
            opens: Arc::new(opens),
            reads,
            files,
            backings,
            counters,
            writable,
        })
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// A cache file was dropped: let its space go.
    pub(crate) fn forget_file(&self, file: u64) {
        self.files.forget(file);
        self.backings.close_of(file);
    }

    /// Tells the agent which files were read since the last call.
    pub(crate) fn report_touched(&self) {
        self.files.report_touched();
    }

    /// Gives back what idles: buffers, and disk space without a user. To be called every second or so.
    pub fn trim(&self) {
        self.reads.trim();
        self.backings.close_superseded();
    }

    pub fn lookup(&self, parent: u64, name: &[u8], reply: Reply) {
        match &self.writable {
            Some(writable) => writable.lookup(parent, name, reply),
            None => self.names.lookup(parent, name, reply),
        }
    }

    pub fn opendir(&self, reply: Reply) {
        match &self.writable {
            Some(_) => drop(reply.opened(0, 0, 0)),
            None => self.names.opendir(reply),
        }
    }

    pub fn readdir(&self, batch: Batch, reply: Reply) {
        match &self.writable {
            Some(writable) => writable.readdir(batch, reply),
            None => self.names.readdir(batch, reply),
        }
    }

    /// `by_handle`: on behalf of an open file that is being read.
    pub fn getattr(&self, nodeid: u64, by_handle: bool, reply: Reply) {
        match &self.writable {
            Some(writable) => writable.getattr(nodeid, reply),
            None => self.inodes.getattr(nodeid, by_handle, reply),
        }
    }

    pub fn readlink(&self, nodeid: u64, reply: Reply) {
        self.inodes.readlink(nodeid, reply);
    }

    pub fn statfs(&self, reply: Reply) {
        match &self.writable {
            Some(writable) => writable.statfs(reply),
            None => self.inodes.statfs(reply),
        }
    }

    pub(crate) fn listxattr(&self, nodeid: u64, size: u32, reply: Reply) {
        self.inodes.listxattr(nodeid, size, reply);
    }

    pub fn getxattr(&self, nodeid: u64, name: &[u8], size: u32, reply: Reply) {
        self.inodes.getxattr(nodeid, name, size, reply);
    }

    pub fn open(&self, nodeid: u64, flags: i32, reply: Reply) {
        match &self.writable {
            Some(writable) => writable.open(nodeid, flags, reply),
            None => self.opens.open(nodeid, flags, reply),
        }
    }

    pub fn release(&self, nodeid: u64, reply: Reply) {
        match &self.writable {
            Some(writable) => writable.release(nodeid, reply),
            None => self.opens.release(nodeid, reply),
        }
    }

    /// `handle`: what OPEN gave out; 0 where the kernel opens without asking.
    pub fn read(&self, nodeid: u64, handle: u64, offset: u64, len: u32, reply: Reply) {
        match &self.writable {
            Some(writable) => writable.read(nodeid, offset, len, reply),
            None => self.reads.read(nodeid, handle, offset, len, reply),
        }
    }

    /// `handle`: what OPEN or CREATE gave out.
    pub fn flush(&self, nodeid: u64, handle: u64, reply: Reply) {
        match &self.writable {
            Some(writable) => writable.flush(nodeid, handle, reply),
            None => reply.fail(Failure::Unsupported), // the kernel asks no more
        }
    }

    pub fn fsync(&self, nodeid: u64, reply: Reply) {
        match &self.writable {
            Some(writable) => writable.sync(nodeid, false, reply),
            None => reply.fail(Failure::Unsupported),
        }
    }

    pub fn setattr(&self, nodeid: u64, set: SetAttributes, reply: Reply) {
        self.change(reply, |writable, reply| writable.setattr(nodeid, set, reply));
    }

    /// `flags`: those of open(2).
    pub fn create(&self, parent: u64, name: &[u8], owner: Owner, flags: i32, reply: Reply) {
        self.change(reply, |writable, reply| writable.create(parent, name, owner, flags, reply));
    }

    /// A regular file by mknod(2).
    pub(crate) fn make_file(&self, parent: u64, name: &[u8], owner: Owner, reply: Reply) {
        self.change(reply, |writable, reply| writable.make_file(parent, name, owner, reply));
    }

    pub fn mkdir(&self, parent: u64, name: &[u8], owner: Owner, reply: Reply) {
        self.change(reply, |writable, reply| writable.mkdir(parent, name, owner, reply));
    }

    pub fn unlink(&self, parent: u64, name: &[u8], reply: Reply) {
        self.change(reply, |writable, reply| writable.unlink(parent, name, reply));
    }

    pub fn rmdir(&self, parent: u64, name: &[u8], reply: Reply) {
        self.change(reply, |writable, reply| writable.rmdir(parent, name, reply));
    }

    /// `flags`: those of renameat2(2).
    pub fn rename(&self, from: (u64, &[u8]), to: (u64, &[u8]), flags: u32, reply: Reply) {
        self.change(reply, |writable, reply| writable.rename(from, to, flags, reply));
    }

    pub fn write(&self, nodeid: u64, reply: Reply) {
        self.change(reply, |writable, reply| writable.write(nodeid, reply));
    }

    /// The kernel keeps changes from a mount that is read-only; this is for one that is not, of a volume that is.
    fn change(&self, reply: Reply, change: impl FnOnce(&Writable, Reply)) {
        match &self.writable {
            Some(writable) => change(writable, reply),
            None => reply.fail(Failure::ReadOnly),
        }
    }
}

/// Says what should not be, and fails the request with EIO.
fn internal(what: &str) -> Failure {
    say(&format!("fuse-worker: {what}"));
    Failure::Cause(link::Cause::Internal)
}
