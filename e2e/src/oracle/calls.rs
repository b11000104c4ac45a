//! The system calls themselves, without the retries that the standard library hides: an EINTR must be seen.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_len(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

pub(super) fn open(path: &Path, flags: libc::c_int) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    // SAFETY: `path` is a NUL-terminated string that lives through the call.
    let fd = check(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) })?;
    // SAFETY: open returned this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Unlike a drop it reports the error of close.
pub(super) fn close(fd: OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is given up by `into_raw_fd` and closed exactly once.
    check(unsafe { libc::close(fd.into_raw_fd()) }).map(drop)
}

pub(super) fn pread(fd: &OwnedFd, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    // SAFETY: the pointer and the length describe a live, writable buffer.
    check_len(unsafe {
        libc::pread(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), offset as libc::off_t)
    })
}

pub(super) struct Stat {
    pub(super) ino: u64,
    pub(super) size: u64,
    pub(super) directory: bool,
}

impl From<libc::stat> for Stat {
    fn from(s: libc::stat) -> Self {
        Self { ino: s.st_ino, size: s.st_size as u64, directory: s.st_mode & libc::S_IFMT == libc::S_IFDIR }
    }
}

pub(super) fn lstat(path: &Path) -> io::Result<Stat> {
    let path = c_path(path)?;
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the path is NUL-terminated; the kernel fills `stat` when it returns 0.
    check(unsafe { libc::lstat(path.as_ptr(), stat.as_mut_ptr()) })?;
    // SAFETY: lstat succeeded, so all of it is initialised.
    Ok(unsafe { stat.assume_init() }.into())
}

pub(super) fn fstat(fd: &OwnedFd) -> io::Result<Stat> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the descriptor is open; the kernel fills `stat` when it returns 0.
    check(unsafe { libc::fstat(fd.as_raw_fd(), stat.as_mut_ptr()) })?;
    // SAFETY: fstat succeeded, so all of it is initialised.
    Ok(unsafe { stat.assume_init() }.into())
}

/// Fills `buffer` with directory records; 0: the end.
pub(super) fn getdents(fd: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the pointer and the length describe a live, writable buffer.
    let n = unsafe { libc::syscall(libc::SYS_getdents64, fd.as_raw_fd(), buffer.as_mut_ptr(), buffer.len()) };
    check_len(n as libc::ssize_t)
}

/// Name and type of every record in what [`getdents`] returned.
pub(super) fn records(mut bytes: &[u8]) -> Vec<(Vec<u8>, u8)> {
    // struct linux_dirent64: ino u64, off i64, reclen u16, type u8, name, NUL.
    const NAME: usize = 19;
    let mut all = Vec::new();
    while bytes.len() > NAME {
        let length = usize::from(u16::from_ne_bytes([bytes[16], bytes[17]])).clamp(NAME, bytes.len());
        let name = bytes[NAME..length].split(|b| *b == 0).next().unwrap_or_default();
        all.push((name.to_vec(), bytes[18]));
        bytes = &bytes[length..];
    }
    all
}

/// Lets the next read of this file ask the file system again.
pub(super) fn drop_cache(fd: &OwnedFd) {
    // SAFETY: no memory is passed. Advice only: an error changes nothing for the caller.
    unsafe { libc::posix_fadvise(fd.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// A read-only shared mapping of a part of a file.
pub(super) struct Mapping {
    address: *mut libc::c_void,
    len: usize,
}

// SAFETY: the mapping is read-only memory that belongs to this value alone.
unsafe impl Send for Mapping {}

impl Mapping {
    pub(super) fn new(fd: &OwnedFd, offset: u64, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { address, len }) }
    }

    /// Touching it may raise SIGBUS, which `signals` counts and survives.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping lives as long as self, is readable, and objects under test do not change.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.len) }
    }

    /// Lets the next touch fault again.
    pub(super) fn forget_pages(&self) {
        // SAFETY: DONTNEED on a shared file mapping drops page-table entries only.
        unsafe { libc::madvise(self.address, self.len, libc::MADV_DONTNEED) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping and no borrow of it is left.
        unsafe { libc::munmap(self.address, self.len) };
    }
}
