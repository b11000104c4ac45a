//! The agent's side of the link, on a real metadata store and sparse files filled with a pattern.

use super::{BLOCK, GENERATION, load};
use cache::meta::{Cached, Incoming, InodeNumbers, Kind, MetaError, ROOT, Store};
use fuse_abi::BackingMap;
use fuse_abi::ioctl::{BACKING_CLOSE, BACKING_OPEN};
use link::worker::{Ask, FromWorker, Reply, ToWorker, recv, send};
use link::{Cause, Packet};
use memmap2::MmapMut;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// One object of the source, in the root or in one directory.
#[derive(Clone, Debug)]
pub struct Object {
    pub path: String,
    pub seed: u64,
    pub size: u64,
    /// Whole in the cache from the start.
    pub whole: bool,
}

struct Entry {
    file: File,
    size: u64,
    seed: u64,
    presence: Option<(OwnedFd, MmapMut)>,
}

pub struct Agent {
    store: Store,
    home: PathBuf,
    root: File,
    device: Arc<OwnedFd>,
    objects: Mutex<BTreeMap<String, Object>>,
    files: Mutex<HashMap<u64, Entry>>,
    by_content: Mutex<HashMap<(u64, u32), u64>>,
    link: Mutex<Option<Arc<Packet>>>,
    next_file: AtomicU64,
    /// Reads are never answered.
    pub freeze_reads: AtomicBool,
    /// Nor is a caller that is being killed.
    pub freeze_dying: AtomicBool,
    pub asks: Mutex<BTreeMap<&'static str, u64>>,
    pub backing_closed: AtomicU64,
    pub passthrough_opens: AtomicU64,
    /// READs that workers say they have answered without a copy.
    pub reads_spliced: AtomicU64,
}

struct Counting(AtomicU64);
impl InodeNumbers for Counting {
    fn next(&self) -> Result<u64, MetaError> {
        Ok(self.0.fetch_add(1, SeqCst))
    }
}

impl Agent {
    pub fn new(home: &Path, device: Arc<OwnedFd>, objects: Vec<Object>) -> Arc<Self> {
        let (metadata, root) = (home.join("meta"), home.join("cache"));
        std::fs::create_dir_all(&metadata).unwrap();
        std::fs::create_dir_all(&root).unwrap();
        let store = Store::open(&metadata, Arc::new(Counting(AtomicU64::new(16)))).unwrap();
        let agent = Arc::new(Self {
            store,
            home: home.to_owned(),
            root: File::open(&root).unwrap(),
            device,
            objects: Mutex::new(objects.iter().map(|o| (o.path.clone(), o.clone())).collect()),
            files: Mutex::default(),
            by_content: Mutex::default(),
            link: Mutex::default(),
            next_file: AtomicU64::new(0x1100),
            freeze_reads: AtomicBool::new(false),
            freeze_dying: AtomicBool::new(false),
            asks: Mutex::default(),
            backing_closed: AtomicU64::new(0),
            passthrough_opens: AtomicU64::new(0),
            reads_spliced: AtomicU64::new(0),
        });
        for object in objects.iter().filter(|object| object.whole) {
            agent.make_whole(&object.path);
        }
        agent
    }

