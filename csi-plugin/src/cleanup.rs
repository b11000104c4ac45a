//! `--mode cleanup`: takes away what Millpond keeps on a node, before it is uninstalled. The cache is left and named,
//! unless it is asked for.

use crate::config::CleanupConfig;
use mounts::{MemoryTier, MountEntry, Ours, parse_mountinfo};
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Where the agent's state directory has its staging areas.
const STAGING: &str = "staging";
/// Directories of ours by name: removed when nothing is left in them.
const OUR_NAME: &str = "millpond";

/// Says what it does on standard output, and why it refuses on standard error.
pub fn run(config: &CleanupConfig) -> ExitCode {
    match clean(config) {
        Ok(lines) => {
            for line in &lines {
                let _ = writeln!(io::stdout(), "{line}"); // it is done, whether or not the line is read
            }
            ExitCode::SUCCESS
        }
        Err(why) => {
            // As it is, and not as an event: a person reads it.
            startup::log::say(&format!("csi-plugin: {why}"));
            ExitCode::FAILURE
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    #[error("volumes are still mounted on this node: delete the pods that use them, then run this again\n{}", .0.iter().map(|p| format!("  {}", p.display())).collect::<Vec<_>>().join("\n"))]
    Mounted(Vec<PathBuf>),
    #[error(
        "the csi-plugin of this node still runs ({} answers): delete Millpond's DaemonSets first (kubectl -n millpond-system delete daemonset --all), then run this again",
        .0.display()
    )]
    Running(PathBuf),
    #[error(
        "something that was written on this node is not in its store yet: apply Millpond's manifests again, and upload, export or discard it (millpond staging, docs/operations.md), then run this again; with --discard-staging it is lost\n{}",
        .0.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
    )]
    Waits(Vec<String>),
    #[error(
        "it is not known whether something that was written on this node is not in its store yet ({0}): with --discard-staging it is lost if there is"
    )]
    Unknown(String),
    #[error("cannot remove {}: {source}", path.display())]
    Remove { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Kernel(#[from] mounts::KernelError),
    #[error("cannot read the mount table: {0}")]
    Table(io::Error),
}

/// What was done, a line each.
pub fn clean(config: &CleanupConfig) -> Result<Vec<String>, CleanupError> {
    let table = parse_mountinfo(&fs::read("/proc/self/mountinfo").map_err(CleanupError::Table)?);
    let mounted = published(&table, &config.kubelet_dirs);
    if !mounted.is_empty() {
        return Err(CleanupError::Mounted(mounted));
    }
    if link::Packet::connect(&config.broker_socket).is_ok() {
        return Err(CleanupError::Running(config.broker_socket.clone()));
    }
    if !config.discard_staging {
        let waits = config
            .own_dirs
            .iter()
            .map(|dir| what_waits(dir, config))
            .collect::<Result<Vec<_>, _>>()?
            .concat();
        if !waits.is_empty() {
            return Err(CleanupError::Waits(waits));
        }
    }

    let mut done = Vec::new();
    if let Some(path) = &config.memory_tier {
        if MemoryTier::unmount(path)? {
            done.push(format!("unmounted {}", path.display()));
        }
        remove(path, &mut done)?;
    }
    for path in config.own_dirs.iter().chain([&config.state_dir]) {
        if !config.with_cache && is_cache(path, config) {
            continue;
        }
        remove(path, &mut done)?;
    }
    for socket in [&config.broker_socket, &config.endpoint] {
        remove(socket, &mut done)?;
    }
    let all = config.own_dirs.iter().chain(&config.memory_tier);
    for path in all.chain([&config.state_dir, &config.broker_socket, &config.endpoint]) {
        remove_empty_parents(path, &config.driver_name, &mut done);
    }
    for path in config.own_dirs.iter().filter(|path| is_cache(path, config) && path.exists()) {
        done.push(format!("left: the cache in {} (--cache removes it too)", path.display()));
    }
    Ok(done)
}

/// In the staging areas of this directory, a line for each volume: as the agent's own program tells it, for their form is its own.
fn what_waits(dir: &Path, config: &CleanupConfig) -> Result<Vec<String>, CleanupError> {
    let is_empty = match fs::read_dir(dir.join(STAGING)) {
        Ok(mut entries) => entries.next().is_none(),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => true,
        Err(e) => return Err(CleanupError::Unknown(format!("{}: {e}", dir.display()))),
    };
    if is_empty {
        return Ok(Vec::new());
    }
    let asked = Command::new(&config.agent).arg("--waiting").arg(dir).stdin(Stdio::null()).output();
    let told = asked.map_err(|e| CleanupError::Unknown(format!("{}: {e}", config.agent.display())))?;
    match told.status.success() {
        true => Ok(String::from_utf8_lossy(&told.stdout).lines().map(str::to_owned).collect()),
        false => Err(CleanupError::Unknown(String::from_utf8_lossy(&told.stderr).trim().to_owned())),
    }
}

/// Mounts of ours that pods may use.
fn published(table: &[MountEntry], kubelet_dirs: &[PathBuf]) -> Vec<PathBuf> {
    let ours = |e: &&MountEntry| {
        let fuse = matches!(e.ours(), Some(Ours::Fuse(_) | Ours::Guard { .. }));
        fuse && kubelet_dirs.iter().any(|dir| e.mount_point.starts_with(dir))
    };
    let mut found: Vec<PathBuf> = table.iter().filter(ours).map(|e| e.mount_point.clone()).collect();
    found.sort();
    found.dedup();
    found
}

/// A directory with cache roots in it, or one of them. A tier in memory is no cache that could be kept.
fn is_cache(path: &Path, config: &CleanupConfig) -> bool {
    let kept = |root: &&PathBuf| config.memory_tier.as_ref() != Some(root);
    config.cache_roots.iter().filter(kept).any(|root| root.starts_with(path) || path.starts_with(root))
}

/// A missing one is a success. Links are removed, never followed.
fn remove(path: &Path, done: &mut Vec<String>) -> Result<(), CleanupError> {
    let failed = |source| CleanupError::Remove { path: path.to_owned(), source };
    let kind = match fs::symlink_metadata(path) {
        Ok(found) => found.file_type(),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed(e)),
    };
    if kind.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.map_err(failed)?;
    done.push(format!("removed {}", path.display()));
    Ok(())
}

