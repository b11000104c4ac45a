//! What the operator decides about the cache, checked once.

use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Config {
    /// In order of preference.
    pub tiers: Vec<Tier>,
    /// Unit of presence, checksums and random reads: a power of two from 4 KiB to 16 MiB.
    pub block_bytes: u64,
    /// How much one credential scope may keep, whatever its volumes say. None: no limit.
    pub scope_limit_bytes: Option<u64>,
    /// For readers whose [`ReadOptions`] do not say otherwise.
    pub reading: Reading,
    /// What no reader's options go beyond.
    pub reading_max: Reading,
    /// Bytes of bodies in memory between the network and the disk, all files together.
    pub memory_bytes: u64,
    /// A disk that takes longer for one call hangs: it is not used until it answers.
    pub disk_timeout: Duration,
}

/// Directories of one kind of disk. Quotas are divided evenly over its paths.
#[derive(Clone, Debug)]
pub struct Tier {
    pub name: String,
    pub kind: TierKind,
    pub paths: Vec<PathBuf>,
    pub quota_bytes: u64,
    pub quota_inodes: u64,
    /// Above this share of the quota files are evicted …
    pub high_percent: u8,
    /// … down to this one.
    pub low_percent: u8,
    /// What must stay free on the file system whatever the quota (kubelet evicts pods below 15 % and 10 %).
    pub min_free_bytes_percent: u8,
    pub min_free_inodes_percent: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierKind {
    /// A tmpfs; emptied at start.
    Memory,
    Ssd,
    Hdd,
}

/// How a file is brought for a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// How far ahead of a sequential reader the cache fetches at most.
    pub readahead_bytes: u64,
    /// Size of one ranged GET at most.
    pub part_bytes: u64,
    /// GETs under way for one file at most (a reader's own range is always started).
    pub parallel_parts: usize,
}

/// What one volume asks for. None: as in [`Config`].
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadOptions {
    pub readahead_bytes: Option<u64>,
    pub part_bytes: Option<u64>,
    pub parallel_parts: Option<usize>,
}

impl ReadOptions {
    /// What a reader with these gets where `otherwise` holds for the rest.
    pub(crate) fn within(self, config: &Config, otherwise: Reading) -> Reading {
        let max = config.reading_max;
        Reading {
            readahead_bytes: self
                .readahead_bytes
                .unwrap_or(otherwise.readahead_bytes)
                .min(max.readahead_bytes),
            part_bytes: self
                .part_bytes
                .unwrap_or(otherwise.part_bytes)
                .clamp(config.block_bytes, max.part_bytes),
            parallel_parts: self
                .parallel_parts
                .unwrap_or(otherwise.parallel_parts)
                .clamp(1, max.parallel_parts),
        }
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    #[error("block_bytes is {0}: it must be a power of two from 4096 to 16777216")]
    BlockBytes(u64),
    #[error("{name} is {value}: it must be at least {least}")]
    TooSmall { name: &'static str, value: u64, least: u64 },
    #[error("tier {tier:?}: watermarks must satisfy 1 <= low ({low}) <= high ({high}) <= 100")]
    Watermarks { tier: String, low: u8, high: u8 },
    #[error("tier {tier:?}: a free-space floor of {percent} % leaves nothing to use")]
    Floor { tier: String, percent: u8 },
    #[error("{0} cache paths are configured: at most 255 can be told apart")]
    TooManyPaths(usize),
    #[error("the cache path {0:?} is given twice")]
    Twice(PathBuf),
}

impl Config {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if !self.block_bytes.is_power_of_two() || !(4096..=16 << 20).contains(&self.block_bytes) {
            return Err(ConfigError::BlockBytes(self.block_bytes));
        }
        let least = |name, value, least| {
            if value < least { Err(ConfigError::TooSmall { name, value, least }) } else { Ok(()) }
        };
        least("memory_bytes", self.memory_bytes, 2 * self.block_bytes)?;
        let Reading { readahead_bytes, part_bytes, parallel_parts } = self.reading;
        least("part_bytes", part_bytes, self.block_bytes)?;
        least("parallel_parts", parallel_parts as u64, 1)?;
        least("reading_max.readahead_bytes", self.reading_max.readahead_bytes, readahead_bytes)?;
        least("reading_max.part_bytes", self.reading_max.part_bytes, part_bytes)?;
        least("reading_max.parallel_parts", self.reading_max.parallel_parts as u64, parallel_parts as u64)?;
        let mut seen = std::collections::HashSet::new();
        for tier in &self.tiers {
            let (low, high) = (tier.low_percent, tier.high_percent);
            if low == 0 || low > high || high > 100 {
                return Err(ConfigError::Watermarks { tier: tier.name.clone(), low, high });
            }
            for percent in [tier.min_free_bytes_percent, tier.min_free_inodes_percent] {
                if percent >= 100 {
                    return Err(ConfigError::Floor { tier: tier.name.clone(), percent });
                }
            }
            for path in &tier.paths {
                if !seen.insert(path) {
                    return Err(ConfigError::Twice(path.clone()));
                }
            }
        }
        if seen.len() >= usize::from(crate::data::NO_ROOT) {
            return Err(ConfigError::TooManyPaths(seen.len()));
        }
        Ok(())
    }
}
