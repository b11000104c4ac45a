//! The directory as a sink: a file is written beside its place, brought to the disk, and renamed into it.
//!
//! Each file remembers its write in an extended attribute, where the file system has those. Conditions hold among those who write
//! through this module; whoever writes past it between the look and the rename is found out afterwards, where the file
//! system can exchange two names, and put back.

use super::{Directory, Progress, RESOLVE, Tree, is_segments, modified_ns, version};
use crate::sink::{
    Attributes, Body, Condition, Leftover, Part, Seen, Sink, SinkLimits, Upload, Write, WriteId, Written,
};
use crate::{StoreError, Version};
use async_trait::async_trait;
use crc_fast::{CrcAlgorithm, Digest};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RawDir, RawMode, RenameFlags, Stat, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct DirectorySink(pub(super) Directory);

const TEMPORARY: &str = ".millpond-";
const WRITE: &str = "user.millpond.write";
const COPY_BYTES: usize = 1 << 20;
/// So much is copied at once by the kernel, bytes.
const COPY_STEP: usize = 64 << 20;
/// So much is written before it is brought to the disk: whoever waits sees that it gets on, bytes.
const SYNC_STEP: u64 = 64 << 20;
/// Nobody goes on with a file beside its place that has not changed for so long.
const LEFT_AFTER: Duration = Duration::from_secs(20 * 60);
/// Of a new file of which nobody has said it.
const MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

fn temporary(id: WriteId) -> OsString {
    format!("{TEMPORARY}{id}").into()
}

/// A file that is being written, or was when its writer died: nobody is shown it.
pub(super) fn is_temporary(name: &[u8]) -> bool {
    let id = name.strip_prefix(TEMPORARY.as_bytes()).and_then(|id| std::str::from_utf8(id).ok());
    id.is_some_and(|id| WriteId::parse(id).is_some())
}

/// A name and the directory that it is in.
struct Place<'p> {
    parent: OwnedFd,
    name: &'p OsStr,
    path: &'p [u8],
}

/// What two looks at one file have in common although it was renamed between them.
fn same(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino, a.st_size, modified_ns(a)) == (b.st_dev, b.st_ino, b.st_size, modified_ns(b))
}

/// Has it the bytes of that version? (A change of its name changes the time of its last change.)
fn was(wanted: &Version, found: &Stat) -> bool {
    wanted.0.starts_with(&format!("{}-{}-", found.st_size, modified_ns(found)))
}

