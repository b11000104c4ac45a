//! Writes that were given up and may come to pass all the same: the store carries a request out when nobody waits for its
//! answer any more. What such a write leaves is ours, not somebody else's, and goes if nothing of ours is there any more.

use super::area::Area;
use super::file::now_ns;
use super::locks::parent;
use super::names::{Entry, LATE, State};
use super::record::{Late, Record};
use super::staged::lies_at_or_below;
use crate::lock::lock;
use futures::{StreamExt, TryStreamExt};
use link::Cause;
use link::writable::Wrong;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;
use store::{Condition, Seen, WriteId};

/// A signed request is refused after a quarter of an hour at the latest; by then it is known what came of it, nanoseconds.
const KEPT_NS: i64 = 20 * 60 * 1_000_000_000;
/// More are not remembered.
pub(super) const MOST: usize = 1024;
/// How often it is looked what they have left.
pub(super) const LOOK: Duration = Duration::from_secs(60);

/// Ids that one frame of the journal forgets.
const FORGOTTEN_AT_ONCE: usize = 1000;
/// Names that are looked at at once.
const LOOKS_AT_ONCE: usize = 4;

/// What is remembered anew of each id; None: nothing any more.
pub(super) type Changed = BTreeMap<String, Option<Late>>;

/// Ids of writes to `path` that nobody asks about any more.
#[derive(Default)]
pub(super) struct GivenUp {
    pub(super) path: Vec<u8>,
    pub(super) writes: Vec<String>,
    /// What is at `path` now: nothing (true), or something new of ours (false). None: as before.
    pub(super) is_removed: Option<bool>,
}

pub(super) fn late_entry(id: &str, late: Option<&Late>) -> Result<Entry, Wrong> {
    let value = late.map(postcard::to_stdvec).transpose().map_err(|_| Wrong::Cause(Cause::Internal))?;
    Ok(([&[LATE][..], id.as_bytes()].concat(), value))
}

/// The writes of a file that is dropped, which nobody asks about any more.
pub(super) fn late_of(record: &Record) -> Changed {
    let given_up_ns = now_ns();
    let objects = record.object().into_iter().chain(record.former.iter().cloned());
    let late = objects.flat_map(|object| {
        let late = Late { path: object.path, given_up_ns, is_removed: object.version.is_none() };
        object.writes.into_iter().map(move |id| (id, Some(late.clone())))
    });
    late.collect()
}

impl Area {
    /// What changes by that of what is remembered: in the journal, and (by [`State::remember_late`]) in memory.
    pub(super) fn give_up(&self, given_up: &GivenUp) -> Result<(Vec<Entry>, Changed), Wrong> {
        let now = now_ns();
        let mut changed = BTreeMap::new();
        if !given_up.writes.is_empty() || given_up.is_removed.is_some() {
            let state = self.state();
            if let Some(is_removed) = given_up.is_removed {
                let is_other = |late: &Late| late.path == given_up.path && late.is_removed != is_removed;
                for (id, late) in state.late.iter().filter(|(_, late)| is_other(late)) {
                    changed.insert(id.clone(), Some(Late { is_removed, ..late.clone() }));
                }
            }
            let is_removed = given_up.is_removed.unwrap_or(false);
            for id in &given_up.writes {
                let late = Late { path: given_up.path.clone(), given_up_ns: now, is_removed };
                changed.insert(id.clone(), Some(late));
            }
            if !given_up.writes.is_empty() {
                changed.extend(state.surplus_late(given_up.writes.len()));
            }
        }
        let entries =
            changed.iter().map(|(id, late)| late_entry(id, late.as_ref())).collect::<Result<_, _>>()?;
        Ok((entries, changed))
    }

    /// What is seen at this path is of a write of ours that was given up.
    fn is_late(&self, path: &[u8], seen: &Seen) -> bool {
        let Some(id) = seen.write else { return false };
        self.state().late.get(&id.to_string()).is_some_and(|late| late.path == path)
    }

    /// As [`Self::is_late`], or of one that a loss of power has taken out of the journal.
    pub(super) fn is_of_no_record(&self, path: &[u8], seen: &Seen) -> bool {
        self.is_late(path, seen) || self.is_lost(seen, usize::MAX)
    }

