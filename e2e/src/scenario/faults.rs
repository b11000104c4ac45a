//! An epoch over many files while the store misbehaves.

use crate::node::Node;
use crate::oracle::Verified;
use crate::tree::{Shape, Tree};
use anyhow::{Result, ensure};
use std::time::Duration;
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::Stats;

/// One in a hundred each: 503, reset, truncation, stall.
pub fn one_percent(seed: u64) -> Script {
    let faults = [
        Fault::Status { code: 503, retry_after_s: None },
        Fault::ResetBody,
        Fault::Truncate,
        Fault::StallBody { ms: Some(2000) },
    ];
    Script { seed, rules: faults.into_iter().map(|f| Rule::with_probability(f, 0.01)).collect() }
}

#[derive(Debug)]
pub struct FaultReport {
    pub verified: Verified,
    pub server: Stats,
}

/// Reads `files` files of 20 kB cold, by eight threads in shuffled order.
pub fn run(node: &mut Node, files: usize, profile: &str, seed: u64) -> Result<FaultReport> {
    eprintln!("faults: seed {seed}, profile {profile}");
    let per_directory = 500;
    let directories = files.div_ceil(per_directory);
    let shape = Shape {
        directories,
        files: files.div_ceil(directories),
        small_bytes: 20_000,
        large: 1,
        large_bytes: 20 << 20,
    };
    let prefix = format!("faults-{profile}");
    let tree = Tree::generated("faults/", shape);
    node.server.add(&tree, &prefix)?;
    let mounted = node.volume(&prefix, &prefix, &[("profile", profile)])?;
    node.server.reset()?;
    node.server.set_faults(&one_percent(seed))?;
    let pod = node.pod(&mounted)?;
    let running = pod.start_verify(&tree, 8, seed)?;
    let verified = running.finish(Duration::from_secs(120 + files as u64 / 20))?;
    let server = node.server.stats()?;
    node.server.no_faults()?;
    verified.ensure_all(&tree)?;
    ensure!(server.answers.get(&503).is_some_and(|&n| n > 0), "the script did nothing: {server:?}");
    pod.end()?;
    node.unpublish(&mounted)?;
    Ok(FaultReport { verified, server })
}
