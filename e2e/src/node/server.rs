//! The store of a node's tests, as a process of its own, and the proxy that makes it distant.

use super::places::Places;
use crate::tree::Tree;
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tempfile::TempDir;
use testkit::faults::{Fault, Rule, Script};
use testkit::hdfs::{Hdfs, Served};
use testkit::process::Process;
use testkit::s3::{ACCESS_KEY, ACCOUNT_KEY, SECRET_KEY, SERVICE_ACCOUNT_KEY, Stats, key_file};

pub const BUCKET: &str = "data";
const START: Duration = Duration::from_secs(60);

/// What a server speaks. Written as the value of an option is: "s3", "azure".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    #[default]
    S3,
    Oss,
    Gcs,
    Azure,
    /// A web server with nginx's pages.
    Web,
    /// A web server that speaks WebDAV.
    Dav,
    /// Hadoop's, which `scripts/stores` installs.
    Hdfs,
}

impl Protocol {
    /// Those whose server is the testkit's own.
    pub const ALL: [Self; 6] = [Self::S3, Self::Oss, Self::Gcs, Self::Azure, Self::Web, Self::Dav];
    const REGION: &str = "cn-testkit";
    const ACCOUNT: &str = "testkit";

    /// `source`, and `endpoint` where it is not a part of it.
    pub fn address(self, endpoint: &str, prefix: &str) -> Vec<(&'static str, String)> {
        match self {
            Self::Web | Self::Dav | Self::Hdfs => {
                vec![("source", format!("{endpoint}/{BUCKET}/{prefix}"))]
            }
            _ => {
                let source = format!("{}://{BUCKET}/{prefix}", self.name());
                vec![("source", source), ("endpoint", endpoint.to_owned())]
            }
        }
    }

    /// Where a client that knows nothing but HTTP finds the bytes of an object.
    pub fn url(self, endpoint: &str, key: &str) -> String {
        match self {
            Self::S3 | Self::Oss | Self::Web | Self::Dav | Self::Hdfs => {
                format!("{endpoint}/{BUCKET}/{key}")
            }
            // There a key is one segment of the path.
            Self::Gcs => {
                format!("{endpoint}/storage/v1/b/{BUCKET}/o/{}?alt=media", key.replace('/', "%2F"))
            }
            Self::Azure => format!("{endpoint}/{}/{BUCKET}/{key}", Self::ACCOUNT),
        }
    }

    /// The scheme of sources, or what else tells it apart.
    pub fn name(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Oss => "oss",
            Self::Gcs => "gs",
            Self::Azure => "az",
            Self::Web => "web",
            Self::Dav => "dav",
            Self::Hdfs => "hdfs",
        }
    }

    /// Parameters that a class needs for it, besides source and endpoint.
    pub fn parameters(self) -> Vec<(&'static str, &'static str)> {
        match self {
            Self::S3 | Self::Gcs | Self::Web | Self::Dav | Self::Hdfs => Vec::new(),
            Self::Oss => vec![("region", Self::REGION)],
            Self::Azure => vec![("storageAccount", Self::ACCOUNT)],
        }
    }

    fn arguments(self) -> Vec<&'static str> {
        match self {
            Self::S3 => Vec::new(),
            Self::Oss => vec!["--oss", Self::REGION],
            Self::Gcs => vec!["--gcs"],
            Self::Azure => vec!["--azure", Self::ACCOUNT],
            Self::Web => vec!["--web", "html"],
            Self::Dav => vec!["--web", "dav"],
            Self::Hdfs => Vec::new(), // it is another program
        }
    }

    /// Secrets of a publish that a server of this kind accepts.
    pub fn secrets(self) -> Vec<(&'static str, String)> {
        match self {
            Self::S3 | Self::Oss => secrets().map(|(name, value)| (name, value.to_owned())).to_vec(),
            Self::Gcs => vec![("serviceAccountKey", key_file(ACCESS_KEY, SERVICE_ACCOUNT_KEY))],
            Self::Azure => vec![("accountKey", ACCOUNT_KEY.to_owned())],
            Self::Web | Self::Dav => {
                vec![("username", ACCESS_KEY.to_owned()), ("password", SECRET_KEY.to_owned())]
            }
            Self::Hdfs => vec![("hdfsUser", "alice".to_owned())],
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("no protocol is hidden from the command line");
        f.write_str(value.get_name())
    }
}

#[derive(Debug)]
pub struct Server {
    /// None: it is Hadoop.
    process: Option<Process>,
    hadoop: Option<Hadoop>,
    /// Where this side reaches it.
    address: String,
    /// Where its clients do.
    endpoint: String,
    dir: PathBuf,
}

