//! The memory that a FUSE connection's worker shares with the agent and the broker, and that outlives the worker.
//!
//! A worker reads every request into this memory before anything looks at it, so that its successor can take up what
//! the dead one had taken. Nothing here knows what a request means.
//!
//! ```text
//!  page 0    header: format, INIT and its reply, heartbeat, counters; seats: what the agent executes (`execution`)
//!  words     one word per request in flight: unique << 3 | state      dense: few cache lines to scan
//!  notes     64 bytes each: who asks, where the body lies, marks
//!  bodies    512 bytes each; longer requests keep their staging buffer
//!  stages    64 staging buffers of 8 KiB, one per thread that reads the device
//!  backing   passthrough: nodeid → backing id, references, cache file
//!  given     nodeids whose OPEN has been answered ESTALE
//!  operations  264 bytes per word: what is known of an operation that must not happen twice
//!  large stages  16 buffers of 1 MiB and a page, instead of the others: only where there may be WRITEs (`Room`)
//! ```
//!
//! A slot's life:
//!
//! ```text
//!          put                      claim                answered
//!  FREE ─────────► FILLING ─► WAITING ─────► ANSWERING ─────────► FREE
//!    ▲                          ▲   ▲            │ refused: the kernel still waits
//!    │ collect: answered        │   └────────────┘
//!    │ or half filled    next_orphan
//!    └───────────────────── ORPHAN ◄──── collect: the worker died, the kernel still waits
//! ```
//!
//! A request in whose execution two workers died, or one agent, is a *suspect*: suspects are executed again one at a
//! time, after all others, and while one of them is being executed a death is blamed on no other request.
//!
//! A request that changes something is OPERATING between WAITING and ANSWERING (`operations`): no thread answers it
//! EINTR.
//!
//! Slots are given out lowest first, so that an idle volume touches a handful of pages.

mod backing;
mod body;
mod collect;
mod copy;
mod device;
mod execution;
#[cfg(fuzzing)]
pub mod fuzz;
#[cfg(test)]
#[cfg(not(loom))]
#[allow(dead_code, reason = "each crate uses some of it")]
#[path = "../../testkit/src/golden.rs"]
mod golden;
#[cfg(test)]
#[cfg(not(loom))]
mod image;
#[cfg_attr(all(loom, test), path = "model/memory.rs")]
mod memory;
#[cfg(test)]
#[cfg(loom)]
mod model;
mod operations;
mod presence;
mod room;
mod stage;
mod sync;
mod table;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use backing::{BACKINGS, Backing};
pub use collect::{Blame, Collected, Poisoned, Subject};
pub use device::{Kernel, Probe, answer_errno, probe, probe_works};
pub use execution::{Behalf, OnBehalf, carry, carry_job, mark_aborts, on_behalf};
pub use operations::{Operation, OperationError, Outcome};
pub use presence::{add_present, present};
pub use room::Room;
pub use table::{Claim, Interrupted, Orphan, SLOTS, Slot};

use memory::Memory;
use rustix::fs::FlockOperation;
use stage::{STAGE_BYTES, STAGES};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use sync::{AtomicU32, AtomicU64};
use table::INLINE_BYTES;
use version::{INFLIGHT, neighbours};

/// What a map begins with: a mark, and the version of the layout, which only grows where it was empty from one version
/// to the next. So a map of a neighbour's is used as it is, and one of any other is refused.
const MARK: u64 = u64::from_be_bytes(*b"MPFLT\0\0\0");
const VERSION_MASK: u64 = 0xff;

/// Longest INIT request or reply that is kept, bytes. Today's are 104 and 80.
pub(crate) const INIT_BYTES: usize = 512;

