//! Which nodeids are open in passthrough, and which have been answered ESTALE: the connection's memory, because both
//! are properties of a nodeid for life and a worker's life is shorter.

use super::{BACKINGS_AT, GIVEN_AT, HIGH_BACKING_AT, Inflight};
use crate::sync::{AtomicU32, AtomicU64};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Nodeids that can be open in passthrough at once.
pub const BACKINGS: usize = 8_192;
pub(super) const ENTRY_BYTES: usize = 32;
pub(super) const GIVEN_SETS: usize = 512;
const GIVEN_WAYS: usize = 8; // one cache line per set

const NODEID: usize = 0;
const FILE: usize = 8;
const ID: usize = 16;
const REFS: usize = 20;

/// How the opens of one nodeid are answered while at least one of them lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    pub nodeid: u64,
    /// The kernel's backing id; 0: passthrough was not possible, the opens are ordinary ones.
    pub id: u32,
    /// Opens that the kernel has not released. Too high by one for every worker that died between counting and noting
    /// it: an id may be kept too long, never closed too early.
    pub refs: u32,
    /// The cache file behind it.
    pub file: u64,
}

impl Inflight {
    /// Records a backing id, to be done before the reply that uses it. None: the table is full. One thread at a time.
    pub fn add_backing(&self, nodeid: u64, id: u32, file: u64) -> Option<usize> {
        let index = (0..BACKINGS).find(|&i| self.backing64(i, NODEID).load(Acquire) == 0)?;
        self.backing64(index, FILE).store(file, Relaxed);
        self.backing32(index, ID).store(id, Relaxed);
        self.backing32(index, REFS).store(0, Relaxed);
        self.memory.u32(HIGH_BACKING_AT).fetch_max(index as u32 + 1, AcqRel);
        self.backing64(index, NODEID).store(nodeid, Release);
        Some(index)
    }

    pub fn backing(&self, index: usize) -> Option<Backing> {
        let nodeid = self.backing64(index, NODEID).load(Acquire);
        (nodeid != 0).then(|| Backing {
            nodeid,
            id: self.backing32(index, ID).load(Acquire),
            refs: self.backing32(index, REFS).load(Acquire),
            file: self.backing64(index, FILE).load(Acquire),
        })
    }

    /// Every recorded entry with its index.
    pub fn backings(&self) -> Vec<(usize, Backing)> {
        let high = (self.memory.u32(HIGH_BACKING_AT).load(Acquire) as usize).min(BACKINGS);
        (0..high).filter_map(|i| Some((i, self.backing(i)?))).collect()
    }

    /// One more open. To be noted with `set_effect` right afterwards.
    pub fn ref_backing(&self, index: usize) {
        self.backing32(index, REFS).fetch_add(1, AcqRel);
    }

    /// One open less. To be noted with `set_effect` right before. Returns what is left.
    pub fn unref_backing(&self, index: usize) -> u32 {
        let refs = self.backing32(index, REFS);
        let before = refs.fetch_update(AcqRel, Acquire, |n| Some(n.saturating_sub(1))).unwrap_or(0);
        before.saturating_sub(1)
    }

    /// Forgets an entry, to be done before its id is closed: an id that is closed must never be handed out again.
    pub fn remove_backing(&self, index: usize) {
        self.backing64(index, NODEID).store(0, Release);
    }

    /// Notes that OPEN of this nodeid is answered ESTALE; false: it has been before. Remembers the last few thousand:
    /// a nodeid that was forgotten is answered ESTALE once more.
    pub fn give_estale(&self, nodeid: u64) -> bool {
        let mixed = nodeid.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let set = (mixed >> 32) as usize % GIVEN_SETS;
        let way = |i: usize| self.memory.u64(GIVEN_AT + (set * GIVEN_WAYS + i) * 8);
        if (0..GIVEN_WAYS).any(|i| way(i).load(Acquire) == nodeid) {
            return false;
        }
        let free = (0..GIVEN_WAYS).find(|&i| way(i).compare_exchange(0, nodeid, AcqRel, Relaxed).is_ok());
        if free.is_none() {
            way((mixed >> 20) as usize % GIVEN_WAYS).store(nodeid, Release);
        }
        true
    }

    fn backing64(&self, index: usize, field: usize) -> &AtomicU64 {
        assert!(index < BACKINGS, "callers got the index from this table");
        self.memory.u64(BACKINGS_AT + index * ENTRY_BYTES + field)
    }
    fn backing32(&self, index: usize, field: usize) -> &AtomicU32 {
        assert!(index < BACKINGS, "callers got the index from this table");
        self.memory.u32(BACKINGS_AT + index * ENTRY_BYTES + field)
    }
}
