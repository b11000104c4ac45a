//! Makes room: files go whose bytes the store has.

use super::area::Area;
use super::file::File;
use super::late::{Changed, late_entry};
use super::names::{changes, data_name, elsewhere_entry, file_entry};
use crate::lock::lock;
use link::Cause;
use link::writable::Wrong;
use rustix::fs::AtFlags;
use std::sync::Arc;

impl Area {
    /// Drops what the store has and nobody has open, the least lately changed first. False: there is nothing.
    pub(super) async fn drop_clean(&self) -> bool {
        let mut clean: Vec<Arc<File>> = {
            let state = self.state();
            let idle = state.files.values().filter(|file| file.record().clean && !state.is_open(file.ino));
            idle.cloned().collect()
        };
        clean.sort_by_key(|file| *lock(&file.changed_at));
        let some = clean.len().div_ceil(4);
        let mut dropped = false;
        for file in clean.into_iter().take(some) {
            dropped |= self.drop_file(file).await;
        }
        dropped
    }

    /// False: somebody is about to use it. What has to go is removed from memory first, so that nobody finds it any more, and
    /// taken in anew once it is off the disk.
    async fn drop_file(&self, file: Arc<File>) -> bool {
        let ino = file.ino;
        {
            let mut state = self.state();
            let record = file.record();
            // Ours, and the area's.
            let is_held = Arc::strong_count(&file) > 2 || state.is_open(ino);
            if is_held || !record.clean || record.path.is_none() {
                return false;
            }
            self.dropping.send_modify(|dropping| _ = dropping.insert(ino));
            state.remove(ino);
        }
        self.forget(file, Changed::new(), false).await.is_ok()
    }

    /// Of a file that was taken from memory: its record goes, and then its bytes. If the record stays, so does the file.
    /// `late`: what of it may come to pass at the store all the same; `durably`: no loss of power brings it back.
    pub(super) async fn forget(&self, file: Arc<File>, late: Changed, durably: bool) -> Result<(), Wrong> {
        let ino = file.ino;
        let mut late = late;
        if !late.is_empty() {
            let surplus = self.state().surplus_late(late.len());
            late.extend(surplus);
        }
        let mut entries = vec![file_entry(ino, None)?, elsewhere_entry(ino, None)?];
        for (id, late) in &late {
            entries.push(late_entry(id, late.as_ref())?);
        }
        let (state, journal, files, dropping, tenure) = (
            self.state.clone(),
            self.journal.clone(),
            self.files.clone(),
            self.dropping.clone(),
            self.tenure.clone(),
        );
        let forgotten = self.in_order(move || {
            let changing = tenure.change();
            let forgotten = changing.is_some()
                && lock(&journal).as_mut().is_some_and(|journal| {
                    let gone = journal.batch(&changes(&entries)).is_ok();
                    if durably {
                        failpoint::hit("agent.staging.discarded");
                    }
                    gone && (!durably || journal.sync().is_ok())
                });
            match forgotten {
                true => {
                    lock(&state).remember_late(late);
                    // A stray is removed at the next start.
                    let _ = rustix::fs::unlinkat(&*files, data_name(ino), AtFlags::empty());
                }
                false => lock(&state).insert(&file),
            }
            dropping.send_modify(|dropping| _ = dropping.remove(&ino));
            if forgotten { Ok(()) } else { Err(Wrong::Cause(Cause::Unavailable)) }
        });
        forgotten.await
    }
}
