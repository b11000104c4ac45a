//! INIT: the first request of a connection, and its answer. fuser exports the flags (`fuser::InitFlags`), not the layouts.

use crate::layout;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `struct fuse_init_in` (7.36; before, it ended with `flags`: 16 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct InitIn {
    pub major: u32,
    pub minor: u32,
    /// Bytes.
    pub max_readahead: u32,
    /// The lower half of the flags that the kernel offers.
    pub flags: u32,
    /// The upper half, if `flags` has `FUSE_INIT_EXT`.
    pub flags2: u32,
    pub unused: [u32; 11],
}
layout!(InitIn, 64);

/// `struct fuse_init_out` (7.23; `max_pages` since 7.28, `flags2` since 7.36, `max_stack_depth` since 7.40).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct InitOut {
    pub major: u32,
    pub minor: u32,
    /// Bytes.
    pub max_readahead: u32,
    /// The lower half of the flags that the answer agrees to.
    pub flags: u32,
    /// Requests that the kernel sends ahead.
    pub max_background: u16,
    pub congestion_threshold: u16,
    /// Of one WRITE, bytes.
    pub max_write: u32,
    /// Nanoseconds.
    pub time_gran: u32,
    /// Of one request or answer.
    pub max_pages: u16,
    pub map_alignment: u16,
    /// The upper half, if `flags` has `FUSE_INIT_EXT`.
    pub flags2: u32,
    pub max_stack_depth: u32,
    pub unused: [u32; 6],
}
layout!(InitOut, 64);
