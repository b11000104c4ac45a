//! What a source and its credentials leave on a node when no volume uses them any more.

use crate::node_with;
use crate::promises::names;
use anyhow::{Result, ensure};
use e2e::clock::wait_until;
use e2e::node::Node;
use e2e::scenario::scopes;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::Code;

const PATIENCE: Duration = Duration::from_secs(30);
/// What a source's names take when it is left, and pages that commits in quick succession have replaced: a twentieth of
/// what is reserved while it is used.
const LEFT: u64 = 3 << 19;

fn metadata_dir(node: &Node) -> PathBuf {
    node.places().cache().join("meta")
}

/// Bytes of the disk, all files below together.
fn taken(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let about = entry.metadata()?;
        bytes += about.blocks() * 512 + if about.is_dir() { taken(&entry.path())? } else { 0 };
    }
    Ok(bytes)
}

/// Directories of scopes below a cache directory.
fn cached_scopes(node: &Node) -> Result<usize> {
    let all = names(&node.places().cache().join("ssd"))?;
    Ok(all.iter().filter(|name| name.len() == 32).count())
}

#[test]
fn a_publish_that_fails_leaves_nothing_on_the_disk() -> Result<()> {
    let (mut node, _) = node_with("set")?;
    for n in 0..20 {
        let volume = node.create(&format!("v{n}"), "set", &[])?;
        let guess = format!("guess-{n}");
        let [(_, id), _] = e2e::node::secrets();
        let refused = node.publish_with(&volume, "pod", &[("accessKeyId", id), ("secretAccessKey", &guess)]);
        assert_eq!(refused.err().map(|status| status.code()), Some(Code::PermissionDenied));
        node.delete(&volume)?;
    }
    assert_eq!(names(&metadata_dir(&node))?.len(), 0);
    assert_eq!(cached_scopes(&node)?, 0);
    node.finish()
}

#[test]
fn sources_used_and_left_leave_disk_and_descriptors_as_they_were() -> Result<()> {
    const SOURCES: usize = 12;
    let (mut node, tree) = node_with("set")?;
    let descriptors =
        |node: &Node| names(Path::new(&format!("/proc/{}/fd", node.agent().pid()))).map(|all| all.len());
    let mut before = None;
    for n in 0..SOURCES {
        let prefix = format!("p{n}");
        node.server.add(&tree, &prefix)?;
        let mounted = node.volume(&format!("v{n}"), &prefix, &[("profile", "large")])?;
        let pod = node.pod(&mounted)?;
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        drop(pod);
        ensure!(taken(&metadata_dir(&node))? > 16 << 20, "no reserve was taken: nothing is tested here");
        node.unpublish(&mounted)?;
        if before.is_none() {
            // Connections to the store and the like are there now.
            let small = || taken(&metadata_dir(&node)).is_ok_and(|bytes| bytes < LEFT);
            ensure!(wait_until(PATIENCE, small), "the reserve of the first was not given back");
            before = Some(descriptors(&node)?);
        }
    }
    let given_back = || taken(&metadata_dir(&node)).is_ok_and(|bytes| bytes < SOURCES as u64 * LEFT);
    ensure!(wait_until(PATIENCE, given_back), "{} bytes are taken", taken(&metadata_dir(&node))?);
    // What is cached stays, until another file needs the room.
    assert_eq!(cached_scopes(&node)?, SOURCES);
    node.agent().evict_all()?;
    let gone = || cached_scopes(&node).is_ok_and(|count| count == 0);
    ensure!(wait_until(PATIENCE, gone), "{} scopes have directories and no files", cached_scopes(&node)?);
    let as_before = || descriptors(&node).is_ok_and(|now| Some(now) <= before);
    ensure!(wait_until(PATIENCE, as_before), "{} descriptors, {before:?} before", descriptors(&node)?);
    // A source that was left is found again.
    let again = node.volume("again", "p3", &[("profile", "large"), ("freshness", "static")])?;
    node.server.reset()?;
    fs::metadata(again.target.join("large0"))?;
    assert_eq!(node.server.stats()?.total(), 0, "the names were asked for again");
    node.finish()
}

#[test]
fn hundreds_of_sources_used_once_leave_the_node_as_it_was() -> Result<()> {
    let mut node = Node::start(scopes::options())?;
    println!("{}", scopes::run(&mut node, 250)?);
    node.finish()
}
