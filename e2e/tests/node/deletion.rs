//! Claims that are deleted, and what pods wrote to their volumes.

use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Node, Volume};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::time::Duration;
use testkit::faults::{Fault, Rule, Script};
use tonic::Code;

const LIMIT: Duration = Duration::from_secs(60);

fn started() -> Result<Node> {
    Node::start(AgentOptions { limits_controller: true, ..AgentOptions::default() })
}

/// Of a claim of a class that says what becomes of its volumes' directories.
fn claim(node: &mut Node, name: &str, on_delete: &str) -> Result<Volume> {
    let parameters = node.parameters(
        "work",
        &[
            ("path", "${pvc.namespace}/${pvc.name}"),
            ("access", "readWrite"),
            ("onDelete", on_delete),
            // What this node knows of the directory of a claim before is soon forgotten.
            ("metadataTtl", "1s"),
            ("csi.storage.k8s.io/pvc/namespace", "team"),
            ("csi.storage.k8s.io/pvc/name", name),
        ],
    );
    Ok(node.create_with_secret(name, &parameters)?)
}

/// As a pod does that comes and goes.
fn write(node: &mut Node, volume: &Volume, files: u32) -> Result<()> {
    let mounted = node.publish_writable(volume, &format!("pod-{}", volume.id))?;
    fs::create_dir_all(mounted.target.join("d/empty"))?;
    // One that goes in parts.
    let mut large = File::create(mounted.target.join("d/large"))?;
    large.write_all(&vec![7; 20 << 20])?;
    large.sync_all()?;
    for number in 0..files {
        fs::write(mounted.target.join(format!("d/{number}")), b"x")?;
    }
    node.unpublish(&mounted)?;
    Ok(())
}

fn files_below(dir: &Path) -> Result<usize> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut found = 0;
    for entry in entries {
        let path = entry?.path();
        found += if path.is_dir() { files_below(&path)? } else { 1 };
    }
    Ok(found)
}

#[test]
fn a_claim_that_is_deleted_takes_what_pods_wrote_along_or_leaves_it() -> Result<()> {
    let mut node = started()?;
    let (gone, kept) = (claim(&mut node, "gone", "delete")?, claim(&mut node, "kept", "retain")?);
    write(&mut node, &gone, 20)?;
    write(&mut node, &kept, 20)?;
    let (of_gone, of_kept) = (node.server.file("work/team/gone"), node.server.file("work/team/kept"));
    ensure!((files_below(&of_gone)?, files_below(&of_kept)?) == (21, 21), "what was written is in the store");

    node.delete_with_secret(&gone)?;
    node.delete_with_secret(&kept)?;
    ensure!((files_below(&of_gone)?, files_below(&of_kept)?) == (0, 21));
    // A claim of that name begins with nothing, on this node too.
    let again = claim(&mut node, "gone", "delete")?;
    let mounted = node.publish_writable(&again, "pod-again")?;
    let seen =
        wait_until(LIMIT, || fs::read_dir(&mounted.target).is_ok_and(|mut names| names.next().is_none()));
    ensure!(seen, "{:?}", fs::read_dir(&mounted.target)?.collect::<Vec<_>>());
    node.unpublish(&mounted)?;
    node.delete_with_secret(&again)?;
    node.finish()
}

#[test]
fn a_deletion_goes_on_after_its_controller_was_killed() -> Result<()> {
    let mut node = started()?;
    let volume = claim(&mut node, "big", "delete")?;
    write(&mut node, &volume, 50)?;
    let directory = node.server.file("work/team/big");
    node.server.set_faults(&Script {
        seed: 0,
        rules: vec![Rule::always(Fault::Stall { ms: None }).op("DeleteObjects")],
    })?;
    let status = node.delete_with_secret(&volume).err().context("the store is silent")?;
    ensure!(status.code() == Code::Aborted && status.message().contains("objects so far"), "{status:?}");
    node.kill_plugin()?;
    node.start_plugin()?;
    ensure!(files_below(&directory)? == 51, "nobody goes on without a secret");
    node.server.no_faults()?;
    let deleted = wait_until(LIMIT, || node.delete_with_secret(&volume).is_ok());
    ensure!(deleted && files_below(&directory)? == 0);
    node.finish()
}
