//! What is cached, in memory: one small entry per file, what each root and scope holds, and whose turn it is to go.
//!
//! Per file: an entry of about 80 bytes plus its key, a 24-byte key digest and some 50 bytes of policy, before the
//! slack of the hash maps. No system call is made here.

use super::file::File;
use super::policy::{Policy, Victim};
use super::sidecar::Image;
use super::{FileKey, NO_ROOT, SMALL_BLOCKS};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use volume::ScopeId;

/// Partly fetched files that are kept open after their last reader has gone.
const RECENT_MAX: usize = 512;

pub(crate) struct Index {
    pub entries: HashMap<u64, Entry>,
    by_key: HashMap<u128, u64>,
    pub live: HashMap<u64, Live>,
    /// Evicted files that are still open here: their root, and the bytes that are not free yet.
    zombies: HashMap<u64, (u8, u64)>,
    /// Sidecars on their way to the disk: newer than what is there.
    pub parked: HashMap<u64, Arc<Image>>,
    recent: VecDeque<Arc<File>>,
    /// By number; those that are gone keep theirs until another scope gets it.
    pub scopes: Vec<Scope>,
    free_numbers: Vec<u32>,
    scope_numbers: HashMap<ScopeId, u32>,
    pub roots: Vec<RootUse>,
    block_bytes: u64,
    // Two keyed hashes: no tenant can choose keys that collide, and a collision would still be seen by comparing keys.
    hashers: [RandomState; 2],
    ids: RandomState,
    id_counter: u64,
    clock: u32,
}

pub(crate) struct Entry {
    /// Path, then token.
    text: Box<[u8]>,
    path_len: u32,
    pub scope: u32,
    pub size: u64,
    /// What it is charged with.
    pub bytes: u64,
    /// Checksums of a small file that an earlier run left and no reader has verified; else empty.
    pub crcs: Box<[u32]>,
    pub root: u8,
    pub rest: Rest,
}

/// What is known of a file that is not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// No data file yet.
    Unplaced,
    /// Its sidecar says which blocks are there.
    Partial,
    /// Whole, written by an earlier run.
    Unverified,
    /// Whole, written or verified by this run.
    Whole,
}

pub(crate) struct Live {
    pub file: Weak<File>,
    /// Flights and waiters.
    pub busy: Arc<AtomicU32>,
    recent: bool,
}

pub(crate) struct Scope {
    pub id: ScopeId,
    pub limit: Option<u64>,
    pub bytes: u64,
    pub files: u64,
    /// In the index, placed or not.
    entries: u64,
    /// Volumes use it. Looked at without the index's lock when its directories are removed.
    pub held: Arc<AtomicBool>,
}

#[derive(Default)]
pub(crate) struct RootUse {
    pub bytes: u64,
    pub inodes: u64,
    pub files: u64,
    /// Unlinked, but still open here: not free yet.
    pub zombie_bytes: u64,
    /// Bytes ever placed here, for an even turnover: of small files when they are placed, of larger ones as they are
    /// written, for what they claim to be may never come.
    pub turned: u64,
    policies: BTreeMap<u32, Policy>,
}

impl RootUse {
    pub(crate) fn used_bytes(&self) -> u64 {
        self.bytes + self.zombie_bytes
    }
}

/// A file that was taken out of the index; its data is still to be unlinked.
pub(crate) struct Removed {
    pub id: u64,
    pub key: Arc<FileKey>,
    pub root: u8,
    pub bytes: u64,
    pub sidecar: bool,
    /// The instance that must learn of it.
    pub file: Weak<File>,
}

#[derive(Clone, Debug, Default)]
pub struct Usage {
    pub tiers: Vec<TierUsage>,
    pub scopes: Vec<ScopeUsage>,
}

#[derive(Clone, Debug)]
pub struct TierUsage {
    pub name: String,
    pub bytes: u64,
    pub inodes: u64,
    pub quota_bytes: u64,
    pub quota_inodes: u64,
    pub roots: Vec<RootUsage>,
}

