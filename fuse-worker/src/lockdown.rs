//! What a worker gives up before it looks at a request: new privileges, system calls that it does not need, every file
//! but those of its cache directories. What a kernel cannot do is reported and left out.

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus,
};
use rustix::process::{Resource, Rlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use std::collections::BTreeMap;
use std::os::fd::AsFd;

/// Private writable memory at most: buffers of fuser (16 MiB of address space a thread, of which a page is used), stacks.
const DATA_BYTES_MAX: u64 = 2 << 30;
/// Descriptors: the cache files held open, and a few dozen besides.
pub const FILES_MAX: u64 = 1024;

/// At start, before anything is received: holds for every thread.
pub fn begin() -> Result<(), String> {
    let text = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
    rustix::thread::set_no_new_privs(true).map_err(text("no_new_privs"))?;
    // A huge page for each of fuser's buffers would be 2 MiB where 4 KiB are used.
    // SAFETY: PR_SET_THP_DISABLE takes integers only; refused (before 3.15): memory is larger, nothing else.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    // SAFETY: before any other thread; one heap is enough for small messages, and each would keep what it once used.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    lower(Resource::Data, DATA_BYTES_MAX).map_err(text("RLIMIT_DATA"))?;
    lower(Resource::Nofile, FILES_MAX).map_err(text("RLIMIT_NOFILE"))?;
    lower(Resource::Core, 0).map_err(text("RLIMIT_CORE"))?;
    Ok(())
}

fn lower(resource: Resource, limit: u64) -> rustix::io::Result<()> {
    let now = rustix::process::getrlimit(resource);
    let limit = Some(now.maximum.map_or(limit, |most| most.min(limit)));
    rustix::process::setrlimit(resource, Rlimit { current: limit, maximum: limit })
}

/// After the session exists and before other threads do, which inherit both. Returns what this kernel could not do.
pub fn finish(roots: &[impl AsFd], withhold_landlock: bool) -> Result<Vec<String>, String> {
    let mut missing = Vec::new();
    if withhold_landlock {
        missing.push("Landlock is withheld".to_owned());
    } else if !restrict_files(roots).map_err(|e| format!("Landlock: {e}"))? {
        missing.push(
            "this kernel has no Landlock (5.13): system calls are restricted, paths are not".to_owned(),
        );
    }
    let filter = filter().map_err(|e| format!("seccomp: {e}"))?;
    if let Err(error) = seccompiler::apply_filter_all_threads(&filter) {
        missing.push(format!("seccomp is not possible here: {error}"));
    }
    Ok(missing)
}

/// False: the kernel does not know Landlock.
fn restrict_files(roots: &[impl AsFd]) -> Result<bool, landlock::RulesetError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V3))?
        .create()?;
    for root in roots {
        rules = rules.add_rule(PathBeneath::new(root.as_fd(), AccessFs::ReadFile))?;
    }
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let rules: BTreeMap<i64, Vec<seccompiler::SeccompRule>> =
        ALLOWED.iter().map(|number| (*number, Vec::new())).collect();
    // Refused calls fail: a panic message still gets out, and a library finds its fallback.
    SeccompFilter::new(
        rules,
        SeccompAction::Errno(libc::EPERM as u32),
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?
    .try_into()
}

/// What the worker, glibc's threads and memory, and LMDB's readers need. Nothing here opens a path but `openat2`, which
/// Landlock confines, and nothing makes a process, a socket or a mount.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_close,
    libc::SYS_openat2,
    libc::SYS_fstat,
    libc::SYS_newfstatat, // fstat in newer glibc
    libc::SYS_statx,
    libc::SYS_fcntl,
    libc::SYS_lseek,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_setsockopt,
    libc::SYS_ppoll,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_mlock,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_clone, // threads: without execve and with no_new_privs a child could do no more than its parent
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_prctl, // names of threads
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_tgkill, // abort
    libc::SYS_exit,
    libc::SYS_exit_group,
];
