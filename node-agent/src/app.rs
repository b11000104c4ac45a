//! Puts the agent together from its configuration, runs it, takes it apart again.

use crate::api::Api;
use crate::api::http::Page;
use crate::broker_client::{Broker, Serve};
use crate::config::{Config, TierKind};
use crate::directories;
use crate::hadoop::HelperSpawner;
use crate::handoff::order::Order;
use crate::handoff::owner::Owner;
use crate::handoff::standby::{Prepared, Start};
use crate::memory;
use crate::metrics::{Metrics, TierLabel};
use crate::prefetch::open_gate::OpenGate;
use crate::prefetch::siblings::SiblingPrefetch;
use crate::privileged::{self, Privileged};
use crate::serve::Server;
use crate::serve::dying::DyingCallers;
use crate::source::outage::Tolerance;
use crate::state::StateDir;
use crate::supervisor::heals::{HealCause, Heals};
use crate::supervisor::{MountContext, SpawnOptions, Spawner};
use crate::volumes::collect;
use crate::volumes::{ScopeOpener, Volumes};
use anyhow::{Context, Result};
use cache::data::Engine;
use futures::future::BoxFuture;
use link::Refusal;
use link::broker::{AgentAnswer, AgentRequest, Report};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;

/// How often it is looked what waits for its store.
const UPLOADS_LOOK: Duration = Duration::from_secs(5);

/// A running agent. `shutdown` ends it in order; dropping it leaves that to the process's end.
pub struct App {
    pub volumes: Arc<Volumes>,
    pub engine: Arc<Engine>,
    pub spawner: Arc<Spawner>,
    pub(crate) helpers: HelperSpawner,
    /// Where the metrics page really listens (the configured port may be 0).
    pub metrics_address: Option<std::net::SocketAddr>,
    api_socket: PathBuf,
    /// The operator API, the metrics page if there is one, and the removal of unused metadata stores.
    servers: Vec<JoinHandle<()>>,
    orders: mpsc::UnboundedReceiver<Order>,
    /// Of this agent until it drains.
    owner: Option<Owner>,
}

