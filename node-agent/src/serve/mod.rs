//! Answers what workers ask. Nothing here blocks the mount's thread: a question that needs the network becomes a task.

pub(crate) mod dying;
pub(crate) mod questions;

use crate::metrics::Metrics;
use crate::prefetch::open_gate::OpenGate;
use crate::prefetch::siblings::{self, SiblingPrefetch};
use crate::privileged::Privileged;
use crate::serve::dying::DyingCallers;
use crate::serve::questions::Questions;
use crate::source::outage::Tolerance;
use crate::source::stale::{self, Told};
use crate::supervisor::{Answer, Mount};
use crate::volumes::scope::Scope;
use bytes::Bytes;
use cache::data::{Engine, File, Found, ReadOptions, Reading};
use cache::meta::{View, is_name};
use inflight::on_behalf;
use link::broker::{BrokerAnswer, BrokerRequest};
use link::worker::{Ask, FromWorker, READ_MAX, Reply, ToWorker};
use link::writable::{Operation, Wrong};
use link::{Cause, Packet, PacketError};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Questions of one worker that have no answer yet: one for each request in flight, and a few of its own. A worker that
/// asks more is not one of ours any more.
const QUESTIONS_MAX: usize = inflight::SLOTS + 1024;

pub struct Server {
    pub engine: Arc<Engine>,
    pub privileged: Arc<dyn Privileged>,
    pub metrics: Arc<Metrics>,
    pub runtime: tokio::runtime::Handle,
    /// Of volumes that do not say otherwise.
    pub reading: Reading,
    pub(crate) open_gate: OpenGate,
    pub(crate) siblings: Arc<SiblingPrefetch>,
    /// How many passthrough ids the broker keeps us waiting for.
    pub(crate) backing_waits: Arc<AtomicUsize>,
    pub(crate) dying: DyingCallers,
}

/// A broker that works takes microseconds.
const BACKING_LIMIT: Duration = Duration::from_secs(2);

type Answered = Result<(Reply, Vec<OwnedFd>), Cause>;

impl Answer for Arc<Server> {
    fn handle(&self, mount: &Arc<Mount>, worker: &Arc<Packet>, message: FromWorker) {
        failpoint::pass("agent.told");
        match message {
            FromWorker::Ask { id, unique, body } => {
                let questions = mount.questions();
                let Some(place) = questions.enter(QUESTIONS_MAX) else {
                    tracing::error!(volume = %mount.spec.id, "a worker asks without end: it is ended");
                    return worker.shutdown();
                };
                let (server, mount, worker) = (self.clone(), mount.clone(), worker.clone());
                let behalf = mount.behalf(unique);
                self.runtime.spawn(on_behalf(behalf, async move {
                    if mount.is_condemned(unique) {
                        return reply(&mount, &questions, &worker, id, Err(Cause::Internal)).await;
                    }
                    let is_silent = server.is_silent(&mount, unique, &body);
                    let mut answer = pin!(server.answer_who_waits(&mount, &questions, unique, body));
                    let answered = tokio::select! {
                        biased;
                        answered = &mut answer => Some(answered),
                        wrong = is_silent => {
                            let done = Reply::Writable { done: Err(wrong), until_ms: 0 };
                            reply(&mount, &questions, &worker, id, Ok((done, Vec::new()))).await;
                            None
                        }
                    };
                    match answered {
                        Some(answered) => reply(&mount, &questions, &worker, id, answered).await,
                        None => {
                            drop(place);
                            let _ = answer.await; // what was begun comes to its end
                        }
                    }
                }));
            }
            FromWorker::Touched { files } => self.engine.touched(&mount.scope.id, &files),
            FromWorker::Advance { file, offset } => {
                if let Some(file) = self.file_of(mount, file) {
                    // Fetching ahead starts tasks: it needs the runtime's context.
                    let _context = self.runtime.enter();
                    file.advance(offset, self.reader_options(mount));
                }
            }
            FromWorker::GivenBack { number } => mount.questions().give_back(number),
            FromWorker::Counted(counts) => {
                mount.count(&counts);
                self.metrics.worker_counts(&counts);
            }
            // The supervisor has taken these; a second one is a confused worker, which changes nothing.
            FromWorker::Ready { .. }
            | FromWorker::Answered { .. }
            | FromWorker::Serving
            | FromWorker::Failed { .. } => {}
        }
    }
}

