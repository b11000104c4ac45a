//! A program that changes the files of one directory, and knows what must come of each call.

use super::Files;
use super::model::{Content, Id, Model, difference};
use crate::random::Random;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, RenameFlags};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Files with a name, and handles, at most.
const FILES: usize = 24;
const OPEN: usize = 6;
const DIRS: usize = 4;
/// Such that some files go to the store in parts.
const LARGE: usize = 17 << 20;
/// So long a file is truncated or removed rather than appended to.
const LONG: usize = 4 << 20;

struct Handle {
    file: File,
    id: Id,
    /// Opened with O_APPEND.
    append: bool,
}

pub(super) struct Writer {
    /// The directory in both pods; mostly the first is used.
    roots: [PathBuf; 2],
    dir: String,
    random: Random,
    seed: u64,
    model: Model,
    open: Vec<Handle>,
    /// Where the store has the volume, if it must be there after each fsync.
    store: Option<PathBuf>,
    step: u64,
    next_name: u64,
}

impl Writer {
    pub(super) fn new(roots: [PathBuf; 2], dir: &str, seed: u64, store: Option<PathBuf>) -> Result<Self> {
        let roots = roots.map(|root| root.join(dir));
        fs::create_dir(&roots[0]).with_context(|| format!("mkdir {}", roots[0].display()))?;
        let mut model = Model::default();
        model.dirs.insert(String::new());
        Ok(Self {
            roots,
            dir: dir.to_owned(),
            random: Random(seed),
            seed,
            model,
            open: Vec::new(),
            store: store.map(|store| store.join(dir)),
            step: 0,
            next_name: 0,
        })
    }

    pub(super) fn run(mut self, over: &AtomicBool) -> Result<(Files, u64)> {
        while !over.load(Relaxed) {
            self.step += 1;
            let (what, done) = self.one();
            done.with_context(|| format!("{what}, step {} of seed {}", self.step, self.seed))?;
        }
        for handle in std::mem::take(&mut self.open) {
            handle.file.sync_all().context("the last fsync")?;
        }
        let names: Vec<String> = self.model.names.keys().cloned().collect();
        for name in names {
            self.compare(&name).with_context(|| format!("at the end, of seed {}", self.seed))?;
        }
        let (dir, model) = (self.dir, self.model);
        let files =
            model.names.iter().map(|(name, id)| (format!("{dir}/{name}"), model.files[id].bytes.clone()));
        Ok((files.collect(), self.step))
    }

    fn one(&mut self) -> (&'static str, Result<()>) {
        match self.random.below(100) {
            0..14 => ("create", self.create()),
            14..18 => ("create what is there", self.create_again()),
            18..32 => ("append", self.append()),
            32..42 => ("pwrite", self.pwrite()),
            42..48 => ("truncate", self.truncate()),
            48..56 => ("rename over", self.rename(true)),
            56..61 => ("rename to a new name", self.rename(false)),
            61..64 => ("rename that must not replace", self.rename_noreplace()),
            64..69 => ("unlink", self.unlink()),
            69..72 => ("mkdir or rmdir", self.directories()),
            72..77 => ("fsync", self.sync()),
            77..83 => ("close", self.close()),
            83..90 => ("reread", self.reread()),
            90..94 => ("stat", self.stat()),
            94..97 => ("readdir", self.list()),
            97..99 => ("chmod", self.chmod()),
            _ => ("large file", self.large()),
        }
    }

    // ------------------------------------------------------------------ choices

    /// The same file in one of the pods, mostly the first.
    fn path(&mut self, name: &str) -> PathBuf {
        self.roots[usize::from(self.random.one_in(5))].join(name)
    }

    fn some_name(&mut self) -> Option<String> {
        let at = self.random.below(self.model.names.len() as u64) as usize;
        self.model.names.keys().nth(at).cloned()
    }

    /// Sometimes one that was there before.
    fn new_name(&mut self) -> String {
        let at = self.random.below(self.model.dirs.len() as u64) as usize;
        let dir = self.model.dirs.iter().nth(at).cloned().unwrap_or_default();
        loop {
            self.next_name += 1;
            let name = match self.random.one_in(2) {
                true => format!("f{}", self.random.below(FILES as u64)),
                false => format!("n{}", self.next_name),
            };
            let path = if dir.is_empty() { name } else { format!("{dir}/{name}") };
            if !self.model.names.contains_key(&path) {
                return path;
            }
        }
    }

