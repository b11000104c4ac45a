//! One measurement: a workload on a subject, with what it cost.

use super::record::Sample;
use super::subject::Subject;
use super::workload::Delivered;
use crate::node::{Node, Server};
use crate::processes::Memory;
use anyhow::Result;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Runs `work`, which returns a value for each of the rows, and looks at server, processor and memory meanwhile. What it cost
/// is the same for all of them.
pub(super) fn measure<const ROWS: usize>(
    node: &Node,
    server: &Server,
    subject: &Subject,
    rows: [(&'static str, Delivered); ROWS],
    round: usize,
    work: impl FnOnce(&Node) -> Result<[f64; ROWS]>,
) -> Result<[Sample; ROWS]> {
    server.reset()?;
    let before = subject.cpu_time(node);
    let done = AtomicBool::new(false);
    let (values, peak) = std::thread::scope(|scope| {
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
    let (stats, values) = (server.stats()?, values?);
    let cpu_s = (subject.cpu_time(node).saturating_sub(before)).as_secs_f64();
    let mut values = values.into_iter();
    Ok(rows.map(|(workload, delivered)| Sample {
        workload: workload.to_owned(),
        who: subject.who.name().to_owned(),
        round,
        value: values.next().expect("there are as many values as rows"),
        cpu_s,
        bytes: delivered.bytes,
        files: delivered.files,
        fetched_bytes: stats.bytes_get,
        sent_bytes: stats.bytes_put,
        requests: stats.total(),
        memory: peak.unevictable(),
        pss: peak.pss,
    }))
}

/// A line for whoever waits for the run.
pub(super) fn tell(sample: &Sample) {
    eprintln!(
        "{:<46} {:<11} {:>12.2}  {:>6} requests {:>7.2} CPU-s {:>6.0} MB ({:.0} PSS)",
        sample.workload,
        sample.who,
        sample.value,
        sample.requests,
        sample.cpu_s,
        sample.memory as f64 / 1e6,
        sample.pss as f64 / 1e6
    );
}
