//! The scenarios of many volumes and many files, short: `make scale` and `make open-files` run them at length.

use crate::node_with_options;
use anyhow::{Result, ensure};
use e2e::node::{AgentOptions, Node};
use e2e::scenario::scale;
use rustix::process::Signal;
use std::time::Duration;

#[test]
fn volumes_that_come_at_once_are_served_handed_over_and_leave_nothing() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let report = scale::run(&mut node, &[3, 20])?;
    assert_eq!(report.steps.iter().map(|step| step.volumes).collect::<Vec<_>>(), [3, 20]);
    println!("{report}");
    println!("{}", scale::open_files(&mut node, 2000, 2, 1)?);
    node.finish()
}

/// What breaks first is refused with a sentence, and what is there goes on.
#[test]
fn a_volume_for_which_no_descriptors_are_left_is_refused_and_the_others_go_on() -> Result<()> {
    const MORE: usize = 40;
    // What is kept for the volumes that are there (256 of the agent's, 128 of csi-plugin's), and enough for some.
    let of_agent = AgentOptions { descriptors: Some(256 + 160), ..AgentOptions::default() };
    let of_plugin = AgentOptions { plugin_descriptors: Some(128 + 40), ..AgentOptions::default() };
    for (options, who) in [(of_agent, "agent"), (of_plugin, "csi-plugin")] {
        let (mut node, tree) = node_with_options("set", options)?;
        let mut mounted = Vec::new();
        let refused = loop {
            match node.volume(&format!("v{}", mounted.len()), "set", &[]) {
                Ok(one) => mounted.push(one),
                Err(error) => break error.downcast::<tonic::Status>()?,
            }
            ensure!(mounted.len() < MORE, "the {who} takes {MORE} volumes");
        };
        println!("{who}: {} volumes, then: {}", mounted.len(), refused.message());
        ensure!(mounted.len() > 1, "the {who} takes no volumes: {refused}");
        assert_eq!(refused.code(), tonic::Code::Unavailable, "{refused}");
        assert!(refused.message().contains("descriptors in use"), "{refused}");
        assert!(refused.message().contains(who), "{refused}");
        let pod = node.pod(&mounted[0])?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        // There is room for what is done for the volumes that are there, and again for others when some have gone.
        node.signal_worker(node.worker_of("v0", Duration::from_secs(10))?, Signal::KILL)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        drop(pod);
        // Of volumes that share a source, several are as much as is counted for one.
        for _ in 0..4 {
            node.unpublish(&mounted.swap_remove(1))?;
        }
        mounted.push(node.volume("again", "set", &[])?);
        mounted.iter().try_for_each(|one| node.unpublish(one))?;
        node.finish()?;
    }
    Ok(())
}
