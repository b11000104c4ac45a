//! What an area does when its node has lost its power (or was reset) since it was open last.
//!
//! The journal has a prefix of what it was told, with at least all that was written out; of staged bytes only those are certain
//! that were written out. The journal is written out before the store is asked for anything, so it tells of each write that the store
//! may have, but not always how that ended. (What a program was told to be safe is in the journal, or in the store.) So, before
//! anything is served:
//!
//! ```text
//!  mounts, and what they had open and asked for    are gone
//!  bytes that the store has in an older version    the store's count, unless later ones were written out
//!  bytes of a file that the store never had        are gone, unless they were written out
//!  bytes here that were those of an object         may have others among them: they are sent again
//!  a name where the store has a lost write of ours is the store's
//! ```

use super::area::Area;
use super::conditions::is_of;
use super::file::File;
use super::locks::parent;
use super::names::{APPEND, BEGUN, Entry, OPEN, RESULT, file_entry};
use super::record::{Former, Object, Record};
use cache::meta::{Lookup, ROOT};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};
use link::writable::Wrong;
use std::sync::Arc;
use store::{Attributes, Seen};
use volume::Permissions;

/// Files that the store is asked about at once.
const AT_ONCE: usize = 16;

/// Of another run of the kernel: requests of mounts that are gone.
pub(super) fn is_over(key: &[u8]) -> bool {
    matches!(key.first(), Some(&(RESULT | BEGUN | OPEN | APPEND)))
}

/// The record as it counts from now on; None: the file is gone. With what the journal is to be told of that.
pub(super) fn recovered(ino: u64, mut record: Record) -> Result<(Option<Record>, Option<Entry>), Wrong> {
    let is_unsafe = record.local && !record.durable;
    if is_unsafe
        && record.path.is_some()
        && record.base.is_none()
        && let Some(former) = record.former.last()
    {
        // What the store has got of it under a former name, if it has: it is asked before that counts.
        let version = former.version.clone().unwrap_or_default();
        record.base = Some(Object { path: former.path.clone(), version, size: 0 });
        (record.local, record.same) = (false, true);
        let entry = file_entry(ino, Some(&record))?;
        return Ok((Some(record), Some(entry)));
    }
    // What the store has has other inode numbers from now on: those were of a metadata store that did not survive either.
    let is_gone = match &record.path {
        Some(_) => is_unsafe && record.base.is_none(),
        None => record.former.is_empty(),
    };
    if is_gone || record.clean {
        return Ok((None, Some(file_entry(ino, None)?)));
    }
    if record.local && !is_unsafe && record.same {
        // It may have been written to since, and the disk may have those bytes without the note of it.
        record.same = false;
        let entry = file_entry(ino, Some(&record))?;
        return Ok((Some(record), Some(entry)));
    }
    let Some(base) = record.base.as_ref().filter(|_| is_unsafe) else { return Ok((Some(record), None)) };
    let is_all = record.path.as_ref() == Some(&base.path)
        && record.target.as_ref() == Some(&base.version)
        && record.writes.is_empty()
        && record.former.is_empty();
    if is_all {
        return Ok((None, Some(file_entry(ino, None)?)));
    }
    (record.local, record.same) = (false, true);
    let entry = file_entry(ino, Some(&record))?;
    Ok((Some(record), Some(entry)))
}

