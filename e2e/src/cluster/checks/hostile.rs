//! What others do to a mount from outside: a store that claims sizes, a process that ends connections, a killed worker
//! under a mount of the laptop's kind. A notebook reads beside all of it.

use super::kinds::attributes;
use crate::clock::within;
use crate::cluster::Suite;
use crate::cluster::machine::NODE_IP;
use crate::cluster::names::*;
use crate::cluster::notebook::Notebook;
use crate::cluster::objects::Pod;
use crate::cluster::suite::{BUCKET, SET};
use crate::cluster::waits::{PATIENCE, uid};
use crate::mountinfo;
use crate::node::programs;
use crate::processes;
use crate::scenario::ended::abort_through;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use testkit::s3::{ACCESS_KEY, Config, Memory, SECRET_KEY, Server};

const HUGE: u64 = 1 << 60;
const ENDINGS: usize = 3;

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    let notebook = Notebook::start(suite, "hostile")?;
    let agent = suite.view().only("node-agent")?;
    let seen = claimed_size(suite)
        .context("an object that claims to be huge")
        .and_then(|()| ended_connections(suite).context("connections that another process ends"))
        .and_then(|()| laptop(suite).context("a mount in the background"));
    let judged = notebook.end(suite);
    seen?;
    judged?;
    ensure!(suite.view().only("node-agent")? == agent, "the agent is another one");
    println!("    the agent lived through all of it");
    notebook.delete(suite)
}

fn claimed_size(suite: &Suite) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let listen = format!("{NODE_IP}:0").parse()?;
    let config = Config { listen, ..Config::default() }.bucket(BUCKET, Memory::default());
    let store = runtime.block_on(Server::start(config))?;
    store.claim(BUCKET, "huge.bin", HUGE)?;
    let mut volume = attributes(suite);
    volume["source"] = format!("s3://{BUCKET}").into();
    volume["endpoint"] = store.endpoint().into();
    let script =
        "stat -c %s /data/huge.bin; head -c 10 /data/huge.bin | wc -c; tail -c 10 /data/huge.bin | wc -c";
    let pod = Pod::new(TENANT, "huge", script).inline(volume, Some(S3_SECRET));
    let log = suite.kubectl.run_pod(TENANT, "huge", &pod.object())?;
    ensure!(log.trim() == format!("{HUGE}\n10\n10"), "the pod said {log:?}");
    println!("    an object of 2^60 bytes: its first and its last 10 bytes were read");
    Ok(())
}

/// By the kernel's switch, and by `umount -f`, in turn.
fn ended_connections(suite: &Suite) -> Result<()> {
    let (k, name) = (&suite.kubectl, "ended");
    suite.claim(name)?;
    k.apply(&[Pod::sleeper(TENANT, name).claim(name).object()])?;
    let pod_uid = uid(&k.wait_ready(TENANT, name)?)?;
    let read = || k.exec(TENANT, name, "main", &["sh", "-c", "cat /data/d000/f00000 | md5sum"]);
    let right = read()?;
    for round in 0..ENDINGS {
        let volumes = suite.view().volumes()?;
        let mount = volumes.iter().find(|m| m.point.to_string_lossy().contains(&pod_uid));
        let mount = mount.context("the node shows the pod's mount")?;
        match round % 2 {
            0 => abort(mount)?,
            _ => {
                let target = mount.point.to_string_lossy().into_owned();
                ensure!(suite.machine().inside("umount")?.args(["-f", &target]).status()?.success());
            }
        }
        k.wait("paths that work again", PATIENCE, |_| Ok((read()? == right).then_some(())))?;
    }
    for reason in ["MountFailed", "MountRecovered"] {
        let event = k.wait(reason, PATIENCE, |k| {
            Ok(k.events(TENANT, "Pod", name)?.into_iter().find(|e| e.reason == reason))
        })?;
        println!("    Pod/{name}: {}: {}", event.reason, event.message);
    }
    println!("    another process ended its connection {ENDINGS} times: each time its paths worked again");
    k.delete("pod", TENANT, name)?;
    k.wait_gone("pod", TENANT, name)?;
    super::deletion::nothing_left(suite, &pod_uid)?;
    k.delete("pvc", TENANT, name)
}

/// `echo 1 > /sys/fs/fuse/connections/N/abort`.
fn abort(mount: &mountinfo::Mount) -> Result<()> {
    let number = mount.device.rsplit(':').next().unwrap_or_default();
    abort_through(tempfile::tempdir()?.path(), number)
}

/// In the node's own namespaces, as a user who is logged in there mounts it.
fn laptop(suite: &Suite) -> Result<()> {
    let places = suite.machine().places().root().join("laptop");
    let (dir, cache) = (places.join("dir"), places.join("cache"));
    fs::create_dir_all(&dir)?;
    let seen = mounted(suite, &dir, &cache);
    // Also where something has failed: no process of it may be left.
    let umount = millpond(suite, &["umount", &text(&dir), "--cache", &text(&cache)]);
    seen?;
    ensure!(umount?.status.success(), "millpond umount fails");
    let left: Vec<_> = suite.machine().mounts()?.into_iter().filter(|m| m.point.starts_with(&dir)).collect();
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

fn mounted(suite: &Suite, dir: &Path, cache: &Path) -> Result<()> {
    let (source, endpoint) = (format!("s3://{BUCKET}/{SET}"), format!("endpoint={}", suite.endpoint()));
    let (cache_dir, dir_path) = (text(cache), text(dir));
    let words = ["mount", "--quota", "1Gi", "-o", "allowHttp=true", "-o", &endpoint, "--cache", &cache_dir];
    let words = [&words[..], &[&source, &dir_path]].concat();
    let output = millpond(suite, &words)?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    print!("    {said}");
    for _ in 0..3 {
        let worker = suite.kubectl.wait("a worker under the mount", PATIENCE, |_| {
            Ok(suite.view().processes("fuse-worker")?.into_iter().find(|pid| is_under(*pid, cache)))
        })?;
        suite.view().kill(worker)?;
        let file = suite.machine().path(&text(&dir.join("d000/f00000")));
        let bytes = within(PATIENCE, move || fs::read(file))?.context("read under a killed worker")?;
        ensure!(bytes.len() == 100_000, "{} bytes", bytes.len());
    }
    println!(
        "    its worker was killed 3 times with no reader at its pipes: each time the next read was right"
    );
    Ok(())
}

/// Whether it serves a mount, and the process that started it works in this cache directory.
fn is_under(worker: u32, cache: &Path) -> bool {
    processes::parent(worker).is_some_and(|parent| {
        let words = fs::read(format!("/proc/{parent}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains(&text(cache))
            && processes::fuse_children(parent).contains(&worker)
    })
}

fn millpond(suite: &Suite, words: &[&str]) -> Result<Output> {
    let mut command: Command = suite.machine().inside(&text(&programs()?.join("millpond")))?;
    command.args(words).env("AWS_ACCESS_KEY_ID", ACCESS_KEY).env("AWS_SECRET_ACCESS_KEY", SECRET_KEY);
    command.env_remove("AWS_SESSION_TOKEN").stdin(Stdio::null());
    within(PATIENCE, move || command.output())?.context("start millpond")
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
