//! Answers whose bytes go from a cache file to the device through a pipe, and not through this process: the kernel hands
//! on its own pages, and copies them once, into the reader's.
//!
//! A pipe has a slot for each page that it holds and one for the answer's header, 256 in all ([`PIPE_BYTES`], what the
//! kernel allows without privileges): a worker asks for READs of one page less than that ([`READ_PAGES_MAX`]). All
//! pipes of a user share 64 MiB, so a worker may get none; then bytes are copied as ever.

use rustix::io::Errno;
use rustix::param::page_size;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use startup::log::say;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

/// Where a page has 4 KiB.
const SLOTS: u16 = 256;
const PIPE_BYTES: usize = 1 << 20;
/// Pages of a READ that fits into a pipe beside its header.
pub(crate) const READ_PAGES_MAX: u16 = SLOTS - 1;
/// Below this a copy is cheaper than the system calls.
const LEAST: usize = 64 << 10;
/// Of one worker, in use and idle: with more at once the others copy.
const PIPES_MAX: usize = 4;

/// The pipes of a worker: made when they are needed, closed when they have not been for a while.
pub(super) struct Pipes {
    state: Mutex<State>,
    /// Asked for before the worker is locked down.
    page_bytes: usize,
    /// Refused for another reason than want of room.
    disabled: AtomicBool,
}

#[derive(Default)]
struct State {
    idle: Vec<Pipe>,
    /// In use and idle.
    made: usize,
    used_since_trim: bool,
    /// There was no room for another pipe: not asked again until the next trim.
    is_full: bool,
}

struct Pipe {
    out: OwnedFd,
    into: OwnedFd,
}

/// A pipe that holds a message. Dropped with it, the pipe is closed: nothing of a message comes before the next one.
pub(super) struct Filled<'a> {
    pipe: Option<Pipe>,
    bytes: usize,
    is_empty: bool,
    home: &'a Pipes,
}

impl Pipes {
    pub(super) fn new(disabled: bool) -> Self {
        Self { state: Mutex::default(), page_bytes: page_size(), disabled: AtomicBool::new(disabled) }
    }

