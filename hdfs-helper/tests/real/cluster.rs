//! A whole HDFS in a process of its own (`MiniHdfs.java`), gone with the test.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use tempfile::TempDir;

pub(crate) struct Cluster {
    /// What the mode tells: ports of NameNodes, or realm, port of the KDC and port of the NameNode.
    pub(crate) told: Vec<String>,
    pub(crate) place: TempDir,
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

/// Where `scripts/stores` has put Hadoop's libraries.
fn libraries() -> PathBuf {
    let place = std::env::var_os("MILLPOND_STORES_DIR").expect("started by scripts/stores");
    Path::new(&place).join("hadoop")
}

pub(crate) fn name(path: &str) -> String {
    STANDARD.encode(path)
}

impl Cluster {
    pub(crate) fn start(mode: &str) -> Self {
        let place = tempfile::tempdir().unwrap();
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real/MiniHdfs.java");
        let log = std::fs::File::create(place.path().join("log")).unwrap();
        let mut command = Command::new("java");
        command
            .args(["-Xmx600m", "-cp", &format!("{}/*", libraries().display())])
            .arg(program)
            .arg(mode)
            .arg(place.path())
            .current_dir(place.path())
            .env("HOME", place.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log);
        let mut child = command.spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut cluster = Self { told: Vec::new(), place, child, to, from };
        cluster.told = cluster.hear().split(' ').map(str::to_owned).collect();
        cluster
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        match line.trim_end().strip_prefix("ok") {
            Some(answer) => answer.trim().to_owned(),
            None => panic!("{line}: {}", self.last_words()),
        }
    }

    fn last_words(&self) -> String {
        let log = std::fs::read_to_string(self.place.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    pub(crate) fn say(&mut self, words: &str) -> String {
        writeln!(self.to, "{words}").unwrap();
        self.hear()
    }

    fn local(&self, content: &[u8]) -> String {
        let path = self.place.path().join("content");
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    }

    pub(crate) fn put(&mut self, path: &str, content: &[u8]) {
        let local = self.local(content);
        self.say(&format!("put {} {local} {}", name(path), 1 << 20));
    }

    pub(crate) fn with_content(&mut self, command: &str, path: &str, content: &[u8]) {
        let local = self.local(content);
        self.say(&format!("{command} {} {local}", name(path)));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it has ended by itself
        let _ = self.child.wait();
    }
}
