//! What `/proc` says about our processes: children, descriptors, memory, processor time.

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, PidfdFlags, Signal};
use std::collections::HashSet;
use std::ops::AddAssign;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Field 4 of `/proc/<pid>/stat`; None: no such process.
pub fn parent(pid: u32) -> Option<u32> {
    stat_fields(pid)?.get(1)?.parse().ok()
}

/// The fields from the state (field 3) on: the command name before it may contain anything.
fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(text.rsplit_once(") ")?.1.split_ascii_whitespace().map(str::to_owned).collect())
}

pub fn all() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Living children: those that wait to be reaped do not count.
pub fn children(of: u32) -> Vec<u32> {
    let alive = |pid: u32| {
        let fields = stat_fields(pid).unwrap_or_default();
        fields.get(1).is_some_and(|p| *p == of.to_string()) && !matches!(fields[0].as_str(), "Z" | "X")
    };
    all().into_iter().filter(|&pid| alive(pid)).collect()
}

/// `/dev/fuse`: 10, 229 in every kernel.
const FUSE_DEVICE: u64 = 10 << 8 | 229;

/// Children that hold a FUSE connection: workers at work, unlike those that stand by.
pub fn fuse_children(of: u32) -> Vec<u32> {
    // By its number: the path that it was opened by is gone with the container of the broker that opened it.
    let holds = |pid: &u32| {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        entries.filter_map(|e| std::fs::metadata(e.ok()?.path()).ok()).any(|file| file.rdev() == FUSE_DEVICE)
    };
    children(of).into_iter().filter(holds).collect()
}

/// Processes that run a program from below `dir`, zombies excluded (they have no program any more).
pub fn running_from(dir: &Path) -> Vec<(u32, PathBuf)> {
    let program = |pid: u32| {
        let exe = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        // A replaced program is shown as "path (deleted)".
        exe.starts_with(dir).then_some((pid, exe))
    };
    all().into_iter().filter_map(program).collect()
}

pub fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map(|d| d.count()).unwrap_or(0)
}

/// To a process that the caller has not reaped, or knows to be alive.
pub fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).context("pid 0")?;
    Ok(rustix::process::kill_process(pid, signal)?)
}

/// `kill -9` of a child of `parent_pid` and of nothing else, even if the pid was reused meanwhile.
pub fn kill_child(pid: u32, parent_pid: u32) -> Result<()> {
    signal_child(pid, parent_pid, Signal::KILL)
}

/// A signal to a child of `parent_pid` and to nothing else.
pub fn signal_child(pid: u32, parent_pid: u32, signal: Signal) -> Result<()> {
    let pid_t = Pid::from_raw(i32::try_from(pid)?).context("pid 0")?;
    let handle = rustix::process::pidfd_open(pid_t, PidfdFlags::empty())?;
    ensure!(parent(pid) == Some(parent_pid), "process {pid} is not a child of {parent_pid}");
    Ok(rustix::process::pidfd_send_signal(&handle, signal)?)
}

/// A process whose failpoint is `panics` panics at the n-th place that it passes from now on.
pub fn panic_at(pid: u32, n: u32) -> Result<()> {
    let value = libc::sigval { sival_ptr: n as usize as *mut libc::c_void };
    // SAFETY: sigqueue takes numbers; the receiver only reads the value as one.
    match unsafe { libc::sigqueue(i32::try_from(pid)?, libc::SIGUSR2, value) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()).with_context(|| format!("ask process {pid} to panic")),
    }
}

/// Bytes, from `/proc/<pid>/smaps_rollup`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Memory {
    /// Private anonymous pages.
    pub anonymous: u64,
    /// This process's share of shared memory (memfds): without swap it cannot be evicted.
    pub shared: u64,
    pub pss: u64,
}

impl Memory {
    pub fn of(pid: u32) -> Self {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|l| l.split_ascii_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
        };
        Self { anonymous: field("Anonymous"), shared: field("Pss_Shmem"), pss: field("Pss") }
    }

    /// What a memory budget must cover.
    pub fn unevictable(self) -> u64 {
        self.anonymous + self.shared
    }

    pub fn max(self, other: Self) -> Self {
        if other.unevictable() > self.unevictable() { other } else { self }
    }
}

