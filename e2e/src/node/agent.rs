//! The node agent of a test: its configuration, its process and its operator API.

use super::log::{LogTo, Logged, limit_descriptors, spawn};
use super::places::{Places, Version};
use super::server::Protocol;
use crate::clock::wait_until;
use crate::processes::{self, Memory};
use anyhow::{Context, Result, ensure};
use proto::agent::v1 as api;
use proto::agent::v1::agent_client::AgentClient;
use std::fmt::Write as _;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;
use tokio::runtime::Handle;
use tonic::transport::Channel;

/// What a test may want otherwise than a node usually has it.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// Must not be root: everything that the agent may do it must be able to do without rights.
    pub uid: u32,
    pub tiers: Vec<Tier>,
    pub block: &'static str,
    pub memory: &'static str,
    pub scope_limit: Option<&'static str>,
    /// Of how many unused sources the names are kept; None: the program's own number.
    pub metadata_stores: Option<usize>,
    pub max_requests: u32,
    /// Only where it is set: the release before has no such key.
    pub uploads_late: Option<&'static str>,
    pub threads: u32,
    pub standby: u32,
    /// How long a first publish waits for its source.
    pub source_wait: &'static str,
    /// Kernel features that workers shall do without.
    pub disabled_features: Vec<&'static str>,
    /// Private memory of one worker, and all of its memory.
    pub worker_memory: &'static str,
    pub memory_limit: &'static str,
    /// What workers do to themselves.
    pub inject_faults: Vec<InjectedFault>,
    /// Credentials of the agent's own environment, which volumes without a secret may use.
    pub environment: Option<(&'static str, &'static str)>,
    /// Certificates (PEM) that the agent trusts instead of the machine's.
    pub authority: Option<String>,
    /// What the node's server speaks.
    pub store: Protocol,
    /// Flags of the node's server; of an HDFS its mode.
    pub server_flags: &'static [&'static str],
    /// Started instead of hdfs-helper.
    pub helper: Option<PathBuf>,
    /// The sources that may be used.
    pub allow: &'static str,
    /// The endpoints that may be asked. Those of tests are on this machine, so they must be named.
    pub endpoints: &'static [&'static str],
    /// They are said to csi-plugin's controller, too, as in a cluster.
    pub limits_controller: bool,
    pub version: Version,
    /// Of csi-plugin.
    pub plugin: Version,
    /// Most descriptors of the agent; None: as many as this process may have.
    pub descriptors: Option<u64>,
    /// The same of csi-plugin.
    pub plugin_descriptors: Option<u64>,
    /// How long workers and agent may stand still; None: the programs' own limits.
    pub hang_limit: Option<Duration>,
    /// What the agent takes for the kernel's `fs.fuse.max_request_timeout`, seconds.
    pub request_timeout: Option<u32>,
    pub failpoints: Failpoints,
    /// Of agent and plugin.
    pub log: LogTo,
}

impl AgentOptions {
    /// For a node whose server speaks this.
    pub fn with_store(store: Protocol) -> Self {
        let allow = match store {
            Protocol::S3 => "s3://*",
            Protocol::Oss => "oss://*",
            Protocol::Gcs => "gs://*",
            Protocol::Azure => "az://*",
            Protocol::Web | Protocol::Dav => "http://*",
            Protocol::Hdfs => "hdfs://*",
        };
        Self { store, allow, ..Self::default() }
    }
}

/// Steps at which processes of this node abort (the crate `failpoint`), until they are taken away again.
#[derive(Clone, Debug, Default)]
pub struct Failpoints {
    pub agent: Option<&'static str>,
    pub plugin: Option<&'static str>,
    /// One for each worker that an agent starts, in that order; "" lives.
    pub workers: Vec<&'static str>,
}

/// At files of this name, at most so often on one mount.
#[derive(Clone, Debug)]
pub struct InjectedFault {
    pub name: String,
    pub what: &'static str,
    pub times: u32,
}

impl InjectedFault {
    pub fn new(name: impl Into<String>, what: &'static str, times: u32) -> Self {
        Self { name: name.into(), what, times }
    }
}

#[derive(Clone, Debug)]
pub struct Tier {
    pub name: &'static str,
    pub paths: Vec<PathBuf>,
    pub quota: &'static str,
    pub inodes: u64,
    pub min_free_percent: u8,
}

