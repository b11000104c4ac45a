//! What is asked of the kernel about requests, through the device: the one I/O of this crate, behind a trait.

use fuse_abi::OutHeader;
use fuse_abi::header::INT_REQ_BIT;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// What the kernel says about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    Waiting,
    /// Answered, or never asked.
    Gone,
    /// The connection has ended.
    Ended,
}

/// Asks the kernel whether it waits for an answer to `unique`: the reply to an INTERRUPT that was never sent is
/// accepted, and ignored, exactly as long as it does (fuse_dev_do_write). No side effect, about 0.3 µs.
pub fn probe(device: impl AsFd, unique: u64) -> io::Result<Probe> {
    match answer(device, unique | INT_REQ_BIT, 0) {
        Ok(()) => Ok(Probe::Waiting),
        Err(e) => match rustix::io::Errno::from_io_error(&e) {
            Some(rustix::io::Errno::NOENT) => Ok(Probe::Gone),
            Some(rustix::io::Errno::NODEV | rustix::io::Errno::PERM | rustix::io::Errno::CONNABORTED) => {
                Ok(Probe::Ended)
            }
            _ => Err(e),
        },
    }
}

/// Answers a request with an error (positive errno). ENOENT: the kernel does not wait for it.
pub fn answer_errno(device: impl AsFd, unique: u64, errno: i32) -> io::Result<()> {
    answer(device, unique, -errno)
}

fn answer(device: impl AsFd, unique: u64, error: i32) -> io::Result<()> {
    rustix::io::write(device, &OutHeader::new(0, error, unique).to_bytes())?;
    Ok(())
}

/// The self-test of [`probe`]: the kernel must tell a request that waits from one that does not. `init_unique` is the
/// INIT request's id, which waits until the first mount's reply has been written.
pub fn probe_works(device: impl AsFd, init_unique: u64, init_answered: bool) -> io::Result<bool> {
    let expected = if init_answered { Probe::Gone } else { Probe::Waiting };
    // Ids are given out upwards in steps of two: this one never was.
    Ok(probe(&device, init_unique)? == expected && probe(&device, 1 << 60)? == Probe::Gone)
}

/// The kernel's side of a connection; a model in tests.
pub trait Kernel {
    fn probe(&mut self, unique: u64) -> io::Result<Probe>;
    /// Answers a request EIO.
    fn fail(&mut self, unique: u64);
}

pub(super) struct Device<'a>(pub(super) BorrowedFd<'a>);
impl Kernel for Device<'_> {
    fn probe(&mut self, unique: u64) -> io::Result<Probe> {
        probe(self.0, unique)
    }
    fn fail(&mut self, unique: u64) {
        // Refused: the caller is gone, which is as good.
        let _ = answer_errno(self.0, unique, rustix::io::Errno::IO.raw_os_error());
    }
}
