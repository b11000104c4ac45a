//! A script of faults: for each request it decides, from a seed, what goes wrong with the answer.
//!
//! A decision by probability depends on the seed, the rule, the request (operation, key, range) and how often that
//! same request was seen, never on the order in which different requests arrive. The same seed therefore gives the
//! same faults however the client's tasks are scheduled.

use crate::content::{id, mix};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;

/// What `--faults` and `POST /_faults` carry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    pub seed: u64,
    /// Every rule that hits is applied; of two that exclude each other the first counts.
    pub rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    pub fault: Fault,
    /// S3 operation such as `GetObject`; None: every one.
    #[serde(default)]
    pub op: Option<String>,
    /// Text that the key must contain (of a listing: its prefix).
    #[serde(default)]
    pub key: Option<String>,
    /// Only requests for a range of bytes that begins here or behind.
    #[serde(default)]
    pub from: Option<u64>,
    /// 0 to 1. With neither `probability` nor `nth` the rule always hits.
    #[serde(default)]
    pub probability: Option<f64>,
    /// Hits exactly these matching requests, counted from 1 since the script was set.
    #[serde(default)]
    pub nth: Vec<u64>,
    /// Hits at most this often.
    #[serde(default)]
    pub times: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Fault {
    /// The answer starts this much later.
    Latency { ms: u64 },
    /// An error answer (503, 429, 500 …) instead of the real one.
    Status {
        code: u16,
        #[serde(default)]
        retry_after_s: Option<u64>,
    },
    /// The connection is reset before the answer.
    Reset,
    /// The connection is reset within the body.
    ResetBody,
    /// The connection is closed in order, short of Content-Length.
    Truncate,
    /// A well-formed answer with a body and Content-Length one byte short.
    WrongLength,
    /// The answer carries another ETag than the object has.
    ChangedEtag,
    /// One bit of the body is another one.
    FlippedBit,
    /// Nothing is sent for so long (None: until released).
    Stall {
        #[serde(default)]
        ms: Option<u64>,
    },
    /// The body stops half-way for so long (None: until released).
    StallBody {
        #[serde(default)]
        ms: Option<u64>,
    },
    /// The request is executed; then the connection is reset before the answer.
    LostAnswer,
    /// The connection is reset as soon as the request has arrived, and the request is executed so much later: a gateway
    /// with a queue.
    LateEffect { ms: u64 },
    /// The connection is reset within the request's body, and nothing is executed.
    ResetUpload,
    /// The server stops reading the request's body half-way for so long (None: until released).
    StallUpload {
        #[serde(default)]
        ms: Option<u64>,
    },
    /// Status 200 and white space, then an error in the body, and nothing is executed: how AWS may answer
    /// CompleteMultipartUpload, CopyObject and UploadPartCopy. Other operations do not know this fault.
    CompleteError,
    /// Of the same three operations: status 200 and white space at once; the request is executed so much later, even if
    /// the client has gone away. Whatever refuses it is then told in the body.
    SlowComplete { ms: u64 },
}

impl Rule {
    pub fn always(fault: Fault) -> Self {
        Self { fault, op: None, key: None, from: None, probability: None, nth: Vec::new(), times: None }
    }
    pub fn with_probability(fault: Fault, probability: f64) -> Self {
        Self { probability: Some(probability), ..Self::always(fault) }
    }
    pub fn nth(fault: Fault, nth: &[u64]) -> Self {
        Self { nth: nth.to_vec(), ..Self::always(fault) }
    }
    pub fn op(self, op: &str) -> Self {
        Self { op: Some(op.to_owned()), ..self }
    }
    pub fn key(self, key: &str) -> Self {
        Self { key: Some(key.to_owned()), ..self }
    }
    pub fn from(self, offset: u64) -> Self {
        Self { from: Some(offset), ..self }
    }
    pub fn times(self, times: u64) -> Self {
        Self { times: Some(times), ..self }
    }
}

/// One request as the script sees it.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    pub op: &'a str,
    pub key: &'a str,
    pub range: &'a str,
}

