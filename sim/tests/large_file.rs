//! A large file over a link, under virtual time: MILLPOND_SEED=n repeats what failed.

use cache::data::Reading;
use sim::large_file::{Plan, run};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// What docs/configuration.md names as the defaults.
const READING: Reading = Reading { readahead_bytes: 256 * MIB, part_bytes: 8 * MIB, parallel_parts: 32 };
const LINK: Plan = Plan {
    size: 4096 * MIB,
    read: 4096 * MIB,
    step: MIB,
    program_rate: 5_000 * MIB,
    round_trip: Duration::from_millis(20),
    connection_rate: 100 * MIB,
    reading: READING,
    breaking: 0,
};

fn seed() -> u64 {
    let seed = std::env::var("MILLPOND_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(rand::random);
    println!("MILLPOND_SEED={seed}");
    seed
}

#[test]
fn a_sequential_reader_gets_what_all_connections_together_bring() {
    let seed = seed();
    for (connections, program_mib) in [(32, 5_000), (32, 1_000), (8, 5_000), (1, 5_000)] {
        let reading = Reading { parallel_parts: connections, ..READING };
        let plan = Plan { reading, program_rate: program_mib * MIB, ..LINK };
        let summary = run(seed, plan).unwrap();
        // A part's first byte is a round trip away, and nothing comes over its connection meanwhile.
        let part = READING.part_bytes as f64;
        let per_connection = part / (part / plan.connection_rate as f64 + plan.round_trip.as_secs_f64());
        let most = (connections as f64 * per_connection).min(plan.program_rate as f64);
        let share = plan.size as f64 / summary.took.as_secs_f64() / most;
        println!(
            "{connections} connections, program of {program_mib} MiB/s: {share:.2} of what they bring, {summary:?}"
        );
        assert!(share >= 0.8, "{share}");
        assert_eq!(summary.fetched, plan.size, "each byte once");
        assert!(summary.most <= connections + 1, "one more for who waits: {}", summary.most);
    }
}

#[test]
fn who_stops_early_has_paid_for_what_was_read_a_few_times_over() {
    let seed = seed();
    for read_mib in [1, 4, 16, 64, 256, 1024] {
        for program_mib in [10, 100, 1_000, 5_000] {
            let plan = Plan { read: read_mib * MIB, program_rate: program_mib * MIB, ..LINK };
            let summary = run(seed, plan).unwrap();
            let most = (1 + 8) * plan.read + 8 * MIB;
            let most = most.min(plan.read + READING.readahead_bytes + READING.part_bytes);
            println!("{read_mib} MiB at {program_mib} MiB/s: {} MiB fetched", summary.fetched / MIB);
            assert!(summary.fetched <= most, "{} of {most}", summary.fetched);
        }
    }
}

#[test]
fn whatever_breaks_the_program_comes_to_its_end() {
    let first = seed();
    for seed in (0..200).map(|n| first.wrapping_add(n)) {
        let n = seed % 1_000;
        let reading = Reading {
            readahead_bytes: [0, MIB, 16 * MIB, 256 * MIB][n as usize % 4],
            part_bytes: [256 << 10, MIB, 8 * MIB][n as usize / 4 % 3],
            parallel_parts: [1, 2, 32][n as usize / 12 % 3],
        };
        let plan = Plan {
            size: 1 + n * 70_001,
            read: 1 + n * 50_023,
            step: [4 << 10, 128 << 10, MIB][n as usize % 3],
            program_rate: [10, 1_000][n as usize % 2] * MIB,
            breaking: [0, 100, 10, 3][n as usize / 3 % 4],
            reading,
            ..LINK
        };
        let summary = run(seed, plan).unwrap_or_else(|error| panic!("seed {seed}, {plan:?}: {error:#}"));
        assert!(summary.fetched <= plan.size.next_multiple_of(256 << 10), "seed {seed}: bytes came twice");
        assert!(summary.fetched >= plan.read.min(plan.size), "seed {seed}: {summary:?}");
        let own = (plan.step / reading.part_bytes) as usize + 1;
        assert!(summary.most <= reading.parallel_parts + own, "seed {seed}: {summary:?}");
    }
}
