//! A limit of memory for one process: a control group of its own, a child of its parent's, in version 1 or 2.
//!
//! ```text
//!  v1   <the agent's>/millpond-worker-<pid>             limit, process
//!  v2   <the agent's>                                   +memory for its children, which it may do once it holds none
//!         ├─ millpond-agent                             the agent, and workers that have no group yet
//!         └─ millpond-worker-<pid>                      limit, process
//! ```
//!
//! A version 2 group hands controllers to its children only while no process is in it. Only the agent and its children
//! are moved: where others live in its group there are no limits, and that is said.

use mounts::unescape;
use procfs::process::{Process, Stat};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

const WORKER: &str = "millpond-worker-";
const AGENT: &str = "millpond-agent";
/// Processes may start while they are being moved.
const MOVES_MAX: usize = 10;

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error("no memory controller is mounted where this process sees it")]
    NoController,
    #[error("the memory group of process {pid} is not below {}, where this process sees the controller", seen.display())]
    OutOfSight { pid: u32, seen: PathBuf },
    #[error("process {0} is not a child of the agent")]
    NotAChild(u32),
    #[error("{0:?} is no worker's group")]
    NotAGroup(String),
    #[error("other processes than the agent's live in its group {}: it cannot give limits to its children", .0.display())]
    Shared(PathBuf),
    #[error("cannot {what} {}: {source}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
}

/// What came of a dead worker's group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Released {
    /// Processes of it that the kernel has killed for want of memory.
    pub oom_kills: u64,
    /// It, if it could not be removed: its process is stuck in the kernel. Give it to [`remove`] later.
    pub left: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// Where this process sees the memory controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroups {
    version: Version,
    mount_point: PathBuf,
    /// The group that the mount point shows: a container may see its own only.
    root: PathBuf,
}

impl Cgroups {
    pub fn find() -> Result<Self, CgroupError> {
        let path = Path::new("/proc/self/mountinfo");
        let text = fs::read(path).map_err(io_error("read", path))?;
        let has_memory = |mount_point: &Path| {
            let controllers = fs::read_to_string(mount_point.join("cgroup.controllers"));
            controllers.is_ok_and(|all| all.split_whitespace().any(|one| one == "memory"))
        };
        Self::of(&text, has_memory).ok_or(CgroupError::NoController)
    }

    /// Version 1 where it has the controller: then version 2 has not.
    fn of(mountinfo: &[u8], has_memory: impl Fn(&Path) -> bool) -> Option<Self> {
        let all: Vec<_> = mountinfo.split(|b| *b == b'\n').filter_map(parse_mount).collect();
        let one = all.iter().find(|c| c.version == Version::One);
        one.or_else(|| all.iter().find(|c| has_memory(&c.mount_point))).cloned()
    }

    /// Gives `worker`, a child of `agent`, at most `bytes` of memory. Returns the name of its group. What it has taken
    /// before stays where it was counted.
    pub fn confine(&self, agent: u32, worker: BorrowedFd<'_>, bytes: u64) -> Result<String, CgroupError> {
        let pid = pid_of(worker)?;
        if parent_of(pid) != Some(agent) {
            return Err(CgroupError::NotAChild(pid));
        }
        let base = self.base(agent)?;
        if self.version == Version::Two {
            self.open_to_children(&base, agent)?;
        }
        let name = format!("{WORKER}{pid}");
        let group = base.join(&name);
        match fs::create_dir(&group) {
            // Of an earlier process of this number.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.map_err(io_error("make", &group))?,
        }
        let limit = match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        let confined = write(&group.join(limit), &bytes.to_string())
            .and_then(|()| write(&group.join("cgroup.procs"), &pid.to_string()));
        confined.inspect_err(|_| {
            let _ = fs::remove_dir(&group); // the first error is the one to tell
        })?;
        Ok(name)
    }

