//! Starts workers, and keeps some started ahead.
//!
//! All workers are children of one thread that lives as long as the agent: PR_SET_PDEATHSIG fires when the *thread*
//! that spawned the child ends.

use crate::child_log;
use crate::config::Config;
use crate::lock::lock;
use link::budget;
use link::worker::{FromWorker, ToWorker, recv};
use link::{MAX_MESSAGE, Packet, PacketError};
use procfs::process::Process;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

/// Between two looks at what keeps a killed worker.
const STUCK_LOOK: Duration = Duration::from_millis(100);
/// A worker that is not ready after this is killed.
const READY_LIMIT: Duration = budget::WORKER_READY.time;

#[derive(Clone, Debug)]
pub struct SpawnOptions {
    pub binary: PathBuf,
    pub standby: usize,
    /// RLIMIT_DATA of a worker, bytes: its anonymous memory.
    pub memory_bytes: u64,
    /// Reads what workers say.
    pub runtime: tokio::runtime::Handle,
}

impl SpawnOptions {
    /// # Errors
    /// There is no worker to start.
    pub fn of(config: &Config) -> anyhow::Result<Self> {
        Ok(Self {
            binary: worker_binary(config)?,
            standby: config.workers.standby,
            memory_bytes: config.workers.memory.0,
            runtime: tokio::runtime::Handle::current(),
        })
    }
}

/// The configured worker, or the one that was installed beside us.
fn worker_binary(config: &Config) -> anyhow::Result<PathBuf> {
    let path = match &config.agent.worker {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("fuse-worker"),
    };
    anyhow::ensure!(
        path.is_file(),
        "worker binary {} does not exist: install fuse-worker beside node-agent, or set agent.worker",
        path.display()
    );
    Ok(path)
}

/// A started worker. Dropping it kills the process.
pub struct Worker {
    pub socket: Arc<Packet>,
    child: Child,
    reaped: bool,
}

impl Worker {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn kill(&mut self) {
        let _ = self.child.kill(); // fails only if it is reaped already
    }

    /// Kills it and says how it ended, waiting at most `limit`. A thread that is stuck in the kernel must not hold up the
    /// successor: such a worker is waited for elsewhere, and its end is not known.
    pub(crate) fn kill_and_reap(mut self, limit: Duration) -> Option<ExitStatus> {
        self.kill();
        let status = self.reap(limit);
        if status.is_none() {
            tracing::warn!(
                pid = self.pid(),
                "a killed worker is stuck in the kernel: its successor goes ahead without it"
            );
            let late = move || {
                let _ = self.child.wait(); // whatever it says now, its successor serves
                self.reaped = true;
            };
            if let Err(error) = std::thread::Builder::new().name("late-reaper".into()).spawn(late) {
                tracing::error!(%error, "no thread to wait for it");
            }
        }
        status
    }

    fn reap(&mut self, limit: Duration) -> Option<ExitStatus> {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(50);
        let mut looked = begun;
        let mut was_stuck = false;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    self.reaped = true;
                    return Some(status);
                }
                Ok(None) if begun.elapsed() < limit => {
                    // In the kernel for two looks: a disk keeps it, for no one knows how long.
                    if looked.elapsed() >= STUCK_LOOK {
                        looked = Instant::now();
                        let is_stuck = is_stuck(self.pid());
                        if is_stuck && was_stuck {
                            return None;
                        }
                        was_stuck = is_stuck;
                    }
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(2));
                }
                _ => return None,
            }
        }
    }

    /// Waits until it has warmed up.
    pub fn wait_ready(&self) -> io::Result<()> {
        self.socket.set_recv_timeout(Some(READY_LIMIT))?;
        let mut buffer = vec![0; MAX_MESSAGE];
        match recv::<FromWorker>(&self.socket, &mut buffer) {
            Ok((FromWorker::Ready { protocol: version::WORKER }, _)) => Ok(()),
            Ok((FromWorker::Ready { protocol }, _)) => Err(io::Error::other(of_another_build(protocol))),
            Ok((FromWorker::Failed { why }, _)) => Err(io::Error::other(child_log::words(&why))),
            Ok((other, _)) => {
                Err(io::Error::other(child_log::words(&format!("expected Ready, got {other:?}"))))
            }
            Err(PacketError::Closed) => Err(io::Error::other(
                "it ended before it was ready (its words are in the log): is it of this agent's release?",
            )),
            // Of a time when a worker did not say it.
            Err(PacketError::Malformed(_)) => Err(io::Error::other(of_another_build(0))),
            Err(e) => Err(io::Error::other(e)),
        }
    }

    pub fn send(
        &self,
        message: &ToWorker,
        fds: &[std::os::fd::BorrowedFd<'_>],
    ) -> Result<(), link::PacketError> {
        link::worker::send(&self.socket, message, fds)
    }
}

