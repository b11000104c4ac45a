//! Which mounts this agent has, from the first line of their publish or adoption on.
//!
//! ```text
//!             arrive               settle
//!  (nothing) ───────► Arriving ─────────────► Here ─────► (removed)
//!      ▲                 │  │ end              end, or remove
//!      └── dropped ──────┘  ▼
//!      └── dropped ──── Arriving, ended: cannot settle
//! ```
//!
//! The broker may take away what is still on its way here: the publish or adoption learns that when it wants to settle
//! it. Knows nothing of what a mount is.

use link::broker::MountId;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use volume::ScopeId;

#[derive(Debug)]
pub(super) struct Mounts<E> {
    slots: Mutex<HashMap<MountId, Slot<E>>>,
}

#[derive(Debug)]
enum Slot<E> {
    Arriving { scope: ScopeId, namespace: Option<String>, ended: bool },
    Here(E),
}

/// The right to bring this mount here. Dropped, it is as if it had never been on its way.
#[derive(Debug)]
pub(crate) struct Arrival<'m, E> {
    mounts: &'m Mounts<E>,
    id: MountId,
}

/// Why a mount cannot set out for here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Present {
    UnderWay,
    Here,
}

/// Why a mount was not settled.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unsettled<R> {
    /// It was taken away before it was here.
    Ended,
    Refused(R),
}

impl<E> Default for Mounts<E> {
    fn default() -> Self {
        Self { slots: Mutex::default() }
    }
}

impl<E> Mounts<E> {
    fn lock(&self) -> MutexGuard<'_, HashMap<MountId, Slot<E>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It will use this scope, for a pod of this namespace, from now on.
    pub(super) fn arrive(
        &self,
        id: MountId,
        scope: ScopeId,
        namespace: Option<String>,
    ) -> Result<Arrival<'_, E>, Present> {
        let mut slots = self.lock();
        match slots.get(&id) {
            Some(Slot::Here(_)) => Err(Present::Here),
            Some(Slot::Arriving { .. }) => Err(Present::UnderWay),
            None => {
                slots.insert(id, Slot::Arriving { scope, namespace, ended: false });
                Ok(Arrival { mounts: self, id })
            }
        }
    }

    /// Takes it away: from here at once; if it is still on its way it will not be settled.
    pub(super) fn end(&self, id: MountId) -> Option<E> {
        let mut slots = self.lock();
        match slots.get_mut(&id)? {
            Slot::Arriving { ended, .. } => {
                *ended = true;
                None
            }
            Slot::Here(_) => match slots.remove(&id) {
                Some(Slot::Here(entry)) => Some(entry),
                _ => None,
            },
        }
    }

    /// Those that are here or on their way.
    pub(super) fn ids(&self) -> Vec<MountId> {
        self.lock().keys().copied().collect()
    }

    /// How many are on their way.
    pub(super) fn coming(&self) -> usize {
        self.lock().values().filter(|slot| matches!(slot, Slot::Arriving { .. })).count()
    }

    pub(super) fn get<T>(&self, id: MountId, view: impl FnOnce(&E) -> T) -> Option<T> {
        match self.lock().get(&id) {
            Some(Slot::Here(entry)) => Some(view(entry)),
            _ => None,
        }
    }

    /// Of each that is here.
    pub(super) fn map<T>(&self, mut view: impl FnMut(&mut E) -> T) -> Vec<T> {
        let mut slots = self.lock();
        let here = slots.values_mut().filter_map(|slot| match slot {
            Slot::Here(entry) => Some(entry),
            Slot::Arriving { .. } => None,
        });
        here.map(&mut view).collect()
    }

    /// Does any that is here or on its way use this scope?
    pub(super) fn uses(&self, id: &ScopeId, of: impl Fn(&E) -> &ScopeId) -> bool {
        self.lock().values().any(|slot| match slot {
            Slot::Here(entry) => of(entry) == id,
            Slot::Arriving { scope, .. } => scope == id,
        })
    }

    /// Are all that are here or on their way and use this scope of this namespace?
    pub(super) fn are_of(
        &self,
        namespace: Option<&str>,
        id: &ScopeId,
        of: impl Fn(&E) -> (&ScopeId, Option<&str>),
    ) -> bool {
        self.lock().values().all(|slot| {
            let (scope, theirs) = match slot {
                Slot::Here(entry) => of(entry),
                Slot::Arriving { scope, namespace, .. } => (scope, namespace.as_deref()),
            };
            scope != id || theirs == namespace
        })
    }
}

impl<E> Arrival<'_, E> {
    /// It is here from now on, unless it was taken away. `make` is called under the lock: a thread that ends all that
    /// are here ends this one, too.
    pub(super) fn settle<R>(self, make: impl FnOnce() -> Result<E, R>) -> Result<(), Unsettled<R>> {
        let mut slots = self.mounts.lock();
        let result = match slots.get(&self.id) {
            Some(Slot::Arriving { ended: false, .. }) => make().map_err(Unsettled::Refused),
            _ => Err(Unsettled::Ended),
        };
        let settled = result.map(|entry| drop(slots.insert(self.id, Slot::Here(entry))));
        drop(slots); // dropping ourselves takes it, too
        settled
    }
}