impl Tree {
    fn place<'p>(&self, path: &'p [u8]) -> Result<Place<'p>, StoreError> {
        if !is_segments(path) {
            let why = "no file can have this name: names have at most 255 bytes".into();
            return Err(StoreError::Unsupported { what: self.what(path), why });
        }
        let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&b""[..], path),
        };
        // Not PATH: it is synced.
        let parent = self.open(parent, OFlags::RDONLY | OFlags::DIRECTORY)?;
        Ok(Place { parent, name: OsStr::from_bytes(name), path })
    }

    fn failed(&self, path: &[u8], error: Errno) -> StoreError {
        let what = self.what(path);
        match error {
            Errno::NOSPC | Errno::DQUOT => StoreError::Full { what, why: error.to_string() },
            Errno::ROFS => StoreError::Denied { what, why: "its file system is mounted read-only".into() },
            Errno::ACCESS | Errno::PERM => StoreError::Denied {
                what,
                why: "the agent's user may not write it: change the directory's mode or owner".into(),
            },
            Errno::FBIG => {
                StoreError::Unsupported { what, why: "its file system takes no file of this size".into() }
            }
            Errno::EXIST | Errno::NOTEMPTY => StoreError::Conflict { what, found: None },
            Errno::ISDIR | Errno::NOTDIR => StoreError::Unsupported {
                what,
                why: "a directory is where a file should be, or the other way".into(),
            },
            other => self.error(path, other),
        }
    }

    /// What is there; None: nothing.
    fn stat(&self, place: &Place<'_>) -> Result<Option<Stat>, StoreError> {
        match rustix::fs::statat(&place.parent, place.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(Some(found)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(self.failed(place.path, error)),
        }
    }

    fn seen(&self, place: &Place<'_>) -> Result<Option<Seen>, StoreError> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = rustix::fs::openat2(&place.parent, place.name, flags, Mode::empty(), RESOLVE);
        let file = match opened {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(self.error(place.path, error)),
        };
        let found = rustix::fs::fstat(&file).map_err(|e| self.error(place.path, e))?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            let why = "it is no file".into();
            return Err(StoreError::Unsupported { what: self.what(place.path), why });
        }
        let attributes = Attributes {
            mode: Some(found.st_mode & 0o7777),
            uid: Some(found.st_uid),
            gid: Some(found.st_gid),
            modified_ns: Some(modified_ns(&found)),
        };
        let size = u64::try_from(found.st_size).unwrap_or(0);
        Ok(Some(Seen { version: version(&found), size, attributes, write: written_by(&file) }))
    }

    /// What was there before must be what the condition says.
    fn holds(&self, place: &Place<'_>, condition: &Condition) -> Result<Option<Stat>, StoreError> {
        let found = self.stat(place)?;
        let holds = match (condition, &found) {
            (Condition::Any, _) | (Condition::Absent, None) => true,
            (Condition::Is(wanted), Some(found)) => version(found) == *wanted,
            (Condition::Absent, Some(_)) | (Condition::Is(_), None) => false,
        };
        match holds {
            true => Ok(found),
            false => Err(self.conflict(place, found.as_ref())),
        }
    }

    fn conflict(&self, place: &Place<'_>, found: Option<&Stat>) -> StoreError {
        StoreError::Conflict { what: self.what(place.path), found: found.map(version) }
    }

    /// Was it made by this write already? Then its answer was lost, or its caller has died.
    fn made(&self, place: &Place<'_>, id: WriteId) -> Result<Option<Written>, StoreError> {
        let seen = match self.seen(place) {
            Ok(seen) => seen,
            // What is no file was made by no write; what is to happen says so again.
            // What its owner may not read (0200) does not tell.
            Err(StoreError::Unsupported { .. } | StoreError::NotFound { .. } | StoreError::Denied { .. }) => {
                None
            }
            Err(error) => return Err(error),
        };
        let ours = seen.filter(|seen| seen.write == Some(id));
        Ok(ours.map(|seen| Written { version: seen.version, confirmed: true }))
    }

    /// As [`Self::made`], once what that write has left beside its place is settled: it may have died between the exchange of
    /// the two names and the removal of what was there before.
    fn made_before(
        &self,
        place: &Place<'_>,
        id: WriteId,
        condition: &Condition,
    ) -> Result<Option<Written>, StoreError> {
        let Some(written) = self.made(place, id)? else { return Ok(None) };
        let (beside, fail) = (temporary(id), |e| self.failed(place.path, e));
        let left = match rustix::fs::statat(&place.parent, &beside, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(left) => Some(left),
            Err(Errno::NOENT) => None,
            Err(error) => return Err(fail(error)),
        };
        if let (Condition::Is(wanted), Some(left)) = (condition, &left)
            && !was(wanted, left)
        {
            // Somebody was faster than the exchange: it is undone.
            let (parent, name) = (&place.parent, place.name);
            rustix::fs::renameat_with(parent, &beside, parent, name, RenameFlags::EXCHANGE).map_err(fail)?;
            self.remove(place, &beside)?;
            return Err(self.conflict(place, self.stat(place)?.as_ref()));
        }
        if left.is_some() {
            self.remove(place, &beside)?;
        }
        self.sync_directory(place)?;
        Ok(Some(written))
    }

    fn withdraw(
        &self,
        place: &Place<'_>,
        id: WriteId,
        condition: Option<&Condition>,
    ) -> Result<(), StoreError> {
        let made = match condition {
            Some(condition) => match self.made_before(place, id, condition) {
                Err(StoreError::Conflict { .. }) => return Ok(()), // what somebody else had made is back in its place
                made => made?,
            },
            None => self.made(place, id)?,
        };
        match made {
            // Where it was made, what lies beside it may be what somebody else had made meanwhile.
            Some(_) => Ok(()),
            None => self.remove(place, &temporary(id)),
        }
    }

    /// `fill` writes the bytes.
    fn make(
        &self,
        place: &Place<'_>,
        write: &Write,
        condition: &Condition,
        fill: impl FnOnce(&OwnedFd) -> Result<(), StoreError>,
    ) -> Result<Written, StoreError> {
        if let Some(written) = self.made_before(place, write.id, condition)? {
            return Ok(written);
        }
        self.holds(place, condition)?;
        let beside = temporary(write.id);
        let fail = |e| self.failed(place.path, e);
        // Of an attempt before, if there is one.
        self.remove(place, &beside)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file =
            rustix::fs::openat(&place.parent, &beside, flags, Mode::RUSR | Mode::WUSR).map_err(fail)?;
        let filled = fill(&file)
            // First: the attributes may be those of a file that its owner may not write to, such as git's objects.
            .and_then(|()| remember(&file, write.id).map_err(fail))
            .and_then(|()| describe(&file, &write.attributes, MODE).map_err(fail))
            .and_then(|()| rustix::fs::fsync(&file).map_err(fail))
            .and_then(|()| self.put_in_place(place, &beside, condition));
        if let Err(error) = filled {
            let _ = self.remove(place, &beside); // what went wrong says more
            return Err(error);
        }
        self.sync_directory(place)?;
        let made = rustix::fs::fstat(&file).map_err(fail)?;
        Ok(Written { version: version(&made), confirmed: true })
    }

    fn make_dir(&self, path: &[u8], attributes: &Attributes) -> Result<(), StoreError> {
        if path.is_empty() {
            return self.open(path, OFlags::RDONLY | OFlags::DIRECTORY).map(drop);
        }
        let (place, fail) = (self.place(path)?, |e| self.failed(path, e));
        match rustix::fs::mkdirat(&place.parent, place.name, Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let found = self.stat(&place)?.map(|found| FileType::from_raw_mode(found.st_mode));
                return match found {
                    Some(FileType::Directory) => Ok(()),
                    _ => Err(fail(Errno::EXIST)),
                };
            }
            Err(error) => return Err(fail(error)),
        }
        let made = self.open(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        describe(&made, attributes, DIRECTORY_MODE).map_err(fail)?;
        rustix::fs::fsync(made.as_fd()).map_err(fail)?;
        self.sync_directory(&place)
    }

    fn remove_dir(&self, path: &[u8]) -> Result<(), StoreError> {
        let place = self.place(path)?;
        let removed = || rustix::fs::unlinkat(&place.parent, place.name, AtFlags::REMOVEDIR);
        match removed() {
            // Nobody is shown what else is in it.
            Err(Errno::NOTEMPTY | Errno::EXIST) if self.remove_temporaries(path, LEFT_AFTER)? => {
                removed().map_err(|e| self.failed(path, e))?;
                self.sync_directory(&place)
            }
            Ok(()) => self.sync_directory(&place),
            Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.failed(path, error)),
        }
    }

    /// What writes have left in this directory that have not gone on for so long. True: nothing else is in it.
    fn remove_temporaries(&self, path: &[u8], idle: Duration) -> Result<bool, StoreError> {
        let fail = |e| self.failed(path, e);
        let dir = self.open(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        let mut buffer = [MaybeUninit::uninit(); 32 << 10];
        let mut names = RawDir::new(&dir, &mut buffer);
        let mut left = Vec::new();
        while let Some(found) = names.next() {
            let name = found.map_err(fail)?.file_name().to_bytes().to_vec();
            if matches!(&name[..], b"." | b"..") {
                continue;
            }
            if !is_temporary(&name) {
                return Ok(false);
            }
            left.push(name);
        }
        for name in left {
            let name = OsStr::from_bytes(&name);
            let about = match rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                about => about.map_err(fail)?,
            };
            // Of a clock that was set back nothing is known.
            if now.tv_sec.saturating_sub(about.st_ctime) < idle.as_secs() as i64 {
                return Ok(false);
            }
            match rustix::fs::unlinkat(&dir, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(fail(error)),
            }
        }
        Ok(true)
    }

    /// Renames what lies beside its place into it.
    fn put_in_place(
        &self,
        place: &Place<'_>,
        beside: &OsStr,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let (parent, name) = (&place.parent, place.name);
        let rename = |flags| rustix::fs::renameat_with(parent, beside, parent, name, flags);
        let fail = |e| self.failed(place.path, e);
        let before = self.holds(place, condition)?;
        match (condition, before) {
            (Condition::Absent, _) => match rename(RenameFlags::NOREPLACE) {
                // Not every file system can: but all make a second name only where there is none.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    rustix::fs::linkat(parent, beside, parent, name, AtFlags::empty()).map_err(fail)?;
                    self.remove(place, beside)
                }
                renamed => renamed.map_err(fail),
            },
            (Condition::Is(_), Some(before)) => match rename(RenameFlags::EXCHANGE) {
                Ok(()) => {
                    let out = rustix::fs::statat(parent, beside, AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
                    if same(&before, &out) {
                        return self.remove(place, beside);
                    }
                    // Somebody was faster.
                    rename(RenameFlags::EXCHANGE).map_err(fail)?;
                    Err(self.conflict(place, self.stat(place)?.as_ref()))
                }
                Err(Errno::INVAL | Errno::NOSYS) => rename(RenameFlags::empty()).map_err(fail),
                Err(Errno::NOENT) => Err(self.conflict(place, None)),
                Err(error) => Err(fail(error)),
            },
            _ => rename(RenameFlags::empty()).map_err(fail),
        }
    }

    fn remove(&self, place: &Place<'_>, name: &OsStr) -> Result<(), StoreError> {
        match rustix::fs::unlinkat(&place.parent, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.failed(place.path, error)),
        }
    }

    fn sync_directory(&self, place: &Place<'_>) -> Result<(), StoreError> {
        rustix::fs::fsync(&place.parent).map_err(|e| self.failed(place.path, e))
    }

    /// Whether what the disk gives back is what was written is known when all of it was read, before it has its name.
    fn fill(&self, path: &[u8], body: &Body, to: &OwnedFd, progress: &Progress) -> Result<(), StoreError> {
        let damaged = |why: String| StoreError::Damaged { what: self.what(path), why };
        let mut crc = Digest::new(CrcAlgorithm::Crc32Iscsi);
        let (mut buffer, mut at) = (Vec::with_capacity(COPY_BYTES), body.range.start);
        let mut written = WrittenBack::default();
        while at < body.range.end {
            buffer.clear();
            let mut read = || rustix::io::pread(&*body.file, rustix::buffer::spare_capacity(&mut buffer), at);
            let read = rustix::io::retry_on_intr(&mut read).map_err(|e| damaged(e.to_string()))?;
            if read == 0 {
                return Err(damaged("the file is shorter than what is to be written of it".into()));
            }
            let left = usize::try_from(body.range.end - at).unwrap_or(usize::MAX);
            buffer.truncate(left);
            crc.update(&buffer);
            write_all(to, &buffer).map_err(|e| self.failed(path, e))?;
            at += buffer.len() as u64;
            written.add(buffer.len() as u64, to).map_err(|e| self.failed(path, e))?;
            progress.step();
        }
        let found = crc.finalize();
        match found == u64::from(body.crc32c) {
            true => Ok(()),
            false => Err(damaged(format!(
                "what was written had checksum {:08x}, and the disk gives back {found:08x}",
                body.crc32c
            ))),
        }
    }

    /// All of `from`, if it still is that version when it has been read.
    fn duplicate(
        &self,
        path: &[u8],
        wanted: &Version,
        from: &OwnedFd,
        to: &OwnedFd,
        progress: &Progress,
    ) -> Result<(), StoreError> {
        let (mut offset, fail) = (0, |e| self.failed(path, e));
        let mut written = WrittenBack::default();
        loop {
            let copied = rustix::io::retry_on_intr(|| {
                rustix::fs::copy_file_range(from, Some(&mut offset), to, None, COPY_STEP)
            });
            match copied {
                Ok(0) => break,
                Ok(copied) => {
                    written.add(copied as u64, to).map_err(fail)?;
                    progress.step();
                }
                Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) if offset == 0 => {
                    return self.duplicate_by_reading(path, wanted, from, to, progress);
                }
                Err(error) => return Err(fail(error)),
            }
        }
        self.is_still(path, wanted, from)
    }

    fn duplicate_by_reading(
        &self,
        path: &[u8],
        wanted: &Version,
        from: &OwnedFd,
        to: &OwnedFd,
        progress: &Progress,
    ) -> Result<(), StoreError> {
        let (mut buffer, mut at, fail) = (vec![0; COPY_BYTES], 0, |e| self.failed(path, e));
        let mut written = WrittenBack::default();
        loop {
            let read =
                rustix::io::retry_on_intr(|| rustix::io::pread(from, &mut buffer, at)).map_err(fail)?;
            if read == 0 {
                return self.is_still(path, wanted, from);
            }
            write_all(to, &buffer[..read]).map_err(fail)?;
            at += read as u64;
            written.add(read as u64, to).map_err(fail)?;
            progress.step();
        }
    }

    fn is_still(&self, path: &[u8], wanted: &Version, file: &OwnedFd) -> Result<(), StoreError> {
        let now = rustix::fs::fstat(file).map_err(|e| self.failed(path, e))?;
        match version(&now) == *wanted {
            true => Ok(()),
            false => Err(StoreError::Stale { what: self.what(path) }),
        }
    }
}

