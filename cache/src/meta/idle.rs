//! Stores that are not open: what each takes of the disk, since when, and how it is removed.
//!
//! Nothing is removed that this module did not recognise: a directory (no link to one) with the marker of a store in
//! it, or with nothing at all, and without a file that no store has.

use super::environment::{DATA, Home, LOCK, MARKER, Marker, SET_ASIDE, State};
use super::types::MetaError;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, unlinkat};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

/// The marker last: as long as it is there the rest is known to be a store's. Without data it is a store that starts
/// empty.
const FILES: [&str; 4] = [DATA, LOCK, SET_ASIDE, MARKER];
/// Of `st_blocks`, whatever the file system's own blocks are.
const BLOCK: u64 = 512;

/// A store as it lies on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idle {
    /// Bytes of the disk.
    pub bytes: u64,
    /// When it was closed, or opened by a process that has not closed it.
    pub since: SystemTime,
    pub left: Left,
}

/// In which state its last owner left a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    Closed,
    /// It is open, or its owner was killed.
    Open,
    /// The next opening would set it aside, or start it empty.
    Worthless,
}

/// None: nothing of ours, or nothing at all.
pub fn look(dir: &Path) -> Result<Option<Idle>, MetaError> {
    let fail = io_error("cannot look at a metadata store");
    let about = match fs::symlink_metadata(dir) {
        Ok(about) if about.is_dir() => about,
        Ok(_) => return Ok(None),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(fail(e)),
    };
    let mut bytes = about.blocks() * BLOCK;
    let (mut marker, mut data, mut empty) = (None, false, true);
    for entry in fs::read_dir(dir).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let Some(name) = FILES.into_iter().find(|name| entry.file_name() == *name) else { return Ok(None) };
        let about = entry.metadata().map_err(fail)?;
        if !about.is_file() {
            return Ok(None);
        }
        bytes += about.blocks() * BLOCK;
        empty = false;
        data |= name == DATA;
        if name == MARKER {
            marker = Some(about.modified().map_err(fail)?);
        }
    }
    let (left, since) = match marker {
        Some(since) => match Marker::read(&dir.join(MARKER))? {
            None => return Ok(None),
            Some(marker) if !data || marker.objection().is_some() => (Left::Worthless, since),
            Some(marker) if marker.state == State::Open => (Left::Open, since),
            Some(_) => (Left::Closed, since),
        },
        // Of one that was being made or removed when its owner died.
        None if empty => (Left::Worthless, about.modified().map_err(fail)?),
        None => return Ok(None),
    };
    Ok(Some(Idle { bytes, since, left }))
}

/// Its owner was killed, and no mount uses it any more: closes it in its place. False: a process has it open.
pub fn close(dir: &Path) -> Result<bool, MetaError> {
    let home = match Home::take_now(dir) {
        Err(MetaError::InUse(_)) => return Ok(false),
        home => home?,
    };
    // What was written is in the kernel's hands: on the disk it vouches for itself.
    let data = File::open(dir.join(DATA)).map_err(io_error("cannot open an idle metadata store"))?;
    data.sync_all().map_err(io_error("cannot write out an idle metadata store"))?;
    home.mark(State::Clean)?;
    home.give_back();
    Ok(true)
}

/// Gives the reserve of a store that cannot be closed any more back to the disk. Unless a process has it open.
pub fn trim(dir: &Path) -> Result<(), MetaError> {
    match Home::take_now(dir) {
        Err(MetaError::InUse(_)) => Ok(()),
        home => home.map(|home| home.give_back()),
    }
}

/// It is as if it had been left just now: for times that lie in the future.
pub fn touch(dir: &Path) -> Result<(), MetaError> {
    let fail = io_error("cannot touch the marker of a metadata store");
    let marker = File::options().write(true).open(dir.join(MARKER)).map_err(fail)?;
    marker.set_modified(SystemTime::now()).map_err(fail)
}

/// False: a process has it open, or it is none of ours. A process that is killed in the middle leaves a store that
/// starts empty.
pub fn remove(dir: &Path) -> Result<bool, MetaError> {
    let fail = |e: Errno| io_error("cannot remove an idle metadata store")(e.into());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let handle: OwnedFd = match rustix::fs::open(dir, flags, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(false),
        other => other.map_err(fail)?,
    };
    match rustix::fs::flock(&handle, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(false),
        other => other.map_err(fail)?,
    }
    // Now that no other process can change it.
    if look(dir)?.is_none() {
        return Ok(false);
    }
    for name in FILES {
        match unlinkat(&handle, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => return Err(fail(e)),
        }
        abort_after(name);
    }
    match rustix::fs::rmdir(dir) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(e) => Err(fail(e)),
    }
}

/// Where a test kills the process that removes a store.
#[cfg(not(test))]
fn abort_after(_: &str) {}

#[cfg(test)]
fn abort_after(removed: &str) {
    if std::env::var("MILLPOND_TEST_ABORT_AFTER").is_ok_and(|name| name == removed) {
        std::process::abort();
    }
}

fn io_error(what: &'static str) -> impl Fn(io::Error) -> MetaError + Copy {
    move |source| MetaError::Io { what, source }
}
