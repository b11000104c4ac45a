//! One worker's life: from the link to a served connection.
//!
//! ```text
//!  Ready ─► Assign ─► map, mode, session, self-tests, lock down ─► Answered ─► Go ─► threads ─► Serving ─► run
//! ```
//!
//! Until Go everything happens on one thread, in order; the worker reports any failure to the agent, and ends.

use crate::adapter::Adapter;
use crate::client::{Client, Link};
use crate::fs::{Fs, Settings};
use crate::init::{self, Offer};
use crate::lockdown;
use crate::pool::Pool;
use crate::reply::Reply;
use crate::transport::{Session, Transport, Write};
use cache::meta::View;
use fuser::SessionACL;
use inflight::Inflight;
use link::budget;
use link::worker::{Assign, FromWorker, ToWorker};
use link::{MAX_MESSAGE, Packet};
use startup::log::say;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Threads that finish requests whose answer has come.
const FINISHERS: usize = 3;
const READERS_MAX: u32 = 16;
const BEAT: Duration = budget::WORKER_BEAT.time;
const BEATS_PER_TOUCHED: u64 = 5;
const BEATS_PER_COUNTED: u64 = 10;

/// What came with `Assign`.
struct Assigned {
    assign: Assign,
    device: OwnedFd,
    inflight: Inflight,
    roots: Vec<OwnedFd>,
}

/// Serves one connection until it ends. Err: a message for a person; the agent has it already.
pub fn run(socket: OwnedFd) -> Result<(), String> {
    let socket = Arc::new(Packet::from_fd(socket));
    serve(&socket).inspect_err(|why| tell(&socket, &FromWorker::Failed { why: why.clone() }))
}

fn serve(socket: &Arc<Packet>) -> Result<(), String> {
    lockdown::begin()?;
    tell(socket, &FromWorker::Ready { protocol: version::WORKER });
    let Some(Assigned { assign, device, inflight, roots }) = receive(socket)? else { return Ok(()) };
    failpoint::hit("worker.assigned");
    let inflight = Arc::new(inflight);
    let init = inflight.init().ok_or("the shared memory holds no INIT request")?;
    // A successor lives with what the first worker has agreed with the kernel.
    let frozen = inflight.init_reply().filter(|_| assign.takeover);
    let offer = match &frozen {
        Some(reply) => Offer::frozen(reply, assign.mode)?,
        None => Offer::choose(&init, assign.mode, &assign.disabled_features),
    };
    let view = View::open(&assign.metadata).map_err(|e| format!("cannot read the metadata store: {e}"))?;

    let Session { null, transport } = Transport::arm(inflight.clone(), device, &assign.disabled_features)
        .map_err(|e| format!("cannot prepare the session: {e}"))?;
    // The pool's threads would not inherit what the lock-down of this thread gives up: they start after Go.
    let late = Arc::new(Late::default());
    let time = view.clone();
    let clock = Arc::new(move || time.now_ms());
    let fs = Fs::new(
        settings(&assign, offer),
        view,
        late.clone(),
        inflight.clone(),
        roots.iter().map(OwnedFd::try_clone).collect::<Result<_, _>>().map_err(|e| e.to_string())?,
        clock,
    );
    let (writing, answering) = (fs.clone(), transport.clone());
    transport.set_writes(Box::new(move |write: Write| {
        writing.write(write.nodeid, Reply::new(answering.clone(), write.unique));
    }));
    let adapter = Adapter { fs: fs.clone(), transport: transport.clone(), offer };
    let mut config = fuser::Config::default();
    config.acl = SessionACL::All;
    let readers = assign.threads.clamp(1, READERS_MAX) as usize;
    config.n_threads = Some(readers);
    let session = fuser::Session::from_fd(adapter, null, SessionACL::All, config)
        .map_err(|e| format!("fuser refuses the connection: {e}"))?;
    transport.self_test(assign.takeover)?;
    let init_reply = settle_reply(&inflight, &transport, frozen, assign.takeover)?;

    for missing in lockdown::finish(&roots, assign.disabled_features.landlock)? {
        say(&format!("fuse-worker: {missing}"));
    }
    drop(roots);
    failpoint::hit("worker.prepared");
    tell(socket, &FromWorker::Answered { init_reply, mode: offer.mode });
    let mut buffer = vec![0; MAX_MESSAGE];
    match link::worker::recv::<ToWorker>(socket, &mut buffer) {
        Ok((ToWorker::Go, _)) => {}
        Ok((other, _)) => return Err(format!("expected Go, got {other:?}")),
        Err(link::PacketError::Closed) => return Ok(()),
        Err(error) => return Err(format!("the link failed: {error}")),
    }
    drop(buffer);
    failpoint::hit("worker.go");
    fs.counters().begin(&inflight);

    let pool =
        Pool::start(FINISHERS, Some(inflight.clone())).map_err(|e| format!("cannot start threads: {e}"))?;
    let client =
        Client::new(socket.clone(), pool.clone()).map_err(|e| format!("cannot start threads: {e}"))?;
    late.set(client.clone());
    let (reader, listener) = (client.clone(), fs.clone());
    spawn("link-in", move || {
        let why = reader.run(|file| listener.forget_file(file));
        if !matches!(why, link::PacketError::Closed) {
            say(&format!("fuse-worker: the link failed: {why}"));
        }
        // The agent is gone: its successor takes the connection up. Nothing here needs to be put in order.
        // SAFETY: ends the process at once, without running anything of ours.
        unsafe { libc::_exit(0) }
    })?;
    let (asked, watched) = (client.clone(), transport.clone());
    spawn("interrupts", move || crate::transport::run_interrupts(watched, asked))?;
    tell(socket, &FromWorker::Serving);
    failpoint::hit("worker.serving");
    let limit = assign.hang_limit / 2;
    let heartbeat = Heartbeat { fs, inflight, client, pool, transport, readers, limit };
    spawn("heartbeat", move || heartbeat.run())?;
    session.run().map_err(|e| format!("the session ended: {e}"))
}

