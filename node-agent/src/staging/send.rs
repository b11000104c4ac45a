//! Brings staged files into the store.
//!
//! One file is sent by one task at a time. What is sent is a copy of its bytes as they were at one moment, with their
//! checksum, so that writers go on meanwhile; what they change is sent again. A file whose bytes come in order is sent
//! while it is written, part by part.

use super::area::{Area, file_wrong};
use super::believed::STRANGERS;
use super::file::File;
use super::late::{self, GivenUp};
use super::locks::{name, parent};
use super::names::{PROBE_KEY, State, data_name, elsewhere_entry, file_entry};
use super::ongoing::{Begun, Ongoing};
use super::parts;
use super::record::{Former, Object, Record};
use super::{Outcome, Waiting};
use crate::lock::lock;
use cache::meta::{Attributes, Incoming, Kind, ROOT};
use crc_fast::CrcAlgorithm;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use link::Cause;
use link::writable::{Done, Owner, Wrong};
use rustix::fs::{AtFlags, MemfdFlags};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, Weak};
use std::time::Duration;
use store::{Abilities, Body, Condition, Part, Seen, StoreError, Version, Write, WriteId, Written};
use tokio::time::Instant;
use volume::Permissions;

/// Larger files go in parts where the store has them, bytes.
const WHOLE_MAX: u64 = 2 * parts::FIRST;
/// Larger pieces are read from the staged file while they are sent, and not from a copy, bytes.
const COPY_MAX: u64 = 16 << 20;
/// So much of a file is read at once, bytes.
const READ_STEP: u64 = 256 << 10;
/// Parts of one file on their way at once. Over 20 ms eight fill no link whose connections have 100 MB/s each.
const PARTS_AT_ONCE: usize = 16;
/// Files that are sent at once without anybody who waits for them: one that the store does not take holds up no other.
const FILES_AT_ONCE: usize = 4;
/// How often what is changed while it is sent is sent again before its writers wait.
const ROUNDS: u32 = 3;
/// How often it is tried what a store can do, where something comes in between.
const PROBES: u32 = 5;
/// How often a file is begun anew at most.
const ATTEMPTS: u32 = 20;
/// What nobody waits for is sent when it has not changed for so long.
const QUIET: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(500);
/// Between two attempts at what a store has refused or not answered.
const AGAIN: Duration = Duration::from_secs(15);
/// Files of which the store has all and that are kept for readers, and their bytes.
const CLEAN_MAX: usize = 4096;
/// Of one file: an attempt that failed may come to pass later.
const WRITES_KEPT: usize = 8;

impl Area {
    /// Returns when the store has the file as it was when this was called, under its present name, or was told that it is
    /// gone.
    pub(super) async fn send(&self, file: &Arc<File>) -> Result<(), Wrong> {
        let wanted = file.changes();
        let mut ongoing = file.turn().await;
        for round in 0.. {
            let record = file.record();
            // Whoever writes on is not waited for.
            if record.clean || file.sent() >= wanted && record.former.is_empty() {
                return Ok(());
            }
            if record.conflict {
                return Err(Wrong::Conflict);
            }
            if round > ATTEMPTS {
                return Err(Wrong::Cause(Cause::Unavailable)); // it is never as it was a moment before
            }
            if let Some(path) = &record.path {
                self.sent_before(path, Some(file.ino)).await?;
            }
            let is_at = |path: &Vec<u8>| record.base.as_ref().is_some_and(|base| base.path == *path);
            let is_whole = file.sent() >= file.changes() && record.same && !record.unsettled;
            let is_there = match &record.path {
                // Only its former names are to go.
                Some(path) if is_whole && is_at(path) => true,
                Some(path) => self.send_to(file, &mut ongoing, record.clone(), path, round >= ROUNDS).await?,
                None => {
                    self.abandon(&mut ongoing).await;
                    self.note_sent(file, file.changes(), |_| (GivenUp::default(), true)).await?;
                    true
                }
            };
            // Not before: what is at a former name may be all that the store has of it.
            if is_there {
                self.remove_former(file).await?;
            }
        }
        Ok(())
    }

