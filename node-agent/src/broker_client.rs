//! The agent's end of the connection to the mount broker: questions in both directions, reconnected for ever.

use crate::lock::lock;
use crate::state::StateDir;
use link::broker::{
    AgentAnswer, AgentRequest, BrokerAnswer, BrokerRequest, FromAgent, FromBroker, Hello, MountId, recv,
    send, try_send,
};
use link::{MAX_MESSAGE, Packet, PacketError, Refusal, RefusalKind};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// A privileged act that takes longer than this is not coming.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Before the first attempt to connect again; later ones wait longer.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Between two looks for a broker's socket where none listens: with the start of a broker, publishes work at once.
const LONGEST_ABSENCE: Duration = Duration::from_millis(250);
/// A standby that was connected for so long was not sent away at once.
const LASTING: Duration = Duration::from_secs(5);

/// Serves what the broker asks. Runs on the agent's runtime, but what comes before the first wait, which happens in the
/// order of the questions.
#[async_trait::async_trait]
pub(crate) trait Serve: Send + Sync {
    async fn serve(
        &self,
        request: AgentRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<(AgentAnswer, Vec<OwnedFd>), Refusal>;
    /// A broker is there; it may be another than before.
    async fn connected(self: Arc<Self>);
    /// The connection was lost; the broker holds its own copies and acts on its own limits.
    fn lost(&self);
    /// Does another agent serve, whose place this one would take?
    fn is_successor(&self) -> bool {
        false
    }
    /// Has this agent let go of everything but its mounts' descriptors?
    fn is_drained(&self) -> bool {
        false
    }
    /// The broker wants no connection with us now.
    fn refused(&self, _: &Refusal) {}
}

/// Cheap to clone through `Arc`; usable from every thread.
pub(crate) struct Broker {
    connection: RwLock<Option<Arc<Connection>>>,
    life: u64,
}

struct Connection {
    socket: AsyncFd<Packet>,
    next: AtomicU64,
    waiting: Mutex<HashMap<u64, Waiter>>,
    heard: Mutex<Heard>,
}

/// Whether the broker has been heard of lately. Each question to one that stands still would cost its limit, and some
/// come while readers wait.
struct Heard {
    at: Instant,
    /// A question was not answered, and nothing else came meanwhile: only signs of life are sent until something comes.
    nothing_since: bool,
}

enum Waiter {
    Asker(oneshot::Sender<Result<BrokerAnswer, Refusal>>),
    /// It gave up; a passthrough id that comes nevertheless is closed, for it pins disk blocks.
    Gone(MountId),
}

impl Connection {
    /// A task that waits for an answer learns at once that none will come.
    fn end(&self) {
        self.socket.get_ref().shutdown();
        lock(&self.waiting).clear();
    }

    /// Waits for room without a thread: a broker that stands still reads nothing, and the runtime serves all mounts.
    async fn send(&self, message: &FromAgent, fds: &[OwnedFd]) -> Result<(), PacketError> {
        loop {
            let mut room = self.socket.writable().await?;
            let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
            match try_send(self.socket.get_ref(), message, &borrowed) {
                Err(PacketError::TimedOut) => room.clear_ready(),
                sent => return sent,
            }
        }
    }

