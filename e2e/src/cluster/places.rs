//! Where the suite's cluster lives: the cache of built programs, and one directory a run with everything that must not stay.

use crate::{clock, mountinfo};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const PREFIX: &str = "millpond-cluster-";
const CGROUPS: &str = "/sys/fs/cgroup";
/// What kubelet and kube-proxy would change for the whole machine.
const SYSCTLS: &[&str] = &[
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

#[derive(Debug)]
pub struct Places {
    /// The checkout: scripts, manifests.
    source: PathBuf,
    cache: PathBuf,
    root: PathBuf,
    programs: BTreeMap<String, PathBuf>,
    sysctls: Vec<(&'static str, String)>,
}

impl Places {
    /// Builds or fetches what is missing (minutes the first time), then makes this run's directory.
    pub fn create(source: &Path, cache: &Path) -> Result<Self> {
        let (source, cache) = (source.canonicalize()?, absolute(cache)?);
        fs::create_dir_all(&cache).with_context(|| format!("the cache directory {}", cache.display()))?;
        sweep(&cache)?;
        run(Command::new(source.join("e2e/cluster/programs")).arg(&cache))?;
        let programs = read_env(&cache.join("programs.env"))?;
        let root = cache.join(format!("{PREFIX}{}", std::process::id()));
        let sysctls = SYSCTLS.iter().map(|&name| (name, sysctl(name))).collect();
        let places = Self { source, cache, root, programs, sysctls };
        for dir in ["disk", "run", "logs", "bucket"] {
            fs::create_dir_all(places.root.join(dir))?;
        }
        let debian = places.program_dir("DEBIAN")?;
        run(Command::new(places.script("configure")).arg(&places.root).arg(debian))?;
        Ok(places)
    }

    pub fn source(&self) -> &Path {
        &self.source
    }
    pub fn cache(&self) -> &Path {
        &self.cache
    }
    pub fn root(&self) -> &Path {
        &self.root
    }
    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }
    pub fn script(&self, name: &str) -> PathBuf {
        self.source.join("e2e/cluster").join(name)
    }
    pub fn kubeconfig(&self) -> PathBuf {
        self.root.join("etc/admin.kubeconfig")
    }
    /// The folder of a group of programs (KUBERNETES, SIDECARS, HELM, DEBIAN).
    pub fn program_dir(&self, group: &str) -> Result<&Path> {
        self.programs.get(group).map(PathBuf::as_path).with_context(|| format!("programs.env has no {group}"))
    }
    /// `PATH` additions for what runs in the node.
    pub fn path(&self) -> Result<String> {
        let debian = self.program_dir("DEBIAN")?.display();
        Ok(format!("{}:{debian}/usr/bin:{debian}/usr/sbin", self.program_dir("KUBERNETES")?.display()))
    }

    fn cgroup_name(&self) -> &str {
        self.root.file_name().and_then(|n| n.to_str()).expect("the root is made of ASCII")
    }

    /// kubelet wants its cgroup root to exist in every hierarchy (v1) or in the one (v2).
    pub fn make_cgroups(&self) -> Result<()> {
        for hierarchy in hierarchies() {
            let group = hierarchy.join(self.cgroup_name());
            fs::create_dir_all(&group).with_context(|| group.display().to_string())?;
            // A v1 cpuset starts empty, and nothing can run in an empty one.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if hierarchy.ends_with("cpuset") {
                    fs::write(group.join(file), fs::read(hierarchy.join(file))?)?;
                }
            }
        }
        Ok(())
    }

    /// As a reboot does; what could not be removed is the answer.
    pub fn remove_cgroups(&self) -> Vec<String> {
        remove_cgroups(self.cgroup_name())
    }

    /// Removes everything of this run; says what it found that should have been gone by then.
    pub fn clean(&self) -> Vec<String> {
        let mut left = clean(&self.root);
        for (name, before) in &self.sysctls {
            let now = sysctl(name);
            if now != *before {
                left.push(format!("sysctl {name} changed from {before} to {now}"));
            }
        }
        left
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    Ok(std::path::absolute(path)?)
}

fn sysctl(name: &str) -> String {
    fs::read_to_string(Path::new("/proc/sys").join(name)).unwrap_or_default().trim().to_owned()
}

pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("start {:?}", command.get_program()))?;
    ensure!(status.success(), "{:?} failed: {status}", command.get_program());
    Ok(())
}

fn read_env(path: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let entries = text.lines().filter_map(|l| l.split_once('='));
    Ok(entries.map(|(k, v)| (k.to_owned(), PathBuf::from(v))).collect())
}

/// Where cgroups are made: the controllers' directories of v1, or the one of v2.
fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new(CGROUPS);
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_owned()];
    }
    let mut found: Vec<_> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.is_dir() && p.join("cgroup.procs").exists())
        .collect();
    found.sort();
    found
}

/// Runs of which the process is gone left these.
fn sweep(cache: &Path) -> Result<()> {
    for entry in fs::read_dir(cache)? {
        let entry = entry?;
        let name = entry.file_name();
        let owner = name.to_str().and_then(|n| n.strip_prefix(PREFIX)?.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            eprintln!("e2e: cleaning up after a run that was killed: {}", entry.path().display());
            clean(&entry.path());
        }
    }
    Ok(())
}

fn clean(root: &Path) -> Vec<String> {
    let mut left = Vec::new();
    for mount in mountinfo::below(root).unwrap_or_default().into_iter().rev() {
        left.push(format!("mount {} ({})", mount.point.display(), mount.kind));
        if let Err(e) = rustix::mount::unmount(&mount.point, rustix::mount::UnmountFlags::DETACH) {
            left.push(format!("which failed: {e}"));
        }
    }
    if let Some(name) = root.file_name().and_then(|n| n.to_str()) {
        left.extend(remove_cgroups(name));
    }
    if mountinfo::below(root).is_ok_and(|mounts| mounts.is_empty())
        && let Err(e) = fs::remove_dir_all(root)
    {
        left.push(format!("directory {}: {e}", root.display()));
    }
    left
}

fn remove_cgroups(name: &str) -> Vec<String> {
    let mut left = Vec::new();
    for hierarchy in hierarchies() {
        let group = hierarchy.join(name);
        // The kernel lets go of the last processes a moment after their end.
        let gone = clock::wait_until(Duration::from_secs(10), || {
            remove_cgroup(&group);
            !group.exists()
        });
        if !gone {
            left.push(format!("cgroup {}", group.display()));
        }
    }
    left
}

/// Children first: a cgroup with children cannot be removed. Its files vanish with it.
fn remove_cgroup(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_cgroup(&entry.path());
        }
    }
    let _ = fs::remove_dir(group); // still in use: the caller tries again
}
