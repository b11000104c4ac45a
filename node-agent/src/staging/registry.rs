//! The staging areas of a node: each is opened with the first mount of its volume, from what lies on the disk, and closed with
//! the last.

use super::area::{Area, draw};
use super::disk::{Disk, Hung};
use super::locks::Locks;
use super::names::{APPEND, BEGUN, FILE, LATE, OPEN, PROBE_KEY, RESULT, ROOT_KEY, SOURCE_KEY, State, result_of};
use super::record::Record;
use super::times::Times;
use super::{Outcome, Waiting, send};
use crate::lock::lock;
use crate::state::StateDir;
use crate::volumes::scope::Scope;
use journal::{Change, Journal};
use link::broker::MountId;
use link::{Refusal, RefusalKind};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use store::{Sink, StoreError};
use tokio::sync::OnceCell;
use volume::{ScopeId, VolumeId, VolumeSpec};

/// Of the journal's records.
const FORMAT: u32 = 1;
const JOURNAL: &str = "journal";
const FILES: &str = "files";

/// All areas of this node.
pub(crate) struct Staging {
    dir: PathBuf,
    /// How long its disk may take.
    limit: Duration,
    areas: tokio::sync::Mutex<HashMap<VolumeId, Weak<Area>>>,
    /// The same, for who does not wait for one that is being opened.
    open: Mutex<Vec<Weak<Area>>>,
}

impl Staging {
    pub(crate) fn new(dir: PathBuf, limit: Duration) -> Self {
        Self { dir, limit, areas: tokio::sync::Mutex::default(), open: Mutex::default() }
    }

    /// Of all volumes that are open.
    pub(crate) fn waiting(&self) -> Waiting {
        let open: Vec<Arc<Area>> = lock(&self.open).iter().filter_map(Weak::upgrade).collect();
        open.iter().map(|area| area.waiting()).fold(Waiting::default(), |sum, waiting| Waiting {
            files: sum.files + waiting.files,
            bytes: sum.bytes.saturating_add(waiting.bytes),
            conflicts: sum.conflicts + waiting.conflicts,
        })
    }

    /// What the open area of this volume has its names from. Newer keys open the same scope: inode numbers are of it.
    pub(crate) async fn scope_of(&self, spec: &VolumeSpec) -> Option<ScopeId> {
        let area = self.areas.lock().await.get(&spec.id).and_then(Weak::upgrade)?;
        (shown(&area.spec) == shown(spec)).then(|| area.scope.id.clone())
    }

    /// The area of this volume, opened if no mount has it.
    pub(crate) async fn open(
        &self,
        spec: &VolumeSpec,
        scope: &Arc<Scope>,
        numbers: &Arc<StateDir>,
    ) -> Result<Arc<Area>, Refusal> {
        let mut areas = self.areas.lock().await;
        let refused = |why: String| {
            Refusal::new(RefusalKind::Unavailable, format!("staging area of {}: {why}", spec.id))
        };
        let source = shown(spec);
        if let Some(area) = areas.get(&spec.id).and_then(Weak::upgrade) {
            let of_it = shown(&area.spec);
            if of_it != source {
                return Err(refused(still_of(&of_it, &source)));
            }
            if area.scope.id != scope.id {
                return Err(refused(
                    "another pod's publish with other credentials came first; this one is tried again".into(),
                ));
            }
            return Ok(area);
        }
        areas.retain(|_, area| area.strong_count() > 0);
        let sink = scope.source.sink().ok_or_else(|| {
            Refusal::new(
                RefusalKind::Invalid,
                format!("{} cannot be written to by this version", spec.source),
            )
        })?;
        let dir = self.dir.join(spec.id.as_str());
        let disk = Disk::start(self.limit).map_err(|e| refused(e.to_string()))?;
        let opened = disk
            .run(move || open_dir(&dir, &source))
            .await
            .map_err(|Hung| refused("its disk does not answer".into()))?;
        let (files, journal, read) = opened.map_err(refused)?;
        let area = Arc::new_cyclic(|me| Area {
            volume: spec.id.clone(),
            scope: scope.clone(),
            sink,
            spec: spec.clone(),
            files: Arc::new(files),
            numbers: numbers.clone(),
            disk,
            journal: Arc::new(Mutex::new(Some(journal))),
            released: AtomicBool::new(false),
            state: Arc::new(Mutex::new(read.state)),
            locks: Locks::default(),
            ordering: tokio::sync::Mutex::default(),
            dropping: Arc::default(),
            counting: tokio::sync::Mutex::new(()),
            mounts: Mutex::default(),
            able: OnceCell::new(),
            room: AtomicU64::new(0),
            kept_dirs: Mutex::default(),
            times: Times::default(),
            recalled: Mutex::new(read.recalled),
            me: me.clone(),
        });
        areas.insert(spec.id.clone(), Arc::downgrade(&area));
        *lock(&self.open) = areas.values().cloned().collect();
        send::keep_sending(&area);
        Ok(area)
    }
}

/// The directory of a volume in a bucket, which is not there before something is in it.
pub(crate) async fn make_root(sink: &dyn Sink) -> Result<(), StoreError> {
    let failed = |e: std::io::Error| StoreError::Invalid { what: "/dev/urandom".into(), why: e.to_string() };
    let write = store::Write { id: draw().map_err(failed)?, attributes: store::Attributes::default() };
    sink.make_dir(b"", &write).await
}

