//! Panics at random places: the n-th that a process passes once it is asked to. Places are the steps of the crate `failpoint`,
//! and in agent and broker every event and span of `tracing`, whichever crate it is in.

use crate::clock::wait_until;
use crate::node::Node;
use crate::processes::panic_at;
use crate::random::Random;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

/// What is logged of one.
const SAID: &str = "failpoint: panics at ";

/// From each program's next start on.
pub fn allow(node: &mut Node) {
    let failpoints = &mut node.options().failpoints;
    (failpoints.agent, failpoints.plugin) = (Some("panics"), Some("panics"));
}

pub fn agent(node: &mut Node, random: &mut Random, patience: Duration) -> Result<()> {
    let before = said(node, "node-agent")?.len();
    let n = up_to(random, 12);
    panic_at(node.agent().pid(), n)?;
    let mut end = None;
    wait_until(patience, || {
        // What an operator does, too.
        let _ = node.agent().status();
        end = node.agent_end().ok().flatten();
        end.is_some()
    });
    died("agent", n, end)?;
    ensure!(said(node, "node-agent")?.len() > before, "the agent's log does not tell of its panic");
    Ok(())
}

pub fn broker(node: &mut Node, random: &mut Random, patience: Duration) -> Result<()> {
    let before = said(node, "csi-plugin")?.len();
    let n = up_to(random, 8);
    panic_at(node.plugin().pid(), n)?;
    let mut end = None;
    wait_until(patience, || {
        // As the liveness probe does.
        let _ = node.plugin().probe();
        end = node.plugin_end().ok().flatten();
        end.is_some()
    });
    died("broker", n, end)?;
    ensure!(said(node, "csi-plugin")?.len() > before, "the broker's log does not tell of its panic");
    Ok(())
}

/// Of one that is asked something, or it passes no place.
pub fn worker(node: &Node, pid: u32, random: &mut Random, patience: Duration) -> Result<()> {
    let before = said(node, "node-agent")?.len();
    let n = up_to(random, 10);
    panic_at(pid, n)?;
    let replaced = wait_until(patience, || {
        node.agent().serving().is_ok_and(|serving| !serving.iter().any(|(_, p)| *p == pid))
    });
    ensure!(replaced, "a worker that is to panic at place {n} lives on");
    let logged = wait_until(patience, || said(node, "node-agent").is_ok_and(|all| all.len() > before));
    ensure!(logged, "the agent's log does not tell of a worker's panic");
    Ok(())
}

fn died(who: &str, n: u32, end: Option<ExitStatus>) -> Result<()> {
    let end = end.with_context(|| format!("the {who}, which is to panic at place {n}, lives on"))?;
    ensure!(end.signal() == Some(libc::SIGABRT), "the {who} was to panic and ended with {end}");
    Ok(())
}

/// Small numbers as often as large ones: what happens seldom, and soon after another thing, comes into question, too.
fn up_to(random: &mut Random, bits: u64) -> u32 {
    let most = 1 << random.below(bits + 1);
    1 + random.below(most) as u32
}

fn said(node: &Node, log: &str) -> Result<Vec<String>> {
    let text = std::fs::read(node.places().log(log))?;
    let text = String::from_utf8_lossy(&text);
    // Which worker it was stands behind it.
    let place = |line: &str| Some(line.split_once(SAID)?.1.split(" worker=").next()?.to_owned());
    Ok(text.lines().filter_map(place).collect())
}

/// How many at which places.
pub fn places(node: &Node) -> Result<String> {
    let mut places = BTreeMap::new();
    for log in ["node-agent", "csi-plugin"] {
        for place in said(node, log)? {
            *places.entry(place).or_insert(0) += 1;
        }
    }
    let shown: Vec<_> = places.iter().map(|(place, times)| format!("{place} ({times})")).collect();
    Ok(format!("{} places: {}", places.len(), shown.join(", ")))
}
