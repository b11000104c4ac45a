//! The record of one run, as JSON: on which machine, of which commit, and every measurement.

use super::machine::Machine;
use super::workload::{Size, Workload};
use crate::node::Protocol;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Raised whenever a program could misread what a later one wrote. 2 names the store.
const FORMAT: u64 = 2;
/// The earliest that is read: its records are all of S3.
const FORMAT_MIN: u64 = 1;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    pub format: u64,
    /// Abbreviated; "unknown" outside a checkout.
    pub commit: String,
    /// There were changes that are in no commit.
    pub modified: bool,
    /// RFC 3339, UTC: when the run began.
    pub date: String,
    pub machine: Machine,
    pub size: Size,
    /// What the store spoke.
    #[serde(default)]
    pub store: Protocol,
    /// Who was measured → the version of that program; empty where there is none.
    pub subjects: BTreeMap<String, String>,
    /// What could not be measured, and why.
    pub left_out: Vec<String>,
    /// Name of each row → what its numbers mean.
    pub rows: BTreeMap<String, Row>,
    pub samples: Vec<Sample>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub unit: String,
    pub less_is_better: bool,
}

/// One workload by one subject in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    pub workload: String,
    pub who: String,
    pub round: usize,
    /// In the row's unit.
    #[serde(deserialize_with = "or_nan")]
    pub value: f64,
    /// Processor seconds of those who serve: agent and workers, a peer, the programs of a baseline.
    #[serde(deserialize_with = "or_nan")]
    pub cpu_s: f64,
    /// Delivered to the application; 0 where that says nothing.
    pub bytes: u64,
    pub files: u64,
    /// Of object bodies, by the server.
    pub fetched_bytes: u64,
    /// Of object bodies and parts, to the server. Records of before had no row that sends any.
    #[serde(default)]
    pub sent_bytes: u64,
    pub requests: u64,
    /// Peak of anonymous plus unevictable memory of those who serve, bytes.
    pub memory: u64,
    /// PSS at that moment.
    pub pss: u64,
}

impl Sample {
    pub(super) fn cpu_per_gib(&self) -> f64 {
        self.cpu_s / (self.bytes as f64 / f64::from(1 << 30))
    }
    /// Microseconds.
    pub(super) fn cpu_per_file(&self) -> f64 {
        self.cpu_s * 1e6 / self.files as f64
    }
}

/// JSON has no NaN: it is written as null.
fn or_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

impl Record {
    pub(super) fn begin(machine: Machine, size: Size, store: Protocol, workloads: &[Workload]) -> Self {
        let (commit, modified) = commit();
        let row = |w: &Workload| {
            let row = Row { unit: w.unit.to_owned(), less_is_better: w.less_is_better };
            (w.name.to_owned(), row)
        };
        Self {
            format: FORMAT,
            commit,
            modified,
            date: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
            machine,
            size,
            store,
            subjects: BTreeMap::new(),
            left_out: Vec::new(),
            rows: workloads.iter().map(row).collect(),
            samples: Vec::new(),
        }
    }

    /// By rename: a run that is cut leaves the record as it was after one of its samples.
    pub fn write(&self, to: &Path) -> Result<()> {
        replace(to, &serde_json::to_string_pretty(self)?)
    }

    pub fn read(from: &Path) -> Result<Self> {
        let bytes = std::fs::read(from).with_context(|| format!("read {}", from.display()))?;
        Self::parse(&bytes).with_context(|| from.display().to_string())
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        const AGAIN: &str = "measure that commit again with this program (make bench)";
        let value: serde_json::Value = serde_json::from_slice(bytes).context(
            "this is no whole JSON text: was it cut? Name a file that `bench run --json` has written",
        )?;
        if value.as_array().is_some_and(|list| list.iter().all(|sample| sample.get("workload").is_some())) {
            bail!("this is a list of samples, as bench wrote it before its records had a format: {AGAIN}");
        }
        match value.get("format").and_then(serde_json::Value::as_u64) {
            None => {
                bail!("this is no record of a benchmark: name a file that `bench run --json` has written")
            }
            Some(FORMAT_MIN..=FORMAT) => {}
            Some(other) if other > FORMAT => {
                bail!(
                    "this record has format {other}, and this program reads {FORMAT}: use the later program"
                )
            }
            Some(other) => bail!("this record has format {other}, and this program reads {FORMAT}: {AGAIN}"),
        }
        serde_json::from_value(value).context("this record lacks what its format asks for: was it edited?")
    }

    /// "3c5a2e8", or "3c5a2e8 with changes".
    pub fn of_commit(&self) -> String {
        format!("{}{}", self.commit, if self.modified { " with changes" } else { "" })
    }
}

/// Writes a file whole or not at all.
pub fn replace(path: &Path, text: &str) -> Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = Path::new(&new);
    std::fs::write(new, text).with_context(|| format!("write {}", new.display()))?;
    std::fs::rename(new, path).with_context(|| format!("write {}", path.display()))
}

fn commit() -> (String, bool) {
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=7", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    // The list of long runs is not what is measured, and scripts/long-run writes it.
    let changes =
        git(&["status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top).ci/long-runs"]);
    (commit, changes.is_some_and(|changes| !changes.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bench.json");
        let mut record = example::record();
        record.samples.push(example::sample("w", "millpond", 0, f64::NAN));
        record.write(&path).unwrap();
        record.write(&path).unwrap();
        let back = Record::read(&path).unwrap();
        assert!(back.samples[0].value.is_nan());
        assert_eq!((back.size, back.machine), (record.size, record.machine));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn a_record_of_the_format_before_is_one_of_s3() {
        let mut value = serde_json::to_value(example::record()).unwrap();
        value["format"] = 1.into();
        value.as_object_mut().unwrap().remove("store").unwrap();
        let back = Record::parse(value.to_string().as_bytes()).unwrap();
        assert_eq!(back.store, Protocol::S3);
    }

    #[test]
    fn what_is_no_record_is_refused_with_what_to_do() {
        let whole = serde_json::to_string(&example::record()).unwrap();
        let error = |text: &str| format!("{:#}", Record::parse(text.as_bytes()).unwrap_err());
        let binary = Record::parse(b"\x7fELF\xff\x00").unwrap_err();
        assert!(format!("{binary:#}").contains("bench run --json"));
        assert!(error(&whole[..whole.len() / 2]).contains("was it cut?"));
        assert!(error("[{\"workload\": \"w\", \"who\": \"native\"}]").contains("make bench"));
        assert!(error("{\"steps\": []}").contains("no record of a benchmark"));
        assert!(error(&whole.replace("\"format\":2", "\"format\":3")).contains("use the later program"));
        assert!(error(&whole.replace("\"format\":2", "\"format\":0")).contains("measure that commit again"));
        assert!(error(&whole.replace("\"machine\"", "\"machines\"")).contains("was it edited?"));
        let error = format!("{:#}", Record::read(Path::new("/no/such/file")).unwrap_err());
        assert!(error.contains("/no/such/file"), "{error}");
    }
}
