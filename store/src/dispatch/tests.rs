use super::*;
use proptest::prelude::*;
use std::time::Duration;

/// Stores and those that read them, in a time of its own.
struct World {
    dispatcher: Dispatcher,
    now: Instant,
    waiting: usize,
    held: Vec<Request>,
}

#[derive(Clone, Copy)]
struct Request {
    ticket: Ticket,
    key: Key,
    passes: Passes,
    since: Instant,
}

const ANSWERED: Learned = Learned { endpoint: Verdict::Answered, source: Verdict::Answered };
const REFUSED: Learned = Learned { endpoint: Verdict::Answered, source: Verdict::Failed };
const SILENT: Learned = Learned { endpoint: Verdict::Unknown, source: Verdict::Failed };
const UNCONNECTED: Learned = Learned { endpoint: Verdict::Failed, source: Verdict::Unknown };

impl World {
    fn new(data: usize) -> Self {
        Self { dispatcher: Dispatcher::new(4, data, 1), now: Instant::now(), waiting: 0, held: Vec::new() }
    }

    fn open(&mut self, endpoint: &str, source: &str) -> Key {
        self.dispatcher.open(endpoint, source, 1, self.now)
    }

    fn join(&mut self, key: Key, turn: Turn) {
        let ticket = self.dispatcher.number();
        self.dispatcher.lane(Lane::Data).join(ticket, key, turn);
        self.waiting += 1;
    }

    /// Returns how many were let through.
    fn settle(&mut self) -> usize {
        let mut granted = 0;
        loop {
            let orders = self.dispatcher.dispatch(Lane::Data, self.now);
            if orders.is_empty() {
                return granted;
            }
            for order in orders {
                match order {
                    Order::Grant(ticket, key, passes) => {
                        granted += 1;
                        self.waiting -= 1;
                        self.held.push(Request { ticket, key, passes, since: self.now });
                    }
                    Order::Displace(ticket) => {
                        let at = self.held.iter().position(|r| r.ticket == ticket).unwrap();
                        let key =
                            self.end(at, Learned { endpoint: Verdict::Unknown, source: Verdict::Unknown });
                        self.join(key, Turn::First);
                    }
                }
            }
        }
    }

    fn end(&mut self, at: usize, learned: Learned) -> Key {
        let Request { ticket, key, passes, .. } = self.held.swap_remove(at);
        self.dispatcher.learn(key, passes, learned, self.now, 0.5);
        self.dispatcher.lane(Lane::Data).leave(ticket, self.now);
        key
    }

    /// Requests of `key` that have taken `latency` end so, and are made again. Returns how many.
    fn end_after(&mut self, key: Key, latency: Duration, learned: Learned, turn: Turn) -> usize {
        let done: Vec<_> = (0..self.held.len())
            .rev()
            .filter(|at| self.held[*at].key == key && self.now - self.held[*at].since >= latency)
            .collect();
        for at in &done {
            self.end(*at, learned);
            self.join(key, turn);
        }
        done.len()
    }

    fn one(&mut self, key: Key, learned: Learned) {
        self.join(key, Turn::First);
        assert_eq!(self.settle(), 1);
        self.end(self.held.len() - 1, learned);
    }

    fn is_away(&mut self, key: Key) -> bool {
        self.dispatcher.why(key, Lane::Data, Turn::First, self.now) == NoSlot::Away
    }
}

const TICK: Duration = Duration::from_millis(10);
const STALL: Duration = Duration::from_secs(10);

/// One endpoint that never answers, with a thousand readers, beside one that answers in 20 ms, for a minute.
#[test]
fn beside_a_frozen_endpoint_a_healthy_one_keeps_its_throughput() {
    let run = |frozen_readers: usize| {
        let mut world = World::new(48);
        let frozen = world.open("https://frozen", "a");
        let healthy = world.open("https://healthy", "b");
        (0..frozen_readers).for_each(|_| world.join(frozen, Turn::First));
        world.settle();
        (0..200).for_each(|_| world.join(healthy, Turn::First));
        let mut answered = 0;
        for _ in 0..6000 {
            world.settle();
            world.now += TICK;
            answered += world.end_after(healthy, 2 * TICK, ANSWERED, Turn::First);
            world.end_after(frozen, STALL, SILENT, Turn::Again);
        }
        answered
    };
    let (alone, beside) = (run(0), run(1000));
    println!("{beside} of {alone} answers");
    assert!(beside * 100 >= alone * 95, "{beside} of {alone}");
}

/// The same with fewer readers than slots, each of which asks for the next thing when it has the last, and with four
/// endpoints that freeze one after the other: what one gives back must not be taken by one that is silent.
#[test]
fn a_few_readers_one_request_after_the_other_keep_their_pace_beside_frozen_endpoints() {
    let run = |frozen: usize| {
        let mut world = World::new(48);
        let frozen: Vec<_> = (0..frozen).map(|k| world.open(&format!("https://frozen{k}"), "a")).collect();
        for key in &frozen {
            (0..1000).for_each(|_| world.join(*key, Turn::First));
            world.settle();
            world.now += TICK * 200;
        }
        let healthy = world.open("https://healthy", "b");
        (0..16).for_each(|_| world.join(healthy, Turn::First));
        let mut answered = 0;
        for _ in 0..3000 {
            world.settle();
            world.now += TICK;
            let done = world.held.iter().filter(|r| r.key == healthy).map(|r| r.ticket);
            for ticket in done.collect::<Vec<_>>() {
                answered += 1;
                let at = world.held.iter().position(|r| r.ticket == ticket).expect("it moves");
                world.end(at, ANSWERED);
                world.settle(); // another reader may be first
                world.join(healthy, Turn::First);
            }
            for key in &frozen {
                world.end_after(*key, STALL, SILENT, Turn::Again);
            }
        }
        answered
    };
    let (alone, beside_one, beside_four) = (run(0), run(1), run(4));
    println!("{beside_one} and {beside_four} of {alone} answers");
    assert!(beside_one * 100 >= alone * 95, "{beside_one} of {alone}");
    assert!(beside_four * 100 >= alone * 80, "{beside_four} of {alone}");
}

