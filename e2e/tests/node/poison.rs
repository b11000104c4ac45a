//! A request that no worker survives: one call fails in the end, and nothing else.

use crate::promises::errno;
use anyhow::{Result, ensure};
use e2e::clock::{wait_until, within};
use e2e::node::{AgentOptions, InjectedFault, Node};
use e2e::tree::{Shape, Tree};
use std::time::Duration;

#[test]
fn a_file_that_kills_every_worker_is_eio_and_all_else_is_read() -> Result<()> {
    let inject_faults = vec![InjectedFault::new("large1", "abort", u32::MAX)];
    let mut node = Node::start(AgentOptions { inject_faults, ..AgentOptions::default() })?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let mut rest = tree.clone();
    rest.files.retain(|file| file.path != "large1");
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        let kinds = "pread,small,open,stat,mmap";
        let application = pod.oracle(&rest, &["--pause-us", "500", "--kinds", kinds])?;
        for _ in 0..3 {
            let path = mounted.target.join("large1");
            let read = within(Duration::from_secs(60), move || std::fs::read(path))?;
            assert_eq!(errno(read), Some(libc::EIO), "{profile}");
        }
        let report = application.finish(Duration::from_secs(60))?;
        println!("{profile}: {}", report.summary());
        report.ensure_clean()?;
        let served = || node.agent().heals().is_ok_and(|h| h.iter().any(|h| h.volume_id == mounted.id));
        assert!(wait_until(Duration::from_secs(20), served), "{:?}", node.agent().heals()?);
        let heals = node.agent().heals()?;
        ensure!(heals.iter().all(|h| (h.cause.as_str(), h.level) == ("signal", 1)), "{heals:?}");
        drop(pod);
        node.unpublish(&mounted)?;
    }
    let stats = node.agent().stats()?;
    let of =
        |prefix: &str| stats.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, v)| v).sum::<f64>();
    let poisoned = of("millpond_poisoned_requests_total");
    ensure!((6.0..=40.0).contains(&poisoned), "{poisoned} requests were given up: {stats:?}");
    let heals = of("millpond_heals_total{level=\"1\",cause=\"signal\"}");
    assert_eq!(heals as usize, node.agent().heals()?.len());
    node.finish()
}
