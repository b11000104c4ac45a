//! What the server did: requests by operation, errors, bytes received and sent.

use super::uploads::Uploads;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// S3 operation → requests that arrived.
    pub requests: BTreeMap<String, u64>,
    /// Status code → answers.
    pub answers: BTreeMap<u16, u64>,
    /// Bytes of answer bodies handed to the connection.
    pub bytes_sent: u64,
    /// The same, of GetObject only.
    pub bytes_get: u64,
    /// Bytes of the bodies of PutObject and UploadPart that arrived, whatever became of them.
    #[serde(default)]
    pub bytes_put: u64,
    /// Multipart uploads neither completed nor aborted, now.
    #[serde(default)]
    pub uploads_open: u64,
    pub connections: u64,
    /// Requests being answered now, and the most at any time.
    pub in_flight: u64,
    pub in_flight_max: u64,
}

impl Stats {
    pub fn of(&self, op: &str) -> u64 {
        self.requests.get(op).copied().unwrap_or(0)
    }
    pub fn total(&self) -> u64 {
        self.requests.values().sum()
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters(Mutex<Stats>);

impl Counters {
    pub(super) fn lock(&self) -> MutexGuard<'_, Stats> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn snapshot(&self, uploads: &Uploads) -> Stats {
        Stats { uploads_open: uploads.count(), ..self.lock().clone() }
    }

    /// Everything back to 0, but for the requests under way.
    pub(super) fn reset(&self) {
        let mut stats = self.lock();
        let in_flight = stats.in_flight;
        *stats = Stats { in_flight, in_flight_max: in_flight, ..Stats::default() };
    }
}
