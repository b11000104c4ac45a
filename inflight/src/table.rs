//! The requests in flight: each is recorded before it is executed, claimed by the thread that answers it, and freed.
//!
//! Unique id and state share one atomic word. Apart from each other, a late answerer could check the id of one request
//! and free the slot of the next.

use super::{BODIES_AT, Counter, HIGH_SLOT_AT, Inflight, NOTES_AT, WORDS_AT};
use crate::sync::{AtomicU32, AtomicU64};
use fuse_abi::InHeader;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Requests in flight at most: the blocked threads of a pod, and then some.
pub const SLOTS: usize = 16_384;
/// Longest request that is copied into its slot, bytes.
pub(crate) const INLINE_BYTES: usize = 512;
pub(super) const NOTE_BYTES: usize = 64;
/// One death may be any request's; one that was there again at the second is a suspect.
pub(super) const SUSPECT_DEATHS: u32 = 2;

pub(super) const FREE: u64 = 0;
pub(super) const FILLING: u64 = 1;
pub(super) const WAITING: u64 = 2;
pub(super) const ORPHAN: u64 = 3;
pub(super) const ANSWERING: u64 = 4;
/// As WAITING, and an operation is under way whose outcome its caller must learn: no EINTR any more.
pub(super) const OPERATING: u64 = 5;
const STATE_BITS: u32 = 3;
const STATE: u64 = (1 << STATE_BITS) - 1;

// Fields of a note, bytes from its start.
const ACTIVE: usize = 0; // u64: unique of the request while a thread executes it
const NODEID: usize = 8; // u64
const LEN: usize = 16; // u32
const PLACE: usize = 20; // u32: 0 = inline, k + 1 = staging buffer k
const PID: usize = 24; // u32
const OPCODE: usize = 28; // u32
const FLAGS: usize = 32; // u32
const DEATHS: usize = 36; // u32
const EFFECT_OF: usize = 40; // u64: unique of the request whose effect was noted last

const INTERRUPTED: u32 = 1;
const BEGUN: u32 = 4;

/// A slot's index; always in bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub(super) usize);

/// The right to answer one request: its holder answers, every other thread is late.
#[derive(Debug)]
#[must_use = "a claimed request must be answered or released"]
pub struct Claim {
    slot: usize,
    unique: u64,
    /// Of the request before it was claimed.
    state: u64,
}

impl Claim {
    pub fn unique(&self) -> u64 {
        self.unique
    }
}

/// What the predecessor left.
#[derive(Debug)]
pub enum Orphan {
    Request(Slot, InHeader),
    /// Its bytes make no sense: only an error can be answered.
    Torn {
        unique: u64,
    },
    /// Only suspects are left, and one of them is being executed: ask again.
    Later,
}

/// A request whose caller has a signal pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted {
    pub unique: u64,
    /// Thread id in the PID namespace of the mounting process; 0: the caller is not visible from there.
    pub pid: u32,
}

pub(super) fn word(unique: u64, state: u64) -> u64 {
    unique << STATE_BITS | state
}
pub(super) fn unique_of(word: u64) -> u64 {
    word >> STATE_BITS
}
pub(super) fn state_of(word: u64) -> u64 {
    word & STATE
}

impl Inflight {
    /// Records the request that lies in staging buffer `stage`; None: the table is full.
    pub fn put(&self, stage: usize, header: &InHeader) -> Option<Slot> {
        self.put_as(stage, header, WAITING)
    }

