//! Questions to the agent. The asking thread goes on at once; what is to happen with the answer waits in the parked
//! table.

use crate::pool::Pool;
use crate::transport::{Current, current, set_current};
use link::worker::{Ask, FromWorker, Reply, ToWorker};
use link::writable::Operation;
use link::{Cause, MAX_MESSAGE, Packet, PacketError};
use startup::log::say;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};

/// An answer and the descriptors that came with it.
pub type Answer = Result<(Reply, Vec<OwnedFd>), Cause>;
pub type Then = Box<dyn FnOnce(Answer) + Send>;

/// The agent, as the file system sees it.
pub trait Link: Send + Sync {
    /// Never blocks. `then` runs once, on another thread.
    fn ask(&self, question: Ask, then: Then);
    /// Never blocks.
    fn tell(&self, message: FromWorker);
}

/// The thread that reads the link waits for a message at most so long.
const TURN: Duration = Duration::from_millis(500);

struct Parked {
    /// The request on whose behalf was asked.
    current: Current,
    /// The answer's consequence touches no file: it may run on the thread that reads the link.
    quick: bool,
    then: Then,
}

pub struct Client {
    socket: Arc<Packet>,
    parked: Mutex<HashMap<u64, Parked>>,
    next: AtomicU64,
    /// Messages that found the socket full, in order; a thread of its own waits for room.
    overflow: mpsc::Sender<FromWorker>,
    overflowing: Arc<AtomicU64>,
    pool: Arc<Pool>,
    alive: AtomicBool,
    last_turn: Mutex<Instant>,
}

impl Client {
    pub fn new(socket: Arc<Packet>, pool: Arc<Pool>) -> std::io::Result<Arc<Self>> {
        let (overflow, queue) = mpsc::channel::<FromWorker>();
        let overflowing = Arc::new(AtomicU64::new(0));
        let (out, left) = (socket.clone(), overflowing.clone());
        std::thread::Builder::new().name("link-out".into()).spawn(move || {
            for message in queue {
                let _ = link::worker::send(&out, &message, &[]); // closed: the reading side ends the process
                left.fetch_sub(1, Relaxed);
            }
        })?;
        Ok(Arc::new(Self {
            socket,
            parked: Mutex::default(),
            next: AtomicU64::new(1),
            overflow,
            overflowing,
            pool,
            alive: AtomicBool::new(true),
            last_turn: Mutex::new(Instant::now()),
        }))
    }

    /// Reads the link until it closes. `forget` hears of cache files that were dropped.
    pub fn run(&self, forget: impl Fn(u64)) -> PacketError {
        let mut buffer = vec![0; MAX_MESSAGE];
        // A turn now and then shows that this thread lives.
        if let Err(error) = self.socket.set_recv_timeout(Some(TURN)) {
            return error.into();
        }
        loop {
            *self.last_turn.lock().unwrap_or_else(|e| e.into_inner()) = Instant::now();
            match link::worker::recv::<ToWorker>(&self.socket, &mut buffer) {
                Ok((ToWorker::Answer { id, body }, fds)) => self.answer(id, body.map(|reply| (reply, fds))),
                Ok((ToWorker::Forget { file }, _)) => forget(file),
                Ok((ToWorker::Assign(_) | ToWorker::Roots | ToWorker::Go, _)) => {
                    return PacketError::Malformed("a second assignment".into());
                }
                Err(PacketError::TimedOut) => {}
                Err(error) => {
                    self.alive.store(false, Relaxed);
                    return error;
                }
            }
        }
    }

    /// The thread that reads the link has taken a turn within `limit`, or within two of its pauses.
    pub fn is_live(&self, limit: Duration) -> bool {
        let last = *self.last_turn.lock().unwrap_or_else(|e| e.into_inner());
        self.alive.load(Relaxed) && last.elapsed() < limit.max(2 * TURN)
    }

    fn answer(&self, id: u64, answer: Answer) {
        let Some(Parked { current, quick, then }) = self.table().remove(&id) else { return };
        let job = move || {
            set_current(current);
            then(answer);
            set_current(Current::default());
        };
        if quick {
            self.pool.run_here(current.unique, job);
        } else {
            self.pool.submit(current.unique, Box::new(job));
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<u64, Parked>> {
        self.parked.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Link for Client {
    fn ask(&self, question: Ask, then: Then) {
        let id = self.next.fetch_add(1, Relaxed);
        let quick = !matches!(
            question,
            Ask::Read { .. }
                | Ask::File { .. }
                | Ask::Damaged { .. }
                | Ask::Writable(Operation::Locate { .. }) // whose bytes are read then, from the disk of the staging area
        );
        // Parked before it is sent: the answer may overtake us.
        let current = current();
        let unique = current.unique;
        self.table().insert(id, Parked { current, quick, then });
        self.tell(FromWorker::Ask { id, unique, body: question });
    }

    fn tell(&self, message: FromWorker) {
        if self.overflowing.load(Relaxed) == 0 {
            match link::worker::try_send(&self.socket, &message, &[]) {
                Err(PacketError::TimedOut) => {}
                Err(
                    PacketError::TooLarge(..) | PacketError::Malformed(_) | PacketError::NotUnderstood { .. },
                ) => {
                    say("fuse-worker: a message to the agent does not fit");
                    return;
                }
                // Closed: the thread that reads the link ends the process.
                Ok(()) | Err(PacketError::Closed | PacketError::Io(_)) => return,
            }
        }
        self.overflowing.fetch_add(1, Relaxed);
        let _ = self.overflow.send(message);
    }
}
