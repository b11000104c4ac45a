//! Checksums of what programs write, taken from the bytes in memory: what the disk gives back later must add up to them, and so must
//! what arrives at the store. Known of parts that were written in order, by one writer at a time; of others the disk is asked.

use super::parts;
use crate::lock::lock;
use crc_fast::{CrcAlgorithm, Digest};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;

const CRC32C: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;

/// Of one file.
#[derive(Default)]
pub(super) struct Sums(Mutex<State>);

#[derive(Default)]
struct State {
    /// Parts of which every byte is in it.
    whole: BTreeMap<u32, u32>,
    /// The part that is being written, up to which byte, and of what so far.
    open: Option<(u32, u64, Digest)>,
    /// Writes under way, and how often one has begun beside another one.
    writing: u32,
    meetings: u64,
}

/// A write under way. One that is dropped may have written something, or nothing.
pub(super) struct Writing<'s> {
    sums: &'s Sums,
    range: Range<u64>,
    meetings: u64,
    is_told: bool,
}

impl Sums {
    pub(super) fn begin(&self, range: Range<u64>) -> Writing<'_> {
        let mut state = lock(&self.0);
        state.writing += 1;
        state.meetings += u64::from(state.writing > 1);
        Writing { sums: self, range, meetings: state.meetings, is_told: false }
    }

    /// Of these bytes, if it is known. Nobody writes meanwhile.
    pub(super) fn of(&self, range: &Range<u64>) -> Option<u32> {
        let state = lock(&self.0);
        if state.writing > 0 {
            return None; // of a caller that has gone
        }
        let mut sum = 0;
        let mut at = range.start;
        while at < range.end {
            let part = parts::of(at);
            let all = parts::range(part);
            let end = all.end.min(range.end);
            let found = match state.whole.get(&part) {
                Some(found) if end == all.end => *found,
                _ => state.open.as_ref().filter(|(of, to, _)| *of == part && *to == end)?.2.finalize() as u32,
            };
            if at != all.start {
                return None;
            }
            let len = end - at;
            sum = crc_fast::checksum_combine(CRC32C, u64::from(sum), u64::from(found), len) as u32;
            at = end;
        }
        Some(sum)
    }

    /// The file has other bytes from here on.
    pub(super) fn clear(&self) {
        let mut state = lock(&self.0);
        state.whole.clear();
        state.open = None;
    }

    /// The file was cut off, or grew by a hole, between these sizes.
    pub(super) fn resized(&self, from: u64, to: u64) {
        lock(&self.0).forget(&(from..to.max(from.saturating_add(1))));
    }
}

impl State {
    fn forget(&mut self, range: &Range<u64>) {
        let touched = parts::of(range.start)..=parts::of(range.end.saturating_sub(1).max(range.start));
        self.whole.retain(|part, _| !touched.contains(part));
        self.open.take_if(|(part, ..)| touched.contains(part));
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let (mut at, mut bytes) = (offset, bytes);
        while !bytes.is_empty() {
            let part = parts::of(at);
            let all = parts::range(part);
            let len = (all.end - at).min(bytes.len() as u64);
            let (piece, rest) = bytes.split_at(len as usize);
            let is_next = self.open.as_ref().is_some_and(|(of, to, _)| *of == part && *to == at);
            if !is_next {
                self.forget(&(at..at + len));
            }
            if at == all.start {
                self.open = Some((part, at, Digest::new(CRC32C)));
            }
            if let Some((_, to, digest)) = self.open.as_mut().filter(|(of, to, _)| *of == part && *to == at) {
                digest.update(piece);
                *to += len;
            }
            if let Some((part, _, digest)) = self.open.take_if(|(_, to, _)| *to == all.end) {
                self.whole.insert(part, digest.finalize() as u32);
            }
            (at, bytes) = (at + len, rest);
        }
    }
}

impl Writing<'_> {
    /// These bytes are in the file.
    pub(super) fn done(mut self, bytes: &[u8]) {
        self.is_told = true;
        let mut state = lock(&self.sums.0);
        // Of two that meet nobody knows which came last.
        match state.writing == 1 && state.meetings == self.meetings {
            true => state.write(self.range.start, bytes),
            false => state.forget(&self.range),
        }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.sums.0);
        state.writing -= 1;
        if !self.is_told {
            state.forget(&self.range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn write(sums: &Sums, file: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        let writing = sums.begin(offset as u64..end as u64);
        file.resize(file.len().max(end), 0);
        file[offset..end].copy_from_slice(bytes);
        writing.done(bytes);
    }

    fn sum(bytes: &[u8]) -> u32 {
        crc_fast::checksum(CRC32C, bytes) as u32
    }

    proptest! {
        /// Whatever is written and cut off: a sum that is known is that of the bytes that are there.
        #[test]
        fn what_is_known_is_right(
            steps in prop::collection::vec((0..4_u8, 0..40_000_usize, 1..9_000_usize, any::<u8>()), 1..60),
        ) {
            let (sums, mut file) = (Sums::default(), Vec::new());
            for (kind, offset, len, byte) in steps {
                match kind {
                    0 => {
                        let (before, after) = (file.len(), offset.min(file.len() + len));
                        file.resize(after, 0);
                        sums.resized(before.min(after) as u64, before.max(after) as u64);
                    }
                    1 => {
                        let at = offset.min(file.len());
                        write(&sums, &mut file, at, &vec![byte; len]);
                    }
                    _ => { let end = file.len(); write(&sums, &mut file, end, &vec![byte; len]); }
                }
                let size = file.len() as u64;
                if let Some(known) = sums.of(&(0..size)) {
                    prop_assert_eq!(known, sum(&file));
                }
                for part in 0..parts::of(size) {
                    let range = parts::range(part);
                    if let Some(known) = sums.of(&range) {
                        prop_assert_eq!(known, sum(&file[range.start as usize..range.end as usize]));
                    }
                }
            }
        }
    }

    #[test]
    fn a_file_that_is_written_in_order_is_known_in_parts_and_as_a_whole() {
        let (sums, mut file) = (Sums::default(), Vec::new());
        for n in 0..30_u8 {
            let end = file.len();
            write(&sums, &mut file, end, &[n; 1000]);
        }
        assert_eq!(sums.of(&(0..30_000)), Some(sum(&file)));
        let second = parts::range(1);
        assert_eq!(sums.of(&second), Some(sum(&file[second.start as usize..second.end as usize])));
        assert_eq!(sums.of(&(1..30_000)), None, "not from the beginning of a part");
        write(&sums, &mut file, 9_000, &[1]);
        assert_eq!(sums.of(&second), None);
        assert!(sums.of(&parts::range(0)).is_some() && sums.of(&(0..30_000)).is_none());
    }

    #[test]
    fn of_two_writes_that_meet_or_one_that_came_to_nothing_nothing_is_known() {
        let (sums, mut file) = (Sums::default(), Vec::new());
        let one = sums.begin(0..10);
        write(&sums, &mut file, 0, &[2; 10]);
        one.done(&[1; 10]);
        assert_eq!(sums.of(&(0..10)), None);
        write(&sums, &mut file, 0, &[3; 10]);
        assert_eq!(sums.of(&(0..10)), Some(sum(&file)));
        drop(sums.begin(5..20)); // full disk, a hung one, a caller that has gone
        assert_eq!(sums.of(&(0..10)), None);
    }
}
