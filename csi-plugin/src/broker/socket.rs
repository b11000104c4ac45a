//! The agent's connection: who may connect, questions and answers in both directions.

use link::broker::{
    AgentAnswer, AgentRequest, BrokerAnswer, BrokerRequest, Frame, FromAgent, FromBroker, Hello, MountId,
};
use link::{MAX_MESSAGE, Packet, PacketError, Refusal, RefusalKind};
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use version::neighbours;

const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// An agent that does not read for so long is as good as gone.
const SEND_LIMIT: Duration = Duration::from_secs(2);
/// Questions about cache files that may wait for a disk; more make the agent wait.
const SLOW_QUEUE: usize = 1024;
/// Questions with a thread of their own. An agent asks of each mount once in a while; one that asks more, or takes no
/// answers, shall not have as many threads of ours as it likes.
const APART_MAX: usize = 32;

/// One life of one agent process: a process id alone may be used again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AgentIdentity {
    pub pid: i32,
    pub started: Option<u64>,
    /// A process that executes itself anew is another agent, which knows nothing of what it served before.
    pub life: u64,
}

impl AgentIdentity {
    pub fn of(pid: i32, life: u64) -> Self {
        Self { pid, started: start_time(pid), life }
    }

    pub(crate) fn is_process_of(&self, other: &Self) -> bool {
        (self.pid, self.started) == (other.pid, other.started)
    }
}

/// In ticks since boot: with it a pid names one process.
fn start_time(pid: i32) -> Option<u64> {
    Some(procfs::process::Process::new(pid).ok()?.stat().ok()?.starttime)
}

type Answered = Result<(AgentAnswer, Vec<OwnedFd>), Refusal>;

#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("the node agent went away")]
    Gone,
    #[error("the node agent did not answer within {0:?}")]
    TimedOut(Duration),
    #[error(transparent)]
    Refused(Refusal),
    /// The caller does not want the answer any more.
    #[error("the mount was ended while it was set up")]
    Withdrawn,
    #[error("cannot ask the node agent: {0}")]
    Send(PacketError),
}

/// A caller waits for the answer.
#[derive(Debug)]
struct Waiting {
    /// What is to be published.
    publish: Option<MountId>,
    answer: SyncSender<Answered>,
}

/// Answers the agent's questions. Called on the connection's threads.
pub trait Handler: Send + Sync {
    fn answer(
        &self,
        agent: &AgentIdentity,
        request: BrokerRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<BrokerAnswer, Refusal>;
    /// Before its first question is answered. It must not ask the agent.
    fn connected(&self, agent: &Arc<AgentLink>);
    /// On a thread of its own: the agent may be given what another one left.
    fn succeed(&self, agent: &Arc<AgentLink>);
    fn lost(&self, agent: &AgentLink);
}

/// Who may be connected, and as what.
pub trait Admission: Send + Sync {
    /// `greet` sends one packet into an empty socket, which does not block.
    ///
    /// # Errors
    /// Its place is taken, or the agents cannot follow each other.
    fn take(&self, link: &Arc<AgentLink>, greet: &dyn Fn()) -> Result<(), Refusal>;
    /// Whatever it was: its place is free at once.
    fn clear(&self, link: &Arc<AgentLink>);
}

#[derive(Debug)]
pub struct AgentLink {
    packet: Packet,
    identity: AgentIdentity,
    hello: Hello,
    promised_to_beat: bool,
    beats: AtomicU64,
    /// A message of the agent is being dealt with: those behind it have not been looked at.
    busy: AtomicBool,
    next: AtomicU64,
    /// None: the connection has ended.
    pending: Mutex<Option<HashMap<u64, Waiting>>>,
}

impl AgentLink {
    pub fn identity(&self) -> &AgentIdentity {
        &self.identity
    }

    /// What it said of itself.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    pub fn is_connected(&self) -> bool {
        self.pending().is_some()
    }

    pub fn close(&self) {
        self.packet.shutdown();
    }

    /// It says `Beat`, and its process is known from the kernel.
    pub(crate) fn promised_to_beat(&self) -> bool {
        self.promised_to_beat
    }

