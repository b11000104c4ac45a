//! Other file systems over the same server: where their programs are, and how they are started.

use super::who::Who;
use crate::node::{BUCKET, secrets};
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A program in PATH.
pub(super) fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// "curl 7.88.1"; the program's name alone where it tells no version.
pub(super) fn version(program: &Path) -> String {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    match version_in(&text) {
        Some(version) => format!("{name} {version}"),
        None => name.into_owned(),
    }
}

/// The first word that begins with a number, after a `v` maybe.
fn version_in(text: &str) -> Option<&str> {
    let mut words = text.split_whitespace().map(|word| word.trim_start_matches(['v', 'V']));
    words.find(|word| word.starts_with(|c: char| c.is_ascii_digit()))
}

/// What a mount is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// Shows `prefix` of the server's bucket at `dir` and stays in the foreground.
pub(super) fn command(
    who: Who,
    access: Access,
    program: &Path,
    (prefix, endpoint): (&str, &str),
    dir: &Path,
    cache: &Path,
) -> Result<Command> {
    let [(_, id), (_, key)] = secrets();
    let mut command = Command::new(program);
    // Neither a proxy nor credentials of the benchmark's user.
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env_clear().env("PATH", path).env("HOME", cache);
    match who {
        Who::MountS3 => {
            let may: &[&str] = match access {
                Access::Read => &["--read-only"],
                Access::Write => &["--allow-delete", "--allow-overwrite"],
            };
            command
                .arg(BUCKET)
                .arg(dir)
                .args(["--foreground", "--force-path-style", "--allow-other"])
                .args(may);
            command.args(["--endpoint-url", endpoint, "--region", "us-east-1"]);
            command.arg("--prefix").arg(format!("{prefix}/")).arg("--cache").arg(cache);
            command.env("AWS_ACCESS_KEY_ID", id).env("AWS_SECRET_ACCESS_KEY", key);
        }
        Who::S3fs => {
            let passwords = cache.with_extension("passwd");
            std::fs::write(&passwords, format!("{id}:{key}\n"))?;
            std::fs::set_permissions(&passwords, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
            // Directories without objects of their own: asked for by name since 1.91, always shown before.
            let help = Command::new(program).arg("--help").output()?.stdout;
            let named =
                String::from_utf8_lossy(&help).lines().any(|l| l.trim_start().starts_with("compat_dir"));
            let options = format!(
                "url={endpoint},use_path_request_style,passwd_file={},use_cache={},allow_other,listobjectsv2{}{}",
                passwords.display(),
                cache.display(),
                if named { ",compat_dir" } else { "" },
                if access == Access::Read { ",ro" } else { "" }
            );
            command.arg(format!("{BUCKET}:/{prefix}")).arg(dir).args(["-f", "-o", &options]);
        }
        Who::Rclone => {
            let remote = format!(
                ":s3,provider=Other,list_version=2,endpoint=\"{endpoint}\",access_key_id={id},secret_access_key={key}:{BUCKET}/{prefix}"
            );
            let mode: &[&str] = match access {
                Access::Read => &["--read-only", "--vfs-cache-mode", "full"],
                // The server's ETags are as long as MD5 sums and are none, and rclone takes what it sent for damaged.
                Access::Write => &["--vfs-cache-mode", "writes", "--ignore-checksum"],
            };
            command.args(["mount", &remote]).arg(dir).arg("--allow-other").args(mode);
            command.arg("--cache-dir").arg(cache).args(["--dir-cache-time", "1h", "--config", "/dev/null"]);
        }
        _ => anyhow::bail!("{} is not a peer", who.name()),
    }
    command.stdin(Stdio::null());
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_programs_say() {
        let said = "Amazon Simple Storage Service File System V1.90 (commit:unknown) with GnuTLS(gcrypt)";
        assert_eq!(version_in(said), Some("1.90"));
        assert_eq!(version_in("rclone v1.60.1-DEV\n- os/version: debian 12.11"), Some("1.60.1-DEV"));
        assert_eq!(version_in("curl 7.88.1 (x86_64-pc-linux-gnu) libcurl/7.88.1"), Some("7.88.1"));
        assert_eq!(version_in("what?"), None);
    }
}