/// The user that agent and workers run as: in each lane of tests another (`scripts/lanes`), for what the kernel grants to a
/// user, such as memory of pipes, the processes of all lanes would share.
fn lane_user() -> u32 {
    std::env::var("MILLPOND_TEST_UID").ok().and_then(|uid| uid.parse().ok()).unwrap_or(64_321)
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self {
            uid: lane_user(),
            tiers: Vec::new(),
            block: "128Ki",
            memory: "96Mi",
            scope_limit: None,
            metadata_stores: None,
            max_requests: 128,
            uploads_late: None,
            threads: 4,
            standby: 1,
            source_wait: "20s",
            disabled_features: Vec::new(),
            worker_memory: "256Mi",
            memory_limit: "512Mi",
            inject_faults: Vec::new(),
            environment: None,
            authority: None,
            store: Protocol::S3,
            server_flags: &[],
            helper: None,
            allow: "s3://*",
            endpoints: &["http://127.0.0.1:*", "http://localhost:*"],
            limits_controller: false,
            version: Version::This,
            plugin: Version::This,
            descriptors: None,
            plugin_descriptors: None,
            hang_limit: None,
            request_timeout: None,
            failpoints: Failpoints::default(),
            log: LogTo::default(),
        }
    }
}

impl AgentOptions {
    /// One SSD tier in the node's own directory, unless the test has chosen.
    pub(super) fn tiers(&self, places: &Places) -> Vec<Tier> {
        match self.tiers.is_empty() {
            // The machine's disk may be fuller than a node's: the free-space watermark has tests of its own.
            true => vec![Tier {
                name: "ssd",
                paths: vec![places.cache().join("ssd")],
                quota: "20Gi",
                inodes: 1_000_000,
                min_free_percent: 1,
            }],
            false => self.tiers.clone(),
        }
    }

    pub fn roots(&self, places: &Places) -> Vec<PathBuf> {
        self.tiers(places).into_iter().flat_map(|t| t.paths).collect()
    }

    fn toml(&self, places: &Places) -> Result<String> {
        let mut text = String::new();
        let path = |p: PathBuf| format!("{:?}", p.display().to_string());
        let list = |items: &[String]| format!("[{}]", items.join(", "));
        writeln!(text, "[agent]")?;
        writeln!(text, "broker_socket = {}", path(places.broker_socket()))?;
        writeln!(text, "api_socket = {}", path(places.agent_socket()))?;
        writeln!(text, "state_dir = {}", path(places.state("agent")))?;
        writeln!(text, "worker = {}", path(places.bin_of(self.version, "fuse-worker")?))?;
        writeln!(text, "metrics = \"127.0.0.1:0\"\nlog_format = \"text\"")?;
        writeln!(text, "source_wait = {:?}", self.source_wait)?;
        writeln!(text, "environment_credentials = {}", self.environment.is_some())?;
        writeln!(text, "[allow]\nsources = [{:?}]", self.allow)?;
        writeln!(text, "endpoints = {:?}", self.endpoints)?;
        writeln!(text, "roots = {}", list(&[path(places.buckets())]))?;
        writeln!(text, "[cache]\nmetadata_dir = {}", path(places.cache().join("meta")))?;
        writeln!(text, "block = {:?}\nmemory = {:?}", self.block, self.memory)?;
        if let Some(limit) = self.scope_limit {
            writeln!(text, "scope_limit = {limit:?}")?;
        }
        if let Some(stores) = self.metadata_stores {
            writeln!(text, "metadata_stores = {stores}")?;
        }
        for tier in self.tiers(places) {
            let paths: Vec<_> = tier.paths.into_iter().map(path).collect();
            writeln!(
                text,
                "[[cache.tiers]]\nname = {:?}\nkind = \"ssd\"\npaths = {}",
                tier.name,
                list(&paths)
            )?;
            writeln!(text, "quota = {:?}\ninodes = {}\nhigh = 95\nlow = 90", tier.quota, tier.inodes)?;
            writeln!(text, "min_free_bytes = {0}\nmin_free_inodes = {0}", tier.min_free_percent)?;
        }
        writeln!(text, "[store]\nmax_requests = {}\nbandwidth = \"0\"", self.max_requests)?;
        if let Some(limit) = self.uploads_late {
            writeln!(text, "uploads_late = {limit:?}")?;
        }
        writeln!(text, "[workers]\nthreads = {}\nstandby = {}", self.threads, self.standby)?;
        writeln!(text, "suspend_respawn_file = {}", path(places.suspend_file()))?;
        let disabled_features: Vec<_> = self.disabled_features.iter().map(|w| format!("{w:?}")).collect();
        // Only where they are set: the release before calls them by other names.
        if !disabled_features.is_empty() {
            writeln!(text, "disabled_features = {}", list(&disabled_features))?;
        }
        writeln!(text, "memory = {:?}\nmemory_limit = {:?}", self.worker_memory, self.memory_limit)?;
        let fault =
            |m: &InjectedFault| format!("{{ name = {:?}, do = {:?}, times = {} }}", m.name, m.what, m.times);
        let inject_faults: Vec<_> = self.inject_faults.iter().map(fault).collect();
        if !inject_faults.is_empty() {
            writeln!(text, "inject_faults = {}", list(&inject_faults))?;
        }
        if let Some(seconds) = self.request_timeout {
            let sysctl = places.root().join("run/fuse-sysctl");
            std::fs::create_dir_all(&sysctl)?;
            std::fs::write(sysctl.join("max_request_timeout"), format!("{seconds}\n"))?;
            writeln!(text, "fuse_sysctl = {}", path(sysctl))?;
        }
        if let Some(limit) = self.hang_limit {
            writeln!(text, "hang_limit = \"{}ms\"", limit.as_millis())?;
        }
        // Agents of before do not know it.
        if self.store == Protocol::Hdfs {
            let helper = self.helper.clone().unwrap_or_else(|| places.bin("hdfs-helper"));
            writeln!(text, "[hdfs]\nhelper = {}", path(helper))?;
            writeln!(text, "users = {{ alice = {ALICE} }}")?;
            writeln!(text, "networks = [\"127.0.0.0/8\", \"::1\"]")?;
        }
        Ok(text)
    }
}

