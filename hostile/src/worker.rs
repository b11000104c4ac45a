//! A worker under an attacker's control: its life up to the moment at which it is taken over, and what it plays then.
//!
//! The agent starts this program in place of fuse-worker. Which part it plays stands in a file that the test has
//! written, a line for each worker; when none is left it is the real worker.

use crate::calls;
use crate::knowledge::{Knowledge, look_around};
use crate::messages::{self, Link};
use crate::report::Report;
use crate::server::Server;
use anyhow::{Context, Result, bail};
use cache::meta::View;
use inflight::Inflight;
use link::worker::{Assign, FromWorker, Mode, ToWorker};
use link::{MAX_MESSAGE, Packet};
use rustix::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Words of `linux/fuse.h` that fuse-abi, which speaks for the product, does not need.
const NOTIFY_INVAL_ENTRY: i32 = 3;
const NOTIFY_STORE: i32 = 4;

/// Words of the shared memory that say how far its tables reach (`inflight`).
const HIGH_SLOT: usize = 24;
const HIGH_BACKING: usize = 32;

/// The directory of the node: `bin/`, `run/`, `cache/` of the harness.
fn node() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    Ok(program.ancestors().nth(2).context("the program lies in the node's directory")?.to_owned())
}

/// Takes the first line of the file with the parts.
fn next_part(file: &Path) -> Result<Option<String>> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let Some((first, rest)) = text.split_once('\n') else { return Ok(None) };
    std::fs::write(file, rest)?;
    Ok(Some(first.to_owned()))
}

/// Never returns but with an error.
pub fn run() -> Result<()> {
    let node = node()?;
    let own = node.join("run/agent");
    let part = match next_part(&own.join("hostile-parts"))? {
        Some(part) if part != "real" => part,
        _ => {
            let error = std::process::Command::new(node.join("bin/fuse-worker.real"))
                .args(std::env::args().skip(1))
                .exec();
            return Err(error).context("the real worker");
        }
    };
    let report = Report::open(&own.join("hostile-report"))?;
    if part == "silent before Ready" {
        loop {
            std::thread::sleep(Duration::from_secs(60));
        }
    }
    let link = fuse_worker::launch::begin(std::env::args().skip(1)).map_err(anyhow::Error::msg)?;
    let socket = Arc::new(Packet::from_fd(link));
    fuse_worker::lockdown::begin().map_err(anyhow::Error::msg)?;
    send(&socket, &FromWorker::Ready { protocol: version::WORKER })?;
    let Some((assign, mut fds)) = assigned(&socket)? else { return Ok(()) };
    let roots = fds.split_off(2);
    let (Some(memory), Some(device)) = (fds.pop(), fds.pop()) else { bail!("no device") };
    // As the real worker has it mapped, and once more, to write what it likes.
    let raw = map(&memory)?;
    let (inflight, _) = Inflight::hold(memory)?;
    let view = View::open(&assign.metadata)?;
    let reply = inflight.init_reply();
    let init_reply = match part.as_str() {
        "answers INIT with nothing" => Vec::new(),
        "answers INIT with half a header" => vec![0; 7],
        "answers INIT at length" => vec![1; 12_000],
        "answers INIT for another request" => vec![0xff; 80],
        "fails at length" => {
            send(&socket, &FromWorker::Failed { why: "\u{1b}".repeat(60_000) })?;
            std::thread::sleep(Duration::from_secs(60));
            return Ok(());
        }
        "serves before it answers" => {
            send(&socket, &FromWorker::Serving)?;
            std::thread::sleep(Duration::from_secs(60));
            return Ok(());
        }
        _ => reply.unwrap_or_default(),
    };
    let knowledge = look_around(&node, roots, &assign.metadata, socket.as_raw_fd())?;
    let missing = fuse_worker::lockdown::finish(&knowledge.roots, assign.disabled_features.landlock)
        .map_err(anyhow::Error::msg)?;
    report.note("what the lock-down lacks", format!("{missing:?}"));
    send(&socket, &FromWorker::Answered { init_reply, mode: assign.mode })?;
    match link::worker::recv::<ToWorker>(&socket, &mut vec![0; MAX_MESSAGE])?.0 {
        ToWorker::Go => {}
        other => bail!("expected Go, got {other:?}"),
    }
    let server = Arc::new(Server::default());
    let device = Arc::new(device);
    let (serving, its_device) = (server.clone(), device.clone());
    std::thread::spawn(move || serving.run(&its_device));
    let inflight = Arc::new(inflight);
    let beating = inflight.clone();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(50));
            beating.beat();
        }
    });
    fuse_worker::lockdown::settle().map_err(anyhow::Error::msg)?;
    send(&socket, &FromWorker::Serving)?;
    std::thread::sleep(Duration::from_millis(300));
    let taken = Taken { assign: *assign, socket, device, raw, server, view, knowledge };
    taken.play(&part, &report)?;
    report.note("over", part);
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

