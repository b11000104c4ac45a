//! Keeps the books: every call is timed, judged and watched.

use super::report::{Cause, Failure, Report, Slow};
use crate::clock::monotonic_ns;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Where failures are declared, each of them is judged.
const FAILURES_KEPT: usize = 10_000;
/// Calls on a mount that has ended fail at once: without a pause there are more of them than are kept, and those that are
/// not kept are not known to be declared.
const AFTER_FAILURE: Duration = Duration::from_millis(10);
/// Per thread; beyond it a run is broken in ways that more entries would not explain.
const SLOW_KEPT: usize = 100_000;

/// What the threads of one oracle share.
pub(super) struct Shared {
    pub(super) stop: AtomicBool,
    slow: Duration,
    totals: Mutex<Report>,
    /// One per thread: what it is doing right now.
    current: Mutex<Vec<Arc<Mutex<Current>>>>,
}

#[derive(Default)]
struct Current {
    thread: String,
    /// The call under way and when it began; None between calls.
    call: Option<(&'static str, u64)>,
    path: String,
    reported: bool,
}

impl Shared {
    pub(super) fn new(slow: Duration) -> Self {
        Self { stop: AtomicBool::new(false), slow, totals: Mutex::default(), current: Mutex::default() }
    }

    fn totals(&self) -> MutexGuard<'_, Report> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, failure: Failure) -> MutexGuard<'_, Report> {
        std::thread::sleep(AFTER_FAILURE);
        let mut totals = self.totals();
        totals.failed += 1;
        if totals.failures.len() < FAILURES_KEPT {
            totals.failures.push(failure);
        }
        totals
    }

    pub(super) fn report(&self, seed: u64, elapsed: Duration) -> Report {
        Report { seed, seconds: elapsed.as_secs_f64(), ..self.totals().clone() }
    }
}

/// The books of one thread; written into the shared report when it ends.
pub(super) struct Recorder {
    thread: String,
    shared: Arc<Shared>,
    current: Arc<Mutex<Current>>,
    calls: BTreeMap<&'static str, u64>,
    bytes: u64,
    slow: Vec<Slow>,
}

impl Recorder {
    pub(super) fn new(number: usize, kind: &str, shared: Arc<Shared>) -> Self {
        let thread = format!("{kind}{number}");
        let current = Arc::new(Mutex::new(Current { thread: thread.clone(), ..Current::default() }));
        shared.current.lock().unwrap_or_else(PoisonError::into_inner).push(current.clone());
        Self { thread, shared, current, calls: BTreeMap::new(), bytes: 0, slow: Vec::new() }
    }

    pub(super) fn stopping(&self) -> bool {
        self.shared.stop.load(Relaxed)
    }

    /// Makes one call by path; None: it failed, which has been recorded.
    pub(super) fn call<T>(
        &mut self,
        name: &'static str,
        path: &str,
        call: impl FnOnce() -> io::Result<T>,
    ) -> Option<T> {
        self.call_on(monotonic_ns(), name, path, call)
    }

    /// Makes one call on what was opened at `since_ns`.
    pub(super) fn call_on<T>(
        &mut self,
        since_ns: u64,
        name: &'static str,
        path: &str,
        call: impl FnOnce() -> io::Result<T>,
    ) -> Option<T> {
        let start_ns = monotonic_ns();
        {
            let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
            current.call = Some((name, start_ns));
            path.clone_into(&mut current.path);
        }
        let result = call();
        let end_ns = monotonic_ns();
        self.current.lock().unwrap_or_else(PoisonError::into_inner).call = None;
        *self.calls.entry(name).or_default() += 1;
        if end_ns - start_ns > self.shared.slow.as_nanos() as u64 && self.slow.len() < SLOW_KEPT {
            self.slow.push(Slow { call: name.to_owned(), start_ns, end_ns });
        }
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                let cause = error.raw_os_error().map_or(Cause::Wrong, Cause::Errno);
                let failure = self.failure(name, path, error.to_string(), cause, since_ns);
                let mut totals = self.shared.fail(failure);
                totals.wrong += u64::from(cause == Cause::Wrong);
                totals.interrupted += u64::from(error.kind() == io::ErrorKind::Interrupted);
                None
            }
        }
    }

    /// The call succeeded and its answer is wrong.
    pub(super) fn wrong(&mut self, name: &'static str, path: &str, what: String) {
        let failure = self.failure(name, path, what, Cause::Wrong, monotonic_ns());
        self.shared.fail(failure).wrong += 1;
    }

    /// Touching a mapping of what was opened at `since_ns` raised so many SIGBUSes.
    pub(super) fn bus_errors(&mut self, since_ns: u64, name: &'static str, path: &str, n: u64) {
        let failure = self.failure(name, path, format!("{n} SIGBUSes"), Cause::Bus, since_ns);
        drop(self.shared.fail(failure));
    }

    /// A read of what was opened at `since_ns` ended before its time; what it returned is right.
    pub(super) fn short(&mut self, since_ns: u64, name: &'static str, path: &str, what: String) {
        let failure = self.failure(name, path, what, Cause::Short, since_ns);
        drop(self.shared.fail(failure));
    }

    pub(super) fn compared(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    fn failure(&self, call: &str, path: &str, what: String, cause: Cause, since_ns: u64) -> Failure {
        Failure {
            thread: self.thread.clone(),
            call: call.to_owned(),
            path: path.to_owned(),
            what,
            cause,
            since_ns,
            at_ns: monotonic_ns(),
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let mut totals = self.shared.totals();
        for (call, n) in std::mem::take(&mut self.calls) {
            *totals.calls.entry(call.to_owned()).or_default() += n;
        }
        totals.bytes += self.bytes;
        totals.slow.append(&mut self.slow);
    }
}

/// Looks every half second for calls that take longer than `limit`; each is counted once.
pub(super) fn watch(shared: Arc<Shared>, limit: Duration) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        super::signals::block_alarm();
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let threads = shared.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
            for thread in threads {
                let mut current = thread.lock().unwrap_or_else(PoisonError::into_inner);
                let Some((call, since_ns)) = current.call else {
                    current.reported = false;
                    continue;
                };
                let waited = Duration::from_nanos(monotonic_ns().saturating_sub(since_ns));
                if waited > limit && !current.reported {
                    current.reported = true;
                    let failure = Failure {
                        thread: current.thread.clone(),
                        call: call.to_owned(),
                        path: current.path.clone(),
                        what: format!("no answer for {:.1} s", waited.as_secs_f64()),
                        cause: Cause::Hang,
                        since_ns,
                        at_ns: monotonic_ns(),
                    };
                    eprintln!("oracle: {failure:?}");
                    shared.fail(failure).hangs += 1;
                }
            }
        }
    })
}
