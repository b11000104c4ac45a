use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

const CAPACITY: usize = 8;

fn key(endpoint: u64, source: u64) -> Key {
    Key { endpoint, source }
}

/// A world in which stores move, or do not.
struct World {
    shares: Shares,
    now: Instant,
    tickets: u64,
    held: Vec<(Ticket, Key)>,
    waiting: Vec<(Ticket, Key)>,
}

impl World {
    fn new() -> Self {
        let shares = Shares::new(CAPACITY);
        Self { shares, now: Instant::now(), tickets: 0, held: Vec::new(), waiting: Vec::new() }
    }

    fn join(&mut self, key: Key, many: usize) {
        for _ in 0..many {
            self.tickets += 1;
            self.shares.join(self.tickets, key, Turn::First);
            self.waiting.push((self.tickets, key));
        }
    }

    /// Does all there is to do; the displaced go at once, and wait again.
    fn settle(&mut self) {
        while let Some(step) = self.shares.next(self.now, &mut |_, _| true) {
            match step {
                Step::Grant(ticket, key, _) => {
                    self.waiting.retain(|(waits, _)| *waits != ticket);
                    self.held.push((ticket, key));
                }
                Step::Displace(ticket) => {
                    let key = self.leave(ticket);
                    self.join(key, 1);
                }
            }
        }
    }

    fn leave(&mut self, ticket: Ticket) -> Key {
        let at = self.held.iter().position(|(held, _)| *held == ticket).expect("it is held");
        self.shares.leave(ticket, self.now);
        self.held.swap_remove(at).1
    }

    fn of(&self, endpoint: u64) -> usize {
        self.held.iter().filter(|(_, key)| key.endpoint == endpoint).count()
    }

    /// So much time passes; of these endpoints every request ends and is followed by another.
    fn pass(&mut self, time: Duration, alive: &[u64]) -> usize {
        self.now += time;
        let ended: Vec<_> = self.held.iter().filter(|(_, k)| alive.contains(&k.endpoint)).copied().collect();
        for (ticket, key) in &ended {
            self.leave(*ticket);
            self.join(*key, 1);
        }
        self.settle();
        ended.len()
    }
}

const TICK: Duration = Duration::from_millis(10);

#[test]
fn a_source_alone_takes_every_slot_and_shares_with_whoever_comes() {
    let mut world = World::new();
    world.join(key(1, 1), 100);
    world.settle();
    assert_eq!(world.held.len(), CAPACITY);
    world.join(key(2, 1), 100);
    world.join(key(2, 2), 100);
    world.pass(TICK, &[1, 2]);
    assert_eq!((world.of(1), world.of(2)), (CAPACITY / 2, CAPACITY / 2));
    let second = world.held.iter().filter(|(_, k)| *k == key(2, 2)).count();
    assert_eq!(second, CAPACITY / 4);
}

#[test]
fn beside_a_frozen_endpoint_a_healthy_one_has_all_that_it_has_alone() {
    let rounds = |with_frozen: bool| {
        let mut world = World::new();
        if with_frozen {
            world.join(key(1, 1), 1000);
            world.settle();
        }
        world.join(key(2, 1), 1000);
        world.settle();
        (0..600).map(|_| world.pass(TICK, &[2])).sum::<usize>()
    };
    let (alone, beside) = (rounds(false), rounds(true));
    // It waits until the other one's silence is known.
    assert!(beside * 100 >= alone * 95, "{beside} of {alone}");
}

#[test]
fn a_newcomer_gets_in_whatever_others_hold() {
    let mut world = World::new();
    for endpoint in 1..=20 {
        world.join(key(endpoint, 1), 1000);
        world.settle();
        world.pass(DISPLACED_AFTER, &[]);
        assert!(world.held.len() <= 2 * CAPACITY);
        let share = 2 * CAPACITY / endpoint as usize;
        assert!(
            world.of(endpoint) >= share.min(CAPACITY).saturating_sub(1),
            "{endpoint}: {}",
            world.of(endpoint)
        );
    }
    // There are more endpoints than slots now: they take turns.
    world.join(key(99, 1), 10);
    world.pass(LONG_SILENCE, &[]);
    assert!(world.of(99) >= 1);
}

#[test]
fn one_that_answers_is_served_beside_more_silent_ones_than_there_are_slots() {
    let mut world = World::new();
    for endpoint in 1..=4 * CAPACITY as u64 {
        world.join(key(endpoint, 1), 10);
        world.settle();
        world.pass(DISPLACED_AFTER, &[]);
    }
    world.join(key(99, 1), 100);
    world.settle();
    let answered: usize = (0..1000).map(|_| world.pass(TICK, &[99])).sum();
    assert!(answered >= 900, "{answered} in 1000 turns");
}

