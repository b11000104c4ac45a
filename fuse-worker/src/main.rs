//! The worker's process: the two C symbols that fuser's traffic goes through, and nothing else.

#![warn(clippy::print_stdout, clippy::print_stderr)]

use fuse_worker::{session, transport};
use libc::{c_int, c_void, iovec, size_t, ssize_t};
use link::worker::LINK_FD;
use rustix::io::FdFlags;
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::process::ExitCode;

fn main() -> ExitCode {
    startup::begin("fuse-worker");
    // SAFETY: nothing is dereferenced; both symbols' object must be part of the link.
    std::hint::black_box((read as *const (), writev as *const ()));
    // SAFETY: nothing else of this process has descriptors yet: it is the agent's socket, or none, which the call says.
    let link = unsafe { BorrowedFd::borrow_raw(LINK_FD) };
    if rustix::io::fcntl_setfd(link, FdFlags::CLOEXEC).is_err() {
        let what = format!("started by hand? It expects the agent's socket as descriptor {LINK_FD}.");
        startup::log::fail("fuse-worker", &what);
        return ExitCode::from(2);
    }
    // SAFETY: the descriptor is open (checked), inherited for this purpose, and owned by no other value.
    match session::run(unsafe { OwnedFd::from_raw_fd(LINK_FD) }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            startup::log::fail("fuse-worker", &why);
            ExitCode::FAILURE
        }
    }
}

/// libc's `read`, but for the session's descriptor, which the transport reads.
///
/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t {
    match transport::of(fd) {
        // SAFETY: forwarded as it came.
        None => unsafe { libc::syscall(libc::SYS_read, fd, buffer, len) as ssize_t },
        Some(transport) => {
            // SAFETY: fuser's read buffer: initialised, `len` bytes, borrowed for this call.
            finish(transport.read(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), len) }))
        }
    }
}

/// libc's `writev`, but for the session's descriptor.
///
/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    match transport::of(fd) {
        // SAFETY: forwarded as it came.
        None => unsafe { libc::syscall(libc::SYS_writev, fd, parts, count) as ssize_t },
        Some(transport) => {
            // SAFETY: IoSlice has the layout of iovec; fuser passes `count` of them, valid for this call.
            finish(
                transport.write(unsafe {
                    std::slice::from_raw_parts(parts.cast::<IoSlice<'_>>(), count as usize)
                }),
            )
        }
    }
}

fn finish(result: Result<usize, i32>) -> ssize_t {
    match result {
        Ok(len) => len as ssize_t,
        Err(errno) => {
            // SAFETY: the calling thread's own errno.
            unsafe { *libc::__errno_location() = errno };
            -1
        }
    }
}
