//! What a start finds in the cache directories. Names and headers are read here; contents are distrusted until used.

use super::config::{Config, ConfigError};
use super::index::{Index, Rest};
use super::journal::{Journal, Record};
use super::layout::{self, Prepared};
use super::pool::{call_returned, lock_of_ours};
use super::root::{Root, RootLimits, Space};
use super::{FileKey, Observer, SMALL_BLOCKS, sidecar};
use std::collections::{HashMap, HashSet};
use std::fs::DirEntry;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use volume::ScopeId;

/// How often a start looks whether a disk still answers.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What [`super::Engine::open`] found.
#[derive(Clone, Debug, Default)]
pub struct Recovery {
    pub files: u64,
    pub bytes: u64,
    /// Files and records that were of no use: torn, orphaned, or twice there.
    pub dropped: u64,
    /// Directories that another version wrote; each is kept under this name and the cache starts empty.
    pub set_aside: Vec<PathBuf>,
    /// Directories whose contents were thrown away: memory tiers, and those with another block size.
    pub emptied: Vec<PathBuf>,
    /// Directories that cannot be used, and why; the cache works without them until the next start.
    pub unusable: Vec<(PathBuf, String)>,
    pub elapsed: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("the cache configuration is wrong: {0}")]
    Config(#[from] ConfigError),
    #[error(
        "the cache directory {path:?} is in use by another agent: stop it, or configure another directory"
    )]
    InUse { path: PathBuf },
    #[error(
        "the directory {path:?} holds {name:?}, which is not a cache's: configure an empty directory as cache path"
    )]
    Foreign { path: PathBuf, name: String },
    #[error("the cache directory {path:?} cannot be used: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("threads for the cache cannot be started: {0}")]
    Threads(io::Error),
}

/// A file on disk that looks sound from the outside.
struct Found {
    id: u64,
    key: FileKey,
    bytes: u64,
    rest: Rest,
    crcs: Box<[u32]>,
}

#[derive(Default)]
struct Scan {
    found: Vec<Found>,
    dropped: u64,
    /// Records that did not match their checksum.
    torn: u64,
}

pub(crate) fn recover(
    config: &Config,
    observer: &Arc<dyn Observer>,
) -> Result<(Vec<Arc<Root>>, Index, Recovery), OpenError> {
    let started = Instant::now();
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
    let mut recovery = Recovery::default();
    let mut roots = Vec::new();
    let paths = config.tiers.iter().enumerate().flat_map(|(k, t)| t.paths.iter().map(move |p| (k, t, p)));
    let mut opening = Vec::new();
    for (number, (tier_number, tier, path)) in paths.enumerate() {
        let limits = RootLimits::of(tier);
        let root =
            Root::new(number as u8, tier_number, path.clone(), limits, config.disk_timeout, observer.clone());
        let root = Arc::new(root.map_err(OpenError::Threads)?);
        // On the disk's own threads, all disks at once: one that hangs holds up none of the others.
        let (sender, opened) = sync_channel(1);
        let (kind, block_bytes, at) = (tier.kind, config.block_bytes, root.clone());
        root.pool.submit(move || {
            let prepared = layout::prepare(&at.path, kind, block_bytes, now_ms);
            let _ = sender.send(prepared.map(|prepared| {
                call_returned();
                let space = Space::of(&prepared.dir);
                let scan = scan(&at, prepared.dir.as_fd(), block_bytes);
                (prepared, space, scan)
            })); // the waiter has gone: the directory is closed, and with it unlocked
        });
        opening.push(opened);
        roots.push(root);
    }
    let mut scans = Vec::new();
    for (root, opening) in roots.iter().zip(opening) {
        let scan = match wait_for(root, &opening) {
            Some(Ok((Prepared { dir, set_aside, emptied }, space, scan))) => {
                recovery.set_aside.extend(set_aside);
                recovery.emptied.extend(emptied.then(|| root.path.clone()));
                root.opened(dir, space);
                scan
            }
            Some(Err(OpenError::Io { source, .. })) => {
                observer.disk_error(root.number, "open", &source);
                observer.degraded(root.number, true);
                tracing::error!(path = %root.path.display(), error = %source, "a cache directory cannot be used");
                recovery.unusable.push((root.path.clone(), source.to_string()));
                Scan::default()
            }
            Some(Err(other)) => return Err(other),
            None => {
                observer.degraded(root.number, true);
                let why = format!("its disk does not answer within {:?}", config.disk_timeout);
                tracing::error!(path = %root.path.display(), why, "a cache directory is not used until the next start");
                recovery.unusable.push((root.path.clone(), why));
                Scan::default()
            }
        };
        scans.push(scan);
    }
    for path in &recovery.set_aside {
        tracing::warn!(path = %path.display(), "a cache directory of another version was set aside: the cache starts empty");
    }
    let mut index = Index::new(roots.len(), config.block_bytes);
    for (root, scan) in roots.iter().zip(scans) {
        recovery.dropped += scan.dropped;
        if scan.torn > 0 {
            observer.checksum_failed(root.number, scan.torn);
        }
        for Found { id, key, bytes, rest, crcs } in scan.found {
            if index.find(&key).is_some() || index.entries.contains_key(&id) {
                recovery.dropped += 1;
                let root = root.clone();
                root.clone().pool.submit(move || drop(root.remove(&key, id, true)));
                continue;
            }
            let scope = index.scope(&key.scope, config.scope_limit_bytes);
            index.add(id, &key, scope);
            index.set_root(id, &key, root.number, rest);
            index.charge(id, bytes);
            index.entries.entry(id).and_modify(|e| e.crcs = crcs);
            recovery.files += 1;
            recovery.bytes += bytes;
        }
    }
    recovery.elapsed = started.elapsed();
    Ok((roots, index, recovery))
}