impl Server {
    /// What this volume asks of the cache; what it leaves open the agent's configuration decides.
    pub(crate) fn read_options(mount: &Mount) -> ReadOptions {
        let parameters = &mount.spec.parameters;
        ReadOptions {
            readahead_bytes: parameters.readahead,
            part_bytes: parameters.part,
            parallel_parts: parameters.parallel_parts.map(usize::from),
        }
    }

    /// The same for one read: others may have opened the file since.
    fn reader_options(&self, mount: &Mount) -> ReadOptions {
        let asked = Self::read_options(mount);
        ReadOptions {
            readahead_bytes: asked.readahead_bytes.or(Some(self.reading.readahead_bytes)),
            part_bytes: asked.part_bytes.or(Some(self.reading.part_bytes)),
            parallel_parts: asked.parallel_parts.or(Some(self.reading.parallel_parts)),
        }
    }

    /// A cache file that this worker was given: of its volume's scope, whatever number it names.
    fn file_of(&self, mount: &Mount, id: u64) -> Option<Arc<File>> {
        self.engine.by_id_of(&mount.scope.id, id)
    }

    /// A question about names may have no end, and its listing goes on as long as a caller waits.
    async fn answer_who_waits(
        &self,
        mount: &Arc<Mount>,
        questions: &Questions,
        unique: u64,
        ask: Ask,
    ) -> Answered {
        match ask {
            Ask::Lookup { .. } | Ask::List { .. } | Ask::Attributes { .. } => tokio::select! {
                biased;
                answered = self.answer(mount, questions, ask) => answered,
                () = mount.let_go(unique) => Err(Cause::Unavailable), // the caller has gone
            },
            // On its own: what any task may need is allocated for every task, of which a hostile worker has thousands wait.
            Ask::Writable(operation) => Box::pin(self.operate(mount, unique, operation)).await,
            Ask::File { .. } | Ask::Read { .. } | Ask::Direct { .. } => {
                let answered = self.answer(mount, questions, ask).await;
                if let (Err(Cause::Stale), Some(area)) = (&answered, &mount.area) {
                    area.note_stale(); // the worker asks once more where the bytes are
                }
                answered
            }
            _ => self.answer(mount, questions, ask).await,
        }
    }

    /// Returns when an operation takes too long because the staging disk does not answer.
    fn is_silent(&self, mount: &Arc<Mount>, unique: u64, ask: &Ask) -> impl Future<Output = Wrong> + use<> {
        let mount = matches!(ask, Ask::Writable(_)).then(|| mount.clone());
        async move {
            match mount.as_ref().and_then(|mount| Some((mount, mount.area.as_ref()?))) {
                Some((mount, area)) => area.is_silent_to(&mount.executed, unique).await,
                None => std::future::pending().await,
            }
        }
    }

    async fn operate(&self, mount: &Arc<Mount>, unique: u64, operation: Operation) -> Answered {
        let area = mount.area.as_ref().ok_or(Cause::Internal)?; // a worker asks what it has no reason to ask
        let waits = |unique| mount.is_in_flight(unique);
        let done = area.execute(&mount.caller(unique, &waits), &mount.executed, operation).await;
        // What another mount has changed after this was asked is not promised: it is let in before.
        let until_ms = area.believed_until_ms();
        Ok(match done {
            Ok((done, file)) => (Reply::Writable { done: Ok(done), until_ms }, file.into_iter().collect()),
            Err(wrong) => (Reply::Writable { done: Err(wrong), until_ms: 0 }, Vec::new()),
        })
    }

