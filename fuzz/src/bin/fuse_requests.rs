//! FUSE requests as bytes, through the worker's transport, fuser and the file system over a real metadata store.
//!
//! The device is one end of a socket, and the target its other end, the kernel. As the kernel it writes true headers, and
//! true sizes of what a request brings along (fuser panics at others); opcode, node and body are the input's. After each input's requests comes a GETATTR of the root. The agent answers each question
//! at once, rightly or wrongly, as the input says.

#![no_main]

// The two C symbols that fuser's traffic goes through.
#[allow(dead_code, reason = "its main is not run")]
#[path = "../../../fuse-worker/src/main.rs"]
mod worker;

use cache::meta::{Cached, Clock, Incoming, InodeNumbers, Kind, MetaError, Options, ROOT, Store};
use fuse_abi::header::{INT_REQ_BIT, MIN_READ_BUFFER};
use fuse_abi::{InHeader, InitIn, OutHeader, WriteIn, opcode};
use fuse_worker::client::{Link, Then};
use fuse_worker::fs::{Fs, Settings, node_id};
use fuzz::{Bound, Numbers};
use inflight::{Inflight, Room};
use libfuzzer_sys::fuzz_target;
use link::Cause;
use link::worker::{ANNOUNCED_FROM, Ask, FromWorker, Mode, Reply, Show};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, Timespec, memfd_create};
use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair, sockopt,
};
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, LazyLock, Mutex, mpsc};

/// A READ of the largest size (16 MiB), its answer, and what the worker keeps of files from one input to the next.
const BOUND: Bound = Bound { times: 64, besides: 40 << 20 };
const MODE: Mode = Mode::Passthrough;
const GENERATION: u64 = 5;
/// Of one input. So many requests of the largest size fit into the socket.
const REQUESTS_MAX: usize = 12;
/// Answers larger than the socket's buffer are refused, as the kernel refuses some: their callers get an error.
const BUFFER_BYTES: usize = 4 << 20;
const PATIENCE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

struct Counter(AtomicU64);
impl InodeNumbers for Counter {
    fn next(&self) -> Result<u64, MetaError> {
        Ok(self.0.fetch_add(1, SeqCst))
    }
}

/// The agent: a thread of its own, which takes its answers from the input.
struct Agent(Mutex<mpsc::Sender<(Ask, Then)>>);

/// What is left of the input's answers; when there are no more, they are right.
static ANSWERS: Mutex<Vec<u8>> = Mutex::new(Vec::new());

impl Link for Agent {
    fn ask(&self, question: Ask, then: Then) {
        let _ = self.0.lock().expect("no one panics").send((question, then)); // the thread never ends
    }
    fn tell(&self, _: FromWorker) {}
}

