//! A supervisor, an agent and a broker in one small process: enough to mount a volume and to let workers die.

mod agent;
pub mod copying;
pub mod load;
pub mod mutating;
pub mod writing;

pub use agent::{Agent, Object};

use inflight::{Blame, Collected, Inflight, Room};
use link::Packet;
use link::worker::{Assign, DisabledFeatures, FromWorker, Mode, Show, ToWorker};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const GENERATION: u64 = 77;
pub const BLOCK: u64 = 128 << 10;

pub struct Mount {
    pub target: PathBuf,
    pub device: Arc<OwnedFd>,
    pub inflight: Inflight,
    pub agent: Arc<Agent>,
    pub answered: Option<Mode>,
    memory: OwnedFd,
    assign: Assign,
    worker: Option<Child>,
    // Last: removed after the mount is gone.
    _home: tempfile::TempDir,
}

pub fn show(ttl: Option<Duration>) -> Show {
    Show {
        attributes_of_source: false,
        uid: 0,
        gid: 0,
        file_mode: 0o444,
        dir_mode: 0o555,
        ttl,
        revalidate_on_open: false,
    }
}

impl Mount {
    pub fn new(mode: Mode, show: Show, objects: Vec<Object>) -> Self {
        Self::with_room(mode, show, objects, Room::ReadOnly)
    }

    pub fn with_room(mode: Mode, show: Show, objects: Vec<Object>, room: Room) -> Self {
        let home = tempfile::Builder::new().prefix("millpond-worker-").tempdir_in("/var/tmp").unwrap();
        let target = home.path().join("mnt");
        let (device, memory) = connect(&target, libc::MS_RDONLY, room);
        let inflight = Inflight::map(&memory).unwrap();
        let device = Arc::new(device);
        let agent = Agent::new(home.path(), device.clone(), objects);
        let assign = Assign {
            volume: "test".into(),
            source: "s3://bucket/prefix".into(),
            metadata: agent.metadata(),
            generation: GENERATION,
            roots: 1,
            threads: 4,
            mode,
            show,
            disabled_features: DisabledFeatures::default(),
            injected_faults: Vec::new(),
            hang_limit: Duration::from_secs(15),
            block_bytes: BLOCK,
            takeover: false,
        };
        let mut mount = Self {
            target,
            device,
            inflight,
            agent,
            answered: None,
            memory,
            assign,
            worker: None,
            _home: home,
        };
        let reply = mount.start();
        assert_eq!(reply, mount.inflight.init_reply().unwrap());
        // As the broker's probe does: the first statx that asks for a birth time learns that there is none. Until it
        // has that answer the kernel asks the worker each time, which a test without a worker would wait for.
        let looked = Command::new("stat").arg(&mount.target).stdout(std::process::Stdio::null()).status();
        assert!(looked.unwrap().success());
        mount
    }

    /// A worker that serves; the first one's INIT reply goes to the kernel.
    pub fn start(&mut self) -> Vec<u8> {
        let (ours, theirs) = Packet::pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_fuse-worker"));
        command.args(link::worker::arguments(1 << 30)).stdin(OwnedFd::from(theirs));
        self.worker = Some(command.spawn().unwrap());
        drop(command);
        let ours = Arc::new(ours);
        ours.set_recv_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut buffer = vec![0; link::MAX_MESSAGE];
        let mut recv = || link::worker::recv::<FromWorker>(&ours, &mut buffer).unwrap().0;
        assert!(matches!(recv(), FromWorker::Ready { .. }));
        let fds = [self.device.as_fd(), self.memory.as_fd(), self.agent.root()];
        let assign = ToWorker::Assign(Box::new(self.assign.clone()));
        link::worker::send(&ours, &assign, &fds).unwrap();
        let init_reply = match recv() {
            FromWorker::Answered { init_reply, mode } => {
                self.answered = Some(mode);
                init_reply
            }
            other => panic!("{other:?}"),
        };
        if !self.assign.takeover {
            rustix::io::write(&*self.device, &init_reply).unwrap();
            self.assign.takeover = true;
        }
        link::worker::send(&ours, &ToWorker::Go, &[]).unwrap();
        assert!(matches!(recv(), FromWorker::Serving));
        ours.set_recv_timeout(None).unwrap();
        self.agent.serve(ours);
        init_reply
    }

    /// Anonymous and shared memory of the worker.
    pub fn worker_kib(&self) -> u64 {
        let pid = self.worker.as_ref().unwrap().id();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |key: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            line.trim().trim_end_matches(" kB").parse().unwrap()
        };
        field("RssAnon:") + field("RssShmem:")
    }

    /// kill -9, reap, collect.
    pub fn kill(&mut self) -> Collected {
        let mut worker = self.worker.take().unwrap();
        worker.kill().unwrap();
        worker.wait().unwrap();
        self.inflight.collect(&*self.device, Blame::Executing).unwrap()
    }

    /// Every answer that the volume owes is given.
    pub fn wait_until_idle(&self) {
        wait_for("an empty in-flight table", || self.inflight.in_flight() == 0);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Some(mut worker) = self.worker.take() {
            let _ = worker.kill();
            let _ = worker.wait();
        }
        disconnect(&self.target);
    }
}

/// A new mount: its device, and its shared memory with the kernel's INIT.
fn connect(target: &Path, flags: libc::c_ulong, room: Room) -> (OwnedFd, OwnedFd) {
    std::fs::create_dir(target).unwrap();
    let device = OwnedFd::from(std::fs::File::options().read(true).write(true).open("/dev/fuse").unwrap());
    mount(&device, target, flags);
    let mut init = [0; 8192];
    let len = rustix::io::read(&device, &mut init).unwrap();
    let memory = Inflight::create(room).unwrap();
    Inflight::map(&memory).unwrap().set_init(&init[..len]).unwrap();
    (device, memory)
}

fn disconnect(target: &Path) {
    let target = std::ffi::CString::new(target.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: a path of ours. MNT_FORCE aborts the connection, so that no caller hangs.
    unsafe {
        libc::umount2(target.as_ptr(), libc::MNT_FORCE);
        libc::umount2(target.as_ptr(), libc::MNT_DETACH);
    }
}

fn mount(device: &OwnedFd, target: &Path, flags: libc::c_ulong) {
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
        device.as_raw_fd()
    );
    let options = std::ffi::CString::new(options).unwrap();
    let target = std::ffi::CString::new(target.as_os_str().as_encoded_bytes()).unwrap();
    let flags = libc::MS_NOSUID | libc::MS_NODEV | flags;
    // SAFETY: strings that live through the call.
    let mounted = unsafe {
        libc::mount(
            c"test".as_ptr(),
            target.as_ptr(),
            c"fuse.millpond".as_ptr(),
            flags,
            options.as_ptr().cast(),
        )
    };
    assert_eq!(mounted, 0, "mount needs root and /dev/fuse: {}", std::io::Error::last_os_error());
}

pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "no {what} after 20 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}
