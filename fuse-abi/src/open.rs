//! The answer to OPEN and OPENDIR. fuser exports the flags as `FopenFlags`, and answers with a `BackingId` that it must have
//! asked the device for itself, which takes privileges; the file system below its adapter knows nothing of fuser.

use crate::layout;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// 7.2: past the page cache.
pub const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// 7.2: pages that the kernel has of the file stay.
pub const FOPEN_KEEP_CACHE: u32 = 1 << 1;
/// 7.28: the kernel may keep the listing.
pub const FOPEN_CACHE_DIR: u32 = 1 << 3;
/// 7.35: close(2) sends no FLUSH.
pub const FOPEN_NOFLUSH: u32 = 1 << 5;
/// 7.40: the kernel reads the backing file itself.
pub const FOPEN_PASSTHROUGH: u32 = 1 << 7;

/// `struct fuse_open_out` (7.1; `backing_id` since 7.40, padding before).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct OpenOut {
    /// The handle, which comes with each request for the open file.
    pub fh: u64,
    /// `FOPEN_*`: the constants of this file.
    pub open_flags: u32,
    /// Of [`crate::ioctl::BACKING_OPEN`], with [`FOPEN_PASSTHROUGH`].
    pub backing_id: u32,
}
layout!(OpenOut, 16);
