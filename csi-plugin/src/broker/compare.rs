//! What agent, broker and kernel hold is compared every few seconds, and what one of them alone knows is ended, mended
//! or reported.
//!
//! ```text
//!  look ──► compare (pure): findings ──► found in the look before, too? ──► look again, in the volume's turn ──► act
//! ```
//!
//! Everything that publishes, unpublishes, adopts or shows a mount keeps the order by itself (see `mounts_table`). Here
//! is found what gets lost all the same: an answer that did not come, a word that did not arrive, an unmount by somebody
//! else. Nothing that is merely under way may be mended, so a look that sees agents come and go counts for nothing.
//! Connections that have ended are not found here: see `ended`.

use super::mounts_table::{Mount, State};
use super::renew::candidates;
use super::socket::AgentLink;
use super::{Broker, GOODBYE_LIMIT};
use crate::busy::target_key;
use link::broker::{AgentAnswer, AgentEnd, AgentRequest, MountId};
use mounts::{Connection, MountEntry, stack_at};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError, Weak};
use std::time::Duration;

/// Calls of kubelet that work on the same volume; then the next look finds it.
const TURN_LIMIT: Duration = Duration::from_secs(1);

/// Where the kernel has a mount, in our mount namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Target,
    Elsewhere,
    Nowhere,
}

/// Whom the broker has given it to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The agent that serves this node.
    Current,
    /// One that takes over, or has stepped back.
    Connected,
    Gone,
}

/// One mount, as the broker and the kernel have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    pub id: MountId,
    pub state: State,
    pub owner: Owner,
    pub place: Place,
}

#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub known: Vec<Known>,
    /// What the current agent holds everything of; None: there is none, or it does not say.
    pub held: Option<BTreeSet<MountId>>,
    /// Those of them that this broker has taken away.
    pub removed: BTreeSet<MountId>,
    /// FUSE mounts of ours at targets that the broker does not know: major and minor number.
    pub strays: BTreeSet<(u32, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// The agent holds what the broker has ended: it shall let go.
    HeldThoughOver(MountId),
    /// The agent holds what this broker was never shown, or did not take. It may be in use in a container, and ends
    /// with its connection: reported.
    HeldUnknown(MountId),
    /// The broker takes it for served, and nobody holds it: given anew.
    ServedByNobody(MountId),
    /// The broker waits for an agent for it, and the agent holds it: served.
    HeldThoughOrphaned(MountId),
    /// It lives, but not at its target. It may be in use in a container: reported.
    Displaced(MountId),
    /// The kernel alone has it: looked at like every dead mount.
    Stray(u32, u32),
}

impl Finding {
    fn mount(self) -> Option<MountId> {
        match self {
            Self::HeldThoughOver(id)
            | Self::HeldUnknown(id)
            | Self::ServedByNobody(id)
            | Self::HeldThoughOrphaned(id)
            | Self::Displaced(id) => Some(id),
            Self::Stray(..) => None,
        }
    }

    /// For these nothing is done, so they are found again and again.
    fn is_report(self) -> bool {
        matches!(self, Self::HeldUnknown(_) | Self::Displaced(_) | Self::Stray(..))
    }
}

/// Where they differ: one finding for each mount at most.
pub fn compare(seen: &Snapshot) -> BTreeSet<Finding> {
    let known: BTreeSet<MountId> = seen.known.iter().map(|mount| mount.id).collect();
    let held = seen.held.iter().flatten().copied();
    let unknown = held.filter(|id| !known.contains(id)).map(|id| match seen.removed.contains(&id) {
        true => Finding::HeldThoughOver(id),
        false => Finding::HeldUnknown(id),
    });
    let differing = seen.known.iter().filter_map(|mount| judge(mount, seen.held.as_ref()));
    let strays = seen.strays.iter().map(|(major, minor)| Finding::Stray(*major, *minor));
    differing.chain(unknown).chain(strays).collect()
}

fn judge(mount: &Known, held: Option<&BTreeSet<MountId>>) -> Option<Finding> {
    let id = mount.id;
    let is_held = held.map(|held| held.contains(&id));
    match (mount.state, mount.owner) {
        // Under way: whoever does it says how it ended.
        (State::Preparing | State::Adopting(_), _) => None,
        (State::Dead | State::Unpublished, _) => {
            (is_held == Some(true)).then_some(Finding::HeldThoughOver(id))
        }
        (State::Serving, Owner::Gone) => Some(Finding::ServedByNobody(id)),
        (State::Serving, Owner::Current) if is_held == Some(false) => Some(Finding::ServedByNobody(id)),
        (State::Orphaned(_), Owner::Current) if is_held == Some(true) => {
            Some(Finding::HeldThoughOrphaned(id))
        }
        _ if mount.place != Place::Target => Some(Finding::Displaced(id)),
        _ => None,
    }
}

