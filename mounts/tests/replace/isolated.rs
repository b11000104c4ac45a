//! Every test in a process and a mount namespace of its own, with a limit: whatever a test does, hangs in or leaves
//! behind ends with its process.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const DIRECTORY: &str = "MILLPOND_TEST_DIRECTORY";
const LIMIT: Duration = Duration::from_secs(60);

/// Runs `body` with an empty directory, in a new process that runs the test `name` and nothing else.
pub fn isolated(name: &str, body: impl FnOnce(&Path)) {
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        return body(&PathBuf::from(directory));
    }
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    // Its panics are shown; its count of tests would be taken for one of this program.
    command.env(DIRECTORY, directory.path().canonicalize().unwrap()).stdout(Stdio::null());
    in_new_namespace(&mut command, Spreads::Nowhere, vec![]);
    // All of it can be killed at once, a server with those that wait for it.
    command.process_group(0);
    let mut child = Group(command.spawn().expect("these tests need root"));
    let deadline = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "{name} hangs: ended after {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success(), "{name}: {status}");
}

struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        use rustix::process::{Pid, Signal, kill_process_group};
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL); // ended: fine
        let _ = self.0.wait();
    }
}

/// A child that does not outlive its value, nor the thread that started it.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill(); // ended: fine
        let _ = self.0.wait();
    }
}

/// Mount calls for a namespace that has just been made, between fork and exec: no allocation.
pub type Step = Box<dyn Fn() -> io::Result<()> + Send + Sync>;

/// What becomes of mounts that are made in another namespace later.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Spreads {
    /// As in containers, unless they ask for something else.
    Nowhere,
    /// Shared mounts stay so.
    Here,
}

/// The command will run in a mount namespace of its own.
pub fn in_new_namespace(command: &mut Command, spreads: Spreads, steps: Vec<Step>) {
    use rustix::mount::{MountPropagationFlags, mount_change};
    let enter = move || -> io::Result<()> {
        super::die_with_parent()?;
        // SAFETY: no other thread shares this process's file system state: it was just forked.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS)? };
        if spreads == Spreads::Nowhere {
            mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        }
        steps.iter().try_for_each(|step| step())
    };
    // SAFETY: the closure makes system calls only and allocates nothing.
    unsafe { command.pre_exec(enter) };
}

/// A process that waits until it is killed.
pub fn sleeper() -> Command {
    let mut command = Command::new(OsStr::new("sleep"));
    command.arg("infinity").stdin(Stdio::null()).stdout(Stdio::null());
    command
}
