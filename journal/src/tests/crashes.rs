//! Random histories, crashed at any call to the disk: what is there afterwards is a prefix of what was done.

use super::sim::{Fault, Kind, Sim};
use super::{Records, open, records};
use crate::{Change, Journal, JournalError};
use proptest::prelude::*;

/// A key, and the length of its value; None: it is deleted.
type Edit = (u8, Option<u32>);

#[derive(Clone, Debug)]
enum Step {
    Batch(Vec<Edit>),
    Sync,
}

/// From one opening to the next.
#[derive(Clone, Debug)]
struct Life {
    steps: Vec<Step>,
    faults: Vec<Fault>,
    ends_by_power_loss: bool,
}

/// What may be there.
struct Model {
    /// The first, after each change; the last one is what is in memory.
    states: Vec<Records>,
    /// The first of them that a power loss may leave.
    durable: usize,
    /// With the change in which the process died.
    unfinished: Option<Records>,
    has_lost_power: bool,
    /// Makes each value another one.
    count: u64,
}

impl Model {
    fn opened(&mut self, found: Records) {
        let from = if self.has_lost_power { self.durable } else { self.states.len() - 1 };
        let is_allowed = self.states[from..].iter().chain(&self.unfinished).any(|state| *state == found);
        assert!(is_allowed, "not a prefix of the history that has what was synced");
        (self.states, self.durable, self.unfinished, self.has_lost_power) = (vec![found], 0, None, false);
    }

    fn values(&mut self, edits: &[Edit]) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
        let mut value = |len: u32| {
            self.count += 1;
            self.count.to_le_bytes().into_iter().cycle().take(len as usize).collect()
        };
        edits.iter().map(|(key, len)| (vec![b'k', *key], len.map(&mut value))).collect()
    }
}

fn live(sim: &Sim, model: &mut Model, life: &Life) {
    sim.begin(&life.faults);
    let mut journal = match open(sim) {
        Ok((journal, _)) => journal,
        Err(error) => {
            assert!(sim.has_failed(), "{error:?}");
            let is_disk = matches!(
                error,
                JournalError::Io { .. } | JournalError::Full(_) | JournalError::NotDurable(_)
            );
            assert!(is_disk, "{error:?}");
            return;
        }
    };
    model.opened(records(&journal));
    for step in &life.steps {
        match step {
            Step::Batch(edits) => change(sim, model, &mut journal, edits),
            Step::Sync => match journal.sync() {
                Ok(()) => model.durable = model.states.len() - 1,
                Err(JournalError::NotDurable(_) | JournalError::Poisoned) => {
                    assert!(sim.has_failed());
                    assert!(matches!(journal.put(b"k", b"v"), Err(JournalError::Poisoned)));
                }
                Err(error) => panic!("{error:?}"),
            },
        }
        assert!(records(&journal) == *model.states.last().unwrap(), "in memory is what was done");
        if sim.is_dead() {
            return;
        }
    }
}

fn change(sim: &Sim, model: &mut Model, journal: &mut Journal, edits: &[Edit]) {
    let values = model.values(edits);
    let mut after = model.states.last().unwrap().clone();
    let mut changes = Vec::new();
    for (key, value) in &values {
        match value {
            Some(value) => {
                after.insert(key.clone(), value.clone());
                changes.push(Change::Put { key, value });
            }
            None => {
                after.remove(key);
                changes.push(Change::Delete { key });
            }
        }
    }
    match journal.batch(&changes) {
        Ok(()) => model.states.push(after),
        Err(error) => {
            assert!(sim.has_failed(), "{error:?}");
            if sim.is_dead() {
                model.unfinished = Some(after);
            }
        }
    }
}

fn run(seed: u64, lives: &[Life]) {
    let sim = Sim::new(seed);
    let states = vec![Records::new()];
    let mut model = Model { states, durable: 0, unfinished: None, has_lost_power: false, count: 0 };
    for life in lives {
        live(&sim, &mut model, life);
        if life.ends_by_power_loss {
            sim.power_loss();
            model.has_lost_power = true;
        }
    }
    let quiet = Life { steps: Vec::new(), faults: Vec::new(), ends_by_power_loss: true };
    live(&sim, &mut model, &quiet);
    sim.power_loss();
    model.has_lost_power = true;
    live(&sim, &mut model, &quiet);
}

