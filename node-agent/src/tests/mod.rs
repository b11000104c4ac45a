//! The agent as a whole, without root: its broker and its workers are played by the test, over the sockets that the real
//! ones use. Workers' processes are real, so that they die as real ones do; the kernel's end of a connection is a pipe.

mod broker;
mod node;
mod relay;
mod worker;

mod brokers;
mod deaths;
mod handoff;
mod operators;
mod questions;
mod volumes;

use std::time::{Duration, Instant};

/// Longer than anything takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits for a condition.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < end, "not within {LIMIT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
