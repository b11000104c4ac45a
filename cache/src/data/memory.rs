//! Memory for bodies on their way, shared by all scopes so that none can have all of it.
//!
//! A source that sends half a block and then nothing keeps the memory of that block. So what a scope may hold depends
//! on what is free: at most [`ALPHA`] times as much (dynamic thresholds, as switches share their buffers among ports;
//! Choudhury and Hahne, 1998). A scope alone has four fifths, five greedy ones leave a twentieth, and however many
//! there are something is free for one that has nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;
use volume::ScopeId;

/// Unit of account, bytes.
const UNIT: u64 = 4096;
const ALPHA: u64 = 4;

#[derive(Debug)]
pub(crate) struct Memory {
    state: Mutex<State>,
    all: u64,
}

#[derive(Debug)]
struct State {
    free: u64,
    held: HashMap<ScopeId, u64>,
    /// By when they came. Thousands of readers may wait, so who comes, goes or gives back looks at the first of each scope
    /// only.
    waiting: HashMap<ScopeId, BTreeMap<u64, Waiting>>,
    /// The first of each scope that waits.
    first: BTreeMap<u64, ScopeId>,
    next: u64,
    #[cfg(test)]
    looked_at: u64,
}

#[derive(Debug)]
struct Waiting {
    units: u64,
    sender: oneshot::Sender<Share>,
}

/// Given back on drop.
#[derive(Debug)]
pub(crate) struct Share {
    memory: Arc<Memory>,
    scope: ScopeId,
    units: u64,
}

impl Memory {
    pub(crate) fn new(bytes: u64) -> Arc<Self> {
        let all = (bytes / UNIT).max(1);
        let state = State {
            free: all,
            held: HashMap::new(),
            waiting: HashMap::new(),
            first: BTreeMap::new(),
            next: 0,
            #[cfg(test)]
            looked_at: 0,
        };
        Arc::new(Self { state: Mutex::new(state), all })
    }

    /// Now, or not at all.
    pub(crate) fn try_take(self: &Arc<Self>, scope: &ScopeId, bytes: u64) -> Option<Share> {
        let units = self.units(bytes);
        self.lock().take(scope, units).then(|| self.share(scope.clone(), units))
    }

    /// Waits for it. Of one scope first come first served.
    pub(crate) async fn take(self: &Arc<Self>, scope: &ScopeId, bytes: u64) -> Option<Share> {
        let units = self.units(bytes);
        let (number, receiver) = {
            let mut state = self.lock();
            if !state.waiting.contains_key(scope) && state.take(scope, units) {
                drop(state);
                return Some(self.share(scope.clone(), units));
            }
            let (sender, receiver) = oneshot::channel();
            (state.join(scope, Waiting { units, sender }), receiver)
        };
        // A waiter that goes away may have been what others waited behind.
        let mut waiting = Gone { memory: self, scope, number: Some(number) };
        let share = receiver.await.ok();
        waiting.number = None;
        share
    }

    /// A call waits, or less than a quarter is free.
    pub(crate) fn is_short(&self) -> bool {
        let state = self.lock();
        state.free < self.all / 4 || !state.waiting.is_empty()
    }

    /// Never more than there is.
    fn units(&self, bytes: u64) -> u64 {
        bytes.div_ceil(UNIT).clamp(1, self.all)
    }

    fn share(self: &Arc<Self>, scope: ScopeId, units: u64) -> Share {
        Share { memory: self.clone(), scope, units }
    }

