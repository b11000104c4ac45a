//! What agent, broker and kernel hold is compared every few seconds, and what one of them alone knows is ended, mended
//! or reported.
//!
//! ```text
//!  look ──► compare (pure): findings ──► found in the look before, too? ──► look again, in the volume's turn ──► act
//! ```
//!
//! Everything that publishes, unpublishes, adopts or shows a mount keeps the order by itself (see `mounts_table`). Here
//! is found what gets lost all the same: an answer that did not come, a word that did not arrive, an unmount by
//! another process. Nothing that is merely under way may be mended, so a look that sees agents come and go counts for
//! nothing. Connections that have ended are not found here: see `ended`.

use super::adoption::Adopter;
use super::agents::{Agents, GOODBYE_LIMIT};
use super::compare::{Comparison, Finding, MountView, Owner, Place, Snapshot, compare, strays};
use super::confine::Groups;
use super::lifecycle::Lifecycle;
use super::mounts_table::{Mount, State};
use super::renew::candidates;
use super::socket::{AgentIdentity, AgentLink};
use crate::busy::{Busy, target_key};
use crate::config::NodeConfig;
use link::broker::{AgentAnswer, AgentEnd, AgentRequest, MountId};
use mounts::MountEntry;
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Calls of kubelet that work on the same volume; then the next look finds it.
const TURN_LIMIT: Duration = Duration::from_secs(1);

fn place(table: &[MountEntry], mount: &Mount) -> Place {
    // By number first: each mount is looked for in the whole table.
    let its: Vec<_> = table.iter().filter(|entry| entry.connection() == mount.connection).collect();
    match its.iter().any(|entry| entry.mount_point == mount.target.path()) {
        true => Place::Target,
        false if its.is_empty() => Place::Nowhere,
        false => Place::Elsewhere,
    }
}

#[derive(Debug)]
pub(super) struct Comparer {
    pub(super) lifecycle: Arc<Lifecycle>,
    pub(super) agents: Arc<Agents>,
    pub(super) adopter: Arc<Adopter>,
    pub(super) groups: Arc<Groups>,
    pub(super) busy: Arc<Busy>,
    pub(super) config: Arc<NodeConfig>,
}

/// Runs until the broker is dropped or stopped.
pub(super) fn watch(comparer: &Weak<Comparer>) {
    let mut comparison = Comparison::default();
    loop {
        let Some(every) = comparer.upgrade().map(|comparer| comparer.config.pace.compare_every) else {
            return;
        };
        std::thread::sleep(every);
        let running = |comparer: &Arc<Comparer>| !comparer.lifecycle.stopped();
        let Some(comparer) = comparer.upgrade().filter(running) else { return };
        comparer.groups.sweep();
        comparer.act_on(comparison.look(comparer.snapshot().as_ref()));
    }
}

/// Who serves a mount of `agent`?
fn owner(agent: &AgentIdentity, current: Option<&AgentIdentity>, connected: impl FnOnce() -> bool) -> Owner {
    match current {
        Some(current) if current == agent => Owner::Current,
        _ if connected() => Owner::Connected,
        _ => Owner::Gone,
    }
}

/// What an agent holds that says that it holds `mounts`. None: it is not known.
fn held(mounts: Vec<MountId>, end: AgentEnd) -> Option<BTreeSet<MountId>> {
    // An agent that is asked to stop says that it holds nothing, and serves until its mounts are safe.
    match mounts.is_empty() && end == AgentEnd::Asked {
        true => None,
        false => Some(mounts.into_iter().collect()),
    }
}

impl Comparer {
    fn act_on(&self, findings: Vec<Finding>) {
        let mut to_give = false;
        for finding in findings {
            match finding.is_report() {
                true => self.report(finding),
                false => to_give |= self.mend(finding),
            }
        }
        if to_give && let Some(agent) = self.agents.slots.current() {
            self.adopter.give_all(&agent);
        }
    }

