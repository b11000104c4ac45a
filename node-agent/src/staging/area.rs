//! The staging area of one volume on this node: its names, and who has what open.

use super::believed::{Believed, Coming};
use super::buffers::Buffers;
use super::discards::Discards;
use super::disk::{Disk, Gone, write_anew, write_out};
use super::failures::Failures;
use super::file::{File, now_ns};
use super::lingering::Lingering;
use super::locks::{Held, Locks, child};
use super::names::{
    APPEND, BEGUN, Entry, RESULT, ROOT_KEY, Request, State, Tag, append_entry, changes, data_name, result_key,
};
use super::record::{Append, Object, Record, Root};
use super::tenure::Tenure;
use super::times::Times;
use super::told::Told;
use super::vacated::Vacated;
use super::{Executed, Outcome};
use crate::lock::lock;
use crate::state::StateDir;
use crate::volumes::scope::Scope;
use cache::meta::{self, Attributes, InodeNumbers, Kind, Lookup, ROOT};
use journal::{Journal, JournalError};
use link::Cause;
use link::broker::MountId;
use link::writable::{Node, Wrong};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::collections::{HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use store::{Abilities, NoPlace, Sink, StoreError, WriteId};
use tokio::sync::{OnceCell, watch};
use volume::{Freshness, VolumeId, VolumeSpec, WriteMode};

/// How often a name is looked up anew at most that is not known any more as soon as it was.
const LOOKED_UP_MAX: u32 = 8;
/// Results of requests that are kept before it is looked whether their answers have arrived.
const RESULTS_KEPT: usize = 64;

pub(crate) struct Area {
    pub(crate) volume: VolumeId,
    pub(super) scope: Arc<Scope>,
    pub(super) sink: Arc<dyn Sink>,
    pub(super) spec: VolumeSpec,
    /// Where the staged bytes lie.
    pub(super) files: Arc<OwnedFd>,
    pub(super) numbers: Arc<StateDir>,
    pub(super) disk: Disk,
    pub(super) journal: Arc<Mutex<Option<Journal>>>,
    /// Changes of it that were asked for and are not made yet.
    pub(super) changes: Arc<Mutex<VecDeque<Change>>>,
    /// Held by whoever makes one.
    pub(super) turn: Arc<Mutex<()>>,
    pub(super) tenure: Arc<Tenure>,
    pub(super) state: Arc<Mutex<State>>,
    pub(super) locks: Locks,
    /// Held by a rename that lets a file wait for another one.
    pub(super) ordering: tokio::sync::Mutex<()>,
    /// Held alone while a directory gets another name; with others while a path is told.
    pub(super) moving: tokio::sync::RwLock<()>,
    /// Held by whoever removes what the store has under a former name of a directory.
    pub(super) ending_moves: tokio::sync::Mutex<()>,
    /// Inode numbers whose staged files are just being removed.
    pub(super) dropping: Arc<watch::Sender<HashSet<u64>>>,
    /// Held by whoever counts an open file, and by whoever takes a name away, from the last look to the commit. Taken after a file's
    /// `sending` and `content`; only the journal is waited for under it.
    pub(super) counting: tokio::sync::Mutex<()>,
    pub(super) lingering: Mutex<Lingering>,
    /// Held by whoever gives a name another inode number.
    pub(super) making_way: tokio::sync::Mutex<()>,
    /// When a listing was told something last.
    pub(super) listed_at: Mutex<Option<tokio::time::Instant>>,
    /// Names that files have left, for listings that go on after them.
    pub(super) vacated: Mutex<Vacated>,
    /// Mounts that are here. Others that the journal tells of have ended with their agent.
    pub(super) mounts: Mutex<HashSet<MountId>>,
    /// What their kernels believe of what they were told.
    pub(super) believed: Believed,
    /// With what the names of its writes begin.
    pub(super) tag: Tag,
    /// The same of before a loss of power: its journal may not tell of all of them.
    pub(super) lost_tags: Vec<Tag>,
    /// The last that was drawn with it.
    pub(super) drawn: AtomicU64,
    pub(super) able: OnceCell<Abilities>,
    /// Bytes that may be written before the disk is asked again how much is free.
    pub(super) room: AtomicU64,
    /// Of files that are sent without anybody who waits for them.
    pub(super) sending_small: Arc<tokio::sync::Semaphore>,
    pub(super) sending_large: Arc<tokio::sync::Semaphore>,
    /// Rises whenever the store has taken something: a file, or a part of one.
    pub(super) arrived: AtomicU64,
    pub(super) buffers: Arc<Buffers>,
    /// Held by whoever brings the bytes of a file that nobody waits for.
    pub(super) filling: Arc<tokio::sync::Semaphore>,
    /// Rises whenever somebody could not read an object because it is another one by now.
    pub(super) stale: AtomicU64,
    /// Directories that have an object of their own in the store, or need none.
    pub(super) kept_dirs: Mutex<HashSet<Vec<u8>>>,
    /// Of directories.
    pub(super) times: Times,
    /// Results that an agent before this one has noted, for the connections that it served.
    pub(super) recalled: Mutex<Vec<(MountId, u64, Outcome)>>,
    /// The last attempts to send something that came to nothing.
    pub(super) failures: Failures,
    /// What the owners of the volume were told of what waits.
    pub(super) told: Mutex<Told>,
    /// Files that somebody is about to discard.
    pub(super) discards: Discards,
    /// What lies beside the journal of what it takes to open the area.
    pub(super) described: tokio::sync::Mutex<Vec<u8>>,
    pub(super) me: Weak<Area>,
}

pub(super) type Change = Box<dyn FnOnce() + Send>;

/// What a name leads to.
pub(super) enum Found {
    Staged(Arc<File>),
    Stored(Attributes),
}

/// What the area knows of a name.
pub(super) enum Here {
    Known(Option<Found>),
    /// The store is to be asked. The file is one that it has all of.
    Ask(Option<Arc<File>>),
}

/// For whom an operation is done.
#[derive(Clone, Copy)]
pub(crate) struct Caller<'a> {
    pub(crate) mount: MountId,
    pub(crate) unique: u64,
    /// Does the kernel still wait for an answer to this request?
    pub(crate) waits: &'a (dyn Fn(u64) -> bool + Sync),
    pub(crate) inflight: &'a inflight::Inflight,
    pub(crate) read_only: bool,
}

