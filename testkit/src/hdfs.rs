//! A whole HDFS in a process of its own: Hadoop's NameNodes, DataNodes and KDC (`hdfs/MiniHdfs.java`), gone with the test.
//! `scripts/stores` installs its libraries.

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Where `scripts/stores` says that Hadoop's libraries are.
const LIBRARIES: &str = "MILLPOND_STORES_DIR";

fn libraries() -> Result<PathBuf> {
    let stores = std::env::var_os(LIBRARIES);
    let stores = stores
        .with_context(|| format!("{LIBRARIES} is not set: `scripts/stores run hdfs PROGRAM` sets it"))?;
    Ok(Path::new(&stores).join("hadoop"))
}

#[derive(Debug)]
pub struct Hdfs {
    /// What the mode tells: ports of NameNodes, or realm, port of the KDC and port of the NameNode.
    pub told: Vec<String>,
    /// A directory that exists. Its files are below it, and with Kerberos `user.keytab` and `user.ccache`.
    place: PathBuf,
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

/// Since the cluster was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// That DataNodes have sent.
    pub bytes: u64,
    /// Questions to NameNodes, and reads of blocks.
    pub questions: u64,
}

impl Hdfs {
    /// `mode`: plain, ha or kerberos. It ends with the thread that calls this, should the destructor not run.
    pub fn start(mode: &str, place: &Path) -> Result<Self> {
        Self::start_at(mode, place, None)
    }

    /// `host`: the address at which clients find it; they must ask for DataNodes by name (`dfs.client.use.datanode.hostname`).
    /// None: loopback.
    pub fn start_at(mode: &str, place: &Path, host: Option<&str>) -> Result<Self> {
        let libraries = libraries()?;
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("hdfs/MiniHdfs.java");
        let log = std::fs::File::create(place.join("log"))?;
        let mut command = Command::new("java");
        if host.is_some() {
            // Hadoop looks this machine's own name up, which no name server may know, nor may there be one.
            let own = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
            let hosts = place.join("hosts");
            std::fs::write(&hosts, format!("127.0.0.1 localhost {own}\n"))?;
            command.arg(format!("-Djdk.net.hosts.file={}", hosts.display()));
        }
        command
            .args(["-Xmx600m", "-cp", &format!("{}/*", libraries.display())])
            .arg(program)
            .arg(mode)
            .arg(place)
            .args(host)
            .current_dir(place)
            .env("HOME", place)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log);
        // SAFETY: runs between fork and exec; prctl is async-signal-safe and touches no memory of ours.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let mut child = command.spawn().context("java: scripts/stores installs it")?;
        let to = child.stdin.take().context("its standard input")?;
        let from = BufReader::new(child.stdout.take().context("its standard output")?);
        let mut hdfs = Self { told: Vec::new(), place: place.to_owned(), child, to, from };
        hdfs.told = hdfs.hear()?.split(' ').map(str::to_owned).collect();
        Ok(hdfs)
    }

    /// Hadoop's own client (`hdfs dfs`) of the file system at `url`, with a file of its configuration in `place`; its arguments
    /// are missing.
    pub fn client(place: &Path, url: &str) -> Result<Command> {
        std::fs::write(place.join("core-site.xml"), "<configuration/>")?;
        let mut command = Command::new("java");
        let classes = format!("{}:{}/*", place.display(), libraries()?.display());
        command.args(["-cp", &classes, "org.apache.hadoop.fs.FsShell"]);
        command.args(["-fs", url]).stdin(Stdio::null());
        Ok(command)
    }

    /// A name as commands take it.
    pub fn name(path: &str) -> String {
        BASE64_STANDARD.encode(path)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn place(&self) -> &Path {
        &self.place
    }

    fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        match line.trim_end().strip_prefix("ok") {
            Some(answer) => Ok(answer.trim().to_owned()),
            None => bail!("Hadoop: {line}: {}", self.last_words()),
        }
    }

    fn last_words(&self) -> String {
        let log = std::fs::read_to_string(self.place.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// A command and its arguments (MiniHdfs.java has them); its answer.
    pub fn say(&mut self, words: &str) -> Result<String> {
        writeln!(self.to, "{words}")?;
        self.hear()
    }

    fn local(&self, content: &[u8]) -> Result<String> {
        let path = self.place.join("content");
        std::fs::write(&path, content)?;
        Ok(path.display().to_string())
    }

    /// Two replicas, in blocks of 1 MiB.
    pub fn put(&mut self, path: &str, content: &[u8]) -> Result<()> {
        let local = self.local(content)?;
        self.say(&format!("put {} {local} {}", Self::name(path), 1 << 20)).map(drop)
    }

    pub fn with_content(&mut self, command: &str, path: &str, content: &[u8]) -> Result<()> {
        let local = self.local(content)?;
        self.say(&format!("{command} {} {local}", Self::name(path))).map(drop)
    }

    /// All files below a local directory, at the same place below `path`; blocks of so many bytes.
    pub fn put_tree(&mut self, path: &str, local: &Path, block_bytes: u64) -> Result<()> {
        let local = BASE64_STANDARD.encode(local.to_str().context("a path that is UTF-8")?);
        self.say(&format!("put-tree {} {local} {block_bytes}", Self::name(path))).map(drop)
    }

    pub fn served(&mut self) -> Result<Served> {
        let answer = self.say("served")?;
        let (bytes, questions) = answer.split_once(' ').context("two numbers")?;
        Ok(Served { bytes: bytes.parse()?, questions: questions.parse()? })
    }
}

impl Drop for Hdfs {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it has ended by itself
        let _ = self.child.wait();
    }
}
