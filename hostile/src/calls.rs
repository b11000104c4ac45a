//! System calls that an attacker in a worker makes, after the worker's own lock-down.

use crate::knowledge::Knowledge;
use crate::report::{Report, errno_name};
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

/// `open_how` of openat2(2).
const NO_MODE: u64 = 0;
/// Above every system call of x86_64 and aarch64 that a kernel of today knows.
const CALLS: i64 = 480;
/// Enough to see that there is no bound, and no harm to the machine.
const THREADS: usize = 1500;

/// Each has a name in the report, beside the number in [`every_call`]: the ways out that an attacker tries first.
const NAMED: &[(&str, i64)] = &[
    ("execve", libc::SYS_execve),
    ("execveat", libc::SYS_execveat),
    ("openat", libc::SYS_openat),
    ("unlinkat", libc::SYS_unlinkat),
    ("renameat2", libc::SYS_renameat2),
    ("mkdirat", libc::SYS_mkdirat),
    ("symlinkat", libc::SYS_symlinkat),
    ("linkat", libc::SYS_linkat),
    ("ftruncate", libc::SYS_ftruncate),
    ("fchmodat", libc::SYS_fchmodat),
    ("getdents64", libc::SYS_getdents64),
    ("chdir", libc::SYS_chdir),
    ("chroot", libc::SYS_chroot),
    ("socket", libc::SYS_socket),
    ("socketpair", libc::SYS_socketpair),
    ("connect", libc::SYS_connect),
    ("bind", libc::SYS_bind),
    ("accept4", libc::SYS_accept4),
    ("ptrace", libc::SYS_ptrace),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("process_vm_writev", libc::SYS_process_vm_writev),
    ("pidfd_open", libc::SYS_pidfd_open),
    ("pidfd_getfd", libc::SYS_pidfd_getfd),
    ("kill", libc::SYS_kill),
    ("tkill", libc::SYS_tkill),
    ("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo),
    ("setuid", libc::SYS_setuid),
    ("setresuid", libc::SYS_setresuid),
    ("setgid", libc::SYS_setgid),
    ("capset", libc::SYS_capset),
    ("seccomp", libc::SYS_seccomp),
    ("mount", libc::SYS_mount),
    ("umount2", libc::SYS_umount2),
    ("fsopen", libc::SYS_fsopen),
    ("open_tree", libc::SYS_open_tree),
    ("move_mount", libc::SYS_move_mount),
    ("pivot_root", libc::SYS_pivot_root),
    ("unshare", libc::SYS_unshare),
    ("setns", libc::SYS_setns),
    ("bpf", libc::SYS_bpf),
    ("perf_event_open", libc::SYS_perf_event_open),
    ("userfaultfd", libc::SYS_userfaultfd),
    ("io_uring_setup", libc::SYS_io_uring_setup),
    ("keyctl", libc::SYS_keyctl),
    ("add_key", libc::SYS_add_key),
    ("ioctl", libc::SYS_ioctl),
    ("prlimit64", libc::SYS_prlimit64),
    ("setpriority", libc::SYS_setpriority),
    ("sched_setscheduler", libc::SYS_sched_setscheduler),
    ("sched_setaffinity", libc::SYS_sched_setaffinity),
    ("memfd_create", libc::SYS_memfd_create),
    ("shmget", libc::SYS_shmget),
    ("personality", libc::SYS_personality),
    ("init_module", libc::SYS_init_module),
    ("kexec_load", libc::SYS_kexec_load),
    ("reboot", libc::SYS_reboot),
];

/// What a worker lives by, whatever the arguments: the filter is not asked, so that what it lets in besides is a finding.
/// (Others are let in with certain arguments: see [`processes`].)
const LIVED_BY: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_splice,
    libc::SYS_pipe2,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
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
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_openat2,
    libc::SYS_clone3, // ENOSYS
];

/// `uretprobe` and `uprobe` of x86_64 end whoever calls them from anywhere but the kernel's own trampoline (SIGILL); newer
/// kernels let them pass every filter, since it is the kernel that put them there.
const ENDS_THE_CALLER: &[i64] = if cfg!(target_arch = "x86_64") { &[335, 336] } else { &[] };

/// The result, or errno.
pub fn call(number: i64, arguments: [u64; 6]) -> Result<i64, i32> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: what is passed here is refused, or takes numbers, descriptors and pointers that outlive the call.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    match result {
        -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or_default()),
        result => Ok(result),
    }
}

fn shown(result: Result<i64, i32>, achieved: &str) -> String {
    match result {
        Ok(_) => format!("achieved: {achieved}"),
        Err(errno) => errno_name(errno),
    }
}

fn fd(number: RawFd) -> u64 {
    i64::from(number) as u64
}

fn open_at(at: RawFd, path: &CStr, flags: i32, mode: u64) -> Result<i64, i32> {
    let how = [flags as u64 | libc::O_CLOEXEC as u64, mode, 0];
    call(
        libc::SYS_openat2,
        [fd(at), path.as_ptr() as u64, how.as_ptr() as u64, size_of_val(&how) as u64, 0, 0],
    )
}

