//! One cached file in use: which of its blocks are there, who waits for which, and its descriptors.
//!
//! ```text
//!  Resting ──sidecar read──► Partial ──last block there and verified──► Whole
//!  (on disk, by an            ▲
//!   earlier instance)         └─ new files start here, with nothing
//!
//! ```
//!
//! What is known of its blocks: `blocks`.

use super::bitmap;
use super::blocks::{Blocks, Known};
use super::bypass::Bypass;
use super::config::Reading;
use super::engine::{DroppedFile, Engine};
use super::fetch::{Fetch, FetchError};
use super::index::{Entry, Rest};
use super::pool::{call_returned, lock_of_ours};
use super::root::Root;
use super::sidecar::Image;
use super::stream::Streams;
use super::sums::Sums;
use super::waiters::{Waiter, Waiters};
use super::{FileKey, NO_ROOT, Reason, SMALL_BLOCKS};
use bytes::Bytes;
use crc_fast::CrcAlgorithm;
use rustix::fs::{MemfdFlags, Mode, OFlags};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// What [`File::read`] gives.
#[derive(Debug)]
pub enum Presence {
    /// The range is in the data file, verified. When a reader passes `mark` (byte offset), say [`File::advance`].
    Present { mark: Option<u64> },
    /// No disk could take the range: here it is.
    Uncached(Bytes),
}

/// What [`File::present`] finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// As [`Presence::Present`].
    Present { mark: Option<u64> },
    /// No disk could take the range.
    Elsewhere,
}

/// For a worker: neither can be written through.
#[derive(Debug)]
pub struct Descriptors {
    pub data: OwnedFd,
    /// The presence bitmap (one bit per block, little-endian u64 words); None: whole. It may end before the file does:
    /// of what lies beyond, [`File::read`] knows.
    pub presence: Option<OwnedFd>,
}

/// One version of one object. There is one instance per key; it is cheap to clone and to keep.
pub struct File {
    pub(crate) engine: Arc<Engine>,
    id: u64,
    key: Arc<FileKey>,
    blocks: u64,
    root: AtomicU8,
    /// Evicted, damaged or stale: nothing more is written to its data file.
    gone: AtomicBool,
    pub(crate) busy: Arc<AtomicU32>,
    data: OnceLock<OwnedFd>,
    creating: Mutex<()>,
    pub(crate) saving: Mutex<()>,
    pub(crate) bypass: Mutex<Bypass>,
    /// How its bodies are added up.
    pub(crate) sums: Option<CrcAlgorithm>,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub fetch: Arc<dyn Fetch>,
    pub has_source: bool,
    /// For readers that do not say how.
    pub reading: Reading,
    pub stale: Option<FetchError>,
    pub body: Body,
    pub streams: Streams,
    pub waiters: Waiters<Woken>,
    pub flights: usize,
    pub sums: Sums,
    /// How many want all of it.
    pub prefetch_all: usize,
    /// Decided under the lock, started without it: see [`File::launch`].
    pub launches: Vec<Launch>,
}

/// Work for blocks that are claimed already.
pub(crate) enum Launch {
    Fetch(Range<u64>),
    Verify(Range<u64>),
}

pub(crate) enum Body {
    Resting,
    Partial(Box<Blocks>),
    Whole,
}

impl Body {
    fn has(&self, blocks: Range<u64>) -> bool {
        match self {
            Self::Whole => true,
            Self::Partial(b) => b.has(blocks),
            Self::Resting => false,
        }
    }

    /// Once nothing is missing, the body is whole; gives what was kept of its blocks. Under the lock that shows readers
    /// the last block: one that waited for all of the file finds it whole.
    pub(crate) fn complete(&mut self) -> Option<Box<Blocks>> {
        let Self::Partial(blocks) = &*self else { return None };
        if !blocks.is_whole() {
            return None;
        }
        let Self::Partial(blocks) = std::mem::replace(self, Self::Whole) else { return None };
        Some(blocks)
    }
}

/// What a reader that waits for blocks is told.
#[derive(Clone, Debug)]
pub(crate) enum Woken {
    /// Something changed: look again.
    Look,
    /// The disk cannot take it: read from the source.
    Direct,
    Failed(FetchError),
}

impl State {
    pub(crate) fn has(&self, blocks: Range<u64>) -> bool {
        self.body.has(blocks)
    }

    /// Readers to wake because something happened to `touched`: those whose range is there; with `failure`, all that
    /// wanted any of it.
    pub(crate) fn wake(
        &mut self,
        touched: &Range<u64>,
        failure: Option<&Woken>,
    ) -> Vec<(Waiter<Woken>, Woken)> {
        let Self { waiters, body, .. } = self;
        waiters.take(touched, |blocks| match body.has(blocks.clone()) {
            true => Some(Woken::Look),
            false => failure.cloned(),
        })
    }
}

/// Without any lock held, because a woken reader runs at once.
pub(crate) fn send_all(woken: Vec<(Waiter<Woken>, Woken)>) {
    for (waiter, what) in woken {
        let _ = waiter.sender.send(what);
    }
}