    async fn ask(&self, body: BrokerRequest, fds: Vec<OwnedFd>) -> Result<BrokerAnswer, Refusal> {
        let unavailable = |why: String| Refusal::new(RefusalKind::Unavailable, why);
        let late = match &body {
            BrokerRequest::BackingOpen { mount } => Some(*mount),
            _ => None,
        };
        if lock(&self.heard).nothing_since && !matches!(body, BrokerRequest::Beat) {
            return Err(unavailable("the mount broker stands still".into()));
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, mut receiver) = oneshot::channel();
        lock(&self.waiting).insert(id, Waiter::Asker(sender));
        let begun = Instant::now();
        let message = FromAgent::Ask { id, body };
        match tokio::time::timeout(ANSWER_LIMIT, self.send(&message, &fds)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                lock(&self.waiting).remove(&id);
                return Err(unavailable(format!("the mount broker went away: {error}")));
            }
            Err(_) => {
                self.heard_nothing(begun);
                lock(&self.waiting).remove(&id);
                return Err(unavailable("the mount broker does not read what it is asked".into()));
            }
        }
        drop(fds); // the broker has its own
        match tokio::time::timeout_at((begun + ANSWER_LIMIT).into(), &mut receiver).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(absent()),
            Err(_) => {
                self.heard_nothing(begun);
                let mut waiting = lock(&self.waiting);
                match (waiting.remove(&id), late) {
                    (Some(_), Some(mount)) => drop(waiting.insert(id, Waiter::Gone(mount))),
                    (Some(_), None) => {}
                    // Answered just now, or the connection has ended.
                    (None, _) => return receiver.try_recv().unwrap_or_else(|_| Err(absent())),
                }
                Err(unavailable("the mount broker did not answer in time".into()))
            }
        }
    }

    fn hears(&self) {
        *lock(&self.heard) = Heard { at: Instant::now(), nothing_since: false };
    }

    /// A question that was asked then has not been answered in time. It may lie behind others that wait for a disk.
    fn heard_nothing(&self, asked: Instant) {
        let mut heard = lock(&self.heard);
        heard.nothing_since |= heard.at < asked;
    }

    /// An answer has come.
    fn answered(self: &Arc<Self>, id: u64, body: Result<BrokerAnswer, Refusal>, runtime: &Handle) {
        let waiter = lock(&self.waiting).remove(&id);
        match (waiter, body) {
            (Some(Waiter::Asker(asker)), body) => {
                let _ = asker.send(body); // the asker has given up
            }
            (Some(Waiter::Gone(mount)), Ok(BrokerAnswer::Backing { id })) => {
                let me = self.clone();
                runtime.spawn(async move {
                    if let Err(error) = me.ask(BrokerRequest::BackingClose { mount, id }, Vec::new()).await {
                        tracing::warn!(%mount, id, %error, "a passthrough id that came too late stays open");
                    }
                });
            }
            _ => {}
        }
    }
}

fn absent() -> Refusal {
    Refusal::new(RefusalKind::Unavailable, "the mount broker is not connected")
}

