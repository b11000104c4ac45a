//! The staging areas of a node: each is opened with the first mount of its volume, from what lies on the disk, and closed with
//! the last.

use super::area::{Area, random};
use super::discards::Discards;
use super::disk::{Disk, Hung};
use super::failures::Failures;
use super::locks::Locks;
use super::names::{
    APPEND, BEGUN, BOOT_KEY, Entry, FILE, FILES, LATE, OPEN, PROBE_KEY, RESULT, ROOT_KEY, SOURCE_KEY, State,
    TAG_KEY, Tag, result_of,
};
use super::record::Record;
use super::times::Times;
use super::{Outcome, Waiting, recover, send};
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
use tokio::time::Instant;
use volume::{ScopeId, VolumeId, VolumeSpec};

/// Of the journal's records.
pub(super) const FORMAT: u32 = 1;
pub(super) const JOURNAL: &str = "journal";
/// Losses of power of which the writes before them are known as ours.
const TAGS_KEPT: usize = 16;

/// All areas of this node.
pub(crate) struct Staging {
    pub(super) dir: PathBuf,
    /// How long its disk may take.
    pub(super) limit: Duration,
    /// Held while one is opened, or looked into without being opened.
    pub(super) areas: tokio::sync::Mutex<HashMap<VolumeId, Weak<Area>>>,
    /// The same, for who does not wait for one that is being opened.
    open: Mutex<Vec<Weak<Area>>>,
    /// Areas in which nothing waits and that were not opened since: source, and whether they are described.
    pub(super) idle: Mutex<HashMap<VolumeId, (Option<String>, bool)>>,
    /// When this agent began to take mounts.
    pub(super) started: Instant,
}

impl Staging {
    pub(crate) fn new(dir: PathBuf, limit: Duration) -> Self {
        Self {
            dir,
            limit,
            areas: tokio::sync::Mutex::default(),
            open: Mutex::default(),
            idle: Mutex::default(),
            started: Instant::now(),
        }
    }

    /// Those that are open, whether a mount has them or not.
    pub(crate) fn open_areas(&self) -> Vec<Arc<Area>> {
        lock(&self.open).iter().filter_map(Weak::upgrade).collect()
    }

    /// Of all volumes that are open.
    pub(crate) fn waiting(&self) -> Waiting {
        self.open_areas().iter().map(|area| area.waiting()).fold(Waiting::default(), |sum, waiting| Waiting {
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
        lock(&self.idle).remove(&spec.id);
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
            tag: read.tag,
            lost_tags: read.lost_tags,
            able: OnceCell::new(),
            room: AtomicU64::new(0),
            kept_dirs: Mutex::default(),
            times: Times::default(),
            recalled: Mutex::new(read.recalled),
            failures: Failures::default(),
            discards: Discards::default(),
            described: tokio::sync::Mutex::default(),
            me: me.clone(),
        });
        if let Some(entries) = read.recovering {
            let failed = |wrong| refused(format!("after a loss of power it waits for the store: {wrong:?}"));
            area.clone().recover().await.map_err(failed)?;
            area.commit(entries, |_| ()).await.map_err(failed)?;
            area.sync_disk().await.map_err(failed)?;
        }
        areas.insert(spec.id.clone(), Arc::downgrade(&area));
        *lock(&self.open) = areas.values().cloned().collect();
        send::keep_sending(&area);
        Ok(area)
    }
}

/// The directory of a volume in a bucket, which is not there before something is in it.
pub(crate) async fn make_root(sink: &dyn Sink) -> Result<(), StoreError> {
    let failed = |e: std::io::Error| StoreError::Invalid { what: "/dev/urandom".into(), why: e.to_string() };
    let id = store::WriteId::new(random().map_err(failed)?);
    let write = store::Write { id, attributes: store::Attributes::default() };
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
    tag: Tag,
    lost_tags: Vec<Tag>,
    /// The node has lost its power meanwhile: this is to be noted once the store was asked what it has.
    recovering: Option<Vec<Entry>>,
}

