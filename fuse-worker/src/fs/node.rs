//! Node ids: an inode number, and above it what decides how the file is opened.
//!
//! ```text
//!  63        40 39                 0
//!  ├── n ──────┼── inode number ───┤    n = epoch (Passthrough) or the low 24 bits of the version (otherwise)
//! ```
//!
//! A node id means one content, opened in one way, for life. It is computed from the metadata store and decoded without
//! it, so that it is no state. Directories and symlinks have n = 0: their node id is their inode number.

use cache::meta::{Attributes, INO_LIMIT, Kind};
use link::worker::Mode;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

const N_SHIFT: u32 = 40;
const N_MASK: u32 = (1 << 24) - 1;
/// Open files whose node id is remembered; beyond that, old ones are forgotten.
const KNOWN_MAX: usize = 16_384;

pub fn node_id(mode: Mode, attributes: &Attributes) -> u64 {
    let n = match (attributes.kind, mode) {
        // What can be written to has no one content for life.
        (Kind::Directory | Kind::Symlink, _) | (Kind::File, Mode::Writable) => 0,
        (Kind::File, Mode::Passthrough) => attributes.epoch,
        (Kind::File, Mode::NoOpen | Mode::Kept) => attributes.version,
    };
    attributes.ino | u64::from(n & N_MASK) << N_SHIFT
}

pub(crate) fn ino_of(nodeid: u64) -> u64 {
    nodeid & (INO_LIMIT - 1)
}

fn n_of(nodeid: u64) -> u32 {
    (nodeid >> N_SHIFT) as u32
}

/// The file behind this node id was whole in the cache: its opens are passed through.
pub(super) fn is_passthrough(mode: Mode, nodeid: u64) -> bool {
    mode == Mode::Passthrough && n_of(nodeid) % 2 == 1
}

/// The version that a node id stands for, as far as it tells by itself.
pub(super) fn version_of(mode: Mode, nodeid: u64, now: &Attributes) -> Option<u32> {
    if node_id(mode, now) == nodeid {
        return Some(now.version);
    }
    match mode {
        Mode::Passthrough => (now.since_epoch..=now.epoch).contains(&n_of(nodeid)).then_some(now.version),
        Mode::Writable => None, // the agent says it, at each read
        Mode::NoOpen | Mode::Kept => {
            let behind = now.version.wrapping_sub(n_of(nodeid)) & N_MASK;
            now.version.checked_sub(behind)
        }
    }
}

/// What a node id stood for when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Opened {
    pub(super) version: u32,
    pub(super) size: u64,
    pub(super) mtime_ns: i64,
}

/// The contents of node ids that are still open although the source has another by now. A help, not state: without it
/// fstat and a reopen of such a file are ESTALE, and reads within it go on (the handle tells the version).
#[derive(Default)]
pub(super) struct OldContents {
    opened: Mutex<HashMap<u64, Opened>>,
    /// Node ids of which a read found that their content is gone from the source.
    stale: Mutex<HashSet<u64>>,
    /// False nearly always, so that looking costs no lock.
    some_stale: AtomicBool,
}

impl OldContents {
    pub(super) fn note(&self, nodeid: u64, attributes: &Attributes) {
        let mut map = self.lock();
        if map.len() >= KNOWN_MAX && !map.contains_key(&nodeid) {
            let mut keep = false;
            map.retain(|_, _| {
                keep = !keep;
                keep
            });
        }
        let Attributes { version, size, mtime_ns, .. } = *attributes;
        map.insert(nodeid, Opened { version, size, mtime_ns });
    }

    pub(super) fn get(&self, nodeid: u64) -> Option<Opened> {
        self.lock().get(&nodeid).copied()
    }

    pub(super) fn mark_stale(&self, nodeid: u64) {
        let mut stale = self.stale.lock().unwrap_or_else(|e| e.into_inner());
        if stale.len() >= KNOWN_MAX {
            stale.clear(); // those are shown as they were, until their time has run out
        }
        stale.insert(nodeid);
        self.some_stale.store(true, Relaxed);
    }

    /// The name was looked up again and this is still what it leads to.
    pub(super) fn confirm(&self, nodeid: u64) {
        if self.some_stale.load(Relaxed) {
            self.stale.lock().unwrap_or_else(|e| e.into_inner()).remove(&nodeid);
        }
    }

