//! Directories: made and removed at the store at once, which has an object for each, or none.

use super::Outcome;
use super::area::{Area, Caller, Found};
use super::file::now_ns;
use super::locks::{name, parent};
use super::names::State;
use super::record::Root;
use crate::lock::lock;
use cache::meta::{Attributes, Incoming, Kind, ROOT};
use link::Cause;
use link::writable::{Done, Owner, SetAttributes, Wrong};
use store::StoreError;
use volume::Permissions;

impl Area {
    /// New names of a directory with the set-group-id bit belong to its group.
    pub(super) async fn inherited(&self, dir: u64, owner: Owner, is_dir: bool) -> Result<Owner, Wrong> {
        let above = self.inode(dir).await?;
        let above = self.node(&above);
        Ok(match above.mode & libc::S_ISGID != 0 {
            true if is_dir => Owner { gid: above.gid, mode: owner.mode | libc::S_ISGID, ..owner },
            true => Owner { gid: above.gid, ..owner },
            false => owner,
        })
    }

    pub(super) async fn is_directory(&self, ino: u64) -> Result<(), Wrong> {
        if ino == ROOT {
            return Ok(());
        }
        // Its name must be there: one that was removed takes no names any more.
        let known = self.scope.names.attributes(ino).map_err(|e| self.meta_wrong(&e))?;
        match known {
            Some((Attributes { kind: Kind::Directory, .. }, _)) => Ok(()),
            Some(_) => Err(Wrong::Cause(Cause::NotADirectory)),
            None => Err(Wrong::Cause(Cause::NotFound)),
        }
    }

    /// Owner, mode and time of a directory are known on this node alone: an object store has no place for them.
    pub(super) async fn set_of_directory(&self, attributes: &Attributes, set: &SetAttributes) -> Outcome {
        if set.size.is_some() {
            return Err(Wrong::IsDirectory);
        }
        let node = self.stored_node(attributes);
        let mode = set.mode.unwrap_or(node.mode & 0o7777);
        let (uid, gid) = (set.uid.unwrap_or(node.uid), set.gid.unwrap_or(node.gid));
        // What is later than now is known to `times` alone: it would be taken for somebody else's change.
        let mtime_ns = set.mtime_ns.unwrap_or(node.mtime_ns).min(now_ns());
        if attributes.ino == ROOT {
            self.set_root(Root { mode, uid, gid, time_ns: mtime_ns }).await?;
            self.times.set(ROOT, set.atime_ns, set.mtime_ns);
            return Ok(Done::Node(self.stored_node(attributes)));
        }
        let _still = self.moving.read().await;
        let path = self.path_of_dir(attributes.ino)?;
        let placed = self.place_dir(&path, attributes.ino, mode, uid, gid, mtime_ns).await?;
        self.times.set(attributes.ino, set.atime_ns, set.mtime_ns);
        Ok(Done::Node(self.stored_node(&placed)))
    }

    pub(super) async fn place_dir(
        &self,
        path: &[u8],
        ino: u64,
        mode: u32,
        uid: u32,
        gid: u32,
        mtime_ns: i64,
    ) -> Result<Attributes, Wrong> {
        let incoming = Incoming {
            name: name(path).to_vec(),
            kind: Kind::Directory,
            size: 0,
            mtime_ns,
            token: String::new(),
            target: Vec::new(),
            permissions: Some(Permissions::of(mode, Some(uid), Some(gid))),
        };
        self.place(path, incoming, ino).await
    }

    pub(super) async fn make_directory(
        &self,
        caller: &Caller<'_>,
        dir: u64,
        name: &[u8],
        owner: Owner,
    ) -> Outcome {
        let (path, _held) = self.hold(dir, name).await?;
        // An agent that died in the middle of this very request may have made it.
        let again = self.begun(caller);
        match self.find(dir, name, &path).await? {
            Some(found @ Found::Stored(Attributes { kind: Kind::Directory, .. })) if again => {
                return Ok(Done::Node(self.node(&found)));
            }
            Some(_) => return Err(Wrong::Exists),
            None => {}
        }
        self.is_directory(dir).await?;
        self.new_path(dir, name)?;
        let owner = self.inherited(dir, owner, true).await?;
        self.sent_before(&path, None).await?;
        self.begin(caller).await?;
        let attributes = store::Attributes {
            mode: Some(owner.mode),
            uid: Some(owner.uid),
            gid: Some(owner.gid),
            modified_ns: Some(now_ns()),
        };
        let write = store::Write { id: self.draw(), attributes };
        failpoint::hit("agent.staging.mkdir");
        self.sink.make_dir(&path, &write).await.map_err(|e| self.store_wrong("mkdir", &path, &e))?;
        failpoint::hit("agent.staging.made");
        lock(&self.kept_dirs).insert(path.clone());
        let ino = self.next_ino()?;
        let placed = self.place_dir(&path, ino, owner.mode, owner.uid, owner.gid, now_ns()).await?;
        self.times.names_changed(dir);
        let outcome = Ok(Done::Node(self.stored_node(&placed)));
        let entries = self.result_entries(caller, &outcome)?;
        self.commit(entries, |_| ()).await?;
        outcome
    }

    pub(super) async fn remove_directory(&self, caller: &Caller<'_>, dir: u64, name: &[u8]) -> Outcome {
        let (path, _held) = self.hold(dir, name).await?;
        let again = self.begun(caller);
        let ino = match self.find(dir, name, &path).await? {
            Some(Found::Stored(Attributes { kind: Kind::Directory, ino, .. })) => ino,
            Some(_) => return Err(Wrong::Cause(Cause::NotADirectory)),
            None if again => return Ok(Done::Done),
            None => return Err(Wrong::Cause(Cause::NotFound)),
        };
        if !self.is_empty(&path).await? {
            return Err(Wrong::NotEmpty);
        }
        self.begin(caller).await?;
        failpoint::hit("agent.staging.rmdir");
        self.keep_dir(parent(&path)).await?;
        match self.sink.remove_dir(&path).await {
            Err(StoreError::Conflict { .. }) => return Err(Wrong::NotEmpty), // nobody is shown what is in it
            removed => removed.map_err(|e| self.store_wrong("rmdir", &path, &e))?,
        }
        failpoint::hit("agent.staging.removed");
        lock(&self.kept_dirs).remove(&path);
        lock(&self.vacated).note(dir, ino, name);
        self.unplace(&path).await?;
        self.times.forget(ino);
        self.times.names_changed(dir);
        let outcome = Ok(Done::Done);
        let entries = self.result_entries(caller, &outcome)?;
        self.commit(entries, |_| ()).await?;
        outcome
    }

    /// Of this node and at the store.
    pub(super) async fn is_empty(&self, dir: &[u8]) -> Result<bool, Wrong> {
        if self.has_names(dir) {
            return Ok(false);
        }
        self.sent_below(dir).await?;
        self.end_moves(dir).await?;
        match self.scope.source.list(dir, None).await {
            Ok(page) => Ok(page.entries.is_empty() && page.unnameable.is_empty() && page.next.is_none()),
            Err(StoreError::NotFound { .. }) => Ok(true), // it was there only for what was in it
            Err(error) => Err(self.store_wrong("list", dir, &error)),
        }
    }

    fn has_names(&self, dir: &[u8]) -> bool {
        let state = self.state();
        State::in_dir(&state.paths, dir)
            .any(|(_, ino)| state.files.get(ino).is_some_and(|file| file.speaks()))
    }
}
