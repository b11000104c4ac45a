//! Whatever dies, applications notice nothing: the short run of `make torture`.

use crate::seed;
use anyhow::Result;
use e2e::node::{AgentOptions, Node};
use e2e::scenario::torture::{self, Plan};

#[test]
fn deaths_of_every_part_and_of_pairs_are_not_noticed() -> Result<()> {
    let plan = Plan::short(seed())?;
    let mut node = Node::start(AgentOptions::default())?;
    let report = torture::run(&mut node, &plan)?;
    println!("{report}");
    report.ensure_clean(&plan.classes)?;
    assert!(report.alarms > 0, "the alarm never rang");
    node.finish()
}
