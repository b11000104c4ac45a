//! Kubernetes Events on pods and claims: what happened to a mount and what to do. Queued here, posted by one task;
//! no thread that serves a mount ever waits for one, and without an API server they are dropped.

mod post;
pub mod text;

pub use post::Pace;

use crate::cluster::Cluster;
use link::Subjects;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc;

/// Notes that may wait for the API server; more are dropped.
const QUEUE: usize = 256;
/// What a person still reads.
const MESSAGE_CHARS_MAX: usize = 900;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// A successor serves the mount; no call failed.
    Healed,
    /// The mount waits for something.
    Degraded,
    /// Its source gives no answer: what is known last is shown.
    ServingStale,
    Recovered,
    /// One call failed that no worker survived.
    RequestFailed,
    /// It could not be published, or has ended.
    Failed,
    /// What was written waits for the store longer than it should.
    UploadsLate,
    /// Somebody else has changed in the store what was written.
    UploadConflict,
    UploadsDone,
    /// Not all that was written was in the store when the volume was unpublished.
    UploadsLeft,
}

impl Reason {
    pub fn name(self) -> &'static str {
        match self {
            Self::Healed => "MountHealed",
            Self::Degraded => "MountDegraded",
            Self::ServingStale => "MountServingStale",
            Self::Recovered => "MountRecovered",
            Self::RequestFailed => "MountRequestFailed",
            Self::Failed => "MountFailed",
            Self::UploadsLate => "UploadsLate",
            Self::UploadConflict => "UploadConflict",
            Self::UploadsDone => "UploadsDone",
            Self::UploadsLeft => "UploadsLeft",
        }
    }

    fn kind(self) -> &'static str {
        match self {
            Self::Healed | Self::Recovered | Self::UploadsDone => "Normal",
            Self::Degraded
            | Self::ServingStale
            | Self::RequestFailed
            | Self::Failed
            | Self::UploadsLate
            | Self::UploadConflict
            | Self::UploadsLeft => "Warning",
        }
    }
}

/// What an Event is attached to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Object {
    kind: &'static str,
    namespace: String,
    name: String,
    uid: Option<String>,
}

impl Object {
    fn all_of(subjects: &Subjects) -> impl Iterator<Item = Object> {
        let pod = subjects.pod.as_ref().map(|pod| Object {
            kind: "Pod",
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: Some(pod.uid.clone()).filter(|uid| !uid.is_empty()),
        });
        let claim = subjects.claim.as_ref().map(|claim| Object {
            kind: "PersistentVolumeClaim",
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            uid: claim.uid.clone(),
        });
        let named = |o: &Object| !o.name.is_empty() && !o.namespace.is_empty();
        [pod, claim].into_iter().flatten().filter(named)
    }
}

#[derive(Debug)]
struct Note {
    object: Object,
    reason: Reason,
    message: String,
}

/// Cheap to clone.
#[derive(Clone, Debug)]
pub struct Events {
    queue: Option<mpsc::Sender<Note>>,
    dropped: Arc<AtomicU64>,
}

impl Events {
    /// Nothing is posted.
    pub fn off() -> Self {
        Self { queue: None, dropped: Arc::default() }
    }

    /// Posts for this node until the last clone is dropped.
    pub fn start(cluster: &Cluster, node: &str, pace: Pace) -> Self {
        let (queue, notes) = mpsc::channel(QUEUE);
        let dropped = Arc::new(AtomicU64::new(0));
        let poster = post::Poster::new(cluster.client(), node, pace, dropped.clone());
        tokio::spawn(poster.run(notes));
        Self { queue: Some(queue), dropped }
    }

    /// Never waits.
    pub fn note(&self, subjects: &Subjects, reason: Reason, message: &str) {
        let Some(queue) = &self.queue else { return };
        let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
        for object in Object::all_of(subjects) {
            let note = Note { object, reason, message: message.clone() };
            if queue.try_send(note).is_err() && self.dropped.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!(
                    reason = reason.name(),
                    "events are dropped: too many wait for the Kubernetes API server"
                );
            }
        }
    }
}
