//! Volumes that can be written to, seen by a program on a whole node.

use crate::promises::{errno, names};
use crate::seed;
use anyhow::{Context, Result, anyhow, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Mounted, Node};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};
use testkit::content;
use testkit::faults::{Fault, Rule, Script};

const PATIENCE: Duration = Duration::from_secs(60);
const NOBODY: u32 = 65534;

fn started() -> Result<Node> {
    Node::start(AgentOptions::default())
}

/// Where what the store has stays staged: of the disk of this machine less than an eighth may be free.
fn started_with_room() -> Result<Node> {
    Node::on_staging_disk_of(2048)
}

fn set(of: &[&str]) -> BTreeSet<OsString> {
    of.iter().map(OsString::from).collect()
}

/// What a mount of a pod of another node would read: the bytes in the store.
fn in_store(node: &Node, key: &str) -> Option<Vec<u8>> {
    fs::read(node.server.file(key)).ok()
}

fn write_sync(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(())
}

fn workspace(node: &mut Node, name: &str, more: &[(&str, &str)]) -> Result<Mounted> {
    node.workspace(name, name, more)
}

#[test]
fn what_is_written_is_there_for_every_pod_and_in_the_store_after_fsync() -> Result<()> {
    let mut node = started()?;
    let one = workspace(&mut node, "work", &[])?;
    let two = node.workspace_again(&one, "two")?;
    let path = one.target.join("a");
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o640).open(&path)?;
    file.write_all(b"hello ")?;
    ensure!(fs::read(two.target.join("a"))? == b"hello ", "another pod sees each write at once");
    file.write_all(b"world")?;
    ensure!(fs::read(two.target.join("a"))? == b"hello world");
    file.sync_all()?;
    ensure!(in_store(&node, "work/a").as_deref() == Some(&b"hello world"[..]));
    let about = fs::metadata(two.target.join("a"))?;
    ensure!(about.len() == 11 && about.permissions().mode() & 0o7777 == 0o640);
    file.write_all_at(b"J", 6)?;
    file.seek(SeekFrom::Start(0))?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    ensure!(text == "hello Jorld");
    drop(file);
    ensure!(
        in_store(&node, "work/a").as_deref() == Some(&b"hello Jorld"[..]),
        "close has waited for the store"
    );
    ensure!(fs::read(&path)? == b"hello Jorld");
    node.finish()
}

/// The kernel of the only pod that has a volume believes for a moment what it was told.
#[test]
fn what_a_second_pod_changes_as_soon_as_it_is_there_is_seen_by_the_first() -> Result<()> {
    let mut node = started()?;
    let one = workspace(&mut node, "first", &[("writeMode", "back")])?;
    let (there, absent) = (one.target.join("there"), one.target.join("absent"));
    for round in 0..4 {
        write_sync(&there, b"1")?;
        let done = AtomicBool::new(false);
        let two = std::thread::scope(|scope| {
            // So that what is believed is as new as can be.
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    let _ = (fs::metadata(&there), fs::metadata(&absent), fs::read(&there));
                }
            });
            let two = node.workspace_again(&one, &format!("second-{round}"));
            let changed = two.and_then(|two| {
                fs::write(two.target.join("there"), b"other")?;
                fs::rename(two.target.join("there"), two.target.join("absent"))?;
                Ok(two)
            });
            let seen = (fs::metadata(&there).map_err(|e| e.kind()).err(), fs::read(&absent).ok());
            done.store(true, Relaxed);
            ensure!(
                seen == (Some(ErrorKind::NotFound), Some(b"other".to_vec())),
                "round {round}: the first pod sees {seen:?}"
            );
            changed
        })?;
        let size = fs::metadata(&absent)?.len();
        fs::write(two.target.join("absent"), b"longer than before")?;
        let now = fs::metadata(&absent)?.len();
        ensure!((size, now) == (5, 18), "round {round}: {size}, then {now} bytes");
        fs::remove_file(two.target.join("absent"))?;
        ensure!(!absent.exists(), "round {round}");
        node.unpublish(&two)?;
    }
    node.finish()
}

