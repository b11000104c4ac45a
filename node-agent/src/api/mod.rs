//! The operator's API, which `millpond status`, `warm`, `evict`, `staging` and `doctor` ask.

pub(crate) mod http;
mod staging;

use crate::memory;
use crate::metrics::Metrics;
use crate::privileged::Privileged;
use crate::supervisor::heals::Heals;
use crate::supervisor::{MountState, Phase, Spawner};
use crate::volumes::Volumes;
use crate::volumes::scope::Scope;
use cache::data::Engine;
use futures::StreamExt;
use link::worker::Mode;
use proto::agent::v1 as pb;
use proto::agent::v1::agent_server::Agent;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use store::{Examined, Step};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

pub struct Api {
    pub volumes: Arc<Volumes>,
    pub engine: Arc<Engine>,
    pub privileged: Arc<dyn Privileged>,
    pub spawner: Arc<Spawner>,
    pub heals: Arc<Heals>,
    pub metrics: Arc<Metrics>,
    pub started: SystemTime,
    pub memory_budget: u64,
    /// Name and kind of each tier.
    pub tiers: Vec<(String, &'static str)>,
}

impl Api {
    fn tier_kind(&self, name: &str) -> &'static str {
        self.tiers.iter().find(|(n, _)| n == name).map_or("", |(_, kind)| kind)
    }
}

fn ms(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as i64
}

pub(crate) fn mode_name(mode: Option<Mode>) -> &'static str {
    match mode {
        Some(Mode::Passthrough) => "passthrough",
        Some(Mode::NoOpen) => "no-open",
        Some(Mode::Kept) => "kept",
        Some(Mode::Writable) => "writable",
        None => "",
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Starting | Phase::Answered => "starting",
        Phase::Serving => "serving",
        Phase::Dead => "dead",
        Phase::Suspended => "suspended",
        Phase::Failed => "failed",
        Phase::Stopped => "stopped",
    }
}

/// A node may have a thousand sources, and each takes a while if it does not answer.
const SOURCES_AT_ONCE: usize = 16;
const SOURCE_STEP_LIMIT: Duration = Duration::from_secs(10);

async fn checked(scope: Arc<Scope>, volumes: usize) -> pb::CheckedSource {
    let (source, shown) = (scope.source.handle(), scope.shown.clone());
    // Its volumes may go meanwhile.
    drop(scope);
    let steps = source.examine(SOURCE_STEP_LIMIT).await.into_iter().map(|Examined { step, result }| {
        let step = match step {
            Step::Name => "name",
            Step::Connection => "connection",
            Step::Clock => "clock",
            Step::Access => "access",
        };
        let works = result.is_ok();
        pb::SourceStep { step: step.to_owned(), works, saw: result.unwrap_or_else(|why| why) }
    });
    pb::CheckedSource { source: shown, volumes: volumes as u32, steps: steps.collect() }
}