/// Without faults but those that [`Server::hadoop`] is told.
#[derive(Debug)]
struct Hadoop {
    hdfs: Mutex<Hdfs>,
    /// What counts as nothing.
    before: Mutex<Served>,
    _place: TempDir,
}

impl Hadoop {
    /// `mode`: see [`Hdfs::start`].
    fn start(mode: &str, host: Option<&str>) -> Result<Self> {
        let place = tempfile::tempdir()?;
        let hdfs = Hdfs::start_at(mode, place.path(), host)?;
        Ok(Self { hdfs: Mutex::new(hdfs), before: Mutex::default(), _place: place })
    }

    fn hdfs(&self) -> MutexGuard<'_, Hdfs> {
        self.hdfs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn before(&self) -> MutexGuard<'_, Served> {
        self.before.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of files that are put into HDFS: several to a large one.
const BLOCK_BYTES: u64 = 16 << 20;

impl Server {
    /// `name` keeps the files of several servers of one node apart.
    pub fn start(places: &Places, name: &str) -> Result<Self> {
        Self::speaking(Protocol::S3, &[], places, name)
    }

    /// `more`: flags of the server's; of an HDFS its mode.
    pub fn speaking(protocol: Protocol, more: &[&str], places: &Places, name: &str) -> Result<Self> {
        let dir = places.buckets().join(name);
        std::fs::create_dir_all(&dir)?;
        if protocol == Protocol::Hdfs {
            return Self::hdfs(more.first().copied().unwrap_or("plain"), dir);
        }
        let ready = places.root().join("run").join(format!("{name}.address"));
        let _ = std::fs::remove_file(&ready); // of an earlier one of this name
        let mut command = Command::new(places.bin("s3-server"));
        command
            .arg("--dir")
            .arg(&dir)
            .args(protocol.arguments())
            .args(more)
            .args(["--bucket", BUCKET, "--rescan-ms", "200", "--ready-file"])
            .arg(&ready);
        let mut process = spawn(&mut command, places, name)?;
        let address = process.wait_for_ready_file(&ready, START)?;
        let endpoint = format!("http://{address}");
        Ok(Self { process: Some(process), hadoop: None, address, endpoint, dir })
    }

    /// HDFS; see [`Hdfs::start`] for modes. What lies in `dir` is put there by [`Server::rescan`].
    pub fn hdfs(mode: &str, dir: PathBuf) -> Result<Self> {
        // Kerberos' names are of hosts.
        let host = if mode == "kerberos" { "localhost" } else { "127.0.0.1" };
        Self::of_hadoop(Hadoop::start(mode, None)?, host, dir)
    }

    /// The same for clients that are not on this side's loopback: see [`Hdfs::start_at`].
    pub fn hdfs_at(host: &str, dir: PathBuf) -> Result<Self> {
        Self::of_hadoop(Hadoop::start("plain", Some(host))?, host, dir)
    }

    fn of_hadoop(hadoop: Hadoop, host: &str, dir: PathBuf) -> Result<Self> {
        let port = hadoop.hdfs().told.last().cloned().context("a port")?;
        let address = format!("{host}:{port}");
        let endpoint = format!("hdfs://{address}");
        Ok(Self { process: None, hadoop: Some(hadoop), address, endpoint, dir })
    }

    /// A command to the HDFS: see [`Hdfs::say`].
    pub fn hadoop(&self, words: &str) -> Result<String> {
        self.hadoop.as_ref().context("this server is no HDFS")?.hdfs().say(words)
    }

    /// See [`Hdfs::place`].
    pub fn hadoop_place(&self) -> Result<PathBuf> {
        Ok(self.hadoop.as_ref().context("this server is no HDFS")?.hdfs().place().to_owned())
    }

    /// What an HDFS has told of itself: see [`Hdfs::told`].
    pub fn told(&self) -> Vec<String> {
        self.hadoop.as_ref().map(|hadoop| hadoop.hdfs().told.clone()).unwrap_or_default()
    }

    /// A server outside a node's directory, for clients that are not on this side's loopback.
    pub fn listening(
        protocol: Protocol,
        program: &Path,
        listen: &str,
        bucket: &str,
        dir: PathBuf,
        log: &Path,
    ) -> Result<Self> {
        std::fs::create_dir_all(&dir)?;
        let ready = log.with_extension("address");
        let _ = std::fs::remove_file(&ready); // of a server before
        let log = File::options().create(true).append(true).open(log)?;
        let mut command = Command::new(program);
        command.args(["--listen", listen, "--bucket", bucket, "--rescan-ms", "200"]);
        command.args(protocol.arguments()).arg("--dir").arg(&dir).arg("--ready-file").arg(&ready);
        let mut process = Process::spawn(command.stdout(log.try_clone()?).stderr(log))?;
        let address = process.wait_for_ready_file(&ready, START)?;
        let endpoint = format!("http://{address}");
        Ok(Self { process: Some(process), hadoop: None, address, endpoint, dir })
    }