    /// None: agents come or go, and what they hold changes hands.
    fn snapshot(&self) -> Option<Snapshot> {
        if self.agents.is_switching() || self.adopter.is_giving() {
            return None;
        }
        let agent = self.agents.slots.current();
        let held = agent.as_ref().and_then(|agent| self.held_by(agent));
        let table = match self.lifecycle.kernel.table() {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!(%error, "agent, broker and kernel are not compared");
                return None;
            }
        };
        let mounts = self.lifecycle.table.all();
        for mount in &mounts {
            self.lifecycle.note_if_ended(mount);
        }
        let ours = candidates(&table, &self.config.kubelet_dirs);
        let connections: Vec<_> = mounts.iter().map(|mount| mount.connection).collect();
        let seen = Snapshot {
            known: mounts.iter().map(|mount| self.look_at(mount, agent.as_deref(), &table)).collect(),
            removed: held
                .iter()
                .flatten()
                .copied()
                .filter(|id| self.lifecycle.table.was_removed(*id))
                .collect(),
            held,
            strays: strays(ours.iter().map(|it| it.connection), &connections),
        };
        // Nothing has begun meanwhile.
        (!self.agents.is_switching() && !self.adopter.is_giving()).then_some(seen)
    }

    fn look_at(&self, mount: &Mount, current: Option<&AgentLink>, table: &[MountEntry]) -> MountView {
        let agent = mount.agent();
        let owner = owner(&agent, current.map(AgentLink::identity), || self.agents.slots.has(&agent));
        let (state, refused) = (mount.state(), mount.is_refused());
        MountView { id: mount.id, state, owner, place: place(table, mount), refused }
    }

    fn held_by(&self, agent: &AgentLink) -> Option<BTreeSet<MountId>> {
        match agent.ask(AgentRequest::Holding, &[], GOODBYE_LIMIT) {
            Ok((AgentAnswer::Holding { mounts }, _)) => held(mounts, self.agents.ends.of(agent.identity())),
            _ => None,
        }
    }

    fn report(&self, finding: Finding) {
        let known = finding.mount().and_then(|id| self.lifecycle.table.get(id));
        match (finding, known) {
            (Finding::Displaced(id), Some(mount)) => tracing::warn!(
                mount = %id, volume = %mount.volume(), target_path = %mount.target.path().display(),
                "broker and agent hold a mount that the kernel does not have at its target: another process has unmounted it there, and a container still uses it"
            ),
            (Finding::HeldUnknown(id), _) => tracing::warn!(
                mount = %id,
                "the agent holds a mount that the broker does not: it was not shown, or not at its target; it ends with its connection"
            ),
            (Finding::Stray(major, minor), _) => {
                tracing::warn!(
                    connection = format!("{major}:{minor}"),
                    "the kernel has a mount of ours that neither agent nor broker holds: it is looked at"
                );
                self.lifecycle.renewals.wake();
            }
            _ => {}
        }
    }

    /// True if there is something to be given to the agent.
    fn mend(&self, finding: Finding) -> bool {
        let Some(id) = finding.mount() else { return false };
        let known = self.lifecycle.table.get(id);
        let turn = known.as_ref().map(|mount| target_key(mount.target.path()));
        let Ok(_turn) = self.busy.enter(turn.as_slice(), TURN_LIMIT) else { return false };
        // It may have come to an end by itself before our turn came.
        if !self.snapshot().is_some_and(|seen| compare(&seen).contains(&finding)) {
            return false;
        }
        match (finding, known) {
            (Finding::HeldThoughOver(_), known) => {
                let state = known.map(|mount| mount.state());
                tracing::warn!(mount = %id, broker = ?state, "the agent holds a mount that the broker has ended: it is asked to let go");
                if let Some(agent) = self.agents.slots.current() {
                    agent.relieve(id, "the broker has ended it");
                }
                false
            }
            (Finding::ServedByNobody(_), Some(mount)) => {
                tracing::warn!(mount = %id, volume = %mount.volume(), "the broker takes a mount for served that the agent does not hold: it is given to it anew");
                self.lifecycle.orphan(&mount, &mount.agent(), "its agent does not hold it");
                self.lifecycle.wake_expiry();
                true
            }
            (Finding::Refused(_), Some(_)) => true,
            (Finding::HeldThoughOrphaned(_), Some(mount)) => {
                tracing::warn!(mount = %id, volume = %mount.volume(), "the agent holds a mount that the broker takes for orphaned");
                self.lifecycle.enter_if(&mount, State::Serving, "its agent holds it", |state, _| {
                    matches!(state, State::Orphaned(_))
                });
                false
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::mounts_table::tests::mount;
    use mounts::{FUSE_TYPE, Fake, Kernel, MountSource};
    use std::path::Path;

    #[test]
    fn a_mount_is_of_the_agent_that_serves_of_another_that_is_connected_or_of_one_that_is_gone() {
        let [ours, other] = [1, 2].map(|life| AgentIdentity { pid: 7, started: Some(7), life });
        assert_eq!(owner(&ours, Some(&ours), || false), Owner::Current);
        assert_eq!(owner(&ours, Some(&other), || true), Owner::Connected);
        assert_eq!(owner(&ours, Some(&other), || false), Owner::Gone);
        assert_eq!(
            (owner(&ours, None, || true), owner(&ours, None, || false)),
            (Owner::Connected, Owner::Gone)
        );
    }

    #[test]
    fn what_an_agent_that_was_asked_to_stop_holds_is_known_while_it_names_it() {
        let some = vec![MountId(2), MountId(1)];
        for end in [AgentEnd::Asked, AgentEnd::Hung, AgentEnd::Unknown] {
            assert_eq!(held(some.clone(), end), Some(BTreeSet::from([MountId(1), MountId(2)])));
            assert_eq!(held(vec![], end), (end != AgentEnd::Asked).then(BTreeSet::new));
        }
    }

    #[test]
    fn a_mount_is_at_its_target_elsewhere_or_nowhere() {
        let mount = mount();
        let source = MountSource { volume: "v".into(), digest: "d".into() };
        // A kernel with one FUSE mount, of this number.
        let look = |at: &Path, minor: u32| {
            let kernel = Fake::default();
            kernel.leave_mount(at, &source);
            let mut table = kernel.table().unwrap();
            table.iter_mut().filter(|entry| entry.fs_type == FUSE_TYPE).for_each(|entry| entry.minor = minor);
            table.retain(|entry| entry.fs_type == FUSE_TYPE);
            place(&table, &mount)
        };
        let (target, ours) = (mount.target.path(), mount.connection.minor);
        assert_eq!(look(target, ours), Place::Target);
        assert_eq!(look(Path::new("/other"), ours), Place::Elsewhere);
        assert_eq!(
            (look(target, ours + 1), look(Path::new("/other"), ours + 1)),
            (Place::Nowhere, Place::Nowhere)
        );
    }
}
