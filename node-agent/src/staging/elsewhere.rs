//! Of a large object that is changed, not all bytes are here at once: those that a program writes to, with their blocks, and the
//! others one block after the other. The journal says which are here before anybody writes to them, so none is brought twice.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Bytes of a block. (Histories are to have files of many blocks.)
const BLOCK_MIN: u64 = if cfg!(test) { 4 << 10 } else { 4 << 20 };
/// Of one file, so that what the journal keeps of them stays small.
const BLOCKS_MAX: u64 = 8192;

/// Which bytes of a staged file are in its object, and perhaps not here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Elsewhere {
    block: u64,
    now: Blocks,
    /// As a loss of power leaves it: those that are here and on the disk.
    safe: Blocks,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Blocks {
    /// So many bytes from the beginning are the object's, where they are not here. All that is behind them is.
    size: u64,
    /// A bit of each block.
    here: Vec<u8>,
}

impl Blocks {
    fn has(&self, block: u64) -> bool {
        self.here.get((block / 8) as usize).is_some_and(|bits| bits & (1 << (block % 8)) != 0)
    }

    fn missing(&self, bytes: u64, of: Range<u64>) -> impl Iterator<Item = u64> {
        let end = of.end.min(self.size);
        let blocks = if of.start < end { of.start / bytes..end.div_ceil(bytes) } else { 0..0 };
        blocks.filter(|block| !self.has(*block))
    }
}

impl Elsewhere {
    /// Of a file whose first `size` bytes are its object's. None: they are one block at most.
    pub(super) fn new(size: u64) -> Option<Self> {
        let block = BLOCK_MIN.max(size.div_ceil(BLOCKS_MAX).next_power_of_two());
        let blocks = Blocks { size, here: vec![0; size.div_ceil(block).div_ceil(8) as usize] };
        (size > block).then(|| Self { block, now: blocks.clone(), safe: blocks })
    }

    /// The first block with a byte of `range` that is not here, and its bytes that are the object's.
    pub(super) fn first_missing(&self, range: Range<u64>) -> Option<(u64, Range<u64>)> {
        let block = self.now.missing(self.block, range).next()?;
        let start = block * self.block;
        Some((block, start..(start + self.block).min(self.now.size)))
    }

    /// The bytes of this block, if it is not here.
    pub(super) fn missing_block(&self, block: u64) -> Option<Range<u64>> {
        let start = block.checked_mul(self.block)?;
        let (first, range) = self.first_missing(start..start.checked_add(1)?)?;
        (first == block).then_some(range)
    }

    /// Bytes that are not here.
    pub(super) fn missing(&self) -> u64 {
        let missing = self.now.missing(self.block, 0..u64::MAX);
        missing.map(|block| self.block.min(self.now.size - block * self.block)).sum()
    }

    pub(super) fn with(&self, block: u64) -> Self {
        let mut with = self.clone();
        if let Some(bits) = with.now.here.get_mut((block / 8) as usize) {
            *bits |= 1 << (block % 8);
        }
        with
    }

    /// The file was cut off: what is behind is a hole from now on.
    pub(super) fn cut(&mut self, size: u64) {
        self.now.size = self.now.size.min(size);
    }

    pub(super) fn now(&self) -> Blocks {
        self.now.clone()
    }

    /// All that was here then is on the disk.
    pub(super) fn note_safe(&mut self, then: Blocks) {
        self.safe = then;
    }

    /// No loss of power makes a block miss.
    pub(super) fn is_over(&self) -> bool {
        self.safe.missing(self.block, 0..u64::MAX).next().is_none()
            && self.now.missing(self.block, 0..u64::MAX).next().is_none()
    }

    pub(super) fn after_loss_of_power(mut self) -> Self {
        self.now = self.safe.clone();
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A file that is brought block by block, written to, cut off and written out has its own bytes at each time, and so it
        /// has, of what was written out, after a loss of power.
        #[test]
        fn no_byte_is_missed_or_brought_over_another(
            size in 1..200_000_u64,
            steps in prop::collection::vec((0..4_u8, 0..220_000_u64, 1..30_000_u64), 1..60),
        ) {
            let Some(mut of) = Elsewhere::new(size) else {
                prop_assert!(size <= BLOCK_MIN);
                return Ok(());
            };
            // 0: not here, 1: the object's, 2: written or a hole.
            let mut file = vec![0_u8; size as usize];
            let bring = |of: &mut Elsewhere, file: &mut Vec<u8>, range: Range<u64>| {
                while let Some((block, bytes)) = of.first_missing(range.clone()) {
                    for at in bytes {
                        assert_eq!(file[at as usize], 0, "{at} is here");
                        file[at as usize] = 1;
                    }
                    *of = of.with(block);
                }
            };
            for (kind, offset, len) in steps {
                match kind {
                    0 => bring(&mut of, &mut file, offset..offset + len),
                    1 => {
                        bring(&mut of, &mut file, offset..offset + len);
                        let end = (offset + len) as usize;
                        file.resize(file.len().max(end), 2);
                        file[offset as usize..end].fill(2);
                    }
                    2 => {
                        of.cut(offset);
                        file.resize(offset as usize, 2);
                    }
                    _ => {
                        let then = of.now();
                        of.note_safe(then);
                    }
                }
                let missing = file.iter().filter(|byte| **byte == 0).count() as u64;
                prop_assert_eq!(of.missing(), missing);
                let first = file.iter().position(|byte| *byte == 0).map(|at| at as u64);
                let told = of.first_missing(0..u64::MAX).map(|(_, bytes)| bytes.start);
                prop_assert_eq!(told, first);
                prop_assert!(!of.is_over() || missing == 0);
            }
            bring(&mut of, &mut file, 0..u64::MAX);
            prop_assert!(!file.contains(&0));
            let then = of.now();
            of.note_safe(then);
            prop_assert!(of.is_over());
        }
    }

    #[test]
    fn a_loss_of_power_takes_what_was_not_written_out() {
        let mut of = Elsewhere::new(3 * BLOCK_MIN).unwrap();
        of = of.with(0);
        let then = of.now();
        of = of.with(1);
        of.note_safe(then);
        of.cut(2 * BLOCK_MIN + 1);
        assert_eq!(of.missing(), 1);
        let after = of.after_loss_of_power();
        assert_eq!(after.first_missing(0..u64::MAX), Some((1, BLOCK_MIN..2 * BLOCK_MIN)));
        assert_eq!(after.missing(), 2 * BLOCK_MIN);
    }

    #[test]
    fn the_largest_object_has_few_blocks_and_a_small_one_none() {
        let of = Elsewhere::new(5 << 40).unwrap();
        assert!(of.now.here.len() as u64 * 8 <= BLOCKS_MAX);
        assert_eq!(of.missing(), 5 << 40);
        assert_eq!(Elsewhere::new(BLOCK_MIN), None);
        assert_eq!(Elsewhere::new(0), None);
    }
}
