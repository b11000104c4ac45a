//! What is noted of a file when the store has it.

use super::area::Area;
use super::file::File;
use super::former::note_former;
use super::late::{Changed, GivenUp};
use super::locks::parent;
use super::names::{Entry, State, elsewhere_entry, file_entry};
use super::record::{Object, Record};
use link::writable::{Owner, Wrong};
use std::sync::Arc;
use std::sync::atomic::Ordering::AcqRel;
use store::{WriteId, Written};
use volume::Permissions;

impl Area {
    /// The store has it, as it was at change `seen`.
    pub(super) async fn sent(
        &self,
        file: &Arc<File>,
        path: &[u8],
        written: Written,
        what: Sent,
    ) -> Result<(), Wrong> {
        let Sent { id, seen, size, owner } = what;
        failpoint::hit("agent.staging.sent");
        let object = Object { path: path.to_vec(), version: written.version.0, size };
        self.failures.over(path);
        self.arrived.fetch_add(1, AcqRel);
        // Before the store's word counts: a look-up would be told what was there before.
        self.note_fact(file, &object).await?;
        let sent = file.clone();
        self.note_sent(file, seen, move |record| {
            let path = object.path.clone();
            let mut writes = Vec::new();
            // Otherwise what the store has is copied there once more, with those of now.
            let is_all = owner.is_none_or(|owner| owner == record.owner());
            match record.path.as_deref() == Some(&object.path[..]) {
                true => {
                    if is_all {
                        sent.note_sent(seen);
                    }
                    std::mem::swap(&mut writes, &mut record.writes);
                    record.unsettled = false;
                    record.target = Some(object.version.clone());
                    record.made_by = Some(id.to_string());
                    record.base = Some(object);
                    record.same = true;
                    // Blocks that have come since it was written out are not on the disk, and are no change.
                    record.durable = record.local && sent.is_written_out(seen) && sent.rest.is_over();
                    sent.rest.set(None);
                }
                // Renamed or unlinked meanwhile: what was written is at a former name.
                false => {
                    if record.path.is_some() && record.local && sent.has_same_bytes(seen) {
                        // The store copies it from there.
                        (record.base, record.same) = (Some(object.clone()), true);
                        record.durable &= sent.rest.is_over();
                        sent.rest.set(None);
                    } else if let Some(base) =
                        record.base.as_mut().filter(|base| !record.local && base.path == object.path)
                    {
                        // It is all that there is of its bytes.
                        (base.version, base.size) = (object.version.clone(), object.size);
                    }
                    writes = note_former(record, object.path, object.version, id.to_string());
                }
            }
            let id = id.to_string();
            writes.retain(|write| *write != id);
            (GivenUp { path, writes, is_removed: Some(false) }, is_all)
        })
        .await
    }

    /// The metadata store learns what the source has now.
    async fn note_fact(&self, file: &Arc<File>, object: &Object) -> Result<(), Wrong> {
        let record = file.record();
        if record.path.as_deref() != Some(&object.path[..]) {
            return Ok(());
        }
        // After a loss of power nothing is known; whoever looked the file up has its number.
        self.know_dir(parent(&object.path)).await?;
        let permissions = Permissions::of(record.mode, Some(record.uid), Some(record.gid));
        self.note_object(file.ino, object, permissions, file.mtime_ns()).await
    }

    /// Changes the record as `change` says; it is clean if nothing was changed since `seen` and `change` says that this was all.
    pub(super) async fn note_sent(
        &self,
        file: &Arc<File>,
        seen: u64,
        change: impl FnOnce(&mut Record) -> (GivenUp, bool) + Send,
    ) -> Result<(), Wrong> {
        // Alone: a writer that comes later finds it clean, and notes that it is not.
        let _alone = file.content.write().await;
        let mut record = file.noted(file.record());
        let (given_up, is_all) = change(&mut record);
        let is_unchanged = file.changes() == seen;
        record.same &= file.has_same_bytes(seen) || !record.local; // bytes are changed here alone
        record.clean = record.former.is_empty() && is_unchanged && is_all;
        self.put_record_giving_up(file, record, &given_up).await
    }

    pub(super) async fn change_record(
        &self,
        file: &Arc<File>,
        change: impl FnOnce(&mut Record) + Send,
    ) -> Result<(), Wrong> {
        let _alone = file.content.write().await;
        let mut record = file.noted(file.record());
        change(&mut record);
        self.put_record(file, record).await
    }

    /// To be called with the content alone: a record is changed by one at a time.
    pub(super) async fn put_record(&self, file: &Arc<File>, record: Record) -> Result<(), Wrong> {
        self.put_record_giving_up(file, record, &GivenUp::default()).await
    }

    pub(super) async fn put_record_giving_up(
        &self,
        file: &Arc<File>,
        record: Record,
        given_up: &GivenUp,
    ) -> Result<(), Wrong> {
        let (entries, late) = self.give_up(given_up)?;
        self.put_record_with(file, record, entries, late).await
    }

    /// As [`Self::put_record`], with what else the journal is to be told at the same time.
    pub(super) async fn put_record_beside(
        &self,
        file: &Arc<File>,
        record: Record,
        beside: Vec<Entry>,
    ) -> Result<(), Wrong> {
        self.put_record_with(file, record, beside, Changed::new()).await
    }

    async fn put_record_with(
        &self,
        file: &Arc<File>,
        record: Record,
        mut entries: Vec<Entry>,
        late: Changed,
    ) -> Result<(), Wrong> {
        entries.push(file_entry(file.ino, Some(&record))?);
        let (elsewhere, is_noted) = file.rest.beside(record.local);
        if elsewhere.is_some() || is_noted {
            entries.push(elsewhere_entry(file.ino, elsewhere.as_ref())?);
        }
        let changed = file.clone();
        let apply = move |state: &mut State| {
            changed.rest.note_noted(elsewhere.is_some());
            state.set(&changed, record);
            state.remember_late(late);
        };
        self.commit(entries, apply).await
    }
}

/// What of a file was sent.
#[derive(Clone, Copy)]
pub(super) struct Sent {
    pub(super) id: WriteId,
    /// The change up to which it was.
    pub(super) seen: u64,
    /// Bytes.
    pub(super) size: u64,
    /// Where they were said before the last change of the bytes: owner and mode.
    pub(super) owner: Option<Owner>,
}