impl Area {
    pub(super) fn is_through(&self) -> bool {
        self.spec.parameters.write_mode == WriteMode::Through
    }

    pub(crate) fn scope(&self) -> Arc<Scope> {
        self.scope.clone()
    }

    pub(super) fn freshness(&self) -> Freshness {
        self.spec.parameters.freshness
    }

    pub(super) fn state(&self) -> std::sync::MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// An object could not be read because it is another one by now. It may be ours.
    pub(crate) fn note_stale(&self) {
        self.stale.fetch_add(1, AcqRel);
    }

    pub(super) fn by_ino(&self, ino: u64) -> Option<Arc<File>> {
        self.state().files.get(&ino).cloned()
    }

    pub(super) fn next_ino(&self) -> Result<u64, Wrong> {
        self.numbers.next().map_err(|error| {
            tracing::error!(%error, "no inode number");
            Wrong::Cause(Cause::Internal)
        })
    }

    /// A name for a write. Of one run of the kernel each is greater than all that were drawn before it, by this agent or another.
    pub(super) fn draw(&self) -> WriteId {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let now_ns = (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64);
        let after = |last: u64| now_ns.max(last + 1);
        // Never fails: it always gives a value.
        let last = self.drawn.fetch_update(AcqRel, Acquire, |last| Some(after(last)));
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.tag);
        id[8..].copy_from_slice(&last.map_or(now_ns, after).to_be_bytes());
        WriteId::new(id)
    }

    /// Has the journal take these changes, all or none, and then the memory. Whoever asked may be gone by then.
    pub(super) async fn commit(
        &self,
        entries: Vec<Entry>,
        apply: impl FnOnce(&mut State) + Send + 'static,
    ) -> Result<(), Wrong> {
        let (journal, state, tenure) = (self.journal.clone(), self.state.clone(), self.tenure.clone());
        let done = self.in_order(move || {
            failpoint::hit("agent.staging.commit");
            let mut journal = lock(&journal);
            // Left to a successor, or about to be: it executes anew what was refused, as if nothing had come after that.
            let journal = journal.as_mut().filter(|_| !tenure.is_over());
            let journal = journal.ok_or(Wrong::Cause(Cause::Unavailable))?;
            journal.batch(&changes(&entries)).map_err(|error| journal_wrong(&error))?;
            apply(&mut lock(&state));
            failpoint::hit("agent.staging.committed");
            Ok(())
        });
        done.await
    }

    /// Writes out what the journal has been told.
    pub(super) async fn sync_disk(&self) -> Result<(), Wrong> {
        let journal = self.journal.clone();
        let done = self.on_disk(move || {
            let mut journal = lock(&journal);
            let journal = journal.as_mut().ok_or(Wrong::Cause(Cause::Unavailable))?;
            journal.sync().map_err(|error| journal_wrong(&error))?;
            #[cfg(test)]
            super::simulated::journal_written_out();
            Ok(())
        });
        done.await
    }

    /// Writes out the bytes of a staged file. `alone`: nobody changes them meanwhile.
    pub(super) async fn write_out_data(
        &self,
        file: &File,
        data: Arc<std::fs::File>,
        alone: bool,
    ) -> Result<(), Wrong> {
        let (dir, doubt, tenure) = (self.files.clone(), file.doubt.clone(), self.tenure.clone());
        // What was written before it failed is written once more.
        let bytes = if alone { file.size() } else { file.unwritten() };
        let done = self.on_disk_for(bytes, move || {
            let _turn = lock(&doubt.turn);
            let written = match (doubt.has_failed.load(Acquire), alone) {
                (false, _) => Ok(()),
                (true, true) => match tenure.change() {
                    Some(_changing) => write_anew(&data),
                    None => Err(rustix::io::Errno::IO),
                },
                // It has come to be so since somebody asked.
                (true, false) => Err(rustix::io::Errno::IO),
            };
            let written = written.and_then(|()| write_out(&data, &dir));
            doubt.has_failed.store(written.is_err(), Release);
            written.map_err(|error| {
                tracing::error!(%error, "the staging disk did not write out");
                disk_wrong(error)
            })
        });
        done.await
    }

    /// A change, after all those that were asked for before it, and before all later ones: also where nobody waits for it any more,
    /// and so whoever asks next holds what it is about.
    pub(super) async fn in_order<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, Wrong> + Send + 'static,
    ) -> Result<T, Wrong> {
        let (done, result) = tokio::sync::oneshot::channel();
        let job = inflight::carry_job(job);
        lock(&self.changes).push_back(Box::new(move || drop(done.send(job()))));
        let (changes, turn) = (self.changes.clone(), self.turn.clone());
        // As many as there are changes, each for the first of them.
        let next = self.disk.run(move || {
            let _turn = lock(&turn);
            let job = lock(&changes).pop_front();
            if let Some(job) = job {
                job();
            }
        });
        next.await.map_err(|Gone| Wrong::Cause(Cause::Internal))?;
        // Of a job that is before it in the queue, and has a thread already.
        result.await.unwrap_or(Err(Wrong::Cause(Cause::Internal)))
    }

    /// On a thread of the staging disk.
    pub(super) async fn on_disk<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, Wrong> + Send + 'static,
    ) -> Result<T, Wrong> {
        self.on_disk_for(0, job).await
    }

    /// The same of what moves so many bytes.
    pub(super) async fn on_disk_for<T: Send + 'static>(
        &self,
        bytes: u64,
        job: impl FnOnce() -> Result<T, Wrong> + Send + 'static,
    ) -> Result<T, Wrong> {
        self.disk.run_for(bytes, job).await.unwrap_or(Err(Wrong::Cause(Cause::Internal)))
    }

    /// On such a thread, what changes staged bytes: never once a successor has them, which does anew what was not answered.
    pub(super) async fn change_data<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, Wrong> + Send + 'static,
    ) -> Result<T, Wrong> {
        let tenure = self.tenure.clone();
        let done = self.on_disk(move || {
            let _changing = tenure.change().ok_or(Wrong::Cause(Cause::Unavailable))?;
            job()
        });
        done.await
    }

    /// Returns when whoever waits from now on has waited for as long as the staging disk may take, and it does not answer. What was
    /// asked is to go on to its end all the same: it may have been done in part, and nobody else touches what it holds.
    pub(crate) async fn is_silent(&self) {
        tokio::time::sleep(self.disk.limit()).await;
        self.disk.silence().begun().await;
    }

    /// As [`Self::is_silent`], for a request whose answer is an error then.
    pub(crate) async fn is_silent_to(&self, executed: &Executed, unique: u64) -> Wrong {
        self.is_silent().await;
        executed.give_up(unique);
        self.silent()
    }

    /// Nothing is begun on a disk that does not answer.
    pub(super) async fn disk_answers(&self) -> Result<(), Wrong> {
        let silence = self.disk.silence();
        if !silence.is_now() {
            return Ok(());
        }
        tokio::time::timeout(self.disk.limit(), silence.over()).await.map_err(|_| self.silent())
    }

    fn silent(&self) -> Wrong {
        tracing::error!(volume = %self.volume, "the disk of the staging area does not answer");
        Wrong::Cause(Cause::Unavailable)
    }

    /// What comes of this work, unless the staging disk does not answer: it goes on then.
    pub(crate) async fn unless_silent<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let work = tokio::spawn(work);
        tokio::select! {
            biased;
            done = work => done.ok(),
            () = self.is_silent() => {
                let _ = self.silent();
                None
            }
        }
    }

    /// The result of a request, to stand in the journal beside what it changes.
    pub(super) fn result_entries(&self, caller: &Caller<'_>, outcome: &Outcome) -> Result<Vec<Entry>, Wrong> {
        let value = postcard::to_stdvec(outcome).map_err(|_| Wrong::Cause(Cause::Internal))?;
        Ok(self.remember(caller, RESULT, value))
    }

    /// Where the bytes of this request go, at the end of a file: the same place if it is executed again.
    pub(super) async fn append_at(&self, caller: &Caller<'_>, at_end: Append) -> Result<Append, Wrong> {
        let request = (caller.mount, caller.unique);
        let before = self.state().appends.get(&request).copied();
        if let Some(append) = before {
            return Ok(append);
        }
        let (_, value) = append_entry(request, &at_end)?;
        let mut entries = self.remember(caller, APPEND, value.unwrap_or_default());
        // Of those whose places could not be given back.
        let (over, void) = self.void_appends(at_end.ino, at_end.offset)?;
        entries.extend(void);
        let give = move |state: &mut State| {
            over.iter().for_each(|request| _ = state.appends.remove(request));
            state.appends.insert(request, at_end);
        };
        self.commit(entries, give).await?;
        Ok(at_end)
    }

    /// Requests that have a place behind this end of a file, where they could not append, and what the journal is to be told of that: they
    /// have failed, however often they are executed. To be called with the content alone.
    pub(super) fn void_appends(&self, ino: u64, end: u64) -> Result<(Vec<Request>, Vec<Entry>), Wrong> {
        let failed: Outcome = Err(Wrong::Cause(Cause::Unavailable));
        let failed = postcard::to_stdvec(&failed).map_err(|_| Wrong::Cause(Cause::Internal))?;
        let state = self.state();
        let is_void = |append: &Append| append.ino == ino && append.end > end && !append.is_over;
        let void: Vec<Request> =
            state.appends.iter().filter(|(_, append)| is_void(append)).map(|(request, _)| *request).collect();
        let entries = void.iter().flat_map(|(mount, unique)| {
            let key = |kind| result_key(kind, *mount, *unique);
            [(key(RESULT), Some(failed.clone())), (key(APPEND), None)]
        });
        let entries = entries.collect();
        Ok((void, entries))
    }

    /// A file ends here: what was appended behind that is not appended again, and nothing is kept free for it.
    pub(super) fn end_appends(&self, ino: u64, size: u64) -> Result<Vec<Entry>, Wrong> {
        let mut state = self.state();
        let is_behind = |append: &Append| append.ino == ino && append.end > size && !append.is_over;
        let of_it = state.appends.iter_mut().filter(|(_, append)| is_behind(append));
        of_it
            .map(|(request, append)| {
                append.is_over = true;
                append_entry(*request, append)
            })
            .collect()
    }

    /// Has an agent before this one begun this request's operation at the store?
    pub(super) fn begun(&self, caller: &Caller<'_>) -> bool {
        self.state().begun.contains(&(caller.mount, caller.unique))
    }

    /// Notes that the store is asked for it now.
    pub(super) async fn begin(&self, caller: &Caller<'_>) -> Result<(), Wrong> {
        let entries = self.remember(caller, BEGUN, Vec::new());
        self.commit(entries, |_| ()).await?;
        self.sync_disk().await // the store never has what the journal does not tell of, whatever loses its power
    }

    fn remember(&self, caller: &Caller<'_>, kind: u8, value: Vec<u8>) -> Vec<Entry> {
        let mut entries = vec![(result_key(kind, caller.mount, caller.unique), Some(value))];
        let mut state = self.state();
        let State { results, appends, .. } = &mut *state;
        let kept = results.entry(caller.mount).or_default();
        if !kept.contains(&caller.unique) {
            kept.push_back(caller.unique);
        }
        if kept.len() > RESULTS_KEPT {
            kept.retain(|unique| {
                let keep = *unique == caller.unique || (caller.waits)(*unique);
                if !keep {
                    let forgotten =
                        [RESULT, APPEND, BEGUN].map(|kind| (result_key(kind, caller.mount, *unique), None));
                    entries.extend(forgotten);
                    appends.remove(&(caller.mount, *unique));
                }
                keep
            });
        }
        entries
    }

    /// What is said now may be believed until then, milliseconds of the clock of names; 0: not at all. To be asked after an
    /// operation was done.
    pub(crate) fn believed_until_ms(&self) -> u64 {
        let now_ms = self.scope.names.now_ms();
        self.believed.until_ms(&lock(&self.mounts), self.freshness(), now_ms)
    }

    /// For a mount that no agent has served before. Returns when no other one believes what may change from now on; it may join
    /// as long as it holds what it gets.
    pub(crate) async fn welcome(&self) -> Coming<'_> {
        let (coming, has_mounts) = {
            let mounts = lock(&self.mounts);
            (self.believed.comes(), !mounts.is_empty())
        };
        self.believed.forgotten(has_mounts, self.scope.names.now_ms()).await;
        coming
    }

    /// A mount of an agent before joins, which nobody holds up.
    pub(crate) fn note_adopted(&self) {
        self.believed.note_adopted();
    }

    /// A mount is here, which an agent before this one may have served.
    pub(crate) fn join(&self, mount: MountId, executed: &Executed) {
        lock(&self.mounts).insert(mount);
        for (of, unique, outcome) in lock(&self.recalled).iter() {
            if *of == mount {
                executed.recall(*unique, outcome.clone());
            }
        }
    }

    // ------------------------------------------------------------------ names

    pub(super) fn path_of_dir(&self, ino: u64) -> Result<Vec<u8>, Wrong> {
        let path = self.scope.names.path(ino).map_err(|e| self.meta_wrong(&e))?;
        path.ok_or(Wrong::Cause(Cause::Stale))
    }

    pub(super) fn child_path(&self, dir: u64, name: &[u8]) -> Result<Vec<u8>, Wrong> {
        if name.len() > 255 {
            return Err(Wrong::NameTooLong);
        }
        if !meta::is_name(name) {
            return Err(Wrong::Impossible);
        }
        Ok(child(&self.path_of_dir(dir)?, name))
    }

    /// As [`Self::child_path`], of a name that is to be made: one that the store could never take is refused now, not when it is
    /// sent.
    pub(super) fn new_path(&self, dir: u64, name: &[u8]) -> Result<Vec<u8>, Wrong> {
        let path = self.child_path(dir, name)?;
        match self.sink.takes(&path) {
            Ok(()) => Ok(path),
            Err(NoPlace::TooLong) => Err(Wrong::NameTooLong),
            Err(NoPlace::NotText) => Err(Wrong::Impossible),
        }
    }

    /// This name of a directory, for an operation that changes it: nobody else does, nor moves the directory.
    pub(super) async fn hold(&self, dir: u64, name: &[u8]) -> Result<(Vec<u8>, Held), Wrong> {
        let ([path], held) = self.hold_all([(dir, name)]).await?;
        Ok((path, held))
    }

    pub(super) async fn hold_all<const N: usize>(
        &self,
        names: [(u64, &[u8]); N],
    ) -> Result<([Vec<u8>; N], Held), Wrong> {
        let paths = || -> Result<Vec<Vec<u8>>, Wrong> {
            names.iter().map(|(dir, name)| self.child_path(*dir, name)).collect()
        };
        loop {
            let wanted = paths()?;
            let refs: Vec<&[u8]> = wanted.iter().map(Vec::as_slice).collect();
            let held = self.locks.take(&refs).await;
            // Unless a directory got another name before it was held.
            if paths()? == wanted {
                let wanted = wanted.try_into().map_err(|_| Wrong::Cause(Cause::Internal))?;
                return Ok((wanted, held));
            }
        }
    }

    /// What this name leads to now, for every pod of the node.
    pub(super) async fn find(&self, dir: u64, name: &[u8], path: &[u8]) -> Result<Option<Found>, Wrong> {
        self.find_from(self.find_here(path), dir, name).await
    }

    /// What is known of it here, whatever the store says.
    pub(super) fn find_here(&self, path: &[u8]) -> Here {
        let state = self.state();
        match state.by_path(path) {
            Some(file) if file.speaks() => Here::Known(Some(Found::Staged(file))),
            _ if state.is_gone(path) => Here::Known(None),
            staged => Here::Ask(staged),
        }
    }

    pub(super) async fn find_from(&self, here: Here, dir: u64, name: &[u8]) -> Result<Option<Found>, Wrong> {
        let staged = match here {
            Here::Known(found) => return Ok(found),
            Here::Ask(staged) => staged,
        };
        for _ in 0..LOOKED_UP_MAX {
            let asked = self.scope.lookup(dir, name, self.freshness());
            self.scope.within(self.spec.parameters.store_timeout, Some(dir), asked).await?;
            let attributes = match self.scope.names.lookup(dir, name).map_err(|e| self.meta_wrong(&e))? {
                Lookup::Found { attributes, .. } => attributes,
                Lookup::Absent { .. } => return Ok(None),
                Lookup::Unknown => continue, // what was known is not any more: somebody has changed it in between
            };
            if let Some(file) = &staged
                && attributes.ino == file.ino
                && file.is_of(&attributes.token)
            {
                return Ok(staged.map(Found::Staged));
            }
            if let Some(attributes) = self.make_way(dir, attributes).await? {
                return Ok(Some(Found::Stored(attributes)));
            }
        }
        Err(Wrong::Cause(Cause::Unavailable))
    }

    /// The file with this inode number, if its bytes here are what counts; else what the store has.
    pub(super) async fn inode(&self, ino: u64) -> Result<Found, Wrong> {
        let staged = self.by_ino(ino);
        if let Some(file) = staged.as_ref().filter(|file| file.speaks()) {
            return Ok(Found::Staged(file.clone()));
        }
        let asked = self.scope.attributes(ino, self.freshness(), false);
        match (self.scope.within(self.spec.parameters.store_timeout, None, asked).await, &staged) {
            // Removed by somebody else: whoever has it open reads on.
            (Err(Cause::Stale), Some(file)) => return Ok(Found::Staged(file.clone())),
            (asked, _) => asked?,
        }
        let known = self.scope.names.last_attributes(ino).map_err(|e| self.meta_wrong(&e))?;
        let attributes = known.ok_or(Wrong::Cause(Cause::Stale))?;
        Ok(match staged {
            Some(file) if file.is_of(&attributes.token) => Found::Staged(file),
            None if self.leads_to_another(&attributes)? => return Err(Wrong::Cause(Cause::Stale)),
            _ => Found::Stored(attributes),
        })
    }

    /// The name by which the store knows this file leads to another one here, or to none: the store is not told yet. Nobody has it open.
    pub(super) fn leads_to_another(&self, attributes: &Attributes) -> Result<bool, Wrong> {
        if attributes.kind != Kind::File {
            return Ok(false);
        }
        let path = self.scope.names.path(attributes.ino).map_err(|e| self.meta_wrong(&e))?;
        Ok(path.is_some_and(|path| self.state().is_others(&path, attributes.ino)))
    }

    pub(super) fn node(&self, found: &Found) -> Node {
        match found {
            Found::Staged(file) => file.node(),
            Found::Stored(attributes) => self.stored_node(attributes),
        }
    }

    pub(super) fn stored_node(&self, attributes: &Attributes) -> Node {
        let parameters = &self.spec.parameters;
        let told = attributes.permissions;
        let mode = |volumes: u32| told.map_or(volumes & 0o7777, |told| u32::from(told.mode) & 0o7777);
        let (mode, size, links) = match attributes.kind {
            Kind::File => (libc::S_IFREG | mode(parameters.file_mode), attributes.size, 1),
            Kind::Directory => (libc::S_IFDIR | mode(parameters.dir_mode), 4096, 2),
            Kind::Symlink => (libc::S_IFLNK | 0o777, attributes.target.len() as u64, 1),
        };
        let time = attributes.mtime_ns;
        let mut node = Node {
            ino: attributes.ino,
            size,
            stored: size,
            mode,
            uid: told.and_then(|told| told.uid).unwrap_or(parameters.uid),
            gid: told.and_then(|told| told.gid).unwrap_or(parameters.gid),
            links,
            atime_ns: time,
            mtime_ns: time,
            ctime_ns: time,
        };
        if attributes.ino == ROOT
            && let Some(root) = self.state().root
        {
            (node.mode, node.uid, node.gid) = (libc::S_IFDIR | root.mode, root.uid, root.gid);
            (node.atime_ns, node.mtime_ns, node.ctime_ns) = (root.time_ns, root.time_ns, root.time_ns);
        }
        if attributes.kind == Kind::Directory {
            self.times.show(&mut node);
        }
        node
    }

    pub(super) async fn set_root(&self, root: Root) -> Result<(), Wrong> {
        let value = postcard::to_stdvec(&root).map_err(|_| Wrong::Cause(Cause::Internal))?;
        self.commit(vec![(ROOT_KEY.to_vec(), Some(value))], move |state| state.root = Some(root)).await
    }

    /// Takes a file of the store's into the area, as it is there. Nothing of it is changed by that.
    pub(super) async fn stage(&self, attributes: &Attributes) -> Result<Arc<File>, Wrong> {
        if attributes.kind != Kind::File {
            return Err(if attributes.kind == Kind::Directory {
                Wrong::IsDirectory
            } else {
                Wrong::NotPermitted
            });
        }
        let path = self.path_of_dir(attributes.ino)?;
        let node = self.stored_node(attributes);
        let version = attributes.token.clone();
        let base = Object { path: path.clone(), version: version.clone(), size: attributes.size };
        let record = Record {
            path: Some(path),
            local: false,
            durable: false,
            base: Some(base),
            target: Some(version),
            made_by: Some(self.draw().to_string()),
            clean: true,
            same: true,
            former: Vec::new(),
            writes: Vec::new(),
            unsettled: false,
            conflict: false,
            mode: node.mode & 0o7777,
            uid: node.uid,
            gid: node.gid,
            atime_ns: node.atime_ns,
            mtime_ns: node.mtime_ns,
            ctime_ns: node.ctime_ns,
        };
        let mut dropping = self.dropping.subscribe();
        let _ = dropping.wait_for(|dropping| !dropping.contains(&attributes.ino)).await; // its sender is here
        let mut state = self.state();
        // What somebody has in his hands he may be about to change: one of two would never be sent, and nobody would be told that
        // another node has changed it meanwhile.
        if let Some(file) = state.files.get(&attributes.ino)
            && (file.speaks() || file.is_of(&attributes.token) || Arc::strong_count(file) > 1)
        {
            return Ok(file.clone());
        }
        let is_replaced = record.path.as_ref().is_some_and(|path| state.is_others(path, attributes.ino));
        if is_replaced {
            return Err(Wrong::Cause(Cause::Stale)); // since it was found
        }
        let file = File::new(attributes.ino, record, None, attributes.size);
        state.insert(&file);
        Ok(file)
    }

    /// The staged file of what was found.
    pub(super) async fn staged(&self, found: Found) -> Result<Arc<File>, Wrong> {
        match found {
            Found::Staged(file) => Ok(file),
            Found::Stored(attributes) => self.stage(&attributes).await,
        }
    }

    pub(super) fn new_record(path: Vec<u8>, mode: u32, uid: u32, gid: u32) -> Record {
        let now = now_ns();
        Record {
            path: Some(path),
            local: true,
            durable: false,
            base: None,
            target: None,
            made_by: None,
            clean: false,
            same: false,
            former: Vec::new(),
            writes: Vec::new(),
            unsettled: false,
            conflict: false,
            mode,
            uid,
            gid,
            atime_ns: now,
            mtime_ns: now,
            ctime_ns: now,
        }
    }

    /// An empty file for the bytes of this inode; one that was left there is emptied.
    pub(super) async fn make_data(&self, ino: u64) -> Result<Arc<std::fs::File>, Wrong> {
        let dir = self.files.clone();
        let made = self.change_data(move || {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            rustix::fs::openat(&dir, data_name(ino), flags, Mode::from_raw_mode(0o600)).map_err(disk_wrong)
        });
        made.await.map(|data| Arc::new(data.into()))
    }

    pub(super) async fn remove_data(&self, ino: u64) {
        let dir = self.files.clone();
        let removed = self.change_data(move || {
            rustix::fs::unlinkat(&dir, data_name(ino), AtFlags::empty()).map_err(disk_wrong)
        });
        let _ = removed.await; // a stray is removed at the next start
    }

    /// For a worker: its bytes, to be read alone.
    pub(super) async fn readable(&self, ino: u64) -> Result<OwnedFd, Wrong> {
        let dir = self.files.clone();
        let opened = self.on_disk(move || {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            rustix::fs::openat(&dir, data_name(ino), flags, Mode::empty()).map_err(disk_wrong)
        });
        opened.await
    }

    /// Bytes of the staging disk, all and free.
    pub(super) async fn disk_space(&self) -> Result<(u64, u64), Wrong> {
        let dir = self.files.clone();
        let about = self.on_disk(move || rustix::fs::fstatvfs(&dir).map_err(disk_wrong)).await?;
        Ok((about.f_blocks.saturating_mul(about.f_frsize), about.f_bavail.saturating_mul(about.f_frsize)))
    }

    /// This agent leaves the area to its successor. False: at `end` a call of the disk goes on still, which may change what the successor
    /// has.
    #[must_use]
    pub(crate) fn release(&self, end: Instant) -> bool {
        self.tenure.end();
        loop {
            if self.tenure.is_idle()
                && let Ok(mut journal) = self.journal.try_lock()
            {
                *journal = None;
                return true;
            }
            if Instant::now() >= end {
                break;
            }
            std::thread::sleep(Duration::from_millis(1)); // a change is just being written
        }
        tracing::error!(volume = %self.volume, "the staging disk does not answer: what this agent has of it is let go with the process");
        false
    }

    pub(super) fn meta_wrong(&self, error: &meta::MetaError) -> Wrong {
        tracing::error!(volume = %self.volume, %error, "metadata store failed");
        Wrong::Cause(Cause::Internal)
    }

    /// What a program learns of a store's error.
    pub(super) fn store_wrong(&self, what: &'static str, path: &[u8], error: &StoreError) -> Wrong {
        self.failures.note(what, path, error);
        let path = String::from_utf8_lossy(path);
        tracing::warn!(volume = %self.volume, %path, %error, "{what} failed");
        match error {
            StoreError::Conflict { .. } | StoreError::Stale { .. } => Wrong::Conflict,
            StoreError::Full { .. } => Wrong::NoSpace,
            StoreError::Unsupported { .. } => Wrong::NotPermitted,
            StoreError::NotFound { .. } => Wrong::Cause(Cause::Unavailable), // the bucket, or what was to be copied
            other => Wrong::Cause(other.cause()),
        }
    }
}

pub(super) fn disk_wrong(error: rustix::io::Errno) -> Wrong {
    use rustix::io::Errno;
    match error {
        Errno::NOSPC | Errno::DQUOT => Wrong::NoSpace,
        Errno::FBIG => Wrong::TooLarge,
        _ => Wrong::Cause(Cause::Unavailable),
    }
}

pub(super) fn file_wrong(error: std::io::Error) -> Wrong {
    disk_wrong(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO))
}

fn journal_wrong(error: &JournalError) -> Wrong {
    tracing::error!(%error, "staging journal");
    match error {
        JournalError::Full { .. } => Wrong::NoSpace,
        _ => Wrong::Cause(Cause::Unavailable),
    }
}
