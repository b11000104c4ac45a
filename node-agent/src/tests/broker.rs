//! The broker as a test plays it, behind a real socket.

use super::until;
use link::broker::{
    AgentAnswer, AgentRequest, BrokerAnswer, BrokerRequest, FromAgent, FromBroker, Hello, Hold, MountId,
    recv, send,
};
use link::{MAX_MESSAGE, Packet, Refusal};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;

const LIMIT: Duration = Duration::from_secs(40);

type Answered = Result<(AgentAnswer, Vec<OwnedFd>), Refusal>;
/// Answers in place of the broker, where it has an answer.
type Instead = Box<dyn Fn(&BrokerRequest) -> Option<Result<BrokerAnswer, Refusal>> + Send>;

/// What the broker knows of a mount that an agent has shown it.
pub(super) struct Held {
    pub(super) hold: Hold,
    pub(super) fds: Vec<OwnedFd>,
}

pub(super) struct Broker {
    path: PathBuf,
    agents: Mutex<Vec<Arc<Agent>>>,
    instead: Mutex<Option<Instead>>,
    pub(super) held: Mutex<BTreeMap<MountId, Held>>,
    /// What agents asked, in order, but for their signs of life.
    asked: Mutex<Vec<BrokerRequest>>,
    groups: AtomicU64,
}

/// The connection of one agent.
pub(super) struct Agent {
    pub(super) hello: Hello,
    socket: Packet,
    next: AtomicU64,
    waiting: Mutex<HashMap<u64, oneshot::Sender<Answered>>>,
}

impl Broker {
    pub(super) fn listen(dir: &Path) -> Arc<Self> {
        let me = Arc::new(Self {
            path: dir.join("broker"),
            agents: Mutex::default(),
            instead: Mutex::default(),
            held: Mutex::default(),
            asked: Mutex::default(),
            groups: AtomicU64::new(0),
        });
        me.start();
        me
    }

    /// Another process of it, which knows nothing.
    pub(super) fn start(self: &Arc<Self>) {
        let _ = std::fs::remove_file(&self.path);
        let listener = Packet::listen(&self.path).unwrap();
        let me = self.clone();
        // Ends with the program.
        std::thread::spawn(move || {
            while let Ok(socket) = Packet::accept(listener.as_fd()) {
                let me = me.clone();
                std::thread::spawn(move || me.serve(socket));
            }
        });
    }

