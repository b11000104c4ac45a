//! A bucket over a directory tree: a key is a path, its ETag comes from size, mtime and inode, nothing is ever hashed.

use super::bucket::{Body, Bucket, Meta, Next, Visitor};
use bytes::Bytes;
use futures::StreamExt;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::{Bound, Range};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Listings come from an index that a walk builds; it is at most `rescan` old, or twenty times what the walk took, so
/// that listings of many objects do not measure walks. HEAD and GET always ask the disk.
#[derive(Debug)]
pub struct Directory {
    root: PathBuf,
    rescan: Duration,
    index: Mutex<Option<Walked>>,
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
        Self { root: root.into(), rescan, index: Mutex::new(None) }
    }

    /// The next listing walks the tree again.
    fn outdate(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Walked>> {
        self.index.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
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
}

fn walk(dir: &Path, prefix: &str, index: &mut Index) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
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
        let Some(path) = self.path(key) else { return Ok(None) };
        match fs::symlink_metadata(path) {
            Ok(found) => Ok(found.is_file().then(|| meta(&found))),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
            // A segment over 255 bytes.
            Err(e) if e.raw_os_error() == Some(libc::ENAMETOOLONG) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn read(&self, key: &str, expected: &Meta, range: Range<u64>) -> io::Result<Body> {
        let path = self.path(key).ok_or(io::ErrorKind::NotFound)?;
        let file = Arc::new(File::open(path)?);
        if meta(&file.metadata()?).etag != expected.etag {
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
        let path = self.path(key).ok_or(io::ErrorKind::InvalidInput)?;
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, body)?;
        self.outdate();
        Ok(meta(&fs::metadata(&path)?))
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.outdate();
        match self.path(key).map(fs::remove_file) {
            Some(Err(e)) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
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
