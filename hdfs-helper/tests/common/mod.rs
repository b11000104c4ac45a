//! Real helpers for a source of the store's, started as an agent starts them.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub)] // Each test binary uses its own part.

use async_trait::async_trait;
use futures::TryStreamExt;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use store::{
    Access, HadoopConfig, HdfsNode, Helper, Helpers, Kind, Limits, LimitsConfig, Observer, Outcome,
    RetryCause, Source, StoreError, Version,
};
use volume::{AllowList, Credentials, HadoopFiles, Parameters, SourceUrl, VolumeId, VolumeSpec};

type Started = std::io::Result<(UnixStream, Child)>;

/// All children are of one thread that lives as long as the test: a helper dies with the thread that started it.
#[derive(Debug)]
pub struct Spawner {
    requests: Mutex<mpsc::Sender<mpsc::Sender<Started>>>,
    /// Process ids, the last one last.
    pub started: Arc<Mutex<Vec<u32>>>,
    data_bytes: u64,
}

pub const DATA_BYTES: u64 = 1 << 30;

impl Spawner {
    pub fn new() -> Arc<Self> {
        Self::with_memory(DATA_BYTES)
    }

    pub fn with_memory(data_bytes: u64) -> Arc<Self> {
        Self::with(data_bytes, None)
    }

    /// Helpers that load a library of the test's before all others.
    pub fn with_preload(library: &Path) -> Arc<Self> {
        Self::with(DATA_BYTES, Some(library.to_owned()))
    }

    fn with(data_bytes: u64, preload: Option<PathBuf>) -> Arc<Self> {
        let (requests, incoming) = mpsc::channel::<mpsc::Sender<_>>();
        std::thread::spawn(move || {
            for request in incoming {
                let _ = request.send(spawn(data_bytes, preload.as_deref())); // whoever asked has given up
            }
        });
        Arc::new(Self { requests: Mutex::new(requests), started: Arc::default(), data_bytes })
    }

    /// Of a test that only has its helper: the thread is as long there as the process.
    pub fn new_kept() -> &'static Self {
        Box::leak(Box::new(Self::new()))
    }

    pub fn start_one(&self) -> Started {
        let (sender, receiver) = mpsc::channel();
        self.requests.lock().unwrap().send(sender).map_err(std::io::Error::other)?;
        let (socket, child) = receiver.recv().map_err(std::io::Error::other)??;
        self.started.lock().unwrap().push(child.id());
        Ok((socket, child))
    }

    pub fn last(&self) -> u32 {
        *self.started.lock().unwrap().last().expect("one was started")
    }

    pub fn count(&self) -> usize {
        self.started.lock().unwrap().len()
    }
}

fn spawn(data_bytes: u64, preload: Option<&Path>) -> Started {
    let (mine, theirs) = UnixStream::pair()?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_hdfs-helper"));
    command.env_clear().stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::inherit());
    command.envs(preload.map(|library| ("LD_PRELOAD", library)));
    command.args([std::process::id().to_string(), data_bytes.to_string()]);
    Ok((mine, command.spawn()?))
}

/// Dropping it ends the process.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it has ended by itself
        let _ = self.0.wait();
    }
}

#[async_trait]
impl Helpers for Spawner {
    async fn start(&self) -> std::io::Result<Helper> {
        let (socket, child) = self.start_one()?;
        Ok(Helper { socket, process: Box::new(Killed(child)) })
    }

    fn told_missing(&self, missing: &[String]) {
        println!("not confined: {missing:?}");
    }
}

