//! Ioctls of the FUSE device that register passthrough files (7.40). fuser makes them in the process that serves, whose
//! privileges do not suffice: here the broker does.

use crate::layout;
use std::ffi::c_ulong;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `FUSE_DEV_IOC_MAGIC`.
const MAGIC: c_ulong = 229;

/// `_IOW` of `include/uapi/asm-generic/ioctl.h`, for a number of ours and an argument of so many bytes.
const fn iow(number: c_ulong, bytes: usize) -> c_ulong {
    1 << 30 | (bytes as c_ulong) << 16 | MAGIC << 8 | number
}

/// `FUSE_DEV_IOC_BACKING_OPEN`: takes a [`BackingMap`], returns a backing id, which is positive.
pub const BACKING_OPEN: c_ulong = iow(1, BackingMap::BYTES);
/// `FUSE_DEV_IOC_BACKING_CLOSE`: takes a pointer to a backing id.
pub const BACKING_CLOSE: c_ulong = iow(2, size_of::<u32>());
const _: () = assert!(BACKING_OPEN == 0x4010_e501 && BACKING_CLOSE == 0x4004_e502);

/// `struct fuse_backing_map` (7.40).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BackingMap {
    /// Of the file, open for reading.
    pub fd: i32,
    pub flags: u32,
    pub padding: u64,
}
layout!(BackingMap, 16);

impl BackingMap {
    pub fn new(fd: i32) -> Self {
        Self { fd, ..Self::default() }
    }
}
