//! Two records beside each other: which rows moved beyond their spread.

use super::numbers::{Spread, number};
use super::record::{Record, Sample};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// What is said of one measure of one row of one subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Faster,
    Slower,
    /// Of processor time.
    Less,
    More,
    WithinSpread,
    /// One of the two was measured in one round: nobody knows its spread.
    OneRound,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::Less => "less",
            Self::More => "more",
            Self::WithinSpread => "within spread",
            Self::OneRound => "one round",
        }
    }

    /// Moved: each median lies outside the other's extremes.
    fn of(a: Spread, b: Spread, less_is_better: bool, better: Self, worse: Self) -> Self {
        if a.count < 2 || b.count < 2 {
            Self::OneRound
        } else if a.contains(b.median) || b.contains(a.median) {
            Self::WithinSpread
        } else if (b.median < a.median) == less_is_better {
            better
        } else {
            worse
        }
    }
}

/// What differs between the two, then a line for each row and subject that both have.
pub fn compare(a: &Record, b: &Record) -> String {
    let mut text = format!("A: {}, {}\nB: {}, {}\n", a.of_commit(), a.date, b.of_commit(), b.date);
    for (name, here, there) in a.machine.differences(&b.machine) {
        line(&mut text, format_args!("machines differ: {name}: {here} / {there}"));
    }
    for who in a.subjects.keys().filter(|who| b.subjects.contains_key(*who)) {
        let (here, there) = (&a.subjects[who], &b.subjects[who]);
        if here != there {
            line(&mut text, format_args!("versions differ: {here} / {there}"));
        }
    }
    for (name, here, there) in a.size.differences(&b.size) {
        line(&mut text, format_args!("sizes differ: {name}: {here} / {there}"));
    }
    if a.store != b.store {
        line(&mut text, format_args!("stores differ: {} / {}", a.store, b.store));
    }
    let (of_a, of_b) = (rows(a), rows(b));
    for (which, only) in [("A", of_a.difference(&of_b)), ("B", of_b.difference(&of_a))] {
        for (workload, who) in only {
            line(&mut text, format_args!("only in {which}: {workload}, {who}"));
        }
    }
    text += "\n| Row | Subject | Of | A | B | B/A | |\n|---|---|---|---|---|---|---|\n";
    for key in of_a.intersection(&of_b) {
        row(&mut text, a, b, key);
    }
    text
}

fn line(text: &mut String, what: std::fmt::Arguments<'_>) {
    writeln!(text, "{what}").expect("a String takes everything");
}

type Key = (String, String);

fn rows(record: &Record) -> BTreeSet<Key> {
    record.samples.iter().map(|s| (s.workload.clone(), s.who.clone())).collect()
}

