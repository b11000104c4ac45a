//! Downloads without a file system: what the server, the link and the disk give to a program that wants nothing else.

use crate::node::{Protocol, secrets};
use anyhow::{Context, Result, ensure};
use std::fmt::Write as _;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use testkit::process::Process;

/// How curl asks for objects of a node's server.
#[derive(Clone, Debug)]
pub(super) struct Curl {
    pub(super) program: PathBuf,
    pub(super) store: Protocol,
    pub(super) endpoint: String,
    /// PEM; where the endpoint speaks TLS.
    pub(super) authority: Option<PathBuf>,
}

impl Curl {
    /// Each of `parts` by a process of its own, all at once, into the file with its number in `into`; None: to /dev/null.
    pub(super) fn fetch(&self, key: &str, parts: &[Range<u64>], into: Option<&Path>) -> Result<Vec<PathBuf>> {
        let mut running = Vec::with_capacity(parts.len());
        let mut files = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let to = into.map_or_else(|| "/dev/null".into(), |dir| dir.join(number.to_string()));
            let mut command = self.part(key, part, &to);
            running.push((Process::spawn(command.stdout(Stdio::piped()))?, part));
            files.extend(into.is_some().then_some(to));
        }
        for (process, part) in &mut running {
            let mut said = String::new();
            let stdout = process.child().stdout.take().context("curl's output is a pipe")?;
            { stdout }.read_to_string(&mut said)?;
            let status = process.child().wait()?;
            let wanted = part.end - part.start;
            ensure!(
                status.success() && said.parse() == Ok(wanted),
                "curl of {key}: {status}, {said} bytes of {wanted}"
            );
        }
        Ok(files)
    }

    /// The objects `names` below `prefix` into files of the same names below `into`, by one process with so many connections.
    pub(super) fn fetch_all(
        &self,
        prefix: &str,
        names: &[String],
        at_once: usize,
        into: &Path,
    ) -> Result<()> {
        let mut list = String::new();
        for name in names {
            let url = self.url(&format!("{prefix}/{name}"));
            writeln!(list, "url = \"{url}\"\noutput = \"{}\"", into.join(name).display())?;
        }
        let path = into.join("objects");
        std::fs::write(&path, list)?;
        let mut command = self.command();
        command.args(["--parallel", "--parallel-max", &at_once.to_string(), "--create-dirs", "--config"]);
        let mut process = Process::spawn(command.arg(path))?;
        let status = process.child().wait()?;
        ensure!(status.success(), "curl of {} objects below {prefix}: {status}", names.len());
        Ok(())
    }

    /// Each file to an object of its name below `prefix`, by a process of its own, all at once. Without a signature.
    pub(super) fn upload(&self, prefix: &str, files: &[PathBuf]) -> Result<()> {
        let mut running = Vec::with_capacity(files.len());
        for file in files {
            let name = file.file_name().context("a file has a name")?.to_string_lossy();
            let mut command = self.unsigned();
            // Without asking first whether it may send: the round trip more is no part of a good upload.
            command.args(["--header", "Expect:", "--upload-file"]).arg(file);
            command.arg(self.url(&format!("{prefix}/{name}"))).stdout(Stdio::null());
            running.push(Process::spawn(&mut command)?);
        }
        for process in &mut running {
            let status = process.child().wait()?;
            ensure!(status.success(), "curl to {prefix}: {status}");
        }
        Ok(())
    }

    fn part(&self, key: &str, part: &Range<u64>, to: &Path) -> Command {
        let mut command = self.command();
        command.args(["--range", &format!("{}-{}", part.start, part.end - 1)]);
        command.args(["--write-out", "%{size_download}", "--output"]).arg(to);
        command.arg(self.url(key));
        command
    }

    fn url(&self, key: &str) -> String {
        self.store.url(&self.endpoint, key)
    }

    fn command(&self) -> Command {
        let mut command = self.unsigned();
        // It knows no other store's signature: those servers answer without one.
        if self.store == Protocol::S3 {
            let [(_, id), (_, secret)] = secrets();
            command.args(["--aws-sigv4", "aws:amz:us-east-1:s3", "--user", &format!("{id}:{secret}")]);
            command.args(["--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]);
        }
        command
    }

    /// What is the same whatever it does.
    fn unsigned(&self) -> Command {
        let mut command = Command::new(&self.program);
        // -q: without the settings of the benchmark's user.
        command.args(["-q", "--silent", "--no-progress-meter", "--show-error", "--fail", "--noproxy", "*"]);
        if let Some(authority) = &self.authority {
            command.arg("--cacert").arg(authority);
        }
        command
    }
}

/// `count` neighbours that make up `bytes`, none of them empty.
pub(super) fn parts(bytes: u64, count: u64) -> Vec<Range<u64>> {
    let of_each = bytes.div_ceil(count).max(1);
    (0..bytes.div_ceil(of_each)).map(|k| k * of_each..((k + 1) * of_each).min(bytes)).collect()
}

/// What an application would do with the files: reads them, one after the other.
pub(super) fn cat(files: &[PathBuf]) -> Result<()> {
    let mut process = Process::spawn(Command::new("cat").args(files).stdout(Stdio::null()))?;
    let status = process.child().wait()?;
    ensure!(status.success(), "cat: {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_every_byte_once() {
        for (bytes, count) in [(2_147_483_648, 32), (100, 8), (5, 8), (4097, 32)] {
            let parts = parts(bytes, count);
            assert!(parts.len() as u64 <= count && parts.iter().all(|part| !part.is_empty()));
            assert_eq!(parts.iter().fold(0, |end, part| if part.start == end { part.end } else { 0 }), bytes);
        }
        assert!(parts(0, 8).is_empty());
    }
}
