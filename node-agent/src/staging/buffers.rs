//! Memory for the bytes of requests, used again: pages that are given back and taken anew cost more than the copy into them.

use crate::lock::lock;
use std::sync::Mutex;

/// So many of a node are kept, whatever the number of its volumes.
const KEPT: usize = 8;

#[derive(Default)]
pub(super) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// Of this length at least; what is in it is of before. (Cut off, it would be filled with zeros once more for the next one.)
    pub(super) fn take(&self, len: usize) -> Vec<u8> {
        let mut buffer = lock(&self.0).pop().unwrap_or_default();
        buffer.resize(len.max(buffer.len()), 0);
        buffer
    }

    pub(super) fn give_back(&self, buffer: Vec<u8>) {
        let mut kept = lock(&self.0);
        if kept.len() < KEPT {
            kept.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_are_kept_and_each_is_as_long_as_is_asked_for() {
        let buffers = Buffers::default();
        for len in [10, 1 << 20, 3] {
            let buffer = buffers.take(len);
            assert!(buffer.len() >= len);
            buffers.give_back(buffer);
        }
        assert!(buffers.take(5).capacity() >= 1 << 20, "it is the one of before");
        (0..100).for_each(|_| buffers.give_back(vec![0; 8]));
        assert_eq!(lock(&buffers.0).len(), KEPT);
    }
}
