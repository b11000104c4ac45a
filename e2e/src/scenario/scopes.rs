//! Sources that are used once and left, one after the other: the node is afterwards what it was before.

use super::resources::{disk_bytes, slope};
use crate::clock::wait_until;
use crate::node::{AgentOptions, Node, Server};
use crate::processes::{self, Memory};
use anyhow::{Context, Result, ensure};
use std::fmt;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use testkit::content;

const PATIENCE: Duration = Duration::from_secs(120);
/// Of how many unused sources the agent keeps the names. Fewer than by default, so that a short run sees them
/// go, too.
const KEPT: usize = 50;
/// Scopes between two looks. Then whatever is cached is dropped, as when others need the room.
const STEP: usize = 50;
/// Looks until a process has the memory that it keeps.
const WARM_UP: usize = 3;
const FILE_BYTES: u64 = 20_000;
/// Connections to the store that have not idled for long enough, and to the API.
const DESCRIPTORS_MORE: usize = 8;
const DISK_MORE: u64 = 2 << 20;
/// Anonymous memory that an agent has more after a run than after its warm-up, whatever its length: allocators keep some.
const MEMORY_MORE: u64 = 12 << 20;

/// What a node holds when no pod uses it.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Bytes, blocks that are allocated: below the metadata directory, and below the cache directory.
    names: u64,
    cached: u64,
    descriptors: usize,
    plugin_descriptors: usize,
    agent: u64,
    plugin: u64,
}

#[derive(Clone, Debug)]
pub struct ScopesReport {
    scopes: usize,
    took: Duration,
    first: Held,
    last: Held,
    /// Anonymous memory per scope, bytes: agent, plugin.
    growth: [f64; 2],
}

impl fmt::Display for ScopesReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} scopes made and left in {:.0} s ({:.1} a second)\n  after {}: {}\n  at the end: {}\n  anonymous memory \
             per scope: agent {:+.0} bytes, plugin {:+.0} bytes",
            self.scopes,
            self.took.as_secs_f64(),
            self.scopes as f64 / self.took.as_secs_f64(),
            WARM_UP * STEP,
            self.first,
            self.last,
            self.growth[0],
            self.growth[1]
        )
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{:.2} MiB of names (of {KEPT} sources), {:.2} MiB of cache, {} descriptors of the agent and {} of the \
             plugin, {:.1} and {:.1} MiB of anonymous memory",
            mib(self.names),
            mib(self.cached),
            self.descriptors,
            self.plugin_descriptors,
            mib(self.agent),
            mib(self.plugin)
        )
    }
}

/// An agent that keeps few names.
pub fn options() -> AgentOptions {
    AgentOptions { metadata_stores: Some(KEPT), ..AgentOptions::default() }
}

/// Publishes, reads one file, unpublishes: `scopes` times, each time another source. On a node with [`options`].
pub fn run(node: &mut Node, scopes: usize) -> Result<ScopesReport> {
    ensure!(scopes >= (WARM_UP + 2) * STEP, "{scopes} scopes: at least {}", (WARM_UP + 2) * STEP);
    let server = Server::synthetic(node.places(), scopes as u64, FILE_BYTES, "p{n}/file")?;
    let endpoint = server.endpoint();
    let width = (scopes - 1).to_string().len();
    let begun = Instant::now();
    let mut first = None;
    let (mut agent, mut plugin) = (Vec::new(), Vec::new());
    let mut last = None;
    for n in 0..scopes {
        let prefix = format!("p{n:0width$}");
        scope(node, &endpoint, &prefix, n).with_context(|| prefix.clone())?;
        if (n + 1) % STEP != 0 && n + 1 != scopes {
            continue;
        }
        let held = held(node)?;
        if (n + 1) / STEP >= WARM_UP {
            first.get_or_insert(held);
            agent.push(held.agent);
            plugin.push(held.plugin);
        }
        last = Some(held);
        if (n + 1) % 500 == 0 {
            eprintln!("scopes: {} of {scopes}: {held}", n + 1);
        }
    }
    let took = begun.elapsed();
    let (first, last) = first.zip(last).context("there was a look")?;
    let report = ScopesReport {
        scopes,
        took,
        first,
        last,
        growth: [slope(&agent), slope(&plugin)].map(|of_step| of_step / STEP as f64),
    };
    let more = |now: u64, before: u64, most: u64| now <= before + most;
    ensure!(
        last.descriptors <= first.descriptors + DESCRIPTORS_MORE
            && last.plugin_descriptors <= first.plugin_descriptors + DESCRIPTORS_MORE
            && more(last.names, first.names, DISK_MORE)
            && more(last.cached, first.cached, DISK_MORE)
            && more(last.agent, first.agent, MEMORY_MORE)
            && more(last.plugin, first.plugin, MEMORY_MORE),
        "something has grown: {report}"
    );
    Ok(report)
}

fn scope(node: &mut Node, endpoint: &str, prefix: &str, n: usize) -> Result<()> {
    let profile = if n.is_multiple_of(2) { "large" } else { "small" };
    let volume = node.create(prefix, prefix, &[("profile", profile), ("endpoint", endpoint)])?;
    let mounted = node.publish(&volume, &format!("pod-{prefix}"))?;
    let bytes = fs::read(mounted.target.join("file"))?;
    let id = content::id(format!("{prefix}/file"));
    let wrong = content::first_wrong_byte(id, 0, &bytes);
    ensure!(bytes.len() as u64 == FILE_BYTES && wrong.is_none(), "{} bytes, wrong at {wrong:?}", bytes.len());
    node.unpublish(&mounted)?;
    node.delete(&volume)?;
    Ok(())
}

/// When what is cached was dropped and names were given back that are too many.
fn held(node: &Node) -> Result<Held> {
    let (names, cache) = (node.places().cache().join("meta"), node.places().cache().join("ssd"));
    let scopes = |dir: &Path| -> usize {
        let all = fs::read_dir(dir).into_iter().flatten().flatten();
        all.filter(|entry| entry.file_name().len() == 32).count()
    };
    let given_back = wait_until(PATIENCE, || {
        // What was being written to the disk when it was dropped last is dropped now.
        node.agent().evict_all().is_ok() && scopes(&names) <= KEPT && scopes(&cache) == 0
    });
    let (kept, left) = (scopes(&names), scopes(&cache));
    ensure!(given_back, "{kept} sources have names (at most {KEPT}), {left} a directory and no files");
    let [agent, plugin] = [node.agent().pid(), node.plugin().pid()];
    Ok(Held {
        names: disk_bytes(&names),
        cached: disk_bytes(&cache),
        descriptors: processes::descriptors(agent),
        plugin_descriptors: processes::descriptors(plugin),
        agent: Memory::of(agent).anonymous,
        plugin: Memory::of(plugin).anonymous,
    })
}
