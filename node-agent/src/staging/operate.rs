//! What the kernel asks for, one operation at a time.

use super::area::{Area, Caller, Found};
use super::bring::How;
use super::file::{File, now_ns};
use super::names::{State, file_entry, open_entry};
use super::{Executed, Outcome};
use crate::lock::lock;
use cache::meta::{Attributes, Kind};
use link::Cause;
use link::writable::{Done, Operation, Owner, SetAttributes, Wrong};
use std::os::fd::OwnedFd;
use std::sync::Arc;

impl Area {
    /// Does what the kernel asks for. A descriptor comes with [`Done::Staged`] alone.
    pub(crate) async fn execute(
        self: &Arc<Self>,
        caller: &Caller<'_>,
        executed: &Executed,
        operation: Operation,
    ) -> Result<(Done, Option<OwnedFd>), Wrong> {
        if caller.read_only && changes(&operation) {
            return Err(Wrong::ReadOnly);
        }
        let is_again = executed.is_done(caller.unique);
        let once = |work| executed.once(caller.unique, caller.waits, self.on_answering_disk(work));
        let done = match operation {
            Operation::Lookup { parent, name } => self.lookup(parent, &name).await,
            Operation::Attributes { ino } => self.attributes(ino).await,
            Operation::ReadDirectory { dir, offset } => self.read_directory(dir, offset).await,
            Operation::Locate { ino } => {
                self.disk_answers().await?;
                return self.locate(ino).await;
            }
            Operation::Space => self.on_answering_disk(self.space()).await,
            Operation::Sync { ino, closing } => self.on_answering_disk(self.sync(ino, closing)).await,
            // Done again it would undo what others have done since.
            Operation::SetAttributes { ino, set } => {
                once(boxed(self.change_attributes(Some(caller), ino, &set))).await
            }
            Operation::Write { ino } => self.write(caller, ino, executed).await,
            // Each of these happens once, however often its request is executed.
            Operation::Create { parent, name, owner, exclusive, open } => {
                let made = async {
                    let made = self.create(caller, parent, &name, owner, (exclusive, open)).await?;
                    if let Done::Node(node) = &made
                        && open
                    {
                        self.unless_given_up(caller, executed, node.ino).await?;
                    }
                    Ok(made)
                };
                once(boxed(made)).await
            }
            Operation::MakeDirectory { parent, name, owner } => {
                once(boxed(self.make_directory(caller, parent, &name, owner))).await
            }
            Operation::Unlink { parent, name } => once(boxed(self.unlink(caller, parent, &name))).await,
            Operation::RemoveDirectory { parent, name } => {
                once(boxed(self.remove_directory(caller, parent, &name))).await
            }
            Operation::Rename { parent, name, to, to_name, keep } => {
                once(boxed(self.rename(caller, (parent, &name), (to, &to_name), keep))).await
            }
            Operation::Open { ino, .. } => {
                let opened = async {
                    let opened = self.open(caller, ino).await?;
                    self.unless_given_up(caller, executed, ino).await?;
                    Ok(opened)
                };
                once(boxed(opened)).await
            }
            // Begun in any case: nobody asks for it again.
            Operation::Close { ino } => {
                executed
                    .once(caller.unique, caller.waits, boxed(self.close(caller, ino, Ok(Done::Done))))
                    .await
            }
        };
        let done = match done? {
            // As it is by now: it may have been changed since it was done.
            Done::Node(node) if is_again => self.attributes(node.ino).await.unwrap_or(Done::Node(node)),
            done => done,
        };
        Ok((done, None))
    }

    /// A file that was just counted as open. Who was answered with an error meanwhile does not have it open, and closes nothing.
    async fn unless_given_up(&self, caller: &Caller<'_>, executed: &Executed, ino: u64) -> Result<(), Wrong> {
        if executed.is_given_up(caller.unique) {
            self.close(caller, ino, Err(Wrong::Cause(Cause::Unavailable))).await?;
        }
        Ok(())
    }

    async fn on_answering_disk(&self, work: impl Future<Output = Outcome>) -> Outcome {
        self.disk_answers().await?;
        work.await
    }

    async fn lookup(&self, dir: u64, name: &[u8]) -> Outcome {
        let here = {
            let _still = self.moving.read().await;
            match self.child_path(dir, name) {
                Err(Wrong::Impossible) => return Ok(Done::Absent), // the kernel looks no such names up
                path => self.find_here(&path?),
            }
        };
        Ok(match self.find_from(here, dir, name).await? {
            Some(found) => Done::Node(self.node(&found)),
            None => Done::Absent,
        })
    }

