//! Who gets the next request slot: max-min fair among endpoints, then among the sources of one.
//!
//! A free slot goes to the endpoint that holds the fewest, and there to the source that holds the fewest; among equals
//! to the one that was served longest ago. So a source alone takes every slot, and when another comes, that one gets
//! what becomes free until both hold the same.
//!
//! Slots of a store that is silent do not become free: it would keep what it had when it fell silent. So a slot whose
//! request waits for the store, and has not moved [`PROGRESS`] bytes in [`SILENCE`] of waiting, does not count, and
//! another is lent in its place. A connection that waits costs little; what the limit on requests is for (bandwidth,
//! memory, load on the stores) is used by those that move. A source that holds a silent slot borrows none, or it would
//! take back at once what another has just lent and given back. The loans are bounded: at most twice the capacity is
//! held in all. Where that is reached, a silent slot is taken back from a source that holds more than the one that
//! waits would, and its request goes back to the queue. No source loses an equal share before
//! [`LONG_SILENCE`], so a store that is merely slow gets its answers through. Of equals, those whose last request moved
//! go first: they count as if they held one slot less than those whose last one was silent.
//!
//! Waiting for our own disk, memory or bandwidth limit is not silence.
//!
//! Pure: the time comes in, and who may be let through is asked of the caller (see `traffic.rs`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;
use tokio::time::Instant;

/// A request must move this much while it waits for no longer than [`SILENCE`].
pub(crate) const PROGRESS: u64 = 64 << 10;
pub(crate) const SILENCE: Duration = Duration::from_millis(250);
/// Silence after which a slot may be taken back; what it costs is an attempt.
const DISPLACED_AFTER: Duration = Duration::from_secs(1);
/// Where there are more silent endpoints than slots they take turns of this length.
const LONG_SILENCE: Duration = Duration::from_secs(10);

/// A source at an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) endpoint: u64,
    pub(crate) source: u64,
}

/// Whether it waits for its first attempt or for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    First,
    Again,
}

/// By what its endpoint and it hold, and by when they were served last.
type Ranked = ((usize, u64, usize, u64), Key);

/// Names a request that waits, and the slot that it gets.
pub(crate) type Ticket = u64;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// This one may go.
    Grant(Ticket, Key, Turn),
    /// The holder of this slot must let go of it.
    Displace(Ticket),
}

#[derive(Debug)]
pub(crate) struct Shares {
    capacity: usize,
    sources: BTreeMap<Key, Load>,
    endpoints: BTreeMap<u64, Served>,
    held: HashMap<Ticket, Held>,
    waiting: usize,
    /// Slots that were taken back and are not free yet.
    displaced: usize,
    grants: u64,
}

/// Exists while something of it waits or is held.
#[derive(Debug, Default)]
struct Load {
    first: VecDeque<Ticket>,
    again: VecDeque<Ticket>,
    held: usize,
    /// Number of its last grant.
    last: u64,
    /// Its last request that ended was silent.
    silent: bool,
}

#[derive(Debug, Default)]
struct Served {
    held: usize,
    last: u64,
    silent: bool,
}

#[derive(Debug)]
struct Held {
    key: Key,
    /// Time that it has waited for the store since it last moved [`PROGRESS`] bytes, without the present wait.
    waited: Duration,
    moved: u64,
    since: Option<Instant>,
    /// False: work that cannot be broken off.
    displaceable: bool,
    displaced: bool,
}

impl Load {
    fn counted(&self) -> usize {
        self.held + usize::from(self.silent)
    }
}

impl Served {
    fn counted(&self) -> usize {
        self.held + usize::from(self.silent)
    }
}

