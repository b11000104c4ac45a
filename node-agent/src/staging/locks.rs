//! Which names an operation has for itself. One that makes or removes a name has that name alone and its directory together
//! with others; one that removes a directory has the directory alone.

use crate::lock::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

#[derive(Default)]
pub(super) struct Locks {
    paths: Mutex<HashMap<Vec<u8>, Weak<RwLock<()>>>>,
}

/// Held until it is dropped.
pub(super) struct Held {
    _alone: Vec<OwnedRwLockWriteGuard<()>>,
    _shared: Vec<OwnedRwLockReadGuard<()>>,
}

/// Locks of names that nobody holds are forgotten once there are so many.
const FORGET_AT: usize = 4096;

impl Locks {
    /// `alone`: paths below the volume's source; their directories are shared. In the order of the paths, whatever the
    /// order in which they are told, so that two operations never wait for each other.
    pub(super) async fn take(&self, alone: &[&[u8]]) -> Held {
        let mut wanted: Vec<(&[u8], bool)> = alone.iter().map(|path| (*path, true)).collect();
        wanted.extend(alone.iter().filter(|path| !path.is_empty()).map(|path| (parent(path), false)));
        // Where a path is wanted in both ways, alone comes first and stands for both.
        wanted.sort_by(|(a, a_alone), (b, b_alone)| a.cmp(b).then(b_alone.cmp(a_alone)));
        wanted.dedup_by(|(later, _), (first, _)| later == first);
        let mut held = Held { _alone: Vec::new(), _shared: Vec::new() };
        for (path, alone) in wanted {
            let path = self.of(path);
            match alone {
                true => held._alone.push(path.write_owned().await),
                false => held._shared.push(path.read_owned().await),
            }
        }
        held
    }

    fn of(&self, path: &[u8]) -> Arc<RwLock<()>> {
        let mut paths = lock(&self.paths);
        if let Some(known) = paths.get(path).and_then(Weak::upgrade) {
            return known;
        }
        if paths.len() >= FORGET_AT {
            paths.retain(|_, path| path.strong_count() > 0);
        }
        let new = Arc::new(RwLock::new(()));
        paths.insert(path.to_vec(), Arc::downgrade(&new));
        new
    }
}

pub(super) fn parent(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').map_or(&[], |slash| &path[..slash])
}

pub(super) fn name(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').map_or(path, |slash| &path[slash + 1..])
}

pub(super) fn child(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    async fn is_free(locks: &Locks, paths: &[&[u8]]) -> bool {
        tokio::time::timeout(Duration::from_millis(20), locks.take(paths)).await.is_ok()
    }

    #[tokio::test]
    async fn a_directory_is_not_removed_while_a_name_is_made_in_it() {
        let locks = Locks::default();
        let making = locks.take(&[b"a/b"]).await;
        assert!(is_free(&locks, &[b"a/c"]).await, "others are made in it meanwhile");
        assert!(!is_free(&locks, &[b"a"]).await);
        assert!(!is_free(&locks, &[b"a/b"]).await);
        drop(making);
        assert!(is_free(&locks, &[b"a"]).await);
    }

    #[tokio::test]
    async fn renames_into_each_other_do_not_wait_for_each_other() {
        let locks = Arc::new(Locks::default());
        let names: [&[u8]; 4] = [b"a", b"a/b", b"a/b/c", b"b"];
        let mut tasks = Vec::new();
        for i in 0..200 {
            let locks = locks.clone();
            tasks.push(tokio::spawn(async move {
                let _held = locks.take(&[names[i % 4], names[(i / 4) % 4]]).await;
                tokio::task::yield_now().await;
            }));
        }
        for task in tasks {
            tokio::time::timeout(Duration::from_secs(10), task)
                .await
                .expect("nobody waits for ever")
                .unwrap();
        }
    }

    #[test]
    fn paths_have_a_directory_and_a_name() {
        assert_eq!((parent(b"a/b/c"), name(b"a/b/c")), (&b"a/b"[..], &b"c"[..]));
        assert_eq!((parent(b"a"), name(b"a")), (&b""[..], &b"a"[..]));
        assert_eq!((child(b"", b"a"), child(b"a", b"b")), (b"a".to_vec(), b"a/b".to_vec()));
    }
}
