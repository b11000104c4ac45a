//! Brings staged files into the store.
//!
//! One file is sent by one task at a time. What is sent is a copy of its bytes as they were at one moment, with their
//! checksum, so that writers go on meanwhile; what they change is sent again. A file whose bytes come in order is sent
//! while it is written, part by part.

use super::area::Area;
use super::area::file_wrong;
use super::file::File;
use super::late::GivenUp;
use super::names::State;
use super::ongoing::Ongoing;
use super::parts;
use super::record::{Object, Record};
use super::sent::Sent;
use crc_fast::CrcAlgorithm;
use link::Cause;
use link::writable::Wrong;
use rustix::fs::MemfdFlags;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use store::{Body, Condition, StoreError, Write};

/// Larger files go in parts where the store has them, bytes.
pub(super) const WHOLE_MAX: u64 = 2 * parts::FIRST;
/// Larger pieces are read from the staged file while they are sent, and not from a copy, bytes.
const COPY_MAX: u64 = 16 << 20;
/// So much of a file is read at once, bytes.
const READ_STEP: u64 = 256 << 10;
/// How often what is changed while it is sent is sent again before its writers wait.
pub(super) const ROUNDS: u32 = 3;
/// How often a file is begun anew at most.
const ATTEMPTS: u32 = 20;
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
        let mut tried = 0;
        loop {
            let owner = self.state().gone.get(path).copied();
            let Some(ino) = owner.filter(|owner| Some(*owner) != own) else { break };
            tried += 1;
            if tried > ATTEMPTS {
                return Err(Wrong::Cause(Cause::Unavailable));
            }
            // Whoever replaces that file meanwhile takes over what it has left there.
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
        let condition = match self.condition_of(target, path).await? {
            Ok(condition) => condition,
            Err(conflict) => return self.refused(file, path, &conflict).await.map(|()| false),
        };
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
                Ok(Some((written, what))) => self.sent(file, path, written, what).await.map(|()| true),
                Ok(None) => Ok(false),
                Err(error) => self.refused(file, path, &error).await.map(|()| false),
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
        let copied = self.copy_object(base, path, &write, condition).await?;
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
            Err(error @ (StoreError::Stale { .. } | StoreError::NotFound { .. })) => {
                let wrong = self.store_wrong("upload", path, &error);
                let followed = self.follow_base(file, wrong).await;
                if file.record().conflict { Err(Wrong::Conflict) } else { followed.map(|()| false) }
            }
            Err(error) => self.refused(file, path, &error).await.map(|()| false),
        }
    }

    /// Keeps the id of a write before the store is asked for it. To be called with the content alone.
    pub(super) async fn begin_write(&self, file: &Arc<File>) -> Result<Write, Wrong> {
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

    /// These bytes as they are now; to be called with the content alone. `copied`: they stay so, whoever writes meanwhile.
    pub(super) async fn body(
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
        let read = self.on_disk_for(range.end - range.start, move || {
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
}
