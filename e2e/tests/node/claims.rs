//! What a hostile store claims and what no agent survives: the volume that asks for it gets an answer, all others read on.

use crate::promises::{errno, names, node_and_store, volume};
use crate::workload::judge;
use anyhow::{Context, Result, ensure};
use e2e::clock::{wait_until, within};
use e2e::node::{AgentOptions, BUCKET, Node, Tier};
use e2e::tree::{Shape, Tree};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use testkit::content;
use testkit::hostile::{Harm, Hostile};
use testkit::s3::Server;

const LARGEST: u64 = i64::MAX as u64;
/// Name, claimed size, shown? Their sum is more than 64 bits hold.
const CLAIMS: [(&str, u64, bool); 9] = [
    ("1Ti", 1 << 40, true),
    ("2e53", (1 << 53) + 1, true),
    ("2e60", 1 << 60, true),
    ("largest", LARGEST, true),
    ("largest2", LARGEST, true),
    ("largest3", LARGEST, true),
    ("one-more", LARGEST + 1, false),
    ("u64", u64::MAX, false),
    ("zero", 0, true),
];
const LIMIT: Duration = Duration::from_secs(60);

/// The first bytes, the last, and some between.
fn check_ends(dir: &Path, name: &str, size: u64) -> Result<()> {
    let path = dir.join(name);
    let file = File::open(&path).with_context(|| format!("open {name}"))?;
    assert_eq!(file.metadata()?.len(), size, "{name}");
    for start in [0, size / 3, size.saturating_sub(200_000), size.saturating_sub(10)] {
        let len = (size - start).min(10);
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, start).with_context(|| format!("{name} at {start} of {size}"))?;
        assert_eq!(bytes, content::bytes(content::id(name), start..start + len), "{name} at {start}");
    }
    if size < LARGEST {
        assert_eq!(file.read_at(&mut [0; 1], size)?, 0, "{name} ends at {size}");
    } // else the kernel has no such offset
    let head = Command::new("sh").arg("-c").arg(format!("cat '{}' | head -c 10", path.display())).output()?;
    let first = size.min(10);
    assert_eq!(head.stdout, content::bytes(content::id(name), 0..first), "cat {name} | head -c 10: {head:?}");
    Ok(())
}

fn look(dir: &Path) -> Result<()> {
    let shown: BTreeSet<_> = CLAIMS.iter().filter(|c| c.2).map(|c| c.0.into()).collect();
    assert_eq!(names(dir)?, shown);
    for (name, size, shown) in CLAIMS {
        match shown {
            true => check_ends(dir, name, size)?,
            false => assert_eq!(errno(fs::metadata(dir.join(name))), Some(libc::ENOENT), "{name}"),
        }
    }
    let mut hidden = [0; 64];
    let length = rustix::fs::getxattr(dir, "user.millpond.hidden_keys", &mut hidden)?;
    assert_eq!(&hidden[..length], b"2");
    Ok(())
}

fn read_beside_others(options: AgentOptions) -> Result<()> {
    let mut node = Node::start(options)?;
    let store = node.runtime().block_on(Server::memory(BUCKET))?;
    for (name, size, _) in CLAIMS {
        store.claim(BUCKET, name, size)?;
    }
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let innocent = node.volume("innocent", "set", &[])?;
    let running = node.pod(&innocent)?.oracle(&tree, &["--pause-us", "500"])?;
    let agent = node.agent().pid();
    for (profile, freshness) in [("large", "ttl"), ("small", "ttl"), ("large", "strict")] {
        let name = format!("{profile}-{freshness}");
        let mounted =
            volume(&mut node, &store, &name, "", &[("profile", profile), ("freshness", freshness)])?;
        let dir = mounted.target.clone();
        within(LIMIT, move || look(&dir))?.context(name.clone())?;
        if name == "large-ttl" {
            // It was listed just now. What is known of the source is more than 64 bits hold: the most will do.
            ensure!(rustix::fs::statvfs(&mounted.target)?.f_blocks >= LARGEST / 4096, "df");
        }
        node.plugin().stats(&mounted.id, &mounted.target)?;
        node.unpublish(&mounted)?;
    }
    assert!(!node.agent_has_ended() && node.agent().pid() == agent, "the agent is another one");
    assert!(node.agent().heals()?.is_empty(), "{:?}", node.agent().heals()?);
    let memory = node.agent().memory();
    ensure!(memory.unevictable() < 256 << 20, "{memory:?}");
    judge(running)?;
    node.finish()
}

#[test]
fn objects_of_any_claimed_size_are_read_at_both_ends_and_harm_nobody() -> Result<()> {
    read_beside_others(AgentOptions::default())
}

#[test]
fn so_they_are_where_the_cache_would_take_files_of_any_size() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let options = AgentOptions::default();
    let path = dir.path().join("ssd");
    fs::create_dir(&path)?;
    std::os::unix::fs::chown(&path, Some(options.uid), Some(options.uid))?;
    fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let tier =
        Tier { name: "ssd", paths: vec![path], quota: "16777215Ti", inodes: 1_000_000, min_free_percent: 1 };
    read_beside_others(AgentOptions { tiers: vec![tier], ..options })
}

