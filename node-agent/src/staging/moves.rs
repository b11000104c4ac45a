//! A directory gets another name. No object store can do that: each object below is written anew, and removed under its old
//! name.
//!
//! ```text
//!  what has its bytes here      gets its new name in the journal, and goes to the store as after any other change
//!  what the store alone has     is copied by the store first, and gets its new name with the others
//!  the directories themselves   are made before, and their old names go when nothing of this node is below them any more
//! ```
//!
//! All names change in one frame of the journal, so programs of this node see none of it half done. Copies of a rename that came
//! to nothing (the agent died before that frame) go as what writes leave that were given up.

use super::Outcome;
use super::area::{Area, Caller, Found};
use super::file::{File, now_ns};
use super::late::late_entry;
use super::locks::{Held, child, parent};
use super::names::{Entry, State, file_entry, moved_entry};
use super::record::{Late, Moved, Object, Record};
use super::staged::lies_at_or_below;
use crate::lock::lock;
use cache::meta::{Attributes, Kind, Lookup};
use futures::{StreamExt, TryStreamExt};
use link::Cause;
use link::writable::{Done, Wrong};
use std::collections::BTreeMap;
use std::sync::Arc;
use store::{StoreError, Write, WriteId};
use volume::{Freshness, Permissions};

/// Files and directories below one that gets another name. More are left to `mv`, which makes copies of its own.
const BELOW_MAX: usize = 1000;
/// Files of which the store alone has the bytes.
const COPIED_MAX: usize = 500;
/// Bytes of the journal's frame; it holds 4 MiB.
const FRAME_BYTES: usize = 3 << 20;
/// Of a record, beside its paths.
const RECORD_BYTES: usize = 1024;
const COPIES_AT_ONCE: usize = 8;
/// How often it is looked what is below, where others make directories meanwhile.
const LOOKS_MAX: u32 = 8;

/// A directory, and what is in it and further below.
struct Below {
    /// Paths and inode numbers, itself first.
    dirs: Vec<(Vec<u8>, u64)>,
    files: Vec<Arc<File>>,
}

/// A file's content, which nobody changes meanwhile.
type Alone<'f> = tokio::sync::RwLockWriteGuard<'f, Option<Arc<std::fs::File>>>;

enum Tried {
    Done(Done),
    /// The object of this file is another one than it was said to be.
    Stale(Arc<File>),
}

/// A file of which the store has made a copy under its new name.
struct Copied {
    object: Object,
    id: WriteId,
}

fn below(path: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    [to, &path[from.len()..]].concat()
}

impl Area {
    pub(super) async fn rename_directory(
        &self,
        caller: &Caller<'_>,
        (from_dir, from_name): (u64, &[u8]),
        (to_dir, to_name): (u64, &[u8]),
        keep: bool,
    ) -> Outcome {
        for _ in 0..LOOKS_MAX {
            let tried = self.try_rename_directory(caller, (from_dir, from_name), (to_dir, to_name), keep);
            match tried.await? {
                Tried::Done(done) => return Ok(done),
                // An object is another one than it was said to be. It may be ours, made by a write that was given up.
                Tried::Stale(file) => {
                    let _silent = file.turn().await;
                    self.rebase(&file).await?;
                }
            }
        }
        Err(Wrong::Cause(Cause::Unavailable)) // somebody replaces them again and again
    }

