//! What an application does with files, one round at a time.

use super::calls::{self, Mapping};
use super::{Plan, Recorder, signals};
use crate::clock::monotonic_ns;
use crate::random::Random;
use crate::tree::{Reference, Tree, TreeFile};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// Files of at least this size are what `pread`, `mmap`, `sequential` and `held` use, if there are any.
pub(super) const LARGE_BYTES: u64 = 1 << 20;
const STEP: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Random ranges of large files that stay open for a while.
    Pread,
    /// Open, look at the size, read the first page, close.
    Open,
    /// Open, read to the end, close: files below 1 MiB.
    Small,
    /// lstat of names that exist and of names that do not; inode numbers must never change.
    Stat,
    /// Whole directories; exactly the names that must be there.
    Readdir,
    /// Map 1 MiB and compare it.
    Mmap,
    /// A large file from the first byte to the last.
    Sequential,
    /// Files and mappings opened at the start and used until the end: what must go on with no worker alive.
    Held,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Pread => "pread",
            Self::Open => "open",
            Self::Small => "small",
            Self::Stat => "stat",
            Self::Readdir => "readdir",
            Self::Mmap => "mmap",
            Self::Sequential => "sequential",
            Self::Held => "held",
        }
    }
}

struct OpenFile {
    index: usize,
    fd: OwnedFd,
    since_ns: u64,
    reference: Reference,
    mapping: Option<Mapping>,
}

/// One thread of the application.
pub(super) struct Application {
    kind: Kind,
    root: PathBuf,
    tree: Arc<Tree>,
    keep_cache: bool,
    random: Random,
    books: Recorder,
    buffer: Vec<u8>,
    directories: Vec<(String, BTreeSet<String>)>,
    /// Indices into `tree.files`.
    small: Vec<usize>,
    large: Vec<usize>,
    open: Vec<OpenFile>,
    inodes: HashMap<String, u64>,
}

impl Application {
    pub(super) fn new(kind: Kind, number: usize, plan: &Plan, tree: Arc<Tree>, books: Recorder) -> Self {
        let all = 0..tree.files.len();
        let (large, small): (Vec<_>, Vec<_>) = all.clone().partition(|&i| tree.files[i].size >= LARGE_BYTES);
        // A tree of one sort only is still a tree: every kind then works on what there is.
        let or_all = |some: Vec<usize>| if some.is_empty() { all.clone().collect() } else { some };
        Self {
            kind,
            root: plan.root.clone(),
            keep_cache: plan.keep_cache,
            random: Random(plan.seed.wrapping_mul(1000).wrapping_add(number as u64)),
            books,
            buffer: vec![0; STEP],
            directories: if kind == Kind::Readdir {
                tree.directories().into_iter().collect()
            } else {
                Vec::new()
            },
            small: or_all(small),
            large: or_all(large),
            open: Vec::new(),
            inodes: HashMap::new(),
            tree,
        }
    }

    pub(super) fn prepare(&mut self) {
        if self.kind != Kind::Held {
            return;
        }
        for index in self.large.clone().into_iter().take(8) {
            let Some(mut file) = self.open_file(index) else { continue };
            let len = self.tree.files[index].size.min(STEP as u64) as usize;
            let path = self.tree.files[index].path.clone();
            let since_ns = file.since_ns;
            file.mapping = self.books.call_on(since_ns, "mmap", &path, || Mapping::new(&file.fd, 0, len));
            self.open.push(file);
        }
    }

    pub(super) fn round(&mut self) {
        match self.kind {
            Kind::Pread => self.pread(),
            Kind::Open => self.open_and_close(),
            Kind::Small => self.small(),
            Kind::Stat => self.stat(),
            Kind::Readdir => self.readdir(),
            Kind::Mmap => self.mmap(),
            Kind::Sequential => self.sequential(),
            Kind::Held => self.held(),
        }
    }

    pub(super) fn finish(&mut self) {
        for mut file in std::mem::take(&mut self.open) {
            drop(file.mapping.take());
            self.close_file(file);
        }
    }

    fn file(&self, index: usize) -> TreeFile {
        self.tree.files[index].clone()
    }

    fn any(&mut self, large: bool) -> usize {
        let among = if large { &self.large } else { &self.small };
        among[self.random.below(among.len() as u64) as usize]
    }

