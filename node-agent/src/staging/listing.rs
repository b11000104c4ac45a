//! Listings: what the store has, with what the area says of it.

use super::Outcome;
use super::area::Area;
use super::conditions::PROBE;
use super::locks::name;
use super::names::State;
use crate::lock::lock;
use cache::meta::{Attributes, Kind, Lookup, MetaError, ROOT};
use link::Cause;
use link::writable::{Done, Name, Node, Wrong};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use tokio::time::Instant;

/// Where a listing goes on after "." and after ".."; after a name of the store's: at its inode number.
const AFTER_DOT: u64 = 1;
const AFTER_DOT_DOT: u64 = 2;
/// Set where it goes on among the names that only the area has, which follow the others.
const STAGED: u64 = 1 << 62;
/// Of one answer, bytes: with what surrounds each name it stays below the largest message.
const NAMES_BYTES: usize = 40 << 10;
const NAME_COSTS: usize = 96;

impl Area {
    /// A file keeps its place in a listing, whatever comes of it between two answers. First come the names that the store has, or had
    /// when their files were taken from it, in their order; then the others of the area, by inode number.
    pub(super) async fn read_directory(&self, dir: u64, offset: u64) -> Outcome {
        if offset <= AFTER_DOT_DOT {
            let listed = self.scope.list(dir, self.freshness());
            self.scope.within(self.spec.parameters.store_timeout, Some(dir), listed).await?;
            self.make_way_in(dir).await?;
        }
        let mut names = Names::default();
        let own = self.dir_attributes(dir)?;
        if offset < AFTER_DOT {
            names.add(b".", AFTER_DOT, self.stored_node(&own));
        }
        if offset < AFTER_DOT_DOT {
            let above = self.scope.names.parent(dir).map_err(|e| self.meta_wrong(&e))?.unwrap_or(ROOT);
            let mut node = self.stored_node(&own);
            node.ino = above;
            names.add(b"..", AFTER_DOT_DOT, node);
        }
        let (staged, gone) = {
            let _still = self.moving.read().await;
            let path = self.path_of_dir(dir)?;
            let state = self.state();
            let staged = State::in_dir(&state.paths, &path).filter_map(|(name, ino)| {
                let file = state.files.get(ino)?;
                let (is_listed, speaks) = (file.is_listed(), file.speaks());
                Some((name.to_vec(), InDirectory { ino: *ino, is_listed, speaks }))
            });
            let staged: BTreeMap<Vec<u8>, InDirectory> = staged.collect();
            let moved = State::in_dir(&state.moved, &path).map(|(name, _)| name.to_vec());
            let gone: BTreeSet<Vec<u8>> =
                State::in_dir(&state.gone, &path).map(|(name, _)| name.to_vec()).chain(moved).collect();
            (staged, gone)
        };
        let is_all = offset >= STAGED || self.list_stored(dir, offset, &staged, &gone, &mut names)?;
        *lock(&self.listed_at) = Some(Instant::now());
        if !is_all {
            return Ok(Done::Names(names.list));
        }
        let after = if offset & STAGED != 0 { offset & !STAGED } else { 0 };
        let mut others: Vec<_> =
            staged.into_iter().filter(|(_, file)| !file.is_listed && file.ino > after).collect();
        others.sort_by_key(|(_, file)| file.ino);
        for (name, file) in others {
            let node = if file.speaks { self.staged_node(&file) } else { self.stored_in(dir, &name)? };
            let Some(node) = node else { continue }; // somebody else has removed it
            if !names.add(&name, STAGED | file.ino, node) {
                break;
            }
        }
        Ok(Done::Names(names.list))
    }