    pub(super) fn put_as(&self, stage: usize, header: &InHeader, state: u64) -> Option<Slot> {
        let len = header.len as usize;
        assert!(
            stage < self.stages() && len <= self.stage_bytes_max(),
            "the caller has checked the request's length"
        );
        let filling = word(header.unique, FILLING);
        let slot = (0..SLOTS).find(|&slot| {
            let w = self.word(slot);
            w.load(Relaxed) == FREE && w.compare_exchange(FREE, filling, AcqRel, Relaxed).is_ok()
        })?;
        let place = if len <= INLINE_BYTES {
            let mut body = [0; INLINE_BYTES];
            self.stage_bytes(stage, &mut body[..len]);
            self.memory.store_after(BODIES_AT + slot * INLINE_BYTES, &body[..len]);
            0
        } else {
            self.pin_stage(stage, header.unique);
            stage as u32 + 1
        };
        // Release, here and above: whoever sees a byte, the length, the place or the caller of this request sees that
        // the slot is not the request's before it any more (`head`, `interrupted`).
        self.note32(slot, LEN).store(header.len, Release);
        self.note32(slot, PLACE).store(place, Release);
        self.note32(slot, PID).store(header.pid, Release);
        self.note32(slot, OPCODE).store(header.opcode, Relaxed);
        self.note32(slot, FLAGS).store(0, Relaxed);
        self.note32(slot, DEATHS).store(0, Relaxed);
        self.note64(slot, NODEID).store(header.nodeid, Relaxed);
        self.note64(slot, ACTIVE).store(if state == WAITING { header.unique } else { 0 }, Relaxed);
        self.memory.u32(HIGH_SLOT_AT).fetch_max(slot as u32 + 1, AcqRel);
        self.word(slot).store(word(header.unique, state), Release); // recorded from here on
        Some(Slot(slot))
    }

    /// The right to answer `unique`; None: it has been answered, or is being answered.
    pub fn claim(&self, unique: u64) -> Option<Claim> {
        self.claim_unless(unique, &[ANSWERING])
    }

    /// The same for a caller that has nothing to tell but EINTR; None also while an operation is brought about.
    pub fn claim_to_interrupt(&self, unique: u64) -> Option<Claim> {
        self.claim_unless(unique, &[ANSWERING, OPERATING])
    }

    fn claim_unless(&self, unique: u64, states: &[u64]) -> Option<Claim> {
        loop {
            let (Slot(slot), current) = self.find(unique)?;
            if states.contains(&state_of(current)) {
                return None;
            }
            if self.word(slot).compare_exchange(current, word(unique, ANSWERING), AcqRel, Relaxed).is_ok() {
                return Some(Claim { slot, unique, state: state_of(current) });
            }
        }
    }

    /// From here on `unique` is answered by the thread that works on it alone, and keeps its slot. None: it is
    /// answered.
    pub(super) fn begin_operation(&self, unique: u64) -> Option<Slot> {
        let (Slot(slot), _) = self.find(unique)?;
        let (waiting, operating) = (word(unique, WAITING), word(unique, OPERATING));
        self.word(slot).compare_exchange(waiting, operating, AcqRel, Relaxed).ok()?;
        self.note32(slot, FLAGS).fetch_or(BEGUN, AcqRel);
        Some(Slot(slot))
    }

    pub(super) fn has_begun(&self, slot: usize) -> bool {
        self.note32(slot, FLAGS).load(Acquire) & BEGUN != 0
    }

    /// The kernel has the answer, or does not want one any more.
    pub fn answered(&self, claim: Claim) {
        self.word(claim.slot).store(FREE, Release);
    }

    /// The kernel refused this answer and still waits for another; no EINTR if an operation was under way.
    pub fn refused(&self, claim: Claim) {
        self.word(claim.slot).store(word(claim.unique, claim.state), Release);
    }

    /// Takes up one request that the predecessor left, into `buffer`; operations that had begun come first, suspects
    /// last.
    pub fn next_orphan(&self, buffer: &mut [u8]) -> Option<Orphan> {
        if self.orphans_word().load(Acquire) == 0 {
            return None;
        }
        if self.begun_orphans_word().load(Acquire) != 0 {
            match self.take_first(buffer, true) {
                Some(orphan) => return Some(orphan),
                None => self.begun_orphans_word().store(0, Release),
            }
        }
        let orphan = self.take_first(buffer, false).or_else(|| self.take_suspect(buffer));
        if orphan.is_none() {
            self.orphans_word().store(0, Release);
        }
        orphan
    }

