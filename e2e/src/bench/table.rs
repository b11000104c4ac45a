//! A record as the Markdown tables of `docs/benchmarks.md`: what was measured, and the aims.

use super::numbers::{Spread, number};
use super::record::{Record, Sample};
use super::who::Who;
use super::workload::{Aim, Delivered, MEMORY_AIM, WRITING_MEMORY_AIM, Workload};

/// Two tables, what was left out, and where it was measured.
pub fn markdown(record: &Record, workloads: &[Workload]) -> String {
    let measured: Vec<&Workload> =
        workloads.iter().filter(|w| of(record, w.name, Who::Millpond).next().is_some()).collect();
    let mut text =
        format!("{}\n\n{}\n{}", origin(record), values(record, &measured), aims(record, &measured));
    for why in &record.left_out {
        text += &format!("\nLeft out: {why}.\n");
    }
    text
}

fn of<'a>(record: &'a Record, workload: &'a str, who: Who) -> impl Iterator<Item = &'a Sample> {
    record.samples.iter().filter(move |s| s.workload == workload && s.who == who.name())
}

fn origin(record: &Record) -> String {
    let machine = &record.machine;
    let mut text = format!(
        "Commit {}, {}. Linux {}, {} × {}, {:.0} GiB of memory, {} on {}",
        record.of_commit(),
        record.date.split('T').next().unwrap_or_default(),
        machine.kernel,
        machine.processors,
        machine.processor,
        machine.memory_bytes as f64 / f64::from(1 << 30),
        machine.cache_file_system,
        machine.cache_device
    );
    for (name, value) in &machine.page_reporting {
        text += &format!(", {name} {value}");
    }
    let versions: Vec<&str> =
        record.subjects.values().map(String::as_str).filter(|version| !version.is_empty()).collect();
    if !versions.is_empty() {
        text += &format!("; {}", versions.join(", "));
    }
    text += &format!(
        ". The store speaks {}. Medians of {} rounds ({} with peers), in brackets their extremes, then the processor time of those who serve.",
        record.store, record.size.rounds, record.size.peer_rounds
    );
    text
}

/// One row per workload: each subject's value and processor time, and what it cost Millpond.
fn values(record: &Record, measured: &[&Workload]) -> String {
    let is_there = |who: &Who| record.samples.iter().any(|s| s.who == who.name());
    let peers: Vec<Who> = Who::PEERS.into_iter().filter(is_there).collect();
    let mut text = String::from("| Workload | Millpond | Beside it |");
    for peer in &peers {
        text += &format!(" {} |", peer.name());
    }
    text += " Requests | Fetched | Peak memory MB (PSS) |\n|";
    text += &"---|".repeat(peers.len() + 6);
    text.push('\n');
    for w in measured {
        let cell = |who: Who| cell(&of(record, w.name, who).collect::<Vec<_>>());
        let ours: Vec<&Sample> = of(record, w.name, Who::Millpond).collect();
        let beside =
            Who::BASELINES.into_iter().filter_map(|who| Some(format!("{} {}", who.name(), cell(who)?)));
        let beside: Vec<String> = beside.collect();
        let or_dash = |text: String| if text.is_empty() { "–".to_owned() } else { text };
        text += &format!("| {} ({}) |", w.name, w.unit);
        text += &format!(" {} | {} |", cell(Who::Millpond).unwrap_or_default(), or_dash(beside.join("; ")));
        for &peer in &peers {
            text += &format!(" {} |", or_dash(cell(peer).unwrap_or_default()));
        }
        let peak = |f: fn(&Sample) -> u64| ours.iter().map(|s| f(s)).max().unwrap_or(0) as f64 / 1e6;
        let requests = Spread::of(ours.iter().map(|s| s.requests as f64));
        let requests = requests.map_or("–".to_owned(), |spread| format!("{:.0}", spread.median));
        text += &format!(
            " {requests} | {} | {:.0} ({:.0}) |\n",
            moved(w.delivers, &ours),
            peak(|s| s.memory),
            peak(|s| s.pss)
        );
    }
    text
}