impl File {
    pub(crate) fn new(
        engine: Arc<Engine>,
        id: u64,
        key: FileKey,
        fetch: Arc<dyn Fetch>,
        reading: Reading,
        busy: Arc<AtomicU32>,
    ) -> Self {
        let blocks = key.size.div_ceil(engine.config.block_bytes);
        Self {
            engine,
            id,
            key: Arc::new(key),
            blocks,
            root: AtomicU8::new(NO_ROOT),
            gone: AtomicBool::new(false),
            busy,
            data: OnceLock::new(),
            creating: Mutex::default(),
            saving: Mutex::default(),
            bypass: Mutex::default(),
            sums: fetch.sums(),
            state: Mutex::new(State {
                fetch,
                has_source: true,
                reading,
                stale: None,
                body: if blocks == 0 { Body::Whole } else { Body::Resting },
                streams: Streams::default(),
                waiters: Waiters::default(),
                flights: 0,
                sums: Sums::default(),
                prefetch_all: 0,
                launches: Vec::new(),
            }),
        }
    }

    /// Takes over what the index knows. Before anyone else sees the instance.
    pub(crate) fn settle(&self, entry: &Entry, parked: Option<&Image>) {
        self.root.store(entry.root, Ordering::Relaxed);
        let mut state = self.lock();
        if self.blocks == 0 {
            return;
        }
        let partial = |known: Known| Body::Partial(Box::new(Blocks::unverified(self.blocks, known)));
        state.body = match entry.rest {
            Rest::Whole => Body::Whole,
            Rest::Unplaced => partial(Known::default()),
            // A small file that never became whole left no checksums.
            Rest::Partial if !self.is_large() => partial(Known::default()),
            _ if entry.crcs.len() as u64 == self.blocks => partial(Known::all(&entry.crcs)),
            _ => parked.map_or(Body::Resting, |image| partial(image.known.clone())),
        };
    }

    pub fn id(&self) -> u64 {
        self.id
    }
    pub fn key(&self) -> &Arc<FileKey> {
        &self.key
    }
    /// Which cache directory holds it, or [`NO_ROOT`]. Decided by the first fetch (or by [`File::descriptors`]).
    pub fn root(&self) -> u8 {
        self.root.load(Ordering::Relaxed)
    }
    /// Its disk hangs: what it has is fetched from the source.
    pub fn is_passed_by(&self) -> bool {
        self.placed().is_some_and(|root| root.hangs())
    }
    /// Not so for one that was opened by its id and that was not open before.
    pub fn has_source(&self) -> bool {
        self.lock().has_source
    }
    /// All bytes are in the data file and verified.
    pub fn is_whole(&self) -> bool {
        matches!(self.lock().body, Body::Whole)
    }

    /// Places the file if nothing was fetched yet. For a file that no disk can take, or whose disk hangs, the data is
    /// empty and the bitmap says so.
    pub async fn descriptors(self: &Arc<Self>) -> io::Result<Descriptors> {
        let placed = {
            let mut state = self.lock();
            if self.blocks == 0 { None } else { self.place(&mut state).cloned() }
        };
        let Some(root) = placed else { return self.no_descriptors() };
        let (file, at) = (self.clone(), root.clone());
        let opened = root.run(move || file.open_descriptors(&at));
        // Those before us in the queue may each take nearly as long as one call may.
        match tokio::time::timeout(root.timeout, opened).await {
            Ok(Some(opened)) => opened,
            Ok(None) | Err(_) => self.no_descriptors(),
        }
    }

    /// Workers recognise it: a file of which something is present is never empty.
    fn no_descriptors(&self) -> io::Result<Descriptors> {
        let presence = if self.blocks == 0 { None } else { Some(bitmap::nothing_present(self.blocks)?) };
        Ok(Descriptors { data: empty_file()?, presence })
    }

    fn open_descriptors(&self, root: &Root) -> io::Result<Descriptors> {
        let presence = match &mut self.lock().body {
            Body::Whole => None,
            Body::Partial(blocks) => Some(blocks.share()?),
            // Nothing is verified yet; the first read decides.
            Body::Resting => Some(bitmap::nothing_present(self.blocks)?),
        };
        let data = match self.data.get() {
            Some(data) => reopen(data),
            // What is there first: on a read-only disk it can be read and nothing can be created.
            None if presence.is_some() => {
                let existing = root.open_data(&self.key, self.id);
                call_returned();
                existing.or_else(|_| self.data_fd(root).and_then(reopen))
            }
            None => root.open_data(&self.key, self.id),
        };
        match data {
            Ok(data) => Ok(Descriptors { data, presence }),
            Err(error) if presence.is_some() => {
                // The disk refuses even the empty file: the worker asks for every range and gets it uncached.
                self.refused(root, "create", &error);
                self.no_descriptors()
            }
            Err(error) => {
                root.failed("open", &error, false);
                Err(error)
            }
        }
    }

