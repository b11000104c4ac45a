//! What a store, or the disk of the staging area, does not take: the program learns it where it asks for it to be safe, and its bytes
//! are there until somebody takes them.

use crate::operators::millpond;
use crate::promises::errno;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, BUCKET, Mounted, Node};
use e2e::tree::{Shape, Tree};
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use testkit::fault_fs::{Call, DiskFaults};
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::{Config, Directory, Lies, Server};

const PATIENCE: Duration = Duration::from_secs(90);
/// Goes in parts.
const LARGE: usize = 20 << 20;

/// What is the matter with a store that was all right before.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    /// Keys that were taken back, say, or have expired: 403.
    Denied,
    /// 503 to everything.
    Unavailable,
    /// It takes what is written, and then the connection is gone.
    Reset,
    /// Somebody has deleted the bucket, and makes it again later.
    NoBucket,
}

impl Trouble {
    const ALL: [Self; 4] = [Self::Denied, Self::Unavailable, Self::Reset, Self::NoBucket];

    fn errno(self) -> i32 {
        match self {
            Self::Denied => libc::EACCES,
            Self::Unavailable | Self::Reset | Self::NoBucket => libc::EIO,
        }
    }

    fn faults(self) -> Script {
        let writes =
            |fault: Fault| ["PutObject", "UploadPart"].map(|op| Rule::always(fault.clone()).op(op)).to_vec();
        let rules = match self {
            Self::Denied => vec![Rule::always(Fault::Status { code: 403, retry_after_s: None })],
            Self::Unavailable => vec![Rule::always(Fault::Status { code: 503, retry_after_s: None })],
            Self::Reset => writes(Fault::Reset),
            Self::NoBucket => Vec::new(),
        };
        Script { seed: 0, rules }
    }
}

/// A store at one address, whose bucket is in a directory.
struct Store {
    server: Option<Server>,
    address: SocketAddr,
    dir: PathBuf,
    lies: Lies,
}

impl Store {
    fn start(node: &Node, name: &str) -> Result<Self> {
        Self::that_lies(node, name, Lies::default())
    }

    fn that_lies(node: &Node, name: &str, lies: Lies) -> Result<Self> {
        let dir = node.places().buckets().join(name);
        fs::create_dir_all(&dir)?;
        let mut store = Self { address: ([127, 0, 0, 1], 0).into(), server: None, dir, lies };
        let server = store.serve(node, None)?;
        (store.address, store.server) = (server.address(), Some(server));
        Ok(store)
    }

    fn serve(&self, node: &Node, trouble: Option<Trouble>) -> Result<Server> {
        let name = if matches!(trouble, Some(Trouble::NoBucket)) { "another" } else { BUCKET };
        let faults = trouble.map(Trouble::faults).unwrap_or_default();
        let bucket = Directory::new(&self.dir, Duration::ZERO);
        let (listen, lies) = (self.address, self.lies);
        let config = Config { listen, faults, lies, ..Config::default() }.bucket(name, bucket);
        Ok(node.runtime().block_on(Server::start(config))?)
    }

    fn has(&mut self, node: &Node, trouble: Option<Trouble>) -> Result<()> {
        self.server = None;
        // The listener before is closed by a task of its own.
        wait_until(PATIENCE, || {
            self.server = self.serve(node, trouble).ok();
            self.server.is_some()
        });
        ensure!(self.server.is_some(), "the store did not come back on {}", self.address);
        Ok(())
    }

    fn object(&self, key: &str) -> Option<Vec<u8>> {
        fs::read(self.dir.join(key)).ok()
    }

    fn workspace(&self, node: &mut Node, name: &str, mode: &str) -> Result<Mounted> {
        let endpoint = format!("http://{}", self.address);
        node.workspace(name, name, &[("writeMode", mode), ("endpoint", &endpoint), ("storeTimeout", "2s")])
    }
}

/// Written, and not safe yet.
fn written(mounted: &Mounted, name: &str, bytes: &[u8]) -> Result<File> {
    let mut file = File::create(mounted.target.join(name)).with_context(|| format!("create {name}"))?;
    file.write_all(bytes).with_context(|| format!("write {name}"))?;
    Ok(file)
}

/// close(2), whose error the standard library does not tell.
fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor was given up by `file`, and no memory is passed.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn bytes(trouble: Trouble, len: usize) -> Vec<u8> {
    (0..len).map(|n| (n / 100) as u8 ^ trouble as u8).collect()
}

