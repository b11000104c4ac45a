//! Stores that answer badly, late or never.

use crate::{node_with, seed};
use anyhow::Result;
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Node};
use e2e::scenario::{faults, frozen};
use std::time::{Duration, Instant};

#[test]
fn an_epoch_through_a_faulty_store_has_the_right_bytes() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let report = faults::run(&mut node, 2000, "small", seed())?;
    println!("{report:?}");
    node.finish()
}

#[test]
fn a_killed_reader_of_a_frozen_store_is_gone_within_a_second() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        node.agent().evict_all()?;
        node.server.freeze()?;
        let mut reader = pod.start_verify(&tree, 4, 1)?;
        let asked = || node.server.stats().is_ok_and(|s| s.in_flight > 0);
        assert!(wait_until(Duration::from_secs(10), asked), "the reader never asked the store");
        let (took, _) = reader.kill(Duration::from_secs(5))?;
        println!("profile {profile}: gone {took:?} after SIGKILL");
        assert!(took < Duration::from_secs(1), "profile {profile}: gone only after {took:?}");
        node.server.no_faults()?;
        // The mount is as good as new.
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    node.finish()
}

#[test]
fn a_frozen_store_holds_up_no_call_of_the_orchestrator() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[])?;
    let pod = node.pod(&mounted)?;
    node.server.freeze()?;
    let reader = pod.start_verify(&tree, 2, 1)?;
    let asked = || node.server.stats().is_ok_and(|s| s.in_flight > 0);
    assert!(wait_until(Duration::from_secs(10), asked), "the reader never asked the store");
    let timed = |what: &str, call: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        let begun = Instant::now();
        call()?;
        assert!(begun.elapsed() < Duration::from_secs(2), "{what} took {:?}", begun.elapsed());
        Ok(())
    };
    timed("probe", &mut || Ok(node.plugin().probe().map(drop)?))?;
    timed("stats", &mut || Ok(node.plugin().stats(&mounted.id, &mounted.target).map(drop)?))?;
    let target = mounted.clone();
    timed("unpublish", &mut || Ok(node.plugin().unpublish(&target.id, &target.target)?))?;
    node.server.no_faults()?;
    drop(reader);
    drop(pod);
    node.finish()
}

#[test]
fn a_thousand_alarms_a_second_interrupt_no_call() -> Result<()> {
    use testkit::faults::{Fault, Rule, Script};
    let (mut node, tree) = node_with("set")?;
    // Slow enough that most calls are still waiting when the next alarm comes.
    node.server.set_faults(&Script { seed: 1, rules: vec![Rule::always(Fault::Latency { ms: 30 })] })?;
    let mounted = node.volume("v", "set", &[("profile", "large"), ("metadataTtl", "1s")])?;
    let pod = node.pod(&mounted)?;
    let application = pod.oracle(&tree, &["--alarm", "--least-alarms", "200"])?;
    for _ in 0..6 {
        std::thread::sleep(Duration::from_millis(400));
        node.agent().evict_all()?;
    }
    let report = application.finish(Duration::from_secs(60))?;
    println!("{}", report.summary());
    report.ensure_clean()?;
    assert!(report.alarms >= 200, "{} alarms", report.alarms);
    drop(pod);
    node.finish()
}

#[test]
fn beside_a_frozen_endpoint_an_epoch_from_another_one_is_read() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let report = frozen::beside(&mut node, 400)?;
    println!("{report}");
    node.finish()
}
