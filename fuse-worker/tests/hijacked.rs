//! What a worker under an attacker's control can still do: a process locks itself down as a worker does, and then tries.
//!
//! The process is this test binary again. Nothing here needs root.
#![allow(clippy::unwrap_used)] // helpers of tests, on which clippy sees no #[test]

use libc::{c_long, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};

const ROLE: &str = "MILLPOND_HIJACKED";
/// The worker's own cache directory; another scope's lies beside it.
const ROOT: &str = "MILLPOND_HIJACKED_ROOT";

/// Not a test: the worker.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let root = std::env::var(ROOT).unwrap();
    let directory: OwnedFd = std::fs::File::open(&root).unwrap().into();
    let link: OwnedFd = std::os::unix::net::UnixStream::pair().unwrap().0.into();
    let parent = std::os::unix::process::parent_id();
    fuse_worker::lockdown::begin().unwrap();
    let missing = fuse_worker::lockdown::finish(&[&directory], role == "without Landlock").unwrap();
    println!("MISSING {missing:?}");
    // What it lives by.
    say("thread", std::thread::spawn(|| 7).join().is_ok_and(|seven| seven == 7));
    say("memory", vec![1u8; 8 << 20].iter().all(|b| *b == 1));
    say("own file", open(&directory, "own") >= 0);
    // What it must not.
    let other = format!("{root}/../other/secret");
    let path = std::ffi::CString::new(other).unwrap();
    let here = libc::AT_FDCWD;
    say("other scope's file", open_at(here, &path) >= 0);
    say("other scope's file, upwards", open(&directory, "../other/secret") >= 0);
    say(
        "agent's memory",
        open_at(here, &std::ffi::CString::new(format!("/proc/{parent}/mem")).unwrap()) >= 0,
    );
    say("signal to the agent", call(libc::SYS_tgkill, [parent.into(), parent.into(), 0, 0, 0]) >= 0);
    say("kill", call(libc::SYS_kill, [parent.into(), 0, 0, 0, 0]) >= 0);
    say("queued signal", call(libc::SYS_rt_sigqueueinfo, [parent.into(), 0, 0, 0, 0]) >= 0);
    say("pidfd", call(libc::SYS_pidfd_open, [parent.into(), 0, 0, 0, 0]) >= 0);
    let fd = c_long::from(link.as_raw_fd());
    say(
        "signals by a descriptor",
        call(libc::SYS_fcntl, [fd, libc::F_SETOWN.into(), parent.into(), 0, 0]) >= 0,
    );
    let file = c_long::from(directory.as_raw_fd());
    say("a lease", call(libc::SYS_fcntl, [file, libc::F_SETLEASE.into(), libc::F_RDLCK.into(), 0, 0]) >= 0);
    say("seals", call(libc::SYS_fcntl, [file, 1033, 2, 0, 0]) != -c_long::from(libc::EPERM));
    say("trace", call(libc::SYS_ptrace, [libc::PTRACE_ATTACH.into(), parent.into(), 0, 0, 0]) >= 0);
    say("a child", call(libc::SYS_clone, [libc::SIGCHLD.into(), 0, 0, 0, 0]) >= 0);
    say("clone3 is absent", call(libc::SYS_clone3, [0, 0, 0, 0, 0]) == -c_long::from(libc::ENOSYS));
    say("a program", call(libc::SYS_execve, [0, 0, 0, 0, 0]) != -c_long::from(libc::EPERM));
    say("a socket", call(libc::SYS_socket, [libc::AF_INET.into(), libc::SOCK_STREAM.into(), 0, 0, 0]) >= 0);
    say("a mount", call(libc::SYS_mount, [0, 0, 0, 0, 0]) != -c_long::from(libc::EPERM));
    say(
        "an ioctl",
        call(libc::SYS_ioctl, [fd, libc::FIONREAD as c_long, 0, 0, 0]) != -c_long::from(libc::EPERM),
    );
    say("a truncation", call(libc::SYS_ftruncate, [file, 0, 0, 0, 0]) != -c_long::from(libc::EPERM));
    say("dumps", call(libc::SYS_prctl, [libc::PR_SET_DUMPABLE.into(), 1, 0, 0, 0]) >= 0);
    // SAFETY: a fresh anonymous mapping, which nothing uses.
    let code = unsafe {
        libc::mmap(
            std::ptr::null_mut::<c_void>(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    say("code of its own", code != libc::MAP_FAILED);
    // Once its threads run.
    fuse_worker::lockdown::settle().unwrap();
    say("one more thread", std::thread::Builder::new().spawn(|| ()).is_ok());
    say("one more filter", fuse_worker::lockdown::settle().is_ok());
    // Last, for it ends here: abort must work, or a worker that has lost its head limps along.
    println!("ABORTS");
    std::process::abort();
}

fn say(what: &str, worked: bool) {
    println!("DID {what}: {worked}");
}

/// The result, or minus errno.
fn call(number: c_long, a: [c_long; 5]) -> c_long {
    // SAFETY: every call here is refused, or takes null pointers and numbers only.
    let result = unsafe { libc::syscall(number, a[0], a[1], a[2], a[3], a[4]) };
    if result == -1 { -c_long::from(std::io::Error::last_os_error().raw_os_error().unwrap()) } else { result }
}

fn open(directory: &OwnedFd, name: &str) -> c_long {
    open_at(directory.as_raw_fd(), &std::ffi::CString::new(name).unwrap())
}

fn open_at(at: i32, path: &std::ffi::CStr) -> c_long {
    let how = [libc::O_RDONLY as u64 | libc::O_CLOEXEC as u64, 0, 0];
    call(
        libc::SYS_openat2,
        [at.into(), path.as_ptr() as c_long, how.as_ptr() as c_long, size_of_val(&how) as c_long, 0],
    )
}

fn what_it_did(role: &str) -> (String, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    for name in ["root", "other"] {
        std::fs::create_dir(dir.path().join(name)).unwrap();
    }
    std::fs::write(dir.path().join("root/own"), "own").unwrap();
    std::fs::write(dir.path().join("other/secret"), "secret").unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "role", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(ROOT, dir.path().join("root"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{text}");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(libc::SIGABRT));
    let did = text.lines().filter_map(|line| line.split_once("DID ")?.1.strip_suffix(": true"));
    let did = did.map(str::to_owned).collect();
    (text, did)
}

#[test]
fn a_hijacked_worker_reaches_no_process_no_other_scope_and_no_network() {
    let (text, did) = what_it_did("with Landlock");
    assert!(text.contains("MISSING []"), "this kernel has neither Landlock nor seccomp: {text}");
    assert_eq!(did, ["thread", "memory", "own file", "clone3 is absent"]);
}

#[test]
fn without_landlock_a_worker_opens_nothing() {
    let (_, did) = what_it_did("without Landlock");
    assert_eq!(did, ["thread", "memory", "clone3 is absent"]);
}
