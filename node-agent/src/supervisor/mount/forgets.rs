//! Cache files that are gone, of which the worker's queue had no room to learn.

use crate::lock::lock;
use link::Packet;
use link::worker::{ToWorker, try_send};
use std::collections::VecDeque;
use std::sync::Mutex;

/// Space of those that are left out is free with the worker, or once it opens others.
const UNHEARD_MAX: usize = 65_536;

/// Oldest first.
#[derive(Default)]
pub(super) struct Forgets(Mutex<VecDeque<u64>>);

impl Forgets {
    pub(super) fn send(&self, file: u64, worker: &Packet) {
        let mut unheard = lock(&self.0);
        if unheard.is_empty() && try_send(worker, &ToWorker::Forget { file }, &[]).is_ok() {
            return;
        }
        if unheard.len() == UNHEARD_MAX {
            unheard.pop_front();
        }
        unheard.push_back(file);
    }

    /// As many as the worker has room for.
    pub(super) fn flush(&self, worker: &Packet) {
        let mut unheard = lock(&self.0);
        while let Some(file) = unheard.front().copied()
            && try_send(worker, &ToWorker::Forget { file }, &[]).is_ok()
        {
            unheard.pop_front();
        }
    }

    pub(super) fn clear(&self) {
        lock(&self.0).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use link::MAX_MESSAGE;
    use link::worker::recv;

    #[test]
    fn a_worker_learns_of_all_files_in_their_order_however_many_at_once() {
        let (agent, worker) = Packet::pair().unwrap();
        let (forgets, files) = (Forgets::default(), 5000);
        (0..files).for_each(|file| forgets.send(file, &agent));
        assert!(!lock(&forgets.0).is_empty(), "its queue holds them all: the test shows nothing");
        worker.set_recv_timeout(Some(std::time::Duration::from_millis(1))).unwrap();
        let (mut buffer, mut learned) = (vec![0; MAX_MESSAGE], Vec::new());
        while learned.len() < files as usize {
            let before = learned.len();
            while let Ok((ToWorker::Forget { file }, _)) = recv(&worker, &mut buffer) {
                learned.push(file);
            }
            assert!(learned.len() > before, "it learned of {before} files only");
            forgets.flush(&agent);
        }
        assert_eq!(learned, (0..files).collect::<Vec<_>>());
    }

    #[test]
    fn a_successor_is_told_of_no_file_that_only_its_predecessor_knew() {
        let (agent, predecessor) = Packet::pair().unwrap();
        let forgets = Forgets::default();
        (0..5000).for_each(|file| forgets.send(file, &agent));
        drop(predecessor);
        forgets.clear();
        let (agent, successor) = Packet::pair().unwrap();
        forgets.send(7000, &agent);
        forgets.flush(&agent);
        let (first, _) = recv(&successor, &mut vec![0; MAX_MESSAGE]).unwrap();
        assert!(matches!(first, ToWorker::Forget { file: 7000 }), "{first:?}");
    }

    #[test]
    fn a_worker_that_reads_nothing_takes_no_more_than_its_room() {
        let (agent, _worker) = Packet::pair().unwrap();
        let forgets = Forgets::default();
        let files = UNHEARD_MAX as u64 + 5000;
        (0..files).for_each(|file| forgets.send(file, &agent));
        let unheard = lock(&forgets.0);
        assert_eq!((unheard.len(), unheard.back().copied()), (UNHEARD_MAX, Some(files - 1)));
    }
}
