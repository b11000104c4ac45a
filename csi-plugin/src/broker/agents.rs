//! The agents of this node: who is connected, who may be given a volume now, and how the latest came to their ends.

use super::ends::Ends;
use super::slots::AgentSlots;
use super::socket::{AgentLink, AskError};
use crate::config::NodeConfig;
use crate::status::Failure;
use link::broker::{AgentRequest, MountId};
use link::budget;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Unpublish must not wait longer for an agent that hangs: the abort frees everything it holds.
pub(super) const GOODBYE_LIMIT: Duration = budget::GOODBYE.time;

#[derive(Debug)]
pub(super) struct Agents {
    pub(super) slots: AgentSlots,
    pub(super) ends: Ends,
    /// One agent takes over from another: a publish would be neither's.
    switching: AtomicBool,
    socket: PathBuf,
    node_id: String,
}

/// As long as it lives no volume is published: neither of two agents could take it.
#[derive(Debug)]
pub(super) struct NoPublishes(Arc<Agents>);

impl Drop for NoPublishes {
    fn drop(&mut self) {
        self.0.switching.store(false, Ordering::SeqCst);
    }
}

impl Agents {
    pub(super) fn new(config: &NodeConfig) -> Self {
        Self {
            slots: AgentSlots::default(),
            ends: Ends::default(),
            switching: AtomicBool::new(false),
            socket: config.broker_socket.clone(),
            node_id: config.node_id.clone(),
        }
    }

    /// The agent that serves this node.
    pub(super) fn serving(&self) -> Result<Arc<AgentLink>, Failure> {
        self.slots.current().ok_or_else(|| {
            Failure::Unavailable(format!(
                "the node agent is not running (no connection on {}): check the agent DaemonSet on node {}",
                self.socket.display(),
                self.node_id
            ))
        })
    }

    /// The agent that a volume may be given to now.
    pub(super) fn publishing(&self) -> Result<Arc<AgentLink>, Failure> {
        match self.is_switching() {
            false => self.serving(),
            true => Err(Failure::Unavailable(
                "a node agent is taking over from another one: the publish will be repeated".into(),
            )),
        }
    }

    pub(super) fn is_switching(&self) -> bool {
        self.switching.load(Ordering::SeqCst)
    }

    pub(super) fn stop_publishes(self: &Arc<Self>) -> NoPublishes {
        self.switching.store(true, Ordering::SeqCst);
        NoPublishes(self.clone())
    }
}

impl AgentLink {
    /// It shall let go of a mount, whether it has it, is about to have it, or never had.
    pub(super) fn relieve(&self, id: MountId, why: &str) {
        match self.ask(AgentRequest::Unpublish { mount: id }, &[], GOODBYE_LIMIT) {
            Ok(_) => tracing::debug!(mount = %id, why, "the agent has let go of a mount"),
            Err(error) => {
                tracing::warn!(mount = %id, why, %error, "the agent did not confirm that it has let go of a mount");
            }
        }
    }
}

impl From<AskError> for Failure {
    fn from(error: AskError) -> Self {
        let text = error.to_string();
        match error {
            AskError::Refused(refusal) => refusal.into(),
            AskError::Gone | AskError::TimedOut(_) | AskError::Withdrawn => Self::Unavailable(text),
            AskError::Send(_) => Self::Internal(text),
        }
    }
}