/// What a root's thread reports when it has opened its directory; None: its disk hangs, from this moment on.
fn wait_for<T>(root: &Root, receiver: &Receiver<T>) -> Option<T> {
    loop {
        match receiver.recv_timeout(LOOK_EVERY) {
            Ok(report) => return Some(report),
            Err(RecvTimeoutError::Timeout) if root.begins_to_hang(Instant::now()) => return None,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

/// Everything on one root. A directory that cannot be read is skipped: its files are fetched again.
fn scan(root: &Root, dir: BorrowedFd<'_>, block_bytes: u64) -> Scan {
    let mut scan = Scan::default();
    let mut journal = lock_of_ours(&root.journal);
    let mut records: HashMap<u64, Record> = match journal.load(dir) {
        Ok((records, torn)) => {
            scan.torn = torn;
            records.into_iter().map(|r| (r.id, r)).collect()
        }
        Err(error) => {
            root.failed("read journal", &error, false);
            Journal::discard(dir);
            HashMap::new()
        }
    };
    call_returned();
    for (scope_dir, name) in list(&root.path, root) {
        let Some(scope) = ScopeId::parse(&name) else { continue };
        for (shelf, name) in list(&scope_dir, root) {
            if name.len() == 2 {
                scan_shelf(root, &scope, &shelf, block_bytes, &mut records, &mut scan);
            }
        }
        // Not in use yet. Only if it is empty.
        let _ = super::root::remove_empty(dir, scope.as_str());
    }
    scan
}

/// One directory of files.
fn scan_shelf(
    root: &Root,
    scope: &ScopeId,
    shelf: &Path,
    block_bytes: u64,
    records: &mut HashMap<u64, Record>,
    scan: &mut Scan,
) {
    let (mut data, mut sidecars, mut useless) = (Vec::new(), HashSet::new(), Vec::new());
    for (path, name) in list(shelf, root) {
        match (layout::parse_id(&name), name.strip_suffix(".idx").and_then(layout::parse_id)) {
            (Some(id), _) => data.push(id),
            (_, Some(id)) => drop(sidecars.insert(id)),
            _ => useless.push(path),
        }
    }
    for id in data {
        call_returned();
        let recorded = records.remove(&id).filter(|r| {
            let blocks = r.key.size.div_ceil(block_bytes);
            r.key.scope == *scope && blocks <= SMALL_BLOCKS && r.crcs.len() as u64 == blocks
        });
        let beside = shelf.join(format!("{id:016x}.idx"));
        let found = match recorded {
            Some(Record { key, crcs, .. }) => {
                Some(Found { id, bytes: key.size, key, rest: Rest::Unverified, crcs })
            }
            None if sidecars.contains(&id) => read_header(&beside).and_then(|header| {
                let sound = header.id == id
                    && header.key.scope == *scope
                    && header.block_bytes == block_bytes
                    && header.key.size <= volume::FILE_BYTES_MAX;
                let whole = header.present_blocks == header.blocks();
                let bytes = header.present_blocks.saturating_mul(block_bytes).min(header.key.size);
                let rest = if whole { Rest::Unverified } else { Rest::Partial };
                sound.then(|| Found { id, key: header.key, bytes, rest, crcs: Box::default() })
            }),
            None => None,
        };
        match found {
            Some(found) => {
                sidecars.remove(&id);
                scan.found.push(found);
            }
            None => useless.push(shelf.join(format!("{id:016x}"))),
        }
    }
    useless.extend(sidecars.into_iter().map(|id| shelf.join(format!("{id:016x}.idx"))));
    for path in useless {
        call_returned();
        scan.dropped += 1;
        // On a read-only disk it stays, and is found useless again.
        let _ = std::fs::remove_file(path);
    }
}

fn read_header(path: &Path) -> Option<sidecar::Header> {
    let mut bytes = Vec::with_capacity(sidecar::HEAD_MAX);
    std::fs::File::open(path).ok()?.take(sidecar::HEAD_MAX as u64).read_to_end(&mut bytes).ok()?;
    sidecar::decode_header(&bytes)
}

fn list(path: &Path, root: &Root) -> Vec<(PathBuf, String)> {
    call_returned();
    let entries = std::fs::read_dir(path).and_then(|entries| {
        let named = |e: DirEntry| (e.path(), e.file_name().to_string_lossy().into_owned());
        entries.inspect(|_| call_returned()).map(|e| e.map(named)).collect()
    });
    entries.unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotADirectory {
            root.failed("scan", &error, false);
        }
        Vec::new()
    })
}