impl App {
    /// `privileged`: None connects to the broker of the configuration. Boxed, as everything here that other crates
    /// await: the agent is compiled once, here, and not again in each program that contains it.
    pub fn start(
        config: Config,
        privileged: Option<Arc<dyn Privileged>>,
    ) -> BoxFuture<'static, Result<Self>> {
        Box::pin(async move {
            prepare_process();
            directories::wait(&config).await?;
            let state_dir = &config.agent.state_dir;
            match Owner::try_take(state_dir)
                .with_context(|| format!("state directory {}", state_dir.display()))?
            {
                Some(owner) => Self::launch(config, privileged, Start { owner, prepared: None }).await,
                None => anyhow::bail!("another agent works in {}: stop it first", state_dir.display()),
            }
        })
    }

    /// Does what a broker would ask for: a laptop's agent has none.
    pub fn serve(
        &self,
        request: AgentRequest,
        fds: Vec<OwnedFd>,
    ) -> BoxFuture<'_, Result<(AgentAnswer, Vec<OwnedFd>), Refusal>> {
        Serve::serve(&*self.volumes, request, fds)
    }

    pub(crate) async fn launch(
        config: Config,
        privileged: Option<Arc<dyn Privileged>>,
        entry: Start,
    ) -> Result<Self> {
        let Start { owner, prepared } = entry;
        let runtime = tokio::runtime::Handle::current();
        let metrics = Metrics::new();
        let numbers = Arc::new(StateDir::open(&config.agent.state_dir)?);
        let generation = StateDir::generation();
        std::fs::create_dir_all(&config.cache.metadata_dir).with_context(|| {
            format!(
                "metadata directory {}: it must be writable by the agent",
                config.cache.metadata_dir.display()
            )
        })?;
        let (cache_config, counted, on) = (engine_config(&config), metrics.clone(), runtime.clone());
        let opening = tokio::task::spawn_blocking(move || Engine::open(cache_config, counted, on));
        let (engine, recovery) = opening.await?.context("the cache cannot be opened")?;
        tracing::info!(?recovery, "cache opened");

        let broker = prepared.as_ref().map_or_else(Broker::new, |p| p.broker.clone());
        let (privileged, connect) = match (privileged, &config.agent.broker_socket) {
            (Some(privileged), _) => (privileged, None),
            (None, Some(path)) => (broker.clone() as Arc<dyn Privileged>, Some(path.clone())),
            (None, None) => anyhow::bail!("agent.broker_socket is missing from the configuration"),
        };
        let spawner = match &prepared {
            Some(Prepared { spawner, .. }) => spawner.clone(),
            None => {
                Spawner::start(SpawnOptions::of(&config)?).context("the worker supervisor cannot start")?
            }
        };
        let counting = metrics.clone();
        let (telling, on) = (privileged.clone(), runtime.clone());
        let heals = Heals::new(Box::new(move |heal| {
            counting.healed(heal);
            if heal.cause == HealCause::Ended {
                return; // the broker made this mount and has reported it
            }
            let took_us = heal.took.as_micros() as u64;
            let healed = Report::Healed { cause: heal.cause.name().to_owned(), took_us };
            privileged::report(&telling, &on, heal.mount, healed);
        }));
        let server = Arc::new(Server {
            engine: engine.clone(),
            privileged: privileged.clone(),
            metrics: metrics.clone(),
            runtime: runtime.clone(),
            reading: config.cache.reading(),
            open_gate: OpenGate::default(),
            siblings: Arc::new(SiblingPrefetch::new(engine.clone())),
            backing_waits: Arc::default(),
            dying: DyingCallers::default(),
        });
        let (tell_ended, mut ended) = tokio::sync::mpsc::unbounded_channel();
        let (tell_outage, mut outages) = tokio::sync::mpsc::unbounded_channel();
        let context = Arc::new(MountContext {
            spawner: spawner.clone(),
            privileged: privileged.clone(),
            answer: Arc::new(server),
            heals: heals.clone(),
            metrics: metrics.clone(),
            hang_limit: config.workers.hang_limit.0,
            memory_limit: Some(config.workers.memory_limit.0).filter(|bytes| *bytes > 0),
            unlimited: std::sync::Once::new(),
            runtime: runtime.clone(),
            workers: config.workers.clone(),
            suspend: config.workers.suspend_respawn_file.clone(),
            ended: tell_ended,
        });
        let limits = Arc::new(store::Limits::new(store::LimitsConfig {
            requests: config.store.max_requests,
            bytes_per_second: Some(config.store.bandwidth.0).filter(|b| *b > 0),
            tls_min: config.store.tls_min,
            egress: config.egress(),
            ..store::LimitsConfig::default()
        }));
        let (helpers, hdfs) = crate::hadoop::node(&config, privileged.clone())
            .context("the thread that starts HDFS helpers cannot start")?;
        let (give_order, orders) = mpsc::unbounded_channel();
        let room = Arc::new(cache::meta::Room::new(config.cache.metadata_total.0));
        let opener = ScopeOpener {
            config: config.clone(),
            engine: engine.clone(),
            numbers,
            generation,
            limits,
            hdfs,
            observer: metrics.clone(),
            outages: tell_outage,
            room,
        };
        let volumes = Volumes::new(opener, context, give_order);
        crate::volumes::follow_cache(&engine, volumes.clone())?;
        // A broker that was restarted does not know the mounts of its predecessor, and cannot tell us of their end.
        let mounted = volumes.clone();
        tokio::spawn(async move {
            while let Some(mount) = ended.recv().await {
                mounted.unpublish(mount).await;
            }
        });
        let (reading, telling, on) = (volumes.clone(), privileged.clone(), runtime.clone());
        tokio::spawn(async move {
            while let Some((scope, why)) = outages.recv().await {
                for mount in reading.mounts().iter().filter(|m| m.scope.id == scope) {
                    let stale = Tolerance::of(&mount.spec.parameters).is_some();
                    let away = |why: &String| Report::SourceAway { why: why.clone(), stale };
                    let report = why.as_ref().map_or(Report::SourceBack, away);
                    privileged::report(&telling, &on, mount.id, report);
                }
            }
        });

        // Who was a standby first beats already.
        if connect.is_some() && prepared.is_none() {
            let beating = volumes.clone();
            crate::heartbeat::start(
                move || Some(beating.clone()),
                spawner.clone(),
                privileged.clone(),
                runtime.clone(),
            )
            .context("no thread for the sign of life")?;
        }
        let told = privileged.clone();
        let api = Api {
            volumes: volumes.clone(),
            engine: engine.clone(),
            privileged,
            spawner: spawner.clone(),
            heals,
            metrics: metrics.clone(),
            started: SystemTime::now(),
            memory_budget: config.cache.memory.0,
            tiers: config.cache.tiers.iter().map(|t| (t.name.clone(), t.kind.name())).collect(),
        };
        let listener = listen(&config.agent.api_socket).await?;
        let service = proto::agent::v1::agent_server::AgentServer::new(api);
        let serving = tokio::spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            if let Err(error) =
                tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await
            {
                tracing::error!(%error, "the operator API ended");
            }
        });
        let mut servers = vec![serving, collect::start(&volumes), tell_of_uploads(&volumes, told, &runtime)];
        servers.push(volumes.staging.keep_room(volumes.collecting.clone()));
        let metrics_address = match config.agent.metrics {
            None => None,
            Some(address) => {
                let bound = || tokio::net::TcpListener::bind(address);
                let is_free = |bound: &std::io::Result<_>| {
                    !bound.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
                };
                let listener = once_free(bound, is_free)
                    .await
                    .with_context(|| format!("metrics address {address} cannot be bound"))?;
                let bound = listener.local_addr()?;
                tracing::info!(address = %bound, "metrics page");
                let refresh = gauges(metrics.clone(), volumes.clone(), engine.clone(), spawner.clone());
                let page = Page::new(Arc::new(move || {
                    refresh();
                    metrics.page()
                }));
                servers.push(tokio::spawn(crate::api::http::serve(
                    listener,
                    page,
                    crate::api::http::Limits::default(),
                )));
                Some(bound)
            }
        };
        if let Some(prepared) = prepared {
            prepared.appoint(volumes.clone());
        } else if let Some(path) = connect {
            let volumes = volumes.clone();
            std::thread::Builder::new()
                .name("broker".into())
                .spawn(move || broker.run(path, volumes, runtime))
                .context("no thread for the broker connection")?;
        }
        let api_socket = config.agent.api_socket;
        let owner = Some(owner);
        Ok(Self { volumes, engine, spawner, helpers, metrics_address, api_socket, servers, orders, owner })
    }

    /// Lets go of everything that has one owner, as fast as it can: applications wait. False: of what a staging disk that hangs may still
    /// change it cannot, as long as this process lives.
    pub(crate) async fn drain(&mut self) -> bool {
        tracing::info!("draining for a successor");
        self.volumes.drain().await;
        for server in self.servers.drain(..) {
            server.abort();
            let _ = server.await; // aborted: its listener is closed now
        }
        self.engine.shutdown().await;
        let is_released = self.volumes.release_stores();
        self.owner = None;
        // Nobody waits for their end: what they ask is of no use any more.
        let helpers = self.helpers.clone();
        drop(tokio::task::spawn_blocking(move || helpers.end_all()));
        is_released
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.owner.is_none()
    }

    pub(crate) async fn next_order(&mut self) -> Option<Order> {
        self.orders.recv().await
    }

    /// Stops the workers and writes down what the cache knows.
    pub fn shutdown(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            self.servers.iter().for_each(JoinHandle::abort);
            self.volumes.stop_all().await;
            self.engine.shutdown().await;
            let _ = std::fs::remove_file(&self.api_socket); // a stale socket is replaced at the next start anyway
        })
    }
}

