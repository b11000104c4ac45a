//! How much memory a process holds that the kernel cannot take back: anonymous and shared memory.

use procfs::process::Process;

/// Bytes of process `pid`, or 0 when it is gone or hidden.
pub(crate) fn of(pid: u32) -> u64 {
    let status = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()?.status().ok());
    status.map_or(0, |status| (status.rssanon.unwrap_or(0) + status.rssshmem.unwrap_or(0)) << 10)
}

/// This process and some others.
pub(crate) fn of_self_and(pids: &[u32]) -> u64 {
    of(std::process::id()) + pids.iter().map(|pid| of(*pid)).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    #[test]
    fn pages_of_files_do_not_count() {
        // It has answered, and waits: nothing changes any more.
        let mut cat = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut answer = [0; 1];
        cat.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        cat.stdout.as_mut().unwrap().read_exact(&mut answer).unwrap();
        let status = Process::new(cat.id() as i32).unwrap().status().unwrap();
        let held = of(cat.id());
        cat.kill().unwrap();
        cat.wait().unwrap();
        assert_eq!(held >> 10, status.vmrss.unwrap() - status.rssfile.unwrap());
        assert!(held > 0 && status.rssfile.unwrap() > 0);
        assert_eq!(of(u32::MAX), 0);
    }
}
