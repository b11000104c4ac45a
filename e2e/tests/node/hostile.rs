//! A worker and an agent under an attacker's control: programs of the crate `hostile` play them, attempt after attempt.
//! What each attempt must come to stands here; docs/failures.md tells it to people.

use crate::node_with_options;
use crate::promises::errno;
use anyhow::{Context, Result, ensure};
use e2e::clock::{wait_until, within};
use e2e::mountinfo;
use e2e::node::{AgentOptions, Mounted, Node};
use e2e::processes::{self, Memory};
use e2e::tree::Tree;
use std::collections::BTreeMap;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tonic::Code;

/// Attempts of a worker and what came of them. Refused: EPERM by its filter of system calls, EACCES by Landlock.
const CALLS: &[(&str, &str)] = &[
    ("what the lock-down lacks", "[]"),
    ("read a file of the host that all may read", "EACCES"),
    ("read /etc/shadow", "EACCES"),
    ("read a cache file of another scope", "EACCES"),
    ("read the names of another scope", "EACCES"),
    ("read the agent's state", "EACCES"),
    ("read the agent's memory", "EACCES"),
    ("read the agent's environment", "EACCES"),
    ("open a descriptor of the agent", "EACCES"),
    ("read another worker's memory", "EACCES"),
    ("read its own memory as a file", "EACCES"),
    ("go up from its cache directory", "EACCES"),
    ("follow a link out of its cache directory", "EACCES"),
    ("list its cache directory", "EACCES"),
    ("make a file in its cache directory", "EACCES"),
    ("make a file without a name there", "EACCES"),
    ("change a file of its cache directory", "EACCES"),
    ("read a file of its cache directory", "achieved: its own scope's"),
    ("read through a descriptor of a path alone", "EBADF"),
    ("look at a file of another scope", "achieved: that it is there, its size and times"),
    ("signal the agent by thread", "EPERM"),
    ("signal another worker by thread", "EPERM"),
    ("be the owner of signals of a descriptor", "EPERM"),
    ("lease a file", "EPERM"),
    ("seal shared memory", "EPERM"),
    ("fork", "EPERM"),
    ("a process that shares its memory", "EPERM"),
    ("a user namespace", "EPERM"),
    ("clone3", "ENOSYS"),
    ("be dumpable", "EPERM"),
    ("gain privileges again", "EINVAL"),
    ("outlive the agent", "EPERM"),
    ("a filter of its own", "EPERM"),
    ("code of its own", "EPERM"),
    ("memory that becomes code", "EPERM"),
    ("four gigabytes of its own", "ENOMEM"),
    ("every other system call by its number", "let in: []"),
    ("descriptors without end", "EMFILE, at its limit"),
    ("pipes without end", "achieved: all that its user may have"),
    ("threads without end", "EPERM after 0"),
    ("forget pages of its own mount", "achieved: told"),
    ("forget pages of a node that it never had", "ENOENT"),
    ("write into pages of a node that it never had", "ENOENT"),
    ("forget a name that it never had", "ENOENT"),
    ("a notification that does not exist", "EINVAL"),
    ("answer what was not asked", "ENOENT"),
    ("answer with three bytes", "EINVAL"),
];

/// All of these are refused by the filter of system calls, whatever their arguments.
const REFUSED: &[&str] = &[
    "execve",
    "execveat",
    "openat",
    "unlinkat",
    "renameat2",
    "mkdirat",
    "symlinkat",
    "linkat",
    "ftruncate",
    "fchmodat",
    "getdents64",
    "chdir",
    "chroot",
    "socket",
    "socketpair",
    "connect",
    "bind",
    "accept4",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_open",
    "pidfd_getfd",
    "kill",
    "tkill",
    "rt_sigqueueinfo",
    "setuid",
    "setresuid",
    "setgid",
    "capset",
    "seccomp",
    "mount",
    "umount2",
    "fsopen",
    "open_tree",
    "move_mount",
    "pivot_root",
    "unshare",
    "setns",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "io_uring_setup",
    "keyctl",
    "add_key",
    "ioctl",
    "prlimit64",
    "setpriority",
    "sched_setscheduler",
    "sched_setaffinity",
    "memfd_create",
    "shmget",
    "personality",
    "init_module",
    "kexec_load",
    "reboot",
];

