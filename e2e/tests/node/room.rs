//! Room on the staging disk: what its store has gives way, whichever volume it is of, and writers wait for what gets there.

use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{Mounted, Node};
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use testkit::faults::{Fault, Rule, Script};

const PATIENCE: Duration = Duration::from_secs(90);
const MIB: usize = 1 << 20;
/// That writers leave free.
const KEPT_FREE: u64 = 256;
/// MiB of the disk besides.
const ROOM: u64 = 128;

/// With so little room that the files of two volumes do not fit.
fn node() -> Result<Node> {
    Node::on_staging_disk_of(KEPT_FREE + ROOM)
}

fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|n| (n / 100) as u8 ^ seed).collect()
}

fn write(mounted: &Mounted, name: &str, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(mounted.target.join(name))?;
    file.write_all(bytes)?;
    Ok(file.sync_all()?)
}

/// Bytes that the staging area of this volume has of files.
fn staged(node: &Node, mounted: &Mounted) -> Result<u64> {
    let dir: PathBuf = node.places().state("agent").join("staging").join(&mounted.id).join("files");
    let mut sum = 0;
    for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
        match entry?.metadata() {
            Ok(about) => sum += about.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {} // it has just gone
            Err(error) => return Err(error.into()),
        }
    }
    Ok(sum)
}

#[test]
fn what_one_volume_has_in_its_store_makes_room_for_another_also_when_its_pod_has_gone() -> Result<()> {
    let mut node = node()?;
    let back = [("writeMode", "back")];
    let (gone, idle) = (node.workspace("gone", "gone", &back)?, node.workspace("idle", "idle", &back)?);
    let of = [(&gone, "gone", bytes(1, 50 * MIB)), (&idle, "idle", bytes(2, 50 * MIB))];
    for (mounted, prefix, written) in &of {
        write(mounted, "checkpoint", written)?;
        let stored = node.server.file(&format!("{prefix}/checkpoint"));
        ensure!(
            wait_until(PATIENCE, || fs::read(&stored).is_ok_and(|is| is == *written)),
            "{prefix} does not arrive"
        );
    }
    node.unpublish(&gone)?;
    let busy = node.workspace("busy", "busy", &back)?;
    // Both must go for this.
    let large = bytes(3, 110 * MIB);
    write(&busy, "checkpoint", &large).context("nothing makes room")?;
    ensure!(
        staged(&node, &gone)? == 0 && staged(&node, &idle)? == 0,
        "what the store has is still on the disk"
    );
    ensure!(fs::read(busy.target.join("checkpoint"))? == large);
    let again = node.workspace_again(&gone, "again")?;
    for (mounted, (_, prefix, written)) in [&again, &idle].into_iter().zip(&of) {
        ensure!(fs::read(mounted.target.join("checkpoint"))? == *written, "{prefix} has other bytes");
    }
    node.finish()
}

#[test]
fn a_writer_waits_for_room_as_long_as_something_gets_to_the_store() -> Result<()> {
    let mut node = node()?;
    let mounted = node.workspace("slow", "slow", &[("writeMode", "back")])?;
    // What the store can do is tried with the first.
    write(&mounted, "small", b"small")?;
    let stored = node.server.file("slow/small");
    ensure!(wait_until(PATIENCE, || stored.exists()), "it does not arrive");
    // Longer than a writer waits if nothing gets there.
    let slow = Rule::always(Fault::Latency { ms: 20_000 }).op("CompleteMultipartUpload");
    node.server.set_faults(&Script { seed: 0, rules: vec![slow] })?;
    let (first, second) = (bytes(1, 110 * MIB), bytes(2, 60 * MIB));
    write(&mounted, "first", &first)?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        // The store copies it each time.
        let renaming = scope.spawn(|| -> Result<()> {
            let names = ["small", "renamed"].map(|name| mounted.target.join(name));
            let mut times = 0;
            while !is_over.load(Relaxed) || times % 2 > 0 {
                fs::rename(&names[times % 2], &names[(times + 1) % 2])?;
                let stored = node.server.file(["slow/renamed", "slow/small"][times % 2]);
                ensure!(wait_until(PATIENCE, || stored.exists()), "the new name does not arrive");
                times += 1;
            }
            Ok(())
        });
        let written = write(&mounted, "second", &second);
        is_over.store(true, Relaxed);
        renaming.join().expect("it has not panicked")?;
        written.context("it was not waited for what gets to the store")
    })?;
    node.server.no_faults()?;
    for (name, written) in [("first", &first[..]), ("second", &second[..]), ("small", b"small")] {
        ensure!(fs::read(mounted.target.join(name))? == written, "{name} has other bytes");
    }
    node.finish()
}
