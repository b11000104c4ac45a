//! Directories that are deleted with their volumes: each by one task, which outlives the call that began it.
//!
//! ```text
//!             DeleteVolume                 DeleteVolume: ABORTED, how far it is
//!   (none) ──────────────► queued ► running ────────────────────────────────────┐
//!      ▲                      ▲        │ ▲                                      │
//!      │ DeleteVolume: OK     │        │ └──────────────────────────────────────┘
//!      └──────────────── gone ◄────────┤ nothing is left
//!                             │        │ an error
//!                             └─ failed ◄ DeleteVolume: the error; the next one begins anew
//! ```
//!
//! Nothing here survives the process: the record says that it has begun, and the provisioner repeats its call, with the
//! secret. Two replicas may do it at once. The slower one must not go on when the quicker one has ended, for the next volume
//! may have the same directory: so each asks the record before each page of names, and the quicker one lets the record stand
//! until such a page must be done.

use super::records::{Deletion, Records};
use crate::status::Failure;
use futures::FutureExt;
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use store::{Access, Erased, Limits, LimitsConfig, NoObserver, StoreError};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;
use volume::{Credentials, VolumeId, VolumeSpec};

/// Volumes at once, each of which may hold a page of names.
const AT_ONCE: usize = 4;
/// A store that is silent holds a turn no longer, whatever the volume says.
const STORE_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// Between two lines of the log about one volume.
const REPORT_EVERY: Duration = Duration::from_secs(30);

/// Times that no operator has to choose; tests are less patient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// How long one DeleteVolume waits for the end before it says how far it is: with what the API server may take, within the
    /// 15 s that csi-provisioner has by default.
    pub wait: Duration,
    /// How long the record of a directory that is gone stands, where another replica may still have a page of names under way:
    /// that page's limit, and what the API server takes to answer that it may.
    pub settle: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { wait: Duration::from_secs(8), settle: store::ERASE_PAGE_LIMIT + Duration::from_secs(15) }
    }
}

#[derive(Debug)]
pub(super) struct Erasures {
    records: Arc<dyn Records>,
    limits: Arc<Limits>,
    pace: Pace,
    turns: Arc<Semaphore>,
    all: Mutex<BTreeMap<VolumeId, Erasure>>,
    /// Since when they are known to have ended.
    settling: Mutex<BTreeMap<VolumeId, Instant>>,
}

#[derive(Debug)]
struct Erasure {
    erased: Arc<Erased>,
    /// Gone with the task: a secret is kept no longer than it is used.
    access: Weak<Access>,
    ended: watch::Receiver<Option<Result<(), StoreError>>>,
    task: AbortHandle,
    /// What the task before this one came to.
    before: Option<StoreError>,
}

impl Erasures {
    pub(super) fn new(records: Arc<dyn Records>, limits: LimitsConfig, pace: Pace) -> Self {
        let (limits, turns) = (Arc::new(Limits::new(limits)), Arc::new(Semaphore::new(AT_ONCE)));
        Self { records, limits, pace, turns, all: Mutex::default(), settling: Mutex::default() }
    }

    /// Ok: since the record says that it has ended, what others had under way has, too. Blocks the calling thread.
    pub(super) fn settle(&self, id: &VolumeId) -> Result<(), Failure> {
        let since = *self.settling().entry(id.clone()).or_insert_with(Instant::now);
        let left = || self.pace.settle.saturating_sub(since.elapsed());
        std::thread::sleep(left().min(self.pace.wait));
        match left() {
            Duration::ZERO => Ok(()),
            left => Err(Failure::UnderWay(format!(
                "volume {id}: its directory is deleted; its record stays for another {} s, in case another replica of the controller has something under way: repeat the call",
                left.as_secs() + 1
            ))),
        }
    }

