//! What docs/failures.md promises when a part of the node stands still, is gone or lies.

use crate::disks::{fill, flip_a_bit_in_each, on_a_faulty_disk};
use crate::node_with;
use crate::promises::errno;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Node};
use e2e::processes::{self, signal};
use e2e::random::Random;
use e2e::tree::{Shape, Tree};
use rustix::process::Signal;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use testkit::fault_fs::{Call, DiskFaults};

pub(crate) fn worker_of(node: &Node, volume: &str) -> Option<u32> {
    node.agent().serving().ok()?.into_iter().find(|(id, _)| id == volume).map(|(_, pid)| pid)
}

#[test]
fn workers_end_with_their_agent() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let more = [("healTimeout", "1s")];
    let volumes = ["idle", "stopped", "waiting"].map(|name| node.volume(name, "set", &more));
    let [_idle, stopped, waiting] = volumes;
    let (stopped, waiting) = (stopped?, waiting?);
    signal(worker_of(&node, &stopped.id).context("no worker serves")?, Signal::STOP)?;
    node.server.freeze()?;
    let reader = node.pod(&waiting)?.start_verify(&tree, 2, 1)?;
    let asked = || node.server.stats().is_ok_and(|s| s.in_flight > 0);
    assert!(wait_until(Duration::from_secs(10), asked), "the reader never asked the store");
    // Idle, standing still, waiting for the store and standing by: the harness waits for all of them to be gone.
    assert!(processes::children(node.agent().pid()).len() >= 4);
    node.kill_agent()?;
    drop(reader);
    node.server.no_faults()?;
    node.start_agent()?;
    let workers = processes::children(node.agent().pid());
    node.stop_agent()?;
    let gone = || workers.iter().all(|pid| !std::path::Path::new(&format!("/proc/{pid}/exe")).exists());
    assert!(wait_until(Duration::from_secs(5), gone), "workers outlived an agent that ended in order");
    node.start_agent()?;
    node.finish()
}

#[test]
fn without_the_broker_new_whole_files_are_read_through_the_worker() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[("profile", "large")])?;
    let pod = node.pod(&mounted)?;
    node.kill_plugin()?;
    let away = || node.agent().status().is_ok_and(|s| !s.broker_connected);
    assert!(wait_until(Duration::from_secs(20), away), "the agent still believes in its broker");
    for _ in 0..2 {
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    // A killed caller waits for its answer, and gets it.
    node.agent().evict_all()?;
    node.server.freeze()?;
    let mut reader = pod.start_verify(&tree, 2, 1)?;
    let asked = || node.server.stats().is_ok_and(|s| s.in_flight > 0);
    assert!(wait_until(Duration::from_secs(10), asked), "the reader never asked the store");
    signal(reader.pid(), Signal::KILL)?;
    node.server.no_faults()?;
    reader.kill(Duration::from_secs(20))?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;

    node.start_plugin()?;
    let connected = || node.agent().status().is_ok_and(|s| s.broker_connected);
    assert!(wait_until(Duration::from_secs(30), connected), "the agent did not come back to the broker");
    for _ in 0..2 {
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    drop(pod);
    node.finish()
}

#[test]
fn with_the_store_frozen_what_is_fresh_is_read_and_the_rest_is_eio() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let limit = ("storeTimeout", "2s");
    let kinds: [(&str, &[(&str, &str)]); 6] = [
        ("fresh-large", &[("profile", "large"), ("metadataTtl", "1h"), limit]),
        ("fresh-small", &[("profile", "small"), ("metadataTtl", "1h"), limit]),
        ("static-large", &[("profile", "large"), ("freshness", "static"), limit]),
        ("static-small", &[("profile", "small"), ("freshness", "static"), limit]),
        ("strict", &[("profile", "large"), ("freshness", "strict"), limit]),
        ("short", &[("profile", "large"), ("metadataTtl", "100ms"), ("staleIfError", "0"), limit]),
    ];
    let mut volumes = Vec::new();
    for (name, parameters) in kinds {
        let mounted = node.volume(name, "set", parameters)?;
        let pod = node.pod(&mounted)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        volumes.push((name, mounted, pod));
    }
    node.server.freeze()?;
    for (name, mounted, _) in volumes.iter().filter(|(name, ..)| matches!(*name, "short" | "strict")) {
        let path = mounted.target.join("large0");
        let refused = || errno(fs::metadata(&path)) == Some(libc::EIO);
        assert!(wait_until(Duration::from_secs(30), refused), "{name}: a stale name is shown");
    }
    for (name, _, pod) in volumes.iter().filter(|(name, ..)| !matches!(*name, "short" | "strict")) {
        let read = pod.start_verify(&tree, 2, 3)?.finish(Duration::from_secs(30))?;
        read.ensure_all(&tree).with_context(|| format!("volume {name}"))?;
    }
    node.server.no_faults()?;
    for (name, _, pod) in &volumes {
        pod.verify(&tree, 2)?.ensure_all(&tree).with_context(|| format!("volume {name}, thawed"))?;
    }
    drop(volumes);
    node.finish()
}

#[test]
fn files_that_were_open_when_the_disk_failed_may_fail_and_new_opens_do_not() -> Result<()> {
    let (disk, mut node, tree) = on_a_faulty_disk(|_| {})?;
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        let open = File::open(mounted.target.join("large0"))?;
        disk.set(&DiskFaults { eio: vec![Call::Read], ..DiskFaults::default() })?;
        let file = tree.files.iter().find(|f| f.path == "large0").context("the tree has it")?;
        let mut bytes = vec![0; 64 << 10];
        for k in 0..20 {
            match open.read_exact_at(&mut bytes, k * 256 * 1024) {
                Ok(()) => assert_eq!(tree.reference(file)?.first_difference(k * 256 * 1024, &bytes), None),
                Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EIO), "profile {profile}"),
            }
        }
        let right = || pod.verify(&tree, 2).and_then(|read| read.ensure_all(&tree)).is_ok();
        assert!(wait_until(Duration::from_secs(40), right), "profile {profile}: new opens fail");
        disk.set(&DiskFaults::default())?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        drop((open, pod));
        node.unpublish(&mounted)?;
    }
    node.finish()
}