    async fn answer(&self, mount: &Arc<Mount>, questions: &Questions, ask: Ask) -> Answered {
        failpoint::pass("agent.answering");
        let scope: &Arc<Scope> = &mount.scope;
        die_where_told(scope, &ask);
        let freshness = mount.spec.parameters.freshness;
        // Others may wait longer for the same answer.
        let own = mount.spec.parameters.store_timeout;
        let tolerance = Tolerance::of(&mount.spec.parameters);
        match ask {
            // The kernel looks no other names up. One that a worker makes up is no defect of ours, to be logged each time.
            Ask::Lookup { name, .. } if !is_name(&name) => Err(Cause::NotFound),
            Ask::Lookup { parent, name } => {
                let known = |names: &View| stale::of_name(names, parent, &name);
                let question = scope.within(own, Some(parent), scope.lookup(parent, &name, freshness));
                self.named(stale::ask(scope, tolerance, known, question).await)
            }
            Ask::List { dir } => {
                let known = |names: &View| stale::of_listing(names, dir);
                let question = scope.within(own, Some(dir), scope.list(dir, freshness));
                self.named(stale::ask(scope, tolerance, known, question).await)
            }
            Ask::Attributes { ino, force } => {
                let known = |names: &View| stale::of_attributes(names, ino);
                let question = scope.within(own, None, scope.attributes(ino, freshness, force));
                // A worker that insists knows that what is known is not so any more.
                self.named(stale::ask(scope, tolerance.filter(|_| !force), known, question).await)
            }
            Ask::File { ino, version } => {
                let file = scope.file(ino, version, Self::read_options(mount))?;
                if file.key().size <= siblings::SMALL && !file.is_whole() {
                    self.siblings.missed(scope, ino, Self::read_options(mount));
                    // The read that follows would ask for it anyway: save the second question. That read
                    // reports a failure.
                    let whole = async { file.whole().await.map_err(|e| e.cause) };
                    let _ = scope.within(own, None, whole).await;
                }
                let descriptors = file.descriptors().await.map_err(|error| {
                    tracing::warn!(%error, file = file.id(), "cache file cannot be opened: dropped");
                    self.engine.damaged(file.id());
                    Cause::Internal
                })?;
                let whole = descriptors.presence.is_none();
                let mut fds = vec![descriptors.data];
                fds.extend(descriptors.presence);
                Ok((Reply::File { file: file.id(), size: file.key().size, whole }, fds))
            }
            Ask::Cached { ino, version } => {
                Ok((Reply::Cached { bytes: scope.cached_bytes(ino, version)? }, Vec::new()))
            }
            Ask::Open { ino, version } => {
                let file = scope.file(ino, version, Self::read_options(mount))?;
                self.open_gate.open(&mount.scope, mount.id, ino, &file).await;
                stored(Ok(()))
            }
            Ask::Read { file, offset, len } => {
                // Evicted between the worker's two questions: no fetch fills the file of this descriptor.
                let Some(file) = self.file_of(mount, file) else { return Ok((Reply::Gone, Vec::new())) };
                if file.is_passed_by() && !file.has_source() {
                    return Ok((Reply::Gone, Vec::new())); // asked for again, it has one
                }
                let (options, len) = (self.reader_options(mount), len.min(READ_MAX));
                let read = async { file.present(offset, len, options).await.map_err(|e| e.cause) };
                match scope.within(own, None, read).await? {
                    Found::Present { mark } => Ok((Reply::Present { mark }, Vec::new())),
                    Found::Elsewhere => {
                        let bytes = async {
                            let bytes = file.past_the_disks(offset, len).await;
                            bytes.map_err(|e| e.cause)
                        };
                        lend_uncached(questions, own, len, scope.within(own, None, bytes)).await
                    }
                }
            }
            Ask::Direct { ino, version, offset, len } => {
                let len = len.min(READ_MAX);
                let direct = scope.direct(ino, version, offset, len);
                lend_uncached(questions, own, len, scope.within(own, None, direct)).await
            }
            Ask::Damaged { file } => {
                if let Some(file) = self.file_of(mount, file) {
                    self.engine.damaged(file.id());
                }
                stored(Ok(()))
            }
            Ask::BackingOpen { file } => {
                // Not on a disk that fails: the kernel would hand its errors to the reader.
                let sound = |root| !scope.disk_fails(root) && self.engine.trusts(root);
                let usable = |f: &Arc<File>| f.is_whole() && sound(f.root());
                let file = self.file_of(mount, file).filter(usable).ok_or(Cause::Stale)?;
                let descriptors = file.descriptors().await.map_err(|_| Cause::Internal)?;
                if descriptors.presence.is_some() {
                    return Err(Cause::Stale); // its disk has begun to hang
                }
                self.backing_open(mount, descriptors.data).await
            }
            Ask::BackingClose { id } => {
                match self
                    .privileged
                    .ask(BrokerRequest::BackingClose { mount: mount.id, id }, Vec::new())
                    .await
                {
                    Ok(_) => {
                        mount.backing_closed(id);
                        stored(Ok(()))
                    }
                    other => Err(refused("backing close", other)),
                }
            }
            Ask::Dying { tids } => {
                let tids = self.dying.among(questions, &*self.privileged, tids).await;
                Ok((Reply::Dying { tids }, Vec::new()))
            }
            // Executed once, by `operate`.
            Ask::Writable(_) => Err(Cause::Internal),
            Ask::Space => {
                let known = scope.known();
                Ok((Reply::Space { total_bytes: known.bytes, total_inodes: known.names }, Vec::new()))
            }
        }
    }
}

