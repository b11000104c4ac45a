//! The application under test: many threads call into a mounted volume and judge every single answer.
//!
//! A call is right when it succeeds (or fails as it must: an absent name is ENOENT), is complete, carries the right
//! bytes and ends within ten seconds, unless an option says otherwise. Anything else is a failure in the [`Report`].
//! Calls slower than a threshold are logged with their times, so that the harness can tell how long a worker's death
//! was felt.

mod abuse;
mod calls;
mod crowd;
mod kinds;
mod record;
mod report;
mod signals;
mod verify;

pub use abuse::{Abuse, abuse};
pub use crowd::{Crowd, crowd};
pub use kinds::Kind;
pub use report::{Cause, Failure, Report, Slow, Stalls};
pub use verify::{Verified, verify};

use crate::tree::Tree;
use anyhow::{Result, bail};
use record::{Recorder, Shared};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// Longest that any call may take before it counts as a hang, where nothing else is said.
pub const HANG: Duration = Duration::from_secs(10);

/// What one oracle process does.
#[derive(Clone, Debug, clap::Args)]
pub struct Plan {
    /// The mounted volume as this process sees it.
    #[arg(long)]
    pub root: PathBuf,
    /// The tree that must be found there (JSON, see `tree.rs`).
    #[arg(long)]
    pub tree: PathBuf,
    /// One thread per entry; repeat an entry for more threads.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "pread,pread,small,small,open,stat,readdir,mmap,sequential"
    )]
    pub kinds: Vec<Kind>,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Interrupt the threads 1,000 times a second with a handler that does not restart system calls.
    #[arg(long)]
    pub alarm: bool,
    /// Go on after the end was asked for until so many alarms rang: a busy machine delivers fewer a second.
    #[arg(long, default_value_t = 0)]
    pub least_alarms: u64,
    /// Never drop page cache: what was read once must stay readable without a worker.
    #[arg(long)]
    pub keep_cache: bool,
    /// Calls that take longer are logged, milliseconds.
    #[arg(long, default_value_t = 2)]
    pub slow_ms: u64,
    /// Pause between two rounds of one thread, microseconds; 0: none. For runs where the CPU is shared.
    #[arg(long, default_value_t = 0)]
    pub pause_us: u64,
    /// Longest that any call may take before it counts as a hang, seconds.
    #[arg(long, default_value_t = HANG.as_secs())]
    pub hang_s: u64,
}

/// Runs until stdin closes, then prints the report as one line of JSON. Prints "started" when every thread is at work.
pub fn run(plan: &Plan) -> Result<()> {
    let tree = Arc::new(Tree::load(&plan.tree)?);
    if plan.kinds.is_empty() {
        bail!("no kinds: nothing would be tested");
    }
    let shared = Arc::new(Shared::new(Duration::from_millis(plan.slow_ms)));
    signals::count_bus_errors()?;
    let begun = Instant::now();
    let ready = Arc::new(Barrier::new(plan.kinds.len() + 1));
    let mut threads = Vec::new();
    for (number, &kind) in plan.kinds.iter().enumerate() {
        let (plan, tree, shared, ready) = (plan.clone(), tree.clone(), shared.clone(), ready.clone());
        let recorder = Recorder::new(number, kind.name(), shared.clone());
        let worker = std::thread::Builder::new().name(format!("{}{number}", kind.name()));
        threads.push(worker.spawn(move || {
            let mut application = kinds::Application::new(kind, number, &plan, tree, recorder);
            application.prepare();
            ready.wait();
            while !shared.stop.load(Relaxed) {
                application.round();
                if plan.pause_us > 0 {
                    std::thread::sleep(Duration::from_micros(plan.pause_us));
                }
            }
            application.finish();
        })?);
    }
    let hang = Duration::from_secs(plan.hang_s);
    record::watch(shared.clone(), hang);
    ready.wait();
    signals::block_alarm();
    if plan.alarm {
        signals::alarm_every_millisecond()?;
    }
    println!("started");
    std::io::stdout().flush()?;
    let mut end = [0];
    let _ = std::io::stdin().read(&mut end); // EOF and an error mean the same: the harness wants the report
    let limit = Instant::now() + 2 * hang;
    while signals::alarms() < plan.least_alarms && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(5));
    }
    shared.stop.store(true, Relaxed);
    let limit = Instant::now() + 2 * hang;
    while threads.iter().any(|t| !t.is_finished()) && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut panicked = 0;
    for thread in threads {
        // A thread that is stuck in the kernel cannot be joined; the watchdog has counted it as a hang.
        if thread.is_finished() && thread.join().is_err() {
            panicked += 1;
        }
    }
    let mut report = shared.report(plan.seed, begun.elapsed());
    report.sigbus = signals::bus_errors();
    report.alarms = signals::alarms();
    report.panicked = panicked;
    println!("{}", serde_json::to_string(&report)?);
    std::io::stdout().flush()?;
    // Threads that hang would keep the process alive: leave without them.
    std::process::exit(0)
}