/// Which run of the kernel this is.
fn boot() -> String {
    #[cfg(test)]
    if let Some(disk) = super::simulated::of_this_thread() {
        return disk.boot();
    }
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
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
    #[cfg(test)]
    super::simulated::journal_written_out();
    if recovered.cut_bytes > 0 {
        tracing::warn!(dir = %dir.display(), bytes = recovered.cut_bytes, "the end of a staging journal was not written out: cut off");
    }
    // Their names, too, are to outlast a loss of power.
    for made in [&files, &top] {
        rustix::fs::fsync(made).map_err(text("its directory cannot be written out"))?;
    }
    sync_above(dir)?;
    let boot = boot();
    let mut read = read(&journal, files.as_fd(), &boot)?;
    if let Some(before) = read.state.source.take_if(|before| before != source) {
        // The volume was made anew under the handle that it had: these names and numbers are another source's.
        if read.state.files.values().any(|file| file.record().waits()) {
            return Err(still_of(&before, source));
        }
        let keys = journal.iter().map(|(key, _)| (key.to_vec(), None)).collect();
        change(&mut journal, keys)?;
        read = Found::default();
    }
    let mut tags = read.state.tags.clone();
    if tags.is_empty() || read.is_recovered {
        tags.insert(0, random().map_err(|e| format!("/dev/urandom: {e}"))?);
        tags.truncate(TAGS_KEPT);
    }
    let tags_written = postcard::to_stdvec(&tags).map_err(|e| e.to_string())?;
    let mut known = Vec::new();
    if read.state.source.is_none() {
        known.push((SOURCE_KEY.to_vec(), Some(source.as_bytes().to_vec())));
    }
    if tags != read.state.tags {
        known.push((TAG_KEY.to_vec(), Some(tags_written)));
    }
    if read.state.boot.as_ref() != Some(&boot) {
        known.push((BOOT_KEY.to_vec(), Some(boot.as_bytes().to_vec())));
    }
    let mut recovering = None;
    if read.is_recovered {
        tracing::warn!(
            dir = %dir.display(),
            "this node has started anew since the volume was mounted here last: what was not written out is taken from the store"
        );
        change(&mut journal, std::mem::take(&mut read.changes))?;
        recovering = Some(known);
    } else if !known.is_empty() {
        change(&mut journal, known)?;
        journal.sync().map_err(|e| e.to_string())?;
        #[cfg(test)]
        super::simulated::journal_written_out();
    }
    (read.state.source, read.state.boot) = (Some(source.into()), Some(boot));
    remove_strays(&files, &read.state);
    let Found { state, recalled, .. } = read;
    let tag = tags.remove(0);
    Ok((files, journal, Read { state, recalled, tag, lost_tags: tags, recovering }))
}

/// So many changes at once: a frame of the journal holds no more bytes than it does.
const CHANGES_AT_ONCE: usize = 256;

fn change(journal: &mut Journal, entries: Vec<Entry>) -> Result<(), String> {
    for some in entries.chunks(CHANGES_AT_ONCE) {
        let changes: Vec<Change<'_>> = some
            .iter()
            .map(|(key, value)| match value {
                Some(value) => Change::Put { key, value },
                None => Change::Delete { key },
            })
            .collect();
        journal.batch(&changes).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Of the volume's directory, and of the one of all volumes.
fn sync_above(dir: &Path) -> Result<(), String> {
    for above in dir.ancestors().skip(1).take(2) {
        let failed = |e: std::io::Error| format!("{} cannot be written out: {e}", above.display());
        std::fs::File::open(above).and_then(|above| above.sync_all()).map_err(failed)?;
    }
    Ok(())
}

/// What is read of a journal.
#[derive(Default)]
struct Found {
    state: State,
    recalled: Vec<(MountId, u64, Outcome)>,
    is_recovered: bool,
    /// Of the journal, to be made.
    changes: Vec<Entry>,
}

fn read(journal: &Journal, files: BorrowedFd<'_>, boot: &str) -> Result<Found, String> {
    let mut read = Found::default();
    let before = journal.iter().find(|(key, _)| *key == BOOT_KEY);
    read.is_recovered = before.is_some_and(|(_, before)| before != boot.as_bytes());
    // In the order of the keys: appends before files.
    for (key, value) in journal.iter() {
        let unknown =
            || format!("its journal has a record that this version does not understand ({key:02x?})");
        if read.is_recovered && recover::is_over(key) {
            read.changes.push((key.to_vec(), None));
            continue;
        }
        match key.split_first() {
            Some((&FILE, ino)) => {
                let ino = u64::from_be_bytes(ino.try_into().map_err(|_| unknown())?);
                let mut record: Option<Record> = Some(postcard::from_bytes(value).map_err(|_| unknown())?);
                if read.is_recovered
                    && let Some(before) = record.take()
                {
                    let entry;
                    (record, entry) = recover::recovered(ino, before).map_err(|_| unknown())?;
                    read.changes.extend(entry);
                }
                if let Some(record) = record {
                    read.state.recall(ino, record, files)?;
                }
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
            Some(_) if key == BOOT_KEY => {
                read.state.boot = Some(String::from_utf8(value.to_vec()).map_err(|_| unknown())?);
            }
            Some(_) if key == TAG_KEY => {
                read.state.tags = postcard::from_bytes(value).map_err(|_| unknown())?;
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
