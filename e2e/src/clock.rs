//! One clock for all processes of a run.

use anyhow::{Context, Result};
use std::time::{Duration, Instant};

/// CLOCK_MONOTONIC in nanoseconds: comparable between processes of one machine, unlike `Instant`.
pub fn monotonic_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Looks every few milliseconds until `condition` holds; false: it did not within `limit`.
pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Does what may wait for a mount for ever on a thread of its own: in a test that fails, that thread is let go when the
/// node is taken down.
pub fn within<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    std::thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(limit).with_context(|| format!("no answer within {limit:?}"))
}
