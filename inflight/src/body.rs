//! A recorded request's bytes: where they lie, and how they get from there to whoever executes it.

use super::table::{INLINE_BYTES, Slot, WAITING, state_of, unique_of};
use super::{BODIES_AT, Inflight};
use fuse_abi::InHeader;
use std::sync::atomic::Ordering::Acquire;

/// Where a request's bytes lie in the memory, from its header on.
#[derive(Clone, Copy)]
struct Bytes {
    at: usize,
    len: usize,
}

impl Inflight {
    /// Copies a request's bytes to the front of `buffer`; None if the note makes no sense or the buffer is too small.
    pub fn body(&self, slot: Slot, buffer: &mut [u8]) -> Option<InHeader> {
        let Bytes { at, len } = self.noted_bytes(slot)?;
        self.memory.load(at, buffer.get_mut(..len)?);
        let header = InHeader::from_bytes(buffer.first_chunk()?);
        (header.len as usize == len).then_some(header)
    }

    /// Copies the front of the recorded request `unique` to the front of `out`, as much as there is or fits, and
    /// returns its header. None: no such request is in flight (any more), or its note makes no sense.
    ///
    /// For whoever executes what another process asks for on behalf of a request: this is what the kernel has said.
    /// (A worker that has been taken over can write here what it likes, but no more than it could have asked for.)
    pub fn head(&self, unique: u64, out: &mut [u8]) -> Option<InHeader> {
        let (slot, _) = self.find(unique)?;
        let Bytes { at, len } = self.noted_bytes(slot)?;
        // Once, so that the header that is returned is the one that is copied.
        let mut header = [0; InHeader::BYTES];
        self.memory.load_before(at, &mut header);
        let front = out.len().min(len);
        let (own, rest) = out[..front].split_at_mut(front.min(InHeader::BYTES));
        own.copy_from_slice(&header[..own.len()]);
        self.memory.load_before(at + InHeader::BYTES, rest);
        let header = InHeader::from_bytes(&header);
        let is_whole = header.unique == unique && header.len as usize == len;
        (is_whole && self.holds(slot, unique)).then_some(header)
    }

    /// Inside the memory, and in one place of the layout, whatever the note says. None: it makes no sense.
    fn noted_bytes(&self, slot: Slot) -> Option<Bytes> {
        let (len, place) = self.noted(slot.0);
        let (at, most) = match place {
            0 => (BODIES_AT + slot.0 * INLINE_BYTES, INLINE_BYTES),
            place if place <= self.stages() => (self.room.stage_at(place - 1), self.stage_bytes_max()),
            _ => return None,
        };
        (InHeader::BYTES..=most).contains(&len).then_some(Bytes { at, len })
    }

    /// Is the slot still this request's?
    fn holds(&self, slot: Slot, unique: u64) -> bool {
        let current = self.word(slot.0).load(Acquire);
        unique_of(current) == unique && state_of(current) >= WAITING
    }
}