fn edit() -> impl Strategy<Value = Edit> {
    let len = prop_oneof![2 => 0u32..100, 6 => 0u32..6000, 1 => 60_000u32..70_000];
    (0u8..12, prop_oneof![4 => len.prop_map(Some), 1 => Just(None)])
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => edit().prop_map(|edit| Step::Batch(vec![edit])),
        2 => prop::collection::vec(edit(), 2..5).prop_map(Step::Batch),
        2 => Just(Step::Sync),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    let kind = prop_oneof![3 => Just(Kind::Die), 2 => Just(Kind::Full), 2 => Just(Kind::Eio)];
    (prop_oneof![1 => 0u32..20, 3 => 0u32..100], kind, 1u32..4).prop_map(|(at, kind, times)| Fault {
        at,
        kind,
        times,
    })
}

fn life() -> impl Strategy<Value = Life> {
    let steps = prop::collection::vec(step(), 0..60);
    let faults = prop::collection::vec(fault(), 0..3);
    // An error, and the end while it is dealt with.
    let error_and_death = (fault(), 1u32..4).prop_map(|(error, after)| {
        let kind = if error.kind == Kind::Die { Kind::Full } else { error.kind };
        let death = Fault { at: error.at + after, kind: Kind::Die, times: 1 };
        vec![death, Fault { kind, times: 1, ..error }]
    });
    (steps, prop_oneof![3 => faults, 1 => error_and_death], any::<bool>())
        .prop_map(|(steps, faults, ends_by_power_loss)| Life { steps, faults, ends_by_power_loss })
}

proptest! {
    // All that is random is in what is printed, the disk's seed included.
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_crash_leaves_a_prefix_that_has_all_that_was_synced(
        seed in any::<u64>(), lives in prop::collection::vec(life(), 1..5)
    ) {
        run(seed, &lives);
    }
}

/// Overwrites a few keys until two compactions are behind it, and syncs now and then.
fn history() -> Vec<Step> {
    let step = |n: u32| match n % 7 {
        3 => Step::Sync,
        5 => Step::Batch(vec![((n % 5) as u8, None), ((n % 3) as u8, Some(900)), (9, Some(n))]),
        _ => Step::Batch(vec![((n % 5) as u8, Some(3000 + n))]),
    };
    (0..64).map(step).collect()
}

#[test]
fn every_call_to_the_disk_may_be_the_last() {
    let sim = Sim::new(0);
    let (mut journal, _) = open(&sim).unwrap();
    let states = vec![Records::new()];
    let mut model = Model { states, durable: 0, unfinished: None, has_lost_power: false, count: 0 };
    for step in history() {
        match step {
            Step::Batch(edits) => change(&sim, &mut model, &mut journal, &edits),
            Step::Sync => journal.sync().unwrap(),
        }
    }
    let calls = sim.calls();
    let renames = sim.take_log().iter().filter(|call| **call == "rename").count();
    assert!(renames >= 3, "a creation and two compactions: {renames}");
    for at in 0..calls {
        for seed in 0..16 {
            let faults = vec![Fault { at, kind: Kind::Die, times: 1 }];
            run(seed, &[Life { steps: history(), faults, ends_by_power_loss: seed % 4 != 0 }]);
        }
    }
}

#[test]
fn every_call_of_an_opening_may_be_the_last() {
    for at in 0..24 {
        for seed in 0..50 {
            let first = Life { steps: history(), faults: Vec::new(), ends_by_power_loss: seed % 4 != 0 };
            let faults = vec![Fault { at, kind: Kind::Die, times: 1 }];
            let second = Life { steps: Vec::new(), faults, ends_by_power_loss: seed % 3 != 0 };
            run(seed, &[first, second]);
        }
    }
}
