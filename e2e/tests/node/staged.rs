//! What people at a node see and do of files that were written there and are not in the store yet: `millpond staging`.

use crate::operators::{json, millpond};
use crate::promises::errno;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Mounted, Node, secrets};
use e2e::scenario::ended::{Ending, end};
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use testkit::content;
use testkit::fault_fs::{Call, DiskFaults};
use testkit::faults::{Fault, Rule, Script};

const PATIENCE: Duration = Duration::from_secs(60);

/// The store takes nothing any more.
fn refuse_writes(node: &Node) -> Result<()> {
    let refused = || Rule::always(Fault::Status { code: 403, retry_after_s: None });
    let rules = ["PutObject", "CreateMultipartUpload"].map(|op| refused().op(op)).to_vec();
    node.server.set_faults(&Script { seed: 0, rules })
}

fn take_writes(node: &Node) -> Result<()> {
    node.server.set_faults(&Script { seed: 0, rules: Vec::new() })
}

fn back(node: &mut Node, name: &str) -> Result<Mounted> {
    node.workspace(name, name, &[("writeMode", "back")])
}

fn write_sync(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(())
}

/// With this on its standard input.
fn millpond_with(node: &Node, arguments: &[&str], input: &str) -> Result<Output> {
    let mut command = Command::new(node.places().bin("millpond"));
    command.arg("--api").arg(node.places().agent_socket()).args(arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    child.stdin.take().context("a pipe")?.write_all(input.as_bytes())?;
    let output = child.wait_with_output()?;
    println!("millpond {arguments:?}: {}\n{}{}", output.status, out(&output), err(&output));
    Ok(output)
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What `millpond staging list` says of this volume.
fn listed(node: &Node, volume: &str) -> Result<Value> {
    let list = millpond(node, &["staging", "list", "--files", "--output", "json"])?;
    ensure!(list.status.success());
    let all = json(&list)?;
    let all = all.as_array().context("a list")?;
    all.iter().find(|area| area["volumeId"] == volume).cloned().context("no area of this volume")
}

/// No mount has one of its files open any more: the kernel tells of a close later.
fn wait_closed(node: &Node, volume: &str) -> Result<()> {
    let is_closed = |file: &Value| file["opens"] == 0;
    let all = |area: Value| area["staged"].as_array().is_some_and(|files| files.iter().all(is_closed));
    let closed = wait_until(PATIENCE, || listed(node, volume).is_ok_and(all));
    ensure!(closed, "{}", listed(node, volume)?);
    Ok(())
}

fn secret() -> String {
    serde_json::json!(secrets().into_iter().collect::<std::collections::BTreeMap<_, _>>()).to_string()
}

fn to(node: &Node, name: &str) -> Result<(PathBuf, String)> {
    let dir = node.places().root().join(name);
    let text = dir.to_str().context("a path of ours")?.to_owned();
    Ok((dir, text))
}

/// The kernel sends no RELEASE for what it has not opened.
#[test]
fn who_is_killed_while_a_file_is_opened_leaves_it_open_to_nobody() -> Result<()> {
    let hang_limit = Some(Duration::from_secs(30));
    let options = AgentOptions { hang_limit, ..AgentOptions::default() };
    let (mut node, disk) = Node::on_faulty_staging_disk(options)?;
    let mounted = back(&mut node, "killed")?;
    refuse_writes(&node)?;
    let path = mounted.target.join("a");
    write_sync(&path, b"hello")?;
    wait_closed(&node, mounted.id.as_str())?;
    disk.set(&DiskFaults { hangs: Call::ALL.to_vec(), ..DiskFaults::default() })?;
    let start = |program: &str, name: &str| -> Result<Child> {
        let mut command = Command::new(program);
        Ok(command.arg(mounted.target.join(name)).stdout(Stdio::null()).spawn()?)
    };
    let mut programs = [start("cat", "a")?, start("touch", "new")?];
    let stack =
        |program: &Child| fs::read_to_string(format!("/proc/{}/stack", program.id())).unwrap_or_default();
    // Other requests are waited for, too: fuse_atomic_open looks the name up (fs/fuse/dir.c) before it sends CREATE, or OPEN is sent in
    // do_dentry_open.
    let opens = |program: &Child| {
        let stack = stack(program);
        let is_in = |function: &str| stack.contains(function);
        let is_opening = is_in("do_dentry_open") || is_in("fuse_atomic_open") && !is_in("fuse_lookup");
        is_opening && is_in("request_wait_answer")
    };
    let all_open = wait_until(PATIENCE, || programs.iter().all(opens));
    let stacks = programs.each_ref().map(stack);
    for program in &mut programs {
        program.kill()?;
        ensure!(program.wait()?.signal() == Some(9), "it ends although the disk hangs");
    }
    ensure!(all_open, "they do not wait for the agent to open their files: {stacks:#?}");
    disk.set(&DiskFaults::default())?;
    let opened = wait_until(PATIENCE, || fs::read(&path).is_ok_and(|read| read == b"hello"));
    ensure!(opened, "{:?}", fs::read(&path));
    wait_closed(&node, mounted.id.as_str())?;
    node.finish()
}

#[test]
fn what_the_store_does_not_take_is_listed_exported_and_uploaded_once_it_does() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let mounted = back(&mut node, "work")?;
    let id = mounted.id.as_str();
    let clean = json(&millpond(&node, &["status", "--output", "json"])?)?;
    ensure!(clean["volumes"][0]["staged"]["files"] == 0 && clean["staging"][0]["volumeId"] == id, "{clean}");
    refuse_writes(&node)?;
    write_sync(&mounted.target.join("a"), b"hello")?;
    write_sync(&mounted.target.join("b"), &[7; 100_000])?;
    let held = OpenOptions::new().write(true).open(mounted.target.join("b"))?;
    let failed = || listed(&node, id).is_ok_and(|area| area["failure"] != "");
    ensure!(wait_until(PATIENCE, failed), "nothing has failed");
    let area = listed(&node, id)?;
    ensure!(area["files"] == 2 && area["bytes"] == 100_005 && area["mounts"] == 1, "{area}");
    ensure!(area["staged"][1]["path"] == "b" && area["staged"][1]["opens"] == 1, "{area}");
    let data = Path::new(area["directory"].as_str().context("a directory")?)
        .join(area["staged"][0]["data"].as_str().context("a file")?);
    ensure!(fs::read(data)? == b"hello");
    let status = json(&millpond(&node, &["status", "--output", "json"])?)?;
    let staged = &status["volumes"][0]["staged"];
    ensure!(staged["files"] == 2 && staged["bytes"] == 100_005 && staged["conflicts"] == 0, "{staged}");
    ensure!(out(&millpond(&node, &["status"])?).contains("Not in the store yet"));
    // An attempt of a person's shows the error.
    let upload = millpond(&node, &["staging", "upload", id])?;
    ensure!(!upload.status.success() && out(&upload).contains("2 files"), "{}", out(&upload));
    ensure!(
        err(&upload).contains("403") || err(&upload).to_lowercase().contains("denied"),
        "{}",
        err(&upload)
    );
    let (dir, text) = to(&node, "exported")?;
    let export = millpond(&node, &["staging", "export", id, "--to", &text])?;
    ensure!(export.status.success());
    ensure!(fs::read(dir.join("a"))? == b"hello" && fs::read(dir.join("b"))? == [7; 100_000]);
    let again = millpond(&node, &["staging", "export", id, "--to", &text, "a"])?;
    ensure!(!again.status.success() && err(&again).contains("nothing is replaced"), "{}", err(&again));
    let nothing = millpond(&node, &["staging", "export", id, "--to", &text, "nothing"])?;
    ensure!(!nothing.status.success() && err(&nothing).contains("nothing waits"), "{}", err(&nothing));
    take_writes(&node)?;
    drop(held);
    let upload = millpond(&node, &["staging", "upload", id])?;
    ensure!(upload.status.success(), "{}", err(&upload));
    ensure!(fs::read(node.server.file("work/a"))? == b"hello");
    ensure!(listed(&node, id)?["files"] == 0 && listed(&node, id)?["failure"] == "");
    node.finish()
}

#[test]
fn what_a_pod_has_left_is_uploaded_without_a_mount_by_who_has_the_secret() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let mounted = back(&mut node, "left")?;
    let id = mounted.id.as_str();
    refuse_writes(&node)?;
    write_sync(&mounted.target.join("a"), b"hello")?;
    node.unpublish(&mounted)?;
    let area = listed(&node, id)?;
    ensure!(area["files"] == 1 && area["mounts"] == 0, "{area}");
    // Another agent knows of it from its disk alone, and has no secret.
    node.kill_agent()?;
    node.start_agent()?;
    let area = listed(&node, id)?;
    ensure!(area["files"] == 1 && area["sending"] == false && area["described"] == true, "{area}");
    ensure!(area["staged"][0]["state"] == "waiting" && area["staged"][0]["path"] == "a", "{area}");
    let doctor = millpond(&node, &["doctor"])?;
    ensure!(!doctor.status.success());
    let findings = json(&millpond(&node, &["doctor", "--output", "json"])?)?;
    let of_it = findings
        .as_array()
        .context("findings")?
        .iter()
        .find(|f| f["check"] == format!("staged files of {id}"));
    let todo = of_it.context("it is not found")?["todo"].as_str().unwrap_or_default().to_owned();
    ensure!(todo.contains(&format!("millpond staging upload {id} --secret-file")), "{todo}");
    let (dir, text) = to(&node, "exported")?;
    ensure!(millpond(&node, &["staging", "export", id, "--to", &text])?.status.success());
    ensure!(fs::read(dir.join("a"))? == b"hello");
    // The right one, at a store that refuses it.
    let refused = Rule::always(Fault::Status { code: 403, retry_after_s: None });
    node.server.set_faults(&Script { seed: 0, rules: vec![refused] })?;
    let upload = millpond_with(&node, &["staging", "upload", id, "--secret-file", "-"], &secret())?;
    ensure!(!upload.status.success() && listed(&node, id)?["files"] == 1, "{}", out(&upload));
    take_writes(&node)?;
    // Without a secret, with a wrong one, and with what is none.
    for (input, says) in [
        ("{}", ""),
        (r#"{"accessKeyId":"nobody","secretAccessKey":"hunter2hunter2"}"#, ""),
        (r#"{"accessKeyId":"nobody"}"#, "secretAccessKey"),
        ("hunter2hunter2", "JSON"),
    ] {
        let refused = millpond_with(&node, &["staging", "upload", id, "--secret-file", "-"], input)?;
        ensure!(!refused.status.success() && err(&refused).contains(says), "{input}: {}", err(&refused));
        ensure!(!err(&refused).contains("hunter2hunter2"), "{}", err(&refused));
        ensure!(listed(&node, id)?["files"] == 1);
    }
    let upload = millpond_with(&node, &["staging", "upload", id, "--secret-file", "-"], &secret())?;
    ensure!(upload.status.success(), "{}", err(&upload));
    ensure!(fs::read(node.server.file("left/a"))? == b"hello");
    let closed = || listed(&node, id).is_ok_and(|area| area["files"] == 0 && area["sending"] == false);
    ensure!(wait_until(PATIENCE, closed), "it is kept open");
    let log = node.places().logs();
    ensure!(!log.contains("hunter2hunter2") && !log.contains(secrets()[1].1));
    // The volume goes on as before.
    let again = node.workspace_again(&mounted, "again")?;
    ensure!(fs::read(again.target.join("a"))? == b"hello");
    write_sync(&again.target.join("a"), b"more")?;
    let follows = || fs::read(node.server.file("left/a")).is_ok_and(|bytes| bytes == b"more");
    ensure!(wait_until(PATIENCE, follows));
    node.finish()
}

/// Events are lines of csi-plugin's log where there is no Kubernetes.
#[test]
fn owners_learn_what_the_store_does_not_take_and_an_unpublish_waits_for_what_it_does() -> Result<()> {
    let mut node = Node::start(AgentOptions { uploads_late: Some("1s"), ..AgentOptions::default() })?;
    let mounted = back(&mut node, "told")?;
    refuse_writes(&node)?;
    write_sync(&mounted.target.join("a"), b"hello")?;
    let told = |node: &Node, what: &str| wait_until(PATIENCE, || node.places().logs().contains(what));
    ensure!(told(&node, "UploadsLate") && told(&node, "told: a file (0.0 KiB) written on node"));
    take_writes(&node)?;
    ensure!(told(&node, "UploadsDone") && fs::read(node.server.file("told/a"))? == b"hello");
    // A store that takes its time: what was written last is there when the unpublish returns, for a pod on another node.
    let slow = Rule::always(Fault::Latency { ms: 2000 }).op("PutObject");
    node.server.set_faults(&Script { seed: 0, rules: vec![slow] })?;
    write_sync(&mounted.target.join("b"), b"last words")?;
    node.unpublish(&mounted)?;
    ensure!(fs::read(node.server.file("told/b"))? == b"last words");
    ensure!(!node.places().logs().contains("UploadsLeft"));
    // One that refuses is not waited for.
    let again = node.workspace_again(&mounted, "again")?;
    refuse_writes(&node)?;
    write_sync(&again.target.join("c"), b"kept")?;
    node.unpublish(&again)?;
    ensure!(told(&node, "UploadsLeft") && listed(&node, mounted.id.as_str())?["files"] == 1);
    node.finish()
}

/// Of the version before, or damaged.
#[test]
fn an_area_that_does_not_say_how_it_was_published_says_what_to_do_instead() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let mounted = back(&mut node, "old")?;
    let id = mounted.id.as_str();
    refuse_writes(&node)?;
    write_sync(&mounted.target.join("a"), b"hello")?;
    node.unpublish(&mounted)?;
    node.kill_agent()?;
    node.start_agent()?;
    let kept =
        PathBuf::from(listed(&node, id)?["directory"].as_str().context("a directory")?).join("volume.json");
    let text = fs::read_to_string(&kept)?;
    ensure!(text.contains("s3://") && secrets().iter().all(|(_, secret)| !text.contains(secret)), "{text}");
    take_writes(&node)?;
    for broken in [None, Some("{"), Some(r#"{"format":7,"mount":{}}"#)] {
        fs::remove_file(&kept)?;
        broken.iter().try_for_each(|text| fs::write(&kept, text))?;
        let refused = millpond_with(&node, &["staging", "upload", id, "--secret-file", "-"], &secret())?;
        let says = err(&refused);
        ensure!(
            !refused.status.success() && says.contains("publish the volume on this node again"),
            "{says}"
        );
        if broken.is_none() {
            fs::write(&kept, "")?;
        }
    }
    let unknown = millpond(&node, &["staging", "upload", "no-such-volume"])?;
    ensure!(err(&unknown).contains("no staging area on this node"), "{}", err(&unknown));
    let bad = millpond(&node, &["staging", "export", "../escape", "--to", "/nonexistent/x"])?;
    ensure!(!bad.status.success() && err(&bad).contains("not valid"), "{}", err(&bad));
    // What it says helps.
    node.workspace_again(&mounted, "again")?;
    let follows = || fs::read(node.server.file("old/a")).is_ok_and(|bytes| bytes == b"hello");
    ensure!(wait_until(PATIENCE, follows));
    node.finish()
}

#[test]
fn a_conflict_is_shown_exported_and_given_up_for_what_somebody_else_has_written() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let mounted = node.workspace("both", "both", &[])?;
    let id = mounted.id.as_str();
    write_sync(&mounted.target.join("a"), b"first")?;
    fs::write(node.server.file("both/a"), b"theirs")?;
    node.server.rescan()?;
    let mut file = OpenOptions::new().write(true).open(mounted.target.join("a"))?;
    file.write_all(b"ours!")?;
    ensure!(errno(file.sync_all()) == Some(libc::ESTALE));
    let area = listed(&node, id)?;
    ensure!(area["conflicts"] == 1 && area["staged"][0]["state"] == "conflict", "{area}");
    let status = json(&millpond(&node, &["status", "--output", "json"])?)?;
    ensure!(status["volumes"][0]["staged"]["conflicts"] == 1, "{status}");
    ensure!(out(&millpond(&node, &["status"])?).contains("CONFLICTS"));
    let doctor = millpond(&node, &["doctor"])?;
    ensure!(!doctor.status.success() && out(&doctor).contains("staging"), "{}", out(&doctor));
    let upload = millpond(&node, &["staging", "upload", id])?;
    ensure!(!upload.status.success() && err(&upload).contains("somebody else"), "{}", err(&upload));
    let (dir, text) = to(&node, "exported")?;
    ensure!(millpond(&node, &["staging", "export", id, "--to", &text])?.status.success());
    ensure!(fs::read(dir.join("a"))? == b"ours!");
    // Not without being sure, and not from under a program.
    let unsure = millpond(&node, &["staging", "discard", id])?;
    ensure!(!unsure.status.success() && err(&unsure).contains("--yes") && out(&unsure).contains("conflict"));
    let in_use = millpond(&node, &["staging", "discard", id, "a", "--yes"])?;
    ensure!(!in_use.status.success() && err(&in_use).contains("has it open"), "{}", err(&in_use));
    ensure!(fs::read(mounted.target.join("a"))? == b"ours!");
    drop(file);
    wait_closed(&node, id)?;
    let discard = millpond(&node, &["staging", "discard", id, "a", "--yes"])?;
    ensure!(discard.status.success() && out(&discard).starts_with("1 files, 5 B"), "{}", out(&discard));
    let theirs = || fs::read(mounted.target.join("a")).is_ok_and(|bytes| bytes == b"theirs");
    ensure!(wait_until(PATIENCE, theirs), "theirs is not seen");
    ensure!(listed(&node, id)?["files"] == 0);
    // And the file can be changed again.
    write_sync(&mounted.target.join("a"), b"after")?;
    ensure!(fs::read(node.server.file("both/a"))? == b"after");
    node.finish()
}

/// A large object that somebody else replaces before all of it is here: its bytes were in the old object alone.
#[test]
fn a_copy_of_what_is_not_whole_says_so() -> Result<()> {
    const BYTES: u64 = 192 << 20;
    let mut node = Node::start(AgentOptions::default())?;
    fs::create_dir_all(node.server.file("large"))?;
    fs::write(node.server.file("large/a"), content::bytes(content::id("large"), 0..BYTES))?;
    node.server.rescan()?;
    let mounted = back(&mut node, "large")?;
    // What lies behind is asked of the store, and does not come.
    let stalled = Rule::always(Fault::Stall { ms: None }).op("GetObject").from(64 << 20);
    node.server.set_faults(&Script { seed: 0, rules: vec![stalled] })?;
    let id = mounted.id.as_str();
    let file = File::options().write(true).open(mounted.target.join("a"))?;
    file.write_all_at(b"ours", 50 << 20)?;
    file.sync_all()?;
    fs::write(node.server.file("large/a"), "theirs")?;
    node.server.rescan()?;
    node.server.no_faults()?;
    let is_conflict = || listed(&node, id).is_ok_and(|area| area["conflicts"] == 1);
    ensure!(wait_until(PATIENCE, is_conflict), "{}", listed(&node, id)?);
    let (dir, text) = to(&node, "exported")?;
    let export = millpond(&node, &["staging", "export", id, "--to", &text])?;
    ensure!(!export.status.success() && out(&export).starts_with("1 files"), "{}", out(&export));
    ensure!(err(&export).contains("a is not whole"), "{}", err(&export));
    let copy = fs::read(dir.join("a"))?;
    ensure!(copy.len() as u64 == BYTES && &copy[50 << 20..(50 << 20) + 4] == b"ours");
    drop(file);
    wait_closed(&node, id)?;
    let discard = millpond(&node, &["staging", "discard", id, "a", "--yes"])?;
    ensure!(discard.status.success() && out(&discard).starts_with("1 files"), "{}", out(&discard));
    let is_theirs = || fs::read(mounted.target.join("a")).is_ok_and(|read| read == b"theirs");
    ensure!(wait_until(PATIENCE, is_theirs));
    node.finish()
}

/// Another process ends the mount while somebody writes: the next one has what was synced, and nothing stays open.
#[test]
fn a_workspace_that_somebody_ends_has_what_was_synced_and_is_written_on() -> Result<()> {
    const BYTES: u64 = 96 << 20;
    let mut node = Node::start(AgentOptions::default())?;
    fs::create_dir_all(node.server.file("work"))?;
    let mut expected = content::bytes(content::id("large"), 0..BYTES);
    fs::write(node.server.file("work/large"), &expected)?;
    node.server.rescan()?;
    let mounted = back(&mut node, "work")?;
    let (pod, id) = (node.pod(&mounted)?, mounted.id.as_str());
    let at = |name: &str| pod.reach().join(name);
    for (round, how) in [Ending::Abort, Ending::ForcedUnmount].into_iter().enumerate() {
        // Some of it is here, and does not get away.
        let stalled = Rule::always(Fault::Stall { ms: None }).op("GetObject").from(64 << 20);
        let refused = Rule::always(Fault::Status { code: 403, retry_after_s: None }).op("PutObject");
        node.server.set_faults(&Script { seed: 0, rules: vec![stalled, refused] })?;
        let name = format!("new-{round}");
        write_sync(&at(&name), b"synced")?;
        let (large, new) =
            (File::options().write(true).open(at("large"))?, File::options().append(true).open(at(&name))?);
        let offset = (10 + 20 * round) << 20;
        large.write_all_at(b"ours", offset as u64)?;
        large.sync_all()?;
        expected[offset..offset + 4].copy_from_slice(b"ours");
        (&new).write_all(b" and written")?;
        end(&node, &mounted, how)?;
        // A descriptor of the mount that was is of no other one.
        let ended = || large.sync_all().is_err() && new.sync_all().is_err();
        ensure!(wait_until(PATIENCE, ended), "{how:?}");
        drop((large, new));
        let is_there = || fs::read(at(&name)).is_ok_and(|read| read.starts_with(b"synced"));
        ensure!(wait_until(PATIENCE, is_there), "{how:?}: its paths do not work again");
        wait_closed(&node, id).with_context(|| format!("{how:?}"))?;
        let mut again = File::options().append(true).open(at(&name))?;
        again.write_all(b", and again")?;
        again.sync_all()?;
        drop(again);
        node.server.no_faults()?;
        let read = fs::read(at("large"))?;
        ensure!(
            read == expected,
            "{how:?}: {:?}",
            read.iter().zip(&expected).position(|(is, wanted)| is != wanted)
        );
        let is_stored = || {
            let stored = |name: &str| fs::read(node.server.file(&format!("work/{name}"))).unwrap_or_default();
            stored("large") == expected && stored(&name).ends_with(b", and again")
        };
        ensure!(wait_until(PATIENCE, is_stored), "{how:?}: {}", listed(&node, id)?);
    }
    drop(pod);
    node.unpublish(&mounted)?;
    node.finish()
}

/// A tenant names its files as it likes.
#[test]
fn names_of_a_tenant_lead_nowhere_and_say_nothing_to_the_terminal() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let mounted = back(&mut node, "names")?;
    let id = mounted.id.as_str();
    fs::create_dir(mounted.target.join("away"))?;
    refuse_writes(&node)?;
    let names = ["\u{1b}]0;owned\u{7}\u{1b}[2J", "two\nlines", "...", "--yes", "away/x", "-o", "\u{202e}gpj"];
    for name in names {
        write_sync(&mounted.target.join(name), name.as_bytes())?;
    }
    for arguments in
        [&["staging", "list", "--files"][..], &["staging", "discard", id], &["status"], &["doctor"]]
    {
        let said = millpond(&node, arguments)?;
        let text = format!("{}{}", out(&said), err(&said));
        ensure!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{arguments:?}: {text:?}");
    }
    let area = listed(&node, id)?;
    let paths: Vec<&str> =
        area["staged"].as_array().context("files")?.iter().filter_map(|file| file["path"].as_str()).collect();
    ensure!(paths.len() == names.len() && names.iter().all(|name| paths.contains(name)), "{paths:?}");
    // Somebody has left a link where one of them belongs.
    let (dir, text) = to(&node, "exported")?;
    let (outside, _) = to(&node, "outside")?;
    fs::create_dir(&dir)?;
    fs::create_dir(&outside)?;
    symlink(&outside, dir.join("away"))?;
    symlink(outside.join("new"), dir.join("-o"))?;
    let export = millpond(&node, &["staging", "export", id, "--to", &text])?;
    ensure!(!export.status.success() && out(&export).starts_with("5 files"), "{}", out(&export));
    ensure!(!err(&export).contains('\u{1b}'));
    ensure!(fs::read_dir(&outside)?.count() == 0);
    for name in ["\u{1b}]0;owned\u{7}\u{1b}[2J", "two\nlines", "...", "--yes"] {
        ensure!(fs::read(dir.join(name))? == name.as_bytes());
    }
    ensure!(fs::read_dir(&dir)?.count() == 7, "nothing unfinished is left");
    // Found by its name all the same.
    let discard = millpond(&node, &["staging", "discard", id, "--yes", "--", "--yes", "two\nlines"])?;
    ensure!(discard.status.success() && out(&discard).starts_with("2 files"), "{}", out(&discard));
    take_writes(&node)?;
    let rest = || listed(&node, id).is_ok_and(|area| area["files"] == 0);
    ensure!(wait_until(PATIENCE, rest));
    ensure!(!node.server.file("names/--yes").exists() && node.server.file("names/...").exists());
    node.finish()
}

