//! The node of the suite's cluster: namespaces with a process 1 (`e2e/cluster/node`) that starts and stops the parts.

use super::kubectl::Kubectl;
use super::places::{Places, run};
use crate::{clock, mountinfo, processes};
use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::UnshareFlags;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use testkit::process::Process;

/// The address of the node, and of what the suite itself serves.
pub const NODE_IP: &str = "10.99.0.1";
pub const NODE_NAME: &str = "millpond-e2e";
const SERVICES: &str = "10.96.0.0/16";
/// In the order in which they start.
const PARTS: &[&str] = &[
    "etcd",
    "kube-apiserver",
    "containerd",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
];
const ORDER: Duration = Duration::from_secs(60);
const READY: Duration = Duration::from_secs(180);

/// Gives this process a network of its own: a node address, a route for service addresses, no way out. To be called before
/// any thread or child exists. The kernel removes it all with the last process in it.
pub fn enter_network() -> Result<()> {
    // SAFETY: this process has one thread and no file system state that another thread relies on.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWUTS) }
        .context("unshare: the suite's cluster needs root")?;
    rustix::system::sethostname(NODE_NAME.as_bytes())?;
    for line in [
        "link set lo up".to_owned(),
        "link add node0 type veth peer name node1".to_owned(),
        format!("addr add {NODE_IP}/24 dev node0"),
        "link set node0 up".to_owned(),
        "link set node1 up".to_owned(),
        // Without a route a process of the node reaches no service address: the rewriting comes after routing.
        format!("route add {SERVICES} dev node0"),
    ] {
        run(Command::new("ip").args(line.split(' ')))?;
    }
    Ok(())
}

#[derive(Debug)]
pub struct Machine {
    places: Places,
    unshare: Option<Process>,
    orders: File,
    answers: File,
    /// Process 1 as this side sees it.
    init: u32,
    /// Ended and removed in order.
    finished: bool,
}

impl Machine {
    /// Starts everything; returns when the node is Ready and the images are there. Of a start that fails the logs are
    /// kept in `logs`.
    pub fn start(places: Places, images: &[PathBuf], kubectl: &Kubectl, logs: &Path) -> Result<Self> {
        let (process, orders, answers, init) = boot(&places)?;
        let machine = Self { places, unshare: Some(process), orders, answers, init, finished: false };
        if let Err(e) = machine.start_parts(kubectl, Some(images)) {
            let kept = logs.join("start");
            let _ = fs::remove_dir_all(&kept); // of an earlier run
            fs::create_dir_all(logs)?;
            run(Command::new("cp").arg("-r").arg(machine.places.logs()).arg(&kept))?;
            return Err(
                e.context(format!("the cluster did not start: logs of its parts are in {}", kept.display()))
            );
        }
        Ok(machine)
    }

    fn start_parts(&self, kubectl: &Kubectl, images: Option<&[PathBuf]>) -> Result<()> {
        let begun = Instant::now();
        for part in &PARTS[..3] {
            self.start_part(part)?;
        }
        self.wait_for_api(kubectl)?;
        for part in &PARTS[3..] {
            self.start_part(part)?;
        }
        if let Some(images) = images {
            self.import(images)?;
        }
        self.wait_for_node(kubectl)?;
        println!("    the node is Ready {:.1} s after its start", begun.elapsed().as_secs_f64());
        Ok(())
    }

    pub fn wait_for_api(&self, kubectl: &Kubectl) -> Result<()> {
        self.until("the API server", || kubectl.run(&["get", "--raw", "/readyz"]).is_ok_and(|t| t == "ok"))
    }

    pub fn wait_for_node(&self, kubectl: &Kubectl) -> Result<()> {
        let ready = || {
            let node = kubectl.get("node", "", NODE_NAME).ok()?;
            let conditions = node["status"]["conditions"].as_array()?.clone();
            let is_ready = conditions.iter().find(|c| c["type"] == "Ready").map(|c| c["status"] == "True")?;
            // A taint outlasts what it was for by some seconds, in which no pod is scheduled.
            Some(is_ready && node["spec"]["taints"].as_array().is_none_or(Vec::is_empty))
        };
        // The API server calls a node Ready for some time after its kubelet has gone: ask kubelet, too.
        self.until("the node", || healthz("127.0.0.1:10248") && ready() == Some(true))
    }