#[derive(Clone, Debug)]
pub struct RootUsage {
    pub root: u8,
    pub path: std::path::PathBuf,
    pub bytes: u64,
    pub inodes: u64,
    /// Evicted, but still open in this process.
    pub unlinked_bytes: u64,
    /// Of the file system; 0 when it does not say.
    pub free_bytes: u64,
    pub free_inodes: u64,
    pub degraded: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeUsage {
    pub scope: ScopeId,
    pub bytes: u64,
    pub files: u64,
    pub limit_bytes: Option<u64>,
}

impl Index {
    pub(crate) fn new(roots: usize, block_bytes: u64) -> Self {
        Self {
            entries: HashMap::new(),
            by_key: HashMap::new(),
            live: HashMap::new(),
            zombies: HashMap::new(),
            parked: HashMap::new(),
            recent: VecDeque::new(),
            scopes: Vec::new(),
            free_numbers: Vec::new(),
            scope_numbers: HashMap::new(),
            roots: (0..roots).map(|_| RootUse::default()).collect(),
            block_bytes,
            hashers: [RandomState::new(), RandomState::new()],
            ids: RandomState::new(),
            id_counter: 0,
            clock: 0,
        }
    }

    pub(crate) fn find(&self, key: &FileKey) -> Option<u64> {
        let id = *self.by_key.get(&self.digest(key))?;
        let entry = self.entries.get(&id)?;
        let same = entry.size == key.size
            && self.scopes[entry.scope as usize].id == key.scope
            && entry.path() == key.path
            && entry.token() == key.token.as_bytes();
        same.then_some(id)
    }

    /// An id that no file has or had: 63 random bits, keyed anew in each run.
    pub(crate) fn new_id(&mut self) -> u64 {
        loop {
            self.id_counter += 1;
            let id = self.ids.hash_one(self.id_counter) >> 1;
            if id != 0 && !self.entries.contains_key(&id) && !self.live.contains_key(&id) {
                return id;
            }
        }
    }

    pub(crate) fn scope(&mut self, scope: &ScopeId, default_limit: Option<u64>) -> u32 {
        if let Some(&number) = self.scope_numbers.get(scope) {
            return number;
        }
        let new = Scope {
            id: scope.clone(),
            limit: default_limit,
            bytes: 0,
            files: 0,
            entries: 0,
            held: Arc::default(),
        };
        let number = match self.free_numbers.pop() {
            Some(number) => {
                self.scopes[number as usize] = new;
                number
            }
            None => {
                self.scopes.push(new);
                (self.scopes.len() - 1) as u32
            }
        };
        self.scope_numbers.insert(scope.clone(), number);
        number
    }

    pub(crate) fn scope_number(&self, scope: &ScopeId) -> Option<u32> {
        self.scope_numbers.get(scope).copied()
    }

    /// Scopes that are known, with their numbers.
    pub(crate) fn known_scopes(&self) -> impl Iterator<Item = &Scope> {
        self.scope_numbers.values().map(|&number| &self.scopes[number as usize])
    }

    /// Scopes that no volume uses and that have nothing cached.
    pub(crate) fn unused_scopes(&self) -> Vec<(ScopeId, Arc<AtomicBool>)> {
        let unused = |s: &&Scope| s.entries == 0 && !s.held.load(Ordering::Relaxed);
        self.known_scopes().filter(unused).map(|s| (s.id.clone(), s.held.clone())).collect()
    }

    /// Forgets a scope, unless a volume has come back to it.
    pub(crate) fn forget_scope(&mut self, scope: &ScopeId) {
        let Some(number) = self.scope_number(scope) else { return };
        let known = &self.scopes[number as usize];
        if known.entries == 0 && !known.held.load(Ordering::Relaxed) {
            self.scope_numbers.remove(scope);
            self.roots.iter_mut().for_each(|root| drop(root.policies.remove(&number)));
            self.free_numbers.push(number);
        }
    }

    /// A new file, unplaced. Whatever else had this key (only after a hash collision) is no longer found by it.
    pub(crate) fn add(&mut self, id: u64, key: &FileKey, scope: u32) {
        let mut text = Vec::with_capacity(key.path.len() + key.token.len());
        text.extend_from_slice(&key.path);
        text.extend_from_slice(key.token.as_bytes());
        let entry = Entry {
            text: text.into_boxed_slice(),
            path_len: key.path.len() as u32,
            scope,
            size: key.size,
            bytes: 0,
            crcs: Box::default(),
            root: NO_ROOT,
            rest: Rest::Unplaced,
        };
        self.scopes[scope as usize].entries += 1;
        self.entries.insert(id, entry);
        self.by_key.insert(self.digest(key), id);
    }

