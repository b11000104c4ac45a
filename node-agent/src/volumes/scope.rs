//! One source seen with one set of credentials: brings names, listings and files in, once for the whole node.
//!
//! Volumes of the same source and credentials share a scope: its metadata store, its cache files, its requests. A
//! question that several workers ask at once is asked of the source once. What the source answers goes into the
//! metadata store; the answer sends the worker there.

mod members;
mod wanted;

pub(crate) use members::{Member, Wants};

use crate::lock::lock;
use crate::log_limit::Seldom;
use crate::prefetch::ledger::at_once;
use crate::single_flight::SingleFlight;
use crate::source::credentials::CredentialedSource;
use crate::source::health::Health;
use crate::source::outage::{Asked, Outage, Tolerance};
use bytes::{Bytes, BytesMut};
use cache::data::{Checksum, CrcAlgorithm, Engine, FetchError, File, FileKey, ReadOptions};
use cache::meta::{self, Attributes, Cached, Incoming, Lookup, MetaError};
use futures::StreamExt;
use futures::stream::BoxStream;
use inflight::{carry, carry_job};
use link::Cause;
use link::broker::Away;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use store::{Page, StoreError};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use volume::{Freshness, Parameters, ScopeId};

/// After this many single look-ups in a directory too large for one page, its whole listing is fetched.
const LOOKUPS_BEFORE_LISTING: u32 = 8;
/// How long a reader whose version is gone from the source waits until the new one is known.
const ASK_AFTER_STALE: Duration = Duration::from_secs(10);
/// Versions that readers may still hold open although the source has moved on.
const VERSIONS_KEPT: usize = 65_536;
/// Directories of which something is kept here, for each purpose; there may be millions.
const DIRECTORIES_KEPT: usize = 65_536;
/// Files that are not whole and are held for the workers; each has a descriptor.
const HELD_MAX: usize = 1024;
/// How much is reported of why a source does not answer: a store may say much.
const AWAY_CHARS_MAX: usize = 1000;
/// Pages in a row of one listing that bring nothing. A store that skips over what it has deleted may send some.
const EMPTY_PAGES_MAX: u32 = 1000;
/// So many pages of a listing are stored as fast as they come.
const PAGES_AT_ONCE: u64 = 100;
/// Beyond them, while this node gets something from other sources too: a pause after each page, so much longer than it
/// took to store, for a listing without end is a processor's whole work. (To read a page takes about as long again.)
const PAUSE: u32 = 6;
const PAUSE_MAX: Duration = Duration::from_millis(500);

pub struct Scope {
    pub id: ScopeId,
    /// For people.
    pub shown: String,
    metadata: Metadata,
    /// The same store, read.
    pub names: meta::View,
    pub metadata_dir: std::path::PathBuf,
    engine: Arc<Engine>,
    /// With what the source is asked; later volumes and republishes bring fresh credentials.
    pub(crate) source: CredentialedSource,
    /// The volumes that use it.
    members: Mutex<members::Members>,
    /// Listings under way, and when each last got on.
    getting_on: Mutex<HashMap<u64, Instant>>,
    wanted: wanted::Wanted,
    hidden_said: Seldom,
    failed_said: Seldom,
    generation: u64,
    listings: SingleFlight<u64, Listed>,
    heads: SingleFlight<(u64, Vec<u8>), ()>,
    /// Directories that do not fit into one page, and how many single look-ups they have had.
    large: Mutex<HashMap<u64, u32>>,
    versions: Mutex<Versions>,
    /// Bytes of the files of each directory that was listed, of as many as may be kept here.
    listed_bytes: Mutex<HashMap<u64, u64>>,
    /// Cache roots whose disk fails.
    failing: Mutex<HashSet<u8>>,
    health: Arc<Health>,
    pub(crate) outage: Outage,
    /// A volume of it is written to here.
    written: AtomicBool,
    /// Slots for files that are fetched ahead (`prefetch::siblings`), over all its directories. Of each scope by itself: a
    /// source that does not answer keeps what it has.
    pub(crate) ahead: Arc<Semaphore>,
    me: Weak<Scope>,
}

/// How much of the source is known so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct KnownSize {
    /// At least.
    pub bytes: u64,
    pub names: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listed {
    Whole,
    /// More than one page, and the asker wanted no more than one.
    TooLarge,
    /// No reader waited for it any more.
    GivenUp,
}

