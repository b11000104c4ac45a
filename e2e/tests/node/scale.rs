//! The scenarios of many volumes and many files, short: `make scale` and `make open-files` run them at length.

use anyhow::Result;
use e2e::node::{AgentOptions, Node};
use e2e::scenario::scale;

#[test]
fn volumes_that_come_at_once_are_served_handed_over_and_leave_nothing() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let report = scale::run(&mut node, &[3, 20])?;
    assert_eq!(report.steps.iter().map(|step| step.volumes).collect::<Vec<_>>(), [3, 20]);
    println!("{report}");
    println!("{}", scale::open_files(&mut node, 2000, 2, 1)?);
    node.finish()
}
