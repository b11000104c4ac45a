//! How much memory a process holds that the kernel cannot take back: anonymous and shared memory. And how this one gives
//! back what it does not need.

use std::time::Duration;

/// glibc makes up to eight for each processor, and each keeps what it once used.
const HEAPS_MAX: libc::c_int = 4;
const TRIM_EVERY: Duration = Duration::from_secs(30);

/// To be called before other threads are started: what a busy minute has used is given back in the next one.
pub(crate) fn keep_small() -> std::io::Result<()> {
    // SAFETY: an integer; refused, memory is larger, nothing else.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, HEAPS_MAX) };
    let trim = || {
        loop {
            std::thread::sleep(TRIM_EVERY);
            // SAFETY: takes the heaps' own locks, one after the other.
            unsafe { libc::malloc_trim(0) };
        }
    };
    std::thread::Builder::new().name("trim".into()).stack_size(64 << 10).spawn(trim).map(drop)
}

/// Bytes of process `pid`, or 0 when it is gone or hidden.
pub(crate) fn of(pid: u32) -> u64 {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return 0 };
    parse(&status)
}

/// This process and some others.
pub(crate) fn of_self_and(pids: &[u32]) -> u64 {
    of(std::process::id()) + pids.iter().map(|pid| of(*pid)).sum::<u64>()
}

fn parse(status: &str) -> u64 {
    let kib = |key: &str| -> u64 {
        let line = status.lines().find_map(|l| l.strip_prefix(key));
        line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse().ok()).unwrap_or(0)
    };
    (kib("RssAnon:") + kib("RssShmem:")) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_and_shared_memory_are_added_up() {
        assert_eq!(parse("Name:\tx\nRssAnon:\t     100 kB\nRssFile:\t 7 kB\nRssShmem:\t 28 kB\n"), 128 << 10);
        assert!(of(std::process::id()) > 0);
        assert_eq!(of(u32::MAX), 0);
    }
}
