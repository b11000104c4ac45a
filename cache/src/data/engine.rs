//! The engine: hands out the one [`File`] of each key and owns what all files share.

use super::config::{Config, ReadOptions, Reading};
use super::evict::unlink;
use super::fetch::Fetch;
use super::file::File;
use super::index::{Index, Removed, Rest, RootUsage, ScopeUsage, TierUsage, Usage};
use super::memory::Memory;
use super::recover::{self, OpenError, Recovery};
use super::root::Root;
use super::sidecar::{self, Image};
use super::sums::Wrong;
use super::{FileKey, Observer, Reason};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use volume::ScopeId;

/// The keeper is called early when this much has been written since it last looked at the file systems.
const WRITTEN_WAKES_KEEPER: u64 = 64 << 20;
const KEEPER_PERIOD: Duration = Duration::from_secs(1);
/// What the keeper itself has slept longer than this it blames on no disk: a machine that stood still.
const KEEPER_LATE: Duration = Duration::from_secs(3);
/// A disk whose call takes this long must not hold memory that others wait for.
const STALLED: Duration = Duration::from_secs(2);
const LOOK_AT_LEAVE: Duration = Duration::from_millis(100);

/// The cache's data files on this node. One per set of directories, which it locks.
pub struct Engine {
    pub(crate) config: Config,
    pub(crate) roots: Vec<Arc<Root>>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) runtime: Handle,
    /// Bodies between network and disk.
    pub(crate) memory: Arc<Memory>,
    /// Bodies kept for readers of files that no disk can take.
    pub(crate) bypass_memory: Arc<Memory>,
    /// Whole-file verifications under way: they must not starve the readers of the disk.
    pub(crate) verifying: Arc<Semaphore>,
    pub(crate) wrong: Wrong,
    index: Mutex<Index>,
    dropped: Mutex<Vec<DroppedFile>>,
    subscribers: Mutex<Vec<mpsc::UnboundedSender<Event>>>,
    written: AtomicU64,
    keeper: Arc<Bell>,
    /// Held while directories of scopes are removed.
    pub(crate) sweeping: AtomicBool,
    /// Held by the keeper while it works. True: the directories may be another process's by now.
    closed: Mutex<bool>,
}

#[derive(Clone, Debug)]
pub enum Event {
    /// The file is whole and verified: it may be read from its data file without asking.
    Whole { key: Arc<FileKey>, file: u64, root: u8 },
    /// The file has left the cache; descriptors of it stay readable.
    Gone { key: Arc<FileKey>, file: u64 },
    /// The disk of this root fails (or works again): no reader should be sent to its files without need.
    Disk { root: u8, works: bool },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    pub files: u64,
    pub bytes: u64,
}

/// What a dropped [`File`] leaves behind. It is not taken to the index at once: the thread that drops it may hold that
/// lock.
pub(crate) struct DroppedFile {
    pub id: u64,
    pub root: u8,
    pub unsaved: Option<Image>,
}

/// What a write has brought to its limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pressure {
    keeper: bool,
    root: bool,
    scope: bool,
}

/// One thread keeps house on a root, until this is dropped.
struct Keeping(Arc<Root>);

impl Drop for Keeping {
    fn drop(&mut self) {
        self.0.keeping.store(false, Ordering::Release);
    }
}

/// Wakes the keeper.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    wake: Condvar,
}

impl Engine {
    /// Locks and scans the cache directories. Blocking: call it from a thread of its own or at start.
    pub fn open(
        config: Config,
        observer: Arc<dyn Observer>,
        runtime: Handle,
    ) -> Result<(Arc<Self>, Recovery), OpenError> {
        config.check()?;
        let (roots, index, recovery) = recover::recover(&config, &observer)?;
        let engine = Arc::new(Self {
            // A quarter for readers of files that cannot be cached; the rest for those that can.
            memory: Memory::new(config.memory_bytes - config.memory_bytes / 4),
            bypass_memory: Memory::new(config.memory_bytes / 4),
            verifying: Arc::new(Semaphore::new(1)),
            roots,
            observer,
            runtime,
            wrong: Wrong::default(),
            index: Mutex::new(index),
            dropped: Mutex::default(),
            subscribers: Mutex::default(),
            written: AtomicU64::new(0),
            keeper: Arc::default(),
            sweeping: AtomicBool::new(false),
            closed: Mutex::new(false),
            config,
        });
        let (keeper, bell) = (Arc::downgrade(&engine), engine.keeper.clone());
        std::thread::Builder::new()
            .name("cache-keeper".into())
            .spawn(move || maintain(&keeper, &bell))
            .map_err(OpenError::Threads)?;
        Ok((engine, recovery))
    }

