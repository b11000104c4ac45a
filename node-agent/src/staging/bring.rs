//! Brings the bytes of an object here, whose file is changed.
//!
//! Those of a large one come as they are touched: who writes waits for the blocks that he writes to, and the others follow meanwhile.
//! Whoever reads, or sends it, waits for all of them, and so does whoever removes its object.

use super::area::{Area, disk_wrong, file_wrong};
use super::elsewhere::Elsewhere;
use super::file::File;
use super::names::elsewhere_entry;
use super::record::Object;
use crate::lock::lock;
use bytes::Bytes;
use cache::data::Presence;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use link::Cause;
use link::writable::Wrong;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// So much of an object is copied at once into its staged file, bytes.
const COPY_STEP: u64 = 4 << 20;
/// Of one file, brought at once.
const BLOCKS_AT_ONCE: usize = 4;
/// Files of an area that get their bytes at once without anybody who waits for them.
pub(super) const FILLED_AT_ONCE: usize = 4;
/// How often an object may turn out to be another one of ours while its bytes are brought here.
const REBASED_MAX: u32 = 4;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// Its bytes are about to be changed.
    AsTouched,
    All,
}

impl Area {
    /// Has the bytes that the store has here, up to `size` if that is said.
    pub(super) async fn bring_here(
        &self,
        file: &Arc<File>,
        size: Option<u64>,
        how: How,
    ) -> Result<(), Wrong> {
        if file.content.read().await.is_none() {
            // While the store makes a copy of it under another name or with other attributes, its version is neither.
            let _silent = file.turn().await;
            let mut tried = 0;
            loop {
                tried += 1;
                match self.bring(file, size, how).await {
                    Err(wrong)
                        if is_of_another(&wrong) && tried <= REBASED_MAX && self.rebase(file).await? => {}
                    brought => break brought?,
                }
            }
        }
        match how {
            How::AsTouched => Ok(()),
            How::All => self.bring_range(file, 0..u64::MAX).await,
        }
    }

    async fn bring(&self, file: &Arc<File>, size: Option<u64>, how: How) -> Result<(), Wrong> {
        let mut content = file.content.write().await;
        if content.is_some() {
            return Ok(());
        }
        let record = file.record();
        let base = record.base.clone().ok_or(Wrong::Cause(Cause::Internal))?;
        let wanted = size.map_or(base.size, |size| size.min(base.size));
        self.make_room(wanted).await?;
        let data = self.make_data(file.ino).await?;
        file.sums.clear();
        let elsewhere = if how == How::AsTouched { Elsewhere::new(wanted) } else { None };
        if elsewhere.is_some() {
            let data = data.clone();
            self.change_data(move || reserve(&data, wanted)).await?;
        } else {
            file.note_unwritten(wanted);
            self.copy(file.ino, &base, &data, wanted).await?;
        }
        let mut record = file.noted(record);
        (record.local, record.durable) = (true, false);
        let goes_on = elsewhere.is_some();
        // From here on the store is asked for no copy of it, whose version would be another one; and of one that is being cut off not
        // all bytes are here. Not noted before: it could not be sent without its bytes if they cannot be had.
        if goes_on || size.is_some() {
            (record.clean, record.same) = (false, false);
            file.change();
        }
        // Of an earlier time: another object may have been here in between.
        let over = self.end_appends(file.ino, 0)?;
        if !over.is_empty() {
            self.commit(over, |_| ()).await?;
        }
        // What the journal has of an earlier time goes.
        file.rest.note_noted(true);
        file.rest.set(elsewhere);
        if let Err(wrong) = self.put_record(file, record).await {
            file.rest.set(None);
            return Err(wrong);
        }
        *content = Some(data);
        drop(content);
        if goes_on {
            self.bring_the_rest(file);
        }
        Ok(())
    }

    /// Nobody waits for it. Few files of a volume at once: a program may change a thousand. Neither the area nor the file is held
    /// while it is not its turn.
    fn bring_the_rest(&self, file: &Arc<File>) {
        let (area, filling, ino) = (self.me.clone(), self.filling.clone(), file.ino);
        tokio::spawn(async move {
            let Ok(_turn) = filling.acquire().await else { return };
            let mut next = 0;
            // Whoever needs a byte that has not come asks again.
            while let Some(area) = area.upgrade()
                && let Some(file) = area.by_ino(ino)
                && !area.discards.is_begun(ino)
                && let Some((_, bytes)) = file.rest.first_missing(next..u64::MAX)
            {
                let len = (bytes.end - bytes.start).saturating_mul(BLOCKS_AT_ONCE as u64);
                next = bytes.start.saturating_add(len);
                if area.bring_blocks(&file, bytes.start..next).await.is_err() {
                    return;
                }
            }
        });
    }

