//! One measurement: a workload on a subject, with what it cost.

use super::subject::{Subject, Who};
use crate::node::Node;
use crate::processes::Memory;
use anyhow::Result;
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    pub workload: &'static str,
    pub who: Who,
    pub round: usize,
    /// In the workload's unit.
    pub value: f64,
    pub fetched_bytes: u64,
    pub requests: u64,
    pub cpu_s: f64,
    /// Peak of anonymous plus unevictable memory of all serving processes, bytes.
    pub memory: u64,
    /// PSS at that moment.
    pub pss: u64,
}

/// Runs `work`, which returns the value, and looks at server, processor and memory meanwhile.
pub(super) fn measure(
    node: &Node,
    subject: &Subject,
    workload: &'static str,
    round: usize,
    work: impl FnOnce() -> Result<f64>,
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
        let value = work();
        done.store(true, Relaxed);
        (value, watch.join().expect("the watcher does not panic"))
    });
    let stats = node.server.stats()?;
    let sample = Sample {
        workload,
        who: subject.who,
        round,
        value: value?,
        fetched_bytes: stats.bytes_get,
        requests: stats.total(),
        cpu_s: (subject.cpu_time(node).saturating_sub(before)).as_secs_f64(),
        memory: peak.unevictable(),
        pss: peak.pss,
    };
    eprintln!(
        "{workload:<44} {:<9} {:>12.1}  {:>6} requests {:>7.1} CPU-s {:>6.0} MB ({:.0} PSS)",
        subject.who.name(),
        sample.value,
        sample.requests,
        sample.cpu_s,
        sample.memory as f64 / 1e6,
        sample.pss as f64 / 1e6
    );
    Ok(sample)
}

/// What a workload's numbers mean.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    pub name: &'static str,
    pub unit: &'static str,
    pub less_is_better: bool,
    /// From the design: what Millpond aims at.
    pub aim: Aim,
    /// Bytes that one run delivers to the application; 0 where that says nothing.
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug)]
pub enum Aim {
    /// Times the native value of the same rounds.
    OfNative(f64),
    Absolute(f64),
}

/// Of an odd or even number of values; NaN of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// One row per workload: medians of each subject, ratio, aim, costs of Millpond.
pub fn markdown(workloads: &[Workload], samples: &[Sample], present: &[Who]) -> String {
    let mut text = String::from("| workload | unit |");
    for who in present {
        text += &format!(" {} |", who.name());
    }
    text += " ours/native | aim | met | fetched | requests | CPU-s per GiB | peak memory MB (PSS) |\n|";
    text += &"---|".repeat(present.len() + 9);
    text.push('\n');
    for w in workloads {
        let of = |who: Who| samples.iter().filter(move |s| s.workload == w.name && s.who == who);
        let value = |who: Who| median(of(who).map(|s| s.value).collect());
        if of(Who::Millpond).next().is_none() {
            continue;
        }
        let number = |x: f64| if x.is_nan() { "–".to_owned() } else { format!("{x:.*}", digits(x)) };
        text += &format!("| {} | {} |", w.name, w.unit);
        for &who in present {
            text += &format!(" {} |", number(value(who)));
        }
        let (ours, native) = (value(Who::Millpond), value(Who::Native));
        let ratio = if w.less_is_better { native / ours } else { ours / native };
        let (aim, met) = match w.aim {
            Aim::OfNative(least) => (format!("≥ {least} of native"), ratio >= least),
            Aim::Absolute(limit) if w.less_is_better => (format!("≤ {limit}"), ours <= limit),
            Aim::Absolute(limit) => (format!("≥ {limit}"), ours >= limit),
        };
        let of_ours = |f: fn(&Sample) -> f64| median(of(Who::Millpond).map(f).collect());
        let per_gib =
            if w.bytes > 0 { of_ours(|s| s.cpu_s) / (w.bytes as f64 / f64::from(1 << 30)) } else { f64::NAN };
        let fetched = of_ours(|s| s.fetched_bytes as f64);
        let fetched = if w.bytes > 0 {
            format!("{:.2}×", fetched / w.bytes as f64)
        } else {
            format!("{:.1} MB", fetched / 1e6)
        };
        let peak = |f: fn(&Sample) -> u64| of(Who::Millpond).map(f).max().unwrap_or(0) as f64 / 1e6;
        text += &format!(
            " {} | {aim} | {} | {fetched} | {} | {} | {:.0} ({:.0}) |\n",
            number(ratio),
            if met { "yes" } else { "no" },
            number(of_ours(|s| s.requests as f64)),
            number(per_gib),
            peak(|s| s.memory),
            peak(|s| s.pss)
        );
    }
    text
}

fn digits(x: f64) -> usize {
    match x.abs() {
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        _ => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_rows() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 2.0]), 3.0);
        let w = Workload {
            name: "w",
            unit: "MB/s",
            less_is_better: false,
            aim: Aim::OfNative(0.9),
            bytes: 1 << 30,
        };
        let sample = |who, value| Sample {
            workload: "w",
            who,
            round: 0,
            value,
            fetched_bytes: 1 << 30,
            requests: 128,
            cpu_s: 0.5,
            memory: 50_000_000,
            pss: 60_000_000,
        };
        let table = markdown(
            &[w],
            &[sample(Who::Native, 1000.0), sample(Who::Millpond, 950.0)],
            &[Who::Native, Who::Millpond],
        );
        let row = table.lines().nth(2).unwrap();
        assert_eq!(
            row,
            "| w | MB/s | 1000 | 950 | 0.95 | ≥ 0.9 of native | yes | 1.00× | 128 | 0.50 | 50 (60) |"
        );
    }
}