    /// `begun`: of the operations that had, suspects or not, for nothing may come between.
    fn take_first(&self, buffer: &mut [u8], begun: bool) -> Option<Orphan> {
        (0..self.high_slot()).find_map(|slot| {
            let current = self.word(slot).load(Acquire);
            let due = if begun { self.has_begun(slot) } else { self.deaths_at(slot) < SUSPECT_DEATHS };
            let wanted = state_of(current) == ORPHAN && due;
            if wanted { self.take_orphan(slot, current, buffer) } else { None }
        })
    }

    fn take_suspect(&self, buffer: &mut [u8]) -> Option<Orphan> {
        (0..self.high_slot()).find_map(|slot| {
            let current = self.word(slot).load(Acquire);
            if state_of(current) != ORPHAN {
                return None;
            }
            match self.is_next_suspect(unique_of(current)) {
                true => self.take_orphan(slot, current, buffer),
                false => Some(Orphan::Later),
            }
        })
    }

    /// None: answered EINTR, or another thread was faster.
    fn take_orphan(&self, slot: usize, current: u64, buffer: &mut [u8]) -> Option<Orphan> {
        let unique = unique_of(current);
        self.word(slot).compare_exchange(current, word(unique, WAITING), AcqRel, Relaxed).ok()?;
        self.note64(slot, ACTIVE).store(unique, Release);
        self.count(Counter::Replayed);
        Some(match self.body(Slot(slot), buffer).filter(|h| h.unique == unique) {
            Some(header) => Orphan::Request(Slot(slot), header),
            None => Orphan::Torn { unique },
        })
    }

    /// Makes this suspect the one that is executed, unless another one has not been answered yet.
    fn is_next_suspect(&self, unique: u64) -> bool {
        let suspect = self.suspect_word();
        let before = suspect.load(Acquire);
        if before != 0 && before != unique && self.find(before).is_some() {
            return false;
        }
        suspect.compare_exchange(before, unique, AcqRel, Relaxed).is_ok()
    }

    /// The thread that took this request does something else now: the request waits, it is not being executed. Only
    /// requests under execution are blamed for a worker's death.
    pub fn park(&self, slot: Slot, unique: u64) {
        let _ = self.note64(slot.0, ACTIVE).compare_exchange(unique, 0, AcqRel, Relaxed);
    }

    /// A request that waited is being executed again.
    pub fn resume(&self, unique: u64) {
        if let Some((slot, _)) = self.find(unique) {
            self.note64(slot.0, ACTIVE).store(unique, Release);
        }
    }

    /// A request that was executed and not answered waits again.
    pub fn suspend(&self, unique: u64) {
        if let Some((slot, _)) = self.find(unique) {
            self.park(slot, unique);
        }
    }

    /// Notes that this request did something countable that outlives it, so that a successor does not count it twice.
    /// False: it had been noted already, or the request is gone.
    ///
    /// The request may be answered EINTR meanwhile, and its slot be another's: what that one notes is left alone.
    pub fn set_effect(&self, unique: u64) -> bool {
        let Some((Slot(slot), _)) = self.find(unique) else { return false };
        let noted = self.note64(slot, EFFECT_OF);
        loop {
            // In this order: what the slot's next request notes comes after its word.
            let before = noted.load(Acquire);
            let is_here = unique_of(self.word(slot).load(Acquire)) == unique;
            if before == unique || !is_here {
                return false;
            }
            if noted.compare_exchange(before, unique, AcqRel, Relaxed).is_ok() {
                return true;
            }
        }
    }

    pub fn has_effect(&self, unique: u64) -> bool {
        self.find(unique).is_some_and(|(slot, _)| self.note64(slot.0, EFFECT_OF).load(Acquire) == unique)
    }

    /// Remembers that the caller of `unique` was signalled. False: no such request (yet, or any more).
    pub fn mark_interrupted(&self, unique: u64) -> bool {
        let found = self.find(unique);
        if let Some((slot, _)) = found {
            // The slot may be reused meanwhile: then a stranger is asked about, and found alive.
            self.note32(slot.0, FLAGS).fetch_or(INTERRUPTED, AcqRel);
        }
        found.is_some()
    }

