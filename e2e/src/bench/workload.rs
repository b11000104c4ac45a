//! The rows: what is measured, in which unit, and what Millpond aims at.

use super::who::Who;
use serde::{Deserialize, Serialize};

/// How much of everything.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Size {
    pub file_bytes: u64,
    pub files: usize,
    pub objects: usize,
    pub model_bytes: u64,
    /// The object of which only the first bytes are read.
    pub huge_bytes: u64,
    pub rounds: usize,
    /// Peers are slow, and not what is being developed: in how many of the rounds they take part. One that an aim names
    /// takes part in every round of that row.
    pub peer_rounds: usize,
    /// How long random reads go on.
    pub random_ms: u64,
}

impl Size {
    /// `scale` 1 is the table of the documentation; smaller is for a quick look.
    pub fn scaled(scale: f64, rounds: usize, peer_rounds: usize) -> Self {
        let of = |full: f64, least: f64| (full * scale).max(least);
        Self {
            file_bytes: of(2_147_483_648.0, 67_108_864.0) as u64 & !4095,
            files: of(20_000.0, 200.0) as usize,
            objects: of(100_000.0, 1000.0) as usize,
            model_bytes: of(1e9, 16e6) as u64,
            huge_bytes: 10 << 30,
            rounds,
            peer_rounds,
            random_ms: of(2000.0, 500.0) as u64,
        }
    }

    /// What the other one has otherwise: name, here, there.
    pub(super) fn differences(&self, other: &Self) -> Vec<(&'static str, u64, u64)> {
        let numbers = |size: &Self| {
            [
                ("file_bytes", size.file_bytes),
                ("files", size.files as u64),
                ("objects", size.objects as u64),
                ("model_bytes", size.model_bytes),
                ("huge_bytes", size.huge_bytes),
                ("rounds", size.rounds as u64),
                ("peer_rounds", size.peer_rounds as u64),
                ("random_ms", size.random_ms),
            ]
        };
        let pairs = numbers(self).into_iter().zip(numbers(other));
        pairs.filter(|(a, b)| a != b).map(|((name, a), (_, b))| (name, a, b)).collect()
    }
}

/// The long-distance link of the table: round trip and bandwidth per connection.
pub(super) const RTT_MS: u64 = 20;
pub(super) const MEGABYTES_PER_S: u64 = 100;

/// Of each small file.
pub(super) const FILE_BYTES: u64 = 100_000;

/// What one run delivers to the application; 0 where that says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Delivered {
    pub bytes: u64,
    pub files: u64,
}

/// What a row's numbers mean.
#[derive(Clone, Debug)]
pub struct Workload {
    pub name: &'static str,
    pub unit: &'static str,
    pub less_is_better: bool,
    pub delivers: Delivered,
    pub aims: Vec<Aim>,
}

/// What Millpond aims at. Ratios are those of each round; their median counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aim {
    Value(f64),
    /// So many times as good as this subject.
    TimesAsGoodAs(Who, f64),
    /// The same without an aim: what the number beside it says.
    Beside(Who),
    /// Processor seconds per GiB, at most.
    CpuPerGib(f64),
    /// Processor microseconds per file, at most.
    CpuPerFile(f64),
    /// Processor time, at most so many times that of this subject.
    CpuTimesOf(Who, f64),
}

impl Aim {
    pub(super) fn other(self) -> Option<Who> {
        match self {
            Self::TimesAsGoodAs(who, _) | Self::Beside(who) | Self::CpuTimesOf(who, _) => Some(who),
            Self::Value(_) | Self::CpuPerGib(_) | Self::CpuPerFile(_) => None,
        }
    }
}

pub(super) const COLD: &str = "sequential cold, loopback";
pub(super) const COLD_FAR: &str = "sequential cold, 20 ms link";
pub(super) const COLD_FAR_TLS: &str = "sequential cold, 20 ms link, https";
pub(super) const WARM: &str = "sequential warm";
pub(super) const RANDOM_KEPT: [(&str, usize); 2] =
    [("random 4 KiB, kept, 1 thread", 1), ("random 4 KiB, kept, 8 threads", 8)];
pub(super) const RANDOM_DROPPED: [(&str, usize); 2] =
    [("random 4 KiB, dropped, 1 thread", 1), ("random 4 KiB, dropped, 8 threads", 8)];
pub(super) const READERS: &str = "8 readers of one cold file";
pub(super) const SMALL_KEPT: [(&str, usize); 2] =
    [("small files, kept, 1 thread", 1), ("small files, kept, 4 threads", 4)];
pub(super) const SMALL_DROPPED: [(&str, usize); 2] =
    [("small files, dropped, 1 thread", 1), ("small files, dropped, 4 threads", 4)];
pub(super) const SMALL_COLD: (&str, usize) = ("small files, cold, loopback, 4 threads", 4);
pub(super) const SMALL_COLD_FAR: [(&str, usize); 2] =
    [("small files, cold, 20 ms link, 1 thread", 1), ("small files, cold, 20 ms link, 4 threads", 4)];