/// Who comes second opens what the first has made, on the way that files take that are there; and who opens what is just being
/// removed opens it, or makes a new one.
#[test]
fn pods_that_make_open_and_remove_one_name_at_once_are_told_no_error() -> Result<()> {
    const ROUNDS: usize = 300;
    let mut node = started()?;
    let one = workspace(&mut node, "race", &[("writeMode", "back")])?;
    let two = node.workspace_again(&one, "race-two")?;
    let barrier = std::sync::Barrier::new(4);
    let open_and_write = |path: &Path, number: usize| -> Result<()> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(number != 2);
        let file = options.open(path).context("open")?;
        let mine = number as u8 + 1;
        file.write_all_at(&[mine; 10], number as u64 * 10).context("write")?;
        let mut bytes = [0; 10];
        let read = file.read_at(&mut bytes, number as u64 * 10).context("read")?;
        // Another one may have cut it off since.
        ensure!(bytes[..read].iter().all(|byte| *byte == mine || *byte == 0), "{bytes:?}");
        Ok(())
    };
    let remove = |path: &Path| match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true).context("unlink"),
    };
    let removed = AtomicU32::new(0);
    let works = |target: &Path, number: usize| {
        let path = target.join("a");
        let mut failed = Vec::new();
        for round in 0..ROUNDS {
            barrier.wait();
            let work = || match number {
                3 => remove(&path).map(|is_removed| _ = removed.fetch_add(u32::from(is_removed), Relaxed)),
                _ => open_and_write(&path, number),
            };
            // Whatever comes of it, the others wait for this one at the next barrier.
            let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(anyhow!("it panicked")));
            failed.extend(done.err().map(|error| format!("{number} in round {round}: {error:?}")));
        }
        failed
    };
    let failed = std::thread::scope(|scope| {
        let pods = [&one, &two, &one, &two].into_iter().enumerate();
        let works = &works;
        let tasks: Vec<_> =
            pods.map(|(number, pod)| scope.spawn(move || works(&pod.target, number))).collect();
        tasks.into_iter().flat_map(|task| task.join().expect("no panic")).collect::<Vec<_>>()
    });
    ensure!(failed.is_empty(), "{} failed: {failed:#?}", failed.len());
    // What one round makes after the removal is there in the next.
    let removed = removed.into_inner();
    ensure!(removed > 0, "it was never there to be removed");
    println!("{removed} of {ROUNDS} were there to be removed");
    node.finish()
}

#[test]
fn names_are_made_moved_and_removed_as_in_a_directory() -> Result<()> {
    let mut node = started()?;
    let mounted = workspace(&mut node, "names", &[])?;
    let other = node.workspace_again(&mounted, "two")?;
    let top = &mounted.target;
    fs::create_dir(top.join("d"))?;
    ensure!(errno(fs::create_dir(top.join("d"))) == Some(libc::EEXIST));
    write_sync(&top.join("d/one"), b"1")?;
    write_sync(&top.join("d/two"), b"22")?;
    ensure!(names(&other.target.join("d"))? == set(&["one", "two"]));
    ensure!(errno(fs::remove_dir(top.join("d"))) == Some(libc::ENOTEMPTY));
    ensure!(errno(fs::remove_file(top.join("d"))) == Some(libc::EISDIR));
    ensure!(errno(fs::remove_dir(top.join("d/one"))) == Some(libc::ENOTDIR));
    // An editor's save.
    let before = fs::metadata(top.join("d/two"))?.ino();
    fs::rename(top.join("d/two"), top.join("d/one"))?;
    ensure!(fs::read(other.target.join("d/one"))? == b"22");
    ensure!(
        fs::metadata(other.target.join("d/one"))?.ino() == before,
        "a renamed file keeps its inode number"
    );
    ensure!(names(&top.join("d"))? == set(&["one"]));
    ensure!(
        in_store(&node, "names/d/one").as_deref() == Some(&b"22"[..])
            && in_store(&node, "names/d/two").is_none()
    );
    ensure!(errno(File::open(top.join("d/two"))) == Some(libc::ENOENT));
    // Unlinked while open.
    let mut open = OpenOptions::new().read(true).write(true).open(top.join("d/one"))?;
    fs::remove_file(other.target.join("d/one"))?;
    ensure!(names(&top.join("d"))?.is_empty());
    open.write_all(b"333")?;
    let mut text = Vec::new();
    open.seek(SeekFrom::Start(0))?;
    open.read_to_end(&mut text)?;
    ensure!(text == b"333" && open.metadata()?.nlink() == 0);
    drop(open);
    fs::remove_dir(top.join("d"))?;
    ensure!(names(top)?.is_empty() && names(&other.target)?.is_empty());
    ensure!(in_store(&node, "names/d/one").is_none());
    node.finish()
}

