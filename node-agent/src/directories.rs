//! The agent's directories, which on a node of Kubernetes are made by a privileged part that starts at the same time.

use crate::config::{Config, TierKind};
use anyhow::Result;
use rustix::fs::Access;
use rustix::io::Errno;
use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Between two looks. (The plugin, which makes them, cannot tell us: it may not run yet.)
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// A disk that does not answer within that is asked again, and given its time, when the cache is opened: while an agent
/// starts, calls wait. Memory has the whole time: it is not looked at again.
const LOOK_LIMIT: Duration = Duration::from_secs(3);
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Why a directory is not ready. Only what may pass is waited for.
#[derive(Debug, thiserror::Error)]
enum NotReady {
    #[error("{} does not exist and cannot be made by the agent's user", .0.display())]
    Missing(PathBuf),
    #[error("{} is not writable by the agent's user", .0.display())]
    NotOurs(PathBuf),
    #[error("{} is not a tmpfs, which a tier of kind \"memory\" must be", .0.display())]
    NotInMemory(PathBuf),
}

/// Returns when everything is there that may still come. A cache disk that fails is not waited for: the agent works
/// without it.
pub(crate) async fn wait(config: &Config) -> Result<()> {
    let limit = config.agent.directories_wait.0;
    let begun = Instant::now();
    let mut logged = false;
    let mut hanging = HashSet::new();
    loop {
        let mut looked = ready(config);
        for tier in &config.cache.tiers {
            let paths: Vec<_> = tier.paths.iter().filter(|path| !hanging.contains(*path)).cloned().collect();
            let limit = match tier.kind == TierKind::Memory {
                true => config.disk_timeout(),
                false => config.disk_timeout().min(LOOK_LIMIT),
            };
            for (path, found) in look_within(limit, paths, tier.kind).await {
                match found {
                    Some(found) => looked = looked.and(found),
                    // Nor is a cache disk that hangs: opening the cache finds that out, and says so.
                    None => drop(hanging.insert(path)),
                }
            }
        }
        let Err(why) = looked else { return Ok(()) };
        anyhow::ensure!(
            begun.elapsed() < limit,
            "{why}, and csi-plugin has not made it so within {limit:?}: is the csi-plugin of this node running, with --own-dir and --memory-tier for it and --agent-uid {}?",
            rustix::process::getuid().as_raw()
        );
        if !std::mem::replace(&mut logged, true) {
            tracing::info!(%why, "waiting for directories");
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn ready(config: &Config) -> Result<(), NotReady> {
    let own = [&config.agent.state_dir, &config.cache.metadata_dir];
    let socket = config.agent.api_socket.parent();
    own.into_iter().map(PathBuf::as_path).chain(socket).try_for_each(look)
}

/// Looks at cache directories, each from a thread that its disk may keep. None: it does not answer.
async fn look_within(
    limit: Duration,
    paths: Vec<PathBuf>,
    kind: TierKind,
) -> Vec<(PathBuf, Option<Result<(), NotReady>>)> {
    let looks = paths.into_iter().map(|path| async move {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let at = path.clone();
        let thread = std::thread::Builder::new().name("look".into()).spawn(move || {
            let found = look(&at).and_then(|()| match kind == TierKind::Memory && !is_tmpfs(&at) {
                true => Err(NotReady::NotInMemory(at)),
                false => Ok(()),
            });
            let _ = sender.send(found); // the waiter has gone
        });
        let found = match thread {
            Ok(_) => tokio::time::timeout(limit, receiver).await.ok().and_then(Result::ok),
            Err(_) => None,
        };
        (path, found)
    });
    futures::future::join_all(looks).await
}

fn look(path: &Path) -> Result<(), NotReady> {
    match std::fs::create_dir_all(path) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            return Err(NotReady::Missing(path.to_owned()));
        }
        // Read-only, broken, no directory: its first use says what to do.
        _ => {}
    }
    match rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK) {
        Err(Errno::ACCESS) => Err(NotReady::NotOurs(path.to_owned())),
        _ => Ok(()),
    }
}

fn is_tmpfs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| found.f_type as u64 == TMPFS_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(root: &Path, memory: &Path) -> Config {
        let text = format!(
            r#"
            [agent]
            api_socket = "{0}/run/api.sock"
            state_dir = "{0}/state"
            directories_wait = "0s"
            [cache]
            metadata_dir = "{0}/metadata"
            [[cache.tiers]]
            name = "memory"
            kind = "memory"
            paths = ["{1}"]
            quota = "1Gi"
            "#,
            root.display(),
            memory.display()
        );
        toml::from_str(&text).unwrap()
    }

    #[tokio::test]
    async fn a_memory_tier_on_a_disk_is_not_filled() {
        let root = tempfile::tempdir().unwrap();
        let disk = config(root.path(), &root.path().join("tier"));
        let error = wait(&disk).await.unwrap_err().to_string();
        assert!(error.contains("not a tmpfs") && error.contains("--memory-tier"), "{error}");
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        wait(&config(root.path(), memory.path())).await.unwrap();
        assert!(root.path().join("state").is_dir());
    }
}