/// Brings a long file to the disk step by step: its last fsync(2) would seem to hang.
#[derive(Default)]
struct WrittenBack {
    since: u64,
}

impl WrittenBack {
    fn add(&mut self, bytes: u64, to: &OwnedFd) -> Result<(), Errno> {
        self.since += bytes;
        if self.since < SYNC_STEP {
            return Ok(());
        }
        self.since = 0;
        rustix::fs::fdatasync(to)
    }
}

fn write_all(to: &OwnedFd, mut rest: &[u8]) -> Result<(), Errno> {
    while !rest.is_empty() {
        rest = &rest[rustix::io::retry_on_intr(|| rustix::io::write(to, rest))?..];
    }
    Ok(())
}

/// Not the bits with which a program takes its owner's rights: the owner may be the agent, and the directory is the host's.
const PERMISSIONS: u32 = 0o1777;

/// Whoever may not give files away keeps them: that is no reason not to write.
fn describe(file: &OwnedFd, attributes: &Attributes, mode: u32) -> Result<(), Errno> {
    let Attributes { uid, gid, modified_ns, .. } = *attributes;
    if uid.is_some() || gid.is_some() {
        let (uid, gid) = (uid.map(rustix::fs::Uid::from_raw), gid.map(rustix::fs::Gid::from_raw));
        match rustix::fs::fchown(file, uid, gid) {
            Ok(()) | Err(Errno::PERM | Errno::INVAL) => {}
            Err(error) => return Err(error),
        }
    }
    // After the owner, for a change of owner takes bits away.
    let mode = attributes.mode.unwrap_or(mode) & PERMISSIONS;
    rustix::fs::fchmod(file, Mode::from_raw_mode(mode as RawMode))?;
    let Some(ns) = modified_ns else { return Ok(()) };
    let last_modification =
        Timespec { tv_sec: ns.div_euclid(1_000_000_000), tv_nsec: ns.rem_euclid(1_000_000_000) as _ };
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT as _ };
    rustix::fs::futimens(file, &Timestamps { last_access: omit, last_modification })
}