    async fn try_rename_directory(
        &self,
        caller: &Caller<'_>,
        (from_dir, from_name): (u64, &[u8]),
        (to_dir, to_name): (u64, &[u8]),
        keep: bool,
    ) -> Result<Tried, Wrong> {
        let (from, to, tree, _held) = self.hold_tree((from_dir, from_name), (to_dir, to_name)).await?;
        self.is_directory(to_dir).await?;
        // What was at the new names before goes first: nothing waits for anything in a circle.
        self.sent_before(&to, None).await?;
        self.end_moves(&to).await?;
        let there = self.find(to_dir, to_name, &to).await?;
        match &there {
            Some(_) if keep => return Err(Wrong::Exists),
            None | Some(Found::Stored(Attributes { kind: Kind::Directory, .. })) => {}
            Some(_) => return Err(Wrong::Cause(Cause::NotADirectory)),
        }
        self.remove_late_below(&to).await?;
        // Also where nothing is known of it: what the store has there would be taken in.
        while !self.is_empty(&to).await? {
            // A copy of an agent before this one may have come in between.
            if !self.remove_late_below(&to).await? {
                return Err(Wrong::NotEmpty);
            }
        }
        self.new_path(to_dir, to_name)?;
        let mut bytes = 0;
        for path in tree
            .dirs
            .iter()
            .map(|(path, _)| path.clone())
            .chain(tree.files.iter().filter_map(|file| file.record().path))
        {
            let new = below(&path, &from, &to);
            bytes += RECORD_BYTES + 4 * new.len().max(path.len());
            self.sink.takes(&new).map_err(|_| Wrong::NameTooLong)?;
        }
        if bytes > FRAME_BYTES {
            return Err(Wrong::Elsewhere);
        }
        // Of those the store alone has the bytes: nobody changes them until they have their new names.
        let mut stored = Vec::new();
        for file in &tree.files {
            stored.extend(self.still(file).await?);
        }
        if stored.len() > COPIED_MAX {
            return Err(Wrong::Elsewhere);
        }
        self.begin(caller).await?;
        failpoint::hit("agent.staging.move");
        let turn = self.ending_moves.lock().await;
        self.make_dirs(&tree, &from, &to, there.is_some()).await?;
        let copied =
            match self.copy_all(stored.iter().map(|(file, _)| file.clone()).collect(), &from, &to).await? {
                Ok(copied) => copied,
                Err(file) => return Ok(Tried::Stale(file)),
            };
        failpoint::hit("agent.staging.move-copied");
        lock(&self.vacated).note(from_dir, tree.dirs[0].1, from_name);
        let done = self.move_names(caller, &tree, &from, &to, copied, stored).await?;
        drop(turn);
        self.times.set(tree.dirs[0].1, None, None); // it has changed, and not what is in it
        self.times.names_changed(from_dir);
        self.times.names_changed(to_dir);
        if self.is_through() {
            for file in &tree.files {
                self.send(file).await?;
            }
            self.end_moves(&from).await?;
        }
        Ok(Tried::Done(done))
    }

    /// The directories under their new names. Should this come to nothing, they go. `is_there`: the first is there already.
    async fn make_dirs(&self, tree: &Below, from: &[u8], to: &[u8], is_there: bool) -> Result<(), Wrong> {
        let made: Vec<Vec<u8>> =
            tree.dirs.iter().skip(usize::from(is_there)).map(|(path, _)| below(path, from, to)).collect();
        let entries: Result<Vec<Entry>, Wrong> =
            made.iter().map(|path| moved_entry(path, Some(&None))).collect();
        let noted = made.clone();
        self.commit(entries?, move |state| state.moved.extend(noted.into_iter().map(|path| (path, None))))
            .await?;
        self.sync_disk().await?;
        for path in made {
            let write = Write { id: self.draw(), attributes: store::Attributes::default() };
            self.sink.make_dir(&path, &write).await.map_err(|e| self.store_wrong("mkdir", &path, &e))?;
        }
        Ok(())
    }