    /// Every request of this worker that waits and whose caller was signalled. Not the orphans: what a dead worker did
    /// for them is undone by the worker that executes them again.
    pub fn interrupted(&self) -> Vec<Interrupted> {
        let mut found = Vec::new();
        for slot in 0..self.high_slot() {
            let current = self.word(slot).load(Acquire);
            if state_of(current) == WAITING && self.note32(slot, FLAGS).load(Acquire) & INTERRUPTED != 0 {
                let pid = self.note32(slot, PID).load(Acquire);
                // Unchanged: mark and pid belong to this request.
                if self.word(slot).load(Acquire) == current {
                    found.push(Interrupted { unique: unique_of(current), pid });
                }
            }
        }
        found
    }

    /// Requests recorded and not answered.
    pub fn in_flight(&self) -> usize {
        (0..self.high_slot()).filter(|&slot| state_of(self.word(slot).load(Relaxed)) >= WAITING).count()
    }

    pub fn is_in_flight(&self, unique: u64) -> bool {
        self.find(unique).is_some()
    }

    /// A recorded request and its word. Low slots are the busy ones, so this looks at few cache lines.
    pub(super) fn find(&self, unique: u64) -> Option<(Slot, u64)> {
        (0..self.high_slot()).find_map(|slot| {
            let current = self.word(slot).load(Acquire);
            (unique_of(current) == unique && state_of(current) >= WAITING).then_some((Slot(slot), current))
        })
    }

    pub(super) fn word(&self, slot: usize) -> &AtomicU64 {
        self.memory.u64(WORDS_AT + slot * 8)
    }
    /// Length and place (see `PLACE`) of a request, as noted: not checked.
    pub(super) fn noted(&self, slot: usize) -> (usize, usize) {
        let [len, place] = [LEN, PLACE].map(|field| self.note32(slot, field).load(Acquire) as usize);
        (len, place)
    }
    /// As a process does that has been taken over.
    #[cfg(test)]
    #[cfg(not(loom))]
    pub(super) fn renote(&self, slot: usize, len: u32, place: u32) {
        self.note32(slot, LEN).store(len, Release);
        self.note32(slot, PLACE).store(place, Release);
    }
    pub(super) fn note_nodeid(&self, slot: usize) -> u64 {
        self.note64(slot, NODEID).load(Acquire)
    }
    pub(super) fn note_opcode(&self, slot: usize) -> u32 {
        self.note32(slot, OPCODE).load(Acquire)
    }
    pub(super) fn deaths_at(&self, slot: usize) -> u32 {
        self.note32(slot, DEATHS).load(Acquire)
    }
    pub(super) fn is_active(&self, slot: usize, unique: u64) -> bool {
        self.note64(slot, ACTIVE).load(Acquire) == unique
    }
    /// No thread executes it any more, and it is not to blame for that.
    pub(super) fn exonerate(&self, slot: usize) {
        self.note64(slot, ACTIVE).store(0, Release);
    }
    /// Blames the request if it was being executed, for so many deaths. Returns how many that makes.
    pub(super) fn blame(&self, slot: usize, unique: u64, weight: u32) -> u32 {
        let was_active = self.note64(slot, ACTIVE).swap(0, AcqRel) == unique;
        let deaths = self.note32(slot, DEATHS);
        let count = deaths.load(Relaxed).saturating_add(if was_active { weight } else { 0 });
        deaths.store(count, Release);
        count
    }

    fn note64(&self, slot: usize, field: usize) -> &AtomicU64 {
        self.memory.u64(NOTES_AT + slot * NOTE_BYTES + field)
    }
    fn note32(&self, slot: usize, field: usize) -> &AtomicU32 {
        self.memory.u32(NOTES_AT + slot * NOTE_BYTES + field)
    }
}