fn remember(file: &OwnedFd, id: WriteId) -> Result<(), Errno> {
    match rustix::fs::fsetxattr(file, WRITE, id.to_string().as_bytes(), XattrFlags::empty()) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::PERM) => Ok(()),
        Err(error) => Err(error),
    }
}

fn written_by(file: &OwnedFd) -> Option<WriteId> {
    let mut text = [0; 64];
    let length = rustix::fs::fgetxattr(file, WRITE, &mut text).ok()?;
    WriteId::parse(std::str::from_utf8(text.get(..length)?).ok()?)
}

#[async_trait]
impl Sink for DirectorySink {
    /// What a file system takes it says itself.
    fn limits(&self) -> SinkLimits {
        SinkLimits {
            put_bytes_max: u64::MAX,
            part_bytes_min: 0,
            part_bytes_max: 0,
            parts_max: 0,
            object_bytes_max: volume::FILE_BYTES_MAX,
        }
    }

    async fn put(
        &self,
        path: &[u8],
        body: &Body,
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        let (path, body, write, condition) = (path.to_vec(), body.clone(), *write, condition.clone());
        let work = move |tree: &Tree, progress: &Progress| {
            let place = tree.place(&path)?;
            tree.make(&place, &write, &condition, |file| tree.fill(&path, &body, file, progress))
        };
        self.0.run_on("put", work).await
    }