    /// The content alone of a file that the store has all of, and whose bytes are not here. None: they are.
    async fn still<'f>(&self, file: &'f Arc<File>) -> Result<Option<(Arc<File>, Alone<'f>)>, Wrong> {
        for _ in 0..LOOKS_MAX {
            let content = file.content.write().await;
            if content.is_some() {
                drop(content);
                // Its object is asked for by the name that its directory has.
                self.bring_range(file, 0..u64::MAX).await?;
                return Ok(None);
            }
            if file.record().clean {
                return Ok(Some((file.clone(), content)));
            }
            drop(content);
            self.send(file).await?; // its bytes are at one name, and it is said to be at another one
        }
        Err(Wrong::Cause(Cause::Unavailable)) // somebody changes it again and again
    }

    /// Has the whole tree, and its new names, for itself: nothing is made or removed there meanwhile.
    async fn hold_tree(
        &self,
        (from_dir, from_name): (u64, &[u8]),
        (to_dir, to_name): (u64, &[u8]),
    ) -> Result<(Vec<u8>, Vec<u8>, Below, Held), Wrong> {
        for _ in 0..LOOKS_MAX {
            let (from, to) = (self.child_path(from_dir, from_name)?, self.child_path(to_dir, to_name)?);
            if lies_at_or_below(&to, &from) {
                return Err(Wrong::Impossible);
            }
            let top = match self.find(from_dir, from_name, &from).await? {
                Some(Found::Stored(top)) if top.kind == Kind::Directory => top,
                _ => return Err(Wrong::Cause(Cause::NotFound)), // it was one a moment ago
            };
            let listed = self.below(&from, top.ino, true).await?;
            // Nor is there anything removed that the store copies there.
            let dirs = listed.dirs.iter();
            let alone: Vec<Vec<u8>> =
                dirs.flat_map(|(path, _)| [path.clone(), below(path, &from, &to)]).collect();
            let held = self.locks.take(&alone.iter().map(Vec::as_slice).collect::<Vec<_>>()).await;
            self.remove_late_below(&from).await?; // what is nobody's gets no new name
            let is_there =
                self.child_path(from_dir, from_name)? == from && self.child_path(to_dir, to_name)? == to;
            let tree = self.below(&from, top.ino, false).await?;
            if is_there && tree.dirs == listed.dirs {
                return Ok((from, to, tree, held));
            }
        }
        Err(Wrong::Cause(Cause::Unavailable))
    }

    /// `ask`: the store, too, and not only what is known.
    async fn below(&self, top: &[u8], ino: u64, ask: bool) -> Result<Below, Wrong> {
        let mut tree = Below { dirs: vec![(top.to_vec(), ino)], files: Vec::new() };
        let mut at = 0;
        while let Some((dir, ino)) = tree.dirs.get(at).cloned() {
            if ask {
                let listed = self.scope.list(ino, Freshness::Strict);
                self.scope.within(self.spec.parameters.store_timeout, Some(ino), listed).await?;
            }
            // Before what is known of the store: a file that it has all of by then is known by then.
            let staged: BTreeMap<Vec<u8>, Arc<File>> = {
                let state = self.state();
                let staged = State::in_dir(&state.paths, &dir);
                let staged = staged.filter_map(|(name, ino)| Some((name, state.files.get(ino)?)));
                let staged = staged.filter(|(_, file)| file.speaks());
                staged.map(|(name, file)| (name.to_vec(), file.clone())).collect()
            };
            let mut known: Vec<(Vec<u8>, Attributes)> = Vec::new();
            let read = self.scope.names.read_dir(ino, None, &mut |name, attributes| {
                known.push((name.to_vec(), attributes.clone()));
                known.len() <= BELOW_MAX
            });
            read.map_err(|e| self.meta_wrong(&e))?.ok_or(Wrong::Cause(Cause::Unavailable))?;
            {
                let state = self.state();
                known.retain(|(name, _)| !state.is_gone(&child(&dir, name)));
            }
            for (name, attributes) in known {
                if attributes.kind != Kind::Directory && staged.contains_key(&name) {
                    continue;
                }
                let attributes = match self.make_way(ino, attributes).await? {
                    Some(attributes) => attributes,
                    // It has got another number in between.
                    None => match self.scope.names.lookup(ino, &name).map_err(|e| self.meta_wrong(&e))? {
                        Lookup::Found { attributes, .. } => attributes,
                        _ => continue,
                    },
                };
                match attributes.kind {
                    Kind::Directory => tree.dirs.push((child(&dir, &name), attributes.ino)),
                    Kind::File => tree.files.push(self.stage(&attributes).await?),
                    Kind::Symlink => return Err(Wrong::Elsewhere),
                }
            }
            tree.files.extend(staged.into_values());
            if tree.dirs.len() + tree.files.len() > BELOW_MAX {
                return Err(Wrong::Elsewhere);
            }
            at += 1;
        }
        Ok(tree)
    }

    /// The store makes a copy of each of these under its new name. Should this come to nothing, the copies go.
    /// Err: this one is another one than it was said to be.
    async fn copy_all(
        &self,
        files: Vec<Arc<File>>,
        from: &[u8],
        to: &[u8],
    ) -> Result<Result<BTreeMap<u64, Copied>, Arc<File>>, Wrong> {
        if files.is_empty() {
            return Ok(Ok(BTreeMap::new()));
        }
        let wanted: Vec<(Arc<File>, Record, Vec<u8>, WriteId)> = files
            .into_iter()
            .filter_map(|file| {
                let record = file.record();
                let new = below(record.path.as_ref()?, from, to);
                Some((file, record, new, self.draw()))
            })
            .collect();
        let mut changed = self.state().surplus_late(wanted.len());
        for (_, _, new, id) in &wanted {
            let late = Late { path: new.clone(), given_up_ns: now_ns(), is_removed: true };
            changed.insert(id.to_string(), Some(late));
        }
        let entries =
            changed.iter().map(|(id, late)| late_entry(id, late.as_ref())).collect::<Result<_, _>>()?;
        self.commit(entries, move |state| state.remember_late(changed)).await?;
        self.sync_disk().await?; // nor does a loss of power forget them
        let copies = wanted.into_iter().map(|(file, record, new, id)| async move {
            let base =
                record.base.clone().filter(|_| record.clean).ok_or(Wrong::Cause(Cause::Unavailable))?;
            let attributes = store::Attributes {
                mode: Some(record.mode),
                uid: Some(record.uid),
                gid: Some(record.gid),
                modified_ns: Some(record.mtime_ns),
            };
            let write = Write { id, attributes };
            let mut target = None;
            loop {
                let copied = match self.condition_of(target.as_deref(), &new).await? {
                    Ok(condition) => self.copy_object(&base, &new, &write, &condition).await?,
                    Err(conflict) => Err(conflict),
                };
                match copied {
                    Ok(written) => {
                        let object = Object { path: new, version: written.version.0, size: base.size };
                        return Ok(Ok((file.ino, Copied { object, id })));
                    }
                    Err(StoreError::Conflict { .. }) if target.is_none() => {
                        let seen =
                            self.sink.look(&new).await.map_err(|e| self.store_wrong("look", &new, &e))?;
                        // Of an agent that died in this very rename; or somebody else has made it meanwhile.
                        let late = seen.filter(|seen| self.is_of_no_record(&new, seen));
                        target = Some(late.ok_or(Wrong::NotEmpty)?.version.0);
                    }
                    Err(StoreError::Stale { .. } | StoreError::NotFound { .. }) => return Ok(Err(file)),
                    Err(error) => return Err(self.store_wrong("copy", &base.path, &error)),
                }
            }
        });
        let copies: Vec<Result<(u64, Copied), Arc<File>>> =
            futures::stream::iter(copies).buffer_unordered(COPIES_AT_ONCE).try_collect().await?;
        Ok(copies.into_iter().collect())
    }

    /// All names at once.
    async fn move_names(
        &self,
        caller: &Caller<'_>,
        tree: &Below,
        from: &[u8],
        to: &[u8],
        mut copied: BTreeMap<u64, Copied>,
        stored: Vec<(Arc<File>, Alone<'_>)>,
    ) -> Outcome {
        let outcome = Ok(Done::Done);
        let mut files = tree.files.clone();
        files.sort_by_key(|file| file.ino);
        let mut contents = Vec::new();
        for file in files.iter().filter(|file| !copied.contains_key(&file.ino)) {
            contents.push(file.content.write().await);
        }
        // Nobody is told a name in between.
        let _alone = self.moving.write().await;
        let mut entries = self.result_entries(caller, &outcome)?;
        let (mut records, mut late) = (Vec::new(), BTreeMap::new());
        for file in &files {
            let mut record = file.noted(file.record());
            let Some(path) = record.path.clone() else { continue }; // unlinked by somebody who has it open
            let copied = copied.remove(&file.ino);
            let is_stored = copied.is_some();
            record.moved(below(&path, from, to));
            if let Some(Copied { object, id }) = copied {
                (record.target, record.made_by) = (Some(object.version.clone()), Some(id.to_string()));
                entries.push(late_entry(&id.to_string(), None)?);
                late.insert(id.to_string(), None);
                record.base = Some(object);
            }
            entries.push(file_entry(file.ino, Some(&record))?);
            records.push((file.clone(), record, is_stored));
        }
        let moved: Vec<(Vec<u8>, Moved)> = tree
            .dirs
            .iter()
            .map(|(path, ino)| (path.clone(), Moved { to: below(path, from, to), ino: *ino }))
            .collect();
        for (path, moved) in &moved {
            entries.push(moved_entry(&moved.to, None)?); // not made for nothing
            entries.push(moved_entry(path, Some(&Some(moved.clone())))?);
        }
        let apply = {
            let moved = moved.clone();
            move |state: &mut State| {
                for (file, record, is_all) in records {
                    state.set(&file, record);
                    let change = file.change();
                    if is_all {
                        file.note_sent(change); // all but that its former name goes
                    }
                }
                state.remember_late(late);
                moved.iter().for_each(|(_, moved)| drop(state.moved.remove(&moved.to)));
                state.moved.extend(moved.into_iter().map(|(path, moved)| (path, Some(moved))));
            }
        };
        self.commit(entries, apply).await?;
        failpoint::hit("agent.staging.moved");
        drop((contents, stored));
        self.follow(&moved).await;
        outcome
    }

    /// An agent before this one may have died in between.
    pub(super) async fn follow_moves(&self) {
        let all = self.state().moved.clone();
        let moved: Vec<(Vec<u8>, Moved)> =
            all.into_iter().filter_map(|(path, moved)| Some((path, moved?))).collect();
        self.follow(&moved).await;
    }

    /// The metadata store learns it, too.
    async fn follow(&self, moved: &[(Vec<u8>, Moved)]) {
        // It knows what is in a directory by its number, and so under the new name, where the store has none of it yet.
        for (path, moved) in moved {
            let is_to_follow = self.scope.names.path(moved.ino).is_ok_and(|at| at.as_ref() == Some(path));
            if !is_to_follow {
                continue;
            }
            let gone: Vec<Vec<u8>> = {
                let state = self.state();
                // What writes that were given up have left at names of files that the store does not have, too.
                let is_stored = |to: &[u8], ino: &u64| {
                    let base = state.files.get(ino).and_then(|file| file.record().base);
                    base.is_some_and(|base| base.path == to)
                };
                let staged = State::in_dir(&state.paths, &moved.to)
                    .filter(|(name, ino)| !is_stored(&child(&moved.to, name), ino));
                staged.chain(State::in_dir(&state.gone, path)).map(|(name, _)| name.to_vec()).collect()
            };
            for name in gone {
                self.unplace_in(moved.ino, name).await.unwrap_or_else(|wrong| self.not_known(&wrong));
            }
        }
        for (path, moved) in moved {
            self.follow_move(path, moved).await.unwrap_or_else(|wrong| self.not_known(&wrong));
        }
        let stored: Vec<(Arc<File>, Record)> = {
            let state = self.state();
            let of_dir = |to: &[u8]| {
                let files = State::in_dir(&state.paths, to).filter_map(|(_, ino)| state.files.get(ino));
                files.map(|file| (file.clone(), file.record())).collect::<Vec<_>>()
            };
            moved.iter().flat_map(|(_, moved)| of_dir(&moved.to)).collect()
        };
        for (file, record) in stored {
            let base = record.base.as_ref().filter(|base| record.path.as_ref() == Some(&base.path));
            if let Some(base) = base.filter(|_| !record.clean && !record.local) {
                let permissions = Permissions::of(record.mode, Some(record.uid), Some(record.gid));
                let noted = self.note_object_still(file.ino, base, permissions, file.mtime_ns()).await;
                noted.unwrap_or_else(|wrong| self.not_known(&wrong));
            }
        }
    }

    /// The directory has its new name in the metadata store, with its inode and all that is in it.
    async fn follow_move(&self, path: &[u8], moved: &Moved) -> Result<(), Wrong> {
        {
            let mut kept = lock(&self.kept_dirs);
            kept.remove(path);
            kept.insert(moved.to.clone());
        }
        let at = self.scope.names.path(moved.ino).map_err(|e| self.meta_wrong(&e))?;
        let known = self.scope.names.attributes(moved.ino).map_err(|e| self.meta_wrong(&e))?;
        // Below one that has moved it is where it belongs already, and is told of all the same: no listing begun before hides it.
        let (Some(at), Some((known, _))) = (at, known) else { return Ok(()) };
        if at != path && at != moved.to || known.kind != Kind::Directory {
            return Ok(());
        }
        let node = self.stored_node(&known);
        let mode = node.mode & 0o7777;
        self.place_dir(&moved.to, moved.ino, mode, node.uid, node.gid, known.mtime_ns).await.map(drop)
    }

    fn not_known(&self, wrong: &Wrong) {
        tracing::error!(volume = %self.volume, ?wrong, "what has got a new name is not known under it: it is listed again");
    }

    /// What the store still has of directories at this path, and below it, that have another name here: the store is told.
    pub(super) async fn end_moves(&self, top: &[u8]) -> Result<(), Wrong> {
        let moved: Vec<Vec<u8>> = {
            let state = self.state();
            state.moved.keys().rev().filter(|path| lies_at_or_below(path, top)).cloned().collect()
        };
        if moved.is_empty() {
            return Ok(());
        }
        // Files that wait for each other are sent one after the other.
        let owners: Vec<u64> = {
            let state = self.state();
            state.gone.iter().filter(|(path, _)| lies_at_or_below(path, top)).map(|(_, ino)| *ino).collect()
        };
        for ino in owners {
            self.send_before(ino).await?;
        }
        for path in moved {
            self.end_move(&path).await?;
        }
        Ok(())
    }

    /// Of all, as far as nobody has to wait for it. What fails has been logged, and is tried again.
    pub(super) async fn end_all_moves(&self) {
        let moved: Vec<Vec<u8>> = self.state().moved.keys().rev().cloned().collect();
        for path in moved {
            let _ = self.end_move(&path).await;
        }
    }

    /// The same of one, unless something of this node is below it still.
    pub(super) async fn end_move(&self, path: &[u8]) -> Result<(), Wrong> {
        let _turn = self.ending_moves.lock().await;
        let in_vain = self.state().moved.get(path).is_some_and(Option::is_none);
        if in_vain {
            self.remove_late_below(path).await?; // copies that were made there, too
        }
        {
            let state = self.state();
            let is_below = |other: &[u8]| other != path && lies_at_or_below(other, path);
            let is_held = state.gone.keys().any(|other| is_below(other))
                || state.moved.keys().any(|other| is_below(other));
            if is_held || !state.moved.contains_key(path) {
                return Ok(());
            }
        }
        self.keep_dir(parent(path)).await?;
        self.sync_disk().await?; // no loss of power brings its name back, or hides what has it next
        failpoint::hit("agent.staging.move-end");
        let is_theirs = match self.sink.remove_dir(path).await {
            // Something is in it that is nobody's here: it is a directory of its own from now on.
            Err(StoreError::Conflict { .. }) => true,
            removed => {
                removed.map_err(|e| self.store_wrong("rmdir", path, &e))?;
                lock(&self.kept_dirs).remove(path);
                self.unplace(path).await?; // a listing tells it, too
                false
            }
        };
        let gone = path.to_vec();
        self.commit(vec![moved_entry(path, None)?], move |state| drop(state.moved.remove(&gone))).await?;
        self.sync_disk().await?;
        if is_theirs {
            tracing::warn!(
                volume = %self.volume, path = %String::from_utf8_lossy(path),
                "a directory that was renamed here has something in it that was put there by somebody else, or given up here: it stays"
            );
            self.look_again(path).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
