//! Agent ↔ worker. Both are of one build (the agent spawns the worker), so the encoding is compact (postcard): a miss
//! costs a message each way. It has no room for what only one side knows, so the worker's first word is its version,
//! and an agent that finds another program in its worker's place (a laptop's package was upgraded) does not use it.
//!
//! ```text
//!  spawn ──► Ready ──Assign(+fds)──► Answered(init reply) ──Go──► Serving ──► requests …
//!            a standby waits here    first mount: the broker       replays what its predecessor left,
//!                                    gives it to the kernel        then reads the device
//! ```
//!
//! The worker's death needs no message: the socket closes and the agent reaps the child.

use crate::writable::{Done, Operation, Wrong};
use crate::{Cause, Packet, PacketError};
use serde::{Deserialize, Serialize};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

/// The worker's end of the link: its standard input, for what a process is started with there needs no code between fork
/// and exec. Every other descriptor but standard output and error is closed.
pub const LINK_FD: i32 = 0;

/// What a worker is started with: the process that starts it, with which it dies, and its `RLIMIT_DATA`, bytes.
pub fn arguments(data_bytes: u64) -> [String; 2] {
    [std::process::id().to_string(), data_bytes.to_string()]
}

/// Files from this size on are announced to the agent ([`Ask::Open`]) when they are opened before they are whole,
/// bytes. Below it, being copied through a worker costs less than the question.
pub const ANNOUNCED_FROM: u64 = 32 << 20;

/// A READ asks for no more than this, bytes, whatever the size of a page; and so does a worker.
pub const READ_MAX: u32 = 16 << 20;

/// Agent → worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToWorker {
    /// Attached, in this order: the FUSE device, the connection's shared memory, then one directory per cache root
    /// of this scope (at most [`crate::MAX_FDS`] − 2 in this packet; further roots follow in `Roots`).
    Assign(Box<Assign>),
    /// Further cache roots, attached, continuing the numbering.
    Roots,
    /// Start reading requests.
    Go,
    Answer {
        id: u64,
        body: Result<Reply, Cause>,
    },
    /// A cached object was evicted, replaced or became whole: drop the file you hold for it.
    Forget {
        file: u64,
    },
}

/// Everything a worker must know of its volume. Carries no credential.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Assign {
    pub volume: String,
    /// For people: the `user.millpond.source` attribute.
    pub source: String,
    /// Directory of the metadata store of this volume's scope.
    pub metadata: PathBuf,
    /// Only cache locations recorded by this agent generation may be used without asking (see `cache::meta`).
    pub generation: u64,
    /// How many cache root descriptors come (here and in `Roots`).
    pub roots: u32,
    pub threads: u32,
    pub mode: Mode,
    /// What the mount shows.
    pub show: Show,
    pub disabled_features: DisabledFeatures,
    pub injected_faults: Vec<InjectedFault>,
    /// A thread of the worker that is at one thing for half of this stops its heartbeat.
    pub hang_limit: Duration,
    /// Pages that random readers get at once, bytes; a power of two ≥ 4096.
    pub block_bytes: u64,
    /// True for a successor: the INIT reply recorded in the shared memory must come out again.
    pub takeover: bool,
}

/// How opens are answered; fixed for the life of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Passthrough of whole files, ordinary opens of the rest.
    Passthrough,
    /// OPEN, OPENDIR and FLUSH are answered ENOSYS once.
    NoOpen,
    /// Ordinary opens with kept page cache: the fallback of either.
    Kept,
    /// A volume that can be written to: node ids are inode numbers, and everything is asked of the agent.
    Writable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Show {
    /// Where the source tells owner and mode, they count, and not those below.
    pub attributes_of_source: bool,
    pub uid: u32,
    pub gid: u32,
    pub file_mode: u32,
    pub dir_mode: u32,
    /// How long the kernel may trust names and attributes; None: for ever (static).
    pub ttl: Option<Duration>,
    /// Ask the source at every open (strict).
    pub revalidate_on_open: bool,
}

/// Debug switches that turn off a kernel feature, so that the path without it can be tested on a kernel that has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DisabledFeatures {
    pub passthrough: bool,
    pub no_open: bool,
    pub readdirplus: bool,
    pub landlock: bool,
    pub populate_write: bool,
    pub splice: bool,
}

/// Debug: what a worker does to itself at a file of this name, so that what kills workers can be tested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InjectedFault {
    /// The last component of a path.
    pub name: String,
    #[serde(rename = "do")]
    pub what: FaultKind,
    /// Only while fewer injected_faults than this were done on the mount.
    #[serde(default = "always")]
    pub times: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    Abort,
    /// Wait for what never comes.
    Deadlock,
    /// An endless loop.
    Spin,
    /// Take memory until it is stopped.
    Allocate,
}

fn always() -> u32 {
    u32::MAX
}

