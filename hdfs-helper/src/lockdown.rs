//! What a helper gives up before it talks to HDFS: files but those that resolve names and hold code, programs, signals
//! to others, every kind of socket but those of IP.

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus,
};
use lockdown::Calls;

/// What the C library reads to resolve a name and to load code (Kerberos' library and its encryption, the resolver's
/// modules). Nothing of the agent's.
const READABLE: &[&str] = &[
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/protocols",
    "/etc/localtime",
    "/etc/ld.so.cache",
    "/etc/ssl/openssl.cnf",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/dev/null",
    "/dev/urandom",
];

/// Before any other thread, which inherit it. Returns what this kernel cannot do.
pub(crate) fn enforce() -> Result<Vec<String>, String> {
    let mut missing = Vec::new();
    if !restrict_files().map_err(|e| format!("Landlock: {e}"))? {
        missing.push("this kernel has no Landlock (5.13), or it is disabled".to_owned());
    }
    missing.extend(restrict_calls().map_err(|e| format!("seccomp: {e}"))?);
    Ok(missing)
}

/// False: the kernel does not know Landlock.
fn restrict_files() -> Result<bool, landlock::RulesetError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .create()?;
    for path in READABLE {
        let Ok(place) = PathFd::new(path) else { continue }; // a machine without it
        let is_directory = std::path::Path::new(path).is_dir();
        let may = if is_directory {
            AccessFs::ReadFile | AccessFs::ReadDir
        } else if *path == "/dev/null" {
            AccessFs::ReadFile | AccessFs::WriteFile
        } else {
            AccessFs::ReadFile.into()
        };
        rules = rules.add_rule(PathBeneath::new(place, may))?;
    }
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

fn restrict_calls() -> Result<Vec<String>, seccompiler::BackendError> {
    let mut calls = Calls::allowing(ALLOWED)?;
    // No local sockets (of other programs of this node); netlink tells the C library which addresses this host has.
    let domains = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    calls.only(libc::SYS_socket, 0, &domains.map(|domain| domain as u64))?;
    let commands = [
        libc::F_GETFD,
        libc::F_SETFD,
        libc::F_GETFL,
        libc::F_SETFL,
        libc::F_DUPFD_CLOEXEC,
        libc::F_SETLK,
        libc::F_SETLKW,
        libc::F_OFD_SETLK,
        libc::F_OFD_SETLKW,
    ];
    calls.only(libc::SYS_fcntl, 1, &commands.map(|command| command as u64))?;
    calls.only(libc::SYS_prctl, 0, &[libc::PR_SET_NAME as u64])?;
    calls.only(libc::SYS_ioctl, 1, &[libc::FIONBIO, libc::FIONREAD])?;
    // To whom it is connected, and to nobody else: see `egress.rs`.
    calls.only_wide(libc::SYS_sendto, 4, 0)?;
    // Code comes from files, which Landlock limits to the system's libraries.
    calls.forbid_code(true)?;
    calls.enforce(false)
}

/// What a client of network services, glibc's threads, memory and resolver, and its loader need, whatever the
/// arguments. Nothing here makes a process or a mount, listens, or changes a file system.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_lseek,
    libc::SYS_ftruncate, // a ticket cache that is written anew
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_dup,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_socketpair, // of the runtime, with itself
    libc::SYS_connect,
    libc::SYS_bind, // of the resolver's netlink socket; listen and accept are not here
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_prlimit64,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_arch_prctl, // glibc, of a thread's end
];