    /// Waits for something that every part is needed for.
    fn until(&self, what: &str, mut ready: impl FnMut() -> bool) -> Result<()> {
        let end = Instant::now() + READY;
        while !ready() {
            if Instant::now() > end {
                bail!("{what} was not ready within {READY:?}");
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    pub fn places(&self) -> &Places {
        &self.places
    }
    pub fn init(&self) -> u32 {
        self.init
    }
    /// A path of the node as this side reaches it.
    pub fn path(&self, path: &str) -> PathBuf {
        Path::new(&format!("/proc/{}/root", self.init)).join(path.trim_start_matches('/'))
    }

    /// Mounts of the node.
    pub fn mounts(&self) -> Result<Vec<mountinfo::Mount>> {
        Ok(mountinfo::read(&self.init.to_string())?)
    }

    /// A command inside the node.
    pub fn inside(&self, program: &str) -> Result<Command> {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.init.to_string(), "-m", "-p", "--", program]);
        command.env("PATH", format!("{}:{}", self.places.path()?, std::env::var("PATH").unwrap_or_default()));
        Ok(command)
    }

    pub fn start_part(&self, part: &str) -> Result<()> {
        self.order(&format!("start {part}")).map(drop)
    }

    /// Ends one part and waits until it is gone.
    pub fn stop_part(&self, part: &str, signal: &str) -> Result<()> {
        self.order(&format!("stop {part} {signal}")).map(drop)
    }

    fn order(&self, line: &str) -> Result<String> {
        (&self.orders).write_all(format!("{line}\n").as_bytes())?;
        answer(&self.answers).with_context(|| format!("the node did not obey {line:?}"))
    }

    /// Makes the images of docker-archive tars known to kubelet.
    fn import(&self, images: &[PathBuf]) -> Result<()> {
        for image in images {
            let mut command = self.inside("ctr")?;
            command.args(["-n", "k8s.io", "images", "import", "--digests=false"]).arg(image);
            let output = command.output()?;
            ensure!(
                output.status.success(),
                "ctr could not import {}: {}",
                image.display(),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    }

    /// The power fails, and comes back: everything dies at once; disks stay. `off` is called in between.
    pub fn reboot(&mut self, kubectl: &Kubectl, off: impl FnOnce(&Places) -> Result<()>) -> Result<()> {
        self.power_off()?;
        off(&self.places)?;
        let (process, orders, answers, init) = boot(&self.places)?;
        (self.unshare, self.orders, self.answers, self.init) = (Some(process), orders, answers, init);
        self.start_parts(kubectl, None)
    }

    /// Kills process 1; the kernel kills the rest.
    fn power_off(&mut self) -> Result<()> {
        let Some(mut unshare) = self.unshare.take() else { return Ok(()) };
        let namespace = fs::read_link(format!("/proc/{}/ns/pid", self.init))?;
        processes::kill_child(self.init, unshare.pid())?;
        unshare.wait_for_exit(Duration::from_secs(60))?;
        // Process 1 is reaped only after every other process of its namespace, but look: this is what "nothing stays" means.
        let left: Vec<_> = in_namespace(&namespace);
        ensure!(left.is_empty(), "processes of the node are left: {left:?}");
        // cAdvisor waits seconds for each container whose cgroup it finds without it.
        let left = self.places.remove_cgroups();
        ensure!(left.is_empty(), "left: {left:?}");
        flush_network()
    }

    /// Ends the node and removes what is its; the answer names what was left.
    pub fn finish(mut self) -> Result<()> {
        self.power_off()?;
        self.finished = true;
        let left = self.places.clean();
        ensure!(left.is_empty(), "left behind on this machine: {}", left.join(", "));
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        if let Err(e) = self.power_off() {
            eprintln!("e2e: {e:#}");
        }
        for left in self.places.clean() {
            eprintln!("e2e: left behind: {left}");
        }
    }
}

/// Whether a part says of itself that it is well.
fn healthz(address: &str) -> bool {
    let ask = || -> Result<String> {
        let mut stream = std::net::TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET /healthz HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    ask().is_ok_and(|text| text.contains(" 200 "))
}

/// Processes whose PID namespace is this one.
pub fn in_namespace(namespace: &Path) -> Vec<u32> {
    let inside = |pid: &u32| fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|n| n == namespace);
    processes::all().into_iter().filter(inside).collect()
}

/// A reboot loses these, too. The suite's own address stays: its servers listen there.
fn flush_network() -> Result<()> {
    for table in ["nat", "filter", "mangle"] {
        for argument in ["-F", "-X"] {
            run(Command::new("iptables").args(["-w", "-t", table, argument]))?;
        }
    }
    let output = Command::new("ip").args(["-o", "link", "show", "type", "bridge"]).output()?;
    if String::from_utf8_lossy(&output.stdout).contains("pods0") {
        run(Command::new("ip").args(["link", "delete", "pods0"]))?;
    }
    Ok(())
}

fn boot(places: &Places) -> Result<(Process, File, File, u32)> {
    places.make_cgroups()?;
    let run_dir = places.root().join("run");
    let fifo = |name: &str| -> Result<File> {
        let path = run_dir.join(name);
        let _ = fs::remove_file(&path); // of the boot before
        run(Command::new("mkfifo").arg(&path))?;
        // Both ways: opening for one way would wait for the other side.
        Ok(File::options().read(true).write(true).open(&path)?)
    };
    let (orders, answers) = (fifo("orders")?, fifo("answers")?);
    let log = File::options().create(true).append(true).open(places.logs().join("node.log"))?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--pid", "--fork", "--mount-proc", "--propagation", "private", "--kill-child=KILL"])
        .arg(places.script("node"))
        .arg(places.root())
        .arg(places.path()?)
        .stdout(log.try_clone()?)
        .stderr(log);
    let mut process = Process::spawn(&mut command)?;
    if let Err(e) = answer(&answers) {
        let _ = process.kill();
        let log = fs::read_to_string(places.logs().join("node.log")).unwrap_or_default();
        return Err(e.context(format!("the node did not start: {log}")));
    }
    let mut init = None;
    clock::wait_until(Duration::from_secs(5), || {
        init = processes::children(process.pid()).first().copied();
        init.is_some()
    });
    Ok((process, orders, answers, init.context("unshare has no child")?))
}

/// One line of process 1, "ok" or "error …".
fn answer(mut answers: &File) -> Result<String> {
    let (mut line, end) = (String::new(), Instant::now() + ORDER);
    while !line.ends_with('\n') {
        let left = end.checked_duration_since(Instant::now()).context("no answer")?;
        let mut fds = [PollFd::new(&answers, PollFlags::IN)];
        poll(&mut fds, Some(&left.try_into()?))?;
        let mut byte = [0];
        if fds[0].revents().contains(PollFlags::IN) && answers.read(&mut byte)? == 1 {
            line.push(char::from(byte[0]));
        }
    }
    let line = line.trim();
    match line.strip_prefix("ok") {
        Some(rest) => Ok(rest.trim().to_owned()),
        None => bail!("{line}"),
    }
}
