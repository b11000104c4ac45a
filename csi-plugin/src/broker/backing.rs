//! Passthrough files: registered with the kernel for the agent, recorded, closed when nobody needs them.

use super::Broker;
use super::mounts_table::Mount;
use super::socket::AgentIdentity;
use link::broker::{BrokerAnswer, MountId};
use link::{BACKING_IDS_MAX, Refusal, RefusalKind};
use mounts::KernelError;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

impl Broker {
    /// The agent may speak only of mounts that were given to it.
    pub(super) fn owned(&self, agent: &AgentIdentity, id: MountId) -> Result<Arc<Mount>, Refusal> {
        let unknown =
            || Refusal::new(RefusalKind::NotFound, format!("mount {id} is not known to this broker"));
        self.table.get(id).filter(|mount| mount.is_of(agent)).ok_or_else(unknown)
    }

    pub(super) fn backing_open(
        &self,
        agent: &AgentIdentity,
        id: MountId,
        fds: Vec<OwnedFd>,
    ) -> Result<BrokerAnswer, Refusal> {
        let mount = self.owned(agent, id)?;
        let [file] = <[OwnedFd; 1]>::try_from(fds)
            .map_err(|_| Refusal::new(RefusalKind::Invalid, "BackingOpen takes one descriptor"))?;
        let gone = || Refusal::new(RefusalKind::NotFound, format!("mount {id} has ended"));
        let device = mount.device().ok_or_else(gone)?;
        // Each pins a file, and all of them must fit into the message that gives the mount to the next agent.
        if mount.backing().len() >= BACKING_IDS_MAX {
            let why = format!("mount {id} has {BACKING_IDS_MAX} passthrough files open, which is the limit");
            return Err(Refusal::new(RefusalKind::Unavailable, why));
        }
        let backing = self.kernel.backing_open(device.as_fd(), file.as_fd()).map_err(refusal)?;
        mount.record_backing(backing);
        if mount.state().is_over() {
            // It ended while we asked: whoever ended it may have looked at the records before.
            self.close_recorded(&mount, &device, backing);
            return Err(gone());
        }
        Ok(BrokerAnswer::Backing { id: backing })
    }

    pub(super) fn backing_close(
        &self,
        agent: &AgentIdentity,
        id: MountId,
        backing: u32,
    ) -> Result<BrokerAnswer, Refusal> {
        let mount = self.owned(agent, id)?;
        match mount.device() {
            Some(device) => self.close_recorded(&mount, &device, backing),
            None => {
                mount.forget_backing(backing); // the connection took its ids with it
            }
        }
        Ok(BrokerAnswer::Done)
    }

    fn close_recorded(&self, mount: &Mount, device: &OwnedFd, backing: u32) {
        if mount.forget_backing(backing)
            && let Err(error) = self.kernel.backing_close(device.as_fd(), backing)
        {
            tracing::warn!(mount = %mount.id, backing, %error, "a passthrough id was not closed");
        }
    }
}

fn refusal(error: KernelError) -> Refusal {
    let kind = match error {
        KernelError::NotACacheFile(_) => RefusalKind::Denied,
        _ => RefusalKind::Internal,
    };
    Refusal::new(kind, error.to_string())
}