impl Area {
    /// Asks the store about each file that it does not have as it is here.
    pub(super) fn recover(self: Arc<Self>) -> BoxFuture<'static, Result<(), Wrong>> {
        let files: Vec<Arc<File>> =
            self.state().files.values().filter(|file| !file.record().clean).cloned().collect();
        let asked = files.into_iter().map(move |file| {
            let me = self.clone();
            async move { me.recover_file(file).await }.boxed()
        });
        let asked = futures::stream::iter(asked).buffer_unordered(AT_ONCE);
        asked.try_for_each(|()| std::future::ready(Ok(()))).boxed()
    }

    async fn recover_file(&self, file: Arc<File>) -> Result<(), Wrong> {
        let file = &file;
        self.recover_former(file).await?;
        let record = file.record();
        let Some(path) = &record.path else { return Ok(()) };
        let stored = record.base.as_ref().filter(|_| !record.local);
        if let Some(base) = stored.filter(|base| base.path != *path) {
            let former = record.former.iter().find(|former| former.path == base.path);
            let seen = self.see(&base.path).await?;
            let is_there = former.is_some_and(|former| {
                seen.is_some_and(|seen| self.is_told(&seen, Some(&base.version), former.made_by.as_deref()))
            });
            if !is_there {
                return self.leave_to_store(file).await; // it is somewhere else by now
            }
        }
        let is_in_place = stored.is_some_and(|base| base.path == *path);
        let Some(seen) = self.see(path).await? else {
            if is_in_place {
                // It was removed, or got another name, and the journal does not tell it any more.
                return self.leave_to_store(file).await;
            }
            return self.change_record(file, |record| (record.target, record.made_by) = (None, None)).await;
        };
        let is_told = self.is_told(&seen, record.target.as_deref(), record.made_by.as_deref());
        // What was here of later bytes than those of `base` is lost, and the store has had them.
        let is_base = !is_in_place || stored.is_some_and(|base| base.version == seen.version.0);
        if is_told && is_base || self.is_former(path, &seen) {
            return Ok(()); // as the journal has it
        }
        let is_asked = is_told || is_of(&seen, &record.writes);
        if !is_asked && (is_in_place || self.is_lost(&seen, 1)) {
            // The object that had its bytes has been replaced: by what was lost here of this file, or by somebody else. Of what
            // the file was, or is by now elsewhere, nothing is removed: the journal does not tell where.
            return self.leave_to_store(file).await;
        }
        if !is_asked {
            return Ok(()); // somebody else's
        }
        let is_through = self.is_through() && record.local;
        let mut content = file.content.write().await;
        let mut record = file.noted(record.clone());
        record.unsettled = is_told && record.unsettled;
        record.made_by = seen.write.map(|id| id.to_string());
        record.target = Some(seen.version.0.clone());
        // What is here may be older than what the store has: the store, and not this disk, is what makes it safe.
        if is_in_place || is_through {
            record.base = Some(Object { path: path.clone(), version: seen.version.0, size: seen.size });
            (record.local, record.same) = (false, true);
            *content = None;
            file.set_stored_size(seen.size);
        }
        self.put_record(file, record).await
    }

    /// What is at a former name may be the object of a newer file there, of which the journal does not tell any more.
    async fn recover_former(&self, file: &File) -> Result<(), Wrong> {
        let before = file.record();
        let mut record = before.clone();
        // Of its bytes all are there, or those that are not here.
        let (is_local, leans) = (record.local, !record.local || !file.rest.is_empty());
        let note_size = |size: u64| {
            if !is_local {
                file.set_stored_size(size);
            }
        };
        for object in std::mem::take(&mut record.former) {
            let Some(seen) = self.see(&object.path).await? else { continue };
            if is_of(&seen, &object.writes) {
                if let Some(base) = record.base.as_mut().filter(|base| leans && base.path == object.path) {
                    (base.version, base.size) = (seen.version.0.clone(), seen.size);
                    note_size(seen.size);
                }
                let (version, made_by) = (Some(seen.version.0), seen.write.map(|id| id.to_string()));
                record.former.push(Former { path: object.path, version, made_by, writes: Vec::new() });
            } else if !self.is_newer(&seen, object.made_by.as_deref()) {
                let stored = record.base.as_mut().filter(|base| leans && base.path == object.path);
                if let Some(base) = stored.filter(|_| object.version.as_ref() == Some(&seen.version.0)) {
                    // Later bytes than those of `base`, if it is another version: what was here of them is lost.
                    (base.version, base.size) = (seen.version.0, seen.size);
                    note_size(seen.size);
                }
                record.former.push(object); // as the journal has it, or somebody else's
            }
        }
        if record != before {
            let record = file.noted(record);
            let entry = file_entry(file.ino, Some(&record))?;
            let changed = self.by_ino(file.ino);
            self.commit(vec![entry], move |state| {
                if let Some(file) = changed {
                    state.set(&file, record);
                }
            })
            .await?;
        }
        Ok(())
    }

    async fn see(&self, path: &[u8]) -> Result<Option<Seen>, Wrong> {
        self.sink.look(path).await.map_err(|e| self.store_wrong("look", path, &e))
    }

    /// A write that was lost has made it, after what the journal has of this name: `made_by`.
    fn is_newer(&self, seen: &Seen, made_by: Option<&str>) -> bool {
        let Some(write) = seen.write.map(|id| id.to_string()).filter(|_| self.is_lost(seen, 1)) else {
            return false;
        };
        let is_of_same_run = made_by.is_some_and(|made_by| made_by.get(..16) == write.get(..16));
        // None: there was nothing.
        !is_of_same_run || made_by.is_some_and(|made_by| made_by < write.as_str())
    }

    /// It is what the journal has of this name: this version, and no newer write's that has the same bytes.
    fn is_told(&self, seen: &Seen, version: Option<&str>, made_by: Option<&str>) -> bool {
        version == Some(&seen.version.0) && !self.is_newer(seen, made_by)
    }

    /// The journal has it as what another file was there.
    fn is_former(&self, path: &[u8], seen: &Seen) -> bool {
        let state = self.state();
        let owner = state.gone.get(path).and_then(|ino| state.files.get(ino));
        owner.is_some_and(|owner| {
            let former = owner.record().former;
            let mut there = former.iter().filter(|former| former.path == path);
            // Or what it was asked to be there: nobody knows in which order files are asked about.
            there.any(|former| {
                is_of(seen, &former.writes)
                    || self.is_told(seen, former.version.as_deref(), former.made_by.as_deref())
            })
        })
    }

    /// The store's word counts. What the file has left behind at other names goes all the same, but for the object that has its
    /// bytes.
    async fn leave_to_store(&self, file: &Arc<File>) -> Result<(), Wrong> {
        let record = file.noted(file.record());
        let Record { base, mut former, .. } = record.clone();
        former.retain(|former| base.as_ref().is_none_or(|base| base.path != former.path));
        let ino = file.ino;
        if former.is_empty() {
            return self.commit(vec![file_entry(ino, None)?], move |state| state.remove(ino)).await;
        }
        let _alone = file.content.write().await;
        self.put_record(file, Record { former, ..record.unlinked() }).await
    }

    /// Has the metadata store know what the bytes of a file here are, if it does not any more: after a loss of power it is a new one.
    /// False: the store has something else by now.
    pub(super) async fn know_base(&self, ino: u64, base: &Object) -> Result<bool, Wrong> {
        if self.know_dir(parent(&base.path)).await?.is_none() {
            return Ok(false);
        }
        let seen = self.sink.look(&base.path).await.map_err(|e| self.store_wrong("look", &base.path, &e))?;
        let Some(seen) = seen.filter(|seen| seen.version == base.version()) else { return Ok(false) };
        let Attributes { mode, uid, gid, modified_ns } = seen.attributes;
        let parameters = &self.spec.parameters;
        let permissions = Permissions::of(mode.unwrap_or(parameters.file_mode), uid, gid);
        self.note_object(ino, base, permissions, modified_ns.unwrap_or_default()).await?;
        Ok(true)
    }

    /// The number of a directory at the store, which is asked where it is not known. None: the store has none.
    pub(super) async fn know_dir(&self, path: &[u8]) -> Result<Option<u64>, Wrong> {
        if let Some(ino) = self.scope.names.resolve(path).map_err(|e| self.meta_wrong(&e))? {
            return Ok(Some(ino));
        }
        let mut dir = ROOT;
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            let asked = self.scope.lookup(dir, name, self.freshness());
            self.scope.within(self.spec.parameters.store_timeout, Some(dir), asked).await?;
            match self.scope.names.lookup(dir, name).map_err(|e| self.meta_wrong(&e))? {
                Lookup::Found { attributes, .. } => dir = attributes.ino,
                _ => return Ok(None),
            }
        }
        Ok(Some(dir))
    }

    /// A write of this area's has made it, from before one of the last `losses` losses of power: its journal may not tell of it.
    pub(super) fn is_lost(&self, seen: &Seen, losses: usize) -> bool {
        let Some(id) = seen.write.map(|id| id.to_string()) else { return false };
        self.lost_tags.iter().take(losses).any(|tag| id.starts_with(&hex::encode(tag)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The note that a file was written to may be lost, and its bytes not.
    #[test]
    fn bytes_that_are_here_are_those_of_no_object_after_a_loss_of_power() {
        let base = Object { path: b"old".to_vec(), version: "1".to_owned(), size: 0 };
        let renamed = Record {
            path: Some(b"new".to_vec()),
            local: true,
            durable: true,
            base: Some(base.clone()),
            target: None,
            made_by: None,
            clean: false,
            same: true,
            former: vec![Former {
                path: base.path,
                version: Some(base.version),
                made_by: None,
                writes: Vec::new(),
            }],
            writes: Vec::new(),
            unsettled: false,
            conflict: false,
            mode: 0o640,
            uid: 0,
            gid: 0,
            atime_ns: 0,
            mtime_ns: 0,
            ctime_ns: 0,
        };
        let expected = Record { same: false, ..renamed.clone() };
        let (record, entry) = recovered(1, renamed.clone()).unwrap();
        assert_eq!(record.as_ref(), Some(&expected));
        assert_eq!(entry, Some(file_entry(1, Some(&expected)).unwrap()));
        // The store's alone are.
        let stored = Record { local: false, ..renamed };
        assert_eq!(recovered(1, stored.clone()).unwrap(), (Some(stored), None));
    }
}
