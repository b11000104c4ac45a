//! `millpond mount` and `umount`: agent and mount in one process, for a laptop or a node without Kubernetes.
//!
//! The engine is the node's own: the same agent, the same workers. Only the broker is missing; its few privileged
//! acts are done here.

use crate::output::{Closed, print};
use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use link::broker::{AgentAnswer, AgentRequest, BrokerAnswer, BrokerRequest, MountId, Publish};
use link::worker::Mode;
use link::{MountSpec, Refusal, RefusalKind};
use mounts::probe::{Outcome, What};
use mounts::{Connection, Control, Helper, Kernel, Linux, LinuxPaths, MountSource, Ours, Target, stack_at};
use node_agent::App;
use node_agent::config::{Agent, Cache, Config, Hdfs, LogFormat, Size, Span, Store, Tier, TierKind, Workers};
use node_agent::privileged::Privileged;
use rustix::process::{Pid, Signal};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::signal::unix::{Signal as Listener, SignalKind, signal};
use volume::{
    AllowList, Credentials, EndpointPattern, Parameters, SourceUrl, TemplateValues, VolumeId, VolumeSpec,
};

const MOUNT: MountId = MountId(1);
const INIT_LIMIT: Duration = Duration::from_secs(5);
const PROBE_LIMIT: Duration = Duration::from_secs(20);
/// Whether a mount that is there already is served.
const LIVE_LIMIT: Duration = Duration::from_secs(5);
/// How long `millpond umount` waits for the process that served.
const ENDING_LIMIT: Duration = Duration::from_secs(1);
const ENDING_POLL: Duration = Duration::from_millis(20);
const LOOK_EVERY: Duration = Duration::from_millis(500);
const CACHE: &str = "/var/cache/millpond";
/// Below the cache directory, of which one process at a time is the owner.
const LOG: &str = "mount.log";
const SOCKET: &str = "api.sock";
/// What the serving process says to the one that started it.
const SERVING: &str = "serving ";
const FAILED: &str = "failed ";

#[derive(clap::Args)]
pub(crate) struct MountOptions {
    /// s3://bucket/prefix, oss://bucket/prefix, gs://bucket/prefix, az://container@ACCOUNT.blob.core.windows.net/prefix,
    /// https://host/directory or file:///directory
    source: String,
    /// An existing empty directory.
    dir: PathBuf,
    /// A volume parameter, as in a StorageClass: -o endpoint=http://127.0.0.1:9000 -o allowHttp=true (repeatable).
    /// Credentials come from the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (also for OSS),
    /// GOOGLE_APPLICATION_CREDENTIALS (the key file of a service account), AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN,
    /// and for web servers MILLPOND_USERNAME and MILLPOND_PASSWORD, or MILLPOND_BEARER_TOKEN.
    #[arg(short = 'o', long = "option", value_name = "NAME=VALUE")]
    options: Vec<String>,
    /// Where cache, metadata and state live.
    #[arg(long, default_value = CACHE)]
    cache: PathBuf,
    /// Most bytes of cache.
    #[arg(long, default_value = "10Gi")]
    quota: String,
    /// Stay in the foreground and log to the terminal. Otherwise the log is mount.log in the cache directory.
    #[arg(long)]
    foreground: bool,
    /// Set by the command that goes on in the background.
    #[arg(long, hide = true)]
    log_file: Option<PathBuf>,
}

#[derive(clap::Args)]
pub(crate) struct UmountOptions {
    dir: PathBuf,
    /// The cache directory of `millpond mount`.
    #[arg(long, default_value = CACHE)]
    cache: PathBuf,
}

pub(crate) async fn mount(options: MountOptions) -> Result<ExitCode> {
    anyhow::ensure!(rustix::process::geteuid().is_root(), "mounting needs root: run this with sudo");
    let log = match &options.log_file {
        None if !options.foreground => return detach(&options).await,
        None => startup::log::start().context("no log"),
        Some(path) => startup::log::start_into(path).with_context(|| format!("log file {}", path.display())),
    };
    let detached = options.log_file.is_some();
    let done = match log {
        Ok(()) => {
            startup::log::init(startup::log::Format::Text, "info");
            serve(options).await
        }
        Err(error) => Err(error),
    };
    if let (true, Err(error)) = (detached, &done) {
        let why = format!("{error:#}").replace('\n', " ");
        let _ = print(format_args!("{FAILED}{why}")); // the log has it, too
    }
    done
}