/// Messages of a worker and what the agent answers.
const MESSAGES: &[(&str, &str)] = &[
    ("read every cache file of the agent", "Gone"),
    ("pass every cache file through", "Stale"),
    ("have every cache file dropped", "Stored"),
    ("close every passthrough file", "Stored"),
    ("files of nodes that are not its own", "Stale"),
    ("how much of them is cached", "Stale"),
    ("open them", "Stale"),
    ("read them past the cache", "Stale"),
    ("attributes of nodes that do not exist", "Stale"),
    ("look no name up", "NotFound"),
    ("look its own name up", "NotFound"),
    ("look its parent's name up", "NotFound"),
    ("look another directory's name up", "NotFound"),
    ("look a broken name up", "NotFound"),
    ("look a strange name up", "Stored"),
    ("look a very long name up", "NotFound"),
    ("more past the cache than it gives back", "at most 16 MiB"),
    ("list what does not exist", "Stale"),
    ("names of a directory that does not exist", "Stale"),
    ("which threads of the node are being killed", "Dying"),
    ("write to its own data file through a map", "EACCES"),
    ("write to its own data file", "EBADF"),
    ("write to its own bitmap through a map", "EPERM"),
    ("write to its own bitmap", "EPERM"),
    ("it is answered after all this", "Space"),
];

/// An agent that is not alone, and what the broker says.
const BESIDE: &[(&str, &str)] = &[
    ("be a second agent", "Conflict"),
    ("a Hello of another protocol", "Conflict"),
    ("a Hello at length", "Conflict"),
    ("succeed with another state", "Conflict"),
    ("ask before Hello", "hung up"),
    ("speak of another agent's mounts", "NotFound"),
    ("claim to be the successor, and answer nonsense", "achieved: Welcome"),
    ("connections that say nothing", "hung up"),
    ("afterwards", "Conflict"),
];

/// The node's only agent, with the mounts of the one before.
const ALONE: &[(&str, &str)] = &[
    ("be given the mounts without an agent", "achieved: as any agent"),
    ("a second Hello", "Invalid"),
    ("pass through a file of the host", "Denied"),
    ("pass through a link to a file of the host", "Denied"),
    ("pass through a directory of the cache", "Denied"),
    ("pass through a device", "Denied"),
    ("pass through a pipe", "Denied"),
    ("pass through a cache file to write", "Denied"),
    ("pass through a path alone", "Denied"),
    ("pass through a cache file that was replaced", "Denied"),
    ("pass through a cache file that was unlinked", "Denied"),
    ("pass through nothing", "Invalid"),
    ("pass through two files", "Invalid"),
    ("pass a file through an unknown mount", "NotFound"),
    ("close passthrough files that were never opened", "Done"),
    ("hold a mount without descriptors", "Invalid"),
    ("hold /etc", "Invalid"),
    ("hold a target that leads upwards", "Invalid"),
    ("hold a target without a path", "Invalid"),
    ("hold a mount with another mount's device", "NotFound"),
    ("hold a mount a second time", "NotFound"),
    ("hold a mount with no device", "NotFound"),
    ("hold a mount that lives as one that has ended", "NotFound"),
    ("hold with memory that can be cut", "NotFound"),
    ("limit the broker", "refused"),
    ("limit init", "refused"),
    ("limit itself", "refused"),
    ("limit no process", "refused"),
    ("limit nothing", "refused"),
    ("limit its child to everything", "Confined"),
    ("remove groups that are no worker's", "refused"),
    ("abort what is not there", "NotFound"),
    ("report what is not there", "NotFound"),
    ("count requests of what is not there", "NotFound"),
    ("look through what is not there", "NotFound"),
    ("which threads of the node are being killed", "Dying"),
    ("take leave", "Holding"),
    ("stay nevertheless", "Done"),
    ("messages that are none, or too long", "Done"),
    ("descriptors without end", "Done"),
    ("answers that nobody asked for", "Done"),
    ("events without end", "Done"),
    ("ask without reading", "asked"),
];

