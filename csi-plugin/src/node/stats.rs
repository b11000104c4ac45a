//! NodeGetVolumeStats: from the agent's memory. A statfs on the mount could hang for minutes.

use super::Inner;
use super::publish::Found;
use crate::status::Failure;
use mounts::{Target, TargetError};
use proto::csi::v1::volume_usage::Unit;
use proto::csi::v1::{NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, VolumeUsage};
use std::path::Path;

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
        let mount = self.broker.table.at(target.path()).ok_or_else(|| {
            Failure::Unavailable(format!(
                "volume {} was published before this broker started: its usage is not known here",
                request.volume_id
            ))
        })?;
        let usage = self.broker.usage(&mount)?;
        let line = |total: u64, unit: Unit| {
            let total = i64::try_from(total).unwrap_or(i64::MAX);
            // Read-only: what is there is used, nothing is available.
            VolumeUsage { available: 0, total, used: total, unit: unit.into() }
        };
        Ok(NodeGetVolumeStatsResponse {
            usage: vec![line(usage.total_bytes, Unit::Bytes), line(usage.total_inodes, Unit::Inodes)],
            volume_condition: None,
        })
    }
}