/// "843 (811–1,049), 1.50 CPU-s/GiB"
fn cell(samples: &[&Sample]) -> Option<String> {
    let value = Spread::of(samples.iter().map(|s| s.value))?;
    let median =
        |f: fn(&Sample) -> f64| Spread::of(samples.iter().map(|s| f(s))).map(|spread| number(spread.median));
    let used = samples.iter().any(|s| s.cpu_s > 0.0);
    let cpu = match samples.first() {
        Some(_) if !used => None,
        Some(s) if s.files > 0 => median(Sample::cpu_per_file).map(|text| format!("{text} CPU-µs/file")),
        Some(s) if s.bytes > 0 => median(Sample::cpu_per_gib).map(|text| format!("{text} CPU-s/GiB")),
        _ => median(|s| s.cpu_s).map(|text| format!("{text} CPU-s")),
    };
    Some(cpu.map_or_else(|| value.text(), |cpu| format!("{}, {cpu}", value.text())))
}

/// What came from the store; of rows that write, what went there.
fn moved(delivers: Delivered, ours: &[&Sample]) -> String {
    let median = |f: fn(&Sample) -> u64| Spread::of(ours.iter().map(|s| f(s) as f64)).map(|s| s.median);
    let shown = |bytes: f64| match delivers.bytes {
        0 => format!("{:.1} MB", bytes / 1e6),
        delivered => format!("{:.2}×", bytes / delivered as f64),
    };
    match (median(|s| s.fetched_bytes), median(|s| s.sent_bytes)) {
        (Some(fetched), Some(sent)) if sent > 0.0 => format!("{}; sent {}", shown(fetched), shown(sent)),
        (Some(fetched), _) => shown(fetched),
        _ => "–".to_owned(),
    }
}

fn aims(record: &Record, measured: &[&Workload]) -> String {
    let mut text = String::from("| Workload | Aim | Measured | Met |\n|---|---|---|---|\n");
    for w in measured {
        for aim in &w.aims {
            let found = found(record, w, *aim);
            let is_met = |spread: Spread| match aim {
                Aim::Value(limit) if w.less_is_better => Some(spread.median <= *limit),
                Aim::Value(limit) | Aim::TimesAsGoodAs(_, limit) | Aim::TimesTheSlower(_, limit) => {
                    Some(spread.median >= *limit)
                }
                Aim::CpuPerGib(limit) | Aim::CpuPerFile(limit) | Aim::CpuTimesOf(_, limit) => {
                    Some(spread.median <= *limit)
                }
                Aim::Beside(_) => None,
            };
            text += &line(w.name, &words(w, *aim), found, found.and_then(is_met));
        }
    }
    for (name, writes, limit) in [
        ("peak memory in rows that read", false, MEMORY_AIM),
        ("peak memory in rows that write", true, WRITING_MEMORY_AIM),
    ] {
        let ours = record.samples.iter().filter(|s| s.who == Who::Millpond.name());
        let peak = ours.filter(|s| (s.sent_bytes > 0) == writes).map(|s| s.memory).max();
        if let Some(peak) = peak.map(|bytes| bytes as f64) {
            let spread = Spread { median: peak / 1e6, least: 0.0, most: 0.0, count: 1 };
            let aim = format!("agent and workers ≤ {:.0} MB", limit / 1e6);
            text += &line(name, &aim, Some(spread), Some(peak <= limit));
        }
    }
    text
}

fn line(name: &str, aim: &str, found: Option<Spread>, met: Option<bool>) -> String {
    let met = match met {
        Some(true) => "yes",
        Some(false) => "no",
        None => "–",
    };
    let found = found.map_or("not measured".to_owned(), |spread| spread.text());
    format!("| {name} | {aim} | {found} | {met} |\n")
}

