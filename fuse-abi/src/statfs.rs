//! The answer to STATFS. fuser's `ReplyStatfs` answers through the device that fuser was given, which is not the
//! connection's here.

use crate::layout;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `struct fuse_kstatfs` (7.4), which is all of `struct fuse_statfs_out`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Kstatfs {
    /// In units of `frsize`.
    pub blocks: u64,
    pub bfree: u64,
    pub bavail: u64,
    pub files: u64,
    pub ffree: u64,
    pub bsize: u32,
    /// Of the longest name, bytes.
    pub namelen: u32,
    pub frsize: u32,
    pub padding: u32,
    pub spare: [u32; 6],
}
layout!(Kstatfs, 80);