// Offsets, bytes. The header's fields each have their own line where both sides write often.
const FORMAT_AT: usize = 0;
const HEARTBEAT_AT: usize = 64;
const INIT_LEN_AT: usize = 128;
const REPLY_LEN_AT: usize = 132;
const HIGH_SLOT_AT: usize = 192;
const ORPHANS_AT: usize = 196;
const BEGUN_ORPHANS_AT: usize = 200;
const SUSPECT_AT: usize = 208;
const HIGH_BACKING_AT: usize = 256;
const CREATED_BY_AT: usize = 320; // for tests: what only a later version writes; this one leaves it empty
const COUNTERS_AT: usize = 512;
const INIT_AT: usize = 1024;
const REPLY_AT: usize = INIT_AT + INIT_BYTES;
/// Empty in what a build before the seats wrote.
const SEATS_AT: usize = REPLY_AT + INIT_BYTES;
const _: () = assert!(SEATS_AT + execution::SEATS * execution::SEAT_BYTES <= WORDS_AT);
const WORDS_AT: usize = 4096;
const NOTES_AT: usize = WORDS_AT + SLOTS * 8;
const BODIES_AT: usize = NOTES_AT + SLOTS * table::NOTE_BYTES;
const STAGE_WORDS_AT: usize = BODIES_AT + SLOTS * INLINE_BYTES;
const STAGES_AT: usize = STAGE_WORDS_AT + STAGES * stage::WORD_BYTES;
const BACKINGS_AT: usize = STAGES_AT + STAGES * STAGE_BYTES;
const GIVEN_AT: usize = BACKINGS_AT + BACKINGS * backing::ENTRY_BYTES;
const OPERATIONS_AT: usize = GIVEN_AT + backing::GIVEN_SETS * 64;
const BYTES: usize = (OPERATIONS_AT + SLOTS * operations::RECORD_BYTES).next_multiple_of(4096);

#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    #[error("the connection's shared memory cannot be mapped: {0}")]
    Map(#[from] io::Error),
    #[error(
        "the connection's shared memory has format {found:#x}, this build reads version {INFLIGHT} and its neighbours"
    )]
    Format { found: u64 },
    #[error("an INIT message of {0} bytes does not fit")]
    InitSize(usize),
}

/// What the two sides count here, because a worker's own counters die with it. Never reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Times that a reader waited for a free slot or staging buffer.
    Full,
    /// Requests that a successor took up.
    Replayed,
    /// FUSE_INTERRUPT messages.
    Interrupts,
    /// Requests answered EINTR because their caller is being killed.
    Interrupted,
    /// FUSE_INTERRUPT messages that came before their request and were queued again.
    Requeued,
    /// Replies swallowed because the request had been answered already, or refused because its caller was gone.
    Dropped,
    /// Debug: how often a worker has injected its fault.
    InjectedFaults,
}

/// One connection's shared memory, mapped.
#[derive(Debug)]
pub struct Inflight {
    memory: Memory,
    room: Room,
    /// Kept open while this process is the connection's worker: closing it would give the lock up.
    held: Option<OwnedFd>,
}

impl Inflight {
    /// A new connection's memory file: empty, of fixed size, mostly untouched (about 15 MB of address space, 32 MB with
    /// room for writes).
    pub fn create(room: Room) -> io::Result<OwnedFd> {
        let fd = memory::create(room.bytes())?;
        let memory = Memory::map(&fd, room.bytes())?;
        if version::IS_LATER {
            memory.u64(CREATED_BY_AT).store(u64::from(INFLIGHT), Relaxed);
        }
        memory.u64(FORMAT_AT).store(MARK | u64::from(INFLIGHT), Release);
        Ok(fd)
    }

    pub fn map(fd: impl AsFd) -> Result<Self, InflightError> {
        let room = Room::of(rustix::fs::fstat(&fd).map_err(io::Error::from)?.st_size as u64);
        let memory = Memory::map(fd, room.bytes())?;
        let found = memory.u64(FORMAT_AT).load(Acquire);
        if found & !VERSION_MASK != MARK || !neighbours((found & VERSION_MASK) as u32, INFLIGHT) {
            return Err(InflightError::Format { found });
        }
        Ok(Self { memory, room, held: None })
    }

