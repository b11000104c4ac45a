//! Uploads in parts that nobody will complete: they are ended, for a store keeps their parts, and is paid for them, until then.
//!
//! ```text
//!  begun at the store ──► noted in the journal ──► parts ──► completed, abandoned: forgotten
//!           │                      └── by an agent that is gone, or that could not end it: ended by whoever has the area
//!           └── by somebody who has died, or was not answered: found in the store's listing, once a day, when it is a week old
//! ```
//!
//! What this agent is sending is never ended: whoever sends an upload holds it, and what is held by nobody is left over.

use super::area::Area;
use super::conditions::PROBE;
use super::file::now_ns;
use super::names::{Entry, State, UPLOAD};
use super::ongoing::{Holder, Noted};
use super::record::Multipart;
use futures::StreamExt;
use link::Cause;
use link::writable::Wrong;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use store::{Attributes, Leftover, StoreError, Upload, Write, WriteId};
use tokio::time::Instant;

/// How often it is looked for uploads that are noted and held by nobody.
const LOOK: Duration = Duration::from_secs(60);
/// After the area was opened: an agent that starts has more to ask its stores for.
const FIRST_LISTING: Duration = Duration::from_secs(5 * 60);
pub(super) const LISTING: Duration = Duration::from_secs(24 * 3600);
/// Somebody else's program may write below the volume's prefix: an upload that takes longer than this is given up by it, too.
pub(super) const OLD: Duration = Duration::from_secs(7 * 24 * 3600);
/// Uploads that are ended at once.
const ENDS_AT_ONCE: usize = 4;
/// More are not noted: those before them are found in the listing.
const MOST: usize = 1024;

fn entry(write: WriteId, multipart: Option<&Multipart>) -> Result<Entry, Wrong> {
    let value = multipart.map(postcard::to_stdvec).transpose().map_err(|_| Wrong::Cause(Cause::Internal))?;
    Ok(([&[UPLOAD][..], write.to_string().as_bytes()].concat(), value))
}

/// Those before the last ones: their writes.
fn surplus(uploads: &BTreeMap<WriteId, Noted>) -> Vec<WriteId> {
    let mut left: Vec<_> = uploads.iter().filter(|(_, noted)| noted.is_left()).collect();
    left.sort_by_key(|(_, noted)| noted.begun_ns());
    let count = (uploads.len() + 1).saturating_sub(MOST);
    left.into_iter().take(count).map(|(write, _)| *write).collect()
}

impl Area {
    /// Keeps in the journal that the store has begun this upload: before it is sent a part, so that no part is without a note.
    pub(super) async fn note_upload(&self, upload: &Upload) -> Result<Holder, Wrong> {
        failpoint::hit("agent.staging.upload-begun");
        let (write, holder) = (upload.write, Holder::default());
        let multipart = Multipart { path: upload.path.clone(), id: upload.id.clone(), begun_ns: now_ns() };
        let surplus = surplus(&self.state().uploads);
        let mut entries = vec![entry(write, Some(&multipart))?];
        for write in &surplus {
            entries.push(entry(*write, None)?);
        }
        let noted = Noted::held(multipart, &holder);
        let apply = move |state: &mut State| {
            state.uploads.insert(write, noted);
            surplus.iter().for_each(|write| drop(state.uploads.remove(write)));
        };
        self.commit(entries, apply).await?;
        self.sync_disk().await?; // as before all that the store is asked for
        failpoint::hit("agent.staging.upload-noted");
        Ok(holder)
    }

    /// It is over. What stays noted all the same is ended once more, which finds that out.
    pub(super) async fn forget_upload(&self, write: WriteId) {
        if let Ok(entry) = entry(write, None) {
            let _ = self.commit(vec![entry], move |state| drop(state.uploads.remove(&write))).await;
        }
    }

    /// What cannot be ended stays noted.
    pub(super) async fn end_upload(&self, upload: &Upload) -> Result<(), StoreError> {
        self.sink.abandon(upload).await?;
        self.forget_upload(upload.write).await;
        Ok(())
    }

