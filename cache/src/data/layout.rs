//! What a cache directory looks like, who may use it, and what happens to one that we cannot read.
//!
//! ```text
//! <root>/FORMAT                 "millpond-cache <version> block <bytes>"
//! <root>/journal                records of the small files
//! <root>/<scope>/<xx>/<id>      data       (scope: 32 hex digits; id: 16; xx: the last two of the id)
//! <root>/<scope>/<xx>/<id>.idx  sidecar of a larger file
//! <root>.set-aside-<time>       a directory that another version wrote
//! ```

use super::TierKind;
use super::pool::call_returned;
use super::recover::OpenError;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Raised whenever an older build could misread what a newer one wrote.
pub(crate) const FORMAT_VERSION: u32 = 1;
pub(crate) const JOURNAL: &str = "journal";
const FORMAT: &str = "FORMAT";
const SET_ASIDE: &str = "set-aside-";
/// Directories set aside that are kept, per root; the oldest go first.
const SET_ASIDE_MAX: usize = 2;

/// `<2 hex>/<16 hex id>`, below the directory of its scope.
pub fn file_name(id: u64) -> String {
    format!("{:02x}/{id:016x}", id & 0xff)
}

/// The inverse of the second half of [`file_name`].
pub(crate) fn parse_id(name: &str) -> Option<u64> {
    let hex = name.len() == 16 && name.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase());
    hex.then(|| u64::from_str_radix(name, 16).ok()).flatten()
}

/// A directory that is ours alone and of our format.
pub(crate) struct Prepared {
    /// Holds the lock for as long as it is open.
    pub dir: OwnedFd,
    pub set_aside: Option<PathBuf>,
    /// It held files that were thrown away (a memory tier, another block size).
    pub emptied: bool,
}

pub(crate) fn prepare(
    path: &Path,
    kind: TierKind,
    block_bytes: u64,
    now_ms: u64,
) -> Result<Prepared, OpenError> {
    let fail = |source| OpenError::Io { path: path.to_owned(), source };
    if !path.is_dir() {
        std::fs::create_dir_all(path).map_err(fail)?;
    }
    let mut dir = lock(path)?;
    let (mut set_aside, mut emptied) = (None, false);
    match format_of(path).map_err(fail)? {
        Format::Ours(block) if block == block_bytes && kind != TierKind::Memory => {
            return Ok(Prepared { dir, set_aside, emptied });
        }
        Format::Ours(_) => {
            empty(path).map_err(fail)?;
            emptied = true;
        }
        // Memory that no process can use any more is not kept.
        Format::Unreadable if kind == TierKind::Memory => {
            empty(path).map_err(fail)?;
            emptied = true;
        }
        Format::Unreadable => {
            let (aside, renamed) = move_aside(path, now_ms).map_err(fail)?;
            if renamed {
                // Another directory now: the lock on the old one went away with it.
                dir = lock(path)?;
            }
            set_aside = Some(aside);
        }
        Format::Missing => {
            if let Some(name) = foreign(path).map_err(fail)? {
                return Err(OpenError::Foreign { path: path.to_owned(), name });
            }
        }
    }
    write_format(path, block_bytes).map_err(fail)?;
    Ok(Prepared { dir, set_aside, emptied })
}

/// The directory itself is locked, so that a read-only disk needs no file for it.
pub(crate) fn lock(path: &Path) -> Result<OwnedFd, OpenError> {
    let fail = |e: rustix::io::Errno| OpenError::Io { path: path.to_owned(), source: e.into() };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(path, flags, Mode::empty()).map_err(fail)?;
    match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(dir),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(OpenError::InUse { path: path.to_owned() }),
        Err(e) => Err(fail(e)),
    }
}

enum Format {
    Ours(u64),
    Unreadable,
    Missing,
}

fn format_of(path: &Path) -> io::Result<Format> {
    let text = match std::fs::read(path.join(FORMAT)) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Format::Missing),
        Err(e) => return Err(e),
    };
    let words: Vec<&str> = text.split_whitespace().collect();
    Ok(match words[..] {
        ["millpond-cache", version, "block", block] if version == FORMAT_VERSION.to_string() => {
            block.parse().map_or(Format::Unreadable, Format::Ours)
        }
        _ => Format::Unreadable,
    })
}

