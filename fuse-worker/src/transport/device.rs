//! Requests from the device into shared memory, and answers back.

use super::splice::{Pipes, READ_PAGES_MAX};
use super::writes::{HEAD_BYTES, Write, WriteHandler};
use super::{Interrupts, SESSION, TRANSPORT};
use crate::reply::{Delivery, Sink};
use fuse_abi::{InHeader, InitOut, InterruptIn, OutHeader, ReadIn, opcode};
use inflight::{Claim, Counter, Inflight, Orphan, Room, Slot};
use link::worker::DisabledFeatures;
use rustix::fs::FileType;
use startup::log::say;
use std::cell::Cell;
use std::io::{self, IoSlice};
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Reader threads that are watched; there are never so many.
const SEATS: usize = 64;
/// Between two looks whether a suspect has been answered.
const SUSPECT_PAUSE: Duration = Duration::from_millis(2);

/// What the worker tells the kernel, whatever fuser chose: a READ of as many pages as go through a pipe with its header.
/// The kernel knows no other limit for the pages of a WRITE (`max_pages` in fuse_fill_write_pages and fuse_direct_io),
/// so one has as many bytes as these: 4 KiB less than there is room for.
///
/// A read-only connection needs no room for writes, and the room that the kernel demands of a read buffer grows with it
/// (fuse_dev_do_read). 4096 is the kernel's own minimum.
const fn max_write(room: Room) -> u32 {
    match room {
        Room::ReadOnly => 4096,
        Room::ReadWrite => READ_PAGES_MAX as u32 * 4096,
    }
}
const MAX_WRITE_AT: usize = OutHeader::BYTES + offset_of!(InitOut, max_write);
const MAX_PAGES_AT: usize = OutHeader::BYTES + offset_of!(InitOut, max_pages);

/// The request that this thread works on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Current {
    pub unique: u64,
    /// READDIR and READDIRPLUS: bytes that the kernel asked for, which fuser does not tell.
    pub listing_bytes: u32,
}

thread_local! {
    static CURRENT: Cell<Current> = const { Cell::new(Current { unique: 0, listing_bytes: 0 }) };
    static TAKEN: Cell<Option<(Slot, u64)>> = const { Cell::new(None) };
    static STAGE: Cell<Option<usize>> = const { Cell::new(None) };
    static SEAT: Cell<Option<usize>> = const { Cell::new(None) };
}

pub fn current() -> Current {
    CURRENT.get()
}
pub(crate) fn set_current(current: Current) {
    CURRENT.set(current);
}

pub struct Transport {
    inflight: Arc<Inflight>,
    device: OwnedFd,
    interrupts: Arc<Interrupts>,
    pipes: Pipes,
    init_given: AtomicBool,
    init_reply: Mutex<Option<Vec<u8>>>,
    /// For each staging buffer: its pages are there.
    populated: Box<[AtomicBool]>,
    populate_with_madvise: bool,
    started: Instant,
    /// For each reader thread: since when (ms after `started`, plus one) it executes a request; 0: it reads.
    executing: [AtomicU64; SEATS],
    seats: AtomicUsize,
    /// A thread waits for the suspect that is being executed, to take the next one.
    waits_for_suspect: AtomicBool,
    writes: OnceLock<WriteHandler>,
}

/// What fuser gets for a device.
pub struct Session {
    pub null: OwnedFd,
    pub transport: Arc<Transport>,
}

impl Transport {
    /// Once per process. From here on, reads and writevs of `Session::null` are ours.
    pub fn arm(inflight: Arc<Inflight>, device: OwnedFd, without: &DisabledFeatures) -> io::Result<Session> {
        let null = OwnedFd::from(std::fs::File::options().read(true).write(true).open("/dev/null")?);
        let transport = Arc::new(Self::new(inflight, device, without));
        TRANSPORT
            .set(transport.clone())
            .map_err(|_| io::Error::other("this process has a session already"))?;
        SESSION.store(null.as_raw_fd(), SeqCst);
        Ok(Session { null, transport })
    }