fn memory(bytes: &[u8], len: u64) -> OwnedFd {
    let file = File::from(memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memory file"));
    file.set_len(len).and_then(|()| file.write_all_at(bytes, 0)).expect("it has room");
    file.into()
}

fn answer(question: Ask, how: u8) -> Result<(Reply, Vec<OwnedFd>), Cause> {
    const CAUSES: [Cause; 5] =
        [Cause::NotFound, Cause::Denied, Cause::Unavailable, Cause::Stale, Cause::Internal];
    match how {
        0..=159 => {}
        160..=199 => return Err(CAUSES[how as usize % CAUSES.len()]),
        200..=219 => return Ok((Reply::Gone, Vec::new())),
        // An answer to another question.
        _ => return Ok((Reply::Stored, Vec::new())),
    }
    let uncached = |len: u32| (Reply::Uncached { len, number: 1 }, vec![memory(b"bytes", u64::from(len))]);
    Ok(match question {
        Ask::File { ino, .. } if how & 1 == 1 => {
            let reply = Reply::File { file: ino, size: 70_000, whole: false };
            (reply, vec![memory(b"bytes", 70_000), memory(&[how], 4096)])
        }
        Ask::File { ino, .. } => {
            (Reply::File { file: ino, size: 9, whole: true }, vec![memory(b"all of it", 9)])
        }
        Ask::Read { .. } if how & 3 == 0 => (Reply::Present { mark: Some(10) }, Vec::new()),
        Ask::Read { len, .. } | Ask::Direct { len, .. } => uncached(len),
        Ask::Cached { .. } => (Reply::Cached { bytes: 7 }, Vec::new()),
        Ask::BackingOpen { .. } => (Reply::Backing { id: 3 }, Vec::new()),
        Ask::Dying { tids } => (Reply::Dying { tids }, Vec::new()),
        Ask::Space => (Reply::Space { total_bytes: 1 << 40, total_inodes: 1000 }, Vec::new()),
        _ => (Reply::Stored, Vec::new()),
    })
}

fn agent() -> Arc<Agent> {
    let (sender, questions) = mpsc::channel::<(Ask, Then)>();
    std::thread::spawn(move || {
        for (question, then) in questions {
            let how = ANSWERS.lock().expect("no one panics").pop().unwrap_or(0);
            then(answer(question, how));
        }
    });
    Arc::new(Agent(Mutex::new(sender)))
}

struct Kernel {
    device: OwnedFd,
    nodes: Vec<u64>,
    next: AtomicU64,
    _store: Store,
}

static KERNEL: LazyLock<Kernel> = LazyLock::new(|| {
    let home = std::env::temp_dir().join(format!("millpond-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&home).expect("a directory");
    let options = Options { map_bytes: 64 << 20, reserve_bytes: 0, ..Options::default() };
    let clock = Clock::new("boot", || 1_000_000, || 1_000_000);
    let numbers = Arc::new(Counter(AtomicU64::new(16)));
    let store = Store::open_at(&home, &options, numbers, clock).expect("an empty store");
    let root = File::open(&home).expect("it is there");
    // Everything is open: nothing is left when libFuzzer ends the process.
    std::fs::remove_dir_all(&home).expect("it is ours");
    let nodes = fill(&store);

    let (device, end) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a pair");
    for socket in [&device, &end] {
        // As root; else answers are refused earlier.
        let _ = sockopt::set_socket_send_buffer_size_force(socket, BUFFER_BYTES);
    }
    let inflight =
        Arc::new(Inflight::map(Inflight::create(Room::ReadOnly).expect("memory")).expect("it was just made"));
    let body = InitIn {
        major: 7,
        minor: 40,
        max_readahead: 1 << 20,
        flags: u32::MAX,
        flags2: u32::MAX,
        ..InitIn::default()
    };
    let len = InHeader::BYTES + InitIn::BYTES;
    let header = InHeader { len: len as u32, opcode: opcode::INIT, unique: 2, ..InHeader::default() };
    inflight.set_init(&[&header.to_bytes()[..], &body.to_bytes()].concat()).expect("it fits");
    let link = agent();
    let (view, asked) = (store.view(), link.clone());
    fuse_worker::fuzz::serve(&inflight, end, MODE, link, |offer| {
        let show = Show {
            attributes_of_source: false,
            uid: 7,
            gid: 8,
            file_mode: 0o440,
            dir_mode: 0o550,
            ttl: None,
            revalidate_on_open: false,
        };
        let settings = Settings {
            mode: offer.mode,
            show,
            generation: GENERATION,
            block_bytes: 4096,
            source: "s3://bucket/prefix/".into(),
            no_opendir: false,
            files_max: 16,
            buffer_bytes: 4 << 20,
            successor: false,
            injected_faults: Vec::new(),
        };
        Fs::new(settings, view, asked, inflight.clone(), vec![root.into()], Arc::new(|| 1_000_000))
    });
    Kernel { device, nodes, next: AtomicU64::new(4), _store: store }
});

/// Returns node ids: of what is there, of other contents of it, and of nothing.
fn fill(store: &Store) -> Vec<u64> {
    let incoming = |name: &str, kind, size| {
        let target = if kind == Kind::Symlink { b"../f".to_vec() } else { Vec::new() };
        Incoming {
            name: name.into(),
            kind,
            size,
            mtime_ns: 1,
            token: "etag".into(),
            target,
            permissions: None,
        }
    };
    let mut listing = store.begin_listing(ROOT).expect("a listing");
    let mut all = vec![
        incoming("f", Kind::File, 9),
        incoming("part", Kind::File, 70_000),
        incoming("large", Kind::File, ANNOUNCED_FROM + 1),
        incoming("d", Kind::Directory, 0),
        incoming("l", Kind::Symlink, 0),
    ];
    all.extend((0..200).map(|k| incoming(&format!("name-{k:03}"), Kind::File, k)));
    listing.page(&all).expect("a page");
    listing.finish().expect("its end");
    let mut nodes = vec![ROOT, 0, u64::MAX, 1 << 39];
    for one in &all[..5] {
        let found = store.put(ROOT, one).expect("it is known");
        nodes.extend([node_id(MODE, &found), node_id(MODE, &found) ^ 1 << 40, found.ino]);
    }
    // Whole in the cache, says the store; but there is no such file.
    let whole = store.put(ROOT, &incoming("whole", Kind::File, 9)).expect("a name");
    let cached = Some(Cached { generation: GENERATION, root: 0, file: 0x77 });
    let whole = store.set_cached(whole.ino, whole.version, cached).expect("it is known").expect("likewise");
    nodes.push(node_id(MODE, &whole));
    nodes
}

/// May the worker leave it without an answer?
fn is_silent(opcode: u32) -> bool {
    matches!(opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::NOTIFY_REPLY | opcode::INTERRUPT)
}

/// How much data comes with a request, where it says so, too.
fn tell_true_size(opcode: u32, body: &mut [u8]) {
    const SETXATTR: u32 = 21;
    const IOCTL: u32 = 39;
    // `size` begins a `fuse_setxattr_in` of 8 bytes, and the value comes behind the name; `in_size` lies at 24 of the 32
    // bytes of a `fuse_ioctl_in`.
    let (at, data_at) = match opcode {
        opcode::WRITE => (std::mem::offset_of!(WriteIn, size), Some(WriteIn::BYTES)),
        SETXATTR => {
            let name = body.iter().skip(8).position(|byte| *byte == 0);
            (0, name.map(|len| 8 + len + 1))
        }
        IOCTL => (24, Some(32)),
        _ => return,
    };
    let size = data_at.map_or(0, |at| body.len().saturating_sub(at)) as u32;
    if let Some(field) = body.get_mut(at..at + 4) {
        field.copy_from_slice(&size.to_ne_bytes());
    }
}

impl Kernel {
    fn send(&self, opcode: u32, unique: u64, nodeid: u64, pid: u32, body: &[u8]) {
        let len = (InHeader::BYTES + body.len()) as u32;
        let header = InHeader { len, opcode, unique, nodeid, pid, ..InHeader::default() };
        let mut request = [&header.to_bytes()[..], body].concat();
        tell_true_size(opcode, &mut request[InHeader::BYTES..]);
        retry_on_intr(|| send(&self.device, &request, SendFlags::NOSIGNAL)).expect("it fits");
    }

    fn unique(&self) -> u64 {
        self.next.fetch_add(2, SeqCst)
    }

    /// Takes answers until each request has its own.
    fn receive(&self, asked: &BTreeMap<u64, u32>) {
        let mut left: HashSet<u64> =
            asked.iter().filter(|(_, opcode)| !is_silent(**opcode)).map(|(unique, _)| *unique).collect();
        let (mut seen, mut buffer) = (HashSet::new(), vec![0; 17 << 20]);
        while !left.is_empty() {
            // libFuzzer's clock interrupts it every few seconds.
            let ready =
                retry_on_intr(|| poll(&mut [PollFd::new(&self.device, PollFlags::IN)], Some(&PATIENCE)));
            assert!(ready == Ok(1), "no answer to {:?}", left.iter().map(|u| asked[u]).collect::<Vec<_>>());
            let (_, len) =
                retry_on_intr(|| recv(&self.device, &mut buffer[..], RecvFlags::empty())).expect("a packet");
            let header = OutHeader::from_bytes(buffer.first_chunk().expect("a header"));
            assert_eq!(header.len as usize, len);
            if header.unique == 0 {
                assert!(header.error > 0, "a notification's code");
                continue;
            }
            // Of an input before: an INTERRUPT may be answered late.
            let Some(opcode) = asked.get(&header.unique) else {
                assert!(
                    header.unique & INT_REQ_BIT != 0,
                    "an answer to {}, which was not asked",
                    header.unique
                );
                continue;
            };
            // Sent again, as the kernel does when it hears EAGAIN, it is answered again.
            let again = *opcode == opcode::INTERRUPT;
            assert!(seen.insert(header.unique) || again, "a second answer to opcode {opcode}");
            assert!((-4095..=0).contains(&header.error), "{}", header.error);
            assert!(header.error == 0 || len == OutHeader::BYTES, "an error has no body");
            left.remove(&header.unique);
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let kernel = &*KERNEL;
    BOUND.hold(input, || {
        let mut numbers = Numbers::new(input);
        let answers = usize::from(numbers.u8() % 16);
        *ANSWERS.lock().expect("no one panics") = numbers.bytes(answers).to_vec();
        let mut asked = BTreeMap::new();
        let mut last = 0;
        while !numbers.is_empty() && asked.len() < REQUESTS_MAX {
            let (opcode, node) = (u32::from(numbers.u8()), numbers.u8());
            let (pid, len) =
                (u32::from(numbers.u8()), usize::from(numbers.u16()) % (MIN_READ_BUFFER - InHeader::BYTES));
            let nodeid = kernel.nodes.get(usize::from(node)).copied().unwrap_or_else(|| numbers.u64());
            let body = numbers.bytes(len);
            match opcode {
                // The kernel sends either once: with the first begins a session, with the other it ends.
                opcode::INIT | opcode::DESTROY => continue,
                opcode::INTERRUPT if body.is_empty() => {
                    kernel.send(opcode, last | INT_REQ_BIT, nodeid, pid, &u64::to_ne_bytes(last));
                    asked.insert(last | INT_REQ_BIT, opcode);
                }
                _ => {
                    last = kernel.unique();
                    kernel.send(opcode, last, nodeid, pid, body);
                    asked.insert(last, opcode);
                }
            }
        }
        let sentinel = kernel.unique();
        kernel.send(opcode::GETATTR, sentinel, ROOT, 0, &[0; 16]);
        asked.insert(sentinel, opcode::GETATTR);
        kernel.receive(&asked);
    });
});
