//! Sends what nobody waits for.

use super::Waiting;
use super::area::Area;
use super::believed::STRANGERS;
use super::file::File;
use super::late;
use super::send::WHOLE_MAX;
use crate::lock::lock;
use futures::StreamExt;
use link::Cause;
use link::writable::Wrong;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::Instant;

/// Files that are sent at once without anybody who waits for them, of the small and of the large: one that the store does not take holds
/// up no other.
pub(super) const FILES_AT_ONCE: usize = 4;
/// What nobody waits for is sent when it has not changed for so long.
const QUIET: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(500);
/// Between two attempts at what a store has refused or not answered.
const AGAIN: Duration = Duration::from_secs(15);
/// Files of which the store has all and that are kept for readers, and their bytes.
const CLEAN_MAX: usize = 4096;
/// The same while a directory of the volume is listed, and how long after an answer it goes on at most.
const CLEAN_MOST: usize = 4 * CLEAN_MAX;
const LISTING: Duration = Duration::from_secs(5);

impl Area {
    /// Sends what nobody waits for.
    async fn look_after(&self) {
        let is_due = |file: &&Arc<File>| {
            let record = file.record();
            !record.clean && !record.conflict && lock(&file.changed_at).elapsed() >= QUIET
        };
        // By number: who holds one keeps it from being dropped.
        let due: Vec<(u64, bool)> = {
            let state = self.state();
            state.files.values().filter(is_due).map(|file| (file.ino, file.size() > WHOLE_MAX)).collect()
        };
        for (ino, is_large) in due {
            // A large one takes long: others of its kind come later, and no small one waits for it.
            let slot = match is_large {
                true => self.sending_large.clone().try_acquire_owned().ok(),
                false => self.sending_small.clone().acquire_owned().await.ok(),
            };
            let (Some(slot), Some(area)) = (slot, self.me.upgrade()) else { continue };
            let Some(file) = self.by_ino(ino) else { continue };
            {
                let Ok(mut ongoing) = file.sending.try_lock() else { continue }; // somebody sends it
                if ongoing.tried.is_some_and(|tried| tried.elapsed() < AGAIN) {
                    continue;
                }
                ongoing.tried = Some(Instant::now());
            }
            tokio::spawn(async move {
                let _slot = slot;
                if area.send_unless_discarded(&file).await.is_ok() {
                    file.turn().await.tried = None;
                }
                drop(file);
                area.forget_unlinked(ino).await;
            });
        }
        self.forget_all_unlinked().await;
        self.end_all_moves().await;
        let clean = self.state().files.values().filter(|file| file.record().clean).count();
        // A listing that has not come to them yet would miss them.
        let is_listing = lock(&self.listed_at).is_some_and(|at| at.elapsed() < LISTING);
        if clean > CLEAN_MAX && !is_listing || clean > CLEAN_MOST {
            self.drop_clean().await;
        }
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

    /// An attempt that nobody waits for gives way to whoever discards the file.
    async fn send_unless_discarded(&self, file: &Arc<File>) -> Result<(), Wrong> {
        tokio::select! {
            biased;
            () = self.discards.begun(file.ino) => Err(Wrong::Cause(Cause::Unavailable)),
            sent = self.send(file) => sent,
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
}

/// For as long as the area is open.
pub(super) fn keep_sending(area: &Arc<Area>) {
    let area: Weak<Area> = Arc::downgrade(area);
    tokio::spawn(async move {
        let mut strangers = Some(Instant::now() + STRANGERS);
        let mut late = Instant::now() + late::LOOK;
        let mut looking: Option<tokio::task::JoinHandle<()>> = None;
        loop {
            tokio::time::sleep(LOOK).await;
            let Some(area) = area.upgrade() else { return };
            if area.tenure.is_over() {
                return;
            }
            if strangers.take_if(|at| Instant::now() >= *at).is_some() {
                area.forget_strangers().await;
            }
            area.look_after().await;
            let is_looking = looking.as_ref().is_some_and(|looking| !looking.is_finished());
            if Instant::now() >= late && !is_looking {
                // By itself: a store that hangs holds up nothing else.
                looking = Some(tokio::spawn(async move { area.remove_late().await }));
                late = Instant::now() + late::LOOK;
            }
        }
    });
}