    /// From now on the file counts against `root`.
    pub(crate) fn set_root(&mut self, id: u64, key: &FileKey, root: u8, rest: Rest) {
        let fingerprint = self.digest(key) as u64;
        self.clock = self.clock.wrapping_add(1);
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.root = root;
        entry.rest = rest;
        let usage = &mut self.roots[usize::from(root)];
        usage.inodes += inodes(entry.size, self.block_bytes);
        usage.files += 1;
        if inodes(entry.size, self.block_bytes) == 1 {
            usage.turned += entry.size;
        }
        usage.policies.entry(entry.scope).or_default().insert(id, fingerprint, 0, self.clock);
        self.scopes[entry.scope as usize].files += 1;
    }

    /// `bytes` more of the file are on its root's disk.
    pub(crate) fn charge(&mut self, id: u64, bytes: u64) {
        let Some(entry) = self.entries.get_mut(&id) else {
            if let Some((root, held)) = self.zombies.get_mut(&id) {
                *held += bytes;
                self.roots[usize::from(*root)].zombie_bytes += bytes;
            }
            return;
        };
        entry.bytes += bytes;
        self.scopes[entry.scope as usize].bytes += bytes;
        let usage = &mut self.roots[usize::from(entry.root)];
        usage.bytes += bytes;
        if inodes(entry.size, self.block_bytes) > 1 {
            usage.turned += bytes;
        }
        if let Some(policy) = usage.policies.get_mut(&entry.scope) {
            policy.grow(id, bytes);
        }
    }

    /// The last reference to an instance has gone.
    pub(crate) fn reclaim(&mut self, id: u64) {
        if self.live.get(&id).is_some_and(|l| l.file.strong_count() > 0) {
            return;
        }
        self.live.remove(&id);
        if let Some((root, bytes)) = self.zombies.remove(&id) {
            self.roots[usize::from(root)].zombie_bytes -= bytes;
        }
        if self.entries.get(&id).is_some_and(|e| e.rest == Rest::Unplaced) {
            self.remove(id);
        }
    }

    pub(crate) fn is_of(&self, scope: &ScopeId, id: u64) -> bool {
        self.entries.get(&id).is_some_and(|entry| self.scopes[entry.scope as usize].id == *scope)
    }

    pub(crate) fn touch(&mut self, id: u64) {
        if let Some(entry) = self.entries.get(&id)
            && let Some(usage) = self.roots.get_mut(usize::from(entry.root))
            && let Some(policy) = usage.policies.get_mut(&entry.scope)
        {
            policy.touch(id);
        }
    }

    pub(crate) fn remove(&mut self, id: u64) -> Option<Removed> {
        let entry = self.entries.get(&id)?;
        if let Some(policy) =
            self.roots.get_mut(usize::from(entry.root)).and_then(|r| r.policies.get_mut(&entry.scope))
        {
            policy.remove(id);
        }
        self.take(id)
    }

    /// The next file to evict from `root`: from a scope over its limit first, else the one whose turn is longest ago.
    /// `desperate`: even one that is being fetched or read.
    pub(crate) fn victim(&mut self, root: u8, only: Option<u32>, desperate: bool) -> Option<Removed> {
        let Self { live, roots, scopes, .. } = self;
        let busy = |id: u64| live.get(&id).is_some_and(Live::is_busy);
        let policies = &mut roots[usize::from(root)].policies;
        let mut order: Vec<(bool, u32, u32)> = policies
            .iter_mut()
            .filter(|(number, _)| only.is_none_or(|only| only == **number))
            .filter_map(|(&number, policy)| {
                let scope = &scopes[number as usize];
                let over = scope.limit.is_some_and(|limit| scope.bytes > limit);
                Some((!over, policy.oldest()?, number))
            })
            .collect();
        order.sort_unstable();
        let mut found: Option<(Victim, u32)> = None;
        for pass in [false, true] {
            if found.is_some() || (pass && !desperate) {
                break;
            }
            found = order.iter().find_map(|&(_, _, number)| {
                let policy = policies.get_mut(&number)?;
                let victim = if pass { policy.evict(|_| false) } else { policy.evict(busy) };
                victim.map(|v| (v, number))
            });
        }
        let (victim, number) = found?;
        let key = self.key(victim.id)?;
        if victim.remember {
            let fingerprint = self.digest(&key) as u64;
            if let Some(policy) = self.roots[usize::from(root)].policies.get_mut(&number) {
                policy.remember(fingerprint);
            }
        }
        self.take(victim.id)
    }

