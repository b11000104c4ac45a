//! Starts HDFS helpers and ends them.
//!
//! As with workers, all are children of one thread that lives as long as the agent: PR_SET_PDEATHSIG fires when the
//! *thread* that spawned a child ends. That thread reaps them, too: whoever drops a helper only asks for its end.

use crate::child_log;
use crate::config::Hdfs;
use crate::lock::lock;
use crate::privileged::Privileged;
use async_trait::async_trait;
use link::RefusalKind;
use link::broker::{BrokerAnswer, BrokerRequest};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, Once, Weak};
use std::time::{Duration, Instant};
use store::{Helper, Helpers};
use tokio::sync::oneshot;

/// How soon a killed one is looked for; it takes no longer than the kernel to free its memory.
const REAP_LOOK: Duration = Duration::from_millis(20);
/// What a node has sources and secrets of, and some: each takes 64 MiB or so.
const HELPERS_MAX: usize = 64;
const ENDING: &str = "the agent is ending and starts no HDFS helper";
/// At most: one that a kernel call keeps is not waited for any more.
const END_LIMIT: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub(crate) struct HelperSpawner(Arc<Inner>);

struct Inner {
    orders: Mutex<mpsc::Sender<Order>>,
    binary: PathBuf,
    memory_limit: Option<u64>,
    privileged: Arc<dyn Privileged>,
    runtime: tokio::runtime::Handle,
    /// Said once.
    unlimited: Once,
    unconfined: Once,
}

enum Order {
    Start(oneshot::Sender<io::Result<Started>>),
    End(u64),
    /// All of them, and no other is started.
    EndAll(mpsc::Sender<()>),
}

/// Ends its process when nobody takes it.
struct Started {
    socket: UnixStream,
    running: Running,
    /// Looked at where nobody has reaped it yet.
    process: Option<OwnedFd>,
}

impl std::fmt::Debug for HelperSpawner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HelperSpawner").field("binary", &self.0.binary).finish_non_exhaustive()
    }
}

impl HelperSpawner {
    /// Starts the thread, and no helper yet.
    pub(crate) fn new(
        config: &Hdfs,
        privileged: Arc<dyn Privileged>,
        runtime: tokio::runtime::Handle,
    ) -> io::Result<Self> {
        let binary = match &config.helper {
            Some(path) => path.clone(),
            None => std::env::current_exe()?.with_file_name("hdfs-helper"),
        };
        let (orders, incoming) = mpsc::channel();
        let (program, memory, on) = (binary.clone(), config.memory.0, runtime.clone());
        let inner = Arc::new(Inner {
            orders: Mutex::new(orders),
            binary,
            memory_limit: Some(config.memory_limit.0).filter(|bytes| *bytes > 0),
            privileged,
            runtime,
            unlimited: Once::new(),
            unconfined: Once::new(),
        });
        // It ends with the last of those that may order something.
        let children = Children {
            program,
            memory,
            runtime: on,
            spawner: Arc::downgrade(&inner),
            all: BTreeMap::new(),
            last: 0,
        };
        std::thread::Builder::new().name("helpers".into()).spawn(move || children.obey(&incoming))?;
        Ok(Self(inner))
    }

    /// For a process that drains, and once more, to wait for it, before it executes itself anew: its next life could not
    /// reap them. Blocks.
    pub(crate) fn end_all(&self) {
        let (done, ended) = mpsc::channel();
        if self.0.order(Order::EndAll(done)).is_ok() {
            let _ = ended.recv_timeout(2 * END_LIMIT); // what is stuck in the kernel then is not waited for
        }
    }
}

impl Inner {
    fn order(&self, order: Order) -> io::Result<()> {
        lock(&self.orders).send(order).map_err(|_| io::Error::other(ENDING))
    }

    /// As with workers: asked for beside its work, so that no call waits for it.
    async fn confine(self: Arc<Self>, bytes: u64, process: OwnedFd, group: Arc<Mutex<Group>>) {
        match self.privileged.ask(BrokerRequest::Confine { bytes }, vec![process]).await {
            Ok(BrokerAnswer::Confined { group: made }) => {
                let late = {
                    let mut group = lock(&group);
                    match *group {
                        Group::Ended => Some(made),
                        Group::None | Group::Made(_) => {
                            *group = Group::Made(made);
                            None
                        }
                    }
                };
                // It has ended meanwhile: nobody else gives the group back.
                if let Some(late) = late {
                    self.release(late).await;
                }
            }
            // The next helper has one; a broker that is away is no news here.
            Err(refusal) if refusal.kind == RefusalKind::Unavailable => {
                tracing::debug!(%refusal, "an HDFS helper without a limit of memory");
            }
            Err(refusal) if refusal.kind == RefusalKind::NotFound => self.unlimited.call_once(|| {
                tracing::warn!(%refusal, "HDFS helpers have no limit of memory of their own but that of what is theirs alone (hdfs.memory)");
            }),
            // It was dead before the broker could look at it.
            other => tracing::debug!(?other, "no limit of memory"),
        }
    }