#[derive(Debug, Default)]
pub struct Log {
    pub requests: Mutex<Vec<(&'static str, Outcome, u64)>>,
    pub retries: Mutex<Vec<(&'static str, RetryCause)>>,
}

impl Observer for Log {
    fn request(&self, op: &'static str, outcome: Outcome, _: Duration, bytes: u64) {
        self.requests.lock().unwrap().push((op, outcome, bytes));
    }
    fn retry(&self, op: &'static str, cause: RetryCause) {
        self.retries.lock().unwrap().push((op, cause));
    }
}

/// What is asked, and as whom.
#[derive(Clone)]
pub struct Asking {
    /// `hdfs://authority/directory`
    pub source: String,
    pub parameters: Parameters,
    /// Of the operator's.
    pub settings: BTreeMap<String, String>,
    /// Where servers may be although nothing else is asked there: all of these tests' are on this machine.
    pub networks: Vec<&'static str>,
    pub credentials: Credentials,
    pub stall_timeout: Duration,
}

impl Asking {
    /// `root`: "" or "/a/b".
    pub fn simple(authority: impl std::fmt::Display, root: &str, user: &str) -> Self {
        let store_timeout = Duration::from_secs(60);
        Self {
            source: format!("hdfs://{authority}{root}"),
            parameters: Parameters {
                store_timeout,
                hadoop_config: Some("test".into()),
                ..Parameters::default()
            },
            settings: BTreeMap::new(),
            networks: vec!["127.0.0.0/8", "::1"],
            credentials: Credentials::from_secrets([("hdfsUser", user)]).unwrap(),
            stall_timeout: Duration::from_secs(10),
        }
    }

    /// As `storeTimeout` has it.
    pub fn within(mut self, store_timeout: Duration) -> Self {
        self.parameters.store_timeout = store_timeout;
        self
    }

    pub fn open(&self, helpers: Arc<dyn Helpers>, log: Arc<dyn Observer>) -> Arc<dyn Source> {
        let source = SourceUrl::parse(&self.source).unwrap();
        let spec =
            VolumeSpec { id: VolumeId::parse("v").unwrap(), source, parameters: self.parameters.clone() };
        let access = Access::fixed(&spec, self.credentials.clone());
        let limits = LimitsConfig { stall_timeout: self.stall_timeout, ..LimitsConfig::default() };
        let property = |(name, value): (&String, &String)| {
            format!("<property><name>{name}</name><value>{value}</value></property>")
        };
        let properties = self.settings.iter().map(property).collect::<String>();
        let hdfs_site = Some(format!("<configuration>{properties}</configuration>"));
        let files = HadoopFiles { hdfs_site, ..HadoopFiles::default() };
        let node = HdfsNode {
            helpers,
            allow: AllowList::default(),
            configurations: [("test".to_owned(), HadoopConfig::of(&files))].into(),
            networks: self.networks.iter().map(|network| network.parse().unwrap()).collect(),
            api_server: None,
            ids: store::HadoopIds { users: [("alice".to_owned(), 1000)].into(), ..Default::default() },
        };
        store::open_on(&spec, access, Arc::new(Limits::new(limits)), log, Arc::new(node)).unwrap()
    }
}

pub async fn read(
    source: &dyn Source,
    path: &[u8],
    version: &Version,
    range: Range<u64>,
) -> Result<Vec<u8>, StoreError> {
    let mut stream = source.get(path, version, range).await?;
    let mut bytes = Vec::new();
    while let Some(piece) = stream.try_next().await? {
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

pub async fn file(source: &dyn Source, path: &[u8]) -> (u64, Version) {
    match source.head(path).await.unwrap().expect("it is there").kind {
        Kind::File { size, version } => (size, version),
        other => panic!("{other:?}"),
    }
}

/// Every entry of a directory, and how many names are hidden.
pub async fn listed(source: &dyn Source, dir: &[u8]) -> Result<(BTreeMap<Vec<u8>, Kind>, usize), StoreError> {
    let (mut found, mut hidden, mut token) = (BTreeMap::new(), 0, None::<String>);
    loop {
        let page = source.list(dir, token.as_deref()).await?;
        hidden += page.unnameable.len();
        for entry in page.entries {
            assert!(found.insert(entry.name, entry.kind).is_none(), "a name twice");
        }
        match page.next {
            Some(next) => token = Some(next),
            None => return Ok((found, hidden)),
        }
    }
}

/// Until it is so.
pub async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