    fn take(&mut self, id: u64) -> Option<Removed> {
        let key = Arc::new(self.key(id)?);
        let entry = self.entries.remove(&id)?;
        self.scopes[entry.scope as usize].entries -= 1;
        let digest = self.digest(&key);
        if self.by_key.get(&digest) == Some(&id) {
            self.by_key.remove(&digest);
        }
        self.parked.remove(&id);
        let blocks = entry.size.div_ceil(self.block_bytes);
        if entry.rest != Rest::Unplaced {
            let usage = &mut self.roots[usize::from(entry.root)];
            usage.bytes -= entry.bytes;
            usage.files -= 1;
            usage.inodes -= inodes(entry.size, self.block_bytes);
            let scope = &mut self.scopes[entry.scope as usize];
            scope.bytes -= entry.bytes;
            scope.files -= 1;
        }
        let file = self.live.get(&id).map(|l| l.file.clone()).unwrap_or_default();
        if file.strong_count() > 0 && entry.rest != Rest::Unplaced {
            self.roots[usize::from(entry.root)].zombie_bytes += entry.bytes;
            self.zombies.insert(id, (entry.root, entry.bytes));
        }
        let sidecar = blocks > SMALL_BLOCKS;
        Some(Removed { id, key, root: entry.root, bytes: entry.bytes, sidecar, file })
    }

    pub(crate) fn key(&self, id: u64) -> Option<FileKey> {
        let entry = self.entries.get(&id)?;
        Some(FileKey {
            scope: self.scopes[entry.scope as usize].id.clone(),
            path: entry.path().to_vec(),
            token: String::from_utf8_lossy(entry.token()).into_owned(),
            size: entry.size,
        })
    }

    pub(crate) fn enliven(&mut self, id: u64, file: &Arc<File>, busy: Arc<AtomicU32>) {
        self.live.insert(id, Live { file: Arc::downgrade(file), busy, recent: false });
    }

    /// Keeps `file` open for a while. What falls out is returned, to be dropped without the lock.
    #[must_use]
    pub(crate) fn keep_open(&mut self, file: &Arc<File>) -> Option<Arc<File>> {
        let live = self.live.get_mut(&file.id())?;
        if std::mem::replace(&mut live.recent, true) {
            return None;
        }
        self.recent.push_back(file.clone());
        if self.recent.len() <= RECENT_MAX {
            return None;
        }
        let oldest = self.recent.pop_front()?;
        if let Some(live) = self.live.get_mut(&oldest.id()) {
            live.recent = false;
        }
        Some(oldest)
    }

    #[must_use]
    pub(crate) fn let_go(&mut self, mut unwanted: impl FnMut(&File) -> bool) -> Vec<Arc<File>> {
        let (gone, kept): (Vec<_>, Vec<_>) = self.recent.drain(..).partition(|file| unwanted(file));
        self.recent = kept.into();
        for file in &gone {
            if let Some(live) = self.live.get_mut(&file.id()) {
                live.recent = false;
            }
        }
        gone
    }

    fn digest(&self, key: &FileKey) -> u128 {
        let [a, b] = &self.hashers;
        u128::from(a.hash_one(key)) << 64 | u128::from(b.hash_one(key))
    }
}

impl Live {
    fn is_busy(&self) -> bool {
        // The open table's own reference does not make a file busy; the agent's or a flight's does.
        self.busy.load(Ordering::Relaxed) > 0 || self.file.strong_count() > usize::from(self.recent)
    }
}

impl Entry {
    pub(crate) fn path(&self) -> &[u8] {
        &self.text[..self.path_len as usize]
    }
    fn token(&self) -> &[u8] {
        &self.text[self.path_len as usize..]
    }
}

/// A larger file has a sidecar.
pub(crate) fn inodes(size: u64, block_bytes: u64) -> u64 {
    if size.div_ceil(block_bytes) > SMALL_BLOCKS { 2 } else { 1 }
}
