//! How results are shown: tables for people, JSON for programs.

use anyhow::Result;
use clap::ValueEnum;
use comfy_table::{ContentArrangement, Table, presets};
use std::fmt::Display;
use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    #[default]
    Table,
    Json,
}

/// The reader of standard output has gone.
#[derive(Debug, thiserror::Error)]
#[error("standard output is closed")]
pub(crate) struct Closed;

/// A line on standard output.
pub(crate) fn print(line: impl Display) -> Result<()> {
    writeln!(io::stdout(), "{line}").map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Closed.into(),
        _ => anyhow::Error::new(error).context("standard output"),
    })
}

/// A remark on standard error, which may be closed.
pub(crate) fn remark(line: impl Display) {
    startup::log::say(&line.to_string());
}

pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(header.iter().copied());
    table
}

/// 1,536 → "1.5 KiB".
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit < UNITS.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// "3m 20s ago".
pub(crate) fn ago(ms: i64) -> String {
    let then = UNIX_EPOCH + Duration::from_millis(ms.max(0) as u64);
    let age = SystemTime::now().duration_since(then).unwrap_or_default();
    format!("{} ago", humantime::format_duration(Duration::from_secs(age.as_secs())))
}

pub(crate) fn print_json(value: &serde_json::Value) -> Result<()> {
    print(serde_json::to_string_pretty(value)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16384.0 PiB");
    }
}
