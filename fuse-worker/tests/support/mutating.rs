//! A file system on which nothing may happen twice: each write adds one to a number, and directories are made and
//! removed. Its worker is this test binary again, on the transport and the records of the real one.

use super::load::{Calls, VARIABLE, wait_for_input};
use super::{connect, disconnect, wait_for, writing};
use fuse_abi::open::FOPEN_DIRECT_IO;
use fuse_abi::{Attr, AttrOut, EntryOut, InHeader, InitOut, MkdirIn, OpenOut, OutHeader, opcode};
use fuse_worker::reply::Sink;
use fuse_worker::transport::{Transport, Write};
use inflight::{Blame, Collected, Inflight, Operation, Outcome, Room};
use link::worker::DisabledFeatures;
use std::fs;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Where a worker finds its descriptors: above all that this process has open.
const DEVICE_FD: i32 = 900;
const MEMORY_FD: i32 = 901;

const ROOT: u64 = 1;
const COUNT: u64 = 2;
/// A file of the world that is written as it is (`writing`).
const DATA: u64 = 3;

pub struct Mutating {
    pub target: PathBuf,
    /// What the operations change: it outlives every worker.
    pub world: PathBuf,
    /// Do without records: the control.
    naive: bool,
    device: OwnedFd,
    memory: OwnedFd,
    inflight: Inflight,
    worker: Option<Child>,
    // Last: removed after the mount is gone.
    _home: tempfile::TempDir,
}

impl Mutating {
    pub fn new(naive: bool) -> Self {
        Self::with_room(naive, Room::ReadOnly)
    }

    pub fn with_room(naive: bool, room: Room) -> Self {
        let home = tempfile::Builder::new().prefix("millpond-mutating-").tempdir_in("/var/tmp").unwrap();
        let (target, world) = (home.path().join("mnt"), home.path().join("world"));
        fs::create_dir_all(world.join("dirs")).unwrap();
        fs::write(world.join("count"), 0u64.to_le_bytes()).unwrap();
        fs::write(world.join("data"), "").unwrap();
        let (device, memory) = connect(&target, 0, room);
        let inflight = Inflight::map(&memory).unwrap();
        let mutating = Self { target, world, naive, device, memory, inflight, worker: None, _home: home };
        let reply = init_reply(&mutating.inflight.init().unwrap(), room);
        mutating.inflight.set_init_reply(&reply).unwrap();
        rustix::io::write(&mutating.device, &reply).unwrap();
        mutating
    }

    /// A worker that aborts at `step`; "": at none.
    pub fn start(&mut self, step: &str) {
        let naive = if self.naive { " naive" } else { "" };
        let task = format!("serve {}{naive}", self.world.display());
        self.worker = Some(self.spawn(&task, step, Stdio::null()));
    }

    /// One that reads a request and does nothing with it: its process id, and what it says.
    pub fn start_copying(&mut self, populated: bool) -> (u32, ChildStdout) {
        let mut worker = self.spawn(if populated { "copy populated" } else { "copy" }, "", Stdio::piped());
        let said = worker.stdout.take().unwrap();
        (self.worker.insert(worker).id(), said)
    }

