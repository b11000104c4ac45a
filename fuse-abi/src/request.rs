//! Bodies of requests, behind the header. fuser parses them, and does not tell all of what they say (the size that a READDIR
//! asks for); INTERRUPT must not get to it.

use crate::layout;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `struct fuse_interrupt_in` (7.7).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct InterruptIn {
    /// Of the request whose caller was signalled.
    pub unique: u64,
}
layout!(InterruptIn, 8);

/// `struct fuse_read_in` (7.9): READ, READDIR and READDIRPLUS.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ReadIn {
    pub fh: u64,
    pub offset: u64,
    /// Of the answer at most, bytes.
    pub size: u32,
    pub read_flags: u32,
    pub lock_owner: u64,
    pub flags: u32,
    pub padding: u32,
}
layout!(ReadIn, 40);

/// `struct fuse_write_in` (7.9); the bytes follow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct WriteIn {
    pub fh: u64,
    pub offset: u64,
    pub size: u32,
    pub write_flags: u32,
    pub lock_owner: u64,
    pub flags: u32,
    pub padding: u32,
}
layout!(WriteIn, 40);

/// In [`WriteIn::write_flags`] (7.31): whoever writes has no right to leave a file set-user-ID or set-group-ID.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;

/// `struct fuse_write_out` (7.1): the answer to WRITE.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct WriteOut {
    pub size: u32,
    pub padding: u32,
}
layout!(WriteOut, 8);

/// `struct fuse_create_in` (7.12); the name follows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct CreateIn {
    pub flags: u32,
    pub mode: u32,
    pub umask: u32,
    pub open_flags: u32,
}
layout!(CreateIn, 16);

/// `struct fuse_mkdir_in` (7.12); the name follows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct MkdirIn {
    pub mode: u32,
    pub umask: u32,
}
layout!(MkdirIn, 8);
