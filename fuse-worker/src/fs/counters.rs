//! What this worker did, counted without locks and reported in differences.

use inflight::{Counter as Shared, Inflight};
use link::worker::Counts;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[derive(Default)]
pub struct Count(AtomicU64);
impl Count {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }
    fn take(&self) -> u64 {
        self.0.swap(0, Relaxed)
    }
}

#[derive(Default)]
pub struct Counters {
    pub lookups: Count,
    pub opens_passthrough: Count,
    pub opens_kept: Count,
    pub opens_estale: Count,
    pub reads_hit: Count,
    pub bytes_hit: Count,
    /// Of those, and of the answered misses, without a copy.
    pub reads_spliced: Count,
    pub reads_miss: Count,
    pub bytes_miss: Count,
    pub reads_uncached: Count,
    pub readdirs: Count,
    pub metadata_hits: Count,
    pub metadata_misses: Count,
    /// The shared counters as last reported.
    reported: Mutex<Option<[u64; 5]>>,
}

impl Counters {
    /// Everything since the last call, with what the transport counted in shared memory; None: nothing.
    pub fn take(&self, inflight: &Inflight) -> Option<Counts> {
        let shared =
            [Shared::Interrupts, Shared::Interrupted, Shared::Replayed, Shared::Full, Shared::Dropped]
                .map(|counter| inflight.counter(counter));
        let mut reported = self.reported.lock().unwrap_or_else(|e| e.into_inner());
        // The first call (`begin`) only takes note: what the predecessors counted, they reported.
        let before = reported.replace(shared).unwrap_or(shared);
        let since = |i: usize| shared[i].wrapping_sub(before[i]);
        let counts = Counts {
            lookups: self.lookups.take(),
            opens_passthrough: self.opens_passthrough.take(),
            opens_kept: self.opens_kept.take(),
            opens_estale: self.opens_estale.take(),
            reads_hit: self.reads_hit.take(),
            bytes_hit: self.bytes_hit.take(),
            reads_spliced: self.reads_spliced.take(),
            reads_miss: self.reads_miss.take(),
            bytes_miss: self.bytes_miss.take(),
            reads_uncached: self.reads_uncached.take(),
            readdirs: self.readdirs.take(),
            metadata_hits: self.metadata_hits.take(),
            metadata_misses: self.metadata_misses.take(),
            interrupts: since(0),
            interrupted: since(1),
            replayed: since(2),
            table_full: since(3),
        };
        (counts != Counts::default()).then_some(counts)
    }

    /// To be called before the device is read: differences count from here.
    pub fn begin(&self, inflight: &Inflight) {
        let _ = self.take(inflight);
    }
}