    pub(super) fn new(inflight: Arc<Inflight>, device: OwnedFd, without: &DisabledFeatures) -> Self {
        // A test's device may be a socket, which would make several messages of a pipe.
        let is_device = rustix::fs::fstat(&device)
            .is_ok_and(|about| FileType::from_raw_mode(about.st_mode) == FileType::CharacterDevice);
        let populated = (0..inflight.stages()).map(|_| AtomicBool::new(false)).collect();
        Self {
            inflight,
            device,
            interrupts: Arc::default(),
            pipes: Pipes::new(without.splice || !is_device),
            init_given: AtomicBool::new(false),
            init_reply: Mutex::new(None),
            populated,
            populate_with_madvise: !without.populate_write,
            started: Instant::now(),
            executing: [const { AtomicU64::new(0) }; SEATS],
            seats: AtomicUsize::new(0),
            waits_for_suspect: AtomicBool::new(false),
            writes: OnceLock::new(),
        }
    }

    /// From here on WRITEs are this handler's; without one they are answered EROFS. Once, before requests are read.
    pub fn set_writes(&self, handler: WriteHandler) {
        assert!(self.writes.set(handler).is_ok(), "a session sets its handler once");
    }

    pub fn inflight(&self) -> &Arc<Inflight> {
        &self.inflight
    }
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
    pub fn interrupts(&self) -> &Arc<Interrupts> {
        &self.interrupts
    }

    /// fuser's answer to INIT as it goes to the kernel; None: it did not come through us.
    pub fn init_reply(&self) -> Option<Vec<u8>> {
        self.init_given.load(SeqCst).then(|| self.captured().clone())?
    }

    /// A thread has been at one request for longer than `limit`. None of them ever waits for the store.
    pub fn is_stuck(&self, limit: Duration) -> bool {
        let (now, limit) = (self.stamp(), limit.as_millis() as u64);
        let busy = self.executing.iter().map(|since| since.load(Relaxed)).filter(|since| *since != 0);
        busy.into_iter().any(|since| now.saturating_sub(since) > limit)
    }

    /// How many threads have begun to read requests.
    pub(crate) fn readers(&self) -> usize {
        self.seats.load(Relaxed)
    }

    fn stamp(&self) -> u64 {
        self.started.elapsed().as_millis() as u64 + 1
    }

    fn captured(&self) -> std::sync::MutexGuard<'_, Option<Vec<u8>>> {
        self.init_reply.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The session's `read`: the next request into `buffer`, its length or an errno.
    pub fn read(&self, buffer: &mut [u8]) -> Result<usize, i32> {
        if !self.init_given.swap(true, SeqCst) {
            let init = self.inflight.init().ok_or(libc::EIO)?;
            buffer.get_mut(..init.len()).ok_or(libc::EIO)?.copy_from_slice(&init);
            return Ok(init.len());
        }
        loop {
            self.park_previous();
            if let Some(len) = self.read_orphan(buffer) {
                return Ok(len);
            }
            if let Some(len) = self.read_device(buffer)? {
                return Ok(len);
            }
        }
    }