    /// Another file's object must be gone first.
    pub(super) fn send_before(&self, ino: u64) -> futures::future::BoxFuture<'_, Result<(), Wrong>> {
        Box::pin(async move {
            match self.by_ino(ino) {
                Some(other) => self.send(&other).await,
                None => Ok(()),
            }
        })
    }

    /// What is at this path, or below it, and has another name here by now or none: the store is told first.
    /// `own`: the file that is to come there itself.
    pub(super) async fn sent_before(&self, path: &[u8], own: Option<u64>) -> Result<(), Wrong> {
        let owner = self.state().gone.get(path).copied();
        if let Some(ino) = owner.filter(|owner| Some(*owner) != own) {
            self.send_before(ino).await?;
        }
        let was_directory = self.state().moved.contains_key(path);
        if was_directory { self.end_moves(path).await } else { Ok(()) }
    }

    pub(super) async fn sent_below(&self, dir: &[u8]) -> Result<(), Wrong> {
        let owners: Vec<u64> = {
            let state = self.state();
            State::in_dir(&state.gone, dir).map(|(_, ino)| *ino).collect()
        };
        for ino in owners {
            self.send_before(ino).await?;
        }
        Ok(())
    }

    /// True: the store has it there, as it was a moment ago. False: it is to be begun anew.
    async fn send_to(
        &self,
        file: &Arc<File>,
        ongoing: &mut Ongoing,
        record: Record,
        path: &[u8],
        alone: bool,
    ) -> Result<bool, Wrong> {
        if record.unsettled {
            return self.settle(file, path).await.map(|()| false);
        }
        // Begun under a name that it had then: it comes to an end there, and is copied, instead of being sent once more.
        let begun = ongoing.upload.as_ref().map(|begun| &begun.upload.path);
        let former = record.former.iter().find(|former| begun == Some(&former.path));
        let goes_in_parts = |size: u64| size > WHOLE_MAX && self.sink.limits().parts_max > 0;
        let (path, target) = match former.filter(|_| !record.same && goes_in_parts(file.size())) {
            Some(former) => (&former.path[..], former.version.as_deref()),
            None => (path, record.target.as_deref()),
        };
        let condition = self.condition_of(target, path).await?;
        let content = file.content.write().await;
        if file.record() != record {
            return Ok(false); // another name, say: begun anew
        }
        if !file.rest.is_empty() {
            drop(content);
            return self.bring_to_send(file).await.map(|()| false);
        }
        let (seen, size) = (file.changes(), file.size());
        let data = match (&record.base, &*content) {
            (Some(base), _) if record.same => {
                let (base, is_here) = (base.clone(), content.is_some());
                drop(content);
                return self.send_copy(file, &base, is_here, path, &condition, seen).await;
            }
            (_, Some(data)) => data.clone(),
            (_, None) => return Err(Wrong::Cause(Cause::Internal)),
        };
        if goes_in_parts(size) {
            // Its writers wait only if they have not let it come to an end for some time.
            let held = if alone {
                Some(content)
            } else {
                drop(content);
                None
            };
            let written = self.send_parts(file, ongoing, &data, path, &condition, held.is_some()).await;
            drop(held);
            return match written? {
                Some((written, what)) => self.sent(file, path, written, what).await.map(|()| true),
                None => Ok(false),
            };
        }
        if record.path.as_deref() != Some(path) {
            return Ok(false); // it has become shorter just now
        }
        self.abandon(ongoing).await;
        let write = self.begin_write(file).await?;
        let body = self.body(file, &data, 0..size, size <= COPY_MAX).await?;
        let held = if alone || size > COPY_MAX {
            Some(content)
        } else {
            drop(content);
            None
        };
        self.sync_disk().await?; // as before all that the store is asked for: see `begin`
        failpoint::hit("agent.staging.put");
        let put = self.sink.put(path, &body, &write, &condition).await;
        drop(held);
        failpoint::hit("agent.staging.put-done");
        match put {
            Ok(written) => {
                let what = Sent { id: write.id, seen, size, owner: None };
                self.sent(file, path, written, what).await.map(|()| true)
            }
            Err(error) => self.refused(file, path, &error).await.map(|()| false),
        }
    }

    /// Only its owner, time or name are other than those of the object.
    async fn send_copy(
        &self,
        file: &Arc<File>,
        base: &Object,
        is_here: bool,
        path: &[u8],
        condition: &Condition,
        seen: u64,
    ) -> Result<bool, Wrong> {
        let write = {
            let _alone = file.content.write().await;
            self.begin_write(file).await?
        };
        self.sync_disk().await?; // likewise
        failpoint::hit("agent.staging.copy");
        let copied = self.sink.copy(&base.path, &base.version(), base.size, path, &write, condition).await;
        failpoint::hit("agent.staging.copied");
        match copied {
            Ok(written) => {
                let what = Sent { id: write.id, seen, size: base.size, owner: None };
                self.sent(file, path, written, what).await.map(|()| true)
            }
            // The object is not what it was, or may not be read: the bytes are here.
            Err(
                StoreError::NotFound { .. }
                | StoreError::Stale { .. }
                | StoreError::Unsupported { .. }
                | StoreError::Denied { .. },
            ) if is_here => self.change_record(file, |record| record.same = false).await.map(|()| false),
            Err(StoreError::Stale { .. }) if self.rebase(file).await? => Ok(false),
            Err(error) => self.refused(file, path, &error).await.map(|()| false),
        }
    }

    async fn send_parts(
        &self,
        file: &Arc<File>,
        ongoing: &mut Ongoing,
        data: &Arc<std::fs::File>,
        path: &[u8],
        condition: &Condition,
        alone: bool,
    ) -> Result<Option<(Written, Sent)>, Wrong> {
        for _ in 0..ROUNDS {
            let (seen, size) = (file.changes(), file.size());
            let pieces = if alone { Pieces::AllAlone } else { Pieces::All };
            self.send_pieces(file, ongoing, data, path, size, pieces).await?;
            let Some(begun) = ongoing.upload.as_mut() else { continue };
            begun.parts.retain(|number, _| *number < parts::count(size).max(1));
            if file.changes() != seen && !alone {
                let current = begun.parts.iter().all(|(number, (_, at))| file.is_untouched(*number, *at));
                if !current || file.size() != size {
                    continue;
                }
            }
            let all: Vec<Part> = begun.parts.values().map(|(part, _)| part.clone()).collect();
            let (upload, owner) = (begun.upload.clone(), begun.owner);
            self.sync_disk().await?; // likewise
            failpoint::hit("agent.staging.complete");
            let completed = self.sink.complete(&upload, &all, condition).await;
            failpoint::hit("agent.staging.completed");
            match completed {
                Ok(written) => {
                    ongoing.upload = None;
                    self.forget_upload(upload.write).await;
                    return Ok(Some((written, Sent { id: upload.write, seen, size, owner: Some(owner) })));
                }
                // Ended by somebody, or a part that came late is in the place of ours: begun anew.
                Err(StoreError::NotFound { .. }) => self.abandon(ongoing).await,
                Err(error) => {
                    self.abandon(ongoing).await;
                    return self.refused(file, path, &error).await.map(|()| None);
                }
            }
        }
        // Somebody writes on and on: he waits at last.
        if alone { Err(Wrong::Cause(Cause::Unavailable)) } else { Ok(None) }
    }

    /// Sends the parts of the first `size` bytes that the store does not have as they are. If somebody ends the upload meanwhile
    /// there is none any more.
    async fn send_pieces(
        &self,
        file: &Arc<File>,
        ongoing: &mut Ongoing,
        data: &Arc<std::fs::File>,
        path: &[u8],
        size: u64,
        pieces: Pieces,
    ) -> Result<(), Wrong> {
        let alone = pieces == Pieces::AllAlone;
        if ongoing.upload.as_ref().is_some_and(|begun| begun.upload.path != path) {
            self.abandon(ongoing).await;
        }
        if ongoing.upload.is_none() {
            let (write, owner) = {
                let _alone = if alone { None } else { Some(file.content.write().await) };
                (self.begin_write(file).await?, file.record().owner())
            };
            let begun = self.sink.begin(path, &write).await;
            let upload = begun.map_err(|e| self.store_wrong("upload", path, &e))?;
            let held = match self.note_upload(&upload).await {
                Ok(held) => held,
                Err(wrong) => {
                    let _ = self.end_upload(&upload).await; // it has no parts
                    return Err(wrong);
                }
            };
            ongoing.upload = Some(Begun { upload, _held: held, owner, parts: BTreeMap::new() });
        }
        let begun = ongoing.upload.as_mut().ok_or(Wrong::Cause(Cause::Internal))?;
        let upload = &begun.upload;
        let is_missing = |number: &u32, size: u64| {
            let range = piece(*number, size);
            begun.parts.get(number).is_none_or(|(part, at)| {
                let is_other = part.bytes != range.end - range.start || !file.is_untouched(*number, *at);
                pieces != Pieces::New && is_other
            })
        };
        let send = async |number: u32, size: u64| {
            let held = if alone { None } else { Some(file.content.write().await) };
            let (at, range) = (file.changes(), piece(number, size));
            // From the disk itself: what a writer changes meanwhile is not what its checksum says, and is sent again.
            let body = self.body(file, data, range, false).await?;
            drop(held);
            let sent = self.sink.part(upload, number + 1, &body).await;
            Ok((number, at, sent))
        };
        let (mut size, mut goes_on) = (size, pieces == Pieces::New);
        let mut missing: VecDeque<u32> = (0..parts::count(size)).filter(|n| is_missing(n, size)).collect();
        let mut under_way = FuturesUnordered::new();
        let (mut arrived, mut failed) = (Vec::new(), None);
        loop {
            if goes_on {
                let known = parts::count(size);
                // Whoever waits for all of it gets all of it, and needs to wait for nothing that its writer does afterwards.
                goes_on = !file.is_waited_for();
                size = size.max(if goes_on { whole(file) } else { file.size() });
                missing.extend((known..parts::count(size)).filter(|n| is_missing(n, size)));
            }
            while under_way.len() < PARTS_AT_ONCE
                && let Some(number) = missing.pop_front()
            {
                under_way.push(send(number, size));
            }
            let sent = tokio::select! {
                biased;
                sent = under_way.next() => sent,
                () = file.grown.notified(), if goes_on && !under_way.is_empty() => continue,
            };
            match sent {
                None => break,
                Some(Ok((number, at, Ok(part)))) => arrived.push((number, (part, at))),
                // Written to meanwhile: the next round sends it.
                Some(Ok((number, at, Err(StoreError::Damaged { .. })))) if !file.is_untouched(number, at) => {
                }
                Some(Ok((number, at, Err(error @ StoreError::Damaged { .. })))) => {
                    // Perhaps just now, by somebody who has not come to say so; the next round knows.
                    tracing::error!(volume = %self.volume, inode = file.ino, number, at, %error, "a part is not what was written");
                }
                Some(Ok((_, _, Err(error)))) => {
                    failed = Some(Err(error));
                    break;
                }
                Some(Err(wrong)) => {
                    failed = Some(Ok(wrong));
                    break;
                }
            }
        }
        drop(under_way);
        begun.parts.extend(arrived);
        match failed {
            None => Ok(()),
            Some(Ok(wrong)) => Err(wrong),
            Some(Err(StoreError::NotFound { .. })) => {
                self.abandon(ongoing).await; // ended by somebody: begun anew
                Ok(())
            }
            Some(Err(error)) => Err(self.store_wrong("upload", path, &error)),
        }
    }

    /// Sends what a writer has left behind it, while it goes on. To be called when it has filled another part.
    pub(super) fn advance(&self, file: &Arc<File>) {
        if file.size() < 2 * parts::FIRST || self.sink.limits().parts_max == 0 || whole(file) == 0 {
            return;
        }
        file.grown.notify_one();
        let Some(area) = self.me.upgrade() else { return };
        let file = file.clone();
        tokio::spawn(async move {
            let Ok(mut ongoing) = file.sending.try_lock() else { return };
            let record = file.record();
            let Some(path) = record
                .path
                .clone()
                .filter(|_| !record.conflict && !record.unsettled || ongoing.upload.is_some())
            else {
                return;
            };
            let size = whole(&file);
            let is_new = |ongoing: &Ongoing| {
                let last = parts::of(size.saturating_sub(1));
                size > 0 && ongoing.upload.as_ref().is_none_or(|begun| !begun.parts.contains_key(&last))
            };
            if !is_new(&ongoing) || area.state().is_gone(&path) {
                return; // nothing is whole since, or it is not its turn
            }
            let Some(data) = file.content.read().await.clone() else { return };
            // Whoever waits for it is told of errors; this is ahead of its time.
            let _ = area.send_pieces(&file, &mut ongoing, &data, &path, size, Pieces::New).await;
        });
    }

    /// What has been closed and goes in parts, most of which the store has by now, waits for no quiet moment.
    pub(super) fn send_closed(&self, ino: u64) {
        let is_next = |file: &Arc<File>| !file.record().clean && file.in_order() > WHOLE_MAX;
        let (Some(file), Some(area)) = (self.by_ino(ino).filter(is_next), self.me.upgrade()) else { return };
        if self.is_through() || self.state().is_open(ino) {
            return; // somebody waits for the store already, or somebody may go on writing
        }
        tokio::spawn(async move {
            // Each error has been logged; what is left is tried again.
            let _ = area.send_unless_discarded(&file).await;
        });
    }

    pub(super) async fn sync(&self, ino: u64, closing: bool) -> Outcome {
        let Some(file) = self.by_ino(ino) else {
            // A directory, or a file that nobody has changed.
            if !closing {
                self.sync_disk().await?;
            }
            return Ok(Done::Done);
        };
        if file.record().clean || closing && file.record().path.is_none() {
            return Ok(Done::Done);
        }
        if self.is_through() {
            self.send(&file).await?;
        } else if !file.is_synced() {
            // A close comes after nearly every fsync.
            let (at, content) = loop {
                let (at, brought) = (file.changes(), file.rest.brought());
                self.write_out(&file).await?;
                let content = file.content.write().await;
                match brought {
                    // It was sent meanwhile, and so blocks have come that were not written out.
                    Some(_) if file.rest.brought().is_none() => {}
                    Some(brought) => {
                        file.rest.change(|elsewhere| elsewhere.note_safe(brought));
                        break (at, content);
                    }
                    None => break (at, content),
                }
            };
            let mut record = file.noted(file.record());
            record.durable = record.local && file.is_written_out(file.sent());
            self.put_record(&file, record).await?;
            drop(content);
            self.sync_disk().await?;
            file.note_synced(at);
        }
        Ok(Done::Done)
    }

    /// Its bytes, so that no loss of power takes them.
    pub(super) async fn write_out(&self, file: &Arc<File>) -> Result<(), Wrong> {
        let content = file.content.write().await;
        let (at, data) = (file.changes(), content.clone());
        // Writers wait only where all of it is to be written anew.
        let alone = file.doubt.has_failed.load(Acquire).then_some(content);
        if let Some(data) = data {
            self.write_out_data(file, data, alone.is_some()).await?;
            file.note_written_out(at);
        }
        Ok(())
    }

    // ------------------------------------------------------------------ steps

    /// Keeps the id of a write before the store is asked for it. To be called with the content alone.
    async fn begin_write(&self, file: &Arc<File>) -> Result<Write, Wrong> {
        let id = self.draw();
        let mut record = file.noted(file.record());
        let attributes = store::Attributes {
            mode: Some(record.mode),
            uid: Some(record.uid),
            gid: Some(record.gid),
            modified_ns: Some(record.mtime_ns),
        };
        record.unsettled = true;
        let mut given_up = GivenUp { path: record.path.clone().unwrap_or_default(), ..GivenUp::default() };
        if record.writes.len() >= WRITES_KEPT {
            given_up.writes.push(record.writes.remove(0));
        }
        record.writes.push(id.to_string());
        self.put_record_giving_up(file, record, &given_up).await?;
        Ok(Write { id, attributes })
    }

    /// An agent that is gone, or an attempt that has failed, has asked for a write: has it come to pass?
    async fn settle(&self, file: &Arc<File>, path: &[u8]) -> Result<(), Wrong> {
        let seen = self.sink.look(path).await.map_err(|e| self.store_wrong("look", path, &e))?;
        let is_late = seen.as_ref().is_some_and(|seen| self.is_of_no_record(path, seen));
        self.change_record(file, |record| {
            record.unsettled = false;
            adopt(file, record, path, seen, is_late);
        })
        .await
    }

    /// The object with the bytes of a file, of which none are here or not all, may be another one by now, which a write of ours has made of
    /// it and whose answer did not come. False: it is not. To be called by whoever holds `sending`.
    pub(super) async fn rebase(&self, file: &Arc<File>) -> Result<bool, Wrong> {
        let record = file.record();
        let leans = |record: &Record| !record.local || !file.rest.is_empty();
        let Some(base) = record.base.clone().filter(|_| leans(&record)) else { return Ok(false) };
        let seen = self.sink.look(&base.path).await.map_err(|e| self.store_wrong("look", &base.path, &e))?;
        let Some(seen) = seen.filter(|seen| seen.version != base.version()) else { return Ok(false) };
        let is_late = self.is_of_no_record(&base.path, &seen);
        let mut is_ours = false;
        let change = |record: &mut Record| {
            let is_there = record.path.as_ref() == Some(&base.path);
            let is_leaning = leans(record);
            let former = record.former.iter_mut().find(|former| former.path == base.path && !is_there);
            let writes = former.as_ref().map_or(&record.writes, |former| &former.writes);
            // One that was given up may have other bytes than those that are here in part.
            let is_known = is_late && !record.local || (is_there || former.is_some()) && is_of(&seen, writes);
            is_ours = is_known && is_leaning && record.base.as_ref() == Some(&base);
            if !is_ours {
                return;
            }
            let (version, made_by) = (Some(seen.version.0.clone()), seen.write.map(|id| id.to_string()));
            match former {
                Some(former) => (former.version, former.made_by) = (version, made_by),
                None if is_there => (record.target, record.made_by) = (version, made_by),
                None => {}
            }
            record.base = Some(Object { path: base.path, version: seen.version.0, size: seen.size });
            if !record.local {
                file.set_stored_size(seen.size);
            }
        };
        self.change_record(file, change).await?;
        Ok(is_ours)
    }

    /// The same where somebody could not read what he was told, once each. Where the store does not say, what is known is read:
    /// it may be in the cache.
    pub(super) async fn rebase_after_stale(&self, file: &Arc<File>) {
        let stale = self.stale.load(Acquire);
        if file.looked.swap(stale, AcqRel) == stale {
            return;
        }
        let _silent = file.turn().await;
        let _ = self.rebase(file).await; // whoever finds it stale again has it asked again
    }

    /// What must be at `path` for it to be written. Where the store does not hold it, it is looked at before.
    pub(super) async fn condition_of(&self, target: Option<&str>, path: &[u8]) -> Result<Condition, Wrong> {
        let able = self.able().await?;
        let wanted = target.map_or(Condition::Absent, |version| Condition::Is(Version(version.to_owned())));
        let holds = match &wanted {
            Condition::Absent => able.absent && able.absent_in_parts,
            _ => able.is && able.is_in_parts,
        };
        if holds || self.sink.limits().parts_max == 0 {
            return Ok(wanted);
        }
        let seen = self.sink.look(path).await.map_err(|e| self.store_wrong("look", path, &e))?;
        let is_so = match (&wanted, &seen) {
            (Condition::Absent, None) => true,
            (Condition::Is(version), Some(seen)) => *version == seen.version,
            _ => false,
        };
        // It is told all the same: some servers hold it for objects in one piece alone.
        let able_at_all = match wanted {
            Condition::Absent => able.absent,
            _ => able.is,
        };
        match is_so {
            true if able_at_all => Ok(wanted),
            true => Ok(Condition::Any),
            false => Ok(wanted),
        }
    }

    /// Of this node alone: two that try on one file disturb each other.
    async fn probe_path(&self) -> Result<String, Wrong> {
        let known = self.state().probe.clone();
        if let Some(path) = known {
            return Ok(path);
        }
        let path = format!(".millpond-probe-{}", self.draw());
        let (entry, noted) = ((PROBE_KEY.to_vec(), Some(path.clone().into_bytes())), path.clone());
        self.commit(vec![entry], move |state| state.probe = Some(noted)).await?;
        Ok(path)
    }

    /// What this store does with conditions: tried once, on a file of our own.
    async fn able(&self) -> Result<Abilities, Wrong> {
        let probed = self.able.get_or_try_init(|| async {
            let path = self.probe_path().await?;
            let mut tried = 0;
            loop {
                tried += 1;
                match store::probe(&*self.sink, path.as_bytes(), || self.draw()).await {
                    // A request of a probe before, whose agent has died, has come in between.
                    Err(StoreError::Conflict { .. } | StoreError::NotFound { .. }) if tried < PROBES => {}
                    found => {
                        return found.map_err(|e| match self.store_wrong("probe", path.as_bytes(), &e) {
                            // Nobody's file is in conflict: whoever waits tries again.
                            Wrong::Conflict => Wrong::Cause(Cause::Unavailable),
                            wrong => wrong,
                        });
                    }
                }
            }
        });
        probed.await.copied()
    }

    /// The store has it, as it was at change `seen`.
    async fn sent(&self, file: &Arc<File>, path: &[u8], written: Written, what: Sent) -> Result<(), Wrong> {
        let Sent { id, seen, size, owner } = what;
        failpoint::hit("agent.staging.sent");
        let object = Object { path: path.to_vec(), version: written.version.0, size };
        self.failures.over(path);
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

    pub(super) async fn note_object(
        &self,
        ino: u64,
        object: &Object,
        permissions: Permissions,
        mtime_ns: i64,
    ) -> Result<(), Wrong> {
        let _still = self.moving.read().await; // its directory may have another name already that is not known yet
        self.note_object_still(ino, object, permissions, mtime_ns).await
    }

    /// To be called by whoever holds `moving`.
    pub(super) async fn note_object_still(
        &self,
        ino: u64,
        object: &Object,
        permissions: Permissions,
        mtime_ns: i64,
    ) -> Result<(), Wrong> {
        let incoming = Incoming {
            name: name(&object.path).to_vec(),
            kind: Kind::File,
            size: object.size,
            mtime_ns,
            token: object.version.clone(),
            target: Vec::new(),
            permissions: Some(permissions),
        };
        match self.place(&object.path, incoming, ino).await {
            // Its directory is not known any more, so neither is a listing without it.
            Err(Wrong::Cause(Cause::Stale)) => Ok(()),
            placed => placed.map(drop),
        }
    }

    /// The directory of this path, if it is known.
    pub(super) fn above(&self, path: &[u8]) -> Result<Option<u64>, Wrong> {
        match parent(path) {
            b"" => Ok(Some(ROOT)),
            dir => self.scope.names.resolve(dir).map_err(|e| self.meta_wrong(&e)),
        }
    }

    pub(super) async fn place(&self, path: &[u8], incoming: Incoming, ino: u64) -> Result<Attributes, Wrong> {
        let above = self.above(path)?.ok_or(Wrong::Cause(Cause::Stale))?;
        let scope = self.scope.clone();
        let placed = tokio::task::spawn_blocking(move || scope.place(above, &incoming, ino)).await;
        placed.map_err(|_| Wrong::Cause(Cause::Internal))?.map_err(|e| self.meta_wrong(&e))
    }

    pub(super) async fn unplace(&self, path: &[u8]) -> Result<(), Wrong> {
        let _still = self.moving.read().await;
        match self.above(path)? {
            Some(above) => self.unplace_in(above, name(path).to_vec()).await,
            None => Ok(()),
        }
    }

    pub(super) async fn unplace_in(&self, above: u64, name: Vec<u8>) -> Result<(), Wrong> {
        let scope = self.scope.clone();
        let removed = tokio::task::spawn_blocking(move || scope.unplace(above, &name)).await;
        removed.map_err(|_| Wrong::Cause(Cause::Internal))?.map_err(|e| self.meta_wrong(&e))
    }

    /// Changes the record as `change` says; it is clean if nothing was changed since `seen` and `change` says that this was all.
    async fn note_sent(
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

    async fn put_record_giving_up(
        &self,
        file: &Arc<File>,
        record: Record,
        given_up: &GivenUp,
    ) -> Result<(), Wrong> {
        let (mut entries, late) = self.give_up(given_up)?;
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

    /// Its former names go.
    async fn remove_former(&self, file: &Arc<File>) -> Result<(), Wrong> {
        while let Some(object) = superfluous(&file.record()) {
            self.keep_dir(parent(&object.path)).await?;
            self.sync_disk().await?; // as before all that the store is asked for
            failpoint::hit("agent.staging.delete");
            let is_theirs = self.remove_object(&object).await?;
            failpoint::hit("agent.staging.deleted");
            self.failures.over(&object.path);
            self.unplace(&object.path).await?;
            if is_theirs {
                tracing::warn!(
                    volume = %self.volume, path = %String::from_utf8_lossy(&object.path),
                    "what was removed or renamed here has been changed by somebody else meanwhile: theirs stays"
                );
                self.look_again(&object.path).await;
            }
            // What was changed since it was sent is not in the store because a former name is gone.
            let seen = if file.record().path.is_some() { file.sent() } else { file.changes() };
            let gone = |record: &mut Record| {
                record.former.retain(|former| *former != object);
                let is_removed = Some(!is_theirs);
                (GivenUp { path: object.path, writes: object.writes, is_removed }, true)
            };
            self.note_sent(file, seen, gone).await?;
        }
        Ok(())
    }

    /// True: somebody else has put something else there. It is theirs, and seen again from the next look on.
    async fn remove_object(&self, object: &Former) -> Result<bool, Wrong> {
        let version = match object.writes.is_empty() {
            true => object.version.clone(),
            // Asked of the store, and not seen how it ended.
            false => {
                let seen = self.sink.look(&object.path).await;
                let seen = seen.map_err(|e| self.store_wrong("look", &object.path, &e))?;
                match seen {
                    Some(seen) if is_of(&seen, &object.writes) => Some(seen.version.0),
                    Some(seen) if object.version.as_ref() == Some(&seen.version.0) => Some(seen.version.0),
                    Some(seen) if self.is_of_no_record(&object.path, &seen) => Some(seen.version.0),
                    Some(_) => return Ok(true),
                    None => None,
                }
            }
        };
        let mut version = version;
        for _ in 0..ROUNDS {
            let Some(is) = version.take() else { return Ok(false) };
            match self.sink.delete(&object.path, &Condition::Is(Version(is))).await {
                Ok(()) | Err(StoreError::NotFound { .. }) => return Ok(false),
                Err(StoreError::Conflict { .. } | StoreError::Stale { .. }) => {}
                Err(error) => return Err(self.store_wrong("removal", &object.path, &error)),
            }
            let seen = self.sink.look(&object.path).await;
            let seen = seen.map_err(|e| self.store_wrong("look", &object.path, &e))?;
            // A write that was given up may have come in between.
            match seen {
                Some(seen) if self.is_of_no_record(&object.path, &seen) => version = Some(seen.version.0),
                Some(_) => return Ok(true),
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Asks the store for a name of which something else is known.
    pub(super) async fn look_again(&self, path: &[u8]) {
        if let Ok(Some(above)) = self.above(path) {
            let _ = self.scope.head(above, name(path)).await; // it is asked for again when it is looked up
        }
    }

    /// A directory that would vanish with the last object in it gets one of its own.
    pub(super) async fn keep_dir(&self, dir: &[u8]) -> Result<(), Wrong> {
        if dir.is_empty() || lock(&self.kept_dirs).contains(dir) {
            return Ok(());
        }
        let write = Write { id: self.draw(), attributes: store::Attributes::default() };
        self.sink.make_dir(dir, &write).await.map_err(|e| self.store_wrong("mkdir", dir, &e))?;
        lock(&self.kept_dirs).insert(dir.to_vec());
        Ok(())
    }

    /// The store did not take it. Ok: it is to be tried again.
    async fn refused(&self, file: &Arc<File>, path: &[u8], error: &StoreError) -> Result<(), Wrong> {
        if !matches!(error, StoreError::Conflict { .. }) {
            return Err(self.store_wrong("upload", path, error));
        }
        let seen = self.sink.look(path).await.map_err(|e| self.store_wrong("look", path, &e))?;
        let is_late = seen.as_ref().is_some_and(|seen| self.is_of_no_record(path, seen));
        let mut is_ours = false;
        self.change_record(file, |record| {
            record.unsettled = false;
            is_ours = adopt(file, record, path, seen, is_late);
            record.conflict = !is_ours;
        })
        .await?;
        if is_ours {
            return Ok(());
        }
        tracing::error!(
            volume = %self.volume, path = %String::from_utf8_lossy(path), inode = file.ino,
            "somebody else has changed it in the store since it was seen here: what was written here is kept in the staging area"
        );
        Err(self.store_wrong("upload", path, error))
    }

    pub(super) async fn abandon(&self, ongoing: &mut Ongoing) {
        // Held until this is over, or given up: then it is one that is left over.
        if let Some(begun) = ongoing.upload.take()
            && let Err(error) = self.end_upload(&begun.upload).await
        {
            tracing::warn!(volume = %self.volume, %error, "an upload could not be ended: its parts stay for now");
        }
    }

    /// These bytes as they are now; to be called with the content alone. `copied`: they stay so, whoever writes meanwhile.
    async fn body(
        &self,
        file: &Arc<File>,
        data: &Arc<std::fs::File>,
        range: Range<u64>,
        copied: bool,
    ) -> Result<Body, Wrong> {
        let (data, known) = (data.clone(), file.sums.of(&range));
        if let Some(crc32c) = known.filter(|_| !copied) {
            return Ok(Body { file: data, range, crc32c });
        }
        let read = self.on_disk(move || {
            let failed = |_| Wrong::Cause(Cause::Internal);
            let copy = match copied {
                true => Some(rustix::fs::memfd_create("millpond-part", MemfdFlags::CLOEXEC).map_err(failed)?),
                false => None,
            };
            let copy = copy.map(std::fs::File::from);
            let len = range.end - range.start;
            let mut digest = crc_fast::Digest::new(CrcAlgorithm::Crc32Iscsi);
            let mut bytes = vec![0; len.min(READ_STEP) as usize];
            let mut at = 0;
            while at < len {
                let step = (len - at).min(READ_STEP) as usize;
                data.read_exact_at(&mut bytes[..step], range.start + at).map_err(file_wrong)?;
                digest.update(&bytes[..step]);
                if let Some(copy) = &copy {
                    copy.write_all_at(&bytes[..step], at).map_err(file_wrong)?;
                }
                at += step as u64;
            }
            let crc32c = digest.finalize() as u32;
            Ok(match copy {
                Some(copy) => Body { file: Arc::new(copy), range: 0..len, crc32c },
                None => Body { file: data, range, crc32c },
            })
        });
        let body = read.await?;
        if let Some(known) = known.filter(|known| *known != body.crc32c) {
            tracing::error!(
                volume = %self.volume, inode = file.ino, written = known, read = body.crc32c,
                "the disk of the staging area gives back other bytes than were written: they are not sent"
            );
            return Err(Wrong::Cause(Cause::Unavailable));
        }
        Ok(body)
    }

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
        self.forget(file, false).await.is_ok()
    }

    /// Of a file that was taken from memory: its record goes, and then its bytes. If the record stays, so does the file.
    /// `durably`: no loss of power brings it back.
    pub(super) async fn forget(&self, file: Arc<File>, durably: bool) -> Result<(), Wrong> {
        let (state, journal, files, dropping) =
            (self.state.clone(), self.journal.clone(), self.files.clone(), self.dropping.clone());
        let forgotten = self.in_order(move || {
            let ino = file.ino;
            let forgotten = lock(&journal).as_mut().is_some_and(|journal| {
                let gone = file_entry(ino, None).is_ok_and(|(key, _)| journal.delete(&key).is_ok());
                // A stray is removed at the next start.
                let _ = elsewhere_entry(ino, None).map(|(key, _)| journal.delete(&key));
                if durably {
                    failpoint::hit("agent.staging.discarded");
                }
                gone && (!durably || journal.sync().is_ok())
            });
            match forgotten {
                // A stray is removed at the next start.
                true => drop(rustix::fs::unlinkat(&*files, data_name(ino), AtFlags::empty())),
                false => lock(&state).insert(&file),
            }
            dropping.send_modify(|dropping| _ = dropping.remove(&ino));
            if forgotten { Ok(()) } else { Err(Wrong::Cause(Cause::Unavailable)) }
        });
        forgotten.await
    }

    /// Sends what nobody waits for.
    async fn look_after(&self) {
        let is_due = |file: &&Arc<File>| {
            let record = file.record();
            !record.clean && !record.conflict && lock(&file.changed_at).elapsed() >= QUIET
        };
        // By number: who holds one keeps it from being dropped.
        let due: Vec<u64> = self.state().files.values().filter(is_due).map(|file| file.ino).collect();
        let sent = futures::stream::iter(due).for_each_concurrent(FILES_AT_ONCE, async |ino| {
            let Some(file) = self.by_ino(ino) else { return };
            if let Ok(mut ongoing) = file.sending.try_lock() {
                if ongoing.tried.is_some_and(|tried| tried.elapsed() < AGAIN) {
                    return;
                }
                ongoing.tried = Some(Instant::now());
            }
            if self.send_unless_discarded(&file).await.is_ok() {
                file.turn().await.tried = None;
            }
            self.forget_unlinked(file.ino).await;
        });
        sent.await;
        self.end_all_moves().await;
        let clean = self.state().files.values().filter(|file| file.record().clean).count();
        if clean > CLEAN_MAX {
            self.drop_clean().await;
        }
    }

    pub(crate) fn waiting(&self) -> Waiting {
        let state = self.state();
        let records = state.files.values().map(|file| (file.record(), file.size()));
        records.fold(Waiting::default(), |sum, (record, size)| sum.and(&record, size))
    }

    /// Sends everything once, as far as it goes within `limit`; true: nothing waits any more.
    pub(crate) async fn send_all(&self, limit: Duration) -> bool {
        let _ = tokio::time::timeout(limit, self.send_once()).await;
        self.has_sent_all()
    }

    /// The same, and again while the store gives no answer. One that refuses is not asked again.
    pub(crate) async fn send_all_for(self: &Arc<Self>, limit: Duration) -> bool {
        let (area, end) = (self.clone(), Instant::now() + limit);
        // What is under way then goes on: it is not cut off in the middle of a change.
        let sending = tokio::spawn(async move {
            let mut pause = LOOK;
            while area.send_once().await && !area.has_sent_all() && Instant::now() + pause < end {
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(AGAIN);
            }
        });
        let _ = tokio::time::timeout(limit, sending).await;
        self.has_sent_all()
    }

    fn has_sent_all(&self) -> bool {
        self.waiting().files == 0 && self.state().moved.is_empty()
    }

    /// True: the store may take later what it has not taken now.
    async fn send_once(&self) -> bool {
        let is_wanted = |file: &&Arc<File>| !file.record().clean;
        let files: Vec<u64> = self.state().files.values().filter(is_wanted).map(|file| file.ino).collect();
        let sent = futures::stream::iter(files).map(async |ino| {
            let Some(file) = self.by_ino(ino) else { return false };
            // Each error has been logged; what is left is kept.
            let sent = self.send_unless_discarded(&file).await;
            self.forget_unlinked(file.ino).await;
            matches!(sent, Err(Wrong::Cause(Cause::Unavailable)))
        });
        let mut sent = sent.buffer_unordered(FILES_AT_ONCE);
        let mut is_worth_it = false;
        while let Some(is_silent) = sent.next().await {
            is_worth_it |= is_silent;
        }
        drop(sent);
        self.end_all_moves().await;
        is_worth_it || self.waiting().files == 0 && !self.state().moved.is_empty()
    }

    /// An attempt that nobody waits for gives way to whoever discards the file.
    async fn send_unless_discarded(&self, file: &Arc<File>) -> Result<(), Wrong> {
        tokio::select! {
            biased;
            () = self.discards.begun(file.ino) => Err(Wrong::Cause(Cause::Unavailable)),
            sent = self.send(file) => sent,
        }
    }
}

/// What of a file was sent.
#[derive(Clone, Copy)]
struct Sent {
    id: WriteId,
    /// The change up to which it was.
    seen: u64,
    /// Bytes.
    size: u64,
    /// Where they were said before the last change of the bytes: owner and mode.
    owner: Option<Owner>,
}

/// What of a file is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pieces {
    /// Those that were not sent yet. What is changed behind them is sent again at the end alone.
    New,
    All,
    /// By whom has the file's content alone.
    AllAlone,
}

/// So many bytes from its beginning are whole parts that a writer has left behind it.
fn whole(file: &File) -> u64 {
    parts::range(parts::of(file.in_order())).start
}

/// The bytes of a part of a file of `size` bytes.
fn piece(number: u32, size: u64) -> Range<u64> {
    let Range { start, end } = parts::range(number);
    start.min(size)..end.min(size)
}

/// What is at `path` is what one of our writes has made, whose answer did not come (`is_late`: one that was given up): the file
/// goes on from there. False: it is not.
fn adopt(file: &File, record: &mut Record, path: &[u8], seen: Option<Seen>, is_late: bool) -> bool {
    if record.path.as_deref() != Some(path) {
        return true; // renamed or unlinked meanwhile: its former name is looked at by itself
    }
    let is_asked = seen.as_ref().is_some_and(|seen| is_of(seen, &record.writes));
    let Some(seen) = seen.filter(|_| is_late || is_asked) else { return false };
    if let Some(base) = record.base.as_mut().filter(|base| record.same && base.path == path) {
        if is_asked || !record.local {
            // The object that had its bytes has been replaced by one that has them, or (late, and not held off by the store) by
            // what is all that there is.
            (base.version, base.size) = (seen.version.0.clone(), seen.size);
            if !record.local {
                file.set_stored_size(seen.size);
            }
        } else {
            record.same = false; // the bytes are here
        }
    }
    record.target = Some(seen.version.0);
    record.made_by = seen.write.map(|id| id.to_string());
    true
}

/// A former name that can go: the file has no name any more, or the store has it under its present one.
fn superfluous(record: &Record) -> Option<Former> {
    let base = record.base.as_ref().map(|base| &base.path);
    let is_in_place = record.path.as_ref().is_none_or(|path| base == Some(path));
    let is_needed = |former: &&Former| record.path.is_some() && base == Some(&former.path);
    record.former.iter().find(|former| is_in_place && !is_needed(former)).cloned()
}

/// One of these writes has made it.
pub(super) fn is_of(seen: &Seen, writes: &[String]) -> bool {
    seen.write.is_some_and(|id| writes.contains(&id.to_string()))
}

/// What was written to a name that the file does not have any more.
/// Returns the writes to it.
fn note_former(record: &mut Record, path: Vec<u8>, version: String, made_by: String) -> Vec<String> {
    let before = record.former.extract_if(.., |former| former.path == path);
    let writes = before.flat_map(|former| former.writes).collect();
    let (version, made_by) = (Some(version), Some(made_by));
    record.former.push(Former { path, version, made_by, writes: Vec::new() });
    writes
}

/// For as long as the area is open.
pub(super) fn keep_sending(area: &Arc<Area>) {
    let area: Weak<Area> = Arc::downgrade(area);
    tokio::spawn(async move {
        let mut strangers = Some(Instant::now() + STRANGERS);
        let mut late = Instant::now() + late::LOOK;
        loop {
            tokio::time::sleep(LOOK).await;
            let Some(area) = area.upgrade() else { return };
            if area.is_released() {
                return;
            }
            if strangers.take_if(|at| Instant::now() >= *at).is_some() {
                area.forget_strangers().await;
            }
            area.look_after().await;
            if Instant::now() >= late {
                area.remove_late().await;
                late = Instant::now() + late::LOOK;
            }
        }
    });
}
