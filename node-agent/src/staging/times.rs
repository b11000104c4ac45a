//! When directories were changed on this node: an object store has no place for it. Known until the agent ends.

use super::file::now_ns;
use crate::lock::lock;
use link::writable::Node;
use std::collections::HashMap;
use std::sync::Mutex;

/// More are not remembered: those that were changed first are forgotten, and show again what the store says.
const DIRECTORIES_MAX: usize = 65_536;

#[derive(Default)]
pub(super) struct Times {
    directories: Mutex<HashMap<u64, Changed>>,
}

/// Nanoseconds since 1970. None: as the metadata store has it.
#[derive(Clone, Copy)]
struct Changed {
    atime_ns: Option<i64>,
    mtime_ns: Option<i64>,
    ctime_ns: i64,
}

impl Times {
    /// A name in it was made, removed or replaced.
    pub(super) fn names_changed(&self, dir: u64) {
        self.change(dir, |changed| changed.mtime_ns = Some(changed.ctime_ns));
    }

    /// Its owner, mode, times or name were set.
    pub(super) fn set(&self, dir: u64, atime_ns: Option<i64>, mtime_ns: Option<i64>) {
        self.change(dir, |changed| {
            changed.atime_ns = atime_ns.or(changed.atime_ns);
            changed.mtime_ns = mtime_ns.or(changed.mtime_ns);
        });
    }

    fn change(&self, dir: u64, how: impl FnOnce(&mut Changed)) {
        let mut directories = lock(&self.directories);
        if directories.len() >= DIRECTORIES_MAX && !directories.contains_key(&dir) {
            let mut times: Vec<i64> = directories.values().map(|changed| changed.ctime_ns).collect();
            let (_, median, _) = times.select_nth_unstable(DIRECTORIES_MAX / 2);
            let median = *median;
            directories.retain(|_, changed| changed.ctime_ns > median);
        }
        let ctime_ns = now_ns();
        let changed = directories.entry(dir).or_insert(Changed { atime_ns: None, mtime_ns: None, ctime_ns });
        changed.ctime_ns = ctime_ns;
        how(changed);
    }

    pub(super) fn forget(&self, dir: u64) {
        lock(&self.directories).remove(&dir);
    }

    /// What is shown of a directory. A store that has times of its own (`file://`) may tell of a later change by somebody
    /// else.
    pub(super) fn show(&self, node: &mut Node) {
        let Some(changed) = lock(&self.directories).get(&node.ino).copied() else { return };
        let stored_ns = node.mtime_ns;
        node.atime_ns = changed.atime_ns.unwrap_or(stored_ns);
        if stored_ns <= changed.ctime_ns {
            node.mtime_ns = changed.mtime_ns.unwrap_or(stored_ns);
        }
        node.ctime_ns = stored_ns.max(changed.ctime_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(times: &Times, stored_ns: i64) -> (i64, i64, i64) {
        let mut node = Node {
            ino: 7,
            size: 4096,
            stored: 4096,
            mode: libc::S_IFDIR | 0o755,
            uid: 0,
            gid: 0,
            links: 2,
            atime_ns: stored_ns,
            mtime_ns: stored_ns,
            ctime_ns: stored_ns,
        };
        times.show(&mut node);
        (node.atime_ns, node.mtime_ns, node.ctime_ns)
    }

    #[test]
    fn what_changes_a_directory_shows_in_the_times_that_posix_names() {
        let (times, begun) = (Times::default(), now_ns());
        assert_eq!(shown(&times, 5), (5, 5, 5));
        times.set(7, None, None);
        let (atime, mtime, ctime) = shown(&times, 5);
        assert!((atime, mtime) == (5, 5) && ctime >= begun, "another mode changes ctime alone");
        times.set(7, Some(1), Some(2));
        let (atime, mtime, ctime) = shown(&times, 5);
        assert!((atime, mtime) == (1, 2) && ctime >= begun);
        times.names_changed(7);
        let (atime, mtime, ctime) = shown(&times, 5);
        assert!(atime == 1 && mtime == ctime && mtime >= begun);
        let later = now_ns() + 1_000_000_000;
        assert_eq!(shown(&times, later), (1, later, later), "somebody else has changed it since");
        times.forget(7);
        assert_eq!(shown(&times, 5), (5, 5, 5));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let times = Times::default();
        for dir in 0..2 * DIRECTORIES_MAX as u64 {
            times.names_changed(dir);
        }
        let known = lock(&times.directories);
        assert!(known.len() <= DIRECTORIES_MAX && known.contains_key(&(2 * DIRECTORIES_MAX as u64 - 1)));
    }
}
