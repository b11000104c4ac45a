//! Whatever dies, applications notice nothing: the short runs of `make torture`.

use crate::seed;
use anyhow::Result;
use e2e::node::{AgentOptions, Node};
use e2e::scenario::torture::{self, Class, Length, Plan};
use std::time::Duration;

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

/// Between deaths of all parts. What is declared: what was open on a mount when another process ended it is lost,
/// and reads of files that are passed through from a disk wait for it.
#[test]
fn mounts_that_end_and_disks_that_hang_cost_what_is_declared_and_nothing_else() -> Result<()> {
    let hang_limit = Some(Duration::from_secs(4));
    let classes = vec![
        Class::Workers,
        Class::Agent,
        Class::Broker,
        Class::MountEnded,
        Class::MountEnded,
        Class::MountEnded,
        Class::DiskHang,
        Class::DiskHang,
    ];
    let length = Length::Faults(classes.len());
    let plan = Plan { classes, length, volumes: 6, ..Plan::short(seed())? };
    let mut node = Node::start(AgentOptions { hang_limit, ..AgentOptions::default() })?;
    let report = torture::run(&mut node, &plan)?;
    println!("{report}");
    report.ensure_clean(&plan.classes)?;
    node.finish()
}