    fn settling(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Instant>> {
        self.settling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it could be done, without contact: are these the credentials for that store, may that endpoint be asked?
    pub(super) fn check(&self, spec: &VolumeSpec, credentials: Credentials) -> Result<(), Failure> {
        self.open(spec, credentials).map(drop).map_err(Failure::from)
    }

    fn open(
        &self,
        spec: &VolumeSpec,
        credentials: Credentials,
    ) -> Result<(store::Eraser, Arc<Access>), StoreError> {
        let mut spec = spec.clone();
        spec.parameters.store_timeout = spec.parameters.store_timeout.min(STORE_TIMEOUT_MAX);
        let access = Access::fixed(&spec, credentials);
        let eraser = store::open_eraser(&spec, access.clone(), self.limits.clone(), Arc::new(NoObserver))?;
        Ok((eraser, access))
    }

    /// Begins, if it has not begun, and returns Ok when nothing is left; after a while, how far it is. Blocks the calling
    /// thread, which must not be one of the runtime's own.
    pub(super) fn advance(&self, spec: &VolumeSpec, credentials: Credentials) -> Result<(), Failure> {
        let (mut ended, erased, before) = self.join(spec, credentials)?;
        let runtime = tokio::runtime::Handle::current();
        let done = runtime.block_on(async {
            let done = ended.wait_for(Option::is_some);
            tokio::time::timeout(self.pace.wait, done)
                .await
                .map(|done| done.ok().and_then(|done| done.clone()))
        });
        match done {
            Ok(Some(Ok(()))) => {
                self.lock().remove(&spec.id);
                Ok(())
            }
            Ok(Some(Err(error))) => Err(error.into()),
            // It was ended with the process, by `forget`, or by its record.
            Ok(None) => Err(Failure::Busy(format!("volume {}", spec.id))),
            Err(_) => Err(Failure::UnderWay(progress(&spec.id, &erased, before.as_ref()))),
        }
    }

    #[allow(clippy::type_complexity, reason = "parts of an Erasure, which stays where it is")]
    fn join(
        &self,
        spec: &VolumeSpec,
        credentials: Credentials,
    ) -> Result<(watch::Receiver<Option<Result<(), StoreError>>>, Arc<Erased>, Option<StoreError>), Failure>
    {
        let mut all = self.lock();
        let (mut erased, mut before) = (Arc::new(Erased::default()), None);
        if let Some(known) = all.get(&spec.id) {
            let ended = known.ended.borrow().clone();
            match (ended, known.access.upgrade()) {
                (None, Some(access)) => {
                    access.replace(credentials);
                    return Ok((known.ended.clone(), known.erased.clone(), known.before.clone()));
                }
                (Some(Ok(())), _) => return Ok((known.ended.clone(), known.erased.clone(), None)),
                (ended, _) => {
                    erased = known.erased.clone();
                    before = ended.and_then(Result::err).or_else(|| known.before.clone());
                }
            }
        }
        let (eraser, access) = self.open(spec, credentials)?;
        let (tell, ended) = watch::channel(None);
        let (turns, id, counted) = (self.turns.clone(), spec.id.clone(), erased.clone());
        let may_go_on = may_go_on(self.records.clone(), id.clone());
        let task = tokio::spawn(async move {
            let Ok(_turn) = turns.acquire_owned().await else { return };
            tracing::info!(volume = %id, directory = ?eraser, "a volume's directory is being deleted");
            let result = {
                let work = eraser.erase(&counted, &may_go_on);
                tokio::pin!(work);
                loop {
                    match tokio::time::timeout(REPORT_EVERY, &mut work).await {
                        Ok(result) => break result,
                        Err(_) => tracing::info!(
                            volume = %id, objects = counted.objects(), uploads = counted.uploads(),
                            "a volume's directory is still being deleted"
                        ),
                    }
                }
            };
            drop(eraser);
            let result = match result {
                Ok(true) => Ok(()),
                Ok(false) => {
                    tracing::info!(volume = %id, objects = counted.objects(), "a volume's directory is not deleted here any more: its record does not say so, or cannot be read");
                    return;
                }
                Err(error) => Err(error),
            };
            report(&id, &counted, &result);
            tell.send_replace(Some(result));
        });
        let task = task.abort_handle();
        let known = Erasure {
            erased: erased.clone(),
            access: Arc::downgrade(&access),
            ended: ended.clone(),
            task,
            before: before.clone(),
        };
        all.insert(spec.id.clone(), known);
        Ok((ended, erased, before))
    }

    /// Whoever has removed the record has called it off.
    pub(super) fn forget(&self, id: &VolumeId) {
        self.settling().remove(id);
        if let Some(known) = self.lock().remove(id) {
            known.task.abort();
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Erasure>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does the record say so at this moment? What cannot be read says nothing.
fn may_go_on(records: Arc<dyn Records>, id: VolumeId) -> impl Fn() -> BoxFuture<'static, bool> + Send + Sync {
    move || {
        let (records, id) = (records.clone(), id.clone());
        let look = tokio::task::spawn_blocking(
            move || matches!(records.get(&id), Ok(Some(record)) if record.deletion == Some(Deletion::Begun)),
        );
        look.map(|says| says.unwrap_or(false)).boxed()
    }
}

impl Drop for Erasures {
    fn drop(&mut self) {
        self.lock().values().for_each(|known| known.task.abort());
    }
}

fn progress(id: &VolumeId, erased: &Erased, before: Option<&StoreError>) -> String {
    let objects = thousands(erased.objects());
    let before = before.map(|error| format!("; the attempt before ended with: {error}")).unwrap_or_default();
    format!("volume {id}: its directory is being deleted, {objects} objects so far: repeat the call{before}")
}

fn report(id: &VolumeId, erased: &Erased, result: &Result<(), StoreError>) {
    let (objects, uploads) = (erased.objects(), erased.uploads());
    match result {
        Ok(()) => tracing::info!(volume = %id, objects, uploads, "a volume's directory is deleted"),
        Err(error) => {
            tracing::warn!(volume = %id, objects, uploads, %error, "a volume's directory is not deleted: the next call begins anew");
        }
    }
    if erased.keeps_versions() {
        tracing::warn!(volume = %id, "the bucket keeps versions: what was deleted stays as older versions until its lifecycle rules remove them");
    }
    if erased.left() > 0 {
        tracing::warn!(volume = %id, uploads = erased.left(), "unfinished uploads have keys that no request can name: their parts stay");
    }
}

/// `12,000`
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().filter_map(|g| std::str::from_utf8(g).ok()).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_by_people() {
        for (number, text) in [(0, "0"), (999, "999"), (12_000, "12,000"), (1_234_567, "1,234,567")] {
            assert_eq!(thousands(number), text);
        }
    }
}
