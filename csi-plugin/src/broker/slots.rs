//! Who may be connected: the agent that serves, and beside it at most one that would take its place.

use super::socket::{Admission, AgentIdentity, AgentLink};
use link::{Refusal, RefusalKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use version::neighbours;

#[derive(Debug, Default)]
pub(super) struct AgentSlots {
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    current: Option<Arc<AgentLink>>,
    successor: Option<Arc<AgentLink>>,
    /// They serve nothing, and are here to show their mounts.
    drained: Vec<Arc<AgentLink>>,
}

impl AgentSlots {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn current(&self) -> Option<Arc<AgentLink>> {
        self.lock().current.clone()
    }

    /// Every agent that is connected.
    pub(super) fn all(&self) -> Vec<Arc<AgentLink>> {
        let slots = self.lock();
        slots.current.iter().chain(&slots.successor).cloned().collect()
    }

    /// Is this one connected, as whatever?
    pub(super) fn has(&self, agent: &AgentIdentity) -> bool {
        let slots = self.lock();
        let mut links = slots.current.iter().chain(&slots.successor).chain(&slots.drained);
        links.any(|link| link.identity() == agent)
    }

    /// The successor becomes the agent that serves in place of `before`, whose end may not have been noted yet; false
    /// if it is gone, or if another agent has taken that place.
    pub(super) fn promote(&self, link: &Arc<AgentLink>, before: Option<&Arc<AgentLink>>) -> bool {
        let mut slots = self.lock();
        let here = slots.successor.as_ref().is_some_and(|s| Arc::ptr_eq(s, link));
        let free = slots.current.as_ref().is_none_or(|c| before.is_some_and(|b| Arc::ptr_eq(c, b)));
        if !here || !free {
            return false;
        }
        slots.current = slots.successor.take();
        true
    }

    /// Is this one connected that is drained, and leaves by itself when every mount was shown?
    pub(super) fn is_drained(&self, agent: &AgentIdentity) -> bool {
        self.lock().drained.iter().any(|link| link.identity() == agent)
    }
}

impl Admission for AgentSlots {
    fn take(&self, link: &Arc<AgentLink>, greet: &dyn Fn()) -> Result<(), Refusal> {
        let slots = &mut *self.lock();
        if link.hello().drained {
            greet(); // it takes no other agent's place
            slots.drained.push(link.clone());
            return Ok(());
        }
        let slot = match (link.hello().successor, &slots.current, &slots.successor) {
            (false, None, _) => &mut slots.current,
            (false, Some(other), _) => {
                let pid = other.identity().pid;
                let why = format!("another agent (pid {pid}) is connected: stop it first");
                return Err(Refusal::new(RefusalKind::Conflict, why));
            }
            (true, None, _) => {
                return Err(Refusal::new(RefusalKind::Unavailable, "there is no agent to take over from"));
            }
            (true, Some(_), Some(other)) => {
                let pid = other.identity().pid;
                let why = format!("another agent (pid {pid}) is about to take over");
                return Err(Refusal::new(RefusalKind::Unavailable, why));
            }
            (true, Some(current), None) => {
                get_along(current, link)?;
                &mut slots.successor
            }
        };
        greet();
        *slot = Some(link.clone());
        Ok(())
    }

    fn clear(&self, link: &Arc<AgentLink>) {
        let slots = &mut *self.lock();
        slots.drained.retain(|other| !Arc::ptr_eq(other, link));
        for slot in [&mut slots.current, &mut slots.successor] {
            if slot.as_ref().is_some_and(|held| Arc::ptr_eq(held, link)) {
                *slot = None;
            }
        }
    }
}

/// Can these two hand over, in one direction or the other?
fn get_along(current: &AgentLink, next: &AgentLink) -> Result<(), Refusal> {
    let (old, new) = (current.hello(), next.hello());
    let refuse = |why: String| Err(Refusal::new(RefusalKind::Conflict, why));
    if old.state == 0 {
        return refuse(format!(
            "the running agent (version {}) is of a time before hand-overs: stop it first",
            old.agent_version
        ));
    }
    if neighbours(old.protocol, new.protocol) && neighbours(old.state, new.state) {
        return Ok(());
    }
    refuse(format!(
        "the running agent has version {} of the link and {} of the state, this one {} and {}: an agent takes over from its direct neighbours only, install a version between them first",
        old.protocol, old.state, new.protocol, new.state
    ))
}