    fn bytes(&mut self, most: u64) -> Vec<u8> {
        let len = 1 + self.random.below(most);
        let mut bytes = format!("<{}.{}>", self.seed, self.step).into_bytes();
        let first = self.random.draw();
        bytes.extend((0..len).map(|at| (first.wrapping_add(at * at)) as u8));
        bytes.truncate(len as usize);
        bytes
    }

    /// An open file, opened for this if there is none.
    fn handle(&mut self) -> Result<Option<usize>> {
        if self.open.is_empty() || self.open.len() < OPEN && self.random.one_in(2) {
            let Some(name) = self.some_name() else { return Ok(None) };
            let id = self.model.names[&name];
            let append = self.random.one_in(2);
            let path = self.path(&name);
            let file = OpenOptions::new().read(true).write(true).append(append).open(&path);
            let file = file.with_context(|| format!("open {}", path.display()))?;
            self.open.push(Handle { file, id, append });
            return Ok(Some(self.open.len() - 1));
        }
        Ok(Some(self.random.below(self.open.len() as u64) as usize))
    }

    fn content(&mut self, id: Id) -> &mut Content {
        self.model.files.get_mut(&id).expect("what is open or has a name is in the model")
    }

    // ------------------------------------------------------------------ operations

    fn create(&mut self) -> Result<()> {
        if self.model.names.len() >= FILES {
            return self.unlink();
        }
        let name = self.new_name();
        let path = self.path(&name);
        let mode = if self.random.one_in(2) { 0o600 } else { 0o640 };
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(mode).open(&path);
        let mut file = file.with_context(|| path.display().to_string())?;
        let id = self.model.add(&name, mode);
        if !self.random.one_in(8) {
            let bytes = self.bytes(20_000);
            file.write_all(&bytes).with_context(|| format!("first write of {}", path.display()))?;
            self.content(id).bytes = bytes;
        }
        match self.open.len() < OPEN && self.random.one_in(2) {
            true => self.open.push(Handle { file, id, append: false }),
            false => drop(file),
        }
        Ok(())
    }

    fn create_again(&mut self) -> Result<()> {
        let Some(name) = self.some_name() else { return Ok(()) };
        let path = self.path(&name);
        let made = OpenOptions::new().write(true).create_new(true).open(&path);
        must_fail(made.map(drop), libc::EEXIST, &path.display().to_string())
    }

    fn append(&mut self) -> Result<()> {
        let Some(at) = self.handle()? else { return Ok(()) };
        let bytes = self.bytes(6000);
        let Handle { file, id, append } = &mut self.open[at];
        let content = self.model.files.get_mut(id).expect("it is open");
        if content.bytes.len() > LONG {
            return Ok(());
        }
        match append {
            true => file.write_all(&bytes)?,
            false => file.write_all_at(&bytes, content.bytes.len() as u64)?,
        }
        content.bytes.extend(bytes);
        Ok(())
    }

    fn pwrite(&mut self) -> Result<()> {
        let Some(at) = self.handle()? else { return Ok(()) };
        if self.open[at].append {
            return Ok(()); // Linux appends then, wherever it is told to write
        }
        let most = if self.random.one_in(10) { 400_000 } else { 5000 };
        let bytes = self.bytes(most);
        let offset = self.random.below(self.model.files[&self.open[at].id].bytes.len() as u64 + 5000);
        self.open[at].file.write_all_at(&bytes, offset)?;
        let id = self.open[at].id;
        self.content(id).write(offset as usize, &bytes);
        Ok(())
    }

    fn truncate(&mut self) -> Result<()> {
        let Some(at) = self.handle()? else { return Ok(()) };
        let id = self.open[at].id;
        let before = self.content(id).bytes.len() as u64;
        let size = match self.random.below(3) {
            0 => 0,
            1 => self.random.below(before + 1),
            _ => (before + self.random.below(10_000)).min(LONG as u64),
        };
        self.open[at].file.set_len(size).with_context(|| format!("from {before} to {size}"))?;
        self.content(id).bytes.resize(size as usize, 0);
        Ok(())
    }

    fn rename(&mut self, over: bool) -> Result<()> {
        let Some(from) = self.some_name() else { return Ok(()) };
        let to = match over {
            true => self.some_name().filter(|to| *to != from),
            false => Some(self.new_name()),
        };
        let Some(to) = to else { return Ok(()) };
        let first = usize::from(self.random.one_in(5));
        let (a, b) = (self.roots[first].join(&from), self.roots[first].join(&to));
        fs::rename(&a, &b).with_context(|| format!("{} to {to}", a.display()))?;
        let id = self.model.names.remove(&from).context("it was there")?;
        self.model.names.insert(to, id);
        self.forget();
        Ok(())
    }

