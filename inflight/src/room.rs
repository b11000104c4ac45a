//! How large the requests of a connection may be, and with that where its staging buffers lie.

use super::{BYTES, STAGE_BYTES, STAGES, STAGES_AT};

/// Buffers of a memory that has room for writes. More threads do not read a device at once, but each WRITE that waits
/// keeps its buffer, and while all of them wait nothing is read.
pub(crate) const LARGE_STAGES: usize = 16;
/// Longest WRITE that they hold, bytes; header and `fuse_write_in` lie in the page before the next buffer.
const WRITE_BYTES_MAX: usize = 1 << 20;
pub(crate) const LARGE_STAGE_BYTES: usize = WRITE_BYTES_MAX + 4096;
/// Behind everything that the other memory has, which ends with a page.
const LARGE_STAGES_AT: usize = BYTES;
const LARGE_BYTES: usize = LARGE_STAGES_AT + LARGE_STAGES * LARGE_STAGE_BYTES;
const _: () = assert!(LARGE_STAGES <= STAGES, "their words lie where those of the small buffers do");
const _: () = assert!(LARGE_STAGES_AT.is_multiple_of(4096) && LARGE_STAGE_BYTES.is_multiple_of(4096));

/// What the requests of a connection need room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// No request is longer than a path.
    ReadOnly,
    /// WRITEs of up to 1 MiB. The small staging buffers are there, and are not used.
    ReadWrite,
}

impl Room {
    /// By the size of the memory file. One that has neither size is refused when it is mapped with this room's.
    pub(crate) fn of(file_bytes: u64) -> Self {
        if file_bytes == LARGE_BYTES as u64 { Self::ReadWrite } else { Self::ReadOnly }
    }

    /// Of the whole memory.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::ReadOnly => BYTES,
            Self::ReadWrite => LARGE_BYTES,
        }
    }

    pub(crate) const fn stages(self) -> usize {
        match self {
            Self::ReadOnly => STAGES,
            Self::ReadWrite => LARGE_STAGES,
        }
    }

    pub(crate) const fn stage_bytes(self) -> usize {
        match self {
            Self::ReadOnly => STAGE_BYTES,
            Self::ReadWrite => LARGE_STAGE_BYTES,
        }
    }

    /// Offset of the first buffer; the others follow without a gap.
    pub(crate) const fn stages_at(self) -> usize {
        match self {
            Self::ReadOnly => STAGES_AT,
            Self::ReadWrite => LARGE_STAGES_AT,
        }
    }

    pub(crate) fn stage_at(self, stage: usize) -> usize {
        assert!(stage < self.stages(), "callers got the number from acquire_stage, or checked it");
        self.stages_at() + stage * self.stage_bytes()
    }
}