/// A thousand wait for a store that refuses everything for a minute, then answers.
#[test]
fn a_thousand_that_wait_ask_one_at_a_time_and_follow_ever_faster_when_it_answers() {
    let mut world = World::new(48);
    let key = world.open("https://a", "s");
    (0..1000).for_each(|_| world.join(key, Turn::First));
    let mut asked = 0;
    for _ in 0..6000 {
        asked += world.settle();
        world.now += TICK;
        world.end_after(key, 2 * TICK, REFUSED, Turn::Again);
    }
    // All slots once, and then probes.
    assert!((48 + 12..=48 + 30).contains(&asked), "{asked} requests in a minute");
    assert!(world.held.len() <= 1);
    let back = world.now;
    let mut first_second = 0;
    while world.waiting > 0 {
        let granted = world.settle();
        if world.now - back < Duration::from_millis(40) {
            first_second += granted;
        }
        world.now += TICK;
        let held: Vec<_> = (0..world.held.len()).rev().collect();
        for at in held {
            world.end(at, ANSWERED);
        }
        assert!(world.now - back < Duration::from_secs(8), "{} wait still", world.waiting);
    }
    assert!(first_second <= 16, "{first_second} at once");
}

#[test]
fn only_a_source_that_fails_is_away_and_what_cannot_be_reached_is_away_for_all() {
    let mut world = World::new(48);
    let (bad, good) = (world.open("https://a", "bad"), world.open("https://a", "good"));
    let other = world.open("https://b", "bad");
    for k in 0..5 {
        world.one(bad, if k % 2 == 0 { SILENT } else { REFUSED });
    }
    assert_eq!([bad, good, other].map(|key| world.is_away(key)), [true, false, false]);
    for _ in 0..5 {
        world.one(good, UNCONNECTED);
    }
    assert_eq!([bad, good, other].map(|key| world.is_away(key)), [true, true, false]);
}

#[test]
fn retries_beyond_the_budget_wait_without_a_slot_and_first_attempts_do_not() {
    let mut world = World::new(1000);
    let key = world.open("https://a", "s");
    (0..300).for_each(|_| world.join(key, Turn::Again));
    assert_eq!(world.settle(), 100); // saved up
    world.join(key, Turn::First);
    assert_eq!(world.settle(), 1);
    assert_eq!(world.dispatcher.why(key, Lane::Data, Turn::Again, world.now), NoSlot::Spent);
    world.now += Duration::from_secs(2);
    assert_eq!(world.settle(), 20);
    // Answers pay for a fifth as many.
    for _ in 0..52 {
        world.end(0, ANSWERED);
    }
    assert_eq!(world.settle(), 10);
}

#[test]
fn work_that_cannot_be_broken_off_has_a_part_of_the_slots() {
    let mut world = World::new(48);
    let key = world.dispatcher.open("file:///mnt", "s", 4, world.now);
    (0..100).for_each(|_| world.join(key, Turn::First));
    assert_eq!(world.settle(), 12);
    world.now += Duration::from_secs(60);
    assert_eq!(world.settle(), 0);
    assert!(world.is_away(key));
}

impl Dispatcher {
    pub(crate) fn is_empty(&self) -> bool {
        let idle = |lane: &Shares| lane.waiting() == 0 && lane.held() == 0;
        self.endpoints.is_empty() && self.sources.is_empty() && self.lanes.iter().all(idle)
    }
}

proptest! {
    /// Whatever stores do: once all answer, every reader is served, and nothing is left when they are closed.
    #[test]
    fn in_the_end_everybody_is_served(
        events in prop::collection::vec((0usize..4, 0u8..5, 0usize..40, 0u64..3000), 1..100),
    ) {
        let mut world = World::new(6);
        let keys = ["a", "a", "b", "c"].iter().enumerate();
        let keys: Vec<_> = keys.map(|(k, e)| world.open(&format!("https://{e}"), &format!("{k}"))).collect();
        for (which, what, many, ms) in events {
            match what {
                0 => (0..many).for_each(|_| world.join(keys[which], Turn::First)),
                1 => (0..many).for_each(|_| world.join(keys[which], Turn::Again)),
                _ => {
                    let learned = [SILENT, REFUSED, UNCONNECTED][usize::from(what) - 2];
                    for _ in 0..many.min(world.held.len()) {
                        let at = many % world.held.len();
                        world.end(at, learned);
                    }
                }
            }
            world.now += Duration::from_millis(ms);
            world.settle();
            prop_assert!(world.held.len() <= 12);
        }
        for _ in 0..20_000 {
            if world.waiting + world.held.len() == 0 {
                break;
            }
            while !world.held.is_empty() {
                world.end(0, ANSWERED);
            }
            world.now += TICK;
            world.settle();
        }
        prop_assert_eq!(world.waiting + world.held.len(), 0);
        keys.into_iter().for_each(|key| world.dispatcher.close(key));
        prop_assert!(world.dispatcher.is_empty());
    }
}