fn text(path: &Path) -> CString {
    CString::new(path.as_os_str().as_encoded_bytes()).unwrap_or_default()
}

/// All of them.
pub fn attempt(k: &Knowledge, report: &Report) {
    files(k, report);
    processes(k, report);
    memory(report);
    every_call(report);
    descriptors(k, report);
    pipes(report);
    threads(report);
}

fn files(k: &Knowledge, report: &Report) {
    let reads = |path: &Path| open_at(libc::AT_FDCWD, &text(path), libc::O_RDONLY, NO_MODE);
    for (attempt, path) in [
        ("read a file of the host that all may read", "/etc/passwd".into()),
        ("read /etc/shadow", "/etc/shadow".into()),
        ("read a cache file of another scope", k.foreign_file.clone()),
        ("read the names of another scope", k.foreign_names.clone()),
        ("read the agent's state", k.state_file.clone()),
        ("read the agent's memory", format!("/proc/{}/mem", k.agent).into()),
        ("read the agent's environment", format!("/proc/{}/environ", k.agent).into()),
        ("open a descriptor of the agent", format!("/proc/{}/fd/0", k.agent).into()),
        ("read another worker's memory", format!("/proc/{}/mem", k.sibling).into()),
        ("read its own memory as a file", "/proc/self/mem".into()),
    ] {
        report.note(attempt, shown(reads(&path), "opened"));
    }
    let root = k.roots.first().map_or(libc::AT_FDCWD, AsRawFd::as_raw_fd);
    let upwards = Path::new("..").join(k.foreign_file.strip_prefix(&k.tier).unwrap_or(&k.foreign_file));
    let below = |path: &Path, flags: i32, mode: u64| open_at(root, &text(path), flags, mode);
    let tries: [(&str, &Path, i32, u64); 6] = [
        ("go up from its cache directory", &upwards, libc::O_RDONLY, NO_MODE),
        ("follow a link out of its cache directory", Path::new("hostile-link"), libc::O_RDONLY, NO_MODE),
        ("list its cache directory", Path::new("."), libc::O_RDONLY | libc::O_DIRECTORY, NO_MODE),
        ("make a file in its cache directory", Path::new("new"), libc::O_WRONLY | libc::O_CREAT, 0o600),
        ("make a file without a name there", Path::new("."), libc::O_RDWR | libc::O_TMPFILE, 0o600),
        ("change a file of its cache directory", Path::new("hostile-file"), libc::O_RDWR, NO_MODE),
    ];
    for (attempt, path, flags, mode) in tries {
        report.note(attempt, shown(below(path, flags, mode), "opened"));
    }
    let own = below(Path::new("hostile-file"), libc::O_RDONLY, NO_MODE);
    report.note("read a file of its cache directory", shown(own, "its own scope's"));
    // What a path alone tells.
    let named = open_at(libc::AT_FDCWD, c"/etc/shadow", libc::O_PATH, NO_MODE);
    let read = named.and_then(|number| {
        let mut byte = 0u8;
        call(libc::SYS_read, [number as u64, &raw mut byte as u64, 1, 0, 0, 0])
    });
    report.note("read through a descriptor of a path alone", shown(read, "read"));
    let path = text(&k.foreign_file);
    let mut stat = [0u64; 64];
    let looked = call(
        libc::SYS_statx,
        [fd(libc::AT_FDCWD), path.as_ptr() as u64, 0, 0x7ff, stat.as_mut_ptr() as u64, 0],
    );
    report.note("look at a file of another scope", shown(looked, "that it is there, its size and times"));
}

fn processes(k: &Knowledge, report: &Report) {
    for (attempt, number) in NAMED {
        // No pointer and no descriptor: a call that is not refused at the door fails otherwise.
        report.note(attempt, shown(call(*number, [u64::MAX; 6]), "let in"));
    }
    let (agent, sibling) = (k.agent as u64, k.sibling as u64);
    let control =
        |command: i32, value: u64| call(libc::SYS_fcntl, [fd(k.link), command as u64, value, 0, 0, 0]);
    let option = |option: i32, value: u64| call(libc::SYS_prctl, [option as u64, value, 0, 0, 0, 0]);
    let child = |flags: i32| call(libc::SYS_clone, [flags as u64, 0, 0, 0, 0, 0]);
    for (attempt, result) in [
        ("signal the agent by thread", call(libc::SYS_tgkill, [agent, agent, 0, 0, 0, 0])),
        ("signal another worker by thread", call(libc::SYS_tgkill, [sibling, sibling, 0, 0, 0, 0])),
        ("be the owner of signals of a descriptor", control(libc::F_SETOWN, agent)),
        ("lease a file", control(libc::F_SETLEASE, libc::F_RDLCK as u64)),
        ("seal shared memory", control(libc::F_ADD_SEALS, libc::F_SEAL_WRITE as u64)),
        ("fork", child(libc::SIGCHLD)),
        ("a process that shares its memory", child(libc::CLONE_VM | libc::SIGCHLD)),
        ("a user namespace", child(libc::CLONE_NEWUSER | libc::SIGCHLD)),
        ("clone3", call(libc::SYS_clone3, [0, 0, 0, 0, 0, 0])),
        ("be dumpable", option(libc::PR_SET_DUMPABLE, 1)),
        ("gain privileges again", option(libc::PR_SET_NO_NEW_PRIVS, 0)),
        ("outlive the agent", option(libc::PR_SET_PDEATHSIG, 0)),
        ("a filter of its own", option(libc::PR_SET_SECCOMP, 2)),
    ] {
        report.note(attempt, shown(result, "done"));
    }
    // x32: the same numbers with another bit are other calls to a filter.
    #[cfg(target_arch = "x86_64")]
    report.note("openat of x32", shown(call(0x4000_0000 | libc::SYS_openat, [u64::MAX; 6]), "let in"));
}