/// As trainers publish a checkpoint: a directory is written beside, and renamed.
#[test]
fn a_directory_with_all_below_it_gets_another_name_at_once() -> Result<()> {
    for mode in ["through", "back"] {
        let mut node = started()?;
        let name = format!("moves-{mode}");
        fs::create_dir_all(node.server.file(&format!("{name}/tmp/cold/deep")))?;
        fs::write(node.server.file(&format!("{name}/tmp/cold/deep/shard")), vec![5; 3 << 20])?;
        fs::create_dir_all(node.server.file(&format!("{name}/full")))?;
        fs::write(node.server.file(&format!("{name}/full/f")), b"f")?;
        node.server.rescan()?;
        let mounted = workspace(&mut node, &name, &[("writeMode", mode)])?;
        let other = node.workspace_again(&mounted, "two")?;
        let top = &mounted.target;
        let (before, after) = (top.join("tmp"), top.join("checkpoint-500"));
        write_sync(&before.join("weights"), &[7; 100_000])?;
        fs::create_dir(before.join("state"))?;
        fs::write(before.join("state/rng"), b"rng")?;
        fs::write(before.join("gone"), b"gone")?;
        fs::remove_file(before.join("gone"))?;
        let open = OpenOptions::new().read(true).write(true).open(before.join("state/rng"))?;
        let (number, dir) = (fs::metadata(before.join("weights"))?.ino(), fs::metadata(&before)?.ino());
        ensure!(errno(fs::rename(&before, top.join("full"))) == Some(libc::ENOTEMPTY));
        ensure!(errno(fs::rename(&before, top.join("full/f"))) == Some(libc::ENOTDIR));
        ensure!(errno(fs::rename(&before, before.join("cold/sub"))) == Some(libc::EINVAL));
        fs::create_dir(&after)?; // an empty one gives way
        fs::rename(&before, &after)?;
        for target in [top, &other.target] {
            ensure!(names(target)? == set(&["checkpoint-500", "full"]), "{mode}: {:?}", names(target)?);
            let now = target.join("checkpoint-500");
            ensure!(names(&now)? == set(&["cold", "state", "weights"]), "{mode}: {:?}", names(&now)?);
            ensure!(fs::read(now.join("weights"))? == [7; 100_000]);
            ensure!(fs::read(now.join("state/rng"))? == b"rng");
            ensure!(fs::read(now.join("cold/deep/shard"))? == vec![5; 3 << 20]);
            ensure!((fs::metadata(now.join("weights"))?.ino(), fs::metadata(&now)?.ino()) == (number, dir));
            ensure!(errno(fs::metadata(target.join("tmp/weights"))) == Some(libc::ENOENT));
        }
        open.write_all_at(b"RNG", 0)?;
        open.sync_all()?;
        let stored = |path: &str| in_store(&node, &format!("{name}/{path}"));
        let is_there = || {
            stored("checkpoint-500/weights").as_deref() == Some(&[7; 100_000][..])
                && stored("checkpoint-500/state/rng").as_deref() == Some(b"RNG")
                && stored("checkpoint-500/cold/deep/shard") == Some(vec![5; 3 << 20])
                && ["tmp/weights", "tmp/state/rng", "tmp/cold/deep/shard"]
                    .iter()
                    .all(|path| stored(path).is_none())
        };
        ensure!(mode == "back" || is_there(), "the rename has waited for the store");
        ensure!(wait_until(PATIENCE, is_there), "{mode}: the store has it under its new name");
        // The old name is free, and its directory is not there any more for others.
        fs::create_dir(&before)?;
        ensure!(names(&before)?.is_empty());
        fs::rename(&after, before.join("again"))?;
        ensure!(fs::read(before.join("again/cold/deep/shard"))? == vec![5; 3 << 20]);
        node.finish()?;
    }
    Ok(())
}

