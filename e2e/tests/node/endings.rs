//! A volume is unpublished in whatever state it is: in time, and nothing of it stays.

use crate::node_with;
use crate::outages::worker_of;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::mountinfo;
use e2e::processes::signal;
use rustix::process::Signal;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);
/// What an unpublish may take.
const LIMIT: Duration = Duration::from_secs(3);

#[test]
fn a_volume_that_hangs_is_unpublished_in_time_and_its_readers_are_let_go() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    for hung in ["worker", "agent"] {
        let mounted = node.volume(hung, "set", &[])?;
        let pod = node.pod(&mounted)?;
        let stopped = match hung {
            "worker" => worker_of(&node, &mounted.id).context("no worker serves")?,
            _ => node.agent().pid(),
        };
        node.agent().evict_all()?;
        signal(stopped, Signal::STOP)?;
        let reader = pod.start_verify(&tree, 2, 0)?;
        let begun = Instant::now();
        let unpublished = node.unpublish(&mounted);
        let took = begun.elapsed();
        // Before anything can fail: a process that is stopped would hold up the end of the node.
        let resumed = signal(stopped, Signal::CONT);
        unpublished?;
        ensure!(took < LIMIT, "with a {hung} that hangs unpublish took {took:?}");
        // The worker may have been ended by its agent meanwhile.
        ensure!(hung == "worker" || resumed.is_ok(), "the agent is gone");
        ensure!(reader.finish(PATIENCE)?.failed > 0, "a call succeeded that no process could serve");
        assert_eq!(mountinfo::below(&node.places().kubelet())?, []);
        ensure!(!mounted.target.exists(), "unpublish left {}", mounted.target.display());
        let forgotten = || node.agent().volumes().is_ok_and(|volumes| volumes.is_empty());
        ensure!(wait_until(PATIENCE, forgotten), "the agent still has {:?}", node.agent().volumes());
    }
    node.finish()
}

#[test]
fn a_file_that_is_still_open_holds_up_nobody_and_is_reported() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[("profile", "large")])?;
    let file = File::open(mounted.target.join(&tree.files[0].path))?;
    let table = mountinfo::below(&mounted.target)?;
    let device = &table.iter().find(|m| m.kind.starts_with("fuse")).context("mounted")?.device;
    // Lives as long as the superblock.
    let superblock = Path::new("/sys/class/bdi").join(device);
    ensure!(superblock.exists(), "{} is not there", superblock.display());
    let begun = Instant::now();
    node.unpublish(&mounted)?;
    ensure!(begun.elapsed() < LIMIT, "unpublish took {:?}", begun.elapsed());
    ensure!(!mounted.target.exists() && superblock.exists(), "the open file keeps the superblock");
    let logged = || node.places().logs().contains("processes still have this volume or a file of it");
    ensure!(wait_until(PATIENCE, logged), "no log says so");
    let error = file.read_at(&mut [0; 16], 0).expect_err("no worker serves it");
    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN));
    drop(file);
    ensure!(wait_until(PATIENCE, || !superblock.exists()), "the superblock outlived its last file");
    node.finish()
}
