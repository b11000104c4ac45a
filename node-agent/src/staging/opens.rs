//! Who has what open, and when a file without a name is over.

use super::Outcome;
use super::area::{Area, Caller, Found};
use super::file::File;
use super::lingering;
use super::names::{APPEND, BEGUN, RESULT, file_entry, open_entry, result_key};
use crate::lock::lock;
use cache::meta::{Attributes, Kind};
use fuse_abi::{CreateIn, InHeader};
use link::Cause;
use link::broker::MountId;
use link::writable::{Done, SetAttributes, Wrong};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

impl Area {
    pub(super) async fn open(&self, caller: &Caller<'_>, ino: u64) -> Outcome {
        match self.inode(ino).await? {
            Found::Stored(Attributes { kind: Kind::Directory, .. }) => Err(Wrong::IsDirectory),
            _ => self.count_open(caller, ino, Ok(Done::Done)).await,
        }
    }

    /// What a program wants to make if it is not there, and somebody else has made since its kernel looked. Opened here where its owner
    /// is the one who asks; otherwise the kernel looks its path up again, and asks on the way that files take that are there.
    pub(super) async fn open_made(&self, caller: &Caller<'_>, found: Found) -> Outcome {
        const AGAIN: Wrong = Wrong::Cause(Cause::Stale);
        const SET_IDS: u32 = libc::S_ISUID | libc::S_ISGID;
        let node = self.node(&found);
        let mut front = [0; InHeader::BYTES + CreateIn::BYTES];
        let header = caller.inflight.head(caller.unique, &mut front).ok_or(AGAIN)?;
        let create = front[InHeader::BYTES..].try_into().map(CreateIn::from_bytes).map_err(|_| AGAIN)?;
        let flags = create.flags as i32;
        let cuts = flags & libc::O_TRUNC != 0;
        let wanted = match flags & libc::O_ACCMODE {
            libc::O_RDONLY => libc::S_IRUSR,
            libc::O_WRONLY => libc::S_IWUSR,
            _ => libc::S_IRUSR | libc::S_IWUSR,
        };
        let wanted = if cuts { wanted | libc::S_IWUSR } else { wanted };
        let is_file = node.mode & libc::S_IFMT == libc::S_IFREG; // and no link, which the kernel follows
        let is_asked = is_file && header.opcode == fuse_abi::opcode::CREATE && header.uid == node.uid;
        if !is_asked || node.mode & (wanted | SET_IDS) != wanted {
            return Err(AGAIN);
        }
        let outcome = match cuts && node.size > 0 {
            true => {
                let set = SetAttributes { size: Some(0), ..SetAttributes::default() };
                self.change_attributes(None, node.ino, &set).await
            }
            false => Ok(Done::Node(node)),
        };
        match outcome {
            Ok(_) => self.count_open(caller, node.ino, outcome).await,
            wrong => wrong,
        }
    }

    /// Notes that it is open once more, with the outcome of the request by which it is. What has lost its name since it was found, and
    /// its bytes with it, is not opened any more: the kernel looks its path up again.
    async fn count_open(&self, caller: &Caller<'_>, ino: u64, outcome: Outcome) -> Outcome {
        let _counting = self.counting.lock().await;
        self.is_here(caller)?;
        let is_there = match self.by_ino(ino) {
            Some(file) => {
                let record = file.record();
                let has_bytes = record.local && file.rest.is_empty();
                record.path.is_some() || has_bytes || self.state().is_open(ino)
            }
            None => match self.scope.names.attributes(ino).map_err(|e| self.meta_wrong(&e))? {
                Some((attributes, _)) => !self.leads_to_another(&attributes)?,
                None => false,
            },
        };
        if !is_there {
            return Err(Wrong::Cause(Cause::Stale));
        }
        let (mount, times) = (caller.mount, self.state().times_open(caller.mount, ino).saturating_add(1));
        let mut entries = self.result_entries(caller, &outcome)?;
        entries.push(open_entry(mount, ino, times));
        self.commit(entries, move |state| state.set_open(mount, ino, times)).await?;
        outcome
    }

    /// A mount that has left opens nothing any more: nobody would close it. To be asked by whoever counts.
    pub(super) fn is_here(&self, caller: &Caller<'_>) -> Result<(), Wrong> {
        match lock(&self.mounts).contains(&caller.mount) {
            true => Ok(()),
            false => Err(Wrong::Cause(Cause::Unavailable)),
        }
    }