/// `mv` makes copies then, and says how far it is.
#[test]
fn a_directory_of_more_than_a_journals_frame_is_left_to_who_copies_it() -> Result<()> {
    let mut node = started_with_room()?;
    let mounted = workspace(&mut node, "many", &[("writeMode", "back")])?;
    let dir = mounted.target.join("d");
    fs::create_dir(&dir)?;
    for number in 0..1000 {
        fs::write(dir.join(format!("f{number}")), b"1")?;
    }
    ensure!(errno(fs::rename(&dir, mounted.target.join("e"))) == Some(libc::EXDEV));
    ensure!(names(&mounted.target)? == set(&["d"]) && names(&dir)?.len() == 1000);
    fs::remove_file(dir.join("f0"))?;
    fs::rename(&dir, mounted.target.join("e"))?;
    ensure!(names(&mounted.target)? == set(&["e"]) && names(&mounted.target.join("e"))?.len() == 999);
    node.finish()
}

/// A listing of several answers, between which files get to the store.
#[test]
fn each_name_is_listed_once_while_the_files_get_to_the_store() -> Result<()> {
    const FILES: usize = 1500;
    let mut node = started_with_room()?;
    let mounted = workspace(&mut node, "listed", &[("writeMode", "back")])?;
    let dir = mounted.target.join("d");
    fs::create_dir(&dir)?;
    for number in 0..FILES {
        fs::write(dir.join(format!("f{number}")), b"1")?;
    }
    let stored = || fs::read_dir(node.server.file("listed/d")).map_or(0, Iterator::count);
    let mut listings = 0;
    let all_stored = wait_until(PATIENCE, || {
        let listed = fs::read_dir(&dir).and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<std::io::Result<Vec<_>>>()
        });
        let listed = listed.expect("a directory is listed");
        let different: std::collections::BTreeSet<_> = listed.iter().collect();
        assert_eq!((listed.len(), different.len()), (FILES, FILES), "with {} in the store", stored());
        listings += 1;
        stored() == FILES
    });
    ensure!(all_stored, "{} of {FILES} got to the store", stored());
    println!("{listings} listings meanwhile");
    node.finish()
}

#[test]
fn lengths_and_holes_and_appends() -> Result<()> {
    let mut node = started()?;
    let mounted = workspace(&mut node, "lengths", &[])?;
    let two = node.workspace_again(&mounted, "two")?;
    let path = mounted.target.join("f");
    write_sync(&path, &[7; 10_000])?;
    let file = OpenOptions::new().write(true).open(&path)?;
    file.set_len(5_000)?;
    file.set_len(20_000)?;
    file.write_all_at(b"end", 30_000)?;
    drop(file);
    let bytes = fs::read(&path)?;
    let mut expected = vec![7; 5_000];
    expected.resize(30_000, 0);
    expected.extend(b"end");
    ensure!(bytes == expected && in_store(&node, "lengths/f") == Some(expected.clone()));
    for (at, target) in [&mounted.target, &two.target].into_iter().cycle().take(20).enumerate() {
        let mut file = OpenOptions::new().append(true).open(target.join("f"))?;
        file.write_all(&[at as u8; 100])?;
        expected.extend([at as u8; 100]);
    }
    ensure!(fs::read(&path)? == expected);
    fs::write(&path, b"short")?;
    ensure!(fs::read(two.target.join("f"))? == b"short");
    node.finish()
}