    fn spawn(&self, task: &str, step: &str, stdout: Stdio) -> Child {
        let fds = [(self.device.as_raw_fd(), DEVICE_FD), (self.memory.as_raw_fd(), MEMORY_FD)];
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "application", "--nocapture", "--test-threads=1"]);
        command.env(VARIABLE, task);
        command.env(failpoint::VARIABLE, step).stdin(Stdio::null()).stdout(stdout);
        // SAFETY: system calls only, between fork and exec.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
                for (from, to) in fds {
                    if libc::dup2(from, to) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        command.spawn().unwrap()
    }

    /// Waits until a worker that lives has brought to an end what others have died in.
    pub fn let_work(&self) {
        let dirs = self.world.join("dirs");
        let look = || (count(&self.world.join("count")), fs::metadata(&dirs).unwrap().modified().unwrap());
        for _ in 0..2 {
            let before = look();
            wait_for("progress of both threads", || {
                let now = look();
                now.0 != before.0 && now.1 != before.1
            });
        }
    }

    /// Waits for the worker's own death, then kills it; true: it came to the step.
    pub fn let_die(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut worker = self.worker.take().unwrap();
        let mut status: Option<ExitStatus> = None;
        while status.is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
            status = worker.try_wait().unwrap();
        }
        let _ = worker.kill(); // dead already: fine
        worker.wait().unwrap();
        let fine = status.is_none_or(|status| status.signal() == Some(libc::SIGABRT));
        assert!(fine, "the worker ended otherwise than at a failpoint: {status:?}");
        let collected = self.inflight.collect(&self.device, Blame::Executing).unwrap();
        assert_eq!(collected, Collected { poisoned: vec![], lost: 0, ended: false, ..collected.clone() });
        status.is_some()
    }
}

impl Drop for Mutating {
    fn drop(&mut self) {
        if let Some(mut worker) = self.worker.take() {
            let _ = worker.kill();
            let _ = worker.wait();
        }
        disconnect(&self.target);
    }
}

fn init_reply(init: &[u8], room: Room) -> Vec<u8> {
    const BIG_WRITES: u32 = 1 << 5;
    const MAX_PAGES: u32 = 1 << 22;
    let (flags, max_pages) = match room {
        Room::ReadOnly => (0, 1),
        Room::ReadWrite => (BIG_WRITES | MAX_PAGES, 255),
    };
    let unique = InHeader::from_bytes(init.first_chunk().unwrap()).unique;
    let reply = InitOut {
        major: 7,
        minor: 31,
        flags,
        max_background: 16,
        congestion_threshold: 12,
        max_write: u32::from(max_pages) * 4096,
        time_gran: 1,
        max_pages,
        ..InitOut::default()
    };
    [&OutHeader::new(InitOut::BYTES, 0, unique).to_bytes()[..], &reply.to_bytes()].concat()
}

fn push(bytes: &mut Vec<u8>, values: &[u32]) {
    values.iter().for_each(|value| bytes.extend_from_slice(&value.to_ne_bytes()));
}

