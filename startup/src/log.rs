//! The log: standard error, behind a pipe of our own that never blocks.
//!
//! ```text
//!  any thread, any library ──► descriptor 2: a pipe, O_NONBLOCK ──► thread "log" ──► what standard error was, or a file
//!                              full: the line is lost and counted    may block, fail or be slow: no thread waits for it
//! ```
//!
//! Not a queue in memory, as tracing-appender's: what the runtime, libc or a C library says before it aborts takes the
//! same way and must not block either, and the flags of the descriptor that we were given, which others may share, stay
//! as they are. The log says how much it lost when it flows again, and a metric counts it ([`lost`]).

use crate::bounded_file::BoundedFile;
use crate::failpoints;
use libc::{STDERR_FILENO, c_int};
use nix::sys::signal::{self, SaFlags, SigAction, SigHandler, SigSet, Signal};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

/// Which events are logged: a filter of tracing-subscriber's.
const FILTER: &str = "MILLPOND_LOG";
/// Some thousand lines. More than the kernel's default (64 KiB) may be refused; then that is it.
const PIPE_BYTES: usize = 256 << 10;
/// A longer line is cut.
const LINE_BYTES_MAX: usize = 64 << 10;
const FILE_BYTES_MAX: u64 = 8 << 20;
/// How long a dying process waits for its last words. No longer: its other threads go on meanwhile.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// How long a process that ends in order waits.
const END: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Text,
    /// One object a line.
    Json,
}

struct Log {
    /// Our own pipe's other end.
    pipe: OwnedFd,
    /// What descriptor 2 was.
    given: OwnedFd,
    /// The thread has read what it has not written yet.
    writing: AtomicBool,
    /// How often it has read the pipe, and written what was there. Wraps around.
    rounds: AtomicU64,
    format: OnceLock<Format>,
}

static LOG: OnceLock<Log> = OnceLock::new();
static LOST: AtomicU64 = AtomicU64::new(0);
/// The last line was cut short by a full pipe. A writer holds this: a line longer than PIPE_BUF is not written at
/// once.
static TORN: Mutex<bool> = Mutex::new(false);

/// From here on descriptor 2 is the pipe, and its lines go to what standard error was.
pub fn start() -> io::Result<()> {
    let given = given()?;
    let out = File::from(given.try_clone()?);
    begin(given, Box::new(out))
}

/// As [`start`], into a file of limited size, which goes on where it ended.
pub fn start_into(path: &Path) -> io::Result<()> {
    let file = BoundedFile::open(path, FILE_BYTES_MAX)?;
    begin(given()?, Box::new(file))
}

fn given() -> io::Result<OwnedFd> {
    io::stderr().as_fd().try_clone_to_owned()
}

fn begin(given: OwnedFd, out: Box<dyn Write + Send>) -> io::Result<()> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let _ = fcntl_setpipe_size(&writer, PIPE_BYTES); // refused: a smaller one does as well
    let log = Log {
        pipe: reader,
        given,
        writing: AtomicBool::new(false),
        rounds: AtomicU64::new(0),
        format: OnceLock::new(),
    };
    LOG.set(log).map_err(|_| io::Error::other("the log was started twice"))?;
    let log = LOG.get().ok_or_else(|| io::Error::other("it was just set"))?;
    let (running, runs) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::Builder::new().name("log".into()).stack_size(256 << 10);
    thread.spawn(move || {
        drop(running);
        log.copy(out);
    })?;
    // The standard library stops a thread that it is still setting up for good when another one overflows its stack:
    // those words would never be written.
    let _ = runs.recv(); // an error is the news
    replace_standard_error(&writer)?;
    wait_for_last_words();
    Ok(())
}