/// What is opened to be written alone goes past the page cache of its mount, where others may have pages of it.
#[test]
fn what_goes_past_the_page_cache_is_seen_by_who_has_the_file_mapped() -> Result<()> {
    const BYTES: usize = 3 << 20;
    let mut node = started()?;
    let one = workspace(&mut node, "mapped", &[("writeMode", "back")])?;
    let two = node.workspace_again(&one, "two")?;
    let path = one.target.join("a");
    let mut expected = vec![b'a'; BYTES];
    write_sync(&path, &expected)?;
    // Of the mount that is written to, and of another pod's.
    let readers = [File::open(&path)?, File::open(two.target.join("a"))?];
    // SAFETY: a byte of it may change while it is looked at, and is compared with volatile reads.
    let mapped = unsafe { memmap2::Mmap::map(&readers[0])? };
    let seen = |at: usize| {
        // SAFETY: in bounds, as all of `at` below.
        unsafe { std::ptr::read_volatile(mapped.as_ptr().add(at)) }
    };
    let writer = OpenOptions::new().write(true).open(&path)?;
    // Not by pages, across several requests, and by one byte.
    for (number, (from, len)) in
        [(0, 1), (4095, 2), (1 << 20, 1_100_003), (BYTES - 1, 1)].into_iter().enumerate()
    {
        ensure!(seen(from) == b'a' && seen(from + len - 1) == b'a');
        let bytes = vec![b'0' + number as u8; len];
        writer.write_all_at(&bytes, from as u64)?;
        expected[from..from + len].copy_from_slice(&bytes);
        ensure!(
            seen(from) == bytes[0] && seen(from + len - 1) == bytes[0],
            "write {number} is not in the mapping"
        );
        for (reader, whose) in readers.iter().zip(["this pod", "another pod"]) {
            let mut all = vec![0; BYTES];
            reader.read_exact_at(&mut all, 0)?;
            ensure!(all == expected, "write {number}: {whose} reads something else");
        }
    }
    // A program that has it for both, beside.
    let both = OpenOptions::new().read(true).write(true).open(&path)?;
    both.write_all_at(b"both", 8192)?;
    writer.write_all_at(b"ed", 8194)?;
    let mut found = [0; 4];
    both.read_exact_at(&mut found, 8192)?;
    ensure!(&found == b"boed" && seen(8195) == b'd');
    drop((mapped, readers, writer, both));
    node.finish()
}

#[test]
fn who_may_not_give_rights_takes_them_away_by_writing() -> Result<()> {
    let mut node = started()?;
    let mounted = workspace(&mut node, "rights", &[("writeMode", "back")])?;
    // With a right to execute set-group-ID is one; without it is a mark of another kind.
    for (mode, left) in [(0o6777, 0o777), (0o4666, 0o666), (0o2666, 0o2666), (0o1777, 0o1777)] {
        for how in [">>", "1<>"] {
            let path = mounted.target.join("f");
            write_sync(&path, b"bytes")?;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
            ensure!(fs::metadata(&path)?.permissions().mode() & 0o7777 == mode);
            let script = format!("printf x {how} \"$0\"");
            let wrote =
                Command::new("sh").args(["-c", &script]).arg(&path).uid(NOBODY).gid(NOBODY).status()?;
            let is = fs::metadata(&path)?.permissions().mode() & 0o7777;
            ensure!(wrote.success() && is == left, "{how} of {mode:o} leaves {is:o}");
            fs::remove_file(&path)?;
        }
    }
    node.finish()
}

#[test]
fn what_a_store_has_is_changed_in_place() -> Result<()> {
    let mut node = started()?;
    fs::create_dir_all(node.server.file("old/dir"))?;
    fs::write(node.server.file("old/dir/large"), vec![5; 3 << 20])?;
    node.server.rescan()?;
    let mounted = workspace(&mut node, "old", &[])?;
    let path = mounted.target.join("dir/large");
    let file = OpenOptions::new().read(true).write(true).open(&path)?;
    file.write_all_at(b"xyz", 1 << 20)?;
    file.sync_all()?;
    let mut expected = vec![5; 3 << 20];
    expected[1 << 20..(1 << 20) + 3].copy_from_slice(b"xyz");
    ensure!(in_store(&node, "old/dir/large") == Some(expected.clone()));
    drop(file);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    ensure!(fs::metadata(&path)?.permissions().mode() & 0o777 == 0o600);
    fs::remove_file(&path)?;
    ensure!(names(&mounted.target)? == set(&["dir"]), "a directory stays when its last file goes");
    node.finish()
}