fn of_another_build(protocol: u32) -> String {
    format!(
        "fuse-worker speaks version {protocol} of its protocol and this agent {}: install both from one release, and restart the agent",
        version::WORKER
    )
}

/// Do all threads of a killed process that are left sleep where no signal reaches them?
fn is_stuck(pid: u32) -> bool {
    let tasks = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()?.tasks().ok());
    let Some(tasks) = tasks else { return false };
    let states = tasks.filter_map(|task| Some(task.ok()?.stat().ok()?.state));
    // Its first thread, though gone, stands there until the last one is.
    let left: Vec<char> = states.filter(|state| !matches!(state, 'Z' | 'X')).collect();
    !left.is_empty() && left.iter().all(|state| *state == 'D')
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.reaped {
            self.kill();
            if self.reap(Duration::from_secs(1)).is_none() {
                tracing::warn!(pid = self.pid(), "a killed worker is stuck in the kernel; left to init");
            }
        }
    }
}

/// Hands out ready workers. Shared by all mounts.
pub struct Spawner {
    requests: mpsc::Sender<Request>,
    standby: Arc<Standby>,
}

#[derive(Default)]
struct Standby {
    ready: Mutex<VecDeque<Worker>>,
    changed: Condvar,
    /// So many will be taken soon, and at once.
    expected: AtomicUsize,
}

enum Request {
    Now(mpsc::Sender<io::Result<Worker>>),
    Refill,
}

impl Spawner {
    /// Starts the spawning thread and the first standby workers.
    pub fn start(options: SpawnOptions) -> io::Result<Arc<Self>> {
        let (requests, incoming) = mpsc::channel();
        let standby = Arc::new(Standby::default());
        let shelf = standby.clone();
        std::thread::Builder::new()
            .name("spawner".into())
            .spawn(move || spawn_loop(&options, &incoming, &shelf))?;
        let me = Arc::new(Self { requests, standby });
        me.refill();
        Ok(me)
    }

    /// A worker that is ready for `Assign`: a standby if there is one, else a new one.
    pub fn take(&self) -> io::Result<Worker> {
        loop {
            let Some(mut worker) = lock(&self.standby.ready).pop_front() else { break };
            // It may have been killed while it stood by.
            if worker.reap(Duration::ZERO).is_none() {
                return Ok(worker);
            }
        }
        let (sender, receiver) = mpsc::channel();
        let gone = |_| io::Error::other("the spawning thread is gone");
        self.requests
            .send(Request::Now(sender))
            .map_err(|_| io::Error::other("the spawning thread is gone"))?;
        let worker = receiver.recv().map_err(gone)??;
        worker.wait_ready()?;
        Ok(worker)
    }

    /// Asks for a new standby in place of one that was taken; returns at once.
    pub(crate) fn refill(&self) {
        let _ = self.requests.send(Request::Refill); // fails only when the agent is shutting down
    }

    /// At least `count` mounts will want a worker at the same moment: that many stand by from now on. Waits until they do;
    /// false on time-out.
    pub fn expect(&self, count: usize, limit: Duration) -> bool {
        let expected = self.standby.expected.fetch_max(count, Ordering::SeqCst).max(count);
        self.refill();
        self.wait_standby(expected, limit)
    }

    /// The moment is there: those that are taken now are not replaced beyond what is usual.
    pub(crate) fn expect_no_more(&self) {
        self.standby.expected.store(0, Ordering::SeqCst);
    }

    /// For a process that is about to execute itself anew: its next life could not reap them.
    pub(crate) fn end_standby(&self) {
        let workers = std::mem::take(&mut *lock(&self.standby.ready));
        drop(workers); // kills and reaps: not under the lock
    }

    pub(crate) fn standing_by(&self) -> usize {
        lock(&self.standby.ready).len()
    }

    /// Waits until `count` workers stand by; false on time-out. For start-up and tests.
    pub(crate) fn wait_standby(&self, count: usize, limit: Duration) -> bool {
        let ready = lock(&self.standby.ready);
        let (ready, _) = self
            .standby
            .changed
            .wait_timeout_while(ready, limit, |r| r.len() < count)
            .unwrap_or_else(|p| p.into_inner());
        ready.len() >= count
    }
}