fn send(socket: &Packet, message: &FromWorker) -> Result<()> {
    Ok(link::worker::send(socket, message, &[])?)
}

/// None: this worker is not needed.
fn assigned(socket: &Packet) -> Result<Option<(Box<Assign>, Vec<OwnedFd>)>> {
    let mut buffer = vec![0; MAX_MESSAGE];
    let (first, mut fds) = match link::worker::recv::<ToWorker>(socket, &mut buffer) {
        Err(link::PacketError::Closed) => return Ok(None),
        other => other?,
    };
    let ToWorker::Assign(assign) = first else { bail!("expected Assign, got {first:?}") };
    while fds.len() < 2 + assign.roots as usize {
        fds.extend(link::worker::recv::<ToWorker>(socket, &mut buffer)?.1);
    }
    Ok(Some((assign, fds)))
}

/// The connection's shared memory, as words.
fn map(memory: &OwnedFd) -> Result<&'static [std::sync::atomic::AtomicU64]> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let bytes = rustix::fs::fstat(memory)?.st_size as usize;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping that is never unmapped, of a file that cannot shrink, accessed through atomics only.
    let words = unsafe {
        let base = mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, memory, 0)?;
        std::slice::from_raw_parts(base.cast(), bytes / 8)
    };
    Ok(words)
}

/// A worker that has served, at the attacker's disposal.
struct Taken {
    assign: Assign,
    socket: Arc<Packet>,
    device: Arc<OwnedFd>,
    raw: &'static [std::sync::atomic::AtomicU64],
    server: Arc<Server>,
    view: View,
    knowledge: Knowledge,
}

impl Taken {
    fn play(&self, part: &str, report: &Report) -> Result<()> {
        let link = Link::new(self.socket.clone());
        match part {
            "calls" => {
                calls::attempt(&self.knowledge, report);
                self.notify(report);
            }
            "messages" => {
                report.note("mode", format!("{:?}", self.assign.mode == Mode::Passthrough));
                messages::attempt(&link, &self.view, report);
            }
            "asks without reading" => report.note(part, messages::flood(&link)),
            "sends what is no message" => link.raw(&[0xff; 40], &[])?,
            "sends more than a message may hold" => link.oversized(MAX_MESSAGE * 2)?,
            "sends four descriptors" => {
                for _ in 0..200 {
                    link.descriptors(4)?;
                }
                let answer = link.ask(link::worker::Ask::Space)?;
                report.note(part, messages::shown(&answer));
            }
            "sends nine descriptors" => link.descriptors(9)?,
            "talks without end" => {
                let line = b"a line that says nothing, and once more\x1b[2J\n".repeat(20);
                let mut said = 0u64;
                let begun = std::time::Instant::now();
                while begun.elapsed() < Duration::from_secs(3) {
                    // SAFETY: descriptor 2 is its standard error as long as it lives.
                    let error = unsafe { rustix::fd::BorrowedFd::borrow_raw(2) };
                    said += rustix::io::write(error, &line).unwrap_or(0) as u64;
                }
                report.note(part, if said > 1 << 20 { "said megabytes" } else { "said little" });
            }
            // The first word says what it is, and is checked by whoever maps it.
            "scribbles over everything" => self.scribble(8, report),
            // Behind the header: INIT and its answer stay.
            "scribbles over the requests" => self.scribble(512, report),
            "takes memory" => take_memory(),
            "swallows" => {
                self.server.swallows.store(true, Ordering::SeqCst);
                report.note("swallows", "begun");
            }
            "swallows and waits in the kernel" => {
                self.server.swallows.store(true, Ordering::SeqCst);
                report.note("swallows", "begun");
                while self.server.swallowed.load(Ordering::SeqCst) == 0 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                // The directory's lock is held by the look-up that was swallowed: this waits where no signal reaches it.
                report.note(part, "waits");
                let _ = self.tell_kernel(NOTIFY_INVAL_ENTRY, &entry(1, b"x"));
            }
            other => bail!("no such part: {other}"),
        }
        Ok(())
    }