#[test]
fn a_large_object_is_changed_before_all_of_it_is_here() -> Result<()> {
    const BYTES: u64 = 192 << 20;
    let mut node = started()?;
    let mut expected = content::bytes(content::id("large"), 0..BYTES);
    fs::create_dir_all(node.server.file("old"))?;
    fs::write(node.server.file("old/large"), &expected)?;
    node.server.rescan()?;
    let mounted = workspace(&mut node, "old", &[("writeMode", "back")])?;
    let path = mounted.target.join("large");
    let mut expect = |offset: u64, bytes: &[u8]| {
        let end = offset as usize + bytes.len();
        expected.resize(expected.len().max(end), 0);
        expected[offset as usize..end].copy_from_slice(bytes);
    };
    // Nobody has it open while an agent is started: the close of what a new process inherits waits for an agent.
    let change = |path: &Path, offset: u64, bytes: &[u8]| -> Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        file.write_all_at(bytes, offset)?;
        Ok(file.sync_all()?)
    };
    // What lies behind does not come.
    let stalled = |from: u64| Rule::always(Fault::Stall { ms: None }).op("GetObject").from(from);
    node.server.set_faults(&Script { seed: 0, rules: vec![stalled(64 << 20)] })?;
    // Over two blocks, and behind the end.
    change(&path, (20 << 20) - 3, b"changed")?;
    expect((20 << 20) - 3, b"changed");
    change(&path, BYTES, b"grown")?;
    expect(BYTES, b"grown");
    // The next agent goes on, and dies as a block has come. The one after it brings nothing over what was written.
    node.kill_agent()?;
    node.server.set_faults(&Script { seed: 0, rules: vec![stalled(128 << 20)] })?;
    node.options().failpoints.agent = Some("agent.staging.brought");
    node.start_agent()?;
    let of = format!("of={}", path.display());
    let mut writing = Command::new("dd")
        .args([of.as_str(), "bs=1", "seek=104857600", "conv=notrunc,fsync", "status=none"])
        .stdin(Stdio::piped())
        .spawn()?;
    writing.stdin.take().context("a pipe")?.write_all(b"after a death")?;
    ensure!(wait_until(PATIENCE, || node.agent_has_ended()), "no agent has died");
    node.kill_agent()?;
    node.options().failpoints.agent = None;
    node.start_agent()?;
    ensure!(writing.wait()?.success());
    expect(100 << 20, b"after a death");
    let renamed = mounted.target.join("renamed");
    fs::rename(&path, &renamed)?;
    node.kill_agent()?;
    node.start_agent()?;
    change(&renamed, (20 << 20) - 1, b"again")?;
    expect((20 << 20) - 1, b"again");
    ensure!(in_store(&node, "old/renamed").is_none(), "not all of it is here");
    node.server.no_faults()?;
    change(&renamed, 150 << 20, b"at last")?;
    expect(150 << 20, b"at last");
    let read = fs::read(&renamed)?;
    ensure!(read == expected, "{:?}", read.iter().zip(&expected).position(|(is, wanted)| is != wanted));
    let is_stored = || in_store(&node, "old/renamed").as_ref() == Some(&expected);
    ensure!(wait_until(PATIENCE, is_stored), "it does not get to the store");
    ensure!(wait_until(PATIENCE, || in_store(&node, "old/large").is_none()));
    node.finish()
}

/// None of the bytes of an answer that is not what it says gets into a file.
#[test]
fn blocks_of_a_large_object_come_whole_or_not() -> Result<()> {
    const BYTES: u64 = 96 << 20;
    let mut node = started()?;
    let mut expected = content::bytes(content::id("large"), 0..BYTES);
    fs::create_dir_all(node.server.file("old"))?;
    fs::write(node.server.file("old/large"), &expected)?;
    node.server.rescan()?;
    let mounted = workspace(&mut node, "old", &[("writeMode", "back"), ("storeTimeout", "3s")])?;
    let mut rules = vec![Rule::always(Fault::WrongLength).op("GetObject").from(64 << 20)];
    rules.extend(
        [Fault::Truncate, Fault::ResetBody, Fault::WrongLength, Fault::StallBody { ms: Some(50) }]
            .map(|fault| Rule::with_probability(fault, 0.15).op("GetObject")),
    );
    node.server.set_faults(&Script { seed: seed(), rules })?;
    let path = mounted.target.join("large");
    let file = OpenOptions::new().write(true).open(&path)?;
    // Each comes when it is asked for again.
    for offset in [3, (20 << 20) - 2, 50 << 20] {
        file.write_all_at(b"changed", offset)?;
        expected[offset as usize..][..7].copy_from_slice(b"changed");
    }
    file.sync_all()?;
    // The object is shorter than the store has said.
    let refused = file.write_at(b"changed", 80 << 20).err().and_then(|e| e.raw_os_error());
    ensure!(refused == Some(libc::EIO), "{refused:?}");
    node.server.no_faults()?;
    file.write_all_at(b"at last", 80 << 20)?;
    expected[80 << 20..][..7].copy_from_slice(b"at last");
    drop(file);
    let read = fs::read(&path)?;
    ensure!(read == expected, "{:?}", read.iter().zip(&expected).position(|(is, wanted)| is != wanted));
    ensure!(wait_until(PATIENCE, || in_store(&node, "old/large").as_ref() == Some(&expected)));
    node.finish()
}