    async fn begin(&self, path: &[u8], _: &Write) -> Result<Upload, StoreError> {
        let why = "a directory's files are written in one piece".into();
        Err(StoreError::Unsupported { what: self.0.tree.what(path), why })
    }

    async fn part(&self, upload: &Upload, _: u32, _: &Body) -> Result<Part, StoreError> {
        Err(StoreError::not_found(&self.0.tree.what(&upload.path)))
    }

    async fn complete(&self, upload: &Upload, _: &[Part], _: &Condition) -> Result<Written, StoreError> {
        Err(StoreError::not_found(&self.0.tree.what(&upload.path)))
    }

    async fn abandon(&self, upload: &Upload) -> Result<(), StoreError> {
        self.withdraw(&upload.path, upload.write, None).await
    }

    /// What lies beside its place.
    async fn withdraw(
        &self,
        path: &[u8],
        id: WriteId,
        condition: Option<&Condition>,
    ) -> Result<(), StoreError> {
        let (path, condition) = (path.to_vec(), condition.cloned());
        let work = move |tree: &Tree| match tree.place(&path) {
            Ok(place) => tree.withdraw(&place, id, condition.as_ref()),
            Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        };
        self.0.run("delete", self.0.access.question(), work).await
    }

    async fn leftovers(&self, _: Duration) -> Result<Vec<Leftover>, StoreError> {
        Ok(Vec::new())
    }