/// Upwards, as long as they are empty and named like us.
fn remove_empty_parents(path: &Path, driver_name: &str, done: &mut Vec<String>) {
    let ours = |dir: &&Path| dir.file_name().is_some_and(|name| name == OUR_NAME || name == driver_name);
    for dir in path.ancestors().skip(1).take_while(ours) {
        match fs::remove_dir(dir) {
            Ok(()) => done.push(format!("removed {}", dir.display())),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            // Not empty, or a mount point of this container.
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(root: &Path) -> CleanupConfig {
        let lib = root.join("lib/millpond");
        let run = root.join("run/millpond");
        let own = ["cache", "metadata", "state"].map(|name| lib.join(name));
        for dir in &own {
            fs::create_dir_all(dir.join("some/content")).unwrap();
        }
        fs::create_dir_all(lib.join("csi/targets")).unwrap();
        fs::create_dir_all(run.join("agent")).unwrap();
        fs::create_dir_all(root.join("plugins/csi.millpond.io")).unwrap();
        for socket in ["run/millpond/broker.sock", "plugins/csi.millpond.io/csi.sock"] {
            fs::write(root.join(socket), b"").unwrap();
        }
        CleanupConfig {
            kubelet_dirs: vec![root.join("kubelet")],
            state_dir: lib.join("csi"),
            broker_socket: run.join("broker.sock"),
            endpoint: root.join("plugins/csi.millpond.io/csi.sock"),
            driver_name: "csi.millpond.io".into(),
            own_dirs: own.into_iter().chain([run.join("agent")]).collect(),
            cache_roots: vec![lib.join("cache")],
            memory_tier: None,
            with_cache: false,
            discard_staging: false,
            agent: root.join("no-agent"),
        }
    }

    /// A program that says this of any directory.
    fn agent_that_says(root: &Path, script: &str) -> PathBuf {
        let path = root.join("agent");
        // Written by another process: what one here has open for writing cannot be executed while a thread beside it forks.
        let write = r#"printf '#!/bin/sh\n%s\n' "$2" > "$1" && chmod 755 "$1""#;
        let written = Command::new("sh").args(["-c", write, "sh"]).arg(&path).arg(script).status();
        assert!(written.unwrap().success());
        path
    }

    fn left(root: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(root)
            .unwrap()
            .flat_map(|dir| fs::read_dir(dir.unwrap().path()).unwrap())
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn everything_goes_but_the_cache_which_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let mut config = node(&root);
        let lines = clean(&config).unwrap();
        let cache = root.join("lib/millpond/cache");
        assert!(
            lines.iter().any(|l| l.starts_with("left") && l.contains(&cache.display().to_string())),
            "{lines:?}"
        );
        assert_eq!(left(&root), ["millpond"]);
        assert_eq!(fs::read_dir(root.join("lib/millpond")).unwrap().count(), 1);
        assert!(cache.join("some/content").exists());

        assert!(clean(&config).is_ok(), "it may run again");
        config.with_cache = true;
        clean(&config).unwrap();
        assert_eq!(left(&root), [""; 0]);
    }

    #[test]
    fn it_refuses_while_the_plugin_runs() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let config = node(&root);
        fs::remove_file(&config.broker_socket).unwrap();
        let _listener = link::Packet::listen(&config.broker_socket).unwrap();
        let error = clean(&config).unwrap_err();
        assert!(matches!(error, CleanupError::Running(_)));
        assert!(error.to_string().contains("DaemonSets first"), "{error}");
        assert!(config.state_dir.exists());
    }

    #[test]
    fn it_refuses_while_something_waits_for_its_store() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let mut config = node(&root);
        let state = root.join("lib/millpond/state");
        fs::create_dir(state.join(STAGING)).unwrap();
        assert!(what_waits(&state, &config).unwrap().is_empty(), "nothing was ever written: nobody is asked");
        fs::create_dir(state.join(STAGING).join("pvc-1")).unwrap();
        let error = clean(&config).unwrap_err();
        assert!(matches!(error, CleanupError::Unknown(_)), "{error}");
        let others = dir.path().join("programs");
        fs::create_dir(&others).unwrap();
        config.agent = agent_that_says(&others, "echo \"$1 $(basename $2)\"; echo volume pvc-1: 3 files");
        let error = clean(&config).unwrap_err();
        assert!(
            matches!(&error, CleanupError::Waits(lines) if *lines == ["--waiting state", "volume pvc-1: 3 files"]),
            "{error}"
        );
        assert!(error.to_string().contains("--discard-staging"), "{error}");
        config.agent = agent_that_says(&others, "echo its disk fails >&2; exit 1");
        let error = clean(&config).unwrap_err();
        assert!(matches!(&error, CleanupError::Unknown(why) if why == "its disk fails"), "{error}");
        assert!(state.exists() && config.state_dir.exists(), "nothing was removed");
        config.discard_staging = true;
        clean(&config).unwrap();
        assert!(!state.exists());
    }

    #[test]
    fn it_refuses_while_volumes_are_mounted_and_names_them() {
        let entry = |at: &str, fs_type: &str, source: &str| MountEntry {
            id: 1,
            parent: 0,
            major: 0,
            minor: 1,
            root: "/".into(),
            mount_point: at.into(),
            fs_type: fs_type.into(),
            source: source.into(),
            attributes: mounts::Attributes::default(),
        };
        let table = [
            entry("/var/lib/kubelet/pods/a/mount", "tmpfs", "millpond-guard:v"),
            entry("/var/lib/kubelet/pods/a/mount", mounts::FUSE_TYPE, "millpond:v:0"),
            entry("/var/lib/kubelet/pods/b/mount", "tmpfs", "tmpfs"),
            entry("/mnt/laptop", mounts::FUSE_TYPE, "millpond:v:0"),
        ];
        let found = published(&table, &["/var/lib/kubelet".into()]);
        assert_eq!(found, [PathBuf::from("/var/lib/kubelet/pods/a/mount")]);
        assert!(CleanupError::Mounted(found).to_string().contains("pods/a/mount"));
    }
}