#[test]
fn larger_files_go_in_parts_while_they_are_written() -> Result<()> {
    let mut node = started()?;
    let mounted = workspace(&mut node, "large", &[])?;
    let path = mounted.target.join("checkpoint");
    let mut file = File::create(&path)?;
    let block: Vec<u8> = (0..1 << 20).map(|at| (at / 13) as u8).collect();
    for number in 0..60u8 {
        let mut block = block.clone();
        block[0] = number;
        file.write_all(&block)?;
    }
    file.write_all_at(b"again", 9 << 20)?;
    file.sync_all()?;
    let stored = in_store(&node, "large/checkpoint").expect("it is in the store");
    ensure!(stored.len() == 60 << 20 && &stored[9 << 20..(9 << 20) + 5] == b"again");
    ensure!((0..60).all(|number| number == 9 || stored[number << 20] == number as u8));
    ensure!(fs::read(&path)? == stored);
    node.finish()
}

#[test]
fn written_back_files_follow_and_survive_their_agent() -> Result<()> {
    let mut node = started()?;
    let mounted = workspace(&mut node, "back", &[("writeMode", "back")])?;
    let top = &mounted.target;
    for number in 0..50 {
        write_sync(&top.join(format!("f{number}")), format!("content {number}").as_bytes())?;
    }
    node.kill_agent()?;
    node.start_agent()?;
    for number in 0..50 {
        ensure!(fs::read(top.join(format!("f{number}")))? == format!("content {number}").as_bytes());
    }
    let all = || {
        (0..50).all(|n| in_store(&node, &format!("back/f{n}")) == Some(format!("content {n}").into_bytes()))
    };
    ensure!(wait_until(PATIENCE, all), "not all are in the store");
    node.finish()
}

/// As git makes its objects. The agent is not root, and must not need to be: what it makes in a directory may forbid writing.
#[test]
fn files_that_nobody_may_write_to_reach_a_directory() -> Result<()> {
    let mut node = started()?;
    let dir = node.places().buckets().join("plain-workspace");
    fs::create_dir(&dir)?;
    let agent = node.options().uid;
    std::os::unix::fs::chown(&dir, Some(agent), Some(agent))?;
    let mounted = node.directory_workspace("plain", &dir, &[])?;
    for (name, mode) in [("object", 0o444), ("none", 0), ("written", 0o200)] {
        let path = mounted.target.join(name);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path)?;
        file.write_all(b"content")?;
        file.sync_all()?;
        drop(file);
        ensure!(fs::read(dir.join(name))? == b"content");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640))?;
        write_sync(&path, b"other content")?;
        ensure!(fs::read(dir.join(name))? == b"other content");
        fs::remove_file(&path)?;
        ensure!(!dir.join(name).exists());
    }
    node.finish()
}

