//! What a worker gives up before it looks at a request: new privileges, system calls that it does not need, every file
//! but those of its cache directories. What a kernel cannot do is reported and left out.

use landlock::{ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus};
use lockdown::{Calls, lower};
use rustix::process::Resource;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Private writable memory at most: buffers of fuser (16 MiB of address space a thread, of which a page is used), stacks.
const DATA_BYTES_MAX: u64 = 2 << 30;
/// Descriptors: the cache files held open, and a few dozen besides.
pub const FILES_MAX: u64 = 1024;

/// At start, before anything is received: holds for every thread.
pub fn begin() -> Result<(), String> {
    let text = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
    rustix::thread::set_no_new_privs(true).map_err(text("no_new_privs"))?;
    // Agent and siblings have the same user: none of them, taken over, reads or changes this process.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .map_err(text("PR_SET_DUMPABLE"))?;
    // A huge page for each of fuser's buffers would be 2 MiB where 4 KiB are used.
    let _ = nix::sys::prctl::set_thp_disable(true); // refused (before 3.15): memory is larger, nothing else
    // SAFETY: before any other thread; one heap is enough for small messages, and each would keep what it once used.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    lower(Resource::Data, DATA_BYTES_MAX).map_err(text("RLIMIT_DATA"))?;
    lower(Resource::Nofile, FILES_MAX).map_err(text("RLIMIT_NOFILE"))?;
    Ok(())
}

/// After the session exists and before other threads do, which inherit both. Returns what this kernel could not do.
pub fn finish(roots: &[impl AsFd], landlock_disabled: bool) -> Result<Vec<String>, String> {
    let mut missing = Vec::new();
    let confined = !landlock_disabled && restrict_files(roots).map_err(|e| format!("Landlock: {e}"))?;
    if !confined {
        missing.push(
            "this kernel has no Landlock (5.13), or it is disabled: each file is asked of the agent"
                .to_owned(),
        );
    }
    missing.extend(enforce(confined).map_err(|e| format!("seccomp: {e}"))?);
    Ok(missing)
}

/// Once every thread of the worker runs: it gets no more of them. They would count against the agent's user, and against
/// the group of its pod, until neither agent nor worker could start another one.
pub fn settle() -> Result<(), String> {
    lockdown::take_away(&[libc::SYS_clone, libc::SYS_seccomp])
}

/// False: the kernel does not know Landlock.
fn restrict_files(roots: &[impl AsFd]) -> Result<bool, String> {
    let text = |e: landlock::RulesetError| e.to_string();
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V3))
        .and_then(Ruleset::create)
        .map_err(text)?;
    // None: the kernel does not know Landlock.
    let ruleset: Option<OwnedFd> = rules.try_clone().map_err(|e| e.to_string())?.into();
    if let Some(ruleset) = ruleset {
        for root in roots {
            allow_reads_below(ruleset.as_fd(), root.as_fd())
                .map_err(|e| format!("a cache directory: {e}"))?;
        }
    }
    Ok(rules.restrict_self().map_err(text)?.ruleset != RulesetStatus::NotEnforced)
}

/// The crate's `PathBeneath` looks at the directory (fstat) to see that it is one. Where its disk hangs no worker would come
/// up any more. The kernel itself asks the disk nothing here.
fn allow_reads_below(ruleset: BorrowedFd<'_>, directory: BorrowedFd<'_>) -> io::Result<()> {
    /// `struct landlock_path_beneath_attr` (linux/landlock.h).
    #[repr(C, packed)]
    struct PathBeneath {
        allowed_access: u64,
        parent_fd: i32,
    }
    const LANDLOCK_RULE_PATH_BENEATH: libc::c_int = 1;
    let rule = PathBeneath { allowed_access: AccessFs::ReadFile as u64, parent_fd: directory.as_raw_fd() };
    // SAFETY: both descriptors are open, and the kernel reads the rule, which has its layout, during the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_landlock_add_rule,
            ruleset.as_raw_fd(),
            LANDLOCK_RULE_PATH_BENEATH,
            &raw const rule,
            0_u32,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Landlock confines what `openat2` reaches: without it, nothing is opened any more, and the worker asks the agent.
fn enforce(opens: bool) -> Result<Vec<String>, seccompiler::BackendError> {
    let mut calls = Calls::allowing(ALLOWED)?;
    if opens {
        calls.allow(libc::SYS_openat2);
    }
    // F_SETOWN and F_SETSIG send signals, F_SETLEASE and F_NOTIFY hold up others, F_ADD_SEALS changes shared memory.
    let commands = [
        libc::F_GETFD,
        libc::F_SETFD,
        libc::F_GETFL,
        libc::F_DUPFD_CLOEXEC,
        libc::F_GET_SEALS,
        libc::F_SETPIPE_SZ,
    ];
    calls.only(libc::SYS_fcntl, 1, &commands.map(|command| command as u64))?;
    // The second for [`settle`]: it is set already, and cannot be taken back.
    let options = [libc::PR_SET_NAME, libc::PR_SET_NO_NEW_PRIVS];
    calls.only(libc::SYS_prctl, 0, &options.map(|option| option as u64))?;
    calls.forbid_code(false)?;
    calls.enforce(true)
}

/// What the worker, glibc's threads and memory, and LMDB's readers need, whatever the arguments. Nothing here opens a
/// path, sends a signal, or makes a process, a socket or a mount.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_splice,
    libc::SYS_pipe2,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat, // fstat in newer glibc
    libc::SYS_statx,
    libc::SYS_lseek,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_setsockopt,
    libc::SYS_ppoll,
    libc::SYS_munmap,
    libc::SYS_mremap,
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
    libc::SYS_seccomp, // for `settle`, which refuses it; a filter can only take away
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];