impl<E> Drop for Arrival<'_, E> {
    fn drop(&mut self) {
        let mut slots = self.mounts.lock();
        if matches!(slots.get(&self.id), Some(Slot::Arriving { .. })) {
            slots.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: MountId = MountId(7);

    fn scope(digit: &str) -> ScopeId {
        ScopeId::parse(&digit.repeat(32)).unwrap()
    }

    fn arrive<'m, E>(mounts: &'m Mounts<E>, digit: &str) -> Result<Arrival<'m, E>, Present> {
        mounts.arrive(ID, scope(digit), None)
    }

    fn settle(arrival: Arrival<'_, u8>, entry: u8) -> Result<(), Unsettled<()>> {
        arrival.settle(|| Ok(entry))
    }

    #[test]
    fn what_is_taken_away_on_its_way_does_not_arrive() {
        let mounts = Mounts::default();
        let arrival = arrive(&mounts, "a").unwrap();
        assert_eq!((mounts.ids(), mounts.get(ID, |e| *e), mounts.coming()), (vec![ID], None, 1));
        assert_eq!(mounts.end(ID), None);
        assert_eq!(arrive(&mounts, "a").unwrap_err(), Present::UnderWay, "until it has noticed");
        let mut made = false;
        let settled = arrival.settle(|| {
            made = true;
            Ok::<_, ()>(1)
        });
        assert_eq!((settled, made), (Err(Unsettled::Ended), false));
        assert!(mounts.ids().is_empty());
        settle(arrive(&mounts, "a").unwrap(), 2).unwrap();
        assert_eq!(mounts.end(ID), Some(2));
        assert_eq!((mounts.end(ID), mounts.ids()), (None, vec![]));
    }

    #[test]
    fn one_at_a_time_is_on_its_way_and_none_where_one_is() {
        let mounts = Mounts::default();
        let arrival = arrive(&mounts, "a").unwrap();
        assert_eq!(arrive(&mounts, "a").unwrap_err(), Present::UnderWay);
        settle(arrival, 1).unwrap();
        assert_eq!(arrive(&mounts, "a").unwrap_err(), Present::Here);
        assert_eq!(mounts.map(|e| *e), [1]);
    }

    #[test]
    fn what_fails_on_its_way_or_is_refused_leaves_nothing() {
        let mounts = Mounts::<u8>::default();
        drop(arrive(&mounts, "a").unwrap());
        assert!(mounts.ids().is_empty());
        let refused = arrive(&mounts, "a").unwrap().settle(|| Err("stopping"));
        assert_eq!((refused, mounts.ids()), (Err(Unsettled::Refused("stopping")), vec![]));
    }

    #[test]
    fn a_scope_is_used_by_what_is_on_its_way() {
        let mounts = Mounts::<ScopeId>::default();
        let uses = |digit| mounts.uses(&scope(digit), |e| e);
        let arrival = arrive(&mounts, "a").unwrap();
        assert!(uses("a") && !uses("b"));
        arrival.settle(|| Ok::<_, ()>(scope("b"))).unwrap();
        assert!(!uses("a") && uses("b"));
        mounts.end(ID);
        assert!(!uses("b"));
    }

    #[test]
    fn a_pod_of_another_namespace_counts_from_the_first_line_of_its_publish_on() {
        let mounts = Mounts::<(ScopeId, &str)>::default();
        let are_of = |ns: Option<&str>, digit| mounts.are_of(ns, &scope(digit), |(id, ns)| (id, Some(ns)));
        assert!(are_of(Some("one"), "a"));
        let first = mounts.arrive(ID, scope("a"), Some("one".into())).unwrap();
        assert!(are_of(Some("one"), "a") && are_of(Some("two"), "b"));
        assert!(!are_of(Some("two"), "a") && !are_of(None, "a"));
        first.settle(|| Ok::<_, ()>((scope("a"), "one"))).unwrap();
        assert!(are_of(Some("one"), "a") && !are_of(Some("two"), "a"));
        let second = mounts.arrive(MountId(8), scope("a"), Some("two".into())).unwrap();
        assert!(!are_of(Some("one"), "a") && !are_of(Some("two"), "a"));
        drop(second);
        assert!(are_of(Some("one"), "a"));
    }

    /// Whatever comes first: what was taken away is not here, and its publish has learned it or has it taken.
    #[test]
    fn an_end_and_an_arrival_at_once_leave_nothing_here() {
        let mounts = Mounts::default();
        for round in 0..2000_u32 {
            let arrival = arrive(&mounts, "a").unwrap();
            let (settled, ended) = std::thread::scope(|threads| {
                let settling = threads.spawn(|| arrival.settle(|| Ok::<_, ()>(round)));
                let ended = mounts.end(ID);
                (settling.join().unwrap(), ended)
            });
            assert_eq!(settled.is_ok(), ended.is_some(), "round {round}");
            assert!(mounts.ids().is_empty(), "round {round}");
        }
    }
}