    /// Ends a decision. Starting is not done under the lock, because a runtime or a pool that is shutting down drops
    /// the work at once, and what is dropped gives its blocks back.
    pub(crate) fn launch(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let launches = std::mem::take(&mut state.launches);
        let fetch = state.fetch.clone();
        drop(state);
        for launch in launches {
            match launch {
                Launch::Fetch(blocks) => self.fly(fetch.clone(), blocks),
                Launch::Verify(blocks) => self.check(blocks),
            }
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(crate) fn block_bytes(&self) -> u64 {
        self.engine.config.block_bytes
    }
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }
    /// Has a sidecar, and is fetched in parts.
    pub(crate) fn is_large(&self) -> bool {
        self.blocks > SMALL_BLOCKS
    }
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
    /// The blocks that a byte range touches.
    pub(crate) fn blocks_of(&self, range: &Range<u64>) -> Range<u64> {
        range.start / self.block_bytes()..range.end.div_ceil(self.block_bytes())
    }
    /// The bytes that blocks hold; the last one may be short.
    pub(crate) fn bytes_of(&self, blocks: &Range<u64>) -> Range<u64> {
        blocks.start * self.block_bytes()..(blocks.end * self.block_bytes()).min(self.key.size)
    }
    pub(crate) fn placed(&self) -> Option<&Arc<Root>> {
        self.engine.roots.get(usize::from(self.root()))
    }

    /// The root that holds the file, chosen now if it has none. None: no disk can take it.
    pub(crate) fn place(&self, _state: &mut State) -> Option<&Arc<Root>> {
        if self.placed().is_none() && !self.is_gone() {
            let root = self.engine.place(self.id, &self.key)?;
            self.root.store(root, Ordering::Relaxed);
        }
        self.placed()
    }

    /// The data file, created on first use. Blocking.
    pub(crate) fn data_fd(&self, root: &Root) -> io::Result<&OwnedFd> {
        if let Some(fd) = self.data.get() {
            return Ok(fd);
        }
        let _one = lock_of_ours(&self.creating);
        if let Some(fd) = self.data.get() {
            return Ok(fd);
        }
        let fd = root.create_data(&self.key, self.id)?;
        call_returned();
        if self.is_large() {
            // A reader that maps or reads beyond what is there must see zeros, never the end of the file.
            rustix::fs::ftruncate(&fd, self.key.size)?;
            call_returned();
        }
        if self.is_gone() {
            // Evicted before it was ever created: leave nothing behind.
            let _ = root.remove(&self.key, self.id, false);
        }
        Ok(self.data.get_or_init(|| fd))
    }

    /// The disk did not take this file, or what was to be written to it. Blocking.
    pub(crate) fn refused(&self, root: &Root, operation: &'static str, error: &io::Error) {
        if error.kind() != io::ErrorKind::FileTooLarge {
            return root.failed(operation, error, true);
        }
        // Nothing is wrong with the disk: its file system has no files of this size. They are read past it.
        root.has_no_files_of(self.key.size);
        self.engine.drop_file(self.id, Reason::TooLarge);
    }

    /// The data file as an earlier run left it; works on a read-only disk. Blocking.
    pub(crate) fn existing_data_fd(&self, root: &Root) -> io::Result<OwnedFd> {
        match self.data.get() {
            Some(fd) => fd.as_fd().try_clone_to_owned(),
            None => root.open_data(&self.key, self.id),
        }
    }

    pub(crate) fn renew(&self, fetch: Arc<dyn Fetch>, reading: Reading) {
        let mut state = self.lock();
        state.fetch = fetch;
        state.has_source = true;
        state.reading = reading;
    }

    /// Its disk hangs: readers that wait go to the source.
    pub(crate) fn pass_by(&self) {
        let woken = self.lock().wake(&(0..self.blocks), Some(&Woken::Direct));
        send_all(woken);
    }

    /// It is out of the cache: readers that wait, and all that come, read from the source or from what is there.
    pub(crate) fn give_up(&self) {
        self.gone.store(true, Ordering::Release);
        let woken = self.lock().wake(&(0..self.blocks), Some(&Woken::Direct));
        send_all(woken);
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let unsaved = match &state.body {
            Body::Partial(b) if b.unsaved > 0 && self.blocks > SMALL_BLOCKS => Some(Image {
                id: self.id,
                key: self.key.clone(),
                block_bytes: self.engine.config.block_bytes,
                known: b.known(),
            }),
            _ => None,
        };
        let root = *self.root.get_mut();
        // Closing may wait for the disk, and the last reference may go on any thread.
        if let (Some(data), Some(root)) = (self.data.take(), self.engine.roots.get(usize::from(root))) {
            root.pool.close_file(data);
        }
        self.engine.enqueue_dropped(DroppedFile { id: self.id, root, unsaved });
    }
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File").field("id", &self.id).field("root", &self.root()).finish_non_exhaustive()
    }
}

/// Another open file description, without the right to write; works for an unlinked file too.
fn reopen(fd: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

fn empty_file() -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create("millpond-empty", MemfdFlags::CLOEXEC)?)
}