fn place(table: &[MountEntry], mount: &Mount) -> Place {
    let is_it = |entry: &MountEntry| entry.connection() == mount.connection;
    if stack_at(table, mount.target.path()).into_iter().any(is_it) {
        Place::Target
    } else if table.iter().any(is_it) {
        Place::Elsewhere
    } else {
        Place::Nowhere
    }
}

/// What earlier looks have left.
#[derive(Debug, Default)]
struct Comparison {
    /// Found once.
    before: BTreeSet<Finding>,
    /// Reported, and still so.
    told: BTreeSet<Finding>,
}

/// Runs until the broker is dropped or stopped.
pub(super) fn watch(broker: &Weak<Broker>) {
    let mut comparison = Comparison::default();
    loop {
        let Some(every) = broker.upgrade().map(|broker| broker.config.pace.compare_every) else { return };
        std::thread::sleep(every);
        let Some(broker) = broker.upgrade().filter(|broker| !broker.stopped()) else { return };
        comparison.look(&broker);
    }
}

impl Comparison {
    fn look(&mut self, broker: &Arc<Broker>) {
        let Some(seen) = broker.snapshot() else {
            self.before.clear();
            return;
        };
        let found = compare(&seen);
        self.told.retain(|finding| found.contains(finding));
        let twice: Vec<Finding> = found.intersection(&self.before).copied().collect();
        self.before = found;
        let mut to_give = false;
        for finding in twice {
            match finding.is_report() {
                true if !self.told.insert(finding) => {}
                true => broker.report(finding),
                false => to_give |= broker.mend(finding),
            }
        }
        if to_give && let Some(agent) = broker.agents.current() {
            broker.give_all(&agent);
        }
    }
}

