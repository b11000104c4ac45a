//! The open questions of one worker, and the memory that the agent has lent it. Both are bounded: a worker serves
//! requests of strangers, and may not be ours any more.

use crate::lock::lock;
use inflight::carry_job;
use rustix::fs::MemfdFlags;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes past the cache that a worker has and has not given back; at least one READ of the largest size. They count as
/// the agent's memory for as long as they are held.
const LENT_MAX: usize = 16 << 20;

/// Of one worker; its successor has its own.
#[derive(Debug)]
pub(crate) struct Questions {
    open: AtomicUsize,
    /// Tasks that wait until the worker takes an answer.
    turn: tokio::sync::Mutex<()>,
    /// A question which callers are being killed is under way.
    looking: tokio::sync::Mutex<()>,
    room: Arc<Semaphore>,
    lent: Mutex<Lent>,
}

#[derive(Debug, Default)]
struct Lent {
    next: u64,
    held: HashMap<u64, (OwnedFd, Room)>,
    ended: bool,
}

/// Of what may be lent: taken before the bytes are there, and held until they are given back.
#[derive(Debug)]
pub(crate) struct Room(OwnedSemaphorePermit);

impl Room {
    /// Keeps room for `bytes`, and gives back the rest.
    fn shrink(&mut self, bytes: usize) {
        let spare = self.0.num_permits().saturating_sub(bytes);
        drop(self.0.split(spare));
    }
}

/// One question; over on drop.
pub(crate) struct Place(Arc<Questions>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, SeqCst);
    }
}

impl Default for Questions {
    fn default() -> Self {
        Self {
            open: AtomicUsize::new(0),
            turn: tokio::sync::Mutex::new(()),
            looking: tokio::sync::Mutex::new(()),
            room: Arc::new(Semaphore::new(LENT_MAX)),
            lent: Mutex::default(),
        }
    }
}

impl Questions {
    /// None: it has asked `most` questions that have no answer yet.
    pub(crate) fn enter(self: &Arc<Self>, most: usize) -> Option<Place> {
        let place = |open: usize| (open < most).then_some(open + 1);
        self.open.fetch_update(SeqCst, SeqCst, place).ok()?;
        Some(Place(self.clone()))
    }

    pub(crate) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Waits until no other look at the callers of this worker is under way.
    pub(crate) async fn one_look(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.looking.lock().await
    }

    /// Waits until `most` more bytes may be lent. To be had before they are brought: what waits here takes no memory.
    /// At most [`LENT_MAX`].
    pub(crate) async fn room(&self, most: u32) -> std::io::Result<Room> {
        if most as usize > LENT_MAX {
            return Err(std::io::Error::other("more bytes than a READ may ask for"));
        }
        let permit = self.room.clone().acquire_many_owned(most).await;
        permit.map(Room).map_err(|_| std::io::Error::other("the worker has ended"))
    }

    /// `bytes` in a memory file, and its number for [`Self::give_back`].
    pub(crate) async fn lend(&self, mut room: Room, bytes: bytes::Bytes) -> std::io::Result<(u64, OwnedFd)> {
        if bytes.len() > room.0.num_permits() {
            return Err(std::io::Error::other("more bytes than there was room for"));
        }
        room.shrink(bytes.len());
        let file = tokio::task::spawn_blocking(carry_job(move || memory_file(&bytes))).await;
        let file = file.map_err(std::io::Error::other)??;
        let copy = file.try_clone()?;
        let mut lent = self.lock();
        if lent.ended {
            return Err(std::io::Error::other("the worker has ended"));
        }
        lent.next += 1;
        let number = lent.next;
        lent.held.insert(number, (copy, room));
        Ok((number, file))
    }

    /// The worker has copied what it was lent. Whatever it still holds is empty from now on.
    pub(crate) fn give_back(&self, number: u64) {
        let given = self.lock().held.remove(&number);
        empty(given);
    }

    fn lock(&self) -> MutexGuard<'_, Lent> {
        lock(&self.lent)
    }

    /// The worker has ended. A descriptor of what it was lent, wherever it is, holds nothing.
    pub(crate) fn end(&self) {
        self.room.close();
        let mut lent = self.lock();
        lent.ended = true;
        empty(lent.held.drain().map(|(_, held)| held));
    }
}

impl Drop for Questions {
    fn drop(&mut self) {
        self.end();
    }
}

fn empty(held: impl IntoIterator<Item = (OwnedFd, Room)>) {
    for (file, room) in held {
        if let Err(error) = rustix::fs::ftruncate(&file, 0) {
            tracing::error!(%error, "a memory file cannot be emptied");
        }
        drop(room);
    }
}

fn memory_file(bytes: &[u8]) -> std::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("millpond-uncached", MemfdFlags::CLOEXEC)?;
    let mut written = 0;
    while written < bytes.len() {
        written += rustix::io::pwrite(&fd, &bytes[written..], written as u64)?;
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use std::os::fd::AsFd;
    use std::time::Duration;

    async fn lend(questions: &Questions, bytes: Bytes) -> std::io::Result<(u64, OwnedFd)> {
        let room = questions.room(bytes.len() as u32).await?;
        questions.lend(room, bytes).await
    }

    fn size(file: impl AsFd) -> i64 {
        rustix::fs::fstat(file).unwrap().st_size
    }

    #[test]
    fn questions_have_a_limit_and_end_with_their_answer() {
        let questions = Arc::new(Questions::default());
        let first = questions.enter(2).unwrap();
        let _second = questions.enter(2).unwrap();
        assert!(questions.enter(2).is_none());
        drop(first);
        assert!(questions.enter(2).is_some());
    }

    #[tokio::test]
    async fn a_worker_is_lent_no_more_than_it_gives_back_and_keeps_nothing_of_it() {
        let questions = Arc::new(Questions::default());
        let whole = Bytes::from(vec![7; LENT_MAX]);
        let (number, kept) = lend(&questions, whole.clone()).await.unwrap();
        assert_eq!(size(&kept), LENT_MAX as i64);
        let more = tokio::spawn({
            let (questions, whole) = (questions.clone(), whole.clone());
            async move { lend(&questions, whole).await }
        });
        let waits = tokio::time::timeout(Duration::from_millis(50), async {
            while !more.is_finished() {
                tokio::task::yield_now().await
            }
        });
        assert!(waits.await.is_err(), "it still has all that it may have");
        questions.give_back(number);
        let (_, second) = more.await.unwrap().unwrap();
        assert_eq!(size(&kept), 0, "what it did not let go of is empty");
        questions.give_back(number);
        questions.give_back(u64::MAX);
        questions.end();
        assert_eq!(size(&second), 0);
        assert!(lend(&questions, Bytes::from_static(b"x")).await.is_err());
        assert!(Questions::default().room(LENT_MAX as u32 + 1).await.is_err());
    }

    #[tokio::test]
    async fn what_is_lent_takes_the_room_of_its_bytes_and_no_more_than_it_has() {
        let questions = Arc::new(Questions::default());
        let room = questions.room(LENT_MAX as u32).await.unwrap();
        let (number, _) = questions.lend(room, Bytes::from_static(b"end of file")).await.unwrap();
        let rest = questions.room((LENT_MAX - b"end of file".len()) as u32).await.unwrap();
        assert_eq!(questions.room.available_permits(), 0);
        assert!(questions.lend(rest, Bytes::from(vec![0; LENT_MAX])).await.is_err());
        questions.give_back(number);
        assert_eq!(questions.room.available_permits(), LENT_MAX);
    }
}
