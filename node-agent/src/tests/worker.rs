//! Workers as a test plays them: what they say is the test's, their processes are real and die as real ones do.

use super::relay;
use super::until;
use inflight::Inflight;
use link::worker::{Ask, Assign, FromWorker, Reply, ToWorker};
use link::{Cause, MAX_MESSAGE, Packet};
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

/// What the first worker answers to INIT.
pub(super) const INIT_REPLY: &[u8] = b"the answer to INIT";
const BEAT: Duration = Duration::from_millis(50);
const LIMIT: Duration = Duration::from_secs(20);

/// What a worker does until it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conduct {
    OfAnotherBuild,
    FailsAtStart,
    FailsAtAssign,
    TalksNonsense,
    DiesAtGo,
    FailsAtGo,
}

type Answer = Result<(Reply, Vec<OwnedFd>), Cause>;

/// Those of one agent.
pub(super) struct Workers {
    pub(super) binary: PathBuf,
    /// Of those that come next; the others do what they should.
    next: Mutex<VecDeque<Conduct>>,
    all: Mutex<Vec<Arc<Worker>>>,
}

impl Workers {
    pub(super) fn listen(dir: &Path) -> Arc<Self> {
        let binary = dir.join(relay::NAME);
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &binary).unwrap();
        let listener = Packet::listen(&dir.join(relay::SOCKET)).unwrap();
        let me = Arc::new(Self { binary, next: Mutex::default(), all: Mutex::default() });
        let workers = me.clone();
        // Ends with the program.
        std::thread::spawn(move || {
            while let Ok(process) = Packet::accept(std::os::fd::AsFd::as_fd(&listener)) {
                workers.clone().came(process);
            }
        });
        me
    }

    /// As many as there are words: the next workers do this instead of serving.
    pub(super) fn next(&self, conduct: &[Conduct]) {
        self.next.lock().unwrap().extend(conduct);
    }

    /// The worker that serves this mount, which is another than `but`.
    pub(super) async fn serving(&self, mount: u64, but: Option<u32>) -> Arc<Worker> {
        let found = || {
            let all = self.all.lock().unwrap();
            let mut of_mount = all.iter().rev().filter(|w| w.mount() == Some(mount) && Some(w.pid) != but);
            of_mount.find(|w| w.serves.load(SeqCst) && !w.ends.load(SeqCst)).cloned()
        };
        until("a worker serves", || found().is_some()).await;
        found().unwrap()
    }

    pub(super) fn count(&self) -> usize {
        self.all.lock().unwrap().len()
    }

    /// All of them, in the order in which they came.
    pub(super) fn all(&self) -> Vec<Arc<Worker>> {
        self.all.lock().unwrap().clone()
    }

    fn came(self: Arc<Self>, process: Packet) {
        let (pid, mut buffer) = (process.peer().unwrap().pid as u32, [0; 64]);
        let Ok((_, mut fds)) = process.recv(&mut buffer) else { return };
        let conduct = self.next.lock().unwrap().pop_front();
        let worker = Arc::new(Worker {
            pid,
            process,
            agent: Packet::from_fd(fds.pop().expect("the socket")),
            conduct,
            assigned: OnceLock::new(),
            serves: AtomicBool::new(false),
            beats: AtomicBool::new(true),
            ends: AtomicBool::new(false),
            next: AtomicU64::new(1),
            asked: Mutex::default(),
            forgotten: Mutex::default(),
        });
        self.all.lock().unwrap().push(worker.clone());
        std::thread::spawn(move || worker.work());
    }
}

/// What came with `Assign`.
pub(super) struct Assigned {
    pub(super) assign: Assign,
    pub(super) inflight: Inflight,
    pub(super) roots: Vec<OwnedFd>,
    _device: OwnedFd,
}

pub(super) struct Worker {
    pub(super) pid: u32,
    process: Packet,
    agent: Packet,
    conduct: Option<Conduct>,
    assigned: OnceLock<Assigned>,
    serves: AtomicBool,
    beats: AtomicBool,
    ends: AtomicBool,
    next: AtomicU64,
    asked: Mutex<HashMap<u64, mpsc::Sender<Answer>>>,
    pub(super) forgotten: Mutex<Vec<u64>>,
}

impl Worker {
    pub(super) fn assigned(&self) -> &Assigned {
        self.assigned.get().expect("it has a mount")
    }

    fn mount(&self) -> Option<u64> {
        self.assigned.get().and_then(|it| it.assign.volume.strip_prefix("volume-")?.parse().ok())
    }