/// Which inode and version a cache file belongs to, and the other way round.
#[derive(Default)]
struct Versions {
    by_file: HashMap<u64, (u64, u32)>,
    keys: HashMap<(u64, u32), FileKey>,
    /// Files that are not whole yet and that workers hold descriptors of: dropped here, their blocks would be
    /// fetched into a new file that no worker reads. The oldest go first: their readers ask again.
    held: HashMap<u64, Arc<File>>,
    held_order: VecDeque<u64>,
}

impl Versions {
    fn hold(&mut self, file: &Arc<File>) -> Option<Arc<File>> {
        // A whole file is found again by its id; but not with a source, which it needs while its disk hangs.
        if file.is_whole() && !file.is_passed_by() || self.held.insert(file.id(), file.clone()).is_some() {
            return None;
        }
        self.held_order.push_back(file.id());
        while self.held_order.len() > HELD_MAX {
            let oldest = self.held_order.pop_front()?;
            if let Some(file) = self.held.remove(&oldest) {
                return Some(file);
            }
        }
        None
    }
}

/// A store that is written out on a thread that may wait for its disk, whichever thread drops its scope: the last may
/// be a task that asked a question.
struct Metadata(Option<Arc<meta::Store>>);

impl Deref for Metadata {
    type Target = Arc<meta::Store>;

    fn deref(&self) -> &Arc<meta::Store> {
        self.0.as_ref().expect("it is taken only by what ends the scope")
    }
}

impl Drop for Metadata {
    fn drop(&mut self) {
        if let Some(store) = self.0.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn_blocking(move || drop(store));
        }
    }
}

impl Scope {
    #[cfg(test)]
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Writes its store out. Blocking.
    pub(crate) fn close(mut self) {
        drop(self.metadata.0.take());
    }

