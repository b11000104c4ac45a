//! Made-up records for tests.

use super::machine::Machine;
use super::record::{Record, Sample};
use super::workload::{Size, Workload, workloads};
use crate::node::Protocol;

pub(super) fn workload(name: &'static str, less_is_better: bool) -> Workload {
    let mut one = workloads(Size::scaled(0.0, 1, 0)).remove(0);
    (one.name, one.less_is_better, one.unit) =
        (name, less_is_better, if less_is_better { "s" } else { "MB/s" });
    one
}

/// Of two rows, "w" and the less the better "s", without samples.
pub(super) fn record() -> Record {
    let machine = Machine {
        kernel: "6.18".into(),
        processor: "some".into(),
        processors: 2,
        memory_bytes: 1 << 34,
        cache_file_system: "ext4".into(),
        cache_device: "vda".into(),
        page_reporting: [("page_reporting_order".to_owned(), "11".to_owned())].into(),
    };
    let rows = [workload("w", false), workload("s", true)];
    let mut record = Record::begin(machine, Size::scaled(1.0, 3, 1), Protocol::S3, &rows);
    (record.commit, record.modified, record.date) = ("3c5a2e8".into(), false, "2026-11-22T10:00:00Z".into());
    record
}

pub(super) fn sample(workload: &str, who: &str, round: usize, value: f64) -> Sample {
    Sample {
        workload: workload.into(),
        who: who.into(),
        round,
        value,
        cpu_s: 0.5,
        bytes: 1 << 30,
        files: 0,
        fetched_bytes: 1 << 30,
        sent_bytes: 0,
        requests: 128,
        memory: 50_000_000,
        pss: 60_000_000,
    }
}

/// The values of each round.
pub(super) fn samples(workload: &str, who: &str, values: &[f64]) -> Vec<Sample> {
    values.iter().enumerate().map(|(round, value)| sample(workload, who, round, *value)).collect()
}