/// It answers probes in between, and is written to again after each.
#[test]
fn new_opens_do_not_see_the_errors_of_a_disk_that_fails_now_and_then() -> Result<()> {
    let (disk, mut node, tree) = on_a_faulty_disk(|_| {})?;
    let mounted = node.volume("v", "set", &[("profile", "large")])?;
    let pod = node.pod(&mounted)?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    let every_call = vec![Call::Read, Call::Write, Call::Open, Call::Fsync, Call::Metadata];
    let failing = |every| DiskFaults { eio: every_call.clone(), every, ..DiskFaults::default() };
    let recovered = || -> Result<bool> {
        let name = "millpond_cache_events_total{kind=\"root_recovered\"}";
        Ok(node.agent().stats()?.get(name).is_some_and(|times| *times > 0.0))
    };
    let noticed = || node.agent().cache().is_ok_and(|c| c.tiers.iter().any(|t| t.degraded));
    // What the agent asks an idle disk each second may be as many calls as it takes to the next that fails.
    disk.set(&failing(None))?;
    ensure!(wait_until(Duration::from_secs(30), noticed), "the agent does not notice");
    disk.set(&failing(Some(50)))?;
    let until = Instant::now() + Duration::from_secs(60);
    let mut rounds_since = 0;
    while rounds_since < 200 {
        ensure!(Instant::now() < until, "the disk does not pass for sound in between");
        pod.verify(&tree, 2)?.ensure_all(&tree).with_context(|| format!("round {rounds_since}"))?;
        rounds_since += u32::from(recovered()?);
    }
    disk.set(&DiskFaults::default())?;
    drop(pod);
    node.unpublish(&mounted)?;
    node.finish()
}

#[test]
fn bits_flipped_under_a_running_agent_are_noticed_after_its_restart() -> Result<()> {
    let seed = crate::seed();
    let (mut node, tree) = node_with("set")?;
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        let flipped = flip_a_bit_in_each(&node.places().cache().join("ssd"), &mut Random(seed))?;
        ensure!(flipped > tree.files.len() / 2, "only {flipped} cache files were found");
        // Right or wrong bytes, which is what the exception says, but every call is answered.
        let read = pod.verify(&tree, 2)?;
        println!("profile {profile}: {} of {} files as they should be", read.files, tree.files.len());
        assert_eq!(worker_of(&node, &mounted.id).map(|_| ()), Some(()), "the worker is gone");
        assert!(node.agent().heals()?.is_empty());
        drop(pod);
        node.unpublish(&mounted)?;
        node.stop_agent()?;
        node.start_agent()?;
        let again = node.volume(&format!("again-{profile}"), "set", &[("profile", profile)])?;
        node.pod(&again)?.verify(&tree, 2)?.ensure_all(&tree)?;
        node.unpublish(&again)?;
    }
    node.finish()
}

#[test]
fn with_a_full_metadata_disk_the_reserve_takes_new_names_and_what_is_known_is_served() -> Result<()> {
    use rustix::mount::{MountFlags, mount};
    let mut node = Node::start(AgentOptions::default())?;
    node.stop_agent()?;
    let meta = node.places().cache().join("meta");
    let uid = node.options().uid;
    let data = std::ffi::CString::new(format!("size=16m,mode=0755,uid={uid},gid={uid}"))?;
    mount("tmpfs", &meta, "tmpfs", MountFlags::empty(), Some(data.as_c_str()))?;
    node.start_agent()?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set/known")?;
    for k in 0..40_000 {
        let dir = node.server.dir().join(format!("set/new/{}", k % 8));
        if k < 8 {
            fs::create_dir_all(&dir)?;
        }
        File::create(dir.join(format!("a-name-that-takes-some-room-in-the-store-{k}")))?;
    }
    let mounted = node.volume("v", "set", &[("metadataTtl", "1h"), ("profile", "large")])?;
    let known = mounted.target.join("known");
    let pod = node.pod(&mounted)?;
    pod.start_verify_below("known", &tree)?.finish(Duration::from_secs(60))?.ensure_all(&tree)?;
    crate::promises::names(&known)?;
    let hog = fill(&meta)?;
    let listed = (0..8).map(|k| errno(crate::promises::names(&mounted.target.join(format!("new/{k}")))));
    let listed: Vec<_> = listed.collect();
    println!("listings on a full disk, each of 5,000 names: {listed:?}");
    // The store has taken a quarter of 16 MiB ahead: some 20,000 names of this length, not 40,000.
    assert_eq!(listed[0], None, "the reserve takes what is new");
    assert!(listed.contains(&Some(libc::EIO)), "{listed:?}");
    assert!(listed.iter().all(|e| matches!(e, None | Some(libc::EIO))), "{listed:?}");
    pod.start_verify_below("known", &tree)?.finish(Duration::from_secs(60))?.ensure_all(&tree)?;
    fs::remove_file(hog)?;
    for k in 0..8 {
        assert_eq!(crate::promises::names(&mounted.target.join(format!("new/{k}")))?.len(), 5000);
    }
    assert!(node.agent().heals()?.is_empty());
    drop(pod);
    node.finish()
}