    fn open_file(&mut self, index: usize) -> Option<OpenFile> {
        let file = self.file(index);
        let reference = match self.tree.reference(&file) {
            Ok(reference) => reference,
            Err(e) => {
                self.books.wrong("reference", &file.path, format!("the harness lost the right bytes: {e}"));
                return None;
            }
        };
        let (path, since_ns) = (self.root.join(&file.path), monotonic_ns());
        let fd = self.books.call("open", &file.path, || calls::open(&path, libc::O_RDONLY))?;
        Some(OpenFile { index, fd, since_ns, reference, mapping: None })
    }

    fn close_file(&mut self, file: OpenFile) {
        let path = self.tree.files[file.index].path.clone();
        self.books.call_on(file.since_ns, "close", &path, || calls::close(file.fd));
    }

    /// One pread that must return every byte asked for, right. False: it failed.
    fn read_range(&mut self, file: &OpenFile, name: &'static str, offset: u64, len: usize) -> bool {
        let path = self.tree.files[file.index].path.clone();
        let buffer = &mut self.buffer[..len];
        let read = || calls::pread(&file.fd, buffer, offset);
        let Some(n) = self.books.call_on(file.since_ns, name, &path, read) else { return false };
        let wanted = self.tree.files[file.index].size.saturating_sub(offset).min(len as u64) as usize;
        if n > wanted || n == 0 && wanted > 0 {
            self.books.wrong(name, &path, format!("{n} bytes instead of {wanted} at {offset}"));
            return false;
        }
        if let Some(at) = file.reference.first_difference(offset, &self.buffer[..n]) {
            self.books.wrong(name, &path, format!("wrong byte at {at} (read of {len} at {offset})"));
            return false;
        }
        self.books.compared(n);
        if n < wanted {
            self.books.short(
                file.since_ns,
                name,
                &path,
                format!("{n} bytes instead of {wanted} at {offset}"),
            );
            // What stopped it is the answer to a read of the rest.
            self.read_range(file, name, offset + n as u64, wanted - n);
            return false;
        }
        true
    }

    fn pread(&mut self) {
        if self.open.len() < 4 {
            let index = self.any(true);
            let opened = self.open_file(index);
            self.open.extend(opened);
        }
        if self.open.is_empty() {
            return;
        }
        let at = self.random.below(self.open.len() as u64) as usize;
        let file = self.open.swap_remove(at);
        let size = self.tree.files[file.index].size;
        let len = ((4096_u64 << self.random.below(7)).min(size)) as usize;
        let offset = self.random.below(size - len as u64 + 1);
        let read = self.read_range(&file, "pread", offset, len);
        if !self.keep_cache && self.random.one_in(4) {
            calls::drop_cache(&file.fd);
        }
        // What cannot be read is opened anew, as a well-written program does.
        if !read || self.random.one_in(50) { self.close_file(file) } else { self.open.push(file) }
    }

    fn open_and_close(&mut self) {
        let large = self.random.one_in(3);
        let index = self.any(large);
        let Some(file) = self.open_file(index) else { return };
        let wanted = self.file(index);
        let stat = self.books.call_on(file.since_ns, "fstat", &wanted.path, || calls::fstat(&file.fd));
        if let Some(stat) = stat
            && stat.size != wanted.size
        {
            self.books.wrong("fstat", &wanted.path, format!("size {} instead of {}", stat.size, wanted.size));
        }
        self.read_range(&file, "read", 0, 4096);
        self.close_file(file);
    }

    fn small(&mut self) {
        let index = self.any(false);
        let Some(file) = self.open_file(index) else { return };
        let size = self.tree.files[index].size;
        let mut at = 0;
        // The read at the end must say so: it asks for bytes beyond it.
        while self.read_range(&file, "read", at, STEP) && at < size {
            at = (at + STEP as u64).min(size);
        }
        if !self.keep_cache && self.random.one_in(2) {
            calls::drop_cache(&file.fd);
        }
        self.close_file(file);
    }