/// All that differs, not only the first.
fn ensure_results(expected: &[(&str, &str)], report: &[(String, String)]) -> Result<()> {
    let found: BTreeMap<&str, &str> = report.iter().map(|(a, r)| (a.as_str(), r.as_str())).collect();
    let differs = |(attempt, result): &&(&str, &str)| found.get(attempt) != Some(result);
    let wrong: Vec<String> = expected
        .iter()
        .filter(differs)
        .map(|(attempt, result)| format!("{attempt}: {:?}, expected {result:?}", found.get(attempt)))
        .collect();
    ensure!(wrong.is_empty(), "{wrong:#?}\n{report:?}");
    Ok(())
}

fn read_report(file: &std::path::Path) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).ok()?;
        Some((value["attempt"].as_str()?.to_owned(), value["result"].as_str()?.to_owned()))
    };
    text.lines().filter_map(line).collect()
}

fn has(report: &[(String, String)], attempt: &str) -> bool {
    report.iter().any(|(it, _)| it == attempt)
}

/// A node with an honest volume in use, and another one whose workers are hostile.
struct Stage {
    node: Node,
    honest: Mounted,
    hostile: Mounted,
    tree: Tree,
}

impl Stage {
    fn start() -> Result<Self> {
        // No worker stands by: the next one that is started is the next part's.
        let options = AgentOptions { standby: 0, ..AgentOptions::default() };
        let (mut node, tree) = node_with_options("set", options)?;
        node.server.add(&tree, "hostile")?;
        let honest = node.volume("honest", "set", &[("profile", "large")])?;
        node.pod(&honest)?.verify(&tree, 2)?.ensure_all(&tree)?;
        let worker = node.places().bin("fuse-worker");
        std::fs::rename(&worker, node.places().bin("fuse-worker.real"))?;
        std::fs::rename(node.places().bin("hostile-worker"), &worker)?;
        let hostile = Self::publish(&mut node, "hostile")?;
        Ok(Self { node, honest, hostile, tree })
    }

    fn publish(node: &mut Node, name: &str) -> Result<Mounted> {
        node.volume(name, "hostile", &[("profile", "large"), ("healTimeout", "4s")])
    }

    fn own(&self, name: &str) -> PathBuf {
        self.node.places().root().join("run/agent").join(name)
    }

    /// What the next workers are; those after them are real.
    fn cast(&mut self, part: &str, times: usize) -> Result<()> {
        let file = self.own("hostile-parts");
        std::fs::write(&file, format!("{part}\n").repeat(times))?;
        let uid = self.node.options().uid;
        Ok(chown(&file, Some(uid), Some(uid))?)
    }

    fn report(&self) -> Vec<(String, String)> {
        read_report(&self.own("hostile-report"))
    }

    fn worker(&self) -> Result<u32> {
        self.node.worker_of(&self.hostile.id, Duration::from_secs(20))
    }

    /// A hostile worker takes the place of the one that serves, and plays until it has noted `last`.
    fn play(&mut self, part: &str, last: &str) -> Result<Vec<(String, String)>> {
        let _ = std::fs::remove_file(self.own("hostile-report"));
        self.cast(part, 1)?;
        self.node.signal_worker(self.worker()?, rustix::process::Signal::KILL)?;
        let over = wait_until(Duration::from_secs(40), || has(&self.report(), last));
        ensure!(over, "{part}: not over: {:?}", self.report());
        Ok(self.report())
    }

    /// Its successor, a real one, serves all that its pod reads.
    fn ensure_healed(&mut self, kill: bool) -> Result<()> {
        if kill {
            self.node.signal_worker(self.worker()?, rustix::process::Signal::KILL)?;
        }
        let is_real = |pid: &(String, u32)| {
            let program = std::fs::read_link(format!("/proc/{}/exe", pid.1)).unwrap_or_default();
            pid.0 == self.hostile.id && program.ends_with("fuse-worker.real")
        };
        let serving = || self.node.agent().serving().is_ok_and(|all| all.iter().any(is_real));
        ensure!(
            wait_until(Duration::from_secs(30), serving),
            "no real worker serves after {:?}",
            self.report()
        );
        let pod = self.node.pod(&self.hostile)?;
        within(Duration::from_secs(20), {
            let path = self.hostile.target.join("large1");
            move || std::fs::metadata(path)
        })??;
        pod.verify(&self.tree, 2)?.ensure_all(&self.tree)?;
        pod.end()
    }