    /// Gives those that wait what they may have.
    fn dispatch(self: &Arc<Self>) {
        let mut granted = Vec::new();
        {
            let mut state = self.lock();
            let mut after = 0;
            while let Some((number, scope, units)) = state.first_from(after) {
                after = number + 1;
                if state.take(&scope, units) {
                    // The next of this scope has its turn as it came.
                    granted.extend(state.leave(&scope, number).map(|waiting| (scope, waiting)));
                } else if state.may(&scope, units) {
                    // The first in turn is waited for, even if it wants more than is free: or the small would keep the
                    // large out.
                    break;
                }
            }
        }
        // Not under the lock: the share of a reader that has just gone is dropped here.
        for (scope, Waiting { units, sender }) in granted {
            let _ = sender.send(self.share(scope, units));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns its number.
    fn join(&mut self, scope: &ScopeId, waiting: Waiting) -> u64 {
        self.next += 1;
        let number = self.next;
        let queue = self.waiting.entry(scope.clone()).or_default();
        if queue.is_empty() {
            self.first.insert(number, scope.clone());
        }
        queue.insert(number, waiting);
        number
    }

    fn leave(&mut self, scope: &ScopeId, number: u64) -> Option<Waiting> {
        let queue = self.waiting.get_mut(scope)?;
        let gone = queue.remove(&number)?;
        if self.first.remove(&number).is_some() {
            match queue.first_key_value() {
                Some((next, _)) => drop(self.first.insert(*next, scope.clone())),
                None => drop(self.waiting.remove(scope)),
            }
        }
        Some(gone)
    }

    /// Of those that are the first of their scope, the one with this number or the next.
    fn first_from(&mut self, number: u64) -> Option<(u64, ScopeId, u64)> {
        #[cfg(test)]
        {
            self.looked_at += 1;
        }
        let (number, scope) = self.first.range(number..).next()?;
        let units = self.waiting.get(scope)?.get(number)?.units;
        Some((*number, scope.clone(), units))
    }

    /// By the share that a scope may have, be it free or not.
    fn may(&self, scope: &ScopeId, units: u64) -> bool {
        let held = self.held.get(scope).copied().unwrap_or(0);
        held == 0 || held + units <= ALPHA * self.free.saturating_sub(units)
    }

    fn take(&mut self, scope: &ScopeId, units: u64) -> bool {
        let takes = self.free >= units && self.may(scope, units);
        if takes {
            self.free -= units;
            *self.held.entry(scope.clone()).or_default() += units;
        }
        takes
    }

    fn give(&mut self, scope: &ScopeId, units: u64) {
        self.free += units;
        if let Some(held) = self.held.get_mut(scope) {
            *held -= units;
            if *held == 0 {
                self.held.remove(scope);
            }
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.memory.lock().give(&self.scope, self.units);
        self.memory.dispatch();
    }
}

struct Gone<'m> {
    memory: &'m Arc<Memory>,
    scope: &'m ScopeId,
    /// None: it has its share.
    number: Option<u64>,
}

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            drop(self.memory.lock().leave(self.scope, number)); // gone already where it was just granted
            self.memory.dispatch();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn scope(n: u64) -> ScopeId {
        ScopeId::parse(&format!("{n:032x}")).unwrap()
    }

    fn greedy(memory: &Arc<Memory>, n: u64) -> Vec<Share> {
        std::iter::from_fn(|| memory.try_take(&scope(n), UNIT)).collect()
    }

    #[test]
    fn greedy_scopes_leave_something_for_one_that_has_nothing() {
        let memory = Memory::new(1000 * UNIT);
        let alone = greedy(&memory, 0);
        assert!((790..=800).contains(&alone.len()), "{}", alone.len());
        let others: Vec<_> = (1..5).map(|n| greedy(&memory, n)).collect();
        assert!(others.iter().all(|shares| !shares.is_empty()));
        let newcomer = greedy(&memory, 9);
        assert!(!newcomer.is_empty());
        drop((alone, others, newcomer));
        assert_eq!(greedy(&memory, 7).len(), 800);
    }

    #[test]
    fn whoever_waits_for_much_is_not_overtaken_for_ever_by_those_who_want_little() {
        let memory = Memory::new(10 * UNIT);
        let mut held: Vec<_> = (0..10).filter_map(|n| memory.try_take(&scope(n), UNIT)).collect();
        assert_eq!(held.len(), 10);
        let large = scope(99);
        let mut much = Box::pin(memory.take(&large, 5 * UNIT));
        assert!((&mut much).now_or_never().is_none());
        let mut little: Vec<_> = (20..24)
            .map(|n| {
                let memory = memory.clone();
                Box::pin(async move { memory.take(&scope(n), UNIT).await })
            })
            .collect();
        assert!(little.iter_mut().all(|l| l.now_or_never().is_none()));
        held.truncate(6);
        assert!(little.iter_mut().all(|l| l.now_or_never().is_none()), "they came later");
        held.truncate(5);
        assert!((&mut much).now_or_never().flatten().is_some());
    }

    #[test]
    fn whoever_goes_away_keeps_nobody_waiting() {
        let memory = Memory::new(UNIT);
        let held = memory.try_take(&scope(1), UNIT).unwrap();
        let other = scope(2);
        let mut gone = Box::pin(memory.take(&other, UNIT));
        let mut waits = Box::pin(memory.take(&other, UNIT));
        assert!((&mut gone).now_or_never().is_none() && (&mut waits).now_or_never().is_none());
        drop(gone);
        drop(held);
        assert!((&mut waits).now_or_never().flatten().is_some());
    }

    /// Reads past a full disk: thousands, each of which has to wait.
    #[test]
    fn a_crowd_that_waits_costs_each_a_few_looks() {
        const CROWD: u64 = 10_000;
        let memory = Memory::new(UNIT);
        let mut held = memory.try_take(&scope(1), UNIT);
        let mut crowd: VecDeque<_> = (0..CROWD)
            .map(|n| {
                let memory = memory.clone();
                let mut one = Box::pin(async move { memory.take(&scope(n % 2), UNIT).await });
                assert!((&mut one).now_or_never().is_none());
                one
            })
            .collect();
        // Half of them go, from the last to the first.
        while crowd.len() > CROWD as usize / 2 {
            drop(crowd.pop_back());
        }
        while let Some(mut next) = crowd.pop_front() {
            drop(held.take());
            held = (&mut next).now_or_never().flatten();
            assert!(held.is_some(), "in the order in which they came, {} wait", crowd.len());
        }
        drop(held);
        let state = memory.lock();
        assert!(state.waiting.is_empty() && state.first.is_empty() && state.free == 1);
        assert!(state.looked_at <= 4 * CROWD, "{} looks", state.looked_at);
    }

    proptest! {
        /// Whatever is taken and given: never more than there is, and when all is given back all is free and no call
        /// waits.
        #[test]
        fn it_is_never_more_than_there_is_and_comes_back(
            all in 1u64..64,
            events in prop::collection::vec((0u64..5, 1u64..40, prop::bool::ANY), 1..200),
        ) {
            let memory = Memory::new(all * UNIT);
            let mut held: VecDeque<Share> = VecDeque::new();
            let mut waiting = Vec::new();
            for (n, units, take) in events {
                if take {
                    let memory = memory.clone();
                    waiting.push(Box::pin(async move { memory.take(&scope(n), units * UNIT).await }));
                } else {
                    held.pop_front();
                }
                waiting.retain_mut(|w| match w.now_or_never() {
                    Some(share) => { held.extend(share); false }
                    None => true,
                });
                let sum: u64 = held.iter().map(|share| share.units).sum();
                prop_assert!(sum <= all);
                prop_assert!(waiting.is_empty() || !held.is_empty(), "a call waits although all is free");
            }
            while !waiting.is_empty() {
                prop_assert!(held.pop_front().is_some(), "{} starve", waiting.len());
                waiting.retain_mut(|w| match w.now_or_never() {
                    Some(share) => { held.extend(share); false }
                    None => true,
                });
            }
            drop(held);
            prop_assert_eq!(memory.lock().free, all);
            let state = memory.lock();
            prop_assert!(state.held.is_empty() && state.waiting.is_empty() && state.first.is_empty());
        }
    }
}