    async fn attributes(&self, ino: u64) -> Outcome {
        self.inode(ino).await.map(|found| Done::Node(self.node(&found)))
    }

    async fn locate(&self, ino: u64) -> Result<(Done, Option<OwnedFd>), Wrong> {
        match self.inode(ino).await? {
            Found::Staged(file) if file.content.read().await.is_some() => {
                self.bring_here(&file, None, How::All).await?;
                let size = file.size();
                Ok((Done::Staged { size }, Some(self.readable(ino).await?)))
            }
            Found::Staged(file) => {
                // Another owner or name, and the bytes that the store knows.
                self.rebase_after_stale(&file).await;
                let known = self.scope.names.last_attributes(file.ino).map_err(|e| self.meta_wrong(&e))?;
                match known.filter(|known| file.is_of(&known.token)) {
                    Some(known) => Ok((Done::Stored { version: known.version }, None)),
                    None => {
                        self.bring_here(&file, None, How::All).await?;
                        Ok((Done::Staged { size: file.size() }, Some(self.readable(ino).await?)))
                    }
                }
            }
            Found::Stored(attributes) => Ok((Done::Stored { version: attributes.version }, None)),
        }
    }

    async fn space(&self) -> Outcome {
        let (_, free) = self.disk_space().await?;
        let known = self.scope.known();
        let (total_bytes, total_inodes) = (known.bytes.saturating_add(free), known.names);
        Ok(Done::Space { total_bytes, free_bytes: free, total_inodes })
    }

    // ------------------------------------------------------------------ files

    async fn create(
        &self,
        caller: &Caller<'_>,
        dir: u64,
        name: &[u8],
        owner: Owner,
        (exclusive, open): (bool, bool),
    ) -> Outcome {
        let (path, _held) = self.hold(dir, name).await?;
        if let Some(found) = self.find(dir, name, &path).await? {
            return match found {
                _ if exclusive => Err(Wrong::Exists),
                Found::Stored(Attributes { kind: Kind::Directory, .. }) => Err(Wrong::IsDirectory),
                found => self.open_made(caller, found).await,
            };
        }
        self.is_directory(dir).await?;
        self.new_path(dir, name)?;
        let owner = self.inherited(dir, owner, false).await?;
        let ino = self.next_ino()?;
        let data = self.make_data(ino).await?;
        let record = Self::new_record(path, owner.mode, owner.uid, owner.gid);
        let file = File::new(ino, record.clone(), Some(data), 0);
        let outcome = Ok(Done::Node(file.node()));
        let _counting = if open { Some(self.counting.lock().await) } else { None };
        if open {
            self.is_here(caller)?;
        }
        let mut entries = self.result_entries(caller, &outcome)?;
        entries.push(file_entry(ino, Some(&record))?);
        let mount = caller.mount;
        let times = u32::from(open);
        entries.push(open_entry(mount, ino, times));
        let apply = move |state: &mut State| {
            state.insert(&file);
            state.set_open(mount, ino, times);
        };
        self.commit(entries, apply).await?;
        self.times.names_changed(dir);
        outcome
    }

    /// `asked`: by whose request, of which the result is to be noted.
    pub(super) async fn change_attributes(
        &self,
        asked: Option<&Caller<'_>>,
        ino: u64,
        set: &SetAttributes,
    ) -> Outcome {
        let found = self.inode(ino).await?;
        if let Found::Stored(attributes) = &found
            && attributes.kind == Kind::Directory
        {
            let outcome = self.set_of_directory(attributes, set).await;
            if let Some(caller) = asked.filter(|_| outcome.is_ok()) {
                let entries = self.result_entries(caller, &outcome)?;
                self.commit(entries, |_| ()).await?;
            }
            return outcome;
        }
        let file = self.staged(found).await?;
        if let Some(size) = set.size {
            self.bring_here(&file, Some(size), How::AsTouched).await?;
        }
        self.note_dirty(&file, set.size.is_some()).await?;
        let content = file.content.write().await;
        if let Some(size) = set.size
            && size != file.size()
        {
            self.resize(&file, &content, size).await?;
        } else if set.size.is_some() {
            file.touch();
        }
        let mut record = file.record();
        let now = now_ns();
        record.mode = set.mode.unwrap_or(record.mode);
        record.uid = set.uid.unwrap_or(record.uid);
        record.gid = set.gid.unwrap_or(record.gid);
        record.atime_ns = set.atime_ns.unwrap_or(record.atime_ns);
        if let Some(mtime_ns) = set.mtime_ns {
            file.set_mtime(mtime_ns);
        }
        (record.ctime_ns, record.clean) = (now, false);
        record.same &= set.size.is_none();
        let record = file.noted(record);
        file.change();
        let outcome = Ok(Done::Node(file.node_as(&record)));
        let beside = match asked {
            Some(caller) => self.result_entries(caller, &outcome)?,
            None => Vec::new(),
        };
        self.put_record_beside(&file, record, beside).await?;
        drop(content);
        outcome
    }

