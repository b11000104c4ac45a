//! Room on the staging disk. What its store has gives way long before kubelet takes the node's disk for full, whichever volume it is
//! of; below that writers wait for what is getting to the store.

use super::area::Area;
use super::closed::Closed;
use super::disk::{Disk, Silence};
use super::registry::Staging;
use crate::lock::lock;
use crate::volumes::collect::Leave;
use link::writable::Wrong;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::time::Duration;
use tokio::time::Instant;
use volume::VolumeId;

/// So much of the disk stays free, bytes: the journal must grow, and others live there, too.
const FREE_MIN: u64 = 256 << 20;
/// Percent of the disk that files leave free which the store has, an eighth. kubelet evicts pods below 10.
const FREE_PERCENT: u64 = 12;
/// Between two looks at that.
const LOOK: Duration = Duration::from_secs(2);
/// So many bytes are written before the disk is asked again how much is free.
const SEEN_MAX: u64 = 64 << 20;
/// How long a writer waits for room without seeing that anything gets to the store, and how often it looks.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

impl Area {
    /// Waits until the staging disk has room for so many bytes more: what the store has goes first, then what can be sent is
    /// waited for.
    pub(super) async fn make_room(&self, bytes: u64) -> Result<(), Wrong> {
        let take = |left: u64| left.checked_sub(bytes);
        if self.room.fetch_update(AcqRel, Acquire, take).is_ok() {
            return Ok(()); // seen a short while ago
        }
        let (mut arrived, mut since) = (self.arrived.load(Acquire), Instant::now());
        loop {
            let (_, free) = self.disk_space().await?;
            if let Some(left) = free.checked_sub(bytes.saturating_add(FREE_MIN)) {
                self.room.store((left / 2).min(SEEN_MAX), Release);
                return Ok(());
            }
            if self.drop_clean().await {
                continue;
            }
            let now = self.arrived.load(Acquire);
            if now != arrived {
                (arrived, since) = (now, Instant::now());
            }
            if since.elapsed() >= PATIENCE {
                return Err(Wrong::NoSpace);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

impl Staging {
    /// For as long as the agent has this. `leave`: it ends what concerns areas that no mount has.
    pub(crate) fn keep_room(self: &Arc<Self>, leave: Arc<Leave>) -> tokio::task::JoinHandle<()> {
        let (staging, limit) = (Arc::downgrade(self), self.limit);
        tokio::spawn(async move {
            // Threads of its own: a disk that hangs holds up nobody else.
            let disk = match Disk::start(limit, Silence::default()) {
                Ok(disk) => disk,
                Err(error) => return tracing::error!(%error, "nobody makes room on the staging disk"),
            };
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(staging) = staging.upgrade() else { return };
                // What cannot be looked at now is looked at the next time.
                let _ = staging.tidy(&disk, &leave).await;
            }
        })
    }

    async fn tidy(&self, disk: &Disk, leave: &Arc<Leave>) -> Option<()> {
        while self.is_low(disk).await? {
            let mut dropped = false;
            for area in self.open_areas() {
                dropped |= !area.tenure.is_over() && area.drop_clean().await;
            }
            if !dropped {
                break;
            }
        }
        if !self.is_low(disk).await? {
            return Some(());
        }
        for id in self.volumes(self.limit).await.ok()? {
            if self.empty(disk, id, leave).await? && !self.is_low(disk).await? {
                break;
            }
        }
        Some(())
    }

    /// Removes what the store has of an area that no mount has. True: there was something. None: a successor may have it by now, or
    /// the disk does not answer.
    async fn empty(&self, disk: &Disk, id: VolumeId, leave: &Arc<Leave>) -> Option<bool> {
        let _turn = self.turn(&id).await; // nobody opens it meanwhile
        if self.open_area(&id).is_some() || lock(&self.emptied).contains(&id) {
            return Some(false);
        }
        let (dir, leave) = (self.dir.join(id.as_str()), leave.clone());
        let emptied = disk.run(move || leave.with(|| empty(&dir))).await.ok()??;
        lock(&self.emptied).insert(id.clone()); // what fails is not tried each time
        match emptied {
            Ok(0) => Some(false),
            Ok(files) => {
                tracing::info!(volume = %id, files, "staged files that the store has made room on the staging disk");
                Some(true)
            }
            Err(why) => {
                tracing::warn!(volume = %id, %why, "what the store has of a staging area could not be removed");
                Some(false)
            }
        }
    }

    /// Of the disk. None: it does not answer, or no volume has an area here.
    async fn is_low(&self, disk: &Disk) -> Option<bool> {
        let dir = self.dir.clone();
        let about = disk.run(move || rustix::fs::statvfs(&dir).ok()).await.ok()??;
        let (all, free) =
            (about.f_blocks.saturating_mul(about.f_frsize), about.f_bavail.saturating_mul(about.f_frsize));
        Some(is_low(all, free))
    }
}

/// Blocking. How many files went.
fn empty(dir: &Path) -> Result<usize, String> {
    let Some(closed) = Closed::open(dir)? else { return Ok(0) };
    let clean = closed.clean();
    if !clean.is_empty() {
        closed.discard(&clean)?;
    }
    Ok(clean.len())
}

/// Bytes of a disk, all and free. One that does not tell its size is not low.
fn is_low(all: u64, free: u64) -> bool {
    all > 0 && free < (all / 100 * FREE_PERCENT).max(FREE_MIN + SEEN_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_low_before_kubelet_takes_it_for_full() {
        const GIB: u64 = 1 << 30;
        assert!(!is_low(100 * GIB, 12 * GIB));
        assert!(is_low(100 * GIB, 12 * GIB - 1));
        assert!(is_low(GIB, FREE_MIN), "and before writers wait");
        assert!(!is_low(0, 0));
    }
}