    /// Signs of life so far; None: we are busy ourselves, and do not know.
    pub fn beats(&self) -> Option<u64> {
        (!self.busy.load(Ordering::Relaxed)).then(|| self.beats.load(Ordering::Relaxed))
    }

    fn pending(&self) -> MutexGuard<'_, Option<HashMap<u64, Waiting>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks and waits. A late answer is dropped, descriptors and all.
    pub fn ask(
        &self,
        body: AgentRequest,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<(AgentAnswer, Vec<OwnedFd>), AskError> {
        self.ask_while(|| true, body, fds, limit)
    }

    /// As [`Self::ask`]. For what can be [withdrawn](Self::withdraw): `wanted` is looked at once it can be.
    pub(crate) fn ask_while(
        &self,
        wanted: impl FnOnce() -> bool,
        body: AgentRequest,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<(AgentAnswer, Vec<OwnedFd>), AskError> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, receive) = sync_channel(1);
        let publish = match &body {
            AgentRequest::Publish(publish) => Some(publish.mount),
            _ => None,
        };
        self.pending().as_mut().ok_or(AskError::Gone)?.insert(id, Waiting { publish, answer });
        let ask = || link::broker::send(&self.packet, &FromBroker::Ask { id, body }, fds);
        let result = match wanted().then(ask) {
            None => Err(AskError::Withdrawn),
            Some(Ok(())) => match receive.recv_timeout(limit) {
                Ok(answered) => answered.map_err(AskError::Refused),
                Err(RecvTimeoutError::Timeout) => Err(AskError::TimedOut(limit)),
                Err(RecvTimeoutError::Disconnected) if self.is_connected() => Err(AskError::Withdrawn),
                Err(RecvTimeoutError::Disconnected) => Err(AskError::Gone),
            },
            Some(Err(PacketError::Closed)) => Err(AskError::Gone),
            Some(Err(error)) => Err(AskError::Send(error)),
        };
        if let Some(pending) = self.pending().as_mut() {
            pending.remove(&id);
        }
        result
    }

    /// The thread that waits for the agent to publish this mount waits no longer. It is over already: a later
    /// caller sees that.
    pub(super) fn withdraw(&self, mount: MountId) {
        if let Some(pending) = self.pending().as_mut() {
            pending.retain(|_, waiting| waiting.publish != Some(mount));
        }
    }

    /// Neither the agent nor the thread that asked it waits for an answer that will not come.
    fn not_understood(&self, id: u64, question: bool, why: &str) {
        if question {
            return self.reply(id, Err(link::broker::not_understood("this csi-plugin", why)));
        }
        if let Some(waiting) = self.pending().as_mut().and_then(|p| p.remove(&id)) {
            // Fails only if the asker has stopped waiting.
            let _ = waiting.answer.try_send(Err(link::broker::not_understood("this csi-plugin", why)));
        }
    }

    fn reply(&self, id: u64, body: Result<BrokerAnswer, Refusal>) {
        if let Err(error) = link::broker::send(&self.packet, &FromBroker::Answer { id, body }, &[]) {
            tracing::debug!(%error, "an answer did not reach the agent");
        }
    }
}

/// Serves one connection until it ends.
pub fn serve(packet: Packet, agent_uid: u32, slots: &dyn Admission, handler: &Arc<dyn Handler>) {
    let link = match greet(packet, agent_uid, slots) {
        Ok(link) => link,
        Err(why) => {
            tracing::warn!(%why, "a connection to the broker was refused");
            return;
        }
    };
    let Hello { agent_version, successor, .. } = &link.hello;
    tracing::info!(pid = link.identity.pid, agent_version, successor, "the node agent is connected");
    handler.connected(&link);
    let (newcomer, for_greeter) = (link.clone(), handler.clone());
    let greeter =
        std::thread::Builder::new().name("agent-new".into()).spawn(move || for_greeter.succeed(&newcomer));
    if let Err(error) = greeter {
        tracing::error!(%error, "no thread to give the new agent its predecessor's mounts: it is sent away");
        link.close();
    }

    let (slow, queue) = sync_channel(SLOW_QUEUE);
    let worker = {
        let (link, handler) = (link.clone(), handler.clone());
        std::thread::Builder::new()
            .name("agent-slow".into())
            .spawn(move || answer_slowly(&link, &*handler, queue))
    };
    match worker {
        Ok(worker) => {
            receive(&link, handler, &slow);
            drop(slow);
            // Waiting askers see the end of the connection at once.
            *link.pending() = None;
            slots.clear(&link);
            handler.lost(&link);
            let _ = worker.join(); // it returns: a panic would be the end of this process
        }
        Err(error) => {
            tracing::error!(%error, "no thread for the node agent's questions");
            *link.pending() = None;
            slots.clear(&link);
            handler.lost(&link);
        }
    }
    tracing::warn!(pid = link.identity.pid, "the node agent is gone");
}

