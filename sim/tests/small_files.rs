//! Small files over a link, under virtual time: MILLPOND_SEED=n repeats what failed.

use sim::small_files::{Plan, Summary, run};
use std::time::Duration;

const LINK: Plan = Plan {
    files: 10_000,
    read: 10_000,
    programs: 1,
    slots: 96,
    round_trip: Duration::from_millis(20),
    work: Duration::from_micros(500),
    failing: 0,
    deaths: 0,
};

fn seed() -> u64 {
    let seed = std::env::var("MILLPOND_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(rand::random);
    println!("MILLPOND_SEED={seed}");
    seed
}

/// As often as the round trip would allow if nothing was fetched ahead.
fn times_as_fast(plan: Plan, summary: Summary) -> f64 {
    let alone = plan.round_trip.as_secs_f64() * plan.read as f64 / plan.programs as f64;
    alone / summary.took.as_secs_f64()
}

#[test]
fn an_epoch_over_a_link_does_not_pay_a_round_trip_for_each_file() {
    let seed = seed();
    for (programs, least) in [(1, 10.0), (4, 6.0), (16, 2.0)] {
        let plan = Plan { programs, ..LINK };
        let summary = run(seed, plan).unwrap();
        let times = times_as_fast(plan, summary);
        println!("{programs} programs: {times:.1} times as fast, {summary:?}");
        assert!(times >= least, "{programs} programs: {times:.1} times as fast");
        assert_eq!((summary.fetched, summary.lost), (plan.files, 0), "each file once");
    }
}

/// R11 of docs/semantics.md.
#[test]
fn who_reads_a_few_files_of_a_directory_pays_for_a_few_more() {
    let seed = seed();
    for (read, most) in [(1, 1), (8, 8), (16, 16 + 50), (32, 32 + 450), (64, 64 + 2_200)] {
        let plan = Plan { read, ..LINK };
        let summary = run(seed, plan).unwrap();
        println!("{read} files read: {} fetched", summary.fetched);
        assert!(summary.fetched <= most, "{read} files read: {} fetched", summary.fetched);
    }
}

#[test]
fn whatever_fails_and_dies_every_program_comes_to_its_end() {
    let first = seed();
    for seed in (0..300).map(|n| first.wrapping_add(n)) {
        let n = (seed % 1_000) as usize;
        let plan = Plan {
            files: 1 + n * 3,
            read: 1 + n,
            programs: 1 + n % 7,
            slots: [1, 2, 6, 48][n % 4],
            failing: [0, 100, 10, 2][n / 4 % 4],
            deaths: n % 3,
            ..LINK
        };
        let summary = run(seed, plan).unwrap_or_else(|error| panic!("seed {seed}, {plan:?}: {error:#}"));
        assert!(summary.fetched >= plan.read.min(plan.files), "seed {seed}: {summary:?}");
        assert!(summary.fetched <= plan.files, "seed {seed}: a file came twice: {summary:?}");
    }
}
