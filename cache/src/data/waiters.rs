//! Readers that wait for blocks of one file, in the order of the blocks.
//!
//! There may be tens of thousands: a pod reads with as many threads as it likes, and each asks again when its worker was
//! replaced. They are kept under the file's lock, which all who read the file take, so neither a reader that comes nor
//! a block that arrives may look at all of them.

use std::collections::BTreeMap;
use std::ops::Range;
use tokio::sync::oneshot;

/// Fewer are not worth a look at who has gone.
const SWEPT_FROM: usize = 64;

pub(crate) struct Waiter<T> {
    blocks: Range<u64>,
    pub(super) sender: oneshot::Sender<T>,
}

/// `T`: what they are told.
pub(crate) struct Waiters<T> {
    /// By first block, then by when they came.
    all: BTreeMap<(u64, u64), Waiter<T>>,
    next: u64,
    /// No waiter's range is longer.
    longest: u64,
    /// Those that have gone are looked for when there are so many: twice as many as after the last time, so that it
    /// costs each that comes a look or two.
    sweep_at: usize,
    #[cfg(test)]
    looked_at: u64,
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        Self {
            all: BTreeMap::new(),
            next: 0,
            longest: 0,
            sweep_at: 0,
            #[cfg(test)]
            looked_at: 0,
        }
    }
}

impl<T> Waiters<T> {
    pub(crate) fn push(&mut self, blocks: Range<u64>, sender: oneshot::Sender<T>) {
        if self.all.len() >= self.sweep_at.max(SWEPT_FROM) {
            self.sweep();
        }
        self.longest = self.longest.max(blocks.end.saturating_sub(blocks.start));
        self.next += 1;
        self.all.insert((blocks.start, self.next), Waiter { blocks, sender });
    }

    fn sweep(&mut self) {
        #[cfg(test)]
        {
            self.looked_at += self.all.len() as u64;
        }
        self.all.retain(|_, waiter| !waiter.sender.is_closed());
        self.longest =
            self.all.values().map(|w| w.blocks.end.saturating_sub(w.blocks.start)).max().unwrap_or(0);
        self.sweep_at = 2 * self.all.len();
    }

    /// Takes out those that want any of `touched` and of whose range `judge` knows what became of it.
    pub(crate) fn take(
        &mut self,
        touched: &Range<u64>,
        judge: impl Fn(&Range<u64>) -> Option<T>,
    ) -> Vec<(Waiter<T>, T)> {
        let first = (touched.start.saturating_sub(self.longest), 0);
        let near = self.all.range(first..(touched.end.max(first.0), 0));
        #[cfg(test)]
        let near = near.inspect(|_| self.looked_at += 1);
        let meets = |blocks: &Range<u64>| blocks.start < touched.end && touched.start < blocks.end;
        let known = near.filter(|(_, waiter)| meets(&waiter.blocks));
        let known: Vec<_> = known.filter_map(|(at, waiter)| Some((*at, judge(&waiter.blocks)?))).collect();
        known.into_iter().filter_map(|(at, woken)| Some((self.all.remove(&at)?, woken))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn those_that_want_what_was_touched_are_taken_and_no_others(
            ranges in proptest::collection::vec((0_u64..200, 1_u64..40), 0..150),
            touches in proptest::collection::vec((0_u64..240, 0_u64..50), 1..10),
            odd in any::<bool>(),
        ) {
            let mut waiters = Waiters::default();
            let mut kept = Vec::new();
            let mut left: Vec<Range<u64>> = Vec::new();
            for (start, length) in ranges {
                let (sender, receiver) = oneshot::channel();
                waiters.push(start..start + length, sender);
                left.push(start..start + length);
                kept.push(receiver);
            }
            for (start, length) in touches {
                let touched = start..start + length;
                let judge = |blocks: &Range<u64>| (!odd || blocks.end % 2 == 1).then_some(());
                let meets = |blocks: &Range<u64>| blocks.start < touched.end && touched.start < blocks.end;
                let (mut expected, rest): (Vec<_>, Vec<_>) =
                    left.into_iter().partition(|blocks| meets(blocks) && judge(blocks).is_some());
                left = rest;
                let mut taken: Vec<_> =
                    waiters.take(&touched, judge).into_iter().map(|(waiter, _)| waiter.blocks).collect();
                taken.sort_by_key(|blocks| (blocks.start, blocks.end));
                expected.sort_by_key(|blocks| (blocks.start, blocks.end));
                prop_assert_eq!(taken, expected);
            }
            prop_assert_eq!(waiters.all.len(), left.len());
        }
    }

    /// A worker's successor asks for all that its predecessor asked for, whose questions are over.
    #[test]
    fn a_crowd_that_comes_again_and_again_costs_each_a_few_looks() {
        const CROWD: u64 = 10_000;
        let mut waiters = Waiters::default();
        for _ in 0..5 {
            let mut kept = Vec::new();
            for k in 0..CROWD {
                let (sender, receiver) = oneshot::channel();
                waiters.push(k / 32..k / 32 + 1, sender);
                kept.push(receiver);
            }
            assert!(waiters.all.len() <= 3 * CROWD as usize, "{} are kept", waiters.all.len());
        }
        let coming = waiters.looked_at;
        assert!(coming <= 4 * 5 * CROWD, "{coming} looks as they came");
        let mut woken = 0;
        for block in 0..CROWD.div_ceil(32) {
            woken += waiters.take(&(block..block + 1), |_| Some(())).len();
        }
        assert!(woken >= CROWD as usize);
        let arriving = waiters.looked_at - coming;
        assert!(arriving <= 3 * 3 * CROWD, "{arriving} looks as the blocks arrived");
        assert!(waiters.all.is_empty());
    }

    #[test]
    fn those_that_have_gone_are_not_kept() {
        let mut waiters = Waiters::default();
        let (sender, _waits) = oneshot::channel();
        waiters.push(7..9, sender);
        for _ in 0..10_000 {
            waiters.push(0..1, oneshot::channel().0);
        }
        assert!(waiters.all.len() <= 2 * SWEPT_FROM, "{} are kept", waiters.all.len());
        assert_eq!(waiters.take(&(8..9), |_| Some(())).len(), 1, "who waits is");
    }
}
