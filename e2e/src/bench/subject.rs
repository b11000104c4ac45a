//! Who is measured: the native file system, Millpond, and the peers that are installed.

use crate::clock::wait_until;
use crate::node::{BUCKET, Mounted, Node, secrets};
use crate::processes::{self, Memory};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use testkit::process::Process;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Who {
    Native,
    Millpond,
    MountS3,
    S3fs,
    Rclone,
}

impl Who {
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Millpond => "millpond",
            Self::MountS3 => "mount-s3",
            Self::S3fs => "s3fs",
            Self::Rclone => "rclone",
        }
    }

    /// Native and Millpond always; a peer where its program is found.
    pub fn present() -> Vec<Self> {
        let installed = |who: &Self| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            matches!(who, Self::Native | Self::Millpond)
                || std::env::split_paths(&path).any(|dir| dir.join(who.name()).is_file())
        };
        let all = [Self::Native, Self::Millpond, Self::MountS3, Self::S3fs, Self::Rclone];
        all.into_iter().filter(installed).collect()
    }
}

/// A mounted prefix of the bucket.
pub struct Subject {
    pub who: Who,
    pub root: PathBuf,
    mounted: Option<Mounted>,
    peer: Option<Process>,
}

impl Subject {
    /// Each call with a prefix that was not mounted before starts cold.
    pub fn mount(node: &mut Node, who: Who, prefix: &str, endpoint: &str, profile: &str) -> Result<Self> {
        let mut subject = Self { who, root: PathBuf::new(), mounted: None, peer: None };
        match who {
            Who::Native => subject.root = node.server.dir().join(prefix),
            Who::Millpond => {
                let name = format!("{prefix}-{profile}").replace('/', "-");
                let more = [("endpoint", endpoint), ("profile", profile), ("freshness", "static")];
                let mounted = node.volume(&name, prefix, &more)?;
                subject.root = mounted.target.clone();
                subject.mounted = Some(mounted);
            }
            Who::MountS3 | Who::S3fs | Who::Rclone => {
                let scratch = node
                    .places()
                    .root()
                    .join("peers")
                    .join(format!("{}-{prefix}", who.name()).replace('/', "-"));
                let (dir, cache) = (scratch.join("mount"), scratch.join("cache"));
                for d in [&dir, &cache] {
                    std::fs::create_dir_all(d)?;
                }
                let mut command = peer_command(who, prefix, endpoint, &dir, &cache)?;
                let log = std::fs::File::create(node.places().log(who.name()))?;
                let process = Process::spawn(command.stdout(log.try_clone()?).stderr(log))?;
                let before = std::fs::metadata(&scratch)?;
                let mounted = wait_until(Duration::from_secs(30), || {
                    use std::os::unix::fs::MetadataExt;
                    std::fs::metadata(&dir).is_ok_and(|now| now.dev() != before.dev())
                });
                ensure!(mounted, "{} did not mount: {}", who.name(), node.places().logs());
                subject.root = dir;
                subject.peer = Some(process);
            }
        }
        Ok(subject)
    }

    pub fn unmount(mut self, node: &mut Node) -> Result<()> {
        if let Some(mounted) = &self.mounted {
            node.unpublish(mounted)?;
        }
        if let Some(peer) = self.peer.take() {
            rustix::mount::unmount(&self.root, rustix::mount::UnmountFlags::DETACH)
                .context("unmount a peer")?;
            drop(peer);
        }
        Ok(())
    }

    /// Of all processes that serve this subject.
    pub fn memory(&self, node: &Node) -> Memory {
        match (&self.peer, self.who) {
            (Some(peer), _) => {
                let mut memory = Memory::of(peer.pid());
                for child in processes::children(peer.pid()) {
                    memory += Memory::of(child);
                }
                memory
            }
            (None, Who::Millpond) => node.agent().memory(),
            (None, _) => Memory::default(),
        }
    }

    pub fn cpu_time(&self, node: &Node) -> Duration {
        match (&self.peer, self.who) {
            (Some(peer), _) => processes::cpu_time(peer.pid()),
            (None, Who::Millpond) => node.agent().cpu_time(),
            (None, _) => Duration::ZERO,
        }
    }
}

fn peer_command(who: Who, prefix: &str, endpoint: &str, dir: &PathBuf, cache: &PathBuf) -> Result<Command> {
    let [(_, id), (_, key)] = secrets();
    let mut command = Command::new(who.name());
    // Neither a proxy nor credentials of the benchmark's user.
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env_clear().env("PATH", path).env("HOME", cache);
    match who {
        Who::MountS3 => {
            command.arg(BUCKET).arg(dir).args([
                "--foreground",
                "--read-only",
                "--force-path-style",
                "--allow-other",
            ]);
            command.args(["--endpoint-url", endpoint, "--region", "us-east-1"]);
            command.arg("--prefix").arg(format!("{prefix}/")).arg("--cache").arg(cache);
            command.env("AWS_ACCESS_KEY_ID", id).env("AWS_SECRET_ACCESS_KEY", key);
        }
        Who::S3fs => {
            let passwords = cache.with_extension("passwd");
            std::fs::write(&passwords, format!("{id}:{key}\n"))?;
            std::fs::set_permissions(&passwords, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
            // Directories without objects of their own: asked for by name since 1.91, always shown before.
            let help = Command::new(who.name()).arg("--help").output()?.stdout;
            let named =
                String::from_utf8_lossy(&help).lines().any(|l| l.trim_start().starts_with("compat_dir"));
            let options = format!(
                "url={endpoint},use_path_request_style,passwd_file={},ro,use_cache={},allow_other,listobjectsv2{}",
                passwords.display(),
                cache.display(),
                if named { ",compat_dir" } else { "" }
            );
            command.arg(format!("{BUCKET}:/{prefix}")).arg(dir).args(["-f", "-o", &options]);
        }
        Who::Rclone => {
            let remote = format!(
                ":s3,provider=Other,list_version=2,endpoint=\"{endpoint}\",access_key_id={id},secret_access_key={key}:{BUCKET}/{prefix}"
            );
            command.args(["mount", &remote]).arg(dir).args([
                "--read-only",
                "--allow-other",
                "--vfs-cache-mode",
                "full",
            ]);
            command.arg("--cache-dir").arg(cache).args(["--dir-cache-time", "1h", "--config", "/dev/null"]);
        }
        Who::Native | Who::Millpond => anyhow::bail!("{} is not a peer", who.name()),
    }
    command.stdin(Stdio::null());
    Ok(command)
}