    async fn unlink(&self, caller: &Caller<'_>, dir: u64, name: &[u8]) -> Outcome {
        let (path, _held) = self.hold(dir, name).await?;
        let found = self.find(dir, name, &path).await?.ok_or(Wrong::Cause(Cause::NotFound))?;
        if let Found::Stored(Attributes { kind: Kind::Directory, .. }) = &found {
            return Err(Wrong::IsDirectory);
        }
        let file = self.staged(found).await?;
        let outcome = Ok(Done::Done);
        let (content, counting) = loop {
            self.keep_for_readers(&file).await?;
            let content = file.content.write().await;
            let counting = self.counting.lock().await;
            if self.is_kept_for_readers(&file, &content) {
                break (content, counting);
            }
        };
        let mut record = file.record().unlinked();
        record.ctime_ns = now_ns();
        file.change();
        let mut entries = self.result_entries(caller, &outcome)?;
        entries.push(file_entry(file.ino, Some(&record))?);
        let removed = file.clone();
        self.commit(entries, move |state| state.set(&removed, record)).await?;
        drop((content, counting));
        lock(&self.vacated).note(dir, file.ino, name);
        self.times.names_changed(dir);
        self.linger(&file).await;
        if self.is_through() {
            self.send(&file).await?;
            self.forget_unlinked(file.ino).await;
        }
        outcome
    }

    /// Who has it open reads on when its object is gone.
    async fn keep_for_readers(&self, file: &Arc<File>) -> Result<(), Wrong> {
        let is_open = self.state().is_open(file.ino);
        if is_open { self.bring_here(file, None, How::All).await } else { Ok(()) }
    }

    /// It is as [`Self::keep_for_readers`] wants it, although somebody may have opened it since. To be asked by whoever has the file's
    /// content alone, and counts: from then on nobody opens it.
    fn is_kept_for_readers(&self, file: &File, content: &Option<Arc<std::fs::File>>) -> bool {
        let is_all_here = content.is_some() && file.rest.is_empty();
        is_all_here || !self.state().is_open(file.ino)
    }