#[test]
fn bringing_in_what_no_cache_can_hold_is_an_error_at_once() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    for (name, size) in [("2e60", 1 << 60), ("largest", LARGEST)] {
        store.claim(BUCKET, name, size)?;
    }
    store.put(BUCKET, "little", "content")?;
    let mounted = volume(&mut node, &store, "v", "", &[])?;
    let warmed = node.agent().warm(std::slice::from_ref(&mounted.target), LIMIT)?;
    assert_eq!((warmed.files_done, warmed.failed), (1, 2), "{warmed:?}");
    assert!(
        warmed.errors.iter().all(|why| why.contains("no cache directory can take this file")),
        "{warmed:?}"
    );
    ensure!(store.stats().bytes_get < 64 << 20, "{:?}", store.stats());
    node.finish()
}

/// Is this store asked nothing for some seconds?
fn falls_silent(store: &Hostile) -> bool {
    let (mut last, mut since) = (store.asked(), Instant::now());
    wait_until(LIMIT, || {
        if store.asked() != last {
            (last, since) = (store.asked(), Instant::now());
        }
        since.elapsed() > Duration::from_secs(5)
    })
}

#[test]
fn a_listing_that_never_ends_ends_after_its_last_reader_and_with_its_volume() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let store = node.runtime().block_on(Hostile::start())?;
    let endpoint = store.endpoint();
    for (name, unpublished) in [("reader", false), ("volume", true)] {
        store.play(Harm::None);
        let more = [("endpoint", endpoint.as_str()), ("metadataTtl", "1s"), ("storeTimeout", "600s")];
        let mounted = node.volume(name, name, &more)?;
        let pod = node.pod(&mounted)?;
        store.play(Harm::EndlessListings);
        let mut reader = pod.abuse(4, 1)?;
        ensure!(wait_until(LIMIT, || store.asked() > 20), "{name}: {} requests", store.asked());
        match unpublished {
            true => node.unpublish(&mounted)?,
            false => drop(reader.kill(LIMIT)?),
        }
        let from = store.asked();
        ensure!(falls_silent(&store), "{name}: {} pages since, and no reader waits", store.asked() - from);
        println!("{name}: {} pages since", store.asked() - from);
        store.play(Harm::None);
        if !unpublished {
            let dir = mounted.target.clone();
            let names = within(LIMIT, move || fs::read_dir(dir).map(|all| all.count()))??;
            ensure!(names == 40, "{names} names of a store that has become a proper one");
            node.unpublish(&mounted)?;
        }
    }
    node.finish()
}

#[test]
fn a_request_that_kills_agent_after_agent_is_eio_and_all_else_is_read() -> Result<()> {
    const STEP: &str = "agent.executes.large1";
    let mut options = AgentOptions::default();
    options.failpoints.agent = Some(STEP);
    let mut node = Node::start(options)?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let mut rest = tree.clone();
    rest.files.retain(|file| file.path != "large1");
    let other = node.volume("other", "set", &[])?;
    let mut expected = 0;
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pods = [node.pod(&mounted)?, node.pod(&other)?];
        let kinds = ["--pause-us", "500", "--kinds", "pread,small,open,stat,mmap"];
        let running = pods.iter().map(|pod| pod.oracle(&rest, &kinds)).collect::<Result<Vec<_>>>()?;
        let path = mounted.target.join("large1");
        let (sender, receiver) = std::sync::mpsc::channel();
        let asked = path.clone();
        std::thread::spawn(move || sender.send(errno(fs::read(asked))));
        let mut answer = None;
        let answered = wait_until(3 * LIMIT, || {
            if node.agent_has_ended() {
                expected += 1;
                node.kill_agent().and_then(|()| node.spawn_agent()).expect("another agent starts");
            }
            answer = receiver.try_recv().ok();
            answer.is_some()
        });
        assert!(answered, "{profile}: never answered");
        assert_eq!(answer, Some(Some(libc::EIO)), "{profile}");
        node.wait_whole(LIMIT)?;
        let agent = node.agent().pid();
        // A reader that asks again gets the same answer without another death.
        for _ in 0..3 {
            let path = path.clone();
            assert_eq!(within(LIMIT, move || errno(fs::read(path)))?, Some(libc::EIO), "{profile}");
        }
        assert!(!node.agent_has_ended() && node.agent().pid() == agent, "{profile}: it died again");
        running.into_iter().try_for_each(judge)?;
        let stats = node.agent().stats()?;
        let poisoned: f64 = stats
            .iter()
            .filter(|(name, _)| name.starts_with("millpond_poisoned_requests_total"))
            .map(|(_, value)| value)
            .sum();
        assert!(poisoned >= 1.0, "{stats:?}");
        drop(pods);
        node.unpublish(&mounted)?;
    }
    // Two for each: one may have been anything.
    let log = fs::read(node.places().log("node-agent"))?;
    let said = format!("failpoint: aborted at {STEP}");
    let deaths = String::from_utf8_lossy(&log).lines().filter(|line| *line == said).count();
    assert_eq!((deaths, expected), (4, 4));
    node.finish()
}
