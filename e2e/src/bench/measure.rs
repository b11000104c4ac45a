//! One measurement: a workload on a subject, with what it cost.

use super::record::Sample;
use super::subject::Subject;
use super::workload::Delivered;
use crate::node::Node;
use crate::processes::Memory;
use anyhow::Result;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Runs `work`, which returns the value, and looks at server, processor and memory meanwhile.
pub(super) fn measure(
    node: &Node,
    subject: &Subject,
    workload: &'static str,
    round: usize,
    delivered: Delivered,
    work: impl FnOnce(&Node) -> Result<f64>,
) -> Result<Sample> {
    node.server.reset()?;
    let before = subject.cpu_time(node);
    let done = AtomicBool::new(false);
    let (value, peak) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut peak = Memory::default();
            loop {
                peak = peak.max(subject.memory(node));
                if done.load(Relaxed) {
                    return peak;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let value = work(node);
        done.store(true, Relaxed);
        (value, watch.join().expect("the watcher does not panic"))
    });
    let stats = node.server.stats()?;
    let sample = Sample {
        workload: workload.to_owned(),
        who: subject.who.name().to_owned(),
        round,
        value: value?,
        cpu_s: (subject.cpu_time(node).saturating_sub(before)).as_secs_f64(),
        bytes: delivered.bytes,
        files: delivered.files,
        fetched_bytes: stats.bytes_get,
        requests: stats.total(),
        memory: peak.unevictable(),
        pss: peak.pss,
    };
    eprintln!(
        "{workload:<46} {:<11} {:>12.2}  {:>6} requests {:>7.2} CPU-s {:>6.0} MB ({:.0} PSS)",
        sample.who,
        sample.value,
        sample.requests,
        sample.cpu_s,
        sample.memory as f64 / 1e6,
        sample.pss as f64 / 1e6
    );
    Ok(sample)
}
