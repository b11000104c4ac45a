//! The cache files that this worker holds open: one per content, shared by every reader of it.

use super::{Settings, internal};
use crate::client::Link;
use crate::errno::Failure;
use crate::transport::{current, set_current};
use cache::meta::{Attributes, Cached, View};
use link::Cause;
use link::worker::{Ask, FromWorker, Reply as AgentReply};
use memmap2::Mmap;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

/// Inode number and version: one content.
pub(super) type Key = (u64, u32);
pub(super) type Opened = Result<Arc<OpenFile>, Failure>;
type Waiter = Box<dyn FnOnce(Opened) + Send>;

const NO_MARK: u64 = u64::MAX;

pub(super) struct OpenFile {
    /// The cache's id of it.
    pub(super) id: u64,
    pub(super) size: u64,
    pub(super) data: File,
    /// None: whole.
    presence: Option<Presence>,
    /// When a reader passes this offset, the agent wants to know.
    mark: AtomicU64,
    /// Distance to the next mark.
    stride: AtomicU64,
    touched: AtomicBool,
}

/// One bit per block, little-endian words, set by the agent after the block's bytes are in the file.
struct Presence {
    bits: Mmap,
    block_bytes: u64,
}

impl OpenFile {
    pub(super) fn new(id: u64, size: u64, data: File, presence: Option<Mmap>, block_bytes: u64) -> Self {
        Self {
            id,
            size,
            data,
            presence: presence.map(|bits| Presence { bits, block_bytes: block_bytes.max(1) }),
            mark: AtomicU64::new(NO_MARK),
            stride: AtomicU64::new(0),
            touched: AtomicBool::new(false),
        }
    }

    /// All of these bytes are in the cache file. `len` > 0.
    pub(super) fn has(&self, offset: u64, len: u64) -> bool {
        self.presence.as_ref().is_none_or(|presence| {
            let first = offset / presence.block_bytes;
            let last = (offset + len - 1) / presence.block_bytes;
            (first..=last).all(|block| presence.has(block))
        })
    }

    /// Instead of a file whose disk did not answer the agent sends an empty one, of which nothing is present. Of a real
    /// one whatever the agent calls present is there.
    pub(super) fn is_placeholder(&self) -> bool {
        self.presence.is_some() && rustix::fs::fstat(&self.data).is_ok_and(|about| about.st_size == 0)
    }

    /// A reader at `end` has just learned where its next mark lies.
    pub(super) fn set_mark(&self, end: u64, mark: Option<u64>) {
        let Some(mark) = mark else { return };
        self.stride.store(mark.saturating_sub(end), Relaxed);
        self.mark.store(mark, Relaxed);
    }

    /// True once for every mark that a reader passes.
    pub(super) fn passes_mark(&self, end: u64) -> bool {
        let mark = self.mark.load(Relaxed);
        if end <= mark {
            return false;
        }
        let stride = self.stride.load(Relaxed);
        let next = if stride == 0 { NO_MARK } else { mark.saturating_add(stride).max(end) };
        self.mark.compare_exchange(mark, next, Relaxed, Relaxed).is_ok()
    }
}

impl Presence {
    fn has(&self, block: u64) -> bool {
        let at = (block / 64) as usize * 8;
        let Some(word) = self.bits.get(at..at + 8) else { return false };
        // SAFETY: in bounds, and aligned: the map starts at a page and `at` is a multiple of 8. The agent sets bits
        // meanwhile, hence an atomic.
        let word = unsafe { &*word.as_ptr().cast::<AtomicU64>() };
        inflight::present(word) >> (block % 64) & 1 == 1
    }
}

/// The table of open cache files, and which of them were read lately.
pub(super) struct Files {
    table: Mutex<Table>,
    most: usize,
    generation: u64,
    block_bytes: u64,
    view: View,
    link: Arc<dyn Link>,
    /// Directories of the scope's cache roots, by number.
    roots: Vec<OwnedFd>,
    /// Cache files read since the last `Touched`.
    touched: Mutex<Vec<u64>>,
}

#[derive(Default)]
struct Table {
    files: HashMap<Key, Held>,
    turn: u64,
}

struct Held {
    state: State,
    used: u64,
}

enum State {
    Open(Arc<OpenFile>),
    /// A thread opens it.
    Opening(Vec<Waiter>),
}