#[tonic::async_trait]
impl Agent for Api {
    async fn get_status(
        &self,
        _: Request<pb::GetStatusRequest>,
    ) -> Result<Response<pb::GetStatusResponse>, Status> {
        let workers: Vec<u32> =
            self.volumes.mounts().iter().filter_map(|m| m.state().worker.map(|w| w.pid)).collect();
        Ok(Response::new(pb::GetStatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started_ms: ms(self.started),
            broker_connected: self.privileged.connected(),
            anonymous_bytes: memory::of_self_and(&workers),
            memory_budget_bytes: self.memory_budget,
            volumes: self.volumes.mounts().len() as u32,
            standby_workers: self.spawner.standing_by() as u32,
        }))
    }

    async fn list_volumes(
        &self,
        _: Request<pb::ListVolumesRequest>,
    ) -> Result<Response<pb::ListVolumesResponse>, Status> {
        let mut mounts = self.volumes.mounts();
        mounts.sort_by_key(|m| m.id);
        let volumes = mounts
            .iter()
            .map(|m| {
                let MountState { phase, since, mode, heals, worker, counts } = m.state();
                let staged = m.area.as_ref().map(|area| area.waiting()).unwrap_or_default();
                pb::Volume {
                    mount: m.id.to_string(),
                    volume_id: m.spec.id.to_string(),
                    source: m.spec.source.to_string(),
                    scope: m.scope.id.to_string(),
                    target: m.described.target.clone(),
                    pod: m
                        .described
                        .subjects
                        .pod
                        .as_ref()
                        .map(|p| format!("{}/{}", p.namespace, p.name))
                        .unwrap_or_default(),
                    mode: mode_name(mode).to_owned(),
                    worker: Some(pb::Worker {
                        pid: worker.map_or(0, |w| w.pid),
                        state: phase_name(phase).to_owned(),
                        since_ms: ms(since),
                        anonymous_bytes: worker.map_or(0, |w| memory::of(w.pid)),
                    }),
                    heals,
                    published_ms: ms(m.published),
                    reads_hit: counts.reads_hit,
                    reads_miss: counts.reads_miss,
                    stale_since_ms: m.stale_since().map_or(0, ms),
                    staged_files: staged.files as u64,
                    staged_bytes: staged.bytes,
                    staged_conflicts: staged.conflicts as u64,
                }
            })
            .collect();
        Ok(Response::new(pb::ListVolumesResponse { volumes }))
    }

    async fn get_cache(
        &self,
        _: Request<pb::GetCacheRequest>,
    ) -> Result<Response<pb::GetCacheResponse>, Status> {
        let usage = self.engine.usage();
        let live = self.volumes.scopes.all();
        let tiers = usage
            .tiers
            .iter()
            .map(|t| pb::Tier {
                name: t.name.clone(),
                kind: self.tier_kind(&t.name).to_owned(),
                paths: t.roots.iter().map(|r| r.path.display().to_string()).collect(),
                bytes: t.bytes,
                quota_bytes: t.quota_bytes,
                files: t.inodes,
                quota_files: t.quota_inodes,
                free_bytes: t.roots.iter().map(|r| r.free_bytes).min().unwrap_or(0),
                degraded: t.roots.iter().any(|r| r.degraded),
            })
            .collect();
        let scopes = usage
            .scopes
            .iter()
            .map(|s| pb::Scope {
                scope: s.scope.to_string(),
                source: live.iter().find(|l| l.id == s.scope).map(|l| l.shown.clone()).unwrap_or_default(),
                bytes: s.bytes,
                files: s.files,
            })
            .collect();
        Ok(Response::new(pb::GetCacheResponse { tiers, scopes }))
    }

    async fn list_heals(
        &self,
        _: Request<pb::ListHealsRequest>,
    ) -> Result<Response<pb::ListHealsResponse>, Status> {
        let heals = self
            .heals
            .recent()
            .into_iter()
            .map(|h| pb::Heal {
                at_ms: ms(h.at),
                volume_id: h.volume.to_string(),
                mount: h.mount.to_string(),
                cause: h.cause.name().to_owned(),
                duration_us: h.took.as_micros() as u64,
                level: h.level,
                replayed: h.replayed,
                ended: h.ended,
            })
            .collect();
        Ok(Response::new(pb::ListHealsResponse { heals }))
    }

    async fn get_stats(
        &self,
        _: Request<pb::GetStatsRequest>,
    ) -> Result<Response<pb::GetStatsResponse>, Status> {
        Ok(Response::new(pb::GetStatsResponse { values: self.metrics.values() }))
    }

    async fn evict(&self, request: Request<pb::EvictRequest>) -> Result<Response<pb::EvictResponse>, Status> {
        let pb::EvictRequest { path, all } = request.into_inner();
        let evicted = match (path.is_empty(), all) {
            (true, true) => self.engine.evict(None, b"").await,
            (false, false) => {
                let (mount, rest) = self.volumes.find(Path::new(&path)).ok_or_else(|| {
                    Status::not_found(format!("{path} is not below the target of a mounted volume"))
                })?;
                self.engine.evict(Some(&mount.scope.id), rest.as_os_str().as_bytes()).await
            }
            _ => return Err(Status::invalid_argument("give either a path or all")),
        };
        Ok(Response::new(pb::EvictResponse { files: evicted.files, bytes: evicted.bytes }))
    }

    type CheckSourcesStream = ReceiverStream<Result<pb::CheckedSource, Status>>;

    async fn check_sources(
        &self,
        _: Request<pb::CheckSourcesRequest>,
    ) -> Result<Response<Self::CheckSourcesStream>, Status> {
        let (sender, receiver) = tokio::sync::mpsc::channel(16);
        let (scopes, mounts) = (self.volumes.scopes.all(), self.volumes.mounts());
        let used = scopes.into_iter().filter_map(move |scope| {
            let volumes = mounts.iter().filter(|mount| mount.scope.id == scope.id).count();
            (volumes > 0).then_some((scope, volumes))
        });
        tokio::spawn(async move {
            let checked = futures::stream::iter(used).map(|(scope, volumes)| checked(scope, volumes));
            let mut checked = checked.buffer_unordered(SOURCES_AT_ONCE);
            while let Some(source) = checked.next().await {
                if sender.send(Ok(source)).await.is_err() {
                    return; // nobody listens any more
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type WarmStream = ReceiverStream<Result<pb::WarmProgress, Status>>;

    async fn warm(&self, request: Request<pb::WarmRequest>) -> Result<Response<Self::WarmStream>, Status> {
        let paths = request.into_inner().paths;
        if paths.is_empty() {
            return Err(Status::invalid_argument("give at least one path"));
        }
        let (sender, receiver) = tokio::sync::mpsc::channel(16);
        let volumes = self.volumes.clone();
        tokio::spawn(async move { crate::prefetch::warm::warm(&volumes, &paths, sender).await });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type ListStagingStream = ReceiverStream<Result<pb::StagingPage, Status>>;

    async fn list_staging(
        &self,
        request: Request<pb::ListStagingRequest>,
    ) -> Result<Response<Self::ListStagingStream>, Status> {
        staging::list(&self.volumes, request.into_inner()).await
    }

    type ReadStagingStream = ReceiverStream<Result<pb::StagedPiece, Status>>;

    async fn read_staging(
        &self,
        request: Request<pb::ReadStagingRequest>,
    ) -> Result<Response<Self::ReadStagingStream>, Status> {
        staging::read(&self.volumes, request.into_inner()).await
    }

    async fn discard_staging(
        &self,
        request: Request<pb::DiscardStagingRequest>,
    ) -> Result<Response<pb::DiscardStagingResponse>, Status> {
        staging::discard(&self.volumes, request.into_inner()).await
    }

    type UploadStagingStream = ReceiverStream<Result<pb::UploadProgress, Status>>;

    async fn upload_staging(
        &self,
        request: Request<pb::UploadStagingRequest>,
    ) -> Result<Response<Self::UploadStagingStream>, Status> {
        staging::upload(&self.volumes, request.into_inner()).await
    }
}