/// Starts this command again, in a session of its own and with a log of its own, and waits until it says that it
/// serves.
async fn detach(options: &MountOptions) -> Result<ExitCode> {
    let cache = std::path::absolute(&options.cache)?;
    std::fs::create_dir_all(&cache).with_context(|| format!("cache directory {}", cache.display()))?;
    let log = cache.join(LOG);
    let mut stop = Stop::listen()?;
    let mut command = tokio::process::Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).arg("--foreground").arg("--log-file").arg(&log);
    // Nothing of the terminal's may be needed later.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    // SAFETY: setsid is async-signal-safe.
    unsafe { command.pre_exec(|| rustix::process::setsid().map(|_| ()).map_err(Into::into)) };
    let mut child = command.spawn().context("the serving process cannot be started")?;
    let out = child.stdout.take().context("no pipe to the serving process")?;
    let mut lines = BufReader::new(out).lines();
    loop {
        let line = tokio::select! {
            line = lines.next_line() => line?,
            () = stop.asked() => return call_off(child).await,
        };
        let Some(line) = line else { break };
        if let Some(shown) = line.strip_prefix(SERVING) {
            let pid = child.id().unwrap_or_default();
            print(format_args!("{shown} (pid {pid}, log {}); end it with `millpond umount`", log.display()))?;
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(why) = line.strip_prefix(FAILED) {
            bail!("{why}");
        }
    }
    let status = child.wait().await?;
    bail!("the serving process ended before it served ({status}): see {}", log.display())
}

/// The laptop would not clean up a mount that comes later.
async fn call_off(mut child: tokio::process::Child) -> Result<ExitCode> {
    if let Some(pid) = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
        rustix::process::kill_process(pid, Signal::TERM)?;
    }
    child.wait().await?;
    bail!("interrupted before it served: nothing is mounted")
}

/// SIGTERM, or Ctrl-C.
struct Stop {
    terminate: Listener,
    interrupt: Listener,
}

