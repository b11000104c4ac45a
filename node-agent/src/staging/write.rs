//! The bytes of staged files.

use super::area::{Area, Caller, Found, disk_wrong, file_wrong};
use super::bring::How;
use super::file::{File, now_ns};
use super::record::{Append, Record};
use super::{Executed, Outcome, parts};
use fuse_abi::{InHeader, WRITE_KILL_SUIDGID, WriteIn};
use link::Cause;
use link::writable::{Done, Wrong};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tokio::sync::RwLockWriteGuard;

/// Where the bytes of a WRITE begin.
const HEAD: usize = InHeader::BYTES + WriteIn::BYTES;
/// Largest WRITE, bytes.
const WRITE_MAX: usize = 1 << 20;
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
        if !append {
            self.bring_range(&file, head.offset..end_of(head.offset)?).await?;
        }
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
                let put = self.put_bytes(&file, data.clone(), bytes, append.offset).await;
                if let Err(wrong) = put {
                    self.give_place_back(caller, &file, data, wrong).await?;
                    return Err(wrong);
                }
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
            let written = head.offset..end_of(head.offset)?;
            let put = self.put_bytes(&file, data.clone(), bytes, head.offset).await;
            if let Err(wrong) = put {
                drop(content);
                if written.end > file.size() {
                    let _alone = file.content.write().await;
                    let _ = self.cut_off_rest(&file, data).await; // a disk that fails
                }
                return Err(wrong);
            }
            file.wrote(written.start, written.end).then_some(written)
        };
        // Whoever changes what is there already would have all of it sent, and sent again.
        if in_order.is_some_and(|written| parts::of(written.start) != parts::of(written.end)) {
            self.advance(&file);
        }
        let outcome = Ok(Done::Written { bytes: len });
        let is_shared = self.state().opens.get(&ino).is_some_and(|mounts| mounts.len() > 1);
        if is_shared {
            // Done again it would undo what programs of another mount have written since. Those of this one wait for its answer.
            let entries = self.result_entries(caller, &outcome)?;
            self.commit(entries, |_| ()).await?;
        }
        outcome
    }

    /// Nothing was appended: the next request gets that place, and this one its error, however often it is executed. A successor of
    /// this agent goes on with it instead, where it has its place. The caller has the content alone.
    async fn give_place_back(
        &self,
        caller: &Caller<'_>,
        file: &Arc<File>,
        data: Arc<std::fs::File>,
        wrong: Wrong,
    ) -> Result<(), Wrong> {
        let _ = self.cut_off_rest(file, data).await; // a disk that fails
        let (over, mut entries) = self.void_appends(file.ino, file.size())?;
        entries.extend(self.result_entries(caller, &Err(wrong))?);
        self.commit(entries, move |state| over.iter().for_each(|request| _ = state.appends.remove(request)))
            .await
    }

    /// What a write that failed has put behind the end of the file. The caller has the content alone.
    async fn cut_off_rest(&self, file: &Arc<File>, data: Arc<std::fs::File>) -> Result<(), Wrong> {
        let end = file.size();
        let cut = self.change_data(move || {
            let is_longer = rustix::fs::fstat(&data).map_err(disk_wrong)?.st_size as u64 > end;
            if is_longer { data.set_len(end).map_err(file_wrong) } else { Ok(()) }
        });
        cut.await
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
        let (end, of_it) = (offset + bytes.len() as u64, file.clone());
        file.note_unwritten(bytes.len() as u64);
        let done = self.change_data(move || {
            failpoint::hit("agent.staging.write");
            // Ends here, and not with whoever waits for it: a disk may take longer.
            let writing = file.sums.begin(offset..offset + bytes.len() as u64);
            let written = data.write_all_at(bytes.as_slice(), offset).map_err(file_wrong);
            if written.is_ok() {
                writing.done(bytes.as_slice());
            }
            buffers.give_back(bytes.buffer);
            written
        });
        let written = done.await;
        if written.is_err() {
            of_it.wrote_some(offset, end);
        }
        written
    }

    /// The file of this inode, noted as one that the store does not have. Of a large one most bytes may not be here yet.
    pub(super) async fn to_change(&self, ino: u64) -> Result<Arc<File>, Wrong> {
        let found = match self.by_ino(ino) {
            Some(file) if file.speaks() => Found::Staged(file),
            _ => self.inode(ino).await?,
        };
        let file = self.staged(found).await?;
        self.bring_here(&file, None, How::AsTouched).await?;
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
        let over = self.end_appends(file.ino, size)?;
        if !over.is_empty() {
            self.commit(over, |_| ()).await?;
        }
        self.change_data(move || data.set_len(size).map_err(file_wrong)).await?;
        file.resized(size);
        file.rest.change(|elsewhere| elsewhere.cut(size));
        Ok(())
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
struct Written {
    buffer: Vec<u8>,
    /// Of all of it.
    len: usize,
}

impl Written {
    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn as_slice(&self) -> &[u8] {
        self.buffer.get(HEAD..self.len).unwrap_or_default()
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
        let mut buffer = self.buffers.take(end);
        let again = caller.inflight.head(caller.unique, &mut buffer[..end]).ok_or(GONE)?;
        // All of it is this request's: what was in the buffer before may be another volume's.
        if buffer[..HEAD] != front || again.len as usize != end {
            return Err(Wrong::Cause(Cause::Internal)); // a worker that changes what the kernel has said
        }
        Ok((head, Written { buffer, len: end }))
    }
}
