//! What outlives the process: records of small files, sidecars of larger ones. Runs on the root's threads.

use super::blocks::Blocks;
use super::engine::{Engine, Event};
use super::file::{Body, File};
use super::index::Rest;
use super::journal::Record;
use super::pool::lock_of_ours;
use super::root::Root;
use super::sidecar::{self, Image};
use std::sync::Arc;

/// Dead records that a journal may hold beyond as many as live ones.
const COMPACT_AT: u64 = 10_000;

impl File {
    /// The last block is there: from now on the file needs no bookkeeping. Called once, by the fetch that brought that
    /// block.
    pub(crate) fn completed(self: &Arc<Self>, root: &Root, blocks: &Blocks) {
        if blocks.unsaved > 0 && !self.is_gone() {
            let saved = if self.is_large() {
                let _one = lock_of_ours(&self.saving);
                root.write_sidecar(self.key(), self.id(), &sidecar::encode(&self.image(blocks)))
            } else {
                let record = Record {
                    id: self.id(),
                    key: (**self.key()).clone(),
                    crcs: blocks.known().crcs().into_boxed_slice(),
                };
                let mut journal = lock_of_ours(&root.journal);
                root.dir().and_then(|dir| journal.append(dir, &record))
            };
            if let Err(error) = saved {
                root.failed("save", &error, true);
            } else if self.is_gone() {
                // Evicted meanwhile: the sidecar must not stay behind.
                let _ = root.remove(self.key(), self.id(), self.is_large());
            }
        }
        {
            let mut index = self.engine.lock_index();
            let Some(entry) = index.entries.get_mut(&self.id()) else { return };
            entry.rest = Rest::Whole;
            entry.crcs = Box::default();
        }
        let sums = std::mem::take(&mut self.lock().sums);
        if sums.is_fetched && self.sums.is_some() {
            self.judge(sums);
        }
        self.engine.send(Event::Whole { key: self.key().clone(), file: self.id(), root: root.number });
    }

    pub(crate) fn wants_saving(&self) -> bool {
        matches!(&self.lock().body, Body::Partial(blocks) if blocks.unsaved > 0)
    }

    /// Replaces the sidecar if the file is partial and has changed.
    pub(crate) fn save_if_needed(&self) {
        let Some(root) = self.placed() else { return };
        if !self.is_large() || self.is_gone() || !root.is_writable() {
            return;
        }
        let _one = lock_of_ours(&self.saving);
        let image = {
            let mut state = self.lock();
            let Body::Partial(blocks) = &mut state.body else { return };
            if std::mem::take(&mut blocks.unsaved) == 0 {
                return;
            }
            self.image(blocks)
        };
        if let Err(error) = root.write_sidecar(self.key(), self.id(), &sidecar::encode(&image)) {
            root.failed("save", &error, true);
            if let Body::Partial(blocks) = &mut self.lock().body {
                blocks.unsaved += 1;
            }
        } else if self.is_gone() {
            let _ = root.remove(self.key(), self.id(), true);
        }
    }

    fn image(&self, blocks: &Blocks) -> Image {
        Image {
            id: self.id(),
            key: self.key().clone(),
            block_bytes: self.block_bytes(),
            known: blocks.known(),
        }
    }
}

impl Engine {
    /// Drops the records of files that have gone, where they are most of a root's journal. Runs on the root's threads.
    pub(crate) fn compact_journal(&self, root: &Root) {
        let files = self.lock_index().roots[usize::from(root.number)].files;
        let mut journal = lock_of_ours(&root.journal);
        if !root.is_writable() || journal.records < 2 * files + COMPACT_AT {
            return;
        }
        // Appends wait for the journal's lock, so a file that becomes whole meanwhile is recorded in the new one.
        let live = |id: u64| self.lock_index().entries.contains_key(&id);
        let compacted = root.dir().and_then(|dir| journal.compact(dir, live));
        if let Err(error) = compacted {
            root.failed("compact", &error, true);
        }
    }
}