impl Broker {
    /// None: agents come or go, and what they hold changes hands.
    fn snapshot(&self) -> Option<Snapshot> {
        if self.switching.load(Ordering::SeqCst) || self.is_giving() {
            return None;
        }
        let agent = self.agents.current();
        let held = agent.as_ref().and_then(|agent| self.held_by(agent));
        let table = match self.kernel.table() {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!(%error, "agent, broker and kernel are not compared");
                return None;
            }
        };
        let mounts = self.table.all();
        for mount in &mounts {
            self.note_if_ended(mount);
        }
        let strays = candidates(&table, &self.config.kubelet_dirs);
        let strays = strays.iter().map(|stray| stray.connection);
        let strays = strays.filter(|stray| !mounts.iter().any(|mount| mount.connection == *stray));
        let seen = Snapshot {
            known: mounts.iter().map(|mount| self.look_at(mount, agent.as_deref(), &table)).collect(),
            removed: held.iter().flatten().copied().filter(|id| self.table.was_removed(*id)).collect(),
            held,
            strays: strays.map(|Connection { major, minor }| (major, minor)).collect(),
        };
        // Nothing has begun meanwhile.
        (!self.switching.load(Ordering::SeqCst) && !self.is_giving()).then_some(seen)
    }

    fn is_giving(&self) -> bool {
        matches!(self.giving.try_lock(), Err(TryLockError::WouldBlock))
    }

    fn look_at(&self, mount: &Mount, current: Option<&AgentLink>, table: &[MountEntry]) -> Known {
        let agent = mount.agent();
        let owner = match current {
            Some(current) if *current.identity() == agent => Owner::Current,
            _ if self.agents.has(&agent) => Owner::Connected,
            _ => Owner::Gone,
        };
        Known { id: mount.id, state: mount.state(), owner, place: place(table, mount) }
    }

    fn held_by(&self, agent: &AgentLink) -> Option<BTreeSet<MountId>> {
        match agent.ask(AgentRequest::Holding, &[], GOODBYE_LIMIT) {
            // An agent that is asked to stop says that it holds nothing, and serves until its mounts are safe.
            Ok((AgentAnswer::Holding { mounts }, _)) if mounts.is_empty() => {
                (self.ends.of(agent.identity()) != AgentEnd::Asked).then(BTreeSet::new)
            }
            Ok((AgentAnswer::Holding { mounts }, _)) => Some(mounts.into_iter().collect()),
            _ => None,
        }
    }

    fn report(&self, finding: Finding) {
        let known = finding.mount().and_then(|id| self.table.get(id));
        match (finding, known) {
            (Finding::Displaced(id), Some(mount)) => tracing::warn!(
                mount = %id, volume = %mount.spec.id, target_path = %mount.target.path().display(),
                "broker and agent hold a mount that the kernel does not have at its target: somebody has unmounted it there, and somebody else still uses it"
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
                self.renewals.wake();
            }
            _ => {}
        }
    }

    /// True if there is something to be given to the agent.
    fn mend(&self, finding: Finding) -> bool {
        let Some(id) = finding.mount() else { return false };
        let known = self.table.get(id);
        let turn = known.as_ref().map(|mount| target_key(mount.target.path()));
        let Ok(_turn) = self.busy.enter(turn.as_slice(), TURN_LIMIT) else { return false };
        // It may have come to an end by itself before our turn came.
        if !self.snapshot().is_some_and(|seen| compare(&seen).contains(&finding)) {
            return false;
        }
        match (finding, known) {
            (Finding::HeldThoughOver(_), known) => {
                let state = known.map(|mount| mount.state());
                tracing::warn!(mount = %id, broker = ?state, "the agent holds a mount that the broker has ended: it is told to let go");
                if let Some(agent) = self.agents.current() {
                    self.relieve(&agent, id, "the broker has ended it");
                }
                false
            }
            (Finding::ServedByNobody(_), Some(mount)) => {
                tracing::warn!(mount = %id, volume = %mount.spec.id, "the broker takes a mount for served that the agent does not hold: it is given to it anew");
                self.orphan(&mount, &mount.agent(), "its agent does not hold it");
                self.wake_watcher();
                true
            }
            (Finding::HeldThoughOrphaned(_), Some(mount)) => {
                tracing::warn!(mount = %id, volume = %mount.spec.id, "the agent holds a mount that the broker takes for orphaned");
                self.enter_if(&mount, State::Serving, "its agent holds it", |state, _| {
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
    use std::time::Instant;

    const ID: MountId = MountId(7);

    fn known(state: State) -> Known {
        Known { id: ID, state, owner: Owner::Current, place: Place::Target }
    }

    fn found(known: Known, held: Option<&[u64]>) -> Vec<Finding> {
        let held = held.map(|ids| ids.iter().copied().map(MountId).collect());
        compare(&Snapshot { known: vec![known], held, ..Snapshot::default() }).into_iter().collect()
    }

    fn states() -> [State; 6] {
        let now = Instant::now();
        [
            State::Preparing,
            State::Serving,
            State::Orphaned(now),
            State::Adopting(now),
            State::Dead,
            State::Unpublished,
        ]
    }

    #[test]
    fn what_all_three_hold_is_well() {
        assert_eq!(found(known(State::Serving), Some(&[7])), []);
        for state in states() {
            assert_eq!(found(known(state), None), [], "{state:?}: the agent said nothing");
        }
        for state in [State::Preparing, State::Adopting(Instant::now())] {
            for place in [Place::Target, Place::Elsewhere, Place::Nowhere] {
                for held in [&[][..], &[7][..]] {
                    let under_way = Known { place, ..known(state) };
                    assert_eq!(found(under_way, Some(held)), [], "{under_way:?}");
                }
            }
        }
    }

    #[test]
    fn what_only_the_agent_holds_is_ended_if_the_broker_has_ended_it_and_else_reported() {
        for state in [State::Dead, State::Unpublished] {
            assert_eq!(found(known(state), Some(&[7])), [Finding::HeldThoughOver(ID)]);
            assert_eq!(found(known(state), Some(&[])), []);
        }
        let unknown = |removed: &[u64]| Snapshot {
            held: Some([ID].into()),
            removed: removed.iter().copied().map(MountId).collect(),
            ..Snapshot::default()
        };
        assert_eq!(compare(&unknown(&[7])), [Finding::HeldThoughOver(ID)].into());
        assert_eq!(compare(&unknown(&[8])), [Finding::HeldUnknown(ID)].into());
    }

    #[test]
    fn what_nobody_holds_is_given_anew_and_what_the_agent_holds_is_served() {
        assert_eq!(found(known(State::Serving), Some(&[])), [Finding::ServedByNobody(ID)]);
        let orphaned = State::Orphaned(Instant::now());
        assert_eq!(found(known(orphaned), Some(&[7])), [Finding::HeldThoughOrphaned(ID)]);
        assert_eq!(found(known(orphaned), Some(&[])), [], "it was refused, and expires");
        // Of another agent: whoever gives mounts sees to it, unless that agent is nowhere.
        for (owner, expected) in
            [(Owner::Connected, vec![]), (Owner::Gone, vec![Finding::ServedByNobody(ID)])]
        {
            assert_eq!(found(Known { owner, ..known(State::Serving) }, Some(&[])), expected, "{owner:?}");
            assert_eq!(found(Known { owner, ..known(orphaned) }, Some(&[7])), [], "{owner:?}");
        }
    }

    #[test]
    fn a_mount_that_lives_elsewhere_is_reported_and_not_ended() {
        for place in [Place::Elsewhere, Place::Nowhere] {
            assert_eq!(found(Known { place, ..known(State::Serving) }, Some(&[7])), [Finding::Displaced(ID)]);
        }
        assert!(Finding::Displaced(ID).is_report() && Finding::HeldUnknown(ID).is_report());
        let strays = Snapshot { strays: [(0, 9)].into(), ..Snapshot::default() };
        assert_eq!(compare(&strays), [Finding::Stray(0, 9)].into());
    }
}