    /// Has the blocks of these bytes here. Not for who sends the file.
    pub(super) async fn bring_range(&self, file: &Arc<File>, range: Range<u64>) -> Result<(), Wrong> {
        self.bring_following(file, range, false).await
    }

    /// All of it, for whoever holds `sending`.
    pub(super) async fn bring_to_send(&self, file: &Arc<File>) -> Result<(), Wrong> {
        self.bring_following(file, 0..u64::MAX, true).await
    }

    async fn bring_following(
        &self,
        file: &Arc<File>,
        range: Range<u64>,
        is_sender: bool,
    ) -> Result<(), Wrong> {
        let mut tried = 0;
        while let Err(wrong) = self.bring_blocks(file, range.clone()).await {
            tried += 1;
            if !is_of_another(&wrong) || tried > REBASED_MAX {
                return Err(wrong);
            }
            let _silent = if is_sender { None } else { Some(file.turn().await) };
            self.follow_base(file, wrong).await?;
        }
        Ok(())
    }

    async fn bring_blocks(&self, file: &Arc<File>, range: Range<u64>) -> Result<(), Wrong> {
        let mut under_way = FuturesUnordered::new();
        let mut next = range.start;
        loop {
            while under_way.len() < BLOCKS_AT_ONCE
                && let Some((block, bytes)) = file.rest.first_missing(next..range.end)
            {
                next = bytes.end.max(next.saturating_add(1));
                under_way.push(self.bring_block(file, block));
            }
            match under_way.next().await {
                Some(brought) => brought?,
                None => return Ok(()),
            }
        }
    }

    /// The object is another one by now: one that a write of ours has made of it, or somebody else's. Then what is not here is lost.
    pub(super) async fn follow_base(&self, file: &Arc<File>, wrong: Wrong) -> Result<(), Wrong> {
        let record = file.record();
        let Some(base) = record.base.filter(|_| !record.conflict) else { return Err(wrong) };
        if self.rebase(file).await? {
            return Ok(());
        }
        let seen = self.sink.look(&base.path).await.map_err(|e| self.store_wrong("look", &base.path, &e))?;
        if seen.is_none() {
            self.store_is_there(&base.path).await?;
        }
        if seen.is_none_or(|seen| seen.version != base.version()) {
            tracing::error!(
                volume = %self.volume, path = %String::from_utf8_lossy(&base.path), inode = file.ino, missing = file.rest.bytes(),
                "somebody else has changed it in the store before all its bytes were here: what was written here is kept in the staging area"
            );
            self.change_record(file, |record| record.conflict = true).await?;
        }
        Err(wrong)
    }

    /// In a task of its own, which is not cut off in the middle: what the disk did late would undo what is written there later.
    async fn bring_block(&self, file: &Arc<File>, block: u64) -> Result<(), Wrong> {
        let area = self.me.upgrade().ok_or(Wrong::Cause(Cause::Unavailable))?;
        let Some(claim) = file.rest.claim(block).await else { return Ok(()) };
        let file = file.clone();
        let brought = tokio::spawn(async move {
            let _claim = claim;
            let mut at = None;
            while let Some(next) = area.bring_step(&file, block, at).await? {
                at = Some(next);
            }
            Ok(())
        });
        brought.await.unwrap_or(Err(Wrong::Cause(Cause::Internal)))
    }

