//! How many volumes come up at once, and whether there is room for another one.
//!
//! A worker's start is work for the processor. A thousand that start together are all late, are given up and begun again,
//! and none gets on; so they take turns. What a source is waited for is none of it: a store that hangs holds up its own
//! volumes alone.

use link::{Refusal, RefusalKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// On a node with few processors: what starts waits for the disk, too.
const AT_ONCE_LEAST: usize = 8;
/// A publish whose source has taken all its time gets its turn all the same, if that comes at once.
const TURN_LEAST: Duration = Duration::from_secs(2);
/// What one volume takes of this process's descriptors (measured: 10,044 for a thousand).
const OF_A_VOLUME: u64 = 10;
/// For connections to the store, and cache files that are open.
const SPARE_LEAST: u64 = 256;

pub(crate) struct Admission {
    turns: Arc<Semaphore>,
    /// How long a turn is waited for at least.
    least: Duration,
    waiting: AtomicUsize,
}

/// Ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    _permit: OwnedSemaphorePermit,
}

impl Admission {
    pub(crate) fn of_this_machine() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self::new(AT_ONCE_LEAST.max(2 * processors), TURN_LEAST)
    }

    fn new(at_once: usize, least: Duration) -> Self {
        Self { turns: Arc::new(Semaphore::new(at_once)), least, waiting: AtomicUsize::new(0) }
    }

    /// In the order in which they come.
    ///
    /// # Errors
    /// The turn has not come at `end`.
    pub(crate) async fn enter(&self, end: Instant) -> Result<Turn, Refusal> {
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let end = end.max(Instant::now() + self.least);
        let turn = tokio::time::timeout_at(end, self.turns.clone().acquire_owned()).await;
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        match turn {
            Ok(Ok(permit)) => Ok(Turn { _permit: permit }),
            Ok(Err(_)) | Err(_) => Err(Refusal::new(
                RefusalKind::Unavailable,
                format!(
                    "this node brings many volumes up at once ({before} came before this one): the publish will be repeated"
                ),
            )),
        }
    }
}

/// Is there room for the volumes that are on their way here, `coming` of them with the one that asks? Each is counted
/// whole until it is here: all of a thousand that come at once would find room for one.
///
/// # Errors
/// A sentence that says what to raise.
pub(crate) fn has_room(coming: usize) -> Result<(), Refusal> {
    let uncounted = |e| Refusal::new(RefusalKind::Internal, format!("descriptors are not counted: {e}"));
    let startup::Descriptors { used, most } = startup::descriptors().map_err(uncounted)?;
    may_take(used, coming as u64, most)
}

fn may_take(used: u64, coming: u64, most: u64) -> Result<(), Refusal> {
    let spare = SPARE_LEAST.max(most / 16);
    if used.saturating_add(OF_A_VOLUME * coming + spare) <= most {
        return Ok(());
    }
    Err(Refusal::new(
        RefusalKind::Unavailable,
        format!(
            "this node's agent has {used} of {most} descriptors in use, brings {coming} volumes up and keeps {spare} for the volumes that are there: raise its limit (LimitNOFILE of the container runtime), or place fewer pods with volumes on this node"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_are_taken_in_order_and_one_that_does_not_come_is_refused() {
        let admission = Arc::new(Admission::new(1, Duration::ZERO));
        let first = admission.enter(Instant::now()).await.unwrap();
        let (sender, mut came) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..3 {
            let (admission, sender) = (admission.clone(), sender.clone());
            tokio::spawn(async move {
                let turn = admission.enter(Instant::now() + Duration::from_secs(600)).await;
                sender.send((number, turn)).unwrap();
            });
            tokio::task::yield_now().await;
        }
        let late = admission.enter(Instant::now()).await.unwrap_err();
        assert_eq!(late.kind, RefusalKind::Unavailable);
        assert!(late.message.contains("3 came before this one"), "{late}");
        drop(first);
        for number in 0..3 {
            let (came, turn) = came.recv().await.unwrap();
            assert_eq!(came, number);
            drop(turn.unwrap());
        }
        assert_eq!(admission.waiting.load(Ordering::Relaxed), 0);
        // One whose source has taken all the time gets a turn that is free.
        admission.enter(Instant::now()).await.unwrap();
    }

    #[test]
    fn the_last_descriptors_are_kept_for_the_volumes_that_are_there() {
        assert!(may_take(0, 1, 1024).is_ok());
        assert!(may_take(1024 - 256 - OF_A_VOLUME, 1, 1024).is_ok());
        let refusal = may_take(1024 - 256 - OF_A_VOLUME + 1, 1, 1024).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Unavailable);
        assert!(refusal.message.contains("of 1024 descriptors") && refusal.message.contains("LimitNOFILE"));
        assert!(may_take(900_000, 1, 1 << 20).is_ok() && may_take(1_000_000, 1, 1 << 20).is_err());
        // Those that come at once see each other, whatever they have taken so far.
        assert!(may_take(60, 70, 1024).is_ok() && may_take(60, 71, 1024).is_err());
        assert!(may_take(0, 1, 0).is_err() && may_take(u64::MAX, 1, u64::MAX).is_ok());
    }
}
