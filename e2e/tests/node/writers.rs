//! Programs write while workers, agent and broker die: no call fails, nothing is lost, nothing happens twice.

use crate::promises::errno;
use crate::seed;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Node, Volume};
use e2e::pod::Running;
use e2e::scenario::torture::writers::{self, LARGE, WriteMode, WritersPlan};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn writes(plan: &WritersPlan) -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let report = writers::run(&mut node, plan)?;
    println!("{report}");
    node.finish()
}

#[test]
fn programs_that_write_through_notice_no_death_and_the_store_has_what_they_wrote() -> Result<()> {
    writes(&WritersPlan::short(WriteMode::Through, seed()))
}

#[test]
fn programs_that_write_back_notice_no_death_and_the_store_has_what_they_wrote() -> Result<()> {
    writes(&WritersPlan::short(WriteMode::Back, seed()))
}

#[test]
fn programs_write_beside_each_other_while_nothing_dies() -> Result<()> {
    for mode in [WriteMode::Through, WriteMode::Back] {
        let time = Duration::from_secs(8);
        writes(&WritersPlan { classes: Vec::new(), time, ..WritersPlan::short(mode, seed()) })?;
    }
    Ok(())
}

#[test]
fn a_store_that_fails_at_times_has_each_object_once_and_right() -> Result<()> {
    for mode in [WriteMode::Through, WriteMode::Back] {
        let (seed, time) = (seed(), Duration::from_secs(12));
        let faults = Some(WritersPlan::store_faults(seed));
        writes(&WritersPlan { classes: Vec::new(), time, faults, ..WritersPlan::short(mode, seed) })?;
    }
    Ok(())
}

#[test]
fn deaths_beside_a_store_that_fails_at_times_are_not_noticed_either() -> Result<()> {
    for mode in [WriteMode::Through, WriteMode::Back] {
        let (seed, time) = (seed(), Duration::from_secs(12));
        writes(&WritersPlan {
            time,
            faults: Some(WritersPlan::store_faults(seed)),
            ..WritersPlan::short(mode, seed)
        })?;
    }
    Ok(())
}

#[test]
fn what_somebody_else_has_written_stays_and_what_was_written_here_can_be_read() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let mounted = node.workspace("conflict", "conflict", &[])?;
    let path = mounted.target.join("a");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
    file.write_all_at(b"first", 0)?;
    file.sync_all()?;
    file.write_all_at(b"ours!", 0)?;
    fs::write(node.server.file("conflict/a"), b"theirs")?;
    node.server.rescan()?;
    ensure!(errno(file.sync_all()) == Some(libc::ESTALE));
    ensure!(fs::read(node.server.file("conflict/a"))? == b"theirs");
    ensure!(fs::read(&path)? == b"ours!");
    drop(file);
    ensure!(fs::read(&path)? == b"ours!" && fs::read(node.server.file("conflict/a"))? == b"theirs");
    // As docs/semantics.md has it: removed here, theirs is seen.
    fs::remove_file(&path)?;
    ensure!(fs::read(node.server.file("conflict/a"))? == b"theirs" && fs::read(&path)? == b"theirs");
    node.finish()
}

/// More than the staging area keeps of files that the store has, with programs that change them just then.
#[test]
fn staged_files_go_when_the_store_has_them_also_beside_programs_that_use_them() -> Result<()> {
    const FILES: usize = 6000;
    let mut node = Node::start(AgentOptions::default())?;
    let mounted = node.workspace("many", "many", &[("writeMode", "back")])?;
    let path = |number: usize| mounted.target.join(format!("f{number}"));
    for number in 0..FILES {
        fs::write(path(number), number.to_string())?;
    }
    let staged = node.places().state("agent").join("staging").join(&mounted.id).join("files");
    let is_smaller = || fs::read_dir(&staged).is_ok_and(|files| files.count() < FILES - 500);
    let (done, mut changes) = (AtomicBool::new(false), vec![0; FILES]);
    std::thread::scope(|threads| {
        let changing = threads.spawn(|| -> Result<()> {
            let mut first = 0;
            while !done.load(Ordering::Acquire) {
                for number in (first..FILES).step_by(7) {
                    // By its name alone: it is not open.
                    fs::set_permissions(path(number), fs::Permissions::from_mode(0o600 | first as u32))?;
                    OpenOptions::new().append(true).open(path(number))?.write_all(b".")?;
                    changes[number] += 1;
                }
                first = (first + 1) % 7;
            }
            Ok(())
        });
        let gone = wait_until(2 * PATIENCE, is_smaller);
        done.store(true, Ordering::Release);
        changing.join().map_err(|_| anyhow::anyhow!("a writer has panicked"))??;
        ensure!(gone, "all files are kept");
        Ok(())
    })?;
    for (number, changes) in changes.iter().enumerate() {
        let found = fs::read_to_string(path(number))?;
        ensure!(found == format!("{number}{}", ".".repeat(*changes)), "file {number}: {found}");
    }
    node.finish()
}