    /// As [`Self::map`], for the worker: this process holds the connection's lock until it ends, however it ends.
    /// False: a predecessor still has it, stuck in the kernel. It cannot be waited for.
    ///
    /// A lock of fcntl(2), because that one belongs to the process: it goes when the last of its threads has let go of
    /// its descriptors. Opening or closing another descriptor of the same memory in this process would break it.
    pub fn hold(fd: OwnedFd) -> Result<(Self, bool), InflightError> {
        let mut inflight = Self::map(&fd)?;
        let alone = rustix::fs::fcntl_lock(&fd, FlockOperation::NonBlockingLockExclusive).is_ok();
        inflight.held = Some(fd);
        Ok((inflight, alone))
    }

    /// Is any process the worker of this connection? Not to be asked by that process itself.
    pub fn is_held(fd: impl AsFd) -> bool {
        if rustix::fs::fcntl_lock(&fd, FlockOperation::NonBlockingLockExclusive).is_err() {
            return true;
        }
        let _ = rustix::fs::fcntl_lock(&fd, FlockOperation::NonBlockingUnlock); // ours: fails for no reason
        false
    }

    /// What this memory has room for; fixed since its creation.
    pub fn room(&self) -> Room {
        self.room
    }

    /// Records the kernel's INIT request, header included.
    pub fn set_init(&self, request: &[u8]) -> Result<(), InflightError> {
        self.set_message(INIT_AT, INIT_LEN_AT, request)
    }

    pub fn init(&self) -> Option<Vec<u8>> {
        self.message(INIT_AT, INIT_LEN_AT)
    }

    /// Records the worker's answer to INIT, header included.
    pub fn set_init_reply(&self, reply: &[u8]) -> Result<(), InflightError> {
        self.set_message(REPLY_AT, REPLY_LEN_AT, reply)
    }

    pub fn init_reply(&self) -> Option<Vec<u8>> {
        self.message(REPLY_AT, REPLY_LEN_AT)
    }

    /// Grows while the worker is alive inside; see the worker's heartbeat thread.
    pub fn heartbeat(&self) -> u64 {
        self.memory.u64(HEARTBEAT_AT).load(Relaxed)
    }

    pub fn beat(&self) {
        self.memory.u64(HEARTBEAT_AT).fetch_add(1, Relaxed);
    }

    pub fn count(&self, counter: Counter) {
        self.counter_word(counter).fetch_add(1, Relaxed);
    }

    pub fn counter(&self, counter: Counter) -> u64 {
        self.counter_word(counter).load(Relaxed)
    }

    fn counter_word(&self, counter: Counter) -> &AtomicU64 {
        self.memory.u64(COUNTERS_AT + counter as usize * 8)
    }

    fn set_message(&self, at: usize, len_at: usize, bytes: &[u8]) -> Result<(), InflightError> {
        if bytes.is_empty() || bytes.len() > INIT_BYTES {
            return Err(InflightError::InitSize(bytes.len()));
        }
        self.memory.store(at, bytes);
        self.memory.u32(len_at).store(bytes.len() as u32, Release);
        Ok(())
    }

    fn message(&self, at: usize, len_at: usize) -> Option<Vec<u8>> {
        let len = self.memory.u32(len_at).load(Acquire) as usize;
        if len == 0 || len > INIT_BYTES {
            return None;
        }
        let mut bytes = vec![0; len];
        self.memory.load(at, &mut bytes);
        Some(bytes)
    }

    /// One past the highest slot that was ever used, clamped: the other side may have written anything.
    fn high_slot(&self) -> usize {
        (self.memory.u32(HIGH_SLOT_AT).load(Acquire) as usize).min(SLOTS)
    }

    fn orphans_word(&self) -> &AtomicU32 {
        self.memory.u32(ORPHANS_AT)
    }

    /// Not 0: some orphans are operations that had begun.
    fn begun_orphans_word(&self) -> &AtomicU32 {
        self.memory.u32(BEGUN_ORPHANS_AT)
    }

    /// Unique of the suspect that is being executed again; 0: none.
    fn suspect_word(&self) -> &AtomicU64 {
        self.memory.u64(SUSPECT_AT)
    }
}