/// A copy of all that waits, where nothing of it needs a store.
fn exported(node: &Node, mounted: &Mounted, to: &str) -> Result<PathBuf> {
    let dir = node.places().root().join(to);
    let text = dir.to_str().context("a path of ours")?;
    let export = millpond(node, &["staging", "export", &mounted.id, "--to", text])?;
    ensure!(export.status.success(), "{}", String::from_utf8_lossy(&export.stderr));
    Ok(dir)
}

#[test]
fn through_what_a_store_refuses_fails_fsync_and_close_and_is_there_to_be_sent() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    for trouble in Trouble::ALL {
        let name = format!("through-{trouble:?}").to_lowercase();
        let mut store = Store::start(&node, &name)?;
        let mounted = store.workspace(&mut node, &name, "through")?;
        close(written(&mounted, "before", b"before")?)?;
        let (small, large) = (bytes(trouble, 1000), bytes(trouble, LARGE));
        let files = [("small", &small), ("large", &large)];
        // Opened while all is well, as a notebook that has been at work for an hour.
        let held: Vec<File> =
            files.iter().map(|(name, bytes)| written(&mounted, name, bytes)).collect::<Result<_>>()?;
        store.has(&node, Some(trouble))?;
        for (mut file, (name, bytes)) in held.into_iter().zip(files) {
            file.write_all(b"the end")?;
            let (synced, closed) = (errno(file.sync_all()), errno(close(file)));
            ensure!(
                synced == Some(trouble.errno()) && closed == Some(trouble.errno()),
                "{trouble:?}, {name}: fsync gave {synced:?}, close {closed:?}"
            );
            let all = [&bytes[..], b"the end"].concat();
            ensure!(fs::read(mounted.target.join(name))? == all, "{trouble:?}: {name} reads otherwise");
        }
        let copy = exported(&node, &mounted, &format!("copy-{name}"))?;
        ensure!(fs::read(copy.join("small"))? == [&small[..], b"the end"].concat(), "{trouble:?}: the copy");
        let upload = millpond(&node, &["staging", "upload", &mounted.id])?;
        ensure!(!upload.status.success(), "{trouble:?}: an upload to a store that takes nothing");
        store.has(&node, None)?;
        // After silence a store is asked little at first.
        let is_taken = || {
            millpond(&node, &["staging", "upload", &mounted.id]).is_ok_and(|upload| upload.status.success())
        };
        ensure!(wait_until(PATIENCE, is_taken), "{trouble:?}: it is over, and an upload fails");
        for (name, bytes) in files {
            let all = [&bytes[..], b"the end"].concat();
            let key = format!("through-{trouble:?}/{name}").to_lowercase();
            ensure!(store.object(&key) == Some(all), "{trouble:?}: the store's {name} is another one");
        }
        // And the next program that asks is told so.
        close(written(&mounted, "after", b"after")?)?;
        node.unpublish(&mounted)?;
    }
    node.finish()
}

#[test]
fn back_what_a_store_refuses_fails_no_call_and_gets_there_by_itself() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let mut all = Vec::new();
    for trouble in Trouble::ALL {
        let name = format!("back-{trouble:?}").to_lowercase();
        let mut store = Store::start(&node, &name)?;
        let mounted = store.workspace(&mut node, &name, "back")?;
        let mut large = written(&mounted, "large", &bytes(trouble, LARGE))?;
        store.has(&node, Some(trouble))?;
        large.write_all(b"the end")?;
        large.sync_all()?;
        close(large)?;
        close(written(&mounted, "small", &bytes(trouble, 1000))?)?;
        fs::rename(mounted.target.join("small"), mounted.target.join("renamed"))?;
        all.push((trouble, name, store, mounted));
    }
    // What was acknowledged is not only in a process.
    node.kill_agent()?;
    node.start_agent()?;
    node.wait_served(PATIENCE)?;
    for (trouble, name, store, mounted) in &mut all {
        let copy = exported(&node, mounted, &format!("copy-{name}"))?;
        ensure!(fs::read(copy.join("renamed"))? == bytes(*trouble, 1000), "{trouble:?}: the copy");
        store.has(&node, None)?;
    }
    for (trouble, name, store, mounted) in &all {
        let large = [&bytes(*trouble, LARGE)[..], b"the end"].concat();
        let has_all = || {
            store.object(&format!("{name}/large")).as_ref() == Some(&large)
                && store.object(&format!("{name}/renamed")) == Some(bytes(*trouble, 1000))
                && store.object(&format!("{name}/small")).is_none()
        };
        ensure!(wait_until(PATIENCE, has_all), "{trouble:?}: the store does not get what waits");
        ensure!(fs::read(mounted.target.join("large"))? == large);
    }
    node.finish()
}

