//! NodeUnpublishVolume: needs nothing but the kernel's mount table, so it works after any restart.

use super::Inner;
use super::publish::Found;
use crate::status::Failure;
use link::budget;
use mounts::{MountEntry, Ours, Target, TargetError};
use proto::csi::v1::NodeUnpublishVolumeRequest;
use std::path::PathBuf;
use std::time::Duration;

/// The call that has its turn may wait for an agent that hangs (1 s).
const PATIENCE: Duration = budget::UNPUBLISH_TURN.time;

impl Inner {
    pub(super) fn unpublish(&self, request: &NodeUnpublishVolumeRequest) -> Result<(), Failure> {
        if request.volume_id.is_empty() {
            return Err(Failure::missing("volume_id"));
        }
        if request.target_path.is_empty() {
            return Err(Failure::missing("target_path"));
        }
        let asked = PathBuf::from(&request.target_path);
        let resolved = Target::resolve(&self.broker.config.kubelet_dirs, &asked);
        // Until we are done: what is being made anew ends, and nothing else is.
        let _leaving = resolved.as_ref().ok().map(|at| self.broker.leave(at.path(), &request.volume_id));
        // Its programs are gone. Publishes of the volume for others do not wait for this.
        if let Ok(at) = &resolved {
            self.broker.upload_before_end(at.path(), &request.volume_id);
        }
        let _turn = self.broker.busy.enter(&self.keys(&request.volume_id, &asked), PATIENCE)?;
        let target = match Target::resolve(&self.broker.config.kubelet_dirs, &asked) {
            Ok(target) => target,
            Err(TargetError::NoParent(_)) => return Ok(()), // gone with the pod's directory
            Err(error) => return Err(error.into()),
        };
        let stack = self.broker.kernel.stack(&target)?;
        match self.look(&stack, target.path()) {
            Found::Fuse { source, .. } if source.volume != request.volume_id => {
                return Err(Failure::Precondition(format!(
                    "volume {} is published at {}, not volume {}",
                    source.volume,
                    target.path().display(),
                    request.volume_id
                )));
            }
            Found::Foreign(what) => {
                return Err(Failure::Precondition(format!(
                    "something else is mounted at {} ({what}): unmount it first",
                    target.path().display()
                )));
            }
            Found::Fuse { .. } | Found::Guard { .. } => {
                self.clear(&target)?;
                tracing::info!(volume = request.volume_id, target_path = %target.path().display(), "unpublished");
                self.tell_of_holders(request, &stack);
            }
            // Another process unmounted it: the agent still serves it.
            Found::Nothing => self.take_down_known(&target)?,
        }
        self.broker.forget_target(&target);
        match target.remove() {
            Ok(()) => Ok(()),
            // Never ours: what is there was there before, and a mount of ours needs a directory.
            Err(error @ (TargetError::NotADirectory(_) | TargetError::Symlink(_))) => {
                tracing::warn!(%error, "left alone after unpublish");
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// No unpublish waits for them: their calls get ENOTCONN.
    fn tell_of_holders(&self, request: &NodeUnpublishVolumeRequest, unmounted: &[MountEntry]) {
        let fuse = |entry: &&MountEntry| matches!(entry.ours(), Some(Ours::Fuse(_)));
        if unmounted.iter().filter(fuse).any(|entry| self.broker.kernel.remains(entry.connection())) {
            tracing::warn!(
                volume = request.volume_id,
                target_path = request.target_path,
                "processes still have this volume or a file of it: the kernel keeps what is left of the mount until they end"
            );
        }
    }
}