    fn tell_kernel(&self, code: i32, body: &[u8]) -> rustix::io::Result<usize> {
        let mut message = fuse_abi::OutHeader::new(body.len(), code, 0).to_bytes().to_vec();
        message.extend_from_slice(body);
        rustix::io::write(&*self.device, &message)
    }

    /// To the kernel, of its own connection.
    fn notify(&self, report: &Report) {
        let words = |all: &[u64]| -> Vec<u8> { all.iter().flat_map(|word| word.to_ne_bytes()).collect() };
        let shown = |result: rustix::io::Result<usize>| match result {
            Ok(_) => "achieved: told".to_owned(),
            Err(error) => crate::report::errno_name(error.raw_os_error()),
        };
        let invalid = |ino: u64| words(&[ino, 0, 0]);
        for (attempt, code, body) in [
            ("forget pages of its own mount", 2, invalid(1)),
            ("forget pages of a node that it never had", 2, invalid(u64::MAX)),
            ("write into pages of a node that it never had", NOTIFY_STORE, words(&[77, 0, 8, 1])),
            ("forget a name that it never had", NOTIFY_INVAL_ENTRY, entry(77, b"x")),
            ("a notification that does not exist", 99, words(&[1, 2, 3])),
        ] {
            report.note(attempt, shown(self.tell_kernel(code, &body)));
        }
        let strange = fuse_abi::OutHeader { len: 16, error: 0, unique: 0x7777_7770 }.to_bytes();
        report.note("answer what was not asked", shown(rustix::io::write(&*self.device, &strange)));
        report.note("answer with three bytes", shown(rustix::io::write(&*self.device, &[1, 2, 3])));
    }

    /// Random words over the shared memory, from this word on, for half a second.
    fn scribble(&self, from: usize, report: &Report) {
        let mut state = 0x9e37_79b9_7f4a_7c15u64 ^ u64::from(std::process::id());
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        report.note("scribbles", "begun");
        let begun = std::time::Instant::now();
        while begun.elapsed() < Duration::from_millis(500) {
            self.raw.iter().skip(from).for_each(|word| word.store(next(), Ordering::Relaxed));
            self.raw.iter().skip(from).for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        }
        self.raw.iter().skip(from).for_each(|word| word.store(next(), Ordering::Relaxed));
        // At last: every slot waits, with an id that the kernel never gave; no slot is the highest.
        for (at, word) in self.raw.iter().enumerate().skip(512).take(inflight::SLOTS) {
            word.store((at as u64) << 4 | 2, Ordering::Relaxed);
        }
        self.raw[HIGH_SLOT].store(u64::MAX, Ordering::Relaxed);
        self.raw[HIGH_BACKING].store(u64::MAX, Ordering::Relaxed);
    }
}

/// `struct fuse_notify_inval_entry_out`, and the name.
fn entry(parent: u64, name: &[u8]) -> Vec<u8> {
    let mut body = parent.to_ne_bytes().to_vec();
    body.extend((name.len() as u32).to_ne_bytes());
    body.extend(0u32.to_ne_bytes());
    body.extend(name);
    body.push(0);
    body
}

/// Shared memory counts against no limit of the process, only against its group's.
fn take_memory() {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    const STEP: u64 = 64 << 20;
    for _ in 0..32 {
        let mapped = calls::call(libc::SYS_mmap, [0, STEP, protection as u64, flags as u64, u64::MAX, 0]);
        let Ok(base) = mapped else { return };
        for page in (0..STEP).step_by(4096) {
            // SAFETY: a page of the mapping that was made just now and belongs to nobody else.
            unsafe { ((base as u64 + page) as *mut u8).write_volatile(1) };
        }
    }
}
