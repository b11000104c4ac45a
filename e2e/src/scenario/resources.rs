//! What a node holds: compared before and after, it must not have grown.

use super::memory;
use crate::clock::wait_until;
use crate::node::Node;
use crate::{mountinfo, processes};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    pub mounts: usize,
    pub plugin_descriptors: usize,
    pub agent_descriptors: usize,
    /// Workers, the standby included.
    pub workers: usize,
    /// Groups of memory that were made for workers.
    pub groups: usize,
}

impl Resources {
    pub fn of(node: &Node) -> Result<Self> {
        // An HDFS's helper is there from the first question on: not yet, where an agent was just given its mounts.
        let helpers = node.helpers().len();
        Ok(Self {
            mounts: mountinfo::below(node.places().root())?.len(),
            plugin_descriptors: processes::descriptors(node.plugin().pid()),
            agent_descriptors: processes::descriptors(node.agent().pid()),
            workers: processes::children(node.agent().pid()).len().saturating_sub(helpers),
            groups: memory::groups().saturating_sub(helpers),
        })
    }

    /// Waits until the node holds what it held before: connections to the store close when they have idled.
    pub fn ensure_same(&self, node: &Node) -> Result<()> {
        let mut now = Self::of(node)?;
        let same = |now: &Self| {
            now.mounts == self.mounts
                && now.workers == self.workers
                && now.groups <= self.groups
                && now.plugin_descriptors <= self.plugin_descriptors
                && now.agent_descriptors <= self.agent_descriptors + SLACK
        };
        wait_until(Duration::from_secs(30), || {
            if let Ok(fresh) = Self::of(node) {
                now = fresh;
            }
            same(&now)
        });
        ensure!(same(&now), "before: {self:?}\nafter:  {now:?}");
        Ok(())
    }
}

/// Idle connections to the store and one API connection; a leak grows with the number of deaths instead.
const SLACK: usize = 8;

/// Least-squares slope of a series against its index.
pub fn slope(series: &[u64]) -> f64 {
    slope_within(&[series])
}

/// The slope that several series have in common, each at a level of its own: a process that is started anew begins one.
pub fn slope_within(lives: &[&[u64]]) -> f64 {
    let against_index = |life: &&[u64]| life.iter().enumerate().map(|(x, &y)| (x as f64, y as f64)).collect();
    slope_of(&lives.iter().map(against_index).collect::<Vec<_>>())
}

/// The same of points (x, y).
pub fn slope_of(lives: &[Vec<(f64, f64)>]) -> f64 {
    let (mut xy, mut xx) = (0.0, 0.0);
    for points in lives {
        let n = points.len() as f64;
        let (mean_x, mean_y) = points.iter().fold((0.0, 0.0), |(x, y), (px, py)| (x + px / n, y + py / n));
        for (x, y) in points {
            xy += (x - mean_x) * (y - mean_y);
            xx += (x - mean_x) * (x - mean_x);
        }
    }
    if xx == 0.0 { 0.0 } else { xy / xx }
}

/// Bytes of the disk, all files below together. What goes meanwhile takes none.
pub fn disk_bytes(dir: &Path) -> u64 {
    let mut bytes = 0;
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if let Ok(about) = entry.metadata() {
            bytes += about.blocks() * 512;
            if about.is_dir() {
                bytes += disk_bytes(&entry.path());
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes() {
        assert_eq!(slope(&[5, 5, 5]), 0.0);
        assert_eq!(slope(&[1, 3, 5, 7]), 2.0);
        assert_eq!((slope(&[1]), slope(&[])), (0.0, 0.0));
        assert_eq!(slope_within(&[&[10, 12, 14], &[], &[1, 3]]), 2.0);
        let life = |level: f64| (0..10).map(|k| (f64::from(k) * 36.0, level + f64::from(k))).collect();
        assert!((3600.0 * slope_of(&[life(5.0), life(500.0)]) - 100.0).abs() < 1e-9);
    }
}
