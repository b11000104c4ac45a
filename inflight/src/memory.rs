//! One mapping of a connection's shared memory, read and written through atomics only: the other side may be a process
//! that has been taken over, so nothing here trusts a byte of it.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

#[derive(Debug)]
pub(super) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping lives as long as the value, stays at its address, and is accessed through atomics only.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// A memory file of exactly `bytes`, whose size no process can change any more: a worker that truncates it would end
/// the agent with SIGBUS.
pub(super) fn create(bytes: usize) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("millpond-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

impl Memory {
    /// Fails unless `fd` is a memory file of exactly `bytes` that cannot shrink.
    pub(super) fn map(fd: impl AsFd, bytes: usize) -> io::Result<Self> {
        let fd = fd.as_fd();
        let sealed = rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !sealed || rustix::fs::fstat(fd)?.st_size as usize != bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not a sealed memory file of this format's size",
            ));
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing; NORESERVE, for most of it is
        // never touched.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, bytes })
    }

    /// The address of `len` bytes at `offset`, for system calls that fill them.
    pub(super) fn pointer(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.bytes && len <= self.bytes - offset, "offsets are constants of the layout");
        // SAFETY: checked to stay inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    pub(super) fn u64(&self, offset: usize) -> &AtomicU64 {
        #[cfg(test)]
        crash::point();
        assert!(offset.is_multiple_of(8), "every 64-bit field of the layout is aligned");
        // SAFETY: in bounds (pointer), aligned (assert; the base is page aligned), valid for the life of self.
        unsafe { AtomicU64::from_ptr(self.pointer(offset, 8).cast()) }
    }

    pub(super) fn u32(&self, offset: usize) -> &AtomicU32 {
        #[cfg(test)]
        crash::point();
        assert!(offset.is_multiple_of(4), "every 32-bit field of the layout is aligned");
        // SAFETY: as for u64.
        unsafe { AtomicU32::from_ptr(self.pointer(offset, 4).cast()) }
    }

    /// Makes the pages resident and writable. A SIGKILL while the kernel copies a request into a page that is not
    /// makes that page fault fail, and the request with it (EIO for the application).
    pub(super) fn populate(&self, offset: usize, len: usize, with_madvise: bool) {
        let start = self.pointer(offset, len).cast();
        // SAFETY: the range lies inside the mapping; neither call changes its contents. Both are best effort: the
        // loop below is what kernels before 5.14 rely on.
        unsafe {
            if with_madvise {
                let _ = rustix::mm::madvise(start, len, Advice::LinuxPopulateWrite);
            }
            let _ = rustix::mm::mlock(start, len);
        }
        for page in (0..len).step_by(4096) {
            self.u64(offset + page).fetch_or(0, Relaxed);
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping; every reference into it borrows self. Unmapping cannot fail for a valid range.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Deaths for tests: a thread panics at its n-th access to shared memory, as a SIGKILL could end it there.
#[cfg(test)]
pub(super) mod crash {
    use std::cell::Cell;
    thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }
    pub(crate) struct Killed;

    /// Runs `f`, dying after `accesses` accesses; None: it died.
    pub(crate) fn within<T>(accesses: u32, f: impl FnOnce() -> T) -> Option<T> {
        LEFT.set(Some(accesses));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
        LEFT.set(None);
        match result {
            Ok(value) => Some(value),
            Err(reason) if reason.is::<Killed>() => None,
            Err(reason) => std::panic::resume_unwind(reason),
        }
    }

    pub(super) fn point() {
        match LEFT.get() {
            Some(0) => std::panic::resume_unwind(Box::new(Killed)),
            left => LEFT.set(left.map(|n| n - 1)),
        }
    }
}
