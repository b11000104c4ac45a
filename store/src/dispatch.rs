//! Who may send a request now: the fair shares, the breakers and the budgets of all sources of one agent, as one
//! machine.
//!
//! A slot is granted where `shares.rs` says whose turn it is, the breakers of the source and of its endpoint let it
//! through, and, for another attempt, the endpoint's budget covers it. No request holds a slot while it waits for any
//! of these.
//!
//! **Two breakers.** No connection at all (refused, unreachable, unknown host) cannot be a tenant's doing: it counts
//! for the endpoint, scheme, host and port, and so for all that use it. A connection without a proper answer (silence,
//! 5xx) may be about this bucket or these keys, so it counts for this source at this endpoint: no tenant can make a
//! store look away that answers others. 4xx is an answer.
//!
//! What is known of an endpoint or a source lives as long as a source that uses it is open: their number is that of
//! the open sources, however many a tenant may have named. Pure: the time comes in.

use crate::breaker::{Breaker, Pass, Verdict};
use crate::budget::Budget;
use crate::shares::{Key, Shares, Step, Ticket, Turn};
use std::collections::HashMap;
use tokio::time::Instant;

/// Listings and lookups have slots of their own: a person's `ls` does not queue behind a thousand parts of a file. So have
/// uploads: a checkpoint does not starve readers, nor they it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Metadata,
    Data,
    Upload,
}

impl Lane {
    pub(crate) const ALL: [Self; 3] = [Self::Metadata, Self::Data, Self::Upload];
}

/// Why a request waited in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// Others had all slots of this node.
    Busy,
    /// The store is known not to answer.
    Away,
    /// The store has answered too little to be asked again yet.
    Spent,
}

/// What a request learned of its endpoint and of its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Learned {
    pub(crate) endpoint: Verdict,
    pub(crate) source: Verdict,
}

/// In which states of both breakers a request was let through.
pub(crate) type Passes = (Pass, Pass);

#[derive(Debug)]
pub(crate) enum Order {
    Grant(Ticket, Key, Passes),
    Displace(Ticket),
}

#[derive(Debug)]
pub(crate) struct Dispatcher {
    lanes: [Shares; 3],
    endpoints: HashMap<u64, Endpoint>,
    sources: HashMap<Key, Source>,
    /// Numbers of endpoints, sources and tickets.
    next: u64,
}

#[derive(Debug)]
struct Endpoint {
    name: String,
    breaker: Breaker,
    budget: Budget,
    /// Most slots in each lane; None: no limit of its own.
    most: Option<[usize; 3]>,
}

#[derive(Debug)]
struct Source {
    name: String,
    breaker: Breaker,
    /// How often it is open.
    open: usize,
}

impl Dispatcher {
    pub(crate) fn new(metadata: usize, data: usize, uploads: usize) -> Self {
        Self {
            lanes: [metadata, data, uploads].map(Shares::new),
            endpoints: HashMap::new(),
            sources: HashMap::new(),
            next: 1,
        }
    }

    pub(crate) fn lane(&mut self, lane: Lane) -> &mut Shares {
        &mut self.lanes[lane as usize]
    }

