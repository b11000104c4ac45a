//! The engine against a scripted source: what it fetches, what it keeps, and what it does when disks fail.

mod cost;
mod faults;
mod hangs;
mod judge;
mod model;
mod policy;
mod reading;
mod restart;
mod room;
mod scopes;
mod sizes;

use super::*;
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;
use volume::Cause;

pub(super) const BLOCK: u64 = 4096;
pub(super) const MIB: u64 = 1 << 20;

/// An object whose every byte follows from its seed.
pub(super) struct Object {
    pub seed: u64,
    pub size: u64,
    pub requests: AtomicU64,
    pub bytes: AtomicU64,
    pub in_flight: AtomicUsize,
    pub in_flight_max: AtomicUsize,
    /// What the next requests do; empty: serve.
    pub script: Mutex<VecDeque<Fault>>,
    /// One permit lets one chunk through, when `gated`.
    pub gate: Semaphore,
    pub gated: AtomicBool,
    pub jitter: AtomicBool,
}

#[derive(Clone, Debug)]
pub(super) enum Fault {
    Refuse(Cause),
    /// This many bytes, then an error.
    CutAt(u64),
    /// This many bytes, then the end.
    EndAt(u64),
    /// The first byte is another one.
    Flip,
}

const CHUNK: u64 = 3000;

impl Object {
    pub(super) fn new(seed: u64, size: u64) -> Arc<Self> {
        Arc::new(Self {
            seed,
            size,
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            in_flight_max: AtomicUsize::new(0),
            script: Mutex::default(),
            gate: Semaphore::new(0),
            gated: AtomicBool::new(false),
            jitter: AtomicBool::new(false),
        })
    }
    pub(super) fn content(&self, range: Range<u64>) -> Vec<u8> {
        let word = |k: u64| mix(self.seed ^ mix(k)).to_le_bytes();
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize + 16);
        for k in range.start / 8..range.end.div_ceil(8) {
            bytes.extend_from_slice(&word(k));
        }
        let skip = (range.start % 8) as usize;
        bytes[skip..skip + (range.end - range.start) as usize].to_vec()
    }
    pub(super) fn fetched(&self) -> u64 {
        self.bytes.load(SeqCst)
    }
    pub(super) fn requests(&self) -> u64 {
        self.requests.load(SeqCst)
    }
}

pub(super) fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A body that its reader has not dropped yet.
struct InFlight(Arc<Object>);
impl InFlight {
    fn new(object: Arc<Object>) -> Self {
        let now = object.in_flight.fetch_add(1, SeqCst) + 1;
        object.in_flight_max.fetch_max(now, SeqCst);
        Self(object)
    }
}
impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, SeqCst);
    }
}

/// The `Fetch` of an object.
pub(super) struct From(pub Arc<Object>);

fn error(cause: Cause) -> FetchError {
    FetchError { cause, message: format!("scripted {cause:?}") }
}