    /// A server that runs elsewhere, behind a process (`kubectl port-forward`) that makes it reachable at `address`.
    pub fn behind(mut process: Process, address: String, endpoint: String) -> Result<Self> {
        process.wait_until(START, || TcpStream::connect(&address).ok())?;
        Ok(Self { process: Some(process), hadoop: None, address, endpoint, dir: PathBuf::new() })
    }

    /// A bucket of `objects` objects whose names and bytes are computed: `{n}` in `pattern` is the number.
    pub fn synthetic(places: &Places, objects: u64, object_bytes: u64, pattern: &str) -> Result<Self> {
        let ready = places.root().join("run/synthetic.address");
        let _ = std::fs::remove_file(&ready); // of one before
        let mut command = Command::new(places.bin("s3-server"));
        command.arg("--synthetic").args([objects, object_bytes].map(|n| n.to_string()));
        command.args(["--pattern", pattern, "--bucket", BUCKET, "--ready-file"]).arg(&ready);
        let mut process = spawn(&mut command, places, "synthetic")?;
        let address = process.wait_for_ready_file(&ready, START)?;
        let endpoint = format!("http://{address}");
        Ok(Self { process: Some(process), hadoop: None, address, endpoint, dir: PathBuf::new() })
    }

    /// An empty bucket in memory, which answers whoever asks: what is written to it touches no disk.
    pub fn in_memory(places: &Places, name: &str) -> Result<Self> {
        let ready = places.root().join("run").join(format!("{name}.address"));
        let _ = std::fs::remove_file(&ready); // of an earlier one of this name
        let mut command = Command::new(places.bin("s3-server"));
        command.args(["--memory", "--anonymous", "--bucket", BUCKET, "--ready-file"]).arg(&ready);
        let mut process = spawn(&mut command, places, name)?;
        let address = process.wait_for_ready_file(&ready, START)?;
        let endpoint = format!("http://{address}");
        Ok(Self { process: Some(process), hadoop: None, address, endpoint, dir: PathBuf::new() })
    }

    /// `http://host:port`
    pub fn endpoint(&self) -> String {
        self.endpoint.clone()
    }
    pub fn address(&self) -> &str {
        &self.address
    }
    /// None: it runs elsewhere.
    pub fn pid(&self) -> Option<u32> {
        let hadoop = || self.hadoop.as_ref().map(|hadoop| hadoop.hdfs().pid());
        self.process.as_ref().map(Process::pid).or_else(hadoop)
    }
    /// The directory whose files are the bucket's objects.
    pub fn dir(&self) -> &PathBuf {
        &self.dir
    }

    /// Where the object of this key lies.
    pub fn file(&self, key: &str) -> PathBuf {
        self.dir.join(key)
    }

    /// Writes the files of `tree` below `prefix` ("" or "a/b"); the next listing shows them.
    pub fn add(&self, tree: &Tree, prefix: &str) -> Result<()> {
        tree.write(&self.dir.join(prefix))?;
        match &self.hadoop {
            Some(hadoop) => {
                let to = format!("/{BUCKET}/{prefix}");
                hadoop.hdfs().put_tree(to.trim_end_matches('/'), &self.dir.join(prefix), BLOCK_BYTES)
            }
            None => self.rescan(),
        }
    }

    pub fn stats(&self) -> Result<Stats> {
        if let Some(hadoop) = &self.hadoop {
            let (now, before) = (hadoop.hdfs().served()?, *hadoop.before());
            let questions = now.questions - before.questions;
            return Ok(Stats {
                requests: [("questions".to_owned(), questions)].into(),
                bytes_get: now.bytes - before.bytes,
                ..Stats::default()
            });
        }
        Ok(serde_json::from_str(&self.control("GET", "/_stats", "")?)?)
    }

    pub fn reset(&self) -> Result<()> {
        if let Some(hadoop) = &self.hadoop {
            let now = hadoop.hdfs().served()?;
            *hadoop.before() = now;
            return Ok(());
        }
        self.control("POST", "/_reset", "").map(drop)
    }

    /// Listings show what is in the directory now.
    pub fn rescan(&self) -> Result<()> {
        if let Some(hadoop) = &self.hadoop {
            return hadoop.hdfs().put_tree(&format!("/{BUCKET}"), &self.dir, BLOCK_BYTES);
        }
        self.control("POST", "/_rescan", "").map(drop)
    }