    async fn look(&self, path: &[u8]) -> Result<Option<Seen>, StoreError> {
        let path = path.to_vec();
        let work = move |tree: &Tree| match tree.place(&path) {
            Ok(place) => tree.seen(&place),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        self.0.run("head", self.0.access.question(), work).await
    }

    async fn delete(&self, path: &[u8], condition: &Condition) -> Result<(), StoreError> {
        let (path, condition) = (path.to_vec(), condition.clone());
        let work = move |tree: &Tree| {
            let place = tree.place(&path)?;
            match (&condition, tree.stat(&place)?) {
                (_, None) => return Ok(()),
                (Condition::Is(wanted), Some(found)) if version(&found) != *wanted => {
                    return Err(tree.conflict(&place, Some(&found)));
                }
                _ => tree.remove(&place, place.name)?,
            }
            tree.sync_directory(&place)
        };
        self.0.run("delete", self.0.access.question(), work).await
    }

    async fn copy(
        &self,
        from: &[u8],
        version: &Version,
        _: u64,
        to: &[u8],
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        let (from, to, wanted) = (from.to_vec(), to.to_vec(), version.clone());
        let (write, condition) = (*write, condition.clone());
        let work = move |tree: &Tree, progress: &Progress| {
            let place = tree.place(&to)?;
            // A second attempt finds its source gone, or another, where it is its own target.
            if let Some(written) = tree.made_before(&place, write.id, &condition)? {
                return Ok(written);
            }
            let source = tree.open_file(&from, &wanted)?.file;
            tree.make(&place, &write, &condition, |file| {
                tree.duplicate(&from, &wanted, &source, file, progress)
            })
        };
        self.0.run_on("copy", work).await
    }

    async fn make_dir(&self, path: &[u8], write: &Write) -> Result<(), StoreError> {
        let (path, attributes) = (path.to_vec(), write.attributes);
        let work = move |tree: &Tree| tree.make_dir(&path, &attributes);
        self.0.run("put", self.0.access.question(), work).await
    }

    async fn remove_dir(&self, path: &[u8]) -> Result<(), StoreError> {
        let path = path.to_vec();
        self.0.run("delete", self.0.access.question(), move |tree| tree.remove_dir(&path)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::sync::OnceLock;

    /// A node that is gone has left it, with all that it knew.
    #[test]
    fn a_directory_with_nothing_in_it_but_what_a_dead_writer_has_left_can_be_removed() {
        let at = tempfile::tempdir().unwrap();
        let dir = at.path().join("dir");
        fs::create_dir(&dir).unwrap();
        let left = |n: u8| dir.join(temporary(WriteId::new([n; 16])));
        fs::write(left(1), "half").unwrap();
        let tree = Tree { path: at.path().to_owned(), root: OnceLock::new() };
        assert!(!tree.remove_temporaries(b"dir", LEFT_AFTER).unwrap(), "it may be going on");
        assert!(left(1).exists());
        fs::write(dir.join("theirs"), "all").unwrap();
        assert!(!tree.remove_temporaries(b"dir", Duration::ZERO).unwrap());
        assert!(left(1).exists() && dir.join("theirs").exists());
        fs::remove_file(dir.join("theirs")).unwrap();
        fs::write(left(2), "half").unwrap();
        assert!(tree.remove_temporaries(b"dir", Duration::ZERO).unwrap());
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        let linked = dir.join(temporary(WriteId::new([3; 16])));
        std::os::unix::fs::symlink(at.path(), &linked).unwrap();
        assert!(tree.remove_temporaries(b"dir", Duration::ZERO).unwrap() && at.path().exists());
    }
}
