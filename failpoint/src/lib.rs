//! Deaths at named steps, for tests: a debug switch, inert unless the environment names a step.
//!
//! A process with `MILLPOND_FAILPOINT=<step>` aborts when it gets there; with `<step>=hang` the thread that gets there
//! never goes on, and holds what it holds; with `<step>=until:<file>` it goes on when that file exists. Workers are
//! started with an empty environment: the n-th worker that an agent starts gets the n-th of the comma-separated steps
//! in the agent's `MILLPOND_WORKER_FAILPOINTS`; an empty step, and every worker after the last one, lives.
//!
//! `MILLPOND_FAILPOINT=panics` waits for a signal with a number, n, and then panics at the n-th step that any of its
//! threads gets to (`startup::begin`); an agent's workers do so, too. docs/development.md says where the steps are
//! listed.

use std::cell::RefCell;
use std::io::Write;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Once, OnceLock};
use std::time::Duration;

/// Names the step at which this process aborts, or hangs.
pub const VARIABLE: &str = "MILLPOND_FAILPOINT";
/// Names those of the workers that this process starts.
pub(crate) const WORKERS_VARIABLE: &str = "MILLPOND_WORKER_FAILPOINTS";

/// In the place of a step.
const PANICS: &str = "panics";
/// How often a thread that waits at a step looks for its file.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Steps until one panics; not above 0: none does.
static STEPS_LEFT: AtomicI64 = AtomicI64::new(0);

/// What a thread does at each step that it gets to.
type Observer = Rc<dyn Fn(&str)>;

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// From now on this thread tells `observer` of each step. For a history that has its process, disk and store on one thread: it
/// unwinds where its process is to die.
pub fn observe(observer: Rc<dyn Fn(&str)>) {
    OBSERVER.set(Some(observer));
}

/// Is there any step at which this process aborts? For steps whose names take some work.
pub fn is_set() -> bool {
    named().is_some()
}

/// Aborts the process if `step` is the one that it shall not survive, or stays here.
pub fn hit(step: &str) {
    pass(step);
    // Copied out of its place: it may unwind.
    let observer = OBSERVER.try_with(|observer| observer.borrow().clone()).ok().flatten();
    if let Some(observer) = observer {
        observer(step);
    }
    match named().and_then(|named| named.strip_prefix(step)) {
        Some("") => {
            // Several threads may get here: it is said once.
            static DYING: Once = Once::new();
            DYING.call_once(|| {
                say(&format!("failpoint: aborted at {step}"));
                std::process::abort();
            });
        }
        Some("=hang") => {
            say(&format!("failpoint: hangs at {step}"));
            loop {
                std::thread::park();
            }
        }
        Some(rest) => {
            let Some(file) = rest.strip_prefix("=until:") else { return };
            say(&format!("failpoint: waits at {step}"));
            while !Path::new(file).exists() {
                std::thread::sleep(LOOK_EVERY);
            }
        }
        None => {}
    }
}

/// A place at which a process may panic, but not stop otherwise.
pub fn pass(place: &str) {
    if is_armed() && STEPS_LEFT.fetch_sub(1, Relaxed) == 1 {
        panic!("failpoint: panics at {place}");
    }
}

/// Whether [`arm`] will be called.
pub fn panics_on_request() -> bool {
    named() == Some(PANICS)
}

/// The n-th place from now on panics. Async-signal-safe.
pub fn arm(n: u32) {
    STEPS_LEFT.store(n.into(), Relaxed);
}

pub fn is_armed() -> bool {
    STEPS_LEFT.load(Relaxed) > 0
}

/// The step for the next worker that this process starts.
pub fn of_next_worker() -> Option<String> {
    static STEPS: OnceLock<Vec<String>> = OnceLock::new();
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    let steps = STEPS.get_or_init(|| {
        let text = std::env::var(WORKERS_VARIABLE).unwrap_or_default();
        text.split(',').map(str::to_owned).collect()
    });
    let step = steps.get(STARTED.fetch_add(1, Relaxed)).filter(|step| !step.is_empty()).cloned();
    step.or_else(|| panics_on_request().then(|| PANICS.to_owned()))
}

fn named() -> Option<&'static str> {
    static NAMED: OnceLock<Option<String>> = OnceLock::new();
    NAMED.get_or_init(|| std::env::var(VARIABLE).ok()).as_deref()
}

fn say(line: &str) {
    // A single write, so that no other process's line gets in between; standard error may have no reader.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}
