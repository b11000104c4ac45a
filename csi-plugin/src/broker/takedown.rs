//! How mounts end: taken away for good, or aborted and left for readers to get ENOTCONN from.
//!
//! The state changes first, then the world: whoever works on the same mount meanwhile finds that it is over, and undoes
//! what it has done.

use super::mounts_table::{Mount, Released, State};
use super::socket::{AgentIdentity, AgentLink};
use super::{Broker, GOODBYE_LIMIT};
use crate::status::Failure;
use link::broker::{AgentRequest, MountId};
use std::os::fd::AsFd;
use std::sync::Arc;

impl Broker {
    /// Takes one known mount away: agent told, connection ended, unmounted, ids and descriptors given back. If the
    /// unmount fails, the next call goes on.
    pub fn take_down(&self, mount: &Arc<Mount>) -> Result<(), Failure> {
        self.retire(mount, "it is taken down");
        self.kernel.unmount(&mount.target)?;
        self.table.remove(mount.id);
        Ok(())
    }

    /// It is no mount of ours from here on: agent told, connection ended. Nobody waits for it any more.
    pub(super) fn retire(&self, mount: &Mount, why: &str) {
        mount.enter(State::Unpublished, why);
        if let Some(agent) = self.agents.current()
            && mount.is_of(agent.identity())
        {
            self.relieve(&agent, mount.id, why);
        }
        // Nobody serves from here on, so whoever still waits must be let go before the unmount.
        self.abort(mount);
    }

    /// An agent shall let go of a mount, whether it has it, is about to have it, or never had.
    pub(super) fn relieve(&self, agent: &AgentLink, id: MountId, why: &str) {
        match agent.ask(AgentRequest::Unpublish { mount: id }, &[], GOODBYE_LIMIT) {
            Ok(_) => tracing::debug!(mount = %id, why, "the agent has let go of a mount"),
            Err(error) => {
                tracing::warn!(mount = %id, why, %error, "the agent did not confirm that it has let go of a mount");
            }
        }
    }

    /// Ends a mount that stays mounted: its readers get ENOTCONN until it is unpublished or published anew.
    pub(super) fn end(&self, mount: &Mount, why: &str) {
        self.end_if(mount, why, |_, _| true);
    }

    /// As [`Self::end`], if this still holds of its state and its agent.
    pub(super) fn end_if(
        &self,
        mount: &Mount,
        why: &str,
        holds: impl FnOnce(State, &AgentIdentity) -> bool,
    ) -> bool {
        let ended = self.enter_if(mount, State::Dead, why, holds);
        if ended {
            self.abort(mount);
        }
        ended
    }

    pub(super) fn abort(&self, mount: &Mount) {
        let Released { device, control, backing } = mount.release();
        // Whoever has taken it has ended the connection; its number may be somebody else's by now.
        let Some(device) = device else { return };
        let aborted = match control {
            _ if self.kernel.has_ended(device.as_fd()) => Ok(()),
            Some(control) => self.kernel.abort(&control),
            // As long as its device lives the number is its own.
            None => self.kernel.abort_at(&mount.target, mount.connection),
        };
        if let Err(error) = aborted {
            tracing::error!(mount = %mount.id, %error, "connection not aborted; it ends with its last descriptor");
        }
        for id in backing {
            // An aborted connection gives its ids back itself when the last reference goes; a lingering process may
            // hold it, and the blocks of evicted files with it.
            if let Err(error) = self.kernel.backing_close(device.as_fd(), id) {
                tracing::debug!(mount = %mount.id, id, %error, "passthrough id not closed");
            }
        }
    }
}
