//! Promises that only real processes on a real kernel can keep or break. One node at a time: see `e2e::node`.

mod bad_input;
mod bench;
mod changes;
mod claims;
mod deaths;
mod deletion;
mod disks;
mod ended;
mod endings;
mod failpoints;
mod faults;
mod handovers;
mod hangs;
mod holders;
mod hostile;
mod interrupted;
// scripts/posix installs what it runs.
#[cfg(feature = "real-servers")]
mod jupyter;
mod laptop;
mod logs;
mod memory;
mod operators;
mod outages;
mod panics;
mod pods;
mod poison;
// scripts/posix installs what they run.
#[cfg(feature = "real-servers")]
mod posix;
mod promises;
mod reading;
// scripts/stores installs what it runs.
#[cfg(feature = "real-servers")]
mod real_s3;
mod refusals;
mod renewals;
mod room;
mod sanity;
mod scale;
mod scopes;
mod settings;
mod staged;
mod stale;
mod stores;
mod successors;
mod tenants;
mod torture;
mod versions;
mod workload;
mod writers;
mod writing;

use e2e::node::{AgentOptions, Node};
use e2e::tree::{Shape, Tree};

/// A node with defaults, and a small tree below `prefix` of its bucket.
fn node_with(prefix: &str) -> anyhow::Result<(Node, Tree)> {
    node_with_options(prefix, AgentOptions::default())
}

fn node_with_options(prefix: &str, options: AgentOptions) -> anyhow::Result<(Node, Tree)> {
    let node = Node::start(options)?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, prefix)?;
    Ok((node, tree))
}

/// Of the clock: a failing run prints it, so that it can be repeated.
fn seed() -> u64 {
    let seed = match std::env::var("MILLPOND_SEED") {
        Ok(text) => text.parse().expect("MILLPOND_SEED is a number"),
        Err(_) => e2e::clock::monotonic_ns() % 1_000_000,
    };
    eprintln!("seed {seed} (repeat with MILLPOND_SEED={seed})");
    seed
}