    async fn rename(
        self: &Arc<Self>,
        caller: &Caller<'_>,
        (from_dir, from_name): (u64, &[u8]),
        (to_dir, to_name): (u64, &[u8]),
        keep: bool,
    ) -> Outcome {
        let ([from, to], held) = self.hold_all([(from_dir, from_name), (to_dir, to_name)]).await?;
        let found = self.find(from_dir, from_name, &from).await?.ok_or(Wrong::Cause(Cause::NotFound))?;
        self.is_directory(to_dir).await?;
        let there = if from == to { None } else { self.find(to_dir, to_name, &to).await? };
        if keep && (there.is_some() || from == to) {
            return Err(Wrong::Exists);
        }
        if from == to {
            return Ok(Done::Done);
        }
        let is_dir = |found: &Found| matches!(found, Found::Stored(Attributes { kind: Kind::Directory, .. }));
        if is_dir(&found) {
            drop(held); // it takes more
            return self.rename_directory(caller, (from_dir, from_name), (to_dir, to_name), keep).await;
        }
        if there.as_ref().is_some_and(is_dir) {
            return Err(Wrong::IsDirectory);
        }
        self.new_path(to_dir, to_name)?;
        let file = self.staged(found).await?;
        let was_directory = self.state().moved.contains_key(&to);
        if was_directory {
            self.send(&file).await?; // it may have come from there
            self.sent_before(&to, Some(file.ino)).await?;
        }
        let replaced = match there {
            Some(there) => Some(self.staged(there).await?),
            None => None,
        };
        if let Some(replaced) = &replaced {
            self.keep_for_readers(replaced).await?; // before anything is held
        }
        // As file systems do it for programs that write, close and rename over: a loss of power leaves the old file or the new one.
        let is_all_here = |file: &File| file.record().local && file.rest.is_over();
        let has_store_them = |file: &File| file.record().base.is_some() && file.record().same;
        let made_durable = replaced.is_some()
            && is_all_here(&file)
            && !has_store_them(&file)
            && !file.has_bytes_written_out();
        if made_durable {
            self.write_out(&file).await?;
        }
        let outcome = Ok(Done::Done);
        // Two at once could each close the circle that the other one begins.
        let must_wait = self.state().gone.contains_key(&to);
        let ordered = if must_wait { Some(self.ordering.lock().await) } else { None };
        self.untangle(&file, &to).await?;
        let (content, replacing) = match &replaced {
            None => (file.content.write().await, None),
            Some(replaced) => loop {
                self.keep_for_readers(replaced).await?;
                // What is replaced is not sent there meanwhile: its object would be taken for somebody else's.
                let silent = replaced.turn().await;
                let content = file.content.write().await;
                let replaced_content = replaced.content.write().await;
                let counting = self.counting.lock().await;
                if self.is_kept_for_readers(replaced, &replaced_content) {
                    break (content, Some((silent, replaced_content, counting)));
                }
            },
        };
        let mut record = file.noted(file.record());
        record.durable |= made_durable && is_all_here(&file);
        record.moved(to.clone());
        record.ctime_ns = now_ns();
        file.note_listed(false);
        file.change();
        let mut entries = self.result_entries(caller, &outcome)?;
        let mut over = None;
        if let Some(replaced) = &replaced {
            let mut their = replaced.noted(replaced.record());
            if their.target.is_some() {
                (record.target, record.made_by) = (their.target.take(), their.made_by.take());
            }
            record.writes.append(&mut their.writes);
            record.unsettled |= their.unsettled;
            // Its object is replaced, and not removed. One that has not left its former name yet is not removed before that:
            // until then it is the one that is there.
            record.take_former(std::mem::take(&mut their.former));
            (their.path, their.clean, their.ctime_ns) = (None, true, now_ns());
            their.conflict = false;
            replaced.change();
            entries.push(file_entry(replaced.ino, Some(&their))?);
            over = Some((replaced.clone(), their));
        }
        entries.push(file_entry(file.ino, Some(&record))?);
        let moved = file.clone();
        let apply = move |state: &mut State| {
            if let Some((replaced, their)) = over {
                state.set(&replaced, their);
            }
            state.set(&moved, record);
        };
        self.commit(entries, apply).await?;
        drop((content, replacing, ordered));
        {
            let mut vacated = lock(&self.vacated);
            vacated.note(from_dir, file.ino, from_name);
            if let Some(replaced) = &replaced {
                vacated.note(to_dir, replaced.ino, to_name);
            }
        }
        self.times.names_changed(from_dir);
        self.times.names_changed(to_dir);
        if let Some(replaced) = &replaced {
            self.linger(replaced).await;
        }
        if self.is_through() {
            self.send(&file).await?;
        }
        outcome
    }

    /// Files wait for each other's former names, and none for itself: where this name would close the circle, the file is
    /// sent first, under the name that it has.
    async fn untangle(&self, file: &Arc<File>, to: &[u8]) -> Result<(), Wrong> {
        let is_circle = {
            let state = self.state();
            let mut next = state.gone.get(to).copied();
            let mut steps = 0;
            while let Some(ino) = next.filter(|ino| *ino != file.ino) {
                let path = state.files.get(&ino).and_then(|other| other.record().path);
                next = path.and_then(|path| state.gone.get(&path).copied()).filter(|next| *next != ino);
                steps += 1;
                if steps > state.files.len() {
                    break; // none is longer
                }
            }
            next == Some(file.ino)
        };
        if is_circle { self.send(file).await } else { Ok(()) }
    }
}

fn changes(operation: &Operation) -> bool {
    match operation {
        Operation::Lookup { .. }
        | Operation::Attributes { .. }
        | Operation::Open { write: false, .. }
        | Operation::Close { .. }
        | Operation::Sync { .. }
        | Operation::ReadDirectory { .. }
        | Operation::Locate { .. }
        | Operation::Space => false,
        Operation::SetAttributes { .. }
        | Operation::Create { .. }
        | Operation::MakeDirectory { .. }
        | Operation::Unlink { .. }
        | Operation::RemoveDirectory { .. }
        | Operation::Rename { .. }
        | Operation::Open { write: true, .. }
        | Operation::Write { .. } => true,
    }
}

fn boxed<'f>(work: impl Future<Output = Outcome> + Send + 'f) -> futures::future::BoxFuture<'f, Outcome> {
    Box::pin(work)
}

#[cfg(test)]
mod tests;
