//! What people are shown of staging areas, whether a mount has them or not.

use super::Waiting;
use super::area::Area;
use super::believed::STRANGERS;
use super::closed::Closed;
use super::description::{self, Description};
use super::disk::{Disk, Silence};
use super::failures::Failure;
use super::registry::{DIRECTORY, Staging};
use super::staged::{StagedFile, in_order};
use crate::lock::lock;
use link::{Refusal, RefusalKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tokio::time::Instant;
use volume::VolumeId;

/// One area, as it is now.
#[derive(Debug)]
pub(crate) struct Inspected {
    pub(crate) volume: VolumeId,
    /// None: its journal does not say.
    pub(crate) source: Option<String>,
    /// Mounts that have it.
    pub(crate) mounts: usize,
    /// This agent has it open, and sends what waits.
    pub(crate) is_open: bool,
    pub(crate) waiting: Waiting,
    pub(crate) oldest: Option<SystemTime>,
    pub(crate) failure: Option<Failure>,
    /// Why it cannot be looked into.
    pub(crate) problem: Option<String>,
    /// What it takes to open it without a mount is known, but for credentials.
    pub(crate) is_described: bool,
    pub(crate) dir: PathBuf,
    /// Those that wait, in the order of their paths.
    pub(crate) files: Vec<StagedFile>,
}

/// What came of a look at a volume that may have no area.
#[derive(Debug)]
pub(crate) enum Looked {
    Area(Box<Inspected>),
    /// There is no such area.
    Absent,
}

/// What the clock on the wall showed then.
pub(super) fn time_of(at: Instant) -> SystemTime {
    SystemTime::now().checked_sub(at.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH)
}

impl Area {
    pub(super) fn files_that_wait(&self) -> Vec<StagedFile> {
        let state = self.state();
        let shown = state.files.values().filter_map(|file| {
            let since = file.waits_since().map_or_else(SystemTime::now, time_of);
            let opens = state.opens.get(&file.ino).map_or(0, |mounts| mounts.values().sum());
            StagedFile::of(file.ino, &file.record(), (file.size(), file.rest.bytes()), since, opens)
        });
        in_order(shown.collect())
    }

    pub(super) fn mounts_here(&self) -> usize {
        lock(&self.mounts).len()
    }

    /// The last failure, if what it concerns may still wait.
    pub(super) fn last_failure(&self) -> Option<Failure> {
        self.failures.last()
    }

    pub(crate) fn failures_since(&self, begun: SystemTime) -> Vec<Failure> {
        self.failures.since(begun)
    }
}

impl Staging {
    /// Volumes that have an area on this node. `limit`: of the disk.
    pub(crate) async fn volumes(&self, limit: Duration) -> Result<Vec<VolumeId>, String> {
        let dir = self.dir.clone();
        on_disk(limit, move || volumes_in(&dir)).await?
    }

    /// Mounts of the agent before may come to this one for so long still; None: all that were there have come.
    pub(crate) fn may_come(&self) -> Option<Duration> {
        STRANGERS.checked_sub(self.started.elapsed())
    }

    /// How this volume was published last, for who sends what waits of it without a mount. `limit`: of the disk.
    pub(crate) async fn described(&self, id: &VolumeId, limit: Duration) -> Result<Description, Refusal> {
        let dir = self.dir.join(id.as_str());
        let read = on_disk(limit, move || match dir.exists() {
            true => description::read(&dir).map(Some),
            false => Ok(None),
        });
        let again = "publish the volume on this node again, and what waits is sent, or copy it with `millpond staging export`";
        match read.await.and_then(|read| read) {
            Ok(Some(Some(described))) => Ok(described),
            Ok(Some(None)) => {
                let why = format!(
                    "the staging area of {id} was left by a version that kept nothing of the volume beside it: {again}"
                );
                Err(Refusal::new(RefusalKind::Conflict, why))
            }
            Ok(None) => {
                let why =
                    format!("volume {id} has no staging area on this node: see `millpond staging list`");
                Err(Refusal::new(RefusalKind::NotFound, why))
            }
            Err(why) => {
                let why = format!(
                    "what is kept of volume {id} beside its staging area cannot be used ({why}): {again}"
                );
                Err(Refusal::new(RefusalKind::Unavailable, why))
            }
        }
    }

    /// `limit`: of the disk.
    pub(crate) async fn inspect(&self, id: &VolumeId, limit: Duration) -> Looked {
        let dir = self.dir.join(id.as_str());
        let mut inspected = Inspected {
            volume: id.clone(),
            source: None,
            mounts: 0,
            is_open: false,
            waiting: Waiting::default(),
            oldest: None,
            failure: None,
            problem: None,
            is_described: false,
            dir: dir.clone(),
            files: Vec::new(),
        };
        // Nobody opens it meanwhile.
        let turn = self.turn(id).await;
        if let Some(area) = self.open_area(id) {
            drop(turn);
            inspected.source = area.state().source.clone();
            (inspected.mounts, inspected.is_open) = (area.mounts_here(), true);
            (inspected.waiting, inspected.files) = (area.waiting(), area.files_that_wait());
            inspected.failure = area.last_failure().filter(|_| inspected.waiting.files > 0);
            inspected.is_described = !area.described.lock().await.is_empty();
        } else if let Some((source, is_described)) = lock(&self.idle).get(id).cloned() {
            (inspected.source, inspected.is_described) = (source, is_described);
        } else {
            let looked = on_disk(limit, move || {
                let is_described = matches!(description::read(&dir), Ok(Some(_)));
                Closed::open(&dir).map(|closed| closed.map(|closed| (closed, is_described)))
            });
            match looked.await.and_then(|looked| looked) {
                Ok(None) => return Looked::Absent,
                Ok(Some((closed, is_described))) => {
                    (inspected.waiting, inspected.files) = (closed.waiting(), closed.files_that_wait());
                    (inspected.source, inspected.is_described) = (closed.source, is_described);
                    if inspected.files.is_empty() {
                        // A node may have had a thousand, and each takes the disk's time.
                        lock(&self.idle).insert(id.clone(), (inspected.source.clone(), is_described));
                    }
                }
                Err(why) => inspected.problem = Some(why),
            }
            drop(turn);
        }
        inspected.oldest = inspected.files.iter().map(|file| file.since).min();
        Looked::Area(Box::new(inspected))
    }
}

/// Of which volumes something waits in the areas of this state directory, a line each: also of those that cannot be looked into.
/// Blocking. For when there is no agent.
pub fn what_waits(state_dir: &Path) -> Result<Vec<String>, String> {
    let dir = state_dir.join(DIRECTORY);
    let mut lines = Vec::new();
    for id in volumes_in(&dir)? {
        match Closed::open(&dir.join(id.as_str())) {
            Ok(None) => {}
            Ok(Some(closed)) => match closed.waiting() {
                Waiting { files: 0, .. } => {}
                Waiting { files, bytes, .. } => {
                    let files = if files == 1 { "1 file".into() } else { format!("{files} files") };
                    lines.push(format!("volume {id}: {files}, {bytes} bytes"));
                }
            },
            Err(why) => lines.push(format!("volume {id} cannot be looked into: {why}")),
        }
    }
    Ok(lines)
}

/// Volumes that have an area in this directory, in order. Blocking.
fn volumes_in(dir: &Path) -> Result<Vec<VolumeId>, String> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|e| format!("{}: {e}", dir.display()))?,
    };
    let mut ids = Vec::new();
    for entry in entries {
        let name = entry.map_err(|e| format!("{}: {e}", dir.display()))?.file_name();
        ids.extend(name.to_str().and_then(|name| VolumeId::parse(name).ok()));
    }
    ids.sort_by(|one, other| one.as_str().cmp(other.as_str()));
    Ok(ids)
}

/// On a thread of its own: a disk that hangs holds up nobody else.
pub(super) async fn on_disk<T: Send + 'static>(
    limit: Duration,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let disk = Disk::start(limit, Silence::default()).map_err(|e| format!("no thread for the disk: {e}"))?;
    disk.run_in_time(job)
        .await
        .map_err(|_| format!("the disk of the staging area does not answer within {limit:?}"))
}

#[cfg(test)]
mod tests;
