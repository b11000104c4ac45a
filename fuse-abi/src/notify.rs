//! Notifications: what a worker tells the kernel unasked. fuser's `Notifier` writes to the device that fuser was given,
//! which is not the connection's here.

use crate::layout;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `FUSE_NOTIFY_INVAL_INODE` of `enum fuse_notify_code` (7.12).
pub const INVAL_INODE: i32 = 2;

/// `struct fuse_notify_inval_inode_out` (7.12).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct NotifyInvalInodeOut {
    /// A node id.
    pub ino: u64,
    /// Bytes of pages that go; before the first one: the attributes only.
    pub off: i64,
    pub len: i64,
}
layout!(NotifyInvalInodeOut, 24);
