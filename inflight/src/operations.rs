//! Operations that must not happen twice (create, unlink, rename …): what is known of each, kept beside its request, so
//! that a successor that executes the request again answers from the record.
//!
//! ```text
//!            intend                   conclude               answered
//!  UNKNOWN ─────────► INTENDED ─────────────────► CONCLUDED ─────────► (the slot is free, the record void)
//!                        │  a death in between: has it happened?
//!                        └── resolve, by what the intent says
//! ```
//!
//! A record is named by the request's unique id, which the kernel never gives out again on this connection. Neither
//! intent nor outcome may hold a secret: this memory outlives the process that wrote it.

use super::{Inflight, OPERATIONS_AT};
use crate::sync::{AtomicU32, AtomicU64};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Longest intent, bytes.
pub(crate) const INTENT_BYTES: usize = 96;
/// Longest body of an answer, bytes: that of CREATE, fuse_entry_out and fuse_open_out, is 144.
pub(crate) const OUTCOME_BYTES: usize = 144;
pub(super) const RECORD_BYTES: usize = 264;

// Fields of a record, bytes from its start.
const KNOWN: usize = 0; // u64: unique << 1 | 0: intended, 1: concluded
const INTENT_LEN: usize = 8; // u32
const OUTCOME_LEN: usize = 12; // u32
const ERRNO: usize = 16; // u32
const INTENT: usize = 24;
const OUTCOME: usize = INTENT + INTENT_BYTES;
const _: () = assert!(OUTCOME + OUTCOME_BYTES == RECORD_BYTES);

/// How an operation ended, as its caller learns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// 0, or a positive errno.
    pub errno: i32,
    pub body: Vec<u8>,
}

/// What the executor of an operation can do. Nothing else may change the same objects from `intend` to the end, or
/// `resolve` mistakes a stranger's change for its own: operations on them take turns, and a successor brings those that
/// had begun to their end (`next_orphan` gives them first) before it begins others.
pub trait Operation {
    /// What tells later whether the operation has happened: the state before it, or the state that it makes.
    fn intend(&mut self) -> Vec<u8>;
    /// A process died after `intend`: the outcome, if the operation happened.
    fn resolve(&mut self, intent: &[u8]) -> Option<Outcome>;
    fn execute(&mut self) -> Outcome;
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum OperationError {
    /// Answered meanwhile: its caller is being killed. Nothing was done.
    #[error("the request has been answered")]
    Answered,
    #[error("an intent or outcome of {0} bytes does not fit")]
    Size(usize),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Recorded {
    Nothing,
    Intended(Vec<u8>),
    Concluded(Outcome),
}

impl Inflight {
    /// Brings the operation of request `unique` about, once, even if workers died in the middle of it; the outcome is
    /// recorded when this returns. To be called once for each time that the request is taken up.
    pub fn once(&self, unique: u64, operation: &mut dyn Operation) -> Result<Outcome, OperationError> {
        let slot = self.begin_operation(unique).ok_or(OperationError::Answered)?.0;
        let happened = match self.recorded(slot, unique) {
            Recorded::Concluded(outcome) => return Ok(outcome),
            Recorded::Intended(intent) => operation.resolve(&intent),
            Recorded::Nothing => {
                self.intend(slot, unique, &operation.intend())?;
                None
            }
        };
        let outcome = match happened {
            Some(outcome) => outcome,
            None => operation.execute(),
        };
        self.conclude(slot, unique, &outcome)?;
        Ok(outcome)
    }

    pub(super) fn recorded(&self, slot: usize, unique: u64) -> Recorded {
        let word = self.operation64(slot, KNOWN).load(Acquire);
        if word >> 1 != unique {
            return Recorded::Nothing; // of an earlier request in this slot
        }
        if word & 1 == 0 {
            return Recorded::Intended(self.bytes(slot, INTENT, INTENT_LEN, INTENT_BYTES));
        }
        let errno = self.operation32(slot, ERRNO).load(Relaxed) as i32;
        Recorded::Concluded(Outcome { errno, body: self.bytes(slot, OUTCOME, OUTCOME_LEN, OUTCOME_BYTES) })
    }

    fn intend(&self, slot: usize, unique: u64, intent: &[u8]) -> Result<(), OperationError> {
        if intent.len() > INTENT_BYTES {
            return Err(OperationError::Size(intent.len()));
        }
        self.memory.store(self.operation_at(slot, INTENT), intent);
        self.operation32(slot, INTENT_LEN).store(intent.len() as u32, Relaxed);
        self.operation64(slot, KNOWN).store(unique << 1, Release); // known from here on
        Ok(())
    }

    fn conclude(&self, slot: usize, unique: u64, outcome: &Outcome) -> Result<(), OperationError> {
        if outcome.body.len() > OUTCOME_BYTES {
            return Err(OperationError::Size(outcome.body.len()));
        }
        self.memory.store(self.operation_at(slot, OUTCOME), &outcome.body);
        self.operation32(slot, OUTCOME_LEN).store(outcome.body.len() as u32, Relaxed);
        self.operation32(slot, ERRNO).store(outcome.errno as u32, Relaxed);
        self.operation64(slot, KNOWN).store(unique << 1 | 1, Release); // known from here on
        Ok(())
    }

    fn bytes(&self, slot: usize, at: usize, len_at: usize, most: usize) -> Vec<u8> {
        let len = self.operation32(slot, len_at).load(Relaxed) as usize;
        let mut bytes = vec![0; len.min(most)];
        self.memory.load(self.operation_at(slot, at), &mut bytes);
        bytes
    }

    fn operation_at(&self, slot: usize, field: usize) -> usize {
        OPERATIONS_AT + slot * RECORD_BYTES + field
    }
    fn operation64(&self, slot: usize, field: usize) -> &AtomicU64 {
        self.memory.u64(self.operation_at(slot, field))
    }
    fn operation32(&self, slot: usize, field: usize) -> &AtomicU32 {
        self.memory.u32(self.operation_at(slot, field))
    }
}
