//! Cache disks that are full, broken or lying are a miss, never an error to the reader.

use crate::{node_with, seed};
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, FaultyDisk, Node, Tier, small_disk};
use e2e::random::Random;
use e2e::tree::{Shape, Tree};
use rustix::fs::statvfs;
use rustix::process::Signal;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use testkit::fault_fs::{Call, DiskFaults};

const PATIENCE: Duration = Duration::from_secs(30);

/// Twice what the disk holds, in files of both sorts.
const MORE_THAN_FITS: Shape =
    Shape { directories: 4, files: 50, small_bytes: 100_000, large: 6, large_bytes: 20 << 20 };

/// A node whose only cache disk is the one that `make` gives.
pub(crate) fn node_on(make: impl FnOnce(&mut Node, u32) -> Result<PathBuf>) -> Result<Node> {
    // A disk lives in the node's directory, so the node comes first and is restarted on it.
    let mut node = Node::start(AgentOptions::default())?;
    node.stop_agent()?;
    node.stop_plugin()?;
    let uid = node.options().uid;
    let disk = make(&mut node, uid)?;
    let tier = Tier { name: "odd", paths: vec![disk], quota: "20Gi", inodes: 1_000_000, min_free_percent: 1 };
    node.options().tiers = vec![tier];
    node.start_plugin()?;
    node.start_agent()?;
    Ok(node)
}

/// A node whose only cache disk fails as its test says, and a bucket with a tree below `set`. The disk is to outlive the
/// node.
pub(crate) fn on_a_faulty_disk(change: impl FnOnce(&mut AgentOptions)) -> Result<(FaultyDisk, Node, Tree)> {
    let mut disk = None;
    let node = node_on(|node, uid| {
        change(node.options());
        let faulty = disk.insert(FaultyDisk::start(node.places(), uid)?);
        Ok(faulty.path().to_owned())
    })?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    Ok((disk.context("node_on makes the disk")?, node, tree))
}

/// Takes what is free, as another program on the node might.
pub(crate) fn fill(disk: &Path) -> Result<PathBuf> {
    use std::io::Write;
    let path = disk.join("hog");
    let mut hog = std::fs::File::create(&path)?;
    let block = vec![0xaa; 1 << 16];
    loop {
        if let Err(e) = hog.write_all(&block) {
            ensure!(e.raw_os_error() == Some(libc::ENOSPC), "filling {}: {e}", path.display());
            return Ok(path);
        }
    }
}

#[test]
fn a_full_cache_disk_is_a_miss() -> Result<()> {
    let mut node = node_on(|node, uid| small_disk(node.places(), 64, uid))?;
    let disk = node.options().tiers[0].paths[0].clone();
    let tree = Tree::generated("", MORE_THAN_FITS);
    node.server.add(&tree, "set")?;
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        // Fuller and fuller by our own doing; then by another's, with files open.
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        let application = pod.oracle(&tree, &["--pause-us", "500"])?;
        let hog = fill(&disk)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        application.finish(Duration::from_secs(60))?.ensure_clean()?;
        std::fs::remove_file(hog)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        drop(pod);
        node.unpublish(&mounted)?;
    }
    // Full from the start.
    node.stop_agent()?;
    fill(&disk)?;
    node.start_agent()?;
    let mounted = node.volume("again", "set", &[])?;
    node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
    node.finish()
}

#[test]
fn a_failing_cache_disk_is_a_miss() -> Result<()> {
    let (disk, mut node, tree) = on_a_faulty_disk(|_| {})?;
    let eio = |calls: &[Call]| DiskFaults { eio: calls.to_vec(), ..DiskFaults::default() };
    let faults = [
        ("reads fail", eio(&[Call::Read])),
        ("writes fail", eio(&[Call::Write])),
        ("opens fail", eio(&[Call::Open])),
        ("fsync and directory changes fail", eio(&[Call::Fsync, Call::Metadata])),
        (
            "one call in three fails",
            DiskFaults {
                every: Some(3),
                ..eio(&[Call::Read, Call::Write, Call::Open, Call::Fsync, Call::Metadata])
            },
        ),
        ("everything fails", eio(&[Call::Read, Call::Write, Call::Open, Call::Fsync, Call::Metadata])),
        ("read-only", DiskFaults { readonly: true, ..DiskFaults::default() }),
        ("5 MB are left", DiskFaults { budget: Some(5 << 20), ..DiskFaults::default() }),
    ];
    for (k, (what, faults)) in faults.iter().enumerate() {
        // The declared exception is a passthrough file that was open when the disk failed. Nothing is open here, so
        // every call must succeed, cold and warm.
        for (profile, freshness) in [("small", "ttl"), ("large", "strict")] {
            eprintln!("cache disk: {what}, profile {profile}");
            let name = format!("v{k}-{profile}");
            let mounted = node.volume(&name, "set", &[("profile", profile), ("freshness", freshness)])?;
            let pod = node.pod(&mounted)?;
            let warm = tree.only(|f| f.path.as_str() < "d002");
            pod.start_verify_below("", &warm)?.finish(Duration::from_secs(60))?.ensure_all(&warm)?;
            disk.set(faults)?;
            if profile == "large" {
                // New opens must do without the disk as soon as the agent has noticed.
                let noticed = || node.agent().cache().is_ok_and(|c| c.tiers.iter().any(|t| t.degraded));
                e2e::clock::wait_until(Duration::from_secs(10), noticed);
            }
            let read = pod.verify(&tree, 2)?;
            read.ensure_all(&tree).with_context(|| format!("{what}, profile {profile}"))?;
            drop(pod);
            node.unpublish(&mounted)?;
            node.stop_agent()?;
            node.start_agent()?;
            let mounted = node.volume(&format!("{name}-again"), "set", &[("profile", profile)])?;
            let read = node.pod(&mounted)?.verify(&tree, 2)?;
            read.ensure_all(&tree).with_context(|| format!("{what}, profile {profile}, after a restart"))?;
            node.unpublish(&mounted)?;
            disk.set(&DiskFaults::default())?;
            node.stop_agent()?;
            node.start_agent()?;
        }
    }
    node.finish()
}

