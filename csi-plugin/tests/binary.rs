//! The binary itself on the real kernel: publish, death of the agent, `kill -9` and restart of the broker. The agent is
//! pretended; the FUSE connection that it serves is real. Needs root and `/dev/fuse`.

#![allow(clippy::unwrap_used, unreachable_pub)]

#[allow(dead_code)]
mod common;

use common::{Agent, LIMIT, capability, context, obliging, until};
use link::broker::{AgentAnswer, AgentRequest, Resume};
use proto::csi::v1::node_client::NodeClient;
use proto::csi::v1::volume_capability::access_mode::Mode;
use proto::csi::v1::{NodePublishVolumeRequest, NodeUnpublishVolumeRequest};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::{Pid, Signal};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

struct Machine {
    dir: tempfile::TempDir,
    plugin: Child,
}

impl Machine {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["kubelet", "fusectl"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        rustix::mount::mount("fusectl", dir.path().join("fusectl"), "fusectl", MountFlags::empty(), None)
            .expect("this test needs root");
        let plugin = Self::spawn(dir.path());
        Self { dir, plugin }
    }

    fn spawn(dir: &std::path::Path) -> Child {
        let path = |name: &str| dir.join(name).display().to_string();
        Command::new(env!("CARGO_BIN_EXE_csi-plugin"))
            .args(["--mode", "node", "--node-id", "n1", "--agent-source-wait", "5s", "--handover-wait", "2s"])
            .args(["--endpoint", &format!("unix://{}", path("csi.sock"))])
            .args(["--state-dir", &path("state"), "--broker-socket", &path("broker.sock")])
            .args(["--kubelet-dir", &path("kubelet"), "--fusectl-dir", &path("fusectl")])
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// `kill -9` and a new one.
    fn replace(&mut self) {
        self.plugin.kill().unwrap();
        self.plugin.wait().unwrap();
        self.plugin = Self::spawn(self.dir.path());
    }

    async fn node(&self) -> NodeClient<Channel> {
        let endpoint = format!("unix://{}", self.dir.path().join("csi.sock").display());
        let endpoint = Endpoint::from_shared(endpoint).unwrap();
        let deadline = Instant::now() + LIMIT;
        loop {
            match endpoint.connect().await {
                Ok(channel) => return NodeClient::new(channel),
                Err(error) => assert!(Instant::now() < deadline, "{error:?}"),
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    fn target(&self) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join("kubelet/mount")
    }

    fn mounts(&self) -> usize {
        let table = mounts::parse_mountinfo(&std::fs::read("/proc/self/mountinfo").unwrap());
        mounts::stack_at(&table, &self.target()).len()
    }

    async fn publish(&self) -> Result<(), Status> {
        self.publish_with("1s").await
    }

    async fn publish_with(&self, heal_timeout: &str) -> Result<(), Status> {
        let request = NodePublishVolumeRequest {
            volume_id: "v".into(),
            target_path: self.target().display().to_string(),
            volume_capability: Some(capability(Mode::SingleNodeWriter)),
            volume_context: context(&[("source", "s3://bucket"), ("healTimeout", heal_timeout)]),
            ..Default::default()
        };
        self.node().await.node_publish_volume(request).await.map(drop)
    }

    async fn unpublish(&self) -> Result<(), Status> {
        let target_path = self.target().display().to_string();
        let request = NodeUnpublishVolumeRequest { volume_id: "v".into(), target_path };
        self.node().await.node_unpublish_volume(request).await.map(drop)
    }

    /// Connects as the agent; its connections are served until it is dropped.
    async fn agent(&self) -> ServingAgent {
        drop(self.node().await); // the broker listens before the CSI socket does
        let agent = Agent::connect(&self.dir.path().join("broker.sock"));
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = stop.clone();
        let threads: Arc<Mutex<Vec<_>>> = Arc::default();
        let running = threads.clone();
        agent.behave(move |request, fds| {
            let AgentRequest::Publish(publish) = request else { return obliging(request, fds) };
            let device = fds[0].try_clone().unwrap();
            let stop = stopping.clone();
            running.lock().unwrap().push(std::thread::spawn(move || serve(device, &stop)));
            let inflight = tempfile::tempfile().unwrap().into();
            let init_reply = init_reply(&publish.init);
            Some(Ok((
                AgentAnswer::Prepared {
                    init_reply,
                    read_ahead_kb: 1024,
                    resume: Resume::new(link::worker::Mode::Passthrough, String::new()),
                },
                vec![inflight],
            )))
        });
        ServingAgent { agent, stop, threads }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.plugin.kill();
        let _ = self.plugin.wait();
        for _ in 0..self.mounts() {
            let _ = rustix::mount::unmount(self.target(), UnmountFlags::DETACH);
        }
        let _ = rustix::mount::unmount(self.dir.path().join("fusectl"), UnmountFlags::DETACH);
    }
}

struct ServingAgent {
    agent: Agent,
    stop: Arc<AtomicBool>,
    threads: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Drop for ServingAgent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.lock().unwrap().drain(..) {
            thread.join().unwrap();
        }
        self.agent.die();
    }
}

fn init_reply(init: &[u8]) -> Vec<u8> {
    let mut reply = vec![0; 80];
    reply[0..4].copy_from_slice(&80u32.to_ne_bytes());
    reply[8..16].copy_from_slice(&init[8..16]);
    reply[16..20].copy_from_slice(&7u32.to_ne_bytes());
    reply[20..24].copy_from_slice(&31u32.to_ne_bytes());
    reply[36..40].copy_from_slice(&(128u32 << 10).to_ne_bytes());
    reply
}

/// An empty directory: GETATTR, STATFS, OPENDIR and READDIR succeed, names are not found.
fn serve(device: OwnedFd, stop: &AtomicBool) {
    let mut device = File::from(device);
    let mut buffer = vec![0; 256 << 10];
    while !stop.load(Ordering::Relaxed) {
        let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        let mut ready = [rustix::event::PollFd::new(&device, rustix::event::PollFlags::IN)];
        if rustix::event::poll(&mut ready, Some(&wait)) != Ok(1) {
            continue;
        }
        let Ok(_) = device.read(&mut buffer) else { return };
        let (error, body): (i32, Vec<u8>) = match u32::from_ne_bytes(buffer[4..8].try_into().unwrap()) {
            3 => {
                let mut attr = vec![0u8; 104];
                attr[16..24].copy_from_slice(&1u64.to_ne_bytes());
                attr[76..80].copy_from_slice(&0o40555u32.to_ne_bytes());
                attr[80..84].copy_from_slice(&2u32.to_ne_bytes());
                (0, attr)
            }
            17 => (0, vec![0; 80]),
            27 => (0, vec![0; 16]),
            28 | 29 => (0, Vec::new()),
            1 => (-2, Vec::new()),
            2 | 36 | 42 => continue,
            _ => (-38, Vec::new()),
        };
        let mut reply = (16 + body.len() as u32).to_ne_bytes().to_vec();
        reply.extend(error.to_ne_bytes());
        reply.extend(&buffer[8..16]);
        reply.extend(body);
        let _ = device.write(&reply);
    }
}

/// An older image under newer manifests: what its pod's log says is all that an operator has.
#[test]
fn an_unknown_flag_is_named_each_time() {
    for _ in 0..20 {
        let output =
            Command::new(env!("CARGO_BIN_EXE_csi-plugin")).arg("--of-a-later-version").output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("--of-a-later-version"), "{output:?}");
    }
}

/// Lists the target in another process, as a pod would.
fn list(machine: &Machine) -> std::process::Output {
    Command::new("ls").arg("-la").arg(machine.target()).output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_outlives_the_broker_and_ends_with_its_agent() {
    let mut machine = Machine::start();
    assert_eq!(machine.publish().await.unwrap_err().code(), Code::Unavailable, "no agent yet");
    let agent = machine.agent().await;
    machine.publish().await.unwrap();
    machine.publish().await.unwrap();
    assert_eq!(machine.mounts(), 2);
    assert!(list(&machine).status.success());

    machine.replace();
    assert!(list(&machine).status.success(), "mounts go on while the broker is away");
    machine.publish().await.unwrap();
    assert_eq!(machine.mounts(), 2);

    // The agent goes, and with it the last descriptor: the kernel ends the connection.
    drop(agent);
    until("the connection has ended", || !list(&machine).status.success()).await;
    let agent = machine.agent().await;
    machine.publish().await.unwrap();
    assert_eq!((machine.mounts(), agent.agent.saw("Publish")), (2, 1));
    assert!(list(&machine).status.success());

    // This broker holds a descriptor: readers wait until healTimeout, then fail.
    drop(agent);
    let reader = std::thread::spawn({
        let target = machine.target();
        move || Command::new("stat").arg("-f").arg(target).output().unwrap()
    });
    until("the reader was let go", || reader.is_finished()).await;
    assert!(!reader.join().unwrap().status.success());

    machine.unpublish().await.unwrap();
    machine.unpublish().await.unwrap();
    assert_eq!(machine.mounts(), 0);
    assert!(!machine.target().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_of_an_earlier_broker_is_unpublished() {
    let mut machine = Machine::start();
    let _agent = machine.agent().await;
    machine.publish().await.unwrap();
    machine.replace();
    machine.unpublish().await.unwrap();
    assert_eq!(machine.mounts(), 0);
    assert!(!machine.target().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_asked_to_stop_waits_for_an_agent_no_longer_than_it_may() {
    let mut machine = Machine::start();
    let agent = machine.agent().await;
    machine.publish_with("60s").await.unwrap();
    // No agent is left, and none comes: this broker alone holds the mount.
    drop(agent);
    let asked = Instant::now();
    rustix::process::kill_process(Pid::from_child(&machine.plugin), Signal::TERM).unwrap();
    until("the broker has ended", || machine.plugin.try_wait().unwrap().is_some()).await;
    assert!(asked.elapsed() >= Duration::from_secs(2), "it waited for {:?} only", asked.elapsed());
    assert!(machine.plugin.wait().unwrap().success());
}