    /// `data_slots`: requests for bodies to all stores at once.
    pub(crate) fn new(
        id: ScopeId,
        shown: String,
        metadata: Arc<meta::Store>,
        metadata_dir: std::path::PathBuf,
        engine: Arc<Engine>,
        source: CredentialedSource,
        health: Arc<Health>,
        generation: u64,
        data_slots: usize,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            id,
            shown,
            names: metadata.view(),
            metadata: Metadata(Some(metadata)),
            metadata_dir,
            engine,
            source,
            members: Mutex::default(),
            getting_on: Mutex::default(),
            hidden_said: Seldom::default(),
            failed_said: Seldom::default(),
            wanted: wanted::Wanted::default(),
            generation,
            listings: SingleFlight::default(),
            heads: SingleFlight::default(),
            large: Mutex::default(),
            versions: Mutex::default(),
            listed_bytes: Mutex::default(),
            failing: Mutex::default(),
            health,
            outage: Outage::default(),
            written: AtomicBool::new(false),
            ahead: Arc::new(Semaphore::new(at_once(data_slots))),
            me: me.clone(),
        })
    }

    /// Leaves the metadata store to the agent's successor.
    pub fn release(&self) {
        self.metadata.release();
    }

    pub fn known(&self) -> KnownSize {
        let names = self.metadata.stats().map(|s| s.inodes).unwrap_or_default();
        let bytes = lock(&self.listed_bytes).values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        KnownSize { bytes, names }
    }

    fn arc(&self) -> Arc<Self> {
        self.me.upgrade().expect("a method runs on a scope that is held")
    }

    // ------------------------------------------------------------------ names

    /// Makes the metadata store know `name` in `parent`, as fresh as `freshness` demands.
    pub async fn lookup(&self, parent: u64, name: &[u8], freshness: Freshness) -> Result<(), Cause> {
        // Another worker may have been faster.
        match self.names.lookup(parent, name).map_err(|e| self.failed(e))? {
            Lookup::Found { seen_ms, .. } | Lookup::Absent { seen_ms }
                if fresh(freshness, seen_ms, self.names.now_ms()) =>
            {
                return Ok(());
            }
            _ => {}
        }
        // One page answers this name and its neighbours, for the price of one request. Strict volumes ask for
        // exactly what is opened.
        if freshness != Freshness::Strict {
            self.wanted.touch(parent);
            match self.count_large(parent) {
                None => {
                    if self.list_flight(parent, true).await? == Listed::Whole {
                        return Ok(());
                    }
                    let mut large = lock(&self.large);
                    if large.len() >= DIRECTORIES_KEPT {
                        large.clear(); // each costs a page to be known as large again
                    }
                    large.entry(parent).or_insert(1);
                }
                Some(LOOKUPS_BEFORE_LISTING) => {
                    let me = self.arc();
                    tokio::spawn(carry(async move { me.list_together(parent, false).await }));
                }
                Some(_) => {}
            }
        }
        self.head(parent, name).await
    }

    fn count_large(&self, dir: u64) -> Option<u32> {
        let mut large = lock(&self.large);
        let count = large.get_mut(&dir)?;
        *count = count.saturating_add(1);
        Some(*count)
    }

    /// Asks the source about one name, now.
    pub async fn head(&self, parent: u64, name: &[u8]) -> Result<(), Cause> {
        let me = self.arc();
        let name = name.to_vec();
        self.heads
            .join((parent, name.clone()), move || async move {
                let path = me.child_path(parent, &name)?;
                let (asked_ms, asked) = (me.metadata.asks(), me.outage.asks());
                let found = me.source.head(&path).await.map_err(|e| me.cause(asked, "look-up", &path, &e))?;
                me.answered();
                let scope = me.clone();
                me.blocking(move || {
                    let found = found.map(|entry| scope.incoming(parent, entry));
                    scope.metadata.put_answer(parent, &name, found.as_ref(), asked_ms)
                })
                .await
            })
            .await
    }

    /// Makes the metadata store know the attributes of `ino`, as fresh as `freshness` demands, or now if `force`.
    pub async fn attributes(&self, ino: u64, freshness: Freshness, force: bool) -> Result<(), Cause> {
        if ino == meta::ROOT {
            return Ok(()); // the source itself: it has no name that could change
        }
        let (attributes, seen_ms) =
            self.names.attributes(ino).map_err(|e| self.failed(e))?.ok_or(Cause::Stale)?;
        // A directory's attributes are ours, not the source's.
        if attributes.kind == meta::Kind::Directory
            || !force && fresh(freshness, seen_ms, self.names.now_ms())
        {
            return Ok(());
        }
        let (parent, name) = self.parent_and_name(ino).map_err(|e| self.failed(e))?.ok_or(Cause::Stale)?;
        self.head(parent, &name).await
    }

    /// Makes the metadata store hold the listing of `dir`, as fresh as `freshness` demands.
    pub async fn list(&self, dir: u64, freshness: Freshness) -> Result<(), Cause> {
        if let Some(state) = self.names.listing(dir).map_err(|e| self.failed(e))?
            && state.complete
            && fresh(freshness, state.seen_ms, self.names.now_ms())
        {
            return Ok(());
        }
        self.list_flight(dir, false).await.map(|_| ())
    }

    async fn list_flight(&self, dir: u64, one_page: bool) -> Result<Listed, Cause> {
        let _waiter = self.wanted.wait(dir);
        loop {
            match (self.list_together(dir, one_page).await?, one_page) {
                // We joined a question for one page only, or a listing at the moment of its end.
                (Listed::TooLarge, false) | (Listed::GivenUp, _) => {}
                (listed, _) => return Ok(listed),
            }
        }
    }

    /// Waits for a listing without being counted among those who want it.
    async fn list_together(&self, dir: u64, one_page: bool) -> Result<Listed, Cause> {
        let me = self.arc();
        self.listings.join(dir, move || async move { me.list_now(dir, one_page).await }).await
    }

    async fn list_now(self: Arc<Self>, dir: u64, one_page: bool) -> Result<Listed, Cause> {
        self.wanted.begins(dir);
        let listed = self.clone().list_pages(dir, one_page).await;
        self.wanted.ends(dir);
        lock(&self.getting_on).remove(&dir);
        listed
    }

    async fn list_pages(self: Arc<Self>, dir: u64, one_page: bool) -> Result<Listed, Cause> {
        let path = self.names.path(dir).map_err(|e| self.failed(e))?.ok_or(Cause::Stale)?;
        let failed = |asked: Asked, e: StoreError| self.cause(asked, "listing", &path, &e);
        // Before the source is asked: what this node changes there meanwhile is newer than the answer. Between two pages it holds no
        // thread: a source that never sends the next one keeps none from the others.
        let metadata = self.metadata.clone();
        let mut listing = self.blocking(move || metadata.begin_listing_owned(dir)).await?;
        let asked = self.outage.asks();
        let mut page = self.list_page(&path, None).await?.map_err(|e| failed(asked, e))?;
        self.answered();
        if one_page && page.next.is_some() {
            return Ok(Listed::TooLarge);
        }
        let (mut bytes, mut empty) = (0u64, 0);
        for number in 1u64.. {
            let next = page.next.take();
            if next.is_some() {
                if !self.wanted.is_wanted(dir) {
                    self.take_back(listing);
                    tracing::info!(source = %self.shown, directory = dir, "a listing is given up: no caller waits for it");
                    return Ok(Listed::GivenUp);
                }
                lock(&self.getting_on).insert(dir, Instant::now());
            }
            empty = if page.entries.is_empty() { empty + 1 } else { 0 };
            let me = self.clone();
            let storing = self.blocking(move || {
                let begun = Instant::now();
                me.report_unnameable(dir, &page);
                listing.hide(page.unnameable.len() as u64);
                let entries: Vec<Incoming> =
                    page.entries.into_iter().map(|entry| me.incoming(dir, entry)).collect();
                if let Err(error) = listing.page(&entries) {
                    take_back(&Arc::downgrade(&me), listing); // what it has taken may be all the room there was
                    return Err(error);
                }
                // What a source claims may be more than any sum can hold.
                let files = entries.iter().filter(|e| e.kind == meta::Kind::File);
                let bytes = files.fold(bytes, |sum, file| sum.saturating_add(file.size));
                Ok((listing, bytes, begun.elapsed()))
            });
            // The next page is on its way while this one is stored.
            let asking = async {
                let Some(token) = &next else { return Ok(None) };
                let asked = self.outage.asks();
                if empty > EMPTY_PAGES_MAX {
                    return Err(failed(asked, endless(&path, "page after page is empty")));
                }
                let page = self.list_page(&path, Some(token)).await?.map_err(|e| failed(asked, e))?;
                match page.next.as_ref() == Some(token) {
                    true => Err(failed(self.outage.asks(), endless(&path, "a page is followed by itself"))),
                    false => Ok(Some(page)),
                }
            };
            let (stored, asked) = tokio::join!(storing, asking);
            let took;
            (listing, bytes, took) = stored?;
            match asked {
                Ok(Some(next)) => {
                    self.answered();
                    page = next;
                    if number > PAGES_AT_ONCE && self.source.others_move() {
                        tokio::time::sleep((took * PAUSE).min(PAUSE_MAX)).await;
                    }
                }
                Ok(None) => break,
                Err(cause) => {
                    self.take_back(listing);
                    return Err(cause);
                }
            }
        }
        self.blocking(move || listing.finish()).await?;
        note(&mut lock(&self.listed_bytes), dir, bytes, DIRECTORIES_KEPT);
        Ok(Listed::Whole)
    }

    /// The listing before stays in force. No reader waits for this one's end, nor for its names to be deleted.
    fn take_back(self: &Arc<Self>, listing: meta::ListingWriter<Arc<meta::Store>>) {
        let me = Arc::downgrade(self);
        tokio::task::spawn_blocking(move || take_back(&me, listing));
    }

    /// Err: the last volume is gone, and a listing may be long. It would keep the scope open.
    async fn list_page(&self, path: &[u8], token: Option<&str>) -> Result<Result<Page, StoreError>, Cause> {
        tokio::select! {
            biased;
            () = self.source.access.ended() => Err(Cause::Unavailable),
            page = self.source.list(path, token) => Ok(page),
        }
    }

    fn report_unnameable(&self, dir: u64, page: &Page) {
        if !page.unnameable.is_empty()
            && let Some(left_out) = self.hidden_said.say()
        {
            tracing::warn!(
                left_out,
                source = %self.shown,
                directory = dir,
                count = page.unnameable.len(),
                first = %page.unnameable[0],
                "what no file system can show (by its name or its size) is not shown"
            );
        }
    }

    fn parent_and_name(&self, ino: u64) -> Result<Option<(u64, Vec<u8>)>, MetaError> {
        let (Some(parent), Some(path)) = (self.names.parent(ino)?, self.names.path(ino)?) else {
            return Ok(None);
        };
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec();
        Ok(Some((parent, name)))
    }

    fn child_path(&self, parent: u64, name: &[u8]) -> Result<Vec<u8>, Cause> {
        let mut path = self.names.path(parent).map_err(|e| self.failed(e))?.ok_or(Cause::Stale)?;
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Ok(path)
    }

    /// This node has given an inode a name at the source. Blocking.
    pub(crate) fn place(&self, parent: u64, incoming: &Incoming, ino: u64) -> Result<Attributes, MetaError> {
        self.metadata.place(parent, incoming, ino)
    }

    /// This node has removed a name at the source. Blocking.
    pub(crate) fn unplace(&self, parent: u64, name: &[u8]) -> Result<(), MetaError> {
        self.metadata.remove(parent, name)
    }

    // ------------------------------------------------------------------ files

    /// The cache file of this version of this inode; `Stale` when the source has another version and the cache does not
    /// hold this one.
    pub fn file(&self, ino: u64, version: u32, options: ReadOptions) -> Result<Arc<File>, Cause> {
        let key = self.key(ino, version)?;
        Ok(self.open(key, ino, version, options))
    }

    fn key(&self, ino: u64, version: u32) -> Result<FileKey, Cause> {
        // The last ones known: the object may be gone at the source and still be whole in the cache.
        let attributes = self.names.last_attributes(ino).map_err(|e| self.failed(e))?.ok_or(Cause::Stale)?;
        if attributes.kind != meta::Kind::File {
            return Err(Cause::Internal);
        }
        if attributes.size > volume::FILE_BYTES_MAX {
            return Err(Cause::Stale); // stored by a build that did not look; no reader gets it
        }
        let key = if attributes.version == version {
            let path = self.names.path(ino).map_err(|e| self.failed(e))?.ok_or(Cause::Stale)?;
            FileKey { scope: self.id.clone(), path, token: attributes.token, size: attributes.size }
        } else {
            lock(&self.versions).keys.get(&(ino, version)).cloned().ok_or(Cause::Stale)?
        };
        Ok(key)
    }

    /// Bytes of this version of this inode on the node's disks.
    pub fn cached_bytes(&self, ino: u64, version: u32) -> Result<u64, Cause> {
        Ok(self.engine.cached_bytes(&self.key(ino, version)?))
    }

    /// As [`Self::file`], for whatever version is current.
    pub fn current(&self, attributes: &Attributes, options: ReadOptions) -> Result<Arc<File>, Cause> {
        self.file(attributes.ino, attributes.version, options)
    }

    fn open(&self, key: FileKey, ino: u64, version: u32, options: ReadOptions) -> Arc<File> {
        let fetch = Arc::new(FromSource {
            scope: self.me.clone(),
            path: key.path.clone(),
            version: store::Version(key.token.clone()),
            ino,
            sums: self.source.sums(key.size),
        });
        let file = self.engine.file(key.clone(), fetch, options);
        let mut versions = lock(&self.versions);
        if versions.keys.len() >= VERSIONS_KEPT {
            // Only superseded versions need this table, and they are few: start anew rather than grow.
            versions.keys.clear();
            versions.by_file.retain(|id, _| self.engine.by_id(*id).is_some());
        }
        versions.by_file.insert(file.id(), (ino, version));
        versions.keys.insert((ino, version), key);
        let let_go = versions.hold(&file);
        drop(versions);
        drop(let_go); // closes a file: not under the lock
        file
    }

    /// Bytes from the source, past the cache: for readers whose cache file cannot be read.
    pub async fn direct(&self, ino: u64, version: u32, offset: u64, len: u32) -> Result<Bytes, Cause> {
        let key = self.key(ino, version)?;
        let end = offset.saturating_add(u64::from(len)).min(key.size);
        if offset >= end {
            return Ok(Bytes::new());
        }
        let mut bytes = BytesMut::with_capacity((end - offset) as usize);
        let asked = self.outage.asks();
        let failed = |e: StoreError| self.cause(asked, "read", &key.path, &e);
        let mut body = self
            .source
            .get(&key.path, &store::Version(key.token.clone()), offset..end)
            .await
            .map_err(failed)?;
        while let Some(chunk) = body.next().await {
            bytes.extend_from_slice(&chunk.map_err(failed)?);
        }
        Ok(bytes.freeze())
    }

    /// The disk of a cache root fails, or works again: while it fails, workers are not sent to whole files on it by
    /// themselves, and new opens do not go past them. Returns the files on it that workers may hold, whatever the
    /// metadata store takes: reported once. Blocking; for the event thread.
    pub fn disk(&self, root: u8, works: bool) -> Vec<u64> {
        match works {
            true => lock(&self.failing).remove(&root),
            false => lock(&self.failing).insert(root),
        };
        let opened: Vec<(u64, (u64, u32))> =
            lock(&self.versions).by_file.iter().map(|(f, v)| (*f, *v)).collect();
        let (mut held, mut first_error) = (Vec::new(), None);
        for (id, (ino, version)) in opened {
            let Some(file) = self.engine.by_id(id).filter(|f| f.root() == root) else { continue };
            held.push(id);
            if !file.is_whole() {
                continue;
            }
            let cached = Cached { generation: self.generation, root, file: file.id() };
            if let Err(error) = self.metadata.set_cached(ino, version, works.then_some(cached)) {
                first_error.get_or_insert(error);
            }
        }
        if let Some(error) = first_error {
            tracing::warn!(source = %self.shown, root, works, %error, "cache state could not be noted: readers will ask");
        }
        held
    }

    pub(crate) fn disk_fails(&self, root: u8) -> bool {
        lock(&self.failing).contains(&root)
    }

    /// Cache files, each with its root, became whole and verified: from now on workers may open them without asking.
    /// Blocking; for the event thread.
    pub(crate) fn became_whole(&self, files: &[(u64, u8)]) -> Result<(), MetaError> {
        let (mut found, mut let_go) = (Vec::new(), Vec::new());
        {
            let mut versions = lock(&self.versions);
            for (file, root) in files {
                found.extend(versions.by_file.get(file).map(|at| (*at, *file, *root)));
                let_go.extend(versions.held.remove(file));
            }
        }
        drop(let_go); // the index knows whole files by itself
        found.retain(|(_, _, root)| !self.disk_fails(*root));
        let located = found.into_iter().map(|((ino, version), file, root)| {
            (ino, version, Some(Cached { generation: self.generation, root, file }))
        });
        let located: Vec<_> = located.collect();
        match self.metadata.set_cached_all(&located) {
            // One record may be damaged: the others are none the worse for it.
            Err(error) if !matches!(error, MetaError::Full(_)) => {}
            done => return done,
        }
        let each = located
            .into_iter()
            .map(|(ino, version, cached)| self.metadata.set_cached(ino, version, cached).map(|_| ()));
        each.fold(Ok(()), Result::and)
    }

    /// Is it still there? What is given up while no volume uses this scope is noted nowhere.
    pub(crate) fn has(&self, cached: &Cached) -> bool {
        cached.generation == self.generation && self.engine.is_whole(&self.id, cached.file)
    }

    /// A cache file, of this path, was evicted or dropped. Blocking; for the event thread.
    pub(crate) fn became_gone(&self, file: u64, path: &[u8]) -> Result<(), MetaError> {
        let (found, let_go) = {
            let mut versions = lock(&self.versions);
            (versions.by_file.remove(&file), versions.held.remove(&file))
        };
        drop(let_go);
        // Nobody has opened it since the scope was opened: its record is of before.
        let ino = found.map_or_else(|| self.names.resolve(path), |(ino, _)| Ok(Some(ino)))?;
        let Some(ino) = ino else { return Ok(()) };
        match self.names.attributes(ino)? {
            Some((a, _)) if a.cached.as_ref().is_some_and(|c| c.file == file) => {
                self.metadata.set_cached(ino, a.version, None).map(|_| ())
            }
            _ => Ok(()),
        }
    }

    // ------------------------------------------------------------------ errors

    /// A metadata store that is damaged is set aside when its last volume is gone; until then it is used as far as it
    /// goes.
    fn failed(&self, error: MetaError) -> Cause {
        tracing::error!(source = %self.shown, %error, "metadata store failed");
        if matches!(error, MetaError::Damaged(_))
            && let Err(error) = self.metadata.distrust()
        {
            tracing::error!(source = %self.shown, %error, "the damaged metadata store could not be marked");
        }
        Cause::Internal
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, MetaError> + Send + 'static,
    ) -> Result<T, Cause> {
        match tokio::task::spawn_blocking(carry_job(work)).await {
            Ok(done) => done.map_err(|e| self.failed(e)),
            Err(_) => Err(Cause::Internal), // it panicked, and the panic has been logged
        }
    }

    /// What a reader learns of a store's error. Outages are logged here, with the source's
    /// name; what a reader merely asked wrongly is not.
    fn cause(&self, asked: Asked, what: &str, path: &[u8], error: &StoreError) -> Cause {
        let cause = error.cause();
        if matches!(cause, Cause::Unavailable | Cause::Denied)
            && let Some(left_out) = self.failed_said.say()
        {
            tracing::warn!(left_out, source = %self.shown, path = %String::from_utf8_lossy(path), %error, "{what} failed");
        }
        match error {
            StoreError::Busy { .. } => self.outage.unasked(), // ours: it says nothing about the store
            // What was asked long ago may fail when the store is back already.
            _ if cause == Cause::Unavailable && !self.outage.has_answered(asked) => {
                self.health.fails(&error.to_string());
            }
            _ => self.heard(error),
        }
        cause
    }

    /// The source has answered.
    pub(crate) fn answered(&self) {
        self.outage.answered();
        self.health.works();
    }

    /// The source has said no, if that is what this is.
    pub(crate) fn heard(&self, error: &StoreError) {
        match error {
            StoreError::NotFound { .. } | StoreError::Stale { .. } => self.answered(),
            // A question that waits for a secret still gets that error.
            StoreError::Denied { .. } => {
                self.outage.answered();
            }
            // Nothing is learned until the token is renewed, as of a store that is away.
            StoreError::Expired { .. }
            | StoreError::Unavailable { .. }
            | StoreError::Busy { .. }
            | StoreError::Malformed { .. }
            | StoreError::Invalid { .. } => {}
            // Of writes: they say nothing of what is read.
            StoreError::Conflict { .. }
            | StoreError::Full { .. }
            | StoreError::Unsupported { .. }
            | StoreError::Damaged { .. } => {}
        }
    }

    /// From here on what is known of the mode and owner of a directory holds: it may be what a program here has given it, while a
    /// file:// source goes on to say those of its own, which are the agent's.
    pub(crate) fn note_written(&self) {
        self.written.store(true, Ordering::Relaxed);
    }

    fn incoming(&self, parent: u64, entry: store::Entry) -> Incoming {
        let mut incoming = incoming(entry);
        if incoming.kind == meta::Kind::Directory && self.written.load(Ordering::Relaxed) {
            let known = self.names.lookup(parent, &incoming.name);
            if matches!(known, Ok(Lookup::Found { attributes, .. }) if attributes.permissions.is_some()) {
                incoming.permissions = None;
            }
        }
        incoming
    }

    /// That it does not answer, as a volume with these parameters feels it.
    pub(crate) fn away(&self, parameters: &Parameters) -> Option<Away> {
        let stale = Tolerance::of(parameters).is_some();
        self.health.trouble().map(|why| Away { why: why.chars().take(AWAY_CHARS_MAX).collect(), stale })
    }

    /// The source has answered nothing, and calls go on without it.
    pub(crate) fn silent(&self, why: &str) {
        self.health.fails(why);
    }
}