fn memory(report: &Report) {
    let map = |bytes: u64, protection: i32, flags: i32| {
        call(libc::SYS_mmap, [0, bytes, protection as u64, flags as u64, u64::MAX, 0])
    };
    let (rw, anonymous) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    report.note("code of its own", shown(map(4096, rw | libc::PROT_EXEC, anonymous), "mapped"));
    let page = map(4096, rw, anonymous);
    let turned = page.and_then(|page| {
        call(libc::SYS_mprotect, [page as u64, 4096, (libc::PROT_READ | libc::PROT_EXEC) as u64, 0, 0, 0])
    });
    report.note("memory that becomes code", shown(turned, "done"));
    report.note("four gigabytes of its own", shown(map(4 << 30, rw, anonymous), "mapped"));
}

/// Which other calls get past the filter.
fn every_call(report: &Report) {
    let passed = |number: &i64| {
        let tried = !LIVED_BY.contains(number) && !ENDS_THE_CALLER.contains(number);
        tried && call(*number, [u64::MAX; 6]).err() != Some(libc::EPERM)
    };
    let numbers: Vec<String> = (0..CALLS).filter(passed).map(|number| number.to_string()).collect();
    report.note("every other system call by its number", format!("let in: [{}]", numbers.join(" ")));
}

fn descriptors(k: &Knowledge, report: &Report) {
    let more = || call(libc::SYS_fcntl, [fd(k.link), libc::F_DUPFD_CLOEXEC as u64, 0, 0, 0, 0]);
    let mut made = Vec::new();
    let end = loop {
        match more() {
            Ok(number) => made.push(number as u64),
            Err(errno) => break errno_name(errno),
        }
    };
    let bounded = made.len() as u64 <= fuse_worker::lockdown::FILES_MAX;
    report.note(
        "descriptors without end",
        format!("{end}, {} limit", if bounded { "at its" } else { "beyond its" }),
    );
    for number in made {
        let _ = call(libc::SYS_close, [number, 0, 0, 0, 0, 0]); // it is ours
    }
}

/// Pipes of full size: what all processes of its user have of them is one account.
fn pipes(report: &Report) {
    let mut made: Vec<[i32; 2]> = Vec::new();
    let end = loop {
        let mut ends = [0; 2];
        if let Err(errno) =
            call(libc::SYS_pipe2, [ends.as_mut_ptr() as u64, libc::O_CLOEXEC as u64, 0, 0, 0, 0])
        {
            break errno;
        }
        made.push(ends);
        if let Err(errno) = call(libc::SYS_fcntl, [fd(ends[0]), libc::F_SETPIPE_SZ as u64, 1 << 20, 0, 0, 0])
        {
            break errno;
        }
    };
    let refused = matches!(end, libc::EPERM | libc::EMFILE);
    let bounded = made.len() as u64 <= fuse_worker::lockdown::FILES_MAX / 2;
    let shown =
        if refused && bounded { "achieved: all that its user may have" } else { "beyond every limit" };
    report.note("pipes without end", shown.to_owned());
    // What is left of its descriptors it needs for what it tries next. The pipes it keeps, so that the other workers are
    // seen to do without.
    if end == libc::EMFILE {
        for number in made.into_iter().flatten() {
            let _ = call(libc::SYS_close, [fd(number), 0, 0, 0, 0, 0]); // it is ours
        }
    }
}

/// Threads that wait, until there are no more to be had.
fn threads(report: &Report) {
    let over = Arc::new((Mutex::new(false), Condvar::new()));
    let mut all = Vec::new();
    let refused = loop {
        if all.len() >= THREADS {
            break None;
        }
        let over = over.clone();
        let wait = move || {
            let (over, changed) = &*over;
            let over = over.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            drop(changed.wait_while(over, |over| !*over));
        };
        match std::thread::Builder::new().stack_size(16 << 10).spawn(wait) {
            Ok(thread) => all.push(thread),
            Err(error) => break error.raw_os_error(),
        }
    };
    let result = match refused {
        None => format!("achieved: {THREADS} and more"),
        Some(errno) => format!("{} after {}", errno_name(errno), all.len()),
    };
    report.note("threads without end", result);
    *over.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = true;
    over.1.notify_all();
    for thread in all {
        let _ = thread.join(); // it waits, and ends
    }
}