    /// What came late to where nothing is to be goes.
    pub(super) async fn remove_late(&self) {
        let paths: BTreeSet<Vec<u8>> = {
            let state = self.state();
            let is_free = |late: &&Late| {
                late.is_removed && !state.paths.contains_key(&late.path) && !state.is_gone(&late.path)
            };
            state.late.values().filter(is_free).map(|late| late.path.clone()).collect()
        };
        let begun_ns = now_ns();
        let unseen = Mutex::new(BTreeSet::new());
        let looks = futures::stream::iter(paths).for_each_concurrent(LOOKS_AT_ONCE, async |path| {
            // Nobody makes it meanwhile.
            let _held = self.locks.take(&[&path]).await;
            let is_free = {
                let state = self.state();
                !state.paths.contains_key(&path) && !state.is_gone(&path)
            };
            // Tried again at the next look.
            if is_free && self.remove_late_at(&path).await.is_err() {
                lock(&unseen).insert(path);
            }
        });
        looks.await;
        let unseen = unseen.into_inner().unwrap_or_default();
        self.forget_over(begun_ns, &unseen).await;
    }

    /// What could not come to pass any more when it was looked for last is not asked about again. `unseen`: where nobody could look.
    async fn forget_over(&self, looked_ns: i64, unseen: &BTreeSet<Vec<u8>>) {
        let over: Vec<String> = {
            let state = self.state();
            let is_over = |late: &Late| {
                looked_ns.saturating_sub(late.given_up_ns) > KEPT_NS
                    && !unseen.contains(&late.path)
                    && !state.is_being_moved_to(&late.path)
            };
            state.late.iter().filter(|(_, late)| is_over(late)).map(|(id, _)| id.clone()).collect()
        };
        for some in over.chunks(FORGOTTEN_AT_ONCE) {
            let changed: Changed = some.iter().map(|id| (id.clone(), None)).collect();
            let entries = some.iter().map(|id| late_entry(id, None)).collect::<Result<Vec<_>, _>>();
            let Ok(entries) = entries else { return };
            if self.commit(entries, move |state| state.remember_late(changed)).await.is_err() {
                return; // its error has been logged
            }
        }
    }

    /// As [`Self::remove_late`], of what is below a directory in which nobody makes anything meanwhile. True: there was something.
    pub(super) async fn remove_late_below(&self, top: &[u8]) -> Result<bool, Wrong> {
        let paths: BTreeSet<Vec<u8>> = {
            let state = self.state();
            let is_below = |late: &&Late| late.is_removed && lies_at_or_below(&late.path, top);
            let is_free = |late: &&Late| !state.paths.contains_key(&late.path) && !state.is_gone(&late.path);
            state.late.values().filter(is_below).filter(is_free).map(|late| late.path.clone()).collect()
        };
        let removed =
            futures::stream::iter(paths).map(|path| async move { self.remove_late_at(&path).await });
        let removed: Vec<bool> = removed.buffer_unordered(LOOKS_AT_ONCE).try_collect().await?;
        Ok(removed.contains(&true))
    }

    async fn remove_late_at(&self, path: &[u8]) -> Result<bool, Wrong> {
        let failed = |what| move |error| self.store_wrong(what, path, &error);
        let writes: Vec<WriteId> = {
            let state = self.state();
            let here = state.late.iter().filter(|(_, late)| late.path == path);
            here.filter_map(|(id, _)| WriteId::parse(id)).collect()
        };
        for id in writes {
            self.sink.withdraw(path, id, None).await.map_err(failed("removal"))?;
        }
        let seen = self.sink.look(path).await.map_err(failed("look"))?;
        let Some(seen) = seen.filter(|seen| self.is_late(path, seen)) else { return Ok(false) };
        let shown = String::from_utf8_lossy(path);
        tracing::warn!(volume = %self.volume, path = %shown, "a write that was given up has come to pass: it is removed");
        self.sink.delete(path, &Condition::Is(seen.version)).await.map_err(failed("removal"))?;
        self.unplace(path).await?; // a listing tells it, too
        Ok(true)
    }
}

impl State {
    /// A directory at or above it is being made by a rename, which may copy something there, or was made by one that came to nothing.
    fn is_being_moved_to(&self, path: &[u8]) -> bool {
        let above = std::iter::successors(Some(path), |path| (!path.is_empty()).then(|| parent(path)));
        above.filter_map(|path| self.moved.get(path)).any(Option::is_none)
    }

    /// The oldest of those that are remembered, where `more` would make them too many.
    pub(super) fn surplus_late(&self, more: usize) -> Changed {
        let surplus = (self.late.len() + more).saturating_sub(MOST);
        if surplus == 0 {
            return Changed::new();
        }
        let mut oldest: Vec<_> = self.late.iter().map(|(id, late)| (late.given_up_ns, id)).collect();
        oldest.sort_unstable();
        oldest.into_iter().take(surplus).map(|(_, id)| (id.clone(), None)).collect()
    }

    pub(super) fn remember_late(&mut self, changed: Changed) {
        for (id, late) in changed {
            match late {
                Some(late) => drop(self.late.insert(id, late)),
                None => drop(self.late.remove(&id)),
            }
        }
    }
}
