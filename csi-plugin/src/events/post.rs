//! The one task that posts Events: equal ones become one object whose count rises.
//!
//! ```text
//!  Note ──► Series (object, reason) ──due──► create, later patch {count, lastTimestamp, message}
//!                 ▲                              │ refused or away: tried a few times, then dropped with a log line
//!                 └───── at most one post each interval, with all that came meanwhile
//! ```

use super::{Note, Object, Reason};
use crate::status::chain;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

/// Kinds of Events that are remembered, to be counted up; the ones not used for longest are forgotten.
const SERIES_MAX: usize = 1024;
/// The part of an Event's name that comes from its object; a name has 253 characters at most.
const NAME_CHARS_MAX: usize = 200;

/// How hard the API server is tried.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// The same Event is posted at most once in this time.
    pub interval: Duration,
    pub tries: u32,
    /// After the first try that failed; doubled each time.
    pub pause: Duration,
    /// One try.
    pub limit: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(10),
            tries: 4,
            pause: Duration::from_secs(1),
            limit: Duration::from_secs(5),
        }
    }
}

pub(super) struct Poster {
    client: Client,
    node: String,
    pace: Pace,
    dropped: Arc<AtomicU64>,
    /// Makes names of one process's Events differ from those of the process before.
    started: Timestamp,
    series: BTreeMap<(Object, Reason), Series>,
}

struct Series {
    name: String,
    posted: bool,
    first: Timestamp,
    last: Timestamp,
    count: i32,
    message: String,
    /// None: everything is posted.
    due: Option<Instant>,
    /// When it may be posted again.
    free: Instant,
}

impl Poster {
    pub(super) fn new(client: Client, node: &str, pace: Pace, dropped: Arc<AtomicU64>) -> Self {
        let (node, started) = (node.to_owned(), Timestamp::now());
        Self { client, node, pace, dropped, started, series: BTreeMap::new() }
    }

    /// Ends with the last sender.
    pub(super) async fn run(mut self, mut notes: mpsc::Receiver<Note>) {
        loop {
            let due = self.series.iter().filter_map(|(key, s)| Some((s.due?, key.clone()))).min();
            let note = match due {
                None => notes.recv().await,
                Some((at, key)) => tokio::select! {
                    note = notes.recv() => note,
                    () = sleep_until(at) => {
                        self.post(&key).await;
                        continue;
                    }
                },
            };
            match note {
                Some(note) => self.count(note),
                None => return,
            }
        }
    }

    fn count(&mut self, note: Note) {
        let (key, now) = ((note.object, note.reason), Timestamp::now());
        if !self.series.contains_key(&key) && self.series.len() >= SERIES_MAX {
            let oldest = self.series.iter().min_by_key(|(_, s)| s.last).map(|(key, _)| key.clone());
            oldest.and_then(|key| self.series.remove(&key));
        }
        let name = self.name(&key);
        let series = self.series.entry(key).or_insert_with(|| Series {
            name,
            posted: false,
            first: now,
            last: now,
            count: 0,
            message: String::new(),
            due: None,
            free: Instant::now(),
        });
        series.count = series.count.saturating_add(1);
        series.last = now;
        series.message = note.message;
        series.due = series.due.or(Some(series.free));
    }

    fn name(&self, (object, reason): &(Object, Reason)) -> String {
        use sha2::Digest;
        let text = format!("{object:?} {reason:?} {} {}", self.node, self.started.as_nanosecond());
        let digest = hex::encode(&sha2::Sha256::digest(text.as_bytes())[..8]);
        let of: String = object.name.chars().take(NAME_CHARS_MAX).collect();
        format!("{}.{digest}", of.trim_end_matches(['.', '-']))
    }

    async fn post(&mut self, key: &(Object, Reason)) {
        let mut pause = self.pace.pause;
        for left in (0..self.pace.tries).rev() {
            let Some(series) = self.series.get(key) else { return };
            let tried = tokio::time::timeout(self.pace.limit, self.try_post(key, series)).await;
            let why = match tried {
                Ok(Ok(())) => {
                    self.done(key, true);
                    return self.report_dropped();
                }
                // A namespace that is being deleted, a right that is missing: trying again does not help.
                Ok(Err(kube::Error::Api(status))) if (400..429).contains(&status.code) => {
                    tracing::warn!(
                        object = format!("{} {}/{}", key.0.kind, key.0.namespace, key.0.name),
                        reason = key.1.name(),
                        why = status.message,
                        "an event was refused by the Kubernetes API server and is dropped"
                    );
                    return self.done(key, false);
                }
                Ok(Err(error)) => chain(&error),
                Err(_) => format!("nothing within {:?}", self.pace.limit),
            };
            if left == 0 {
                tracing::warn!(
                    object = format!("{} {}/{}", key.0.kind, key.0.namespace, key.0.name),
                    reason = key.1.name(),
                    why,
                    "an event is dropped: the Kubernetes API server did not take it; mounts are not affected"
                );
                return self.done(key, false);
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    fn done(&mut self, key: &(Object, Reason), posted: bool) {
        if let Some(series) = self.series.get_mut(key) {
            series.posted |= posted;
            series.due = None;
            series.free = Instant::now() + self.pace.interval;
        }
    }

    fn report_dropped(&self) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            tracing::warn!(dropped, "events were dropped while the Kubernetes API server was away");
        }
    }

    async fn try_post(&self, (object, reason): &(Object, Reason), series: &Series) -> kube::Result<()> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &object.namespace);
        let changing = serde_json::json!({
            "count": series.count, "lastTimestamp": Time(series.last), "message": series.message,
        });
        let patch = async || {
            api.patch(&series.name, &PatchParams::default(), &Patch::Merge(&changing)).await.map(drop)
        };
        if series.posted {
            match patch().await {
                // The API server forgets Events after an hour.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                other => return other,
            }
        }
        match api.create(&PostParams::default(), &self.event(object, *reason, series)).await {
            Ok(_) => Ok(()),
            // Our own, whose answer was lost.
            Err(kube::Error::Api(status)) if status.code == 409 => patch().await,
            Err(error) => Err(error),
        }
    }

    fn event(&self, object: &Object, reason: Reason, series: &Series) -> Event {
        Event {
            metadata: ObjectMeta {
                name: Some(series.name.clone()),
                namespace: Some(object.namespace.clone()),
                ..ObjectMeta::default()
            },
            involved_object: ObjectReference {
                api_version: Some("v1".into()),
                kind: Some(object.kind.into()),
                namespace: Some(object.namespace.clone()),
                name: Some(object.name.clone()),
                uid: object.uid.clone(),
                ..ObjectReference::default()
            },
            type_: Some(reason.kind().into()),
            reason: Some(reason.name().into()),
            message: Some(series.message.clone()),
            count: Some(series.count),
            first_timestamp: Some(Time(series.first)),
            last_timestamp: Some(Time(series.last)),
            source: Some(EventSource { component: Some("millpond".into()), host: Some(self.node.clone()) }),
            reporting_component: Some("millpond".into()),
            reporting_instance: Some(self.node.clone()),
            ..Event::default()
        }
    }
}
