//! The FUSE device: the first message of a connection, its answer, and the passthrough ioctls.

use crate::KernelError;
use fuse_abi::header::MIN_READ_BUFFER;
use fuse_abi::ioctl::{BACKING_CLOSE, BACKING_OPEN};
use fuse_abi::{BackingMap, InHeader, InitIn, opcode};
use nix::errno::Errno;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

nix::ioctl_write_ptr_bad!(ioctl_backing_open, BACKING_OPEN, BackingMap);
nix::ioctl_write_ptr_bad!(ioctl_backing_close, BACKING_CLOSE, u32);

/// INIT itself is some hundred bytes.
const INIT_BUFFER: usize = 64 * 1024;
const _: () = assert!(INIT_BUFFER >= MIN_READ_BUFFER);

pub(crate) fn read_init(device: BorrowedFd<'_>, limit: Duration) -> Result<Vec<u8>, KernelError> {
    let deadline = Instant::now() + limit;
    let mut buffer = vec![0; INIT_BUFFER];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(&device, PollFlags::IN)], Some(&wait)) {
            Ok(0) => return Err(KernelError::NoInit(limit)),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(KernelError::call("poll", "/dev/fuse", e)),
        }
        match rustix::io::read(device, &mut buffer) {
            Ok(length) => {
                buffer.truncate(length);
                break;
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
            Err(e) => return Err(KernelError::call("read INIT from", "/dev/fuse", e)),
        }
    }
    match buffer.first_chunk().map(InHeader::from_bytes) {
        Some(InHeader { len, opcode: opcode::INIT, .. })
            if len as usize == buffer.len() && buffer.len() > InHeader::BYTES =>
        {
            Ok(buffer)
        }
        _ => Err(KernelError::BadInit(buffer.len())),
    }
}

pub(crate) fn write_init_reply(device: BorrowedFd<'_>, reply: &[u8]) -> Result<(), KernelError> {
    match rustix::io::write(device, reply) {
        Ok(length) if length == reply.len() => Ok(()),
        Ok(_) => Err(KernelError::call(
            "write INIT's reply to",
            "/dev/fuse",
            io::Error::from(io::ErrorKind::WriteZero),
        )),
        Err(e) => Err(KernelError::call("write INIT's reply to", "/dev/fuse", e)),
    }
}

/// The kernel says so through poll; a read would say it too, but might take a request.
pub(crate) fn has_ended(device: BorrowedFd<'_>) -> bool {
    have_ended(&[device]).contains(&true)
}

/// The minor device number of its connection, where the kernel tells (`fuse_dev_show_fdinfo`).
pub(crate) fn number(device: BorrowedFd<'_>) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", device.as_raw_fd())).ok()?;
    text.lines().find_map(|line| line.strip_prefix("fuse_connection:"))?.trim().parse().ok()
}

/// Looks, and does not wait: a thread that waits at a device is woken by each of its requests, whatever it waits for
/// (the queue's `wake_up` names no event), which costs a busy mount a context switch for each.
pub(crate) fn have_ended(devices: &[BorrowedFd<'_>]) -> Vec<bool> {
    show(devices, PollFlags::ERR)
}

/// Requests that no process has read.
pub(crate) fn have_requests(devices: &[BorrowedFd<'_>]) -> Vec<bool> {
    show(devices, PollFlags::IN)
}

fn show(devices: &[BorrowedFd<'_>], what: PollFlags) -> Vec<bool> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // Errors are told whether they are asked for or not.
    let asked = what - PollFlags::ERR;
    let mut polled: Vec<PollFd<'_>> =
        devices.iter().map(|device| PollFd::from_borrowed_fd(*device, asked)).collect();
    let seen = poll(&mut polled, Some(&now)).is_ok();
    polled.iter().map(|device| seen && device.revents().contains(what)).collect()
}

pub(crate) fn backing_open(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<u32, KernelError> {
    let map = BackingMap::new(file.as_raw_fd());
    let failed = |e: Errno| KernelError::call("register a passthrough file with", "/dev/fuse", e);
    // SAFETY: the kernel only reads the 16 bytes of `map`, which outlives the call; both descriptors are borrowed.
    let id = unsafe { ioctl_backing_open(device.as_raw_fd(), &map) }.map_err(failed)?;
    u32::try_from(id).ok().filter(|id| *id > 0).ok_or_else(|| failed(Errno::EPROTO))
}

pub(crate) fn backing_close(device: BorrowedFd<'_>, id: u32) -> Result<(), KernelError> {
    // SAFETY: the kernel only reads the four bytes of `id`, which outlives the call; the descriptor is borrowed.
    let closed = unsafe { ioctl_backing_close(device.as_raw_fd(), &id) };
    closed.map(drop).map_err(|e| KernelError::call("close a passthrough id of", "/dev/fuse", e))
}

/// An INIT request as a recent kernel sends it, for tests without one.
pub(crate) fn sample_init() -> Vec<u8> {
    let len = (InHeader::BYTES + InitIn::BYTES) as u32;
    let header = InHeader { len, opcode: opcode::INIT, unique: 2, ..InHeader::default() };
    let init = InitIn { major: 7, minor: 45, ..InitIn::default() };
    [&header.to_bytes()[..], &init.to_bytes()].concat()
}