    /// Its mount has ended; kubelet publishes it anew.
    fn ensure_ended(&mut self, name: &str) -> Result<()> {
        let target = self.hostile.target.clone();
        let ended = within(Duration::from_secs(30), move || {
            // Each time a name that the kernel has not asked for.
            let mut names = 0..;
            wait_until(Duration::from_secs(25), || {
                let name = format!("absent-{}", names.next().unwrap_or_default());
                errno(std::fs::metadata(target.join(name))) == Some(libc::ENOTCONN)
            })
        })?;
        ensure!(ended, "{name}: the mount neither healed nor ended");
        self.node.unpublish(&self.hostile)?;
        self.cast("real", 1)?;
        self.hostile = Self::publish(&mut self.node, name)?;
        self.ensure_healed(false)
    }
}

#[test]
fn a_worker_under_an_attackers_control_gets_what_is_declared_and_no_more() -> Result<()> {
    let mut stage = Stage::start()?;
    let (agent, plugin) = (stage.node.agent().pid(), stage.node.plugin().pid());
    let settled = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line == "Seccomp_filters:\t3")
    };
    let real = stage.node.worker_of(&stage.honest.id, Duration::from_secs(20))?;
    ensure!(wait_until(Duration::from_secs(10), || settled(real)), "a real worker may still start threads");
    let pod = stage.node.pod(&stage.honest)?;
    let application = pod.oracle(&stage.tree, &["--pause-us", "2000"])?;

    let calls = stage.play("calls", "over")?;
    ensure_results(CALLS, &calls)?;
    let refused: Vec<(&str, &str)> = REFUSED.iter().map(|call| (*call, "EPERM")).collect();
    ensure_results(&refused, &calls)?;
    stage.ensure_healed(true)?;
    stage.node.agent().evict(&stage.hostile.target)?; // a file that is not whole comes with a bitmap
    // It was told which files to drop: none of them was the honest volume's.
    let messages = stage.play("messages", "over")?;
    ensure_results(MESSAGES, &messages)?;
    println!("{messages:?}");
    stage.ensure_healed(true)?;
    stage.node.server.reset()?;
    pod.verify(&stage.tree, 2)?.ensure_all(&stage.tree)?;
    assert_eq!(stage.node.server.stats()?.of("GetObject"), 0, "an honest volume's file was dropped");

    // What is no message of a worker's ends it, and so does a question too many.
    for part in [
        "sends what is no message",
        "sends more than a message may hold",
        "sends nine descriptors",
        "asks without reading",
    ] {
        stage.play(part, "what the lock-down lacks")?;
        stage.ensure_healed(false)?;
    }
    stage.play("sends four descriptors", "over")?;
    stage.ensure_healed(true)?;
    stage.play("talks without end", "over")?;
    stage.ensure_healed(true)?;
    let logs = std::fs::read_to_string(stage.node.places().log("node-agent"))?;
    let said = logs.matches("a line that says nothing").count();
    ensure!((1..=1000).contains(&said), "{said} lines of a worker are in the log");
    stage.play("scribbles over the requests", "over")?;
    stage.ensure_healed(true)?;
    // Beyond its group's limit it dies, and nobody else.
    stage.play("takes memory", "what the lock-down lacks")?;
    ensure!(
        wait_until(Duration::from_secs(20), || !has(&stage.report(), "over")),
        "it took all that it wanted"
    );
    stage.ensure_healed(true)?;

    // Where nothing is left to take up, or no worker comes up, the mount ends in its time.
    stage.play("scribbles over everything", "over")?;
    stage.node.signal_worker(stage.worker()?, rustix::process::Signal::KILL)?;
    stage.ensure_ended("hostile-2")?;
    stage.cast("fails at length", 100)?;
    stage.node.signal_worker(stage.worker()?, rustix::process::Signal::KILL)?;
    stage.ensure_ended("hostile-3")?;

    // Whatever a first worker says of INIT, the publish fails in time and leaves nothing.
    for (n, part) in [
        "answers INIT with nothing",
        "answers INIT with half a header",
        "answers INIT at length",
        "answers INIT for another request",
        "serves before it answers",
    ]
    .into_iter()
    .enumerate()
    {
        stage.cast(part, 1)?;
        let begun = Instant::now();
        let published = Stage::publish(&mut stage.node, &format!("first-{n}"));
        println!(
            "{part}: {:?} after {:?}",
            published.as_ref().err().map(ToString::to_string),
            begun.elapsed()
        );
        ensure!(begun.elapsed() < Duration::from_secs(20), "{part}: {:?}", begun.elapsed());
        if let Ok(mounted) = published {
            stage.node.unpublish(&mounted)?;
        }
    }
    stage.cast("real", 1)?;

    // Callers whose requests it keeps wait until their volume is unpublished, which ends in time although a thread of it
    // waits where no signal reaches it.
    stage.play("swallows and waits in the kernel", "swallows")?;
    let path = stage.hostile.target.join("never-looked-up");
    let reader = std::thread::spawn(move || errno(std::fs::metadata(path)));
    let waits =
        wait_until(Duration::from_secs(10), || has(&stage.report(), "swallows and waits in the kernel"));
    ensure!(waits, "no request was swallowed: {:?}", stage.report());
    std::thread::sleep(Duration::from_millis(300));
    let worker = stage.worker()?;
    stage.node.signal_worker(worker, rustix::process::Signal::KILL)?;
    let begun = Instant::now();
    stage.node.unpublish(&stage.hostile.clone())?;
    ensure!(begun.elapsed() < Duration::from_secs(5), "unpublish took {:?}", begun.elapsed());
    let let_go = within(Duration::from_secs(10), move || reader.join())?;
    ensure!(matches!(let_go, Ok(Some(libc::ENOTCONN | libc::ECONNABORTED))), "{let_go:?}");
    let gone = wait_until(Duration::from_secs(10), || !processes::all().contains(&worker));
    ensure!(gone, "the worker is still there");

    let report = application.finish(Duration::from_secs(60))?;
    println!("{}", report.summary());
    report.ensure_clean()?;
    drop(pod);
    assert_eq!((stage.node.agent().pid(), stage.node.plugin().pid()), (agent, plugin));
    ensure!(!stage.node.agent_has_ended() && !stage.node.plugin_has_ended(), "agent or broker died");
    let memory = Memory::of(agent).unevictable() >> 20;
    ensure!(memory < 192, "the agent takes {memory} MiB");
    stage.node.finish()
}