/// Bytes of memory files that a process holds and has not mapped, which its `smaps` do not show: without swap they cannot be
/// evicted.
pub fn unmapped_memory_files(pid: u32) -> u64 {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return 0 };
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    // address, permissions, offset, device, inode number, path
    let memory = maps.lines().filter(|line| line.contains("/memfd:"));
    let mut seen: HashSet<u64> =
        memory.filter_map(|l| l.split_ascii_whitespace().nth(4)?.parse().ok()).collect();
    let paths = entries.filter_map(|e| Some(e.ok()?.path()));
    let files = paths.filter(|path| path.read_link().is_ok_and(|to| is_memory_file(&to)));
    files
        .filter_map(|path| std::fs::metadata(path).ok())
        .filter(|f| seen.insert(f.ino()))
        .map(|f| f.blocks() * 512)
        .sum()
}

fn is_memory_file(target: &Path) -> bool {
    target.to_str().is_some_and(|name| name.starts_with("/memfd:"))
}

impl AddAssign for Memory {
    fn add_assign(&mut self, other: Self) {
        self.anonymous += other.anonymous;
        self.shared += other.shared;
        self.pss += other.pss;
    }
}

/// User and system time of a process and of its reaped children.
pub fn cpu_time(pid: u32) -> Duration {
    let Some(fields) = stat_fields(pid) else { return Duration::ZERO };
    // utime, stime, cutime, cstime are fields 14 to 17 of proc_pid_stat(5); ours begin at field 3.
    of_ticks((11..15).filter_map(|k| fields.get(k)?.parse::<u64>().ok()).sum())
}

/// User and system time of the children that this process has reaped, and of those that they have.
pub fn reaped_time() -> Duration {
    // SAFETY: getrusage writes to the structure that it is given, for which zeros are a value.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let of = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec.unsigned_abs()) + Duration::from_micros(time.tv_usec.unsigned_abs())
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

/// Time in which a processor of this machine was at work for any process.
pub fn machine_time() -> Duration {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields = text.lines().next().unwrap_or_default().split_ascii_whitespace().skip(1);
    // user, nice, system, idle, iowait, irq, softirq: see proc_stat(5). What a guest uses is in user.
    let at_work = [true, true, true, false, false, true, true];
    of_ticks(
        fields
            .zip(at_work)
            .filter(|(_, work)| *work)
            .filter_map(|(ticks, _)| ticks.parse::<u64>().ok())
            .sum(),
    )
}

fn of_ticks(ticks: u64) -> Duration {
    // SAFETY: sysconf reads a constant of the system.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Duration::from_secs_f64(ticks as f64 / per_second.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_a_parent_memory_and_descriptors() {
        let me = std::process::id();
        assert!(parent(me).is_some());
        assert!(descriptors(me) > 2);
        let memory = Memory::of(me);
        assert!(machine_time() > Duration::ZERO && machine_time() >= cpu_time(me));
        assert!(memory.anonymous > 0 && memory.pss >= memory.anonymous / 2, "{memory:?}");
    }

    #[test]
    fn a_memory_file_counts_as_long_as_it_is_open() {
        use rustix::fs::{MemfdFlags, memfd_create};
        let before = unmapped_memory_files(std::process::id());
        let file = std::fs::File::from(memfd_create("e2e-test", MemfdFlags::CLOEXEC).unwrap());
        std::io::Write::write_all(&mut &file, &[1; 1 << 20]).unwrap();
        assert!(unmapped_memory_files(std::process::id()) >= before + (1 << 20));
    }

    #[test]
    fn only_children_are_killed() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        assert!(kill_child(child.id(), 1).is_err());
        assert!(child.try_wait().unwrap().is_none());
        kill_child(child.id(), std::process::id()).unwrap();
        child.wait().unwrap();
    }
}
