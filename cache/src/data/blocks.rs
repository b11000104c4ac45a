//! What is known of a file's blocks. The tables grow with what is there or on its way, never with the size that an
//! object claims to have.
//!
//! ```text
//!  of a block:  missing ──claim──► claimed ──written──► present
//!                  ▲                  │ given back
//!                  ├──────────────────┘
//!               unverified ──claim──► claimed ──verified──► present
//!                                        │ wrong: missing
//! ```

use super::bitmap::Shared;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;

/// Blocks in one stretch: one word each of what is kept as bits.
pub(crate) const STRETCH: u64 = 64;

pub(crate) struct Blocks {
    /// By number; one that is not here has nothing.
    stretches: BTreeMap<u64, Stretch>,
    /// Once a worker has asked for it: most files are whole before anyone does.
    shared: Option<Shared>,
    len: u64,
    present: u64,
    /// Bytes written since the sidecar was saved.
    pub unsaved: u64,
}

#[derive(Default)]
struct Stretch {
    /// May be read.
    present: u64,
    /// On their way: a reader or a fetch is at work on them.
    claimed: u64,
    /// On disk since an earlier run.
    unverified: u64,
    /// Of the blocks that are present or unverified, in their order.
    crcs: Vec<u32>,
}

/// The blocks that lie on the disk, with their checksums: what a sidecar promises.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// In ascending order.
    pub stretches: Vec<KnownStretch>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KnownStretch {
    /// Its first block is `STRETCH` times this.
    pub index: u64,
    /// Not 0.
    pub bits: u64,
    /// One per bit.
    pub crcs: Vec<u32>,
}

impl KnownStretch {
    /// The numbers of its blocks.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = u64> + use<> {
        let Self { index, bits, .. } = *self;
        (0..STRETCH).filter(move |k| bits >> k & 1 == 1).map(move |k| index * STRETCH + k)
    }
}

impl Known {
    /// Every block of a file.
    pub(crate) fn all(crcs: &[u32]) -> Self {
        let stretch = |(index, crcs): (usize, &[u32])| KnownStretch {
            index: index as u64,
            bits: !0 >> (STRETCH as usize - crcs.len()),
            crcs: crcs.to_vec(),
        };
        Self { stretches: crcs.chunks(STRETCH as usize).enumerate().map(stretch).collect() }
    }

    /// Blocks.
    pub(crate) fn count(&self) -> u64 {
        self.stretches.iter().map(|s| u64::from(s.bits.count_ones())).sum()
    }

    /// In the order of their blocks.
    pub(crate) fn crcs(&self) -> Vec<u32> {
        self.stretches.iter().flat_map(|s| s.crcs.iter().copied()).collect()
    }
}

impl Blocks {
    pub(crate) fn new(len: u64) -> Self {
        Self { stretches: BTreeMap::new(), shared: None, len, present: 0, unsaved: 0 }
    }

    /// With what an earlier run or instance left, not verified yet.
    pub(crate) fn unverified(len: u64, known: Known) -> Self {
        let stretch =
            |s: KnownStretch| (s.index, Stretch { unverified: s.bits, crcs: s.crcs, ..Stretch::default() });
        Self { stretches: known.stretches.into_iter().map(stretch).collect(), ..Self::new(len) }
    }

    pub(crate) fn present(&self) -> u64 {
        self.present
    }
    pub(crate) fn is_whole(&self) -> bool {
        self.present == self.len
    }
    /// All of `range` may be read.
    pub(crate) fn has(&self, range: Range<u64>) -> bool {
        self.first(range, true, |s| !s.present).is_none()
    }
    /// The first block of `range` that no fetch brings yet.
    pub(crate) fn next_missing(&self, range: Range<u64>) -> Option<u64> {
        self.first(range, true, |s| !s.taken())
    }
    /// Where a run of missing blocks that begins with `range` ends.
    pub(crate) fn end_of_missing(&self, range: Range<u64>) -> u64 {
        self.first(range.clone(), false, Stretch::taken).unwrap_or(range.end)
    }
    /// The first block of `range` that is to be verified.
    pub(crate) fn next_unverified(&self, range: Range<u64>) -> Option<u64> {
        self.first(range, false, Stretch::unchecked)
    }
    /// Where a run of blocks to verify that begins with `range` ends.
    pub(crate) fn end_of_unverified(&self, range: Range<u64>) -> u64 {
        self.first(range.clone(), true, |s| !s.unchecked()).unwrap_or(range.end)
    }
    /// Of a block that is on the disk.
    pub(crate) fn crc(&self, k: u64) -> Option<u32> {
        let stretch = self.stretches.get(&(k / STRETCH))?;
        let at = stretch.known() & bit(k) != 0;
        at.then(|| stretch.crcs[stretch.rank(k)])
    }