impl Held {
    fn silent_for(&self, now: Instant) -> Duration {
        self.waited + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

impl Shares {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            sources: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            held: HashMap::new(),
            waiting: 0,
            displaced: 0,
            grants: 0,
        }
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    pub(crate) fn held(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Slots of this endpoint.
    pub(crate) fn held_by(&self, endpoint: u64) -> usize {
        self.endpoints.get(&endpoint).map_or(0, |e| e.held)
    }

    /// Does this source wait for its first turn, have no slot, and a store that was not silent the last time it had
    /// one?
    pub(crate) fn only_waits(&self, key: Key) -> bool {
        self.sources.get(&key).is_some_and(|load| !load.first.is_empty() && load.held == 0 && !load.silent)
    }

    /// Tickets rise.
    /// Does the store of another source give it something, or is about to?
    pub(crate) fn others_move(&self, key: Key, now: Instant) -> bool {
        self.held.values().any(|held| held.key != key && held.silent_for(now) < SILENCE)
    }

    pub(crate) fn join(&mut self, ticket: Ticket, key: Key, turn: Turn) {
        let load = self.sources.entry(key).or_default();
        match turn {
            Turn::First => load.first.push_back(ticket),
            Turn::Again => load.again.push_back(ticket),
        }
        self.endpoints.entry(key.endpoint).or_default();
        self.waiting += 1;
    }

    /// The request that waited under this ticket has gone. False: it was granted, or is unknown.
    pub(crate) fn cancel(&mut self, ticket: Ticket, key: Key) -> bool {
        let Some(load) = self.sources.get_mut(&key) else { return false };
        let queues = [&mut load.first, &mut load.again].into_iter();
        let found = queues.filter_map(|queue| queue.binary_search(&ticket).ok().map(|at| (queue, at))).next();
        let Some((queue, at)) = found else { return false };
        queue.remove(at);
        self.waiting -= 1;
        self.tidy(key);
        true
    }

    /// A granted slot is free again.
    pub(crate) fn leave(&mut self, ticket: Ticket, now: Instant) {
        let Some(held) = self.held.remove(&ticket) else { return };
        self.displaced -= usize::from(held.displaced);
        let silent = held.silent_for(now) >= SILENCE;
        if let Some(load) = self.sources.get_mut(&held.key) {
            (load.held, load.silent) = (load.held - 1, silent);
        }
        if let Some(endpoint) = self.endpoints.get_mut(&held.key.endpoint) {
            (endpoint.held, endpoint.silent) = (endpoint.held - 1, silent);
        }
        self.tidy(held.key);
    }

    /// From now on it waits for the store.
    pub(crate) fn waits(&mut self, ticket: Ticket, now: Instant) {
        if let Some(held) = self.held.get_mut(&ticket) {
            held.since.get_or_insert(now);
        }
    }

    /// It has got this much, and does not wait for the store until it says so.
    pub(crate) fn moves(&mut self, ticket: Ticket, bytes: u64, now: Instant) {
        let Some(held) = self.held.get_mut(&ticket) else { return };
        held.waited = held.silent_for(now);
        held.since = None;
        held.moved += bytes;
        if held.moved >= PROGRESS {
            (held.waited, held.moved) = (Duration::ZERO, 0);
        }
    }

    pub(crate) fn cannot_be_displaced(&mut self, ticket: Ticket) {
        if let Some(held) = self.held.get_mut(&ticket) {
            held.displaceable = false;
        }
    }

    /// What is to be done now; to be asked until it says None. `admit` is asked of a request that would be next, and
    /// takes note of those that it admits.
    pub(crate) fn next(&mut self, now: Instant, admit: &mut dyn FnMut(Key, Turn) -> bool) -> Option<Step> {
        if self.waiting == 0 {
            return None;
        }
        let moving = self.held.values().filter(|held| held.silent_for(now) < SILENCE).count();
        if moving >= self.capacity {
            return None;
        }
        let silent: HashSet<Key> =
            self.held.values().filter(|held| held.silent_for(now) >= SILENCE).map(|held| held.key).collect();
        let mut order: Vec<Ranked> = self
            .sources
            .iter()
            .filter(|(_, load)| !load.first.is_empty() || !load.again.is_empty())
            .map(|(key, load)| {
                let endpoint = &self.endpoints[&key.endpoint];
                ((endpoint.counted(), endpoint.last, load.counted(), load.last), *key)
            })
            .collect();
        order.sort_unstable();
        let mut blocked = Vec::new();
        for (rank, key) in order {
            let load = self.sources.get_mut(&key).expect("it was just seen");
            let (held, all) = (self.held.len(), 2 * self.capacity);
            let room = held < self.capacity || held < all && !silent.contains(&key);
            if !room {
                blocked.push((rank, key));
                continue;
            }
            // The one that came first. Where only one of them is admitted, that one.
            let mut turns = [Turn::First, Turn::Again];
            if let (Some(first), Some(again)) = (load.first.front(), load.again.front())
                && again < first
            {
                turns.reverse();
            }
            for turn in turns {
                let queue = match turn {
                    Turn::First => &mut load.first,
                    Turn::Again => &mut load.again,
                };
                let Some(ticket) = queue.front().copied() else { continue };
                if admit(key, turn) {
                    queue.pop_front();
                    self.grant(ticket, key, now);
                    return Some(Step::Grant(ticket, key, turn));
                }
            }
        }
        // At most one for each source that waits: the others are on their way out.
        if self.displaced >= blocked.len() {
            return None;
        }
        let victim = blocked.iter().find_map(|(_, key)| self.victim_for(*key, now))?;
        self.held.get_mut(&victim).expect("it was just seen").displaced = true;
        self.displaced += 1;
        Some(Step::Displace(victim))
    }

    fn grant(&mut self, ticket: Ticket, key: Key, now: Instant) {
        self.waiting -= 1;
        self.grants += 1;
        let load = self.sources.get_mut(&key).expect("it has a waiter");
        (load.held, load.last) = (load.held + 1, self.grants);
        let endpoint = self.endpoints.get_mut(&key.endpoint).expect("it has a source");
        (endpoint.held, endpoint.last) = (endpoint.held + 1, self.grants);
        let held = Held {
            key,
            waited: Duration::ZERO,
            moved: 0,
            since: Some(now),
            displaceable: true,
            displaced: false,
        };
        self.held.insert(ticket, held);
    }

    /// The slot that has been silent longest, of a source that would still hold no less than the one that waits. One
    /// for each source that waits, until they are free.
    fn victim_for(&self, poorest: Key, now: Instant) -> Option<Ticket> {
        let (mine, of_mine) = (&self.endpoints[&poorest.endpoint], &self.sources[&poorest]);
        let gives = |held: &Held| {
            let key = held.key;
            // It is silent, so it counts as one that was.
            let (its, mine, none) = match key.endpoint == poorest.endpoint {
                true => (self.sources[&key].held + 1, of_mine.counted(), of_mine.held == 0),
                false => (self.endpoints[&key.endpoint].held + 1, mine.counted(), mine.held == 0),
            };
            its > mine + 1 || none && held.silent_for(now) >= LONG_SILENCE
        };
        self.held
            .iter()
            .filter(|(_, held)| held.displaceable && !held.displaced)
            .filter(|(_, held)| held.silent_for(now) >= DISPLACED_AFTER)
            .filter(|(_, held)| gives(held))
            .max_by_key(|(ticket, held)| {
                (self.held_by(held.key.endpoint), held.silent_for(now), Reverse(**ticket))
            })
            .map(|(ticket, _)| *ticket)
    }

    fn tidy(&mut self, key: Key) {
        let idle = |load: &Load| load.held == 0 && load.first.is_empty() && load.again.is_empty();
        if self.sources.get(&key).is_some_and(idle) {
            self.sources.remove(&key);
        }
        let from = Key { endpoint: key.endpoint, source: 0 };
        let to = Key { endpoint: key.endpoint, source: u64::MAX };
        if self.sources.range(from..=to).next().is_none() {
            self.endpoints.remove(&key.endpoint);
        }
    }
}

#[cfg(test)]
mod tests;