/// Which number the user `alice` of an HDFS has in pods.
pub const ALICE: u32 = 23_456;

#[derive(Debug)]
pub struct Agent {
    version: Version,
    logged: Logged,
    client: AgentClient<Channel>,
    runtime: Handle,
}

impl Agent {
    /// Returns at once.
    pub fn spawn(places: &Places, options: &AgentOptions, runtime: &Handle) -> Result<Self> {
        ensure!(options.uid != 0, "the agent must not run as root");
        let config = places.agent_config(options.version);
        std::fs::write(&config, options.toml(places)?)?;
        let mut command = Command::new(places.bin_of(options.version, "node-agent")?);
        command.arg("--config").arg(&config).uid(options.uid).gid(options.uid).current_dir("/");
        if let Some((id, secret)) = options.environment {
            command.env("AWS_ACCESS_KEY_ID", id).env("AWS_SECRET_ACCESS_KEY", secret);
        }
        if let Some(pem) = &options.authority {
            let bundle = places.root().join("run/authority.pem");
            std::fs::write(&bundle, pem)?;
            command.env("SSL_CERT_FILE", bundle);
        }
        command.envs(options.failpoints.agent.map(|step| ("MILLPOND_FAILPOINT", step)));
        command.env("MILLPOND_WORKER_FAILPOINTS", options.failpoints.workers.join(","));
        limit_descriptors(&mut command, options.descriptors);
        let logged = spawn(&mut command, places, "node-agent", options.log)?;
        let client = AgentClient::new(super::channel(&places.agent_socket(), runtime)?);
        Ok(Self { version: options.version, logged, client, runtime: runtime.clone() })
    }

    /// Returns when the agent has found the broker.
    pub fn start(places: &Places, options: &AgentOptions, runtime: &Handle) -> Result<Self> {
        let mut agent = Self::spawn(places, options, runtime)?;
        let mut last = None;
        let connected = |agent: &mut Self, last: &mut Option<String>| match agent.status() {
            Ok(status) => status.broker_connected,
            Err(e) => {
                *last = Some(format!("{e:#}"));
                false
            }
        };
        let ready = wait_until(Duration::from_secs(60), || {
            connected(&mut agent, &mut last)
                || agent.logged.process.child().try_wait().is_ok_and(|s| s.is_some())
        });
        ensure!(ready && agent.is_alive(), "the agent did not become ready: {last:?}");
        Ok(agent)
    }