/// Checks the peer, exchanges Hello and Welcome, takes the slot.
fn greet(packet: Packet, agent_uid: u32, slots: &dyn Admission) -> Result<Arc<AgentLink>, String> {
    let peer = packet.peer().map_err(|e| format!("cannot see who connects: {e}"))?;
    if peer.uid != 0 && peer.uid != agent_uid {
        return Err(format!(
            "user {} (pid {}) is neither root nor the agent's user {agent_uid}",
            peer.uid, peer.pid
        ));
    }
    let limits = packet.set_recv_timeout(Some(HELLO_LIMIT)).and(packet.set_send_timeout(Some(SEND_LIMIT)));
    limits.map_err(|e| format!("cannot limit a connection's time: {e}"))?;
    let mut buffer = vec![0; MAX_MESSAGE];
    let (frame, _) =
        link::broker::recv::<FromAgent>(&packet, &mut buffer).map_err(|e| format!("no Hello: {e}"))?;
    let Frame::Ask { id, body: BrokerRequest::Hello(hello) } = frame else {
        return Err("the first message is not Hello".into());
    };
    packet.set_recv_timeout(None).map_err(|e| e.to_string())?;
    let pid = if peer.pid > 0 { peer.pid } else { i32::try_from(hello.pid).unwrap_or_default() };
    let link = Arc::new(AgentLink {
        packet,
        identity: AgentIdentity::of(pid, hello.life),
        promised_to_beat: hello.beats && peer.pid > 0,
        hello,
        beats: AtomicU64::new(0),
        busy: AtomicBool::new(false),
        next: AtomicU64::new(1),
        pending: Mutex::new(Some(HashMap::new())),
    });
    let refuse = |refusal: Refusal| {
        let why = refusal.message.clone();
        link.reply(id, Err(refusal));
        why
    };
    if !neighbours(link.hello.protocol, version::LINK) {
        let why = format!(
            "the agent speaks version {} of the link and this csi-plugin version {}: upgrade in steps, one version at a time",
            link.hello.protocol,
            version::LINK
        );
        return Err(refuse(Refusal::new(RefusalKind::Conflict, why)));
    }
    // Welcome goes out before another thread can see the link and ask something over it.
    let welcome = || {
        let broker_version = env!("CARGO_PKG_VERSION").into();
        link.reply(id, Ok(BrokerAnswer::Welcome { protocol: version::LINK, broker_version }));
    };
    slots.take(&link, &welcome).map_err(refuse)?;
    Ok(link)
}

type Question = (u64, BrokerRequest, Vec<OwnedFd>);

