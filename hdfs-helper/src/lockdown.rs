//! What a helper gives up before it talks to HDFS: files but those that resolve names and hold code, programs, signals
//! to others, every kind of socket but those of IP.

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;

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
    let failed = |e: seccompiler::BackendError| format!("seccomp: {e}");
    // In this order: where both refuse, the newer one's errno counts.
    for program in [without_clone3().map_err(failed)?, filter().map_err(failed)?] {
        if let Err(error) = seccompiler::apply_filter(&program) {
            missing.push(format!("seccomp is not possible here: {error}"));
        }
    }
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

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let anything = ALLOWED.iter().map(|number| (*number, Vec::new()));
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = anything.collect();
    let is = |argument, value: u64| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
    };
    let has_not = |argument, bits: u64| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(bits), 0)
    };
    let one = |condition| SeccompRule::new(vec![condition]);
    // Only itself. (abort)
    rules.insert(libc::SYS_tgkill, vec![one(is(0, u64::from(std::process::id()))?)?]);
    // Threads and nothing else.
    let threads = (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND) as u64;
    let is_thread =
        SeccompCondition::new(0, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(threads), threads);
    rules.insert(libc::SYS_clone, vec![one(is_thread?)?]);
    // No local sockets (of other programs of this node); netlink tells the C library which addresses this host has.
    let domains = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    let socket = domains.iter().map(|domain| one(is(0, *domain as u64)?));
    rules.insert(libc::SYS_socket, socket.collect::<Result<_, _>>()?);
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
    let fcntl = commands.iter().map(|command| one(is(1, *command as u64)?));
    rules.insert(libc::SYS_fcntl, fcntl.collect::<Result<_, _>>()?);
    rules.insert(libc::SYS_prctl, vec![one(is(0, libc::PR_SET_NAME as u64)?)?]);
    rules.insert(libc::SYS_ioctl, vec![one(is(1, libc::FIONBIO)?)?, one(is(1, libc::FIONREAD)?)?]);
    // To whom it is connected, and to nobody else: see `egress.rs`.
    let nobody = SeccompCondition::new(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0);
    rules.insert(libc::SYS_sendto, vec![one(nobody?)?]);
    // Code comes from files, which Landlock limits to the system's libraries.
    let exec = libc::PROT_EXEC as u64;
    rules.insert(libc::SYS_mprotect, vec![one(has_not(2, exec)?)?]);
    let of_a_file = SeccompRule::new(vec![has_not(3, libc::MAP_ANONYMOUS as u64)?])?;
    rules.insert(libc::SYS_mmap, vec![one(has_not(2, exec)?)?, of_a_file]);
    // Refused calls fail: a library finds its fallback.
    program(rules, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow)
}

/// What clone3 shall do lies in memory, where no filter sees it. Without it glibc starts threads with clone.
fn without_clone3() -> Result<BpfProgram, seccompiler::BackendError> {
    let rules = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    program(rules, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))
}

fn program(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram, seccompiler::BackendError> {
    SeccompFilter::new(rules, otherwise, matched, std::env::consts::ARCH.try_into()?)?.try_into()
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
    libc::SYS_clone3, // refused by a filter of its own
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
