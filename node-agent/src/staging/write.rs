//! The bytes of staged files.

use super::area::{Area, Caller, Found, file_wrong};
use super::file::{File, now_ns};
use super::record::{Append, Object, Record};
use super::{Executed, Outcome, parts};
use cache::data::Presence;
use fuse_abi::{InHeader, WRITE_KILL_SUIDGID, WriteIn};
use link::Cause;
use link::writable::{Done, Wrong};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use tokio::sync::RwLockWriteGuard;

/// Where the bytes of a WRITE begin.
const HEAD: usize = InHeader::BYTES + WriteIn::BYTES;
/// Largest WRITE, bytes.
const WRITE_MAX: usize = 1 << 20;
/// So much of an object is copied at once into its staged file, bytes.
const COPY_STEP: u64 = 4 << 20;
/// So much of the staging disk stays free, bytes: the journal must grow, and others live there, too.
const FREE_MIN: u64 = 256 << 20;
/// So many bytes are written before the disk is asked again how much is free.
const ROOM_SEEN_MAX: u64 = 64 << 20;
/// How often an object may turn out to be another one of ours while its bytes are brought here.
const REBASED_MAX: u32 = 4;
/// How long a writer waits for room on the staging disk while something is sent, and how often it looks.
const ROOM_LOOKS: u32 = 100;
const ROOM_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

impl Area {
    /// Writes what stands in the connection's shared memory.
    pub(super) async fn write(&self, caller: &Caller<'_>, ino: u64, executed: &Executed) -> Outcome {
        let (head, bytes) = self.request(caller)?;
        let written = async {
            self.disk_answers().await?;
            self.write_bytes(caller, ino, head, bytes).await
        };
        executed.once(caller.unique, caller.waits, written).await
    }

    async fn write_bytes(&self, caller: &Caller<'_>, ino: u64, head: WriteIn, bytes: Written) -> Outcome {
        let len = bytes.len() as u32;
        if len == 0 {
            return Ok(Done::Written { bytes: 0 });
        }
        let file = self.to_change(ino).await?;
        if head.write_flags & WRITE_KILL_SUIDGID != 0 {
            self.drop_privileges(&file).await?;
        }
        let append = head.flags & libc::O_APPEND as u32 != 0;
        let limit = self.sink.limits().object_bytes_max.min(volume::FILE_BYTES_MAX);
        let end_of = |offset: u64| {
            offset.checked_add(u64::from(len)).filter(|end| *end <= limit).ok_or(Wrong::TooLarge)
        };
        end_of(head.offset)?;
        self.make_room(u64::from(len)).await?;
        // What follows on what was written in order before.
        let in_order = if append {
            // Alone: the kernel's idea of the end is that of its own mount.
            let content = loop {
                let content = file.content.write().await;
                if is_noted(&file.record()) {
                    break content;
                }
                drop(content);
                self.note_dirty(&file, true).await?;
            };
            let data = content.as_ref().ok_or(Wrong::Cause(Cause::Internal))?.clone();
            let offset = file.size();
            let at_end = Append { ino, offset, end: end_of(offset)?, is_over: false };
            let append = self.append_at(caller, at_end).await?;
            if !append.is_over {
                self.put_bytes(&file, data, bytes, append.offset).await?;
            }
            (!append.is_over && file.wrote(append.offset, append.end)).then_some(append.offset..append.end)
        } else {
            let content = loop {
                let content = file.content.read().await;
                if is_noted(&file.record()) {
                    break content;
                }
                drop(content); // the store has got all of it in between
                self.note_dirty(&file, true).await?;
            };
            let data = content.as_ref().ok_or(Wrong::Cause(Cause::Internal))?.clone();
            self.put_bytes(&file, data, bytes, head.offset).await?;
            let written = head.offset..end_of(head.offset)?;
            file.wrote(written.start, written.end).then_some(written)
        };
        // Whoever changes what is there already would have all of it sent, and sent again.
        if in_order.is_some_and(|written| parts::of(written.start) != parts::of(written.end)) {
            self.advance(&file);
        }
        Ok(Done::Written { bytes: len })
    }