/// Of this process as a whole, before it opens its cache.
pub(crate) fn prepare_process() {
    startup::memory::map_large_blocks();
    // Cache files, connections and workers' sockets are many.
    if let Err(error) = startup::raise_descriptor_limit() {
        tracing::warn!(%error, "the limit on open files stays low: large working sets may miss the cache");
    }
}

fn engine_config(config: &Config) -> cache::data::Config {
    let c = &config.cache;
    let tier = |t: &crate::config::Tier| cache::data::Tier {
        name: t.name.clone(),
        kind: match t.kind {
            TierKind::Memory => cache::data::TierKind::Memory,
            TierKind::Ssd => cache::data::TierKind::Ssd,
            TierKind::Hdd => cache::data::TierKind::Hdd,
        },
        paths: t.paths.clone(),
        quota_bytes: t.quota.0,
        quota_inodes: t.inodes,
        high_percent: t.high,
        low_percent: t.low,
        min_free_bytes_percent: t.min_free_bytes,
        min_free_inodes_percent: t.min_free_inodes,
    };
    cache::data::Config {
        tiers: c.tiers.iter().map(tier).collect(),
        block_bytes: c.block.0,
        scope_limit_bytes: c.scope_limit.map(|s| s.0),
        reading: c.reading(),
        reading_max: c.reading_max(),
        memory_bytes: c.memory.0,
        disk_timeout: config.disk_timeout(),
    }
}