/// Nothing is dropped that the store does not have; what it has makes room, and writers wait for that.
#[test]
fn a_full_staging_disk_holds_writers_up_and_fails_them_only_if_nothing_can_go() -> Result<()> {
    // So much of it stays free, and there is room for about six of the files.
    let mut node = Node::on_staging_disk_of(256 + 128)?;
    let mut store = Store::start(&node, "full")?;
    let mounted = store.workspace(&mut node, "full", "back")?;
    let bytes = bytes(Trouble::Denied, LARGE);
    for n in 0..20 {
        close(written(&mounted, &format!("f{n}"), &bytes).with_context(|| format!("file {n}"))?)?;
    }
    let has = |store: &Store, n: usize| store.object(&format!("full/f{n}")).as_ref() == Some(&bytes);
    ensure!(wait_until(PATIENCE, || (0..20).all(|n| has(&store, n))), "not all got to the store");
    store.has(&node, Some(Trouble::Denied))?;
    let mut kept = Vec::new();
    let refused = (0..20).find_map(|n| {
        let name = format!("g{n}");
        let done = written(&mounted, &name, &bytes).and_then(|file| Ok(close(file)?));
        if done.is_ok() {
            kept.push(name);
        }
        done.err()
    });
    let refused = refused.context("20 files of 20 MiB fit into 128")?;
    let why = refused.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    ensure!(why == Some(libc::ENOSPC) && kept.len() >= 4, "after {} files: {refused:#}", kept.len());
    for name in &kept {
        ensure!(fs::read(mounted.target.join(name))? == bytes, "{name} was closed, and is another one");
    }
    // Names are made all the same: there is room for those.
    fs::rename(mounted.target.join(&kept[0]), mounted.target.join("renamed"))?;
    store.has(&node, None)?;
    let fits_again = || fs::write(mounted.target.join("again"), &bytes).is_ok();
    ensure!(wait_until(PATIENCE, fits_again), "there is no room although the store takes everything");
    let get_there = || store.object("full/renamed").as_ref() == Some(&bytes);
    ensure!(wait_until(PATIENCE, get_there), "what was kept does not get to the store");
    node.finish()
}

/// Of stores that ignore conditions: whoever has written there meanwhile keeps what he has written.
#[test]
fn what_a_store_does_not_hold_is_looked_at_before_something_is_written_or_removed() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let lies = Lies {
        ignores_if_match_on_put: true,
        ignores_if_none_match: true,
        ignores_if_match_on_delete: true,
        ignores_conditions_on_complete: true,
        ..Lies::default()
    };
    let store = Store::that_lies(&node, "liar", lies)?;
    let mounted = store.workspace(&mut node, "liar", "through")?;
    let theirs = |name: &str| fs::write(store.dir.join("liar").join(name), b"theirs");
    let has_theirs = |name: &str| store.object(&format!("liar/{name}")).as_deref() == Some(b"theirs");
    for name in ["small", "large", "removed"] {
        let len = if name == "small" { 1000 } else { LARGE };
        close(written(&mounted, name, &bytes(Trouble::Denied, len))?)?;
    }
    for (name, len) in [("small", 1000), ("large", LARGE), ("new", 1000), ("new-large", LARGE)] {
        let file = written(&mounted, name, &bytes(Trouble::Reset, len))?;
        theirs(name)?;
        ensure!(errno(file.sync_all()) == Some(libc::ESTALE), "{name}: nobody is told");
        ensure!(has_theirs(name), "{name}: theirs is gone");
        ensure!(fs::read(mounted.target.join(name))? == bytes(Trouble::Reset, len), "{name}: ours is gone");
    }
    theirs("removed")?;
    fs::remove_file(mounted.target.join("removed"))?;
    ensure!(has_theirs("removed"), "theirs was removed");
    ensure!(fs::read(mounted.target.join("removed"))? == b"theirs");
    node.finish()
}