    /// The next request of the kernel's. None: it was a WRITE, which has been handed over.
    fn read_device(&self, buffer: &mut [u8]) -> Result<Option<usize>, i32> {
        loop {
            let stage = self.stage();
            let into = self.inflight.stage_pointer(stage);
            let wanted = self.inflight.stage_bytes_max().min(buffer.len());
            // SAFETY: the pointer is valid for stage_bytes_max() bytes as long as the inflight, and this thread owns
            // the buffer.
            let read = unsafe { libc::syscall(libc::SYS_read, self.device.as_raw_fd(), into, wanted) };
            let errno = last_errno();
            if read < 0 {
                return Err(errno);
            }
            let len = read as usize;
            if len < InHeader::BYTES || len > wanted {
                return Err(libc::EIO);
            }
            let header = self.inflight.stage_header(stage);
            if header.len as usize != len {
                return Err(libc::EIO);
            }
            match header.opcode {
                opcode::INTERRUPT => self.interrupt(stage),
                // These have no answer, and this file system keeps nothing that they would free.
                opcode::FORGET | opcode::BATCH_FORGET | opcode::NOTIFY_REPLY => {}
                _ => {
                    failpoint::hit("worker.read");
                    let slot = self.record(stage, &header);
                    failpoint::hit("worker.recorded");
                    // What the others have in front, and all of a WRITE that is needed here.
                    let copied = if header.opcode == opcode::WRITE { len.min(HEAD_BYTES) } else { len };
                    self.inflight.stage_bytes(stage, &mut buffer[..copied]);
                    self.inflight.commit_stage(stage, header.unique);
                    self.begin(slot, &header, buffer);
                    if header.opcode == opcode::WRITE {
                        self.hand_over(&header, buffer);
                        return Ok(None);
                    }
                    return Ok(Some(len));
                }
            }
            self.inflight.commit_stage(stage, header.unique);
        }
    }

    /// What a predecessor took and did not answer.
    fn read_orphan(&self, buffer: &mut [u8]) -> Option<usize> {
        let mut waits = false;
        let found = loop {
            match self.inflight.next_orphan(buffer) {
                Some(Orphan::Request(slot, header)) => {
                    failpoint::hit("worker.orphan");
                    self.begin(slot, &header, buffer);
                    self.interrupts.wake(); // it may carry the predecessor's mark
                    if header.opcode != opcode::WRITE {
                        break Some(header.len as usize);
                    }
                    self.hand_over(&header, buffer);
                    self.park_previous();
                }
                Some(Orphan::Torn { unique }) => {
                    self.send(unique, -libc::EIO, &[]);
                }
                // One thread waits for its turn; the others serve the device meanwhile.
                Some(Orphan::Later) if waits || !self.waits_for_suspect.swap(true, SeqCst) => {
                    waits = true;
                    std::thread::sleep(SUSPECT_PAUSE);
                }
                Some(Orphan::Later) | None => break None,
            }
        };
        if waits {
            self.waits_for_suspect.store(false, SeqCst);
        }
        found
    }

    /// A WRITE, whose front is that of `request`, goes to whoever executes it.
    fn hand_over(&self, header: &InHeader, request: &[u8]) {
        let write = request.first_chunk().and_then(|head| Write::parse(header, head));
        let errno = match (write, self.writes.get()) {
            (Some(write), Some(handler)) => return handler(write),
            (Some(_), None) => libc::EROFS,
            (None, _) => libc::EIO,
        };
        self.send(header.unique, -errno, &[]);
    }