    /// As each file system does before somebody without a right to keep them writes. Where the bytes go through its page cache
    /// the kernel does it with a SETATTR.
    async fn drop_privileges(&self, file: &Arc<File>) -> Result<(), Wrong> {
        if unprivileged(file.record().mode) == file.record().mode {
            return Ok(());
        }
        let _alone = file.content.write().await;
        let mut record = file.record();
        (record.mode, record.ctime_ns, record.clean) = (unprivileged(record.mode), now_ns(), false);
        let record = file.noted(record);
        file.change();
        self.put_record(file, record).await
    }

    async fn put_bytes(
        &self,
        file: &Arc<File>,
        data: Arc<std::fs::File>,
        bytes: Written,
        offset: u64,
    ) -> Result<(), Wrong> {
        let (file, buffers) = (file.clone(), self.buffers.clone());
        let done = self.on_disk(move || {
            failpoint::hit("agent.staging.write");
            // Ends here, and not with whoever waits for it: a disk may take longer.
            let writing = file.sums.begin(offset..offset + bytes.len() as u64);
            let written = data.write_all_at(bytes.as_slice(), offset).map_err(file_wrong);
            if written.is_ok() {
                writing.done(bytes.as_slice());
            }
            buffers.give_back(bytes.0);
            written
        });
        done.await
    }

    /// The file of this inode, with its bytes here, noted as one that the store does not have.
    pub(super) async fn to_change(&self, ino: u64) -> Result<Arc<File>, Wrong> {
        let found = match self.by_ino(ino) {
            Some(file) if file.speaks() => Found::Staged(file),
            _ => self.inode(ino).await?,
        };
        let file = self.staged(found).await?;
        self.bring_here(&file, None).await?;
        self.note_dirty(&file, true).await?;
        Ok(file)
    }

    /// From here on the store does not have all of it: not its bytes, or only not all else.
    pub(super) async fn note_dirty(&self, file: &Arc<File>, bytes: bool) -> Result<(), Wrong> {
        let is_known = |record: &Record| if bytes { is_noted(record) } else { !record.clean };
        if is_known(&file.record()) {
            return Ok(());
        }
        // Alone, so that nobody who brings it into the store calls it clean meanwhile.
        let _alone = file.content.write().await;
        let record = file.record();
        if is_known(&record) {
            return Ok(());
        }
        let mut record = file.noted(record);
        record.clean = false;
        record.same &= !bytes;
        file.change();
        self.put_record(file, record).await
    }

    /// Copies the bytes that the store has, up to `size` if that is said, unless they are here.
    pub(super) async fn bring_here(&self, file: &Arc<File>, size: Option<u64>) -> Result<(), Wrong> {
        if file.content.read().await.is_some() {
            return Ok(());
        }
        // While the store makes a copy of it under another name or with other attributes, its version is neither.
        let _silent = file.turn().await;
        for _ in 0..REBASED_MAX {
            match self.bring(file, size).await {
                Err(Wrong::Cause(Cause::Stale) | Wrong::Conflict) if self.rebase(file).await? => {}
                brought => return brought,
            }
        }
        Err(Wrong::Cause(Cause::Unavailable))
    }

    async fn bring(&self, file: &Arc<File>, size: Option<u64>) -> Result<(), Wrong> {
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
        if wanted > 0 {
            self.copy(file.ino, &base, data.clone(), wanted).await?;
        }
        let mut record = file.noted(record);
        (record.local, record.durable) = (true, false);
        self.put_record(file, record).await?;
        *content = Some(data);
        Ok(())
    }

    async fn copy(&self, ino: u64, base: &Object, data: Arc<std::fs::File>, size: u64) -> Result<(), Wrong> {
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
        let mut offset = 0;
        while offset < size {
            let len = COPY_STEP.min(size - offset);
            let read = async { cached.read(offset, len as u32).await.map_err(|e| e.cause) };
            let found = self.scope.within(self.spec.parameters.store_timeout, None, read).await?;
            let to = data.clone();
            match found {
                Presence::Uncached(bytes) => {
                    self.on_disk(move || to.write_all_at(&bytes, offset).map_err(file_wrong)).await?;
                }
                Presence::Present { .. } => {
                    let from = cached.descriptors().await.map_err(|_| Wrong::Cause(Cause::Unavailable))?.data;
                    let copied = self.on_disk(move || {
                        let mut bytes = vec![0; len as usize];
                        let read = std::fs::File::from(from).read_exact_at(&mut bytes, offset);
                        read.and_then(|()| to.write_all_at(&bytes, offset)).map_err(file_wrong)
                    });
                    copied.await?;
                }
            }
            offset += len;
        }
        Ok(())
    }