fn words(w: &Workload, aim: Aim) -> String {
    match aim {
        Aim::Value(limit) => {
            format!("{} {} {}", if w.less_is_better { "≤" } else { "≥" }, number_of(limit), w.unit)
        }
        Aim::TimesAsGoodAs(who, limit) if w.less_is_better => {
            format!("≥ {} times as fast as {}", number_of(limit), who.name())
        }
        Aim::TimesTheSlower([a, b], limit) => {
            format!("≥ {} of the slower of {} and {}", number_of(limit), a.name(), b.name())
        }
        Aim::TimesAsGoodAs(who, limit) => format!("≥ {} of {}", number_of(limit), who.name()),
        Aim::Beside(who) => format!("of {}: no aim", who.name()),
        Aim::CpuPerGib(limit) => format!("≤ {} CPU-s per GiB", number_of(limit)),
        Aim::CpuPerFile(limit) => format!("≤ {} CPU-µs per file", number_of(limit)),
        Aim::CpuTimesOf(who, limit) => format!("CPU-s ≤ {} of {}", number_of(limit), who.name()),
    }
}

/// An aim as it was set: 0.9, 40, 6,500.
fn number_of(limit: f64) -> String {
    if limit >= 1000.0 { number(limit) } else { limit.to_string() }
}

