//! NodeGetVolumeStats: from the agent's memory. A statfs on the mount could hang for minutes.

use super::Inner;
use super::publish::Found;
use crate::status::Failure;
use mounts::{Target, TargetError};
use proto::csi::v1::volume_usage::Unit;
use proto::csi::v1::{NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, VolumeUsage};
use std::path::Path;

/// A store has no size of its own. With nothing available every volume would set off the alerts of those who watch
/// volumes fill up; so, like others, it has 1 PiB and 2^40 objects.
const NOMINAL_BYTES: i64 = 1 << 50;
const NOMINAL_INODES: i64 = 1 << 40;

impl Inner {
    pub(super) fn stats(
        &self,
        request: &NodeGetVolumeStatsRequest,
    ) -> Result<NodeGetVolumeStatsResponse, Failure> {
        if request.volume_id.is_empty() {
            return Err(Failure::missing("volume_id"));
        }
        if request.volume_path.is_empty() {
            return Err(Failure::missing("volume_path"));
        }
        let unknown = || {
            Failure::NotFound(format!(
                "volume {} is not published at {}",
                request.volume_id, request.volume_path
            ))
        };
        let target = match Target::resolve(&self.broker.config.kubelet_dirs, Path::new(&request.volume_path))
        {
            Ok(target) => target,
            Err(TargetError::Io { path, source }) => return Err(TargetError::Io { path, source }.into()),
            Err(_) => return Err(unknown()),
        };
        let table = self.broker.kernel.table()?;
        match self.look(&table, target.path()) {
            Found::Fuse { source, .. } if source.volume == request.volume_id => {}
            _ => return Err(unknown()),
        }
        let usage = self.broker.usage(&target)?;
        let line = |used: u64, nominal: i64, unit: Unit| {
            let used = i64::try_from(used).unwrap_or(i64::MAX);
            let total = nominal.max(used);
            VolumeUsage { available: total - used, total, used, unit: unit.into() }
        };
        Ok(NodeGetVolumeStatsResponse {
            usage: vec![
                line(usage.total_bytes, NOMINAL_BYTES, Unit::Bytes),
                line(usage.total_inodes, NOMINAL_INODES, Unit::Inodes),
            ],
            volume_condition: None,
        })
    }
}