impl Seen<'_> {
    /// The first byte that is asked for, of a request for a range.
    fn begins(&self) -> Option<u64> {
        self.range.strip_prefix("bytes=")?.split_once('-')?.0.parse().ok()
    }
}

/// What to do to one request and its answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    pub latency: Duration,
    /// `Some(None)`: until released.
    pub stall: Option<Option<Duration>>,
    pub stall_body: Option<Option<Duration>>,
    pub status: Option<(u16, Option<u64>)>,
    pub reset: bool,
    pub reset_body: bool,
    pub truncate: bool,
    pub wrong_length: bool,
    pub changed_etag: bool,
    pub flipped_bit: bool,
    pub lost_answer: bool,
    pub late_effect: Option<Duration>,
    pub reset_upload: bool,
    /// `Some(None)`: until released.
    pub stall_upload: Option<Option<Duration>>,
    pub complete_error: bool,
    pub slow_complete: Option<Duration>,
    /// Where in the body it happens, 0 to 1.
    pub place: f64,
}

impl Decision {
    pub fn touches_body(&self) -> bool {
        self.reset_body || self.truncate || self.wrong_length || self.stall_body.is_some()
    }
}

/// The script in force; shared between the server and the test, which may change it at any time.
#[derive(Clone, Debug)]
pub struct Faults {
    state: Arc<Mutex<State>>,
    released: Arc<watch::Sender<u64>>,
}

#[derive(Debug, Default)]
struct State {
    script: Script,
    /// Per rule: matching requests, hits.
    counts: Vec<(u64, u64)>,
    /// Digest of a request → how often it was seen.
    repeats: HashMap<u64, u64>,
    hits: u64,
}

impl Default for Faults {
    fn default() -> Self {
        Self::new(Script::default())
    }
}

impl Faults {
    pub fn new(script: Script) -> Self {
        let faults = Self { state: Arc::default(), released: Arc::new(watch::channel(0).0) };
        faults.set(script);
        faults
    }

    /// Replaces the script; counters start again. Requests that are stalled stay so: see [`Faults::release`].
    pub fn set(&self, script: Script) {
        if !script.rules.is_empty() {
            eprintln!("testkit: fault script with {} rules, seed {}", script.rules.len(), script.seed);
        }
        let counts = vec![(0, 0); script.rules.len()];
        *self.lock() = State { script, counts, ..State::default() };
    }

    pub fn clear(&self) {
        self.set(Script::default());
    }

    /// Lets every request go on that is stalled now.
    pub fn release(&self) {
        self.released.send_modify(|generation| *generation += 1);
    }

    /// How many faults were decided since the script was set.
    pub fn hits(&self) -> u64 {
        self.lock().hits
    }

    pub fn script(&self) -> Script {
        self.lock().script.clone()
    }

    pub fn decide(&self, seen: Seen<'_>) -> Decision {
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.script.rules.is_empty() {
            return Decision::default();
        }
        let request = id(seen.op) ^ id(seen.key).rotate_left(17) ^ id(seen.range).rotate_left(31);
        let repeat = state.repeats.entry(request).or_insert(0);
        *repeat += 1;
        let draw = |salt: u64| mix(mix(state.script.seed ^ request) ^ mix(*repeat).wrapping_add(mix(salt)));
        let mut decision = Decision { place: unit(draw(u64::MAX)), ..Decision::default() };
        for (index, (rule, (matching, hits))) in state.script.rules.iter().zip(&mut state.counts).enumerate()
        {
            if rule.op.as_deref().is_some_and(|op| op != seen.op)
                || rule.key.as_deref().is_some_and(|key| !seen.key.contains(key))
                || rule.from.is_some_and(|from| seen.begins().is_none_or(|begins| begins < from))
            {
                continue;
            }
            *matching += 1;
            let hit = (rule.nth.is_empty() || rule.nth.contains(matching))
                && rule.probability.is_none_or(|p| unit(draw(index as u64)) < p)
                && rule.times.is_none_or(|times| *hits < times);
            if hit {
                *hits += 1;
                state.hits += 1;
                decision.add(&rule.fault);
            }
        }
        decision
    }

