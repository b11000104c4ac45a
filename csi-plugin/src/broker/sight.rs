//! Looks through a mount on behalf of the agent, which must never touch its own mounts.

use super::Broker;
use super::socket::AgentIdentity;
use link::broker::{BrokerAnswer, MountId};
use link::{Refusal, RefusalKind};
use mounts::probe;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Below the agent's patience with any question.
const LIMIT: Duration = Duration::from_millis(1500);
/// Each is a process. The agent asks again.
const LOOKS_MAX: usize = 4;

impl Broker {
    /// Blocks until the mount has answered, or has not.
    pub(super) fn look(&self, agent: &AgentIdentity, id: MountId) -> Result<BrokerAnswer, Refusal> {
        let mount = self.owned(agent, id)?;
        if self.looks.fetch_add(1, Ordering::AcqRel) >= LOOKS_MAX {
            self.looks.fetch_sub(1, Ordering::AcqRel);
            return Err(Refusal::new(RefusalKind::Unavailable, "too many mounts are being looked through"));
        }
        let seen = self.kernel.probe(&mount.target, probe::What::Alive, LIMIT);
        self.looks.fetch_sub(1, Ordering::AcqRel);
        match seen {
            Ok(probe::Outcome::Primed | probe::Outcome::Serving) => {
                Ok(BrokerAnswer::Probed { serving: true })
            }
            Ok(probe::Outcome::Dead) => Ok(BrokerAnswer::Probed { serving: false }),
            Err(error) => Err(Refusal::new(RefusalKind::Unavailable, error.to_string())),
        }
    }
}
