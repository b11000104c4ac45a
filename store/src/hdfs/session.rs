//! One helper, from its first word to its end. Nothing that it says is trusted: it may be wrong about anything, and it is
//! ended for whatever it may not say.

use super::Helper;
use bytes::Bytes;
use hdfs::{
    Answer, Configure, DATA_BYTES_MAX, Failure, Frames, FromHelper, PROTOCOL, Question, ToHelper,
    WINDOW_BYTES,
};
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// How much longer than HDFS may be silent its helper may be: it tells of silence by itself.
const GRACE: Duration = Duration::from_secs(2);
/// Messages to a helper that does not read.
const QUEUE: usize = 4096;

/// Why a helper is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    Gone,
    Hangs,
    Lies(&'static str),
}

/// Why a helper was of no use from the beginning.
#[derive(Debug)]
pub(super) enum Unusable {
    /// Another one may be.
    Lost(Lost),
    /// None will be: it says why, in the configuration.
    Configuration(String),
    /// The helper is of another build.
    Protocol(u32),
}

pub(super) struct Session {
    shared: Arc<Shared>,
    next: AtomicU64,
    /// Whoever learns first that it is lost says so for all.
    was_counted: AtomicBool,
    reading: tokio::task::JoinHandle<()>,
    writing: tokio::task::JoinHandle<()>,
}

struct Shared {
    state: Mutex<State>,
    out: mpsc::Sender<Bytes>,
}

struct State {
    /// None: it is over, and why.
    asked: Result<HashMap<u64, Waiting>, Lost>,
    /// Ended when this is dropped.
    process: Option<Box<dyn Any + Send + Sync>>,
}

struct Waiting {
    to: mpsc::UnboundedSender<Said>,
    /// So many bytes it may send: bounds what waits in `to`.
    granted: u64,
}

enum Said {
    Data(Bytes),
    Answer(Result<Answer, Failure>),
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("is_over", &self.is_over()).finish()
    }
}

impl Session {
    /// Tells a helper what to ask, and as whom, if it is of this build.
    pub(super) async fn begin(
        helper: Helper,
        configure: Configure,
        missing: impl FnOnce(&[String]),
    ) -> Result<Self, Unusable> {
        let Helper { socket, process } = helper;
        let gone = |_: std::io::Error| Unusable::Lost(Lost::Gone);
        socket.set_nonblocking(true).map_err(gone)?;
        let mut socket = UnixStream::from_std(socket).map_err(gone)?;
        let mut frames = Frames::<FromHelper>::default();
        match heard(&mut socket, &mut frames).await? {
            FromHelper::Hello { protocol: PROTOCOL } => {}
            FromHelper::Hello { protocol } => return Err(Unusable::Protocol(protocol)),
            _ => return Err(Unusable::Lost(Lost::Lies("something before its protocol"))),
        }
        let configuration = hdfs::encode(&ToHelper::Configure(Box::new(configure)))
            .map_err(|_| Unusable::Configuration("the secret is larger than a helper takes".to_owned()))?;
        socket.write_all(&configuration).await.map_err(gone)?;
        drop(configuration);
        match heard(&mut socket, &mut frames).await? {
            FromHelper::Ready { missing: said } => missing(&said),
            FromHelper::Unusable { why } => return Err(Unusable::Configuration(hdfs::words(&why))),
            _ => return Err(Unusable::Lost(Lost::Lies("an answer to nothing"))),
        }
        let (out, queue) = mpsc::channel(QUEUE);
        let state = State { asked: Ok(HashMap::new()), process: Some(process) };
        let shared = Arc::new(Shared { state: Mutex::new(state), out });
        let (from, to) = socket.into_split();
        let writing = tokio::spawn(write(to, queue));
        let reading = tokio::spawn(read(from, frames, shared.clone()));
        Ok(Self { shared, next: AtomicU64::new(1), was_counted: AtomicBool::new(false), reading, writing })
    }

    /// Nothing more comes of it. Whoever waits for it learns that it is gone, if nothing else.
    pub(super) fn end(&self) {
        self.shared.end(Lost::Gone);
    }

    /// True once.
    pub(super) fn is_first_loss(&self) -> bool {
        !self.was_counted.swap(true, Ordering::Relaxed)
    }

    pub(super) fn is_over(&self) -> bool {
        self.shared.lock().asked.is_err()
    }

