//! NodeGetVolumeStats: from the agent's memory. A statfs on the mount could hang for minutes.
//!
//! A mount that is not well is an answer, too: its condition says what is wrong, as the Events do, and its size is the
//! last that was known (kubelet takes an answer without any for a failure, and drops the condition with it).

use super::Inner;
use super::publish::{Found, Standing};
use crate::broker::ALIVE_LIMIT;
use crate::events::text;
use crate::status::Failure;
use mounts::{Target, TargetError, probe};
use proto::csi::v1::volume_usage::Unit;
use proto::csi::v1::{NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, VolumeCondition, VolumeUsage};
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
        let standing = match self.look(&self.broker.kernel.stack(&target)?, target.path()) {
            Found::Fuse { source, standing } if source.volume == request.volume_id => standing,
            // Another process has unmounted it.
            Found::Guard { volume, .. } if volume == request.volume_id => Standing::Dead,
            _ => return Err(unknown()),
        };
        let mut trouble = self.trouble(&request.volume_id, &target, standing);
        let usage = match self.broker.usage(&target) {
            Ok(usage) => {
                trouble = trouble.or_else(|| self.broker.source_trouble(&request.volume_id, &usage));
                usage
            }
            // It lives, and is about to be shown to this broker.
            Err(failure) if standing == Standing::Unknown && trouble.is_none() => return Err(failure),
            Err(_) => {
                trouble.get_or_insert_with(|| text::no_agent(&request.volume_id));
                self.broker.last_usage(&target)
            }
        };
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
            volume_condition: Some(VolumeCondition {
                abnormal: trouble.is_some(),
                message: trouble.unwrap_or_else(|| "the mount is served".into()),
            }),
        })
    }

    /// What is wrong with it; None: nothing, as far as is known.
    fn trouble(&self, volume: &str, target: &Target, standing: Standing) -> Option<String> {
        let trouble = self.broker.trouble(volume, target);
        match standing {
            Standing::Serving => trouble,
            Standing::Orphaned => trouble.or_else(|| Some(text::no_agent(volume))),
            Standing::Dead => trouble.or_else(|| {
                let lives = self.broker.table.at(target.path()).is_some_and(|it| !it.state().is_over());
                Some(if lives { text::unmounted(volume) } else { text::dead(volume) })
            }),
            // Its agent shows it to this broker any moment, unless it is dead.
            Standing::Unknown => match self.broker.kernel.probe(target, probe::What::Alive, ALIVE_LIMIT) {
                Ok(probe::Outcome::Primed | probe::Outcome::Serving) => None,
                Ok(probe::Outcome::Dead) => trouble.or_else(|| Some(text::dead(volume))),
                Err(_) => trouble.or_else(|| Some(text::no_agent(volume))),
            },
        }
    }
}
