//! A store that is away under warm epochs: they go on, it is reported once, and what changed is seen when it is back.

use crate::clock::wait_until;
use crate::node::{BUCKET, Mounted, Node};
use crate::oracle::Report;
use crate::pod::{Pod, Running};
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::{Config, Directory, Server};

const PATIENCE: Duration = Duration::from_secs(60);
const METADATA_TTL: Duration = Duration::from_secs(5);

/// How a store is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Away {
    /// No process listens on its port.
    Refused,
    /// It takes every request and answers none.
    Silent,
}

/// The two halves of an outage.
const OUTAGES: [[Away; 2]; 2] = [[Away::Refused, Away::Silent], [Away::Silent, Away::Refused]];

/// One outage.
#[derive(Clone, Debug)]
struct Outage {
    halves: [Away; 2],
    calls: u64,
    longest: Duration,
    /// From when the store could answer again until a change and an addition were seen: by each volume.
    seen_after: Vec<Duration>,
    /// The same of the first call of the strict volume that went well.
    strict_after: Duration,
}

#[derive(Clone, Debug)]
pub struct AwayReport {
    pub time: Duration,
    outages: Vec<Outage>,
}

impl fmt::Display for AwayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for outage in &self.outages {
            let seen: Vec<_> =
                outage.seen_after.iter().map(|t| format!("{:.2} s", t.as_secs_f64())).collect();
            writeln!(
                f,
                "the store was away for {:?} ({:?}, then {:?}): {} calls, 0 failed, the longest took {:.0} ms; \
                 reported once of each mount; changes were seen {} after its return (metadataTtl \
                 {METADATA_TTL:?}), strict worked after {:.2} s",
                self.time,
                outage.halves[0],
                outage.halves[1],
                outage.calls,
                outage.longest.as_secs_f64() * 1e3,
                seen.join(" and "),
                outage.strict_after.as_secs_f64()
            )?;
        }
        Ok(())
    }
}

/// The store of this run, which goes away and comes back at one address.
struct Store {
    server: Option<Server>,
    address: SocketAddr,
    dir: PathBuf,
}

impl Store {
    fn start(node: &Node) -> Result<Self> {
        let dir = node.places().buckets().join("away");
        fs::create_dir_all(&dir)?;
        let server = Self::serve(node, &dir, ([127, 0, 0, 1], 0).into(), Script::default())?;
        Ok(Self { address: server.address(), server: Some(server), dir })
    }