    /// Its connections are lost, and what it held with them.
    pub(super) fn die(&self) {
        let _ = std::fs::remove_file(&self.path);
        let agents = std::mem::take(&mut *self.agents.lock().unwrap());
        agents.iter().for_each(|agent| agent.socket.shutdown());
        self.held.lock().unwrap().clear();
        self.asked.lock().unwrap().clear();
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn answers(
        &self,
        instead: impl Fn(&BrokerRequest) -> Option<Result<BrokerAnswer, Refusal>> + Send + 'static,
    ) {
        *self.instead.lock().unwrap() = Some(Box::new(instead));
    }

    pub(super) fn answers_as_usual(&self) {
        *self.instead.lock().unwrap() = None;
    }

    /// The agent that serves, or the standby.
    pub(super) async fn agent(&self, successor: bool) -> Arc<Agent> {
        let find = || {
            let agents = self.agents.lock().unwrap();
            agents.iter().rev().find(|agent| agent.hello.successor == successor).cloned()
        };
        until("an agent connects", || find().is_some()).await;
        find().unwrap()
    }

    /// Waits until an agent has asked for something like it; gives the first.
    pub(super) async fn was_asked<T>(&self, what: &str, wanted: impl Fn(&BrokerRequest) -> Option<T>) -> T {
        let find = || self.asked.lock().unwrap().iter().find_map(&wanted);
        until(what, || find().is_some()).await;
        find().unwrap()
    }

    fn serve(&self, socket: Packet) {
        let mut buffer = vec![0; MAX_MESSAGE];
        let Ok((FromAgent::Ask { id: 0, body: BrokerRequest::Hello(hello) }, _)) = recv(&socket, &mut buffer)
        else {
            return;
        };
        let welcome = BrokerAnswer::Welcome { protocol: version::LINK, broker_version: "test".into() };
        let answer = self.instead(&BrokerRequest::Hello(hello_of(&hello))).unwrap_or(Ok(welcome));
        let welcomed = answer.is_ok();
        let agent = Arc::new(Agent { hello, socket, next: AtomicU64::new(1), waiting: Mutex::default() });
        let sent = send(&agent.socket, &FromBroker::Answer { id: 0, body: answer }, &[]);
        if sent.is_err() || !welcomed {
            return;
        }
        self.agents.lock().unwrap().push(agent.clone());
        while let Ok((frame, fds)) = recv::<FromAgent>(&agent.socket, &mut buffer) {
            match frame {
                FromAgent::Ask { id, body } => {
                    let answer = self.instead(&body).unwrap_or_else(|| Ok(self.answer(&body)));
                    match body {
                        BrokerRequest::Beat => {}
                        BrokerRequest::Hold(hold) if answer.is_ok() => {
                            self.held.lock().unwrap().insert(hold.publish.mount, Held { hold: *hold, fds });
                        }
                        other => self.asked.lock().unwrap().push(other),
                    }
                    let _ = send(&agent.socket, &FromBroker::Answer { id, body: answer }, &[]); // it may be gone
                }
                FromAgent::Answer { id, body } => {
                    if let Some(waiter) = agent.waiting.lock().unwrap().remove(&id) {
                        let _ = waiter.send(body.map(|answer| (answer, fds))); // the test waits no more
                    }
                }
            }
        }
        agent.waiting.lock().unwrap().clear();
        self.agents.lock().unwrap().retain(|other| !Arc::ptr_eq(other, &agent));
    }

    fn instead(&self, request: &BrokerRequest) -> Option<Result<BrokerAnswer, Refusal>> {
        self.instead.lock().unwrap().as_ref().and_then(|answer| answer(request))
    }

    fn answer(&self, request: &BrokerRequest) -> BrokerAnswer {
        match request {
            BrokerRequest::BackingOpen { .. } => BrokerAnswer::Backing { id: 5 },
            BrokerRequest::Dying { tids } => {
                BrokerAnswer::Dying { tids: tids.iter().copied().take(1).collect() }
            }
            BrokerRequest::Waiting { .. } => BrokerAnswer::Waiting { count: 1 },
            BrokerRequest::Leaving => {
                BrokerAnswer::Holding { mounts: self.held.lock().unwrap().keys().copied().collect() }
            }
            BrokerRequest::Probe { .. } => BrokerAnswer::Probed { serving: true },
            BrokerRequest::Confine { .. } => {
                BrokerAnswer::Confined { group: format!("worker-{}", self.groups.fetch_add(1, SeqCst)) }
            }
            BrokerRequest::Release { .. } => BrokerAnswer::Released { oom_kills: 0 },
            _ => BrokerAnswer::Done,
        }
    }
}

/// What a test's answer may depend on.
fn hello_of(hello: &Hello) -> Hello {
    let Hello { protocol, pid, state, life, successor, drained, beats, .. } = *hello;
    Hello {
        agent_version: hello.agent_version.clone(),
        protocol,
        pid,
        state,
        life,
        successor,
        drained,
        beats,
    }
}

impl Agent {
    pub(super) async fn ask(&self, body: AgentRequest, fds: &[BorrowedFd<'_>]) -> Answered {
        let (sender, answer) = oneshot::channel();
        let id = self.next.fetch_add(1, SeqCst);
        self.waiting.lock().unwrap().insert(id, sender);
        send(&self.socket, &FromBroker::Ask { id, body }, fds).unwrap();
        tokio::time::timeout(LIMIT, answer).await.expect("an answer in time").expect("an answer")
    }

    /// Asks for what is answered without descriptors.
    pub(super) async fn done(&self, body: AgentRequest) -> Result<AgentAnswer, Refusal> {
        self.ask(body, &[]).await.map(|(answer, _)| answer)
    }
}
