//! The one place where a failure becomes an errno.

use link::Cause;
use link::writable::Wrong;
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
    /// A flag or argument that this file system does not know.
    Invalid,
    /// What the agent says of an operation on a volume that can be written to.
    Wrong(Wrong),
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
        Failure::Wrong(Wrong::Cause(cause)) => errno(cause.into()),
        Failure::Wrong(Wrong::Exists) => libc::EEXIST,
        Failure::Wrong(Wrong::NotEmpty) => libc::ENOTEMPTY,
        Failure::Wrong(Wrong::IsDirectory) => libc::EISDIR,
        Failure::Wrong(Wrong::Impossible) | Failure::Invalid => libc::EINVAL,
        Failure::Wrong(Wrong::Elsewhere) => libc::EXDEV,
        Failure::Wrong(Wrong::NameTooLong) => libc::ENAMETOOLONG,
        Failure::Wrong(Wrong::TooLarge) => libc::EFBIG,
        Failure::Wrong(Wrong::NotPermitted) => libc::EPERM,
        Failure::Wrong(Wrong::NoSpace) => libc::ENOSPC,
        // As of a file server on which another client has replaced the file.
        Failure::Wrong(Wrong::Conflict) => libc::ESTALE,
        Failure::Wrong(Wrong::ReadOnly) => libc::EROFS,
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