    pub(super) fn ask(self: &Arc<Self>, question: Question, patience: Duration) -> Result<Asked, Lost> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (to, said) = mpsc::unbounded_channel();
        let granted = if let Question::Read { window, .. } = &question { u64::from(*window) } else { 0 };
        match &mut self.shared.lock().asked {
            Ok(asked) => drop(asked.insert(id, Waiting { to, granted })),
            Err(lost) => return Err(*lost),
        }
        let asked = Asked { session: self.clone(), id, said, taken: 0, answered: false };
        let patience_ms = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
        self.shared.say(&ToHelper::Ask { id, patience_ms, question })?;
        Ok(asked)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
        self.reading.abort();
        self.writing.abort();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, why: Lost) {
        let mut state = self.lock();
        if state.asked.is_ok() {
            // Its senders go with it: that is how those who wait are told.
            state.asked = Err(why);
        }
        let process = state.process.take();
        drop(state);
        drop(process); // kills it: not under the lock
    }

    fn why(&self) -> Lost {
        self.lock().asked.as_ref().err().copied().unwrap_or(Lost::Gone)
    }

    /// What does not fit waits for a helper that does not read.
    fn say(&self, message: &ToHelper) -> Result<(), Lost> {
        // A path is shorter than any message may be.
        let frame = hdfs::encode(message).map_err(|_| Lost::Gone)?;
        self.out.try_send(frame).map_err(|e| {
            let why = if matches!(e, mpsc::error::TrySendError::Full(_)) { Lost::Hangs } else { Lost::Gone };
            self.end(why);
            why
        })
    }

    fn take(&self, message: FromHelper, body: Bytes) -> Result<(), Lost> {
        let mut state = self.lock();
        let Ok(asked) = &mut state.asked else { return Err(Lost::Gone) };
        match message {
            FromHelper::Data { id } => {
                // Not there: it was given up meanwhile.
                let Some(waiting) = asked.get_mut(&id) else { return Ok(()) };
                let left = waiting.granted.checked_sub(body.len() as u64).filter(|_| !body.is_empty());
                waiting.granted = left.ok_or(Lost::Lies("more than it was granted"))?;
                let _ = waiting.to.send(Said::Data(body)); // nobody waits any more: its place is about to go
            }
            FromHelper::Answer { id, answer } if body.is_empty() => {
                if let Some(waiting) = asked.remove(&id) {
                    let _ = waiting.to.send(Said::Answer(answer)); // as above
                }
            }
            _ => return Err(Lost::Lies("what it may not say")),
        }
        Ok(())
    }
}

async fn heard(socket: &mut UnixStream, frames: &mut Frames<FromHelper>) -> Result<FromHelper, Unusable> {
    loop {
        match frames.take() {
            Ok(Some(frame)) => return Ok(frame.message),
            Ok(None) => {}
            Err(_) => return Err(Unusable::Lost(Lost::Lies("what cannot be read"))),
        }
        match socket.read_buf(frames.space()).await {
            Ok(1..) => {}
            _ => return Err(Unusable::Lost(Lost::Gone)),
        }
    }
}

async fn write(mut to: tokio::net::unix::OwnedWriteHalf, mut queue: mpsc::Receiver<Bytes>) {
    while let Some(frame) = queue.recv().await {
        if to.write_all(&frame).await.is_err() {
            return; // the reading end is told, too
        }
    }
}

async fn read(
    mut from: tokio::net::unix::OwnedReadHalf,
    mut frames: Frames<FromHelper>,
    shared: Arc<Shared>,
) {
    let why = loop {
        match frames.take() {
            Ok(Some(frame)) => match shared.take(frame.message, frame.body) {
                Ok(()) => continue,
                Err(why) => break why,
            },
            Ok(None) => {}
            Err(_) => break Lost::Lies("what cannot be read"),
        }
        match from.read_buf(frames.space()).await {
            Ok(1..) => {}
            _ => break Lost::Gone,
        }
    };
    shared.end(why);
}

/// A question that was asked. Dropped, it is taken back.
pub(super) struct Asked {
    session: Arc<Session>,
    id: u64,
    said: mpsc::UnboundedReceiver<Said>,
    /// Bytes that were taken and not granted anew.
    taken: u32,
    answered: bool,
}

/// What a read brings.
#[derive(Debug)]
pub(super) enum Brought {
    Data(Bytes),
    End(Result<Answer, Failure>),
}

impl Asked {
    pub(super) async fn answer(&mut self, patience: Duration) -> Result<Result<Answer, Failure>, Lost> {
        match self.next(patience).await? {
            Brought::End(answer) => Ok(answer),
            Brought::Data(_) => Err(Lost::Lies("data that nobody asked for")),
        }
    }

    pub(super) async fn next(&mut self, patience: Duration) -> Result<Brought, Lost> {
        match timeout(patience + GRACE, self.said.recv()).await {
            Err(_) => Err(Lost::Hangs),
            Ok(None) => Err(self.session.shared.why()),
            Ok(Some(Said::Data(bytes))) => Ok(Brought::Data(bytes)),
            Ok(Some(Said::Answer(answer))) => {
                self.answered = true;
                Ok(Brought::End(answer))
            }
        }
    }

    /// The reader has taken so much of what was brought: as much more may come.
    pub(super) fn took(&mut self, bytes: usize) -> Result<(), Lost> {
        self.taken += u32::try_from(bytes.min(DATA_BYTES_MAX)).expect("less than a frame");
        if self.taken < WINDOW_BYTES / 4 {
            return Ok(());
        }
        let bytes = std::mem::take(&mut self.taken);
        match &mut self.session.shared.lock().asked {
            Err(lost) => return Err(*lost),
            Ok(asked) => match asked.get_mut(&self.id) {
                Some(waiting) => waiting.granted += u64::from(bytes),
                None => return Ok(()), // all has come
            },
        }
        self.session.shared.say(&ToHelper::More { id: self.id, bytes })
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Ok(asked) = &mut self.session.shared.lock().asked {
            asked.remove(&self.id);
        }
        if !self.answered && !self.session.is_over() {
            let _ = self.session.shared.say(&ToHelper::Cancel { id: self.id }); // then it hangs, and is ended
        }
    }
}