fn replace_standard_error(with: impl AsFd) -> io::Result<()> {
    // SAFETY: both numbers are open, and no Rust object believes that it owns descriptor 2 alone.
    match unsafe { libc::dup2(with.as_fd().as_raw_fd(), STDERR_FILENO) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Lets `tracing` write into the log. `filter` holds where the environment names none.
pub fn init(format: Format, filter: &str) {
    if let Some(log) = LOG.get() {
        let _ = log.format.set(format); // set before: by the same main
    }
    let filter = EnvFilter::try_from_env(FILTER).unwrap_or_else(|_| EnvFilter::new(filter));
    let lines = fmt::layer().with_writer(|| StandardError).with_ansi(false).log_internal_errors(false);
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match format {
        Format::Text => lines.boxed(),
        Format::Json => lines.json().boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter));
    match failpoint::panics_on_request() {
        true => subscriber.with(failpoints::places()).init(),
        false => subscriber.init(),
    }
}

/// Lines that the log has lost.
pub fn lost() -> u64 {
    LOST.load(SeqCst)
}

/// A line that is not an event of `tracing`. Never fails; blocks only where [`start`] was not called.
pub fn say(line: &str) {
    // A single write: lines of several processes may meet in one file.
    write_line(format!("{line}\n").as_bytes());
}

/// The last line of a program that fails before or after it could serve.
pub fn fail(program: &str, why: &str) {
    match LOG.get().and_then(|log| log.format.get()) {
        Some(_) => tracing::error!("{program}: {why}"),
        None => say(&format!("{program}: {why}")),
    }
}

/// Call it at the end of `main`: what was said is written, unless that takes too long.
pub fn end() {
    wait_until_written(END);
}

/// Before this process executes another program: descriptor 2 is what it was.
pub fn restore() -> io::Result<()> {
    wait_until_written(END);
    LOG.get().map_or(Ok(()), |log| replace_standard_error(&log.given))
}

/// For a process that is about to abort.
pub(crate) fn say_at_last(program: &str, what: &str) {
    match LOG.get() {
        Some(log) => {
            let format = log.format.get().copied().unwrap_or(Format::Text);
            write_line(compose(format, "ERROR", &format!("{program}: {what}"), None).as_bytes());
        }
        // As much as surely does not block: a pipe that can be written to takes PIPE_BUF bytes.
        None => {
            let line = format!("{program}: {what}\n");
            // SAFETY: descriptor 2 is open as long as the process lives.
            if can_write_within(unsafe { BorrowedFd::borrow_raw(STDERR_FILENO) }, LAST_WORDS) {
                write_line(&line.as_bytes()[..line.len().min(libc::PIPE_BUF)]);
            }
        }
    }
}

/// Async-signal-safe.
fn can_write_within(fd: BorrowedFd<'_>, limit: Duration) -> bool {
    let fd = nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLOUT);
    // ppoll and not poll: it is what a worker's seccomp filter allows.
    nix::poll::ppoll(&mut [fd], Some(limit.into()), None) == Ok(1)
}

/// Once a process is being aborted, from inside or outside.
fn wait_for_last_words() {
    extern "C" fn aborted(_: c_int) {
        wait_for_what_is_said();
        // Blocked until this handler returns; then the default action ends the process.
        let _ = signal::raise(Signal::SIGABRT);
    }
    let flags = SaFlags::SA_RESETHAND | SaFlags::SA_ONSTACK;
    let action = SigAction::new(SigHandler::Handler(aborted), flags, SigSet::empty());
    // SAFETY: the handler loads atomics, asks a pipe how much it holds, reads the clock and sleeps: all of it is
    // async-signal-safe.
    let handled = unsafe { signal::sigaction(Signal::SIGABRT, &action) };
    debug_assert!(handled.is_ok(), "SIGABRT can be handled");
}