/// Between what it forgets and the bytes that it removes.
#[test]
fn an_agent_that_dies_while_it_discards_sends_nothing_of_it() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    for is_mounted in [true, false] {
        let name = if is_mounted { "mounted" } else { "left" };
        let mounted = back(&mut node, name)?;
        let id = mounted.id.as_str();
        refuse_writes(&node)?;
        write_sync(&mounted.target.join("a"), b"hello")?;
        write_sync(&mounted.target.join("b"), b"stays")?;
        if !is_mounted {
            node.unpublish(&mounted)?;
        }
        node.kill_agent()?;
        node.options().failpoints.agent = Some("agent.staging.discarded");
        node.start_agent()?;
        let is_closed = |file: &Value| file["opens"] == 0;
        let settled = || {
            let area = listed(&node, id).unwrap_or_default();
            let mounts = usize::from(is_mounted);
            area["mounts"] == mounts
                && area["staged"].as_array().is_some_and(|all| all.len() == 2 && all.iter().all(is_closed))
        };
        ensure!(wait_until(PATIENCE, settled), "{:?}", listed(&node, id));
        let died = millpond(&node, &["staging", "discard", id, "a", "--yes"])?;
        ensure!(!died.status.success() && err(&died).contains("has ended"), "{}", err(&died));
        ensure!(wait_until(PATIENCE, || node.agent_has_ended()), "no agent has died");
        node.kill_agent()?;
        node.options().failpoints.agent = None;
        node.start_agent()?;
        let one =
            || listed(&node, id).is_ok_and(|area| area["files"] == 1 && area["staged"][0]["path"] == "b");
        ensure!(wait_until(PATIENCE, one), "{:?}", listed(&node, id));
        take_writes(&node)?;
        if !is_mounted {
            node.workspace_again(&mounted, "again")?;
        }
        let sent = || listed(&node, id).is_ok_and(|area| area["files"] == 0);
        ensure!(wait_until(PATIENCE, sent), "{:?}", listed(&node, id));
        ensure!(fs::read(node.server.file(&format!("{name}/b")))? == b"stays");
        ensure!(!node.server.file(&format!("{name}/a")).exists());
    }
    node.finish()
}
