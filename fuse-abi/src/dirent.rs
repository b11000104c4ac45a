//! Entries of a listing. Each is followed by its name and padded with zeros to [`ALIGN`]. fuser's entries have its node ids
//! (see `attr`).

use crate::{EntryOut, layout};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `FUSE_DIRENT_ALIGN`, bytes.
pub const ALIGN: usize = 8;

/// `struct fuse_dirent` (7.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Dirent {
    pub ino: u64,
    /// Where a later READDIR goes on.
    pub off: u64,
    pub namelen: u32,
    /// `DT_*` of readdir(3).
    pub kind: u32,
}
layout!(Dirent, 24);

/// `struct fuse_direntplus` (7.21). An entry whose node id is 0 counts as no lookup.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Direntplus {
    pub entry_out: EntryOut,
    pub dirent: Dirent,
}
layout!(Direntplus, 152);
