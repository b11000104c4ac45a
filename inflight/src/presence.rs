//! The words of a presence bitmap, which agent and worker share for each cache file: bit k of little-endian u64 words is
//! set after block k may be read. The memory that they lie in is the agent's (`cache::data`).

use crate::sync::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

/// By the agent, after the blocks' bytes are in the cache file.
pub fn add_present(word: &AtomicU64, bits: u64) {
    word.fetch_or(bits.to_le(), Release);
}

/// By a worker, before it reads the blocks' bytes: it sees with the bit what was written before it.
pub fn present(word: &AtomicU64) -> u64 {
    u64::from_le(word.load(Acquire))
}