    pub fn set_faults(&self, script: &Script) -> Result<()> {
        self.control("POST", "/_faults", &serde_json::to_string(script)?).map(drop)
    }

    pub fn no_faults(&self) -> Result<()> {
        self.set_faults(&Script::default())?;
        self.control("POST", "/_release", "").map(drop)
    }

    /// Every request hangs until [`Server::no_faults`].
    /// Until the answer is dropped, also where something fails meanwhile: a process that waits could not be ended.
    pub fn frozen(&self) -> Result<Frozen<'_>> {
        let frozen = Frozen(self);
        self.freeze()?;
        Ok(frozen)
    }

    pub fn freeze(&self) -> Result<()> {
        self.set_faults(&Script { seed: 0, rules: vec![Rule::always(Fault::Stall { ms: None })] })
    }

    /// An object's size and bytes, of a server that answers without a signature. None: there is no such object.
    pub fn read(&self, key: &str) -> Result<Option<(u64, impl Read + use<>)>> {
        let mut answer = BufReader::with_capacity(1 << 20, self.ask("GET", &format!("/{BUCKET}/{key}"), "")?);
        let (mut line, mut length) = (String::new(), None);
        answer.read_line(&mut line)?;
        if line.starts_with("HTTP/1.1 404") {
            return Ok(None);
        }
        ensure!(line.starts_with("HTTP/1.1 200"), "GET {key}: {line}");
        while line != "\r\n" {
            line.clear();
            ensure!(answer.read_line(&mut line)? > 0, "GET {key}: the answer ends in its head");
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = Some(value.trim().parse()?);
            }
        }
        let length = length.with_context(|| format!("GET {key}: an answer without a length"))?;
        Ok(Some((length, answer.take(length))))
    }

    /// Removes an object of a server that answers without a signature.
    pub fn remove(&self, key: &str) -> Result<()> {
        let mut answer = String::new();
        self.ask("DELETE", &format!("/{BUCKET}/{key}"), "")?.read_to_string(&mut answer)?;
        ensure!(answer.starts_with("HTTP/1.1 204"), "DELETE {key}: {answer}");
        Ok(())
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Result<TcpStream> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )?;
        Ok(stream)
    }

    fn control(&self, method: &str, path: &str, body: &str) -> Result<String> {
        let mut stream = self.ask(method, path, body)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("an HTTP answer has a head")?;
        ensure!(head.starts_with("HTTP/1.1 200"), "{method} {path}: {head}: {body}");
        Ok(body.to_owned())
    }
}

/// Secrets of a publish that an S3 server accepts.
pub fn secrets() -> [(&'static str, &'static str); 2] {
    [("accessKeyId", ACCESS_KEY), ("secretAccessKey", SECRET_KEY)]
}

/// A way to the server that costs time.
#[derive(Debug)]
pub struct Proxy {
    _process: Process,
    address: String,
}

impl Proxy {
    /// `to`: host and port.
    pub fn start(places: &Places, to: &str, rtt_ms: u64, megabytes_per_s: u64) -> Result<Self> {
        let ready = places.root().join("run/proxy.address");
        let _ = std::fs::remove_file(&ready); // of an earlier proxy
        let mut command = Command::new(places.bin("shape-proxy"));
        command.args(["--to", to, "--rtt-ms", &rtt_ms.to_string()]);
        command.args(["--mbps", &megabytes_per_s.to_string(), "--ready-file"]).arg(&ready);
        let mut process = spawn(&mut command, places, "shape-proxy")?;
        let address = process.wait_for_ready_file(&ready, START)?;
        Ok(Self { _process: process, address })
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }
    pub fn address(&self) -> &str {
        &self.address
    }
}

/// Starts a program whose output goes to its log. The calling thread must outlive it (see `testkit::process`).
pub(super) fn spawn(command: &mut Command, places: &Places, log: &str) -> Result<Process> {
    let log = File::options().create(true).append(true).open(places.log(log))?;
    Process::spawn(command.stdout(log.try_clone()?).stderr(log))
}

/// A store that does not answer.
#[derive(Debug)]
pub struct Frozen<'a>(&'a Server);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.no_faults() {
            eprintln!("e2e: the store stays frozen: {error:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protocol_is_written_everywhere_as_on_the_command_line() {
        for protocol in Protocol::ALL {
            let written = serde_json::to_string(&protocol).unwrap();
            assert_eq!(written, format!("\"{protocol}\""));
            assert_eq!(Protocol::from_str(&protocol.to_string(), false), Ok(protocol));
        }
    }
}