pub(super) const LIST_COLD: &str = "ls -lR, cold";
pub(super) const LIST_WARM: &str = "ls -lR, warm";
pub(super) const MODEL: &str = "safetensors model, 33 MB/s link: second load";
pub(super) const FIRST_BYTE: &str = "first byte of 10 GiB, after open";
pub(super) const FIRST_OPEN: &str = "first byte of 10 GiB, with open";
pub(super) const PUBLISH: &str = "publish of a known source, alone";
pub(super) const PUBLISH_MANY: &str = "publish of a known source, 20 at once";

/// Rows that are measured with each kind of store. What the others tell is the same with all of them: the way back from the
/// cache, or a link.
pub(super) const WITH_EACH_STORE: [&str; 2] = [COLD, SMALL_COLD.0];

/// Peak memory of agent and workers in any row, bytes, at most.
pub(super) const MEMORY_AIM: f64 = 170e6;

/// Every row, in the order of the table.
pub fn workloads(size: Size) -> Vec<Workload> {
    use Aim::{Beside, CpuPerFile, CpuPerGib, CpuTimesOf, TimesAsGoodAs, Value};
    let more = |name, unit, delivers, aims: &[Aim]| Workload {
        name,
        unit,
        less_is_better: false,
        delivers,
        aims: aims.to_vec(),
    };
    let less = |name, unit, aims: &[Aim]| Workload {
        name,
        unit,
        less_is_better: true,
        delivers: Delivered::default(),
        aims: aims.to_vec(),
    };
    let nothing = Delivered::default();
    let file = Delivered { bytes: size.file_bytes, files: 0 };
    let files = Delivered { bytes: size.files as u64 * FILE_BYTES, files: size.files as u64 };
    let of_native = |least| [TimesAsGoodAs(Who::Native, least)];
    let of_cache_file = |least| [TimesAsGoodAs(Who::CacheFile, least), Beside(Who::Passthrough)];
    vec![
        more(
            COLD,
            "MB/s",
            file,
            &[
                CpuPerGib(1.0),
                CpuTimesOf(Who::S3fs, 0.3),
                TimesAsGoodAs(Who::Curl, 1.8),
                TimesAsGoodAs(Who::EightCurls, 0.7),
            ],
        ),
        more(COLD_FAR, "MB/s", file, &[TimesAsGoodAs(Who::ManyCurls, 0.9)]),
        more(COLD_FAR_TLS, "MB/s", file, &[TimesAsGoodAs(Who::ManyCurls, 0.9)]),
        more(WARM, "MB/s", file, &of_native(0.9)),
        more(RANDOM_KEPT[0].0, "reads/s", nothing, &of_cache_file(0.9)),
        more(RANDOM_KEPT[1].0, "reads/s", nothing, &of_cache_file(0.85)),
        more(RANDOM_DROPPED[0].0, "reads/s", nothing, &of_native(0.9)),
        more(RANDOM_DROPPED[1].0, "reads/s", nothing, &of_native(0.9)),
        more(READERS, "MB/s", file, &[Value(6500.0)]),
        more(SMALL_KEPT[0].0, "files/s", files, &of_native(0.7)),
        more(SMALL_KEPT[1].0, "files/s", files, &of_native(0.7)),
        more(SMALL_DROPPED[0].0, "files/s", files, &of_native(0.7)),
        more(SMALL_DROPPED[1].0, "files/s", files, &of_native(0.7)),
        more(SMALL_COLD.0, "files/s", files, &[CpuPerFile(230.0), Beside(Who::Curl)]),
        more(SMALL_COLD_FAR[0].0, "files/s", files, &[Value(600.0)]),
        more(SMALL_COLD_FAR[1].0, "files/s", files, &[Value(2000.0)]),
        less(LIST_COLD, "s", &[Value(1.5)]),
        less(LIST_WARM, "s", &[Value(0.3)]),
        less(MODEL, "s", &[TimesAsGoodAs(Who::Curl, 40.0)]),
        less(FIRST_BYTE, "ms", &[Value(3.0)]),
        less(FIRST_OPEN, "ms", &[]),
        less(PUBLISH, "ms", &[Value(10.0)]),
        less(PUBLISH_MANY, "ms", &[Value(60.0)]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_rows_have_one_name() {
        let rows = workloads(Size::scaled(1.0, 5, 1));
        let mut names: Vec<_> = rows.iter().map(|row| row.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), rows.len());
    }

    #[test]
    fn a_small_scale_keeps_what_rows_need() {
        let size = Size::scaled(0.0, 1, 0);
        assert_eq!(size.file_bytes % 4096, 0);
        assert!(
            size.files >= 200 && size.objects >= 1000 && size.model_bytes > 1_000_000 && size.random_ms > 0
        );
    }
}