/// It is sent while it is written to without a pause, which waits in the end, and is refused just then.
#[test]
fn a_conflict_that_writers_wait_for_lets_them_go() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let mounted = node.workspace("busy", "busy", &[])?;
    // The kernel of one mount lets nobody write to a file during its fsync.
    let other = node.workspace_again(&mounted, "other")?;
    let path = mounted.target.join("a");
    let file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
    file.write_all_at(&bytes(Trouble::Denied, 3 * LARGE), 0)?;
    file.sync_all()?;
    fs::write(node.server.file("busy/a"), b"theirs")?;
    node.server.rescan()?;
    // Each part has been written to again before all have arrived.
    let slow = Rule::always(Fault::Latency { ms: 300 }).op("UploadPart");
    node.server.set_faults(&Script { seed: 0, rules: vec![slow] })?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let writing = scope.spawn(|| -> io::Result<u64> {
            let file = File::options().write(true).open(other.target.join("a"))?;
            let mut times = 0;
            while !is_over.load(Relaxed) {
                file.write_all_at(&[times as u8; 4096], times % 15_000 * 4096)?;
                times += 1;
            }
            Ok(times)
        });
        let told =
            file.write_all_at(b"ours", 0).err().map_or_else(|| errno(file.sync_all()), |e| e.raw_os_error());
        is_over.store(true, Relaxed);
        let times = writing.join().expect("it has not panicked")?;
        ensure!(told == Some(libc::ESTALE) && times > 0, "fsync: {told:?}, after {times} writes");
        Ok(())
    })?;
    ensure!(fs::read(node.server.file("busy/a"))? == b"theirs", "theirs is gone");
    ensure!(fs::read(&path)?.len() == 3 * LARGE);
    node.finish()
}

type Ask<'a> = Box<dyn Fn() -> io::Result<()> + Send + Sync + 'a>;

/// What was asked while it hung may be done or not, and never in part. What was acknowledged is there.
#[test]
fn a_staging_disk_that_hangs_is_an_error_in_time_and_nothing_that_was_acknowledged_is_lost() -> Result<()> {
    let hang_limit = Some(Duration::from_secs(4));
    let options = AgentOptions { hang_limit, ..AgentOptions::default() };
    let (mut node, disk) = Node::on_faulty_staging_disk(options)?;
    let hang = || disk.set(&DiskFaults { hangs: Call::ALL.to_vec(), ..DiskFaults::default() });
    let mend = || disk.set(&DiskFaults::default());
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let data_set = node.volume("set", "set", &[])?;
    let reader = node.pod(&data_set)?;
    let mounted = node.workspace("hangs", "hangs", &[("writeMode", "back")])?;
    let path = |name: &str| mounted.target.join(name);
    let written = |name: &str, bytes: &[u8]| -> Result<File> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path(name))?;
        file.write_all_at(bytes, 0)?;
        file.sync_all()?;
        Ok(file)
    };
    // The kernel asks for this write at once.
    let (old, new) = (vec![b'a'; 3 << 20], vec![b'b'; 64 << 10]);
    for round in 0..3 {
        let file = written("written", &old)?;
        drop(written("renamed", b"from")?);
        let mut unsafe_yet = File::create(path("synced"))?;
        unsafe_yet.write_all(b"synced")?;
        drop(written("over", b"over")?);
        drop(written("kept", b"kept")?);
        fs::write(path("read"), &old)?; // past the page cache
        hang()?;
        let from = path("read");
        let reading = std::thread::spawn(move || fs::read(from));
        std::thread::scope(|threads| {
            let asks: [(&str, Ask<'_>); 6] = [
                ("write", Box::new(|| file.write_all_at(&new, 4096))),
                ("fsync", Box::new(|| unsafe_yet.sync_all())),
                ("create", Box::new(|| File::create_new(path("new")).map(drop))),
                ("rename", Box::new(|| fs::rename(path("renamed"), path("over")))),
                ("unlink", Box::new(|| fs::remove_file(path("kept")))),
                (
                    "truncate",
                    Box::new(|| File::options().write(true).truncate(true).open(path("large")).map(drop)),
                ),
            ];
            let asks = asks.map(|(what, ask)| (what, threads.spawn(ask)));
            // Names are not on it, and other volumes have nothing to do with it.
            ensure!(fs::metadata(path("written"))?.len() == old.len() as u64);
            reader.verify(&tree, 2)?.ensure_all(&tree)?;
            for (what, ask) in asks {
                let done = ask.join().map_err(|_| anyhow::anyhow!("{what} panicked"))?;
                let missing = what == "truncate" && round == 0;
                ensure!(
                    missing || errno(done) == Some(libc::EIO),
                    "round {round}: {what} on a disk that hangs"
                );
            }
            anyhow::Ok(())
        })?;
        mend()?;
        // At once: what is late must not come to pass behind it.
        let done = wait_until(PATIENCE, || file.write_all_at(b"later", 5000).is_ok());
        ensure!(done, "round {round}: nothing is written after the disk was mended");
        let read = reading.join().map_err(|_| anyhow::anyhow!("the reader panicked"))?;
        eprintln!("round {round}: who reads from a disk that hangs: {:?}", read.as_ref().map(Vec::len));
        ensure!(
            read.as_ref().is_ok_and(|read| *read == old) || errno(read) == Some(libc::EIO),
            "round {round}"
        );
        let (mut before, mut after) = (old.clone(), old.clone());
        after[4096..4096 + new.len()].copy_from_slice(&new);
        for expected in [&mut before, &mut after] {
            expected[5000..5005].copy_from_slice(b"later");
        }
        let found = fs::read(path("written"))?;
        ensure!(found == before || found == after, "round {round}: a write was done in part");
        // The one or the other, of each name.
        let over = fs::read(path("over"))?;
        match fs::read(path("renamed")) {
            Ok(from) => ensure!(from == b"from" && over == b"over", "round {round}: {over:?}"),
            Err(error) => {
                ensure!(error.kind() == io::ErrorKind::NotFound && over == b"from", "round {round}: {over:?}")
            }
        }
        if let Ok(kept) = fs::read(path("kept")) {
            ensure!(kept == b"kept", "round {round}");
        }
        fs::write(path("large"), &old)?;
        let _ = fs::remove_file(path("new")); // made or not
        let is_there = || {
            let stored = fs::read(node.server.file("hangs/written"));
            stored.is_ok_and(|stored| stored == found)
        };
        ensure!(wait_until(PATIENCE, is_there), "round {round}: the store has something else");
    }
    // An agent that starts meanwhile: other volumes are served, and this one as soon as the disk answers.
    fs::write(path("kept"), b"kept")?;
    node.kill_agent()?;
    hang()?;
    node.start_agent()?;
    reader.verify(&tree, 2)?.ensure_all(&tree)?;
    mend()?;
    node.wait_served(PATIENCE)?;
    ensure!(fs::read(path("kept"))? == b"kept" && fs::read(path("large"))? == old);
    fs::write(path("kept"), b"changed")?;
    ensure!(fs::read(path("kept"))? == b"changed");
    drop(reader);
    node.finish()
}

