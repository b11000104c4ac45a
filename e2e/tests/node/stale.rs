//! A store that is away: what goes on all the same (`staleIfError`).

use crate::node_with;
use crate::promises::errno;
use anyhow::{Context, Result};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Mounted, Node};
use e2e::scenario::away;
use std::fs;
use std::time::Duration;
use testkit::faults::{Fault, Rule, Script};

const PATIENCE: Duration = Duration::from_secs(60);

fn stale(node: &Node, mounted: &Mounted) -> bool {
    let volumes = node.agent().volumes().unwrap_or_default();
    volumes.iter().any(|v| v.volume_id == mounted.id && v.stale_since_ms > 0)
}

#[test]
fn a_warm_epoch_goes_on_while_the_store_is_away_and_sees_changes_when_it_is_back() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let ttl = ("metadataTtl", "1s");
    for (profile, fault) in
        [("large", Fault::Stall { ms: None }), ("small", Fault::Status { code: 503, retry_after_s: None })]
    {
        let mounted = node.volume(profile, "set", &[("profile", profile), ttl])?;
        let pod = node.pod(&mounted)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        node.server.set_faults(&Script { seed: 0, rules: vec![Rule::always(fault)] })?;
        // What changes at the source meanwhile no reader sees.
        let changed = node.server.dir().join("set/large0");
        let before = fs::read(&changed)?;
        fs::write(&changed, b"changed")?;
        let added = node.server.dir().join("set/added");
        fs::write(&added, b"added")?;
        node.server.rescan()?;
        let gone_stale = || fs::metadata(mounted.target.join("large1")).is_ok() && stale(&node, &mounted);
        assert!(wait_until(PATIENCE, gone_stale), "{profile}: no name is out of date");
        for seed in 0..3 {
            let read = pod.start_verify(&tree, 4, seed)?.finish(PATIENCE)?;
            read.ensure_all(&tree).with_context(|| format!("profile {profile}"))?;
        }
        assert_eq!(errno(fs::metadata(mounted.target.join("added"))), Some(libc::ENOENT), "{profile}");
        assert!(stale(&node, &mounted), "{profile}: said nowhere");
        let counted = node.agent().stats()?.get("millpond_stale_answers_total").copied();
        assert!(
            counted.is_some_and(|n| n >= tree.files.len() as f64),
            "{profile}: {counted:?} stale answers"
        );
        assert!(node.agent().heals()?.is_empty());

        node.server.no_faults()?;
        let seen = || {
            let added = fs::read(mounted.target.join("added")).is_ok_and(|bytes| bytes == b"added");
            added && fs::read(mounted.target.join("large0")).is_ok_and(|bytes| bytes == b"changed")
        };
        assert!(wait_until(PATIENCE, seen), "{profile}: the change is not seen");
        assert!(!stale(&node, &mounted), "{profile}");
        fs::write(&changed, before)?;
        fs::remove_file(&added)?;
        node.server.rescan()?;
        let again = || fs::metadata(mounted.target.join("large0")).is_ok_and(|m| m.len() > 1 << 20);
        assert!(wait_until(PATIENCE, again), "{profile}: the second change is not seen");
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        drop(pod);
        node.unpublish(&mounted)?;
    }
    node.finish()
}

#[test]
fn an_outage_of_any_kind_fails_no_call_and_is_told_once() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    // Long enough for the names to run out in each half. What takes longer on a busy machine is waited for.
    print!("{}", away::run(&mut node, Duration::from_secs(24))?);
    node.finish()
}
