//! What an attacker in a worker knows of the node, who has looked around before.

use anyhow::{Context, Result};
use rustix::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub struct Knowledge {
    pub agent: i32,
    pub sibling: i32,
    pub link: i32,
    pub roots: Vec<OwnedFd>,
    /// The directory of a tier, below which each scope has a directory.
    pub tier: PathBuf,
    pub foreign_file: PathBuf,
    pub foreign_names: PathBuf,
    pub state_file: PathBuf,
}

pub fn look_around(node: &Path, roots: Vec<OwnedFd>, own_names: &Path, link: i32) -> Result<Knowledge> {
    let agent = rustix::process::getppid().context("it has a parent")?.as_raw_nonzero().get();
    let me = std::process::id().to_string();
    let is_worker = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        pid != me && rest.split_whitespace().nth(1) == Some(agent.to_string().as_str())
    };
    let processes = std::fs::read_dir("/proc")?.flatten().filter_map(|e| e.file_name().into_string().ok());
    let sibling = processes.filter(|name| name.parse::<i32>().is_ok()).find(|pid| is_worker(pid));
    let own = roots.first().context("a cache directory")?;
    let inode = rustix::fs::fstat(own)?.st_ino;
    // Not by /proc/self/fd: a process that cannot be dumped does not see its own.
    let tier = node.join("cache/ssd");
    let scopes = std::fs::read_dir(&tier)?.flatten().map(|entry| entry.path());
    let own_directory =
        scopes.into_iter().find(|path| std::fs::metadata(path).is_ok_and(|it| it.ino() == inode));
    let own_directory = own_directory.context("its own directory lies in the tier")?;
    // Left there by an attacker of before, say: whoever is of the agent's user can.
    let _ = std::os::unix::fs::symlink("/etc/passwd", own_directory.join("hostile-link"));
    let _ = std::fs::write(own_directory.join("hostile-file"), "of this scope");
    let foreign = |path: &&PathBuf| !path.starts_with(&own_directory);
    let is_scope = |path: &&PathBuf| path.strip_prefix(&tier).is_ok_and(|rest| rest.components().count() > 2);
    let cached = files_below(&tier);
    let foreign_file =
        cached.iter().filter(is_scope).find(foreign).context("another scope has a cached file")?;
    let names = files_below(&node.join("cache/meta"));
    let foreign_names = names
        .iter()
        .find(|path| path.ends_with("data.mdb") && !path.starts_with(own_names))
        .context("names of another scope")?;
    let state = files_below(&node.join("state/agent"));
    Ok(Knowledge {
        agent,
        sibling: sibling.context("another worker")?.parse()?,
        link,
        foreign_file: foreign_file.clone(),
        foreign_names: foreign_names.clone(),
        state_file: state.first().context("the agent has state")?.clone(),
        tier,
        roots,
    })
}

/// Everything below `directory`, links not followed.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let (mut found, mut open) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => open.push(entry.path()),
                Ok(kind) if kind.is_file() => found.push(entry.path()),
                _ => {}
            }
        }
    }
    found.sort();
    found
}