    fn rename_noreplace(&mut self) -> Result<()> {
        let Some(from) = self.some_name() else { return Ok(()) };
        let root = self.roots[usize::from(self.random.one_in(5))].clone();
        let rename = |to: &str| {
            let done =
                rustix::fs::renameat_with(CWD, root.join(&from), CWD, root.join(to), RenameFlags::NOREPLACE);
            done.map_err(io::Error::from)
        };
        let there = self.some_name().unwrap_or_default();
        if there != from {
            must_fail(rename(&there), libc::EEXIST, &format!("{from} to {there}"))?;
        }
        let to = self.new_name();
        rename(&to).with_context(|| format!("{from} to {to}, which is not there"))?;
        let id = self.model.names.remove(&from).context("it was there")?;
        self.model.names.insert(to, id);
        Ok(())
    }

    fn unlink(&mut self) -> Result<()> {
        let Some(name) = self.some_name() else { return Ok(()) };
        let path = self.path(&name);
        fs::remove_file(&path).with_context(|| path.display().to_string())?;
        self.model.names.remove(&name);
        self.forget();
        let path = self.path(&name);
        must_fail(fs::metadata(&path).map(drop), libc::ENOENT, &format!("stat of {}", path.display()))
    }

    /// What has neither name nor handle is over.
    fn forget(&mut self) {
        let (names, open) = (&self.model.names, &self.open);
        self.model
            .files
            .retain(|id, _| names.values().any(|of| of == id) || open.iter().any(|of| of.id == *id));
    }

    fn directories(&mut self) -> Result<()> {
        if self.model.dirs.len() <= DIRS && self.random.one_in(2) {
            let name = format!("d{}", self.random.below(DIRS as u64 * 2));
            let path = self.path(&name);
            let made = fs::create_dir(&path);
            return match self.model.dirs.insert(name) {
                true => made.with_context(|| format!("mkdir {}", path.display())),
                false => must_fail(made, libc::EEXIST, &format!("mkdir {}", path.display())),
            };
        }
        let at = self.random.below(self.model.dirs.len() as u64) as usize;
        let Some(name) = self.model.dirs.iter().nth(at).filter(|dir| !dir.is_empty()).cloned() else {
            return Ok(());
        };
        let path = self.path(&name);
        let removed = fs::remove_dir(&path);
        match self.model.in_dir(&name).is_empty() {
            true => {
                self.model.dirs.remove(&name);
                removed.with_context(|| format!("rmdir {}", path.display()))
            }
            false => must_fail(removed, libc::ENOTEMPTY, &format!("rmdir {}", path.display())),
        }
    }

    fn sync(&mut self) -> Result<()> {
        let Some(at) = self.handle()? else { return Ok(()) };
        self.open[at].file.sync_all()?;
        self.is_stored(self.open[at].id, "fsync")
    }