    /// Names that the store has, and those of files that were taken from it. True: that was all.
    fn list_stored(
        &self,
        dir: u64,
        offset: u64,
        staged: &BTreeMap<Vec<u8>, InDirectory>,
        gone: &BTreeSet<Vec<u8>>,
        names: &mut Names,
    ) -> Result<bool, Wrong> {
        let after = if offset > AFTER_DOT_DOT { Some(self.name_in(dir, offset)?) } else { None };
        let mut known: BTreeMap<Vec<u8>, (u64, Node)> = BTreeMap::new();
        let (mut room, mut is_all) = (names.room(), true);
        let mut found: Vec<(Vec<u8>, Attributes)> = Vec::new();
        let mut each = |name: &[u8], attributes: &Attributes| {
            let is_probe = dir == ROOT && name.starts_with(PROBE.as_bytes());
            let is_later = staged.get(name).is_some_and(|file| !file.is_listed);
            if is_probe || is_later || gone.contains(name) {
                return true;
            }
            is_all = room.checked_sub(name.len() + NAME_COSTS).map(|left| room = left).is_some();
            if is_all {
                found.push((name.to_vec(), attributes.clone()));
            }
            is_all
        };
        let read = match &after {
            Some(after) => self.scope.names.read_dir_after_name(dir, after, &mut each),
            None => self.scope.names.read_dir(dir, None, &mut each),
        };
        read.map_err(|e| self.meta_wrong(&e))?.ok_or(Wrong::Cause(Cause::Unavailable))?;
        let last = found.last().map(|(name, _)| name.clone());
        for (name, attributes) in found {
            let own = staged.get(&name).filter(|file| file.speaks).and_then(|file| self.staged_node(file));
            let node = own.unwrap_or_else(|| self.stored_node(&attributes));
            known.insert(name, (attributes.ino, node));
        }
        let mut lost = BTreeSet::new();
        // Those of which the store has lost the name, up to where the next answer begins.
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        for (name, file) in staged.range((from, Bound::Unbounded)) {
            if !is_all && last.as_ref().is_none_or(|last| name > last) {
                break;
            }
            if file.is_listed
                && file.speaks
                && !known.contains_key(name)
                && let Some(node) = self.staged_node(file)
            {
                lost.insert(file.ino);
                known.insert(name.clone(), (file.ino, node));
            }
        }
        let mut shown = Vec::new();
        for (name, (ino, node)) in known {
            if !names.add(&name, ino, node) {
                is_all = false;
                break;
            }
            shown.push((ino, name));
        }
        let mut vacated = lock(&self.vacated);
        let inos: BTreeSet<u64> = shown.iter().map(|(ino, _)| *ino).collect();
        vacated.note_shown(dir, |ino| inos.contains(&ino));
        shown
            .iter()
            .filter(|(ino, _)| lost.contains(ino))
            .for_each(|(ino, name)| vacated.note(dir, *ino, name));
        Ok(is_all)
    }

    /// The name after which a listing goes on that has stopped at this inode.
    fn name_in(&self, dir: u64, ino: u64) -> Result<Vec<u8>, Wrong> {
        let vacated = lock(&self.vacated).find(dir, ino);
        if let Some(name) = vacated {
            return Ok(name);
        }
        let of = |known: Result<Option<u64>, MetaError>| known.map_err(|e| self.meta_wrong(&e));
        if of(self.scope.names.parent(ino))? == Some(dir)
            && let Some(path) = self.scope.names.path(ino).map_err(|e| self.meta_wrong(&e))?
        {
            return Ok(name(&path).to_vec());
        }
        Err(Wrong::Cause(Cause::Internal)) // its name has gone long ago, or a worker has made that up
    }

    fn staged_node(&self, file: &InDirectory) -> Option<Node> {
        self.by_ino(file.ino).map(|file| file.node())
    }

    /// What the store has at this name, as last known.
    fn stored_in(&self, dir: u64, name: &[u8]) -> Result<Option<Node>, Wrong> {
        Ok(match self.scope.names.lookup(dir, name).map_err(|e| self.meta_wrong(&e))? {
            Lookup::Found { attributes, .. } => Some(self.stored_node(&attributes)),
            _ => None,
        })
    }

    /// Of a directory, as last known.
    fn dir_attributes(&self, ino: u64) -> Result<Attributes, Wrong> {
        let known = self.scope.names.last_attributes(ino).map_err(|e| self.meta_wrong(&e))?;
        let known = known.ok_or(Wrong::Cause(Cause::Stale))?;
        match known.kind {
            Kind::Directory => Ok(known),
            _ => Err(Wrong::Cause(Cause::NotADirectory)),
        }
    }
}

/// What a listing needs to know of a staged file, which it does not hold: somebody may be about to drop it.
struct InDirectory {
    ino: u64,
    is_listed: bool,
    speaks: bool,
}

/// An answer to READDIR on its way.
#[derive(Default)]
struct Names {
    list: Vec<Name>,
    bytes: usize,
}

impl Names {
    fn room(&self) -> usize {
        NAMES_BYTES.saturating_sub(self.bytes)
    }

    /// False: it does not fit.
    fn add(&mut self, name: &[u8], next: u64, node: link::writable::Node) -> bool {
        let fits = self.room() >= name.len() + NAME_COSTS;
        if fits {
            self.bytes += name.len() + NAME_COSTS;
            self.list.push(Name { name: name.to_vec(), next, node });
        }
        fits
    }
}
