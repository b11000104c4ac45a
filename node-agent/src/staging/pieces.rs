//! Sends large files part by part, also while they are written.

use super::area::Area;
use super::file::File;
use super::ongoing::{Begun, Ongoing};
use super::parts;
use super::send::ROUNDS;
use super::sent::Sent;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use link::Cause;
use link::writable::Wrong;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::AcqRel;
use store::{Condition, Part, StoreError, Written};

/// Parts of one file on their way at once. Over 20 ms eight fill no link whose connections have 100 MB/s each.
const PARTS_AT_ONCE: usize = 16;

impl Area {
    /// None: it is to be begun anew. An error of the store is for [`Area::refused`], which needs the content that the caller may have
    /// alone (`alone`).
    pub(super) async fn send_parts(
        &self,
        file: &Arc<File>,
        ongoing: &mut Ongoing,
        data: &Arc<std::fs::File>,
        path: &[u8],
        condition: &Condition,
        alone: bool,
    ) -> Result<Result<Option<(Written, Sent)>, StoreError>, Wrong> {
        for _ in 0..ROUNDS {
            let (seen, size) = (file.changes(), file.size());
            let pieces = if alone { Pieces::AllAlone } else { Pieces::All };
            self.send_pieces(file, ongoing, data, path, size, pieces).await?;
            let Some(begun) = ongoing.upload.as_mut() else { continue };
            begun.parts.retain(|number, _| *number < parts::count(size));
            let bytes: u64 = begun.parts.values().map(|(part, _)| part.bytes).sum();
            if begun.parts.len() != parts::count(size) as usize || bytes != size {
                continue; // one came to nothing, and a store makes an object of the others
            }
            // Of one that came to nothing, what was sent before may still be there.
            let current = begun.parts.iter().all(|(number, (_, at))| file.is_untouched(*number, *at));
            if !current || file.size() != size {
                continue;
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
                    return Ok(Ok(Some((
                        written,
                        Sent { id: upload.write, seen, size, owner: Some(owner) },
                    ))));
                }
                // Ended by somebody, or a part that came late is in the place of ours: begun anew.
                Err(StoreError::NotFound { .. }) => self.abandon(ongoing).await,
                Err(error) => {
                    self.abandon(ongoing).await;
                    return Ok(Err(error));
                }
            }
        }
        // Somebody writes on and on: he waits at last.
        if alone { Err(Wrong::Cause(Cause::Unavailable)) } else { Ok(Ok(None)) }
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
                Some(Ok((number, at, Ok(part)))) => {
                    self.arrived.fetch_add(1, AcqRel);
                    arrived.push((number, (part, at)));
                }
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

    pub(super) async fn abandon(&self, ongoing: &mut Ongoing) {
        // Held until this is over, or given up: then it is one that is left over.
        if let Some(begun) = ongoing.upload.take()
            && let Err(error) = self.end_upload(&begun.upload).await
        {
            tracing::warn!(volume = %self.volume, %error, "an upload could not be ended: its parts stay for now");
        }
    }
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
pub(super) fn piece(number: u32, size: u64) -> Range<u64> {
    let Range { start, end } = parts::range(number);
    start.min(size)..end.min(size)
}
