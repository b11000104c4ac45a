//! A renewal is wanted only until kubelet unpublishes its target: kubelet's word comes first,
//! and does not wait for a store that does not answer.

use crate::broker::mounts_table::Mount;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(super) struct Wanted(Mutex<Targets>);

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
pub(super) struct Making<'a> {
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
    pub(super) fn make<'a>(&'a self, mount: &'a Arc<Mount>) -> Option<Making<'a>> {
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