    /// Returns after the given time or at the next [`Faults::release`].
    pub async fn stall(&self, time: Option<Duration>) {
        let mut released = self.released.subscribe();
        let release = async {
            // Fails only when the sender is gone, and `self` holds it.
            let _ = released.changed().await;
        };
        match time {
            Some(time) => {
                let _ = tokio::time::timeout(time, release).await;
            }
            None => release.await,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Decision {
    fn add(&mut self, fault: &Fault) {
        let time = |ms: &Option<u64>| ms.map(Duration::from_millis);
        match fault {
            Fault::Latency { ms } => self.latency += Duration::from_millis(*ms),
            Fault::Status { code, retry_after_s } => {
                self.status.get_or_insert((*code, *retry_after_s));
            }
            Fault::Reset => self.reset = true,
            Fault::ResetBody => self.reset_body = true,
            Fault::Truncate => self.truncate = true,
            Fault::WrongLength => self.wrong_length = true,
            Fault::ChangedEtag => self.changed_etag = true,
            Fault::FlippedBit => self.flipped_bit = true,
            Fault::Stall { ms } => self.stall = Some(time(ms)),
            Fault::StallBody { ms } => self.stall_body = Some(time(ms)),
            Fault::LostAnswer => self.lost_answer = true,
            Fault::LateEffect { ms } => self.late_effect = Some(Duration::from_millis(*ms)),
            Fault::ResetUpload => self.reset_upload = true,
            Fault::StallUpload { ms } => self.stall_upload = Some(time(ms)),
            Fault::CompleteError => self.complete_error = true,
            Fault::SlowComplete { ms } => self.slow_complete = Some(Duration::from_millis(*ms)),
        }
    }
}

fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decisions(seed: u64, order: &[usize]) -> Vec<bool> {
        let rules = vec![Rule::with_probability(Fault::Reset, 0.3).op("GetObject")];
        let faults = Faults::new(Script { seed, rules });
        let mut out = vec![false; order.len()];
        for &n in order {
            out[n] = faults.decide(Seen { op: "GetObject", key: &format!("k{n}"), range: "" }).reset;
        }
        out
    }

    #[test]
    fn the_same_seed_decides_the_same_in_any_order() {
        let forward: Vec<_> = (0..1000).collect();
        let backward: Vec<_> = (0..1000).rev().collect();
        assert_eq!(decisions(1, &forward), decisions(1, &backward));
        assert_ne!(decisions(1, &forward), decisions(2, &forward));
        let hits = decisions(1, &forward).iter().filter(|hit| **hit).count();
        assert!((230..370).contains(&hits), "{hits} of 1000 at 0.3");
    }

    #[test]
    fn nth_and_times_count_matching_requests_only() {
        let rules = vec![
            Rule::nth(Fault::Truncate, &[2]).key("x"),
            Rule::always(Fault::Reset).op("HeadObject").times(1),
        ];
        let faults = Faults::new(Script { seed: 0, rules });
        let get = |key| faults.decide(Seen { op: "GetObject", key, range: "" }).truncate;
        assert_eq!([get("x"), get("y"), get("x"), get("x")], [false, false, true, false]);
        let head = || faults.decide(Seen { op: "HeadObject", key: "", range: "" }).reset;
        assert_eq!([head(), head()], [true, false]);
    }

    #[test]
    fn scripts_are_plain_json() {
        let text = r#"{"seed":7,"rules":[{"fault":{"kind":"status","code":503},"probability":0.01},
            {"fault":{"kind":"stall-body"},"op":"GetObject","nth":[3]},
            {"fault":{"kind":"late-effect","ms":200},"op":"UploadPart"}]}"#;
        let script: Script = serde_json::from_str(text).unwrap();
        assert_eq!(script.rules[2], Rule::always(Fault::LateEffect { ms: 200 }).op("UploadPart"));
        assert_eq!(script.rules[1], Rule::nth(Fault::StallBody { ms: None }, &[3]).op("GetObject"));
        assert!(serde_json::from_str::<Script>(r#"{"rules":[{"fault":{"kind":"meteor"}}]}"#).is_err());
    }
}