/// After an fsync that failed the kernel may take pages for clean that are on no disk: the next one must not believe it. And nobody
/// knows what of the journal is there: an agent that starts anew finds out.
#[test]
fn a_staging_disk_that_fails_is_an_error_and_nothing_that_is_said_to_be_safe_is_lost() -> Result<()> {
    let (mut node, disk) = Node::on_faulty_staging_disk(AgentOptions::default())?;
    let mounted = node.workspace("fails", "fails", &[("writeMode", "back")])?;
    let path = |name: &str| mounted.target.join(name);
    let safe = File::create_new(path("safe"))?;
    safe.write_all_at(b"safe", 0)?;
    safe.sync_all()?;
    drop(safe);
    let eio = |calls: &[Call]| disk.set(&DiskFaults { eio: calls.to_vec(), ..DiskFaults::default() });
    let large = bytes(Trouble::Denied, LARGE);
    let file = File::options().read(true).write(true).create_new(true).open(path("large"))?;
    file.write_all_at(&large, 0)?;
    eio(&[Call::Fsync])?;
    ensure!(errno(file.sync_all()) == Some(libc::EIO), "fsync on a disk whose fsync fails");
    // All of it is written once more, or it is not safe.
    eio(&[Call::Write])?;
    ensure!(errno(file.sync_all()) == Some(libc::EIO), "it was said to be safe, and was not written anew");
    eio(&[])?;
    file.sync_all()?;
    ensure!(fs::read(path("safe"))? == b"safe" && fs::read(path("large"))? == large);
    // Of the journal, too.
    eio(&[Call::Fsync])?;
    let made = File::create_new(path("made")).and_then(|made| made.sync_all());
    ensure!(errno(made) == Some(libc::EIO), "a name was said to be safe");
    eio(&[])?;
    // To close what can be written to is a call to the mount, which no process must inherit.
    drop(file);
    node.kill_agent()?;
    node.start_agent()?;
    node.wait_served(PATIENCE)?;
    fs::write(path("new"), b"new")?;
    for (name, bytes) in [("safe", &b"safe"[..]), ("large", &large), ("new", b"new")] {
        ensure!(fs::read(path(name))? == bytes, "{name}");
        let is_there = || fs::read(node.server.file(&format!("fails/{name}"))).is_ok_and(|b| b == bytes);
        ensure!(wait_until(PATIENCE, is_there), "{name} does not get to the store");
    }
    node.finish()
}