    pub fn metadata(&self) -> PathBuf {
        self.home.join("meta")
    }
    pub fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }
    pub fn asked(&self, what: &str) -> u64 {
        self.asks.lock().unwrap().get(what).copied().unwrap_or(0)
    }

    /// Another content under the same name.
    pub fn replace(&self, object: Object) {
        self.objects.lock().unwrap().insert(object.path.clone(), object.clone());
        self.put(&object.path);
    }

    fn put(&self, path: &str) -> Option<(u64, u32)> {
        let (parent, name) = match path.split_once('/') {
            Some((dir, name)) => (self.directory(dir).0, name),
            None => (ROOT, path),
        };
        let object = self.objects.lock().unwrap().get(path).cloned()?;
        let stored = self.store.put(parent, &incoming(name, Some(&object))).unwrap();
        Some((stored.ino, stored.version))
    }

    fn directory(&self, name: &str) -> (u64, u32) {
        let stored = self.store.put(ROOT, &incoming(name, None)).unwrap();
        (stored.ino, stored.version)
    }

    /// Fetches all of an object and says so in the metadata: its node id changes.
    pub fn make_whole(&self, path: &str) {
        let (ino, version) = self.put(path).unwrap();
        let object = self.objects.lock().unwrap()[path].clone();
        let file = self.file(ino, version, &object);
        self.fill(file, 0, object.size);
        if let Some(entry) = self.files.lock().unwrap().get_mut(&file) {
            entry.presence = None;
        }
        let cached = Cached { generation: GENERATION, root: 0, file };
        self.store.set_cached(ino, version, Some(cached)).unwrap().unwrap();
    }

    /// Unlinks the cache file and says so.
    pub fn evict(&self, path: &str) {
        let (ino, version) = self.put(path).unwrap();
        let file = self.by_content.lock().unwrap().remove(&(ino, version)).unwrap();
        self.store.set_cached(ino, version, None).unwrap();
        self.files.lock().unwrap().remove(&file);
        std::fs::remove_file(self.path_of(file)).unwrap();
        if let Some(link) = &*self.link.lock().unwrap() {
            send(link, &ToWorker::Forget { file }, &[]).unwrap();
        }
    }

    /// Cuts the cache file of an object, as a damaged disk could.
    pub fn cut(&self, path: &str) {
        let key = self.put(path).unwrap();
        let file = self.by_content.lock().unwrap()[&key];
        File::options().write(true).open(self.path_of(file)).unwrap().set_len(5000).unwrap();
    }

    fn path_of(&self, file: u64) -> PathBuf {
        self.home.join("cache").join(cache::data::file_name(file))
    }

    fn file(&self, ino: u64, version: u32, object: &Object) -> u64 {
        let mut by_content = self.by_content.lock().unwrap();
        *by_content.entry((ino, version)).or_insert_with(|| {
            let id = self.next_file.fetch_add(1, SeqCst);
            std::fs::create_dir_all(self.path_of(id).parent().unwrap()).unwrap();
            let file =
                File::options().read(true).write(true).create_new(true).open(self.path_of(id)).unwrap();
            file.set_len(object.size).unwrap();
            let bits = rustix::fs::memfd_create("bits", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&bits, object.size.div_ceil(BLOCK).div_ceil(64) * 8).unwrap();
            // SAFETY: a memory file of our own.
            let map = unsafe { MmapMut::map_mut(&bits) }.unwrap();
            let entry = Entry { file, size: object.size, seed: object.seed, presence: Some((bits, map)) };
            self.files.lock().unwrap().insert(id, entry);
            id
        })
    }

    fn fill(&self, file: u64, offset: u64, len: u64) {
        let mut files = self.files.lock().unwrap();
        let Some(entry) = files.get_mut(&file) else { return };
        let mut buffer = vec![0; BLOCK as usize];
        for block in offset / BLOCK..(offset + len).div_ceil(BLOCK) {
            let at = block * BLOCK;
            let part = &mut buffer[..BLOCK.min(entry.size - at) as usize];
            load::pattern(entry.seed, at, part);
            entry.file.write_all_at(part, at).unwrap();
            if let Some((_, bits)) = &mut entry.presence {
                let word = bits[(block / 64 * 8) as usize..].as_mut_ptr().cast::<AtomicU64>();
                // SAFETY: aligned and in bounds.
                unsafe { &*word }.fetch_or(1 << (block % 64), SeqCst);
            }
        }
    }

    /// Answers one worker until it is gone.
    pub fn serve(self: &Arc<Self>, link: Arc<Packet>) {
        let agent = self.clone();
        *self.link.lock().unwrap() = Some(link.clone());
        std::thread::spawn(move || {
            let mut buffer = vec![0; link::MAX_MESSAGE];
            while let Ok((message, _)) = recv::<FromWorker>(&link, &mut buffer) {
                if let FromWorker::Counted(counts) = &message {
                    agent.reads_spliced.fetch_add(counts.reads_spliced, SeqCst);
                }
                let FromWorker::Ask { id, body, .. } = message else { continue };
                *agent.asks.lock().unwrap().entry(kind_of(&body)).or_default() += 1;
                let frozen = match body {
                    Ask::Read { .. } => agent.freeze_reads.load(SeqCst),
                    Ask::Dying { .. } => agent.freeze_dying.load(SeqCst),
                    _ => false,
                };
                if frozen {
                    continue;
                }
                let (body, fds) = match agent.answer(body) {
                    Ok((reply, fds)) => (Ok(reply), fds),
                    Err(cause) => (Err(cause), vec![]),
                };
                let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
                if send(&link, &ToWorker::Answer { id, body }, &fds).is_err() {
                    break;
                }
            }
        });
    }

    fn answer(&self, ask: Ask) -> Result<(Reply, Vec<OwnedFd>), Cause> {
        let reply = match ask {
            Ask::Open { .. } => Reply::Stored,
            Ask::Writable(_) => return Err(Cause::Internal), // its mounts are read-only
            Ask::Direct { .. } => panic!("this agent's cache files can always be read"),
            Ask::Lookup { parent, name } => {
                let name = String::from_utf8(name).map_err(|_| Cause::NotFound)?;
                let dir = self.store.view().path(parent).unwrap().ok_or(Cause::Stale)?;
                let dir = String::from_utf8(dir).unwrap();
                let path = if dir.is_empty() { name.clone() } else { format!("{dir}/{name}") };
                let is_dir = self.objects.lock().unwrap().keys().any(|k| k.starts_with(&format!("{path}/")));
                if is_dir {
                    self.directory(&path);
                } else if self.put(&path).is_none() {
                    self.store.put_absent(parent, name.as_bytes()).unwrap();
                }
                Reply::Stored
            }
            Ask::List { dir } => {
                let path = String::from_utf8(self.store.view().path(dir).unwrap().unwrap()).unwrap();
                let objects = self.objects.lock().unwrap().clone();
                let mut listing = match self.store.begin_listing(dir) {
                    Ok(listing) => listing,
                    Err(MetaError::ListingInProgress(_)) => return Err(Cause::Unavailable),
                    Err(error) => panic!("{error}"),
                };
                let mut seen = std::collections::BTreeSet::new();
                for (key, object) in &objects {
                    let rest = match path.as_str() {
                        "" => key.as_str(),
                        dir => match key.strip_prefix(dir).and_then(|rest| rest.strip_prefix('/')) {
                            Some(rest) => rest,
                            None => continue,
                        },
                    };
                    let entry = match rest.split_once('/') {
                        Some((name, _)) => incoming(name, None),
                        None => incoming(rest, Some(object)),
                    };
                    if seen.insert(entry.name.clone()) {
                        listing.page(&[entry]).unwrap();
                    }
                }
                listing.finish().unwrap();
                Reply::Stored
            }
            Ask::Attributes { ino, .. } => {
                let path = self.store.view().path(ino).unwrap().ok_or(Cause::Stale)?;
                let path = String::from_utf8(path).unwrap();
                if !path.is_empty() && self.put(&path).is_none() && self.objects_below(&path) == 0 {
                    return Err(Cause::NotFound);
                }
                Reply::Stored
            }
            Ask::File { ino, version } => {
                let now = self.store.view().last_attributes(ino).unwrap().ok_or(Cause::Stale)?;
                let path = String::from_utf8(self.store.view().path(ino).unwrap().unwrap()).unwrap();
                let object = self.objects.lock().unwrap().get(&path).cloned().ok_or(Cause::Stale)?;
                let held = self.by_content.lock().unwrap().contains_key(&(ino, version));
                if now.version != version && !held {
                    return Err(Cause::Stale);
                }
                let id = self.file(ino, version, &object);
                let files = self.files.lock().unwrap();
                let entry = &files[&id];
                let mut fds = vec![OwnedFd::from(File::open(self.path_of(id)).unwrap())];
                fds.extend(entry.presence.as_ref().map(|(bits, _)| bits.try_clone().unwrap()));
                let reply = Reply::File { file: id, size: entry.size, whole: entry.presence.is_none() };
                return Ok((reply, fds));
            }
            Ask::Cached { .. } => Reply::Cached { bytes: 0 },
            Ask::Read { file, offset, len } => {
                if !self.files.lock().unwrap().contains_key(&file) {
                    return Ok((Reply::Gone, vec![]));
                }
                self.fill(file, offset, u64::from(len));
                Reply::Present { mark: None }
            }
            Ask::Damaged { file } => {
                self.files.lock().unwrap().remove(&file);
                let mut by_content = self.by_content.lock().unwrap();
                if let Some((&(ino, version), _)) = by_content.iter().find(|(_, id)| **id == file) {
                    by_content.remove(&(ino, version));
                    self.store.set_cached(ino, version, None).unwrap();
                }
                Reply::Stored
            }
            Ask::BackingOpen { file } => {
                let data = File::open(self.path_of(file)).map_err(|_| Cause::Stale)?;
                self.passthrough_opens.fetch_add(1, SeqCst);
                Reply::Backing { id: backing_open(&self.device, &data).map_err(|_| Cause::Internal)? }
            }
            Ask::BackingClose { id } => {
                // SAFETY: reads one u32.
                let closed = unsafe { libc::ioctl(self.device.as_raw_fd(), BACKING_CLOSE, &id) };
                assert_eq!(closed, 0, "closing backing id {id}");
                self.backing_closed.fetch_add(1, SeqCst);
                Reply::Stored
            }
            Ask::Dying { tids } => {
                Reply::Dying { tids: tids.into_iter().filter(|tid| is_dying(*tid)).collect() }
            }
            Ask::Space => Reply::Space { total_bytes: 1 << 30, total_inodes: 1000 },
        };
        Ok((reply, vec![]))
    }

    fn objects_below(&self, path: &str) -> usize {
        self.objects.lock().unwrap().keys().filter(|key| key.starts_with(&format!("{path}/"))).count()
    }
}