/// How a cache file gets its bytes.
struct FromSource {
    scope: Weak<Scope>,
    path: Vec<u8>,
    version: store::Version,
    ino: u64,
    sums: Option<CrcAlgorithm>,
}

#[async_trait::async_trait]
impl cache::data::Fetch for FromSource {
    async fn fetch(
        &self,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, FetchError>>, FetchError> {
        let gone = || FetchError { cause: Cause::Unavailable, message: "the volume was unpublished".into() };
        let scope = self.scope.upgrade().ok_or_else(gone)?;
        let asked = scope.outage.asks();
        match scope.source.get(&self.path, &self.version, range).await {
            Ok(stream) => {
                scope.answered();
                let (weak, path, mut asked) = (self.scope.clone(), self.path.clone(), scope.outage.asks());
                Ok(stream
                    .map(move |item| {
                        let scope = weak.upgrade();
                        if let (Some(scope), true) = (&scope, item.is_ok()) {
                            scope.answered();
                            asked = scope.outage.asks();
                        }
                        item.map_err(|error| {
                            if let Some(scope) = scope {
                                scope.cause(asked, "read", &path, &error);
                            }
                            fetch_error(&error)
                        })
                    })
                    .boxed())
            }
            Err(error) => {
                let cause = scope.cause(asked, "read", &self.path, &error);
                if matches!(cause, Cause::Stale | Cause::NotFound) {
                    // Whatever the freshness: we know now that it changed. Before the reader knows it, so that its
                    // next open sees the new version; but a slow store does not hold up its error for ever.
                    let asked = scope.attributes(self.ino, Freshness::Strict, true);
                    let _ = tokio::time::timeout(ASK_AFTER_STALE, asked).await; // failed: the error says enough
                }
                Err(fetch_error(&error))
            }
        }
    }

    fn sums(&self) -> Option<CrcAlgorithm> {
        self.sums
    }

    async fn checksum(&self) -> Result<Option<Checksum>, FetchError> {
        let Some(scope) = self.scope.upgrade() else { return Ok(None) };
        let told = scope.source.checksum(&self.path, &self.version).await.map_err(|e| fetch_error(&e))?;
        Ok(told.map(|told| Checksum { algorithm: told.algorithm, value: told.value }))
    }

    fn came_wrong(&self, again: bool) {
        let Some(scope) = self.scope.upgrade() else { return };
        let (source, path) = (&scope.shown, String::from_utf8_lossy(&self.path));
        if let Some(left_out) = scope.failed_said.say() {
            let what = match again {
                true => {
                    "it is kept, for it came twice with the same bytes: compare it with its original and upload it again"
                }
                false => {
                    "it was changed on its way and is fetched again; who has read it may have read wrong bytes"
                }
            };
            tracing::error!(
                left_out, %source, %path,
                "an object does not have the checksum that its store tells: {what}"
            );
        }
        if again && scope.source.told_wrong() {
            tracing::warn!(
                %source,
                "this store tells checksums that its objects do not have: those of large objects are not compared any more"
            );
        }
    }
}

fn take_back(scope: &Weak<Scope>, listing: meta::ListingWriter<Arc<meta::Store>>) {
    // When the last volume is gone the store is wanted back.
    let go_on = || scope.upgrade().is_some_and(|scope| !scope.source.access.is_over());
    if let Err(error) = listing.take_back(go_on) {
        tracing::debug!(%error, "names of a listing that was given up stay for now");
    }
}

fn fetch_error(error: &StoreError) -> FetchError {
    FetchError { cause: error.cause().of_version(), message: error.to_string() }
}

/// Where there is no place for another directory it is not counted: the sum is a lower bound.
fn note(listed: &mut HashMap<u64, u64>, dir: u64, bytes: u64, most: usize) {
    if listed.len() < most || listed.contains_key(&dir) {
        listed.insert(dir, bytes);
    }
}

fn endless(path: &[u8], why: &str) -> StoreError {
    let what = String::from_utf8_lossy(path).into_owned();
    StoreError::Malformed { what, why: format!("a listing without end: {why}") }
}

fn incoming(entry: store::Entry) -> Incoming {
    let (kind, size, token, target) = match entry.kind {
        store::Kind::File { size, version } => (meta::Kind::File, size, version.to_string(), Vec::new()),
        store::Kind::Directory => (meta::Kind::Directory, 0, String::new(), Vec::new()),
        store::Kind::Symlink { target } => (meta::Kind::Symlink, target.len() as u64, String::new(), target),
    };
    Incoming {
        name: entry.name,
        kind,
        size,
        mtime_ns: entry.modified_ns,
        token,
        target,
        permissions: entry.permissions,
    }
}

/// Was it confirmed recently enough?
pub(crate) fn fresh(freshness: Freshness, seen_ms: u64, now_ms: u64) -> bool {
    match freshness {
        Freshness::Static => true,
        Freshness::Ttl(ttl) => {
            meta::age_ms(seen_ms, now_ms).is_some_and(|age| u128::from(age) < ttl.as_millis())
        }
        Freshness::Strict => false,
    }
}

#[cfg(test)]
mod tests;