fn gauges(
    metrics: Arc<Metrics>,
    volumes: Arc<Volumes>,
    engine: Arc<Engine>,
    spawner: Arc<Spawner>,
) -> Arc<dyn Fn() + Send + Sync> {
    Arc::new(move || {
        let mounts = volumes.mounts();
        let workers: Vec<u32> = mounts.iter().filter_map(|m| m.state().worker.map(|w| w.pid)).collect();
        metrics.volumes.set(mounts.len() as i64);
        metrics.volumes_stale.set(mounts.iter().filter(|m| m.stale_since().is_some()).count() as i64);
        let waiting = volumes.staging.waiting();
        metrics.staging_files.set(waiting.files as i64);
        metrics.staging_bytes.set(waiting.bytes as i64);
        metrics.staging_conflicts.set(waiting.conflicts as i64);
        metrics.standby.set(spawner.standing_by() as i64);
        metrics.anonymous_bytes.set(memory::of_self_and(&workers) as i64);
        for tier in engine.usage().tiers {
            let label = TierLabel { tier: tier.name.clone() };
            metrics.tier_bytes.get_or_create(&label).set(tier.bytes as i64);
            metrics.tier_files.get_or_create(&label).set(tier.inodes as i64);
            metrics.tier_degraded.get_or_create(&label).set(i64::from(tier.roots.iter().any(|r| r.degraded)));
        }
    })
}

/// What the agent before has closed may be open for a moment: in a child that it was starting, which executes its program
/// next.
const CLOSING: Duration = Duration::from_secs(2);
const CLOSING_LOOK: Duration = Duration::from_millis(10);

/// Tries again for [`CLOSING`], and gives what the last attempt gave.
async fn once_free<T, F: Future<Output = T>>(attempt: impl Fn() -> F, is_free: impl Fn(&T) -> bool) -> T {
    let end = Instant::now() + CLOSING;
    loop {
        let got = attempt().await;
        if is_free(&got) || Instant::now() >= end {
            return got;
        }
        tokio::time::sleep(CLOSING_LOOK).await;
    }
}

/// Owners of volumes learn what waits for their stores longer than it should.
fn tell_of_uploads(
    volumes: &Arc<Volumes>,
    privileged: Arc<dyn Privileged>,
    runtime: &tokio::runtime::Handle,
) -> JoinHandle<()> {
    let (volumes, on) = (volumes.clone(), runtime.clone());
    runtime.spawn(async move {
        loop {
            tokio::time::sleep(UPLOADS_LOOK).await;
            volumes.tell_of_uploads(|mount, report| privileged::report(&privileged, &on, mount, report));
        }
    })
}

/// A socket that only our user (and root) may use; a stale file of an earlier run is replaced.
async fn listen(path: &Path) -> Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("directory {}", dir.display()))?;
    }
    let served = once_free(|| tokio::net::UnixStream::connect(path), std::io::Result::is_err).await;
    if served.is_ok() {
        anyhow::bail!(
            "another agent serves {}: stop it first, or configure another api_socket",
            path.display()
        );
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("stale socket {}", path.display()));
        }
        _ => {}
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("operator API socket {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}