fn row(text: &mut String, a: &Record, b: &Record, key: &Key) {
    let (Some(here), Some(there)) = (a.rows.get(&key.0), b.rows.get(&key.0)) else {
        return line(
            text,
            format_args!("| {} | {} | the records do not say what it is | | | | |", key.0, key.1),
        );
    };
    if here != there {
        let (here, there) = (&here.unit, &there.unit);
        return line(
            text,
            format_args!("| {} | {} | {here} / {there}: no comparison | | | | |", key.0, key.1),
        );
    }
    let spread = |record: &Record, f: fn(&Sample) -> f64| {
        let samples = record.samples.iter().filter(|s| (&s.workload, &s.who) == (&key.0, &key.1));
        Spread::of(samples.map(f))
    };
    let mut measure = |of: &str, f: fn(&Sample) -> f64, verdict: &dyn Fn(Spread, Spread) -> Verdict| {
        let (a, b) = (spread(a, f), spread(b, f));
        let shown = |spread: Option<Spread>| spread.map_or("–".to_owned(), |spread| spread.text());
        let (ratio, said) = match (a, b) {
            (Some(a), Some(b)) => (number(b.median / a.median), verdict(a, b).word()),
            _ => ("–".to_owned(), "no number"),
        };
        let (a, b) = (shown(a), shown(b));
        line(text, format_args!("| {} | {} | {of} | {a} | {b} | {ratio} | {said} |", key.0, key.1));
    };
    measure(&here.unit, |s| s.value, &|a, b| {
        Verdict::of(a, b, here.less_is_better, Verdict::Faster, Verdict::Slower)
    });
    let uses_processors = |record: &Record| spread(record, |s| s.cpu_s).is_some_and(|cpu| cpu.most > 0.0);
    if uses_processors(a) && uses_processors(b) {
        measure("CPU-s", |s| s.cpu_s, &|a, b| Verdict::of(a, b, true, Verdict::Less, Verdict::More));
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::{record, samples};
    use super::*;
    use crate::node::Protocol;

    fn with(workload: &str, who: &str, values: &[f64]) -> Record {
        let mut record = record();
        record.samples = samples(workload, who, values);
        record
    }

    /// The line of a row's value.
    fn said(a: &Record, b: &Record) -> String {
        let text = compare(a, b);
        text.lines()
            .find(|line| line.contains("| MB/s |") || line.contains("| s |"))
            .unwrap_or_default()
            .to_owned()
    }

    #[test]
    fn a_row_moved_when_each_median_is_outside_the_extremes_of_the_other() {
        let a = with("w", "millpond", &[100.0, 110.0, 120.0]);
        let b = with("w", "millpond", &[200.0, 220.0, 210.0]);
        assert_eq!(said(&a, &b), "| w | millpond | MB/s | 110 (100–120) | 210 (200–220) | 1.91 | faster |");
        assert!(said(&b, &a).ends_with("| 0.52 | slower |"));
        // The extremes overlap, and yet no median is among the other's.
        let b = with("w", "millpond", &[115.0, 125.0, 130.0]);
        assert!(said(&a, &b).ends_with("| faster |"));
    }

    #[test]
    fn within_the_spread_nothing_is_said_to_have_moved() {
        let a = with("w", "millpond", &[100.0, 110.0, 120.0]);
        for b in [&[100.0, 118.0, 300.0], &[105.0, 130.0, 140.0], &[100.0, 110.0, 120.0]] {
            assert!(said(&a, &with("w", "millpond", b)).ends_with("| within spread |"), "{b:?}");
        }
    }

    #[test]
    fn where_less_is_better_less_is_faster() {
        let a = with("s", "millpond", &[10.0, 11.0, 12.0]);
        let b = with("s", "millpond", &[5.0, 6.0, 7.0]);
        assert!(said(&a, &b).ends_with("| 0.55 | faster |"));
        assert!(said(&b, &a).ends_with("| 1.83 | slower |"));
    }

    #[test]
    fn one_round_has_no_spread_and_no_verdict() {
        let a = with("w", "millpond", &[100.0]);
        let b = with("w", "millpond", &[200.0, 220.0, 210.0]);
        assert!(said(&a, &b).ends_with("| 100 | 210 (200–220) | 2.10 | one round |"));
        assert!(said(&b, &a).ends_with("| one round |"));
    }

    #[test]
    fn what_only_one_has_is_named() {
        let mut a = with("w", "millpond", &[1.0, 2.0]);
        let b = with("w", "s3fs", &[1.0, 2.0]);
        a.samples.extend(samples("s", "native", &[1.0]));
        let text = compare(&a, &b);
        for wanted in ["only in A: w, millpond", "only in A: s, native", "only in B: w, s3fs"] {
            assert!(text.contains(wanted), "{text}");
        }
        assert_eq!(said(&a, &b), "");
    }

    #[test]
    fn values_that_are_none_or_zero_make_no_ratio_and_no_panic() {
        let zero = with("w", "millpond", &[0.0, 0.0]);
        let some = with("w", "millpond", &[1.0, 2.0]);
        let none = with("w", "millpond", &[f64::NAN, f64::NAN]);
        assert!(said(&zero, &some).ends_with("| – | faster |"));
        assert!(said(&some, &zero).ends_with("| 0.00 | slower |"));
        assert!(said(&zero, &zero).ends_with("| – | within spread |"));
        assert!(said(&none, &some).ends_with("| – | 1.50 (1.00–2.00) | – | no number |"));
        let part = with("w", "millpond", &[f64::NAN, 3.0]);
        assert!(said(&part, &some).ends_with("| one round |"));
    }

    #[test]
    fn processor_time_is_compared_too() {
        let (a, mut b) = (with("w", "millpond", &[1.0, 1.0]), with("w", "millpond", &[1.0, 1.0]));
        b.samples.iter_mut().for_each(|s| s.cpu_s = 0.25);
        let text = compare(&a, &b);
        let wanted = "| w | millpond | CPU-s | 0.50 (0.50–0.50) | 0.25 (0.25–0.25) | 0.50 | less |";
        assert!(text.contains(wanted), "{text}");
        assert!(compare(&b, &a).contains("| 2.00 | more |"));
        b.samples.iter_mut().for_each(|s| s.cpu_s = 0.0);
        assert!(!compare(&a, &b).contains("CPU-s"));
    }

    #[test]
    fn other_machines_sizes_versions_and_units_are_said() {
        let (mut a, mut b) = (with("w", "millpond", &[1.0, 1.0]), with("w", "millpond", &[1.0, 1.0]));
        assert!(!compare(&a, &b).contains("differ"));
        b.machine.processors = 64;
        b.size.files /= 2;
        b.store = Protocol::Gcs;
        a.subjects.insert("s3fs".into(), "s3fs 1.90".into());
        b.subjects.insert("s3fs".into(), "s3fs 1.95".into());
        b.rows.get_mut("w").unwrap().unit = "GB/s".into();
        let text = compare(&a, &b);
        for wanted in [
            "machines differ: processors: 2 / 64",
            "sizes differ: files: 20000 / 10000",
            "stores differ: s3 / gcs",
            "versions differ: s3fs 1.90 / s3fs 1.95",
            "MB/s / GB/s: no comparison",
        ] {
            assert!(text.contains(wanted), "{text}");
        }
    }
}