    pub(crate) fn claim(&mut self, range: Range<u64>) {
        for (index, mask) in masks(&range) {
            self.stretches.entry(index).or_default().claimed |= mask;
        }
    }

    /// They did not come.
    pub(crate) fn give_back(&mut self, range: &Range<u64>) {
        for (index, mask) in masks(range) {
            if let Some(stretch) = self.stretches.get_mut(&index) {
                stretch.claimed &= !mask;
                self.forget_empty(index);
            }
        }
    }

    pub(crate) fn written(&mut self, k: u64, crc: u32) {
        let stretch = self.stretches.entry(k / STRETCH).or_default();
        let at = stretch.rank(k);
        if stretch.known() & bit(k) != 0 {
            stretch.crcs[at] = crc;
        } else {
            stretch.crcs.insert(at, crc);
        }
        stretch.unverified |= bit(k);
        self.verified(k);
    }

    /// What an earlier run left of it is right.
    pub(crate) fn verified(&mut self, k: u64) {
        let Some(stretch) = self.stretches.get_mut(&(k / STRETCH)) else { return };
        stretch.claimed &= !bit(k);
        if stretch.unverified & bit(k) == 0 {
            return;
        }
        stretch.unverified &= !bit(k);
        if stretch.present & bit(k) == 0 {
            stretch.present |= bit(k);
            self.present += 1;
            if let Some(shared) = &self.shared {
                shared.add(k / STRETCH, bit(k));
            }
        }
    }

    /// What an earlier run left of it is wrong.
    pub(crate) fn wrong(&mut self, k: u64) {
        let Some(stretch) = self.stretches.get_mut(&(k / STRETCH)) else { return };
        stretch.claimed &= !bit(k);
        if stretch.unverified & bit(k) != 0 {
            let at = stretch.rank(k);
            stretch.crcs.remove(at);
            stretch.unverified &= !bit(k);
        }
        self.forget_empty(k / STRETCH);
    }

    /// What the sidecar may promise: written by this run, or by an earlier one and not found wrong.
    pub(crate) fn known(&self) -> Known {
        let stretches = self.stretches.iter().filter(|(_, s)| s.known() != 0);
        let known =
            |(&index, s): (&u64, &Stretch)| KnownStretch { index, bits: s.known(), crcs: s.crcs.clone() };
        Known { stretches: stretches.map(known).collect() }
    }

    /// For a worker: a bitmap of what is present, now and later.
    pub(crate) fn share(&mut self) -> io::Result<OwnedFd> {
        let shared = match self.shared.take() {
            Some(shared) => shared,
            None => {
                let shared = Shared::new(self.len)?;
                self.stretches.iter().for_each(|(&index, s)| shared.add(index, s.present));
                shared
            }
        };
        self.shared.insert(shared).descriptor()
    }

    /// The first block of `range` whose bit `of` gives. `void`: blocks of stretches that are not here count.
    fn first(&self, range: Range<u64>, void: bool, of: impl Fn(&Stretch) -> u64) -> Option<u64> {
        if range.is_empty() {
            return None;
        }
        let first = range.start / STRETCH;
        // The stretch that comes next, if none before it is missing.
        let mut next = first;
        for (&index, stretch) in self.stretches.range(first..=(range.end - 1) / STRETCH) {
            if void && index != next {
                break;
            }
            let from = if index == first { !0 << (range.start % STRETCH) } else { !0 };
            let found = of(stretch) & from;
            if found != 0 {
                let k = index * STRETCH + u64::from(found.trailing_zeros());
                return (k < range.end).then_some(k);
            }
            next = index + 1;
        }
        let k = (next * STRETCH).max(range.start);
        (void && k < range.end).then_some(k)
    }