/// What the aim speaks of, over the rounds. None: not measured.
fn found(record: &Record, w: &Workload, aim: Aim) -> Option<Spread> {
    let ours = || of(record, w.name, Who::Millpond);
    // Of one round, both: a noisy hour is noisy for both.
    let ratios_to = |who: Who, f: &dyn Fn(&Sample, &Sample) -> f64| {
        let pairs = ours().filter_map(|a| Some((a, of(record, w.name, who).find(|b| b.round == a.round)?)));
        pairs.map(|(a, b)| f(a, b)).collect::<Vec<f64>>()
    };
    let ratios = |f: &dyn Fn(&Sample, &Sample) -> f64| {
        aim.others().first().and_then(|who| Spread::of(ratios_to(*who, f)))
    };
    match aim {
        Aim::Value(_) => Spread::of(ours().map(|s| s.value)),
        Aim::CpuPerGib(_) => Spread::of(ours().map(Sample::cpu_per_gib)),
        Aim::CpuPerFile(_) => Spread::of(ours().map(Sample::cpu_per_file)),
        Aim::TimesAsGoodAs(..) | Aim::Beside(_) if w.less_is_better => ratios(&|a, b| b.value / a.value),
        Aim::TimesAsGoodAs(..) | Aim::Beside(_) => ratios(&|a, b| a.value / b.value),
        Aim::CpuTimesOf(..) => ratios(&|a, b| a.cpu_s / b.cpu_s),
        Aim::TimesTheSlower(others, _) => {
            let [one, other] = others.map(|who| ratios_to(who, &|a, b| a.value / b.value));
            // To the slower the ratio is larger. Where one was not measured, nobody knows which it is.
            let is_whole = !one.is_empty() && one.len() == other.len();
            is_whole.then(|| Spread::of(one.iter().zip(&other).map(|(a, b)| a.max(*b))))?
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::{record, samples, workload};
    use super::*;

    #[test]
    fn a_row_tells_values_processor_time_and_cost() {
        let mut record = record();
        record.samples = samples("w", "millpond", &[900.0, 1100.0, 1000.0]);
        record.samples.extend(samples("w", "curl", &[500.0, 500.0, 800.0]));
        record.samples.extend(samples("w", "s3fs", &[250.0]));
        let text = markdown(&record, &[workload("w", false), workload("never", false)]);
        let row = text.lines().find(|line| line.starts_with("| w (")).unwrap();
        assert_eq!(
            row,
            "| w (MB/s) | 1,000 (900–1,100), 0.50 CPU-s/GiB | curl 500 (500–800), 0.50 CPU-s/GiB \
             | 250, 0.50 CPU-s/GiB | 128 | 16.00× | 50 (60) |"
        );
        assert!(text.starts_with("Commit 3c5a2e8, 2026-11-22. Linux 6.18, 2 × some, 16 GiB"), "{text}");
        assert!(!text.contains("never"));
        let columns = |line: &str| line.matches('|').count();
        let table: Vec<&str> = text.lines().skip_while(|line| !line.starts_with('|')).take(3).collect();
        assert!(table.iter().all(|line| columns(line) == columns(table[0])), "{table:#?}");
    }

    #[test]
    fn ratios_are_those_of_each_round() {
        let mut record = record();
        record.samples = samples("w", "millpond", &[900.0, 1100.0, 1000.0]);
        // Of the medians it would be 2.
        record.samples.extend(samples("w", "curl", &[500.0, 500.0, 800.0]));
        let mut row = workload("w", false);
        row.aims = vec![
            Aim::TimesAsGoodAs(Who::Curl, 1.8),
            Aim::TimesAsGoodAs(Who::Curl, 1.9),
            Aim::TimesAsGoodAs(Who::EightCurls, 0.7),
            Aim::CpuPerGib(0.4),
            Aim::CpuTimesOf(Who::Curl, 1.0),
            Aim::Beside(Who::Curl),
        ];
        let text = aims(&record, &[&row]);
        let rows: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(
            rows,
            [
                "| w | ≥ 1.8 of curl | 1.80 (1.25–2.20) | yes |",
                "| w | ≥ 1.9 of curl | 1.80 (1.25–2.20) | no |",
                "| w | ≥ 0.7 of 8 curls | not measured | – |",
                "| w | ≤ 0.4 CPU-s per GiB | 0.50 (0.50–0.50) | no |",
                "| w | CPU-s ≤ 1 of curl | 1.00 (1.00–1.00) | yes |",
                "| w | of curl: no aim | 1.80 (1.25–2.20) | – |",
                "| peak memory in rows that read | agent and workers ≤ 170 MB | 50.0 | yes |",
            ]
        );
    }

    #[test]
    fn rows_that_write_tell_what_they_sent_and_are_judged_by_the_slower_of_two() {
        let mut record = record();
        record.samples = samples("w", "millpond", &[100.0, 300.0]);
        record.samples.iter_mut().for_each(|s| (s.fetched_bytes, s.sent_bytes) = (0, 3 << 29));
        record.samples.extend(samples("w", "native", &[200.0, 300.0]));
        let mut row = workload("w", false);
        row.delivers.bytes = 1 << 30;
        row.aims = vec![Aim::TimesTheSlower([Who::Native, Who::EightUploads], 0.87)];
        let text = markdown(&record, &[row.clone()]);
        assert!(text.contains("| 128 | 0.00×; sent 1.50× |"), "{text}");
        let aim = "| w | ≥ 0.87 of the slower of native and 8 uploads |";
        assert!(text.contains(&format!("{aim} not measured | – |")), "{text}");
        assert!(
            text.contains("| peak memory in rows that write | agent and workers ≤ 256 MB | 50.0 | yes |")
        );
        record.samples.extend(samples("w", "8 uploads", &[400.0, 150.0]));
        let text = markdown(&record, &[row]);
        assert!(text.contains(&format!("{aim} 1.25 (0.50–2.00) | yes |")), "{text}");
    }

    #[test]
    fn where_less_is_better_a_ratio_is_the_other_way_round() {
        let mut record = record();
        record.samples = samples("s", "millpond", &[0.5]);
        record.samples.extend(samples("s", "curl", &[25.0]));
        let mut row = workload("s", true);
        row.aims = vec![Aim::TimesAsGoodAs(Who::Curl, 40.0), Aim::Value(0.4)];
        let text = aims(&record, &[&row]);
        assert!(text.contains("| s | ≥ 40 times as fast as curl | 50.0 | yes |"), "{text}");
        assert!(text.contains("| s | ≤ 0.4 s | 0.50 | no |"), "{text}");
    }
}
