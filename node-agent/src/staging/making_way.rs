//! Two files of one inode number: a name of the store's keeps its number, also when the file that had both has lost the name and is
//! still open here. The name gets another one.

use super::area::Area;
use super::locks::name;
use crate::lock::lock;
use cache::meta::{Attributes, Incoming};
use link::Cause;
use link::writable::Wrong;

impl Area {
    /// What the store has at a name of `dir`, with a number that no file without a name has: that file goes if nobody has it open, or
    /// the name gets another number. None: it has one by now. `Stale`: it was removed or replaced here since it was looked up.
    pub(super) async fn make_way(
        &self,
        dir: u64,
        attributes: Attributes,
    ) -> Result<Option<Attributes>, Wrong> {
        let ino = attributes.ino;
        let is_taken = || self.by_ino(ino).is_some_and(|file| file.is_nameless());
        if !is_taken() {
            return Ok(Some(attributes));
        }
        let _turn = self.making_way.lock().await;
        let Some((_, attributes)) = self.named(ino).await? else { return Ok(None) };
        lock(&self.lingering).take(ino);
        self.forget_unlinked(ino).await;
        if !is_taken() {
            return Ok(Some(attributes));
        }
        let new = self.next_ino()?;
        let _still = self.moving.read().await;
        let Some((path, attributes)) = self.named_still(ino)? else { return Ok(None) };
        lock(&self.vacated).note(dir, ino, name(&path));
        let incoming = Incoming {
            name: name(&path).to_vec(),
            kind: attributes.kind,
            size: attributes.size,
            mtime_ns: attributes.mtime_ns,
            token: attributes.token,
            target: attributes.target,
            permissions: attributes.permissions,
        };
        self.place(&path, incoming, new).await.map(Some)
    }

    /// No name of this directory leads to a file that has none any more.
    pub(super) async fn make_way_in(&self, dir: u64) -> Result<(), Wrong> {
        let nameless: Vec<u64> = {
            let state = self.state();
            let nameless = state.files.values().filter(|file| file.is_nowhere());
            nameless.map(|file| file.ino).collect()
        };
        for ino in nameless {
            let is_here = self.scope.names.parent(ino).map_err(|e| self.meta_wrong(&e))? == Some(dir);
            if is_here
                && let Some((attributes, _)) =
                    self.scope.names.attributes(ino).map_err(|e| self.meta_wrong(&e))?
            {
                match self.make_way(dir, attributes).await {
                    Err(Wrong::Cause(Cause::Stale)) => {} // it is not listed
                    made => drop(made?),
                }
            }
        }
        Ok(())
    }

    async fn named(&self, ino: u64) -> Result<Option<(Vec<u8>, Attributes)>, Wrong> {
        let _still = self.moving.read().await;
        self.named_still(ino)
    }

    /// What the store has under this number, if here, too, its name leads to it. To be called by whoever holds `moving`.
    fn named_still(&self, ino: u64) -> Result<Option<(Vec<u8>, Attributes)>, Wrong> {
        let known = self.scope.names.attributes(ino).map_err(|e| self.meta_wrong(&e))?;
        let path = self.scope.names.path(ino).map_err(|e| self.meta_wrong(&e))?;
        let (Some((attributes, _)), Some(path)) = (known, path) else { return Ok(None) };
        let is_ours = {
            let state = self.state();
            state.is_gone(&path) || state.is_others(&path, ino)
        };
        if is_ours { Err(Wrong::Cause(Cause::Stale)) } else { Ok(Some((path, attributes))) }
    }
}