fn write_format(path: &Path, block_bytes: u64) -> io::Result<()> {
    use std::io::Write;
    let temporary = path.join("FORMAT.tmp");
    let mut file = std::fs::File::create(&temporary)?;
    writeln!(file, "millpond-cache {FORMAT_VERSION} block {block_bytes}")?;
    // The one thing that is synced: without it a power cut could cost the whole directory.
    file.sync_all()?;
    std::fs::rename(temporary, path.join(FORMAT))
}

fn entries(path: &Path) -> io::Result<Vec<String>> {
    std::fs::read_dir(path)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect()
}

fn is_ours(name: &str) -> bool {
    name == FORMAT
        || name.starts_with("FORMAT.")
        || name.starts_with(JOURNAL)
        || name == super::root::PROBE
        || { volume::ScopeId::parse(name).is_some() }
}

/// A directory without FORMAT is taken only if it is empty: a mistyped path must not cost anyone their files.
fn foreign(path: &Path) -> io::Result<Option<String>> {
    let tolerated = |n: &String| n == "lost+found" || n.starts_with(SET_ASIDE) || n.starts_with("FORMAT.");
    Ok(entries(path)?.into_iter().find(|name| !tolerated(name)))
}

fn empty(path: &Path) -> io::Result<()> {
    for name in entries(path)?.into_iter().filter(|name| is_ours(name)) {
        remove(&path.join(name))?;
    }
    Ok(())
}

/// As `remove_dir_all`, which looks like a disk that hangs when there are millions of files.
fn remove(path: &Path) -> io::Result<()> {
    call_returned();
    if !path.symlink_metadata()?.is_dir() {
        return std::fs::remove_file(path);
    }
    for name in entries(path)? {
        remove(&path.join(name))?;
    }
    std::fs::remove_dir(path)
}

/// Where it went, and whether the directory itself did: then there is a new, empty one in its place.
fn move_aside(path: &Path, now_ms: u64) -> io::Result<(PathBuf, bool)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let beside = |k: u32| path.with_file_name(format!("{name}.{SET_ASIDE}{now_ms}{}", suffix(k)));
    let aside = (0..).map(beside).find(|p| !p.exists()).expect("an unused name exists");
    if std::fs::rename(path, &aside).is_ok() {
        std::fs::create_dir_all(path)?;
        prune(path.parent().unwrap_or(path), &format!("{name}.{SET_ASIDE}"));
        return Ok((aside, true));
    }
    // A mount point cannot be renamed, nor anything in a directory that is not ours: its contents go into a directory
    // of their own.
    let within = |k: u32| path.join(format!("{SET_ASIDE}{now_ms}{}", suffix(k)));
    let aside = (0..).map(within).find(|p| !p.exists()).expect("an unused name exists");
    std::fs::create_dir(&aside)?;
    for name in entries(path)? {
        if name != "lost+found" && !name.starts_with(SET_ASIDE) {
            std::fs::rename(path.join(&name), aside.join(&name))?;
        }
    }
    prune(path, SET_ASIDE);
    Ok((aside, false))
}

fn suffix(k: u32) -> String {
    if k == 0 { String::new() } else { format!("-{k}") }
}

/// Removing a large cache takes minutes: in the background, and a failure only costs space.
fn prune(parent: &Path, prefix: &str) {
    let Ok(mut names) = entries(parent) else { return };
    names.retain(|name| name.starts_with(prefix));
    names.sort();
    let surplus = names.len().saturating_sub(SET_ASIDE_MAX);
    let doomed: Vec<PathBuf> = names.drain(..surplus).map(|name| parent.join(name)).collect();
    if !doomed.is_empty() {
        std::thread::spawn(move || {
            for path in doomed {
                if let Err(error) = std::fs::remove_dir_all(&path) {
                    tracing::warn!(path = %path.display(), %error, "an old set-aside cache could not be removed");
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_of_a_directory_is_that_of_the_golden_file() {
        let (dir, written) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_format(written.path(), 131_072).unwrap();
        let text = std::fs::read_to_string(written.path().join(FORMAT)).unwrap();
        let text = text + &file_name(0x1234_5678_9abc_def0) + "\n";
        let text = crate::golden::same(crate::GOLDEN, "directory-1.txt", &text);
        let (format, name) = text.split_once('\n').unwrap();
        std::fs::write(dir.path().join(FORMAT), format).unwrap();
        assert!(matches!(format_of(dir.path()).unwrap(), Format::Ours(131_072)));
        let id = name.trim_end().split_once('/').and_then(|(_, id)| parse_id(id));
        assert_eq!(id, Some(0x1234_5678_9abc_def0));
    }
}