    /// The session's `writev`: fuser's answer. The errno is the kernel's.
    pub fn write(&self, parts: &[IoSlice<'_>]) -> Result<usize, i32> {
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let header = parts.first().and_then(|part| part.first_chunk()).ok_or(libc::EINVAL)?;
        let unique = OutHeader::from_bytes(header).unique;
        {
            let mut captured = self.captured();
            if captured.is_none() {
                let reply = parts.iter().flat_map(|part| part.iter().copied()).collect();
                *captured = Some(patch_init(reply, self.inflight.room()));
                return Ok(total);
            }
        }
        if unique == 0 {
            return Err(libc::EPERM); // a notification; fuser is asked for none
        }
        self.answer(unique, || self.write_parts(parts)).map(|_| total)
    }

    /// Gives one answer, if it is the first.
    fn answer(&self, unique: u64, give: impl FnOnce() -> Result<(), i32>) -> Result<Delivery, i32> {
        match self.inflight.claim(unique) {
            Some(claim) => self.deliver(claim, give),
            None => {
                self.inflight.count(Counter::Dropped);
                Ok(Delivery::Dropped)
            }
        }
    }

    /// One message to the kernel. Err: its errno.
    fn write_parts(&self, parts: &[IoSlice<'_>]) -> Result<(), i32> {
        // SAFETY: IoSlice has the layout of iovec, and the slices outlive the call.
        let written =
            unsafe { libc::syscall(libc::SYS_writev, self.device.as_raw_fd(), parts.as_ptr(), parts.len()) };
        if written < 0 { Err(last_errno()) } else { Ok(()) }
    }

    fn deliver(&self, claim: Claim, give: impl FnOnce() -> Result<(), i32>) -> Result<Delivery, i32> {
        failpoint::hit("worker.answering");
        match give() {
            Ok(()) => {
                failpoint::hit("worker.answered");
                self.inflight.answered(claim);
                Ok(Delivery::Delivered)
            }
            // The caller is gone, or the connection is.
            Err(libc::ENOENT | libc::ENODEV) => {
                self.inflight.answered(claim);
                self.inflight.count(Counter::Dropped);
                Ok(Delivery::Dropped)
            }
            Err(errno) => {
                self.inflight.refused(claim);
                Err(errno)
            }
        }
    }

    /// Frees what answers without a copy have not needed for a while.
    pub(crate) fn trim(&self) {
        self.pipes.trim();
    }

    /// Answers EINTR to a caller that is being killed.
    pub fn give_up(&self, unique: u64) {
        // Another thread is about to answer it, or to tell what was done: that is as good.
        let Some(claim) = self.inflight.claim_to_interrupt(unique) else { return };
        let header = OutHeader::new(0, -libc::EINTR, unique).to_bytes();
        if self.deliver(claim, || self.write_parts(&[IoSlice::new(&header)])) == Ok(Delivery::Delivered) {
            self.inflight.count(Counter::Interrupted);
        }
    }

    fn record(&self, stage: usize, header: &InHeader) -> Slot {
        loop {
            if let Some(slot) = self.inflight.put(stage, header) {
                return slot;
            }
            // Back pressure: the kernel queues what we do not read.
            self.inflight.count(Counter::Full);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn begin(&self, slot: Slot, header: &InHeader, request: &[u8]) {
        TAKEN.set(Some((slot, header.unique)));
        self.executing[self.seat()].store(self.stamp(), Relaxed);
        let listing_bytes = match header.opcode {
            opcode::READDIR | opcode::READDIRPLUS => {
                let body = request.get(InHeader::BYTES..).and_then(|rest| rest.first_chunk());
                body.map_or(4096, |body| ReadIn::from_bytes(body).size)
            }
            _ => 0,
        };
        CURRENT.set(Current { unique: header.unique, listing_bytes });
    }

    fn park_previous(&self) {
        if let Some((slot, unique)) = TAKEN.take() {
            self.inflight.park(slot, unique);
        }
        self.executing[self.seat()].store(0, Relaxed);
        CURRENT.set(Current::default());
    }

    /// This thread's place among the readers, of whom there are fewer than seats.
    fn seat(&self) -> usize {
        SEAT.get().unwrap_or_else(|| {
            let seat = self.seats.fetch_add(1, Relaxed) % SEATS;
            SEAT.set(Some(seat));
            seat
        })
    }

    /// This thread's staging buffer; another one while a large request occupies it.
    fn stage(&self) -> usize {
        if let Some(stage) = STAGE.get() {
            if self.inflight.stage_is_free(stage) {
                return stage;
            }
            self.inflight.release_stage(stage);
        }
        loop {
            if let Some(stage) = self.inflight.acquire_stage() {
                if !self.populated[stage].swap(true, Relaxed) {
                    self.inflight.populate_stage(stage, self.populate_with_madvise);
                }
                STAGE.set(Some(stage));
                return stage;
            }
            self.inflight.count(Counter::Full);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// FUSE_INTERRUPT: a signal has reached the caller of a request. It never gets to fuser, whose ENOSYS would end
    /// all interrupts of the connection.
    fn interrupt(&self, stage: usize) {
        let mut request = [0; InHeader::BYTES + InterruptIn::BYTES];
        self.inflight.stage_bytes(stage, &mut request);
        let unique = request.last_chunk().map_or(0, |body| InterruptIn::from_bytes(body).unique);
        self.inflight.count(Counter::Interrupts);
        if self.inflight.mark_interrupted(unique) {
            self.interrupts.wake();
            return;
        }
        // Either it has been answered, or another thread is between reading and recording it. The kernel knows: EAGAIN
        // queues the interrupt again if the request waits.
        let own = self.inflight.stage_header(stage).unique;
        if inflight::answer_errno(&self.device, own, libc::EAGAIN).is_ok() {
            self.inflight.count(Counter::Requeued);
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// INIT and its answer came through us, and the kernel tells waiting requests from answered ones.
    pub(crate) fn self_test(&self, init_answered: bool) -> Result<(), String> {
        if self.init_reply().is_none() {
            return Err("fuser's read and writev do not pass through the worker's own symbols".into());
        }
        let init = self.inflight.init().and_then(|init| Some(InHeader::from_bytes(init.first_chunk()?)));
        let unique = init.ok_or("no INIT request was recorded")?.unique;
        match inflight::probe_works(&self.device, unique, init_answered) {
            Ok(true) => Ok(()),
            Ok(false) => Err("the kernel does not say which requests wait for an answer".into()),
            Err(error) => Err(format!("cannot ask the kernel which requests wait: {error}")),
        }
    }
}

impl Sink for Transport {
    fn send_file(&self, unique: u64, file: BorrowedFd<'_>, offset: u64, len: usize) -> Option<Delivery> {
        let header = OutHeader::new(len, 0, unique).to_bytes();
        let mut pipe = self.pipes.fill(&header, file, offset, len)?;
        failpoint::hit("worker.spliced");
        let given = self.answer(unique, || pipe.empty_into(self.device.as_fd()));
        given.inspect_err(|errno| self.pipes.disable(*errno)).ok()
    }

    fn notify(&self, code: i32, body: &[u8]) {
        let mut message = OutHeader::new(body.len(), code, 0).to_bytes().to_vec();
        message.extend_from_slice(body);
        // A node id that the kernel has forgotten is ENOENT: nothing to tell, then.
        let _ = self.write_parts(&[IoSlice::new(&message)]);
    }

    fn send(&self, unique: u64, error: i32, body: &[IoSlice<'_>]) -> Delivery {
        let header = OutHeader::new(body.iter().map(|part| part.len()).sum(), error, unique);
        let (len, header) = (header.len, header.to_bytes());
        let first = body.first().map_or(&[][..], |part| part);
        let parts = [IoSlice::new(&header), IoSlice::new(first)];
        let parts = if first.is_empty() { &parts[..1] } else { &parts };
        match self.answer(unique, || self.write_parts(parts)) {
            Ok(delivery) => delivery,
            Err(errno) => {
                say(&format!("fuse-worker: the kernel refused an answer of {len} bytes (errno {errno})"));
                // Refused as malformed, so the caller still waits: an error is better than silence.
                if error == 0 {
                    self.send(unique, -libc::EIO, &[]);
                }
                Delivery::Dropped
            }
        }
    }
}

fn patch_init(mut reply: Vec<u8>, room: Room) -> Vec<u8> {
    if let Some(field) = reply.get_mut(MAX_WRITE_AT..MAX_WRITE_AT + 4) {
        field.copy_from_slice(&max_write(room).to_ne_bytes());
    }
    if let Some(field) = reply.get_mut(MAX_PAGES_AT..MAX_PAGES_AT + 2) {
        let most = u16::from_ne_bytes([field[0], field[1]]).min(READ_PAGES_MAX);
        field.copy_from_slice(&most.to_ne_bytes());
    }
    reply
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
