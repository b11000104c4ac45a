//! S3-FIFO against its own promises.

use super::super::policy::Policy;
use proptest::prelude::*;
use std::collections::HashMap;

#[derive(Clone, Debug)]
enum Step {
    Insert(u64),
    Touch(prop::sample::Index),
    Grow(prop::sample::Index, u64),
    Remove(prop::sample::Index),
    Evict { busy_below: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    use prop::sample::Index;
    prop_oneof![
        4 => (1u64..1000).prop_map(Step::Insert),
        4 => any::<Index>().prop_map(Step::Touch),
        1 => (any::<Index>(), 1u64..100).prop_map(|(i, n)| Step::Grow(i, n)),
        1 => any::<Index>().prop_map(Step::Remove),
        3 => (0u64..20).prop_map(|busy_below| Step::Evict { busy_below }),
    ]
}

proptest! {
    /// Bytes always add up, a victim exists exactly when something idle does, and nothing is evicted twice.
    #[test]
    fn the_books_balance(steps in prop::collection::vec(step(), 1..400)) {
        let mut policy = Policy::default();
        let mut model: HashMap<u64, u64> = HashMap::new();
        let mut next = 0;
        let pick = |model: &HashMap<u64, u64>, index: prop::sample::Index| {
            let mut ids: Vec<u64> = model.keys().copied().collect();
            ids.sort_unstable();
            (!ids.is_empty()).then(|| ids[index.index(ids.len())])
        };
        for step in steps {
            match step {
                Step::Insert(bytes) => {
                    // Fingerprints repeat, as keys that come back do.
                    policy.insert(next, next % 37, bytes, next as u32);
                    model.insert(next, bytes);
                    next += 1;
                }
                Step::Touch(index) => pick(&model, index).into_iter().for_each(|id| policy.touch(id)),
                Step::Grow(index, by) => {
                    if let Some(id) = pick(&model, index) {
                        policy.grow(id, by);
                        *model.get_mut(&id).unwrap() += by;
                    }
                }
                Step::Remove(index) => {
                    if let Some(id) = pick(&model, index) {
                        policy.remove(id);
                        model.remove(&id);
                    }
                }
                Step::Evict { busy_below } => {
                    let idle = model.keys().any(|&id| id >= busy_below);
                    let victim = policy.evict(|id| id < busy_below);
                    prop_assert_eq!(victim.is_some(), idle);
                    if let Some(victim) = victim {
                        prop_assert!(victim.id >= busy_below);
                        prop_assert_eq!(model.remove(&victim.id), Some(victim.bytes));
                        if victim.remember {
                            policy.remember(victim.id % 37);
                        }
                    }
                }
            }
            prop_assert_eq!(policy.bytes(), model.values().sum::<u64>());
            prop_assert_eq!(policy.oldest().is_some(), !model.is_empty());
        }
        while let Some(victim) = policy.evict(|_| false) {
            prop_assert!(model.remove(&victim.id).is_some());
        }
        prop_assert!(model.is_empty());
    }
}

#[test]
fn a_scan_does_not_push_out_what_was_read_more_than_once() {
    let mut policy = Policy::default();
    for id in 0..10 {
        policy.insert(id, id, 1, 0);
        policy.touch(id);
        policy.touch(id);
    }
    let mut gone = Vec::new();
    for id in 100..1100 {
        policy.insert(id, id, 1, 0);
        while policy.bytes() > 100 {
            gone.push(policy.evict(|_| false).unwrap().id);
        }
    }
    assert!(gone.iter().all(|&id| id >= 100));
}

#[test]
fn what_comes_back_soon_goes_straight_to_the_main_queue() {
    let mut policy = Policy::default();
    policy.insert(1, 77, 1, 0);
    let victim = policy.evict(|_| false).unwrap();
    assert!(victim.remember);
    policy.remember(77);
    policy.insert(2, 77, 1, 0);
    for id in 10..60 {
        policy.insert(id, id, 1, 0);
    }
    let evicted: Vec<u64> = std::iter::from_fn(|| policy.evict(|_| false)).take(40).map(|v| v.id).collect();
    assert!(!evicted.contains(&2));
}