impl Files {
    pub(super) fn new(settings: &Settings, view: View, link: Arc<dyn Link>, roots: Vec<OwnedFd>) -> Self {
        Self {
            table: Mutex::default(),
            most: settings.files_max.max(16),
            generation: settings.generation,
            block_bytes: settings.block_bytes,
            view,
            link,
            roots,
            touched: Mutex::default(),
        }
    }

    /// Tells the agent which files were read since the last call.
    pub(super) fn report_touched(&self) {
        let mut files = std::mem::take(&mut *self.touched_list());
        if !files.is_empty() {
            self.untouch();
            files.sort_unstable();
            files.dedup();
            for chunk in files.chunks(4096) {
                self.link.tell(FromWorker::Touched { files: chunk.to_vec() });
            }
        }
    }

    pub(super) fn forget(&self, file: u64) {
        self.lock().files.retain(|_, held| !matches!(&held.state, State::Open(open) if open.id == file));
    }

    /// From now on every file reports its next read again.
    fn untouch(&self) {
        for held in self.lock().files.values() {
            if let State::Open(file) = &held.state {
                file.touched.store(false, Relaxed);
            }
        }
    }

    /// Hands the cache file of a content to `then`: now if it is open or can be opened without asking, else when the
    /// agent has sent it.
    pub(super) fn with_file(self: &Arc<Self>, key: Key, then: impl FnOnce(Opened) + Send + 'static) {
        // What is asked then is asked for this request, also when the answer that it waits for is another's: agents
        // count their deaths against requests.
        let mine = current();
        let then = move |file: Opened| {
            let before = current();
            set_current(mine);
            then(file);
            set_current(before);
        };
        let mut table = self.lock();
        table.turn += 1;
        let turn = table.turn;
        match table.files.entry(key) {
            Entry::Occupied(mut held) => {
                held.get_mut().used = turn;
                match &mut held.get_mut().state {
                    State::Open(file) => {
                        let file = file.clone();
                        drop(table);
                        then(Ok(file));
                    }
                    State::Opening(waiters) => waiters.push(Box::new(then)),
                }
                return;
            }
            Entry::Vacant(free) => {
                free.insert(Held { state: State::Opening(vec![Box::new(then)]), used: turn });
            }
        }
        drop(table);
        if let Some(file) = self.open_cached(key) {
            return self.opened(key, Ok(Arc::new(file)));
        }
        self.ask_for_file(key, true);
    }

    fn ask_for_file(self: &Arc<Self>, key: Key, may_repeat: bool) {
        let files = self.clone();
        self.link.ask(
            Ask::File { ino: key.0, version: key.1 },
            Box::new(move |answer| {
                let file = match answer {
                    // A cache file that cannot be opened is dropped by the agent: the next one is new.
                    Err(Cause::Internal) if may_repeat => return files.ask_for_file(key, false),
                    Ok((AgentReply::File { file, size, whole }, fds)) => {
                        files.received(file, size, whole, fds)
                    }
                    Ok(_) => Err(internal("the agent answered a question for a file with something else")),
                    Err(cause) => Err(cause.into()),
                };
                files.opened(key, file.map(Arc::new));
            }),
        );
    }

    /// Drops what is held for a content, if it is still `file`.
    pub(super) fn drop_file(&self, key: Key, file: &Arc<OpenFile>) {
        let mut table = self.lock();
        if matches!(table.files.get(&key), Some(Held { state: State::Open(held), .. }) if Arc::ptr_eq(held, file))
        {
            table.files.remove(&key);
        }
    }

    /// Notes that a file was read, for eviction's sake.
    pub(super) fn touch(&self, file: &OpenFile) {
        if !file.touched.load(Relaxed) && !file.touched.swap(true, Relaxed) {
            self.touched_list().push(file.id);
        }
    }

    /// As `touch`, for a file that the kernel reads itself.
    pub(super) fn touch_id(&self, file: u64) {
        let mut touched = self.touched_list();
        if touched.len() < 65_536 {
            touched.push(file);
        }
    }