    /// Cuts it off, or lets it grow by a hole. `content`: of this file.
    pub(super) async fn resize(
        &self,
        file: &Arc<File>,
        content: &RwLockWriteGuard<'_, Option<Arc<std::fs::File>>>,
        size: u64,
    ) -> Result<(), Wrong> {
        if size > self.sink.limits().object_bytes_max.min(volume::FILE_BYTES_MAX) {
            return Err(Wrong::TooLarge);
        }
        let data = content.as_ref().ok_or(Wrong::Cause(Cause::Internal))?.clone();
        let over = self.end_appends(file.ino)?;
        if !over.is_empty() {
            self.commit(over, |_| ()).await?;
        }
        self.on_disk(move || data.set_len(size).map_err(file_wrong)).await?;
        file.resized(size);
        Ok(())
    }

    /// Waits until the staging disk has room for so many bytes more: what the store has goes first, then what can be sent is
    /// waited for.
    pub(super) async fn make_room(&self, bytes: u64) -> Result<(), Wrong> {
        let take = |left: u64| left.checked_sub(bytes);
        if self.room.fetch_update(AcqRel, Acquire, take).is_ok() {
            return Ok(()); // seen a short while ago
        }
        let mut looks = 0;
        loop {
            let (_, free) = self.disk_space().await?;
            if let Some(left) = free.checked_sub(bytes.saturating_add(FREE_MIN)) {
                self.room.store((left / 2).min(ROOM_SEEN_MAX), Release);
                return Ok(());
            }
            if self.drop_clean().await {
                continue;
            }
            looks += 1;
            if looks > ROOM_LOOKS {
                return Err(Wrong::NoSpace);
            }
            tokio::time::sleep(ROOM_PAUSE).await;
        }
    }
}

/// The journal says that the bytes are not those of the store.
fn is_noted(record: &Record) -> bool {
    !record.clean && !record.same
}

/// Without set-user-ID, and without set-group-ID where it is not a mark for mandatory locks (no right to execute).
fn unprivileged(mode: u32) -> u32 {
    let group = if mode & libc::S_IXGRP != 0 { libc::S_ISGID } else { 0 };
    mode & !(libc::S_ISUID | group)
}

/// A WRITE, with what stands before its bytes.
struct Written(Vec<u8>);

impl Written {
    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn as_slice(&self) -> &[u8] {
        self.0.get(HEAD..).unwrap_or_default()
    }
}

impl Area {
    /// A WRITE as the kernel has sent it: read here, and not told by the worker. Copied, for what lies in shared memory may be
    /// another request's by the time at which a slow disk comes to it.
    fn request(&self, caller: &Caller<'_>) -> Result<(WriteIn, Written), Wrong> {
        const GONE: Wrong = Wrong::Cause(Cause::Unavailable); // its caller has been let go: nobody waits for an answer
        let mut front = [0; HEAD];
        let header = caller.inflight.head(caller.unique, &mut front).ok_or(GONE)?;
        let head = front[InHeader::BYTES..].try_into().map(WriteIn::from_bytes);
        let head = head.map_err(|_| Wrong::Cause(Cause::Internal))?;
        let end = HEAD + head.size as usize;
        if header.opcode != fuse_abi::opcode::WRITE || header.len as usize != end || end > HEAD + WRITE_MAX {
            return Err(Wrong::Cause(Cause::Internal));
        }
        let mut bytes = self.buffers.take(end);
        let again = caller.inflight.head(caller.unique, &mut bytes).ok_or(GONE)?;
        // All of it is this request's: what was in the buffer before may be another volume's.
        if bytes[..HEAD] != front || again.len as usize != end {
            return Err(Wrong::Cause(Cause::Internal)); // a worker that changes what the kernel has said
        }
        Ok((head, Written(bytes)))
    }
}
