//! The kernel's side of a FUSE connection, as `include/uapi/linux/fuse.h` of Linux 6.9 (protocol 7.40) defines it: layouts
//! of messages, opcodes, codes and ioctls. Nothing here does I/O or decides anything.
//!
//! fuser defines the same and keeps it to itself (`fuser::ll` is private): it reads and answers requests as a whole, while
//! Millpond records requests in shared memory before fuser sees them and writes answers that fuser cannot. What fuser does
//! export and a part may import is used from there: `InitFlags` in fuse-worker. Names are the kernel's, without `fuse_`.

pub mod attr;
pub mod dirent;
pub mod header;
pub mod init;
pub mod ioctl;
pub mod notify;
pub mod opcode;
pub mod open;
pub mod request;
pub mod statfs;
pub mod xattr;

pub use attr::{Attr, AttrOut, EntryOut};
pub use dirent::{Dirent, Direntplus};
pub use header::{InHeader, OutHeader};
pub use init::{InitIn, InitOut};
pub use ioctl::BackingMap;
pub use notify::NotifyInvalInodeOut;
pub use open::OpenOut;
pub use request::{CreateIn, InterruptIn, MkdirIn, ReadIn, WRITE_KILL_SUIDGID, WriteIn, WriteOut};
pub use statfs::Kstatfs;
pub use xattr::GetxattrOut;

/// The bytes of messages, in the byte order of the machine, whose sizes are checked here against the kernel's.
macro_rules! layout {
    ($name:ident, $bytes:literal) => {
        const _: () = assert!(size_of::<$name>() == $bytes);

        impl $name {
            /// Size, bytes.
            pub const BYTES: usize = $bytes;

            #[inline]
            pub fn from_bytes(bytes: &[u8; $bytes]) -> Self {
                zerocopy::transmute!(*bytes)
            }

            #[inline]
            pub fn to_bytes(self) -> [u8; $bytes] {
                zerocopy::transmute!(self)
            }
        }
    };
}
pub(crate) use layout;
