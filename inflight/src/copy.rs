//! Copies into and out of the shared memory, word by word: the other side may write meanwhile, which must not be undefined.

use crate::memory::Memory;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

impl Memory {
    pub(super) fn load(&self, offset: usize, out: &mut [u8]) {
        self.load_as(offset, out, Relaxed);
    }

    /// The last word is padded with zeros.
    pub(super) fn store(&self, offset: usize, data: &[u8]) {
        self.store_as(offset, data, Relaxed);
    }

    /// What is loaded after this is no older than any of these words, if they were stored by [`Self::store_after`].
    pub(super) fn load_before(&self, offset: usize, out: &mut [u8]) {
        self.load_as(offset, out, Acquire);
    }

    /// As [`Self::store`]; whoever loads one of the words by [`Self::load_before`] sees what was stored before this.
    pub(super) fn store_after(&self, offset: usize, data: &[u8]) {
        self.store_as(offset, data, Release);
    }

    fn load_as(&self, offset: usize, out: &mut [u8], ordering: Ordering) {
        for (i, chunk) in out.chunks_mut(8).enumerate() {
            let word = self.u64(offset + i * 8).load(ordering).to_ne_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    fn store_as(&self, offset: usize, data: &[u8], ordering: Ordering) {
        for (i, chunk) in data.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.u64(offset + i * 8).store(u64::from_ne_bytes(word), ordering);
        }
    }
}