    /// The file of `key`: the instance that others read, one from the disk, or a new one. `fetch` replaces the one
    /// given before (new credentials), and the options are those of readers that do not say theirs. Makes no system
    /// call.
    pub fn file(self: &Arc<Self>, key: FileKey, fetch: Arc<dyn Fetch>, options: ReadOptions) -> Arc<File> {
        self.reclaim();
        let mut dropped = None;
        let mut verify = false;
        let mut index = self.lock_index();
        let scope = index.scope(&key.scope, self.config.scope_limit_bytes);
        let id = match index.find(&key) {
            Some(id) => {
                index.touch(id);
                id
            }
            None => {
                let id = index.new_id();
                index.add(id, &key, scope);
                id
            }
        };
        let reading = options.within(&self.config, self.config.reading);
        let file = match index.live.get(&id).and_then(|l| l.file.upgrade()) {
            Some(file) => {
                drop(index);
                file.renew(fetch, reading);
                return file;
            }
            None => self.instance(&mut index, id, key, fetch, reading),
        };
        let rest = index.entries.get(&id).map(|e| e.rest);
        if file.is_large() && rest != Some(Rest::Whole) {
            dropped = index.keep_open(&file);
        }
        verify |= rest == Some(Rest::Unverified);
        drop(index);
        drop(dropped);
        if verify {
            file.verify_in_background();
        }
        file
    }

    /// The file with this id, if a process has it open or it is whole. A file that is only partly there and that no mount
    /// holds is None: open it anew by its key, for its bytes need a source.
    pub fn by_id(self: &Arc<Self>, id: u64) -> Option<Arc<File>> {
        let mut index = self.lock_index();
        if let Some(file) = index.live.get(&id).and_then(|l| l.file.upgrade()) {
            drop(index);
            return Some(file);
        }
        if index.entries.get(&id)?.rest != Rest::Whole {
            return None;
        }
        let key = index.key(id)?;
        let reading = Reading { readahead_bytes: 0, ..self.config.reading };
        let file = self.instance(&mut index, id, key, super::fetch::nowhere(), reading);
        file.lock().has_source = false;
        Some(file)
    }

    /// Is this file of the scope whole, as the index says?
    pub fn is_whole(&self, scope: &ScopeId, id: u64) -> bool {
        let index = self.lock_index();
        index.is_of(scope, id) && index.entries.get(&id).is_some_and(|entry| entry.rest == Rest::Whole)
    }

    /// As [`Self::by_id`], for callers that may see this scope alone.
    pub fn by_id_of(self: &Arc<Self>, scope: &ScopeId, id: u64) -> Option<Arc<File>> {
        // A whole file gets an instance by being looked for: not before its scope is known.
        let is_theirs = self.lock_index().is_of(scope, id);
        is_theirs.then(|| self.by_id(id)).flatten().filter(|file| file.key().scope == *scope)
    }

    /// Workers have read these files. Those of other scopes are none of their business.
    pub fn touched(&self, scope: &ScopeId, ids: &[u64]) {
        let mut index = self.lock_index();
        for &id in ids {
            if index.is_of(scope, id) {
                index.touch(id);
            }
        }
    }

    /// A reader found the data file unreadable or too short: the file is dropped, the next open fetches it again.
    pub fn damaged(&self, id: u64) {
        self.drop_file(id, Reason::Damaged);
    }