    pub(crate) fn anybody_waits(&self) -> bool {
        self.lanes.iter().any(|lane| lane.waiting() > 0)
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// `endpoint`: scheme, host and port. `source`: what its readers share. `part`: it has at most this part of the
    /// slots (1: all), for its work cannot be broken off. To be closed as often as opened.
    pub(crate) fn open(&mut self, endpoint: &str, source: &str, part: usize, now: Instant) -> Key {
        let known = self.endpoints.iter().find(|(_, e)| e.name == endpoint).map(|(id, _)| *id);
        let endpoint = known.unwrap_or_else(|| {
            let most = |lane: &Shares| (lane.capacity() / part).max(1);
            let most = (part > 1).then(|| self.lanes.each_ref().map(most));
            let id = self.number();
            let (breaker, budget) = (Breaker::new(), Budget::new(now));
            self.endpoints.insert(id, Endpoint { name: endpoint.to_owned(), breaker, budget, most });
            id
        });
        let known = self.sources.iter().find(|(k, s)| k.endpoint == endpoint && s.name == source);
        let key = known.map(|(key, _)| *key).unwrap_or_else(|| {
            let key = Key { endpoint, source: self.number() };
            let breaker = Breaker::new();
            self.sources.insert(key, Source { name: source.to_owned(), breaker, open: 0 });
            key
        });
        self.again(key);
        key
    }

    /// Opened once more, by a source that has it.
    pub(crate) fn again(&mut self, key: Key) {
        if let Some(source) = self.sources.get_mut(&key) {
            source.open += 1;
        }
    }

    pub(crate) fn close(&mut self, key: Key) {
        let Some(source) = self.sources.get_mut(&key) else { return };
        source.open -= 1;
        if source.open == 0 {
            self.sources.remove(&key);
            if !self.sources.keys().any(|other| other.endpoint == key.endpoint) {
                self.endpoints.remove(&key.endpoint);
            }
        }
    }

    /// What is to be done now.
    pub(crate) fn dispatch(&mut self, lane: Lane, now: Instant) -> Vec<Order> {
        let mut orders = Vec::new();
        let Self { lanes, endpoints, sources, .. } = self;
        let shares = &mut lanes[lane as usize];
        // Counted here, for `shares` is busy while it asks.
        let limited = endpoints.iter().filter(|(_, e)| e.most.is_some());
        let mut used: HashMap<u64, usize> = limited.map(|(id, _)| (*id, shares.held_by(*id))).collect();
        loop {
            let mut passes = None;
            let mut admit = |key: Key, turn: Turn| {
                let Some(endpoint) = endpoints.get_mut(&key.endpoint) else { return false };
                let Some(source) = sources.get_mut(&key) else { return false };
                let full =
                    |most: [usize; 3]| used.get(&key.endpoint).is_some_and(|n| *n >= most[lane as usize]);
                if endpoint.most.is_some_and(full) {
                    return false;
                }
                if !endpoint.breaker.admits(now) || !source.breaker.admits(now) {
                    return false;
                }
                // Where the store is asked whether it is back the budget is not: those are few.
                let probe = !endpoint.breaker.is_closed() || !source.breaker.is_closed();
                if turn == Turn::Again && !probe {
                    if !endpoint.budget.covers(now) {
                        return false;
                    }
                    endpoint.budget.withdraw();
                }
                used.entry(key.endpoint).and_modify(|n| *n += 1);
                passes = Some((endpoint.breaker.begin(now), source.breaker.begin(now)));
                true
            };
            match (shares.next(now, &mut admit), passes) {
                (Some(Step::Grant(ticket, key, _)), Some(passes)) => {
                    orders.push(Order::Grant(ticket, key, passes));
                }
                (Some(Step::Displace(ticket)), _) => orders.push(Order::Displace(ticket)),
                _ => return orders,
            }
        }
    }

    /// A request has learned something. `random`: 0 to 1.
    pub(crate) fn learn(&mut self, key: Key, passes: Passes, learned: Learned, now: Instant, random: f64) {
        if let Some(endpoint) = self.endpoints.get_mut(&key.endpoint) {
            if learned.source == Verdict::Answered {
                endpoint.budget.deposit();
            }
            endpoint.breaker.end(passes.0, learned.endpoint, now, random);
        }
        if let Some(source) = self.sources.get_mut(&key) {
            source.breaker.end(passes.1, learned.source, now, random);
        }
    }

    /// Does this source wait for slots of others, and for nothing else?
    pub(crate) fn is_queued(&mut self, key: Key, lane: Lane, now: Instant) -> bool {
        self.lanes[lane as usize].only_waits(key) && self.why(key, lane, Turn::First, now) == NoSlot::Busy
    }

    /// Do requests of other sources get on?
    pub(crate) fn others_move(&self, key: Key, now: Instant) -> bool {
        self.lanes.iter().any(|lane| lane.others_move(key, now))
    }

    /// Why a request of this source was not let through so far.
    pub(crate) fn why(&mut self, key: Key, lane: Lane, turn: Turn, now: Instant) -> NoSlot {
        let Some(endpoint) = self.endpoints.get_mut(&key.endpoint) else { return NoSlot::Busy };
        let shares = &self.lanes[lane as usize];
        let closed = self.sources.get(&key).is_none_or(|s| s.breaker.is_closed());
        // Where its own requests hang in the kernel no other source is in the way.
        let hangs = endpoint.most.is_some_and(|most| shares.held_by(key.endpoint) >= most[lane as usize]);
        if !closed || !endpoint.breaker.is_closed() || hangs {
            return NoSlot::Away;
        }
        match turn {
            Turn::Again if !endpoint.budget.covers(now) => NoSlot::Spent,
            _ => NoSlot::Busy,
        }
    }
}

#[cfg(test)]
mod tests;
