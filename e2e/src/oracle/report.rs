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
    pub cause: Cause,
    /// When the descriptor was opened that the call was made on; of a call by path, and of a hang, when the call began.
    /// CLOCK_MONOTONIC, nanoseconds, here and below.
    pub since_ns: u64,
    pub at_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    Errno(i32),
    /// SIGBUS at a touch of a mapping.
    Bus,
    /// The call succeeded with a wrong answer.
    Wrong,
    /// A read returned less than there is, and what it returned is right (read(2): an error came after some bytes).
    Short,
    /// No answer within the limit. It may have come later.
    Hang,
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

    /// Takes out those failures that are declared somewhere, and returns how many they are. What is not described in
    /// `failures` stays.
    pub fn excuse(&mut self, declared: impl Fn(&Failure, &[Slow]) -> bool) -> u64 {
        let all = std::mem::take(&mut self.failures);
        let (excused, kept): (Vec<_>, Vec<_>) = all.into_iter().partition(|f| declared(f, &self.slow));
        self.failures = kept;
        let of = |cause: Cause| excused.iter().filter(|failure| failure.cause == cause).count() as u64;
        self.failed -= excused.len() as u64;
        self.hangs -= of(Cause::Hang);
        self.wrong -= of(Cause::Wrong);
        self.interrupted -= of(Cause::Errno(libc::EINTR));
        // One touch of a mapping is as many signals as it has pages.
        if of(Cause::Bus) > 0 && !self.failures.iter().any(|failure| failure.cause == Cause::Bus) {
            self.sigbus = 0;
        }
        excused.len() as u64
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

/// Milliseconds; 0 for a death that no call felt beyond the threshold of the slow log.
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
    fn only_what_is_declared_is_taken_out() {
        let failure = |cause| Failure {
            thread: "t".into(),
            call: "pread".into(),
            path: "p".into(),
            what: String::new(),
            cause,
            since_ns: 0,
            at_ns: 0,
        };
        let causes =
            [Cause::Errno(libc::ENOTCONN), Cause::Bus, Cause::Wrong, Cause::Hang, Cause::Errno(libc::EIO)];
        // One more than are described.
        let mut report = Report { failed: 6, wrong: 1, hangs: 1, sigbus: 256, ..Report::default() };
        report.failures = causes.map(failure).to_vec();
        assert_eq!(report.excuse(|f, _| f.cause == Cause::Errno(libc::ENOTCONN)), 1);
        assert_eq!((report.failed, report.sigbus, report.hangs), (5, 256, 1));
        assert_eq!(report.excuse(|f, _| matches!(f.cause, Cause::Bus | Cause::Hang)), 2);
        assert_eq!((report.failed, report.sigbus, report.hangs, report.wrong), (3, 0, 0, 1));
        assert_eq!(report.excuse(|_, _| true), 2);
        assert_eq!((report.failed, report.wrong), (1, 0), "what is not described stays");
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
