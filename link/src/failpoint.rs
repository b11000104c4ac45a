//! Deaths at named steps, for tests: a debug switch, inert unless the environment names a step.
//!
//! A process with `MILLPOND_FAILPOINT=<step>` aborts when it gets there; with `<step>=hang` the thread that gets there
//! never goes on, and holds what it holds; with `<step>=until:<file>` it goes on when that file exists. Workers are
//! started with an empty environment: the n-th worker that an agent starts gets the n-th of the comma-separated steps in
//! the agent's `MILLPOND_WORKER_FAILPOINTS`; an empty step, and every worker after the last one, lives.
//! docs/development.md says where the steps are listed.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Once, OnceLock};
use std::time::Duration;

/// Names the step at which this process aborts, or hangs.
pub const VARIABLE: &str = "MILLPOND_FAILPOINT";
/// Names those of the workers that this process starts.
pub const WORKERS_VARIABLE: &str = "MILLPOND_WORKER_FAILPOINTS";

/// How often a thread that waits at a step looks for its file.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Aborts the process if `step` is the one that it shall not survive, or stays here.
pub fn hit(step: &str) {
    static NAMED: OnceLock<Option<String>> = OnceLock::new();
    let named = NAMED.get_or_init(|| std::env::var(VARIABLE).ok());
    match named.as_deref().and_then(|named| named.strip_prefix(step)) {
        Some("") => {
            // Several threads may get here: it is said once.
            static DYING: Once = Once::new();
            DYING.call_once(|| {
                eprintln!("failpoint: aborted at {step}");
                std::process::abort();
            });
        }
        Some("=hang") => {
            eprintln!("failpoint: hangs at {step}");
            loop {
                std::thread::park();
            }
        }
        Some(rest) => {
            let Some(file) = rest.strip_prefix("=until:") else { return };
            eprintln!("failpoint: waits at {step}");
            while !Path::new(file).exists() {
                std::thread::sleep(LOOK_EVERY);
            }
        }
        None => {}
    }
}

/// The step for the next worker that this process starts.
pub fn of_next_worker() -> Option<String> {
    static STEPS: OnceLock<Vec<String>> = OnceLock::new();
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    let steps = STEPS.get_or_init(|| {
        let text = std::env::var(WORKERS_VARIABLE).unwrap_or_default();
        text.split(',').map(str::to_owned).collect()
    });
    steps.get(STARTED.fetch_add(1, Relaxed)).filter(|step| !step.is_empty()).cloned()
}