#[async_trait]
impl Fetch for From {
    async fn fetch(
        &self,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, FetchError>>, FetchError> {
        let object = self.0.clone();
        let request = object.requests.fetch_add(1, SeqCst);
        let fault = object.script.lock().unwrap().pop_front();
        if let Some(Fault::Refuse(cause)) = fault {
            return Err(error(cause));
        }
        let (limit, cut) = match fault {
            Some(Fault::CutAt(n)) => (n, true),
            Some(Fault::EndAt(n)) => (n, false),
            _ => (u64::MAX, false),
        };
        let flips = matches!(fault, Some(Fault::Flip));
        let state = (InFlight::new(object.clone()), range.start, 0u64);
        Ok(futures::stream::unfold(Some(state), move |state| {
            let range = range.clone();
            async move {
                let (flight, at, sent) = state?;
                let object = flight.0.clone();
                if at >= range.end || sent >= limit {
                    return (sent >= limit && cut).then(|| (Err(error(Cause::Unavailable)), None));
                }
                if object.gated.load(SeqCst) {
                    object.gate.acquire().await.unwrap().forget();
                }
                if object.jitter.load(SeqCst) {
                    let micros = mix(object.seed ^ request ^ at) % 300;
                    tokio::time::sleep(Duration::from_micros(micros)).await;
                }
                let end = (at + CHUNK).min(range.end).min(at.saturating_add(limit - sent));
                let mut content = object.content(at..end);
                content[0] ^= u8::from(flips && at == range.start);
                let chunk = Bytes::from(content);
                object.bytes.fetch_add(end - at, SeqCst);
                Some((Ok(chunk), Some((flight, end, sent + (end - at)))))
            }
        })
        .boxed())
    }
}

/// Counts what the engine reports.
#[derive(Default)]
pub(super) struct Counts {
    pub evicted_files: AtomicU64,
    pub evicted_bytes: AtomicU64,
    pub checksum_failed: AtomicU64,
    pub disk_errors: AtomicU64,
    pub degraded: AtomicU64,
    pub recovered: AtomicU64,
    pub uncached: AtomicU64,
    pub changed: AtomicU64,
    pub reasons: Mutex<Vec<Reason>>,
}
impl Observer for Counts {
    fn evicted(&self, files: u64, bytes: u64, reason: Reason) {
        self.evicted_files.fetch_add(files, SeqCst);
        self.evicted_bytes.fetch_add(bytes, SeqCst);
        self.reasons.lock().unwrap().push(reason);
    }
    fn checksum_failed(&self, _: u8, count: u64) {
        self.checksum_failed.fetch_add(count, SeqCst);
    }
    fn disk_error(&self, _: u8, _: &'static str, _: &io::Error) {
        self.disk_errors.fetch_add(1, SeqCst);
    }
    fn degraded(&self, _: u8, degraded: bool) {
        if degraded { &self.degraded } else { &self.recovered }.fetch_add(1, SeqCst);
    }
    fn changed_on_its_way(&self) {
        self.changed.fetch_add(1, SeqCst);
    }
    fn uncached(&self, bytes: u64) {
        self.uncached.fetch_add(bytes, SeqCst);
    }
}

pub(super) fn tier(paths: &[&Path]) -> Tier {
    Tier {
        name: "ssd".into(),
        kind: TierKind::Ssd,
        paths: paths.iter().map(|p| PathBuf::from(*p)).collect(),
        quota_bytes: 1 << 30,
        quota_inodes: 1_000_000,
        high_percent: 90,
        low_percent: 70,
        // The test machine's own disk is none of these tests' business.
        min_free_bytes_percent: 0,
        min_free_inodes_percent: 0,
    }
}

pub(super) fn config(tiers: Vec<Tier>) -> Config {
    Config {
        tiers,
        block_bytes: BLOCK,
        scope_limit_bytes: None,
        reading: Reading { readahead_bytes: 4 * MIB, part_bytes: 512 << 10, parallel_parts: 4 },
        reading_max: Reading { readahead_bytes: 4 * MIB, part_bytes: MIB, parallel_parts: 64 },
        memory_bytes: 8 * MIB,
        disk_timeout: Duration::from_secs(10),
    }
}

pub(super) fn scope(n: u8) -> ScopeId {
    ScopeId::parse(&format!("{n:02x}").repeat(16)).unwrap()
}

pub(super) fn key(path: &str, size: u64) -> FileKey {
    FileKey { scope: scope(1), path: path.into(), token: "v1".into(), size }
}

pub(super) fn open(config: &Config) -> (Arc<Engine>, Recovery, Arc<Counts>) {
    let counts = Arc::<Counts>::default();
    let (engine, recovery) = Engine::open(config.clone(), counts.clone(), tokio::runtime::Handle::current())
        .expect("engine opens");
    (engine, recovery, counts)
}

pub(super) fn file(engine: &Arc<Engine>, path: &str, object: &Arc<Object>) -> Arc<File> {
    engine.file(key(path, object.size), Arc::new(From(object.clone())), ReadOptions::default())
}

/// What a worker does: asks for the range, then reads the data file.
pub(super) async fn get(file: &Arc<File>, offset: u64, len: u32) -> Result<Vec<u8>, FetchError> {
    let end = (offset + u64::from(len)).min(file.key().size);
    match file.read(offset, len).await? {
        Presence::Uncached(bytes) => Ok(bytes.to_vec()),
        Presence::Present { .. } => {
            let data = std::fs::File::from(file.descriptors().await.expect("descriptors").data);
            let mut bytes = vec![0; end.saturating_sub(offset) as usize];
            data.read_exact_at(&mut bytes, offset).expect("what is present can be read");
            Ok(bytes)
        }
    }
}

/// Housekeeping, here and now.
pub(super) async fn keep(engine: &Arc<Engine>) {
    for root in &engine.roots {
        let (engine, root) = (engine.clone(), root.clone());
        root.clone().run(move || engine.keep(&root)).await.expect("the disk answers");
    }
}

pub(super) async fn check_all(file: &Arc<File>, object: &Object, step: u64) {
    let mut at = 0;
    while at < object.size {
        let end = (at + step).min(object.size);
        let bytes = get(file, at, (end - at) as u32).await.expect("the read succeeds");
        assert!(bytes == object.content(at..end), "wrong bytes at {at}");
        at = end;
    }
}

/// Waits for a condition with a deadline that only a defect reaches.
pub(super) async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("not within 15 s: {what}");
}

pub(super) fn used(engine: &Engine) -> u64 {
    engine.usage().tiers.iter().map(|t| t.bytes).sum()
}

pub(super) fn files_below(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir(path) else { return found };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() { found.extend(files_below(&path)) } else { found.push(path) }
    }
    found
}

/// Data files only.
pub(super) fn data_files(path: &Path) -> Vec<PathBuf> {
    let is_data = |p: &PathBuf| layout::parse_id(&p.file_name().unwrap().to_string_lossy()).is_some();
    files_below(path).into_iter().filter(is_data).collect()
}