impl Server {
    fn named(&self, answer: Result<Told, Cause>) -> Answered {
        if answer == Ok(Told::Stale) {
            self.metrics.stale_answer();
        }
        stored(answer.map(|_| ()))
    }

    /// The broker looks at the file, one after the other: a disk that has just begun to hang may keep it. Then this
    /// open is an ordinary one, and so are the next, until it answers.
    async fn backing_open(&self, mount: &Arc<Mount>, data: OwnedFd) -> Answered {
        if self.backing_waits.load(Ordering::Acquire) > 0 {
            return Err(Cause::Stale);
        }
        let (privileged, mount, waits) = (self.privileged.clone(), mount.clone(), self.backing_waits.clone());
        let (sender, receiver) = tokio::sync::oneshot::channel();
        self.runtime.spawn(async move {
            let asked = privileged.ask(BrokerRequest::BackingOpen { mount: mount.id }, vec![data]);
            tokio::pin!(asked);
            if let Ok(answer) = tokio::time::timeout(BACKING_LIMIT, &mut asked).await {
                if let Ok(BrokerAnswer::Backing { id }) = answer {
                    mount.backing_opened(id);
                }
                let _ = sender.send(answer); // its asker is gone only with the runtime
                return;
            }
            waits.fetch_add(1, Ordering::AcqRel);
            drop(sender);
            tracing::warn!("the broker keeps a file: others are opened through their workers meanwhile");
            let answer = asked.await;
            waits.fetch_sub(1, Ordering::AcqRel);
            if let Ok(BrokerAnswer::Backing { id }) = answer {
                let close = BrokerRequest::BackingClose { mount: mount.id, id };
                let _ = privileged.ask(close, Vec::new()).await; // the broker closes what it has with the mount
            }
        });
        match receiver.await {
            Ok(Ok(BrokerAnswer::Backing { id })) => Ok((Reply::Backing { id }, Vec::new())),
            Ok(other) => Err(refused("backing open", other)),
            Err(_) => Err(Cause::Stale),
        }
    }
}

/// Debug: the agent does not survive questions for the content of a file of a certain name.
fn die_where_told(scope: &Scope, ask: &Ask) {
    if !failpoint::is_set() {
        return;
    }
    let (Ask::File { ino, .. } | Ask::Open { ino, .. } | Ask::Direct { ino, .. }) = ask else { return };
    if let Ok(Some(path)) = scope.names.path(*ino) {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        failpoint::hit(&format!("agent.executes.{}", String::from_utf8_lossy(name)));
    }
}

fn stored(done: Result<(), Cause>) -> Answered {
    done.map(|()| (Reply::Stored, Vec::new()))
}

