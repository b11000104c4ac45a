//! The shared memory as a peer writes it that has been taken over: for the fuzz target `inflight`.

use super::memory::Memory;
use super::{
    BACKINGS, BACKINGS_AT, BODIES_AT, Blame, Collected, GIVEN_AT, Inflight, InflightError, Kernel, NOTES_AT,
    OPERATIONS_AT, Room, SLOTS, STAGE_WORDS_AT, STAGES, WORDS_AT, backing, operations, stage, table,
};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

/// Where things lie, how many there are and how far apart, bytes.
fn areas(room: Room) -> [(usize, usize, usize); 10] {
    [
        (0, 1, 1024),               // header
        (1024, 1, WORDS_AT - 1024), // INIT, its reply, seats
        (WORDS_AT, SLOTS, 8),       // words
        (NOTES_AT, SLOTS, table::NOTE_BYTES),
        (BODIES_AT, SLOTS, table::INLINE_BYTES),
        (STAGE_WORDS_AT, STAGES, stage::WORD_BYTES),
        (room.stages_at(), room.stages(), room.stage_bytes()),
        (BACKINGS_AT, BACKINGS, backing::ENTRY_BYTES),
        (GIVEN_AT, backing::GIVEN_SETS, 64),
        (OPERATIONS_AT, SLOTS, operations::RECORD_BYTES),
    ]
}

/// The other process, which may write any word at any time.
pub struct Peer {
    memory: Memory,
    room: Room,
}

impl Peer {
    pub fn map(fd: impl AsFd, room: Room) -> Result<Self, InflightError> {
        Ok(Self { memory: Memory::map(fd, room.bytes())?, room })
    }

    /// One word of one thing of one kind.
    pub fn write(&self, area: u8, index: usize, field: usize, word: u64) {
        let areas = areas(self.room);
        let (start, count, bytes) = areas[area as usize % areas.len()];
        self.memory.u64(start + index % count * bytes + field * 8 % bytes).store(word, Relaxed);
    }
}

/// [`Inflight::collect`] with a kernel that says what the target says.
pub fn collect(inflight: &Inflight, kernel: &mut dyn Kernel, blame: Blame) -> io::Result<Collected> {
    inflight.collect_with(kernel, blame)
}
