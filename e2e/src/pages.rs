//! Keeps page cache where it is: a machine that reclaims memory on its own must not decide what "warm" means.

use anyhow::{Context, Result};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

/// The pages of one file, locked in memory until dropped.
#[derive(Debug)]
pub struct Pinned {
    address: *mut libc::c_void,
    len: usize,
}

impl Pinned {
    /// Reads the file in where it is not.
    pub fn new(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let len = file.metadata()?.len() as usize;
        // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory; nothing reads it.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if address == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error()).with_context(|| format!("map {}", path.display()));
        }
        let pinned = Self { address, len };
        // SAFETY: the range was mapped above.
        if unsafe { libc::mlock(pinned.address, pinned.len) } != 0 {
            return Err(std::io::Error::last_os_error()).with_context(|| format!("lock {}", path.display()));
        }
        Ok(pinned)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping and hands out no reference to it.
        unsafe { libc::munmap(self.address, self.len) };
    }
}
