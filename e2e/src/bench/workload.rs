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
    /// How long random reads go on, and saves.
    pub random_ms: u64,
    /// Of a checkpoint.
    #[serde(default)]
    pub checkpoint_bytes: u64,
    /// Small files that are written.
    #[serde(default)]
    pub saved_files: usize,
    /// The file that is overwritten at random, and how often before its one fsync.
    #[serde(default)]
    pub overwritten_bytes: u64,
    #[serde(default)]
    pub overwrites: u64,
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
            checkpoint_bytes: of(4_294_967_296.0, 67_108_864.0) as u64 & !0xf_ffff,
            saved_files: of(2000.0, 50.0) as usize,
            overwritten_bytes: of(1_073_741_824.0, 33_554_432.0) as u64 & !0xf_ffff,
            overwrites: of(16_384.0, 256.0) as u64,
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
                ("checkpoint_bytes", size.checkpoint_bytes),
                ("saved_files", size.saved_files as u64),
                ("overwritten_bytes", size.overwritten_bytes),
                ("overwrites", size.overwrites),
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
    /// The same of that one of the two which is slower in the round. Where more is better.
    TimesTheSlower([Who; 2], f64),
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
    pub(super) fn others(self) -> Vec<Who> {
        match self {
            Self::TimesAsGoodAs(who, _) | Self::Beside(who) | Self::CpuTimesOf(who, _) => vec![who],
            Self::TimesTheSlower(both, _) => both.to_vec(),
            Self::Value(_) | Self::CpuPerGib(_) | Self::CpuPerFile(_) => Vec::new(),
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

/// When a program that writes is answered: the parameter `writeMode` of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Back,
    Through,
}

impl Mode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Back => "back",
            Self::Through => "through",
        }
    }

    /// Does this peer answer at the same moment? s3fs and mount-s3 when the store has the file, rclone when its cache has.
    pub(super) fn is_of(self, who: Who) -> bool {
        match who {
            Who::Rclone => self == Self::Back,
            Who::S3fs | Who::MountS3 => self == Self::Through,
            _ => true,
        }
    }
}

/// A checkpoint, over one link and with one mode of writing: the row of what its writer waits for, that of when the store has
/// it where the writer does not wait for that, and that of its bytes read again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checkpoint {
    pub(super) mode: Mode,
    pub(super) is_far: bool,
    pub(super) written: &'static str,
    pub(super) stored: Option<&'static str>,
    pub(super) read: Option<&'static str>,
}

pub(super) const CHECKPOINTS: [Checkpoint; 4] = [
    Checkpoint {
        mode: Mode::Back,
        is_far: false,
        written: "checkpoint, back",
        stored: Some("checkpoint, back, until the store has it"),
        read: Some("checkpoint, back, read again"),
    },
    Checkpoint {
        mode: Mode::Through,
        is_far: false,
        written: "checkpoint, through",
        stored: None,
        read: Some("checkpoint, through, read again"),
    },
    Checkpoint {
        mode: Mode::Back,
        is_far: true,
        written: "checkpoint, back, 20 ms link",
        stored: Some("checkpoint, back, 20 ms link, until the store has it"),
        read: None,
    },
    Checkpoint {
        mode: Mode::Through,
        is_far: true,
        written: "checkpoint, through, 20 ms link",
        stored: None,
        read: None,
    },
];