fn refused(what: &str, answer: Result<BrokerAnswer, link::Refusal>) -> Cause {
    match &answer {
        // That it is away was said once, when it went.
        Err(link::Refusal { kind: link::RefusalKind::Unavailable, .. }) => {
            tracing::debug!(?answer, "{what}: no broker");
        }
        _ => tracing::warn!(?answer, "{what} was refused by the broker"),
    }
    Cause::Internal
}

/// Lends the worker at most `most` bytes, which are brought once there is room for them: it may ask for more than it
/// gives back, and none of that may be in memory. Waits for room as long as for the store.
async fn lend_uncached(
    questions: &Questions,
    own: Duration,
    most: u32,
    bytes: impl Future<Output = Result<Bytes, Cause>>,
) -> Answered {
    let failed = |error| {
        tracing::error!(%error, "no memory file for an uncached read");
        Cause::Internal
    };
    let room = tokio::time::timeout(own, questions.room(most)).await.map_err(|_| {
        tracing::warn!("a worker gave back nothing of what it was lent for {own:?}");
        Cause::Unavailable
    })?;
    let room = room.map_err(failed)?;
    let bytes = bytes.await?;
    let len = bytes.len() as u32;
    let (number, fd) = questions.lend(room, bytes).await.map_err(failed)?;
    Ok((Reply::Uncached { len, number }, vec![fd]))
}

/// Sends without blocking the runtime: a worker that does not read gets its answers from a thread that may wait, one
/// for all of them.
async fn reply(mount: &Mount, questions: &Questions, worker: &Arc<Packet>, id: u64, answered: Answered) {
    let (body, fds) = match answered {
        Ok((reply, fds)) => (Ok(reply), fds),
        Err(cause) => (Err(cause), Vec::new()),
    };
    let message = ToWorker::Answer { id, body };
    match try_send(worker, &message, &fds) {
        Ok(()) | Err(PacketError::Closed) => {}
        Err(PacketError::TimedOut) => {
            let _turn = questions.turn().await;
            let socket = worker.clone();
            let send = move || {
                let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                link::worker::send(&socket, &message, &borrowed)
            };
            // It waits for as long as the socket's limit says. A worker that takes nothing for so long is hung, or not
            // ours any more: its successor asks again.
            if let Ok(Err(PacketError::TimedOut)) = tokio::task::spawn_blocking(send).await {
                tracing::warn!(volume = %mount.spec.id, "a worker takes no answers: it is ended");
                worker.shutdown();
            }
        }
        Err(error) => tracing::warn!(%error, "answer to a worker was lost"),
    }
}

fn try_send(worker: &Packet, message: &ToWorker, fds: &[OwnedFd]) -> Result<(), PacketError> {
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    link::worker::try_send(worker, message, &borrowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scripted;
    use cache::meta::{Lookup, ROOT};

    #[tokio::test]
    async fn what_a_worker_asks_past_its_room_is_not_even_fetched() {
        const OWN: Duration = Duration::from_secs(3600);
        let source = Scripted::new(0);
        source.resize(u64::from(READ_MAX));
        let scope = source.scope();
        scope.head(ROOT, b"f").await.unwrap();
        let Ok(Lookup::Found { attributes, .. }) = scope.names.lookup(ROOT, b"f") else { panic!("no file") };
        let questions = Arc::new(Questions::default());
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        for _ in 0..8 {
            let (scope, questions, sender) = (scope.clone(), questions.clone(), sender.clone());
            let (ino, version) = (attributes.ino, attributes.version);
            tokio::spawn(async move {
                let direct = scope.direct(ino, version, 0, READ_MAX);
                let answered = lend_uncached(&questions, OWN, READ_MAX, direct).await;
                sender.send(answered.map(|(reply, _)| reply)).unwrap();
            });
        }
        for answered in 1..=8 {
            let reply = receiver.recv().await.unwrap().unwrap();
            let Reply::Uncached { len, number } = reply else { panic!("{reply:?}") };
            assert_eq!(len, READ_MAX);
            assert_eq!(source.sent(), answered * u64::from(READ_MAX), "nothing was given back");
            questions.give_back(number);
        }
    }
}
