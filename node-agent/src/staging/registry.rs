//! The staging areas of a node: each is opened with the first mount of its volume, from what lies on the disk, and closed with
//! the last.

use super::area::Area;
use super::believed::{AllKnown, Believed};
use super::bring::FILLED_AT_ONCE;
use super::buffers::Buffers;
use super::discards::Discards;
use super::disk::{Disk, Gone, Silence};
use super::failures::Failures;
use super::fence::Fence;
use super::locks::{Held, Locks};
use super::opening;
use super::random::random;
use super::tenure::Tenure;
use super::times::Times;
use super::upkeep::{self, FILES_AT_ONCE};
use super::{Waiting, uploads};
use crate::lock::lock;
use crate::state::StateDir;
use crate::volumes::scope::Scope;
use link::{Refusal, RefusalKind};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use store::{Sink, StoreError};
use tokio::sync::{OnceCell, Semaphore};
use tokio::time::Instant;
use volume::{ScopeId, VolumeId, VolumeSpec};

/// In the agent's state directory.
pub(crate) const DIRECTORY: &str = "staging";

/// All areas of this node.
pub(crate) struct Staging {
    pub(super) dir: PathBuf,
    /// How long its disk may take.
    pub(super) limit: Duration,
    /// All areas lie on it.
    silence: Silence,
    /// A volume's is held while its area is opened, or looked into without being opened: no volume waits for another one's disk
    /// or store.
    turns: Locks,
    areas: Mutex<HashMap<VolumeId, Weak<Area>>>,
    /// Of all areas: a node may have a thousand that nobody writes to.
    buffers: Arc<Buffers>,
    /// Areas in which nothing waits and that were not opened since: source, and whether they are described.
    pub(super) idle: Mutex<HashMap<VolumeId, (Option<String>, bool)>>,
    /// Areas that hold nothing that the store has, too, and that were not opened since.
    pub(super) emptied: Mutex<HashSet<VolumeId>>,
    /// When this agent began to take mounts.
    pub(super) started: Instant,
}

impl Staging {
    pub(crate) fn new(dir: PathBuf, limit: Duration) -> Self {
        Self {
            dir,
            limit,
            silence: Silence::default(),
            turns: Locks::default(),
            areas: Mutex::default(),
            buffers: Arc::default(),
            idle: Mutex::default(),
            emptied: Mutex::default(),
            started: Instant::now(),
        }
    }

    /// Those that are open, whether a mount has them or not.
    pub(crate) fn open_areas(&self) -> Vec<Arc<Area>> {
        lock(&self.areas).values().filter_map(Weak::upgrade).collect()
    }

    /// If this agent has it open.
    pub(crate) fn open_area(&self, id: &VolumeId) -> Option<Arc<Area>> {
        lock(&self.areas).get(id).and_then(Weak::upgrade)
    }

    /// Nobody else opens the volume's area, or looks into one that is not open.
    pub(super) async fn turn(&self, id: &VolumeId) -> Held {
        self.turns.take(&[id.as_str().as_bytes()]).await
    }

    /// Of all volumes that are open.
    pub(crate) fn waiting(&self) -> Waiting {
        self.open_areas().iter().map(|area| area.waiting()).fold(Waiting::default(), Waiting::plus)
    }

    /// What the open area of this volume has its names from. Newer keys open the same scope: inode numbers are of it.
    pub(crate) async fn scope_of(&self, spec: &VolumeSpec) -> Option<ScopeId> {
        let _turn = self.turn(&spec.id).await; // one that is just being opened
        let area = self.open_area(&spec.id)?;
        (shown(&area.spec) == shown(spec)).then(|| area.scope.id.clone())
    }

    /// The area of this volume, opened if no mount has it.
    pub(crate) async fn open(
        self: &Arc<Self>,
        spec: &VolumeSpec,
        scope: &Arc<Scope>,
        numbers: &Arc<StateDir>,
    ) -> Result<Arc<Area>, Refusal> {
        let opening = {
            let (staging, spec) = (self.clone(), spec.clone());
            let (scope, numbers) = (scope.clone(), numbers.clone());
            tokio::spawn(async move { staging.open_in_turn(&spec, &scope, &numbers).await })
        };
        let is_silent = async {
            tokio::time::sleep(self.limit).await;
            self.silence.begun().await;
        };
        tokio::select! {
            biased;
            opened = opening => match opened {
                Ok(opened) => opened,
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(_) => Err(refusal(spec, "the node agent is being stopped".into())),
            },
            // To be found open by a later attempt, once the disk answers.
            () = is_silent => Err(refusal(spec, "its disk does not answer".into())),
        }
    }