impl Stop {
    /// From here on neither ends the process.
    fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

async fn serve(options: MountOptions) -> Result<ExitCode> {
    let mut stop = Stop::listen()?;
    let (source, parameters) = parameters(&options)?;
    let dir = std::path::absolute(&options.dir)?;
    let above = dir.parent().context("the root directory cannot be mounted upon")?.to_owned();
    let id = VolumeId::parse(&format!("laptop-{}", std::process::id()))?;
    let spec = VolumeSpec { id: id.clone(), source, parameters };
    let config = config(&options, &spec)?;
    let cache_roots = config.cache.tiers.iter().flat_map(|t| t.paths.clone()).collect();
    let kernel = Arc::new(Linux::new(LinuxPaths::default(), cache_roots, Helper::own()));
    let target = Arc::new(Target::resolve(&[above], &dir)?);
    clear(&kernel, &target).await?;
    anyhow::ensure!(dir.is_dir(), "{} is not a directory: create it first", dir.display());

    let direct = Arc::new(Direct { kernel: kernel.clone(), target: target.clone(), live: OnceLock::new() });
    let app = App::start(config, Some(direct.clone())).await?;
    let device = kernel.open_device()?;
    let mark = MountSource { volume: id.to_string(), digest: spec.digest() };
    let connection = kernel.mount(&target, device.as_fd(), &mark, mounts::MountOptions::default())?;
    let served = tokio::select! {
        served = publish(&app, &kernel, &direct, &target, connection, device, spec) => served,
        () = stop.asked() => Err(anyhow::anyhow!("interrupted before it served")),
    };
    let done = match served {
        Ok(()) => {
            // The process that waited for it may be gone: it serves nevertheless.
            match print(format_args!("{SERVING}{} at {}", options.source, dir.display())) {
                Err(error) if !error.is::<Closed>() => tracing::warn!("{error:#}"),
                _ => {}
            }
            wait_for_end(&kernel, &target, &direct, stop).await
        }
        Err(error) => Err(error),
    };
    let unmounted = kernel.unmount(&target);
    app.shutdown().await;
    done?;
    unmounted?;
    Ok(ExitCode::SUCCESS)
}

/// What a serving process left that was killed is taken away; what is served stays, and is an error.
async fn clear(kernel: &Arc<Linux>, target: &Arc<Target>) -> Result<()> {
    let table = kernel.table()?;
    let Some(top) = stack_at(&table, target.path()).last().and_then(|top| top.ours()) else { return Ok(()) };
    // The guard alone: another process has unmounted what lay on it.
    let live = matches!(top, Ours::Fuse(_)) && {
        let (kernel, target) = (kernel.clone(), target.clone());
        let look = move || kernel.probe(&target, What::Alive, LIVE_LIMIT);
        !matches!(tokio::task::spawn_blocking(look).await?, Ok(Outcome::Dead))
    };
    let dir = target.path().display();
    anyhow::ensure!(!live, "{dir} is mounted already: `millpond umount {dir}` first");
    tracing::warn!(directory = %dir, "a mount that no worker serves any more is taken away");
    kernel.unmount(target)?;
    Ok(())
}

/// Of who calls the command, as the tools of each cloud find them. None there: the volume is anonymous.
fn own_credentials(source: &SourceUrl, get: impl Fn(&str) -> Option<String>) -> Result<Credentials> {
    let pairs: Vec<(&str, String)> = match source {
        SourceUrl::S3 { .. } | SourceUrl::Oss { .. } | SourceUrl::Dir { .. } => {
            return Ok(Credentials::from_environment(get)?);
        }
        SourceUrl::Gcs { .. } => match get("GOOGLE_APPLICATION_CREDENTIALS") {
            None => Vec::new(),
            Some(path) => {
                let file = std::fs::read_to_string(&path);
                vec![(
                    "serviceAccountKey",
                    file.with_context(|| format!("GOOGLE_APPLICATION_CREDENTIALS: {path}"))?,
                )]
            }
        },
        SourceUrl::Azure { .. } => {
            let one = [("accountKey", "AZURE_STORAGE_KEY"), ("sasToken", "AZURE_STORAGE_SAS_TOKEN")];
            one.into_iter().filter_map(|(name, variable)| Some((name, get(variable)?))).take(1).collect()
        }
        SourceUrl::Hdfs { .. } => hdfs_pairs(&get)?,
        SourceUrl::Web { .. } => {
            let all = [
                ("username", "MILLPOND_USERNAME"),
                ("password", "MILLPOND_PASSWORD"),
                ("bearerToken", "MILLPOND_BEARER_TOKEN"),
            ];
            all.into_iter().filter_map(|(name, variable)| Some((name, get(variable)?))).collect()
        }
    };
    Ok(Credentials::from_secrets(pairs)?)
}

/// As Hadoop's own client and JuiceFS's have them: files by their paths.
fn hdfs_pairs(get: &impl Fn(&str) -> Option<String>) -> Result<Vec<(&'static str, String)>> {
    let mut pairs = Vec::new();
    let names =
        [("hdfsUser", "HADOOP_USER_NAME"), ("principal", "KRB5PRINCIPAL"), ("keytab", "KRB5KEYTAB_BASE64")];
    pairs.extend(names.into_iter().filter_map(|(name, variable)| Some((name, get(variable)?))));
    let is_there = |name: &str| pairs.iter().any(|(known, _)| *known == name);
    let read = |path: &Path| std::fs::read(path).with_context(|| path.display().to_string());
    let mut files = Vec::new();
    let binary = [
        ("keytab", get("KRB5KEYTAB").filter(|_| !is_there("keytab"))),
        ("ticketCache", get("KRB5CCNAME").filter(|_| is_there("principal"))),
        ("delegationToken", get("HADOOP_TOKEN_FILE_LOCATION")),
    ];
    for (name, path) in binary.into_iter().filter_map(|(name, path)| Some((name, path?))) {
        let path = path.strip_prefix("FILE:").unwrap_or(&path);
        files.push((name, BASE64_STANDARD.encode(read(Path::new(path))?)));
    }
    let conf = get("HADOOP_CONF_DIR").map(PathBuf::from);
    let text = [
        ("coreSite", conf.as_ref().map(|dir| dir.join("core-site.xml"))),
        ("hdfsSite", conf.as_ref().map(|dir| dir.join("hdfs-site.xml"))),
        (
            "krb5Conf",
            is_there("principal").then(|| get("KRB5_CONFIG").unwrap_or("/etc/krb5.conf".into()).into()),
        ),
    ];
    for (name, path) in text.into_iter().filter_map(|(name, path)| Some((name, path?))) {
        if path.exists() {
            files.push((name, String::from_utf8(read(&path)?).with_context(|| path.display().to_string())?));
        }
    }
    pairs.extend(files);
    Ok(pairs)
}

async fn publish(
    app: &App,
    kernel: &Arc<Linux>,
    direct: &Arc<Direct>,
    target: &Arc<Target>,
    connection: Connection,
    device: OwnedFd,
    spec: VolumeSpec,
) -> Result<()> {
    let init = kernel.read_init(device.as_fd(), INIT_LIMIT)?;
    let copy = device.try_clone()?;
    let credentials = own_credentials(&spec.source, |name| std::env::var(name).ok())?;
    // Without fusectl waiting requests cannot be counted, and an abort goes to the mount at its place.
    let control = kernel.control(connection, device.as_fd()).ok();
    direct.live.set(Live { device, connection, control }).map_err(|_| anyhow::anyhow!("mounted twice"))?;
    let request = Publish {
        mount: MOUNT,
        spec: MountSpec { environment: true, ..MountSpec::new(spec, target.path().display().to_string()) },
        secrets: credentials.to_secrets(),
        init,
    };
    let (answer, _shared) = app.serve(AgentRequest::Publish(Box::new(request)), vec![copy]).await?;
    let AgentAnswer::Prepared { init_reply, read_ahead_kb, resume } = answer else {
        bail!("unexpected answer")
    };
    let Live { device, .. } = direct.live.get().context("just set")?;
    kernel.write_init_reply(device.as_fd(), &init_reply)?;
    kernel.set_read_ahead_kb(connection, read_ahead_kb)?;
    app.serve(AgentRequest::Start { mount: MOUNT }, Vec::new()).await?;
    let (kernel, target) = (kernel.clone(), target.clone());
    let what = if resume.mode == Mode::NoOpen { What::Small } else { What::Large };
    tokio::task::spawn_blocking(move || kernel.probe(&target, what, PROBE_LIMIT)).await??;
    Ok(())
}

/// Until a signal comes, or another process unmounts. An error: another process has ended the connection and left a
/// dead mount.
async fn wait_for_end(kernel: &Linux, target: &Target, direct: &Direct, mut stop: Stop) -> Result<()> {
    loop {
        tokio::select! {
            () = stop.asked() => return Ok(()),
            () = tokio::time::sleep(LOOK_EVERY) => {
                // In this order: an unmount ends the connection, too.
                let ended = direct.live.get().is_some_and(|live| kernel.has_ended(live.device.as_fd()));
                let table = kernel.table()?;
                let mounted = stack_at(&table, target.path()).iter().any(|e| matches!(e.ours(), Some(Ours::Fuse(_))));
                if !mounted {
                    return Ok(());
                }
                let dir = target.path().display();
                anyhow::ensure!(
                    !ended,
                    "another process has ended the mount at {dir} (an abort through /sys/fs/fuse/connections, or the kernel's limit fs.fuse.max_request_timeout), or no worker could serve it for healTimeout: `millpond mount` it again"
                );
            }
        }
    }
}

pub(crate) fn umount(options: &UmountOptions) -> Result<ExitCode> {
    let dir = std::path::absolute(&options.dir)?;
    let above = dir.parent().context("the root directory is not ours")?.to_owned();
    let kernel = Linux::new(LinuxPaths::default(), Vec::new(), Helper::own());
    let target = Target::resolve(&[above], &dir)?;
    match kernel.unmount(&target)? {
        0 => bail!("nothing of Millpond's is mounted at {}", dir.display()),
        _ => print(format_args!("{} unmounted", dir.display()))?,
    }
    forget_socket(&std::path::absolute(&options.cache)?.join(SOCKET));
    Ok(ExitCode::SUCCESS)
}

/// Of a serving process that was killed. One that ends in order removes its own; one that is ending still takes
/// connections for a moment.
fn forget_socket(socket: &Path) {
    let end = Instant::now() + ENDING_LIMIT;
    loop {
        match UnixStream::connect(socket) {
            Ok(_) if Instant::now() < end => std::thread::sleep(ENDING_POLL),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                let _ = std::fs::remove_file(socket); // the next mount replaces it anyway
                return;
            }
            _ => return,
        }
    }
}

