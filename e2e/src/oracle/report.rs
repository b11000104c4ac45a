//! What an oracle saw, and what it means for the deaths of workers meanwhile.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    pub seed: u64,
    pub seconds: f64,
    /// Name of the call → how often it was made.
    pub calls: BTreeMap<String, u64>,
    /// Bytes that were read and compared.
    pub bytes: u64,
    /// All failures; the first thousand are described in `failures`.
    pub failed: u64,
    pub failures: Vec<Failure>,
    /// Of `failed`: answers with wrong bytes, sizes, names or inode numbers.
    pub wrong: u64,
    /// Of `failed`: EINTR.
    pub interrupted: u64,
    /// Calls that took longer than [`super::Plan::hang_s`].
    pub hangs: u64,
    pub sigbus: u64,
    /// SIGALRMs that were delivered.
    pub alarms: u64,
    pub panicked: u64,
    pub slow: Vec<Slow>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    pub thread: String,
    pub call: String,
    pub path: String,
    pub what: String,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub at_ns: u64,
}

/// A call that took longer than the threshold; CLOCK_MONOTONIC, nanoseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Slow {
    pub call: String,
    pub start_ns: u64,
    pub end_ns: u64,
}

impl Report {
    pub fn total_calls(&self) -> u64 {
        self.calls.values().sum()
    }

    /// Adds what another oracle of the same run saw.
    pub fn merge(&mut self, other: Self) {
        for (call, n) in other.calls {
            *self.calls.entry(call).or_default() += n;
        }
        self.seconds = self.seconds.max(other.seconds);
        self.bytes += other.bytes;
        self.failed += other.failed;
        self.failures.extend(other.failures);
        self.wrong += other.wrong;
        self.interrupted += other.interrupted;
        self.hangs += other.hangs;
        self.sigbus += other.sigbus;
        self.alarms += other.alarms;
        self.panicked += other.panicked;
        self.slow.extend(other.slow);
    }

    /// No failed call, no wrong byte, no hang, no SIGBUS, and something was done at all.
    pub fn ensure_clean(&self) -> Result<()> {
        let first: Vec<_> = self.failures.iter().take(20).collect();
        ensure!(
            self.failed == 0 && self.hangs == 0 && self.sigbus == 0 && self.panicked == 0,
            "{}\nfirst failures: {first:#?}",
            self.summary()
        );
        ensure!(self.total_calls() > 0, "the oracle made no call");
        Ok(())
    }

    pub fn summary(&self) -> String {
        format!(
            "{} calls, {:.1} MB compared in {:.1} s: {} failed ({} wrong, {} EINTR), {} hangs, {} SIGBUS, {} alarms",
            self.total_calls(),
            self.bytes as f64 / 1e6,
            self.seconds,
            self.failed,
            self.wrong,
            self.interrupted,
            self.hangs,
            self.sigbus,
            self.alarms
        )
    }

    /// For each moment (CLOCK_MONOTONIC, ns): how long the longest call that it fell into, or that began within
    /// `window_ns` after it, kept its caller waiting from that moment on.
    pub fn stalls(&self, moments_ns: &[u64], window_ns: u64) -> Stalls {
        Stalls::of(self.each_stall(moments_ns, window_ns))
    }

    /// The same, one number (ns) per moment.
    pub fn each_stall(&self, moments_ns: &[u64], window_ns: u64) -> Vec<u64> {
        let felt = |&moment: &u64| self.longest_stall(moment, window_ns).map_or(0, |(ns, _)| ns);
        moments_ns.iter().map(felt).collect()
    }

    /// The same for one moment, with the call that was kept waiting.
    pub fn longest_stall(&self, moment_ns: u64, window_ns: u64) -> Option<(u64, &Slow)> {
        let hit = |s: &&Slow| s.end_ns > moment_ns && s.start_ns < moment_ns + window_ns;
        let waited = self.slow.iter().filter(hit).map(|s| (s.end_ns - s.start_ns.max(moment_ns), s));
        waited.max_by_key(|(ns, _)| *ns)
    }
}

/// Milliseconds; 0 for a death that nobody felt beyond the threshold of the slow log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stalls {
    pub count: usize,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
}

impl Stalls {
    pub fn of(mut ns: Vec<u64>) -> Self {
        ns.sort_unstable();
        let at = |p: f64| match ns.len() {
            0 => 0.0,
            n => ns[((n as f64 * p).ceil() as usize).clamp(1, n) - 1] as f64 / 1e6,
        };
        Self { count: ns.len(), p50_ms: at(0.5), p99_ms: at(0.99), max_ms: at(1.0) }
    }
}

impl std::fmt::Display for Stalls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "stall p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms", self.p50_ms, self.p99_ms, self.max_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_the_longest_wait_after_the_moment() {
        let slow = |start_ns, end_ns| Slow { call: "pread".into(), start_ns, end_ns };
        let ms = 1_000_000;
        let report = Report { slow: vec![slow(ms, 9 * ms), slow(6 * ms, 12 * ms)], ..Report::default() };
        let stalls = report.stalls(&[5 * ms, 100 * ms], 10 * ms);
        assert_eq!((stalls.count, stalls.p50_ms, stalls.max_ms), (2, 0.0, 6.0));
        assert_eq!(Stalls::of(vec![]), Stalls::default());
    }

    #[test]
    fn an_idle_oracle_is_not_clean() {
        assert!(Report::default().ensure_clean().is_err());
        let calls = BTreeMap::from([("stat".to_owned(), 1)]);
        let report = Report { calls, ..Report::default() };
        assert!(report.ensure_clean().is_ok());
        assert!(Report { hangs: 1, ..report }.ensure_clean().is_err());
    }
}