    /// Ends what is noted and held by nobody. Never held again: who begins an upload draws another id for its write.
    pub(super) async fn end_left_uploads(&self) {
        let left: Vec<Upload> = {
            let state = self.state();
            let left = state.uploads.iter().filter(|(_, noted)| noted.is_left());
            left.map(|(write, noted)| noted.upload(*write)).collect()
        };
        let ended = futures::stream::iter(left).map(|upload| async move {
            let ended = self.end_upload(&upload).await;
            if ended.is_ok() {
                let path = String::from_utf8_lossy(&upload.path);
                tracing::info!(volume = %self.volume, %path, "an upload that was left over is ended");
            }
            ended.err()
        });
        let failed: Vec<StoreError> =
            ended.buffer_unordered(ENDS_AT_ONCE).filter_map(std::future::ready).collect().await;
        if let Some(error) = failed.first() {
            let uploads = failed.len();
            tracing::warn!(volume = %self.volume, uploads, %error, "uploads that were left over cannot be ended: their parts stay for now");
        }
    }

    /// Ends what the store has of old uploads, whoever began them.
    pub(super) async fn end_old_uploads(&self) {
        let volume = &self.volume;
        let found = match self.old_uploads().await {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%volume, %error, "it is not known which uploads were never completed");
                return;
            }
        };
        let ended = futures::stream::iter(found).for_each_concurrent(ENDS_AT_ONCE, async |leftover| {
            let Leftover { upload, age } = leftover;
            if self.is_noted(&upload) {
                return; // ended as such, or being sent
            }
            let (path, days) = (String::from_utf8_lossy(&upload.path), age.as_secs() / 86_400);
            match self.sink.abandon(&upload).await {
                Ok(()) => {
                    tracing::warn!(%volume, %path, upload = %upload.id, days, "an upload that nobody has completed is ended");
                }
                Err(error) => {
                    tracing::debug!(%volume, %path, %error, days, "an upload that nobody has completed cannot be ended");
                }
            }
        });
        ended.await;
    }

    async fn old_uploads(&self) -> Result<Vec<Leftover>, StoreError> {
        let found = self.sink.leftovers(OLD).await?;
        if found.is_empty() {
            return Ok(found);
        }
        // There are servers that say the same time of each upload: one that has only begun must not be old.
        let write = Write { id: self.draw(), attributes: Attributes::default() };
        let path = format!("{PROBE}{}", write.id);
        let witness = self.sink.begin(path.as_bytes(), &write).await?;
        let found = self.sink.leftovers(OLD).await;
        let _ = self.sink.abandon(&witness).await; // it has no parts
        let found = found?;
        let is_witness = |old: &Leftover| old.upload.id == witness.id && old.upload.path == witness.path;
        if found.iter().any(is_witness) {
            tracing::warn!(volume = %self.volume, "the store says of an upload that has just begun that it is a week old: none is ended");
            return Ok(Vec::new());
        }
        Ok(found)
    }

    fn is_noted(&self, upload: &Upload) -> bool {
        self.state().uploads.values().any(|noted| noted.is_of(upload))
    }
}

/// For as long as the area is open. Beside what sends its files: a store that takes long to end an upload holds up nothing else.
pub(super) fn keep_ending(area: &Arc<Area>) {
    let area = Arc::downgrade(area);
    tokio::spawn(async move {
        let mut listing = Instant::now() + FIRST_LISTING;
        loop {
            {
                let Some(area) = area.upgrade().filter(|area| !area.tenure.is_over()) else { return };
                area.end_left_uploads().await;
                if Instant::now() >= listing {
                    area.end_old_uploads().await;
                    listing = Instant::now() + LISTING;
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_too_many_the_first_that_are_left_over_are_not_noted_any_more() {
        let write = |number: usize| WriteId::new((number as u128).to_be_bytes());
        let holder = Holder::default();
        let noted = |number: usize| {
            let multipart =
                Multipart { path: b"a".to_vec(), id: number.to_string(), begun_ns: 10_000 - number as i64 };
            // Those that were begun first are being sent.
            if number >= MOST - 3 { Noted::held(multipart, &holder) } else { Noted::recalled(multipart) }
        };
        let of = |count: usize| (0..count).map(|number| (write(number), noted(number))).collect();
        assert_eq!(surplus(&BTreeMap::new()), []);
        assert_eq!(surplus(&of(MOST - 1)), []);
        assert_eq!(surplus(&of(MOST)), [write(MOST - 4)]);
        assert_eq!(surplus(&of(MOST + 1)), [write(MOST - 4), write(MOST - 5)]);
    }
}