fn spawn_loop(options: &SpawnOptions, incoming: &mpsc::Receiver<Request>, standby: &Standby) {
    let mut waiting = VecDeque::new();
    loop {
        // A mount that waits goes before the shelf.
        while let Ok(request) = incoming.try_recv() {
            match request {
                Request::Now(_) => waiting.push_front(request),
                Request::Refill => waiting.push_back(request),
            }
        }
        let request = match waiting.pop_front() {
            Some(request) => request,
            None => match incoming.recv() {
                Ok(request) => request,
                Err(_) => return,
            },
        };
        match request {
            Request::Now(sender) => {
                let _ = sender.send(spawn(options)); // the asker gave up: the worker is dropped and killed
            }
            Request::Refill => {
                let wanted = || options.standby.max(standby.expected.load(Ordering::SeqCst));
                while lock(&standby.ready).len() < wanted() {
                    match spawn(options).and_then(|w| w.wait_ready().map(|()| w)) {
                        Ok(worker) => {
                            lock(&standby.ready).push_back(worker);
                            standby.changed.notify_all();
                        }
                        Err(error) => {
                            tracing::error!(%error, binary = %options.binary.display(), "cannot start a standby worker");
                            break;
                        }
                    }
                }
            }
        }
    }
}

fn spawn(options: &SpawnOptions) -> io::Result<Worker> {
    let (mine, theirs) = Packet::pair()?;
    mine.set_send_timeout(Some(Duration::from_secs(5)))?;
    let mut command = Command::new(&options.binary);
    let (said, says) = child_log::pipe()?;
    command.env_clear().stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(says);
    // No `pre_exec`: with it the standard library forks, which copies the page tables of every metadata store that this
    // agent has mapped. What else a worker needs it does itself.
    command.args(link::worker::arguments(options.memory_bytes));
    if let Some(step) = failpoint::of_next_worker() {
        command.env(failpoint::VARIABLE, step);
    }
    let child = command.spawn().map_err(|error| explained(&error))?;
    let worker = Worker { socket: Arc::new(mine), child, reaped: false };
    let pid = worker.pid();
    child_log::follow(said, &options.runtime, move |line| tracing::warn!(worker = pid, "{line}"))?;
    Ok(worker)
}

/// What an operator should do about a process that cannot be started.
fn explained(error: &io::Error) -> io::Error {
    let hint = match error.raw_os_error() {
        Some(libc::EAGAIN) => {
            "the agent's pod has as many processes and threads as it may (podPidsLimit of kubelet), or its user has"
        }
        Some(libc::EMFILE | libc::ENFILE) => {
            "no descriptor is left: raise LimitNOFILE of the container runtime"
        }
        Some(libc::ENOMEM) => "no memory is left for another process",
        _ => return io::Error::new(error.kind(), error.to_string()),
    };
    io::Error::new(error.kind(), format!("{error}: {hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_of_another_build_is_not_used_and_the_error_says_what_to_do() {
        let (ours, theirs) = Packet::pair().unwrap();
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let worker = Worker { socket: Arc::new(ours), child, reaped: false };
        let later = link::worker::FromWorker::Ready { protocol: version::WORKER + 1 };
        link::worker::send(&theirs, &later, &[]).unwrap();
        // And one of a time when workers did not say it.
        theirs.send(&[0], &[]).unwrap();
        for _ in 0..2 {
            let error = worker.wait_ready().unwrap_err().to_string();
            assert!(error.contains("install both from one release"), "{error}");
        }
        let same = link::worker::FromWorker::Ready { protocol: version::WORKER };
        link::worker::send(&theirs, &same, &[]).unwrap();
        worker.wait_ready().unwrap();
    }

    #[test]
    fn a_process_too_many_says_which_limit_it_was() {
        let told = |errno| explained(&io::Error::from_raw_os_error(errno)).to_string();
        assert!(told(libc::EAGAIN).contains("podPidsLimit"));
        assert!(told(libc::EMFILE).contains("LimitNOFILE"));
        assert_eq!(told(libc::ENOENT), io::Error::from_raw_os_error(libc::ENOENT).to_string());
    }

    #[test]
    fn a_binary_that_cannot_start_is_an_error_and_not_a_hang() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let options = SpawnOptions {
            binary: "/nonexistent/worker".into(),
            standby: 1,
            memory_bytes: 1 << 30,
            runtime: runtime.handle().clone(),
        };
        let spawner = Spawner::start(options).unwrap();
        assert!(spawner.take().is_err());
        assert_eq!(spawner.standing_by(), 0);
    }
}