/// Of a worker's process: the device and the shared memory.
pub fn inherited() -> [OwnedFd; 2] {
    // SAFETY: `spawn` has put them there for this process alone, which takes them once.
    [DEVICE_FD, MEMORY_FD].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Another process: the worker. Never returns but when the connection has ended.
pub fn serve(world: &Path, naive: bool) {
    let [device, memory] = inherited();
    let (inflight, alone) = Inflight::hold(memory).unwrap();
    assert!(alone, "the worker before is still there");
    let inflight = Arc::new(inflight);
    let transport = Transport::arm(inflight.clone(), device, &DisabledFeatures::default()).unwrap().transport;
    let mut buffer = vec![0; inflight.stage_bytes_max()];
    transport.read(&mut buffer).unwrap();
    let agreed = inflight.init_reply().unwrap();
    transport.write(&[IoSlice::new(&agreed)]).unwrap();
    assert!(transport.init_reply() == Some(agreed), "the test agreed on what a worker asks for");
    set_writes(&transport, world, naive);
    loop {
        let request = match transport.read(&mut buffer) {
            Ok(len) => &buffer[..len],
            // Aborted or interrupted in the kernel's queue.
            Err(libc::ENOENT | libc::EINTR | libc::EAGAIN) => continue,
            Err(_) => return,
        };
        let header = InHeader::from_bytes(request.first_chunk().unwrap());
        let outcome = match operation(world, &header, &request[InHeader::BYTES..]) {
            Some(mut operation) => bring_about(&inflight, header.unique, &mut *operation, naive),
            None => answer(world, &header, &request[InHeader::BYTES..]),
        };
        transport.send(header.unique, -outcome.errno, &[IoSlice::new(&outcome.body)]);
    }
}

/// Those of numbers are operations, done on the spot; those of data take their time.
fn set_writes(transport: &Arc<Transport>, world: &Path, naive: bool) {
    let data = writing::start(transport, &world.join("data"));
    let (answers, world) = (transport.clone(), world.to_owned());
    transport.set_writes(Box::new(move |write: Write| match write.nodeid {
        DATA => data.send(write).unwrap(),
        _ => {
            let mut add = Add { count: world.join("count"), size: write.size };
            let outcome = bring_about(answers.inflight(), write.unique, &mut add, naive);
            answers.send(write.unique, -outcome.errno, &[IoSlice::new(&outcome.body)]);
        }
    }));
}

fn bring_about(inflight: &Inflight, unique: u64, operation: &mut dyn Operation, naive: bool) -> Outcome {
    let mut watched = Watched(operation);
    let outcome = match naive {
        true => watched.execute(),
        false => inflight.once(unique, &mut watched).unwrap(),
    };
    failpoint::hit("mutating.concluded");
    outcome
}

fn name(bytes: &[u8]) -> &std::ffi::OsStr {
    std::ffi::OsStr::from_bytes(bytes.split(|b| *b == 0).next().unwrap())
}

/// What changes something.
fn operation(world: &Path, header: &InHeader, body: &[u8]) -> Option<Box<dyn Operation>> {
    Some(match header.opcode {
        opcode::MKDIR => Box::new(Make(world.join("dirs").join(name(&body[MkdirIn::BYTES..])))),
        opcode::RMDIR => Box::new(Remove(world.join("dirs").join(name(body)))),
        _ => return None,
    })
}

/// What only looks.
fn answer(world: &Path, header: &InHeader, body: &[u8]) -> Outcome {
    match header.opcode {
        opcode::LOOKUP if name(body) == "count" => done(entry(COUNT)),
        opcode::LOOKUP if name(body) == "data" => done(entry(DATA)),
        opcode::LOOKUP => match fs::metadata(world.join("dirs").join(name(body))) {
            Ok(found) => done(entry(found.ino())),
            Err(_) => failed(libc::ENOENT),
        },
        opcode::GETATTR => {
            done(AttrOut { attr: attributes(header.nodeid), ..AttrOut::default() }.to_bytes().into())
        }
        opcode::OPEN => done(OpenOut { open_flags: FOPEN_DIRECT_IO, ..OpenOut::default() }.to_bytes().into()),
        opcode::RELEASE => done(Vec::new()),
        _ => failed(libc::ENOSYS),
    }
}

fn done(body: Vec<u8>) -> Outcome {
    Outcome { errno: 0, body }
}

fn failed(errno: i32) -> Outcome {
    Outcome { errno, body: Vec::new() }
}

/// That the kernel may not keep.
fn entry(nodeid: u64) -> Vec<u8> {
    EntryOut { nodeid, attr: attributes(nodeid), ..EntryOut::default() }.to_bytes().into()
}

/// No size, no times.
fn attributes(nodeid: u64) -> Attr {
    let mode = if nodeid == COUNT || nodeid == DATA { libc::S_IFREG | 0o644 } else { libc::S_IFDIR | 0o755 };
    let nlink = if nodeid == ROOT { 2 } else { 1 };
    Attr { ino: nodeid, mode, nlink, blksize: 4096, ..Attr::default() }
}

/// An operation with steps to die at.
struct Watched<'a>(&'a mut dyn Operation);

impl Operation for Watched<'_> {
    fn intend(&mut self) -> Vec<u8> {
        failpoint::hit("mutating.begun");
        self.0.intend()
    }
    fn resolve(&mut self, intent: &[u8]) -> Option<Outcome> {
        let outcome = self.0.resolve(intent)?;
        failpoint::hit("mutating.resolved");
        Some(outcome)
    }
    fn execute(&mut self) -> Outcome {
        failpoint::hit("mutating.intended");
        let outcome = self.0.execute();
        failpoint::hit("mutating.executed");
        outcome
    }
}