    fn serve(node: &Node, dir: &Path, listen: SocketAddr, faults: Script) -> Result<Server> {
        let bucket = Directory::new(dir, Duration::ZERO);
        let config = Config { listen, faults, ..Config::default() }.bucket(BUCKET, bucket);
        Ok(node.runtime().block_on(Server::start(config))?)
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// None: it answers.
    fn be(&mut self, node: &Node, how: Option<Away>) -> Result<()> {
        self.server = None;
        let silent = Script { seed: 0, rules: vec![Rule::always(Fault::Stall { ms: None })] };
        let faults = match how {
            Some(Away::Refused) => return Ok(()),
            Some(Away::Silent) => silent,
            None => Script::default(),
        };
        // The listener before is closed by a task of its own.
        wait_until(PATIENCE, || {
            self.server = Self::serve(node, &self.dir, self.address, faults.clone()).ok();
            self.server.is_some()
        });
        ensure!(self.server.is_some(), "the store did not come back on {}", self.address);
        Ok(())
    }
}

/// A volume whose names run out all the time, and a pod that reads what is cached of it.
struct Volume {
    mounted: Mounted,
    pod: Pod,
    /// Of the part that does not change.
    tree: Tree,
}

impl Volume {
    fn path(&self, path: &str) -> PathBuf {
        self.mounted.target.join(path)
    }
}

/// What is changed at the source lies beside what is read all the time.
const EPOCH: &str = "epoch";
const CHANGED: &str = "news/changed";
const ADDED: &str = "news/added";

/// Two outages of `time`, as different as they can be. Fails where a call does, or one is reported more than once.
pub fn run(node: &mut Node, time: Duration) -> Result<AwayReport> {
    let mut store = Store::start(node)?;
    let endpoint = store.endpoint();
    let ttl = format!("{}ms", METADATA_TTL.as_millis());
    let mut volumes = Vec::new();
    for profile in ["large", "small"] {
        let tree = Tree::generated(&format!("{profile}/"), Shape::LITTLE);
        tree.write(&store.dir.join(profile).join(EPOCH))?;
        write(&store, profile, CHANGED, "as it was")?;
        let more = [("profile", profile), ("metadataTtl", ttl.as_str()), ("endpoint", endpoint.as_str())];
        let mounted = node.volume(profile, profile, &more)?;
        let pod = node.pod(&mounted)?;
        pod.start_verify_below(EPOCH, &tree)?.finish(PATIENCE)?.ensure_all(&tree)?;
        volumes.push(Volume { mounted, pod, tree });
    }
    write(&store, "strict", "file", "strict")?;
    let more = [("freshness", "strict"), ("storeTimeout", "2s"), ("endpoint", endpoint.as_str())];
    let strict = node.volume("strict", "strict", &more)?;
    let file = strict.target.join("file");
    let works = {
        let file = file.clone();
        move || fs::read(&file).is_ok_and(|bytes| bytes == b"strict")
    };
    ensure!(works(), "the strict volume cannot be read");

    let mut outages = Vec::new();
    for (number, halves) in OUTAGES.into_iter().enumerate() {
        let (old, new) = (contents(number), contents(number + 1));
        for volume in &volumes {
            let known = || read(volume, CHANGED).is_ok_and(|bytes| bytes == old);
            ensure!(wait_until(PATIENCE, known), "{CHANGED} is not {old:?}");
            // Its directory is known whole: that a name is absent, too.
            ensure!(names(&volume.mounted, "news")? == number + 1, "{:?}", volume.mounted);
        }
        let so_far = reported(node, &volumes)?;
        let mut running: Vec<Running<Report>> = Vec::new();
        for volume in &volumes {
            running.push(volume.pod.oracle_below(EPOCH, &volume.tree, &["--pause-us", "5000"])?);
        }
        for (half, how) in halves.into_iter().enumerate() {
            store.be(node, Some(how))?;
            if half == 0 {
                for profile in ["large", "small"] {
                    write(&store, profile, CHANGED, &new)?;
                    write(&store, profile, &format!("{ADDED}{number}"), "added")?;
                }
            }
            std::thread::sleep(time / 2);
            let refused = fs::metadata(&file).err().and_then(|e| e.raw_os_error());
            ensure!(refused == Some(libc::EIO), "{how:?}: strict gave {refused:?}, not EIO");
            for volume in &volumes {
                // Its names run out, and a question of each must have waited for the store.
                ensure!(
                    wait_until(PATIENCE, || is_stale(node, volume)),
                    "{how:?}: no word of {:?} being stale: {:?}",
                    volume.mounted,
                    node.agent().volumes()
                );
                let shown = read(volume, CHANGED).with_context(|| format!("{how:?}"))?;
                ensure!(shown == old, "{how:?}: {shown:?}");
                let absent = fs::metadata(volume.path(&format!("{ADDED}{number}")));
                let absent = absent.err().and_then(|e| e.raw_os_error());
                ensure!(absent == Some(libc::ENOENT), "{how:?}: a name that was absent: {absent:?}");
            }
        }
        store.be(node, None)?;
        let back = Instant::now();
        let seen = volumes.iter().map(|volume| {
            let (changed, added) = (volume.path(CHANGED), volume.path(&format!("{ADDED}{number}")));
            let new = new.clone();
            first(back, move || {
                fs::read(&added).is_ok_and(|bytes| bytes == b"added")
                    && fs::read_to_string(&changed).is_ok_and(|text| text == new)
            })
        });
        let seen: Vec<_> = seen.collect();
        let strict_after = first(back, works.clone());
        let joined = |waits: JoinHandle<Option<Duration>>| waits.join().expect("a waiter does not panic");
        let seen_after: Vec<_> = seen.into_iter().map(joined).collect();
        let strict_after = joined(strict_after).context("strict does not work again")?;
        ensure!(seen_after.iter().all(Option::is_some), "{PATIENCE:?} after its return: seen {seen_after:?}");
        let mut all = Report::default();
        for application in running {
            let report = application.finish(PATIENCE)?;
            report.ensure_clean().with_context(|| format!("{halves:?}"))?;
            all.merge(report);
        }
        ensure_reported_once(node, &volumes, so_far)?;
        let longest = all.slow.iter().map(|slow| slow.end_ns - slow.start_ns).max().unwrap_or(0);
        outages.push(Outage {
            halves,
            calls: all.total_calls(),
            longest: Duration::from_nanos(longest),
            seen_after: seen_after.into_iter().flatten().collect(),
            strict_after,
        });
    }
    let heals = node.agent().heals()?;
    ensure!(heals.is_empty(), "a process died of it: {heals:?}");
    for volume in volumes {
        volume.pod.end()?;
        node.unpublish(&volume.mounted)?;
    }
    node.unpublish(&strict)?;
    Ok(AwayReport { time, outages })
}

fn is_stale(node: &Node, volume: &Volume) -> bool {
    let known = node.agent().volumes().unwrap_or_default();
    known.iter().any(|v| v.volume_id == volume.mounted.id && v.stale_since_ms > 0)
}

/// How long after `from` this holds. A thread of its own: a call may wait for the store.
fn first(from: Instant, holds: impl FnMut() -> bool + Send + 'static) -> JoinHandle<Option<Duration>> {
    std::thread::spawn(move || wait_until(PATIENCE, holds).then(|| from.elapsed()))
}

/// Of the file that changes, before the n-th outage.
fn contents(outage: usize) -> String {
    if outage == 0 { "as it was".to_owned() } else { format!("changed in outage {outage}") }
}

fn write(store: &Store, prefix: &str, path: &str, text: &str) -> Result<()> {
    let path = store.dir.join(prefix).join(path);
    fs::create_dir_all(path.parent().context("a file has a directory")?)?;
    Ok(fs::write(path, text)?)
}

fn read(volume: &Volume, path: &str) -> Result<String> {
    Ok(fs::read_to_string(volume.path(path))?)
}

fn names(mounted: &Mounted, dir: &str) -> Result<usize> {
    Ok(fs::read_dir(mounted.target.join(dir))?.count())
}

/// What the broker has learnt of each mount's source, which is what it posts as Events: (away, back).
fn reported(node: &Node, volumes: &[Volume]) -> Result<BTreeMap<String, (usize, usize)>> {
    let log = fs::read(node.places().log("csi-plugin"))?;
    let log = String::from_utf8_lossy(&log);
    let count =
        |id: &str, what: &str| log.lines().filter(|line| line.contains(what) && line.contains(id)).count();
    let of = |volume: &Volume| {
        let id = &volume.mounted.id;
        (id.clone(), (count(id, "MountServingStale"), count(id, "its source answers again")))
    };
    Ok(volumes.iter().map(of).collect())
}

fn ensure_reported_once(
    node: &Node,
    volumes: &[Volume],
    before: BTreeMap<String, (usize, usize)>,
) -> Result<()> {
    let expected: BTreeMap<_, _> =
        before.into_iter().map(|(id, (away, back))| (id, (away + 1, back + 1))).collect();
    let mut now = BTreeMap::new();
    wait_until(PATIENCE, || {
        now = reported(node, volumes).unwrap_or_default();
        now == expected
    });
    ensure!(now == expected, "reported (away, back): {now:?}, not {expected:?}");
    for volume in volumes {
        let how = node.plugin().stats(&volume.mounted.id, &volume.mounted.target)?.volume_condition;
        ensure!(
            how.as_ref().is_some_and(|how| !how.abnormal),
            "the source is back, and the condition is {how:?}"
        );
    }
    Ok(())
}