/// What waits for the one source never goes to the other.
#[test]
fn a_volume_made_anew_does_not_get_what_was_written_to_the_one_before() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let first = node.create("first", "first", &[("access", "readWrite")])?;
    let other = node.create("other", "other", &[("access", "readWrite")])?;
    let anew = Volume { id: first.id.clone(), context: other.context.clone() };
    let mounted = node.publish_writable(&first, "pod")?;
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(mounted.target.join("a"))?;
    file.write_all_at(b"first", 0)?;
    file.sync_all()?;
    // Never uploaded: theirs is there.
    fs::write(node.server.file("first/a"), b"theirs")?;
    node.server.rescan()?;
    file.write_all_at(b"ours!", 0)?;
    ensure!(errno(file.sync_all()) == Some(libc::ESTALE));
    drop(file);
    node.unpublish(&mounted)?;
    let refused = node.publish_writable(&anew, "anew").err().context("it was published")?;
    ensure!(
        refused.message().contains("first") && refused.message().contains("not in the store yet"),
        "{refused}"
    );
    // The same of an agent that finds it on its disk.
    node.kill_agent()?;
    node.start_agent()?;
    let refused = node.publish_writable(&anew, "anew").err().context("it was published")?;
    ensure!(refused.message().contains("not in the store yet"), "{refused}");
    // Given up: the volume goes on with the other source.
    let mounted = node.publish_writable(&first, "pod")?;
    fs::remove_file(mounted.target.join("a"))?;
    node.unpublish(&mounted)?;
    node.kill_agent()?;
    node.start_agent()?;
    let mounted = node.publish_writable(&anew, "anew")?;
    fs::write(mounted.target.join("b"), b"other")?;
    ensure!(fs::read(node.server.file("other/b"))? == b"other" && !node.server.file("first/b").exists());
    ensure!(fs::read_dir(&mounted.target)?.count() == 1);
    node.finish()
}

/// Steps of an agent at which it dies in the middle of an operation.
const STEPS: &[&str] = &[
    "agent.staging.commit",
    "agent.staging.committed",
    "agent.staging.write",
    "agent.staging.put",
    "agent.staging.put-done",
    "agent.staging.copy",
    "agent.staging.copied",
    "agent.staging.complete",
    "agent.staging.completed",
    "agent.staging.delete",
    "agent.staging.deleted",
    "agent.staging.mkdir",
    "agent.staging.made",
    "agent.staging.move",
    "agent.staging.move-copied",
    "agent.staging.moved",
    "agent.staging.move-end",
    "agent.staging.rmdir",
    "agent.staging.removed",
    "agent.staging.sent",
    "agent.staging.upload-begun",
    "agent.staging.upload-noted",
];
const PATIENCE: Duration = Duration::from_secs(60);

fn agents_die_at_each_step(mode: &str) -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    for step in STEPS {
        let name = step.replace('.', "-");
        fs::create_dir_all(node.server.file(&name))?;
        fs::write(node.server.file(&format!("{name}/old")), b"old")?;
        node.server.rescan()?;
        let mounted = node.workspace(&name, &name, &[("writeMode", mode)])?;
        node.kill_agent()?;
        node.options().failpoints.agent = Some(step);
        node.start_agent()?;
        node.wait_served(PATIENCE)?;
        let top = mounted.target.clone();
        let mut command = Command::new(node.places().bin("oracle"));
        command.arg("writes").arg("--root").arg(&top);
        let running = Running::<Vec<String>>::start(command)?;
        ensure!(wait_until(PATIENCE, || node.agent_has_ended()), "{step}: no agent has died");
        node.kill_agent()?;
        node.options().failpoints.agent = None;
        node.start_agent()?;
        let failed = running.finish(PATIENCE).context(*step)?;
        ensure!(failed.is_empty(), "{step}: {failed:?}");
        let files = [
            ("d/a", b"instead".to_vec()),
            ("d/new", b"old".to_vec()),
            ("f", b"e".to_vec()),
            ("large", vec![7; LARGE]),
            ("m/x", b"x".to_vec()),
        ];
        let is_there = |path: &Path| -> Result<(), String> {
            for (name, bytes) in &files {
                let found = fs::read(path.join(name)).map_err(|e| format!("{name}: {e}"))?;
                (found == *bytes)
                    .then_some(())
                    .ok_or_else(|| format!("{name} has {} other bytes", found.len()))?;
            }
            for (dir, expected) in
                [("", vec!["d", "f", "large", "m"]), ("d", vec!["a", "new"]), ("m", vec!["x"])]
            {
                let names = fs::read_dir(path.join(dir)).map_err(|e| e.to_string())?;
                let mut names: Vec<_> = names
                    .map(|entry| entry.map(|e| e.file_name().to_string_lossy().into_owned()))
                    .collect::<Result<_, _>>()
                    .map_err(|e| e.to_string())?;
                names.sort();
                (names == expected).then_some(()).ok_or_else(|| format!("{dir:?} has {names:?}"))?;
            }
            Ok(())
        };
        ensure!(is_there(&mounted.target) == Ok(()), "{step}: the mount: {:?}", is_there(&mounted.target));
        let store = node.server.file(&name);
        let same = wait_until(PATIENCE, || is_there(&store) == Ok(()));
        ensure!(same, "{step}: the store: {:?}", is_there(&store));
        ensure!(
            is_there(&mounted.target) == Ok(()),
            "{step}: the mount, later: {:?}",
            is_there(&mounted.target)
        );
        node.unpublish(&mounted)?;
    }
    node.finish()
}

#[test]
fn an_agent_that_dies_at_any_step_of_writing_through_is_not_noticed() -> Result<()> {
    agents_die_at_each_step("through")
}

#[test]
fn an_agent_that_dies_at_any_step_of_writing_back_is_not_noticed() -> Result<()> {
    agents_die_at_each_step("back")
}
