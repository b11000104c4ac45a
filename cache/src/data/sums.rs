//! Checksums of whole objects, made of what their parts brought: a store tells one, and parts come in any order.

use super::FileKey;
use crc_fast::{CrcAlgorithm, Digest, checksum_combine};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// What a store says that the bytes of an object add up to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checksum {
    pub algorithm: CrcAlgorithm,
    pub value: u64,
}

/// More parts than this are not kept: such a file is read again to add it up.
const PARTS_MAX: usize = 4096;
/// So many files are remembered that did not have their checksum.
const WRONG_MAX: usize = 1024;

/// Of one file, while it comes. Each part is what one fetch brought.
#[derive(Default)]
pub(crate) struct Sums {
    /// Something of it was asked for.
    pub(crate) is_fetched: bool,
    /// By their first byte.
    parts: BTreeMap<u64, Part>,
}

struct Part {
    end: u64,
    value: u64,
}

impl Sums {
    /// What fetched again replaces what it covers; what is covered in part only is no part any more.
    pub(crate) fn add(&mut self, bytes: Range<u64>, value: u64) {
        while let Some((&start, _)) =
            self.parts.range(..bytes.end).next_back().filter(|(_, part)| part.end > bytes.start)
        {
            self.parts.remove(&start);
        }
        if self.parts.len() < PARTS_MAX {
            self.parts.insert(bytes.start, Part { end: bytes.end, value });
        }
    }

    /// Of all `size` bytes; None: of some of them no part is here.
    pub(crate) async fn whole(&self, algorithm: CrcAlgorithm, size: u64) -> Option<u64> {
        let (mut sum, mut end) = (Digest::new(algorithm).finalize(), 0);
        for (&start, part) in &self.parts {
            if start != end {
                return None;
            }
            sum = checksum_combine(algorithm, sum, part.value, part.end - start);
            end = part.end;
            // Some tens of microseconds each.
            tokio::task::yield_now().await;
        }
        (end == size).then_some(sum)
    }
}

/// Files that did not have their checksum, and what they added up to.
#[derive(Default)]
pub(crate) struct Wrong {
    keys: RandomState,
    files: Mutex<VecDeque<(u64, u64)>>,
}

impl Wrong {
    /// Has the same version come before, and was it the same then? Nothing on the way does that twice.
    pub(crate) fn again(&self, key: &FileKey, found: u64) -> bool {
        let seen = (self.keys.hash_one(key), found);
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if files.contains(&seen) {
            return true;
        }
        if files.len() == WRONG_MAX {
            files.pop_front();
        }
        files.push_back(seen);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALGORITHMS: [CrcAlgorithm; 4] = [
        CrcAlgorithm::Crc32Iscsi,
        CrcAlgorithm::Crc32IsoHdlc,
        CrcAlgorithm::Crc64Nvme,
        CrcAlgorithm::Crc64Xz,
    ];

    fn whole(sums: &Sums, algorithm: CrcAlgorithm, size: u64) -> Option<u64> {
        futures::executor::block_on(sums.whole(algorithm, size))
    }

    proptest! {
        #[test]
        fn parts_in_any_order_add_up_to_the_whole(
            bytes in prop::collection::vec(any::<u8>(), 1..3000),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
            order in any::<u64>(),
            again in any::<prop::sample::Index>(),
        ) {
            let size = bytes.len();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(size)).chain([0, size]).collect();
            cuts.sort_unstable();
            cuts.dedup();
            let mut parts: Vec<Range<usize>> = cuts.windows(2).map(|pair| pair[0]..pair[1]).collect();
            parts.sort_by_key(|part| super::super::tests::mix(order ^ part.start as u64));
            for algorithm in ALGORITHMS {
                let mut sums = Sums::default();
                let of = |part: &Range<usize>| crc_fast::checksum(algorithm, &bytes[part.clone()]);
                for part in &parts {
                    prop_assert_eq!(whole(&sums, algorithm, size as u64), None);
                    sums.add(part.start as u64..part.end as u64, of(part));
                }
                let expected = Some(crc_fast::checksum(algorithm, &bytes));
                prop_assert_eq!(whole(&sums, algorithm, size as u64), expected);
                // The same again changes nothing; across two of them, both are gone.
                let part = parts[again.index(parts.len())].clone();
                sums.add(part.start as u64..part.end as u64, of(&part));
                prop_assert_eq!(whole(&sums, algorithm, size as u64), expected);
                if part.start > 0 && part.end - part.start > 1 {
                    sums.add(part.start as u64 - 1..part.end as u64 - 1, 0);
                    prop_assert_eq!(whole(&sums, algorithm, size as u64), None);
                }
            }
        }
    }

    #[test]
    fn of_a_file_in_crumbs_little_is_kept() {
        let mut sums = Sums::default();
        (0..2 * PARTS_MAX as u64).for_each(|k| sums.add(k..k + 1, 0));
        assert_eq!(sums.parts.len(), PARTS_MAX);
        assert_eq!(whole(&sums, CrcAlgorithm::Crc64Xz, 2 * PARTS_MAX as u64), None);
    }
}