    /// `outcome`: of the request by which it is closed.
    pub(super) async fn close(&self, caller: &Caller<'_>, ino: u64, outcome: Outcome) -> Outcome {
        {
            let _counting = self.counting.lock().await;
            let (mount, times) = (caller.mount, self.state().times_open(caller.mount, ino).saturating_sub(1));
            let mut entries = self.result_entries(caller, &outcome)?;
            entries.push(open_entry(mount, ino, times));
            self.commit(entries, move |state| state.set_open(mount, ino, times)).await?;
        }
        self.forget_unlinked(ino).await;
        self.send_closed(ino);
        outcome
    }

    /// A mount has ended: it has nothing open any more.
    pub(crate) async fn leave(self: &Arc<Self>, mount: MountId) {
        lock(&self.mounts).remove(&mount);
        let area = self.clone();
        let left = async move {
            area.let_go(mount).await;
            let is_last = lock(&area.mounts).is_empty();
            if is_last {
                area.forget_lingering(Duration::ZERO).await;
            }
        };
        let _ = self.unless_silent(left).await; // it goes on
    }

    /// Mounts that the journal tells of and that no agent serves any more have nothing open.
    pub(super) async fn forget_strangers(&self) {
        let strangers: BTreeSet<MountId> = {
            let here = lock(&self.mounts);
            let state = self.state();
            let opened = state.opens.values().flat_map(|mounts| mounts.keys());
            opened.chain(state.results.keys()).filter(|mount| !here.contains(mount)).copied().collect()
        };
        for mount in strangers {
            self.let_go(mount).await;
        }
    }

    async fn let_go(&self, mount: MountId) {
        let counting = self.counting.lock().await;
        let opened: Vec<u64> = {
            let state = self.state();
            let of_mount = state.opens.iter().filter(|(_, mounts)| mounts.contains_key(&mount));
            of_mount.map(|(ino, _)| *ino).collect()
        };
        let mut entries: Vec<_> = opened.iter().map(|ino| open_entry(mount, *ino, 0)).collect();
        // Nor does anybody ask what came of its requests.
        let answered = self.state().results.get(&mount).cloned().unwrap_or_default();
        for unique in &answered {
            entries.extend([RESULT, APPEND, BEGUN].map(|kind| (result_key(kind, mount, *unique), None)));
        }
        let closed = opened.clone();
        let gone = self.commit(entries, move |state| {
            closed.into_iter().for_each(|ino| state.set_open(mount, ino, 0));
            state.results.remove(&mount);
            for unique in answered {
                state.appends.remove(&(mount, unique));
                state.begun.remove(&(mount, unique));
            }
        });
        let gone = gone.await;
        drop(counting);
        if gone.is_ok() {
            for ino in opened {
                self.forget_unlinked(ino).await;
            }
        }
    }

    /// A file has lost its name.
    pub(super) async fn linger(&self, file: &File) {
        let is_kept = file.record().local && file.size() <= lingering::BYTES_MAX;
        let over = if is_kept { lock(&self.lingering).note(file.ino) } else { Some(file.ino) };
        if let Some(ino) = over {
            self.forget_unlinked(ino).await;
        }
    }

    /// Those that have lost their names so long ago or longer.
    pub(super) async fn forget_lingering(&self, age: Duration) {
        let next = || lock(&self.lingering).take_older(age);
        while let Some(ino) = next() {
            self.forget_unlinked(ino).await;
        }
    }

    /// Those that an agent before has left when it died just before: nobody asks for them any more.
    pub(super) async fn forget_all_unlinked(&self) {
        self.forget_lingering(lingering::KEPT).await;
        let over: Vec<u64> = {
            let state = self.state();
            let nameless = state.files.values().filter(|file| file.is_nowhere() && file.record().clean);
            nameless.map(|file| file.ino).filter(|ino| !state.is_open(*ino)).collect()
        };
        for ino in over {
            self.forget_unlinked(ino).await;
        }
    }

    /// What has no name, no reader and nothing in the store is over.
    pub(super) async fn forget_unlinked(&self, ino: u64) {
        let is_over = || {
            let state = self.state();
            state.files.get(&ino).is_some_and(|file| file.is_nowhere())
                && !state.is_open(ino)
                && !lock(&self.lingering).has(ino)
        };
        if !is_over() {
            return; // as nearly each one that is closed
        }
        // Nobody opens it meanwhile.
        let counting = self.counting.lock().await;
        if is_over()
            && let Ok(entry) = file_entry(ino, None)
            && self.commit(vec![entry], move |state| state.remove(ino)).await.is_ok()
        {
            drop(counting);
            self.remove_data(ino).await;
        }
    }
}