fn parameters(options: &MountOptions) -> Result<(SourceUrl, Parameters)> {
    let mut pairs = vec![("source".to_owned(), options.source.clone())];
    for option in &options.options {
        let (name, value) =
            option.split_once('=').with_context(|| format!("option {option:?}: write NAME=VALUE"))?;
        pairs.push((name.to_owned(), value.to_owned()));
    }
    Ok(Parameters::parse(pairs, &TemplateValues::default())?)
}

/// On a laptop the person at the keyboard is the platform team: what they mount is allowed.
fn config(options: &MountOptions, spec: &VolumeSpec) -> Result<Config> {
    let base = std::path::absolute(&options.cache)?;
    let quota = volume::parse_bytes(&options.quota)
        .with_context(|| format!("quota {:?} is not a size such as 10Gi", options.quota))?;
    let data = base.join("data");
    std::fs::create_dir_all(&data).with_context(|| format!("cache directory {}", data.display()))?;
    let config = Config {
        agent: Agent {
            broker_socket: None,
            api_socket: base.join(SOCKET),
            state_dir: base.join("state"),
            worker: None,
            metrics: None,
            log_format: LogFormat::Text,
            environment_credentials: true,
            source_wait: Span(Duration::from_secs(20)),
            directories_wait: Span(Duration::ZERO),
        },
        allow: AllowList {
            sources: ["s3://*", "oss://*", "gs://*", "az://*", "hdfs://*"].map(str::to_owned).to_vec(),
            endpoints: spec
                .parameters
                .endpoint
                .iter()
                .map(|endpoint| EndpointPattern::parse(endpoint.as_str()))
                .collect::<Result<_, _>>()?,
            roots: vec!["/".into()],
        },
        cache: Cache::with_tiers(
            base.join("metadata"),
            vec![Tier {
                name: "disk".into(),
                kind: TierKind::Ssd,
                paths: vec![data],
                quota: Size(quota),
                inodes: 1_000_000,
                high: 95,
                low: 90,
                min_free_bytes: 5,
                min_free_inodes: 5,
            }],
        ),
        store: Store::default(),
        // This process may not make memory groups.
        workers: Workers { memory_limit: Size(0), ..Workers::default() },
        hdfs: Hdfs {
            memory_limit: Size(0),
            networks: vec!["0.0.0.0/0".parse()?, "::/0".parse()?],
            ..Hdfs::default()
        },
    };
    config.check()?;
    Ok(config)
}