fn kind_of(ask: &Ask) -> &'static str {
    match ask {
        Ask::Lookup { .. } => "lookup",
        Ask::List { .. } => "list",
        Ask::Attributes { .. } => "attributes",
        Ask::File { .. } => "file",
        Ask::Cached { .. } => "cached",
        Ask::Open { .. } => "open",
        Ask::Writable(_) => "writable",
        Ask::Read { .. } => "read",
        Ask::Damaged { .. } => "damaged",
        Ask::Direct { .. } => "direct",
        Ask::BackingOpen { .. } => "backing open",
        Ask::BackingClose { .. } => "backing close",
        Ask::Dying { .. } => "dying",
        Ask::Space => "space",
    }
}

fn incoming(name: &str, object: Option<&Object>) -> Incoming {
    Incoming {
        name: name.into(),
        kind: if object.is_some() { Kind::File } else { Kind::Directory },
        size: object.map_or(0, |object| object.size),
        mtime_ns: 1_700_000_000_000_000_000,
        token: object.map_or(String::new(), |object| format!("etag-{}", object.seed)),
        target: vec![],
        permissions: None,
    }
}

/// Needs root: the broker's part.
fn backing_open(device: &OwnedFd, data: &File) -> std::io::Result<u32> {
    let map = BackingMap::new(data.as_raw_fd());
    // SAFETY: reads the struct.
    let id = unsafe { libc::ioctl(device.as_raw_fd(), BACKING_OPEN, &map) };
    if id < 0 { Err(std::io::Error::last_os_error()) } else { Ok(id as u32) }
}

fn is_dying(tid: u32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{tid}/status")) else { return false };
    let field = |key: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("0");
        u64::from_str_radix(value.trim(), 16).unwrap()
    };
    (field("SigPnd:") | field("ShdPnd:")) >> (libc::SIGKILL - 1) & 1 == 1
}
