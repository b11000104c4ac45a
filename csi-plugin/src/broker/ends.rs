//! How agents came to their ends, as far as the broker has a part in it: for the reports of those that take over.

use super::socket::AgentIdentity;
use link::broker::AgentEnd;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Mounts go to the next agent, so only the latest matter.
const KEPT: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Ends(Mutex<VecDeque<(AgentIdentity, AgentEnd)>>);

impl Ends {
    pub(super) fn note(&self, agent: &AgentIdentity, end: AgentEnd) {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ends.retain(|(other, _)| other != agent);
        ends.push_front((agent.clone(), end));
        ends.truncate(KEPT);
    }

    pub(super) fn of(&self, agent: &AgentIdentity) -> AgentEnd {
        let ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ends.iter().find(|(other, _)| other == agent).map_or(AgentEnd::Unknown, |(_, end)| *end)
    }
}
