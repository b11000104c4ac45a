//! What the agent counts, under the names that a Prometheus server scrapes.
//!
//! Names follow the Prometheus conventions: base units (seconds, bytes), `_total` for counters, one metric family per
//! question with labels for its parts.

use crate::lock::lock;
use crate::supervisor::heals::Heal;
use cache::data::{Observer as CacheObserver, Reason};
use link::worker::Counts;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Label {
    pub kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct HealLabel {
    pub level: u32,
    pub cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabel {
    pub operation: &'static str,
    pub outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TierLabel {
    pub tier: String,
}

type Counters = Family<Label, Counter>;

/// All of the agent's metrics. Counting never blocks and never fails.
pub struct Metrics {
    registry: Mutex<Registry>,
    reads: Counters,
    read_bytes: Counters,
    opens: Counters,
    metadata: Counters,
    interrupts: Counters,
    spliced: Counter,
    replayed: Counter,
    table_full: Counter,
    requests: Family<RequestLabel, Counter>,
    request_seconds: Family<RequestLabel, Histogram>,
    queue_seconds: Family<Label, Histogram>,
    store_bytes: Counter,
    retries: Counters,
    stale_answers: Counter,
    cache_bytes: Counters,
    cache_events: Counters,
    evicted_bytes: Counters,
    fetch_seconds: Histogram,
    stores_removed: Counters,
    heals: Family<HealLabel, Counter>,
    heal_seconds: Family<HealLabel, Histogram>,
    heal_requests: Family<HealLabel, Counter>,
    poisoned: Counters,
    log_lost: Counter,
    pub volumes: Gauge,
    pub volumes_stale: Gauge,
    pub standby: Gauge,
    pub anonymous_bytes: Gauge,
    pub staging_files: Gauge,
    pub staging_bytes: Gauge,
    pub staging_conflicts: Gauge,
    pub tier_bytes: Family<TierLabel, Gauge>,
    pub tier_files: Family<TierLabel, Gauge>,
    pub tier_degraded: Family<TierLabel, Gauge>,
}

/// 100 µs to about 50 s, doubling.
fn seconds() -> Histogram {
    Histogram::new(prometheus_client::metrics::histogram::exponential_buckets(0.0001, 2.0, 20))
}

impl Metrics {
    pub fn new() -> Arc<Self> {
        let m = Self {
            registry: Mutex::new(Registry::with_prefix("millpond")),
            reads: Family::default(),
            read_bytes: Family::default(),
            opens: Family::default(),
            metadata: Family::default(),
            interrupts: Family::default(),
            spliced: Counter::default(),
            replayed: Counter::default(),
            table_full: Counter::default(),
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(seconds),
            queue_seconds: Family::new_with_constructor(seconds),
            store_bytes: Counter::default(),
            retries: Family::default(),
            stale_answers: Counter::default(),
            cache_bytes: Family::default(),
            cache_events: Family::default(),
            evicted_bytes: Family::default(),
            fetch_seconds: seconds(),
            stores_removed: Family::default(),
            heals: Family::default(),
            heal_seconds: Family::new_with_constructor(seconds),
            heal_requests: Family::default(),
            poisoned: Family::default(),
            log_lost: Counter::default(),
            volumes: Gauge::default(),
            volumes_stale: Gauge::default(),
            standby: Gauge::default(),
            anonymous_bytes: Gauge::default(),
            staging_files: Gauge::default(),
            staging_bytes: Gauge::default(),
            staging_conflicts: Gauge::default(),
            tier_bytes: Family::default(),
            tier_files: Family::default(),
            tier_degraded: Family::default(),
        };
        {
            let mut guard = lock(&m.registry);
            let r = &mut *guard;
            r.register("reads", "READ requests by the path that answered them", m.reads.clone());
            r.register_with_unit("read", "Bytes read by that path", Unit::Bytes, m.read_bytes.clone());
            r.register("opens", "OPEN requests by how they were answered", m.opens.clone());
            r.register(
                "metadata_answers",
                "Names and listings by where the answer came from",
                m.metadata.clone(),
            );
            r.register("interrupts", "Interrupted callers, and those that were let go", m.interrupts.clone());
            r.register(
                "reads_spliced",
                "READ requests answered without a copy in the worker",
                m.spliced.clone(),
            );
            r.register("replayed_requests", "Requests executed in a dead worker's place", m.replayed.clone());
            r.register("table_full", "Times that a worker's in-flight table was full", m.table_full.clone());
            r.register(
                "store_requests",
                "Requests to the store by operation and outcome",
                m.requests.clone(),
            );
            r.register_with_unit(
                "store_request_duration",
                "Time to the end of a request to the store",
                Unit::Seconds,
                m.request_seconds.clone(),
            );
            r.register_with_unit(
                "store_queue_duration",
                "Time that a request waited for its turn on this node, before the store had it",
                Unit::Seconds,
                m.queue_seconds.clone(),
            );
            r.register(
                "stale_answers",
                "Names and listings answered as last known, for the store gave no answer (staleIfError)",
                m.stale_answers.clone(),
            );
            r.register(
                "volumes_serving_stale",
                "Mounted volumes that go on with what is known last",
                m.volumes_stale.clone(),
            );
            r.register_with_unit(
                "store_received",
                "Bytes received from the store",
                Unit::Bytes,
                m.store_bytes.clone(),
            );
            r.register("store_retries", "Repeated requests by cause", m.retries.clone());
            r.register_with_unit(
                "cache",
                "Bytes asked of the cache, by outcome",
                Unit::Bytes,
                m.cache_bytes.clone(),
            );
            r.register("cache_events", "What happened to cache files and disks", m.cache_events.clone());
            r.register_with_unit(
                "cache_evicted",
                "Bytes evicted, by reason",
                Unit::Bytes,
                m.evicted_bytes.clone(),
            );
            r.register_with_unit(
                "fetch_duration",
                "Time of one fetch into the cache",
                Unit::Seconds,
                m.fetch_seconds.clone(),
            );
            r.register(
                "metadata_stores_removed",
                "Metadata stores that no volume used and that were removed, by reason",
                m.stores_removed.clone(),
            );
            r.register("heals", "Heals that a probe has seen, by level and cause", m.heals.clone());
            r.register_with_unit(
                "heal_duration",
                "From a worker's end until its successor serves",
                Unit::Seconds,
                m.heal_seconds.clone(),
            );
            r.register("heal_requests", "Requests that successors took over", m.heal_requests.clone());
            r.register(
                "poisoned_requests",
                "Requests answered EIO because they killed worker after worker, or agents",
                m.poisoned.clone(),
            );
            r.register(
                "log_lost_lines",
                "Lines that the agent's log could not take: what it is written to was full, closed or failed",
                m.log_lost.clone(),
            );
            r.register("volumes", "Mounted volumes", m.volumes.clone());
            r.register("standby_workers", "Workers that stand by", m.standby.clone());
            r.register_with_unit(
                "anonymous_memory",
                "Anonymous and shared memory of agent and workers",
                Unit::Bytes,
                m.anonymous_bytes.clone(),
            );
            r.register(
                "staging_files",
                "Written files that their store does not have yet",
                m.staging_files.clone(),
            );
            r.register_with_unit("staging", "Bytes of these files", Unit::Bytes, m.staging_bytes.clone());
            r.register(
                "staging_conflicts",
                "Written files that somebody else has changed in the store meanwhile",
                m.staging_conflicts.clone(),
            );
            r.register_with_unit("tier_used", "Bytes cached in a tier", Unit::Bytes, m.tier_bytes.clone());
            r.register("tier_files", "Files cached in a tier", m.tier_files.clone());
            r.register("tier_degraded", "1 while a tier's disk fails", m.tier_degraded.clone());
        }
        Arc::new(m)
    }

    /// The page that Prometheus scrapes (OpenMetrics text).
    pub fn page(&self) -> String {
        let mut text = String::new();
        self.log_lost.inner().store(startup::log::lost(), Ordering::Relaxed);
        let registry = lock(&self.registry);
        prometheus_client::encoding::text::encode(&mut text, &registry)
            .expect("writing into a String does not fail");
        text
    }

    /// Every sample of the page by its full name, for the operator API.
    pub fn values(&self) -> std::collections::HashMap<String, f64> {
        let page = self.page();
        let samples = page.lines().filter(|l| !l.starts_with('#')).filter_map(|l| l.rsplit_once(' '));
        samples.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect()
    }

    pub(crate) fn worker_counts(&self, c: &Counts) {
        let add = |family: &Counters, kind, n| {
            if n > 0 {
                family.get_or_create(&Label { kind }).inc_by(n);
            }
        };
        add(&self.reads, "cache", c.reads_hit);
        add(&self.reads, "fetch", c.reads_miss);
        add(&self.reads, "uncached", c.reads_uncached);
        add(&self.read_bytes, "cache", c.bytes_hit);
        add(&self.read_bytes, "fetch", c.bytes_miss);
        add(&self.opens, "passthrough", c.opens_passthrough);
        add(&self.opens, "kept", c.opens_kept);
        add(&self.opens, "superseded", c.opens_estale);
        add(&self.metadata, "store", c.metadata_hits);
        add(&self.metadata, "source", c.metadata_misses);
        add(&self.interrupts, "seen", c.interrupts);
        add(&self.interrupts, "let_go", c.interrupted);
        self.spliced.inc_by(c.reads_spliced);
        self.replayed.inc_by(c.replayed);
        self.table_full.inc_by(c.table_full);
    }

    fn event(&self, kind: &'static str, count: u64) {
        self.cache_events.get_or_create(&Label { kind }).inc_by(count);
    }

    pub fn healed(&self, heal: &Heal) {
        let label = HealLabel { level: heal.level, cause: heal.cause.name() };
        self.heals.get_or_create(&label).inc();
        self.heal_seconds.get_or_create(&label).observe(heal.took.as_secs_f64());
        self.heal_requests.get_or_create(&label).inc_by(heal.replayed);
    }

    pub(crate) fn store_removed(&self, reason: &'static str) {
        self.stores_removed.get_or_create(&Label { kind: reason }).inc();
    }

    pub(crate) fn stale_answer(&self) {
        self.stale_answers.inc();
    }

    pub fn poisoned(&self, operation: &'static str) {
        self.poisoned.get_or_create(&Label { kind: operation }).inc();
    }
}

impl CacheObserver for Metrics {
    fn fetched(
        &self,
        bytes: u64,
        _first_byte: Duration,
        total: Duration,
        failed: Option<&cache::data::FetchError>,
    ) {
        self.cache_bytes.get_or_create(&Label { kind: "fetched" }).inc_by(bytes);
        self.fetch_seconds.observe(total.as_secs_f64());
        if failed.is_some() {
            self.event("fetch_failed", 1);
        }
    }
    fn hit(&self, bytes: u64) {
        self.cache_bytes.get_or_create(&Label { kind: "hit" }).inc_by(bytes);
    }
    fn miss(&self, bytes: u64) {
        self.cache_bytes.get_or_create(&Label { kind: "miss" }).inc_by(bytes);
    }
    fn uncached(&self, bytes: u64) {
        self.cache_bytes.get_or_create(&Label { kind: "uncached" }).inc_by(bytes);
    }
    fn evicted(&self, files: u64, bytes: u64, reason: Reason) {
        self.event("evicted", files);
        self.evicted_bytes.get_or_create(&Label { kind: reason.as_str() }).inc_by(bytes);
    }
    fn checksum_failed(&self, root: u8, count: u64) {
        tracing::warn!(root, count, "cached blocks did not match their checksum: they are fetched again");
        self.event("checksum_failed", count);
    }
    fn changed_on_its_way(&self) {
        self.event("changed_on_its_way", 1);
    }
    fn disk_error(&self, root: u8, operation: &'static str, error: &std::io::Error) {
        tracing::warn!(root, operation, %error, "cache disk error: treated as a miss");
        self.event("disk_error", 1);
    }
    fn degraded(&self, root: u8, degraded: bool) {
        match degraded {
            true => tracing::error!(root, "cache root is failing: reads go past it until it works again"),
            false => tracing::info!(root, "cache root works again"),
        }
        self.event(if degraded { "root_degraded" } else { "root_recovered" }, 1);
    }
}

impl store::Observer for Metrics {
    fn request(&self, operation: &'static str, outcome: store::Outcome, latency: Duration, bytes: u64) {
        let label = RequestLabel { operation, outcome: outcome.as_str() };
        self.requests.get_or_create(&label).inc();
        self.request_seconds.get_or_create(&label).observe(latency.as_secs_f64());
        self.store_bytes.inc_by(bytes);
    }
    fn queued(&self, operation: &'static str, waited: Duration) {
        self.queue_seconds.get_or_create(&Label { kind: operation }).observe(waited.as_secs_f64());
    }
    fn retry(&self, _operation: &'static str, cause: store::RetryCause) {
        self.retries.get_or_create(&Label { kind: cause.as_str() }).inc();
    }
}
