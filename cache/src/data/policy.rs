//! S3-FIFO as a plain data structure: ids and sizes in, the next victim out. Says nothing about files or disks.
//!
//! ```text
//!             seen before (ghost)
//!   insert ──────────────────────────────► main ──► read since? again round : evicted
//!      └───► small (10 % of the bytes) ──► read more than once? main : evicted, remembered in ghost
//! ```

use std::collections::{HashMap, HashSet, VecDeque};

const FREQUENCY_MAX: u8 = 3;
/// Reads after the insertion that earn a place in the main queue (the paper's "more than one").
const PROMOTED_AT: u8 = 2;
const SMALL_PERCENT: u64 = 10;
const GHOST_MIN: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct Policy {
    nodes: HashMap<u64, Node>,
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    small_bytes: u64,
    main_bytes: u64,
    ghost: VecDeque<u64>,
    ghost_set: HashSet<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    bytes: u64,
    /// The caller's clock at the last insertion: which of several policies has the oldest candidate.
    stamp: u32,
    frequency: u8,
    in_main: bool,
}

/// The next file to go. `remember`: tell [`Policy::remember`] its fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Victim {
    pub id: u64,
    pub bytes: u64,
    pub remember: bool,
}

impl Policy {
    /// `fingerprint` is the same for the same key, whatever its id was before.
    pub(crate) fn insert(&mut self, id: u64, fingerprint: u64, bytes: u64, stamp: u32) {
        debug_assert!(!self.nodes.contains_key(&id), "ids are never reused");
        let in_main = self.ghost_set.remove(&fingerprint);
        self.nodes.insert(id, Node { bytes, stamp, frequency: 0, in_main });
        let (queue, sum) = self.queue(in_main);
        queue.push_back(id);
        *sum += bytes;
    }

    pub(crate) fn touch(&mut self, id: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.frequency = (node.frequency + 1).min(FREQUENCY_MAX);
        }
    }

    pub(crate) fn grow(&mut self, id: u64, by: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.bytes += by;
            let in_main = node.in_main;
            *self.queue(in_main).1 += by;
        }
    }

    pub(crate) fn remove(&mut self, id: u64) {
        if let Some(node) = self.nodes.remove(&id) {
            *self.queue(node.in_main).1 -= node.bytes;
        }
        // The queue keeps the id until it comes to the front or until the dead are many.
        let dead = self.small.len() + self.main.len() - self.nodes.len();
        if dead > self.nodes.len() + 64 {
            let nodes = &self.nodes;
            self.small.retain(|id| nodes.contains_key(id));
            self.main.retain(|id| nodes.contains_key(id));
        }
    }

    /// Takes the next victim out. Those that are `busy` are passed over and keep their turn for later.
    pub(crate) fn evict(&mut self, busy: impl Fn(u64) -> bool) -> Option<Victim> {
        // How many busy ones in a row have come to the front of each queue: all of them, and the other queue must give.
        let mut passed = [0, 0];
        loop {
            let spent = [passed[0] >= self.small.len(), passed[1] >= self.main.len()];
            let from_main = match spent {
                [true, true] => return None,
                [false, false] => self.take_from_main(),
                [small_spent, _] => small_spent,
            };
            let id = self.queue(from_main).0.pop_front()?;
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            if busy(id) {
                self.queue(from_main).0.push_back(id);
                passed[usize::from(from_main)] += 1;
                continue;
            }
            // Ends, because every idle id is promoted at most once and loses a frequency each time round.
            passed = [0, 0];
            if from_main && node.frequency > 0 {
                node.frequency -= 1;
                self.main.push_back(id);
            } else if !from_main && node.frequency >= PROMOTED_AT {
                node.frequency = 0;
                node.in_main = true;
                let bytes = node.bytes;
                self.small_bytes -= bytes;
                self.main_bytes += bytes;
                self.main.push_back(id);
            } else {
                let victim = Victim { id, bytes: node.bytes, remember: !from_main };
                self.nodes.remove(&id);
                *self.queue(from_main).1 -= victim.bytes;
                return Some(victim);
            }
        }
    }

    /// A victim's fingerprint: if its key comes back soon, it goes straight to the main queue.
    pub(crate) fn remember(&mut self, fingerprint: u64) {
        if self.ghost_set.insert(fingerprint) {
            self.ghost.push_back(fingerprint);
        }
        while self.ghost.len() > self.nodes.len().max(GHOST_MIN) {
            if let Some(old) = self.ghost.pop_front() {
                self.ghost_set.remove(&old);
            }
        }
    }

    /// Stamp of the file whose turn is next.
    pub(crate) fn oldest(&mut self) -> Option<u32> {
        loop {
            let from_main = self.take_from_main();
            let id = *self.queue(from_main).0.front()?;
            if let Some(node) = self.nodes.get(&id) {
                return Some(node.stamp);
            }
            self.queue(from_main).0.pop_front();
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.small_bytes + self.main_bytes
    }

    fn take_from_main(&self) -> bool {
        let small_share = self.bytes() * SMALL_PERCENT / 100;
        self.small.is_empty() || (!self.main.is_empty() && self.small_bytes < small_share)
    }

    fn queue(&mut self, main: bool) -> (&mut VecDeque<u64>, &mut u64) {
        if main { (&mut self.main, &mut self.main_bytes) } else { (&mut self.small, &mut self.small_bytes) }
    }
}
