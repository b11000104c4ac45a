//! Ceph's gateway before the smallest cluster that it works with: one monitor, one store of objects in memory, no manager.

use super::servers::{KEY_ID, Real, SECRET_KEY, free_port, program};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use testkit::process::Process;

const CLUSTER: &str = "7f5a2b1e-52c3-4a53-9d0c-3b8a6f0e9d41";

pub(crate) async fn rgw() -> Real {
    let mut cluster = Vec::new();
    let mut real = Real::start("ceph-rgw", "s3", |port, dir| {
        cluster = start(dir);
        let frontend = format!("beast endpoint=127.0.0.1:{port}");
        let mut command = tool("radosgw", dir);
        command.args(["-f", "--rgw-frontends", &frontend]);
        command
    });
    real.others = cluster;
    real.with_bucket_and_keys().await
}

/// A program of Ceph's packages, which are unpacked and not installed.
fn tool(name: &str, dir: &Path) -> Command {
    let root = program("ceph");
    let mut command = Command::new(root.join("bin").join(name));
    let libraries = format!("{0}/lib:{0}/lib/ceph", root.display());
    command.env("LD_LIBRARY_PATH", libraries).current_dir(dir);
    if !name.ends_with("tool") {
        command.args(["-c", "ceph.conf"]);
    }
    command
}

/// What is to be ended after the gateway, in this order. The gateway's user is there.
fn start(dir: &Path) -> Vec<Process> {
    let monitor = format!("[v2:127.0.0.1:{}]", free_port());
    std::fs::write(dir.join("ceph.conf"), configuration(dir, &monitor)).unwrap();
    let run = |name: &str, arguments: &[&str]| {
        let mut process = spawn(tool(name, dir).args(arguments), dir, "tools");
        let status = process.wait_for_exit(Duration::from_secs(120)).unwrap();
        assert!(status.success(), "{name} {arguments:?}: {status}\n{}", log(dir, "tools"));
    };
    let keys =
        |arguments: &[&str]| run("ceph-authtool", &[&["keyring", "--gen-key", "-n"], arguments].concat());
    keys(&["mon.", "--create-keyring", "--cap", "mon", "allow *"]);
    keys(&["client.admin", "--cap", "mon", "allow *", "--cap", "osd", "allow *"]);
    keys(&["osd.0", "--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"]);
    run("monmaptool", &["--create", "--fsid", CLUSTER, "--addv", "a", &monitor, "monmap"]);
    // With a map from the start that has a store in it nobody needs to tell the monitor of one.
    run("osdmaptool", &["--createsimple", "1", "osdmap"]);
    let made = ["--mkfs", "-i", "a", "--monmap", "monmap", "--osdmap", "osdmap", "--keyring", "keyring"];
    run("ceph-mon", &made);
    let monitor = spawn(tool("ceph-mon", dir).args(["-f", "-i", "a"]), dir, "monitor");
    run("ceph-osd", &["--mkfs", "-i", "0"]);
    let objects = spawn(tool("ceph-osd", dir).args(["-f", "-i", "0"]), dir, "objects");
    // Waits until both answer.
    let keys = ["--access-key", KEY_ID, "--secret-key", SECRET_KEY];
    run(
        "radosgw-admin",
        &[&["user", "create", "--uid", "tests", "--display-name", "tests"], &keys[..]].concat(),
    );
    let mut processes = vec![objects, monitor];
    // Nothing in them is worth a shutdown in order.
    processes.iter_mut().for_each(|process| process.grace = Duration::ZERO);
    processes
}

fn configuration(dir: &Path, monitor: &str) -> String {
    let (dir, libraries) = (dir.display(), program("ceph").join("lib"));
    let libraries = libraries.display();
    format!(
        "[global]
fsid = {CLUSTER}
mon host = {monitor}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = {dir}/keyring
mon data = {dir}/mon
osd data = {dir}/osd
run dir = {dir}
admin socket =
crash dir =
log file =
mon cluster log to file = false
log to stderr = true
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd class dir = {libraries}/rados-classes
osd objectstore = memstore
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
paxos propose interval = 0.05
"
    )
}

fn spawn(command: &mut Command, dir: &Path, log: &str) -> Process {
    std::fs::create_dir_all(dir.join("mon")).unwrap();
    std::fs::create_dir_all(dir.join("osd")).unwrap();
    let log = std::fs::File::create(dir.join(log)).unwrap();
    Process::spawn(command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log)).unwrap()
}

fn log(dir: &Path, name: &str) -> String {
    std::fs::read_to_string(dir.join(name)).unwrap_or_default()
}
