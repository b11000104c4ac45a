//! What a worker tells the kernel of an inode and of a name. fuser cannot be used for it: it writes `nodeid = attr.ino`
//! into entry replies, which the kernel keeps apart.

use crate::layout;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `struct fuse_attr` (7.9; `flags` since 7.32).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Attr {
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Of 512 bytes.
    pub blocks: u64,
    /// Seconds since 1970. The kernel's header has no sign here, and the kernel reads one.
    pub atime: i64,
    pub mtime: i64,
    pub ctime: i64,
    pub atimensec: u32,
    pub mtimensec: u32,
    pub ctimensec: u32,
    /// Type and permissions.
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub blksize: u32,
    pub flags: u32,
}
layout!(Attr, 88);

/// `struct fuse_attr_out` (7.9): the answer to GETATTR.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct AttrOut {
    /// How long the kernel may believe it, seconds and nanoseconds.
    pub attr_valid: u64,
    pub attr_valid_nsec: u32,
    pub dummy: u32,
    pub attr: Attr,
}
layout!(AttrOut, 104);

/// `struct fuse_entry_out` (7.9): the answer to LOOKUP.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct EntryOut {
    /// 0: there is no such name, for as long as `entry_valid`.
    pub nodeid: u64,
    /// Of a node id that is used again.
    pub generation: u64,
    /// How long the kernel may believe the name, and the attributes: seconds, nanoseconds below.
    pub entry_valid: u64,
    pub attr_valid: u64,
    pub entry_valid_nsec: u32,
    pub attr_valid_nsec: u32,
    pub attr: Attr,
}
layout!(EntryOut, 128);
