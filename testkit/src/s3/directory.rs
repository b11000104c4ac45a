//! A bucket over a directory tree: a key is a path, its ETag comes from size, mtime and inode, nothing is ever hashed.

use super::beside::Beside;
use super::bucket::{Attempt, Body, Bucket, Next, Visitor};
use super::conditions::Condition;
use super::draft::{About, Draft};
use super::meta::Meta;
use bytes::Bytes;
use futures::StreamExt;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::{Bound, Range};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

/// Listings come from an index that a walk builds; it is at most `rescan` old, or twenty times what the walk took, so
/// that listings of many objects do not measure walks. HEAD and GET always ask the disk.
#[derive(Debug)]
pub struct Directory {
    root: PathBuf,
    rescan: Duration,
    /// Before `beside`, where both are taken.
    index: Mutex<Option<Walked>>,
    /// Whoever writes holds it.
    beside: Mutex<Beside>,
    puts: AtomicU64,
}

type Index = BTreeMap<String, Meta>;

#[derive(Debug)]
struct Walked {
    at: Instant,
    took: Duration,
    index: Arc<Index>,
}

impl Directory {
    pub fn new(root: impl Into<PathBuf>, rescan: Duration) -> Self {
        let (index, beside) = (Mutex::default(), Mutex::default());
        Self { root: root.into(), rescan, index, beside, puts: AtomicU64::new(0) }
    }

