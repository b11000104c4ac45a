//! The worker's process: the two C symbols that fuser's traffic goes through, and nothing else.

#![warn(clippy::print_stdout, clippy::print_stderr)]

use fuse_worker::{launch, session, transport};
use libc::{c_int, c_void, iovec, size_t, ssize_t};
use std::io::IoSlice;
use std::process::ExitCode;

fn main() -> ExitCode {
    startup::begin("fuse-worker");
    // SAFETY: nothing is dereferenced; both symbols' object must be part of the link.
    std::hint::black_box((read as *const (), writev as *const ()));
    let link = match launch::begin(std::env::args().skip(1)) {
        Ok(link) => link,
        Err(why) => {
            startup::log::fail("fuse-worker", &why);
            return ExitCode::from(2);
        }
    };
    match session::run(link) {
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