    /// Asks the agent, and waits for the answer.
    pub(super) fn ask(&self, body: Ask) -> Answer {
        self.ask_for(0, body).recv_timeout(LIMIT).expect("an answer")
    }

    /// On behalf of a request.
    pub(super) fn ask_for(&self, unique: u64, body: Ask) -> mpsc::Receiver<Answer> {
        let (sender, answer) = mpsc::channel();
        let id = self.next.fetch_add(1, SeqCst);
        self.asked.lock().unwrap().insert(id, sender);
        self.send(FromWorker::Ask { id, unique, body });
        answer
    }

    /// What it says once it has ended goes nowhere.
    pub(super) fn send(&self, message: FromWorker) {
        let _ = link::worker::send(&self.agent, &message, &[]);
    }

    pub(super) fn send_raw(&self, bytes: &[u8]) {
        self.agent.send(bytes, &[]).unwrap();
    }

    /// As a signal ends it.
    pub(super) fn die(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid as i32), signal).unwrap();
        self.leave();
    }

    /// With the exit status 0.
    pub(super) fn exit(&self) {
        let _ = self.process.send(b"exit", &[]); // it may have been killed
        self.leave();
    }

    /// The agent learns of it when the process has ended: it would kill it otherwise.
    fn leave(&self) {
        let end = std::time::Instant::now() + LIMIT;
        while !self.is_dead() {
            assert!(std::time::Instant::now() < end, "a worker's process does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.ends.store(true, SeqCst);
        self.agent.shutdown();
    }

    pub(super) fn hang(&self) {
        self.beats.store(false, SeqCst);
    }

    /// Its process has ended, and the agent has looked how.
    pub(super) fn has_ended(&self) -> bool {
        !Path::new(&format!("/proc/{}", self.pid)).exists()
    }

    fn is_dead(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid));
        stat.map_or(true, |stat| stat.contains(") Z "))
    }

    fn work(self: Arc<Self>) {
        let protocol = version::WORKER + u32::from(self.conduct == Some(Conduct::OfAnotherBuild));
        if self.conduct == Some(Conduct::FailsAtStart) {
            self.send(FromWorker::Failed { why: "as the test wants it".into() });
            return self.exit();
        }
        self.send(FromWorker::Ready { protocol });
        let mut buffer = vec![0; MAX_MESSAGE];
        while let Ok((message, fds)) = link::worker::recv::<ToWorker>(&self.agent, &mut buffer) {
            match message {
                ToWorker::Assign(assign) => self.assign(*assign, fds),
                ToWorker::Roots => {}
                ToWorker::Go => self.go(),
                ToWorker::Answer { id, body } => {
                    let asked = self.asked.lock().unwrap().remove(&id).expect("an answer to a question");
                    let _ = asked.send(body.map(|reply| (reply, fds))); // the test waits no more
                }
                ToWorker::Forget { file } => self.forgotten.lock().unwrap().push(file),
            }
        }
        self.ends.store(true, SeqCst);
        self.asked.lock().unwrap().clear();
    }

    fn assign(&self, assign: Assign, fds: Vec<OwnedFd>) {
        let mut fds = fds.into_iter();
        let (device, memory) = (fds.next().unwrap(), fds.next().unwrap());
        let inflight = Inflight::map(&memory).unwrap();
        let mode = assign.mode;
        match self.conduct {
            Some(Conduct::FailsAtAssign) => {
                return self.send(FromWorker::Failed { why: "as the test wants it".into() });
            }
            Some(Conduct::TalksNonsense) => return self.send(FromWorker::Serving),
            _ => {}
        }
        if !assign.takeover {
            inflight.set_init_reply(INIT_REPLY).unwrap();
        }
        let init_reply = inflight.init_reply().unwrap();
        let assigned = Assigned { assign, inflight, roots: fds.collect(), _device: device };
        assert!(self.assigned.set(assigned).is_ok(), "a worker has one mount");
        self.send(FromWorker::Answered { init_reply, mode });
    }

    fn go(self: &Arc<Self>) {
        match self.conduct {
            Some(Conduct::DiesAtGo) => return self.die(nix::sys::signal::Signal::SIGSEGV),
            Some(Conduct::FailsAtGo) => {
                return self.send(FromWorker::Failed { why: "as the test wants it".into() });
            }
            _ => {}
        }
        self.send(FromWorker::Serving);
        self.serves.store(true, SeqCst);
        let me = self.clone();
        std::thread::spawn(move || {
            while !me.ends.load(SeqCst) {
                if me.beats.load(SeqCst) {
                    me.assigned().inflight.beat();
                }
                std::thread::sleep(BEAT);
            }
        });
    }
}