/// Worker → agent.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromWorker {
    /// Started, warmed up, waiting for `Assign`. The first variant and its first field for ever, so that a worker of
    /// another build is recognised: `protocol` is its [`version::WORKER`].
    Ready { protocol: u32 },
    /// The session exists and its self-tests passed; the INIT reply as recorded in the shared memory, header included.
    Answered { init_reply: Vec<u8>, mode: Mode },
    /// The device is being read.
    Serving,
    /// The worker cannot go on; a person reads this. It exits afterwards.
    Failed { why: String },
    Ask {
        id: u64,
        /// The request on whose behalf is asked; 0: none.
        unique: u64,
        body: Ask,
    },
    /// Files that were read since the last such message (cache file ids, with repetitions folded), for eviction's sake.
    Touched { files: Vec<u64> },
    /// A sequential reader has passed the mark that the last `Ready` set: fetch on.
    Advance { file: u64, offset: u64 },
    /// What `Uncached` lent under this number was copied: the agent empties it.
    GivenBack { number: u64 },
    /// Counters since the last such message.
    Counted(Counts),
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Make the metadata store know this name (or that it does not exist), as fresh as the volume demands. → `Stored`
    Lookup { parent: u64, name: Vec<u8> },
    /// Make the metadata store hold the listing of this directory. → `Stored`
    List { dir: u64 },
    /// Make the attributes of this inode as fresh as the volume demands; `force`: ask the source now. → `Stored`
    Attributes { ino: u64, force: bool },
    /// The cache file of this version of this inode. A read follows: a small file may be brought in.
    /// → `File`
    File { ino: u64, version: u32 },
    /// How much of this version of this inode is in the cache? Looking fetches nothing. → `Cached`
    Cached { ino: u64, version: u32 },
    /// This file, which is not whole, is being opened: say when that may go on. → `Stored`
    Open { ino: u64, version: u32 },
    /// Bring these bytes in. → `Present` or `Uncached`
    Read { file: u64, offset: u64, len: u32 },
    /// The cache cannot be read, however often it is filled: bring these bytes past it. → `Uncached`
    Direct { ino: u64, version: u32, offset: u64, len: u32 },
    /// The cache file gave an I/O error or a short read: drop it. → `Stored`
    Damaged { file: u64 },
    /// A passthrough backing id for this cache file. → `Backing`
    BackingOpen { file: u64 },
    /// → `Stored`
    BackingClose { id: u32 },
    /// Which of these threads are being killed? → `Dying`
    Dying { tids: Vec<u32> },
    /// → `Space`
    Space,
    /// In mode [`Mode::Writable`]. → `Writable`
    Writable(Operation),
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// Look into the metadata store.
    Stored,
    /// Attached: the data file, read-only; and, unless `whole`, the presence bitmap (one bit per block, little endian).
    File {
        file: u64,
        size: u64,
        whole: bool,
    },
    Cached {
        bytes: u64,
    },
    /// The range is in the cache file and verified. `mark`: when a reader passes this offset, say `Advance`.
    Present {
        mark: Option<u64>,
    },
    /// That cache file was dropped meanwhile (evicted, damaged): ask `File` again and read from what comes.
    Gone,
    /// The cache could not take the bytes: here they are, in an attached memory file, from offset 0, until
    /// [`FromWorker::GivenBack`] says that they were copied.
    Uncached {
        len: u32,
        number: u64,
    },
    Backing {
        id: u32,
    },
    Dying {
        tids: Vec<u32>,
    },
    Space {
        total_bytes: u64,
        total_inodes: u64,
    },
    Writable {
        done: Result<Done, Wrong>,
        /// The kernel may believe it until then, milliseconds of the clock of names; 0: for no time.
        until_ms: u64,
    },
}

/// What the worker did since it last said so. All are counts or bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    pub lookups: u64,
    pub opens_passthrough: u64,
    pub opens_kept: u64,
    pub opens_estale: u64,
    /// READ requests answered from the cache file without the agent.
    pub reads_hit: u64,
    pub bytes_hit: u64,
    /// READ requests, of either kind, whose bytes went to the kernel without a copy in the worker.
    pub reads_spliced: u64,
    /// READ requests that had to ask the agent.
    pub reads_miss: u64,
    pub bytes_miss: u64,
    pub reads_uncached: u64,
    pub readdirs: u64,
    /// Answered from the metadata store without the agent.
    pub metadata_hits: u64,
    pub metadata_misses: u64,
    pub interrupts: u64,
    pub interrupted: u64,
    pub replayed: u64,
    /// Times that the in-flight table or the staging buffers were full.
    pub table_full: u64,
}

pub fn send<T: Serialize>(socket: &Packet, message: &T, fds: &[BorrowedFd<'_>]) -> Result<(), PacketError> {
    let body = postcard::to_stdvec(message).map_err(|e| PacketError::Malformed(e.to_string()))?;
    socket.send(&body, fds)
}

/// As [`send`], but a full queue is `TimedOut` at once.
pub fn try_send<T: Serialize>(
    socket: &Packet,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<(), PacketError> {
    let body = postcard::to_stdvec(message).map_err(|e| PacketError::Malformed(e.to_string()))?;
    socket.try_send(&body, fds)
}

pub fn recv<T: for<'de> Deserialize<'de>>(
    socket: &Packet,
    buffer: &mut [u8],
) -> Result<(T, Vec<OwnedFd>), PacketError> {
    let (body, fds) = socket.recv(buffer)?;
    let message = postcard::from_bytes(body).map_err(|e| PacketError::Malformed(e.to_string()))?;
    Ok((message, fds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire() {
        let (a, b) = Packet::pair().unwrap();
        let body = Ask::Lookup { parent: 1, name: b"x\xff".to_vec() };
        send(&a, &FromWorker::Ask { id: 9, unique: 4, body }, &[]).unwrap();
        let mut buffer = vec![0; crate::MAX_MESSAGE];
        let (message, _) = recv::<FromWorker>(&b, &mut buffer).unwrap();
        assert!(matches!(
            message,
            FromWorker::Ask { id: 9, unique: 4, body: Ask::Lookup { parent: 1, name } } if name == b"x\xff"
        ));
    }

    #[test]
    fn garbage_from_a_worker_is_malformed() {
        let (a, b) = Packet::pair().unwrap();
        a.send(&[0xff; 40], &[]).unwrap();
        let mut buffer = vec![0; crate::MAX_MESSAGE];
        assert!(matches!(recv::<FromWorker>(&b, &mut buffer), Err(PacketError::Malformed(_))));
    }
}
