//! What the broker sends to an agent about a mount.

use super::mounts_table::Mount;
use link::broker::{Adopt, AgentEnd, Publish};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// Everything but the INIT request, which lies in the connection's shared memory.
pub(super) fn publish(mount: &Mount) -> Publish {
    Publish {
        mount: mount.id,
        spec: mount.spec.clone(),
        secrets: mount.credentials().to_secrets(),
        init: Vec::new(),
    }
}

/// What an agent is given to serve a mount that another one has served.
pub(super) struct Adoption {
    pub(super) adopt: Adopt,
    pub(super) device: Arc<OwnedFd>,
    pub(super) inflight: Arc<OwnedFd>,
}

/// None: the mount has ended, or was never prepared.
pub(super) fn adoption(mount: &Mount, since: Instant, ended: AgentEnd) -> Option<Adoption> {
    let (device, (inflight, resume)) = (mount.device()?, mount.prepared()?);
    let orphaned_ms = since.elapsed().as_millis() as u64;
    let adopt = Adopt { publish: publish(mount), resume, backing: mount.backing(), orphaned_ms, ended };
    Some(Adoption { adopt, device, inflight })
}