/// The kernel believes what a change of mode was answered with, and asks again before it refuses somebody.
#[test]
fn a_mode_that_a_directory_gets_holds_at_once_for_everybody() -> Result<()> {
    let mut node = started()?;
    let dir = node.places().buckets().join("modes");
    fs::create_dir(&dir)?;
    let agent = node.options().uid;
    std::os::unix::fs::chown(&dir, Some(agent), Some(agent))?;
    // The source is asked for its names again all the time.
    let more = [("writeMode", "back"), ("metadataTtl", "200ms")];
    let mounts = [node.directory_workspace("modes", &dir, &more)?, workspace(&mut node, "s3-modes", &more)?];
    for mounted in mounts {
        for n in 0..40 {
            let made = mounted.target.join(format!("d{n}"));
            fs::create_dir(&made)?;
            fs::write(made.join("first"), b"1")?;
            fs::set_permissions(&made, fs::Permissions::from_mode(0o777))?;
            let made_by_another =
                Command::new("touch").arg(made.join("second")).uid(NOBODY).gid(NOBODY).output()?;
            let is = fs::metadata(&made)?.permissions().mode() & 0o7777;
            ensure!(
                made_by_another.status.success() && is == 0o777,
                "{n}: {is:o}, {}",
                String::from_utf8_lossy(&made_by_another.stderr)
            );
            let (before, to) = (fs::metadata(&made)?, mounted.target.join(format!("r{n}")));
            fs::rename(&made, &to)?;
            let after = fs::metadata(&to)?;
            let about = |m: &fs::Metadata| (m.mode(), m.ino(), m.uid(), m.gid(), m.nlink());
            ensure!(about(&before) == about(&after), "{n}: {:?}, then {:?}", about(&before), about(&after));
        }
        let end = Instant::now() + Duration::from_secs(1);
        while Instant::now() < end {
            for name in fs::read_dir(&mounted.target)? {
                let is = name?.metadata()?.permissions().mode() & 0o7777;
                ensure!(is == 0o777, "{is:o} after the source was asked again");
            }
        }
    }
    node.finish()
}

/// A directory has the times that POSIX wants, although no object store has a place for them.
#[test]
fn times_of_directories_and_files_are_those_of_their_changes() -> Result<()> {
    let mut node = started()?;
    let mounted = workspace(&mut node, "times", &[])?;
    let top = &mounted.target;
    let times =
        |path: &Path| fs::metadata(path).map(|m| ((m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec())));
    fs::create_dir(top.join("d"))?;
    let steps: [&dyn Fn() -> std::io::Result<()>; 4] = [
        &|| fs::write(top.join("d/a"), b"1"),
        &|| fs::rename(top.join("d/a"), top.join("d/b")),
        &|| fs::remove_file(top.join("d/b")),
        &|| fs::create_dir(top.join("d/sub")).and_then(|()| fs::remove_dir(top.join("d/sub"))),
    ];
    for (number, step) in steps.iter().enumerate() {
        let before = times(&top.join("d"))?;
        step()?;
        let after = times(&top.join("d"))?;
        ensure!(after.0 > before.0 && after.1 > before.1, "step {number}: {before:?}, then {after:?}");
    }
    let before = times(&top.join("d"))?;
    fs::set_permissions(top.join("d"), fs::Permissions::from_mode(0o700))?;
    let after = times(&top.join("d"))?;
    ensure!(after.0 == before.0 && after.1 > before.1, "another mode: {before:?}, then {after:?}");
    // What a program sets is the time of its content, not of its last change.
    let path = top.join("f");
    write_sync(&path, b"1")?;
    let now = std::time::SystemTime::now();
    let later = now + Duration::from_secs(1_000_000);
    File::options().write(true).open(&path)?.set_modified(later)?;
    let about = fs::metadata(&path)?;
    ensure!(about.modified()? == later && about.ctime() < about.mtime() - 999_000);
    fs::write(&path, b"2")?;
    ensure!(fs::metadata(&path)?.modified()? < later, "it was written to after that");
    node.finish()
}

#[test]
fn what_no_key_can_name_is_refused_at_once() -> Result<()> {
    use std::os::unix::ffi::OsStringExt;
    let mut node = started()?;
    let mounted = workspace(&mut node, "long", &[("writeMode", "back")])?;
    let mut path = mounted.target.clone();
    let errno_of = |path: &Path| errno(File::create(path));
    let refused = loop {
        path.push("n".repeat(200));
        if let Some(errno) = errno(fs::create_dir(&path)) {
            break errno;
        }
        ensure!(path.as_os_str().len() < 4_000, "a key has at most 1,024 bytes");
    };
    ensure!(refused == libc::ENAMETOOLONG && errno_of(&path) == Some(libc::ENAMETOOLONG));
    path.set_file_name("short");
    ensure!(errno_of(&path).is_none());
    let not_text = mounted.target.join(OsString::from_vec(b"\xff".to_vec()));
    ensure!(errno_of(&not_text) == Some(libc::EINVAL));
    node.finish()
}
