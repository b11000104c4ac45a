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

    /// Each word has a length that the compiler knows: a WRITE has 131,072 of them, and a call for each cost a quarter of what the
    /// agent does for it.
    #[inline(always)]
    fn load_as(&self, offset: usize, out: &mut [u8], ordering: Ordering) {
        let word = |at: usize| self.u64(at).load(ordering).to_ne_bytes();
        let mut at = offset;
        let (words, rest) = out.as_chunks_mut::<8>();
        for whole in words {
            *whole = word(at);
            at += 8;
        }
        if !rest.is_empty() {
            rest.copy_from_slice(&word(at)[..rest.len()]);
        }
    }

    #[inline(always)]
    fn store_as(&self, offset: usize, data: &[u8], ordering: Ordering) {
        let store = |at: usize, word: [u8; 8]| self.u64(at).store(u64::from_ne_bytes(word), ordering);
        let mut at = offset;
        let (words, rest) = data.as_chunks::<8>();
        for whole in words {
            store(at, *whole);
            at += 8;
        }
        if !rest.is_empty() {
            let mut padded = [0; 8];
            padded[..rest.len()].copy_from_slice(rest);
            store(at, padded);
        }
    }
}