    /// The next listing walks the tree again.
    fn outdate(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Walked>> {
        self.index.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn beside(&self) -> MutexGuard<'_, Beside> {
        self.beside.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn index(&self) -> io::Result<Arc<Index>> {
        let mut slot = self.lock();
        if let Some(Walked { at, took, index }) = &*slot
            && at.elapsed() < self.rescan.max(20 * *took)
        {
            return Ok(index.clone());
        }
        let (begun, mut index) = (Instant::now(), Index::new());
        walk(&self.root, "", &mut index)?;
        let beside = self.beside();
        for key in beside.keys() {
            if let Some(meta) = index.get_mut(key) {
                *meta = beside.told(key, meta.clone());
            }
        }
        let markers = beside.markers().filter(|(key, _)| self.root.join(key).is_dir());
        index.extend(markers.map(|(key, meta)| (key.to_owned(), meta.clone())));
        drop(beside);
        let index = Arc::new(index);
        *slot = Some(Walked { at: Instant::now(), took: begun.elapsed(), index: index.clone() });
        Ok(index)
    }

    /// None: no file can have this name, so there is no such object.
    fn path(&self, key: &str) -> Option<PathBuf> {
        let relative = Path::new(key);
        let plain = relative.components().all(|part| matches!(part, Component::Normal(_)));
        // components() would forgive `a//b` and `a/.`; as keys these are other objects.
        let same = relative.components().collect::<PathBuf>().as_os_str().len() == key.len();
        (plain && same && !key.is_empty() && !key.contains('\0')).then(|| self.root.join(relative))
    }

    fn found(&self, key: &str, beside: &Beside) -> io::Result<Option<Meta>> {
        if let Some(directory) = key.strip_suffix('/') {
            let is_there = self.path(directory).is_some_and(|path| path.is_dir());
            return Ok(beside.marker(key).filter(|_| is_there).cloned());
        }
        let Some(path) = self.path(key) else { return Ok(None) };
        match fs::symlink_metadata(path) {
            Ok(found) => Ok(found.is_file().then(|| beside.told(key, meta(&found)))),
            Err(e) if is_nothing(&e) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn put_marker(&self, key: &str, path: &Path, draft: Draft, condition: &Condition) -> Attempt<Meta> {
        if draft.body.size() > 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a directory holds no bytes"));
        }
        let mut beside = self.beside();
        if let Err(unmet) = condition.check(self.found(key, &beside)?.as_ref()) {
            return Ok(Err(unmet));
        }
        fs::create_dir_all(path)?;
        let etag = format!("0-{:x}", self.puts.fetch_add(1, Ordering::Relaxed));
        let (modified, etag) = (beside.time(draft.modified), draft.etag(etag));
        Ok(Ok(beside.keep(key, String::new(), Meta { size: 0, etag, modified, about: about(draft) })))
    }

    /// The bytes are in `aside` and come into place under the lock, by rename: who reads the old file keeps reading it.
    fn put_file(
        &self,
        key: &str,
        path: &Path,
        (aside, file): (&Path, &File),
        draft: Draft,
        condition: &Condition,
    ) -> Attempt<Meta> {
        let mut beside = self.beside();
        if let Err(unmet) = condition.check(self.found(key, &beside)?.as_ref()) {
            return Ok(Err(unmet));
        }
        // Each put is a new version, also where the kernel's clock stands still or the inode is one that was there before.
        file.set_modified(beside.time(draft.modified))?;
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        match fs::rename(aside, path) {
            // The directory outlived the last object in it, as in S3 none does.
            Err(e) if e.kind() == io::ErrorKind::IsADirectory && !beside.has_markers(&format!("{key}/")) => {
                remove_empty(path)?;
                fs::rename(aside, path)?;
            }
            renamed => renamed?,
        }
        let own = meta(&file.metadata()?);
        let told = Meta { etag: draft.etag(own.etag.clone()), about: about(draft), ..own.clone() };
        Ok(Ok(beside.keep(key, own.etag, told)))
    }
}

/// Where a file is written before it has its name. No listing shows it.
const ASIDE: &str = ".testkit-put-";

/// Does it say that there is no such object?
fn is_nothing(e: &io::Error) -> bool {
    use io::ErrorKind::{IsADirectory, NotADirectory, NotFound};
    matches!(e.kind(), NotFound | NotADirectory | IsADirectory)
        // A segment over 255 bytes.
        || e.raw_os_error() == Some(libc::ENAMETOOLONG)
}

fn about(draft: Draft) -> Option<Arc<About>> {
    Some(Arc::new(draft.about))
}

/// Fails at the first file in it.
fn remove_empty(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_empty(&entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

fn walk(dir: &Path, prefix: &str, index: &mut Index) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| !name.starts_with(ASIDE)) else { continue };
        let kind = entry.file_type()?;
        if kind.is_dir() {
            walk(&entry.path(), &format!("{prefix}{name}/"), index)?;
        } else if kind.is_file()
            && let Ok(found) = entry.metadata()
        {
            index.insert(format!("{prefix}{name}"), meta(&found));
        }
    }
    Ok(())
}

fn meta(found: &fs::Metadata) -> Meta {
    Meta {
        size: found.len(),
        etag: format!("{:x}-{:x}-{:x}-{:x}", found.len(), found.mtime(), found.mtime_nsec(), found.ino()),
        modified: found.modified().unwrap_or(std::time::UNIX_EPOCH),
        about: None,
    }
}

impl Bucket for Directory {
    fn scan(&self, start: Bound<&str>, visit: Visitor<'_>) -> io::Result<()> {
        let index = self.index()?;
        let mut cursor = index.range::<str, _>((start, Bound::Unbounded));
        while let Some((key, meta)) = cursor.next() {
            match visit(key, meta) {
                Next::Continue => {}
                Next::SkipTo(key) => {
                    cursor = index.range::<str, _>((Bound::Included(&*key), Bound::Unbounded))
                }
                Next::Stop => break,
            }
        }
        Ok(())
    }

    fn stat(&self, key: &str) -> io::Result<Option<Meta>> {
        self.found(key, &self.beside())
    }

    fn read(&self, key: &str, expected: &Meta, range: Range<u64>) -> io::Result<Body> {
        if key.ends_with('/') {
            return Ok(futures::stream::empty().boxed());
        }
        let path = self.path(key).ok_or(io::ErrorKind::NotFound)?;
        let file = Arc::new(File::open(path)?);
        if self.beside().told(key, meta(&file.metadata()?)).etag != expected.etag {
            return Err(io::Error::other("the file changed between stat and open"));
        }
        let pieces = futures::stream::unfold(range, move |rest| {
            let file = file.clone();
            async move {
                if rest.is_empty() {
                    return None;
                }
                let length = (rest.end - rest.start).min(PIECE) as usize;
                // In place rather than on the blocking pool: the files of tests and benchmarks are in the page
                // cache, and a hop between threads costs more than the copy.
                let piece = piece(&file, rest.start, length);
                let read = piece.as_ref().map_or(0, |piece| piece.len() as u64);
                match piece {
                    Ok(_) if read == 0 => None,
                    Ok(piece) => Some((Ok(piece), rest.start + read..rest.end)),
                    Err(e) => Some((Err(e), rest.end..rest.end)),
                }
            }
        });
        Ok(pieces.boxed())
    }

    fn put(&self, key: &str, body: Bytes) -> io::Result<Meta> {
        let about = About::default();
        let draft = Draft { body: body.into(), about, parts: None, modified: SystemTime::now() };
        self.put_if(key, draft, &Condition::None).map(|put| put.expect("nothing was expected"))
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.delete_if(key, &Condition::None).map(|deleted| deleted.expect("nothing was expected"))
    }

    fn put_if(&self, key: &str, draft: Draft, condition: &Condition) -> Attempt<Meta> {
        let path = self.path(key.strip_suffix('/').unwrap_or(key)).ok_or(io::ErrorKind::InvalidInput)?;
        let put = if key.ends_with('/') {
            self.put_marker(key, &path, draft, condition)
        } else {
            fs::create_dir_all(&self.root)?;
            let aside = self.root.join(format!("{ASIDE}{}", self.puts.fetch_add(1, Ordering::Relaxed)));
            let put = File::create(&aside).and_then(|mut file| {
                draft.body.iter().try_for_each(|piece| file.write_all(piece))?;
                self.put_file(key, &path, (&aside, &file), draft, condition)
            });
            if !matches!(put, Ok(Ok(_))) {
                let _ = fs::remove_file(&aside);
            }
            put
        };
        self.outdate();
        put
    }

    fn delete_if(&self, key: &str, condition: &Condition) -> Attempt<()> {
        let mut beside = self.beside();
        if let Err(unmet) = condition.check(self.found(key, &beside)?.as_ref()) {
            return Ok(Err(unmet));
        }
        beside.forget(key);
        let removed = match key.strip_suffix('/') {
            // What is below a marker stays.
            Some(directory) => self.path(directory).map(|path| fs::remove_dir(path).or(Ok(()))),
            None => self.path(key).map(fs::remove_file),
        };
        drop(beside);
        self.outdate();
        match removed {
            Some(Err(e)) if !is_nothing(&e) => Err(e),
            _ => Ok(Ok(())),
        }
    }

    fn rescan(&self) -> io::Result<()> {
        self.outdate();
        self.index().map(drop)
    }
}

const PIECE: u64 = 512 << 10;

fn piece(file: &File, offset: u64, length: usize) -> io::Result<Bytes> {
    let mut buffer = Vec::with_capacity(length);
    rustix::io::pread(file, rustix::buffer::spare_capacity(&mut buffer), offset)?;
    buffer.truncate(length);
    Ok(buffer.into())
}
