//! The answer to GETXATTR and LISTXATTR that ask for a length. fuser's `ReplyXattr` answers through the device that fuser was
//! given, which is not the connection's here.

use crate::layout;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `struct fuse_getxattr_out` (7.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct GetxattrOut {
    /// Bytes.
    pub size: u32,
    pub padding: u32,
}
layout!(GetxattrOut, 8);
