//! The two signals that an oracle lives with: SIGBUS from a mapping, and a 1 kHz SIGALRM as Go and Java runtimes send.

use std::cell::Cell;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

static BUS_ERRORS: AtomicU64 = AtomicU64::new(0);
static ALARMS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Of this thread. Neither initialised nor dropped at run time: a handler may use it.
    static BUS_ERRORS_HERE: Cell<u64> = const { Cell::new(0) };
}

pub(super) fn bus_errors() -> u64 {
    BUS_ERRORS.load(Relaxed)
}
/// What the calling thread has raised.
pub(super) fn bus_errors_here() -> u64 {
    BUS_ERRORS_HERE.get()
}
pub(super) fn alarms() -> u64 {
    ALARMS.load(Relaxed)
}

/// Every SIGBUS is counted and the page that raised it replaced by zeros: the comparison goes on.
pub(super) fn count_bus_errors() -> io::Result<()> {
    extern "C" fn on_bus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        BUS_ERRORS.fetch_add(1, Relaxed);
        BUS_ERRORS_HERE.set(BUS_ERRORS_HERE.get() + 1);
        // SAFETY: the kernel passes a valid siginfo. mmap is a plain system call; the page replaced is one that
        // cannot be read anyway.
        unsafe {
            let page = (*info).si_addr() as usize & !4095;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            libc::mmap(page as *mut libc::c_void, 4096, libc::PROT_READ, flags, -1, 0);
        }
    }
    install(libc::SIGBUS, on_bus as *const () as usize, libc::SA_SIGINFO)
}

/// Starts the timer. The handler comes without SA_RESTART: a file system that answers EINTR is found out.
pub(super) fn alarm_every_millisecond() -> io::Result<()> {
    extern "C" fn on_alarm(_: libc::c_int) {
        ALARMS.fetch_add(1, Relaxed);
    }
    install(libc::SIGALRM, on_alarm as *const () as usize, 0)?;
    let every = libc::timeval { tv_sec: 0, tv_usec: 1000 };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: setitimer reads the timer during the call and may be given no place for the old one.
    let result = unsafe { libc::syscall(libc::SYS_setitimer, libc::ITIMER_REAL, &timer, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Keeps SIGALRM away from the calling thread: it is meant for those inside file system calls.
pub(super) fn block_alarm() {
    // SAFETY: the set is initialised by sigemptyset before use; blocking a signal cannot break an invariant.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGALRM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
}

fn install(signal: libc::c_int, handler: usize, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: a zeroed sigaction is valid; the handler makes async-signal-safe calls only.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(signal, &action, std::ptr::null_mut())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