    async fn release(&self, group: String) {
        let released = self.privileged.ask(BrokerRequest::Release { group }, Vec::new()).await;
        if let Ok(BrokerAnswer::Released { oom_kills: 1.. }) = released {
            tracing::warn!("an HDFS helper took more memory than it may (hdfs.memory_limit), and was killed");
        }
    }
}

#[async_trait]
impl Helpers for HelperSpawner {
    async fn start(&self) -> io::Result<Helper> {
        let (tell, told) = oneshot::channel();
        self.0.order(Order::Start(tell))?;
        let started = told.await.map_err(|_| io::Error::other(ENDING))?;
        let Started { socket, running, process } = started?;
        let group = running.group.clone();
        if let (Some(bytes), Some(process)) = (self.0.memory_limit, process) {
            self.0.runtime.spawn(self.0.clone().confine(bytes, process, group));
        }
        Ok(Helper { socket, process: Box::new(running) })
    }

    fn told_missing(&self, missing: &[String]) {
        if !missing.is_empty() {
            let missing: Vec<_> = missing.iter().take(8).map(|what| child_log::words(what)).collect();
            self.0.unconfined.call_once(|| {
                tracing::warn!(?missing, "HDFS helpers are not confined as they should be");
            });
        }
    }
}

/// Ends its helper when it is dropped.
struct Running {
    number: u64,
    spawner: Arc<Inner>,
    group: Arc<Mutex<Group>>,
}

/// A limit of memory that the broker gives.
enum Group {
    None,
    Made(String),
    Ended,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.spawner.order(Order::End(self.number)); // the agent is ending, and it with the agent
        if let Group::Made(group) = std::mem::replace(&mut *lock(&self.group), Group::Ended) {
            let spawner = self.spawner.clone();
            self.spawner.runtime.spawn(async move { spawner.release(group).await });
        }
    }
}

/// On its own thread.
struct Children {
    program: PathBuf,
    memory: u64,
    runtime: tokio::runtime::Handle,
    spawner: Weak<Inner>,
    /// In the order in which they were started.
    all: BTreeMap<u64, Alive>,
    last: u64,
}

struct Alive {
    child: Child,
    /// Since when it should be gone.
    killed: Option<Instant>,
}

impl Children {
    fn obey(mut self, orders: &mpsc::Receiver<Order>) {
        loop {
            let order = match self.all.values().any(|one| one.killed.is_some()) {
                true => match orders.recv_timeout(REAP_LOOK) {
                    Err(RecvTimeoutError::Timeout) => {
                        self.reap();
                        continue;
                    }
                    order => order.map_err(drop),
                },
                false => orders.recv().map_err(drop),
            };
            match order {
                Ok(Order::Start(tell)) => {
                    let started = self.spawn();
                    // Whoever has given up drops it, which is an order to end it.
                    let _ = tell.send(started);
                }
                Ok(Order::End(number)) => self.kill(number),
                Ok(Order::EndAll(done)) => {
                    self.end();
                    let _ = done.send(()); // whoever asked has waited long enough
                    return;
                }
                Err(()) => return self.end(),
            }
            self.reap();
        }
    }

