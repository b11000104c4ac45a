//! A file that has come as a whole is held against the checksum that its store tells.
//!
//! Readers have had its blocks by then: those that read wrong ones have read them. What this sees to is that the node
//! does not go on with them.

use super::Reason;
use super::file::File;
use super::pool::call_returned;
use super::sums::{Checksum, Sums};
use super::verify::read_exact_at;
use crc_fast::{CrcAlgorithm, Digest};
use std::ops::Range;
use std::sync::Arc;

/// Read at once when a file is added up again.
const STEP_BYTES: u64 = 4 << 20;

impl File {
    /// `sums`: of what this instance fetched of it.
    pub(crate) fn judge(self: &Arc<Self>, sums: Sums) {
        let file = self.clone();
        self.engine.runtime.spawn(inflight::carry(async move {
            if let Some((told, found)) = file.told_and_found(sums).await {
                file.settle_checksum(told, found);
            }
        }));
    }

    /// None: nothing can be compared.
    async fn told_and_found(self: &Arc<Self>, sums: Sums) -> Option<(Checksum, u64)> {
        let fetch = self.lock().fetch.clone();
        let told = match fetch.checksum().await {
            Ok(told) => told?,
            Err(error) => {
                tracing::debug!(file = self.id(), %error, "its checksum is not known");
                return None;
            }
        };
        let kept = match self.sums {
            Some(algorithm) if algorithm == told.algorithm => sums.whole(algorithm, self.key().size).await,
            _ => None,
        };
        let found = match kept {
            Some(found) => found,
            None => self.add_up(told.algorithm).await?,
        };
        Some((told, found))
    }

    /// Reads it from end to end. None: it cannot be read, or is gone.
    async fn add_up(self: &Arc<Self>, algorithm: CrcAlgorithm) -> Option<u64> {
        let _turn = self.engine.verifying.clone().acquire_owned().await.ok()?;
        let (mut digest, mut position) = (Digest::new(algorithm), 0);
        while position < self.key().size {
            let root = self.placed().filter(|_| !self.is_gone())?.clone();
            let bytes = position..(position + STEP_BYTES).min(self.key().size);
            position = bytes.end;
            let file = self.clone();
            let at = root.clone();
            digest = root.run(move || file.add(&at, bytes, digest)).await??;
        }
        Some(digest.finalize())
    }

    fn add(&self, root: &super::root::Root, bytes: Range<u64>, mut digest: Digest) -> Option<Digest> {
        let data = self.existing_data_fd(root).ok()?;
        call_returned();
        let block_bytes = self.block_bytes();
        let mut buffer = vec![0; block_bytes as usize];
        let mut position = bytes.start;
        while position < bytes.end {
            let piece = &mut buffer[..block_bytes.min(bytes.end - position) as usize];
            read_exact_at(&data, piece, position).ok()?;
            call_returned();
            digest.update(piece);
            position += piece.len() as u64;
        }
        Some(digest)
    }

    fn settle_checksum(&self, told: Checksum, found: u64) {
        if found == told.value {
            return;
        }
        let again = self.engine.wrong.again(self.key(), found);
        self.engine.observer.changed_on_its_way();
        let fetch = self.lock().fetch.clone();
        fetch.came_wrong(again);
        if !again {
            self.engine.drop_file(self.id(), Reason::Corrupted);
        }
    }
}
