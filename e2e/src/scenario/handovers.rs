//! Agents of two versions hand over to each other, there and back, while applications judge every call.

use super::kills::{KillPlan, start_applications};
use super::resources::Resources;
use crate::clock::{monotonic_ns, wait_until};
use crate::node::{AgentOptions, Node, Version};
use crate::oracle::{Report, Stalls};
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct HandoverPlan {
    /// Hand-overs: to the next version, and back to this one.
    pub rounds: usize,
    /// Mounted volumes with an application on each; every second one has profile *small*.
    pub volumes: usize,
    pub shape: Shape,
    pub alarm: bool,
    pub seed: u64,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct HandoverReport {
    pub rounds: usize,
    pub report: Report,
    /// The longest call of each application during each hand-over.
    pub pauses: Stalls,
}

impl std::fmt::Display for HandoverReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rounds, report, pauses } = self;
        write!(
            f,
            "{rounds} hand-overs; {}; pause p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms",
            report.summary(),
            pauses.p50_ms,
            pauses.p99_ms,
            pauses.max_ms
        )
    }
}

/// Publishes, hands over, unpublishes. The node has an agent of this version afterwards.
pub fn run(node: &mut Node, plan: &HandoverPlan) -> Result<HandoverReport> {
    eprintln!("hand-overs: seed {}", plan.seed);
    let tree = Tree::generated("handovers/", plan.shape);
    node.server.add(&tree, "handovers")?;
    let mut mounted = Vec::new();
    for k in 0..plan.volumes {
        let profile = if k % 2 == 0 { "large" } else { "small" };
        mounted.push(node.volume(&format!("handover{k}"), "handovers", &[("profile", profile)])?);
    }
    // What is fetched from the store is slow at times, whichever agent serves.
    let targets: Vec<_> = mounted.iter().map(|m| m.target.clone()).collect();
    node.agent().warm(&targets, Duration::from_secs(120))?;
    let before = Resources::of(node)?;
    let load = KillPlan {
        volumes: plan.volumes,
        applications: plan.volumes,
        shape: plan.shape,
        alarm: plan.alarm,
        ..KillPlan::short(plan.seed)
    };
    let applications = start_applications(node, &load, &tree, &mounted)?;
    let mut spans = Vec::new();
    for round in 0..plan.rounds.next_multiple_of(2) {
        let version = if round % 2 == 0 { Version::Next } else { Version::This };
        let begun = monotonic_ns();
        let options = AgentOptions { version, ..node.options().clone() };
        node.hand_over(&options).with_context(|| format!("hand-over {round}"))?;
        let serving = || node.agent().serving().is_ok_and(|s| s.len() == plan.volumes);
        ensure!(
            wait_until(Duration::from_secs(30), serving),
            "hand-over {round}: {:?}",
            node.agent().volumes()?
        );
        spans.push((begun, monotonic_ns()));
        if round % 10 == 9 {
            eprintln!("hand-overs: {} of {}", round + 1, plan.rounds);
        }
    }
    let mut all = Report::default();
    let mut felt = Vec::new();
    for application in applications {
        let report =
            application.running.finish(Duration::from_secs(60)).context(application.volume.clone())?;
        felt.extend(spans.iter().flat_map(|(begun, ended)| report.each_stall(&[*begun], ended - begun)));
        all.merge(report);
    }
    before.ensure_same(node)?;
    for m in &mounted {
        node.unpublish(m)?;
    }
    Ok(HandoverReport { rounds: spans.len(), report: all, pauses: Stalls::of(felt) })
}