    fn spawn(&mut self) -> io::Result<Started> {
        if !self.program.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!(
                    "{} does not exist: install hdfs-helper beside node-agent, or set hdfs.helper",
                    self.program.display()
                ),
            ));
        }
        let alive = self.all.values().filter(|one| one.killed.is_none()).count();
        if alive >= HELPERS_MAX {
            return Err(io::Error::other(format!(
                "{alive} HDFS helpers run on this node already, one for each source and secret: place fewer pods with different ones here"
            )));
        }
        let spawner = self.spawner.upgrade().ok_or_else(|| io::Error::other(ENDING))?;
        let (socket, theirs) = UnixStream::pair()?;
        let (said, says) = child_log::pipe()?;
        let mut command = Command::new(&self.program);
        // No `pre_exec`, as for workers: what else a helper needs it does itself.
        command.env_clear().stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(says);
        command.args([std::process::id().to_string(), self.memory.to_string()]);
        let child = command.spawn()?;
        let pid = child.id();
        self.last += 1;
        self.all.insert(self.last, Alive { child, killed: None });
        let running = Running { number: self.last, spawner, group: Arc::new(Mutex::new(Group::None)) };
        child_log::follow(said, &self.runtime, move |line| tracing::warn!(helper = pid, "{line}"))?;
        let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Ok(Started { socket, running, process })
    }

    fn kill(&mut self, number: u64) {
        if let Some(one) = self.all.get_mut(&number)
            && one.killed.is_none()
        {
            let _ = one.child.kill(); // fails only if it has ended by itself
            one.killed = Some(Instant::now());
        }
    }

    fn reap(&mut self) {
        self.all.retain(|_, one| match one.child.try_wait() {
            Ok(None) => {
                let is_stuck = one.killed.is_some_and(|since| since.elapsed() > END_LIMIT);
                if is_stuck {
                    tracing::warn!(
                        helper = one.child.id(),
                        "a killed HDFS helper is stuck in the kernel, and not waited for any more"
                    );
                }
                !is_stuck
            }
            Ok(Some(_)) | Err(_) => false,
        });
    }

    fn end(&mut self) {
        let all: Vec<_> = self.all.keys().copied().collect();
        all.into_iter().for_each(|number| self.kill(number));
        while !self.all.is_empty() {
            self.reap();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Size;
    use link::Refusal;
    use std::os::unix::fs::PermissionsExt;

    /// Gives each process a group of its own, in name.
    #[derive(Default)]
    struct Broker {
        asked: Mutex<Vec<&'static str>>,
    }

    #[async_trait]
    impl Privileged for Broker {
        async fn ask(&self, request: BrokerRequest, fds: Vec<OwnedFd>) -> Result<BrokerAnswer, Refusal> {
            match request {
                BrokerRequest::Confine { bytes: 7 } if fds.len() == 1 => {
                    lock(&self.asked).push("confine");
                    Ok(BrokerAnswer::Confined { group: "g".into() })
                }
                BrokerRequest::Release { group } if group == "g" => {
                    lock(&self.asked).push("release");
                    Ok(BrokerAnswer::Released { oom_kills: 0 })
                }
                other => panic!("{other:?}"),
            }
        }
        fn connected(&self) -> bool {
            true
        }
    }

    /// A program that runs until it is killed, in a directory of its own.
    fn sleeper() -> (tempfile::TempDir, Hdfs) {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("helper");
        std::fs::write(&program, "#!/bin/sh\nexec sleep 600\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let config = Hdfs { helper: Some(program), memory_limit: Size(7), ..Hdfs::default() };
        (dir, config)
    }

    fn children() -> usize {
        let me = std::process::id().to_string();
        let all =
            std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path().join("children"));
        let all: String = all.filter_map(|file| std::fs::read_to_string(file).ok()).collect();
        let is_sleep = |pid: &&str| {
            std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("600"))
        };
        assert!(!all.split(' ').any(|pid| pid == me));
        all.split_whitespace().filter(is_sleep).count()
    }

    async fn until(what: &str, is_so: impl Fn() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < Duration::from_secs(60), "waited in vain: {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_helper_ends_with_whoever_holds_it_and_gives_its_group_back() {
        let (_dir, config) = sleeper();
        let broker = Arc::new(Broker::default());
        let spawner = HelperSpawner::new(&config, broker.clone(), tokio::runtime::Handle::current()).unwrap();
        let (one, two) = (spawner.start().await.unwrap(), spawner.start().await.unwrap());
        until("two run, each in a group", || lock(&broker.asked).len() == 2 && children() == 2).await;
        drop(one);
        until("one is gone", || lock(&broker.asked).len() == 3 && children() == 1).await;
        spawner.end_all();
        assert_eq!(children(), 0, "they are reaped");
        let late = spawner.start().await.map(|_| ()).unwrap_err();
        assert!(late.to_string().contains("is ending"), "{late}");
        drop(two);
        until("its group is given back", || lock(&broker.asked).len() == 4).await;
        assert_eq!(*lock(&broker.asked), ["confine", "confine", "release", "release"]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_helper_that_is_not_there_is_an_error_that_says_what_to_do() {
        let config = Hdfs { helper: Some("/nonexistent/helper".into()), ..Hdfs::default() };
        let broker = Arc::new(Broker::default());
        let spawner = HelperSpawner::new(&config, broker, tokio::runtime::Handle::current()).unwrap();
        let error = spawner.start().await.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("install hdfs-helper beside node-agent"), "{error}");
    }
}