fn receive(link: &Arc<AgentLink>, handler: &Arc<dyn Handler>, slow: &SyncSender<Question>) {
    let mut buffer = vec![0; MAX_MESSAGE];
    let places = Arc::new(()); // each thread holds a clone
    loop {
        link.busy.store(false, Ordering::Relaxed);
        let received = link::broker::recv::<FromAgent>(&link.packet, &mut buffer);
        link.busy.store(true, Ordering::Relaxed);
        let (frame, fds) = match received {
            Ok(received) => received,
            Err(error @ (PacketError::Malformed(_) | PacketError::TooLarge(..))) => {
                tracing::warn!(%error, "a message of the node agent was dropped");
                continue;
            }
            Err(PacketError::NotUnderstood { id, question, why }) => {
                tracing::warn!(id, why, "a message of the node agent is of another version");
                link.not_understood(id, question, &why);
                continue;
            }
            Err(PacketError::TimedOut) => continue,
            Err(PacketError::Closed) => return,
            Err(PacketError::Io(error)) => {
                tracing::warn!(%error, "the connection to the node agent failed");
                return;
            }
        };
        failpoint::pass("broker.told");
        match frame {
            Frame::Answer { id, body } => {
                let waiting = link.pending().as_mut().and_then(|p| p.remove(&id));
                if let Some(waiting) = waiting {
                    // Fails only if the asker has stopped waiting.
                    let _ = waiting.answer.try_send(body.map(|answer| (answer, fds)));
                }
            }
            Frame::Ask { id, body } => match pace(&body) {
                Pace::AtOnce => {
                    if matches!(body, BrokerRequest::Beat) {
                        link.beats.fetch_add(1, Ordering::Relaxed);
                    }
                    link.reply(id, handler.answer(&link.identity, body, fds));
                }
                Pace::InOrder => {
                    if slow.send((id, body, fds)).is_err() {
                        return;
                    }
                }
                Pace::Apart if Arc::strong_count(&places) > APART_MAX => {
                    let why = "too many questions are being answered";
                    link.reply(id, Err(Refusal::new(RefusalKind::Unavailable, why)));
                }
                Pace::Apart => {
                    let (to, handler, place) = (link.clone(), handler.clone(), places.clone());
                    let answer = move || {
                        to.reply(id, handler.answer(&to.identity, body, fds));
                        drop(place);
                    };
                    if let Err(error) = std::thread::Builder::new().name("agent-apart".into()).spawn(answer) {
                        link.reply(id, Err(Refusal::new(RefusalKind::Unavailable, error.to_string())));
                    }
                }
            },
        }
    }
}

/// How a question is answered without holding up the others.
enum Pace {
    AtOnce,
    /// Cache files may lie on a disk that hangs: that must not hold up a reader that is dying.
    InOrder,
    /// On a thread of its own: it waits for a mount. Few at once.
    Apart,
}

fn pace(request: &BrokerRequest) -> Pace {
    match request {
        BrokerRequest::BackingOpen { .. }
        | BrokerRequest::BackingClose { .. }
        | BrokerRequest::Hold(_)
        | BrokerRequest::Abort { .. } => Pace::InOrder,
        BrokerRequest::Probe { .. } => Pace::Apart,
        BrokerRequest::Hello(_)
        | BrokerRequest::Beat
        | BrokerRequest::Confine { .. }
        | BrokerRequest::Release { .. }
        | BrokerRequest::Dying { .. }
        | BrokerRequest::Waiting { .. }
        | BrokerRequest::Leaving
        | BrokerRequest::Report { .. } => Pace::AtOnce,
    }
}

fn answer_slowly(link: &AgentLink, handler: &dyn Handler, queue: Receiver<Question>) {
    for (id, body, fds) in queue {
        link.reply(id, handler.answer(&link.identity, body, fds));
    }
}

#[cfg(test)]
impl AgentLink {
    /// A connected agent whose other end is a thread that answers at once.
    pub(super) fn scripted(
        identity: AgentIdentity,
        successor: bool,
        answer: impl Fn(&AgentRequest) -> Result<AgentAnswer, Refusal> + Send + 'static,
    ) -> Arc<Self> {
        let (packet, other) = Packet::pair().unwrap();
        let hello = Hello {
            protocol: version::LINK,
            agent_version: "test".into(),
            pid: 0,
            state: version::STATE,
            life: identity.life,
            successor,
            drained: false,
            beats: false,
        };
        let link = Arc::new(Self {
            packet,
            identity,
            hello,
            promised_to_beat: false,
            beats: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            next: AtomicU64::new(1),
            pending: Mutex::new(Some(HashMap::new())),
        });
        let at = Arc::downgrade(&link);
        std::thread::spawn(move || {
            let mut buffer = vec![0; MAX_MESSAGE];
            while let Ok((Frame::Ask { id, body }, _fds)) =
                link::broker::recv::<FromBroker>(&other, &mut buffer)
            {
                let answered = answer(&body).map(|answer| (answer, Vec::new()));
                let Some(link) = at.upgrade() else { return };
                if let Some(waiting) = link.pending().as_mut().and_then(|pending| pending.remove(&id)) {
                    let _ = waiting.answer.try_send(answered); // the asker may wait no longer
                }
            }
        });
        link
    }
}
