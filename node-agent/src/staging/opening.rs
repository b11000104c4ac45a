//! Opens the directory of an area, and reads what its journal says.

use super::elsewhere::Elsewhere;
use super::names::{
    APPEND, BEGUN, BOOT_KEY, ELSEWHERE, Entry, FILE, FILES, LATE, MOVED, OPEN, PROBE_KEY, RESULT, ROOT_KEY,
    SOURCE_KEY, State, TAG_KEY, Tag, UPLOAD, changes, elsewhere_entry, result_of,
};
use super::ongoing::Noted;
use super::random::random;
use super::record::Record;
use super::{Outcome, recover};
use crate::lock::lock;
use journal::Journal;
use link::broker::MountId;
use rustix::fs::{AtFlags, Mode, OFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use store::WriteId;

/// Of the journal's records.
pub(super) const FORMAT: u32 = 1;
pub(super) const JOURNAL: &str = "journal";
/// Losses of power of which the writes before them are known as ours.
const TAGS_KEPT: usize = 16;

pub(super) fn still_of(before: &str, now: &str) -> String {
    format!(
        "it holds what was written to {before} and is not in the store yet, and this volume is {now}: publish the volume \
         of {before} on this node again until it is uploaded, or give this volume a handle of its own"
    )
}

/// The directory of an area, and what its journal says.
pub(super) struct Opened {
    /// It was made just now.
    pub(super) is_new: bool,
    pub(super) files: OwnedFd,
    pub(super) journal: Journal,
    pub(super) state: State,
    pub(super) recalled: Vec<(MountId, u64, Outcome)>,
    pub(super) tag: Tag,
    pub(super) lost_tags: Vec<Tag>,
    /// The node has lost its power meanwhile: this is to be noted once the store was asked what it has.
    pub(super) recovering: Option<Vec<Entry>>,
}

/// Which run of the kernel this is.
fn boot() -> Result<String, String> {
    #[cfg(test)]
    if let Some(disk) = super::simulated::of_this_thread() {
        return Ok(disk.boot());
    }
    // Without it a loss of power would go unnoticed.
    cache::meta::boot_id().map_err(|e| e.to_string())
}

/// Blocking. `source`: what the volume shows now.
pub(super) fn open(dir: &Path, source: &str) -> Result<Opened, String> {
    let text = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
    let is_new = !dir.try_exists().map_err(|e| format!("{}: {e}", dir.display()))?;
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
    let boot = boot()?;
    let mut read = read(&journal, files.as_fd(), &boot)?;
    if let Some(before) = read.state.source.take_if(|before| before != source) {
        // The volume was made anew under the handle that it had: these names and numbers are another source's.
        if read.state.files.values().any(|file| file.record().waits()) {
            return Err(still_of(&before, source));
        }
        let keys = journal.iter().map(|(key, _)| (key.to_vec(), None)).collect();
        change(&mut journal, keys)?;
        read = Replayed::default();
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
        // Their names, too, are to outlast a loss of power.
        for made in [&files, &top] {
            rustix::fs::fsync(made).map_err(text("its directory cannot be written out"))?;
        }
        sync_above(dir)?;
        known.push((BOOT_KEY.to_vec(), Some(boot.as_bytes().to_vec())));
    }
    let mut recovering = None;
    change(&mut journal, std::mem::take(&mut read.changes))?;
    if read.is_recovered {
        tracing::warn!(
            dir = %dir.display(),
            "this node has started anew since the volume was mounted here last: what was not written out is taken from the store"
        );
        recovering = Some(known);
    } else if !known.is_empty() {
        change(&mut journal, known)?;
        journal.sync().map_err(|e| e.to_string())?;
        #[cfg(test)]
        super::simulated::journal_written_out();
    }
    (read.state.source, read.state.boot) = (Some(source.into()), Some(boot));
    remove_strays(&files, &read.state);
    let Replayed { state, recalled, .. } = read;
    let tag = tags.remove(0);
    Ok(Opened { is_new, files, journal, state, recalled, tag, lost_tags: tags, recovering })
}

/// So many changes at once: a frame of the journal holds no more bytes than it does.
const CHANGES_AT_ONCE: usize = 256;

fn change(journal: &mut Journal, entries: Vec<Entry>) -> Result<(), String> {
    entries
        .chunks(CHANGES_AT_ONCE)
        .try_for_each(|some| journal.batch(&changes(some)).map_err(|e| e.to_string()))
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
struct Replayed {
    state: State,
    recalled: Vec<(MountId, u64, Outcome)>,
    is_recovered: bool,
    /// Of the journal, to be made.
    changes: Vec<Entry>,
}

fn read(journal: &Journal, files: BorrowedFd<'_>, boot: &str) -> Result<Replayed, String> {
    let mut read = Replayed::default();
    let before = journal.iter().find(|(key, _)| *key == BOOT_KEY);
    read.is_recovered = before.is_some_and(|(_, before)| before != boot.as_bytes());
    // In the order of the keys: appends, and what files have elsewhere, before files.
    for (key, value) in journal.iter() {
        let unknown =
            || format!("its journal has a record that this version does not understand ({key:02x?})");
        if read.is_recovered && recover::is_over(key) {
            read.changes.push((key.to_vec(), None));
            continue;
        }
        match key.split_first() {
            Some((&ELSEWHERE, ino)) => {
                let ino = u64::from_be_bytes(ino.try_into().map_err(|_| unknown())?);
                let mut elsewhere: Elsewhere = postcard::from_bytes(value).map_err(|_| unknown())?;
                if read.is_recovered {
                    elsewhere = elsewhere.after_loss_of_power();
                    read.changes.push(elsewhere_entry(ino, Some(&elsewhere)).map_err(|_| unknown())?);
                }
                read.state.elsewhere.insert(ino, elsewhere);
            }
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
            Some((&MOVED, path)) => {
                read.state.moved.insert(path.to_vec(), postcard::from_bytes(value).map_err(|_| unknown())?);
            }
            Some((&LATE, id)) => {
                let id = String::from_utf8(id.to_vec()).map_err(|_| unknown())?;
                read.state.late.insert(id, postcard::from_bytes(value).map_err(|_| unknown())?);
            }
            Some((&UPLOAD, write)) => {
                let write = std::str::from_utf8(write).ok().and_then(WriteId::parse).ok_or_else(unknown)?;
                let multipart = postcard::from_bytes(value).map_err(|_| unknown())?;
                read.state.uploads.insert(write, Noted::recalled(multipart));
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
    // Of files that are gone, or have no bytes here.
    for (ino, _) in read.state.elsewhere.drain() {
        read.changes.push(elsewhere_entry(ino, None).map_err(|wrong| format!("{wrong:?}"))?);
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