#[test]
fn bits_flipped_while_the_agent_is_down_are_noticed() -> Result<()> {
    let seed = seed();
    let (mut node, tree) = node_with("set")?;
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
        node.unpublish(&mounted)?;
        node.stop_agent()?;
        let flipped = flip_a_bit_in_each(&node.places().cache().join("ssd"), &mut Random(seed))?;
        ensure!(flipped > tree.files.len() / 2, "only {flipped} cache files were found");
        node.start_agent()?;
        let mounted = node.volume(&format!("again-{profile}"), "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        drop(pod);
        node.unpublish(&mounted)?;
    }
    node.finish()
}

pub(crate) fn flip_a_bit_in_each(dir: &Path, random: &mut Random) -> Result<usize> {
    let mut flipped = 0;
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            flipped += flip_a_bit_in_each(&path, random)?;
            continue;
        }
        let file = std::fs::File::options().read(true).write(true).open(&path).context("a cache file")?;
        let len = file.metadata()?.len();
        if len == 0 {
            continue;
        }
        let (at, mut byte) = (random.below(len), [0]);
        file.read_exact_at(&mut byte, at)?;
        byte[0] ^= 1 << random.below(8);
        file.write_all_at(&byte, at)?;
        flipped += 1;
    }
    Ok(flipped)
}

#[test]
fn a_cache_of_another_version_is_set_aside() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[])?;
    node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
    node.unpublish(&mounted)?;
    node.stop_agent()?;
    // Every small file at the top of the roots: whichever it is that says the version.
    for root in ["ssd", "meta"] {
        for entry in std::fs::read_dir(node.places().cache().join(root))? {
            let path = entry?.path();
            if path.is_file() {
                std::fs::write(path, "millpond-cache version 9999\n")?;
            }
        }
    }
    node.start_agent()?;
    let again = node.volume("w", "set", &[])?;
    node.pod(&again)?.verify(&tree, 2)?.ensure_all(&tree)?;
    let log = std::fs::read_to_string(node.places().log("node-agent"))?;
    let line = log
        .lines()
        .find(|l| l.contains("set aside"))
        .context("the agent's log does not say \"set aside\"")?;
    println!("{line}");
    node.finish()
}

/// Bytes on a tmpfs that no name leads to any more: a process has these files open.
pub(crate) fn pinned(disk: &Path) -> Result<u64> {
    fn named(dir: &Path) -> std::io::Result<u64> {
        let mut bytes = 0;
        for entry in std::fs::read_dir(dir)? {
            let about = entry?;
            bytes += match about.file_type()?.is_dir() {
                true => named(&about.path())?,
                false => about.metadata()?.blocks() * 512,
            };
        }
        Ok(bytes)
    }
    let all = statvfs(disk)?;
    Ok(((all.f_blocks - all.f_bfree) * all.f_frsize).saturating_sub(named(disk)?))
}

/// More than the queue of a worker takes that does not listen for a while.
#[test]
fn space_of_evicted_files_is_free_once_a_worker_listens() -> Result<()> {
    const MANY: Shape = Shape { directories: 2, files: 400, small_bytes: 60_000, large: 0, large_bytes: 0 };
    let mut node = node_on(|node, uid| small_disk(node.places(), 256, uid))?;
    let disk = node.options().tiers[0].paths[0].clone();
    let tree = Tree::generated("", MANY);
    node.server.add(&tree, "set")?;
    let free = || pinned(&disk).is_ok_and(|bytes| bytes == 0);
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        for _ in 0..2 {
            pod.verify(&tree, 2)?.ensure_all(&tree)?;
        }
        let worker = node.worker_of(&mounted.id, PATIENCE)?;
        node.signal_worker(worker, Signal::STOP)?;
        node.agent().evict_all()?;
        let before = pinned(&disk)?;
        node.signal_worker(worker, Signal::CONT)?;
        println!("{profile}: {before} bytes were pinned by a worker that stood still");
        ensure!(wait_until(PATIENCE, free), "{profile}: {} bytes of {before} are pinned", pinned(&disk)?);
        ensure!(before > 0, "{profile}: the worker held nothing");
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        drop(pod);
        node.unpublish(&mounted)?;
        node.agent().evict_all()?;
    }
    node.finish()
}
