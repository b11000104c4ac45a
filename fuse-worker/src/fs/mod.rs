//! The read-only file system: names from the metadata store, bytes from cache files, and the agent for what is missing.
//!
//! It knows nothing of fuser or the device: requests are calls, answers are [`Reply`]s, the agent is a [`Link`]. No call
//! waits for the agent; what is to happen with its answer is parked there.

mod attributes;
mod backing;
mod counters;
mod fault_injection;
mod files;
mod freshness;
mod names;
mod node;
mod open;
mod read;
mod space;
#[cfg(test)]
mod tests;

pub use counters::Counters;
pub use names::Batch;
pub use node::{ino_of, node_id};

use crate::client::{Answer, Link};
use crate::errno::Failure;
use crate::reply::{Entry, Reply, Stat};
use backing::Backings;
use cache::meta::{Attributes, Kind, View};
use files::Files;
use link::inflight::Inflight;
use link::worker::{Ask, FromWorker, InjectedFault, Mode, Show};
use space::Buffers;
use startup::log::say;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

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

pub struct Fs {
    settings: Settings,
    view: View,
    link: Arc<dyn Link>,
    inflight: Arc<Inflight>,
    /// Directories of the scope's cache roots, by number.
    roots: Vec<OwnedFd>,
    clock: Clock,
    files: Files,
    known: node::Known,
    switched: node::Switched,
    backings: Backings,
    buffers: Buffers,
    /// Cache files read since the last `Touched`.
    touched: Mutex<Vec<u64>>,
    counters: Counters,
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
        Arc::new(Self {
            files: Files::new(settings.files_max),
            known: node::Known::default(),
            switched: node::Switched::new(settings.successor.then(|| clock())),
            backings: Backings::recall(&inflight),
            buffers: Buffers::new(settings.buffer_bytes),
            touched: Mutex::default(),
            counters: Counters::default(),
            settings,
            view,
            link,
            inflight,
            roots,
            clock,
        })
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// A cache file was dropped: let its space go.
    pub fn forget_file(&self, file: u64) {
        self.files.forget(file);
        self.close_backing_of(file);
    }

    /// Tells the agent which files were read since the last call.
    pub fn report_touched(&self) {
        let mut files = std::mem::take(&mut *self.touched_list());
        if !files.is_empty() {
            self.files.untouch();
            files.sort_unstable();
            files.dedup();
            for chunk in files.chunks(4096) {
                self.link.tell(FromWorker::Touched { files: chunk.to_vec() });
            }
        }
    }

    /// Gives back what idles: buffers, and the disk space that is kept for nobody. To be called every second or so.
    pub fn trim(&self) {
        self.buffers.trim();
        self.close_superseded();
    }

    fn touched_list(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.touched.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Asks the agent, and goes on with the answer or fails the request.
    fn ask(
        self: &Arc<Self>,
        question: Ask,
        reply: Reply,
        then: impl FnOnce(&Arc<Self>, Reply) + Send + 'static,
    ) {
        let fs = self.clone();
        self.counters.metadata_misses.add(1);
        self.link.ask(
            question,
            Box::new(move |answer: Answer| match answer {
                Ok(_) => then(&fs, reply),
                Err(cause) => reply.fail(cause),
            }),
        );
    }

    fn node_id(&self, attributes: &Attributes) -> u64 {
        node_id(self.settings.mode, attributes)
    }

    fn entry(&self, attributes: &Attributes, ttl: Duration) -> Entry {
        Entry { nodeid: self.node_id(attributes), ttl, stat: self.stat(attributes) }
    }

    fn stat(&self, attributes: &Attributes) -> Stat {
        let show = &self.settings.show;
        let (mode, size) = match attributes.kind {
            Kind::File => (libc::S_IFREG | show.file_mode & 0o7777, attributes.size),
            Kind::Directory => (libc::S_IFDIR | show.dir_mode & 0o7777, 0),
            Kind::Symlink => (libc::S_IFLNK | 0o777, attributes.target.len() as u64),
        };
        Stat { ino: attributes.ino, size, mtime_ns: attributes.mtime_ns, mode, uid: show.uid, gid: show.gid }
    }

    /// How long what was seen at `seen_ms` may still be trusted; None: it must be asked again.
    fn freshness(&self, seen_ms: u64) -> Option<Duration> {
        freshness::remaining(self.settings.show.ttl, seen_ms, (self.clock)())
    }

    /// As `freshness`, but what the agent has just confirmed is good for this one answer, however short the limit.
    fn freshness_after(&self, asked: bool, seen_ms: u64) -> Option<Duration> {
        self.freshness(seen_ms).or(asked.then_some(Duration::ZERO))
    }

    fn internal(&self, what: &str) -> Failure {
        say(&format!("fuse-worker: {what}"));
        Failure::Cause(link::Cause::Internal)
    }
}
