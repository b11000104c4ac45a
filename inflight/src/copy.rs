//! Copies into and out of the shared memory, word by word: the other side may write meanwhile, which must not be undefined.

use crate::memory::Memory;
use std::sync::atomic::Ordering::Relaxed;

impl Memory {
    pub(super) fn load(&self, offset: usize, out: &mut [u8]) {
        for (i, chunk) in out.chunks_mut(8).enumerate() {
            let word = self.u64(offset + i * 8).load(Relaxed).to_ne_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    /// The last word is padded with zeros.
    pub(super) fn store(&self, offset: usize, data: &[u8]) {
        for (i, chunk) in data.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.u64(offset + i * 8).store(u64::from_ne_bytes(word), Relaxed);
        }
    }
}