    fn stat(&mut self) {
        let large = self.random.one_in(4);
        let index = self.any(large);
        let wanted = self.file(index);
        let path = self.root.join(&wanted.path);
        if let Some(stat) = self.books.call("stat", &wanted.path, || calls::lstat(&path)) {
            if stat.size != wanted.size || stat.directory {
                self.books.wrong(
                    "stat",
                    &wanted.path,
                    format!("size {} instead of {}", stat.size, wanted.size),
                );
            }
            let first = *self.inodes.entry(wanted.path.clone()).or_insert(stat.ino);
            if first != stat.ino {
                self.books.wrong("stat", &wanted.path, format!("inode number {} was {first}", stat.ino));
            }
        }
        let absent = format!("{}.absent{}", wanted.path, self.random.below(9));
        let path = self.root.join(&absent);
        self.books.call("stat-absent", &absent, || match calls::lstat(&path) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            Err(e) => Err(e),
            Ok(_) => Err(io::Error::other("a name that does not exist was found")),
        });
    }

    fn readdir(&mut self) {
        let at = self.random.below(self.directories.len() as u64) as usize;
        let (dir, wanted) = &self.directories[at];
        let path = self.root.join(dir);
        let books = &mut self.books;
        let (flags, since_ns) = (libc::O_RDONLY | libc::O_DIRECTORY, monotonic_ns());
        let Some(fd) = books.call("opendir", dir, || calls::open(&path, flags)) else { return };
        let mut found = BTreeMap::new();
        loop {
            let buffer = &mut self.buffer[..32 << 10];
            match books.call_on(since_ns, "readdir", dir, || calls::getdents(&fd, buffer)) {
                Some(0) => break,
                Some(n) => {
                    for (name, kind) in calls::records(&self.buffer[..n]) {
                        let name = String::from_utf8_lossy(&name).into_owned();
                        if name != "." && name != ".." && found.insert(name.clone(), kind).is_some() {
                            books.wrong("readdir", dir, format!("{name:?} was listed twice"));
                        }
                    }
                }
                None => return,
            }
        }
        let names: BTreeSet<String> = found.into_keys().collect();
        if names != *wanted {
            let missing: Vec<_> = wanted.difference(&names).take(5).collect();
            let extra: Vec<_> = names.difference(wanted).take(5).collect();
            books.wrong("readdir", dir, format!("missing {missing:?}, unexpected {extra:?}"));
        }
        books.call_on(since_ns, "closedir", dir, || calls::close(fd));
    }

    /// False: pages of it are lost.
    fn compare_mapping(&mut self, file: &OpenFile, mapping: &Mapping, offset: u64) -> bool {
        let path = self.tree.files[file.index].path.clone();
        let before = signals::bus_errors_here();
        let touch = || Ok(file.reference.first_difference(offset, mapping.bytes()));
        let compared = self.books.call_on(file.since_ns, "map-touch", &path, touch);
        let lost = signals::bus_errors_here() - before;
        if lost > 0 {
            self.books.bus_errors(file.since_ns, "map-touch", &path, lost);
            return false;
        }
        if let Some(Some(at)) = compared {
            self.books.wrong("map-touch", &path, format!("wrong byte at {at} of a mapping"));
        }
        self.books.compared(mapping.bytes().len());
        true
    }

    fn mmap(&mut self) {
        let index = self.any(true);
        let Some(file) = self.open_file(index) else { return };
        let wanted = self.file(index);
        let len = wanted.size.min(STEP as u64) as usize;
        let offset = self.random.below((wanted.size - len as u64) / 4096 + 1) * 4096;
        let map = || Mapping::new(&file.fd, offset, len);
        if let Some(mapping) = self.books.call_on(file.since_ns, "mmap", &wanted.path, map) {
            self.compare_mapping(&file, &mapping, offset);
        }
        if !self.keep_cache {
            calls::drop_cache(&file.fd);
        }
        self.close_file(file);
    }

    fn sequential(&mut self) {
        let index = self.any(true);
        let Some(file) = self.open_file(index) else { return };
        if !self.keep_cache {
            calls::drop_cache(&file.fd);
        }
        let size = self.tree.files[index].size;
        let mut at = 0;
        while at < size && !self.books.stopping() && self.read_range(&file, "read-on", at, STEP) {
            at += STEP as u64;
        }
        self.close_file(file);
    }

    fn held(&mut self) {
        if self.open.is_empty() {
            self.books.wrong("held", "", "nothing could be opened at the start".into());
            // Nothing will ever change: do not spin.
            std::thread::sleep(std::time::Duration::from_millis(100));
            return;
        }
        let at = self.random.below(self.open.len() as u64) as usize;
        let mut file = self.open.swap_remove(at);
        let size = self.tree.files[file.index].size;
        let len = ((4096_u64 << self.random.below(7)).min(size)) as usize;
        let offset = self.random.below(size - len as u64 + 1);
        self.read_range(&file, "pread", offset, len);
        if let Some(mapping) = file.mapping.take() {
            if !self.keep_cache {
                mapping.forget_pages();
            }
            let whole = self.compare_mapping(&file, &mapping, 0);
            file.mapping = whole.then_some(mapping);
        }
        self.open.push(file);
    }
}