    pub(super) fn is_stale(&self, nodeid: u64) -> bool {
        self.some_stale.load(Relaxed)
            && self.stale.lock().unwrap_or_else(|e| e.into_inner()).contains(&nodeid)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Opened>> {
        self.opened.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// How long an inode that has changed its node id is left alone, milliseconds: longer than an open takes.
const SETTLE_MS: u64 = 2000;
const SWITCHED_MAX: usize = 4096;

/// Inodes whose node id changed under an open lately, with the moment.
pub(super) struct Switched {
    at: Mutex<HashMap<u64, u64>>,
    /// Until then any inode may be one: opens that this worker's predecessor sent to look again come back to this one.
    inherited_until_ms: u64,
}

impl Switched {
    /// `successor_since_ms`: when this worker took over from another, if it did.
    pub(super) fn new(successor_since_ms: Option<u64>) -> Self {
        let inherited_until_ms = successor_since_ms.map_or(0, |since| since.saturating_add(SETTLE_MS));
        Self { at: Mutex::default(), inherited_until_ms }
    }

    pub(super) fn note(&self, ino: u64, now_ms: u64) {
        let mut map = self.lock();
        if map.len() >= SWITCHED_MAX {
            map.retain(|_, at| now_ms.saturating_sub(*at) < SETTLE_MS);
        }
        if map.len() < SWITCHED_MAX {
            map.insert(ino, now_ms);
        }
    }

    pub(super) fn recently(&self, ino: u64, now_ms: u64) -> bool {
        if now_ms < self.inherited_until_ms {
            return true;
        }
        let mut map = self.lock();
        let recent = map.get(&ino).is_some_and(|at| now_ms.saturating_sub(*at) < SETTLE_MS);
        if !recent {
            map.remove(&ino);
        }
        recent
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, u64>> {
        self.at.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(version: u32, epoch: u32) -> Attributes {
        Attributes {
            ino: 77,
            kind: Kind::File,
            size: 1,
            mtime_ns: 0,
            version,
            epoch,
            since_epoch: epoch,
            token: String::new(),
            cached: None,
            target: vec![],
            permissions: None,
        }
    }

    #[test]
    fn a_new_version_or_epoch_is_a_new_node_id_and_the_inode_number_stays() {
        let (old, new) = (attributes(1, 4), attributes(2, 5));
        for mode in [Mode::Passthrough, Mode::Kept] {
            assert_ne!(node_id(mode, &old), node_id(mode, &new));
            assert_eq!(ino_of(node_id(mode, &new)), 77);
        }
        assert!(is_passthrough(Mode::Passthrough, node_id(Mode::Passthrough, &new)));
        assert!(!is_passthrough(Mode::Passthrough, node_id(Mode::Passthrough, &old)));
        assert!(!is_passthrough(Mode::Kept, node_id(Mode::Kept, &attributes(1, 1))));
    }

    #[test]
    fn versions_are_told_by_node_ids_across_the_wrap_of_24_bits() {
        let old = node_id(Mode::NoOpen, &attributes((1 << 24) - 1, 0));
        assert_eq!(version_of(Mode::NoOpen, old, &attributes((1 << 24) + 3, 0)), Some((1 << 24) - 1));
        let future = node_id(Mode::NoOpen, &attributes(9, 0));
        assert_eq!(version_of(Mode::NoOpen, future, &attributes(3, 0)), None);
    }

    #[test]
    fn an_epoch_tells_its_version_as_far_as_the_epochs_of_that_are_remembered() {
        let now = Attributes { since_epoch: 3, ..attributes(2, 6) };
        let version_at = |epoch| {
            let then = node_id(Mode::Passthrough, &attributes(1, epoch));
            version_of(Mode::Passthrough, then, &now)
        };
        assert_eq!([2, 3, 5, 6, 7].map(version_at), [None, Some(2), Some(2), Some(2), None]);
    }

    #[test]
    fn what_is_known_of_open_files_is_bounded() {
        let known = OldContents::default();
        for nodeid in 0..3 * KNOWN_MAX as u64 {
            known.note(nodeid, &attributes(1, 0));
        }
        assert!(known.lock().len() <= KNOWN_MAX);
        assert!(known.get(3 * KNOWN_MAX as u64 - 1).is_some());
    }
}
