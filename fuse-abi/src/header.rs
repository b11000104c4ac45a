//! What each request and each answer begins with.

use crate::layout;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `FUSE_INT_REQ_BIT` of `fs/fuse/fuse_i.h`: ids of requests are even, and with this bit the id is the INTERRUPT's of that
/// request. (No part of the UAPI header; fuser answers INTERRUPT with ENOSYS and never needs it.)
pub const INT_REQ_BIT: u64 = 1;

/// `FUSE_MIN_READ_BUFFER` (7.1): the kernel refuses a read(2) of the device into fewer bytes. (fuser exports it, but only
/// fuse-worker may import fuser.)
pub const MIN_READ_BUFFER: usize = 8192;

/// `struct fuse_in_header` (7.1; `total_extlen` since 7.38).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct InHeader {
    /// Of the whole request, bytes.
    pub len: u32,
    pub opcode: u32,
    /// The request's id, which no other request of the connection has.
    pub unique: u64,
    pub nodeid: u64,
    pub uid: u32,
    pub gid: u32,
    /// The caller's thread id in the PID namespace of the process that mounted; 0: not visible from there.
    pub pid: u32,
    /// Of extensions behind the body, in units of 8 bytes.
    pub total_extlen: u16,
    pub padding: u16,
}
layout!(InHeader, 40);

/// `struct fuse_out_header` (7.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct OutHeader {
    /// Of the whole answer, bytes.
    pub len: u32,
    /// 0 or a negative errno; of a notification its code.
    pub error: i32,
    /// The request's id; 0: a notification.
    pub unique: u64,
}
layout!(OutHeader, 16);

impl OutHeader {
    /// Of an answer or notification whose body has so many bytes.
    #[inline]
    pub fn new(body_bytes: usize, error: i32, unique: u64) -> Self {
        Self { len: (Self::BYTES + body_bytes) as u32, error, unique }
    }
}