    pub fn version(&self) -> Version {
        self.version
    }
    pub fn pid(&self) -> u32 {
        self.logged.process.pid()
    }
    pub fn is_alive(&mut self) -> bool {
        matches!(self.logged.process.child().try_wait(), Ok(None))
    }
    /// None: it lives.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.logged.process.child().try_wait()?)
    }
    pub fn kill(mut self) -> Result<()> {
        self.logged.process.kill().map(drop)
    }
    pub fn terminate(mut self, limit: Duration) -> Result<()> {
        let status = self.logged.process.terminate(limit)?;
        ensure!(status.success(), "the agent ended with {status}");
        Ok(())
    }

    fn call<T>(
        &self,
        call: impl AsyncFnOnce(AgentClient<Channel>) -> Result<tonic::Response<T>, tonic::Status>,
    ) -> Result<T> {
        let client = self.client.clone();
        let limit = Duration::from_secs(30);
        let answer = self.runtime.block_on(async { tokio::time::timeout(limit, call(client)).await });
        Ok(answer.context("the agent's API did not answer")??.into_inner())
    }

    pub fn status(&self) -> Result<api::GetStatusResponse> {
        self.call(async |mut c| c.get_status(api::GetStatusRequest {}).await)
    }
    pub fn volumes(&self) -> Result<Vec<api::Volume>> {
        Ok(self.call(async |mut c| c.list_volumes(api::ListVolumesRequest {}).await)?.volumes)
    }
    pub fn cache(&self) -> Result<api::GetCacheResponse> {
        self.call(async |mut c| c.get_cache(api::GetCacheRequest {}).await)
    }
    pub fn heals(&self) -> Result<Vec<api::Heal>> {
        Ok(self.call(async |mut c| c.list_heals(api::ListHealsRequest {}).await)?.heals)
    }
    /// Counters and gauges by name.
    pub fn stats(&self) -> Result<std::collections::HashMap<String, f64>> {
        Ok(self.call(async |mut c| c.get_stats(api::GetStatsRequest {}).await)?.values.into_iter().collect())
    }
    pub fn evict_all(&self) -> Result<api::EvictResponse> {
        self.call(async |mut c| c.evict(api::EvictRequest { path: String::new(), all: true }).await)
    }
    /// What is cached of the volume at this path.
    pub fn evict(&self, path: &Path) -> Result<api::EvictResponse> {
        let path = path.display().to_string();
        self.call(async |mut c| c.evict(api::EvictRequest { path, all: false }).await)
    }
    /// Brings everything below these paths into the cache; the last message of the stream.
    pub fn warm(&self, paths: &[PathBuf], limit: Duration) -> Result<api::WarmProgress> {
        let paths = paths.iter().map(|p| p.display().to_string()).collect();
        let mut client = self.client.clone();
        let work = async {
            let mut stream = client.warm(api::WarmRequest { paths }).await?.into_inner();
            let mut last = None;
            while let Some(progress) = stream.message().await? {
                last = Some(progress);
            }
            Ok::<_, tonic::Status>(last)
        };
        let last = self.runtime.block_on(async { tokio::time::timeout(limit, work).await });
        last.context("warm did not end")??.context("warm said nothing")
    }

    /// Written files of a volume that its store does not have as they are; 0 also where it has no staging area.
    pub fn staged(&self, volume: &str) -> Result<u64> {
        let request = api::ListStagingRequest { volume_id: volume.to_owned(), files: false };
        self.call(async |mut c| {
            let mut pages = match c.list_staging(request).await {
                Err(status) if status.code() == tonic::Code::NotFound => return Ok(tonic::Response::new(0)),
                answer => answer?.into_inner(),
            };
            let mut files = 0;
            loop {
                match pages.message().await {
                    Ok(Some(page)) => files += page.area.map_or(0, |area| area.files),
                    Ok(None) => return Ok(tonic::Response::new(files)),
                    Err(status) if status.code() == tonic::Code::NotFound => {
                        return Ok(tonic::Response::new(0));
                    }
                    Err(status) => return Err(status),
                }
            }
        })
    }

    /// Workers that serve a volume: (volume id, pid).
    pub fn serving(&self) -> Result<Vec<(String, u32)>> {
        let serving = |v: api::Volume| {
            let worker = v.worker.filter(|w| w.state == "serving" && w.pid != 0)?;
            Some((v.volume_id, worker.pid))
        };
        Ok(self.volumes()?.into_iter().filter_map(serving).collect())
    }

    /// Memory of the agent and all its workers, the standby included.
    pub fn memory(&self) -> Memory {
        let mut memory = Memory::of(self.pid());
        for worker in processes::children(self.pid()) {
            memory += Memory::of(worker);
        }
        memory
    }

    /// Processor time of the agent and all workers, dead ones included.
    pub fn cpu_time(&self) -> Duration {
        let workers = processes::children(self.pid());
        workers.into_iter().map(processes::cpu_time).sum::<Duration>() + processes::cpu_time(self.pid())
    }
}
