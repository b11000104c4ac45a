//! Workers that take more memory than they may.

use anyhow::Result;
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Node};
use e2e::processes;
use e2e::scenario::memory::{self, Limits};
use e2e::scenario::resources::Resources;
use std::fs;

#[test]
fn a_worker_that_takes_too_much_memory_dies_alone() -> Result<()> {
    let report = memory::run(3, memory::PATIENCE)?;
    println!("{report}");
    // What a machine without a memory controller can show is shown by the run itself.
    assert!(report.limits == Limits::None || report.deaths == 3);
    Ok(())
}

#[test]
fn workers_are_the_kernels_first_choice() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    node.server.add(&e2e::tree::Tree::generated("", e2e::tree::Shape::LITTLE), "set")?;
    let _mounted = node.volume("v", "set", &[])?;
    let workers = processes::fuse_children(node.agent().pid());
    assert!(!workers.is_empty());
    for worker in workers {
        assert_eq!(fs::read_to_string(format!("/proc/{worker}/oom_score_adj"))?.trim(), "1000");
    }
    let agent: i32 =
        fs::read_to_string(format!("/proc/{}/oom_score_adj", node.agent().pid()))?.trim().parse()?;
    assert!(agent < 1000, "{agent}");
    // That none is left is known by counting them: so they must be found while there are some.
    let counted = || Resources::of(&node).is_ok_and(|now| now.groups > 0);
    assert!(
        !memory::is_writable()? || wait_until(memory::PATIENCE, counted),
        "no group of a worker is counted"
    );
    node.finish()
}