/// The broker's acts, done by ourselves.
struct Direct {
    kernel: Arc<Linux>,
    target: Arc<Target>,
    live: OnceLock<Live>,
}

struct Live {
    device: OwnedFd,
    connection: Connection,
    control: Option<Control>,
}

#[async_trait::async_trait]
impl Privileged for Direct {
    async fn ask(&self, request: BrokerRequest, fds: Vec<OwnedFd>) -> Result<BrokerAnswer, Refusal> {
        let failed = |e: mounts::KernelError| Refusal::new(RefusalKind::Internal, e.to_string());
        let absent = || Refusal::new(RefusalKind::NotFound, "not mounted yet");
        let Live { device, connection, control } = self.live.get().ok_or_else(absent)?;
        match request {
            BrokerRequest::BackingOpen { .. } => {
                let file = fds.first().ok_or_else(|| Refusal::new(RefusalKind::Invalid, "no descriptor"))?;
                let id = self.kernel.backing_open(device.as_fd(), file.as_fd()).map_err(failed)?;
                Ok(BrokerAnswer::Backing { id })
            }
            BrokerRequest::BackingClose { id, .. } => {
                self.kernel.backing_close(device.as_fd(), id).map_err(failed)?;
                Ok(BrokerAnswer::Done)
            }
            BrokerRequest::Dying { tids } => {
                let tids = tids.into_iter().filter(|tid| self.kernel.dying(*tid)).collect();
                Ok(BrokerAnswer::Dying { tids })
            }
            BrokerRequest::Waiting { .. } => {
                let uncounted =
                    || Refusal::new(RefusalKind::Internal, "no fusectl: waiting requests are not counted");
                let control = control.as_ref().ok_or_else(uncounted)?;
                Ok(BrokerAnswer::Waiting { count: self.kernel.waiting(control).map_err(failed)? })
            }
            BrokerRequest::Probe { .. } => {
                let (kernel, target) = (self.kernel.clone(), self.target.clone());
                let look = move || kernel.probe(&target, What::Alive, PROBE_LIMIT);
                let seen = tokio::task::spawn_blocking(look).await;
                let serving = matches!(seen, Ok(Ok(Outcome::Primed | Outcome::Serving)));
                Ok(BrokerAnswer::Probed { serving })
            }
            BrokerRequest::Abort { .. } => {
                let aborted = match control {
                    _ if self.kernel.has_ended(device.as_fd()) => Ok(()),
                    Some(control) => self.kernel.abort(control),
                    None => self.kernel.abort_at(&self.target, *connection),
                };
                aborted.map_err(failed)?;
                Ok(BrokerAnswer::Done)
            }
            // For Events of Kubernetes, of which there are none here; the log has it.
            BrokerRequest::Report { .. } => Ok(BrokerAnswer::Done),
            BrokerRequest::Hello(_)
            | BrokerRequest::Hold(_)
            | BrokerRequest::Leaving
            | BrokerRequest::Beat
            | BrokerRequest::Confine { .. }
            | BrokerRequest::Release { .. } => Err(Refusal::new(RefusalKind::Invalid, "no broker here")),
        }
    }