/// What is said from here on, by threads that go on meanwhile, is not waited for. Async-signal-safe.
fn wait_for_what_is_said() {
    let Some(log) = LOG.get() else { return };
    let (begun, first) = (Instant::now(), log.rounds.load(SeqCst));
    // The round that is under way may have read before; the one after it reads all that is there.
    while !log.is_written() && log.rounds.load(SeqCst).wrapping_sub(first) < 2 {
        if begun.elapsed() >= LAST_WORDS {
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn wait_until_written(limit: Duration) {
    let Some(log) = LOG.get() else { return };
    let begun = Instant::now();
    while !log.is_written() && begun.elapsed() < limit {
        std::thread::sleep(LOOK_EVERY);
    }
}

fn write_line(line: &[u8]) {
    let mut torn = TORN.lock().unwrap_or_else(PoisonError::into_inner);
    let (line, cut) = line.split_at(line.len().min(LINE_BYTES_MAX));
    // SAFETY: descriptor 2 is open as long as the process lives.
    let stderr = unsafe { BorrowedFd::borrow_raw(STDERR_FILENO) };
    if *torn && rustix::io::write(stderr, b"\n").is_err() {
        LOST.fetch_add(1, SeqCst);
        return;
    }
    match rustix::io::write(stderr, line) {
        Ok(length) => {
            *torn = length < line.len() || !cut.is_empty();
            LOST.fetch_add(u64::from(length < line.len()), SeqCst);
        }
        Err(_) => {
            *torn = false;
            LOST.fetch_add(1, SeqCst);
        }
    }
}

fn compose(format: Format, level: &str, message: &str, lines: Option<u64>) -> String {
    let mut time = String::new();
    let _ = SystemTime.format_time(&mut Writer::new(&mut time)); // into a String
    match format {
        Format::Text => {
            let lines = lines.map(|n| format!(" lines={n}")).unwrap_or_default();
            format!("{time} {level:>5} startup: {message}{lines}\n")
        }
        Format::Json => {
            let mut fields = serde_json::json!({ "message": message });
            if let Some(lines) = lines {
                fields["lines"] = lines.into();
            }
            let line = serde_json::json!({
                "timestamp": time, "level": level, "fields": fields, "target": "startup",
            });
            format!("{line}\n")
        }
    }
}

impl Log {
    /// The thread. Ends when the pipe's other end is closed: never, or with [`restore`].
    fn copy(&self, mut out: Box<dyn Write + Send>) {
        let mut buffer = vec![0; PIPE_BYTES];
        let (mut reported, mut midline) = (0, false);
        loop {
            let _ = poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], None); // the read tells
            // Before it is read: a thread that sees an empty pipe must see this.
            self.writing.store(true, SeqCst);
            let text = match rustix::io::read(&self.pipe, &mut buffer) {
                Ok(0) => return self.writing.store(false, SeqCst),
                Ok(length) => &buffer[..length],
                Err(Errno::AGAIN | Errno::INTR) => &[],
                Err(_) => return self.writing.store(false, SeqCst),
            };
            match write_all(&mut out, text) {
                Ok(()) => {
                    midline = text.last().map_or(midline, |byte| *byte != b'\n');
                    let lost = lost();
                    if lost != reported && !midline && self.tell(&mut out, lost - reported).is_ok() {
                        reported = lost;
                    }
                }
                Err(_) => {
                    let lines = text.iter().filter(|byte| **byte == b'\n').count().max(1);
                    LOST.fetch_add(lines as u64, SeqCst);
                }
            }
            self.rounds.fetch_add(1, SeqCst);
            self.writing.store(false, SeqCst);
        }
    }

    fn tell(&self, out: &mut dyn Write, lines: u64) -> io::Result<()> {
        let format = self.format.get().copied().unwrap_or(Format::Text);
        let what = "lines of this log were lost: what it is written to was full, closed or failed";
        write_all(out, compose(format, "WARN", what, Some(lines)).as_bytes())
    }

    fn is_written(&self) -> bool {
        rustix::io::ioctl_fionread(&self.pipe).unwrap_or(0) == 0 && !self.writing.load(SeqCst)
    }
}

/// Another process may have set O_NONBLOCK on what we were given: then it is waited for.
fn write_all(out: &mut dyn Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => bytes = &bytes[length..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(LAST_WORDS),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Where `tracing` writes: an event is one call.
struct StandardError;

impl Write for StandardError {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        write_line(line);
        Ok(line.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
