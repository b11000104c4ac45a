//! Histories of a node, each from a seed: MILLPOND_SEED=n MILLPOND_HISTORIES=1 repeats the one that failed.

use csi_plugin::broker::handoff::machine::TRANSITIONS as HANDOFFS;
use node_agent::supervisor::machine::TRANSITIONS;
use sim::{Plan, STEPS, Summary, World};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Transitions that a thousand histories may miss: they take three rare things at once.
const RARE: usize = 2;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn whatever_dies_when_every_call_is_answered_and_nothing_is_left() {
    let first = number("MILLPOND_SEED").unwrap_or_else(rand::random);
    let count = number("MILLPOND_HISTORIES").unwrap_or(1000);
    let mut all = Summary::default();
    let (mut transitions, mut handoffs) = (BTreeSet::new(), BTreeSet::new());
    for seed in (0..count).map(|n| first.wrapping_add(n)) {
        let plan = Plan { volumes: 1 + (seed % 4) as usize, faults: 200 };
        let summary = World::history(seed, plan)
            .unwrap_or_else(|error| panic!("MILLPOND_SEED={seed} MILLPOND_HISTORIES=1: {error:#}"));
        for (what, times) in &summary.faults {
            *all.faults.entry(what).or_default() += times;
        }
        all.answered += summary.answered;
        all.poisoned += summary.poisoned;
        all.ended += summary.ended;
        all.heals += summary.heals;
        all.renewals += summary.renewals;
        all.workers += summary.workers;
        all.stall = all.stall.max(summary.stall);
        for (step, times) in &summary.steps {
            *all.steps.entry(step).or_default() += times;
        }
        transitions.extend(summary.transitions);
        handoffs.extend(summary.handoffs);
        for (how, times) in &summary.outcomes {
            *all.outcomes.entry(how).or_default() += times;
        }
    }
    println!(
        "{count} histories from seed {first}: {:?}; {} workers, {} heals, {} renewals, {} calls answered (longest {:?}), {} \
         poisoned, {} of mounts that had ended",
        all.faults, all.workers, all.heals, all.renewals, all.answered, all.stall, all.poisoned, all.ended
    );
    let missing: Vec<_> = TRANSITIONS.iter().filter(|it| !transitions.contains(*it)).collect();
    let missing_handoffs: Vec<_> = HANDOFFS.iter().filter(|it| !handoffs.contains(*it)).collect();
    println!("hand-offs: {:?}", all.outcomes);
    println!("transitions that did not come up: {missing:?}, {missing_handoffs:?}");
    println!("deaths at steps: {:?}", all.steps);
    let survived: Vec<_> = STEPS.iter().filter(|step| !all.steps.contains_key(*step)).collect();
    assert!(count < 1000 || survived.is_empty(), "no process died at {survived:?}");
    assert!(count < 1000 || missing.len() <= RARE, "{missing:?} did not come up");
    assert!(count < 1000 || missing_handoffs.len() <= RARE, "{missing_handoffs:?} did not come up");
    assert!(all.answered > 0 && all.heals > 0 && all.renewals > 0 && all.stall > Duration::ZERO);
}

#[test]
fn every_step_at_which_a_process_of_the_product_can_die_is_one_of_a_history() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut product = BTreeSet::new();
    let mut open = ["fuse-worker/src", "node-agent/src", "csi-plugin/src"].map(|dir| root.join(dir)).to_vec();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).unwrap();
            open.extend(entries.map(|entry| entry.unwrap().path()).collect::<Vec<PathBuf>>());
            continue;
        }
        let text = std::fs::read_to_string(path).unwrap();
        let hits = text.split("failpoint::hit(\"").skip(1).filter_map(|rest| rest.split('"').next());
        product.extend(hits.map(str::to_owned));
    }
    // Those of staging areas have histories of their own, beside them; the last is a person's, and an e2e test's.
    let all = STEPS.iter().chain(node_agent::STAGING_STEPS).chain(&["agent.staging.discarded"]);
    assert_eq!(product, all.map(|step| (*step).to_owned()).collect());
}
