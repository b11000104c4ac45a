//! A worker that dies while the kernel copies a request into its buffer. userfaultfd stops the kernel there: a read
//! that needs a missing page of the buffer waits for another process to bring it, and none does.

use super::mutating::{Mutating, inherited};
use super::wait_for;
use inflight::Inflight;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// What the caller of a request learns whose worker is killed when the kernel has begun to copy the request and waits for
/// a page, or is done because every page was there.
pub fn killed_in_the_copy(populated: bool) -> Output {
    let mut mutating = Mutating::new(false);
    let (pid, said) = mutating.start_copying(populated);
    let mut lines = BufReader::new(said).lines().map(|line| line.unwrap());
    // The test harness has begun the line.
    let number = lines.find_map(|line| line.split_once("faults ").map(|(_, number)| number.parse().unwrap()));
    let pidfd = pidfd_open(Pid::from_raw(pid as i32).unwrap(), PidfdFlags::empty()).unwrap();
    let faults = pidfd_getfd(&pidfd, number.unwrap(), PidfdGetfdFlags::empty()).unwrap();
    let mut caller = Command::new("stat");
    caller.arg(&mutating.target).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut caller = caller.spawn().unwrap();
    match populated {
        true => assert!(lines.any(|line| line == "copied"), "the worker never got the request"),
        false => wait_for("page fault", || has_fault(&faults)),
    }
    assert_eq!(has_fault(&faults), !populated);
    mutating.let_die(Duration::ZERO);
    mutating.start("");
    wait_for("end of the caller", || caller.try_wait().unwrap().is_some());
    caller.wait_with_output().unwrap()
}

fn has_fault(faults: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(faults, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    fds[0].revents().contains(PollFlags::IN)
}

/// Another process: reads one request, and goes no further. Never returns.
pub fn copy(populated: bool) {
    let [device, memory] = inherited();
    let (inflight, _) = Inflight::hold(memory).unwrap();
    let stage = inflight.acquire_stage().unwrap();
    if populated {
        inflight.populate_stage(stage, true);
    }
    let buffer = inflight.stage_pointer(stage);
    let bytes = inflight.stage_bytes_max();
    let faults = watch(buffer, bytes);
    println!("faults {}", faults.as_raw_fd());
    // SAFETY: the buffer is so long, and nothing else uses it.
    let read = unsafe { libc::read(device.as_raw_fd(), buffer.cast(), bytes) };
    assert!(read > 0, "{}", std::io::Error::last_os_error());
    println!("copied");
    loop {
        std::thread::park();
    }
}

/// From now on a page that is missing there is asked for at this descriptor (linux/userfaultfd.h).
fn watch(start: *mut u8, len: usize) -> OwnedFd {
    #[repr(C)]
    struct Api {
        api: u64,
        features: u64,
        ioctls: u64,
    }
    #[repr(C)]
    struct Register {
        start: u64,
        len: u64,
        mode: u64,
        ioctls: u64,
    }
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    const MODE_MISSING: u64 = 1;
    // SAFETY: the structures are those of the kernel's header, and outlive the calls; the descriptor is new.
    unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        assert!(fd >= 0, "userfaultfd: {}", std::io::Error::last_os_error());
        let fd = OwnedFd::from_raw_fd(fd as i32);
        let mut api = Api { api: 0xaa, features: 0, ioctls: 0 };
        assert_eq!(libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &mut api), 0);
        let mut range = Register { start: start as u64, len: len as u64, mode: MODE_MISSING, ioctls: 0 };
        let done = libc::ioctl(fd.as_raw_fd(), UFFDIO_REGISTER, &mut range);
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        fd
    }
}