    fn connected(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volume::CredentialsKind;

    #[test]
    fn each_store_finds_its_credentials_where_its_own_tools_do() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "{}").unwrap();
        let path = file.path().to_str().unwrap().to_owned();
        let environment = |name: &str| match name {
            "AWS_ACCESS_KEY_ID"
            | "AWS_SECRET_ACCESS_KEY"
            | "AZURE_STORAGE_KEY"
            | "AZURE_STORAGE_SAS_TOKEN"
            | "MILLPOND_BEARER_TOKEN" => Some("x".to_owned()),
            "GOOGLE_APPLICATION_CREDENTIALS" => Some(path.clone()),
            _ => None,
        };
        for (source, kind) in [
            ("s3://bucket", CredentialsKind::Keys),
            ("oss://bucket", CredentialsKind::Keys),
            ("gs://bucket", CredentialsKind::ServiceAccount),
            ("az://container@account.blob.core.windows.net", CredentialsKind::Account),
            ("https://data.example.com", CredentialsKind::Bearer),
        ] {
            let source = SourceUrl::parse(source).unwrap();
            assert_eq!(own_credentials(&source, environment).unwrap().kind(), kind);
            assert!(own_credentials(&source, |_| None).unwrap().is_empty());
        }
        // Files by their paths.
        let conf = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            std::fs::write(conf.path().join(name), text).unwrap();
            conf.path().join(name).to_str().unwrap().to_owned()
        };
        put(
            "core-site.xml",
            "<configuration><property><name>hadoop.security.authentication</name><value>kerberos</value></property></configuration>",
        );
        let (keytab, krb5_conf) = (put("keytab", "\u{5}\u{2}"), put("krb5.conf", "[libdefaults]\n"));
        let hdfs = SourceUrl::parse("hdfs://ns").unwrap();
        let kerberos = own_credentials(&hdfs, |name| match name {
            "KRB5PRINCIPAL" => Some("alice@EXAMPLE.COM".to_owned()),
            "KRB5KEYTAB" => Some(keytab.clone()),
            "KRB5_CONFIG" => Some(krb5_conf.clone()),
            "HADOOP_CONF_DIR" => Some(conf.path().to_str().unwrap().to_owned()),
            _ => None,
        });
        let kerberos = kerberos.unwrap();
        assert_eq!(kerberos.kind(), CredentialsKind::Kerberos);
        assert!(kerberos.hadoop().hdfs_site.is_some() && kerberos.hadoop().krb5_conf.is_some());
        let simple = own_credentials(&hdfs, |name| (name == "HADOOP_USER_NAME").then(|| "bob".to_owned()));
        assert_eq!(simple.unwrap().kind(), CredentialsKind::HdfsUser);
        let gone =
            |name: &str| (name == "GOOGLE_APPLICATION_CREDENTIALS").then(|| "/no/such/file".to_owned());
        let error = own_credentials(&SourceUrl::parse("gs://bucket").unwrap(), gone).unwrap_err().to_string();
        assert!(error.contains("/no/such/file"), "{error}");
    }
}