fn settings(assign: &Assign, offer: Offer) -> Settings {
    Settings {
        mode: offer.mode,
        show: assign.show,
        generation: assign.generation,
        block_bytes: assign.block_bytes,
        source: assign.source.clone(),
        no_opendir: offer.no_opendir(),
        // Two descriptors a file while its bitmap is mapped, and room for the rest.
        files_max: (lockdown::FILES_MAX / 2) as usize,
        // A READ of the largest size for each thread, and one for those that finish what had to be fetched.
        buffer_bytes: (assign.threads.clamp(1, READERS_MAX) as usize + 1) << 20,
        successor: assign.takeover,
        injected_faults: assign.injected_faults.clone(),
    }
}

/// None: the link closed; the agent does not need this worker.
fn receive(socket: &Packet) -> Result<Option<Assigned>, String> {
    let mut buffer = vec![0; MAX_MESSAGE];
    let mut recv = || match link::worker::recv::<ToWorker>(socket, &mut buffer) {
        Ok(message) => Ok(Some(message)),
        Err(link::PacketError::Closed) => Ok(None),
        Err(error) => Err(format!("the link failed: {error}")),
    };
    let Some((first, fds)) = recv()? else { return Ok(None) };
    let ToWorker::Assign(assign) = first else { return Err(format!("expected Assign, got {first:?}")) };
    let mut fds = fds.into_iter();
    let (Some(device), Some(memory)) = (fds.next(), fds.next()) else {
        return Err("Assign came without device and shared memory".into());
    };
    let (inflight, alone) = Inflight::hold(memory).map_err(|e| e.to_string())?;
    if !alone {
        say("fuse-worker: a predecessor has not gone yet: it is stuck in the kernel, and passed by");
    }
    let mut roots: Vec<OwnedFd> = fds.collect();
    while (roots.len() as u32) < assign.roots {
        match recv()? {
            Some((ToWorker::Roots, more)) if !more.is_empty() => roots.extend(more),
            Some((other, _)) => return Err(format!("expected Roots, got {other:?}")),
            None => return Ok(None),
        }
    }
    Ok(Some(Assigned { assign: *assign, device, inflight, roots }))
}

/// The first worker's INIT reply is recorded; the kernel has that one, whatever a successor would say.
fn settle_reply(
    inflight: &Inflight,
    transport: &Transport,
    frozen: Option<Vec<u8>>,
    takeover: bool,
) -> Result<Vec<u8>, String> {
    let own = transport.init_reply().ok_or("fuser did not answer INIT")?;
    match frozen {
        Some(frozen) => init::can_serve(&own, &frozen).map(|()| frozen),
        None if takeover => Err("the shared memory holds no INIT reply".into()),
        // What a first worker recorded that has died was not given to the kernel.
        None => inflight.set_init_reply(&own).map(|()| own).map_err(|e| e.to_string()),
    }
}

/// Shows that every thread lives that serves requests, and tells what they did.
struct Heartbeat {
    fs: Arc<Fs>,
    inflight: Arc<Inflight>,
    client: Arc<Client>,
    pool: Arc<Pool>,
    transport: Arc<Transport>,
    /// How many threads read requests once all do.
    readers: usize,
    /// A thread that has been at one thing for longer is stuck: none of them waits for the store.
    limit: Duration,
}

impl Heartbeat {
    /// Never returns. All other threads but the readers were there before.
    fn run(&self) {
        let mut settled = false;
        for turn in 1u64.. {
            std::thread::sleep(BEAT);
            if !settled && self.transport.readers() >= self.readers {
                settled = true;
                if let Err(missing) = lockdown::settle() {
                    say(&format!("fuse-worker: {missing}"));
                }
            }
            failpoint::pass("worker.beat");
            self.beat(turn);
        }
    }

    fn beat(&self, turn: u64) {
        let limit = self.limit;
        if self.client.is_live(limit) && self.pool.is_live(limit) && !self.transport.is_stuck(limit) {
            self.inflight.beat();
        }
        if turn.is_multiple_of(BEATS_PER_TOUCHED) {
            self.fs.report_touched();
        }
        if turn.is_multiple_of(BEATS_PER_COUNTED) {
            if let Some(counts) = self.fs.counters().take(&self.inflight) {
                self.client.tell(FromWorker::Counted(counts));
            }
            self.fs.trim();
            self.transport.trim();
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let thread = std::thread::Builder::new().name(name.into()).stack_size(256 << 10).spawn(run);
    thread.map(drop).map_err(|e| format!("cannot start threads: {e}"))
}

fn tell(socket: &Packet, message: &FromWorker) {
    let _ = link::worker::send(socket, message, &[]); // closed: the next receive says so
}

/// The client, once there is one. No request is served before.
#[derive(Default)]
struct Late(std::sync::OnceLock<Arc<Client>>);

impl Late {
    fn set(&self, client: Arc<Client>) {
        let _ = self.0.set(client);
    }
}

impl Link for Late {
    fn ask(&self, question: link::worker::Ask, then: crate::client::Then) {
        match self.0.get() {
            Some(client) => client.ask(question, then),
            None => then(Err(link::Cause::Internal)),
        }
    }
    fn tell(&self, message: FromWorker) {
        if let Some(client) = self.0.get() {
            client.tell(message);
        }
    }
}
