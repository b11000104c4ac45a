//! The buffers that the kernel copies requests into. A request that a worker read but had not recorded when it died is
//! still here.

use super::{Inflight, STAGE_WORDS_AT};
use crate::sync::AtomicU64;
use fuse_abi::InHeader;
use fuse_abi::header::MIN_READ_BUFFER;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Buffers of a memory for a connection that is only read; as many words there are for buffers in any memory.
pub(crate) const STAGES: usize = 64;
/// The kernel demands max(8192, 80 + max_write) bytes (fuse_dev_do_read). A read-only connection negotiates a
/// max_write of 4096, and no request of one is longer than a path; what would be is failed by the kernel itself.
pub(crate) const STAGE_BYTES: usize = MIN_READ_BUFFER;
pub(super) const WORD_BYTES: usize = 64;

const USED: usize = 0; // 1 while a thread owns the buffer
const COMMITTED: usize = 8; // unique of the last request that needs nothing more from the buffer
const PIN: usize = 16; // unique of a large request that stays in the buffer until it is answered

impl Inflight {
    /// How many buffers there are: as many threads may read the device, together with the large requests that wait.
    pub fn stages(&self) -> usize {
        self.room.stages()
    }

    /// Of one buffer: no request is longer.
    pub fn stage_bytes_max(&self) -> usize {
        self.room.stage_bytes()
    }

    /// A buffer for this thread, to be kept until [`Inflight::release_stage`]; None: all are taken.
    pub fn acquire_stage(&self) -> Option<usize> {
        (0..self.stages()).find(|&stage| {
            let used = self.stage_word(stage, USED);
            if used.load(Relaxed) != 0 || used.compare_exchange(0, 1, AcqRel, Relaxed).is_err() {
                return false;
            }
            let free = self.unpin(stage);
            if !free {
                used.store(0, Release);
            }
            free
        })
    }

    pub fn release_stage(&self, stage: usize) {
        self.stage_word(stage, USED).store(0, Release);
    }

    /// False while a large request that has not been answered occupies the buffer: take another one.
    pub fn stage_is_free(&self, stage: usize) -> bool {
        self.unpin(stage)
    }

    /// Makes the buffer's pages resident, which the kernel's copy relies on. Once per buffer and process.
    pub fn populate_stage(&self, stage: usize, with_madvise: bool) {
        self.memory.populate(self.room.stage_at(stage), self.stage_bytes_max(), with_madvise);
    }

    /// Where the kernel shall put the next request: [`Self::stage_bytes_max`] bytes, valid as long as `self`.
    pub fn stage_pointer(&self, stage: usize) -> *mut u8 {
        self.memory.pointer(self.room.stage_at(stage), self.stage_bytes_max())
    }

    /// The buffer's request is recorded or needs no record: the buffer may be filled again.
    pub fn commit_stage(&self, stage: usize, unique: u64) {
        self.stage_word(stage, COMMITTED).store(unique, Release);
    }

    /// Copies the front of the buffer.
    pub fn stage_bytes(&self, stage: usize, out: &mut [u8]) {
        assert!(out.len() <= self.stage_bytes_max(), "callers check lengths against the buffer");
        self.memory.load(self.room.stage_at(stage), out);
    }

    pub fn stage_header(&self, stage: usize) -> InHeader {
        let mut header = [0; InHeader::BYTES];
        self.stage_bytes(stage, &mut header);
        InHeader::from_bytes(&header)
    }

    pub(super) fn pin_stage(&self, stage: usize, unique: u64) {
        self.stage_word(stage, PIN).store(unique, Release);
    }

    /// For collect: a buffer that the dead worker owned, and the last request that needs nothing more from it.
    pub(super) fn stage_left(&self, stage: usize) -> Option<u64> {
        let owned = self.stage_word(stage, USED).load(Acquire) != 0;
        owned.then(|| self.stage_word(stage, COMMITTED).load(Acquire))
    }

    fn unpin(&self, stage: usize) -> bool {
        let pin = self.stage_word(stage, PIN);
        let unique = pin.load(Acquire);
        if unique != 0 && self.find(unique).is_some() {
            return false;
        }
        pin.store(0, Relaxed);
        true
    }

    fn stage_word(&self, stage: usize, field: usize) -> &AtomicU64 {
        assert!(stage < self.stages(), "callers got the number from acquire_stage");
        self.memory.u64(STAGE_WORDS_AT + stage * WORD_BYTES + field)
    }
}