    /// Removes the group of a dead worker of `agent`, unless its process is stuck in the kernel.
    pub fn release(&self, agent: u32, name: &str) -> Result<Released, CgroupError> {
        let number = name.strip_prefix(WORKER).ok_or_else(|| CgroupError::NotAGroup(name.to_owned()))?;
        if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
            return Err(CgroupError::NotAGroup(name.to_owned()));
        }
        let group = self.base(agent)?.join(name);
        let events = group.join(match self.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        });
        let text = fs::read_to_string(&events).map_err(io_error("read", &events))?;
        let left = remove(&group).is_err().then_some(group);
        Ok(Released { oom_kills: oom_kills(&text), left })
    }

    /// Groups of workers, dead or alive.
    pub fn workers_below(base: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(base).into_iter().flatten().flatten();
        let groups = entries.filter(|e| e.file_name().to_str().is_some_and(|name| name.starts_with(WORKER)));
        groups.map(|group| group.path()).collect()
    }

    /// The group whose children the workers of `agent` get.
    pub fn base(&self, agent: u32) -> Result<PathBuf, CgroupError> {
        let file = PathBuf::from(format!("/proc/{agent}/cgroup"));
        let text = fs::read_to_string(&file).map_err(io_error("read", &file))?;
        // The kernel shows a process that is about to end in the root group: looked at after the group was read.
        if is_exiting(agent) {
            return Err(io_error("read", &file)(io::ErrorKind::NotFound.into()));
        }
        let seen = || CgroupError::OutOfSight { pid: agent, seen: self.root.clone() };
        let group = group_in(&text, self.version).ok_or_else(seen)?;
        let group = group.strip_suffix(&format!("/{AGENT}")).unwrap_or(&group);
        let below = Path::new(group).strip_prefix(&self.root).map_err(|_| seen())?;
        Ok(self.mount_point.join(below))
    }

    /// Version 2: moves the agent and its children out of the way, and lets the group limit its children's memory.
    fn open_to_children(&self, base: &Path, agent: u32) -> Result<(), CgroupError> {
        let control = base.join("cgroup.subtree_control");
        let on = fs::read_to_string(&control).map_err(io_error("read", &control))?;
        if on.split_whitespace().any(|one| one == "memory") {
            return Ok(());
        }
        // The root of all groups may have processes and give limits at once.
        if base.join("cgroup.type").exists() {
            let leaf = base.join(AGENT);
            match fs::create_dir(&leaf) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                made => made.map_err(io_error("make", &leaf))?,
            }
            self.empty(base, &leaf, agent)?;
        }
        write(&control, "+memory")
    }

    fn empty(&self, base: &Path, leaf: &Path, agent: u32) -> Result<(), CgroupError> {
        let procs = base.join("cgroup.procs");
        for _ in 0..MOVES_MAX {
            let text = fs::read_to_string(&procs).map_err(io_error("read", &procs))?;
            let pids: Vec<u32> = text.lines().filter_map(|line| line.trim().parse().ok()).collect();
            if pids.is_empty() {
                return Ok(());
            }
            for pid in pids {
                // One that has ended meanwhile has no parent any more.
                if pid != agent && parent_of(pid).is_some_and(|parent| parent != agent) {
                    let _ = fs::remove_dir(leaf); // not empty: what was moved is no worse off there
                    return Err(CgroupError::Shared(base.to_owned()));
                }
                match write(&leaf.join("cgroup.procs"), &pid.to_string()) {
                    Err(CgroupError::Io { source, .. }) if source.raw_os_error() == Some(libc::ESRCH) => {}
                    moved => moved?,
                }
            }
        }
        Err(CgroupError::Shared(base.to_owned()))
    }
}

