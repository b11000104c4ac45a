//! What agent, broker and kernel hold, compared: a pure function from a snapshot to findings (see `comparison`).

use super::mounts_table::State;
use link::broker::MountId;
use mounts::Connection;
use std::collections::BTreeSet;

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
    /// One that takes over, or is drained.
    Connected,
    Gone,
}

/// One mount, as the broker and the kernel have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountView {
    pub id: MountId,
    pub state: State,
    pub owner: Owner,
    pub place: Place,
    /// By the agent that was given it last.
    pub refused: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub known: Vec<MountView>,
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
    /// The broker takes it for served, and no agent holds it: adopted again.
    ServedByNobody(MountId),
    /// The agent has refused it, and may take it by now (what its predecessor has left of a disk that hung): given to it again, until its
    /// time is over.
    Refused(MountId),
    /// The broker waits for an agent for it, and the agent holds it: served.
    HeldThoughOrphaned(MountId),
    /// It lives, but not at its target. It may be in use in a container: reported.
    Displaced(MountId),
    /// The kernel alone has it: looked at like every dead mount.
    Stray(u32, u32),
}

impl Finding {
    pub(super) fn mount(self) -> Option<MountId> {
        match self {
            Self::HeldThoughOver(id)
            | Self::HeldUnknown(id)
            | Self::ServedByNobody(id)
            | Self::Refused(id)
            | Self::HeldThoughOrphaned(id)
            | Self::Displaced(id) => Some(id),
            Self::Stray(..) => None,
        }
    }

    /// For these nothing is done, so they are found again and again.
    pub(super) fn is_report(self) -> bool {
        matches!(self, Self::HeldUnknown(_) | Self::Displaced(_) | Self::Stray(..))
    }
}

/// Looks, one after the other: what is under way in one of them is over in the next.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Found once.
    before: BTreeSet<Finding>,
    /// Reported, and still so.
    reported: BTreeSet<Finding>,
}

impl Comparison {
    /// What is to be done: what was found twice in a row, but what is only reported once. None: agents come or go, and
    /// what they hold changes hands; what was found before counts for nothing.
    pub fn look(&mut self, seen: Option<&Snapshot>) -> Vec<Finding> {
        let Some(seen) = seen else {
            self.before.clear();
            return Vec::new();
        };
        let found = compare(seen);
        self.reported.retain(|finding| found.contains(finding));
        let twice: Vec<Finding> = found.intersection(&self.before).copied().collect();
        self.before = found;
        twice.into_iter().filter(|finding| !finding.is_report() || self.reported.insert(*finding)).collect()
    }
}

/// Those of ours in the kernel that are none of the broker's: for [`Snapshot::strays`].
pub(super) fn strays(ours: impl Iterator<Item = Connection>, known: &[Connection]) -> BTreeSet<(u32, u32)> {
    ours.filter(|it| !known.contains(it)).map(|Connection { major, minor }| (major, minor)).collect()
}

/// Where they differ: one finding for each mount at most.
pub(super) fn compare(seen: &Snapshot) -> BTreeSet<Finding> {
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

fn judge(mount: &MountView, held: Option<&BTreeSet<MountId>>) -> Option<Finding> {
    let id = mount.id;
    let is_held = held.map(|held| held.contains(&id));
    match (mount.state, mount.owner) {
        // Under way: the thread that does it says how it ended.
        (State::Preparing | State::Adopting(_), _) => None,
        (State::Dead | State::Unpublished, _) => {
            (is_held == Some(true)).then_some(Finding::HeldThoughOver(id))
        }
        (State::Serving, Owner::Gone) => Some(Finding::ServedByNobody(id)),
        (State::Serving, Owner::Current) if is_held == Some(false) => Some(Finding::ServedByNobody(id)),
        (State::Orphaned(_), Owner::Current) if is_held == Some(true) => {
            Some(Finding::HeldThoughOrphaned(id))
        }
        (State::Orphaned(_), Owner::Current) if mount.refused => Some(Finding::Refused(id)),
        _ if mount.place != Place::Target => Some(Finding::Displaced(id)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const ID: MountId = MountId(7);

    fn known(state: State) -> MountView {
        MountView { id: ID, state, owner: Owner::Current, place: Place::Target, refused: false }
    }

    fn found(known: MountView, held: Option<&[u64]>) -> Vec<Finding> {
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
                    let under_way = MountView { place, ..known(state) };
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
        assert_eq!(found(known(orphaned), Some(&[])), [], "it is being given, and expires");
        let refused = MountView { refused: true, ..known(orphaned) };
        assert_eq!(found(refused, Some(&[])), [Finding::Refused(ID)]);
        assert_eq!(found(refused, Some(&[7])), [Finding::HeldThoughOrphaned(ID)]);
        assert_eq!(found(MountView { owner: Owner::Connected, ..refused }, Some(&[])), []);
        // Of another agent: adoption sees to it, unless that agent is gone.
        for (owner, expected) in
            [(Owner::Connected, vec![]), (Owner::Gone, vec![Finding::ServedByNobody(ID)])]
        {
            assert_eq!(found(MountView { owner, ..known(State::Serving) }, Some(&[])), expected, "{owner:?}");
            assert_eq!(found(MountView { owner, ..known(orphaned) }, Some(&[7])), [], "{owner:?}");
        }
    }

    #[test]
    fn what_is_found_twice_in_a_row_is_mended_each_time_and_reported_once_as_long_as_it_is_so() {
        let lost =
            Snapshot { known: vec![known(State::Serving)], held: Some([].into()), ..Snapshot::default() };
        let stray = Snapshot { strays: [(0, 9)].into(), ..Snapshot::default() };
        let well = Snapshot::default();
        let mut comparison = Comparison::default();
        for (seen, expected) in [
            (Some(&lost), vec![]),
            (Some(&lost), vec![Finding::ServedByNobody(ID)]),
            (Some(&lost), vec![Finding::ServedByNobody(ID)]),
            (None, vec![]),
            (Some(&lost), vec![]),
            (Some(&stray), vec![]),
            (Some(&stray), vec![Finding::Stray(0, 9)]),
            (Some(&stray), vec![]),
            // It was reported while agents came and went, and is so still.
            (None, vec![]),
            (Some(&stray), vec![]),
            (Some(&stray), vec![]),
            (Some(&well), vec![]),
            (Some(&stray), vec![]),
            (Some(&stray), vec![Finding::Stray(0, 9)]),
        ] {
            assert_eq!(comparison.look(seen), expected, "{seen:?}");
        }
    }

    #[test]
    fn a_mount_that_the_broker_knows_is_no_stray() {
        let of = |minor| Connection { major: 0, minor };
        let ours = [of(3), of(4), of(5)];
        assert_eq!(strays(ours.into_iter(), &[of(3), of(5), of(6)]), [(0, 4)].into());
        assert_eq!(strays(ours.into_iter(), &ours), [].into());
    }

    #[test]
    fn a_mount_that_lives_elsewhere_is_reported_and_not_ended() {
        for place in [Place::Elsewhere, Place::Nowhere] {
            assert_eq!(
                found(MountView { place, ..known(State::Serving) }, Some(&[7])),
                [Finding::Displaced(ID)]
            );
        }
        assert!(Finding::Displaced(ID).is_report() && Finding::HeldUnknown(ID).is_report());
        let strays = Snapshot { strays: [(0, 9)].into(), ..Snapshot::default() };
        assert_eq!(compare(&strays), [Finding::Stray(0, 9)].into());
    }
}
