//! The FUSE device: the first message of a connection, its answer, and the passthrough ioctls.

use crate::KernelError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// `_IOW(229, 1, struct fuse_backing_map)` and `_IOW(229, 2, uint32_t)` of `linux/fuse.h`.
const BACKING_OPEN: libc::c_ulong = 0x4010_e501;
const BACKING_CLOSE: libc::c_ulong = 0x4004_e502;
/// Opcode of INIT, and the size of the header that carries it.
const INIT: u32 = 26;
const HEADER: usize = 40;
/// The kernel refuses reads into less than 8 KiB; INIT itself is some hundred bytes.
const INIT_BUFFER: usize = 64 * 1024;

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
    let word = |at: usize| buffer.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes);
    match (word(0), word(4)) {
        (Some(length), Some(INIT)) if length as usize == buffer.len() && buffer.len() > HEADER => Ok(buffer),
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
    let told = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", device.as_raw_fd())).ok()?;
    told.lines().find_map(|line| line.strip_prefix("fuse_connection:"))?.trim().parse().ok()
}

/// Looks, and does not wait: whoever waits at a device is woken by each of its requests, whatever it asks to be told of
/// (the queue's `wake_up` names no event), which costs a busy mount a context switch for each.
pub(crate) fn have_ended(devices: &[BorrowedFd<'_>]) -> Vec<bool> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled: Vec<PollFd<'_>> =
        devices.iter().map(|device| PollFd::from_borrowed_fd(*device, PollFlags::empty())).collect();
    let seen = poll(&mut polled, Some(&now)).is_ok();
    polled.iter().map(|device| seen && device.revents().contains(PollFlags::ERR)).collect()
}

pub(crate) fn backing_open(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<u32, KernelError> {
    #[repr(C)]
    struct BackingMap {
        fd: i32,
        flags: u32,
        padding: u64,
    }
    let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
    // Needed: rustix has no call for this ioctl.
    // SAFETY: the kernel only reads the 16 bytes of `map`, which outlives the call; both descriptors are borrowed.
    let id = unsafe { libc::ioctl(device.as_raw_fd(), BACKING_OPEN, &map) };
    u32::try_from(id).ok().filter(|id| *id > 0).ok_or_else(|| {
        KernelError::call("register a passthrough file with", "/dev/fuse", io::Error::last_os_error())
    })
}

pub(crate) fn backing_close(device: BorrowedFd<'_>, id: u32) -> Result<(), KernelError> {
    // Needed: as above.
    // SAFETY: the kernel only reads the four bytes of `id`, which outlives the call; the descriptor is borrowed.
    match unsafe { libc::ioctl(device.as_raw_fd(), BACKING_CLOSE, &id) } {
        0 => Ok(()),
        _ => Err(KernelError::call("close a passthrough id of", "/dev/fuse", io::Error::last_os_error())),
    }
}

/// An INIT request as a recent kernel sends it, for tests without one.
pub fn sample_init() -> Vec<u8> {
    let mut init = vec![0; 104];
    init[0..4].copy_from_slice(&104u32.to_ne_bytes());
    init[4..8].copy_from_slice(&INIT.to_ne_bytes());
    init[8..16].copy_from_slice(&2u64.to_ne_bytes());
    init[40..44].copy_from_slice(&7u32.to_ne_bytes());
    init[44..48].copy_from_slice(&45u32.to_ne_bytes());
    init
}
