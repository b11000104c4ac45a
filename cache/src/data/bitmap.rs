//! Which blocks of a file are there, as workers map it.

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

/// Blocks that a bitmap speaks of at most (128 GiB of the usual blocks): what a worker maps has a bound, whatever size
/// an object claims to have. Of blocks beyond its end a worker asks.
const BLOCKS_MAX: u64 = 1 << 20;

/// The presence bitmap: bit k of little-endian u64 words is set (Release) after block k may be read. Its pages take
/// memory when a bit in them is set.
pub(crate) struct Shared {
    map: MmapRaw,
    fd: OwnedFd,
    words: usize,
}

impl Shared {
    /// Of a file of so many blocks: nothing is there.
    pub(crate) fn new(blocks: u64) -> io::Result<Self> {
        // At least one word, because an empty file cannot be mapped.
        let words = blocks.min(BLOCKS_MAX).div_ceil(64).max(1) as usize;
        let fd =
            rustix::fs::memfd_create("millpond-presence", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, (words * 8) as u64)?;
        let map = MmapOptions::new().map_raw(&fd)?;
        // Our mapping is made before the seals: it stays the only writable one, and the size never changes, so that
        // neither side can be given a SIGBUS by the other.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        // Since Linux 5.1; an older kernel is merely more trusting.
        let _ = rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE);
        let _ = rustix::fs::fcntl_add_seals(&fd, SealFlags::SEAL);
        Ok(Self { map, fd, words })
    }

    /// The blocks from `64 * index` on whose bits are set in `bits` may be read: only after their bytes are written
    /// and, if an earlier run wrote them, verified.
    pub(crate) fn add(&self, index: u64, bits: u64) {
        if let Some(word) = usize::try_from(index).ok().and_then(|index| self.atomics().get(index)) {
            inflight::add_present(word, bits);
        }
    }

    /// A descriptor that a worker can map for reading and no process can write.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.fd.as_fd().try_clone_to_owned()
    }

    // Needed because the bitmap is shared with another process: atomics over mapped memory have no safe constructor.
    fn atomics(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, `words * 8` bytes long (ftruncate, then sealed against shrinking), lives
        // as long as `self`, and is only ever accessed through atomics.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), self.words) }
    }
}

/// What a file without any block present shows to a worker.
pub(crate) fn nothing_present(blocks: u64) -> io::Result<OwnedFd> {
    Shared::new(blocks)?.descriptor()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_has_a_bound_and_takes_memory_only_where_something_is() {
        for blocks in [0, 1, 64, 65, BLOCKS_MAX, BLOCKS_MAX + 1, 1 << 51] {
            let shared = Shared::new(blocks).unwrap();
            let size = || rustix::fs::fstat(shared.descriptor().unwrap()).unwrap();
            assert_eq!(
                size().st_size as u64,
                blocks.clamp(1, BLOCKS_MAX).div_ceil(64) * 8,
                "{blocks} blocks"
            );
            assert_eq!(size().st_blocks, 0);
            shared.add(0, 1);
            shared.add(blocks / 64, 1 << 63);
            shared.add(u64::MAX, 1);
            assert!(size().st_blocks * 512 <= 2 * 4096);
        }
    }
}