/// The hostile agent's program, as this user.
fn hostile_agent(node: &mut Node, part: &str, uid: u32) -> Result<(std::process::Child, PathBuf)> {
    let root = node.places().root().to_owned();
    let report = root.join(format!("run/agent/report-{part}"));
    std::fs::write(&report, "")?;
    chown(&report, Some(uid), Some(uid))?;
    let mut command = Command::new(node.places().bin("hostile-agent"));
    command.args(["--part", part]).arg("--socket").arg(node.places().broker_socket());
    command.arg("--node").arg(root).arg("--report").arg(&report);
    command.arg("--broker").arg(node.plugin().pid().to_string()).uid(uid).gid(uid).current_dir("/");
    Ok((command.spawn().context("hostile-agent")?, report))
}

fn finish_part(mut child: std::process::Child) -> Result<ExitStatus> {
    let over = wait_until(Duration::from_secs(60), || matches!(child.try_wait(), Ok(Some(_)) | Err(_)));
    if !over {
        child.kill()?;
    }
    Ok(child.wait()?)
}

#[test]
fn an_agent_under_an_attackers_control_gets_nothing_of_the_node_by_the_broker() -> Result<()> {
    let (mut node, tree) = node_with_options("set", AgentOptions::default())?;
    let uid = node.options().uid;
    let kept = [("healTimeout", "5m"), ("profile", "large")];
    let mounted = [node.volume("a", "set", &kept)?, node.volume("b", "set", &kept)?];
    node.pod(&mounted[0])?.verify(&tree, 2)?.ensure_all(&tree)?;
    let plugin = node.plugin().pid();
    let before = (processes::descriptors(plugin), Memory::of(plugin).unevictable() >> 20);

    // Another user does not get as far as a connection. While the agent serves, nobody else becomes one.
    let (child, report) = hostile_agent(&mut node, "stranger", 64_999)?;
    ensure!(finish_part(child)?.success());
    ensure_results(&[("connect as another user", "EACCES")], &read_report(&report))?;
    let pod = node.pod(&mounted[0])?;
    let application = pod.oracle(&tree, &["--pause-us", "2000"])?;
    let (child, report) = hostile_agent(&mut node, "beside", uid)?;
    ensure!(finish_part(child)?.success(), "{:?}", read_report(&report));
    ensure_results(BESIDE, &read_report(&report))?;
    application.finish(Duration::from_secs(60))?.ensure_clean()?;

    node.kill_agent()?;
    let most_threads = Arc::new(AtomicUsize::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let (most, is_over) = (most_threads.clone(), over.clone());
    let watcher = std::thread::spawn(move || {
        while !is_over.load(Ordering::SeqCst) {
            let tasks = std::fs::read_dir(format!("/proc/{plugin}/task")).map_or(0, Iterator::count);
            most.fetch_max(tasks, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let (child, report) = hostile_agent(&mut node, "alone", uid)?;
    let waits = wait_until(Duration::from_secs(60), || has(&read_report(&report), "waits for publishes"));
    ensure!(waits, "{:?}", read_report(&report));
    let mounts = mountinfo::below(&node.places().kubelet())?.len();
    for n in 0..7 {
        let volume = node.create(&format!("refused-{n}"), "set", &[])?;
        let begun = Instant::now();
        let status = node.publish(&volume, "pod").err().with_context(|| format!("publish {n} succeeded"))?;
        println!("publish {n}: {status:?}");
        ensure!(begun.elapsed() < Duration::from_secs(10) && status.message().len() < 5000);
        let code = if n == 6 { Code::InvalidArgument } else { Code::Internal };
        assert_eq!(status.code(), code, "{status:?}");
        assert_eq!(mountinfo::below(&node.places().kubelet())?.len(), mounts, "publish {n} left a mount");
    }
    // One that it serves is its own, and no more of the node's memory than any other.
    let volume = node.create("served", "set", &[])?;
    let served = node.publish(&volume, "pod")?;
    let all = mountinfo::below(&served.target)?;
    let device = &all.iter().find(|m| m.kind.starts_with("fuse")).context("it is mounted")?.device;
    let read_ahead = std::fs::read_to_string(format!("/sys/class/bdi/{device}/read_ahead_kb"))?;
    ensure!(read_ahead.trim().parse::<u64>()? <= 64 << 10, "readahead of {read_ahead} KiB");
    node.unpublish(&served)?;
    std::fs::write(node.places().root().join("run/agent/hostile-over"), "")?;
    ensure!(finish_part(child)?.success(), "{:?}", read_report(&report));
    over.store(true, Ordering::SeqCst);
    let _ = watcher.join();
    ensure_results(ALONE, &read_report(&report))?;
    let threads = most_threads.load(Ordering::SeqCst);
    println!("the broker had {threads} threads at most");
    ensure!(threads < 150, "the broker had {threads} threads");

    // The next agent serves what is there, and what comes.
    node.start_agent()?;
    node.wait_whole(Duration::from_secs(60))?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    drop(pod);
    let again = node.volume("again", "set", &[])?;
    node.pod(&again)?.verify(&tree, 2)?.ensure_all(&tree)?;
    assert_eq!(node.plugin().pid(), plugin);
    ensure!(!node.plugin_has_ended(), "the broker died");
    let after = (processes::descriptors(plugin), Memory::of(plugin).unevictable() >> 20);
    ensure!(
        after.0 < before.0 + 40 && after.1 < before.1 + 64,
        "descriptors and MiB of the broker: {before:?} {after:?}"
    );
    node.finish()
}
