//! How long a very large object that nobody has opened yet keeps a reader waiting for its first bytes.

use crate::bench::numbers::median;
use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::who::Who;
use crate::bench::workload::{FIRST_BYTE, FIRST_OPEN};
use crate::clock::wait_until;
use crate::node::Node;
use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const PREFIX: &str = "huge";
const NAME: &str = "huge";
/// In each round; their median counts.
const REPEATS: usize = 7;

pub(in crate::bench) fn play(stage: &mut Stage) -> Result<()> {
    if !stage.wants_any([FIRST_BYTE, FIRST_OPEN]) {
        return Ok(());
    }
    let dir = stage.node().server.dir().join(PREFIX);
    std::fs::create_dir_all(&dir)?;
    let file = File::create(dir.join(NAME))?;
    // Holes, which the server reads as zeros.
    file.set_len(stage.size().huge_bytes)?;
    file.write_all_at(&testkit::content::bytes(1, 0..1 << 20), 0)?;
    file.sync_all()?;
    let endpoint = stage.node().server.endpoint();
    for round in 0..stage.size().rounds {
        let mut mounts = Vec::new();
        for _ in 0..REPEATS {
            let prefix = stage.fresh(PREFIX)?;
            mounts.push((stage.mount(Who::Millpond, &prefix, &endpoint, "large")?, prefix));
        }
        let subject = &mounts[0].0;
        let mut with_open = f64::NAN;
        stage.sample_of_node(subject, FIRST_BYTE, round, |node| {
            let waits = waits(node, &mounts)?;
            with_open = waits.with_open;
            Ok(waits.after_open)
        })?;
        stage.sample_of_node(subject, FIRST_OPEN, round, |node| match with_open.is_nan() {
            true => Ok(waits(node, &mounts)?.with_open),
            false => Ok(with_open),
        })?;
        for (subject, prefix) in mounts {
            stage.done(subject, &prefix)?;
        }
    }
    Ok(())
}

/// Milliseconds, medians of all mounts.
struct Waits {
    after_open: f64,
    with_open: f64,
}

fn waits(node: &Node, mounts: &[(Subject, String)]) -> Result<Waits> {
    let (mut after_open, mut with_open) = (Vec::new(), Vec::new());
    for (subject, _) in mounts {
        let path = subject.root.join(NAME);
        let begun = Instant::now();
        let file = File::open(&path).with_context(|| path.display().to_string())?;
        let opened = Instant::now();
        file.read_exact_at(&mut [0; 4096], 0)?;
        let read = Instant::now();
        drop(file);
        after_open.push((read - opened).as_secs_f64() * 1e3);
        with_open.push((read - begun).as_secs_f64() * 1e3);
        // What was read ahead for this one must not keep the next one waiting. The question is a request, too.
        let is_quiet = || node.server.stats().is_ok_and(|stats| stats.in_flight <= 1);
        wait_until(Duration::from_secs(5), is_quiet);
    }
    Ok(Waits { after_open: median(after_open), with_open: median(with_open) })
}