/// What a volume shows, and where.
fn shown(spec: &VolumeSpec) -> String {
    let endpoint = spec.endpoint().map(|endpoint| format!(" at {endpoint}")).unwrap_or_default();
    format!("{}{endpoint}", spec.source)
}

fn still_of(before: &str, now: &str) -> String {
    format!(
        "it holds what was written to {before} and is not in the store yet, and this volume is {now}: publish the volume \
         of {before} on this node again until it is uploaded, or give this volume a handle of its own"
    )
}

/// What a journal says.
struct Read {
    state: State,
    recalled: Vec<(MountId, u64, Outcome)>,
}

/// `source`: what the volume shows now.
fn open_dir(dir: &Path, source: &str) -> Result<(OwnedFd, Journal, Read), String> {
    let text = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
    std::fs::create_dir_all(dir.join(FILES)).map_err(|e| format!("{} cannot be made: {e}", dir.display()))?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let top = rustix::fs::open(dir, flags, Mode::empty()).map_err(text("its directory"))?;
    let files =
        rustix::fs::openat(&top, FILES, flags, Mode::empty()).map_err(text("its directory of files"))?;
    let (mut journal, recovered) = Journal::open(top.as_fd(), JOURNAL, FORMAT).map_err(|e| e.to_string())?;
    if recovered.cut_bytes > 0 {
        tracing::warn!(dir = %dir.display(), bytes = recovered.cut_bytes, "the end of a staging journal was not written out: cut off");
    }
    let mut read = read(&journal, files.as_fd())?;
    if let Some(before) = read.state.source.take_if(|before| before != source) {
        // The volume was made anew under the handle that it had: these names and numbers are another source's.
        let is_wanted =
            |record: &Record| !record.clean && (record.path.is_some() || !record.former.is_empty());
        if read.state.files.values().any(|file| is_wanted(&file.record())) {
            return Err(still_of(&before, source));
        }
        let keys: Vec<Vec<u8>> = journal.iter().map(|(key, _)| key.to_vec()).collect();
        let all: Vec<Change<'_>> = keys.iter().map(|key| Change::Delete { key }).collect();
        journal.batch(&all).map_err(|e| e.to_string())?;
        read = Read { state: State::default(), recalled: Vec::new() };
    }
    if read.state.source.is_none() {
        let known = Change::Put { key: SOURCE_KEY, value: source.as_bytes() };
        journal.batch(&[known]).map_err(|e| e.to_string())?;
        read.state.source = Some(source.into());
    }
    remove_strays(&files, &read.state);
    Ok((files, journal, read))
}

fn read(journal: &Journal, files: BorrowedFd<'_>) -> Result<Read, String> {
    let mut read = Read { state: State::default(), recalled: Vec::new() };
    // In the order of the keys: appends before files.
    for (key, value) in journal.iter() {
        let unknown =
            || format!("its journal has a record that this version does not understand ({key:02x?})");
        match key.split_first() {
            Some((&FILE, ino)) => {
                let ino = u64::from_be_bytes(ino.try_into().map_err(|_| unknown())?);
                let record: Record = postcard::from_bytes(value).map_err(|_| unknown())?;
                read.state.recall(ino, record, files)?;
            }
            Some((&RESULT, rest)) => {
                let (mount, unique) = result_of(rest).ok_or_else(unknown)?;
                let outcome: Outcome = postcard::from_bytes(value).map_err(|_| unknown())?;
                read.state.results.entry(mount).or_default().push_back(unique);
                read.recalled.push((mount, unique, outcome));
            }
            Some((&BEGUN, rest)) => {
                let request = result_of(rest).ok_or_else(unknown)?;
                read.state.results.entry(request.0).or_default().push_back(request.1);
                read.state.begun.insert(request);
            }
            Some((&OPEN, rest)) => {
                let (mount, ino) = result_of(rest).ok_or_else(unknown)?;
                let times = u32::from_be_bytes(value.try_into().map_err(|_| unknown())?);
                read.state.set_open(mount, ino, times);
            }
            Some((&APPEND, rest)) => {
                let request = result_of(rest).ok_or_else(unknown)?;
                let append = postcard::from_bytes(value).map_err(|_| unknown())?;
                read.state.results.entry(request.0).or_default().push_back(request.1);
                read.state.appends.insert(request, append);
            }
            Some((&LATE, id)) => {
                let id = String::from_utf8(id.to_vec()).map_err(|_| unknown())?;
                read.state.late.insert(id, postcard::from_bytes(value).map_err(|_| unknown())?);
            }
            Some(_) if key == PROBE_KEY => {
                read.state.probe = Some(String::from_utf8(value.to_vec()).map_err(|_| unknown())?);
            }
            Some(_) if key == SOURCE_KEY => {
                read.state.source = Some(String::from_utf8(value.to_vec()).map_err(|_| unknown())?);
            }
            Some(_) if key == ROOT_KEY => {
                read.state.root = Some(postcard::from_bytes(value).map_err(|_| unknown())?);
            }
            _ => return Err(unknown()),
        }
    }
    Ok(read)
}

/// Files that no record names: made for a change that did not happen any more.
fn remove_strays(files: &OwnedFd, state: &State) {
    let Ok(entries) = rustix::fs::Dir::read_from(files) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let ino = name.to_str().ok().and_then(|name| u64::from_str_radix(name, 16).ok());
        let is_known = ino.and_then(|ino| state.files.get(&ino)).is_some_and(|file| lock(&file.record).local);
        if ino.is_some() && !is_known {
            let _ = rustix::fs::unlinkat(files, name, AtFlags::empty()); // looked at again at the next start
        }
    }
}