/// Removes a group. One that is gone already is no error; one that a process lives in is.
pub fn remove(group: &Path) -> io::Result<()> {
    match fs::remove_dir(group) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether no process lives in a group, as far as can be seen.
pub fn is_empty(group: &Path) -> bool {
    match fs::read(group.join("cgroup.procs")) {
        Ok(pids) => pids.is_empty(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// `id parent major:minor root mount_point options [optional…] - fs_type source super_options`
fn parse_mount(line: &[u8]) -> Option<Cgroups> {
    let mut fields = line.split(|b| *b == b' ');
    let root = unescape(fields.nth(3)?);
    let mount_point = unescape(fields.next()?);
    fields.by_ref().find(|field| *field == b"-")?;
    let version = match fields.next()? {
        b"cgroup" if fields.nth(1)?.split(|b| *b == b',').any(|option| option == b"memory") => Version::One,
        b"cgroup2" => Version::Two,
        _ => return None,
    };
    let path = |bytes| PathBuf::from(OsString::from_vec(bytes));
    Some(Cgroups { version, mount_point: path(mount_point), root: path(root) })
}

/// A process's group, from `/proc/<pid>/cgroup`: lines `id:controllers:path`, version 2 with id 0 and no controllers.
fn group_in(text: &str, version: Version) -> Option<String> {
    text.lines().find_map(|line| {
        let (id, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let it = match version {
            Version::One => controllers.split(',').any(|one| one == "memory"),
            Version::Two => id == "0" && controllers.is_empty(),
        };
        it.then(|| path.to_owned())
    })
}

fn oom_kills(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// As this process numbers it; a process that has ended has none.
fn pid_of(process: BorrowedFd<'_>) -> Result<u32, CgroupError> {
    let path = PathBuf::from(format!("/proc/self/fdinfo/{}", process.as_raw_fd()));
    let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
    let pid = text.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
    pid.ok_or_else(|| io_error("find a living process in", &path)(io::ErrorKind::NotFound.into()))
}

/// Field 4 of `proc_pid_stat(5)`; the second field may hold spaces and parentheses.
fn parent_of(pid: u32) -> Option<u32> {
    u32::try_from(stat(pid)?.ppid).ok()
}

/// On its way out, a zombie, or gone: it has left its group, or is about to.
fn is_exiting(pid: u32) -> bool {
    const PF_EXITING: u32 = 0x4; // include/linux/sched.h; set before a process leaves its groups
    stat(pid).is_none_or(|stat| stat.flags & PF_EXITING != 0)
}

/// None: it is gone.
fn stat(pid: u32) -> Option<Stat> {
    Process::new(i32::try_from(pid).ok()?).ok()?.stat().ok()
}

fn write(path: &Path, text: &str) -> Result<(), CgroupError> {
    fs::write(path, text).map_err(io_error("write", path))
}

fn io_error(what: &'static str, path: &Path) -> impl Fn(io::Error) -> CgroupError + use<> {
    let path = path.to_owned();
    move |source| CgroupError::Io { what, path: path.clone(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::process::{Child, Command};

    const V1: &str = "29 24 0:26 / /sys/fs/cgroup ro,nosuid shared:5 - tmpfs tmpfs ro,mode=755\n\
         30 29 0:27 / /sys/fs/cgroup/unified rw shared:6 - cgroup2 cgroup2 rw,nsdelegate\n\
         31 29 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:7 - cgroup cgroup rw,cpu,cpuacct\n\
         32 29 0:29 /kubepods/x /sys/fs/cgroup/memory rw shared:8 - cgroup cgroup rw,memory\n";
    const V2: &str = "25 30 0:23 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate\n";

    #[test]
    fn a_process_that_has_ended_is_in_no_group() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        assert!(!is_exiting(child.id()));
        child.kill().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let ended = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), ended).unwrap();
        assert!(is_exiting(child.id()), "a zombie");
        let groups = Cgroups { version: Version::One, mount_point: "/".into(), root: "/".into() };
        assert!(matches!(groups.base(child.id()), Err(CgroupError::Io { .. })));
        child.wait().unwrap();
        assert!(is_exiting(child.id()), "gone");
    }

    #[test]
    fn the_memory_controller_is_found_in_either_version() {
        let one = Cgroups::of(V1.as_bytes(), |_| false).unwrap();
        assert_eq!((one.version, one.root.as_path()), (Version::One, Path::new("/kubepods/x")));
        assert_eq!(one.mount_point, Path::new("/sys/fs/cgroup/memory"));
        let two = Cgroups::of(V2.as_bytes(), |_| true).unwrap();
        assert_eq!((two.version, two.mount_point.as_path()), (Version::Two, Path::new("/sys/fs/cgroup")));
        assert_eq!(Cgroups::of(V2.as_bytes(), |_| false), None, "version 2 without the controller");
        assert_eq!(Cgroups::of(b"garbage\n\n1 2\n", |_| true), None);
    }

    #[test]
    fn a_process_is_in_one_group_of_each_version() {
        let text = "9:name=systemd:/s\n5:cpu,memory:/a:b/c\n0::/two\n";
        assert_eq!(group_in(text, Version::One).unwrap(), "/a:b/c");
        assert_eq!(group_in(text, Version::Two).unwrap(), "/two");
        assert_eq!(group_in("3:cpu:/x\n", Version::One), None);
    }

    #[test]
    fn deaths_are_read_from_either_version() {
        assert_eq!(oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"), 2);
        assert_eq!(oom_kills("low 0\nhigh 0\nmax 12\noom 3\noom_kill 1\noom_group_kill 0\n"), 1);
        assert_eq!(oom_kills(""), 0);
    }

    /// Killed however the test ends.
    struct Sleeper(Child);
    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn only_children_of_the_agent_and_groups_of_workers_are_touched() {
        let groups = Cgroups { version: Version::One, mount_point: "/nonexistent".into(), root: "/".into() };
        let sleeper = Sleeper(Command::new("sleep").arg("60").spawn().unwrap());
        let pid = rustix::process::Pid::from_child(&sleeper.0);
        let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        assert_eq!(pid_of(process.as_fd()).unwrap(), sleeper.0.id());
        assert_eq!(parent_of(sleeper.0.id()), Some(std::process::id()));
        let stranger = groups.confine(1, process.as_fd(), 1 << 20);
        assert!(matches!(stranger, Err(CgroupError::NotAChild(_))), "{stranger:?}");
        for name in ["../../x", "millpond-worker-", "millpond-worker-1/..", "millpond-agent"] {
            let refused = groups.release(std::process::id(), name);
            assert!(matches!(refused, Err(CgroupError::NotAGroup(_))), "{name}: {refused:?}");
        }
    }
}