/// Many small files: name, mode of writing, threads, an fsync for each.
pub(super) type SmallOut = (&'static str, Mode, usize, bool);

/// Name, mode of writing, whether the store is far away.
pub(super) const SAVES: [(&str, Mode, bool); 4] = [
    ("save 8 KiB, back", Mode::Back, false),
    ("save 8 KiB, through", Mode::Through, false),
    ("save 8 KiB, back, 20 ms link", Mode::Back, true),
    ("save 8 KiB, through, 20 ms link", Mode::Through, true),
];
pub(super) const SMALL_OUT: [SmallOut; 8] = [
    ("small files out, back, 1 thread", Mode::Back, 1, false),
    ("small files out, back, 4 threads", Mode::Back, 4, false),
    ("small files out, back, fsync, 1 thread", Mode::Back, 1, true),
    ("small files out, back, fsync, 4 threads", Mode::Back, 4, true),
    ("small files out, through, 1 thread", Mode::Through, 1, false),
    ("small files out, through, 4 threads", Mode::Through, 4, false),
    ("small files out, through, fsync, 1 thread", Mode::Through, 1, true),
    ("small files out, through, fsync, 4 threads", Mode::Through, 4, true),
];
/// Name, mode of writing, an fsync for each.
pub(super) const OVERWRITES: [(&str, Mode, bool); 3] = [
    ("overwrite 4 KiB at random, back, one fsync", Mode::Back, false),
    ("overwrite 4 KiB at random, back, fsync each", Mode::Back, true),
    ("overwrite 4 KiB at random, through, one fsync", Mode::Through, false),
];

/// What git and tar do, in the order in which they do it: mode of writing, whether the store is far away, rows.
pub(super) const TOOLS: [(Mode, bool, [&str; 5]); 4] = [
    (
        Mode::Back,
        false,
        ["git clone, back", "git commit, back", "git gc, back", "tar x, back", "tar c, back"],
    ),
    (
        Mode::Through,
        false,
        ["git clone, through", "git commit, through", "git gc, through", "tar x, through", "tar c, through"],
    ),
    (
        Mode::Back,
        true,
        [
            "git clone, back, 20 ms link",
            "git commit, back, 20 ms link",
            "git gc, back, 20 ms link",
            "tar x, back, 20 ms link",
            "tar c, back, 20 ms link",
        ],
    ),
    (
        Mode::Through,
        true,
        [
            "git clone, through, 20 ms link",
            "git commit, through, 20 ms link",
            "git gc, through, 20 ms link",
            "tar x, through, 20 ms link",
            "tar c, through, 20 ms link",
        ],
    ),
];
/// Python's libraries for checkpoints: mode of writing, library, its rows of saving and loading.
pub(super) const CHECKPOINT_LIBRARIES: [(Mode, &str, [&str; 2]); 4] = [
    (Mode::Back, "torch", ["torch.save and rename, back", "torch.load, back"]),
    (Mode::Back, "safetensors", ["safetensors save and rename, back", "safetensors load, back"]),
    (Mode::Through, "torch", ["torch.save and rename, through", "torch.load, through"]),
    (Mode::Through, "safetensors", ["safetensors save and rename, through", "safetensors load, through"]),
];

/// Of each small file that is written.
pub(super) const SAVED_BYTES: u64 = 4096;

/// Rows that are measured with each kind of store. What the others tell is the same with all of them: the way back from the
/// cache, or a link.
pub(super) const WITH_EACH_STORE: [&str; 2] = [COLD, SMALL_COLD.0];

/// Peak memory of agent and workers in any row that reads, bytes, at most.
pub(super) const MEMORY_AIM: f64 = 170e6;
/// The same in any row that writes.
pub(super) const WRITING_MEMORY_AIM: f64 = 256e6;

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
    .into_iter()
    .chain(rows_that_write(size))
    .collect()
}

fn rows_that_write(size: Size) -> Vec<Workload> {
    use Aim::{Beside, TimesTheSlower};
    let row =
        |name, unit, delivers, aims: Vec<Aim>| Workload { name, unit, less_is_better: false, delivers, aims };
    let file = Delivered { bytes: size.checkpoint_bytes, files: 0 };
    let small = Delivered { bytes: size.saved_files as u64 * SAVED_BYTES, files: size.saved_files as u64 };
    let nothing = Delivered::default();
    let native = || vec![Beside(Who::Native)];
    // As long as whichever is slower would take alone, and 15 % more.
    let of_both = || vec![TimesTheSlower([Who::Native, Who::EightUploads], 0.87)];
    let mut rows = Vec::new();
    for one in CHECKPOINTS {
        let waits = if one.mode == Mode::Through { of_both() } else { native() };
        rows.push(row(one.written, "MB/s", file, waits));
        rows.extend(one.stored.map(|name| row(name, "MB/s", file, of_both())));
        rows.extend(one.read.map(|name| row(name, "MB/s", file, native())));
    }
    rows.extend(SAVES.map(|(name, ..)| row(name, "saves/s", nothing, native())));
    rows.extend(SMALL_OUT.map(|(name, ..)| row(name, "files/s", small, native())));
    rows.extend(OVERWRITES.map(|(name, ..)| row(name, "writes/s", nothing, native())));
    let of_tools = TOOLS.iter().flat_map(|of| of.2);
    let of_libraries = CHECKPOINT_LIBRARIES.iter().flat_map(|of| of.2);
    rows.extend(of_tools.chain(of_libraries).map(|name| {
        let row = row(name, "s", nothing, native());
        Workload { less_is_better: true, ..row }
    }));
    rows
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
