//! A renewal is wanted only until kubelet unpublishes its target: kubelet's word comes first,
//! and does not wait for a store that does not answer.

use crate::broker::mounts_table::Mount;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(in crate::broker) struct Wanted(Mutex<Targets>);

#[derive(Debug, Default)]
struct Targets {
    /// How many calls unpublish each of them.
    leaving: BTreeMap<PathBuf, usize>,
    /// Mounts that are being made anew there.
    making: BTreeMap<PathBuf, Arc<Mount>>,
}

/// As long as it lives nothing is made anew at its target.
#[derive(Debug)]
pub(crate) struct Leaving<'a> {
    wanted: &'a Wanted,
    path: PathBuf,
}

/// As long as it lives an unpublish finds the mount that is being made anew.
#[derive(Debug)]
pub(in crate::broker) struct Making<'a> {
    wanted: &'a Wanted,
    path: &'a Path,
}

impl Wanted {
    fn lock(&self) -> MutexGuard<'_, Targets> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_leaving(&self, path: &Path) -> bool {
        self.lock().leaving.contains_key(path)
    }

    /// And what is being made anew there.
    pub(super) fn leave(&self, path: &Path) -> (Leaving<'_>, Option<Arc<Mount>>) {
        let mut targets = self.lock();
        *targets.leaving.entry(path.to_owned()).or_default() += 1;
        (Leaving { wanted: self, path: path.to_owned() }, targets.making.get(path).cloned())
    }

    /// None: its target is being unpublished.
    pub(in crate::broker) fn make<'a>(&'a self, mount: &'a Arc<Mount>) -> Option<Making<'a>> {
        let path = mount.target.path();
        let mut targets = self.lock();
        if targets.leaving.contains_key(path) {
            return None;
        }
        targets.making.insert(path.to_owned(), mount.clone());
        Some(Making { wanted: self, path })
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let leaving = &mut self.wanted.lock().leaving;
        match leaving.get_mut(&self.path) {
            Some(calls) if *calls > 1 => *calls -= 1,
            _ => drop(leaving.remove(&self.path)),
        }
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.wanted.lock().making.remove(self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::mounts_table::tests::mount;

    #[test]
    fn a_target_is_left_until_the_last_of_its_unpublishes_is_over() {
        let (wanted, path) = (Wanted::default(), Path::new("/kubelet/a"));
        let (first, making) = wanted.leave(path);
        assert!(making.is_none());
        let (second, third) = (wanted.leave(path).0, wanted.leave(path).0);
        for leaving in [first, second] {
            drop(leaving);
            assert!(wanted.is_leaving(path), "another call unpublishes it");
        }
        drop(third);
        assert!(!wanted.is_leaving(path) && !wanted.is_leaving(Path::new("/kubelet/b")));
    }

    #[test]
    fn what_is_made_anew_is_found_by_an_unpublish_and_nothing_is_made_anew_after_it() {
        let (wanted, mount) = (Wanted::default(), Arc::new(mount()));
        let path = mount.target.path();
        let making = wanted.make(&mount).expect("no call unpublishes it");
        let (leaving, found) = wanted.leave(path);
        assert!(found.is_some_and(|found| Arc::ptr_eq(&found, &mount)));
        drop(making);
        assert!(wanted.leave(path).1.is_none(), "it is made no longer");
        assert!(wanted.make(&mount).is_none());
        drop(leaving);
        assert!(wanted.make(&mount).is_some());
    }
}