struct Add {
    count: PathBuf,
    size: u32,
}

impl Add {
    fn now(&self) -> u64 {
        count(&self.count)
    }
    fn written(&self) -> Outcome {
        let mut body = Vec::new();
        push(&mut body, &[self.size, 0]);
        done(body)
    }
}

fn count(file: &Path) -> u64 {
    u64::from_le_bytes(fs::read(file).unwrap().try_into().unwrap())
}

impl Operation for Add {
    fn intend(&mut self) -> Vec<u8> {
        self.now().to_le_bytes().to_vec()
    }
    fn resolve(&mut self, before: &[u8]) -> Option<Outcome> {
        let before = u64::from_le_bytes(before.try_into().unwrap());
        (self.now() == before + 1).then(|| self.written())
    }
    fn execute(&mut self) -> Outcome {
        let more = self.now() + 1;
        let file = fs::File::options().write(true).open(&self.count).unwrap();
        file.write_all_at(&more.to_le_bytes(), 0).unwrap();
        self.written()
    }
}

struct Make(PathBuf);

impl Operation for Make {
    fn intend(&mut self) -> Vec<u8> {
        vec![self.0.exists().into()]
    }
    fn resolve(&mut self, was_there: &[u8]) -> Option<Outcome> {
        let made = fs::metadata(&self.0).ok()?;
        (was_there == [0]).then(|| done(entry(made.ino())))
    }
    fn execute(&mut self) -> Outcome {
        match fs::create_dir(&self.0).and_then(|()| fs::metadata(&self.0)) {
            Ok(made) => done(entry(made.ino())),
            Err(error) => failed(error.raw_os_error().unwrap()),
        }
    }
}

struct Remove(PathBuf);

impl Operation for Remove {
    fn intend(&mut self) -> Vec<u8> {
        vec![self.0.exists().into()]
    }
    fn resolve(&mut self, was_there: &[u8]) -> Option<Outcome> {
        (was_there == [1] && !self.0.exists()).then(|| done(Vec::new()))
    }
    fn execute(&mut self) -> Outcome {
        match fs::remove_dir(&self.0) {
            Ok(()) => done(Vec::new()),
            Err(error) => failed(error.raw_os_error().unwrap()),
        }
    }
}

/// Another process: the application. Changes things until its input ends, then compares its books with the world.
pub fn calls(root: &Path, world: &Path) {
    let books = Calls::new();
    let counting = std::thread::spawn({
        let (books, path) = (books.clone(), root.join("count"));
        move || {
            let mut written = 0;
            let Some(file) = books.call("open", fs::File::options().write(true).open(path)) else { return 0 };
            while !books.stop.load(SeqCst) {
                let result = books.call("write", file.write_at(b"one", 0));
                books.check("bytes written", result.is_none_or(|bytes| bytes == 3));
                written += u64::from(result.is_some());
            }
            written
        }
    });
    let making = std::thread::spawn({
        let (books, root) = (books.clone(), root.to_owned());
        move || {
            for n in 0.. {
                let dir = root.join(format!("dir{n}"));
                books.call("mkdir", fs::create_dir(&dir));
                books.call("rmdir", fs::remove_dir(&dir));
                if books.stop.load(SeqCst) {
                    break;
                }
            }
        }
    });
    wait_for_input();
    books.stop.store(true, SeqCst);
    let written = counting.join().unwrap();
    making.join().unwrap();
    let (counted, left) = (count(&world.join("count")), fs::read_dir(world.join("dirs")).unwrap().count());
    if (counted, left) != (written, 0) {
        books.fail(format!("{written} writes counted as {counted}; {left} directories left"));
    }
    books.report();
}