    /// Evicts the files of one scope or of all whose path starts with `path_prefix`, open or not. Returns when the
    /// disks have let go of them, or hang.
    pub async fn evict(&self, scope: Option<&ScopeId>, path_prefix: &[u8]) -> Evicted {
        let removed: Vec<Removed> = {
            let mut index = self.lock_index();
            let only = scope.map(|scope| index.scope_number(scope));
            let ids: Vec<u64> = index
                .entries
                .iter()
                .filter(|(_, e)| only.is_none_or(|only| only == Some(e.scope)))
                .filter(|(_, e)| e.rest != Rest::Unplaced && e.path().starts_with(path_prefix))
                .map(|(&id, _)| id)
                .collect();
            ids.into_iter().filter_map(|id| index.remove(id)).collect()
        };
        let (evicted, doomed) = self.forget(removed, Reason::Operator);
        for (number, files) in doomed {
            let Some(root) = self.roots.get(usize::from(number)) else { continue };
            let at = root.clone();
            let _ = root.run(move || unlink(&at, &files)).await; // where a disk hangs they stay until the next start
        }
        evicted
    }

    /// From now on. Unbounded, because a reader of events that lags must not stop the fetches; each is small.
    pub fn events(&self) -> mpsc::UnboundedReceiver<Event> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        receiver
    }

    /// How many cache directories there are; `File::root` is below this.
    pub fn roots(&self) -> usize {
        self.roots.len()
    }

    /// The directory of a scope on one root, created if need be; a file is [`super::file_name`] below it.
    pub async fn scope_dir(&self, root: u8, scope: &ScopeId) -> io::Result<OwnedFd> {
        let root = self.roots.get(usize::from(root)).ok_or(io::ErrorKind::NotFound)?;
        let (at, scope) = (root.clone(), scope.clone());
        let dir = root.run(move || at.scope_dir(&scope)?.as_fd().try_clone_to_owned()).await;
        dir.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
    }

    /// The disk of this root does not answer: no reader should be sent there.
    pub fn hangs(&self, root: u8) -> bool {
        self.roots.get(usize::from(root)).is_some_and(|root| root.hangs())
    }

    /// The disk of this root answers and has not failed of late: its files may be read where no error of it is seen.
    pub fn trusts(&self, root: u8) -> bool {
        self.roots.get(usize::from(root)).is_some_and(|root| root.is_trusted())
    }

    /// Asks no disk: what the file systems said is a second old.
    pub fn usage(&self) -> Usage {
        let spaces: Vec<_> = self.roots.iter().map(|root| root.space()).collect();
        let index = self.lock_index();
        let root = |root: &Root| {
            let (used, space) = (&index.roots[usize::from(root.number)], spaces[usize::from(root.number)]);
            RootUsage {
                root: root.number,
                path: root.path.clone(),
                bytes: used.bytes,
                inodes: used.inodes,
                unlinked_bytes: used.zombie_bytes,
                free_bytes: space.map_or(0, |s| s.free_bytes),
                free_inodes: space.map_or(0, |s| s.free_inodes),
                degraded: !root.is_writable() || !root.is_trusted(),
            }
        };
        let tiers = self.config.tiers.iter().enumerate().map(|(k, tier)| {
            let roots: Vec<_> = self.roots.iter().filter(|r| r.tier == k).map(|r| root(r)).collect();
            TierUsage {
                name: tier.name.clone(),
                bytes: roots.iter().map(|r| r.bytes + r.unlinked_bytes).sum(),
                inodes: roots.iter().map(|r| r.inodes).sum(),
                quota_bytes: tier.quota_bytes,
                quota_inodes: tier.quota_inodes,
                roots,
            }
        });
        let scopes = index.known_scopes().map(|s| ScopeUsage {
            scope: s.id.clone(),
            bytes: s.bytes,
            files: s.files,
            limit_bytes: s.limit,
        });
        Usage { tiers: tiers.collect(), scopes: scopes.collect() }
    }

    /// Bytes of this file on the node's disks.
    pub fn cached_bytes(&self, key: &FileKey) -> u64 {
        let index = self.lock_index();
        index.find(key).and_then(|id| index.entries.get(&id)).map_or(0, |e| e.bytes.min(e.size))
    }

    /// Saves what a successor needs in order not to fetch again, then releases the directories. Fetches should have
    /// ended: what arrives later is served from memory.
    pub async fn shutdown(&self) {
        let files: Vec<Arc<File>> = {
            let index = self.lock_index();
            index.live.values().filter_map(|l| l.file.upgrade()).collect()
        };
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
        for file in files {
            if let Some(root) = file.placed().cloned() {
                root.pool.submit(move || file.save_if_needed());
            }
        }
        let released = self.lock_index().let_go(|_| true);
        drop(released);
        self.reclaim();
        let roots: Vec<_> = self.roots.iter().map(|root| self.leave(root)).collect();
        futures::future::join_all(roots).await;
    }

    /// Everything that was submitted before is done, or its disk hangs: a successor fetches again what was not saved.
    async fn leave(&self, root: &Arc<Root>) {
        root.pool.close();
        let drained = async {
            while !root.hangs() {
                let drained = root.pool.drained();
                if tokio::time::timeout(LOOK_AT_LEAVE, drained).await.is_ok() {
                    return;
                }
                // The keeper has ended.
                root.begins_to_hang(Instant::now());
            }
            tracing::warn!(root = %root.path.display(), "left although its disk hangs");
        };
        drained.await;
        // The next thread must not find it locked; and on a file system of the network this, too, may wait.
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let unlocked = root.clone();
        let unlock = std::thread::Builder::new().name("cache-unlock".into()).spawn(move || {
            unlocked.unlock();
            let _ = sender.send(());
        });
        if unlock.is_ok() {
            let limit = if root.hangs() { Duration::from_secs(1) } else { root.timeout };
            let _ = tokio::time::timeout(limit, receiver).await;
        }
    }

    /// A new instance of a file in the index.
    fn instance(
        self: &Arc<Self>,
        index: &mut Index,
        id: u64,
        key: FileKey,
        fetch: Arc<dyn Fetch>,
        reading: Reading,
    ) -> Arc<File> {
        let busy = Arc::new(AtomicU32::new(0));
        let parked = index.parked.get(&id).cloned();
        let file = Arc::new(File::new(self.clone(), id, key, fetch, reading, busy.clone()));
        if let Some(entry) = index.entries.get(&id) {
            file.settle(entry, parked.as_deref());
        }
        index.enliven(id, &file, busy);
        file
    }

    /// Takes a file out of the cache.
    pub(crate) fn drop_file(&self, id: u64, reason: Reason) {
        let removed = self.lock_index().remove(id);
        self.discard(removed.into_iter().collect(), reason, None);
    }

    /// `bytes` were written for a file.
    pub(crate) fn charge(&self, id: u64, root: &Root, bytes: u64) -> Pressure {
        let mut index = self.lock_index();
        index.charge(id, bytes);
        let used = &index.roots[usize::from(root.number)];
        let high = |quota: u64| quota / 100 * u64::from(root.limits.high_percent);
        let (limits, scope) = (&root.limits, index.entries.get(&id).map(|e| &index.scopes[e.scope as usize]));
        let written = self.written.fetch_add(bytes, Ordering::Relaxed) + bytes;
        Pressure {
            keeper: used.used_bytes() > high(limits.quota_bytes)
                || used.inodes > high(limits.quota_inodes)
                || written > WRITTEN_WAKES_KEEPER,
            root: used.used_bytes() > limits.quota_bytes || used.inodes > limits.quota_inodes,
            scope: scope.is_some_and(|s| s.limit.is_some_and(|limit| s.bytes > limit)),
        }
    }

    /// Evicts here and now what is beyond a quota: the writer waits, so that no burst outruns the keeper. Called from
    /// the root's threads, without a lock.
    pub(crate) fn ease(&self, root: &Root, pressure: Pressure) {
        if pressure.root {
            self.relieve(root, None);
        }
        if pressure.scope {
            self.relieve_scopes(Some(root.number));
        }
        if pressure.keeper {
            self.written.store(0, Ordering::Relaxed);
            self.ring();
        }
    }

    pub(crate) fn ring(&self) {
        *self.keeper.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.keeper.wake.notify_one();
    }

    pub(crate) fn lock_index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn send(&self, event: Event) {
        self.subscribers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|subscriber| subscriber.send(event.clone()).is_ok());
    }

    pub(crate) fn enqueue_dropped(&self, file: DroppedFile) {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).push(file);
    }

    /// Lets the index forget instances that were dropped, and saves what they had not saved.
    pub(crate) fn reclaim(&self) {
        let dropped = std::mem::take(&mut *self.dropped.lock().unwrap_or_else(PoisonError::into_inner));
        if dropped.is_empty() {
            return;
        }
        let mut index = self.lock_index();
        for DroppedFile { id, root, unsaved } in dropped {
            index.reclaim(id);
            let (Some(image), Some(root)) = (unsaved, self.roots.get(usize::from(root))) else { continue };
            if !index.entries.contains_key(&id) {
                continue;
            }
            let image = Arc::new(image);
            index.parked.insert(id, image.clone());
            let saver = root.clone();
            // No other instance writes this sidecar meanwhile: a new instance starts from the parked image.
            root.pool.submit(move || {
                if let Err(error) = saver.write_sidecar(&image.key, id, &sidecar::encode(&image)) {
                    saver.failed("save", &error, true);
                }
            });
        }
    }

    /// The sidecars that are on the disk now need not be remembered.
    fn unpark(&self) {
        self.lock_index().parked.retain(|_, image| Arc::strong_count(image) > 1);
    }

    /// Finds disks that hang, and those that work again.
    fn watch_disks(&self, now: Instant, late: bool) {
        for root in &self.roots {
            if !late && root.begins_to_hang(now) {
                self.pass_by(root);
            }
            root.try_again(now);
            if root.pool.longest_call().is_some_and(|longest| longest > STALLED) && self.is_short_of_memory()
            {
                root.pool.shed();
            }
            self.announce(root);
        }
    }

    /// Tells at once, but one after the other, whether a disk works: new opens are sent to it until that is known.
    pub(crate) fn announce(&self, root: &Root) {
        let _in_order = root.announcing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(works) = root.news() {
            self.send(Event::Disk { root: root.number, works });
        }
    }

    fn is_short_of_memory(&self) -> bool {
        self.memory.is_short()
    }

    /// Reads that wait for a disk that has begun to hang go to the source.
    fn pass_by(&self, root: &Root) {
        let files: Vec<Arc<File>> = {
            let index = self.lock_index();
            index.live.values().filter_map(|l| l.file.upgrade()).collect()
        };
        files.iter().filter(|f| f.root() == root.number).for_each(|file| file.pass_by());
    }

    /// Each disk's own threads do what there is to do there, one at a time.
    fn keep_disks(self: &Arc<Self>, with_journal: bool) {
        for root in &self.roots {
            if root.keeping.swap(true, Ordering::AcqRel) {
                continue; // still at it, or it hangs
            }
            let (engine, done) = (Arc::downgrade(self), Keeping(root.clone()));
            root.pool.submit(move || {
                if let Some(engine) = engine.upgrade() {
                    engine.keep(&done.0);
                    if with_journal {
                        engine.compact_journal(&done.0);
                    }
                }
            });
        }
        self.relieve_scopes(None);
        self.sweep_scopes();
    }

    /// What an unclean end would cost is fetched again: so partial files are saved now and then.
    fn save_partial_files(&self) {
        let files: Vec<Arc<File>> = {
            let index = self.lock_index();
            index.live.values().filter_map(|l| l.file.upgrade()).filter(|f| f.is_large()).collect()
        };
        for file in files {
            if let Some(root) = file.placed()
                && file.wants_saving()
            {
                let file = file.clone();
                root.pool.submit(move || file.save_if_needed());
            }
        }
    }
}

/// The keeper's thread ends with the engine. It never touches a disk: it sees which of them answer, and gives their own
/// threads something to do.
fn maintain(engine: &Weak<Engine>, bell: &Bell) {
    let (mut ticks, mut looked) = (0u32, Instant::now());
    loop {
        {
            let rung = bell.rung.lock().unwrap_or_else(PoisonError::into_inner);
            let wait = bell.wake.wait_timeout_while(rung, KEEPER_PERIOD, |rung| !*rung);
            *wait.unwrap_or_else(PoisonError::into_inner).0 = false;
        }
        let Some(engine) = engine.upgrade() else { return };
        let closed = engine.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return;
        }
        let now = Instant::now();
        let late = now.duration_since(std::mem::replace(&mut looked, now)) > KEEPER_LATE;
        engine.reclaim();
        engine.watch_disks(now, late);
        ticks = ticks.wrapping_add(1);
        engine.keep_disks(ticks.is_multiple_of(4));
        engine.unpark();
        if ticks.is_multiple_of(4) {
            engine.save_partial_files();
        }
        drop(closed);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.ring();
    }
}