impl Broker {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { connection: RwLock::new(None), life: StateDir::generation() })
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.current().is_some()
    }

    fn current(&self) -> Option<Arc<Connection>> {
        self.connection.read().unwrap_or_else(|p| p.into_inner()).clone()
    }

    /// Waits at most [`ANSWER_LIMIT`].
    async fn ask_within(&self, body: BrokerRequest, fds: Vec<OwnedFd>) -> Result<BrokerAnswer, Refusal> {
        self.current().ok_or_else(absent)?.ask(body, fds).await
    }

    /// Connects, serves, reconnects; never returns. A thread of its own: it blocks on the socket.
    pub(crate) fn run(self: &Arc<Self>, path: PathBuf, server: Arc<dyn Serve>, runtime: Handle) {
        let mut pause = FIRST_PAUSE;
        let mut logged = false;
        let mut longest;
        loop {
            match Packet::connect(&path) {
                Ok(socket) => {
                    logged = false;
                    longest = LONGEST_PAUSE;
                    let begun = Instant::now();
                    let was_successor = server.is_successor();
                    let ended = self.serve_connection(socket, &server, &runtime);
                    // A standby that was sent away at once would be so again: not every 50 ms.
                    if !was_successor || begun.elapsed() > LASTING {
                        pause = FIRST_PAUSE;
                    }
                    match ended {
                        Err(PacketError::Closed) => tracing::warn!("the mount broker closed the connection"),
                        Err(error) => tracing::warn!(%error, "connection to the mount broker lost"),
                        Ok(()) => {}
                    }
                    *self.connection.write().unwrap_or_else(|p| p.into_inner()) = None;
                    server.lost();
                }
                Err(error) => {
                    longest = LONGEST_ABSENCE;
                    if !logged {
                        tracing::warn!(path = %path.display(), %error, "mount broker not reachable, trying on");
                        logged = true;
                    }
                }
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(longest);
        }
    }

    fn serve_connection(
        &self,
        socket: Packet,
        server: &Arc<dyn Serve>,
        runtime: &Handle,
    ) -> Result<(), PacketError> {
        socket.set_send_timeout(Some(ANSWER_LIMIT))?;
        let socket = {
            let _entered = runtime.enter();
            // SAFETY: a `Packet` gives its one descriptor, open until it is dropped, and no code takes it out.
            unsafe { AsyncFd::register_with_interest(socket, Interest::WRITABLE) }
                .map_err(std::io::Error::from)?
        };
        let connection = Arc::new(Connection {
            socket,
            next: AtomicU64::new(1),
            waiting: Mutex::new(HashMap::new()),
            heard: Mutex::new(Heard { at: Instant::now(), nothing_since: false }),
        });
        let ended = self.converse(&connection, server, runtime);
        connection.end();
        ended
    }

    fn converse(
        &self,
        connection: &Arc<Connection>,
        server: &Arc<dyn Serve>,
        runtime: &Handle,
    ) -> Result<(), PacketError> {
        let mut buffer = vec![0; MAX_MESSAGE];
        let hello = BrokerRequest::Hello(Hello {
            protocol: version::LINK,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            state: version::STATE,
            life: self.life,
            successor: server.is_successor(),
            drained: server.is_drained(),
            beats: true,
        });
        let socket = connection.socket.get_ref();
        send(socket, &FromAgent::Ask { id: 0, body: hello }, &[])?;
        loop {
            let received = recv::<FromBroker>(socket, &mut buffer);
            connection.hears();
            let (frame, fds) = match received {
                Ok(received) => received,
                Err(PacketError::Malformed(what)) => {
                    tracing::warn!(what, "a message of the broker was dropped");
                    continue;
                }
                // Refused at once, so that a newer broker does not wait, and takes no other mount's time.
                Err(PacketError::NotUnderstood { id, question, why }) => {
                    tracing::warn!(id, why, "a message of the broker is of another version");
                    let refusal = link::broker::not_understood("this node agent", &why);
                    if question {
                        send(socket, &FromAgent::Answer { id, body: Err(refusal) }, &[])?;
                    } else if id == 0 {
                        server.refused(&refusal);
                        return Err(PacketError::Malformed(format!("Hello answered otherwise: {refusal}")));
                    } else {
                        connection.answered(id, Err(refusal), runtime);
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            match frame {
                FromBroker::Answer { id: 0, body } => match body {
                    Ok(BrokerAnswer::Welcome { protocol, broker_version }) => {
                        tracing::info!(protocol, broker_version, "connected to the mount broker");
                        *self.connection.write().unwrap_or_else(|p| p.into_inner()) =
                            Some(connection.clone());
                        runtime.spawn(server.clone().connected());
                    }
                    Ok(other) => {
                        return Err(PacketError::Malformed(format!("Hello answered with {other:?}")));
                    }
                    Err(refusal) => {
                        server.refused(&refusal);
                        return Err(PacketError::Malformed(format!("refused by the broker: {refusal}")));
                    }
                },
                FromBroker::Answer { id, body } => connection.answered(id, body, runtime),
                FromBroker::Ask { id, body } => {
                    let (server, connection) = (server.clone(), connection.clone());
                    let mut serving = Box::pin(async move {
                        let (body, fds) = match server.serve(body, fds).await {
                            Ok((answer, fds)) => (Ok(answer), fds),
                            Err(refusal) => (Err(refusal), Vec::new()),
                        };
                        if let Err(error) = connection.send(&FromAgent::Answer { id, body }, &fds).await {
                            tracing::warn!(%error, "answer to the broker was lost");
                        }
                    });
                    // Begun here, in the order in which the broker asks: an unpublish must find the publish before it.
                    let _entered = runtime.enter();
                    if serving.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                        runtime.spawn(serving);
                    }
                }
            }
        }
    }
}

#[async_trait::async_trait]
impl crate::privileged::Privileged for Broker {
    async fn ask(&self, request: BrokerRequest, fds: Vec<OwnedFd>) -> Result<BrokerAnswer, Refusal> {
        self.ask_within(request, fds).await
    }
    fn connected(&self) -> bool {
        self.is_connected()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct ServesNothing {
        connected: std::sync::mpsc::Sender<()>,
        /// In the order in which they were begun.
        asked: Arc<Mutex<Vec<MountId>>>,
    }

    #[async_trait::async_trait]
    impl Serve for ServesNothing {
        async fn serve(
            &self,
            request: AgentRequest,
            _: Vec<OwnedFd>,
        ) -> Result<(AgentAnswer, Vec<OwnedFd>), Refusal> {
            if let AgentRequest::Unpublish { mount } = request {
                lock(&self.asked).push(mount);
                tokio::task::yield_now().await;
            }
            Err(Refusal::new(RefusalKind::Internal, "nothing is served here"))
        }
        async fn connected(self: Arc<Self>) {
            let _ = self.connected.send(()); // the test has ended
        }
        fn lost(&self) {}
    }

    /// A client in this process, and the broker's end of its connection.
    fn connected(dir: &std::path::Path, runtime: &tokio::runtime::Runtime) -> (Arc<Broker>, Packet) {
        let (broker, peer, _) = connected_and_asked(dir, runtime);
        (broker, peer)
    }

    fn connected_and_asked(
        dir: &std::path::Path,
        runtime: &tokio::runtime::Runtime,
    ) -> (Arc<Broker>, Packet, Arc<Mutex<Vec<MountId>>>) {
        let path = dir.join("broker.sock");
        let listener = Packet::listen(&path).unwrap();
        let broker = Broker::new();
        let (sender, connected) = std::sync::mpsc::channel();
        let (client, handle, asked) = (broker.clone(), runtime.handle().clone(), Arc::default());
        let server = ServesNothing { connected: sender, asked: Arc::clone(&asked) };
        // Never returns: it ends with the test.
        std::thread::spawn(move || client.run(path, Arc::new(server), handle));
        let peer = Packet::accept(listener.as_fd()).unwrap();
        let mut buffer = vec![0; MAX_MESSAGE];
        let (hello, _) = recv::<FromAgent>(&peer, &mut buffer).unwrap();
        assert!(matches!(hello, FromAgent::Ask { id: 0, .. }));
        let welcome = BrokerAnswer::Welcome { protocol: version::LINK, broker_version: String::new() };
        send(&peer, &FromBroker::Answer { id: 0, body: Ok(welcome) }, &[]).unwrap();
        connected.recv_timeout(Duration::from_secs(20)).unwrap();
        (broker, peer, asked)
    }

    /// An unpublish that overtook its publish would find nothing, and the volume would be served.
    #[test]
    fn what_the_broker_asks_is_begun_in_its_order() {
        let dir = tempfile::tempdir().unwrap();
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(4).enable_all().build().unwrap();
        let (_broker, peer, asked) = connected_and_asked(dir.path(), &runtime);
        let mut buffer = vec![0; MAX_MESSAGE];
        let all: Vec<MountId> = (1..=2_000).map(MountId).collect();
        for some in all.chunks(50) {
            for &mount in some {
                send(&peer, &FromBroker::Ask { id: mount.0, body: AgentRequest::Unpublish { mount } }, &[])
                    .unwrap();
            }
            for _ in some {
                let (answer, _) = recv::<FromAgent>(&peer, &mut buffer).unwrap();
                assert!(matches!(answer, FromAgent::Answer { body: Err(_), .. }), "{answer:?}");
            }
        }
        assert_eq!(*lock(&asked), all);
    }

    #[test]
    fn what_a_later_broker_says_is_refused_at_once_and_the_connection_goes_on() {
        let (dir, runtime) = (tempfile::tempdir().unwrap(), tokio::runtime::Runtime::new().unwrap());
        let (broker, peer) = connected(dir.path(), &runtime);
        let mut buffer = vec![0; MAX_MESSAGE];
        // An adoption in a mode that is not known concerns that mount alone.
        for body in [r#"{"nextWish":{}}"#, r#""nextWish""#, r#"{"adopt":{"resume":{"mode":"Next"}}}"#] {
            peer.send(format!(r#"{{"ask":{{"id":5,"body":{body}}}}}"#).as_bytes(), &[]).unwrap();
            let (answer, _) = recv::<FromAgent>(&peer, &mut buffer).unwrap();
            let FromAgent::Answer { id: 5, body: Err(refusal) } = answer else { panic!("{answer:?}") };
            assert!(refusal.message.contains("another version"), "{refusal}");
        }
        let asking =
            runtime.spawn(async move { broker.ask_within(BrokerRequest::Leaving, Vec::new()).await });
        let (asked, _) = recv::<FromAgent>(&peer, &mut buffer).unwrap();
        let FromAgent::Ask { id, .. } = asked else { panic!("{asked:?}") };
        peer.send(format!(r#"{{"answer":{{"id":{id},"body":{{"Ok":"nextAnswer"}}}}}}"#).as_bytes(), &[])
            .unwrap();
        let refusal = runtime.block_on(asking).unwrap().unwrap_err();
        assert!(refusal.message.contains("another version"), "it waited: {refusal}");
    }

    /// Its buffer holds a few hundred questions.
    #[test]
    fn a_broker_that_reads_nothing_holds_up_nobody_but_its_askers() {
        let dir = tempfile::tempdir().unwrap();
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        let (broker, _reads_nothing) = connected(dir.path(), &runtime);
        let asking: Vec<_> = (0..2_000)
            .map(|_| {
                let broker = broker.clone();
                runtime.spawn(async move { broker.ask_within(BrokerRequest::Beat, Vec::new()).await })
            })
            .collect();
        let (sender, receiver) = std::sync::mpsc::channel();
        runtime.spawn(async move { sender.send(()) });
        receiver.recv_timeout(Duration::from_secs(20)).expect("the runtime is held up");
        for answer in asking {
            let answer = runtime.block_on(answer).unwrap();
            assert!(matches!(answer, Err(Refusal { kind: RefusalKind::Unavailable, .. })), "{answer:?}");
        }
        assert!(lock(&broker.current().unwrap().waiting).is_empty());
    }

    /// Readers may wait for what is asked: the next question is refused at once, until the broker says something.
    #[test]
    fn a_broker_that_stands_still_is_waited_for_once() {
        let (dir, runtime) = (tempfile::tempdir().unwrap(), tokio::runtime::Runtime::new().unwrap());
        let (broker, peer) = connected(dir.path(), &runtime);
        let ask = |body| runtime.block_on(broker.ask_within(body, Vec::new())).unwrap_err().message;
        assert!(ask(BrokerRequest::Leaving).contains("in time"));
        let begun = Instant::now();
        let more = (0..100).filter(|_| ask(BrokerRequest::Leaving).contains("stands still")).count();
        assert_eq!(more, 100);
        assert!(begun.elapsed() < 10 * ANSWER_LIMIT, "each was waited for: {:?}", begun.elapsed());
        assert!(ask(BrokerRequest::Beat).contains("in time"), "signs of life go on");

        let mut buffer = vec![0; MAX_MESSAGE];
        for _ in 0..2 {
            let (question, _) = recv::<FromAgent>(&peer, &mut buffer).unwrap();
            let FromAgent::Ask { id, .. } = question else { panic!("{question:?}") };
            send(&peer, &FromBroker::Answer { id, body: Ok(BrokerAnswer::Done) }, &[]).unwrap();
        }
        let connection = broker.current().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while lock(&connection.heard).nothing_since {
            assert!(Instant::now() < until, "nothing is heard of it");
            std::thread::yield_now();
        }
        // Asked again, and while others are answered one that is late says nothing of the broker.
        let late = broker.clone();
        let late = runtime.spawn(async move { late.ask_within(BrokerRequest::Leaving, Vec::new()).await });
        recv::<FromAgent>(&peer, &mut buffer).unwrap();
        let other = broker.clone();
        let other = runtime.spawn(async move { other.ask_within(BrokerRequest::Beat, Vec::new()).await });
        let (question, _) = recv::<FromAgent>(&peer, &mut buffer).unwrap();
        let FromAgent::Ask { id, .. } = question else { panic!("{question:?}") };
        send(&peer, &FromBroker::Answer { id, body: Ok(BrokerAnswer::Done) }, &[]).unwrap();
        assert!(runtime.block_on(other).unwrap().is_ok());
        assert!(runtime.block_on(late).unwrap().unwrap_err().message.contains("in time"));
        assert!(!lock(&connection.heard).nothing_since);
    }

    /// It looks at the file first, on a disk that may hang.
    #[test]
    fn a_passthrough_id_that_comes_too_late_is_closed() {
        let (dir, runtime) = (tempfile::tempdir().unwrap(), tokio::runtime::Runtime::new().unwrap());
        let (broker, peer) = connected(dir.path(), &runtime);
        let mount = MountId(7);
        let asked = runtime.block_on(broker.ask_within(BrokerRequest::BackingOpen { mount }, Vec::new()));
        assert!(asked.is_err(), "{asked:?}");
        let mut buffer = vec![0; MAX_MESSAGE];
        let (question, _) = recv::<FromAgent>(&peer, &mut buffer).unwrap();
        let FromAgent::Ask { id, .. } = question else { panic!("{question:?}") };
        send(&peer, &FromBroker::Answer { id, body: Ok(BrokerAnswer::Backing { id: 3 }) }, &[]).unwrap();
        peer.set_recv_timeout(Some(Duration::from_secs(20))).unwrap();
        let (closing, _) = recv::<FromAgent>(&peer, &mut buffer).unwrap();
        let wanted = BrokerRequest::BackingClose { mount, id: 3 };
        let FromAgent::Ask { body, .. } = closing else { panic!("{closing:?}") };
        assert_eq!(format!("{body:?}"), format!("{wanted:?}"));
    }

    #[test]
    fn who_waits_for_a_broker_that_dies_learns_it_at_once() {
        let (dir, runtime) = (tempfile::tempdir().unwrap(), tokio::runtime::Runtime::new().unwrap());
        let (broker, peer) = connected(dir.path(), &runtime);
        let mut buffer = vec![0; MAX_MESSAGE];
        let asking =
            runtime.spawn(async move { broker.ask_within(BrokerRequest::Leaving, Vec::new()).await });
        recv::<FromAgent>(&peer, &mut buffer).unwrap();
        let died = Instant::now();
        drop(peer);
        let answer = runtime.block_on(asking).unwrap();
        assert!(matches!(answer, Err(Refusal { kind: RefusalKind::Unavailable, .. })), "{answer:?}");
        assert!(died.elapsed() < ANSWER_LIMIT / 2, "it waited for {:?}", died.elapsed());
    }
}
