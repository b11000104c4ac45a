//! Of agent and broker one may go only while the other holds every mount: the mounts live as long as a process holds
//! their devices.

use super::agents::Agents;
use super::mounts_table::{Mount, State, Table};
use super::socket::AgentIdentity;
use link::broker::{AgentAnswer, AgentEnd, AgentRequest, BrokerAnswer};
use link::{Refusal, RefusalKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const HOLDING_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Shutdown {
    pub(super) table: Arc<Table>,
    pub(super) agents: Arc<Agents>,
    /// An agent holds every mount for our successor: nothing is kept for an agent any more.
    pub(super) going: AtomicBool,
}

impl Shutdown {
    /// The answer to an agent that wants to exit: the mounts that a successor could be given. Some may be another
    /// agent's by now, whatever this one still holds of them.
    pub(super) fn of_agent(&self, agent: &AgentIdentity) -> Result<BrokerAnswer, Refusal> {
        self.agents.ends.note(agent, AgentEnd::Asked);
        if self.going.load(Ordering::SeqCst) {
            let why = "this broker is about to exit itself: ask its successor";
            return Err(Refusal::new(RefusalKind::Unavailable, why));
        }
        let held = |m: &&Arc<Mount>| m.device().is_some() && m.prepared().is_some();
        let mounts = self.table.all().iter().filter(held).map(|m| m.id).collect();
        Ok(BrokerAnswer::Holding { mounts })
    }

    /// Does a living agent hold everything of every live mount? Once true this broker must go: it refuses to keep
    /// anything for an agent from then on. An agent that leaves says that it holds nothing, before it asks whether we
    /// do; so of the two that are asked to stop at once only one goes. Blocks.
    pub(super) fn of_broker(&self) -> bool {
        self.going.store(true, Ordering::SeqCst);
        let held = self.is_held();
        if !held {
            self.going.store(false, Ordering::SeqCst);
        }
        held
    }

    fn is_held(&self) -> bool {
        let live: Vec<_> = self.table.all().into_iter().filter(|m| !m.state().is_over()).collect();
        if live.is_empty() {
            return true;
        }
        let Some(agent) = self.agents.slots.current() else { return false };
        if !live.iter().all(|m| m.state() == State::Serving && m.is_of(agent.identity())) {
            return false;
        }
        match agent.ask(AgentRequest::Holding, &[], HOLDING_LIMIT) {
            Ok((AgentAnswer::Holding { mounts }, _)) => live.iter().all(|m| mounts.contains(&m.id)),
            _ => false,
        }
    }
}