    /// From this byte on, or the first one of the block, which nobody else brings. Returns where to go on; None: the block is here. The
    /// file is not held while the store is waited for.
    async fn bring_step(&self, file: &Arc<File>, block: u64, at: Option<u64>) -> Result<Option<u64>, Wrong> {
        let Some(range) = file.rest.missing_block(block) else { return Ok(None) };
        let base = file.record().base.ok_or(Wrong::Cause(Cause::Internal))?;
        let at = at.unwrap_or(range.start);
        // Shorter only where a loss of power has taken that the file was cut off: then what was there is a hole.
        let len = COPY_STEP.min(range.end.min(base.size).saturating_sub(at));
        let fetched = if len > 0 { Some(self.fetch(file.ino, &base, at, len).await?) } else { None };
        // Nobody cuts it off from here on.
        let content = file.content.read().await;
        let Some(range) = file.rest.missing_block(block) else { return Ok(None) };
        let data = content.clone().ok_or(Wrong::Cause(Cause::Internal))?;
        let (len, journal) = (len.min(range.end.saturating_sub(at)), self.journal.clone());
        if let Some(fetched) = fetched.filter(|_| len > 0) {
            file.note_unwritten(len);
            let copied = self.on_disk(move || {
                let bytes = fetched.bytes(at, len)?;
                // A successor of this agent, which may have brought the block and let it be written to, has the journal.
                let journal = lock(&journal);
                match journal.is_some() {
                    true => data.write_all_at(&bytes, at).map_err(file_wrong),
                    false => Err(Wrong::Cause(Cause::Unavailable)),
                }
            });
            copied.await?;
        }
        let next = at + len;
        if next < range.end.min(base.size) {
            return Ok(Some(next));
        }
        let _noting = file.rest.noting.lock().await;
        let Some(with) = file.rest.get().map(|elsewhere| elsewhere.with(block)) else { return Ok(None) };
        failpoint::hit("agent.staging.brought");
        let (entry, noted) = (elsewhere_entry(file.ino, Some(&with))?, file.clone());
        self.commit(vec![entry], move |_| noted.rest.set(Some(with))).await?;
        Ok(None)
    }

    /// Into a file that is just being made.
    async fn copy(&self, ino: u64, base: &Object, data: &Arc<std::fs::File>, size: u64) -> Result<(), Wrong> {
        let mut offset = 0;
        while offset < size {
            let len = COPY_STEP.min(size - offset);
            let (fetched, to) = (self.fetch(ino, base, offset, len).await?, data.clone());
            let copied = self.change_data(move || {
                let bytes = fetched.bytes(offset, len)?;
                to.write_all_at(&bytes, offset).map_err(file_wrong)
            });
            copied.await?;
            offset += len;
        }
        Ok(())
    }

    /// Bytes of an object, out of the cache or into it.
    async fn fetch(&self, ino: u64, base: &Object, offset: u64, len: u64) -> Result<Fetched, Wrong> {
        let known = || {
            let known = self.scope.names.last_attributes(ino).map_err(|e| self.meta_wrong(&e))?;
            Ok::<_, Wrong>(known.filter(|known| known.token == base.version))
        };
        let attributes = match known()? {
            None if self.know_base(ino, base).await? => known()?,
            known => known,
        };
        let attributes = attributes.ok_or(Wrong::Conflict)?;
        let cached = self.scope.current(&attributes, cache::data::ReadOptions::default())?;
        let read = async { cached.read(offset, len as u32).await.map_err(|e| e.cause) };
        match self.scope.within(self.spec.parameters.store_timeout, None, read).await? {
            Presence::Uncached(bytes) => Ok(Fetched::Read(bytes)),
            Presence::Present { .. } => {
                let descriptors = cached.descriptors().await;
                Ok(Fetched::Cached(descriptors.map_err(|_| Wrong::Cause(Cause::Unavailable))?.data))
            }
        }
    }
}

enum Fetched {
    Read(Bytes),
    /// They are in this file of the cache.
    Cached(OwnedFd),
}

impl Fetched {
    /// Blocking.
    fn bytes(self, offset: u64, len: u64) -> Result<Bytes, Wrong> {
        match self {
            Self::Read(bytes) if bytes.len() as u64 >= len => Ok(bytes.slice(..len as usize)),
            Self::Read(_) => Err(Wrong::Cause(Cause::Unavailable)), // fewer than were asked for
            Self::Cached(from) => {
                let mut bytes = vec![0; len as usize];
                std::fs::File::from(from).read_exact_at(&mut bytes, offset).map_err(file_wrong)?;
                Ok(bytes.into())
            }
        }
    }
}

/// Of this length, with the room for it: who reads or sends the file does not find the disk full later.
fn reserve(data: &std::fs::File, len: u64) -> Result<(), Wrong> {
    match rustix::fs::fallocate(data, FallocateFlags::empty(), 0, len) {
        Err(Errno::OPNOTSUPP) => data.set_len(len).map_err(file_wrong), // not every file system can
        reserved => reserved.map_err(disk_wrong),
    }
}

/// What the bytes were to be read of may be another object by now.
fn is_of_another(wrong: &Wrong) -> bool {
    matches!(wrong, Wrong::Conflict | Wrong::Cause(Cause::Stale | Cause::NotFound))
}