    fn forget_empty(&mut self, index: u64) {
        if self.stretches.get(&index).is_some_and(|s| s.taken() == 0) {
            self.stretches.remove(&index);
        }
    }

    #[cfg(test)]
    pub(crate) fn stretches(&self) -> usize {
        self.stretches.len()
    }
}

impl Stretch {
    /// On the disk.
    fn known(&self) -> u64 {
        self.present | self.unverified
    }
    fn taken(&self) -> u64 {
        self.known() | self.claimed
    }
    /// To be verified, and no reader verifies it yet.
    fn unchecked(&self) -> u64 {
        self.unverified & !self.claimed
    }
    /// Where the checksum of block `k` is, or would be.
    fn rank(&self, k: u64) -> usize {
        (self.known() & (bit(k) - 1)).count_ones() as usize
    }
}

fn bit(k: u64) -> u64 {
    1 << (k % STRETCH)
}

/// The stretches that a range touches, and their bits in it.
fn masks(range: &Range<u64>) -> impl Iterator<Item = (u64, u64)> + use<> {
    let Range { start, end } = *range;
    let stretches = if start < end { start / STRETCH..end.div_ceil(STRETCH) } else { 0..0 };
    stretches.map(move |index| {
        let base = index * STRETCH;
        let (low, high) = (start.max(base) - base, end.min(base + STRETCH) - base);
        (index, !0 >> (STRETCH - (high - low)) << low)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap as Model;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Is {
        Missing,
        Claimed,
        Unverified(u32),
        /// Unverified, and a reader verifies it.
        Checked(u32),
        Present(u32),
    }

    #[derive(Clone, Debug)]
    enum Step {
        Claim(Range<u64>),
        GiveBack(Range<u64>),
        Written(u64, u32),
        Verified(u64),
        Wrong(u64),
        Share,
        Again,
    }

    const LEN: u64 = 400;

    fn range() -> impl Strategy<Value = Range<u64>> {
        (0..LEN, 0..200u64).prop_map(|(start, len)| start..(start + len).min(LEN))
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => range().prop_map(Step::Claim),
            2 => range().prop_map(Step::GiveBack),
            8 => (0..LEN, any::<u32>()).prop_map(|(k, crc)| Step::Written(k, crc)),
            3 => (0..LEN).prop_map(Step::Verified),
            2 => (0..LEN).prop_map(Step::Wrong),
            1 => Just(Step::Share),
            1 => Just(Step::Again),
        ]
    }

    /// The same in the plainest way.
    fn apply(model: &mut Model<u64, Is>, step: &Step) {
        let at = |model: &Model<u64, Is>, k: u64| model.get(&k).copied().unwrap_or(Is::Missing);
        match step {
            Step::Claim(range) => range.clone().for_each(|k| match at(model, k) {
                Is::Missing => drop(model.insert(k, Is::Claimed)),
                Is::Unverified(crc) => drop(model.insert(k, Is::Checked(crc))),
                _ => {}
            }),
            Step::GiveBack(range) => range.clone().for_each(|k| match at(model, k) {
                Is::Claimed => drop(model.remove(&k)),
                Is::Checked(crc) => drop(model.insert(k, Is::Unverified(crc))),
                _ => {}
            }),
            Step::Written(k, crc) => drop(model.insert(*k, Is::Present(*crc))),
            Step::Verified(k) => match at(model, *k) {
                Is::Unverified(crc) | Is::Checked(crc) => drop(model.insert(*k, Is::Present(crc))),
                Is::Claimed => drop(model.remove(k)),
                _ => {}
            },
            Step::Wrong(k) => match at(model, *k) {
                Is::Unverified(_) | Is::Checked(_) | Is::Claimed => drop(model.remove(k)),
                _ => {}
            },
            Step::Share => {}
            Step::Again => {
                model.retain(|_, is| *is != Is::Claimed);
                model.values_mut().for_each(|is| {
                    if let Is::Present(crc) | Is::Checked(crc) = *is {
                        *is = Is::Unverified(crc);
                    }
                });
            }
        }
    }

    proptest! {
        #[test]
        fn the_table_says_of_each_block_what_a_list_of_all_would(
            steps in prop::collection::vec(step(), 0..80),
            asked in prop::collection::vec(range(), 1..12),
        ) {
            let (mut blocks, mut model) = (Blocks::new(LEN), Model::new());
            let mut shared = None;
            for step in &steps {
                // A present block stays unclaimed: no reader asks the source for it.
                if let Step::Claim(range) = step
                    && range.clone().any(|k| matches!(model.get(&k), Some(Is::Present(_))))
                {
                    continue;
                }
                apply(&mut model, step);
                match step {
                    Step::Claim(range) => blocks.claim(range.clone()),
                    Step::GiveBack(range) => blocks.give_back(range),
                    Step::Written(k, crc) => blocks.written(*k, *crc),
                    Step::Verified(k) => blocks.verified(*k),
                    Step::Wrong(k) => blocks.wrong(*k),
                    Step::Share => shared = Some(blocks.share().unwrap()),
                    Step::Again => {
                        blocks = Blocks::unverified(LEN, blocks.known());
                        shared = None;
                    }
                }
            }
            let is = |k: u64| model.get(&k).copied().unwrap_or(Is::Missing);
            let present = |k: u64| matches!(is(k), Is::Present(_));
            prop_assert_eq!(blocks.present(), (0..LEN).filter(|k| present(*k)).count() as u64);
            for range in asked {
                prop_assert_eq!(blocks.has(range.clone()), range.clone().all(present));
                let missing = |k: &u64| is(*k) == Is::Missing;
                prop_assert_eq!(blocks.next_missing(range.clone()), range.clone().find(missing));
                let end = range.clone().find(|k| !missing(k)).unwrap_or(range.end);
                prop_assert_eq!(blocks.end_of_missing(range.clone()), end);
                let due = |k: &u64| matches!(is(*k), Is::Unverified(_));
                prop_assert_eq!(blocks.next_unverified(range.clone()), range.clone().find(due));
                let end = range.clone().find(|k| !due(k)).unwrap_or(range.end);
                prop_assert_eq!(blocks.end_of_unverified(range.clone()), end);
            }
            let crcs: Vec<u32> = (0..LEN)
                .filter_map(|k| match is(k) {
                    Is::Present(crc) | Is::Unverified(crc) | Is::Checked(crc) => Some(crc),
                    _ => None,
                })
                .collect();
            prop_assert_eq!(blocks.known().crcs(), crcs);
            for k in 0..LEN {
                let crc = match is(k) {
                    Is::Present(crc) | Is::Unverified(crc) | Is::Checked(crc) => Some(crc),
                    _ => None,
                };
                prop_assert_eq!(blocks.crc(k), crc);
            }
            // Nothing is kept of what is neither there nor on its way.
            let stretches: std::collections::BTreeSet<u64> = model.keys().map(|k| k / STRETCH).collect();
            prop_assert_eq!(blocks.stretches(), stretches.len());
            if let Some(shared) = shared {
                let mut words = [0; LEN.div_ceil(64) as usize * 8];
                prop_assert_eq!(rustix::io::pread(&shared, &mut words, 0).unwrap(), words.len());
                for k in 0..LEN {
                    prop_assert_eq!(words[(k / 8) as usize] >> (k % 8) & 1 == 1, present(k), "bit {}", k);
                }
            }
        }
    }

    #[test]
    fn the_ends_of_the_largest_file_are_blocks_like_any_other() {
        let len = (i64::MAX as u64).div_ceil(4096);
        let mut blocks = Blocks::new(len);
        assert_eq!(blocks.next_missing(len - 1..len), Some(len - 1));
        blocks.claim(len - 3..len);
        assert_eq!(blocks.end_of_missing(len - 100..len), len - 3);
        blocks.written(len - 1, 7);
        blocks.written(0, 8);
        assert!(blocks.has(len - 1..len) && !blocks.has(len - 2..len) && !blocks.has(0..len));
        assert_eq!((blocks.crc(len - 1), blocks.stretches()), (Some(7), 2));
        assert_eq!(blocks.next_missing(0..len), Some(1));
        blocks.share().unwrap();
    }
}
