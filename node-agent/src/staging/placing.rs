//! Tells the metadata store what the area has brought about in the store.

use super::area::Area;
use super::locks::{name, parent};
use super::record::Object;
use crate::lock::lock;
use cache::meta::{Attributes, Incoming, Kind, ROOT};
use link::Cause;
use link::writable::Wrong;
use store::Write;
use volume::Permissions;

impl Area {
    pub(super) async fn note_object(
        &self,
        ino: u64,
        object: &Object,
        permissions: Permissions,
        mtime_ns: i64,
    ) -> Result<(), Wrong> {
        let _still = self.moving.read().await; // its directory may have another name already that is not known yet
        self.note_object_still(ino, object, permissions, mtime_ns).await
    }

    /// To be called by whoever holds `moving`.
    pub(super) async fn note_object_still(
        &self,
        ino: u64,
        object: &Object,
        permissions: Permissions,
        mtime_ns: i64,
    ) -> Result<(), Wrong> {
        let incoming = Incoming {
            name: name(&object.path).to_vec(),
            kind: Kind::File,
            size: object.size,
            mtime_ns,
            token: object.version.clone(),
            target: Vec::new(),
            permissions: Some(permissions),
        };
        match self.place(&object.path, incoming, ino).await {
            // Its directory is not known any more, so neither is a listing without it.
            Err(Wrong::Cause(Cause::Stale)) => Ok(()),
            placed => placed.map(drop),
        }
    }

    /// The directory of this path, if it is known.
    pub(super) fn above(&self, path: &[u8]) -> Result<Option<u64>, Wrong> {
        match parent(path) {
            b"" => Ok(Some(ROOT)),
            dir => self.scope.names.resolve(dir).map_err(|e| self.meta_wrong(&e)),
        }
    }

    pub(super) async fn place(&self, path: &[u8], incoming: Incoming, ino: u64) -> Result<Attributes, Wrong> {
        let above = self.above(path)?.ok_or(Wrong::Cause(Cause::Stale))?;
        let scope = self.scope.clone();
        let placed = tokio::task::spawn_blocking(move || scope.place(above, &incoming, ino)).await;
        placed.map_err(|_| Wrong::Cause(Cause::Internal))?.map_err(|e| self.meta_wrong(&e))
    }

    pub(super) async fn unplace(&self, path: &[u8]) -> Result<(), Wrong> {
        let _still = self.moving.read().await;
        match self.above(path)? {
            Some(above) => self.unplace_in(above, name(path).to_vec()).await,
            None => Ok(()),
        }
    }

    pub(super) async fn unplace_in(&self, above: u64, name: Vec<u8>) -> Result<(), Wrong> {
        let scope = self.scope.clone();
        let removed = tokio::task::spawn_blocking(move || scope.unplace(above, &name)).await;
        removed.map_err(|_| Wrong::Cause(Cause::Internal))?.map_err(|e| self.meta_wrong(&e))
    }

    /// Asks the store for a name of which something else is known.
    pub(super) async fn look_again(&self, path: &[u8]) {
        if let Ok(Some(above)) = self.above(path) {
            let _ = self.scope.head(above, name(path)).await; // it is asked for again when it is looked up
        }
    }

    /// A directory that would vanish with the last object in it gets one of its own.
    pub(super) async fn keep_dir(&self, dir: &[u8]) -> Result<(), Wrong> {
        if dir.is_empty() || lock(&self.kept_dirs).contains(dir) {
            return Ok(());
        }
        let write = Write { id: self.draw(), attributes: store::Attributes::default() };
        self.sink.make_dir(dir, &write).await.map_err(|e| self.store_wrong("mkdir", dir, &e))?;
        lock(&self.kept_dirs).insert(dir.to_vec());
        Ok(())
    }
}