    /// A pipe that holds `header` and `len` bytes of `file` from `offset` on. None: they are to be copied.
    pub(super) fn fill(
        &self,
        header: &[u8],
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
    ) -> Option<Filled<'_>> {
        if len < LEAST || !self.fits(offset, len) || self.disabled.load(Relaxed) {
            return None;
        }
        let pipe = self.take()?;
        let filled = pipe.fill(header, file, offset, len);
        // From here on the pipe goes where it belongs, whatever has become of it.
        let pipe = Filled { pipe: Some(pipe), bytes: header.len() + len, is_empty: false, home: self };
        match filled {
            Ok(true) => return Some(pipe),
            // This file system, this kernel, or a filter of somebody's cannot do it.
            Err(errno @ (Errno::INVAL | Errno::NOSYS | Errno::PERM | Errno::SPIPE | Errno::AGAIN)) => {
                self.disable(errno.raw_os_error());
            }
            // A short or failing file is looked into by whoever copies from it.
            Ok(false) | Err(_) => {}
        }
        None
    }

    pub(super) fn disable(&self, errno: i32) {
        if !self.disabled.swap(true, Relaxed) {
            say(&format!("fuse-worker: splice is refused (errno {errno}): reads are copied from now on"));
        }
    }

    /// Closes the idle pipes if none was used since the last call.
    pub(super) fn trim(&self) {
        let mut state = self.lock();
        state.is_full = false;
        if !std::mem::take(&mut state.used_since_trim) {
            state.made -= state.idle.len();
            state.idle = Vec::new();
        }
    }

    /// A pipe has a slot for each page that the range touches, and one more.
    fn fits(&self, offset: u64, len: usize) -> bool {
        let pages = (offset as usize % self.page_bytes + len).div_ceil(self.page_bytes);
        pages < PIPE_BYTES / self.page_bytes
    }

    fn take(&self) -> Option<Pipe> {
        let mut state = self.lock();
        state.used_since_trim = true;
        if let Some(pipe) = state.idle.pop() {
            return Some(pipe);
        }
        if state.is_full || state.made == PIPES_MAX {
            return None;
        }
        let pipe = Pipe::new();
        state.is_full = pipe.is_err();
        state.made += usize::from(pipe.is_ok());
        pipe.ok()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Pipe {
    fn new() -> io::Result<Self> {
        let (out, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        match fcntl_setpipe_size(&into, PIPE_BYTES) {
            Ok(bytes) if bytes >= PIPE_BYTES => Ok(Self { out, into }),
            Ok(_) => Err(io::ErrorKind::StorageFull.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// False: the file is shorter.
    fn fill(&self, header: &[u8], file: BorrowedFd<'_>, mut offset: u64, len: usize) -> Result<bool, Errno> {
        if rustix::io::write(&self.into, header)? != header.len() {
            return Err(Errno::AGAIN);
        }
        let mut left = len;
        while left > 0 {
            match splice(file, Some(&mut offset), &self.into, None, left, SpliceFlags::NONBLOCK) {
                Ok(0) => return Ok(false),
                Ok(moved) => left -= moved,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(true)
    }
}

impl Filled<'_> {
    /// All that the pipe holds, as one message. Err: an errno.
    pub(super) fn empty_into(&mut self, device: BorrowedFd<'_>) -> Result<(), i32> {
        let Some(pipe) = &self.pipe else { return Err(Errno::BADF.raw_os_error()) };
        match splice(&pipe.out, None, device, None, self.bytes, SpliceFlags::empty()) {
            Ok(given) if given == self.bytes => {
                self.is_empty = true;
                Ok(())
            }
            Ok(_) => Err(Errno::IO.raw_os_error()), // the kernel takes a message whole or not at all
            Err(errno) => Err(errno.raw_os_error()),
        }
    }
}

impl Drop for Filled<'_> {
    fn drop(&mut self) {
        let pipe = self.pipe.take().filter(|_| self.is_empty);
        let mut state = self.home.lock();
        match pipe {
            Some(pipe) => state.idle.push(pipe),
            None => state.made -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    const HEADER: [u8; 16] = [7; 16];

    fn file(len: usize) -> (File, Vec<u8>) {
        let bytes: Vec<u8> = (0..len).map(|k| (k / 512 * 31) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        (file, bytes)
    }

    /// What the "device", a pipe of the same size, gets.
    fn given(mut pipe: Filled<'_>) -> Vec<u8> {
        let device = Pipe::new().unwrap();
        pipe.empty_into(device.into.as_fd()).unwrap();
        let mut given = vec![0; pipe.bytes];
        File::from(device.out).read_exact(&mut given).unwrap();
        given
    }

    #[test]
    fn a_pipe_holds_a_header_and_the_largest_read_that_workers_ask_for() {
        let (file, bytes) = file(2 << 20);
        let pipes = Pipes::new(false);
        let page = page_size();
        let most = PIPE_BYTES - page;
        for (offset, len) in [(0, most), (page as u64, most), (100, most - 100), (5000, LEAST), (0, LEAST)] {
            let given = given(pipes.fill(&HEADER, file.as_fd(), offset, len).unwrap());
            let at = offset as usize;
            assert!(given[..16] == HEADER && given[16..] == bytes[at..at + len], "{len} at {offset}");
        }
        for (offset, len) in [(0, most + 1), (1, most), (0, LEAST - 1)] {
            assert!(pipes.fill(&HEADER, file.as_fd(), offset, len).is_none(), "{len} at {offset}");
        }
        assert_eq!(pipes.lock().made, 1, "one after the other");
    }

    #[test]
    fn a_pipe_that_was_not_emptied_is_not_used_again() {
        let (file, _) = file(LEAST);
        let pipes = Pipes::new(false);
        assert!(pipes.fill(&HEADER, file.as_fd(), 1, LEAST).is_none(), "too short");
        assert_eq!(pipes.lock().made, 0);
        drop(pipes.fill(&HEADER, file.as_fd(), 0, LEAST).unwrap()); // its request had been answered
        assert_eq!(pipes.lock().made, 0);
        let mut refused = pipes.fill(&HEADER, file.as_fd(), 0, LEAST).unwrap();
        assert!(refused.empty_into(file.as_fd()).is_ok(), "a file takes it");
        drop(refused);
        let mut refused = pipes.fill(&HEADER, file.as_fd(), 0, LEAST).unwrap();
        assert!(refused.empty_into(File::open("/dev/null").unwrap().as_fd()).is_err(), "open for reading");
        drop(refused);
        assert_eq!((pipes.lock().made, pipes.disabled.load(Relaxed)), (0, false));
    }

    #[test]
    fn pipes_are_few_and_idle_ones_are_closed() {
        let (file, _) = file(LEAST);
        let pipes = Pipes::new(false);
        let fill = || pipes.fill(&HEADER, file.as_fd(), 0, LEAST);
        let taken: Vec<_> = std::iter::repeat_with(fill).map_while(|pipe| pipe).take(PIPES_MAX + 1).collect();
        assert_eq!(taken.len(), PIPES_MAX);
        taken.into_iter().for_each(|pipe| drop(given(pipe)));
        pipes.trim();
        assert_eq!(pipes.lock().made, PIPES_MAX, "just used");
        pipes.trim();
        assert_eq!(pipes.lock().made, 0);
        assert!(pipes.fill(&HEADER, file.as_fd(), 0, LEAST).is_some());
    }

    #[test]
    fn what_the_kernel_refuses_is_not_asked_again() {
        let (file, _) = file(LEAST);
        let pipes = Pipes::new(false);
        let (no_file, _writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        // It has no offset: ESPIPE.
        assert!(pipes.fill(&HEADER, no_file.as_fd(), 0, LEAST).is_none());
        assert!(pipes.fill(&HEADER, file.as_fd(), 0, LEAST).is_none());
        assert_eq!(pipes.lock().made, 0);
        assert!(Pipes::new(true).fill(&HEADER, file.as_fd(), 0, LEAST).is_none());
    }
}
