//! The one place where a failure becomes an errno.

use link::Cause;
use startup::log::say;

/// Why a request is not answered with data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    Cause(Cause),
    /// This file system does not implement the operation; for some the kernel remembers and never asks again.
    Unsupported,
    ReadOnly,
    NameTooLong,
    NotASymlink,
    NoAttribute,
    /// The caller's buffer is too small for the value.
    TooSmall,
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Self {
        Self::Cause(cause)
    }
}

impl From<cache::meta::MetaError> for Failure {
    fn from(error: cache::meta::MetaError) -> Self {
        use cache::meta::MetaError;
        match error {
            MetaError::BadName => Self::NameTooLong,
            MetaError::UnknownInode(_) => Self::Cause(Cause::Stale),
            other => {
                say(&format!("fuse-worker: metadata store: {other}"));
                Self::Cause(Cause::Internal)
            }
        }
    }
}

pub fn errno(failure: Failure) -> i32 {
    match failure {
        Failure::Cause(Cause::NotFound) => libc::ENOENT,
        Failure::Cause(Cause::Denied) => libc::EACCES,
        Failure::Cause(Cause::Stale) => libc::ESTALE,
        Failure::Cause(Cause::Unavailable) => libc::EIO,
        Failure::Cause(Cause::NotADirectory) => libc::ENOTDIR,
        Failure::Cause(Cause::Internal) => libc::EIO,
        Failure::Unsupported => libc::ENOSYS,
        Failure::ReadOnly => libc::EROFS,
        Failure::NameTooLong => libc::ENAMETOOLONG,
        Failure::NotASymlink => libc::EINVAL,
        Failure::NoAttribute => libc::ENODATA,
        Failure::TooSmall => libc::ERANGE,
    }
}