#[test]
fn a_trickle_is_silence_and_a_wait_of_our_own_is_not() {
    let mut world = World::new();
    world.join(key(1, 1), CAPACITY);
    world.settle();
    world.join(key(2, 1), CAPACITY);
    for _ in 0..20 {
        // A byte at a time.
        world.now += SILENCE / 10;
        for (ticket, _) in &world.held {
            world.shares.moves(*ticket, 1, world.now);
            world.shares.waits(*ticket, world.now);
        }
    }
    world.settle();
    assert_eq!(world.of(2), CAPACITY);

    let mut world = World::new();
    world.join(key(1, 1), CAPACITY);
    world.settle();
    for (ticket, _) in &world.held {
        world.shares.moves(*ticket, 1, world.now);
    }
    world.join(key(2, 1), CAPACITY);
    world.pass(SILENCE * 100, &[]);
    assert_eq!(world.of(2), 0);
}

#[test]
fn work_that_cannot_be_broken_off_is_left_alone() {
    let mut world = World::new();
    for endpoint in [1, 2] {
        world.join(key(endpoint, 1), 100);
        world.settle();
        world.pass(SILENCE, &[]);
    }
    let held = world.held.clone();
    held.iter().for_each(|(ticket, _)| world.shares.cannot_be_displaced(*ticket));
    assert_eq!(world.held.len(), 2 * CAPACITY);
    world.join(key(3, 1), 1);
    world.pass(LONG_SILENCE, &[]);
    assert_eq!(world.of(3), 0);
}

#[test]
fn a_source_that_is_silent_itself_borrows_nothing() {
    let mut world = World::new();
    world.join(key(1, 1), 100);
    world.settle();
    world.pass(SILENCE, &[]);
    assert_eq!(world.held.len(), CAPACITY);
}

#[test]
fn whoever_is_not_admitted_holds_up_nobody_and_is_asked_in_both_turns() {
    let mut world = World::new();
    world.join(key(1, 1), 10);
    world.shares.join(1000, key(1, 1), Turn::Again);
    let mut asked = HashSet::new();
    let mut steps = Vec::new();
    let mut admit = |_: Key, turn: Turn| {
        asked.insert(format!("{turn:?}"));
        turn == Turn::Again
    };
    while let Some(step) = world.shares.next(world.now, &mut admit) {
        steps.push(step);
    }
    assert_eq!(steps, [Step::Grant(1000, key(1, 1), Turn::Again)]);
    assert_eq!(asked.len(), 2);
}

proptest! {
    /// Whatever comes, goes, moves and falls silent: the bounds hold, no source waits where there is room, one that is
    /// gone leaves nothing behind, and in the end every one is served.
    #[test]
    fn bounds_hold_no_room_is_wasted_and_nobody_starves(
        events in prop::collection::vec((0u8..6, 0u64..4, 0u64..3, 0usize..64, 0u64..1500), 1..150),
    ) {
        let mut world = World::new();
        for (what, endpoint, source, which, ms) in events {
            match what {
                0 | 1 => world.join(key(endpoint, source), which % 12),
                2 if !world.held.is_empty() => {
                    let ticket = world.held[which % world.held.len()].0;
                    world.leave(ticket);
                }
                3 if !world.held.is_empty() => {
                    let ticket = world.held[which % world.held.len()].0;
                    world.shares.moves(ticket, PROGRESS, world.now);
                    world.shares.waits(ticket, world.now);
                }
                4 if !world.waiting.is_empty() => {
                    let (ticket, key) = world.waiting.swap_remove(which % world.waiting.len());
                    prop_assert!(world.shares.cancel(ticket, key));
                }
                _ => world.now += Duration::from_millis(ms),
            }
            world.settle();
            prop_assert_eq!(world.shares.held(), world.held.len());
            prop_assert_eq!(world.shares.waiting(), world.waiting.len());
            prop_assert!(world.held.len() <= 2 * CAPACITY);
            if !world.waiting.is_empty() {
                prop_assert!(world.held.len() >= CAPACITY, "{} held while {} wait", world.held.len(), world.waiting.len());
            }
        }
        // Every endpoint that waits gets a slot within a second, though none of the others ever answers.
        world.pass(DISPLACED_AFTER, &[]);
        for (_, key) in &world.waiting {
            let held = [0, 1, 2, 3].map(|e| world.of(e));
            prop_assert!(world.of(key.endpoint) >= 1, "{key:?} starves: {held:?}");
        }
        for _ in 0..2000 {
            if world.held.is_empty() {
                break;
            }
            let ticket = world.held[0].0;
            world.leave(ticket);
            world.settle();
        }
        prop_assert!(world.waiting.is_empty() && world.held.is_empty());
        prop_assert!(world.shares.sources.is_empty() && world.shares.endpoints.is_empty());
    }
}