    fn opened(&self, key: Key, file: Opened) {
        let mut table = self.lock();
        let waiting = table.files.remove(&key);
        if let Ok(file) = &file {
            table.make_room(self.most);
            table.turn += 1;
            let used = table.turn;
            table.files.insert(key, Held { state: State::Open(file.clone()), used });
        }
        drop(table);
        if let Some(Held { state: State::Opening(waiters), .. }) = waiting {
            for waiter in waiters {
                waiter(file.clone());
            }
        }
    }

    /// A whole file that the metadata store locates, opened without asking anyone.
    fn open_cached(&self, (ino, version): Key) -> Option<OpenFile> {
        let (attributes, _) = self.view.attributes(ino).ok()??;
        let cached = self.valid_cached(&attributes).filter(|_| attributes.version == version)?;
        let root = self.roots.get(usize::from(cached.root))?;
        let name = cache::data::file_name(cached.file);
        let data = rustix::fs::openat2(
            root,
            name,
            OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOATIME,
            Mode::empty(),
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
        )
        .ok()?;
        let whole = rustix::fs::fstat(&data).ok()?.st_size as u64 == attributes.size;
        whole.then(|| OpenFile::new(cached.file, attributes.size, data.into(), None, self.block_bytes))
    }

    /// Where the content lies, as far as the agent that runs now has said so.
    pub(super) fn valid_cached(&self, attributes: &Attributes) -> Option<Cached> {
        attributes.cached.filter(|cached| cached.generation == self.generation)
    }

    fn received(&self, id: u64, size: u64, whole: bool, fds: Vec<OwnedFd>) -> Result<OpenFile, Failure> {
        let mut fds = fds.into_iter();
        let (Some(data), presence) = (fds.next(), fds.next()) else {
            return Err(internal("the agent sent no cache file"));
        };
        let bits = match presence {
            Some(bits) if !whole => {
                // SAFETY: a memory file of the agent's, which neither shrinks nor is unmapped by another process; its bits
                // are read through atomics.
                let map = unsafe { Mmap::map(&File::from(bits)) };
                Some(map.map_err(|e| internal(&format!("cannot map a presence bitmap: {e}")))?)
            }
            _ if whole => None,
            _ => return Err(Failure::Cause(Cause::Internal)),
        };
        Ok(OpenFile::new(id, size, data.into(), bits, self.block_bytes))
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn touched_list(&self) -> MutexGuard<'_, Vec<u64>> {
        self.touched.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Table {
    /// Closes the files that were used longest ago; those that are being read live until their readers are done.
    fn make_room(&mut self, most: usize) {
        while self.files.len() >= most {
            let open = self.files.iter().filter(|(_, held)| matches!(held.state, State::Open(_)));
            let Some((key, _)) = open.min_by_key(|(_, held)| held.used) else { return };
            let key = *key;
            self.files.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(presence: Option<&[u64]>, size: u64) -> OpenFile {
        let data = tempfile::tempfile().unwrap();
        let bits = presence.map(|words| {
            let mut map = memmap2::MmapMut::map_anon(words.len() * 8).unwrap();
            for (i, word) in words.iter().enumerate() {
                map[i * 8..i * 8 + 8].copy_from_slice(&word.to_le_bytes());
            }
            map.make_read_only().unwrap()
        });
        OpenFile::new(1, size, data, bits, 4096)
    }

    #[test]
    fn a_range_is_present_only_if_each_of_its_blocks_is() {
        let file = file(Some(&[0b1101, 1]), 65 * 4096 - 100);
        assert!(file.has(0, 4096));
        assert!(!file.has(0, 4097));
        assert!(file.has(2 * 4096, 8192));
        assert!(file.has(64 * 4096, 1));
        assert!(!file.has(65 * 4096, 1) && !file.has(1 << 40, 1), "beyond the bitmap");
        assert!(self::file(None, 5).has(1 << 50, 9), "a whole file has everything");
    }

    #[test]
    fn each_mark_is_passed_once_and_the_next_lies_a_stride_further() {
        let file = file(None, 1 << 30);
        assert!(!file.passes_mark(u64::MAX - 1));
        file.set_mark(1000, Some(5000));
        assert!(!file.passes_mark(5000));
        assert!(file.passes_mark(5001));
        assert!(!file.passes_mark(8000));
        assert!(file.passes_mark(9001));
        file.set_mark(9001, None);
        assert!(!file.passes_mark(9002));
    }
}