    async fn open_in_turn(
        &self,
        spec: &VolumeSpec,
        scope: &Arc<Scope>,
        numbers: &Arc<StateDir>,
    ) -> Result<Arc<Area>, Refusal> {
        let _turn = self.turn(&spec.id).await;
        let refused = |why: String| refusal(spec, why);
        let source = shown(spec);
        if let Some(area) = self.open_area(&spec.id) {
            let of_it = shown(&area.spec);
            if of_it != source {
                return Err(refused(opening::still_of(&of_it, &source)));
            }
            if area.scope.id != scope.id {
                return Err(refused(
                    "another pod's publish with other credentials came first; this one is tried again".into(),
                ));
            }
            return Ok(area);
        }
        lock(&self.idle).remove(&spec.id);
        lock(&self.emptied).remove(&spec.id);
        scope.note_written();
        let sink = scope.source.sink().ok_or_else(|| {
            Refusal::new(
                RefusalKind::Invalid,
                format!("{} cannot be written to by this version", spec.source),
            )
        })?;
        let dir = self.dir.join(spec.id.as_str());
        let disk = Disk::start(self.limit, self.silence.clone()).map_err(|e| refused(e.to_string()))?;
        let opened = disk
            .run(move || opening::open(&dir, &source))
            .await
            .map_err(|Gone| refused("the thread of its disk has ended".into()))?;
        let opened = opened.map_err(refused)?;
        let tenure = Arc::new(Tenure::default());
        let sink = Arc::new(Fence::new(sink, tenure.clone()));
        let area = Arc::new_cyclic(|me| Area {
            volume: spec.id.clone(),
            scope: scope.clone(),
            sink,
            spec: spec.clone(),
            files: Arc::new(opened.files),
            numbers: numbers.clone(),
            disk,
            journal: Arc::new(Mutex::new(Some(opened.journal))),
            changes: Arc::default(),
            turn: Arc::default(),
            tenure,
            state: Arc::new(Mutex::new(opened.state)),
            locks: Locks::default(),
            ordering: tokio::sync::Mutex::default(),
            moving: tokio::sync::RwLock::default(),
            ending_moves: tokio::sync::Mutex::default(),
            dropping: Arc::default(),
            counting: tokio::sync::Mutex::new(()),
            lingering: Mutex::default(),
            making_way: tokio::sync::Mutex::default(),
            listed_at: Mutex::default(),
            vacated: Mutex::default(),
            mounts: Mutex::default(),
            believed: Believed::new(match opened.is_new {
                true => AllKnown::Now,
                false => AllKnown::After(self.started),
            }),
            tag: opened.tag,
            lost_tags: opened.lost_tags,
            drawn: AtomicU64::new(0),
            able: OnceCell::new(),
            room: AtomicU64::new(0),
            sending_small: Arc::new(Semaphore::new(FILES_AT_ONCE)),
            sending_large: Arc::new(Semaphore::new(FILES_AT_ONCE)),
            arrived: AtomicU64::new(0),
            buffers: self.buffers.clone(),
            filling: Arc::new(Semaphore::new(FILLED_AT_ONCE)),
            stale: AtomicU64::new(0),
            kept_dirs: Mutex::default(),
            times: Times::default(),
            recalled: Mutex::new(opened.recalled),
            failures: Failures::default(),
            told: Mutex::default(),
            discards: Discards::default(),
            described: tokio::sync::Mutex::default(),
            me: me.clone(),
        });
        if let Some(entries) = opened.recovering {
            let failed = |wrong| refused(format!("after a loss of power it waits for the store: {wrong:?}"));
            area.clone().recover().await.map_err(failed)?;
            area.commit(entries, |_| ()).await.map_err(failed)?;
            area.sync_disk().await.map_err(failed)?;
        } else {
            area.follow_moves().await;
        }
        let mut areas = lock(&self.areas);
        areas.retain(|_, area| area.strong_count() > 0);
        areas.insert(spec.id.clone(), Arc::downgrade(&area));
        drop(areas);
        upkeep::keep_sending(&area);
        uploads::keep_ending(&area);
        Ok(area)
    }
}

/// The directory of a volume in a bucket, which is not there before something is in it.
pub(crate) async fn make_root(sink: &dyn Sink) -> Result<(), StoreError> {
    let failed = |e: std::io::Error| StoreError::Invalid { what: "/dev/urandom".into(), why: e.to_string() };
    let id = store::WriteId::new(random().map_err(failed)?);
    let write = store::Write { id, attributes: store::Attributes::default() };
    sink.make_dir(b"", &write).await
}

fn refusal(spec: &VolumeSpec, why: String) -> Refusal {
    Refusal::new(RefusalKind::Unavailable, format!("staging area of {}: {why}", spec.id))
}

/// What a volume shows, and where.
fn shown(spec: &VolumeSpec) -> String {
    let endpoint = spec.endpoint().map(|endpoint| format!(" at {endpoint}")).unwrap_or_default();
    format!("{}{endpoint}", spec.source)
}