    fn close(&mut self) -> Result<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        let at = self.random.below(self.open.len() as u64) as usize;
        let Handle { file, id, .. } = self.open.swap_remove(at);
        drop(file);
        self.is_stored(id, "close")?;
        self.forget();
        Ok(())
    }

    /// Of a volume that is written through.
    fn is_stored(&self, id: Id, after: &str) -> Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        let Some((name, _)) = self.model.names.iter().find(|(_, of)| **of == id) else { return Ok(()) };
        let stored =
            fs::read(store.join(name)).with_context(|| format!("{name} in the store, after {after}"))?;
        match difference(&stored, &self.model.files[&id].bytes) {
            Some(what) => bail!("the store has another {name} after {after}: {what}"),
            None => Ok(()),
        }
    }

    fn compare(&mut self, name: &str) -> Result<()> {
        let path = self.path(name);
        let found = fs::read(&path).with_context(|| path.display().to_string())?;
        match difference(&found, &self.model.files[&self.model.names[name]].bytes) {
            Some(what) => bail!("{}: {what}", path.display()),
            None => Ok(()),
        }
    }

    fn reread(&mut self) -> Result<()> {
        if !self.open.is_empty() && self.random.one_in(2) {
            // Also of one that has no name any more.
            let at = self.random.below(self.open.len() as u64) as usize;
            let Handle { file, id, .. } = &self.open[at];
            let expected = &self.model.files[id].bytes;
            let mut found = vec![0; expected.len() + 1];
            let mut read = 0;
            while read < found.len() {
                match file.read_at(&mut found[read..], read as u64).context("by its handle")? {
                    0 => break,
                    more => read += more,
                }
            }
            return match difference(&found[..read], expected) {
                Some(what) => {
                    let name = self.model.names.iter().find(|(_, of)| *of == id).map(|(name, _)| name);
                    bail!("by a handle of {name:?}: {what}")
                }
                None => Ok(()),
            };
        }
        match self.some_name() {
            Some(name) => self.compare(&name),
            None => Ok(()),
        }
    }

    fn stat(&mut self) -> Result<()> {
        if !self.open.is_empty() && self.random.one_in(3) {
            let at = self.random.below(self.open.len() as u64) as usize;
            let about = self.open[at].file.metadata().context("fstat")?;
            return about_is(&about, &self.model.files[&self.open[at].id], "a handle");
        }
        let Some(name) = self.some_name() else { return Ok(()) };
        let path = self.path(&name);
        let about = fs::metadata(&path).with_context(|| path.display().to_string())?;
        about_is(&about, &self.model.files[&self.model.names[&name]], &path.display().to_string())?;
        let absent = self.new_name();
        let path = self.path(&absent);
        must_fail(fs::metadata(&path).map(drop), libc::ENOENT, &path.display().to_string())
    }

    fn list(&mut self) -> Result<()> {
        let at = self.random.below(self.model.dirs.len() as u64) as usize;
        let dir = self.model.dirs.iter().nth(at).cloned().unwrap_or_default();
        let path = self.path(&dir);
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(&path).with_context(|| path.display().to_string())? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            ensure!(found.insert(name.clone()), "{} has {name} twice", path.display());
        }
        let expected = self.model.in_dir(&dir);
        ensure!(
            found == expected,
            "{} has too many {:?}, not {:?}",
            path.display(),
            found.difference(&expected).collect::<Vec<_>>(),
            expected.difference(&found).collect::<Vec<_>>()
        );
        Ok(())
    }

    fn chmod(&mut self) -> Result<()> {
        let Some(name) = self.some_name() else { return Ok(()) };
        let path = self.path(&name);
        let mode = 0o600 | self.random.below(64) as u32;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))
            .with_context(|| path.display().to_string())?;
        let id = self.model.names[&name];
        self.content(id).mode = mode;
        Ok(())
    }

    /// One that goes to the store in parts, changed again while it does.
    fn large(&mut self) -> Result<()> {
        if !self.random.one_in(4) || self.model.names.len() >= FILES {
            return Ok(());
        }
        let name = self.new_name();
        let path = self.path(&name);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.with_context(|| path.display().to_string())?;
        let id = self.model.add(&name, 0o600);
        let block = self.bytes(300_000);
        let mut at = 0;
        while at < LARGE {
            file.write_all_at(&block, at as u64).with_context(|| format!("at {at}"))?;
            self.content(id).write(at, &block);
            at += block.len().max(200_000);
        }
        let again = self.bytes(1000);
        let offset = self.random.below(LARGE as u64);
        file.write_all_at(&again, offset)?;
        self.content(id).write(offset as usize, &again);
        drop(file);
        self.is_stored(id, "close")?;
        self.compare(&name)?;
        if self.random.one_in(2) {
            let to = self.new_name();
            fs::rename(self.roots[0].join(&name), self.roots[0].join(&to)).context("rename")?;
            self.model.names.remove(&name);
            self.model.names.insert(to, id);
        }
        Ok(())
    }
}

fn about_is(about: &fs::Metadata, content: &Content, what: &str) -> Result<()> {
    let (size, mode) = (about.size(), about.mode() & 0o7777);
    ensure!(size == content.bytes.len() as u64, "{what} has {size} bytes instead of {}", content.bytes.len());
    ensure!(mode == content.mode, "{what} has mode {mode:o} instead of {:o}", content.mode);
    Ok(())
}

fn must_fail(done: io::Result<()>, errno: i32, what: &str) -> Result<()> {
    match done {
        Err(error) if error.raw_os_error() == Some(errno) => Ok(()),
        Err(error) => bail!("{what}: {error} instead of {}", io::Error::from_raw_os_error(errno)),
        Ok(()) => bail!("{what}: it succeeded, {} was expected", io::Error::from_raw_os_error(errno)),
    }
}
